/* rope_table on the CPU. The angle is reduced modulo pi / 2 in double; sine and cosine of the remainder are in
   float.

   The remainder is far more accurate than a float, so that its rounding to float costs half a unit. On [-pi/4, pi/4]
   the polynomials are off by less than 2^-28 of the result, their sums round to half a unit and inherit at most 0.3
   of one: in all, sine and cosine are within 1.25 units of the result, however close it is to zero. */
#include "cpu/row.h"
#include "sincos.h"

/* As many doubles as a register has floats. */
typedef double vd __attribute__((vector_size(128 / VF_PARTS)));
typedef int64_t vl __attribute__((vector_size(128 / VF_PARTS)));

enum { POS, COS, SIN, TABLE_TENSORS };
typedef struct table_call {
    const adze_rope_table_args *a;
    adze_rows rows;
    int64_t n;
    float scale;
    int stream;
} table_call;

INLINE double table_frequency(const adze_tensor *freq, int64_t i)
{
    return freq->dtype == ADZE_F64 ? ((const double *)freq->data)[i] : (double)((const float *)freq->data)[i];
}
INLINE double table_position(const adze_tensor *pos, int64_t at)
{
    switch (pos->dtype) {
    case ADZE_I32: return ((const int32_t *)pos->data)[at];
    case ADZE_I64: return (double)((const int64_t *)pos->data)[at];
    default: return (double)((const float *)pos->data)[at];
    }
}

/* Range reduction: the nearest multiples of pi / 2, and the remainders. */
INLINE void table_reduce(vd angle, vf *rest, vu *quarter)
{
    const double magic = 0x1.8p52; /* leaves the rounded quotient in the lowest bits */
    const vd sum = angle * SINCOS_QUARTERS + magic, k = sum - magic;
    const vd left = (((angle - k * SINCOS_PI_2A) - k * SINCOS_PI_2B) - k * SINCOS_PI_2C) - k * SINCOS_PI_2D;
    *rest = __builtin_convertvector(left, vf);
    *quarter = (vu) __builtin_convertvector((vl)sum, vi);
}

INLINE void table_sincos(vd angle, vf *cosine, vf *sine)
{
    vf r;
    vu q;
    table_reduce(angle, &r, &q);
    const vf magnitude = -vf_minus_abs(__builtin_convertvector(angle, vf));
    r = (vf)((vi)r | (magnitude > SINCOS_LIMIT)); /* all bits set are a NaN */
    const vf t = r * r;
    const vf s = r + (r * t) * (SINCOS_S0 + t * (SINCOS_S1 + t * SINCOS_S2));
    const vf c = 1 - (0.5f * t - (t * t) * (SINCOS_C0 + t * (SINCOS_C1 + t * SINCOS_C2)));
    const vi odd = (vi) - (q & 1);
    *sine = (vf)((vu)vf_select(odd, c, s) ^ ((q & 2) << 30));
    *cosine = (vf)((vu)vf_select(odd, s, c) ^ (((q + 1) & 2) << 30));
}

/* The m <= 16 frequencies from i on. */
INLINE void table_chunk(const table_call *c, const double *pos, int64_t i, int64_t m, vf16 *cosine, vf16 *sine)
{
    const adze_rope_table_args *a = c->a;
    const int32_t *axis = a->axis.dtype ? (const int32_t *)a->axis.data : NULL;
    double lane[LANES] = {0};
    vd angle;
    for (int64_t l = 0; l < m; l++)
        lane[l] = pos[axis ? axis[i + l] : 0] * table_frequency(&a->freq, i + l);
    for (int p = 0; p < VF_PARTS; p++) {
        memcpy(&angle, lane + p * VF_WIDTH, sizeof angle);
        if (!a->double_angle)
            angle = __builtin_convertvector(__builtin_convertvector(angle, vf), vd);
        table_sincos(angle, &cosine->part[p], &sine->part[p]);
        cosine->part[p] *= c->scale;
        sine->part[p] *= c->scale;
    }
}

INLINE void table_store(const table_call *c, void *row, int dtype, int64_t i, vf16 v, int64_t m)
{
    if (c->a->columns != ADZE_TABLE_PAIRS) {
        row_store_part(row, dtype, i, v, m, c->stream);
        if (c->a->columns == ADZE_TABLE_HALVES)
            row_store_part(row, dtype, c->n + i, v, m, c->stream);
        return;
    }
    row_store_part(row, dtype, 2 * i, vf16_twice(v, 0), m < LANES / 2 ? 2 * m : LANES, c->stream);
    if (m > LANES / 2)
        row_store_part(row, dtype, 2 * i + LANES, vf16_twice(v, 1), 2 * m - LANES, c->stream);
}

INLINE void table_rows(const table_call *c, int64_t begin, int64_t end, int dtype)
{
    const adze_rope_table_args *a = c->a;
    const int64_t size = adze_float_size(dtype), axes = a->pos.shape[a->pos.rank - 1];
    for (int64_t row = begin; row < end; row++) {
        double pos[4] = {0};
        for (int64_t d = 0; d < axes; d++)
            pos[d] = table_position(&a->pos, adze_row_offset(&c->rows, POS, row) + d);
        char *cos_row = (char *)a->cos.data + adze_row_offset(&c->rows, COS, row) * size;
        char *sin_row = (char *)a->sin.data + adze_row_offset(&c->rows, SIN, row) * size;
        for (int64_t i = 0; i < c->n; i += LANES) {
            const int64_t m = c->n - i < LANES ? c->n - i : LANES;
            vf16 cosine, sine;
            table_chunk(c, pos, i, m, &cosine, &sine);
            table_store(c, cos_row, dtype, i, cosine, m);
            table_store(c, sin_row, dtype, i, sine, m);
        }
    }
    if (c->stream)
        row_stream_end();
}

static void body(void *context, int64_t begin, int64_t end)
{
    const table_call *c = context;
    switch (c->a->cos.dtype) {
    case ADZE_F32: table_rows(c, begin, end, ADZE_F32); break;
    case ADZE_F16: table_rows(c, begin, end, ADZE_F16); break;
    default: table_rows(c, begin, end, ADZE_BF16); break;
    }
}

ADZE_CPU_KERNEL(rope_table)
{
    (void)stream;
    const adze_rope_table_args *a = args;
    const adze_tensor *const tensors[TABLE_TENSORS] = {&a->pos, &a->cos, &a->sin};
    table_call c = {.a = a, .n = a->freq.shape[0], .scale = a->scale != 0 ? a->scale : 1};
    const int64_t axes = a->pos.shape[a->pos.rank - 1];
    for (int64_t i = 0; a->axis.dtype && i < c.n; i++) {
        const int32_t axis = ((const int32_t *)a->axis.data)[i];
        ADZE_REQUIRE(axis >= 0 && axis < axes, ADZE_BAD_ARG, "rope_table: axis[%lld] is %d, pos has axes 0 to %lld",
                     (long long)i, axis, (long long)(axes - 1));
    }
    adze_rows_init(&c.rows, &a->pos, TABLE_TENSORS, tensors);
    c.stream =
        c.n % LANES == 0 && row_streams(&a->cos, adze_count(&a->cos)) && row_streams(&a->sin, adze_count(&a->sin));
    adze_parallel_for(c.n ? c.rows.count : 0, row_grain(16 * c.n), body, &c);
    return ADZE_OK;
}
