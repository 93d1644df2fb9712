/* softmax on CUDA. A row is read once, with all loads of a thread issued before the first is used, and stays in
   registers until it is written.

   softmax_lanes: a row belongs to LANES lanes of a warp, and a block has several rows. softmax_block: a row belongs
   to a block, or to a cluster of blocks with a part each. Every warp computes the maximum of its own elements and
   the sum of their exponentials relative to it. After one barrier each warp combines all these pairs and scales its
   elements by one factor. In a cluster the pairs are written into the shared memory of all its blocks: the same
   barrier suffices, and no block waits for another before it exits. softmax_shared: the same for long rows of 16-bit
   elements without a mask, which stay packed in shared memory, so that an SM has several rows and loads one while it
   stores another. Exponentials are then computed twice. softmax_loop: any call, rows of any length, in blocks or
   clusters too; a first pass computes maximum and sum together, a second reads the row again. softmax_any.cuh has
   the kernels for rows that are not aligned for 16-byte vectors, softmax_held.cuh the one for long rows of these, and
   for long ones with a mask. */
#include "softmax_any.cuh"
#include "softmax_held.cuh"

template <typename T, bool MASKED, int LANES, int UNITS>
__global__ void __launch_bounds__(SHORT_THREADS, ONE_BLOCK)
    softmax_lanes(const __grid_constant__ softmax_row_params p)
{
    constexpr int W = VEC<T>;
    const int lane = (int)threadIdx.x % LANES;
    const uint32_t r = blockIdx.x * (SHORT_THREADS / LANES) + threadIdx.x / LANES;
    /* All lanes of a warp take part in the shuffles: those beyond the last row repeat it and write nothing. */
    const bool writes = r < p.rows.count;
    int64_t at[SOFTMAX_TENSORS];
    p.rows.locate(writes ? r : p.rows.count - 1, at);
    pdl_launch_next();
    pdl_wait();
    const T *x = (const T *)p.x + at[X], *mask = (const T *)p.mask + at[MASK];
    T *out = (T *)p.out + at[OUT];
    float y[UNITS][W], sum[2] = {0, 0};
    const float max =
        warp_max<LANES>(softmax_read<T, MASKED, UNITS, false>(x, mask, p.scale, lane, LANES, p.units, y));
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int j = 0; j < W; j++) {
            y[u][j] = power(y[u][j] - max);
            sum[j % 2] += y[u][j];
        }
    const float inverse = reciprocal(warp_sum<LANES>(sum[0] + sum[1]));
    if (writes)
        softmax_write<T, UNITS>(out, lane, LANES, p.units, inverse, y);
}

/* Threads of a block, at most, and how many blocks with sixteen elements per thread an SM has room for. */
template <typename T, bool MASKED, int ELEMENTS>
constexpr int softmax_threads = ELEMENTS == 32 && !(MASKED && sizeof(T) == 4) ? LONG_THREADS : BLOCK_THREADS;
template <typename T, bool MASKED, int ELEMENTS>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int softmax_blocks = ELEMENTS == 32             ? 1
                               : MASKED && sizeof(T) == 4 ? 2
                                                          : 3;
/* Threads of softmax_shared per SM, at least: this bounds its registers. */
constexpr int SHARED_THREADS = 1536;
#else
constexpr int softmax_blocks = 1;
constexpr int SHARED_THREADS = 512;
#endif

