/* rms_norm_i8 on CUDA.

   A block has blockDim.y rows, blockDim.x threads (whole warps) for each. A thread holds up to UNITS units of its row
   in registers, so that the row is read once; what does not fit there is read again. The normalised values are
   computed twice, for their maximum and for the result: arithmetic is cheaper than registers. Units are 16-byte
   vectors where rows are aligned, and single elements where they are not (unit.cuh). */
#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "unit.cuh"

#include <algorithm>

enum { X, OUT, SCALE, TENSORS };
constexpr int THREADS = 256; /* of a block, at most */

template <typename ROWS>
struct i8_params {
    const void *x, *weight; /* weight: NULL when there is none */
    int8_t *out;
    float *scale;
    int64_t units; /* of a row */
    float eps, inverse_dim;
    bool weight_f32;
    ROWS rows;
};
typedef i8_params<simple_rows<TENSORS>> i8_simple;
typedef i8_params<general_rows<TENSORS>> i8_general;

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

/* The normalised values of unit `at`. */
template <typename T, int W, typename ROWS>
__device__ __forceinline__ void values_of(const i8_params<ROWS> &p, const unit<T, W> &u, int64_t at, float inverse,
                                          float (&f)[W])
{
    u.get(f);
#pragma unroll
    for (int j = 0; j < W; j++)
        f[j] *= inverse;
    if (p.weight) {
        param_unit<T, W> weight;
        float w[W];
        weight.fetch(p.weight, p.weight_f32, at * W);
        weight.get(p.weight_f32, w);
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] *= w[j];
    }
}

template <typename T, int W, typename ROWS>
__device__ __forceinline__ float largest_of(const i8_params<ROWS> &p, const unit<T, W> &u, int64_t at, float inverse)
{
    float f[W], most = 0;
    values_of(p, u, at, inverse, f);
#pragma unroll
    for (int j = 0; j < W; j++)
        most = fmaxf(most, fabsf(f[j]));
    return most;
}

/* W bytes in one store. */
template <typename T, int W, typename ROWS>
__device__ __forceinline__ void put_i8(const i8_params<ROWS> &p, int8_t *out, const unit<T, W> &u, int64_t at,
                                       float inverse, float by)
{
    float f[W];
    uint32_t word[(W + 3) / 4] = {};
    values_of(p, u, at, inverse, f);
#pragma unroll
    for (int j = 0; j < W; j++)
        word[j / 4] |= ((uint32_t)__float2int_rn(f[j] * by) & 255u) << (j % 4 * 8);
    if constexpr (W == 8)
        *reinterpret_cast<uint2 *>(out + at * W) = make_uint2(word[0], word[1]);
    else if constexpr (W == 4)
        *reinterpret_cast<uint32_t *>(out + at * W) = word[0];
    else
        out[at] = (int8_t)word[0];
}

/* The maximum over the threads of a row, as row_sum() has the sum; `part` is of its own. */
__device__ __forceinline__ float row_max(float v, float (&part)[32])
{
    const int warps = (int)blockDim.x / 32;
    v = warp_max<32>(v);
    if (warps == 1)
        return v;
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    for (int w = 0; w < warps; w++)
        v = fmaxf(v, part[w]);
    return v;
}

