/* rms_norm and layer_norm on CUDA: rows at any address, in 16-byte vectors of the output (shifted.cuh). Of
   modulations they may have a scale and a shift.

   norm_shifted holds a row packed in the shared memory of a block, or of a cluster of blocks with a part each: an SM
   then has more bytes of rows than it has registers for, and reads one row while it writes another. A thread works on
   what it has stored there itself. Most rows off a 16-byte border are those of dense tensors, where x and out are off
   by the same: their vectors are then loaded once and need no shift. norm_aligned takes rows that are aligned, where
   only weight or bias are not, and holds them in registers: 2 vectors in each thread. */
#include "norm_any.cuh"
#include "shifted.cuh"

#include <algorithm>

/* Threads of a block, at most; vectors that a thread loads together, and writes together; and vectors of a block's
   part that let three blocks share an SM. */
constexpr int SHIFTED_THREADS = 288, SHIFTED_READ = 4, SHIFTED_WRITE = 2, SHIFTED_PART = 72 * 1024 / 16;
constexpr int SHIFTED_MANY = 32 * 1024 / 16;          /* vectors of a row, beyond which many rows are preferred too */
constexpr int SHIFTED_RESIDENT = 3 * SHIFTED_THREADS; /* threads of an SM at once, on sm_90 */
constexpr int ALIGNED_VECTORS = 2;                    /* that a thread of norm_aligned holds, at most */
constexpr int ALIGNED_SHORT = 512; /* elements of a row, up to which it is faster with f32 parameters */
/* Elements of a row, and of all rows, beyond which mixed parameters of a modulation take norm_any longer. */
constexpr int SHIFTED_MIXED = 3840, SHIFTED_MIXED_ALL = 11 << 17;
constexpr int SHIFTED_ALONE = 20; /* SMs for each row of f32, from which on clusters are faster than norm_any */

struct norm_shifted_params {
    const void *x, *residual, *weight, *bias, *scale, *shift; /* NULL: absent */
    void *out, *sum;
    int32_t dim;
    int32_t part;             /* vectors of a row in each block of a cluster */
    uint32_t prefetch_blocks; /* blocks that prefetch their inputs, the first of the grid */
    float eps, weight_offset, inverse_dim;
    bool alike, sum_alike; /* x and residual, or sum, have the vectors of out */
    bool weight_f32, bias_f32, scale_f32, shift_f32, rounds, float_sum, centred;
    simple_rows<SHIFT + 1> rows; /* of x, out, residual, sum, scale and shift */
};

/* Sets the elements of a vector that lie outside the row to 0, where it has elements in the row. */
template <int W>
__device__ __forceinline__ void clear_outside(float (&f)[W], int at, int dim)
{
    if ((at >= 0 && at + W <= dim) || at >= dim)
        return;
#pragma unroll
    for (int j = 0; j < W; j++)
        f[j] = (uint32_t)(at + j) < (uint32_t)dim ? f[j] : 0;
}

/* Stores the elements of a vector that lie in a row with other vectors. */
template <typename T>
__device__ __forceinline__ void store_apart(T *row, int at, int dim, const float (&f)[VEC<T>])
{
#pragma unroll
    for (int j = 0; j < VEC<T>; j++)
        if ((uint32_t)(at + j) < (uint32_t)dim)
            row[at + j] = from_float<T>(f[j]);
}

