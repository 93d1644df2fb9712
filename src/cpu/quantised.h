/* quantised.h - weights of fewer bits as floats, thirty-two at a time. Each function is inlined with a constant kind:
   the dtype of the weights; ADZE_U8 stands for two of 4 bits in a byte. */
#ifndef ADZE_CPU_QUANTISED_H
#define ADZE_CPU_QUANTISED_H

#include "cpu/row32.h"

typedef struct scales { /* of a weight; scale[i / group_rows * row_stride + j / group] for row i and column j */
    const char *scale;
    const uint8_t *zero; /* NULL: 8 */
    int64_t group, group_rows, row_stride, zero_stride;
    int dtype;
} scales;
/* Those of a weight with k columns; group and group_rows as a call has them. */
static inline scales scales_of(const adze_tensor *scale, const adze_tensor *zero, int32_t group, int32_t group_rows,
                               int64_t k)
{
    return (scales){.scale = scale->data,
                    .zero = zero->dtype ? zero->data : NULL,
                    .group = group ? group : k + 1,
                    .group_rows = group_rows ? group_rows : 1,
                    .row_stride = scale->shape[0] == 1 && scale->rank == 1 ? 0 : scale->stride[0],
                    .zero_stride = zero->shape[0] == 1 && zero->rank == 1 ? 0 : zero->stride[0],
                    .dtype = scale->dtype};
}

/* The order of elements in which thirty-two of a kind are loaded, as that of row32.h for a dtype. */
INLINE int order_of(int kind)
{
    return kind == ADZE_U8 ? ADZE_BF16 : kind == ADZE_I8 || kind == ADZE_F8E4M3 ? ADZE_F32 : kind;
}
INLINE int is_quantised(int kind)
{
    return kind == ADZE_U8 || kind == ADZE_I8 || kind == ADZE_F8E4M3;
}
/* Whether quantised_numbers() leaves the scale to its caller. */
INLINE int is_scaled_later(int kind)
{
#if defined(__AVX512F__)
    return kind == ADZE_I8 || kind == ADZE_F8E4M3;
#else
    return is_quantised(kind);
#endif
}

INLINE float float_at(const void *data, int dtype, int64_t i)
{
    if (dtype == ADZE_F32)
        return ((const float *)data)[i];
    const uint16_t h = ((const uint16_t *)data)[i];
    if (dtype == ADZE_BF16) {
        const uint32_t bits = (uint32_t)h << 16;
        float f;
        memcpy(&f, &bits, sizeof f);
        return f;
    }
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    return row_load_one(&h, ADZE_F16, 0);
#endif
}

/* As many bytes as a vector has lanes. */
INLINE vi byte_lanes(const uint8_t *at, int is_signed)
{
#if defined(__AVX512F__)
    const __m128i b = _mm_loadu_si128((const __m128i *)(const void *)at);
    return (vi)(is_signed ? _mm512_cvtepi8_epi32(b) : _mm512_cvtepu8_epi32(b));
#elif defined(__AVX2__)
    const __m128i b = _mm_loadl_epi64((const __m128i *)(const void *)at);
    return (vi)(is_signed ? _mm256_cvtepi8_epi32(b) : _mm256_cvtepu8_epi32(b));
#else
    uint32_t word;
    memcpy(&word, at, sizeof word);
#    if defined(__x86_64__)
    const __m128i zero = _mm_setzero_si128(), b = _mm_unpacklo_epi8(zero, _mm_cvtsi32_si128((int)word));
    const __m128i high = _mm_unpacklo_epi16(zero, b); /* each byte is the highest of its lane */
    return (vi)(is_signed ? _mm_srai_epi32(high, 24) : _mm_srli_epi32(high, 24));
#    elif defined(__aarch64__)
    const uint8x8_t b = vcreate_u8(word);
    return is_signed ? (vi)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(b))))
                     : (vi)vmovl_u16(vget_low_u16(vmovl_u8(b)));
#    else
    vi v;
    for (int i = 0; i < 4; i++)
        v[i] = is_signed ? (int8_t)at[i] : at[i];
    return v;
#    endif
#endif
}
INLINE vf vf_of_ints(vi v)
{
    return __builtin_convertvector(v, vf);
}

/* A magnitude of 7 bits, moved to where floats have exponent and mantissa, is a number whose exponent is short of
   120. That makes (8 + m) / 8 * 2^-7 of a subnormal m, which is m * 2^-9: no float is subnormal here, as a host may
   flush those. 127 is a NaN. */
