/* gemm with quantised weights and many tokens on CUDA: the shapes of gemm_quantised_tile.cuh, and which of them a
   call takes. */
#include "gemm_quantised_tile.cuh"

/* Tokens of a block and of a warp, strips of 64 rows, slices, chunks of a stage, stages. A multiprocessor has
   two blocks of TWICE, which older GPUs have the shared memory for too. */
template <weight_format F, bool TABLED>
using TILE_32X128 = quantised_tile_shape<32, 32, 2, 4, 4, F == OF_U4 ? 6 : 4, F, TABLED>;
template <weight_format F, bool TABLED>
using TILE_64X128 = quantised_tile_shape<64, 64, 2, 4, 4, F == OF_U4 ? 4 : 3, F, TABLED>;
template <weight_format F, bool TABLED>
using TILE_64X128_TWICE = quantised_tile_shape<64, 64, 2, 2, 2, 3, F, TABLED>;
/* Runs the shape of a variant, or with `ask` says only whether it can: ADZE_NO_KERNEL. */
template <typename T, class S>
static adze_status shape_run(const cuda_call &s, const gemm_params &p, bool ask)
{
    /* Which tiles and parts of k a call takes depends on its tokens. */
    bool can = (p.group == 0 || p.group % S::CHUNK == 0) && !p.norm && p.batches == 1 && !p.batch_invariant;
    can = can && p.k % weight_vector(S::FORMAT) == 0 && S::SHARED <= s.gpu.block_shared;
    can = can && ceil_div(p.m, S::TOKENS) * gemm_tiles(p, S::STRIPS * 4) * 8 < 0x7fffffff;
    const int64_t stride_most = 0x7fffffff / 2; /* bytes, within which the kernel counts in 32 bits */
    can = can && std::abs(p.rows.stride[GEMM_X][0]) < stride_most;
    for (const gemm_part &part : p.part)
        can = can && std::abs(part.w_stride) < stride_most;
    if (!can)
        return ADZE_NO_KERNEL;
    return ask ? ADZE_OK : quantised_tile_launch<T, S>(s, p);
}
template <typename T, weight_format F, bool TABLED>
static adze_status format_run(const cuda_call &s, const gemm_params &p, int shape, bool ask)
{
    switch (shape) {
    case GEMM_QUANTISED_TILE_32X128: return shape_run<T, TILE_32X128<F, TABLED>>(s, p, ask);
    case GEMM_QUANTISED_TILE_64X128: return shape_run<T, TILE_64X128<F, TABLED>>(s, p, ask);
    default: return shape_run<T, TILE_64X128_TWICE<F, TABLED>>(s, p, ask);
    }
}
template <typename T, bool TABLED>
static adze_status tabled_run(const cuda_call &s, const gemm_params &p, int shape, bool ask)
{
    return p.format == OF_I8   ? format_run<T, OF_I8, TABLED>(s, p, shape, ask)
           : p.format == OF_F8 ? format_run<T, OF_F8, TABLED>(s, p, shape, ask)
                               : format_run<T, OF_U4, TABLED>(s, p, shape, ask);
}
template <typename T>
static adze_status dtype_run(const cuda_call &s, const gemm_params &p, int shape, bool ask)
{
    return p.group || gemm_has_zero(p) ? tabled_run<T, true>(s, p, shape, ask)
                                       : tabled_run<T, false>(s, p, shape, ask);
}
extern "C" adze_status gemm_quantised_tile_run(const cuda_call &s, const gemm_params &p, int dtype, int shape,
                                               int ask)
{
    return dtype == ADZE_BF16 ? dtype_run<bf16>(s, p, shape, ask) : dtype_run<f16>(s, p, shape, ask);
}

/* The shape that takes a call, -1: none. Few tokens are the other kernels'. From a sweep on an H200 (2026-11-18) over
   1024 x 2048, 4096 x 4096, 14336 x 4096 and 4096 x 14336, i8 and u4: tiles of 32 tokens are faster, as long as those
   of 64 leave multiprocessors without one. */
extern "C" int gemm_quantised_tile_choice(const cuda_call &s, const gemm_params &p, int dtype)
{
    const int64_t tiles = ceil_div(p.m, 64) * gemm_tiles(p, p.glu ? 64 : 128);
    const bool few = p.m <= 32 || (p.m <= 64 && tiles * 4 < s.gpu.sm_count * 3);
    const int preferred[] = {few                       ? GEMM_QUANTISED_TILE_32X128
                             : tiles <= s.gpu.sm_count ? GEMM_QUANTISED_TILE_64X128
                                                       : GEMM_QUANTISED_TILE_64X128_TWICE,
                             GEMM_QUANTISED_TILE_64X128_TWICE};
    for (const int shape : preferred)
        if (p.m > 16 && gemm_quantised_tile_run(s, p, dtype, shape, 1) == ADZE_OK)
            return shape;
    return -1;
}
