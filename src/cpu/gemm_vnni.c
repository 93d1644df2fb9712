/* gemm of few rows of x with weights of i8 or of 4 bits in integers, on x86-64 processors that add products of bytes
   (AVX-512 VNNI). Three digits of a row of x (gemm_digits.h) are multiplied with each row of w. Weights of 4 bits are
   taken apart in registers; where a group ends, its sums become floats and are multiplied by its scale. */
enum {
    COLUMNS = 32, /* of out that a thread works on at a time */
    DIGITS = 3,
    UNIT = 64,        /* weights in a register */
    PART = 16 * UNIT, /* elements of k whose sums of digits are put together */
    BITS = 22,        /* of a whole number, besides its sign: three digits from -128 to 127 hold them */
    LINE = 2 * UNIT,  /* weights of 4 bits in a line of the cache: of even elements of k, and of odd ones */
    WINDOW = 16       /* groups whose scales are floats at a time */
};
#include "cpu/gemm_digits.h"

/* Columns whose sums stay in the L1 cache with the digits of a PART. */
#define NEAR(rows)     ((rows) == 8 ? 16 : COLUMNS)
#define TOGETHER(rows) ((rows) == 8 ? 4 : (rows)) /* rows of x at a time: */
#define WEIGHTS(rows)  (8 / TOGETHER(rows))       /* so many rows of w that all digits of all sums are in registers */
enum { SUMS_MOST = (COLUMNS + 8) * 4 };

/* ---- Digits of x ---- */

/* [part][unit][row][digit][UNIT] */
INLINE int8_t *digits_at(const digits_call *v, int64_t part, int64_t unit, int64_t row)
{
    return v->digits + ((part * (PART / UNIT) + unit) * v->rows + row) * DIGITS * UNIT;
}
/* For what w has more as a byte without a sign: of i8 128, -128 times the sum of a lane's digits,
   [part][row][digit][LANES]; of 4 bits 8, -8 times the sum of a lane's elements, [part][line][row][LANES]. */
