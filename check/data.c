/* data.c - memory for a line's tensors, with guards around it and random values in it. */
#include "data.h"

#include "gpu.h"
#include "suite.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const int64_t ELEMENTS_MOST = (int64_t)1 << 40; /* of a tensor, and between its first and last */
static const int64_t EMPTY_MOST = (int64_t)1 << 26;    /* of an empty tensor, the product of its other sizes */

static uint64_t random_bits(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u); /* splitmix64 */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

double adze_random_uniform(uint64_t *state)
{
    return (double)(int64_t)(random_bits(state) >> 11) * 0x1p-53;
}

/* Normal values come from a pool: a logarithm and a cosine for each element are a large part of a check, above all
   where the processor is emulated. Sixteen bits of a draw choose, and others vary the choice by up to 2^-9, so that
   the last places of a value are random too. */
enum { POOL = 1 << 16 };
static void fill_pool(double *pool)
{
    uint64_t state = 0;
    for (int i = 0; i < POOL; i++) {
        const double radius = sqrt(-2 * log(adze_random_uniform(&state) + 0x1p-60));
        pool[i] = radius * cos(6.283185307179586 * adze_random_uniform(&state));
    }
}

double adze_random_normal(uint64_t *state)
{
    static double pool[POOL];
    if (pool[0] == 0)
        fill_pool(pool);
    const uint64_t z = random_bits(state);
    return pool[z >> 48] * (1 + (double)(int32_t)z * 0x1p-40);
}

static double draw(adze_values values, double v, int64_t i)
{
    switch (values) {
    case ADZE_VALUES_TINY: return v * 0x1p-10;
    case ADZE_VALUES_OUTLIER: return i % 97 == 13 ? v * 200 : v;
    case ADZE_VALUES_EQUAL: return 1.5;
    case ADZE_VALUES_MEAN: return v + 60;
    case ADZE_VALUES_ZERO: return 0;
    case ADZE_VALUES_WIDE: return v * 12;
    case ADZE_VALUES_SPECIAL: return i % 251 == 7 ? INFINITY : i % 241 == 11 ? -INFINITY : i % 239 == 17 ? NAN : v;
    case ADZE_VALUES_LARGEST: return 65504;
    case ADZE_VALUES_OPPOSITE: return i % 2 ? -65504 : 65504;
    default: return v;
    }
}

static void fill_tensor(const adze_tensor *t, uint64_t state, adze_values values)
{
    const int byte = t->dtype == ADZE_I8 || t->dtype == ADZE_U8;
    const double many = t->dtype == ADZE_I32 || t->dtype == ADZE_I64 ? 4096 : byte ? 256 : 0; /* of whole numbers */
    const double low = t->dtype == ADZE_I8 ? -128 : 0;
    const int64_t count = adze_count(t);
    for (adze_walk w = {0}; w.i < count; adze_walk_next(&w, t))
        adze_put(t, w.at,
                 many > 0 ? floor(adze_random_uniform(&state) * many) + low
                          : draw(values, adze_random_normal(&state), w.i));
}

static void fill_inputs(adze_job *job, uint64_t seed)
{
    const adze_op *op = job->line.op;
    int first = 1;
    for (int f = 0; op->fields[f].name; f++) {
        const adze_tensor *t = adze_line_tensor(&job->line, f);
        if (!adze_is_input(&op->fields[f]) || t->dtype == ADZE_NONE)
            continue;
        const int inout = adze_is_inout(&op->fields[f]);
        fill_tensor(t, seed + (uint64_t)f * 7919, first && !inout ? job->line.values : ADZE_VALUES_NORMAL);
        first = first && inout;
    }
    if (op->validate(job->line.args) != ADZE_OK) /* fill() takes the contract for granted */
        return;
    for (const adze_suite *const *s = adze_suites; *s; s++)
        if ((*s)->op == op && (*s)->fill)
            (*s)->fill(job->line.args);
}

/* Whether a tensor has so few elements that sums of sizes and products of two fit 64 bits; a view that is broadcast
   may have any number. The definition walks over the rows of an empty one too. */
static int is_countable(const adze_tensor *t)
{
    int64_t count = 1, is_empty = 0;
    for (int d = 0; d < t->rank; d++) {
        is_empty |= t->shape[d] == 0;
        if (t->shape[d] > 0 && (__builtin_mul_overflow(count, t->shape[d], &count) || count > ELEMENTS_MOST))
            return 0;
    }
    return !is_empty || count <= EMPTY_MOST;
}

/* Widens [low, high], in bytes from the root's data, by a view that starts `start` bytes after it. */
static int cover(const adze_tensor *t, int64_t start, int64_t *low, int64_t *high)
{
    const int64_t size = (int64_t)adze_dtype_size(t->dtype);
    int64_t first = 0, last = 1; /* in elements */
    for (int d = 0; d < t->rank; d++) {
        int64_t reach;
        if (t->shape[d] <= 0)
            return t->shape[d] == 0;
        if (__builtin_mul_overflow(t->shape[d] - 1, t->stride[d], &reach) ||
            __builtin_add_overflow(reach < 0 ? first : last, reach, reach < 0 ? &first : &last))
            return 0;
    }
    if (first < -ELEMENTS_MOST || last > ELEMENTS_MOST || start < -ELEMENTS_MOST || start > ELEMENTS_MOST)
        return 0;
    if (start + first * size < *low)
        *low = start + first * size;
    if (start + last * size > *high)
        *high = start + last * size;
    return 1;
}

