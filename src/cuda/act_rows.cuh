/* act_rows.cuh - activation and glu on CUDA: out = act(gate), or act(gate) * value.

   A block works on a piece of a row, or on several short rows: blockDim.x threads per row, blockDim.y rows. Each
   thread has UNITS units of W elements, blockDim.x apart, and issues all loads before it uses the first. Units are
   16-byte vectors where rows are aligned. Where they are not, vectors are shifted (shifted.cuh) or units are narrower
   (unit.cuh). Where only the rows of the output have no gaps, they are written as one long row. */
#ifndef ADZE_CUDA_ACT_ROWS_CUH
#define ADZE_CUDA_ACT_ROWS_CUH

#include "act.cuh"
#include "launch.cuh"
#include "rows.cuh"
#include "shifted.cuh"

#include <algorithm>

enum { GATE, OUT, VALUE, ACT_TENSORS, ACT_THREADS = 256 };
constexpr int64_t ACT_DENSE_LEAST = 7 << 18; /* elements: fewer are faster by rows, as in gated_add */

enum { ACT_VECTOR1, ACT_VECTOR2, ACT_SHIFTED, ACT_DENSE, ACT_NARROW_SMALL, ACT_NARROW, ACT_SHORT, ACT_GENERAL };
constexpr adze_variant ACT_VARIANTS[] = {
    {"vector1", "aligned rows, a 16-byte vector per thread"},
    {"vector2", "aligned rows, two 16-byte vectors per thread"},
    {"shifted", "rows at any address, a 16-byte vector of the output per thread"},
    {"dense", "an output without gaps, at any address, two of its 16-byte vectors per thread, which go across rows"},
    {"narrow-small", "rows at any address, two units of one or two elements per thread"},
    {"narrow", "rows at any address, as many units per thread as make one or two vectors"},
    {"short", "rows at any address, their units numbered through all rows"},
    {"general", "every call, one element at a time"},
    {NULL, NULL},
};

template <typename ROWS>
struct act_params {
    const void *gate, *value; /* value: NULL when there is none */
    void *out;
    int64_t units;   /* of a row */
    int64_t dim;     /* elements of a row */
    int64_t rest;    /* elements after the units of the one row; 0 if there are more rows */
    uint32_t pieces; /* of a row */
    int32_t act;
    bool steps;
    uint32_t prefetch_blocks; /* blocks that prefetch their inputs, the first of the grid */
    bool launch_after_loads;  /* else blocks of the next kernel would compete with the loads of this one */
    ROWS rows;
};
typedef act_params<simple_rows<ACT_TENSORS>> act_simple;
typedef act_params<general_rows<ACT_TENSORS>> act_general;
typedef act_params<flat_rows<ACT_TENSORS>> act_flat;

/* Unit u of y, or of y * v if TIMES. `steps` rounds y before the product. */
template <bool TIMES, int UNITS, typename T, int W>
__device__ __forceinline__ unit<T, W> act_result(const float (&y)[UNITS * W],
                                                 const unit<T, W> (&v)[TIMES ? UNITS : 1], int u, bool steps)
{
    float part[W], factor[W];
    if constexpr (TIMES)
        v[u].get(factor);
#pragma unroll
    for (int j = 0; j < W; j++)
        part[j] = TIMES && !steps ? y[u * W + j] * factor[j] : y[u * W + j];
    unit<T, W> result;
    result.set(part);
    if constexpr (TIMES)
        if (steps)
            result.multiply(v[u]);
    return result;
}
/* Stores all units; the branch on STEPS is outside their loop. */
template <bool TIMES, bool STEPS, bool TILED, typename T, int W, int UNITS>
__device__ __forceinline__ void act_write(const float (&y)[UNITS * W], const unit<T, W> (&v)[TIMES ? UNITS : 1],
                                          T *out, int units)
{
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int at = unit_of<TILED, UNITS>(u);
        const unit<T, W> result = act_result<TIMES, UNITS>(y, v, u, STEPS);
        if (at < units)
            result.put(out + at * W);
    }
}

/* The row of a thread, the first vector of its block, and where the row begins in each tensor. SINGLE: a block has
   one row or a piece of one, so that the address is uniform over its threads. */
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

