/* gemm of one or two tokens on CUDA: the launch of gemm_bulk.cuh. Weights are those of x's dtype, or i8. */
#include "gemm_bulk.cuh"

template <typename T, class S>
static adze_status bulk_launch(const cuda_call &s, const gemm_params &p, bool ask)
{
    const int64_t blocks = p.n < s.gpu.sm_count ? p.n : s.gpu.sm_count;
    const size_t bytes = gemm_alone(s, bulk_shared<S>(p.k, ceil_div(p.n, blocks) * (p.glu ? 2 : 1)), 1);
    bool can = bytes <= (size_t)s.gpu.block_shared && !p.batch_invariant;
    if (S::WEIGHTS != OF_X)
        can = can && p.k % S::VECTOR == 0 && p.group % S::VECTOR == 0 && !p.norm && p.batches == 1;
    if (!can)
        return ADZE_NO_KERNEL;
    auto *kernel = gemm_bulk<T, S, BULK_PLAIN>;
    if constexpr (S::WEIGHTS == OF_X) {
        const bool aligned = !p.norm_weight_f32 && (uintptr_t)p.norm_weight % 16 == 0;
        const bool rms = p.norm == ADZE_NORM_RMS && !p.norm_bias && aligned && p.k <= S::HELD * S::THREADS * 8;
        if (p.norm)
            kernel = rms ? gemm_bulk<T, S, BULK_RMS> : gemm_bulk<T, S, BULK_ANY>;
    }
    return ask ? ADZE_OK : launch(s, kernel, blocks, dim3(S::THREADS), launch_shape(bytes, 1, p.batches), p);
}
template <typename T, int M>
static adze_status bulk_run(const cuda_call &s, const gemm_params &p, bool ask)
{
    switch (p.format) {
    case OF_X: return bulk_launch<T, bulk_shape<M, 16, 4096, 2, OF_X>>(s, p, ask);
    case OF_I8: return bulk_launch<T, bulk_shape<M, 16, 4096, 2, OF_I8>>(s, p, ask);
    default: return ADZE_NO_KERNEL;
    }
}
template <typename T>
static adze_status bulk_run(const cuda_call &s, const gemm_params &p, bool ask)
{
    return p.m == 1 ? bulk_run<T, 1>(s, p, ask) : p.m == 2 ? bulk_run<T, 2>(s, p, ask) : ADZE_NO_KERNEL;
}
extern "C" adze_status gemm_bulk_run(const cuda_call &s, const gemm_params &p, int dtype, int ask)
{
    if (!adze_cuda_clusters(s.device))
        return ADZE_NO_KERNEL;
    return dtype == ADZE_BF16 ? bulk_run<bf16>(s, p, ask) : bulk_run<f16>(s, p, ask);
}
