/* norm_any.cuh - any call of rms_norm and layer_norm, on CUDA: all options, any alignment, rows of any length.

   A row is read in units of W elements, as wide as the alignment of all tensors allows (unit.cuh). blockDim.x
   threads share a row, a few lanes or whole warps, and blockDim.y rows share a block. norm_any reads a row once and
   holds it in registers: UNITS units in each thread, neighbours in neighbouring lanes. IN_CLUSTER: the blocks of a
   cluster have a part of one row each. Rows that are too long for that take norm_loop.cuh. Options are uniform
   branches on the call's parameters, outside the loops over a thread's units; the common ones are compiled without
   the others (norm_form). */
#ifndef ADZE_CUDA_NORM_ANY_CUH
#define ADZE_CUDA_NORM_ANY_CUH

#include "cluster.cuh"
#include "launch.cuh"
#include "norm_call.cuh"
#include "norm_held.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "unit.cuh"

#include <type_traits>

constexpr int ANY_CLUSTER = 8;               /* blocks, at most */
constexpr int WIDE_CLUSTER = 16;             /* the same of a few long rows, where the GPU has such clusters */
constexpr int ANY_GROUP = 4;                 /* units that a warp skips together */
constexpr int ANY_LANES = 8, ANY_SHORT = 16; /* of a short row: lanes, and elements of each at most */

enum norm_form {
    UNMODULATED, /* weight, bias and a residual, if any */
    SCALE_SHIFT, /* a scale and a shift of x's dtype and a residual, if any; one rounding */
    ANY_OPTION   /* everything, in any dtype */
};

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
    float2 blocks[2][IN_CLUSTER ? WIDE_CLUSTER : 1];
};

/* The sum over the threads of a row, and over the blocks of its cluster. I: the first or the second of a row. */
template <int I, int LANES, bool IN_CLUSTER>
__device__ __forceinline__ float any_total(float v, norm_shared<IN_CLUSTER> &shared)
{
    if constexpr (LANES < 32)
        return warp_sum<LANES>(v);
    const int lane = (int)threadIdx.x % 32, warps = (int)blockDim.x / 32;
    v = warp_sum<32>(v);
    if (warps > 1) {
        float *mine = shared.part[I][IN_CLUSTER ? 0 : threadIdx.y];
        if (lane == 0)
            mine[threadIdx.x / 32] = v;
        __syncthreads();
        v = warp_sum<32>(lane < warps ? mine[lane] : 0);
    }
    if constexpr (IN_CLUSTER) {
        const int count = cluster_size(), block = lane % WIDE_CLUSTER;
        if ((int)threadIdx.x < count)
            cluster_store(&shared.blocks[I][cluster_rank()], (int)threadIdx.x, v, 0);
        cluster_arrive();
        cluster_wait();
        v = warp_sum<WIDE_CLUSTER>(block < count ? shared.blocks[I][block].x : 0);
    }
    return v;
}

/* Elements that a thread holds. A row of few elements per thread has its parameters in flight with x. Many are 64
   bytes: at the occupancy that their registers allow, the memory needs as many in flight. Plain 16-byte vectors with
   their parameters leave registers for fewer. */
constexpr int ANY_THREADS = 512; /* of a block, at most */
constexpr int any_few(norm_form form, int width, int size)
{
    return form == SCALE_SHIFT && size < 4 && width > 1 ? 16 : 8;
}
/* In a row that has a few lanes of a warp; norm_short.cu has those without modulation. */
constexpr int any_short(norm_form form, int width, int size)
{
    return form == SCALE_SHIFT ? any_few(form, width, size) : ANY_SHORT;
}
constexpr int any_many(norm_form form, int width, int size, bool in_cluster)
{
    if (form != UNMODULATED)
        return 64 / size;
    return in_cluster || (size < 4 && width < 8) ? 32 : 16;
}
/* Whether a row is held packed: where it fits in registers only so. A sum that is not rounded cannot be. */
constexpr bool any_packed(norm_form form, int width, int size, int lanes, int elements)
{
    if (form == UNMODULATED)
        return size < 4 && width < 8 && elements > 16;
    return form == SCALE_SHIFT || (lanes == 32 && elements > 8);
}

