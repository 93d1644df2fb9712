/* rms_norm and layer_norm on CUDA with quantised rows. norm_bytes takes all options, any alignment, and rows of any
   length. norm_bytes_held takes the calls of language models, whose rows it holds in registers. */
#include "bytes_out.cuh"
#include "norm_call.cuh"

constexpr int HELD_THREADS = 512, HELD_VECTORS = 4; /* of a row, and of a thread, at most */

struct norm_bytes_params {
    norm_params g; /* its rows are those of the tensors, after which the scale comes */
    bytes_to to;
    uint32_t prefetch_blocks; /* blocks of norm_bytes_held that prefetch their rows, the first of the grid */
};

template <typename T, int W>
__device__ __forceinline__ void round_if(bool condition, float (&f)[W])
{
    if (condition) {
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] = round_to<T>(f[j]);
    }
}

/* What a block knows of its row. */
template <typename T, int W>
struct norm_bytes_row {
    const norm_bytes_params &p;
    row_index at;
    float mean, factor;
    __device__ __forceinline__ bool rounds(int step) const { return sizeof(T) < 4 && p.g.rounding & step; }
    __device__ __forceinline__ int64_t start(int t) const { return row_offset(p.g.rows, t, at); }
    /* One of scale, shift and gate, plus its table. */
    __device__ __forceinline__ void with_table(int t, int64_t i, float (&f)[W]) const
    {
        load_param<T, W>(p.g.data[t], p.g.is_f32 >> t & 1, start(t) + i, f);
        if (p.g.data[t + TABLE]) {
            float table[W];
            load_param<T, W>(p.g.data[t + TABLE], p.g.is_f32 >> (t + TABLE) & 1, start(t + TABLE) + i, table);
#pragma unroll
            for (int j = 0; j < W; j++)
                f[j] += table[j];
            round_if<T>(rounds(ADZE_ROUND_STEPS), f);
        }
    }
    /* The value to normalise. */
    __device__ __forceinline__ void sum(int64_t i, float (&h)[W], bool store_sum) const
    {
        load<T, W>((const T *)p.g.data[X] + start(X) + i, h);
        if (!p.g.data[RESIDUAL])
            return;
        float other[W];
        if (p.g.data[GATE]) {
            with_table(GATE, i, other);
#pragma unroll
            for (int j = 0; j < W; j++)
                h[j] *= other[j];
            round_if<T>(rounds(ADZE_ROUND_STEPS), h);
        }
        load<T, W>((const T *)p.g.data[RESIDUAL] + start(RESIDUAL) + i, other);
#pragma unroll
        for (int j = 0; j < W; j++)
            h[j] += other[j];
        if (store_sum && p.g.data[SUM])
            store<T, W>((T *)p.g.data[SUM] + start(SUM) + i, h);
        round_if<T>(!rounds(ADZE_FLOAT_SUM), h);
    }
    /* h becomes the output. */
    __device__ __forceinline__ void finish(int64_t i, float (&y)[W]) const
    {
        const bool steps = rounds(ADZE_ROUND_STEPS);
        float f[W];
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] = (y[j] - mean) * factor;
        round_if<T>(rounds(ADZE_ROUND_NORM), y);
        if (p.g.weight) {
            load_param<T, W>(p.g.weight, p.g.weight_f32, i, f);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] *= f[j] + p.g.weight_offset;
        }
        if (p.g.bias) {
            load_param<T, W>(p.g.bias, p.g.bias_f32, i, f);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] += f[j];
        }
        round_if<T>(steps && (p.g.data[SCALE] || p.g.data[SHIFT]), y);
        if (p.g.data[SCALE]) {
            with_table(SCALE, i, f);
#pragma unroll
            for (int j = 0; j < W; j++)
                f[j] += 1;
            round_if<T>(steps, f);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] *= f[j];
            round_if<T>(steps && p.g.data[SHIFT], y);
        }
        if (p.g.data[SHIFT]) {
            with_table(SHIFT, i, f);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] += f[j];
        }
    }
};

