/* quantised.cuh - weights in fewer bits on CUDA: as floats one by one, and as pairs for tensor cores. */
#ifndef ADZE_CUDA_QUANTISED_CUH
#define ADZE_CUDA_QUANTISED_CUH

#include "vec.cuh"

#include <type_traits>

enum weight_format { OF_X, OF_I8, OF_F8, OF_U4 }; /* x's dtype; i8; f8e4m3; u8 with two in a byte */

constexpr int weight_vector(weight_format f) /* weights in 16 bytes, where x has 2 bytes */
{
    return f == OF_X ? 8 : f == OF_U4 ? 32 : 16;
}

/* The float of an f8e4m3: its exponent and mantissa, put into those of a float, are 2^-120 of it. */
__device__ __forceinline__ float f8_to_float(uint32_t v)
{
    const float magnitude = __uint_as_float((v & 0x7f) << 20) * 0x1p120f;
    const float with_nan = (v & 0x7f) == 0x7f ? __uint_as_float(0x7fffffffu) : magnitude;
    return v & 0x80 ? -with_nan : with_nan;
}

/* Stored number `at` of a row. */
template <typename T, weight_format F>
__device__ __forceinline__ float weight_float(const char *row, int64_t at)
{
    if constexpr (F == OF_X)
        return to_float(((const T *)row)[at]);
    else if constexpr (F == OF_I8)
        return (float)((const int8_t *)row)[at];
    else if constexpr (F == OF_F8)
        return f8_to_float(((const uint8_t *)row)[at]);
    else
        return (float)(((const uint8_t *)row)[at / 2] >> (at % 2 ? 4 : 0) & 15);
}

template <typename T>
__device__ __forceinline__ uint32_t both(float v) /* v as T in both halves */
{
    return twice(from_float<T>(v));
}

/* (w & MASK) | OTHER, and the same with an exclusive or: each one instruction, of which the compiler makes two. */
template <uint32_t MASK, uint32_t OTHER>
__device__ __forceinline__ uint32_t and_or(uint32_t w)
{
#ifdef __CUDA_ARCH__
    uint32_t v;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(w), "n"(MASK), "n"(OTHER));
    return v;
#else
    return (w & MASK) | OTHER;
#endif
}
template <uint32_t MASK, uint32_t OTHER>
__device__ __forceinline__ uint32_t and_xor(uint32_t w)
{
#ifdef __CUDA_ARCH__
    uint32_t v;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(v) : "r"(w), "n"(MASK), "n"(OTHER));
    return v;
#else
    return (w & MASK) ^ OTHER;
#endif
}

/* Whether one of 4 bytes, or of 16, is a NaN of f8e4m3. */
__device__ __forceinline__ bool f8_nan(uint32_t w)
{
    return ((w & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}
__device__ __forceinline__ bool f8_nan(uint4 w)
{
    const uint32_t x = (w.x & 0x7f7f7f7fu) + 0x01010101u, y = (w.y & 0x7f7f7f7fu) + 0x01010101u;
    const uint32_t z = (w.z & 0x7f7f7f7fu) + 0x01010101u, last = (w.w & 0x7f7f7f7fu) + 0x01010101u;
    return (x | y | z | last) & 0x80808080u;
}

/* The floats of 4 bytes i8, in order: they are put into the low bits of 2^23, more by 128. */
__device__ __forceinline__ void i8_floats(uint32_t w, float *f)
{
    const uint32_t u = w ^ 0x80808080u;
#pragma unroll
    for (int i = 0; i < 4; i++)
        f[i] = __uint_as_float(__byte_perm(u, 0x4b000000u, 0x7540 + i)) - (8388608.0f + 128);
}

/* Elements 0 and 2, 1 and 3 of 4 bytes f8e4m3: exponent and mantissa are put into those of T, where they are 2^-120
   of the number in bf16, 2^-8 in f16. NaN comes out as 480. */
template <typename T>
__device__ __forceinline__ void f8_pairs(uint32_t w, uint32_t (&pair)[2])
{
    constexpr bool BF16 = std::is_same<T, bf16>::value;
    constexpr int SHIFT = BF16 ? 4 : 1;
    constexpr uint32_t MASK = (0x7f00u >> SHIFT) * 0x10001u;
    const uint32_t factor = both<T>(BF16 ? 0x1p120f : 0x1p8f);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t v = w << (8 - 8 * i); /* each in the upper byte of a half */
        pair[i] = pair_mul<T>((v >> SHIFT & MASK) | (v & 0x80008000u), factor);
    }
}
/* Makes NaN of those that are. */
__device__ __forceinline__ void f8_nan_pairs(uint32_t w, uint32_t (&pair)[2])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t v = w << (8 - 8 * i);
        pair[i] |= (v & 0x7f00u) == 0x7f00u ? 0x7fffu : 0;
        pair[i] |= (v & 0x7f000000u) == 0x7f000000u ? 0x7fff0000u : 0;
    }
}

/* 4 bytes f8e4m3 as two pairs of f16, in an order that is the same for all. */
__device__ __forceinline__ void f8_halves(uint32_t w, uint32_t (&pair)[2])
{
#if __CUDA_ARCH__ >= 890
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, low;\n\t"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n\t}"
        : "=r"(pair[0]), "=r"(pair[1])
        : "r"(w));
