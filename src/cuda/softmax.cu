/* softmax on CUDA. A row is read once, all loads of a thread before the first is used, and stays in registers as
   floats until it is written.

   softmax_lanes: a row belongs to LANES lanes of a warp, and a block has several. softmax_block: a row belongs to a
   block, or to a cluster of blocks with a part each. Every warp takes the maximum of its own elements and the sum of
   their powers relative to it; one barrier later each warp puts all these pairs together, and what it holds needs one
   factor. In a cluster the pairs are written into the shared memory of all its blocks, so that the same one barrier
   does and no block waits for another before it ends. softmax_loop: rows of any length, in blocks or clusters too;
   maximum and sum are found together in a first pass, the second reads the row again. */
#include "act.cuh"
#include "cluster.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "unit.cuh"

enum { X, OUT, MASK, SOFTMAX_TENSORS };
constexpr int SHORT_THREADS = 256, BLOCK_THREADS = 256, LONG_THREADS = 512; /* of a block, at most */
constexpr int CLUSTER = 8;                                                  /* blocks, at most */

struct softmax_params {
    const void *x, *mask; /* mask: NULL when absent */
    void *out;
    int64_t dim;
    int64_t part; /* elements of a row in each block of a cluster */
    float scale;
    bool mask_f32;
    adze_rows rows;
};

struct softmax_row {
    int64_t x, out, mask;
};
__device__ __forceinline__ softmax_row softmax_find(const softmax_params &p, int64_t r, bool masked)
{
    const row_index index = row_split(p.rows, r);
    return {row_offset(p.rows, X, index), row_offset(p.rows, OUT, index),
            masked ? row_offset(p.rows, MASK, index) : 0};
}

/* exp(d), d <= 0. In a sum, where the largest term is 1, what is below the smallest normal float may be lost. */
__device__ __forceinline__ float power(float d)
{
    return exp2f(d * 1.44269504f);
}
__device__ __forceinline__ float power_of_sum(float d)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d * 1.44269504f));
    return r;
}

/* x * scale + mask of W elements from `at` on. */
template <typename T, int W>
__device__ __forceinline__ void softmax_values(const softmax_params &p, const softmax_row &row, int64_t at,
                                               bool masked, float (&y)[W])
{
    if (p.scale != 1) {
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] *= p.scale;
    }
    if (masked) {
        float mask[W];
        load_param<T, W>(p.mask, p.mask_f32, row.mask + at, mask);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] += mask[j];
    }
}

/* The UNITS units of a thread as floats, and the largest of them; -inf where the row has ended. */
template <typename T, bool MASKED, int W, int UNITS>
__device__ __forceinline__ float softmax_read(const softmax_params &p, const softmax_row &row, int thread,
                                              int threads, int units, float (&y)[UNITS][W])
{
    const T *x = (const T *)p.x + row.x;
    unit<T, W> raw[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (thread + u * threads < units)
            raw[u].fetch(x + (thread + u * threads) * W);
    float max = -INFINITY;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        if (thread + u * threads < units) {
            raw[u].get(y[u]);
            softmax_values<T, W>(p, row, (thread + u * threads) * W, MASKED, y[u]);
        } else {
#pragma unroll
            for (int j = 0; j < W; j++)
                y[u][j] = -INFINITY;
        }
#pragma unroll
        for (int j = 0; j < W; j++)
            max = fmaxf(max, y[u][j]);
    }
    return max;
}
template <typename T, int W, int UNITS>
__device__ __forceinline__ void softmax_write(T *out, int thread, int threads, int units, float factor,
                                              float (&y)[UNITS][W])
{
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

/* Blocks that a multiprocessor should have room for: as many as the registers allow that a thread needs. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
template <int W, int UNITS, int THREADS, bool MORE>
constexpr int softmax_blocks = W == 1 ? 1
                                      : 65536 / THREADS /
                                            (UNITS * W == 16 ? 40
                                             : MORE          ? 56
                                                             : 48);
#else
template <int W, int UNITS, int THREADS, bool MORE>
constexpr int softmax_blocks = 1;
#endif

/* What a warp found in its part of a row: the maximum, and the sum of the powers relative to it. */
struct alignas(8) softmax_share {
    float max, sum;
};
/* Where powers are relative to: a warp may have nothing, or only what is hidden. */
__device__ __forceinline__ float softmax_from(float max)
{
    return max == -INFINITY ? 0 : max;
}
/* The shares of all warps of a row together. `shares` is shared memory that nothing uses until the next barrier. */
template <bool IN_CLUSTER>
__device__ __forceinline__ softmax_share softmax_join(softmax_share mine, softmax_share *shares)
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
        all.sum += shares[i].sum * power_of_sum(shares[i].max - all.max);
    all.sum = warp_sum<32>(all.sum);
    return all;
}

