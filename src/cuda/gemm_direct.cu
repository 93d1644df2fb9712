/* gemm with quantised weights and few tokens on CUDA: the shapes of gemm_direct.cuh, and which of them a call takes.
 */
#include "gemm_direct.cuh"

/* Rows of a block and its warps, steps ahead, blocks of a multiprocessor; by tokens, up to 8 and up to 16. */
template <weight_format F>
using DIRECT_16X8 = direct_shape<1, 1, 8, 4, 2, F>;
template <weight_format F>
using DIRECT_32X16 = direct_shape<2, 1, 16, 2, 1, F>;
template <weight_format F>
using DIRECT_64X8 = direct_shape<4, 1, 8, 1, 2, F>;
template <weight_format F>
using DIRECT_64X16 = direct_shape<4, 1, 16, 1, 1, F>;
template <weight_format F>
using DIRECT_WIDE_32X16 = direct_shape<2, 2, 16, 2, 1, F>;
template <weight_format F>
using DIRECT_WIDE_64X8 = direct_shape<4, 2, 8, 1, 2, F>;

/* Tokens of one launch: as many as the shape has and shared memory takes, so that all launches have about as many. */
template <class S>
static int64_t direct_tokens(const cuda_call &s, const gemm_params &p)
{
    int64_t most = S::TOKENS;
    while (most > 0 && direct_layout_of<S>(most, p.k, p.group, gemm_has_zero(p)).bytes > (size_t)s.gpu.block_shared)
        most--;
    return most ? ceil_div(p.m, ceil_div(p.m, most)) : 0;
}

template <typename T, class S>
static adze_status direct_launch(const cuda_call &s, const gemm_params &all)
{
    const int64_t most = direct_tokens<S>(s, all), of_block = all.glu ? S::ROWS / 2 : S::ROWS;
    /* As many blocks on each multiprocessor, in whole rounds of those that are there at once, unless that leaves them
       less than a tile. */
    int64_t each = ceil_div(all.n, s.gpu.sm_count * of_block);
    if (all.n >= s.gpu.sm_count * S::BLOCKS * (all.glu ? 8 : 16))
        each = ceil_div(each, S::BLOCKS) * S::BLOCKS;
    const int64_t blocks = s.gpu.sm_count * each;
    for (int64_t at = 0; at < all.m; at += most) {
        const gemm_params p = gemm_tokens<T>(all, at, most);
        const size_t bytes = gemm_alone(s, direct_layout_of<S>(p.m, p.k, p.group, gemm_has_zero(p)).bytes, S::BLOCKS);
        ADZE_CHECK(
            launch(s, gemm_direct<T, S>, blocks < p.n ? blocks : p.n, dim3(S::THREADS), launch_shape(bytes), p));
    }
    return ADZE_OK;
}

/* Runs the shape of a variant, or with `ask` says only whether it can: ADZE_NO_KERNEL. */
template <typename T, class S>
static adze_status direct_shape_run(const cuda_call &s, const gemm_params &p, bool ask)
{
    /* Shapes have orders of k of their own, and which one a call takes depends on its tokens. */
    bool can = (p.group == 0 || p.group % S::STEP == 0) && !p.norm && p.batches == 1 && !p.batch_invariant;
    can = can && p.k % (S::FORMAT == OF_F8 ? S::STEP : S::VECTOR) == 0;
    for (const gemm_part &part : p.part)
        can = can && (part.n == 0 || (part.scale_dtype == p.part[0].scale_dtype && !part.zero == !p.part[0].zero));
    if (!can || direct_tokens<S>(s, p) == 0)
        return ADZE_NO_KERNEL;
    return ask ? ADZE_OK : direct_launch<T, S>(s, p);
}
template <typename T, weight_format F>
static adze_status direct_format_run(const cuda_call &s, const gemm_params &p, int shape, bool ask)
{
    switch (shape) {
    case GEMM_DIRECT_16X8: return direct_shape_run<T, DIRECT_16X8<F>>(s, p, ask);
    case GEMM_DIRECT_32X16: return direct_shape_run<T, DIRECT_32X16<F>>(s, p, ask);
    case GEMM_DIRECT_64X8: return direct_shape_run<T, DIRECT_64X8<F>>(s, p, ask);
    case GEMM_DIRECT_64X16: return direct_shape_run<T, DIRECT_64X16<F>>(s, p, ask);
    case GEMM_DIRECT_WIDE_32X16: return direct_shape_run<T, DIRECT_WIDE_32X16<F>>(s, p, ask);
    default: return direct_shape_run<T, DIRECT_WIDE_64X8<F>>(s, p, ask);
    }
}
template <typename T>
static adze_status direct_dtype_run(const cuda_call &s, const gemm_params &p, int shape, bool ask)
{
    return p.format == OF_I8   ? direct_format_run<T, OF_I8>(s, p, shape, ask)
           : p.format == OF_F8 ? direct_format_run<T, OF_F8>(s, p, shape, ask)
                               : direct_format_run<T, OF_U4>(s, p, shape, ask);
}
extern "C" adze_status gemm_direct_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, int ask)
{
    return dtype == ADZE_BF16 ? direct_dtype_run<bf16>(s, p, shape, ask) : direct_dtype_run<f16>(s, p, shape, ask);
}

/* The choice, by tokens and by rows that a multiprocessor has: the first rule that a call is within. From a
   sweep on an H200 (2026-11-17) over 4096 x 4096 to 14336 x 4096. */
static const struct {
    int64_t tokens, rows;
    int shape;
} DIRECT_RULES[] = {
    {8, 16, GEMM_DIRECT_16X8},
    {8, 32, GEMM_DIRECT_32X16},
    {8, 64, GEMM_DIRECT_64X16},
    {8, INT64_MAX, GEMM_DIRECT_64X8},
    {INT64_MAX, 32, GEMM_DIRECT_WIDE_32X16},
    {INT64_MAX, INT64_MAX, GEMM_DIRECT_WIDE_64X8},
};
extern "C" int gemm_direct_choice(const cuda_call &s, const gemm_params &p)
{
    const int64_t rows = ceil_div(p.n * (p.glu ? 2 : 1), s.gpu.sm_count);
    for (const auto &rule : DIRECT_RULES)
        if (p.m <= rule.tokens && rows <= rule.rows)
            return rule.shape;
    return GEMM_DIRECT_WIDE_64X8;
}
