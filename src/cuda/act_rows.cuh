/* act_rows.cuh - activation and glu on CUDA: out = act(gate), or act(gate) * value.

   A block has a piece of a row, or several short rows: blockDim.x threads of a row, blockDim.y rows. Each thread has
   UNITS vectors, blockDim.x apart, and loads them all before it uses the first. act_rows is for aligned rows, act_any
   for any. */
#ifndef ADZE_CUDA_ACT_ROWS_CUH
#define ADZE_CUDA_ACT_ROWS_CUH

#include "act.cuh"
#include "launch.cuh"
#include "rows.cuh"
#include "unaligned.cuh"
#include "unit.cuh"

enum { GATE, OUT, VALUE, ACT_TENSORS, ACT_THREADS = 256 };

enum { ANY_UNITS = 2 }; /* of a thread of act_any */

template <typename ROWS>
struct act_params {
    const void *gate, *value; /* value: NULL when there is none */
    void *out;
    int64_t units;   /* vectors of a row, at most */
    uint32_t pieces; /* of a row */
    int32_t act;
    bool steps;
    uint32_t ask; /* the first blocks, which ask ahead for what they read */
    bool late;    /* the next kernel starts after the loads: before, many blocks of it would be in their way */
    ROWS rows;
};
typedef act_params<near_rows<ACT_TENSORS>> act_near;
template <typename ROWS>
struct act_any_params : act_params<ROWS> {
    int64_t dim;                      /* elements of a row */
    const void *gate_end, *value_end; /* of the tensors' memory */
};
typedef act_any_params<far_rows<ACT_TENSORS>> act_far;

/* y, times v if TIMES: with STEPS y is rounded before. */
template <bool TIMES, bool STEPS, typename T, int W, int UNITS>
__device__ __forceinline__ void act_write(const float (&y)[UNITS * W], const unit<T, W> (&v)[TIMES ? UNITS : 1],
                                          T *out, int units)
{
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int at = (int)threadIdx.x + u * (int)blockDim.x;
        float part[W], factor[W];
        if constexpr (TIMES)
            v[u].get(factor);
#pragma unroll
        for (int j = 0; j < W; j++)
            part[j] = TIMES && !STEPS ? y[u * W + j] * factor[j] : y[u * W + j];
        unit<T, W> result;
        result.set(part);
        if constexpr (TIMES && STEPS)
            result.multiply(v[u]);
        if (at < units)
            result.put(out + at * W);
    }
}

/* The row of a thread, the vector with which its block begins, and that row in each tensor. SINGLE: a block has one
   row, or a piece of it, whose address is then the same for all its threads. */
template <int UNITS, bool SINGLE, typename ROWS>
__device__ __forceinline__ int64_t act_locate(const act_params<ROWS> &p, uint32_t block, int64_t *piece,
                                              int64_t (&start)[ACT_TENSORS])
{
    const uint32_t group = p.rows.count == 1 ? 0 : block / p.pieces;
    const int64_t r = SINGLE ? (int64_t)group : (int64_t)group * blockDim.y + threadIdx.y;
    *piece = (int64_t)(block - group * p.pieces) * (blockDim.x * UNITS);
    p.rows.locate(r < p.rows.count ? r : 0, start);
    return r;
}

template <typename T, bool TIMES, int UNITS, bool SINGLE>
__device__ __forceinline__ void act_ask(const act_near &p)
{
    constexpr int W = VEC<T>;
    int64_t piece, start[ACT_TENSORS];
    if (!p.late)
        pdl_launch_next();
    act_locate<UNITS, SINGLE>(p, anew(blockIdx.x), &piece, start);
    if (threadIdx.x > 0)
        return;
    const int most = UNITS * (int)blockDim.x, vectors = p.units - piece < most ? (int)(p.units - piece) : most;
    prefetch_row((const T *)p.gate + start[GATE] + piece * W, vectors);
    if (TIMES)
        prefetch_row((const T *)p.value + start[VALUE] + piece * W, vectors);
}

