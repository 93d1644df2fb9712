/* norm.h - rms_norm and layer_norm on the CPU. A row is read once from memory and becomes floats in a buffer, summed
   on the way; it is read again from there for the squares (layer_norm) and to be written, while the next row is
   brought into the cache. Weights and what else rows share become floats once. A row longer than the buffer goes
   through it in parts, made anew each time. */
#ifndef ADZE_CPU_NORM_H
#define ADZE_CPU_NORM_H

#include "cpu/row.h"

enum { X, OUT, SUM, RESIDUAL, GATE, GATE_TABLE, SCALE, SCALE_TABLE, SHIFT, SHIFT_TABLE, NORM_TENSORS };
enum { SPACE = 65536 }; /* floats of a thread, for a part of a row and of each operand */

typedef struct norm_call {
    const adze_norm_args *a;
    const adze_tensor *tensors[NORM_TENSORS];
    adze_rows rows;
    int64_t dim, chunk; /* elements of a row, and of a part of it */
    int stream_out, stream_sum;
} norm_call;

typedef struct norm_side { /* an operand as floats, and what they were made from */
    const char *data, *table;
    float *floats;
} norm_side;

typedef struct norm_space { /* of a thread */
    float *row;
    norm_side weight, bias, gate, scale, shift;
    float floats[SPACE] __attribute__((aligned(64)));
} norm_space;

typedef struct norm_part { /* of a row: n elements, from what its passes need; absent pointers are NULL */
    const char *x, *residual;
    const char *next_x, *next_residual; /* the same part of the next row */
    char *out, *sum;
    float *made; /* where h becomes floats; NULL: x is h already */
    const float *h;
    const float *weight, *bias, *gate, *scale, *shift;
    int64_t n;
    float mean, rstd;
    int round_norm, round_steps, round_sum, stream_out, stream_sum;
} norm_part;

/* ---- Operands ---- */

/* y = data, or y + data, n elements; `plus` is added too. */
INLINE void norm_floats_as(float *y, const void *data, int dtype, int64_t n, int add, float plus)
{
    for (int64_t j = 0; j < n; j += LANES) {
        vf16 v = row_load_part(data, dtype, j, n - j < LANES ? n - j : LANES);
        const vf16 old = add ? row_load(y, ADZE_F32, j) : vf16_all(plus);
        for (int p = 0; p < VF_PARTS; p++)
            v.part[p] += old.part[p];
        row_store(y, ADZE_F32, j, v);
    }
}
NO_INLINE void norm_floats(float *y, const void *data, int dtype, int64_t n, int add, float plus)
{
    switch (dtype) {
    case ADZE_F32: norm_floats_as(y, data, ADZE_F32, n, add, plus); break;
    case ADZE_F16: norm_floats_as(y, data, ADZE_F16, n, add, plus); break;
    default: norm_floats_as(y, data, ADZE_BF16, n, add, plus); break;
    }
}
NO_INLINE void norm_round(float *y, int64_t n, int dtype)
{
    for (int64_t j = 0; j < n && dtype == ADZE_F16; j += LANES)
        row_store(y, ADZE_F32, j, row_round(ADZE_F16, row_load(y, ADZE_F32, j)));
    for (int64_t j = 0; j < n && dtype == ADZE_BF16; j += LANES)
        row_store(y, ADZE_F32, j, row_round(ADZE_BF16, row_load(y, ADZE_F32, j)));
}

/* data + table + plus, n elements of a row; `steps` rounds both sums to that dtype. Rows that share an operand have
   it made once. */
INLINE const float *norm_operand(norm_side *side, const char *data, int dtype, const char *table, int table_dtype,
                                 int64_t n, float plus, int steps)
{
    if (!data)
        return NULL;
    if (dtype == ADZE_F32 && !table && plus == 0)
        return (const float *)(const void *)data;
    if (side->data == data && side->table == table)
        return side->floats;
    norm_floats(side->floats, data, dtype, n, 0, table ? -0.0f : plus);
    if (table) {
        norm_floats(side->floats, table, table_dtype, n, 1, 0);
        norm_round(side->floats, n, steps);
        if (plus != 0)
            norm_floats(side->floats, side->floats, ADZE_F32, n, 0, plus);
    }
    if (plus != 0)
        norm_round(side->floats, n, steps);
    side->data = data;
    side->table = table;
    return side->floats;
}

