/* row.h - a row of any dtype as floats, sixteen at a time, in the target's own vectors. Each function is inlined
   with a constant dtype. */
#ifndef ADZE_CPU_ROW_H
#define ADZE_CPU_ROW_H

#include "kernel.h"

#include <math.h>
#include <string.h>
#if defined(__AVX__)
#    include <immintrin.h>
#elif defined(__x86_64__)
#    include <emmintrin.h>
#elif defined(__aarch64__)
#    include <arm_neon.h>
#endif

/* gcc keeps vectors longer than the target's in memory and compares them lane by lane. So arithmetic is written for
   a vf, one register, and rows are processed in vf16, several registers. */
#if defined(__AVX512F__)
#    define VF_PARTS 1
#elif defined(__AVX2__)
#    define VF_PARTS 2
#else
#    define VF_PARTS 4
#endif
enum { LANES = 16, VF_WIDTH = LANES / VF_PARTS };
/* The number of each lane of a register. */
#if VF_PARTS == 1
#    define VF_LANES 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#elif VF_PARTS == 2
#    define VF_LANES 0, 1, 2, 3, 4, 5, 6, 7
#else
#    define VF_LANES 0, 1, 2, 3
#endif
typedef float vf __attribute__((vector_size(64 / VF_PARTS)));
typedef int32_t vi __attribute__((vector_size(64 / VF_PARTS)));
typedef uint32_t vu __attribute__((vector_size(64 / VF_PARTS)));
typedef float vf_loose __attribute__((vector_size(64 / VF_PARTS), aligned(4), may_alias));
typedef struct vf16 { /* copied by parts: memcpy would force the struct into memory */
    vf part[VF_PARTS];
} vf16;
#define INLINE    static inline __attribute__((always_inline, unused))
#define NO_INLINE static __attribute__((noinline, unused))
/* Before a loop over the parts of a vector that gcc considers too long to unroll: a rolled loop would keep the parts
   in memory and serialise their dependency chains. */
#if defined(__GNUC__) && !defined(__clang__)
#    define UNROLLED _Pragma("GCC unroll 8")
#else
#    define UNROLLED
#endif

INLINE vf vf_all(float f)
{
    return f - (vf){0};
}
INLINE vf vf_select(vi mask, vf a, vf b)
{
    return (vf)(((vi)a & mask) | ((vi)b & ~mask));
}
INLINE vf vf_max(vf a, vf b) /* NaN may be lost */
{
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
    return (vf)_mm_max_ps((__m128)a, (__m128)b);
#elif defined(__aarch64__)
    return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
    return vf_select(a > b, a, b);
#endif
}
INLINE vf vf_minus_abs(vf a)
{
    return (vf)((vu)a | 0x80000000u);
}
/* -|a|, or -limit where that is more; of a NaN either may be left. */
INLINE vf vf_minus_abs_to(vf a, float limit)
{
#if defined(__AVX512DQ__)
    return (vf)_mm512_range_ps((__m512)a, (__m512)vf_all(limit), 14); /* the smaller size, with a minus */
#else
    return vf_max(vf_all(-limit), vf_minus_abs(a));
#endif
}
/* a where x has its sign bit set, elsewhere b. */
INLINE vf vf_by_sign(vf x, vf a, vf b)
{
#if defined(__AVX512DQ__)
    return (vf)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)x), (__m512)b, (__m512)a);
#elif defined(__AVX2__)
    return (vf)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)x);
#else
    return vf_select((vi)x < 0, a, b);
#endif
}
INLINE vf vf_fma(vf a, vf b, vf c) /* an FMA where the target has one */
{
    return a * b + c;
}

/* a / b to 2 units, for b from 1 to 2^60. With AVX-512 a division takes as long as eight multiplications; on a
   Neoverse-N1 it does not. */
INLINE vf vf_over(vf a, vf b)
{
#if defined(__AVX512F__)
    const vf r = (vf)_mm512_rcp14_ps((__m512)b);
    return a * vf_fma(vf_fma(-b, r, vf_all(1)), r, r);
#else
    return a / b;
#endif
}

