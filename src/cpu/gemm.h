/* gemm.h - what the CPU's matrix products share: the call, x as floats, and what follows the sums. */
#ifndef ADZE_CPU_GEMM_H
#define ADZE_CPU_GEMM_H

#include "cpu/act.h"
#include "cpu/quantised.h"

#include <stdlib.h>

enum { X, OUT, OUT2, OUT3, RESIDUAL, GATE, X_SCALE, GEMM_TENSORS };
enum {
    GEMM_FEW = 32,           /* rows of x up to which they are not packed: measured with AVX-512 */
    LINE_BYTES = 64,         /* of the cache */
    STEP = 2 * LANES,        /* elements of k at a time */
    CHAIN = 256,             /* terms that one lane adds before the lanes are (ADZE_SUMS_BLOCKS) */
    BLOCK = CHAIN * VF_WIDTH /* elements of k that these are */
};

typedef struct gemm_weight {
    adze_tensor w, bias;
    scales scales; /* of quantised weights, which are multiplied as they are read; ones with quantised x: */
    struct scales sum_scales; /* then the sums are multiplied by these */
    int64_t n, column;        /* rows of w; where its columns begin in its output */
    int out;                  /* OUT, OUT2 or OUT3 */
} gemm_weight;

typedef struct gemm_call {
    const adze_gemm_args *a;
    const adze_tensor *tensors[GEMM_TENSORS];
    gemm_weight weight[3];
    adze_rows rows;
    int weights;        /* that have columns of their own: of glu only the first */
    int x_dtype, dtype; /* of x; of what is rounded in steps, and of bias and gate: x's, or out's with quantised x */
    int act, steps;
    int kind;                 /* of w: its dtype */
    int64_t k, k_floats;      /* a row of `floats` */
    int64_t per_batch;        /* rows of x that share a w */
    int64_t first_row, count; /* of x: those in `floats` */
    int64_t batch;            /* of w, for these rows */
    float *floats;            /* p(x) */
    char *normed;             /* rows of p(x) before they are packed (gemm_panels.h) */
    int64_t span;             /* columns that a thread works on at a time (gemm_panels.h) */
} gemm_call;

INLINE int64_t size_of(int dtype)
{
    return dtype == ADZE_F32 ? 4 : is_quantised(dtype) ? 1 : 2;
}
INLINE int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
INLINE int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* ---- The call ---- */

static inline void gemm_init(gemm_call *c, const adze_gemm_args *a)
{
    static const float one = 1;
    const struct scales ones = {.scale = (const char *)&one, .group = INT64_MAX, .group_rows = 1, .dtype = ADZE_F32};
    const adze_tensor x_scale = adze_by_rows(&a->x_scale);
    const adze_tensor *const tensors[GEMM_TENSORS] = {&a->x,        &a->out,  &a->out2, &a->out3,
                                                      &a->residual, &a->gate, &x_scale};
    const adze_tensor *const w[] = {&a->w, &a->w2, &a->w3}, *const bias[] = {&a->bias, &a->bias2, &a->bias3};
    const adze_tensor *const scale[] = {&a->w_scale, &a->w2_scale, &a->w3_scale};
    const adze_tensor *const zero[] = {&a->w_zero, &a->w2_zero, &a->w3_zero};
    const int bytes = is_quantised(a->x.dtype);
    *c = (gemm_call){.a = a,
                     .x_dtype = a->x.dtype,
                     .dtype = bytes ? a->out.dtype : a->x.dtype,
                     .kind = a->w.dtype,
                     .k = a->x.shape[a->x.rank - 1]};
    memcpy(c->tensors, tensors, sizeof tensors);
    c->tensors[X_SCALE] = &a->x_scale;
    adze_rows_init(&c->rows, &a->x, GEMM_TENSORS, tensors);
    c->k_floats = (c->k + 127) / 128 * 128; /* whole lines of weights of 4 bits (gemm.c) */
    if (c->k_floats > 512) /* so that parts of 512 of eight rows do not evict each other from the L1 cache */
        c->k_floats = (c->k_floats + 511) / 1024 * 1024 + 512;
    c->per_batch = a->w.rank == 3 ? a->x.shape[1] : c->rows.count;
    c->steps = a->rounding & ADZE_ROUND_STEPS;
    c->act = a->glu && !a->act ? ADZE_ACT_SILU : a->act;
    int64_t column = 0;
    for (int i = 0; i < 3 && w[i]->dtype; i++) {
        const int64_t n = w[i]->shape[w[i]->rank - 2];
        const struct scales own = scales_of(scale[i], zero[i], a->group, a->group_rows, c->k);
        c->weight[i] = (gemm_weight){.w = *w[i],
                                     .bias = *bias[i],
                                     .scales = bytes ? ones : own,
                                     .sum_scales = own,
                                     .n = n,
                                     .column = a->separate ? 0 : column,
                                     .out = a->separate ? OUT + i : OUT};
        column += n;
        c->weights = a->glu ? 1 : i + 1;
    }
}

