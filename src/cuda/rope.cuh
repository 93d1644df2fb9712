/* rope.cuh - rope and qk_norm_rope on CUDA, for any call; rope_lean.cuh has what models call most.

   Everywhere one thread has the W elements at i and the W at i + rotary_dim / 2 of a head, so that it holds whole
   pairs of either kind, and two loads are on their way (W 1, for what is not aligned: one pair).
   rope_heads: `width` neighbouring threads share a head of a token, and each thread has HEADS heads of it with the
   same tables; q and k are one row of heads. A norm is a sum over the threads of a head, by shuffles.
   rope_rows: a block has a head of q and the same head of k, or all heads of a token when one norm goes across them,
   and uses the tables for both. HELD: one item of q and one of k stay in each thread's registers; otherwise rows are
   read again after their sums are known. */
#ifndef ADZE_CUDA_ROPE_CUH
#define ADZE_CUDA_ROPE_CUH

#include "launch.cuh"
#include "reduce.cuh"
#include "rope_forms.cuh"
#include "rotary.h"
#include "vec.cuh"

constexpr int HEADS_THREADS = 128, HELD_THREADS = 384, ROWS_THREADS = 512;

struct rope_params {
    adze_rotary r;
    int64_t lanes;        /* threads that a head needs */
    int64_t units;        /* rope_heads: a group of heads of a token; rope_rows: what a block works on */
    float inverse[2];     /* 1 / elements of a norm, by side */
    int32_t groups;       /* of heads in a token */
    int32_t width_log2;   /* threads that it gets: a power of 2 */
    int32_t const_tables; /* may be read before the dependency wait */
};

/* W elements as they were loaded. */
template <typename T, int W>
struct rope_held {
    packed<T> v[1];
    __device__ __forceinline__ void read(const T *p) { v[0] = load_packed(p); }
    __device__ __forceinline__ void get(float (&f)[W]) const { v[0].get(f); }
    __device__ __forceinline__ void keep() { keep_packed(v); }
};
template <typename T>
struct rope_held<T, 1> {
    T v;
    __device__ __forceinline__ void read(const T *p) { v = *p; }
    __device__ __forceinline__ void get(float (&f)[1]) const { f[0] = to_float(v); }
    __device__ __forceinline__ void keep() {}
};

/* N neighbouring elements of 8 or 16 bytes in all. */
template <typename T, int N>
__device__ __forceinline__ void rope_load_few(const T *p, float (&f)[N])
{
    struct alignas(N * sizeof(T)) few {
        T v[N];
    };
    const few loaded = *reinterpret_cast<const few *>(p);
#pragma unroll
    for (int j = 0; j < N; j++)
        f[j] = to_float(loaded.v[j]);
}

/* Where the thread's two sets of elements are in a head, and in a table of one column per element. */
template <int PAIRS, int W>
__device__ __forceinline__ void rope_places(const adze_rotary &r, int64_t lane, int64_t (&at)[2])
{
    if (W == 1 && PAIRS == ADZE_ROPE_INTERLEAVED) {
        at[0] = 2 * lane;
        at[1] = 2 * lane + 1;
    } else {
        at[0] = lane * W;
        at[1] = lane * W + r.rotary_dim / 2;
    }
}

template <typename T, int PAIRS, int W>
__device__ __forceinline__ void rope_table_part(const adze_rotary &r, const void *table, int64_t row, int64_t lane,
                                                int64_t at, float (&f)[W])
{
    const bool is_f32 = r.table_dtype == ADZE_F32;
    if (!r.once) {
        load_param<T, W>(table, is_f32, row + at, f);
    } else if constexpr (PAIRS == ADZE_ROPE_HALF || W == 1) {
        load_param<T, W>(table, is_f32, row + lane * W, f);
    } else {
        float few[W / 2];
        if (is_f32)
            rope_load_few<float, W / 2>((const float *)table + row + at / 2, few);
        else
            rope_load_few<T, W / 2>((const T *)table + row + at / 2, few);
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] = few[j / 2];
    }
}

