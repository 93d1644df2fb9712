/* gemm of few rows of x with weights of i8 or of 4 bits in integers, on x86-64 processors that add products of bytes
   (AVX-512 VNNI), one of them without a sign: the weight. i8 gets 128 more in registers, and 4 bits stay as they are
   stored. Three digits of a row of x (gemm_digits.h), of f32 four, are multiplied with each row of w. What the 128 or
   the zero of a group adds to a sum is that number times the sum of x, which is computed once for all rows of w: sums
   of i8 with one scale begin with it, of groups it is subtracted where the group ends. There sums become floats and
   are multiplied by the group's scale. */
enum {
    COLUMNS = 32, /* of out that a thread works on at a time */
    UNIT = 64,    /* bytes in a register */
    LINE = 128,   /* elements of k: two registers of weights, of which each lane adds those of one group */
    PART = 1024,  /* elements of k whose digits have a power of two in common */
    UNITS = PART / UNIT,
    PASS_MOST = 4096,        /* elements of k at a time */
    GROUPS = PASS_MOST / 32, /* of those, at most */
    ZERO_MOST = 16,          /* of 4 bits: a lane holds the sum of x times that */
    AHEAD = 1024             /* bytes of a row of w from what is read to what is prefetched */
};
#include "cpu/gemm_digits.h"

/* Elements of k whose digits stay in the L1 cache, with the sums of so many columns. */
#define PASS(rows) ((rows) == 8 ? PART : PASS_MOST / (rows))
#define NEAR(rows) ((rows) == 8 ? 16 : COLUMNS)
enum { SUMS_MOST = (COLUMNS + 8) * 4 };

INLINE int digits_of(const gemm_call *c)
{
    return c->dtype == ADZE_F32 ? 4 : 3;
}
/* Whether sums become floats at the end of each line. */
INLINE int is_grouped(const gemm_call *c)
{
    return c->kind == ADZE_U8 || c->a->group;
}
/* Of the digits of a line, those that are added apart from the others: with more, sums would not fit into a lane. */
INLINE int low_digits(int kind, int digits)
{
    return digits == 4 ? 2 : kind == ADZE_I8;
}
/* Sums of a line in each lane. */
INLINE int sums_of_line(int kind, int digits)
{
    return low_digits(kind, digits) ? 2 : 1;
}

/* ---- Digits of x ---- */

/* [part][unit][row][digit][UNIT] */
INLINE int8_t *digits_at(const digits_call *v, int64_t part, int64_t unit, int64_t row)
{
    return v->digits + ((part * UNITS + unit) * v->rows + row) * digits_of(&v->c) * UNIT;
}
/* Where sixteen elements from i on are in a line, in the order in which w is read: in the first register are the
   first halves of groups, of 4 bits even elements. In the floats of x those alternate by sixteen. */
INLINE int64_t place_of(const gemm_call *c, int64_t i)
{
    const int half = c->kind == ADZE_U8 || c->a->group == 32 ? 4 : c->a->group == 64 ? 5 : 6; /* bits of an index */
    return (i >> half & 1) * UNIT + (i >> (half + 1) << half) + (i & ((1 << half) - 1));
}
/* Where the last line of a part ends. */
INLINE int64_t end_of(const gemm_call *c, int64_t part)
{
    return (least(c->k - part * PART, PART) + LINE - 1) / LINE * LINE;
}
/* Of rows of i8 with one scale: for 128 more of each weight of a part, -128 times the sum of a lane's digits:
   [part][row][digit][LANES]. Of groups: the sums of a lane's elements in each line, of its high digits and its low
   ones: [part][line][row][1 or 2][LANES]. */
