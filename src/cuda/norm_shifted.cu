/* rms_norm and layer_norm on CUDA, without modulation: rows at any address, in 16-byte vectors of the output
   (shifted.cuh).

   A row is read once and held in registers as floats: N vectors in each thread, neighbours in neighbouring lanes.
   LANES below 32: a row has that many lanes of a warp. LANES 32: it has whole warps, and with IN_CLUSTER each block
   of a cluster has a part of it. Most rows off a 16-byte border are those of dense tensors, where x and out are off
   by the same: their vectors are then loaded once and need no shift. Elements of a vector that lie outside the row
   are zeros, also after the mean has been subtracted. WHOLE: all rows are aligned, and only weight or bias are not.
 */
#include "norm_any.cuh"
#include "shifted.cuh"

#include <algorithm>

constexpr int SHIFTED_LONG = 4;      /* vectors of a thread, at most */
constexpr int SHIFTED_THREADS = 384; /* of a block with as many: two blocks have registers then */

struct norm_shifted_params {
    const void *x, *residual, *weight, *bias; /* NULL: absent */
    void *out, *sum;
    int32_t dim;
    int32_t part;             /* vectors of a row in each block of a cluster */
    uint32_t prefetch_blocks; /* blocks that prefetch their inputs, the first of the grid */
    float eps, weight_offset, inverse_dim;
    bool alike, sum_alike; /* x and residual, or sum, have the vectors of out */
    bool weight_f32, bias_f32, rounds, float_sum, centred;
    simple_rows<SUM + 1> rows; /* of x, out, residual and sum */
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

/* The vectors of a thread. */
template <typename T, int LANES, int N, bool WHOLE>
struct norm_shifted_piece {
    static constexpr int W = VEC<T>;
    typedef shifted_param<T, sizeof(T) < 4> param;
    const norm_shifted_params &p;
    int first; /* vector of the thread */
    int end;   /* of the block's part of the row */
    int head;  /* elements before the row in its first vector */
    __device__ __forceinline__ int at(int u) const
    {
        return (first + u * (LANES < 32 ? LANES : (int)blockDim.x)) * W - head;
    }
    __device__ __forceinline__ bool has(int u) const { return at(u) < end; }

    __device__ __forceinline__ void fetch(const T *row, packed<T> (&v)[N]) const
    {
#pragma unroll
        for (int u = 0; u < N; u++) {
            v[u].raw = make_uint4(0, 0, 0, 0);
            if (has(u))
                v[u] = load_packed(row + at(u));
        }
    }
    __device__ __forceinline__ void fetch(const T *row, shifted<1> (&v)[N]) const
    {
#pragma unroll
        for (int u = 0; u < N; u++) {
            v[u].part[0] = v[u].part[1] = make_uint4(0, 0, 0, 0);
            v[u].shift = 0;
            if (has(u))
                v[u].fetch(row, at(u), p.dim);
        }
    }
    __device__ __forceinline__ static void shift(const shifted<1> (&from)[N], packed<T> (&to)[N])
    {
#pragma unroll
        for (int u = 0; u < N; u++)
            to[u] = from[u].template vector<T>(0);
    }
    /* x and the residual. All loads are issued before the first vector is shifted, if there are registers for that.
     */
    __device__ __forceinline__ void read(const T *x, const T *residual, packed<T> (&v)[N], packed<T> (&add)[N]) const
    {
        if (WHOLE || p.alike) {
            fetch(x, v);
            if (p.residual)
                fetch(residual, add);
            return;
        }
        shifted<1> own[N], other[N];
        fetch(x, own);
        if (N == SHIFTED_LONG)
            shift(own, v);
        if (p.residual) {
            fetch(residual, other);
            shift(other, add);
        }
        if (N < SHIFTED_LONG)
            shift(own, v);
    }
    /* Adds the residual and stores the sum. */
    __device__ __forceinline__ void add_residual(const packed<T> (&add)[N], T *sum, bool writes,
                                                 float (&f)[N][W]) const
    {
#pragma unroll
        for (int u = 0; u < N; u++) {
            float more[W];
            add[u].get(more);
#pragma unroll
            for (int j = 0; j < W; j++)
                f[u][j] += more[j];
            packed<T> rounded;
            rounded.set(f[u]);
            if (writes && p.sum && has(u)) {
                if (WHOLE || p.sum_alike)
                    store(sum, u, rounded);
                else
                    store_apart<T>(sum, at(u), p.dim, f[u]);
            }
            if (!p.float_sum)
                rounded.get(f[u]);
        }
    }
    __device__ __forceinline__ void store(T *row, int u, packed<T> v) const
    {
        if (WHOLE)
            store_raw(row + at(u), v.raw);
        else
            store_shifted(row, at(u), p.dim, v);
    }
    __device__ __forceinline__ void fetch_param(const void *data, bool is_f32, int u, param &to) const
    {
        if (WHOLE)
            to.fetch_inside(data, is_f32, at(u));
        else
            to.fetch(data, is_f32, 0, at(u), p.dim);
    }
    /* Subtracts the mean inside the row; outside there are zeros afterwards. */
    __device__ __forceinline__ void centre(float mean, float (&f)[N][W]) const
    {
#pragma unroll
        for (int u = 0; u < N; u++) {
            const float by = has(u) ? mean : 0;
#pragma unroll
            for (int j = 0; j < W; j++)
                f[u][j] -= by;
            if (!WHOLE)
                clear_outside(f[u], at(u), p.dim);
        }
    }
};

/* Threads of a block, at most, and minimum blocks per SM: this bounds the registers. */
constexpr int shifted_threads(int lanes, int vectors)
{
    return lanes < 32 ? 128 : vectors < SHIFTED_LONG ? ANY_THREADS : SHIFTED_THREADS;
}
constexpr int shifted_blocks(int lanes, int vectors)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    return lanes == 32 ? 2 : vectors < SHIFTED_LONG ? 8 : 5;
#else
    return 1;
#endif
}

