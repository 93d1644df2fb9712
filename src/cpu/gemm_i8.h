/* gemm_i8.h - products of i8 with i8 in integers, which are exact. Rows of x become 16-bit numbers once; threads take
   blocks of rows of w, which become such numbers as they are read, and multiply a few of them with a few rows of x at
   a time. */
#ifndef ADZE_CPU_GEMM_I8_H
#define ADZE_CPU_GEMM_I8_H

#include "cpu/gemm.h"

/* As many 16-bit numbers as a register has, and 32-bit sums of their products. */
#if defined(__AVX512BW__)
enum { I8_WIDTH = 32, I8_SUMS = 16 };
typedef __m512i i8_numbers, i8_sums;
INLINE i8_numbers i8_widen(const int8_t *at)
{
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)at));
}
INLINE i8_numbers i8_load(const int16_t *at)
{
    return _mm512_loadu_si512((const void *)at);
}
INLINE i8_sums i8_add(i8_sums sum, i8_numbers a, i8_numbers b)
{
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
}
#elif defined(__AVX2__)
enum { I8_WIDTH = 16, I8_SUMS = 8 };
typedef __m256i i8_numbers, i8_sums;
INLINE i8_numbers i8_widen(const int8_t *at)
{
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)at));
}
INLINE i8_numbers i8_load(const int16_t *at)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)at);
}
INLINE i8_sums i8_add(i8_sums sum, i8_numbers a, i8_numbers b)
{
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
#elif defined(__x86_64__)
enum { I8_WIDTH = 8, I8_SUMS = 4 };
typedef __m128i i8_numbers, i8_sums;
INLINE i8_numbers i8_widen(const int8_t *at)
{
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)at);
    return _mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8);
}
INLINE i8_numbers i8_load(const int16_t *at)
{
    return _mm_loadu_si128((const __m128i *)(const void *)at);
}
INLINE i8_sums i8_add(i8_sums sum, i8_numbers a, i8_numbers b)
{
    return _mm_add_epi32(sum, _mm_madd_epi16(a, b));
}
#elif defined(__aarch64__)
enum { I8_WIDTH = 8, I8_SUMS = 4 };
typedef int16x8_t i8_numbers;
typedef int32x4_t i8_sums;
INLINE i8_numbers i8_widen(const int8_t *at)
{
    return vmovl_s8(vld1_s8(at));
}
INLINE i8_numbers i8_load(const int16_t *at)
{
    return vld1q_s16(at);
}
INLINE i8_sums i8_add(i8_sums sum, i8_numbers a, i8_numbers b)
{
    return vmlal_high_s16(vmlal_s16(sum, vget_low_s16(a), vget_low_s16(b)), a, b);
}
#else
enum { I8_WIDTH = 4, I8_SUMS = 4 };
typedef int32_t i8_numbers __attribute__((vector_size(16)));
typedef int32_t i8_sums __attribute__((vector_size(16)));
INLINE i8_numbers i8_widen(const int8_t *at)
{
    return (i8_numbers){at[0], at[1], at[2], at[3]};
}
INLINE i8_numbers i8_load(const int16_t *at)
{
    return (i8_numbers){at[0], at[1], at[2], at[3]};
}
INLINE i8_sums i8_add(i8_sums sum, i8_numbers a, i8_numbers b)
{
    return sum + a * b;
}
#endif

enum {
    I8_ROWS = 4,      /* of x at a time, */
    I8_WEIGHTS = 4,   /* and of w */
    I8_AHEAD = 1024,  /* bytes from what is read to what is prefetched */
    I8_COLUMNS = 32,  /* of out that a thread works on at a time */
    I8_ROWS_MOST = 64 /* of x that are widened at a time */
};

/* 16-bit numbers of a row of x, ended by zeros. */
INLINE int64_t i8_pitch(int64_t k)
{
    const int64_t pitch = (k + 31) / 32 * 32;
    return pitch % 512 == 0 ? pitch + 32 : pitch; /* as k_floats */
}
INLINE int16_t *i8_row(const gemm_call *c, int64_t row)
{
    return (int16_t *)(void *)c->floats + row * i8_pitch(c->k);
}
NO_INLINE void i8_rows(void *context, int64_t begin, int64_t end)
{
    const gemm_call *c = context;
    for (int64_t r = begin; r < end; r++) {
        const int8_t *x = (const int8_t *)(const void *)gemm_row(c, r);
        int16_t *to = i8_row(c, r);
        for (int64_t i = 0; i < c->k; i++)
            to[i] = x[i];
        memset(to + c->k, 0, (size_t)(i8_pitch(c->k) - c->k) * sizeof *to);
    }
}