INLINE int64_t sums_of_part(const gemm_call *c)
{
    return LANES * (is_grouped(c) ? PART / LINE * sums_of_line(c->kind, digits_of(c)) : digits_of(c));
}
INLINE int32_t *sums_at(const digits_call *v, int64_t part, int64_t row)
{
    return v->sums + (part * v->rows + row) * digits_of(&v->c) * LANES;
}
INLINE int32_t *line_sums_at(const digits_call *v, int64_t part, int64_t line, int64_t row)
{
    const int each = sums_of_line(v->c.kind, digits_of(&v->c));
    return v->sums + ((part * (PART / LINE) + line) * v->rows + row) * each * LANES;
}
/* The sum of a digit in n bytes of the digits of a part. */
INLINE __m512i digit_sum(const digits_call *v, int64_t row, int64_t part, int digit, int64_t from, int64_t n)
{
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = from; i < from + n; i += UNIT)
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1),
                                  _mm512_load_si512(digits_at(v, part, i / UNIT, row) + digit * UNIT));
    return sum;
}
INLINE void part_sums(const digits_call *v, int64_t row, int64_t part)
{
    const int digits = digits_of(&v->c), low = low_digits(v->c.kind, digits);
    const int64_t end = end_of(&v->c, part);
    for (int d = 0; d < digits && !is_grouped(&v->c); d++) {
        const __m512i sum = _mm512_slli_epi32(digit_sum(v, row, part, d, 0, end), 7);
        _mm512_store_si512(sums_at(v, part, row) + d * LANES, _mm512_sub_epi32(_mm512_setzero_si512(), sum));
    }
    for (int64_t line = 0; line < end / LINE && is_grouped(&v->c); line++) {
        int32_t *to = line_sums_at(v, part, line, row);
        __m512i sum = _mm512_setzero_si512();
        for (int d = digits - 1; d >= 0; d--) {
            sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), digit_sum(v, row, part, d, line * LINE, LINE));
            if (d == low || d == 0) {
                _mm512_store_si512(to, sum);
                sum = _mm512_setzero_si512();
                to += LANES;
            }
        }
    }
}
static int part_digits(digits_call *v, int64_t row, int64_t part, const float *x, int64_t n)
{
    const gemm_call *c = &v->c;
    const int packed = c->kind == ADZE_U8, digits = digits_of(c), bits = digits == 4 ? 30 : 23;
    const int64_t end = (n + STEP - 1) / STEP * STEP;
    /* Three digits hold at most 0x7f7f7f: a larger number doubles the unit. Four hold more than 30 bits. */
    const int power = power_above(x, end, digits == 4 ? 0 : 0x10101);
    if (power == INT32_MAX)
        return 0;
    const float unit = ldexpf(1, power - bits), inverse = ldexpf(1, bits - power);
    /* What is a 2^26th of as many elements as are added one after the other is less than what adding them may lack.
     */
    const float least_rest = digits == 4 ? (float)least(c->k, CHAIN) * 0x1p-26f : 0;
    /* With 128 more a digit has no sign; without these again, its byte has one. The highest has one already. */
    const __m512i signs = _mm512_set1_epi32(0x808080 >> (digits == 4 ? 0 : 8));
    v->scales[part * v->rows + row] = unit;
    for (int64_t i = 0; i < end_of(c, part); i += LANES) {
        const int64_t at = part * PART + i;
        __m512i number;
        if (!whole_numbers(v, row, packed ? at - at % 32 + at % 32 / LANES : at, packed ? 2 : 1, x + i, end - i, unit,
                           inverse, least_rest, &number))
            return 0;
        number = _mm512_xor_si512(_mm512_add_epi32(number, signs), signs);
        const int64_t place = i - i % LINE + place_of(c, i % LINE);
        int8_t *to = digits_at(v, part, place / UNIT, row) + place % UNIT;
        for (int d = 0; d < digits; d++, number = _mm512_srli_epi32(number, 8))
            _mm_store_si128((__m128i *)(void *)(to + d * UNIT), _mm512_cvtepi32_epi8(number));
    }
    part_sums(v, row, part);
    return 1;
}
static void row_digits(void *context, int64_t begin, int64_t end)
{
    rows_digits(context, begin, end, part_digits);
}

/* ---- Products ---- */

