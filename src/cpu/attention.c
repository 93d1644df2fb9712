/* attention on the CPU: softmax in one pass over blocks of keys. The rows of q that read one head of k and v, those
   of its group of heads, are one matrix, query after query. A piece of work is a number of its rows and a range of
   keys: each row has a running maximum, a sum of exp(s - maximum) and a row of sums for out. Where rows alone do not
   keep the threads busy, keys are split, and the parts of a row are merged at the end. */
#include "cpu/attention_weights.h"

#include <stdatomic.h>
#include <stdlib.h>

enum {
    LINE_BYTES = 64,
    CHUNK = 1536,
    CHUNK_LEAST = 4 * TILE,
    SPLIT_LEAST = 2 * KEYS,
    PREFETCHED_BYTES = 512,  /* of a row */
    PACKED_BYTES = 512 << 10 /* of keys and values as floats: a part of the L2 cache */
};

typedef struct piece {
    int64_t sequence, head; /* of k and v */
    int64_t row, rows;
    int64_t low, high; /* keys */
    int64_t state;     /* where its rows are among the states of all; -1: no other piece has these rows */
} piece;

typedef struct attention_call {
    const adze_attention_args *a;
    attention_sizes sizes;
    int64_t group, d_floats, dv_floats, mask_stride[3];
    int64_t packed; /* keys that are packed at a time: whole blocks, or whole panels of one */
    int64_t keys;   /* the most that a sequence has */
    int kind;       /* the dtype of k and v */
    float scale;
    piece *pieces;
    int64_t count, splits;
    _Atomic int64_t next;
    float *states; /* of rows whose keys are split: maximum, sum, and dv_floats sums for out */
    char *buffers; /* one for each worker */
    int64_t workers;
    size_t buffer_size;
} attention_call;

/* What a worker has for a piece: scores and keys, and q, sums and states of its rows. */
typedef struct worker {
    float *q, *s, *k, *v, *sums, *block;
    row_state *state;
} worker;

static int64_t tiles_of(int64_t rows)
{
    return (rows + TILE - 1) / TILE;
}
/* Whether all keys of a piece are packed at once: then its tiles are finished one after the other. */
static int packs_once(const attention_call *c)
{
    return c->keys <= c->packed;
}

/* Sizes only when `at` is NULL. */
static size_t worker_of(const attention_call *c, char *at, int64_t rows, worker *w)
{
    const int64_t few = rows <= FEW, tiles = few || packs_once(c) ? 1 : tiles_of(rows), all = few ? FEW : TILE;
    const int64_t keys = few ? 0 : least(c->packed, c->keys) + PANEL;
    float *state = NULL, **const parts[] = {&w->q, &w->s, &w->k, &w->v, &w->sums, &w->block, &state};
    const int64_t floats[] = {tiles * all * c->d_floats,
                              most(TILE, FEW) * S_ROW,
                              keys * c->d_floats,
                              keys * c->dv_floats,
                              tiles * all * c->dv_floats,
                              few ? FEW * c->dv_floats : 0,
                              tiles * (int64_t)(sizeof *w->state / sizeof(float))};
    size_t bytes = 0;
    for (int i = 0; i < 7; i++) {
        *parts[i] = at ? (float *)(void *)(at + bytes) : NULL;
        bytes += (size_t)(floats[i] + 15) / 16 * LINE_BYTES;
    }
    w->state = (row_state *)(void *)state;
    return bytes;
}

/* ---- A piece ---- */

static query query_of(const attention_call *c, const piece *p, const attention_sequence *s, int64_t row)
{
    const adze_attention_args *a = c->a;
    query q = {.head = p->head, .i = row};
    if (c->group > 1)
        q.head = p->head * c->group + row % c->group, q.i = row / c->group;
    q.seen = attention_range_of(a, s, q.i);
    if (a->mask.dtype)
        q.mask = (const char *)a->mask.data +
                 (s->batch * c->mask_stride[0] + q.head * c->mask_stride[1] + q.i * c->mask_stride[2]) *
                     (int64_t)adze_dtype_size(a->mask.dtype);
    return q;
}

