/* softmax_any.cuh - softmax of rows at any address, and of rows of 16-bit elements with an f32 mask.

   A thread has units of W elements, the widest that all tensors allow; neighbouring lanes have neighbouring units.
   The lanes of a row, or the warps of its blocks, have a contiguous run each: the stride between units of a thread
   is then a compile-time constant, and so are the offsets of its loads. All loads are issued before the first is
   used, and a row is read once. softmax_any_lanes: a row belongs to LANES lanes. softmax_any_block: to a block or a
   cluster of blocks. */
#ifndef ADZE_CUDA_SOFTMAX_ANY_CUH
#define ADZE_CUDA_SOFTMAX_ANY_CUH

#include "softmax_rows.cuh"

/* M: the dtype of the mask, void without one. */
template <typename M>
constexpr bool has_mask = true;
template <>
constexpr bool has_mask<void> = false;
template <typename T, bool MASKED>
struct mask_type {
    typedef T type;
};
template <typename T>
struct mask_type<T, false> {
    typedef void type;
};

template <typename M, int W>
struct softmax_mask {
    unit<M, W> v;
    __device__ __forceinline__ void clear() { v.fill(0); }
    __device__ __forceinline__ void fetch(const M *at) { v.fetch(at); }
    __device__ __forceinline__ void add(float (&y)[W]) const
    {
        float f[W];
        v.get(f);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] += f[j];
    }
};
template <int W>
struct softmax_mask<void, W> {
    __device__ __forceinline__ void clear() {}
    __device__ __forceinline__ void fetch(const void *) {}
    __device__ __forceinline__ void add(float (&)[W]) const {}
};
template <typename M>
__device__ __forceinline__ const M *mask_at(const M *mask, int64_t at)
{
    return mask + at;
}
__device__ __forceinline__ const void *mask_at(const void *, int64_t)
{
    return nullptr;
}

/* A thread's part of a row: unit u exists where u * STEP < left, counted from the thread's first. */
template <typename T, typename M, int W, int UNITS, int STEP>
struct softmax_units {
    float y[UNITS][W];

    /* Loads, scales and masks; returns the maximum, or -inf. LAUNCH_AFTER_LOADS: as in softmax_read. */
    template <bool LAUNCH_AFTER_LOADS>
    __device__ __forceinline__ float read(const T *x, const M *mask, float scale, int left)
    {
        unit<T, W> raw[UNITS];
        softmax_mask<M, W> hide[UNITS];
        const float nothing = scale > 0 ? -INFINITY : INFINITY; /* times the scale: -inf */
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            raw[u].fill(nothing);
            hide[u].clear();
            if (u * STEP < left) {
                raw[u].fetch(x + u * STEP * W);
                hide[u].fetch(mask_at(mask, u * STEP * W));
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
            hide[u].add(y[u]);
#pragma unroll
            for (int j = 0; j < W; j++)
                max = fmaxf(max, y[u][j]);
        }
        return max;
    }
    /* Replaces all elements by exponentials relative to `from` and returns their sum. */
    __device__ __forceinline__ float powers(float from)
    {
        float sum[2] = {0, 0};
#pragma unroll
        for (int u = 0; u < UNITS; u++)
#pragma unroll
            for (int j = 0; j < W; j++) {
                y[u][j] = softmax_result<T>((y[u][j] - from) * (float)LOG2_E);
                sum[(u + j) % 2] += y[u][j];
            }
        return sum[0] + sum[1];
    }
    __device__ __forceinline__ void write(T *out, int left, float factor)
    {
        asm volatile("" : "+r"(left)); /* opaque: recomputed here rather than kept in registers since the loads */
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            if (u * STEP < left) {
                unit<T, W> to;
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[u][j] *= factor;
                to.set(y[u]);
                to.put(out + u * STEP * W);
            }
    }
};

template <typename T, typename M, int W, int LANES, int ELEMENTS>
__global__ void __launch_bounds__(SHORT_THREADS, ONE_BLOCK)
    softmax_any_lanes(const __grid_constant__ softmax_row_params p)
{
    const int lane = (int)threadIdx.x % LANES, left = p.units - lane;
    const uint32_t r = blockIdx.x * (SHORT_THREADS / LANES) + threadIdx.x / LANES;
    /* All lanes of a warp take part in the shuffles: those beyond the last row repeat it and write nothing. */
    const bool writes = r < p.rows.count;
    int64_t at[SOFTMAX_TENSORS];
    p.rows.locate(writes ? r : p.rows.count - 1, at);
    pdl_launch_next();
    pdl_wait();
    softmax_units<T, M, W, ELEMENTS / W, LANES> row;
    const float max = warp_max<LANES>(row.template read<false>(
        (const T *)p.x + at[X] + lane * W, mask_at((const M *)p.mask, at[MASK] + lane * W), p.scale, left));
    const float inverse = reciprocal(warp_sum<LANES>(row.powers(max)));
    if (writes)
        row.write((T *)p.out + at[OUT] + lane * W, left, inverse);
}

