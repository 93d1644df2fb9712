/* gemm_exact.c - products of few rows with weights of 8 and 4 bits whose every sum, in any order, is a float: kernels
   give exactly that, also where most weights are zero, and where those of large elements of x are. */
#include <adze.h>
#include <stdint.h>
#include <string.h>

#define EXPECT_DETAIL adze_last_error()
#include "expect.h"

enum { M = 9, N = 37, K = 2240, GROUP = 128 };
static float x_floats[M][K], out[M][N];
static uint16_t x[M][K];
static int8_t weight[N][K];
static uint8_t packed[N][K / 2];
static float scale[N * (K / GROUP + 1)];

static uint32_t draw(void)
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return state >> 16;
}

/* Whole numbers from -15 to 15. Where `large` is not 1, every 16th is multiplied by it and has weights of zero. Of
   the others all but some are zero, with few. */
static void fill(float large, int few)
{
    memset(packed, 0, sizeof packed);
    for (int i = 0; i < M * K; i++) {
        float *f = &x_floats[i / K][i % K];
        uint32_t bits;
        *f = (float)(draw() % 31) - 15;
        *f *= i % 16 == 0 ? large : !few || i % 256 == 8;
        memcpy(&bits, f, sizeof bits);
        x[i / K][i % K] = (uint16_t)(bits >> 16);
    }
    for (int i = 0; i < N * K; i++) {
        const int w = large != 1 && i % 16 == 0 ? 0 : draw() % 4 ? 0 : (int)(draw() % 3) - 1;
        weight[i / K][i % K] = (int8_t)w;
        packed[i / K][i % K / 2] |= (uint8_t)((w + 8) << i % 2 * 4);
    }
}

/* Whether the product of m rows is exact, with k elements of each row. */
static int exact(int dtype, int m, int k)
{
    adze_gemm_args a = {.call = ADZE_CALL(gemm)};
    const int groups = dtype == ADZE_U8 ? (k + GROUP - 1) / GROUP : 1;
    a.x = (adze_tensor){x, {m, k}, {K, 1}, 2, ADZE_BF16};
    a.out = (adze_tensor){out, {m, N}, {N, 1}, 2, ADZE_F32}, a.out_dtype = ADZE_F32;
    a.w = (adze_tensor){weight, {N, k}, {K, 1}, 2, ADZE_I8};
    a.w_scale = (adze_tensor){scale, {N}, {1}, 1, ADZE_F32};
    if (dtype == ADZE_U8) {
        a.w = (adze_tensor){packed, {N, (k + 1) / 2}, {K / 2, 1}, 2, ADZE_U8};
        a.w_scale = (adze_tensor){scale, {N, groups}, {groups, 1}, 2, ADZE_F32};
        a.format = ADZE_FORMAT_U4, a.group = GROUP;
    }
    int ok = adze_gemm((adze_stream){.device = ADZE_CPU}, &a) == ADZE_OK;
    for (int r = 0; r < m; r++)
        for (int j = 0; j < N; j++) {
            double sum = 0;
            for (int i = 0; i < k; i++)
                sum += (double)x_floats[r][i] * weight[j][i];
            ok = ok && out[r][j] == sum;
        }
    return ok;
}

int main(void)
{
    static const int lengths[] = {1, 63, 130, 1000, 1025, K};
    for (size_t i = 0; i < sizeof scale / sizeof *scale; i++)
        scale[i] = 1;
    for (int t = 0; t < 4; t++) {
        fill(t == 0 ? 1 : t == 1 ? 0x1p17f : 0x1p21f, t == 3);
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
            for (int m = 1; m <= M; m++) {
                expect(exact(ADZE_I8, m, lengths[i]), "weights of i8");
                expect(exact(ADZE_U8, m, lengths[i]), "weights of 4 bits");
            }
    }
    return expect_report();
}
