/* check.c - every op x case x dtype x kernel, against the definition. */
#include "check.h"

#include "alias.h"
#include "dependency.h"
#include "gpu.h"
#include "suite.h"
#include "trial.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct kernel_row { /* of the report */
    double worst, ulps;
    int cases;
} kernel_row;

/* A call is verified with the variants that the kernel chooses, and with a few others that take it: those with the
   fewest cases so far. */
enum { VARIANTS_MAX = 96, OTHER_VARIANTS = 1 };
/* --small leaves out calls with more arithmetic, which take minutes in an emulator or under a sanitizer. */
static const double small_flops = 4e6;

typedef struct variant_table {
    const adze_kernel *kernel; /* of the op that is checked, and of this device; NULL: none has variants */
    int count;
    adze_variant_row row[VARIANTS_MAX];
    kernel_row report[VARIANTS_MAX];
} variant_table;

static struct {
    const adze_check_options *options;
    adze_tally tally;
    int progress;               /* standard error is a terminal */
    unsigned turn;              /* counts the calls whose outputs are inputs */
    adze_dependency dependency; /* open on GPUs whose kernels overlap */
    variant_table variants;
    int left_out; /* calls of the op that is checked */
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
    printf("FAIL %s: %s\n     %s run '%s'\n", kernel, why, adze_program, line);
    state.tally.failed++;
}

/* --kernel names a kernel, with all its variants, or one variant. */
static int is_wanted(const adze_kernel *k)
{
    const char *name = state.options->kernel;
    return !name || strcmp(name, k->name) == 0 ||
           (k->only && strncmp(name, k->name, strlen(name)) == 0 && k->name[strlen(name)] == '/');
}

static void judge_kernel(const adze_op *op, adze_job *job, const char *full, adze_wanted *wanted,
                         const adze_kernel *k, kernel_row *row)
{
    adze_verdict v;
    adze_judge(job, k, adze_wanted_of(wanted, k), &v);
    if (state.dependency.stream.handle && !v.why[0])
        adze_dependency_judge(&state.dependency, job, k, &v);
    char name[100];
    snprintf(name, sizeof name, "%s.%s", op->name, k->name);
    if (v.why[0])
        complain(name, full, v.why);
    else
        state.tally.passed++;
    if (state.options->verbose)
        printf("%s %-24s %5.2f ulp, %3.0f%% of the limit  %s\n", v.why[0] ? "FAIL" : "ok  ", name, v.ulps,
               100 * v.worst, full);
    row->cases++;
    row->worst = v.worst > row->worst ? v.worst : row->worst;
    row->ulps = v.ulps > row->ulps ? v.ulps : row->ulps;
}

/* The variants with the fewest cases among those that take the call, `most` of them. */
static void judge_variants(const adze_op *op, adze_job *job, const char *full, adze_wanted *wanted, int most)
{
    variant_table *t = &state.variants;
    int tried[VARIANTS_MAX] = {0};
    while (most > 0) {
        int next = -1;
        for (int i = 0; i < t->count; i++)
            if (!tried[i] && is_wanted(&t->row[i].kernel) && (next < 0 || t->report[i].cases < t->report[next].cases))
                next = i;
        if (next < 0)
            return;
        tried[next] = 1;
        if (!adze_accepts(&t->row[next].kernel, job->stream, job->args))
            continue;
        judge_kernel(op, job, full, wanted, &t->row[next].kernel, &t->report[next]);
        most--;
    }
}

