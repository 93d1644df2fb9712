/* attention_merge on CUDA: a warp has a row. */
#include "launch.cuh"
#include "rows.cuh"
#include "vec.cuh"

enum { X, Y, OUT, X_LSE, Y_LSE, LSE, TENSORS };
constexpr int MERGE_THREADS = 128;
constexpr adze_variant MERGE_VARIANTS[] = {{"warp", "every call, a warp for each row"}, {NULL, NULL}};

struct merge_params {
    const void *x, *y;
    void *out;
    const float *x_lse, *y_lse;
    float *lse; /* NULL: not wanted */
    int64_t dim;
    adze_rows rows;
};

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
    const float lx = p.x_lse[row_offset(p.rows, X_LSE, at)], ly = p.y_lse[row_offset(p.rows, Y_LSE, at)];
    const float top = lx != lx ? lx : fmaxf(lx, ly);
    const float wx = lx == -INFINITY ? 0 : expf(lx - top), wy = ly == -INFINITY ? 0 : expf(ly - top);
    const float sum = wx + wy, of_x = sum == 0 ? 0 : wx / sum, of_y = sum == 0 ? 0 : wy / sum;
    const T *x = (const T *)p.x + row_offset(p.rows, X, at), *y = (const T *)p.y + row_offset(p.rows, Y, at);
    T *out = (T *)p.out + row_offset(p.rows, OUT, at);
    /* A part that has no share may hold anything. */
    for (int64_t i = lane; i < p.dim; i += 32) {
        const float a = of_x == 0 ? 0 : of_x * to_float(x[i]), b = of_y == 0 ? 0 : of_y * to_float(y[i]);
        out[i] = from_float<T>(a + b);
    }
    __syncwarp(); /* lse may be x_lse or y_lse, which other lanes read above */
    if (p.lse && lane == 0)
        p.lse[row_offset(p.rows, LSE, at)] = sum == 0 ? -INFINITY : top + logf(sum);
}

template <typename T>
static adze_status merge_launch(const cuda_call &s, const merge_params &p)
{
    if (!s.takes(0, true))
        return ADZE_NO_KERNEL;
    const int64_t blocks = ceil_div(p.rows.count, MERGE_THREADS / 32);
    if (blocks > 0x7fffffff)
        return adze_fail(ADZE_NO_KERNEL, "attention_merge: %lld rows are too many", (long long)p.rows.count);
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
