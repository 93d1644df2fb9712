/* gemm: the contract, the definition, and the kernels. */
#include "ops/act.h"
#include "ops/quantised.h"

#include <stdlib.h>
#include <string.h>

static const adze_word norm_words[] = {{"rms", ADZE_NORM_RMS}, {"layer", ADZE_NORM_LAYER}, {NULL, 0}};

static const adze_field fields[] = {
    ADZE_OUTPUT(gemm, ADZE_OUT, out, ADZE_IN_PLACE(gemm, residual), 0, 0),
    ADZE_OUTPUT(gemm, ADZE_OUT_IF, out2, 0, 0, 0),
    ADZE_OUTPUT(gemm, ADZE_OUT_IF, out3, 0, 0, 0),
    ADZE_FIELD(gemm, ADZE_IN, x),
    ADZE_FIELD(gemm, ADZE_IN, w),
    ADZE_FIELD(gemm, ADZE_OPTIONAL, w2),
    ADZE_FIELD(gemm, ADZE_OPTIONAL, w3),
    ADZE_FIELD(gemm, ADZE_OPTIONAL, bias),
    ADZE_FIELD(gemm, ADZE_OPTIONAL, bias2),
    ADZE_FIELD(gemm, ADZE_OPTIONAL, bias3),
    ADZE_FIELD(gemm, ADZE_OPTIONAL, norm_weight),
    ADZE_FIELD(gemm, ADZE_OPTIONAL, norm_bias),
    ADZE_FIELD(gemm, ADZE_OPTIONAL, residual),
    ADZE_FIELD(gemm, ADZE_OPTIONAL, gate),
    ADZE_FIELD(gemm, ADZE_FLOAT, eps),
    ADZE_FIELD(gemm, ADZE_FLOAT, weight_offset),
    ADZE_WORDS(gemm, norm, norm_words),
    ADZE_WORDS(gemm, act, act_words),
    ADZE_FIELD(gemm, ADZE_INT, glu),
    ADZE_FIELD(gemm, ADZE_INT, separate),
    ADZE_FIELD(gemm, ADZE_INT, rounding),
    ADZE_FIELD(gemm, ADZE_INT, out_dtype),
    ADZE_FIELD(gemm, ADZE_OPTIONAL, w_scale),
    ADZE_FIELD(gemm, ADZE_OPTIONAL, w2_scale),
    ADZE_FIELD(gemm, ADZE_OPTIONAL, w3_scale),
    ADZE_FIELD(gemm, ADZE_OPTIONAL, w_zero),
    ADZE_FIELD(gemm, ADZE_OPTIONAL, w2_zero),
    ADZE_FIELD(gemm, ADZE_OPTIONAL, w3_zero),
    ADZE_FIELD(gemm, ADZE_INT, group),
    ADZE_FIELD(gemm, ADZE_INT, group_rows),
    ADZE_WORDS(gemm, format, format_words),
    ADZE_FIELD(gemm, ADZE_OPTIONAL, x_scale),
    ADZE_FIELDS_END,
};

/* ---- The contract ---- */

static int64_t k_of(const adze_gemm_args *a)
{
    return a->x.shape[a->x.rank - 1];
}

/* The dtype of what is not quantised: x's, or out's where x is quantised. */
static int float_dtype(const adze_gemm_args *a)
{
    return !is_quantised(a->x.dtype) ? a->x.dtype : a->out_dtype ? a->out_dtype : ADZE_F32;
}
static adze_tensor float_x(const adze_gemm_args *a)
{
    adze_tensor x = a->x;
    x.dtype = float_dtype(a);
    return x;
}

static quantised quantised_of(const adze_gemm_args *a, int i)
{
    static const char *const names[] = {"w", "w2", "w3"};
    const adze_tensor *const w[] = {&a->w, &a->w2, &a->w3};
    const adze_tensor *const scale[] = {&a->w_scale, &a->w2_scale, &a->w3_scale};
    const adze_tensor *const zero[] = {&a->w_zero, &a->w2_zero, &a->w3_zero};
    const int64_t k = k_of(a), group = a->group ? a->group : k > 0 ? k : 1;
    return (quantised){names[i],       w[i], scale[i], zero[i],
                       w[i]->shape[0], k,    group,    a->group_rows ? a->group_rows : 1};
}

