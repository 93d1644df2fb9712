/* norm_part.h - a row of rms_norm and layer_norm on the CPU, or a part of it: its operands and passes.

   A row is read from memory and summed, then read from the cache for the squares (layer_norm) and for the output,
   while the next row is prefetched. h is converted to floats in a buffer where it is a sum of several tensors or
   slow to read. Parameters that rows share are converted once where they are sums or not of x's dtype. Rows longer
   than the buffer go through it in parts, which are computed again for each pass. The buffer is on the
   stack only while it is small: the host's threads may have small stacks. Lanes are in the order of x's dtype
   (row32.h). */
#ifndef ADZE_CPU_NORM_PART_H
#define ADZE_CPU_NORM_PART_H

#include "cpu/bytes_out.h"
#include "cpu/row32.h"

/* Without F16C, reading f16 is so slow that rows read more than once are kept as floats. */
#if defined(__AVX__) || defined(__aarch64__)
#    define SLOW_TO_READ(dtype) ((void)(dtype), 0)
#else
#    define SLOW_TO_READ(dtype) ((dtype) == ADZE_F16)
#endif

enum { X, OUT, SUM, RESIDUAL, GATE, GATE_TABLE, SCALE, SCALE_TABLE, SHIFT, SHIFT_TABLE, NORM_TENSORS };
enum {
    STACK_FLOATS = 6144, /* floats on a thread's stack, for a part of a row and of each converted operand */
    SPACE = 65536,       /* floats at most, from the heap */
    SHARED_ROWS = 4,     /* rows from which on a bf16 weight is converted once, on NEON */
    SHORT_ROW = 512,     /* elements, up to which calls and prefetches would take longer than they save */
    TOGETHER = 4,        /* short rows */
    STEP = 2 * LANES,    /* elements at a time */
    LINE = 64            /* a part is a multiple of it */
};

typedef struct norm_call {
    const adze_norm_args *a;
    const adze_tensor *tensors[NORM_TENSORS];
    adze_rows rows;
    int64_t dim;
    int stream_out, stream_sum;
} norm_call;

typedef struct norm_cached { /* an operand converted to floats, and its source */
    const char *data, *table;
    float *floats; /* NULL: it is not converted */
} norm_cached;

typedef struct norm_space { /* of a thread */
    float *row;             /* NULL: x is h already */
    int64_t chunk;          /* elements of a part of a row */
    norm_cached weight, bias, gate, scale, shift;
    float floats[STACK_FLOATS] __attribute__((aligned(64)));
} norm_space;

typedef struct norm_term { /* an operand of a part: converted floats, or elements of x's dtype */
    const char *data;      /* NULL: absent */
    int converted;
} norm_term;

typedef struct norm_part { /* n elements of a row; absent pointers are NULL */
    const char *x, *residual;
    const char *next_x, *next_residual; /* the same part of the next row */
    char *out, *sum;
    float *converted; /* h in floats; NULL: x is h already */
    norm_term weight, bias, gate, scale, shift;
    int64_t n;
    float mean, rstd;
    int round_norm, round_steps, round_sum, stream_out, stream_sum;
} norm_part;

/* ---- Operands ---- */

/* y = data, or y + data, n elements; `plus` is added too. A NaN becomes one that bf16 holds. */
INLINE void norm_floats_as(float *y, const void *data, int dtype, int order, int64_t n, int add, float plus)
{
    for (int64_t j = 0; j < n; j += STEP) {
        vf32 v = row_load32_part(data, dtype, j, n - j < STEP ? n - j : STEP);
        if (order == ADZE_BF16)
            v = vf32_order(v, dtype, ADZE_BF16);
        const vf32 more = add ? row_load32(y, ADZE_F32, j) : vf32_first(ADZE_F32, plus, STEP);
        for (int p = 0; p < 2 * VF_PARTS; p++) {
            v.part[p] += more.part[p];
            v.part[p] = vf_select(v.part[p] == v.part[p], v.part[p], vf_all(NAN));
        }
        row_store32(y, ADZE_F32, j, v, 0);
    }
}
NO_INLINE void norm_floats(float *y, const void *data, int dtype, int order, int64_t n, int add, float plus)
{
    switch (dtype) {
    case ADZE_F32: norm_floats_as(y, data, ADZE_F32, order, n, add, plus); break;
    case ADZE_F16: norm_floats_as(y, data, ADZE_F16, order, n, add, plus); break;
    default: norm_floats_as(y, data, ADZE_BF16, order, n, add, plus); break;
    }
}
NO_INLINE void norm_round(float *y, int64_t n, int dtype)
{
    for (int64_t j = 0; j < n && dtype == ADZE_F16; j += STEP)
        row_store32(y, ADZE_F32, j, row_round32(ADZE_F16, row_load32(y, ADZE_F32, j)), 0);
    for (int64_t j = 0; j < n && dtype == ADZE_BF16; j += STEP)
        row_store32(y, ADZE_F32, j, row_round32(ADZE_BF16, row_load32(y, ADZE_F32, j)), 0);
}