template <typename T, int LANES, int N, bool WHOLE, bool IN_CLUSTER>
__global__ void __launch_bounds__(shifted_threads(LANES, N), shifted_blocks(LANES, N))
    norm_shifted(const __grid_constant__ norm_shifted_params p)
{
    constexpr int W = VEC<T>, EARLY = N < SHIFTED_LONG ? N : 0;
    __shared__ norm_shared<IN_CLUSTER> shared;
    if constexpr (IN_CLUSTER)
        cluster_arrive(); /* the wait comes before the first store: all blocks have started then */
    const uint32_t block = IN_CLUSTER ? blockIdx.x / (uint32_t)cluster_size() : blockIdx.x;
    const uint32_t r = block * blockDim.y + threadIdx.y;
    /* Threads beyond the last row repeat it without a store: shuffles and barriers need all threads. */
    const bool writes = r < p.rows.count;
    int64_t start[SUM + 1];
    p.rows.locate(writes ? r : p.rows.count - 1, start);
    const T *const x = (const T *)p.x + start[X], *const residual = (const T *)p.residual + start[RESIDUAL];
    T *const out = (T *)p.out + start[OUT], *const sum = (T *)p.sum + start[SUM];
    const int begin = IN_CLUSTER ? cluster_rank() * p.part : 0, head = WHOLE ? 0 : shifted_head(out);
    const norm_shifted_piece<T, LANES, N, WHOLE> piece = {
        p, begin + (int)threadIdx.x, IN_CLUSTER ? min(p.dim, (begin + p.part) * W - head) : p.dim, head};
    pdl_launch_next();
    if (blockIdx.x < p.prefetch_blocks && threadIdx.x == 0 && piece.has(0)) {
        const int from = max(piece.at(0), 0), bytes = (piece.end - from) * (int)sizeof(T);
        prefetch_bytes(x + from, bytes);
        if (p.residual)
            prefetch_bytes(residual + from, bytes);
    }
    pdl_wait();

    float f[N][W];
    {
        packed<T> v[N], add[N];
        piece.read(x, residual, v, add);
#pragma unroll
        for (int u = 0; u < N; u++)
            v[u].get(f[u]);
        if (p.residual)
            piece.add_residual(add, sum, writes, f);
    }
    typename norm_shifted_piece<T, LANES, N, WHOLE>::param weight[EARLY ? EARLY : 1], bias;
#pragma unroll
    for (int u = 0; u < EARLY; u++) /* in flight before the sum is known */
        if (p.weight && piece.has(u))
            piece.fetch_param(p.weight, p.weight_f32, u, weight[u]);
#pragma unroll
    for (int u = 0; u < N && !WHOLE; u++)
        clear_outside(f[u], piece.at(u), p.dim);
    if (IN_CLUSTER)
        cluster_wait();
    if (p.centred) {
        float total = 0;
#pragma unroll
        for (int u = 0; u < N; u++)
#pragma unroll
            for (int j = 0; j < W; j++)
                total += f[u][j];
        piece.centre(any_total<0, LANES>(total, shared) * p.inverse_dim, f);
    }
    float squares = 0;
#pragma unroll
    for (int u = 0; u < N; u++)
#pragma unroll
        for (int j = 0; j < W; j++)
            squares += f[u][j] * f[u][j];
    const float factor = rsqrtf(any_total<1, LANES>(squares, shared) * p.inverse_dim + p.eps);
    if (!writes)
        return;
#pragma unroll
    for (int u = 0; u < N; u++) {
        if (!piece.has(u))
            break;
        float by[W];
        packed<T> result;
#pragma unroll
        for (int j = 0; j < W; j++)
            f[u][j] *= factor;
        if (p.rounds) {
            result.set(f[u]);
            result.get(f[u]);
        }
        if (p.weight) {
            if (!EARLY)
                piece.fetch_param(p.weight, p.weight_f32, u, weight[0]);
            weight[EARLY ? u : 0].get(p.weight_f32, by);
#pragma unroll
            for (int j = 0; j < W; j++)
                f[u][j] *= by[j] + p.weight_offset;
        }
        if (p.bias) {
            piece.fetch_param(p.bias, p.bias_f32, u, bias);
            bias.get(p.bias_f32, by);
#pragma unroll
            for (int j = 0; j < W; j++)
                f[u][j] += by[j];
        }
        result.set(f[u]);
        piece.store(out, u, result);
    }
}