/* Beside sm_90 the compiler must be told that one block may have all registers, or it spills. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int SHORT_BLOCKS = 1;
#else
constexpr int SHORT_BLOCKS = 0;
#endif

template <typename T, bool MASKED, int LANES, int UNITS>
__global__ void __launch_bounds__(SHORT_THREADS, SHORT_BLOCKS) softmax_lanes(const __grid_constant__ softmax_params p)
{
    constexpr int W = VEC<T>;
    const int lane = (int)threadIdx.x % LANES, units = (int)(p.dim / W);
    const int64_t r = (int64_t)blockIdx.x * (SHORT_THREADS / LANES) + threadIdx.x / LANES;
    /* Lanes of a warp stay together for the shuffles: those beyond the last row repeat it and write nothing. */
    const bool writes = r < p.rows.count;
    const softmax_row row = softmax_find(p, writes ? r : p.rows.count - 1, MASKED);
    pdl_launch_next();
    pdl_wait();
    float y[UNITS][W], sum[2] = {0, 0};
    const float max = warp_max<LANES>(softmax_read<T, MASKED, W, UNITS>(p, row, lane, LANES, units, y));
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int j = 0; j < W; j++) {
            y[u][j] = power(y[u][j] - max);
            sum[j % 2] += y[u][j];
        }
    const float inverse = reciprocal(warp_sum<LANES>(sum[0] + sum[1]));
    if (writes)
        softmax_write<T, W, UNITS>((T *)p.out + row.out, lane, LANES, units, inverse, y);
}

/* Where the part of a block begins, and how many units it has. */
template <bool MASKED, int W, bool IN_CLUSTER>
__device__ __forceinline__ softmax_row softmax_place(const softmax_params &p, unsigned block, int &units)
{
    const unsigned blocks = IN_CLUSTER ? (unsigned)cluster_size() : 1, r = block / blocks;
    softmax_row row = softmax_find(p, r, MASKED);
    if constexpr (!IN_CLUSTER) {
        units = (int)(p.dim / W);
        return row;
    }
    const int64_t from = (block - r * blocks) * p.part, left = p.dim - from;
    units = (int)((left < 0 ? 0 : left < p.part ? left : p.part) / W);
    row.x += from, row.out += from, row.mask += from;
    return row;
}

template <typename T, bool MASKED, int W, int UNITS, int THREADS, bool IN_CLUSTER>
__global__ void __launch_bounds__(THREADS, softmax_blocks<W, UNITS, THREADS, MASKED || IN_CLUSTER>)
    softmax_block(const __grid_constant__ softmax_params p)
{
    __shared__ softmax_share shares[IN_CLUSTER ? CLUSTER * THREADS / 32 : THREADS / 32];
    const int thread = (int)threadIdx.x, threads = (int)blockDim.x;
    if constexpr (IN_CLUSTER)
        cluster_arrive(); /* waited for before the first store: all blocks are there */
    int units;
    const softmax_row row = softmax_place<MASKED, W, IN_CLUSTER>(p, blockIdx.x, units);
    pdl_launch_next();
    pdl_wait();
    float y[UNITS][W], sum[2] = {0, 0};
    const float max = warp_max<32>(softmax_read<T, MASKED, W, UNITS>(p, row, thread, threads, units, y));
    const float from = softmax_from(max);
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int j = 0; j < W; j++) {
            y[u][j] = power(y[u][j] - from);
            sum[j % 2] += y[u][j];
        }
    const softmax_share mine = {max, warp_sum<32>(sum[0] + sum[1])};
    if constexpr (IN_CLUSTER)
        cluster_wait();
    const softmax_share all = softmax_join<IN_CLUSTER>(mine, shares);
    const float factor = power(max - all.max) * reciprocal(all.sum);
    softmax_write<T, W, UNITS>((T *)p.out + row.out, thread, threads, units, factor, y);
}

