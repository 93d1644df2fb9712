/* chart.c - the pictures of an op: each call's share of the ceiling by its bytes, and its time by its rows. */
#include "report.h"

#include <math.h>
#include <string.h>

enum { WIDTH = 460, HEIGHT = 290, LEFT = 56, RIGHT = 26, TOP = 34, BOTTOM = 46, COLOURS = 6, BOXES_MAX = 1024 };

typedef struct picture {
    const char *name, *x_name, *y_name;
    double (*x)(const adze_bench_row *), (*y)(const adze_bench_row *);
    int percent; /* y is a share, from 0; otherwise it is a time on a logarithmic scale, as x always is */
} picture;

typedef struct axes {
    double x0, x1, y0, y1; /* decimal logarithms, but for shares */
} axes;

typedef struct box { /* that a dot or a name takes */
    double left, top, right, bottom;
} box;
typedef struct boxes {
    box at[BOXES_MAX];
    int count;
} boxes;

static int same_op(const adze_report *r, int a, int b)
{
    return strcmp(r->rows[a].op, r->rows[b].op) == 0;
}

/* The kernels of an op in the order of their rows; the place in that order is the colour. */
int adze_chart_colour(const adze_report *r, int row)
{
    const char *seen[COLOURS];
    int n = 0;
    for (int i = 0; i < r->count && n < COLOURS; i++) {
        if (!same_op(r, i, row))
            continue;
        int at = 0;
        while (at < n && strcmp(seen[at], r->rows[i].kernel) != 0)
            at++;
        if (strcmp(r->rows[i].kernel, r->rows[row].kernel) == 0)
            return at;
        if (at == n)
            seen[n++] = r->rows[i].kernel;
    }
    return COLOURS - 1;
}

/* Whether b belongs on a line with a: the same call with another number of rows. */
static int same_series(const adze_bench_row *a, const adze_bench_row *b)
{
    return strcmp(a->op, b->op) == 0 && strcmp(a->kernel, b->kernel) == 0 && strcmp(a->dtype, b->dtype) == 0 &&
           a->dim == b->dim && strcmp(a->shape + strcspn(a->shape, " "), b->shape + strcspn(b->shape, " ")) == 0;
}

static double x_bytes(const adze_bench_row *row)
{
    return (double)(row->read + row->written);
}
static double x_rows(const adze_bench_row *row)
{
    return (double)(row->rows > 0 ? row->rows : 1);
}
static double y_share(const adze_bench_row *row)
{
    return row->share;
}
static double y_us(const adze_bench_row *row)
{
    return row->us;
}

static void widen(double *low, double *high, double value)
{
    *low = fmin(*low, floor(value + 1e-9));
    *high = fmax(*high, ceil(value - 1e-9));
}

static axes axes_of(const adze_report *r, int op, const picture *p)
{
    axes a = {99, -99, 99, -99};
    for (int i = 0; i < r->count; i++)
        if (same_op(r, i, op)) {
            widen(&a.x0, &a.x1, log10(p->x(&r->rows[i])));
            widen(&a.y0, &a.y1, log10(p->y(&r->rows[i])));
            for (int k = 0; k < r->rows[i].peer_count; k++)
                widen(&a.y0, &a.y1, log10(r->rows[i].peers[k].us));
        }
    a.x1 += a.x1 == a.x0;
    a.y1 += a.y1 == a.y0;
    if (p->percent)
        a.y0 = 0, a.y1 = 1.1;
    return a;
}

static double place_x(const axes *a, double x)
{
    return LEFT + (log10(x) - a->x0) / (a->x1 - a->x0) * (WIDTH - LEFT - RIGHT);
}
static double place_y(const axes *a, const picture *p, double y)
{
    const double at = ((p->percent ? fmin(y, a->y1) : log10(y)) - a->y0) / (a->y1 - a->y0);
    return HEIGHT - BOTTOM - at * (HEIGHT - TOP - BOTTOM);
}

