/* group_norm on CUDA.

   group_tile.cuh has the kernels for regular tensors, which are read in units of 16 bytes, shifted where only x is
   not aligned, or of one or two elements. tile_shape and tile_place find out whether a tensor is regular; hold and
   slice_cut choose its tiling. The kernels of this file take all others, one element at a time: irregular strides, or
   with channels last groups of many channels. A group is rows of `len` elements: those of its channels when channels
   come first, its part of each position's row when they come last. group_whole keeps a group in the registers of one
   block. Larger groups take two kernels and scratch between them: group_slices computes the statistics of slices,
   group_write combines them and writes the result. The shape and the device determine the slices, and they are
   combined in a fixed order, so that two runs give the same bits. */
#include "group_tile.cuh"

enum {
    WHOLE_THREADS = 512,
    ROW_THREADS = 256,
    ROW_UNITS = 4,
    TILE_CHANNELS = 1024, /* channels of a tile, at most */
    TILE_BYTES = 128,     /* of a tile's row: shorter rows were slow with channels last */
    ROW_BLOCKS = 2048,    /* that row_slices aims at, for the SMs of an H200 */
    H200_SMS = 132,
    SHARED_MOST = 48 << 10,
    LAST_BYTES = 64 << 10, /* of x per SM: x is large beyond, with channels last */
};

struct group_params {
    const void *x, *weight, *bias;
    void *out;
    float4 *stats; /* [all, slices]: elements, mean and squared deviations */
    int64_t all;   /* groups of all batch entries */
    int64_t count; /* elements of a group */
    int64_t len;
    int64_t per_group; /* channels */
    int64_t rows_per_group, rows_per_channel;
    int64_t positions;
    int64_t slices, slice; /* of a group; elements of one */
    int32_t groups;
    float eps;
    int32_t act;
    bool last, steps, weight_f32, bias_f32;
    adze_rows rows; /* of x and out */
};

/* Where a run of units of one group begins. Elements within 2^30 of it are found by 32-bit divisions, which are
   several times cheaper than 64-bit ones. */
struct group_start {
    int64_t row, at;       /* of x; an element of the row */
    int64_t channel, into; /* channels first: the row's, and which row of it; last: the group's first */
};
/* (a + b) / size and the remainder, for a < size and b < 2^30. */
__device__ __forceinline__ int64_t step_over(int64_t a, uint32_t b, int64_t size, int64_t &rest)
{
    int64_t times;
    rest = a + b;
    if (size <= 0x40000000) {
        times = (uint32_t)rest / (uint32_t)size;
        rest = (uint32_t)rest - (uint32_t)times * (uint32_t)size;
    } else {
        times = rest >= size;
        rest -= times * size;
    }
    return times;
}
__device__ __forceinline__ group_start group_begin(const group_params &p, int64_t group, int64_t element)
{
    const int64_t entry = divide(group, p.groups), row = divide(element, p.len);
    group_start start;
    start.row = row + (p.last ? entry * p.positions : group * p.rows_per_group);
    start.at = element - row * p.len;
    start.channel = (group - entry * p.groups) * p.per_group;
    start.into = 0;
    if (!p.last) {
        const int64_t channel = divide(row, p.rows_per_channel);
        start.channel += channel;
        start.into = row - channel * p.rows_per_channel;
    }
    return start;
}