/* How many of `units` units fetch their residual together. A load does not overtake the stores of a sum before it:
   with fewer a thread waits for the memory several times. The residual of a form with all options shares the
   registers with the gate, in chunks of `chunk` units. */
constexpr int any_added(norm_form form, int width, int size, int units, int chunk)
{
    const int words = width * size < 4 ? 1 : width * size / 4;
    const bool floats = size == 4 && width < 4 && units * width > 16; /* half of the registers hold x */
    const int most = (floats || width * size < 4 ? 8 : 16) / words;
    if (form == ANY_OPTION)
        return chunk;
    return form == SCALE_SHIFT && words > 1 ? units : units < most ? units : most;
}

/* Units of a row that a thread has: UNITS of them, LANES apart, so that their addresses differ by constants. */
template <typename T, int W, int LANES, int UNITS, norm_form FORM, typename ROWS, typename I>
struct norm_piece {
    static constexpr int ELEMENTS = UNITS * W;
    static constexpr bool PACKED = any_packed(FORM, W, sizeof(T), LANES, ELEMENTS);
    /* f32 vectors in a cluster leave registers for 8 elements of each parameter. */
    static constexpr bool ROOMY = FORM == UNMODULATED && sizeof(T) == 4 && W == VEC<T> && ELEMENTS > 16;
    /* How many units fetch their parameters together, how many their residual, and how many a warp skips together. */
    static constexpr int CHUNK = ELEMENTS <= any_few(FORM, W, sizeof(T)) && (LANES == 32 || ELEMENTS <= 8) ? UNITS
                                 : ROOMY                                                                   ? 2
                                 : W > 4                                                                   ? 1
                                 : FORM == SCALE_SHIFT ? (sizeof(T) < 4 && W > 1 ? 8 : 4) / W
                                                       : (FORM == ANY_OPTION || ELEMENTS > 16 ? 4 : 8) / W;
    static constexpr int ADD_CHUNK = any_added(FORM, W, sizeof(T), UNITS, CHUNK);
    static constexpr bool BIAS_AHEAD = FORM == UNMODULATED && (PACKED || ROOMY);
    static constexpr int MOST_GROUP = LANES < 32 && PACKED && CHUNK < ANY_GROUP ? CHUNK : ANY_GROUP;
    static constexpr int GROUP = UNITS < MOST_GROUP ? UNITS : MOST_GROUP;
    typedef param_unit<T, W> param;
    typedef norm_held<T, W, UNITS, PACKED> held;
    const norm_any_params<ROWS> &p;
    typename ROWS::place place;
    I first;   /* the thread's first unit */
    int units; /* that the thread has */
    int most;  /* that a thread of its warp has */

    /* Parameters that are loaded ahead of their use, as far as registers allow: those a call is likely to have. */
    struct params {
        param weight[FORM == UNMODULATED ? CHUNK : 1], bias[BIAS_AHEAD ? CHUNK : 1];
        param scale[FORM == UNMODULATED ? 1 : CHUNK], shift[FORM == UNMODULATED ? 1 : CHUNK];
    };

    /* What the call has, as far as the form leaves it open. */
    __device__ __forceinline__ bool has(int t) const
    {
        if (FORM == SCALE_SHIFT && t >= SCALE)
            return t < GATE;
        return (FORM == ANY_OPTION || t < SCALE) && p.g.data[t];
    }
    __device__ __forceinline__ bool is_f32(int t) const
    {
        return sizeof(T) < 4 && FORM != SCALE_SHIFT && p.g.is_f32 >> t & 1;
    }
    __device__ __forceinline__ const void *weight() const { return FORM == SCALE_SHIFT ? NULL : p.g.weight; }
    __device__ __forceinline__ const void *bias() const { return FORM == SCALE_SHIFT ? NULL : p.g.bias; }
    __device__ __forceinline__ bool rounds(int step) const
    {
        return sizeof(T) < 4 && FORM != SCALE_SHIFT && p.g.rounding & step;
    }

