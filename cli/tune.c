/* tune.c - `adze tune`: times every variant of an op's kernel on a grid of calls, and writes the table of the
   fastest. */
#include "tune.h"

#include "cli.h"
#include "gpu.h"
#include "suite.h"
#include "timing.h"
#include "trial.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char help[] =
    "adze tune OP [--line LINE] [--table FILE] [--record FILE] [--seconds N] [--device cuda|N] [--dtype "
    "bf16|f16|f32]\n"
    "             [--quick]\n"
    "adze tune OP --times FILE [--table FILE]\n\n"
    "Times every variant of the op's CUDA kernel (`adze info OP` lists them) on the calls that `adze bench OP` "
    "times,\n"
    "and then on the same with other numbers of rows, from one to many for each SM. The sizes of gemm and attention\n"
    "are not changed: their lists have them. Every variant is verified on a small call first, the fastest also on "
    "the\n"
    "whole one. The kernel's own choice stays where no other variant is faster by 2 % and by more than the "
    "spread.\n\n"
    "  OP              the op\n"
    "  --table FILE    put the rows of this op and this card into the table FILE, in the place of earlier ones.\n"
    "                  The library is built with src/tuned.h: after\n"
    "                      adze tune OP --table src/tuned.h && make\n"
    "                  calls on such a card take the fastest variant. Without a row, the kernel chooses by the\n"
    "                  properties of the device: SMs, threads per SM, shared memory\n"
    "  --record FILE   keep all times in FILE, which is written after each call\n"
    "  --times FILE    take the times that --record kept, of any machine; nothing is timed\n"
    "  --line LINE     this call instead of those of the op, as ADZE_TRACE=1 prints it; @FILE: each line of a file\n"
    "                  that is a call of the op\n"
    "  --seconds N     begin no other call after N seconds\n"
    "  --device D      where (default: the first GPU)\n"
    "  --dtype T       one dtype only, of the lines that leave it open (default: all three in turn)\n"
    "  --quick         less exact\n";

static struct {
    const char *op, *table, *record, *times, *dtype, *line, *seconds;
    int device, quick;
} options;

static char **lines; /* of --line, up to a null */
static double begun; /* when the first call began, in us */
static int left_out; /* calls that --seconds left no time for */
static int progress; /* standard error is a terminal */

/* ---- The grid ---- */