static adze_status check_weight(const adze_gemm_args *a, int i)
{
    static const char *const bias_names[] = {"bias", "bias2", "bias3"};
    static const char *const scale_names[] = {"w_scale", "w2_scale", "w3_scale"};
    static const char *const zero_names[] = {"w_zero", "w2_zero", "w3_zero"};
    const adze_tensor *const biases[] = {&a->bias, &a->bias2, &a->bias3}, *bias = biases[i];
    const quantised q = quantised_of(a, i);
    const adze_tensor *w = q.w;
    const int fewer = is_quantised(w->dtype);
    ADZE_REQUIRE(fewer || !q.scale->dtype, ADZE_BAD_ARG, "gemm: %s is given, %s is not quantised", scale_names[i],
                 q.name);
    ADZE_REQUIRE(fewer || !q.zero->dtype, ADZE_BAD_ARG, "gemm: %s is given, %s is not quantised", zero_names[i],
                 q.name);
    if (!w->dtype) {
        ADZE_REQUIRE(!bias->dtype, ADZE_BAD_ARG, "gemm: %s is given without %s", bias_names[i], q.name);
        return ADZE_OK;
    }
    ADZE_REQUIRE(!is_quantised(a->x.dtype) || w->dtype == a->x.dtype, ADZE_BAD_DTYPE,
                 "gemm: %s is %s, it must be %s as x", q.name, adze_dtype_name(w->dtype),
                 adze_dtype_name(a->x.dtype));
    ADZE_REQUIRE(w->dtype == a->x.dtype || fewer, ADZE_BAD_DTYPE,
                 "gemm: %s is %s, it must be x's %s, i8, f8e4m3, or u8 in a format", q.name,
                 adze_dtype_name(w->dtype), adze_dtype_name(a->x.dtype));
    ADZE_REQUIRE(w->dtype == a->w.dtype, ADZE_BAD_DTYPE, "gemm: %s is %s, w is %s", q.name, adze_dtype_name(w->dtype),
                 adze_dtype_name(a->w.dtype));
    const int batch = i == 0 && !fewer;
    ADZE_REQUIRE(w->rank == 2 || (batch && w->rank == 3), ADZE_BAD_ARG, "gemm: %s has rank %d, it must be 2%s",
                 q.name, w->rank, batch ? ", or 3 with a batch" : "");
    ADZE_CHECK(adze_check_rows("gemm", q.name, w));
    const int64_t due = w->dtype == ADZE_U8 ? (q.k + 1) / 2 : q.k, got = w->shape[w->rank - 1];
    ADZE_REQUIRE(got == due, ADZE_BAD_ARG, "gemm: rows of %s have %lld elements, they must have %lld for x's %lld",
                 q.name, (long long)got, (long long)due, (long long)q.k);
    if (fewer)
        ADZE_CHECK(check_quantised("gemm", &q, !a->group, a->format, scale_names[i], zero_names[i]));
    const adze_tensor x = float_x(a);
    return adze_check_param("gemm", bias_names[i], bias, &x, w->shape[w->rank - 2]);
}

static adze_status check_batch(const adze_gemm_args *a)
{
    if (a->w.rank != 3)
        return ADZE_OK;
    ADZE_REQUIRE(a->x.rank == 3, ADZE_BAD_ARG, "gemm: x has rank %d, it must be 3 for w of rank 3", a->x.rank);
    ADZE_REQUIRE(a->x.shape[0] == a->w.shape[0], ADZE_BAD_ARG, "gemm: the batch of w is %lld, that of x %lld",
                 (long long)a->w.shape[0], (long long)a->x.shape[0]);
    ADZE_REQUIRE(!a->w2.dtype, ADZE_BAD_ARG, "gemm: w2 is given, w of rank 3 must be alone");
    ADZE_REQUIRE(!a->norm, ADZE_BAD_ARG, "gemm: norm is %d, it must be 0 for w of rank 3", a->norm);
    return ADZE_OK;
}

