/* act.h - exp and the activations, a register at a time. Accuracies are in float units, 2^-23 relative. */
#ifndef ADZE_CPU_ACT_H
#define ADZE_CPU_ACT_H

#include "cpu/row.h"

/* x / ln 2 to a whole number n, as BIAS + n: a float whose low bits are n + 191. */
#define EXP_BIAS (0x1.8p23f + 191)
INLINE vf exp_whole(vf x)
{
    return vf_fma(x, vf_all(0x1.715476p+0f), vf_all(EXP_BIAS));
}
/* x - n ln 2; the product with the first part of ln 2 is exact. */
INLINE vf exp_rest(vf x, vf whole)
{
    const vf n = whole - EXP_BIAS;
    return x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;
}
/* 2^n e^(unit r) for |unit r| <= 0.35, n from -151 to 63 and a power of two as unit. The polynomial is off by
   0.8 units. The power of two is 2^(n + 64), an exponent of n + 191, and then 2^-64, so that results below 2^-126 are
   rounded and not lost. */
INLINE vf exp_parts(vf whole, vf r, float unit)
{
    const float unit2 = unit * unit, unit3 = unit2 * unit;
    vf power = vf_fma(r, vf_all(unit2 * unit3 * 0x1.0fa7d8p-7f), vf_all(unit2 * unit2 * 0x1.573adp-5f));
    power = vf_fma(power, r, vf_all(unit3 * 0x1.555a6ep-3f));
    power = vf_fma(power, r, vf_all(unit2 * 0x1.fffdc4p-2f));
    power = vf_fma(power, r, vf_all(unit * 0x1.fffff6p-1f));
    power = vf_fma(power, r, vf_all(1));
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)power, (__m512)(whole - EXP_BIAS));
#else
    return power * (vf)((vu)whole << 23) * 0x1p-64f;
#endif
}
/* e^x for x from -104 to 44, to 2 units. */
INLINE vf exp_within(vf x)
{
    const vf whole = exp_whole(x);
    return exp_parts(whole, exp_rest(x, whole), 1);
}
/* e^x for x <= 44, to 2 units. */
INLINE vf vf_exp(vf x)
{
    return exp_within(vf_max(vf_all(-104), x)); /* in this order NaN stays */
}

/* x sigmoid(z) for a z of x's sign, with no cancellation and no overflow: e = exp(-|z|) is at most 1. */
INLINE vf act_times_sigmoid(vf x, vf z)
{
    const vf e = exp_within(vf_minus_abs_to(z, 104));
    return vf_over(vf_by_sign(x, x * e, x), 1 + e);
}
/* a^2 + b, rounded once, or where a target cannot, with a^2 in two parts, the first of them exact. */
INLINE vf act_square_plus(vf a, vf b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)a, (__m256)b);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)b, (float32x4_t)a, (float32x4_t)a);
#else
    const vf high = (vf)(((vu)a + 0x800u) & 0xfffff000u);
    return high * high + b + (a - high) * (a + high);
#endif
}
/* x times the normal distribution's integral up to x. The tail beyond a = |x| is exp(-a^2 / 2) g(a), where g is a
   polynomial in (a - 3) / (a + 3) over a + 3, good to 3 units. -a^2 / 2 is n ln 2 - r / 2. */
INLINE vf act_gelu(vf x)
{
    const vf minus_a = vf_minus_abs_to(x, 14.25f);
    const vf whole = vf_fma(minus_a * minus_a, vf_all(-0x1.715476p-1f), vf_all(EXP_BIAS)), n = whole - EXP_BIAS;
    const vf r = vf_fma(n, vf_all(0x1.7f7d1cp-19f), act_square_plus(minus_a, n * 0x1.62e4p+0f));
    const vf e = exp_parts(whole, r, -0.5f);
    const vf w = vf_over(vf_all(1), 3 - minus_a), t = 1 - 6 * w;
    vf g = vf_fma(t, vf_all(-0x1.15bb5ap-12f), vf_all(-0x1.d81ad4p-11f));
    g = vf_fma(g, t, vf_all(0x1.19e984p-10f));
    g = vf_fma(g, t, vf_all(0x1.c5a324p-8f));
    g = vf_fma(g, t, vf_all(-0x1.5768d8p-7f));
    g = vf_fma(g, t, vf_all(-0x1.831e6p-5f));
    g = vf_fma(g, t, vf_all(0x1.d71466p-3f));
    g = vf_fma(g, t, vf_all(-0x1.04c734p-1f));
    g = vf_fma(g, t, vf_all(0x1.754a74p-1f));
    const vf tail = g * w * e;
    return x * vf_by_sign(x, tail, 1 - tail);
}
INLINE vf act_relu(vf x)
{
    return vf_max(vf_all(0), x); /* in this order NaN stays */
}

/* act(x), inlined with a constant act. */
INLINE vf vf_act(int act, vf x)
{
    switch (act) {
    case ADZE_ACT_SILU: return act_times_sigmoid(x, x);
    case ADZE_ACT_GELU: return act_gelu(x);
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

#endif