/* Applies weight and bias, if any, to a vector that has been normalised; they are loaded before. */
template <typename T, typename PARAM>
__device__ __forceinline__ void shifted_weigh(const norm_shifted_params &p, float (&f)[VEC<T>], const PARAM &weight,
                                              const PARAM &bias)
{
    constexpr int W = VEC<T>;
    float by[W];
    if (p.rounds) {
        packed<T> rounded;
        rounded.set(f);
        rounded.get(f);
    }
    if (p.weight) {
        weight.get(p.weight_f32, by);
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] *= by[j] + p.weight_offset;
    }
    if (p.bias) {
        bias.get(p.bias_f32, by);
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] += by[j];
    }
}
/* The same with scale and shift. */
template <typename T, typename PARAM>
__device__ __forceinline__ void shifted_modulate(const norm_shifted_params &p, float (&f)[VEC<T>], const PARAM &scale,
                                                 const PARAM &shift)
{
    constexpr int W = VEC<T>;
    float by[W];
    if (p.scale) {
        scale.get(p.scale_f32, by);
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] *= by[j] + 1;
    }
    if (p.shift) {
        shift.get(p.shift_f32, by);
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] += by[j];
    }
}
template <typename T>
__device__ __forceinline__ packed<T> shifted_packed(const float (&f)[VEC<T>])
{
    packed<T> v;
    v.set(f);
    return v;
}
/* x and the residual; the sum rounded. */
template <typename T>
__device__ __forceinline__ packed<T> shifted_sum(packed<T> add, float (&f)[VEC<T>])
{
    float more[VEC<T>];
    add.get(more);
#pragma unroll
    for (int j = 0; j < VEC<T>; j++)
        f[j] += more[j];
    packed<T> rounded;
    rounded.set(f);
    return rounded;
}
/* W more elements of a sum, or of a sum of squares. */
template <int W>
__device__ __forceinline__ void add_all(float &to, const float (&f)[W])
{
#pragma unroll
    for (int j = 0; j < W; j++)
        to += f[j];
}
template <int W>
__device__ __forceinline__ void add_squares(float &to, const float (&f)[W])
{
#pragma unroll
    for (int j = 0; j < W; j++)
        to += f[j] * f[j];
}

/* The first thread of a row prefetches `bytes` bytes of each input. */
template <typename T>
__device__ __forceinline__ void shifted_prefetch(const norm_shifted_params &p, const T *x, const T *residual,
                                                 int bytes)
{
    if (blockIdx.x >= p.prefetch_blocks || threadIdx.x > 0)
        return;
    prefetch_bytes(x, bytes);
    if (p.residual)
        prefetch_bytes(residual, bytes);
}

/* The blocks of the first row prefetch what all rows share: a thread of a long row loads it in turns. */
template <typename T>
__device__ __forceinline__ void shifted_prefetch_param(const void *data, bool is_f32, int64_t start, int elements)
{
    const int size = is_f32 ? (int)sizeof(float) : (int)sizeof(T);
    if (data)
        prefetch_bytes((const char *)data + start * size, elements * size);
}

/* Minimum blocks per SM: this bounds the registers. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int ALIGNED_BLOCKS = 2, SHIFTED_BLOCKS = 3, MODULATED_BLOCKS = 2;
#else
constexpr int ALIGNED_BLOCKS = 1, SHIFTED_BLOCKS = 1, MODULATED_BLOCKS = 1;
#endif

template <typename T>
__global__ void __launch_bounds__(ANY_THREADS, ALIGNED_BLOCKS)
    norm_aligned(const __grid_constant__ norm_shifted_params p)
{
    constexpr int W = VEC<T>, N = ALIGNED_VECTORS;
    typedef shifted_param<T, sizeof(T) < 4> param;
    __shared__ norm_shared<false> shared;
    const uint32_t r = blockIdx.x * blockDim.y + threadIdx.y;
    /* Threads beyond the last row repeat it without a store: shuffles and barriers need all threads. */
    const bool writes = r < p.rows.count;
    int64_t start[SHIFT + 1];
    p.rows.locate(writes ? r : p.rows.count - 1, start);
    const T *const x = (const T *)p.x + start[X], *const residual = (const T *)p.residual + start[RESIDUAL];
    T *const out = (T *)p.out + start[OUT], *const sum = (T *)p.sum + start[SUM];
    const auto at = [&](int u) { return (int)(threadIdx.x + u * blockDim.x) * W; };
    const auto has = [&](int u) { return at(u) < p.dim; };
    pdl_launch_next();
    shifted_prefetch(p, x, residual, p.dim * (int)sizeof(T));
    pdl_wait();

    packed<T> v[N], add[N];
    param weight[N], bias;
    float f[N][W];
#pragma unroll
    for (int u = 0; u < N; u++) {
        v[u].raw = add[u].raw = make_uint4(0, 0, 0, 0);
        if (has(u)) {
            v[u] = load_packed(x + at(u));
            if (p.residual)
                add[u] = load_packed(residual + at(u));
        }
    }
