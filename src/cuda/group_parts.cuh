/* group_parts.cuh - group_norm with channels first in one kernel: x is read once and held in registers (sm_90 and
   newer).

   A cluster has a group; each of its blocks has a part of it. A block finds the mean and the squared deviations of
   what it holds, writes them into the shared memory of all blocks of its cluster, and combines what it gets by Chan's
   formula, in double. */
#ifndef ADZE_CUDA_GROUP_PARTS_CUH
#define ADZE_CUDA_GROUP_PARTS_CUH

#include "act.cuh"
#include "cluster.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "vec.cuh"

constexpr int PART_THREADS = 512, PART_BLOCKS = 8; /* of a block, of a cluster */
constexpr int EIGHT_THREADS = 384;                 /* of a block whose threads have eight vectors */
constexpr int PART_UNITS = 20;                     /* 16-byte vectors of a thread */
constexpr int PART_CHANNELS = 512;                 /* of a group */

struct part_params {
    const void *x, *weight, *bias;
    void *out;
    int64_t rows_of_group;
    int32_t units;                   /* vectors of a group */
    int32_t share;                   /* of them in a block */
    int32_t len, step_rows, step_at; /* elements of a row, and from a thread's vector to its next */
    int32_t rows_per_channel;
    int32_t per_group, groups; /* channels; groups of an entry */
    float eps;
    int32_t act;
    bool steps, weight_f32, bias_f32;
    adze_rows rows; /* of x and out */
};

/* Where a thread is in its part. */
struct part_place {
    int64_t first; /* row */
    int row, at;   /* from it; an element of the row */
    __device__ __forceinline__ void next(const part_params &p)
    {
        row += p.step_rows, at += p.step_at;
        if (at >= p.len)
            at -= p.len, row++;
    }
    __device__ __forceinline__ int64_t offset(const part_params &p, int tensor) const
    {
        return row_offset(p.rows, tensor, row_split(p.rows, first + row)) + at;
    }
};

/* What multiplies and shifts the channels of a group. */
struct part_affine {
    float scale[PART_CHANNELS], bias[PART_CHANNELS];
};

/* The norm of a thread's vectors, through ACT (-1: p.act), stored. */
template <int ACT, typename T, int UNITS>
__device__ __forceinline__ void part_write(const part_params &p, part_place place, int units, packed<T> (&v)[UNITS],
                                           const part_affine &affine, float2 stats)
{
    constexpr int W = VEC<T>;
    const int from = (int)threadIdx.x, step = (int)blockDim.x;
    const auto write = [&](const packed<T> &raw) {
        float f[W];
        raw.get(f);
        const int c = p.rows_per_channel == 1 ? place.row : place.row / p.rows_per_channel;
        const float scale = stats.y * affine.scale[c], bias = affine.bias[c];
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] = fmaf(f[j] - stats.x, scale, bias);
        if (p.steps) {
#pragma unroll
            for (int j = 0; j < W; j++)
                f[j] = round_to<T>(f[j]);
        }
        act_all<W>(ACT >= 0 ? ACT : p.act, f);
        store<T, W>((T *)p.out + place.offset(p, 1), f);
        place.next(p);
    };
    if constexpr (ACT >= 0) {
#pragma unroll
        for (int k = 0; k < UNITS; k++)
            if (from + k * step < units)
                write(v[k]);
    } else {
#pragma unroll 1
        for (int k = from; k < units; k += step) { /* registers are walked, so that the code stays small */
            write(v[0]);
#pragma unroll
            for (int i = 0; i + 1 < UNITS; i++)
                v[i] = v[i + 1];
        }
    }
}

/* The mean of the group and 1 / deviation, from the shares of the blocks. */
__device__ __forceinline__ float2 part_combine(const part_params &p, const float2 *shares, int width, int blocks)
{
    const double over = inverse((double)p.units * width);
    double sum = 0, square = 0;
    for (int b = 0; b < blocks; b++)
        sum += (double)max(min(p.units - b * p.share, p.share), 0) * width * shares[b].x;
    const double mean = sum * over;
    for (int b = 0; b < blocks; b++) {
        const double away = shares[b].x - mean;
        square += shares[b].y + (double)max(min(p.units - b * p.share, p.share), 0) * width * away * away;
    }
    return make_float2((float)mean, rsqrtf((float)(square * over) + p.eps));
}

