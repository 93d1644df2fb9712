/* kv_append: the contract, the definition, and the kernels. */
#include "kv_cache.h"
#include "ops/rope.h"

#include <stdlib.h>

static const adze_field fields[] = {
    ADZE_OUTPUT(kv_append, ADZE_OUT_IF, q_out, ADZE_IN_PLACE(kv_append, q), 0, 0),
    ADZE_FIELD(kv_append, ADZE_INOUT, k_cache),
    ADZE_FIELD(kv_append, ADZE_INOUT, v_cache),
    ADZE_FIELD(kv_append, ADZE_INOUT_OPTIONAL, k_scale),
    ADZE_FIELD(kv_append, ADZE_INOUT_OPTIONAL, v_scale),
    ADZE_FIELD(kv_append, ADZE_OPTIONAL, q),
    ADZE_FIELD(kv_append, ADZE_IN, k),
    ADZE_FIELD(kv_append, ADZE_IN, v),
    ADZE_FIELD(kv_append, ADZE_OPTIONAL, lengths),
    ADZE_FIELD(kv_append, ADZE_OPTIONAL, positions),
    ADZE_FIELD(kv_append, ADZE_OPTIONAL, block_table),
    ADZE_FIELD(kv_append, ADZE_OPTIONAL, q_weight),
    ADZE_FIELD(kv_append, ADZE_OPTIONAL, k_weight),
    ADZE_FIELD(kv_append, ADZE_OPTIONAL, cos),
    ADZE_FIELD(kv_append, ADZE_OPTIONAL, sin),
    ADZE_FIELD(kv_append, ADZE_FLOAT, eps),
    ADZE_FIELD(kv_append, ADZE_FLOAT, weight_offset),
    ADZE_FIELD(kv_append, ADZE_INT, norm),
    ADZE_FIELD(kv_append, ADZE_INT, across_heads),
    ADZE_WORDS(kv_append, pairs, rope_pairs),
    ADZE_FIELD(kv_append, ADZE_INT, rotary_dim),
    ADZE_FIELD(kv_append, ADZE_INT, table_by_slot),
    ADZE_FIELD(kv_append, ADZE_INT, rounding),
    ADZE_FIELDS_END,
};

/* ---- The contract ---- */

/* [batch, heads, m, d], of which `heads` and `d` of -1 may be any. */
static adze_status check_tokens(const char *name, const adze_tensor *t, const adze_tensor *k, int64_t heads,
                                int64_t d)
{
    ADZE_REQUIRE(t->dtype == k->dtype, ADZE_BAD_DTYPE, "kv_append: %s is %s, k is %s", name,
                 adze_dtype_name(t->dtype), adze_dtype_name(k->dtype));
    ADZE_REQUIRE(t->rank == 4, ADZE_BAD_ARG, "kv_append: %s has rank %d, it must be 4", name, t->rank);
    const int64_t due[4] = {k->shape[0], heads, k->shape[2], d};
    for (int i = 0; i < 4; i++)
        ADZE_REQUIRE(due[i] < 0 || t->shape[i] == due[i], ADZE_BAD_ARG,
                     "kv_append: %s has %lld in dimension %d, it must have %lld, as k", name, (long long)t->shape[i],
                     i, (long long)due[i]);
    return adze_check_rows("kv_append", name, t);
}

static int is_stored(int dtype)
{
    return dtype == ADZE_I8 || dtype == ADZE_F8E4M3;
}

static adze_status check_cache(const adze_kv_append_args *a, const char *name, const adze_tensor *t,
                               const adze_tensor *x)
{
    ADZE_REQUIRE(t->dtype == a->k.dtype || is_stored(t->dtype), ADZE_BAD_DTYPE,
                 "kv_append: %s is %s, it must be k's %s, i8 or f8e4m3", name, adze_dtype_name(t->dtype),
                 adze_dtype_name(a->k.dtype));
    ADZE_REQUIRE(t->dtype == a->k_cache.dtype, ADZE_BAD_DTYPE, "kv_append: %s is %s, k_cache is %s", name,
                 adze_dtype_name(t->dtype), adze_dtype_name(a->k_cache.dtype));
    ADZE_REQUIRE(t->rank == 4, ADZE_BAD_ARG, "kv_append: %s has rank %d, it must be 4", name, t->rank);
    ADZE_REQUIRE(t->shape[0] == a->k_cache.shape[0] && t->shape[2] == a->k_cache.shape[2], ADZE_BAD_ARG,
                 "kv_append: %s and k_cache have different shapes", name);
    ADZE_REQUIRE(a->block_table.dtype || t->shape[0] == a->k.shape[0], ADZE_BAD_ARG,
                 "kv_append: %s has batch %lld, k has %lld", name, (long long)t->shape[0], (long long)a->k.shape[0]);
    ADZE_REQUIRE(t->shape[1] == a->k.shape[1], ADZE_BAD_ARG, "kv_append: %s has %lld heads, k has %lld", name,
                 (long long)t->shape[1], (long long)a->k.shape[1]);
    ADZE_REQUIRE(t->shape[3] == x->shape[3], ADZE_BAD_ARG, "kv_append: %s has head_dim %lld, it must have %lld", name,
                 (long long)t->shape[3], (long long)x->shape[3]);
    ADZE_REQUIRE(!is_stored(t->dtype) || t->shape[3] <= ADZE_KV_STORED_DIM, ADZE_BAD_ARG,
                 "kv_append: %s of %s has head_dim %lld, it must be at most %d", name, adze_dtype_name(t->dtype),
                 (long long)t->shape[3], ADZE_KV_STORED_DIM);
    return adze_check_rows("kv_append", name, t);
}