/* ---- Passes ---- */

/* n <= 16 elements of h = residual + gate * x from j on. */
INLINE vf16 norm_made(const norm_part *t, int dtype, int64_t j, int64_t n)
{
    vf16 h = row_load_part(t->x, dtype, j, n);
    if (!t->residual)
        return h;
    if (t->gate) {
        const vf16 gate = row_load_part(t->gate, ADZE_F32, j, n);
        for (int p = 0; p < VF_PARTS; p++)
            h.part[p] *= gate.part[p];
        if (t->round_steps)
            h = row_round(dtype, h);
    }
    const vf16 residual = row_load_part(t->residual, dtype, j, n);
    for (int p = 0; p < VF_PARTS; p++)
        h.part[p] += residual.part[p];
    if (t->sum)
        row_store_part(t->sum, dtype, j, h, n, t->stream_sum);
    return t->round_sum ? row_round(dtype, h) : h;
}
INLINE void norm_make_lanes(const norm_part *t, int dtype, int square, int64_t j, int64_t n, vf_total *total, int set)
{
    const vf16 h = norm_made(t, dtype, j, n);
    vf_total_add(total, set, h, square);
    if (t->made)
        row_store(t->made, ADZE_F32, j, h);
}
/* Makes h and adds it up, or its squares, in 32 lanes. */
INLINE float norm_make_as(const norm_part *t, int dtype, int square)
{
    vf_total total = {0};
    int64_t j = 0;
    for (; j + 2 * LANES <= t->n; j += 2 * LANES) { /* written out: a set that is a variable stays in memory */
        norm_make_lanes(t, dtype, square, j, LANES, &total, 0);
        norm_make_lanes(t, dtype, square, j + LANES, LANES, &total, 1);
    }
    for (; j < t->n; j += LANES)
        norm_make_lanes(t, dtype, square, j, t->n - j < LANES ? t->n - j : LANES, &total, 2);
    return vf_total_sum(&total);
}
INLINE float norm_make(const norm_part *t, int dtype, int square)
{
    switch (dtype) {
    case ADZE_F32: return norm_make_as(t, ADZE_F32, square);
    case ADZE_F16: return norm_make_as(t, ADZE_F16, square);
    default: return norm_make_as(t, ADZE_BF16, square);
    }
}

/* The sum of (h - mean)^2. */
INLINE float norm_squares(const norm_part *t)
{
    vf_total total = {0};
    int64_t j = 0;
    for (; j + 4 * LANES <= t->n; j += 4 * LANES)
        for (int set = 0; set < 4; set++)
            vf_total_add(&total, set, vf16_minus(row_load(t->h, ADZE_F32, j + set * LANES), t->mean), 1);
    for (int set = 0; j < t->n; j += LANES, set++) {
        const int64_t n = t->n - j < LANES ? t->n - j : LANES;
        const vf16 away = vf16_minus(row_load_part(t->h, ADZE_F32, j, n), t->mean);
        vf_total_add(&total, set, n < LANES ? vf16_cut(away, n, 0) : away, 1);
    }
    return vf_total_sum(&total);
}