template <typename T, int W, bool TIMES, int UNITS, bool SINGLE, typename ROWS>
__device__ __forceinline__ void act_prefetch(const act_params<ROWS> &p)
{
    int64_t piece, start[ACT_TENSORS];
    if (!p.launch_after_loads)
        pdl_launch_next();
    act_locate<UNITS, SINGLE>(p, opaque(blockIdx.x), &piece, start);
    if (threadIdx.x > 0)
        return;
    const int most = UNITS * (int)blockDim.x, units = p.units - piece < most ? (int)(p.units - piece) : most;
    const T *const gate = (const T *)p.gate + start[GATE] + piece * W;
    const T *const value = (const T *)p.value + (TIMES ? start[VALUE] + piece * W : 0);
    if constexpr (W == VEC<T>) {
        prefetch_row(gate, units);
        if (TIMES)
            prefetch_row(value, units);
    } else {
        prefetch_bytes(gate, units * W * (int)sizeof(T));
        if (TIMES)
            prefetch_bytes(value, units * W * (int)sizeof(T));
    }
}

/* REST: single elements may follow the units. */
template <typename T, int W, bool TIMES, int UNITS, bool SINGLE, bool REST, typename ROWS>
__global__ void __launch_bounds__(ACT_THREADS) act_rows(const __grid_constant__ act_params<ROWS> p)
{
    constexpr bool TILED = SINGLE && W < VEC<T>;
    if (blockIdx.x < p.prefetch_blocks)
        act_prefetch<T, W, TIMES, UNITS, SINGLE>(p);
    int64_t piece, start[ACT_TENSORS];
    const bool valid = act_locate<UNITS, SINGLE>(p, blockIdx.x, &piece, start) < p.rows.count;
    const T *gate = (const T *)p.gate + start[GATE] + piece * W;
    const T *value = (const T *)p.value + (TIMES ? start[VALUE] + piece * W : 0);
    T *out = (T *)p.out + start[OUT] + piece * W;
    int units = p.units - piece < INT32_MAX ? (int)(p.units - piece) : INT32_MAX;
    asm volatile("" : "+r"(units)); /* computed before the wait: the compiler would sink it below */
    if (!p.launch_after_loads)
        pdl_launch_next();
    pdl_wait();
    if (!valid)
        return;
    unit<T, W> g[UNITS] = {}, v[TIMES ? UNITS : 1] = {};
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int at = unit_of<TILED, UNITS>(u);
        if (at < units) {
            g[u].fetch(gate + at * W);
            if constexpr (TIMES)
                v[u].fetch(value + at * W);
        }
    }
    if (p.launch_after_loads)
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
    /* The branch is outside the loop: inside, it would serialise the iterations. */
    if (TIMES && p.steps)
        act_write<TIMES, true, TILED, T, W, UNITS>(y, v, out, units);
    else
        act_write<TIMES, false, TILED, T, W, UNITS>(y, v, out, units);
    if (REST && blockIdx.x == 0 && threadIdx.x < p.rest) {
        const int64_t at = p.units * W + threadIdx.x;
        float last[1] = {to_float(((const T *)p.gate)[at])};
        act_all<1, sizeof(T) == 2>(p.act, last);
        if (TIMES)
            last[0] = (p.steps ? round_to<T>(last[0]) : last[0]) * to_float(((const T *)p.value)[at]);
        ((T *)p.out)[at] = from_float<T>(last[0]);
    }
}

/* Units are the vectors of the output, to which those of the inputs are shifted. */
template <typename T, bool TIMES, bool SINGLE>
__global__ void __launch_bounds__(ACT_THREADS) act_shifted(const __grid_constant__ act_simple p)
{
    constexpr int W = VEC<T>;
    int64_t piece, start[ACT_TENSORS];
    const bool valid = act_locate<1, SINGLE>(p, blockIdx.x, &piece, start) < p.rows.count;
    T *const out = (T *)p.out + start[OUT];
    const int dim = (int)p.dim, at = ((int)piece + (int)threadIdx.x) * W - shifted_head(out);
    if (!p.launch_after_loads)
        pdl_launch_next();
    pdl_wait();
    if (!valid || at >= dim)
        return;
    shifted<1> g, v[1];
    g.fetch((const T *)p.gate + start[GATE], at, dim);
    if constexpr (TIMES)
        v[0].fetch((const T *)p.value + start[VALUE], at, dim);
    if (p.launch_after_loads)
        pdl_launch_next();
    float y[W];
    g.template get<T>(y);
    act_all<W, sizeof(T) == 2>(p.act, y);
    unit<T, W> factor[1] = {};
    if constexpr (TIMES)
        factor[0].v = v[0].template vector<T>(0);
    store_shifted(out, at, dim, act_result<TIMES, 1>(y, factor, 0, p.steps).v);
}