template <int W>
struct rope_tables {
    float cos[2][W], sin[2][W];
};
template <typename T, int PAIRS, int W>
__device__ __forceinline__ rope_tables<W> rope_read_tables(const adze_rotary &r, int64_t b, int64_t s, int64_t lane)
{
    const int64_t cos_row = b * r.cos_stride[0] + s * r.cos_stride[1];
    const int64_t sin_row = b * r.sin_stride[0] + s * r.sin_stride[1];
    int64_t at[2];
    rope_places<PAIRS, W>(r, lane, at);
    rope_tables<W> t;
#pragma unroll
    for (int p = 0; p < 2; p++) {
        rope_table_part<T, PAIRS, W>(r, r.cos, cos_row, lane, at[p], t.cos[p]);
        rope_table_part<T, PAIRS, W>(r, r.sin, sin_row, lane, at[p], t.sin[p]);
    }
    return t;
}

template <typename T>
__device__ __forceinline__ float rope_turn(bool steps, float x, float c, float y, float s)
{
    return steps ? round_to<T>(x * c) + round_to<T>(y * s) : x * c + y * s;
}

/* Rotates what is in a and b, the thread's two sets, and writes it. */
template <typename T, int PAIRS, int W>
__device__ __forceinline__ void rope_rotate(const adze_rotary &r, const rope_tables<W> &t, const float (&a)[W],
                                            const float (&b)[W], T *out, const int64_t (&at)[2])
{
    const bool steps = r.rounding & ADZE_ROUND_STEPS;
    float y[2][W];
#pragma unroll
    for (int j = 0; j < W; j++) {
        if constexpr (PAIRS == ADZE_ROPE_HALF || W == 1) {
            y[0][j] = rope_turn<T>(steps, a[j], t.cos[0][j], -b[j], t.sin[0][j]);
            y[1][j] = rope_turn<T>(steps, b[j], t.cos[1][j], a[j], t.sin[1][j]);
        } else {
            y[0][j] = rope_turn<T>(steps, a[j], t.cos[0][j], j % 2 ? a[j ^ 1] : -a[j ^ 1], t.sin[0][j]);
            y[1][j] = rope_turn<T>(steps, b[j], t.cos[1][j], j % 2 ? b[j ^ 1] : -b[j ^ 1], t.sin[1][j]);
        }
    }
    store<T, W>(out + at[0], y[0]);
    store<T, W>(out + at[1], y[1]);
}

/* From W elements to what is rotated. */
template <typename T, int W>
__device__ __forceinline__ void rope_value(const adze_rotary &r, const void *weight, bool weight_f32, int64_t at,
                                           float scale, float (&v)[W])
{
    float w[W];
    if (weight)
        load_param<T, W>(weight, weight_f32, at, w);
#pragma unroll
    for (int j = 0; j < W; j++) {
        v[j] *= scale;
        if (r.rounding & ADZE_ROUND_NORM)
            v[j] = round_to<T>(v[j]);
        if (weight)
            v[j] *= w[j] + r.weight_offset;
        if (r.rounding & (ADZE_ROUND_VALUE | ADZE_ROUND_STEPS))
            v[j] = round_to<T>(v[j]);
    }
}

template <int W>
__device__ __forceinline__ float rope_squares(const float (&v)[W])
{
    float sum = 0;
#pragma unroll
    for (int j = 0; j < W; j++)
        sum += v[j] * v[j];
    return sum;
}

/* n / d and n % d; 32 bits are several times cheaper. */
__device__ __forceinline__ void rope_divide(int64_t n, int64_t d, int64_t *quotient, int64_t *rest)
{
    if ((uint64_t)n <= 0xffffffffu && (uint64_t)d <= 0xffffffffu) {
        *quotient = (uint32_t)n / (uint32_t)d;
        *rest = (uint32_t)n % (uint32_t)d;
    } else {
        *quotient = n / d;
        *rest = n - *quotient * d;
    }
}

