/* html.c - the page of `adze bench --html`: two pictures and a table per op, in one file that asks for nothing. */
#include "html.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { WIDTH = 460, HEIGHT = 290, LEFT = 50, RIGHT = 26, TOP = 34, BOTTOM = 46, COLOURS = 6 };

static const char style[] =
    "<style>\n"
    ":root{--page:#fbfaf7;--card:#fff;--ink:#22252a;--soft:#6a707a;--line:#e3e1da;--c0:#0b6bcb;--c1:#d1520f;"
    "--c2:#2b8a3e;--c3:#8b3fc7;--c4:#b3870a;--c5:#c2255c}\n"
    "@media(prefers-color-scheme:dark){:root{--page:#15171a;--card:#1d2024;--ink:#e8e6e1;--soft:#9aa1ab;"
    "--line:#343940;--c0:#5aa9f5;--c1:#ff9457;--c2:#63c877;--c3:#c58cf2;--c4:#e3b53c;--c5:#f27aa2}}\n"
    "*{box-sizing:border-box}\n"
    "body{margin:0 auto;padding:24px 16px 64px;max-width:1180px;background:var(--page);color:var(--ink);"
    "font:16px/1.5 system-ui,-apple-system,\"Segoe UI\",Roboto,sans-serif}\n"
    "h1{font-size:1.7rem;line-height:1.2;margin:0 0 4px}h2{font-size:1.25rem;margin:44px 0 12px;"
    "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}\n"
    "p{margin:4px 0;color:var(--soft);overflow-wrap:anywhere;max-width:80ch}nav{margin:16px 0;display:flex;"
    "flex-wrap:wrap;gap:8px}nav a{padding:2px 10px;border:1px solid var(--line);border-radius:99px;"
    "color:var(--ink);text-decoration:none;background:var(--card)}nav a:focus-visible,nav a:hover{"
    "border-color:var(--c0)}\n"
    ".cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(120px,1fr));gap:10px;margin:18px 0}"
    ".cards div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 14px;"
    "color:var(--soft);font-size:.85rem}.cards b{display:block;font-size:1.3rem;color:var(--ink);"
    "font-variant-numeric:tabular-nums}\n"
    ".pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:14px}"
    "figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:8px}"
    "svg{display:block;width:100%;height:auto}svg text{font:13px system-ui,sans-serif;fill:var(--soft)}"
    "svg .name{font-size:15px;fill:var(--ink)}svg .grid{stroke:var(--line)}"
    "svg .limit{stroke:var(--soft);stroke-dasharray:5 4}\n"
    ".keys{display:flex;flex-wrap:wrap;gap:4px 18px;margin:8px 0;font-size:.9rem;color:var(--soft)}"
    ".keys i{display:inline-block;width:10px;height:10px;border-radius:50%;margin-right:6px}\n"
    ".scroll{overflow-x:auto;border:1px solid var(--line);border-radius:10px;background:var(--card);"
    "margin-top:14px}table{border-collapse:collapse;width:100%;font-size:.88rem;white-space:nowrap;"
    "font-variant-numeric:tabular-nums}th,td{padding:6px 12px;text-align:right;border-top:1px solid var(--line)}"
    "th{border-top:0;color:var(--soft);font-weight:600}th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}"
    "td:nth-child(4){background:linear-gradient(90deg,color-mix(in srgb,var(--c0) 22%,transparent) var(--share),"
    "transparent var(--share))}td:first-child{white-space:normal;min-width:13ch}"
    "@media(max-width:600px){th,td{padding:5px 8px}table{font-size:.82rem}}\n"
    "</style>\n";

static void put_text(FILE *f, const char *text)
{
    for (; *text; text++)
        if (*text == '<' || *text == '>' || *text == '&')
            fprintf(f, "&#%d;", *text);
        else
            fputc(*text, f);
}

static int same_op(const adze_report *r, int a, int b)
{
    return strcmp(r->rows[a].op, r->rows[b].op) == 0;
}

