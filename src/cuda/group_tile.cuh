/* group_tile.cuh - group_norm of tensors whose positions have one stride: the common case.

   A tile is whole groups of one batch entry: rows of `columns` units, a stride apart. With channels first it is one
   contiguous group, and a row is a unit; with channels last a row is a part of a position's channels. Each thread
   has one column and every height-th row. It computes the mean and the squared deviations of its elements (per
   channel with channels last, since groups may end inside a unit). These are combined by Chan's formula over
   threads, blocks and slices, always in the same order.

   tile_norm holds a tile in the registers of a cluster of blocks: x is read once. For larger tiles tile_slices
   leaves the statistics of slices in scratch, and tile_write combines them and reads x again, its blocks and each of
   them backwards: the ends of what blocks read last may still be in L2. Their threads load the next units before they
   work on those that have come. */
#ifndef ADZE_CUDA_GROUP_TILE_CUH
#define ADZE_CUDA_GROUP_TILE_CUH

#include "act.cuh"
#include "cluster.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "unit.cuh"

#include <type_traits>

/* Units of W elements of T, at most 16 bytes: narrow ones are as wide as the tensors' alignment and shape allow. */
template <typename T, int W>
constexpr bool is_narrow = W < VEC<T>;
/* Launch bounds of tile_slices and tile_write: threads of a block, units of a thread at a time, and blocks per SM. As
   many units are in flight meanwhile. Narrow ones are more, for as many bytes. With channels last a thread has
   statistics of each element of a unit: of 8 elements, or of units that it also shifts, they leave no registers for a
   third block. */
constexpr int SLICE_THREADS = 256;
template <bool NARROW>
constexpr int SLICE_UNITS = NARROW ? 8 : 4;
constexpr int slice_blocks(int width, bool narrow, bool last, bool loose)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
    return 2; /* more would spill */
#else
    return narrow ? 4 : last && (loose || width == 8) ? 2 : 3;
#endif
}

struct tile_params {
    const void *x, *weight, *bias;
    void *out;
    float4 *slice;                                 /* [tiles of all entries, groups, slices] */
    int64_t entry[2], row[2], tile;                /* strides of x and out */
    int32_t tiles, slices, ranks;                  /* of an entry; blocks of a tile, and of a cluster */
    int32_t rows, share;                           /* of a tile, of a block */
    int32_t channels, groups, per_group;           /* of a tile; channels of a group */
    int32_t columns, height, split;                /* split: warps that have a group's statistics in a block */
    int32_t per_channel, step_channels, step_rest; /* channels first: rows, and from a thread's row to its next */
    uint32_t over_group;                           /* 2^32 / per_group, rounded up */
    float eps;
    int32_t act;
    bool steps, weight_f32, bias_f32;
};

/* Shared memory: float4 parts[groups * split * ranks]; float2 stats[groups], affine[channels]; and with channels last
   float2 sums[height * columns * W]. */
struct tile_memory {
    float4 *parts; /* count, mean, squared deviations */
    float2 *stats, *affine, *sums;
    __device__ __forceinline__ tile_memory(const tile_params &p, float4 *shared)
        : parts(shared), stats((float2 *)(shared + p.groups * p.split * p.ranks)),
          affine(stats + (p.groups + 1) / 2 * 2), sums(affine + (p.channels + 1) / 2 * 2)
    {
    }
};
static inline size_t tile_shared(const tile_params &p, bool last, int width)
{
    const size_t pairs = (size_t)((p.groups + 1) / 2 + (p.channels + 1) / 2) * 2;
    return (size_t)p.groups * p.split * p.ranks * sizeof(float4) +
           (pairs + (last ? (size_t)p.height * p.columns * width : 0)) * sizeof(float2);
}

__device__ __forceinline__ float one_over(float v)
{
    return reciprocal(v);
}
__device__ __forceinline__ double one_over(double v)
{
    return inverse(v);
}