template <typename T, bool MASKED, int ELEMENTS, bool IN_CLUSTER>
__global__ void __launch_bounds__(softmax_threads<T, MASKED, ELEMENTS>, softmax_blocks<T, MASKED, ELEMENTS>)
    softmax_block(const __grid_constant__ softmax_row_params p)
{
    constexpr int W = VEC<T>, UNITS = ELEMENTS / W;
    constexpr bool LAUNCH_AFTER_LOADS =
        ELEMENTS == 16; /* blocks are few, and those of the next kernel would compete with them */
    __shared__ softmax_share shares[(IN_CLUSTER ? CLUSTER : 1) * softmax_threads<T, MASKED, ELEMENTS> / 32];
    const int thread = (int)threadIdx.x, threads = (int)blockDim.x;
    if constexpr (IN_CLUSTER)
        cluster_arrive(); /* the wait comes before the first store: all blocks have started then */
    int64_t at[SOFTMAX_TENSORS];
    int first;
    const int units = softmax_place<W, IN_CLUSTER>(p, at, &first);
    if (!LAUNCH_AFTER_LOADS)
        pdl_launch_next();
    pdl_wait();
    const T *x = (const T *)p.x + at[X], *mask = (const T *)p.mask + at[MASK];
    T *out = (T *)p.out + at[OUT];
    float y[UNITS][W], sum[2] = {0, 0};
    const float most =
        warp_max<32>(softmax_read<T, MASKED, UNITS, LAUNCH_AFTER_LOADS>(x, mask, p.scale, thread, threads, units, y));
    const float from = softmax_from(most);
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int j = 0; j < W; j++) {
            y[u][j] = power(y[u][j] - from);
            sum[j % 2] += y[u][j];
        }
    const softmax_share mine = {most, warp_sum<32>(sum[0] + sum[1])};
    if constexpr (IN_CLUSTER)
        cluster_wait();
    const softmax_share all = softmax_join<IN_CLUSTER>(mine, shares);
    const float factor = power(most - all.max) * reciprocal(all.sum);
    softmax_write<T, UNITS>(out, thread, threads, units, factor, y);
}

/* The larger of each of two pairs of elements; a NaN only when both are. */
template <typename T>
__device__ __forceinline__ uint32_t pair_max(uint32_t a, uint32_t b)
{
    typedef typename pair_of<T>::type P;
    const P y = __hmax2(*reinterpret_cast<const P *>(&a), *reinterpret_cast<const P *>(&b));
    return *reinterpret_cast<const uint32_t *>(&y);
}
/* A thread works on what it has loaded into shared memory itself. The maximum is that of x, or for a negative scale
   of -x (`flip` is the sign), and is taken before the scale. For sm_90 and newer. */
template <typename T, int THREADS, bool IN_CLUSTER>
__global__ void __launch_bounds__(THREADS, SHARED_THREADS / THREADS)
    softmax_shared(const __grid_constant__ softmax_row_params p)
{
#if __CUDA_ARCH__ >= 900
    constexpr int W = VEC<T>;
    extern __shared__ uint4 row[];
    __shared__ softmax_share shares[(IN_CLUSTER ? CLUSTER : 1) * THREADS / 32];
    const int thread = (int)threadIdx.x;
    if constexpr (IN_CLUSTER)
        cluster_arrive(); /* the wait comes before the first store: all blocks have started then */
    int64_t at[SOFTMAX_TENSORS];
    int first;
    const int units = softmax_place<W, IN_CLUSTER>(p, at, &first);
    pdl_launch_next();
    pdl_wait();
    const T *x = (const T *)p.x + at[X];
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(row);
#    pragma unroll 4
    for (int i = thread; i < units; i += THREADS)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i * 16), "l"(x + i * W) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    const uint32_t flip = p.by > 0 ? 0 : 0x80008000u;
    packed<T> tops = packed_all<T>(-INFINITY), v;
#    pragma unroll 4
    for (int i = thread; i < units; i += THREADS) {
        v.raw = row[i];
        tops.raw.x = pair_max<T>(tops.raw.x, v.raw.x ^ flip);
        tops.raw.y = pair_max<T>(tops.raw.y, v.raw.y ^ flip);
        tops.raw.z = pair_max<T>(tops.raw.z, v.raw.z ^ flip);
        tops.raw.w = pair_max<T>(tops.raw.w, v.raw.w ^ flip);
    }
    float f[W], most = -INFINITY, sum[2] = {0, 0};
    tops.get(f);
#    pragma unroll
    for (int j = 0; j < W; j++)
        most = fmaxf(most, f[j]);
    most = warp_max<32>(most);
    const float sign = p.by > 0 ? 1 : -1, from = softmax_from(most) * sign;
