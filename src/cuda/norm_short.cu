/* rms_norm and layer_norm on CUDA: rows of up to SHORT_MOST elements, at any address. Of modulations it takes a scale
   and a shift that many rows share.

   Up to LANES lanes of a warp share a row, with UNITS units of W elements each, neighbours in neighbouring lanes.
   With 16-byte units a row has as many lanes as it needs, so that a warp has 6 rows of 5 vectors, and few lanes idle.
   Each group of lanes goes through several rows. It keeps weight and bias as floats, so that their dtype and address
   cost nothing after the first row. A scale is multiplied into them, and a shift added: the rows of a block share
   those. A short row has little else: loading, shifting and converting parameters for every row took longer than the
   memory does. As soon as a row is unpacked, the loads of a later one are issued; the sums and the stores of the row
   hide their latency. LOOSE: x and the residual are at any address, and only what is stored is aligned: their vectors
   are loaded as the two that have their elements, and shifted. The rows of a block are contiguous, and the grid has
   more blocks than are resident: SMs reach the memory at different speeds, and those that are done first take more.
 */
#include "norm_call.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "unit.cuh"

#include <algorithm>
#include <type_traits>

constexpr int SHORT_THREADS = 128;
constexpr int SHORT_ROUNDS = 8;   /* rows that a group of lanes goes through, at most */
constexpr int SHORT_MOST = 512;   /* elements of a row */
constexpr int SHORT_SHARED = 256; /* rows with the same scale and shift, from which on a modulation is worth it, */
constexpr int SHORT_MANY = 4096;  /* and of f32 all rows */
constexpr int64_t SHORT_ALL = 1 << 20; /* elements of all rows, from which on it is for rows of single elements */
constexpr int SHORT_TINY = 64;         /* elements of a row that norm_any has too many lanes for */

struct norm_short_params {
    const void *x, *residual, *weight, *bias, *scale, *shift; /* NULL: absent */
    void *out, *sum;
    int32_t units;            /* of a row */
    int32_t lanes, in_warp;   /* lanes of a row, and rows of a warp at once */
    uint32_t block_rows;      /* that a block goes through */
    uint32_t inner, spans;    /* rows that share scale and shift, and blocks that they have: 0 if unmodulated */
    uint32_t prefetch_blocks; /* blocks that prefetch their first rows, the first of the grid */
    float eps, weight_offset, inverse_dim;
    bool weight_f32, bias_f32, scale_f32, shift_f32, rounds, float_sum, centred;
    simple_rows<SHIFT + 1> rows; /* of x, out, residual, sum, scale and shift */
};

/* Blocks per SM, whose threads have as many elements, packed in as many registers: this bounds their registers. */
constexpr int short_blocks(int elements, int packed_words, bool modulated, bool loose)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
    return elements > 8 ? 2 : 4;
#else
    if (loose)
        return elements > 8 ? 4 : 7;
    if (modulated)
        return packed_words > 8 ? 3 : elements > 8 ? 4 : packed_words > 4 ? 5 : 7;
    return packed_words > 8 ? 4 : elements > 8 ? 5 : elements > 4 ? 8 : packed_words > 2 ? 10 : 12;
#endif
}
template <typename T, int W, int UNITS, bool MODULATED, bool LOOSE = false>
constexpr int SHORT_BLOCKS = short_blocks(UNITS *W, UNITS *((W * (int)sizeof(T) + 3) / 4), MODULATED, LOOSE);

/* The units of a thread, apart by the lanes of a row: unit u exists where apart(u) < left. */
template <typename T, int W, int LANES, int UNITS>
struct short_piece {
    static_assert(LANES * UNITS * W <= SHORT_MOST, "rows are short");
    static constexpr bool ANY_LANES = W == VEC<T>; /* a row has any number of lanes up to LANES */
    int lanes;