/* The kernels of an op in the order of their rows; the place in that order is the colour. */
static int colour_of(const adze_report *r, int row)
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

/* ---- A picture ---- */

typedef struct picture {
    const char *name, *x_name, *y_name;
    double (*x)(const adze_bench_row *), (*y)(const adze_bench_row *);
    int percent; /* y is a share, from 0; otherwise it has a logarithmic scale, as x always has */
} picture;

typedef struct axes {
    double x0, x1, y0, y1; /* decimal logarithms, but for shares */
} axes;

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

/* 10^exponent as people say it. */
static void put_power(FILE *f, int exponent, int bytes)
{
    static const char *const unit[2][4] = {{"", "k", "M", "G"}, {" B", " KB", " MB", " GB"}};
    static const char *const digits[3] = {"1", "10", "100"};
    if (exponent < 0 || exponent > 11)
        fprintf(f, "%g", pow(10, exponent));
    else
        fprintf(f, "%s%s", digits[exponent % 3], unit[bytes][exponent / 3]);
}

static void put_axes(FILE *f, const axes *a, const picture *p)
{
    fprintf(f, "<text class=\"name\" x=\"%d\" y=\"18\">%s</text>\n", LEFT, p->name);
    for (int e = (int)a->x0; e <= (int)a->x1; e++) {
        const double x = place_x(a, pow(10, e));
        fprintf(f, "<path class=\"grid\" d=\"M%.1f %dV%d\"/><text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">", x,
                TOP, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 17);
        put_power(f, e, p->percent);
        fprintf(f, "</text>\n");
    }
    for (int e = (int)a->y0; e <= (p->percent ? 4 : (int)a->y1); e++) {
        const double value = p->percent ? 0.25 * e : pow(10, e), y = place_y(a, p, value);
        fprintf(f, "<path class=\"%s\" d=\"M%d %.1fH%d\"/><text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">",
                p->percent && e == 4 ? "limit" : "grid", LEFT, y, WIDTH - RIGHT, LEFT - 7, y + 4);
        if (p->percent)
            fprintf(f, "%d%%</text>\n", 25 * e);
        else {
            put_power(f, e, 0);
            fprintf(f, "</text>\n");
        }
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

static void put_picture(FILE *f, const adze_report *r, int op, const picture *p)
{
    const axes a = axes_of(r, op, p);
    fprintf(f, "<figure><svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"%s of %s\">\n", WIDTH, HEIGHT, p->name,
            r->rows[op].op);
    put_axes(f, &a, p);
    for (int i = op; i < r->count; i++) {
        const adze_bench_row *row = &r->rows[i];
        if (!same_op(r, i, op))
            continue;
        const int next = next_in_series(r, p, i, p->x(row)), colour = colour_of(r, i);
        const double x = place_x(&a, p->x(row)), y = place_y(&a, p, p->y(row));
        if (next >= 0)
            fprintf(f, "<path d=\"M%.1f %.1fL%.1f %.1f\" style=\"stroke:var(--c%d)\" stroke-opacity=\".45\"/>\n", x,
                    y, place_x(&a, p->x(&r->rows[next])), place_y(&a, p, p->y(&r->rows[next])), colour);
        fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4.5\" style=\"fill:var(--c%d)\"><title>%s %s %s: ", x, y,
                colour, row->kernel, row->dtype, row->shape);
        fprintf(f, "%.2f us, %.1f GB/s, %.0f%% of the ceiling</title></circle>\n", row->us, row->gbps,
                100 * row->share);
    }
    fprintf(f, "</svg></figure>\n");
}

/* ---- The page ---- */

static void put_head(FILE *f, const adze_report *r)
{
    const adze_machine *m = &r->machine;
    static const char *const names[ADZE_PASSES] = {"read", "two reads to one write", "copy", "write"};
    fprintf(f, "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n");
    fprintf(f, "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
               "<meta name=\"color-scheme\" content=\"light dark\"><title>adze bench: ");
    put_text(f, m->sm ? m->gpu : m->cpu);
    fprintf(f, "</title>\n%s</head><body>\n<h1>adze on ", style);
    put_text(f, m->sm ? m->gpu : m->cpu);
    fprintf(f, "</h1>\n<p>");
    if (m->sm)
        fprintf(f, "sm_%d, %d SMs; driver %s; clocks %s; ", m->sm, m->sm_count, m->driver, m->clocks);
    else
        fprintf(f, "%s, %d threads on %d cores; ", m->isa, m->threads, m->cores);
    fprintf(f, "commit %s; %s</p>\n", adze_commit(), r->date);
    fprintf(f,
            "<p>Each call was held to its definition, then timed cold. Its share is of what plain loops reached in "
            "the same run with the same mix of reads and writes:</p>\n<div class=\"cards\">");
    for (int i = 0; i < ADZE_PASSES; i++)
        fprintf(f, "<div><b>%.4g</b>GB/s, %s</div>", r->ceilings.rate[i], names[i]);
    fprintf(f, "</div>\n<nav>");
    for (int i = 0; i < r->count; i++)
        if (i == 0 || !same_op(r, i, i - 1))
            fprintf(f, "<a href=\"#%s\">%s</a>", r->rows[i].op, r->rows[i].op);
    fprintf(f, "</nav>\n");
}

static void put_table(FILE *f, const adze_report *r, int op)
{
    const int alone = r->machine.sm > 0;
    fprintf(f,
            "<div class=\"scroll\" tabindex=\"0\"><table><tr><th>case</th><th>kernel</th><th>us</th>"
            "<th>share</th><th>GB/s</th>%s<th>spread</th><th>dtype</th></tr>\n",
            alone ? "<th>alone, us</th>" : "");
    for (int i = op; i < r->count; i++) {
        const adze_bench_row *row = &r->rows[i];
        if (!same_op(r, i, op))
            continue;
        fprintf(f, "<tr><td>%s</td><td>%s</td><td>%.2f</td><td style=\"--share:%.0f%%\">%.1f%%</td><td>%.1f</td>",
                row->shape, row->kernel, row->us, 100 * fmin(row->share, 1), 100 * row->share, row->gbps);
        if (alone)
            fprintf(f, "<td>%.2f</td>", row->us_alone);
        fprintf(f, "<td>%.1f%%</td><td>%s</td></tr>\n", 100 * row->spread, row->dtype);
    }
    fprintf(f, "</table></div>\n");
}

static void put_keys(FILE *f, const adze_report *r, int op)
{
    fprintf(f, "<div class=\"keys\">");
    for (int i = op, next = 0; i < r->count; i++)
        if (same_op(r, i, op) && colour_of(r, i) == next)
            fprintf(f, "<span><i style=\"background:var(--c%d)\"></i>%s</span>", next++, r->rows[i].kernel);
    fprintf(f, "<span>lines join calls that differ in rows alone</span></div>\n");
}

int adze_html_write(const adze_report *r, const char *path)
{
    static const picture share = {"Share of the ceiling", "bytes of a call", "higher is better", x_bytes, y_share, 1};
    static const picture time = {"Time of a call, us", "rows", "lower is better", x_rows, y_us, 0};
    FILE *f = fopen(path, "w");
    if (!f)
        return 0;
    put_head(f, r);
    for (int i = 0; i < r->count; i++) {
        if (i > 0 && same_op(r, i, i - 1))
            continue;
        fprintf(f, "<section id=\"%s\"><h2>%s</h2>\n", r->rows[i].op, r->rows[i].op);
        put_keys(f, r, i);
        fprintf(f, "<div class=\"pair\">\n");
        put_picture(f, r, i, &share);
        put_picture(f, r, i, &time);
        fprintf(f, "</div>\n");
        put_table(f, r, i);
        fprintf(f, "</section>\n");
    }
    fprintf(f, "</body></html>\n");
    const int whole = !ferror(f);
    return fclose(f) == 0 && whole;
}
