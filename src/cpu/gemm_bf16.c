/* gemm of bf16 on aarch64 processors that multiply matrices of it (BFMMLA), where x has more rows than a panel. */
#define GEMM_NORM(op) adze_##op##_cpu
#include "cpu/gemm_tile_bf16.h"

#include "cpu/gemm_panels.h"

int adze_gemm_cpu_bf16_accepts(adze_stream stream, const void *args);
int adze_gemm_cpu_bf16_accepts(adze_stream stream, const void *args)
{
    const adze_gemm_args *a = args;
    (void)stream;
    return a->x.dtype == ADZE_BF16 && a->w.dtype == ADZE_BF16 && gemm_takes_panels(a, PANEL);
}

ADZE_CPU_KERNEL(gemm)
{
    gemm_call c;
    (void)stream;
    gemm_init(&c, args);
    return panels_all(&c);
}
