/* norm.h - rms_norm and layer_norm on the CPU: rows, and the call. Short rows go through each pass a few at a time;
   longer ones one after the other, in parts where they are longer than the buffer. */
#ifndef ADZE_CPU_NORM_H
#define ADZE_CPU_NORM_H

#include "cpu/norm_part.h"

#include <stdlib.h>

/* ---- Rows ---- */

/* Elements of tensor t from i on, where `row` has its first elements; NULL when absent. */
INLINE const char *norm_at(const norm_call *c, const char *const *row, int t, int64_t i)
{
    return row[t] ? row[t] + i * adze_float_size(c->tensors[t]->dtype) : NULL;
}
INLINE norm_term norm_pair(const norm_call *c, const char *const *row, norm_cached *cached, int t, int64_t i,
                           int64_t n, float plus)
{
    return norm_operand(cached, c->a->x.dtype, norm_at(c, row, t, i), c->tensors[t]->dtype, norm_at(c, row, t + 1, i),
                        c->tensors[t + 1]->dtype, n, plus, c->a->rounding & ADZE_ROUND_STEPS);
}
INLINE norm_term norm_shared(const norm_call *c, const adze_tensor *t, norm_cached *cached, int64_t i, int64_t n,
                             float plus)
{
    const char *data = t->dtype ? (const char *)t->data + i * adze_float_size(t->dtype) : NULL;
    return norm_operand(cached, c->a->x.dtype, data, t->dtype, NULL, 0, n, plus, 0);
}
INLINE void norm_part_of(const norm_call *c, const char *const *row, norm_space *space, int64_t i, norm_part *t)
{
    t->n = c->dim - i < space->chunk ? c->dim - i : space->chunk;
    t->x = norm_at(c, row, X, i);
    t->out = (char *)norm_at(c, row, OUT, i);
    t->sum = (char *)norm_at(c, row, SUM, i);
    t->residual = norm_at(c, row, RESIDUAL, i);
    t->gate = norm_pair(c, row, &space->gate, GATE, i, t->n, 0);
    t->weight = norm_shared(c, &c->a->weight, &space->weight, i, t->n, c->a->weight_offset);
    t->bias = norm_shared(c, &c->a->bias, &space->bias, i, t->n, 0);
    t->scale = norm_pair(c, row, &space->scale, SCALE, i, t->n, 1);
    t->shift = norm_pair(c, row, &space->shift, SHIFT, i, t->n, 0);
    t->converted = space->row;
}

/* Whether an operand is converted to floats: one that is a sum, or not of x's dtype. On NEON widening bf16 takes as
   long as a multiplication, so that the rows of a range share a converted weight. */
INLINE int norm_converts(const norm_call *c, const adze_tensor *t, const adze_tensor *table, float plus, int64_t rows)
{
    const int dtype = c->a->x.dtype;
    if (!t->dtype || SLOW_TO_READ(dtype) || t->dtype != dtype || plus != 0 || (table && table->dtype))
        return !!t->dtype;
#if defined(__aarch64__)
    return !table && dtype == ADZE_BF16 && rows >= SHARED_ROWS && c->dim <= SPACE / 4;
#else
    (void)rows;
    return 0;
#endif
}
/* Divides the buffer among its users. Returns the heap memory, or NULL. Without memory, parts of a row are smaller.
 */
INLINE float *norm_space_init(const norm_call *c, norm_space *space, int64_t rows)
{
    const adze_norm_args *a = c->a;
    norm_cached *const all_cached[] = {&space->weight, &space->bias, &space->gate, &space->scale, &space->shift};
    const int converted[] = {
        norm_converts(c, &a->weight, NULL, a->weight_offset, rows), norm_converts(c, &a->bias, NULL, 0, rows),
        norm_converts(c, &a->gate, &a->gate_table, 0, rows), norm_converts(c, &a->scale, &a->scale_table, 1, rows),
        norm_converts(c, &a->shift, &a->shift_table, 0, rows)};
    const int converts_row = a->residual.dtype || SLOW_TO_READ(a->x.dtype);
    const int64_t count = converts_row + converted[0] + converted[1] + converted[2] + converted[3] + converted[4];
    float *heap = NULL, *floats = space->floats;
    space->chunk = (c->dim + LINE - 1) / LINE * LINE;
    if (count * space->chunk > STACK_FLOATS) {
        const int64_t most = count * space->chunk < SPACE ? count * space->chunk : SPACE;
        heap = aligned_alloc(LINE, (size_t)most * sizeof *heap);
        space->chunk = (heap ? most : STACK_FLOATS) / count / LINE * LINE;
        floats = heap ? heap : floats;
    }
    space->row = converts_row ? floats : NULL;
    floats += converts_row ? space->chunk : 0;
    for (int s = 0; s < 5; s++) {
        *all_cached[s] = (norm_cached){NULL, NULL, converted[s] ? floats : NULL};
        floats += converted[s] ? space->chunk : 0;
    }
    return heap;
}

