/* softmax on the CPU. A row is read for its maximum, again from the cache for the sum of its exponentials, and these
   are kept for the last pass where they fit; longer rows compute them again. */
#include "cpu/act.h"

enum { X, OUT, MASK, SOFTMAX_TENSORS, KEPT = 32768 };

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

INLINE vf load_part(const char *data, int dtype, int64_t i, int64_t n)
{
    return n == LANES ? row_load(data, dtype, i) : row_load_tail(data, dtype, i, n);
}

/* x * scale + mask; lanes from n on are minus infinity. */
INLINE vf softmax_value(const softmax_call *c, const softmax_row *row, int dtype, int64_t i, int64_t n)
{
    vf y = load_part(row->x, dtype, i, n) * c->scale;
    if (row->mask)
        y += c->a->mask.dtype == ADZE_F32 ? load_part(row->mask, ADZE_F32, i, n) : load_part(row->mask, dtype, i, n);
    for (int64_t k = n; k < LANES; k++)
        y[k] = -INFINITY;
    return y;
}

INLINE void max_add(vf_total *t, int set, vf v)
{
    const vf_split most = {vf_max(v, vf_join(t->part[set]))};
    for (int i = 0; i < VF_PARTS; i++)
        t->part[set][i] = most.part[i];
}
INLINE float softmax_max(const softmax_call *c, const softmax_row *row, int dtype)
{
    vf_total t;
    for (int l = 0; l < 2; l++)
        for (int i = 0; i < VF_PARTS; i++)
            t.part[l][i] = -INFINITY - (vf_part){0};
    int64_t i = 0;
    for (; i + 2 * LANES <= c->dim; i += 2 * LANES)
        for (int l = 0; l < 2; l++)
            max_add(&t, l, softmax_value(c, row, dtype, i + l * LANES, LANES));
    for (; i < c->dim; i += LANES)
        max_add(&t, 0, softmax_value(c, row, dtype, i, c->dim - i < LANES ? c->dim - i : LANES));
    return vf_max_lane(vf_max(vf_join(t.part[0]), vf_join(t.part[1])));
}

/* exp(y - max) of up to sixteen elements; `kept` takes them. */
INLINE vf softmax_terms(const softmax_call *c, const softmax_row *row, int dtype, float max, float *kept, int64_t i,
                        int64_t n)
{
    const vf p = vf_exp(softmax_value(c, row, dtype, i, n) - max);
    if (kept)
        row_store(kept, ADZE_F32, i, p);
    return p;
}
/* The sum of exp(y - max), in 32 lanes. */
INLINE float softmax_sum(const softmax_call *c, const softmax_row *row, int dtype, float max, float *kept)
{
    vf_total t = {{{{0}}}};
    int64_t i = 0;
    for (; i + 2 * LANES <= c->dim; i += 2 * LANES)
        for (int l = 0; l < 2; l++)
            vf_total_add(&t, l, softmax_terms(c, row, dtype, max, kept, i + l * LANES, LANES), 0);
    for (; i < c->dim; i += LANES)
        vf_total_add(&t, 0, softmax_terms(c, row, dtype, max, kept, i, c->dim - i < LANES ? c->dim - i : LANES), 0);
    return vf_total_sum(&t);
}

INLINE void softmax_write(const softmax_call *c, const softmax_row *row, int dtype, float max, float inverse,
                          const float *kept)
{
    for (int64_t i = 0; i < c->dim; i += LANES) {
        const int64_t n = c->dim - i < LANES ? c->dim - i : LANES;
        const vf p = kept ? row_load(kept, ADZE_F32, i) : vf_exp(softmax_value(c, row, dtype, i, n) - max);
        if (n < LANES)
            row_store_tail(row->out, dtype, i, p * inverse, n);
        else if (c->stream)
            row_stream(row->out, dtype, i, p * inverse);
        else
            row_store(row->out, dtype, i, p * inverse);
    }
}

INLINE void softmax_rows(const softmax_call *c, int64_t begin, int64_t end, int dtype)
{
    float terms[KEPT], *kept = c->dim <= KEPT ? terms : NULL;
    const int64_t size = dtype == ADZE_F32 ? 4 : 2, mask_size = c->a->mask.dtype == ADZE_F32 ? 4 : size;
    for (int64_t r = begin; r < end; r++) {
        const softmax_row row = {
            (const char *)c->a->x.data + adze_row_offset(&c->rows, X, r) * size,
            c->a->mask.dtype ? (const char *)c->a->mask.data + adze_row_offset(&c->rows, MASK, r) * mask_size : NULL,
            (char *)c->a->out.data + adze_row_offset(&c->rows, OUT, r) * size};
        const float max = softmax_max(c, &row, dtype);
        const float sum = softmax_sum(c, &row, dtype, max, kept);
        softmax_write(c, &row, dtype, max, 1 / sum, kept);
    }
    if (c->stream)
        row_stream_end();
}

static void body(void *context, int64_t begin, int64_t end)
{
    const softmax_call *c = context;
    switch (c->a->x.dtype) {
    case ADZE_F32: softmax_rows(c, begin, end, ADZE_F32); break;
    case ADZE_F16: softmax_rows(c, begin, end, ADZE_F16); break;
    default: softmax_rows(c, begin, end, ADZE_BF16); break;
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
