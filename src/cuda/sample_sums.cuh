/* sample_sums.cuh - what sample reads besides its logits, and what it computes of scores: their order as integers,
   their weights, and sums of weights.

   A weight is added as a whole number of 2^-64, in two parts of 32 bits. Sums of integers have the same bits in any
   order, so that atomics in shared memory, any number of blocks and a list in any order give the same choice. Each
   weight loses less than 2^-64 and the largest is 1: up to 2^24 tokens, sums are exact to 2^-40 of the whole. */
#ifndef ADZE_CUDA_SAMPLE_SUMS_CUH
#define ADZE_CUDA_SAMPLE_SUMS_CUH

#include "sampling.h"

struct whole_numbers { /* of i32 or i64 */
    const void *data;
    int64_t stride; /* from one row to the next; 0: all have the same */
    bool wide;
    __device__ __forceinline__ int64_t get(int64_t at) const
    {
        return !data ? 0 : wide ? ((const int64_t *)data)[at] : ((const int32_t *)data)[at];
    }
};

/* Bits in the order of the floats. */
__device__ __forceinline__ uint32_t sample_key(float y)
{
    const uint32_t bits = __float_as_uint(y);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float sample_value(uint32_t key)
{
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

/* e^d for d from ADZE_SAMPLE_LOWEST to 0, to 2 units. */
__device__ __forceinline__ float sample_exp(float d)
{
    const float n = rintf(d * 0x1.715476p0f), r = fmaf(n, -0x1.7f7d1cp-20f, fmaf(n, -0x1.62e4p-1f, d));
    float power = fmaf(r, 0x1.0fa7d8p-7f, 0x1.573adp-5f);
    power = fmaf(power, r, 0x1.555a6ep-3f);
    power = fmaf(power, r, 0x1.fffdc4p-2f);
    power = fmaf(power, r, 0x1.fffff6p-1f);
    power = fmaf(power, r, 1.0f);
    return power * __uint_as_float((uint32_t)((int32_t)n + 127) << 23);
}
/* 1 for the largest, also where it is infinite. */
__device__ __forceinline__ float sample_weight(float y, float max)
{
    const float d = y - max;
    return y == max ? 1 : d >= ADZE_SAMPLE_LOWEST ? sample_exp(d) : 0;
}

/* A sum of weights: high * 2^-32 + low * 2^-64. Neither overflows with 2^31 of them. */
struct weight_sum {
    uint64_t high, low;
    __device__ __forceinline__ void add(const weight_sum &more) { high += more.high, low += more.low; }
    /* The same of equal sums, however their terms were added, and never less of a larger one. */
    __device__ __forceinline__ double value() const
    {
        return (double)(high + (low >> 32)) * 0x1p-32 + (double)(uint32_t)low * 0x1p-64;
    }
};
/* By the bits of the float: conversions of 64 bits are slow. */
__device__ __forceinline__ weight_sum fixed_weight(float w)
{
    const uint32_t bits = __float_as_uint(w), mantissa = (bits & 0x7fffffu) | 0x800000u;
    const int shift = (int)(bits >> 23) - (127 + 23 - 64);
    const uint64_t v = shift >= 0 ? (uint64_t)mantissa << shift : shift > -24 ? mantissa >> -shift : 0;
    return {w == 1 ? (uint64_t)1 << 32 : v >> 32, (uint32_t)v};
}

/* Over the lanes of a warp: of all, and of those up to each. */
__device__ __forceinline__ weight_sum warp_total(weight_sum v)
{
#pragma unroll
    for (int mask = 16; mask; mask /= 2)
        v.add({__shfl_xor_sync(~0u, v.high, mask), __shfl_xor_sync(~0u, v.low, mask)});
    return v;
}
__device__ __forceinline__ weight_sum warp_prefix(weight_sum v)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const weight_sum before = {__shfl_up_sync(~0u, v.high, step), __shfl_up_sync(~0u, v.low, step)};
        if (lane >= step)
            v.add(before);
    }
    return v;
}
__device__ __forceinline__ uint32_t warp_prefix(uint32_t v)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const uint32_t before = __shfl_up_sync(~0u, v, step);
        if (lane >= step)
            v += before;
    }
    return v;
}
__device__ __forceinline__ uint64_t warp_most(uint64_t v)
{
#pragma unroll
    for (int mask = 16; mask; mask /= 2) {
        const uint64_t other = __shfl_xor_sync(~0u, v, mask);
        v = other > v ? other : v;
    }
    return v;
}

/* What a threshold is found by, and in which order. */
enum select_by { BY_NUMBER, BY_WEIGHT, BY_INDEX };

/* Tokens and their weights by some bits of a key. A weight is added in words of 32 bits: what a word cannot hold is
   carried to the next by the thread that made it overflow. */
constexpr int BINS = 2048;
struct sample_bins {
    uint32_t count[BINS], low[BINS], middle[BINS], high[BINS];
    __device__ __forceinline__ void add(uint32_t bin, const weight_sum &w)
    {
        const uint32_t lowest = (uint32_t)w.low;
        uint64_t rest = w.high;
        if (lowest && atomicAdd(&low[bin], lowest) + lowest < lowest)
            rest++;
        const uint32_t next = (uint32_t)rest;
        uint32_t last = (uint32_t)(rest >> 32);
        if (next && atomicAdd(&middle[bin], next) + next < next)
            last++;
        if (last)
            atomicAdd(&high[bin], last);
    }
};

#endif
