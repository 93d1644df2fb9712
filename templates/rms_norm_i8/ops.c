/* rms_norm_i8: the contract, the definition, and the kernels. */
#include "value.h"

static const adze_field fields[] = {
    ADZE_OUTPUT(rms_norm_i8, ADZE_OUT, out, 0, 0, 0),
    ADZE_OUTPUT(rms_norm_i8, ADZE_OUT, scale, 0, 0, 0),
    ADZE_FIELD(rms_norm_i8, ADZE_IN, x),
    ADZE_FIELD(rms_norm_i8, ADZE_OPTIONAL, weight),
    ADZE_FIELD(rms_norm_i8, ADZE_FLOAT, eps),
    ADZE_FIELDS_END,
};

static adze_status validate(const void *args)
{
    const adze_rms_norm_i8_args *a = args;
    ADZE_CHECK(adze_check_float("rms_norm_i8", "x", &a->x));
    ADZE_CHECK(adze_check_rows("rms_norm_i8", "x", &a->x));
    ADZE_CHECK(adze_check_param("rms_norm_i8", "weight", &a->weight, &a->x, a->x.shape[a->x.rank - 1]));
    ADZE_REQUIRE(a->x.shape[a->x.rank - 1] > 0, ADZE_BAD_ARG, "rms_norm_i8: rows of x have no elements");
    ADZE_REQUIRE(a->eps > 0, ADZE_BAD_ARG, "rms_norm_i8: eps is %g, it must be positive", (double)a->eps);
    return ADZE_OK;
}

static void outputs(void *args)
{
    adze_rms_norm_i8_args *a = args;
    adze_like(&a->out, &a->x);
    a->out.dtype = ADZE_I8;
    adze_like(&a->scale, &a->x);
    a->scale.shape[a->scale.rank - 1] = 1;
    a->scale.dtype = ADZE_F32;
}

static adze_value normalised(const adze_rms_norm_i8_args *a, int64_t at, int64_t i, adze_value inverse)
{
    const adze_value y = adze_mul(adze_element(&a->x, at + i), inverse);
    return a->weight.dtype ? adze_mul(y, adze_element(&a->weight, i * a->weight.stride[0])) : y;
}

static void reference(const void *args, adze_value *const *out)
{
    const adze_rms_norm_i8_args *a = args;
    const adze_tensor *const x = &a->x;
    const int64_t dim = x->shape[x->rank - 1];
    adze_rows rows;
    adze_rows_init(&rows, x, 1, &x);
    for (int64_t r = 0; r < rows.count; r++) {
        const int64_t at = adze_row_offset(&rows, 0, r);
        double sum = 0, error = 0;
        for (int64_t i = 0; i < dim; i++) {
            const adze_value v = adze_element(x, at + i), square = adze_mul(v, v);
            sum += square.v, error += square.e;
        }
        const adze_value mean =
            adze_mul(adze_summed(dim, sum, sum, error), (adze_value){1.0 / (double)dim, ADZE_U / (double)dim});
        const adze_value inverse = adze_rsqrt(adze_add(mean, adze_exact((double)a->eps)));
        adze_value most = {0, 0}; /* the largest of values that are off by e is off by the largest e */
        for (int64_t i = 0; i < dim; i++) {
            const adze_value y = normalised(a, at, i, inverse);
            most.v = fmax(most.v, fabs(y.v)), most.e = fmax(most.e, y.e);
        }
        const adze_value scale = adze_mul(most, (adze_value){1.0 / 127, ADZE_U / 127});
        out[1][r] = scale;
        for (int64_t i = 0; i < dim; i++)
            out[0][r * dim + i] = scale.v > 0 ? adze_div(normalised(a, at, i, inverse), scale) : adze_exact(0);
    }
}

ADZE_KERNELS(rms_norm_i8)

const adze_op adze_op_rms_norm_i8 = {
    .name = "rms_norm_i8",
    .args_size = sizeof(adze_rms_norm_i8_args),
    .first_size = ADZE_FIRST_SIZE(rms_norm_i8, reserved),
    .fields = fields,
    .validate = validate,
    .outputs = outputs,
    .reference = reference,
    .kernels = kernels,
};

adze_status adze_rms_norm_i8(adze_stream stream, const adze_rms_norm_i8_args *args)
{
    return adze_dispatch(&adze_op_rms_norm_i8, stream, args);
}
