/* gemm_digits.h - what products of few rows of x with quantised weights in integers share (AVX-512). The floats of a
   PART of a row of x are multiples of one power of two: whole numbers, which are taken apart into digits of 8 bits
   from -128 to 127, whose products with w are exact. What such a number lacks of x, as elements that are far smaller
   than the largest one have more bits, is multiplied by itself: the rests. A kernel says how small a rest it drops. A
   row with many rests is left to cpu_avx512, and so is one that is not finite. A file that includes this says what
   COLUMNS and PART are. */
#ifndef ADZE_CPU_GEMM_DIGITS_H
#define ADZE_CPU_GEMM_DIGITS_H

#define GEMM_NORM(op) adze_##op##_cpu_avx512
#include "cpu/gemm.h"

enum {
    ROWS = 8,         /* of x at a time */
    LEAST_POWER = -90 /* of the largest element of a part: scales are normal floats */
};

typedef struct rest { /* of an element of x */
    int64_t at;
    float value;
} rest;
typedef struct digits_call {
    gemm_call c;
    int64_t rows, parts; /* of x: as many as there are digits of, the last ones may be zeros */
    int8_t *digits;      /* of x, and sums of them, as the file has them */
    int32_t *sums;
    float *scales;
    rest *rests; /* [row][most] */
    int64_t rest_count[ROWS], rests_most;
    int refused[ROWS];
} digits_call;
/* `count` <= COLUMNS columns of weight w, for all rows: y[row][COLUMNS]. */
typedef void (*digits_columns)(const digits_call *v, const gemm_weight *w, int64_t column, int64_t count, float *y);
/* The digits of a part of a row, n elements; 0: it is refused. */
typedef int (*digits_part)(digits_call *v, int64_t row, int64_t part, const float *x, int64_t n);

/* ---- Whole numbers ---- */

INLINE __mmask16 first_lanes(int64_t n)
{
    return n >= LANES ? 0xffff : n > 0 ? (__mmask16)((1u << n) - 1) : 0;
}
/* The power of two that all of n floats are less than; INT32_MAX: one is not finite, or above any power. `room` is
   added to the bits of the largest: those of its mantissa that it must not have. */
