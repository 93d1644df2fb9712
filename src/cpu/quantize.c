/* quantize on the CPU. Threads take rows, or blocks of 128 rows; each group is read for its range, then again, from
   the cache, to be divided. */
#include "cpu/stored.h"

#include <stdatomic.h>

enum { X, OUT, QUANTIZE_TENSORS, GROUP_ROWS = 128 };

typedef struct quantize_call {
    const adze_quantize_args *a;
    adze_rows rows;
    int64_t k, group, columns; /* groups of a row */
    _Atomic uint32_t most;     /* the bits of the largest |x|, for one scale */
    float whole;               /* that scale */
} quantize_call;

typedef struct range {
    vf16 low, high; /* low <= 0 <= high in each lane */
} range;

INLINE vf16 x_load(const void *x, int dtype, int64_t i, int64_t n)
{
    switch (dtype) {
    case ADZE_F32: return row_load_part(x, ADZE_F32, i, n);
    case ADZE_F16: return row_load_part(x, ADZE_F16, i, n);
    default: return row_load_part(x, ADZE_BF16, i, n);
    }
}
INLINE const char *x_row(const quantize_call *c, int64_t row)
{
    return (const char *)c->a->x.data + adze_row_offset(&c->rows, X, row) * (c->a->x.dtype == ADZE_F32 ? 4 : 2);
}

/* Lanes that a part leaves out are 0, which is in every range. */
INLINE void range_widen(range *r, const char *x, int dtype, int64_t from, int64_t to)
{
    for (int64_t i = from; i < to; i += LANES) {
        const vf16 v = x_load(x, dtype, i, to - i < LANES ? to - i : LANES);
        for (int p = 0; p < VF_PARTS; p++) {
            r->high.part[p] = vf_max(r->high.part[p], v.part[p]);
            r->low.part[p] = -vf_max(-r->low.part[p], -v.part[p]);
        }
    }
}
INLINE float range_high(const range *r)
{
    return vf16_max_lane(r->high);
}
INLINE float range_minus_low(const range *r)
{
    return vf16_max_lane(vf16_sub(vf16_all(0), r->low));
}

static float scale_rounded(const quantize_call *c, float scale)
{
    char one[2 * LANES];
    switch (c->a->scale_dtype) {
    case ADZE_F16: row_store(one, ADZE_F16, 0, vf16_all(scale)); return row_load(one, ADZE_F16, 0).part[0][0];
    case ADZE_BF16: row_store(one, ADZE_BF16, 0, vf16_all(scale)); return row_load(one, ADZE_BF16, 0).part[0][0];
    default: return scale;
    }
}
static float scale_of(const quantize_call *c, float high, float minus_low)
{
    const float most = minus_low > high ? minus_low : high;
    if (c->a->zero_points)
        return scale_rounded(c, (high + minus_low) / 15);
    return scale_rounded(c, most / (c->a->dtype == ADZE_I8 ? 127.0f : c->a->dtype == ADZE_F8E4M3 ? 448.0f : 7.0f));
}

/* Elements from..to of a row; of 4 bits `from` is even. */
INLINE void quantize_part(const quantize_call *c, const char *x, uint8_t *out, int64_t from, int64_t to, float scale,
                          float zero, int dtype)
{
    const float low = dtype == ADZE_I8 ? -127 : c->a->zero_points ? 0 : 1, high = dtype == ADZE_I8 ? 127 : 15;
    for (int64_t i = from; i < to; i += LANES) {
        const int64_t n = to - i < LANES ? to - i : LANES;
        vf16 v = x_load(x, c->a->x.dtype, i, n);
        int32_t lane[LANES];
        for (int p = 0; p < VF_PARTS; p++) {
            const vf q = scale == 0 ? vf_all(0) : v.part[p] / scale;
            const vi bits = dtype == ADZE_F8E4M3
                                ? f8_bits(q)
                                : __builtin_convertvector(
                                      vf_between(vf_nearest(vf_between(q, -0x1p20f, 0x1p20f)) + zero, low, high), vi);
            memcpy(lane + p * VF_WIDTH, &bits, sizeof bits);
        }
        for (int64_t j = 0; j < n && dtype != ADZE_U8; j++)
            out[i + j] = (uint8_t)lane[j];
        for (int64_t j = 0; j < n && dtype == ADZE_U8; j += 2)
            out[(i + j) / 2] = (uint8_t)(lane[j] | (j + 1 < n ? lane[j + 1] << 4 : 0));
    }
}
NO_INLINE void quantize_any(const quantize_call *c, const char *x, uint8_t *out, int64_t from, int64_t to,
                            float scale, float zero)
{
    switch (c->a->dtype) {
    case ADZE_I8: quantize_part(c, x, out, from, to, scale, zero, ADZE_I8); break;
    case ADZE_F8E4M3: quantize_part(c, x, out, from, to, scale, zero, ADZE_F8E4M3); break;
    default: quantize_part(c, x, out, from, to, scale, zero, ADZE_U8); break;
    }
}

