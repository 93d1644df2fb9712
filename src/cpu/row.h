/* row.h - a row of any dtype, sixteen floats at a time. Each function is inlined with a constant dtype. */
#ifndef ADZE_CPU_ROW_H
#define ADZE_CPU_ROW_H

#include "kernel.h"

#include <math.h>
#include <string.h>
#if defined(__F16C__)
#    include <immintrin.h>
#elif defined(__x86_64__)
#    include <emmintrin.h>
#elif defined(__aarch64__)
#    include <arm_neon.h>
#endif

enum { LANES = 16 };
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
#define INLINE static inline __attribute__((always_inline, unused))

INLINE vf vf_all(float f)
{
    return f - (vf){0};
}
INLINE vf vf_select(vi mask, vf a, vf b)
{
    return (vf)(((vi)a & mask) | ((vi)b & ~mask));
}
INLINE vu vu_select(vi mask, vu a, vu b)
{
    return (a & (vu)mask) | (b & ~(vu)mask);
}
INLINE vf vf_max(vf a, vf b)
{
    return vf_select(a > b, a, b);
}
INLINE vf vf_abs(vf a)
{
    return (vf)((vu)a & 0x7fffffffu);
}
INLINE vf vf_fma(vf a, vf b, vf c) /* contracted where the target can */
{
    return a * b + c;
}
INLINE vf vf_twice_low(vf v) /* each of the first eight lanes twice */
{
    return __builtin_shufflevector(v, v, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
}
INLINE vf vf_twice_high(vf v)
{
    return __builtin_shufflevector(v, v, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
}
INLINE float vf_sum(vf v)
{
    float lane[LANES];
    memcpy(lane, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            lane[i] += lane[i + width];
    return lane[0];
}
INLINE float vf_max_lane(vf v)
{
    float lane[LANES];
    memcpy(lane, &v, sizeof v);
    for (int i = 1; i < LANES; i++)
        lane[0] = lane[i] > lane[0] ? lane[i] : lane[0];
    return lane[0];
}

INLINE vf bf16_to_f32(vh h)
{
    return (vf)(__builtin_convertvector(h, vu) << 16);
}
INLINE vh f32_to_bf16(vf f)
{
    const vu u = (vu)f;
    const vu rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    const vi nan = (vi)((u & 0x7fffffffu) > 0x7f800000u);
    return __builtin_convertvector(vu_select(nan, (u >> 16) | 0x40u, rounded), vh);
}

INLINE vf f16_to_f32(vh h)
{
    vf f;
#if defined(__AVX512F__)
    f = (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    __m128i half[2];
    memcpy(half, &h, sizeof h);
    const __m256 wide[2] = {_mm256_cvtph_ps(half[0]), _mm256_cvtph_ps(half[1])};
    memcpy(&f, wide, sizeof f);
#elif defined(__aarch64__)
    float16x4_t part[4];
    float32x4_t wide[4];
    memcpy(part, &h, sizeof h);
    for (int i = 0; i < 4; i++)
        wide[i] = vcvt_f32_f16(part[i]);
    memcpy(&f, wide, sizeof f);
#else /* exponents are rebiased by a multiplication, exact for subnormals too; then infinity and NaN are put         \
         back */
    const vu u = __builtin_convertvector(h, vu), magnitude = (u & 0x7fffu) << 13;
    const vu finite = (vu)((vf)magnitude * 0x1p112f);
    const vi special = (vi)(magnitude >= 0x0f800000u);
    f = (vf)(vu_select(special, magnitude | 0x7f800000u, finite) | ((u & 0x8000u) << 16));
#endif
    return f;
}
INLINE vh f32_to_f16(vf f)
{
#if defined(__AVX512F__)
    return (vh)_mm512_cvtps_ph((__m512)f, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
    __m256 wide[2];
    memcpy(wide, &f, sizeof f);
    const __m128i half[2] = {_mm256_cvtps_ph(wide[0], _MM_FROUND_TO_NEAREST_INT),
                             _mm256_cvtps_ph(wide[1], _MM_FROUND_TO_NEAREST_INT)};
    vh h;
    memcpy(&h, half, sizeof h);
    return h;
#elif defined(__aarch64__)
    float32x4_t wide[4];
    float16x4_t part[4];
    vh h;
    memcpy(wide, &f, sizeof f);
    for (int i = 0; i < 4; i++)
        part[i] = vcvt_f16_f32(wide[i]);
    memcpy(&h, part, sizeof h);
    return h;
#else /* normal: round the bits; subnormal: adding 0.5 leaves units of 2^-24 in the last place */
    const vu u = (vu)f, magnitude = u & 0x7fffffffu;
    const vu normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1) - 0x38000000u) >> 13;
    const vu small = (vu)((vf)magnitude + 0.5f) - 0x3f000000u;
    vu h = vu_select((vi)(magnitude < 0x38800000u), small, normal);
    h = vu_select((vi)(magnitude >= 0x477ff000u), (vu){0} + 0x7c00u, h);
    h = vu_select((vi)(magnitude > 0x7f800000u), (vu){0} + 0x7e00u, h);
    return __builtin_convertvector(h | ((u >> 16) & 0x8000u), vh);
#endif
}

/* Sixteen elements from index i of a row. */
INLINE vf row_load(const void *row, int dtype, int64_t i)
{
    vf f;
    vh h;
    if (dtype == ADZE_F32) {
        memcpy(&f, (const float *)row + i, sizeof f);
        return f;
    }
    memcpy(&h, (const uint16_t *)row + i, sizeof h);
    return dtype == ADZE_BF16 ? bf16_to_f32(h) : f16_to_f32(h);
}
/* The n < 16 last elements; the other lanes are zero. */
INLINE vf row_load_tail(const void *row, int dtype, int64_t i, int64_t n)
{
    const size_t size = dtype == ADZE_F32 ? 4 : 2;
    char part[64] = {0};
    memcpy(part, (const char *)row + (size_t)i * size, (size_t)n * size);
    return row_load(part, dtype, 0);
}
INLINE void row_store(void *row, int dtype, int64_t i, vf f)
{
    if (dtype == ADZE_F32) {
        memcpy((float *)row + i, &f, sizeof f);
        return;
    }
    const vh h = dtype == ADZE_BF16 ? f32_to_bf16(f) : f32_to_f16(f);
    memcpy((uint16_t *)row + i, &h, sizeof h);
}
INLINE void row_store_tail(void *row, int dtype, int64_t i, vf f, int64_t n)
{
    const size_t size = dtype == ADZE_F32 ? 4 : 2;
    char part[64];
    row_store(part, dtype, 0, f);
    memcpy((char *)row + (size_t)i * size, part, (size_t)n * size);
}
/* A store that does not fill the cache; `row` and i * size are multiples of 32 bytes. */
INLINE void row_stream(void *row, int dtype, int64_t i, vf f)
{
    char part[64] __attribute__((aligned(64)));
    row_store(part, dtype, 0, f);
    char *to = (char *)row + (size_t)i * (dtype == ADZE_F32 ? 4 : 2);
    for (int at = 0; at < (dtype == ADZE_F32 ? 64 : 32); at += 32) {
#if defined(__AVX__)
        _mm256_stream_si256((__m256i *)(void *)(to + at), _mm256_load_si256((const __m256i *)(void *)(part + at)));
#elif defined(__x86_64__)
        _mm_stream_si128((__m128i *)(void *)(to + at), _mm_load_si128((const __m128i *)(void *)(part + at)));
        _mm_stream_si128((__m128i *)(void *)(to + at + 16),
                         _mm_load_si128((const __m128i *)(void *)(part + at + 16)));
#elif defined(__aarch64__)
        const uint8x16_t low = vld1q_u8((const uint8_t *)part + at), high = vld1q_u8((const uint8_t *)part + at + 16);
        __asm__ volatile("stnp %q1, %q2, [%0]" : : "r"(to + at), "w"(low), "w"(high) : "memory");
#else
        memcpy(to + at, part + at, 32);
#endif
    }
}
/* After streaming stores, before another thread may read them. */
INLINE void row_stream_end(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
/* f as a store and a load would leave it. */
INLINE vf row_round(int dtype, vf f)
{
    return dtype == ADZE_F32 ? f : dtype == ADZE_BF16 ? bf16_to_f32(f32_to_bf16(f)) : f16_to_f32(f32_to_f16(f));
}

/* A whole output that is larger than the cache, and whose rows start on 32 bytes, is streamed past it. */
INLINE int row_streams(const adze_tensor *out, int64_t count)
{
    const size_t size = out->dtype == ADZE_F32 ? 4 : 2;
    int streams = (size_t)count * size > adze_cpu_cache() && (uintptr_t)out->data % 32 == 0;
    for (int d = 0; d < out->rank - 1; d++)
        streams = streams && (size_t)out->stride[d] * size % 32 == 0;
    return streams;
}

/* Rows per piece of parallel work, so that a piece is worth a thread's while. */
INLINE int64_t row_grain(int64_t dim)
{
    return 16384 / (dim + 1) + 1;
}

#endif
