/* gemm of one or two tokens on CUDA: the shapes of gemm_bulk.cuh. */
#include "gemm_bulk.cuh"

/* Weights of x's dtype: with one block on a multiprocessor, and with room for the next kernel's. */
template <int M>
using BULK_16X4096X2 = bulk_shape<M, 16, 4096, 2>;
template <int M>
using BULK_16X2048X3 = bulk_shape<M, 16, 2048, 3>;
/* Quantised ones: two blocks. */
template <int M, weight_format F>
using BULK_8X2048X4 = bulk_shape<M, 8, 2048, 4, F>;
template <int M, weight_format F>
using BULK_8X4096X2 = bulk_shape<M, 8, 4096, 2, F>;

template <typename T, class S>
static adze_status bulk_launch(const cuda_call &s, const gemm_params &p, int each, bool ask)
{
    const int64_t most = (int64_t)s.gpu.sm_count * each, blocks = p.n < most ? p.n : most;
    const size_t bytes = bulk_shared<S>(p.k, ceil_div(p.n, blocks) * (p.glu ? 2 : 1));
    bool can = p.m <= S::TOKENS && bytes <= (size_t)s.gpu.block_shared && !p.batch_invariant;
    if (S::WEIGHTS != OF_X)
        can = can && p.k % S::VECTOR == 0 && p.group % S::VECTOR == 0 && !p.norm && p.batches == 1;
    if (!can)
        return ADZE_NO_KERNEL;
    if (ask)
        return ADZE_OK;
    return launch(s, gemm_bulk<T, S>, blocks, dim3(S::THREADS), launch_shape(bytes, 1, p.batches), p);
}
template <typename T, int M, weight_format F>
static adze_status quantised_run(const cuda_call &s, const gemm_params &p, int shape, bool ask)
{
    return shape == GEMM_BULK_SHORT ? bulk_launch<T, BULK_8X2048X4<M, F>>(s, p, 2, ask)
                                    : bulk_launch<T, BULK_8X4096X2<M, F>>(s, p, 2, ask);
}
template <typename T, int M>
static adze_status bulk_run(const cuda_call &s, const gemm_params &p, int shape, bool ask)
{
    switch (p.format) {
    case OF_I8: return quantised_run<T, M, OF_I8>(s, p, shape, ask);
    case OF_F8: return quantised_run<T, M, OF_F8>(s, p, shape, ask);
    case OF_U4: return quantised_run<T, M, OF_U4>(s, p, shape, ask);
    default:
        return shape == GEMM_BULK_SHORT ? bulk_launch<T, BULK_16X2048X3<M>>(s, p, 1, ask)
                                        : bulk_launch<T, BULK_16X4096X2<M>>(s, p, 1, ask);
    }
}
template <typename T>
static adze_status bulk_run(const cuda_call &s, const gemm_params &p, int shape, bool ask)
{
    return p.m == 1 ? bulk_run<T, 1>(s, p, shape, ask) : p.m == 2 ? bulk_run<T, 2>(s, p, shape, ask) : ADZE_NO_KERNEL;
}
extern "C" adze_status gemm_bulk_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, int ask)
{
    if (!adze_cuda_clusters(s.device))
        return ADZE_NO_KERNEL;
    return dtype == ADZE_BF16 ? bulk_run<bf16>(s, p, shape, ask) : bulk_run<f16>(s, p, shape, ask);
}
