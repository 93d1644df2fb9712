/* attention_masked_sm90.cu - attention of many rows on Hopper: the shapes of attention_wgmma.cuh with a mask or a
 * softcap.
 */
#include "attention_wgmma_run.cuh"

/* What steps take is from a sweep on an H200 (2026-11-18); that of 128 rows with fewer than 128 keys, and of heads
   beyond 128, is in proportion to others. */
template <typename T>
static adze_status masked_run(const cuda_call &s, const attention_params &p)
{
    typedef wgmma_shape<128, 128, 1, 64, 2> SMALL;
    typedef wgmma_shape<64, 64, 1, 64, 2> S64;
    auto fits = [&](int d, int dv) { return p.d <= d && p.dv <= dv; };
    if (fits(64, 64))
        return wgmma_run<T, true>(s, p,
                                  wgmma_shapes<S64, wgmma_shape<64, 64, 2, 112, 2>>{{{1.3, 2.05}, {2.7, 0}, {}}});
    if (fits(96, 96))
        return wgmma_run<T, true>(s, p,
                                  wgmma_shapes<SMALL, wgmma_shape<96, 96, 2, 80, 2>>{{{0.9, 1.45}, {1.8, 0}, {}}});
    if (fits(128, 128))
        return wgmma_run<T, true>(s, p,
                                  wgmma_shapes<SMALL, wgmma_shape<128, 128, 2, 112, 2>>{{{1.3, 2.1}, {3.0, 0}, {}}});
    return wgmma_run<T, true>(s, p, wgmma_shapes<NONE, wgmma_shape<256, 256, 2, 64, 2>>{{{}, {2.4, 0}, {}}});
}
adze_status attention_many_masked(const cuda_call &s, const attention_params &p, bool is_bf16)
{
    return is_bf16 ? masked_run<bf16>(s, p) : masked_run<f16>(s, p);
}
