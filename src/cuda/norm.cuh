/* norm.cuh - rms_norm and layer_norm on CUDA.

   norm_registers: a row belongs to THREADS threads, each of which holds VECTORS 16-byte vectors of it in registers
   from the one time it is read until it is written. Rows of up to 32 threads share a block of ROWS_PER_BLOCK, and
   need no barrier; longer ones have a block each. All loads of a thread are issued before the first is used.
   norm_loop: a block per row, any length and alignment, W elements at a time; the row is read again for each pass,
   and a sum that is kept in float is made again. The weight and the modulation are read after the row: they come from
   the cache. */
#ifndef ADZE_CUDA_NORM_CUH
#define ADZE_CUDA_NORM_CUH

#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "vec.cuh"

enum { X, OUT, SUM, RESIDUAL, GATE, GATE_TABLE, SCALE, SCALE_TABLE, SHIFT, SHIFT_TABLE, NORM_TENSORS };

struct norm_params {
    const void *data[NORM_TENSORS]; /* NULL: absent */
    const void *weight, *bias;
    int64_t dim;
    adze_rows rows;
    float eps, weight_offset, inverse_dim;
    int32_t rounding;
    uint32_t is_f32; /* by tensor: it is f32 where x is not */
    bool weight_f32, bias_f32;
};

/* What a call needs. FULL takes any call; the others are lighter in registers. */
enum norm_form { PLAIN, RESIDUAL_SUM, FULL };

struct norm_row {
    int64_t at[NORM_TENSORS];
};
template <norm_form FORM>
__device__ __forceinline__ norm_row norm_find(const norm_params &p, int64_t row)
{
    constexpr int tensors = FORM == PLAIN ? OUT + 1 : FORM == RESIDUAL_SUM ? RESIDUAL + 1 : (int)NORM_TENSORS;
    const row_index index = row_split(p.rows, row);
    norm_row found;
#pragma unroll
    for (int t = 0; t < tensors; t++)
        found.at[t] = row_offset(p.rows, t, index);
    return found;
}

/* One of gate, scale and shift, with its table added. */
template <typename T, int W>
__device__ __forceinline__ void norm_side(const norm_params &p, const norm_row &row, int t, int64_t i, float (&f)[W])
{
    load_param<T, W>(p.data[t], p.is_f32 >> t & 1, row.at[t] + i, f);
    if (p.data[t + 1]) {
        float table[W];
        load_param<T, W>(p.data[t + 1], p.is_f32 >> (t + 1) & 1, row.at[t + 1] + i, table);
#pragma unroll
        for (int j = 0; j < W; j++) {
            f[j] += table[j];
            if (p.rounding & ADZE_ROUND_STEPS)
                f[j] = round_to<T>(f[j]);
        }
    }
}

/* h = residual + gate * x for W elements whose x and residual are loaded; `store_sum` also writes it. h leaves
   rounded, unless the call keeps the sum in float. */
