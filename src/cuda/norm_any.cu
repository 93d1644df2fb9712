/* rms_norm and layer_norm on CUDA, any call: how rows are tiled for norm_any.cuh, and which take
   norm_loop.cuh. */
#include "norm_loop.cuh"

#include <algorithm>

/* The tiling of a call: `threads` per row and block, with `thread_units` units each, in each of `cluster` blocks of
   `rows` rows. `held`: rows fit in registers. `many`: a thread holds many elements. */
struct norm_cut {
    bool held, many;
    int cluster, thread_units;
    int64_t units, threads, rows;
};
template <typename T, int W, int LANES, int UNITS, norm_form FORM, bool IN_CLUSTER>
static adze_status norm_launch_held(const cuda_call &s, const norm_params &g, const norm_cut &cut)
{
    norm_any_simple p = {};
    const int64_t vectors = ceil_div(cut.units * W, VEC<T>), threads = cut.threads * cut.rows;
    p.g = g;
    p.units = cut.units;
    p.part = ceil_div(cut.units, cut.cluster);
    p.thread_units = cut.thread_units;
    p.prefetch_blocks =
        prefetch_blocks(s.gpu, g.rows.count * vectors / 2, ceil_div(vectors * cut.rows, cut.cluster), threads, 32);
    p.rows = rows_simple(g.rows, {X, OUT, RESIDUAL, SUM, SCALE, SHIFT, GATE, SCALE_TABLE, SHIFT_TABLE, GATE_TABLE});
    return launch(s, norm_any<T, W, LANES, UNITS, FORM, IN_CLUSTER>, grid_for(g.rows.count, cut.rows) * cut.cluster,
                  dim3((unsigned)cut.threads, (unsigned)cut.rows), launch_shape(0, (unsigned)cut.cluster), p);
}
template <typename T, int W, norm_form FORM>
static adze_status norm_launch_width(const cuda_call &s, const norm_params &g, const norm_cut &cut)
{
    constexpr int FEW = any_few(FORM, W, sizeof(T)) / W, SHORT = any_short(FORM, W, sizeof(T)) / W;
    constexpr int MANY = any_many(FORM, W, sizeof(T), false) / W, JOINED = any_many(FORM, W, sizeof(T), true) / W;
    if constexpr (FORM == SCALE_SHIFT)
        if (cut.threads == ANY_LANES / 2)
            return norm_launch_held<T, W, ANY_LANES / 2, SHORT, FORM, false>(s, g, cut);
    if constexpr (FORM != UNMODULATED)
        if (cut.threads == ANY_LANES)
            return norm_launch_held<T, W, ANY_LANES, SHORT, FORM, false>(s, g, cut);
    if (cut.cluster > 1)
        return norm_launch_held<T, W, 32, JOINED, FORM, true>(s, g, cut);
    return cut.many ? norm_launch_held<T, W, 32, MANY, FORM, false>(s, g, cut)
                    : norm_launch_held<T, W, 32, FEW, FORM, false>(s, g, cut);
}
template <typename T, bool IN_CLUSTER>
static adze_status norm_launch_loop(const cuda_call &s, const norm_params &g, const norm_cut &cut)
{
    norm_any_general p = {};
    p.g = g;
    p.units = g.dim;
    p.part = ceil_div(g.dim, cut.cluster);
    static_cast<adze_rows &>(p.rows) = g.rows;
    const int64_t rows = g.rows.count < 0x7fffffff / ANY_CLUSTER ? g.rows.count : 0x7fffffff / ANY_CLUSTER;
    return launch(s, norm_loop<T, IN_CLUSTER>, rows * cut.cluster, dim3(LOOP_THREADS),
                  launch_shape(0, (unsigned)cut.cluster), p);
}

