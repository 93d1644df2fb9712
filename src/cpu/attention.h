/* attention.h - the products of attention on the CPU, of a block of keys: for a few rows of q straight from memory,
   for more of them in tiles, whose keys are converted and reordered first. */
#ifndef ADZE_CPU_ATTENTION_H
#define ADZE_CPU_ATTENTION_H

#include "cpu/act.h"
#include "cpu/quantised.h"

enum {
    KEYS = 256,           /* of a block: the sums of one are in chains of as many terms (ADZE_SUMS_BLOCKS) */
    S_ROW = KEYS + LANES, /* floats of a row of scores; whole vectors are read */
    STEP = 2 * LANES,     /* elements of a row that are converted at a time */
    PANEL = 2 * VF_WIDTH, /* keys, or columns of v, of a tile */
    CHAIN = 256,          /* terms of q . k that a tile adds */
    FEW = 8,              /* rows of q that are multiplied straight from memory; */
    FEW_AHEAD = 32,       /* so many keys before they are read, they are prefetched; */
    PACK_AHEAD = 16       /* and so many before they are packed */
};
/* Rows of a tile, and of a few rows at a time with v: as many as there are registers for sums. */
#if defined(__AVX512F__)
enum { TILE = 12, FEW_AT_ONCE = 8 };
#elif defined(__aarch64__)
enum { TILE = 12, FEW_AT_ONCE = 2 };
#elif defined(__AVX2__)
enum { TILE = 6, FEW_AT_ONCE = 2 };
#else
enum { TILE = 6, FEW_AT_ONCE = 1 };
#endif
#if defined(__GNUC__) && !defined(__clang__)
#    define UNROLLED_ROWS  _Pragma("GCC unroll 12")
#    define UNROLLED_STEPS _Pragma("GCC unroll 2")
#else
#    define UNROLLED_ROWS
#    define UNROLLED_STEPS
#endif

INLINE int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
INLINE int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Keys of one block: where the rows of k and v are, and what quantised ones are multiplied by. */
typedef struct key_block {
    const char *k[KEYS], *v[KEYS];
    float k_scale[KEYS], v_scale[KEYS];
    int64_t count, d, dv;
} key_block;

/* 32 elements of a row of k or v in the order of its kind, or fewer at its end, where the others are zero. */
INLINE vf32 key_load(const char *row, int kind, int64_t i, int64_t n, float scale)
{
    dequantise by = {.scale = scale};
    if (is_quantised(kind))
        return quantised_load(row, kind, i, n, &by);
    return n == STEP ? row_load32(row, kind, i) : row_load32_part(row, kind, i, n);
}

/* The 32 elements of a row of k or v from i on will be read. */
INLINE void key_prefetch(const char *row, int kind, int64_t i)
{
    const int64_t size = is_quantised(kind) ? 1 : adze_float_size(kind);
    for (int64_t b = 0; b < STEP * size; b += 64)
        __builtin_prefetch(row + i * size + b);
}

/* ---- A few rows ---- */

/* As many keys at a time as there are registers for sums. */
#if VF_PARTS == 1 || defined(__aarch64__)
#    define FEW_KEYS(rows) ((rows) == 1 ? 8 : (rows) <= 4 ? 4 : 3)
#else
#    define FEW_KEYS(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 4 : (rows) == 4 ? 2 : 1)
#endif

