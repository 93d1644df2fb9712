/* rope_vector.cuh - a thread's vectors of a head, of the tables and of a weight in rope_fast and rope_across, and
   the arithmetic on them. */
#ifndef ADZE_CUDA_ROPE_VECTOR_CUH
#define ADZE_CUDA_ROPE_VECTOR_CUH

#include "launch.cuh"
#include "reduce.cuh"
#include "rotary.h"
#include "vec.cuh"

constexpr int FAST_THREADS = 256, ACROSS_THREADS = 512; /* of a block, at most */

/* What is known of a call at compile time. S: dtype of the tables; ONCE: they have one column per pair; ROUND: the
   call's rounding, with NO_NORM for rope; REST: elements beyond rotary_dim are normalised or copied. */
constexpr int NO_NORM = 8;
template <typename TABLE, int PAIRS_, bool ONCE_, int ROUND_, bool REST_ = false>
struct rope_traits {
    typedef TABLE S;
    static constexpr int PAIRS = PAIRS_, ROUND = ROUND_;
    static constexpr bool ONCE = ONCE_, REST = REST_, NORM = !(ROUND_ & NO_NORM), STEPS = ROUND_ & ADZE_ROUND_STEPS;
    static constexpr bool INTERLEAVED = PAIRS_ == ADZE_ROPE_INTERLEAVED;
};

struct rope_fast_tensor {
    const void *x, *weight;
    void *out;
    int64_t x_stride[2], out_stride[2]; /* of batch and seq, in elements */
    int32_t x_head, out_head;           /* of heads */
    int32_t heads, groups;              /* groups: of HEADS heads */
    float inverse;                      /* 1 / elements of a norm */
};
struct rope_fast_params {
    rope_fast_tensor qk[2];
    const void *cos, *sin;
    int64_t cos_stride[2], sin_stride[2];
    uint32_t seq;           /* 0: there is one batch */
    int32_t width;          /* threads of a head */
    int32_t lanes;          /* of them, those with elements of it */
    int32_t rotating;       /* of them, those that rotate; the others copy */
    uint32_t inverse_width; /* 65536 / width, rounded up: exact for the threads of a block */
    int32_t half;           /* from a thread's first elements to its second */
    int32_t table_half;     /* the same in a table */
    int32_t parts_log2;     /* blocks of a token */
    int32_t part_groups;    /* groups of a token in a block */
    uint32_t tokens, pack;  /* in all; of a block: more than 1 where heads are few or short */
    uint32_t inverse_part;  /* 65536 / part_groups, rounded up */
    int32_t const_tables;   /* tables and weights may be read before the dependency wait */
    float eps, weight_offset;
    uint32_t prefetch_blocks; /* blocks that prefetch their inputs, the first of the grid */
};

/* N contiguous elements of 4 bytes or more, still packed. */
template <typename T, int N>
struct rope_words {
    static constexpr int COUNT = N * (int)sizeof(T) / 4;
    uint32_t word[COUNT];
    __device__ __forceinline__ void read(const T *p)
    {
        if constexpr (COUNT == 1) {
            word[0] = *reinterpret_cast<const uint32_t *>(p);
        } else if constexpr (COUNT == 2) {
            const uint2 v = *reinterpret_cast<const uint2 *>(p);
            word[0] = v.x, word[1] = v.y;
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; i += 4) {
                const uint4 v = reinterpret_cast<const uint4 *>(p)[i / 4];
                word[i] = v.x, word[i + 1] = v.y, word[i + 2] = v.z, word[i + 3] = v.w;
            }
        }
    }
    __device__ __forceinline__ void write(T *p) const
    {
        *reinterpret_cast<uint4 *>(p) = make_uint4(word[0], word[1], word[2], word[3]);
    }
    /* The elements of 16 bytes as floats, and back. */
    __device__ __forceinline__ void unpack(float (&f)[N]) const
    {
        const packed<T> v = {make_uint4(word[0], word[1], word[2], word[3])};
        v.get(f);
    }
    __device__ __forceinline__ void pack(const float (&f)[N])
    {
        packed<T> v;
        v.set(f);
        word[0] = v.raw.x, word[1] = v.raw.y, word[2] = v.raw.z, word[3] = v.raw.w;
    }
    /* Ones, where there is nothing to read. */
    __device__ __forceinline__ void read_if(bool there, const T *p)
    {
        if (there)
            return read(p);
        const T one = from_float<T>(1);
        uint32_t bits = 0;
        memcpy(&bits, &one, sizeof one);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            word[i] = sizeof(T) == 4 ? bits : bits << 16 | bits;
    }
    __device__ __forceinline__ float get(int j) const
    {
        if constexpr (sizeof(T) == 4) {
            return __uint_as_float(word[j]);
        } else {
            const uint16_t bits = (uint16_t)(j % 2 ? word[j / 2] >> 16 : word[j / 2]);
            return to_float(*reinterpret_cast<const T *>(&bits));
        }
    }
    __device__ __forceinline__ void keep()
    {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            asm volatile("" : "+r"(word[i]));
    }
};

