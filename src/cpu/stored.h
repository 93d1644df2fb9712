/* stored.h - floats rounded to numbers of fewer bits. */
#ifndef ADZE_CPU_STORED_H
#define ADZE_CPU_STORED_H

#include "cpu/row.h"

/* To the nearest whole number, halves to even; |v| is below 2^22. */
INLINE vf vf_nearest(vf v)
{
    const vf large = vf_all(0x1.8p23f);
    return (v + large) - large;
}
INLINE vf vf_between(vf v, float low, float high)
{
    return -vf_max(vf_all(-high), -vf_max(vf_all(low), v));
}
/* The bits of f8e4m3. Normal numbers: the mantissa is rounded to 3 bits; smaller ones are multiples of 2^-9. */
INLINE vi f8_bits(vf v)
{
    const vf magnitude = vf_between((vf)((vu)v & 0x7fffffffu), 0, 448);
    const vu u = (vu)magnitude, normal = ((u + 0x7ffffu + ((u >> 20) & 1)) >> 20) - (120u << 3);
    const vi small = __builtin_convertvector(vf_nearest(magnitude * 0x1p9f), vi);
    const vi bits = (vi)vf_select(magnitude < vf_all(0x1p-6f), (vf)small, (vf)normal);
    return bits | (vi)((vu)v >> 31 << 7);
}

#endif
