/* gated_add on the CPU, in one pass. Rows are cut into pieces of PIECE elements, which are distributed over threads.
   Gate + table is computed in float first, once for consecutive pieces that share both. */
#include "cpu/row.h"

enum { X, RESIDUAL, OUT, GATE, GATE_TABLE, TENSORS, PIECE = 4096 };

typedef struct gated_call {
    const adze_tensor *tensors[TENSORS]; /* the table may be absent */
    adze_rows rows;
    int64_t dim, pieces; /* pieces of a row */
    int steps, stream;
} gated_call;

/* The product is rounded to float before the sum, as in the norms: it must not be contracted to an FMA. */
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

typedef struct gated_sum { /* gate + table, and its source */
    const char *gate, *table;
    float floats[PIECE] __attribute__((aligned(64)));
} gated_sum;

INLINE vf16 gated_load(const adze_tensor *t, const char *data, int64_t i, int64_t n, int dtype)
{
    return t->dtype == ADZE_F32 ? row_load_part(data, ADZE_F32, i, n) : row_load_part(data, dtype, i, n);
}
INLINE void gated_make(const gated_call *c, gated_sum *sum, const char *gate, const char *table, int64_t n, int dtype)
{
    if (sum->gate == gate && sum->table == table)
        return;
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t left = n - i < LANES ? n - i : LANES;
        vf16 y = gated_load(c->tensors[GATE], gate, i, left, dtype);
        const vf16 more = gated_load(c->tensors[GATE_TABLE], table, i, left, dtype);
        for (int p = 0; p < VF_PARTS; p++)
            y.part[p] += more.part[p];
        row_store(sum->floats, ADZE_F32, i, c->steps ? row_round(dtype, y) : y);
    }
    sum->gate = gate;
    sum->table = table;
}

/* n <= 16 elements from i on. */
INLINE void gated_lanes(const gated_call *c, char *const *data, const char *gate, int64_t i, int64_t n, int dtype,
                        int gate_dtype)
{
    const vf16 x = row_load_part(data[X], dtype, i, n), residual = row_load_part(data[RESIDUAL], dtype, i, n);
    vf16 y = row_load_part(gate, gate_dtype, i, n);
    for (int p = 0; p < VF_PARTS; p++)
        y.part[p] *= x.part[p];
    y = c->steps ? row_round(dtype, y) : uncontracted(y);
    for (int p = 0; p < VF_PARTS; p++)
        y.part[p] += residual.part[p];
    row_store_part(data[OUT], dtype, i, y, n, c->stream);
}
INLINE void gated_piece(const gated_call *c, char *const *data, const char *gate, int64_t n, int dtype,
                        int gate_dtype)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        gated_lanes(c, data, gate, i, LANES, dtype, gate_dtype);
    if (i < n)
        gated_lanes(c, data, gate, i, n - i, dtype, gate_dtype);
}

INLINE void gated_range(const gated_call *c, int64_t begin, int64_t end, int dtype)
{
    const int table = c->tensors[GATE_TABLE]->dtype != ADZE_NONE;
    gated_sum sum;
    sum.gate = sum.table = NULL;
    char *data[TENSORS] = {NULL};
    int64_t stride[TENSORS];
    for (int t = 0; t < TENSORS; t++)
        stride[t] = adze_row_stride(&c->rows, t) * adze_float_size(c->tensors[t]->dtype);
    for (int64_t unit = begin, run = 0; unit < end; unit++, run--) {
        const int64_t row = c->pieces == 1 ? unit : unit / c->pieces, at = (unit - row * c->pieces) * PIECE;
        const int64_t n = c->dim - at < PIECE ? c->dim - at : PIECE;
        for (int t = 0; t < (table ? TENSORS : GATE_TABLE) && run == 0; t++)
            data[t] = (char *)c->tensors[t]->data +
                      (adze_row_offset(&c->rows, t, row) + at) * adze_float_size(c->tensors[t]->dtype);
        if (run == 0)
            run = c->pieces == 1 ? adze_rows_run(&c->rows, row) : 1;
        if (table)
            gated_make(c, &sum, data[GATE], data[GATE_TABLE], n, dtype);
        const char *gate = table ? (const char *)sum.floats : data[GATE];
        if (table || c->tensors[GATE]->dtype == ADZE_F32)
            gated_piece(c, data, gate, n, dtype, ADZE_F32);
        else
            gated_piece(c, data, gate, n, dtype, dtype);
        UNROLLED
        for (int t = 0; t < TENSORS; t++)
            if (run > 1 && (t != GATE_TABLE || table))
                data[t] += stride[t];
    }
    if (c->stream)
        row_stream_end();
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
