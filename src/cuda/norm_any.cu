/* rms_norm and layer_norm on CUDA, any call: how rows are tiled for norm_any.cuh. */
#include "norm_any.cuh"

#include <algorithm>

/* The tiling of a call: `threads` per row and block, with `thread_units` units each, in each of `cluster` blocks of
   `rows` rows. `held`: rows fit in registers. `many`: a thread holds many elements. */
struct norm_cut {
    bool held, many;
    int cluster, thread_units;
    int64_t units, threads, rows;
};
template <typename T, int W, int LANES, int UNITS, bool MODULATED, bool IN_CLUSTER>
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
    return launch(s, norm_any<T, W, LANES, UNITS, MODULATED, IN_CLUSTER>,
                  grid_for(g.rows.count, cut.rows) * cut.cluster, dim3((unsigned)cut.threads, (unsigned)cut.rows),
                  launch_shape(0, (unsigned)cut.cluster), p);
}
template <typename T, int W, bool MODULATED>
static adze_status norm_launch_width(const cuda_call &s, const norm_params &g, const norm_cut &cut)
{
    constexpr int MANY = any_held(W, sizeof(T), MODULATED, false) / W, FEW = ANY_FEW / W;
    constexpr int JOINED = any_held(W, sizeof(T), MODULATED, true) / W;
    if (cut.threads == ANY_LANES)
        return norm_launch_held<T, W, ANY_LANES, ANY_SHORT / W, MODULATED, false>(s, g, cut);
    if (cut.cluster > 1) {
        if constexpr (MODULATED)
            if (!cut.many)
                return norm_launch_held<T, W, 32, FEW, MODULATED, true>(s, g, cut);
        return norm_launch_held<T, W, 32, JOINED, MODULATED, true>(s, g, cut);
    }
    return cut.many ? norm_launch_held<T, W, 32, MANY, MODULATED, false>(s, g, cut)
                    : norm_launch_held<T, W, 32, FEW, MODULATED, false>(s, g, cut);
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
static norm_cut norm_cut_for(const norm_params &g, const cuda_call &s, int size, int width, bool modulated, int any)
{
    const int sm_count = s.gpu.sm_count;
    const int most_blocks =
        adze_cuda_clusters(s.device) && g.rows.count <= 0x7fffffff / ANY_CLUSTER ? ANY_CLUSTER : 1;
    norm_cut cut = {};
    cut.units = g.dim / width;
    cut.cluster = cut.rows = 1;
    /* The most units of a block: alone, in a cluster with few per thread, in a cluster with many per thread. */
    const int64_t held = any_held(width, size, modulated, false), joined = any_held(width, size, modulated, true);
    const int64_t alone = ANY_THREADS * held / width, part_few = ANY_THREADS * ANY_FEW / width;
    const int64_t part_many = ANY_THREADS * joined / width;
    cut.held =
        s.takes(any, rows_are_simple(g.rows) && cut.units <= (most_blocks > 1 ? most_blocks * part_many : alone));
    if (!cut.held) {
        cut.cluster = g.dim > 4 * LOOP_UNITS * LOOP_THREADS ? most_blocks : 1;
        return cut;
    }
    /* Few rows get many threads each, so that each thread has a short chain of loads. Long rows need more than one
       block. */
    const bool few = g.rows.count <= 4 * (int64_t)sm_count;
    if (g.dim <= ANY_LANES * ANY_SHORT && !(few && g.dim > ANY_LANES * ANY_SHORT / 2)) {
        cut.threads = ANY_LANES;
        cut.thread_units = (int)ceil_div(cut.units, ANY_LANES);
        cut.rows = 128 / ANY_LANES;
        return cut;
    }
    if (most_blocks > 1 && cut.units > (g.rows.count < sm_count ? part_few : alone)) {
        /* in as many blocks as needed, or as a cluster can have */
        cut.cluster = 2;
        while (cut.cluster < most_blocks &&
               (cut.units > cut.cluster * part_many ||
                (cut.units > cut.cluster * part_few && (modulated || g.rows.count * cut.cluster < 2 * sm_count))))
            cut.cluster *= 2;
    }
    const int64_t part = ceil_div(cut.units, cut.cluster);
    /* Many elements per thread where there are enough rows to fill the GPU anyway. */
    const int64_t warps_many = ceil_div(part * width, 32 * held) * cut.cluster * g.rows.count;
    cut.many = part > part_few ||
               (!modulated && part > 32 * ANY_FEW / width && warps_many >= (int64_t)sm_count * s.gpu.sm_threads / 64);
    const int64_t each = !cut.many ? ANY_FEW : cut.cluster > 1 ? joined : held;
    const int64_t warps = std::min(ceil_div(part, 32 * (each / width)), (int64_t)ANY_THREADS / 32);
    cut.threads = warps * 32;
    cut.thread_units = (int)ceil_div(part, cut.threads);
    cut.rows = cut.threads >= 128 || cut.cluster > 1 ? 1 : 128 / cut.threads;
    return cut;
}
template <typename T, int W, bool MODULATED>
static adze_status norm_launch_any(const cuda_call &s, const norm_params &g, int any)
{
    const norm_cut cut = norm_cut_for(g, s, sizeof(T), W, MODULATED, any);
    if (cut.held)
        return norm_launch_width<T, W, MODULATED>(s, g, cut);
    if (!s.takes(any + 1, true))
        return ADZE_NO_KERNEL;
    return cut.cluster > 1 ? norm_launch_loop<T, true>(s, g, cut) : norm_launch_loop<T, false>(s, g, cut);
}
/* Modulations do not use 16-byte vectors: their parameters, which may be f32, would need too many registers. */
template <typename T>
static adze_status norm_any_as(const cuda_call &s, const norm_params &g, int any)
{
    constexpr int PAIR = sizeof(T) < 4 ? 2 : 1;
    const bool modulated = g.data[GATE] || g.data[SCALE] || g.data[SHIFT] || g.is_f32 >> OUT & 1;
    if (modulated)
        return g.width >= PAIR ? norm_launch_any<T, PAIR, true>(s, g, any) : norm_launch_any<T, 1, true>(s, g, any);
    if (g.width == 16)
        return norm_launch_any<T, VEC<T>, false>(s, g, any);
    return g.width >= PAIR ? norm_launch_any<T, PAIR, false>(s, g, any) : norm_launch_any<T, 1, false>(s, g, any);
}

extern "C" adze_status adze_norm_any_cuda(const cuda_call &s, const norm_params &g, int dtype, int any)
{
    switch (dtype) {
    case ADZE_F32: return norm_any_as<float>(s, g, any);
    case ADZE_F16: return norm_any_as<f16>(s, g, any);
    default: return norm_any_as<bf16>(s, g, any);
    }
}
