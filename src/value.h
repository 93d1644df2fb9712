/* value.h - arithmetic of the definitions: in double, with a running bound of what float arithmetic may lose.

   Each function gives the exact result and adds to the bound half a unit of float for its own rounding
   (Wilkinson's running error analysis). A kernel may evaluate the same steps in any order, fused or not, and
   stay inside. */
#ifndef ADZE_VALUE_H
#define ADZE_VALUE_H

#include "kernel.h"

#include <math.h>
#include <string.h>

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
/* How a kernel sums the products of a dot product. */
typedef enum adze_sums {
    ADZE_SUMS_LANES,  /* float in 32 or more lanes, then a tree */
    ADZE_SUMS_BLOCKS, /* float in chains of at most 256 terms, whose sums are added one after the other */
    ADZE_SUMS_TENSOR, /* tensor cores, in the order of k or in several such sums, then a tree */
    ADZE_SUMS_PAIRS,  /* as BLOCKS, but by pairs of bf16 products: BFMMLA of aarch64, AMX of x86-64 */
    ADZE_SUMS_F8,     /* tensor cores of sm_90 that multiply f8e4m3, 128 products at a time, whose sums are added */
    ADZE_SUMS_SPLIT /* f32, in float in the order of k; or on tensor cores, as three products of TF32, 16 to 64 terms
                       at a time, whose sums are added in float */
} adze_sums;

/* A dot product as it is summed, in the order of k. */
typedef struct adze_dot {
    int64_t n;
    double sum, magnitude, error; /* as of adze_summed() */
    double prefixes;              /* the sum over every 16th term of the magnitude up to it */
    double subnormal;             /* the sum of |a b| where a or b is subnormal in float */
} adze_dot;
/* |a| as an integer, in the same order: where processors are emulated, this is faster to compare than a double. */
static inline uint64_t adze_magnitude(double a)
{
    uint64_t bits;
    memcpy(&bits, &a, sizeof bits);
    return bits & INT64_MAX;
}
/* Most of the time of a check is spent here. */
static inline void adze_dot_add(adze_dot *d, double a, double a_error, double b)
{
    const uint64_t normal = (uint64_t)(1023 - 126) << 52; /* 2^-126 */
    const double p = a * b;
    d->sum += p, d->magnitude += fabs(p);
    if (adze_magnitude(a_error))
        d->error += a_error * fabs(b);
    if (adze_magnitude(a) < normal || adze_magnitude(b) < normal)
        d->subnormal += fabs(p);
    if (++d->n % 16 == 0)
        d->prefixes += d->magnitude;
}
/* Its bound. Products of f16 and bf16 are exact in float, those of f32 are rounded once, or fused; either is one unit
   u = 2^-24 of the magnitude. Subnormal products, and sums that a processor flushes to zero, lose 2^-126 each.

   A tensor core adds, by what has been measured of them, 8 products (sm_75 to sm_89) or 16 (sm_90 and newer) to the
   accumulator at once. It shifts all addends to the largest exponent 2^e, cuts each below 2^(e - 24) (2^(e - 25) on
   sm_90), and cuts the sum to a float. 2^e is at most the magnitude M up to there. So 9 addends lose 9 * 2^-24 M and
   the float 2^-23 M: 11 u M for 8 products, 22 u M for 16; 17 * 2^-25 M + 2^-23 M = 10.5 u M on sm_90. A chain that
   takes only some of the terms up to k, as split k and several warps do, has a smaller M at each.

   Of f8e4m3 sm_90 adds, by what has been measured, 32 products and the accumulator at once, cuts each below 2^(e -
   13), and the sum to 13 bits of fraction. So 33 addends lose 33 * 2^-13 M and the sum 2^-13 M, where M is the
   magnitude of the 128 products that four of them add: 4 * 34 * 2^-13 M. All such M together are the whole magnitude.

   A float is split into big, which is TF32 to the nearest, and small, at most 2^-11 of it, of which tensor cores
   leave out one bit, 2^-23 of it. The product small * small that is left out is 4 u M, the bits are 2 u M each. Of
   TF32 a tensor core adds 4 products (sm_80 to sm_89) or 8 (sm_90 and newer) to the accumulator at once. The largest
   addend is not cut: it is a float, or has 22 bits. So 4 addends lose 4 * 2^-24 M and the float 2^-23 M, 6 u M for 4
   products, 24 u M for 16, and 6 u M for the part of 8 terms at each end; 8 * 2^-25 M + 2^-23 M is half of it. A
   chain of 64 products begins with 0: its own M is what counts, at most 4 times for 16 products each. The small
   products are twice as many, at most 2^-11 of the others, in chains of at most 256: u M. The sums of chains are
   rounded twice, to u of their own M and of that up to there, and parts are added in a tree. In float, in the order
   of k, every term is rounded to u of the M up to there.

   BFMMLA, as Arm defines it (FPCR.EBF = 0), multiplies exactly, adds two products, and adds that to the sum. Both
   additions round to odd, which may lose a whole unit, 2 u. A chain of 256 terms has 128 such sums, 256 u M, and the
   pairs lose 2 u M. Numbers that are subnormal are taken as zero, and so are results. */
static inline adze_value adze_dotted(adze_sums sums, const adze_dot *d)
{
    if (!isfinite(d->sum))
        return adze_exact(d->sum);
    const double n = (double)d->n, all = d->magnitude + d->error;
    const double blocks = d->prefixes + all + n / 16 * d->error; /* M up to the end of each 16 terms */
    const double e = sums == ADZE_SUMS_LANES ? (adze_sum_depth(d->n) + 1) * all
                     : sums == ADZE_SUMS_F8  ? (4 * 34 * 0x1p11 + n / 128 + 2) * all
                     : sums == ADZE_SUMS_SPLIT
                         ? fmax(16 * blocks, 24 * fmin(blocks, 4 * all) + (12 + 8 + 2) * all + blocks) + 12 * all
                     : sums != ADZE_SUMS_TENSOR ? (fmin(n, 256) + n / 256 + 12) * all
                                                : 22 * blocks + 12 * all;
    const double flushed = sums == ADZE_SUMS_PAIRS ? d->subnormal : 0;
    return (adze_value){d->sum, d->error + ADZE_U * e + flushed + n * 0x1p-126};
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
/* A row as it would be stored in x's dtype, and then quantised to i8 or f8e4m3 by quantize: y, and its scale. */
static inline void adze_quantised(int x_dtype, int dtype, int64_t n, adze_value *y, adze_value *scale)
{
    const double top = dtype == ADZE_I8 ? 127 : 448;
    double most = 0, low = 0, high = 0; /* the largest magnitude, and what float error leaves open */
    for (int64_t i = 0; i < n; i++) {
        y[i] = adze_rounded(x_dtype, y[i]);
        most = fmax(most, fabs(y[i].v));
        low = fmax(low, fabs(y[i].v) - y[i].e), high = fmax(high, fabs(y[i].v) + y[i].e);
    }
    *scale = most == 0 ? adze_exact(0) : adze_div((adze_value){most, fmax(high - most, most - low)}, adze_exact(top));
    for (int64_t i = 0; i < n; i++) {
        y[i] = most == 0 ? adze_exact(0) : adze_div(y[i], *scale);
        y[i].v = fmin(fmax(y[i].v, -top), top);
    }
}
static inline adze_value adze_element(const adze_tensor *t, int64_t at)
{
    return adze_exact(adze_get(t, at));
}

#endif