#pragma unroll
    for (int u = 0; u < N; u++) {
        v[u].get(f[u]);
        if (p.residual) {
            v[u] = shifted_sum(add[u], f[u]);
            if (writes && p.sum && has(u))
                store_raw(sum + at(u), v[u].raw);
            if (!p.float_sum)
                v[u].get(f[u]);
        }
    }
#pragma unroll
    for (int u = 0; u < N; u++) /* in flight before the sum is known */
        if (p.weight && has(u))
            weight[u].fetch_inside(p.weight, p.weight_f32, at(u));
    if (p.centred) {
        float total = 0;
#pragma unroll
        for (int u = 0; u < N; u++)
            add_all(total, f[u]);
        const float mean = any_total<0, 32>(total, shared) * p.inverse_dim;
#pragma unroll
        for (int u = 0; u < N; u++)
#pragma unroll
            for (int j = 0; j < W; j++)
                f[u][j] -= has(u) ? mean : 0;
    }
    float squares = 0;
#pragma unroll
    for (int u = 0; u < N; u++)
        add_squares(squares, f[u]);
    const float factor = rsqrtf(any_total<1, 32>(squares, shared) * p.inverse_dim + p.eps);
#pragma unroll
    for (int u = 0; u < N; u++)
        if (writes && has(u)) {
            if (p.bias)
                bias.fetch_inside(p.bias, p.bias_f32, at(u));
#pragma unroll
            for (int j = 0; j < W; j++)
                f[u][j] *= factor;
            shifted_weigh<T>(p, f[u], weight[u], bias);
            store_raw(out + at(u), shifted_packed<T>(f[u]).raw);
        }
}

/* A thread's next vectors of x, or of the residual: those that begin at elements at(0), at(1) ... before `end`. */
template <typename T, typename AT>
__device__ __forceinline__ void shifted_fetch(const norm_shifted_params &p, const T *row, AT at, int end,
                                              packed<T> (&v)[SHIFTED_READ])
{
    if (p.alike) {
#pragma unroll
        for (int u = 0; u < SHIFTED_READ; u++) {
            v[u].raw = make_uint4(0, 0, 0, 0);
            if (at(u) < end)
                v[u] = load_packed(row + at(u));
        }
        return;
    }
    shifted<1> two[SHIFTED_READ];
#pragma unroll
    for (int u = 0; u < SHIFTED_READ; u++) {
        two[u].part[0] = two[u].part[1] = make_uint4(0, 0, 0, 0);
        two[u].shift = 0;
        if (at(u) < end)
            two[u].fetch(row, at(u), p.dim);
    }
#pragma unroll
    for (int u = 0; u < SHIFTED_READ; u++)
        v[u] = two[u].template vector<T>(0);
}

/* Parameters at 16-byte borders, of T's dtype or f32: the vectors of aligned rows need no shift. */
template <typename T>
struct aligned_param {
    param_unit<T, VEC<T>> held;
    __device__ __forceinline__ void fetch(const void *data, bool is_f32, int64_t start, int at, int)
    {
        held.fetch(data, is_f32, start + at);
    }
    __device__ __forceinline__ void get(bool is_f32, float (&f)[VEC<T>]) const { held.get(is_f32, f); }
};
enum shifted_form { UNSCALED, SCALED, SCALED_ALIGNED }; /* no scale or shift; one of them; the same, all aligned */

/* WIDE: a row on its own, in a wide cluster of blocks with an SM each. Their threads are more, and have registers for
   all parameters of the vectors that they write together. */
