/* tune.c - `adze tune`: times every variant of an op's kernel on a grid of calls, and writes the table of the
   fastest. */
#include "tune.h"

#include "cli.h"
#include "gpu.h"
#include "suite.h"
#include "trial.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char help[] =
    "adze tune OP [--table FILE] [--record FILE] [--device cuda|N] [--dtype bf16|f16|f32] [--quick]\n"
    "adze tune OP --line LINE [--record FILE] [--device cuda|N] [--quick]\n"
    "adze tune OP --times FILE [--table FILE]\n\n"
    "Times every variant of the op's CUDA kernel (`adze info OP` lists them) on a grid of calls: those that\n"
    "`adze bench OP` times, each with several numbers of rows, from one to many for each SM. Every variant is "
    "verified\n"
    "on a small call first, the fastest also on the whole one. The kernel's own choice stays where no other variant\n"
    "is faster by 2 % and by more than the spread.\n\n"
    "  OP              the op\n"
    "  --table FILE    put the rows of this op and this card into the table FILE, in the place of earlier ones.\n"
    "                  The library is built with src/tuned.h: after\n"
    "                      adze tune OP --table src/tuned.h && make\n"
    "                  calls on such a card take the fastest variant. Without a row, the kernel chooses by the\n"
    "                  properties of the device: SMs, threads per SM, shared memory\n"
    "  --record FILE   keep all times in FILE\n"
    "  --times FILE    take the times that --record kept, of any machine; nothing is timed\n"
    "  --line LINE     this call instead of those of the op, as ADZE_TRACE=1 prints it, with several numbers of "
    "rows\n"
    "  --device D      where (default: the first GPU)\n"
    "  --dtype T       one dtype only, of the lines that leave it open (default: all three in turn)\n"
    "  --quick         less exact\n";

static struct {
    const char *op, *table, *record, *times, *dtype, *line;
    int device, quick;
} options;

static int progress; /* standard error is a terminal */

/* ---- The grid ---- */

/* The outermost dimension of a tensor that is not its last and has more than one index; -1: there is none. */
static int outer(const adze_tensor *t)
{
    for (int d = 0; d < t->rank - 1; d++)
        if (t->shape[d] > 1)
            return d;
    return -1;
}

static const adze_tensor *first_input(adze_line *line)
{
    int f = 0;
    while (!adze_is_input(&line->op->fields[f]) || adze_is_inout(&line->op->fields[f]))
        f++;
    return adze_line_tensor(line, f);
}

/* Copies a line's text with `size` indices in that dimension of the first input, and of all tensors that share it. */
static int resized(char *to, size_t room, adze_line *line, const char *text, int64_t size)
{
    const adze_tensor *x = first_input(line);
    if (outer(x) < 0)
        return 0;
    const int64_t old = x->shape[outer(x)];
    size_t n = 0;
    for (const char *at = text; *at && n + 24 < room;) {
        to[n++] = *at;
        if (*at++ != '[')
            continue;
        for (const char *dim = at; *dim && *dim != ']';) { /* up to the first dimension of more than one */
            char *end;
            const int64_t its = strtoll(dim, &end, 10);
            const char *next = end + strcspn(end, ",]");
            if (its > 1 || *next == ']') {
                memcpy(to + n, at, (size_t)(dim - at));
                n += (size_t)(dim - at);
                if (its == old && *next == ',')
                    n += (size_t)snprintf(to + n, room - n, "%lld", (long long)size);
                else
                    n += (size_t)snprintf(to + n, room - n, "%.*s", (int)(end - dim), dim);
                at = end;
                break;
            }
            dim = next + (*next == ',');
        }
    }
    to[n] = '\0';
    return 1;
}

/* ---- Measuring ---- */

static const adze_kernel *kernel_with_variants(const adze_op *op, adze_stream stream)
{
    for (const adze_kernel *k = op->kernels; k->run; k++)
        if (k->variants && adze_can_run(k, stream))
            return k;
    return NULL;
}