static adze_status check_scale(const char *name, const adze_tensor *t, const adze_tensor *cache)
{
    ADZE_REQUIRE(is_stored(cache->dtype) == (t->dtype != ADZE_NONE), ADZE_BAD_ARG,
                 "kv_append: %s is %s, the cache is %s", name, t->dtype ? "given" : "absent",
                 adze_dtype_name(cache->dtype));
    if (!t->dtype)
        return ADZE_OK;
    ADZE_REQUIRE(t->dtype == ADZE_F32, ADZE_BAD_DTYPE, "kv_append: %s is %s, it must be f32", name,
                 adze_dtype_name(t->dtype));
    ADZE_REQUIRE(t->rank == 3, ADZE_BAD_ARG, "kv_append: %s has rank %d, it must be 3", name, t->rank);
    for (int d = 0; d < 3; d++)
        ADZE_REQUIRE(t->shape[d] == cache->shape[d], ADZE_BAD_ARG,
                     "kv_append: %s has %lld in dimension %d, the cache has %lld", name, (long long)t->shape[d], d,
                     (long long)cache->shape[d]);
    return adze_check_rows("kv_append", name, t);
}

static adze_status check_index(const char *name, const adze_tensor *t, int rank, int64_t batch, int64_t m)
{
    if (!t->dtype)
        return ADZE_OK;
    ADZE_REQUIRE(t->dtype == ADZE_I32, ADZE_BAD_DTYPE, "kv_append: %s is %s, it must be i32", name,
                 adze_dtype_name(t->dtype));
    ADZE_REQUIRE(t->rank == rank, ADZE_BAD_ARG, "kv_append: %s has rank %d, it must be %d", name, t->rank, rank);
    ADZE_REQUIRE(t->shape[0] == batch, ADZE_BAD_ARG, "kv_append: %s has batch %lld, k has %lld", name,
                 (long long)t->shape[0], (long long)batch);
    ADZE_REQUIRE(m < 0 || t->shape[1] == m, ADZE_BAD_ARG, "kv_append: %s has %lld tokens, k has %lld", name,
                 (long long)t->shape[1], (long long)m);
    return adze_check_rows("kv_append", name, t);
}

static adze_status check_weight(const adze_kv_append_args *a, const char *name, const adze_tensor *weight,
                                const adze_tensor *x)
{
    ADZE_REQUIRE(!weight->dtype || (a->norm && x->dtype), ADZE_BAD_ARG, "kv_append: %s is given without %s", name,
                 a->norm ? "q" : "norm");
    return adze_check_param("kv_append", name, weight, x, (a->across_heads ? x->shape[1] : 1) * x->shape[3]);
}

