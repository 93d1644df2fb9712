/* gemm of few rows of x with weights of i8 or of 4 bits in integers, on x86-64 processors that multiply matrices of
   bytes (AMX). A tile of sixteen rows of w, which are read as they are or taken apart into bytes, is multiplied with
   the four digits of four rows of x (gemm_digits.h): sixteen columns. Where a group ends, its sums become floats and
   are multiplied by its scale. */
enum {
    COLUMNS = 64, /* of out that a thread works on at a time: the digits of a part of x stay in the L1 cache */
    PART = 512,   /* elements of k whose digits have a power of two in common */
    BITS = 30,    /* of a whole number, besides its sign: four digits from -128 to 127 hold them */
    DIGITS = 4,
    SIDE = 16,         /* rows of a register of tiles */
    FOUR = SIDE / 4,   /* rows of x in one */
    STEP_ROWS = 32,    /* of w at a time: two registers */
    LINE = 128,        /* elements of k at a time */
    WINDOW = 16,       /* groups whose scales are floats at a time */
    SPANS = 4,         /* whose sums are stored before they become floats, of four rows of x */
    NUMBERS_SCALE = 16 /* weights of 4 bits are in the upper half of a byte */
};
#include "cpu/gemm_digits.h"

/* Columns that are multiplied while what the next ones need is prefetched: both are in the L2 cache. */
#define NEAR(kind) ((kind) == ADZE_U8 ? COLUMNS : COLUMNS / 2)

/* Elements of k whose products are added as integers: a group, or else a part, or a line where a zero may be
   subtracted. */
INLINE int64_t span_of(const gemm_call *c)
{
    return c->a->group ? c->a->group : c->kind == ADZE_U8 ? LINE : PART;
}
INLINE int64_t tiles_of(const digits_call *v) /* of digits of x */
{
    return v->rows / FOUR;
}
INLINE int64_t lines_of(const digits_call *v, int64_t part)
{
    return least((v->c.k + LINE - 1) / LINE - part * (PART / LINE), PART / LINE);
}

/* ---- Digits of x ---- */

/* Where the digits of a row begin for four elements from `at` on: [line][tile][LINE / 4][SIDE columns][4]. */
INLINE int8_t *digits_at(const digits_call *v, int64_t row, int64_t at)
{
    const int64_t tile = at / LINE * tiles_of(v) + row / FOUR;
    return v->digits + (tile * (LINE / 4) + at % LINE / 4) * SIDE * 4 + row % FOUR * DIGITS * 4;
}
/* Where the sixteen elements from i on are in a line, in the order in which w is read: of 4 bits, those of the lower
   halves of bytes are even elements. In the floats of x they alternate by sixteen. */
INLINE int64_t place_of(const gemm_call *c, int64_t i)
{
    const int64_t group = c->kind == ADZE_U8 ? span_of(c) : 32, t = i % group / LANES, half = group / LANES / 2;
    return i - i % group + (group == 32 ? t : t % 2 * half + t / 2) * LANES;
}
static int part_digits(digits_call *v, int64_t row, int64_t part, const float *x, int64_t n)
{
    const gemm_call *c = &v->c;
    const int packed = c->kind == ADZE_U8;
    const int64_t span = least(span_of(c), LINE), tiles = tiles_of(v), end = (n + STEP - 1) / STEP * STEP;
    const int64_t all = lines_of(v, part) * LINE;
    const int power = power_above(x, end, 0);
    if (power == INT32_MAX)
        return 0;
    const float unit = ldexpf(1, power - BITS), inverse = ldexpf(1, BITS - power);
    float *scale = v->scales + (part * tiles + row / FOUR) * SIDE + row % FOUR * DIGITS;
    for (int d = 0; d < DIGITS; d++)
        scale[d] = unit * (float)(1 << 8 * d) / (packed ? NUMBERS_SCALE : 1);
    const __m512i high = _mm512_set1_epi32((int)0x80808080u);
    const __m512i turn = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for (int64_t i = 0; i < all; i += LANES) { /* also of a row of zeros, and to the end of a line */
        const int64_t at = part * PART + i, element = packed ? at - at % 32 + at % 32 / LANES : at;
        __m512i number;
        if (!whole_numbers(v, row, element, packed ? 2 : 1, x + i, end - i, unit, inverse, 0, &number))
            return 0;
        /* Each byte with 128 more, carried to the next, and without these again; then of four elements, by digits. */
        number = _mm512_xor_si512(_mm512_add_epi32(number, high), high);
        number = _mm512_shuffle_epi8(number, turn);
        int8_t *to = digits_at(v, row, place_of(c, at));
        _mm_storeu_si128((__m128i *)(void *)to, _mm512_castsi512_si128(number));
        _mm_storeu_si128((__m128i *)(void *)(to + SIDE * 4), _mm512_extracti32x4_epi32(number, 1));
        _mm_storeu_si128((__m128i *)(void *)(to + SIDE * 8), _mm512_extracti32x4_epi32(number, 2));
        _mm_storeu_si128((__m128i *)(void *)(to + SIDE * 12), _mm512_extracti32x4_epi32(number, 3));
    }
    for (int64_t i = 0; packed && i < all; i += span) { /* for zeros */
        const int64_t at = part * PART + i;
        __m128i sum = _mm_setzero_si128();
        for (int64_t e = 0; e < span; e += 4)
            sum = _mm_dpbusd_epi32(sum, _mm_set1_epi8(1),
                                   _mm_loadu_si128((const __m128i *)(const void *)digits_at(v, row, at + e)));
        _mm_storeu_si128((__m128i *)(void *)(v->sums + (at / span * tiles + row / FOUR) * SIDE + row % FOUR * DIGITS),
                         _mm_and_si128(sum, _mm_set1_epi32(0xffff))); /* as numbers of 16 bits */
    }
    return 1;
}
static void row_digits(void *context, int64_t begin, int64_t end)
{
    rows_digits(context, begin, end, part_digits);
}