INLINE norm_part norm_part_new(const norm_call *c)
{
    return (norm_part){.round_norm = c->a->rounding & ADZE_ROUND_NORM,
                       .round_steps = c->a->rounding & ADZE_ROUND_STEPS,
                       .round_sum = !(c->a->rounding & ADZE_FLOAT_SUM),
                       .stream_out = c->stream_out,
                       .stream_sum = c->stream_sum};
}
/* The tensors that are given, and how many they are. */
INLINE int norm_given(const norm_call *c, int *given)
{
    int count = 0;
    for (int k = 0; k < NORM_TENSORS; k++)
        if (c->tensors[k]->dtype)
            given[count++] = k;
    return count;
}
INLINE const char *norm_row_at(const norm_call *c, int t, int64_t r)
{
    return (const char *)c->tensors[t]->data +
           adze_row_offset(&c->rows, t, r) * adze_float_size(c->tensors[t]->dtype);
}

/* Rows of any length, in parts and passes. */
INLINE void norm_rows(const norm_call *c, norm_space *space, int64_t begin, int64_t end, int centred)
{
    enum { MEAN, SQUARE, WRITE };
    const int kept = c->dim <= space->chunk, first = centred ? MEAN : SQUARE, dtype = c->a->x.dtype;
    norm_part t = norm_part_new(c);
    const char *row[NORM_TENSORS] = {NULL};
    int given[NORM_TENSORS];
    const int count = norm_given(c, given);
    for (int64_t r = begin; r < end; r++) {
        for (int k = 0; k < count; k++)
            row[given[k]] = norm_row_at(c, given[k], r);
        if (kept && r + 1 < end) {
            t.next_x = norm_row_at(c, X, r + 1);
            if (c->a->residual.dtype)
                t.next_residual = norm_row_at(c, RESIDUAL, r + 1);
        }
        for (int pass = first; pass <= WRITE; pass++) {
            float sum = 0;
            for (int64_t i = 0; i < c->dim; i += space->chunk) {
                if (!kept || pass == first)
                    norm_part_of(c, row, space, i, &t);
                if (!kept && pass != WRITE)
                    t.sum = NULL;
                if (pass == first)
                    sum += centred ? norm_make_sum(&t, dtype) : norm_make_squares(&t, dtype);
                else if (!kept && t.converted)
                    norm_make_sum(&t, dtype);
                if (pass == SQUARE && centred)
                    sum += norm_squares(&t, dtype);
                if (pass == WRITE && centred)
                    norm_write_centred(&t, dtype, c->a->out.dtype);
                else if (pass == WRITE)
                    norm_write(&t, dtype, c->a->out.dtype);
            }
            if (pass == MEAN)
                t.mean = sum / (float)c->dim;
            if (pass == SQUARE)
                t.rstd = 1 / sqrtf(sum / (float)c->dim + c->a->eps);
        }
    }
}

/* Where a few rows of each tensor are, NULL when absent, and the bytes from one to the next. */
typedef struct norm_places {
    const char *at[NORM_TENSORS];
    int64_t stride[NORM_TENSORS];
} norm_places;
INLINE const char *norm_place(const norm_places *rows, int t, int64_t i)
{
    return rows->at[t] ? rows->at[t] + i * rows->stride[t] : NULL;
}
/* Row i of `first` and its table. */
INLINE norm_term norm_short_pair(const norm_call *c, const norm_places *rows, norm_cached *cached, int first,
                                 int64_t i, float plus)
{
    const char *row[NORM_TENSORS];
    if (!rows->at[first])
        return (norm_term){NULL, 0};
    row[first] = norm_place(rows, first, i);
    row[first + 1] = norm_place(rows, first + 1, i);
    return norm_pair(c, row, cached, first, 0, c->dim, plus);
}