constexpr int shifted_threads(bool wide)
{
    return wide ? ANY_THREADS : SHIFTED_THREADS;
}
constexpr int shifted_blocks(bool modulated, bool wide)
{
    return wide ? 1 : modulated ? MODULATED_BLOCKS : SHIFTED_BLOCKS;
}
template <typename T, bool IN_CLUSTER, shifted_form FORM, bool WIDE>
__global__ void __launch_bounds__(shifted_threads(WIDE), shifted_blocks(FORM != UNSCALED, WIDE))
    norm_shifted(const __grid_constant__ norm_shifted_params p)
{
    constexpr int W = VEC<T>;
    constexpr bool MODULATED = FORM != UNSCALED;
    typedef std::conditional_t<FORM == SCALED_ALIGNED, aligned_param<T>, shifted_param<T, sizeof(T) < 4>> param;
    extern __shared__ uint4 held[]; /* [p.part] */
    __shared__ norm_shared<IN_CLUSTER> shared;
    if constexpr (IN_CLUSTER)
        cluster_arrive(); /* the wait comes before the first store: all blocks have started then */
    int64_t start[SHIFT + 1];
    p.rows.locate(IN_CLUSTER ? blockIdx.x / (uint32_t)cluster_size() : blockIdx.x, start);
    const T *const x = (const T *)p.x + start[X], *const residual = (const T *)p.residual + start[RESIDUAL];
    T *const out = (T *)p.out + start[OUT], *const sum = (T *)p.sum + start[SUM];
    const int thread = (int)threadIdx.x, threads = (int)blockDim.x;
    /* the first element of the block's first vector, which may lie before the row, and the end of its last */
    const int begin = (IN_CLUSTER ? cluster_rank() * p.part * W : 0) - shifted_head(out);
    const int end = IN_CLUSTER ? min(p.dim, begin + p.part * W) : p.dim, from = max(begin, 0);
    pdl_launch_next();
    if (from < end)
        shifted_prefetch(p, x + from, residual + from, (end - from) * (int)sizeof(T));
    if (from < end && thread == 0 && blockIdx.x < (IN_CLUSTER ? (uint32_t)cluster_size() : 1)) {
        shifted_prefetch_param<T>(p.weight, p.weight_f32, from, end - from);
        shifted_prefetch_param<T>(p.bias, p.bias_f32, from, end - from);
        if (MODULATED) {
            shifted_prefetch_param<T>(p.scale, p.scale_f32, start[SCALE] + from, end - from);
            shifted_prefetch_param<T>(p.shift, p.shift_f32, start[SHIFT] + from, end - from);
        }
    }
    pdl_wait();

    float total = 0, mean = 0;
#pragma unroll 1
    for (int i = thread; begin + i * W < end; i += SHIFTED_READ * threads) {
        const auto at = [&](int u) { return begin + (i + u * threads) * W; };
        packed<T> v[SHIFTED_READ], add[SHIFTED_READ];
        shifted_fetch(p, x, at, end, v);
        if (p.residual)
            shifted_fetch(p, residual, at, end, add);
#pragma unroll
        for (int u = 0; u < SHIFTED_READ; u++)
            if (at(u) < end) {
                float f[W];
                v[u].get(f);
                if (p.residual) {
                    v[u] = shifted_sum(add[u], f);
                    if (p.sum && p.sum_alike)
                        store_shifted(sum, at(u), p.dim, v[u]);
                    else if (p.sum)
                        store_apart<T>(sum, at(u), p.dim, f);
                    v[u].get(f);
                }
                held[i + u * threads] = v[u].raw;
                clear_outside(f, at(u), p.dim);
                if (p.centred)
                    add_all(total, f);
                else
                    add_squares(total, f);
            }
    }
    __syncwarp(); /* lanes leave the loop one by one, and the wait is for whole warps */
    if (IN_CLUSTER)
        cluster_wait();
    if (p.centred) {
        mean = any_total<0, 32>(total, shared) * p.inverse_dim;
        total = 0;
#pragma unroll 2
        for (int i = thread; begin + i * W < end; i += threads) {
            float f[W];
            packed<T>{held[i]}.get(f);
#pragma unroll
            for (int j = 0; j < W; j++)
                f[j] -= mean;
            clear_outside(f, begin + i * W, p.dim);
            add_squares(total, f);
        }
    }
    const float factor = rsqrtf(any_total<1, 32>(total, shared) * p.inverse_dim + p.eps);
    constexpr int WRITE = FORM == SCALED ? 1 : SHIFTED_WRITE, AHEAD = WIDE || FORM == SCALED_ALIGNED ? WRITE : 1;
#pragma unroll 1
    for (int i = thread; begin + i * W < end; i += WRITE * threads) {
        const auto at = [&](int u) { return begin + (i + u * threads) * W; };
        param weight[WRITE], bias[AHEAD], scale[WRITE], shift[WRITE];
#pragma unroll
        for (int u = 0; u < WRITE; u++)
            if (at(u) < end) {
                if (p.weight)
                    weight[u].fetch(p.weight, p.weight_f32, 0, at(u), p.dim);
                if (AHEAD == WRITE && p.bias)
                    bias[u % AHEAD].fetch(p.bias, p.bias_f32, 0, at(u), p.dim);
                if (MODULATED && p.scale)
                    scale[u].fetch(p.scale, p.scale_f32, start[SCALE], at(u), p.dim);
                if (MODULATED && p.shift)
                    shift[u].fetch(p.shift, p.shift_f32, start[SHIFT], at(u), p.dim);
            }
#pragma unroll
        for (int u = 0; u < WRITE; u++)
            if (at(u) < end) {
                float f[W];
                packed<T>{held[i + u * threads]}.get(f);
                if (AHEAD < WRITE && p.bias)
                    bias[0].fetch(p.bias, p.bias_f32, 0, at(u), p.dim);
#pragma unroll
                for (int j = 0; j < W; j++)
                    f[j] = (f[j] - mean) * factor;
                shifted_weigh<T>(p, f, weight[u], bias[u % AHEAD]);
                if (MODULATED)
                    shifted_modulate<T>(p, f, scale[u], shift[u]);
                store_shifted(out, at(u), p.dim, shifted_packed<T>(f));
            }
    }
}