static void find_keys(const attention_call *c, const piece *p, const attention_sequence *s, int64_t j, int64_t n,
                      key_block *b)
{
    const adze_attention_args *a = c->a;
    const int64_t size = (int64_t)adze_dtype_size(c->kind);
    b->count = n, b->d = c->sizes.d, b->dv = c->sizes.dv;
#define AT(t, i) attention_key_at(a, &c->sizes, s, p->sequence, &a->t, p->head, j + (i))
    for (int64_t i = 0; i < n; i += c->sizes.page ? 1 : n) {
        b->k[i] = (const char *)a->k.data + AT(k, i) * size;
        b->v[i] = (const char *)a->v.data + AT(v, i) * size;
    }
    for (int64_t i = 1; i < n && !c->sizes.page; i++) {
        b->k[i] = b->k[0] + i * a->k.stride[2] * size;
        b->v[i] = b->v[0] + i * a->v.stride[2] * size;
    }
    for (int64_t i = 0; i < n && is_quantised(c->kind); i++) {
        b->k_scale[i] = ((const float *)a->k_scale.data)[a->k_scale.rank == 1 ? 0 : AT(k_scale, i)];
        b->v_scale[i] = ((const float *)a->v_scale.data)[a->v_scale.rank == 1 ? 0 : AT(v_scale, i)];
    }
#undef AT
}

INLINE vf32 q_load(const char *row, int dtype, int64_t i, int64_t n, int order)
{
    return dtype == ADZE_F32   ? vf32_order(row_load32_part(row, ADZE_F32, i, n), ADZE_F32, order)
           : dtype == ADZE_F16 ? vf32_order(row_load32_part(row, ADZE_F16, i, n), ADZE_F16, order)
                               : vf32_order(row_load32_part(row, ADZE_BF16, i, n), ADZE_BF16, order);
}

/* Where the row of a query is in q or out. */
static char *row_of(const adze_tensor *t, const attention_sequence *s, const query *q)
{
    return (char *)t->data + (s->batch * t->stride[0] + q->head * t->stride[1] + (s->first + q->i) * t->stride[2]) *
                                 adze_float_size(t->dtype);
}

/* Rows of q as floats, scaled: a few one after the other in the order of k's kind, those of a tile side by side. */
static void read_q(const attention_call *c, const attention_sequence *s, const query *q, int64_t rows, int few,
                   float *to)
{
    const adze_attention_args *a = c->a;
    const int64_t d = c->sizes.d, all = few ? FEW : (TILE + 3) / 4 * 4;
    const int order = few && c->kind == ADZE_BF16 ? ADZE_BF16 : ADZE_F32;
    const char *row[LANES];
    for (int64_t r = 0; r < rows; r++)
        row[r] = row_of(&a->q, s, &q[r]);
    for (int64_t i = 0; i < d; i += STEP) {
        float floats[LANES][STEP];
        const int64_t n = least(d - i, STEP);
        for (int64_t r = 0; r < all; r++) {
            vf32 v = {0};
            if (r < rows)
                v = q_load(row[r], a->q.dtype, i, n, order);
            for (int x = 0; x < 2 * VF_PARTS; x++)
                v.part[x] *= c->scale;
            row_store32(few ? to + r * c->d_floats + i : &floats[r][0], ADZE_F32, 0, v, 0);
        }
        /* Four rows at a time, the last ones first: the lanes that they write too much are those of earlier rows. */
        for (int64_t r = (TILE - 1) / 4 * 4; r >= 0 && !few; r -= 4) {
            int64_t t = 0;
            for (; t + 4 <= n; t += 4)
                turn4(&floats[r][t], STEP, to + (i + t) * TILE + r, TILE);
            for (; t < n; t++)
                for (int64_t x = r; x < least(r + 4, TILE); x++)
                    to[(i + t) * TILE + x] = floats[x][t];
        }
    }
}

