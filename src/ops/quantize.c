/* quantize: the contract, the definition, and the kernels. */
#include "ops/quantised.h"

static const adze_field fields[] = {
    ADZE_OUTPUT(quantize, ADZE_OUT, out, 0, 0, 0),
    ADZE_OUTPUT(quantize, ADZE_OUT, scale, 0, 0, 0),
    ADZE_OUTPUT(quantize, ADZE_OUT_IF, zero, 0, 0, 0),
    ADZE_FIELD(quantize, ADZE_IN, x),
    ADZE_FIELD(quantize, ADZE_INT, dtype),
    ADZE_WORDS(quantize, format, format_words),
    ADZE_FIELD(quantize, ADZE_INT, group),
    ADZE_FIELD(quantize, ADZE_INT, group_rows),
    ADZE_FIELD(quantize, ADZE_INT, zero_points),
    ADZE_FIELD(quantize, ADZE_INT, scale_dtype),
    ADZE_FIELDS_END,
};

static adze_status validate(const void *args)
{
    const adze_quantize_args *a = args;
    ADZE_CHECK(adze_check_float("quantize", "x", &a->x));
    ADZE_CHECK(adze_check_rows("quantize", "x", &a->x));
    ADZE_REQUIRE(is_quantised(a->dtype), ADZE_BAD_DTYPE, "quantize: dtype is %s, it must be i8, f8e4m3 or u8",
                 adze_dtype_name(a->dtype));
    ADZE_CHECK(adze_check_range("quantize", "format", a->format, ADZE_FORMAT_DTYPE, ADZE_FORMAT_U4));
    ADZE_REQUIRE((a->dtype == ADZE_U8) == (a->format == ADZE_FORMAT_U4), ADZE_BAD_ARG,
                 "quantize: format is %d, dtype %s has %d", a->format, adze_dtype_name(a->dtype),
                 a->dtype == ADZE_U8 ? ADZE_FORMAT_U4 : ADZE_FORMAT_DTYPE);
    ADZE_CHECK(check_group("quantize", a->dtype, a->group, a->group_rows == -1 ? 0 : a->group_rows));
    ADZE_REQUIRE(a->group_rows != -1 || a->group == 0, ADZE_BAD_ARG,
                 "quantize: group is %d, it must be 0 when group_rows is -1", a->group);
    ADZE_REQUIRE(a->group_rows != 128 || a->x.rank == 2, ADZE_BAD_ARG,
                 "quantize: x has rank %d, it must be 2 when group_rows is 128", a->x.rank);
    ADZE_CHECK(adze_check_range("quantize", "zero_points", a->zero_points, 0, 1));
    ADZE_REQUIRE(!a->zero_points || a->format == ADZE_FORMAT_U4, ADZE_BAD_ARG,
                 "quantize: zero_points is 1, only 4 bits have them");
    ADZE_REQUIRE(!a->zero_points || a->group_rows != -1, ADZE_BAD_ARG,
                 "quantize: zero_points is 1, it must be 0 when group_rows is -1");
    ADZE_REQUIRE(a->scale_dtype == 0 || a->scale_dtype == ADZE_F32 || a->scale_dtype == ADZE_F16 ||
                     a->scale_dtype == ADZE_BF16,
                 ADZE_BAD_DTYPE, "quantize: scale_dtype is %s, it must be f32, f16 or bf16",
                 adze_dtype_name(a->scale_dtype));
    return ADZE_OK;
}

static void outputs(void *args)
{
    adze_quantize_args *a = args;
    const int last = a->x.rank - 1;
    const int64_t k = a->x.shape[last];
    adze_like(&a->out, &a->x);
    a->out.dtype = a->dtype;
    a->out.shape[last] = a->format == ADZE_FORMAT_U4 ? (k + 1) / 2 : k;
    adze_like(&a->scale, &a->x);
    a->scale.dtype = a->scale_dtype ? a->scale_dtype : ADZE_F32;
    if (a->group) {
        a->scale.shape[last] = (k + a->group - 1) / a->group;
        if (a->group_rows == 128)
            a->scale.shape[0] = (a->scale.shape[0] + 127) / 128;
    } else if (last == 0 || a->group_rows == -1) {
        a->scale.rank = 1;
        a->scale.shape[0] = 1;
    } else {
        a->scale.rank = last;
    }
    if (a->zero_points) {
        adze_like(&a->zero, &a->scale);
        a->zero.dtype = ADZE_U8;
    }
}

