/* softmax on the CPU. A row is read for its maximum, then from the cache for the sum of its exponentials. These are
   kept for the last pass, on the stack or for longer rows on the heap; rows that are longer still compute them
   again. */
#include "cpu/act.h"

#include <stdlib.h>

enum { X, OUT, MASK, SOFTMAX_TENSORS, STACK_FLOATS = 6144, KEPT = 32768 };

typedef struct softmax_call {
    const adze_softmax_args *a;
    adze_rows rows;
    int64_t dim;
    float scale;
    int stream;
} softmax_call;

typedef struct softmax_row {
    const char *x, *mask; /* mask: NULL when absent */
    char *out;
} softmax_row;

/* x * scale + mask; lanes from n on are minus infinity. */
INLINE vf16 softmax_value(const softmax_call *c, const softmax_row *row, int dtype, int mask, int64_t i, int64_t n)
{
    vf16 y = row_load_part(row->x, dtype, i, n);
    const vf16 m = mask ? row_load_part(row->mask, mask, i, n) : vf16_all(0);
    for (int p = 0; p < VF_PARTS; p++)
        y.part[p] = mask ? vf_fma(y.part[p], vf_all(c->scale), m.part[p]) : y.part[p] * c->scale;
    return n < LANES ? vf16_cut(y, n, -INFINITY) : y;
}

INLINE void max_add(vf16 *most, vf16 v)
{
    for (int p = 0; p < VF_PARTS; p++)
        most->part[p] = vf_max(v.part[p], most->part[p]);
}
INLINE float softmax_max(const softmax_call *c, const softmax_row *row, int dtype, int mask)
{
    vf16 most[2] = {vf16_all(-INFINITY), vf16_all(-INFINITY)};
    int64_t i = 0;
    for (; i + 2 * LANES <= c->dim; i += 2 * LANES) {
        max_add(&most[0], softmax_value(c, row, dtype, mask, i, LANES));
        max_add(&most[1], softmax_value(c, row, dtype, mask, i + LANES, LANES));
    }
    for (; i < c->dim; i += LANES)
        max_add(&most[0], softmax_value(c, row, dtype, mask, i, c->dim - i < LANES ? c->dim - i : LANES));
    max_add(&most[0], most[1]);
    return vf16_max_lane(most[0]);
}

/* exp(y - max) of up to sixteen elements. */
INLINE vf16 softmax_terms(const softmax_call *c, const softmax_row *row, int dtype, int mask, float max, int64_t i,
                          int64_t n)
{
    vf16 y = softmax_value(c, row, dtype, mask, i, n);
    for (int p = 0; p < VF_PARTS; p++)
        y.part[p] = vf_exp(y.part[p] - max);
    return y;
}
INLINE void softmax_add(const softmax_call *c, const softmax_row *row, int dtype, int mask, float max, float *kept,
                        int64_t i, int64_t n, vf_total *total, int set)
{
    const vf16 terms = softmax_terms(c, row, dtype, mask, max, i, n);
    vf_total_add(total, set, terms, 0);
    if (kept)
        row_store(kept, ADZE_F32, i, terms);
}
/* The sum of exp(y - max), in 32 lanes; the terms are stored in `kept`. */
INLINE float softmax_sum(const softmax_call *c, const softmax_row *row, int dtype, int mask, float max, float *kept)
{
    vf_total total = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= c->dim; i += 2 * LANES) { /* unrolled: indexed accumulators would be in memory */
        softmax_add(c, row, dtype, mask, max, kept, i, LANES, &total, 0);
        softmax_add(c, row, dtype, mask, max, kept, i + LANES, LANES, &total, 1);
    }
    for (; i < c->dim; i += LANES)
        softmax_add(c, row, dtype, mask, max, kept, i, c->dim - i < LANES ? c->dim - i : LANES, &total, 0);
    return vf_total_sum(&total);
}

