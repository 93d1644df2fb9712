/* group_norm on CUDA. Over 600 lines: six kernels for two layouts, and their choice.

   A group is rows of `len` elements: those of its channels when channels come first, its part of each position's row
   when they come last. group_parts.cuh has the kernel for channels first that can be read 16 bytes at a time and held
   by a cluster of blocks; what follows here is for other calls and older cards. group_whole: a block holds a group in
   registers, reads it once and writes it. Larger groups take three kernels and scratch between them: the mean and the
   squared deviations of slices (group_slices, or last_slices for whole rows of channels last), their combination, and
   the result (group_write, last_write). Slices are cut by the shape and combined in double in a fixed order, so that
   two runs give the same bits. The result is written from the end, which was read last and may still be in the second
   level of cache. */
#include "act.cuh"
#include "group_parts.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "unit.cuh"
#include "vec.cuh"

enum {
    WHOLE_THREADS = 512,
    ROW_THREADS = 256,
    ROW_UNITS = 4,
    LAST_THREADS = 512,
    LAST_UNITS = 8,
    WRITE_UNITS = 4,
    LAST_GROUPS = 256, /* at most, for last_slices: their sums lie in shared memory */
};

/* Units of W elements in each thread of group_whole. */
template <int W>
constexpr int WHOLE_UNITS = W == 1 ? 4 : 8;

struct group_params {
    const void *x, *weight, *bias;
    void *out;
    float2 *slice, *stats; /* [all, slices]: mean and squares; [all]: mean and 1 / deviation */
    int64_t all;           /* groups of all batch entries */
    int64_t count, units;  /* elements of a group, units of W elements */
    int64_t len;
    int64_t per_group; /* channels */
    int64_t rows_per_group, rows_per_channel;
    int64_t positions;
    int64_t slices, slice_units; /* units of a slice; positions in last_slices */
    int64_t pieces, piece;       /* last_write: pieces of the positions of a batch entry, and their size */
    int32_t groups, columns, height;
    float eps, inverse; /* 1 / count */
    int32_t act;
    bool last, steps, weight_f32, bias_f32;
    adze_rows rows; /* of x and out */
};

/* Brings the next unit to v[0]: a loop that is not unrolled walks registers this way, and its code stays small. */
template <typename H, int N>
__device__ __forceinline__ void held_next(H (&v)[N])
{
#pragma unroll
    for (int k = 0; k + 1 < N; k++)
        v[k] = v[k + 1];
}

/* Where a run of units of one group begins. What follows it within 2^30 elements is found from here by divisions of
   32 bits, which are several times cheaper than those of 64. */
struct group_start {
    int64_t row, at;       /* of x; an element of the row */
    int64_t channel, into; /* channels first: the row's, and which row of it; last: the group's first */
};
/* (a + b) / size and the rest, for a < size and b < 2^30. */
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
template <typename T>
__device__ __forceinline__ const T *group_at(const group_params &p, const group_start &start, uint32_t element)
{
    const group_place place = group_find(p, start, element);
    return (const T *)p.x + row_offset(p.rows, 0, place.index) + place.column;
}

/* The sum of v, or of (v - mean)^2, over the units of a block; every thread gets it. */
template <typename T, int W, int N, bool SQUARE>
__device__ __forceinline__ float group_sum(const unit<T, W> (&v)[N], int units, float mean, float *part)
{
    float sum[W] = {};
#pragma unroll
    for (int k = 0; k < N; k++)
        if ((int)(threadIdx.x + k * blockDim.x) < units) {
            float f[W];
            v[k].get(f);
#pragma unroll
            for (int j = 0; j < W; j++)
                sum[j] = SQUARE ? fmaf(f[j] - mean, f[j] - mean, sum[j]) : sum[j] + f[j];
        }
#pragma unroll
    for (int width = W / 2; width; width /= 2)
#pragma unroll
        for (int j = 0; j < width; j++)
            sum[j] += sum[j + width];
    return row_sum(sum[0], part);
}