#    pragma unroll 2
    for (int i = thread; i < units; i += THREADS) {
        v.raw = row[i];
        v.get(f);
#    pragma unroll
        for (int j = 0; j < W; j++)
            sum[j % 2] += power_of_two((f[j] - from) * p.by);
    }
    const softmax_share mine = {most, warp_sum<32>(sum[0] + sum[1])};
    if constexpr (IN_CLUSTER)
        cluster_wait();
    const softmax_share all = softmax_join<IN_CLUSTER>(mine, shares, fabsf(p.by));
    const float inverse = reciprocal(all.sum), top = all.max * sign;
    T *out = (T *)p.out + at[OUT];
#    pragma unroll 2
    for (int i = thread; i < units; i += THREADS) {
        v.raw = row[i];
        v.get(f);
#    pragma unroll
        for (int j = 0; j < W; j++)
            f[j] = softmax_result<T>((f[j] - top) * p.by) * inverse;
        store<T, W>(out + i * W, f);
    }
#endif
}

/* A row of any view, and x * scale + mask of W elements from `at` on. */
struct softmax_row {
    int64_t x, out, mask;
};
__device__ __forceinline__ softmax_row softmax_find(const softmax_params &p, int64_t r)
{
    const row_index index = row_split(p.rows, r);
    return {row_offset(p.rows, X, index), row_offset(p.rows, OUT, index), row_offset(p.rows, MASK, index)};
}
template <typename T, int W>
__device__ __forceinline__ void softmax_values(const softmax_params &p, const softmax_row &row, int64_t at,
                                               float (&y)[W])
{
    load<T, W>((const T *)p.x + row.x + at, y);
#pragma unroll
    for (int j = 0; j < W; j++)
        y[j] *= p.scale;
    if (p.mask) {
        float mask[W];
        load_param<T, W>(p.mask, p.mask_f32, row.mask + at, mask);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] += mask[j];
    }
}

template <typename T, int W, bool IN_CLUSTER>
__global__ void __launch_bounds__(BLOCK_THREADS, ONE_BLOCK) softmax_loop(const __grid_constant__ softmax_params p)
{
    __shared__ softmax_share shares[IN_CLUSTER ? CLUSTER * BLOCK_THREADS / 32 : BLOCK_THREADS / 32];
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
        const softmax_row row = softmax_find(p, r);
        float max = -INFINITY, sum = 0, y[W];
#pragma unroll 2
        for (int64_t i = start; i < end; i += step) {
            softmax_values<T, W>(p, row, i, y);
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
            softmax_values<T, W>(p, row, i, y);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] = power(y[j] - all.max) * inverse;
            store<T, W>((T *)p.out + row.out + i, y);
        }
        if constexpr (IN_CLUSTER) { /* shares are reused */
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
    }
}

/* ---- The host ---- */

template <typename T, int W>
static adze_status softmax_launch_loop(const cuda_call &s, softmax_params p)
{
    const int64_t most = BLOCK_THREADS * 16;
    const bool clusters = p.dim > most && p.rows.count <= 0x7fffffff / CLUSTER && adze_cuda_clusters(s.device);
    p.part = ceil_div(ceil_div(p.dim, W), clusters ? CLUSTER : 1) * W;
    const int64_t warps = ceil_div(p.part, 32 * W);
    const dim3 threads(warps * 32 < BLOCK_THREADS ? (unsigned)warps * 32 : BLOCK_THREADS);
    if (clusters)
        return launch(s, softmax_loop<T, W, true>, p.rows.count * CLUSTER, threads, {0, CLUSTER}, p);
    return launch(s, softmax_loop<T, W, false>, grid_for(p.rows.count, 1), threads, 0, p);
}

