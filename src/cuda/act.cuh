/* act.cuh - the activations on CUDA. */
#ifndef ADZE_CUDA_ACT_CUH
#define ADZE_CUDA_ACT_CUH

#include "kernel.h"

/* 1 / v to one float unit, for v from 1 to 1e30. */
__device__ __forceinline__ float reciprocal(float v)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

/* 2^v to two float units; results below the smallest normal float are flushed to zero. */
__device__ __forceinline__ float power_of_two(float v)
{
    float p;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(p) : "f"(v));
    return p;
}

/* x sigmoid(z) for a z of x's sign, with no cancellation and no overflow: e = exp(-|z|) is at most 1. */
__device__ __forceinline__ float act_times_sigmoid(float x, float z)
{
    const float e = expf(-fabsf(z));
    return (x < 0 ? x * e : x) * reciprocal(1 + e);
}
__device__ __forceinline__ float act_sigmoid(float x)
{
    const float e = expf(-fabsf(x));
    return (x < 0 ? e : 1) * reciprocal(1 + e);
}
/* The upper tail of the normal distribution at a >= 0: exp(-a^2 / 2) times a polynomial in (a - 3) / (a + 3) over a
   + 3, good to 3 units. The rounding error of a^2 goes into the product. */
__device__ __forceinline__ float normal_tail(float a)
{
    const float square = a * a, rest = fmaf(a, a, -square);
    const float e = expf(-0.5f * square), w = reciprocal(a + 3), t = fmaf(w, -6.0f, 1.0f);
    float g = fmaf(t, -0x1.15bb5ap-12f, -0x1.d81ad4p-11f);
    g = fmaf(g, t, 0x1.19e984p-10f);
    g = fmaf(g, t, 0x1.c5a324p-8f);
    g = fmaf(g, t, -0x1.5768d8p-7f);
    g = fmaf(g, t, -0x1.831e6p-5f);
    g = fmaf(g, t, 0x1.d71466p-3f);
    g = fmaf(g, t, -0x1.04c734p-1f);
    g = fmaf(g, t, 0x1.754a74p-1f) * w;
    return g * fmaf(e, -0.5f * rest, e);
}
/* The same for an a of at most 12 bits, whose square is exact in float. exp(-a^2 / 2) is nearly 2^(a^2 c), and upper
   / lower compensates for c, the float that fits best: it is off by 1.6 units. a^2 c is split into an integer, in
   the low bits of `whole`, and a remainder. With 2^64 in the power and 2^-64 in `upper`, results below 2^-126 are
   rounded and not flushed to zero. */
__device__ __forceinline__ float normal_tail_of_short(float a)
{
    const float c = -0x1.71546ap-1f, bias = 0x1.8p23f + 64;
    const float square = a * a, whole = fmaf(square, c, bias), power = power_of_two(fmaf(square, c, bias - whole));
    const float e = __uint_as_float(__float_as_uint(power) + (__float_as_uint(whole) << 23));
    float upper = fmaf(a, 0x1.98550cp-66f, 0x1.7998dep-63f);
    upper = fmaf(upper, a, 0x1.27bcfp-61f);
    upper = fmaf(upper, a, 0x1.acdad6p-61f);
    float lower = a + 0x1.d882ecp+2f;
    lower = fmaf(lower, a, 0x1.84fa6ep+4f);
    lower = fmaf(lower, a, 0x1.3ef4c4p+5f);
    lower = fmaf(lower, a, 0x1.acdad6p+4f);
    return upper * reciprocal(lower) * e;
}
/* x times the normal CDF at x. SHORT: x has at most 12 bits, as f16 and bf16 have. */
template <bool SHORT>
__device__ __forceinline__ float act_gelu(float x)
{
    const float a = fminf(fabsf(x), 14.25f), tail = SHORT ? normal_tail_of_short(a) : normal_tail(a);
    return x * fabsf((x < 0 ? 0.0f : 1.0f) - tail);
}
__device__ __forceinline__ float act_relu(float x)
{
    return x <= 0 ? 0 : x;
}

/* act(x) of N values: one branch for all of them. */
template <int N, bool SHORT = false>
__device__ __forceinline__ void act_all(int act, float (&x)[N])
{
#define ACT_EACH(value)                                                                                              \
    _Pragma("unroll") for (int i = 0; i < N; i++) x[i] = value;                                                      \
    break
    switch (act) {
    case ADZE_ACT_SILU: ACT_EACH(act_times_sigmoid(x[i], x[i]));
    case ADZE_ACT_GELU: ACT_EACH(act_gelu<SHORT>(x[i]));
    case ADZE_ACT_GELU_TANH:
        ACT_EACH(act_times_sigmoid(x[i], x[i] * fmaf(x[i] * x[i], 0x1.2444f2p-4f, 0x1.988454p+0f)));
    case ADZE_ACT_GELU_QUICK: ACT_EACH(act_times_sigmoid(x[i], 1.702f * x[i]));
    case ADZE_ACT_RELU: ACT_EACH(act_relu(x[i]));
    case ADZE_ACT_RELU2: ACT_EACH(act_relu(x[i]) * act_relu(x[i]));
    case ADZE_ACT_SIGMOID: ACT_EACH(act_sigmoid(x[i]));
    default: break;
    }
#undef ACT_EACH
}

#endif