/* Short rows, a few in each pass: while one waits for its sum, others are read. */
INLINE void norm_short_as(const norm_call *c, norm_space *space, int64_t begin, int64_t end, int dtype, int out_dtype,
                          int centred)
{
    norm_part t = norm_part_new(c);
    norm_places rows;
    float h[TOGETHER * SHORT_ROW] __attribute__((aligned(64))), mean[TOGETHER], rstd[TOGETHER];
    const int64_t whole = c->dim / STEP * STEP, rest = c->dim - whole;
    for (int k = 0; k < NORM_TENSORS; k++)
        rows.stride[k] = adze_row_stride(&c->rows, k) * adze_float_size(c->tensors[k]->dtype);
    t.weight = norm_shared(c, &c->a->weight, &space->weight, 0, c->dim, c->a->weight_offset);
    t.bias = norm_shared(c, &c->a->bias, &space->bias, 0, c->dim, 0);
    for (int64_t r = begin, run = 0, n = 0; r < end; r += n, run -= n) {
        for (int k = 0; k < NORM_TENSORS; k++)
            rows.at[k] = !c->tensors[k]->dtype ? NULL : run ? rows.at[k] + n * rows.stride[k] : norm_row_at(c, k, r);
        run = run ? run : adze_rows_run(&c->rows, r);
        n = run < TOGETHER ? run : TOGETHER;
        n = end - r < n ? end - r : n;
        for (int64_t i = 0; i < n; i++) {
            vf_total total = {0};
            t.x = rows.at[X] + i * rows.stride[X];
            t.sum = (char *)norm_place(&rows, SUM, i);
            t.residual = norm_place(&rows, RESIDUAL, i);
            t.gate = norm_short_pair(c, &rows, &space->gate, GATE, i, 0);
            t.converted = space->row ? &h[i * SHORT_ROW] : NULL;
            for (int64_t j = 0; j < whole; j += STEP)
                norm_make_step(&t, dtype, !centred, j, STEP, &total, 0);
            if (rest)
                norm_make_step(&t, dtype, !centred, whole, rest, &total, 1);
            mean[i] = vf_total_sum(&total) / (float)c->dim; /* of squares, unless centred */
        }
        for (int64_t i = 0; i < n; i++) {
            vf_total total = {0};
            t.x = rows.at[X] + i * rows.stride[X];
            t.converted = space->row ? &h[i * SHORT_ROW] : NULL;
            t.mean = mean[i];
            for (int64_t j = 0; j < whole && centred; j += STEP)
                norm_square(&t, dtype, j, STEP, &total, 0);
            if (rest && centred)
                norm_square(&t, dtype, whole, rest, &total, 1);
            const float square = centred ? vf_total_sum(&total) / (float)c->dim : mean[i];
            rstd[i] = 1 / sqrtf(square + c->a->eps);
        }
        for (int64_t i = 0; i < n; i++) {
            t.x = rows.at[X] + i * rows.stride[X];
            t.out = (char *)rows.at[OUT] + i * rows.stride[OUT];
            t.scale = norm_short_pair(c, &rows, &space->scale, SCALE, i, 1);
            t.shift = norm_short_pair(c, &rows, &space->shift, SHIFT, i, 0);
            t.converted = space->row ? &h[i * SHORT_ROW] : NULL;
            t.mean = mean[i], t.rstd = rstd[i];
            for (int64_t j = 0; j < whole; j += STEP)
                norm_put(&t, dtype, out_dtype, centred, j, STEP);
            if (rest)
                norm_put(&t, dtype, out_dtype, centred, whole, rest);
        }
    }
}
#define NORM_SHORT(name, dtype, out_dtype)                                                                           \
    NO_INLINE void name(const norm_call *c, norm_space *space, int64_t begin, int64_t end, int centred)              \
    {                                                                                                                \
        norm_short_as(c, space, begin, end, dtype, out_dtype, centred);                                              \
    }