template <typename T, int W, norm_form FORM>
__device__ __forceinline__ void norm_sum(const norm_params &p, const norm_row &row, int64_t i, float (&h)[W],
                                         const float (&residual)[W], bool store_sum)
{
    if (FORM == PLAIN || !p.data[RESIDUAL])
        return;
    if (FORM == FULL && p.data[GATE]) {
        float gate[W];
        norm_side<T, W>(p, row, GATE, i, gate);
#pragma unroll
        for (int j = 0; j < W; j++) {
            h[j] *= gate[j];
            if (p.rounding & ADZE_ROUND_STEPS)
                h[j] = round_to<T>(h[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < W; j++)
        h[j] += residual[j];
    if (store_sum && p.data[SUM])
        store<T, W>((T *)p.data[SUM] + row.at[SUM] + i, h);
    if (!(p.rounding & ADZE_FLOAT_SUM)) {
#pragma unroll
        for (int j = 0; j < W; j++)
            h[j] = round_to<T>(h[j]);
    }
}

/* From the normalised value to what is stored; `weight` is the weight when it was loaded early. */
template <typename T, int W, norm_form FORM>
__device__ __forceinline__ void norm_write(const norm_params &p, const norm_row &row, int64_t i, float (&y)[W],
                                           const packed<T> *weight)
{
    const bool steps = p.rounding & ADZE_ROUND_STEPS;
    if (p.rounding & ADZE_ROUND_NORM) {
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] = round_to<T>(y[j]);
    }
    float side[W];
    if (p.weight) {
        if constexpr (W == VEC<T>) {
            if (weight && !p.weight_f32)
                weight->get(side);
            else
                load_param<T, W>(p.weight, p.weight_f32, i, side);
        } else {
            load_param<T, W>(p.weight, p.weight_f32, i, side);
        }
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
    if (FORM == FULL) {
        if (steps && (p.data[SCALE] || p.data[SHIFT])) {
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] = round_to<T>(y[j]);
        }
        if (p.data[SCALE]) {
            norm_side<T, W>(p, row, SCALE, i, side);
#pragma unroll
            for (int j = 0; j < W; j++) {
                const float factor = 1 + side[j];
                y[j] *= steps ? round_to<T>(factor) : factor;
                if (steps && p.data[SHIFT])
                    y[j] = round_to<T>(y[j]);
            }
        }
        if (p.data[SHIFT]) {
            norm_side<T, W>(p, row, SHIFT, i, side);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] += side[j];
        }
        if (p.is_f32 >> OUT & 1) {
            store<float, W>((float *)p.data[OUT] + row.at[OUT] + i, y);
            return;
        }
    }
    store<T, W>((T *)p.data[OUT] + row.at[OUT] + i, y);
}

template <int THREADS>
constexpr int rows_per_block = THREADS < 32    ? 128 / THREADS
                               : THREADS == 32 ? 4
                                               : 1;

template <typename T, norm_form FORM, bool CENTRED, int THREADS, int VECTORS, bool EARLY>
__global__ void __launch_bounds__(THREADS *rows_per_block<THREADS>) norm_registers(const norm_params p)
{
    constexpr int W = VEC<T>;
    __shared__ float part[2][32];
    pdl_launch_next();
    pdl_wait();
    const int thread = (int)threadIdx.x % THREADS, vectors = (int)(p.dim / W);
    const int64_t step = (int64_t)gridDim.x * rows_per_block<THREADS>;
    for (int64_t r = (int64_t)blockIdx.x * rows_per_block<THREADS> + threadIdx.x / THREADS;; r += step) {
        /* Lanes of a warp stay together for the shuffles: those beyond the last row repeat it and write nothing. */
        const bool beyond = r >= p.rows.count;
        if (THREADS >= 32 ? beyond : r - threadIdx.x / THREADS >= p.rows.count)
            break;
        const norm_row row = norm_find<FORM>(p, beyond ? p.rows.count - 1 : r);
        packed<T> x[VECTORS], residual[FORM == PLAIN ? 1 : VECTORS], weight[EARLY ? VECTORS : 1];
        const T *x_row = (const T *)p.data[X] + row.at[X];
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int at = thread + v * THREADS;
            x[v].raw = make_uint4(0, 0, 0, 0);
            if (at < vectors)
                x[v] = load_packed(x_row + (int64_t)at * W);
        }
        if (FORM != PLAIN && p.data[RESIDUAL]) {
            const T *residual_row = (const T *)p.data[RESIDUAL] + row.at[RESIDUAL];
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                const int at = thread + v * THREADS;
                residual[v].raw = make_uint4(0, 0, 0, 0);
                if (at < vectors)
                    residual[v] = load_packed(residual_row + (int64_t)at * W);
            }
        }
        if (EARLY && p.weight && !p.weight_f32) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                if (thread + v * THREADS < vectors)
                    weight[v] = load_packed((const T *)p.weight + (int64_t)(thread + v * THREADS) * W);
        }
        float sum = 0, mean = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int at = thread + v * THREADS;
            float h[W];
            x[v].get(h);
            if (FORM != PLAIN && p.data[RESIDUAL] && at < vectors) {
                float other[W];
                residual[v].get(other);
                norm_sum<T, W, FORM>(p, row, (int64_t)at * W, h, other, !beyond);
                x[v].set(h);
            }
