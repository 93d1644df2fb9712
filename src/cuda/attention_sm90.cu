/* attention_sm90.cu - attention of many rows on Hopper: the shapes of attention_wgmma.cuh without mask and softcap.
 */
#include "attention_wgmma_run.cuh"

template <typename T>
static adze_status wgmma_run(const cuda_call &s, const attention_params &p)
{
    typedef wgmma_shape<128, 128, 1, 128, 2> LARGE; /* steps: of few tiles, which have a multiprocessor each */
    typedef wgmma_shape<128, 128, 1, 64, 2> SMALL;
    typedef wgmma_shape<256, 256, 1, 80, 2> WIDE;
    auto fits = [&](int d, int dv) { return p.d <= d && p.dv <= dv; };
    if (fits(64, 64))
        return wgmma_run<T>(s, p,
                            wgmma_shapes<wgmma_shape<64, 64, 1, 128, 2>, wgmma_shape<64, 64, 2, 128, 2>,
                                         wgmma_shape<64, 64, 3, 128, 2>>{{{0.85, 1.31}, {1.27, 0}, {1.62, 0}}});
    if (fits(128, 128)) {
        const wgmma_cost large = {1.05, 0}, small = {0.62, 1.0};
        const bool few = wgmma_time<LARGE>(s, p, large) < wgmma_time<SMALL>(s, p, small);
        typedef wgmma_shape<96, 96, 2, 128, 2> S96;
        typedef wgmma_shape<128, 128, 2, 128, 2> S128;
        if (fits(96, 96))
            return few ? wgmma_run<T>(s, p, wgmma_shapes<LARGE, S96>{{large, {1.55, 0}, {}}})
                       : wgmma_run<T>(s, p, wgmma_shapes<SMALL, S96>{{small, {1.55, 0}, {}}});
        return few ? wgmma_run<T>(s, p, wgmma_shapes<LARGE, S128>{{large, {1.62, 0}, {}}})
                   : wgmma_run<T>(s, p, wgmma_shapes<SMALL, S128>{{small, {1.62, 0}, {}}});
    }
    const wgmma_cost wide = {1.1, 0};
    if (fits(160, 160))
        return wgmma_run<T>(s, p, wgmma_shapes<WIDE, wgmma_shape<160, 160, 2, 112, 2>>{{wide, {1.7, 0}, {}}});
    if (fits(192, 128))
        return wgmma_run<T>(s, p, wgmma_shapes<WIDE, wgmma_shape<192, 128, 2, 128, 2>>{{wide, {1.75, 0}, {}}});
    if (fits(192, 192))
        return wgmma_run<T>(s, p, wgmma_shapes<WIDE, wgmma_shape<192, 192, 2, 112, 2>>{{wide, {1.68, 0}, {}}});
    return wgmma_run<T>(s, p, wgmma_shapes<WIDE, wgmma_shape<256, 256, 2, 80, 2>>{{wide, {1.58, 0}, {}}});
}
adze_status attention_many(const cuda_call &s, const attention_params &p, bool is_bf16)
{
    if (!wgmma_takes(s, p))
        return ADZE_NO_KERNEL;
    if (p.mask_kind || p.softcap != 0)
        return attention_many_masked(s, p, is_bf16);
    return is_bf16 ? wgmma_run<bf16>(s, p) : wgmma_run<f16>(s, p);
}
