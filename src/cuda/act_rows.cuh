/* act_rows.cuh - activation and glu on CUDA: out = act(gate), or act(gate) * value.

   A block has a piece of a row, or several short rows: blockDim.x threads of a row, blockDim.y rows. Each thread has
   UNITS units of W elements, blockDim.x apart, and loads them all before it uses the first. */
#ifndef ADZE_CUDA_ACT_ROWS_CUH
#define ADZE_CUDA_ACT_ROWS_CUH

#include "act.cuh"
#include "launch.cuh"
#include "rows.cuh"
#include "unit.cuh"

enum { GATE, OUT, VALUE, ACT_TENSORS, ACT_THREADS = 256 };

struct act_params {
    const void *gate, *value; /* value: NULL when there is none */
    void *out;
    int64_t units;   /* of a row */
    uint32_t pieces; /* of a row */
    int32_t act, steps;
    adze_rows rows;
};

template <typename T, bool TIMES, int W, int UNITS>
__global__ void __launch_bounds__(ACT_THREADS) act_rows(const __grid_constant__ act_params p)
{
    const uint32_t group = p.rows.count == 1 ? 0 : blockIdx.x / p.pieces;
    const int64_t r = (int64_t)group * blockDim.y + threadIdx.y;
    const int64_t first = (int64_t)(blockIdx.x - group * p.pieces) * (blockDim.x * UNITS) + threadIdx.x;
    pdl_launch_next();
    pdl_wait();
    if (r >= p.rows.count)
        return;
    const row_index index = row_split(p.rows, r);
    const T *gate = (const T *)p.gate + row_offset(p.rows, GATE, index) + first * W;
    const T *value = (const T *)p.value + (TIMES ? row_offset(p.rows, VALUE, index) + first * W : 0);
    T *out = (T *)p.out + row_offset(p.rows, OUT, index) + first * W;
    const int step = (int)blockDim.x * W;
    unit<T, W> g[UNITS], v[TIMES ? UNITS : 1];
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (first + u * blockDim.x < p.units) {
            g[u].fetch(gate + u * step);
            if constexpr (TIMES)
                v[u].fetch(value + u * step);
        }
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (first + u * blockDim.x < p.units) {
            float y[W], factor[W];
            g[u].get(y);
            act_all<W>(p.act, y);
            if constexpr (TIMES) {
                v[u].get(factor);
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[j] = (p.steps ? round_to<T>(y[j]) : y[j]) * factor[j];
            }
            store<T, W>(out + u * step, y);
        }
}

/* Threads for all units: few and small blocks when there is little to do, so that every SM takes part. A row's pieces
   are of equal size. */
template <typename T, bool TIMES, int W, int UNITS>
static adze_status act_launch(const char *op, adze_stream s, act_params p, int most)
{
    const int64_t pieces = (p.units + most * UNITS - 1) / (most * UNITS);
    int64_t threads = (p.units + pieces * UNITS - 1) / (pieces * UNITS), rows = 1;
    if (pieces > 1)
        threads = (threads + 31) / 32 * 32;
    else
        rows = most / threads;
    p.pieces = (uint32_t)pieces;
    return launch(op, s, act_rows<T, TIMES, W, UNITS>, (p.rows.count + rows - 1) / rows * pieces,
                  dim3((unsigned)threads, (unsigned)rows), 0, p);
}

template <typename T, bool TIMES>
static adze_status act_launch_as(const char *op, adze_stream s, act_params p, int64_t dim, bool aligned)
{
    if (!aligned) {
        p.units = dim;
        return act_launch<T, TIMES, 1, 4>(op, s, p, ACT_THREADS);
    }
    p.units = dim / VEC<T>;
    const int64_t total = p.units * p.rows.count, sm_count = adze_cuda_sm_count(s.device);
    if (total <= sm_count * 1024)
        return act_launch<T, TIMES, VEC<T>, 1>(op, s, p, total <= sm_count * 64 ? 64 : 128);
    return act_launch<T, TIMES, VEC<T>, 2>(op, s, p, ACT_THREADS);
}

/* The tensors are of one shape; those of a call without a value are two. */
template <bool TIMES>
static adze_status act_run(const char *op, adze_stream s, adze_tensor (&t)[ACT_TENSORS], int act, int steps)
{
    adze_tensor *const merged[] = {&t[GATE], &t[OUT], &t[VALUE]};
    const adze_tensor *const tensors[] = {&t[GATE], &t[OUT], &t[VALUE]};
    adze_merge(TIMES ? 3 : 2, merged, 0);
    act_params p = {};
    adze_rows_init(&p.rows, &t[OUT], ACT_TENSORS, tensors);
    const int64_t dim = t[OUT].shape[t[OUT].rank - 1];
    if (dim == 0 || p.rows.count == 0)
        return ADZE_OK;
    p.gate = t[GATE].data, p.value = t[VALUE].data, p.out = t[OUT].data;
    p.act = act, p.steps = steps;
    const bool aligned = rows_aligned(&t[GATE], dim) && rows_aligned(&t[OUT], dim) && rows_aligned(&t[VALUE], dim);
    switch (t[OUT].dtype) {
    case ADZE_F32: return act_launch_as<float, TIMES>(op, s, p, dim, aligned);
    case ADZE_F16: return act_launch_as<f16, TIMES>(op, s, p, dim, aligned);
    default: return act_launch_as<bf16, TIMES>(op, s, p, dim, aligned);
    }
}

#endif