/* A row in a block, or in a cluster. */
template <typename T, bool MASKED, int ELEMENTS>
static adze_status softmax_launch_block(const cuda_call &s, softmax_row_params p, int blocks)
{
    const int64_t rows = p.rows.count;
    p.part = (int32_t)ceil_div(p.units, blocks);
    const dim3 threads((unsigned)ceil_div(p.part, 32 * ELEMENTS / VEC<T>) * 32);
    if (blocks > 1)
        return launch(s, softmax_block<T, MASKED, ELEMENTS, true>, rows * blocks, threads, {0, (unsigned)blocks}, p);
    return launch(s, softmax_block<T, MASKED, ELEMENTS, false>, rows, threads, 0, p);
}
/* The fewest blocks per row that leave room for several rows per SM. */
template <typename T>
static adze_status softmax_launch_shared(const cuda_call &s, softmax_row_params p)
{
    const int64_t rows = p.rows.count, bytes = (int64_t)p.units * 16;
    unsigned blocks = 1;
    while (blocks < CLUSTER && bytes > (int64_t)(blocks == 1 ? SHARED_MOST : SHARED_FEW) * blocks)
        blocks *= 2;
    p.part = (int32_t)ceil_div(p.units, blocks);
    const size_t shared = (size_t)p.part * 16;
    if (blocks == 1)
        return launch(s, softmax_shared<T, 512, false>, rows, dim3(512), shared, p);
    if (shared <= SHARED_FEW)
        return launch(s, softmax_shared<T, 256, true>, rows * blocks, dim3(256), {shared, blocks}, p);
    return launch(s, softmax_shared<T, 512, true>, rows * blocks, dim3(512), {shared, blocks}, p);
}
template <typename T, bool MASKED, int LANES, int ELEMENTS>
static adze_status softmax_launch_lanes(const cuda_call &s, const softmax_row_params &p)
{
    return launch(s, softmax_lanes<T, MASKED, LANES, ELEMENTS / VEC<T>>,
                  grid_for(p.rows.count, SHORT_THREADS / LANES), dim3(SHORT_THREADS), 0, p);
}

/* As measured on an H200: 16 elements per thread when there are few rows, so that more threads work, or when a mask
   needs registers too; else 32, so that more bytes are in flight. Many longer rows use shared memory where possible.
   Clusters are for rows that do not fit in a block, and for few rows. */
template <typename T, bool MASKED>
static adze_status softmax_launch(const cuda_call &s, const softmax_params &g, int width)
{
    constexpr int W = VEC<T>;
    const int64_t rows = g.rows.count, dim = g.dim, some = s.gpu.sm_count * 2;
    const int64_t blocks = rows <= 0x7fffffff / CLUSTER && adze_cuda_clusters(s.device) ? CLUSTER : 1;
    const bool in_shared = !MASKED && sizeof(T) == 2 && blocks > 1 && s.gpu.block_shared > SHARED_MOST;
    /* elements that a block can hold: with 16 per thread, with 32, and at most */
    const int64_t most16 = 16 * BLOCK_THREADS, most32 = 32 * softmax_threads<T, MASKED, 32>;
    constexpr int64_t most32_any = 32 * BLOCK_THREADS; /* the same of rows at any address */
    const int64_t most = in_shared ? SHARED_MOST / (int64_t)sizeof(T) : most32;
    softmax_row_params p = {};
    p.x = g.x, p.mask = g.mask, p.out = g.out;
    p.scale = g.scale, p.by = (float)(g.scale * LOG2_E);
    const bool few = rows <= some, simple = rows_are_simple(g.rows) && isfinite(p.by), aligned = width == 16;
    const bool wide_mask = sizeof(T) < 4 && MASKED && g.mask_f32, any = !aligned || wide_mask;
    if (simple) {
        p.rows = rows_simple(g.rows, {X, OUT, MASK});
        p.dim = (int32_t)dim;
        p.units = (int32_t)(dim / W);
    }
    /* Rows that registers would hold in clusters of one block per SM, or in units of one element. With a mask, more
       clusters of such units than run at once take turns; pairs are faster than floats in shared memory beyond 32768
       elements (H200, 2026-11-18). */
    const bool turns = rows * CLUSTER > some, singles = width == 1 || wide_mask;
    const bool very_long = dim > most32_any * CLUSTER;
    const bool narrow = any && dim > most32_any &&
                        (very_long || (!few && (!MASKED || singles || dim <= 2 * most32_any)) ||
                         (MASKED && singles && turns && dim > 2 * most32_any));
    if (s.takes(IN_FLOATS, simple && softmax_held_fits<T>(s, g),
                narrow || (MASKED && !any && !few && dim > most16 * CLUSTER)))
        return softmax_launch_held<T, MASKED>(s, g, p);
    if (simple && softmax_any_holds(s, dim, rows, MASKED) && (any || s.choice->want >= ANY_LANES_8X6)) {
        typedef typename mask_type<T, MASKED>::type M;
        adze_status status = ADZE_NO_KERNEL;
        if constexpr (sizeof(T) == 2) {
            if constexpr (MASKED)
                if (wide_mask)
                    status = softmax_launch_any<T, float, 1>(s, p);
            if (!wide_mask && width >= 2)
                status = softmax_launch_any<T, M, 2>(s, p);
            else if (!wide_mask)
                status = softmax_launch_any<T, M, 1>(s, p);
        } else {
            status = softmax_launch_any<T, M, 1>(s, p);
        }
        if (status != ADZE_NO_KERNEL)
            return status;
    }
    if (simple && !any && dim <= most * blocks) {
        if (s.takes(LANES_8X8, dim <= 64))
            return softmax_launch_lanes<T, MASKED, 8, 8>(s, p);
        if (s.takes(LANES_8X16, dim <= 128))
            return softmax_launch_lanes<T, MASKED, 8, 16>(s, p);
        if (s.takes(LANES_16X16, dim <= 256))
            return softmax_launch_lanes<T, MASKED, 16, 16>(s, p);
        if (s.takes(LANES_32X16, dim <= 512, !few))
            return softmax_launch_lanes<T, MASKED, 32, 16>(s, p);
        if (s.takes(LANES_32X32, dim <= 1024, !few))
            return softmax_launch_lanes<T, MASKED, 32, 32>(s, p);
        if (s.takes(BLOCK_16, dim <= most16, few || MASKED))
            return softmax_launch_block<T, MASKED, 16>(s, p, 1);
        if (s.takes(CLUSTER_16, blocks > 1 && dim <= most16 * blocks,
                    dim <= softmax_most16(s, rows) && rows * CLUSTER <= (dim > 2 * most16 ? 2 * some : some)))
            return softmax_launch_block<T, MASKED, 16>(s, p, CLUSTER);
        if constexpr (!MASKED && sizeof(T) == 2)
            if (s.takes(IN_SHARED, in_shared, dim > (2 * rows <= some ? most32 * blocks : few ? most32 : most16)))
                return softmax_launch_shared<T>(s, p);
        if (s.takes(BLOCK_32, dim <= most32))
            return softmax_launch_block<T, MASKED, 32>(s, p, 1);
        if (s.takes(CLUSTER_32, blocks > 1 && dim <= most32 * blocks))
            return softmax_launch_block<T, MASKED, 32>(s, p, CLUSTER);
    }
    if (!s.takes(LOOP, true))
        return ADZE_NO_KERNEL;
    return aligned ? softmax_launch_loop<T, W>(s, g) : softmax_launch_loop<T, 1>(s, g);
}

