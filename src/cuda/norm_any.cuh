/* norm_any.cuh - any call of rms_norm and layer_norm, on CUDA: all options, any alignment, rows of any length.

   blockDim.x threads share a row, a power of 2 below 32 or whole warps, and blockDim.y rows share a block. With
   VECTORS > 0 each thread holds so many vectors of its row, packed, from the one time x is read; IN_CLUSTER: the
   blocks of a cluster have a part of one row each. With VECTORS 0 the row is read again for each pass. Options are
   branches on the call's parameters, the same in all threads. */
#ifndef ADZE_CUDA_NORM_ANY_CUH
#define ADZE_CUDA_NORM_ANY_CUH

#include "cluster.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "unaligned.cuh"

/* Of a block, where a thread has up to 4 vectors and where it has 8; of a block; of a cluster: at most. */
constexpr int ANY_THREADS = 256, ANY_LONG_THREADS = 512, ANY_ROWS = 32, ANY_CLUSTER = 8;

enum { X, OUT, RESIDUAL, SUM, SCALE, SHIFT, GATE, SCALE_TABLE, SHIFT_TABLE, GATE_TABLE, NORM_TENSORS };
enum { TABLE = SCALE_TABLE - SCALE }; /* from one of scale, shift and gate to its table */
enum { WEIGHT_END = NORM_TENSORS, BIAS_END, NORM_ENDS };

struct norm_params {
    const void *data[NORM_TENSORS]; /* NULL: absent */
    const void *weight, *bias;
    const char *end[NORM_ENDS];
    int64_t dim;
    float eps, weight_offset, inverse_dim;
    int32_t rounding;
    uint32_t is_f32; /* by tensor: it is f32 where x is not */
    uint32_t ragged; /* by tensor: it ends within a block of 16 bytes */
    bool weight_f32, bias_f32;
    adze_rows rows;
};
template <typename ROWS>
struct norm_any_params {
    norm_params g;
    int64_t part; /* vectors of a row in each block of a cluster */
    ROWS rows;
};
/* Rows that are held are near. */
template <int VECTORS>
using norm_rows_of = rows_for<(VECTORS > 0 ? 16 : 1), NORM_TENSORS>;
template <int VECTORS>
using norm_any_of = norm_any_params<norm_rows_of<VECTORS>>;

/* All W values as a store and a load would leave them, if `condition`. */
template <typename T, int W>
__device__ __forceinline__ void round_if(bool condition, float (&f)[W])
{
    if (!condition)
        return;
    packed<T> v;
    v.set(f);
    v.get(f);
}

/* The sum over the threads of a row, and over the blocks of its cluster. `part` is shared memory that nothing else
   uses until the next barrier. */
template <bool IN_CLUSTER>
__device__ __forceinline__ float any_total(float v, float (*part)[ANY_LONG_THREADS / 32], float2 *blocks)
{
    const int width = min((int)blockDim.x, 32);
    for (int mask = width / 2; mask; mask /= 2)
        v += __shfl_xor_sync(~0u, v, mask);
    if (blockDim.x > 32) {
        float *mine = part[threadIdx.y];
        if (threadIdx.x % 32 == 0)
            mine[threadIdx.x / 32] = v;
        __syncthreads();
        v = 0;
        for (int w = 0; w < (int)blockDim.x / 32; w++)
            v += mine[w];
    }
    if constexpr (IN_CLUSTER) {
        const int count = cluster_size();
        if ((int)threadIdx.x < count)
            cluster_store(&blocks[cluster_rank()], (int)threadIdx.x, v, 0);
        cluster_arrive();
        cluster_wait();
        v = 0;
        for (int b = 0; b < count; b++)
            v += blocks[b].x;
    }
    return v;
}

/* A row of the call. */
template <typename T, typename I, typename ROWS>
struct norm_view {
    static constexpr int W = VEC<T>;
    const norm_any_params<ROWS> &p;
    typename ROWS::place place;
    const uint4 *tails;
    I dim;

