/* rope.h - rope and qk_norm_rope on the CPU.

   Threads take ranges of tokens. With a norm, a head is converted to floats in a buffer in L1, weighted and rounded,
   and rotated from there to the output; without one it is rotated directly from the input. Modes are constants in
   the loops: compilers keep these wide vectors in registers only without branches in between. Tables are converted
   to floats once per token, in the order of the elements that they rotate and with sin's sign applied. The tables of
   several tokens are kept, so that heads can be visited in memory order. */
#ifndef ADZE_CPU_ROPE_H
#define ADZE_CPU_ROPE_H

#include "cpu/row.h"
#include "rotary.h"

#include <stdlib.h>

/* Pairs that are rotated at a time, tokens whose tables are kept at most, and floats of their tables. */
enum { ROPE_PAIRS = 512, ROPE_TOKENS = 16, ROPE_FLOATS = 8 * ROPE_PAIRS };

typedef struct rope_call {
    adze_rotary r;
    int stream[2];      /* of q and k */
    int64_t most;       /* pairs of a token's tables at a time, a multiple of the lanes */
    int64_t slots_mask; /* tokens whose tables are kept, less one; a power of 2 less one */
} rope_call;

typedef struct rope_space { /* of a thread */
    float y[2 * ROPE_PAIRS + LANES] __attribute__((aligned(64)));
    float tables[ROPE_FLOATS] __attribute__((aligned(64))); /* per token: cos of both sets of elements, then sin */
    int64_t token[ROPE_TOKENS], first[ROPE_TOKENS];         /* which token, and from which pair on */
} rope_space;

typedef struct rope_row { /* one head of one token */
    const char *x, *weight;
    char *out;
    int weight_f32, stream;
    float scale;
} rope_row;

INLINE int64_t rope_padded(int64_t n)
{
    return (n + LANES - 1) / LANES * LANES;
}
/* The value that is rotated: n floats of x from element i on, normalised. WEIGHT is the weight's dtype. */
INLINE vf16 rope_value(const adze_rotary *r, const rope_row *row, int dtype, int weight, int round_norm,
                       int round_value, int64_t i, int64_t n)
{
    vf16 v = row_load_part(row->x, dtype, i, n);
    for (int p = 0; p < VF_PARTS; p++)
        v.part[p] *= row->scale;
    v = round_norm ? row_round(dtype, v) : v;
    if (weight) {
        const vf16 w = row_load_part(row->weight, weight, i, n);
        for (int p = 0; p < VF_PARTS; p++)
            v.part[p] *= w.part[p] + r->weight_offset;
    }
    return round_value ? row_round(dtype, v) : v;
}
INLINE void rope_values_as(const adze_rotary *r, const rope_row *row, int dtype, int weight, int round_norm,
                           int round_value, int64_t i, int64_t n, float *y)
{
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES)
        row_store(y, ADZE_F32, j, rope_value(r, row, dtype, weight, round_norm, round_value, i + j, LANES));
    if (j < n)
        row_store(y, ADZE_F32, j, rope_value(r, row, dtype, weight, round_norm, round_value, i + j, n - j));
}
NO_INLINE void rope_values(const adze_rotary *r, const rope_row *row, int64_t i, int64_t n, float *y)
{
    const int round_norm = (r->rounding & ADZE_ROUND_NORM) != 0;
    const int round_value = (r->rounding & (ADZE_ROUND_VALUE | ADZE_ROUND_STEPS)) != 0;
    const int weight = !row->weight ? ADZE_NONE : row->weight_f32 ? ADZE_F32 : r->dtype;
#define KEY(dtype, weight, norm, value) (((dtype * 4 + weight) * 2 + norm) * 2 + value)
#define VALUES(dtype, weight, norm, value)                                                                           \
case KEY(dtype, weight, norm, value):                                                                                \
    rope_values_as(r, row, dtype, weight, norm, value, i, n, y);                                                     \
    break;
#define VALUES_ALL(dtype, weight)                                                                                    \
    VALUES(dtype, weight, 0, 0)                                                                                      \
    VALUES(dtype, weight, 0, 1) VALUES(dtype, weight, 1, 0) VALUES(dtype, weight, 1, 1)
    switch (r->dtype == ADZE_F32 ? KEY(ADZE_F32, weight, 0, 0) : KEY(r->dtype, weight, round_norm, round_value)) {
        VALUES(ADZE_F32, ADZE_NONE, 0, 0)
        VALUES(ADZE_F32, ADZE_F32, 0, 0)
        VALUES_ALL(ADZE_F16, ADZE_NONE)
        VALUES_ALL(ADZE_F16, ADZE_F32)
        VALUES_ALL(ADZE_F16, ADZE_F16)
        VALUES_ALL(ADZE_BF16, ADZE_NONE)
        VALUES_ALL(ADZE_BF16, ADZE_F32)
        VALUES_ALL(ADZE_BF16, ADZE_BF16)
    }
#undef VALUES_ALL
#undef VALUES
#undef KEY
}

