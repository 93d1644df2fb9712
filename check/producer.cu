/* producer.cu - on a GPU: a slow producer, a consumer, and kernels that are wrong behind a producer alone. */
#include "producer.h"

#include "kernel.h"

#include <cuda_runtime.h>

extern "C" int adze_cuda_pdl(int device); /* src/cuda/device.cu */

enum {
    THREADS = 512,
    BLOCKS = 16,         /* at most a quarter of the GPU, so that the next kernel can run at the same time */
    LATE_NS = 150 * 1000 /* much longer than it takes the host to launch the kernel behind it */
};

static __device__ __forceinline__ void wait_for_the_last()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
static __device__ __forceinline__ void let_the_next_start()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
static __device__ __forceinline__ uint64_t now_ns()
{
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

/* Each thread takes V vectors of 16 bytes at a time, all loads before the first store. */
static __device__ __forceinline__ void copy_all(const adze_copies &copies)
{
    constexpr int V = 4;
    const size_t step = (size_t)gridDim.x * blockDim.x, first = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (int p = 0; p < copies.count; p++) {
        uint4 *to = (uint4 *)copies.part[p].to;
        const uint4 *from = (const uint4 *)copies.part[p].from;
        const size_t n = copies.part[p].bytes / sizeof(uint4);
        for (size_t i = first; i < n; i += V * step) {
            uint4 held[V];
#pragma unroll
            for (int v = 0; v < V; v++)
                if (i + v * step < n)
                    held[v] = from[i + v * step];
#pragma unroll
            for (int v = 0; v < V; v++)
                if (i + v * step < n)
                    to[i + v * step] = held[v];
        }
    }
}

static __global__ void __launch_bounds__(THREADS) produce(const __grid_constant__ adze_copies copies)
{
    let_the_next_start();
    const uint64_t begin = now_ns();
    while (now_ns() - begin < LATE_NS)
        __nanosleep(1000);
    copy_all(copies);
}

static __global__ void __launch_bounds__(THREADS) consume(const __grid_constant__ adze_copies copies)
{
    wait_for_the_last();
    copy_all(copies);
}

template <adze_wait WAIT>
static __global__ void __launch_bounds__(THREADS) gated_add(float *out,              // [n]
                                                            const float *x,          // [n]
                                                            const float *residual,   // [n]
                                                            const float *gate,       // [n]
                                                            const float *gate_table, // [n]
                                                            int64_t n)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    float early_x = 0, early_table = 0;
    let_the_next_start();
    if (WAIT == ADZE_WAIT_AFTER_INPUT && i < n)
        early_x = *(const volatile float *)(x + i);
    if (WAIT == ADZE_WAIT_AFTER_TABLE && i < n)
        early_table = *(const volatile float *)(gate_table + i);
    if (WAIT != ADZE_WAIT_LAST && WAIT != ADZE_WAIT_NEVER)
        wait_for_the_last();
    if (i < n) {
        const float factor = gate[i] + (WAIT == ADZE_WAIT_AFTER_TABLE ? early_table : gate_table[i]);
        out[i] = residual[i] + factor * (WAIT == ADZE_WAIT_AFTER_INPUT ? early_x : x[i]);
    }
    if (WAIT == ADZE_WAIT_LAST)
        wait_for_the_last();
}

template <typename... P, typename... A>
static cudaError_t launch(adze_stream stream, int overlaps, void (*kernel)(P...), int64_t blocks, A... params)
{
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3(THREADS);
    config.stream = (cudaStream_t)stream.handle;
    config.attrs = &attribute;
    config.numAttrs = overlaps && adze_cuda_pdl(stream.device);
    return cudaLaunchKernelEx(&config, kernel, (P)params...);
}

static int64_t few_blocks(int device)
{
    const int quarter = adze_cuda_sm_count(device) / 4;
    return quarter < 1 ? 1 : quarter < BLOCKS ? quarter : BLOCKS;
}

static const char *message(cudaError_t e)
{
    return e == cudaSuccess ? NULL : cudaGetErrorString(e);
}

extern "C" const char *adze_gpu_produce(adze_stream stream, const adze_copies *copies)
{
    return message(launch(stream, 0, produce, few_blocks(stream.device), *copies));
}

extern "C" const char *adze_gpu_consume(adze_stream stream, const adze_copies *copies)
{
    return message(launch(stream, 1, consume, few_blocks(stream.device), *copies));
}

extern "C" adze_status adze_gpu_gated_add(adze_stream stream, adze_wait wait, const adze_gated_add_args *a)
{
    static void (*const kernels[ADZE_WAITS])(float *, const float *, const float *, const float *, const float *,
                                             int64_t) = {gated_add<ADZE_WAIT_FIRST>, gated_add<ADZE_WAIT_AFTER_TABLE>,
                                                         gated_add<ADZE_WAIT_AFTER_INPUT>, gated_add<ADZE_WAIT_LAST>,
                                                         gated_add<ADZE_WAIT_NEVER>};
    int64_t n = 1;
    for (int d = 0; d < a->x.rank; d++)
        n *= a->x.shape[d];
    const cudaError_t e =
        launch(stream, 1, kernels[wait], (n + THREADS - 1) / THREADS, (float *)a->out.data, (const float *)a->x.data,
               (const float *)a->residual.data, (const float *)a->gate.data, (const float *)a->gate_table.data, n);
    return e == cudaSuccess ? ADZE_OK : adze_fail(ADZE_DEVICE, "gated_add: %s", cudaGetErrorString(e));
}