/* The parts (count, mean, squared deviations) from, from + step ... of all lanes of a warp as one, in S. */
template <typename S, typename F>
__device__ __forceinline__ float4 group_combine(int count, int from, int step, F part)
{
    S n = 0, sum = 0, square = 0;
    for (int i = from; i < count; i += step) {
        const float4 its = part(i);
        n += its.x, sum += (S)its.x * its.y;
    }
    n = warp_sum<32>(n), sum = warp_sum<32>(sum);
    const S mean = n > 0 ? sum * one_over(n) : 0;
    for (int i = from; i < count; i += step) {
        const float4 its = part(i);
        const S away = its.y - mean;
        square += its.z + its.x * away * away;
    }
    return make_float4((float)n, (float)mean, (float)warp_sum<32>(square), 0);
}

/* blockIdx.x, opaque to the optimizer: values derived from it are recomputed rather than kept in registers. */
__device__ __forceinline__ uint32_t block_again()
{
    uint32_t block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block;
}

/* The part of a tile that a thread works on. */
template <typename T, int W, bool LAST>
struct tile_thread {
    int index, tile, slice, rows; /* of all tiles; of the entry's; of the block */
    int row, column, left;        /* the first, from the tile's; rows from it to the block's end */
    int64_t entry;
    int y;
    __device__ __forceinline__ tile_thread(const tile_params &p, uint32_t block)
    {
        index = (int)(block / (uint32_t)p.slices), slice = (int)block - index * p.slices;
        entry = (uint32_t)index / (uint32_t)p.tiles, tile = index - (int)entry * p.tiles;
        y = (int)threadIdx.x, column = 0;
        if (LAST)
            y /= p.columns, column = (int)threadIdx.x - y * p.columns;
        rows = max(min(p.rows - slice * p.share, p.share), 0);
        row = slice * p.share + y;
        left = y < p.height ? rows - y : 0;
    }
    __device__ __forceinline__ int64_t at(const tile_params &p, int tensor) const
    {
        return entry * p.entry[tensor] + tile * p.tile + column * W + row * p.row[tensor];
    }
};

/* Loads the thread's next vectors; returns how many there are. */
template <int UNITS, typename T, typename U>
__device__ __forceinline__ int tile_load(const tile_params &p, const T *x, int left, U (&v)[UNITS])
{
    const int64_t step = p.height * p.row[0];
    const int n = left > 0 ? min((int)((uint32_t)(left + p.height - 1) / (uint32_t)p.height), UNITS) : 0;
#pragma unroll
    for (int k = 0; k < UNITS; k++, x += step)
        if (k < n)
            v[k].fetch(x);
    return n;
}

/* As keep_packed: unpacked floats would take more registers than units. */
template <typename T, int W, int N>
__device__ __forceinline__ void keep(unit<T, W> (&v)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        if constexpr (W == VEC<T>)
            asm volatile("" : "+r"(v[i].v.raw.x), "+r"(v[i].v.raw.y), "+r"(v[i].v.raw.z), "+r"(v[i].v.raw.w));
        else if constexpr (W == 2)
            asm volatile("" : "+r"(v[i].v));
}

/* What a thread has loaded, as units to work on. All units of a thread in x are off a 16-byte border by as much. */
template <typename T, int W, int N>
__device__ __forceinline__ void take_next(unit<T, W> (&v)[N], const unit<T, W> (&next)[N], const T *)
{
#pragma unroll
    for (int i = 0; i < N; i++)
        v[i] = next[i];
}
template <typename T, int W, int N>
__device__ __forceinline__ void take_next(unit<T, W> (&v)[N], const loose_unit<T> (&next)[N], const T *x)
{
#pragma unroll
    for (int i = 0; i < N; i++)
        v[i] = next[i].whole(x);
}

template <int W>
__device__ __forceinline__ float tree_sum(float (&sum)[W])
{
#pragma unroll
    for (int width = W / 2; width; width /= 2)
#pragma unroll
        for (int j = 0; j < width; j++)
            sum[j] += sum[j + width];
    return sum[0];
}

