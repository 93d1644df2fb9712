/* tensor.c - dtypes, elements as double, rows of views, and the contracts that many ops share. */
#include "kernel.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct format {
    const char *name;
    int bits;        /* of an element */
    double smallest; /* normal number */
    double spacing;  /* from 1 to the next number; 0: an integer dtype */
    double max;
} format;

static const format formats[] = {
    [ADZE_NONE] = {"none", 0, 0, 0, 0},
    [ADZE_F32] = {"f32", 32, 0x1p-126, 0x1p-23, 0x1.fffffep127},
    [ADZE_F16] = {"f16", 16, 0x1p-14, 0x1p-10, 65504},
    [ADZE_BF16] = {"bf16", 16, 0x1p-126, 0x1p-7, 0x1.fep127},
    [ADZE_F8E4M3] = {"f8e4m3", 8, 0x1p-6, 0x1p-3, 448},
    [ADZE_I8] = {"i8", 8, 0, 0, 127},
    [ADZE_I4] = {"i4", 4, 0, 0, 7},
    [ADZE_I32] = {"i32", 32, 0, 0, 0x7fffffff},
    [ADZE_I64] = {"i64", 64, 0, 0, 0x1p62},
    [ADZE_BOOL] = {"bool", 8, 0, 0, 1},
    [ADZE_F64] = {"f64", 64, 0x1p-1022, 0x1p-52, 0x1.fffffffffffffp1023},
    [ADZE_U8] = {"u8", 8, 0, 0, 255},
};

static const format *format_of(int dtype)
{
    return &formats[dtype > 0 && dtype < (int)(sizeof formats / sizeof *formats) ? dtype : 0];
}

size_t adze_dtype_size(int dtype)
{
    return (size_t)format_of(dtype)->bits / 8;
}

const char *adze_dtype_name(int dtype)
{
    return format_of(dtype)->name;
}

int64_t adze_count(const adze_tensor *t)
{
    int64_t count = 1;
    for (int d = 0; d < t->rank; d++)
        count *= t->shape[d];
    return count;
}

static uint64_t bits_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

double adze_dtype_ulp(int dtype, double value)
{
    const format *f = format_of(dtype);
    if (f->spacing == 0)
        return 1;
    const uint64_t exponent = bits_of(isfinite(value) ? value : 0.5) & 0x7ff0000000000000;
    double power; /* of two, the largest in |value| */
    memcpy(&power, &exponent, sizeof power);
    return (power > f->smallest ? power : f->smallest) * f->spacing;
}

double adze_round_to(int dtype, double value)
{
    const format *f = format_of(dtype);
    if (dtype == ADZE_F64 || !isfinite(value))
        return value;
    /* A sum with 2^52 ulp is rounded to whole ulp, which is faster than a quotient where it is emulated. */
    const double ulp = adze_dtype_ulp(dtype, value), whole = 0x1p52 * ulp, a = fabs(value);
    const double rounded = copysign(a < whole ? a + whole - whole : a, value);
    if (fabs(rounded) <= f->max)
        return rounded;
    return copysign(f->spacing == 0 ? f->max : INFINITY, value);
}

/* Half-width floats by their bits: both halves of the pair are exact. */
static double get_f16(uint16_t h)
{
    const int exponent = (h >> 10) & 31, fraction = h & 1023;
    const double sign = h & 0x8000 ? -1 : 1;
    if (exponent == 31)
        return fraction ? NAN : sign * INFINITY;
    return sign * (exponent ? (double)((int64_t)(1024 + fraction) << exponent) * 0x1p-25 : fraction * 0x1p-24);
}

static uint16_t put_f16(double value)
{
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    if (isnan(value))
        return sign | 0x7e00;
    const double a = fabs(adze_round_to(ADZE_F16, value));
    if (isinf(a))
        return sign | 0x7c00;
    if (a < 0x1p-14)
        return (uint16_t)(sign | (int)(a * 0x1p24));
    return (uint16_t)(sign | ((bits_of(a) >> 42) - ((1023 - 15) << 10)));
}

static double get_f8(uint8_t h)
{
    const int exponent = (h >> 3) & 15, fraction = h & 7;
    const double a = (h & 127) == 127 ? NAN : exponent ? ldexp(8 + fraction, exponent - 10) : fraction * 0x1p-9;
    return h & 128 ? -a : a;
}

static uint8_t put_f8(double value)
{
    const int sign = signbit(value) ? 128 : 0;
    const double a = fabs(adze_round_to(ADZE_F8E4M3, value));
    if (!(a <= 448))
        return (uint8_t)(sign | 127);
    if (a < 0x1p-6)
        return (uint8_t)(sign | (int)(a * 0x1p9));
    int exponent; /* a = fraction * 2^exponent, fraction from 0.5 to 1 */
    const double fraction = frexp(a, &exponent);
    return (uint8_t)(sign | (exponent + 6) << 3 | ((int)(fraction * 16) - 8));
}

