/* norm_any.cuh - any call of rms_norm and layer_norm, on CUDA: all options, any alignment, rows of any length.

   A row is read in units of W elements, as wide as the alignment of all tensors allows (unit.cuh). blockDim.x threads
   share a row, a power of 2 below 32 or whole warps, and blockDim.y rows share a block. norm_any holds a row in
   registers, as floats: UNITS units in each thread, blockDim.x apart, from the one time it is read. IN_CLUSTER: the
   blocks of a cluster have a part of one row each. norm_loop takes rows that are too long for that, or too many to
   count in 32 bits, and reads them again for each pass. Options are branches on the call's parameters, which are the
   same in all threads. MODULATED: there may be a gate, scale, shift or their tables, or an output of another dtype.
 */
#ifndef ADZE_CUDA_NORM_ANY_CUH
#define ADZE_CUDA_NORM_ANY_CUH

#include "cluster.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "unit.cuh"

constexpr int ANY_CLUSTER = 8; /* blocks, at most */
constexpr int ANY_HELD = 16;   /* elements of a thread that holds many; few are half of it, or 4 units */
constexpr int ANY_GROUP = 4;   /* units that are bounded together */
constexpr int LOOP_UNITS = 4, LOOP_THREADS = 256; /* of a thread and of a block of norm_loop */

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
    int width; /* elements that can be read at a time in all tensors: 16 for vectors of 16 bytes */
    adze_rows rows;
};
template <typename ROWS>
struct norm_any_params {
    norm_params g;
    int64_t units;     /* of a row */
    int64_t part;      /* of them in each block of a cluster */
    uint32_t prefetch; /* the first blocks, which prefetch what they read */
    ROWS rows;
};
typedef norm_any_params<near_rows<NORM_TENSORS>> norm_any_near;
typedef norm_any_params<far_rows<NORM_TENSORS>> norm_any_far;