    __device__ __forceinline__ const char *row(int t) const
    {
        return (const char *)p.g.data[t] +
               p.rows.offset(place, t) * (int64_t)(p.g.is_f32 >> t & 1 ? sizeof(float) : sizeof(T));
    }
    __device__ __forceinline__ any_row<I> open(const char *data, const char *end, int size, int tail) const
    {
        const int64_t left = end - data;
        return {data, dim * size, sizeof(I) == 4 && left > 0x7fffffc0 ? (I)0x7fffffc0 : (I)left, tails + tail};
    }
    __device__ __forceinline__ any_row<I> open(int t) const { return open(row(t), p.g.end[t], sizeof(T), t); }
    __device__ __forceinline__ void read(const char *data, const char *end, bool is_f32, int tail, I start,
                                         float (&f)[W]) const
    {
        if (is_f32)
            any_load<float, W>(open(data, end, sizeof(float), tail), start, f);
        else
            any_load<T, W>(open(data, end, sizeof(T), tail), start, f);
    }
    __device__ __forceinline__ any_row<I> open_weight() const
    {
        return open((const char *)p.g.weight, p.g.end[WEIGHT_END], sizeof(T), WEIGHT_END);
    }
    __device__ __forceinline__ void read(int t, I start, float (&f)[W]) const
    {
        read(row(t), p.g.end[t], p.g.is_f32 >> t & 1, t, start, f);
    }
    /* One of scale, shift and gate, with its table added. */
    __device__ __forceinline__ void read_side(int t, I start, float (&f)[W]) const
    {
        read(t, start, f);
        if (p.g.data[t + TABLE]) {
            float table[W];
            read(t + TABLE, start, table);
#pragma unroll
            for (int j = 0; j < W; j++)
                f[j] += table[j];
            round_if<T, W>(p.g.rounding & ADZE_ROUND_STEPS, f);
        }
    }

    /* From x to what is normalised. */
    __device__ __forceinline__ void add_residual(I start, float (&h)[W], bool store_sum) const
    {
        float other[W];
        if (p.g.data[GATE]) {
            read_side(GATE, start, other);
#pragma unroll
            for (int j = 0; j < W; j++)
                h[j] *= other[j];
            round_if<T, W>(p.g.rounding & ADZE_ROUND_STEPS, h);
        }
        read(RESIDUAL, start, other);
#pragma unroll
        for (int j = 0; j < W; j++)
            h[j] += other[j];
        if (store_sum && p.g.data[SUM])
            any_store<T, W>((T *)row(SUM), start, dim, h);
        round_if<T, W>(!(p.g.rounding & ADZE_FLOAT_SUM), h);
    }
    /* From the normalised value to what is stored. EARLY: a weight of dtype T has been fetched. */
    template <bool SIDES, bool EARLY>
    __device__ __forceinline__ void write(I start, const any_vector<16> &weight, float (&y)[W]) const
    {
        const bool steps = SIDES && p.g.rounding & ADZE_ROUND_STEPS && (p.g.data[SCALE] || p.g.data[SHIFT]);
        float side[W];
        round_if<T, W>(p.g.rounding & ADZE_ROUND_NORM, y);
        if (p.g.weight) {
            if (!EARLY || p.g.weight_f32)
                read((const char *)p.g.weight, p.g.end[WEIGHT_END], p.g.weight_f32, WEIGHT_END, start, side);
            else
                weight.template get<T>(any_shift((const T *)p.g.weight + (int64_t)start), side);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] *= side[j] + p.g.weight_offset;
        }
        if (p.g.bias) {
            read((const char *)p.g.bias, p.g.end[BIAS_END], p.g.bias_f32, BIAS_END, start, side);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] += side[j];
        }
        if constexpr (SIDES) {
            round_if<T, W>(steps, y);
            modulate(start, steps, y);
        }
        if (p.g.is_f32 >> OUT & 1)
            any_store<float, W>((float *)row(OUT), start, dim, y);
        else
            any_store<T, W>((T *)row(OUT), start, dim, y);
    }
    __device__ __forceinline__ void modulate(I start, bool steps, float (&y)[W]) const
    {
        float side[W];
        if (p.g.data[SCALE]) {
            read_side(SCALE, start, side);
#pragma unroll
            for (int j = 0; j < W; j++)
                side[j] += 1;
            round_if<T, W>(steps, side);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] *= side[j];
            round_if<T, W>(steps && p.g.data[SHIFT], y);
        }
        if (p.g.data[SHIFT]) {
            read_side(SHIFT, start, side);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] += side[j];
        }
    }
    /* Elements of a vector outside 0..last-1 are `fill`. */
    __device__ __forceinline__ void fill_outside(I start, I last, float fill, float (&h)[W]) const
    {
        if (start >= 0 && start + W <= last)
            return;
#pragma unroll
        for (int j = 0; j < W; j++)
            if (start + j < 0 || start + j >= last)
                h[j] = fill;
    }
    /* Whether one of the tensors `which` ends in this row. */
    __device__ __forceinline__ bool reaches_tail(uint32_t which) const
    {
        bool reaches = false;
#pragma unroll
        for (int t = 0; t < NORM_TENSORS; t++)
            if (which >> t & 1 && p.g.ragged >> t & 1) {
                const int64_t size = p.g.is_f32 >> t & 1 ? sizeof(float) : sizeof(T);
                reaches |= row(t) + dim * size > (const char *)((uintptr_t)p.g.end[t] & ~(uintptr_t)15);
            }
        return reaches;
    }
};