#pragma unroll
            for (int j = 0; j < W; j++)
                sum += CENTRED ? h[j] : h[j] * h[j];
        }
        sum = block_sum<THREADS>(sum, part[0]);
        if (CENTRED) {
            mean = sum * p.inverse_dim;
            sum = 0;
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                float h[W];
                x[v].get(h);
#pragma unroll
                for (int j = 0; j < W; j++)
                    sum += thread + v * THREADS < vectors ? (h[j] - mean) * (h[j] - mean) : 0;
            }
            sum = block_sum<THREADS>(sum, part[1]);
        }
        const float scale = rsqrtf(sum * p.inverse_dim + p.eps);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int at = thread + v * THREADS;
            float y[W];
            x[v].get(y);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] = (y[j] - mean) * scale;
            if (at < vectors && !beyond)
                norm_write<T, W, FORM>(p, row, (int64_t)at * W, y, EARLY ? &weight[v] : NULL);
        }
        if (THREADS > 32)
            __syncthreads(); /* part is used again */
    }
}

enum { LOOP_THREADS = 512 };

/* What is normalised of W elements from i on. */
template <typename T, int W>
__device__ __forceinline__ void norm_value(const norm_params &p, const norm_row &row, int64_t i, float (&h)[W],
                                           bool store_sum)
{
    float residual[W];
    load<T, W>((const T *)p.data[X] + row.at[X] + i, h);
    if (p.data[RESIDUAL])
        load<T, W>((const T *)p.data[RESIDUAL] + row.at[RESIDUAL] + i, residual);
    norm_sum<T, W, FULL>(p, row, i, h, residual, store_sum);
}

template <typename T, bool CENTRED, int W>
__global__ void __launch_bounds__(LOOP_THREADS) norm_loop(const norm_params p)
{
    __shared__ float part[2][32];
    pdl_launch_next();
    pdl_wait();
    for (int64_t r = blockIdx.x; r < p.rows.count; r += gridDim.x) {
        const norm_row row = norm_find<FULL>(p, r);
        float sum = 0, mean = 0, h[W];
        for (int64_t i = threadIdx.x * W; i < p.dim; i += LOOP_THREADS * W) {
            norm_value<T, W>(p, row, i, h, false);
#pragma unroll
            for (int j = 0; j < W; j++)
                sum += CENTRED ? h[j] : h[j] * h[j];
        }
        sum = block_sum<LOOP_THREADS>(sum, part[0]);
        if (CENTRED) {
            mean = sum * p.inverse_dim;
            sum = 0;
            for (int64_t i = threadIdx.x * W; i < p.dim; i += LOOP_THREADS * W) {
                norm_value<T, W>(p, row, i, h, false);
#pragma unroll
                for (int j = 0; j < W; j++)
                    sum += (h[j] - mean) * (h[j] - mean);
            }
            sum = block_sum<LOOP_THREADS>(sum, part[1]);
        }
        const float scale = rsqrtf(sum * p.inverse_dim + p.eps);
        for (int64_t i = threadIdx.x * W; i < p.dim; i += LOOP_THREADS * W) {
            norm_value<T, W>(p, row, i, h, true);
#pragma unroll
            for (int j = 0; j < W; j++)
                h[j] = (h[j] - mean) * scale;
            norm_write<T, W, FULL>(p, row, i, h, NULL);
        }
        __syncthreads(); /* part is used again */
    }
}

/* The shapes of norm_registers: threads of a row, vectors of a thread. */
#ifndef NORM_SHAPES
#    define NORM_SHAPES(X)                                                                                           \
        X(8, 1)                                                                                                      \
        X(16, 1) X(32, 1) X(128, 1) X(256, 1) X(512, 1) X(32, 2) X(32, 4) X(64, 4) X(128, 4) X(256, 4) X(512, 4)     \
            X(512, 8)
#endif

struct norm_shape {
    int threads, each;
};

/* A short row takes few threads. With few rows a row takes many threads, and each of them little work; with many, a
   thread takes four vectors, so that enough bytes are on their way. threads 0: no shape holds the row. */