static void few_block(const attention_call *c, const worker *w, const piece *p, const query *q, const key_block *b,
                      int64_t j)
{
    static const few_scores_fn scores[] = {[ADZE_F32] = few_scores_f32,
                                           [ADZE_F16] = few_scores_f16,
                                           [ADZE_BF16] = few_scores_bf16,
                                           [ADZE_F8E4M3] = few_scores_f8,
                                           [ADZE_I8] = few_scores_i8};
    static const few_sums_fn sums[] = {[ADZE_F32] = few_sums_f32,
                                       [ADZE_F16] = few_sums_f16,
                                       [ADZE_BF16] = few_sums_bf16,
                                       [ADZE_F8E4M3] = few_sums_f8,
                                       [ADZE_I8] = few_sums_i8};
    float keep[LANES];
    const int rows = p->rows == 1 ? 1 : p->rows == 2 ? 2 : p->rows <= 4 ? 4 : 8;
    scores[c->kind](b, w->q, c->d_floats, w->s, rows);
    weigh(c->a, q, p->rows, w->s, j, b->count, w->state, keep);
    for (int64_t r = p->rows; r < rows; r++)
        memset(w->s + r * S_ROW, 0, (size_t)b->count * sizeof *w->s);
    memset(w->block, 0, (size_t)(FEW * c->dv_floats) * sizeof *w->block);
    sums[c->kind](b, w->s, w->block, c->dv_floats, rows);
    for (int64_t r = 0; r < p->rows; r++)
        for (int64_t i = 0; i < c->dv_floats; i += LANES) {
            vf16 v = row_load(w->sums + r * c->dv_floats, ADZE_F32, i);
            const vf16 more = row_load(w->block + r * c->dv_floats, ADZE_F32, i);
            for (int x = 0; x < VF_PARTS; x++)
                v.part[x] = v.part[x] * keep[r] + more.part[x];
            row_store(w->sums + r * c->dv_floats, ADZE_F32, i, v);
        }
}

/* The beginning of a row of q or out: heads may be side by side, and rows too short for the processor to foresee. */
INLINE void prefetch_row(const adze_tensor *t, const attention_sequence *s, const query *q)
{
    const char *row = row_of(t, s, q);
    for (int64_t i = 0; i < least(t->shape[3] * adze_float_size(t->dtype), PREFETCHED_BYTES); i += LINE_BYTES)
        __builtin_prefetch(row + i);
}

/* The mask of a row of the next tile, into the L2 cache: the part of a row that a block has is too short for the
   processor to foresee. */
static void prefetch_mask(const attention_call *c, const piece *p, const attention_sequence *s, int64_t row,
                          int64_t j, int64_t n)
{
    const query q = query_of(c, p, s, row);
    const int64_t size = (int64_t)adze_dtype_size(c->a->mask.dtype);
    for (int64_t i = 0; i < n * size; i += LINE_BYTES)
        __builtin_prefetch(q.mask + j * size + i, 0, 2);
}

/* Packs the n keys from j on. */
static void pack_blocks(const attention_call *c, const worker *w, const piece *p, const attention_sequence *s,
                        int64_t j, int64_t n)
{
    static const pack_fn pack[] = {[ADZE_F32] = pack_f32,
                                   [ADZE_F16] = pack_f16,
                                   [ADZE_BF16] = pack_bf16,
                                   [ADZE_F8E4M3] = pack_f8,
                                   [ADZE_I8] = pack_i8};
    for (int64_t at = 0; at < n; at += KEYS) {
        key_block b;
        find_keys(c, p, s, j + at, least(n - at, KEYS), &b);
        pack[c->kind](&b, w->k + at * c->sizes.d, w->v + at * c->dv_floats);
    }
}

/* Some rows of a piece, and what a worker has for them. */
typedef struct row_tile {
    query queries[TILE];
    int64_t rows;
    float *q, *sums;
    row_state *state;
} row_tile;