template <typename T, bool TIMES, int UNITS, bool SINGLE>
__global__ void __launch_bounds__(ACT_THREADS) act_rows(const __grid_constant__ act_near p)
{
    constexpr int W = VEC<T>;
    if (blockIdx.x < p.ask)
        act_ask<T, TIMES, UNITS, SINGLE>(p);
    int64_t piece, start[ACT_TENSORS];
    const bool valid = act_locate<UNITS, SINGLE>(p, blockIdx.x, &piece, start) < p.rows.count;
    const T *gate = (const T *)p.gate + start[GATE] + piece * W;
    const T *value = (const T *)p.value + (TIMES ? start[VALUE] + piece * W : 0);
    T *out = (T *)p.out + start[OUT] + piece * W;
    int units = p.units - piece < INT32_MAX ? (int)(p.units - piece) : INT32_MAX;
    asm volatile("" : "+r"(units)); /* found before the wait: the compiler would move it behind */
    if (!p.late)
        pdl_launch_next();
    pdl_wait();
    if (!valid)
        return;
    unit<T, W> g[UNITS] = {}, v[TIMES ? UNITS : 1] = {};
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int at = (int)threadIdx.x + u * (int)blockDim.x;
        if (at < units) {
            g[u].fetch(gate + at * W);
            if constexpr (TIMES)
                v[u].fetch(value + at * W);
        }
    }
    if (p.late)
        pdl_launch_next();
    float y[UNITS * W];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        float part[W];
        g[u].get(part);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[u * W + j] = part[j];
    }
    act_all<UNITS * W, sizeof(T) == 2>(p.act, y);
    /* The branch is around the loop: in it, each of its turns would wait for the one before. */
    if (TIMES && p.steps)
        act_write<TIMES, true, T, W, UNITS>(y, v, out, units);
    else
        act_write<TIMES, false, T, W, UNITS>(y, v, out, units);
}

/* Any rows: a thread has ANY_UNITS vectors of a row's body, and elements of its ends (unaligned.cuh). */
template <typename T, bool TIMES, typename ROWS>
__global__ void __launch_bounds__(ACT_THREADS) act_any(const __grid_constant__ act_any_params<ROWS> p)
{
    constexpr int W = VEC<T>;
    int64_t piece, start[ACT_TENSORS];
    const bool valid = act_locate<ANY_UNITS, false>(p, blockIdx.x, &piece, start) < p.rows.count;
    const T *gate = (const T *)p.gate + start[GATE], *value = (const T *)p.value + (TIMES ? start[VALUE] : 0);
    T *out = (T *)p.out + start[OUT];
    const bool last = any_last(gate, p.dim, p.gate_end) || (TIMES && any_last(value, p.dim, p.value_end));
    const any_cut<int64_t> cut(out, p.dim, false, last);
    const int64_t first = piece + threadIdx.x;
    const T *gate_body = gate + cut.head, *value_body = value + cut.head;
    pdl_launch_next();
    if (blockIdx.x < p.ask && first < cut.vectors) {
        prefetch(gate_body + first * W);
        if (TIMES)
            prefetch(value_body + first * W);
    }
    pdl_wait();
    if (!valid)
        return;
    any_vector<16> g[ANY_UNITS], v[TIMES ? ANY_UNITS : 1];
#pragma unroll
    for (int u = 0; u < ANY_UNITS; u++) {
        const int64_t i = first + u * blockDim.x;
        if (i < cut.vectors) {
            g[u].fetch(gate_body + i * W);
            if constexpr (TIMES)
                v[u].fetch(value_body + i * W);
        }
    }
    const auto finish = [&](auto &y, const auto &factor, T *to) {
        constexpr int N = sizeof y / sizeof(float);
        act_all<N, sizeof(T) == 2>(p.act, y);
#pragma unroll
        for (int j = 0; j < N && TIMES; j++)
            y[j] = (p.steps ? round_to<T>(y[j]) : y[j]) * factor[j];
        any_store<T, N>(to, y);
    };
#pragma unroll
    for (int u = 0; u < ANY_UNITS; u++) {
        const int64_t i = first + u * blockDim.x;
        if (i < cut.vectors) {
            float y[W], factor[W];
            g[u].template get<T>(any_shift(gate_body), y);
            if constexpr (TIMES)
                v[u].template get<T>(any_shift(value_body), factor);
            finish(y, factor, out + cut.template vector<W>(i));
        }
    }
#pragma unroll 1
    for (int e = (int)threadIdx.x; piece == 0 && e < cut.ends; e += (int)blockDim.x) {
        const int64_t at = cut.template end<W>(e);
        float y[1] = {to_float(gate[at])}, factor[1] = {1};
        if (TIMES)
            factor[0] = to_float(value[at]);
        finish(y, factor, out + at);
    }
}