/* A vector of q or k. */
template <typename T>
using rope_vector = rope_words<T, VEC<T>>;

/* The columns of both tables that a thread uses. */
template <typename T, typename TRAITS>
struct rope_columns {
    typedef typename TRAITS::S S;
    static constexpr int W = VEC<T>, N = TRAITS::ONCE && TRAITS::INTERLEAVED ? W / 2 : W;
    static constexpr int SETS = TRAITS::ONCE && !TRAITS::INTERLEAVED ? 1 : 2;
    rope_words<S, N> cos[SETS], sin[SETS];
    /* Calls use(set, cos, sin) with their addresses. */
    template <typename F>
    __device__ __forceinline__ static void at(const rope_fast_params &p, uint32_t b, uint32_t s, int lane, F use)
    {
        const S *cos_row = (const S *)p.cos + s * p.cos_stride[1] + b * p.cos_stride[0];
        const S *sin_row = (const S *)p.sin + s * p.sin_stride[1] + b * p.sin_stride[0];
#pragma unroll
        for (int i = 0; i < SETS; i++)
            use(i, cos_row + lane * N + i * p.table_half, sin_row + lane * N + i * p.table_half);
    }
    __device__ __forceinline__ void read(const rope_fast_params &p, uint32_t b, uint32_t s, int lane)
    {
        at(p, b, s, lane, [this](int i, const S *c, const S *n) { cos[i].read(c), sin[i].read(n); });
    }
    __device__ __forceinline__ static void prefetch_columns(const rope_fast_params &p, uint32_t b, uint32_t s,
                                                            int lane)
    {
        at(p, b, s, lane, [](int, const S *c, const S *n) { prefetch(c), prefetch(n); });
    }
    __device__ __forceinline__ float cos_at(int set, int j) const
    {
        return cos[set % SETS].get(j * N / W);
    }
    __device__ __forceinline__ float sin_at(int set, int j) const
    {
        return sin[set % SETS].get(j * N / W);
    }
    __device__ __forceinline__ void keep()
    {
        if constexpr (sizeof(S) < 4) {
#pragma unroll
            for (int i = 0; i < SETS; i++)
                cos[i].keep(), sin[i].keep();
        }
    }
};

/* Rotates x and y, the thread's two vectors. A model that rounds every step computes in T: products of two T are
   exact in float, so that one rounding gives the same. */
