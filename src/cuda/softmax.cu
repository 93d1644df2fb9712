/* softmax on CUDA.

   softmax_registers: a row belongs to LANES lanes of a warp, or to blockDim.x threads, with several rows in a
   block when they are one warp each. Each thread keeps its UNITS units of W elements as floats, from the one time
   they are read until they are written. softmax_loop: a block per row of any length; maximum and sum are found
   together in a first pass, the second reads the row again. */
#include "act.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "unit.cuh"

enum { X, OUT, MASK, SOFTMAX_TENSORS };
constexpr int SHORT_THREADS = 128, LONG_THREADS = 512, LOOP_THREADS = 512; /* of a block */
constexpr int LONGEST = 64;                                                /* elements a thread keeps, at most */

struct softmax_params {
    const void *x, *mask; /* mask: NULL when absent */
    void *out;
    int64_t dim;
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
#pragma unroll
    for (int j = 0; j < W; j++)
        y[j] *= p.scale;
    if (masked) {
        float mask[W];
        load_param<T, W>(p.mask, p.mask_f32, row.mask + at, mask);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] += mask[j];
    }
}

template <typename T, bool MASKED, int LANES, int W, int UNITS>
__global__ void __launch_bounds__(LANES ? SHORT_THREADS : LONG_THREADS)
    softmax_registers(const __grid_constant__ softmax_params p)
{
    constexpr int lanes = LANES ? LANES : 1;
    __shared__ __align__(16) float part[2][32];
    const int thread = LANES ? (int)threadIdx.x % lanes : (int)threadIdx.x;
    const int threads = LANES                  ? LANES
                        : UNITS * W == LONGEST ? LONG_THREADS /* a constant, for addresses take registers too */
                                               : (int)blockDim.x;
    const int units = (int)(p.dim / W);
    const int64_t r = LANES ? (int64_t)blockIdx.x * (SHORT_THREADS / lanes) + threadIdx.x / lanes
                            : (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    /* Lanes of a warp stay together for the shuffles: those beyond the last row repeat it and write nothing. */
    const bool writes = r < p.rows.count;
    const softmax_row row = softmax_find(p, writes ? r : p.rows.count - 1, MASKED);
    pdl_launch_next();
    pdl_wait();
    if (!LANES && !writes)
        return;
    const T *x = (const T *)p.x + row.x;
    T *out = (T *)p.out + row.out;
    unit<T, W> raw[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (thread + u * threads < units)
            raw[u].fetch(x + (thread + u * threads) * W);
    float y[UNITS][W], max = -INFINITY, sum[2] = {0, 0};
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int at = (thread + u * threads) * W;
        if (thread + u * threads < units) {
            raw[u].get(y[u]);
            softmax_values<T, W>(p, row, at, MASKED, y[u]);
        } else {
#pragma unroll
            for (int j = 0; j < W; j++)
                y[u][j] = -INFINITY;
        }
#pragma unroll
        for (int j = 0; j < W; j++)
            max = fmaxf(max, y[u][j]);
    }
    max = LANES ? warp_max<lanes>(max) : row_max(max, part[0]);
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int j = 0; j < W; j++) {
            y[u][j] = power(y[u][j] - max);
            sum[j % 2] += y[u][j];
        }
    const float total = sum[0] + sum[1];
    const float inverse = reciprocal(LANES ? warp_sum<lanes>(total) : row_sum(total, part[1]));
    int again = thread; /* so that no register holds the units' indices from the loads until here */
    asm volatile("" : "+r"(again));
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (again + u * threads < units && writes) {
#pragma unroll
            for (int j = 0; j < W; j++)
                y[u][j] *= inverse;
            store<T, W>(out + (again + u * threads) * W, y[u]);
        }
}

