/* gemm_panels.h - products of many rows of x. Rows of x are packed in panels, for each k in turn; a tile has a few
   rows of w. A tile is multiplied with one panel after the other by the functions of gemm_tile.h, gemm_tile_bf16.h or
   gemm_tile_amx.h, which is included first. The sum of an output is of chains of CHAIN terms, which are added in the
   order of k: its bits do not depend on how many rows and columns there are. */
#ifndef ADZE_CPU_GEMM_PANELS_H
#define ADZE_CPU_GEMM_PANELS_H

#include "cpu/gemm.h"

enum {
    ROWS_PACKED = 256,      /* of x at a time: with a CHAIN of k they stay in the L2 cache, */
    SPAN_MOST = 480,        /* and so do the sums of so many columns of out */
    TURN_SLACK = 2 * PANEL, /* sums that are read besides those of whole tiles, four columns at a time */
    FEW_TILES = TILE % LANES ? 48 : 2 * TILE, /* columns of some tiles: whole vectors of out */
    X_CACHED = 1 << 17                        /* elements of x that stay there without either */
};

INLINE int64_t panels_of(const gemm_call *c)
{
    return (c->count + PANEL - 1) / PANEL;
}
/* A CHAIN of k of a panel. */
INLINE number *panel_at(const gemm_call *c, int64_t panel, int64_t chain)
{
    return (number *)(void *)c->floats + (chain * panels_of(c) + panel) * CHAIN * PANEL;
}

/* The end of the CHAIN of k that begins at `from`, in whole STEPs. */
INLINE int64_t chain_end(const gemm_call *c, int64_t from)
{
    return least(from + CHAIN, (c->k + STEP - 1) / STEP * STEP);
}

static void norm_rows(void *context, int64_t begin, int64_t end)
{
    const gemm_call *c = context;
    for (int64_t r = begin; r < end; r++)
        gemm_norm(c, gemm_row(c, r), c->normed + r * c->k * size_of(c->dtype));
}
/* Panels of one CHAIN of k after the other. */
static void pack_panels(void *context, int64_t begin, int64_t end)
{
    const gemm_call *c = context;
    for (int64_t i = begin; i < end; i++) {
        const int64_t panel = i % panels_of(c), chain = i / panels_of(c), from = chain * CHAIN;
        const int64_t first = panel * PANEL, rows = least(c->count - first, PANEL);
        const char *row[PANEL];
        for (int64_t r = 0; r < rows; r++)
            row[r] = c->a->norm ? c->normed + (first + r) * c->k * size_of(c->dtype) : gemm_row(c, first + r);
        pack_panel(c, panel_at(c, panel, chain), row, rows, from, chain_end(c, from));
    }
}

/* Some panels, for some columns of a weight. */
typedef struct gemm_piece {
    int64_t panel, panels, column, columns;
} gemm_piece;
INLINE int64_t piece_span(const gemm_piece *p) /* whole tiles */
{
    return (p->columns + TILE - 1) / TILE * TILE;
}

/* The sums of a piece: [panel][column][PANEL]. */
NO_INLINE void piece_sums(const gemm_call *c, const gemm_weight *w, const gemm_piece *piece, float *sums)
{
    const int64_t span = piece_span(piece), columns = piece->columns;
    const weight_rows rows = weight_rows_of(c, w);
    const int64_t bits = is_quantised(c->kind) ? (c->kind == ADZE_U8 ? 4 : 8) : 8 * size_of(c->kind);
    number tile[TILE_SIZE] __attribute__((aligned(64)));
    if (c->k == 0)
        memset(sums, 0, (size_t)(piece->panels * span * PANEL) * sizeof *sums);
    for (int64_t from = 0; from < c->k; from += CHAIN) {
        const int64_t end = chain_end(c, from), calls = (columns + TILE - 1) / TILE * piece->panels * TURNS;
        /* the next CHAIN of the panels, or for the next piece the first one again */
        gemm_ahead next[2];
        next[1] = gemm_ahead_of((const char *)panel_at(c, piece->panel, end < c->k ? from / CHAIN + 1 : 0), 0, 1,
                                piece->panels * CHAIN * PANEL * (int64_t)sizeof *tile);
        next[1].share = next[1].left / calls + 1;
        for (int64_t j = 0; j < columns; j += TILE) {
            fill_tile(c, w, tile, piece->column + j, least(columns - j, TILE), from, end);
            /* next comes the tile of other columns, or of the next CHAIN of k, or of the next piece; each panel
               prefetches a share of it */
            const int last = j + TILE >= columns, ends = last && end >= c->k;
            const int64_t row = piece->column + (last && !ends ? 0 : j + TILE);
            const int64_t next_from = ends ? 0 : last ? from + CHAIN : from, ahead = least(c->k - next_from, CHAIN);
            const int64_t next_rows = least((ends ? w->n : piece->column + columns) - row, TILE);
            next[0] = gemm_ahead_of(rows.data + row * rows.stride + next_from * bits / 8, rows.stride,
                                    most(next_rows, 0), ahead * bits / 8);
            next[0].share = next[0].left / (piece->panels * TURNS) + 1;
            for (int64_t p = 0; p < piece->panels; p++) {
                const int64_t panel = piece->panel + p;
                tile_times_panel(tile, panel_at(c, panel, from / CHAIN), end - from, sums + (p * span + j) * PANEL,
                                 from == 0, c->count - panel * PANEL, next);
            }
        }
    }
}
NO_INLINE void piece_of(const gemm_call *c, const gemm_weight *w, const gemm_piece *piece, float *sums)
{
    const int64_t span = piece_span(piece), size = piece->panels * PANEL * span;
    const int64_t first = piece->panel * PANEL, rows = least(c->count - first, piece->panels * PANEL);
    piece_sums(c, w, piece, sums);
    if (c->a->glu)
        piece_sums(c, w + 1, piece, sums + size);
    for (int64_t r = 0; r < rows; r += 4) {
        float y[2][4][SPAN_MOST];
        const float *from = sums + r / PANEL * span * PANEL + r % PANEL;
        for (int64_t j = 0; j < span; j += 4)
            turn4(from + j * PANEL, PANEL, &y[0][0][j], SPAN_MOST);
        for (int64_t j = 0; j < span && c->a->glu; j += 4)
            turn4(from + size + j * PANEL, PANEL, &y[1][0][j], SPAN_MOST);
        for (int64_t i = 0; i < least(rows - r, 4); i++)
            gemm_finish(c, w, y[0][i], y[1][i], c->first_row + first + r + i, piece->column, piece->columns);
    }
}