    __device__ __forceinline__ int apart(int u) const { return u * (ANY_LANES ? lanes : LANES); }
    template <typename U>
    __device__ __forceinline__ void fetch(const T *from, int left, U (&to)[UNITS]) const
    {
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            if (apart(u) < left)
                to[u].fetch(from + apart(u) * W);
    }
    /* What was loaded at `at` and after it, as units to work on. */
    __device__ __forceinline__ static void take(unit<T, W> (&to)[UNITS], const unit<T, W> (&from)[UNITS], const T *)
    {
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            to[u] = from[u];
    }
    __device__ __forceinline__ static void take(unit<T, W> (&to)[UNITS], const loose_unit<T> (&from)[UNITS],
                                                const T *at)
    {
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            to[u] = from[u].whole(at); /* units are whole vectors apart */
    }
    /* Parameters of dtype S at any address, plus `more`. Vectors where it is aligned: single elements of neighbouring
       lanes lie as far apart as their units, and each load takes several cycles. */
    template <typename S>
    __device__ __forceinline__ void fetch_param(const S *from, int left, float more, float (&to)[UNITS][W]) const
    {
        if constexpr (W * sizeof(S) % 16 == 0)
            if (((uintptr_t)from & 15) == 0) {
#pragma unroll
                for (int u = 0; u < UNITS; u++)
                    if (apart(u) < left) {
                        load<S, W>(from + apart(u) * W, to[u]);
#pragma unroll
                        for (int j = 0; j < W; j++)
                            to[u][j] += more;
                    }
                return;
            }
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            if (apart(u) < left) {
#pragma unroll
                for (int j = 0; j < W; j++)
                    to[u][j] = to_float(from[apart(u) * W + j]) + more;
            }
    }
    __device__ __forceinline__ void fetch_param(const void *from, bool is_f32, int lane, int left, float more,
                                                float (&to)[UNITS][W]) const
    {
        if (is_f32)
            fetch_param((const float *)from + lane * W, left, more, to);
        else
            fetch_param((const T *)from + lane * W, left, more, to);
    }
    /* Multiplies `weight` and `bias` by the scale plus 1, and adds the shift to `bias`. */
    __device__ __forceinline__ void modulate(const norm_short_params &p, const int64_t (&at)[SHIFT + 1], int lane,
                                             int left, float (&weight)[UNITS][W], float (&bias)[UNITS][W]) const
    {
        float f[UNITS][W] = {};
        if (p.scale) {
            const int64_t size = p.scale_f32 ? sizeof(float) : sizeof(T);
            fetch_param((const char *)p.scale + at[SCALE] * size, p.scale_f32, lane, left, 1, f);
#pragma unroll
            for (int u = 0; u < UNITS; u++)
#pragma unroll
                for (int j = 0; j < W; j++) {
                    weight[u][j] *= f[u][j];
                    bias[u][j] = p.bias ? bias[u][j] * f[u][j] : bias[u][j];
                }
        }
        if (p.shift) {
            const int64_t size = p.shift_f32 ? sizeof(float) : sizeof(T);
            fetch_param((const char *)p.shift + at[SHIFT] * size, p.shift_f32, lane, left, 0, f);
#pragma unroll
            for (int u = 0; u < UNITS; u++)
#pragma unroll
                for (int j = 0; j < W; j++)
                    bias[u][j] += f[u][j];
        }
    }
    /* Adds the residual and stores the sum, if `sum` is not NULL. */
    __device__ __forceinline__ void add(const unit<T, W> (&residual)[UNITS], T *sum, int left, bool round,
                                        float (&f)[UNITS][W]) const
    {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            float more[W];
            residual[u].get(more);
#pragma unroll
            for (int j = 0; j < W; j++)
                f[u][j] += more[j];
            unit<T, W> rounded;
            rounded.set(f[u]);
            if (sum && apart(u) < left)
                rounded.put(sum + apart(u) * W);
            if (round)
                rounded.get(f[u]);
        }
    }
    /* The sum over the lanes of a row, of which this one is `lane`. */
    __device__ __forceinline__ float total(float v, int lane) const
    {
        if constexpr (ANY_LANES)
            if (lanes != LANES) {
#pragma unroll
                for (int by = 1; by < LANES; by *= 2) { /* then the sum of 2 * by lanes from this one on */
                    const float more = __shfl_down_sync(~0u, v, by);
                    v += lane + by < lanes ? more : 0;
                }
                return __shfl_sync(~0u, v, (int)threadIdx.x % 32 - lane);
            }
        return warp_sum<LANES>(v);
    }
};