/* A sum of products stays in its register: gcc would move it about. */
INLINE void add_bytes(__m512i *sum, __m512i without_sign, __m512i with_sign)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(without_sign), "v"(with_sign));
}
/* PASS elements of k, or fewer at the end, of the rows of w that are multiplied at a time. */
typedef struct some_rows {
    const char *at[8], *next[8]; /* next: what is multiplied after them */
    int64_t part, n;
    char end[8][LINE];
} some_rows;
/* Bytes from where a part of row j begins to what is prefetched meanwhile: of the row, or of what comes next. */
INLINE int64_t ahead_of(const some_rows *some, int j, int64_t part, int64_t part_bytes)
{
    const int64_t parts = (some->n + PART - 1) / PART, at = part - some->part;
    const int64_t target = at + least(AHEAD / part_bytes, parts);
    if (target < parts)
        return (target - at) * part_bytes;
    return some->next[j] + (target - parts) * part_bytes - (some->at[j] + at * part_bytes);
}
/* Into the L1 cache, or where x fills that, into L2. */
INLINE void prefetch(const char *at, int rows)
{
    if (rows <= 4)
        __builtin_prefetch(at);
    else
        __builtin_prefetch(at, 0, 2);
}
/* The end of a row of w, n bytes, with zeros; x has zeros there. */
INLINE const char *row_end(some_rows *some, int j, const char *at, int64_t n)
{
    for (int64_t i = 0; i < LINE; i += UNIT) {
        const __mmask64 first = n - i >= UNIT ? ~0ull : n > i ? ~0ull >> (UNIT - (n - i)) : 0;
        _mm512_storeu_si512(some->end[j] + i, _mm512_maskz_loadu_epi8(first, at + i));
    }
    return some->end[j];
}

/* A UNIT of `weights` rows of i8, and of the digits of `rows` rows of x. */
INLINE void add_unit(const char *const *at, const int8_t *x, __m512i (*sum)[8][4], int rows, int weights, int digits)
{
    __m512i w[8];
    UNROLLED
    for (int j = 0; j < weights; j++)
        w[j] = _mm512_xor_si512(_mm512_loadu_si512(at[j]), _mm512_set1_epi8(-128));
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
    for (int d = 0; d < digits; d++) {
        __m512i of_x = _mm512_load_si512(x + (r * digits + d) * UNIT);
        __asm__("" : "+v"(of_x)); /* loaded once */
        UNROLLED
        for (int j = 0; j < weights; j++)
            add_bytes(&sum[r][j][d], w[j], of_x);
    }
}
/* A part of `weights` rows of i8 times the digits of `rows` rows of x from `first` on; there are `all`. */
INLINE void add_part(const digits_call *v, some_rows *some, int64_t part, vf *sums, int64_t apart, int all, int first,
                     int rows, int weights, int digits)
{
    const float *unit = v->scales + part * all + first;
    const int8_t *x = digits_at(v, part, 0, first);
    const char *at[8];
    int64_t n = least(v->c.k - part * PART, PART), ahead[8];
    __m512i sum[8][8][4];
    UNROLLED
    for (int j = 0; j < weights; j++) {
        at[j] = some->at[j] + (part - some->part) * PART;
        ahead[j] = first == 0 ? ahead_of(some, j, part, PART) : 0;
        UNROLLED
        for (int r = 0; r < rows; r++)
            UNROLLED
        for (int d = 0; d < digits; d++)
            sum[r][j][d] = _mm512_load_si512(sums_at(v, part, first) + (r * digits + d) * LANES);
    }
    for (; n >= UNIT; n -= UNIT) {
        UNROLLED
        for (int j = 0; j < weights && first == 0; j++)
            prefetch(at[j] + ahead[j], all);
        add_unit(at, x, sum, rows, weights, digits);
        UNROLLED
        for (int j = 0; j < weights; j++) {
            at[j] += UNIT;
            __asm__("" : "+r"(at[j])); /* an address without an index takes one operation less in each load */
        }
        x += all * digits * UNIT;
    }
    if (n > 0) {
        UNROLLED
        for (int j = 0; j < weights; j++)
            at[j] = row_end(some, j, at[j], n);
        add_unit(at, x, sum, rows, weights, digits);
    }
    UNROLLED
    for (int j = 0; j < weights; j++)
        UNROLLED
    for (int r = 0; r < rows; r++) {
        vf total = vf_of_ints((vi)sum[r][j][digits - 1]);
        UNROLLED
        for (int d = digits - 2; d >= 0; d--)
            total = vf_fma(total, vf_all(256), vf_of_ints((vi)sum[r][j][d]));
        vf *to = &sums[j * apart * all + first + r];
        *to = vf_fma(total, vf_all(unit[r]), *to);
    }
}