static adze_status check_tables(const adze_kv_append_args *a)
{
    ADZE_REQUIRE(!a->cos.dtype == !a->sin.dtype, ADZE_BAD_ARG, "kv_append: %s is given without %s",
                 a->cos.dtype ? "cos" : "sin", a->cos.dtype ? "sin" : "cos");
    const int64_t head_dim = a->k.shape[3], rotary_dim = a->rotary_dim ? a->rotary_dim : head_dim;
    ADZE_REQUIRE(a->cos.dtype || (!a->rotary_dim && !a->pairs && !a->table_by_slot), ADZE_BAD_ARG,
                 "kv_append: rotary_dim, pairs or table_by_slot is given without cos and sin");
    if (!a->cos.dtype)
        return ADZE_OK;
    ADZE_REQUIRE(rotary_dim >= 0 && rotary_dim <= head_dim && rotary_dim % 2 == 0, ADZE_BAD_ARG,
                 "kv_append: rotary_dim is %lld, it must be even and at most head_dim %lld", (long long)rotary_dim,
                 (long long)head_dim);
    ADZE_REQUIRE(!a->table_by_slot || a->cos.rank == 2, ADZE_BAD_ARG,
                 "kv_append: cos has rank %d, it must be 2 when table_by_slot is 1", a->cos.rank);
    adze_qk_norm_rope_args wide;
    memset(&wide, 0, sizeof wide);
    wide.q = a->k; /* the tables are those of its tokens */
    const int64_t seq = a->table_by_slot ? a->cos.shape[0] : a->k.shape[2];
    ADZE_CHECK(rope_check_table("kv_append", "cos", &a->cos, &wide, seq, rotary_dim));
    ADZE_CHECK(rope_check_table("kv_append", "sin", &a->sin, &wide, seq, rotary_dim));
    int same = a->sin.dtype == a->cos.dtype && a->sin.rank == a->cos.rank;
    for (int d = 0; same && d < a->cos.rank; d++)
        same = a->sin.shape[d] == a->cos.shape[d];
    ADZE_REQUIRE(same, ADZE_BAD_ARG, "kv_append: sin and cos have different shapes or dtypes");
    return ADZE_OK;
}

static adze_status validate(const void *args)
{
    const adze_kv_append_args *a = args;
    ADZE_CHECK(adze_check_float("kv_append", "k", &a->k));
    ADZE_CHECK(check_tokens("k", &a->k, &a->k, -1, -1));
    ADZE_CHECK(check_tokens("v", &a->v, &a->k, a->k.shape[1], -1));
    if (a->q.dtype)
        ADZE_CHECK(check_tokens("q", &a->q, &a->k, -1, a->k.shape[3]));
    ADZE_CHECK(check_cache(a, "k_cache", &a->k_cache, &a->k));
    ADZE_CHECK(check_cache(a, "v_cache", &a->v_cache, &a->v));
    ADZE_CHECK(check_scale("k_scale", &a->k_scale, &a->k_cache));
    ADZE_CHECK(check_scale("v_scale", &a->v_scale, &a->v_cache));
    ADZE_REQUIRE(!a->lengths.dtype != !a->positions.dtype, ADZE_BAD_ARG,
                 "kv_append: lengths and positions are %s, one of them must be given",
                 a->lengths.dtype ? "both given" : "absent");
    ADZE_CHECK(check_index("lengths", &a->lengths, 1, a->k.shape[0], -1));
    ADZE_CHECK(check_index("positions", &a->positions, 2, a->k.shape[0], a->k.shape[2]));
    ADZE_CHECK(check_index("block_table", &a->block_table, 2, a->k.shape[0], -1));
    ADZE_CHECK(adze_check_range("kv_append", "norm", a->norm, 0, 1));
    ADZE_CHECK(adze_check_range("kv_append", "across_heads", a->across_heads, 0, 1));
    ADZE_CHECK(adze_check_range("kv_append", "pairs", a->pairs, 0, 1));
    ADZE_CHECK(adze_check_range("kv_append", "table_by_slot", a->table_by_slot, 0, 1));
    ADZE_CHECK(check_weight(a, "q_weight", &a->q_weight, &a->q));
    ADZE_CHECK(check_weight(a, "k_weight", &a->k_weight, &a->k));
    ADZE_CHECK(check_tables(a));
    ADZE_REQUIRE(a->eps >= 0, ADZE_BAD_ARG, "kv_append: eps is %g, it must not be negative", (double)a->eps);
    return adze_check_bits("kv_append", "rounding", a->rounding,
                           a->norm ? ADZE_ROUND_NORM | ADZE_ROUND_VALUE | ADZE_ROUND_STEPS : ADZE_ROUND_STEPS);
}

static void outputs(void *args)
{
    adze_kv_append_args *a = args;
    if (a->q.dtype)
        adze_like(&a->q_out, &a->q);
}

/* ---- The definition ---- */

/* A row that is stored in fewer bits. The largest |x| is known to within the errors of the elements; where none has
   an error, everything is exact. */
