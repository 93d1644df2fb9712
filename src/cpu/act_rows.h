/* act_rows.h - activation and glu on the CPU: out = act(gate), or act(gate) * value, in one pass. Rows are cut into
   pieces of PIECE elements, which are distributed over threads. */
#ifndef ADZE_CPU_ACT_ROWS_H
#define ADZE_CPU_ACT_ROWS_H

#include "cpu/act.h"
#include "cpu/row32.h"

enum { GATE, OUT, VALUE, ACT_TENSORS, PIECE = 4096, PREFETCH_DISTANCE = 1024 };

typedef struct act_call {
    adze_tensor tensors[ACT_TENSORS]; /* value may be absent */
    adze_rows rows;
    int64_t dim, pieces; /* pieces of a row */
    int act, steps, stream;
} act_call;

/* n <= 32 elements from i on. */
INLINE void act_step(const act_call *c, char *const *data, int64_t i, int64_t n, int dtype, int act, int times)
{
    vf32 y = row_load32_part(data[GATE], dtype, i, n);
    UNROLLED
    for (int p = 0; p < 2 * VF_PARTS; p++)
        y.part[p] = vf_act_of(act, y.part[p], dtype != ADZE_F32);
    if (times) {
        const vf32 value = row_load32_part(data[VALUE], dtype, i, n);
        if (c->steps)
            y = row_round32(dtype, y);
        for (int p = 0; p < 2 * VF_PARTS; p++)
            y.part[p] *= value.part[p];
    }
    row_store32_part(data[OUT], dtype, i, y, n, c->stream);
}
/* The tail of a row, for any dtype and activation. It is not inlined, so that each loop has only one copy. */
NO_INLINE void act_rest(const act_call *c, char *const *data, int64_t i, int64_t n, int dtype, int act, int times)
{
    act_step(c, data, i, n, dtype, act, times);
}
INLINE void act_piece(const act_call *c, char *const *data, int64_t n, int dtype, int act, int times)
{
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        row_prefetch(data[GATE], dtype, i + PREFETCH_DISTANCE);
        if (times)
            row_prefetch(data[VALUE], dtype, i + PREFETCH_DISTANCE);
        act_step(c, data, i, 2 * LANES, dtype, act, times);
    }
    if (i < n)
        act_rest(c, data, i, n - i, dtype, act, times);
}

INLINE void act_pieces(const act_call *c, int64_t begin, int64_t end, int dtype, int act, int times)
{
    const int64_t size = adze_float_size(dtype);
    char *data[ACT_TENSORS] = {NULL};
    for (int64_t unit = begin, run = 0; unit < end; unit++, run--) {
        const int64_t row = c->pieces == 1 ? unit : unit / c->pieces, at = (unit - row * c->pieces) * PIECE;
        const int64_t n = c->dim - at < PIECE ? c->dim - at : PIECE;
        for (int t = 0; t < (times ? ACT_TENSORS : VALUE); t++)
            data[t] = run > 0 ? data[t] + adze_row_stride(&c->rows, t) * size
                              : (char *)c->tensors[t].data + (adze_row_offset(&c->rows, t, row) + at) * size;
        if (run == 0)
            run = c->pieces == 1 ? adze_rows_run(&c->rows, row) : 1;
        act_piece(c, data, n, dtype, act, times);
    }
    if (c->stream)
        row_stream_end();
}

/* One loop for each activation, so that its constants stay in registers. */
INLINE void act_range(const act_call *c, int64_t begin, int64_t end, int dtype, int times)
{
    switch (c->act) {
    case ADZE_ACT_SILU: act_pieces(c, begin, end, dtype, ADZE_ACT_SILU, times); break;
    case ADZE_ACT_GELU: act_pieces(c, begin, end, dtype, ADZE_ACT_GELU, times); break;
    case ADZE_ACT_GELU_TANH: act_pieces(c, begin, end, dtype, ADZE_ACT_GELU_TANH, times); break;
    case ADZE_ACT_GELU_QUICK: act_pieces(c, begin, end, dtype, ADZE_ACT_GELU_QUICK, times); break;
    case ADZE_ACT_RELU: act_pieces(c, begin, end, dtype, ADZE_ACT_RELU, times); break;
    case ADZE_ACT_RELU2: act_pieces(c, begin, end, dtype, ADZE_ACT_RELU2, times); break;
    default: act_pieces(c, begin, end, dtype, ADZE_ACT_SIGMOID, times); break;
    }
}

INLINE adze_status act_run(act_call *c, adze_range_fn body)
{
    adze_tensor *const tensors[] = {&c->tensors[GATE], &c->tensors[OUT], &c->tensors[VALUE]};
    const adze_tensor *const rows[] = {tensors[GATE], tensors[OUT], tensors[VALUE]}, *out = rows[OUT];
    adze_merge(c->tensors[VALUE].dtype ? 3 : 2, tensors, 0);
    adze_rows_init(&c->rows, out, ACT_TENSORS, rows);
    c->dim = out->shape[out->rank - 1];
    c->stream = row_streams32(out, c->rows.count * c->dim);
    c->pieces = (c->dim + PIECE - 1) / PIECE;
    adze_parallel_for(c->rows.count * c->pieces, row_grain(c->dim < PIECE ? c->dim : PIECE), body, c);
    return ADZE_OK;
}

#endif