/* Threads of `each` units, in whole warps. */
static int64_t shifted_warps(int64_t units, int64_t each)
{
    return ceil_div(ceil_div(units, each), 32) * 32;
}
/* A thread of few rows has few vectors. */
template <typename T>
static adze_status aligned_launch(const cuda_call &s, norm_shifted_params p, int64_t vectors)
{
    const int64_t count = p.rows.count;
    const bool two = count >= 4 * (int64_t)s.gpu.sm_count || vectors > ANY_THREADS;
    const int64_t threads = shifted_warps(vectors, two ? 2 : 1), rows = threads >= 128 ? 1 : 128 / threads;
    p.prefetch_blocks = prefetch_blocks(s.gpu, count * vectors / 2, vectors * rows, threads * rows, 32);
    return launch(s, norm_aligned<T>, grid_for(count, rows), dim3((unsigned)threads, (unsigned)rows), 0, p);
}
/* How norm_shifted cuts a row: `threads` of each block of a cluster, which hold `part` vectors. A cluster of more
   than ANY_CLUSTER blocks is a wide one. */
struct shifted_cut {
    int64_t cluster, part, threads;
};
/* Clusters of at most `most` blocks: of the fewest that leave room for three on an SM. Few rows with more than a
   vector for each thread are spread over the SMs. */
static shifted_cut shifted_cut_for(const cuda_call &s, int64_t rows, int64_t vectors, int most)
{
    const int64_t sm_count = s.gpu.sm_count;
    shifted_cut cut = {};
    cut.cluster = 1;
    while (cut.cluster < most && (vectors > cut.cluster * SHIFTED_PART ||
                                  (vectors > cut.cluster * SHIFTED_THREADS && rows * cut.cluster < 2 * sm_count)))
        cut.cluster *= 2;
    cut.part = ceil_div(vectors, cut.cluster);
    const int64_t each = rows * cut.cluster >= 4 * sm_count ? SHIFTED_READ : cut.part > SHIFTED_THREADS ? 2 : 1;
    cut.threads = std::min(shifted_warps(cut.part, each), (int64_t)shifted_threads(cut.cluster > ANY_CLUSTER));
    return cut;
}
template <typename T>
static adze_status shifted_launch(const cuda_call &s, norm_shifted_params p, int64_t vectors, const shifted_cut &cut,
                                  shifted_form form)
{
    const int64_t rows = p.rows.count, cluster = cut.cluster;
    p.part = (int32_t)cut.part;
    p.prefetch_blocks = prefetch_blocks(s.gpu, rows * vectors / 2, cut.part, cut.threads, 32);
    const launch_shape shape((size_t)cut.part * 16, cluster);
    const auto kernel_of = [&](auto form) {
        constexpr shifted_form FORM = decltype(form)::value;
        return cluster > ANY_CLUSTER ? norm_shifted<T, true, FORM, true>
               : cluster > 1         ? norm_shifted<T, true, FORM, false>
                                     : norm_shifted<T, false, FORM, false>;
    };
    const auto kernel = form == UNSCALED ? kernel_of(std::integral_constant<shifted_form, UNSCALED>())
                        : form == SCALED ? kernel_of(std::integral_constant<shifted_form, SCALED>())
                                         : kernel_of(std::integral_constant<shifted_form, SCALED_ALIGNED>());
    return launch(s, kernel, rows * cluster, dim3((unsigned)cut.threads), shape, p);
}