/* Where an element of the run lies. */
struct group_place {
    row_index index;
    int64_t column; /* of the row, in memory */
    int64_t channel;
};
__device__ __forceinline__ group_place group_find(const group_params &p, const group_start &start, uint32_t element)
{
    int64_t at, into;
    const int64_t rows = step_over(start.at, element, p.len, at);
    group_place place;
    place.index = row_split(p.rows, start.row + rows);
    place.column = p.last ? start.channel + at : at;
    place.channel =
        p.last ? place.column : start.channel + step_over(start.into, (uint32_t)rows, p.rows_per_channel, into);
    return place;
}
/* Loads the thread's elements of a run, every blockDim.x-th, at most N. Returns how many there are. */
template <typename T, int N>
__device__ __forceinline__ int group_fetch(const group_params &p, const group_start &start, int elements,
                                           unit<T, 1> (&v)[N])
{
    int n = 0;
#pragma unroll
    for (int k = 0; k < N; k++) {
        const int element = (int)(threadIdx.x + k * blockDim.x);
        if (element < elements) {
            const group_place place = group_find(p, start, element);
            v[k].fetch((const T *)p.x + row_offset(p.rows, 0, place.index) + place.column);
            n = k + 1;
        }
    }
    return n;
}

/* Normalises what group_fetch loaded, applies act and stores it. */
template <typename T, int N>
__device__ __forceinline__ void group_store(const group_params &p, const group_start &start, unit<T, 1> (&v)[N],
                                            int n, float2 stats)
{
#pragma unroll 1
    for (int k = 0; k < n; k++) { /* v shifts down one register per iteration: unrolled code would be large */
        float f[1], weight[1] = {1}, bias[1] = {0};
        v[0].get(f);
        const group_place place = group_find(p, start, threadIdx.x + k * blockDim.x);
        if (p.weight)
            load_param<T, 1>(p.weight, p.weight_f32, place.channel, weight);
        if (p.bias)
            load_param<T, 1>(p.bias, p.bias_f32, place.channel, bias);
        f[0] = fmaf(f[0] - stats.x, stats.y * weight[0], bias[0]);
        if (p.steps)
            f[0] = round_to<T>(f[0]);
        act_all<1>(p.act, f);
        store<T, 1>((T *)p.out + row_offset(p.rows, 1, place.index) + place.column, f);
#pragma unroll
        for (int i = 0; i + 1 < N; i++)
            v[i] = v[i + 1];
    }
}

/* The statistics of a block from those of its threads; every thread gets them. */
__device__ __forceinline__ float4 group_block(const group_sums<1, 1> &sums, float4 (&parts)[32])
{
    const int lane = (int)threadIdx.x % 32, warps = (int)blockDim.x / 32;
    const float4 mine =
        group_combine<float>(1, 0, 1, [&](int) { return make_float4(sums.count, sums.mean[0], sums.square[0], 0); });
    __syncthreads(); /* parts were read */
    if (lane == 0)
        parts[threadIdx.x / 32] = mine;
    __syncthreads();
    return group_combine<float>(warps, lane, 32, [&](int i) { return parts[i]; });
}

template <typename T>
__global__ void __launch_bounds__(WHOLE_THREADS, 2) group_whole(const __grid_constant__ group_params p)
{
    __shared__ float4 parts[32];
    pdl_launch_next();
    pdl_wait();
    for (int64_t group = blockIdx.x; group < p.all; group += gridDim.x) {
        const group_start start = group_begin(p, group, 0);
        unit<T, 1> v[ROW_UNITS];
        const int n = group_fetch(p, start, (int)p.count, v);
        group_sums<1, 1> sums;
        sums.add(v, n);
        group_store(p, start, v, n, group_stats(group_block(sums, parts), p.eps));
    }
}

template <typename T>
__global__ void __launch_bounds__(ROW_THREADS, 3) group_slices(const __grid_constant__ group_params p)
{
    __shared__ float4 parts[32];
    pdl_launch_next();
    pdl_wait();
    for (int64_t i = blockIdx.x; i < p.all * p.slices; i += gridDim.x) {
        const int64_t group = divide(i, p.slices), begin = (i - group * p.slices) * p.slice;
        const int64_t end = begin + p.slice < p.count ? begin + p.slice : p.count;
        group_sums<1, 1> sums;
        for (int64_t at = begin; at < end; at += ROW_THREADS * ROW_UNITS) {
            unit<T, 1> v[ROW_UNITS];
            const int elements = end - at < ROW_THREADS * ROW_UNITS ? (int)(end - at) : ROW_THREADS * ROW_UNITS;
            sums.add(v, group_fetch(p, group_begin(p, group, at), elements, v));
        }
        const float4 all = group_block(sums, parts);
        if (threadIdx.x == 0)
            p.stats[i] = all;
    }
}