/* Where n pairs are: their first and their second elements, in the source and in the head. Interleaved pairs are one
   set of 2 n elements. */
typedef struct rope_part {
    const void *source; /* x, or the floats converted from it */
    const float *cos, *sin;
    int64_t from[2], to[2], n;
    int64_t second; /* where the second set's tables are, after the first's */
} rope_part;

INLINE vf16 rope_turn(int dtype, int steps, vf16 x, vf16 y, const float *cos, const float *sin)
{
    const vf16 c = row_load(cos, ADZE_F32, 0), s = row_load(sin, ADZE_F32, 0);
    vf16 a, b;
    for (int p = 0; p < VF_PARTS; p++) {
        b.part[p] = y.part[p] * s.part[p];
        a.part[p] = steps ? x.part[p] * c.part[p] : vf_fma(x.part[p], c.part[p], b.part[p]);
    }
    if (steps) {
        a = row_round(dtype, a);
        b = row_round(dtype, b);
        for (int p = 0; p < VF_PARTS; p++)
            a.part[p] += b.part[p];
    }
    return a;
}
typedef uint64_t rope_pairs_of
    __attribute__((vector_size(64 / VF_PARTS))); /* interleaved pairs, whose elements a shift swaps */
/* n lanes from j on. */
INLINE void rope_rotate_lanes(const rope_part *p, const rope_row *row, int source, int dtype, int pairs, int steps,
                              int64_t j, int64_t n)
{
    const vf16 x = row_load_part(p->source, source, p->from[0] + j, n);
    vf16 y;
    if (pairs == ADZE_ROPE_INTERLEAVED) {
        for (int i = 0; i < VF_PARTS; i++)
            y.part[i] = (vf)((rope_pairs_of)x.part[i] >> 32 | (rope_pairs_of)x.part[i] << 32);
    } else {
        y = row_load_part(p->source, source, p->from[1] + j, n);
    }
    const vf16 first = rope_turn(dtype, steps, x, y, p->cos + j, p->sin + j);
    row_store_part(row->out, dtype, p->to[0] + j, first, n, row->stream);
    if (pairs == ADZE_ROPE_INTERLEAVED)
        return;
    const float *cos = p->cos + p->second, *sin = p->sin + p->second;
    row_store_part(row->out, dtype, p->to[1] + j, rope_turn(dtype, steps, y, x, cos + j, sin + j), n, row->stream);
}
INLINE void rope_rotate_as(const rope_part *p, const rope_row *row, int source, int dtype, int pairs, int steps)
{
    const int64_t n = pairs == ADZE_ROPE_HALF ? p->n : 2 * p->n;
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES)
        rope_rotate_lanes(p, row, source, dtype, pairs, steps, j, LANES);
    if (j < n)
        rope_rotate_lanes(p, row, source, dtype, pairs, steps, j, n - j);
}
INLINE void rope_rotate(const adze_rotary *r, const rope_part *p, const rope_row *row, int normed)
{
    const int steps = r->dtype != ADZE_F32 && r->rounding & ADZE_ROUND_STEPS ? 1 : 0;
#define KEY(dtype, pairs, steps) ((dtype * 2 + pairs) * 2 + steps)
#define ROTATE(dtype, pairs, steps)                                                                                  \
case KEY(dtype, pairs, steps): rope_rotate_as(p, row, normed ? ADZE_F32 : dtype, dtype, pairs, steps); break;
    switch (KEY(r->dtype, r->pairs, steps)) {
        ROTATE(ADZE_F32, ADZE_ROPE_HALF, 0)
        ROTATE(ADZE_F32, ADZE_ROPE_INTERLEAVED, 0)
        ROTATE(ADZE_F16, ADZE_ROPE_HALF, 0)
        ROTATE(ADZE_F16, ADZE_ROPE_HALF, 1)
        ROTATE(ADZE_F16, ADZE_ROPE_INTERLEAVED, 0)
        ROTATE(ADZE_F16, ADZE_ROPE_INTERLEAVED, 1)
        ROTATE(ADZE_BF16, ADZE_ROPE_HALF, 0)
        ROTATE(ADZE_BF16, ADZE_ROPE_HALF, 1)
        ROTATE(ADZE_BF16, ADZE_ROPE_INTERLEAVED, 0)
        ROTATE(ADZE_BF16, ADZE_ROPE_INTERLEAVED, 1)
    }
#undef ROTATE
#undef KEY
}