double adze_get(const adze_tensor *t, int64_t at)
{
    switch (t->dtype) {
    case ADZE_F32: return ((const float *)t->data)[at];
    case ADZE_F64: return ((const double *)t->data)[at];
    case ADZE_I32: return ((const int32_t *)t->data)[at];
    case ADZE_I64: return (double)((const int64_t *)t->data)[at];
    case ADZE_F16: return get_f16(((const uint16_t *)t->data)[at]);
    case ADZE_BF16: {
        const uint32_t bits = (uint32_t)((const uint16_t *)t->data)[at] << 16;
        float f;
        memcpy(&f, &bits, sizeof f);
        return f;
    }
    case ADZE_F8E4M3: return get_f8(((const uint8_t *)t->data)[at]);
    case ADZE_U8: return ((const uint8_t *)t->data)[at];
    default: return adze_dtype_size(t->dtype) ? ((const int8_t *)t->data)[at] : 0;
    }
}

void adze_put(const adze_tensor *t, int64_t at, double value)
{
    switch (t->dtype) {
    case ADZE_F32: ((float *)t->data)[at] = (float)value; break;
    case ADZE_F64: ((double *)t->data)[at] = value; break;
    case ADZE_I32: ((int32_t *)t->data)[at] = (int32_t)value; break;
    case ADZE_I64: ((int64_t *)t->data)[at] = (int64_t)value; break;
    case ADZE_F16: ((uint16_t *)t->data)[at] = put_f16(value); break;
    case ADZE_BF16: {
        const float f = (float)adze_round_to(ADZE_BF16, value);
        uint32_t bits;
        memcpy(&bits, &f, sizeof bits);
        ((uint16_t *)t->data)[at] = (uint16_t)(bits >> 16);
        break;
    }
    case ADZE_F8E4M3: ((uint8_t *)t->data)[at] = put_f8(value); break;
    case ADZE_U8: ((uint8_t *)t->data)[at] = (uint8_t)value; break;
    default: /* a dtype without a size has no elements to write */
        if (adze_dtype_size(t->dtype))
            ((int8_t *)t->data)[at] = (int8_t)value;
        break;
    }
}

void adze_like(adze_tensor *out, const adze_tensor *in)
{
    out->rank = in->rank;
    out->dtype = in->dtype;
    memcpy(out->shape, in->shape, sizeof out->shape);
}

/* Whether indices of a dimension and of the next inner one are evenly spaced. Strides of an empty view may be any
   numbers: their product may wrap. */
static inline int follows(int64_t stride, int64_t inner_size, int64_t inner_stride)
{
    return (uint64_t)stride == (uint64_t)inner_size * (uint64_t)inner_stride;
}

void adze_merge(int n, adze_tensor *const *tensors, int first)
{
    const int last = tensors[0]->rank - 1;
    for (int i = 0; i < n; i++)
        if (tensors[i]->shape[last] == 1)
            tensors[i]->stride[last] = 1;
    for (int d = last - 1; d >= first; d--) {
        int merges = 1;
        for (int i = 0; i < n; i++) {
            const adze_tensor *t = tensors[i];
            merges = merges && (t->shape[d] == 1 || follows(t->stride[d], t->shape[d + 1], t->stride[d + 1]));
        }
        for (int i = 0; i < n && merges; i++) {
            adze_tensor *t = tensors[i];
            t->shape[d] *= t->shape[d + 1];
            t->stride[d] = t->stride[d + 1];
            for (int e = d + 1; e < t->rank - 1; e++)
                t->shape[e] = t->shape[e + 1], t->stride[e] = t->stride[e + 1];
            t->rank--;
        }
    }
}

/* The stride of t over dimension d of x, to which it is broadcast; `missing` dimensions of x are not t's. */
static inline int64_t broadcast_stride(const adze_tensor *t, int missing, int d)
{
    return t->dtype == ADZE_NONE || d < missing || t->shape[d - missing] == 1 ? 0 : t->stride[d - missing];
}

void adze_rows_init(adze_rows *rows, const adze_tensor *x, int n, const adze_tensor *const *tensors)
{
    memset(rows, 0, sizeof *rows);
    const int x_rank = x->rank;
    int64_t count = 1;
    int rank = 0;
    for (int d = 0; d < x_rank - 1; d++) {
        const int64_t size = x->shape[d];
        count *= size;
        if (size == 1)
            continue;
        int merges = rank > 0;
        for (int i = 0; i < n && merges; i++)
            merges =
                follows(rows->stride[i][rank - 1], size, broadcast_stride(tensors[i], x_rank - tensors[i]->rank, d));
        if (merges)
            rows->size[rank - 1] *= size;
        else
            rows->size[rank++] = size;
        for (int i = 0; i < n; i++)
            rows->stride[i][rank - 1] = broadcast_stride(tensors[i], x_rank - tensors[i]->rank, d);
    }
    if (rank == 0)
        rows->size[rank++] = 1;
    rows->rank = rank;
    rows->count = count;
}

adze_status adze_check_float(const char *op, const char *name, const adze_tensor *t)
{
    ADZE_REQUIRE(t->dtype == ADZE_F32 || t->dtype == ADZE_F16 || t->dtype == ADZE_BF16, ADZE_BAD_DTYPE,
                 "%s: %s is %s, it must be f32, f16 or bf16", op, name, adze_dtype_name(t->dtype));
    return ADZE_OK;
}