/* data + table + plus, n elements of a row; `steps` rounds both sums to x's dtype. Rows that share an operand
   convert it once. */
INLINE norm_term norm_operand(norm_cached *cached, int x_dtype, const char *data, int dtype, const char *table,
                              int table_dtype, int64_t n, float plus, int steps)
{
    if (!data || !cached->floats)
        return (norm_term){data, 0};
    if (cached->data != data || cached->table != table) {
        float *const y = cached->floats;
        norm_floats(y, data, dtype, x_dtype, n, 0, table ? -0.0f : plus);
        if (table) {
            norm_floats(y, table, table_dtype, x_dtype, n, 1, 0);
            norm_round(y, n, steps ? x_dtype : 0);
            if (plus != 0) /* whole steps: in bf16's order the last elements are not the first lanes */
                norm_floats(y, y, ADZE_F32, 0, (n + STEP - 1) / STEP * STEP, 0, plus);
        }
        if (plus != 0)
            norm_round(y, n, steps ? x_dtype : 0);
        cached->data = data;
        cached->table = table;
    }
    return (norm_term){(const char *)cached->floats, 1};
}

/* ---- Passes ----

   Each is a separate function: inlined into one, their temporaries would be on the stack at the same time. A pass
   copies its part first: a store might alias the given one, which would then be reloaded in every step. */

/* n <= 32 elements from j on. */
INLINE vf32 norm_load(norm_term term, int dtype, int64_t j, int64_t n)
{
    return term.converted ? row_load32(term.data, ADZE_F32, j) : row_load32_part(term.data, dtype, j, n);
}
INLINE vf32 norm_h(const norm_part *t, int dtype, int64_t j, int64_t n)
{
    return t->converted ? row_load32(t->converted, ADZE_F32, j) : row_load32_part(t->x, dtype, j, n);
}
INLINE vf32 norm_times(vf32 y, norm_term factor, int dtype, int64_t j, int64_t n)
{
    const vf32 f = norm_load(factor, dtype, j, n);
    for (int p = 0; p < 2 * VF_PARTS; p++)
        y.part[p] *= f.part[p];
    return y;
}
INLINE vf32 norm_plus(vf32 y, norm_term term, int dtype, int64_t j, int64_t n)
{
    const vf32 t = norm_load(term, dtype, j, n);
    for (int p = 0; p < 2 * VF_PARTS; p++)
        y.part[p] += t.part[p];
    return y;
}

/* h = residual + gate * x. */
INLINE vf32 norm_sum(const norm_part *t, int dtype, int64_t j, int64_t n)
{
    vf32 h = row_load32_part(t->x, dtype, j, n);
    if (!t->residual)
        return h;
    if (t->gate.data) {
        h = norm_times(h, t->gate, dtype, j, n);
        if (t->round_steps)
            h = row_round32(dtype, h);
    }
    h = norm_plus(h, (norm_term){t->residual, 0}, dtype, j, n);
    if (t->sum)
        row_store32_part(t->sum, dtype, j, h, n, t->stream_sum);
    return t->round_sum ? row_round32(dtype, h) : h;
}
INLINE void norm_make_step(const norm_part *t, int dtype, int square, int64_t j, int64_t n, vf_total *total, int half)
{
    const vf32 h = norm_sum(t, dtype, j, n);
    vf_total_add32(total, half, h, square);
    if (t->converted)
        row_store32(t->converted, ADZE_F32, j, h, 0);
}
/* Computes h and sums it, or its squares. Where x is h, a specialised loop avoids register copies. */
INLINE float norm_make_as(const norm_part *given, int dtype, int square)
{
    const norm_part part = *given, *const t = &part;
    vf_total total = {0};
    int64_t j = 0;
    for (; j + 2 * STEP <= t->n && !SLOW_TO_READ(dtype) && !t->residual; j += 2 * STEP) {
        vf_total_add32(&total, 0, row_load32(t->x, dtype, j), square);
        vf_total_add32(&total, 1, row_load32(t->x, dtype, j + STEP), square);
    }
    for (; j + 2 * STEP <= t->n; j += 2 * STEP) { /* unrolled: indexed accumulators would be in memory */
        norm_make_step(t, dtype, square, j, STEP, &total, 0);
        norm_make_step(t, dtype, square, j + STEP, STEP, &total, 1);
    }
    for (; j < t->n; j += STEP)
        norm_make_step(t, dtype, square, j, t->n - j < STEP ? t->n - j : STEP, &total, 0);
    return vf_total_sum(&total);
}
INLINE float norm_make_any(const norm_part *t, int dtype, int square)
{
    switch (dtype) {
    case ADZE_F32: return norm_make_as(t, ADZE_F32, square);
    case ADZE_F16: return norm_make_as(t, ADZE_F16, square);
    default: return norm_make_as(t, ADZE_BF16, square);
    }
}
NO_INLINE float norm_make_sum(const norm_part *t, int dtype)
{
    return norm_make_any(t, dtype, 0);
}
NO_INLINE float norm_make_squares(const norm_part *t, int dtype)
{
    return norm_make_any(t, dtype, 1);
}

