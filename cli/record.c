/* record.c - a recorded run: JSON with one row per line of text, so that it is read back without a JSON library. */
#include "record.h"

#include "json.h"
#include "suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char head[] = "{\"adze_bench\": 1,";

int adze_record_write(const adze_report *r, const char *path)
{
    const adze_machine *m = &r->machine;
    const int own = strcmp(adze_program, "adze") == 0; /* a project's program knows only what adze was built from */
    FILE *f = fopen(path, "w");
    if (!f)
        return 0;
    fprintf(f, "%s\n\"machine\": {\"cpu\": \"%s\", \"gpu\": \"%s\", \"cores\": %d, \"threads\": %d, ", head, m->cpu,
            m->gpu, m->cores, m->threads);
    fprintf(f, "\"isa\": \"%s\", \"sm\": %d, \"sm_count\": %d},\n", m->isa, m->sm, m->sm_count);
    if (!own)
        fprintf(f, "\"program\": \"%s\",\n", adze_program);
    fprintf(f, "\"driver\": \"%s\",\n\"clocks\": \"%s\",\n\"%s\": \"%s\",\n\"date\": \"%s\",\n", m->driver, m->clocks,
            own ? "commit" : "adze_commit", adze_commit(), r->date);
    fprintf(f, "\"ceilings\": {\"read\": %.5g, \"two_reads\": %.5g, \"copy\": %.5g, \"write\": %.5g, ",
            r->ceilings.rate[ADZE_READ], r->ceilings.rate[ADZE_TWO_READS], r->ceilings.rate[ADZE_COPY],
            r->ceilings.rate[ADZE_WRITE]);
    fprintf(f, "\"float_gflops\": %.5g, \"matrix_gflops\": %.5g, \"floor_us\": %.4g},\n",
            r->ceilings.flops[ADZE_UNIT_FLOAT], r->ceilings.flops[ADZE_UNIT_MATRIX], r->ceilings.floor_us);
    fprintf(f, "\"rows\": [\n");
    for (int i = 0; i < r->count; i++) {
        const adze_bench_row *row = &r->rows[i];
        fprintf(f, "{\"op\": \"%s\", \"kernel\": \"%s\", \"dtype\": \"%s\", \"case\": \"%s\", ", row->op, row->kernel,
                row->dtype, row->shape);
        fprintf(f, "\"rows\": %lld, \"dim\": %lld, \"read\": %lld, \"written\": %lld, ", (long long)row->rows,
                (long long)row->dim, (long long)row->read, (long long)row->written);
        fprintf(f, "\"us\": %.6g, \"us_alone\": ", row->us);
        fprintf(f, row->us_alone > 0 ? "%.6g" : "null", row->us_alone);
        fprintf(f, ", \"spread\": %.4f, \"gbps\": %.5g, \"gflops\": %.5g, \"share\": %.4f, \"line\": \"%s\"}%s\n",
                row->spread, row->gbps, row->gflops, row->share, row->line, i + 1 < r->count ? "," : "");
    }
    fprintf(f, "]}\n");
    const int whole = !ferror(f);
    return fclose(f) == 0 && whole;
}

static int add_row(adze_record *record, const char *line)
{
    adze_recorded *rows = realloc(record->rows, (size_t)(record->count + 1) * sizeof *rows);
    if (!rows)
        return 0;
    record->rows = rows;
    adze_recorded *row = &rows[record->count];
    if (!adze_json_text(line, "line", row->line, sizeof row->line) ||
        !adze_json_text(line, "kernel", row->kernel, sizeof row->kernel) || !adze_json_number(line, "us", &row->us) ||
        !adze_json_number(line, "spread", &row->spread) || row->us <= 0)
        return 0;
    record->count++;
    return 1;
}

/* The rows, up to the bracket that ends them. */
static int read_rows(adze_record *record, FILE *f, const char *path)
{
    char line[4096];
    while (fgets(line, sizeof line, f)) {
        if (strncmp(line, "]}", 2) == 0)
            return 1;
        if (strncmp(line, "{\"op\": ", 7) == 0 && !add_row(record, line)) {
            fprintf(stderr, "adze bench: row %d of '%s' is damaged\n", record->count + 1, path);
            return 0;
        }
    }
    fprintf(stderr, "adze bench: '%s' ends before its rows do\n", path);
    return 0;
}

int adze_record_read(adze_record *record, const char *path, const adze_machine *m)
{
    char line[2048], cpu[128] = "", gpu[128] = "";
    int good = 0;
    memset(record, 0, sizeof *record);
    FILE *f = fopen(path, "r");
    if (!f) {
        fprintf(stderr, "adze bench: '%s' cannot be read\n", path);
        return 0;
    }
    if (!fgets(line, sizeof line, f) || strncmp(line, head, strlen(head)) != 0 || !fgets(line, sizeof line, f) ||
        !adze_json_text(line, "cpu", cpu, sizeof cpu) || !adze_json_text(line, "gpu", gpu, sizeof gpu))
        fprintf(stderr, "adze bench: '%s' was not written by adze bench --json\n", path);
    else if (strcmp(m->sm ? m->gpu : m->cpu, m->sm ? gpu : cpu) != 0 || (!m->sm && *gpu))
        fprintf(stderr, "adze bench: '%s' is of another machine: %s, and this is %s\n", path, *gpu ? gpu : cpu,
                m->sm ? m->gpu : m->cpu);
    else
        good = read_rows(record, f, path);
    fclose(f);
    if (!good)
        adze_record_free(record);
    return good;
}

int adze_record_has(const adze_record *record, const char *line)
{
    for (int i = 0; i < record->count; i++)
        if (strcmp(record->rows[i].line, line) == 0)
            return 1;
    return 0;
}

static const adze_bench_row *find_row(const adze_report *report, const adze_recorded *before)
{
    for (int i = 0; i < report->count; i++)
        if (strcmp(report->rows[i].line, before->line) == 0 && strcmp(report->rows[i].kernel, before->kernel) == 0)
            return &report->rows[i];
    return NULL;
}

/* A loss counts beyond the spread of both runs and 3 %. */
int adze_record_compare(const adze_record *record, const adze_report *report)
{
    int rows = 0, lost = 0, gained = 0;
    for (int i = 0; i < record->count; i++) {
        const adze_recorded *before = &record->rows[i];
        const adze_bench_row *row = find_row(report, before);
        if (!row)
            continue;
        const double noise = 0.03 + row->spread + before->spread, ratio = row->us / before->us;
        rows++;
        gained += ratio < 1 - noise;
        if (ratio > 1 + noise) {
            lost++;
            printf("SLOWER %s.%s %s: %.2f us, it was %.2f (%+.1f%%, noise is %.1f%%)\n", row->op, row->kernel,
                   row->shape, row->us, before->us, 100 * (ratio - 1), 100 * noise);
        }
    }
    printf("%d rows compared: %d slower, %d faster\n", rows, lost, gained);
    return rows ? lost : -1;
}

void adze_record_free(adze_record *record)
{
    free(record->rows);
    memset(record, 0, sizeof *record);
}