/* Scales of a row of w, and zeros of 4 bits, from each of which a register is read. */
typedef struct some_groups {
    float scale[GROUPS + LANES];
    int32_t zero[GROUPS + LANES];
} some_groups;
/* Those of `count` groups from `first` on. Whether a zero is large. */
INLINE int fill_groups(some_groups *to, const scales *s, int64_t row, int64_t first, int64_t count)
{
    int large = 0;
    for (int64_t g = 0; g < count; g += LANES) {
        const int64_t n = least(count - g, LANES);
        *(vf_loose *)(to->scale + g) = some_scales(s, row * s->row_stride + first + g, n);
        if (s->zero) {
            const __m512i zero = _mm512_cvtps_epi32((__m512)some_zeros(s, row * s->zero_stride + first + g, n));
            _mm512_storeu_si512(to->zero + g, zero);
            large |= !!_mm512_cmpgt_epi32_mask(zero, _mm512_set1_epi32(ZERO_MOST));
        }
    }
    return large;
}

/* In which lanes of a line which of its groups is, and of i8 where their halves are. */
typedef struct line_order {
    int64_t groups; /* 0: one for whole rows */
    int zeros;      /* of 4 bits: they are given */
    __m512i of_lane, first_half, second_half;
} line_order;
INLINE line_order line_order_of(int64_t group, int zeros)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    line_order o = {.groups = group ? LINE / group : 0, .zeros = zeros};
    o.of_lane = _mm512_srli_epi32(lane, group == 32 ? 2 : 3);
    o.first_half = group == 32   ? _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13)
                   : group == 64 ? _mm512_setr_epi64(0, 1, 2, 3, 8, 9, 10, 11)
                                 : _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    o.second_half = _mm512_add_epi64(o.first_half, _mm512_set1_epi64(group / 16));
    return o;
}
/* Takes from the sums of each row of w what they have besides (q - zero) x; `sum` is that of x. */
INLINE void take_zeros(__m512i *total, __m512i sum, const some_groups *groups, int64_t g, const line_order *o,
                       int kind, int weights)
{
    if (kind == ADZE_U8 && o->zeros) {
        UNROLLED
        for (int j = 0; j < weights; j++) {
            const int32_t *at = groups[j].zero + g;
            const __m512i zero = o->groups <= 1 ? _mm512_set1_epi32(*at)
                                                : _mm512_permutexvar_epi32(o->of_lane, _mm512_loadu_si512(at));
            total[j] = _mm512_sub_epi32(total[j], _mm512_mullo_epi32(sum, zero));
        }
        return;
    }
    const __m512i same = _mm512_slli_epi32(sum, kind == ADZE_U8 ? 3 : 7); /* a zero of 8; 128 more */
    UNROLLED
    for (int j = 0; j < weights; j++)
        total[j] = _mm512_sub_epi32(total[j], same);
}
/* A LINE of `weights` rows of w, whose groups begin with g. The digits of x are multiplied with both registers of w
   from the highest digit on, and put together as they are added; x_sums are the sums of x. */
