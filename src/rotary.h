/* rotary.h - a call of rope or qk_norm_rope as its definition and its kernels see it: q and k as
   [batch, seq, heads, head_dim], whatever the order of their dimensions in memory. */
#ifndef ADZE_ROTARY_H
#define ADZE_ROTARY_H

#include "kernel.h"

#include <string.h>

typedef struct adze_rotary_tensor { /* q or k */
    const void *x;
    void *out;
    const void *weight;                        /* NULL: ones */
    int64_t heads, x_stride[3], out_stride[3]; /* of batch, seq and heads, in elements */
    int32_t weight_dtype, reserved;
} adze_rotary_tensor;

typedef struct adze_rotary {
    adze_rotary_tensor qk[2]; /* without k, the second has no heads */
    const void *cos, *sin;
    int64_t cos_stride[2], sin_stride[2]; /* of batch and seq; a shared batch has 0 */
    int64_t batch, seq, head_dim, rotary_dim;
    int32_t dtype, table_dtype;
    int32_t once; /* the table has one column per pair */
    int32_t pairs, rounding, heads_first, across_heads;
    float eps, weight_offset;
} adze_rotary;

/* rope as a qk_norm_rope whose norm is left out. */
static inline adze_qk_norm_rope_args adze_rope_widen(const adze_rope_args *a)
{
    adze_qk_norm_rope_args wide;
    memset(&wide, 0, sizeof wide);
    wide.call = a->call;
    wide.q_out = a->q_out;
    wide.k_out = a->k_out;
    wide.q = a->q;
    wide.k = a->k;
    wide.cos = a->cos;
    wide.sin = a->sin;
    wide.pairs = a->pairs;
    wide.rotary_dim = a->rotary_dim;
    wide.heads_first = a->heads_first;
    wide.rounding = a->rounding;
    return wide;
}

static inline void adze_rotary_tensor_init(adze_rotary_tensor *tensor, const adze_tensor *x, const adze_tensor *out,
                                           const adze_tensor *weight, int heads_first)
{
    if (x->dtype == ADZE_NONE)
        return;
    const int first = x->rank - 3, seq = first + (heads_first ? 1 : 0), heads = first + (heads_first ? 0 : 1);
    tensor->x = x->data;
    tensor->out = out->data;
    tensor->weight = weight->dtype == ADZE_NONE ? NULL : weight->data;
    tensor->weight_dtype = weight->dtype;
    tensor->heads = x->shape[heads];
    tensor->x_stride[0] = first ? x->stride[0] : 0;
    tensor->x_stride[1] = x->stride[seq];
    tensor->x_stride[2] = x->stride[heads];
    tensor->out_stride[0] = first ? out->stride[0] : 0;
    tensor->out_stride[1] = out->stride[seq];
    tensor->out_stride[2] = out->stride[heads];
}

static inline adze_rotary adze_rotary_of(const adze_qk_norm_rope_args *a)
{
    adze_rotary r;
    memset(&r, 0, sizeof r);
    r.cos = a->cos.data;
    r.sin = a->sin.data;
    adze_rotary_tensor_init(&r.qk[0], &a->q, &a->q_out, &a->q_weight, a->heads_first);
    adze_rotary_tensor_init(&r.qk[1], &a->k, &a->k_out, &a->k_weight, a->heads_first);
    const int last = a->cos.rank - 1, shared = last == 1 || a->cos.shape[0] == 1;
    r.cos_stride[0] = shared ? 0 : a->cos.stride[0];
    r.cos_stride[1] = a->cos.stride[last - 1];
    r.sin_stride[0] = shared ? 0 : a->sin.stride[0];
    r.sin_stride[1] = a->sin.stride[last - 1];
    r.batch = a->q.rank == 4 ? a->q.shape[0] : 1;
    r.seq = a->q.shape[a->q.rank - (a->heads_first ? 2 : 3)];
    r.head_dim = a->q.shape[a->q.rank - 1];
    r.rotary_dim = a->rotary_dim ? a->rotary_dim : r.head_dim;
    r.dtype = a->q.dtype;
    r.table_dtype = a->cos.dtype;
    r.once = a->cos.shape[last] != r.rotary_dim;
    r.pairs = a->pairs;
    r.rounding = a->rounding;
    r.heads_first = a->heads_first;
    r.across_heads = a->across_heads;
    r.eps = a->eps;
    r.weight_offset = a->weight_offset;
    return r;
}

#endif
