/* glu: the contract, the definition, and the kernels. */
#include "ops/act.h"

static const adze_field fields[] = {
    ADZE_OUTPUT(glu, ADZE_OUT, out, ADZE_IN_PLACE(glu, x), ADZE_IN_PLACE(glu, value), 0),
    ADZE_FIELD(glu, ADZE_IN, x),
    ADZE_FIELD(glu, ADZE_OPTIONAL, value),
    ADZE_WORDS(glu, act, act_words),
    ADZE_FIELD(glu, ADZE_INT, value_first),
    ADZE_FIELD(glu, ADZE_INT, rounding),
    ADZE_FIELD(glu, ADZE_INT, out_dtype),
    ADZE_OUTPUT(glu, ADZE_OUT_IF, out_scale, 0, 0, 0),
    ADZE_FIELDS_END,
};

static adze_status validate(const void *args)
{
    const adze_glu_args *a = args;
    ADZE_CHECK(adze_check_float("glu", "x", &a->x));
    ADZE_CHECK(adze_check_rows("glu", "x", &a->x));
    ADZE_CHECK(adze_check_like("glu", "value", &a->value, &a->x));
    const int64_t columns = a->x.shape[a->x.rank - 1];
    ADZE_REQUIRE(a->value.dtype || columns % 2 == 0, ADZE_BAD_ARG,
                 "glu: x has %lld elements in its last dimension, it must be even when value is absent",
                 (long long)columns);
    ADZE_REQUIRE(!a->value.dtype || !a->value_first, ADZE_BAD_ARG,
                 "glu: value_first is %d, it must be 0 when value is given", a->value_first);
    ADZE_CHECK(adze_check_range("glu", "value_first", a->value_first, 0, 1));
    ADZE_CHECK(adze_check_range("glu", "act", a->act, 0, ADZE_ACT_SIGMOID));
    ADZE_REQUIRE(a->out_dtype == 0 || a->out_dtype == a->x.dtype || adze_is_bytes(a->out_dtype), ADZE_BAD_DTYPE,
                 "glu: out_dtype is %s, it must be x's dtype, i8 or f8e4m3", adze_dtype_name(a->out_dtype));
    return adze_check_bits("glu", "rounding", a->rounding, ADZE_ROUND_STEPS);
}

static void outputs(void *args)
{
    adze_glu_args *a = args;
    adze_like(&a->out, &a->x);
    if (!a->value.dtype)
        a->out.shape[a->out.rank - 1] /= 2;
    if (a->out_dtype)
        a->out.dtype = a->out_dtype;
    adze_scale_like(&a->out_scale, &a->out);
}

static void reference(const void *args, adze_value *const *out)
{
    const adze_glu_args *a = args;
    adze_tensor gate, value;
    adze_glu_halves(a, &gate, &value);
    const adze_tensor *const tensors[] = {&gate, &value};
    const int64_t dim = gate.shape[gate.rank - 1];
    adze_rows rows;
    adze_rows_init(&rows, &gate, 2, tensors);
    for (int64_t r = 0; r < rows.count; r++) {
        const int64_t gate_at = adze_row_offset(&rows, 0, r), value_at = adze_row_offset(&rows, 1, r);
        for (int64_t i = 0; i < dim; i++) {
            const adze_value g = act_value(a->act ? a->act : ADZE_ACT_SILU, adze_element(&gate, gate_at + i));
            adze_value y = adze_mul(adze_rounded_if(a->rounding & ADZE_ROUND_STEPS, a->x.dtype, g),
                                    adze_element(&value, value_at + i));
            if (!isfinite(y.v))
                y.e = 0; /* an infinity is exact */
            out[0][r * dim + i] = y;
        }
        if (out[1])
            adze_quantised(a->x.dtype, a->out_dtype, dim, out[0] + r * dim, &out[1][r]);
    }
}

ADZE_KERNELS(glu)

const adze_op adze_op_glu = {"glu",
                             sizeof(adze_glu_args),
                             ADZE_FIRST_SIZE(glu, out_dtype),
                             fields,
                             validate,
                             outputs,
                             reference,
                             kernels,
                             NULL,
                             NULL};

adze_status adze_glu(adze_stream stream, const adze_glu_args *args)
{
    return adze_dispatch(&adze_op_glu, stream, args);
}
