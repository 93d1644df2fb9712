/* rope_any.cuh - rope and qk_norm_rope on CUDA for every call: any head dim, rotary dim, rounding, stride and
   alignment. The calls that models make most take rope_fast.cuh instead. Large calls whose units would be narrow, and
   norms across heads without a fast form, take rope_pieces.cuh.

   A thread has pairs of units of W elements of a head: two units whose elements rotate, half of rotary_dim apart, or
   two that do not rotate. W is the widest that all tensors allow. All loads are issued, packed, before the first is
   used. rope_any: `width` neighbouring threads share a head of a token. A thread has the same P pairs of several
   heads, so that it loads tables and weight once for all of them. A norm is a sum over the threads of a head, by
   shuffles. rope_any_row: threads share a row, which is all heads of q and k of a token, with a norm of each, those
   of one of them where both are too long, or one long head. A row of up to SLOTS pairs per thread is held until the
   norm is known; a longer one is read again, from the caches: more threads run than if they held it. */
#ifndef ADZE_CUDA_ROPE_ANY_CUH
#define ADZE_CUDA_ROPE_ANY_CUH

#include "reduce.cuh"
#include "rope_any_unit.cuh"

constexpr int ANY_THREADS = 256, ROW_THREADS = 384;
constexpr int ROW_BLOCK = 128; /* threads of a block of several rows */

/* Minimum blocks of rope_any_row per SM, by the bytes of a unit: this bounds the registers. */
constexpr int rope_row_blocks(int bytes)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    return bytes < 16 ? 2 : 1;
#else
    return bytes > 0;
#endif
}

/* Where a token's heads of q or k are, in the input and in the output. */
template <typename T>
struct rope_rows {
    const T *from;
    T *to;
    int64_t from_head, to_head; /* from one head to the next */
    __device__ __forceinline__ rope_rows(const rope_any_params &p, bool k, int64_t b, int64_t s)
    {
        const adze_rotary_tensor &q_tensor = p.r.qk[0], &k_tensor = p.r.qk[1];
        from = (const T *)(k ? k_tensor.x : q_tensor.x) + b * (k ? k_tensor.x_stride[0] : q_tensor.x_stride[0]) +
               s * (k ? k_tensor.x_stride[1] : q_tensor.x_stride[1]);
        to = (T *)(k ? k_tensor.out : q_tensor.out) + b * (k ? k_tensor.out_stride[0] : q_tensor.out_stride[0]) +
             s * (k ? k_tensor.out_stride[1] : q_tensor.out_stride[1]);
        from_head = k ? k_tensor.x_stride[2] : q_tensor.x_stride[2];
        to_head = k ? k_tensor.out_stride[2] : q_tensor.out_stride[2];
    }
};

/* The work of a thread of rope_any: a token, and every `groups`th head of q or of k from the first on. Threads
   without work have no heads but stay: the shuffles need them. */
struct rope_any_share {
    int64_t b, s, first, groups, left;
    int32_t lane;
    bool k;

    __device__ __forceinline__ rope_any_share(const rope_any_params &p, uint32_t block)
    {
        const int64_t thread = (int64_t)block * ANY_THREADS + threadIdx.x;
        const bool works = thread < p.count;
        int64_t inner, rest;
        const int64_t item = rope_divide(p, p.by_width, works ? thread : 0, &rest);
        lane = (int32_t)rest;
        const int64_t outer = rope_divide(p, p.by_inner, item, &inner);
        const int64_t group = p.tokens_inner ? outer : inner;
        b = 0, s = p.tokens_inner ? inner : outer;
        if (p.r.batch > 1)
            b = rope_divide(p, p.by_seq, s, &s);
        k = group >= p.groups[0];
        first = k ? group - p.groups[0] : group;
        groups = k ? p.groups[1] : p.groups[0];
        left = works ? (k ? p.r.qk[1].heads : p.r.qk[0].heads) - first : 0;
    }
    __device__ __forceinline__ bool has(int h) const { return h * groups < left; }
    /* Whether the thread prefetches columns of the tables, for all heads of its token. */
    __device__ __forceinline__ bool leads(const rope_any_params &p) const
    {
        return first == 0 && (!k || p.groups[0] == 0) && rope_has_own_columns(p.r, b, s);
    }
};