/* Whether tensor t is off a 16-byte border by as much as `like` in every row; as nothing, where `like` is t. */
static bool norm_alike(const norm_params &g, int t, int like, int64_t size)
{
    const uint64_t other = t == like ? 0 : (uint64_t)(uintptr_t)g.data[like];
    bool alike = ((uint64_t)(uintptr_t)g.data[t] - other) % 16 == 0;
    for (int d = 0; d < g.rows.rank && g.data[t]; d++)
        alike = alike && (g.rows.stride[t][d] - (t == like ? 0 : g.rows.stride[like][d])) * size % 16 == 0;
    return alike || !g.data[t];
}

/* Launches `cluster` blocks of `rows` rows with `threads` threads each. */
template <typename T, int LANES, int N, bool WHOLE, bool IN_CLUSTER = false>
static adze_status shifted_launch(const cuda_call &s, norm_shifted_params p, int64_t vectors, int64_t threads,
                                  int cluster = 1)
{
    const int64_t rows = threads >= 128 || cluster > 1 ? 1 : 128 / threads;
    p.part = (int32_t)ceil_div(vectors, cluster);
    p.prefetch_blocks =
        prefetch_blocks(s.gpu, p.rows.count * vectors / 2, ceil_div(vectors * rows, cluster), threads * rows, 32);
    return launch(s, norm_shifted<T, LANES, N, WHOLE, IN_CLUSTER>, grid_for(p.rows.count, rows) * cluster,
                  dim3((unsigned)threads, (unsigned)rows), launch_shape(0, cluster), p);
}

