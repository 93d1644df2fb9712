/* attention on the CPU: softmax in one pass over blocks of keys. The rows of q that read one head of k and v, those
   of its group of heads, are one matrix, query after query. A piece of work is a number of its rows and a range of
   keys: each row has a running maximum, a sum of exp(s - maximum) and a row of sums for out. Where rows alone do not
   keep the threads busy, keys are split, and the parts of a row are merged at the end. */
#include "attention_sizes.h"

#include "cpu/attention.h"

#include <stdatomic.h>
#include <stdlib.h>

enum { LINE_BYTES = 64, CHUNK = 1536, CHUNK_LEAST = 4 * TILE, SPLIT_LEAST = 2 * KEYS };

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
    int kind; /* the dtype of k and v */
    float scale;
    piece *pieces;
    int64_t count, splits;
    _Atomic int64_t next;
    float *states; /* of rows whose keys are split: maximum, sum, and dv_floats sums for out */
    char *buffers; /* one for each worker */
    int64_t workers;
    size_t buffer_size;
} attention_call;

/* What a worker has for a piece: q, scores, sums and maxima of its rows, and a block of keys. */
typedef struct worker {
    float *q, *s, *k, *v, *sums, *block;
    float *maximum, *total, *keep;
} worker;

static size_t lines(int64_t floats)
{
    return (size_t)(floats + 15) / 16 * 64;
}

/* Sizes only when `at` is NULL. */
static size_t worker_of(const attention_call *c, char *at, int64_t rows, worker *w)
{
    const int64_t tiled = (rows + TILE - 1) / TILE * TILE, all = most(tiled, FEW), keys = KEYS + PANEL;
    float **const parts[] = {&w->q, &w->s, &w->k, &w->v, &w->sums, &w->block, &w->maximum, &w->total, &w->keep};
    const int64_t floats[] = {all * c->d_floats,
                              most(TILE, FEW) * S_ROW,
                              keys * c->d_floats,
                              keys * c->dv_floats,
                              all * c->dv_floats,
                              FEW * c->dv_floats,
                              all,
                              all,
                              most(TILE, FEW)};
    size_t bytes = 0;
    for (int i = 0; i < 9; i++) {
        *parts[i] = at ? (float *)(void *)(at + bytes) : NULL;
        bytes += lines(floats[i]);
    }
    return bytes;
}

/* ---- Scores to weights ---- */

typedef struct query { /* a row of q */
    int64_t head, i;
    attention_range seen;
    const char *mask; /* of key 0; NULL without */
} query;

static query query_of(const attention_call *c, const piece *p, const attention_sequence *s, int64_t row)
{
    const adze_attention_args *a = c->a;
    query q = {.head = p->head * c->group + row % c->group, .i = row / c->group};
    q.seen = attention_range_of(a, s, q.i);
    if (a->mask.dtype)
        q.mask = (const char *)a->mask.data +
                 (s->batch * c->mask_stride[0] + q.head * c->mask_stride[1] + q.i * c->mask_stride[2]) *
                     (int64_t)adze_dtype_size(a->mask.dtype);
    return q;
}

/* tanh(s / cap) * cap */
INLINE vf capped(vf s, float cap)
{
    const vf x = vf_max(vf_all(-20), vf_minus_abs(s) * (1 / cap)); /* of -|s|; beyond 20 it is 1 */
    const vf e = vf_exp(x + x);
    const vf t = (1 - e) / (1 + e);
    return vf_by_sign(s, -t, t) * cap;
}

/* A mask of bytes hides keys, another one is added. */
static int mask_hides(const attention_call *c)
{
    return c->a->mask.dtype == ADZE_BOOL || c->a->mask.dtype == ADZE_U8;
}

/* Softcap and mask of the n scores of keys from j of the sequence on; s is at these. Whole vectors are written: what
   is beyond is minus infinity. The result has the largest scores. */
