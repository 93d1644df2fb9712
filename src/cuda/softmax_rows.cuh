/* softmax_rows.cuh - a thread's part of a softmax row: loads, exponentials and stores; and the combination over the
   warps of a row. */
#ifndef ADZE_CUDA_SOFTMAX_ROWS_CUH
#define ADZE_CUDA_SOFTMAX_ROWS_CUH

#include "act.cuh"
#include "cluster.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "unit.cuh"

enum { X, OUT, MASK, SOFTMAX_TENSORS };
constexpr int SHORT_THREADS = 256, BLOCK_THREADS = 512, LONG_THREADS = 1024; /* of a block, at most */
constexpr int SHARED_FEW = 40 << 10, SHARED_MOST = 72 << 10; /* bytes of a row that a block of softmax_shared holds */
constexpr int CLUSTER = 8;                                   /* blocks, at most */

/* On targets other than sm_90 the launch bounds must allow one block all registers, or the compiler spills. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int ONE_BLOCK = 1;
#else
constexpr int ONE_BLOCK = 0;
#endif

/* The variants. lanes-8x16: 8 lanes of a warp with 16 elements each. */
enum {
    LANES_8X8,
    LANES_8X16,
    LANES_16X16,
    LANES_32X16,
    LANES_32X32,
    BLOCK_16,
    BLOCK_32,
    CLUSTER_16,
    CLUSTER_32,
    IN_SHARED,
    LOOP,
    ANY_LANES_8X6, /* from here on: rows at any address */
    ANY_LANES_8X8,
    ANY_LANES_8X12,
    ANY_LANES_16X4,
    ANY_LANES_16X6,
    ANY_LANES_16X8,
    ANY_LANES_32X8,
    ANY_LANES_32X16,
    ANY_LANES_32X32,
    ANY_BLOCK_8,
    ANY_BLOCK_16,
    ANY_BLOCK_32,
    ANY_CLUSTER_16,
    ANY_CLUSTER_32,
    IN_FLOATS,
};
constexpr adze_variant SOFTMAX_VARIANTS[] = {
    {"lanes-8x8", "aligned rows of up to 64 elements"},
    {"lanes-8x16", "aligned rows of up to 128 elements"},
    {"lanes-16x16", "aligned rows of up to 256 elements"},
    {"lanes-32x16", "aligned rows of up to 512 elements"},
    {"lanes-32x32", "aligned rows of up to 1024 elements"},
    {"block-16", "aligned rows of up to 8192 elements"},
    {"block-32", "aligned rows of up to 32768 elements (f32 with a mask: 16384)"},
    {"cluster-16", "aligned rows of up to 65536 elements, on GPUs with clusters"},
    {"cluster-32", "aligned rows of up to 262144 elements (f32 with a mask: 131072), on GPUs with clusters"},
    {"shared", "aligned rows of f16 or bf16 of up to 294912 elements, no mask, on GPUs with clusters"},
    {"loop", "every call"},
    {"any-lanes-8x6", "rows of up to 48 elements"},
    {"any-lanes-8x8", "rows of up to 64 elements of f16 or bf16, in pairs"},
    {"any-lanes-8x12", "rows of up to 96 elements of f16 or bf16, in pairs"},
    {"any-lanes-16x4", "rows of up to 64 elements"},
    {"any-lanes-16x6", "rows of up to 96 elements"},
    {"any-lanes-16x8", "rows of up to 128 elements"},
    {"any-lanes-32x8", "rows of up to 256 elements"},
    {"any-lanes-32x16", "rows of up to 512 elements"},
    {"any-lanes-32x32", "rows of up to 1024 elements"},
    {"any-block-8", "rows of up to 4096 elements"},
    {"any-block-16", "rows of up to 8192 elements"},
    {"any-block-32", "rows of up to 16384 elements, no mask"},
    {"any-cluster-16", "rows of up to 65536 elements, on GPUs with clusters"},
    {"any-cluster-32", "rows of up to 131072 elements, on GPUs with clusters"},
    {"held", "rows of up to 221000 elements, on GPUs with clusters"},
    {NULL, NULL},
};

struct softmax_params {
    const void *x, *mask; /* mask: NULL when absent */
    void *out;
    int64_t dim;
    int64_t part; /* elements of a row in each block of a cluster */
    float scale;
    bool mask_f32;
    adze_rows rows;
};

/* The same for the kernels that hold a row; a mask has the dtype that the kernel was compiled for. */
struct softmax_row_params {
    const void *x, *mask;
    void *out;
    int32_t dim;
    int32_t units, part; /* of a row, and of them in each block of a cluster */
    float scale, by;     /* by: scale times log2(e), rounded once */
    bool alike;          /* softmax_held: x has the vectors of out */
    bool mask_f32;       /* softmax_held: the mask is f32 where x is not */
    simple_rows<SOFTMAX_TENSORS> rows;
};

constexpr double LOG2_E = 1.4426950408889634;
/* exp(d), d <= 0. power_of_sum flushes results below the smallest normal float, which do not matter in a sum whose
   largest term is 1. */