/* Stores n floats to elements from i on. */
NO_INLINE void rope_put(char *out, int dtype, int64_t i, int64_t n, const float *y)
{
    for (int64_t j = 0; j < n; j += LANES) {
        const vf16 v = row_load(y, ADZE_F32, j);
        const int64_t m = n - j < LANES ? n - j : LANES;
        switch (dtype) {
        case ADZE_F32: row_store_part(out, ADZE_F32, i + j, v, m, 0); break;
        case ADZE_F16: row_store_part(out, ADZE_F16, i + j, v, m, 0); break;
        default: row_store_part(out, ADZE_BF16, i + j, v, m, 0); break;
        }
    }
}

/* Loads n columns of a table from i on as floats. */
INLINE void rope_columns_as(const char *table, int dtype, int64_t i, int64_t n, float *to)
{
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES)
        row_store(to, ADZE_F32, j, row_load(table, dtype, i + j));
    if (j < n)
        row_store(to, ADZE_F32, j, row_load_part(table, dtype, i + j, n - j));
}
NO_INLINE void rope_columns(const char *table, int dtype, int64_t i, int64_t n, float *to)
{
    switch (dtype) {
    case ADZE_F32: rope_columns_as(table, ADZE_F32, i, n, to); break;
    case ADZE_F16: rope_columns_as(table, ADZE_F16, i, n, to); break;
    default: rope_columns_as(table, ADZE_BF16, i, n, to); break;
    }
}

/* A table of n pairs from `first` on: two sets of `padded` columns, in the order of the elements. */
NO_INLINE void rope_expand(const adze_rotary *r, const char *table, int64_t first, int64_t n, int64_t padded,
                           float *to)
{
    const int64_t half = r->rotary_dim / 2;
    if (r->pairs == ADZE_ROPE_HALF) {
        rope_columns(table, r->table_dtype, first, n, to);
        rope_columns(table, r->table_dtype, r->once ? first : half + first, n, to + padded);
    } else if (!r->once) {
        rope_columns(table, r->table_dtype, 2 * first, 2 * n, to);
    } else {
        rope_columns(table, r->table_dtype, first, n, to);
        for (int64_t j = padded - LANES; j >= 0; j -= LANES) {
            const vf16 v = row_load(to, ADZE_F32, j);
            row_store(to, ADZE_F32, 2 * j, vf16_twice(v, 0));
            row_store(to, ADZE_F32, 2 * j + LANES, vf16_twice(v, 1));
        }
    }
}
/* The first of each pair is multiplied by -sin. */
INLINE void rope_sign(const adze_rotary *r, int64_t n, float *sin)
{
    const int step = r->pairs == ADZE_ROPE_HALF ? 1 : 2;
    for (int64_t j = 0; j < step * n; j += step)
        sin[j] = -sin[j];
}

