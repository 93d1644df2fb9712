/* gemm on the CPU. Many rows of x are packed (gemm_panels.h). Few are converted to floats once. Threads take blocks
   of rows of w, which are read from memory once and multiplied with up to eight rows of x at a time: each output has
   one vector of sums. Of a block of w, a part of all rows is multiplied after the other, so that the part of x stays
   in the L1 cache. A row's sums do not depend on how many others there are. */
#include "cpu/gemm_tile.h"

#include "cpu/gemm_i8.h"
#include "cpu/gemm_panels.h"

enum {
    ROWS = 8,          /* of x at a time */
    COLUMNS = 32,      /* of out that a thread works on at a time */
    ROWS_MOST = 64,    /* of x that are converted at a time */
    CUT = 512,         /* elements of k whose sum is scaled at least */
    LINES_MOST = 1024, /* elements of k at a time, where weights of 4 bits are read in lines */
    ROW_AHEAD = 1024   /* bytes from what is read to what is prefetched, where rows of w are read whole */
};
/* Elements of k and columns at a time: those of x and the sums stay in the L1 cache. One row of x may leave it, so
   that w is read in its order in memory. */
#define DEPTH(rows) ((rows) == 8 ? 512 : (rows) == 1 ? BLOCK : 1024)
#define NEAR(rows)  ((rows) == 8 ? 18 : COLUMNS)
enum { SUMS_MOST = (NEAR(8) + 8) * 8 }; /* with columns that are missing */

/* As many rows of w as there are registers for sums. */
#if VF_PARTS == 1 || defined(__aarch64__)
#    define WEIGHTS(rows) ((rows) == 1 ? 8 : (rows) <= 4 ? 4 : 3)
#else
#    define WEIGHTS(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 4 : (rows) == 4 ? 2 : 1)
#endif
#define LINE_WEIGHTS(rows) ((rows) == 1 ? 8 : (rows) <= 4 ? 4 : 3) /* of 4 bits, in lines */

/* The rows of w that are multiplied at a time, and where their scales are. */
typedef struct some_rows {
    const char *at[8];
    int64_t scale[8], zero[8];
    int64_t ahead, ahead_end; /* bytes from what is read to what is prefetched; where less than `ahead` is left */
} some_rows;

/* Bytes of n elements of a row of w. */
INLINE int64_t bytes_of(int kind, int64_t n)
{
    return kind == ADZE_U8 ? n / 2 : n * size_of(kind);
}

/* sum += a * b, in the register of the sum: gcc would have it in that of a or b, and move it. */
INLINE void add_product(vf *sum, vf a, vf b)
{
#if defined(__AVX2__)
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(*sum) : "v"(a), "v"(b));
#else
    *sum = vf_fma(a, b, *sum);
#endif
}

/* A vector of each row of w times one of each row of x. */
INLINE void add_rows(vf (*sum)[8], const vf *v, const float *x, int64_t k_floats, int rows, int weights)
{
    UNROLLED
    for (int r = 0; r < rows; r++) {
        const vf a = *(const vf_loose *)x;
        UNROLLED
        for (int j = 0; j < weights; j++)
            add_product(&sum[r][j], a, v[j]);
        x += k_floats;
        if (rows == 8) /* there are no registers for eight addresses */
            __asm__("" : "+r"(x));
    }
}