/* A block of count packed keys from j on, for the rows of a tile; s is for their scores. */
static void tile_block(const attention_call *c, const row_tile *t, const float *k, const float *v, int64_t j,
                       int64_t count, float *s)
{
    const query *q = t->queries;
    const int64_t rows = t->rows;
    float keep[LANES];
    int64_t keys = least(q[rows - 1].seen.high - j, count); /* later ones are seen by none of these rows */
    if (keys > 0 && mask_hides(c->a)) {
        int64_t left = 0;
        for (int64_t r = 0; r < rows && left < keys; r++)
            if (r == 0 || q[r].mask != q[r - 1].mask)
                left = most(left, unmasked(&q[r], j, keys));
        keys = left;
    }
    if (keys <= 0 || q[0].seen.low >= j + count)
        return;
    static const tile_scores_fn scores_of_rows[] = {tile_scores_4, tile_scores_8, tile_scores_all};
    static const tile_sums_fn sums_of_rows[] = {tile_sums_4, tile_sums_8, tile_sums_all};
    const int64_t fours = (rows + 3) / 4;
    const value_panels values = {v, count, keys, c->sizes.dv};
    scores_of_rows[fours - 1](t->q, k, keys, c->sizes.d, s);
    weigh(c->a, q, rows, s, j, keys, t->state, keep);
    for (int64_t r = rows; r < least(4 * fours, TILE); r++)
        memset(s + r * S_ROW, 0, (size_t)keys * sizeof *s);
    sums_of_rows[fours - 1](s, &values, keep, t->sums, c->dv_floats);
}

/* ---- Rows of out ---- */

static float sink_of(const attention_call *c, int64_t head)
{
    const adze_tensor *t = &c->a->sinks;
    return t->dtype ? float_at(t->data, t->dtype, head) : -INFINITY;
}

/* One row: sums over a total, in the order of k's kind when they are of a few rows; NULL: zeros. */
static void write_row(const attention_call *c, int64_t batch, int64_t head, int64_t i, const float *sums,
                      float maximum, float total, int order)
{
    const adze_attention_args *a = c->a;
    const adze_tensor *out = &a->out, *lse = &a->lse;
    const float sink = sums ? sink_of(c, head) : -INFINITY, shift = sink > maximum ? sink : maximum;
    const float keep = shift == maximum ? 1 : expf(maximum - shift);
    const float all = sink == -INFINITY ? total : total * keep + expf(sink - shift);
    const float factor = sums && all != 0 ? keep / all : 0;
    char *to = (char *)out->data +
               (batch * out->stride[0] + head * out->stride[1] + i * out->stride[2]) * adze_float_size(out->dtype);
    for (int64_t at = 0; at < c->sizes.dv; at += STEP) {
        vf32 v = {0};
        if (sums && all != 0)
            v = row_load32(sums, ADZE_F32, at);
        v = vf32_order(v, order, ADZE_F32);
        for (int half = 0; half < 2 && at + half * LANES < c->sizes.dv; half++) {
            vf16 part;
            const int64_t n = least(c->sizes.dv - at - half * LANES, LANES);
            for (int p = 0; p < VF_PARTS; p++)
                part.part[p] = v.part[half * VF_PARTS + p] * factor;
            switch (out->dtype) {
            case ADZE_F32: row_store_part(to, ADZE_F32, at + half * LANES, part, n, 0); break;
            case ADZE_F16: row_store_part(to, ADZE_F16, at + half * LANES, part, n, 0); break;
            default: row_store_part(to, ADZE_BF16, at + half * LANES, part, n, 0); break;
            }
        }
    }
    if (lse->dtype)
        ((float *)lse->data)[batch * lse->stride[0] + head * lse->stride[1] + i * lse->stride[2]] =
            all == 0 ? -INFINITY : shift + logf(all);
}

static int is_few(const piece *p)
{
    return p->rows <= FEW;
}
/* The order of a piece's sums. */
static int order_in(const attention_call *c, const piece *p)
{
    return is_few(p) && c->kind == ADZE_BF16 ? ADZE_BF16 : ADZE_F32;
}

/* Rows of a piece from `from` on: they are done, or their state is kept until those of other keys are. */
static void end_rows(const attention_call *c, const piece *p, const attention_sequence *s, const query *q,
                     int64_t from, int64_t rows, const float *sums, const row_state *t)
{
    for (int64_t r = 0; r < rows; r++, sums += c->dv_floats) {
        if (p->state < 0) {
            write_row(c, s->batch, q[r].head, s->first + q[r].i, sums, t->maximum[r], t->total[r], order_in(c, p));
            continue;
        }
        float *state = c->states + (p->state + from + r) * (c->dv_floats + STEP);
        state[0] = t->maximum[r], state[1] = t->total[r];
        memcpy(state + STEP, sums, (size_t)c->dv_floats * sizeof *sums);
    }
}