static int root_of(const adze_line *line, int f, int64_t *start)
{
    *start = 0;
    for (; line->base[f] >= 0; f = line->base[f]) {
        const adze_tensor *t = (const void *)(line->args + line->op->fields[f].offset);
        int64_t bytes;
        if (__builtin_mul_overflow(line->offset[f], (int64_t)adze_dtype_size(t->dtype), &bytes) ||
            __builtin_add_overflow(*start, bytes, start))
            *start = INT64_MAX / 2; /* cover() refuses it */
    }
    return f;
}

void adze_tensor_fill(char *data, const adze_tensor *t, int byte)
{
    const int64_t size = (int64_t)adze_dtype_size(t->dtype);
    adze_tensor rows = *t; /* each of them `length` elements side by side */
    int64_t length = 1;
    if (t->rank > 0 && t->stride[t->rank - 1] == 1) {
        length = t->shape[t->rank - 1];
        rows.shape[t->rank - 1] = 1;
    }
    const int64_t count = adze_count(t);
    for (adze_walk w = {0}; w.i * length < count; adze_walk_next(&w, &rows))
        memset(data + w.at * size, byte, (size_t)(length * size));
}

/* Outputs the line does not give are contiguous, of the shape that outputs() says. */
static void complete_outputs(adze_line *line)
{
    _Alignas(16) char due[ADZE_ARGS_MAX];
    const adze_op *op = line->op;
    memcpy(due, line->args, sizeof due);
    for (int f = 0; op->fields[f].name; f++)
        if (adze_is_made(&op->fields[f]))
            ((adze_tensor *)(void *)(due + op->fields[f].offset))->dtype = ADZE_NONE;
    if (op->validate(line->args) == ADZE_OK)
        op->outputs(due);
    for (int f = 0; op->fields[f].name; f++) {
        if (!adze_is_made(&op->fields[f]) || line->given[f])
            continue;
        adze_tensor *t = adze_line_tensor(line, f);
        *t = *(adze_tensor *)(void *)(due + op->fields[f].offset);
        int64_t stride = 1;
        for (int d = t->rank - 1; d >= 0; d--) {
            t->stride[d] = stride;
            if (__builtin_mul_overflow(stride, t->shape[d] > 0 ? t->shape[d] : 1, &stride))
                stride = INT64_MAX; /* cover() refuses it */
        }
    }
}

static int make_memory(adze_job *job, int root, char *error, size_t error_size)
{
    adze_memory *m = &job->memory[root];
    if (m->bytes > (size_t)3 << 30) {
        snprintf(error, error_size, "%s needs %zu bytes, more than this program gives a tensor",
                 job->line.op->fields[root].name, m->bytes);
        return 0;
    }
    m->origin = aligned_alloc(64, m->bytes);
    m->result = aligned_alloc(64, m->bytes);
    m->inputs = calloc(1, m->bytes);
    m->outputs = calloc(1, m->bytes);
    m->work = adze_memory_take(job->stream, m->bytes);
    if (!m->origin || !m->result || !m->inputs || !m->outputs || !m->work) {
        snprintf(error, error_size, "no memory for %s (%zu bytes)", job->line.op->fields[root].name, m->bytes);
        return 0;
    }
    memset(m->origin, 0xAA, m->bytes);
    return 1;
}

int adze_job_layout(adze_job *job, const adze_line *line, adze_stream stream, char *error, size_t error_size)
{
    memset(job, 0, sizeof *job);
    job->line = *line;
    job->stream = stream;
    const adze_op *op = line->op;
    for (int f = 0; op->fields[f].name; f++) { /* before any size is multiplied */
        const adze_tensor *t = adze_is_tensor(&op->fields[f]) ? adze_line_tensor(&job->line, f) : NULL;
        for (int d = 0; t && d < t->rank; d++)
            if (t->shape[d] < 0) {
                snprintf(error, error_size, "%s has a negative size", op->fields[f].name);
                return 0;
            }
        if (t && !is_countable(t)) {
            snprintf(error, error_size, "%s has more than %lld elements, or is empty and has more than %lld rows",
                     op->fields[f].name, (long long)ELEMENTS_MOST, (long long)EMPTY_MOST);
            return 0;
        }
    }
    complete_outputs(&job->line);
    int64_t low[ADZE_FIELDS_MAX] = {0}, high[ADZE_FIELDS_MAX] = {0}, start[ADZE_FIELDS_MAX] = {0};
    for (int f = 0; op->fields[f].name; f++) {
        job->memory_of[f] = -1;
        if (!adze_is_tensor(&op->fields[f]) || adze_line_tensor(&job->line, f)->dtype == ADZE_NONE)
            continue;
        const int root = job->memory_of[f] = root_of(&job->line, f, &start[f]);
        if (!cover(adze_line_tensor(&job->line, f), start[f], &low[root], &high[root])) {
            snprintf(error, error_size, "%s has a negative size or reaches too far", op->fields[f].name);
            return 0;
        }
    }
    for (int f = 0; op->fields[f].name; f++) {
        const int root = job->memory_of[f];
        if (root < 0)
            continue;
        adze_memory *m = &job->memory[root];
        const size_t size = adze_dtype_size(adze_line_tensor(&job->line, root)->dtype);
        m->data_at = ADZE_GUARD + (size_t)(-low[root] + 63) / 64 * 64 + (size_t)job->line.offset[root] * size;
        m->bytes = (m->data_at + (size_t)high[root] + ADZE_GUARD + 63) / 64 * 64;
        job->place[f] = (size_t)((int64_t)m->data_at + start[f]);
    }
    return 1;
}

