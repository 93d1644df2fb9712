/* gemm of one or two tokens on CUDA: the shapes of gemm_bulk.cuh. */
#include "gemm_bulk.cuh"

template <int M>
using BULK_16X2048X3 = bulk_shape<M, 16, 2048, 3>;
template <int M>
using BULK_8X4096X3 = bulk_shape<M, 8, 4096, 3>;
template <int M>
using BULK_16X4096X2 = bulk_shape<M, 16, 4096, 2>;

template <typename T, class S>
static adze_status bulk_launch(const cuda_call &s, const gemm_params &p, bool ask)
{
    const int64_t blocks = p.n < s.gpu.sm_count ? p.n : s.gpu.sm_count;
    const size_t bytes = bulk_shared<S>(p.k, ceil_div(p.n, blocks) * (p.glu ? 2 : 1));
    if (p.m > S::TOKENS || bytes > (size_t)s.gpu.block_shared)
        return ADZE_NO_KERNEL;
    if (ask)
        return ADZE_OK;
    return launch(s, gemm_bulk<T, S>, blocks, dim3(S::THREADS), launch_shape(bytes, 1, p.batches), p);
}
template <typename T, int M>
static adze_status bulk_run(const cuda_call &s, const gemm_params &p, int shape, bool ask)
{
    switch (shape) {
    case 0: return bulk_launch<T, BULK_16X2048X3<M>>(s, p, ask);
    case 1: return bulk_launch<T, BULK_8X4096X3<M>>(s, p, ask);
    default: return bulk_launch<T, BULK_16X4096X2<M>>(s, p, ask);
    }
}
template <typename T>
static adze_status bulk_run(const cuda_call &s, const gemm_params &p, int shape, bool ask)
{
    return p.m == 1 ? bulk_run<T, 1>(s, p, shape, ask) : p.m == 2 ? bulk_run<T, 2>(s, p, shape, ask) : ADZE_NO_KERNEL;
}
/* Runs a shape, or with `ask` says only whether it can: ADZE_NO_KERNEL. */
extern "C" adze_status gemm_bulk_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, int ask)
{
    if (!adze_cuda_clusters(s.device))
        return ADZE_NO_KERNEL;
    return dtype == ADZE_BF16 ? bulk_run<bf16>(s, p, shape, ask) : bulk_run<f16>(s, p, shape, ask);
}