/* Copies a line's text with `size` indices in that dimension of the first input, and of all tensors that share it. */
static int resized(char *to, size_t room, adze_line *line, const char *text, int64_t size)
{
    const adze_tensor *x = adze_line_tensor(line, adze_first_input(line->op));
    if (adze_outer(x) < 0)
        return 0;
    const int64_t old = x->shape[adze_outer(x)];
    const char *at = text;
    size_t n = 0;
    while (*at && n + 24 < room) {
        to[n++] = *at;
        if (*at++ != '[')
            continue;
        for (const char *dim = at; *dim && *dim != ']';) { /* up to the first dimension of more than one */
            char *end;
            const int64_t its = strtoll(dim, &end, 10);
            const char *next = end + strcspn(end, ",]");
            if (n + (size_t)(dim - at) + 24 >= room)
                return 0;
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
    return !*at;
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
    if (good && !trial->sets) {
        snprintf(error, sizeof error, "it moves no bytes: nothing is timed");
        good = 0;
    }
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

/* Times a call, unless it has been timed or time is up. */
static int time_once(adze_times *times, const adze_kernel *kernel, adze_stream stream, const char *text)
{
    for (int i = 0; i < times->count; i++)
        if (strcmp(times->calls[i].line, text) == 0)
            return 0;
    if (options.seconds && adze_now_us() - begun > 1e6 * atof(options.seconds)) {
        left_out++;
        return 0;
    }
    const int wrong = time_line(times, kernel, stream, text);
    if (options.record)
        adze_times_write(times, options.record); /* kept, should the rest not be reached */
    return wrong;
}

/* A line with other numbers of rows: from one to 32 for each SM. */
static int time_grid(adze_times *times, const adze_kernel *kernel, adze_stream stream, const char *text)
{
    char other[ADZE_LINE_TEXT], error[256];
    adze_line line;
    if (!adze_line_parse(&line, NULL, text, error, sizeof error))
        return 0;
    const adze_tensor *x = adze_line_tensor(&line, adze_first_input(line.op));
    const int d = adze_outer(x);
    const int64_t old = d < 0 ? 1 : x->shape[d], dim = x->rank ? x->shape[x->rank - 1] : 1;
    const int64_t inner = dim > 0 ? adze_count(x) / old / dim : 1;
    const int64_t per_sm[] = {0, 1, 2, 8, 64}; /* halves of the SMs; 0: one row */
    int wrong = 0;
    int64_t last = old;
    for (size_t i = 0; i < sizeof per_sm / sizeof *per_sm; i++) {
        const int64_t rows = per_sm[i] ? per_sm[i] * times->sm_count / 2 : 1;
        const int64_t size = rows / inner > 1 ? rows / inner : 1;
        if (d < 0 || size == old || size == last || !resized(other, sizeof other, &line, text, size))
            continue;
        wrong |= time_once(times, kernel, stream, other);
        last = size;
    }
    return wrong;
}

/* The lines of the op, or of --line, with each dtype: as they are, and with other numbers of rows. */
static int measure_all(adze_times *times, const adze_suite *suite, const adze_kernel *kernel, adze_stream stream,
                       int grid)
{
    int wrong = 0;
    for (char **line = lines; line && *line; line++)
        wrong |= grid ? time_grid(times, kernel, stream, *line) : time_once(times, kernel, stream, *line);
    for (int i = 0; !lines && suite->bench && suite->bench[i]; i++)
        for (int d = 0; d < adze_line_variants(suite->bench[i]); d++) {
            const char *dtype = options.dtype ? options.dtype : adze_line_dtypes[d];
            char text[ADZE_LINE_TEXT - 64], full[ADZE_LINE_TEXT];
            if (options.dtype && d > 0)
                break;
            adze_line_expand(text, sizeof text, suite->bench[i], dtype);
            snprintf(full, sizeof full, "%s %s", suite->op->name, text);
            if (progress)
                fprintf(stderr, "\r%s %d %s\033[K", suite->op->name, i, dtype);
            wrong |= grid ? time_grid(times, kernel, stream, full) : time_once(times, kernel, stream, full);
        }
    return wrong;
}

/* Listed calls come first. An op that counts its flops lists all sizes that matter. */
static int measure(adze_times *times, const adze_suite *suite, const adze_kernel *kernel, adze_stream stream)
{
    begun = adze_now_us();
    int wrong = measure_all(times, suite, kernel, stream, 0);
    if (!suite->flops)
        wrong |= measure_all(times, suite, kernel, stream, 1);
    if (left_out)
        printf("%d calls are left out: %s seconds are over\n", left_out, options.seconds);
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
    describe(times, stream);
    progress = isatty(STDERR_FILENO);
    const int wrong = kernel ? measure(times, adze_suite_of(op), kernel, stream) : 0;
    if (stream.device != ADZE_CPU)
        adze_gpu_close(stream);
    return !kernel ? fail("no kernel of this op has variants on this device") : wrong;
}

/* Of a file only the op's own; a single line must be one. */
static char **calls_of(const adze_op *op, char *error, size_t error_size)
{
    char **all = adze_cli_lines(options.line, error, error_size);
    int kept = 0;
    for (int i = 0; all && all[i]; i++) {
        adze_line line;
        if (adze_line_parse(&line, NULL, all[i], error, error_size) && line.op == op)
            all[kept++] = all[i];
        else
            free(all[i]);
    }
    if (all && !kept) {
        snprintf(error, error_size,
                 options.line[0] == '@' ? "the file has no call of this op" : "the line is a call of another op");
        free(all);
        return NULL;
    }
    if (all)
        all[kept] = NULL;
    return all;
}

static int is_time(const char *seconds)
{
    char *end;
    const double value = strtod(seconds, &end);
    return end > seconds && !*end && value > 0;
}

int adze_cli_tune(int argc, char **argv)
{
    const adze_option list[] = {
        {.name = "--table", .text = &options.table},
        {.name = "--record", .text = &options.record},
        {.name = "--times", .text = &options.times},
        {.name = "--line", .text = &options.line},
        {.name = "--seconds", .text = &options.seconds},
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
    if (options.seconds && !is_time(options.seconds))
        return fail("--seconds must be a number above 0");
    if (options.line && options.times)
        return fail("--line is timed, but with --times nothing is");
    if (options.line && !(lines = calls_of(op, error, sizeof error)))
        return fail(error);
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
    adze_cli_lines_free(lines);
    if (status == 0)
        adze_times_report(&times);
    if (status == 0 && options.record && !adze_times_write(&times, options.record))
        status = 2;
    if (status == 0 && options.table && !adze_table_write(&times, options.table))
        status = 2;
    adze_times_free(&times);
    return status;
}
