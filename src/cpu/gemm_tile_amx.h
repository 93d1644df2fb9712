/* gemm_tile_amx.h - a tile of w times a panel of x, both in bf16, by AMX: TDPBF16PS multiplies sixteen rows of w and
   sixteen of x, 32 elements of each, and adds the sums of pairs of products to floats. Rows of w are read as they
   are; x is packed by pairs of elements. */
#ifndef ADZE_CPU_GEMM_TILE_AMX_H
#define ADZE_CPU_GEMM_TILE_AMX_H

#include "cpu/gemm.h"

typedef uint16_t number;
enum {
    SIDE = 16,                /* rows of a register of tiles */
    TILE = 2 * SIDE,          /* rows of w */
    PANEL = 2 * SIDE,         /* rows of x */
    TURNS = 1,                /* of a CHAIN, in which the next rows of w are prefetched */
    TILE_STRIDE = CHAIN + 32, /* numbers from one row of a tile to the next: no power of two */
    TILE_SIZE = TILE * TILE_STRIDE
};

/* ---- Packing ---- */

/* Elements from..end of k of some rows: [k / 2][PANEL][2]. Rows that a panel lacks, and terms beyond k, are zero. */
NO_INLINE void pack_panel(const gemm_call *c, number *to, const char *const *row, int64_t rows, int64_t from,
                          int64_t end)
{
    for (int64_t r = 0; r < PANEL; r += 4)
        for (int64_t i = from; i < end; i += STEP) {
            float some[4][STEP / 2] = {{0}}; /* pairs */
            for (int64_t e = 0; e < 4 && r + e < rows; e++)
                memcpy(some[e], row[r + e] + i * 2, (size_t)least(c->k - i, STEP) * sizeof *to);
            for (int64_t t = 0; t < STEP / 2; t += 4)
                turn4(&some[0][t], STEP / 2, (float *)(void *)to + ((i - from) / 2 + t) * PANEL + r, PANEL);
        }
}
NO_INLINE void fill_tile(const gemm_call *c, const gemm_weight *w, number *tile, int64_t column, int64_t count,
                         int64_t from, int64_t end)
{
    const weight_rows rows = weight_rows_of(c, w);
    const int64_t n = least(c->k, end) - from;
    for (int64_t j = 0; j < TILE; j++) {
        number *to = tile + j * TILE_STRIDE;
        const int64_t here = j < count ? n : 0;
        if (here)
            memcpy(to, rows.data + (column + j) * rows.stride + from * 2, (size_t)here * sizeof *to);
        memset(to + here, 0, (size_t)(end - from - here) * sizeof *to);
    }
}

/* ---- Products ---- */

/* Adds `depth` terms to sum[TILE][PANEL], or begins it. The panel has `rows` rows, or more than it can hold. The
   registers are configured here and released, as others of the process use them too. */
NO_INLINE void tile_times_panel(const number *tile, const number *panel, int64_t depth, float *sum, int begins,
                                int64_t rows, gemm_ahead *next)
{
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1,
                .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                .rows = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE}};
    float part[TILE * PANEL] __attribute__((aligned(64)));
    const int two = rows > SIDE;
    gemm_prefetch(next);
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < depth; i += STEP) {
        _tile_loadd(4, tile + i, TILE_STRIDE * 2);
        _tile_loadd(5, tile + SIDE * TILE_STRIDE + i, TILE_STRIDE * 2);
        _tile_loadd(6, panel + i * PANEL, PANEL * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (two) {
            _tile_loadd(7, panel + i * PANEL + 2 * SIDE, PANEL * 4);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, part, PANEL * 4);
    _tile_stored(1, part + SIDE * PANEL, PANEL * 4);
    _tile_stored(2, part + SIDE, PANEL * 4);
    _tile_stored(3, part + SIDE * PANEL + SIDE, PANEL * 4);
    _tile_release();
    for (int64_t i = 0; i < TILE * PANEL; i += VF_WIDTH) {
        vf_loose *to = (vf_loose *)(sum + i);
        const vf v = *(const vf_loose *)(part + i);
        *to = begins ? v : (vf)(*to + v);
    }
}

#endif
