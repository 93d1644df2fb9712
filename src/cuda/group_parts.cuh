/* group_parts.cuh - group_norm in one kernel: x is read once and held in registers (sm_90 and newer).

   A cluster has a group, or with channels last a few neighbouring groups whose rows begin and end at 16 bytes; each
   of its blocks has a part of the rows. A block finds the mean and the squared deviations of what it holds, writes
   them into the shared memory of all blocks of its cluster, and combines what it gets by Chan's formula, in double.
   With channels last a thread has one 16-byte column, whose elements belong to one group or to two. */
#ifndef ADZE_CUDA_GROUP_PARTS_CUH
#define ADZE_CUDA_GROUP_PARTS_CUH

#include "act.cuh"
#include "cluster.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "vec.cuh"

constexpr int PART_THREADS = 512, PART_BLOCKS = 8; /* of a block, of a cluster */
constexpr int PART_UNITS = 21;                     /* 16-byte vectors of a thread */
constexpr int PART_GROUPS = 16, PART_COLUMNS = 32; /* channels last: of a cluster */
constexpr int PART_CHANNELS = 512;                 /* channels first: of a group */

struct part_params {
    const void *x, *weight, *bias;
    void *out;
    int64_t rows_of_set; /* rows between the first of one cluster and of the next; channels last: of an entry */
    int32_t units;       /* vectors of a group; channels last: positions */
    int32_t share;       /* of them in a block */
    int32_t each;        /* elements of a group in one of them */
    int32_t len, step_rows, step_at; /* channels first: elements of a row, and from a thread's vector to its next */
    int32_t rows_per_channel;
    int32_t per_group, groups; /* channels; groups of an entry */
    int32_t span;              /* groups of a cluster */
    int32_t columns, height;   /* channels last: vectors of a position, positions that a block has at a time */
    float eps;
    int32_t act;
    bool steps, weight_f32, bias_f32;
    adze_rows rows; /* of x and out */
};

/* Where a thread is in its part. */
template <typename T, bool LAST>
struct part_place {
    int64_t first; /* row */
    int row, at;   /* from it; an element of the row */
    __device__ __forceinline__ void next(const part_params &p)
    {
        if (LAST) {
            row += p.height;
            return;
        }
        row += p.step_rows, at += p.step_at;
        if (at >= p.len)
            at -= p.len, row++;
    }
    __device__ __forceinline__ int64_t offset(const part_params &p, int tensor) const
    {
        return row_offset(p.rows, tensor, row_split(p.rows, first + row)) + at;
    }
};

/* What multiplies and shifts: of the channels of a group, or of the columns of a block, with 1 / deviation in it. */
template <bool LAST>
struct part_affine {
    float scale[LAST ? PART_COLUMNS * 8 : PART_CHANNELS], bias[LAST ? PART_COLUMNS * 8 : PART_CHANNELS];
};

/* The norm of a thread's vectors, through ACT (-1: p.act), stored. LAST: elements before `split` have the mean of one
   group, the others of the next. */
