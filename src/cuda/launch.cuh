/* launch.cuh - launches with programmatic dependent launch (PDL), and their errors as a status. */
#ifndef ADZE_CUDA_LAUNCH_CUH
#define ADZE_CUDA_LAUNCH_CUH

#include "kernel.h"

#include <cuda_runtime.h>

/* device.cu: what a device has. Launches are chosen by it. */
struct cuda_limits {
    int sm;               /* 90 for sm_90 */
    int sm_count;         /* multiprocessors */
    int sm_threads;       /* resident threads per SM, at most */
    int64_t block_shared; /* bytes of shared memory that a block may have */
};
extern "C" const cuda_limits *adze_cuda_limits(int device); /* NULL: there is no such device */
extern "C" int adze_cuda_pdl(int device);                   /* whether launches on it may overlap */
extern "C" int adze_cuda_clusters(int device); /* whether this build's kernels may run there in clusters */
/* How many clusters of 1 to 16 blocks it has at once, where a multiprocessor has one block; of more than 8 blocks
   there may be none. */
extern "C" int adze_cuda_clustered(int device, int size);
extern "C" int adze_cuda_tensor_cores(int device); /* whether they have mma and cp.async there: sm_80 and newer */
extern "C" void *adze_cuda_map_encoder(void);      /* the driver's cuTensorMapEncodeTiled; NULL: it has none */

/* A call on its way to a kernel: where it runs, and which variants it may take. */
struct cuda_call : adze_stream {
    const adze_op *op;
    const cuda_limits &gpu;
    adze_choice *choice;
    cuda_call(adze_stream stream, const adze_op &its_op, adze_choice *its_choice)
        : adze_stream(stream), op(&its_op), gpu(*adze_cuda_limits(stream.device)), choice(its_choice)
    {
    }
    /* Whether the call takes this variant. possible: the variant can run it. preferred: it is the kernel's choice,
       if no earlier variant was; a variant that was asked for need not be preferred. */
    bool takes(int variant, bool possible, bool preferred = true) const
    {
        if (!possible || (choice->want < 0 ? !preferred : choice->want != variant))
            return false;
        choice->ran = variant;
        return true;
    }
    /* Runs pick(): with the variant that `adze tune` found for this problem, if it takes the call; else with the
       kernel's own choice. `rows` may vary, the other sizes are exact. */
    template <typename PICK>
    adze_status tuned(int form, int64_t rows, int64_t size1, int64_t size2, int64_t size3, PICK pick) const
    {
        choice->form = form;
        choice->size[0] = rows, choice->size[1] = size1, choice->size[2] = size2, choice->size[3] = size3;
        if (choice->want < 0 && !choice->untuned) {
            choice->want = adze_tuned(op, device, choice);
            if (choice->want >= 0) {
                const adze_status status = pick();
                choice->want = -1;
                if (status != ADZE_NO_KERNEL)
                    return status;
            }
        }
        return pick();
    }
};

/* The entries of an op in its table of kernels: adze_OP_cuda and adze_OP_cuda_variants. `run` takes a cuda_call and
   the args of the op. */
