/* gemm of few rows of x with weights of i8 in integers, on x86-64 processors that add products of bytes (AVX-512
   VNNI). The floats of a PART of a row of x are multiples of one power of two: whole numbers of three digits of 8
   bits, whose products with w are exact. What such a number lacks of x, as a few elements that are far smaller than
   the largest one have more bits, is multiplied by itself. A row with many of these is left to cpu_avx512, and so is
   one that is not finite. */
#define GEMM_NORM(op) adze_##op##_cpu_avx512
#include "cpu/gemm.h"

enum {
    ROWS = 8,
    COLUMNS = 32, /* of out that a thread works on at a time */
    DIGITS = 3,
    UNIT = 64,        /* weights in a register */
    PART = 16 * UNIT, /* elements of k whose sums of digits are put together */
    BITS = 22,        /* of a whole number, besides its sign: three digits from -128 to 127 hold them */
    LEAST_POWER = -90 /* of the largest element of a part: scales are normal floats */
};
/* Columns whose sums stay in the L1 cache with the digits of a PART. */
#define NEAR(rows)     ((rows) == 8 ? 16 : COLUMNS)
#define TOGETHER(rows) ((rows) == 8 ? 4 : (rows)) /* rows of x at a time: */
#define WEIGHTS(rows)  (8 / TOGETHER(rows))       /* so many rows of w that all digits of all sums are in registers */
enum { SUMS_MOST = (COLUMNS + 8) * 4 };

typedef struct rest { /* of an element of x */
    int64_t at;
    float value;
} rest;
typedef struct vnni_call {
    gemm_call c;
    int64_t rows, parts; /* of x: 1, 2, 4 or 8, of which the last may be zeros */
    int8_t *digits;      /* [part][unit][row][digit][UNIT] */
    int32_t *offsets;    /* [part][row][digit][LANES]: -128 times the sum of a lane's digits */
    float *scales;       /* [part][row] */
    rest *rests;         /* [row][most] */
    int64_t rest_count[ROWS], rests_most;
    int refused[ROWS];
} vnni_call;

/* ---- Digits of x ---- */

INLINE int8_t *digits_at(const vnni_call *v, int64_t part, int64_t unit, int64_t row)
{
    return v->digits + ((part * (PART / UNIT) + unit) * v->rows + row) * DIGITS * UNIT;
}

/* The power of two that all of n floats are less than; INT_MAX: one is not finite. */
INLINE int power_above(const float *x, int64_t n)
{
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += LANES) {
        const __m512i bits =
            _mm512_maskz_loadu_epi32(n - i < LANES ? (__mmask16)((1u << (n - i)) - 1) : 0xffff, x + i);
        most = _mm512_max_epi32(most, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    const int largest = _mm512_reduce_max_epi32(most) >> 23;
    return largest == 255 ? INT32_MAX : largest - 126 < LEAST_POWER ? LEAST_POWER : largest - 126;
}
/* A part of a row; 0: it has too many rests. */
INLINE int part_digits(vnni_call *v, int64_t row, int64_t part, const float *x, int64_t n)
{
    const int power = power_above(x, n);
    if (power == INT32_MAX)
        return 0;
    const float scale = ldexpf(1, power - BITS), inverse = ldexpf(1, BITS - power);
    v->scales[part * v->rows + row] = scale;
    for (int64_t i = 0; i < PART; i += LANES) {
        const __mmask16 lanes = n - i >= LANES ? 0xffff : n > i ? (__mmask16)((1u << (n - i)) - 1) : 0;
        const __m512 f = _mm512_maskz_loadu_ps(lanes, x + i);
        __m512i number = _mm512_cvtps_epi32(_mm512_mul_ps(f, _mm512_set1_ps(inverse)));
        const __m512 left = _mm512_sub_ps(f, _mm512_mul_ps(_mm512_cvtepi32_ps(number), _mm512_set1_ps(scale)));
        unsigned some = _mm512_cmp_ps_mask(left, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        for (; some; some &= some - 1) {
            const int lane = __builtin_ctz(some);
            if (v->rest_count[row] == v->rests_most)
                return 0;
            v->rests[row * v->rests_most + v->rest_count[row]++] = (rest){part * PART + i + lane, ((vf)left)[lane]};
        }
        int8_t *to = digits_at(v, part, i / UNIT, row) + i % UNIT;
        for (int d = 0; d < DIGITS; d++) {
            const __m128i digit = _mm512_cvtepi32_epi8(number); /* from -128 to 127; the rest is a multiple of 256 */
            _mm_storeu_si128((__m128i *)(void *)(to + d * UNIT), digit);
            number = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(128)), 8);
        }
    }
    for (int d = 0; d < DIGITS; d++) {
        __m512i sum = _mm512_setzero_si512();
        for (int64_t u = 0; u < PART / UNIT; u++)
            sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128), /* as a byte without a sign, 128 */
                                      _mm512_load_si512(digits_at(v, part, u, row) + d * UNIT));
        _mm512_store_si512(v->offsets + ((part * v->rows + row) * DIGITS + d) * LANES,
                           _mm512_sub_epi32(_mm512_setzero_si512(), sum));
    }
    return 1;
}
static void row_digits(void *context, int64_t begin, int64_t end)
{
    vnni_call *v = context;
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

/* ---- Products ---- */

/* A sum of products stays in its register: gcc would move it about. */
INLINE void add_bytes(__m512i *sum, __m512i w, __m512i digits)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(w), "v"(digits));
}
/* A UNIT of `weights` rows of w, and of the digits of `rows` rows of x. */
INLINE void add_unit(const char *const *at, const int8_t *digits, __m512i (*sum)[8][DIGITS], int rows, int weights)
{
    __m512i w[8];
    UNROLLED
    for (int j = 0; j < weights; j++) /* unsigned: 128 more */
        w[j] = _mm512_xor_si512(_mm512_loadu_si512(at[j]), _mm512_set1_epi8(-128));
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
    for (int d = 0; d < DIGITS; d++) {
        __m512i x = _mm512_load_si512(digits + (r * DIGITS + d) * UNIT);
        __asm__("" : "+v"(x)); /* loaded once */
        UNROLLED
        for (int j = 0; j < weights; j++)
            add_bytes(&sum[r][j][d], w[j], x);
    }
}
/* A part of `weights` rows of w, n elements, times the digits of `rows` rows of x from `first` on; there are `all`.
 */