/* All W values as a store and a load would leave them, if `condition`. */
template <typename T, int W>
__device__ __forceinline__ void round_if(bool condition, float (&f)[W])
{
    if (sizeof(T) < 4 && condition) {
        unit<T, W> v;
        v.set(f);
        v.get(f);
    }
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

/* Units of a row that a thread has: UNITS of them, blockDim.x apart, from `first` on. Indices are of type I. */
template <typename T, int W, int UNITS, bool MODULATED, typename ROWS, typename I>
struct norm_piece {
    /* Parameters that are fetched together: those of all units where registers allow it. */
    static constexpr int CHUNK = UNITS * W <= 8 ? UNITS : MODULATED ? (W > 4 ? 1 : 4 / W) : 8 / W;
    static constexpr int GROUP = UNITS < ANY_GROUP ? UNITS : ANY_GROUP;
    const norm_any_params<ROWS> &p;
    typename ROWS::place place;
    I first, end; /* `end`: of the row, or of the block's part */

    struct params {
        param_unit<T, W> weight[CHUNK], scale[MODULATED ? CHUNK : 1], shift[MODULATED ? CHUNK : 1];
    };

    __device__ __forceinline__ I at(int u) const { return first + u * (I)blockDim.x; }
    __device__ __forceinline__ bool is_f32(int t) const { return sizeof(T) < 4 && p.g.is_f32 >> t & 1; }
    __device__ __forceinline__ const char *row(int t) const
    {
        return (const char *)p.g.data[t] + p.rows.offset(place, t) * (int64_t)(is_f32(t) ? sizeof(float) : sizeof(T));
    }
    /* Addresses are computed again after this, rather than held in registers. */
    __device__ __forceinline__ void forget()
    {
        if constexpr (sizeof place.first() == 4)
            asm volatile("" : "+r"(place.first()));
        else
            asm volatile("" : "+l"(place.first()));
    }
    /* work(u) for the units that the row has. A warp leaves out a group of which none of its threads has a unit. */
    template <int FROM = 0, int TO = UNITS, typename F>
    __device__ __forceinline__ void each(F work) const
    {
        const I warp = first - (I)(threadIdx.x % 32);
#pragma unroll
        for (int g = FROM; g < TO; g += GROUP)
            if (UNITS <= GROUP || warp + g * (I)blockDim.x < end) {
#pragma unroll
                for (int u = g; u < g + GROUP && u < TO; u++)
                    if (at(u) < end)
                        work(u);
            }
    }
    __device__ __forceinline__ void fetch_units(const T *from, unit<T, W> (&to)[UNITS]) const
    {
        each([&](int u) { to[u].fetch(from + at(u) * W); });
    }
    /* One of scale, shift and gate with its table, if any, of which `own` has been fetched. */
    __device__ __forceinline__ void with_table(int t, int u, const param_unit<T, W> &own, float (&f)[W]) const
    {
        own.get(is_f32(t), f);
        if (p.g.data[t + TABLE]) {
            param_unit<T, W> table;
            float more[W];
            table.fetch(row(t + TABLE), is_f32(t + TABLE), at(u) * W);
            table.get(is_f32(t + TABLE), more);
#pragma unroll
            for (int j = 0; j < W; j++)
                f[j] += more[j];
            round_if<T>(p.g.rounding & ADZE_ROUND_STEPS, f);
        }
    }
    /* What is normalised: x, or the sum of x, through the gate, and the residual. Units beyond the row are 0. */
    __device__ __forceinline__ void read(float (&h)[UNITS][W], bool store_sum) const
    {
        unit<T, W> x[UNITS], residual[UNITS];
        const bool adds = p.g.data[RESIDUAL];
        fetch_units((const T *)row(X), x);
        if (adds)
            fetch_units((const T *)row(RESIDUAL), residual);
#pragma unroll
        for (int u = 0; u < UNITS; u++)
#pragma unroll
            for (int j = 0; j < W; j++)
                h[u][j] = 0;
        each([&](int u) { x[u].get(h[u]); });
        if (MODULATED && p.g.data[GATE]) {
            const void *const gate_row = row(GATE);
            each([&](int u) {
                float gate[W];
                param_unit<T, W> own;
                own.fetch(gate_row, is_f32(GATE), at(u) * W);
                with_table(GATE, u, own, gate);
#pragma unroll
                for (int j = 0; j < W; j++)
                    h[u][j] *= gate[j];
                round_if<T>(p.g.rounding & ADZE_ROUND_STEPS, h[u]);
            });
        }
        if (!adds)
            return;
        const bool store = store_sum && p.g.data[SUM], round = !(p.g.rounding & ADZE_FLOAT_SUM);
        T *const sum_row = (T *)row(SUM);
        each([&](int u) {
            float f[W];
            residual[u].get(f);
#pragma unroll
            for (int j = 0; j < W; j++)
                h[u][j] += f[j];
            unit<T, W> sum;
            sum.set(h[u]);
            if (store)
                sum.put(sum_row + at(u) * W);
            if (round)
                sum.get(h[u]);
        });
    }
    __device__ __forceinline__ float sum(const float (&h)[UNITS][W]) const
    {
        float sum = 0;
#pragma unroll
        for (int u = 0; u < UNITS; u++)
#pragma unroll
            for (int j = 0; j < W; j++)
                sum += h[u][j];
        return sum;
    }
    __device__ __forceinline__ float squares(const float (&h)[UNITS][W], float mean) const
    {
        float sum = 0;
        each([&](int u) {
#pragma unroll
            for (int j = 0; j < W; j++)
                sum += (h[u][j] - mean) * (h[u][j] - mean);
        });
        return sum;
    }
    /* What multiplies units FROM.. and is added to them. */
    template <int FROM>
    __device__ __forceinline__ void fetch_params(params &to) const
    {
        if (p.g.weight)
            each<FROM, FROM + CHUNK>(
                [&](int u) { to.weight[u - FROM].fetch(p.g.weight, p.g.weight_f32, at(u) * W); });
        if constexpr (MODULATED) {
            if (p.g.data[SCALE])
                each<FROM, FROM + CHUNK>(
                    [&](int u) { to.scale[u - FROM].fetch(row(SCALE), is_f32(SCALE), at(u) * W); });
            if (p.g.data[SHIFT])
                each<FROM, FROM + CHUNK>(
                    [&](int u) { to.shift[u - FROM].fetch(row(SHIFT), is_f32(SHIFT), at(u) * W); });
        }
    }
    /* From what is normalised to what is stored. */
    template <int FROM>
    __device__ __forceinline__ void write(const float (&h)[UNITS][W], const params &with, float mean,
                                          float factor) const
    {
        const bool has_scale = MODULATED && p.g.data[SCALE], has_shift = MODULATED && p.g.data[SHIFT];
        const bool steps = p.g.rounding & ADZE_ROUND_STEPS && (has_scale || has_shift);
        char *const out_row = (char *)row(OUT);
        each<FROM, FROM + CHUNK>([&](int u) {
            float y[W], f[W];
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] = (h[u][j] - mean) * factor;
            round_if<T>(p.g.rounding & ADZE_ROUND_NORM, y);
            if (p.g.weight) {
                with.weight[u - FROM].get(p.g.weight_f32, f);
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[j] *= f[j] + p.g.weight_offset;
            }
            if (p.g.bias) {
                param_unit<T, W> bias;
                bias.fetch(p.g.bias, p.g.bias_f32, at(u) * W);
                bias.get(p.g.bias_f32, f);
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[j] += f[j];
            }
            if constexpr (MODULATED) {
                round_if<T>(steps, y);
                if (has_scale) {
                    with_table(SCALE, u, with.scale[u - FROM], f);
#pragma unroll
                    for (int j = 0; j < W; j++)
                        f[j] += 1;
                    round_if<T>(steps, f);
#pragma unroll
                    for (int j = 0; j < W; j++)
                        y[j] *= f[j];
                    round_if<T>(steps && has_shift, y);
                }
                if (has_shift) {
                    with_table(SHIFT, u, with.shift[u - FROM], f);
#pragma unroll
                    for (int j = 0; j < W; j++)
                        y[j] += f[j];
                }
                if (is_f32(OUT)) {
                    store_floats((float *)out_row + at(u) * W, y);
                    return;
                }
            }
            unit<T, W> out;
            out.set(y);
            out.put((T *)out_row + at(u) * W);
        });
    }
    /* All units, of which those of the first chunk may have been fetched. */
    template <int FROM = 0>
    __device__ __forceinline__ void write_all(const float (&h)[UNITS][W], params &with, bool fetched, float mean,
                                              float factor) const
    {
        if constexpr (FROM < UNITS) {
            if (!fetched)
                fetch_params<FROM>(with);
            write<FROM>(h, with, mean, factor);
            write_all<FROM + CHUNK>(h, with, false, mean, factor);
        }
    }
};