INLINE void add_line(const char *const *at, const some_groups *groups, int64_t g, const line_order *o,
                     const int8_t *x, const int32_t *x_sums, vf (*sum)[8], int kind, int rows, int weights,
                     int digits)
{
    const int low = low_digits(kind, digits);
    const __m512i all_15 = _mm512_set1_epi8(15), all_128 = _mm512_set1_epi8(-128);
    /* A shift would have to wait for the only port that shifts, which adds products too. */
    const __m512i times_256 =
        _mm512_broadcast_i32x4(_mm_setr_epi8(-1, 0, 1, 2, -1, 4, 5, 6, -1, 8, 9, 10, -1, 12, 13, 14));
    __m512i w[8][2];
    vf scale[8];
    UNROLLED
    for (int j = 0; j < weights; j++) {
        const __m512i a = _mm512_loadu_si512(at[j]);
        if (kind == ADZE_U8) {
            w[j][0] = _mm512_and_si512(a, all_15);
            w[j][1] = _mm512_and_si512(_mm512_srli_epi16(a, 4), all_15);
        } else {
            const __m512i b = _mm512_loadu_si512(at[j] + UNIT);
            w[j][0] = _mm512_xor_si512(_mm512_permutex2var_epi64(a, o->first_half, b), all_128);
            w[j][1] = _mm512_xor_si512(_mm512_permutex2var_epi64(a, o->second_half, b), all_128);
        }
        scale[j] = o->groups <= 1
                       ? vf_all(groups[j].scale[g])
                       : (vf)_mm512_permutexvar_ps(o->of_lane, (__m512) * (const vf_loose *)(groups[j].scale + g));
    }
    UNROLLED
    for (int r = 0; r < rows; r++, x += digits * UNIT, x_sums += sums_of_line(kind, digits) * LANES) {
        __m512i total[8], above[8];
        UNROLLED
        for (int d = digits - 1; d >= 0; d--) {
            __m512i a = _mm512_load_si512(x + d * UNIT), b = _mm512_load_si512(x + (rows * digits + d) * UNIT);
            __asm__("" : "+v"(a), "+v"(b)); /* loaded once */
            UNROLLED
            for (int j = 0; j < weights; j++) {
                if (d == low - 1)
                    above[j] = total[j];
                total[j] = d == digits - 1 || d == low - 1 ? _mm512_setzero_si512()
                                                           : _mm512_shuffle_epi8(total[j], times_256);
                add_bytes(&total[j], w[j][0], a);
                add_bytes(&total[j], w[j][1], b);
            }
        }
        if (low)
            take_zeros(above, _mm512_load_si512(x_sums), groups, g, o, kind, weights);
        take_zeros(total, _mm512_load_si512(x_sums + (low ? LANES : 0)), groups, g, o, kind, weights);
        UNROLLED
        for (int j = 0; j < weights; j++) {
            vf of_group = vf_of_ints((vi)total[j]);
            if (low)
                of_group = vf_fma(vf_of_ints((vi)above[j]), vf_all(low == 1 ? 256 : 65536), of_group);
            sum[r][j] = vf_fma(of_group, scale[j], sum[r][j]);
        }
    }
}
/* `weights` rows of w in groups times the digits of all rows of x. */
INLINE void add_groups(const digits_call *v, const some_groups *groups, const line_order *order, some_rows *some,
                       vf *sums, int64_t apart, int kind, int rows, int weights, int digits)
{
    const int64_t bytes = kind == ADZE_U8 ? UNIT : LINE;
    const line_order o = *order;
    const char *at[8];
    int64_t g = 0;
    UNROLLED
    for (int j = 0; j < weights; j++)
        at[j] = some->at[j];
    for (int64_t part = some->part, left = some->n; left > 0; left -= PART, part++) {
        const float *unit = v->scales + part * rows;
        const int8_t *x = digits_at(v, part, 0, 0);
        const int32_t *x_sums = line_sums_at(v, part, 0, 0);
        int64_t n = least(left, PART), ahead[8];
        vf sum[8][8];
        UNROLLED
        for (int j = 0; j < weights; j++) {
            ahead[j] = ahead_of(some, j, part, PART / LINE * bytes);
            UNROLLED
            for (int r = 0; r < rows; r++)
                sum[r][j] = vf_all(0);
        }
        for (; n >= LINE; n -= LINE) {
            UNROLLED
            for (int j = 0; j < weights; j++) {
                prefetch(at[j] + ahead[j], rows);
                if (kind != ADZE_U8)
                    prefetch(at[j] + ahead[j] + UNIT, rows);
            }
            add_line(at, groups, g, &o, x, x_sums, sum, kind, rows, weights, digits);
            UNROLLED
            for (int j = 0; j < weights; j++) {
                at[j] += bytes;
                __asm__("" : "+r"(at[j])); /* as in add_part */
            }
            g += o.groups, x += rows * digits * LINE, x_sums += rows * sums_of_line(kind, digits) * LANES;
        }
        if (n > 0) {
            UNROLLED
            for (int j = 0; j < weights; j++)
                at[j] = row_end(some, j, at[j], kind == ADZE_U8 ? (n + 1) / 2 : n);
            add_line(at, groups, g, &o, x, x_sums, sum, kind, rows, weights, digits);
        }
        UNROLLED
        for (int j = 0; j < weights; j++)
            UNROLLED
        for (int r = 0; r < rows; r++) {
            vf *to = &sums[j * apart * rows + r];
            *to = vf_fma(sum[r][j], vf_all(unit[r]), *to);
        }
    }
}