template <typename T>
__global__ void __launch_bounds__(ROW_THREADS, 3) group_write(const __grid_constant__ group_params p)
{
    const int64_t pieces = (p.count + ROW_THREADS * ROW_UNITS - 1) / (ROW_THREADS * ROW_UNITS);
    pdl_launch_next();
    pdl_wait();
    for (int64_t i = p.all * pieces - 1 - blockIdx.x; i >= 0; i -= gridDim.x) {
        const int64_t group = divide(i, pieces), at = (i - group * pieces) * (ROW_THREADS * ROW_UNITS);
        const int elements = p.count - at < ROW_THREADS * ROW_UNITS ? (int)(p.count - at) : ROW_THREADS * ROW_UNITS;
        const group_start start = group_begin(p, group, at);
        unit<T, 1> v[ROW_UNITS];
        const int n = group_fetch(p, start, elements, v);
        const float4 *stats = p.stats + group * p.slices;
        const float4 all =
            group_combine<double>((int)p.slices, (int)threadIdx.x % 32, 32, [&](int k) { return stats[k]; });
        group_store(p, start, v, n, group_stats(all, p.eps));
    }
}

/* ---- The host ---- */

enum { HELD_2, HELD_4, HELD_8, HELD_16, HELD_21, SLICES, ANY_WHOLE, ANY_SLICES };
constexpr adze_variant VARIANTS[] = {
    {"held-2", "regular tensors whose groups a cluster holds, 2 vectors per thread"},
    {"held-4", "the same, 4 units per thread"},
    {"held-8", "the same, 8 vectors per thread"},
    {"held-16", "the same at any alignment, 16 units per thread"},
    {"held-21", "the same with channels first, 21 vectors per thread, on sm_90"},
    {"slices", "regular tensors with groups of more than 2048 elements, two kernels"},
    {"any-whole", "groups of up to 2048 elements, one element at a time"},
    {"any-slices", "groups of more than 2048 elements, one element at a time, two kernels"},
    {NULL, NULL},
};
constexpr int held_variant(int units)
{
    return units == 2 ? HELD_2 : units == 4 ? HELD_4 : units == 8 ? HELD_8 : units == HELD_NARROW ? HELD_16 : HELD_21;
}

static int64_t clamp(int64_t v, int64_t low, int64_t high)
{
    return v < low ? low : v > high ? high : v;
}

/* Slices of a group of any tensor: enough blocks in all for the SMs, and at most 32 chunks per thread. */
static int64_t row_slices(int64_t sm_count, int64_t all, int64_t count)
{
    const int64_t chunks = ceil_div(count, ROW_THREADS * ROW_UNITS);
    return clamp(ROW_BLOCKS * sm_count / H200_SMS / all, ceil_div(chunks, 32), chunks);
}

static bool channels_are_last(const adze_group_norm_args *a)
{
    return a->channels_last || a->x.rank == 2; /* a rank of 2 has no positions: both layouts are one */
}

/* ---- Tiles ---- */

/* The shape as tiles of the fewest columns that hold whole groups, in units of `width` elements; false if the shape
   is too irregular for them. */
