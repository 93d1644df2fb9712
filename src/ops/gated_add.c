/* gated_add: the contract, the definition, and the kernels. */
#include "value.h"

static const adze_field fields[] = {
    ADZE_OUTPUT(gated_add, ADZE_OUT, out, ADZE_IN_PLACE(gated_add, x), ADZE_IN_PLACE(gated_add, residual),
                ADZE_IN_PLACE(gated_add, gate)),
    ADZE_FIELD(gated_add, ADZE_IN, x),
    ADZE_FIELD(gated_add, ADZE_IN, residual),
    ADZE_FIELD(gated_add, ADZE_IN, gate),
    ADZE_FIELD(gated_add, ADZE_OPTIONAL, gate_table),
    ADZE_FIELD(gated_add, ADZE_INT, rounding),
    ADZE_FIELDS_END,
};

static adze_status validate(const void *args)
{
    const adze_gated_add_args *a = args;
    ADZE_CHECK(adze_check_float("gated_add", "x", &a->x));
    ADZE_CHECK(adze_check_rows("gated_add", "x", &a->x));
    ADZE_CHECK(adze_check_like("gated_add", "residual", &a->residual, &a->x));
    ADZE_CHECK(adze_check_to("gated_add", "gate", &a->gate, &a->x));
    ADZE_CHECK(adze_check_to("gated_add", "gate_table", &a->gate_table, &a->x));
    return adze_check_bits("gated_add", "rounding", a->rounding, ADZE_ROUND_STEPS);
}

static void outputs(void *args)
{
    adze_gated_add_args *a = args;
    adze_like(&a->out, &a->x);
}

static void reference(const void *args, adze_value *const *out)
{
    enum { X, RESIDUAL, GATE, GATE_TABLE, TENSORS };
    const adze_gated_add_args *a = args;
    const adze_tensor *const tensors[TENSORS] = {&a->x, &a->residual, &a->gate, &a->gate_table};
    const int steps = a->rounding & ADZE_ROUND_STEPS, dtype = a->x.dtype;
    const int64_t dim = a->x.shape[a->x.rank - 1];
    adze_rows rows;
    adze_rows_init(&rows, &a->x, TENSORS, tensors);
    for (int64_t r = 0; r < rows.count; r++) {
        int64_t at[TENSORS];
        for (int t = 0; t < TENSORS; t++)
            at[t] = adze_row_offset(&rows, t, r);
        for (int64_t i = 0; i < dim; i++) {
            adze_value gate = adze_element(&a->gate, at[GATE] + i);
            if (a->gate_table.dtype)
                gate =
                    adze_rounded_if(steps, dtype, adze_add(gate, adze_element(&a->gate_table, at[GATE_TABLE] + i)));
            const adze_value product = adze_rounded_if(steps, dtype, adze_mul(gate, adze_element(&a->x, at[X] + i)));
            out[0][r * dim + i] = adze_add(adze_element(&a->residual, at[RESIDUAL] + i), product);
        }
    }
}

ADZE_KERNELS(gated_add)

const adze_op adze_op_gated_add = {"gated_add",
                                   sizeof(adze_gated_add_args),
                                   ADZE_FIRST_SIZE(gated_add, reserved),
                                   fields,
                                   validate,
                                   outputs,
                                   reference,
                                   kernels,
                                   NULL,
                                   NULL};

adze_status adze_gated_add(adze_stream stream, const adze_gated_add_args *args)
{
    return adze_dispatch(&adze_op_gated_add, stream, args);
}
