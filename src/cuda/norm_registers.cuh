/* norm_registers.cuh - the calls of rms_norm and layer_norm that models make, on CUDA.

   A row is read once and held in registers, packed, until it is written: VECTORS 16-byte vectors in each of its
   threads. LANES > 0: that many lanes of a warp share a row; LANES 0: the threads of a block with the same
   threadIdx.y do. A block has several rows, because the GPU launches blocks more slowly than it could finish them.
   All loads of a thread are issued before the first is used. The loads of what multiplies the row later (the weight,
   or scale and shift) are in flight before the sum is known. */
#ifndef ADZE_CUDA_NORM_REGISTERS_CUH
#define ADZE_CUDA_NORM_REGISTERS_CUH

#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "vec.cuh"

constexpr int NORM_ROWS = 8; /* of a block, at most, where LANES is 0 */

enum norm_fusion {
    PLAIN,        /* weight and bias, if any */
    ADDED,        /* a weight, then a residual is added; each result is rounded */
    RESIDUAL_SUM, /* weight and bias, if any, after the sum with a residual */
    MODULATED,    /* scale and shift, with or without tables */
    BLOCK         /* MODULATED after the sum with a residual, with or without a gate */
};
template <norm_fusion FUSION>
constexpr bool adds = FUSION == RESIDUAL_SUM || FUSION == BLOCK;
template <norm_fusion FUSION>
constexpr bool has_residual = adds<FUSION> || FUSION == ADDED;
template <norm_fusion FUSION>
constexpr bool modulates = FUSION == MODULATED || FUSION == BLOCK;

/* The tensors of a fusion that have rows, in order, and its vectors that all rows share. */
enum { X_ROW, OUT_ROW, RESIDUAL_ROW, SUM_ROW }; /* scale, shift, gate follow; in MODULATED after OUT_ROW */
enum { WEIGHT, BIAS };                          /* of fusions without modulation */
enum { SCALE_TABLE_AT, SHIFT_TABLE_AT, GATE_TABLE_AT };
template <norm_fusion FUSION>
constexpr int scale_row = FUSION == BLOCK ? 4 : 2;
template <norm_fusion FUSION>
constexpr int row_tensors = FUSION == PLAIN   ? 2
                            : FUSION == ADDED ? 3
                            : FUSION == BLOCK ? 7
                                              : 4;

template <norm_fusion FUSION>
struct norm_registers_params {
    const void *row[row_tensors<FUSION>];
    const void *flat[3];
    int32_t vectors;
    float eps, inverse_dim, weight_offset;              /* added to a weight, or to a scale in float */
    uint32_t prefetch_blocks, prefetch_residual_blocks; /* the first blocks of the grid prefetch */
    simple_rows<row_tensors<FUSION>> rows;
};

/* Issues the loads of all VECTORS vectors of a thread. */
template <bool FULL, typename T, int VECTORS>
__device__ __forceinline__ void norm_fetch(packed<T> (&to)[VECTORS], const void *data, int thread, int threads,
                                           int vectors)
{
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (!FULL)
            to[v].raw = make_uint4(0, 0, 0, 0);
        if (FULL || thread + v * threads < vectors)
            to[v] = load_packed((const T *)data + (thread + v * threads) * VEC<T>);
    }
}

/* W parameters of dtype S that multiply or shift W values of x. */
template <typename S, int W>
struct param_vector {
    packed<S> part[W / VEC<S>];
    __device__ __forceinline__ void get(float (&f)[W]) const
    {
#pragma unroll
        for (int i = 0; i < W / VEC<S>; i++) {
            float some[VEC<S>];
            part[i].get(some);
#pragma unroll
            for (int j = 0; j < VEC<S>; j++)
                f[i * VEC<S> + j] = some[j];
        }
    }
};
template <typename S, int W>
__device__ __forceinline__ param_vector<S, W> param_load(const void *data, int at)
{
    param_vector<S, W> to;
#pragma unroll
    for (int i = 0; i < W / VEC<S>; i++)
        to.part[i] = load_packed((const S *)data + at + i * VEC<S>);
    return to;
}
template <bool FULL, typename S, int W, int VECTORS>
__device__ __forceinline__ void param_fetch(param_vector<S, W> (&to)[VECTORS], const void *data, int thread,
                                            int threads, int vectors)
{
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        if (FULL || thread + v * threads < vectors)
            to[v] = param_load<S, W>(data, (thread + v * threads) * W);
}

