/* bench.c - `adze bench`: times the bench lines of every op, and records the results. */
#include "cli.h"
#include "gpu.h"
#include "record.h"
#include "suite.h"
#include "timing.h"
#include "trial.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef __GLIBC__
#    include <malloc.h>
#endif

static const char help[] =
    "adze bench [OP] [--device cpu|cuda|N] [--dtype bf16|f16|f32] [--quick|--full] [--variants] [--line LINE]\n"
    "           [--json FILE] [--html FILE] [--peers FILE] [--against FILE]\n\n"
    "Verifies each call against the definition, then times it with cold caches: inputs and outputs rotate through\n"
    "more memory than the cache holds. Kernels take turns, and a time is a median. Each row has the time; on a GPU\n"
    "the time alone, without programmatic dependent launch; the spread, which is the distance between the\n"
    "quartiles; the rates; and the share of the ceiling. The ceiling is the rate of a plain loop, in the same run, "
    "with\n"
    "the same mix of reads and writes: at 100 % the call takes as long as that loop.\n\n"
    "  OP              one op only\n"
    "  --device D      where (default: a GPU, if there is one)\n"
    "  --dtype T       of the lines that leave it open (default: bf16)\n"
    "  --quick         less exact, a few seconds\n"
    "  --full          longer samples; on the CPU also lines above 400 MB, and kernels for older processors\n"
    "  --variants      also each variant of a kernel that takes the call, as `adze info OP` lists them\n"
    "  --line LINE     this call instead of those of the op, as ADZE_TRACE=1 prints it; @FILE: each line of a file\n"
    "  --json FILE     the machine, the ceilings and every row\n"
    "  --html FILE     a page with pictures, filters and the command that repeats each row\n"
    "  --peers FILE    show times of PyTorch and others on that page: what bench/compare_torch.py --json wrote here\n"
    "  --against FILE  compare with what --json wrote on such a machine; a loss beyond noise fails\n";

static struct {
    const char *op, *dtype, *json, *html, *peers, *against, *line;
    int device, quick, full, variants;
} options;

static struct {
    adze_report report;
    adze_effort effort;
    char **lines;                  /* of --line, up to a null */
    int64_t most;                  /* bytes of a line */
    int progress, skipped, errors; /* standard error is a terminal; lines too large; errors make the exit status 1 */
} state;

static const double share_most = 1.02; /* of a ceiling; above it the benchmark is wrong */

/* ---- Measuring ---- */

static void progress(const char *op, int done, int of)
{
    if (state.progress)
        fprintf(stderr, "\r%-16s %d/%d\033[K", op, done, of);
}

/* For the page: a call without a row, and why. */
static void leave_out(const char *line, const char *why)
{
    adze_report *r = &state.report;
    adze_left_out *grown = realloc(r->left_out, (size_t)(r->left_out_count + 1) * sizeof *grown);
    if (!grown)
        return;
    r->left_out = grown;
    snprintf(grown[r->left_out_count].line, sizeof grown->line, "%s", line);
    snprintf(grown[r->left_out_count++].why, sizeof grown->why, "%s", why);
}

static void complain(const char *what, const char *why, const char *line)
{
    if (state.progress)
        fprintf(stderr, "\r\033[K");
    printf("ERROR %s: %s\n      %s run '%s'\n", what, why, adze_program, line);
    state.errors++;
}