/* The norm of W elements, through act, stored. */
template <typename T, int W>
__device__ __forceinline__ void group_store(const group_params &p, const group_place &place, float (&f)[W],
                                            float mean, float rstd)
{
    float weight[W], bias[W];
    if (p.last) {
        if (p.weight)
            load_param<T, W>(p.weight, p.weight_f32, place.channel, weight);
        if (p.bias)
            load_param<T, W>(p.bias, p.bias_f32, place.channel, bias);
    } else {
        float one[1];
        if (p.weight)
            load_param<T, 1>(p.weight, p.weight_f32, place.channel, one);
#pragma unroll
        for (int j = 0; j < W; j++)
            weight[j] = one[0];
        if (p.bias)
            load_param<T, 1>(p.bias, p.bias_f32, place.channel, one);
#pragma unroll
        for (int j = 0; j < W; j++)
            bias[j] = one[0];
    }
#pragma unroll
    for (int j = 0; j < W; j++) {
        f[j] = (f[j] - mean) * (p.weight ? rstd * weight[j] : rstd) + (p.bias ? bias[j] : 0);
        if (p.steps)
            f[j] = round_to<T>(f[j]);
    }
    act_all<W>(p.act, f);
    store<T, W>((T *)p.out + row_offset(p.rows, 1, place.index) + place.column, f);
}

template <typename T, int W>
__global__ void __launch_bounds__(WHOLE_THREADS, 1) group_whole(const __grid_constant__ group_params p)
{
    __shared__ __align__(16) float part[2][32];
    const int units = (int)p.units;
    pdl_launch_next();
    pdl_wait();
    for (int64_t group = blockIdx.x; group < p.all; group += gridDim.x) {
        const group_start start = group_begin(p, group, 0);
        unit<T, W> v[WHOLE_UNITS<W>];
#pragma unroll
        for (int k = 0; k < WHOLE_UNITS<W>; k++) {
            const int unit = (int)(threadIdx.x + k * blockDim.x);
            if (unit < units)
                v[k].fetch(group_at<T>(p, start, unit * W));
        }
        const float mean = group_sum<T, W, WHOLE_UNITS<W>, false>(v, units, 0, part[0]) * p.inverse;
        const float square = group_sum<T, W, WHOLE_UNITS<W>, true>(v, units, mean, part[1]);
        const float rstd = rsqrtf(square * p.inverse + p.eps);
#pragma unroll 1
        for (int unit = (int)threadIdx.x; unit < units; unit += (int)blockDim.x, held_next(v)) {
            float f[W];
            v[0].get(f);
            group_store<T, W>(p, group_find(p, start, unit * W), f, mean, rstd);
        }
    }
}

/* Chan: the squared deviations of two sets from their common mean. */
struct group_share {
    double n, mean, square;
    __device__ __forceinline__ void add(double m, double its_mean, double its_square)
    {
        const double share = m * inverse(n + m), away = its_mean - mean;
        mean += away * share;
        square += its_square + away * away * n * share;
        n += m;
    }
    __device__ __forceinline__ float2 floats() const { return make_float2((float)mean, (float)square); }
};