/* Few rows are multiplied with each row of w as it is read; more are packed in panels (gemm_panels.h). The two add in
   different orders: calls whose rows must not depend on their number always take the first. */
INLINE int gemm_takes_panels(const adze_gemm_args *a, int64_t few)
{
    int64_t rows = 1;
    for (int d = a->w.rank == 3; d < a->x.rank - 1; d++)
        rows *= a->x.shape[d];
    return rows > few && !(a->call.flags & ADZE_BATCH_INVARIANT);
}

/* The next rows of x, at most so many; those of one batch. c->count is 0 before the first; 0: there are none. */
INLINE int gemm_next_rows(gemm_call *c, int64_t most)
{
    c->first_row += c->count;
    if (c->first_row >= c->rows.count)
        return 0;
    c->batch = c->first_row / c->per_batch;
    c->count = least((c->batch + 1) * c->per_batch - c->first_row, most);
    return 1;
}
#define NO_MEMORY "gemm: no memory for %lld rows of %lld elements of x"

/* Where a row of x begins. */
INLINE const char *gemm_row(const gemm_call *c, int64_t row)
{
    return (const char *)c->a->x.data + adze_row_offset(&c->rows, X, c->first_row + row) * size_of(c->x_dtype);
}
/* Where the rows of a weight begin, and the bytes from one to the next. */
typedef struct weight_rows {
    const char *data;
    int64_t stride;
} weight_rows;
INLINE weight_rows weight_rows_of(const gemm_call *c, const gemm_weight *w)
{
    const adze_tensor *t = &w->w;
    const int64_t size = is_quantised(c->kind) ? 1 : size_of(c->kind);
    return (weight_rows){(const char *)t->data + (t->rank == 3 ? c->batch * t->stride[0] * size : 0),
                         w->n > 1 ? t->stride[t->rank - 2] * size : 0}; /* that of one row may be any number */
}

/* Rows that are multiplied next, to be prefetched into the L2 cache a few lines at a time: many at once would wait
   for each other, and so would what is read meanwhile. */
typedef struct gemm_ahead {
    const char *row;
    int64_t stride, at, bytes; /* of a row: those before `at` are prefetched */
    int64_t left, share;       /* lines: of all rows, and at a time */
} gemm_ahead;
INLINE gemm_ahead gemm_ahead_of(const char *row, int64_t stride, int64_t rows, int64_t bytes)
{
    return (gemm_ahead){
        .row = row, .stride = stride, .bytes = bytes, .left = rows * ((bytes + LINE_BYTES - 1) / LINE_BYTES)};
}
INLINE void gemm_prefetch(gemm_ahead next[2]) /* of w, and of x */
{
    for (gemm_ahead *a = next; a < next + 2; a++)
        for (int64_t lines = least(a->share, a->left); lines > 0; lines--, a->left--) {
            __builtin_prefetch(a->row + a->at, 0, 2);
            a->at += LINE_BYTES;
            if (a->at >= a->bytes) {
                a->at = 0;
                a->row += a->stride;
            }
        }
}

/* ---- x as floats ---- */

/* The n <= STEP elements of a row from i on, in the order in which w is read, ended by zeros. */
INLINE vf32 x_load(const char *row, int dtype, int order, int64_t i, int64_t n)
{
    const dequantise as_stored = {.scale = 1};
    if (dtype == ADZE_F8E4M3) /* w is of f8e4m3 too */
        return quantised_load(row, ADZE_F8E4M3, i, n, &as_stored);
    return vf32_order(row_load32_part(row, dtype, i, n), dtype, order);
}
INLINE void floats_of(float *to, const char *row, int dtype, int order, int64_t k)
{
    for (int64_t i = 0; i < k; i += STEP)
        row_store32(to, ADZE_F32, i, x_load(row, dtype, order, i, least(k - i, STEP)), 0);
}

