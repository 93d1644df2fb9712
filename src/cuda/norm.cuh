/* norm.cuh - rms_norm and layer_norm on CUDA.

   norm_registers: a row is held in registers, packed, from the one time it is read until it is written: VECTORS
   16-byte vectors in each of its threads. LANES > 0: so many lanes of a warp share a short row; LANES 0: blockDim.x
   threads, whole warps, have a row, and blockDim.y rows share a block, because a card starts blocks more slowly than
   it could finish them. All loads of a thread are issued before the first is used; what multiplies the row later (the
   weight, or scale and shift) is on its way before the sum is known. norm_loop: a block per row, any call, W elements
   at a time; the row is read again for each pass, and the sum with the residual is made again. */
#ifndef ADZE_CUDA_NORM_CUH
#define ADZE_CUDA_NORM_CUH

#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "vec.cuh"

enum { X, OUT, RESIDUAL, SUM, SCALE, SHIFT, GATE, SCALE_TABLE, SHIFT_TABLE, GATE_TABLE, NORM_TENSORS };
enum { TABLE = SCALE_TABLE - SCALE }; /* from one of scale, shift and gate to its table */

struct norm_params {
    const void *data[NORM_TENSORS]; /* NULL: absent */
    const void *weight, *bias;
    int64_t stride[NORM_TENSORS]; /* from row to row, when all rows are one dimension */
    int64_t dim;
    float eps, weight_offset, inverse_dim;
    int32_t rounding;
    uint32_t is_f32; /* by tensor: it is f32 where x is not */
    bool weight_f32, bias_f32;
    bool early_weight, early_scale, early_shift; /* present, and of x's dtype */
    adze_rows rows;
};

/* What norm_registers is compiled for. */
enum norm_form {
    PLAIN,        /* weight and bias */
    RESIDUAL_SUM, /* and a residual */
    MODULATED,    /* scale and shift, with or without tables */
    BLOCK         /* residual and gate before them */
};
template <norm_form FORM>
constexpr bool adds = FORM == RESIDUAL_SUM || FORM == BLOCK;
template <norm_form FORM>
constexpr bool modulates = FORM == MODULATED || FORM == BLOCK;

struct norm_row {
    int64_t at[NORM_TENSORS];
};
template <int TENSORS>
__device__ __forceinline__ norm_row norm_find(const norm_params &p, int64_t row)
{
    norm_row found;
    if (p.rows.rank == 1) {
#pragma unroll
        for (int t = 0; t < TENSORS; t++)
            found.at[t] = row * p.stride[t];
        return found;
    }
    const row_index index = row_split(p.rows, row);
#pragma unroll
    for (int t = 0; t < TENSORS; t++)
        found.at[t] = row_offset(p.rows, t, index);
    return found;
}

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

/* A vector of a parameter that was loaded before it was needed, if it was. */
template <typename T>
struct maybe {
    packed<T> value;
    bool loaded;
};

/* W elements of a parameter, loaded now or before. */
template <typename T, int W>
__device__ __forceinline__ void norm_param(const void *data, bool is_f32, int64_t at, maybe<T> early, float (&f)[W])
{
    if constexpr (W == VEC<T>) {
        if (early.loaded) {
            early.value.get(f);
            return;
        }
    }
    load_param<T, W>(data, is_f32, at, f);
}

/* One of scale, shift and gate, with its table added. */
template <typename T, int W>
__device__ __forceinline__ void norm_side(const norm_params &p, const norm_row &row, int t, int64_t i, bool steps,
                                          maybe<T> early, float (&f)[W])
{
    norm_param<T, W>(p.data[t], p.is_f32 >> t & 1, row.at[t] + i, early, f);
    if (p.data[t + TABLE]) {
        float table[W];
        load_param<T, W>(p.data[t + TABLE], p.is_f32 >> (t + TABLE) & 1, row.at[t + TABLE] + i, table);
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] += table[j];
        round_if<T, W>(steps, f);
    }
}