NORM_SHORT(norm_short_f32, ADZE_F32, ADZE_F32)
NORM_SHORT(norm_short_f16, ADZE_F16, ADZE_F16)
NORM_SHORT(norm_short_bf16, ADZE_BF16, ADZE_BF16)
NORM_SHORT(norm_short_f16_f32, ADZE_F16, ADZE_F32)
NORM_SHORT(norm_short_bf16_f32, ADZE_BF16, ADZE_F32)

INLINE void norm_range(const norm_call *c, int64_t begin, int64_t end, int centred)
{
    norm_space space;
    float *const heap = norm_space_init(c, &space, end - begin);
    const int dtype = c->a->x.dtype;
    if (c->dim > SHORT_ROW)
        norm_rows(c, &space, begin, end, centred);
    else
        switch (c->a->out.dtype == dtype ? dtype : -dtype) {
        case ADZE_F32: norm_short_f32(c, &space, begin, end, centred); break;
        case ADZE_F16: norm_short_f16(c, &space, begin, end, centred); break;
        case ADZE_BF16: norm_short_bf16(c, &space, begin, end, centred); break;
        case -ADZE_F16: norm_short_f16_f32(c, &space, begin, end, centred); break;
        default: norm_short_bf16_f32(c, &space, begin, end, centred); break;
        }
    if (c->stream_out || c->stream_sum)
        row_stream_end();
    free(heap);
}

/* ---- Quantised rows ---- */

/* One row, with what belongs to it; the order of tensors is that of norm_call, after which the scale comes. */
static adze_status norm_row(const bytes_call *c, int64_t row, const adze_tensor *out, adze_run_fn norm)
{
    const adze_norm_args *a = c->args;
    const adze_stream cpu = {ADZE_CPU, NULL};
    adze_norm_args one = *a;
    one.x = bytes_row_of(c, &a->x, X, row);
    one.sum = bytes_row_of(c, &a->sum, SUM, row);
    one.residual = bytes_row_of(c, &a->residual, RESIDUAL, row);
    one.gate = bytes_row_of(c, &a->gate, GATE, row);
    one.gate_table = bytes_row_of(c, &a->gate_table, GATE_TABLE, row);
    one.scale = bytes_row_of(c, &a->scale, SCALE, row);
    one.scale_table = bytes_row_of(c, &a->scale_table, SCALE_TABLE, row);
    one.shift = bytes_row_of(c, &a->shift, SHIFT, row);
    one.shift_table = bytes_row_of(c, &a->shift_table, SHIFT_TABLE, row);
    one.out = *out;
    one.out_dtype = 0;
    one.out_scale = (adze_tensor){.dtype = ADZE_NONE};
    return norm(cpu, &one);
}
static adze_status norm_bytes(const char *op, const adze_norm_args *a,
                              adze_status (*row)(const bytes_call *c, int64_t row, const adze_tensor *out))
{
    const adze_tensor scale = adze_by_rows(&a->out_scale);
    const adze_tensor *const tensors[NORM_TENSORS + 1] = {&a->x,     &a->out,         &a->sum,   &a->residual,
                                                          &a->gate,  &a->gate_table,  &a->scale, &a->scale_table,
                                                          &a->shift, &a->shift_table, &scale};
    bytes_call c = {.args = a,
                    .out = &a->out,
                    .scale = &a->out_scale,
                    .out_at = OUT,
                    .scale_at = NORM_TENSORS,
                    .dtype = a->x.dtype,
                    .dim = a->x.shape[a->x.rank - 1],
                    .row = row};
    adze_rows_init(&c.rows, &a->x, NORM_TENSORS + 1, tensors);
    return bytes_run(op, &c, row_grain(c.dim));
}

INLINE adze_status norm_run(const adze_norm_args *a, adze_range_fn body)
{
    norm_call c = {.a = a,
                   .tensors = {&a->x, &a->out, &a->sum, &a->residual, &a->gate, &a->gate_table, &a->scale,
                               &a->scale_table, &a->shift, &a->shift_table},
                   .dim = a->x.shape[a->x.rank - 1]};
    adze_rows_init(&c.rows, &a->x, NORM_TENSORS, c.tensors);
    c.stream_out = row_streams32(&a->out, c.rows.count * c.dim);
    c.stream_sum = a->sum.dtype && row_streams32(&a->sum, c.rows.count * c.dim);
    adze_parallel_for(c.dim ? c.rows.count : 0, row_grain(c.dim), body, &c);
    return ADZE_OK;
}

#endif
