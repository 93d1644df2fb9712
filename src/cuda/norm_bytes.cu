/* rms_norm and layer_norm on CUDA with quantised rows: all options, any alignment, rows of any length. */
#include "bytes_out.cuh"
#include "norm_call.cuh"

struct norm_bytes_params {
    norm_params g; /* its rows are those of the tensors, after which the scale comes */
    bytes_to to;
};

template <typename T, int W>
__device__ __forceinline__ void round_if(bool condition, float (&f)[W])
{
    if (condition) {
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] = round_to<T>(f[j]);
    }
}

/* What a block knows of its row. */
template <typename T, int W>
struct norm_bytes_row {
    const norm_bytes_params &p;
    row_index at;
    float mean, factor;
    __device__ __forceinline__ bool rounds(int step) const { return sizeof(T) < 4 && p.g.rounding & step; }
    __device__ __forceinline__ int64_t start(int t) const { return row_offset(p.g.rows, t, at); }
    /* One of scale, shift and gate, plus its table. */
    __device__ __forceinline__ void with_table(int t, int64_t i, float (&f)[W]) const
    {
        load_param<T, W>(p.g.data[t], p.g.is_f32 >> t & 1, start(t) + i, f);
        if (p.g.data[t + TABLE]) {
            float table[W];
            load_param<T, W>(p.g.data[t + TABLE], p.g.is_f32 >> (t + TABLE) & 1, start(t + TABLE) + i, table);
#pragma unroll
            for (int j = 0; j < W; j++)
                f[j] += table[j];
            round_if<T>(rounds(ADZE_ROUND_STEPS), f);
        }
    }
    /* The value to normalise. */
    __device__ __forceinline__ void sum(int64_t i, float (&h)[W], bool store_sum) const
    {
        load<T, W>((const T *)p.g.data[X] + start(X) + i, h);
        if (!p.g.data[RESIDUAL])
            return;
        float other[W];
        if (p.g.data[GATE]) {
            with_table(GATE, i, other);
#pragma unroll
            for (int j = 0; j < W; j++)
                h[j] *= other[j];
            round_if<T>(rounds(ADZE_ROUND_STEPS), h);
        }
        load<T, W>((const T *)p.g.data[RESIDUAL] + start(RESIDUAL) + i, other);
#pragma unroll
        for (int j = 0; j < W; j++)
            h[j] += other[j];
        if (store_sum && p.g.data[SUM])
            store<T, W>((T *)p.g.data[SUM] + start(SUM) + i, h);
        round_if<T>(!rounds(ADZE_FLOAT_SUM), h);
    }
    /* h becomes the output. */
    __device__ __forceinline__ void finish(int64_t i, float (&y)[W]) const
    {
        const bool steps = rounds(ADZE_ROUND_STEPS);
        float f[W];
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] = (y[j] - mean) * factor;
        round_if<T>(rounds(ADZE_ROUND_NORM), y);
        if (p.g.weight) {
            load_param<T, W>(p.g.weight, p.g.weight_f32, i, f);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] *= f[j] + p.g.weight_offset;
        }
        if (p.g.bias) {
            load_param<T, W>(p.g.bias, p.g.bias_f32, i, f);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] += f[j];
        }
        round_if<T>(steps && (p.g.data[SCALE] || p.g.data[SHIFT]), y);
        if (p.g.data[SCALE]) {
            with_table(SCALE, i, f);
#pragma unroll
            for (int j = 0; j < W; j++)
                f[j] += 1;
            round_if<T>(steps, f);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] *= f[j];
            round_if<T>(steps && p.g.data[SHIFT], y);
        }
        if (p.g.data[SHIFT]) {
            with_table(SHIFT, i, f);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] += f[j];
        }
    }
};

