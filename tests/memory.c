/* memory.c - what calls take from the heap: nothing for common rows, nothing that they keep, and where there is no
   memory they give the same numbers. The C library's allocator is replaced by one that counts and can refuse. */
#include <adze.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"

void *__libc_malloc(size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *block);

static int watched, taken, kept; /* blocks, while a call is watched, */
static int most;                 /* and how many there are */

static void *counted(void *block)
{
    if (watched && block)
        taken++, kept++;
    return block;
}
void *malloc(size_t size)
{
    return watched && taken >= most ? NULL : counted(__libc_malloc(size));
}
void *aligned_alloc(size_t alignment, size_t size)
{
    return watched && taken >= most ? NULL : counted(__libc_memalign(alignment, size));
}
void free(void *block)
{
    if (watched && block)
        kept--;
    __libc_free(block);
}

enum { ROWS = 4, LONG = 20000, GROUPS = 32, CHANNELS = 64, POSITIONS = 32768 };
static float x[POSITIONS * CHANNELS], residual[ROWS * LONG], out[POSITIONS * CHANNELS];
static uint16_t half[ROWS * LONG], half_out[ROWS * LONG];
static double exact[ROWS * LONG];
static const adze_stream cpu = {.device = ADZE_CPU};

static adze_tensor rows(void *data, int dtype, int64_t count, int64_t dim)
{
    return (adze_tensor){data, {count, dim}, {dim, 1}, 2, dtype};
}
static adze_tensor row(void *data, int dtype, int64_t dim)
{
    return (adze_tensor){data, {dim}, {1}, 1, dtype};
}

static void *norm_call, *softmax_call, *group_call, *gemm_call;
static adze_status run_rms(void)
{
    return adze_rms_norm(cpu, norm_call);
}
static adze_status run_layer(void)
{
    return adze_layer_norm(cpu, norm_call);
}
static adze_status run_softmax(void)
{
    return adze_softmax(cpu, softmax_call);
}
static adze_status run_group(void)
{
    return adze_group_norm(cpu, group_call);
}

static adze_status run_gemm(void)
{
    return adze_gemm(cpu, gemm_call);
}

/* Runs a call where there are `there` blocks; those it took, or -1 when it failed or kept one. */
static int blocks_of(adze_status (*call)(void), int there)
{
    taken = kept = 0;
    most = there;
    watched = 1;
    const adze_status status = call();
    watched = 0;
    return status == ADZE_OK && kept == 0 ? taken : -1;
}
static int blocks(adze_status (*call)(void), int without)
{
    return blocks_of(call, without ? 0 : 1000);
}

/* Sums of float32 in at least 16 lanes and a few roundings, each half a unit; relative to a row's largest. */
static int near(const float *found, int64_t count, int64_t dim)
{
    for (int64_t r = 0; r < count; r++) {
        double largest = 0;
        for (int64_t i = 0; i < dim; i++)
            largest = fmax(largest, fabs(exact[r * dim + i]));
        for (int64_t i = 0; i < dim; i++)
            if (!(fabs((double)found[r * dim + i] - exact[r * dim + i]) <=
                  ((double)dim / 16 + 36) * 0x1p-24 * largest))
                return 0;
    }
    return 1;
}
static void define_norm(int centred)
{
    for (int r = 0; r < ROWS; r++) {
        double mean = 0, square = 0;
        double *const y = exact + (size_t)r * LONG;
        for (int i = 0; i < LONG; i++) {
            y[i] = (double)(x[r * LONG + i] + residual[r * LONG + i]);
            mean += centred ? y[i] / LONG : 0;
        }
        for (int i = 0; i < LONG; i++)
            square += (y[i] - mean) * (y[i] - mean) / LONG;
        for (int i = 0; i < LONG; i++)
            y[i] = (y[i] - mean) / sqrt(square + (double)1e-6f);
    }
}
static void define_softmax(void)
{
    for (int r = 0; r < ROWS; r++) {
        double sum = 0;
        double *const y = exact + (size_t)r * LONG;
        for (int i = 0; i < LONG; i++)
            sum += y[i] = exp((double)x[r * LONG + i]);
        for (int i = 0; i < LONG; i++)
            y[i] /= sum;
    }
}

