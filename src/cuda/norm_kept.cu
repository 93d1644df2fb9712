/* rms_norm and layer_norm on CUDA: many rows that share their parameters, of any dtype at any address, with a
   modulation and a gate.

   A block goes through several rows. It keeps what the parameters amount to, a factor and a summand for each element
   (and the gate), as floats in shared memory: all that they cost is paid once for its rows. The loads of a row are in
   flight while the row before it is summed and written. A row is read in units of W elements, as wide as the
   alignment of x, out, residual and sum allows (unit.cuh); neighbouring threads have neighbouring units. */
#include "norm_call.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "unit.cuh"

#include <algorithm>

constexpr int KEPT_THREADS = 640; /* of a block, and resident on an SM, at most */
constexpr int KEPT_ROWS = 16;    /* that a block goes through where there are enough, about */
constexpr int KEPT_TOGETHER = 4; /* elements whose parameters a thread loads together */

struct norm_kept_params {
    const void *data[NORM_TENSORS]; /* NULL: absent */
    const void *weight, *bias;
    int32_t dim, units;           /* of a row: elements, and units of W */
    uint32_t block_rows;          /* that a block goes through */
    uint32_t inner, spans;        /* rows that share a modulation, and the blocks that they have */
    uint32_t prefetch_blocks;     /* blocks that prefetch their first rows, the first of the grid */
    float eps, weight_offset, inverse_dim;
    uint32_t is_f32; /* one bit per tensor: it is f32 where x is not */
    bool weight_f32, bias_f32, rounds, float_sum, centred;
    simple_rows<NORM_TENSORS> rows;
};

/* Elements of a thread. With a residual twice as many registers are in flight. */
constexpr int kept_elements(int size, int width, bool adds)
{
    return adds && (size == 4 || width == 1) ? 8 : 16;
}
template <typename T, int W, bool ADDS>
constexpr int KEPT_UNITS = kept_elements(sizeof(T), W, ADDS) / W;