/* Spans of columns, of one weight after the other. Without memory for the sums of a span, its pieces are of one tile
   and one panel. */
static void panels_body(void *context, int64_t begin, int64_t end)
{
    const gemm_call *c = context;
    const int64_t panels = panels_of(c);
    const size_t bytes = (size_t)(panels * PANEL * c->span * (c->a->glu ? 2 : 1) + TURN_SLACK) * sizeof(float);
    float *sums = aligned_alloc(64, bytes);
    for (int64_t i = begin; i < end; i++) {
        const gemm_block its = gemm_block_of(c, i, c->span);
        const gemm_weight *w = its.w;
        const int64_t column = its.column, count = its.count;
        /* x that stays in the L2 cache is read again for a few tiles, so that rows of w are read from end to end */
        const int64_t at_once = panels * PANEL * c->k <= X_CACHED ? FEW_TILES : count;
        for (int64_t j = 0; j < count && sums; j += at_once)
            piece_of(c, w, &(gemm_piece){0, panels, column + j, least(count - j, at_once)}, sums);
        for (int64_t j = 0; j < count && !sums; j += TILE)
            for (int64_t p = 0; p < panels; p++) {
                float few[2 * TILE * PANEL + TURN_SLACK];
                piece_of(c, w, &(gemm_piece){p, 1, column + j, least(count - j, TILE)}, few);
            }
    }
    free(sums);
}

/* Memory for `rows` rows of x, packed and before that, where they have a norm. */
static int panels_memory(gemm_call *c, int64_t rows)
{
    const int64_t lanes = (rows + PANEL - 1) / PANEL * PANEL, chains = (c->k + CHAIN - 1) / CHAIN;
    const size_t packed = (size_t)(lanes * chains * CHAIN) * sizeof(number);
    const size_t normed = c->a->norm ? (size_t)(lanes * c->k * size_of(c->dtype) + 64) / 64 * 64 : 0;
    c->floats = aligned_alloc(64, packed + normed + 64);
    c->normed = (char *)c->floats + packed;
    return c->floats != NULL;
}

/* Columns of a piece, whole tiles: of four pieces for each thread, or fewer where their last ones would leave threads
   idle for longer. */
static int64_t span_of(const gemm_call *c, int64_t columns)
{
    const int64_t threads = adze_thread_count(), most = c->a->glu ? SPAN_MOST / 2 : SPAN_MOST;
    int64_t span = 0, least_time = 0;
    for (int each = 4; each > 0; each--) {
        const int64_t share = (columns + each * threads - 1) / (each * threads);
        const int64_t some = least((share + TILE - 1) / TILE * TILE, most);
        const int64_t pieces = (columns + some - 1) / some, time = (pieces + threads - 1) / threads * some;
        if (span == 0 || time < least_time)
            span = some, least_time = time;
    }
    return span;
}

/* All rows of x, some at a time. */
static adze_status panels_all(gemm_call *c)
{
    int64_t columns = 0, rows = least(c->per_batch, ROWS_PACKED);
    for (int i = 0; i < c->weights; i++)
        columns += c->weight[i].n;
    if (columns == 0 || c->rows.count == 0)
        return ADZE_OK;
    c->span = span_of(c, columns);
    while (!panels_memory(c, rows) && rows > 1)
        rows /= 2;
    ADZE_REQUIRE(c->floats, ADZE_NO_KERNEL, NO_MEMORY, (long long)rows, (long long)c->k);
    while (gemm_next_rows(c, rows)) {
        if (c->a->norm)
            adze_parallel_for(c->count, row_grain(c->k), norm_rows, c);
        adze_parallel_for(panels_of(c) * ((c->k + CHAIN - 1) / CHAIN), 2, pack_panels, c);
        adze_parallel_for(gemm_blocks(c, c->span), gemm_grain(c, c->span), panels_body, c);
    }
    free(c->floats);
    return ADZE_OK;
}

#endif