/* "128x4096 weight act=gelu": the first input's shape, the other inputs, and the options. */
static void describe(char *to, size_t size, const adze_trial *t)
{
    const adze_op *op = t->whole->line.op;
    size_t n = 0;
    int first = 1;
    for (int f = 0; op->fields[f].name && n < size; f++) {
        const adze_field *field = &op->fields[f];
        const adze_tensor *x = (const void *)(t->whole->line.args + field->offset);
        if (field->kind == ADZE_INT && t->whole->line.given[f]) {
            int32_t value;
            memcpy(&value, x, sizeof value);
            const adze_word *w = field->words;
            while (w && w->name && w->value != value)
                w++;
            if (w && w->name)
                n += (size_t)snprintf(to + n, size - n, " %s=%s", field->name, w->name);
            else
                n += (size_t)snprintf(to + n, size - n, " %s=%d", field->name, (int)value);
        } else if (adze_is_input(field) && !adze_is_inout(field) && x->dtype && first) {
            first = 0;
            for (int d = 0; d < x->rank && n < size; d++)
                n += (size_t)snprintf(to + n, size - n, "%s%lld", d ? "x" : "", (long long)x->shape[d]);
        } else if (adze_is_input(field) && x->dtype) {
            n += (size_t)snprintf(to + n, size - n, " %s", field->name);
            for (int d = 0; d < x->rank && op->samples && x->rank > 1 && n < size; d++)
                n += (size_t)snprintf(to + n, size - n, "%s%lld", d ? "x" : "=", (long long)x->shape[d]);
        }
    }
}

static const adze_tensor *first_tensor(const adze_trial *t)
{
    const adze_field *f = t->whole->line.op->fields;
    while (!adze_is_input(f) || adze_is_inout(f))
        f++;
    return (const void *)(t->whole->line.args + f->offset);
}

static void add_row(const adze_trial *t, const adze_attempt *a, const char *line)
{
    adze_report *r = &state.report;
    if (r->count == r->room) {
        r->room = 2 * r->room + 64;
        r->rows = realloc(r->rows, (size_t)r->room * sizeof *r->rows);
    }
    adze_bench_row *row = &r->rows[r->count++];
    memset(row, 0, sizeof *row);
    snprintf(row->op, sizeof row->op, "%s", t->whole->line.op->name);
    snprintf(row->kernel, sizeof row->kernel, "%s", a->kernel->name);
    snprintf(row->dtype, sizeof row->dtype, "%s", adze_dtype_name(first_tensor(t)->dtype));
    snprintf(row->line, sizeof row->line, "%s", line);
    describe(row->shape, sizeof row->shape, t);
    row->rows = t->rows;
    row->dim = t->dim;
    row->read = t->read;
    row->written = t->written;
    row->us = a->us;
    row->us_alone = a->us_alone;
    row->spread = a->spread;
    row->gbps = (double)(t->read + t->written) / a->us / 1000;
    row->gflops = t->flops / a->us / 1000;
    row->warm = t->set_count * (t->read + t->written) < (int64_t)adze_cold_bytes(t->whole->stream);
    row->code = first_tensor(t)->dtype;
    row->ulps = a->verdict.ulps;
    row->error = a->verdict.worst;
}

static void bench_line(const adze_op *op, adze_stream stream, const char *text)
{
    char full[ADZE_LINE_TEXT], error[512];
    adze_line line;
    const adze_which which = options.variants          ? ADZE_VARIANTS_ALL
                             : state.report.one_kernel ? ADZE_CHOSEN
                                                       : ADZE_KERNELS_ALL;
    snprintf(full, sizeof full, "%s %s", op->name, text);
    if (!adze_line_parse(&line, NULL, full, error, sizeof error)) {
        leave_out(full, error);
        complain(op->name, error, full);
        return;
    }
    adze_job *job = malloc(sizeof *job);
    int64_t read, written;
    const int laid_out = adze_job_layout(job, &line, stream, error, sizeof error);
    const int64_t moved = laid_out ? adze_job_bytes(job, &read, &written) : 0;
    int64_t held = 0; /* a call that moves a few rows of a table is made with all of it */
    for (int m = 0; m < ADZE_FIELDS_MAX && laid_out; m++)
        held += (int64_t)job->memory[m].bytes;
    free(job);
    const int64_t bytes = held > moved ? held : moved;
    if (bytes > state.most) {
        snprintf(error, sizeof error, "it takes %lld MB; --full times lines above %lld MB",
                 (long long)(bytes / 1000000), (long long)(state.most / 1000000));
        leave_out(full, error);
        state.skipped++;
        return;
    }
    adze_trial trial;
    if (!adze_trial_make(&trial, &line, stream, which, error, sizeof error) ||
        !adze_trial_time(&trial, &state.effort, error, sizeof error)) {
        leave_out(full, error);
        complain(op->name, error, full);
    }
    for (int k = 0; k < trial.attempts; k++) {
        const adze_attempt *a = &trial.attempt[k];
        char name[100];
        snprintf(name, sizeof name, "%s.%s", op->name, a->kernel->name);
        if (a->verdict.why[0]) {
            leave_out(full, a->verdict.why);
            complain(name, a->verdict.why, full);
        } else if (a->us > 0)
            add_row(&trial, a, full);
    }
    adze_trial_free(&trial);
}