/* The tensors that are read before the first sum. */
constexpr uint32_t NORM_EARLY = 1u << X | 1u << RESIDUAL | 1u << GATE | 1u << GATE_TABLE;

/* Copies the blocks in which the tensors `which` end, for a warp: lane t has tensor t. */
__device__ __forceinline__ void norm_copy_tails(const norm_params &g, uint32_t which, uint4 *tails)
{
    const int lane = (int)(threadIdx.x + threadIdx.y * blockDim.x) % 32;
    __syncwarp();
    if (g.ragged & which & 1u << lane)
        tails[lane] = any_tail(g.end[lane]);
    __syncwarp();
}

/* Shared memory of a block; rows of more than a warp are few. */
template <bool IN_CLUSTER>
struct norm_shared {
    float part[2][ANY_THREADS / 64][ANY_LONG_THREADS / 32];
    float2 blocks[2][IN_CLUSTER ? ANY_CLUSTER : 1];
    uint4 tails[ANY_LONG_THREADS / 32][NORM_ENDS];
};

/* Row r; beyond the last row, that one again without a store: shuffles and barriers want all threads. SIDES: there
   may be more than x, weight and bias; vectors are then worked on in a loop that walks the registers, which keeps
   what one needs from taking the registers of all. */
template <typename T, bool CENTRED, int VECTORS, bool SIDES, bool IN_CLUSTER, typename I, typename R>
__device__ __forceinline__ void norm_any_row(const norm_any_of<VECTORS> &p, R r, norm_shared<IN_CLUSTER> &shared)
{
    constexpr bool HELD = VECTORS > 0;
    constexpr int W = VEC<T>, N = HELD ? VECTORS : 2;
    constexpr bool EARLY = !SIDES && N <= 4; /* weights are fetched before the sum is known */
    const bool writes = r < p.rows.count;
    const int warp = (int)(threadIdx.x + threadIdx.y * blockDim.x) / 32;
    const norm_view<T, I, norm_rows_of<VECTORS>> v = {p, p.rows.split(writes ? r : p.rows.count - 1),
                                                      shared.tails[warp], (I)p.g.dim};
    const I step = (I)blockDim.x * W, chunk = step * N;
    const int head = p.g.is_f32 >> OUT & 1 ? any_head((const float *)v.row(OUT)) : any_head((const T *)v.row(OUT));
    const I first = (I)threadIdx.x * W - head + (IN_CLUSTER ? (I)cluster_rank() * (I)p.part * W : 0);
    const I last = IN_CLUSTER ? min(v.dim, ((I)cluster_rank() + 1) * (I)p.part * W - head) : v.dim;
    const bool adds = SIDES && p.g.data[RESIDUAL], again = adds && (!HELD || p.g.rounding & ADZE_FLOAT_SUM);
    packed<T> x[N];
    any_vector<16> weight[EARLY ? N : 1];

    const auto fetch = [&](I from) {
        const any_row<I> row = v.open(X);
        any_vector<16> raw[N];
#pragma unroll
        for (int n = 0; n < N; n++)
            raw[n].fetch(row, from + n * step < last ? (I)((from + n * step) * (I)sizeof(T)) : row.bytes);
        const int shift = any_shift((const T *)row.data + (int64_t)from);
#pragma unroll
        for (int n = 0; n < N; n++) {
            uint32_t w[4];
            raw[n].template align<T>(shift, w);
            x[n].raw = make_uint4(w[0], w[1], w[2], w[3]);
        }
    };
    /* work(n, start, h) on each vector of the row that the thread has, from its first element on, which is x then. */
    const auto each = [&](I from, auto work) {
        if constexpr (SIDES) {
#pragma unroll 1
            for (int n = 0; n < N; n++, from += step) {
                float h[W];
                x[0].get(h);
                const packed<T> now = work(0, from, h, x[0]);
#pragma unroll
                for (int i = 0; i + 1 < N; i++)
                    x[i] = x[i + 1];
                x[N - 1] = now;
            }
        } else {
#pragma unroll
            for (int n = 0; n < N; n++, from += step) {
                float h[W];
                x[n].get(h);
                x[n] = work(n, from, h, x[n]);
            }
        }
    };
    const auto pass = [&](auto work) {
        if constexpr (HELD) {
            each(first, work);
        } else {
#pragma unroll 1
            for (I at = first; at < last; at += chunk) {
                fetch(at);
                each(at, work);
            }
        }
    };
    if (p.g.ragged & NORM_EARLY && __any_sync(~0u, v.reaches_tail(NORM_EARLY)))
        norm_copy_tails(p.g, NORM_EARLY, shared.tails[warp]);
    if (HELD)
        fetch(first);
    if (p.g.ragged & ~NORM_EARLY)
        norm_copy_tails(p.g, ~NORM_EARLY, shared.tails[warp]);

    float sum = 0, mean = 0;
    pass([&](int, I start, float(&h)[W], packed<T> now) {
        if (adds && start < last) {
            v.add_residual(start, h, writes && !again);
            if (!again)
                now.set(h);
        }
        v.fill_outside(start, last, 0, h);
#pragma unroll
        for (int j = 0; j < W; j++)
            sum += CENTRED ? h[j] : h[j] * h[j];
        return now;
    });
    if constexpr (EARLY)
        if (p.g.weight && !p.g.weight_f32) {
            const any_row<I> row = v.open_weight();
#pragma unroll
            for (int n = 0; n < N; n++)
                weight[n].fetch(row, first + n * step < last ? (I)((first + n * step) * (I)sizeof(T)) : row.bytes);
        }
    if (IN_CLUSTER)
        cluster_wait();
    sum = any_total<IN_CLUSTER>(sum, shared.part[0], shared.blocks[0]);
    if (CENTRED) {
        mean = sum * p.g.inverse_dim;
        sum = 0;
        pass([&](int, I start, float(&h)[W], packed<T> now) {
            if (again && start < last)
                v.add_residual(start, h, false);
            v.fill_outside(start, last, mean, h);
#pragma unroll
            for (int j = 0; j < W; j++)
                sum += (h[j] - mean) * (h[j] - mean);
            return now;
        });
        sum = any_total<IN_CLUSTER>(sum, shared.part[1], shared.blocks[1]);
    }
    const float factor = rsqrtf(sum * p.g.inverse_dim + p.g.eps);
    pass([&](int n, I start, float(&h)[W], packed<T> now) {
        if (start < last && writes) {
            if (again)
                v.add_residual(start, h, true);
#pragma unroll
            for (int j = 0; j < W; j++)
                h[j] = (h[j] - mean) * factor;
            v.template write<SIDES, EARLY>(start, weight[EARLY ? n : 0], h);
        }
        return now;
    });
}

