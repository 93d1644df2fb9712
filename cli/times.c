/* times.c - the times of variants: as a file, and as rows of the table that the library is built with. */
#include "cli.h"
#include "tune.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double gain_least = 0.02; /* of a variant over the kernel's own choice, as a share of the time */

static const char table_head[] =
    "/* tuned.h - the calls that `adze tune OP --table src/tuned.h` timed with every variant. It writes this file, "
    "a\n"
    "   row per call, which may be more than 600 lines. A row changes the choice of a kernel where its two names\n"
    "   differ.\n\n"
    "   CARD(card, SMs, op, date, driver, commit)\n"
    "   TUNED(op, form, rows from, to, the other sizes of the problem, fastest variant, the kernel's choice, us of\n"
    "   each) */\n"
    "/* clang-format off */\n";

static int cannot(const char *path, const char *what)
{
    fprintf(stderr, "adze tune: '%s' %s\n", path, what);
    return 0;
}

static int finish(FILE *f, const char *path)
{
    const int bad = ferror(f);
    return fclose(f) == 0 && !bad ? 1 : cannot(path, "cannot be written");
}

adze_timed_call *adze_times_add(adze_times *t)
{
    adze_timed_call *grown = realloc(t->calls, (size_t)(t->count + 1) * sizeof *grown);
    if (!grown)
        return NULL;
    t->calls = grown;
    memset(&grown[t->count], 0, sizeof *grown);
    return &grown[t->count++];
}

void adze_times_free(adze_times *t)
{
    free(t->calls);
    t->calls = NULL;
    t->count = 0;
}

/* ---- Times as a file ---- */

int adze_times_write(const adze_times *t, const char *path)
{
    FILE *f = fopen(path, "w");
    if (!f)
        return cannot(path, "cannot be written");
    fprintf(f, "adze tune %s\nSMs %d\ncard %s\ndate %s\ndriver %s\ncommit %s\n", t->op, t->sm_count, t->card, t->date,
            t->driver, t->commit);
    for (const adze_timed_call *c = t->calls; c < t->calls + t->count; c++) {
        fprintf(f, "call %d %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %s %s\n", c->form, c->size[0], c->size[1],
                c->size[2], c->size[3], c->before, c->line);
        for (int v = 0; v < c->count; v++)
            fprintf(f, "time %s %.4f %.4f\n", c->variant[v].name, c->variant[v].us, c->variant[v].spread);
    }
    return finish(f, path);
}

/* The text of a line `name text`, or NULL. */
static const char *value_of(const char *line, const char *name)
{
    const size_t n = strlen(name);
    return strncmp(line, name, n) == 0 && line[n] == ' ' ? line + n + 1 : NULL;
}

static int sizes_hold(const adze_timed_call *c)
{
    int hold = 1;
    for (int i = 0; i < ADZE_SIZES; i++)
        hold = hold && c->size[i] >= 0 && c->size[i] <= (int64_t)1 << 40;
    return hold;
}

/* One line of the file; 0 when it is none, or would end a text or a comment of the table. */
static int read_line(adze_times *t, const char *line)
{
    const struct {
        const char *name;
        char *to;
        size_t size;
    } texts[] = {{"adze tune", t->op, sizeof t->op},
                 {"card", t->card, sizeof t->card},
                 {"date", t->date, sizeof t->date},
                 {"driver", t->driver, sizeof t->driver},
                 {"commit", t->commit, sizeof t->commit}};
    if (strpbrk(line, "\"\\") || strstr(line, "*/"))
        return 0;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (value_of(line, texts[i].name)) {
            snprintf(texts[i].to, texts[i].size, "%s", value_of(line, texts[i].name));
            return 1;
        }
    if (value_of(line, "SMs"))
        return sscanf(line, "SMs %d", &t->sm_count) == 1;
    if (value_of(line, "call")) {
        adze_timed_call *c = adze_times_add(t);
        return c &&
               sscanf(line, "call %d %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %31s %1023[^\n]", &c->form,
                      &c->size[0], &c->size[1], &c->size[2], &c->size[3], c->before, c->line) == 7 &&
               sizes_hold(c);
    }
    adze_timed_call *c = t->count ? &t->calls[t->count - 1] : NULL;
    if (!c || c->count == ADZE_TIMES_VARIANTS)
        return 0;
    const int v = c->count++;
    return sscanf(line, "time %31s %lf %lf", c->variant[v].name, &c->variant[v].us, &c->variant[v].spread) == 3 &&
           c->variant[v].us > 0;
}

int adze_times_read(adze_times *t, const char *path)
{
    memset(t, 0, sizeof *t);
    char *text = adze_cli_read(path);
    if (!text)
        return cannot(path, "cannot be read");
    int good = strncmp(text, "adze tune ", 10) == 0;
    for (char *line = text, *next; good && *line; line = next) {
        next = line + strcspn(line, "\n");
        if (*next)
            *next++ = '\0';
        good = read_line(t, line);
    }
    free(text);
    if (!good || !t->op[0] || !t->card[0])
        adze_times_free(t);
    return good && t->op[0] && t->card[0] ? 1 : cannot(path, "was not written by adze tune --record");
}

/* ---- The fastest variants ---- */

