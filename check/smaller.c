/* smaller.c - the call that is verified in the place of a large one: the same with fewer rows. */
#include "smaller.h"

#include "suite.h"

#include <stdlib.h>
#include <string.h>

enum {
    SMALL_ELEMENTS = 1 << 20, /* of all tensors: the definition of more would take too long */
    SMALL_VARIANTS = 1 << 17, /* the same where many variants are verified */
    SMALL_MOST = 1 << 26,     /* but rows that depend on each other are verified together up to this */
    CUT_MOST = 1 << 30,       /* the inputs of an op with samples, after its own cut, are made up to this */
};

/* Gives the outermost dimension of the first input `size` indices, in every tensor that shares it. */
static void resize(adze_line *line, int64_t size, size_t *period)
{
    const adze_op *op = line->op;
    const adze_tensor *x = adze_line_tensor(line, adze_first_input(op));
    const int64_t old = x->shape[adze_outer(x)];
    for (int f = 0; op->fields[f].name; f++) {
        adze_tensor *t = adze_line_tensor(line, f);
        const int d = adze_is_tensor(&op->fields[f]) && t->dtype ? adze_outer(t) : -1;
        if (d < 0 || t->shape[d] != old)
            continue;
        t->shape[d] = size;
        period[f] = (size_t)(size * t->stride[d]) * adze_dtype_size(t->dtype);
    }
}

/* Of all tensors of a line, which is that of the job, or was made of it. */
static int64_t elements(const adze_job *job, const adze_line *line)
{
    int64_t n = 0;
    for (int f = 0; line->op->fields[f].name; f++)
        if (job->memory_of[f] >= 0)
            n += adze_count((const void *)(line->args + line->op->fields[f].offset));
    return n;
}

/* Cuts the outermost dimension, so that the call is verified in little time; 0: there is none. `probe` is the same
   call with another number of rows: where rows do not depend on each other, both agree on those they share. */
static int cut(adze_line *line, adze_line *probe, int64_t *n, int64_t most, size_t *period)
{
    const adze_tensor *x = adze_line_tensor(line, adze_first_input(line->op));
    const int d = adze_outer(x);
    if (d < 0)
        return 0;
    const int64_t old = x->shape[d], factor = (*n + most - 1) / most;
    int64_t size = old > factor ? old / factor : 1;
    while (old % size)
        size--;
    *probe = *line;
    size_t unused[ADZE_FIELDS_MAX];
    resize(probe, size == 1 ? 2 : 1, unused);
    resize(line, size, period);
    *n = *n / old * size;
    return 1;
}

static int rows_are_independent(const adze_line *line, const adze_line *probe)
{
    const adze_stream cpu = {ADZE_CPU, NULL};
    const adze_line *lines[2] = {line, probe};
    adze_value *const *want[2] = {NULL, NULL};
    adze_wanted wanted[2] = {{0}};
    adze_job *job[2] = {calloc(1, sizeof **job), calloc(1, sizeof **job)};
    char error[256];
    int same = 1;
    for (int i = 0; i < 2 && same; i++) {
        same = adze_job_make(job[i], lines[i], cpu, 1, error, sizeof error) &&
               line->op->validate(job[i]->line.args) == ADZE_OK;
        wanted[i].job = job[i];
        if (same)
            want[i] = adze_wanted_of(&wanted[i], NULL);
    }
    for (int f = 0, out = 0; line->op->fields[f].name && same; f++) {
        if (!adze_is_output(&line->op->fields[f]))
            continue;
        const int64_t a = adze_count(adze_line_tensor(&job[0]->line, f));
        const int64_t b = adze_count(adze_line_tensor(&job[1]->line, f));
        if (want[0][out] && want[1][out])
            same = memcmp(want[0][out], want[1][out], (size_t)(a < b ? a : b) * sizeof(adze_value)) == 0;
        out++;
    }
    for (int i = 0; i < 2; i++) {
        adze_wanted_free(&wanted[i]);
        adze_job_free(job[i]);
        free(job[i]);
    }
    return same;
}

/* Whether the memory of each tensor that was cut repeats as a whole: what is left of it lies within a period, all
   that lies in it has the same period, and what was cut before begins with one. */
static int repeats(adze_job *whole, adze_line *reduced, const size_t *before, const size_t *period)
{
    const adze_op *op = whole->line.op;
    for (int f = 0; op->fields[f].name; f++) {
        const adze_tensor *x = adze_line_tensor(reduced, f);
        int64_t span = 1;
        for (int d = 0; period[f] && d < x->rank; d++) {
            if (x->stride[d] < 0)
                return 0;
            span += (x->shape[d] - 1) * x->stride[d];
        }
        if (period[f] && ((size_t)span * adze_dtype_size(x->dtype) > period[f] || before[f] % period[f] != 0))
            return 0;
        for (int g = 0; op->fields[g].name; g++)
            if (whole->memory_of[f] >= 0 && whole->memory_of[f] == whole->memory_of[g] && period[f] != period[g])
                return 0;
    }
    return 1;
}

/* Outputs that the line gives keep their strides. */
static void cut_by_op(const adze_suite *suite, adze_line *line)
{
    _Alignas(16) char due[ADZE_ARGS_MAX];
    suite->cut(line->args);
    memcpy(due, line->args, sizeof due);
    suite->op->outputs(due);
    for (int f = 0; suite->op->fields[f].name; f++)
        if (adze_is_made(&suite->op->fields[f]))
            memcpy(adze_line_tensor(line, f)->shape,
                   ((adze_tensor *)(void *)(due + suite->op->fields[f].offset))->shape, sizeof(int64_t) * 5);
}

/* Dimensions are cut as long as the rows that are left do not depend on those that are not. */
int adze_smaller_make(adze_job *small, adze_job *whole, size_t *period, int many, char *error, size_t error_size)
{
    const int64_t most = many ? SMALL_VARIANTS : SMALL_ELEMENTS;
    const adze_op *op = whole->line.op;
    int64_t n = elements(whole, &whole->line);
    const adze_suite *suite = adze_suite_of(op);
    if (suite->cut) {
        adze_line reduced = whole->line;
        if (n > SMALL_ELEMENTS / 4)
            cut_by_op(suite, &reduced);
        if (elements(whole, &reduced) > CUT_MOST) {
            snprintf(error, error_size, "the call is too large to be verified: it has %lld elements",
                     (long long)elements(whole, &reduced));
            return 0;
        }
        return adze_job_make(small, &reduced, whole->stream, 1, error, error_size);
    }
    adze_line reduced = whole->line, probe;
    while (n > most) {
        const adze_line before = reduced;
        const int64_t n_before = n;
        size_t period_before[ADZE_FIELDS_MAX];
        memcpy(period_before, period, sizeof period_before);
        if (!cut(&reduced, &probe, &n, most, period)) {
            if (n > SMALL_MOST) {
                snprintf(error, error_size,
                         "the call is too large to be verified: one row of all its tensors has %lld elements",
                         (long long)n);
                return 0;
            }
            break;
        }
        if (n > SMALL_MOST) /* the next cut is judged with this one */
            continue;
        if (repeats(whole, &reduced, period_before, period) && op->validate(reduced.args) == ADZE_OK &&
            rows_are_independent(&reduced, &probe))
            continue;
        if (n_before > SMALL_MOST) {
            snprintf(error, error_size, "the call is too large to be verified, and its rows depend on each other");
            return 0;
        }
        memcpy(period, period_before, sizeof period_before);
        reduced = before;
        break;
    }
    return adze_job_make(small, &reduced, whole->stream, 1, error, error_size);
}