/* h = residual + gate * x, of W elements whose x and residual are loaded. */
template <typename T, int W>
__device__ __forceinline__ void norm_add(const norm_params &p, const norm_row &row, int64_t i, bool gated, bool steps,
                                         const float (&residual)[W], float (&h)[W])
{
    if (gated) {
        float gate[W];
        norm_side<T, W>(p, row, GATE, i, steps, {}, gate);
#pragma unroll
        for (int j = 0; j < W; j++)
            h[j] *= gate[j];
        round_if<T, W>(steps, h);
    }
#pragma unroll
    for (int j = 0; j < W; j++)
        h[j] += residual[j];
}

/* y * (weight + offset) + bias */
template <typename T, int W>
__device__ __forceinline__ void norm_affine(const norm_params &p, int64_t i, maybe<T> early_weight, float (&y)[W])
{
    float side[W];
    if (p.weight) {
        norm_param<T, W>(p.weight, p.weight_f32, i, early_weight, side);
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
}

/* y * (1 + scale) + shift */
template <typename T, int W>
__device__ __forceinline__ void norm_modulate(const norm_params &p, const norm_row &row, int64_t i, bool steps,
                                              maybe<T> early_scale, maybe<T> early_shift, float (&y)[W])
{
    float side[W];
    round_if<T, W>(steps, y);
    if (p.data[SCALE]) {
        norm_side<T, W>(p, row, SCALE, i, steps, early_scale, side);
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
        norm_side<T, W>(p, row, SHIFT, i, steps, early_shift, side);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] += side[j];
    }
}

enum { SHORT_THREADS = 128, LONG_THREADS = 512 }; /* of a block: of short rows; of others, at most */

/* The sum over the threads of a row. */
template <int LANES>
__device__ __forceinline__ float norm_total(float v, float *part)
{
    if constexpr (LANES > 0)
        return warp_sum<LANES>(v);
    else
        return row_sum(v, part);
}

/* The VECTORS vectors of a thread, from `data` on, all at once. */
template <typename T, int VECTORS>
__device__ __forceinline__ void norm_fetch(packed<T> (&to)[VECTORS], const T *data, int thread, int threads,
                                           int vectors)
{
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        to[v].raw = make_uint4(0, 0, 0, 0);
        if (thread + v * threads < vectors)
            to[v] = load_packed(data + (thread + v * threads) * VEC<T>);
    }
}