INLINE vf16 norm_times(vf16 y, const float *factor, int64_t j, int64_t n)
{
    const vf16 f = row_load_part(factor, ADZE_F32, j, n);
    for (int p = 0; p < VF_PARTS; p++)
        y.part[p] *= f.part[p];
    return y;
}
INLINE vf16 norm_plus(vf16 y, const float *term, int64_t j, int64_t n)
{
    const vf16 t = row_load_part(term, ADZE_F32, j, n);
    for (int p = 0; p < VF_PARTS; p++)
        y.part[p] += t.part[p];
    return y;
}
/* n <= 16 elements from j on, of x's dtype where they are rounded and of `out_dtype` where they are stored. */
INLINE void norm_put(const norm_part *t, int dtype, int out_dtype, int centred, int64_t j, int64_t n)
{
    vf16 y = row_load_part(t->h, ADZE_F32, j, n);
    for (int p = 0; p < VF_PARTS; p++)
        y.part[p] = (centred ? y.part[p] - t->mean : y.part[p]) * t->rstd;
    if (t->round_norm)
        y = row_round(dtype, y);
    if (t->weight)
        y = norm_times(y, t->weight, j, n);
    if (t->bias)
        y = norm_plus(y, t->bias, j, n);
    if (t->round_steps && (t->scale || t->shift))
        y = row_round(dtype, y);
    if (t->scale)
        y = norm_times(y, t->scale, j, n);
    if (t->round_steps && t->scale && t->shift)
        y = row_round(dtype, y);
    if (t->shift)
        y = norm_plus(y, t->shift, j, n);
    row_store_part(t->out, out_dtype, j, y, n, t->stream_out);
}
INLINE void norm_write_as(const norm_part *t, int dtype, int out_dtype, int centred)
{
    int64_t j = 0;
    for (; j + 2 * LANES <= t->n; j += 2 * LANES) {
        if (t->next_x)
            row_ahead(t->next_x, dtype, j);
        if (t->next_residual)
            row_ahead(t->next_residual, dtype, j);
        for (int64_t i = j; i < j + 2 * LANES; i += LANES)
            norm_put(t, dtype, out_dtype, centred, i, LANES);
    }
    for (; j < t->n; j += LANES)
        norm_put(t, dtype, out_dtype, centred, j, t->n - j < LANES ? t->n - j : LANES);
}
INLINE void norm_write(const norm_part *t, int dtype, int out_dtype, int centred)
{
    switch (out_dtype == dtype ? dtype : -dtype) {
    case ADZE_F32: norm_write_as(t, ADZE_F32, ADZE_F32, centred); break;
    case ADZE_F16: norm_write_as(t, ADZE_F16, ADZE_F16, centred); break;
    case ADZE_BF16: norm_write_as(t, ADZE_BF16, ADZE_BF16, centred); break;
    case -ADZE_F16: norm_write_as(t, ADZE_F16, ADZE_F32, centred); break;
    default: norm_write_as(t, ADZE_BF16, ADZE_F32, centred); break;
    }
}

/* ---- Rows ---- */

/* Elements from i on of tensor t, of a row that is given by its first ones; NULL when absent. */
INLINE const char *norm_at(const norm_call *c, const char *const *row, int t, int64_t i)
{
    return row[t] ? row[t] + i * (c->tensors[t]->dtype == ADZE_F32 ? 4 : 2) : NULL;
}
INLINE const float *norm_pair(const norm_call *c, const char *const *row, norm_side *side, int t, int64_t i,
                              int64_t n, float plus)
{
    return norm_operand(side, norm_at(c, row, t, i), c->tensors[t]->dtype, norm_at(c, row, t + 1, i),
                        c->tensors[t + 1]->dtype, n, plus, c->a->rounding & ADZE_ROUND_STEPS ? c->a->x.dtype : 0);
}
INLINE const float *norm_shared(const adze_tensor *t, norm_side *side, int64_t i, int64_t n, float plus)
{
    const char *data = t->dtype ? (const char *)t->data + i * (t->dtype == ADZE_F32 ? 4 : 2) : NULL;
    return norm_operand(side, data, t->dtype, NULL, 0, n, plus, 0);
}
INLINE void norm_part_of(const norm_call *c, const char *const *row, norm_space *space, int64_t i, norm_part *t)
{
    t->n = c->dim - i < c->chunk ? c->dim - i : c->chunk;
    t->x = norm_at(c, row, X, i);
    t->out = (char *)norm_at(c, row, OUT, i);
    t->sum = (char *)norm_at(c, row, SUM, i);
    t->residual = norm_at(c, row, RESIDUAL, i);
    t->gate = norm_pair(c, row, &space->gate, GATE, i, t->n, 0);
    t->weight = norm_shared(&c->a->weight, &space->weight, i, t->n, c->a->weight_offset);
    t->bias = norm_shared(&c->a->bias, &space->bias, i, t->n, 0);
    t->scale = norm_pair(c, row, &space->scale, SCALE, i, t->n, 1);
    t->shift = norm_pair(c, row, &space->shift, SHIFT, i, t->n, 0);
    t->made = c->a->x.dtype == ADZE_F32 && !t->residual ? NULL : space->row;
    t->h = t->made ? t->made : (const float *)(const void *)t->x;
}