template <typename T, typename TRAITS>
__device__ __forceinline__ void rope_rotate_words(const rope_columns<T, TRAITS> &t, rope_vector<T> &x,
                                                  rope_vector<T> &y)
{
#pragma unroll
    for (int i = 0; i < rope_vector<T>::COUNT; i++) {
        const uint32_t a = x.word[i], b = y.word[i];
        if constexpr (TRAITS::INTERLEAVED) {
            /* (a0, a1) becomes (a0 c0 - a1 s0, a1 c1 + a0 s1). */
            const uint32_t turned_a = __byte_perm(a, 0, 0x1032), turned_b = __byte_perm(b, 0, 0x1032);
            x.word[i] =
                pair_add<T>(pair_mul<T>(a, t.cos[0].word[i]), pair_mul<T>(turned_a, t.sin[0].word[i]) ^ 0x8000u);
            y.word[i] =
                pair_add<T>(pair_mul<T>(b, t.cos[1].word[i]), pair_mul<T>(turned_b, t.sin[1].word[i]) ^ 0x8000u);
        } else {
            x.word[i] = pair_sub<T>(pair_mul<T>(a, t.cos[0].word[i]), pair_mul<T>(b, t.sin[0].word[i]));
            y.word[i] = pair_add<T>(pair_mul<T>(b, t.cos[1].word[i]), pair_mul<T>(a, t.sin[1].word[i]));
        }
    }
}
template <typename T, typename TRAITS>
__device__ __forceinline__ void rope_rotate_floats(const rope_columns<T, TRAITS> &t, float (&a)[VEC<T>],
                                                   float (&b)[VEC<T>])
{
    constexpr int W = VEC<T>;
    if constexpr (TRAITS::INTERLEAVED) {
#pragma unroll
        for (int j = 0; j < W; j += 2) {
            const float a0 = a[j], a1 = a[j + 1], b0 = b[j], b1 = b[j + 1];
            a[j] = a0 * t.cos_at(0, j) - a1 * t.sin_at(0, j);
            a[j + 1] = a1 * t.cos_at(0, j + 1) + a0 * t.sin_at(0, j + 1);
            b[j] = b0 * t.cos_at(1, j) - b1 * t.sin_at(1, j);
            b[j + 1] = b1 * t.cos_at(1, j + 1) + b0 * t.sin_at(1, j + 1);
        }
    } else {
#pragma unroll
        for (int j = 0; j < W; j++) {
            const float x = a[j], y = b[j];
            a[j] = x * t.cos_at(0, j) - y * t.sin_at(0, j);
            b[j] = y * t.cos_at(1, j) + x * t.sin_at(1, j);
        }
    }
}

template <typename T>
__device__ __forceinline__ float rope_squares(const rope_vector<T> (&x)[2])
{
    constexpr int W = VEC<T>;
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float f[W];
        x[i].unpack(f);
#pragma unroll
        for (int j = 0; j < W; j++)
            sum[i] += f[j] * f[j];
    }
    return sum[0] + sum[1];
}

/* Loads a thread's part of a weight: ones, if there is none. */
template <typename T>
__device__ __forceinline__ void rope_read_weight(const void *row, int at, int apart, rope_vector<T> (&weight)[2])
{
    weight[0].read_if(row, (const T *)row + at);
    weight[1].read_if(row, (const T *)row + at + apart);
}

/* Normalises and rotates in place. Lanes with `rotates` false have elements that are not rotated. */
template <typename T, typename TRAITS>
__device__ __forceinline__ void rope_finish(const rope_fast_params &p, rope_columns<T, TRAITS> &t,
                                            const rope_vector<T> (&weight)[2], float scale, bool rotates,
                                            rope_vector<T> (&x)[2])
{
    constexpr int W = VEC<T>;
    if constexpr (TRAITS::NORM && TRAITS::STEPS && TRAITS::ROUND & ADZE_ROUND_NORM) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float f[W];
            x[i].unpack(f);
#pragma unroll
            for (int j = 0; j < W; j++)
                f[j] *= scale;
            x[i].pack(f);
#pragma unroll
            for (int j = 0; j < rope_vector<T>::COUNT; j++)
                x[i].word[j] = pair_mul<T>(x[i].word[j], weight[i].word[j]);
        }
        if (rotates)
            rope_rotate_words<T, TRAITS>(t, x[0], x[1]);
    } else if constexpr (!TRAITS::NORM && TRAITS::STEPS) {
        if (rotates)
            rope_rotate_words<T, TRAITS>(t, x[0], x[1]);
    } else {
        if (!TRAITS::NORM && !rotates)
            return;
        float f[2][W];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            x[i].unpack(f[i]);
            if constexpr (TRAITS::NORM) {
#pragma unroll
                for (int j = 0; j < W; j++)
                    f[i][j] *= scale;
                if constexpr (TRAITS::ROUND & ADZE_ROUND_NORM) {
                    x[i].pack(f[i]);
                    x[i].unpack(f[i]);
                }
#pragma unroll
                for (int j = 0; j < W; j++)
                    f[i][j] *= weight[i].get(j) + p.weight_offset;
            }
            if constexpr (TRAITS::NORM && TRAITS::ROUND != 0) {
                x[i].pack(f[i]);
                x[i].unpack(f[i]);
            }
        }
        if constexpr (TRAITS::STEPS) {
            if (rotates)
                rope_rotate_words<T, TRAITS>(t, x[0], x[1]);
        } else {
            if (rotates)
                rope_rotate_floats<T, TRAITS>(t, f[0], f[1]);
            x[0].pack(f[0]);
            x[1].pack(f[1]);
        }
    }
}

#endif
