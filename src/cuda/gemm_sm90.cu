/* gemm_sm90.cu - products of quantised x and many tokens on Hopper: which calls gemm_wgmma.cuh takes, its launch. */
#include "gemm_wgmma.cuh"

typedef bytes_shape<256, 4> BYTES_128X256;
typedef bytes_shape<128, 6> BYTES_128X128;

template <class S, typename SUM>
static adze_status bytes_launch(const cuda_call &s, const gemm_params &p, bool ask)
{
    const int64_t tokens = ceil_div(p.m, S::TOKENS), rows = gemm_tiles(p, p.glu ? S::ROWS / 2 : S::ROWS);
    bool can = s.gpu.sm == 90 && adze_cuda_clusters(s.device) && S::SHARED <= s.gpu.block_shared;
    can = can && p.rows.stride[GEMM_X][0] >= p.k && tokens < 0x7fffffff / rows;
    for (const gemm_part &part : p.part)
        can = can && (part.n == 0 || part.w_stride >= p.k);
    if (!can || ask)
        return can ? ADZE_OK : ADZE_NO_KERNEL;
    bytes_maps maps = {};
    can = panel_map_of(maps.x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, p.x, {1, 1, p.m, p.k},
                       {0, 0, p.rows.stride[GEMM_X][0]}, S::TOKENS);
    for (int i = 0; i < GEMM_PARTS; i++)
        if (p.part[i].n)
            can = can && panel_map_of(maps.w[i], CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, p.part[i].w,
                                      {1, 1, p.part[i].n, p.k}, {0, 0, p.part[i].w_stride}, S::ROWS / 2);
    if (!can)
        return ADZE_NO_KERNEL;
    const int64_t all = tokens * rows, blocks = all < s.gpu.sm_count ? all : s.gpu.sm_count;
    const bytes_tiles tiles = {(int)tokens, (int)all};
    return launch(s, gemm_wgmma<S, SUM>, blocks, dim3(S::THREADS), launch_shape(S::SHARED), p, maps, tiles);
}

/* Runs the shape with 256 rows or the one with 128, or with `ask` says only whether it can. f8e4m3 has the latter.
   The caller has seen that rows are of 16 bytes. */
extern "C" adze_status gemm_wgmma_run(const cuda_call &s, const gemm_params &p, int wide, int ask)
{
    if (p.format == OF_F8)
        return wide || p.batch_invariant ? ADZE_NO_KERNEL : bytes_launch<BYTES_128X128, float>(s, p, ask);
    return wide ? bytes_launch<BYTES_128X256, int>(s, p, ask) : bytes_launch<BYTES_128X128, int>(s, p, ask);
}
