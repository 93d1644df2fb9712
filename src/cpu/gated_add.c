/* gated_add on the CPU: one pass. Rows are cut into pieces of PIECE elements, which threads share. */
#include "cpu/row.h"

enum { X, RESIDUAL, OUT, GATE, GATE_TABLE, TENSORS, PIECE = 4096 };

typedef struct gated_call {
    const adze_tensor *tensors[TENSORS]; /* the table may be absent */
    adze_rows rows;
    int64_t dim, pieces; /* pieces of a row */
    int steps, stream;
} gated_call;

/* The product is a float before the sum, as in the norms: it may not become one instruction with it. */
INLINE vf16 uncontracted(vf16 v)
{
    for (int p = 0; p < VF_PARTS; p++) {
#if defined(__x86_64__)
        __asm__("" : "+v"(v.part[p]));
#elif defined(__aarch64__)
        __asm__("" : "+w"(v.part[p]));
#else
        __asm__("" : "+m"(v.part[p]));
#endif
    }
    return v;
}

/* n <= 16 elements from i on; table_dtype 0: no table. */
INLINE void gated_lanes(const gated_call *c, char *const *data, int64_t i, int64_t n, int dtype, int gate_dtype,
                        int table_dtype)
{
    vf16 y = row_load_part(data[GATE], gate_dtype, i, n);
    if (table_dtype) {
        const vf16 table = row_load_part(data[GATE_TABLE], table_dtype, i, n);
        for (int p = 0; p < VF_PARTS; p++)
            y.part[p] += table.part[p];
        if (c->steps)
            y = row_round(dtype, y);
    }
    const vf16 x = row_load_part(data[X], dtype, i, n), residual = row_load_part(data[RESIDUAL], dtype, i, n);
    for (int p = 0; p < VF_PARTS; p++)
        y.part[p] *= x.part[p];
    y = c->steps ? row_round(dtype, y) : uncontracted(y);
    for (int p = 0; p < VF_PARTS; p++)
        y.part[p] += residual.part[p];
    row_store_part(data[OUT], dtype, i, y, n, c->stream);
}

INLINE void gated_pieces(const gated_call *c, int64_t begin, int64_t end, int dtype, int gate_dtype, int table_dtype)
{
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t row = unit / c->pieces, at = (unit - row * c->pieces) * PIECE;
        const int64_t n = c->dim - at < PIECE ? c->dim - at : PIECE;
        char *data[TENSORS] = {NULL};
        for (int t = 0; t < (table_dtype ? TENSORS : GATE_TABLE); t++)
            data[t] = (char *)c->tensors[t]->data +
                      (adze_row_offset(&c->rows, t, row) + at) * (c->tensors[t]->dtype == ADZE_F32 ? 4 : 2);
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES)
            gated_lanes(c, data, i, LANES, dtype, gate_dtype, table_dtype);
        if (i < n)
            gated_lanes(c, data, i, n - i, dtype, gate_dtype, table_dtype);
    }
    if (c->stream)
        row_stream_end();
}

INLINE void gated_range(const gated_call *c, int64_t begin, int64_t end, int dtype)
{
    const int gate_f32 = c->tensors[GATE]->dtype == ADZE_F32, table = c->tensors[GATE_TABLE]->dtype;
    if (gate_f32 && !table)
        gated_pieces(c, begin, end, dtype, ADZE_F32, 0);
    else if (gate_f32 && table == ADZE_F32)
        gated_pieces(c, begin, end, dtype, ADZE_F32, ADZE_F32);
    else if (gate_f32)
        gated_pieces(c, begin, end, dtype, ADZE_F32, dtype);
    else if (!table)
        gated_pieces(c, begin, end, dtype, dtype, 0);
    else if (table == ADZE_F32)
        gated_pieces(c, begin, end, dtype, dtype, ADZE_F32);
    else
        gated_pieces(c, begin, end, dtype, dtype, dtype);
}

static void body(void *context, int64_t begin, int64_t end)
{
    const gated_call *c = context;
    switch (c->tensors[X]->dtype) {
    case ADZE_F32: gated_range(c, begin, end, ADZE_F32); break;
    case ADZE_F16: gated_range(c, begin, end, ADZE_F16); break;
    default: gated_range(c, begin, end, ADZE_BF16); break;
    }
}

ADZE_CPU_KERNEL(gated_add)
{
    const adze_gated_add_args *a = args;
    gated_call c = {.tensors = {&a->x, &a->residual, &a->out, &a->gate, &a->gate_table},
                    .dim = a->x.shape[a->x.rank - 1],
                    .steps = a->rounding & ADZE_ROUND_STEPS};
    (void)stream;
    adze_rows_init(&c.rows, &a->x, TENSORS, c.tensors);
    c.stream = row_streams(&a->out, c.rows.count * c.dim);
    c.pieces = (c.dim + PIECE - 1) / PIECE;
    adze_parallel_for(c.rows.count * c.pieces, row_grain(c.dim < PIECE ? c.dim : PIECE), body, &c);
    return ADZE_OK;
}