/* param + table, in float. */
template <typename S, int W>
__device__ __forceinline__ void add_table(const void *table, int at, float (&param)[W])
{
    float f[W];
    load<S, W>((const S *)table + at, f);
#pragma unroll
    for (int j = 0; j < W; j++)
        param[j] += f[j];
}
/* param + table, rounded. */
template <bool TABLE, typename T>
__device__ __forceinline__ packed<T> param_with_table(packed<T> param, const void *table, int at)
{
    if constexpr (TABLE)
        return packed_add(param, load_packed((const T *)table + at));
    return param;
}

/* The sum over the threads of a row. */
template <int LANES>
__device__ __forceinline__ float norm_total(float v, float (&part)[32])
{
    if constexpr (LANES > 0)
        return warp_sum<LANES>(v);
    else
        return row_sum(v, part);
}

/* The minimum blocks per SM of the launch bounds: as measured on compute capability 9.0, and without spills on
   others. */
constexpr int norm_room(int blocks, int vectors)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    return 1;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ > 900
    return vectors > 4 ? 0 : blocks < 2 ? blocks : 2;
#else
    return blocks;
#endif
}

/* Where row r of each tensor begins. Threads beyond the last row repeat it and write nothing: shuffles and barriers
   need them all. */
template <typename T, typename S, norm_fusion FUSION>
__device__ __forceinline__ void norm_locate(const norm_registers_params<FUSION> &p, uint32_t r,
                                            const void *(&row)[row_tensors<FUSION>])
{
    int64_t at[row_tensors<FUSION>];
    p.rows.locate(r < p.rows.count ? r : p.rows.count - 1, at);
#pragma unroll
    for (int t = 0; t < row_tensors<FUSION>; t++)
        row[t] = (const char *)p.row[t] +
                 at[t] * (int64_t)(modulates<FUSION> && t >= scale_row<FUSION> ? sizeof(S) : sizeof(T));
}

/* Prefetches x and the parameters that all rows share; of parameters that some rows share, the first vector. BLOCK
   does not prefetch: it reads more than it has registers for, and was slower with it. */
template <typename TRAITS>
__device__ __forceinline__ void norm_prefetch(const norm_registers_params<TRAITS::FUSION> &p)
{
    typedef typename TRAITS::T T;
    typedef typename TRAITS::S S;
    constexpr norm_fusion FUSION = TRAITS::FUSION;
    constexpr int LANES = TRAITS::LANES, VECTORS = TRAITS::VECTORS;
    constexpr bool FULL = TRAITS::FULL;
    constexpr int lanes = LANES ? LANES : 32, param_vectors = VEC<T> * (int)sizeof(S) / 16;
    pdl_launch_next();
    const uint32_t block = opaque(blockIdx.x), in_block = LANES ? threadIdx.x / lanes : threadIdx.y;
    const int thread = LANES ? (int)threadIdx.x % lanes : (int)threadIdx.x, threads = LANES ? LANES : (int)blockDim.x;
    const void *row[row_tensors<FUSION>];
    norm_locate<T, S, FUSION>(p, block * (LANES ? blockDim.x / lanes : blockDim.y) + in_block, row);
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        if (FULL || thread + v * threads < p.vectors)
            prefetch((const T *)row[X_ROW] + (thread + v * threads) * VEC<T>);
    if (block > 0 || in_block > 0 || thread > 0)
        return;
#pragma unroll
    for (int t = scale_row<FUSION>; t < row_tensors<FUSION> && modulates<FUSION>; t++)
        prefetch_row(p.row[t], p.vectors * param_vectors);
#pragma unroll
    for (int f = 0; f < 3; f++)
        if (p.flat[f])
            prefetch_row(p.flat[f], p.vectors * param_vectors);
}

/* What is known of a call at compile time. x, residual and out are T; scale, shift, gate and their tables are S.
   ROUND: before the weight, or after each step of a modulation. EXTRA: there is a weight, or there are tables. */