/* ---- A piece's keys ---- */

static void work_few(const attention_call *c, const worker *w, const piece *p, const attention_sequence *s,
                     int64_t low, int64_t high)
{
    query queries[FEW];
    for (int64_t r = 0; r < p->rows; r++)
        queries[r] = query_of(c, p, s, p->row + r);
    read_q(c, s, queries, p->rows, 1, w->q);
    memset(w->sums, 0, (size_t)(FEW * c->dv_floats) * sizeof *w->sums);
    row_state_begin(w->state);
    for (int64_t j = low; j < high; j += KEYS) {
        key_block b;
        find_keys(c, p, s, j, least(high - j, KEYS), &b);
        few_block(c, w, p, queries, &b, j);
    }
    end_rows(c, p, s, queries, 0, p->rows, w->sums, w->state);
}

/* A tile and the n packed keys from j on, the first of its piece or the last. */
static void work_tile(const attention_call *c, const worker *w, const piece *p, const attention_sequence *s,
                      int64_t from, int64_t j, int64_t n, int first, int last)
{
    const int64_t slot = packs_once(c) ? 0 : from;
    row_tile t = {.rows = least(p->rows - from, TILE),
                  .q = w->q + slot * c->d_floats,
                  .sums = w->sums + slot * c->dv_floats,
                  .state = w->state + slot / TILE};
    for (int64_t r = 0; r < t.rows; r++)
        t.queries[r] = query_of(c, p, s, p->row + from + r);
    if (first) {
        read_q(c, s, t.queries, t.rows, 0, t.q);
        memset(t.sums, 0, (size_t)(TILE * c->dv_floats) * sizeof *t.sums);
        row_state_begin(t.state);
    }
    for (int64_t r = from + TILE; r < least(from + 2 * TILE, p->rows) && first; r++) {
        const query next = query_of(c, p, s, p->row + r);
        prefetch_row(&c->a->q, s, &next);
    }
    for (int64_t r = 0; r < t.rows && last; r++)
        prefetch_row(&c->a->out, s, &t.queries[r]);
    for (int64_t at = 0; at < n; at += KEYS) {
        const int64_t count = least(n - at, KEYS);
        tile_block(c, &t, w->k + at * c->sizes.d, w->v + at * c->dv_floats, j + at, count, w->s);
        for (int64_t r = from + TILE; r < least(from + 2 * TILE, p->rows) && c->mask_stride[2]; r++)
            prefetch_mask(c, p, s, p->row + r, j + at, count);
    }
    if (last)
        end_rows(c, p, s, t.queries, from, t.rows, t.sums, t.state);
}

static void work(const attention_call *c, const worker *w, const piece *p)
{
    const attention_sequence s = attention_sequence_of(c->a, &c->sizes, p->sequence);
    const query first = query_of(c, p, &s, p->row), last = query_of(c, p, &s, p->row + p->rows - 1);
    const int64_t low = most(p->low, first.seen.low), high = most(least(p->high, last.seen.high), low);
    if (is_few(p)) {
        work_few(c, w, p, &s, low, high);
        return;
    }
    int64_t j = low;
    do { /* once also where there are no keys */
        const int64_t n = least(high - j, c->packed);
        pack_blocks(c, w, p, &s, j, n);
        for (int64_t from = 0; from < p->rows; from += TILE)
            work_tile(c, w, p, &s, from, j, n, j == low, j + n == high);
        j += n;
    } while (j < high);
}

static void body(void *context, int64_t begin, int64_t end)
{
    attention_call *c = context;
    for (int64_t i = begin; i < end; i++)
        for (int64_t next = c->next++; next < c->count; next = c->next++) {
            worker w;
            worker_of(c, c->buffers + (size_t)i * c->buffer_size, c->pieces[next].rows, &w);
            work(c, &w, &c->pieces[next]);
        }
}

