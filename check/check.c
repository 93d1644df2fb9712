/* check.c - every op x case x dtype x kernel, against the definition. */
#include "dependency.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define X(name) &adze_suite_##name,
const adze_suite *const adze_suites[] = {ADZE_OPS(X) NULL};
#undef X

static const char *const dtypes[] = {"f32", "f16", "bf16"};

static int is_out(const adze_field *f)
{
    return f->kind >= ADZE_OUT && f->kind <= ADZE_OUT_OPTIONAL;
}

/* One array per output field; NULL where it is absent. */
void adze_reference_make(const adze_job *job, adze_value **want)
{
    const adze_op *op = job->line.op;
    int n = 0;
    for (int f = 0; op->fields[f].name; f++) {
        if (!is_out(&op->fields[f]))
            continue;
        const adze_tensor *t = (const void *)(job->line.args + op->fields[f].offset);
        want[n++] = t->dtype ? calloc((size_t)adze_count(t) + 1, sizeof **want) : NULL;
    }
    op->reference(job->line.args, want);
}

void adze_reference_free(adze_value **want)
{
    for (int i = 0; i < ADZE_FIELDS_MAX; i++)
        free(want[i]);
}

static uint64_t word_at(const char *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

void adze_job_image(const adze_memory *m, uint64_t poison, char *image)
{
    for (size_t i = 0; i < m->bytes; i += sizeof poison) {
        const uint64_t alone = word_at(m->outputs + i) & ~word_at(m->inputs + i);
        const uint64_t word = (word_at(m->origin + i) & ~alone) | (poison & alone);
        memcpy(image + i, &word, sizeof word);
    }
}

/* Starts from the inputs, poisons what outputs alone own, runs, reads back. The poison differs from run to
   run, so an element that is never written cannot look the same twice. */
static const char *run_once(adze_job *job, const adze_kernel *kernel, uint64_t poison)
{
    const adze_op *op = job->line.op;
    for (int f = 0; f < ADZE_FIELDS_MAX; f++) {
        adze_memory *m = &job->memory[f];
        if (!m->origin)
            continue;
        adze_job_image(m, poison, m->result);
        const char *message = adze_memory_write(job->stream, m->work, m->result, m->bytes);
        if (message)
            return message;
    }
    if (adze_dispatch_to(op, kernel, job->stream, job->args) != ADZE_OK)
        return adze_last_error();
    const char *message = adze_memory_sync(job->stream);
    for (int f = 0; f < ADZE_FIELDS_MAX && !message; f++)
        if (job->memory[f].origin)
            message = adze_memory_read(job->stream, job->memory[f].result, job->memory[f].work, job->memory[f].bytes);
    return message;
}

/* Bytes that no output owns must be as they were: guards, gaps between rows, inputs. */
static void judge_untouched(const adze_job *job, adze_verdict *v)
{
    for (int f = 0; f < ADZE_FIELDS_MAX; f++) {
        const adze_memory *m = &job->memory[f];
        if (!m->origin)
            continue;
        size_t i = 0;
        while (i < m->bytes && !((word_at(m->result + i) ^ word_at(m->origin + i)) & ~word_at(m->outputs + i)))
            i += sizeof(uint64_t);
        while (i < m->bytes && (m->outputs[i] || m->result[i] == m->origin[i]))
            i++;
        if (i < m->bytes) {
            snprintf(v->why, sizeof v->why, "wrote outside the outputs, %lld bytes from the start of %s",
                     (long long)i - (long long)m->data_at, job->line.op->fields[f].name);
            return;
        }
    }
}

/* Whether a stored value is within the bound of the definition's, plus half a unit for the rounding of the
   store. A finite value without a finite bound says nothing: no kernel is within it. */
double adze_error_share(int dtype, double got, adze_value want, double *ulps)
{
    *ulps = 0;
    if (isnan(want.v) || isnan(got))
        return isnan(want.v) && isnan(got) ? 0 : INFINITY;
    if (!isfinite(want.e)) {
        if (isfinite(want.v))
            return INFINITY;
        want.e = 0; /* an infinity is exact */
    }
    const double ulp = adze_dtype_ulp(dtype, fabs(want.v) + want.e);
    if (isinf(got) || isinf(want.v)) {
        const double top = adze_round_to(dtype, want.v + want.e), bottom = adze_round_to(dtype, want.v - want.e);
        return got == top || got == bottom ? 0 : INFINITY;
    }
    *ulps = fabs(got - want.v) / ulp;
    return fabs(got - want.v) / (want.e + 0.5 * ulp);
}

static void judge_values(const adze_job *job, adze_value *const *want, adze_verdict *v)
{
    const adze_op *op = job->line.op;
    int n = 0;
    for (int f = 0; op->fields[f].name; f++) {
        if (!is_out(&op->fields[f]))
            continue;
        const adze_value *values = want[n++];
        adze_tensor t = *(const adze_tensor *)(const void *)(job->line.args + op->fields[f].offset);
        if (!t.dtype)
            continue;
        const adze_memory *m = &job->memory[job->memory_of[f]];
        t.data = m->result + ((char *)t.data - m->origin);
        const int64_t count = adze_count(&t);
        for (adze_walk w = {0}; w.i < count; adze_walk_next(&w, &t)) {
            const adze_value due = values[w.i];
            double ulps;
            const double got = adze_get(&t, w.at), share = adze_error_share(t.dtype, got, due, &ulps);
            if (share > v->worst)
                v->worst = share;
            if (ulps > v->ulps)
                v->ulps = ulps;
            if (share > 1 && !v->why[0] && isfinite(due.v) && !isfinite(due.e))
                snprintf(v->why, sizeof v->why, "%s, element %lld: the definition gives %.9g with the bound %g",
                         op->fields[f].name, (long long)w.i, due.v, due.e);
            if (share > 1 && !v->why[0])
                snprintf(v->why, sizeof v->why,
                         "%s[%lld,%lld,%lld,%lld,%lld] is %.9g, must be %.9g: off by %.2f ulp, allowed %.2f",
                         op->fields[f].name, (long long)w.index[0], (long long)w.index[1], (long long)w.index[2],
                         (long long)w.index[3], (long long)w.index[4], got, due.v, ulps,
                         0.5 + due.e / adze_dtype_ulp(t.dtype, fabs(due.v) + due.e));
        }
    }
}

void adze_judge(adze_job *job, const adze_kernel *kernel, adze_value *const *want, adze_verdict *v)
{
    memset(v, 0, sizeof *v);
    const char *message = run_once(job, kernel, 0xAAAAAAAAAAAAAAAA);
    if (message) {
        snprintf(v->why, sizeof v->why, "%s", message);
        return;
    }
    judge_untouched(job, v);
    if (!v->why[0])
        judge_values(job, want, v);
    char *first[ADZE_FIELDS_MAX] = {0};
    for (int f = 0; f < ADZE_FIELDS_MAX; f++)
        if (job->memory[f].origin) {
            first[f] = malloc(job->memory[f].bytes);
            memcpy(first[f], job->memory[f].result, job->memory[f].bytes);
        }
    message = run_once(job, kernel, ADZE_LAST_POISON);
    if (message && !v->why[0])
        snprintf(v->why, sizeof v->why, "the second run: %s", message);
    for (int f = 0; f < ADZE_FIELDS_MAX; f++) {
        if (first[f] && !v->why[0] && memcmp(first[f], job->memory[f].result, job->memory[f].bytes) != 0)
            snprintf(v->why, sizeof v->why, "two runs differ, or an element of an output is never written");
        free(first[f]);
    }
}

typedef struct kernel_row { /* of the report */
    double worst, ulps;
    int cases;
} kernel_row;

static struct {
    const adze_check_options *options;
    adze_tally tally;
    int progress;               /* a terminal is watching */
    unsigned turn;              /* of the ways in which outputs may be inputs */
    adze_dependency dependency; /* open on GPUs whose kernels overlap */
} state;

static void progress(const char *op, int done, int of)
{
    if (state.progress)
        fprintf(stderr, "\r%-16s %d/%d\033[K", op, done, of);
}
static void progress_clear(void)
{
    if (state.progress)
        fprintf(stderr, "\r\033[K");
}

static void complain(const char *kernel, const char *line, const char *why)
{
    progress_clear();
    printf("FAIL %s: %s\n     adze run '%s'\n", kernel, why, line);
    state.tally.failed++;
}

static int wanted(const adze_kernel *k)
{
    return !state.options->kernel || strcmp(state.options->kernel, k->name) == 0;
}
/* The call of a line, by every kernel that takes it. */
static void judge_line(const adze_op *op, adze_job *job, const char *full, adze_value *const *want, kernel_row *rows)
{
    for (const adze_kernel *k = op->kernels; k->run; k++) {
        if (!wanted(k) || !adze_can_run(k, job->stream) || (k->accepts && !k->accepts(job->stream, job->args)))
            continue;
        adze_verdict v;
        adze_judge(job, k, want, &v);
        if (state.dependency.stream.handle && !v.why[0])
            adze_dependency_judge(&state.dependency, job, k, &v);
        char name[64];
        snprintf(name, sizeof name, "%s.%s", op->name, k->name);
        if (v.why[0])
            complain(name, full, v.why);
        else
            state.tally.passed++;
        if (state.options->verbose)
            printf("%s %-24s %5.2f ulp, %3.0f%% of the limit  %s\n", v.why[0] ? "FAIL" : "ok  ", name, v.ulps,
                   100 * v.worst, full);
        kernel_row *row = &rows[k - op->kernels];
        row->cases++;
        row->worst = v.worst > row->worst ? v.worst : row->worst;
        row->ulps = v.ulps > row->ulps ? v.ulps : row->ulps;
    }
}

static void expect(const char *what, adze_status got, adze_status want, const char *says, const char *line)
{
    const int ok = got == want && (!says || strstr(adze_last_error(), says));
    if (ok) {
        state.tally.passed++;
        if (state.options->verbose)
            printf("ok   refused %-30s %s\n", what, adze_last_error());
        return;
    }
    char why[512];
    snprintf(why, sizeof why, "%s: status %d instead of %d (\"%s\")", what, got, want, got ? adze_last_error() : "");
    complain("bad call", line, why);
}

/* Outputs that are inputs. The table of fields allows some ways, which lines and dtypes take in turn: each must give
   the same values as memory of its own. All other ways must be refused. */
static void check_aliases(const adze_job *job, const char *text, adze_value *const *want, kernel_row *rows)
{
    const adze_op *op = job->line.op;
    char full[1300], aliased[1200], error[256];
    int ways = 0;
    while (adze_alias_line(op, text, ways, aliased, sizeof aliased))
        ways++;
    adze_job *other = malloc(sizeof *other);
    if (other && ways && adze_alias_line(op, text, (int)(state.turn++ % (unsigned)ways), aliased, sizeof aliased)) {
        adze_line line;
        snprintf(full, sizeof full, "%s %s", op->name, aliased);
        if (!adze_line_parse(&line, op, aliased, error, sizeof error) ||
            !adze_job_make(other, &line, job->stream, 1, error, sizeof error)) {
            complain(op->name, full, error);
        } else {
            judge_line(op, other, full, want, rows);
            adze_job_free(other);
        }
    }
    free(other);
    _Alignas(16) char args[ADZE_ARGS_MAX];
    const adze_field *out, *in;
    for (int n = 0; adze_alias_refused(job, n, args, &out, &in); n++) {
        char says[80];
        snprintf(says, sizeof says, "%s overlaps %s", out->name, in->name);
        expect("an output that is another tensor", adze_dispatch(op, job->stream, args), ADZE_BAD_ARG, says, text);
    }
}

static void check_line(const adze_op *op, adze_stream stream, const char *text, kernel_row *rows)
{
    char full[1100], error[256];
    adze_line line;
    snprintf(full, sizeof full, "%s %s", op->name, text);
    adze_job *job = malloc(sizeof *job);
    if (!adze_line_parse(&line, NULL, full, error, sizeof error) ||
        !adze_job_make(job, &line, stream, 1, error, sizeof error)) {
        complain(op->name, full, error);
        free(job);
        return;
    }
    adze_value *want[ADZE_FIELDS_MAX] = {0};
    if (op->validate(job->line.args) != ADZE_OK) {
        complain(op->name, full, adze_last_error());
    } else {
        adze_reference_make(job, want);
        judge_line(op, job, full, want, rows);
        check_aliases(job, text, want, rows);
    }
    adze_reference_free(want);
    adze_job_free(job);
    free(job);
}

/* Calls that every op must refuse, made from a good one: each changes one thing. */
static void check_bad_calls(const adze_op *op, adze_stream stream, const char *text)
{
    char error[256];
    adze_line line;
    adze_job *job = malloc(sizeof *job);
    if (!adze_line_parse(&line, op, text, error, sizeof error) ||
        !adze_job_make(job, &line, stream, 1, error, sizeof error)) {
        complain(op->name, text, error);
        free(job);
        return;
    }
    _Alignas(16) char args[ADZE_ARGS_MAX + 64];
    adze_call *call = (adze_call *)(void *)args;
#define BAD(what, change, status, says)                                                                              \
    do {                                                                                                             \
        memset(args, 0, sizeof args);                                                                                \
        memcpy(args, job->args, op->args_size);                                                                      \
        change;                                                                                                      \
        expect(what, adze_dispatch(op, stream, args), status, says, text);                                           \
    } while (0)
    expect("NULL args", adze_dispatch(op, stream, NULL), ADZE_BAD_ARG, "call.size is 0", text);
    BAD("size 0", call->size = 0, ADZE_BAD_ARG, "call.size is 0");
    BAD("a huge size", call->size = 1u << 30, ADZE_BAD_ARG, "call.size");
    BAD("an unknown flag", call->flags = 0x80, ADZE_BAD_ARG, "flags");
    BAD("a size below the first", call->size = (uint32_t)op->first_size - 4, ADZE_BAD_ARG, "it must be at least");
    BAD("bytes of a newer caller", (call->size += 8, args[op->args_size + 3] = 1), ADZE_BAD_ARG, "a newer one");
    if (op->scratch && job->scratch)
        BAD("scratch too small", call->scratch_size--, ADZE_SCRATCH, "scratch has");
    const adze_stream nowhere = {4096, NULL};
    expect("no such device", adze_dispatch(op, nowhere, job->args), ADZE_DEVICE,
           ADZE_CUDA ? "no CUDA device 4096" : "no CUDA device 4096: this adze was built without CUDA", text);
    for (int f = 0; op->fields[f].name; f++) {
        const adze_field *field = &op->fields[f];
        adze_tensor *t = (adze_tensor *)(void *)(args + field->offset);
        float *number = (float *)(void *)t;
        if (field->kind == ADZE_FLOAT) {
            BAD("not a number", *number = NAN, ADZE_BAD_ARG, "it must be finite");
            BAD("infinity", *number = INFINITY, ADZE_BAD_ARG, field->name);
            BAD("minus infinity", *number = -INFINITY, ADZE_BAD_ARG, field->name);
        }
        if (field->kind > ADZE_OUT_OPTIONAL ||
            ((adze_tensor *)(void *)(job->args + field->offset))->dtype == ADZE_NONE)
            continue;
        BAD("no data", t->data = NULL, ADZE_BAD_ARG, field->name);
        BAD("an odd address", t->data = (char *)t->data + 1, ADZE_BAD_ARG, "multiple of");
        BAD("an unknown dtype", t->dtype = 99, ADZE_BAD_DTYPE, field->name);
        BAD("rank 6", t->rank = 6, ADZE_BAD_ARG, field->name);
        BAD("a negative rank", t->rank = -1, ADZE_BAD_ARG, field->name);
        BAD("a negative size", t->shape[0] = -1, ADZE_BAD_ARG, field->name);
        BAD("an absurd size", t->shape[0] = INT64_MAX, ADZE_BAD_ARG, field->name);
        BAD("an absurd stride", (t->shape[0] = 3, t->stride[0] = INT64_MAX / 2), ADZE_BAD_ARG, field->name);
        BAD("a last stride of 2", (t->stride[t->rank - 1] = 2), ADZE_BAD_ARG, field->name);
        if (is_out(field)) {
            BAD("a shape of its own", t->shape[t->rank - 1]++, ADZE_BAD_ARG, field->name);
            BAD("a dtype of its own", t->dtype = ADZE_F64, ADZE_BAD_DTYPE, field->name);
            BAD("rows that share memory", t->stride[0] = 0, ADZE_BAD_ARG, field->name);
            for (int g = 0; op->fields[g].name; g++) {
                const adze_tensor *in = (adze_tensor *)(void *)(args + op->fields[g].offset);
                if (op->fields[g].kind <= ADZE_OPTIONAL && in->dtype == t->dtype)
                    BAD("an overlap", t->data = (char *)in->data + adze_dtype_size(in->dtype), ADZE_BAD_ARG,
                        field->name);
            }
        }
    }
#undef BAD
    adze_job_free(job);
    free(job);
}

static void check_bad_lines(const adze_suite *suite, adze_stream stream)
{
    for (const adze_bad_case *b = suite->bad; b && b->line; b++) {
        char error[256];
        adze_line line;
        adze_job *job = malloc(sizeof *job);
        if (!adze_line_parse(&line, suite->op, b->line, error, sizeof error) ||
            !adze_job_make(job, &line, stream, 1, error, sizeof error))
            complain(suite->op->name, b->line, error);
        else
            expect("its own bad call", adze_dispatch(suite->op, stream, job->args), b->status, b->says, b->line);
        adze_job_free(job);
        free(job);
    }
}

static void check_suite(const adze_suite *suite, adze_stream stream)
{
    const adze_op *op = suite->op;
    kernel_row rows[32] = {{0, 0, 0}};
    static const char *const none[] = {NULL};
    const char *const *const lists[] = {suite->good, stream.device != ADZE_CPU && suite->gpu ? suite->gpu : none};
    int lines = 0, done = 0;
    for (int l = 0; l < 2; l++)
        for (const char *const *line = lists[l]; *line; line++)
            lines++;
    for (int l = 0; l < 2; l++)
        for (const char *const *line = lists[l]; *line; line++) {
            progress(op->name, done++, lines);
            const int has_dtype = strchr(*line, '$') != NULL;
            for (int d = 0; d < (has_dtype ? 3 : 1); d++) {
                char text[1024];
                adze_line_expand(text, sizeof text, *line, dtypes[d]);
                check_line(op, stream, text, rows);
            }
        }
    progress_clear();
    char text[1024];
    adze_line_expand(text, sizeof text, suite->good[0], "bf16");
    check_bad_calls(op, stream, text);
    check_bad_lines(suite, stream);
    if (state.options->huge && stream.device != ADZE_CPU)
        adze_check_huge(suite, stream.device, &state.tally);
    for (const adze_kernel *k = op->kernels; k->run; k++) {
        const kernel_row *row = &rows[k - op->kernels];
        if (!wanted(k) || k->on_cuda != (stream.device != ADZE_CPU))
            continue;
        if (!adze_can_run(k, stream)) {
            printf("--   %s.%s skipped: not for this machine\n", op->name, k->name);
            state.tally.skipped++;
        } else {
            printf("     %s.%-*s %5d cases, worst %.3f ulp, %.0f%% of the limit\n", op->name,
                   30 - (int)strlen(op->name), k->name, row->cases, row->ulps, 100 * row->worst);
        }
    }
}

/* What was asked for by name and is not here has failed. */
static void check_device(int device)
{
    const adze_stream stream = {device, NULL};
    if (adze_prepare(device) != ADZE_OK) {
        printf("FAIL   nothing is checked on device %d: %s\n", device, adze_last_error());
        state.tally.failed++;
        return;
    }
    const char *no_overlap = device == ADZE_CPU ? NULL : adze_dependency_open(&state.dependency, device);
    for (const adze_suite *const *s = adze_suites; *s; s++)
        if (!state.options->op || strcmp(state.options->op, (*s)->op->name) == 0)
            check_suite(*s, stream);
    if (no_overlap) {
        printf("--   the dependency wait skipped: %s\n", no_overlap);
        state.tally.skipped++;
    } else if (device != ADZE_CPU) {
        printf("     %d calls ran behind a slow producer\n", state.dependency.calls);
    }
    adze_dependency_close(&state.dependency);
}

/* Whether some op has a kernel of this name. */
static int kernel_known(const char *name)
{
    int known = !name;
    for (const adze_suite *const *s = adze_suites; *s; s++)
        for (const adze_kernel *k = (*s)->op->kernels; k->run && !known; k++)
            known = strcmp(name, k->name) == 0;
    return known;
}

int adze_check(const adze_check_options *options)
{
    memset(&state, 0, sizeof state);
    state.options = options;
    if (!kernel_known(options->kernel)) {
        fprintf(stderr, "adze check: no kernel is called '%s'\n", options->kernel);
        return 2;
    }
    if (options->op && !adze_find_op(options->op, strlen(options->op))) {
        fprintf(stderr, "adze check: no op is called '%s'\n", options->op);
        return 2;
    }
    if (options->require && options->device == ADZE_CPU) {
        fprintf(stderr, "adze check: --device cpu leaves out what --require=cuda asks for\n");
        return 2;
    }
    state.progress = isatty(STDERR_FILENO);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (options->self) {
        adze_check_self(options, &state.tally);
    } else {
        if (options->device == ADZE_CPU || options->device == ADZE_ALL_DEVICES)
            check_device(ADZE_CPU);
        if (options->device >= 0)
            check_device(options->device);
        for (int d = 0; d < adze_cuda_count() && options->device == ADZE_ALL_DEVICES; d++)
            check_device(d);
        if (adze_cuda_count() == 0 && options->device == ADZE_ALL_DEVICES) {
            printf("%s   cuda kernels %s: %s\n", options->require ? "FAIL" : "--",
                   options->require ? "are required" : "skipped",
                   ADZE_CUDA ? "no CUDA device" : "built without CUDA");
            options->require ? state.tally.failed++ : state.tally.skipped++;
        }
    }
    printf("%d passed, %d failed, %d skipped\n", state.tally.passed, state.tally.failed, state.tally.skipped);
    return state.tally.failed != 0;
}
