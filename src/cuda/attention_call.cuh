/* attention_call.cuh - a call of attention as its CUDA kernels take it: the sequences, and which keys a query sees.
 */
#ifndef ADZE_CUDA_ATTENTION_CALL_CUH
#define ADZE_CUDA_ATTENTION_CALL_CUH

#include "launch.cuh"
#include "vec.cuh"

enum attention_mask { MASK_NONE, MASK_HIDES, MASK_F32, MASK_OF_Q };

struct attention_params {
    const char *q, *k, *v;
    void *out;
    float *lse; /* NULL: not wanted */
    const char *mask;
    const void *sinks;
    const int32_t *lengths, *block_table, *q_offsets, *k_offsets;
    const float *k_scale, *v_scale;               /* of quantised keys and values */
    int64_t q_stride[3], out_stride[3];           /* elements: batch, head, query */
    int64_t k_stride[3], v_stride[3];             /* elements: batch or page, head, key */
    int64_t lse_stride[3], mask_stride[3];        /* elements */
    int64_t k_scale_stride[3], v_scale_stride[3]; /* 0: one scale for all */
    int64_t table_stride;
    int sequences, heads, kv_heads, group; /* group: heads of q that share one of k */
    int m, n, d, dv;                       /* m: queries of q; n: keys that a sequence may have */
    int page, pages;                       /* page: 0 where keys are not paged */
    int causal, window, mask_kind, q_dtype, k_dtype;
    float scale, softcap; /* scale without softcap includes log2(e) */
    bool sinks_f32;
    bool packed;                     /* there are q_offsets; scratch is asked for before the pointers are known */
    bool k_scale_each, v_scale_each; /* a scale for each key, not one for all */
    bool const_cache;                /* ADZE_CONST_CACHE: keys before the last m may be read before the wait */
    bool vectors;                    /* rows of q, k and v are whole aligned vectors of 16 bytes */
    bool fours;                      /* and so of fours of elements */
    bool mask_shared;                /* rows share a mask, and pairs of its elements are aligned */
    bool clustered;                  /* the parts of the keys are the blocks of a cluster */
    int parts;                       /* of the keys, at most PARTS_MAX */
    int stages;                      /* of a ring */
    bool next_late;                  /* the next kernel is launched as this one ends */
    float *part_values;              /* not clustered: of each row of out and part a row of floats, */
    float2 *part_sums;               /* and its maximum and sum */
};
enum { CLUSTER_MAX = 8, PARTS_MAX = 64 };
/* Floats from one row of part_values to the next: rows begin with a vector. */
__host__ __device__ __forceinline__ int attention_part_pitch(const attention_params &p)
{
    return (p.dv + 3) / 4 * 4;
}

/* One sequence: row i of its queries is row first + i of entry `batch` of q; key j is row first_key + j of entry
   key_batch of k, unless keys are paged. */
struct attention_sequence {
    int batch, first, m, key_batch, first_key, n;
};

__device__ __forceinline__ int between(int v, int low, int high)
{
    return min(max(v, low), high);
}
__device__ __forceinline__ attention_sequence attention_sequence_of(const attention_params &p, int s)
{
    attention_sequence q = {s, 0, p.m, s, 0, p.n};
    if (p.q_offsets) {
        q.batch = 0;
        q.first = between(p.q_offsets[s], 0, p.m);
        q.m = between(p.q_offsets[s + 1], q.first, p.m) - q.first;
    }
    if (p.k_offsets) {
        q.key_batch = 0;
        q.first_key = between(p.k_offsets[s], 0, p.n);
        q.n = between(p.k_offsets[s + 1], q.first_key, p.n) - q.first_key;
    }
    if (p.lengths)
        q.n = between(p.lengths[s], 0, p.n);
    return q;
}

/* The first key that query i sees, and the one after the last. Both grow with i. */
__device__ __forceinline__ int attention_low(const attention_params &p, const attention_sequence &s, int i)
{
    return p.window ? between(s.n - s.m + i - p.window + 1, 0, s.n) : 0;
}
__device__ __forceinline__ int attention_high(const attention_params &p, const attention_sequence &s, int i)
{
    const int at = s.n - s.m + i;
    int high = s.n;
    if (p.window && at < s.n - p.window)
        high = max(at + p.window, 0);
    if (p.causal)
        high = between(at + 1, 0, high);
    return high;
}

/* Which page, or entry, and which of its rows key j is; a page that does not exist is -1. */
struct attention_place {
    int entry, row;
};
__device__ __forceinline__ attention_place attention_place_of(const attention_params &p, const attention_sequence &s,
                                                              int sequence, int j)
{
    if (!p.page)
        return {s.key_batch, s.first_key + j};
    const unsigned page = (unsigned)j / (unsigned)p.page;
    const int entry = p.block_table[sequence * p.table_stride + page];
    return {(unsigned)entry < (unsigned)p.pages ? entry : -1, (int)((unsigned)j - page * (unsigned)p.page)};
}
__device__ __forceinline__ int64_t attention_at(const int64_t (&stride)[3], attention_place at, int head)
{
    return at.entry * stride[0] + head * stride[1] + at.row * stride[2];
}

