/* norm_any.cuh - any call of rms_norm and layer_norm, on CUDA: all options, any alignment, rows of any length.

   blockDim.x threads share a row, a power of 2 below 32 or whole warps, and blockDim.y rows share a block. A row has
   a body of vectors and single elements at its ends (unaligned.cuh). With VECTORS > 0 each thread holds so many
   vectors, packed, from the one time x is read; IN_CLUSTER: the blocks of a cluster have a part of one row each. With
   VECTORS 0 the row is read again for each pass; so are its ends, always. Options are branches on the call's
   parameters, the same in all threads. SIDES: there may be more than x, weight and bias; vectors are then worked on
   in a loop that walks the registers, which keeps what one needs from taking the registers of all. */
#ifndef ADZE_CUDA_NORM_ANY_CUH
#define ADZE_CUDA_NORM_ANY_CUH

#include "cluster.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "unaligned.cuh"

constexpr int ANY_MOST = 512, ANY_ROWS = 32, ANY_CLUSTER = 8; /* threads and rows of a block, blocks of a cluster */
/* Vectors of a thread that are on their way in a loop; more than one spills where it was not measured. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int ANY_LOOP = 2;
#else
constexpr int ANY_LOOP = 1;
#endif

enum norm_parts { ALONE, ADDING, ALL_PARTS };
/* Threads of a block, at most: as many as their registers allow. */
constexpr int any_threads(int vectors, norm_parts parts)
{
    return vectors == 2 && parts == ALL_PARTS ? 192 : vectors > 4 && parts == ALONE ? ANY_MOST : 256;
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
    bool aligned; /* all tensors' rows are multiples of 16 bytes at multiples of 16 bytes */
    adze_rows rows;
};
template <typename ROWS>
struct norm_any_params {
    norm_params g;
    int64_t part; /* vectors of a row in each block of a cluster */
    uint32_t ask; /* the first blocks, which ask ahead for what they read */
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
    if constexpr (W == VEC<T>) {
        packed<T> v;
        v.set(f);
        v.get(f);
    } else {
        f[0] = round_to<T>(f[0]);
    }
}

/* Shared memory of a block; rows of more than a warp are few. */
template <bool IN_CLUSTER>
struct norm_shared {
    float part[2][ANY_MOST / 64][ANY_MOST / 32];
    float2 blocks[2][IN_CLUSTER ? ANY_CLUSTER : 1];
};

/* The sum over the threads of a row, and over the blocks of its cluster. I: the first or the second of a row. */
template <int I, bool IN_CLUSTER>
__device__ __forceinline__ float any_total(float v, norm_shared<IN_CLUSTER> &shared)
{
    const int width = min((int)blockDim.x, 32);
    for (int mask = width / 2; mask; mask /= 2)
        v += __shfl_xor_sync(~0u, v, mask);
    if (blockDim.x > 32) {
        float *mine = shared.part[I][threadIdx.y];
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
            cluster_store(&shared.blocks[I][cluster_rank()], (int)threadIdx.x, v, 0);
        cluster_arrive();
        cluster_wait();
        v = 0;
        for (int b = 0; b < count; b++)
            v += shared.blocks[I][b].x;
    }
    return v;
}

/* A row of the call. What it does, it does for a vector or for a single element, from element i on. */
template <typename T, typename ROWS>
struct norm_view {
    const norm_any_params<ROWS> &p;
    typename ROWS::place place;