/* ---- Products ---- */

typedef struct products {
    float total[COLUMNS][2][SIDE]; /* of a row of w, by the digits of rows of x */
    float scale[COLUMNS][WINDOW];
    int16_t zero[COLUMNS][WINDOW];        /* 8 - zero, times NUMBERS_SCALE */
    int32_t sums[SPANS][STEP_ROWS][SIDE]; /* [span][tile of x] */
    uint8_t staged[2][STEP_ROWS][LINE];
} products;

/* A line of STEP_ROWS rows of a block of w, or fewer at its end. */
typedef struct place {
    int64_t part, j, line;
} place;
INLINE place place_after(const digits_call *v, place at, int64_t count)
{
    if (++at.line < lines_of(v, at.part))
        return at;
    at.line = 0, at.j += STEP_ROWS;
    if (at.j >= count)
        at.j = 0, at.part++;
    return at;
}

/* The scales and zeros of WINDOW groups from `group` on. */
INLINE void fill_window(products *p, const scales *s, int64_t column, int64_t count, int64_t group, int64_t groups)
{
    const int64_t n = least(groups - group, WINDOW);
    for (int64_t j = 0; j < count; j++) {
        const int64_t at = (column + j) * s->row_stride + group;
        const vf scale = some_scales(s, at, n);
        *(vf_loose *)p->scale[j] = groups == 1 ? vf_all(scale[0]) : scale;
        __builtin_prefetch(s->scale + (at + COLUMNS * s->row_stride) * (s->dtype == ADZE_F32 ? 4 : 2), 0, 2);
        if (s->zero) {
            __m512i zero = _mm512_cvtps_epi32((__m512)some_zeros(s, (column + j) * s->zero_stride + group, n));
            if (groups == 1)
                zero = _mm512_broadcastd_epi32(_mm512_castsi512_si128(zero));
            zero = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(8), zero), 4);
            _mm256_storeu_si256((__m256i *)(void *)p->zero[j], _mm512_cvtepi32_epi16(zero));
        }
    }
}

/* What is multiplied next, which is prefetched a line of the cache at a time. */
typedef struct asked {
    const char *row;
    int64_t at, bytes, stride;
} asked;
INLINE void ask(asked *a, int64_t lines)
{
    for (; lines > 0; lines--) {
        __builtin_prefetch(a->row + a->at, 0, 2);
        a->at += LINE_BYTES;
        if (a->at >= a->bytes) {
            a->at = 0;
            a->row += a->stride;
        }
    }
}

/* Copies a line. Weights of 4 bits become bytes: each less 8, times NUMBERS_SCALE. The
   rows of a weight may be so far apart that lines of sixteen evict each other from the L1 cache: tiles are not loaded
   from there. */