/* Blocks of a multiprocessor, at least: this bounds the registers. */
template <int VECTORS, bool SIDES>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int norm_any_blocks = VECTORS == 0 || VECTORS > 4 ? 1
                                : SIDES                     ? 2
                                : VECTORS > 2               ? 3
                                                            : 4;
#else
constexpr int norm_any_blocks = 1;
#endif

template <typename T, bool CENTRED, int VECTORS, bool SIDES, bool IN_CLUSTER>
__global__ void __launch_bounds__(VECTORS > 4 ? ANY_LONG_THREADS : ANY_THREADS, norm_any_blocks<VECTORS, SIDES>)
    norm_any(const __grid_constant__ norm_any_of<VECTORS> p)
{
    __shared__ __align__(16) norm_shared<IN_CLUSTER> shared;
    if constexpr (IN_CLUSTER)
        cluster_arrive(); /* waited for before the first store: all blocks are there */
    pdl_launch_next();
    pdl_wait();
    if constexpr (VECTORS > 0) {
        const uint32_t group = IN_CLUSTER ? blockIdx.x / (uint32_t)cluster_size() : blockIdx.x;
        norm_any_row<T, CENTRED, VECTORS, SIDES, IN_CLUSTER, int32_t>(p, group * blockDim.y + threadIdx.y, shared);
    } else {
        for (int64_t r = blockIdx.x; r < p.rows.count; r += gridDim.x) {
            norm_any_row<T, CENTRED, 0, true, false, int64_t>(p, r, shared);
            __syncthreads(); /* shared is used again */
        }
    }
}