/* The first thread of a row prefetches what the block reads of it. */
template <typename T, int W, bool MODULATED>
__device__ __forceinline__ void norm_any_prefetch(const norm_any_near &p, uint32_t r, int first, int units)
{
    const norm_piece<T, W, 1, MODULATED, near_rows<NORM_TENSORS>, int> piece = {
        p, p.rows.split(r < p.rows.count ? r : p.rows.count - 1), first, 0};
    const auto ask = [&](const char *row, bool f32) {
        const int size = W * (int)(f32 ? sizeof(float) : sizeof(T));
        const char *const from = (const char *)((uintptr_t)(row + (int64_t)first * size) & ~(uintptr_t)15);
        prefetch_row(from, units * size / 16); /* the last bytes may be missing */
    };
    if (units * W * (int)sizeof(T) < 16)
        return;
    ask(piece.row(X), false);
    if (p.g.data[RESIDUAL])
        ask(piece.row(RESIDUAL), false);
    if (threadIdx.y > 0 || blockIdx.x >= cluster_size())
        return;
    if (p.g.weight)
        ask((const char *)p.g.weight, p.g.weight_f32);
    for (int t = SCALE; t < NORM_TENSORS && MODULATED; t++)
        if (p.g.data[t])
            ask(piece.row(t), piece.is_f32(t));
}