/* ROUND: before the weight (PLAIN, RESIDUAL_SUM), or after each step (the others). */
template <typename T, bool CENTRED, norm_form FORM, bool ROUND, int LANES, int VECTORS>
__global__ void __launch_bounds__(LANES ? SHORT_THREADS : LONG_THREADS)
    norm_registers(const __grid_constant__ norm_params p)
{
    constexpr int W = VEC<T>, tensors = FORM == PLAIN ? 2 : FORM == RESIDUAL_SUM ? 4 : (int)NORM_TENSORS;
    __shared__ float part[2][32];
    const int thread = LANES ? (int)threadIdx.x % (LANES + !LANES) : (int)threadIdx.x;
    const int threads = LANES ? LANES : (int)blockDim.x, vectors = (int)(p.dim / W);
    const int64_t r = LANES
                          ? (int64_t)blockIdx.x * (SHORT_THREADS / (LANES + !LANES)) + threadIdx.x / (LANES + !LANES)
                          : (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    /* Lanes of a warp stay together for the shuffles: those beyond the last row repeat it and write nothing. */
    const bool writes = r < p.rows.count;
    const norm_row row = norm_find<tensors>(p, writes ? r : p.rows.count - 1);
    packed<T> x[VECTORS], residual[adds<FORM> ? VECTORS : 1];
    packed<T> weight[modulates<FORM> ? 1 : VECTORS], scale[modulates<FORM> ? VECTORS : 1],
        shift[modulates<FORM> ? VECTORS : 1];
    pdl_launch_next();
    pdl_wait();
    if (!LANES && !writes)
        return;
    norm_fetch(x, (const T *)p.data[X] + row.at[X], thread, threads, vectors);
    if constexpr (adds<FORM>)
        norm_fetch(residual, (const T *)p.data[RESIDUAL] + row.at[RESIDUAL], thread, threads, vectors);
    if constexpr (!modulates<FORM>)
        if (p.early_weight)
            norm_fetch(weight, (const T *)p.weight, thread, threads, vectors);
    if constexpr (modulates<FORM>) {
        if (p.early_scale)
            norm_fetch(scale, (const T *)p.data[SCALE] + row.at[SCALE], thread, threads, vectors);
        if (p.early_shift)
            norm_fetch(shift, (const T *)p.data[SHIFT] + row.at[SHIFT], thread, threads, vectors);
    }
    float sum = 0, mean = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int at = (thread + v * threads) * W;
        float h[W];
        x[v].get(h);
        if constexpr (adds<FORM>) {
            if (thread + v * threads < vectors) {
                float other[W];
                residual[v].get(other);
                norm_add<T, W>(p, row, at, FORM == BLOCK, ROUND, other, h);
                x[v].set(h);
                if (p.data[SUM])
                    store_packed((T *)p.data[SUM] + row.at[SUM] + at, x[v]);
                x[v].get(h);
            }
        }
#pragma unroll
        for (int j = 0; j < W; j++)
            sum += CENTRED ? h[j] : h[j] * h[j];
    }
    sum = norm_total<LANES>(sum, part[0]);
    keep_packed(x);
    if (CENTRED) {
        mean = sum * p.inverse_dim;
        sum = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            float h[W];
            x[v].get(h);
#pragma unroll
            for (int j = 0; j < W; j++)
                sum += thread + v * threads < vectors ? (h[j] - mean) * (h[j] - mean) : 0;
        }
        sum = norm_total<LANES>(sum, part[1]);
        keep_packed(x);
    }
    const float factor = rsqrtf(sum * p.inverse_dim + p.eps);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int at = (thread + v * threads) * W;
        if (thread + v * threads >= vectors || !writes)
            continue;
        float y[W];
        x[v].get(y);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] = (y[j] - mean) * factor;
        if constexpr (modulates<FORM>) {
            norm_affine<T, W>(p, at, {}, y);
            norm_modulate<T, W>(p, row, at, ROUND, {scale[modulates<FORM> ? v : 0], p.early_scale},
                                {shift[modulates<FORM> ? v : 0], p.early_shift}, y);
        } else {
            round_if<T, W>(ROUND, y);
            norm_affine<T, W>(p, at, {weight[modulates<FORM> ? 0 : v], p.early_weight}, y);
        }
        store<T, W>((T *)p.data[OUT] + row.at[OUT] + at, y);
    }
}

/* What is normalised of W elements from i on. */
template <typename T, int W>
__device__ __forceinline__ void norm_value(const norm_params &p, const norm_row &row, int64_t i, float (&h)[W],
                                           bool store_sum)
{
    float residual[W];
    load<T, W>((const T *)p.data[X] + row.at[X] + i, h);
    if (!p.data[RESIDUAL])
        return;
    load<T, W>((const T *)p.data[RESIDUAL] + row.at[RESIDUAL] + i, residual);
    norm_add<T, W>(p, row, i, p.data[GATE], p.rounding & ADZE_ROUND_STEPS, residual, h);
    if (store_sum && p.data[SUM])
        store<T, W>((T *)p.data[SUM] + row.at[SUM] + i, h);
    round_if<T, W>(!(p.rounding & ADZE_FLOAT_SUM), h);
}

template <typename T, bool CENTRED, int W>
__global__ void __launch_bounds__(LONG_THREADS, 1) norm_loop(const __grid_constant__ norm_params p)
{
    __shared__ float part[2][32];
    pdl_launch_next();
    pdl_wait();
    const int64_t start = (int64_t)threadIdx.x * W, step = (int64_t)blockDim.x * W;
    for (int64_t r = blockIdx.x; r < p.rows.count; r += gridDim.x) {
        const norm_row row = norm_find<NORM_TENSORS>(p, r);
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
            round_if<T, W>(p.rounding & ADZE_ROUND_NORM, h);
            norm_affine<T, W>(p, i, {}, h);
            if (p.data[SCALE] || p.data[SHIFT])
                norm_modulate<T, W>(p, row, i, p.rounding & ADZE_ROUND_STEPS, {}, {}, h);
            if (p.is_f32 >> OUT & 1)
                store<float, W>((float *)p.data[OUT] + row.at[OUT] + i, h);
            else
                store<T, W>((T *)p.data[OUT] + row.at[OUT] + i, h);
        }
        __syncthreads(); /* part is used again */
    }
}