/* y[row][weight] of I8_WEIGHTS rows of w and `rows` rows of x. */
INLINE void i8_dots(const int8_t *const *w, const int16_t *x, int64_t k, float (*y)[I8_WEIGHTS], int rows)
{
    const int64_t pitch = i8_pitch(k);
    i8_sums sum[I8_ROWS][I8_WEIGHTS];
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
    for (int j = 0; j < I8_WEIGHTS; j++)
        sum[r][j] = (i8_sums){0};
    for (int64_t i = 0; i < k; i += I8_WIDTH) {
        for (int j = 0; j < I8_WEIGHTS && i % LINE_BYTES == 0; j++)
            __builtin_prefetch(w[j] + i + I8_AHEAD);
        i8_numbers v[I8_WEIGHTS];
        UNROLLED
        for (int j = 0; j < I8_WEIGHTS; j++) {
            if (k - i >= I8_WIDTH) {
                v[j] = i8_widen(w[j] + i);
            } else { /* the end of a row: x has zeros there */
                int8_t end[I8_WIDTH] = {0};
                memcpy(end, w[j] + i, (size_t)(k - i));
                v[j] = i8_widen(end);
            }
        }
        UNROLLED
        for (int r = 0; r < rows; r++) {
            const i8_numbers a = i8_load(x + r * pitch + i);
            UNROLLED
            for (int j = 0; j < I8_WEIGHTS; j++)
                sum[r][j] = i8_add(sum[r][j], a, v[j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < I8_WEIGHTS; j++) {
            int32_t lane[I8_SUMS], all = 0;
            memcpy(lane, &sum[r][j], sizeof lane);
            for (int i = 0; i < I8_SUMS; i++)
                all += lane[i];
            y[r][j] = (float)all;
        }
}
/* `count` <= I8_COLUMNS columns of weight w for `rows` <= I8_ROWS rows of x. Rows of w at a time are far from each
   other, as in gemm.c; those that are missing at the end are the last one again. */
NO_INLINE void i8_columns(const gemm_call *c, const gemm_weight *w, const int16_t *x, int rows, int64_t column,
                          int64_t count, float (*y)[I8_COLUMNS])
{
    const weight_rows w_rows = weight_rows_of(c, w);
    const int64_t apart = (count + I8_WEIGHTS - 1) / I8_WEIGHTS;
    for (int64_t j = 0; j < apart; j++) {
        const int8_t *at[I8_WEIGHTS];
        float some[I8_ROWS][I8_WEIGHTS];
        for (int i = 0; i < I8_WEIGHTS; i++) {
            const int64_t row = column + least(j + i * apart, count - 1);
            at[i] = (const int8_t *)(const void *)(w_rows.data + row * w_rows.stride);
        }
        switch (rows) {
        case 1: i8_dots(at, x, c->k, some, 1); break;
        case 2: i8_dots(at, x, c->k, some, 2); break;
        case 3: i8_dots(at, x, c->k, some, 3); break;
        default: i8_dots(at, x, c->k, some, 4); break;
        }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < I8_WEIGHTS && j + i * apart < count; i++)
                y[r][j + i * apart] = some[r][i];
    }
}

static void i8_body(void *context, int64_t begin, int64_t end)
{
    const gemm_call *c = context;
    float y[2][I8_ROWS][I8_COLUMNS];
    for (int64_t block = begin; block < end; block++) {
        const gemm_block its = gemm_block_of(c, block, I8_COLUMNS);
        const gemm_weight *w = its.w;
        const int64_t column = its.column, count = its.count;
        for (int64_t r = 0; r < c->count; r += I8_ROWS) {
            const int rows = (int)least(c->count - r, I8_ROWS);
            i8_columns(c, w, i8_row(c, r), rows, column, count, y[0]);
            if (c->a->glu)
                i8_columns(c, w + 1, i8_row(c, r), rows, column, count, y[1]);
            for (int i = 0; i < rows; i++)
                gemm_finish(c, w, y[0][i], y[1][i], c->first_row + r + i, column, count);
        }
    }
}

static adze_status i8_all(gemm_call *c)
{
    int64_t rows = least(c->rows.count, I8_ROWS_MOST);
    const int64_t blocks = gemm_blocks(c, I8_COLUMNS);
    if (blocks == 0 || rows == 0)
        return ADZE_OK;
    while (!(c->floats = aligned_alloc(64, (size_t)(rows * i8_pitch(c->k) + 32) * sizeof(int16_t))) && rows > 1)
        rows /= 2;
    ADZE_REQUIRE(c->floats, ADZE_NO_KERNEL, NO_MEMORY, (long long)rows, (long long)c->k);
    while (gemm_next_rows(c, rows)) {
        adze_parallel_for(c->count, row_grain(c->k), i8_rows, c);
        adze_parallel_for(blocks, gemm_grain(c, I8_COLUMNS), i8_body, c);
    }
    free(c->floats);
    return ADZE_OK;
}

#endif