/* Threads of a block, at most, and blocks of a multiprocessor, at least: these bound the registers. Parameters of 8
   elements, which may be floats, take many. */
constexpr int any_threads(int width, bool modulated, bool in_cluster)
{
    const int most = in_cluster ? 1024 : 512;
    return modulated && width == 8 ? most / 2 : most;
}
constexpr int any_blocks(int width, int elements, bool modulated, bool in_cluster)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    return in_cluster ? 1 : modulated ? (width == 8 ? 3 : 2) : elements > 8 ? 2 : 3;
#else
    return 1;
#endif
}

template <typename T, int W, bool CENTRED, int UNITS, bool MODULATED, bool IN_CLUSTER>
__global__ void __launch_bounds__(any_threads(W, MODULATED, IN_CLUSTER),
                                  any_blocks(W, UNITS *W, MODULATED, IN_CLUSTER))
    norm_any(const __grid_constant__ norm_any_near p)
{
    typedef norm_piece<T, W, UNITS, MODULATED, near_rows<NORM_TENSORS>, int> piece_type;
    __shared__ norm_shared<IN_CLUSTER> shared;
    if constexpr (IN_CLUSTER)
        cluster_arrive(); /* waited for before the first store: all blocks are there */
    const uint32_t block = IN_CLUSTER ? blockIdx.x / (uint32_t)cluster_size() : blockIdx.x;
    const uint32_t r = block * blockDim.y + threadIdx.y;
    const int begin = IN_CLUSTER ? cluster_rank() * (int)p.part : 0;
    const int end = IN_CLUSTER ? min((int)p.units, begin + (int)p.part) : (int)p.units;
    pdl_launch_next();
    if (blockIdx.x < p.prefetch && threadIdx.x == 0)
        norm_any_prefetch<T, W, MODULATED>(p, r, begin, end - begin);
    /* Beyond the last row, that one again without a store: shuffles and barriers want all threads. */
    const bool writes = r < p.rows.count;
    piece_type piece = {p, p.rows.split(writes ? r : p.rows.count - 1), begin + (int)threadIdx.x, end};
    float h[UNITS][W];
    typename piece_type::params params;
    pdl_wait();
    piece.read(h, writes);
    piece.template fetch_params<0>(params); /* before the sum is known */
    if (IN_CLUSTER)
        cluster_wait();
    float mean = 0, square;
    if constexpr (CENTRED) {
        mean = any_total<0>(piece.sum(h), shared) * p.g.inverse_dim;
        square = any_total<1>(piece.squares(h, mean), shared);
    } else {
        square = any_total<0>(piece.squares(h, 0), shared);
    }
    if (!writes)
        return;
    piece.forget();
    piece.write_all(h, params, true, mean, rsqrtf(square * p.g.inverse_dim + p.g.eps));
}

template <typename T, bool CENTRED, bool IN_CLUSTER>
__global__ void __launch_bounds__(LOOP_THREADS, 1) norm_loop(const __grid_constant__ norm_any_far p)
{
    typedef norm_piece<T, 1, LOOP_UNITS, true, far_rows<NORM_TENSORS>, int64_t> piece_type;
    __shared__ norm_shared<IN_CLUSTER> shared;
    const int64_t blocks = IN_CLUSTER ? cluster_size() : 1;
    const int64_t begin = IN_CLUSTER ? cluster_rank() * p.part : 0;
    const int64_t end = IN_CLUSTER ? min(p.units, begin + p.part) : p.units;
    if constexpr (IN_CLUSTER)
        cluster_arrive();
    pdl_launch_next();
    pdl_wait();
    for (int64_t r = blockIdx.x / blocks; r < p.rows.count; r += gridDim.x / blocks) {
        piece_type piece = {p, p.rows.split(r), 0, end};
        float h[LOOP_UNITS][1], sum = 0, mean = 0;
        const auto pass = [&](bool store_sum, auto work) {
#pragma unroll 1
            for (piece.first = begin + threadIdx.x; piece.first - threadIdx.x < end;
                 piece.first += LOOP_UNITS * blockDim.x) {
                piece.forget();
                piece.read(h, store_sum);
                work();
            }
        };
        if constexpr (CENTRED) {
            pass(false, [&] { sum += piece.sum(h); });
            if (IN_CLUSTER)
                cluster_wait();
            mean = any_total<0>(sum, shared) * p.g.inverse_dim;
            sum = 0;
        }
        pass(false, [&] { sum += piece.squares(h, mean); });
        if (IN_CLUSTER && !CENTRED)
            cluster_wait();
        const float factor = rsqrtf(any_total<1>(sum, shared) * p.g.inverse_dim + p.g.eps);
        pass(true, [&] {
            typename piece_type::params params;
            piece.write_all(h, params, false, mean, factor);
        });
        if constexpr (IN_CLUSTER)
            cluster_arrive(); /* shared is used again */
        else
            __syncthreads();
    }
    if constexpr (IN_CLUSTER)
        cluster_wait();
}

