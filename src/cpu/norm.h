/* norm.h - rms_norm and layer_norm on the CPU. Each row is read once from memory and then again from the
   cache: for the mean (layer_norm), for the mean of squares, and to be written; h = residual + gate * x is
   made anew each time. */
#ifndef ADZE_CPU_NORM_H
#define ADZE_CPU_NORM_H

#include "cpu/row.h"

enum { X, OUT, SUM, RESIDUAL, GATE, GATE_TABLE, SCALE, SCALE_TABLE, SHIFT, SHIFT_TABLE, NORM_TENSORS };

typedef struct norm_call {
    const adze_norm_args *a;
    const adze_tensor *tensors[NORM_TENSORS];
    adze_rows rows;
    int64_t dim;
    int stream_out, stream_sum;
} norm_call;

typedef struct norm_row {
    const void *data[NORM_TENSORS];
} norm_row;

/* Sixteen elements, or n < 16 of them. */
INLINE vf norm_load(const void *data, int dtype, int64_t i, int64_t n)
{
    return n == LANES ? row_load(data, dtype, i) : row_load_tail(data, dtype, i, n);
}
/* A tensor whose dtype is x's or f32. */
INLINE vf norm_param(const void *data, int f32, int dtype, int64_t i, int64_t n)
{
    return f32 ? norm_load(data, ADZE_F32, i, n) : norm_load(data, dtype, i, n);
}
INLINE void norm_store(void *data, int dtype, int64_t i, vf v, int64_t n, int stream)
{
    if (n < LANES)
        row_store_tail(data, dtype, i, v, n);
    else if (stream)
        row_stream(data, dtype, i, v);
    else
        row_store(data, dtype, i, v);
}

INLINE vf norm_side(const norm_call *c, const norm_row *row, int t, int dtype, int64_t i, int64_t n)
{
    vf v = norm_param(row->data[t], c->tensors[t]->dtype == ADZE_F32, dtype, i, n);
    if (c->tensors[t + 1]->dtype) {
        v += norm_param(row->data[t + 1], c->tensors[t + 1]->dtype == ADZE_F32, dtype, i, n);
        if (c->a->rounding & ADZE_ROUND_STEPS)
            v = row_round(dtype, v);
    }
    return v;
}

/* residual + gate * x, not yet rounded. */
INLINE vf norm_sum(const norm_call *c, const norm_row *row, int dtype, int64_t i, int64_t n)
{
    vf h = norm_load(row->data[X], dtype, i, n);
    if (!row->data[RESIDUAL])
        return h;
    if (c->a->gate.dtype) {
        h *= norm_side(c, row, GATE, dtype, i, n);
        if (c->a->rounding & ADZE_ROUND_STEPS)
            h = row_round(dtype, h);
    }
    return h + norm_load(row->data[RESIDUAL], dtype, i, n);
}
/* What is normalised. */
INLINE vf norm_value(const norm_call *c, const norm_row *row, int dtype, int64_t i, int64_t n)
{
    const vf h = norm_sum(c, row, dtype, i, n);
    return row->data[RESIDUAL] && !(c->a->rounding & ADZE_FLOAT_SUM) ? row_round(dtype, h) : h;
}

/* The sum over the row of h, or of (h - mean)^2, in 64 lanes. What lies beyond the row counts as the mean. */
INLINE float norm_reduce(const norm_call *c, const norm_row *row, int dtype, int square, float mean, int plain)
{
    vf_total total = {0};
    int64_t i = 0;
    for (; plain && i + 4 * LANES <= c->dim; i += 4 * LANES)
        for (int set = 0; set < 4; set++)
            vf_total_add(&total, set, row_load(row->data[X], dtype, i + set * LANES) - mean, square);
    for (int set = 0; i < c->dim; i += LANES, set = (set + 1) & 3) {
        const int64_t n = c->dim - i < LANES ? c->dim - i : LANES;
        vf h = (plain ? norm_load(row->data[X], dtype, i, n) : norm_value(c, row, dtype, i, n)) - mean;
        for (int64_t k = n; k < LANES; k++)
            h[k] = 0;
        vf_total_add(&total, set, h, square);
    }
    return vf_total_sum(&total);
}