/* Adds the times of one call; a line that cannot be timed, or a variant that is wrong, is reported. */
static int time_line(adze_times *times, const adze_kernel *kernel, adze_stream stream, const char *text)
{
    static const adze_effort efforts[2][2] = {{{15, 1000, 1}, {5, 500, 1}}, {{5, 10000, 1}, {3, 2000, 1}}};
    const adze_effort *effort = &efforts[stream.device == ADZE_CPU][options.quick];
    char error[512];
    adze_line line;
    adze_trial *trial = calloc(1, sizeof *trial);
    int good = trial && adze_line_parse(&line, NULL, text, error, sizeof error) &&
               adze_trial_make(trial, &line, stream, ADZE_VARIANTS_ALL, error, sizeof error) &&
               adze_trial_time(trial, effort, error, sizeof error);
    if (progress)
        fprintf(stderr, "\r\033[K");
    if (trial && !good)
        printf("-- %s: %s\n", text, error);
    adze_choice choice = {.want = -1, .dry = 1, .untuned = 1};
    int wrong = 0;
    if (good && adze_run_choice(kernel, stream, trial->whole->args, &choice) == ADZE_OK && choice.ran >= 0) {
        adze_timed_call *c = adze_times_add(times);
        snprintf(c->line, sizeof c->line, "%s", text);
        snprintf(c->before, sizeof c->before, "%s", kernel->variants->list[choice.ran].name);
        c->form = choice.form;
        memcpy(c->size, choice.size, sizeof c->size);
        for (int k = 0; k < trial->attempts; k++) {
            const adze_attempt *a = &trial->attempt[k];
            if (a->verdict.why[0])
                wrong = printf("WRONG %s.%s: %s\n      %s run '%s'\n", times->op, a->kernel->name, a->verdict.why,
                               adze_program, text) > 0;
            else if (a->kernel->only && a->us > 0 && c->count < ADZE_TIMES_VARIANTS) {
                const int v = c->count++;
                snprintf(c->variant[v].name, sizeof c->variant[v].name, "%s",
                         kernel->variants->list[a->kernel->only - 1].name);
                c->variant[v].us = a->us;
                c->variant[v].spread = a->spread;
            }
        }
    }
    if (trial)
        adze_trial_free(trial);
    free(trial);
    return wrong;
}

/* A line as it is, and with other numbers of rows: from one to 32 for each SM. */
static int time_grid(adze_times *times, const adze_kernel *kernel, adze_stream stream, const char *text)
{
    char other[512], error[256];
    adze_line line;
    if (!adze_line_parse(&line, NULL, text, error, sizeof error))
        return 0;
    const adze_tensor *x = first_input(&line);
    const int d = outer(x);
    const int64_t old = d < 0 ? 1 : x->shape[d], inner = adze_count(x) / old / (x->rank ? x->shape[x->rank - 1] : 1);
    const int64_t per_sm[] = {0, 1, 2, 8, 64}; /* halves of the SMs; 0: one row */
    int wrong = time_line(times, kernel, stream, text);
    int64_t last = old;
    for (size_t i = 0; i < sizeof per_sm / sizeof *per_sm; i++) {
        const int64_t rows = per_sm[i] ? per_sm[i] * times->sm_count / 2 : 1;
        const int64_t size = rows / inner > 1 ? rows / inner : 1;
        if (d < 0 || size == old || size == last || !resized(other, sizeof other, &line, text, size))
            continue;
        wrong |= time_line(times, kernel, stream, other);
        last = size;
    }
    return wrong;
}

static int measure(adze_times *times, const adze_suite *suite, const adze_kernel *kernel, adze_stream stream)
{
    int lines = 0, wrong = 0;
    if (options.line)
        return time_grid(times, kernel, stream, options.line);
    while (suite->bench && suite->bench[lines])
        lines++;
    for (int i = 0; i < lines; i++)
        for (int d = 0; d < adze_line_variants(suite->bench[i]); d++) {
            const char *dtype = options.dtype ? options.dtype : adze_line_dtypes[d];
            char text[400], full[512];
            if (options.dtype && d > 0)
                break;
            adze_line_expand(text, sizeof text, suite->bench[i], dtype);
            snprintf(full, sizeof full, "%s %s", suite->op->name, text);
            if (progress)
                fprintf(stderr, "\r%s %d/%d %s\033[K", suite->op->name, i, lines, dtype);
            wrong |= time_grid(times, kernel, stream, full);
        }
    return wrong;
}

