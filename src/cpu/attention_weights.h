/* attention_weights.h - attention on the CPU from scores to weights: softcap, mask and exp(s - maximum) of a block of
   keys, for the rows of a tile. */
#ifndef ADZE_CPU_ATTENTION_WEIGHTS_H
#define ADZE_CPU_ATTENTION_WEIGHTS_H

#include "attention_sizes.h"

#include "cpu/attention.h"

typedef struct query { /* a row of q */
    int64_t head, i;
    attention_range seen;
    const char *mask; /* of key 0; NULL without */
} query;

/* tanh(s / cap) * cap */
INLINE vf capped(vf s, float cap)
{
    const vf x = vf_max(vf_all(-20), vf_minus_abs(s) * (1 / cap)); /* of -|s|; beyond 20 it is 1 */
    const vf e = vf_exp(x + x);
    const vf t = (1 - e) / (1 + e);
    return vf_by_sign(s, -t, t) * cap;
}

/* A mask of bytes hides keys, another one is added. */
static int mask_hides(const adze_attention_args *a)
{
    return a->mask.dtype == ADZE_BOOL || a->mask.dtype == ADZE_U8;
}

/* Sixteen scores with softcap and mask, or the n of them that there are; the first is that of key j. */
INLINE vf16 adjusted(const adze_attention_args *a, const query *q, const float *s, int64_t j, int64_t n, int dtype)
{
    vf16 v = row_load(s, ADZE_F32, 0);
    for (int p = 0; p < VF_PARTS && a->softcap != 0; p++)
        v.part[p] = capped(v.part[p], a->softcap);
    if (dtype == ADZE_U8) {
        const uint8_t *at = (const uint8_t *)q->mask + j;
        uint8_t part[LANES] = {0};
        if (n < LANES)
            at = memcpy(part, at, (size_t)n);
        for (int p = 0; p < VF_PARTS; p++)
            v.part[p] = vf_select(byte_lanes(at + p * VF_WIDTH, 0) != 0, v.part[p], vf_all(-INFINITY));
    } else if (dtype) {
        const vf16 m = row_load_part(q->mask, dtype, j, n);
        for (int p = 0; p < VF_PARTS; p++)
            v.part[p] += m.part[p];
    }
    return n < LANES ? vf16_cut(v, n, -INFINITY) : v;
}
/* Softcap and mask of the n scores of keys from j of the sequence on; s is at these. Whole vectors are written: what
   is beyond is minus infinity. The result has the largest scores. */
INLINE vf16 adjust(const adze_attention_args *a, const query *q, float *s, int64_t j, int64_t n, int dtype)
{
    vf16 top = vf16_all(-INFINITY);
    const int64_t whole = n / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        const vf16 v = adjusted(a, q, s + i, j + i, LANES, dtype);
        row_store(s, ADZE_F32, i, v);
        for (int p = 0; p < VF_PARTS; p++)
            top.part[p] = vf_max(v.part[p], top.part[p]);
    }
    if (whole == n)
        return top;
    const vf16 v = adjusted(a, q, s + whole, j + whole, n - whole, dtype);
    row_store(s, ADZE_F32, whole, v);
    for (int p = 0; p < VF_PARTS; p++)
        top.part[p] = vf_max(v.part[p], top.part[p]);
    return top;
}
static vf16 adjust_row(const adze_attention_args *a, const query *q, float *s, int64_t j, int64_t n)
{
    switch (q->mask ? a->mask.dtype : ADZE_NONE) {
    case ADZE_NONE: return adjust(a, q, s, j, n, ADZE_NONE);
    case ADZE_F32: return adjust(a, q, s, j, n, ADZE_F32);
    case ADZE_BF16: return adjust(a, q, s, j, n, ADZE_BF16);
    case ADZE_F16: return adjust(a, q, s, j, n, ADZE_F16);
    default: return adjust(a, q, s, j, n, ADZE_U8);
    }
}

/* How many of the n keys from j on are left when those at the end that a mask of bytes hides are not counted; some
   more where they are within eight bytes of the last. */
static int64_t unmasked(const query *q, int64_t j, int64_t n)
{
    for (uint64_t word; n >= 8; n -= 8) {
        memcpy(&word, q->mask + j + n - 8, sizeof word);
        if (word)
            break;
    }
    return n;
}