/* The product of a row of w of which a zero is above ZERO_MOST. No quantizer makes such zeros. */
NO_INLINE float alone(const digits_call *v, int r, const scales *s, const char *at, int64_t row)
{
    const float *x = v->c.floats + r * v->c.k_floats;
    double sum = 0;
    for (int64_t i = 0; i < v->c.k; i++) {
        const float scale = float_at(s->scale, s->dtype, row * s->row_stride + i / s->group);
        sum += (double)x[i - i % 32 + i % 2 * LANES + i % 32 / 2] * number_at(s, at, row, i, ADZE_U8) * (double)scale;
    }
    return (float)sum;
}

/* `count` <= NEAR columns of weight w. The rows of w that are multiplied together are far from each other: in two
   places of a page of memory, processors do not see that both are read in order. Rows that are missing are the last
   one. */
INLINE void near_columns(const digits_call *v, const gemm_weight *w, int64_t column, int64_t count, float *y,
                         vf *sums, int kind, int grouped, int rows, int together, int step, int digits)
{
    const gemm_call *c = &v->c;
    const scales *s = &w->scales;
    const int64_t pass = PASS(rows), in_byte = kind == ADZE_U8 ? 2 : 1;
    const int64_t group = c->a->group, pass_groups = group ? pass / group : 0;
    const weight_rows w_rows = weight_rows_of(c, w);
    const line_order order = line_order_of(group, !!s->zero);
    const int64_t apart = (count + step - 1) / step, hop = most(AHEAD * in_byte / pass, 1);
    uint64_t large_zeros = 0;
    memset(sums, 0, sizeof *sums * SUMS_MOST);
    for (int64_t begin = 0, first = 0; begin < c->k; begin += pass, first += pass_groups) {
        some_rows some;
        some.part = begin / PART, some.n = least(c->k - begin, pass);
        const int64_t count_groups = group ? (some.n + group - 1) / group : 1;
        for (int64_t j = 0; j < apart; j++) {
            /* What is multiplied `hop` turns later: in this pass, in the next one, or in the next columns. */
            const int more = j + hop < apart, passes = begin + pass < c->k;
            const int64_t next = more ? j + hop : j + hop - apart + (passes ? 0 : NEAR(rows));
            const int64_t next_begin = more ? begin : passes ? begin + pass : 0;
            some_groups groups[8];
            for (int t = 0; t < step; t++) {
                const int64_t index = column + least(t * apart + j, count - 1);
                const int64_t next_index = least(column + t * apart + next, w->n - 1);
                some.at[t] = w_rows.data + index * w_rows.stride + begin / in_byte;
                some.next[t] = w_rows.data + next_index * w_rows.stride + next_begin / in_byte;
                if (grouped && fill_groups(&groups[t], s, index, first, count_groups))
                    large_zeros |= 1ull << (index - column);
            }
            if (grouped)
                add_groups(v, groups, &order, &some, sums + j * rows, apart, kind, rows, step, digits);
            for (int64_t part = some.part; part < least(v->parts, some.part + pass / PART) && !grouped; part++) {
                UNROLLED
                for (int r = 0; r < rows; r += together)
                    add_part(v, &some, part, sums + j * rows, apart, rows, r, together, step, digits);
            }
        }
    }
    for (int64_t j = 0; j < count; j++) {
        const char *at = w_rows.data + (column + j) * w_rows.stride;
        const float scale = grouped ? 1 : float_at(s->scale, s->dtype, (column + j) * s->row_stride);
        for (int r = 0; r < rows; r++)
            y[r * COLUMNS + j] =
                large_zeros >> j & 1 && r < c->count
                    ? alone(v, r, s, at, column + j)
                    : vf_sum(sums[j * rows + r]) * scale + rests_times(v, r, s, at, column + j, kind);
    }
}
/* `together` rows of x and `step` rows of w at a time: all digits of all sums are in registers. */
#define COLUMNS_OF(name, kind, grouped, rows, together, step, digits)                                                \
    NO_INLINE void name(const digits_call *v, const gemm_weight *w, int64_t column, int64_t count, float *y)         \
    {                                                                                                                \
        vf sums[SUMS_MOST];                                                                                          \
        for (int64_t j = 0; j < count; j += NEAR(rows))                                                              \
            near_columns(v, w, column + j, least(count - j, NEAR(rows)), y + j, sums, kind, grouped, rows, together, \
                         step, digits);                                                                              \
    }