static norm_shape norm_pick(int64_t rows, int64_t vectors, int sm_count)
{
    if (vectors <= 32)
        return {vectors <= 8 ? 8 : vectors <= 16 ? 16 : 32, 1};
    if (rows <= 2 * (int64_t)sm_count && vectors <= 512)
        return {vectors <= 128 ? 128 : vectors <= 256 ? 256 : 512, 1};
    if (vectors <= 64)
        return {32, 2};
    for (int threads = 32; threads <= 512; threads *= 2)
        if (vectors <= 4 * threads)
            return {threads, 4};
    return {vectors <= 4096 ? 512 : 0, 8};
}

template <typename T, norm_form FORM, bool CENTRED>
static adze_status norm_launch_as(const char *op, adze_stream s, const norm_params &p, norm_shape shape)
{
#define X(t, e)                                                                                                      \
    if (shape.threads == t && shape.each == e)                                                                       \
        return launch(op, s, norm_registers<T, FORM, CENTRED, t, e, (e <= 2)>,                                       \
                      grid_for(p.rows.count, rows_per_block<t>), dim3(t * rows_per_block<t>), 0, p);
    NORM_SHAPES(X)
#undef X
    return launch(op, s, norm_loop<T, CENTRED, VEC<T>>, grid_for(p.rows.count, 1), dim3(LOOP_THREADS), 0, p);
}

template <typename T, norm_form FORM, bool CENTRED>
static adze_status norm_launch(const char *op, adze_stream s, const norm_params &p, bool aligned)
{
    if (!aligned)
        return launch(op, s, norm_loop<T, CENTRED, 1>, grid_for(p.rows.count, 1), dim3(LOOP_THREADS), 0, p);
    const bool loops = p.rounding & ADZE_FLOAT_SUM && p.data[RESIDUAL];
    const norm_shape none = {0, 0};
    return norm_launch_as<T, FORM, CENTRED>(
        op, s, p, loops ? none : norm_pick(p.rows.count, p.dim / VEC<T>, adze_cuda_sm_count(s.device)));
}

template <typename T, bool CENTRED>
static adze_status norm_form_of(const char *op, adze_stream s, const norm_params &p, bool aligned)
{
    bool sides = p.is_f32 & 1u << OUT;
    for (int t = GATE; t < NORM_TENSORS; t++)
        sides = sides || p.data[t];
    if (sides)
        return norm_launch<T, FULL, CENTRED>(op, s, p, aligned);
    if (p.data[RESIDUAL])
        return norm_launch<T, RESIDUAL_SUM, CENTRED>(op, s, p, aligned);
    return norm_launch<T, PLAIN, CENTRED>(op, s, p, aligned);
}

template <bool CENTRED>
static adze_status norm_run(const char *op, adze_stream s, const adze_norm_args *a)
{
    const adze_tensor *const tensors[NORM_TENSORS] = {&a->x,     &a->out,        &a->sum,   &a->residual,
                                                      &a->gate,  &a->gate_table, &a->scale, &a->scale_table,
                                                      &a->shift, &a->shift_table};
    norm_params p = {};
    p.dim = a->x.shape[a->x.rank - 1];
    adze_rows_init(&p.rows, &a->x, NORM_TENSORS, tensors);
    if (p.dim == 0 || p.rows.count == 0)
        return ADZE_OK;
    bool aligned = rows_aligned(&a->weight, p.dim) && rows_aligned(&a->bias, p.dim);
    for (int t = 0; t < NORM_TENSORS; t++) {
        p.data[t] = tensors[t]->dtype ? tensors[t]->data : NULL;
        p.is_f32 |= (uint32_t)(tensors[t]->dtype == ADZE_F32 && a->x.dtype != ADZE_F32) << t;
        aligned = aligned && rows_aligned(tensors[t], p.dim);
    }
    p.weight = a->weight.dtype ? a->weight.data : NULL;
    p.bias = a->bias.dtype ? a->bias.data : NULL;
    p.weight_f32 = a->weight.dtype == ADZE_F32;
    p.bias_f32 = a->bias.dtype == ADZE_F32;
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