static void store_row(int dtype, int x_dtype, int64_t n, adze_value *x, adze_value *scale)
{
    const double most_stored = dtype == ADZE_I8 ? 127 : 448;
    double most = 0, low = 0, high = 0;
    for (int64_t i = 0; i < n; i++) {
        x[i] = adze_rounded(x_dtype, x[i]);
        if (x_dtype == ADZE_F32 && x[i].e > 0)
            x[i].e += ADZE_U * (fabs(x[i].v) + x[i].e); /* of the float that is stored */
        most = fmax(most, fabs(x[i].v));
        low = fmax(low, fabs(x[i].v) - x[i].e);
        high = fmax(high, fabs(x[i].v) + x[i].e);
    }
    const double off = fmax(high - most, most - low);
    *scale = adze_exact((double)(float)(most / most_stored));
    if (off > 0)
        scale->e = off / most_stored + 2 * ADZE_U * scale->v;
    for (int64_t i = 0; i < n; i++) {
        adze_value q = adze_exact(0);
        if (scale->e > 0 || x[i].e > 0)
            q = adze_div(x[i], *scale);
        else if (scale->v != 0)
            q = adze_exact((double)(float)(x[i].v / scale->v));
        const double at[3] = {q.v, q.v - q.e, q.v + q.e};
        double stored[3];
        for (int j = 0; j < 3; j++)
            stored[j] = adze_round_to(dtype, fmin(fmax(at[j], -most_stored), most_stored));
        x[i] = (adze_value){stored[0], fmax(stored[0] - stored[1], stored[2] - stored[0])};
    }
}

/* The rows [batch, kv_heads, m, d] of k or v in `from`, to their places in the cache and its scales. */
static void scatter(const adze_kv_append_args *a, const adze_tensor *x, const adze_tensor *cache, adze_value *from,
                    adze_value *to, adze_value *scales)
{
    const int64_t heads = x->shape[1], m = x->shape[2], d = x->shape[3], rows = cache->shape[2];
    for (int64_t at = 0; at < x->shape[0] * heads * m; at++) {
        const int64_t b = at / (heads * m), h = at / m % heads, t = at % m;
        const adze_kv_place place = adze_kv_place_of(a, b, adze_kv_slot(a, b, t));
        if (place.entry < 0)
            continue;
        const int64_t row = (place.entry * heads + h) * rows + place.row;
        adze_value scale = {0, 0};
        if (is_stored(cache->dtype))
            store_row(cache->dtype, x->dtype, d, from + at * d, &scale);
        memcpy(to + row * d, from + at * d, (size_t)d * sizeof *to);
        if (scales)
            scales[row] = scale;
    }
}

static void reference(const void *args, adze_value *const *out)
{
    const adze_kv_append_args *a = args;
    const adze_rotary r = adze_kv_rotary(a);
    const int64_t tokens = r.batch * r.seq, n_k = adze_count(&a->k), n_v = adze_count(&a->v);
    const int64_t table_rows = a->table_by_slot ? a->cos.shape[0] : 0;
    adze_value *k = calloc((size_t)n_k + 1, sizeof *k), *v = calloc((size_t)n_v + 1, sizeof *v);
    int64_t *rows = calloc((size_t)tokens + 1, sizeof *rows);
    for (int64_t t = 0; t < tokens && k && v && rows; t++) {
        rows[t] = adze_kv_slot(a, t / r.seq, t % r.seq);
        if (rows[t] < 0 || rows[t] >= table_rows)
            rows[t] = 0; /* of a token that is NaN, below */
    }
    adze_value *const turned[2] = {out[0], k};
    if (k && v && rows && (table_rows || !a->table_by_slot)) {
        rope_reference(&r, turned, a->norm, table_rows ? rows : NULL);
        for (int64_t i = 0; i < n_v; i++) {
            const int64_t d = a->v.shape[3], m = a->v.shape[2], heads = a->v.shape[1], row = i / d;
            v[i] = adze_element(&a->v, row / (heads * m) * a->v.stride[0] + row / m % heads * a->v.stride[1] +
                                           row % m * a->v.stride[2] + i % d);
        }
        scatter(a, &a->k, &a->k_cache, k, out[1], out[3]);
        scatter(a, &a->v, &a->v_cache, v, out[2], out[4]);
    }
    const int64_t entry = r.qk[0].heads * r.seq * r.head_dim; /* elements of q for one of the batch */
    for (int64_t i = 0; out[0] && a->table_by_slot && entry && i < r.batch * entry; i++) {
        const int64_t slot = adze_kv_slot(a, i / entry, i / r.head_dim % r.seq);
        if (slot < 0 || slot >= table_rows)
            out[0][i] = adze_exact(NAN);
    }
    free(k);
    free(v);
    free(rows);
}

ADZE_KERNELS(kv_append)

const adze_op adze_op_kv_append = {"kv_append",
                                   sizeof(adze_kv_append_args),
                                   ADZE_FIRST_SIZE(kv_append, rounding),
                                   fields,
                                   validate,
                                   outputs,
                                   reference,
                                   kernels,
                                   NULL,
                                   NULL};

adze_status adze_kv_append(adze_stream stream, const adze_kv_append_args *args)
{
    return adze_dispatch(&adze_op_kv_append, stream, args);
}