    __device__ __forceinline__ const char *row(int t) const
    {
        return (const char *)p.g.data[t] +
               p.rows.offset(place, t) * (int64_t)(p.g.is_f32 >> t & 1 ? sizeof(float) : sizeof(T));
    }
    /* Addresses are found again after this, rather than held in registers. */
    __device__ __forceinline__ void forget()
    {
        if constexpr (sizeof place.first() == 4)
            asm volatile("" : "+r"(place.first()));
        else
            asm volatile("" : "+l"(place.first()));
    }
    /* One of scale, shift and gate with its table, if any, of which own has been fetched. */
    template <int W>
    __device__ __forceinline__ void get_side(int t, const any_param<T, W> &own, int64_t i, float (&f)[W]) const
    {
        own.get(f);
        if (p.g.data[t + TABLE]) {
            float more[W];
            any_load_param<T, W>(row(t + TABLE), p.g.is_f32 >> (t + TABLE) & 1, i, more);
#pragma unroll
            for (int j = 0; j < W; j++)
                f[j] += more[j];
            round_if<T, W>(p.g.rounding & ADZE_ROUND_STEPS, f);
        }
    }
    /* From x to what is normalised. */
    template <bool GATED, int W>
    __device__ __forceinline__ void add_residual(int64_t i, const float (&residual)[W], float (&h)[W],
                                                 bool store_sum) const
    {
        if (GATED && p.g.data[GATE]) {
            float gate[W];
            any_param<T, W> own;
            own.fetch(row(GATE), p.g.is_f32 >> GATE & 1, i);
            get_side(GATE, own, i, gate);
#pragma unroll
            for (int j = 0; j < W; j++)
                h[j] *= gate[j];
            round_if<T, W>(p.g.rounding & ADZE_ROUND_STEPS, h);
        }
#pragma unroll
        for (int j = 0; j < W; j++)
            h[j] += residual[j];
        if (store_sum && p.g.data[SUM])
            any_store<T, W>((T *)row(SUM) + i, h);
        round_if<T, W>(!(p.g.rounding & ADZE_FLOAT_SUM), h);
    }
    template <int W>
    __device__ __forceinline__ void get_early(const any_vector<16> &early, int64_t i, float (&f)[W]) const
    {
        if constexpr (W > 1)
            early.template get<T>(any_shift((const T *)p.g.weight + i), f);
    }
    /* From the normalised value to what is stored. EARLY: a weight of dtype T has been fetched. */
    template <bool SIDES, bool EARLY, int W>
    __device__ __forceinline__ void write(int64_t i, const any_vector<16> &early, float (&y)[W]) const
    {
        const bool has_scale = SIDES && p.g.data[SCALE], has_shift = SIDES && p.g.data[SHIFT];
        const bool steps = p.g.rounding & ADZE_ROUND_STEPS && (has_scale || has_shift);
        any_param<T, W> scale, shift; /* both are on their way before one is used */
        float f[W];
        if (has_scale)
            scale.fetch(row(SCALE), p.g.is_f32 >> SCALE & 1, i);
        if (has_shift)
            shift.fetch(row(SHIFT), p.g.is_f32 >> SHIFT & 1, i);
        round_if<T, W>(p.g.rounding & ADZE_ROUND_NORM, y);
        if (p.g.weight) {
            if (EARLY && !p.g.weight_f32)
                get_early(early, i, f);
            else
                any_load_param<T, W>(p.g.weight, p.g.weight_f32, i, f);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] *= f[j] + p.g.weight_offset;
        }
        if (p.g.bias) {
            any_load_param<T, W>(p.g.bias, p.g.bias_f32, i, f);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] += f[j];
        }
        round_if<T, W>(steps, y);
        if (has_scale) {
            get_side(SCALE, scale, i, f);
#pragma unroll
            for (int j = 0; j < W; j++)
                f[j] += 1;
            round_if<T, W>(steps, f);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] *= f[j];
            round_if<T, W>(steps && has_shift, y);
        }
        if (has_shift) {
            get_side(SHIFT, shift, i, f);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] += f[j];
        }
        if (p.g.is_f32 >> OUT & 1)
            any_store<float, W>((float *)row(OUT) + i, y);
        else
            any_store<T, W>((T *)row(OUT) + i, y);
    }
};

/* Asks ahead for the thread's first vector of x and residual, and for the weight. */
template <typename T, norm_parts PARTS, typename ROWS>
__device__ __forceinline__ void norm_any_ask(const norm_any_params<ROWS> &p, uint32_t r, int32_t first)
{
    const norm_view<T, ROWS> v = {p, p.rows.split(r < p.rows.count ? r : p.rows.count - 1)};
    const int64_t at = (int64_t)(first + (int)threadIdx.x) * VEC<T>;
    if (at >= p.g.dim)
        return;
    prefetch((const T *)v.row(X) + at);
    if (PARTS != ALONE && p.g.data[RESIDUAL])
        prefetch((const T *)v.row(RESIDUAL) + at);
    if (p.g.weight && blockIdx.x == 0)
        prefetch((const T *)p.g.weight + at);
}

