/* softmax: the contract, the definition, and the kernels. */
#include "value.h"

static const adze_field fields[] = {
    ADZE_OUTPUT(softmax, ADZE_OUT, out, ADZE_IN_PLACE(softmax, x), ADZE_IN_PLACE(softmax, mask), 0),
    ADZE_FIELD(softmax, ADZE_IN, x),
    ADZE_FIELD(softmax, ADZE_OPTIONAL, mask),
    ADZE_FIELD(softmax, ADZE_FLOAT, scale),
    ADZE_FIELDS_END,
};

static adze_status validate(const void *args)
{
    const adze_softmax_args *a = args;
    ADZE_CHECK(adze_check_float("softmax", "x", &a->x));
    ADZE_CHECK(adze_check_rows("softmax", "x", &a->x));
    return adze_check_to("softmax", "mask", &a->mask, &a->x);
}

static void outputs(void *args)
{
    adze_softmax_args *a = args;
    adze_like(&a->out, &a->x);
}

/* exp(y - max). An error of the maximum alone is common to a row and cancels. A kernel may work in base 2, which
   rounds the exponent once more; exp is good to two float units, or to a unit of the subnormal floats. */
static adze_value power(adze_value y, double max)
{
    const adze_value d = adze_mul(adze_sub(y, adze_exact(max)), (adze_value){1, ADZE_U});
    if (!isfinite(d.v))
        return adze_exact(exp(d.v));
    adze_value p = adze_fn(d, exp(d.v), exp(d.v + d.e), 2);
    p.e += 0x1p-149;
    return p;
}

static void reference(const void *args, adze_value *const *out)
{
    const adze_softmax_args *a = args;
    const adze_tensor *const tensors[] = {&a->x, &a->mask};
    const int64_t dim = a->x.shape[a->x.rank - 1];
    adze_rows rows;
    adze_rows_init(&rows, &a->x, 2, tensors);
    for (int64_t r = 0; r < rows.count; r++) {
        const int64_t x_at = adze_row_offset(&rows, 0, r), mask_at = adze_row_offset(&rows, 1, r);
        adze_value *y = out[0] + r * dim;
        double max = -INFINITY, total = 0, error = 0;
        for (int64_t i = 0; i < dim; i++) {
            y[i] = adze_element(&a->x, x_at + i);
            if (a->scale != 0 && a->scale != 1)
                y[i] = adze_mul(y[i], adze_exact(a->scale));
            if (a->mask.dtype)
                y[i] = adze_add(y[i], adze_element(&a->mask, mask_at + i));
            max = fmax(max, y[i].v);
        }
        for (int64_t i = 0; i < dim; i++) {
            y[i] = power(y[i], max);
            total += y[i].v, error += y[i].e;
        }
        const adze_value sum = adze_summed(dim, total, total, error);
        const double low = fmax(sum.v - sum.e, 1); /* the largest term is 1 */
        const adze_value inverse = adze_fn(sum, 1 / sum.v, 1 / (low * low), 1);
        for (int64_t i = 0; i < dim; i++)
            y[i] = adze_mul(y[i], inverse);
    }
}

ADZE_KERNELS(softmax)

const adze_op adze_op_softmax = {"softmax",
                                 sizeof(adze_softmax_args),
                                 ADZE_FIRST_SIZE(softmax, reserved),
                                 fields,
                                 validate,
                                 outputs,
                                 reference,
                                 kernels,
                                 NULL,
                                 NULL};

adze_status adze_softmax(adze_stream stream, const adze_softmax_args *args)
{
    return adze_dispatch(&adze_op_softmax, stream, args);
}
