/* rope.h - rope and qk_norm_rope on the CPU. Threads take ranges of tokens. Within a range, sixteen tokens at a time
   share their tables from the cache, and rows are walked in the order in which they lie in memory. A normalised row
   is read twice: for its mean of squares, and from the cache to be written. */
#ifndef ADZE_CPU_ROPE_H
#define ADZE_CPU_ROPE_H

#include "cpu/row.h"
#include "rotary.h"

#include <stdlib.h>

enum { ROPE_TOKENS = 16 };
#define NO_INLINE static __attribute__((noinline, unused))

typedef struct rope_call {
    adze_rotary r;
    int stream[2]; /* by side */
} rope_call;

typedef struct rope_row { /* one head of one token */
    const char *x, *weight, *cos, *sin;
    char *out;
    int weight_f32, stream;
    float scale;
} rope_row;

/* A tensor whose dtype is q's or f32. */
INLINE vf rope_param(const void *data, int f32, int dtype)
{
    return f32 ? row_load(data, ADZE_F32, 0) : row_load(data, dtype, 0);
}

/* Sixteen normalised and weighted elements. */
INLINE vf rope_value(const adze_rotary *r, const rope_row *row, const char *x, const char *weight, int dtype,
                     int normed)
{
    vf v = row_load(x, dtype, 0);
    if (!normed)
        return v;
    v *= row->scale;
    if (r->rounding & ADZE_ROUND_NORM)
        v = row_round(dtype, v);
    if (weight)
        v *= rope_param(weight, row->weight_f32, dtype) + r->weight_offset;
    return r->rounding & (ADZE_ROUND_VALUE | ADZE_ROUND_STEPS) ? row_round(dtype, v) : v;
}
INLINE vf rope_turn(const adze_rotary *r, int dtype, vf x, vf c, vf y, vf s)
{
    if (r->rounding & ADZE_ROUND_STEPS)
        return row_round(dtype, x * c) + row_round(dtype, y * s);
    return vf_fma(x, c, y * s);
}
INLINE void rope_store(char *out, int dtype, vf v, int stream)
{
    if (stream)
        row_stream(out, dtype, 0, v);
    else
        row_store(out, dtype, 0, v);
}

/* The last elements of a row are copied here, to be computed sixteen at a time like the others. */
typedef char rope_pad[64] __attribute__((aligned(64)));
INLINE const char *rope_padded(rope_pad pad, const char *data, int64_t bytes)
{
    if (!data)
        return NULL;
    memset(pad, 0, sizeof(rope_pad));
    memcpy(pad, data, (size_t)bytes);
    return pad;
}

/* Two sets of sixteen elements that are rotated together, and their tables: with pairs (i, i + half) the second is
   the partner of the first; with pairs (2 i, 2 i + 1) it is the first's neighbour. */