__device__ __forceinline__ float power(float d)
{
    return exp2f(d * (float)LOG2_E);
}
__device__ __forceinline__ float power_of_sum(float d)
{
    return power_of_two(d * (float)LOG2_E);
}

/* 2^t as a result of type T needs it: f16 has no values as small as a subnormal float. */
template <typename T>
__device__ __forceinline__ float softmax_result(float t)
{
    return exp2f(t);
}
template <>
__device__ __forceinline__ float softmax_result<f16>(float t)
{
    return power_of_two(t);
}

/* Where this block's row begins in each tensor, or its part of the row, whose first unit of W elements is
   `first`, and how many units it has. */
template <int W, bool IN_CLUSTER>
__device__ __forceinline__ int softmax_place(const softmax_row_params &p, int64_t (&at)[SOFTMAX_TENSORS], int *first)
{
    *first = 0;
    if constexpr (!IN_CLUSTER) {
        p.rows.locate(blockIdx.x, at);
        return p.units;
    }
    const uint32_t blocks = (uint32_t)cluster_size(), r = blockIdx.x / blocks;
    *first = (int)(blockIdx.x - r * blocks) * p.part;
    p.rows.locate(r, at);
#pragma unroll
    for (int t = 0; t < SOFTMAX_TENSORS; t++)
        at[t] += *first * W;
    return max(min(p.units - *first, p.part), 0);
}

/* Loads the UNITS units of a thread as floats, scaled and masked, and returns their maximum; -inf beyond the end of
   the row. LAUNCH_AFTER_LOADS: the next kernel may start once the loads are in flight, not before. */
template <typename T, bool MASKED, int UNITS, bool LAUNCH_AFTER_LOADS>
__device__ __forceinline__ float softmax_read(const T *x, const T *mask, float scale, int thread, int threads,
                                              int units, float (&y)[UNITS][VEC<T>])
{
    constexpr int W = VEC<T>;
    constexpr bool MASK_EARLY = MASKED && UNITS * 16 <= 64; /* else registers are too few */
    unit<T, W> raw[UNITS], hide[MASK_EARLY ? UNITS : 1];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        raw[u].fill(scale > 0 ? -INFINITY : INFINITY); /* times the scale: -inf */
        if constexpr (MASK_EARLY)
            hide[u].fill(0);
        if (thread + u * threads < units) {
            raw[u].fetch(x + (thread + u * threads) * W);
            if constexpr (MASK_EARLY)
                hide[u].fetch(mask + (thread + u * threads) * W);
        }
    }
    if (LAUNCH_AFTER_LOADS)
        pdl_launch_next();
    float max = -INFINITY;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        raw[u].get(y[u]);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[u][j] *= scale;
        if constexpr (MASK_EARLY) {
            float f[W];
            hide[u].get(f);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[u][j] += f[j];
        } else if (MASKED && thread + u * threads < units) {
            float f[W];
            load<T, W>(mask + (thread + u * threads) * W, f);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[u][j] += f[j];
        }
#pragma unroll
        for (int j = 0; j < W; j++)
            max = fmaxf(max, y[u][j]);
    }
    return max;
}
template <typename T, int UNITS>
__device__ __forceinline__ void softmax_write(T *out, int thread, int threads, int units, float factor,
                                              float (&y)[UNITS][VEC<T>])
{
    constexpr int W = VEC<T>;
    asm volatile("" : "+r"(thread)); /* opaque: recomputed here rather than kept in registers since the loads */
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (thread + u * threads < units) {
#pragma unroll
            for (int j = 0; j < W; j++)
                y[u][j] *= factor;
            store<T, W>(out + (thread + u * threads) * W, y[u]);
        }
}

/* A warp's maximum, and the sum of its exponentials relative to it. */
struct alignas(8) softmax_share {
    float max, sum;
};
/* What exponentials are relative to: a warp may have no elements, or only masked ones. */
__device__ __forceinline__ float softmax_from(float max)
{
    return max == -INFINITY ? 0 : max;
}
/* Combines the shares of all warps of a row. `shares` is shared memory that is unused until the next barrier. `by`
   times a difference of maxima is an exponent of 2. */
template <bool IN_CLUSTER>
__device__ __forceinline__ softmax_share softmax_join(softmax_share mine, softmax_share *shares,
                                                      float by = (float)LOG2_E)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    int count = warps;
    if constexpr (IN_CLUSTER) {
        const int blocks = cluster_size();
        if (lane < blocks)
            cluster_store(&shares[cluster_rank() * warps + warp], lane, mine.max, mine.sum);
        cluster_arrive();
        cluster_wait();
        count *= blocks;
    } else {
        if (warps == 1)
            return mine;
        if (lane == 0)
            shares[warp] = mine;
        __syncthreads();
    }
    softmax_share all = {-INFINITY, 0};
    for (int i = lane; i < count; i += 32)
        all.max = fmaxf(all.max, shares[i].max);
    all.max = warp_max<32>(all.max);
    for (int i = lane; i < count; i += 32)
        all.sum += shares[i].sum * power_of_two((shares[i].max - all.max) * by);
    all.sum = warp_sum<32>(all.sum);
    return all;
}

#endif