/* s[row][key] = q . k, where q has rows of floats in the order of k's kind that end with zeros. */
INLINE void few_scores(const key_block *b, const float *q, int64_t q_row, float *s, int kind, int rows)
{
    const int step = FEW_KEYS(rows);
    for (int64_t j = 0; j < b->count; j += step) {
        vf sum[FEW][8];
        int64_t key[8];
        const char *ahead[8]; /* after the keys come the values */
        UNROLLED
        for (int w = 0; w < step; w++) {
            key[w] = least(j + w, b->count - 1);
            ahead[w] = key[w] + FEW_AHEAD < b->count ? b->k[key[w] + FEW_AHEAD]
                                                     : b->v[least(key[w] + FEW_AHEAD - b->count, b->count - 1)];
            UNROLLED
            for (int r = 0; r < rows; r++)
                sum[r][w] = vf_all(0);
        }
        for (int64_t i = 0; i < b->d; i += STEP) {
            vf32 k[8];
            UNROLLED
            for (int w = 0; w < step; w++) {
                key_prefetch(ahead[w], kind, i);
                k[w] = key_load(b->k[key[w]], kind, i, least(b->d - i, STEP), b->k_scale[key[w]]);
            }
            UNROLLED
            for (int r = 0; r < rows; r++) {
                const vf32 x = row_load32(q + r * q_row, ADZE_F32, i);
                UNROLLED
                for (int w = 0; w < step; w++)
                    UNROLLED
                for (int p = 0; p < 2 * VF_PARTS; p++)
                    sum[r][w] = vf_fma(x.part[p], k[w].part[p], sum[r][w]);
            }
        }
        UNROLLED
        for (int r = 0; r < rows; r++)
            UNROLLED
        for (int w = 0; w < step; w++)
            s[r * S_ROW + key[w]] = vf_sum(sum[r][w]);
    }
}

/* Adds p . v to `rows` rows of sums, in the order of v's kind. Keys are taken a few at a time, so that memory is read
   in its order. */
INLINE void few_sums(const key_block *b, const float *p, float *sums, int64_t sums_row, int kind, int rows)
{
    for (int64_t from = 0; from < b->count; from += FEW_AHEAD) {
        const int64_t to = least(b->count, from + FEW_AHEAD);
        for (int64_t i = 0; i < b->dv; i += STEP) {
            vf32 sum[FEW];
            UNROLLED
            for (int r = 0; r < rows; r++)
                sum[r] = row_load32(sums + r * sums_row, ADZE_F32, i);
            for (int64_t j = from; j < to; j++) {
                const vf32 v = key_load(b->v[j], kind, i, least(b->dv - i, STEP), b->v_scale[j]);
                key_prefetch(b->v[least(j + FEW_AHEAD, b->count - 1)], kind, i);
                UNROLLED
                for (int r = 0; r < rows; r++)
                    UNROLLED
                for (int x = 0; x < 2 * VF_PARTS; x++)
                    sum[r].part[x] = vf_fma(vf_all(p[r * S_ROW + j]), v.part[x], sum[r].part[x]);
            }
            UNROLLED
            for (int r = 0; r < rows; r++)
                row_store32(sums + r * sums_row, ADZE_F32, i, sum[r], 0);
        }
    }
}

typedef void (*few_scores_fn)(const key_block *, const float *, int64_t, float *, int);
typedef void (*few_sums_fn)(const key_block *, const float *, float *, int64_t, int);
#define FEW_OF(name, kind)                                                                                           \
    NO_INLINE void few_scores_##name(const key_block *b, const float *q, int64_t q_row, float *s, int rows)          \
    {                                                                                                                \
        if (rows == 1)                                                                                               \
            few_scores(b, q, q_row, s, kind, 1);                                                                     \
        else if (rows == 2)                                                                                          \
            few_scores(b, q, q_row, s, kind, 2);                                                                     \
        else if (rows == 4)                                                                                          \
            few_scores(b, q, q_row, s, kind, 4);                                                                     \
        else                                                                                                         \
            few_scores(b, q, q_row, s, kind, 8);                                                                     \
    }                                                                                                                \
    NO_INLINE void few_sums_##name(const key_block *b, const float *p, float *sums, int64_t sums_row, int rows)      \
    {                                                                                                                \
        if (rows == 1)                                                                                               \
            few_sums(b, p, sums, sums_row, kind, 1);                                                                 \
        else if (rows == 2 && FEW_AT_ONCE > 1)                                                                       \
            few_sums(b, p, sums, sums_row, kind, 2);                                                                 \
        else if (rows == 4 && FEW_AT_ONCE == 8)                                                                      \
            few_sums(b, p, sums, sums_row, kind, 4);                                                                 \
        else                                                                                                         \
            for (int r = 0; r < rows; r += FEW_AT_ONCE)                                                              \
                few_sums(b, p + r * S_ROW, sums + r * sums_row, sums_row, kind, FEW_AT_ONCE);                        \
    }