/* The norms of this ISA. A file for an ISA that norms are not compiled for says which ones it takes. */
#ifndef GEMM_NORM
#    define GEMM_NORM(op) ADZE_CPU_FN(op)
#endif
adze_status GEMM_NORM(rms_norm)(adze_stream stream, const void *args);
adze_status GEMM_NORM(layer_norm)(adze_stream stream, const void *args);

/* p(x) of one row, in x's dtype. */
NO_INLINE void gemm_norm(const gemm_call *c, const char *x, char *to)
{
    const adze_gemm_args *a = c->a;
    const adze_tensor row = {.rank = 1, .dtype = c->dtype, .shape = {c->k}, .stride = {1}};
    adze_norm_args norm = {.x = row,
                           .out = row,
                           .weight = a->norm_weight,
                           .bias = a->norm_bias,
                           .eps = a->eps,
                           .weight_offset = a->weight_offset,
                           .rounding = a->rounding & ADZE_ROUND_NORM};
    const adze_stream cpu = {ADZE_CPU, NULL};
    norm.x.data = (char *)(uintptr_t)x;
    norm.out.data = to;
    if (a->norm == ADZE_NORM_RMS)
        GEMM_NORM(rms_norm)(cpu, &norm);
    else
        GEMM_NORM(layer_norm)(cpu, &norm);
}

/* A normed row is written into the end of its floats, where converting it does not overtake the reads. */
NO_INLINE void gemm_rows(void *context, int64_t begin, int64_t end)
{
    const gemm_call *c = context;
    for (int64_t r = begin; r < end; r++) {
        float *to = c->floats + r * c->k_floats;
        const char *x = gemm_row(c, r);
        if (c->a->norm) {
            char *normed = (char *)to + c->k_floats * (4 - size_of(c->dtype));
            gemm_norm(c, x, normed);
            x = normed;
        }
        const int order = order_of(c->kind);
        switch (c->x_dtype) {
        case ADZE_F32: floats_of(to, x, ADZE_F32, order, c->k); break;
        case ADZE_F16: floats_of(to, x, ADZE_F16, order, c->k); break;
        case ADZE_F8E4M3: floats_of(to, x, ADZE_F8E4M3, order, c->k); break;
        default: floats_of(to, x, ADZE_BF16, order, c->k); break;
        }
    }
}

/* ---- What follows the sums ---- */

INLINE vf16 gemm_act(int act, vf16 v)
{
#define EACH(name)                                                                                                   \
case name:                                                                                                           \
    for (int p = 0; p < VF_PARTS; p++)                                                                               \
        v.part[p] = vf_act(name, v.part[p]);                                                                         \
    return v
    switch (act) {
        EACH(ADZE_ACT_SILU);
        EACH(ADZE_ACT_GELU);
        EACH(ADZE_ACT_GELU_TANH);
        EACH(ADZE_ACT_GELU_QUICK);
        EACH(ADZE_ACT_RELU);
        EACH(ADZE_ACT_RELU2);
        EACH(ADZE_ACT_SIGMOID);
    default: return v;
    }
#undef EACH
}
INLINE vf16 gemm_load(const void *row, int dtype, int64_t i, int64_t n)
{
    switch (dtype) {
    case ADZE_F32: return row_load_part(row, ADZE_F32, i, n);
    case ADZE_F16: return row_load_part(row, ADZE_F16, i, n);
    default: return row_load_part(row, ADZE_BF16, i, n);
    }
}
INLINE vf16 gemm_rounded(const gemm_call *c, vf16 v)
{
    if (!c->steps || c->dtype == ADZE_F32)
        return v;
    return c->dtype == ADZE_BF16 ? bf16_to_f32(f32_to_bf16(v)) : f16_to_f32(f32_to_f16(v));
}
/* The product of x and n columns of w from `column + i` on; x_scale is that of quantised x. */
INLINE vf16 gemm_biased(const gemm_call *c, const gemm_weight *w, const float *y, float x_scale, int64_t column,
                        int64_t i, int64_t n)
{
    vf16 v = row_load_part(y, ADZE_F32, i, n);
    if (is_quantised(c->x_dtype)) {
        float scale[LANES] = {0};
        for (int64_t j = 0; j < n; j++)
            scale[j] =
                float_at(w->sum_scales.scale, w->sum_scales.dtype, (column + i + j) * w->sum_scales.row_stride);
        const vf16 of_w = row_load_part(scale, ADZE_F32, 0, LANES);
        for (int p = 0; p < VF_PARTS; p++)
            v.part[p] = v.part[p] * x_scale * of_w.part[p];
    }
    if (w->bias.dtype) {
        const vf16 bias = gemm_load(w->bias.data, w->bias.dtype, column + i, n);
        for (int p = 0; p < VF_PARTS; p++)
            v.part[p] += bias.part[p];
    }
    return gemm_rounded(c, v);
}