/* The sum over the threads of a block. A slot is used again after another barrier at the earliest. */
__device__ __forceinline__ float kept_total(float v, float (&slot)[32])
{
    const int lane = (int)threadIdx.x % 32, warps = (int)blockDim.x / 32;
    v = warp_sum<32>(v);
    if (warps == 1)
        return v;
    if (lane == 0)
        slot[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum<32>(lane < warps ? slot[lane] : 0);
}

/* Elements thread, thread + threads ... of a parameter, plus `more`; `absent` where there is none. */
template <typename T>
__device__ __forceinline__ void kept_fetch(const void *data, bool is_f32, int64_t start, int at, int dim, float absent,
                                           float more, float (&to)[KEPT_TOGETHER])
{
#pragma unroll
    for (int j = 0; j < KEPT_TOGETHER; j++) {
        const int i = at + j * (int)blockDim.x;
        to[j] = absent;
        if (data && i < dim)
            to[j] = (is_f32 ? ((const float *)data)[start + i] : to_float(((const T *)data)[start + i])) + more;
    }
}

template <typename T, int W, bool ADDS>
__global__ void __launch_bounds__(KEPT_THREADS) norm_kept(const __grid_constant__ norm_kept_params p)
{
    constexpr int UNITS = KEPT_UNITS<T, W, ADDS>, PART = W < 4 ? W : 4;
    extern __shared__ float4 kept[]; /* factors, summands and the gate, of each [W / PART][units][PART] */
    __shared__ float slot[2][2][32];
    float *const factors = (float *)kept, *const summands = factors + p.dim, *const gates = summands + p.dim;
    const int thread = (int)threadIdx.x, threads = (int)blockDim.x, left = p.units - thread;
    const auto apart = [&](int u) { return u * threads; };
    const auto slot_of = [&](int at) { return (at % W / PART * p.units + at / W) * PART + at % PART; };
    /* The rows of a block have the same modulation, and are counted from the first one that has. */
    const uint32_t outer = blockIdx.x / p.spans, block = blockIdx.x - outer * p.spans;
    const uint32_t outermost = p.rows.size[0] ? outer / p.rows.size[0] : 0;
    const uint32_t middle = outer - outermost * p.rows.size[0];
    uint32_t row = block * p.block_rows;
    const uint32_t end = min(p.inner, row + p.block_rows);
    const auto start = [&](int t) {
        return p.rows.size[1] && p.inner < p.rows.count ? p.rows.offset({row, middle, outermost}, t)
                                                       : p.rows.offset(p.rows.split(row), t);
    };
    const auto place = [&](int t) { return (const T *)p.data[t] + start(t) + thread * W; };
    unit<T, W> x[UNITS], add[ADDS ? UNITS : 1];
    const auto fetch = [&](const T *from, unit<T, W> *to) {
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            if (apart(u) < left)
                to[u].fetch(from + apart(u) * W);
    };
    pdl_launch_next();
    if (thread == 0 && blockIdx.x < p.prefetch_blocks) {
        prefetch_bytes(place(X), p.dim * (int)sizeof(T));
        if (ADDS)
            prefetch_bytes(place(RESIDUAL), p.dim * (int)sizeof(T));
    }
    pdl_wait();

#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        x[u].fill(0); /* where there is no unit, it stays so */
        if (ADDS)
            add[u].fill(0);
    }
    fetch(place(X), x);
    if (ADDS)
        fetch(place(RESIDUAL), add);
    const bool gated = ADDS && p.data[GATE];
    for (int i = thread; i < p.dim; i += KEPT_TOGETHER * threads) {
        float factor[KEPT_TOGETHER], summand[KEPT_TOGETHER], by[KEPT_TOGETHER], more[KEPT_TOGETHER];
        const auto tabled = [&](int t, float one, float(&to)[KEPT_TOGETHER]) {
            float table[KEPT_TOGETHER];
            kept_fetch<T>(p.data[t], p.is_f32 >> t & 1, start(t), i, p.dim, one, one, to);
            kept_fetch<T>(p.data[t + TABLE], p.is_f32 >> (t + TABLE) & 1, start(t + TABLE), i, p.dim, 0, 0, table);
#pragma unroll
            for (int j = 0; j < KEPT_TOGETHER; j++)
                to[j] += table[j];
        };
        kept_fetch<T>(p.weight, p.weight_f32, 0, i, p.dim, 1, p.weight_offset, factor);
        kept_fetch<T>(p.bias, p.bias_f32, 0, i, p.dim, -0.0f, 0, summand); /* which leaves a zero as it is */
        tabled(SCALE, 1, by);
        tabled(SHIFT, 0, more);
#pragma unroll
        for (int j = 0; j < KEPT_TOGETHER; j++) {
            const int at = i + j * threads, to = slot_of(at);
            if (at < p.dim) {
                factors[to] = p.data[SCALE] ? factor[j] * by[j] : factor[j];
                summand[j] = p.data[SCALE] && p.bias ? summand[j] * by[j] : summand[j];
                summands[to] = p.data[SHIFT] ? summand[j] + more[j] : summand[j];
            }
        }
        if (gated) {
            tabled(GATE, 0, by);
#pragma unroll
            for (int j = 0; j < KEPT_TOGETHER; j++) {
                const int at = i + j * threads;
                if (at < p.dim)
                    gates[slot_of(at)] = by[j];
            }
        }
    }
    __syncthreads();

    const auto kept_at = [&](const float *of, int u, float(&to)[W]) {
#pragma unroll
        for (int j = 0; j < W; j += PART) {
            const float *const from = of + (j / PART * p.units + thread + apart(u)) * PART;
            if constexpr (PART == 4) {
                const float4 v = *(const float4 *)from;
                to[j] = v.x, to[j + 1] = v.y, to[j + 2] = v.z, to[j + 3] = v.w;
            } else if constexpr (PART == 2) {
                const float2 v = *(const float2 *)from;
                to[j] = v.x, to[j + 1] = v.y;
            } else {
                to[j] = *from;
            }
        }
    };
#pragma unroll 1
    for (int turn = 0; row < end; turn ^= 1) {
        T *const out = (T *)p.data[OUT] + start(OUT) + thread * W;
        float f[UNITS][W];
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            x[u].get(f[u]);
        if (ADDS) {
            T *const sum = (T *)p.data[SUM] + start(SUM) + thread * W;
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                float more[W], gate[W];
                add[u].get(more);
                if (gated && apart(u) < left) {
                    kept_at(gates, u, gate);
#pragma unroll
                    for (int j = 0; j < W; j++)
                        f[u][j] *= gate[j];
                }
#pragma unroll
                for (int j = 0; j < W; j++)
                    f[u][j] += more[j];
                unit<T, W> rounded;
                rounded.set(f[u]);
                if (p.data[SUM] && apart(u) < left)
                    rounded.put(sum + apart(u) * W);
                if (!p.float_sum)
                    rounded.get(f[u]);
            }
        }
        if (++row < end) {
            fetch(place(X), x);
            if (ADDS)
                fetch(place(RESIDUAL), add);
        }
        if (p.centred) {
            float total = 0;
#pragma unroll
            for (int u = 0; u < UNITS; u++)
#pragma unroll
                for (int j = 0; j < W; j++)
                    total += f[u][j];
            const float mean = kept_total(total, slot[turn][0]) * p.inverse_dim;
#pragma unroll
            for (int u = 0; u < UNITS; u++)
#pragma unroll
                for (int j = 0; j < W; j++)
                    f[u][j] -= apart(u) < left ? mean : 0;
        }
        float squares = 0;
#pragma unroll
        for (int u = 0; u < UNITS; u++)
#pragma unroll
            for (int j = 0; j < W; j++)
                squares += f[u][j] * f[u][j];
        const float factor = rsqrtf(kept_total(squares, slot[turn][1]) * p.inverse_dim + p.eps);
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            if (apart(u) < left) {
                float by[W], more[W];
                unit<T, W> to;
                kept_at(factors, u, by);
                kept_at(summands, u, more);
#pragma unroll
                for (int j = 0; j < W; j++)
                    f[u][j] *= factor;
                if (p.rounds) {
                    to.set(f[u]);
                    to.get(f[u]);
                }
#pragma unroll
                for (int j = 0; j < W; j++)
                    f[u][j] = fmaf(f[u][j], by[j], more[j]);
                to.set(f[u]);
                to.put(out + apart(u) * W);
            }
    }
}

