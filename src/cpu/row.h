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
/* gcc takes comparisons of vectors longer than the target's apart into single lanes, and keeps such vectors in memory
   from one turn of a loop to the next. So floats are compared, and sums kept, in parts that fit the target; whole
   numbers, all below 2^31, are compared by a sign. */
#if defined(__AVX512F__)
enum { VF_PARTS = 1 };
#elif defined(__AVX2__)
enum { VF_PARTS = 2 };
#else
enum { VF_PARTS = 4 };
#endif
typedef float vf_part __attribute__((vector_size(64 / VF_PARTS)));
typedef int32_t vi_part __attribute__((vector_size(64 / VF_PARTS)));
typedef float vf_loose __attribute__((vector_size(64 / VF_PARTS), aligned(4), may_alias));
typedef float vf_quarter __attribute__((vector_size(16)));
typedef union vf_split {
    vf v;
    vf_part part[VF_PARTS];
    vf_quarter quarter[4];
} vf_split;
INLINE vf vf_join(const vf_part *p)
{
    vf_split x;
    for (int i = 0; i < VF_PARTS; i++)
        x.part[i] = p[i];
    return x.v;
}
#if defined(__aarch64__)
typedef union vh_split {
    vh v;
    uint16x8_t half[2];
} vh_split;
INLINE vh vh_join(uint16x8_t low, uint16x8_t high)
{
    const vh_split x = {.half = {low, high}};
    return x.v;
}
#endif
INLINE vi vf_less(vf a, vf b)
{
    const vf_split x = {a}, y = {b};
    vf_part less[VF_PARTS];
    for (int i = 0; i < VF_PARTS; i++)
        less[i] = (vf_part)(x.part[i] < y.part[i]);
    return (vi)vf_join(less);
}
INLINE vi vu_above(vu a, uint32_t limit)
{
    return (vi)(limit - a) >> 31; // cppcheck-suppress shiftTooManyBitsSigned
}
INLINE vf vf_max(vf a, vf b) /* NaN may be lost */
{
    const vf_split x = {a}, y = {b};
    vf_part most[VF_PARTS];
    for (int i = 0; i < VF_PARTS; i++)
#if defined(__AVX512F__)
        most[i] = (vf_part)_mm512_max_ps((__m512)x.part[i], (__m512)y.part[i]);
#elif defined(__AVX2__)
        most[i] = (vf_part)_mm256_max_ps((__m256)x.part[i], (__m256)y.part[i]);
#elif defined(__x86_64__)
        most[i] = (vf_part)_mm_max_ps((__m128)x.part[i], (__m128)y.part[i]);
#elif defined(__aarch64__)
        most[i] = (vf_part)vmaxq_f32((float32x4_t)x.part[i], (float32x4_t)y.part[i]);
#else
        for (int l = 0; l < LANES / VF_PARTS; l++)
            most[i][l] = x.part[i][l] > y.part[i][l] ? x.part[i][l] : y.part[i][l];
#endif
    return vf_join(most);
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
    const vf_split x = {v};
    const vf_quarter q = (x.quarter[0] + x.quarter[2]) + (x.quarter[1] + x.quarter[3]);
    return (q[0] + q[2]) + (q[1] + q[3]);
}
/* A sum over a row, in 64 lanes: v or its square is added to one of four sets of sixteen. */
typedef struct vf_total {
    vf_part part[4][VF_PARTS];
} vf_total;
INLINE void vf_total_add(vf_total *t, int set, vf v, int square)
{
    const vf_split x = {v};
    for (int i = 0; i < VF_PARTS; i++)
        t->part[set][i] = (square ? x.part[i] * x.part[i] : x.part[i]) + t->part[set][i];
}
INLINE float vf_total_sum(const vf_total *t)
{
    vf_part sum[VF_PARTS];
    for (int i = 0; i < VF_PARTS; i++)
        sum[i] = (t->part[0][i] + t->part[1][i]) + (t->part[2][i] + t->part[3][i]);
    return vf_sum(vf_join(sum));
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
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif defined(__aarch64__)
    const vh_split x = {h};
    return vf_join((const vf_part[]){
        (vf_part)vshll_n_u16(vget_low_u16(x.half[0]), 16), (vf_part)vshll_high_n_u16(x.half[0], 16),
        (vf_part)vshll_n_u16(vget_low_u16(x.half[1]), 16), (vf_part)vshll_high_n_u16(x.half[1], 16)});
#else
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}
#if defined(__aarch64__)
/* Eight floats to bf16: the even neighbour is found by adding the last bit that stays, then 0x7fff. */
INLINE uint16x8_t bf16_half(float32x4_t low, float32x4_t high)
{
    const uint32x4_t half = vdupq_n_u32(0x7fff), a = (uint32x4_t)low, b = (uint32x4_t)high;
    const uint16x4_t first = vaddhn_u32(vsraq_n_u32(a, vshlq_n_u32(a, 15), 31), half);
    const uint16x8_t rounded = vaddhn_high_u32(first, vsraq_n_u32(b, vshlq_n_u32(b, 15), 31), half);
    const uint16x8_t number = vuzp1q_u16((uint16x8_t)vceqq_f32(low, low), (uint16x8_t)vceqq_f32(high, high));
    return vbslq_u16(number, rounded, vdupq_n_u16(0x7fc0));
}
#endif
INLINE vh f32_to_bf16(vf f)
{
#if defined(__aarch64__)
    const vf_split x = {f};
    return vh_join(bf16_half((float32x4_t)x.quarter[0], (float32x4_t)x.quarter[1]),
                   bf16_half((float32x4_t)x.quarter[2], (float32x4_t)x.quarter[3]));
#else
    const vu u = (vu)f;
    const vu rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    const vi nan = vu_above(u & 0x7fffffffu, 0x7f800000u);
    return __builtin_convertvector(vu_select(nan, (u >> 16) | 0x40u, rounded), vh);
#endif
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
    const vh_split x = {h};
    const float16x8_t low = (float16x8_t)x.half[0], high = (float16x8_t)x.half[1];
    f = vf_join((const vf_part[]){(vf_part)vcvt_f32_f16(vget_low_f16(low)), (vf_part)vcvt_high_f32_f16(low),
                                  (vf_part)vcvt_f32_f16(vget_low_f16(high)), (vf_part)vcvt_high_f32_f16(high)});
#else /* exponents are rebiased by a multiplication, exact for subnormals too; then infinity and NaN are put         \
         back */
    const vu u = __builtin_convertvector(h, vu), magnitude = (u & 0x7fffu) << 13;
    const vu finite = (vu)((vf)magnitude * 0x1p112f);
    const vi special = vu_above(magnitude, 0x0f7fffffu);
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
    const vf_split x = {f};
    uint16x8_t h[2];
    for (int i = 0; i < 2; i++)
        h[i] = (uint16x8_t)vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)x.quarter[2 * i]),
                                             (float32x4_t)x.quarter[2 * i + 1]);
    return vh_join(h[0], h[1]);