static adze_status check_weights(const adze_gemm_args *a)
{
    ADZE_CHECK(check_group("gemm", a->w.dtype, a->group, a->group_rows));
    ADZE_CHECK(adze_check_range("gemm", "format", a->format, ADZE_FORMAT_DTYPE, ADZE_FORMAT_U4));
    ADZE_REQUIRE(is_quantised(a->w.dtype) || (!a->group && !a->group_rows && !a->format), ADZE_BAD_ARG,
                 "gemm: group, group_rows or format is given, w is not quantised");
    for (int i = 0; i < 3; i++)
        ADZE_CHECK(check_weight(a, i));
    ADZE_REQUIRE(a->w2.dtype || !a->w3.dtype, ADZE_BAD_ARG, "gemm: w3 is given without w2");
    ADZE_CHECK(adze_check_range("gemm", "glu", a->glu, 0, 1));
    ADZE_CHECK(adze_check_range("gemm", "separate", a->separate, 0, 1));
    ADZE_REQUIRE(!a->glu || a->w2.dtype, ADZE_BAD_ARG, "gemm: glu is 1, it needs w2");
    ADZE_REQUIRE(!a->glu || !a->w3.dtype, ADZE_BAD_ARG, "gemm: w3 is given, glu has w and w2 only");
    ADZE_REQUIRE(!a->glu || a->w2.shape[0] == a->w.shape[0], ADZE_BAD_ARG,
                 "gemm: w2 has %lld rows, w has %lld: glu needs as many", (long long)a->w2.shape[0],
                 (long long)a->w.shape[0]);
    ADZE_REQUIRE(!a->separate || !a->glu, ADZE_BAD_ARG, "gemm: separate is 1, it must be 0 with glu");
    ADZE_REQUIRE(!a->separate || a->w2.dtype, ADZE_BAD_ARG, "gemm: separate is 1, it needs w2");
    return check_batch(a);
}

static adze_status check_norm(const adze_gemm_args *a)
{
    ADZE_CHECK(adze_check_range("gemm", "norm", a->norm, 0, ADZE_NORM_LAYER));
    ADZE_REQUIRE(a->norm || !a->norm_weight.dtype, ADZE_BAD_ARG, "gemm: norm_weight is given without norm");
    ADZE_REQUIRE(a->norm || !a->norm_bias.dtype, ADZE_BAD_ARG, "gemm: norm_bias is given without norm");
    ADZE_CHECK(adze_check_param("gemm", "norm_weight", &a->norm_weight, &a->x, k_of(a)));
    ADZE_CHECK(adze_check_param("gemm", "norm_bias", &a->norm_bias, &a->x, k_of(a)));
    ADZE_REQUIRE(a->eps >= 0, ADZE_BAD_ARG, "gemm: eps is %g, it must not be negative", (double)a->eps);
    return ADZE_OK;
}

static void outputs(void *args)
{
    adze_gemm_args *a = args;
    const adze_tensor *const w[] = {&a->w, &a->w2, &a->w3};
    adze_tensor *const out[] = {&a->out, &a->out2, &a->out3};
    const int last = a->x.rank - 1;
    for (int i = 0; i < 3; i++) {
        if (!w[i]->dtype || (i > 0 && a->glu))
            continue;
        adze_tensor *to = out[a->separate ? i : 0];
        const int64_t n = w[i]->shape[w[i]->rank - 2], before = i > 0 && !a->separate ? to->shape[last] : 0;
        adze_like(to, &a->x);
        to->dtype = a->out_dtype ? a->out_dtype : float_dtype(a);
        to->shape[last] = before + n;
    }
}

static adze_status check_residual(const adze_gemm_args *a)
{
    ADZE_REQUIRE(!a->gate.dtype || a->residual.dtype, ADZE_BAD_ARG, "gemm: gate is given without residual");
    if (!a->residual.dtype)
        return ADZE_OK;
    ADZE_REQUIRE(!a->separate, ADZE_BAD_ARG, "gemm: residual is given, it must be absent with separate");
    adze_gemm_args due = *a;
    due.out = (adze_tensor){0};
    outputs(&due);
    const adze_tensor *r = &a->residual;
    ADZE_REQUIRE(r->dtype == due.out.dtype, ADZE_BAD_DTYPE, "gemm: residual is %s, it must be %s as out",
                 adze_dtype_name(r->dtype), adze_dtype_name(due.out.dtype));
    ADZE_REQUIRE(r->rank == due.out.rank, ADZE_BAD_ARG, "gemm: residual has rank %d, it must have %d as out", r->rank,
                 due.out.rank);
    for (int d = 0; d < r->rank; d++)
        ADZE_REQUIRE(r->shape[d] == due.out.shape[d], ADZE_BAD_ARG,
                     "gemm: residual has %lld in dimension %d, it must have %lld as out", (long long)r->shape[d], d,
                     (long long)due.out.shape[d]);
    ADZE_CHECK(adze_check_rows("gemm", "residual", r));
    due.out.dtype = float_dtype(a);
    return adze_check_to("gemm", "gate", &a->gate, &due.out);
}

