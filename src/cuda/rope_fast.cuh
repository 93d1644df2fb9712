/* rope_fast.cuh - rope and qk_norm_rope on CUDA, for the calls that models make: those whose pairs, tables and
   rounding are a compiled form (rope_forms.cuh). Every mode is a compile-time constant.

   A thread has the W elements at i and the W at i + rotary_dim / 2 of a head: whole pairs of either kind, which use
   the same tables in every head. A block has a token or a part of one, so that the token is uniform over its
   threads, or several tokens of few and short heads. rope_fast: a thread has HEADS heads of q or of k; all its loads
   are issued before the first is used. A norm is a sum over the lanes of a head, by shuffles: a head then has a
   power of 2 of threads, of which some may idle. Where only a part of a head is rotated, further lanes have the
   rest. rope_across: one norm over all heads of a token; a thread has a head of q and the same head of k, held
   packed during the block's reduction. */
#ifndef ADZE_CUDA_ROPE_FAST_CUH
#define ADZE_CUDA_ROPE_FAST_CUH

#include "rope_vector.cuh"

/* The token of a block. */
struct rope_token {
    uint32_t b, s;
};
__device__ __forceinline__ rope_token rope_locate(const rope_fast_params &p, uint32_t token)
{
    if (p.seq == 0)
        return {0, token};
    const uint32_t b = token / p.seq;
    return {b, token - b * p.seq};
}

/* Prefetches the weights, which all tokens share: of one head, or of all. */
template <typename T, bool ACROSS>
__device__ __forceinline__ void rope_prefetch_weights(const rope_fast_params &p, uint32_t block)
{
#pragma unroll
    for (int k = 0; k < 2; k++)
        if (block == 0 && threadIdx.x == 0 && p.qk[k].weight)
            prefetch_row(p.qk[k].weight, 2 * p.half / VEC<T> * (ACROSS ? p.qk[k].heads : 1));
}

/* The work of a thread of rope_fast: HEADS heads of q or of k, from the first on. */
template <typename T, typename TRAITS, int HEADS>
struct rope_share {
    rope_token token;
    int lane, first;
    int heads; /* 0 in lanes without work, which stay: the shuffles need them */
    bool k, rotates;
    int at, apart, x_head; /* its elements in a head, and from their first half to the second; from head to head */
    const T *from;

    __device__ __forceinline__ rope_share(const rope_fast_params &p, uint32_t block)
    {
        constexpr int W = VEC<T>;
        int group = (int)(threadIdx.x * p.inverse_width >> 16);
        lane = (int)threadIdx.x - group * p.width;
        uint32_t index = block >> p.parts_log2;
        bool there = true;
        if (p.pack > 1) {
            const uint32_t sub = (uint32_t)group * p.inverse_part >> 16;
            group -= (int)sub * p.part_groups;
            index = index * p.pack + sub;
            there = sub < p.pack && index < p.tokens;
            index = there ? index : 0;
        }
        token = rope_locate(p, index);
        const int part = (int)(block & ((1u << p.parts_log2) - 1));
        first = part * p.part_groups + group;
        k = first >= p.qk[0].groups;
        if (k)
            first -= p.qk[0].groups;
        first *= HEADS;
        const bool works = there && group < p.part_groups && (!TRAITS::NORM || lane < p.lanes);
        heads = works ? (k ? p.qk[1].heads : p.qk[0].heads) - first : 0;
        rotates = (!TRAITS::REST && !TRAITS::NORM) || lane < p.rotating;
        at = rotates ? lane * W : 2 * (p.half + (lane - p.rotating) * W), apart = rotates ? p.half : W;
        x_head = k ? p.qk[1].x_head : p.qk[0].x_head;
        from = (const T *)(k ? p.qk[1].x : p.qk[0].x) + token.b * (k ? p.qk[1].x_stride[0] : p.qk[0].x_stride[0]) +
               token.s * (k ? p.qk[1].x_stride[1] : p.qk[0].x_stride[1]) + (int64_t)first * x_head + at;
    }
};

