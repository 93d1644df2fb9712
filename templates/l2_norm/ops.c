/* l2_norm: the contract, the definition, and the kernels. */
#include "value.h"

static const adze_field fields[] = {
    ADZE_OUTPUT(l2_norm, ADZE_OUT, out, ADZE_IN_PLACE(l2_norm, x), 0, 0),
    ADZE_OUTPUT(l2_norm, ADZE_OUT_OPTIONAL, norm, 0, 0, 0),
    ADZE_FIELD(l2_norm, ADZE_IN, x),
    ADZE_FIELD(l2_norm, ADZE_FLOAT, eps),
    ADZE_FIELDS_END,
};

static adze_status validate(const void *args)
{
    const adze_l2_norm_args *a = args;
    ADZE_CHECK(adze_check_float("l2_norm", "x", &a->x));
    ADZE_CHECK(adze_check_rows("l2_norm", "x", &a->x));
    ADZE_REQUIRE(a->eps >= 0, ADZE_BAD_ARG, "l2_norm: eps is %g, it must not be negative", (double)a->eps);
    return ADZE_OK;
}

static void outputs(void *args)
{
    adze_l2_norm_args *a = args;
    adze_like(&a->out, &a->x);
    adze_like(&a->norm, &a->x);
    a->norm.shape[a->norm.rank - 1] = 1;
    a->norm.dtype = ADZE_F32;
}

static void reference(const void *args, adze_value *const *out)
{
    const adze_l2_norm_args *a = args;
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
        const adze_value total = adze_add(adze_summed(dim, sum, sum, error), adze_exact((double)a->eps));
        const adze_value inverse = adze_rsqrt(total);
        for (int64_t i = 0; i < dim; i++)
            out[0][r * dim + i] = adze_mul(adze_element(x, at + i), inverse);
        if (out[1])
            out[1][r] = adze_fn(total, sqrt(total.v), total.v > 0 ? 0.5 / sqrt(total.v) : 0, 2);
    }
}

ADZE_KERNELS(l2_norm)

const adze_op adze_op_l2_norm = {
    .name = "l2_norm",
    .args_size = sizeof(adze_l2_norm_args),
    .first_size = ADZE_FIRST_SIZE(l2_norm, reserved),
    .fields = fields,
    .validate = validate,
    .outputs = outputs,
    .reference = reference,
    .kernels = kernels,
};

adze_status adze_l2_norm(adze_stream stream, const adze_l2_norm_args *args)
{
    return adze_dispatch(&adze_op_l2_norm, stream, args);
}
