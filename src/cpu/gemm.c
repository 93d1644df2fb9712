/* gemm on the CPU. x is converted to floats once. Threads take blocks of rows of w, which are read from memory once
   and multiplied with up to eight rows of x at a time: each output has one vector of sums in a register. A row's sums
   do not depend on how many others there are. */
#include "cpu/gemm.h"

enum {
    ROWS = 8,      /* of x at a time */
    COLUMNS = 32,  /* of out that a thread works on at a time */
    ROWS_MOST = 64 /* of x that are converted at a time */
};

/* As many rows of w as there are registers for sums. */
#if VF_PARTS == 1 || defined(__aarch64__)
#    define WEIGHTS(rows) ((rows) == 1 ? 8 : (rows) <= 6 ? 4 : 3)
#else
#    define WEIGHTS(rows) ((rows) == 1 ? 8 : (rows) == 2 ? 4 : (rows) <= 4 ? 3 : (rows) <= 6 ? 2 : 1)
#endif

/* Adds the products of `weights` rows of w and `rows` rows of x to y[row][weight]. */
INLINE void dots(const char *const *w, const float *x, int64_t k, int64_t k_floats, float (*y)[8], int dtype,
                 int rows, int weights)
{
    for (int64_t from = 0; from < k; from += BLOCK) {
        const int64_t to = least(k, from + BLOCK);
        vf sum[8][8];
        UNROLLED
        for (int r = 0; r < rows; r++)
            UNROLLED
        for (int j = 0; j < weights; j++)
            sum[r][j] = vf_all(0);
        for (int64_t i = from; i < to; i += STEP) {
            vf32 v[8];
            UNROLLED
            for (int j = 0; j < weights; j++)
                v[j] = to - i >= STEP ? row_load32(w[j], dtype, i) : row_load32_part(w[j], dtype, i, to - i);
            UNROLLED
            for (int r = 0; r < rows; r++) {
                const vf32 a = row_load32(x + r * k_floats, ADZE_F32, i);
                UNROLLED
                for (int j = 0; j < weights; j++)
                    UNROLLED
                for (int p = 0; p < 2 * VF_PARTS; p++)
                    sum[r][j] = vf_fma(a.part[p], v[j].part[p], sum[r][j]);
            }
        }
        UNROLLED
        for (int r = 0; r < rows; r++)
            UNROLLED
        for (int j = 0; j < weights; j++)
            y[r][j] += vf_sum(sum[r][j]);
    }
}

/* `count` <= COLUMNS columns of weight w for `rows` rows of x. Rows of w that are missing at the end are the last one
   again. */
INLINE void columns_of(const gemm_call *c, const gemm_weight *w, const float *x, int64_t column, int64_t count,
                       float *y, int dtype, int rows)
{
    const int step = WEIGHTS(rows);
    const adze_tensor *t = &w->w;
    const char *data = (const char *)t->data + (t->rank == 3 ? c->batch * t->stride[0] : 0) * size_of(dtype);
    const int64_t stride = t->stride[t->rank - 2] * size_of(dtype);
    for (int64_t j = 0; j < count; j += step) {
        const char *row[8];
        float some[ROWS][8] = {{0}};
        for (int i = 0; i < step; i++)
            row[i] = data + (column + least(j + i, count - 1)) * stride;
        dots(row, x, c->k, c->k_floats, some, dtype, rows, step);
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < step && j + i < count; i++)
                y[r * COLUMNS + j + i] = some[r][i];
    }
}
INLINE void columns_by_rows(const gemm_call *c, const gemm_weight *w, const float *x, int64_t rows, int64_t column,
                            int64_t count, float *y, int dtype)
{
    switch (rows) {
    case 1: columns_of(c, w, x, column, count, y, dtype, 1); break;
    case 2: columns_of(c, w, x, column, count, y, dtype, 2); break;
    case 3: columns_of(c, w, x, column, count, y, dtype, 3); break;
    case 4: columns_of(c, w, x, column, count, y, dtype, 4); break;
    case 5: columns_of(c, w, x, column, count, y, dtype, 5); break;
    case 6: columns_of(c, w, x, column, count, y, dtype, 6); break;
    case 7: columns_of(c, w, x, column, count, y, dtype, 7); break;
    default: columns_of(c, w, x, column, count, y, dtype, 8); break;
    }
}
NO_INLINE void columns_f32(const gemm_call *c, const gemm_weight *w, const float *x, int64_t rows, int64_t column,
                           int64_t count, float *y)
{
    columns_by_rows(c, w, x, rows, column, count, y, ADZE_F32);
}
NO_INLINE void columns_f16(const gemm_call *c, const gemm_weight *w, const float *x, int64_t rows, int64_t column,
                           int64_t count, float *y)
{
    columns_by_rows(c, w, x, rows, column, count, y, ADZE_F16);
}
NO_INLINE void columns_bf16(const gemm_call *c, const gemm_weight *w, const float *x, int64_t rows, int64_t column,
                            int64_t count, float *y)
{
    columns_by_rows(c, w, x, rows, column, count, y, ADZE_BF16);
}

