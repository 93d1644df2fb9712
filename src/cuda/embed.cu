/* embed on CUDA: rows of the table, copied or multiplied by a scale.

   A block has a piece of a row of out, or several short rows: blockDim.x threads per row, blockDim.y rows. Every
   thread of a row reads its id, and then its UNITS units of the table, all of them before it stores the first. */
#include "launch.cuh"
#include "rows.cuh"
#include "unit.cuh"

#include <algorithm>

enum { OUT, IDS, TENSORS };
constexpr int THREADS = 128; /* of a block, at most */

enum { VECTOR, VECTORS, ANY };
constexpr adze_variant VARIANTS[] = {
    {"vector", "aligned rows, a 16-byte vector per thread"},
    {"vectors", "aligned rows, four vectors per thread"},
    {"any", "rows at any address"},
    {NULL, NULL},
};

struct embed_params {
    const void *table, *ids;
    void *out;
    adze_rows rows; /* of out and ids */
    int64_t table_rows, table_stride;
    int64_t units;          /* of a row */
    int64_t pieces, blocks; /* of a row; of the call */
    float scale;            /* 0: rows are copied */
    bool wide_ids;          /* they are i64 */
};

template <typename T, int W, int UNITS>
__global__ void __launch_bounds__(THREADS) embed_rows(const __grid_constant__ embed_params p)
{
    pdl_launch_next();
    pdl_wait();
    for (int64_t block = blockIdx.x; block < p.blocks; block += gridDim.x) {
        const int64_t group = p.pieces == 1 ? block : divide(block, p.pieces);
        const int64_t row = group * blockDim.y + threadIdx.y;
        const int64_t first = (block - group * p.pieces) * (blockDim.x * UNITS) + threadIdx.x;
        if (row >= p.rows.count || first >= p.units)
            continue;
        const row_index index = row_split(p.rows, row);
        const int64_t at = row_offset(p.rows, IDS, index);
        const int64_t id = p.wide_ids ? ((const int64_t *)p.ids)[at] : ((const int32_t *)p.ids)[at];
        const bool there = id >= 0 && id < p.table_rows;
        const T *from = (const T *)p.table + (there ? id : 0) * p.table_stride;
        T *to = (T *)p.out + row_offset(p.rows, OUT, index);
        unit<T, W> x[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const int64_t i = first + u * (int64_t)blockDim.x;
            x[u].fill(NAN);
            if (there && i < p.units)
                x[u].fetch(from + i * W);
        }
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const int64_t i = first + u * (int64_t)blockDim.x;
            if (i >= p.units)
                break;
            if (p.scale != 0) {
                float f[W];
                x[u].get(f);
#pragma unroll
                for (int j = 0; j < W; j++)
                    f[j] *= p.scale;
                x[u].set(f);
            }
            x[u].put(to + i * W);
        }
    }
}

template <typename T, int W, int UNITS>
static adze_status embed_launch(const cuda_call &s, embed_params p, int64_t dim)
{
    p.units = dim / W;
    const unit_split split = split_units(p.units, UNITS, p.rows.count, THREADS);
    p.pieces = split.pieces, p.blocks = split.blocks;
    return launch(s, embed_rows<T, W, UNITS>, grid_for(p.blocks, 1), split.block, 0, p);
}

/* A vector per thread where that fills the device no more than once. */
template <typename T>
static adze_status embed_launch_as(const cuda_call &s, const embed_params &p, int64_t dim, bool aligned)
{
    const bool few = p.rows.count * (dim / VEC<T>) <= blocks_at_once(s.gpu, THREADS) * THREADS;
    if (s.takes(VECTOR, aligned, few))
        return embed_launch<T, VEC<T>, 1>(s, p, dim);
    if (s.takes(VECTORS, aligned))
        return embed_launch<T, VEC<T>, 4>(s, p, dim);
    return s.takes(ANY, true) ? embed_launch<T, 1, VEC<T>>(s, p, dim) : ADZE_NO_KERNEL;
}

static adze_status embed_run(const cuda_call &s, const adze_embed_args *a)
{
    const int64_t dim = a->table.shape[1];
    adze_tensor ids = a->ids; /* as rows of one element, the tokens of out */
    ids.shape[ids.rank] = ids.stride[ids.rank] = 1;
    ids.rank++;
    const adze_tensor *const tensors[TENSORS] = {&a->out, &ids};
    embed_params p = {};
    adze_rows_init(&p.rows, &a->out, TENSORS, tensors);
    if (dim == 0 || p.rows.count == 0)
        return ADZE_OK;
    p.table = a->table.data, p.ids = a->ids.data, p.out = a->out.data;
    p.table_rows = a->table.shape[0], p.table_stride = a->table.stride[0];
    p.scale = a->scale != 0 ? (float)adze_round_to(a->table.dtype, a->scale) : 0;
    p.wide_ids = a->ids.dtype == ADZE_I64;
    const bool aligned = rows_aligned(&a->table, dim) && rows_aligned(&a->out, dim);
    const int form = a->table.dtype | aligned << 4 | (p.scale != 0) << 5;
    return s.tuned(form, p.rows.count, dim, 0, 0, [&] {
        switch (a->table.dtype) {
        case ADZE_F32: return embed_launch_as<float>(s, p, dim, aligned);
        case ADZE_F16: return embed_launch_as<f16>(s, p, dim, aligned);
        default: return embed_launch_as<bf16>(s, p, dim, aligned);
        }
    });
}
CUDA_ENTRIES(embed, VARIANTS, embed_run)