template <typename T, typename TRAITS, int HEADS>
__device__ __forceinline__ void rope_prefetch(const rope_fast_params &p)
{
    pdl_launch_next();
    const uint32_t block = opaque(blockIdx.x);
    const rope_share<T, TRAITS, HEADS> t(p, block);
#pragma unroll
    for (int h = 0; h < HEADS; h++)
        if (h < t.heads)
            prefetch(t.from + h * t.x_head), prefetch(t.from + h * t.x_head + t.apart);
    if (t.lane == (int)threadIdx.x && t.rotates)
        rope_columns<T, TRAITS>::prefetch_columns(p, t.token.b, t.token.s, t.lane);
    if (TRAITS::NORM)
        rope_prefetch_weights<T, false>(p, block);
}

/* Minimum blocks per SM (0: left to the compiler), where more registers would not help. */
template <typename TRAITS, int HEADS>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int rope_blocks = TRAITS::NORM &&HEADS > 1 ? 2 : 0;
#else
constexpr int rope_blocks = TRAITS::NORM &&HEADS > 1 ? 3 : 0;
#endif

template <typename T, typename TRAITS, int HEADS>
__global__ void __launch_bounds__(FAST_THREADS, rope_blocks<TRAITS, HEADS>)
    rope_fast(const __grid_constant__ rope_fast_params p)
{
    if (blockIdx.x < p.prefetch_blocks)
        rope_prefetch<T, TRAITS, HEADS>(p);
    const rope_share<T, TRAITS, HEADS> t(p, blockIdx.x);
    const bool k = t.k;
    const uint32_t b = t.token.b, s = t.token.s;
    const int out_head = k ? p.qk[1].out_head : p.qk[0].out_head;
    pdl_launch_next();
    if (!p.const_tables)
        pdl_wait();

    rope_columns<T, TRAITS> tables;
    rope_vector<T> x[HEADS][2];
    rope_vector<T> weight[2];
    if (t.rotates)
        tables.read(p, b, s, t.lane);
    if (TRAITS::NORM && t.heads > 0)
        rope_read_weight<T>(k ? p.qk[1].weight : p.qk[0].weight, t.at, t.apart, weight);
    if (p.const_tables)
        pdl_wait();
#pragma unroll
    for (int h = 0; h < HEADS; h++)
        if (h < t.heads) {
            x[h][0].read(t.from + h * t.x_head);
            x[h][1].read(t.from + h * t.x_head + t.apart);
        }

    float sum[HEADS];
    if constexpr (TRAITS::NORM) {
#pragma unroll
        for (int h = 0; h < HEADS; h++)
            sum[h] = h < t.heads ? rope_squares<T>(x[h]) : 0;
        for (int mask = p.width / 2; mask; mask /= 2)
#pragma unroll
            for (int h = 0; h < HEADS; h++)
                sum[h] += __shfl_xor_sync(~0u, sum[h], mask);
    }
    T *to = (T *)(k ? p.qk[1].out : p.qk[0].out) + b * (k ? p.qk[1].out_stride[0] : p.qk[0].out_stride[0]) +
            s * (k ? p.qk[1].out_stride[1] : p.qk[0].out_stride[1]) + (int64_t)t.first * out_head + t.at;
#pragma unroll
    for (int h = 0; h < HEADS; h++)
        if (h < t.heads) {
            tables.keep();
            float scale = 1;
            if constexpr (TRAITS::NORM) {
                x[h][0].keep(), x[h][1].keep();
                weight[0].keep(), weight[1].keep();
                scale = rsqrtf(sum[h] * p.qk[0].inverse + p.eps);
            }
            rope_finish<T, TRAITS>(p, tables, weight, scale, !TRAITS::REST || t.rotates, x[h]);
            x[h][0].write(to + h * out_head);
            x[h][1].write(to + h * out_head + t.apart);
        }
}

/* Two blocks per SM, where there are enough registers. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860 && __CUDA_ARCH__ < 900
#    define ACROSS_BLOCKS 1
#else
#    define ACROSS_BLOCKS 2
#endif

/* f32 tables with a column per element take half of a thread's registers. TABLES_AFTER_SUM loads them after the sum
   instead: all heads share them, so that they are in the cache. */
template <typename T, typename TRAITS>
constexpr bool wide_tables = sizeof(typename TRAITS::S) > sizeof(T) && !TRAITS::ONCE;
template <bool TABLES_AFTER_SUM>
constexpr int across_threads = TABLES_AFTER_SUM ? ACROSS_THREADS * 3 / 4 : ACROSS_THREADS;

