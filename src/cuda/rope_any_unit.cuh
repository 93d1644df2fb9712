/* rope_any_unit.cuh - a thread's pair of units of a head in rope_any and rope_any_row, its columns of the tables, its
   weights, and the arithmetic on them. */
#ifndef ADZE_CUDA_ROPE_ANY_UNIT_CUH
#define ADZE_CUDA_ROPE_ANY_UNIT_CUH

#include "launch.cuh"
#include "rotary.h"
#include "rows.cuh"
#include "unit.cuh"

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

#endif
