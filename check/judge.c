/* judge.c - a kernel against the definition: its values, what it leaves alone, and a second run. */
#include "judge.h"

#include "gpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One array per output field; NULL where it is absent. */
adze_value *const *adze_wanted_of(adze_wanted *w, const adze_kernel *kernel)
{
    const adze_op *op = w->job->line.op;
    const void *args = w->job->line.args;
    const int sums = op->samples ? op->samples->sums(kernel) : 0;
    if (w->made && w->sums == sums)
        return w->values;
    int n = 0;
    for (int f = 0; op->fields[f].name; f++) {
        if (!adze_is_output(&op->fields[f]))
            continue;
        const adze_tensor *t = (const void *)((const char *)args + op->fields[f].offset);
        if (t->dtype && !w->made)
            w->values[n] = calloc((size_t)adze_count(t) + 1, sizeof **w->values);
        for (int64_t i = 0; adze_is_inout(&op->fields[f]) && t->dtype && i < adze_count(t); i++)
            w->values[n][i] = (adze_value){NAN, ADZE_UNCHANGED};
        if (op->samples && t->dtype)
            op->samples->reference_at(args, sums, n, adze_count(t), NULL, w->values[n]);
        n++;
    }
    if (!op->samples)
        op->reference(args, w->values);
    w->sums = sums, w->made = 1;
    return w->values;
}

void adze_wanted_free(adze_wanted *w)
{
    for (int i = 0; i < ADZE_FIELDS_MAX; i++)
        free(w->values[i]);
    memset(w, 0, sizeof *w);
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
   run, so an element that is never written differs between two runs. */
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
   store. A finite value without a finite bound verifies nothing, so no kernel passes it. */
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

/* The call with the outputs of the kernel: what float error leaves open may depend on the other outputs. */
static void with_results(const adze_job *job, char *args)
{
    const adze_op *op = job->line.op;
    memcpy(args, job->line.args, op->args_size);
    for (int f = 0; op->fields[f].name; f++)
        if (adze_is_made(&op->fields[f]) && job->memory_of[f] >= 0)
            ((adze_tensor *)(void *)(args + op->fields[f].offset))->data =
                job->memory[job->memory_of[f]].result + job->place[f];
}

/* An element that a call must not change: 0 where it did. */
static int is_unchanged(const adze_job *job, int f, const adze_tensor *t, int64_t at)
{
    const adze_memory *m = &job->memory[job->memory_of[f]];
    const size_t size = adze_dtype_size(t->dtype);
    const char *now = (const char *)t->data + at * (int64_t)size;
    return memcmp(now, m->origin + (now - m->result), size) == 0;
}

static void judge_values(const adze_job *job, adze_value *const *want, adze_verdict *v)
{
    const adze_op *op = job->line.op;
    _Alignas(16) char args[ADZE_ARGS_MAX];
    with_results(job, args);
    int n = 0;
    for (int f = 0; op->fields[f].name; f++) {
        if (!adze_is_output(&op->fields[f]))
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
            if (due.e == ADZE_UNCHANGED) {
                if (!is_unchanged(job, f, &t, w.at) && !v->why[0])
                    snprintf(v->why, sizeof v->why,
                             "%s[%lld,%lld,%lld,%lld,%lld] was changed to %.9g, the call must leave it as it was",
                             op->fields[f].name, (long long)w.index[0], (long long)w.index[1], (long long)w.index[2],
                             (long long)w.index[3], (long long)w.index[4], adze_get(&t, w.at));
                continue;
            }
            const double got = adze_get(&t, w.at);
            double share = adze_error_share(t.dtype, got, due, &ulps);
            if (share > 1 && isfinite(due.e) && op->fields[f].also && op->fields[f].also(args, w.i, got))
                share = 1, ulps = 0;
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

int adze_tally_report(const adze_tally *tally)
{
    printf("%d passed, %d failed, %d skipped\n", tally->passed, tally->failed, tally->skipped);
    return tally->failed != 0;
}