struct rope_head { /* one head of q or k of a token */
    const void *x, *weight;
    void *out;
    bool weight_f32, k;
};
template <typename T>
__device__ __forceinline__ rope_head rope_find(const adze_rotary &r, bool k, int64_t b, int64_t s, int64_t h)
{
    const adze_rotary_side &q_side = r.side[0], &k_side = r.side[1];
    const int64_t x_at = k ? b * k_side.x_stride[0] + s * k_side.x_stride[1] + h * k_side.x_stride[2]
                           : b * q_side.x_stride[0] + s * q_side.x_stride[1] + h * q_side.x_stride[2];
    const int64_t out_at = k ? b * k_side.out_stride[0] + s * k_side.out_stride[1] + h * k_side.out_stride[2]
                             : b * q_side.out_stride[0] + s * q_side.out_stride[1] + h * q_side.out_stride[2];
    rope_head head;
    head.x = (const T *)(k ? k_side.x : q_side.x) + x_at;
    head.out = (T *)(k ? k_side.out : q_side.out) + out_at;
    head.weight = k ? k_side.weight : q_side.weight;
    head.weight_f32 = (k ? k_side.weight_dtype : q_side.weight_dtype) == ADZE_F32;
    head.k = k;
    return head;
}

/* The elements of a head that are not rotated, shared by its `lanes` threads. */
template <typename T, int W>
__device__ __forceinline__ void rope_copy_rest(const adze_rotary &r, const rope_head &head, int64_t lane,
                                               int64_t lanes)
{
#pragma unroll 1
    for (int64_t i = r.rotary_dim + lane * W; lane < lanes && i < r.head_dim; i += lanes * W) {
        float v[W];
        load<T, W>((const T *)head.x + i, v);
        store<T, W>((T *)head.out + i, v);
    }
}

template <typename T, int PAIRS, int W, int HEADS, bool NORM>
__global__ void __launch_bounds__(HEADS_THREADS) rope_heads(const __grid_constant__ rope_params p)
{
    const adze_rotary &r = p.r;
    const int width = 1 << p.width_log2, rows = HEADS_THREADS >> p.width_log2;
    pdl_launch_next();
    if (!p.const_tables)
        pdl_wait();
    for (int64_t first = (int64_t)blockIdx.x * rows; first < p.units; first += (int64_t)gridDim.x * rows) {
        /* Lanes of a warp stay together for the shuffles: those beyond the last unit repeat it and write nothing. */
        const int64_t mine = first + ((int)threadIdx.x >> p.width_log2);
        const bool writes = mine < p.units;
        int64_t token, group, b = 0, s;
        rope_divide(writes ? mine : p.units - 1, p.groups, &token, &group);
        if (r.batch > 1)
            rope_divide(token, r.seq, &b, &s);
        else
            s = token;
        const int64_t heads = r.side[0].heads + r.side[1].heads;
        int64_t lane = (int)threadIdx.x & (width - 1);
        do {
            const bool works = lane < p.lanes;
            int64_t at[2];
            rope_tables<W> tables;
            rope_held<T, W> x[HEADS][2];
            rope_head head[HEADS];
            rope_places<PAIRS, W>(r, lane, at);
            if (works)
                tables = rope_read_tables<T, PAIRS, W>(r, b, s, lane);
            if (p.const_tables)
                pdl_wait();
#pragma unroll
            for (int u = 0; u < HEADS; u++) {
                const int64_t h = u * (int64_t)p.groups + group;
                const bool k = h >= r.side[0].heads;
                head[u] = rope_find<T>(r, k, b, s, k ? h - r.side[0].heads : h);
                if (works && h < heads) {
                    x[u][0].read((const T *)head[u].x + at[0]);
                    x[u][1].read((const T *)head[u].x + at[1]);
                }
            }
#pragma unroll
            for (int u = 0; u < HEADS; u++) {
                const bool valid = works && u * (int64_t)p.groups + group < heads;
                float a[W] = {}, c[W] = {};
                if (valid)
                    x[u][0].get(a), x[u][1].get(c);
                if (NORM) {
                    float sum = rope_squares<W>(a) + rope_squares<W>(c);
                    for (int mask = width / 2; mask; mask /= 2)
                        sum += __shfl_xor_sync(~0u, sum, mask);
                    const float scale = rsqrtf(sum * p.inverse[0] + r.eps);
                    if (valid) {
                        rope_value<T, W>(r, head[u].weight, head[u].weight_f32, at[0], scale, a);
                        rope_value<T, W>(r, head[u].weight, head[u].weight_f32, at[1], scale, c);
                    }
                }
                if (valid && writes)
                    rope_rotate<T, PAIRS, W>(r, tables, a, c, (T *)head[u].out, at);
            }
            if (!NORM && r.rotary_dim < r.head_dim && writes) {
#pragma unroll 1
                for (int64_t h = group; h < heads; h += p.groups) {
                    const bool k = h >= r.side[0].heads;
                    const rope_head row = rope_find<T>(r, k, b, s, k ? h - r.side[0].heads : h);
                    if (row.x != row.out)
                        rope_copy_rest<T, W>(r, row, lane, p.lanes);
                }
            }
            lane += width;
        } while (!NORM && lane < p.lanes);
    }
}