/* An output whose rows have no gaps is one long row. A vector of it may go from one row of the inputs into the next,
   once in a row: dim is at least W. */
struct act_dense_params : act_simple {
    int32_t length; /* of the output, in elements */
    divisor by_dim;
};
constexpr int ACT_DENSE_THREADS = ACT_THREADS / 2, ACT_DENSE_UNITS = 2;

/* Replaces what a vector has from element `from` on by what `next` has there. */
template <typename T>
__device__ __forceinline__ void act_join(shifted<1> &vector, const shifted<1> &next, int from)
{
    constexpr int PER_WORD = 4 / (int)sizeof(T);
    const uint4 low = vector.template vector<T>(0).raw, high = next.template vector<T>(0).raw;
    const uint32_t a[4] = {low.x, low.y, low.z, low.w}, b[4] = {high.x, high.y, high.z, high.w};
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t both = PER_WORD == 2 ? (a[i] & 0xffffu) | (b[i] & 0xffff0000u) : b[i];
        w[i] = (i + 1) * PER_WORD <= from ? a[i] : i * PER_WORD >= from ? b[i] : both;
    }
    vector.part[0] = make_uint4(w[0], w[1], w[2], w[3]);
    vector.shift = 0;
}

template <typename T, bool TIMES>
__global__ void __launch_bounds__(ACT_DENSE_THREADS) act_dense(const __grid_constant__ act_dense_params p)
{
    constexpr int W = VEC<T>, UNITS = ACT_DENSE_UNITS, STEP = ACT_DENSE_THREADS * W;
    T *const out = (T *)p.out;
    const int dim = (int)p.dim, length = p.length;
    const int first = (int)blockIdx.x * (UNITS * STEP) + (int)threadIdx.x * W - shifted_head(out);
    const auto row_of = [&](int at) { return divide((uint32_t)max(at, 0), p.by_dim); };
    const auto fetch = [&](uint32_t row, int column, shifted<1> &g, shifted<1> *v) {
        int64_t start[ACT_TENSORS];
        p.rows.locate(row, start);
        g.fetch((const T *)p.gate + start[GATE], column, dim);
        if constexpr (TIMES)
            v->fetch((const T *)p.value + start[VALUE], column, dim);
    };
    if (!p.launch_after_loads)
        pdl_launch_next();
    pdl_wait();
    if (first >= length)
        return;
    shifted<1> g[UNITS] = {}, v[TIMES ? UNITS : 1] = {};
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int at = first + u * STEP;
        if (at >= length)
            break;
        const uint32_t row = row_of(at);
        fetch(row, at - (int)row * dim, g[u], &v[TIMES ? u : 0]);
    }
    /* All other loads come first: these are waited for. */
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int at = first + u * STEP;
        if (at >= length)
            break;
        const int row = (int)row_of(at), rest = (row + 1) * dim - at;
        if (rest >= W || at + rest == length)
            continue;
        shifted<1> next_g, next_v;
        fetch((uint32_t)row + 1, -rest, next_g, &next_v);
        act_join<T>(g[u], next_g, rest);
        if constexpr (TIMES)
            act_join<T>(v[u], next_v, rest);
    }
    if (p.launch_after_loads)
        pdl_launch_next();
    float y[UNITS * W];
    unit<T, W> factor[TIMES ? UNITS : 1] = {};
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        float part[W];
        g[u].template get<T>(part);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[u * W + j] = part[j];
        if constexpr (TIMES)
            factor[u].v = v[u].template vector<T>(0);
    }
    act_all<UNITS * W, sizeof(T) == 2>(p.act, y);
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int at = first + u * STEP;
        const unit<T, W> result = act_result<TIMES, UNITS>(y, factor, u, p.steps);
        if (at < length)
            store_shifted(out, at, length, result.v);
    }
}

/* Short rows: the units of all rows are numbered consecutively, so that no lane idles. */
template <typename T, int W, bool TIMES, int UNITS>
__global__ void __launch_bounds__(ACT_THREADS) act_short(const __grid_constant__ act_flat p)
{
    const uint32_t first = blockIdx.x * (uint32_t)(ACT_THREADS * UNITS) + (uint32_t)unit_of<true, UNITS>(0);
    auto place = p.rows.template first<W>(first);
    int64_t out[UNITS];
    pdl_wait();
    unit<T, W> g[UNITS] = {}, v[TIMES ? UNITS : 1] = {};
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        if (first + u * 32 < p.rows.count) {
            g[u].fetch((const T *)p.gate + p.rows.offset(place, GATE));
            if constexpr (TIMES)
                v[u].fetch((const T *)p.value + p.rows.offset(place, VALUE));
        }
        out[u] = p.rows.offset(place, OUT);
        p.rows.advance(place);
    }
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
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const unit<T, W> result = act_result<TIMES, UNITS>(y, v, u, p.steps);
        if (first + u * 32 < p.rows.count)
            result.put((T *)p.out + out[u]);
    }
}

