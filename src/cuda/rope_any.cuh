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

#include "launch.cuh"
#include "reduce.cuh"
#include "rotary.h"
#include "rows.cuh"
#include "unit.cuh"

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

/* Pairs of units of a row that a thread reads together, and may hold. */
constexpr int row_slots(int width)
{
    return 8 / width;
}

/* Where the other element of a pair is, and how many table columns a unit has. If the elements of a pair are in the
   thread's two units, each unit has its own columns. A unit of whole pairs has a column per pair, or one per
   element. */
enum { PAIR_OF_UNITS, PAIRS_ONCE, PAIRS_EACH };

/* What is known of a call at compile time. S: dtype of the tables. ROUNDS: the call's rounding is not 0. */
template <typename T_, typename S_, int KIND_, int W_, int P_, bool NORM_, bool ROUNDS_>
struct rope_any_traits {
    typedef T_ T;
    typedef S_ S;
    static constexpr int KIND = KIND_, W = W_, P = P_;
    static constexpr bool NORM = NORM_, ROUNDS = ROUNDS_;
    /* A thread has up to 64 bytes in flight, in up to 8 pairs of units. */
    static constexpr int FIT = 64 / (2 * P * W * (int)sizeof(T)), HEADS = FIT * P > 8 ? 8 / P : FIT;
    /* Minimum blocks per SM; with 0 the compiler aims at 64 registers and spills where it rounds. */
    static constexpr int BLOCKS = ROUNDS && !NORM ? 3 : 0;
    static constexpr int SLOTS = row_slots(W);
};

/* Whether a token prefetches its columns of the tables. Where batches or positions share a row of them, only the
   first does: L2 serves requests for one line one after another. */
__device__ __forceinline__ bool rope_has_own_columns(const adze_rotary &r, int64_t b, int64_t s)
{
    return (b == 0 || r.cos_stride[0] != 0) && (s == 0 || r.cos_stride[1] != 0);
}

struct rope_any_params {
    adze_rotary r;
    float inverse[2];                      /* 1 / elements of a norm, of q and k */
    int64_t count;                         /* threads with work; of rope_any_row: rows */
    int32_t width;                         /* threads of a head */
    int32_t pairs;                         /* of units of a head */
    int32_t rotating;                      /* of them, those that rotate */
    int32_t rotated_seconds, rest_seconds; /* of both kinds, those that have a second unit */
    int32_t rotated_apart, rest_apart;     /* from a first unit to its second, in elements */
    int32_t table_apart;                   /* the same in a table */
    int32_t rotated_step, table_step;      /* from one pair to the next */
    int32_t each;                          /* heads of a thread */
    int64_t groups[2];                     /* of heads */
    int32_t step_heads, step_pairs;        /* rope_any_row: from a pair of units of a thread to its next */
    int32_t held;                          /* rope_any_row: no thread has more pairs than it holds */
    int32_t split;                         /* rope_any_row: the heads of q are one row, those of k another */
    divisor by_width, by_inner, by_seq;    /* by_width of rope_any_row: by pairs */
    int32_t wide_index;                    /* indices need more than 31 bits */
    int32_t tokens_inner;                  /* neighbouring threads have neighbouring tokens rather than heads */
    int32_t const_tables;                  /* tables and weights may be read before the dependency wait */
    int32_t weight_wide[2];                /* weights can be read in whole units */
    uint32_t prefetch_blocks;              /* blocks that prefetch their inputs, the first of the grid */
};

/* n / d and the remainder. */
__device__ __forceinline__ int64_t rope_divide(const rope_any_params &p, const divisor &d, int64_t n, int64_t *rest)
{
    const int64_t quotient = p.wide_index ? divide(n, d.by) : (int64_t)divide((uint32_t)n, d);
    *rest = n - quotient * d.by;
    return quotient;
}

/* A pair of units in a head. */
struct rope_place {
    int32_t at, apart;
    bool there, second, rotates;
};
template <int W>
__device__ __forceinline__ rope_place rope_find(const rope_any_params &p, int32_t pair)
{
    rope_place place;
    place.there = pair < p.pairs;
    place.rotates = pair < p.rotating;
    const int32_t rest = pair - p.rotating;
    place.at = place.rotates ? pair * p.rotated_step : (int32_t)p.r.rotary_dim + rest * W;
    place.apart = place.rotates ? p.rotated_apart : p.rest_apart;
    place.second = place.rotates ? pair < p.rotated_seconds : rest < p.rest_seconds;
    return place;
}

template <typename T, int W>
__device__ __forceinline__ void rope_fetch(const rope_place &place, const T *head, unit<T, W> (&x)[2])
{
    x[0].fetch(head + place.at);
    if (place.second)
        x[1].fetch(head + place.at + place.apart);
    else
        x[1].fill(0);
}

