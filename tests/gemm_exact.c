/* gemm_exact.c - products of few rows with weights of 8 and 4 bits whose every sum, in any order, is a float: kernels
   give exactly that, also where most weights are zero, and where those of large elements of x are. */
#include <adze.h>
#include <stdint.h>
#include <string.h>

#define EXPECT_DETAIL adze_last_error()
#include "expect.h"

enum { M = 9, N = 37, K = 2240, GROUPS = K / 32 };
enum { NO_ZEROS, ZEROS, LARGE_ZEROS }; /* of weights of 4 bits: up to 15, and up to 255 */
static float x_floats[M][K], out[M][N];
static uint16_t x[M][K];
static int8_t weight[N][K];
static uint8_t packed[N][K / 2], zero[N * GROUPS];
static int16_t number[N][K]; /* what packed weights are, less their zeros */
static float scale[N * GROUPS];

static uint32_t draw(void)
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return state >> 16;
}

enum { SMALL, LARGE, LARGER, FEW, ALL_BITS, FILLS };
/* Whole numbers from -15 to 15. Of LARGE and so on every 16th is multiplied by a power of two and has weights of
   zero; of FEW all others but some are zero. Of ALL_BITS each is 255 or -255, the largest bf16 below a power of two.
 */
static void fill(int kind)
{
    const float large = kind == LARGE ? 0x1p17f : kind == LARGER || kind == FEW ? 0x1p21f : 1;
    for (int i = 0; i < M * K; i++) {
        float *f = &x_floats[i / K][i % K];
        uint32_t bits;
        *f = (float)(draw() % 31) - 15;
        *f *= i % 16 == 0 ? large : kind != FEW || i % 256 == 8;
        if (kind == ALL_BITS)
            *f = draw() % 2 ? 255 : -255;
        memcpy(&bits, f, sizeof bits);
        x[i / K][i % K] = (uint16_t)(bits >> 16);
    }
    for (int i = 0; i < N * K; i++) {
        const int w = large != 1 && i % 16 == 0 ? 0 : draw() % 4 ? 0 : (int)(draw() % 3) - 1;
        weight[i / K][i % K] = (int8_t)w;
    }
}

/* The weights in 4 bits, in rows of `groups` groups. Those of a large zero are others. */
static void pack(int k, int group, int groups, int zeros)
{
    memset(packed, 0, sizeof packed);
    for (int i = 0; i < N * groups; i++)
        zero[i] = (uint8_t)(zeros == NO_ZEROS ? 8 : zeros == LARGE_ZEROS && i % 5 == 0 ? 14 + i % 242 : 1 + i % 14);
    for (int j = 0; j < N; j++)
        for (int i = 0; i < k; i++) {
            const int z = zero[j * groups + (group ? i / group : 0)], w = weight[j][i], q = z > 14 ? w + 8 : w + z;
            packed[j][i / 2] |= (uint8_t)(q << i % 2 * 4);
            number[j][i] = (int16_t)(q - z);
        }
}

/* Whether the product of m rows is exact, with k elements of each row. */
static int exact(int x_dtype, int dtype, int group, int zeros, int m, int k)
{
    adze_gemm_args a = {.call = ADZE_CALL(gemm)};
    const int groups = group ? (k + group - 1) / group : 1;
    void *const of_x = x_dtype == ADZE_F32 ? (void *)x_floats : (void *)x;
    a.x = (adze_tensor){of_x, {m, k}, {K, 1}, 2, x_dtype};
    a.out = (adze_tensor){out, {m, N}, {N, 1}, 2, ADZE_F32}, a.out_dtype = ADZE_F32;
    a.w = (adze_tensor){weight, {N, k}, {K, 1}, 2, ADZE_I8};
    a.w_scale = (adze_tensor){scale, {N, groups}, {groups, 1}, group ? 2 : 1, ADZE_F32};
    a.group = group;
    if (dtype == ADZE_U8) {
        pack(k, group, groups, zeros);
        a.w = (adze_tensor){packed, {N, (k + 1) / 2}, {K / 2, 1}, 2, ADZE_U8};
        a.format = ADZE_FORMAT_U4;
        if (zeros != NO_ZEROS)
            a.w_zero = (adze_tensor){zero, {N, groups}, {groups, 1}, group ? 2 : 1, ADZE_U8};
    }
    int ok = adze_gemm((adze_stream){.device = ADZE_CPU}, &a) == ADZE_OK;
    for (int r = 0; r < m; r++)
        for (int j = 0; j < N; j++) {
            double sum = 0;
            for (int i = 0; i < k; i++)
                sum += (double)x_floats[r][i] * (dtype == ADZE_U8 ? number[j][i] : weight[j][i]);
            ok = ok && out[r][j] == sum;
        }
    return ok;
}

int main(void)
{
    static const int lengths[] = {1, 63, 130, 1000, 1025, K}, groups[] = {0, 32, 64, 128};
    for (size_t i = 0; i < sizeof scale / sizeof *scale; i++)
        scale[i] = 1;
    for (int t = 0; t < FILLS; t++) {
        fill(t);
        for (int n = 0; n < 6 * 4 * M; n++) {
            const int k = lengths[n % 6], group = groups[n / 6 % 4], m = n / 24 + 1;
            const int dtype = n % 7 % 2 ? ADZE_F32 : ADZE_BF16;
            expect(exact(dtype, ADZE_I8, group, NO_ZEROS, m, k), "weights of i8");
            for (int zeros = NO_ZEROS; zeros < (t == SMALL ? LARGE_ZEROS + 1 : LARGE_ZEROS); zeros++)
                expect(exact(dtype, ADZE_U8, group, zeros, m, k), "weights of 4 bits");
        }
    }
    return expect_report();
}