/* x, and its scales where it is quantised: one for each row, or one for all. */
static adze_status check_x(const adze_gemm_args *a)
{
    enum { K_MOST = (1 << 17) - 1 }; /* (-128)^2 times so much is less than 2^31 */
    const adze_tensor *s = &a->x_scale;
    const char *x_name = adze_dtype_name(a->x.dtype);
    const int is_float = a->x.dtype == ADZE_F32 || a->x.dtype == ADZE_F16 || a->x.dtype == ADZE_BF16;
    ADZE_REQUIRE(is_float || a->x.dtype == ADZE_I8 || a->x.dtype == ADZE_F8E4M3, ADZE_BAD_DTYPE,
                 "gemm: x is %s, it must be f32, f16, bf16, i8 or f8e4m3", x_name);
    ADZE_CHECK(adze_check_rows("gemm", "x", &a->x));
    ADZE_REQUIRE(!is_float || !s->dtype, ADZE_BAD_ARG, "gemm: x_scale is given, x is not quantised");
    if (is_float)
        return ADZE_OK;
    ADZE_REQUIRE(a->x.dtype != ADZE_I8 || k_of(a) <= K_MOST, ADZE_BAD_ARG,
                 "gemm: rows of x have %lld elements, they must have at most %d for x of i8", (long long)k_of(a),
                 K_MOST);
    ADZE_REQUIRE(!a->norm, ADZE_BAD_ARG, "gemm: norm is %d, it must be 0 for x of %s", a->norm, x_name);
    ADZE_REQUIRE(!a->group && a->group_rows <= 1, ADZE_BAD_ARG,
                 "gemm: group is %d and group_rows %d, w must have scales of whole rows for x of %s", a->group,
                 a->group_rows, x_name);
    ADZE_REQUIRE(s->dtype, ADZE_BAD_ARG, "gemm: x_scale is absent, x of %s needs it", x_name);
    ADZE_REQUIRE(s->dtype == ADZE_F32, ADZE_BAD_DTYPE, "gemm: x_scale is %s, it must be f32",
                 adze_dtype_name(s->dtype));
    ADZE_CHECK(adze_check_rows("gemm", "x_scale", s));
    if (s->rank == 1 && s->shape[0] == 1)
        return ADZE_OK;
    ADZE_REQUIRE(s->rank == a->x.rank - 1, ADZE_BAD_ARG,
                 "gemm: x_scale has rank %d, it must be [1] or x's shape without its last dimension", s->rank);
    for (int d = 0; d < s->rank; d++)
        ADZE_REQUIRE(s->shape[d] == a->x.shape[d], ADZE_BAD_ARG,
                     "gemm: x_scale has %lld in dimension %d, it must have %lld as x", (long long)s->shape[d], d,
                     (long long)a->x.shape[d]);
    return ADZE_OK;
}

static adze_status validate(const void *args)
{
    const adze_gemm_args *a = args;
    ADZE_CHECK(check_x(a));
    const int bytes = is_quantised(a->x.dtype), to = a->out_dtype;
    ADZE_REQUIRE(to == 0 || to == ADZE_F32 || (bytes ? to == ADZE_F16 || to == ADZE_BF16 : to == a->x.dtype),
                 ADZE_BAD_DTYPE, "gemm: out_dtype is %s, it must be %s", adze_dtype_name(to),
                 bytes ? "f32, f16 or bf16 for quantised x" : "x's dtype or f32");
    ADZE_CHECK(check_weights(a));
    ADZE_CHECK(check_norm(a));
    ADZE_CHECK(adze_check_range("gemm", "act", a->act, ADZE_ACT_NONE, ADZE_ACT_SIGMOID));
    ADZE_CHECK(adze_check_bits("gemm", "rounding", a->rounding, ADZE_ROUND_NORM | ADZE_ROUND_STEPS));
    ADZE_REQUIRE(!a->reserved, ADZE_BAD_ARG, "gemm: reserved is %d, it must be 0", a->reserved);
    return check_residual(a);
}