/* A block has a slice of a group, and takes as much of it at a time as its registers hold. */
template <typename T, int W>
__global__ void __launch_bounds__(ROW_THREADS, 3) group_slices(const __grid_constant__ group_params p)
{
    __shared__ __align__(16) float part[2][32];
    pdl_launch_next();
    pdl_wait();
    for (int64_t i = blockIdx.x; i < p.all * p.slices; i += gridDim.x) {
        const int64_t group = divide(i, p.slices), begin = (i - group * p.slices) * p.slice_units;
        const int64_t end = begin + p.slice_units < p.units ? begin + p.slice_units : p.units;
        group_share share = {0, 0, 0};
        for (int64_t at = begin; at < end; at += ROW_THREADS * ROW_UNITS) {
            const int units = end - at < ROW_THREADS * ROW_UNITS ? (int)(end - at) : ROW_THREADS * ROW_UNITS;
            const group_start start = group_begin(p, group, at * W);
            unit<T, W> v[ROW_UNITS];
#pragma unroll
            for (int k = 0; k < ROW_UNITS; k++) {
                const int unit = (int)threadIdx.x + k * ROW_THREADS;
                if (unit < units)
                    v[k].fetch(group_at<T>(p, start, unit * W));
            }
            const double n = units * W;
            const float mean =
                group_sum<T, W, ROW_UNITS, false>(v, units, 0, part[0]) * reciprocal((float)(units * W));
            const float square = group_sum<T, W, ROW_UNITS, true>(v, units, mean, part[1]);
            if (threadIdx.x == 0)
                share.add(n, mean, square);
        }
        if (threadIdx.x == 0)
            p.slice[i] = share.floats();
    }
}

__device__ __forceinline__ double warp_sum_double(double v)
{
#pragma unroll
    for (int mask = 16; mask; mask /= 2)
        v += __shfl_xor_sync(~0u, v, mask);
    return v;
}

/* A warp has a group. */
__global__ void __launch_bounds__(32) group_combine(const __grid_constant__ group_params p)
{
    pdl_launch_next();
    pdl_wait();
    const int64_t each = p.slice_units * (p.count / p.units);
    for (int64_t group = blockIdx.x; group < p.all; group += gridDim.x) {
        double sum = 0, square = 0;
        for (int64_t k = threadIdx.x; k < p.slices; k += 32) {
            const int64_t n = p.count - k * each < each ? p.count - k * each : each;
            sum += (double)n * p.slice[group * p.slices + k].x;
        }
        const double mean = warp_sum_double(sum) * inverse((double)p.count);
        for (int64_t k = threadIdx.x; k < p.slices; k += 32) {
            const int64_t n = p.count - k * each < each ? p.count - k * each : each;
            const float2 slice = p.slice[group * p.slices + k];
            square += slice.y + (double)n * (slice.x - mean) * (slice.x - mean);
        }
        square = warp_sum_double(square);
        if (threadIdx.x == 0)
            p.stats[group] = make_float2((float)mean, rsqrtf((float)(square * inverse((double)p.count)) + p.eps));
    }
}

template <typename T, int W>
__global__ void __launch_bounds__(ROW_THREADS, 3) group_write(const __grid_constant__ group_params p)
{
    const int64_t pieces = (p.units + ROW_THREADS * ROW_UNITS - 1) / (ROW_THREADS * ROW_UNITS);
    pdl_launch_next();
    pdl_wait();
    for (int64_t i = p.all * pieces - 1 - blockIdx.x; i >= 0; i -= gridDim.x) {
        const int64_t group = divide(i, pieces), at = (i - group * pieces) * (ROW_THREADS * ROW_UNITS);
        const int units = p.units - at < ROW_THREADS * ROW_UNITS ? (int)(p.units - at) : ROW_THREADS * ROW_UNITS;
        const group_start start = group_begin(p, group, at * W);
        unit<T, W> v[ROW_UNITS];
#pragma unroll
        for (int k = 0; k < ROW_UNITS; k++) {
            const int unit = (int)threadIdx.x + k * ROW_THREADS;
            if (unit < units)
                v[k].fetch(group_at<T>(p, start, unit * W));
        }
        const float2 stats = p.stats[group];
#pragma unroll 1
        for (int unit = (int)threadIdx.x; unit < units; unit += ROW_THREADS, held_next(v)) {
            float f[W];
            v[0].get(f);
            group_store<T, W>(p, group_find(p, start, unit * W), f, stats.x, stats.y);
        }
    }
}

/* ---- Channels last, whole rows: a thread has one 16-byte column and every height-th position ---- */