/* The STEP elements at `at` of these rows, and at x of `rows` rows of x. d is of quantised weights. */
INLINE void add_step(const char *const *at, int64_t offset, const dequantise *d, const float *x, int64_t k_floats,
                     vf (*sum)[8], int kind, int rows, int weights)
{
    UNROLLED
    for (int p = 0; p < 2 * VF_PARTS; p++) {
        vf v[8];
        UNROLLED
        for (int j = 0; j < weights; j++)
            v[j] = (is_quantised(kind) ? quantised_numbers(at[j] + offset, kind, 0, STEP, &d[j])
                                       : row_load32(at[j] + offset, kind, 0))
                       .part[p];
        add_rows(sum, v, x + p * VF_WIDTH, k_floats, rows, weights);
    }
}
/* `count` elements from `at` and x on, a multiple of STEP; both are moved on. */
INLINE void add_steps(const char **at, const dequantise *d, const float **x, int64_t k_floats, int64_t ahead,
                      int64_t count, vf (*sum)[8], int kind, int rows, int weights)
{
    UNROLLED
    for (int j = 0; j < weights; j++)
        for (int64_t b = 0; b < bytes_of(kind, count); b += LINE_BYTES)
            if (rows == 1)
                __builtin_prefetch(at[j] + ahead + b);
            else
                __builtin_prefetch(at[j] + ahead + b, 0, 2);
    UNROLLED
    for (int64_t t = 0; t < count; t += STEP)
        add_step(at, bytes_of(kind, t), d, *x + t, k_floats, sum, kind, rows, weights);
    UNROLLED
    for (int j = 0; j < weights; j++) {
        at[j] += bytes_of(kind, count);
        __asm__("" : "+r"(at[j])); /* an address without an index takes one operation less in each load */
    }
    *x += count;
}
/* The n < STEP elements at the end of these rows; x has zeros after them. */
INLINE void add_end(const char *const *at, const dequantise *d, const float *x, int64_t k_floats, int64_t n,
                    vf (*sum)[8], int kind, int rows, int weights)
{
    vf32 v[8];
    UNROLLED
    for (int j = 0; j < weights; j++)
        v[j] = is_quantised(kind) ? quantised_numbers(at[j], kind, 0, n, &d[j]) : row_load32_part(at[j], kind, 0, n);
    UNROLLED
    for (int p = 0; p < 2 * VF_PARTS; p++) {
        vf part[8];
        UNROLLED
        for (int j = 0; j < weights; j++)
            part[j] = v[j].part[p];
        add_rows(sum, part, x + p * VF_WIDTH, k_floats, rows, weights);
    }
}
/* Elements from i to `to`, a line of the cache at a time. */
INLINE void add_products(const some_rows *w, const dequantise *d, const float *x, int64_t k_floats, int64_t i,
                         int64_t to, int64_t ahead, vf (*sum)[8], int kind, int rows, int weights)
{
    const int64_t line = most(LINE_BYTES / bytes_of(kind, STEP), 1) * STEP;
    const char *at[8];
    UNROLLED
    for (int j = 0; j < weights; j++)
        at[j] = w->at[j] + bytes_of(kind, i);
    x += i;
    for (; to - i >= line; i += line)
        add_steps(at, d, &x, k_floats, ahead, line, sum, kind, rows, weights);
    for (; to - i >= STEP && line > STEP; i += STEP)
        add_steps(at, d, &x, k_floats, ahead, STEP, sum, kind, rows, weights);
    if (i < to)
        add_end(at, d, x, k_floats, to - i, sum, kind, rows, weights);
}

/* Adds the products of elements from i to `to` of `weights` rows of w and `rows` rows of x to sums[weight][row].
   Those of quantised weights are multiplied by the scale of a group when they are added, and of a long group every
   CUT: at the same elements for any number of rows. Sums of the next row of w are `apart` columns further. */
INLINE void add_part(const some_rows *w, const scales *s, const float *x, int64_t k_floats, int64_t i, int64_t to,
                     vf *sums, int64_t apart, int kind, int rows, int weights)
{
    const int scaled = is_scaled_later(kind), grouped = is_quantised(kind);
    /* Whole steps up to where less than `ahead` is left. */
    const int64_t body = rows > 1 ? to : (to - w->ahead * STEP / bytes_of(kind, STEP)) / STEP * STEP;
    int64_t group = grouped ? i / s->group : 0, group_end = grouped ? (group + 1) * s->group : 0;
    vf sum[8][8];
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
    for (int j = 0; j < weights; j++)
        sum[r][j] = scaled ? vf_all(0) : sums[j * apart * rows + r];
    for (int64_t end = to; i < to; i = end) {
        dequantise d[8];
        end = i < body ? body : to;
        if (grouped) {
            end = least(least(to, group_end), i - i % CUT + CUT);
            for (int j = 0; j < weights; j++)
                d[j] = dequantise_at(s, kind, w->scale[j] + group, w->zero[j] + group);
            if (end == group_end)
                group++, group_end += s->group;
        }
        const int64_t ahead = rows > 1 || i < body ? w->ahead : w->ahead_end;
        add_products(w, d, x, k_floats, i, end, ahead, sum, kind, rows, weights);
        UNROLLED
        for (int r = 0; r < rows; r++)
            UNROLLED
        for (int j = 0; j < weights && scaled; j++) {
            sums[j * apart * rows + r] = vf_fma(sum[r][j], vf_all(d[j].scale), sums[j * apart * rows + r]);
            sum[r][j] = vf_all(0);
        }
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
    for (int j = 0; j < weights && !scaled; j++)
        sums[j * apart * rows + r] = sum[r][j];
}

#if defined(__AVX512F__)
/* ---- Weights of 4 bits, a line of the cache at a time ---- */

/* 128 weights of a row of w are 16 words, which are read at each of their bytes: the lowest 4 bits, and after a shift
   the next ones, index a table of q - zero. So element 8 * lane + t is in vector t of eight, and x is in this order
   too. A group is a line or the whole row. */
enum { LINE = 128, LINE_PARTS = LINE / LANES };

INLINE int takes_lines(const gemm_call *c)
{
    return c->kind == ADZE_U8 && c->weight[0].scales.group >= LINE;
}
/* Rows of x, from the order of thirty-two weights of 4 bits: even elements, then odd ones. */
NO_INLINE void order_lines(void *context, int64_t begin, int64_t end)
{
    const gemm_call *c = context;
    const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    for (int64_t r = begin; r < end; r++)
        for (int64_t i = 0; i < c->k; i += LINE) {
            float *x = c->floats + r * c->k_floats + i;
            __m512 from[LINE_PARTS];
            for (int t = 0; t < LINE_PARTS; t++)
                from[t] = i + t / 2 * STEP < c->k ? _mm512_loadu_ps(x + t * LANES) : _mm512_setzero_ps();
            for (int t = 0; t < LINE_PARTS; t++) {
                const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(t / 2));
                const __m512 *half = from + t % 2;
                _mm512_storeu_ps(x + t * LANES,
                                 _mm512_mask_blend_ps(0xff00, _mm512_permutex2var_ps(half[0], at, half[2]),
                                                      _mm512_permutex2var_ps(half[4], at, half[6])));
            }
        }
}