/* ADDS: there is a residual. The loads of the row and its residual are then in flight, else those of two rows.
   MODULATED: there is a scale or a shift. Narrow units and LOOSE have one kernel for both. */
template <typename T, int W, int LANES, int UNITS, bool ADDS, bool MODULATED, bool LOOSE>
__global__ void __launch_bounds__(SHORT_THREADS, SHORT_BLOCKS<T, W, UNITS, MODULATED, LOOSE>)
    norm_short(const __grid_constant__ norm_short_params p)
{
    constexpr bool ANY_LANES = W == VEC<T>;
    typedef std::conditional_t<LOOSE, loose_unit<T>, unit<T, W>> input;
    const int lanes = ANY_LANES ? p.lanes : LANES;
    const short_piece<T, W, LANES, UNITS> piece = {lanes};
    const uint32_t in_warp = threadIdx.x % 32 / (uint32_t)lanes, warp_rows = ANY_LANES ? p.in_warp : 32 / LANES;
    const int lane = (int)(threadIdx.x % 32 - in_warp * lanes);
    const int left = ANY_LANES && in_warp >= warp_rows ? 0 : p.units - lane; /* the last lanes may have no row */
    const uint32_t step = SHORT_THREADS / 32 * warp_rows;
    const bool modulated = ANY_LANES && !LOOSE ? MODULATED : p.spans > 0;
    /* The rows of a modulated block have the same scale and shift, and are counted from the first one that has. */
    const uint32_t outer = modulated ? blockIdx.x / p.spans : 0, block = blockIdx.x - outer * p.spans;
    const uint32_t outermost = modulated && p.rows.size[0] ? outer / p.rows.size[0] : 0;
    const uint32_t middle = outer - outermost * p.rows.size[0], count = modulated ? p.inner : p.rows.count;
    /* The first row of the warp, and the end of the block's. Lanes beyond the last row repeat it and write nothing:
       shuffles need all lanes. */
    uint32_t first = block * p.block_rows + threadIdx.x / 32 * warp_rows;
    const uint32_t end = min(count, (block + 1) * p.block_rows);
    const auto locate = [&](uint32_t from, int64_t(&at)[SHIFT + 1]) {
        const uint32_t r = from + in_warp < end ? from + in_warp : end - 1;
        if (modulated) {
#pragma unroll
            for (int t = 0; t <= SHIFT; t++)
                at[t] = p.rows.offset({r, middle, outermost}, t);
        } else {
            p.rows.locate(r, at);
        }
    };
    input x[2][UNITS]; /* with a residual x[1] is the residual */
    const auto fetch = [&](uint32_t from, input(&to)[UNITS]) {
        int64_t at[SHIFT + 1];
        if (from >= end)
            return;
        locate(from, at);
        piece.fetch((const T *)p.x + at[X] + lane * W, left, to);
        if (ADDS)
            piece.fetch((const T *)p.residual + at[RESIDUAL] + lane * W, left, x[1]);
    };
    pdl_launch_next();
    if (blockIdx.x < p.prefetch_blocks && lane == 0 && left > 0) {
        const int bytes = p.units * W * (int)sizeof(T);
        int64_t at[SHIFT + 1];
        locate(first, at);
        prefetch_bytes((const T *)p.x + at[X], bytes);
        if (ADDS)
            prefetch_bytes((const T *)p.residual + at[RESIDUAL], bytes);
    }
    pdl_wait();

    float weight[UNITS][W], bias[UNITS][W];
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        x[0][u].fill(0), x[1][u].fill(0); /* where there is no unit, it stays so */
    fetch(first, x[0]);
    if (!ADDS)
        fetch(first + step, x[1]);
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int j = 0; j < W; j++)
            weight[u][j] = 1, bias[u][j] = -0.0f; /* which leaves every value as it is, a zero too */
    if (p.weight)
        piece.fetch_param(p.weight, p.weight_f32, lane, left, p.weight_offset, weight);
    if (p.bias)
        piece.fetch_param(p.bias, p.bias_f32, lane, left, 0, bias);
    if (modulated) {
        int64_t at[SHIFT + 1];
        locate(first, at);
        piece.modulate(p, at, lane, left, weight, bias);
    }

    /* Normalises row `first` of those in `own`, and loads a later one. */
    const auto work = [&](input(&own)[UNITS]) {
        const int writes = first + in_warp < end ? left : 0;
        float f[UNITS][W];
        int64_t at[SHIFT + 1];
        locate(first, at);
        unit<T, W> to[UNITS];
        piece.take(to, own, (const T *)p.x + at[X] + lane * W);
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            to[u].get(f[u]);
        if (ADDS) {
            piece.take(to, x[1], (const T *)p.residual + at[RESIDUAL] + lane * W);
            piece.add(to, p.sum ? (T *)p.sum + at[SUM] + lane * W : NULL, writes, !p.float_sum, f);
        }
        fetch(first + (ADDS ? 1 : 2) * step, own);
        first += step;

        if (p.centred) {
            float total = 0;
#pragma unroll
            for (int u = 0; u < UNITS; u++)
#pragma unroll
                for (int j = 0; j < W; j++)
                    total += f[u][j];
            const float mean = piece.total(total, lane) * p.inverse_dim;
#pragma unroll
            for (int u = 0; u < UNITS; u++)
#pragma unroll
                for (int j = 0; j < W; j++)
                    f[u][j] -= mean;
        }
        float squares = 0;
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            if (piece.apart(u) < left) {
#pragma unroll
                for (int j = 0; j < W; j++)
                    squares += f[u][j] * f[u][j];
            }
        const float factor = rsqrtf(piece.total(squares, lane) * p.inverse_dim + p.eps);
#pragma unroll
        for (int u = 0; u < UNITS; u++)
#pragma unroll
            for (int j = 0; j < W; j++)
                f[u][j] *= factor;
        if (p.rounds) {
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                to[u].set(f[u]);
                to[u].get(f[u]);
            }
        }
        T *const out = (T *)p.out + at[OUT] + lane * W;
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
#pragma unroll
            for (int j = 0; j < W; j++)
                f[u][j] = fmaf(f[u][j], weight[u][j], bias[u][j]);
            to[u].set(f[u]);
            if (piece.apart(u) < writes)
                to[u].put(out + piece.apart(u) * W);
        }
    };
    while (first < end) {
        work(x[0]);
        if (!ADDS && first < end)
            work(x[1]);
    }
}

