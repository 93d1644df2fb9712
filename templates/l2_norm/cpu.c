/* l2_norm on the CPU: a row at a time, read twice. */
#include "cpu/row.h"

enum { X, OUT, NORM, TENSORS };

typedef struct l2_call {
    const adze_tensor *tensors[TENSORS];
    adze_rows rows;
    int64_t dim;
    float eps;
} l2_call;

INLINE void l2_range(const l2_call *c, int64_t begin, int64_t end, int dtype)
{
    const int64_t size = (int64_t)adze_dtype_size(dtype);
    for (int64_t row = begin; row < end; row++) {
        const char *x = (const char *)c->tensors[X]->data + adze_row_offset(&c->rows, X, row) * size;
        char *out = (char *)c->tensors[OUT]->data + adze_row_offset(&c->rows, OUT, row) * size;
        vf16 squares[2] = {vf16_all(0), vf16_all(0)}; /* two chains of additions run at the same time */
        for (int64_t i = 0; i < c->dim; i += LANES) {
            const vf16 v = row_load_part(x, dtype, i, c->dim - i < LANES ? c->dim - i : LANES);
            for (int p = 0; p < VF_PARTS; p++)
                squares[i / LANES % 2].part[p] += v.part[p] * v.part[p];
        }
        for (int p = 0; p < VF_PARTS; p++)
            squares[0].part[p] += squares[1].part[p];
        const float norm = sqrtf(vf16_sum(squares[0]) + c->eps), inverse = 1 / norm;
        for (int64_t i = 0; i < c->dim; i += LANES) {
            const int64_t n = c->dim - i < LANES ? c->dim - i : LANES;
            vf16 v = row_load_part(x, dtype, i, n);
            for (int p = 0; p < VF_PARTS; p++)
                v.part[p] *= vf_all(inverse);
            row_store_part(out, dtype, i, v, n, 0);
        }
        if (c->tensors[NORM]->dtype)
            ((float *)c->tensors[NORM]->data)[adze_row_offset(&c->rows, NORM, row)] = norm;
    }
}

static void body(void *context, int64_t begin, int64_t end)
{
    const l2_call *c = context;
    switch (c->tensors[X]->dtype) {
    case ADZE_F32: l2_range(c, begin, end, ADZE_F32); break;
    case ADZE_F16: l2_range(c, begin, end, ADZE_F16); break;
    default: l2_range(c, begin, end, ADZE_BF16); break;
    }
}

ADZE_CPU_KERNEL(l2_norm)
{
    const adze_l2_norm_args *a = args;
    l2_call c = {.tensors = {&a->x, &a->out, &a->norm}, .dim = a->x.shape[a->x.rank - 1], .eps = a->eps};
    (void)stream;
    adze_rows_init(&c.rows, &a->x, TENSORS, c.tensors);
    adze_parallel_for(c.rows.count, row_grain(c.dim), body, &c);
    return ADZE_OK;
}