/* Whether blocks are so many that the next kernel starts after their loads. */
static inline bool act_late(const cuda_limits &gpu, int64_t blocks)
{
    return blocks > 2 * gpu.sm_count;
}

/* Small blocks when there is little to do, so that every SM gets some. */
template <typename T, int W, bool TIMES, int UNITS, bool REST, typename ROWS>
static adze_status act_launch(const cuda_call &s, act_params<ROWS> p, int most)
{
    unit_split split = split_units(p.units, UNITS, p.rows.count, most);
    if (W < VEC<T> && split.rows == 1)
        split.block.x = (split.block.x + 31) / 32 * 32;
    p.pieces = (uint32_t)split.pieces;
    p.launch_after_loads = act_late(s.gpu, split.blocks);
    const int64_t threads = split.block.x * split.block.y, reads = TIMES ? 2 : 1;
    p.prefetch_blocks = prefetch_blocks(s.gpu, reads * p.units * W / VEC<T> * p.rows.count / 2,
                                        ceil_div(reads * threads * UNITS * W, VEC<T>), threads, 32);
    const auto kernel = REST || split.rows == 1 ? act_rows<T, W, TIMES, UNITS, true, REST, ROWS>
                                                : act_rows<T, W, TIMES, UNITS, false, REST, ROWS>;
    return launch(s, kernel, split.blocks, split.block, 0, p);
}

template <typename T, bool TIMES>
static adze_status act_launch_shifted(const cuda_call &s, act_simple p)
{
    const unit_split split = split_units(shifted_most<T>(p.dim), 1, p.rows.count, ACT_THREADS);
    p.pieces = (uint32_t)split.pieces;
    p.launch_after_loads = act_late(s.gpu, split.blocks);
    const auto kernel = split.rows == 1 ? act_shifted<T, TIMES, true> : act_shifted<T, TIMES, false>;
    return launch(s, kernel, split.blocks, split.block, 0, p);
}

/* Whether act_dense can take a call. */
template <typename T>
static bool act_is_dense(const act_simple &p, int64_t dim)
{
    const simple_rows<ACT_TENSORS> &rows = p.rows;
    const int64_t inner = rows.size[1] ? rows.size[1] : rows.count, middle = rows.size[0] ? rows.size[0] : 1;
    return dim >= VEC<T> && dim < (1 << 28) &&
           rows.count * dim <= INT32_MAX - 2 * ACT_DENSE_UNITS * ACT_DENSE_THREADS * VEC<T> &&
           (inner == 1 || rows.stride[OUT] == dim) && (!rows.size[1] || rows.outer[1][OUT] == inner * dim) &&
           (!rows.size[0] || rows.outer[0][OUT] == middle * inner * dim);
}
template <typename T, bool TIMES>
static adze_status act_launch_dense(const cuda_call &s, const act_simple &simple, int64_t dim)
{
    act_dense_params p = {};
    (act_simple &)p = simple;
    p.length = (int32_t)(p.rows.count * dim);
    p.by_dim = divisor_of(dim);
    const int64_t blocks = ceil_div(shifted_most<T>(p.length), ACT_DENSE_THREADS * ACT_DENSE_UNITS);
    p.launch_after_loads = act_late(s.gpu, blocks);
    return launch(s, act_dense<T, TIMES>, blocks, dim3(ACT_DENSE_THREADS), 0, p);
}

/* What the choice of a variant sees of a call with simple rows. */
struct act_sizes {
    int64_t rows, dim;
    int pair; /* elements of a narrow unit */
    int act;
    bool vector1, vector2, flat, dense; /* whether these variants can take it; flat: act_short */
};

/* The fastest variant, by the times of all of them on 179 random calls (H200, 2026-11-18); where the choice is not
   the best, the loss is 1 % on average. In words: a call of few blocks has small units, as the chain of a thread's
   activations takes longer than the loads; a large one has vectors, or units that make vectors. In between, it pays
   to have few enough blocks that the next kernel starts early (act_late): that takes 0.5 us off a call of 1.8 us. */
