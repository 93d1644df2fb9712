/* norm_any.cuh - any call of rms_norm and layer_norm, on CUDA: all options, any alignment, rows of any length.

   A row is read in units of W elements, as wide as the alignment of all tensors allows (unit.cuh). blockDim.x
   threads share a row, ANY_LANES or whole warps, and blockDim.y rows share a block. norm_any reads a row once and
   holds it in registers, as floats: UNITS units in each thread, neighbours in neighbouring lanes. IN_CLUSTER: the
   blocks of a cluster have a part of one row each. norm_loop takes rows that are too long for that, or too many for
   a 32-bit index, and reads them again for each pass. Options are uniform branches on the call's parameters, outside
   the loops over a thread's units. MODULATED: there may be a gate, scale, shift or their tables, or an output of
   another dtype. */
#ifndef ADZE_CUDA_NORM_ANY_CUH
#define ADZE_CUDA_NORM_ANY_CUH

#include "cluster.cuh"
#include "launch.cuh"
#include "norm_call.cuh"
#include "rows.cuh"
#include "unit.cuh"

#include <type_traits>

constexpr int ANY_CLUSTER = 8;                    /* blocks, at most */
constexpr int ANY_GROUP = 4;                      /* units that a warp skips together */
constexpr int ANY_LANES = 8, ANY_SHORT = 16;      /* of a short row: lanes, and elements of each */
constexpr int LOOP_UNITS = 4, LOOP_THREADS = 256; /* of a thread and of a block of norm_loop */

template <typename ROWS>
struct norm_any_params {
    norm_params g;
    int64_t units;            /* of a row */
    int64_t part;             /* of them in each block of a cluster */
    int32_t thread_units;     /* units of a thread */
    uint32_t prefetch_blocks; /* blocks that prefetch their inputs, the first of the grid */
    ROWS rows;
};
typedef norm_any_params<simple_rows<NORM_TENSORS>> norm_any_simple;
typedef norm_any_params<general_rows<NORM_TENSORS>> norm_any_general;

/* Rounds all W values to T and back. */
template <typename T, int W>
__device__ __forceinline__ void round_unit(float (&f)[W])
{
    unit<T, W> v;
    v.set(f);
    v.get(f);
}

/* Shared memory of a block; rows of more than a warp are few. */
template <bool IN_CLUSTER>
struct norm_shared {
    float part[2][IN_CLUSTER ? 1 : 4][32];
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
        float *mine = shared.part[I][IN_CLUSTER ? 0 : threadIdx.y];
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

/* Units of a row that a thread has: UNITS of them, LANES apart, so that their addresses differ by constants. */
template <typename T, int W, int LANES, int UNITS, bool MODULATED, typename ROWS, typename I>
struct norm_piece {
    /* How many units fetch their parameters together, and how many a warp skips together. */
    static constexpr int CHUNK = UNITS * W <= 8 ? UNITS : W > 4 ? 1 : (MODULATED || UNITS * W > 16 ? 4 : 8) / W;
    static constexpr int GROUP = UNITS < ANY_GROUP ? UNITS : ANY_GROUP;
    typedef param_unit<T, W> param;
    const norm_any_params<ROWS> &p;
    typename ROWS::place place;
    I first;   /* the thread's first unit */
    int units; /* that the thread has */
    int most;  /* that a thread of its warp has */

    /* Parameters that are loaded ahead of their use, as far as registers allow: those a call is likely to have. */
    struct params {
        param weight[MODULATED ? 1 : CHUNK], scale[MODULATED ? CHUNK : 1], shift[MODULATED ? CHUNK : 1];
    };