INLINE vf f8_floats(vi bytes)
{
    const vi magnitude = bytes & 127;
    const vf normal = (vf)((magnitude << 20) + (120 << 23));
    vf v = vf_select(magnitude < 8, (normal - 0x1p-7f) * 2, normal);
    v = vf_select(magnitude == 127, vf_all(NAN), v);
    return (vf)((vu)v | ((vu)bytes & 128u) << 24);
}

/* What makes numbers of stored ones: (q - zero) * scale, for one row in one group. */
typedef struct dequantise {
#if defined(__AVX512F__)
    vf table; /* of the 16 that 4 bits may be, with the scale in them */
#endif
    float zero, scale;
} dequantise;
/* `at` and `zero_at` are where the scale and the zero of the group are. */
INLINE dequantise dequantise_at(const scales *s, int kind, int64_t at, int64_t zero_at)
{
    dequantise d;
    d.scale = float_at(s->scale, s->dtype, at);
    d.zero = kind != ADZE_U8 ? 0 : s->zero ? (float)s->zero[zero_at] : 8;
#if defined(__AVX512F__)
    const vf each = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    d.table = (each - d.zero) * d.scale;
#endif
    return d;
}
INLINE dequantise dequantise_of(const scales *s, int kind, int64_t row, int64_t group)
{
    const int64_t at = row / s->group_rows;
    return dequantise_at(s, kind, at * s->row_stride + group, at * s->zero_stride + group);
}

/* The n <= 32 elements from i on, where n is less than 32 only at the end of a row. Most are yet to be multiplied by
   the scale (is_scaled_later). */
INLINE vf32 quantised_numbers(const char *row, int kind, int64_t i, int64_t n, const dequantise *d)
{
    const uint8_t *at = (const uint8_t *)row + (kind == ADZE_U8 ? i / 2 : i);
    uint8_t part[2 * LANES] = {0};
    if (n < 2 * LANES) {
        memcpy(part, at, (size_t)(kind == ADZE_U8 ? (n + 1) / 2 : n));
        at = part;
    }
    vf32 v;
    UNROLLED
    for (int p = 0; p < VF_PARTS && kind == ADZE_U8; p++) {
        const vi bytes = byte_lanes(at + p * VF_WIDTH, 0);
#if defined(__AVX512F__)
        v.part[2 * p] = (vf)_mm512_permutexvar_ps((__m512i)bytes, (__m512)d->table); /* by the lowest 4 bits */
        v.part[2 * p + 1] = (vf)_mm512_permutexvar_ps((__m512i)(bytes >> 4), (__m512)d->table);
#else
        v.part[2 * p] = vf_of_ints(bytes & 15) - d->zero;
        v.part[2 * p + 1] = vf_of_ints(bytes >> 4) - d->zero;
#endif
    }
    UNROLLED
    for (int p = 0; p < 2 * VF_PARTS && kind != ADZE_U8; p++) {
        const vi bytes = byte_lanes(at + p * VF_WIDTH, kind == ADZE_I8);
        v.part[p] = kind == ADZE_I8 ? vf_of_ints(bytes) : f8_floats(bytes);
    }
    return v;
}
INLINE vf32 quantised_load(const char *row, int kind, int64_t i, int64_t n, const dequantise *d)
{
    vf32 v = quantised_numbers(row, kind, i, n, d);
    const int parts = is_scaled_later(kind) ? 2 * VF_PARTS : 0;
    UNROLLED
    for (int p = 0; p < parts; p++)
        v.part[p] *= d->scale;
    return v;
}

#if defined(__AVX512F__)
/* n <= 16 scales, or zeros, as floats. */
INLINE vf some_scales(const scales *s, int64_t at, int64_t n)
{
    const __mmask16 first = (__mmask16)((1u << n) - 1);
    if (s->dtype == ADZE_F32)
        return (vf)_mm512_maskz_loadu_ps(first, (const float *)(const void *)s->scale + at);
    const __m256i half = _mm256_maskz_loadu_epi16(first, (const uint16_t *)(const void *)s->scale + at);
    return half_to_f32(s->dtype, (half16){half}).part[0];
}
INLINE vf some_zeros(const scales *s, int64_t at, int64_t n)
{
    if (!s->zero)
        return vf_all(8);
    const __m128i bytes = _mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1), s->zero + at);
    return vf_of_ints((vi)_mm512_cvtepu8_epi32(bytes));
}
#endif

#endif