/* The tiling for elements of `size` bytes in units of `width` elements. */
static norm_cut norm_cut_for(const norm_params &g, const cuda_call &s, int size, int width, norm_form form, int any)
{
    const int sm_count = s.gpu.sm_count;
    /* A sum that is not rounded is held as floats: threads have registers for few, unless in plain vectors. */
    const bool floats = size < 4 && width < 8 && g.data[RESIDUAL] && g.rounding & ADZE_FLOAT_SUM;
    const int clusters = adze_cuda_clusters(s.device) && g.rows.count <= 0x7fffffff / ANY_CLUSTER ? ANY_CLUSTER : 1;
    const int most_blocks = floats ? 1 : clusters;
    norm_cut cut = {};
    cut.units = g.dim / width;
    cut.cluster = cut.rows = 1;
    /* Elements of a thread: few, many, in a cluster; then the most units of a block with as many. */
    const int64_t few = any_few(form, width, size), many = floats ? few : any_many(form, width, size, false);
    const int64_t joined = any_many(form, width, size, true), alone = ANY_THREADS * many / width;
    const int64_t part_few = ANY_THREADS * few / width, part_many = ANY_THREADS * joined / width;
    cut.held =
        s.takes(any, rows_are_simple(g.rows) && cut.units <= (most_blocks > 1 ? most_blocks * part_many : alone));
    if (!cut.held) {
        cut.cluster = g.dim > 4 * LOOP_UNITS * LOOP_THREADS ? clusters : 1;
        return cut;
    }
    /* Few rows get many threads each, so that each thread has a short chain of loads. Long rows need more than one
       block. */
    const bool few_rows = g.rows.count <= 4 * (int64_t)sm_count;
    const int64_t most_short = any_short(form, width, size) * ANY_LANES;
    if (form != UNMODULATED && g.dim <= most_short && (form == SCALE_SHIFT || !few_rows || g.dim <= most_short / 2)) {
        cut.threads = form == SCALE_SHIFT && g.dim <= most_short / 2 ? ANY_LANES / 2 : ANY_LANES;
        cut.thread_units = (int)ceil_div(cut.units, cut.threads);
        cut.rows = 128 / cut.threads;
        return cut;
    }
    const bool spread = g.rows.count < (form == UNMODULATED ? sm_count : sm_count / 4);
    if (most_blocks > 1 && cut.units > (spread ? part_few : alone)) {
        /* in as many blocks as needed, or as a cluster can have */
        cut.cluster = 2;
        while (cut.cluster < most_blocks &&
               (cut.units > cut.cluster * part_many ||
                (cut.units > cut.cluster * part_few && g.rows.count * cut.cluster < 2 * sm_count)))
            cut.cluster *= 2;
    }
    /* A row on its own is bound by the loads that a thread has in sequence: twice the blocks, and all their threads.
     */
    const bool wide = cut.cluster == ANY_CLUSTER && cut.units > ANY_CLUSTER * part_few &&
                      g.rows.count <= adze_cuda_clustered(s.device, WIDE_CLUSTER);
    cut.cluster = wide ? WIDE_CLUSTER : cut.cluster;
    const int64_t part = ceil_div(cut.units, cut.cluster);
    /* Many elements per thread where there are enough rows to fill the GPU anyway. */
    const int64_t warps_many = ceil_div(part * width, 32 * many) * cut.cluster * g.rows.count;
    cut.many = part > part_few ||
               (many > few && part > 32 * few / width && warps_many >= (int64_t)sm_count * s.gpu.sm_threads / 64);
    const int64_t each = !cut.many || wide ? few : cut.cluster > 1 ? joined : many;
    const int64_t warps = std::min(ceil_div(part, 32 * (each / width)), (int64_t)ANY_THREADS / 32);
    cut.threads = warps * 32;
    cut.thread_units = (int)ceil_div(part, cut.threads);
    cut.rows = cut.threads >= 128 || cut.cluster > 1 ? 1 : 128 / cut.threads;
    return cut;
}
template <typename T, int W, norm_form FORM>
static adze_status norm_launch_any(const cuda_call &s, const norm_params &g, int any)
{
    const norm_cut cut = norm_cut_for(g, s, sizeof(T), W, FORM, any);
    if (cut.held)
        return norm_launch_width<T, W, FORM>(s, g, cut);
    if (!s.takes(any + 1, true))
        return ADZE_NO_KERNEL;
    return cut.cluster > 1 ? norm_launch_loop<T, true>(s, g, cut) : norm_launch_loop<T, false>(s, g, cut);
}
/* Modulations do not use 16-byte vectors, whose parameters would need too many registers. */
template <typename T>
static adze_status norm_any_as(const cuda_call &s, const norm_params &g, int any)
{
    constexpr int EIGHT = 8 / (int)sizeof(T), PAIR = sizeof(T) < 4 ? 2 : 1; /* elements of 8 bytes, and of 4 */
    const void *const *d = g.data;
    const bool half = sizeof(T) < 4;
    const bool simple = d[SCALE] && d[SHIFT] && !d[GATE] && !d[SCALE_TABLE] && !d[SHIFT_TABLE] && !g.weight &&
                        !g.bias && !(half && (g.rounding || g.is_f32));
    if (simple)
        return g.width >= EIGHT       ? norm_launch_any<T, EIGHT, SCALE_SHIFT>(s, g, any)
               : half && g.width == 2 ? norm_launch_any<T, PAIR, SCALE_SHIFT>(s, g, any)
                                      : norm_launch_any<T, 1, SCALE_SHIFT>(s, g, any);
    if (d[GATE] || d[SCALE] || d[SHIFT] || g.is_f32 >> OUT & 1)
        return g.width >= PAIR ? norm_launch_any<T, PAIR, ANY_OPTION>(s, g, any)
                               : norm_launch_any<T, 1, ANY_OPTION>(s, g, any);
    if (g.width == 16)
        return norm_launch_any<T, VEC<T>, UNMODULATED>(s, g, any);
    if (g.width >= EIGHT)
        return norm_launch_any<T, EIGHT, UNMODULATED>(s, g, any);
    return g.width >= PAIR ? norm_launch_any<T, PAIR, UNMODULATED>(s, g, any)
                           : norm_launch_any<T, 1, UNMODULATED>(s, g, any);
}

extern "C" adze_status adze_norm_any_cuda(const cuda_call &s, const norm_params &g, int dtype, int any)
{
    switch (dtype) {
    case ADZE_F32: return norm_any_as<float>(s, g, any);
    case ADZE_F16: return norm_any_as<f16>(s, g, any);
    default: return norm_any_as<bf16>(s, g, any);
    }
}