/* Row r; beyond the last row, that one again without a store: shuffles and barriers want all threads. */
template <typename T, bool CENTRED, int VECTORS, norm_parts PARTS, bool IN_CLUSTER, typename I, typename R>
__device__ __forceinline__ void norm_any_row(const norm_any_of<VECTORS> &p, R r, norm_shared<IN_CLUSTER> &shared)
{
    constexpr bool HELD = VECTORS > 0, SIDES = PARTS == ALL_PARTS, ADDS = PARTS != ALONE;
    constexpr int W = VEC<T>, N = HELD ? VECTORS : ANY_LOOP;
    constexpr bool EARLY = !SIDES && HELD && N <= (ADDS ? 2 : 4); /* weights are fetched before the sum is known */
    const bool writes = r < p.rows.count;
    norm_view<T, norm_rows_of<VECTORS>> v = {p, p.rows.split(writes ? r : p.rows.count - 1)};
    const I threads = (I)blockDim.x;
    const any_cut<I> cut(p.g.is_f32 >> OUT & 1 ? (const T *)NULL : (const T *)v.row(OUT), (I)p.g.dim, p.g.aligned);
    const I begin = (I)threadIdx.x + (IN_CLUSTER ? (I)(cluster_rank() * p.part) : 0);
    const I end = IN_CLUSTER ? min(cut.vectors, (I)((cluster_rank() + 1) * p.part)) : cut.vectors;
    const int ends = !IN_CLUSTER || cluster_rank() == 0 ? cut.ends : 0;
    const bool adds = ADDS && p.g.data[RESIDUAL], again = adds && (!HELD || p.g.rounding & ADZE_FLOAT_SUM);
    const T *const x_row = (const T *)v.row(X) + cut.head;
    const T *const residual_row = ADDS ? (const T *)v.row(RESIDUAL) + cut.head : x_row;
    packed<T> x[N], residual[ADDS ? N : 1];
    any_vector<16> weight[EARLY ? N : 1];

    const auto align = [](const any_vector<16> &raw, int shift) {
        uint32_t w[4];
        raw.template align<T>(shift, w);
        return packed<T>{make_uint4(w[0], w[1], w[2], w[3])};
    };
    const auto fetch = [&](I from) {
        any_vector<16> raw[N], raw_residual[ADDS ? N : 1];
#pragma unroll
        for (int n = 0; n < N; n++)
            if (from + n * threads < end) {
                raw[n].fetch(x_row + (from + n * threads) * W);
                if constexpr (ADDS)
                    if (adds)
                        raw_residual[n].fetch(residual_row + (from + n * threads) * W);
            }
#pragma unroll
        for (int n = 0; n < N; n++) {
            x[n] = align(raw[n], any_shift(x_row));
            if constexpr (ADDS)
                residual[n] = align(raw_residual[n], any_shift(residual_row));
        }
    };
    /* work(n, i, h, now, residual) on each vector that the thread has, of which h are the values now; it returns what
       is held. */
    const auto each = [&](I from, auto work) {
        if constexpr (SIDES) {
#pragma unroll 1
            for (int n = 0; n < N; n++, from += threads) {
                packed<T> now = x[0];
                const packed<T> beside = residual[0];
                v.forget();
                if (from < end) {
                    float h[W];
                    now.get(h);
                    now = work(0, cut.template vector<W>(from), h, now, beside);
                }
#pragma unroll
                for (int i = 0; i + 1 < N; i++)
                    x[i] = x[i + 1], residual[i] = residual[i + 1];
                x[N - 1] = now, residual[N - 1] = beside;
            }
        } else {
#pragma unroll
            for (int n = 0; n < N; n++)
                if (from + n * threads < end) {
                    float h[W];
                    x[n].get(h);
                    x[n] = work(n, cut.template vector<W>(from + n * threads), h, x[n], residual[ADDS ? n : 0]);
                }
        }
    };
    const auto add_residual = [&](I i, float(&h)[W], packed<T> beside, bool store_sum) {
        float f[W];
        beside.get(f);
        v.template add_residual<SIDES>(i, f, h, store_sum);
    };
    const auto pass = [&](auto work) {
        if constexpr (HELD) {
            each(begin, work);
        } else {
#pragma unroll 1
            for (I from = begin; from < end; from += N * threads) {
                fetch(from);
                each(from, work);
            }
        }
    };
    /* work(i, h) on each single element that the thread has. */
    const auto pass_ends = [&](bool store_sum, auto work) {
#pragma unroll 1
        for (int e = (int)threadIdx.x; e < ends; e += (int)blockDim.x) {
            const I i = cut.template end<W>(e);
            float h[1];
            any_load(x_row - cut.head + i, h);
            if (adds) {
                float other[1];
                any_load(residual_row - cut.head + i, other);
                v.template add_residual<SIDES>(i, other, h, store_sum);
            }
            work(i, h);
        }
    };
    if (HELD)
        fetch(begin);

    float sum = 0, mean = 0;
    const auto add = [&](const auto &h) {
#pragma unroll
        for (int j = 0; j < (int)(sizeof h / sizeof(float)); j++)
            sum += CENTRED ? h[j] : h[j] * h[j];
    };
    pass_ends(false, [&](I, float(&h)[1]) { add(h); });
    pass([&](int, I i, float(&h)[W], packed<T> now, packed<T> beside) {
        if (adds) {
            add_residual(i, h, beside, writes && !again);
            if (!again)
                now.set(h);
        }
        add(h);
        return now;
    });
    if constexpr (EARLY)
        if (p.g.weight && !p.g.weight_f32) {
#pragma unroll
            for (int n = 0; n < N; n++)
                if (begin + n * threads < end)
                    weight[n].fetch((const T *)p.g.weight + cut.template vector<W>(begin + n * threads));
        }
    if (IN_CLUSTER)
        cluster_wait();
    sum = any_total<0>(sum, shared);
    if (CENTRED) {
        mean = sum * p.g.inverse_dim;
        sum = 0;
        const auto add_square = [&](const auto &h) {
#pragma unroll
            for (int j = 0; j < (int)(sizeof h / sizeof(float)); j++)
                sum += (h[j] - mean) * (h[j] - mean);
        };
        pass_ends(false, [&](I, float(&h)[1]) { add_square(h); });
        pass([&](int, I i, float(&h)[W], packed<T> now, packed<T> beside) {
            if (again)
                add_residual(i, h, beside, false);
            add_square(h);
            return now;
        });
        sum = any_total<1>(sum, shared);
    }
    if (!writes)
        return;
    const float factor = rsqrtf(sum * p.g.inverse_dim + p.g.eps);
    pass([&](int n, I i, float(&h)[W], packed<T> now, packed<T> beside) {
        if (again)
            add_residual(i, h, beside, true);
#pragma unroll
        for (int j = 0; j < W; j++)
            h[j] = (h[j] - mean) * factor;
        v.template write<SIDES, EARLY>(i, weight[EARLY ? n : 0], h);
        return now;
    });
    pass_ends(true, [&](I i, float(&h)[1]) {
        h[0] = (h[0] - mean) * factor;
        v.template write<SIDES, false>(i, weight[0], h);
    });
}