COLUMNS_OF(i8_1, ADZE_I8, 0, 1, 1, 4, 3)
COLUMNS_OF(i8_2, ADZE_I8, 0, 2, 2, 4, 3)
COLUMNS_OF(i8_4, ADZE_I8, 0, 4, 4, 2, 3)
COLUMNS_OF(i8_8, ADZE_I8, 0, 8, 4, 2, 3)
COLUMNS_OF(i8_1_f32, ADZE_I8, 0, 1, 1, 4, 4)
COLUMNS_OF(i8_2_f32, ADZE_I8, 0, 2, 2, 3, 4)
COLUMNS_OF(i8_groups_1, ADZE_I8, 1, 1, 1, 4, 3)
COLUMNS_OF(i8_groups_2, ADZE_I8, 1, 2, 2, 2, 3)
COLUMNS_OF(i8_groups_4, ADZE_I8, 1, 4, 4, 2, 3)
COLUMNS_OF(i8_groups_8, ADZE_I8, 1, 8, 8, 2, 3)
COLUMNS_OF(i8_groups_1_f32, ADZE_I8, 1, 1, 1, 4, 4)
COLUMNS_OF(i8_groups_2_f32, ADZE_I8, 1, 2, 2, 2, 4)
COLUMNS_OF(i8_groups_4_f32, ADZE_I8, 1, 4, 4, 2, 4)
COLUMNS_OF(i8_groups_8_f32, ADZE_I8, 1, 8, 8, 2, 4)
COLUMNS_OF(u4_1, ADZE_U8, 1, 1, 1, 4, 3)
COLUMNS_OF(u4_2, ADZE_U8, 1, 2, 2, 4, 3)
COLUMNS_OF(u4_4, ADZE_U8, 1, 4, 4, 4, 3)
COLUMNS_OF(u4_8, ADZE_U8, 1, 8, 8, 2, 3)
COLUMNS_OF(u4_1_f32, ADZE_U8, 1, 1, 1, 4, 4)
COLUMNS_OF(u4_2_f32, ADZE_U8, 1, 2, 2, 4, 4)
COLUMNS_OF(u4_4_f32, ADZE_U8, 1, 4, 4, 4, 4)
COLUMNS_OF(u4_8_f32, ADZE_U8, 1, 8, 8, 2, 4)

