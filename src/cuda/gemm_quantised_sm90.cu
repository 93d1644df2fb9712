/* gemm with quantised weights and many tokens on Hopper: the shapes of gemm_quantised_wgmma.cuh, and which of them a
   call takes. */
#include "gemm_quantised_wgmma.cuh"

/* Runs a shape, or with `ask` says only whether it can: ADZE_NO_KERNEL. `time`: what the plan says of it. */
template <typename T, class S>
static adze_status shape_run(const cuda_call &s, const gemm_params &p, bool ask, double *time)
{
    const int64_t tokens = ceil_div(p.m, S::TOKENS), tiles = gemm_tiles(p, p.glu ? S::ROWS / 2 : S::ROWS);
    bool can = s.gpu.sm == 90 && adze_cuda_clusters(s.device) && S::SHARED <= s.gpu.block_shared;
    can = can && p.group % S::DEPTH == 0 && !p.norm && p.batches == 1 && !p.batch_invariant;
    can = can && p.k % weight_vector(S::FORMAT) == 0 && p.rows.stride[GEMM_X][0] >= p.k;
    can = can && tokens < 0x7fffffff / 8 / tiles;
    const int64_t w_bytes = S::FORMAT == OF_U4 ? p.k / 2 : p.k;
    for (const gemm_part &part : p.part)
        can = can && (part.n == 0 || part.w_stride >= w_bytes);
    double least;
    const int parts = can ? quantised_wgmma_parts<S>(s, p, time ? *time : least) : 0;
    if (!can || ask)
        return can ? ADZE_OK : ADZE_NO_KERNEL;
    quantised_wgmma_maps maps = {};
    can = panel_map(maps.x, std::is_same<T, bf16>::value, p.x, {1, 1, p.m, p.k}, {0, 0, p.rows.stride[GEMM_X][0]},
                    S::TOKENS);
    for (int i = 0; i < GEMM_PARTS; i++)
        if (p.part[i].n)
            can =
                can && panel_map_of(maps.w[i], CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, p.part[i].w,
                                    {1, 1, p.part[i].n, w_bytes}, {0, 0, p.part[i].w_stride}, S::ROWS / 2, S::W_ROW);
    if (!can)
        return ADZE_NO_KERNEL;
    return launch(s, gemm_quantised_wgmma<T, S>, tokens * tiles * parts, dim3(S::THREADS),
                  launch_shape(S::SHARED, parts), p, maps, (int)tokens);
}
template <typename T, weight_format F, bool TABLED>
static adze_status format_run(const cuda_call &s, const gemm_params &p, int shape, bool ask, double *time)
{
    switch (shape) {
    case GEMM_QUANTISED_WGMMA_32X128: return shape_run<T, quantised_wgmma_shape<32, 2, F, TABLED>>(s, p, ask, time);
    case GEMM_QUANTISED_WGMMA_32X256: return shape_run<T, quantised_wgmma_shape<32, 4, F, TABLED>>(s, p, ask, time);
    case GEMM_QUANTISED_WGMMA_64X128: return shape_run<T, quantised_wgmma_shape<64, 2, F, TABLED>>(s, p, ask, time);
    case GEMM_QUANTISED_WGMMA_64X256:
        if constexpr (F == OF_F8 && TABLED) /* there are too few registers for it */
            return ADZE_NO_KERNEL;
        else
            return shape_run<T, quantised_wgmma_shape<64, 4, F, TABLED>>(s, p, ask, time);
    default: return shape_run<T, quantised_wgmma_shape<128, 2, F, TABLED>>(s, p, ask, time);
    }
}
template <typename T>
static adze_status dtype_run(const cuda_call &s, const gemm_params &p, int shape, bool ask, double *time)
{
    switch (p.format) {
    case OF_I8:
        return p.group ? format_run<T, OF_I8, true>(s, p, shape, ask, time)
                       : format_run<T, OF_I8, false>(s, p, shape, ask, time);
    case OF_F8:
        return p.group ? format_run<T, OF_F8, true>(s, p, shape, ask, time)
                       : format_run<T, OF_F8, false>(s, p, shape, ask, time);
    default: return format_run<T, OF_U4, true>(s, p, shape, ask, time);
    }
}
static adze_status wgmma_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, bool ask, double *time)
{
    return dtype == ADZE_BF16 ? dtype_run<bf16>(s, p, shape, ask, time) : dtype_run<f16>(s, p, shape, ask, time);
}
extern "C" adze_status gemm_quantised_wgmma_run(const cuda_call &s, const gemm_params &p, int dtype, int shape,
                                                int ask)
{
    return wgmma_run(s, p, dtype, shape, ask, NULL);
}

/* The shape that takes a call, -1: none. */
extern "C" int gemm_quantised_wgmma_choice(const cuda_call &s, const gemm_params &p, int dtype)
{
    int best = -1;
    double least = 1e30, time;
    for (int shape = 0; p.m > 16 && shape < GEMM_QUANTISED_WGMMA_SHAPES; shape++)
        if (wgmma_run(s, p, dtype, shape, true, &time) == ADZE_OK && time < least)
            least = time, best = shape;
    return best;
}
