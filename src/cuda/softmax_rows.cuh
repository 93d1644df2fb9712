/* softmax_rows.cuh - what a thread of softmax has of a row: read, as powers, and written; and what the warps of a row
   know together. */
#ifndef ADZE_CUDA_SOFTMAX_ROWS_CUH
#define ADZE_CUDA_SOFTMAX_ROWS_CUH

#include "act.cuh"
#include "cluster.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "unaligned.cuh"
#include "unit.cuh"

enum { X, OUT, MASK, SOFTMAX_TENSORS };
constexpr int SHORT_THREADS = 256, BLOCK_THREADS = 512, LONG_THREADS = 1024; /* of a block, at most */
constexpr int SHARED_FEW = 40 << 10, SHARED_MOST = 72 << 10; /* bytes of a row that a block of softmax_shared holds */
constexpr int CLUSTER = 8;                                   /* blocks, at most */

struct softmax_params {
    const void *x, *mask; /* mask: NULL when absent */
    void *out;
    int64_t dim;
    int64_t part; /* elements of a row in each block of a cluster */
    float scale;
    bool mask_f32;
    adze_rows rows;
};

/* The same as the kernels take it that hold a row: a mask has x's dtype. */
struct softmax_lean {
    const void *x, *mask;
    void *out;
    int32_t dim;
    int32_t units, part; /* vectors: of a row, at most, and of them in each block of a cluster */
    float scale, by;     /* by: scale times log2(e), rounded once */
    near_rows<SOFTMAX_TENSORS> rows;
};

constexpr double LOG2_E = 1.4426950408889634;
/* exp(d), d <= 0. In a sum, where the largest term is 1, what is below the smallest normal float may be lost: there
   power_of_two does. */
__device__ __forceinline__ float power(float d)
{
    return exp2f(d * (float)LOG2_E);
}
__device__ __forceinline__ float power_of_sum(float d)
{
    return power_of_two(d * (float)LOG2_E);
}

/* The UNITS units of a thread as floats, scaled and masked, and the largest of them; -inf where the row has ended.
   LATE: the next kernel may start once the loads are on their way, not before. */
template <typename T, bool MASKED, int UNITS, bool LATE>
__device__ __forceinline__ float softmax_read(const T *x, const T *mask, float scale, int thread, int threads,
                                              int units, float (&y)[UNITS][VEC<T>])
{
    constexpr int W = VEC<T>;
    constexpr bool MASK_EARLY = MASKED && UNITS * 16 <= 64; /* else registers would not do */
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
    if (LATE)
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
    asm volatile("" : "+r"(thread)); /* so that no register holds the units' indices from the loads until here */
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (thread + u * threads < units) {
#pragma unroll
            for (int j = 0; j < W; j++)
                y[u][j] *= factor;
            store<T, W>(out + (thread + u * threads) * W, y[u]);
        }
}

/* Elements of a row's ends, at most, that each of its threads has. */
template <typename T, int THREADS>
constexpr int softmax_ends = (3 * VEC<T> - 3 + THREADS - 1) / THREADS;

/* What a thread has of a row at any address, scaled and masked. */
template <typename T, int UNITS, int ENDS>
struct softmax_any {
    static constexpr int W = VEC<T>;
    const any_cut<int> cut;
    int thread, threads, first, end, ends; /* vectors first..end-1 are the block's */
    float y[UNITS][W], y_end[ENDS];

    /* Gives the largest; -inf is where there is nothing. LATE: as in softmax_read. */
    template <bool MASKED, bool LATE>
    __device__ __forceinline__ float read(const T *x, const T *mask, float scale)
    {
        constexpr bool MASK_EARLY = MASKED && UNITS <= 2; /* else registers would not do */
        any_vector<16> raw[UNITS], hide[MASK_EARLY ? UNITS : 1];
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            if (first + thread + u * threads < end) {
                const int at = cut.template vector<W>(first + thread + u * threads);
                raw[u].fetch(x + at);
                if constexpr (MASK_EARLY)
                    hide[u].fetch(mask + at);
            }
        if (LATE)
            pdl_launch_next();
        float max = -INFINITY;
#pragma unroll
        for (int k = 0; k < ENDS; k++) {
            y_end[k] = -INFINITY;
            if (thread + k * threads < ends) {
                const int at = cut.template end<W>(thread + k * threads);
                y_end[k] = to_float(x[at]) * scale;
                if constexpr (MASKED)
                    y_end[k] += to_float(mask[at]);
            }
            max = fmaxf(max, y_end[k]);
        }
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            float f[W] = {};
#pragma unroll
            for (int j = 0; j < W; j++)
                y[u][j] = -INFINITY;
            if (first + thread + u * threads < end) {
                const int at = cut.template vector<W>(first + thread + u * threads);
                raw[u].template get<T>(any_shift(x + at), y[u]);
                if constexpr (MASK_EARLY)
                    hide[u].template get<T>(any_shift(mask + at), f);
                else if constexpr (MASKED)
                    any_load(mask + at, f);
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[u][j] = MASKED ? y[u][j] * scale + f[j] : y[u][j] * scale;
            }
#pragma unroll
            for (int j = 0; j < W; j++)
                max = fmaxf(max, y[u][j]);
        }
        return max;
    }
    /* Makes powers relative to `from` of all, and gives their sum. */
    __device__ __forceinline__ float powers(float from)
    {
        float sum[2] = {0, 0};
#pragma unroll
        for (int k = 0; k < ENDS; k++)
            sum[0] += y_end[k] = power(y_end[k] - from);
#pragma unroll
        for (int u = 0; u < UNITS; u++)
#pragma unroll
            for (int j = 0; j < W; j++)
                sum[j % 2] += y[u][j] = power(y[u][j] - from);
        return sum[0] + sum[1];
    }
    __device__ __forceinline__ void write(T *out, float factor)
    {
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            if (first + thread + u * threads < end) {
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[u][j] *= factor;
                store<T, W>(out + cut.template vector<W>(first + thread + u * threads), y[u]);
            }
#pragma unroll
        for (int k = 0; k < ENDS; k++)
            if (thread + k * threads < ends)
                out[cut.template end<W>(thread + k * threads)] = from_float<T>(y_end[k] * factor);
    }
};

/* What a warp found in its part of a row: the maximum, and the sum of the powers relative to it. */
struct alignas(8) softmax_share {
    float max, sum;
};
/* Where powers are relative to: a warp may have nothing, or only what is hidden. */
__device__ __forceinline__ float softmax_from(float max)
{
    return max == -INFINITY ? 0 : max;
}
/* The shares of all warps of a row together. `shares` is shared memory that nothing uses until the next barrier. `by`
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