/* Blocks of a multiprocessor, at least: this bounds the registers. */
template <int VECTORS, norm_parts PARTS>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int norm_any_blocks = VECTORS == 0 || VECTORS > 4                              ? 1
                                : PARTS == ALL_PARTS || (PARTS == ADDING && VECTORS > 2) ? 2
                                : VECTORS > 2 || PARTS == ADDING                         ? 3
                                                                                         : 4;
#else
constexpr int norm_any_blocks = 1;
#endif

template <typename T, bool CENTRED, int VECTORS, norm_parts PARTS, bool IN_CLUSTER>
__global__ void __launch_bounds__(any_threads(VECTORS, PARTS), norm_any_blocks<VECTORS, PARTS>)
    norm_any(const __grid_constant__ norm_any_of<VECTORS> p)
{
    __shared__ __align__(16) norm_shared<IN_CLUSTER> shared;
    if constexpr (IN_CLUSTER)
        cluster_arrive(); /* waited for before the first store: all blocks are there */
    pdl_launch_next();
    const uint32_t size = IN_CLUSTER ? (uint32_t)cluster_size() : 1;
    if constexpr (VECTORS > 0) {
        const uint32_t r = blockIdx.x / size * blockDim.y + threadIdx.y;
        if (blockIdx.x < p.ask)
            norm_any_ask<T, PARTS>(p, anew(r), IN_CLUSTER ? cluster_rank() * (int32_t)p.part : 0);
        pdl_wait();
        norm_any_row<T, CENTRED, VECTORS, PARTS, IN_CLUSTER, int32_t>(p, r, shared);
    } else {
        pdl_wait();
        for (int64_t r = blockIdx.x / size; r < p.rows.count; r += gridDim.x / size) {
            norm_any_row<T, CENTRED, 0, ALL_PARTS, IN_CLUSTER, int64_t>(p, r, shared);
            if constexpr (IN_CLUSTER)
                cluster_arrive(); /* shared is used again: norm_any_row waits */
            else
                __syncthreads();
        }
        if constexpr (IN_CLUSTER)
            cluster_wait();
    }
}