/* ---- The definition ---- */

enum { X, RESIDUAL, GATE, X_SCALE, TENSORS };

typedef struct definition {
    const adze_gemm_args *a;
    adze_sums sums;
    adze_rows rows;
    int64_t k, per_batch; /* rows that share a w */
    adze_value **p;       /* by row: p(x), made when it is asked for */
    double *w[3];         /* by weight: the row that was read last, */
    int64_t w_row[3];     /* and its number */
} definition;

/* In a project that was made from this op (`adze new op`), the list of ops does not declare them. */
extern const adze_op adze_op_rms_norm, adze_op_layer_norm;

/* p(x) of a row. */
static const adze_value *prologue(definition *d, int64_t row)
{
    const adze_gemm_args *a = d->a;
    if (d->p[row])
        return d->p[row];
    adze_value *p = d->p[row] = calloc((size_t)d->k + 1, sizeof *p);
    const int64_t at = adze_row_offset(&d->rows, X, row);
    if (!a->norm) {
        for (int64_t i = 0; i < d->k; i++)
            p[i] = adze_element(&a->x, at + i);
        return p;
    }
    adze_norm_args norm = {.x = {.rank = 1, .dtype = a->x.dtype, .shape = {d->k}, .stride = {1}},
                           .weight = a->norm_weight,
                           .bias = a->norm_bias,
                           .eps = a->eps,
                           .weight_offset = a->weight_offset,
                           .rounding = a->rounding & ADZE_ROUND_NORM};
    norm.x.data = (char *)a->x.data + at * (int64_t)adze_dtype_size(a->x.dtype);
    adze_value *const out[] = {p, NULL, NULL};
    (a->norm == ADZE_NORM_RMS ? &adze_op_rms_norm : &adze_op_layer_norm)->reference(&norm, out);
    for (int64_t i = 0; i < d->k; i++)
        p[i] = adze_rounded(a->x.dtype, p[i]);
    return p;
}

static const double *weight_row(definition *d, int i, const adze_tensor *w, int64_t row, int64_t column)
{
    const int64_t batch = w->rank == 3 ? row / d->per_batch : 0, of_all = batch * w->shape[w->rank - 2] + column;
    const int64_t at = batch * w->stride[0] + column * w->stride[w->rank - 2];
    if (!d->w[i])
        d->w[i] = calloc((size_t)d->k + 1, sizeof **d->w);
    else if (d->w_row[i] == of_all)
        return d->w[i];
    const quantised q = quantised_of(d->a, i);
    const int scaled = is_quantised(w->dtype) && !is_quantised(d->a->x.dtype);
    for (int64_t j = 0; j < d->k; j++)
        d->w[i][j] = scaled ? weight_at(&q, column, j) : adze_get(w, at + j);
    d->w_row[i] = of_all;
    return d->w[i];
}

static adze_value settled(adze_value v)
{
    return isfinite(v.v) ? v : adze_exact(v.v); /* an infinity is exact */
}

/* The product of stored numbers, before it is scaled: a sum of i8 is exact until it is a float. */
static adze_value scaled_sum(const definition *d, const adze_dot *dot, int weight, int64_t row, int64_t column)
{
    const quantised q = quantised_of(d->a, weight);
    const double x_scale = adze_get(&d->a->x_scale, adze_row_offset(&d->rows, X_SCALE, row));
    adze_value y =
        d->a->x.dtype == ADZE_I8 ? (adze_value){dot->sum, ADZE_U * fabs(dot->sum)} : adze_dotted(d->sums, dot);
    y = adze_mul(settled(y), adze_exact(x_scale));
    return adze_mul(settled(y), adze_exact(of_group(q.scale, &q, column, 0)));
}

