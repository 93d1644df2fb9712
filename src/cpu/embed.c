/* embed on the CPU: rows of the table, copied or multiplied by a scale. */
#include "cpu/row.h"

enum { OUT, IDS, EMBED_TENSORS };
typedef struct embed_call {
    const adze_embed_args *a;
    adze_rows rows;
    int64_t dim;
    float scale; /* 0: rows are copied */
} embed_call;

INLINE int64_t embed_id(const embed_call *c, int64_t t)
{
    const int64_t at = adze_row_offset(&c->rows, IDS, t);
    const void *ids = c->a->ids.data;
    return c->a->ids.dtype == ADZE_I32 ? ((const int32_t *)ids)[at] : ((const int64_t *)ids)[at];
}

INLINE void embed_scaled(const embed_call *c, const char *from, char *to, int dtype)
{
    for (int64_t i = 0; i < c->dim; i += LANES) {
        const int64_t n = c->dim - i < LANES ? c->dim - i : LANES;
        vf16 v = row_load_part(from, dtype, i, n);
        for (int p = 0; p < VF_PARTS; p++)
            v.part[p] *= c->scale;
        row_store_part(to, dtype, i, v, n, 0);
    }
}

static void body(void *context, int64_t begin, int64_t end)
{
    const embed_call *c = context;
    const int dtype = c->a->table.dtype;
    const int64_t size = adze_float_size(dtype);
    for (int64_t t = begin; t < end; t++) {
        const char *from = (const char *)c->a->table.data + embed_id(c, t) * c->a->table.stride[0] * size;
        char *to = (char *)c->a->out.data + adze_row_offset(&c->rows, OUT, t) * size;
        if (c->scale == 0)
            memcpy(to, from, (size_t)(c->dim * size));
        else if (dtype == ADZE_F32)
            embed_scaled(c, from, to, ADZE_F32);
        else if (dtype == ADZE_F16)
            embed_scaled(c, from, to, ADZE_F16);
        else
            embed_scaled(c, from, to, ADZE_BF16);
    }
}

ADZE_CPU_KERNEL(embed)
{
    (void)stream;
    const adze_embed_args *a = args;
    adze_tensor ids = a->ids; /* as rows of one element, the tokens of out */
    ids.shape[ids.rank] = ids.stride[ids.rank] = 1;
    ids.rank++;
    const adze_tensor *const tensors[EMBED_TENSORS] = {&a->out, &ids};
    embed_call c = {.a = a, .dim = a->table.shape[1], .scale = (float)adze_round_to(a->table.dtype, a->scale)};
    adze_rows_init(&c.rows, &a->out, EMBED_TENSORS, tensors);
    for (int64_t t = 0; t < c.rows.count; t++)
        ADZE_REQUIRE(embed_id(&c, t) >= 0 && embed_id(&c, t) < a->table.shape[0], ADZE_BAD_ARG,
                     "embed: id %lld, of token %lld, is no row of table, which has %lld", (long long)embed_id(&c, t),
                     (long long)t, (long long)a->table.shape[0]);
    adze_parallel_for(c.dim ? c.rows.count : 0, row_grain(c.dim), body, &c);
    return ADZE_OK;
}