template <int ACT, typename T, int UNITS, bool LAST>
__device__ __forceinline__ void part_write(const part_params &p, part_place<T, LAST> place, int from, int step,
                                           int units, packed<T> (&v)[UNITS], const part_affine<LAST> &affine,
                                           float2 stats, float mean_after, int split, int column)
{
    constexpr int W = VEC<T>;
    const auto write = [&](const packed<T> &raw) {
        float f[W];
        raw.get(f);
        if (LAST) {
            float scale[W], bias[W];
            int at = column * W;
            if (UNITS > 8)
                asm volatile("" : "+r"(at)); /* no registers for them from one vector to the next */
            load<float, W>(affine.scale + at, scale);
            load<float, W>(affine.bias + at, bias);
#pragma unroll
            for (int j = 0; j < W; j++)
                f[j] = fmaf(f[j] - (j < split ? stats.x : mean_after), scale[j], bias[j]);
        } else {
            const int c = p.rows_per_channel == 1 ? place.row : place.row / p.rows_per_channel;
            const float scale = stats.y * affine.scale[c], bias = affine.bias[c];
#pragma unroll
            for (int j = 0; j < W; j++)
                f[j] = fmaf(f[j] - stats.x, scale, bias);
        }
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

/* The mean of a group and 1 / deviation, from the shares of the blocks. */
__device__ __forceinline__ float2 part_combine(const part_params &p, const float2 (*shares)[PART_GROUPS], int group,
                                               int blocks)
{
    const double over = inverse((double)p.units * p.each);
    double sum = 0, square = 0;
    for (int b = 0; b < blocks; b++)
        sum += (double)max(min(p.units - b * p.share, p.share), 0) * p.each * shares[b][group].x;
    const double mean = sum * over;
    for (int b = 0; b < blocks; b++) {
        const double away = shares[b][group].x - mean;
        square += shares[b][group].y + (double)max(min(p.units - b * p.share, p.share), 0) * p.each * away * away;
    }
    return make_float2((float)mean, rsqrtf((float)(square * over) + p.eps));
}

template <typename T, int UNITS, bool LAST>
__device__ __forceinline__ void part_norm(const part_params &p)
{
    constexpr int W = VEC<T>;
    __shared__ __align__(16) float sums[LAST ? 2 * (PART_THREADS + PART_COLUMNS) : 64];
    __shared__ float2 shares[PART_BLOCKS][PART_GROUPS], stats[PART_GROUPS];
    __shared__ __align__(16) part_affine<LAST> affine;
    __shared__ float means[PART_GROUPS];
    cluster_arrive(); /* waited for before the first store to another block */
    const int thread = (int)threadIdx.x, lane = thread % 32, blocks = cluster_size(), rank = cluster_rank();
    const int sets = p.groups / p.span;
    const uint32_t set = blockIdx.x / (unsigned)blocks, entry = set / (unsigned)sets;
    const int channel = (int)(set - entry * sets) * p.span * p.per_group; /* the cluster's first */
    const int begin = rank * p.share, units = max(min(p.units - begin, p.share), 0);
    const int y = LAST ? thread / p.columns : thread, column = LAST ? thread - y * p.columns : 0;
    const int step = LAST ? p.height : (int)blockDim.x, from = LAST && y >= p.height ? units : y;
    part_place<T, LAST> start;
    if (LAST) {
        start.first = entry * p.rows_of_set;
        start.row = begin + y, start.at = channel + column * W;
    } else {
        const int element = (begin + thread) * W;
        start.first = set * p.rows_of_set;
        start.row = element / p.len, start.at = element - start.row * p.len;
    }
    pdl_launch_next();
    pdl_wait();
    packed<T> v[UNITS];
    part_place<T, LAST> place = start;
#pragma unroll
    for (int k = 0; k < UNITS; k++) {
        v[k].raw = make_uint4(0, 0, 0, 0);
        if (from + k * step < units)
            v[k] = load_packed((const T *)p.x + place.offset(p, 0));
        place.next(p);
    }
    cluster_wait();

    /* Elements of a column before `split` belong to group `low`, the others to the next. */
    const int low = LAST ? column * W / p.per_group : 0, split = LAST ? (low + 1) * p.per_group - column * W : W;
    const int pitch = p.height | 1, warps = (int)blockDim.x / 32;
    const float over = units ? reciprocal((float)(units * p.each)) : 0;
    float mean = 0, mean_after = 0;
#pragma unroll
    for (int square = 0; square < 2; square++) {
        float sum[W] = {};
#pragma unroll
        for (int k = 0; k < UNITS; k++)
            if (from + k * step < units) {
                float f[W];
                v[k].get(f);
#pragma unroll
                for (int j = 0; j < W; j++) {
                    const float d = f[j] - (j < split ? mean : mean_after);
                    sum[j] = square ? fmaf(d, d, sum[j]) : sum[j] + f[j];
                }
            }
        keep_packed(v);
        if constexpr (LAST) {
            float before = 0, after = 0;
#pragma unroll
            for (int j = 0; j < W; j++)
                (j < split ? before : after) += sum[j];
            if (y < p.height)
                sums[2 * column * pitch + y] = before, sums[(2 * column + 1) * pitch + y] = after;
            __syncthreads();
            for (int g = thread / 32; g < p.span; g += warps) {
                float all = 0;
                for (int c = g * p.per_group / W; c * W < (g + 1) * p.per_group; c++) {
                    const float *of_group = sums + (2 * c + g - c * W / p.per_group) * pitch;
                    for (int i = lane; i < p.height; i += 32)
                        all += of_group[i];
                }
                all = warp_sum<32>(all);
                if (!square)
                    means[g] = all * over;
                else if (lane < blocks)
                    cluster_store(&shares[rank][g], lane, means[g], all);
            }
            if (!square) {
                __syncthreads();
                mean = means[min(low, p.span - 1)], mean_after = means[min(low + 1, p.span - 1)];
            }
        } else {
#pragma unroll
            for (int width = W / 2; width; width /= 2)
#pragma unroll
                for (int j = 0; j < width; j++)
                    sum[j] += sum[j + width];
            const float all = row_sum(sum[0], sums + 32 * square);
            if (!square)
                mean = mean_after = all * over;
            else if (thread < blocks)
                cluster_store(&shares[rank][0], thread, mean, all);
        }
    }
    cluster_arrive();
    const int channels = p.span * p.per_group;
    for (int c = thread; c < channels; c += (int)blockDim.x) {
        float scale[1] = {1}, bias[1] = {0};
        if (p.weight)
            load_param<T, 1>(p.weight, p.weight_f32, channel + c, scale);
        if (p.bias)
            load_param<T, 1>(p.bias, p.bias_f32, channel + c, bias);
        affine.scale[c] = scale[0], affine.bias[c] = bias[0];
    }
    cluster_wait();
    if (thread < p.span)
        stats[thread] = part_combine(p, shares, thread, blocks);
    __syncthreads();
    const float2 mine = stats[LAST ? min(low, p.span - 1) : 0];
    const float after = stats[LAST ? min(low + 1, p.span - 1) : 0].x;
    if (LAST) {
        for (int c = thread; c < channels; c += (int)blockDim.x)
            affine.scale[c] *= stats[c / p.per_group].y;
        __syncthreads();
    }
    if (p.act == ADZE_ACT_NONE)
        part_write<ADZE_ACT_NONE>(p, start, from, step, units, v, affine, mine, after, split, column);
    else if (p.act == ADZE_ACT_SILU)
        part_write<ADZE_ACT_SILU>(p, start, from, step, units, v, affine, mine, after, split, column);
    else
        part_write<-1>(p, start, from, step, units, v, affine, mine, after, split, column);
}

/* Code for older cards has nothing in it, and for newer ones not the most vectors: there they do not fit. */
template <typename T, int UNITS, bool LAST>
__global__ void __launch_bounds__(PART_THREADS, UNITS > 2 ? 1 : 2) group_parts(const __grid_constant__ part_params p)
{
#if __CUDA_ARCH__ >= 900
    if constexpr (UNITS <= 8 || __CUDA_ARCH__ == 900)
        part_norm<T, UNITS, LAST>(p);
#endif
}

/* ---- The host ---- */

static int64_t part_units(int device)
{
    return adze_cuda_sm(device) == 90 ? PART_UNITS : 8;
}

/* `units`: vectors that a thread has, at most. */
template <typename T, bool LAST>
static adze_status part_launch(adze_stream s, const part_params &p, int64_t sets, unsigned blocks, int64_t units,
                               unsigned threads)
{
    const launch_shape shape(0, blocks);
    const int64_t grid = sets * blocks;
    if (units <= 2)
        return launch("group_norm", s, group_parts<T, 2, LAST>, grid, dim3(threads), shape, p);
    if (units <= 4)
        return launch("group_norm", s, group_parts<T, 4, LAST>, grid, dim3(threads), shape, p);
    if (units <= 8)
        return launch("group_norm", s, group_parts<T, 8, LAST>, grid, dim3(threads), shape, p);
    return launch("group_norm", s, group_parts<T, PART_UNITS, LAST>, grid, dim3(threads), shape, p);
}

#endif