/* ---- The host ---- */

/* Lanes of a row of 16-byte units, as many as leave a warp its rows. Where a lane has several units they are even: an
   instruction then stores whole sectors of 32 bytes of rows that begin at one. */
static int32_t short_lanes(int64_t units, int64_t each)
{
    const int64_t least = ceil_div(units, each), even = each > 1 ? (least + 1) / 2 * 2 : least;
    return (int32_t)(32 / (32 / even));
}
/* The blocks of the grid have as many rows each: what they do once, loading parameters and waiting for their first
   rows, is spread over up to SHORT_ROUNDS rows of a group of lanes. */
template <typename T, int W, int LANES, int UNITS, bool LOOSE>
static adze_status short_launch(const cuda_call &s, norm_short_params p)
{
    constexpr bool WIDE = W == VEC<T>;     /* any number of lanes */
    constexpr bool APART = WIDE && !LOOSE; /* a kernel for modulations */
    const bool modulated = p.scale || p.shift;
    p.lanes = WIDE ? short_lanes(p.units, UNITS) : LANES;
    p.in_warp = 32 / p.lanes;
    const int64_t at_once = SHORT_THREADS / 32 * p.in_warp, blocks = ceil_div(p.rows.count, at_once);
    const int64_t resident = (int64_t)s.gpu.sm_count * (modulated ? SHORT_BLOCKS<T, W, UNITS, APART, LOOSE>
                                                                  : SHORT_BLOCKS<T, W, UNITS, false, LOOSE>);
    const int64_t vectors = ceil_div((int64_t)p.units * W, VEC<T>);
    p.prefetch_blocks = prefetch_blocks(s.gpu, p.rows.count * vectors / 2, vectors * at_once, SHORT_THREADS, 32);
    const int64_t rounds = ceil_div(blocks, resident), waves = ceil_div(rounds, SHORT_ROUNDS);
    p.block_rows = (uint32_t)(at_once * ceil_div(rounds, waves));
    const int64_t rows = modulated ? p.inner : p.rows.count, spans = ceil_div(rows, p.block_rows);
    p.block_rows = (uint32_t)(ceil_div(rows, spans * at_once) * at_once);
    p.spans = modulated ? (uint32_t)spans : 0;
    const int64_t grid = p.rows.count / rows * spans;
    const auto kernel = modulated    ? (p.residual ? norm_short<T, W, LANES, UNITS, true, APART, LOOSE>
                                                   : norm_short<T, W, LANES, UNITS, false, APART, LOOSE>)
                        : p.residual ? norm_short<T, W, LANES, UNITS, true, false, LOOSE>
                                     : norm_short<T, W, LANES, UNITS, false, false, LOOSE>;
    return launch(s, kernel, grid, dim3(SHORT_THREADS), 0, p);
}