template <typename T, bool TIMES>
static int act_choose(const cuda_limits &gpu, const act_sizes &c)
{
    constexpr int W = VEC<T>;
    const auto few = [&](int width, int units, int threads) {
        return !act_late(gpu, split_units(c.dim / width, units, c.rows, threads).blocks);
    };
    const int64_t each = c.rows * c.dim / gpu.sm_count;
    const bool silu = c.act == ADZE_ACT_SILU;
    if (sizeof(T) == 4) { /* four elements of a thread, or 8 */
        if (c.rows > 1 && few(1, 2, ACT_THREADS / 2))
            return ACT_NARROW_SMALL;
        if (few(1, W, ACT_THREADS))
            return !TIMES ? ACT_GENERAL : c.vector1 && c.rows > 1 ? ACT_VECTOR1 : ACT_NARROW;
        if (TIMES ? c.vector1 : c.vector2)
            return TIMES || (c.rows == 1 && !silu && each <= 4096) ? ACT_VECTOR1 : ACT_VECTOR2;
        return c.flat && c.dim < 4 * ACT_THREADS && each > 2048 ? ACT_SHORT : ACT_NARROW;
    }
    if (few(c.pair, 2, ACT_THREADS / 2))
        return ACT_NARROW_SMALL;
    const bool large = each > (TIMES && silu ? 6144 : 8192), gated = TIMES && !large;
    if (c.vector1) {
        if (few(W, 1, ACT_THREADS / 2))
            return ACT_VECTOR1;
        if (!large)
            return gated ? ACT_NARROW : c.flat && c.pair == 2 ? ACT_SHORT : ACT_VECTOR1;
        return c.vector2 ? ACT_VECTOR2 : ACT_VECTOR1;
    }
    /* Rows of less than two units per thread of a block leave threads of it idle. */
    const bool part = c.flat && c.dim / c.pair < 2 * ACT_THREADS;
    if (c.pair == 2)
        return part || (!TIMES && c.flat && each <= 4096) ? ACT_SHORT : ACT_NARROW;
    if (c.flat && (c.dim < 8 * W || (TIMES && part && !large)))
        return ACT_SHORT; /* rows of fewer than 8 vectors are mostly the ends that act_shifted stores one by one */
    if (each <= (TIMES ? 2048 : 4096)) /* act_short finds its rows faster, and one row need not be found */
        return c.flat && c.rows > 1 ? ACT_SHORT : ACT_GENERAL;
    if (gated || c.dim < W)
        return ACT_NARROW;
    /* With two inputs act_shifted took 0.7 to 0.9 times as long as act_dense, in rows of 200 to 1500 (2026-11-19). */
    return !TIMES && c.dense && c.rows * c.dim > ACT_DENSE_LEAST ? ACT_DENSE : ACT_SHIFTED;
}

/* Units of less than 16 bytes: a thread has several, so that as many bytes are in flight, and fewer where there is
   little to do. */
template <typename T, int W, bool TIMES>
static adze_status act_launch_narrow(const cuda_call &s, const act_simple &p, int choice)
{
    constexpr int UNITS = (TIMES ? 1 : 2) * VEC<T> / W, SHORT_UNITS = VEC<T> / W;
    if (s.takes(ACT_SHORT, rows_are_flat(p.rows, p.units, W), choice == ACT_SHORT)) {
        act_flat flat = {};
        flat.gate = p.gate, flat.value = p.value, flat.out = p.out, flat.act = p.act, flat.steps = p.steps;
        flat.rows = rows_flat(p.rows, p.units, W);
        const bool little = p.units * p.rows.count <= (int64_t)s.gpu.sm_count * ACT_THREADS * UNITS;
        const auto kernel = little ? act_short<T, W, TIMES, 2> : act_short<T, W, TIMES, SHORT_UNITS>;
        return launch(s, kernel, ceil_div(flat.rows.count, ACT_THREADS * (little ? 2 : SHORT_UNITS)),
                      dim3(ACT_THREADS), 0, flat);
    }
    if (s.takes(ACT_NARROW_SMALL, true, choice == ACT_NARROW_SMALL))
        return act_launch<T, W, TIMES, 2, false>(s, p, ACT_THREADS / 2);
    return s.takes(ACT_NARROW, true) ? act_launch<T, W, TIMES, UNITS, false>(s, p, ACT_THREADS) : ADZE_NO_KERNEL;
}