FEW_OF(f32, ADZE_F32)
FEW_OF(f16, ADZE_F16)
FEW_OF(bf16, ADZE_BF16)
FEW_OF(f8, ADZE_F8E4M3)
FEW_OF(i8, ADZE_I8)

/* ---- Tiles ---- */

/* c = a . b for `rows` rows and one or both vectors of a panel of b, a[r * a_row + t * a_step] and b[t * PANEL +
   column]. */
INLINE void tile(const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t steps, int rows, int vectors,
                 vf c[TILE][2])
{
    UNROLLED_ROWS
    for (int r = 0; r < rows; r++)
        c[r][0] = c[r][1] = vf_all(0);
    UNROLLED_STEPS
    for (int64_t t = 0; t < steps; t++) {
        const vf b0 = *(const vf_loose *)(b + t * PANEL), b1 = *(const vf_loose *)(b + t * PANEL + VF_WIDTH);
        UNROLLED_ROWS
        for (int r = 0; r < rows; r++) {
            const vf x = vf_all(a[r * a_row + t * a_step]);
            c[r][0] = vf_fma(x, b0, c[r][0]);
            if (vectors == 2)
                c[r][1] = vf_fma(x, b1, c[r][1]);
        }
    }
}

INLINE void panel_scores(const float *q, const float *k, int64_t d, float *s, int rows, int vectors)
{
    for (int64_t from = 0; from < d; from += CHAIN) {
        vf c[TILE][2];
        tile(q + from * TILE, 1, TILE, k + from * PANEL, least(d - from, CHAIN), rows, vectors, c);
        UNROLLED_ROWS
        for (int r = 0; r < rows; r++)
            UNROLLED
        for (int x = 0; x < vectors; x++) {
            vf_loose *to = (vf_loose *)(s + r * S_ROW + x * VF_WIDTH);
            *to = c[r][x] + (from ? (vf)*to : vf_all(0));
        }
    }
}
/* s[row][key] = q . k, where q has the element t of all rows at t * TILE. Of the last panel one vector may do. */
INLINE void scores_of(const float *q, const float *k, int64_t keys, int64_t d, float *s, int rows)
{
    int64_t j = 0;
    for (; keys - j > VF_WIDTH; j += PANEL)
        panel_scores(q, k + j * d, d, s + j, rows, 2);
    if (j < keys)
        panel_scores(q, k + j * d, d, s + j, rows, 1);
}
/* Panels of v, which have count keys; the first `keys` of them are seen. */
typedef struct value_panels {
    const float *v;
    int64_t count, keys, dv;
} value_panels;

INLINE void panel_sums(const float *p, const float *v, int64_t keys, const float *keep, float *sums, int64_t sums_row,
                       int rows, int vectors)
{
    vf c[TILE][2];
    tile(p, S_ROW, 1, v, keys, rows, vectors, c);
    UNROLLED_ROWS
    for (int r = 0; r < rows; r++)
        UNROLLED
    for (int x = 0; x < vectors; x++) {
        vf_loose *to = (vf_loose *)(sums + r * sums_row + x * VF_WIDTH);
        *to = *to * keep[r] + c[r][x];
    }
}
/* sums[row] = sums[row] * keep[row] + p . v */
INLINE void sums_of(const float *p, const value_panels *b, const float *keep, float *sums, int64_t sums_row, int rows)
{
    int64_t i = 0;
    for (; b->dv - i > VF_WIDTH; i += PANEL)
        panel_sums(p, b->v + i * b->count, b->keys, keep, sums + i, sums_row, rows, 2);
    if (i < b->dv)
        panel_sums(p, b->v + i * b->count, b->keys, keep, sums + i, sums_row, rows, 1);
}
/* For 4, 8 and TILE rows: the last tile often has fewer, as rows are often a power of two. */
typedef void (*tile_scores_fn)(const float *, const float *, int64_t, int64_t, float *);
typedef void (*tile_sums_fn)(const float *, const value_panels *, const float *, float *, int64_t);
#define TILE_OF(name, rows)                                                                                          \
    NO_INLINE void tile_scores_##name(const float *q, const float *k, int64_t keys, int64_t d, float *s)             \
    {                                                                                                                \
        scores_of(q, k, keys, d, s, rows);                                                                           \
    }                                                                                                                \
    NO_INLINE void tile_sums_##name(const float *p, const value_panels *b, const float *keep, float *sums,           \
                                    int64_t sums_row)                                                                \
    {                                                                                                                \
        sums_of(p, b, keep, sums, sums_row, rows);                                                                   \
    }