/* with(lanes, units) of rows in units of W elements, as constants. Narrow units have a whole warp where a row is long
   enough: then an instruction stores 64 or 128 contiguous bytes. Fewer are cut into more sectors by the row's
   address, and L2 has to combine them. */
template <typename T, int W, typename F>
static auto short_tiling(int64_t dim, F with)
{
    constexpr std::integral_constant<int, 8> eight{};
    constexpr std::integral_constant<int, 16> sixteen{};
    constexpr std::integral_constant<int, 32> warp{};
    if constexpr (W == VEC<T>) {
        constexpr int MORE = sizeof(T) < 4 ? 2 : 4; /* vectors that hold SHORT_MOST elements in a warp */
        constexpr std::integral_constant<int, 2> two{};
        if constexpr (sizeof(T) < 4)
            if (dim <= 8 * W)
                return with(eight, std::integral_constant<int, 1>());
        return dim <= 8 * 2 * W    ? with(eight, two)
               : dim <= 16 * 2 * W ? with(sixteen, two)
                                   : with(warp, std::integral_constant<int, MORE>());
    } else {
        constexpr std::integral_constant<int, 4 / W> few{};
        return dim <= 32    ? with(eight, few)
               : dim <= 64  ? with(sixteen, few)
               : dim <= 128 ? with(warp, few)
               : dim <= 256 ? with(warp, std::integral_constant<int, 8 / W>())
                            : with(warp, std::integral_constant<int, 16 / W>());
    }
}
template <typename T, int W, bool LOOSE = false>
static adze_status short_launch_width(const cuda_call &s, const norm_short_params &p, int64_t dim)
{
    return short_tiling<T, W>(dim, [&](auto lanes, auto units) {
        return short_launch<T, W, decltype(lanes)::value, decltype(units)::value, LOOSE>(s, p);
    });
}
/* Rows that the GPU has at once. */
template <typename T, int W, bool LOOSE = false>
static int64_t short_at_once(const cuda_call &s, int64_t dim, bool modulated)
{
    return short_tiling<T, W>(dim, [&](auto lanes, auto units) {
        constexpr int LANES = decltype(lanes)::value, UNITS = decltype(units)::value;
        constexpr bool WIDE = W == VEC<T>, APART = WIDE && !LOOSE;
        const int in_warp = 32 / (WIDE ? short_lanes(ceil_div(dim, W), UNITS) : LANES);
        const int blocks =
            modulated ? SHORT_BLOCKS<T, W, UNITS, APART, LOOSE> : SHORT_BLOCKS<T, W, UNITS, false, LOOSE>;
        return (int64_t)s.gpu.sm_count * blocks * (SHORT_THREADS / 32) * in_warp;
    });
}
template <typename T>
static int64_t short_at_once(const cuda_call &s, int64_t dim, bool modulated, int width)
{
    constexpr int EIGHT = 8 / (int)sizeof(T), PAIR = sizeof(T) < 4 ? 2 : 1;
    return width == VEC<T>  ? short_at_once<T, VEC<T>>(s, dim, modulated)
           : width == EIGHT ? short_at_once<T, EIGHT>(s, dim, modulated)
           : width == PAIR  ? short_at_once<T, PAIR>(s, dim, modulated)
                            : short_at_once<T, 1>(s, dim, modulated);
}

