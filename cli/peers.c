/* peers.c - times of PyTorch and others, from a record of bench/compare_torch.py, for the rows of the same calls. */
#include "json.h"
#include "report.h"

#include <stdlib.h>
#include <string.h>

/* One row of the record: what was called, and how long each implementation took. */
typedef struct recorded {
    char op[64], dtype[8], line[ADZE_LINE_TEXT];
    double bytes;
    adze_peer peers[ADZE_PEERS_MAX];
    int count;
} recorded;

/* The members of `"us": {"eager": 14.9, ...}`, but for adze's own. */
static int read_times(recorded *r, const char *json)
{
    const char *at = strstr(json, "\"us\": {"), *end = at ? strchr(at, '}') : NULL;
    if (!end)
        return 0;
    for (at = strchr(at, '{'); (at = strchr(at, '"')) != NULL && at < end; at += strcspn(at, ",}")) {
        adze_peer peer;
        const size_t n = strcspn(at + 1, "\"");
        snprintf(peer.name, sizeof peer.name, "%.*s", (int)n, at + 1);
        at += n + 2;
        at += strspn(at, ": ");
        peer.us = strtod(at, NULL);
        if (peer.us > 0 && strcmp(peer.name, "adze") != 0 && r->count < ADZE_PEERS_MAX)
            r->peers[r->count++] = peer;
    }
    return 1;
}

static int read_row(recorded *r, const char *json)
{
    memset(r, 0, sizeof *r);
    adze_json_text(json, "line", r->line, sizeof r->line);
    return adze_json_text(json, "op", r->op, sizeof r->op) &&
           adze_json_text(json, "dtype", r->dtype, sizeof r->dtype) && adze_json_number(json, "bytes", &r->bytes) &&
           read_times(r, json);
}

/* The same line; or, where the record has none, a call of the same op and dtype that moves the same bytes. */
static int same_call(const recorded *r, const adze_bench_row *row)
{
    if (r->line[0])
        return strcmp(r->line, row->line) == 0;
    const char *const op = strncmp(r->op, "silu_mul", 8) == 0 ? "glu" : r->op;
    const size_t n = strcspn(op, " ");
    return strlen(row->op) == n && memcmp(row->op, op, n) == 0 && strcmp(row->dtype, r->dtype) == 0 &&
           r->bytes == (double)(row->read + row->written);
}

static void add_peers(adze_report *report, const recorded *r)
{
    for (int i = 0; i < report->count; i++)
        if (same_call(r, &report->rows[i])) {
            memcpy(report->rows[i].peers, r->peers, sizeof r->peers);
            report->rows[i].peer_count = r->count;
        }
}

/* Whether the record is one, of this machine. */
static int is_ours(const adze_report *report, const char *json, const char *path)
{
    const adze_machine *m = &report->machine;
    char name[128] = "";
    if (!strstr(json, "\"adze_compare\": ") && !strstr(json, "\"adze_sweep\": "))
        fprintf(stderr, "adze bench: '%s' was not written by bench/compare_torch.py --json\n", path);
    else if (!adze_json_text(json, m->sm ? "gpu" : "cpu", name, sizeof name) ||
             strcmp(name, m->sm ? m->gpu : m->cpu) != 0)
        fprintf(stderr, "adze bench: '%s' is of another machine: %s, and this is %s\n", path,
                *name ? name : "unknown", m->sm ? m->gpu : m->cpu);
    else
        return 1;
    return 0;
}

int adze_peers_read(adze_report *report, const char *path)
{
    char *json = adze_cli_read(path), torch[64] = "", commit[64] = "", date[32] = "";
    int good = 0;
    if (!json)
        fprintf(stderr, "adze bench: '%s' cannot be read\n", path);
    else
        good = is_ours(report, json, path);
    if (good) {
        adze_json_text(json, "torch", torch, sizeof torch);
        adze_json_text(json, "commit", commit, sizeof commit);
        adze_json_text(json, "date", date, sizeof date);
        snprintf(report->peers, sizeof report->peers, "torch %s, commit %s, %s", torch, commit, date);
    }
    recorded r;
    for (char *at = good ? strstr(json, "\"op\": ") : NULL, *next; at && good; at = next) {
        next = strstr(at + 1, "\"op\": ");
        if (next)
            next[-1] = '\0';
        good = read_row(&r, at);
        if (good)
            add_peers(report, &r);
        else
            fprintf(stderr, "adze bench: a row of '%s' is damaged: %.60s\n", path, at);
    }
    free(json);
    return good;
}
