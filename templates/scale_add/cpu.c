/* scale_add on the CPU: a row at a time. */
#include "cpu/row.h"

enum { X, Y, OUT, TENSORS };

typedef struct scale_call {
    const adze_tensor *tensors[TENSORS];
    adze_rows rows;
    int64_t dim;
    float a;
} scale_call;

INLINE void scale_range(const scale_call *c, int64_t begin, int64_t end, int dtype)
{
    for (int64_t row = begin; row < end; row++) {
        char *data[TENSORS];
        for (int t = 0; t < TENSORS; t++)
            data[t] = (char *)c->tensors[t]->data +
                      adze_row_offset(&c->rows, t, row) * (int64_t)adze_dtype_size(c->tensors[t]->dtype);
        for (int64_t i = 0; i < c->dim; i += LANES) {
            const int64_t n = c->dim - i < LANES ? c->dim - i : LANES;
            vf16 v = row_load_part(data[X], dtype, i, n);
            const vf16 y = row_load_part(data[Y], dtype, i, n);
            for (int p = 0; p < VF_PARTS; p++)
                v.part[p] = vf_all(c->a) * v.part[p] + y.part[p];
            row_store_part(data[OUT], dtype, i, v, n, 0);
        }
    }
}

static void body(void *context, int64_t begin, int64_t end)
{
    const scale_call *c = context;
    switch (c->tensors[X]->dtype) {
    case ADZE_F32: scale_range(c, begin, end, ADZE_F32); break;
    case ADZE_F16: scale_range(c, begin, end, ADZE_F16); break;
    default: scale_range(c, begin, end, ADZE_BF16); break;
    }
}

ADZE_CPU_KERNEL(scale_add)
{
    const adze_scale_add_args *a = args;
    scale_call c = {.tensors = {&a->x, &a->y, &a->out}, .dim = a->x.shape[a->x.rank - 1], .a = a->a};
    (void)stream;
    adze_rows_init(&c.rows, &a->x, TENSORS, c.tensors);
    adze_parallel_for(c.rows.count, row_grain(c.dim), body, &c);
    return ADZE_OK;
}