template <typename ELEMENT, typename PARAMETER, bool IS_CENTRED, norm_fusion OPERATIONS, bool ROUNDS, bool HAS_EXTRA>
struct norm_form {
    typedef ELEMENT T;
    typedef PARAMETER S;
    static constexpr bool CENTRED = IS_CENTRED, ROUND = ROUNDS, EXTRA = HAS_EXTRA;
    static constexpr norm_fusion FUSION = OPERATIONS;
};

/* TRAITS are those of a form, and the shape that the instance is compiled for (norm_shapes.cuh). FULL: a row has
   exactly as many vectors as its threads hold. EARLY: what multiplies the row is loaded with it, not after the sum,
   which costs registers and hides latency. MOST threads per block and BLOCKS per SM bound the registers. */
template <typename TRAITS>
__global__ void __launch_bounds__(TRAITS::MOST, norm_room(TRAITS::BLOCKS, TRAITS::VECTORS))
    norm_registers(const __grid_constant__ norm_registers_params<TRAITS::FUSION> p)
{
    typedef typename TRAITS::T T;
    typedef typename TRAITS::S S;
    constexpr bool CENTRED = TRAITS::CENTRED, ROUND = TRAITS::ROUND, EXTRA = TRAITS::EXTRA;
    constexpr bool FULL = TRAITS::FULL, EARLY = TRAITS::EARLY;
    constexpr norm_fusion FUSION = TRAITS::FUSION;
    constexpr int LANES = TRAITS::LANES, VECTORS = TRAITS::VECTORS;
    constexpr int W = VEC<T>, lanes = LANES ? LANES : 32, PARAM_VECTORS = EARLY && modulates<FUSION> ? VECTORS : 1;
    constexpr bool TABLES = EXTRA && modulates<FUSION>, WEIGHTED = EXTRA && !modulates<FUSION>;
    constexpr int scale_at = scale_row<FUSION>, shift_at = scale_at + 1, gate_at = scale_at + 2;
    __shared__ __align__(16) float part[LANES ? 1 : 2][LANES ? 1 : NORM_ROWS][32];
    if constexpr (FUSION != BLOCK)
        if (blockIdx.x < p.prefetch_blocks)
            norm_prefetch<TRAITS>(p);
    const int thread = LANES ? (int)threadIdx.x % lanes : (int)threadIdx.x, threads = LANES ? LANES : (int)blockDim.x;
    const uint32_t in_block = LANES ? threadIdx.x / lanes : threadIdx.y;
    const uint32_t r = blockIdx.x * (LANES ? blockDim.x / lanes : blockDim.y) + in_block;
    const bool writes = r < p.rows.count;
    const void *row[row_tensors<FUSION>], *const *flat = p.flat;
    norm_locate<T, S, FUSION>(p, r, row);
    const int vectors = p.vectors;
    pdl_launch_next();
    /* The preceding kernel has just written x, but the residual is older and may have left L2. */
    if (has_residual<FUSION> && thread == 0 && blockIdx.x < p.prefetch_residual_blocks)
        prefetch_row(row[RESIDUAL_ROW], vectors);
    pdl_wait();

    packed<T> x[VECTORS], residual[has_residual<FUSION> ? VECTORS : 1], weight[EARLY && WEIGHTED ? VECTORS : 1];
    param_vector<S, W> scale[PARAM_VECTORS], shift[PARAM_VECTORS];
    norm_fetch<FULL>(x, row[X_ROW], thread, threads, vectors);
    if constexpr (has_residual<FUSION>)
        norm_fetch<FULL>(residual, row[RESIDUAL_ROW], thread, threads, vectors);
    if constexpr (modulates<FUSION> && EARLY) {
        param_fetch<FULL>(scale, row[scale_at], thread, threads, vectors);
        param_fetch<FULL>(shift, row[shift_at], thread, threads, vectors);
    } else if constexpr (EARLY && WEIGHTED) {
        norm_fetch<FULL>(weight, flat[WEIGHT], thread, threads, vectors);
    }

    float sum = 0, mean = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int i = (thread + v * threads) * W;
        float h[W];
        if constexpr (adds<FUSION>) {
            if (FULL || thread + v * threads < vectors) {
                if constexpr (FUSION == BLOCK && ROUND) {
                    if (p.row[gate_at])
                        x[v] = packed_mul(x[v], param_with_table<TABLES>(load_packed((const T *)row[gate_at] + i),
                                                                         flat[GATE_TABLE_AT], i));
                    x[v] = packed_add(x[v], residual[v]);
                } else {
                    float other[W];
                    x[v].get(h);
                    if constexpr (FUSION == BLOCK) {
                        if (p.row[gate_at]) {
                            load<S, W>((const S *)row[gate_at] + i, other);
                            if (TABLES)
                                add_table<S, W>(flat[GATE_TABLE_AT], i, other);
#pragma unroll
                            for (int j = 0; j < W; j++)
                                h[j] *= other[j];
                        }
                    }
                    residual[v].get(other);
#pragma unroll
                    for (int j = 0; j < W; j++)
                        h[j] += other[j];
                    x[v].set(h);
                }
                if (p.row[SUM_ROW] && writes)
                    store_packed((T *)row[SUM_ROW] + i, x[v]);
            }
        }
        x[v].get(h);
#pragma unroll
        for (int j = 0; j < W; j++)
            sum += CENTRED ? h[j] : h[j] * h[j];
    }
    sum = norm_total<LANES>(sum, part[0][LANES ? 0 : in_block]);
    keep_packed(x);
    if constexpr (FUSION == ADDED)
        keep_packed(residual);
    if constexpr (modulates<FUSION> && EARLY) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            keep_packed(scale[v].part), keep_packed(shift[v].part);
    } else if constexpr (EARLY && WEIGHTED) {
        keep_packed(weight);
    }
    if (CENTRED) {
        mean = sum * p.inverse_dim;
        sum = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            float h[W];
            x[v].get(h);
            if (FULL || thread + v * threads < vectors) {
#pragma unroll
                for (int j = 0; j < W; j++)
                    sum += (h[j] - mean) * (h[j] - mean);
            }
        }
        sum = norm_total<LANES>(sum, part[!LANES][LANES ? 0 : in_block]);
        keep_packed(x);
    }
    if constexpr (FUSION == MODULATED && EARLY) /* registers are too few to keep the address of out */
        norm_locate<T, S, FUSION>(p, opaque(r), row);
    const float factor = rsqrtf(sum * p.inverse_dim + p.eps);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int i = (thread + v * threads) * W;
        if ((!FULL && thread + v * threads >= vectors) || !writes)
            continue;
        float y[W];
        packed<T> out;
        x[v].get(y);
        /* The mean first: where it is large, x * factor - mean * factor is the difference of two rounded numbers. */
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] = CENTRED ? (y[j] - mean) * factor : y[j] * factor;
        out.set(y);
        if constexpr (modulates<FUSION>) {
            param_vector<S, W> by = EARLY ? scale[v * EARLY] : param_load<S, W>(row[scale_at], i);
            param_vector<S, W> more = EARLY ? shift[v * EARLY] : param_load<S, W>(row[shift_at], i);
            if constexpr (ROUND) {
                by.part[0] =
                    packed_add(param_with_table<TABLES>(by.part[0], flat[SCALE_TABLE_AT], i), packed_all<T>(1));
                out = packed_add(packed_mul(out, by.part[0]),
                                 param_with_table<TABLES>(more.part[0], flat[SHIFT_TABLE_AT], i));
            } else {
                float times[W], plus[W];
                by.get(times), more.get(plus);
                if (TABLES) {
                    add_table<S, W>(flat[SCALE_TABLE_AT], i, times);
                    add_table<S, W>(flat[SHIFT_TABLE_AT], i, plus);
                }
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[j] = y[j] * (times[j] + p.weight_offset) + plus[j];
                out.set(y);
            }
        } else if constexpr (ROUND) {
            out = packed_mul(out, EARLY ? weight[v * EARLY] : load_packed((const T *)flat[WEIGHT] + i));
        } else if constexpr (WEIGHTED || CENTRED) {
            float param[W];
            if constexpr (WEIGHTED) {
                (EARLY ? weight[v * EARLY] : load_packed((const T *)flat[WEIGHT] + i)).get(param);
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[j] *= param[j] + p.weight_offset;
            }
            if (CENTRED && flat[BIAS]) {
                load<T, W>((const T *)flat[BIAS] + i, param);
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[j] += param[j];
            }
            out.set(y);
            if constexpr (FUSION == ADDED)
                out = packed_add(out, residual[v]);
        }
        store_packed((T *)row[OUT_ROW] + i, out);
    }
}

#endif
