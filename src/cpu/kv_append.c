/* kv_append on the CPU. Threads take ranges of tokens: the heads of q and k are normalised and rotated as in rope.h,
   k's straight to their places in the cache, and those of v are copied. Rows that are stored in fewer bits are kept
   in their own dtype first. */
#include "cpu/rope.h"
#include "cpu/stored.h"
#include "kv_cache.h"

typedef struct append_call {
    rope_call rope;
    const adze_kv_append_args *a;
} append_call;

INLINE vf16 append_load(const void *x, int dtype, int64_t i, int64_t n)
{
    switch (dtype) {
    case ADZE_F32: return row_load_part(x, ADZE_F32, i, n);
    case ADZE_F16: return row_load_part(x, ADZE_F16, i, n);
    default: return row_load_part(x, ADZE_BF16, i, n);
    }
}

/* A row in fewer bits, and its scale. */
NO_INLINE void append_stored(const char *x, int dtype, int64_t n, uint8_t *to, int stored, float *scale)
{
    vf16 most = vf16_all(0);
    for (int64_t i = 0; i < n; i += LANES) {
        const vf16 v = append_load(x, dtype, i, n - i < LANES ? n - i : LANES);
        for (int p = 0; p < VF_PARTS; p++)
            most.part[p] = vf_max(most.part[p], -vf_minus_abs(v.part[p]));
    }
    *scale = vf16_max_lane(most) / (stored == ADZE_I8 ? 127.0f : 448.0f);
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t part = n - i < LANES ? n - i : LANES;
        const vf16 v = append_load(x, dtype, i, part);
        int32_t lane[LANES];
        for (int p = 0; p < VF_PARTS; p++) {
            const vf q = *scale == 0 ? vf_all(0) : v.part[p] / *scale;
            const vi bits = stored == ADZE_F8E4M3 ? f8_bits(q)
                                                  : __builtin_convertvector(vf_nearest(vf_between(q, -127, 127)), vi);
            memcpy(lane + p * VF_WIDTH, &bits, sizeof bits);
        }
        for (int64_t j = 0; j < part; j++)
            to[i + j] = (uint8_t)lane[j];
    }
}

INLINE int64_t cache_at(const adze_tensor *t, adze_kv_place place, int64_t h)
{
    return place.entry * t->stride[0] + h * t->stride[1] + place.row * t->stride[2];
}

/* Heads of q (0) or k (1) of token (b, s), whose tables are at (table_b, table_s). */
INLINE void append_heads(const append_call *c, rope_space *space, int which, int64_t b, int64_t s, int64_t table_b,
                         int64_t table_s, adze_kv_place place, int normed)
{
    const adze_rotary *r = &c->rope.r;
    const adze_kv_append_args *a = c->a;
    const adze_rotary_tensor *tensor = &r->qk[which];
    const int64_t size = adze_float_size(r->dtype), token = b * tensor->x_stride[0] + s * tensor->x_stride[1];
    const int stored = which && a->k_scale.dtype;
    char held[ADZE_KV_STORED_DIM * sizeof(float)] __attribute__((aligned(64)));
    float scale = 1;
    if (normed && r->across_heads && tensor->heads)
        scale = rope_norm(r, (const char *)tensor->x + token * size, tensor->x_stride[2], tensor->heads);
    for (int64_t h = 0; h < tensor->heads; h++) {
        rope_row row = {.x = (const char *)tensor->x + (token + h * tensor->x_stride[2]) * size, .scale = scale};
        if (stored)
            row.out = held;
        else if (which)
            row.out = (char *)a->k_cache.data + cache_at(&a->k_cache, place, h) * size;
        else
            row.out = (char *)tensor->out +
                      (b * tensor->out_stride[0] + s * tensor->out_stride[1] + h * tensor->out_stride[2]) * size;
        if (normed && !r->across_heads)
            row.scale = rope_norm(r, row.x, 0, 1);
        if (normed && tensor->weight) {
            row.weight_f32 = tensor->weight_dtype == ADZE_F32;
            row.weight =
                (const char *)tensor->weight + (r->across_heads ? h * r->head_dim : 0) * (row.weight_f32 ? 4 : 2);
        }
        rope_write(&c->rope, &row, space, table_b, table_s, normed);
        if (stored)
            append_stored(held, r->dtype, r->head_dim, (uint8_t *)a->k_cache.data + cache_at(&a->k_cache, place, h),
                          a->k_cache.dtype, (float *)a->k_scale.data + cache_at(&a->k_scale, place, h));
    }
}

