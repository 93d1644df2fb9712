/* gemm of one or two tokens on CUDA: the launch of gemm_bulk.cuh. Weights are those of x's dtype. */
#include "gemm_bulk.cuh"

template <typename T, class S>
static adze_status bulk_launch(const cuda_call &s, const gemm_params &p, bool ask)
{
    const int64_t blocks = p.n < s.gpu.sm_count ? p.n : s.gpu.sm_count;
    const size_t bytes = gemm_alone(s, bulk_shared<S>(p.k, ceil_div(p.n, blocks) * (p.glu ? 2 : 1)), 1);
    if (bytes > (size_t)s.gpu.block_shared || p.batch_invariant)
        return ADZE_NO_KERNEL;
    const bool aligned = !p.norm_weight_f32 && (uintptr_t)p.norm_weight % 16 == 0;
    const bool rms = p.norm == ADZE_NORM_RMS && !p.norm_bias && aligned && p.k <= S::HELD * S::THREADS * 8;
    auto *kernel = gemm_bulk<T, S, BULK_PLAIN>;
    if (p.norm)
        kernel = rms ? gemm_bulk<T, S, BULK_RMS> : gemm_bulk<T, S, BULK_ANY>;
    return ask ? ADZE_OK : launch(s, kernel, blocks, dim3(S::THREADS), launch_shape(bytes, 1, p.batches), p);
}
template <typename T>
static adze_status bulk_run(const cuda_call &s, const gemm_params &p, bool ask)
{
    return p.m == 1   ? bulk_launch<T, bulk_shape<1, 16, 4096, 2>>(s, p, ask)
           : p.m == 2 ? bulk_launch<T, bulk_shape<2, 16, 4096, 2>>(s, p, ask)
                      : ADZE_NO_KERNEL;
}
extern "C" adze_status gemm_bulk_run(const cuda_call &s, const gemm_params &p, int dtype, int ask)
{
    if (p.format != OF_X || !adze_cuda_clusters(s.device))
        return ADZE_NO_KERNEL;
    return dtype == ADZE_BF16 ? bulk_run<bf16>(s, p, ask) : bulk_run<f16>(s, p, ask);
}