/* The largest lane; a NaN may be lost. */
INLINE float largest(vf16 v)
{
    vf all = v.part[0];
    for (int p = 1; p < VF_PARTS; p++)
        all = vf_max(all, v.part[p]);
    float lane[VF_WIDTH];
    memcpy(lane, &all, sizeof lane);
    for (int half = VF_WIDTH / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
}

/* exp(x) for x <= 0, and zero where it would be subnormal: arithmetic with such numbers is slow, and beside the
   weight 1 of the maximum they are nothing. */
INLINE vf weight_of(vf x)
{
    const vf e = exp_within(vf_max(vf_all(-87), x)); /* in this order NaN stays */
    return vf_select(x < vf_all(-87), vf_all(0), e);
}

/* Softcap and mask of the n scores of keys from j on, and minus infinity for those that the query does not see, up to
   a whole vector. The result is the largest. */
static float adjusted_top(const adze_attention_args *a, const query *q, float *s, int64_t j, int64_t n)
{
    const int64_t low = attention_between(q->seen.low - j, 0, n), high = attention_between(q->seen.high - j, low, n);
    const int adjusts = a->softcap != 0 || q->mask;
    vf16 top = vf16_all(-INFINITY);
    if (adjusts)
        top = adjust_row(a, q, s + low, j + low, high - low);
    for (int64_t i = 0; i < low; i++)
        s[i] = -INFINITY;
    for (int64_t i = high; i < (n + LANES - 1) / LANES * LANES; i++)
        s[i] = -INFINITY;
    for (int64_t i = 0; i < n && !adjusts; i += LANES) {
        const vf16 v = row_load(s, ADZE_F32, i);
        for (int p = 0; p < VF_PARTS; p++)
            top.part[p] = vf_max(v.part[p], top.part[p]);
    }
    return largest(top);
}

/* exp(s - shift) of n scores, in place; the result is their sum. */
static float exponents(float *s, int64_t n, float shift)
{
    vf16 sum = vf16_all(0);
    for (int64_t i = 0; i < n; i += LANES) {
        vf16 v = row_load(s, ADZE_F32, i);
        for (int p = 0; p < VF_PARTS; p++) {
            v.part[p] = weight_of(v.part[p] - shift);
            sum.part[p] += v.part[p];
        }
        row_store(s, ADZE_F32, i, v);
    }
    return vf16_sum(sum);
}

/* What LANES rows have so far: their maximum, and the sum of their weights. */
typedef struct row_state {
    float maximum[LANES], total[LANES];
} row_state;
INLINE void row_state_begin(row_state *t)
{
    for (int r = 0; r < LANES; r++)
        t->maximum[r] = -INFINITY, t->total[r] = 0;
}

/* The scores of `rows` rows and the n keys from j on become weights, in place: exp(s - maximum), and zero for keys
   that the query does not see. The maximum and the sum of a row follow; what its earlier sums are multiplied by is in
   keep. */
static void weigh(const adze_attention_args *a, const query *q, int64_t rows, float *s, int64_t j, int64_t n,
                  row_state *t, float keep[LANES])
{
    float top[LANES], shift[LANES], sum[LANES] = {0};
    for (int64_t r = 0; r < LANES; r++)
        top[r] = r < rows ? adjusted_top(a, &q[r], s + r * S_ROW, j, n) : -INFINITY;
    vf16 now = row_load(top, ADZE_F32, 0), kept = row_load(t->maximum, ADZE_F32, 0), by;
    for (int p = 0; p < VF_PARTS; p++) {
        now.part[p] = vf_max(now.part[p], kept.part[p]);
        by.part[p] = vf_select(now.part[p] == vf_all(-INFINITY), vf_all(0), now.part[p]); /* then all are 0, or NaN */
        kept.part[p] = weight_of(kept.part[p] - by.part[p]);
    }
    row_store(t->maximum, ADZE_F32, 0, now);
    row_store(shift, ADZE_F32, 0, by);
    row_store(keep, ADZE_F32, 0, kept);
    for (int64_t r = 0; r < rows; r++)
        sum[r] = exponents(s + r * S_ROW, n, shift[r]);
    for (int64_t r = 0; r < LANES; r++)
        t->total[r] = t->total[r] * keep[r] + sum[r];
}

#endif
