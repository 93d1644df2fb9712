/* act.h - exp and the activations, one vector register at a time. Accuracies are in float units, 2^-23 relative. */
#ifndef ADZE_CPU_ACT_H
#define ADZE_CPU_ACT_H

#include "cpu/row.h"

/* The addend of vf_fma, a constant. NEON's instruction overwrites its addend: a register copy would take as long as
   a multiplication, while a load does not use the multiply pipes. So it is loaded each time, which volatile
   enforces. */
#if defined(__aarch64__)
#    define VF_ADDEND(f)                                                                                             \
        __extension__({                                                                                              \
            static const float addend_[4] __attribute__((aligned(16))) = {(f), (f), (f), (f)};                       \
            *(const volatile vf *)(const volatile void *)addend_;                                                    \
        })
#else
#    define VF_ADDEND(f) vf_all(f)
#endif

/* x / ln 2 rounded to an integer n, as BIAS + n: a float whose low bits are n + 191. */
#define EXP_BIAS (0x1.8p23f + 191)
INLINE vf exp_whole(vf x)
{
    return vf_fma(x, vf_all(0x1.715476p+0f), VF_ADDEND(EXP_BIAS));
}
/* x - n ln 2; the product with the high part of ln 2 is exact. */
INLINE vf exp_rest(vf x, vf whole)
{
    const vf n = whole - EXP_BIAS;
    return x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;
}
/* e^(unit r), for |unit r| <= 0.35 and 1 or -0.5 as unit, to 0.8 units. */
#define EXP_ADDEND(unit, of_one, of_half) ((unit) == 1 ? VF_ADDEND(of_one) : VF_ADDEND(of_half))
INLINE vf exp_power(vf r, float unit)
{
    const float first = unit == 1 ? 0x1.0fa7d8p-7f : -0x1.0fa7d8p-12f;
    vf power = vf_fma(r, vf_all(first), EXP_ADDEND(unit, 0x1.573adp-5f, 0x1.573adp-9f));
    power = vf_fma(power, r, EXP_ADDEND(unit, 0x1.555a6ep-3f, -0x1.555a6ep-6f));
    power = vf_fma(power, r, EXP_ADDEND(unit, 0x1.fffdc4p-2f, 0x1.fffdc4p-4f));
    power = vf_fma(power, r, EXP_ADDEND(unit, 0x1.fffff6p-1f, -0x1.fffff6p-2f));
    return vf_fma(power, r, VF_ADDEND(1.0f));
}
/* 2^n e^(unit r) over EXP_UNIT, for n from -151 to 63. The power of two is 2^(n + 64), an exponent of n + 191: with
   2^-64 in a later factor, results below 2^-126 are rounded and not lost. */
#if defined(__AVX512F__)
#    define EXP_UNIT 1.0f
#else
#    define EXP_UNIT 0x1p-64f
#endif
INLINE vf exp_parts(vf whole, vf r, float unit)
{
    const vf power = exp_power(r, unit);
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)power, (__m512)(whole - EXP_BIAS));
#else
    return power * (vf)((vu)whole << 23);
#endif
}
/* e^x for x from -104 to 44, to 2 units. */
INLINE vf exp_within(vf x)
{
    const vf whole = exp_whole(x);
    return exp_parts(whole, exp_rest(x, whole), 1) * EXP_UNIT;
}
/* e^x for x <= 44, to 2 units. It is zero where x <= -104, as of hidden elements: an x86 takes as long as a hundred
   multiplications to round a smaller number to zero. */
INLINE vf vf_exp(vf x)
{
#if defined(__AVX512F__)
    const __mmask16 above = _mm512_cmp_ps_mask((__m512)x, (__m512)vf_all(-104), _CMP_NLE_UQ);
    const vf whole = exp_whole(x), power = exp_power(exp_rest(x, whole), 1);
    return (vf)_mm512_maskz_scalef_ps(above, (__m512)power, (__m512)(whole - EXP_BIAS));
#elif defined(__x86_64__)
    const vf whole = exp_whole(x), y = exp_parts(whole, exp_rest(x, whole), 1);
    return (vf)((vi)y & ~(x <= vf_all(-104))) * EXP_UNIT;
#else
    return exp_within(vf_max(vf_all(-104), x)); /* in this order NaN stays */
#endif
}

/* x sigmoid(z) for a z of x's sign, with no cancellation and no overflow: e = exp(-|z|) is at most 1. */
INLINE vf act_times_sigmoid(vf x, vf z)
{
    const vf e = exp_within(vf_minus_abs_to(z, 104));
    return vf_over(vf_by_sign(x, x * e, x), 1 + e);
}
/* a b + c, rounded once where the target has FMA. */
#if defined(__AVX2__) || defined(__aarch64__)
#    define VF_FUSES 1
INLINE vf vf_fused(vf a, vf b, vf c)
{
#    if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#    elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#    else
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#    endif
}
#else
#    define VF_FUSES 0
#endif
/* The normal CDF at m <= 0: exp(-m^2 / 2) times a polynomial in (3 + m) / (3 - m) over 3 - m, good to 3 units. -m^2
   / 2 is n ln 2 - r / 2. */