INLINE void stage_line(uint8_t (*to)[LINE], const char *at, int64_t stride, int64_t rows, int64_t n, int64_t span,
                       asked *ahead, int kind)
{
    if (rows <= 0)
        return;
    const __mmask64 first = n >= 64 ? ~0ull : ~0ull >> (64 - n);
    const __mmask64 last = n >= LINE ? ~0ull : n > 64 ? ~0ull >> (LINE - n) : 0;
    const __m512i upper = _mm512_set1_epi8((char)0xf0), sign = _mm512_set1_epi8(-128);
    const __m512i low =
        span == 64 ? _mm512_setr_epi64(0, 1, 2, 3, 8, 9, 10, 11) : _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i high = _mm512_add_epi64(low, _mm512_set1_epi64(4));
    for (int64_t j = 0; j < rows; j++, at += stride) {
        __m512i a = _mm512_maskz_loadu_epi8(first, at), b;
        if (j % 2 || kind == ADZE_I8)
            ask(ahead, 1);
        if (kind == ADZE_U8) { /* (byte & upper) ^ sign, of even elements and of odd ones */
            b = _mm512_ternarylogic_epi32(a, upper, sign, 0x6a);
            a = _mm512_ternarylogic_epi32(_mm512_slli_epi16(a, 4), upper, sign, 0x6a);
            if (span != LINE) {
                const __m512i even = a;
                a = _mm512_permutex2var_epi64(even, low, b);
                b = _mm512_permutex2var_epi64(even, high, b);
            }
        } else {
            b = _mm512_maskz_loadu_epi8(last, at + 64);
        }
        _mm512_storeu_si512(to[j], a);
        _mm512_storeu_si512(to[j] + 64, b);
    }
}

/* Sums that are stored and are yet to be added: of n spans and STEP_ROWS rows of w from j on. */
typedef struct pending {
    int64_t j, window, n;
    const int32_t *sums; /* of digits */
    const float *scale;  /* of the part */
} pending;
INLINE void add_spans(products *p, const pending *d, int64_t n, asked *ahead, int has_zeros, int tiles)
{
    for (int t = 0; t < tiles; t++) {
        const vf part = *(const vf_loose *)(d->scale + t * SIDE);
        for (int64_t i = 0; i < STEP_ROWS; i++) {
            const int64_t j = d->j + i;
            if (i % (2 * tiles) == 0)
                ask(ahead, 2);
            vf sum = vf_all(0);
            for (int64_t s = 0; s < n; s++) {
                __m512i c = _mm512_loadu_si512(p->sums[s * tiles + t][i]);
                if (has_zeros) /* the upper half of each sum of digits is zero */
                    c = _mm512_dpwssd_epi32(c, _mm512_loadu_si512(d->sums + (s * tiles + t) * SIDE),
                                            _mm512_set1_epi16(p->zero[j][d->window + s]));
                sum = vf_fma(vf_of_ints((vi)c), vf_all(p->scale[j][d->window + s]), sum);
            }
            vf_loose *to = (vf_loose *)p->total[j][t];
            *to = vf_fma(sum, part, *to);
        }
    }
}
INLINE void add_pending(products *p, pending *d, asked *ahead, int has_zeros, int tiles)
{
    if (has_zeros)
        add_spans(p, d, d->n, ahead, 1, tiles);
    else if (d->n == SPANS / tiles)
        add_spans(p, d, SPANS / tiles, ahead, 0, tiles);
    else
        add_spans(p, d, d->n, ahead, 0, tiles);
    d->n = 0;
}

