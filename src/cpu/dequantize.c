/* dequantize on the CPU. Threads take rows; the numbers of a group are made thirty-two at a time. */
#include "cpu/quantised.h"

typedef struct dequantize_call {
    const adze_dequantize_args *a;
    scales scales;
    int64_t k;
    int stream;
} dequantize_call;

/* A NaN that conversions to bf16 leave one: all its bits are in the upper half. */
INLINE dequantise with_plain_nan(dequantise d)
{
    if (d.scale != d.scale) {
        d.scale = NAN;
#if defined(__AVX512F__)
        d.table = vf_all(NAN);
#endif
    }
    return d;
}

INLINE void dequantize_row(const dequantize_call *c, int64_t row, int kind, int dtype)
{
    const scales *s = &c->scales;
    const char *w = (const char *)c->a->w.data + row * c->a->w.stride[0];
    char *out = (char *)c->a->out.data + row * c->a->out.stride[0] * adze_float_size(dtype);
    for (int64_t from = 0, g = 0; from < c->k; from += s->group, g++) {
        const int64_t to = c->k - from < s->group ? c->k : from + s->group;
        const dequantise d = with_plain_nan(dequantise_of(s, kind, row, g));
        for (int64_t i = from; i < to; i += 2 * LANES) {
            const int64_t n = to - i < 2 * LANES ? to - i : 2 * LANES;
            const vf32 v = vf32_order(quantised_load(w, kind, i, n, &d), order_of(kind), dtype);
            row_store32_part(out, dtype, i, v, n, c->stream);
        }
    }
}
INLINE void dequantize_rows(const dequantize_call *c, int64_t begin, int64_t end, int kind)
{
    for (int64_t row = begin; row < end; row++)
        switch (c->a->out.dtype) {
        case ADZE_F32: dequantize_row(c, row, kind, ADZE_F32); break;
        case ADZE_F16: dequantize_row(c, row, kind, ADZE_F16); break;
        default: dequantize_row(c, row, kind, ADZE_BF16); break;
        }
    if (c->stream)
        row_stream_end();
}

static void body(void *context, int64_t begin, int64_t end)
{
    const dequantize_call *c = context;
    switch (c->a->w.dtype) {
    case ADZE_I8: dequantize_rows(c, begin, end, ADZE_I8); break;
    case ADZE_F8E4M3: dequantize_rows(c, begin, end, ADZE_F8E4M3); break;
    default: dequantize_rows(c, begin, end, ADZE_U8); break;
    }
}

ADZE_CPU_KERNEL(dequantize)
{
    const adze_dequantize_args *a = args;
    const int64_t n = a->out.shape[0], k = a->out.shape[1];
    (void)stream;
    dequantize_call c = {.a = a,
                         .scales = scales_of(&a->scale, &a->zero, a->group, a->group_rows, k),
                         .k = k,
                         .stream = row_streams32(&a->out, n * k)};
    adze_parallel_for(k ? n : 0, row_grain(k), body, &c);
    return ADZE_OK;
}