/* The statistics of what a thread has in units of W elements: per element of a unit (N = W), or of all (N = 1). */
template <int W, int N>
struct group_sums {
    static constexpr bool LAST = N > 1;
    float count = 0, mean[N] = {}, square[N] = {};
    template <typename U, int UNITS>
    __device__ __forceinline__ void add(U (&v)[UNITS], int n)
    {
        const float its_count = (float)(LAST ? n : n * W), over = n ? reciprocal(its_count) : 0;
        float sum[W] = {}, its_mean[N];
#pragma unroll
        for (int k = 0; k < UNITS; k++)
            if (k < n) {
                float f[W];
                v[k].get(f);
#pragma unroll
                for (int j = 0; j < W; j++)
                    sum[j] += f[j];
            }
        keep(v);
        if (!LAST)
            tree_sum(sum);
#pragma unroll
        for (int j = 0; j < N; j++)
            its_mean[j] = sum[j] * over;
#pragma unroll
        for (int j = 0; j < W; j++)
            sum[j] = 0;
#pragma unroll
        for (int k = 0; k < UNITS; k++)
            if (k < n) {
                float f[W];
                v[k].get(f);
#pragma unroll
                for (int j = 0; j < W; j++) {
                    const float away = f[j] - its_mean[LAST ? j : 0];
                    sum[j] = fmaf(away, away, sum[j]);
                }
            }
        keep(v);
        if (!LAST)
            tree_sum(sum);
        if (count == 0) {
#pragma unroll
            for (int j = 0; j < N; j++)
                mean[j] = its_mean[j], square[j] = sum[j];
        } else if (n) {
            const float part = its_count * reciprocal(count + its_count);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float away = its_mean[j] - mean[j];
                mean[j] = fmaf(away, part, mean[j]);
                square[j] += fmaf(away * away, count * part, sum[j]);
            }
        }
        count += its_count;
    }
};

/* The statistics of a block's threads, by warps, to the parts of all blocks of its cluster. */
template <typename T, int W, bool LAST>
__device__ __forceinline__ void tile_share(const tile_params &p, const group_sums<W, LAST ? W : 1> &sums,
                                           const tile_memory &memory)
{
    const tile_thread<T, W, LAST> t(p, block_again());
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, rank = p.ranks > 1 ? t.slice : 0;
    const auto emit = [&](int g, int part, const float4 &share) {
        float4 *to = &memory.parts[(g * p.ranks + rank) * p.split + part];
        if (p.ranks > 1) {
            if (lane < p.ranks)
                cluster_store(to, lane, share);
        } else if (lane == 0) {
            *to = share;
        }
    };
    if constexpr (!LAST) {
        emit(0, warp, group_combine<float>(1, 0, 1, [&](int) {
                 return make_float4(sums.count, sums.mean[0], sums.square[0], 0);
             }));
    } else {
        if (t.y < p.height) {
            float2 *mine = memory.sums + (t.y * p.columns + t.column) * W;
            if constexpr (W == 1) {
                *mine = make_float2(sums.mean[0], sums.square[0]);
            } else {
#pragma unroll
                for (int j = 0; j < W; j += 2)
                    ((float4 *)mine)[j / 2] =
                        make_float4(sums.mean[j], sums.square[j], sums.mean[j + 1], sums.square[j + 1]);
            }
        }
        __syncthreads();
        const int each = t.rows / p.height, more = t.rows - each * p.height;
        for (int job = warp; job < p.groups * p.split; job += (int)blockDim.x / 32) {
            const int g = job / p.split, part = job - g * p.split;
            emit(g, part, group_combine<float>(p.per_group * p.height, lane + 32 * part, 32 * p.split, [&](int i) {
                     const int y = p.per_group == 1 ? i : (int)__umulhi((uint32_t)i, p.over_group);
                     const float2 its = memory.sums[y * p.channels + g * p.per_group + i - y * p.per_group];
                     return make_float4((float)(each + (y < more)), its.x, its.y, 0);
                 }));
        }
    }
}

/* each(g) for the groups of a tile, distributed over the warps. */
template <typename F>
__device__ __forceinline__ void tile_groups(const tile_params &p, F each)
{
    for (int g = (int)threadIdx.x / 32; g < p.groups; g += (int)blockDim.x / 32)
        each(g);
}
__device__ __forceinline__ float2 group_stats(const float4 &all, float eps)
{
    return make_float2(all.y, rsqrtf(all.z * reciprocal(all.x) + eps));
}

