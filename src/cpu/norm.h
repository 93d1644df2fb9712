/* norm.h - rms_norm and layer_norm on the CPU. A plain row is read once from memory and then again from the cache:
   for the mean (layer_norm), for the mean of squares, and to be written. Any other goes through a buffer of floats,
   one short loop for each step; rows that do not fit are made anew each time. */
#ifndef ADZE_CPU_NORM_H
#define ADZE_CPU_NORM_H

#include "cpu/row.h"

enum { X, OUT, SUM, RESIDUAL, GATE, GATE_TABLE, SCALE, SCALE_TABLE, SHIFT, SHIFT_TABLE, NORM_TENSORS };
enum { CHUNK = 1024, KEPT = 8 * CHUNK }; /* elements of a step, of a row that is kept */
#define NO_INLINE static __attribute__((noinline, unused))

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
INLINE void norm_store(void *data, int dtype, int64_t i, vf v, int64_t n, int stream)
{
    if (n < LANES)
        row_store_tail(data, dtype, i, v, n);
    else if (stream)
        row_stream(data, dtype, i, v);
    else
        row_store(data, dtype, i, v);
}

/* The sum of v - mean, or of its square, for n elements from i on, in 64 lanes. */
INLINE float norm_total(const void *data, int dtype, int64_t i, int64_t n, int square, float mean)
{
    const int64_t end = i + n;
    vf_total total = {0};
    for (; i + 4 * LANES <= end; i += 4 * LANES)
        for (int set = 0; set < 4; set++)
            vf_total_add(&total, set, row_load(data, dtype, i + set * LANES) - mean, square);
    for (int set = 0; set < 4 && i < end; i += LANES, set++) {
        const int64_t left = end - i < LANES ? end - i : LANES;
        vf v = norm_load(data, dtype, i, left) - mean;
        for (int64_t k = left; k < LANES; k++)
            v[k] = 0;
        vf_total_add(&total, set, v, square);
    }
    return vf_total_sum(&total);
}

/* ---- Plain rows ---- */

/* Whether a row is x, a weight and, where it is centred, a bias, all of one dtype and rounded once. */
INLINE int norm_is_plain(const adze_norm_args *a, int centred)
{
    const int dtype = a->x.dtype;
    return a->weight.dtype == dtype && a->bias.dtype == (centred ? dtype : ADZE_NONE) && a->out.dtype == dtype &&
           !a->residual.dtype && !a->scale.dtype && !a->shift.dtype && !(a->rounding & ADZE_ROUND_NORM) &&
           a->weight_offset == 0;
}
INLINE void norm_write_plain(const norm_call *c, const char *x, char *out, int dtype, int centred, float mean,
                             float scale, int64_t i, int64_t n)
{
    vf y = (norm_load(x, dtype, i, n) - mean) * scale * norm_load(c->a->weight.data, dtype, i, n);
    if (centred)
        y += norm_load(c->a->bias.data, dtype, i, n);
    norm_store(out, dtype, i, y, n, c->stream_out);
}

INLINE void norm_plain_rows(const norm_call *c, int64_t begin, int64_t end, int dtype, int centred)
{
    const int64_t size = dtype == ADZE_F32 ? 4 : 2;
    for (int64_t r = begin; r < end; r++) {
        const char *x = (const char *)c->a->x.data + adze_row_offset(&c->rows, X, r) * size;
        char *out = (char *)c->a->out.data + adze_row_offset(&c->rows, OUT, r) * size;
        const float mean = centred ? norm_total(x, dtype, 0, c->dim, 0, 0) / (float)c->dim : 0;
        const float square = norm_total(x, dtype, 0, c->dim, 1, mean) / (float)c->dim;
        const float scale = 1 / sqrtf(square + c->a->eps);
        int64_t i = 0;
        for (; i + LANES <= c->dim; i += LANES)
            norm_write_plain(c, x, out, dtype, centred, mean, scale, i, LANES);
        if (i < c->dim)
            norm_write_plain(c, x, out, dtype, centred, mean, scale, i, c->dim - i);
    }
}

/* ---- Other rows: steps on n <= CHUNK floats. Buffers have whole vectors; beyond n they hold nothing. ---- */

enum { READ, PLUS, TIMES };