template <typename T, int W, int UNITS, typename ROWS>
__global__ void __launch_bounds__(THREADS) i8_rows(const __grid_constant__ i8_params<ROWS> p)
{
    __shared__ __align__(16) float sums[THREADS / 32][32], peaks[THREADS / 32][32];
    int64_t start[TENSORS];
    const int64_t r = (int64_t)blockIdx.x * blockDim.y + threadIdx.y, step = blockDim.x;
    const bool valid = r < p.rows.count;
    p.rows.locate(valid ? r : 0, start);
    const T *x = (const T *)p.x + start[X];
    int8_t *out = p.out + start[OUT];
    const int64_t units = valid ? p.units : 0, held = UNITS * step;
    pdl_launch_next();
    pdl_wait(); /* before memory that the preceding kernel may write, and before any exit */
    unit<T, W> row[UNITS], more;
    float sum = 0, most = 0;
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (threadIdx.x + u * step < units)
            row[u].fetch(x + (threadIdx.x + u * step) * W);
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (threadIdx.x + u * step < units)
            sum += squares_of(row[u]);
    for (int64_t at = held + threadIdx.x; at < units; at += step) {
        more.fetch(x + at * W);
        sum += squares_of(more);
    }
    /* every thread of the block is here, also those without a row: the reductions have barriers */
    const float inverse = 1 / sqrtf(row_sum(sum, sums[threadIdx.y]) * p.inverse_dim + p.eps);
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (threadIdx.x + u * step < units)
            most = fmaxf(most, largest_of(p, row[u], threadIdx.x + u * step, inverse));
    for (int64_t at = held + threadIdx.x; at < units; at += step) {
        more.fetch(x + at * W);
        most = fmaxf(most, largest_of(p, more, at, inverse));
    }
    most = row_max(most, peaks[threadIdx.y]);
    const float by = most > 0 ? 127 / most : 0;
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (threadIdx.x + u * step < units)
            put_i8(p, out, row[u], threadIdx.x + u * step, inverse, by);
    for (int64_t at = held + threadIdx.x; at < units; at += step) {
        more.fetch(x + at * W);
        put_i8(p, out, more, at, inverse, by);
    }
    if (valid && threadIdx.x == 0)
        p.scale[start[SCALE]] = most * (1.0f / 127);
}

/* As many threads as a row has work for, in whole warps; short rows share a block. */
template <typename T, int W, int UNITS, typename ROWS>
static adze_status i8_launch(const cuda_call &s, const i8_params<ROWS> &p)
{
    const int64_t warps = std::min<int64_t>(ceil_div(p.units, 32 * UNITS), THREADS / 32);
    const dim3 block((unsigned)(std::max<int64_t>(warps, 1) * 32), warps > 1 ? 1 : 4);
    return launch(s, i8_rows<T, W, UNITS, ROWS>, ceil_div(p.rows.count, block.y), block, 0, p);
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
static adze_status i8_launch_as(const cuda_call &s, i8_general g, int64_t dim, bool vectors)
{
    g.units = dim;
    if (s.takes(GENERAL, true, !rows_are_simple(g.rows)))
        return i8_launch<T, 1, 8>(s, g);
    if (!rows_are_simple(g.rows))
        return ADZE_NO_KERNEL;
    i8_simple p = {
        g.x, g.weight, g.out, g.scale, dim, g.eps, g.inverse_dim, g.weight_f32, rows_simple(g.rows, {X, OUT, SCALE})};
    if (s.takes(VECTORS, vectors)) {
        p.units = dim / VEC<T>;
        return i8_launch<T, VEC<T>, 4>(s, p);
    }
    return s.takes(SINGLE, true) ? i8_launch<T, 1, 8>(s, p) : ADZE_NO_KERNEL;
}

static adze_status rms_norm_i8_run(const cuda_call &s, const adze_rms_norm_i8_args *a)
{
    const adze_tensor *const tensors[TENSORS] = {&a->x, &a->out, &a->scale};
    const int64_t dim = a->x.shape[a->x.rank - 1];
    i8_general p = {};
    adze_rows_init(&p.rows, &a->x, TENSORS, tensors);
    if (dim == 0 || p.rows.count == 0)
        return ADZE_OK;
    p.x = a->x.data, p.out = (int8_t *)a->out.data, p.scale = (float *)a->scale.data;
    p.eps = a->eps, p.inverse_dim = (float)(1.0 / (double)dim);
    p.weight = a->weight.dtype ? a->weight.data : nullptr;
    p.weight_f32 = a->weight.dtype == ADZE_F32 && a->x.dtype != ADZE_F32;
    /* a 16-byte vector of x becomes 8 bytes of out, or 4 */
    const bool vectors = rows_aligned(&a->x, dim) && rows_aligned(&a->weight, dim) &&
                         rows_width(&a->out, dim) >= (a->x.dtype == ADZE_F32 ? 4 : 8);
    return s.tuned(a->x.dtype | a->weight.dtype << 4 | vectors << 8, p.rows.count, dim, 0, 0, [&] {
        switch (a->x.dtype) {
        case ADZE_F32: return i8_launch_as<float>(s, p, dim, vectors);
        case ADZE_F16: return i8_launch_as<f16>(s, p, dim, vectors);
        default: return i8_launch_as<bf16>(s, p, dim, vectors);
        }
    });
}
CUDA_ENTRIES(rms_norm_i8, VARIANTS, rms_norm_i8_run)