template <typename T, int W, bool IN_CLUSTER>
__global__ void __launch_bounds__(LONG_THREADS) softmax_loop(const __grid_constant__ softmax_params p)
{
    __shared__ softmax_share shares[IN_CLUSTER ? CLUSTER * LONG_THREADS / 32 : LONG_THREADS / 32];
    const bool masked = p.mask;
    const unsigned blocks = IN_CLUSTER ? (unsigned)cluster_size() : 1;
    const int64_t first = IN_CLUSTER ? cluster_rank() * p.part : 0, step = (int64_t)blockDim.x * W;
    const int64_t end = first + p.part < p.dim ? first + p.part : p.dim, start = first + (int64_t)threadIdx.x * W;
    if constexpr (IN_CLUSTER)
        cluster_arrive();
    pdl_launch_next();
    pdl_wait();
    if constexpr (IN_CLUSTER)
        cluster_wait();
    for (int64_t r = blockIdx.x / blocks; r < p.rows.count; r += gridDim.x / blocks) {
        const softmax_row row = softmax_find(p, r, masked);
        const T *x = (const T *)p.x + row.x;
        float max = -INFINITY, sum = 0, y[W];
#pragma unroll 2
        for (int64_t i = start; i < end; i += step) {
            load<T, W>(x + i, y);
            softmax_values<T, W>(p, row, i, masked, y);
            float top = y[0];
#pragma unroll
            for (int j = 1; j < W; j++)
                top = fmaxf(top, y[j]);
            if (top > max) {
                sum *= power_of_sum(max - top);
                max = top;
            }
            const float from = softmax_from(max);
#pragma unroll
            for (int j = 0; j < W; j++)
                sum += power_of_sum(y[j] - from);
        }
        const float most = warp_max<32>(max);
        const softmax_share mine = {most, warp_sum<32>(sum * power_of_sum(max - softmax_from(most)))};
        const softmax_share all = softmax_join<IN_CLUSTER>(mine, shares);
        const float inverse = reciprocal(all.sum);
#pragma unroll 2
        for (int64_t i = start; i < end; i += step) {
            load<T, W>(x + i, y);
            softmax_values<T, W>(p, row, i, masked, y);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] = power(y[j] - all.max) * inverse;
            store<T, W>((T *)p.out + row.out + i, y);
        }
        if constexpr (IN_CLUSTER) { /* shares are used again */
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
    }
}

/* ---- The host ---- */

template <typename T, int W>
static adze_status softmax_launch_loop(adze_stream s, softmax_params p, bool clusters)
{
    p.part = ceil_div(ceil_div(p.dim, W), clusters ? CLUSTER : 1) * W;
    const int64_t warps = ceil_div(p.part, 32 * W);
    const dim3 threads(warps * 32 < LONG_THREADS ? (unsigned)warps * 32 : LONG_THREADS);
    if (clusters)
        return launch("softmax", s, softmax_loop<T, W, true>, p.rows.count * CLUSTER, threads, {0, CLUSTER}, p);
    return launch("softmax", s, softmax_loop<T, W, false>, grid_for(p.rows.count, 1), threads, 0, p);
}

/* A row in a block, or in a cluster of up to 8: UNITS units of W elements a thread. */
template <typename T, bool MASKED, int W, int UNITS, int THREADS>
static adze_status softmax_launch_block(adze_stream s, softmax_params p, int blocks)
{
    p.part = ceil_div(ceil_div(p.dim, W), blocks) * W;
    const dim3 threads((unsigned)ceil_div(p.part, 32 * UNITS * W) * 32);
    if (blocks == 1)
        return launch("softmax", s, softmax_block<T, MASKED, W, UNITS, THREADS, false>, p.rows.count, threads, 0, p);
    return launch("softmax", s, softmax_block<T, MASKED, W, UNITS, THREADS, true>, p.rows.count * blocks, threads,
                  {0, (unsigned)blocks}, p);
}
template <typename T, bool MASKED, int LANES, int ELEMENTS>
static adze_status softmax_launch_lanes(adze_stream s, const softmax_params &p)
{
    return launch("softmax", s, softmax_lanes<T, MASKED, LANES, ELEMENTS / VEC<T>>,
                  grid_for(p.rows.count, SHORT_THREADS / LANES), dim3(SHORT_THREADS), 0, p);
}