#else
    f8_pairs<f16>(w, pair);
    if (f8_nan(w))
        f8_nan_pairs(w, pair);
#endif
}

/* Pairs of T of the 4 bytes w. OF_I8 and OF_F8: elements 0 and 2, 1 and 3. OF_U4: elements 0 and 4, 1 and 5, 2 and 6,
   3 and 7, less the zero, of which `zero` has both halves. All are exact. Elements so far apart lie in the two halves
   of a word as they are stored, so that a shift and a mask for both halves take them out. */
template <typename T, weight_format F, int N>
__device__ __forceinline__ void weight_pairs(uint32_t w, uint32_t zero, bool has_zero, uint32_t (&pair)[N])
{
    constexpr bool BF16 = std::is_same<T, bf16>::value;
    if constexpr (F == OF_U4) {
        /* As the low bits of 128 in bf16, of 1024 in f16. */
        constexpr uint32_t MAGIC = BF16 ? 0x43004300u : 0x64006400u;
        const uint32_t magic_zero = both<T>((BF16 ? 128.0f : 1024.0f) + 8), magic = MAGIC;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t v = and_or<0x000f000fu, MAGIC>(w >> (4 * i));
            pair[i] = has_zero ? pair_sub<T>(pair_sub<T>(v, magic), zero) : pair_sub<T>(v, magic_zero);
        }
    } else if constexpr (F == OF_I8 && BF16) {
        /* The low 7 bits are those of 128. The sign is the lowest bit of the exponent: 128 becomes 256, which is less
           by 128 when it is subtracted. */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t v = w >> (8 * i);
            pair[i] = pair_sub<T>(and_or<0x007f007fu, 0x43004300u>(v), and_or<0x00800080u, 0x43004300u>(v));
        }
    } else if constexpr (F == OF_I8) {
        /* As the low bits of 1024, more by 128. */
        const uint32_t offset = both<T>(1024.0f + 128);
#pragma unroll
        for (int i = 0; i < 2; i++)
            pair[i] = pair_sub<T>(and_xor<0x00ff00ffu, 0x64806480u>(w >> (8 * i)), offset);
    } else if constexpr (F == OF_F8) {
        f8_pairs<T>(w, pair);
        if (f8_nan(w))
            f8_nan_pairs(w, pair);
    }
}
/* The same with what is rare decided by the caller, for all lanes of a warp: NaN among f8e4m3, zeros of u4. */
template <typename T, weight_format F, bool RARE, int N>
__device__ __forceinline__ void weight_pairs(uint32_t w, uint32_t zero, uint32_t (&pair)[N])
{
    if constexpr (F == OF_F8) {
        f8_pairs<T>(w, pair);
        if constexpr (RARE)
            f8_nan_pairs(w, pair);
    } else {
        weight_pairs<T, F>(w, zero, RARE, pair);
    }
}

/* The same in fewer instructions, as multiples of a power of two: the pairs of OF_I8 and OF_U4 are weight_unit of the
   weights. Bits that are put at the low end of T are a number that is not normalised, or just is, and so a multiple
   of its least: one fused operation makes it larger and subtracts the zero, of which `addend` has both halves. */
template <typename T, weight_format F>
constexpr float weight_unit = F == OF_F8 || F == OF_X        ? 1
                              : std::is_same<T, bf16>::value ? 0x1p-6f
                                                             : 0x1p-9f;
template <typename T, weight_format F>
__device__ __forceinline__ uint32_t weight_addend(float zero)
{
    return both<T>(-zero * weight_unit<T, F>);
}
template <typename T, weight_format F, bool RARE, int N>
__device__ __forceinline__ void unit_pairs(uint32_t w, uint32_t addend, uint32_t (&pair)[N])
{
    constexpr float LARGER = std::is_same<T, bf16>::value ? 0x1p127f : 0x1p15f;
    const uint32_t larger = both<T>(LARGER), high = both<T>(LARGER / 16), next = w >> 8;
    if constexpr (F == OF_U4) {
        pair[0] = pair_fma<T>(w & 0x000f000fu, larger, addend);
        pair[1] = pair_fma<T>(w & 0x00f000f0u, high, addend);
        pair[2] = pair_fma<T>(next & 0x000f000fu, larger, addend);
        pair[3] = pair_fma<T>(next & 0x00f000f0u, high, addend);
    } else if constexpr (F == OF_I8) { /* its zero is 128 */
        pair[0] = pair_fma<T>(and_xor<0x00ff00ffu, 0x00800080u>(w), larger, addend);
        pair[1] = pair_fma<T>(and_xor<0x00ff00ffu, 0x00800080u>(next), larger, addend);
    } else {
        weight_pairs<T, F, RARE>(w, addend, pair);
    }
}

/* Eight elements in the order in which weight_pairs gives them. */
template <weight_format F>
__device__ __forceinline__ uint4 weight_order(uint4 v)
{
    if constexpr (F == OF_U4)
        return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                          __byte_perm(v.y, v.w, 0x7632));
    else if constexpr (F == OF_I8 || F == OF_F8)
        return make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x5410),
                          __byte_perm(v.z, v.w, 0x7632));
    else
        return v;
}

#endif