/* Blocks of BLOCK_THREADS threads per SM: this bounds the registers. */
template <typename M, int ELEMENTS>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int any_blocks = ELEMENTS == 32                  ? (has_mask<M> ? 1 : 2)
                           : ELEMENTS == 16 && has_mask<M> ? 2
                                                           : 3;
#else
constexpr int any_blocks = 1;
#endif

template <typename T, typename M, int W, int ELEMENTS, bool IN_CLUSTER>
__global__ void __launch_bounds__(BLOCK_THREADS, any_blocks<M, ELEMENTS>)
    softmax_any_block(const __grid_constant__ softmax_row_params p)
{
    constexpr bool LAUNCH_AFTER_LOADS =
        ELEMENTS <= 16; /* blocks are few, and those of the next kernel would compete with them */
    constexpr int UNITS = ELEMENTS / W;
    __shared__ softmax_share shares[(IN_CLUSTER ? CLUSTER : 1) * BLOCK_THREADS / 32];
    if constexpr (IN_CLUSTER)
        cluster_arrive(); /* the wait comes before the first store: all blocks have started then */
    int64_t at[SOFTMAX_TENSORS];
    int first;
    const int units = softmax_place<W, IN_CLUSTER>(p, at, &first);
    const int lane = (int)threadIdx.x % 32, own = (int)threadIdx.x / 32 * (32 * UNITS) + lane, left = units - own;
    if (!LAUNCH_AFTER_LOADS)
        pdl_launch_next();
    pdl_wait();
    softmax_units<T, M, W, UNITS, 32> row;
    const float most = warp_max<32>(row.template read<LAUNCH_AFTER_LOADS>(
        (const T *)p.x + at[X] + own * W, mask_at((const M *)p.mask, at[MASK] + own * W), p.scale, left));
    const softmax_share mine = {most, warp_sum<32>(row.powers(softmax_from(most)))};
    if constexpr (IN_CLUSTER)
        cluster_wait();
    const softmax_share all = softmax_join<IN_CLUSTER>(mine, shares);
    row.write((T *)p.out + at[OUT] + own * W, left, power(most - all.max) * reciprocal(all.sum));
}

/* ---- The host ---- */

template <typename T, typename M, int W, int LANES, int ELEMENTS>
static adze_status softmax_launch_any_lanes(const cuda_call &s, const softmax_row_params &p)
{
    return launch(s, softmax_any_lanes<T, M, W, LANES, ELEMENTS>, grid_for(p.rows.count, SHORT_THREADS / LANES),
                  dim3(SHORT_THREADS), 0, p);
}
template <typename T, typename M, int W, int ELEMENTS>
static adze_status softmax_launch_any_block(const cuda_call &s, const softmax_row_params &p)
{
    const dim3 threads((unsigned)ceil_div(p.units, 32 * ELEMENTS / W) * 32);
    return launch(s, softmax_any_block<T, M, W, ELEMENTS, false>, p.rows.count, threads, 0, p);
}
/* A row in a cluster of the fewest blocks, a power of two, with at most 16 elements for each of BLOCK_THREADS
   threads; of more blocks while SMs would idle. */
template <typename T, typename M, int W, int ELEMENTS>
static adze_status softmax_launch_any_cluster(const cuda_call &s, softmax_row_params p, int64_t some)
{
    const int64_t rows = p.rows.count;
    unsigned blocks = 2;
    while (blocks < CLUSTER && (p.dim > 16 * BLOCK_THREADS * (int64_t)blocks || rows * blocks * 2 <= some))
        blocks *= 2;
    p.part = (int32_t)ceil_div(p.units, blocks);
    const dim3 threads((unsigned)ceil_div(p.part, 32 * ELEMENTS / W) * 32);
    return launch(s, softmax_any_block<T, M, W, ELEMENTS, true>, rows * blocks, threads, {0, blocks}, p);
}

/* Whether the kernels above hold such a row. */
static bool softmax_any_holds(const cuda_call &s, int64_t dim, int64_t rows, bool masked)
{
    const bool clusters = rows <= 0x7fffffff / CLUSTER && adze_cuda_clusters(s.device);
    return dim <= BLOCK_THREADS * (clusters ? 32 * CLUSTER : masked ? 16 : 32);
}