/* The sum of squares of some heads of q or k, by all threads of the block. */
template <typename T, int W>
__device__ __forceinline__ float rope_sum_heads(const adze_rotary &r, bool k, int64_t b, int64_t s, int64_t h0,
                                                int64_t heads)
{
    const int64_t vectors = r.head_dim / W;
    float sum = 0;
#pragma unroll 1
    for (int64_t e = threadIdx.x; e < heads * vectors; e += blockDim.x) {
        int64_t h, v;
        rope_divide(e, vectors, &h, &v);
        float f[W];
        load<T, W>((const T *)rope_find<T>(r, k, b, s, h0 + h).x + v * W, f);
        sum += rope_squares<W>(f);
    }
    return sum;
}

/* One pass over some heads of q or k, now that their scale is known. */
template <typename T, int PAIRS, int W>
__device__ __forceinline__ void rope_write_heads(const rope_params &p, bool k, int64_t b, int64_t s, int64_t h0,
                                                 int64_t heads, float scale)
{
    const adze_rotary &r = p.r;
    const int64_t weight_stride = r.across_heads ? r.head_dim : 0;
#pragma unroll 1
    for (int64_t item = threadIdx.x; item < heads * p.lanes; item += blockDim.x) {
        int64_t h, lane, at[2];
        rope_divide(item, p.lanes, &h, &lane);
        rope_places<PAIRS, W>(r, lane, at);
        const rope_tables<W> tables = rope_read_tables<T, PAIRS, W>(r, b, s, lane);
        const rope_head head = rope_find<T>(r, k, b, s, h0 + h);
        float v[2][W];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            load<T, W>((const T *)head.x + at[i], v[i]);
            rope_value<T, W>(r, head.weight, head.weight_f32, h * weight_stride + at[i], scale, v[i]);
        }
        rope_rotate<T, PAIRS, W>(r, tables, v[0], v[1], (T *)head.out, at);
    }
    const int64_t rest = (r.head_dim - r.rotary_dim) / W;
#pragma unroll 1
    for (int64_t e = threadIdx.x; e < heads * rest; e += blockDim.x) {
        int64_t h, i;
        rope_divide(e, rest, &h, &i);
        const rope_head head = rope_find<T>(r, k, b, s, h0 + h);
        const int64_t at = r.rotary_dim + i * W;
        float v[W];
        load<T, W>((const T *)head.x + at, v);
        rope_value<T, W>(r, head.weight, head.weight_f32, h * weight_stride + at, scale, v);
        store<T, W>((T *)head.out + at, v);
    }
}

/* The same for one item of q and one of k in each thread. */
template <typename T, int PAIRS, int W>
__device__ __forceinline__ void rope_held_heads(const rope_params &p, int64_t b, int64_t s, int64_t h0,
                                                const int64_t (&heads)[2], float (*part)[32])
{
    const adze_rotary &r = p.r;
    int64_t h, lane, at[2];
    rope_divide(threadIdx.x, p.lanes, &h, &lane);
    rope_places<PAIRS, W>(r, lane, at);
    const bool works = h < heads[0] || h < heads[1];
    rope_tables<W> tables;
    if (works)
        tables = rope_read_tables<T, PAIRS, W>(r, b, s, lane);
    if (p.const_tables)
        pdl_wait();
    rope_held<T, W> x[2][2];
    float sum[2];
#pragma unroll
    for (int k = 0; k < 2; k++)
        if (h < heads[k]) {
            const T *row = (const T *)rope_find<T>(r, k, b, s, h0 + h).x;
            x[k][0].read(row + at[0]);
            x[k][1].read(row + at[1]);
        }
#pragma unroll
    for (int k = 0; k < 2; k++) {
        float v[2][W] = {};
        if (h < heads[k])
            x[k][0].get(v[0]), x[k][1].get(v[1]);
        sum[k] = rope_squares<W>(v[0]) + rope_squares<W>(v[1]);
    }
    row_sums(sum, part);
#pragma unroll
    for (int k = 0; k < 2; k++) {
        x[k][0].keep();
        x[k][1].keep();
    }
#pragma unroll
    for (int k = 0; k < 2; k++)
        if (h < heads[k]) {
            const rope_head head = rope_find<T>(r, k, b, s, h0 + h);
            const float scale = rsqrtf(sum[k] * p.inverse[k] + r.eps);
            const int64_t weight_at = r.across_heads ? h * r.head_dim : 0;
            float v[2][W];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                x[k][i].get(v[i]);
                rope_value<T, W>(r, head.weight, head.weight_f32, weight_at + at[i], scale, v[i]);
            }
            rope_rotate<T, PAIRS, W>(r, tables, v[0], v[1], (T *)head.out, at);
        }
}