/* How a row is cut: `threads` of a row in each of `cluster` blocks, which have `rows` rows. */
struct norm_cut {
    int vectors, cluster;
    int64_t threads, rows;
};
template <typename T, bool CENTRED, int VECTORS, bool SIDES, bool IN_CLUSTER>
static adze_status norm_launch_cut(const char *op, adze_stream s, const norm_params &g, int64_t vectors,
                                   const norm_cut &cut)
{
    norm_any_of<VECTORS> p = {};
    p.g = g;
    p.part = ceil_div(vectors, cut.cluster);
    if constexpr (VECTORS > 0)
        p.rows = rows_near(g.rows, {X, OUT, RESIDUAL, SUM, SCALE, SHIFT, GATE, SCALE_TABLE, SHIFT_TABLE, GATE_TABLE});
    else
        static_cast<adze_rows &>(p.rows) = g.rows;
    return launch(op, s, norm_any<T, CENTRED, VECTORS, SIDES, IN_CLUSTER>,
                  grid_for(g.rows.count, cut.rows) * cut.cluster, dim3((unsigned)cut.threads, (unsigned)cut.rows),
                  launch_shape(0, (unsigned)cut.cluster), p);
}
template <typename T, bool CENTRED>
static adze_status norm_launch_any(const char *op, adze_stream s, const norm_params &g, int64_t vectors,
                                   const norm_cut &cut)
{
    const bool sides = g.data[RESIDUAL] || g.data[SCALE] || g.data[SHIFT];
    switch (cut.vectors * 16 + (cut.cluster > 1) * 2 + sides) {
    case 2 * 16: return norm_launch_cut<T, CENTRED, 2, false, false>(op, s, g, vectors, cut);
    case 4 * 16: return norm_launch_cut<T, CENTRED, 4, false, false>(op, s, g, vectors, cut);
    case 4 * 16 + 2: return norm_launch_cut<T, CENTRED, 4, false, true>(op, s, g, vectors, cut);
    case 8 * 16 + 2: return norm_launch_cut<T, CENTRED, 8, false, true>(op, s, g, vectors, cut);
    case 2 * 16 + 1: return norm_launch_cut<T, CENTRED, 2, true, false>(op, s, g, vectors, cut);
    case 4 * 16 + 1: return norm_launch_cut<T, CENTRED, 4, true, false>(op, s, g, vectors, cut);
    case 4 * 16 + 3: return norm_launch_cut<T, CENTRED, 4, true, true>(op, s, g, vectors, cut);
    case 8 * 16 + 3: return norm_launch_cut<T, CENTRED, 8, true, true>(op, s, g, vectors, cut);
    default: return norm_launch_cut<T, CENTRED, 0, true, false>(op, s, g, vectors, cut);
    }
}

#endif