template <typename T>
__device__ __forceinline__ void tile_affine(const tile_params &p, int tile, float2 *affine)
{
    for (int c = (int)threadIdx.x; c < p.channels; c += (int)blockDim.x) {
        float scale[1] = {1}, bias[1] = {0};
        if (p.weight)
            load_param<T, 1>(p.weight, p.weight_f32, tile * p.channels + c, scale);
        if (p.bias)
            load_param<T, 1>(p.bias, p.bias_f32, tile * p.channels + c, bias);
        affine[c] = make_float2(scale[0], bias[0]);
    }
}

/* The scale and shift of a thread's units. */
template <typename T, int W, bool LAST>
struct tile_scale;
template <typename T, int W>
struct tile_scale<T, W, true> {
    float mean[W], scale[W], bias[W];
    __device__ __forceinline__ tile_scale(const tile_params &p, const tile_thread<T, W, true> &t,
                                          const tile_memory &memory, float2)
    {
        if (t.y >= p.height)
            return;
        int c = t.column * W, g = c / p.per_group, rest = c - g * p.per_group;
#pragma unroll
        for (int j = 0; j < W; j++) {
            const float2 stats = memory.stats[g], affine = memory.affine[c + j];
            mean[j] = stats.x, scale[j] = stats.y * affine.x, bias[j] = affine.y;
            if (++rest == p.per_group)
                rest = 0, g++;
        }
    }
    __device__ __forceinline__ void go_to(const tile_params &, int) {}
    __device__ __forceinline__ void apply(const tile_params &, float (&f)[W])
    {
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] = fmaf(f[j] - mean[j], scale[j], bias[j]);
    }
};
template <typename T, int W>
struct tile_scale<T, W, false> {
    const float2 *affine;
    float2 stats;
    int channel, rest;
    __device__ __forceinline__ tile_scale(const tile_params &p, const tile_thread<T, W, false> &t,
                                          const tile_memory &memory, float2 its)
        : affine(memory.affine), stats(its)
    {
        go_to(p, t.row);
    }
    __device__ __forceinline__ void go_to(const tile_params &p, int row)
    {
        channel = row / p.per_channel, rest = row - channel * p.per_channel;
    }
    __device__ __forceinline__ void apply(const tile_params &p, float (&f)[W])
    {
        const float2 its = affine[channel];
        const float scale = stats.y * its.x;
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] = fmaf(f[j] - stats.x, scale, its.y);
        channel += p.step_channels, rest += p.step_rest;
        if (rest >= p.per_channel)
            rest -= p.per_channel, channel++;
    }
};

/* act of N values in a loop, for rare activations: this keeps the code small and the compilation fast. */
template <int N>
__device__ __forceinline__ void act_each(int act, float (&f)[N])
{
#pragma unroll 1
    for (int k = 0; k < N; k++) {
        float first[1] = {f[0]};
        act_all<1>(act, first);
#pragma unroll
        for (int i = 0; i + 1 < N; i++)
            f[i] = f[i + 1];
        f[N - 1] = first[0];
    }
}