/* Per group: adds up what the threads left per channel. Each warp has every so-many-th group. */
template <typename F>
__device__ __forceinline__ void last_groups(const group_params &p, const float *sums, F done)
{
    const int per_group = (int)p.per_group, channels = p.groups * per_group, warps = (int)blockDim.x / 32;
    for (int g = (int)threadIdx.x / 32; g < p.groups; g += warps) {
        float sum = 0;
        for (int i = (int)threadIdx.x % 32; i < per_group * p.height; i += 32) {
            const int y = i / per_group;
            sum += sums[y * channels + g * per_group + i - y * per_group];
        }
        sum = warp_sum<32>(sum);
        if (threadIdx.x % 32 == 0)
            done(g, sum);
    }
}

template <typename T>
__global__ void __launch_bounds__(LAST_THREADS, 1) last_slices(const __grid_constant__ group_params p)
{
    constexpr int W = VEC<T>;
    extern __shared__ __align__(16) char shared[];
    float *sums = (float *)shared;                                                   /* [height, channels] */
    group_share *shares = (group_share *)(sums + (int64_t)p.height * p.columns * W); /* [groups] */
    float *means = (float *)(shares + p.groups);                                     /* [groups] */
    const int y = (int)threadIdx.x / p.columns, column = (int)threadIdx.x - y * p.columns;
    const int64_t entry = blockIdx.x / (uint32_t)p.slices, begin = (blockIdx.x - entry * p.slices) * p.slice_units;
    const int64_t end = begin + p.slice_units < p.positions ? begin + p.slice_units : p.positions;
    const bool active = y < p.height;
    float *mine = sums + (y * p.columns + column) * W;
    for (int g = (int)threadIdx.x; g < p.groups; g += (int)blockDim.x)
        shares[g] = {0, 0, 0};
    pdl_launch_next();
    pdl_wait();
    for (int64_t at = begin; at < end; at += LAST_UNITS * p.height) {
        packed<T> v[LAST_UNITS];
        const int64_t first = at + y, left = end - at;
#pragma unroll
        for (int k = 0; k < LAST_UNITS; k++)
            if (active && first + k * p.height < end)
                v[k] =
                    load_packed((const T *)p.x + column * W +
                                row_offset(p.rows, 0, row_split(p.rows, entry * p.positions + first + k * p.height)));
        const float n = (float)(left < LAST_UNITS * p.height ? left : LAST_UNITS * p.height) * (float)p.per_group;
#pragma unroll
        for (int square = 0; square < 2; square++) {
            float sum[W] = {}, mean[W] = {};
#pragma unroll
            for (int j = 0; j < W && square; j++)
                mean[j] = means[(column * W + j) / (int)p.per_group];
#pragma unroll
            for (int k = 0; k < LAST_UNITS; k++)
                if (active && first + k * p.height < end) {
                    float f[W];
                    v[k].get(f);
#pragma unroll
                    for (int j = 0; j < W; j++)
                        sum[j] = square ? fmaf(f[j] - mean[j], f[j] - mean[j], sum[j]) : sum[j] + f[j];
                }
            if (active)
                store<float, W>(mine, sum);
            __syncthreads();
            if (square)
                last_groups(p, sums, [=](int g, float s) { shares[g].add(n, means[g], s); });
            else
                last_groups(p, sums, [=](int g, float s) { means[g] = s * reciprocal(n); });
            __syncthreads();
        }
    }
    for (int g = (int)threadIdx.x; g < p.groups; g += (int)blockDim.x)
        p.slice[(entry * p.groups + g) * p.slices + blockIdx.x - entry * p.slices] = shares[g].floats();
}

