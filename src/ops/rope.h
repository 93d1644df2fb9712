/* rope.h - what rope and qk_norm_rope share: contract and definition. */
#ifndef ADZE_OPS_ROPE_H
#define ADZE_OPS_ROPE_H

#include "rotary.h"
#include "value.h"

static const adze_word rope_pairs[] = {{"half", ADZE_ROPE_HALF}, {"interleaved", ADZE_ROPE_INTERLEAVED}, {NULL, 0}};

/* Checks that one of k's dimensions is q's; `at` counts from the last. */
static inline adze_status rope_same(const char *op, const char *what, const adze_tensor *q, const adze_tensor *k,
                                    int at)
{
    const int64_t has = k->shape[k->rank - at], due = q->shape[q->rank - at];
    ADZE_REQUIRE(has == due, ADZE_BAD_ARG, "%s: k has %s %lld, q has %lld", op, what, (long long)has, (long long)due);
    return ADZE_OK;
}

static adze_status rope_check_table(const char *op, const char *name, const adze_tensor *t,
                                    const adze_qk_norm_rope_args *a, int64_t seq, int64_t rotary_dim)
{
    ADZE_REQUIRE(t->dtype == ADZE_F32 || t->dtype == a->q.dtype, ADZE_BAD_DTYPE,
                 "%s: %s is %s, it must be f32 or q's %s", op, name, adze_dtype_name(t->dtype),
                 adze_dtype_name(a->q.dtype));
    ADZE_REQUIRE(t->rank == 2 || t->rank == 3, ADZE_BAD_ARG, "%s: %s has rank %d, it must be 2 or 3", op, name,
                 t->rank);
    const int64_t batch = a->q.rank == 4 ? a->q.shape[0] : 1, columns = t->shape[t->rank - 1];
    ADZE_REQUIRE(t->rank == 2 || t->shape[0] == batch || t->shape[0] == 1, ADZE_BAD_ARG,
                 "%s: %s has batch %lld, it must be %lld or 1", op, name, (long long)t->shape[0], (long long)batch);
    ADZE_REQUIRE(t->shape[t->rank - 2] == seq, ADZE_BAD_ARG, "%s: %s has %lld positions, q has %lld", op, name,
                 (long long)t->shape[t->rank - 2], (long long)seq);
    ADZE_REQUIRE(columns == rotary_dim || columns == rotary_dim / 2, ADZE_BAD_ARG,
                 "%s: %s has %lld columns, it must have rotary_dim %lld or its half", op, name, (long long)columns,
                 (long long)rotary_dim);
    return adze_check_rows(op, name, t);
}

static inline adze_status rope_validate(const char *op, const adze_qk_norm_rope_args *a)
{
    ADZE_CHECK(adze_check_float(op, "q", &a->q));
    ADZE_REQUIRE(a->q.rank == 3 || a->q.rank == 4, ADZE_BAD_ARG, "%s: q has rank %d, it must be 3 or 4", op,
                 a->q.rank);
    ADZE_CHECK(adze_check_rows(op, "q", &a->q));
    ADZE_CHECK(adze_check_range(op, "heads_first", a->heads_first, 0, 1));
    ADZE_CHECK(adze_check_range(op, "pairs", a->pairs, 0, 1));
    const int at_seq = a->heads_first ? 2 : 3;
    if (a->k.dtype != ADZE_NONE) {
        ADZE_REQUIRE(a->k.dtype == a->q.dtype, ADZE_BAD_DTYPE, "%s: k is %s, q is %s", op,
                     adze_dtype_name(a->k.dtype), adze_dtype_name(a->q.dtype));
        ADZE_REQUIRE(a->k.rank == a->q.rank, ADZE_BAD_ARG, "%s: k has rank %d, q has %d", op, a->k.rank, a->q.rank);
        ADZE_CHECK(a->q.rank == 4 ? rope_same(op, "batch", &a->q, &a->k, 4) : ADZE_OK);
        ADZE_CHECK(rope_same(op, "seq", &a->q, &a->k, at_seq));
        ADZE_CHECK(rope_same(op, "head_dim", &a->q, &a->k, 1));
        ADZE_CHECK(adze_check_rows(op, "k", &a->k));
    }
    const int64_t head_dim = a->q.shape[a->q.rank - 1], rotary_dim = a->rotary_dim ? a->rotary_dim : head_dim;
    ADZE_REQUIRE(rotary_dim >= 0 && rotary_dim <= head_dim && rotary_dim % 2 == 0, ADZE_BAD_ARG,
                 "%s: rotary_dim is %lld, it must be even and at most head_dim %lld", op, (long long)rotary_dim,
                 (long long)head_dim);
    ADZE_CHECK(rope_check_table(op, "cos", &a->cos, a, a->q.shape[a->q.rank - at_seq], rotary_dim));
    ADZE_CHECK(rope_check_table(op, "sin", &a->sin, a, a->q.shape[a->q.rank - at_seq], rotary_dim));
    ADZE_REQUIRE(a->sin.dtype == a->cos.dtype, ADZE_BAD_DTYPE, "%s: sin is %s, cos is %s", op,
                 adze_dtype_name(a->sin.dtype), adze_dtype_name(a->cos.dtype));
    int same = a->sin.rank == a->cos.rank;
    for (int d = 0; same && d < a->cos.rank; d++)
        same = a->sin.shape[d] == a->cos.shape[d];
    ADZE_REQUIRE(same, ADZE_BAD_ARG, "%s: sin and cos have different shapes", op);
    return ADZE_OK;
}

