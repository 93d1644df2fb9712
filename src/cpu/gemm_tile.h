/* gemm_tile.h - a tile of w times a panel of x in floats. The lanes of a vector are rows of x, each w is broadcast,
   and every output of the tile has a lane of a register. */
#ifndef ADZE_CPU_GEMM_TILE_H
#define ADZE_CPU_GEMM_TILE_H

#include "cpu/gemm.h"

typedef float number;
/* As many rows of w as there are registers for sums, besides those for x and one w. */
#if VF_PARTS == 1 || defined(__aarch64__)
enum { TILE = 12 };
#else
enum { TILE = 6 };
#endif
enum {
    PANEL = 2 * VF_WIDTH,     /* rows of x */
    TILE_STRIDE = CHAIN + 16, /* numbers from one row of a tile to the next: no power of two */
    TILE_SIZE = TILE * TILE_STRIDE,
    AHEAD = 8, /* elements of k for which a panel is prefetched from the L2 cache */
    TURNS = 4, /* of a CHAIN, in which sums and the next rows of w are prefetched */
    TURN = CHAIN / TURNS,
    SUM_BYTES = TILE * PANEL * 4
};

/* ---- Packing ---- */

/* The lanes of a panel that has `rows` rows, or more than it can hold. */
INLINE int64_t lanes_of(int64_t rows)
{
    return rows <= VF_WIDTH ? VF_WIDTH : PANEL;
}

/* Elements from..end of k of some rows: [k][lanes], in the order in which w is read. Lanes without a row, and terms
   beyond k, are zero. */
INLINE void pack_rows(const gemm_call *c, number *to, const char *const *row, int64_t rows, int64_t from, int64_t end,
                      int dtype)
{
    const int order = order_of(c->kind);
    const int64_t lanes = lanes_of(rows);
    float some[4][STEP];
    for (int64_t r = 0; r < lanes; r += 4)
        for (int64_t i = from; i < end; i += STEP) {
            for (int64_t e = 0; e < 4; e++) {
                vf32 v = {0};
                if (r + e < rows)
                    v = x_load(row[r + e], dtype, order, i, least(c->k - i, STEP));
                row_store32(some[e], ADZE_F32, 0, v, 0);
            }
            for (int64_t t = 0; t < STEP; t += 4)
                turn4(&some[0][t], STEP, to + (i - from + t) * lanes + r, lanes);
        }
}
NO_INLINE void pack_panel(const gemm_call *c, number *to, const char *const *row, int64_t rows, int64_t from,
                          int64_t end)
{
    switch (c->x_dtype) {
    case ADZE_F32: pack_rows(c, to, row, rows, from, end, ADZE_F32); break;
    case ADZE_F16: pack_rows(c, to, row, rows, from, end, ADZE_F16); break;
    case ADZE_F8E4M3: pack_rows(c, to, row, rows, from, end, ADZE_F8E4M3); break;
    default: pack_rows(c, to, row, rows, from, end, ADZE_BF16); break;
    }
}

/* Elements from..end of `count` rows of w from `column` on; the rows that a tile lacks are zero. */
INLINE void fill_rows(const gemm_call *c, const gemm_weight *w, number *tile, int64_t column, int64_t count,
                      int64_t from, int64_t end, int kind)
{
    const weight_rows rows = weight_rows_of(c, w);
    for (int64_t j = 0; j < TILE; j++) {
        number *to = tile + j * TILE_STRIDE;
        const char *row = rows.data + (column + j) * rows.stride;
        if (j >= count) {
            memset(to, 0, (size_t)(end - from) * sizeof *to);
            continue;
        }
        for (int64_t i = from, stop = end; i < least(end, c->k); i = stop) {
            dequantise d = {0};
            if (is_quantised(kind)) {
                stop = least(end, i - i % w->scales.group + w->scales.group);
                d = dequantise_of(&w->scales, kind, column + j, i / w->scales.group);
            }
            for (; i < stop; i += STEP) {
                const int64_t n = least(c->k - i, STEP);
                row_store32(
                    to, ADZE_F32, i - from,
                    is_quantised(kind) ? quantised_load(row, kind, i, n, &d) : row_load32_part(row, kind, i, n), 0);
            }
        }
    }
}
NO_INLINE void fill_tile(const gemm_call *c, const gemm_weight *w, number *tile, int64_t column, int64_t count,
                         int64_t from, int64_t end)
{
    switch (c->kind) {
    case ADZE_F32: fill_rows(c, w, tile, column, count, from, end, ADZE_F32); break;
    case ADZE_F16: fill_rows(c, w, tile, column, count, from, end, ADZE_F16); break;
    case ADZE_BF16: fill_rows(c, w, tile, column, count, from, end, ADZE_BF16); break;
    case ADZE_F8E4M3: fill_rows(c, w, tile, column, count, from, end, ADZE_F8E4M3); break;
    case ADZE_I8: fill_rows(c, w, tile, column, count, from, end, ADZE_I8); break;
    default: fill_rows(c, w, tile, column, count, from, end, ADZE_U8); break;
    }
}