__device__ __forceinline__ float power_of_2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/* A score in base 2: softmax is the same there. `x` is q . k, `scale` has log2(e) unless there is a softcap. EXACT:
   its reciprocal is correctly rounded, else within a unit. Kernels without shared memory spill with the other form,
   and attention_wgmma with this one. */
template <bool EXACT = true>
__device__ __forceinline__ float attention_score(const attention_params &p, float scale, float x)
{
    constexpr float LOG2_E = 1.4426950408889634f;
    if (p.softcap == 0)
        return x * scale;
    const float y = __fdividef(x * scale, p.softcap), e = power_of_2(fabsf(y) * (2 * LOG2_E));
    float inverse;
    if constexpr (EXACT)
        inverse = __frcp_rn(e + 1);
    else
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(e + 1));
    return p.softcap * copysignf(1 - 2 * inverse, y) * LOG2_E;
}
/* The same of N scores, and not EXACT. */
template <int N>
__device__ __forceinline__ void attention_scale(const attention_params &p, float scale, float (&score)[N])
{
    if (p.softcap == 0) {
#pragma unroll
        for (int i = 0; i < N; i++)
            score[i] *= scale;
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            score[i] = attention_score<false>(p, scale, score[i]);
    }
}
/* The first element of the mask of a query. */
__device__ __forceinline__ int64_t attention_mask_at(const attention_params &p, int batch, int head, int query)
{
    return batch * p.mask_stride[0] + head * p.mask_stride[1] + query * p.mask_stride[2];
}
/* q's dtype, where it is not known at compile time: q_dtype says it. */
struct mixed {
};
/* Element `at` of q's dtype. */
template <typename T>
__device__ __forceinline__ float attention_element(const attention_params &, const void *data, int64_t at)
{
    return to_float(((const T *)data)[at]);
}
template <>
__device__ __forceinline__ float attention_element<mixed>(const attention_params &p, const void *data, int64_t at)
{
    return p.q_dtype == ADZE_F32   ? ((const float *)data)[at]
           : p.q_dtype == ADZE_F16 ? to_float(((const f16 *)data)[at])
                                   : to_float(((const bf16 *)data)[at]);
}

/* Applies the mask to N scores in base 2 of a row, which begins at `at`: score i, at element where(i) of the row, if
   seen(i). Scores of other keys may be anything afterwards. Loads of ROUND elements are in flight at once: one by one
   they took most of the time of a step. */
template <typename T, int N, typename WHERE, typename SEEN, typename SCORE>
__device__ __forceinline__ void attention_mask(const attention_params &p, int64_t at, WHERE where, SEEN seen,
                                               SCORE score)
{
    constexpr int ROUND = N < 8 ? N : 8;
    constexpr float LOG2_E = 1.4426950408889634f;
    static_assert(N % ROUND == 0, "");
#pragma unroll
    for (int from = 0; from < N; from += ROUND) {
        if (p.mask_kind == MASK_HIDES) {
            uint32_t shown[ROUND];
#pragma unroll
            for (int i = 0; i < ROUND; i++)
                shown[i] = seen(from + i) ? (uint8_t)p.mask[at + where(from + i)] : 0;
#pragma unroll
            for (int i = 0; i < ROUND; i++)
                score(from + i) = shown[i] ? score(from + i) : -INFINITY;
            continue;
        }
        float bias[ROUND];
        if (p.mask_kind == MASK_F32) {
#pragma unroll
            for (int i = 0; i < ROUND; i++)
                bias[i] = seen(from + i) ? ((const float *)p.mask)[at + where(from + i)] : 0;
        } else {
#pragma unroll
            for (int i = 0; i < ROUND; i++)
                bias[i] = seen(from + i) ? attention_element<T>(p, p.mask, at + where(from + i)) : 0;
        }
#pragma unroll
        for (int i = 0; i < ROUND; i++)
            score(from + i) += bias[i] * LOG2_E;
    }
}
/* The sink of a head in base 2. */
template <typename T>
__device__ __forceinline__ float attention_sink(const attention_params &p, int head)
{
    constexpr float LOG2_E = 1.4426950408889634f;
    if (!p.sinks)
        return -INFINITY;
    return LOG2_E * (p.sinks_f32 ? ((const float *)p.sinks)[head] : attention_element<T>(p, p.sinks, head));
}

/* The maximum and the sum of a row with its sink, as what its values are multiplied by and the logarithm of the sum.
 */
struct attention_total {
    float inverse, lse;
};
__device__ __forceinline__ attention_total attention_finish(float max_score, float sum, float sink)
{
    const float top = fmaxf(max_score, sink);
    if (top == -INFINITY && !(sum != sum)) /* no key and no sink */
        return {0, -INFINITY};
    if (max_score != -INFINITY)
        sum *= power_of_2(max_score - top);
    sum += sink == -INFINITY ? 0 : power_of_2(sink - top);
    const float scale = max_score == -INFINITY ? 0 : power_of_2(max_score - top);
    return {scale / sum, 0.6931471805599453f * (top + log2f(sum))};
}

#endif