/* The tables of n pairs of token (b, s) from `first` on, converted if they are not kept yet. */
INLINE const float *rope_tables(const rope_call *c, rope_space *space, int64_t b, int64_t s, int64_t first, int64_t n)
{
    const adze_rotary *r = &c->r;
    const int64_t token = b * r->seq + s, slot = token & c->slots_mask, size = adze_float_size(r->table_dtype);
    float *cos = space->tables + slot * 4 * c->most, *sin = cos + 2 * c->most;
    if (space->token[slot] != token || space->first[slot] != first) {
        const char *cos_row = (const char *)r->cos + (b * r->cos_stride[0] + s * r->cos_stride[1]) * size;
        const char *sin_row = (const char *)r->sin + (b * r->sin_stride[0] + s * r->sin_stride[1]) * size;
        rope_expand(r, cos_row, first, n, rope_padded(n), cos);
        rope_expand(r, sin_row, first, n, rope_padded(n), sin);
        rope_sign(r, n, sin);
        space->token[slot] = token;
        space->first[slot] = first;
    }
    return cos;
}

INLINE void rope_write(const rope_call *c, const rope_row *row, rope_space *space, int64_t b, int64_t s, int normed)
{
    const adze_rotary *r = &c->r;
    const int64_t half = r->rotary_dim / 2;
    for (int64_t first = 0; first < half; first += ROPE_PAIRS) {
        const int64_t n = half - first < ROPE_PAIRS ? half - first : ROPE_PAIRS;
        const int neighbours = r->pairs == ADZE_ROPE_INTERLEAVED;
        const float *cos = rope_tables(c, space, b, s, first, n);
        rope_part part = {.source = row->x, .cos = cos, .sin = cos + 2 * c->most, .n = n, .second = rope_padded(n)};
        part.to[0] = part.from[0] = neighbours ? 2 * first : first;
        part.to[1] = part.from[1] = half + first;
        if (normed) {
            part.source = space->y;
            part.from[0] = 0;
            part.from[1] = n;
            if (neighbours || n == half) {
                rope_values(r, row, part.to[0], 2 * n, space->y);
            } else {
                rope_values(r, row, part.to[0], n, space->y);
                rope_values(r, row, part.to[1], n, space->y + n);
            }
        }
        rope_rotate(r, &part, row, normed);
    }
    if (!normed && row->x == row->out)
        return;
    for (int64_t i = r->rotary_dim; i < r->head_dim; i += 2 * ROPE_PAIRS) {
        const int64_t n = r->head_dim - i < 2 * ROPE_PAIRS ? r->head_dim - i : 2 * ROPE_PAIRS;
        if (normed) {
            rope_values(r, row, i, n, space->y);
            rope_put(row->out, r->dtype, i, n, space->y);
        } else {
            const int64_t size = adze_float_size(r->dtype);
            memcpy(row->out + i * size, row->x + i * size, (size_t)(n * size));
        }
    }
}

/* The sum of squares of some heads, in 64 lanes. */
INLINE float rope_squares(const adze_rotary *r, const char *x, int dtype, int64_t head_stride, int64_t heads)
{
    const int64_t size = adze_float_size(dtype);
    vf_total total = {0};
    for (int64_t h = 0; h < heads; h++) {
        const char *head = x + h * head_stride * size;
        int64_t i = 0;
        for (; i + 4 * LANES <= r->head_dim; i += 4 * LANES)
            for (int set = 0; set < 4; set++)
                vf_total_add(&total, set, row_load(head, dtype, i + set * LANES), 1);
        for (; i + LANES <= r->head_dim; i += LANES)
            vf_total_add(&total, 0, row_load(head, dtype, i), 1);
        if (i < r->head_dim)
            vf_total_add(&total, 1, row_load_part(head, dtype, i, r->head_dim - i), 1);
    }
    return vf_total_sum(&total);
}
/* 1 / sqrt(mean of squares + eps) over some heads. */
NO_INLINE float rope_norm(const adze_rotary *r, const char *x, int64_t head_stride, int64_t heads)
{
    float sum;
    switch (r->dtype) {
    case ADZE_F32: sum = rope_squares(r, x, ADZE_F32, head_stride, heads); break;
    case ADZE_F16: sum = rope_squares(r, x, ADZE_F16, head_stride, heads); break;
    default: sum = rope_squares(r, x, ADZE_BF16, head_stride, heads); break;
    }
    return 1 / sqrtf(sum / (float)(heads * r->head_dim) + r->eps);
}

