/* gemm_tile_bf16.h - a tile of w times a panel of x, both in bf16, by BFMMLA: it multiplies two rows of x and two of
   w, four elements of each, and adds the four sums of products to floats. */
#ifndef ADZE_CPU_GEMM_TILE_BF16_H
#define ADZE_CPU_GEMM_TILE_BF16_H

#include "cpu/gemm.h"

typedef uint16_t number;
enum {
    TILE = 12, /* rows of w */
    PANEL = 8, /* rows of x */
    QUAD = 4,  /* elements of a row that are together */
    TURNS = 1, /* of a CHAIN, in which the next rows of w are prefetched */
    TILE_SIZE = TILE * CHAIN
};

/* ---- Packing ---- */

/* A row in [k / QUAD][rows][QUAD], n of its elements and zeros up to `end`. */
INLINE void pack_quads(number *to, int rows, const number *row, int64_t n, int64_t end)
{
    for (int64_t i = 0; i < end; i += QUAD) {
        number quad[QUAD] = {0};
        if (n - i >= QUAD)
            memcpy(quad, row + i, sizeof quad);
        else if (n > i)
            memcpy(quad, row + i, (size_t)(n - i) * sizeof *quad);
        memcpy(to + i * rows, quad, sizeof quad);
    }
}
NO_INLINE void pack_panel(const gemm_call *c, number *to, const char *const *row, int64_t rows, int64_t from,
                          int64_t end)
{
    for (int64_t r = 0; r < PANEL; r++)
        pack_quads(to + r * QUAD, PANEL, (const number *)(const void *)row[r < rows ? r : 0] + from,
                   r < rows ? c->k - from : 0, end - from);
}
NO_INLINE void fill_tile(const gemm_call *c, const gemm_weight *w, number *tile, int64_t column, int64_t count,
                         int64_t from, int64_t end)
{
    const weight_rows rows = weight_rows_of(c, w);
    for (int64_t j = 0; j < TILE; j++)
        pack_quads(tile + j * QUAD, TILE,
                   (const number *)(const void *)(rows.data + (column + least(j, count - 1)) * rows.stride) + from,
                   j < count ? c->k - from : 0, end - from);
}

/* ---- Products ---- */

#if defined(__GNUC__) && !defined(__clang__)
#    define UNROLLED_TILE _Pragma("GCC unroll 6")
#else
#    define UNROLLED_TILE
#endif
/* Adds `depth` terms to sum[TILE][PANEL], or begins it. All rows of a panel are multiplied, also those it lacks. */
NO_INLINE void tile_times_panel(const number *tile, const number *panel, int64_t depth, float *sum, int begins,
                                int64_t rows, gemm_ahead *next)
{
    float32x4_t s[TILE / 2]
                 [PANEL / 2]; /* of columns j, j + 1 and rows r, r + 1: [r][j], [r][j + 1], [r + 1][j] ... */
    (void)rows;
    gemm_prefetch(next);
    UNROLLED_TILE
    for (int j = 0; j < TILE / 2; j++)
        UNROLLED_TILE
    for (int r = 0; r < PANEL / 2; r++)
        s[j][r] = vdupq_n_f32(0);
    for (int64_t i = 0; i < depth; i += QUAD) {
        bfloat16x8_t x[PANEL / 2];
        UNROLLED_TILE
        for (int r = 0; r < PANEL / 2; r++)
            x[r] = vreinterpretq_bf16_u16(vld1q_u16(panel + i * PANEL + (int64_t)r * 2 * QUAD));
        UNROLLED_TILE
        for (int j = 0; j < TILE / 2; j++) {
            const bfloat16x8_t w = vreinterpretq_bf16_u16(vld1q_u16(tile + i * TILE + (int64_t)j * 2 * QUAD));
            UNROLLED_TILE
            for (int r = 0; r < PANEL / 2; r++)
                s[j][r] = vbfmmlaq_f32(s[j][r], x[r], w);
        }
    }
    UNROLLED_TILE
    for (int j = 0; j < TILE / 2; j++)
        UNROLLED_TILE
    for (int r = 0; r < PANEL / 2; r += 2) {
        float *to = sum + (int64_t)2 * j * PANEL + (int64_t)2 * r;
        float32x4_t even = vuzp1q_f32(s[j][r], s[j][r + 1]), odd = vuzp2q_f32(s[j][r], s[j][r + 1]);
        if (!begins) {
            even = vaddq_f32(vld1q_f32(to), even);
            odd = vaddq_f32(vld1q_f32(to + PANEL), odd);
        }
        vst1q_f32(to, even);
        vst1q_f32(to + PANEL, odd);
    }
}

#endif