static bool tile_shape(const adze_group_norm_args *a, int width, tile_params *p)
{
    const bool last = channels_are_last(a);
    const int64_t channels = a->x.shape[last ? a->x.rank - 1 : 1], per_group = channels / a->groups;
    const int64_t positions = adze_count(&a->x) / a->x.shape[0] / channels;
    int64_t whole = per_group; /* channels of a tile */
    while (last && whole % width)
        whole += per_group;
    const int64_t rows = last ? positions : per_group * positions / width;
    if ((last ? channels % whole : positions % width) || whole > TILE_CHANNELS || whole / width > SLICE_THREADS ||
        rows > 1 << 30 || a->x.shape[0] * a->groups > 1 << 20)
        return false;
    p->rows = (int32_t)rows, p->channels = (int32_t)whole, p->tiles = (int32_t)(channels / whole);
    p->per_group = (int32_t)per_group, p->groups = (int32_t)(whole / per_group);
    p->columns = last ? (int32_t)(whole / width) : 1, p->tile = last ? whole : per_group * positions;
    p->per_channel = last ? 1 : (int32_t)(positions / width);
    p->over_group = (uint32_t)(0xffffffffu / (uint32_t)per_group + 1);
    return true;
}

/* The strides of x and out; false if they are not regular, or not aligned for such units. loose: x need not be. */
static bool tile_place(const adze_group_norm_args *a, int width, tile_params *p, bool loose = false)
{
    const bool last = channels_are_last(a);
    adze_tensor x = a->x, out = a->out;
    adze_tensor *const both[] = {&x, &out};
    if (last)
        x.rank--, out.rank--;
    adze_merge(2, both, 1);
    for (int i = 0; i < 2; i++) {
        p->entry[i] = both[i]->stride[0], p->row[i] = !last ? width : x.rank > 1 ? both[i]->stride[1] : 0;
        const bool anywhere = loose && i == 0;
        if (x.rank > 2 || (!anywhere && (uintptr_t)both[i]->data % (width * adze_dtype_size(x.dtype))) ||
            (!anywhere && x.shape[0] > 1 && p->entry[i] % width) || (p->rows > 1 && p->row[i] % width))
            return false;
    }
    p->x = x.data, p->out = out.data, p->slice = (float4 *)a->call.scratch;
    p->weight = a->weight.dtype ? a->weight.data : NULL, p->bias = a->bias.dtype ? a->bias.data : NULL;
    p->weight_f32 = a->weight.dtype == ADZE_F32, p->bias_f32 = a->bias.dtype == ADZE_F32;
    p->eps = a->eps, p->act = a->act, p->steps = a->act && (a->rounding & ADZE_ROUND_STEPS);
    return true;
}

static unsigned tile_threads(const tile_params &p)
{
    return (unsigned)(p.columns * p.height + 31) / 32 * 32;
}

/* Tiles `times` as wide, each cut into `slices` blocks of at most `most` threads, with `units` units per thread at a
   time. */
static tile_params tile_cut(tile_params p, bool last, int times, int64_t slices, int units, int most)
{
    p.channels *= times, p.groups *= times, p.columns *= times, p.tile *= times, p.tiles /= times;
    p.slices = (int32_t)slices, p.ranks = 1;
    p.share = (int32_t)ceil_div(p.rows, slices);
    p.height = (int32_t)clamp(ceil_div(p.share, units), 1, most / p.columns);
    if (!last) {
        p.height = (p.height + 31) / 32 * 32;
        p.step_channels = p.height / p.per_channel, p.step_rest = p.height % p.per_channel;
    }
    p.split = (int32_t)tile_threads(p) / 32;
    if (last)
        p.split = p.split > p.groups ? p.split / p.groups : 1;
    return p;
}

/* Contiguous units in a row of a tile, at most. */
static int tile_columns(bool narrow)
{
    return narrow ? SLICE_THREADS : 64;
}

/* The tiling for the two-kernel path, from the shape and the number of SMs alone, with units of `bytes` bytes. Rows
   have TILE_BYTES or somewhat more where the tensor allows it, which was fastest on an H200. Blocks fill the SMs
   once, or several times where that leaves a smaller tail, or where each still has SLICE_CHUNKS chunks: SMs reach the
   memory at different speeds, and tile_write begins with the blocks whose x was read last. But it combines the
   statistics of all slices in each block: they are then few. No thread adds more than 32 chunks. */
