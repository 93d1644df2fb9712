/* scale_add: the contract, the definition, and the kernels. */
#include "value.h"

static const adze_field fields[] = {
    ADZE_OUTPUT(scale_add, ADZE_OUT, out, ADZE_IN_PLACE(scale_add, x), ADZE_IN_PLACE(scale_add, y), 0),
    ADZE_FIELD(scale_add, ADZE_IN, x),
    ADZE_FIELD(scale_add, ADZE_IN, y),
    ADZE_FIELD(scale_add, ADZE_FLOAT, a),
    ADZE_FIELDS_END,
};

static adze_status validate(const void *args)
{
    const adze_scale_add_args *a = args;
    ADZE_CHECK(adze_check_float("scale_add", "x", &a->x));
    ADZE_CHECK(adze_check_rows("scale_add", "x", &a->x));
    return adze_check_like("scale_add", "y", &a->y, &a->x);
}

static void outputs(void *args)
{
    adze_scale_add_args *a = args;
    adze_like(&a->out, &a->x);
}

static void reference(const void *args, adze_value *const *out)
{
    const adze_scale_add_args *a = args;
    const adze_tensor *const tensors[] = {&a->x, &a->y};
    const int64_t dim = a->x.shape[a->x.rank - 1];
    adze_rows rows;
    adze_rows_init(&rows, &a->x, 2, tensors);
    for (int64_t r = 0; r < rows.count; r++) {
        const int64_t x = adze_row_offset(&rows, 0, r), y = adze_row_offset(&rows, 1, r);
        for (int64_t i = 0; i < dim; i++)
            out[0][r * dim + i] =
                adze_add(adze_mul(adze_exact((double)a->a), adze_element(&a->x, x + i)), adze_element(&a->y, y + i));
    }
}

ADZE_KERNELS(scale_add)

const adze_op adze_op_scale_add = {
    .name = "scale_add",
    .args_size = sizeof(adze_scale_add_args),
    .first_size = ADZE_FIRST_SIZE(scale_add, reserved),
    .fields = fields,
    .validate = validate,
    .outputs = outputs,
    .reference = reference,
    .kernels = kernels,
};

adze_status adze_scale_add(adze_stream stream, const adze_scale_add_args *args)
{
    return adze_dispatch(&adze_op_scale_add, stream, args);
}