/* ---- Products ---- */

/* UNROLLED for the columns of a tile. */
#if defined(__GNUC__) && !defined(__clang__)
#    define UNROLLED_TILE _Pragma("GCC unroll 12")
#else
#    define UNROLLED_TILE
#endif

/* One load serves all products of a number: gcc would give each its own. */
INLINE vf in_register(vf v)
{
#if defined(__AVX2__)
    __asm__("" : "+v"(v));
#endif
    return v;
}
/* With a panel of one vector of rows, or of two. */
INLINE void products(const number *tile, const number *panel, int64_t depth, float *sum, int begins, gemm_ahead *next,
                     int vectors)
{
    vf s[TILE][2];
    UNROLLED_TILE
    for (int j = 0; j < TILE; j++)
        for (int v = 0; v < vectors; v++)
            s[j][v] = vf_all(0);
    for (int64_t from = 0; from < depth; from += TURN) {
        gemm_prefetch(next);
        for (int64_t b = 0; b < SUM_BYTES / TURNS; b += LINE_BYTES)
            __builtin_prefetch((const char *)sum + from / TURN * (SUM_BYTES / TURNS) + b, 1);
        for (int64_t i = from; i < least(depth, from + TURN); i++) {
            vf x[2];
            for (int64_t b = 0; b < vectors * VF_WIDTH; b += LINE_BYTES / 4)
                __builtin_prefetch(panel + (i + AHEAD) * vectors * VF_WIDTH + b);
            for (int v = 0; v < vectors; v++)
                x[v] = *(const vf_loose *)(panel + i * vectors * VF_WIDTH + v * VF_WIDTH);
            UNROLLED_TILE
            for (int j = 0; j < TILE; j++) {
                const vf w = in_register(vf_all(tile[j * TILE_STRIDE + i]));
                for (int v = 0; v < vectors; v++)
                    s[j][v] = vf_fma(x[v], w, s[j][v]);
            }
        }
    }
    UNROLLED_TILE
    for (int j = 0; j < TILE; j++)
        for (int v = 0; v < vectors; v++) {
            vf_loose *to = (vf_loose *)(sum + j * PANEL + v * VF_WIDTH);
            *to = begins ? s[j][v] : (vf)(*to + s[j][v]);
        }
}
NO_INLINE void products_one(const number *tile, const number *panel, int64_t depth, float *sum, int begins,
                            gemm_ahead *next)
{
    products(tile, panel, depth, sum, begins, next, 1);
}
NO_INLINE void products_two(const number *tile, const number *panel, int64_t depth, float *sum, int begins,
                            gemm_ahead *next)
{
    products(tile, panel, depth, sum, begins, next, 2);
}
/* Adds `depth` terms to sum[TILE][PANEL], or begins it. The panel has `rows` rows, or more than it can hold. A share
   of the next rows of w is prefetched. */
INLINE void tile_times_panel(const number *tile, const number *panel, int64_t depth, float *sum, int begins,
                             int64_t rows, gemm_ahead *next)
{
    (lanes_of(rows) == PANEL ? products_two : products_one)(tile, panel, depth, sum, begins, next);
}

#endif