enum { SLICE_FILLS = 4, SLICE_CHUNKS = 6, SLICE_STATS = 256 };
static tile_params slice_cut(int sm_count, const tile_params &p, bool last, bool loose, int64_t entries, int width,
                             int bytes)
{
    const bool narrow = bytes < 16;
    const int units = narrow ? SLICE_UNITS<true> : SLICE_UNITS<false>;
    const int64_t blocks = sm_count * slice_blocks(width, narrow, last, loose);
    int times = 1;
    for (int more = 2; last && more <= p.tiles && p.columns * times * bytes < TILE_BYTES &&
                       p.columns * more <= tile_columns(narrow);
         more++)
        times = p.tiles % more ? times : more;
    const int64_t tiles = entries * p.tiles / times;
    const int64_t chunk = units * (SLICE_THREADS / (p.columns * times)), chunks = ceil_div(p.rows, chunk);
    int64_t fills = clamp(tiles * chunks / (blocks * SLICE_CHUNKS), 1, SLICE_FILLS);
    while (fills > 1 && fills * blocks / tiles * p.groups * times > SLICE_STATS)
        fills--;
    while (fills < SLICE_FILLS && fills * blocks / tiles * tiles * 8 < fills * blocks * 7)
        fills++;
    const int64_t slices = fills * blocks / tiles, least = ceil_div(chunks, 32);
    return tile_cut(p, last, times, clamp(slices, least, p.rows), units, SLICE_THREADS);
}

template <typename T, int W, bool LAST, bool LOOSE>
static adze_status run_slices_of(const cuda_call &s, const tile_params &p, int64_t entries)
{
    const tile_params cut = slice_cut(s.gpu.sm_count, p, LAST, LOOSE, entries, W, W * (int)sizeof(T));
    const int64_t grid = entries * cut.tiles * cut.slices;
    const dim3 block(tile_threads(cut));
    const size_t shared = tile_shared(cut, LAST, W);
    ADZE_CHECK(launch(s, tile_slices<T, W, LAST, LOOSE>, grid, block, shared, cut));
    return launch(s, tile_write<T, W, LAST, LOOSE>, grid, block, shared, cut);
}

template <typename T, int W, bool LOOSE>
static adze_status run_slices(const cuda_call &s, const tile_params &p, bool last, int64_t entries)
{
    return last ? run_slices_of<T, W, true, LOOSE>(s, p, entries) : run_slices_of<T, W, false, LOOSE>(s, p, entries);
}

/* Whether x is so large that, with channels last, rows of less than TILE_BYTES in a cluster cost more than reading x
   twice in wider rows. */
static bool wants_wide(const cuda_call &s, const tile_params &p, bool last, int64_t entries, int bytes)
{
    const int64_t all = entries * p.tiles * p.rows * p.columns * bytes;
    return last && all > (int64_t)s.gpu.sm_count * LAST_BYTES;
}

/* How many clusters of tile_norm run at once: blocks of fewer threads than it is compiled for share an SM with more
   of them. A group of SMs has whole clusters only. */
static int64_t held_at_once(const cuda_call &s, const tile_params &p, int units, bool last)
{
    const int64_t sms = p.ranks > 1 ? adze_cuda_clustered(s.device, p.ranks) : s.gpu.sm_count;
    return sms * (held_blocks(units) * held_threads(units, last) / (int)tile_threads(p));
}

/* The tiling for tile_norm that gives the busiest SM the least work, counted in vectors. A wave of clusters, a
   cluster, blocks that have an SM to themselves, and up to eight vectors in sequence in one thread have costs too;
   the weights select what was fastest on an H200. units: units of a thread, 0 when no cluster can hold a tile. A call
   that asks for a variant gets its units. */