#else /* normal: round the bits; subnormal: adding 0.5 leaves units of 2^-24 in the last place */
    const vu u = (vu)f, magnitude = u & 0x7fffffffu;
    const vu normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1) - 0x38000000u) >> 13;
    const vu small = (vu)((vf)magnitude + 0.5f) - 0x3f000000u;
    vu h = vu_select(vu_above(magnitude, 0x387fffffu), normal, small);
    h = vu_select(vu_above(magnitude, 0x477fefffu), (vu){0} + 0x7c00u, h);
    h = vu_select(vu_above(magnitude, 0x7f800000u), (vu){0} + 0x7e00u, h);
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
        const vf_split x = {f};
        for (int p = 0; p < VF_PARTS; p++)
            *(vf_loose *)((float *)row + i + p * (LANES / VF_PARTS)) = x.part[p];
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
/* Stores that do not fill the cache, of 32 bytes on a multiple of 32. */
INLINE void row_stream_part(char *to, const vf_quarter *q)
{
#if defined(__AVX__)
    _mm256_stream_ps((float *)(void *)to, _mm256_set_m128((__m128)q[1], (__m128)q[0]));
#elif defined(__x86_64__)
    _mm_stream_ps((float *)(void *)to, (__m128)q[0]);
    _mm_stream_ps((float *)(void *)to + 4, (__m128)q[1]);
#elif defined(__aarch64__)
    __asm__ volatile("stnp %q1, %q2, [%0]" : : "r"(to), "w"(q[0]), "w"(q[1]) : "memory");
#else
    memcpy(to, q, 32);
#endif
}
INLINE void row_stream(void *row, int dtype, int64_t i, vf f)
{
    if (dtype == ADZE_F32) {
        const vf_split x = {f};
        row_stream_part((char *)((float *)row + i), x.quarter);
        row_stream_part((char *)((float *)row + i + LANES / 2), x.quarter + 2);
        return;
    }
    const union {
        vh v;
        vf_quarter quarter[2];
    } h = {dtype == ADZE_BF16 ? f32_to_bf16(f) : f32_to_f16(f)};
    row_stream_part((char *)((uint16_t *)row + i), h.quarter);
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
