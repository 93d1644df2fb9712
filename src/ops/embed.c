/* embed: the contract, the definition, and the kernels. */
#include "value.h"

static const adze_field fields[] = {
    ADZE_OUTPUT(embed, ADZE_OUT, out, 0, 0, 0),
    ADZE_FIELD(embed, ADZE_IN, table),
    ADZE_FIELD(embed, ADZE_IN, ids),
    ADZE_FIELD(embed, ADZE_FLOAT, scale),
    ADZE_FIELDS_END,
};

static adze_status validate(const void *args)
{
    const adze_embed_args *a = args;
    ADZE_CHECK(adze_check_float("embed", "table", &a->table));
    ADZE_REQUIRE(a->table.rank == 2, ADZE_BAD_ARG, "embed: table has rank %d, it must be 2", a->table.rank);
    ADZE_CHECK(adze_check_rows("embed", "table", &a->table));
    ADZE_REQUIRE(a->ids.dtype == ADZE_I32 || a->ids.dtype == ADZE_I64, ADZE_BAD_DTYPE,
                 "embed: ids is %s, it must be i32 or i64", adze_dtype_name(a->ids.dtype));
    ADZE_REQUIRE(a->ids.rank >= 1 && a->ids.rank <= 4, ADZE_BAD_ARG, "embed: ids has rank %d, it must be 1 to 4",
                 a->ids.rank);
    return adze_check_rows("embed", "ids", &a->ids);
}

static void outputs(void *args)
{
    adze_embed_args *a = args;
    adze_like(&a->out, &a->ids);
    a->out.dtype = a->table.dtype;
    a->out.shape[a->out.rank++] = a->table.shape[1];
}

static void reference_at(const void *args, int sums, int output, int64_t n, const int64_t *index, adze_value *out)
{
    const adze_embed_args *a = args;
    const int64_t dim = a->table.shape[1], last = a->ids.shape[a->ids.rank - 1];
    const adze_tensor *const tensors[] = {&a->ids};
    const double scale = a->scale != 0 ? adze_round_to(a->table.dtype, a->scale) : 1;
    adze_rows rows;
    (void)sums, (void)output;
    adze_rows_init(&rows, &a->ids, 1, tensors);
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = index ? index[i] : i, t = at / dim;
        const int64_t id = (int64_t)adze_get(&a->ids, adze_row_offset(&rows, 0, t / last) + t % last);
        adze_value x = adze_exact(NAN);
        if (id >= 0 && id < a->table.shape[0])
            x = adze_element(&a->table, id * a->table.stride[0] + at % dim);
        out[i] = a->scale != 0 ? adze_mul(x, adze_exact(scale)) : x;
    }
}

static int sums_of(const adze_kernel *kernel)
{
    (void)kernel;
    return 0;
}

static void reference(const void *args, adze_value *const *out)
{
    const adze_embed_args *a = args;
    reference_at(args, 0, 0, adze_count(&a->out), NULL, out[0]);
}

/* A table is so large that a whole call is verified at chosen elements. */
static const adze_samples samples = {sums_of, reference_at};

ADZE_KERNELS(embed)

const adze_op adze_op_embed = {"embed",
                               sizeof(adze_embed_args),
                               ADZE_FIRST_SIZE(embed, reserved),
                               fields,
                               validate,
                               outputs,
                               reference,
                               kernels,
                               NULL,
                               &samples};

adze_status adze_embed(adze_stream stream, const adze_embed_args *args)
{
    return adze_dispatch(&adze_op_embed, stream, args);
}
