/* dequantize: the contract, the definition, and the kernels. */
#include "ops/quantised.h"

static const adze_field fields[] = {
    ADZE_OUTPUT(dequantize, ADZE_OUT, out, 0, 0, 0), ADZE_FIELD(dequantize, ADZE_IN, w),
    ADZE_FIELD(dequantize, ADZE_IN, scale),          ADZE_FIELD(dequantize, ADZE_OPTIONAL, zero),
    ADZE_FIELD(dequantize, ADZE_INT, group),         ADZE_FIELD(dequantize, ADZE_INT, group_rows),
    ADZE_WORDS(dequantize, format, format_words),    ADZE_FIELD(dequantize, ADZE_INT, k),
    ADZE_FIELD(dequantize, ADZE_INT, out_dtype),     ADZE_FIELDS_END,
};

static int64_t k_of(const adze_dequantize_args *a)
{
    return a->k ? a->k : a->w.shape[1] * (a->w.dtype == ADZE_U8 ? 2 : 1);
}

static quantised quantised_of(const adze_dequantize_args *a)
{
    const int64_t k = k_of(a), group = a->group ? a->group : k > 0 ? k : 1;
    return (quantised){"w", &a->w, &a->scale, &a->zero, a->w.shape[0], k, group, a->group_rows ? a->group_rows : 1};
}

static adze_status validate(const void *args)
{
    const adze_dequantize_args *a = args;
    ADZE_REQUIRE(is_quantised(a->w.dtype), ADZE_BAD_DTYPE, "dequantize: w is %s, it must be i8, f8e4m3 or u8",
                 adze_dtype_name(a->w.dtype));
    ADZE_REQUIRE(a->w.rank == 2, ADZE_BAD_ARG, "dequantize: w has rank %d, it must be 2", a->w.rank);
    ADZE_CHECK(adze_check_rows("dequantize", "w", &a->w));
    ADZE_CHECK(check_group("dequantize", a->w.dtype, a->group, a->group_rows));
    ADZE_CHECK(adze_check_range("dequantize", "format", a->format, ADZE_FORMAT_DTYPE, ADZE_FORMAT_U4));
    ADZE_REQUIRE(a->k >= 0, ADZE_BAD_ARG, "dequantize: k is %d, it must not be negative", a->k);
    const quantised q = quantised_of(a);
    const int64_t due = a->w.dtype == ADZE_U8 ? (q.k + 1) / 2 : q.k, got = a->w.shape[1];
    ADZE_REQUIRE(got == due, ADZE_BAD_ARG, "dequantize: rows of w have %lld elements, they must have %lld for k %lld",
                 (long long)got, (long long)due, (long long)q.k);
    ADZE_CHECK(check_quantised("dequantize", &q, !a->group, a->format, "scale", "zero"));
    ADZE_REQUIRE(
        a->out_dtype == 0 || a->out_dtype == ADZE_F32 || a->out_dtype == ADZE_F16 || a->out_dtype == ADZE_BF16,
        ADZE_BAD_DTYPE, "dequantize: out_dtype is %s, it must be f32, f16 or bf16", adze_dtype_name(a->out_dtype));
    return ADZE_OK;
}

static void outputs(void *args)
{
    adze_dequantize_args *a = args;
    adze_like(&a->out, &a->w);
    a->out.dtype = a->out_dtype ? a->out_dtype : ADZE_F32;
    a->out.shape[1] = k_of(a);
}

/* The product has so few bits that a double holds it. */
static void reference_at(const void *args, int sums, int output, int64_t n, const int64_t *index, adze_value *out)
{
    const adze_dequantize_args *a = args;
    const quantised q = quantised_of(a);
    (void)sums, (void)output;
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = index ? index[i] : i;
        const double product = adze_round_to(ADZE_F32, weight_at(&q, at / q.k, at % q.k));
        out[i] = adze_exact(adze_round_to(a->out.dtype, product));
    }
}

static int sums_of(const adze_kernel *kernel)
{
    (void)kernel;
    return 0;
}

static void reference(const void *args, adze_value *const *out)
{
    const adze_dequantize_args *a = args;
    reference_at(args, 0, 0, adze_count(&a->out), NULL, out[0]);
}

/* A weight is so large that a whole call is verified at chosen elements. */
static const adze_samples samples = {sums_of, reference_at};

ADZE_KERNELS(dequantize)

const adze_op adze_op_dequantize = {"dequantize",
                                    sizeof(adze_dequantize_args),
                                    ADZE_FIRST_SIZE(dequantize, reserved),
                                    fields,
                                    validate,
                                    outputs,
                                    reference,
                                    kernels,
                                    NULL,
                                    &samples};

adze_status adze_dequantize(adze_stream stream, const adze_dequantize_args *args)
{
    return adze_dispatch(&adze_op_dequantize, stream, args);
}