/* ---- The command ---- */

static void describe(adze_times *times, adze_stream stream)
{
    adze_machine m;
    const time_t now = time(NULL);
    adze_machine_ask(&m, stream.device);
    snprintf(times->op, sizeof times->op, "%s", options.op);
    snprintf(times->card, sizeof times->card, "%s", m.cpu);
    times->sm_count = m.cores;
    if (stream.device != ADZE_CPU) {
        adze_cuda_name(stream.device, times->card, sizeof times->card);
        times->sm_count = m.sm_count;
    }
    snprintf(times->driver, sizeof times->driver, "%s", m.driver);
    snprintf(times->commit, sizeof times->commit, "%s", adze_commit());
    strftime(times->date, sizeof times->date, "%Y-%m-%d", gmtime(&now));
}

static int fail(const char *message)
{
    fprintf(stderr, "adze tune: %s\n", message);
    return 2;
}

static int tune(const adze_op *op, adze_times *times)
{
    adze_stream stream = {options.device, NULL};
    if (stream.device == ADZE_CPU && !kernel_with_variants(op, stream))
        return fail("tune needs a CUDA device; --times FILE makes a table of times that were recorded on one");
    const char *message = adze_prepare(stream.device) != ADZE_OK ? adze_last_error()
                          : stream.device == ADZE_CPU            ? NULL
                                                                 : adze_gpu_open(&stream);
    if (message)
        return fail(message);
    const adze_kernel *kernel = kernel_with_variants(op, stream);
    const adze_suite *const *suite = adze_suites;
    while ((*suite)->op != op)
        suite++;
    describe(times, stream);
    progress = isatty(STDERR_FILENO);
    const int wrong = kernel ? measure(times, *suite, kernel, stream) : 0;
    if (stream.device != ADZE_CPU)
        adze_gpu_close(stream);
    return !kernel ? fail("no kernel of this op has variants on this device") : wrong;
}

int adze_cli_tune(int argc, char **argv)
{
    const adze_option list[] = {
        {.name = "--table", .text = &options.table},
        {.name = "--record", .text = &options.record},
        {.name = "--times", .text = &options.times},
        {.name = "--line", .text = &options.line},
        {.name = "--device", .device = &options.device},
        {.name = "--dtype", .text = &options.dtype, .choices = "bf16|f16|f32"},
        {.name = "--quick", .flag = &options.quick},
        {.name = NULL},
    };
    options.device = adze_cuda_count() > 0 ? 0 : ADZE_CPU;
    int status;
    if (!adze_cli_options("tune", help, list, &options.op, argc, argv, &status))
        return status;
    const adze_op *op = options.op ? adze_find_op(options.op, strlen(options.op)) : NULL;
    if (!op) {
        fprintf(stderr, options.op ? "adze tune: no op is called '%s'\n" : "adze tune: an op is missing\n\n%s",
                options.op ? options.op : help);
        return 2;
    }
    adze_times times = {.count = 0};
    char error[512];
    adze_line line;
    if (options.line && !adze_line_parse(&line, NULL, options.line, error, sizeof error))
        return fail(error);
    if (options.line && line.op != op)
        return fail("the line is a call of another op");
    if (options.line && (options.table || options.times))
        return fail("--line is one call; --table and --times are for all of the op");
    if (options.times && options.record)
        return fail("--record keeps what is timed, but with --times nothing is");
    if (options.times && !adze_times_read(&times, options.times))
        return 2;
    if (options.times && strcmp(times.op, op->name) != 0) {
        fprintf(stderr, "adze tune: '%s' has times of %s, not of %s\n", options.times, times.op, op->name);
        adze_times_free(&times);
        return 2;
    }
    status = options.times ? 0 : tune(op, &times);
    if (status == 0)
        adze_times_report(&times);
    if (status == 0 && options.record && !adze_times_write(&times, options.record))
        status = 2;
    if (status == 0 && options.table && !adze_table_write(&times, options.table))
        status = 2;
    adze_times_free(&times);
    return status;
}