/* The shapes of norm_registers: lanes of a short row or 0, and vectors of a thread. */
#define NORM_SHAPES(X) X(8, 1) X(8, 2) X(16, 2) X(0, 2) X(0, 4) X(0, 8)

struct norm_shape {
    int lanes, each, threads, rows; /* threads of a row, rows of a block; each 0: norm_loop */
};

/* Only plain norms have short rows, and only those without modulation eight vectors a thread: others would spill. */
constexpr bool norm_has(norm_form form, int lanes, int each)
{
    return form == PLAIN || (lanes == 0 && (form == RESIDUAL_SUM || each < 8));
}

/* Two vectors a thread when there are few rows: the shortest chain of work. With many rows four, so that more bytes
   are on their way; eight when four would need too many threads. */
static norm_shape norm_pick(norm_form form, int64_t rows, int64_t vectors, int sm_count)
{
    if (vectors <= 32 && form == PLAIN)
        return {vectors <= 16 ? 8 : 16, vectors <= 8 ? 1 : 2, SHORT_THREADS, 1};
    const int few = rows <= 2 * (int64_t)sm_count;
    for (int each = few || vectors <= 64 ? 2 : 4; norm_has(form, 0, each) && each <= 8; each *= 2) {
        const int64_t threads = (vectors + 32 * each - 1) / (32 * each) * 32;
        if (threads <= LONG_THREADS)
            return {0, each, (int)threads, few || threads > 128 ? 1 : 256 / (int)threads};
    }
    return {0, 0, 0, 0};
}

template <typename T, bool CENTRED, int W>
static adze_status norm_launch_loop(const char *op, adze_stream s, const norm_params &p)
{
    const int64_t threads = (p.dim / W + 31) / 32 * 32;
    return launch(op, s, norm_loop<T, CENTRED, W>, grid_for(p.rows.count, 1),
                  dim3(threads < 32             ? 32
                       : threads < LONG_THREADS ? (unsigned)threads
                                                : LONG_THREADS),
                  0, p);
}

template <typename T, bool CENTRED, norm_form FORM, bool ROUND>
static adze_status norm_launch_as(const char *op, adze_stream s, const norm_params &p, norm_shape shape)
{
#define X(l, e)                                                                                                      \
    if constexpr (norm_has(FORM, l, e))                                                                              \
        if (shape.lanes == l && shape.each == e)                                                                     \
            return launch(op, s, norm_registers<T, CENTRED, FORM, ROUND, l, e>,                                      \
                          grid_for(p.rows.count, l ? SHORT_THREADS / (l + !l) : shape.rows),                         \
                          dim3((unsigned)shape.threads, (unsigned)shape.rows), 0, p);
    NORM_SHAPES(X)
#undef X
    return norm_launch_loop<T, CENTRED, VEC<T>>(op, s, p);
}

template <typename T, bool CENTRED, norm_form FORM, bool ROUND>
static adze_status norm_launch(const char *op, adze_stream s, const norm_params &p)
{
    return norm_launch_as<T, CENTRED, FORM, ROUND>(
        op, s, p, norm_pick(FORM, p.rows.count, p.dim / VEC<T>, adze_cuda_sm_count(s.device)));
}