/* 10^exponent with a unit of three decades each: rows, bytes, or a time that starts with microseconds. */
static void put_power(FILE *f, int exponent, const char *const *units)
{
    static const char *const digits[3] = {"1", "10", "100"};
    if (exponent < 0 || exponent > 11)
        fprintf(f, "%g%s", pow(10, exponent), units[0]);
    else
        fprintf(f, "%s%s", digits[exponent % 3], units[exponent / 3]);
}

static void put_axes(FILE *f, const axes *a, const picture *p)
{
    static const char *const counts[] = {"", "k", "M", "G"}, *const bytes[] = {" B", " KB", " MB", " GB"},
                             *const times[] = {" us", " ms", " s", " ks"};
    fprintf(f, "<text class=\"name\" x=\"%d\" y=\"18\">%s</text>\n", LEFT, p->name);
    for (int e = (int)a->x0; e <= (int)a->x1; e++) {
        const double x = place_x(a, pow(10, e));
        fprintf(f, "<path class=\"grid\" d=\"M%.1f %dV%d\"/><text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">", x,
                TOP, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 17);
        put_power(f, e, p->percent ? bytes : counts);
        fprintf(f, "</text>\n");
    }
    for (int e = (int)a->y0; e <= (p->percent ? 4 : (int)a->y1); e++) {
        const double value = p->percent ? 0.25 * e : pow(10, e), y = place_y(a, p, value);
        fprintf(f, "<path class=\"%s\" d=\"M%d %.1fH%d\"/><text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">",
                p->percent && e == 4 ? "limit" : "grid", LEFT, y, WIDTH - RIGHT, LEFT - 7, y + 4);
        if (p->percent)
            fprintf(f, "%d%%", 25 * e);
        else
            put_power(f, e, times);
        fprintf(f, "</text>\n");
    }
    fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s</text>\n", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8,
            p->x_name);
    fprintf(f, "<text x=\"%d\" y=\"18\" text-anchor=\"end\">%s</text>\n", WIDTH - RIGHT, p->y_name);
}

/* The next row of the series to the right of x, or -1. */
static int next_in_series(const adze_report *r, const picture *p, int row, double x)
{
    int best = -1;
    for (int i = 0; i < r->count; i++)
        if (same_series(&r->rows[i], &r->rows[row]) && p->x(&r->rows[i]) > x &&
            (best < 0 || p->x(&r->rows[i]) < p->x(&r->rows[best])))
            best = i;
    return best;
}

/* The attributes that the filters of the page read. */
static void put_filter(FILE *f, const adze_bench_row *row)
{
    fprintf(f, " data-op=\"%s\" data-dtype=\"%s\" data-kernel=\"%s\"", row->op, row->dtype, row->kernel);
}

static void put_peers(FILE *f, const adze_bench_row *row, const axes *a, const picture *p)
{
    const double x = place_x(a, p->x(row));
    for (int k = 0; k < row->peer_count && !p->percent; k++) {
        fprintf(f, "<circle class=\"peer\"");
        put_filter(f, row);
        fprintf(f, " cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\"><title>%s, %s %s: ", x, place_y(a, p, row->peers[k].us),
                row->peers[k].name, row->dtype, row->shape);
        adze_html_time(f, row->peers[k].us);
        fprintf(f, "</title></circle>\n");
    }
}