template <typename TRAITS>
__device__ __forceinline__ void rope_any_prefetch(const rope_any_params &p)
{
    typedef typename TRAITS::T T;
    pdl_launch_next();
    const rope_any_share share(p, opaque(blockIdx.x));
    const rope_rows<T> rows(p, share.k, share.b, share.s);
    if (share.left <= 0)
        return;
    if constexpr (TRAITS::W * sizeof(T) < 8) {
        /* Threads with narrow units would prefetch each sector many times: the first prefetches whole heads. */
        const T *at = rows.from + share.first * rows.from_head;
#pragma unroll 1
        for (int h = 0; h < TRAITS::HEADS && share.has(h) && share.lane == 0; h++) {
            prefetch_bytes(at, (int)min(p.r.head_dim, (int64_t)4096) * (int)sizeof(T));
            at += share.groups * rows.from_head;
        }
        if (share.lane == 0 && share.leads(p))
            rope_any_columns<TRAITS>::prefetch_rows(p, share.b, share.s);
    } else {
#pragma unroll
        for (int q = 0; q < TRAITS::P; q++) {
            const rope_place place = rope_find<TRAITS::W>(p, share.lane + q * p.width);
            if (!place.there)
                continue;
            const T *at = rows.from + share.first * rows.from_head + place.at;
#pragma unroll 1
            for (int h = 0; h < TRAITS::HEADS && share.has(h); h++, at += share.groups * rows.from_head)
                prefetch(at), prefetch(at + (place.second ? place.apart : 0));
            if (place.rotates && share.leads(p))
                rope_any_columns<TRAITS>::prefetch_columns(p, place, share.lane + q * p.width, share.b, share.s);
        }
    }
}

template <typename TRAITS>
__global__ void __launch_bounds__(ANY_THREADS, TRAITS::BLOCKS) rope_any(const __grid_constant__ rope_any_params p)
{
    typedef typename TRAITS::T T;
    constexpr int W = TRAITS::W, P = TRAITS::P, HEADS = TRAITS::HEADS;
    if (blockIdx.x < p.prefetch_blocks)
        rope_any_prefetch<TRAITS>(p);
    const rope_any_share share(p, blockIdx.x);
    const rope_rows<T> rows(p, share.k, share.b, share.s);
    pdl_launch_next();
    if (!p.const_tables)
        pdl_wait();

    rope_place place[P];
    rope_any_columns<TRAITS> columns[P];
    rope_any_weight<T, W> weight[P];
    unit<T, W> x[HEADS][P][2];
#pragma unroll
    for (int q = 0; q < P; q++) {
        const int32_t pair = share.lane + q * p.width;
        place[q] = rope_find<W>(p, pair);
        if (share.left <= 0)
            place[q].there = false;
        if (place[q].there && place[q].rotates)
            columns[q].fetch(p, place[q], pair, share.b, share.s);
        if (TRAITS::NORM && place[q].there)
            weight[q].fetch(p, share.k, place[q], place[q].at);
    }
    if (p.const_tables)
        pdl_wait();
    const T *from = rows.from + share.first * rows.from_head;
    T *to = rows.to + share.first * rows.to_head;
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int q = 0; q < P; q++)
            if (share.has(h) && place[q].there)
                rope_fetch<T, W>(place[q], from + h * (share.groups * rows.from_head), x[h][q]);

    rope_any_held<TRAITS> held[P];
#pragma unroll
    for (int q = 0; q < P && TRAITS::NORM; q++)
        held[q].unpack({columns[q], weight[q]}, place[q].rotates);
    float scale[HEADS];
    if constexpr (TRAITS::NORM) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            scale[h] = 0;
#pragma unroll
            for (int q = 0; q < P; q++)
                if (share.has(h) && place[q].there)
                    scale[h] += rope_unit_squares<T, W>(x[h][q]);
        }
        for (int mask = p.width / 2; mask; mask /= 2)
#pragma unroll
            for (int h = 0; h < HEADS; h++)
                scale[h] += __shfl_xor_sync(~0u, scale[h], mask);
#pragma unroll
        for (int h = 0; h < HEADS; h++)
            scale[h] = rsqrtf(scale[h] * p.inverse[0] + p.r.eps);
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int q = 0; q < P; q++)
            if (share.has(h) && place[q].there) {
                T *const head = to + h * (share.groups * rows.to_head);
                if constexpr (TRAITS::NORM) /* without it memory is the limit, and registers are not */
                    rope_any_finish<TRAITS>(p, place[q], held[q], scale[h], x[h][q], head);
                else
                    rope_any_finish<TRAITS>(p, place[q], rope_any_packed<TRAITS>{columns[q], weight[q]}, 1, x[h][q],
                                            head);
            }
}

/* Iterates over a thread's pairs of units in a row. */
struct rope_cursor {
    int32_t head, pair;
    __device__ __forceinline__ void next(const rope_any_params &p)
    {
        head += p.step_heads, pair += p.step_pairs;
        if (pair >= p.pairs)
            pair -= p.pairs, head++;
    }
};

/* The row of a thread of rope_any_row: a token, and all its heads, first those of q; those of q or of k; or one. */
struct rope_row {
    int64_t b, s;
    int32_t first, heads; /* heads: 0 beyond the last row */

    __device__ __forceinline__ rope_row(const rope_any_params &p, int64_t row)
    {
        int64_t head;
        b = 0, s = rope_divide(p, p.by_inner, row < p.count ? row : 0, &head);
        if (p.r.batch > 1)
            b = rope_divide(p, p.by_seq, s, &s);
        const int32_t q_heads = (int32_t)p.r.qk[0].heads, k_heads = (int32_t)p.r.qk[1].heads;
        first = (int32_t)head, heads = 1;
        if (p.r.across_heads) {
            heads = !p.split ? q_heads + k_heads : first ? k_heads : q_heads;
            first = first ? q_heads : 0;
        }
        heads = row < p.count ? heads : 0;
    }
};
/* One head of a row. */
struct rope_head {
    bool k;
    int32_t head;   /* its number */
    int64_t weight; /* where its weight begins */