enum { WAVE_COST = 1000, CLUSTER_COST = 400, ALONE_COST = 500, VECTOR_COST = 100 };
struct held_cut {
    tile_params p;
    int units;
};
static held_cut hold(const cuda_call &s, const tile_params &p, bool last, int64_t entries, int width, int bytes)
{
    const bool narrow = bytes < 16, large = wants_wide(s, p, last, entries, bytes);
    const int64_t sm_count = s.gpu.sm_count;
    const bool clusters = adze_cuda_clusters(s.device); /* so the code for this device is for sm_90 or newer */
    const int ranks_most = clusters ? 8 : 1;
    const int units_most = narrow ? HELD_NARROW : clusters && s.gpu.sm == 90 && !last ? HELD_MOST : 8;
    held_cut best = {};
    int64_t least = INT64_MAX;
    for (int times = 1; times <= p.tiles && p.columns * times <= tile_columns(narrow) && (last || times == 1);
         times++)
        for (int ranks = 1; ranks <= ranks_most && p.tiles % times == 0; ranks *= 2)
            for (const int units : {2, 4, 8, (int)HELD_NARROW, (int)HELD_MOST}) {
                const int threads = held_threads(units, last);
                if (units > units_most || p.columns * times > threads ||
                    (s.choice->want >= 0 && s.choice->want != held_variant(units)) ||
                    (narrow ? units != 4 && units != HELD_NARROW : units == HELD_NARROW))
                    continue;
                tile_params cut = tile_cut(p, last, times, ranks, units, threads);
                cut.ranks = ranks;
                if ((int64_t)cut.height * units < cut.share || tile_shared(cut, last, width) > SHARED_MOST)
                    continue;
                const int64_t blocks = entries * cut.tiles * ranks, row = cut.columns * bytes;
                int64_t moved = last ? ceil_div(row, 32) * 32 : row; /* whole L2 sectors */
                if (large && row < TILE_BYTES)
                    moved *= 2;
                const int64_t cost = ceil_div(blocks, sm_count) * cut.share * moved / 16 +
                                     ceil_div(blocks / ranks, held_at_once(s, cut, units, last)) * WAVE_COST +
                                     (ranks > 1) * CLUSTER_COST + (units == HELD_MOST) * ALONE_COST +
                                     (units < 8 ? units : 8) * VECTOR_COST;
                if (cost < least)
                    least = cost, best.p = cut, best.units = units;
            }
    return best;
}

template <typename T, int W, bool LAST>
static adze_status run_held(const cuda_call &s, const held_cut &h, int64_t entries)
{
    const launch_shape shape(tile_shared(h.p, LAST, W), (unsigned)h.p.ranks);
    const int64_t grid = entries * h.p.tiles * h.p.ranks;
    const dim3 block(tile_threads(h.p));
    if constexpr (is_narrow<T, W>) {
        if (h.units == HELD_NARROW)
            return launch(s, tile_norm<T, W, HELD_NARROW, LAST>, grid, block, shape, h.p);
        return launch(s, tile_norm<T, W, 4, LAST>, grid, block, shape, h.p);
    } else {
        if constexpr (!LAST)
            if (h.units == HELD_MOST)
                return launch(s, tile_norm<T, W, HELD_MOST, LAST>, grid, block, shape, h.p);
        switch (h.units) {
        case 2: return launch(s, tile_norm<T, W, 2, LAST>, grid, block, shape, h.p);
        case 4: return launch(s, tile_norm<T, W, 4, LAST>, grid, block, shape, h.p);
        default: return launch(s, tile_norm<T, W, 8, LAST>, grid, block, shape, h.p);
        }
    }
}

/* Blocks with the most units have an SM to themselves, where nothing hides the latency of their loads, sums and
   stores. x is read twice in less time beyond two waves of such blocks, and where their clusters leave a third of the
   GPU idle in the last wave: fewer of them run at once than the multiprocessors could hold. */