/* y = t, y + t or y * (t + offset), with t the n elements of `data` from i on. */
INLINE void norm_step_as(float *y, int64_t n, int step, const void *data, int dtype, int64_t i, float offset)
{
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES) {
        const vf t = row_load(data, dtype, i + j);
        row_store(y, ADZE_F32, j,
                  step == READ   ? t
                  : step == PLUS ? row_load(y, ADZE_F32, j) + t
                                 : row_load(y, ADZE_F32, j) * (t + offset));
    }
    for (; j < n; j++) {
        const float t = row_load_tail(data, dtype, i + j, 1)[0];
        y[j] = step == READ ? t : step == PLUS ? y[j] + t : y[j] * (t + offset);
    }
}
INLINE void norm_step(float *y, int64_t n, int step, const void *data, int dtype, int64_t i, float offset)
{
    switch (dtype) {
    case ADZE_F32: norm_step_as(y, n, step, data, ADZE_F32, i, offset); break;
    case ADZE_F16: norm_step_as(y, n, step, data, ADZE_F16, i, offset); break;
    default: norm_step_as(y, n, step, data, ADZE_BF16, i, offset); break;
    }
}
NO_INLINE void norm_read(float *y, int64_t n, const void *data, int dtype, int64_t i)
{
    norm_step(y, n, READ, data, dtype, i, 0);
}
NO_INLINE void norm_plus(float *y, int64_t n, const void *data, int dtype, int64_t i)
{
    norm_step(y, n, PLUS, data, dtype, i, 0);
}
NO_INLINE void norm_times(float *y, int64_t n, const void *data, int dtype, int64_t i, float offset)
{
    norm_step(y, n, TIMES, data, dtype, i, offset);
}
/* y = (y - mean) * scale */
NO_INLINE void norm_scale(float *y, int64_t n, float mean, float scale)
{
    for (int64_t j = 0; j < n; j += LANES)
        row_store(y, ADZE_F32, j, (row_load(y, ADZE_F32, j) - mean) * scale);
}
NO_INLINE void norm_round(float *y, int64_t n, int dtype)
{
    for (int64_t j = 0; j < n && dtype == ADZE_F16; j += LANES)
        row_store(y, ADZE_F32, j, row_round(ADZE_F16, row_load(y, ADZE_F32, j)));
    for (int64_t j = 0; j < n && dtype == ADZE_BF16; j += LANES)
        row_store(y, ADZE_F32, j, row_round(ADZE_BF16, row_load(y, ADZE_F32, j)));
}
INLINE void norm_put_as(const float *y, int64_t n, void *data, int dtype, int64_t i, int stream)
{
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES)
        norm_store(data, dtype, i + j, row_load(y, ADZE_F32, j), LANES, stream);
    if (j < n)
        norm_store(data, dtype, i + j, row_load(y, ADZE_F32, j), n - j, 0);
}
NO_INLINE void norm_put(const float *y, int64_t n, void *data, int dtype, int64_t i, int stream)
{
    switch (dtype) {
    case ADZE_F32: norm_put_as(y, n, data, ADZE_F32, i, stream); break;
    case ADZE_F16: norm_put_as(y, n, data, ADZE_F16, i, stream); break;
    default: norm_put_as(y, n, data, ADZE_BF16, i, stream); break;
    }
}

