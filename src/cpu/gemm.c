/* gemm on the CPU. Many rows of x are packed (gemm_panels.h). Few are converted to floats once. Threads take blocks
   of rows of w, which are read from memory once and multiplied with up to eight rows of x at a time: each output has
   one vector of sums. Of a block of w, a part of all rows is multiplied after the other, so that the part of x stays
   in the L1 cache. A row's sums do not depend on how many others there are. */
#include "cpu/gemm_tile.h"

#include "cpu/gemm_i8.h"
#include "cpu/gemm_panels.h"

enum {
    ROWS = 8,      /* of x at a time */
    COLUMNS = 32,  /* of out that a thread works on at a time */
    ROWS_MOST = 64 /* of x that are converted at a time */
};
/* Elements of k and columns at a time: those of x and the sums stay in the L1 cache. */
#define DEPTH(rows) ((rows) == 8 ? 512 : 1024)
#define NEAR(rows)  ((rows) == 8 ? 18 : COLUMNS)
enum { SUMS_MOST = (NEAR(8) + 8) * 8 }; /* with columns that are missing */

/* As many rows of w as there are registers for sums. */
#if VF_PARTS == 1 || defined(__aarch64__)
#    define WEIGHTS(rows) ((rows) == 1 ? 8 : (rows) <= 4 ? 4 : 3)
#else
#    define WEIGHTS(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 4 : (rows) == 4 ? 2 : 1)
#endif

/* The rows of w that are multiplied at a time, and where their scales are. */
typedef struct some_rows {
    const char *at[8];
    int64_t scale[8], zero[8];
    int64_t ahead; /* bytes from what is read to what is prefetched */
} some_rows;

/* Each vector is loaded once: gcc would give every product its own load. */
INLINE void vf32_in_registers(vf32 *v)
{
#if defined(__AVX2__)
    for (int p = 0; p < 2 * VF_PARTS; p++)
        __asm__("" : "+v"(v->part[p]));
#else
    (void)v;
#endif
}

/* n <= 32 elements from i on of these rows and of `rows` rows of x, where i is a multiple of 32. d is of quantised
   weights. */
INLINE void add_step(const some_rows *w, const dequantise *d, const float *x, int64_t k_floats, int64_t i, int64_t n,
                     vf (*sum)[8], int kind, int rows, int weights)
{
    const int64_t bits = kind == ADZE_U8 ? 4 : 8 * size_of(kind);
    vf32 v[8];
    UNROLLED
    for (int j = 0; j < weights; j++) {
        for (int64_t b = 0; b < STEP * bits / 8; b += LINE_BYTES)
            __builtin_prefetch(w->at[j] + i * bits / 8 + w->ahead + b, 0, 2);
        v[j] = is_quantised(kind) ? quantised_numbers(w->at[j], kind, i, n, &d[j])
                                  : row_load32_part(w->at[j], kind, i, n);
    }
    UNROLLED
    for (int r = 0; r < rows; r++) {
        vf32 a = row_load32(x + r * k_floats, ADZE_F32, i);
        vf32_in_registers(&a);
        UNROLLED
        for (int p = 0; p < 2 * VF_PARTS; p++)
            UNROLLED
        for (int j = 0; j < weights; j++)
            sum[r][j] = vf_fma(a.part[p], v[j].part[p], sum[r][j]);
    }
}
INLINE void add_products(const some_rows *w, const dequantise *d, const float *x, int64_t k_floats, int64_t i,
                         int64_t to, vf (*sum)[8], int kind, int rows, int weights)
{
    for (; to - i >= STEP; i += STEP)
        add_step(w, d, x, k_floats, i, STEP, sum, kind, rows, weights);
    if (i < to)
        add_step(w, d, x, k_floats, i, to - i, sum, kind, rows, weights);
}

/* Adds the products of elements from i to `to` of `weights` rows of w and `rows` rows of x to sums[weight][row].
   Those of 8 bits are multiplied by the scale of a group when they are added, others have it in them. */
