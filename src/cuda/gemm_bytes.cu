/* gemm with quantised x on CUDA: the shapes of gemm_bytes.cuh, gemm_tile.cuh and gemm_any.cuh for it, and which of
   them a call takes. */
#include "gemm_bytes.cuh"

#include "gemm_any.cuh"
#include "gemm_tile.cuh"

/* Tiles of rows and tokens, warps, steps ahead, blocks of a multiprocessor. An f8e4m3 takes more
   registers as f16. */
typedef bytes_direct_shape<1, 1, 16, 4, 1> DIRECT_16X16;
typedef bytes_direct_shape<2, 1, 16, 3, 1> DIRECT_32X16;
typedef bytes_direct_shape<2, 1, 8, 4, 1> DIRECT_32X16_F8;
typedef bytes_direct_shape<2, 2, 8, 4, 1> DIRECT16_32X8;
typedef bytes_direct_shape<2, 2, 8, 3, 1> DIRECT16_32X8_F8;
typedef bytes_direct_shape<2, 4, 8, 2, 1> DIRECT32_32X8;
typedef tile_shape<16, 64, 16, 64, 4, 4> SLICED_16X64;
typedef tile_shape<32, 64, 32, 64, 4, 4> SLICED_32X64;
typedef tile_shape<64, 64, 64, 64, 3, 4> SLICED_64X64;
typedef tile_shape<64, 64, 32, 64, 3, 4> SLICED_64X64_F8; /* as f16 a warp's operands take more registers */
typedef tile_shape<32, 64, 32, 16, 5> TILE_32X64;
typedef tile_shape<64, 64, 32, 32, 3> TILE_64X64;
typedef tile_shape<128, 128, 64, 32, 3> TILE_128X128;

/* As gemm_vectors of gemm.cu, for bytes. Before sm_80 there are tensor cores for i8 alone. */
static bool bytes_vectors(const cuda_call &s, const gemm_params &p)
{
    const int64_t most = 1 << 28;
    bool ok = p.format == OF_I8 || adze_cuda_tensor_cores(s.device);
    ok = ok && p.k % 16 == 0 && p.k > 0 && p.k < most && p.n < most && p.rows.rank == 1;
    ok = ok && (uintptr_t)p.x % 16 == 0 && p.rows.stride[GEMM_X][0] % 16 == 0;
    for (const gemm_part &part : p.part)
        ok = ok && (part.n == 0 || ((uintptr_t)part.w % 16 == 0 && part.w_stride % 16 == 0));
    return ok && ceil_div(p.m, 16) * gemm_tiles(p, 32) * 8 < 0x7fffffff;
}

template <class S, typename SUM>
static adze_status direct_launch(const cuda_call &s, const gemm_params &p)
{
    /* As many blocks on each multiprocessor, in whole rounds of those that are there at once. */
    int64_t each = ceil_div(p.n, s.gpu.sm_count * (p.glu ? S::ROWS / 2 : S::ROWS));
    if (p.n >= s.gpu.sm_count * S::BLOCKS * (p.glu ? 8 : 16))
        each = ceil_div(each, S::BLOCKS) * S::BLOCKS;
    const int64_t blocks = s.gpu.sm_count * each;
    return launch(s, gemm_bytes_direct<S, SUM>, blocks < p.n ? blocks : p.n, dim3(S::THREADS),
                  launch_shape(gemm_alone(s, (size_t)S::shared(p.m), S::BLOCKS)), p);
}
template <class S, class S_F8 = S>
static adze_status bytes_direct(const cuda_call &s, const gemm_params &p, bool ask)
{
    const bool ordered = p.format == OF_F8 && p.batch_invariant; /* shapes have orders of their own */
    if (!bytes_vectors(s, p) || p.m > S::TOKENS || S::shared(p.m) > s.gpu.block_shared || ordered)
        return ADZE_NO_KERNEL;
    if (ask)
        return ADZE_OK;
    return p.format == OF_I8 ? direct_launch<S, int>(s, p) : direct_launch<S_F8, float>(s, p);
}

template <class S, class S_F8 = S>
static adze_status bytes_tile(const cuda_call &s, const gemm_params &p, bool ask)
{
    const bool ordered = S::SLICES > 1 && p.format == OF_F8 && p.batch_invariant; /* slices have their own order */
    if (!bytes_vectors(s, p) || S::SHARED > s.gpu.block_shared || ordered)
        return ADZE_NO_KERNEL;
    if (ask)
        return ADZE_OK;
    return p.format == OF_I8 ? tile_launch<f16, S, tile_i8>(s, p) : tile_launch<f16, S_F8, tile_f8>(s, p);
}

