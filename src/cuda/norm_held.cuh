/* norm_held.cuh - the units of a row that a thread of norm_any holds: as floats, or packed in their own dtype. */
#ifndef ADZE_CUDA_NORM_HELD_CUH
#define ADZE_CUDA_NORM_HELD_CUH

#include "unit.cuh"

template <typename T, int W, int UNITS, bool PACKED>
struct norm_held {
    float f[UNITS][W];
    __device__ __forceinline__ void get(int u, float (&to)[W]) const
    {
#pragma unroll
        for (int j = 0; j < W; j++)
            to[j] = f[u][j];
    }
    __device__ __forceinline__ void set(int u, const float (&from)[W])
    {
#pragma unroll
        for (int j = 0; j < W; j++)
            f[u][j] = from[j];
    }
    __device__ __forceinline__ void take(int u, const unit<T, W> &from)
    {
        from.get(f[u]);
    }
    __device__ __forceinline__ void keep() {}
};

/* Packed: half the registers of floats, where T has 16 bits. Two units of 2 bytes share a register. */
template <typename T, int W, int UNITS>
struct norm_held<T, W, UNITS, true> {
    static constexpr int BYTES = W * (int)sizeof(T), WORDS = (UNITS * BYTES + 3) / 4;
    uint32_t word[WORDS];
    __device__ __forceinline__ void get(int u, float (&to)[W]) const
    {
        unit<T, W> v;
        if constexpr (BYTES == 2)
            v.v = (uint16_t)(word[u / 2] >> u % 2 * 16);
        else if constexpr (BYTES == 4)
            v.v = word[u];
        else
            v.v = make_uint2(word[2 * u], word[2 * u + 1]);
        v.get(to);
    }
    __device__ __forceinline__ void set(int u, const float (&from)[W])
    {
        unit<T, W> v;
        v.set(from);
        take(u, v);
    }
    /* In order of u: the even one of two clears the other half. */
    __device__ __forceinline__ void take(int u, const unit<T, W> &from)
    {
        if constexpr (BYTES == 2)
            word[u / 2] = u % 2 ? (word[u / 2] & 0xffffu) | (uint32_t)from.v << 16 : from.v;
        else if constexpr (BYTES == 4)
            word[u] = from.v;
        else
            word[2 * u] = from.v.x, word[2 * u + 1] = from.v.y;
    }
    /* Keeps the compiler from holding unpacked floats beyond this point. */
    __device__ __forceinline__ void keep()
    {
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            asm volatile("" : "+r"(word[i]));
    }
};

#endif