/* Few and small blocks when there is little to do, so that every SM takes part. */
template <typename T, bool TIMES, int UNITS>
static adze_status act_launch(const char *op, adze_stream s, act_near p, int most)
{
    const int sm_count = adze_cuda_sm_count(s.device);
    const unit_split split = split_units(p.units, UNITS, p.rows.count, most);
    p.pieces = (uint32_t)split.pieces;
    p.late = split.blocks > 2 * sm_count;
    const int64_t threads = split.block.x * split.block.y, reads = TIMES ? 2 : 1;
    p.ask = asking_blocks(sm_count, reads * p.units * p.rows.count / 2, reads * threads * UNITS, threads, 32);
    const auto kernel = split.rows == 1 ? act_rows<T, TIMES, UNITS, true> : act_rows<T, TIMES, UNITS, false>;
    return launch(op, s, kernel, split.blocks, split.block, 0, p);
}

template <typename T, bool TIMES, typename ROWS>
static adze_status act_launch_any(const char *op, adze_stream s, act_any_params<ROWS> p)
{
    p.units = p.dim / VEC<T> > 0 ? p.dim / VEC<T> : 1;
    const unit_split split = split_units(p.units, ANY_UNITS, p.rows.count, ACT_THREADS);
    const int64_t threads = split.block.x * split.block.y, reads = TIMES ? 2 : 1;
    p.pieces = (uint32_t)split.pieces;
    p.ask =
        asking_blocks(adze_cuda_sm_count(s.device), reads * p.units * p.rows.count / 2, reads * threads, threads, 32);
    return launch(op, s, act_any<T, TIMES, ROWS>, split.blocks, split.block, 0, p);
}

template <typename T, bool TIMES>
static adze_status act_launch_as(const char *op, adze_stream s, const act_far &g, bool aligned)
{
    if (!rows_are_near(g.rows))
        return act_launch_any<T, TIMES>(op, s, g);
    act_any_params<near_rows<ACT_TENSORS>> p = {};
    p.gate = g.gate, p.value = g.value, p.out = g.out, p.gate_end = g.gate_end, p.value_end = g.value_end;
    p.dim = g.dim, p.units = g.dim / VEC<T>, p.act = g.act, p.steps = g.steps;
    p.rows = rows_near(g.rows, {GATE, OUT, VALUE});
    if (!aligned)
        return act_launch_any<T, TIMES>(op, s, p);
    /* Two units a thread when there is one load for each, or the chain of an erf to hide. */
    if ((!TIMES || p.act == ADZE_ACT_GELU) && p.units * p.rows.count > (int64_t)adze_cuda_sm_count(s.device) * 1024)
        return act_launch<T, TIMES, 2>(op, s, p, ACT_THREADS);
    return act_launch<T, TIMES, 1>(op, s, p, ACT_THREADS / 2);
}

/* The tensors are of one shape; those of a call without a value are two. */
template <bool TIMES>
static adze_status act_run(const char *op, adze_stream s, adze_tensor (&t)[ACT_TENSORS], int act, int steps)
{
    adze_tensor *const merged[] = {&t[GATE], &t[OUT], &t[VALUE]};
    const adze_tensor *const tensors[] = {&t[GATE], &t[OUT], &t[VALUE]};
    adze_merge(TIMES ? 3 : 2, merged, 0);
    const int64_t dim = t[OUT].shape[t[OUT].rank - 1];
    act_far p = {};
    p.gate = t[GATE].data, p.value = t[VALUE].data, p.out = t[OUT].data, p.dim = dim, p.act = act,
    p.steps = steps != 0;
    p.gate_end = tensor_end(&t[GATE]), p.value_end = tensor_end(&t[VALUE]);
    adze_rows_init(&p.rows, &t[OUT], ACT_TENSORS, tensors);
    if (dim == 0 || p.rows.count == 0)
        return ADZE_OK;
    const bool aligned = rows_aligned(&t[GATE], dim) && rows_aligned(&t[OUT], dim) && rows_aligned(&t[VALUE], dim);
    switch (t[OUT].dtype) {
    case ADZE_F32: return act_launch_as<float, TIMES>(op, s, p, aligned);
    case ADZE_F16: return act_launch_as<f16, TIMES>(op, s, p, aligned);
    default: return act_launch_as<bf16, TIMES>(op, s, p, aligned);
    }
}

#endif
