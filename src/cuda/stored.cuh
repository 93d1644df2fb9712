/* stored.cuh - floats rounded to numbers of fewer bits. */
#ifndef ADZE_CUDA_STORED_CUH
#define ADZE_CUDA_STORED_CUH

#include <stdint.h>

/* The bits of the nearest f8e4m3, at most 448. Normal numbers: the mantissa is rounded to 3 bits; smaller ones are
   multiples of 2^-9. */
__device__ __forceinline__ uint32_t f8_bits(float v)
{
    const float magnitude = fminf(fabsf(v), 448);
    const uint32_t u = __float_as_uint(magnitude), normal = ((u + 0x7ffffu + (u >> 20 & 1)) >> 20) - (120u << 3);
    const uint32_t bits = magnitude < 0x1p-6f ? (uint32_t)(int32_t)rintf(magnitude * 0x1p9f) : normal;
    return bits | __float_as_uint(v) >> 31 << 7;
}
/* The nearest whole number, halves to even, plus `zero`, from low to high. */
__device__ __forceinline__ int32_t whole_between(float v, float zero, float low, float high)
{
    const float near = rintf(fminf(fmaxf(v, -0x1p20f), 0x1p20f));
    return (int32_t)fminf(fmaxf(near + zero, low), high);
}
/* x over a scale, of which 0 stands for a row of zeros. */
__device__ __forceinline__ float over_scale(float x, float scale)
{
    return scale == 0 ? 0 : x / scale;
}

#endif
