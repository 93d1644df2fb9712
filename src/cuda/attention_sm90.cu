/* attention_sm90.cu - attention of many rows on Hopper: which calls attention_wgmma.cuh takes, and its launch. */
#include "attention_run.cuh"
#include "attention_wgmma.cuh"

/* Rows, or heads, follow each other: maps of tensors have no other strides. */
static bool forward(const int64_t (&shape)[4], const int64_t (&stride)[3])
{
    return (shape[0] <= 1 || stride[0] > 0) && (shape[1] <= 1 || stride[1] > 0) && (shape[2] <= 1 || stride[2] > 0);
}

/* Blocks go from tile to tile, or `each` has one. */
template <typename T, class S>
static adze_status wgmma_launch(const cuda_call &s, const attention_params &p, bool each)
{
    constexpr int64_t L2_BYTES = 32 << 20; /* that the keys and values of heads which go together may have */
    const int64_t q_shape[4] = {p.sequences, p.heads, p.m, p.d}, k_shape[4] = {p.sequences, p.kv_heads, p.n, p.d};
    const int64_t v_shape[4] = {p.sequences, p.kv_heads, p.n, p.dv};
    const int64_t tiles = ceil_div(p.m, S::ROWS), heads = (int64_t)p.sequences * p.heads;
    const bool possible = S::SHARED <= s.gpu.block_shared && forward(q_shape, p.q_stride) &&
                          forward(k_shape, p.k_stride) && forward(v_shape, p.v_stride);
    const attention_times t = attention_times_of(s, p);
    const bool faster = !attention_short_fits(s, p) && t.wgmma < std::min({t.in_short, t.few, t.some, t.many});
    if (!s.takes(WGMMA_ROWS, possible, attention_rows_of(p) > 16 && faster))
        return ADZE_NO_KERNEL;
    attention_maps maps;
    constexpr bool BF16 = std::is_same<T, bf16>::value;
    if (!panel_map(maps.q, BF16, p.q, q_shape, p.q_stride, S::ROWS) ||
        !panel_map(maps.k, BF16, p.k, k_shape, p.k_stride, S::KEYS) ||
        !panel_map(maps.v, BF16, p.v, v_shape, p.v_stride, S::KEYS))
        return ADZE_NO_KERNEL;
    const int64_t held = L2_BYTES / ((int64_t)p.n * (p.d + p.dv) * 2) * p.group;
    const int64_t together = held < p.group ? p.group : held < heads ? held : heads;
    const attention_tiles_of of = {(int)tiles, (int)heads, (int)together};
    const int64_t blocks = each || tiles * heads < s.gpu.sm_count ? tiles * heads : s.gpu.sm_count;
    return launch(s, attention_wgmma<T, S>, blocks, dim3(S::THREADS), launch_shape(S::SHARED), p, maps, of);
}
template <typename T>
static adze_status wgmma_run(const cuda_call &s, const attention_params &p)
{
    if (p.d <= 64 && p.dv <= 64)
        return wgmma_launch<T, wgmma_shape<64, 3, 128, 2>>(s, p, false);
    /* Causal tiles differ in their keys. Of many, a multiprocessor is best given the next one when it is free. */
    constexpr int64_t ENOUGH = 6; /* tiles of a multiprocessor */
    typedef wgmma_shape<128, 2, 128, 2> shape;
    const int64_t tiles = ceil_div(p.m, shape::ROWS) * p.sequences * p.heads;
    return wgmma_launch<T, shape>(s, p, p.causal && tiles >= ENOUGH * s.gpu.sm_count);
}
adze_status attention_many(const cuda_call &s, const attention_params &p, bool is_bf16)
{
    const bool takes = s.gpu.sm == 90 && adze_cuda_clusters(s.device) && p.d <= 128 && p.dv <= 128 && p.n > 0 &&
                       p.scale > 0 && p.softcap == 0 && !p.mask_kind && !p.page && !p.packed && !p.k_offsets;
    if (!takes)
        return ADZE_NO_KERNEL;
    return is_bf16 ? wgmma_run<bf16>(s, p) : wgmma_run<f16>(s, p);
}