int adze_job_make(adze_job *job, const adze_line *line, adze_stream stream, uint64_t seed, char *error,
                  size_t error_size)
{
    if (!adze_job_layout(job, line, stream, error, error_size))
        return 0;
    const adze_op *op = line->op;
    for (int f = 0; op->fields[f].name; f++) {
        const int root = job->memory_of[f];
        if (root < 0)
            continue;
        adze_tensor *t = adze_line_tensor(&job->line, f);
        adze_memory *m = &job->memory[root];
        if (!m->origin && !make_memory(job, root, error, error_size)) {
            adze_job_free(job);
            return 0;
        }
        t->data = m->origin + job->place[f];
        if (adze_is_input(&op->fields[f]))
            adze_tensor_fill(m->inputs + job->place[f], t, 0xff);
        if (adze_is_output(&op->fields[f]))
            adze_tensor_fill(m->outputs + job->place[f], t, 0xff);
    }
    memcpy(job->args, job->line.args, sizeof job->args);
    for (int f = 0; op->fields[f].name; f++) {
        adze_tensor *t = (adze_tensor *)(void *)(job->args + op->fields[f].offset);
        if (!adze_is_tensor(&op->fields[f]) || t->dtype == ADZE_NONE)
            continue;
        t->data = job->memory[job->memory_of[f]].work + job->place[f];
    }
    fill_inputs(job, seed);
    adze_call *call = (adze_call *)(void *)job->args;
    call->scratch_size = SIZE_MAX; /* as adze_dispatch_scratch() asks */
    const size_t scratch = op->scratch && op->validate(job->args) == ADZE_OK ? op->scratch(stream, job->args) : 0;
    call->scratch_size = 0;
    if (scratch && !line->no_scratch) {
        call->scratch = job->scratch = adze_memory_take(stream, scratch);
        call->scratch_size = scratch;
    }
    return 1;
}

void adze_job_free(adze_job *job)
{
    for (int f = 0; f < ADZE_FIELDS_MAX; f++) {
        free(job->memory[f].origin);
        free(job->memory[f].result);
        free(job->memory[f].inputs);
        free(job->memory[f].outputs);
        if (job->memory[f].work)
            adze_memory_give(job->stream, job->memory[f].work);
    }
    if (job->scratch)
        adze_memory_give(job->stream, job->scratch);
    memset(job, 0, sizeof *job);
}

adze_job *adze_job_new(const adze_op *op, const char *text, adze_stream stream, char *error, size_t error_size)
{
    adze_line line;
    adze_job *job = malloc(sizeof *job);
    if (!job)
        snprintf(error, error_size, "no memory for a call");
    else if (adze_line_parse(&line, op, text, error, error_size) &&
             adze_job_make(job, &line, stream, 1, error, error_size))
        return job;
    free(job);
    return NULL;
}

void adze_job_delete(adze_job *job)
{
    if (job)
        adze_job_free(job);
    free(job);
}

/* Bytes of the distinct elements of a view: broadcast dimensions count once. */
static int64_t view_bytes(const adze_tensor *t)
{
    int64_t count = (int64_t)adze_dtype_size(t->dtype);
    for (int d = 0; d < t->rank; d++)
        count *= t->stride[d] == 0 && t->shape[d] > 0 ? 1 : t->shape[d];
    return count;
}

int64_t adze_job_bytes(const adze_job *job, int64_t *read, int64_t *written)
{
    const adze_op *op = job->line.op;
    *read = *written = 0;
    for (const adze_suite *const *s = adze_suites; *s; s++)
        if ((*s)->op == op && (*s)->bytes) {
            (*s)->bytes(job->line.args, read, written);
            return *read + *written;
        }
    for (int f = 0; op->fields[f].name; f++) {
        const adze_tensor *t = (const void *)(job->line.args + op->fields[f].offset);
        if (adze_is_input(&op->fields[f]) && t->dtype)
            *read += view_bytes(t);
        else if (adze_is_output(&op->fields[f]) && t->dtype)
            *written += view_bytes(t);
    }
    return *read + *written;
}