/* Prefetches 32 elements of the next row. */
INLINE void norm_prefetch(const norm_part *t, int dtype, int64_t i)
{
    if (t->next_x)
        row_prefetch(t->next_x, dtype, i);
    if (t->next_residual)
        row_prefetch(t->next_residual, dtype, i);
}

/* The sum of (h - mean)^2. This pass prefetches the first half of the next row, the pass that writes the other half.
 */
INLINE void norm_square(const norm_part *t, int dtype, int64_t j, int64_t n, vf_total *total, int half)
{
    const vf32 mean = vf32_first(dtype, t->mean, n);
    vf32 away = norm_h(t, dtype, j, n);
    for (int p = 0; p < 2 * VF_PARTS; p++)
        away.part[p] -= mean.part[p];
    vf_total_add32(total, half, away, 1);
}
INLINE float norm_squares_as(const norm_part *given, int dtype)
{
    const norm_part part = *given, *const t = &part;
    vf_total total = {0};
    int64_t j = 0;
    for (; j + 2 * STEP <= t->n; j += 2 * STEP) {
        norm_prefetch(t, dtype, j / 2);
        norm_square(t, dtype, j, STEP, &total, 0);
        norm_square(t, dtype, j + STEP, STEP, &total, 1);
    }
    for (; j < t->n; j += STEP)
        norm_square(t, dtype, j, t->n - j < STEP ? t->n - j : STEP, &total, 0);
    return vf_total_sum(&total);
}
NO_INLINE float norm_squares(const norm_part *t, int dtype)
{
    switch (dtype) {
    case ADZE_F32: return norm_squares_as(t, ADZE_F32);
    case ADZE_F16: return norm_squares_as(t, ADZE_F16);
    default: return norm_squares_as(t, ADZE_BF16);
    }
}

/* n <= 32 elements from j on, of x's dtype where they are rounded and of `out_dtype` where they are stored. */
INLINE void norm_put(const norm_part *t, int dtype, int out_dtype, int centred, int64_t j, int64_t n)
{
    vf32 y = norm_h(t, dtype, j, n);
    for (int p = 0; p < 2 * VF_PARTS; p++)
        y.part[p] = (centred ? y.part[p] - t->mean : y.part[p]) * t->rstd;
    if (t->round_norm)
        y = row_round32(dtype, y);
    if (t->weight.data)
        y = norm_times(y, t->weight, dtype, j, n);
    if (t->bias.data)
        y = norm_plus(y, t->bias, dtype, j, n);
    if (t->round_steps && (t->scale.data || t->shift.data))
        y = row_round32(dtype, y);
    if (t->scale.data)
        y = norm_times(y, t->scale, dtype, j, n);
    if (t->round_steps && t->scale.data && t->shift.data)
        y = row_round32(dtype, y);
    if (t->shift.data)
        y = norm_plus(y, t->shift, dtype, j, n);
    row_store32_part(t->out, out_dtype, j, vf32_order(y, dtype, out_dtype), n, t->stream_out);
}
/* The tail of a row, for any dtype. It is not inlined, so that each loop has only one copy. */
NO_INLINE void norm_put_rest(const norm_part *t, int dtype, int out_dtype, int centred, int64_t j, int64_t n)
{
    norm_put(t, dtype, out_dtype, centred, j, n);
}
INLINE void norm_write_as(const norm_part *given, int dtype, int out_dtype, int centred)
{
    const norm_part part = *given, *const t = &part;
    int64_t j = 0;
    for (; j + 2 * STEP <= t->n; j += 2 * STEP) {
        norm_prefetch(t, dtype, centred ? (t->n + j) / 2 : j);
        if (!centred)
            norm_prefetch(t, dtype, j + STEP);
        for (int64_t i = j; i < j + 2 * STEP; i += STEP)
            norm_put(t, dtype, out_dtype, centred, i, STEP);
    }
    for (; j < t->n; j += STEP)
        norm_put_rest(given, dtype, out_dtype, centred, j, t->n - j < STEP ? t->n - j : STEP);
}
INLINE void norm_write_any(const norm_part *t, int dtype, int out_dtype, int centred)
{
    switch (out_dtype == dtype ? dtype : -dtype) {
    case ADZE_F32: norm_write_as(t, ADZE_F32, ADZE_F32, centred); break;
    case ADZE_F16: norm_write_as(t, ADZE_F16, ADZE_F16, centred); break;
    case ADZE_BF16: norm_write_as(t, ADZE_BF16, ADZE_BF16, centred); break;
    case -ADZE_F16: norm_write_as(t, ADZE_F16, ADZE_F32, centred); break;
    default: norm_write_as(t, ADZE_BF16, ADZE_F32, centred); break;
    }
}
NO_INLINE void norm_write(const norm_part *t, int dtype, int out_dtype)
{
    norm_write_any(t, dtype, out_dtype, 0);
}
NO_INLINE void norm_write_centred(const norm_part *t, int dtype, int out_dtype)
{
    norm_write_any(t, dtype, out_dtype, 1);
}

#endif