static void raise_ceilings(adze_stream stream)
{
    const char *message = adze_ceilings_raise(&state.report.ceilings, stream);
    if (message) {
        printf("ERROR the ceilings: %s\n", message);
        state.errors++;
    }
}

/* Whether a row is faster than it can be: beyond its ceiling by more than 2 % and by more than its own spread, unless
   a cache served it. */
static int impossible(const adze_bench_row *row)
{
    return !row->warm && row->share > share_most && row->share * (1 - row->spread) > 1;
}

/* Each row's share of its ceiling; returns how many are faster than they can be. */
static int find_shares(void)
{
    int count = 0;
    for (int i = 0; i < state.report.count; i++) {
        adze_bench_row *row = &state.report.rows[i];
        const double moved = row->gbps / adze_ceiling_of(&state.report.ceilings, row->read, row->written);
        const double computed = row->gflops > 0 ? row->gflops / adze_flops_of(&state.report.ceilings, row->code) : 0;
        row->share = moved > computed ? moved : computed;
        count += impossible(row);
    }
    return count;
}

/* The ceilings are measured again before every op and at the end, since the load of the machine changes. When a call
   is faster than its ceiling, the load may have been lower, so the ceilings are measured at once, while it still is,
   and more often before it counts as an error. */
static void bench_call(const adze_op *op, adze_stream stream, const char *text)
{
    const int before = find_shares();
    bench_line(op, stream, text);
    for (int tries = 0; find_shares() > before && tries < 5; tries++)
        raise_ceilings(stream);
}

static void walk(adze_stream stream)
{
    for (char **line = state.lines; line && *line; line++) {
        const size_t name = strcspn(*line, " ");
        if (line == state.lines)
            raise_ceilings(stream);
        bench_call(adze_find_op(*line, name), stream, *line + name + ((*line)[name] == ' '));
    }
    for (const adze_suite *const *s = adze_suites; *s; s++) {
        if (options.line || (options.op && strcmp(options.op, (*s)->op->name) != 0))
            continue;
        raise_ceilings(stream);
        int lines = 0;
        while ((*s)->bench && (*s)->bench[lines])
            lines++;
        for (int i = 0; i < lines; i++) {
            char text[ADZE_LINE_TEXT];
            progress((*s)->op->name, i, lines);
            adze_line_expand(text, sizeof text, (*s)->bench[i], options.dtype);
            bench_call((*s)->op, stream, text);
        }
    }
    raise_ceilings(stream);
    for (int tries = 0; find_shares() > 0 && tries < 20; tries++)
        raise_ceilings(stream);
    if (state.progress)
        fprintf(stderr, "\r\033[K");
}

/* ---- Text ---- */