/* The parts of rows whose keys are split: pieces of the same rows follow one another. */
static void merge(void *context, int64_t begin, int64_t end)
{
    const attention_call *c = context;
    const int64_t floats = c->dv_floats + STEP;
    for (int64_t g = begin; g < end; g++) {
        const piece *p = &c->pieces[g * c->splits];
        const attention_sequence s = attention_sequence_of(c->a, &c->sizes, p->sequence);
        for (int64_t r = 0; r < p->rows; r++) {
            float *to = c->states + (p->state + r) * floats, maximum = to[0], total = 0;
            for (int64_t i = 1; i < c->splits; i++) {
                const float other = c->states[(p[i].state + r) * floats];
                maximum = other > maximum ? other : maximum;
            }
            for (int64_t i = 0; i < c->splits; i++) {
                const float *from = c->states + (p[i].state + r) * floats;
                const float keep = maximum == -INFINITY ? 1 : expf(from[0] - maximum);
                total += from[1] * keep;
                for (int64_t x = STEP; x < floats; x++)
                    to[x] = i ? to[x] + from[x] * keep : from[x] * keep;
            }
            const query q = query_of(c, p, &s, p->row + r);
            write_row(c, s.batch, q.head, s.first + q.i, to + STEP, maximum, total, order_in(c, p));
        }
    }
}

/* ---- The call ---- */

static adze_status check_offsets(const char *name, const adze_tensor *t)
{
    const int32_t *at = t->data;
    for (int64_t s = 1; t->dtype && s < t->shape[0]; s++)
        ADZE_REQUIRE(at[s] >= at[s - 1], ADZE_BAD_ARG, "attention: %s[%lld] is %d, it must not be less than %d", name,
                     (long long)s, at[s], at[s - 1]);
    return ADZE_OK;
}

static adze_status check_pages(const attention_call *c)
{
    const adze_tensor *t = &c->a->block_table;
    for (int64_t s = 0; t->dtype && s < c->sizes.sequences; s++) {
        const attention_sequence q = attention_sequence_of(c->a, &c->sizes, s);
        for (int64_t b = 0; b * c->sizes.page < q.n; b++) {
            const int32_t page = ((const int32_t *)t->data)[s * t->stride[0] + b];
            ADZE_REQUIRE(page >= 0 && page < c->a->k.shape[0], ADZE_BAD_ARG,
                         "attention: block_table[%lld, %lld] is %d, it must be 0 to %lld", (long long)s, (long long)b,
                         page, (long long)c->a->k.shape[0] - 1);
        }
    }
    return ADZE_OK;
}

/* The pieces for these sizes, the longest first; NULL: only their number. */
static int64_t list_pieces(const attention_call *c, int64_t chunk, int64_t splits, piece *to)
{
    int64_t count = 0, states = 0;
    for (int64_t i = 0; i < c->sizes.sequences; i++) {
        const attention_sequence s = attention_sequence_of(c->a, &c->sizes, i);
        const int64_t rows = s.m * c->group, chunks = (rows + chunk - 1) / chunk;
        const int64_t share = most((s.n / splits + KEYS - 1) / KEYS * KEYS, KEYS);
        for (int64_t part = chunks - 1; part >= 0; part--)
            for (int64_t head = 0; head < c->sizes.kv_heads; head++)
                for (int64_t split = 0; split < splits; split++) {
                    const int64_t n = least(rows - part * chunk, chunk);
                    if (to)
                        to[count] = (piece){.sequence = i,
                                            .head = head,
                                            .row = part * chunk,
                                            .rows = n,
                                            .low = split * share,
                                            .high = split + 1 < splits ? (split + 1) * share : s.n,
                                            .state = splits > 1 ? states : -1};
                    states += n;
                    count++;
                }
    }
    return count;
}

