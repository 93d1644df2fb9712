/* l2_norm on CUDA.

   A block has blockDim.y rows, blockDim.x threads (whole warps) for each. A thread holds up to UNITS units of its row
   in registers, so that the row is read once; what does not fit there is read a second time. Units are 16-byte
   vectors where rows are aligned, and single elements where they are not (unit.cuh). */
#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "unit.cuh"

#include <algorithm>

enum { X, OUT, NORM, TENSORS };
constexpr int THREADS = 256; /* of a block, at most */

template <typename ROWS>
struct l2_params {
    const void *x;
    void *out;
    float *norm;   /* NULL when it is not asked for */
    int64_t units; /* of a row */
    float eps;
    ROWS rows;
};
typedef l2_params<simple_rows<TENSORS>> l2_simple;
typedef l2_params<general_rows<TENSORS>> l2_general;

template <typename T, int W>
__device__ __forceinline__ float squares_of(const unit<T, W> &u)
{
    float f[W], sum = 0;
    u.get(f);
#pragma unroll
    for (int j = 0; j < W; j++)
        sum += f[j] * f[j];
    return sum;
}

template <typename T, int W>
__device__ __forceinline__ void put_scaled(T *out, const unit<T, W> &u, float by)
{
    float f[W];
    u.get(f);
#pragma unroll
    for (int j = 0; j < W; j++)
        f[j] *= by;
    unit<T, W> result;
    result.set(f);
    result.put(out);
}

template <typename T, int W, int UNITS, typename ROWS>
__global__ void __launch_bounds__(THREADS) l2_rows(const __grid_constant__ l2_params<ROWS> p)
{
    __shared__ __align__(16) float part[THREADS / 32][32];
    int64_t start[TENSORS];
    const int64_t r = (int64_t)blockIdx.x * blockDim.y + threadIdx.y, step = blockDim.x;
    const bool valid = r < p.rows.count;
    p.rows.locate(valid ? r : 0, start);
    const T *x = (const T *)p.x + start[X];
    T *out = (T *)p.out + start[OUT];
    const int64_t units = valid ? p.units : 0, held = UNITS * step;
    pdl_launch_next();
    pdl_wait(); /* before memory that the preceding kernel may write, and before any exit */
    unit<T, W> row[UNITS];
    float sum = 0;
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (threadIdx.x + u * step < units)
            row[u].fetch(x + (threadIdx.x + u * step) * W);
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (threadIdx.x + u * step < units)
            sum += squares_of(row[u]);
    for (int64_t at = held + threadIdx.x; at < units; at += step) {
        unit<T, W> more;
        more.fetch(x + at * W);
        sum += squares_of(more);
    }
    /* every thread of the block is here, also those without a row: row_sum() has a barrier */
    const float norm = sqrtf(row_sum(sum, part[threadIdx.y]) + p.eps), inverse = 1 / norm;
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (threadIdx.x + u * step < units)
            put_scaled(out + (threadIdx.x + u * step) * W, row[u], inverse);
    for (int64_t at = held + threadIdx.x; at < units; at += step) {
        unit<T, W> more;
        more.fetch(x + at * W);
        put_scaled(out + at * W, more, inverse);
    }
    if (valid && p.norm && threadIdx.x == 0)
        p.norm[start[NORM]] = norm;
}

/* As many threads as a row has work for, in whole warps; short rows share a block. */
template <typename T, int W, int UNITS, typename ROWS>
static adze_status l2_launch(const cuda_call &s, const l2_params<ROWS> &p)
{
    const int64_t warps = std::min<int64_t>(ceil_div(p.units, 32 * UNITS), THREADS / 32);
    const dim3 block((unsigned)(std::max<int64_t>(warps, 1) * 32), warps > 1 ? 1 : 4);
    return launch(s, l2_rows<T, W, UNITS, ROWS>, ceil_div(p.rows.count, block.y), block, 0, p);
}

/* The variants, as `adze info` lists them and `adze tune` times them. s.takes(variant, able, wanted) says whether the
   call takes one: it is able to, and it is the kernel's choice or the one that the caller forces. */
enum { VECTORS, SINGLE, GENERAL };
constexpr adze_variant VARIANTS[] = {
    {"vectors", "rows aligned to 16 bytes"},
    {"single", "rows in up to 3 dimensions"},
    {"general", "every call"},
    {NULL, NULL},
};

template <typename T>
static adze_status l2_launch_as(const cuda_call &s, l2_general g, int64_t dim, int width)
{
    g.units = dim;
    if (s.takes(GENERAL, true, !rows_are_simple(g.rows)))
        return l2_launch<T, 1, 8>(s, g);
    if (!rows_are_simple(g.rows))
        return ADZE_NO_KERNEL;
    l2_simple p = {g.x, g.out, g.norm, dim, g.eps, rows_simple(g.rows, {X, OUT, NORM})};
    if (s.takes(VECTORS, width == 16)) {
        p.units = dim / VEC<T>;
        return l2_launch<T, VEC<T>, 4>(s, p);
    }
    return s.takes(SINGLE, true) ? l2_launch<T, 1, 8>(s, p) : ADZE_NO_KERNEL;
}

static adze_status l2_norm_run(const cuda_call &s, const adze_l2_norm_args *a)
{
    const adze_tensor *const tensors[TENSORS] = {&a->x, &a->out, &a->norm};
    const int64_t dim = a->x.shape[a->x.rank - 1];
    l2_general p = {};
    adze_rows_init(&p.rows, &a->x, TENSORS, tensors);
    if (p.rows.count == 0)
        return ADZE_OK;
    p.x = a->x.data, p.out = a->out.data, p.eps = a->eps;
    p.norm = a->norm.dtype ? (float *)a->norm.data : nullptr;
    const int width = std::min(rows_width(&a->x, dim), rows_width(&a->out, dim));
    return s.tuned(a->x.dtype | width << 4, p.rows.count, dim, 0, 0, [&] {
        switch (a->x.dtype) {
        case ADZE_F32: return l2_launch_as<float>(s, p, dim, width);
        case ADZE_F16: return l2_launch_as<f16>(s, p, dim, width);
        default: return l2_launch_as<bf16>(s, p, dim, width);
        }
    });
}
CUDA_ENTRIES(l2_norm, VARIANTS, l2_norm_run)