static void print_report(void)
{
    const adze_report *r = &state.report;
    const adze_machine *m = &r->machine;
    if (m->sm)
        printf("%s, sm_%d, %d SMs; driver %s; clocks %s\n", m->gpu, m->sm, m->sm_count, m->driver, m->clocks);
    else
        printf("%s, %s, %d threads on %d cores\n", m->cpu, m->isa, m->threads, m->cores);
    printf("ceilings, GB/s: read %.1f, two reads to one write %.1f, copy %.1f, write %.1f; GFLOP/s: float %.1f",
           r->ceilings.rate[ADZE_READ], r->ceilings.rate[ADZE_TWO_READS], r->ceilings.rate[ADZE_COPY],
           r->ceilings.rate[ADZE_WRITE], r->ceilings.flops[ADZE_UNIT_FLOAT]);
    if (r->ceilings.flops[ADZE_UNIT_MATRIX] > 0)
        printf(", %s %.1f", m->sm ? "f16 and bf16" : "bf16 or bytes", r->ceilings.flops[ADZE_UNIT_MATRIX]);
    if (r->ceilings.floor_us > 0)
        printf("; a kernel takes at least %.2f us", r->ceilings.floor_us);
    const int wide = options.variants ? 28 : 11;
    printf("\n\n%-13s %-*s %-5s %11s %10s %7s %8s %8s %6s  %s\n", "op", wide, "kernel", "dtype", "us", "alone",
           "spread", "GB/s", "GFLOP/s", "share", "case");
    for (int i = 0; i < r->count; i++) {
        const adze_bench_row *row = &r->rows[i];
        char alone[32] = "-";
        if (row->us_alone > 0)
            snprintf(alone, sizeof alone, "%.2f", row->us_alone);
        char gflops[32] = "-";
        if (row->gflops > 0)
            snprintf(gflops, sizeof gflops, "%.1f", row->gflops);
        printf("%-13s %-*s %-5s %11.2f %10s %6.1f%% %8.1f %8s %5.1f%%  %s\n", row->op, wide, row->kernel, row->dtype,
               row->us, alone, 100 * row->spread, row->gbps, gflops, 100 * row->share, row->shape);
    }
    for (int i = 0; i < r->count; i++)
        if (impossible(&r->rows[i]))
            complain("of the benchmark", "a call cannot be faster than memory and arithmetic are", r->rows[i].line);
    if (state.skipped)
        printf("%d lines above %lld MB were left out\n", state.skipped, (long long)(state.most / 1000000));
}

/* ---- The command ---- */

static void choose_effort(int cpu)
{
    static const adze_effort efforts[2][3] = {{{5, 500, 0}, {15, 1000, 0}, {31, 2000, 0}},
                                              {{3, 3000, 0}, {5, 10000, 0}, {9, 50000, 0}}};
    const int level = options.quick ? 0 : options.full ? 2 : 1;
    state.effort = efforts[cpu][level];
    state.report.one_kernel = cpu && !options.full;
    state.most = !cpu || options.full ? INT64_MAX : options.quick ? 64000000 : 400000000;
}

/* Each line takes hundreds of megabytes and gives them back: kept by the process, their pages are cleared once. */
static void keep_memory(void)
{
#ifdef __GLIBC__
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, -1);
#endif
}

/* Whether a file can be written, before anything is timed. Its content is kept. */
static int can_write(const char *path)
{
    if (!path)
        return 1;
    FILE *f = fopen(path, "a");
    if (f)
        fclose(f);
    else
        fprintf(stderr, "adze bench: '%s' cannot be written\n", path);
    return f != NULL;
}

static void complain_of_record(void)
{
    fprintf(stderr, "adze bench: '%s' has no row of this run: there is nothing to compare\n", options.against);
}

/* Whether a line that is about to be timed is in the record. */
static int has_common_line(const adze_record *record)
{
    for (char **line = state.lines; line && *line; line++)
        if (adze_record_has(record, *line))
            return 1;
    for (const adze_suite *const *s = adze_suites; *s && !options.line; s++)
        for (const char *const *line = (*s)->bench; line && *line; line++) {
            char text[ADZE_LINE_TEXT], full[ADZE_LINE_TEXT + 64];
            adze_line_expand(text, sizeof text, *line, options.dtype);
            snprintf(full, sizeof full, "%s %s", (*s)->op->name, text);
            if ((!options.op || strcmp(options.op, (*s)->op->name) == 0) && adze_record_has(record, full))
                return 1;
        }
    return 0;
}

