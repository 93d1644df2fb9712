/* norm_loop.cuh - any call of rms_norm and layer_norm, on CUDA. A block per row, W elements at a time; the row is
   read again for each pass, and the sum with the residual is made again. */
#ifndef ADZE_CUDA_NORM_LOOP_CUH
#define ADZE_CUDA_NORM_LOOP_CUH

#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "vec.cuh"

constexpr int LOOP_THREADS = 512; /* of a block, at most */

/* All W values as a store and a load would leave them, if `condition`. */
template <typename T, int W>
__device__ __forceinline__ void round_if(bool condition, float (&f)[W])
{
    if (!condition)
        return;
    if constexpr (W == VEC<T>) {
        packed<T> v;
        v.set(f);
        v.get(f);
    } else {
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] = round_to<T>(f[j]);
    }
}

enum { X, OUT, RESIDUAL, SUM, SCALE, SHIFT, GATE, SCALE_TABLE, SHIFT_TABLE, GATE_TABLE, NORM_TENSORS };
enum { TABLE = SCALE_TABLE - SCALE }; /* from one of scale, shift and gate to its table */

struct norm_params {
    const void *data[NORM_TENSORS]; /* NULL: absent */
    const void *weight, *bias;
    int64_t dim;
    float eps, weight_offset, inverse_dim;
    int32_t rounding;
    uint32_t is_f32; /* by tensor: it is f32 where x is not */
    bool weight_f32, bias_f32;
    adze_rows rows;
};
struct norm_row {
    int64_t at[NORM_TENSORS];
};

/* One of scale, shift and gate, with its table added. */
template <typename T, int W>
__device__ __forceinline__ void norm_side(const norm_params &p, const norm_row &row, int t, int64_t i, float (&f)[W])
{
    load_param<T, W>(p.data[t], p.is_f32 >> t & 1, row.at[t] + i, f);
    if (p.data[t + TABLE]) {
        float table[W];
        load_param<T, W>(p.data[t + TABLE], p.is_f32 >> (t + TABLE) & 1, row.at[t + TABLE] + i, table);
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] += table[j];
        round_if<T, W>(p.rounding & ADZE_ROUND_STEPS, f);
    }
}

/* What is normalised of W elements from i on. */
template <typename T, int W>
__device__ __forceinline__ void norm_value(const norm_params &p, const norm_row &row, int64_t i, float (&h)[W],
                                           bool store_sum)
{
    float other[W];
    load<T, W>((const T *)p.data[X] + row.at[X] + i, h);
    if (!p.data[RESIDUAL])
        return;
    if (p.data[GATE]) {
        norm_side<T, W>(p, row, GATE, i, other);
#pragma unroll
        for (int j = 0; j < W; j++)
            h[j] *= other[j];
        round_if<T, W>(p.rounding & ADZE_ROUND_STEPS, h);
    }
    load<T, W>((const T *)p.data[RESIDUAL] + row.at[RESIDUAL] + i, other);
#pragma unroll
    for (int j = 0; j < W; j++)
        h[j] += other[j];
    if (store_sum && p.data[SUM])
        store<T, W>((T *)p.data[SUM] + row.at[SUM] + i, h);
    round_if<T, W>(!(p.rounding & ADZE_FLOAT_SUM), h);
}

/* From the normalised value to what is stored. */
template <typename T, int W>
__device__ __forceinline__ void norm_write(const norm_params &p, const norm_row &row, int64_t i, float (&y)[W])
{
    const bool steps = p.rounding & ADZE_ROUND_STEPS && (p.data[SCALE] || p.data[SHIFT]);
    float side[W];
    round_if<T, W>(p.rounding & ADZE_ROUND_NORM, y);
    if (p.weight) {
        load_param<T, W>(p.weight, p.weight_f32, i, side);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] *= side[j] + p.weight_offset;
    }
    if (p.bias) {
        load_param<T, W>(p.bias, p.bias_f32, i, side);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] += side[j];
    }
    round_if<T, W>(steps, y);
    if (p.data[SCALE]) {
        norm_side<T, W>(p, row, SCALE, i, side);
#pragma unroll
        for (int j = 0; j < W; j++)
            side[j] += 1;
        round_if<T, W>(steps, side);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] *= side[j];
        round_if<T, W>(steps && p.data[SHIFT], y);
    }
    if (p.data[SHIFT]) {
        norm_side<T, W>(p, row, SHIFT, i, side);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] += side[j];
    }
    if (p.is_f32 >> OUT & 1)
        store<float, W>((float *)p.data[OUT] + row.at[OUT] + i, y);
    else
        store<T, W>((T *)p.data[OUT] + row.at[OUT] + i, y);
}

template <typename T, bool CENTRED, int W>
__global__ void __launch_bounds__(LOOP_THREADS, 1) norm_loop(const __grid_constant__ norm_params p)
{
    __shared__ __align__(16) float part[2][32];
    pdl_launch_next();
    pdl_wait();
    const int64_t start = (int64_t)threadIdx.x * W, step = (int64_t)blockDim.x * W;
    for (int64_t r = blockIdx.x; r < p.rows.count; r += gridDim.x) {
        const row_index index = row_split(p.rows, r);
        norm_row row;
#pragma unroll
        for (int t = 0; t < NORM_TENSORS; t++)
            row.at[t] = row_offset(p.rows, t, index);
        float sum = 0, mean = 0, h[W];
#pragma unroll 1
        for (int64_t i = start; i < p.dim; i += step) {
            norm_value<T, W>(p, row, i, h, false);
#pragma unroll
            for (int j = 0; j < W; j++)
                sum += CENTRED ? h[j] : h[j] * h[j];
        }
        sum = row_sum(sum, part[0]);
        if (CENTRED) {
            mean = sum * p.inverse_dim;
            sum = 0;
#pragma unroll 1
            for (int64_t i = start; i < p.dim; i += step) {
                norm_value<T, W>(p, row, i, h, false);
#pragma unroll
                for (int j = 0; j < W; j++)
                    sum += (h[j] - mean) * (h[j] - mean);
            }
            sum = row_sum(sum, part[1]);
        }
        const float factor = rsqrtf(sum * p.inverse_dim + p.eps);
#pragma unroll 1
        for (int64_t i = start; i < p.dim; i += step) {
            norm_value<T, W>(p, row, i, h, true);
#pragma unroll
            for (int j = 0; j < W; j++)
                h[j] = (h[j] - mean) * factor;
            norm_write<T, W>(p, row, i, h);
        }
        __syncthreads(); /* part is used again */
    }
}

template <typename T, bool CENTRED, int W>
static adze_status norm_launch_loop(const char *op, adze_stream s, const norm_params &p)
{
    const int64_t threads = (p.dim / W + 31) / 32 * 32;
    return launch(op, s, norm_loop<T, CENTRED, W>, grid_for(p.rows.count, 1),
                  dim3(threads < 32             ? 32
                       : threads < LOOP_THREADS ? (unsigned)threads
                                                : LOOP_THREADS),
                  0, p);
}

#endif