/* The call of a line, by every kernel that takes it. */
static void judge_line(const adze_op *op, adze_job *job, const char *full, adze_wanted *wanted, kernel_row *rows)
{
    for (const adze_kernel *k = op->kernels; k->run; k++)
        if (is_wanted(k) && adze_can_run(k, job->stream) && adze_accepts(k, job->stream, job->args))
            judge_kernel(op, job, full, wanted, k, &rows[k - op->kernels]);
    judge_variants(op, job, full, wanted, state.options->kernel ? VARIANTS_MAX : OTHER_VARIANTS);
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
static void check_aliases(const adze_job *job, const char *text, adze_wanted *wanted, kernel_row *rows)
{
    const adze_op *op = job->line.op;
    char full[1300], aliased[1200], error[256];
    int ways = 0;
    while (adze_alias_line(op, text, ways, aliased, sizeof aliased))
        ways++;
    if (ways && adze_alias_line(op, text, (int)(state.turn++ % (unsigned)ways), aliased, sizeof aliased)) {
        snprintf(full, sizeof full, "%s %s", op->name, aliased);
        adze_job *other = adze_job_new(op, aliased, job->stream, error, sizeof error);
        if (other)
            judge_line(op, other, full, wanted, rows);
        else
            complain(op->name, full, error);
        adze_job_delete(other);
    }
    _Alignas(16) char args[ADZE_ARGS_MAX];
    const adze_field *out, *in;
    for (int n = 0; adze_alias_refused(job, n, args, &out, &in); n++) {
        char says[80];
        snprintf(says, sizeof says, "%s overlaps %s", out->name, in->name);
        expect("an output that is another tensor", adze_dispatch(op, job->stream, args), ADZE_BAD_ARG, says, text);
    }
}

static int is_long(const adze_suite *suite, const char *full)
{
    adze_line line;
    char error[256];
    return suite->flops && adze_line_parse(&line, NULL, full, error, sizeof error) &&
           suite->op->validate(line.args) == ADZE_OK && suite->flops(line.args) > small_flops;
}

static void check_line(const adze_suite *suite, adze_stream stream, const char *text, kernel_row *rows)
{
    const adze_op *op = suite->op;
    char full[1100], error[256];
    snprintf(full, sizeof full, "%s %s", op->name, text);
    if (state.options->small && is_long(suite, full)) {
        state.left_out++;
        return;
    }
    adze_job *job = adze_job_new(NULL, full, stream, error, sizeof error);
    if (!job) {
        complain(op->name, full, error);
        return;
    }
    adze_wanted wanted = {.job = job};
    if (op->validate(job->line.args) != ADZE_OK) {
        complain(op->name, full, adze_last_error());
    } else {
        judge_line(op, job, full, &wanted, rows);
        check_aliases(job, text, &wanted, rows);
    }
    adze_wanted_free(&wanted);
    adze_job_delete(job);
}

/* Calls that every op must refuse: a valid one with one change each. */
static void check_bad_calls(const adze_op *op, adze_stream stream, const char *text)
{
    char error[256];
    adze_job *job = adze_job_new(op, text, stream, error, sizeof error);
    if (!job) {
        complain(op->name, text, error);
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
    BAD("bytes of a newer caller", (call->size += 8, args[op->args_size + 3] = 1), ADZE_BAD_ARG,
        "a field of a newer adze.h");
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
        if (!adze_is_tensor(field) || ((adze_tensor *)(void *)(job->args + field->offset))->dtype == ADZE_NONE)
            continue;
        BAD("no data", t->data = NULL, ADZE_BAD_ARG, field->name);
        const adze_tensor *const given = (const adze_tensor *)(void *)(job->args + field->offset);
        if (adze_dtype_size(given->dtype) > 1)
            BAD("an odd address", t->data = (char *)t->data + 1, ADZE_BAD_ARG, "multiple of");
        BAD("an unknown dtype", t->dtype = 99, ADZE_BAD_DTYPE, field->name);
        BAD("rank 6", t->rank = 6, ADZE_BAD_ARG, field->name);
        BAD("a negative rank", t->rank = -1, ADZE_BAD_ARG, field->name);
        BAD("a negative size", t->shape[0] = -1, ADZE_BAD_ARG, field->name);
        BAD("an absurd size", t->shape[0] = INT64_MAX, ADZE_BAD_ARG, field->name);
        BAD("an absurd stride", (t->shape[0] = 3, t->stride[0] = INT64_MAX / 2), ADZE_BAD_ARG, field->name);
        /* where the last dimension has one element, its stride means nothing */
        if (given->shape[given->rank - 1] > 1)
            BAD("a last stride of 2", (t->stride[t->rank - 1] = 2), ADZE_BAD_ARG, field->name);
        if (adze_is_made(field)) {
            BAD("a shape of its own", t->shape[t->rank - 1]++, ADZE_BAD_ARG, field->name);
            BAD("a dtype of its own", t->dtype = ADZE_F64, ADZE_BAD_DTYPE, field->name);
        }
        if (adze_is_output(field)) {
            BAD("rows that share memory", t->stride[0] = 0, ADZE_BAD_ARG, field->name);
            for (int g = 0; op->fields[g].name; g++) {
                const adze_tensor *in = (adze_tensor *)(void *)(args + op->fields[g].offset);
                if (adze_is_input(&op->fields[g]) && g != f && in->dtype == t->dtype)
                    BAD("an overlap", t->data = (char *)in->data + adze_dtype_size(in->dtype), ADZE_BAD_ARG,
                        field->name);
            }
        }
    }
#undef BAD
    adze_job_delete(job);
}

static void check_bad_lines(const adze_suite *suite, adze_stream stream)
{
    for (const adze_bad_case *b = suite->bad; b && b->line; b++) {
        char error[256];
        adze_job *job = adze_job_new(suite->op, b->line, stream, error, sizeof error);
        if (job)
            expect("its own bad call", adze_dispatch(suite->op, stream, job->args), b->status, b->says, b->line);
        else
            complain(suite->op->name, b->line, error);
        adze_job_delete(job);
    }
}

/* Calls above 2^31 elements: rows that repeat those of a verified call, and a sample of the outputs. */
static void check_huge(const adze_suite *suite, int device)
{
    const adze_effort once = {1, 0, 0};
    for (const char *const *text = suite->huge; text && *text; text++) {
        char line_text[1024], error[256] = "";
        adze_line line;
        adze_stream stream = {device, NULL};
        adze_trial *trial = calloc(1, sizeof *trial);
        adze_line_expand(line_text, sizeof line_text, *text, "bf16");
        const char *message = adze_gpu_open(&stream);
        int ok = !message && adze_line_parse(&line, suite->op, line_text, error, sizeof error) &&
                 adze_trial_make(trial, &line, stream, ADZE_KERNELS_ALL, error, sizeof error) &&
                 adze_trial_time(trial, &once, error, sizeof error) && trial->attempts > 0;
        for (int k = 0; k < trial->attempts && ok; k++)
            if (trial->attempt[k].verdict.why[0]) {
                snprintf(error, sizeof error, "%.255s", trial->attempt[k].verdict.why);
                ok = 0;
            }
        printf("%s %s %s%s%s\n", ok ? "     huge:" : "FAIL huge:", suite->op->name, line_text, ok ? "" : ": ",
               ok        ? ""
               : message ? message
                         : error);
        ok ? state.tally.passed++ : state.tally.failed++;
        adze_trial_free(trial);
        free(trial);
        adze_gpu_close(stream);
    }
}

static void list_variants(const adze_op *op, adze_stream stream)
{
    variant_table *t = &state.variants;
    memset(t, 0, sizeof *t);
    for (const adze_kernel *k = op->kernels; k->run && !t->kernel; k++)
        if (k->variants && adze_can_run(k, stream))
            t->kernel = k;
    t->count = t->kernel ? adze_variant_count(t->kernel) : 0;
    t->count = t->count < VARIANTS_MAX ? t->count : VARIANTS_MAX;
    for (int i = 0; i < t->count; i++)
        adze_variant_kernel(&t->row[i], t->kernel, i);
}

/* A variant that took no case takes a line that is timed, of any dtype, if there is one; the check of it is shorter.
 */
static void check_missed_variants(const adze_suite *suite, adze_stream stream)
{
    variant_table *t = &state.variants;
    for (const char *const *text = suite->bench; text && *text; text++)
        for (int d = 0; d < adze_line_variants(*text); d++) {
            int missed = 0;
            for (int i = 0; i < t->count; i++)
                missed += !t->report[i].cases && is_wanted(&t->row[i].kernel);
            if (!missed)
                return;
            char line_text[1024], error[256] = "";
            adze_line line;
            adze_trial *trial = calloc(1, sizeof *trial);
            adze_line_expand(line_text, sizeof line_text, *text, adze_line_dtypes[d]);
            if (trial && adze_line_parse(&line, suite->op, line_text, error, sizeof error) &&
                adze_trial_make(trial, &line, stream, ADZE_CHOSEN, error, sizeof error))
                for (int i = 0; i < t->count; i++)
                    if (!t->report[i].cases && is_wanted(&t->row[i].kernel) &&
                        adze_accepts(&t->row[i].kernel, stream, trial->small->args))
                        judge_kernel(suite->op, trial->small, line_text, &trial->wanted, &t->row[i].kernel,
                                     &t->report[i]);
            if (trial)
                adze_trial_free(trial);
            free(trial);
        }
}

static void report_variants(const adze_op *op)
{
    const variant_table *t = &state.variants;
    int missed = 0, cases = 0, ran = 0;
    for (int i = 0; i < t->count; i++) {
        const kernel_row *row = &t->report[i];
        if (!is_wanted(&t->row[i].kernel))
            continue;
        missed += row->cases == 0, ran += row->cases > 0, cases += row->cases;
        if (row->cases && (state.options->verbose || state.options->kernel))
            printf("     %s.%-*s %5d cases, worst %.3f ulp, %.0f%% of the limit\n", op->name,
                   30 - (int)strlen(op->name), t->row[i].name, row->cases, row->ulps, 100 * row->worst);
    }
    if (ran)
        printf("     %s: each of %d variants by name, %d cases\n", op->name, ran, cases);
    if (missed) {
        printf("--   %s: no case takes", op->name);
        for (int i = 0; i < t->count; i++)
            if (!t->report[i].cases && is_wanted(&t->row[i].kernel))
                printf(" %s", t->row[i].name);
        printf("\n");
        state.tally.skipped += missed;
    }
}

static void check_suite(const adze_suite *suite, adze_stream stream)
{
    const adze_op *op = suite->op;
    list_variants(op, stream);
    state.left_out = 0;
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
            const int dtypes = adze_line_variants(*line);
            for (int d = 0; d < dtypes; d++) {
                char text[1024];
                if (state.options->brief && d != done % dtypes)
                    continue;
                adze_line_expand(text, sizeof text, *line, adze_line_dtypes[d]);
                check_line(suite, stream, text, rows);
            }
        }
    check_missed_variants(suite, stream);
    progress_clear();
    char text[1024];
    adze_line_expand(text, sizeof text, suite->good[0], "bf16");
    check_bad_calls(op, stream, text);
    check_bad_lines(suite, stream);
    if (state.options->huge && stream.device != ADZE_CPU)
        check_huge(suite, stream.device);
    for (const adze_kernel *k = op->kernels; k->run; k++) {
        const kernel_row *row = &rows[k - op->kernels];
        if (!is_wanted(k) || k->on_cuda != (stream.device != ADZE_CPU))
            continue;
        if (!adze_can_run(k, stream)) {
            printf("--   %s.%s skipped: not for this machine\n", op->name, k->name);
            state.tally.skipped++;
        } else {
            printf("     %s.%-*s %5d cases, worst %.3f ulp, %.0f%% of the limit\n", op->name,
                   30 - (int)strlen(op->name), k->name, row->cases, row->ulps, 100 * row->worst);
        }
    }
    report_variants(op);
    if (state.left_out)
        printf("--   %s: %d calls above %g Mflop left out\n", op->name, state.left_out, small_flops / 1e6);
}

/* A device that was named and is missing is a failure. */
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

int adze_check(const adze_check_options *options)
{
    if (!adze_check_options_hold(options))
        return 2;
    memset(&state, 0, sizeof state);
    state.options = options;
    state.progress = isatty(STDERR_FILENO);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (options->device == ADZE_CPU || options->device == ADZE_ALL_DEVICES)
        check_device(ADZE_CPU);
    if (options->device >= 0)
        check_device(options->device);
    for (int d = 0; d < adze_cuda_count() && options->device == ADZE_ALL_DEVICES; d++)
        check_device(d);
    if (adze_cuda_count() == 0 && options->device == ADZE_ALL_DEVICES) {
        printf("%s   cuda kernels %s: %s\n", options->require ? "FAIL" : "--",
               options->require ? "are required" : "skipped", ADZE_CUDA ? "no CUDA device" : "built without CUDA");
        options->require ? state.tally.failed++ : state.tally.skipped++;
    }
    return adze_tally_report(&state.tally);
}
