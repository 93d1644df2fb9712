/* rms_norm_i8 on the CPU: a row at a time, read three times. */
#include "cpu/row.h"

enum { X, OUT, SCALE, TENSORS };

typedef struct i8_call {
    const adze_tensor *tensors[TENSORS], *weight;
    adze_rows rows;
    int64_t dim;
    float eps;
} i8_call;

INLINE vf16 i8_value(const i8_call *c, const char *x, int dtype, int64_t i, int64_t n, float inverse)
{
    vf16 v = row_load_part(x, dtype, i, n);
    if (c->weight->dtype) {
        const vf16 w = c->weight->dtype == ADZE_F32 ? row_load_part(c->weight->data, ADZE_F32, i, n)
                                                    : row_load_part(c->weight->data, dtype, i, n);
        for (int p = 0; p < VF_PARTS; p++)
            v.part[p] = v.part[p] * vf_all(inverse) * w.part[p];
        return v;
    }
    for (int p = 0; p < VF_PARTS; p++)
        v.part[p] *= vf_all(inverse);
    return v;
}

INLINE void i8_range(const i8_call *c, int64_t begin, int64_t end, int dtype)
{
    const int64_t size = (int64_t)adze_dtype_size(dtype);
    for (int64_t row = begin; row < end; row++) {
        const char *x = (const char *)c->tensors[X]->data + adze_row_offset(&c->rows, X, row) * size;
        int8_t *out = (int8_t *)c->tensors[OUT]->data + adze_row_offset(&c->rows, OUT, row);
        vf16 squares = vf16_all(0);
        for (int64_t i = 0; i < c->dim; i += LANES) {
            const vf16 v = row_load_part(x, dtype, i, c->dim - i < LANES ? c->dim - i : LANES);
            for (int p = 0; p < VF_PARTS; p++)
                squares.part[p] += v.part[p] * v.part[p];
        }
        const float inverse = 1 / sqrtf(vf16_sum(squares) / (float)c->dim + c->eps);
        vf16 peak = vf16_all(0);
        for (int64_t i = 0; i < c->dim; i += LANES) {
            const vf16 v = i8_value(c, x, dtype, i, c->dim - i < LANES ? c->dim - i : LANES, inverse);
            for (int p = 0; p < VF_PARTS; p++)
                peak.part[p] = vf_max(peak.part[p], -vf_minus_abs(v.part[p]));
        }
        float lane[LANES], most = 0;
        memcpy(lane, &peak, sizeof lane);
        for (int l = 0; l < LANES; l++)
            most = fmaxf(most, lane[l]);
        const float scale = most / 127, by = most > 0 ? 127 / most : 0;
        for (int64_t i = 0; i < c->dim; i += LANES) {
            const int64_t n = c->dim - i < LANES ? c->dim - i : LANES;
            vf16 v = i8_value(c, x, dtype, i, n, inverse);
            /* beside 1.5 * 2^23 a float has no digits behind the point: the sum rounds to a whole number */
            for (int p = 0; p < VF_PARTS; p++)
                v.part[p] = (v.part[p] * vf_all(by) + vf_all(0x1.8p23f)) - vf_all(0x1.8p23f);
            memcpy(lane, &v, sizeof lane);
            if (n == LANES)
                for (int l = 0; l < LANES; l++)
                    out[i + l] = (int8_t)lane[l];
            else
                for (int64_t l = 0; l < n; l++)
                    out[i + l] = (int8_t)lane[l];
        }
        ((float *)c->tensors[SCALE]->data)[adze_row_offset(&c->rows, SCALE, row)] = scale;
    }
}

static void body(void *context, int64_t begin, int64_t end)
{
    const i8_call *c = context;
    switch (c->tensors[X]->dtype) {
    case ADZE_F32: i8_range(c, begin, end, ADZE_F32); break;
    case ADZE_F16: i8_range(c, begin, end, ADZE_F16); break;
    default: i8_range(c, begin, end, ADZE_BF16); break;
    }
}

ADZE_CPU_KERNEL(rms_norm_i8)
{
    const adze_rms_norm_i8_args *a = args;
    i8_call c = {.tensors = {&a->x, &a->out, &a->scale},
                 .weight = &a->weight,
                 .dim = a->x.shape[a->x.rank - 1],
                 .eps = a->eps};
    (void)stream;
    adze_rows_init(&c.rows, &a->x, TENSORS, c.tensors);
    adze_parallel_for(c.rows.count, row_grain(c.dim), body, &c);
    return ADZE_OK;
}