static bool slow_alone(const cuda_call &s, const tile_params &p, int64_t entries)
{
    const int64_t clusters = entries * p.tiles, sm_count = s.gpu.sm_count;
    const int64_t at_once = p.ranks > 1 ? adze_cuda_clustered(s.device, p.ranks) : sm_count;
    const int64_t waves = ceil_div(clusters, at_once);
    return clusters * p.ranks > 2 * sm_count || waves * at_once * 2 > clusters * 3;
}

/* The same of other blocks, where the last of several waves is nearly empty: four entries of 960 channels last, 1056
   positions each, took 17.5 us, and 13.7 us where x is read twice. Beyond one wave of narrow units too, and of others
   with channels last beyond two: in the clusters of a wave all blocks load, and then all store. Four entries of 960
   channels first, 1320 positions each, took 29.6 us in narrow units, and 15.0 where vectors are read twice. */
static bool slow_waves(const cuda_call &s, const held_cut &h, bool last, int64_t entries)
{
    const int64_t clusters = entries * h.p.tiles, at_once = held_at_once(s, h.p, h.units, last);
    const int64_t waves = ceil_div(clusters, at_once);
    if (h.units == HELD_NARROW ? waves > 1 : last && waves > 2)
        return true;
    return waves > 1 && waves * at_once * 2 > clusters * 3;
}

/* Runs the call in units of W elements of T; false if they do not fit it. */
template <typename T, int W>
static bool run_tiles(const cuda_call &s, const adze_group_norm_args *a, adze_status *status)
{
    constexpr int BYTES = W * (int)sizeof(T);
    const bool last = channels_are_last(a);
    const int64_t entries = a->x.shape[0];
    tile_params p = {};
    if (!tile_shape(a, W, &p) || !tile_place(a, W, &p))
        return false;
    const held_cut held = hold(s, p, last, entries, W, BYTES);
    const bool in_slices = adze_count(&a->x) / (entries * a->groups) > WHOLE_THREADS * ROW_UNITS;
    const bool slow = held.p.columns * BYTES < TILE_BYTES && wants_wide(s, p, last, entries, BYTES);
    const bool turns =
        held.units == HELD_MOST ? slow_alone(s, held.p, entries) : held.units && slow_waves(s, held, last, entries);
    if (held.units && s.takes(held_variant(held.units), true, !(in_slices && (slow || turns))))
        *status = last ? run_held<T, W, true>(s, held, entries) : run_held<T, W, false>(s, held, entries);
    else if (s.takes(SLICES, in_slices)) {
        if constexpr (is_narrow<T, W>) { /* vectors that are shifted take fewer instructions than narrow units */
            tile_params wide = {};
            if (tile_shape(a, VEC<T>, &wide) && tile_place(a, VEC<T>, &wide, true)) {
                *status = run_slices<T, VEC<T>, true>(s, wide, last, entries);
                return true;
            }
        }
        *status = run_slices<T, W, false>(s, p, last, entries);
    } else {
        return false;
    }
    return true;
}

/* ---- The call ---- */

extern "C" size_t adze_group_norm_cuda_scratch(adze_stream stream, const adze_group_norm_args *a)
{
    const int sm_count = adze_cuda_sm_count(stream.device);
    const int64_t elements = adze_count(&a->x), all = a->x.shape[0] * a->groups;
    if (elements == 0 || elements / all <= WHOLE_THREADS * ROW_UNITS)
        return 0;
    int64_t slices = row_slices(sm_count, all, elements / all);
    /* for units of any width: the call's alignment is no property of the shape */
    const int size = (int)adze_dtype_size(a->x.dtype);
    for (const int width : {16 / size, 2, 1}) {
        tile_params p = {};
        for (int loose = 0; loose < 2 && tile_shape(a, width, &p); loose++) {
            const bool last = channels_are_last(a);
            const tile_params cut = slice_cut(sm_count, p, last, loose, a->x.shape[0], width, width * size);
            slices = cut.slices > slices ? cut.slices : slices;
        }
    }
    return (size_t)(all * slices) * sizeof(float4);
}