/* The first elements of a line of w, as many as a tile is configured for, times their digits. */
INLINE void multiply(const uint8_t *w, const int8_t *digits, int begins, int tiles)
{
    if (begins) {
        _tile_zero(0);
        _tile_zero(1);
        if (tiles == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    _tile_loadd(6, digits, SIDE * 4);
    _tile_loadd(4, w, LINE);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(5, w + SIDE * LINE, LINE);
    _tile_dpbssd(1, 5, 6);
    if (tiles == 2) {
        _tile_loadd(7, digits + LINE * SIDE, SIDE * 4);
        _tile_dpbssd(2, 4, 7);
        _tile_dpbssd(3, 5, 7);
    }
}
INLINE void store_sums(int32_t (*to)[SIDE], int tiles)
{
    _tile_stored(0, to, SIDE * 4);
    _tile_stored(1, to + SIDE, SIDE * 4);
    if (tiles == 2) {
        _tile_stored(2, to + 2 * SIDE, SIDE * 4);
        _tile_stored(3, to + 3 * SIDE, SIDE * 4);
    }
}

/* A line is copied while the one before it is multiplied, and sums are added when the next ones are: what is stored
   is not waited for. The registers are configured here and released, as others of the process use them too. */
INLINE void add_lines(const digits_call *v, const gemm_weight *w, products *p, int64_t column, int64_t count,
                      int kind, int tiles)
{
    const gemm_call *c = &v->c;
    const scales *s = &w->scales;
    const weight_rows rows = weight_rows_of(c, w);
    const char *data = rows.data + column * rows.stride;
    const int64_t line_bytes = kind == ADZE_U8 ? LINE / 2 : LINE, part_bytes = line_bytes * (PART / LINE);
    const int64_t bytes = kind == ADZE_U8 ? (c->k + 1) / 2 : c->k;
    const int64_t span = span_of(c), step = least(span, 64), steps = LINE / step, span_steps = span / step;
    const int64_t groups = c->a->group ? (c->k + span - 1) / span : 1, window_parts = most(WINDOW * span / PART, 1);
    pending d = {.n = 0};
    place at = {0, 0, -1}, next;
    int64_t turn = 0, done = 0; /* of a span: steps */
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1,
                .bytes = {64, 64, 64, 64, (uint16_t)step, (uint16_t)step, 64, 64},
                .rows = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, (uint8_t)(step / 4), (uint8_t)(step / 4)}};
    asked ahead = {data + NEAR(kind) * rows.stride, 0, bytes, rows.stride};
    _tile_loadconfig(&config);
    for (; at.part < v->parts; at = next, turn ^= 1) {
        next = at.line < 0 ? (place){0, 0, 0} : place_after(v, at, count);
        const int64_t from = next.part * part_bytes + next.line * line_bytes;
        const int64_t to_stage = next.part < v->parts ? least(count - next.j, STEP_ROWS) : 0;
        const char *next_data = data + next.j * rows.stride + from;
        if (at.line < 0) { /* the first line */
            stage_line(p->staged[turn ^ 1], next_data, rows.stride, to_stage, bytes - from, span, &ahead, kind);
            continue;
        }
        if (d.n == SPANS / tiles || (d.n && at.line == 0))
            add_pending(p, &d, &ahead, s->zero != NULL, tiles);
        if (at.line == 0 && at.j == 0 && (at.part == 0 || (c->a->group && at.part % window_parts == 0)))
            fill_window(p, s, column, count, at.part * PART / span, groups);
        const int8_t *digits = v->digits + (at.part * (PART / LINE) + at.line) * tiles * LINE * SIDE;
        const int ends = at.line + 1 == lines_of(v, at.part);
        __asm__ volatile("" ::: "memory"); /* loads of tiles do not say that they read memory */
        for (int64_t e = 0; e < steps; e++) {
            const int64_t some = STEP_ROWS / steps;
            stage_line(p->staged[turn ^ 1] + e * some, next_data + e * some * rows.stride, rows.stride,
                       least(to_stage - e * some, some), bytes - from, span, &ahead, kind);
            ask(&ahead, kind == ADZE_U8 ? 8 / steps : 16 / steps);
            multiply(p->staged[turn][0] + e * step, digits + e * step * SIDE, done == 0, tiles);
            if (++done < span_steps && !(ends && e + 1 == steps))
                continue;
            done = 0;
            if (d.n == SPANS / tiles) /* spans are shorter than lines */
                add_pending(p, &d, &ahead, s->zero != NULL, tiles);
            if (d.n == 0) {
                const int64_t first = most(at.part * (PART / step) + at.line * steps + e + 1 - span_steps, 0);
                d = (pending){.j = at.j,
                              .window = c->a->group ? first / span_steps % WINDOW : 0,
                              .sums = v->sums + first / span_steps * tiles * SIDE,
                              .scale = v->scales + at.part * tiles * SIDE};
            }
            store_sums(p->sums[d.n++ * tiles], tiles);
        }
    }
    if (d.n)
        add_pending(p, &d, &ahead, s->zero != NULL, tiles);
    _tile_release();
}