template <typename T>
__device__ __forceinline__ const T *across_row(const rope_fast_tensor &tensor, uint32_t b, uint32_t s, int head,
                                               int lane)
{
    return (const T *)tensor.x + b * tensor.x_stride[0] + s * tensor.x_stride[1] +
           (head * tensor.x_head + lane * VEC<T>);
}

template <typename T, typename TRAITS>
__device__ __forceinline__ void rope_prefetch_across(const rope_fast_params &p)
{
    pdl_launch_next();
    const uint32_t block = opaque(blockIdx.x);
    rope_prefetch_weights<T, true>(p, block);
    const auto [b, s] = rope_locate(p, block);
    const int head = (int)(threadIdx.x * p.inverse_width >> 16), lane = (int)threadIdx.x - head * p.width;
#pragma unroll
    for (int k = 0; k < 2; k++)
        if (head < p.qk[k].heads) {
            const T *row = across_row<T>(p.qk[k], b, s, head, lane);
            prefetch(row), prefetch(row + p.half);
        }
    if (head == 0)
        rope_columns<T, TRAITS>::prefetch_columns(p, b, s, lane);
}

template <typename T, typename TRAITS, bool TABLES_AFTER_SUM>
__global__ void __launch_bounds__(across_threads<TABLES_AFTER_SUM>,
                                  wide_tables<T, TRAITS> && !TABLES_AFTER_SUM ? 1 : ACROSS_BLOCKS)
    rope_across(const __grid_constant__ rope_fast_params p)
{
    constexpr int W = VEC<T>;
    __shared__ float2 part[ACROSS_THREADS / 32];
    if (blockIdx.x < p.prefetch_blocks)
        rope_prefetch_across<T, TRAITS>(p);
    const auto [b, s] = rope_locate(p, blockIdx.x);
    const int head = (int)(threadIdx.x * p.inverse_width >> 16), lane = (int)threadIdx.x - head * p.width;
    pdl_launch_next();
    if (!p.const_tables)
        pdl_wait();

    rope_columns<T, TRAITS> tables;
    rope_vector<T> x[2][2], weight[2][2];
    const auto read_weight = [&](int k) {
        rope_read_weight<T>(p.qk[k].weight, head * 2 * p.half + lane * W, p.half, weight[k]);
    };
    if constexpr (!TABLES_AFTER_SUM) {
        tables.read(p, b, s, lane);
#pragma unroll
        for (int k = 0; k < 2; k++)
            if (head < p.qk[k].heads)
                read_weight(k);
    }
    if (p.const_tables)
        pdl_wait();
#pragma unroll
    for (int k = 0; k < 2; k++)
        if (head < p.qk[k].heads) {
            const T *row = across_row<T>(p.qk[k], b, s, head, lane);
            x[k][0].read(row);
            x[k][1].read(row + p.half);
        }

    float sum[2];
#pragma unroll
    for (int k = 0; k < 2; k++)
        sum[k] = warp_sum<32>(head < p.qk[k].heads ? rope_squares<T>(x[k]) : 0);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = make_float2(sum[0], sum[1]);
    __syncthreads();
    sum[0] = sum[1] = 0;
    for (int w = 0; w < (int)blockDim.x / 32; w++)
        sum[0] += part[w].x, sum[1] += part[w].y;
    if constexpr (TABLES_AFTER_SUM)
        tables.read(p, b, s, lane);
#pragma unroll
    for (int k = 0; k < 2; k++)
        if (head < p.qk[k].heads) {
            if constexpr (TABLES_AFTER_SUM)
                read_weight(k);
            tables.keep();
            x[k][0].keep(), x[k][1].keep();
            weight[k][0].keep(), weight[k][1].keep();
            const float scale = rsqrtf(sum[k] * p.qk[k].inverse + p.eps);
            rope_finish<T, TRAITS>(p, tables, weight[k], scale, true, x[k]);
            T *row = (T *)p.qk[k].out + b * p.qk[k].out_stride[0] + s * p.qk[k].out_stride[1] +
                     (head * p.qk[k].out_head + lane * W);
            x[k][0].write(row);
            x[k][1].write(row + p.half);
        }
}

#endif