    __device__ __forceinline__ rope_head(const rope_any_params &p, const rope_row &row, int32_t i)
    {
        const int32_t q_heads = (int32_t)p.r.qk[0].heads;
        head = row.first + i;
        k = head >= q_heads;
        head -= k ? q_heads : 0;
        weight = p.r.across_heads ? head * p.r.head_dim : 0;
    }
    template <typename T>
    __device__ __forceinline__ const T *from(const rope_any_params &p, const rope_row &row) const
    {
        const rope_rows<T> rows(p, k, row.b, row.s);
        return rows.from + head * rows.from_head;
    }
    template <typename T>
    __device__ __forceinline__ T *to(const rope_any_params &p, const rope_row &row) const
    {
        const rope_rows<T> rows(p, k, row.b, row.s);
        return rows.to + head * rows.to_head;
    }
};

/* A block has blockDim.y rows. */
template <typename TRAITS>
__global__ void __launch_bounds__(ROW_THREADS, rope_row_blocks(TRAITS::W * sizeof(typename TRAITS::T)))
    rope_any_row(const __grid_constant__ rope_any_params p)
{
    typedef typename TRAITS::T T;
    constexpr int W = TRAITS::W, SLOTS = TRAITS::SLOTS;
    __shared__ alignas(16) float part[ROW_BLOCK / 32][2][32];
    pdl_launch_next();
    for (int64_t block = blockIdx.x; block * blockDim.y < p.count; block += gridDim.x) {
        rope_row row(p, block * blockDim.y + threadIdx.y);
        /* A thread's first pair of units. Opaque: it is computed again, rather than held in registers. */
        const auto start_of = [&] {
            const uint32_t thread = opaque(threadIdx.x), head = divide(thread, p.by_width);
            return rope_cursor{(int32_t)head, (int32_t)thread - (int32_t)head * p.pairs};
        };
        const rope_cursor start = start_of();

        /* Tables and weights are loaded after the sum, to save registers; they have been prefetched by then. */
        if (blockIdx.x < p.prefetch_blocks && start.head < row.heads) {
            const rope_head head(p, row, start.head);
            const rope_place place = rope_find<W>(p, start.pair);
            const T *at = head.from<T>(p, row) + place.at;
            prefetch(at), prefetch(at + (place.second ? place.apart : 0));
            rope_any_weight<T, W>::prefetch_weight(p, head.k, place, head.weight + place.at);
        }
        if (threadIdx.x == 0 && rope_has_own_columns(p.r, row.b, row.s))
            rope_any_columns<TRAITS>::prefetch_rows(p, row.b, row.s);
        if (block == blockIdx.x)
            pdl_wait();

        unit<T, W> x[SLOTS][2];
        float sum[2] = {0, 0};
#pragma unroll 1
        for (rope_cursor at = start; at.head < row.heads;) {
            rope_cursor slot = at;
#pragma unroll
            for (int i = 0; i < SLOTS; i++, slot.next(p))
                if (slot.head < row.heads)
                    rope_fetch<T, W>(rope_find<W>(p, slot.pair), rope_head(p, row, slot.head).from<T>(p, row), x[i]);
#pragma unroll
            for (int i = 0; i < SLOTS; i++, at.next(p))
                if (at.head < row.heads) {
                    const float squares = rope_unit_squares<T, W>(x[i]);
                    const bool k = rope_head(p, row, at.head).k;
                    sum[0] += k ? 0 : squares;
                    sum[1] += k ? squares : 0;
                }
        }
        row_sums(sum, part[threadIdx.y]);
#pragma unroll
        for (int k = 0; k < 2; k++)
            sum[k] = rsqrtf(sum[k] * p.inverse[k] + p.r.eps);
        row.s = opaque(row.s); /* so are addresses, and those in tables for each pair */
#pragma unroll 1
        for (rope_cursor at = start_of(); at.head < row.heads; at.next(p)) {
            const rope_head head(p, row, at.head);
            const rope_place place = rope_find<W>(p, at.pair);
            rope_any_columns<TRAITS> columns;
            rope_any_weight<T, W> weight;
            if (!p.held)
                rope_fetch<T, W>(place, head.from<T>(p, row), x[0]);
            if (place.rotates)
                columns.fetch(p, place, at.pair, opaque(row.b), opaque(row.s));
            weight.fetch(p, head.k, place, head.weight + place.at);
            rope_any_finish<TRAITS>(p, place, rope_any_packed<TRAITS>{columns, weight}, head.k ? sum[1] : sum[0],
                                    x[0], head.to<T>(p, row));
#pragma unroll
            for (int i = 0; i + 1 < SLOTS; i++) /* the next one's turn */
                x[i][0] = x[i + 1][0], x[i][1] = x[i + 1][1];
        }
        if ((block + gridDim.x) * blockDim.y < p.count)
            __syncthreads(); /* part is reused */
    }
}

#endif