/* The place of an element of scale and zero: their last dimension is that of the groups of a row, if there are any.
 */
static int64_t place(const adze_tensor *t, int64_t index)
{
    int64_t at = 0;
    for (int d = t->rank - 1; d >= 0; d--) {
        at += index % t->shape[d] * t->stride[d];
        index /= t->shape[d];
    }
    return at;
}

static void put_scale(const quantize_call *c, int64_t index, float scale, float zero)
{
    const adze_tensor *t = &c->a->scale;
    char one[4 * LANES];
    const int64_t at = place(t, index);
    if (t->dtype == ADZE_F32)
        ((float *)t->data)[at] = scale;
    else {
        row_store(one, t->dtype, 0, vf16_all(scale));
        memcpy((uint16_t *)t->data + at, one, 2);
    }
    if (c->a->zero_points)
        ((uint8_t *)c->a->zero.data)[place(&c->a->zero, index)] = (uint8_t)zero;
}

/* The groups of `count` rows from `row` on, each group as high as all of them. */
static void quantize_rows(const quantize_call *c, int64_t row, int64_t count, int64_t index)
{
    for (int64_t g = 0; g < c->columns; g++) {
        const int64_t from = g * c->group, to = from + c->group < c->k ? from + c->group : c->k;
        range r = {vf16_all(0), vf16_all(0)};
        for (int64_t i = 0; i < count && c->a->group_rows != -1; i++)
            range_widen(&r, x_row(c, row + i), c->a->x.dtype, from, to);
        const float high = range_high(&r), minus_low = range_minus_low(&r);
        const float scale = c->a->group_rows == -1 ? c->whole : scale_of(c, high, minus_low);
        float zero = c->a->dtype == ADZE_U8 ? 8 : 0;
        if (c->a->zero_points)
            zero = scale == 0 ? 0 : vf_between(vf_nearest(vf_between(vf_all(minus_low) / scale, 0, 16)), 0, 15)[0];
        for (int64_t i = 0; i < count; i++)
            quantize_any(c, x_row(c, row + i), (uint8_t *)c->a->out.data + adze_row_offset(&c->rows, OUT, row + i),
                         from, to, scale, zero);
        if (c->a->group_rows != -1)
            put_scale(c, index * c->columns + g, scale, zero);
    }
}

static void body(void *context, int64_t begin, int64_t end)
{
    const quantize_call *c = context;
    const int64_t rows = c->a->group_rows == GROUP_ROWS ? GROUP_ROWS : 1;
    for (int64_t b = begin; b < end; b++) {
        const int64_t left = c->rows.count - b * rows;
        quantize_rows(c, b * rows, left < rows ? left : rows, b);
    }
}

/* The largest |x| of all; bits of positive floats are in the order of the floats. */
static void most_body(void *context, int64_t begin, int64_t end)
{
    quantize_call *c = context;
    range r = {vf16_all(0), vf16_all(0)};
    for (int64_t i = begin; i < end; i++)
        range_widen(&r, x_row(c, i), c->a->x.dtype, 0, c->k);
    const float high = range_high(&r), minus_low = range_minus_low(&r), most = high > minus_low ? high : minus_low;
    uint32_t bits, seen = c->most;
    memcpy(&bits, &most, sizeof bits);
    while (bits > seen && !atomic_compare_exchange_weak(&c->most, &seen, bits))
        ;
}

ADZE_CPU_KERNEL(quantize)
{
    const adze_quantize_args *a = args;
    const adze_tensor *const tensors[QUANTIZE_TENSORS] = {&a->x, &a->out};
    quantize_call c = {.a = a, .k = a->x.shape[a->x.rank - 1]};
    (void)stream;
    adze_rows_init(&c.rows, &a->x, QUANTIZE_TENSORS, tensors);
    c.group = a->group ? a->group : c.k > 0 ? c.k : 1;
    c.columns = a->group ? (c.k + c.group - 1) / c.group : 1;
    if (a->group_rows == -1) {
        adze_parallel_for(c.rows.count, row_grain(c.k), most_body, &c);
        float most;
        const uint32_t bits = c.most;
        memcpy(&most, &bits, sizeof most);
        c.whole = scale_of(&c, most, 0);
        put_scale(&c, 0, c.whole, 0);
    }
    const int64_t rows = a->group_rows == GROUP_ROWS ? GROUP_ROWS : 1;
    adze_parallel_for(c.columns ? (c.rows.count + rows - 1) / rows : 0, row_grain(c.k * rows), body, &c);
    return ADZE_OK;
}
