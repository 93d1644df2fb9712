/* attention_merge on CUDA: lanes of a warp have a 16-byte vector of a row each, or a warp has a row. */
#include "launch.cuh"
#include "rows.cuh"
#include "vec.cuh"

enum { X, Y, OUT, X_LSE, Y_LSE, LSE, TENSORS };
constexpr int MERGE_THREADS = 128;
enum { BY_VECTOR, BY_WARP };
constexpr adze_variant MERGE_VARIANTS[] = {
    {"vector", "rows of 1, 2, 4, 8, 16 or 32 aligned 16-byte vectors, a lane for each vector"},
    {"warp", "every call, a warp for each row"},
    {NULL, NULL},
};

struct merge_params {
    const void *x, *y;
    void *out;
    const float *x_lse, *y_lse;
    float *lse; /* NULL: not wanted */
    int64_t dim;
    adze_rows rows;
};

/* The shares of x and y in a row, and its lse. A part that has no share may hold anything. */
struct merge_shares {
    float x, y, lse;
};
__device__ __forceinline__ merge_shares merge_shares_of(const merge_params &p, const row_index &at)
{
    const float lx = p.x_lse[row_offset(p.rows, X_LSE, at)], ly = p.y_lse[row_offset(p.rows, Y_LSE, at)];
    const float top = lx != lx ? lx : fmaxf(lx, ly);
    const float wx = lx == -INFINITY ? 0 : expf(lx - top), wy = ly == -INFINITY ? 0 : expf(ly - top);
    const float sum = wx + wy;
    return {sum == 0 ? 0 : wx / sum, sum == 0 ? 0 : wy / sum, sum == 0 ? -INFINITY : top + logf(sum)};
}
__device__ __forceinline__ float merge_one(const merge_shares &of, float x, float y)
{
    return (of.x == 0 ? 0 : of.x * x) + (of.y == 0 ? 0 : of.y * y);
}

template <typename T>
__global__ void __launch_bounds__(MERGE_THREADS) merge_rows(const __grid_constant__ merge_params p)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * (MERGE_THREADS / 32) + threadIdx.x / 32;
    pdl_launch_next();
    pdl_wait();
    if (row >= p.rows.count)
        return;
    const row_index at = row_split(p.rows, row);
    const merge_shares of = merge_shares_of(p, at);
    const T *x = (const T *)p.x + row_offset(p.rows, X, at), *y = (const T *)p.y + row_offset(p.rows, Y, at);
    T *out = (T *)p.out + row_offset(p.rows, OUT, at);
    for (int64_t i = lane; i < p.dim; i += 32)
        out[i] = from_float<T>(merge_one(of, to_float(x[i]), to_float(y[i])));
    __syncwarp(); /* lse may be x_lse or y_lse, which other lanes read above */
    if (p.lse && lane == 0)
        p.lse[row_offset(p.rows, LSE, at)] = of.lse;
}

/* A row has 2^shift vectors: it is in one warp. */
template <typename T>
__global__ void __launch_bounds__(MERGE_THREADS) merge_vectors(const __grid_constant__ merge_params p, int shift)
{
    const int64_t index = (int64_t)blockIdx.x * MERGE_THREADS + threadIdx.x, row = index >> shift;
    const int vector = (int)(index & ((1 << shift) - 1));
    const bool there = row < p.rows.count;
    pdl_launch_next();
    pdl_wait();
    const row_index at = row_split(p.rows, there ? row : 0);
    const merge_shares of = merge_shares_of(p, at);
    float x[VEC<T>], y[VEC<T>];
    load((const T *)p.x + row_offset(p.rows, X, at) + vector * VEC<T>, x);
    load((const T *)p.y + row_offset(p.rows, Y, at) + vector * VEC<T>, y);
#pragma unroll
    for (int i = 0; i < VEC<T>; i++)
        x[i] = merge_one(of, x[i], y[i]);
    __syncwarp(); /* as above */
    if (!there)
        return;
    store((T *)p.out + row_offset(p.rows, OUT, at) + vector * VEC<T>, x);
    if (p.lse && vector == 0)
        p.lse[row_offset(p.rows, LSE, at)] = of.lse;
}

/* log2 of the vectors of a row; -1: they are too many, no power of 2, or not aligned. */
template <typename T>
static int merge_shift(const merge_params &p)
{
    bool aligned = (uintptr_t)p.x % 16 == 0 && (uintptr_t)p.y % 16 == 0 && (uintptr_t)p.out % 16 == 0;
    for (int d = 0; d < p.rows.rank; d++)
        for (int t = X; t <= OUT; t++)
            aligned = aligned && p.rows.stride[t][d] % VEC<T> == 0;
    for (int shift = 0; aligned && shift <= 5; shift++)
        if (p.dim == (int64_t)VEC<T> << shift)
            return shift;
    return -1;
}

template <typename T>
static adze_status merge_launch(const cuda_call &s, const merge_params &p)
{
    const int shift = merge_shift<T>(p);
    const bool vectors = s.takes(BY_VECTOR, shift >= 0);
    const int64_t blocks = ceil_div(p.rows.count, vectors ? MERGE_THREADS >> shift : MERGE_THREADS / 32);
    if (!vectors && !s.takes(BY_WARP, true))
        return ADZE_NO_KERNEL;
    if (blocks > 0x7fffffff)
        return adze_fail(ADZE_NO_KERNEL, "attention_merge: %lld rows are too many", (long long)p.rows.count);
    if (vectors)
        return launch(s, merge_vectors<T>, blocks, dim3(MERGE_THREADS), launch_shape(0), p, shift);
    return launch(s, merge_rows<T>, blocks, dim3(MERGE_THREADS), launch_shape(0), p);
}

static adze_status merge_run(const cuda_call &s, const adze_attention_merge_args *a)
{
    merge_params p = {};
    adze_tensor lse[3] = {a->x_lse, a->y_lse, a->lse};
    for (adze_tensor &t : lse)
        t.stride[t.rank] = 1, t.shape[t.rank++] = 1; /* rows of one element */
    const adze_tensor *const tensors[TENSORS] = {&a->x, &a->y, &a->out, &lse[0], &lse[1], &lse[2]};
    adze_rows_init(&p.rows, &a->x, a->lse.dtype ? TENSORS : TENSORS - 1, tensors);
    p.x = a->x.data, p.y = a->y.data, p.out = a->out.data;
    p.x_lse = (const float *)a->x_lse.data, p.y_lse = (const float *)a->y_lse.data;
    p.lse = a->lse.dtype ? (float *)a->lse.data : NULL;
    p.dim = a->x.shape[a->x.rank - 1];
    if (p.rows.count == 0)
        return ADZE_OK;
    return s.tuned(a->x.dtype, p.rows.count, p.dim, 0, 0, [&]() {
        switch (a->x.dtype) {
        case ADZE_F32: return merge_launch<float>(s, p);
        case ADZE_F16: return merge_launch<f16>(s, p);
        default: return merge_launch<bf16>(s, p);
        }
    });
}
CUDA_ENTRIES(attention_merge, MERGE_VARIANTS, merge_run)