/* The form that fits a call. Combinations that no model has go to norm_loop. */
template <typename T, bool CENTRED>
static adze_status norm_form_of(const char *op, adze_stream s, const norm_params &p, bool aligned)
{
    const bool side = p.data[SCALE] || p.data[SHIFT], norm_rounds = p.rounding & ADZE_ROUND_NORM;
    constexpr bool rounds = sizeof(T) < 4; /* rounding a float to a float is no step */
    if (!aligned)
        return norm_launch_loop<T, CENTRED, 1>(op, s, p);
    if (p.is_f32 >> OUT & 1 || p.rows.count > 0x7fffffff || (p.data[RESIDUAL] && p.rounding & ADZE_FLOAT_SUM) ||
        (side && norm_rounds && p.weight) || (p.data[GATE] && !side) || (CENTRED && norm_rounds))
        return norm_launch_loop<T, CENTRED, VEC<T>>(op, s, p);
    if (side && p.data[GATE])
        return rounds && p.rounding & ADZE_ROUND_STEPS ? norm_launch<T, CENTRED, BLOCK, rounds>(op, s, p)
                                                       : norm_launch<T, CENTRED, BLOCK, false>(op, s, p);
    if (side && !p.data[RESIDUAL])
        return rounds && p.rounding & ADZE_ROUND_STEPS ? norm_launch<T, CENTRED, MODULATED, rounds>(op, s, p)
                                                       : norm_launch<T, CENTRED, MODULATED, false>(op, s, p);
    if (side)
        return norm_launch_loop<T, CENTRED, VEC<T>>(op, s, p);
    constexpr bool early_rounds = rounds && !CENTRED;
    if (p.data[RESIDUAL])
        return norm_rounds ? norm_launch<T, CENTRED, RESIDUAL_SUM, early_rounds>(op, s, p)
                           : norm_launch<T, CENTRED, RESIDUAL_SUM, false>(op, s, p);
    return norm_rounds ? norm_launch<T, CENTRED, PLAIN, early_rounds>(op, s, p)
                       : norm_launch<T, CENTRED, PLAIN, false>(op, s, p);
}

template <bool CENTRED>
static adze_status norm_run(const char *op, adze_stream s, const adze_norm_args *a)
{
    const adze_tensor *const tensors[NORM_TENSORS] = {&a->x,           &a->out,       &a->residual, &a->sum,
                                                      &a->scale,       &a->shift,     &a->gate,     &a->scale_table,
                                                      &a->shift_table, &a->gate_table};
    norm_params p = {};
    p.dim = a->x.shape[a->x.rank - 1];
    adze_rows_init(&p.rows, &a->x, NORM_TENSORS, tensors);
    if (p.dim == 0 || p.rows.count == 0)
        return ADZE_OK;
    bool aligned = rows_aligned(&a->weight, p.dim) && rows_aligned(&a->bias, p.dim);
    for (int t = 0; t < NORM_TENSORS; t++) {
        p.data[t] = tensors[t]->dtype ? tensors[t]->data : NULL;
        p.stride[t] = p.rows.stride[t][0];
        p.is_f32 |= (uint32_t)(tensors[t]->dtype == ADZE_F32 && a->x.dtype != ADZE_F32) << t;
        aligned = aligned && rows_aligned(tensors[t], p.dim);
    }
    p.weight = a->weight.dtype ? a->weight.data : NULL;
    p.bias = a->bias.dtype ? a->bias.data : NULL;
    p.weight_f32 = a->weight.dtype == ADZE_F32;
    p.bias_f32 = a->bias.dtype == ADZE_F32;
    p.early_weight = p.weight && a->weight.dtype == a->x.dtype;
    p.early_scale = p.data[SCALE] && a->scale.dtype == a->x.dtype;
    p.early_shift = p.data[SHIFT] && a->shift.dtype == a->x.dtype;
    p.eps = a->eps;
    p.weight_offset = a->weight_offset;
    p.inverse_dim = 1 / (float)p.dim;
    p.rounding = a->rounding;
    switch (a->x.dtype) {
    case ADZE_F32: return norm_form_of<float, CENTRED>(op, s, p, aligned);
    case ADZE_F16: return norm_form_of<f16, CENTRED>(op, s, p, aligned);
    default: return norm_form_of<bf16, CENTRED>(op, s, p, aligned);
    }
}

#endif