/* Whether norm_shifted or norm_aligned is faster than norm_any, by the times of 2191 random calls on an H200
   (2026-11-19). norm_any has narrower units, which take more instructions, and more threads for them. */
static bool shifted_faster_half(const cuda_call &s, const norm_params &g, int64_t vectors, const shifted_cut &cut)
{
    const int64_t sm_count = s.gpu.sm_count, rows = g.rows.count;
    const bool is_long = vectors > ANY_THREADS, very_long = vectors > SHIFTED_MANY;
    const bool whole = g.rows_width == 16, few = rows < 4 * sm_count;
    /* norm_aligned has fewer loads in sequence where only parameters are off a border, or are f32. Many rows with a
       residual take turns in its registers. */
    if (whole && ((few && g.dim <= ALIGNED_SHORT) || (g.loose && (few || !g.data[RESIDUAL]))))
        return true;
    /* Of many short rows norm_any loads both inputs by single elements, and of long ones by few threads. */
    if (g.data[RESIDUAL])
        return is_long ? g.width == 1 || whole || rows <= 2 * sm_count : g.width == 1 && rows >= 64 * sm_count;
    /* Few long rows, whose clusters fill the GPU, and as many blocks as it has at once. Of longer ones norm_any's
       pairs take no more instructions than shifting does. */
    const int64_t at_once = SHIFTED_RESIDENT / cut.threads * sm_count;
    if (!whole && is_long && (rows < 2 * sm_count || rows * cut.cluster <= at_once))
        return g.width == 1 || vectors <= 2 * SHIFTED_MANY;
    /* Of many longer rows the registers of a cluster hold too few bytes, and of fewer the clusters of norm_any, which
       have an SM for each block, take turns. */
    return (vectors > 2 * SHIFTED_MANY && rows * 2 > sm_count) || (very_long && rows >= sm_count);
}
static bool shifted_faster_f32(const cuda_call &s, const norm_params &g, int64_t vectors)
{
    const int64_t sm_count = s.gpu.sm_count, rows = g.rows.count;
    const bool whole = g.rows_width == 16;
    if (whole && (g.loose || vectors > 2 * SHIFTED_MANY))
        return g.loose ? g.dim > ALIGNED_SHORT || rows <= 4 * sm_count : rows * 2 >= sm_count;
    /* Few rows are spread over clusters. */
    return g.dim > ALIGNED_SHORT && rows * SHIFTED_ALONE <= sm_count;
}
template <typename T>
static bool shifted_faster(const cuda_call &s, const norm_params &g, bool modulated, int64_t vectors,
                           const shifted_cut &cut)
{
    constexpr bool HALF = sizeof(T) < 4;
    if (!modulated)
        return norm_few_long(s, g, vectors) ||
               (HALF ? shifted_faster_half(s, g, vectors, cut) : shifted_faster_f32(s, g, vectors));
    if (g.dim > ANY_CLUSTER * ANY_THREADS * any_many(SCALE_SHIFT, 1, sizeof(T), true)) /* norm_any does not hold it */
        return true;
    /* Parameters of several dtypes, or weight and bias, take norm_any longer: in aligned rows twice as long. */
    const bool flat = g.weight || g.bias;
    if (flat && g.width == 16 && g.dim > ALIGNED_SHORT)
        return true;
    if (HALF && (g.is_f32 || flat))
        return g.dim > SHIFTED_MIXED || g.rows.count * g.dim > SHIFTED_MIXED_ALL;
    /* A scale and a shift alone take it as few instructions, unless it loads few rows by single elements, or vectors
       in parts because of parameters off a border. */
    if (HALF && g.rows_width == 16 && g.width < 4)
        return vectors > ANY_THREADS;
    return HALF && g.width == 1 && g.dim > 2 * ALIGNED_SHORT && vectors <= 2 * ANY_THREADS &&
           g.rows.count <= 3 * (int64_t)s.gpu.sm_count;
}
template <typename T>
static adze_status norm_shifted_as(const cuda_call &s, const norm_params &g, int variant)
{
    const void *const *d = g.data;
    const int64_t sm_count = s.gpu.sm_count, rows = g.rows.count;
    const int clusters = adze_cuda_clusters(s.device) && rows <= 0x7fffffff / ANY_CLUSTER ? ANY_CLUSTER : 1;
    const bool aligned = norm_alike(g, OUT, OUT, sizeof(T));
    const int64_t vectors = aligned ? ceil_div(g.dim, VEC<T>) : shifted_most<T>(g.dim);
    /* A few rows have twice as many blocks where a thread of 8 would have more vectors than it writes together. */
    const bool wide = clusters > 1 && vectors > ANY_CLUSTER * SHIFTED_WRITE * SHIFTED_THREADS &&
                      rows <= adze_cuda_clustered(s.device, WIDE_CLUSTER);
    const int blocks = wide ? WIDE_CLUSTER : clusters;
    const int64_t most = blocks * ((s.gpu.block_shared - (int64_t)sizeof(norm_shared<true>)) / 16 - 64);
    const bool modulated = norm_scaled(g, sizeof(T) < 4), whole = g.rows_width == 16;
    const bool in_registers =
        !modulated && whole &&
        (vectors <= ANY_THREADS || (vectors <= ALIGNED_VECTORS * ANY_THREADS && (rows >= sm_count || clusters == 1)));
    const bool float_sum = sizeof(T) < 4 && d[RESIDUAL] && g.rounding & ADZE_FLOAT_SUM; /* cannot be held packed */
    const shifted_cut cut = shifted_cut_for(s, rows, vectors, blocks);
    if (!s.takes(variant,
                 (modulated || norm_unmodulated(g)) && rows_are_simple(g.rows) &&
                     (in_registers || (vectors <= most && !float_sum)),
                 shifted_faster<T>(s, g, modulated, vectors, cut)))
        return ADZE_NO_KERNEL;
    norm_shifted_params p = {};
    p.x = d[X], p.residual = d[RESIDUAL], p.weight = g.weight, p.bias = g.bias;
    p.out = (void *)d[OUT], p.sum = (void *)d[SUM];
    p.dim = (int32_t)g.dim;
    p.eps = g.eps, p.weight_offset = g.weight_offset, p.inverse_dim = g.inverse_dim;
    p.alike = norm_alike(g, X, OUT, sizeof(T)) && norm_alike(g, RESIDUAL, OUT, sizeof(T));
    p.sum_alike = norm_alike(g, SUM, OUT, sizeof(T));
    p.weight_f32 = g.weight_f32, p.bias_f32 = g.bias_f32, p.centred = g.centred;
    p.scale = d[SCALE], p.scale_f32 = g.is_f32 >> SCALE & 1;
    p.shift = d[SHIFT], p.shift_f32 = g.is_f32 >> SHIFT & 1;
    p.rounds = sizeof(T) < 4 && g.rounding & ADZE_ROUND_NORM;
    p.float_sum = sizeof(T) < 4 && g.rounding & ADZE_FLOAT_SUM;
    p.rows = rows_simple(g.rows, {X, OUT, RESIDUAL, SUM, SCALE, SHIFT});
    const shifted_form form = !modulated ? UNSCALED : g.width == 16 ? SCALED_ALIGNED : SCALED;
    return in_registers ? aligned_launch<T>(s, p, vectors) : shifted_launch<T>(s, p, vectors, cut, form);
}

extern "C" adze_status adze_norm_shifted_cuda(const cuda_call &s, const norm_params &g, int dtype, int variant)
{
    switch (dtype) {
    case ADZE_F32: return norm_shifted_as<float>(s, g, variant);
    case ADZE_F16: return norm_shifted_as<f16>(s, g, variant);
    default: return norm_shifted_as<bf16>(s, g, variant);
    }
}
