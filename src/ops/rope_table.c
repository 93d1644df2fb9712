/* rope_table: the contract, the definition, and the kernels. */
#include "sincos.h"
#include "value.h"

static const adze_word columns_words[] = {
    {"once", ADZE_TABLE_ONCE}, {"halves", ADZE_TABLE_HALVES}, {"pairs", ADZE_TABLE_PAIRS}, {NULL, 0}};

static const adze_field fields[] = {
    ADZE_OUTPUT(rope_table, ADZE_OUT, cos, 0, 0, 0),
    ADZE_OUTPUT(rope_table, ADZE_OUT, sin, 0, 0, 0),
    ADZE_FIELD(rope_table, ADZE_IN, pos),
    ADZE_FIELD(rope_table, ADZE_IN, freq),
    ADZE_FIELD(rope_table, ADZE_OPTIONAL, axis),
    ADZE_FIELD(rope_table, ADZE_FLOAT, scale),
    ADZE_WORDS(rope_table, columns, columns_words),
    ADZE_FIELD(rope_table, ADZE_INT, double_angle),
    ADZE_FIELD(rope_table, ADZE_INT, out_dtype),
    ADZE_FIELDS_END,
};

static adze_status validate(const void *args)
{
    const adze_rope_table_args *a = args;
    ADZE_REQUIRE(a->pos.dtype == ADZE_I32 || a->pos.dtype == ADZE_I64 || a->pos.dtype == ADZE_F32, ADZE_BAD_DTYPE,
                 "rope_table: pos is %s, it must be i32, i64 or f32", adze_dtype_name(a->pos.dtype));
    ADZE_CHECK(adze_check_rows("rope_table", "pos", &a->pos));
    const int64_t axes = a->pos.shape[a->pos.rank - 1];
    ADZE_REQUIRE(axes >= 1 && axes <= 4, ADZE_BAD_ARG, "rope_table: pos has %lld axes, it must have 1 to 4",
                 (long long)axes);
    ADZE_REQUIRE(a->freq.dtype == ADZE_F32 || a->freq.dtype == ADZE_F64, ADZE_BAD_DTYPE,
                 "rope_table: freq is %s, it must be f32 or f64", adze_dtype_name(a->freq.dtype));
    ADZE_REQUIRE(a->freq.rank == 1, ADZE_BAD_ARG, "rope_table: freq has rank %d, it must be 1", a->freq.rank);
    ADZE_CHECK(adze_check_rows("rope_table", "freq", &a->freq));
    if (a->axis.dtype != ADZE_NONE) {
        ADZE_REQUIRE(a->axis.dtype == ADZE_I32, ADZE_BAD_DTYPE, "rope_table: axis is %s, it must be i32",
                     adze_dtype_name(a->axis.dtype));
        ADZE_REQUIRE(a->axis.rank == 1 && a->axis.shape[0] == a->freq.shape[0], ADZE_BAD_ARG,
                     "rope_table: axis has rank %d and %lld elements, freq has %lld", a->axis.rank,
                     (long long)a->axis.shape[0], (long long)a->freq.shape[0]);
        ADZE_CHECK(adze_check_rows("rope_table", "axis", &a->axis));
    }
    ADZE_CHECK(adze_check_range("rope_table", "columns", a->columns, ADZE_TABLE_ONCE, ADZE_TABLE_PAIRS));
    ADZE_CHECK(adze_check_range("rope_table", "double_angle", a->double_angle, 0, 1));
    ADZE_REQUIRE(
        a->out_dtype == 0 || a->out_dtype == ADZE_F32 || a->out_dtype == ADZE_F16 || a->out_dtype == ADZE_BF16,
        ADZE_BAD_DTYPE, "rope_table: out_dtype is %s, it must be f32, f16 or bf16", adze_dtype_name(a->out_dtype));
    return ADZE_OK;
}

static void outputs(void *args)
{
    adze_rope_table_args *a = args;
    adze_like(&a->cos, &a->pos);
    a->cos.shape[a->pos.rank - 1] = a->freq.shape[0] * (a->columns == ADZE_TABLE_ONCE ? 1 : 2);
    a->cos.dtype = a->out_dtype ? a->out_dtype : ADZE_F32;
    adze_like(&a->sin, &a->cos);
}

/* The angle is exact: every kernel rounds the same product the same way. 1.25 units is what cpu/rope_table.c and
   cuda/rope_table.cu derive for their sine and cosine. */
static void reference(const void *args, adze_value *const *out)
{
    const adze_rope_table_args *a = args;
    const int64_t axes = a->pos.shape[a->pos.rank - 1], n = a->freq.shape[0];
    const int64_t width = a->columns == ADZE_TABLE_ONCE ? n : 2 * n;
    const adze_tensor *const tensors[] = {&a->pos};
    const adze_value scale = adze_exact(a->scale != 0 ? a->scale : 1);
    adze_rows rows;
    adze_rows_init(&rows, &a->pos, 1, tensors);
    for (int64_t row = 0; row < rows.count; row++)
        for (int64_t i = 0; i < n; i++) {
            const int64_t axis = a->axis.dtype ? ((const int32_t *)a->axis.data)[i] : 0;
            const int known = axis >= 0 && axis < axes;
            double angle =
                known ? adze_get(&a->pos, adze_row_offset(&rows, 0, row) + axis) * adze_get(&a->freq, i) : NAN;
            if (!a->double_angle)
                angle = (float)angle;
            if (fabsf((float)angle) > SINCOS_LIMIT)
                angle = NAN;
            const adze_value exact = adze_exact(angle);
            adze_value value[2] = {adze_fn(exact, cos(angle), 0, 1.25), adze_fn(exact, sin(angle), 0, 1.25)};
            for (int t = 0; t < 2; t++) {
                if (scale.v != 1)
                    value[t] = adze_mul(value[t], scale);
                out[t][row * width + (a->columns == ADZE_TABLE_PAIRS ? 2 * i : i)] = value[t];
                if (a->columns != ADZE_TABLE_ONCE)
                    out[t][row * width + (a->columns == ADZE_TABLE_PAIRS ? 2 * i + 1 : n + i)] = value[t];
            }
        }
}

ADZE_KERNELS(rope_table)

const adze_op adze_op_rope_table = {"rope_table",
                                    sizeof(adze_rope_table_args),
                                    ADZE_FIRST_SIZE(rope_table, out_dtype),
                                    fields,
                                    validate,
                                    outputs,
                                    reference,
                                    kernels,
                                    NULL,
                                    NULL};

adze_status adze_rope_table(adze_stream stream, const adze_rope_table_args *args)
{
    return adze_dispatch(&adze_op_rope_table, stream, args);
}