/* Times everything, and writes and compares what was found: an exit status. */
static int measure(adze_stream stream, const adze_record *record)
{
    state.progress = isatty(STDERR_FILENO);
    choose_effort(stream.device == ADZE_CPU);
    keep_memory();
    walk(stream);
    print_report();
    int status = state.errors > 0;
    if (options.json && !adze_record_write(&state.report, options.json)) {
        fprintf(stderr, "adze bench: '%s' cannot be written\n", options.json);
        status = 2;
    }
    if (options.peers && !adze_peers_read(&state.report, options.peers))
        status = 2;
    if (options.html && !adze_html_write(&state.report, options.html)) {
        fprintf(stderr, "adze bench: '%s' cannot be written\n", options.html);
        status = 2;
    }
    const int lost = options.against ? adze_record_compare(record, &state.report) : 0;
    if (lost < 0)
        complain_of_record();
    free(state.report.rows);
    free(state.report.left_out);
    return lost < 0 ? 2 : lost > 0 && status == 0 ? 1 : status;
}

/* Bad options and files are refused before anything is timed. */
static int bench(adze_stream stream)
{
    adze_record record = {0};
    const int new_json = options.json && access(options.json, F_OK) != 0;
    int status = 2;
    const time_t now = time(NULL);
    strftime(state.report.date, sizeof state.report.date, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
    adze_machine_ask(&state.report.machine, stream.device);
    state.report.dtype = options.dtype;
    snprintf(state.report.device, sizeof state.report.device, stream.device == ADZE_CPU ? "cpu" : "%d",
             stream.device);
    if (options.peers && !adze_peers_read(&state.report, options.peers)) /* refused before anything is timed */
        return 2;
    if (options.against && !adze_record_read(&record, options.against, &state.report.machine))
        return 2;
    if (options.against && !has_common_line(&record))
        complain_of_record();
    else if (can_write(options.json) && can_write(options.html))
        status = measure(stream, &record);
    else if (new_json)
        unlink(options.json);
    adze_record_free(&record);
    return status;
}

int adze_cli_bench(int argc, char **argv)
{
    const adze_option list[] = {
        {.name = "--device", .device = &options.device},
        {.name = "--dtype", .text = &options.dtype, .choices = "bf16|f16|f32"},
        {.name = "--quick", .flag = &options.quick},
        {.name = "--full", .flag = &options.full},
        {.name = "--variants", .flag = &options.variants},
        {.name = "--line", .text = &options.line},
        {.name = "--json", .text = &options.json},
        {.name = "--html", .text = &options.html},
        {.name = "--peers", .text = &options.peers},
        {.name = "--against", .text = &options.against},
        {.name = NULL},
    };
    options.dtype = "bf16";
    options.device = adze_cuda_count() > 0 ? 0 : ADZE_CPU;
    int status;
    if (!adze_cli_options("bench", help, list, &options.op, argc, argv, &status))
        return status;
    if (options.quick && options.full) {
        fprintf(stderr, "adze bench: --quick and --full exclude each other\n");
        return 2;
    }
    if (options.op && !adze_find_op(options.op, strlen(options.op))) {
        fprintf(stderr, "adze bench: no op is called '%s'\n", options.op);
        return 2;
    }
    if (options.line && options.op) {
        fprintf(stderr, "adze bench: --line has an op of its own, '%s' is one too many\n", options.op);
        return 2;
    }
    char error[512];
    if (options.line && !(state.lines = adze_cli_lines(options.line, error, sizeof error))) {
        fprintf(stderr, "adze bench: %s\n", error);
        return 2;
    }
    if (options.peers && !options.html) {
        fprintf(stderr, "adze bench: --peers is for the page of --html, which is not asked for\n");
        return 2;
    }
    adze_stream stream = {options.device, NULL};
    const adze_status prepared = adze_prepare(stream.device);
    const char *message = prepared != ADZE_OK         ? adze_last_error()
                          : stream.device == ADZE_CPU ? NULL
                                                      : adze_gpu_open(&stream);
    if (message) {
        fprintf(stderr, "adze bench: %s\n", message);
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0); /* a run that is stopped has shown what it timed */
    status = bench(stream);
    adze_cli_lines_free(state.lines);
    state.lines = NULL;
    if (stream.device != ADZE_CPU)
        adze_gpu_close(stream);
    return status;
}