INLINE vf16 adjust(const attention_call *c, const query *q, float *s, int64_t j, int64_t n, int dtype)
{
    vf16 top = vf16_all(-INFINITY);
    for (int64_t i = 0; i < n; i += LANES) {
        vf16 v = row_load(s, ADZE_F32, i);
        for (int p = 0; p < VF_PARTS && c->a->softcap != 0; p++)
            v.part[p] = capped(v.part[p], c->a->softcap);
        if (dtype == ADZE_U8) {
            const uint8_t *at = (const uint8_t *)q->mask + j + i;
            uint8_t part[LANES] = {0};
            if (n - i < LANES)
                at = memcpy(part, at, (size_t)(n - i));
            for (int p = 0; p < VF_PARTS; p++)
                v.part[p] = vf_select(byte_lanes(at + p * VF_WIDTH, 0) != 0, v.part[p], vf_all(-INFINITY));
        } else if (dtype) {
            const vf16 m = row_load_part(q->mask, dtype, j + i, least(n - i, LANES));
            for (int p = 0; p < VF_PARTS; p++)
                v.part[p] += m.part[p];
        }
        if (n - i < LANES)
            v = vf16_cut(v, n - i, -INFINITY);
        row_store(s, ADZE_F32, i, v);
        for (int p = 0; p < VF_PARTS; p++)
            top.part[p] = vf_max(v.part[p], top.part[p]);
    }
    return top;
}
static vf16 adjust_row(const attention_call *c, const query *q, float *s, int64_t j, int64_t n)
{
    switch (q->mask ? c->a->mask.dtype : ADZE_NONE) {
    case ADZE_NONE: return adjust(c, q, s, j, n, ADZE_NONE);
    case ADZE_F32: return adjust(c, q, s, j, n, ADZE_F32);
    case ADZE_BF16: return adjust(c, q, s, j, n, ADZE_BF16);
    case ADZE_F16: return adjust(c, q, s, j, n, ADZE_F16);
    default: return adjust(c, q, s, j, n, ADZE_U8);
    }
}

/* How many of the n keys from j on are left when those at the end that a mask of bytes hides are not counted; some
   more where they are within eight bytes of the last. */
static int64_t unmasked(const query *q, int64_t j, int64_t n)
{
    for (uint64_t word; n >= 8; n -= 8) {
        memcpy(&word, q->mask + j + n - 8, sizeof word);
        if (word)
            break;
    }
    return n;
}

/* vf16_max_lane() as a tree; a NaN may be lost. */
INLINE float largest(vf16 v)
{
    float lane[LANES];
    memcpy(lane, &v, sizeof lane);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
}

/* exp(x) for x <= 0, and zero where it would be subnormal: arithmetic with such numbers is slow, and beside the
   weight 1 of the maximum they are nothing. */
INLINE vf weight_of(vf x)
{
    const vf e = vf_exp(vf_max(vf_all(-87), x)); /* in this order NaN stays */
    return vf_select(x < vf_all(-87), vf_all(0), e);
}

/* exp(s - maximum) of the n scores of keys from j on, in place, and zero for those that the query does not see. The
   maximum and the sum of the row follow; the result is what its earlier sums are multiplied by. */
static float weigh(const attention_call *c, const query *q, float *s, int64_t j, int64_t n, float *maximum,
                   float *total)
{
    const int64_t low = attention_between(q->seen.low - j, 0, n), high = attention_between(q->seen.high - j, low, n);
    if (low == high) {
        memset(s, 0, (size_t)n * sizeof *s);
        return 1;
    }
    vf16 top = vf16_all(-INFINITY);
    if (c->a->softcap != 0 || q->mask)
        top = adjust_row(c, q, s + low, j + low, high - low);
    for (int64_t i = 0; i < low; i++)
        s[i] = -INFINITY;
    for (int64_t i = high; i < (n + LANES - 1) / LANES * LANES; i++)
        s[i] = -INFINITY;
    for (int64_t i = 0; i < n && c->a->softcap == 0 && !q->mask; i += LANES) {
        const vf16 v = row_load(s, ADZE_F32, i);
        for (int p = 0; p < VF_PARTS; p++)
            top.part[p] = vf_max(v.part[p], top.part[p]);
    }
    const float most_now = largest(top), before = *maximum;
    *maximum = most_now > before ? most_now : before;
    const float shift = *maximum == -INFINITY ? 0 : *maximum; /* then all are 0, or NaN */
    vf_total sum = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        vf16 v = row_load(s, ADZE_F32, i);
        for (int p = 0; p < VF_PARTS; p++)
            v.part[p] = weight_of(v.part[p] - shift);
        vf_total_add(&sum, 0, v, 0);
        row_store(s, ADZE_F32, i, v);
    }
    const float keep = expf(before - shift);
    *total = *total * keep + vf_total_sum(&sum);
    return keep;
}

/* ---- A piece ---- */

