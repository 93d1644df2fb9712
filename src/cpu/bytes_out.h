/* bytes_out.h - ops whose rows are quantised as they are stored. Rows are made in x's dtype, some at a time, by the
   op itself, and then quantised by quantize. */
#ifndef ADZE_CPU_BYTES_OUT_H
#define ADZE_CPU_BYTES_OUT_H

#include "kernel.h"

#include <stdlib.h>

typedef struct bytes_call {
    const void *args;
    const adze_tensor *out, *scale; /* of the call */
    adze_rows rows;                 /* of what `row` asks, of out and of scale */
    int out_at, scale_at;           /* where these are among the rows */
    int dtype;                      /* of x */
    int64_t dim, first, count;      /* elements of a row; rows that are in the buffer */
    char *buffer;
    adze_status (*row)(const struct bytes_call *c, int64_t row, const adze_tensor *out); /* makes one row */
} bytes_call;

adze_status ADZE_CPU_FN(quantize)(adze_stream stream, const void *args);

/* A row of a tensor as a tensor of its own. */
static inline adze_tensor bytes_row_of(const bytes_call *c, const adze_tensor *t, int at, int64_t row)
{
    adze_tensor one = {.rank = 1, .dtype = t->dtype, .shape = {c->dim}, .stride = {1}};
    if (t->dtype)
        one.data = (char *)t->data + adze_row_offset(&c->rows, at, row) * (int64_t)adze_dtype_size(t->dtype);
    return one;
}

static void bytes_body(void *context, int64_t begin, int64_t end)
{
    const bytes_call *c = context;
    const adze_stream cpu = {ADZE_CPU, NULL};
    for (int64_t i = begin; i < end; i++) {
        const int64_t row = c->first + i;
        adze_tensor made = {.rank = 1, .dtype = c->dtype, .shape = {c->dim}, .stride = {1}};
        made.data = c->buffer + i * c->dim * (int64_t)adze_dtype_size(c->dtype);
        c->row(c, row, &made);
        adze_quantize_args q = {.out = bytes_row_of(c, c->out, c->out_at, row),
                                .scale = bytes_row_of(c, c->scale, c->scale_at, row),
                                .x = made,
                                .dtype = c->out->dtype};
        q.scale.shape[0] = 1;
        ADZE_CPU_FN(quantize)(cpu, &q);
    }
}

static inline adze_status bytes_run(const char *op, bytes_call *c, int64_t grain)
{
    enum { ROWS_MOST = 64 };
    int64_t rows = c->rows.count < ROWS_MOST ? c->rows.count : ROWS_MOST;
    const size_t size = (size_t)c->dim * adze_dtype_size(c->dtype);
    if (rows == 0)
        return ADZE_OK;
    while (!(c->buffer = malloc((size_t)rows * size + 64)) && rows > 1)
        rows /= 2;
    ADZE_REQUIRE(c->buffer, ADZE_NO_KERNEL, "%s: no memory for a row of %lld elements", op, (long long)c->dim);
    for (; c->first < c->rows.count; c->first += rows) {
        const int64_t left = c->rows.count - c->first;
        adze_parallel_for(left < rows ? left : rows, grain, bytes_body, c);
    }
    free(c->buffer);
    return ADZE_OK;
}

#endif