/* Elements of a row, up to which clusters with 16 for each thread are faster than with 32: the blocks of longer rows
   have so many threads that fewer clusters run at once. Measured on an H200 (2026-11-18). */
static int64_t softmax_most16(const cuda_call &s, int64_t rows)
{
    constexpr int64_t most = 16 * BLOCK_THREADS * CLUSTER;
    return rows * CLUSTER > 2 * (int64_t)s.gpu.sm_count ? most / 2 : most * 3 / 4;
}
/* Few elements per thread where there are few rows, so that more threads work; many where there are many, since a
   thread's overhead is constant. A mask needs registers too: 32 elements only where 16 do not hold the row. */
template <typename T, typename M, int W>
static adze_status softmax_launch_any(const cuda_call &s, softmax_row_params p)
{
    constexpr bool MASKED = has_mask<M>;
    const int64_t rows = p.rows.count, dim = p.dim, sms = s.gpu.sm_count, some = 2 * sms;
    const int64_t most8 = 8 * BLOCK_THREADS, most16 = 16 * BLOCK_THREADS, most32 = 32 * BLOCK_THREADS;
    const bool few = rows <= some, clusters = rows <= 0x7fffffff / CLUSTER && adze_cuda_clusters(s.device);
    p.units = p.dim / W;
    /* Short rows are bound by instructions, and idle elements take as many as others. Where 16 of them move less than
       5 KB, many are bound by the blocks that start, one in 1.2 ns on an H200: with 8 lanes each, twice as many share
       a block. But stores of less than a sector take longer: rows of 63 single 16-bit elements took 13.7 us with 8
       lanes, and 9.8 with 16. */
    const bool start_bound = rows > 128 * sms && dim * (int64_t)sizeof(T) < 160;
    if (s.takes(ANY_LANES_8X6, dim <= 48, start_bound))
        return softmax_launch_any_lanes<T, M, W, 8, 6>(s, p);
    if constexpr (W > 1) {
        if (s.takes(ANY_LANES_8X8, dim <= 64, start_bound))
            return softmax_launch_any_lanes<T, M, W, 8, 8>(s, p);
        if (s.takes(ANY_LANES_8X12, dim <= 96, start_bound))
            return softmax_launch_any_lanes<T, M, W, 8, 12>(s, p);
    }
    if (s.takes(ANY_LANES_16X4, dim <= 64))
        return softmax_launch_any_lanes<T, M, W, 16, 4>(s, p);
    if (s.takes(ANY_LANES_16X6, dim <= 96))
        return softmax_launch_any_lanes<T, M, W, 16, 6>(s, p);
    if (s.takes(ANY_LANES_16X8, dim <= 128))
        return softmax_launch_any_lanes<T, M, W, 16, 8>(s, p);
    if (s.takes(ANY_LANES_32X8, dim <= 256))
        return softmax_launch_any_lanes<T, M, W, 32, 8>(s, p);
    if (s.takes(ANY_LANES_32X16, dim <= 512, !few))
        return softmax_launch_any_lanes<T, M, W, 32, 16>(s, p);
    if (s.takes(ANY_LANES_32X32, dim <= 1024, rows > 32 * sms && !(MASKED && W == 1 && dim > 768)))
        return softmax_launch_any_lanes<T, M, W, 32, 32>(s, p);
    /* Of many rows with a mask, 16 elements per thread where they do not leave more lanes idle than 8. */
    const bool fits16 = rows > 8 * some && ceil_div(dim, 512) * 512 == ceil_div(dim, 256) * 256;
    const bool short8 = MASKED ? dim <= 2048 && !fits16 : dim <= 1024;
    if (s.takes(ANY_BLOCK_8, dim <= most8, dim > 512 && (rows <= 2 * some || short8)))
        return softmax_launch_any_block<T, M, W, 8>(s, p);
    if (s.takes(ANY_BLOCK_16, dim <= most16, !(clusters && rows * CLUSTER <= some)))
        return softmax_launch_any_block<T, M, W, 16>(s, p);
    if constexpr (!MASKED)
        if (s.takes(ANY_BLOCK_32, dim <= most32, !(clusters && few)))
            return softmax_launch_any_block<T, M, W, 32>(s, p);
    if (s.takes(ANY_CLUSTER_16, clusters && dim <= most16 * CLUSTER,
                (MASKED || few) && dim <= softmax_most16(s, rows)))
        return softmax_launch_any_cluster<T, M, W, 16>(s, p, some);
    return s.takes(ANY_CLUSTER_32, clusters) ? softmax_launch_any_cluster<T, M, W, 32>(s, p, some) : ADZE_NO_KERNEL;
}

#endif