/* A dot is a link to its row in the table. */
static void put_dot(FILE *f, const adze_report *r, int i, const axes *a, const picture *p)
{
    const adze_bench_row *row = &r->rows[i];
    const int next = next_in_series(r, p, i, p->x(row)), colour = adze_chart_colour(r, i);
    const double x = place_x(a, p->x(row)), y = place_y(a, p, p->y(row));
    if (next >= 0) {
        fprintf(f, "<path");
        put_filter(f, row);
        fprintf(f, " d=\"M%.1f %.1fL%.1f %.1f\" style=\"stroke:var(--c%d)\" stroke-opacity=\".45\"/>\n", x, y,
                place_x(a, p->x(&r->rows[next])), place_y(a, p, p->y(&r->rows[next])), colour);
    }
    put_peers(f, row, a, p);
    fprintf(f, "<a href=\"#row%d\"", i);
    put_filter(f, row);
    fprintf(f, "><circle cx=\"%.1f\" cy=\"%.1f\" r=\"4.5\" style=\"fill:var(--c%d)\"><title>%s %s %s: ", x, y, colour,
            row->kernel, row->dtype, row->shape);
    adze_html_time(f, row->us);
    fprintf(f, ", %.1f GB/s, %.0f%% of the ceiling</title></circle></a>\n", row->gbps, 100 * row->share);
}

static int is_free(const boxes *taken, const box *b)
{
    if (b->left < LEFT || b->right > WIDTH || b->top < TOP - 8 || b->bottom > HEIGHT - BOTTOM)
        return 0;
    for (int i = 0; i < taken->count; i++) {
        const box *t = &taken->at[i];
        if (b->left < t->right && t->left < b->right && b->top < t->bottom && t->top < b->bottom)
            return 0;
    }
    return 1;
}

static void take(boxes *taken, box b)
{
    if (taken->count < BOXES_MAX)
        taken->at[taken->count++] = b;
}

/* The shape of a call next to its dot, on the first of four sides with room for it. */
static void put_name(FILE *f, const adze_bench_row *row, double x, double y, boxes *taken)
{
    const int n = (int)strcspn(row->shape, " ");
    const double width = 5.6 * n, half = width / 2;
    const struct {
        double x, y;
        const char *anchor;
        box taken;
    } sides[] = {{x + 8, y + 4, "start", {x + 7, y - 6, x + 9 + width, y + 6}},
                 {x - 8, y + 4, "end", {x - 9 - width, y - 6, x - 7, y + 6}},
                 {x, y - 8, "middle", {x - half, y - 18, x + half, y - 6}},
                 {x, y + 16, "middle", {x - half, y + 6, x + half, y + 18}}};
    for (size_t i = 0; i < sizeof sides / sizeof *sides; i++)
        if (is_free(taken, &sides[i].taken)) {
            take(taken, sides[i].taken);
            fprintf(f, "<text class=\"dot\"");
            put_filter(f, row);
            fprintf(f, " x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%.*s</text>\n", sides[i].x, sides[i].y,
                    sides[i].anchor, n, row->shape);
            return;
        }
}

static void put_picture(FILE *f, const adze_report *r, int op, const picture *p)
{
    const axes a = axes_of(r, op, p);
    boxes taken;
    taken.count = 0;
    fprintf(f, "<figure><svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"%s of %s\">\n", WIDTH, HEIGHT, p->name,
            r->rows[op].op);
    put_axes(f, &a, p);
    for (int i = op; i < r->count; i++)
        if (same_op(r, i, op)) {
            const double x = place_x(&a, p->x(&r->rows[i])), y = place_y(&a, p, p->y(&r->rows[i]));
            put_dot(f, r, i, &a, p);
            take(&taken, (box){x - 5, y - 5, x + 5, y + 5});
        }
    for (int i = op; i < r->count; i++)
        if (same_op(r, i, op))
            put_name(f, &r->rows[i], place_x(&a, p->x(&r->rows[i])), place_y(&a, p, p->y(&r->rows[i])), &taken);
    fprintf(f, "</svg></figure>\n");
}

void adze_chart_write(FILE *f, const adze_report *r, int first)
{
    static const picture share = {"Share of the ceiling", "bytes of a call", "higher is better", x_bytes, y_share, 1};
    static const picture time = {"Time of a call", "rows", "lower is better", x_rows, y_us, 0};
    fprintf(f, "<div class=\"pair\">\n");
    put_picture(f, r, first, &share);
    put_picture(f, r, first, &time);
    fprintf(f, "</div>\n");
}