/* Normalises n units, applies ACT (-1: p.act) and stores them. */
template <int ACT, typename T, int W, bool LAST, int UNITS>
__device__ __forceinline__ void tile_store(const tile_params &p, unit<T, W> (&v)[UNITS], int n,
                                           tile_scale<T, W, LAST> &scale, T *out)
{
    const int64_t step = p.height * p.row[1];
    const auto write = [&](unit<T, W> raw, T *to) {
        float f[W];
        raw.get(f);
        scale.apply(p, f);
        if (p.steps) {
#pragma unroll
            for (int j = 0; j < W; j++)
                f[j] = round_to<T>(f[j]);
        }
        if constexpr (ACT >= 0)
            act_all<W>(ACT, f);
        else
            act_each(p.act, f);
        raw.set(f);
        raw.put(to);
    };
    if constexpr (ACT >= 0) {
#pragma unroll
        for (int k = 0; k < UNITS; k++, out += step) {
            asm volatile("" : "+l"(out)); /* addresses one at a time: each takes two registers */
            if (k < n)
                write(v[k], out);
        }
    } else {
#pragma unroll 1
        for (int k = 0; k < n; k++) { /* v shifts down one register per iteration: unrolled code would be large */
            write(v[0], out), out += step;
#pragma unroll
            for (int i = 0; i + 1 < UNITS; i++)
                v[i] = v[i + 1];
        }
    }
}
template <typename T, int W, bool LAST, int UNITS>
__device__ __forceinline__ void tile_store_act(const tile_params &p, unit<T, W> (&v)[UNITS], int n,
                                               tile_scale<T, W, LAST> &scale, T *out)
{
    if (p.act == ADZE_ACT_NONE)
        tile_store<ADZE_ACT_NONE>(p, v, n, scale, out);
    else if (p.act == ADZE_ACT_SILU)
        tile_store<ADZE_ACT_SILU>(p, v, n, scale, out);
    else
        tile_store<-1>(p, v, n, scale, out);
}

/* ---- The kernels ---- */

template <typename T, int W, int UNITS, bool LAST>
__device__ __forceinline__ void tile_norm_body(const tile_params &p)
{
    extern __shared__ float4 tile_storage[];
    const tile_memory memory(p, tile_storage);
    const int lane = (int)threadIdx.x % 32;
    if (p.ranks > 1)
        cluster_arrive(); /* the wait comes before the first store to another block */
    const tile_thread<T, W, LAST> t(p, blockIdx.x);
    pdl_launch_next();
    pdl_wait();
    unit<T, W> v[UNITS];
    const int n = tile_load(p, (const T *)p.x + t.at(p, 0), t.left, v);
    tile_affine<T>(p, t.tile, memory.affine);
    group_sums<W, LAST ? W : 1> sums;
    sums.add(v, n);
    if (p.ranks > 1)
        cluster_wait();
    tile_share<T, W, LAST>(p, sums, memory);
    if (p.ranks > 1)
        cluster_arrive(), cluster_wait();
    else
        __syncthreads();
    const auto combine = [&](int g) {
        const int parts = p.ranks * p.split;
        return group_stats(group_combine<float>(parts, lane, 32, [&](int i) { return memory.parts[g * parts + i]; }),
                           p.eps);
    };
    float2 stats = {};
    if constexpr (LAST) {
        tile_groups(p, [&](int g) {
            const float2 its = combine(g);
            if (lane == 0)
                memory.stats[g] = its;
        });
        __syncthreads();
    } else {
        stats = combine(0);
    }
    const tile_thread<T, W, LAST> again(p, block_again());
    tile_scale<T, W, LAST> scale(p, again, memory, stats);
    tile_store_act(p, v, n, scale, (T *)p.out + again.at(p, 1));
}

/* Registers limit the occupancy: threads with more vectors are fewer, those with the most have an SM to themselves
   and are for sm_90 and channels first. With channels last, the two-kernel path takes two thirds of their time. In
   small blocks, two vectors per thread beat four in both layouts. Both were measured on an H200. Of narrow units a
   thread has 4 or HELD_NARROW. */
constexpr int HELD_MOST = 21, HELD_NARROW = 16;
constexpr int held_threads(int units, bool last)
{
    return units == HELD_MOST || (units == 4 && !last) ? 512 : units == 2 ? 128 : last && units == 8 ? 320 : 384;
}
constexpr int held_blocks(int units)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
    return units > 8 ? 1 : units == 2 ? 6 : 2;
#else
    return units == HELD_MOST ? 1 : units == 2 ? 6 : 2;
#endif
}
template <typename T, int W, int UNITS, bool LAST>
__global__ void __launch_bounds__(held_threads(UNITS, LAST), held_blocks(UNITS))
    tile_norm(const __grid_constant__ tile_params p)
{
#ifdef __CUDA_ARCH__
    if constexpr (UNITS < HELD_MOST || __CUDA_ARCH__ == 900)
        tile_norm_body<T, W, UNITS, LAST>(p);
#endif
}