template <typename T, int W, bool HELD>
__global__ void __launch_bounds__(BYTES_THREADS) norm_bytes(const __grid_constant__ norm_bytes_params p)
{
    extern __shared__ __align__(16) float row[];
    __shared__ __align__(16) float part[3][32];
    const int64_t step = (int64_t)blockDim.x * W, first = (int64_t)threadIdx.x * W;
    norm_bytes_row<T, W> r = {p, row_split(p.g.rows, blockIdx.x), 0, 0};
    pdl_launch_next();
    pdl_wait();
    auto read = [&](int64_t i, float(&h)[W], bool begins) {
        if (HELD && !begins) {
#pragma unroll
            for (int j = 0; j < W; j++)
                h[j] = row[i + j];
            return;
        }
        r.sum(i, h, begins);
#pragma unroll
        for (int j = 0; j < W && HELD; j++)
            row[i + j] = h[j];
    };
    float sum = 0;
    for (int64_t i = first; i < p.g.dim; i += step) {
        float h[W];
        read(i, h, true);
#pragma unroll
        for (int j = 0; j < W; j++)
            sum += p.g.centred ? h[j] : h[j] * h[j];
    }
    sum = row_sum(sum, part[0]);
    if (p.g.centred) {
        r.mean = sum * p.g.inverse_dim;
        sum = 0;
        for (int64_t i = first; i < p.g.dim; i += step) {
            float h[W];
            read(i, h, false);
#pragma unroll
            for (int j = 0; j < W; j++)
                sum += (h[j] - r.mean) * (h[j] - r.mean);
        }
        sum = row_sum(sum, part[1]);
    }
    r.factor = rsqrtf(sum * p.g.inverse_dim + p.g.eps);
    bytes_row<T, W, HELD>(p.to, r.start(p.to.out_at), r.start(p.to.scale_at), p.g.dim, row, part[2],
                          [&](int64_t i, float(&y)[W]) {
                              read(i, y, false);
                              r.finish(i, y);
                          });
}

template <typename T, int W>
static adze_status norm_bytes_launch(const cuda_call &s, const norm_bytes_params &p)
{
    const int64_t bytes = p.g.dim * 4, fixed = 1024;
    const bool held = bytes + fixed <= s.gpu.block_shared;
    return launch(s, held ? norm_bytes<T, W, true> : norm_bytes<T, W, false>, p.g.rows.count,
                  dim3(bytes_threads(ceil_div(p.g.dim, W))), launch_shape(held ? (size_t)bytes : 0), p);
}
template <typename T>
static adze_status norm_bytes_as(const cuda_call &s, const norm_bytes_params &p, bool vectors)
{
    return vectors ? norm_bytes_launch<T, VEC<T>>(s, p) : norm_bytes_launch<T, 1>(s, p);
}

extern "C" adze_status adze_norm_bytes_cuda(const cuda_call &s, const norm_params &g, const adze_norm_args *a,
                                            int variant)
{
    const adze_tensor scale = adze_by_rows(&a->out_scale);
    const adze_tensor *const tensors[NORM_TENSORS + 1] = {
        &a->x,    &a->out,         &a->residual,    &a->sum,        &a->scale, &a->shift,
        &a->gate, &a->scale_table, &a->shift_table, &a->gate_table, &scale};
    if (!s.takes(variant, g.rows.count <= 0x7fffffff))
        return ADZE_NO_KERNEL;
    norm_bytes_params p = {};
    p.g = g;
    adze_rows_init(&p.g.rows, &a->x, NORM_TENSORS + 1, tensors);
    p.to = {(uint8_t *)a->out.data, (float *)a->out_scale.data, OUT, NORM_TENSORS, a->out.dtype == ADZE_F8E4M3};
    const int width = 16 / (int)adze_dtype_size(a->x.dtype);
    const bool vectors = g.width == 16 && !g.loose && bytes_aligned(&a->out, width);
    switch (a->x.dtype) {
    case ADZE_F32: return norm_bytes_as<float>(s, p, vectors);
    case ADZE_F16: return norm_bytes_as<f16>(s, p, vectors);
    default: return norm_bytes_as<bf16>(s, p, vectors);
    }
}
