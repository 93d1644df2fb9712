/* attention_sizes.h - the sequences of a call of attention: their queries and keys, and which keys a query sees. */
#ifndef ADZE_ATTENTION_SIZES_H
#define ADZE_ATTENTION_SIZES_H

#include "kernel.h"

typedef struct attention_sizes {
    int64_t sequences, heads, kv_heads, d, dv;
    int64_t n;    /* keys that a sequence may have */
    int64_t page; /* keys of a page; 0: keys are not paged */
} attention_sizes;

static inline attention_sizes attention_sizes_of(const adze_attention_args *a)
{
    const int64_t page = a->block_table.dtype ? a->k.shape[2] : 0;
    return (attention_sizes){.sequences = a->q_offsets.dtype ? a->q_offsets.shape[0] - 1 : a->q.shape[0],
                             .heads = a->q.shape[1],
                             .kv_heads = a->k.shape[1],
                             .d = a->q.shape[3],
                             .dv = a->v.shape[3],
                             .n = page ? a->block_table.shape[1] * page : a->k.shape[2],
                             .page = page};
}

/* One sequence. Row i of its queries is row first + i of entry `batch` of q and out, and key j is row first_key + j
   of entry `key_batch` of k, unless keys are paged. */
typedef struct attention_sequence {
    int64_t batch, first, m;
    int64_t key_batch, first_key, n;
} attention_sequence;

static inline int64_t attention_between(int64_t v, int64_t low, int64_t high)
{
    return v < low ? low : v > high ? high : v;
}
static inline attention_sequence attention_sequence_of(const adze_attention_args *a, const attention_sizes *sizes,
                                                       int64_t s)
{
    attention_sequence q = {.batch = s, .m = a->q.shape[2], .key_batch = s, .n = sizes->n};
    if (a->q_offsets.dtype) {
        const int32_t *at = a->q_offsets.data;
        const int64_t total = a->q.shape[2];
        q.batch = 0;
        q.first = attention_between(at[s], 0, total);
        q.m = attention_between(at[s + 1], q.first, total) - q.first;
    }
    if (a->k_offsets.dtype) {
        const int32_t *at = a->k_offsets.data;
        q.key_batch = 0;
        q.first_key = attention_between(at[s], 0, sizes->n);
        q.n = attention_between(at[s + 1], q.first_key, sizes->n) - q.first_key;
    }
    if (a->lengths.dtype)
        q.n = attention_between(((const int32_t *)a->lengths.data)[s], 0, sizes->n);
    return q;
}

/* The keys low to high - 1 that query i may see, before the mask. */
typedef struct attention_range {
    int64_t low, high;
} attention_range;
static inline attention_range attention_range_of(const adze_attention_args *a, const attention_sequence *s, int64_t i)
{
    const int64_t at = s->n - s->m + i;
    attention_range r = {0, s->n};
    if (a->window)
        r = (attention_range){attention_between(at - a->window + 1, 0, s->n),
                              attention_between(at + a->window, 0, s->n)};
    if (a->causal)
        r.high = attention_between(at + 1, 0, r.high);
    if (r.low > r.high)
        r.low = r.high;
    return r;
}

/* Where a key of head `head` is in k, v or one of their scales, in elements. */
static inline int64_t attention_key_at(const adze_attention_args *a, const attention_sizes *sizes,
                                       const attention_sequence *s, int64_t sequence, const adze_tensor *t,
                                       int64_t head, int64_t j)
{
    if (!sizes->page)
        return s->key_batch * t->stride[0] + head * t->stride[1] + (s->first_key + j) * t->stride[2];
    const int32_t *table = (const int32_t *)a->block_table.data + sequence * a->block_table.stride[0];
    return table[j / sizes->page] * t->stride[0] + head * t->stride[1] + j % sizes->page * t->stride[2];
}

/* The strides of the mask over [batch, heads, m]; dimensions that it lacks or has once are broadcast. */
static inline void attention_mask_strides(const adze_tensor *mask, int64_t stride[3])
{
    for (int d = 0; d < 3; d++) {
        const int own = d - (4 - mask->rank);
        stride[d] = own < 0 || mask->shape[own] == 1 ? 0 : mask->stride[own];
    }
}

#endif