/* ---- The definition ---- */

typedef struct range {
    double low, high; /* low <= 0 <= high */
} range;

static void widen(range *r, double x)
{
    r->low = x < r->low ? x : r->low;
    r->high = x > r->high ? x : r->high;
}

/* A quotient that is rounded to float. */
static double over(double a, double b)
{
    return (double)(float)(a / b);
}

static double scale_of(const adze_quantize_args *a, range r)
{
    const double most = -r.low > r.high ? -r.low : r.high;
    const double scale = a->zero_points            ? over((double)(float)(r.high - r.low), 15)
                         : a->dtype == ADZE_I8     ? over(most, 127)
                         : a->dtype == ADZE_F8E4M3 ? over(most, 448)
                                                   : over(most, 7);
    return adze_round_to(a->scale_dtype ? a->scale_dtype : ADZE_F32, scale);
}

static double between(double v, double low, double high)
{
    return v < low ? low : v > high ? high : v;
}

static double stored(const adze_quantize_args *a, double x, double scale, double zero)
{
    const double q = scale == 0 ? 0 : over(x, scale);
    switch (a->dtype) {
    case ADZE_I8: return between(nearbyint(q), -127, 127);
    case ADZE_F8E4M3: return adze_round_to(ADZE_F8E4M3, between(q, -448, 448));
    default: return between(nearbyint(q) + zero, a->zero_points ? 0 : 1, 15);
    }
}

/* The group of an element among those of the scale, in row-major order. */
static int64_t group_of(const adze_quantize_args *a, int64_t row, int64_t j)
{
    if (a->group_rows == -1)
        return 0;
    const int64_t columns = a->group ? (a->x.shape[a->x.rank - 1] + a->group - 1) / a->group : 1;
    return (a->group_rows == 128 ? row / 128 : row) * columns + (a->group ? j / a->group : 0);
}

static void reference(const void *args, adze_value *const *out)
{
    const adze_quantize_args *a = args;
    const adze_tensor *const tensors[] = {&a->x};
    const int64_t k = a->x.shape[a->x.rank - 1], width = a->out.shape[a->out.rank - 1];
    const int64_t groups = adze_count(&a->scale);
    adze_rows rows;
    adze_rows_init(&rows, &a->x, 1, tensors);
    for (int64_t g = 0; g < groups; g++)
        out[1][g] = (adze_value){0, 0}; /* the range, until it is known: high in v, -low in e */
    for (int64_t r = 0; r < rows.count; r++)
        for (int64_t j = 0; j < k; j++) {
            adze_value *of = &out[1][group_of(a, r, j)];
            range seen = {-of->e, of->v};
            widen(&seen, adze_get(&a->x, adze_row_offset(&rows, 0, r) + j));
            *of = (adze_value){seen.high, -seen.low};
        }
    for (int64_t g = 0; g < groups; g++) {
        const range seen = {-out[1][g].e, out[1][g].v};
        const double scale = scale_of(a, seen);
        out[1][g] = adze_exact(scale);
        if (out[2])
            out[2][g] = adze_exact(scale == 0 ? 0 : between(nearbyint(over(-seen.low, scale)), 0, 15));
    }
    for (int64_t r = 0; r < rows.count; r++)
        for (int64_t j = 0; j < k; j++) {
            const int64_t g = group_of(a, r, j);
            const double zero = a->dtype != ADZE_U8 ? 0 : out[2] ? out[2][g].v : 8;
            const double q = stored(a, adze_get(&a->x, adze_row_offset(&rows, 0, r) + j), out[1][g].v, zero);
            if (a->dtype != ADZE_U8)
                out[0][r * width + j] = adze_exact(q);
            else
                out[0][r * width + j / 2] = adze_exact(j % 2 ? out[0][r * width + j / 2].v + 16 * q : q);
        }
}

ADZE_KERNELS(quantize)

const adze_op adze_op_quantize = {"quantize",
                                  sizeof(adze_quantize_args),
                                  ADZE_FIRST_SIZE(quantize, scale_dtype),
                                  fields,
                                  validate,
                                  outputs,
                                  reference,
                                  kernels,
                                  NULL,
                                  NULL};

adze_status adze_quantize(adze_stream stream, const adze_quantize_args *args)
{
    return adze_dispatch(&adze_op_quantize, stream, args);
}