/* A line of each row and of x. Near the end of rows of w it is in `last`, with zeros after the row. */
INLINE void add_line(const char *const *at, const __m512i *last, const vf *table, const float *x, int64_t k_floats,
                     vf (*sum)[8], int rows, int weights)
{
    __m512i words[8];
    UNROLLED
    for (int t = 0; t < LINE_PARTS; t++) {
        vf v[8];
        UNROLLED
        for (int j = 0; j < weights; j++) {
            if (t % 2 == 0 || rows == 8)
                words[j] = last ? _mm512_srli_epi32(last[j], (unsigned)t / 2 * 8) : _mm512_loadu_si512(at[j] + t / 2);
            if (t % 2)
                words[j] = _mm512_srli_epi32(words[j], 4);
            if (rows < 8) /* loaded once; with eight rows of x there is no register for it */
                __asm__("" : "+v"(words[j]));
            v[j] = (vf)_mm512_permutexvar_ps(words[j], (__m512)table[j]);
        }
        add_rows(sum, v, x + t * LANES, k_floats, rows, weights);
    }
}
/* As add_part, of rows of k elements. */
INLINE void add_lines(const some_rows *w, const scales *s, const float *x, int64_t k_floats, int64_t i, int64_t to,
                      int64_t k, vf *sums, int64_t apart, int rows, int weights)
{
    const vf each = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int whole = s->group > LINE;
    const int64_t group = whole ? 0 : i / LINE, groups = whole ? 1 : (to - i + LINE - 1) / LINE;
    const char *at[8];
    float scale[8][LANES], zero[8][LANES];
    vf sum[8][8];
    UNROLLED
    for (int j = 0; j < weights; j++) {
        *(vf_loose *)scale[j] = some_scales(s, w->scale[j] + group, groups);
        *(vf_loose *)zero[j] = some_zeros(s, w->zero[j] + group, groups);
        at[j] = w->at[j] + i / 2;
        UNROLLED
        for (int r = 0; r < rows; r++)
            sum[r][j] = sums[j * apart * rows + r];
    }
    x += i;
    for (int64_t g = 0; i < to; i += LINE, x += LINE, g += !whole) {
        vf table[8];
        UNROLLED
        for (int j = 0; j < weights; j++) {
            __builtin_prefetch(at[j] + w->ahead, 0, 2);
            table[j] = (each - zero[j][g]) * scale[j][g];
        }
        if ((k - i + 1) / 2 >= LINE_BYTES + 3) { /* it is read from each of the first four bytes on */
            add_line(at, NULL, table, x, k_floats, sum, rows, weights);
        } else {
            __m512i last[8];
            for (int j = 0; j < weights; j++)
                last[j] = _mm512_maskz_loadu_epi8(~0ull >> (LINE_BYTES - least((k - i + 1) / 2, LINE_BYTES)), at[j]);
            add_line(at, last, table, x, k_floats, sum, rows, weights);
        }
        UNROLLED
        for (int j = 0; j < weights; j++) {
            at[j] += LINE_BYTES;
            __asm__("" : "+r"(at[j]));
        }
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
    for (int j = 0; j < weights; j++)
        sums[j * apart * rows + r] = sum[r][j];
}
#endif

/* Prefetches what follows in memory, and at the end of row j of `apart` what is read after it: of the next row, of
   the next part of all rows, or of the next block. The part of a row is that from byte `from` to byte `to`. */
INLINE void prefetch_in_order(some_rows *some, int64_t stride, int64_t j, int64_t apart, int64_t from, int64_t to,
                              int last)
{
    const int64_t next_row = j + 1 < apart ? 1 : last ? COLUMNS - apart + 1 : 1 - apart;
    const int64_t next = next_row * stride + (j + 1 < apart ? from : last ? 0 : to);
    some->ahead = least(ROW_AHEAD, to - from) / LINE_BYTES * LINE_BYTES;
    some->ahead_end = next - to + some->ahead;
}

/* `count` <= NEAR columns of weight w for `rows` rows of x. The rows of w that are multiplied at a time are `apart`
   from each other: of two that share a page of memory, a processor does not see that each is read in order. Rows that
   are missing at the end are the last one again. */
INLINE void near_columns(const gemm_call *c, const gemm_weight *w, const float *x, int64_t column, int64_t count,
                         float *y, vf *sums, int kind, int lines, int rows)
{
    const int step = lines ? LINE_WEIGHTS(rows) : WEIGHTS(rows);
    const int64_t depth = lines ? least(DEPTH(rows), LINES_MOST) : DEPTH(rows);
    const int64_t turns = (count + step - 1) / step, apart = lines ? 1 : turns;
    const weight_rows w_rows = weight_rows_of(c, w);
    for (int r = 0; r < rows; r++)
        memset(y + r * COLUMNS, 0, (size_t)count * sizeof *y);
    for (int64_t i = 0; i < c->k; i += depth) {
        const int64_t to = least(c->k, i + depth);
        if (i % BLOCK == 0)
            memset(sums, 0, sizeof *sums * SUMS_MOST);
        for (int64_t turn = 0; turn < turns; turn++) {
            const int64_t j = lines ? turn * step : turn;
            some_rows some;
            some.ahead = to < c->k ? bytes_of(kind, depth) : NEAR(rows) * w_rows.stride - bytes_of(kind, i);
            some.ahead_end = some.ahead;
            if (rows == 1 && !lines)
                prefetch_in_order(&some, w_rows.stride, j, apart, bytes_of(kind, i), bytes_of(kind, to), to == c->k);
            for (int t = 0; t < step; t++) {
                const int64_t row = column + least(j + t * apart, count - 1);
                some.at[t] = w_rows.data + row * w_rows.stride;
                if (is_quantised(kind)) {
                    const int64_t at = w->scales.group_rows == 1 ? row : row / w->scales.group_rows;
                    some.scale[t] = at * w->scales.row_stride;
                    some.zero[t] = at * w->scales.zero_stride;
                }
            }
#if defined(__AVX512F__)
            if (lines)
                add_lines(&some, &w->scales, x, c->k_floats, i, to, c->k, sums + j * rows, apart, rows, step);
            else
#endif
                add_part(&some, &w->scales, x, c->k_floats, i, to, sums + j * rows, apart, kind, rows, step);
        }
        for (int64_t j = 0; j < count && (to == c->k || to % BLOCK == 0); j++)
            for (int r = 0; r < rows; r++)
                y[r * COLUMNS + j] += vf_sum(sums[j * rows + r]);
    }
}
INLINE void columns_of(const gemm_call *c, const gemm_weight *w, const float *x, int64_t column, int64_t count,
                       float *y, vf *sums, int kind, int lines, int rows)
{
    for (int64_t j = 0; j < count; j += NEAR(rows))
        near_columns(c, w, x, column + j, least(count - j, NEAR(rows)), y + j, sums, kind, lines, rows);
}
/* Eight, four, two rows or one at a time; seven and three are one more, of zeros. */
INLINE void columns_by_rows(const gemm_call *c, const gemm_weight *w, const float *x, int64_t rows, int64_t column,
                            int64_t count, float *y, int kind, int lines)
{
    vf sums[SUMS_MOST]; /* of a column and a row of x */
    for (int64_t done = 0; done < rows;) {
        const float *from = x + done * c->k_floats;
        float *to = y + done * COLUMNS;
        const int64_t left = rows - done;
        if (left >= 7)
            columns_of(c, w, from, column, count, to, sums, kind, lines, 8);
        else if (left >= 3)
            columns_of(c, w, from, column, count, to, sums, kind, lines, 4);
        else if (left == 2)
            columns_of(c, w, from, column, count, to, sums, kind, lines, 2);
        else
            columns_of(c, w, from, column, count, to, sums, kind, lines, 1);
        done += left >= 7 ? 8 : left >= 3 ? 4 : left;
    }
}
typedef void (*columns_fn)(const gemm_call *, const gemm_weight *, const float *, int64_t, int64_t, int64_t, float *);
#define COLUMNS_OF(name, kind, lines)                                                                                \
    NO_INLINE void name(const gemm_call *c, const gemm_weight *w, const float *x, int64_t rows, int64_t column,      \
                        int64_t count, float *y)                                                                     \
    {                                                                                                                \
        columns_by_rows(c, w, x, rows, column, count, y, kind, lines);                                               \
    }
COLUMNS_OF(columns_f32, ADZE_F32, 0)
COLUMNS_OF(columns_f16, ADZE_F16, 0)
COLUMNS_OF(columns_bf16, ADZE_BF16, 0)
COLUMNS_OF(columns_f8, ADZE_F8E4M3, 0)
COLUMNS_OF(columns_i8, ADZE_I8, 0)
COLUMNS_OF(columns_u4, ADZE_U8, 0)
#if defined(__AVX512F__)
COLUMNS_OF(columns_u4_lines, ADZE_U8, 1)
#endif

/* Blocks of columns, of one weight after the other. */
static void body(void *context, int64_t begin, int64_t end)
{
    const gemm_call *c = context;
    float y[2][ROWS * COLUMNS];
    static const columns_fn by_kind[] = {
        [ADZE_F32] = columns_f32,   [ADZE_F16] = columns_f16, [ADZE_BF16] = columns_bf16,
        [ADZE_F8E4M3] = columns_f8, [ADZE_I8] = columns_i8,   [ADZE_U8] = columns_u4};
    columns_fn columns = by_kind[c->kind];
#if defined(__AVX512F__)
    if (takes_lines(c))
        columns = columns_u4_lines;
#endif
    for (int64_t block = begin; block < end; block++) {
        const gemm_block its = gemm_block_of(c, block, COLUMNS);
        const gemm_weight *w = its.w;
        const int64_t column = its.column, count = its.count;
        for (int64_t r = 0; r < c->count; r += ROWS) {
            const float *x = c->floats + r * c->k_floats;
            const int64_t rows = least(c->count - r, ROWS);
            columns(c, w, x, rows, column, count, y[0]);
            if (c->a->glu)
                columns(c, w + 1, x, rows, column, count, y[1]);
            for (int64_t i = 0; i < rows; i++)
                gemm_finish(c, w, y[0] + i * COLUMNS, y[1] + i * COLUMNS, c->first_row + r + i, column, count);
        }
    }
}

static int floats_memory(gemm_call *c, int64_t rows)
{
    c->floats = aligned_alloc(64, (size_t)((rows + 1) * c->k_floats + LANES) * sizeof *c->floats);
    return c->floats != NULL;
}

ADZE_CPU_KERNEL(gemm)
{
    gemm_call c;
    (void)stream;
    gemm_init(&c, args);
    if (c.x_dtype == ADZE_I8)
        return i8_all(&c);
    if (gemm_takes_panels(c.a, GEMM_FEW))
        return panels_all(&c);
    const int64_t blocks = gemm_blocks(&c, COLUMNS);
    if (blocks == 0 || c.rows.count == 0)
        return ADZE_OK;
    int64_t rows = least(c.per_batch, ROWS_MOST);
    while (!floats_memory(&c, rows) && rows > 1)
        rows /= 2;
    ADZE_REQUIRE(c.floats, ADZE_NO_KERNEL, NO_MEMORY, (long long)rows, (long long)c.k);
    while (gemm_next_rows(&c, rows)) {
        adze_parallel_for(c.count, row_grain(c.k), gemm_rows, &c);
#if defined(__AVX512F__)
        if (takes_lines(&c))
            adze_parallel_for(c.count, row_grain(c.k), order_lines, &c);
#endif
        memset(c.floats + c.count * c.k_floats, 0, (size_t)c.k_floats * sizeof *c.floats);
        adze_parallel_for(blocks, gemm_grain(&c, COLUMNS), body, &c);
    }
    free(c.floats);
    return ADZE_OK;
}