#define CUDA_ENTRIES(OP, list, run_call)                                                                             \
    static adze_status OP##_choose(adze_stream stream, const void *args, adze_choice *choice)                        \
    {                                                                                                                \
        return run_call(cuda_call(stream, adze_op_##OP, choice), (const adze_##OP##_args *)args);                    \
    }                                                                                                                \
    extern "C" adze_status adze_##OP##_cuda(adze_stream stream, const void *args)                                    \
    {                                                                                                                \
        adze_choice choice = {};                                                                                     \
        choice.want = choice.ran = -1;                                                                               \
        return OP##_choose(stream, args, &choice);                                                                   \
    }                                                                                                                \
    extern "C" {                                                                                                     \
    extern const adze_variants adze_##OP##_cuda_variants;                                                            \
    const adze_variants adze_##OP##_cuda_variants = {list, OP##_choose};                                             \
    }

/* CUDA loads a .cu's module, or compiles it from PTX, when its first kernel is requested. This list (device.cu) has
   one kernel of each module, so that adze_prepare() can load them all. */
struct cuda_module {
    const void *kernel;
    const cuda_module *next;
};
extern "C" const cuda_module *adze_cuda_modules;
static __global__ void module_probe() {}
static const struct module_entry : cuda_module {
    module_entry() : cuda_module{(const void *)module_probe, adze_cuda_modules} { adze_cuda_modules = this; }
} module_here;

/* With PDL a kernel starts while its predecessor on the stream still runs. Every block calls pdl_wait() before it
   touches memory that another kernel may write, and before it exits. pdl_launch_next() comes early, before any
   prefetch: a chain of small kernels is only as fast as each lets the next one start. A second call of it does
   nothing. */
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
/* Prefetch one address, or `vectors` 16-byte vectors, into L2. This is allowed before pdl_wait(): a later load still
   reads what memory holds by then. The first blocks of a kernel prefetch what they will read while the predecessor
   drains and leaves the memory bus idle: x, which is cold where it is large; weights, which are older than x; in a
   small call everything. */
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

/* Prefetches bytes at any address; it may leave out the last few. */
__device__ __forceinline__ void prefetch_bytes(const void *at, int bytes)
{
    if (bytes >= 16)
        prefetch_row((const void *)((uintptr_t)at & ~(uintptr_t)15), bytes / 16);
}

/* The same value, opaque to the optimizer: whatever is computed from it is computed again. Prefetch code derives its
   addresses from an opaque block index. If it shared them with the loads that follow, they would cost the kernel
   registers and the order of its loads, even in blocks that do not prefetch. */
__device__ __forceinline__ uint32_t opaque(uint32_t v)
{
    asm volatile("" : "+r"(v));
    return v;
}
__device__ __forceinline__ const char *opaque(const char *v)
{
    asm volatile("" : "+l"(v));
    return v;
}
__device__ __forceinline__ int64_t opaque(int64_t v)
{
    asm volatile("" : "+l"(v));
    return v;
}

constexpr int64_t PREFETCH_MIN = 8 * 1024 / 16; /* vectors per SM: a call with no more prefetches all of them */

/* Host: blocks that are resident at once, if threads are the limit. */
static inline int64_t blocks_at_once(const cuda_limits &gpu, int64_t threads)
{
    return gpu.sm_threads / threads * gpu.sm_count;
}
/* Host: how many blocks prefetch, when the call has `vectors` vectors and a block `block_vectors` of them. Together
   they prefetch at least PREFETCH_MIN and at most `most` KB per SM, and all of them are in the first wave. On an
   H200 more than that made a kernel slower where its predecessor had just written x, or where the prefetched lines
   were still in flight. */
static inline uint32_t prefetch_blocks(const cuda_limits &gpu, int64_t vectors, int64_t block_vectors,
                                       int64_t threads, int most)
{
    const int64_t part = vectors / gpu.sm_count, limit = most * 1024 / 16;
    const int64_t share = part < PREFETCH_MIN ? PREFETCH_MIN : part > limit ? limit : part;
    const int64_t blocks = share * gpu.sm_count / block_vectors, at_once = blocks_at_once(gpu, threads);
    return (uint32_t)(blocks < 1 ? 1 : blocks < at_once ? blocks : at_once);
}

static inline adze_status cuda_status(const char *op, cudaError_t e)
{
    return e == cudaSuccess ? ADZE_OK : adze_fail(ADZE_DEVICE, "%s: %s", op, cudaGetErrorString(e));
}

/* Dynamic shared memory of a block in bytes, the blocks of a cluster, which divide the grid, and how often the grid
   is repeated, as blockIdx.y. */
struct launch_shape {
    size_t shared;
    unsigned cluster, batches;
    launch_shape(size_t shared_bytes, int64_t cluster_blocks = 1, int64_t repeats = 1)
        : shared(shared_bytes), cluster((unsigned)cluster_blocks), batches((unsigned)repeats)
    {
    }
};

/* kernel<<<grid, block, shared>>>(params...) on the call's stream. */
template <typename... P, typename... A>
static adze_status launch(const cuda_call &call, void (*kernel)(P...), int64_t grid, dim3 block, launch_shape shape,
                          A... params)
{
    const char *const op = call.op->name;
    if (call.choice->dry)
        return ADZE_OK;
    constexpr size_t PLAIN_SHARED = 47 << 10; /* beyond 48 KB, static shared memory included, a kernel must opt in */
    if (shape.shared > PLAIN_SHARED) {
        const cudaError_t e =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shape.shared);
        if (e != cudaSuccess)
            return cuda_status(op, e);
    }
    constexpr unsigned PORTABLE_CLUSTER = 8;
    if (shape.cluster > PORTABLE_CLUSTER) {
        const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (e != cudaSuccess)
            return cuda_status(op, e);
    }
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    if (adze_cuda_pdl(call.device)) {
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
    config.gridDim = dim3((unsigned)grid, shape.batches);
    config.blockDim = block;
    config.dynamicSmemBytes = shape.shared;
    config.stream = (cudaStream_t)call.handle;
    config.attrs = attributes;
    config.numAttrs = count;
    return cuda_status(op, cudaLaunchKernelEx(&config, kernel, (P)params...));
}
static inline int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Blocks for `work` items of `per_block` each, within the limit of a grid: kernels loop over the remainder. */
static inline int64_t grid_for(int64_t work, int64_t per_block)
{
    const int64_t blocks = ceil_div(work, per_block);
    return blocks < 0x7fffffff ? blocks : 0x7fffffff;
}

/* Unit u of the thread's UNITS. TILED: the units of a warp are contiguous, so that the addresses of a thread differ
   by constants; blocks then have whole warps. */
template <bool TILED, int UNITS>
__device__ __forceinline__ int unit_of(int u)
{
    const int thread = (int)threadIdx.x;
    return TILED ? thread / 32 * (32 * UNITS) + thread % 32 + u * 32 : thread + u * (int)blockDim.x;
}

/* Threads for rows of `units` units, with `each` units per thread and at most `most` threads per block. Long rows
   are cut into equal pieces, short rows share a block. */
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