static void find_keys(const attention_call *c, const piece *p, const attention_sequence *s, int64_t j, int64_t n,
                      key_block *b)
{
    const adze_attention_args *a = c->a;
    const int64_t size = (int64_t)adze_dtype_size(c->kind);
    b->count = n, b->d = c->sizes.d, b->dv = c->sizes.dv;
    for (int64_t i = 0; i < n; i++) {
#define AT(t) attention_key_at(a, &c->sizes, s, p->sequence, &a->t, p->head, j + i)
        b->k[i] = (const char *)a->k.data + AT(k) * size;
        b->v[i] = (const char *)a->v.data + AT(v) * size;
        if (is_quantised(c->kind)) {
            b->k_scale[i] = ((const float *)a->k_scale.data)[a->k_scale.rank == 1 ? 0 : AT(k_scale)];
            b->v_scale[i] = ((const float *)a->v_scale.data)[a->v_scale.rank == 1 ? 0 : AT(v_scale)];
        }
#undef AT
    }
}

INLINE vf32 q_load(const char *row, int dtype, int64_t i, int64_t n, int order)
{
    return dtype == ADZE_F32   ? vf32_order(row_load32_part(row, ADZE_F32, i, n), ADZE_F32, order)
           : dtype == ADZE_F16 ? vf32_order(row_load32_part(row, ADZE_F16, i, n), ADZE_F16, order)
                               : vf32_order(row_load32_part(row, ADZE_BF16, i, n), ADZE_BF16, order);
}

