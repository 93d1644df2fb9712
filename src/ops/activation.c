/* activation: the contract, the definition, and the kernels. */
#include "ops/act.h"

static const adze_field fields[] = {
    ADZE_OUTPUT(activation, ADZE_OUT, out, ADZE_IN_PLACE(activation, x), 0, 0),
    ADZE_FIELD(activation, ADZE_IN, x),
    ADZE_WORDS(activation, act, act_words),
    ADZE_FIELDS_END,
};

static adze_status validate(const void *args)
{
    const adze_activation_args *a = args;
    ADZE_CHECK(adze_check_float("activation", "x", &a->x));
    ADZE_CHECK(adze_check_rows("activation", "x", &a->x));
    return adze_check_range("activation", "act", a->act, ADZE_ACT_SILU, ADZE_ACT_SIGMOID);
}

static void outputs(void *args)
{
    adze_activation_args *a = args;
    adze_like(&a->out, &a->x);
}

static void reference(const void *args, adze_value *const *out)
{
    const adze_activation_args *a = args;
    const adze_tensor *const x = &a->x;
    const int64_t dim = x->shape[x->rank - 1];
    adze_rows rows;
    adze_rows_init(&rows, x, 1, &x);
    for (int64_t r = 0; r < rows.count; r++) {
        const int64_t at = adze_row_offset(&rows, 0, r);
        for (int64_t i = 0; i < dim; i++)
            out[0][r * dim + i] = act_value(a->act, adze_element(x, at + i));
    }
}

ADZE_KERNELS(activation)

const adze_op adze_op_activation = {"activation",
                                    sizeof(adze_activation_args),
                                    ADZE_FIRST_SIZE(activation, reserved),
                                    fields,
                                    validate,
                                    outputs,
                                    reference,
                                    kernels,
                                    NULL,
                                    NULL};

adze_status adze_activation(adze_stream stream, const adze_activation_args *args)
{
    return adze_dispatch(&adze_op_activation, stream, args);
}
