/* alias.c - lines whose outputs are inputs, from the table of fields: every way that it allows, and every one that
   must be refused. */
#include "alias.h"

#include <stdlib.h>
#include <string.h>

int adze_may_be(const adze_field *out, const adze_field *in)
{
    for (int i = 0; i < ADZE_MAY_BE; i++)
        if (out->may_be[i] == in->offset)
            return 1;
    return 0;
}

/* Whether an output could be the very view of a tensor: it has that shape, and elements of its own. */
static int fits(const adze_job *job, int out, int other)
{
    const adze_field *fields = job->line.op->fields;
    const adze_tensor *a = (const void *)(job->line.args + fields[out].offset);
    const adze_tensor *b = (const void *)(job->line.args + fields[other].offset);
    if (out == other || !adze_is_tensor(&fields[other]) || !a->dtype || a->dtype != b->dtype || a->rank != b->rank)
        return 0;
    for (int d = 0; d < a->rank; d++)
        if (a->shape[d] != b->shape[d] || b->shape[d] == 0 || (b->shape[d] > 1 && b->stride[d] == 0))
            return 0;
    return 1;
}

/* Whether tensor g shares its memory with none: what is placed there meets no third one. */
static int alone(const adze_job *job, int g)
{
    for (int h = 0; job->line.op->fields[h].name; h++)
        if (h != g && job->memory_of[h] == job->memory_of[g])
            return 0;
    return 1;
}

/* The inputs that output f may be in this line, besides none; none at all where the line has placed it itself. */
static int choices(const adze_job *job, int f, int *to)
{
    const adze_field *fields = job->line.op->fields;
    int n = 0;
    for (int g = 0; fields[g].name && !job->line.given[f]; g++)
        if (adze_may_be(&fields[f], &fields[g]) && fits(job, f, g) && alone(job, g))
            to[n++] = g;
    return n;
}

static size_t append_output(const adze_job *job, int f, int g, char *to, size_t size)
{
    const adze_field *fields = job->line.op->fields;
    const adze_tensor *t = (const void *)(job->line.args + fields[g].offset);
    int n = snprintf(to, size, " %s=%s[", fields[f].name, adze_dtype_name(t->dtype));
    for (int d = 0; d < t->rank && n < (int)size; d++)
        n += snprintf(to + n, size - (size_t)n, "%s%lld:%lld", d ? "," : "", (long long)t->shape[d],
                      (long long)t->stride[d]);
    if (n < (int)size)
        n += snprintf(to + n, size - (size_t)n, "]@%s", fields[g].name);
    return (size_t)n < size ? (size_t)n : size - 1;
}

int adze_alias_line(const adze_op *op, const char *text, int n, char *to, size_t size)
{
    char error[256];
    adze_line line;
    adze_job *job = malloc(sizeof *job);
    int found = 0;
    if (job && adze_line_parse(&line, op, text, error, sizeof error) &&
        adze_job_layout(job, &line, (adze_stream){ADZE_CPU, NULL}, error, sizeof error)) {
        /* A way is a number whose digits are the choices of the outputs; 0 is none of all. */
        for (int way = 1, more = 1; more && !found; way++) {
            int rest = way, used[ADZE_FIELDS_MAX] = {0}, clash = 0;
            size_t at = (size_t)snprintf(to, size, "%s", text);
            for (int f = 0; op->fields[f].name; f++) {
                int inputs[ADZE_FIELDS_MAX];
                const int count = adze_is_output(&op->fields[f]) ? choices(job, f, inputs) : 0,
                          digit = rest % (count + 1);
                rest /= count + 1;
                if (digit == 0 || at >= size)
                    continue;
                clash |= used[inputs[digit - 1]]++;
                at += append_output(job, f, inputs[digit - 1], to + at, size - at);
            }
            more = rest == 0;
            found = more && !clash && n-- == 0;
        }
    }
    free(job);
    return found;
}

int adze_alias_refused(const adze_job *job, int n, void *args, const adze_field **out, const adze_field **other)
{
    const adze_op *op = job->line.op;
    for (int f = 0; op->fields[f].name; f++)
        for (int g = 0; op->fields[g].name && adze_is_output(&op->fields[f]); g++) {
            if (!fits(job, f, g) || adze_may_be(&op->fields[f], &op->fields[g]) || !alone(job, g) || n-- > 0)
                continue;
            memcpy(args, job->args, op->args_size);
            memcpy((char *)args + op->fields[f].offset, job->args + op->fields[g].offset, sizeof(adze_tensor));
            const int swapped = g < f && adze_is_output(&op->fields[g]); /* of two outputs the first is named first */
            *out = &op->fields[swapped ? g : f], *other = &op->fields[swapped ? f : g];
            return 1;
        }
    return 0;
}