template <typename T, int PAIRS, int W, bool HELD>
__global__ void __launch_bounds__(HELD ? HELD_THREADS : ROWS_THREADS) rope_rows(const __grid_constant__ rope_params p)
{
    const adze_rotary &r = p.r;
    __shared__ alignas(16) float part[2][32];
    pdl_launch_next();
    if (!HELD || !p.const_tables)
        pdl_wait();
    for (int64_t unit = blockIdx.x; unit < p.units; unit += gridDim.x) {
        int64_t token, h0, b, s;
        rope_divide(unit, p.groups, &token, &h0);
        rope_divide(token, r.seq, &b, &s);
        const int64_t q_heads = r.across_heads ? r.side[0].heads : h0 < r.side[0].heads;
        const int64_t k_heads = r.across_heads ? r.side[1].heads : h0 < r.side[1].heads;
        if constexpr (HELD) {
            const int64_t heads[2] = {q_heads, k_heads};
            rope_held_heads<T, PAIRS, W>(p, b, s, h0, heads, part);
        } else {
#pragma unroll 1
            for (int k = 0; k < 2; k++) {
                const int64_t heads = k ? k_heads : q_heads;
                const float sum = row_sum(rope_sum_heads<T, W>(r, k, b, s, h0, heads), part[k]);
                const float scale = rsqrtf(sum * (k ? p.inverse[1] : p.inverse[0]) + r.eps);
                rope_write_heads<T, PAIRS, W>(p, k, b, s, h0, heads, scale);
            }
        }
        __syncthreads(); /* part is used again */
    }
}

/* Whether all that is read or written W elements at a time is aligned for it. */
static inline bool rope_side_aligned(const adze_rotary &r, const adze_rotary_side &side, int64_t size)
{
    const int64_t weight = side.weight_dtype == ADZE_F32 ? 4 : size;
    bool aligned = (uintptr_t)side.x % 16 == 0 && (uintptr_t)side.out % 16 == 0 && (uintptr_t)side.weight % 16 == 0 &&
                   r.head_dim * weight % 16 == 0;
    for (int d = 0; d < 3; d++)
        aligned = aligned && side.x_stride[d] * size % 16 == 0 && side.out_stride[d] * size % 16 == 0;
    return aligned || side.heads == 0;
}
static inline bool rope_aligned(const adze_rotary &r, int64_t size)
{
    const int64_t table = r.table_dtype == ADZE_F32 ? 4 : size;
    bool aligned = r.rotary_dim * size % 32 == 0 && r.head_dim * size % 16 == 0 &&
                   rope_side_aligned(r, r.side[0], size) && rope_side_aligned(r, r.side[1], size) &&
                   (uintptr_t)r.cos % 16 == 0 && (uintptr_t)r.sin % 16 == 0;
    for (int d = 0; d < 2; d++)
        aligned = aligned && r.cos_stride[d] * table % 16 == 0 && r.sin_stride[d] * table % 16 == 0;
    return aligned;
}

