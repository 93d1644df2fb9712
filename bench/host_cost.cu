/* host_cost.cu - for host_cost.py: what a launch costs the host, and a call of the library from C. CPU: as C++. */
#include "adze.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { DIM = 64, CALLS = 500, ROUNDS = 41, PARAMETER_BYTES = 192 };

typedef int (*call_fn)(int option); /* 0 when all is well */

static adze_stream stream = {ADZE_CPU, NULL};
static adze_rms_norm_args args;

#ifdef __CUDACC__
#    include <cuda_runtime.h>

struct parameters {
    char bytes[PARAMETER_BYTES]; /* as many as a norm's kernel is given, or so */
};
static __global__ void nothing() {}
static __global__ void takes_parameters(parameters) {}

enum { PLAIN, PDL, PDL_PARAMETERS };

static int launch(int option)
{
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1);
    config.blockDim = dim3(32);
    config.stream = (cudaStream_t)stream.handle;
    config.attrs = &attribute;
    config.numAttrs = option != PLAIN;
    parameters given = {};
    void *pointers[] = {&given};
    const void *kernel = option == PDL_PARAMETERS ? (const void *)takes_parameters : (const void *)nothing;
    return cudaLaunchKernelExC(&config, kernel, pointers) != cudaSuccess;
}

static int finish(void)
{
    return cudaDeviceSynchronize() != cudaSuccess;
}

static void *memory(size_t bytes)
{
    void *p = NULL;
    if (stream.device == ADZE_CPU)
        return calloc(1, bytes);
    return cudaMalloc(&p, bytes) == cudaSuccess && cudaMemset(p, 0, bytes) == cudaSuccess ? p : NULL;
}
#else
static int finish(void)
{
    return 0;
}

static void *memory(size_t bytes)
{
    return calloc(1, bytes);
}
#endif

static int rms_norm(int rows)
{
    args.x.shape[0] = args.out.shape[0] = rows;
    return adze_rms_norm(stream, &args) != ADZE_OK;
}

static double thread_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return 1e9 * (double)now.tv_sec + (double)now.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median of rounds, in nanoseconds of this thread's own time; the work itself is waited for in between. */
static double median_ns(call_fn call, int option)
{
    double ns[ROUNDS];
    for (int round = -1; round < ROUNDS; round++) {
        const double begin = thread_ns();
        int failed = 0;
        for (int i = 0; i < CALLS; i++)
            failed |= call(option);
        const double took = (thread_ns() - begin) / CALLS;
        if (failed || finish()) {
            fprintf(stderr, "host_cost: a call failed: %s\n", adze_last_error());
            exit(1);
        }
        if (round >= 0) /* the first warms up */
            ns[round] = took;
    }
    qsort(ns, ROUNDS, sizeof *ns, ascending);
    return ns[ROUNDS / 2];
}

static adze_tensor tensor(int rank)
{
    adze_tensor t;
    memset(&t, 0, sizeof t);
    t.data = memory(DIM * sizeof(float));
    if (!t.data) {
        fprintf(stderr, "host_cost: no memory\n");
        exit(1);
    }
    t.rank = rank;
    t.dtype = ADZE_F32;
    t.shape[rank - 1] = DIM;
    t.stride[rank - 1] = 1;
    if (rank == 2)
        t.shape[0] = 1, t.stride[0] = DIM;
    return t;
}

int main(int argc, char **argv)
{
    stream.device = argc > 1 && strcmp(argv[1], "cuda") == 0 ? 0 : ADZE_CPU;
    if (adze_prepare(stream.device) != ADZE_OK) {
        fprintf(stderr, "host_cost: %s\n", adze_last_error());
        return 1;
    }
    args.call.size = (uint32_t)sizeof args;
    args.out = tensor(2);
    args.x = tensor(2);
    args.weight = tensor(1);
    args.eps = 1e-6f;
    printf("{");
#ifdef __CUDACC__
    if (stream.device != ADZE_CPU) {
        printf("\"launch\": %.1f, ", median_ns(launch, PLAIN));
        printf("\"launch, PDL\": %.1f, ", median_ns(launch, PDL));
        printf("\"launch, PDL, parameters\": %.1f, ", median_ns(launch, PDL_PARAMETERS));
    }
#endif
    printf("\"C, no elements\": %.1f, ", median_ns(rms_norm, 0));
    printf("\"C, one row\": %.1f}\n", median_ns(rms_norm, 1));
    return 0;
}