/* The columns of both tables that belong to a pair of units. */
template <typename TRAITS>
struct rope_any_columns {
    typedef typename TRAITS::S S;
    static constexpr int W = TRAITS::W, N = TRAITS::KIND == PAIRS_ONCE ? W / 2 : W;
    unit<S, N> cos[2], sin[2];
    __device__ __forceinline__ static int32_t column(const rope_any_params &p, const rope_place &place, int32_t pair,
                                                     int i)
    {
        if (TRAITS::KIND == PAIR_OF_UNITS)
            return pair * p.table_step + i * p.table_apart;
        return (place.at + i * place.apart) / (W / N);
    }
    __device__ __forceinline__ void fetch(const rope_any_params &p, const rope_place &place, int32_t pair, int64_t b,
                                          int64_t s)
    {
        const S *cos_row = (const S *)p.r.cos + b * p.r.cos_stride[0] + s * p.r.cos_stride[1];
        const S *sin_row = (const S *)p.r.sin + b * p.r.sin_stride[0] + s * p.r.sin_stride[1];
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (i == 0 || place.second) {
                cos[i].fetch(cos_row + column(p, place, pair, i));
                sin[i].fetch(sin_row + column(p, place, pair, i));
            }
    }
    __device__ __forceinline__ static void prefetch_columns(const rope_any_params &p, const rope_place &place,
                                                            int32_t pair, int64_t b, int64_t s)
    {
        const S *cos_row = (const S *)p.r.cos + b * p.r.cos_stride[0] + s * p.r.cos_stride[1];
        const S *sin_row = (const S *)p.r.sin + b * p.r.sin_stride[0] + s * p.r.sin_stride[1];
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (i == 0 || place.second) {
                prefetch(cos_row + column(p, place, pair, i));
                prefetch(sin_row + column(p, place, pair, i));
            }
    }
    /* All columns of a token. */
    __device__ __forceinline__ static void prefetch_rows(const rope_any_params &p, int64_t b, int64_t s)
    {
        const int64_t columns = min(p.r.once ? p.r.rotary_dim / 2 : p.r.rotary_dim, (int64_t)4096);
        const int bytes = (int)columns * (int)sizeof(S);
        prefetch_bytes((const S *)p.r.cos + b * p.r.cos_stride[0] + s * p.r.cos_stride[1], bytes);
        prefetch_bytes((const S *)p.r.sin + b * p.r.sin_stride[0] + s * p.r.sin_stride[1], bytes);
    }
    __device__ __forceinline__ static void get(const unit<S, N> &v, float (&f)[W])
    {
        float own[N];
        v.get(own);
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] = own[j * N / W];
    }
};

/* The weights of a pair of units, packed; without weights they are ones. */
template <typename T, int W>
struct rope_any_weight {
    uint32_t word[2][W];
    bool f32;
    float offset;
    template <int BYTES>
    __device__ __forceinline__ static void fetch_words(const void *from, uint32_t *to)
    {
        if constexpr (BYTES == 16) {
            const uint4 v = *reinterpret_cast<const uint4 *>(from);
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        } else if constexpr (BYTES == 8) {
            const uint2 v = *reinterpret_cast<const uint2 *>(from);
            to[0] = v.x, to[1] = v.y;
        } else {
            to[0] = *reinterpret_cast<const typename raw_bytes<BYTES>::type *>(from);
        }
    }
    __device__ __forceinline__ void fetch_unit(const void *row, bool wide, int64_t at, uint32_t (&to)[W])
    {
        if (f32) {
            if (wide)
                return fetch_words<4 * W>((const float *)row + at, to);
#pragma unroll
            for (int j = 0; j < W; j++)
                to[j] = ((const uint32_t *)row)[at + j];
        } else if constexpr (sizeof(T) < 4) {
            if (W == 1 || wide)
                return fetch_words<2 * W>((const T *)row + at, to);
            const uint16_t *half = (const uint16_t *)row + at;
#pragma unroll
            for (int j = 0; j + 1 < W; j += 2)
                to[j / 2] = half[j] | (uint32_t)half[j + 1] << 16;
        }
    }
    __device__ __forceinline__ void fetch(const rope_any_params &p, bool k, const rope_place &place, int64_t at)
    {
        const adze_rotary_tensor &q_tensor = p.r.qk[0], &k_tensor = p.r.qk[1];
        const void *row = k ? k_tensor.weight : q_tensor.weight;
        const bool wide = k ? p.weight_wide[1] : p.weight_wide[0];
        f32 = sizeof(T) == 4 || !row || (k ? k_tensor.weight_dtype : q_tensor.weight_dtype) == ADZE_F32;
        offset = row ? p.r.weight_offset : 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (row && (i == 0 || place.second)) {
                fetch_unit(row, wide, at + i * place.apart, word[i]);
            } else {
#pragma unroll
                for (int j = 0; j < W; j++)
                    word[i][j] = __float_as_uint(1);
            }
        }
    }
    __device__ __forceinline__ static void prefetch_weight(const rope_any_params &p, bool k, const rope_place &place,
                                                           int64_t at)
    {
        const adze_rotary_tensor &q_tensor = p.r.qk[0], &k_tensor = p.r.qk[1];
        const char *row = (const char *)(k ? k_tensor.weight : q_tensor.weight);
        const int size = (k ? k_tensor.weight_dtype : q_tensor.weight_dtype) == ADZE_F32 ? 4 : (int)sizeof(T);
        if (row)
            prefetch(row + at * size), prefetch(row + (at + (place.second ? place.apart : 0)) * size);
    }
    __device__ __forceinline__ float get(int i, int j) const
    {
        if (sizeof(T) == 4 || f32)
            return __uint_as_float(word[i][j]) + offset;
        const uint16_t bits = (uint16_t)(j % 2 ? word[i][j / 2] >> 16 : word[i][j / 2]);
        return to_float(*reinterpret_cast<const T *>(&bits)) + offset;
    }
};