INLINE vf normal_tail(vf m)
{
    const vf whole = vf_fma(m * m, vf_all(-0x1.715476p-1f), VF_ADDEND(EXP_BIAS)), n = whole - EXP_BIAS;
#if VF_FUSES
    const vf rough = vf_fused(m, m, n * 0x1.62e4p+0f);
#else /* m^2 in two parts, the first of them exact */
    const vf high = (vf)(((vu)m + 0x800u) & 0xfffff000u);
    const vf rough = high * high + n * 0x1.62e4p+0f + (m - high) * (m + high);
#endif
    const vf e = exp_parts(whole, vf_fma(n, vf_all(0x1.7f7d1cp-19f), rough), -0.5f) * EXP_UNIT;
    const vf w = vf_over(vf_all(1), 3 - m), t = 1 - 6 * w;
    vf g = vf_fma(t, vf_all(-0x1.15bb5ap-12f), VF_ADDEND(-0x1.d81ad4p-11f));
    g = vf_fma(g, t, VF_ADDEND(0x1.19e984p-10f));
    g = vf_fma(g, t, VF_ADDEND(0x1.c5a324p-8f));
    g = vf_fma(g, t, VF_ADDEND(-0x1.5768d8p-7f));
    g = vf_fma(g, t, VF_ADDEND(-0x1.831e6p-5f));
    g = vf_fma(g, t, VF_ADDEND(0x1.d71466p-3f));
    g = vf_fma(g, t, VF_ADDEND(-0x1.04c734p-1f));
    g = vf_fma(g, t, VF_ADDEND(0x1.754a74p-1f));
    return g * w * e;
}
/* The normal CDF at an m of at most 12 bits, whose square is exact in float. r uses 0x1.62e43cp+0 instead of 2 ln 2;
   upper / lower compensates for it and is off by 1.7 units. */
INLINE vf normal_tail_of_short(vf m)
{
    const vf square = m * m;
    const vf whole = vf_fma(square, vf_all(-0x1.715476p-1f), VF_ADDEND(EXP_BIAS)), n = whole - EXP_BIAS;
#if VF_FUSES
    const vf r = vf_fused(n, vf_all(0x1.62e43cp+0f), square);
#else
    const vf r = square + n * 0x1.62e4p+0f + n * 0x1.ep-19f;
#endif
    vf upper = vf_fma(m, vf_all(EXP_UNIT * -0x1.985442p-2f), VF_ADDEND(EXP_UNIT * 0x1.7a4d7p+1f));
    upper = vf_fma(upper, m, VF_ADDEND(EXP_UNIT * -0x1.289958p+3f));
    upper = vf_fma(upper, m, VF_ADDEND(EXP_UNIT * 0x1.aea808p+3f));
    vf lower = m - 0x1.d9628p+2f;
    lower = vf_fma(lower, m, VF_ADDEND(0x1.8615f6p+4f));
    lower = vf_fma(lower, m, VF_ADDEND(-0x1.401b02p+5f));
    lower = vf_fma(lower, m, VF_ADDEND(0x1.aea808p+4f));
    return vf_over(upper * exp_parts(whole, r, -0.5f), lower);
}
/* x times the normal CDF at x: x tail, or x (1 - tail) where x is not negative. */
INLINE vf act_gelu(vf x, int is_short)
{
    const vf m = vf_minus_abs_to(x, 14.25f), tail = is_short ? normal_tail_of_short(m) : normal_tail(m);
#if defined(__AVX512F__)
    const __mmask16 plus = _mm512_cmpge_epi32_mask((__m512i)x, _mm512_setzero_si512());
    return x * (vf)_mm512_mask_sub_ps((__m512)tail, plus, (__m512)vf_all(1), (__m512)tail);
#else /* -|x| times tail, or times tail - 1: this saves a select */
    return vf_minus_abs(x) * (tail - (vf)((((vu)x >> 31) - 1u) & (vu)vf_all(1)));
#endif
}
INLINE vf act_relu(vf x)
{
    return vf_max(vf_all(0), x); /* in this order NaN stays */
}

/* act(x), inlined with a constant act. is_short: x has at most 12 bits, as f16 and bf16 elements have. */
INLINE vf vf_act_of(int act, vf x, int is_short)
{
    switch (act) {
    case ADZE_ACT_SILU: return act_times_sigmoid(x, x);
    case ADZE_ACT_GELU: return act_gelu(x, is_short);
    case ADZE_ACT_GELU_TANH: return act_times_sigmoid(x, x * (0x1.988454p+0f + 0x1.2444f2p-4f * (x * x)));
    case ADZE_ACT_GELU_QUICK: return act_times_sigmoid(x, 1.702f * x);
    case ADZE_ACT_RELU: return act_relu(x);
    case ADZE_ACT_RELU2: return act_relu(x) * act_relu(x);
    case ADZE_ACT_SIGMOID: {
        const vf e = vf_exp(vf_minus_abs(x));
        return vf_over(vf_by_sign(x, e, vf_all(1)), 1 + e);
    }
    default: return x;
    }
}
INLINE vf vf_act(int act, vf x)
{
    return vf_act_of(act, x, 0);
}

#endif