/* Sixteen elements a thread when there are few rows, so that more threads are at work, or short ones; else 32, so
   that more bytes are on their way. */
template <typename T, bool MASKED>
static adze_status softmax_launch(adze_stream s, const softmax_params &p, bool aligned)
{
    constexpr int W = VEC<T>;
    const int64_t rows = p.rows.count, some = adze_cuda_sm_count(s.device) * 2;
    const bool fits = rows <= 0x7fffffff, few = rows <= some;
    const bool clusters = p.dim > 16 * LONG_THREADS && rows <= 0x7fffffff / CLUSTER && adze_cuda_clusters(s.device);
    const int64_t blocks = clusters ? CLUSTER : 1;
    if (!aligned) {
        if (!fits || p.dim > 16 * LONG_THREADS * blocks)
            return softmax_launch_loop<T, 1>(s, p, clusters);
        return softmax_launch_block<T, MASKED, 1, 16, LONG_THREADS>(s, p, p.dim <= 16 * LONG_THREADS ? 1 : CLUSTER);
    }
    if (!fits || p.dim > 32 * LONG_THREADS * blocks)
        return softmax_launch_loop<T, W>(s, p, clusters);
    if constexpr (!MASKED) {
        if (p.dim <= 64)
            return softmax_launch_lanes<T, false, 8, 8>(s, p);
        if (p.dim <= 128)
            return softmax_launch_lanes<T, false, 8, 16>(s, p);
        if (p.dim <= 256)
            return softmax_launch_lanes<T, false, 16, 16>(s, p);
    }
    if (!few && p.dim <= 512)
        return softmax_launch_lanes<T, MASKED, 32, 16>(s, p);
    if (!few && p.dim <= 1024)
        return softmax_launch_lanes<T, MASKED, 32, 32>(s, p);
    if (few && p.dim <= 16 * LONG_THREADS)
        return softmax_launch_block<T, MASKED, W, 16 / W, LONG_THREADS>(s, p, 1);
    if (rows * CLUSTER <= some && p.dim <= 16 * LONG_THREADS * blocks)
        return softmax_launch_block<T, MASKED, W, 16 / W, LONG_THREADS>(s, p, CLUSTER);
    if (p.dim <= 32 * BLOCK_THREADS * blocks) {
        const int64_t needed = ceil_div(p.dim, 32 * BLOCK_THREADS);
        return softmax_launch_block<T, MASKED, W, 32 / W, BLOCK_THREADS>(s, p,
                                                                         needed <= 1   ? 1
                                                                         : needed == 2 ? 2
                                                                         : needed <= 4 ? 4
                                                                                       : 8);
    }
    return softmax_launch_block<T, MASKED, W, 32 / W, LONG_THREADS>(s, p, p.dim <= 32 * LONG_THREADS ? 1 : CLUSTER);
}

extern "C" adze_status adze_softmax_cuda(adze_stream s, const void *args)
{
    const adze_softmax_args *a = (const adze_softmax_args *)args;
    const adze_tensor *const tensors[SOFTMAX_TENSORS] = {&a->x, &a->out, &a->mask};
    softmax_params p = {};
    p.dim = a->x.shape[a->x.rank - 1];
    adze_rows_init(&p.rows, &a->x, SOFTMAX_TENSORS, tensors);
    if (p.dim == 0 || p.rows.count == 0)
        return ADZE_OK;
    p.x = a->x.data, p.out = a->out.data, p.mask = a->mask.dtype ? a->mask.data : NULL;
    p.scale = a->scale != 0 ? a->scale : 1;
    p.mask_f32 = a->mask.dtype == ADZE_F32;
    const bool aligned = rows_aligned(&a->x, p.dim) && rows_aligned(&a->out, p.dim) && rows_aligned(&a->mask, p.dim);
    switch (a->x.dtype) {
    case ADZE_F32:
        return p.mask ? softmax_launch<float, true>(s, p, aligned) : softmax_launch<float, false>(s, p, aligned);
    case ADZE_F16:
        return p.mask ? softmax_launch<f16, true>(s, p, aligned) : softmax_launch<f16, false>(s, p, aligned);
    default: return p.mask ? softmax_launch<bf16, true>(s, p, aligned) : softmax_launch<bf16, false>(s, p, aligned);
    }
}
