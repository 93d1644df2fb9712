/* gemm of one token with quantised weights on CUDA: which calls gemm_fixed.cuh takes. */
#include "gemm_fixed.cuh"

template <typename T, class S>
static adze_status fixed_launch(const cuda_call &s, const gemm_params &p, bool ask)
{
    if (!compact_takes<S>(p) || p.k % S::GROUP != 0 || p.group_rows > 1)
        return ADZE_NO_KERNEL;
    /* gemm_compact is faster where a multiprocessor has many rows, on an H200 (2026-11-18). */
    const int64_t blocks = std::min<int64_t>(s.gpu.sm_count, p.n);
    const fixed_call c = fixed_call_of<S>(p, blocks, (size_t)s.gpu.block_shared);
    if (c.bytes == 0 || ceil_div(p.n * (p.glu ? 2 : 1), blocks) > S::ROWS_MOST)
        return ADZE_NO_KERNEL;
    return ask ? ADZE_OK : launch(s, gemm_fixed<T, S>, blocks, dim3(S::THREADS), launch_shape(c.bytes), p, c);
}
template <typename T, weight_format F, compact_scales C>
static adze_status fixed_norm_run(const cuda_call &s, const gemm_params &p, bool ask)
{
    return p.norm ? fixed_launch<T, fixed_shape<F, C, true>>(s, p, ask)
                  : fixed_launch<T, fixed_shape<F, C, false>>(s, p, ask);
}
template <typename T>
static adze_status fixed_run(const cuda_call &s, const gemm_params &p, bool ask)
{
    const int scale_dtype = p.part[0].n ? p.part[0].scale_dtype : p.part[1].n ? p.part[1].scale_dtype : 0;
    if (p.format == OF_I8)
        return fixed_norm_run<T, OF_I8, ROW_SCALES>(s, p, ask);
    return scale_dtype == ADZE_F32   ? fixed_norm_run<T, OF_U4, F32_SCALES>(s, p, ask)
           : scale_dtype == ADZE_F16 ? fixed_norm_run<T, OF_U4, F16_SCALES>(s, p, ask)
                                     : fixed_norm_run<T, OF_U4, BF16_SCALES>(s, p, ask);
}
extern "C" adze_status gemm_fixed_run(const cuda_call &s, const gemm_params &p, int dtype, int ask)
{
    if ((p.format != OF_I8 && p.format != OF_U4) || p.m != 1 || p.n == 0)
        return ADZE_NO_KERNEL;
    return dtype == ADZE_BF16 ? fixed_run<bf16>(s, p, ask) : fixed_run<f16>(s, p, ask);
}