/* A gate, scale or shift and its table. */
INLINE void norm_side(const norm_call *c, const norm_row *row, int t, int64_t i, int64_t n, float *y)
{
    norm_read(y, n, row->data[t], c->tensors[t]->dtype, i);
    if (row->data[t + 1]) {
        norm_plus(y, n, row->data[t + 1], c->tensors[t + 1]->dtype, i);
        if (c->a->rounding & ADZE_ROUND_STEPS)
            norm_round(y, n, c->a->x.dtype);
    }
}
/* h = residual + gate * x; `sum` stores it. */
INLINE void norm_make(const norm_call *c, const norm_row *row, int64_t i, int64_t n, int sum, float *h, float *side)
{
    const int dtype = c->a->x.dtype;
    norm_read(h, n, row->data[X], dtype, i);
    if (!row->data[RESIDUAL])
        return;
    if (row->data[GATE]) {
        norm_side(c, row, GATE, i, n, side);
        norm_times(h, n, side, ADZE_F32, 0, 0);
        if (c->a->rounding & ADZE_ROUND_STEPS)
            norm_round(h, n, dtype);
    }
    norm_plus(h, n, row->data[RESIDUAL], dtype, i);
    if (sum && row->data[SUM])
        norm_put(h, n, (void *)row->data[SUM], dtype, i, c->stream_sum);
    if (!(c->a->rounding & ADZE_FLOAT_SUM))
        norm_round(h, n, dtype);
}
INLINE void norm_write(const norm_call *c, const norm_row *row, float mean, float scale, int64_t i, int64_t n,
                       float *y, float *side)
{
    const adze_norm_args *a = c->a;
    const int dtype = a->x.dtype, steps = a->rounding & ADZE_ROUND_STEPS;
    norm_scale(y, n, mean, scale);
    if (a->rounding & ADZE_ROUND_NORM)
        norm_round(y, n, dtype);
    if (a->weight.dtype)
        norm_times(y, n, a->weight.data, a->weight.dtype, i, a->weight_offset);
    if (a->bias.dtype)
        norm_plus(y, n, a->bias.data, a->bias.dtype, i);
    if (steps && (a->scale.dtype || a->shift.dtype))
        norm_round(y, n, dtype);
    if (a->scale.dtype) {
        norm_side(c, row, SCALE, i, n, side);
        norm_scale(side, n, -1, 1);
        if (steps)
            norm_round(side, n, dtype);
        norm_times(y, n, side, ADZE_F32, 0, 0);
        if (steps && a->shift.dtype)
            norm_round(y, n, dtype);
    }
    if (a->shift.dtype) {
        norm_side(c, row, SHIFT, i, n, side);
        norm_plus(y, n, side, ADZE_F32, 0);
    }
    norm_put(y, n, (void *)row->data[OUT], a->out.dtype, i, c->stream_out);
}

NO_INLINE void norm_any_rows(const norm_call *c, int64_t begin, int64_t end, int centred)
{
    float row_of[KEPT] __attribute__((aligned(64))), side[CHUNK] __attribute__((aligned(64)));
    const int kept = c->dim <= KEPT;
    enum { MEAN, SQUARE, WRITE };
    for (int64_t r = begin; r < end; r++) {
        norm_row row;
        for (int t = 0; t < NORM_TENSORS; t++) {
            const adze_tensor *x = c->tensors[t];
            row.data[t] = x->dtype == ADZE_NONE ? NULL
                                                : (const char *)x->data + adze_row_offset(&c->rows, t, r) *
                                                                              (x->dtype == ADZE_F32 ? 4 : 2);
        }
        float sum[2] = {0, 0}, mean = 0, scale = 0;
        const int first = centred ? MEAN : SQUARE;
        for (int pass = first; pass <= WRITE; pass++) {
            for (int64_t i = 0; i < c->dim; i += CHUNK) {
                const int64_t n = c->dim - i < CHUNK ? c->dim - i : CHUNK;
                float *h = row_of + (kept ? i : 0);
                if (!kept || pass == first)
                    norm_make(c, &row, i, n, kept || pass == WRITE, h, side);
                if (pass == WRITE)
                    norm_write(c, &row, mean, scale, i, n, h, side);
                else
                    sum[pass] += norm_total(h, ADZE_F32, 0, n, pass == SQUARE, mean);
            }
            if (pass == MEAN)
                mean = sum[MEAN] / (float)c->dim;
            if (pass == SQUARE)
                scale = 1 / sqrtf(sum[SQUARE] / (float)c->dim + c->a->eps);
        }
    }
}

INLINE void norm_range(const norm_call *c, int64_t begin, int64_t end, int centred)
{
    switch (norm_is_plain(c->a, centred) ? c->a->x.dtype : ADZE_NONE) {
    case ADZE_F32: norm_plain_rows(c, begin, end, ADZE_F32, centred); break;
    case ADZE_F16: norm_plain_rows(c, begin, end, ADZE_F16, centred); break;
    case ADZE_BF16: norm_plain_rows(c, begin, end, ADZE_BF16, centred); break;
    default: norm_any_rows(c, begin, end, centred); break;
    }
    if (c->stream_out || c->stream_sum)
        row_stream_end();
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