template <typename T, int PAIRS, int W, int HEADS, bool NORM>
static adze_status rope_launch_heads(const char *op, adze_stream stream, rope_params p)
{
    p.groups = (int32_t)((p.r.side[0].heads + p.r.side[1].heads + HEADS - 1) / HEADS);
    p.units = p.r.batch * p.r.seq * p.groups;
    while (1 << p.width_log2 < p.lanes && 1 << p.width_log2 < HEADS_THREADS)
        p.width_log2++;
    return launch(op, stream, rope_heads<T, PAIRS, W, HEADS, NORM>, grid_for(p.units, HEADS_THREADS >> p.width_log2),
                  dim3(HEADS_THREADS), 0, p);
}

template <typename T, int PAIRS, int W>
static adze_status rope_launch_rows(const char *op, adze_stream stream, rope_params p)
{
    const adze_rotary &r = p.r;
    const int64_t most = r.side[0].heads > r.side[1].heads ? r.side[0].heads : r.side[1].heads;
    const int64_t heads = r.across_heads ? most : 1, items = heads * p.lanes;
    p.groups = r.across_heads ? 1 : (int32_t)most;
    p.units = r.batch * r.seq * p.groups;
    const int64_t threads = items <= 32 ? 32 : items < ROWS_THREADS ? (items + 31) / 32 * 32 : ROWS_THREADS;
    if constexpr (W > 1) {
        if (items <= HELD_THREADS && r.rotary_dim == r.head_dim)
            return launch(op, stream, rope_rows<T, PAIRS, W, true>, grid_for(p.units, 1), dim3((unsigned)threads), 0,
                          p);
    }
    return launch(op, stream, rope_rows<T, PAIRS, W, false>, grid_for(p.units, 1), dim3((unsigned)threads), 0, p);
}

template <typename T, int PAIRS, bool NORM>
static adze_status rope_launch(const char *op, adze_stream stream, rope_params p)
{
    const adze_rotary &r = p.r;
    constexpr int W = VEC<T>;
    const bool aligned = rope_aligned(r, sizeof(T));
    p.lanes = r.rotary_dim / 2 / (aligned ? W : 1);
    adze_status status;
    if (aligned ? rope_try_lean<T, NORM, false>(op, stream, r, p.inverse, p.const_tables, &status)
                : rope_try_lean<T, NORM, true>(op, stream, r, p.inverse, p.const_tables, &status))
        return status;
    if constexpr (NORM) {
        if (!aligned)
            return rope_launch_rows<T, PAIRS, 1>(op, stream, p);
        if (r.across_heads || r.rotary_dim != r.head_dim || p.lanes > 32)
            return rope_launch_rows<T, PAIRS, W>(op, stream, p);
    } else if (!aligned) {
        return rope_launch_heads<T, PAIRS, 1, 4, NORM>(op, stream, p);
    }
    return rope_launch_heads<T, PAIRS, W, 2, NORM>(op, stream, p);
}

template <typename T, bool NORM>
static adze_status rope_launch_pairs(const char *op, adze_stream stream, const rope_params &p)
{
    return p.r.pairs == ADZE_ROPE_HALF ? rope_launch<T, ADZE_ROPE_HALF, NORM>(op, stream, p)
                                       : rope_launch<T, ADZE_ROPE_INTERLEAVED, NORM>(op, stream, p);
}

template <bool NORM>
static adze_status rope_run(const char *op, adze_stream stream, const adze_qk_norm_rope_args *a)
{
    rope_params p = {};
    p.r = adze_rotary_of(a);
    const adze_rotary &r = p.r;
    if (r.batch * r.seq * (r.side[0].heads + r.side[1].heads) * r.head_dim == 0)
        return ADZE_OK;
    /* A norm of one head that is too long for a warp is a norm across heads. */
    if (NORM && r.side[0].heads <= 1 && r.side[1].heads <= 1 &&
        r.head_dim * (int64_t)adze_dtype_size(r.dtype) > 32 * 2 * 16)
        p.r.across_heads = 1;
    p.const_tables = (a->call.flags & ADZE_CONST_WEIGHTS) != 0;
    for (int k = 0; k < 2; k++)
        p.inverse[k] = 1 / (float)(r.head_dim * (r.across_heads ? r.side[k].heads : 1));
    switch (r.dtype) {
    case ADZE_F32: return rope_launch_pairs<float, NORM>(op, stream, p);
    case ADZE_F16: return rope_launch_pairs<f16, NORM>(op, stream, p);
    default: return rope_launch_pairs<bf16, NORM>(op, stream, p);
    }
}

#endif