static adze_value product(definition *d, int weight, int64_t row, int64_t column)
{
    const adze_tensor *const w[] = {&d->a->w, &d->a->w2, &d->a->w3};
    const adze_tensor *const biases[] = {&d->a->bias, &d->a->bias2, &d->a->bias3}, *bias = biases[weight];
    const adze_value *p = prologue(d, row);
    const double *v = weight_row(d, weight, w[weight], row, column);
    adze_dot dot = {0};
    for (int64_t i = 0; i < d->k; i++)
        adze_dot_add(&dot, p[i].v, p[i].e, v[i]);
    const int scaled = is_quantised(d->a->x.dtype);
    adze_value y = scaled ? scaled_sum(d, &dot, weight, row, column) : adze_dotted(d->sums, &dot);
    if (is_quantised(w[weight]->dtype) && !scaled && isfinite(y.v)) {
        /* A weight and its product are rounded once more, or the sum of each group is, as it is scaled and added. */
        const quantised q = quantised_of(d->a, weight);
        const int64_t groups = (d->k + q.group - 1) / q.group;
        y.e += ADZE_U * (double)(groups + 3) * (dot.magnitude + dot.error);
    }
    if (bias->dtype)
        y = adze_add(y, adze_element(bias, column));
    return settled(adze_rounded_if(d->a->rounding & ADZE_ROUND_STEPS, float_dtype(d->a), settled(y)));
}

static adze_value element(definition *d, int output, int64_t row, int64_t column)
{
    const adze_gemm_args *a = d->a;
    const adze_tensor *const w[] = {&a->w, &a->w2, &a->w3};
    const int steps = a->rounding & ADZE_ROUND_STEPS, dtype = float_dtype(a);
    int i = output;
    int64_t own = column;
    while (i < 2 && !a->separate && !a->glu && own >= w[i]->shape[w[i]->rank - 2])
        own -= w[i]->shape[w[i]->rank - 2], i++;
    adze_value y = product(d, i, row, own);
    const int act = a->glu && !a->act ? ADZE_ACT_SILU : a->act;
    if (act)
        y = settled(adze_rounded_if(steps, dtype, settled(act_value(act, y))));
    if (a->glu)
        y = settled(adze_rounded_if(steps, dtype, settled(adze_mul(y, product(d, 1, row, own)))));
    if (a->gate.dtype) {
        const adze_value gate = adze_element(&a->gate, adze_row_offset(&d->rows, GATE, row) + column);
        y = settled(adze_rounded_if(steps, dtype, settled(adze_mul(gate, y))));
    }
    if (a->residual.dtype)
        y = adze_add(adze_element(&a->residual, adze_row_offset(&d->rows, RESIDUAL, row) + column), y);
    return settled(y);
}

/* index NULL: all elements, by columns, so that a row of w is read once. */
static void reference_at(const void *args, int sums, int output, int64_t n, const int64_t *index, adze_value *out)
{
    const adze_gemm_args *a = args;
    const adze_tensor x_scale = adze_by_rows(&a->x_scale);
    const adze_tensor *const tensors[TENSORS] = {&a->x, &a->residual, &a->gate, &x_scale};
    const adze_tensor *to = output == 0 ? &a->out : output == 1 ? &a->out2 : &a->out3;
    const int64_t columns = to->shape[to->rank - 1];
    definition d = {.a = a, .sums = (adze_sums)sums, .k = k_of(a), .per_batch = a->w.rank == 3 ? a->x.shape[1] : 1};
    adze_rows_init(&d.rows, &a->x, TENSORS, tensors);
    d.p = calloc((size_t)d.rows.count + 1, sizeof *d.p); /* NOLINT(bugprone-sizeof-expression): pointers */
    for (int64_t i = 0; i < n && index; i++)
        out[i] = element(&d, output, index[i] / columns, index[i] % columns);
    for (int64_t column = 0; column < columns && !index; column++)
        for (int64_t row = 0; row < d.rows.count; row++)
            out[row * columns + column] = element(&d, output, row, column);
    for (int64_t row = 0; row < d.rows.count; row++)
        free(d.p[row]);
    free(d.p);
    for (int i = 0; i < 3; i++)
        free(d.w[i]);
}

