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

/* Pairs of T of the 4 bytes w. OF_I8 and OF_F8: elements 0 and 1, 2 and 3. OF_U4: elements 0 and 4, 1 and 5, 2 and 6,
   3 and 7, less the zero, of which `zero` has both halves. All are exact. */
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
            const uint32_t v = (w >> (4 * i) & 0x000f000fu) | MAGIC;
            pair[i] = has_zero ? pair_sub<T>(pair_sub<T>(v, magic), zero) : pair_sub<T>(v, magic_zero);
        }
    } else if constexpr (F == OF_I8 && BF16) {
        /* As the low bits of 2^23 in a float, whose upper half is the bf16: 8 bits are exact. */
        const uint32_t u = w ^ 0x80808080u;
        uint32_t f[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            f[i] = __float_as_uint(__uint_as_float(__byte_perm(u, 0x4b000000u, 0x7540 + i)) - (8388608.0f + 128));
        pair[0] = __byte_perm(f[0], f[1], 0x7632);
        pair[1] = __byte_perm(f[2], f[3], 0x7632);
    } else if constexpr (F == OF_I8) {
        const uint32_t u = w ^ 0x80808080u, offset = both<T>(1024.0f + 128);
        pair[0] = pair_sub<T>(__byte_perm(u, 0x64646464u, 0x4140), offset);
        pair[1] = pair_sub<T>(__byte_perm(u, 0x64646464u, 0x4342), offset);
    } else if constexpr (F == OF_F8) {
        /* Exponent and mantissa into those of T: 2^-120 of the number in bf16, 2^-8 in f16. */
        constexpr int SHIFT = BF16 ? 4 : 1;
        constexpr uint32_t MASK = (0x7f00u >> SHIFT) * 0x10001u;
        const uint32_t factor = both<T>(BF16 ? 0x1p120f : 0x1p8f);
        const bool nan = ((w & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t v = __byte_perm(w, 0, i ? 0x3424 : 0x1404); /* each in the upper byte of a half */
            pair[i] = pair_mul<T>((v >> SHIFT & MASK) | (v & 0x80008000u), factor);
            if (nan) {
                pair[i] |= (v & 0x7f00u) == 0x7f00u ? 0x7fffu : 0;
                pair[i] |= (v & 0x7f000000u) == 0x7f000000u ? 0x7fff0000u : 0;
            }
        }
    }
}

/* Eight elements in the order in which weight_pairs gives them. */
template <weight_format F>
__device__ __forceinline__ uint4 weight_order(uint4 v)
{
    if constexpr (F == OF_U4)
        return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                          __byte_perm(v.y, v.w, 0x7632));
    else
        return v;
}

#endif
