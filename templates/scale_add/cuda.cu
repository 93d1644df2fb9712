/* scale_add on CUDA.

   A block works on a piece of a row, or on several short rows: blockDim.x threads per row, blockDim.y rows. A thread
   has UNITS units of W elements, blockDim.x apart, and issues all loads before it uses the first. Units are 16-byte
   vectors where rows are aligned, and single elements where they are not (unit.cuh). */
#include "launch.cuh"
#include "rows.cuh"
#include "unit.cuh"

#include <algorithm>

enum { X, Y, OUT, TENSORS };
constexpr int THREADS = 128; /* of a block, at most */

template <typename ROWS>
struct scale_params {
    const void *x, *y;
    void *out;
    int64_t units;   /* of a row */
    uint32_t pieces; /* of a row */
    float a;
    ROWS rows;
};
typedef scale_params<simple_rows<TENSORS>> scale_simple;
typedef scale_params<general_rows<TENSORS>> scale_general;

template <typename T, int W, int UNITS, typename ROWS>
__global__ void __launch_bounds__(THREADS) scale_rows(const __grid_constant__ scale_params<ROWS> p)
{
    int64_t start[TENSORS];
    const uint32_t group = blockIdx.x / p.pieces;
    const int64_t piece = (int64_t)(blockIdx.x - group * p.pieces) * (blockDim.x * UNITS);
    const int64_t r = (int64_t)group * blockDim.y + threadIdx.y;
    const bool valid = r < p.rows.count;
    p.rows.locate(valid ? r : 0, start);
    const T *x = (const T *)p.x + start[X] + piece * W, *y = (const T *)p.y + start[Y] + piece * W;
    T *out = (T *)p.out + start[OUT] + piece * W;
    const int units = p.units - piece < INT32_MAX ? (int)(p.units - piece) : INT32_MAX;
    pdl_launch_next();
    pdl_wait(); /* before memory that the preceding kernel may write, and before any exit */
    if (!valid)
        return;
    unit<T, W> xs[UNITS], ys[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int at = unit_of<false, UNITS>(u);
        if (at < units) {
            xs[u].fetch(x + at * W);
            ys[u].fetch(y + at * W);
        }
    }
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int at = unit_of<false, UNITS>(u);
        if (at < units) {
            float a[W], b[W];
            xs[u].get(a);
            ys[u].get(b);
#pragma unroll
            for (int j = 0; j < W; j++)
                a[j] = p.a * a[j] + b[j];
            unit<T, W> result;
            result.set(a);
            result.put(out + at * W);
        }
    }
}

template <typename T, int W, int UNITS, typename ROWS>
static adze_status scale_launch(const cuda_call &s, scale_params<ROWS> p)
{
    const unit_split split = split_units(p.units, UNITS, p.rows.count, THREADS);
    p.pieces = (uint32_t)split.pieces;
    return launch(s, scale_rows<T, W, UNITS, ROWS>, split.blocks, split.block, 0, p);
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
static adze_status scale_launch_as(const cuda_call &s, scale_general g, int64_t dim, int width)
{
    g.units = dim;
    if (s.takes(GENERAL, true, !rows_are_simple(g.rows)))
        return scale_launch<T, 1, 8>(s, g);
    if (!rows_are_simple(g.rows))
        return ADZE_NO_KERNEL;
    scale_simple p = {g.x, g.y, g.out, dim, 0, g.a, rows_simple(g.rows, {X, Y, OUT})};
    if (s.takes(VECTORS, width == 16)) {
        p.units = dim / VEC<T>;
        return scale_launch<T, VEC<T>, 2>(s, p);
    }
    return s.takes(SINGLE, true) ? scale_launch<T, 1, 8>(s, p) : ADZE_NO_KERNEL;
}

static adze_status scale_add_run(const cuda_call &s, const adze_scale_add_args *a)
{
    const adze_tensor *const tensors[TENSORS] = {&a->x, &a->y, &a->out};
    const int64_t dim = a->x.shape[a->x.rank - 1];
    scale_general p = {};
    adze_rows_init(&p.rows, &a->x, TENSORS, tensors);
    if (dim == 0 || p.rows.count == 0)
        return ADZE_OK;
    int width = 16;
    for (int t = 0; t < TENSORS; t++)
        width = std::min(width, rows_width(tensors[t], dim));
    p.x = a->x.data, p.y = a->y.data, p.out = a->out.data, p.a = a->a;
    return s.tuned(a->x.dtype | width << 4, p.rows.count, dim, 0, 0, [&] {
        switch (a->x.dtype) {
        case ADZE_F32: return scale_launch_as<float>(s, p, dim, width);
        case ADZE_F16: return scale_launch_as<f16>(s, p, dim, width);
        default: return scale_launch_as<bf16>(s, p, dim, width);
        }
    });
}
CUDA_ENTRIES(scale_add, VARIANTS, scale_add_run)
