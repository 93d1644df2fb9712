/* kv_cache.h - where the tokens of a kv_append go, and the call as that of rope: for its definition and its kernels.
 */
#ifndef ADZE_KV_CACHE_H
#define ADZE_KV_CACHE_H

#include "rotary.h"

/* The slot of token t of batch entry b, whatever it is. */
static inline int64_t adze_kv_slot(const adze_kv_append_args *a, int64_t b, int64_t t)
{
    if (a->lengths.dtype)
        return (int64_t)((const int32_t *)a->lengths.data)[b * a->lengths.stride[0]] + t;
    return ((const int32_t *)a->positions.data)[b * a->positions.stride[0] + t * a->positions.stride[1]];
}

enum { ADZE_KV_STORED_DIM = 1024 }; /* the largest head_dim of a cache in fewer bits */

typedef struct adze_kv_place {
    int64_t entry, row; /* k_cache[entry, :, row]; entry is -1 where the token has no place */
} adze_kv_place;

static inline adze_kv_place adze_kv_place_of(const adze_kv_append_args *a, int64_t b, int64_t slot)
{
    const int64_t rows = a->k_cache.shape[2], pages = a->k_cache.shape[0];
    const adze_kv_place none = {-1, 0};
    if (slot < 0 || rows == 0 || (a->table_by_slot && slot >= a->cos.shape[0]))
        return none;
    if (!a->block_table.dtype)
        return slot < rows ? (adze_kv_place){b, slot} : none;
    const int64_t at = slot / rows;
    if (at >= a->block_table.shape[1])
        return none;
    const int64_t page =
        ((const int32_t *)a->block_table.data)[b * a->block_table.stride[0] + at * a->block_table.stride[1]];
    return page >= 0 && page < pages ? (adze_kv_place){page, slot - at * rows} : none;
}

/* Without q its heads are none, without tables nothing is rotated. */
static inline adze_rotary adze_kv_rotary(const adze_kv_append_args *a)
{
    adze_qk_norm_rope_args wide;
    memset(&wide, 0, sizeof wide);
    wide.q = a->q.dtype ? a->q : a->k;
    wide.q_out = a->q_out;
    wide.k = a->k;
    wide.q_weight = a->q_weight;
    wide.k_weight = a->k_weight;
    wide.cos = a->cos;
    wide.sin = a->sin;
    if (!a->cos.dtype)
        wide.cos.rank = wide.sin.rank = 2;
    wide.eps = a->eps;
    wide.weight_offset = a->weight_offset;
    wide.across_heads = a->across_heads;
    wide.pairs = a->pairs;
    wide.rotary_dim = a->rotary_dim;
    wide.heads_first = 1;
    wide.rounding = a->rounding;
    adze_rotary r = adze_rotary_of(&wide);
    if (!a->q.dtype)
        r.qk[0].heads = 0;
    if (!a->cos.dtype)
        r.rotary_dim = 0;
    return r;
}

#endif