/* ---- The host ---- */

template <typename T, int W, bool ADDS>
static adze_status kept_launch(const cuda_call &s, norm_kept_params p)
{
    constexpr int UNITS = KEPT_UNITS<T, W, ADDS>;
    const int64_t threads = ceil_div(ceil_div(p.units, UNITS), 32) * 32;
    const size_t shared = (size_t)p.dim * sizeof(float) * (p.data[GATE] ? 3 : 2);
    const int64_t by_shared = (int64_t)(s.gpu.block_shared / (shared + 2048));
    const int64_t resident = s.gpu.sm_count * std::min(KEPT_THREADS / threads, std::max(by_shared, (int64_t)1));
    const int64_t outer = p.rows.count / p.inner, waves = ceil_div(p.rows.count, resident * KEPT_ROWS);
    p.spans = (uint32_t)std::max(std::min(resident * waves / outer, (int64_t)p.inner), (int64_t)1);
    p.block_rows = (uint32_t)ceil_div(p.inner, p.spans);
    p.spans = (uint32_t)ceil_div(p.inner, p.block_rows);
    const int64_t vectors = ceil_div(p.dim, VEC<T>);
    p.prefetch_blocks = prefetch_blocks(s.gpu, p.rows.count * vectors / 2, vectors, threads, 32);
    return launch(s, norm_kept<T, W, ADDS>, outer * p.spans, dim3((unsigned)threads), launch_shape(shared), p);
}
template <typename T, int W>
static adze_status kept_launch_width(const cuda_call &s, const norm_kept_params &p)
{
    return p.data[RESIDUAL] ? kept_launch<T, W, true>(s, p) : kept_launch<T, W, false>(s, p);
}
template <typename T>
static adze_status norm_kept_as(const cuda_call &s, const norm_params &g, int variant)
{
    constexpr int EIGHT = 8 / (int)sizeof(T), PAIR = sizeof(T) < 4 ? 2 : 1; /* elements of 8 bytes, and of 4 */
    constexpr bool HALF = sizeof(T) < 4;
    const int inner = g.rows.rank - 1;
    const bool modulated = !norm_unmodulated(g);
    const int width = g.rows_width == 16 ? VEC<T> : g.rows_width >= EIGHT ? EIGHT : std::min(g.rows_width, PAIR);
    bool shared = true; /* by the rows of a block */
    for (int t = SCALE; t < NORM_TENSORS; t++)
        shared = shared && (!g.data[t] || g.rows.stride[t][inner] == 0);
    const int64_t bytes = g.dim * (int64_t)sizeof(float) * (g.data[GATE] ? 3 : 2);
    const bool steps = HALF && modulated && g.rounding & ADZE_ROUND_STEPS;
    const bool fits = rows_are_simple(g.rows) && shared && !steps && !(g.is_f32 >> OUT & 1) &&
                      (!g.data[GATE] || g.data[RESIDUAL]) &&
                      g.dim <= KEPT_THREADS * kept_elements(sizeof(T), width, g.data[RESIDUAL]) &&
                      bytes + 1024 <= s.gpu.block_shared;
    if (!s.takes(variant, fits, false))
        return ADZE_NO_KERNEL;
    norm_kept_params p = {};
    std::copy(g.data, g.data + NORM_TENSORS, p.data);
    p.weight = g.weight, p.bias = g.bias;
    p.dim = (int32_t)g.dim, p.units = (int32_t)g.dim / width;
    p.eps = g.eps, p.weight_offset = g.weight_offset, p.inverse_dim = g.inverse_dim;
    p.is_f32 = g.is_f32, p.weight_f32 = g.weight_f32, p.bias_f32 = g.bias_f32;
    p.rounds = HALF && g.rounding & ADZE_ROUND_NORM, p.float_sum = HALF && g.rounding & ADZE_FLOAT_SUM;
    p.centred = g.centred;
    p.rows = rows_simple(g.rows, {X, OUT, RESIDUAL, SUM, SCALE, SHIFT, GATE, SCALE_TABLE, SHIFT_TABLE, GATE_TABLE});
    p.inner = modulated && p.rows.size[1] ? p.rows.size[1] : p.rows.count;
    if (width == VEC<T>)
        return kept_launch_width<T, VEC<T>>(s, p);
    if (width == EIGHT)
        return kept_launch_width<T, EIGHT>(s, p);
    if constexpr (PAIR > 1)
        if (width == PAIR)
            return kept_launch_width<T, PAIR>(s, p);
    return kept_launch_width<T, 1>(s, p);
}

extern "C" adze_status adze_norm_kept_cuda(const cuda_call &s, const norm_params &g, int dtype, int variant)
{
    switch (dtype) {
    case ADZE_F32: return norm_kept_as<float>(s, g, variant);
    case ADZE_F16: return norm_kept_as<f16>(s, g, variant);
    default: return norm_kept_as<bf16>(s, g, variant);
    }
}
