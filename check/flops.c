/* flops.c - plain loops of multiplications and additions on the CPU: of floats in the widest vectors that it has, and
   of narrower numbers. */
#include "flops.h"

#include "kernel.h"

#if defined(__x86_64__)
#    include <immintrin.h>
#elif defined(__aarch64__)
#    include <arm_neon.h>
#endif

enum { PIECES = 64, STEPS = 20000, SUMS = 12 }; /* as many sums as hide the latency of an addition */
static _Atomic int sink;

/* SUMS vectors, each multiplied and added to STEPS times. */
#define LOOP(vector, first, step)                                                                                    \
    vector sum[SUMS];                                                                                                \
    for (int i = 0; i < SUMS; i++)                                                                                   \
        sum[i] = first;                                                                                              \
    for (int n = 0; n < STEPS; n++) {                                                                                \
        _Pragma("GCC unroll 12") for (int i = 0; i < SUMS; i++) sum[i] = step;                                       \
    }                                                                                                                \
    for (int i = 1; i < SUMS; i++)                                                                                   \
        sum[0] += sum[i];                                                                                            \
    sink |= sum[0][0] > 0

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static void loop_avx512(float x)
{
    const __m512 a = _mm512_set1_ps(x), b = _mm512_set1_ps(0.5f);
    LOOP(__m512, a, _mm512_fmadd_ps(sum[i], b, a));
}
__attribute__((target("avx2,fma"))) static void loop_avx2(float x)
{
    const __m256 a = _mm256_set1_ps(x), b = _mm256_set1_ps(0.5f);
    LOOP(__m256, a, _mm256_fmadd_ps(sum[i], b, a));
}
static void loop_any(float x)
{
    const __m128 a = _mm_set1_ps(x), b = _mm_set1_ps(0.5f);
    LOOP(__m128, a, _mm_add_ps(_mm_mul_ps(sum[i], b), a));
}
#elif defined(__aarch64__)
static void loop_any(float x)
{
    const float32x4_t a = vdupq_n_f32(x), b = vdupq_n_f32(0.5f);
    LOOP(float32x4_t, a, vfmaq_f32(a, sum[i], b));
}
#else
typedef float four __attribute__((vector_size(16)));
static void loop_any(float x)
{
    const four a = {x, x, x, x};
    LOOP(four, a, sum[i] * 0.5f + a);
}
#endif

static int width(void)
{
#if defined(__x86_64__)
    return adze_cpu_features() & ADZE_CPU_AVX512 ? 16 : adze_cpu_features() & ADZE_CPU_AVX2 ? 8 : 4;
#else
    return 4;
#endif
}

static void body(void *context, int64_t begin, int64_t end)
{
    (void)context;
    for (int64_t i = begin; i < end; i++)
#if defined(__x86_64__)
        (width() == 16 ? loop_avx512 : width() == 8 ? loop_avx2 : loop_any)((float)i);
#else
        loop_any((float)i);
#endif
}

/* ---- Narrower numbers ---- */

/* A loop, and what a step of it computes. */
typedef struct matrix_way {
    int feature;
    void (*loop)(void);
    double each;
} matrix_way;

#if defined(__x86_64__)
/* Four registers of tiles are multiplied with each other into four more, whose sums do not wait for one another. */
#    define TILES(multiply)                                                                                          \
        static const struct {                                                                                        \
            uint8_t palette, start_row, reserved[14];                                                                \
            uint16_t bytes[16];                                                                                      \
            uint8_t rows[16];                                                                                        \
        } config = {                                                                                                 \
            .palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};      \
        _tile_loadconfig(&config);                                                                                   \
        _tile_zero(0);                                                                                               \
        _tile_zero(1);                                                                                               \
        _tile_zero(2);                                                                                               \
        _tile_zero(3);                                                                                               \
        _tile_zero(4);                                                                                               \
        _tile_zero(5);                                                                                               \
        _tile_zero(6);                                                                                               \
        _tile_zero(7);                                                                                               \
        for (int n = 0; n < STEPS; n++) {                                                                            \
            multiply(0, 4, 6);                                                                                       \
            multiply(1, 5, 6);                                                                                       \
            multiply(2, 4, 7);                                                                                       \
            multiply(3, 5, 7);                                                                                       \
        }                                                                                                            \
        _tile_release()
