/* rms_norm_i8 on CUDA.

   A block has blockDim.y rows, blockDim.x threads for each: a few lanes of a warp, or whole warps. A thread holds up
   to UNITS units of its row in registers, so that the row is read once; what does not fit there is read again, by
   kernels of their own, as that code costs registers. Units are 16-byte vectors where rows are aligned, and single
   elements where they are not (unit.cuh).

   A row is normalised by one positive factor, which cancels in y / max(|y|). So out needs the products x * weight and
   their maximum alone, and only the scale needs the factor. Sum and maximum are reduced together, with one barrier.
 */
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
    uint32_t prefetch_blocks; /* blocks that prefetch their rows, the first of the grid */
    ROWS rows;
};
typedef i8_params<simple_rows<TENSORS>> i8_simple;
typedef i8_params<general_rows<TENSORS>> i8_general;

/* Sum and maximum over the threads of a row. `part` is shared memory, unused until the block's next barrier. */
__device__ __forceinline__ void row_totals(float &sum, float &most, float2 (&part)[THREADS / 32])
{
    const int warps = (int)blockDim.x / 32, first = (int)threadIdx.y * warps;
    for (int mask = (warps ? 32 : (int)blockDim.x) / 2; mask; mask /= 2) {
        sum += __shfl_xor_sync(~0u, sum, mask);
        most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
    }
    if (warps < 2)
        return;
    if (threadIdx.x % 32 == 0)
        part[first + threadIdx.x / 32] = make_float2(sum, most);
    __syncthreads();
    sum = 0;
    for (int w = first; w < first + warps; w++) {
        sum += part[w].x;
        most = fmaxf(most, part[w].y);
    }
}

/* The weight: absent, of x's dtype, or f32 where x is not. */
enum weight_kind { NONE, SAME, WIDE };

/* The products of a unit, its squares added to `sum`, and the largest magnitude so far. */
template <weight_kind WEIGHT, typename T, int W>
__device__ __forceinline__ void products_of(const unit<T, W> &x, const param_unit<T, W> &weight, float (&y)[W],
                                            float &sum, float &most)
{
    x.get(y);
#pragma unroll
    for (int j = 0; j < W; j++)
        sum += y[j] * y[j];
    if constexpr (WEIGHT != NONE) {
        float w[W];
        weight.get(WEIGHT == WIDE, w);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] *= w[j];
    }
#pragma unroll
    for (int j = 0; j < W; j++)
        most = fmaxf(most, fabsf(y[j]));
}

/* W bytes in one store. A float of 2^23 to 2^24 has no bits for fractions: the addition rounds to a whole number, and
   its low byte is that number, also below zero. A conversion would have a fraction of its rate. */
template <int W>
__device__ __forceinline__ void put_i8(int8_t *out, const float (&y)[W], float by)
{
    uint32_t byte[W];
#pragma unroll
    for (int j = 0; j < W; j++)
        byte[j] = __float_as_uint(fmaf(y[j], by, 0x1.8p23f));
    /* the low bytes of four */
    const auto word = [&](int j) {
        return __byte_perm(__byte_perm(byte[j], byte[j + 1], 0x0040), __byte_perm(byte[j + 2], byte[j + 3], 0x0040),
                           0x5410);
    };
    if constexpr (W == 8)
        *reinterpret_cast<uint2 *>(out) = make_uint2(word(0), word(4));
    else if constexpr (W == 4)
        *reinterpret_cast<uint32_t *>(out) = word(0);
    else
        *out = (int8_t)byte[0];
}

/* LONG: rows may have more units than threads hold. */
template <typename T, weight_kind WEIGHT, int W, int UNITS, bool LONG, typename ROWS>
__global__ void __launch_bounds__(THREADS) i8_rows(const __grid_constant__ i8_params<ROWS> p)
{
    __shared__ float2 part[THREADS / 32];
    int64_t start[TENSORS];
    const int64_t r = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    const bool valid = r < p.rows.count;
    p.rows.locate(valid ? r : 0, start);
    const T *x = (const T *)p.x + start[X];
    const int64_t units = valid ? p.units : 0;
    const int thread = (int)threadIdx.x, step = (int)blockDim.x, held = (int)min(units, (int64_t)UNITS * step);
    pdl_launch_next();
    if (blockIdx.x < p.prefetch_blocks && thread == 0)
        prefetch_bytes(x, held * W * (int)sizeof(T));
    pdl_wait(); /* before memory that the preceding kernel may write, and before any exit */
    unit<T, W> row[UNITS], more;
    param_unit<T, W> weight[UNITS], more_weight;
    float y[UNITS][W], sum = 0, most = 0;
    /* all loads are issued before the first is used */
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (thread + u * step < held)
            row[u].fetch(x + (thread + u * step) * W);
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (WEIGHT != NONE && thread + u * step < held)
            weight[u].fetch(p.weight, WEIGHT == WIDE, (thread + u * step) * W);
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (thread + u * step < held)
            products_of<WEIGHT>(row[u], weight[u], y[u], sum, most);
    const auto reread = [&](int64_t at, float(&z)[W], float &squares, float &peak) {
        more.fetch(x + at * W);
        if (WEIGHT != NONE)
            more_weight.fetch(p.weight, WEIGHT == WIDE, at * W);
        products_of<WEIGHT>(more, more_weight, z, squares, peak);
    };
    for (int64_t at = held + thread; LONG && at < units; at += step) {
        float z[W];
        reread(at, z, sum, most);
    }
    row_totals(sum, most, part); /* every thread of the block is here, also those without a row: it has a barrier */
    /* Found again: kept all the while, these addresses cost registers, and the compiler issued the last loads late.
     */
    p.rows.locate(valid ? r : 0, start);
    int8_t *out = p.out + start[OUT];
    const float by = 127 / fmaxf(most, 0x1p-120f); /* finite for a row of zeros */
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (thread + u * step < held)
            put_i8(out + (thread + u * step) * W, y[u], by);
    for (int64_t at = held + thread; LONG && at < units; at += step) {
        float z[W], none = 0;
        reread(at, z, none, none);
        put_i8(out + at * W, z, by);
    }
    if (valid && thread == 0)
        p.scale[start[SCALE]] = most * (1 / sqrtf(sum * p.inverse_dim + p.eps)) * (1.0f / 127);
}