/* Threads of `each` units, in whole warps. */
static int64_t shifted_warps(int64_t units, int64_t each)
{
    return ceil_div(ceil_div(units, each), 32) * 32;
}
/* Rows of a few lanes, if that leaves enough blocks, or of a block; a thread of few rows has few vectors. */
template <typename T, bool WHOLE>
static adze_status shifted_launch_short(const cuda_call &s, const norm_shifted_params &p, int64_t vectors)
{
    const int64_t sm_count = s.gpu.sm_count, rows = p.rows.count;
    if (vectors <= 8 && rows >= 32 * 4 * sm_count)
        return shifted_launch<T, 4, 2, WHOLE>(s, p, vectors, 4);
    if (vectors <= 16)
        return shifted_launch<T, 8, 2, WHOLE>(s, p, vectors, 8);
    if (vectors <= 32 && rows >= 16 * 4 * sm_count)
        return shifted_launch<T, 8, SHIFTED_LONG, WHOLE>(s, p, vectors, 8);
    const bool two = rows >= 4 * sm_count || vectors > ANY_THREADS;
    return shifted_launch<T, 32, 2, WHOLE>(s, p, vectors, shifted_warps(vectors, two ? 2 : 1));
}
/* Longer rows, and few of more than a vector for each thread: these are spread over the SMs. */
template <typename T>
static adze_status shifted_launch_long(const cuda_call &s, const norm_shifted_params &p, int64_t vectors, int most)
{
    const int64_t sm_count = s.gpu.sm_count, rows = p.rows.count;
    int cluster = 1;
    while (cluster < most && (vectors > (int64_t)cluster * SHIFTED_THREADS * SHIFTED_LONG ||
                              (vectors > (int64_t)cluster * SHIFTED_THREADS && rows * cluster < 2 * sm_count)))
        cluster *= 2;
    if (cluster == 1)
        return shifted_launch<T, 32, SHIFTED_LONG, false>(s, p, vectors, shifted_warps(vectors, SHIFTED_LONG));
    const int64_t part = ceil_div(vectors, cluster);
    const bool many = rows * cluster >= 4 * sm_count;
    const int64_t each = many || part > 2 * SHIFTED_THREADS ? SHIFTED_LONG : part > SHIFTED_THREADS ? 2 : 1;
    return shifted_launch<T, 32, SHIFTED_LONG, false, true>(s, p, vectors, shifted_warps(part, each), cluster);
}

template <typename T>
static adze_status norm_shifted_as(const cuda_call &s, const norm_params &g, int variant)
{
    const void *const *d = g.data;
    const int64_t sm_count = s.gpu.sm_count, rows = g.rows.count;
    bool modulated = g.is_f32 >> OUT & 1;
    for (int t = SCALE; t < NORM_TENSORS; t++)
        modulated = modulated || d[t];
    const int clusters = adze_cuda_clusters(s.device) && rows <= 0x7fffffff / ANY_CLUSTER ? ANY_CLUSTER : 1;
    const bool aligned = norm_alike(g, OUT, OUT, sizeof(T));
    const int64_t vectors = aligned ? ceil_div(g.dim, VEC<T>) : shifted_most<T>(g.dim);
    const int64_t most = (int64_t)clusters * SHIFTED_THREADS * SHIFTED_LONG;
    if (!s.takes(variant, !modulated && rows_are_simple(g.rows) && vectors <= most,
                 (g.width < 16 || g.loose) && g.dim >= VEC<T>))
        return ADZE_NO_KERNEL;
    norm_shifted_params p = {};
    p.x = d[X], p.residual = d[RESIDUAL], p.weight = g.weight, p.bias = g.bias;
    p.out = (void *)d[OUT], p.sum = (void *)d[SUM];
    p.dim = (int32_t)g.dim;
    p.eps = g.eps, p.weight_offset = g.weight_offset, p.inverse_dim = g.inverse_dim;
    p.alike = norm_alike(g, X, OUT, sizeof(T)) && norm_alike(g, RESIDUAL, OUT, sizeof(T));
    p.sum_alike = norm_alike(g, SUM, OUT, sizeof(T));
    p.weight_f32 = g.weight_f32, p.bias_f32 = g.bias_f32, p.centred = g.centred;
    p.rounds = sizeof(T) < 4 && g.rounding & ADZE_ROUND_NORM;
    p.float_sum = sizeof(T) < 4 && g.rounding & ADZE_FLOAT_SUM;
    p.rows = rows_simple(g.rows, {X, OUT, RESIDUAL, SUM});

    const bool whole = aligned && g.dim % VEC<T> == 0 && p.alike && p.sum_alike;
    if (vectors <= ANY_THREADS || (vectors <= 2 * ANY_THREADS && (rows >= sm_count || clusters == 1)))
        return whole ? shifted_launch_short<T, true>(s, p, vectors) : shifted_launch_short<T, false>(s, p, vectors);
    return shifted_launch_long<T>(s, p, vectors, clusters);
}

extern "C" adze_status adze_norm_shifted_cuda(const cuda_call &s, const norm_params &g, int dtype, int variant)
{
    switch (dtype) {
    case ADZE_F32: return norm_shifted_as<float>(s, g, variant);
    case ADZE_F16: return norm_shifted_as<f16>(s, g, variant);
    default: return norm_shifted_as<bf16>(s, g, variant);
    }
}
