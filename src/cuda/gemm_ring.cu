/* gemm with quantised weights and few tokens on CUDA: the shapes of gemm_ring.cuh, and which of them a call takes. */
#include "gemm_ring.cuh"

/* Warps and units under way, blocks of a multiprocessor. */
template <weight_format F>
using RING_8 = ring_shape<8, 4, 2, F>;
template <weight_format F>
using RING_16 = ring_shape<16, 4, 1, F>;

/* Blocks of a launch: `each` on a multiprocessor, or more where the rows would be more than MOST_PASSES. */
constexpr int64_t MOST_PASSES = 16, MOST_NORMED = 1 << 16; /* the sums of a norm have the room of those of passes */
template <class S>
static int64_t ring_blocks(const cuda_call &s, const gemm_params &p, int64_t each)
{
    const int64_t blocks = s.gpu.sm_count * each, rows = ceil_div(p.n * (p.glu ? 2 : 1), blocks);
    const int64_t all = blocks * ceil_div(rows, MOST_PASSES * S::ROWS);
    return all < p.n ? all : p.n;
}

/* Tokens of one launch: as many as the shape has and shared memory takes, so that all launches have about as many. */
template <class S>
static int64_t ring_tokens(const cuda_call &s, const gemm_params &p, int64_t passes)
{
    int64_t most = S::TOKENS;
    while (most > 0 && ring_layout_of<S>(passes, most, p.k).bytes > (size_t)s.gpu.block_shared)
        most--;
    return most ? ceil_div(p.m, ceil_div(p.m, most)) : 0;
}

/* Runs the shape of a variant with `each` blocks on a multiprocessor, or with `ask` says only whether it can:
   ADZE_NO_KERNEL. */
template <typename T, class S>
static adze_status ring_launch(const cuda_call &s, const gemm_params &all, int64_t each, bool ask)
{
    const int64_t blocks = ring_blocks<S>(s, all, each), passes = ring_passes<S>(all, blocks);
    const int64_t most = ring_tokens<S>(s, all, passes);
    /* Which tokens are of one launch, and the order of k, depend on how many there are. */
    bool can = most > 0 && (all.group == 0 || all.group % S::STEP == 0) && all.k % S::VECTOR == 0 &&
               all.batches == 1 && !all.batch_invariant && (!all.norm || all.k <= MOST_NORMED);
    for (const gemm_part &part : all.part)
        can =
            can && (part.n == 0 || (part.scale_dtype == all.part[0].scale_dtype && !part.zero == !all.part[0].zero));
    if (!can)
        return ADZE_NO_KERNEL;
    for (int64_t at = 0; at < all.m && !ask; at += most) {
        const gemm_params p = gemm_tokens<T>(all, at, most);
        const size_t bytes = gemm_alone(s, ring_layout_of<S>(passes, p.m, p.k).bytes, S::BLOCKS);
        ADZE_CHECK(launch(s, gemm_ring<T, S>, blocks, dim3(S::THREADS), launch_shape(bytes), p, (int)passes));
    }
    return ADZE_OK;
}
template <typename T, weight_format F>
static adze_status ring_format_run(const cuda_call &s, const gemm_params &p, int shape, bool ask)
{
    switch (shape) {
    case GEMM_RING_8: return ring_launch<T, RING_8<F>>(s, p, 1, ask);
    case GEMM_RING_8_TWICE: return ring_launch<T, RING_8<F>>(s, p, 2, ask);
    default: return ring_launch<T, RING_16<F>>(s, p, 1, ask);
    }
}
template <typename T>
static adze_status ring_dtype_run(const cuda_call &s, const gemm_params &p, int shape, bool ask)
{
    return p.format == OF_I8   ? ring_format_run<T, OF_I8>(s, p, shape, ask)
           : p.format == OF_F8 ? ring_format_run<T, OF_F8>(s, p, shape, ask)
                               : ring_format_run<T, OF_U4>(s, p, shape, ask);
}
extern "C" adze_status gemm_ring_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, int ask)
{
    if (p.format == OF_X || p.m == 0 || p.n == 0)
        return ADZE_NO_KERNEL;
    return dtype == ADZE_BF16 ? ring_dtype_run<bf16>(s, p, shape, ask) : ring_dtype_run<f16>(s, p, shape, ask);
}