INLINE void add_part(const vnni_call *v, const char *const *row, int64_t part, int64_t n, int64_t ahead, vf *sums,
                     int all, int first, int rows, int weights)
{
    const int32_t *offset = v->offsets + (part * all + first) * DIGITS * LANES;
    const float *scale = v->scales + part * all + first;
    const int8_t *digits = digits_at(v, part, 0, first);
    const char *at[8];
    __m512i sum[8][8][DIGITS];
    UNROLLED
    for (int j = 0; j < weights; j++) {
        at[j] = row[j] + part * PART;
        UNROLLED
        for (int r = 0; r < rows; r++)
            UNROLLED
        for (int d = 0; d < DIGITS; d++)
            sum[r][j][d] = _mm512_load_si512(offset + (r * DIGITS + d) * LANES);
    }
    for (; n >= UNIT; n -= UNIT, digits += all * DIGITS * UNIT) {
        UNROLLED
        for (int j = 0; j < weights && first == 0; j++)
            __builtin_prefetch(at[j] + ahead, 0, 2);
        add_unit(at, digits, sum, rows, weights);
        UNROLLED
        for (int j = 0; j < weights; j++) {
            at[j] += UNIT;
            __asm__("" : "+r"(at[j])); /* an address without an index takes one operation less in each load */
        }
    }
    if (n > 0) { /* the end of a row: x has zeros there */
        char end[8][UNIT];
        UNROLLED
        for (int j = 0; j < weights; j++) {
            _mm512_storeu_si512(end[j], _mm512_maskz_loadu_epi8(~0ull >> (UNIT - n), at[j]));
            at[j] = end[j];
        }
        add_unit(at, digits, sum, rows, weights);
    }
    UNROLLED
    for (int j = 0; j < weights; j++)
        UNROLLED
    for (int r = 0; r < rows; r++) {
        vf total = vf_of_ints((vi)sum[r][j][DIGITS - 1]);
        UNROLLED
        for (int d = DIGITS - 2; d >= 0; d--)
            total = vf_fma(total, vf_all(256), vf_of_ints((vi)sum[r][j][d]));
        vf *to = &sums[j * all + first + r];
        *to = vf_fma(total, vf_all(scale[r]), *to);
    }
}
/* `count` <= NEAR columns of weight w. Rows of w that are missing at the end are the last one again. */
INLINE void near_columns(const vnni_call *v, const gemm_weight *w, int64_t column, int64_t count, float *y, vf *sums,
                         int rows)
{
    const gemm_call *c = &v->c;
    const int step = WEIGHTS(rows);
    const weight_rows w_rows = weight_rows_of(c, w);
    memset(sums, 0, sizeof *sums * SUMS_MOST);
    for (int64_t part = 0; part < v->parts; part++) {
        const int64_t n = least(c->k - part * PART, PART);
        const int64_t ahead = part + 1 < v->parts ? PART : NEAR(rows) * w_rows.stride - part * PART;
        for (int64_t j = 0; j < count; j += step) {
            const char *row[8];
            for (int t = 0; t < step; t++)
                row[t] = w_rows.data + (column + least(j + t, count - 1)) * w_rows.stride;
            for (int r = 0; r < rows; r += TOGETHER(rows))
                add_part(v, row, part, n, ahead, sums + j * rows, rows, r, TOGETHER(rows), step);
        }
    }
    for (int64_t j = 0; j < count; j++) {
        const int8_t *row = (const int8_t *)(const void *)(w_rows.data + (column + j) * w_rows.stride);
        const float scale = float_at(w->scales.scale, w->scales.dtype, (column + j) * w->scales.row_stride);
        for (int r = 0; r < rows; r++) {
            float sum = 0;
            for (const rest *e = v->rests + r * v->rests_most, *end = e + v->rest_count[r]; e < end; e++)
                sum += e->value * (float)row[e->at];
            y[r * COLUMNS + j] = (vf_sum(sums[j * rows + r]) + sum) * scale;
        }
    }
}
#define COLUMNS_OF(rows)                                                                                             \
    NO_INLINE void columns_##rows(const vnni_call *v, const gemm_weight *w, int64_t column, int64_t count, float *y) \
    {                                                                                                                \
        vf sums[SUMS_MOST];                                                                                          \
        for (int64_t j = 0; j < count; j += NEAR(rows))                                                              \
            near_columns(v, w, column + j, least(count - j, NEAR(rows)), y + j, sums, rows);                         \
    }
