/* gemm_rows.c - what the bits of a row of a product depend on: with ADZE_BATCH_INVARIANT neither on the number of
   rows nor on the others; and never on the number of threads. cuda_gemm_rows.c includes it, for a GPU. */
#include <adze.h>
#include <stdint.h>
#include <string.h>

#define EXPECT_DETAIL adze_last_error()
#include "expect.h"

enum { M = 70, N = 300, K = 1300, GROUPS = (K + 31) / 32 };
static uint16_t x[M * K], half[N * K];
static float out[2][M * N];
static uint8_t bytes[N * K];
static float scale[N * GROUPS];
static int k, of_bytes, group; /* x has the dtype of the weights; columns that share a scale, or 0: a row has one */

#ifdef CUDART_VERSION
enum { DEVICE = 0 };
static int finished(void)
{
    return cudaDeviceSynchronize() == cudaSuccess;
}
#else
enum { DEVICE = ADZE_CPU };
static int finished(void)
{
    return 1;
}
#endif

static adze_tensor matrix(void *data, int64_t rows, int64_t columns, int dtype)
{
    return (adze_tensor){data, {rows, columns}, {columns, 1}, 2, dtype};
}

/* Rows first to first + m of the product with weights of a dtype, to the same rows of `to`. */
static int product(int dtype, int first, int m, uint32_t flags, float *to)
{
    adze_gemm_args a = {.call = ADZE_CALL(gemm)};
    a.call.flags = flags;
    a.x = matrix(x + first * k, m, k, ADZE_BF16);
    a.out = matrix(to + first * N, m, N, ADZE_F32), a.out_dtype = ADZE_F32;
    a.w = matrix(dtype == ADZE_BF16 ? (void *)half : bytes, N, dtype == ADZE_U8 ? k / 2 : k, dtype);
    if (of_bytes) {
        a.x = matrix(bytes + first * k, m, k, dtype);
        a.x_scale = (adze_tensor){scale + first, {m}, {1}, 1, ADZE_F32};
    }
    if (dtype != ADZE_BF16) {
        a.w_scale = matrix(scale, N, group ? (k + group - 1) / group : 1, ADZE_F32), a.group = group;
        a.w_scale.rank = group ? 2 : 1;
    }
    a.format = dtype == ADZE_U8 ? ADZE_FORMAT_U4 : ADZE_FORMAT_DTYPE;
    return adze_gemm((adze_stream){.device = DEVICE}, &a) == ADZE_OK && finished();
}

/* With rows of k elements. */
static void check_kinds(void)
{
    static const struct {
        int dtype, group, of_bytes;
    } kinds[] = {{ADZE_BF16, 0, 0}, {ADZE_I8, 32, 0},  {ADZE_U8, 32, 0}, {ADZE_U8, 128, 0},  {ADZE_U8, 0, 0},
                 {ADZE_I8, 0, 0},   {ADZE_I8, 128, 0}, {ADZE_I8, 0, 1},  {ADZE_F8E4M3, 0, 1}};
    static const int counts[] = {2, 7, 8, 9, 17, 33, M};
    for (size_t d = 0; d < sizeof kinds / sizeof *kinds; d++) {
        const int dtype = kinds[d].dtype;
        int ok = 1;
        of_bytes = kinds[d].of_bytes, group = kinds[d].group;
        for (int row = 0; row < M; row++)
            ok = ok && product(dtype, row, 1, ADZE_BATCH_INVARIANT, out[0]);
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            const int last = M - counts[i]; /* the first rows, and the last ones */
            for (int first = 0; first <= last; first += last ? last : 1) {
                ok = ok && product(dtype, first, counts[i], ADZE_BATCH_INVARIANT, out[1]) &&
                     memcmp(out[0] + first * N, out[1] + first * N, (size_t)counts[i] * N * sizeof **out) == 0;
                memset(out[1], 0, sizeof out[1]);
            }
        }
        expect(ok, "a row's bits, alone and among others");
        expect(adze_set_threads(1) == ADZE_OK && product(dtype, 0, M, 0, out[0]), "one thread");
        for (int threads = 2; threads < 5; threads++) {
            ok = adze_set_threads(threads) == ADZE_OK && product(dtype, 0, M, 0, out[1]);
            expect(ok && memcmp(out[0], out[1], sizeof *out) == 0, "the same bits by more threads");
            memset(out[1], 0, sizeof out[1]);
        }
    }
}

int main(void)
{
    static const int lengths[] = {K, 1024, 128};
    uint32_t state = 1;
    for (int i = 0; i < N * K; i++) {
        state = state * 1664525u + 1013904223u;
        half[i] = (uint16_t)(0x3e00 + (state >> 24) + (state >> 8 & 0x8000)); /* bf16, 1/8 to 1/2, either sign */
        bytes[i] = state >> 16 & 0xbf;                                        /* as f8e4m3 no NaN */
        x[i % (M * K)] = (uint16_t)(half[i] ^ (state << 1 & 0x8000));
        scale[i % (N * GROUPS)] = 0x1p-6f + (float)(state >> 26) * 0x1p-10f;
    }
#ifdef CUDART_VERSION
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        printf("skipped: there is no GPU\n");
        return 77;
    }
    void *const arrays[] = {x, half, out, bytes, scale};
    const size_t sizes[] = {sizeof x, sizeof half, sizeof out, sizeof bytes, sizeof scale};
    for (int i = 0; i < 5; i++)
        expect(cudaHostRegister(arrays[i], sizes[i], cudaHostRegisterDefault) == cudaSuccess, "memory for a GPU");
#endif
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        k = lengths[i];
        check_kinds();
    }
    return expect_report();
}