    /* Gives a thread of a row its share of units begin..end-1: `thread_units` units, LANES apart. */
    __device__ __forceinline__ void take(int thread, I begin, I end, int thread_units)
    {
        const I from = begin + (I)(thread / LANES) * (LANES * thread_units), lane = thread % LANES;
        first = from + lane;
        const I own = (end - first + LANES - 1) / LANES, of_warp = (end - from + LANES - 1) / LANES;
        units = own < 0 ? 0 : own < thread_units ? (int)own : thread_units;
        most = of_warp < 0 ? 0 : of_warp < thread_units ? (int)of_warp : thread_units;
    }
    __device__ __forceinline__ bool is_f32(int t) const { return sizeof(T) < 4 && p.g.is_f32 >> t & 1; }
    /* Where the thread's first unit lies in a tensor. */
    __device__ __forceinline__ const char *start(int t) const
    {
        return (const char *)p.g.data[t] +
               (p.rows.offset(place, t) + (int64_t)first * W) * (int64_t)(is_f32(t) ? sizeof(float) : sizeof(T));
    }
    __device__ __forceinline__ const char *start(const void *flat, bool f32) const
    {
        return (const char *)flat + (int64_t)first * W * (int64_t)(f32 ? sizeof(float) : sizeof(T));
    }
    /* Makes the offset opaque: addresses are recomputed after this, rather than held in registers. */
    __device__ __forceinline__ void forget()
    {
        if constexpr (sizeof place.first() == 4)
            asm volatile("" : "+r"(place.first()));
        else
            asm volatile("" : "+l"(place.first()));
    }
    /* work(u) for units FROM..TO-1; a warp skips a group of units if none of its threads has one. */
    template <int FROM = 0, int TO = UNITS, typename F>
    __device__ __forceinline__ void each(F work) const
    {
#pragma unroll
        for (int g = FROM; g < TO; g += GROUP)
            if (UNITS <= GROUP || g < most) {
#pragma unroll
                for (int u = g; u < g + GROUP && u < TO; u++)
                    work(u);
            }
    }
    template <int FROM, int TO>
    __device__ __forceinline__ void fetch_units(const char *from, unit<T, W> *to) const
    {
        each<FROM, TO>([&](int u) {
            to[u - FROM].fill(0);
            if (u < units)
                to[u - FROM].fetch((const T *)from + u * (LANES * W));
        });
    }
    /* Parameters of units FROM... */
    template <int FROM>
    __device__ __forceinline__ void fetch_param(const char *from, bool f32, param (&to)[CHUNK]) const
    {
        const auto fetch = [&](auto wide) {
            each<FROM, FROM + CHUNK>([&](int u) {
                if (u < units)
                    to[u - FROM].fetch(from, decltype(wide)::value, u * (LANES * W));
            });
        };
        f32 ? fetch(std::true_type()) : fetch(std::false_type());
    }
    /* work(c, f) with the values f of each. */
    template <typename F>
    __device__ __forceinline__ static void with(const param (&of)[CHUNK], bool f32, F work)
    {
        const auto apply = [&](auto wide) {
#pragma unroll
            for (int c = 0; c < CHUNK; c++) {
                float f[W];
                of[c].get(decltype(wide)::value, f);
                work(c, f);
            }
        };
        f32 ? apply(std::true_type()) : apply(std::false_type());
    }
    /* The same with a vector that all rows share, loaded here. */
    template <int FROM, typename F>
    __device__ __forceinline__ void with_flat(const void *flat, bool f32, F work) const
    {
        param own[CHUNK];
        fetch_param<FROM>(start(flat, f32), f32, own);
        with(own, f32, work);
    }
    __device__ __forceinline__ static void round_all(bool condition, float (&y)[CHUNK][W])
    {
        if (sizeof(T) < 4 && condition) {
#pragma unroll
            for (int c = 0; c < CHUNK; c++)
                round_unit<T>(y[c]);
        }
    }
    /* One of scale, shift and gate plus its table, if any; `own` has been loaded. */
    template <int FROM>
    __device__ __forceinline__ void with_table(int t, const param (&own)[CHUNK], float (&f)[CHUNK][W]) const
    {
        with(own, is_f32(t), [&](int c, float(&v)[W]) {
#pragma unroll
            for (int j = 0; j < W; j++)
                f[c][j] = v[j];
        });
        if (p.g.data[t + TABLE]) {
            param table[CHUNK];
            fetch_param<FROM>(start(t + TABLE), is_f32(t + TABLE), table);
            with(table, is_f32(t + TABLE), [&](int c, float(&v)[W]) {
#pragma unroll
                for (int j = 0; j < W; j++)
                    f[c][j] += v[j];
            });
            round_all(p.g.rounding & ADZE_ROUND_STEPS, f);
        }
    }
    /* Loads x and the residual of units FROM.. and applies the gate. */
    template <int FROM = 0>
    __device__ __forceinline__ void add_residual(float (&h)[UNITS][W], bool store_sum) const
    {
        if constexpr (FROM < UNITS) {
            if (UNITS > GROUP && FROM >= most)
                return;
            unit<T, W> residual[CHUNK];
            fetch_units<FROM, FROM + CHUNK>(start(RESIDUAL), residual);
            if (MODULATED && p.g.data[GATE]) {
                param own[CHUNK];
                float gate[CHUNK][W];
                fetch_param<FROM>(start(GATE), is_f32(GATE), own);
                with_table<FROM>(GATE, own, gate);
#pragma unroll
                for (int c = 0; c < CHUNK; c++) {
#pragma unroll
                    for (int j = 0; j < W; j++)
                        gate[c][j] *= h[FROM + c][j];
                }
                round_all(p.g.rounding & ADZE_ROUND_STEPS, gate);
#pragma unroll
                for (int c = 0; c < CHUNK; c++)
#pragma unroll
                    for (int j = 0; j < W; j++)
                        h[FROM + c][j] = FROM + c < units ? gate[c][j] : 0;
            }
            T *const to = (T *)start(SUM);
            const bool store = store_sum && p.g.data[SUM], round = !(p.g.rounding & ADZE_FLOAT_SUM);
            each<FROM, FROM + CHUNK>([&](int u) {
                float f[W];
                residual[u - FROM].get(f);
#pragma unroll
                for (int j = 0; j < W; j++)
                    h[u][j] += f[j];
                unit<T, W> sum;
                sum.set(h[u]);
                if (store && u < units)
                    sum.put(to + u * (LANES * W));
                if (round)
                    sum.get(h[u]);
            });
            add_residual<FROM + CHUNK>(h, store_sum);
        }
    }
    /* The value to normalise; 0 in units that the thread does not have. */
    __device__ __forceinline__ void read(float (&h)[UNITS][W], bool store_sum) const
    {
        unit<T, W> x[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            x[u].fill(0);
        fetch_units<0, UNITS>(start(X), x);
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            x[u].get(h[u]);
        if (p.g.data[RESIDUAL])
            add_residual(h, store_sum);
    }
    __device__ __forceinline__ float sum(const float (&h)[UNITS][W]) const
    {
        float sum = 0;
        each([&](int u) {
#pragma unroll
            for (int j = 0; j < W; j++)
                sum += h[u][j];
        });
        return sum;
    }
    __device__ __forceinline__ float squares(const float (&h)[UNITS][W], float mean) const
    {
        float sum = 0;
        each([&](int u) {
#pragma unroll
            for (int j = 0; j < W; j++) {
                const float d = u < units ? h[u][j] - mean : 0;
                sum += d * d;
            }
        });
        return sum;
    }
    /* The scale and shift of units FROM... */
    template <int FROM>
    __device__ __forceinline__ void fetch_params(params &to) const
    {
        if constexpr (!MODULATED)
            if (p.g.weight)
                fetch_param<FROM>(start(p.g.weight, p.g.weight_f32), p.g.weight_f32, to.weight);
        if constexpr (MODULATED) {
            if (p.g.data[SCALE])
                fetch_param<FROM>(start(SCALE), is_f32(SCALE), to.scale);
            if (p.g.data[SHIFT])
                fetch_param<FROM>(start(SHIFT), is_f32(SHIFT), to.shift);
        }
    }
    /* Normalises, applies the parameters and stores units FROM... The parameters of the first units have been
       loaded. */
    template <int FROM = 0>
    __device__ __forceinline__ void write(const float (&h)[UNITS][W], params &given, float mean, float factor) const
    {
        if constexpr (FROM < UNITS) {
            if (UNITS > GROUP && FROM >= most)
                return;
            const bool has_scale = MODULATED && p.g.data[SCALE], has_shift = MODULATED && p.g.data[SHIFT];
            const bool steps = p.g.rounding & ADZE_ROUND_STEPS && (has_scale || has_shift);
            float y[CHUNK][W];
            if (FROM > 0)
                fetch_params<FROM>(given);
#pragma unroll
            for (int c = 0; c < CHUNK; c++)
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[c][j] = (h[FROM + c][j] - mean) * factor;
            round_all(p.g.rounding & ADZE_ROUND_NORM, y);
            const auto times_weight = [&](int c, float(&f)[W]) {
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[c][j] *= f[j] + p.g.weight_offset;
            };
            if (p.g.weight) {
                if constexpr (MODULATED)
                    with_flat<FROM>(p.g.weight, p.g.weight_f32, times_weight);
                else
                    with(given.weight, p.g.weight_f32, times_weight);
            }
            if (p.g.bias)
                with_flat<FROM>(p.g.bias, p.g.bias_f32, [&](int c, float(&f)[W]) {
#pragma unroll
                    for (int j = 0; j < W; j++)
                        y[c][j] += f[j];
                });
            if constexpr (MODULATED)
                modulate<FROM>(y, given, has_scale, has_shift, steps);
            const char *const to = start(OUT);
            if (MODULATED && is_f32(OUT)) {
                each<FROM, FROM + CHUNK>([&](int u) {
                    if (u < units)
                        store_floats((float *)to + u * (LANES * W), y[u - FROM]);
                });
            } else {
                each<FROM, FROM + CHUNK>([&](int u) {
                    unit<T, W> out;
                    out.set(y[u - FROM]);
                    if (u < units)
                        out.put((T *)to + u * (LANES * W));
                });
            }
            write<FROM + CHUNK>(h, given, mean, factor);
        }
    }
    template <int FROM>
    __device__ __forceinline__ void modulate(float (&y)[CHUNK][W], const params &given, bool has_scale,
                                             bool has_shift, bool steps) const
    {
        float f[CHUNK][W];
        round_all(steps, y);
        if (has_scale) {
            with_table<FROM>(SCALE, given.scale, f);
#pragma unroll
            for (int c = 0; c < CHUNK; c++)
#pragma unroll
                for (int j = 0; j < W; j++)
                    f[c][j] += 1;
            round_all(steps, f);
#pragma unroll
            for (int c = 0; c < CHUNK; c++)
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[c][j] *= f[c][j];
            round_all(steps && has_shift, y);
        }
        if (has_shift) {
            with_table<FROM>(SHIFT, given.shift, f);
#pragma unroll
            for (int c = 0; c < CHUNK; c++)
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[c][j] += f[c][j];
        }
    }
};

/* The first thread of a row prefetches the block's part of it: `units` units from `first` on. */
template <typename T, int W, bool MODULATED>
__device__ __forceinline__ void norm_any_prefetch(const norm_any_simple &p, uint32_t r, int first, int units)
{
    const norm_piece<T, W, 1, 1, MODULATED, simple_rows<NORM_TENSORS>, int> piece = {
        p, p.rows.split(r < p.rows.count ? r : p.rows.count - 1), first, 0, 0};
    const int bytes = units * W * (int)sizeof(T), wide = units * W * (int)sizeof(float);
    prefetch_bytes(piece.start(X), bytes);
    if (p.g.data[RESIDUAL])
        prefetch_bytes(piece.start(RESIDUAL), bytes);
    if (threadIdx.y > 0 || blockIdx.x >= cluster_size())
        return;
    if (p.g.weight)
        prefetch_bytes(piece.start(p.g.weight, p.g.weight_f32), p.g.weight_f32 ? wide : bytes);
    for (int t = SCALE; t < NORM_TENSORS && MODULATED; t++)
        if (p.g.data[t])
            prefetch_bytes(piece.start(t), piece.is_f32(t) ? wide : bytes);
}

/* Elements that a thread holds, many or few. Many are 64 bytes: at the occupancy that their registers allow, the
   memory needs as many in flight. 16-byte vectors with their parameters leave registers for fewer. With a modulation
   few suffice, since the loads of scale and shift are in flight with those of x. Rows that are too long for a block
   have threads with many in a cluster. */
constexpr int ANY_FEW = 8, ANY_THREADS = 512; /* threads of a block, at most */
constexpr int any_held(int width, int size, bool modulated, bool in_cluster)
{
    if (in_cluster)
        return 32;
    return modulated ? ANY_FEW : size < 4 && width < 8 ? 32 : 16;
}
/* Minimum blocks per SM: this bounds the registers. */
constexpr int any_blocks(int width, int elements, bool modulated, bool in_cluster)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    if (modulated)
        return elements == ANY_FEW ? 2 : 1;
    return in_cluster && width >= 4 ? 1 : elements > ANY_FEW || width >= 4 ? 2 : 3;
#else
    return 1;
#endif
}

/* LANES 32: a row has whole warps. LANES below 32: a row has that many lanes of a warp. */
template <typename T, int W, int LANES, int UNITS, bool MODULATED, bool IN_CLUSTER>
__global__ void __launch_bounds__(ANY_THREADS, any_blocks(W, UNITS *W, MODULATED, IN_CLUSTER))
    norm_any(const __grid_constant__ norm_any_simple p)
{
    typedef norm_piece<T, W, LANES, UNITS, MODULATED, simple_rows<NORM_TENSORS>, int> piece_type;
    __shared__ norm_shared<IN_CLUSTER> shared;
    if constexpr (IN_CLUSTER)
        cluster_arrive(); /* the wait comes before the first store: all blocks have started then */
    const uint32_t block = IN_CLUSTER ? blockIdx.x / (uint32_t)cluster_size() : blockIdx.x;
    const uint32_t r = block * blockDim.y + threadIdx.y;
    const int begin = IN_CLUSTER ? cluster_rank() * (int)p.part : 0;
    const int end = IN_CLUSTER ? min((int)p.units, begin + (int)p.part) : (int)p.units;
    pdl_launch_next();
    if (blockIdx.x < p.prefetch_blocks && threadIdx.x == 0)
        norm_any_prefetch<T, W, MODULATED>(p, r, begin, end - begin);
    /* Threads beyond the last row repeat it without a store: shuffles and barriers need all threads. */
    const bool writes = r < p.rows.count;
    piece_type piece = {p, p.rows.split(writes ? r : p.rows.count - 1), 0, 0, 0};
    piece.take((int)threadIdx.x, begin, end, p.thread_units);
    float h[UNITS][W];
    typename piece_type::params params;
    pdl_wait();
    piece.read(h, writes);
    piece.template fetch_params<0>(params); /* in flight before the sum is known */
    if (IN_CLUSTER)
        cluster_wait();
    float mean = 0;
    if (p.g.centred)
        mean = any_total<0>(piece.sum(h), shared) * p.g.inverse_dim;
    const float square = any_total<1>(piece.squares(h, mean), shared);
    if (!writes)
        return;
    piece.forget();
    piece.write(h, params, mean, rsqrtf(square * p.g.inverse_dim + p.g.eps));
}

template <typename T, bool IN_CLUSTER>
__global__ void __launch_bounds__(LOOP_THREADS, 1) norm_loop(const __grid_constant__ norm_any_general p)
{
    typedef norm_piece<T, 1, 32, LOOP_UNITS, true, general_rows<NORM_TENSORS>, int64_t> piece_type;
    __shared__ norm_shared<IN_CLUSTER> shared;
    const int64_t blocks = IN_CLUSTER ? cluster_size() : 1;
    const int64_t begin = IN_CLUSTER ? cluster_rank() * p.part : 0;
    const int64_t end = IN_CLUSTER ? min(p.units, begin + p.part) : p.units;
    if constexpr (IN_CLUSTER)
        cluster_arrive();
    pdl_launch_next();
    pdl_wait();
    for (int64_t r = blockIdx.x / blocks; r < p.rows.count; r += gridDim.x / blocks) {
        piece_type piece = {p, p.rows.split(r), 0, 0, 0};
        float h[LOOP_UNITS][1], sum = 0, mean = 0;
        const auto pass = [&](bool store_sum, auto work) {
#pragma unroll 1
            for (int64_t from = begin; from < end; from += LOOP_UNITS * LOOP_THREADS) {
                piece.take((int)threadIdx.x, from, end, LOOP_UNITS);
                piece.forget();
                piece.read(h, store_sum);
                work();
            }
        };
        if (p.g.centred) {
            pass(false, [&] { sum += piece.sum(h); });
            if (IN_CLUSTER)
                cluster_wait();
            mean = any_total<0>(sum, shared) * p.g.inverse_dim;
            sum = 0;
        }
        pass(false, [&] { sum += piece.squares(h, mean); });
        if (IN_CLUSTER && !p.g.centred)
            cluster_wait();
        const float factor = rsqrtf(any_total<1>(sum, shared) * p.g.inverse_dim + p.g.eps);
        pass(true, [&] {
            typename piece_type::params params;
            piece.template fetch_params<0>(params);
            piece.write(h, params, mean, factor);
        });
        if constexpr (IN_CLUSTER)
            cluster_arrive(); /* shared memory is reused */
        else
            __syncthreads();
    }
    if constexpr (IN_CLUSTER)
        cluster_wait();
}

#endif
