/* products.c - products by cublaslt.cu, of host memory, against plain sums. Without a library there are none. */
#include "cuda/cublaslt.cuh"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../expect.h"

enum { SIZE = 1 << 14 };
static float x[SIZE], w[SIZE], residual[SIZE], out[SIZE], bias[256], x_scale[256], w_scale[256];
static uint16_t x16[SIZE], w16[SIZE], out16[SIZE], bias16[256];
static _Alignas(256) char workspace[1024];

static float of_bf16(uint16_t bits16)
{
    const uint32_t bits = (uint32_t)bits16 << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
static float number(void)
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)(state >> 16) / 32768 - 1;
}

/* Whether out is what a product says, of values in float; bf16 out to its last bit but one. */
static int right(const lt_product *p)
{
    const int f32 = p->dtype == ADZE_F32;
    double worst = 0;
    for (int64_t b = 0; b < p->batches; b++)
        for (int64_t i = 0; i < p->m; i++)
            for (int64_t j = 0; j < p->n; j++) {
                double sum = 0;
                for (int64_t l = 0; l < p->k; l++) {
                    const int64_t at = b * p->x.batch + i * p->x.row + l, w_at = b * p->w.batch + j * p->w.row + l;
                    sum += f32 ? (double)x[at] * (double)w[w_at] : (double)of_bf16(x16[at]) * of_bf16(w16[w_at]);
                }
                if (p->scales == LT_VECTORS)
                    sum *= (double)x_scale[i] * (double)w_scale[j];
                if (p->bias)
                    sum += (double)(f32 ? bias[j] : of_bf16(bias16[j]));
                if (p->residual.data)
                    sum += (double)residual[b * p->residual.batch + i * p->residual.row + j];
                const int64_t at = b * p->out.batch + i * p->out.row + j;
                const double got = (double)(p->out_dtype == ADZE_F32 ? out[at] : of_bf16(out16[at]));
                worst = fmax(worst, fabs(got - sum) / (fabs(sum) + 1e-3));
            }
    return worst < (p->out_dtype == ADZE_F32 ? 1e-6 : 0x1p-8);
}

static int run(const lt_product *p, size_t most, lt_algorithm *algorithm)
{
    const adze_stream stream = {0, NULL};
    return adze_lt_find(0, p, most, algorithm) && adze_lt_run(stream, p, algorithm, workspace);
}

/* Whether cuBLASLt's kernel takes a product of x [m, k] in rows that are `row` apart, with so much scratch. */
int adze_gemm_cuda_lt_accepts(adze_stream, const void *);
static adze_tensor matrix(int dtype, int64_t rows, int64_t columns, int64_t row)
{
    return (adze_tensor){workspace, {rows, columns}, {row, 1}, 2, dtype};
}
static int takes(int dtype, int64_t m, int64_t n, int64_t k, int64_t row, size_t scratch)
{
    adze_gemm_args a = {.call = ADZE_CALL(gemm)};
    a.x = matrix(dtype, m, k, row), a.w = matrix(dtype, n, k, k), a.out = matrix(dtype, m, n, n);
    a.call.scratch = workspace + 16, a.call.scratch_size = scratch;
    return adze_gemm_cuda_lt_accepts((adze_stream){0, NULL}, &a);
}

int main(void)
{
    lt_algorithm algorithm;
    lt_product p = {.m = 5, .n = 7, .k = 11, .batches = 1, .dtype = ADZE_F32, .out_dtype = ADZE_F32};
    p.x = (lt_matrix){x, 13, 0}, p.w = (lt_matrix){w, 11, 0}, p.out = (lt_matrix){out, 8, 0};
    for (int i = 0; i < SIZE; i++) {
        x[i] = number(), w[i] = number(), residual[i] = number();
        x16[i] = (uint16_t)(0x3e00 + (i * 7919 & 0x81ff)), w16[i] = (uint16_t)(0x3e00 + (i * 104729 & 0x81ff));
    }
    for (int i = 0; i < 256; i++)
        bias[i] = number(), x_scale[i] = number(), w_scale[i] = number(), bias16[i] = (uint16_t)(0x3e80 + i);
    if (!adze_lt_prepare(0)) {
        printf("no library\n");
        expect(!adze_lt_find(0, &p, 0, &algorithm), "no algorithm without a library");
        expect(!adze_lt_prepare(0) && !adze_lt_prepare(-1) && !adze_lt_prepare(1 << 20), "still no library");
        return expect_report();
    }
    expect(run(&p, LT_WORKSPACE, &algorithm) && algorithm.workspace == 1000 && right(&p), "f32, strided rows");
    expect(run(&p, LT_WORKSPACE, &algorithm), "the same, which is not asked for again");
    expect(run(&p, 0, &algorithm) && algorithm.workspace == 0 && right(&p), "without workspace");
    p.bias = bias;
    p.residual = (lt_matrix){residual, 9, 0};
    expect(run(&p, 0, &algorithm) && right(&p), "bias and residual");
    lt_product in_place = p;
    float before[SIZE];
    memcpy(before, residual, sizeof before);
    in_place.out = in_place.residual;
    expect(run(&in_place, 0, &algorithm), "residual as out");
    int same = 1;
    for (int i = 0; i < 5; i++)
        for (int j = 0; j < 7; j++)
            same &= residual[i * 9 + j] == out[i * 8 + j];
    expect(same, "residual as out has the same values");
    memcpy(residual, before, sizeof before);
    p.batches = 3;
    p.x.batch = 100, p.w.batch = 0, p.out.batch = 64, p.residual.batch = 60;
    expect(run(&p, 0, &algorithm) && right(&p), "a batch, with one w for all");
    p.batches = 1;
    p.scales = LT_VECTORS, p.x_scale = x_scale, p.w_scale = w_scale;
    p.residual.data = NULL;
    expect(run(&p, 0, &algorithm) && right(&p), "scales of rows");
    lt_product half = {.m = 6, .n = 9, .k = 16, .batches = 1, .dtype = ADZE_BF16, .out_dtype = ADZE_BF16};
    half.x = (lt_matrix){x16 + 1, 16, 0}, half.w = (lt_matrix){w16, 24, 0}, half.out = (lt_matrix){out16, 9, 0};
    half.x.data = x16;
    half.bias = bias16;
    expect(run(&half, 0, &algorithm) && right(&half), "bf16 with bias");
    half.out_dtype = ADZE_F32, half.bias = NULL, half.out.data = out;
    expect(run(&half, 0, &algorithm) && right(&half), "bf16 to f32");
    half.m = 3;
    expect(!adze_lt_find(0, &half, 0, &algorithm), "no algorithm");
    expect(!adze_lt_find(0, &half, 0, &algorithm), "no algorithm, and not asked for again");
    half.m = 6, half.x.row = 15;
    expect(!adze_lt_find(0, &half, 0, &algorithm), "rows that overlap");
    expect(!takes(ADZE_BF16, 13, 1280, 9000, 10226, 13 * 9000 * 2), "13 tokens off a border are copied elsewhere");
    expect(takes(ADZE_BF16, 13, 1280, 9000, 10226, 0), "and are cuBLASLt's where no scratch is there for a copy");
    expect(takes(ADZE_F16, 9, 13448, 72, 72, 0) && !takes(ADZE_F16, 8, 13448, 72, 72, 0), "many short rows");
    expect(takes(ADZE_F32, 2, 64, 15168, 15168, 0) && !takes(ADZE_F32, 1, 64, 15168, 15168, 0) &&
               !takes(ADZE_F32, 2, 200, 15168, 15168, 0),
           "the fewest long rows of f32");
    return expect_report();
}