/* Rows of q as floats, scaled: a few one after the other in the order of k's kind, those of tiles side by side. */
static void read_q(const attention_call *c, const piece *p, const attention_sequence *s, int few, float *to)
{
    const adze_attention_args *a = c->a;
    const int64_t d = c->sizes.d, rows = few ? FEW : (p->rows + TILE - 1) / TILE * TILE;
    memset(to, 0, (size_t)(rows * c->d_floats) * sizeof *to);
    for (int64_t r = 0; r < p->rows; r++) {
        const query q = query_of(c, p, s, p->row + r);
        const char *row = (const char *)a->q.data +
                          (s->batch * a->q.stride[0] + q.head * a->q.stride[1] + (s->first + q.i) * a->q.stride[2]) *
                              adze_float_size(a->q.dtype);
        for (int64_t i = 0; i < d; i += STEP) {
            float floats[STEP];
            vf32 v =
                q_load(row, a->q.dtype, i, least(d - i, STEP), few && c->kind == ADZE_BF16 ? ADZE_BF16 : ADZE_F32);
            for (int x = 0; x < 2 * VF_PARTS; x++)
                v.part[x] *= c->scale;
            row_store32(few ? to + r * c->d_floats + i : floats, ADZE_F32, 0, v, 0);
            for (int64_t t = 0; t < STEP && i + t < d && !few; t++)
                to[r / TILE * TILE * c->d_floats + (i + t) * TILE + r % TILE] = floats[t];
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
    const int rows = p->rows == 1 ? 1 : p->rows == 2 ? 2 : p->rows <= 4 ? 4 : 8;
    scores[c->kind](b, w->q, c->d_floats, w->s, rows);
    for (int r = 0; r < rows; r++)
        if (r < p->rows)
            w->keep[r] = weigh(c, &q[r], w->s + r * S_ROW, j, b->count, &w->maximum[r], &w->total[r]);
        else
            memset(w->s + r * S_ROW, 0, (size_t)b->count * sizeof *w->s);
    memset(w->block, 0, (size_t)(FEW * c->dv_floats) * sizeof *w->block);
    sums[c->kind](b, w->s, w->block, c->dv_floats, rows);
    for (int64_t r = 0; r < p->rows; r++)
        for (int64_t i = 0; i < c->dv_floats; i += LANES) {
            vf16 v = row_load(w->sums + r * c->dv_floats, ADZE_F32, i);
            const vf16 more = row_load(w->block + r * c->dv_floats, ADZE_F32, i);
            for (int x = 0; x < VF_PARTS; x++)
                v.part[x] = v.part[x] * w->keep[r] + more.part[x];
            row_store(w->sums + r * c->dv_floats, ADZE_F32, i, v);
        }
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

static void tiled_block(const attention_call *c, const worker *w, const piece *p, const attention_sequence *s,
                        const key_block *b, int64_t j)
{
    static const pack_fn pack[] = {[ADZE_F32] = pack_f32,
                                   [ADZE_F16] = pack_f16,
                                   [ADZE_BF16] = pack_bf16,
                                   [ADZE_F8E4M3] = pack_f8,
                                   [ADZE_I8] = pack_i8};
    pack[c->kind](b, w->k, w->v);
    for (int64_t from = 0; from < p->rows; from += TILE) {
        const int64_t rows = least(p->rows - from, TILE);
        const query first = query_of(c, p, s, p->row + from), last = query_of(c, p, s, p->row + from + rows - 1);
        int64_t keys = least(last.seen.high - j, b->count); /* later ones are seen by none of these rows */
        if (keys > 0 && mask_hides(c)) {
            int64_t left = 0;
            for (int64_t r = 0; r < rows && left < keys; r++) {
                const query q = query_of(c, p, s, p->row + from + r);
                left = most(left, unmasked(&q, j, keys));
            }
            keys = left;
        }
        if (keys <= 0 || first.seen.low >= j + b->count)
            continue;
        tile_scores(w->q + from * c->d_floats, w->k, keys, c->sizes.d, w->s);
        for (int64_t r = 0; r < TILE; r++)
            if (r < rows) {
                const query q = query_of(c, p, s, p->row + from + r);
                w->keep[r] = weigh(c, &q, w->s + r * S_ROW, j, keys, &w->maximum[from + r], &w->total[from + r]);
                if (q.mask && from + r + TILE < p->rows)
                    prefetch_mask(c, p, s, p->row + from + r + TILE, j, b->count);
            } else {
                memset(w->s + r * S_ROW, 0, (size_t)keys * sizeof *w->s);
                w->keep[r] = 0;
            }
        for (int64_t i = 0; i < c->sizes.dv; i += PANEL)
            tile_sums(w->s, w->v + i * b->count, keys, w->keep, w->sums + from * c->dv_floats + i, c->dv_floats);
    }
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
    const float keep = shift == -INFINITY ? 1 : expf(maximum - shift);
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

static void work(const attention_call *c, const worker *w, const piece *p)
{
    const attention_sequence s = attention_sequence_of(c->a, &c->sizes, p->sequence);
    const int few = is_few(p);
    const query first = query_of(c, p, &s, p->row), last = query_of(c, p, &s, p->row + p->rows - 1);
    const int64_t low = most(p->low, first.seen.low), high = least(p->high, last.seen.high);
    query queries[FEW];
    for (int64_t r = 0; r < p->rows && few; r++)
        queries[r] = query_of(c, p, &s, p->row + r);
    read_q(c, p, &s, few, w->q);
    memset(w->sums, 0, (size_t)((p->rows + TILE - 1) / TILE * TILE * c->dv_floats) * sizeof *w->sums);
    for (int64_t r = 0; r < p->rows; r++)
        w->maximum[r] = -INFINITY, w->total[r] = 0;
    for (int64_t j = low; j < high; j += KEYS) {
        key_block b;
        find_keys(c, p, &s, j, least(high - j, KEYS), &b);
        if (few)
            few_block(c, w, p, queries, &b, j);
        else
            tiled_block(c, w, p, &s, &b, j);
    }
    for (int64_t r = 0; r < p->rows; r++) {
        const float *sums = w->sums + r * c->dv_floats;
        if (p->state < 0) {
            const query q = query_of(c, p, &s, p->row + r);
            write_row(c, s.batch, q.head, s.first + q.i, sums, w->maximum[r], w->total[r], order_in(c, p));
            continue;
        }
        float *state = c->states + (p->state + r) * (c->dv_floats + STEP);
        state[0] = w->maximum[r], state[1] = w->total[r];
        memcpy(state + STEP, sums, (size_t)c->dv_floats * sizeof *sums);
    }
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
    int64_t chunk, keys = 0, rows = 0;
    for (int64_t i = 0; i < c->sizes.sequences; i++) {
        const attention_sequence s = attention_sequence_of(c->a, &c->sizes, i);
        keys = most(keys, s.n), rows = most(rows, s.m * c->group);
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
        c->splits = most(least((2 * threads + c->count - 1) / c->count, keys / SPLIT_LEAST), 1);
    c->count *= c->splits;
    worker unused;
    c->workers = least(threads, c->count);
    c->buffer_size = worker_of(c, NULL, chunk, &unused);
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