template <typename T, int W>
__global__ void __launch_bounds__(LOOP_THREADS) softmax_loop(const __grid_constant__ softmax_params p)
{
    __shared__ __align__(16) float part[2][32];
    const bool masked = p.mask;
    const int64_t start = (int64_t)threadIdx.x * W, step = (int64_t)blockDim.x * W;
    pdl_launch_next();
    pdl_wait();
    for (int64_t r = blockIdx.x; r < p.rows.count; r += gridDim.x) {
        const softmax_row row = softmax_find(p, r, masked);
        const T *x = (const T *)p.x + row.x;
        float max = -INFINITY, sum = 0, y[W];
#pragma unroll 2
        for (int64_t i = start; i < p.dim; i += step) {
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
            const float from = max == -INFINITY ? 0 : max; /* a row may begin with what is hidden */
#pragma unroll
            for (int j = 0; j < W; j++)
                sum += power_of_sum(y[j] - from);
        }
        const float most = row_max(max, part[0]);
        const float inverse = reciprocal(row_sum(sum * power_of_sum(max - most), part[1]));
#pragma unroll 2
        for (int64_t i = start; i < p.dim; i += step) {
            load<T, W>(x + i, y);
            softmax_values<T, W>(p, row, i, masked, y);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] = power(y[j] - most) * inverse;
            store<T, W>((T *)p.out + row.out + i, y);
        }
        __syncthreads(); /* part is used again */
    }
}

template <typename T, int W>
static adze_status softmax_launch_loop(adze_stream s, const softmax_params &p)
{
    const int64_t threads = (p.dim / W + 31) / 32 * 32;
    return launch("softmax", s, softmax_loop<T, W>, grid_for(p.rows.count, 1),
                  dim3(threads < LOOP_THREADS ? (unsigned)threads : LOOP_THREADS), 0, p);
}

/* Rows whose threads keep UNITS units of W elements each; those of a single warp share a block of eight. */
template <typename T, bool MASKED, int W, int UNITS>
static adze_status softmax_launch_block(adze_stream s, const softmax_params &p)
{
    const int64_t each = 32 * UNITS * W;
    const int64_t threads = UNITS * W == LONGEST ? LONG_THREADS : (p.dim + each - 1) / each * 32;
    const int64_t rows = threads > 32 || p.rows.count <= adze_cuda_sm_count(s.device) * 2 ? 1 : 8;
    return launch("softmax", s, softmax_registers<T, MASKED, 0, W, UNITS>, grid_for(p.rows.count, rows),
                  dim3((unsigned)threads, (unsigned)rows), 0, p);
}
template <typename T, int LANES, int UNITS>
static adze_status softmax_launch_short(adze_stream s, const softmax_params &p)
{
    return launch("softmax", s, softmax_registers<T, false, LANES, VEC<T>, UNITS>,
                  grid_for(p.rows.count, SHORT_THREADS / LANES), dim3(SHORT_THREADS), 0, p);
}

/* Sixteen elements a thread when there are few rows or short ones, else 32, so that more bytes are on their way; 64
   for the longest rows. */
template <typename T, bool MASKED>
static adze_status softmax_launch(adze_stream s, const softmax_params &p, bool aligned)
{
    constexpr int W = VEC<T>;
    if (p.rows.count > 0x7fffffff || p.dim > LONGEST * LONG_THREADS || (!aligned && p.dim > 16 * LONG_THREADS))
        return aligned ? softmax_launch_loop<T, W>(s, p) : softmax_launch_loop<T, 1>(s, p);
    if (!aligned)
        return softmax_launch_block<T, MASKED, 1, 16>(s, p);
    if constexpr (!MASKED) {
        if (p.dim <= 64)
            return softmax_launch_short<T, 8, 8 / W>(s, p);
        if (p.dim <= 128)
            return softmax_launch_short<T, 8, 16 / W>(s, p);
        if (p.dim <= 256)
            return softmax_launch_short<T, 16, 16 / W>(s, p);
    }
    const bool few = p.rows.count <= adze_cuda_sm_count(s.device) * 2;
    if (p.dim <= 512 || (few && p.dim <= 16 * LONG_THREADS))
        return softmax_launch_block<T, MASKED, W, 16 / W>(s, p);
    if (p.dim <= 32 * LONG_THREADS)
        return softmax_launch_block<T, MASKED, W, 32 / W>(s, p);
    return softmax_launch_block<T, MASKED, W, LONGEST / W>(s, p);
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