INLINE void norm_write(const norm_call *c, const norm_row *row, int dtype, float mean, float scale, int64_t i,
                       int64_t n)
{
    const adze_norm_args *a = c->a;
    const int steps = a->rounding & ADZE_ROUND_STEPS;
    vf h = norm_sum(c, row, dtype, i, n);
    if (row->data[RESIDUAL]) {
        if (row->data[SUM])
            norm_store((void *)row->data[SUM], dtype, i, h, n, c->stream_sum);
        if (!(a->rounding & ADZE_FLOAT_SUM))
            h = row_round(dtype, h);
    }
    vf y = (h - mean) * scale;
    if (a->rounding & ADZE_ROUND_NORM)
        y = row_round(dtype, y);
    if (a->weight.dtype)
        y *= norm_param(a->weight.data, a->weight.dtype == ADZE_F32, dtype, i, n) + a->weight_offset;
    if (a->bias.dtype)
        y += norm_param(a->bias.data, a->bias.dtype == ADZE_F32, dtype, i, n);
    if (steps && (a->scale.dtype || a->shift.dtype))
        y = row_round(dtype, y);
    if (a->scale.dtype) {
        vf factor = 1 + norm_side(c, row, SCALE, dtype, i, n);
        y *= steps ? row_round(dtype, factor) : factor;
        if (steps && a->shift.dtype)
            y = row_round(dtype, y);
    }
    if (a->shift.dtype)
        y += norm_side(c, row, SHIFT, dtype, i, n);
    if (a->out.dtype == dtype)
        norm_store((void *)row->data[OUT], dtype, i, y, n, c->stream_out);
    else
        norm_store((void *)row->data[OUT], ADZE_F32, i, y, n, c->stream_out);
}

/* Whether a row is x, a weight and, where it is centred, a bias, all of one dtype and rounded once. */
INLINE int norm_is_plain(const adze_norm_args *a, int centred)
{
    const int dtype = a->x.dtype;
    return a->weight.dtype == dtype && a->bias.dtype == (centred ? dtype : ADZE_NONE) && a->out.dtype == dtype &&
           !a->residual.dtype && !a->scale.dtype && !a->shift.dtype && !(a->rounding & ADZE_ROUND_NORM) &&
           a->weight_offset == 0;
}
INLINE void norm_write_plain(const norm_call *c, const norm_row *row, int dtype, int centred, float mean, float scale,
                             int64_t i, int64_t n)
{
    vf y = (norm_load(row->data[X], dtype, i, n) - mean) * scale * norm_load(c->a->weight.data, dtype, i, n);
    if (centred)
        y += norm_load(c->a->bias.data, dtype, i, n);
    norm_store((void *)row->data[OUT], dtype, i, y, n, c->stream_out);
}

INLINE void norm_rows(const norm_call *c, int64_t begin, int64_t end, int dtype, int centred, int plain)
{
    for (int64_t r = begin; r < end; r++) {
        norm_row row;
        for (int t = 0; t < (plain ? OUT + 1 : NORM_TENSORS); t++) {
            const adze_tensor *x = c->tensors[t];
            row.data[t] = x->dtype == ADZE_NONE ? NULL
                                                : (const char *)x->data + adze_row_offset(&c->rows, t, r) *
                                                                              (x->dtype == ADZE_F32 ? 4 : 2);
        }
        const float mean = centred ? norm_reduce(c, &row, dtype, 0, 0, plain) / (float)c->dim : 0;
        const float square = norm_reduce(c, &row, dtype, 1, mean, plain) / (float)c->dim;
        const float scale = 1 / sqrtf(square + c->a->eps);
        int64_t i = 0;
        for (; plain && i + LANES <= c->dim; i += LANES)
            norm_write_plain(c, &row, dtype, centred, mean, scale, i, LANES);
        if (plain && i < c->dim)
            norm_write_plain(c, &row, dtype, centred, mean, scale, i, c->dim - i);
        for (; !plain && i < c->dim; i += LANES)
            norm_write(c, &row, dtype, mean, scale, i, c->dim - i < LANES ? c->dim - i : LANES);
    }
    if (c->stream_out || c->stream_sum)
        row_stream_end();
}
INLINE void norm_range(const norm_call *c, int64_t begin, int64_t end, int dtype, int centred)
{
    if (norm_is_plain(c->a, centred))
        norm_rows(c, begin, end, dtype, centred, 1);
    else
        norm_rows(c, begin, end, dtype, centred, 0);
}

INLINE adze_status norm_run(const adze_norm_args *a, adze_range_fn body)
{
    norm_call c = {.a = a,
                   .tensors = {&a->x, &a->out, &a->sum, &a->residual, &a->gate, &a->gate_table, &a->scale,
                               &a->scale_table, &a->shift, &a->shift_table},
                   .dim = a->x.shape[a->x.rank - 1]};
    adze_rows_init(&c.rows, &a->x, NORM_TENSORS, c.tensors);
    c.stream_out = row_streams(&a->out, c.rows.count * c.dim);
    c.stream_sum = a->sum.dtype && row_streams(&a->sum, c.rows.count * c.dim);
    adze_parallel_for(c.dim ? c.rows.count : 0, row_grain(c.dim), body, &c);
    return ADZE_OK;
}

#endif