/* The four digits of a row of x are added: y[row][j] of four rows of w. */
INLINE void add_digits(const float (*total)[2][SIDE], int tile, float *y)
{
    const __m512 a = _mm512_loadu_ps(total[0][tile]), b = _mm512_loadu_ps(total[1][tile]);
    const __m512 c = _mm512_loadu_ps(total[2][tile]), d = _mm512_loadu_ps(total[3][tile]);
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512 sum = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    y += tile * FOUR * COLUMNS;
    _mm_storeu_ps(y, _mm512_castps512_ps128(sum));
    _mm_storeu_ps(y + COLUMNS, _mm512_extractf32x4_ps(sum, 1));
    _mm_storeu_ps(y + 2 * COLUMNS, _mm512_extractf32x4_ps(sum, 2));
    _mm_storeu_ps(y + 3 * COLUMNS, _mm512_extractf32x4_ps(sum, 3));
}
INLINE void columns_of(const digits_call *v, const gemm_weight *w, int64_t column, int64_t count, float *y, int kind,
                       int tiles)
{
    const gemm_call *c = &v->c;
    const weight_rows rows = weight_rows_of(c, w);
    for (int64_t first = 0; first < count; first += NEAR(kind)) {
        const int64_t near = least(count - first, NEAR(kind));
        products p;
        memset(&p, 0, sizeof p); /* also what rows that are missing would have */
        add_lines(v, w, &p, column + first, near, kind, tiles);
        for (int64_t j = 0; j < near; j += 4)
            for (int t = 0; t < tiles; t++)
                add_digits((const float(*)[2][SIDE])p.total + j, t, y + first + j);
    }
    for (int r = 0; r < c->count; r++)
        for (int64_t j = 0; j < count && v->rest_count[r]; j++)
            y[r * COLUMNS + j] +=
                rests_times(v, r, &w->scales, rows.data + (column + j) * rows.stride, column + j, kind);
}
#define COLUMNS_OF(name, kind, tiles)                                                                                \
    NO_INLINE void name(const digits_call *v, const gemm_weight *w, int64_t column, int64_t count, float *y)         \
    {                                                                                                                \
        columns_of(v, w, column, count, y, kind, tiles);                                                             \
    }
COLUMNS_OF(columns_i8, ADZE_I8, 1)
COLUMNS_OF(columns_i8_eight, ADZE_I8, 2)
COLUMNS_OF(columns_u4, ADZE_U8, 1)
COLUMNS_OF(columns_u4_eight, ADZE_U8, 2)

static void body(void *context, int64_t begin, int64_t end)
{
    const digits_call *v = context;
    if (v->c.kind == ADZE_I8)
        blocks_of(v, begin, end, tiles_of(v) == 1 ? columns_i8 : columns_i8_eight);
    else
        blocks_of(v, begin, end, tiles_of(v) == 1 ? columns_u4 : columns_u4_eight);
}

/* ---- The call ---- */

int adze_gemm_cpu_amx_int8_accepts(adze_stream stream, const void *args);
int adze_gemm_cpu_amx_int8_accepts(adze_stream stream, const void *args)
{
    const adze_gemm_args *a = args;
    const int zeros = a->w_zero.dtype || a->w2_zero.dtype || a->w3_zero.dtype;
    /* Up to how many rows of x cpu_vnni or cpu_avx512 is as fast: memory limits them. */
    const int few = a->w.dtype == ADZE_I8 ? 4 : zeros && (a->group == 32 || a->group == 64) ? 0 : 1;
    (void)stream;
    return (a->w.dtype == ADZE_I8 || a->w.dtype == ADZE_U8) && (a->x.dtype == ADZE_BF16 || a->x.dtype == ADZE_F16) &&
           a->x.shape[a->x.rank - 1] > 0 && !(a->call.flags & ADZE_BATCH_INVARIANT) && !gemm_takes_panels(a, ROWS) &&
           gemm_takes_panels(a, few);
}

adze_status adze_gemm_cpu_avx512(adze_stream stream, const void *args);

ADZE_CPU_KERNEL(gemm)
{
    digits_call v = {0};
    gemm_init(&v.c, args);
    v.rows = least(v.c.per_batch, ROWS) > FOUR ? 2 * FOUR : FOUR;
    v.parts = (v.c.k + PART - 1) / PART;
    const int64_t size = v.parts * PART * SIDE * tiles_of(&v), spans = v.parts * PART / 32;
    const int64_t all_scales = v.parts * tiles_of(&v) * SIDE * (int64_t)sizeof(float);
    if (!digits_memory(&v, size, spans * tiles_of(&v) * SIDE * (int64_t)sizeof(int32_t), all_scales))
        return adze_gemm_cpu_avx512(stream, args);
    return digits_all(&v, row_digits, body) ? ADZE_OK : adze_gemm_cpu_avx512(stream, args);
}