static int find(const adze_timed_call *c, const char *name)
{
    for (int v = 0; v < c->count; v++)
        if (strcmp(c->variant[v].name, name) == 0)
            return v;
    return -1;
}

/* The kernel's own choice stays, unless another variant is faster by more than noise. -1: the choice was not timed.
 */
static int fastest(const adze_timed_call *c)
{
    const int before = find(c, c->before);
    int best = before;
    for (int v = 0; v < c->count && before >= 0; v++)
        if (c->variant[v].us < c->variant[best].us)
            best = v;
    if (best < 0)
        return -1;
    const double us = c->variant[before].us, gain = us - c->variant[best].us;
    const double noise = us * c->variant[before].spread + c->variant[best].us * c->variant[best].spread;
    return gain > us * gain_least && gain > noise ? best : before;
}

static int same_problem(const adze_timed_call *a, const adze_timed_call *b)
{
    return a->form == b->form && memcmp(a->size + 1, b->size + 1, sizeof a->size - sizeof *a->size) == 0;
}

/* The first size up to which a call stands for others: half way, as a factor, to the next larger one of the same
   problem; twice its own size if there is none. */
static int64_t reach(const adze_times *t, const adze_timed_call *c)
{
    int64_t next = 0;
    for (const adze_timed_call *o = t->calls; o < t->calls + t->count; o++)
        if (same_problem(o, c) && o->size[0] > c->size[0] && (!next || o->size[0] < next))
            next = o->size[0];
    if (!next)
        return 2 * c->size[0];
    const double both = (double)c->size[0] * (double)next;
    int64_t most = (int64_t)sqrt(both);
    while ((double)(most + 1) * (double)(most + 1) <= both)
        most++;
    while (most > c->size[0] && (double)most * (double)most > both)
        most--;
    return most;
}

/* From where on: what the next smaller one does not reach. */
static int64_t begin(const adze_times *t, const adze_timed_call *c)
{
    const adze_timed_call *last = NULL;
    for (const adze_timed_call *o = t->calls; o < t->calls + t->count; o++)
        if (same_problem(o, c) && o->size[0] < c->size[0] && (!last || o->size[0] > last->size[0]))
            last = o;
    return last ? reach(t, last) + 1 : (c->size[0] + 1) / 2;
}

/* Whether an earlier line is the same problem of the same size. */
static int repeats(const adze_times *t, const adze_timed_call *c)
{
    for (const adze_timed_call *o = t->calls; o < c; o++)
        if (same_problem(o, c) && o->size[0] == c->size[0])
            return 1;
    return 0;
}

void adze_times_report(const adze_times *t)
{
    for (const adze_timed_call *c = t->calls; c < t->calls + t->count; c++) {
        const int before = find(c, c->before), best = fastest(c);
        if (best < 0)
            printf("%-24s was not timed                            %s\n", c->before, c->line);
        else if (best == before)
            printf("%-24s %9.2f us, stays; %d variants      %s\n", c->before, c->variant[before].us, c->count,
                   c->line);
        else
            printf("%-24s %9.2f us, %s %.2f us is faster  %s\n", c->before, c->variant[before].us,
                   c->variant[best].name, c->variant[best].us, c->line);
    }
}

/* ---- The table ---- */

static void write_rows(const adze_times *t, FILE *f)
{
    fprintf(f, "CARD(\"%s\", %d, %s, \"%s\", \"%s\", \"%s\")\n", t->card, t->sm_count, t->op, t->date, t->driver,
            t->commit);
    for (const adze_timed_call *c = t->calls; c < t->calls + t->count; c++) {
        const int before = find(c, c->before), best = fastest(c);
        if (best < 0 || repeats(t, c))
            continue;
        fprintf(f,
                "TUNED(%s, %d, %" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64
                ", \"%s\", \"%s\", %.3f, %.3f) /* %s */\n",
                t->op, c->form, begin(t, c), reach(t, c), c->size[1], c->size[2], c->size[3], c->variant[best].name,
                c->before, c->variant[best].us, c->variant[before].us, c->line);
    }
}

/* Whether a line of the table begins the rows of this op and card. */
static int begins(const adze_times *t, const char *line)
{
    char start[256];
    snprintf(start, sizeof start, "CARD(\"%s\", %d, %s, ", t->card, t->sm_count, t->op);
    return strncmp(line, start, strlen(start)) == 0;
}

int adze_table_write(const adze_times *t, const char *path)
{
    char *old = adze_cli_read(path); /* NULL: there is none yet */
    if (old && *old && strncmp(old, "/* tuned.h", 10) != 0) {
        free(old);
        return cannot(path, "is not a table of adze tune, and is left as it is");
    }
    FILE *f = fopen(path, "w");
    if (!f) {
        free(old);
        return cannot(path, "cannot be written");
    }
    fputs(table_head, f);
    int keep = 0;
    for (const char *line = old; line && *line;) {
        const size_t n = strcspn(line, "\n") + (line[strcspn(line, "\n")] == '\n');
        if (strncmp(line, "CARD(", 5) == 0)
            keep = !begins(t, line);
        if (keep)
            fwrite(line, 1, n, f);
        line += n;
    }
    free(old);
    write_rows(t, f);
    return finish(f, path);
}