template <typename T>
static adze_status run_any(const cuda_call &s, group_params p)
{
    if (s.takes(ANY_WHOLE, p.count <= WHOLE_THREADS * ROW_UNITS)) {
        const int64_t threads = clamp(ceil_div(p.count, ROW_UNITS), 1, WHOLE_THREADS);
        return launch(s, group_whole<T>, grid_for(p.all, 1), dim3((unsigned)(threads + 31) / 32 * 32), 0, p);
    }
    if (!s.takes(ANY_SLICES, p.count > WHOLE_THREADS * ROW_UNITS))
        return ADZE_NO_KERNEL;
    const int64_t chunks = ceil_div(p.count, ROW_THREADS * ROW_UNITS);
    p.slices = row_slices(s.gpu.sm_count, p.all, p.count);
    p.slice = ceil_div(chunks, p.slices) * ROW_THREADS * ROW_UNITS;
    ADZE_CHECK(launch(s, group_slices<T>, grid_for(p.all * p.slices, 1), dim3(ROW_THREADS), 0, p));
    return launch(s, group_write<T>, grid_for(p.all * chunks, 1), dim3(ROW_THREADS), 0, p);
}

template <typename T>
static adze_status run_as(const cuda_call &s, const adze_group_norm_args *a)
{
    const bool last = channels_are_last(a);
    const int64_t entries = a->x.shape[0], elements = adze_count(&a->x);
    adze_status status;
    if (run_tiles<T, VEC<T>>(s, a, &status))
        return status;
    if constexpr (sizeof(T) == 2)
        if (run_tiles<T, 2>(s, a, &status))
            return status;
    if (run_tiles<T, 1>(s, a, &status))
        return status;
    group_params p = {};
    p.all = entries * a->groups;
    p.count = elements / p.all;
    adze_tensor x = a->x, out = a->out;
    adze_tensor *const merged[] = {&x, &out};
    const adze_tensor *const tensors[] = {&x, &out};
    p.last = last;
    p.groups = a->groups;
    p.per_group = a->x.shape[last ? a->x.rank - 1 : 1] / a->groups;
    p.positions = p.count / p.per_group;
    if (!last)
        adze_merge(2, merged, 2);
    adze_rows_init(&p.rows, &x, 2, tensors);
    p.len = last ? p.per_group : x.shape[x.rank - 1];
    p.rows_per_group = p.count / p.len;
    p.rows_per_channel = p.positions / p.len > 0 ? p.positions / p.len : 1;
    p.x = x.data, p.out = out.data;
    p.weight = a->weight.dtype ? a->weight.data : NULL, p.bias = a->bias.dtype ? a->bias.data : NULL;
    p.weight_f32 = a->weight.dtype == ADZE_F32, p.bias_f32 = a->bias.dtype == ADZE_F32;
    p.eps = a->eps, p.act = a->act, p.steps = a->act && (a->rounding & ADZE_ROUND_STEPS);
    p.stats = (float4 *)a->call.scratch;
    return run_any<T>(s, p);
}

static adze_status group_norm_run(const cuda_call &s, const adze_group_norm_args *a)
{
    const int64_t elements = adze_count(&a->x);
    if (elements == 0)
        return ADZE_OK;
    const bool last = channels_are_last(a);
    const int64_t channels = a->x.shape[last ? a->x.rank - 1 : 1], entries = a->x.shape[0];
    const int form = a->x.dtype | last << 4 | a->act << 8 | (a->rounding & ADZE_ROUND_STEPS ? 1 : 0) << 5;
    return s.tuned(form, entries, channels, elements / entries / channels, a->groups, [&] {
        switch (a->x.dtype) {
        case ADZE_F32: return run_as<float>(s, a);
        case ADZE_F16: return run_as<f16>(s, a);
        default: return run_as<bf16>(s, a);
        }
    });
}
CUDA_ENTRIES(group_norm, VARIANTS, group_norm_run)