    /* Gives a thread of a row its share of units begin..end-1: `thread_units` units, LANES apart. */
    __device__ __forceinline__ void take(int thread, I begin, I end, int thread_units)
    {
        const I from = begin + (I)(thread / LANES) * (LANES * thread_units), lane = thread % LANES;
        first = from + lane;
        const I own = (end - first + LANES - 1) / LANES, of_warp = (end - from + LANES - 1) / LANES;
        units = own < 0 ? 0 : own < thread_units ? (int)own : thread_units;
        most = of_warp < 0 ? 0 : of_warp < thread_units ? (int)of_warp : thread_units;
    }
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
        const auto fetch = [&](auto wide, auto loose) {
            each<FROM, FROM + CHUNK>([&](int u) {
                if (u < units)
                    to[u - FROM].template fetch<decltype(loose)::value>(from, decltype(wide)::value, u * (LANES * W));
            });
        };
        if constexpr (W == 2 || (FORM == UNMODULATED && W > 1))
            if (p.g.loose) {
                f32 ? fetch(std::true_type(), std::true_type()) : fetch(std::false_type(), std::true_type());
                return;
            }
        f32 ? fetch(std::true_type(), std::false_type()) : fetch(std::false_type(), std::false_type());
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
        if (condition) {
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
        if (has(t + TABLE)) {
            param table[CHUNK];
            fetch_param<FROM>(start(t + TABLE), is_f32(t + TABLE), table);
            with(table, is_f32(t + TABLE), [&](int c, float(&v)[W]) {
#pragma unroll
                for (int j = 0; j < W; j++)
                    f[c][j] += v[j];
            });
            round_all(rounds(ADZE_ROUND_STEPS), f);
        }
    }
    /* x of units FROM.. times the gate. */
    template <int FROM>
    __device__ __forceinline__ void apply_gate(float (&x)[CHUNK][W]) const
    {
        param own[CHUNK];
        float gate[CHUNK][W];
        fetch_param<FROM>(start(GATE), is_f32(GATE), own);
        with_table<FROM>(GATE, own, gate);
#pragma unroll
        for (int c = 0; c < CHUNK; c++)
#pragma unroll
            for (int j = 0; j < W; j++)
                x[c][j] = FROM + c < units ? x[c][j] * gate[c][j] : 0;
        round_all(rounds(ADZE_ROUND_STEPS), x);
    }
    /* Applies the gate to units FROM.. and adds the residual. */
    template <int FROM = 0>
    __device__ __forceinline__ void add_residual(held &h, bool store_sum) const
    {
        if constexpr (FROM < UNITS) {
            if (UNITS > GROUP && FROM >= most)
                return;
            unit<T, W> residual[ADD_CHUNK];
            float x[ADD_CHUNK][W];
            fetch_units<FROM, FROM + ADD_CHUNK>(start(RESIDUAL), residual);
#pragma unroll
            for (int c = 0; c < ADD_CHUNK; c++)
                h.get(FROM + c, x[c]);
            if constexpr (FORM == ANY_OPTION)
                if (has(GATE))
                    apply_gate<FROM>(x);
            T *const to = (T *)start(SUM);
            const bool store = store_sum && has(SUM), round = PACKED || !rounds(ADZE_FLOAT_SUM);
            each<FROM, FROM + ADD_CHUNK>([&](int u) {
                float f[W];
                residual[u - FROM].get(f);
#pragma unroll
                for (int j = 0; j < W; j++)
                    f[j] += x[u - FROM][j];
                unit<T, W> sum;
                sum.set(f);
                if (store && u < units)
                    sum.put(to + u * (LANES * W));
                if (round)
                    h.take(u, sum);
                else
                    h.set(u, f);
            });
            add_residual<FROM + ADD_CHUNK>(h, store_sum);
        }
    }
    /* The value to normalise; 0 in units that the thread does not have. */
    __device__ __forceinline__ void read(held &h, bool store_sum) const
    {
        unit<T, W> x[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            x[u].fill(0);
        fetch_units<0, UNITS>(start(X), x);
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            h.take(u, x[u]);
        h.keep();
        if (has(RESIDUAL)) {
            add_residual(h, store_sum);
            h.keep();
        }
    }
    __device__ __forceinline__ float sum(const held &h) const
    {
        float sum = 0;
        each([&](int u) {
            float x[W];
            h.get(u, x);
#pragma unroll
            for (int j = 0; j < W; j++)
                sum += x[j];
        });
        return sum;
    }
    __device__ __forceinline__ float squares(const held &h, float mean) const
    {
        float sum = 0;
        each([&](int u) {
            float x[W];
            h.get(u, x);
#pragma unroll
            for (int j = 0; j < W; j++) {
                const float d = x[j] - mean;
                if (u < units)
                    sum += d * d;
            }
        });
        return sum;
    }
    /* The parameters of units FROM.. that are loaded ahead. */
    template <int FROM>
    __device__ __forceinline__ void fetch_params(params &to) const
    {
        if constexpr (FORM == UNMODULATED) {
            if (weight())
                fetch_param<FROM>(start(weight(), p.g.weight_f32), p.g.weight_f32, to.weight);
            if constexpr (BIAS_AHEAD)
                if (bias())
                    fetch_param<FROM>(start(bias(), p.g.bias_f32), p.g.bias_f32, to.bias);
        } else {
            if (has(SCALE))
                fetch_param<FROM>(start(SCALE), is_f32(SCALE), to.scale);
            if (has(SHIFT))
                fetch_param<FROM>(start(SHIFT), is_f32(SHIFT), to.shift);
        }
    }
    /* Normalises, applies the parameters and stores units FROM... Their parameters have been loaded where the row is
       held packed, which leaves registers for those of the next units, else only those of the first. */
    template <int FROM = 0>
    __device__ __forceinline__ void write(const held &h, params &given, float mean, float factor) const
    {
        if constexpr (FROM < UNITS) {
            if (UNITS > GROUP && FROM >= most)
                return;
            const bool steps = rounds(ADZE_ROUND_STEPS) && (has(SCALE) || has(SHIFT));
            float y[CHUNK][W];
            params next;
            if constexpr (PACKED && FROM + CHUNK < UNITS)
                fetch_params<FROM + CHUNK>(next);
            else if constexpr (!PACKED && FROM > 0)
                fetch_params<FROM>(given);
#pragma unroll
            for (int c = 0; c < CHUNK; c++) {
                h.get(FROM + c, y[c]);
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[c][j] = (y[c][j] - mean) * factor;
            }
            round_all(rounds(ADZE_ROUND_NORM), y);
            const auto times_weight = [&](int c, float(&f)[W]) {
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[c][j] *= f[j] + p.g.weight_offset;
            };
            if (weight()) {
                if constexpr (FORM == UNMODULATED)
                    with(given.weight, p.g.weight_f32, times_weight);
                else
                    with_flat<FROM>(weight(), p.g.weight_f32, times_weight);
            }
            const auto plus_bias = [&](int c, float(&f)[W]) {
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[c][j] += f[j];
            };
            if (bias()) {
                if constexpr (BIAS_AHEAD)
                    with(given.bias, p.g.bias_f32, plus_bias);
                else
                    with_flat<FROM>(bias(), p.g.bias_f32, plus_bias);
            }
            if constexpr (FORM != UNMODULATED)
                modulate<FROM>(y, given, steps);
            const char *const to = start(OUT);
            if (FORM == ANY_OPTION && is_f32(OUT)) {
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
            write<FROM + CHUNK>(h, PACKED ? next : given, mean, factor);
        }
    }
    template <int FROM>
    __device__ __forceinline__ void modulate(float (&y)[CHUNK][W], const params &given, bool steps) const
    {
        float f[CHUNK][W];
        round_all(steps, y);
        if (has(SCALE)) {
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
            round_all(steps && has(SHIFT), y);
        }
        if (has(SHIFT)) {
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
template <typename T, int W, norm_form FORM>
__device__ __forceinline__ void norm_any_prefetch(const norm_any_simple &p, uint32_t r, int first, int units)
{
    const norm_piece<T, W, 1, 1, FORM, simple_rows<NORM_TENSORS>, int> piece = {
        p, p.rows.split(r < p.rows.count ? r : p.rows.count - 1), first, 0, 0};
    const int bytes = units * W * (int)sizeof(T), wide = units * W * (int)sizeof(float);
    prefetch_bytes(piece.start(X), bytes);
    if (piece.has(RESIDUAL))
        prefetch_bytes(piece.start(RESIDUAL), bytes);
    if (threadIdx.y > 0 || blockIdx.x >= cluster_size())
        return;
    if (piece.weight())
        prefetch_bytes(piece.start(p.g.weight, p.g.weight_f32), p.g.weight_f32 ? wide : bytes);
    for (int t = SCALE; t < NORM_TENSORS && FORM != UNMODULATED; t++)
        if (piece.has(t))
            prefetch_bytes(piece.start(t), piece.is_f32(t) ? wide : bytes);
}

/* Minimum blocks per SM: this bounds the registers. */
constexpr int any_blocks(int width, int elements, norm_form form, bool in_cluster)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    if (form != UNMODULATED)
        return 2;
    return in_cluster && width >= 4 ? 1 : elements > 8 || width >= 4 ? 2 : 3;
#else
    return 1;
#endif
}

/* LANES 32: a row has whole warps. LANES below 32: a row has that many lanes of a warp. */
template <typename T, int W, int LANES, int UNITS, norm_form FORM, bool IN_CLUSTER>
__global__ void __launch_bounds__(ANY_THREADS, any_blocks(W, UNITS *W, FORM, IN_CLUSTER))
    norm_any(const __grid_constant__ norm_any_simple p)
{
    typedef norm_piece<T, W, LANES, UNITS, FORM, simple_rows<NORM_TENSORS>, int> piece_type;
    __shared__ norm_shared<IN_CLUSTER> shared;
    if constexpr (IN_CLUSTER)
        cluster_arrive(); /* the wait comes before the first store: all blocks have started then */
    const uint32_t block = IN_CLUSTER ? blockIdx.x / (uint32_t)cluster_size() : blockIdx.x;
    const uint32_t r = block * blockDim.y + threadIdx.y;
    const int begin = IN_CLUSTER ? cluster_rank() * (int)p.part : 0;
    const int end = IN_CLUSTER ? min((int)p.units, begin + (int)p.part) : (int)p.units;
    pdl_launch_next();
    if (blockIdx.x < p.prefetch_blocks && threadIdx.x == 0)
        norm_any_prefetch<T, W, FORM>(p, r, begin, end - begin);
    /* Threads beyond the last row repeat it without a store: shuffles and barriers need all threads. */
    const bool writes = r < p.rows.count;
    piece_type piece = {p, p.rows.split(writes ? r : p.rows.count - 1), 0, 0, 0};
    piece.take((int)threadIdx.x, begin, end, p.thread_units);
    typename piece_type::held h;
    typename piece_type::params params;
    pdl_wait();
    piece.read(h, writes);
    piece.template fetch_params<0>(params); /* in flight before the sum is known */
    if (IN_CLUSTER)
        cluster_wait();
    float mean = 0;
    if (p.g.centred) {
        mean = any_total<0, LANES>(piece.sum(h), shared) * p.g.inverse_dim;
        h.keep();
    }
    const float square = any_total<1, LANES>(piece.squares(h, mean), shared);
    h.keep();
    if (!writes)
        return;
    piece.forget();
    piece.write(h, params, mean, rsqrtf(square * p.g.inverse_dim + p.g.eps));
}

#endif