INLINE vf16 vf16_all(float f)
{
    vf16 v;
    for (int p = 0; p < VF_PARTS; p++)
        v.part[p] = vf_all(f);
    return v;
}
INLINE vf16 vf16_sub(vf16 a, vf16 b)
{
    for (int p = 0; p < VF_PARTS; p++)
        a.part[p] -= b.part[p];
    return a;
}
INLINE vf16 vf16_minus(vf16 v, float f)
{
    return vf16_sub(v, vf16_all(f));
}
typedef float vf4 __attribute__((vector_size(16)));
INLINE float vf_sum(vf v) /* pairwise: halves are added until one lane is left */
{
#if defined(__AVX512F__)
    const __m256 high = (__m256)_mm512_extractf64x4_pd((__m512d)v, 1);
    const __m256 eight = _mm512_castps512_ps256((__m512)v) + high;
#elif defined(__AVX2__)
    const __m256 eight = (__m256)v;
#endif
#if defined(__AVX2__)
    const vf4 four = (vf4)(_mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1));
#else
    const vf4 four = (vf4)v;
#endif
    const vf4 two = four + __builtin_shufflevector(four, four, 2, 3, 2, 3);
    return two[0] + two[1];
}
INLINE float vf16_sum(vf16 v)
{
#if VF_PARTS == 4
    return vf_sum((v.part[0] + v.part[2]) + (v.part[1] + v.part[3]));
#elif VF_PARTS == 2
    return vf_sum(v.part[0] + v.part[1]);
#else
    return vf_sum(v.part[0]);
#endif
}
/* Lanes from n on become `rest`. */
INLINE vf16 vf16_cut(vf16 v, int64_t n, float rest)
{
    const vi lane = {VF_LANES};
    for (int p = 0; p < VF_PARTS; p++)
        v.part[p] = vf_select(lane < (int)n - p * VF_WIDTH, v.part[p], vf_all(rest));
    return v;
}
/* Each of the first or last eight lanes twice. */
INLINE vf16 vf16_twice(vf16 v, int last)
{
    float lane[LANES], twice[LANES];
    memcpy(lane, &v, sizeof lane);
    for (int i = 0; i < LANES; i++)
        twice[i] = lane[LANES / 2 * last + i / 2];
    memcpy(&v, twice, sizeof twice);
    return v;
}
/* A sum over a row, in 64 lanes: v or its square is added to one of four sets of sixteen. */
typedef struct vf_total {
    vf16 set[4];
} vf_total;
INLINE void vf_total_add(vf_total *t, int set, vf16 v, int square)
{
    for (int p = 0; p < VF_PARTS; p++)
        t->set[set].part[p] += square ? v.part[p] * v.part[p] : v.part[p];
}
INLINE float vf_total_sum(const vf_total *t)
{
    vf16 sum;
    for (int p = 0; p < VF_PARTS; p++)
        sum.part[p] = (t->set[0].part[p] + t->set[1].part[p]) + (t->set[2].part[p] + t->set[3].part[p]);
    return vf16_sum(sum);
}
INLINE float vf16_max_lane(vf16 v)
{
    vf most = v.part[0];
    for (int p = 1; p < VF_PARTS; p++)
        most = vf_max(v.part[p], most);
#if defined(__AVX512F__)
    const __m256 eight =
        _mm256_max_ps(_mm512_castps512_ps256((__m512)most), (__m256)_mm512_extractf64x4_pd((__m512d)most, 1));
#elif defined(__AVX2__)
    const __m256 eight = (__m256)most;
#endif
#if defined(__AVX2__)
    vf4 four = (vf4)_mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#else
    vf4 four = (vf4)most;
#endif
    for (int i = 1; i < 4; i++)
        four[0] = four[i] > four[0] ? four[i] : four[0];
    return four[0];
}