INLINE void part_offsets(digits_call *v, int64_t row, int64_t part, int packed)
{
    const int64_t lines = PART / LINE, units = packed ? 2 : PART / UNIT;
    const __m512i more = _mm512_set1_epi8(packed ? 8 : -128);
    for (int64_t line = 0; line < (packed ? lines : 1); line++) {
        __m512i all = _mm512_setzero_si512();
        for (int d = DIGITS - 1; d >= 0; d--) {
            __m512i sum = _mm512_setzero_si512();
            for (int64_t u = 0; u < units; u++)
                sum = _mm512_dpbusd_epi32(sum, more,
                                          _mm512_load_si512(digits_at(v, part, line * units + u, row) + d * UNIT));
            sum = _mm512_sub_epi32(_mm512_setzero_si512(), sum);
            all = _mm512_add_epi32(_mm512_slli_epi32(all, 8), sum);
            if (!packed)
                _mm512_store_si512(v->sums + ((part * v->rows + row) * DIGITS + d) * LANES, sum);
        }
        if (packed)
            _mm512_store_si512(v->sums + ((part * lines + line) * v->rows + row) * LANES, all);
    }
}
static int part_digits(digits_call *v, int64_t row, int64_t part, const float *x, int64_t n)
{
    const int packed = v->c.kind == ADZE_U8;
    const int64_t end = (n + STEP - 1) / STEP * STEP;
    const int power = power_above(x, end);
    if (power == INT32_MAX)
        return 0;
    const float unit = ldexpf(1, power - BITS), inverse = ldexpf(1, BITS - power);
    v->scales[part * v->rows + row] = unit;
    for (int64_t i = 0; i < PART; i += LANES) {
        const int64_t at = part * PART + i, t = i % LINE / LANES;
        __m512i number;
        if (!whole_numbers(v, row, packed ? at - at % 32 + at % 32 / LANES : at, packed ? 2 : 1, x + i, end - i, unit,
                           inverse, &number))
            return 0;
        int8_t *to = packed ? digits_at(v, part, i / LINE * 2 + t % 2, row) + t / 2 * LANES
                            : digits_at(v, part, i / UNIT, row) + i % UNIT;
        for (int d = 0; d < DIGITS; d++) {
            const __m128i digit = _mm512_cvtepi32_epi8(number); /* from -128 to 127; the rest is a multiple of 256 */
            _mm_storeu_si128((__m128i *)(void *)(to + d * UNIT), digit);
            number = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(128)), 8);
        }
    }
    part_offsets(v, row, part, packed);
    return 1;
}
static void row_digits(void *context, int64_t begin, int64_t end)
{
    rows_digits(context, begin, end, part_digits);
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
INLINE void add_part(const digits_call *v, const char *const *row, int64_t part, int64_t n, int64_t ahead, vf *sums,
                     int all, int first, int rows, int weights)
{
    const int32_t *offset = v->sums + (part * all + first) * DIGITS * LANES;
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
/* The same of rows of 4 bits; `scale` has those of the groups of a part, or of a WINDOW of them. The digits of a line
   are multiplied with both halves of bytes from the highest digit on, and put together as they are added: they have
   30 bits at most. */
INLINE void add_halves(const digits_call *v, const gemm_weight *w, const char *const *row, const int64_t *index,
                       int64_t part, int64_t n, int64_t ahead, vf *sums, int all, int first, int rows, int weights)
{
    const scales *s = &w->scales;
    const int64_t group = v->c.a->group, groups = group ? (v->c.k + group - 1) / group : 1;
    const int64_t lines = group ? least(WINDOW * group / LINE, PART / LINE) : PART / LINE; /* of a window */
    const __m512i low = _mm512_set1_epi8(15);
    /* A shift would have to wait for the only port that shifts, which adds products too. */
    const __m512i times_256 =
        _mm512_broadcast_i32x4(_mm_setr_epi8(-1, 0, 1, 2, -1, 4, 5, 6, -1, 8, 9, 10, -1, 12, 13, 14));
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i of_lane = _mm512_srli_epi32(lane, group == 32 ? 2 : group == 64 ? 3 : 4);
    const float *unit = v->scales + part * all + first;
    float scale[8][WINDOW];
    vf sum[8][8];
    UNROLLED
    for (int j = 0; j < weights; j++)
        UNROLLED
    for (int r = 0; r < rows; r++)
        sum[r][j] = vf_all(0);
    for (int64_t l = 0; l * LINE < n; l++) {
        const int64_t from = part * PART + l * LINE, bytes = least((n - l * LINE + 1) / 2, LINE_BYTES);
        const __mmask64 there = ~0ull >> (LINE_BYTES - bytes);
        const int8_t *digits = digits_at(v, part, 2 * l, first);
        const int32_t *offset = v->sums + ((part * (PART / LINE) + l) * all + first) * LANES;
        for (int j = 0; j < weights && l % lines == 0; j++) {
            const int64_t g = group ? from / group : 0;
            const vf some = some_scales(s, index[j] * s->row_stride + g, least(groups - g, WINDOW));
            *(vf_loose *)scale[j] = group ? some : vf_all(some[0]);
        }
        const int64_t g = group ? l % lines * LINE / group : 0;
        UNROLLED
        for (int j = 0; j < weights; j++) {
            const char *at = row[j] + from / 2;
            const __m512i b = bytes == LINE_BYTES ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi8(there, at);
            const __m512i even = _mm512_and_si512(b, low), odd = _mm512_and_si512(_mm512_srli_epi16(b, 4), low);
            const vf of_group = group == 128 || !group
                                    ? vf_all(scale[j][g])
                                    : (vf)_mm512_permutexvar_ps(_mm512_add_epi32(of_lane, _mm512_set1_epi32((int)g)),
                                                                (__m512) * (const vf_loose *)scale[j]);
            if (first == 0)
                __builtin_prefetch(at + ahead, 0, 2);
            UNROLLED
            for (int r = 0; r < rows; r++) {
                const int8_t *x = digits + r * DIGITS * UNIT;
                __m512i total = _mm512_setzero_si512();
                UNROLLED
                for (int d = DIGITS - 1; d >= 0; d--) {
                    if (d < DIGITS - 1)
                        total = _mm512_shuffle_epi8(total, times_256);
                    total = _mm512_dpbusd_epi32(total, even, _mm512_load_si512(x + d * UNIT));
                    total = _mm512_dpbusd_epi32(total, odd, _mm512_load_si512(x + (all * DIGITS + d) * UNIT));
                }
                total = _mm512_add_epi32(total, _mm512_load_si512(offset + r * LANES));
                sum[r][j] = vf_fma(vf_of_ints((vi)total), of_group, sum[r][j]);
            }
        }
    }
    UNROLLED
    for (int j = 0; j < weights; j++)
        UNROLLED
    for (int r = 0; r < rows; r++) {
        vf *to = &sums[j * all + first + r];
        *to = vf_fma(sum[r][j], vf_all(unit[r]), *to);
    }
}
/* `count` <= NEAR columns of weight w. Rows of w that are missing at the end are the last one again. */
INLINE void near_columns(const digits_call *v, const gemm_weight *w, int64_t column, int64_t count, float *y,
                         vf *sums, int kind, int rows)
{
    const gemm_call *c = &v->c;
    const int packed = kind == ADZE_U8, step = packed && rows == 1 ? 4 : WEIGHTS(rows);
    const weight_rows w_rows = weight_rows_of(c, w);
    const int64_t bytes = packed ? PART / 2 : PART;
    memset(sums, 0, sizeof *sums * SUMS_MOST);
    for (int64_t part = 0; part < v->parts; part++) {
        const int64_t n = least(c->k - part * PART, PART);
        const int64_t ahead = part + 1 < v->parts ? bytes : NEAR(rows) * w_rows.stride - part * bytes;
        for (int64_t j = 0; j < count; j += step) {
            const char *row[8];
            int64_t index[8];
            for (int t = 0; t < step; t++) {
                index[t] = column + least(j + t, count - 1);
                row[t] = w_rows.data + index[t] * w_rows.stride;
            }
            for (int r = 0; r < rows; r += TOGETHER(rows))
                if (packed)
                    add_halves(v, w, row, index, part, n, ahead, sums + j * rows, rows, r, TOGETHER(rows), step);
                else
                    add_part(v, row, part, n, ahead, sums + j * rows, rows, r, TOGETHER(rows), step);
        }
    }
    for (int64_t j = 0; j < count; j++) {
        const scales *s = &w->scales;
        const float scale = packed ? 1 : float_at(s->scale, s->dtype, (column + j) * s->row_stride);
        for (int r = 0; r < rows; r++)
            y[r * COLUMNS + j] = vf_sum(sums[j * rows + r]) * scale +
                                 rests_times(v, r, s, w_rows.data + (column + j) * w_rows.stride, column + j, kind);
    }
}
#define COLUMNS_OF(name, kind, rows)                                                                                 \
    NO_INLINE void name(const digits_call *v, const gemm_weight *w, int64_t column, int64_t count, float *y)         \
    {                                                                                                                \
        vf sums[SUMS_MOST];                                                                                          \
        for (int64_t j = 0; j < count; j += NEAR(rows))                                                              \
            near_columns(v, w, column + j, least(count - j, NEAR(rows)), y + j, sums, kind, rows);                   \
    }
COLUMNS_OF(i8_columns_1, ADZE_I8, 1)
COLUMNS_OF(i8_columns_2, ADZE_I8, 2)
COLUMNS_OF(i8_columns_4, ADZE_I8, 4)
COLUMNS_OF(i8_columns_8, ADZE_I8, 8)
COLUMNS_OF(u4_columns_1, ADZE_U8, 1)
COLUMNS_OF(u4_columns_2, ADZE_U8, 2)
COLUMNS_OF(u4_columns_4, ADZE_U8, 4)

static void body(void *context, int64_t begin, int64_t end)
{
    static const digits_columns by_rows[2][ROWS + 1] = {
        {[1] = i8_columns_1, [2] = i8_columns_2, [4] = i8_columns_4, [8] = i8_columns_8},
        {[1] = u4_columns_1, [2] = u4_columns_2, [4] = u4_columns_4}};
    const digits_call *v = context;
    blocks_of(v, begin, end, by_rows[v->c.kind == ADZE_U8][v->rows]);
}

/* ---- The call ---- */

int adze_gemm_cpu_vnni_accepts(adze_stream stream, const void *args);
int adze_gemm_cpu_vnni_accepts(adze_stream stream, const void *args)
{
    const adze_gemm_args *a = args;
    const int packed = a->w.dtype == ADZE_U8 && !a->w_zero.dtype && !a->w2_zero.dtype && !a->w3_zero.dtype;
    /* With more, cpu_avx512 multiplies weights of 4 bits in fewer operations. */
    const int rows = !packed ? ROWS : a->group == 32 || a->group == 64 ? 4 : 2;
    (void)stream;
    return (packed || (a->w.dtype == ADZE_I8 && !a->group)) && (a->x.dtype == ADZE_BF16 || a->x.dtype == ADZE_F16) &&
           a->x.shape[a->x.rank - 1] > 0 && !(a->call.flags & ADZE_BATCH_INVARIANT) && !gemm_takes_panels(a, rows);
}

adze_status adze_gemm_cpu_avx512(adze_stream stream, const void *args);

ADZE_CPU_KERNEL(gemm)
{
    digits_call v = {0};
    gemm_init(&v.c, args);
    const int64_t most = least(v.c.per_batch, ROWS);
    v.rows = most > 4 ? 8 : most > 2 ? 4 : most;
    v.parts = (v.c.k + PART - 1) / PART;
    const int64_t each = v.parts * v.rows, sums = v.c.kind == ADZE_U8 ? PART / LINE : DIGITS;
    if (v.rows == 0 || !digits_memory(&v, each * PART * DIGITS, each * sums * LANES * (int64_t)sizeof(int32_t),
                                      each * (int64_t)sizeof(float)))
        return adze_gemm_cpu_avx512(stream, args);
    return digits_all(&v, row_digits, body) ? ADZE_OK : adze_gemm_cpu_avx512(stream, args);
}