TILE_OF(4, 4)
TILE_OF(8, TILE < 8 ? TILE : 8)
TILE_OF(all, TILE)

INLINE vf32 key_floats(const char *row, int kind, int64_t i, int64_t n, float scale)
{
    return vf32_order(key_load(row, kind, i, n, scale), order_of(kind), ADZE_F32);
}

/* A panel has its keys side by side, element after element; keys that it lacks are zero. */
INLINE void pack_keys(const key_block *b, float *to, int kind)
{
    float rows[4][STEP];
    for (int64_t j = 0; j < b->count; j += PANEL, to += b->d * PANEL)
        for (int64_t key = 0; key < PANEL; key += 4)
            for (int64_t i = 0; i < b->d; i += STEP) {
                const int64_t n = least(b->d - i, STEP);
                for (int w = 0; w < 4; w++) {
                    const int64_t at = j + key + w;
                    vf32 v = {0};
                    const int64_t ahead = at + PACK_AHEAD; /* after the keys come the values */
                    if (ahead < b->count)
                        key_prefetch(b->k[ahead], kind, i);
                    else if (ahead - b->count < b->count && i < b->dv)
                        key_prefetch(b->v[ahead - b->count], kind, i);
                    if (at < b->count)
                        v = key_floats(b->k[at], kind, i, n, b->k_scale[at]);
                    row_store32(rows[w], ADZE_F32, 0, v, 0);
                }
                float *column = to + i * PANEL + key;
                int64_t t = 0;
                for (; t + 4 <= n; t += 4)
                    turn4(&rows[0][t], STEP, column + t * PANEL, PANEL);
                for (; t < n; t++)
                    for (int w = 0; w < 4; w++)
                        column[t * PANEL + w] = rows[w][t];
            }
}
/* A panel has PANEL columns of each key, key after key. */
INLINE void pack_values(const key_block *b, float *to, int kind)
{
    for (int64_t j = 0; j < b->count; j++)
        for (int64_t i = 0; i < b->dv; i += STEP) {
            key_prefetch(b->v[least(j + PACK_AHEAD, b->count - 1)], kind, i);
            const vf32 v = key_floats(b->v[j], kind, i, least(b->dv - i, STEP), b->v_scale[j]);
            for (int p = 0; p < 2 * VF_PARTS; p++) {
                const int64_t column = i + p * VF_WIDTH;
                *(vf_loose *)(to + column / PANEL * b->count * PANEL + j * PANEL + column % PANEL) = v.part[p];
            }
        }
}
typedef void (*pack_fn)(const key_block *, float *, float *);
#define PACK_OF(name, kind)                                                                                          \
    NO_INLINE void pack_##name(const key_block *b, float *k, float *v)                                               \
    {                                                                                                                \
        pack_keys(b, k, kind);                                                                                       \
        pack_values(b, v, kind);                                                                                     \
    }
PACK_OF(f32, ADZE_F32)
PACK_OF(f16, ADZE_F16)
PACK_OF(bf16, ADZE_BF16)
PACK_OF(f8, ADZE_F8E4M3)
PACK_OF(i8, ADZE_I8)

#endif
