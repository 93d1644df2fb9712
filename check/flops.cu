/* flops.cu - plain loops of multiplications and additions: in float on CUDA cores, and of bf16 on tensor cores. */
#include "flops.h"

#include <cuda_runtime.h>
#include <stdint.h>

enum { THREADS = 256, BLOCKS_PER_SM = 4, STEPS = 4096, SUMS = 8 };

static __global__ void __launch_bounds__(THREADS) float_kernel(float *out, float b)
{
    float sum[SUMS];
    for (int i = 0; i < SUMS; i++)
        sum[i] = (float)(threadIdx.x + i);
    for (int n = 0; n < STEPS; n++) {
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            sum[i] = fmaf(sum[i], b, b);
    }
    float all = 0;
    for (int i = 0; i < SUMS; i++)
        all += sum[i];
    if (all == 12345.0f) /* never; but the sums must stay */
        out[0] = all;
}

/* Products of 16 x 16 and 16 x 8 in each warp. mma.sync is what every architecture from sm_80 on has. */
static __global__ void __launch_bounds__(THREADS) matrix_kernel(float *out)
{
#if __CUDA_ARCH__ >= 800
    float sum[SUMS][4] = {};
    const uint32_t a = threadIdx.x, b = threadIdx.x + 1;
    for (int n = 0; n < STEPS / 4; n++) {
#    pragma unroll
        for (int i = 0; i < SUMS; i++)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%5,%5}, "
                         "{%0,%1,%2,%3};"
                         : "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3])
                         : "r"(a), "r"(b));
    }
    float all = 0;
    for (int i = 0; i < SUMS; i++)
        all += sum[i][0] + sum[i][1] + sum[i][2] + sum[i][3];
    if (all == 12345.0f)
        out[0] = all;
#endif
}

extern "C" const char *adze_gpu_flops(adze_stream stream, adze_unit unit, void *out, double *flops)
{
    const cudaStream_t s = (cudaStream_t)stream.handle;
    int sms = 0, major = 0;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, stream.device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, stream.device);
    const int blocks = sms * BLOCKS_PER_SM;
    *flops = 0;
    if (unit == ADZE_UNIT_FLOAT) {
        float_kernel<<<blocks, THREADS, 0, s>>>((float *)out, 0.5f);
        *flops = 2.0 * SUMS * STEPS * THREADS * blocks;
    } else if (major >= 8) {
        matrix_kernel<<<blocks, THREADS, 0, s>>>((float *)out);
        *flops = 2.0 * 16 * 8 * 16 * SUMS * (STEPS / 4) * (THREADS / 32) * blocks;
    }
    const cudaError_t e = cudaGetLastError();
    return e == cudaSuccess ? NULL : cudaGetErrorString(e);
}
