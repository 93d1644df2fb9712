/* row32.h - a row of any dtype as floats, thirty-two at a time, in an order that depends on the dtype: for
   elementwise work between tensors of one dtype. A word of two bf16 elements is unpacked with a shift and a mask and
   packed the same way, without any shuffle. */
#ifndef ADZE_CPU_ROW32_H
#define ADZE_CPU_ROW32_H

#include "cpu/row.h"

typedef struct vf32 {
    vf part[2 * VF_PARTS];
} vf32;
typedef uint32_t vu_loose __attribute__((vector_size(64 / VF_PARTS), aligned(2), may_alias));

/* A register of pairs of bf16 as floats: even elements, then odd ones. */
INLINE void pairs_to_f32(vf *to, vu pairs)
{
    to[0] = (vf)(pairs << 16);
    to[1] = (vf)(pairs & 0xffff0000u);
}
/* The bits of f, rounded to bf16 in the upper half; the lower half is undefined. A NaN must have a zero lower half,
   as those converted from bf16 do. */
INLINE vu bf16_upper(vf f)
{
    const vu u = (vu)f;
#if defined(__AVX512F__)
    const __mmask16 odd = _mm512_test_epi32_mask((__m512i)u, _mm512_set1_epi32(0x10000));
    return (vu)_mm512_mask_add_epi32((__m512i)(u + 0x7fffu), odd, (__m512i)u, _mm512_set1_epi32(0x8000));
#elif defined(__aarch64__)
    return u + 0x7fffu - (vu)vtstq_u32((uint32x4_t)u, vdupq_n_u32(0x10000));
#else
    return u + 0x7fffu + ((u >> 16) & 1);
#endif
}
INLINE vu bf16_pair(vf even, vf odd)
{
#if defined(__aarch64__) /* eight at once: rounds up when the lower half, with the last bit that stays, is above     \
                            0x8000 */
    const uint16x8_t kept = vtrn2q_u16((uint16x8_t)even, (uint16x8_t)odd);
    const uint16x8_t lower = vtrn1q_u16((uint16x8_t)even, (uint16x8_t)odd);
    const uint16x8_t sticky = vorrq_u16(lower, vandq_u16(kept, vdupq_n_u16(1)));
    return (vu)vsubq_u16(kept, vcgtq_u16(sticky, vdupq_n_u16(0x8000)));
#else
    const vu low = bf16_upper(even), high = bf16_upper(odd);
#    if defined(__AVX512BW__)
    return (vu)_mm512_mask_blend_epi16(0xaaaaaaaau, (__m512i)(low >> 16), (__m512i)high);
#    elif defined(__AVX2__)
    return (vu)_mm256_blend_epi16((__m256i)(low >> 16), (__m256i)high, 0xaa);
#    else
    return low >> 16 | (high & 0xffff0000u);
#    endif
#endif
}
INLINE vf32 row_load32(const void *row, int dtype, int64_t i)
{
    vf32 f;
    for (int p = 0; p < VF_PARTS && dtype == ADZE_BF16; p++)
        pairs_to_f32(&f.part[2 * p], *(const vu_loose *)((const uint16_t *)row + i + 2 * p * VF_WIDTH));
    for (int k = 0; k < 2 && dtype != ADZE_BF16; k++) {
        const vf16 half = row_load(row, dtype, i + k * LANES);
        for (int p = 0; p < VF_PARTS; p++)
            f.part[k * VF_PARTS + p] = half.part[p];
    }
    return f;
}
/* A streaming store of one cache line. */
INLINE void row_stream_line(void *at, vf16 line)
{
#if defined(__AVX512F__)
    _mm512_stream_ps(at, (__m512)line.part[0]);
#else
    row_stream(at, ADZE_F32, 0, line);
#endif
}
/* A streamed row begins at a cache line, and i is a multiple of 32. */
INLINE void row_store32(void *row, int dtype, int64_t i, vf32 f, int stream)
{
    if (dtype == ADZE_BF16) {
        vf16 line;
        for (int p = 0; p < VF_PARTS; p++)
            line.part[p] = (vf)bf16_pair(f.part[2 * p], f.part[2 * p + 1]);
        if (stream)
            row_stream_line((uint16_t *)row + i, line);
        for (int p = 0; p < VF_PARTS && !stream; p++)
            *(vu_loose *)((uint16_t *)row + i + 2 * p * VF_WIDTH) = (vu)line.part[p];
        return;
    }
    for (int k = 0; k < 2; k++) {
        vf16 half;
        for (int p = 0; p < VF_PARTS; p++)
            half.part[p] = f.part[k * VF_PARTS + p];
        if (stream && dtype == ADZE_F32)
            row_stream_line((float *)row + i + k * LANES, half);
        else
            row_store_part(row, dtype, i + k * LANES, half, LANES, stream);
    }
}
/* Prefetches 32 elements. */
INLINE void row_prefetch(const char *row, int dtype, int64_t i)
{
    const char *at = row + i * adze_float_size(dtype);
    __builtin_prefetch(at);
    if (dtype == ADZE_F32)
        __builtin_prefetch(at + 64);
}
/* Of n elements, those that are among sixteen from `first` on. */
INLINE int64_t lanes_from(int64_t n, int64_t first)
{
    return n <= first ? 0 : n - first < LANES ? n - first : LANES;
}
/* The n <= 32 last elements; the other lanes are zero. */
INLINE vf32 row_load32_part(const void *row, int dtype, int64_t i, int64_t n)
{
    if (n == 2 * LANES)
        return row_load32(row, dtype, i);
#if defined(__AVX2__)
    vf32 f;
#    if defined(__AVX512BW__)
    if (dtype == ADZE_BF16)
        pairs_to_f32(f.part, (vu)_mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), (const uint16_t *)row + i));