/* 1 / sqrt(mean of squares + eps) over `heads` rows of x. A kernel may add the heads one after another. */
static adze_value rope_norm(const adze_rotary *r, const adze_tensor *x, int64_t at, int64_t head_stride,
                            int64_t heads)
{
    double sum = 0, error = 0;
    const int64_t n = heads * r->head_dim;
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < r->head_dim; i++) {
            const adze_value v = adze_element(x, at + h * head_stride + i), square = adze_mul(v, v);
            sum += square.v, error += square.e;
        }
    adze_value total = adze_summed(n, sum, sum, error);
    total.e += ADZE_U * (double)(heads - 1) * (sum + error);
    return adze_rsqrt(adze_add(adze_div(total, adze_exact((double)n)), adze_exact(r->eps)));
}

/* A normalised and weighted element. */
static adze_value rope_value(const adze_rotary *r, const adze_rotary_tensor *tensor, adze_value v, adze_value scale,
                             int64_t weight_at)
{
    v = adze_rounded_if(r->rounding & ADZE_ROUND_NORM, r->dtype, adze_mul(v, scale));
    if (tensor->weight) {
        const adze_tensor weight = {.data = (void *)tensor->weight, .dtype = tensor->weight_dtype};
        v = adze_mul(v, adze_add(adze_element(&weight, weight_at), adze_exact(r->weight_offset)));
    }
    return adze_rounded_if(r->rounding & (ADZE_ROUND_VALUE | ADZE_ROUND_STEPS), r->dtype, v);
}

/* x * c + y * s, each product rounded when the model does so. */
static adze_value rope_turn(const adze_rotary *r, adze_value x, adze_value c, adze_value y, adze_value s)
{
    const int steps = r->rounding & ADZE_ROUND_STEPS;
    return adze_add(adze_rounded_if(steps, r->dtype, adze_mul(x, c)),
                    adze_rounded_if(steps, r->dtype, adze_mul(y, s)));
}

/* Rotates one row in place; cos_at and sin_at are where the tables of its position begin. */
static void rope_rotate(const adze_rotary *r, adze_value *y, int64_t cos_at, int64_t sin_at)
{
    const adze_tensor cos = {.data = (void *)r->cos, .dtype = r->table_dtype};
    const adze_tensor sin = {.data = (void *)r->sin, .dtype = r->table_dtype};
    const int64_t half = r->rotary_dim / 2;
    for (int64_t p = 0; p < half; p++) {
        const int64_t i = r->pairs == ADZE_ROPE_HALF ? p : 2 * p, j = r->pairs == ADZE_ROPE_HALF ? p + half : i + 1;
        const int64_t ti = r->once ? p : i, tj = r->once ? p : j;
        const adze_value a = y[i], b = y[j], minus_b = {-b.v, b.e};
        y[i] = rope_turn(r, a, adze_element(&cos, cos_at + ti), minus_b, adze_element(&sin, sin_at + ti));
        y[j] = rope_turn(r, b, adze_element(&cos, cos_at + tj), a, adze_element(&sin, sin_at + tj));
    }
}

/* `rows`: NULL, or the row of the tables for each token of the batch. */
static void rope_reference(const adze_rotary *r, adze_value *const *out, int normed, const int64_t *rows)
{
    for (int k = 0; k < 2; k++) {
        const adze_rotary_tensor *tensor = &r->qk[k];
        const adze_tensor x = {.data = (void *)tensor->x, .dtype = r->dtype};
        const int64_t heads = out[k] ? r->batch * r->seq * tensor->heads : 0;
        for (int64_t row = 0; row < heads; row++) {
            const int64_t b = row / (r->seq * tensor->heads), in = row % (r->seq * tensor->heads);
            const int64_t s = r->heads_first ? in % r->seq : in / tensor->heads;
            const int64_t h = r->heads_first ? in / r->seq : in % tensor->heads;
            const int64_t token = b * tensor->x_stride[0] + s * tensor->x_stride[1],
                          at = token + h * tensor->x_stride[2];
            adze_value *y = out[k] + row * r->head_dim, scale = {1, 0};
            if (normed)
                scale = r->across_heads ? rope_norm(r, &x, token, tensor->x_stride[2], tensor->heads)
                                        : rope_norm(r, &x, at, 0, 1);
            for (int64_t i = 0; i < r->head_dim; i++) {
                y[i] = adze_element(&x, at + i);
                if (normed)
                    y[i] = rope_value(r, tensor, y[i], scale, (r->across_heads ? h * r->head_dim : 0) + i);
            }
            const int64_t batch = rows ? 0 : b, at_row = rows ? rows[b * r->seq + s] : s;
            rope_rotate(r, y, batch * r->cos_stride[0] + at_row * r->cos_stride[1],
                        batch * r->sin_stride[0] + at_row * r->sin_stride[1]);
        }
    }
}

#endif