/* How a call is cut: `threads` of a row in each of `cluster` blocks, which have `rows` rows; `many`: a thread holds
   ANY_HELD elements; otherwise few; `held`: in registers at all. */
struct norm_cut {
    bool held, many, modulated;
    int cluster;
    int64_t units, threads, rows;
};
/* Units of a thread that holds few. */
constexpr int few_units(int width)
{
    return width < 2 ? 4 : 8 / width;
}
template <typename T, int W, bool CENTRED, int UNITS, bool MODULATED, bool IN_CLUSTER>
static adze_status norm_launch_held(const char *op, adze_stream s, const norm_params &g, const norm_cut &cut)
{
    norm_any_near p = {};
    const int64_t vectors = ceil_div(cut.units * W, VEC<T>), threads = cut.threads * cut.rows;
    p.g = g;
    p.units = cut.units;
    p.part = ceil_div(cut.units, cut.cluster);
    p.prefetch = asking_blocks(adze_cuda_sm_count(s.device), g.rows.count * vectors / 2,
                               ceil_div(vectors * cut.rows, cut.cluster), threads, 32);
    p.rows = rows_near(g.rows, {X, OUT, RESIDUAL, SUM, SCALE, SHIFT, GATE, SCALE_TABLE, SHIFT_TABLE, GATE_TABLE});
    return launch(op, s, norm_any<T, W, CENTRED, UNITS, MODULATED, IN_CLUSTER>,
                  grid_for(g.rows.count, cut.rows) * cut.cluster, dim3((unsigned)cut.threads, (unsigned)cut.rows),
                  launch_shape(0, (unsigned)cut.cluster), p);
}
template <typename T, int W, bool CENTRED, bool MODULATED>
static adze_status norm_launch_width(const char *op, adze_stream s, const norm_params &g, const norm_cut &cut)
{
    if (cut.cluster > 1)
        return norm_launch_held<T, W, CENTRED, ANY_HELD / W, MODULATED, true>(op, s, g, cut);
    return cut.many ? norm_launch_held<T, W, CENTRED, ANY_HELD / W, MODULATED, false>(op, s, g, cut)
                    : norm_launch_held<T, W, CENTRED, few_units(W), MODULATED, false>(op, s, g, cut);
}
template <typename T, bool CENTRED, bool IN_CLUSTER>
static adze_status norm_launch_loop(const char *op, adze_stream s, const norm_params &g, const norm_cut &cut)
{
    norm_any_far p = {};
    p.g = g;
    p.units = g.dim;
    p.part = ceil_div(g.dim, cut.cluster);
    static_cast<adze_rows &>(p.rows) = g.rows;
    const int64_t rows = g.rows.count < 0x7fffffff / ANY_CLUSTER ? g.rows.count : 0x7fffffff / ANY_CLUSTER;
    return launch(op, s, norm_loop<T, CENTRED, IN_CLUSTER>, rows * cut.cluster, dim3(LOOP_THREADS),
                  launch_shape(0, (unsigned)cut.cluster), p);
}

#endif