#    else
    for (int p = 0; p < VF_PARTS && dtype == ADZE_BF16; p++)
        pairs_to_f32(&f.part[2 * p], (vu)load_first((const uint16_t *)row + i + p * LANES, lanes_from(n, p * LANES)));
#    endif
    for (int k = 0; k < 2 && dtype != ADZE_BF16; k++) {
        const vf16 half = row_load_part(row, dtype, i + k * LANES, lanes_from(n, k * LANES));
        for (int p = 0; p < VF_PARTS; p++)
            f.part[k * VF_PARTS + p] = half.part[p];
    }
    return f;
#else
    const size_t size = adze_float_size(dtype);
    char part[128] = {0};
    memcpy(part, (const char *)row + (size_t)i * size, (size_t)n * size);
    return row_load32(part, dtype, 0);
#endif
}
INLINE void row_store32_part(void *row, int dtype, int64_t i, vf32 f, int64_t n, int stream)
{
    if (n == 2 * LANES) {
        row_store32(row, dtype, i, f, stream);
        return;
    }
#if defined(__AVX2__)
#    if defined(__AVX512BW__)
    if (dtype == ADZE_BF16)
        _mm512_mask_storeu_epi16((uint16_t *)row + i, (__mmask32)((1ull << n) - 1),
                                 (__m512i)bf16_pair(f.part[0], f.part[1]));
#    else
    for (int p = 0; p < VF_PARTS && dtype == ADZE_BF16; p++)
        store_first((uint16_t *)row + i + p * LANES, (__m256i)bf16_pair(f.part[2 * p], f.part[2 * p + 1]),
                    lanes_from(n, p * LANES));
#    endif
    for (int k = 0; k < 2 && dtype != ADZE_BF16; k++) {
        vf16 half;
        for (int p = 0; p < VF_PARTS; p++)
            half.part[p] = f.part[k * VF_PARTS + p];
        row_store_part(row, dtype, i + k * LANES, half, lanes_from(n, k * LANES), 0);
    }
#else
    const size_t size = adze_float_size(dtype);
    char part[128];
    row_store32(part, dtype, 0, f, 0);
    memcpy((char *)row + (size_t)i * size, part, (size_t)n * size);
#endif
}
/* f rounded to the dtype and back. */
INLINE vf32 row_round32(int dtype, vf32 f)
{
    for (int p = 0; p < 2 * VF_PARTS && dtype == ADZE_BF16; p++)
        f.part[p] = (vf)(bf16_upper(f.part[p]) & 0xffff0000u);
    for (int k = 0; k < 2 && dtype == ADZE_F16; k++) {
        vf16 half;
        for (int p = 0; p < VF_PARTS; p++)
            half.part[p] = f.part[k * VF_PARTS + p];
        half = row_round(dtype, half);
        for (int p = 0; p < VF_PARTS; p++)
            f.part[k * VF_PARTS + p] = half.part[p];
    }
    return f;
}

/* Lanes in the order of one dtype, from that of another. */
#if VF_PARTS == 1
#    define VF_EVEN      0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#    define VF_ODD       1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#    define VF_ZIP_FIRST 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#    define VF_ZIP_LAST  8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif VF_PARTS == 2
#    define VF_EVEN      0, 2, 4, 6, 8, 10, 12, 14
#    define VF_ODD       1, 3, 5, 7, 9, 11, 13, 15
#    define VF_ZIP_FIRST 0, 8, 1, 9, 2, 10, 3, 11
#    define VF_ZIP_LAST  4, 12, 5, 13, 6, 14, 7, 15
#else
#    define VF_EVEN      0, 2, 4, 6
#    define VF_ODD       1, 3, 5, 7
#    define VF_ZIP_FIRST 0, 4, 1, 5
#    define VF_ZIP_LAST  2, 6, 3, 7
#endif
INLINE vf32 vf32_order(vf32 v, int from, int to)
{
    for (int p = 0; p < 2 * VF_PARTS; p += 2) {
        const vf a = v.part[p], b = v.part[p + 1];
        if (to == ADZE_BF16 && from != ADZE_BF16) {
            v.part[p] = __builtin_shufflevector(a, b, VF_EVEN);
            v.part[p + 1] = __builtin_shufflevector(a, b, VF_ODD);
        }
        if (to != ADZE_BF16 && from == ADZE_BF16) {
            v.part[p] = __builtin_shufflevector(a, b, VF_ZIP_FIRST);
            v.part[p + 1] = __builtin_shufflevector(a, b, VF_ZIP_LAST);
        }
    }
    return v;
}
/* f in the lanes of the first n elements, elsewhere zero. */
INLINE vf32 vf32_first(int dtype, float f, int64_t n)
{
    vf32 v;
    for (int p = 0; p < 2 * VF_PARTS; p++) {
        const vi lane = {VF_LANES};
        const vi element = dtype == ADZE_BF16 ? 2 * lane + p / 2 * 2 * VF_WIDTH + p % 2 : lane + p * VF_WIDTH;
        v.part[p] = vf_select(element < (int)n, vf_all(f), vf_all(0));
    }
    return v;
}

/* To the first or the second half of the sets. */
INLINE void vf_total_add32(vf_total *t, int half, vf32 v, int square)
{
    for (int p = 0; p < 2 * VF_PARTS; p++)
        t->set[2 * half + p / VF_PARTS].part[p % VF_PARTS] += square ? v.part[p] * v.part[p] : v.part[p];
}
INLINE int row_streams32(const adze_tensor *out, int64_t count)
{
    return row_streams_on(64, out, count);
}

#endif