INLINE int power_above(const float *x, int64_t n, uint32_t room)
{
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += LANES) {
        const __m512i bits = _mm512_maskz_loadu_epi32(first_lanes(n - i), x + i);
        most = _mm512_max_epi32(most, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    const int largest = (int)(((uint32_t)_mm512_reduce_max_epi32(most) + room) >> 23);
    return largest >= 255 ? INT32_MAX : largest - 126 < LEAST_POWER ? LEAST_POWER : largest - 126;
}
/* LANES of n elements of a row as multiples of scale, a power of two; 0: there are too many rests, which are larger
   than `least_rest` times their element. Those of lane l are of element at + l * step. */
INLINE int whole_numbers(digits_call *v, int64_t row, int64_t at, int64_t step, const float *x, int64_t n,
                         float scale, float inverse, float least_rest, __m512i *number)
{
    const __m512 f = _mm512_maskz_loadu_ps(first_lanes(n), x);
    *number = _mm512_cvtps_epi32(_mm512_mul_ps(f, _mm512_set1_ps(inverse)));
    const __m512 left = _mm512_sub_ps(f, _mm512_mul_ps(_mm512_cvtepi32_ps(*number), _mm512_set1_ps(scale)));
    const __m512 most_left = _mm512_mul_ps(_mm512_abs_ps(f), _mm512_set1_ps(least_rest));
    unsigned some = _mm512_cmp_ps_mask(_mm512_abs_ps(left), most_left, _CMP_GT_OQ);
    for (; some; some &= some - 1) {
        const int lane = __builtin_ctz(some);
        if (v->rest_count[row] == v->rests_most)
            return 0;
        v->rests[row * v->rests_most + v->rest_count[row]++] = (rest){at + lane * step, ((vf)left)[lane]};
    }
    return 1;
}
/* Element i of row `row` of w, which begins at `at`: a whole number, less its zero. */
INLINE int number_at(const scales *s, const char *at, int64_t row, int64_t i, int kind)
{
    if (kind != ADZE_U8)
        return (int8_t)at[i];
    const int zero = s->zero ? s->zero[row * s->zero_stride + i / s->group] : 8;
    return (((uint8_t)at[i / 2] >> i % 2 * 4) & 15) - zero;
}
/* The rests of a row of x times that row of w. */
INLINE float rests_times(const digits_call *v, int r, const scales *s, const char *at, int64_t row, int kind)
{
    float sum = 0;
    for (const rest *e = v->rests + r * v->rests_most, *end = e + v->rest_count[r]; e < end; e++) {
        const float scale = float_at(s->scale, s->dtype, row * s->row_stride + e->at / s->group);
        sum += e->value * (float)number_at(s, at, row, e->at, kind) * scale;
    }
    return sum;
}

/* ---- The call ---- */

/* What 64 bytes divide, of one block of memory. */
INLINE void *part_of(char **memory, int64_t bytes)
{
    void *at = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return at;
}
/* So many bytes of digits, of sums of them and of scales, which are zero. */
static inline int digits_memory(digits_call *v, int64_t digits, int64_t sums, int64_t all_scales)
{
    const int64_t floats = (v->rows * v->c.k_floats + LANES) * (int64_t)sizeof(float);
    v->rests_most = v->c.k / 64;
    const int64_t rests = (v->rows * v->rests_most + 1) * (int64_t)sizeof(rest);
    char *memory = aligned_alloc(64, (size_t)(floats + digits + sums + all_scales + rests + 5 * 64) / 64 * 64);
    if (!memory)
        return 0;
    v->c.floats = part_of(&memory, floats);
    v->digits = part_of(&memory, digits);
    v->sums = part_of(&memory, sums);
    v->scales = part_of(&memory, all_scales);
    v->rests = part_of(&memory, rests);
    return 1;
}
INLINE void rows_digits(digits_call *v, int64_t begin, int64_t end, digits_part part_digits)
{
    const gemm_call *c = &v->c;
    for (int64_t r = begin; r < end; r++) {
        v->rest_count[r] = v->refused[r] = 0;
        if (r < c->count)
            gemm_rows(&v->c, r, r + 1);
        for (int64_t part = 0; part < v->parts && !v->refused[r]; part++) {
            const int64_t n = r < c->count ? least(c->k - part * PART, PART) : 0;
            v->refused[r] = !part_digits(v, r, part, c->floats + r * c->k_floats + part * PART, n);
        }
    }
}
/* Blocks of columns, of one weight after the other. */
INLINE void blocks_of(const digits_call *v, int64_t begin, int64_t end, digits_columns columns)
{
    const gemm_call *c = &v->c;
    float y[2][ROWS * COLUMNS];
    for (int64_t block = begin; block < end; block++) {
        const gemm_block its = gemm_block_of(c, block, COLUMNS);
        const gemm_weight *w = its.w;
        const int64_t column = its.column, count = its.count;
        columns(v, w, column, count, y[0]);
        if (c->a->glu)
            columns(v, w + 1, column, count, y[1]);
        for (int64_t i = 0; i < c->count; i++)
            gemm_finish(c, w, y[0] + i * COLUMNS, y[1] + i * COLUMNS, c->first_row + i, column, count);
    }
}

/* After gemm_init and digits_memory: all rows, by what row_digits and body do. 0: one is refused. */
static inline int digits_all(digits_call *v, void (*row_digits)(void *, int64_t, int64_t),
                             void (*body)(void *, int64_t, int64_t))
{
    gemm_call *c = &v->c;
    const int64_t blocks = gemm_blocks(c, COLUMNS);
    int refused = 0;
    while (!refused && blocks > 0 && gemm_next_rows(c, ROWS)) {
        adze_parallel_for(v->rows, row_grain(c->k), row_digits, v);
        for (int64_t r = 0; r < v->rows; r++)
            refused |= v->refused[r];
        if (!refused)
            adze_parallel_for(blocks, gemm_grain(c, COLUMNS), body, v);
    }
    free(c->floats);
    return !refused;
}

#endif
