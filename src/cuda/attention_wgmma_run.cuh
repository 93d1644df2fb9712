/* attention_wgmma_run.cuh - which shape of attention_wgmma.cuh a call takes, if any, and its launch. */
#ifndef ADZE_CUDA_ATTENTION_WGMMA_RUN_CUH
#define ADZE_CUDA_ATTENTION_WGMMA_RUN_CUH

#include "attention_run.cuh"
#include "attention_wgmma.cuh"

/* The time of a step, in the unit of attention_times: of a block that is alone on its multiprocessor, and of two
   blocks that share one. All are fitted to times on an H200 (2026-11-18), but for the 64 rows of heads beyond 128,
   which are an estimate. */
struct wgmma_cost {
    double alone, shared;
};
template <class S>
static double wgmma_time(const cuda_call &s, const attention_params &p, wgmma_cost cost)
{
    constexpr double CALL = 3, TILE = 1.7; /* fixed costs */
    /* Where a head has one tile, its keys come from memory, unless all are in L2: 290 steps of 0.85 took 363 us
       (H200, 2026-11-19). */
    constexpr double COLD = 1.45, L2_BYTES = 32 << 20;
    const double bytes = (double)p.sequences * p.kv_heads * p.n * (p.d + p.dv) * 2;
    const double slower = p.m <= S::ROWS && bytes > L2_BYTES ? COLD : 1;
    const attention_extent steps = attention_steps_of(p, S::ROWS, S::KEYS);
    const int64_t tiles = ceil_div(p.m, S::ROWS) * p.sequences * p.heads, sms = s.gpu.sm_count;
    /* The keys of a block's first steps come from memory too, and the fixed cost is then less: from all variants on
       random calls (H200, 2026-11-19). The costs of calls with a mask or a softcap were fitted without that. */
    const bool plain = !p.mask_kind && p.softcap == 0;
    const double fixed = plain ? 2 : CALL, first = plain ? std::min(steps.most, 4.0) : 0;
    const double longest = fixed + TILE + (first * COLD + (steps.most - first) * slower) * cost.alone;
    if (tiles <= sms)
        return longest;
    const double rounds = (double)ceil_div(tiles, sms * S::BLOCKS), step = S::BLOCKS > 1 ? cost.shared : cost.alone;
    return std::max(longest, CALL + rounds * (TILE + steps.seen * step * slower));
}

/* Blocks go from tile to tile. Of causal tiles, which differ in their keys, the ones with most come first, and blocks
   get the same sum of keys; but where not all heads go together each block has one tile: a multiprocessor is best
   given the next when it is free. */
template <typename T, class S, bool CHANGED>
static adze_status wgmma_launch(const cuda_call &s, const attention_params &p)
{
    constexpr int64_t L2_BYTES = 32 << 20; /* that the keys and values of heads which go together may have */
    const int64_t q_shape[4] = {p.sequences, p.heads, p.m, p.d}, k_shape[4] = {p.sequences, p.kv_heads, p.n, p.d};
    const int64_t v_shape[4] = {p.sequences, p.kv_heads, p.n, p.dv};
    const int64_t tiles = ceil_div(p.m, S::ROWS), heads = (int64_t)p.sequences * p.heads;
    attention_maps maps;
    constexpr bool BF16 = std::is_same<T, bf16>::value;
    if (!panel_map(maps.q, BF16, p.q, q_shape, p.q_stride, S::ROWS) ||
        !panel_map(maps.k, BF16, p.k, k_shape, p.k_stride, S::KEYS) ||
        !panel_map(maps.v, BF16, p.v, v_shape, p.v_stride, S::KEYS))
        return ADZE_NO_KERNEL;
    const int64_t held = L2_BYTES / ((int64_t)p.n * (p.d + p.dv) * 2) * p.group;
    const int64_t together = held < p.group ? p.group : held < heads ? held : heads;
    const attention_tiles_of of = {(int)tiles, (int)heads, (int)together};
    const int64_t sms = s.gpu.sm_count, all = tiles * heads;
    const bool each = S::BLOCKS == 1 && p.causal && together < heads;
    return launch(s, attention_wgmma<T, S, CHANGED>, each ? all : std::min(all, sms * S::BLOCKS), dim3(S::THREADS),
                  launch_shape(S::SHARED), p, maps, of);
}
/* The shapes for a head size: of 64 rows, 128 and 192, with what their steps take. Steps have as many keys as shared
   memory and registers have room for. NONE is never taken. */
struct NONE {
};
template <class S64, class S128, class S192 = NONE>
struct wgmma_shapes {
    wgmma_cost cost[3];
};
template <class S>
static double wgmma_time_of(const cuda_call &s, const attention_params &p, wgmma_cost cost)
{
    if constexpr (std::is_same<S, NONE>::value)
        return INFINITY;
    else
        return wgmma_time<S>(s, p, cost);
}
template <typename T, class S, bool CHANGED>
static adze_status wgmma_take(const cuda_call &s, const attention_params &p, int variant, bool preferred)
{
    if constexpr (!std::is_same<S, NONE>::value)
        if (s.takes(variant, S::SHARED <= s.gpu.block_shared, preferred))
            return wgmma_launch<T, S, CHANGED>(s, p);
    return ADZE_NO_KERNEL;
}
/* CHANGED: there is a mask, or a softcap. */
template <typename T, bool CHANGED = false, class S64, class S128, class S192>
static adze_status wgmma_run(const cuda_call &s, const attention_params &p, const wgmma_shapes<S64, S128, S192> &of)
{
    const attention_times others = attention_times_of(s, p);
    const double time[3] = {wgmma_time_of<S64>(s, p, of.cost[0]), wgmma_time_of<S128>(s, p, of.cost[1]),
                            wgmma_time_of<S192>(s, p, of.cost[2])};
    const double least = std::min({time[0], time[1], time[2]});
    const bool faster =
        attention_rows_of(p) > 16 && least < std::min({others.in_short, others.few, others.some, others.many});
    adze_status status = wgmma_take<T, S64, CHANGED>(s, p, WGMMA_64, faster && time[0] == least);
    if (status == ADZE_NO_KERNEL)
        status = wgmma_take<T, S128, CHANGED>(s, p, WGMMA_128, faster && time[1] == least);
    return status == ADZE_NO_KERNEL ? wgmma_take<T, S192, CHANGED>(s, p, WGMMA_192, faster && time[2] == least)
                                    : status;
}
/* Whether wgmma takes the call at all. */
static inline bool wgmma_takes(const cuda_call &s, const attention_params &p)
{
    return s.gpu.sm == 90 && adze_cuda_clusters(s.device) && p.d <= 256 && p.dv <= 256 && p.n > 0 && p.scale > 0 &&
           !p.page && !p.packed && !p.k_offsets && attention_forward(p, p.m, p.heads, p.q_stride) &&
           attention_forward(p, p.n, p.kv_heads, p.k_stride) && attention_forward(p, p.n, p.kv_heads, p.v_stride);
}

#endif