template <typename T, int TOKENS, weight_format F>
static adze_status bytes_any(const cuda_call &s, const gemm_params &p)
{
    const int64_t tokens = ceil_div(p.m, TOKENS), tiles = gemm_tiles(p, p.glu ? ANY_ROWS / 2 : ANY_ROWS);
    if (tokens > 0x7fffffff || tiles > 0x7fffffff / tokens)
        return adze_fail(ADZE_NO_KERNEL, "gemm: %lld tokens and %lld rows of weights are too many", (long long)p.m,
                         (long long)p.n);
    return launch(s, gemm_any<T, TOKENS, F, true>, tokens * tiles, dim3(ANY_GEMM_THREADS), launch_shape(0), p,
                  (int)tokens);
}
template <int TOKENS>
static adze_status bytes_any(const cuda_call &s, const gemm_params &p, int dtype)
{
    const bool i8 = p.format == OF_I8;
    switch (dtype) {
    case ADZE_F32: return i8 ? bytes_any<float, TOKENS, OF_I8>(s, p) : bytes_any<float, TOKENS, OF_F8>(s, p);
    case ADZE_F16: return i8 ? bytes_any<f16, TOKENS, OF_I8>(s, p) : bytes_any<f16, TOKENS, OF_F8>(s, p);
    default: return i8 ? bytes_any<bf16, TOKENS, OF_I8>(s, p) : bytes_any<bf16, TOKENS, OF_F8>(s, p);
    }
}

/* Runs a shape, or with `ask` says only whether it can: ADZE_NO_KERNEL. dtype is out's. */
extern "C" adze_status gemm_bytes_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, int ask)
{
    switch (shape) {
    case GEMM_BYTES_DIRECT_16X16: return bytes_direct<DIRECT_16X16>(s, p, ask);
    case GEMM_BYTES_DIRECT_32X16: return bytes_direct<DIRECT_32X16, DIRECT_32X16_F8>(s, p, ask);
    case GEMM_BYTES_DIRECT16_32X8: return bytes_direct<DIRECT16_32X8, DIRECT16_32X8_F8>(s, p, ask);
    case GEMM_BYTES_DIRECT32_32X8: return bytes_direct<DIRECT32_32X8>(s, p, ask);
    case GEMM_BYTES_SLICED_16X64: return bytes_tile<SLICED_16X64>(s, p, ask);
    case GEMM_BYTES_SLICED_32X64: return bytes_tile<SLICED_32X64>(s, p, ask);
    case GEMM_BYTES_SLICED_64X64: return bytes_tile<SLICED_64X64, SLICED_64X64_F8>(s, p, ask);
    case GEMM_BYTES_32X64: return bytes_tile<TILE_32X64>(s, p, ask);
    case GEMM_BYTES_64X64: return bytes_tile<TILE_64X64>(s, p, ask);
    case GEMM_BYTES_128X128: return bytes_tile<TILE_128X128>(s, p, ask);
    case GEMM_BYTES_WGMMA_256:
    case GEMM_BYTES_WGMMA_128:
        return bytes_vectors(s, p) ? gemm_wgmma_run(s, p, shape == GEMM_BYTES_WGMMA_256, ask) : ADZE_NO_KERNEL;
    case GEMM_BYTES_ANY_8: return ask ? ADZE_OK : bytes_any<8>(s, p, dtype);
    default: return ask ? ADZE_OK : bytes_any<64>(s, p, dtype);
    }
}

/* From sweeps on an H200 (2026-11-17) over 4096 x 4096 and 14336 x 4096: where a multiprocessor has few rows, up to
   32 tokens go straight into registers, and elsewhere k is sliced. Many tokens take the tiles that leave least of the
   last round of them empty, and the larger of two that are alike. */
extern "C" int gemm_bytes_choice(const cuda_call &s, const gemm_params &p)
{
    const int64_t large = ceil_div(p.m, 128) * gemm_tiles(p, p.glu ? 64 : 128);
    const int64_t larger = ceil_div(p.m, 128) * gemm_tiles(p, p.glu ? 128 : 256);
    const bool wide = 2 * ceil_div(larger, s.gpu.sm_count) <= ceil_div(large, s.gpu.sm_count) * 11 / 10;
    const bool many = p.format == OF_I8 && p.m > 64 && 2 * large >= s.gpu.sm_count;
    const int none = GEMM_BYTES_SHAPES;
    const int64_t rows = ceil_div(p.n * (p.glu ? 2 : 1), s.gpu.sm_count);
    const bool larger_slices = p.format == OF_I8 && rows > 64;
    const int preferred[] = {rows > 64 || p.m > 32           ? none
                             : p.m > 16                      ? GEMM_BYTES_DIRECT32_32X8
                             : p.m <= 8 && rows <= 16        ? GEMM_BYTES_DIRECT_16X16
                             : p.m <= 8 && p.format == OF_F8 ? GEMM_BYTES_DIRECT_32X16
                                                             : GEMM_BYTES_DIRECT16_32X8,
                             p.m <= 16                    ? GEMM_BYTES_SLICED_16X64
                             : p.m <= 32                  ? GEMM_BYTES_SLICED_32X64
                             : p.m <= 64 && larger_slices ? GEMM_BYTES_SLICED_64X64
                             : p.m <= 64                  ? GEMM_BYTES_SLICED_32X64
                                                          : none,
                             !many  ? none
                             : wide ? GEMM_BYTES_WGMMA_256
                                    : GEMM_BYTES_WGMMA_128,
                             p.m > 64 && large >= s.gpu.sm_count ? GEMM_BYTES_128X128 : none,
                             p.m > 32 ? GEMM_BYTES_64X64 : GEMM_BYTES_32X64,
                             GEMM_BYTES_32X64};
    for (const int shape : preferred)
        if (shape != none && gemm_bytes_run(s, p, 0, shape, 1) == ADZE_OK)
            return shape;
    return p.m <= 8 ? GEMM_BYTES_ANY_8 : GEMM_BYTES_ANY_64;
}