/* Minimum blocks per SM: sm_75 spills at the compiler's choice. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int BYTES_BLOCKS = 1;
#else
constexpr int BYTES_BLOCKS = 0;
#endif

template <typename T, int W, bool HELD>
__global__ void __launch_bounds__(BYTES_THREADS, BYTES_BLOCKS) norm_bytes(const __grid_constant__ norm_bytes_params p)
{
    extern __shared__ __align__(16) float row[];
    __shared__ __align__(16) float part[3][32];
    const int64_t step = (int64_t)blockDim.x * W, first = (int64_t)threadIdx.x * W;
    norm_bytes_row<T, W> r = {p, row_split(p.g.rows, blockIdx.x), 0, 0};
    pdl_launch_next();
    pdl_wait();
    auto read = [&](int64_t i, float(&h)[W], bool begins) {
        if (HELD && !begins) {
#pragma unroll
            for (int j = 0; j < W; j++)
                h[j] = row[i + j];
            return;
        }
        r.sum(i, h, begins);
#pragma unroll
        for (int j = 0; j < W && HELD; j++)
            row[i + j] = h[j];
    };
    float sum = 0;
    for (int64_t i = first; i < p.g.dim; i += step) {
        float h[W];
        read(i, h, true);
#pragma unroll
        for (int j = 0; j < W; j++)
            sum += p.g.centred ? h[j] : h[j] * h[j];
    }
    sum = row_sum(sum, part[0]);
    if (p.g.centred) {
        r.mean = sum * p.g.inverse_dim;
        sum = 0;
        for (int64_t i = first; i < p.g.dim; i += step) {
            float h[W];
            read(i, h, false);
#pragma unroll
            for (int j = 0; j < W; j++)
                sum += (h[j] - r.mean) * (h[j] - r.mean);
        }
        sum = row_sum(sum, part[1]);
    }
    r.factor = rsqrtf(sum * p.g.inverse_dim + p.g.eps);
    bytes_row<T, W, HELD>(p.to, r.start(p.to.out_at), r.start(p.to.scale_at), p.g.dim, row, part[2],
                          [&](int64_t i, float(&y)[W]) {
                              read(i, y, false);
                              r.finish(i, y);
                          });
}

/* The largest magnitudes of `most` and of a vector: two 16-bit numbers, or a float. A NaN is larger than all. Those
   of a sign compare as their bits do; since sm_80 one instruction compares two 16-bit numbers. */
template <typename T>
__device__ __forceinline__ void add_peak(uint32_t &most, packed<T> v)
{
    const uint32_t word[4] = {v.raw.x, v.raw.y, v.raw.z, v.raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (sizeof(T) == 4)
            most = max(most, word[i] & 0x7fffffffu);
#if __CUDA_ARCH__ >= 800
        else if constexpr (std::is_same<T, bf16>::value)
            asm("{\n\t.reg .b32 v;\n\tabs.bf16x2 v, %1;\n\tmax.NaN.bf16x2 %0, %0, v;\n\t}"
                : "+r"(most)
                : "r"(word[i]));
        else
            asm("{\n\t.reg .b32 v;\n\tabs.f16x2 v, %1;\n\tmax.NaN.f16x2 %0, %0, v;\n\t}" : "+r"(most) : "r"(word[i]));
#else
        else
            most = __vmaxu2(most, word[i] & 0x7fff7fffu);
#endif
    }
}
template <typename T>
__device__ __forceinline__ float peak_of(uint32_t most)
{
    if constexpr (sizeof(T) == 4)
        return __uint_as_float(most);
    const uint32_t both = max(most & 0xffffu, most >> 16);
    float f[VEC<T>];
    packed<T>{make_uint4(both, 0, 0, 0)}.get(f);
    return f[0];
}

/* block_max() of numbers that are not negative, whose bits compare as they do, NaN last. */
__device__ __forceinline__ float largest(float v, float (&part)[32])
{
#if __CUDA_ARCH__ >= 800
    const uint32_t of_warp = __reduce_max_sync(~0u, __float_as_uint(v));
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = __uint_as_float(of_warp);
    __syncthreads();
    const bool there = threadIdx.x % 32 < blockDim.x / 32;
    return __uint_as_float(__reduce_max_sync(~0u, there ? __float_as_uint(part[threadIdx.x % 32]) : 0));
#else
    return block_max(v, part);
#endif
}

/* blockDim.x threads share a row, whole warps, and blockDim.y rows a block. A thread holds up to HELD_VECTORS
   vectors, packed: the row, then its normalised values, which are rounded to x's dtype anyway. All loads but those of
   a bias are in flight before the first is used. PLAIN: rms_norm without bias and weight_offset, whose time is that
   of its instructions if it has those of the others. */