template <typename T>
__global__ void __launch_bounds__(LAST_THREADS, 1) last_write(const __grid_constant__ group_params p)
{
    constexpr int W = VEC<T>;
    const int y = (int)threadIdx.x / p.columns, column = (int)threadIdx.x - y * p.columns;
    const int64_t i = gridDim.x - 1 - blockIdx.x, entry = (uint32_t)i / (uint32_t)p.pieces,
                  begin = (i - entry * p.pieces) * p.piece;
    const int64_t end = begin + p.piece < p.positions ? begin + p.piece : p.positions;
    pdl_launch_next();
    pdl_wait();
    if (y >= p.height)
        return;
    float mean[W], scale[W], bias[W] = {};
#pragma unroll
    for (int j = 0; j < W; j++)
        scale[j] = 1;
    if (p.weight)
        load_param<T, W>(p.weight, p.weight_f32, column * W, scale);
    if (p.bias)
        load_param<T, W>(p.bias, p.bias_f32, column * W, bias);
#pragma unroll
    for (int j = 0; j < W; j++) {
        const float2 stats = p.stats[entry * p.groups + (column * W + j) / (int)p.per_group];
        mean[j] = stats.x, scale[j] *= stats.y;
    }
    for (int64_t at = begin + y; at < end; at += WRITE_UNITS * p.height) {
        packed<T> v[WRITE_UNITS];
#pragma unroll
        for (int k = 0; k < WRITE_UNITS; k++)
            if (at + k * p.height < end)
                v[k] = load_packed((const T *)p.x + column * W +
                                   row_offset(p.rows, 0, row_split(p.rows, entry * p.positions + at + k * p.height)));
#pragma unroll 1
        for (int k = 0; k < WRITE_UNITS && at + k * p.height < end; k++, held_next(v)) {
            float f[W];
            v[0].get(f);
#pragma unroll
            for (int j = 0; j < W; j++) {
                f[j] = fmaf(f[j] - mean[j], scale[j], bias[j]);
                if (p.steps)
                    f[j] = round_to<T>(f[j]);
            }
            act_all<W>(p.act, f);
            const row_index index = row_split(p.rows, entry * p.positions + at + k * p.height);
            store<T, W>((T *)p.out + row_offset(p.rows, 1, index) + column * W, f);
        }
    }
}

/* ---- The host ---- */

static int64_t clamp(int64_t v, int64_t low, int64_t high)
{
    return v < low ? low : v > high ? high : v;
}

/* The most slices a group may have: enough blocks in all, by the shape alone. */
static int64_t row_slices(int64_t all, int64_t count)
{
    return clamp(2048 / all, 16, ceil_div(count, ROW_THREADS * ROW_UNITS));
}
static int64_t last_slices_of(int64_t entries, int64_t positions)
{
    return clamp(1024 / entries, 16, ceil_div(positions, LAST_UNITS));
}

static bool channels_are_last(const adze_group_norm_args *a)
{
    return a->channels_last || a->x.rank == 2; /* a rank of 2 has no positions: both layouts are one */
}

extern "C" size_t adze_group_norm_cuda_scratch(const adze_group_norm_args *a)
{
    const int64_t elements = adze_count(&a->x);
    if (elements == 0)
        return 0;
    const int64_t all = a->x.shape[0] * a->groups, count = elements / all;
    if (count <= WHOLE_THREADS * WHOLE_UNITS<1>)
        return 0;
    int64_t slices = row_slices(all, count);
    if (channels_are_last(a)) {
        const int64_t positions = elements / a->x.shape[0] / a->x.shape[a->x.rank - 1];
        const int64_t last = last_slices_of(a->x.shape[0], positions);
        slices = last > slices ? last : slices;
    }
    return (size_t)(all * (slices + 1)) * sizeof(float2);
}

