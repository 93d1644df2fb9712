/* flops.c - a plain loop of multiplications and additions on the CPU, in the widest vectors that it has. */
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

double adze_cpu_flops(void)
{
    adze_parallel_for(PIECES, 1, body, NULL);
    return 2.0 * width() * SUMS * STEPS * PIECES;
}

#if !ADZE_CUDA
const char *adze_gpu_flops(adze_stream stream, adze_unit unit, void *out, double *flops)
{
    (void)stream, (void)unit, (void)out;
    *flops = 0;
    return "this build has no CUDA";
}
#endif