/* Whether it is faster than norm_any and norm_aligned, by the times of 2191 random calls on an H200 (2026-11-19).
   Parameters that are kept cost nothing after the first row: a group of lanes gains where it has nearly two rows, and
   with fewer, more threads for each row are faster. But norm_any takes longer for rows of 16 bits that it loads by
   single elements, for rows of up to SHORT_TINY elements and for those just beyond a warp's 256, whose lanes idle. */
template <typename T>
static bool short_faster(const cuda_call &s, const norm_params &g, bool modulated, int width)
{
    const int64_t rows = g.rows.count, all = rows * g.dim, sm_count = s.gpu.sm_count;
    if (modulated) {
        const bool shared = g.rows.size[g.rows.rank - 1] >= SHORT_SHARED;
        if (sizeof(T) == 4)
            return shared && rows >= SHORT_MANY && g.dim > SHORT_TINY && g.dim <= SHORT_MOST / 2;
        if (g.is_f32 || g.weight || g.bias) /* norm_any takes longer for them */
            return shared && (g.dim <= 2 * SHORT_TINY || rows >= SHORT_MANY);
        return shared && (width == 1 ? all >= SHORT_ALL : all >= 3 * SHORT_ALL && g.dim > 2 * SHORT_TINY);
    }
    if (sizeof(T) == 4) /* norm_any has more threads for the loads of longer rows, and of fewer */
        return g.data[RESIDUAL] ? g.dim <= SHORT_TINY : g.dim <= 2 * SHORT_TINY && rows >= SHORT_MANY / 2;
    const bool several = rows * 5 >= short_at_once<T>(s, g.dim, modulated, width) * 9;
    if (g.dim <= SHORT_TINY || width == 4 || (width == 1 && g.dim <= SHORT_MOST / 2))
        return true;
    if (width == VEC<T> && rows >= SHORT_MANY) /* parameters of f32, which norm_any loads again for each row */
        return true;
    return several || (width == 2 && (g.data[RESIDUAL] || (g.dim > SHORT_MOST / 2 && rows >= 4 * sm_count)));
}
/* The same of vectors that are shifted: two are loaded for one. That is worth it instead of single elements; instead
   of pairs, where the rows fill the GPU; instead of units of 8 bytes, which need no more instructions, where they
   fill it several times. */