/* Pieces for all threads: of fewer rows first, then of fewer keys. */
static adze_status plan(attention_call *c, int threads)
{
    int64_t chunk, rows = 0;
    for (int64_t i = 0; i < c->sizes.sequences; i++) {
        const attention_sequence s = attention_sequence_of(c->a, &c->sizes, i);
        c->keys = most(c->keys, s.n), rows = most(rows, s.m * c->group);
    }
    if (rows > CHUNK) { /* in equal parts */
        const int64_t parts = (rows + CHUNK - 1) / CHUNK;
        chunk = ((rows + parts - 1) / parts + TILE - 1) / TILE * TILE;
    } else {
        chunk = most(rows, 1);
    }
    c->count = list_pieces(c, chunk, 1, NULL);
    while (threads > 1 && c->count < 4 * threads && chunk > CHUNK_LEAST) {
        chunk = most((chunk / 2 + TILE - 1) / TILE * TILE, CHUNK_LEAST);
        c->count = list_pieces(c, chunk, 1, NULL);
    }
    c->splits = 1;
    if (threads > 1 && c->count > 0 && c->count < 2 * threads)
        c->splits = most(least((2 * threads + c->count - 1) / c->count, c->keys / SPLIT_LEAST), 1);
    c->count *= c->splits;
    worker unused;
    c->workers = least(threads, c->count);
    const size_t few = worker_of(c, NULL, FEW, &unused); /* pieces of fewer rows may be among those of a chunk */
    c->buffer_size = worker_of(c, NULL, chunk, &unused);
    c->buffer_size = few > c->buffer_size ? few : c->buffer_size;
    c->pieces = malloc((size_t)(c->count + 1) * sizeof *c->pieces);
    c->buffers = aligned_alloc(64, c->buffer_size * (size_t)(c->workers + 1));
    const size_t states = c->splits > 1 ? (size_t)(c->count * chunk * (c->dv_floats + STEP)) * sizeof *c->states : 0;
    c->states = malloc(states + 1);
    ADZE_REQUIRE(c->pieces && c->buffers && c->states, ADZE_NO_KERNEL, "attention: no memory for %zu bytes",
                 c->buffer_size * (size_t)c->workers + states);
    list_pieces(c, chunk, c->splits, c->pieces);
    return ADZE_OK;
}

/* Rows that no sequence has are zero. */
static void write_others(const attention_call *c)
{
    const adze_tensor *q = &c->a->q;
    int64_t next = 0;
    for (int64_t i = 0; i <= c->sizes.sequences && c->a->q_offsets.dtype; i++) {
        attention_sequence s = {.first = q->shape[2]};
        if (i < c->sizes.sequences)
            s = attention_sequence_of(c->a, &c->sizes, i);
        for (; next < s.first; next++)
            for (int64_t head = 0; head < c->sizes.heads; head++)
                write_row(c, 0, head, next, NULL, -INFINITY, 0, ADZE_F32);
        next = most(next, s.first + s.m);
    }
}

ADZE_CPU_KERNEL(attention)
{
    const adze_attention_args *a = args;
    attention_call c = {.a = a, .sizes = attention_sizes_of(a), .kind = a->k.dtype};
    (void)stream;
    ADZE_CHECK(check_offsets("q_offsets", &a->q_offsets));
    ADZE_CHECK(check_offsets("k_offsets", &a->k_offsets));
    ADZE_CHECK(check_pages(&c));
    c.group = c.sizes.heads / c.sizes.kv_heads;
    c.d_floats = (c.sizes.d + STEP - 1) / STEP * STEP;
    c.dv_floats = (c.sizes.dv + STEP - 1) / STEP * STEP;
    c.packed = PACKED_BYTES / (c.d_floats + c.dv_floats) / (int64_t)sizeof(float);
    c.packed = most(c.packed / PANEL, 1) * PANEL;
    if (c.packed > KEYS)
        c.packed = c.packed / KEYS * KEYS;
    c.scale = a->scale != 0 ? a->scale : (float)(1 / sqrt((double)c.sizes.d));
    attention_mask_strides(&a->mask, c.mask_stride);
    const adze_status status = plan(&c, adze_thread_count());
    if (status == ADZE_OK) {
        write_others(&c);
        adze_parallel_for(c.workers, 1, body, &c);
        if (c.splits > 1)
            adze_parallel_for(c.count / c.splits, 1, merge, &c);
    }
    free(c.states);
    free(c.buffers);
    free(c.pieces);
    return status;
}
