/* launch.cuh - launches with programmatic dependent launch (PDL), and their errors as a status. */
#ifndef ADZE_CUDA_LAUNCH_CUH
#define ADZE_CUDA_LAUNCH_CUH

#include "kernel.h"

#include <cuda_runtime.h>

extern "C" int adze_cuda_pdl(int device);      /* device.cu: whether launches on it may overlap */
extern "C" int adze_cuda_clusters(int device); /* device.cu: whether this build's kernels may run there in clusters */

/* Each .cu is a module of its own, which CUDA loads, or compiles from PTX, when a kernel of it is first asked for.
   Each has a kernel in this list (device.cu), by which adze_prepare() asks. */
struct cuda_module {
    const void *kernel;
    const cuda_module *next;
};
extern "C" const cuda_module *adze_cuda_modules;
static __global__ void module_probe() {}
static const struct module_entry : cuda_module {
    module_entry() : cuda_module{(const void *)module_probe, adze_cuda_modules} { adze_cuda_modules = this; }
} module_here;

/* With PDL a kernel starts while the one before it on the stream still runs. Every block calls pdl_wait() before it
   touches memory that another kernel may write, and before it exits; pdl_launch_next() comes early, and before a
   block asks ahead: a chain of small kernels is as fast as each lets the next one start. A second call does nothing.
 */
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
/* Start to bring what lies at an address, or `vectors` 16-byte vectors, into the second level of cache; allowed
   before pdl_wait(), for what is read later is what is there then. The first blocks of a kernel ask so for what they
   will read, while the kernel before it ends and leaves the memory idle: for x, which is cold where it is large; for
   weights, which are older than x; for all of it in a small call. */
__device__ __forceinline__ void prefetch(const void *at)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
#else
    (void)at;
#endif
}
__device__ __forceinline__ void prefetch_row(const void *row, int vectors)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row), "r"(vectors * 16) : "memory");
#else
    (void)row, (void)vectors;
#endif
}

/* The same for bytes at any address; the last few may be left out. */
__device__ __forceinline__ void prefetch_bytes(const void *at, int bytes)
{
    if (bytes >= 16)
        prefetch_row((const void *)((uintptr_t)at & ~(uintptr_t)15), bytes / 16);
}

/* The same number, of which the compiler does not know that it is: what is made of it is made anew. Code that asks
   ahead finds its addresses so, from its block's index: shared with those that follow, they would cost a kernel
   registers and the order of its loads, also in the blocks that ask for nothing. */
__device__ __forceinline__ uint32_t opaque(uint32_t v)
{
    asm volatile("" : "+r"(v));
    return v;
}

constexpr int64_t SM_THREADS = 2048; /* of a multiprocessor, at most */
constexpr int64_t PREFETCH_MIN =
    8 * 1024 / 16; /* vectors for each multiprocessor: a call with no more asks for all */

/* Host: blocks that start together, if threads are their limit. */
static inline int64_t blocks_at_once(int sm_count, int64_t threads)
{
    return SM_THREADS / threads * sm_count;
}
/* Host: how many blocks ask for `vectors` vectors, of which each block has its part: at least for
   PREFETCH_MIN and at most for `most` KB for each multiprocessor, and no more blocks than start at once. As measured
   on an H200: with more, a kernel is slower where the one before it has just made x, or what it asked for is still on
   its way. */
static inline uint32_t prefetch_blocks(int sm_count, int64_t vectors, int64_t block_vectors, int64_t threads,
                                       int most)
{
    const int64_t part = vectors / sm_count, limit = most * 1024 / 16;
    const int64_t share = part < PREFETCH_MIN ? PREFETCH_MIN : part > limit ? limit : part;
    const int64_t blocks = share * sm_count / block_vectors, at_once = blocks_at_once(sm_count, threads);
    return (uint32_t)(blocks < 1 ? 1 : blocks < at_once ? blocks : at_once);
}

static inline adze_status cuda_status(const char *op, cudaError_t e)
{
    return e == cudaSuccess ? ADZE_OK : adze_fail(ADZE_DEVICE, "%s: %s", op, cudaGetErrorString(e));
}

/* Bytes of shared memory a block asks for, and the blocks of a cluster, which divide the grid. */
struct launch_shape {
    size_t shared;
    unsigned cluster;
    launch_shape(size_t shared_bytes, unsigned cluster_blocks = 1) : shared(shared_bytes), cluster(cluster_blocks) {}
};

/* kernel<<<grid, block, shared>>>(params...) on the call's stream. */
template <typename... P, typename... A>
static adze_status launch(const char *op, adze_stream stream, void (*kernel)(P...), int64_t grid, dim3 block,
                          launch_shape shape, A... params)
{
    constexpr size_t PLAIN_SHARED = 47 << 10; /* more has to be asked for: 48 KB with what a kernel declares itself */
    if (shape.shared > PLAIN_SHARED) {
        const cudaError_t e =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shape.shared);
        if (e != cudaSuccess)
            return cuda_status(op, e);
    }
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    if (adze_cuda_pdl(stream.device)) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (shape.cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count].val.clusterDim.x = shape.cluster;
        attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
        count++;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)grid);
    config.blockDim = block;
    config.dynamicSmemBytes = shape.shared;
    config.stream = (cudaStream_t)stream.handle;
    config.attrs = attributes;
    config.numAttrs = count;
    return cuda_status(op, cudaLaunchKernelEx(&config, kernel, (P)params...));
}

static inline int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Blocks for `work` items of `per_block` each, within what a grid may have: kernels loop over the rest. */
static inline int64_t grid_for(int64_t work, int64_t per_block)
{
    const int64_t blocks = ceil_div(work, per_block);
    return blocks < 0x7fffffff ? blocks : 0x7fffffff;
}

/* The thread's unit u of its UNITS. TILED: a warp's units are neighbours, so that their addresses differ by
   constants; blocks then have whole warps. */
template <bool TILED, int UNITS>
__device__ __forceinline__ int unit_of(int u)
{
    const int thread = (int)threadIdx.x;
    return TILED ? thread / 32 * (32 * UNITS) + thread % 32 + u * 32 : thread + u * (int)blockDim.x;
}

/* Threads for rows of `units` units, `each` in a thread and at most `most` in a block: long rows are cut into
   pieces of equal size, short ones share a block. */
struct unit_split {
    int64_t pieces, rows, blocks; /* of a row; of a block; of the grid */
    dim3 block;
};
static inline unit_split split_units(int64_t units, int64_t each, int64_t count, int64_t most)
{
    unit_split split = {};
    split.pieces = ceil_div(units, most * each);
    int64_t threads = ceil_div(units, split.pieces * each);
    if (split.pieces > 1)
        threads = (threads + 31) / 32 * 32;
    split.rows = split.pieces > 1 ? 1 : most / threads;
    split.blocks = ceil_div(count, split.rows) * split.pieces;
    split.block = dim3((unsigned)threads, (unsigned)split.rows);
    return split;
}

#endif