template <typename T, int UNITS>
__device__ __forceinline__ void part_norm(const part_params &p)
{
    constexpr int W = VEC<T>;
    __shared__ __align__(16) float sums[2][32];
    __shared__ float2 shares[PART_BLOCKS], stats;
    __shared__ part_affine affine;
    cluster_arrive(); /* waited for before the first store to another block */
    const int thread = (int)threadIdx.x, step = (int)blockDim.x, blocks = cluster_size(), rank = cluster_rank();
    const uint32_t group = blockIdx.x / (unsigned)blocks;
    const int channel = (int)(group % (uint32_t)p.groups) * p.per_group; /* the group's first */
    const int begin = rank * p.share, units = max(min(p.units - begin, p.share), 0);
    const int element = (begin + thread) * W;
    part_place start;
    start.first = group * p.rows_of_group;
    start.row = element / p.len, start.at = element - start.row * p.len;
    pdl_launch_next();
    pdl_wait();
    packed<T> v[UNITS];
    part_place place = start;
#pragma unroll
    for (int k = 0; k < UNITS; k++) {
        v[k].raw = make_uint4(0, 0, 0, 0);
        if (thread + k * step < units)
            v[k] = load_packed((const T *)p.x + place.offset(p, 0));
        place.next(p);
    }
    cluster_wait();

    const float over = units ? reciprocal((float)(units * W)) : 0;
    float mean = 0;
#pragma unroll
    for (int square = 0; square < 2; square++) {
        float sum[W] = {};
#pragma unroll
        for (int k = 0; k < UNITS; k++)
            if (thread + k * step < units) {
                float f[W];
                v[k].get(f);
#pragma unroll
                for (int j = 0; j < W; j++)
                    sum[j] = square ? fmaf(f[j] - mean, f[j] - mean, sum[j]) : sum[j] + f[j];
            }
        keep_packed(v);
#pragma unroll
        for (int width = W / 2; width; width /= 2)
#pragma unroll
            for (int j = 0; j < width; j++)
                sum[j] += sum[j + width];
        const float all = row_sum(sum[0], sums[square]);
        if (!square)
            mean = all * over;
        else if (thread < blocks)
            cluster_store(&shares[rank], thread, mean, all);
    }
    cluster_arrive();
    for (int c = thread; c < p.per_group; c += step) {
        float scale[1] = {1}, bias[1] = {0};
        if (p.weight)
            load_param<T, 1>(p.weight, p.weight_f32, channel + c, scale);
        if (p.bias)
            load_param<T, 1>(p.bias, p.bias_f32, channel + c, bias);
        affine.scale[c] = scale[0], affine.bias[c] = bias[0];
    }
    cluster_wait();
    if (thread == 0)
        stats = part_combine(p, shares, W, blocks);
    __syncthreads();
    const float2 mine = stats;
    if (p.act == ADZE_ACT_NONE)
        part_write<ADZE_ACT_NONE>(p, start, units, v, affine, mine);
    else if (p.act == ADZE_ACT_SILU)
        part_write<ADZE_ACT_SILU>(p, start, units, v, affine, mine);
    else
        part_write<-1>(p, start, units, v, affine, mine);
}

/* Code for older cards has nothing in it, and for newer ones not the most vectors: there they do not fit. Two blocks
   share a multiprocessor where they can: one alone would wait for memory. */
template <typename T, int UNITS>
__global__ void __launch_bounds__(UNITS == 8 ? EIGHT_THREADS : PART_THREADS, UNITS > 8 ? 1 : 2)
    group_parts(const __grid_constant__ part_params p)
{
#if __CUDA_ARCH__ >= 900
    if constexpr (UNITS <= 8 || __CUDA_ARCH__ == 900)
        part_norm<T, UNITS>(p);
#endif
}

/* ---- The host ---- */

/* Vectors of a block, at most. */
static int64_t part_most(int device)
{
    return adze_cuda_sm(device) == 90 ? PART_THREADS * PART_UNITS : EIGHT_THREADS * 8;
}

/* `units`: vectors that a thread has, at most. */
template <typename T>
static adze_status part_launch(adze_stream s, const part_params &p, int64_t groups, unsigned blocks, int64_t units,
                               unsigned threads)
{
    const launch_shape shape(0, blocks);
    const int64_t grid = groups * blocks;
    if (units <= 2)
        return launch("group_norm", s, group_parts<T, 2>, grid, dim3(threads), shape, p);
    if (units <= 4)
        return launch("group_norm", s, group_parts<T, 4>, grid, dim3(threads), shape, p);
    if (units <= 8)
        return launch("group_norm", s, group_parts<T, 8>, grid, dim3(threads), shape, p);
    return launch("group_norm", s, group_parts<T, PART_UNITS>, grid, dim3(threads), shape, p);
}

#endif