/* Both, as floats: unpacked where they are used, or once for all heads of a thread. */
template <typename TRAITS>
struct rope_any_packed {
    const rope_any_columns<TRAITS> &columns;
    const rope_any_weight<typename TRAITS::T, TRAITS::W> &weights;
    __device__ __forceinline__ void tables(int i, float (&cos)[TRAITS::W], float (&sin)[TRAITS::W]) const
    {
        columns.get(columns.cos[i], cos), columns.get(columns.sin[i], sin);
    }
    __device__ __forceinline__ float weight(int i, int j) const { return weights.get(i, j); }
};
template <typename TRAITS>
struct rope_any_held {
    static constexpr int W = TRAITS::W;
    float cos[2][W], sin[2][W], own[2][W];
    __device__ __forceinline__ void unpack(const rope_any_packed<TRAITS> &from, bool rotates)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (rotates)
                from.tables(i, cos[i], sin[i]);
#pragma unroll
            for (int j = 0; j < W; j++) {
                own[i][j] = from.weight(i, j);
                asm volatile("" : "+f"(own[i][j]), "+f"(cos[i][j]), "+f"(sin[i][j]));
            }
        }
    }
    __device__ __forceinline__ void tables(int i, float (&c)[W], float (&n)[W]) const
    {
#pragma unroll
        for (int j = 0; j < W; j++)
            c[j] = cos[i][j], n[j] = sin[i][j];
    }
    __device__ __forceinline__ float weight(int i, int j) const
    {
        return own[i][j];
    }
};

template <typename T, int W>
__device__ __forceinline__ float rope_unit_squares(const unit<T, W> (&x)[2])
{
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float f[W];
        x[i].get(f);
#pragma unroll
        for (int j = 0; j < W; j++)
            sum += f[j] * f[j];
    }
    return sum;
}

/* Normalises, rotates and stores a pair of units. */
template <typename TRAITS, typename FACTORS>
__device__ __forceinline__ void rope_any_finish(const rope_any_params &p, const rope_place &place,
                                                const FACTORS &factors, float scale,
                                                unit<typename TRAITS::T, TRAITS::W> (&x)[2], typename TRAITS::T *head)
{
    typedef typename TRAITS::T T;
    constexpr int W = TRAITS::W;
    const int rounding = TRAITS::ROUNDS ? p.r.rounding : 0;
    const bool steps = rounding & ADZE_ROUND_STEPS, values = rounding & (ADZE_ROUND_VALUE | ADZE_ROUND_STEPS);
    const auto round_if = [](bool condition, float v) { return condition ? round_to<T>(v) : v; };
    float f[2][W];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        x[i].get(f[i]);
#pragma unroll
        for (int j = 0; j < W && TRAITS::NORM; j++) {
            f[i][j] = round_if(rounding & ADZE_ROUND_NORM, f[i][j] * scale);
            f[i][j] = round_if(values, f[i][j] * factors.weight(i, j));
        }
    }
    /* Of a pair: a cos - b sin and b cos + a sin, each with its own column. */
    const auto turn = [&](float &a, float &b, float a_cos, float a_sin, float b_cos, float b_sin) {
        const float x0 = a, y0 = b;
        a = round_if(steps, x0 * a_cos) - round_if(steps, y0 * a_sin);
        b = round_if(steps, y0 * b_cos) + round_if(steps, x0 * b_sin);
    };
    if (place.rotates) {
        float cos[2][W], sin[2][W];
#pragma unroll
        for (int i = 0; i < 2; i++)
            factors.tables(i, cos[i], sin[i]);
        if constexpr (TRAITS::KIND == PAIR_OF_UNITS) {
#pragma unroll
            for (int j = 0; j < W; j++)
                turn(f[0][j], f[1][j], cos[0][j], sin[0][j], cos[1][j], sin[1][j]);
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < W; j += 2)
                    turn(f[i][j], f[i][j + 1], cos[i][j], sin[i][j], cos[i][j + 1], sin[i][j + 1]);
        }
    }
    x[0].set(f[0]);
    x[0].put(head + place.at);
    x[1].set(f[1]);
    if (place.second)
        x[1].put(head + place.at + place.apart);
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
