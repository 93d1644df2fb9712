/* gpu.c - memory for the harness: the host's here, and a device's through cudart when CUDA is built in. */
#include "gpu.h"

#include <stdlib.h>
#include <string.h>

#if ADZE_CUDA
#    include <cuda_runtime_api.h>

static const char *message(cudaError_t e)
{
    return e == cudaSuccess ? NULL : cudaGetErrorString(e);
}
#endif

void *adze_memory_take(adze_stream stream, size_t bytes)
{
    if (stream.device == ADZE_CPU)
        return aligned_alloc(64, (bytes + 63) / 64 * 64);
#if ADZE_CUDA
    void *p = NULL;
    if (cudaSetDevice(stream.device) == cudaSuccess && cudaMalloc(&p, bytes) == cudaSuccess)
        return p;
#endif
    return NULL;
}

void adze_memory_give(adze_stream stream, void *memory)
{
    if (stream.device == ADZE_CPU)
        free(memory);
#if ADZE_CUDA
    else
        cudaFree(memory);
#endif
}

const char *adze_memory_write(adze_stream stream, void *to, const void *from, size_t bytes)
{
    if (stream.device == ADZE_CPU) {
        memcpy(to, from, bytes);
        return NULL;
    }
#if ADZE_CUDA
    return message(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
#else
    return "this build has no CUDA";
#endif
}

const char *adze_memory_read(adze_stream stream, void *to, const void *from, size_t bytes)
{
    if (stream.device == ADZE_CPU) {
        memcpy(to, from, bytes);
        return NULL;
    }
#if ADZE_CUDA
    return message(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
#else
    return "this build has no CUDA";
#endif
}

const char *adze_memory_sync(adze_stream stream)
{
#if ADZE_CUDA
    if (stream.device != ADZE_CPU)
        return message(cudaStreamSynchronize((cudaStream_t)stream.handle));
#endif
    (void)stream;
    return NULL;
}