INLINE void softmax_put(const softmax_call *c, const softmax_row *row, int dtype, int64_t i, int64_t n, vf16 y,
                        float inverse)
{
    for (int p = 0; p < VF_PARTS; p++)
        y.part[p] *= inverse;
    row_store_part(row->out, dtype, i, y, n, c->stream);
}
INLINE void softmax_write(const softmax_call *c, const softmax_row *row, int dtype, int mask, float max,
                          float inverse, const float *kept)
{
    int64_t i = 0;
    for (; i + LANES <= c->dim && kept; i += LANES)
        softmax_put(c, row, dtype, i, LANES, row_load(kept, ADZE_F32, i), inverse);
    for (; i < c->dim; i += LANES) {
        const int64_t n = c->dim - i < LANES ? c->dim - i : LANES;
        const vf16 y = kept ? row_load(kept, ADZE_F32, i) : softmax_terms(c, row, dtype, mask, max, i, n);
        softmax_put(c, row, dtype, i, n, y, inverse);
    }
}

INLINE void softmax_rows(const softmax_call *c, int64_t begin, int64_t end, int dtype, int mask)
{
    float on_stack[STACK_FLOATS], *heap = NULL;
    if (c->dim > STACK_FLOATS && c->dim <= KEPT)
        heap = malloc((size_t)((c->dim + LANES - 1) / LANES * LANES) * sizeof *heap); /* whole vectors are stored */
    float *const kept = c->dim <= STACK_FLOATS ? on_stack : heap;
    const int64_t size = adze_float_size(dtype), mask_size = adze_float_size(mask);
    softmax_row row = {NULL, NULL, NULL};
    for (int64_t r = begin, run = 0; r < end; r++, run--) {
        if (run == 0) {
            run = adze_rows_run(&c->rows, r);
            row.x = (const char *)c->a->x.data + adze_row_offset(&c->rows, X, r) * size;
            row.out = (char *)c->a->out.data + adze_row_offset(&c->rows, OUT, r) * size;
            row.mask = mask ? (const char *)c->a->mask.data + adze_row_offset(&c->rows, MASK, r) * mask_size : NULL;
        }
        const float max = softmax_max(c, &row, dtype, mask);
        const float sum = softmax_sum(c, &row, dtype, mask, max, kept);
        softmax_write(c, &row, dtype, mask, max, 1 / sum, kept);
        row.x += adze_row_stride(&c->rows, X) * size;
        row.out += adze_row_stride(&c->rows, OUT) * size;
        row.mask = mask ? row.mask + adze_row_stride(&c->rows, MASK) * mask_size : NULL;
    }
    if (c->stream)
        row_stream_end();
    free(heap);
}

INLINE void softmax_masked(const softmax_call *c, int64_t begin, int64_t end, int dtype)
{
    if (!c->a->mask.dtype)
        softmax_rows(c, begin, end, dtype, ADZE_NONE);
    else if (c->a->mask.dtype == dtype)
        softmax_rows(c, begin, end, dtype, dtype);
    else
        softmax_rows(c, begin, end, dtype, ADZE_F32);
}
static void body(void *context, int64_t begin, int64_t end)
{
    const softmax_call *c = context;
    switch (c->a->x.dtype) {
    case ADZE_F32: softmax_masked(c, begin, end, ADZE_F32); break;
    case ADZE_F16: softmax_masked(c, begin, end, ADZE_F16); break;
    default: softmax_masked(c, begin, end, ADZE_BF16); break;
    }
}

ADZE_CPU_KERNEL(softmax)
{
    const adze_softmax_args *a = args;
    const adze_tensor *const tensors[SOFTMAX_TENSORS] = {&a->x, &a->out, &a->mask};
    softmax_call c = {.a = a, .dim = a->x.shape[a->x.rank - 1], .scale = a->scale != 0 ? a->scale : 1};
    (void)stream;
    adze_rows_init(&c.rows, &a->x, SOFTMAX_TENSORS, tensors);
    c.stream = row_streams(&a->out, c.rows.count * c.dim);
    adze_parallel_for(c.dim ? c.rows.count : 0, row_grain(c.dim), body, &c);
    return ADZE_OK;
}
