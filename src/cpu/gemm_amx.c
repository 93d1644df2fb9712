/* gemm of bf16 on x86-64 processors that multiply matrices of it (AMX), where x has more than a few rows. */
#define GEMM_NORM(op) adze_##op##_cpu_avx512
#include "cpu/gemm_tile_amx.h"

#include "cpu/gemm_panels.h"

enum { AMX_FEW = 4 /* rows of x that are as fast without: memory limits them */ };

int adze_gemm_cpu_amx_accepts(adze_stream stream, const void *args);
int adze_gemm_cpu_amx_accepts(adze_stream stream, const void *args)
{
    const adze_gemm_args *a = args;
    (void)stream;
    return a->x.dtype == ADZE_BF16 && a->w.dtype == ADZE_BF16 && gemm_takes_panels(a, AMX_FEW);
}

ADZE_CPU_KERNEL(gemm)
{
    gemm_call c;
    (void)stream;
    gemm_init(&c, args);
    return panels_all(&c);
}