/* As many threads as a row has work for: whole warps, or a power of 2 of lanes. Short rows share a block. */
template <typename T, weight_kind WEIGHT, int W, int UNITS, typename ROWS>
static adze_status i8_launch(const cuda_call &s, i8_params<ROWS> p)
{
    int64_t threads = ceil_div(p.units, UNITS), lanes = 1;
    while (lanes < threads && lanes < 32)
        lanes *= 2;
    threads = std::min<int64_t>(ceil_div(threads, lanes) * lanes, THREADS);
    const dim3 block((unsigned)threads, (unsigned)std::max<int64_t>(128 / threads, 1));
    const int64_t vectors = ceil_div(p.units * W, VEC<T>);
    p.prefetch_blocks = prefetch_blocks(s.gpu, p.rows.count * vectors / 2, vectors * block.y, threads * block.y, 24);
    auto *const kernel = p.units > UNITS * threads ? i8_rows<T, WEIGHT, W, UNITS, true, ROWS>
                                                   : i8_rows<T, WEIGHT, W, UNITS, W == 1, ROWS>;
    return launch(s, kernel, ceil_div(p.rows.count, block.y), block, 0, p);
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

template <typename T, weight_kind WEIGHT>
static adze_status i8_launch_as(const cuda_call &s, i8_general g, int64_t dim, bool vectors)
{
    g.units = dim;
    if (s.takes(GENERAL, true, !rows_are_simple(g.rows)))
        return i8_launch<T, WEIGHT, 1, 8>(s, g);
    if (!rows_are_simple(g.rows))
        return ADZE_NO_KERNEL;
    i8_simple p = {g.x, g.weight, g.out, g.scale, dim, g.eps, g.inverse_dim, 0, rows_simple(g.rows, {X, OUT, SCALE})};
    if (s.takes(VECTORS, vectors)) {
        p.units = dim / VEC<T>;
        return i8_launch<T, WEIGHT, VEC<T>, 4>(s, p);
    }
    return s.takes(SINGLE, true) ? i8_launch<T, WEIGHT, 1, 8>(s, p) : ADZE_NO_KERNEL;
}

template <typename T>
static adze_status i8_launch_of(const cuda_call &s, const i8_general &p, int weight_dtype, int64_t dim, bool vectors)
{
    if (!weight_dtype)
        return i8_launch_as<T, NONE>(s, p, dim, vectors);
    if constexpr (sizeof(T) < 4)
        if (weight_dtype == ADZE_F32)
            return i8_launch_as<T, WIDE>(s, p, dim, vectors);
    return i8_launch_as<T, SAME>(s, p, dim, vectors);
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
    /* a 16-byte vector of x becomes 8 bytes of out, or 4 */
    const bool vectors = rows_aligned(&a->x, dim) && rows_aligned(&a->weight, dim) &&
                         rows_width(&a->out, dim) >= (a->x.dtype == ADZE_F32 ? 4 : 8);
    return s.tuned(a->x.dtype | a->weight.dtype << 4 | vectors << 8, p.rows.count, dim, 0, 0, [&] {
        switch (a->x.dtype) {
        case ADZE_F32: return i8_launch_of<float>(s, p, a->weight.dtype, dim, vectors);
        case ADZE_F16: return i8_launch_of<f16>(s, p, a->weight.dtype, dim, vectors);
        default: return i8_launch_of<bf16>(s, p, a->weight.dtype, dim, vectors);
        }
    });
}
CUDA_ENTRIES(rms_norm_i8, VARIANTS, rms_norm_i8_run)