/* Four rows of four, from rows to columns. */
INLINE void turn4(const float *from, int64_t from_row, float *to, int64_t to_row)
{
    typedef float vf4_loose __attribute__((vector_size(16), aligned(4), may_alias));
    const vf4 a = *(const vf4_loose *)from, b = *(const vf4_loose *)(from + from_row);
    const vf4 c = *(const vf4_loose *)(from + 2 * from_row), d = *(const vf4_loose *)(from + 3 * from_row);
    const vf4 ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const vf4 cd0 = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd1 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    *(vf4_loose *)to = __builtin_shufflevector(ab0, cd0, 0, 1, 4, 5);
    *(vf4_loose *)(to + to_row) = __builtin_shufflevector(ab0, cd0, 2, 3, 6, 7);
    *(vf4_loose *)(to + 2 * to_row) = __builtin_shufflevector(ab1, cd1, 0, 1, 4, 5);
    *(vf4_loose *)(to + 3 * to_row) = __builtin_shufflevector(ab1, cd1, 2, 3, 6, 7);
}

/* ---- Sixteen elements of two bytes, and floats ---- */

#if defined(__AVX__)
typedef struct half16 {
    __m256i all;
} half16;
#else
typedef uint16_t half8 __attribute__((vector_size(16)));
typedef uint16_t half8_loose __attribute__((vector_size(16), aligned(2), may_alias));
typedef struct half16 {
    half8 part[2];
} half16;
#endif

#if !defined(__AVX__) && !defined(__aarch64__)
INLINE half8 half8_pack(vi low, vi high) /* of signed 16-bit integers */
{
#    if defined(__x86_64__)
    return (half8)_mm_packs_epi32((__m128i)low, (__m128i)high);
#    else
    half8 h;
    for (int i = 0; i < 8; i++)
        h[i] = (uint16_t)(i < 4 ? low : high)[i % 4];
    return h;
#    endif
}
#endif
INLINE vf16 bf16_to_f32(half16 h)
{
    vf16 f;
#if defined(__AVX512F__)
    f.part[0] = (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h.all), 16);
#elif defined(__AVX2__)
    f.part[0] = (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(h.all)), 16);
    f.part[1] = (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(h.all, 1)), 16);
#else
    const half8 zero = {0};
    for (int i = 0; i < 2; i++) {
        f.part[2 * i] = (vf)__builtin_shufflevector(zero, h.part[i], 0, 8, 1, 9, 2, 10, 3, 11);
        f.part[2 * i + 1] = (vf)__builtin_shufflevector(zero, h.part[i], 4, 12, 5, 13, 6, 14, 7, 15);
    }
#endif
    return f;
}

/* Rounds to nearest even by adding the last bit that stays, then 0x7fff. A NaN gets all bits set. */
#if defined(__aarch64__)
INLINE half8 bf16_half8(float32x4_t low, float32x4_t high)
{
    const uint32x4_t last = vdupq_n_u32(0x10000), half = vdupq_n_u32(0x7fff);
    const uint32x4_t a = vsubq_u32((uint32x4_t)low, vtstq_u32((uint32x4_t)low, last));
    const uint32x4_t b = vsubq_u32((uint32x4_t)high, vtstq_u32((uint32x4_t)high, last));
    const uint16x8_t rounded = vaddhn_high_u32(vaddhn_u32(a, half), b, half);
    const uint16x8_t number = vuzp1q_u16((uint16x8_t)vceqq_f32(low, low), (uint16x8_t)vceqq_f32(high, high));
    return (half8)vornq_u16(rounded, number);
}
#else
INLINE vi bf16_bits(vf f) /* as signed numbers */
{
    const vu u = (vu)f;
    return ((vi)(u + 0x7fffu + ((u >> 16) & 1)) >> 16) | (f != f);
}
#endif
INLINE half16 f32_to_bf16(vf16 f)
{
    half16 h;
#if defined(__aarch64__)
    for (int i = 0; i < 2; i++)
        h.part[i] = bf16_half8((float32x4_t)f.part[2 * i], (float32x4_t)f.part[2 * i + 1]);
#elif defined(__AVX512F__)
    h.all = _mm512_cvtepi32_epi16((__m512i)bf16_bits(f.part[0]));
#elif defined(__AVX2__)
    const __m256i packed = _mm256_packs_epi32((__m256i)bf16_bits(f.part[0]), (__m256i)bf16_bits(f.part[1]));
    h.all = _mm256_permute4x64_epi64(packed, 0xd8);
#else
    for (int i = 0; i < 2; i++)
        h.part[i] = half8_pack(bf16_bits(f.part[2 * i]), bf16_bits(f.part[2 * i + 1]));
#endif
    return h;
}

