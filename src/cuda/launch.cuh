/* launch.cuh - launches with programmatic dependent launch (PDL), and their errors as a status. */
#ifndef ADZE_CUDA_LAUNCH_CUH
#define ADZE_CUDA_LAUNCH_CUH

#include "kernel.h"

#include <cuda_runtime.h>

extern "C" int adze_cuda_pdl(int device); /* device.cu: whether launches on it may overlap */

/* With PDL a kernel starts while the one before it on the stream still runs. Every block calls pdl_wait() before it
   touches memory that another kernel may write, and before it exits; pdl_launch_next() comes early. */
__device__ __forceinline__ void pdl_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void pdl_launch_next()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

static inline adze_status cuda_status(const char *op, cudaError_t e)
{
    return e == cudaSuccess ? ADZE_OK : adze_fail(ADZE_DEVICE, "%s: %s", op, cudaGetErrorString(e));
}

/* kernel<<<grid, block, shared>>>(params...) on the call's stream. */
template <typename... P, typename... A>
static adze_status launch(const char *op, adze_stream stream, void (*kernel)(P...), int64_t grid, dim3 block,
                          size_t shared, A... params)
{
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)grid);
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = (cudaStream_t)stream.handle;
    config.attrs = &attribute;
    config.numAttrs = adze_cuda_pdl(stream.device) ? 1 : 0;
    return cuda_status(op, cudaLaunchKernelEx(&config, kernel, (P)params...));
}

/* Blocks for `work` items of `per_block` each, within what a grid may have: kernels loop over the rest. */
static inline int64_t grid_for(int64_t work, int64_t per_block)
{
    const int64_t blocks = (work + per_block - 1) / per_block;
    return blocks < 0x7fffffff ? blocks : 0x7fffffff;
}

#endif