INLINE void append_values(const append_call *c, int64_t b, int64_t s, adze_kv_place place)
{
    const adze_kv_append_args *a = c->a;
    const int64_t size = adze_float_size(a->v.dtype), d = a->v.shape[3];
    for (int64_t h = 0; h < a->v.shape[1]; h++) {
        const char *from =
            (const char *)a->v.data + (b * a->v.stride[0] + h * a->v.stride[1] + s * a->v.stride[2]) * size;
        const int64_t at = cache_at(&a->v_cache, place, h);
        if (a->v_scale.dtype)
            append_stored(from, a->v.dtype, d, (uint8_t *)a->v_cache.data + at, a->v_cache.dtype,
                          (float *)a->v_scale.data + cache_at(&a->v_scale, place, h));
        else
            memcpy((char *)a->v_cache.data + at * size, from, (size_t)(d * size));
    }
}

INLINE void append_tokens(const append_call *c, int64_t begin, int64_t end, int normed)
{
    const int64_t seq = c->rope.r.seq;
    const int by_slot = c->a->table_by_slot;
    rope_space space;
    memset(space.token, 0xff, sizeof space.token);
    for (int64_t t = begin; t < end; t++) {
        const int64_t b = t / seq, s = t % seq, slot = adze_kv_slot(c->a, b, s);
        const adze_kv_place place = adze_kv_place_of(c->a, b, slot);
        for (int which = 0; which < 2; which++)
            append_heads(c, &space, which, b, s, by_slot ? 0 : b, by_slot ? slot : s, place, normed);
        append_values(c, b, s, place);
    }
}

static void plain_body(void *context, int64_t begin, int64_t end)
{
    append_tokens(context, begin, end, 0);
}
static void normed_body(void *context, int64_t begin, int64_t end)
{
    append_tokens(context, begin, end, 1);
}

/* Every slot must have a place, and a row of the tables where these are by slot. */
static adze_status check_slots(const adze_kv_append_args *a)
{
    const int64_t rows = a->k_cache.shape[2];
    for (int64_t b = 0; b < a->k.shape[0]; b++)
        for (int64_t t = 0; t < a->k.shape[2]; t++) {
            const int64_t slot = adze_kv_slot(a, b, t), at = rows && slot >= 0 ? slot / rows : 0;
            const int64_t slots = a->block_table.dtype ? a->block_table.shape[1] * rows : rows;
            ADZE_REQUIRE(slot >= 0 && slot < slots, ADZE_BAD_ARG,
                         "kv_append: token %lld of batch entry %lld has slot %lld, there are %lld", (long long)t,
                         (long long)b, (long long)slot, (long long)slots);
            ADZE_REQUIRE(!a->table_by_slot || slot < a->cos.shape[0], ADZE_BAD_ARG,
                         "kv_append: token %lld of batch entry %lld has slot %lld, cos and sin have %lld",
                         (long long)t, (long long)b, (long long)slot, (long long)a->cos.shape[0]);
            ADZE_REQUIRE(
                adze_kv_place_of(a, b, slot).entry >= 0, ADZE_BAD_ARG,
                "kv_append: block_table[%lld, %lld] is %d, the cache has %lld pages", (long long)b, (long long)at,
                ((const int32_t *)a->block_table.data)[b * a->block_table.stride[0] + at * a->block_table.stride[1]],
                (long long)a->k_cache.shape[0]);
        }
    return ADZE_OK;
}

ADZE_CPU_KERNEL(kv_append)
{
    (void)stream;
    const adze_kv_append_args *a = args;
    append_call c = {.rope = {.r = adze_kv_rotary(a)}, .a = a};
    const adze_rotary *r = &c.rope.r;
    ADZE_CHECK(check_slots(a));
    rope_call_size(&c.rope);
    const int64_t width = (r->qk[0].heads + r->qk[1].heads) * r->head_dim + a->v.shape[1] * a->v.shape[3];
    adze_parallel_for(width ? r->batch * r->seq : 0, row_grain(width), a->norm ? normed_body : plain_body, &c);
    return ADZE_OK;
}