template <typename T, int W>
static adze_status run_rows(adze_stream s, group_params p)
{
    p.units = p.count / W;
    if (p.units <= WHOLE_THREADS * WHOLE_UNITS<W>) {
        const int64_t threads = clamp(ceil_div(p.units, 4), 1, WHOLE_THREADS);
        return launch("group_norm", s, group_whole<T, W>, grid_for(p.all, 1),
                      dim3((unsigned)(threads + 31) / 32 * 32), 0, p);
    }
    const int64_t chunks = ceil_div(p.units, ROW_THREADS * ROW_UNITS);
    const int64_t each = ceil_div(chunks, row_slices(p.all, p.count));
    p.slices = ceil_div(chunks, each);
    p.slice_units = each * ROW_THREADS * ROW_UNITS;
    ADZE_CHECK(launch("group_norm", s, group_slices<T, W>, grid_for(p.all * p.slices, 1), dim3(ROW_THREADS), 0, p));
    ADZE_CHECK(launch("group_norm", s, group_combine, grid_for(p.all, 1), dim3(32), 0, p));
    return launch("group_norm", s, group_write<T, W>, grid_for(p.all * chunks, 1), dim3(ROW_THREADS), 0, p);
}

template <typename T>
static adze_status run_last(adze_stream s, group_params p)
{
    const unsigned threads = (unsigned)(p.columns * p.height + 31) / 32 * 32;
    const int64_t entries = p.all / p.groups, chunks = ceil_div(p.positions, LAST_UNITS * p.height);
    const int64_t each = ceil_div(chunks, last_slices_of(entries, p.positions));
    p.units = p.positions;
    p.slices = ceil_div(chunks, each);
    p.slice_units = each * LAST_UNITS * p.height;
    const int64_t rounds =
        p.positions * entries / ((int64_t)WRITE_UNITS * p.height * 8 * adze_cuda_sm_count(s.device));
    p.piece = clamp(rounds, 1, 8) * WRITE_UNITS * p.height;
    p.pieces = ceil_div(p.positions, p.piece);
    const size_t shared = (size_t)p.groups * (sizeof(group_share) + sizeof(float)) +
                          (size_t)p.height * p.columns * VEC<T> * sizeof(float);
    ADZE_CHECK(launch("group_norm", s, last_slices<T>, entries * p.slices, dim3(threads), shared, p));
    ADZE_CHECK(launch("group_norm", s, group_combine, grid_for(p.all, 1), dim3(32), 0, p));
    return launch("group_norm", s, last_write<T>, entries * p.pieces, dim3(threads), 0, p);
}

/* Whether channels are first and the groups fit into clusters, and if so, their launch. As few blocks in a cluster as
   keep the card busy. */
template <typename T>
static bool run_parts(adze_stream s, const group_params &g, bool aligned, adze_status *status)
{
    constexpr int W = VEC<T>;
    if (g.last || !aligned || g.count > PART_BLOCKS * part_most(s.device) * W || g.per_group > PART_CHANNELS ||
        g.all > 0x7fffffff / PART_BLOCKS || !adze_cuda_clusters(s.device))
        return false;
    part_params p = {};
    const int64_t sm_count = adze_cuda_sm_count(s.device);
    p.units = (int32_t)(g.count / W);
    unsigned blocks = 1;
    while (blocks < PART_BLOCKS && ((g.all * blocks < sm_count * 3 / 2 && p.units > (int)blocks * PART_THREADS / 4) ||
                                    ceil_div(p.units, blocks) > EIGHT_THREADS * 8))
        blocks *= 2;
    p.share = (int32_t)ceil_div(p.units, blocks);
    /* No more threads than the vectors need that each has. */
    const int64_t each = p.share <= PART_THREADS * 2    ? 2
                         : p.share <= PART_THREADS * 4  ? 4
                         : p.share <= EIGHT_THREADS * 8 ? 8
                                                        : ceil_div(p.share, PART_THREADS);
    const unsigned threads = (unsigned)(ceil_div(p.share, each) + 31) / 32 * 32;
    p.step_rows = (int32_t)(threads * W / g.len), p.step_at = (int32_t)(threads * W % g.len);
    p.len = (int32_t)g.len, p.rows_per_channel = (int32_t)g.rows_per_channel;
    p.x = g.x, p.weight = g.weight, p.bias = g.bias, p.out = g.out;
    p.rows_of_group = g.rows_per_group;
    p.per_group = (int32_t)g.per_group, p.groups = g.groups;
    p.eps = g.eps, p.act = g.act, p.steps = g.steps;
    p.weight_f32 = g.weight_f32, p.bias_f32 = g.bias_f32, p.rows = g.rows;
    *status = part_launch<T>(s, p, g.all, blocks, p.share > EIGHT_THREADS * 8 ? PART_UNITS : each, threads);
    return true;
}