/* LOOSE: x is at any address, and only out is aligned for the units. */
template <typename T, int W, bool LAST, bool LOOSE>
__global__ void __launch_bounds__(SLICE_THREADS, slice_blocks(W, is_narrow<T, W>, LAST, LOOSE))
    tile_slices(const __grid_constant__ tile_params p)
{
    constexpr int UNITS = SLICE_UNITS<is_narrow<T, W>>;
    extern __shared__ float4 tile_storage[];
    const tile_memory memory(p, tile_storage);
    const int lane = (int)threadIdx.x % 32;
    const tile_thread<T, W, LAST> t(p, blockIdx.x);
    pdl_launch_next();
    pdl_wait();
    const T *x = (const T *)p.x + t.at(p, 0);
    group_sums<W, LAST ? W : 1> sums;
    unit<T, W> v[UNITS];
    std::conditional_t<LOOSE, loose_unit<T>, unit<T, W>> next[UNITS];
    int left = t.left, n = tile_load(p, x, left, next);
    take_next(v, next, x);
    while (left > 0) {
        left -= UNITS * p.height, x += UNITS * p.height * p.row[0];
        const int more = tile_load(p, x, left, next);
        sums.add(v, n);
        take_next(v, next, x), n = more;
    }
    tile_share<T, W, LAST>(p, sums, memory);
    __syncthreads();
    const tile_thread<T, W, LAST> again(p, block_again());
    tile_groups(p, [&](int g) {
        const float4 all =
            group_combine<float>(p.split, lane, 32, [&](int i) { return memory.parts[g * p.split + i]; });
        if (lane == 0)
            p.slice[((int64_t)again.index * p.groups + g) * p.slices + again.slice] = all;
    });
}

template <typename T, int W, bool LAST, bool LOOSE>
__global__ void __launch_bounds__(SLICE_THREADS, slice_blocks(W, is_narrow<T, W>, LAST, LOOSE))
    tile_write(const __grid_constant__ tile_params p)
{
    constexpr int UNITS = SLICE_UNITS<is_narrow<T, W>>;
    extern __shared__ float4 tile_storage[];
    const tile_memory memory(p, tile_storage);
    const int lane = (int)threadIdx.x % 32;
    const tile_thread<T, W, LAST> t(p, gridDim.x - 1 - blockIdx.x);
    pdl_launch_next();
    pdl_wait();
    /* A thread's rows in steps of as many as it loads together, the last step first. */
    const int step = UNITS * p.height;
    int at = ((t.rows + step - 1) / step - 1) * step; /* below 0 where the block has no rows */
    const T *x = (const T *)p.x + t.at(p, 0) + at * p.row[0];
    T *out = (T *)p.out + t.at(p, 1) + at * p.row[1];
    unit<T, W> v[UNITS];
    std::conditional_t<LOOSE, loose_unit<T>, unit<T, W>> next[UNITS];
    int n = tile_load(p, x, at < 0 ? 0 : t.left - at, next);
    tile_affine<T>(p, t.tile, memory.affine);
    tile_groups(p, [&](int g) {
        const float4 *slice = p.slice + ((int64_t)t.index * p.groups + g) * p.slices;
        const float2 its =
            group_stats(group_combine<double>(p.slices, lane, 32, [&](int i) { return slice[i]; }), p.eps);
        if (lane == 0)
            memory.stats[g] = its;
    });
    __syncthreads();
    tile_scale<T, W, LAST> scale(p, t, memory, memory.stats[0]);
    take_next(v, next, x);
    while (at >= 0) {
        const int back = UNITS * (int)opaque((uint32_t)p.height); /* again: products of it would take registers */
        x -= back * p.row[0];
        const int more = tile_load(p, x, at > 0 ? t.left - at + back : 0, next);
        scale.go_to(p, t.row + at);
        tile_store_act(p, v, n, scale, out);
        at -= back, out -= back * p.row[1];
        take_next(v, next, x), n = more;
    }
}

#endif
