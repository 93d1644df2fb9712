/* gemm with quantised weights at any address on CUDA: the shapes of gemm_shifted.cuh, and which of them a call takes.
 */
#include "gemm_shifted.cuh"

/* Tiles of rows and tokens, warps, blocks of a multiprocessor. */
template <weight_format F>
using SHIFTED_8 = shifted_shape<2, 1, 16, 1, F>;
template <weight_format F>
using SHIFTED_8_TWICE = shifted_shape<4, 1, 8, 2, F>;
template <weight_format F>
using SHIFTED_16 = shifted_shape<2, 2, 16, 1, F>;
template <weight_format F>
using SHIFTED_32 = shifted_shape<4, 4, 8, 1, F>;

/* Tokens of one launch: as many as the shape has and shared memory takes, so that all launches have about as many. */
template <class S>
static int64_t shifted_tokens(const cuda_call &s, const gemm_params &p)
{
    int64_t most = S::TOKENS;
    while (most > 0 && direct_layout_of<S>(most, p.k, p.group, gemm_has_zero(p)).bytes > (size_t)s.gpu.block_shared)
        most--;
    return most ? ceil_div(p.m, ceil_div(p.m, most)) : 0;
}

/* Runs a shape, or with `ask` says only whether it can: ADZE_NO_KERNEL. */
template <typename T, class S>
static adze_status shifted_shape_run(const cuda_call &s, const gemm_params &all, bool ask)
{
    const int64_t most = 1 << 28;
    /* The order of a sum depends on the warps of a shape, and so on the number of tokens. */
    bool can = adze_cuda_tensor_cores(s.device) && all.k > 0 && all.k < most && all.n < most && all.rows.rank == 1 &&
               all.batches == 1 && !all.norm && !all.batch_invariant;
    can = can && (all.group == 0 || all.group % S::STEP == 0);
    for (const gemm_part &part : all.part)
        can =
            can && (part.n == 0 || (part.scale_dtype == all.part[0].scale_dtype && !part.zero == !all.part[0].zero));
    const int64_t tokens = can ? shifted_tokens<S>(s, all) : 0, rows = all.glu ? S::ROWS / 2 : S::ROWS;
    if (tokens == 0)
        return ADZE_NO_KERNEL;
    /* As many blocks on each multiprocessor, in whole rounds of those that are there at once, unless that leaves them
       less than a tile. */
    int64_t each = ceil_div(all.n, s.gpu.sm_count * rows);
    if (all.n >= s.gpu.sm_count * S::BLOCKS * (all.glu ? 8 : 16))
        each = ceil_div(each, S::BLOCKS) * S::BLOCKS;
    const int64_t blocks = s.gpu.sm_count * each < all.n ? s.gpu.sm_count * each : all.n;
    for (int64_t at = 0; at < all.m && !ask; at += tokens) {
        const gemm_params p = gemm_tokens<T>(all, at, tokens);
        const size_t bytes = direct_layout_of<S>(p.m, p.k, p.group, gemm_has_zero(p)).bytes;
        ADZE_CHECK(launch(s, gemm_shifted<T, S>, blocks, dim3(S::THREADS), launch_shape(bytes), p));
    }
    return ADZE_OK;
}
template <typename T, weight_format F>
static adze_status shifted_format_run(const cuda_call &s, const gemm_params &p, int shape, bool ask)
{
    switch (shape) {
    case GEMM_SHIFTED_8: return shifted_shape_run<T, SHIFTED_8<F>>(s, p, ask);
    case GEMM_SHIFTED_8_TWICE: return shifted_shape_run<T, SHIFTED_8_TWICE<F>>(s, p, ask);
    case GEMM_SHIFTED_16: return shifted_shape_run<T, SHIFTED_16<F>>(s, p, ask);
    default: return shifted_shape_run<T, SHIFTED_32<F>>(s, p, ask);
    }
}
template <typename T>
static adze_status shifted_dtype_run(const cuda_call &s, const gemm_params &p, int shape, bool ask)
{
    return p.format == OF_I8   ? shifted_format_run<T, OF_I8>(s, p, shape, ask)
           : p.format == OF_F8 ? shifted_format_run<T, OF_F8>(s, p, shape, ask)
                               : shifted_format_run<T, OF_U4>(s, p, shape, ask);
}
extern "C" adze_status gemm_shifted_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, int ask)
{
    if (p.format == OF_X || p.x_scale || dtype == ADZE_F32)
        return ADZE_NO_KERNEL;
    return dtype == ADZE_BF16 ? shifted_dtype_run<bf16>(s, p, shape, ask) : shifted_dtype_run<f16>(s, p, shape, ask);
}

/* Where a multiprocessor has more than 32 rows, two blocks on it hide each other's start and end. Their 8 warps are
   enough where each has two steps at most. */
extern "C" int gemm_shifted_choice(const cuda_call &s, const gemm_params &p)
{
    const int64_t rows = ceil_div(p.n * (p.glu ? 2 : 1), s.gpu.sm_count);
    if (p.m == 1 && rows <= 8 && p.k > 512) /* gemm_rows splits k among more warps */
        return -1;
    if (p.m > 16 && rows <= 1) /* so does it here, and of a few short rows of u4 (H200, 2026-11-19) */
        return -1;
    if (p.m > 16 && p.format == OF_U4 && rows <= 8 && p.k <= 1024)
        return -1;
    return p.m <= 8 ? (rows > 32 || p.k <= (p.format == OF_U4 ? 2048 : 1024) ? GEMM_SHIFTED_8_TWICE : GEMM_SHIFTED_8)
           : p.m <= 16 ? GEMM_SHIFTED_16
                       : GEMM_SHIFTED_32;
}
