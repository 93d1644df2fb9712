/* attention_merge: the contract, the definition, and the kernels. */
#include "value.h"

static const adze_field fields[] = {
    ADZE_OUTPUT(attention_merge, ADZE_OUT, out, ADZE_IN_PLACE(attention_merge, x), ADZE_IN_PLACE(attention_merge, y),
                0),
    ADZE_OUTPUT(attention_merge, ADZE_OUT_OPTIONAL, lse, ADZE_IN_PLACE(attention_merge, x_lse),
                ADZE_IN_PLACE(attention_merge, y_lse), 0),
    ADZE_FIELD(attention_merge, ADZE_IN, x),
    ADZE_FIELD(attention_merge, ADZE_IN, x_lse),
    ADZE_FIELD(attention_merge, ADZE_IN, y),
    ADZE_FIELD(attention_merge, ADZE_IN, y_lse),
    ADZE_FIELDS_END,
};

static adze_status check_lse(const adze_attention_merge_args *a, const char *name, const adze_tensor *t)
{
    ADZE_REQUIRE(t->dtype == ADZE_F32, ADZE_BAD_DTYPE, "attention_merge: %s is %s, it must be f32", name,
                 adze_dtype_name(t->dtype));
    ADZE_REQUIRE(t->rank == a->x.rank - 1, ADZE_BAD_ARG, "attention_merge: %s has rank %d, it must have %d", name,
                 t->rank, a->x.rank - 1);
    for (int d = 0; d < t->rank; d++)
        ADZE_REQUIRE(t->shape[d] == a->x.shape[d], ADZE_BAD_ARG,
                     "attention_merge: %s has %lld in dimension %d, x has %lld", name, (long long)t->shape[d], d,
                     (long long)a->x.shape[d]);
    return adze_check_rows("attention_merge", name, t);
}

static adze_status validate(const void *args)
{
    const adze_attention_merge_args *a = args;
    ADZE_CHECK(adze_check_float("attention_merge", "x", &a->x));
    ADZE_REQUIRE(a->x.rank >= 2, ADZE_BAD_ARG, "attention_merge: x has rank %d, it must be 2 to 5", a->x.rank);
    ADZE_CHECK(adze_check_rows("attention_merge", "x", &a->x));
    ADZE_CHECK(adze_check_like("attention_merge", "y", &a->y, &a->x));
    ADZE_CHECK(check_lse(a, "x_lse", &a->x_lse));
    return check_lse(a, "y_lse", &a->y_lse);
}

static void outputs(void *args)
{
    adze_attention_merge_args *a = args;
    adze_like(&a->out, &a->x);
    adze_like(&a->lse, &a->x_lse);
}

/* ---- The definition ---- */

/* exp(lse - max); exp is good to two float units, or to a unit of the subnormal floats, which may be flushed. */
static adze_value power(double lse, double max)
{
    if (lse == -INFINITY)
        return adze_exact(0);
    const adze_value d = adze_sub(adze_exact(lse), adze_exact(max));
    if (!isfinite(d.v))
        return adze_exact(exp(d.v));
    adze_value p = adze_fn(d, exp(d.v), exp(d.v + d.e), 2);
    p.e += 0x1p-126;
    return p;
}

static adze_value settled(adze_value v)
{
    return isfinite(v.v) ? v : adze_exact(v.v);
}

/* A part whose sum is 0 has no share, whatever it holds. */
static adze_value share(adze_value weight, adze_value sum, double v)
{
    return weight.v == 0 && weight.e == 0 ? adze_exact(0) : settled(adze_mul(adze_div(weight, sum), adze_exact(v)));
}

static void reference(const void *args, adze_value *const *out)
{
    const adze_attention_merge_args *a = args;
    adze_tensor x_lse = a->x_lse, y_lse = a->y_lse;
    const adze_tensor *const tensors[] = {&a->x, &a->y, &x_lse, &y_lse};
    const int64_t dim = a->x.shape[a->x.rank - 1];
    x_lse.shape[x_lse.rank++] = y_lse.shape[y_lse.rank++] = 1; /* rows of one element */
    adze_rows rows;
    adze_rows_init(&rows, &a->x, 4, tensors);
    for (int64_t r = 0; r < rows.count; r++) {
        const double lx = adze_get(&a->x_lse, adze_row_offset(&rows, 2, r));
        const double ly = adze_get(&a->y_lse, adze_row_offset(&rows, 3, r)), max = isnan(lx) ? lx : fmax(lx, ly);
        const adze_value wx = power(lx, max), wy = power(ly, max), sum = adze_add(wx, wy);
        for (int64_t i = 0; i < dim; i++) {
            const double x = adze_get(&a->x, adze_row_offset(&rows, 0, r) + i);
            const double y = adze_get(&a->y, adze_row_offset(&rows, 1, r) + i);
            out[0][r * dim + i] =
                sum.v == 0 ? adze_exact(0) : settled(adze_add(share(wx, sum, x), share(wy, sum, y)));
        }
        if (out[1])
            out[1][r] = sum.v == 0
                            ? adze_exact(-INFINITY)
                            : settled(adze_add(adze_exact(max), adze_fn(sum, log(sum.v), 1 / (sum.v - sum.e), 2)));
    }
}

ADZE_KERNELS(attention_merge)

const adze_op adze_op_attention_merge = {"attention_merge",
                                         sizeof(adze_attention_merge_args),
                                         ADZE_FIRST_SIZE(attention_merge, y_lse),
                                         fields,
                                         validate,
                                         outputs,
                                         reference,
                                         kernels,
                                         NULL,
                                         NULL};

adze_status adze_attention_merge(adze_stream stream, const adze_attention_merge_args *args)
{
    return adze_dispatch(&adze_op_attention_merge, stream, args);
}
