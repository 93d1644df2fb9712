/* value.h - arithmetic of the definitions: in double, with a running bound of what float arithmetic may lose.

   Each function gives the exact result and adds to the bound half a unit of float for its own rounding
   (Wilkinson's running error analysis). A kernel may evaluate the same steps in any order, fused or not, and
   stay inside. */
#ifndef ADZE_VALUE_H
#define ADZE_VALUE_H

#include "kernel.h"

#include <math.h>

#define ADZE_U 0x1p-24 /* half a unit in the last place of a float, relative */

static inline adze_value adze_exact(double v)
{
    return (adze_value){v, 0};
}
static inline adze_value adze_add(adze_value a, adze_value b)
{
    const double v = a.v + b.v;
    return (adze_value){v, a.e + b.e + ADZE_U * (fabs(v) + a.e + b.e)};
}
static inline adze_value adze_sub(adze_value a, adze_value b)
{
    return adze_add(a, (adze_value){-b.v, b.e});
}
static inline adze_value adze_mul(adze_value a, adze_value b)
{
    const double v = a.v * b.v, e = fabs(a.v) * b.e + fabs(b.v) * a.e + a.e * b.e;
    return (adze_value){v, e + ADZE_U * (fabs(v) + e) + 0x1p-149};
}
static inline adze_value adze_div(adze_value a, adze_value b)
{
    const double v = a.v / b.v, low = fabs(b.v) - b.e;
    const double e = low > 0 ? (a.e + fabs(v) * b.e) / low : INFINITY;
    return (adze_value){v, e + 2 * ADZE_U * (fabs(v) + e) + 0x1p-149};
}
/* A function of a with derivative bound `slope` near a, evaluated to within `ulps` float units. */
static inline adze_value adze_fn(adze_value a, double v, double slope, double ulps)
{
    const double e = a.e * fabs(slope);
    return (adze_value){v, e + 2 * ADZE_U * ulps * (fabs(v) + e)};
}
/* 1 / sqrt(a), a > 0, to two float units. Of infinity it is exact. */
static inline adze_value adze_rsqrt(adze_value a)
{
    if (isinf(a.v))
        return adze_exact(0);
    const double v = 1 / sqrt(a.v), low = a.v - a.e;
    return adze_fn(a, v, low > 0 ? 0.5 / (low * sqrt(low)) : INFINITY, 2);
}
/* The longest chain of additions when n terms are summed: kernels use 32 or more lanes, then a tree. */
static inline double adze_sum_depth(int64_t n)
{
    return (double)n / 32 + 12;
}
/* The sum of n terms: `sum` of their values, `magnitude` of their absolute values, `error` of their bounds. */
static inline adze_value adze_summed(int64_t n, double sum, double magnitude, double error)
{
    return (adze_value){sum, error + ADZE_U * adze_sum_depth(n) * (magnitude + error)};
}
/* a rounded to a dtype. When float error leaves open which neighbour it is, the bound covers both; otherwise it is
   zero. */
static inline adze_value adze_rounded(int dtype, adze_value a)
{
    const double v = adze_round_to(dtype, a.v);
    const double low = adze_round_to(dtype, a.v - a.e), high = adze_round_to(dtype, a.v + a.e);
    if (dtype == ADZE_F32)
        return (adze_value){a.v, a.e};
    return (adze_value){v, fmax(v - low, high - v)};
}
static inline adze_value adze_rounded_if(int condition, int dtype, adze_value a)
{
    return condition ? adze_rounded(dtype, a) : a;
}
static inline adze_value adze_element(const adze_tensor *t, int64_t at)
{
    return adze_exact(adze_get(t, at));
}

#endif