#if !defined(__AVX__) && !defined(__aarch64__)
/* Exponents are rebiased by a multiplication, exact for subnormals too; then infinity and NaN are put back. */
INLINE vf f16_wide(vu u)
{
    const vu magnitude = (u & 0x7fffu) << 13;
    const vu finite = (vu)((vf)magnitude * 0x1p112f);
    const vf special = (vf)(magnitude | 0x7f800000u);
    return (vf)((vu)vf_select((vi)magnitude > 0x0f7fffff, special, (vf)finite) | ((u & 0x8000u) << 16));
}
/* Normal: round the bits; subnormal: adding 0.5 leaves units of 2^-24 in the last place. */
INLINE vi f16_bits(vf f) /* as signed numbers */
{
    const vu u = (vu)f, magnitude = u & 0x7fffffffu;
    const vu normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1) - 0x38000000u) >> 13;
    const vu small = (vu)((vf)magnitude + 0.5f) - 0x3f000000u;
    vf h = vf_select((vi)magnitude > 0x387fffff, (vf)normal, (vf)small);
    h = vf_select((vi)magnitude > 0x477fefff, (vf)((vu){0} + 0x7c00u), h);
    h = vf_select((vi)magnitude > 0x7f800000, (vf)((vu){0} + 0x7e00u), h);
    return (vi)((vu)h << 16 | (u & 0x80000000u)) >> 16; // cppcheck-suppress shiftTooManyBitsSigned
}
#endif
INLINE vf16 f16_to_f32(half16 h)
{
    vf16 f;
#if defined(__AVX512F__)
    f.part[0] = (vf)_mm512_cvtph_ps(h.all);
#elif defined(__AVX2__)
    f.part[0] = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(h.all));
    f.part[1] = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(h.all, 1));
#elif defined(__aarch64__)
    for (int i = 0; i < 2; i++) {
        f.part[2 * i] = (vf)vcvt_f32_f16(vget_low_f16((float16x8_t)h.part[i]));
        f.part[2 * i + 1] = (vf)vcvt_high_f32_f16((float16x8_t)h.part[i]);
    }
#else
    const half8 zero = {0};
    for (int i = 0; i < 2; i++) {
        f.part[2 * i] = f16_wide((vu)__builtin_shufflevector(h.part[i], zero, 0, 8, 1, 9, 2, 10, 3, 11));
        f.part[2 * i + 1] = f16_wide((vu)__builtin_shufflevector(h.part[i], zero, 4, 12, 5, 13, 6, 14, 7, 15));
    }
#endif
    return f;
}
INLINE half16 f32_to_f16(vf16 f)
{
    half16 h;
#if defined(__AVX512F__)
    h.all = _mm512_cvtps_ph((__m512)f.part[0], _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
    h.all = _mm256_set_m128i(_mm256_cvtps_ph((__m256)f.part[1], _MM_FROUND_TO_NEAREST_INT),
                             _mm256_cvtps_ph((__m256)f.part[0], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    for (int i = 0; i < 2; i++)
        h.part[i] =
            (half8)vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)f.part[2 * i]), (float32x4_t)f.part[2 * i + 1]);
#else
    for (int i = 0; i < 2; i++)
        h.part[i] = half8_pack(f16_bits(f.part[2 * i]), f16_bits(f.part[2 * i + 1]));
#endif
    return h;
}
INLINE half16 f32_to_half(int dtype, vf16 f)
{
    return dtype == ADZE_BF16 ? f32_to_bf16(f) : f32_to_f16(f);
}
INLINE vf16 half_to_f32(int dtype, half16 h)
{
    return dtype == ADZE_BF16 ? bf16_to_f32(h) : f16_to_f32(h);
}

/* ---- Sixteen elements from index i of a row ---- */