INLINE void add_part(const some_rows *w, const scales *s, const float *x, int64_t k_floats, int64_t i, int64_t to,
                     vf *sums, int kind, int rows, int weights)
{
    const int scaled = is_quantised(kind) && kind != ADZE_U8;
    int64_t group = is_quantised(kind) ? i / s->group : 0;
    vf sum[8][8];
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
    for (int j = 0; j < weights; j++)
        sum[r][j] = scaled ? vf_all(0) : sums[j * rows + r];
    for (int64_t end = to; i < to; i = end, group++) {
        dequantise d[8];
        if (is_quantised(kind)) {
            end = least(to, (group + 1) * s->group);
            for (int j = 0; j < weights; j++)
                d[j] = dequantise_at(s, kind, w->scale[j] + group, w->zero[j] + group);
        }
        add_products(w, d, x, k_floats, i, end, sum, kind, rows, weights);
        UNROLLED
        for (int r = 0; r < rows; r++)
            UNROLLED
        for (int j = 0; j < weights && scaled; j++) {
            sums[j * rows + r] = vf_fma(sum[r][j], vf_all(d[j].scale), sums[j * rows + r]);
            sum[r][j] = vf_all(0);
        }
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
    for (int j = 0; j < weights && !scaled; j++)
        sums[j * rows + r] = sum[r][j];
}

/* `count` <= NEAR columns of weight w for `rows` rows of x. Rows of w that are missing at the end are the last one
   again. */
INLINE void near_columns(const gemm_call *c, const gemm_weight *w, const float *x, int64_t column, int64_t count,
                         float *y, vf *sums, int kind, int rows)
{
    const int step = WEIGHTS(rows);
    const int64_t depth = DEPTH(rows), bits = kind == ADZE_U8 ? 4 : 8 * size_of(kind);
    const weight_rows w_rows = weight_rows_of(c, w);
    for (int r = 0; r < rows; r++)
        memset(y + r * COLUMNS, 0, (size_t)count * sizeof *y);
    for (int64_t i = 0; i < c->k; i += depth) {
        const int64_t to = least(c->k, i + depth);
        if (i % BLOCK == 0)
            memset(sums, 0, sizeof *sums * SUMS_MOST);
        for (int64_t j = 0; j < count; j += step) {
            some_rows some = {.ahead = to < c->k ? depth * bits / 8 : NEAR(rows) * w_rows.stride - i * bits / 8};
            for (int t = 0; t < step; t++) {
                const int64_t row = column + least(j + t, count - 1);
                some.at[t] = w_rows.data + row * w_rows.stride;
                if (is_quantised(kind)) {
                    const int64_t at = w->scales.group_rows == 1 ? row : row / w->scales.group_rows;
                    some.scale[t] = at * w->scales.row_stride;
                    some.zero[t] = at * w->scales.zero_stride;
                }
            }
            add_part(&some, &w->scales, x, c->k_floats, i, to, sums + j * rows, kind, rows, step);
        }
        for (int64_t j = 0; j < count && (to == c->k || to % BLOCK == 0); j++)
            for (int r = 0; r < rows; r++)
                y[r * COLUMNS + j] += vf_sum(sums[j * rows + r]);
    }
}
INLINE void columns_of(const gemm_call *c, const gemm_weight *w, const float *x, int64_t column, int64_t count,
                       float *y, vf *sums, int kind, int rows)
{
    for (int64_t j = 0; j < count; j += NEAR(rows))
        near_columns(c, w, x, column + j, least(count - j, NEAR(rows)), y + j, sums, kind, rows);
}
/* Eight, four, two rows or one at a time; seven and three are one more, of zeros. */
INLINE void columns_by_rows(const gemm_call *c, const gemm_weight *w, const float *x, int64_t rows, int64_t column,
                            int64_t count, float *y, int kind)
{
    vf sums[SUMS_MOST]; /* of a column and a row of x */
    for (int64_t done = 0; done < rows;) {
        const float *from = x + done * c->k_floats;
        float *to = y + done * COLUMNS;
        const int64_t left = rows - done;
        if (left >= 7)
            columns_of(c, w, from, column, count, to, sums, kind, 8);
        else if (left >= 3)
            columns_of(c, w, from, column, count, to, sums, kind, 4);
        else if (left == 2)
            columns_of(c, w, from, column, count, to, sums, kind, 2);
        else
            columns_of(c, w, from, column, count, to, sums, kind, 1);
        done += left >= 7 ? 8 : left >= 3 ? 4 : left;
    }
}
typedef void (*columns_fn)(const gemm_call *, const gemm_weight *, const float *, int64_t, int64_t, int64_t, float *);
#define COLUMNS_OF(name, kind)                                                                                       \
    NO_INLINE void name(const gemm_call *c, const gemm_weight *w, const float *x, int64_t rows, int64_t column,      \
                        int64_t count, float *y)                                                                     \
    {                                                                                                                \
        columns_by_rows(c, w, x, rows, column, count, y, kind);                                                      \
    }
COLUMNS_OF(columns_f32, ADZE_F32)
COLUMNS_OF(columns_f16, ADZE_F16)
COLUMNS_OF(columns_bf16, ADZE_BF16)
COLUMNS_OF(columns_f8, ADZE_F8E4M3)
COLUMNS_OF(columns_i8, ADZE_I8)
COLUMNS_OF(columns_u4, ADZE_U8)

/* Blocks of columns, of one weight after the other. */
static void body(void *context, int64_t begin, int64_t end)
{
    const gemm_call *c = context;
    float y[2][ROWS * COLUMNS];
    static const columns_fn by_kind[] = {
        [ADZE_F32] = columns_f32,   [ADZE_F16] = columns_f16, [ADZE_BF16] = columns_bf16,
        [ADZE_F8E4M3] = columns_f8, [ADZE_I8] = columns_i8,   [ADZE_U8] = columns_u4};
    const columns_fn columns = by_kind[c->kind];
    for (int64_t block = begin; block < end; block++) {
        int64_t at = block;
        const gemm_weight *w = c->weight;
        while (at >= (w->n + COLUMNS - 1) / COLUMNS)
            at -= (w++->n + COLUMNS - 1) / COLUMNS;
        const int64_t column = at * COLUMNS, count = least(w->n - column, COLUMNS);
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
    int64_t blocks = 0;
    for (int i = 0; i < c.weights; i++)
        blocks += (c.weight[i].n + COLUMNS - 1) / COLUMNS;
    if (blocks == 0 || c.rows.count == 0)
        return ADZE_OK;
    int64_t rows = least(c.per_batch, ROWS_MOST);
    while (!floats_memory(&c, rows) && rows > 1)
        rows /= 2;
    ADZE_REQUIRE(c.floats, ADZE_NO_KERNEL, NO_MEMORY, (long long)rows, (long long)c.k);
    while (gemm_next_rows(&c, rows)) {
        adze_parallel_for(c.count, row_grain(c.k), gemm_rows, &c);
        memset(c.floats + c.count * c.k_floats, 0, (size_t)c.k_floats * sizeof *c.floats);
        adze_parallel_for(blocks, 1, body, &c);
    }
    free(c.floats);
    return ADZE_OK;
}