static void body(void *context, int64_t begin, int64_t end)
{
    static const digits_columns by_rows[3][2][ROWS + 1] = {
        {{[1] = i8_1, [2] = i8_2, [4] = i8_4, [8] = i8_8}, {[1] = i8_1_f32, [2] = i8_2_f32}},
        {{[1] = i8_groups_1, [2] = i8_groups_2, [4] = i8_groups_4, [8] = i8_groups_8},
         {[1] = i8_groups_1_f32, [2] = i8_groups_2_f32, [4] = i8_groups_4_f32, [8] = i8_groups_8_f32}},
        {{[1] = u4_1, [2] = u4_2, [4] = u4_4, [8] = u4_8},
         {[1] = u4_1_f32, [2] = u4_2_f32, [4] = u4_4_f32, [8] = u4_8_f32}}};
    const digits_call *v = context;
    const int kind = v->c.kind == ADZE_U8 ? 2 : is_grouped(&v->c);
    blocks_of(v, begin, end, by_rows[kind][digits_of(&v->c) == 4][v->rows]);
}

/* ---- The call ---- */

/* Rows of x up to which cpu_avx512 is slower: it multiplies more of them in fewer operations, but each of small
   groups costs it more. Of few elements the digits of x cost more than they save. */
static int64_t rows_most(const adze_gemm_args *a)
{
    /* [w of 4 bits, of i8][x of 16 bits, of f32][groups of 32, 64 and 128, whole rows] */
    static const int8_t most[2][2][4] = {{{ROWS, ROWS, 2, 2}, {ROWS, 2, 1, 1}},
                                         {{ROWS, 2, 1, ROWS}, {ROWS, 1, 1, 2}}};
    const int bytes = a->w.dtype == ADZE_I8;
    if (bytes && a->group && a->x.shape[a->x.rank - 1] < PART / 2)
        return 0;
    const int group = a->group == 32 ? 0 : a->group == 64 ? 1 : a->group == 128 ? 2 : 3;
    return most[bytes][a->x.dtype == ADZE_F32][group];
}

int adze_gemm_cpu_vnni_accepts(adze_stream stream, const void *args);
int adze_gemm_cpu_vnni_accepts(adze_stream stream, const void *args)
{
    const adze_gemm_args *a = args;
    const int is_float = a->x.dtype == ADZE_BF16 || a->x.dtype == ADZE_F16 || a->x.dtype == ADZE_F32;
    (void)stream;
    return (a->w.dtype == ADZE_I8 || a->w.dtype == ADZE_U8) && is_float && a->x.shape[a->x.rank - 1] > 0 &&
           !(a->call.flags & ADZE_BATCH_INVARIANT) && !gemm_takes_panels(a, rows_most(a));
}

adze_status adze_gemm_cpu_avx512(adze_stream stream, const void *args);

ADZE_CPU_KERNEL(gemm)
{
    digits_call v = {0};
    gemm_init(&v.c, args);
    const int64_t rows = least(v.c.per_batch, ROWS);
    v.rows = rows > 4 ? 8 : rows > 2 ? 4 : rows;
    v.parts = (v.c.k + PART - 1) / PART;
    const int64_t each = v.parts * v.rows, sums = sums_of_part(&v.c) * (int64_t)sizeof(int32_t);
    if (v.rows == 0 || !digits_memory(&v, each * PART * digits_of(&v.c), each * sums, each * (int64_t)sizeof(float)))
        return adze_gemm_cpu_avx512(stream, args);
    return digits_all(&v, row_digits, body) ? ADZE_OK : adze_gemm_cpu_avx512(stream, args);
}