INLINE void norm_range(const norm_call *c, int64_t begin, int64_t end, int centred)
{
    enum { MEAN, SQUARE, WRITE };
    norm_space space;
    norm_side *const sides[] = {&space.weight, &space.bias, &space.gate, &space.scale, &space.shift};
    const int present[] = {c->a->weight.dtype, c->a->bias.dtype, c->a->gate.dtype, c->a->scale.dtype,
                           c->a->shift.dtype};
    float *floats = space.floats;
    space.row = floats;
    for (int s = 0; s < 5; s++)
        *sides[s] = (norm_side){NULL, NULL, present[s] ? floats += c->chunk : NULL};
    const int kept = c->dim <= c->chunk, first = centred ? MEAN : SQUARE, dtype = c->a->x.dtype;
    norm_part t = {.round_norm = c->a->rounding & ADZE_ROUND_NORM,
                   .round_steps = c->a->rounding & ADZE_ROUND_STEPS,
                   .round_sum = !(c->a->rounding & ADZE_FLOAT_SUM),
                   .stream_out = c->stream_out,
                   .stream_sum = c->stream_sum};
    const char *row[NORM_TENSORS] = {NULL};
    const int size = dtype == ADZE_F32 ? 4 : 2;
    int given[NORM_TENSORS], count = 0;
    for (int k = 0; k < NORM_TENSORS; k++)
        if (c->tensors[k]->dtype)
            given[count++] = k;
    for (int64_t r = begin; r < end; r++) {
        for (int k = 0; k < count; k++) {
            const adze_tensor *x = c->tensors[given[k]];
            row[given[k]] =
                (const char *)x->data + adze_row_offset(&c->rows, given[k], r) * (x->dtype == ADZE_F32 ? 4 : 2);
        }
        if (kept && r + 1 < end) {
            t.next_x = (const char *)c->a->x.data + adze_row_offset(&c->rows, X, r + 1) * size;
            if (c->a->residual.dtype)
                t.next_residual =
                    (const char *)c->a->residual.data + adze_row_offset(&c->rows, RESIDUAL, r + 1) * size;
        }
        for (int pass = first; pass <= WRITE; pass++) {
            float sum = 0;
            for (int64_t i = 0; i < c->dim; i += c->chunk) {
                if (!kept || pass == first)
                    norm_part_of(c, row, &space, i, &t);
                if (!kept && pass != WRITE)
                    t.sum = NULL;
                if (pass == first)
                    sum += norm_make(&t, dtype, !centred);
                else if (!kept)
                    norm_make(&t, dtype, 0);
                if (pass == SQUARE && centred)
                    sum += norm_squares(&t);
                if (pass == WRITE)
                    norm_write(&t, dtype, c->a->out.dtype, centred);
            }
            if (pass == MEAN)
                t.mean = sum / (float)c->dim;
            if (pass == SQUARE)
                t.rstd = 1 / sqrtf(sum / (float)c->dim + c->a->eps);
        }
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
    const int operands = !!a->weight.dtype + !!a->bias.dtype + !!a->gate.dtype + !!a->scale.dtype + !!a->shift.dtype;
    c.chunk = SPACE / (operands + 1) / 64 * 64; /* each begins on a line */
    adze_rows_init(&c.rows, &a->x, NORM_TENSORS, c.tensors);
    c.stream_out = row_streams(&a->out, c.rows.count * c.dim);
    c.stream_sum = a->sum.dtype && row_streams(&a->sum, c.rows.count * c.dim);
    adze_parallel_for(c.dim ? c.rows.count : 0, row_grain(c.dim), body, &c);
    return ADZE_OK;
}

#endif