template <typename T>
static adze_status run_as(const adze_group_norm_args *a, adze_stream s, group_params p, const adze_tensor *x,
                          const adze_tensor *out)
{
    constexpr int W = VEC<T>;
    const int64_t channels = p.groups * p.per_group, columns = channels / W;
    const bool params = !p.last || (rows_aligned(&a->weight, p.len) && rows_aligned(&a->bias, p.len));
    const bool aligned = rows_aligned(x, p.len) && rows_aligned(out, p.len) && params;
    const bool whole = rows_aligned(x, channels) && rows_aligned(out, channels) &&
                       rows_aligned(&a->weight, channels) && rows_aligned(&a->bias, channels);
    adze_status status;
    if (run_parts<T>(s, p, aligned, &status))
        return status;
    if (p.last &&
        p.count > WHOLE_THREADS * (aligned ? WHOLE_UNITS<W> * W : WHOLE_UNITS<1>)&&p.groups <= LAST_GROUPS &&
        columns <= LAST_THREADS && whole) {
        p.columns = (int32_t)columns;
        p.height = (int32_t)clamp(256 / columns, 1, 8);
        /* No lane of last_groups adds more than 50 terms: what the definition allows for. */
        if (p.per_group * p.height <= 50 * 32 && p.all / p.groups * ceil_div(p.positions, 4) <= 0x7fffffff)
            return run_last<T>(s, p);
    }
    return aligned ? run_rows<T, W>(s, p) : run_rows<T, 1>(s, p);
}

extern "C" adze_status adze_group_norm_cuda(adze_stream stream, const void *args)
{
    const adze_group_norm_args *a = (const adze_group_norm_args *)args;
    const int64_t elements = adze_count(&a->x);
    if (elements == 0)
        return ADZE_OK;
    adze_tensor x = a->x, out = a->out;
    adze_tensor *const merged[] = {&x, &out};
    const adze_tensor *const tensors[] = {&x, &out};
    group_params p = {};
    p.last = channels_are_last(a);
    p.groups = a->groups;
    p.per_group = a->x.shape[p.last ? a->x.rank - 1 : 1] / a->groups;
    p.all = a->x.shape[0] * a->groups;
    p.count = elements / p.all;
    p.positions = p.count / p.per_group;
    if (!p.last)
        adze_merge(2, merged, 2);
    adze_rows_init(&p.rows, &x, 2, tensors);
    p.len = p.last ? p.per_group : x.shape[x.rank - 1];
    p.rows_per_group = p.count / p.len;
    p.rows_per_channel = p.positions / p.len > 0 ? p.positions / p.len : 1;
    p.x = x.data, p.out = out.data;
    p.weight = a->weight.dtype ? a->weight.data : NULL, p.bias = a->bias.dtype ? a->bias.data : NULL;
    p.weight_f32 = a->weight.dtype == ADZE_F32, p.bias_f32 = a->bias.dtype == ADZE_F32;
    p.eps = a->eps, p.inverse = 1 / (float)p.count, p.act = a->act;
    p.steps = a->act && (a->rounding & ADZE_ROUND_STEPS);
    p.stats = (float2 *)a->call.scratch;
    p.slice = p.stats ? p.stats + p.all : NULL;
    switch (x.dtype) {
    case ADZE_F32: return run_as<float>(a, stream, p, &x, &out);
    case ADZE_F16: return run_as<f16>(a, stream, p, &x, &out);
    default: return run_as<bf16>(a, stream, p, &x, &out);
    }
}