template <typename T>
static bool short_loose_faster(const cuda_call &s, const norm_params &g, bool modulated, int width)
{
    const int64_t rows = g.rows.count, at_once = short_at_once<T, VEC<T>, true>(s, g.dim, modulated);
    if (modulated)
        return width == 1 || (width == 2 && !(g.is_f32 || g.weight || g.bias) && short_faster<T>(s, g, true, width));
    return width == 1 || (width == 2 && rows * 4 >= at_once * 3) || (width == 4 && rows >= at_once * 8);
}
template <typename T>
static adze_status norm_short_as(const cuda_call &s, const norm_params &g, int variant, int loose_variant)
{
    const void *const *d = g.data;
    constexpr int EIGHT = 8 / (int)sizeof(T), PAIR = sizeof(T) < 4 ? 2 : 1; /* elements of 8 bytes, and of 4 */
    const int inner = g.rows.rank - 1;
    const bool modulated =
        norm_scaled(g, sizeof(T) < 4) && g.rows.stride[SCALE][inner] == 0 && g.rows.stride[SHIFT][inner] == 0;
    const int least = modulated ? g.rows_width : g.width;
    const int width = least == 16 ? VEC<T> : least >= EIGHT ? EIGHT : std::min(least, PAIR);
    const bool fits = (modulated || norm_unmodulated(g)) && rows_are_simple(g.rows) && g.dim <= SHORT_MOST;
    if (!fits)
        return ADZE_NO_KERNEL;
    const bool stored_whole = sizeof(T) < 4 && g.dim % VEC<T> == 0 && norm_alike(g, OUT, OUT, sizeof(T)) &&
                              norm_alike(g, SUM, SUM, sizeof(T));
    bool loose = false;
    if constexpr (sizeof(T) < 4)
        loose = s.takes(loose_variant, stored_whole, short_loose_faster<T>(s, g, modulated, width));
    if (!loose && !s.takes(variant, true, short_faster<T>(s, g, modulated, width)))
        return ADZE_NO_KERNEL;
    norm_short_params p = {};
    p.x = d[X], p.residual = d[RESIDUAL], p.weight = g.weight, p.bias = g.bias;
    p.out = (void *)d[OUT], p.sum = (void *)d[SUM], p.scale = d[SCALE], p.shift = d[SHIFT];
    p.units = (int32_t)g.dim / (loose ? VEC<T> : width);
    p.eps = g.eps, p.weight_offset = g.weight_offset, p.inverse_dim = g.inverse_dim;
    p.weight_f32 = g.weight_f32, p.bias_f32 = g.bias_f32, p.centred = g.centred;
    p.scale_f32 = g.is_f32 >> SCALE & 1, p.shift_f32 = g.is_f32 >> SHIFT & 1;
    p.rounds = sizeof(T) < 4 && g.rounding & ADZE_ROUND_NORM;
    p.float_sum = sizeof(T) < 4 && g.rounding & ADZE_FLOAT_SUM;
    p.rows = rows_simple(g.rows, {X, OUT, RESIDUAL, SUM, SCALE, SHIFT});
    p.inner = p.rows.size[1] ? p.rows.size[1] : p.rows.count;
    if constexpr (sizeof(T) < 4)
        if (loose)
            return short_launch_width<T, VEC<T>, true>(s, p, g.dim);
    if (width == VEC<T>)
        return short_launch_width<T, VEC<T>>(s, p, g.dim);
    if (width == EIGHT)
        return short_launch_width<T, EIGHT>(s, p, g.dim);
    if constexpr (PAIR > 1)
        if (width == PAIR)
            return short_launch_width<T, PAIR>(s, p, g.dim);
    return short_launch_width<T, 1>(s, p, g.dim);
}

extern "C" adze_status adze_norm_short_cuda(const cuda_call &s, const norm_params &g, int dtype, int variant,
                                            int loose)
{
    switch (dtype) {
    case ADZE_F32: return norm_short_as<float>(s, g, variant, loose);
    case ADZE_F16: return norm_short_as<f16>(s, g, variant, loose);
    default: return norm_short_as<bf16>(s, g, variant, loose);
    }
}