/* Head h of token (b, s); `scale` is used when the norm is one across heads. */
INLINE void rope_head(const rope_call *c, rope_space *space, int k, int64_t b, int64_t s, int64_t h, float scale,
                      int normed)
{
    const adze_rotary *r = &c->r;
    const adze_rotary_tensor *tensor = &r->qk[k];
    const int64_t size = adze_float_size(r->dtype);
    const int64_t x_at = b * tensor->x_stride[0] + s * tensor->x_stride[1] + h * tensor->x_stride[2];
    const int64_t out_at = b * tensor->out_stride[0] + s * tensor->out_stride[1] + h * tensor->out_stride[2];
    rope_row row = {.x = (const char *)tensor->x + x_at * size,
                    .out = (char *)tensor->out + out_at * size,
                    .stream = c->stream[k],
                    .scale = scale};
    if (normed && !r->across_heads)
        row.scale = rope_norm(r, row.x, 0, 1);
    if (normed && tensor->weight) {
        row.weight_f32 = tensor->weight_dtype == ADZE_F32;
        row.weight =
            (const char *)tensor->weight + (r->across_heads ? h * r->head_dim : 0) * (row.weight_f32 ? 4 : 2);
    }
    rope_write(c, &row, space, b, s, normed);
}

INLINE void rope_tokens(const rope_call *c, int64_t begin, int64_t end, int normed)
{
    const adze_rotary *r = &c->r;
    const int64_t size = adze_float_size(r->dtype);
    rope_space space;
    memset(space.token, 0xff, sizeof space.token);
    for (int64_t t = begin, n; t < end; t += n) {
        const int64_t b = t / r->seq, first = t % r->seq;
        n = end - t < c->slots_mask + 1 ? end - t
                                        : c->slots_mask + 1; /* more tokens would evict each other's tables */
        n = r->seq - first < n ? r->seq - first : n;
        for (int k = 0; k < 2; k++) {
            const adze_rotary_tensor *tensor = &r->qk[k];
            const int across = normed && r->across_heads;
            if (!across && llabs(tensor->x_stride[1]) < llabs(tensor->x_stride[2])) {
                for (int64_t h = 0; h < tensor->heads; h++)
                    for (int64_t s = first; s < first + n; s++)
                        rope_head(c, &space, k, b, s, h, 1, normed);
                continue;
            }
            for (int64_t s = first; s < first + n && tensor->heads; s++) {
                const char *token =
                    (const char *)tensor->x + (b * tensor->x_stride[0] + s * tensor->x_stride[1]) * size;
                const float scale = across ? rope_norm(r, token, tensor->x_stride[2], tensor->heads) : 1;
                for (int64_t h = 0; h < tensor->heads; h++)
                    rope_head(c, &space, k, b, s, h, scale, normed);
            }
        }
    }
    if (c->stream[0] || c->stream[1])
        row_stream_end();
}

/* An output that is also the input is in the cache already: streaming stores would not help. */
INLINE int rope_streams(const adze_rotary *r, const adze_tensor *out, const adze_tensor *x)
{
    const int64_t size = adze_float_size(r->dtype);
    return out->dtype && out->data != x->data && r->rotary_dim / 2 * size % 32 == 0 &&
           row_streams(out, adze_count(out));
}

/* How much of the tables is kept. */
INLINE void rope_call_size(rope_call *c)
{
    c->most = c->r.rotary_dim / 2 < ROPE_PAIRS ? rope_padded(c->r.rotary_dim / 2) : ROPE_PAIRS;
    while (c->slots_mask < ROPE_TOKENS - 1 && 2 * (c->slots_mask + 1) * 4 * c->most <= ROPE_FLOATS)
        c->slots_mask = 2 * c->slots_mask + 1;
}

INLINE adze_status rope_run(const adze_qk_norm_rope_args *a, adze_range_fn body)
{
    rope_call c = {.r = adze_rotary_of(a)};
    c.stream[0] = rope_streams(&c.r, &a->q_out, &a->q);
    c.stream[1] = rope_streams(&c.r, &a->k_out, &a->k);
    rope_call_size(&c);
    const int64_t width = (c.r.qk[0].heads + c.r.qk[1].heads) * c.r.head_dim;
    adze_parallel_for(width ? c.r.batch * c.r.seq : 0, row_grain(width), body, &c);
    return ADZE_OK;
}

#endif