__attribute__((target("amx-tile,amx-int8"))) static void loop_amx_int8(void)
{
    TILES(_tile_dpbssd);
}
__attribute__((target("amx-tile,amx-bf16"))) static void loop_amx_bf16(void)
{
    TILES(_tile_dpbf16ps);
}
__attribute__((target("avx512f,avx512vnni"))) static void loop_vnni(void)
{
    __m512i sum[SUMS];
    for (int i = 0; i < SUMS; i++)
        sum[i] = _mm512_set1_epi32(i);
    const __m512i a = _mm512_set1_epi8(1);
    for (int n = 0; n < STEPS; n++) {
        _Pragma("GCC unroll 12") for (int i = 0; i < SUMS; i++) sum[i] = _mm512_dpbusd_epi32(sum[i], a, a);
    }
    for (int i = 1; i < SUMS; i++)
        sum[0] = _mm512_add_epi32(sum[0], sum[i]);
    sink |= _mm512_reduce_add_epi32(sum[0]) > 0;
}
static const matrix_way ways[ADZE_MATRIX_WAYS] = {
    {ADZE_CPU_AMX_INT8, loop_amx_int8, 4.0 * 16 * 16 * 64},
    {ADZE_CPU_AMX, loop_amx_bf16, 4.0 * 16 * 16 * 32},
    {ADZE_CPU_VNNI, loop_vnni, (double)SUMS * 64},
};
#elif defined(__aarch64__)
/* Matrices of 2 x 4 and 4 x 2 numbers: by name, as the rest is compiled for processors without them. */
static void loop_bf16(void)
{
    float32x4_t sum[SUMS];
    for (int i = 0; i < SUMS; i++)
        sum[i] = vdupq_n_f32((float)i);
    const uint16x8_t a = vdupq_n_u16(0x3f80);
    for (int n = 0; n < STEPS; n++) {
        _Pragma("GCC unroll 12") for (int i = 0; i < SUMS; i++) __asm__(
            ".arch_extension bf16\n\tbfmmla %0.4s, %1.8h, %1.8h" : "+w"(sum[i]) : "w"(a));
    }
    for (int i = 1; i < SUMS; i++)
        sum[0] = vaddq_f32(sum[0], sum[i]);
    sink |= vgetq_lane_f32(sum[0], 0) > 0;
}
static const matrix_way ways[ADZE_MATRIX_WAYS] = {{ADZE_CPU_BF16, loop_bf16, (double)SUMS * 16}};
#else
static const matrix_way ways[ADZE_MATRIX_WAYS];
#endif

static void matrix_body(void *context, int64_t begin, int64_t end)
{
    const matrix_way *way = context;
    for (int64_t i = begin; i < end; i++)
        way->loop();
}

double adze_cpu_flops(adze_unit unit, int way)
{
    if (unit == ADZE_UNIT_FLOAT) {
        adze_parallel_for(PIECES, 1, body, NULL);
        return 2.0 * width() * SUMS * STEPS * PIECES;
    }
    matrix_way its = ways[way];
    if (!its.loop || (adze_cpu_features() & its.feature) != its.feature)
        return 0;
    adze_parallel_for(PIECES, 1, matrix_body, &its);
    return 2 * its.each * STEPS * PIECES;
}

#if !ADZE_CUDA
const char *adze_gpu_flops(adze_stream stream, adze_unit unit, void *out, double *flops)
{
    (void)stream, (void)unit, (void)out;
    *flops = 0;
    return "this build has no CUDA";
}
#endif