adze_status adze_check_rows(const char *op, const char *name, const adze_tensor *t)
{
    if (t->dtype == ADZE_NONE)
        return ADZE_OK;
    ADZE_REQUIRE(t->rank >= 1, ADZE_BAD_ARG, "%s: %s has rank 0, it must be 1 to 5", op, name);
    const int last = t->rank - 1;
    ADZE_REQUIRE(t->stride[last] == 1 || t->shape[last] <= 1, ADZE_BAD_ARG,
                 "%s: %s has stride %lld in its last dimension, it must be 1", op, name, (long long)t->stride[last]);
    return ADZE_OK;
}

adze_status adze_check_like(const char *op, const char *name, const adze_tensor *t, const adze_tensor *x)
{
    if (t->dtype == ADZE_NONE)
        return ADZE_OK;
    ADZE_REQUIRE(t->dtype == x->dtype, ADZE_BAD_DTYPE, "%s: %s is %s, x is %s", op, name, adze_dtype_name(t->dtype),
                 adze_dtype_name(x->dtype));
    ADZE_REQUIRE(t->rank == x->rank, ADZE_BAD_ARG, "%s: %s has rank %d, x has %d", op, name, t->rank, x->rank);
    for (int d = 0; d < x->rank; d++)
        ADZE_REQUIRE(t->shape[d] == x->shape[d], ADZE_BAD_ARG, "%s: %s has %lld in dimension %d, x has %lld", op,
                     name, (long long)t->shape[d], d, (long long)x->shape[d]);
    return adze_check_rows(op, name, t);
}

static adze_status check_param_dtype(const char *op, const char *name, const adze_tensor *t, const adze_tensor *x)
{
    ADZE_REQUIRE(t->dtype == x->dtype || t->dtype == ADZE_F32, ADZE_BAD_DTYPE,
                 "%s: %s is %s, it must be f32 or x's %s", op, name, adze_dtype_name(t->dtype),
                 adze_dtype_name(x->dtype));
    return ADZE_OK;
}

__attribute__((noinline)) static adze_status check_given_to(const char *op, const char *name, const adze_tensor *t,
                                                            const adze_tensor *x)
{
    ADZE_CHECK(check_param_dtype(op, name, t, x));
    ADZE_REQUIRE(t->rank >= 1 && t->rank <= x->rank, ADZE_BAD_ARG, "%s: %s has rank %d, x has %d", op, name, t->rank,
                 x->rank);
    for (int d = 0; d < t->rank; d++) {
        const int64_t due = x->shape[d + x->rank - t->rank];
        ADZE_REQUIRE(t->shape[d] == due || (d < t->rank - 1 && t->shape[d] == 1), ADZE_BAD_ARG,
                     "%s: %s has %lld in dimension %d, it must have %lld%s", op, name, (long long)t->shape[d], d,
                     (long long)due, d < t->rank - 1 ? " or 1" : "");
    }
    return adze_check_rows(op, name, t);
}

adze_status adze_check_to(const char *op, const char *name, const adze_tensor *t, const adze_tensor *x)
{
    return t->dtype == ADZE_NONE ? ADZE_OK : check_given_to(op, name, t, x);
}

adze_status adze_check_param(const char *op, const char *name, const adze_tensor *t, const adze_tensor *x,
                             int64_t count)
{
    if (t->dtype == ADZE_NONE)
        return ADZE_OK;
    ADZE_CHECK(check_param_dtype(op, name, t, x));
    ADZE_REQUIRE(t->rank == 1, ADZE_BAD_ARG, "%s: %s has rank %d, it must be 1", op, name, t->rank);
    ADZE_REQUIRE(t->shape[0] == count, ADZE_BAD_ARG, "%s: %s has %lld elements, it must have %lld", op, name,
                 (long long)t->shape[0], (long long)count);
    return adze_check_rows(op, name, t);
}

__attribute__((cold, noinline)) static adze_status refuse_bits(const char *op, const char *name, int32_t value,
                                                               int32_t allowed)
{
    char bits[96] = "";
    for (int bit = 0, n = 0; bit < 31 && n < (int)sizeof bits; bit++)
        if (allowed >> bit & 1)
            n += snprintf(bits + n, sizeof bits - (size_t)n, "%s%d", n ? ", " : "", 1 << bit);
    return adze_fail(ADZE_BAD_ARG, "%s: %s is %d, it must be 0 or a sum of %s", op, name, value, bits);
}

adze_status adze_check_bits(const char *op, const char *name, int32_t value, int32_t allowed)
{
    return (value & ~allowed) == 0 ? ADZE_OK : refuse_bits(op, name, value, allowed);
}

adze_status adze_check_range(const char *op, const char *name, int32_t value, int32_t low, int32_t high)
{
    ADZE_REQUIRE(value >= low && value <= high, ADZE_BAD_ARG, "%s: %s is %d, it must be %d to %d", op, name, value,
                 low, high);
    return ADZE_OK;
}