/* Rows of the lengths that models have: read as they are, or kept on the stack. */
static void check_common_rows(void)
{
    adze_rms_norm_args norm = {.call = ADZE_CALL(rms_norm), .eps = 1e-6f};
    norm_call = &norm;
    norm.x = rows(half, ADZE_BF16, ROWS, 4096), norm.out = rows(half_out, ADZE_BF16, ROWS, 4096);
    norm.weight = row(half, ADZE_BF16, 4096);
    norm.residual = norm.x;
    expect(run_rms() == ADZE_OK, "the first call, which looks at the machine");
#if defined(__x86_64__) /* NEON keeps the weight as well */
    expect(blocks(run_rms, 0) == 0, "rms_norm of 4096 bf16 with a residual takes nothing from the heap");
    if (!__builtin_cpu_supports("avx2"))
        return;
#endif
    norm.residual = (adze_tensor){0};
    norm.x = rows(half, ADZE_F16, ROWS, LONG), norm.out = rows(half_out, ADZE_F16, ROWS, LONG);
    norm.weight = row(half, ADZE_F16, LONG);
    expect(blocks(run_rms, 0) == 0, "rms_norm of 20000 f16 takes nothing from the heap");
    expect(blocks(run_layer, 0) == 0, "layer_norm of 20000 f16 takes nothing from the heap");
}

static void check_long_rows(void)
{
    adze_rms_norm_args norm = {.call = ADZE_CALL(rms_norm), .eps = 1e-6f};
    adze_softmax_args softmax = {.call = ADZE_CALL(softmax)};
    norm_call = &norm, softmax_call = &softmax;
    norm.x = softmax.x = rows(x, ADZE_F32, ROWS, LONG);
    norm.out = softmax.out = rows(out, ADZE_F32, ROWS, LONG);
    norm.residual = rows(residual, ADZE_F32, ROWS, LONG);
    for (int without = 0; without < 2; without++) {
        const char *const what = without ? "without memory" : "with memory that is given back";
        char text[100];
        for (int centred = 0; centred < 2; centred++) {
            memset(out, 0, sizeof out);
            define_norm(centred);
            snprintf(text, sizeof text, "%s of long rows, %s", centred ? "layer_norm" : "rms_norm", what);
            expect(blocks(centred ? run_layer : run_rms, without) == !without && near(out, ROWS, LONG), text);
        }
        memset(out, 0, sizeof out);
        define_softmax();
        snprintf(text, sizeof text, "softmax of long rows, %s", what);
        expect(blocks(run_softmax, without) == !without && near(out, ROWS, LONG), text);
    }
}

/* As many parts of groups as need a block for what is known of them. */
static void check_groups(void)
{
    adze_group_norm_args group = {.call = ADZE_CALL(group_norm), .groups = GROUPS, .eps = 1e-6f};
    static float wanted[POSITIONS * CHANNELS];
    group_call = &group;
    group.channels_last = 1;
    group.x = (adze_tensor){x, {1, POSITIONS, CHANNELS}, {POSITIONS * CHANNELS, CHANNELS, 1}, 3, ADZE_F32};
    group.out = group.x;
    group.out.data = wanted;
    expect(blocks(run_group, 0) == 1, "group_norm of many parts, with memory that is given back");
    group.out.data = out;
    expect(blocks(run_group, 1) == 0 && memcmp(out, wanted, sizeof out) == 0, "and the same bits without memory");
}

/* A product of many rows: a block for x, and one for sums, which it can do without. */
static void check_products(void)
{
    enum { M = 40, N = 300, K = 500 };
    static float wanted[M * N];
    adze_gemm_args gemm = {.call = ADZE_CALL(gemm), .x = rows(x, ADZE_F32, M, K), .w = rows(x, ADZE_F32, N, K)};
    gemm_call = &gemm;
    gemm.out = rows(wanted, ADZE_F32, M, N);
    expect(blocks(run_gemm, 0) == 2, "gemm of 40 rows, with memory that is given back");
    gemm.out.data = out;
    expect(blocks_of(run_gemm, 1) == 1 && memcmp(out, wanted, sizeof wanted) == 0,
           "and the same bits with less of it");
    expect(blocks(run_gemm, 1) == -1 && kept == 0 && strstr(adze_last_error(), "gemm: no memory for "),
           "and a sentence without any");
}

int main(void)
{
    uint32_t state = 1;
    for (size_t i = 0; i < sizeof x / sizeof *x; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) * 0x1p-22f - 2;
    }
    for (int i = 0; i < ROWS * LONG; i++) {
        residual[i] = x[i + ROWS * LONG];
        half[i] = (uint16_t)(0x3c00 + i % 1024); /* 1 to 2 in f16, 0.008 to 2 in bf16 */
    }
    expect(adze_set_threads(1) == ADZE_OK, "one thread");
    check_common_rows();
    check_long_rows();
    check_groups();
    check_products();
    return expect_report();
}