COLUMNS_OF(1)
COLUMNS_OF(2)
COLUMNS_OF(4)
COLUMNS_OF(8)

/* Blocks of columns, of one weight after the other. */
static void body(void *context, int64_t begin, int64_t end)
{
    const vnni_call *v = context;
    const gemm_call *c = &v->c;
    float y[2][ROWS * COLUMNS];
    void (*const columns)(const vnni_call *, const gemm_weight *, int64_t, int64_t, float *) =
        v->rows == 1   ? columns_1
        : v->rows == 2 ? columns_2
        : v->rows == 4 ? columns_4
                       : columns_8;
    for (int64_t block = begin; block < end; block++) {
        int64_t at = block;
        const gemm_weight *w = c->weight;
        while (at >= (w->n + COLUMNS - 1) / COLUMNS)
            at -= (w++->n + COLUMNS - 1) / COLUMNS;
        const int64_t column = at * COLUMNS, count = least(w->n - column, COLUMNS);
        columns(v, w, column, count, y[0]);
        if (c->a->glu)
            columns(v, w + 1, column, count, y[1]);
        for (int64_t i = 0; i < c->count; i++)
            gemm_finish(c, w, y[0] + i * COLUMNS, y[1] + i * COLUMNS, c->first_row + i, column, count);
    }
}

/* ---- The call ---- */

int adze_gemm_cpu_vnni_accepts(adze_stream stream, const void *args);
int adze_gemm_cpu_vnni_accepts(adze_stream stream, const void *args)
{
    const adze_gemm_args *a = args;
    (void)stream;
    return a->w.dtype == ADZE_I8 && (a->x.dtype == ADZE_BF16 || a->x.dtype == ADZE_F16) && !a->group &&
           a->x.shape[a->x.rank - 1] > 0 && !(a->call.flags & ADZE_BATCH_INVARIANT) && !gemm_takes_panels(a, ROWS);
}

/* What 64 bytes divide, of one block of memory. */
static void *part_of(char **memory, int64_t bytes)
{
    void *at = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return at;
}
static int vnni_memory(vnni_call *v)
{
    const int64_t k = v->c.k, rows = v->rows, floats = (rows * v->c.k_floats + LANES) * (int64_t)sizeof(float);
    const int64_t digits = v->parts * PART * rows * DIGITS, each = v->parts * rows;
    v->rests_most = k / 64;
    const int64_t offsets = each * DIGITS * LANES * (int64_t)sizeof(int32_t), powers = each * (int64_t)sizeof(float);
    const int64_t rests = (rows * v->rests_most + 1) * (int64_t)sizeof(rest);
    char *memory = aligned_alloc(64, (size_t)(floats + digits + offsets + powers + rests + 5 * 64) / 64 * 64);
    if (!memory)
        return 0;
    v->c.floats = part_of(&memory, floats);
    v->digits = part_of(&memory, digits);
    v->offsets = part_of(&memory, offsets);
    v->scales = part_of(&memory, powers);
    v->rests = part_of(&memory, rests);
    return 1;
}

adze_status adze_gemm_cpu_avx512(adze_stream stream, const void *args);

ADZE_CPU_KERNEL(gemm)
{
    vnni_call v = {0};
    gemm_call *c = &v.c;
    gemm_init(c, args);
    int64_t blocks = 0;
    for (int i = 0; i < c->weights; i++)
        blocks += (c->weight[i].n + COLUMNS - 1) / COLUMNS;
    const int64_t most = least(c->per_batch, ROWS);
    v.rows = most > 4 ? 8 : most > 2 ? 4 : most;
    v.parts = (c->k + PART - 1) / PART;
    if (blocks == 0 || c->rows.count == 0 || !vnni_memory(&v))
        return adze_gemm_cpu_avx512(stream, args);
    int refused = 0;
    while (!refused && gemm_next_rows(c, ROWS)) {
        adze_parallel_for(v.rows, row_grain(c->k), row_digits, &v);
        for (int64_t r = 0; r < v.rows; r++)
            refused |= v.refused[r];
        if (!refused)
            adze_parallel_for(blocks, 1, body, &v);
    }
    free(c->floats);
    return refused ? adze_gemm_cpu_avx512(stream, args) : ADZE_OK;
}
