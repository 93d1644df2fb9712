/* graph.c - CUDA for the benchmark: a stream, graphs and events. */
#include "gpu.h"

#include <stdio.h>

#if ADZE_CUDA
#    include <cuda_runtime_api.h>

void adze_cuda_set_pdl(int on); /* src/cuda/device.cu */

static const char *message(cudaError_t e)
{
    return e == cudaSuccess ? NULL : cudaGetErrorString(e);
}

/* A blocking stream: copies on the default stream and work on this one wait for each other. */
const char *adze_gpu_open(adze_stream *stream)
{
    cudaStream_t made = NULL;
    cudaError_t e = cudaSetDevice(stream->device);
    if (e == cudaSuccess)
        e = cudaStreamCreate(&made);
    stream->handle = made;
    return message(e);
}

void adze_gpu_close(adze_stream stream)
{
    cudaStreamDestroy((cudaStream_t)stream.handle);
}

const char *adze_gpu_repeat(void *memory, size_t bytes, size_t total)
{
    cudaError_t e = cudaSuccess;
    for (size_t done = bytes; done < total && e == cudaSuccess; done *= 2)
        e = cudaMemcpy((char *)memory + done, memory, done < total - done ? done : total - done,
                       cudaMemcpyDeviceToDevice);
    return message(e);
}

void adze_gpu_pdl(int on)
{
    adze_cuda_set_pdl(on);
}

const char *adze_graph_begin(adze_stream stream)
{
    return message(cudaStreamBeginCapture((cudaStream_t)stream.handle, cudaStreamCaptureModeThreadLocal));
}

const char *adze_graph_end(adze_stream stream, void **graph)
{
    cudaGraph_t captured = NULL;
    cudaGraphExec_t ready = NULL;
    cudaError_t e = cudaStreamEndCapture((cudaStream_t)stream.handle, &captured);
    if (e == cudaSuccess)
        e = cudaGraphInstantiate(&ready, captured, 0);
    if (e == cudaSuccess)
        e = cudaGraphUpload(ready, (cudaStream_t)stream.handle);
    if (captured)
        cudaGraphDestroy(captured);
    *graph = ready;
    return message(e);
}

/* The caller puts work before it on the stream, so that the device is busy until the graph is there. */
const char *adze_graph_time(adze_stream stream, void *graph, double *us)
{
    const cudaStream_t s = (cudaStream_t)stream.handle;
    cudaEvent_t begin = NULL, end = NULL;
    float ms = 0;
    cudaError_t e = cudaEventCreate(&begin);
    if (e == cudaSuccess)
        e = cudaEventCreate(&end);
    if (e == cudaSuccess)
        e = cudaEventRecord(begin, s);
    if (e == cudaSuccess)
        e = cudaGraphLaunch((cudaGraphExec_t)graph, s);
    if (e == cudaSuccess)
        e = cudaEventRecord(end, s);
    if (e == cudaSuccess)
        e = cudaEventSynchronize(end);
    if (e == cudaSuccess)
        e = cudaEventElapsedTime(&ms, begin, end);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    *us = 1000.0 * (double)ms;
    return message(e);
}

void adze_graph_free(void *graph)
{
    if (graph)
        cudaGraphExecDestroy((cudaGraphExec_t)graph);
}

void adze_gpu_describe(int device, char *name, size_t size, size_t *memory)
{
    struct cudaDeviceProp properties;
    const int known = cudaGetDeviceProperties(&properties, device) == cudaSuccess;
    snprintf(name, size, "%s", known ? properties.name : "unknown");
    *memory = known ? properties.totalGlobalMem : 0;
}

#else

static const char none[] = "this build has no CUDA";

const char *adze_gpu_open(adze_stream *stream)
{
    (void)stream;
    return none;
}
void adze_gpu_close(adze_stream stream)
{
    (void)stream;
}
const char *adze_gpu_repeat(void *memory, size_t bytes, size_t total)
{
    (void)memory, (void)bytes, (void)total;
    return none;
}
void adze_gpu_pdl(int on)
{
    (void)on;
}
const char *adze_graph_begin(adze_stream stream)
{
    (void)stream;
    return none;
}
const char *adze_graph_end(adze_stream stream, void **graph)
{
    (void)stream, (void)graph;
    return none;
}
const char *adze_graph_time(adze_stream stream, void *graph, double *us)
{
    (void)stream, (void)graph, (void)us;
    return none;
}
void adze_graph_free(void *graph)
{
    (void)graph;
}
void adze_gpu_describe(int device, char *name, size_t size, size_t *memory)
{
    (void)device;
    snprintf(name, size, "none");
    *memory = 0;
}
#endif
