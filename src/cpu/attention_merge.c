/* attention_merge on the CPU: threads over rows, each with the two factors of its parts. */
#include "cpu/row.h"

enum { X, Y, OUT, X_LSE, Y_LSE, LSE, MERGE_TENSORS };

typedef struct merge_call {
    const adze_tensor *tensors[MERGE_TENSORS];
    adze_tensor lse[3];
    adze_rows rows;
    int64_t dim;
} merge_call;

static void *at(const merge_call *c, int tensor, int64_t row)
{
    const adze_tensor *t = c->tensors[tensor];
    return (char *)t->data + adze_row_offset(&c->rows, tensor, row) * adze_float_size(t->dtype);
}

INLINE void merge_row(const merge_call *c, int64_t row, float x_share, float y_share, int dtype)
{
    const void *x = at(c, X, row), *y = at(c, Y, row);
    void *out = at(c, OUT, row);
    for (int64_t i = 0; i < c->dim; i += LANES) {
        const int64_t n = c->dim - i < LANES ? c->dim - i : LANES;
        const vf16 a = row_load_part(x, dtype, i, n), b = row_load_part(y, dtype, i, n);
        vf16 v = vf16_all(0);
        for (int p = 0; p < VF_PARTS; p++) { /* a part without a share may hold anything */
            v.part[p] = x_share != 0 ? a.part[p] * x_share : v.part[p];
            v.part[p] = y_share != 0 ? vf_fma(b.part[p], vf_all(y_share), v.part[p]) : v.part[p];
        }
        row_store_part(out, dtype, i, v, n, 0);
    }
}

static void body(void *context, int64_t begin, int64_t end)
{
    const merge_call *c = context;
    for (int64_t r = begin; r < end; r++) {
        const float x = *(const float *)at(c, X_LSE, r), y = *(const float *)at(c, Y_LSE, r);
        const float most = isnan(x) || x > y ? x : y;
        const float wx = x == -INFINITY ? 0 : expf(x - most), wy = y == -INFINITY ? 0 : expf(y - most);
        const float sum = wx + wy, x_share = sum == 0 ? 0 : wx / sum, y_share = sum == 0 ? 0 : wy / sum;
        switch (c->tensors[X]->dtype) {
        case ADZE_F32: merge_row(c, r, x_share, y_share, ADZE_F32); break;
        case ADZE_F16: merge_row(c, r, x_share, y_share, ADZE_F16); break;
        default: merge_row(c, r, x_share, y_share, ADZE_BF16); break;
        }
        if (c->lse[2].dtype)
            *(float *)at(c, LSE, r) = sum == 0 ? -INFINITY : most + logf(sum);
    }
}

ADZE_CPU_KERNEL(attention_merge)
{
    const adze_attention_merge_args *a = args;
    merge_call c = {.lse = {a->x_lse, a->y_lse, a->lse}, .dim = a->x.shape[a->x.rank - 1]};
    const adze_tensor *const tensors[] = {&a->x, &a->y, &a->out, &c.lse[0], &c.lse[1], &c.lse[2]};
    (void)stream;
    memcpy(c.tensors, tensors, sizeof tensors);
    for (int i = 0; i < 3; i++)
        c.lse[i].shape[c.lse[i].rank++] = 1; /* rows of one element */
    adze_rows_init(&c.rows, &a->x, MERGE_TENSORS, tensors);
    adze_parallel_for(c.rows.count, row_grain(c.dim), body, &c);
    return ADZE_OK;
}