/* The columns of out in blocks of `size`, of one weight after the other: how many there are, and one of them. */
typedef struct gemm_block {
    const gemm_weight *w;
    int64_t column, count;
} gemm_block;
INLINE int64_t gemm_blocks(const gemm_call *c, int64_t size)
{
    int64_t blocks = 0;
    for (int i = 0; i < c->weights; i++)
        blocks += (c->weight[i].n + size - 1) / size;
    return blocks;
}
INLINE gemm_block gemm_block_of(const gemm_call *c, int64_t block, int64_t size)
{
    const gemm_weight *w = c->weight;
    while (block >= (w->n + size - 1) / size)
        block -= (w++->n + size - 1) / size;
    return (gemm_block){w, block * size, least(w->n - block * size, size)};
}

/* Blocks of `size` columns per piece of parallel work, enough products of these rows to pay for waking a thread. */
INLINE int64_t gemm_grain(const gemm_call *c, int64_t size)
{
    return (int64_t)((1 << 17) / ((double)size * (double)c->k * (double)c->count + 1)) + 1;
}

/* `count` columns of a row from `column` of weight w on: y holds their sums, y2 those of glu's value. */
NO_INLINE void gemm_finish(const gemm_call *c, const gemm_weight *w, const float *y, const float *y2, int64_t row,
                           int64_t column, int64_t count)
{
    const adze_tensor *out = c->tensors[w->out], *gate = c->tensors[GATE], *residual = c->tensors[RESIDUAL];
    const int64_t at = w->column + column;
    char *to = (char *)out->data + (adze_row_offset(&c->rows, w->out, row) + at) * size_of(out->dtype);
    const int64_t gate_at = adze_row_offset(&c->rows, GATE, row) + at;
    const int64_t residual_at = adze_row_offset(&c->rows, RESIDUAL, row) + at;
    const adze_tensor *x_scales = c->tensors[X_SCALE];
    const float x_scale =
        x_scales->dtype ? ((const float *)x_scales->data)[adze_row_offset(&c->rows, X_SCALE, row)] : 1;
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t n = least(count - i, LANES);
        vf16 v = gemm_biased(c, w, y, x_scale, column, i, n);
        if (c->act)
            v = gemm_rounded(c, gemm_act(c->act, v));
        if (c->a->glu) {
            const vf16 value = gemm_biased(c, w + 1, y2, x_scale, column, i, n);
            for (int p = 0; p < VF_PARTS; p++)
                v.part[p] *= value.part[p];
            v = gemm_rounded(c, v);
        }
        if (gate->dtype) {
            const vf16 g = gemm_load(gate->data, gate->dtype, gate_at + i, n);
            for (int p = 0; p < VF_PARTS; p++)
                v.part[p] *= g.part[p];
            v = gemm_rounded(c, v);
        }
        if (residual->dtype) {
            const vf16 r = gemm_load(residual->data, residual->dtype, residual_at + i, n);
            for (int p = 0; p < VF_PARTS; p++)
                v.part[p] += r.part[p];
        }
        switch (out->dtype) {
        case ADZE_F32: row_store_part(to, ADZE_F32, i, v, n, 0); break;
        case ADZE_F16: row_store_part(to, ADZE_F16, i, v, n, 0); break;
        default: row_store_part(to, ADZE_BF16, i, v, n, 0); break;
        }
    }
}

#endif