INLINE void rope_write(const adze_rotary *r, const rope_row *row, int dtype, int normed, int pairs)
{
    const int64_t size = dtype == ADZE_F32 ? 4 : 2, half = r->rotary_dim / 2;
    const int table_f32 = r->table_dtype == ADZE_F32;
    const int64_t table = table_f32 ? 4 : 2, weight = row->weight_f32 ? 4 : 2;
    rope_pad pad[10];
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i < LANES ? half - i : LANES; /* pairs */
        const int64_t at[2] = {pairs == ADZE_ROPE_HALF ? i : 2 * i,
                               pairs == ADZE_ROPE_HALF ? half + i : 2 * i + LANES};
        const int64_t low = left < LANES / 2 ? 2 * left : LANES;
        const int64_t n[2] = {pairs == ADZE_ROPE_HALF ? left : low, pairs == ADZE_ROPE_HALF ? left : 2 * left - low};
        const char *x[2], *w[2], *cos[2], *sin[2];
        char *out[2];
        for (int p = 0; p < 2; p++) {
            const int64_t column = r->once ? i : at[p];
            x[p] = row->x + at[p] * size;
            w[p] = row->weight ? row->weight + at[p] * weight : NULL;
            cos[p] = row->cos + column * table;
            sin[p] = row->sin + column * table;
            out[p] = row->out + at[p] * size;
            if (left < LANES) {
                const int64_t columns = r->once ? left : n[p];
                x[p] = rope_padded(pad[p], x[p], n[p] * size);
                w[p] = rope_padded(pad[2 + p], w[p], n[p] * weight);
                cos[p] = rope_padded(pad[4 + p], cos[p], columns * table);
                sin[p] = rope_padded(pad[6 + p], sin[p], columns * table);
                out[p] = pad[8 + p];
            }
        }
        const int stream = row->stream && left == LANES;
        const vf a = rope_value(r, row, x[0], w[0], dtype, normed), b = rope_value(r, row, x[1], w[1], dtype, normed);
        vf c[2], s[2], y[2];
        for (int p = 0; p < 2; p++)
            c[p] = rope_param(cos[p], table_f32, dtype), s[p] = rope_param(sin[p], table_f32, dtype);
        if (pairs == ADZE_ROPE_HALF) {
            y[0] = -b, y[1] = a;
        } else {
            const vi even = {-1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0};
            y[0] = __builtin_shufflevector(a, a, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
            y[1] = __builtin_shufflevector(b, b, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
            y[0] = vf_select(even, -y[0], y[0]), y[1] = vf_select(even, -y[1], y[1]);
            if (r->once)
                c[0] = vf_twice_low(c[0]), c[1] = vf_twice_high(c[1]), s[0] = vf_twice_low(s[0]),
                s[1] = vf_twice_high(s[1]);
        }
        rope_store(out[0], dtype, rope_turn(r, dtype, a, c[0], y[0], s[0]), stream);
        rope_store(out[1], dtype, rope_turn(r, dtype, b, c[1], y[1], s[1]), stream);
        for (int p = 0; p < 2 && left < LANES; p++)
            memcpy(row->out + at[p] * size, out[p], (size_t)(n[p] * size));
    }
    for (int64_t i = r->rotary_dim; i < r->head_dim && (normed || row->x != row->out); i += LANES) {
        const int64_t n = r->head_dim - i < LANES ? r->head_dim - i : LANES;
        const char *x = row->x + i * size, *w = row->weight ? row->weight + i * weight : NULL;
        if (n < LANES)
            x = rope_padded(pad[0], x, n * size), w = rope_padded(pad[1], w, n * weight);
        row_store_tail(row->out, dtype, i, rope_value(r, row, x, w, dtype, normed), n);
    }
}

INLINE void rope_write_any(const adze_rotary *r, const rope_row *row, int normed)
{
    switch (2 * r->dtype + r->pairs) {
    case 2 * ADZE_F32 + ADZE_ROPE_HALF: rope_write(r, row, ADZE_F32, normed, ADZE_ROPE_HALF); break;
    case 2 * ADZE_F32 + ADZE_ROPE_INTERLEAVED: rope_write(r, row, ADZE_F32, normed, ADZE_ROPE_INTERLEAVED); break;
    case 2 * ADZE_F16 + ADZE_ROPE_HALF: rope_write(r, row, ADZE_F16, normed, ADZE_ROPE_HALF); break;
    case 2 * ADZE_F16 + ADZE_ROPE_INTERLEAVED: rope_write(r, row, ADZE_F16, normed, ADZE_ROPE_INTERLEAVED); break;
    case 2 * ADZE_BF16 + ADZE_ROPE_HALF: rope_write(r, row, ADZE_BF16, normed, ADZE_ROPE_HALF); break;
    default: rope_write(r, row, ADZE_BF16, normed, ADZE_ROPE_INTERLEAVED); break;
    }
}

/* The sum of squares of some heads, in 64 lanes. */
INLINE float rope_squares(const adze_rotary *r, const char *x, int dtype, int64_t head_stride, int64_t heads)
{
    const int64_t size = dtype == ADZE_F32 ? 4 : 2;
    vf lane[4] = {{0}, {0}, {0}, {0}};
    for (int64_t h = 0; h < heads; h++) {
        const char *head = x + h * head_stride * size;
        int64_t i = 0;
        for (; i + 4 * LANES <= r->head_dim; i += 4 * LANES)
            for (int l = 0; l < 4; l++) {
                const vf v = row_load(head, dtype, i + l * LANES);
                lane[l] = vf_fma(v, v, lane[l]);
            }
        for (int l = 0; i < r->head_dim; i += LANES, l++) {
            const vf v = row_load_tail(head, dtype, i, r->head_dim - i < LANES ? r->head_dim - i : LANES);
            lane[l] = vf_fma(v, v, lane[l]);
        }
    }
    return vf_sum((lane[0] + lane[1]) + (lane[2] + lane[3]));
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

typedef void (*rope_row_fn)(const adze_rotary *r, const rope_row *row);

/* Head h of token (b, s); `scale` is used when the norm is one across heads. */
INLINE void rope_head(const rope_call *c, int k, int64_t b, int64_t s, int64_t h, float scale, int normed,
                      rope_row_fn write)
{
    const adze_rotary *r = &c->r;
    const adze_rotary_side *side = &r->side[k];
    const int64_t size = r->dtype == ADZE_F32 ? 4 : 2, table = r->table_dtype == ADZE_F32 ? 4 : 2;
    const int64_t x_at = b * side->x_stride[0] + s * side->x_stride[1] + h * side->x_stride[2];
    const int64_t out_at = b * side->out_stride[0] + s * side->out_stride[1] + h * side->out_stride[2];
    rope_row row = {.x = (const char *)side->x + x_at * size,
                    .out = (char *)side->out + out_at * size,
                    .cos = (const char *)r->cos + (b * r->cos_stride[0] + s * r->cos_stride[1]) * table,
                    .sin = (const char *)r->sin + (b * r->sin_stride[0] + s * r->sin_stride[1]) * table,
                    .stream = c->stream[k],
                    .scale = scale};
    if (normed && !r->across_heads)
        row.scale = rope_norm(r, row.x, 0, 1);
    if (normed && side->weight) {
        row.weight_f32 = side->weight_dtype == ADZE_F32;
        row.weight = (const char *)side->weight + (r->across_heads ? h * r->head_dim : 0) * (row.weight_f32 ? 4 : 2);
    }
    write(r, &row);
}

INLINE void rope_tokens(const rope_call *c, int64_t begin, int64_t end, int normed, rope_row_fn write)
{
    const adze_rotary *r = &c->r;
    const int64_t size = r->dtype == ADZE_F32 ? 4 : 2;
    for (int64_t t = begin, n; t < end; t += n) {
        const int64_t b = t / r->seq, first = t % r->seq;
        n = end - t < ROPE_TOKENS ? end - t : ROPE_TOKENS;
        n = r->seq - first < n ? r->seq - first : n;
        for (int k = 0; k < 2; k++) {
            const adze_rotary_side *side = &r->side[k];
            const int across = normed && r->across_heads;
            if (!across && llabs(side->x_stride[1]) < llabs(side->x_stride[2])) {
                for (int64_t h = 0; h < side->heads; h++)
                    for (int64_t s = first; s < first + n; s++)
                        rope_head(c, k, b, s, h, 1, normed, write);
                continue;
            }
            for (int64_t s = first; s < first + n && side->heads; s++) {
                const char *token = (const char *)side->x + (b * side->x_stride[0] + s * side->x_stride[1]) * size;
                const float scale = across ? rope_norm(r, token, side->x_stride[2], side->heads) : 1;
                for (int64_t h = 0; h < side->heads; h++)
                    rope_head(c, k, b, s, h, scale, normed, write);
            }
        }
    }
    if (c->stream[0] || c->stream[1])
        row_stream_end();
}

/* An output that is also the input is in the cache already, and is not streamed past it. */
INLINE int rope_streams(const adze_rotary *r, const adze_tensor *out, const adze_tensor *x)
{
    const int64_t size = r->dtype == ADZE_F32 ? 4 : 2;
    return out->dtype && out->data != x->data && r->rotary_dim / 2 * size % 32 == 0 &&
           row_streams(out, adze_count(out));
}

INLINE adze_status rope_run(const adze_qk_norm_rope_args *a, adze_range_fn body)
{
    rope_call c = {.r = adze_rotary_of(a)};
    c.stream[0] = rope_streams(&c.r, &a->q_out, &a->q);
    c.stream[1] = rope_streams(&c.r, &a->k_out, &a->k);
    const int64_t width = (c.r.side[0].heads + c.r.side[1].heads) * c.r.head_dim;
    adze_parallel_for(width ? c.r.batch * c.r.seq : 0, row_grain(width), body, &c);
    return ADZE_OK;
}

#endif