template <typename T, bool PLAIN>
__global__ void __launch_bounds__(HELD_THREADS) norm_bytes_held(const __grid_constant__ norm_bytes_params p)
{
    constexpr int W = VEC<T>, N = HELD_VECTORS;
    __shared__ __align__(16) float part[3][4][32];
    const norm_params &g = p.g;
    const int64_t r = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    /* Threads beyond the last row repeat it without a store: shuffles and barriers need all threads. */
    const bool writes = r < g.rows.count;
    const row_index row = row_split(g.rows, writes ? r : g.rows.count - 1);
    const T *const x = (const T *)g.data[X] + row_offset(g.rows, X, row);
    const T *const residual = (const T *)g.data[RESIDUAL] + row_offset(g.rows, RESIDUAL, row);
    const int dim = (int)g.dim;
    const int first = ((int)(threadIdx.x / 32) * N * 32 + (int)(threadIdx.x % 32)) * W;
    const auto at = [&](int u) { return first + u * 32 * W; };
    pdl_launch_next();
    if (blockIdx.x < p.prefetch_blocks && threadIdx.x == 0) {
        prefetch_bytes(x, dim * (int)sizeof(T));
        if (g.data[RESIDUAL])
            prefetch_bytes(residual, dim * (int)sizeof(T));
    }
    pdl_wait();

    packed<T> h[N], add[N], weight[N];
#pragma unroll
    for (int u = 0; u < N; u++) {
        h[u].raw = make_uint4(0, 0, 0, 0);
        if (at(u) < dim)
            h[u] = load_packed(x + first + u * 32 * W);
    }
    if (g.data[RESIDUAL]) {
#pragma unroll
        for (int u = 0; u < N; u++)
            if (at(u) < dim)
                add[u] = load_packed(residual + first + u * 32 * W);
    }
    if (g.weight) {
#pragma unroll
        for (int u = 0; u < N; u++)
            if (at(u) < dim)
                weight[u] = load_packed((const T *)g.weight + first + u * 32 * W);
    }
    if (g.data[RESIDUAL]) {
        T *const sum = g.data[SUM] && writes ? (T *)g.data[SUM] + row_offset(g.rows, SUM, row) : NULL;
#pragma unroll
        for (int u = 0; u < N; u++)
            if (at(u) < dim) {
                float f[W], more[W];
                h[u].get(f), add[u].get(more);
#pragma unroll
                for (int j = 0; j < W; j++)
                    f[j] += more[j];
                h[u].set(f);
                if (sum)
                    store_packed(sum + first + u * 32 * W, h[u]);
            }
    }
    float total = 0, mean = 0;
#pragma unroll
    for (int u = 0; u < N; u++) {
        float f[W];
        h[u].get(f);
#pragma unroll
        for (int j = 0; j < W; j++)
            total = !PLAIN && g.centred ? total + f[j] : fmaf(f[j], f[j], total);
    }
    total = row_sum(total, part[0][threadIdx.y]);
    keep_packed(h);
    if (!PLAIN && g.centred) {
        mean = total * g.inverse_dim;
        total = 0;
#pragma unroll
        for (int u = 0; u < N; u++)
            if (at(u) < dim) {
                float f[W];
                h[u].get(f);
#pragma unroll
                for (int j = 0; j < W; j++)
                    total += (f[j] - mean) * (f[j] - mean);
            }
        total = row_sum(total, part[1][threadIdx.y]);
        keep_packed(h);
    }
    const float factor = rsqrtf(total * g.inverse_dim + g.eps);
    uint32_t peak = 0;
#pragma unroll
    for (int u = 0; u < N; u++)
        if (at(u) < dim) {
            float f[W], by[W];
            h[u].get(f);
#pragma unroll
            for (int j = 0; j < W; j++)
                f[j] = (PLAIN ? f[j] : f[j] - mean) * factor;
            if (sizeof(T) < 4 && g.rounding & ADZE_ROUND_NORM) {
                h[u].set(f); /* by pairs, which takes fewer instructions than round_if */
                h[u].get(f);
            }
            if (g.weight) {
                weight[u].get(by);
#pragma unroll
                for (int j = 0; j < W; j++)
                    f[j] *= PLAIN ? by[j] : by[j] + g.weight_offset;
            }
            if (!PLAIN && g.bias) {
                load<T, W>((const T *)g.bias + at(u), by);
#pragma unroll
                for (int j = 0; j < W; j++)
                    f[j] += by[j];
            }
            h[u].set(f);
            add_peak(peak, h[u]);
        }
    const float most = largest(peak_of<T>(peak), part[2][threadIdx.y]);
    keep_packed(h);
    if (!writes)
        return;
    bytes_factor to(most, p.to.f8);
    uint8_t *const out = p.to.out + row_offset(g.rows, p.to.out_at, row);
    if (threadIdx.x == 0)
        p.to.scale[row_offset(g.rows, p.to.scale_at, row)] = most / (p.to.f8 ? 448.0f : 127.0f);
    if (to.lift != 1) { /* a row of tiny numbers, or of huge ones: rare, so it is a branch of its own */
#pragma unroll
        for (int u = 0; u < N; u++) {
            float f[W];
            h[u].get(f);
#pragma unroll
            for (int j = 0; j < W; j++)
                f[j] *= to.lift;
            h[u].set(f);
        }
    }
    to.lift = 1;
    const auto store_all = [&](bool f8) {
        to.f8 = f8;
#pragma unroll
        for (int u = 0; u < N; u++)
            if (at(u) < dim) {
                float f[W];
                h[u].get(f);
                bytes_store<W>(out + first + u * 32 * W, f, to);
            }
    };
    if (p.to.f8)
        store_all(true);
    else
        store_all(false);
}

