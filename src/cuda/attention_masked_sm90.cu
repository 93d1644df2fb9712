/* attention_masked_sm90.cu - attention of many rows on Hopper: the shapes of attention_wgmma.cuh with a mask or a
 * softcap.
 */
#include "attention_wgmma_run.cuh"

template <typename T>
static adze_status masked_run(const cuda_call &s, const attention_params &p)
{
    typedef wgmma_shape<128, 128, 1, 64, 2> SMALL;
    auto fits = [&](int d, int dv) { return p.d <= d && p.dv <= dv; };
    if (fits(64, 64))
        return wgmma_run<T, true>(
            s, p,
            wgmma_shapes<wgmma_shape<64, 64, 1, 64, 2>, wgmma_shape<64, 64, 2, 112, 2>>{{{0.9, 1.4}, {2.6, 0}, {}}});
    if (fits(96, 96))
        return wgmma_run<T, true>(s, p,
                                  wgmma_shapes<SMALL, wgmma_shape<96, 96, 2, 80, 2>>{{{1.1, 1.8}, {2.7, 0}, {}}});
    if (fits(128, 128))
        return wgmma_run<T, true>(s, p,
                                  wgmma_shapes<SMALL, wgmma_shape<128, 128, 2, 112, 2>>{{{1.1, 1.8}, {2.7, 0}, {}}});
    return wgmma_run<T, true>(s, p, wgmma_shapes<NONE, wgmma_shape<256, 256, 2, 64, 2>>{{{}, {2.4, 0}, {}}});
}
adze_status attention_many_masked(const cuda_call &s, const attention_params &p, bool is_bf16)
{
    return is_bf16 ? masked_run<bf16>(s, p) : masked_run<f16>(s, p);
}