enum { HOPPER = 90 };
static int sums_of(const adze_kernel *kernel)
{
    if (!kernel || kernel->on_cuda)
        return kernel && kernel->to == HOPPER ? ADZE_SUMS_F8 : ADZE_SUMS_TENSOR;
    return kernel->from & (ADZE_CPU_BF16 | ADZE_CPU_AMX) ? ADZE_SUMS_PAIRS : ADZE_SUMS_BLOCKS;
}

static void reference(const void *args, adze_value *const *out)
{
    const adze_gemm_args *a = args;
    const adze_tensor *const outs[] = {&a->out, &a->out2, &a->out3};
    for (int i = 0; i < 3; i++)
        if (out[i])
            reference_at(args, sums_of(NULL), i, adze_count(outs[i]), NULL, out[i]);
}

static const adze_samples samples = {sums_of, reference_at};

ADZE_CPU_DECLARE(gemm)
ADZE_CUDA_DECLARE(gemm)
adze_status adze_gemm_cpu_bf16(adze_stream, const void *);
int adze_gemm_cpu_bf16_accepts(adze_stream, const void *);
adze_status adze_gemm_cpu_amx(adze_stream, const void *);
int adze_gemm_cpu_amx_accepts(adze_stream, const void *);
adze_status adze_gemm_cpu_amx_int8(adze_stream, const void *);
int adze_gemm_cpu_amx_int8_accepts(adze_stream, const void *);
adze_status adze_gemm_cpu_vnni(adze_stream, const void *);
int adze_gemm_cpu_vnni_accepts(adze_stream, const void *);
adze_status adze_gemm_cuda_lt(adze_stream, const void *);
int adze_gemm_cuda_lt_accepts(adze_stream, const void *);
adze_status adze_gemm_cuda_lt_f8(adze_stream, const void *);
int adze_gemm_cuda_lt_f8_accepts(adze_stream, const void *);
adze_status adze_gemm_cuda_f8(adze_stream, const void *);
int adze_gemm_cuda_f8_accepts(adze_stream, const void *);
static const adze_kernel kernels[] = {
#if ADZE_CUDA
    {"cuda_lt", 1, 75, ADZE_ANY_SM, adze_gemm_cuda_lt_accepts, adze_gemm_cuda_lt, NULL, 0},
    {"cuda_lt_f8", 1, HOPPER, HOPPER, adze_gemm_cuda_lt_f8_accepts, adze_gemm_cuda_lt_f8, NULL, 0},
    {"cuda_f8", 1, HOPPER, HOPPER, adze_gemm_cuda_f8_accepts, adze_gemm_cuda_f8, NULL, 0},
#endif
    ADZE_CUDA_ROW(gemm)
#if defined(__aarch64__)
        {"cpu_bf16", 0, ADZE_CPU_BF16, 0, adze_gemm_cpu_bf16_accepts, adze_gemm_cpu_bf16, NULL, 0},
#elif defined(__x86_64__)
        {"cpu_amx", 0, ADZE_CPU_AMX, 0, adze_gemm_cpu_amx_accepts, adze_gemm_cpu_amx, NULL, 0},
    {"cpu_amx_int8", 0, ADZE_CPU_AMX_INT8, 0, adze_gemm_cpu_amx_int8_accepts, adze_gemm_cpu_amx_int8, NULL, 0},
    {"cpu_vnni", 0, ADZE_CPU_VNNI, 0, adze_gemm_cpu_vnni_accepts, adze_gemm_cpu_vnni, NULL, 0},
#endif
    ADZE_CPU_ROWS(gemm) ADZE_KERNELS_END};

/* On CUDA it has x's norm, products that are not finished, and what cuBLASLt needs. */
ADZE_CUDA_SCRATCH(gemm)

const adze_op adze_op_gemm = {"gemm",
                              sizeof(adze_gemm_args),
                              ADZE_FIRST_SIZE(gemm, reserved),
                              fields,
                              validate,
                              outputs,
                              reference,
                              kernels,
                              scratch,
                              &samples};

adze_status adze_gemm(adze_stream stream, const adze_gemm_args *args)
{
    return adze_dispatch(&adze_op_gemm, stream, args);
}

adze_status adze_gemm_scratch(adze_stream stream, const adze_gemm_args *args, size_t *bytes)
{
    return adze_dispatch_scratch(&adze_op_gemm, stream, args, bytes);
}