static norm_parts norm_parts_of(const norm_params &g)
{
    return g.data[GATE] || g.data[SCALE] || g.data[SHIFT] ? ALL_PARTS : g.data[RESIDUAL] ? ADDING : ALONE;
}

/* How a row is cut: `threads` of a row in each of `cluster` blocks, which have `rows` rows. */
struct norm_cut {
    int vectors, cluster;
    int64_t threads, rows;
    norm_parts parts;
};
template <typename T, bool CENTRED, int VECTORS, norm_parts PARTS, bool IN_CLUSTER>
static adze_status norm_launch_cut(const char *op, adze_stream s, const norm_params &g, int64_t vectors,
                                   const norm_cut &cut)
{
    norm_any_of<VECTORS> p = {};
    p.g = g;
    p.part = ceil_div(vectors, cut.cluster);
    p.ask = asking_blocks(adze_cuda_sm_count(s.device), g.rows.count * vectors / 2, cut.threads * cut.rows,
                          cut.threads * cut.rows, 32);
    if constexpr (VECTORS > 0)
        p.rows = rows_near(g.rows, {X, OUT, RESIDUAL, SUM, SCALE, SHIFT, GATE, SCALE_TABLE, SHIFT_TABLE, GATE_TABLE});
    else
        static_cast<adze_rows &>(p.rows) = g.rows;
    return launch(op, s, norm_any<T, CENTRED, VECTORS, PARTS, IN_CLUSTER>,
                  grid_for(g.rows.count, cut.rows) * cut.cluster, dim3((unsigned)cut.threads, (unsigned)cut.rows),
                  launch_shape(0, (unsigned)cut.cluster), p);
}
template <typename T, bool CENTRED>
static adze_status norm_launch_any(const char *op, adze_stream s, const norm_params &g, int64_t vectors,
                                   const norm_cut &cut)
{
#define CUT(vectors_, parts_, in_cluster)                                                                            \
    if (cut.vectors == vectors_ && parts == parts_ && (cut.cluster > 1) == in_cluster)                               \
        return norm_launch_cut<T, CENTRED, vectors_, parts_, in_cluster>(op, s, g, vectors, cut);
    const norm_parts parts = cut.vectors ? cut.parts : ALL_PARTS;
    CUT(2, ALONE, false)
    CUT(4, ALONE, false)
    CUT(4, ALONE, true)
    CUT(8, ALONE, true)
    CUT(2, ADDING, false)
    CUT(4, ADDING, false)
    CUT(4, ADDING, true)
    CUT(2, ALL_PARTS, false)
    CUT(8, ALL_PARTS, false)
    CUT(8, ALL_PARTS, true)
    CUT(0, ALL_PARTS, true)
    return norm_launch_cut<T, CENTRED, 0, ALL_PARTS, false>(op, s, g, vectors, cut);
#undef CUT
}

#endif