static adze_status softmax_run(const cuda_call &s, const adze_softmax_args *a)
{
    const adze_tensor *const tensors[SOFTMAX_TENSORS] = {&a->x, &a->out, &a->mask};
    softmax_params p = {};
    p.dim = a->x.shape[a->x.rank - 1];
    adze_rows_init(&p.rows, &a->x, SOFTMAX_TENSORS, tensors);
    if (p.dim == 0 || p.rows.count == 0)
        return ADZE_OK;
    p.x = a->x.data, p.out = a->out.data, p.mask = a->mask.dtype ? a->mask.data : NULL;
    p.scale = a->scale != 0 ? a->scale : 1;
    p.mask_f32 = a->mask.dtype == ADZE_F32;
    int width = rows_width(&a->x, p.dim);
    for (const adze_tensor *t : {&a->out, &a->mask}) {
        const int its = rows_width(t, p.dim);
        width = its < width ? its : width;
    }
    return s.tuned(a->x.dtype | a->mask.dtype << 4 | width << 8, p.rows.count, p.dim, 0, 0, [&] {
        switch (a->x.dtype) {
        case ADZE_F32:
            return p.mask ? softmax_launch<float, true>(s, p, width) : softmax_launch<float, false>(s, p, width);
        case ADZE_F16:
            return p.mask ? softmax_launch<f16, true>(s, p, width) : softmax_launch<f16, false>(s, p, width);
        default: return p.mask ? softmax_launch<bf16, true>(s, p, width) : softmax_launch<bf16, false>(s, p, width);
        }
    });
}
CUDA_ENTRIES(softmax, SOFTMAX_VARIANTS, softmax_run)