template <typename T, bool TIMES>
static adze_status act_launch_as(const cuda_call &s, act_general g, int64_t dim, int width)
{
    const bool is_simple = rows_are_simple(g.rows);
    act_simple p = {};
    act_sizes c = {};
    if (is_simple) {
        p.gate = g.gate, p.value = g.value, p.out = g.out, p.act = g.act, p.steps = g.steps;
        p.rows = rows_simple(g.rows, {GATE, OUT, VALUE});
        p.units = dim / VEC<T>;
        p.rest = p.rows.count == 1 ? dim % VEC<T> : 0;
        c.rows = p.rows.count, c.dim = dim, c.act = p.act;
        c.pair = sizeof(T) < 4 && width > 1 && dim % 2 == 0 ? 2 : 1;
        /* The rest of a row needs as many threads as it has elements. */
        c.vector1 = width == 16 && (!p.rest || p.units >= VEC<T>);
        c.vector2 = width == 16 && (!p.rest || p.units >= 2 * VEC<T>);
        c.flat = rows_are_flat(p.rows, dim / c.pair, c.pair);
        c.dense = act_is_dense<T>(p, dim);
    }
    const int choice = is_simple ? act_choose<T, TIMES>(s.gpu, c) : ACT_GENERAL;
    g.units = dim;
    if (s.takes(ACT_GENERAL, true, choice == ACT_GENERAL))
        return act_launch<T, 1, TIMES, VEC<T>, false>(s, g, ACT_THREADS);
    if (!is_simple)
        return ADZE_NO_KERNEL;
    if (s.takes(ACT_VECTOR2, c.vector2, choice == ACT_VECTOR2))
        return p.rest ? act_launch<T, VEC<T>, TIMES, 2, true>(s, p, ACT_THREADS)
                      : act_launch<T, VEC<T>, TIMES, 2, false>(s, p, ACT_THREADS);
    if (s.takes(ACT_VECTOR1, c.vector1, choice == ACT_VECTOR1))
        return p.rest ? act_launch<T, VEC<T>, TIMES, 1, true>(s, p, ACT_THREADS / 2)
                      : act_launch<T, VEC<T>, TIMES, 1, false>(s, p, ACT_THREADS / 2);
    p.rest = 0;
    p.dim = dim;
    if (s.takes(ACT_SHIFTED, dim < (1 << 28), choice == ACT_SHIFTED))
        return act_launch_shifted<T, TIMES>(s, p);
    if (s.takes(ACT_DENSE, c.dense, choice == ACT_DENSE))
        return act_launch_dense<T, TIMES>(s, p, dim);
    if constexpr (sizeof(T) < 4)
        if (c.pair == 2) {
            p.units = dim / 2;
            return act_launch_narrow<T, 2, TIMES>(s, p, choice);
        }
    p.units = dim;
    return act_launch_narrow<T, 1, TIMES>(s, p, choice);
}

/* All tensors have one shape; without a value there are two of them. */
template <bool TIMES>
static adze_status act_run(const cuda_call &s, adze_tensor (&t)[ACT_TENSORS], int act, int steps)
{
    adze_tensor *const merged[] = {&t[GATE], &t[OUT], &t[VALUE]};
    const adze_tensor *const tensors[] = {&t[GATE], &t[OUT], &t[VALUE]};
    adze_merge(TIMES ? 3 : 2, merged, 0);
    const int64_t dim = t[OUT].shape[t[OUT].rank - 1];
    act_general p = {};
    p.gate = t[GATE].data, p.value = t[VALUE].data, p.out = t[OUT].data, p.act = act, p.steps = steps != 0;
    adze_rows_init(&p.rows, &t[OUT], ACT_TENSORS, tensors);
    if (dim == 0 || p.rows.count == 0)
        return ADZE_OK;
    /* A single row may have any length: the tail after its vectors is handled element by element. */
    const int64_t even = p.rows.count == 1 ? dim / 16 * 16 : dim;
    int width = 16;
    for (int i = 0; i < (TIMES ? 3 : 2); i++)
        width = std::min(width, rows_width(tensors[i], even));
    return s.tuned(t[OUT].dtype | act << 4 | width << 12 | p.steps << 20, p.rows.count, dim, 0, 0, [&] {
        switch (t[OUT].dtype) {
        case ADZE_F32: return act_launch_as<float, TIMES>(s, p, dim, width);
        case ADZE_F16: return act_launch_as<f16, TIMES>(s, p, dim, width);
        default: return act_launch_as<bf16, TIMES>(s, p, dim, width);
        }
    });
}

#endif