/* Blocks of columns, of one weight after the other. */
static void body(void *context, int64_t begin, int64_t end)
{
    const gemm_call *c = context;
    float y[2][ROWS * COLUMNS];
    void (*const columns)(const gemm_call *, const gemm_weight *, const float *, int64_t, int64_t, int64_t, float *) =
        c->dtype == ADZE_F32   ? columns_f32
        : c->dtype == ADZE_F16 ? columns_f16
                               : columns_bf16;
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

static void gemm_init(gemm_call *c, const adze_gemm_args *a)
{
    const adze_tensor *const tensors[GEMM_TENSORS] = {&a->x, &a->out, &a->out2, &a->out3, &a->residual, &a->gate};
    const adze_tensor *const w[] = {&a->w, &a->w2, &a->w3}, *const bias[] = {&a->bias, &a->bias2, &a->bias3};
    *c = (gemm_call){.a = a, .dtype = a->x.dtype, .k = a->x.shape[a->x.rank - 1]};
    memcpy(c->tensors, tensors, sizeof tensors);
    adze_rows_init(&c->rows, &a->x, GEMM_TENSORS, tensors);
    c->k_floats = (c->k + STEP - 1) / STEP * STEP;
    c->steps = a->rounding & ADZE_ROUND_STEPS;
    c->act = a->glu && !a->act ? ADZE_ACT_SILU : a->act;
    int64_t column = 0;
    for (int i = 0; i < 3 && w[i]->dtype; i++) {
        const int64_t n = w[i]->shape[w[i]->rank - 2];
        c->weight[i] = (gemm_weight){*w[i], *bias[i], n, a->separate ? 0 : column, a->separate ? OUT + i : OUT};
        column += n;
        c->weights = a->glu ? 1 : i + 1;
    }
}

ADZE_CPU_KERNEL(gemm)
{
    gemm_call c;
    gemm_init(&c, args);
    (void)stream;
    int64_t blocks = 0;
    for (int i = 0; i < c.weights; i++)
        blocks += (c.weight[i].n + COLUMNS - 1) / COLUMNS;
    if (blocks == 0 || c.rows.count == 0)
        return ADZE_OK;
    const int64_t per_batch = c.weight[0].w.rank == 3 ? c.a->x.shape[1] : c.rows.count;
    const int64_t rows = least(per_batch, ROWS_MOST);
    c.floats = aligned_alloc(64, (size_t)(rows * c.k_floats + LANES) * sizeof *c.floats);
    ADZE_REQUIRE(c.floats, ADZE_NO_KERNEL, "gemm: no memory for %lld floats", (long long)(rows * c.k_floats));
    for (int64_t first = 0; first < c.rows.count; first += c.count) {
        c.first_row = first;
        c.batch = first / per_batch;
        c.count = least((c.batch + 1) * per_batch - first, rows);
        adze_parallel_for(c.count, row_grain(c.k), gemm_rows, &c);
        adze_parallel_for(blocks, 1, body, &c);
    }
    free(c.floats);
    return ADZE_OK;
}
