/* glu on CUDA. */
#include "act_rows.cuh"
#include "bytes_out.cuh"

enum { GLU_BYTES = ACT_GENERAL + 1 };
struct glu_variants { /* those of act_rows.cuh, and one for quantised rows */
    adze_variant list[GLU_BYTES + 2];
    glu_variants() : list()
    {
        for (int i = 0; i < GLU_BYTES; i++)
            list[i] = ACT_VARIANTS[i];
        list[GLU_BYTES] = {"bytes", "every call with quantised rows"};
    }
};
static const glu_variants variants;

struct glu_bytes_params {
    const void *gate, *value;
    bytes_to to;
    int64_t dim;
    int act;
    bool steps;
    adze_rows rows; /* of the ACT_TENSORS and the scale */
};

template <typename T, int W, bool HELD>
__global__ void __launch_bounds__(BYTES_THREADS) glu_bytes(const __grid_constant__ glu_bytes_params p)
{
    extern __shared__ __align__(16) float row[];
    __shared__ float part[32];
    const row_index at = row_split(p.rows, blockIdx.x);
    const T *const gate = (const T *)p.gate + row_offset(p.rows, GATE, at);
    const T *const value = (const T *)p.value + row_offset(p.rows, VALUE, at);
    pdl_launch_next();
    pdl_wait();
    bytes_row<T, W, HELD>(p.to, row_offset(p.rows, OUT, at), row_offset(p.rows, ACT_TENSORS, at), p.dim, row, part,
                          [&](int64_t i, float(&y)[W]) {
                              float v[W];
                              load<T, W>(gate + i, y);
                              load<T, W>(value + i, v);
                              act_all<W, sizeof(T) == 2>(p.act, y);
#pragma unroll
                              for (int j = 0; j < W; j++)
                                  y[j] = (p.steps ? round_to<T>(y[j]) : y[j]) * v[j];
                          });
}

template <typename T, int W>
static adze_status glu_bytes_launch(const cuda_call &s, const glu_bytes_params &p)
{
    const int64_t bytes = p.dim * 4, fixed = 1024;
    const bool held = bytes + fixed <= s.gpu.block_shared;
    return launch(s, held ? glu_bytes<T, W, true> : glu_bytes<T, W, false>, p.rows.count,
                  dim3(bytes_threads(ceil_div(p.dim, W))), launch_shape(held ? (size_t)bytes : 0), p);
}
template <typename T>
static adze_status glu_bytes_as(const cuda_call &s, const glu_bytes_params &p, bool vectors)
{
    return vectors ? glu_bytes_launch<T, VEC<T>>(s, p) : glu_bytes_launch<T, 1>(s, p);
}
static adze_status glu_bytes_run(const cuda_call &s, const adze_glu_args *a)
{
    const adze_tensor scale = adze_by_rows(&a->out_scale);
    adze_tensor gate, value;
    adze_glu_halves(a, &gate, &value);
    const adze_tensor *const tensors[ACT_TENSORS + 1] = {&gate, &a->out, &value, &scale};
    glu_bytes_params p = {};
    p.gate = gate.data, p.value = value.data;
    p.to = {(uint8_t *)a->out.data, (float *)a->out_scale.data, OUT, ACT_TENSORS, a->out.dtype == ADZE_F8E4M3};
    p.dim = gate.shape[gate.rank - 1];
    p.act = a->act ? a->act : ADZE_ACT_SILU, p.steps = a->rounding & ADZE_ROUND_STEPS;
    adze_rows_init(&p.rows, &gate, ACT_TENSORS + 1, tensors);
    if (p.rows.count == 0)
        return ADZE_OK;
    if (!s.takes(GLU_BYTES, p.rows.count <= 0x7fffffff))
        return ADZE_NO_KERNEL;
    const bool vectors = rows_aligned(&gate, p.dim) && rows_aligned(&value, p.dim) &&
                         bytes_aligned(&a->out, 16 / (int)adze_dtype_size(a->x.dtype));
    switch (a->x.dtype) {
    case ADZE_F32: return glu_bytes_as<float>(s, p, vectors);
    case ADZE_F16: return glu_bytes_as<f16>(s, p, vectors);
    default: return glu_bytes_as<bf16>(s, p, vectors);
    }
}

static adze_status glu_run(const cuda_call &s, const adze_glu_args *a)
{
    if (adze_is_bytes(a->out.dtype))
        return glu_bytes_run(s, a);
    adze_tensor tensors[ACT_TENSORS] = {{}, a->out, {}};
    adze_glu_halves(a, &tensors[GATE], &tensors[VALUE]);
    return act_run<true>(s, tensors, a->act ? a->act : ADZE_ACT_SILU, a->rounding & ADZE_ROUND_STEPS);
}
CUDA_ENTRIES(glu, variants.list, glu_run)