template <typename T>
static adze_status norm_bytes_held_launch(const cuda_call &s, norm_bytes_params p)
{
    const int64_t vectors = p.g.dim / VEC<T>, threads = ceil_div(vectors, 32 * HELD_VECTORS) * 32;
    const int64_t rows = threads < 128 ? 128 / threads : 1;
    p.prefetch_blocks = prefetch_blocks(s.gpu, p.g.rows.count * vectors / 2, vectors * rows, threads * rows, 24);
    const bool plain = !p.g.centred && !p.g.bias && p.g.weight_offset == 0;
    return launch(s, plain ? norm_bytes_held<T, true> : norm_bytes_held<T, false>, ceil_div(p.g.rows.count, rows),
                  dim3((unsigned)threads, (unsigned)rows), 0, p);
}
/* Whether norm_bytes_held takes a call, whose rows are vectors and not empty. */
static bool norm_bytes_holds(const norm_params &g, int width, bool half)
{
    return norm_unmodulated(g) && !g.weight_f32 && !g.bias_f32 && g.dim > 0 &&
           g.dim <= HELD_THREADS * HELD_VECTORS * width && !(half && g.data[RESIDUAL] && g.rounding & ADZE_FLOAT_SUM);
}

template <typename T, int W>
static adze_status norm_bytes_launch(const cuda_call &s, const norm_bytes_params &p)
{
    const int64_t bytes = p.g.dim * 4, fixed = 1024;
    const bool held = bytes + fixed <= s.gpu.block_shared;
    return launch(s, held ? norm_bytes<T, W, true> : norm_bytes<T, W, false>, p.g.rows.count,
                  dim3(bytes_threads(ceil_div(p.g.dim, W))), launch_shape(held ? (size_t)bytes : 0), p);
}
template <typename T>
static adze_status norm_bytes_as(const cuda_call &s, const norm_bytes_params &p, bool vectors, int variant)
{
    if (s.takes(variant + 1, vectors && norm_bytes_holds(p.g, VEC<T>, sizeof(T) < 4)))
        return norm_bytes_held_launch<T>(s, p);
    if (!s.takes(variant, true))
        return ADZE_NO_KERNEL;
    return vectors ? norm_bytes_launch<T, VEC<T>>(s, p) : norm_bytes_launch<T, 1>(s, p);
}

extern "C" adze_status adze_norm_bytes_cuda(const cuda_call &s, const norm_params &g, const adze_norm_args *a,
                                            int variant)
{
    const adze_tensor scale = adze_by_rows(&a->out_scale);
    const adze_tensor *const tensors[NORM_TENSORS + 1] = {
        &a->x,    &a->out,         &a->residual,    &a->sum,        &a->scale, &a->shift,
        &a->gate, &a->scale_table, &a->shift_table, &a->gate_table, &scale};
    if (g.rows.count > 0x7fffffff)
        return ADZE_NO_KERNEL;
    norm_bytes_params p = {};
    p.g = g;
    adze_rows_init(&p.g.rows, &a->x, NORM_TENSORS + 1, tensors);
    p.to = {(uint8_t *)a->out.data, (float *)a->out_scale.data, OUT, NORM_TENSORS, a->out.dtype == ADZE_F8E4M3};
    const int width = 16 / (int)adze_dtype_size(a->x.dtype);
    const bool vectors = g.width == 16 && !g.loose && bytes_aligned(&a->out, width);
    switch (a->x.dtype) {
    case ADZE_F32: return norm_bytes_as<float>(s, p, vectors, variant);
    case ADZE_F16: return norm_bytes_as<f16>(s, p, vectors, variant);
    default: return norm_bytes_as<bf16>(s, p, vectors, variant);
    }
}