INLINE vf16 row_load(const void *row, int dtype, int64_t i)
{
    vf16 f;
    half16 h;
    if (dtype == ADZE_F32) {
        for (int p = 0; p < VF_PARTS; p++)
            f.part[p] = *(const vf_loose *)((const float *)row + i + p * VF_WIDTH);
        return f;
    }
#if defined(__AVX__)
    h.all = _mm256_loadu_si256((const __m256i *)(const void *)((const uint16_t *)row + i));
#else
    for (int p = 0; p < 2; p++)
        h.part[p] = *(const half8_loose *)((const uint16_t *)row + i + 8 * p);
#endif
    return half_to_f32(dtype, h);
}
#if defined(__AVX2__) && !defined(__AVX512BW__)
/* A mask of the first n words; n <= 0: of none, n >= 8: of all. */
INLINE __m256i first_words(int64_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(VF_LANES));
}
/* The first n <= 16 elements of two bytes, and zeros. An odd one at the end has half a word. */
INLINE __m256i load_first(const uint16_t *row, int64_t n)
{
    const __m256i pairs = _mm256_maskload_epi32((const int *)(const void *)row, first_words(n / 2));
    if (n % 2 == 0)
        return pairs;
    return _mm256_or_si256(pairs, _mm256_and_si256(_mm256_set1_epi32(row[n - 1]),
                                                   _mm256_xor_si256(first_words(n / 2), first_words(n / 2 + 1))));
}
INLINE void store_first(uint16_t *row, __m256i v, int64_t n)
{
    _mm256_maskstore_epi32((int *)(void *)row, first_words(n / 2), v);
    if (n % 2) {
        uint16_t all[16];
        _mm256_storeu_si256((__m256i *)(void *)all, v);
        row[n - 1] = all[n - 1];
    }
}
#endif
/* The n <= 16 last elements; the other lanes are zero. */
INLINE vf16 row_load_part(const void *row, int dtype, int64_t i, int64_t n)
{
    if (n == LANES)
        return row_load(row, dtype, i);
    const char *at = (const char *)row + i * adze_float_size(dtype);
#if defined(__AVX512BW__)
    const __mmask16 first = (__mmask16)((1u << n) - 1);
    if (dtype == ADZE_F32)
        return (vf16){{(vf)_mm512_maskz_loadu_ps(first, at)}};
    return half_to_f32(dtype, (half16){_mm256_maskz_loadu_epi16(first, at)});
#elif defined(__AVX2__)
    vf16 v;
    for (int p = 0; p < VF_PARTS && dtype == ADZE_F32; p++)
        v.part[p] =
            (vf)_mm256_maskload_ps((const float *)(const void *)at + p * VF_WIDTH, first_words(n - p * VF_WIDTH));
    return dtype == ADZE_F32 ? v : half_to_f32(dtype, (half16){load_first((const uint16_t *)(const void *)at, n)});
#else
    char part[64] = {0};
    memcpy(part, at, (size_t)(n * adze_float_size(dtype)));
    return row_load(part, dtype, 0);
#endif
}
INLINE float row_load_one(const void *row, int dtype, int64_t i)
{
    return row_load_part(row, dtype, i, 1).part[0][0];
}
INLINE void row_store(void *row, int dtype, int64_t i, vf16 f)
{
    if (dtype == ADZE_F32) {
        for (int p = 0; p < VF_PARTS; p++)
            *(vf_loose *)((float *)row + i + p * VF_WIDTH) = f.part[p];
        return;
    }
    const half16 h = f32_to_half(dtype, f);
#if defined(__AVX__)
    _mm256_storeu_si256((__m256i *)(void *)((uint16_t *)row + i), h.all);
#else
    for (int p = 0; p < 2; p++)
        *(half8_loose *)((uint16_t *)row + i + 8 * p) = h.part[p];
#endif
}
/* Streaming stores, which bypass the cache; addresses are multiples of 32. */
INLINE void row_stream(void *row, int dtype, int64_t i, vf16 f)
{
#if defined(__AVX512F__)
    if (dtype == ADZE_F32) {
        const __m512 all = (__m512)f.part[0];
        _mm256_stream_ps((float *)row + i, _mm512_castps512_ps256(all));
        _mm256_stream_pd((double *)(void *)((float *)row + i + 8), _mm512_extractf64x4_pd((__m512d)all, 1));
        return;
    }
    _mm256_stream_si256((__m256i *)(void *)((uint16_t *)row + i), f32_to_half(dtype, f).all);
#elif defined(__AVX2__)
    for (int p = 0; p < 2 && dtype == ADZE_F32; p++)
        _mm256_stream_ps((float *)row + i + 8 * p, (__m256)f.part[p]);
    if (dtype != ADZE_F32)
        _mm256_stream_si256((__m256i *)(void *)((uint16_t *)row + i), f32_to_half(dtype, f).all);
#elif defined(__x86_64__)
    for (int p = 0; p < 4 && dtype == ADZE_F32; p++)
        _mm_stream_ps((float *)row + i + 4 * p, (__m128)f.part[p]);
    for (int p = 0; p < 2 && dtype != ADZE_F32; p++)
        _mm_stream_si128((__m128i *)(void *)((uint16_t *)row + i + 8 * p), (__m128i)f32_to_half(dtype, f).part[p]);
#elif defined(__aarch64__)
    if (dtype == ADZE_F32) {
        __asm__ volatile("stnp %q1, %q2, [%0]\n\tstnp %q3, %q4, [%0, #32]"
                         :
                         : "r"((float *)row + i), "w"(f.part[0]), "w"(f.part[1]), "w"(f.part[2]), "w"(f.part[3])
                         : "memory");
        return;
    }
    const half16 h = f32_to_half(dtype, f);
    __asm__ volatile("stnp %q1, %q2, [%0]" : : "r"((uint16_t *)row + i), "w"(h.part[0]), "w"(h.part[1]) : "memory");
#else
    row_store(row, dtype, i, f);
#endif
}
/* After streaming stores, before another thread may read them. */
INLINE void row_stream_end(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
/* The n <= 16 last elements; a whole sixteen may be streamed. */
INLINE void row_store_part(void *row, int dtype, int64_t i, vf16 f, int64_t n, int stream)
{
    if (n == LANES && stream) {
        row_stream(row, dtype, i, f);
        return;
    }
    if (n == LANES) {
        row_store(row, dtype, i, f);
        return;
    }
    char *at = (char *)row + i * adze_float_size(dtype);
#if defined(__AVX512BW__)
    const __mmask16 first = (__mmask16)((1u << n) - 1);
    if (dtype == ADZE_F32)
        _mm512_mask_storeu_ps(at, first, (__m512)f.part[0]);
    else
        _mm256_mask_storeu_epi16(at, first, f32_to_half(dtype, f).all);
#elif defined(__AVX2__)
    for (int p = 0; p < VF_PARTS && dtype == ADZE_F32; p++)
        _mm256_maskstore_ps((float *)(void *)at + p * VF_WIDTH, first_words(n - p * VF_WIDTH), (__m256)f.part[p]);
    if (dtype != ADZE_F32)
        store_first((uint16_t *)(void *)at, f32_to_half(dtype, f).all, n);
#else
    char part[64];
    row_store(part, dtype, 0, f);
    memcpy(at, part, (size_t)(n * adze_float_size(dtype)));
#endif
}
/* f rounded to the dtype and back. */
INLINE vf16 row_round(int dtype, vf16 f)
{
    return dtype == ADZE_F32 ? f : half_to_f32(dtype, f32_to_half(dtype, f));
}

/* An output larger than the cache, whose rows are aligned to so many bytes, is written with streaming stores. */
INLINE int row_streams_on(size_t bytes, const adze_tensor *out, int64_t count)
{
    const size_t size = adze_float_size(out->dtype);
    int streams = (size_t)count * size > adze_cpu_cache() && (uintptr_t)out->data % bytes == 0;
    for (int d = 0; d < out->rank - 1; d++)
        streams = streams && (size_t)out->stride[d] * size % bytes == 0;
    return streams;
}
INLINE int row_streams(const adze_tensor *out, int64_t count) /* in sixteens */
{
    return row_streams_on(32, out, count);
}

/* Rows per piece of parallel work, enough to pay for waking a thread. */
INLINE int64_t row_grain(int64_t dim)
{
    return 16384 / (dim + 1) + 1;
}

#endif
