/* attention_masked_sm90.cu - attention of many rows on Hopper, with a mask or a softcap. */
#include "attention_wgmma_run.cuh"

/* The costs of steps are fitted to a sweep of long calls on an H200 (2026-11-18). That of 128 rows was measured with
   steps of 128 keys, and is in proportion here; that of heads beyond 128 is an estimate. A mask that all rows share
   costs less. */
template <typename T>
static adze_status masked_run(const cuda_call &s, const attention_params &p)
{
    typedef wgmma_shape<64, 64, 1, 64, 2> ROWS64_64;
    typedef wgmma_shape<64, 64, 2, 112, 2> ROWS128_64;
    typedef wgmma_shape<128, 128, 1, 64, 2> ROWS64_128;
    typedef wgmma_shape<128, 128, 2, 112, 2> ROWS128_128;
    typedef wgmma_shape<256, 256, 2, 64, 2> ROWS128_256;
    auto fits = [&](int d) { return p.d <= d && p.dv <= d; };
    const double less = p.mask_shared ? 0.65 : 1;
    if (fits(64))
        return wgmma_run<T, true>(
            s, p, wgmma_shapes<ROWS64_64, ROWS128_64>{{{1.05 * less, 2.05 * less}, {2.7 * less, 0}, {}}});
    if (fits(128))
        return wgmma_run<T, true>(
            s, p,
            wgmma_shapes<ROWS64_128, ROWS128_128>{{{1.05 * less, 2.1 * less}, {p.mask_shared ? 1.9 : 3.2, 0}, {}}});
    return wgmma_run<T, true>(s, p, wgmma_shapes<NONE, ROWS128_256>{{{}, {2.4, 0}, {}}});
}
adze_status attention_many_masked(const cuda_call &s, const attention_params &p, bool is_bf16)
{
    return is_bf16 ? masked_run<bf16>(s, p) : masked_run<f16>(s, p);
}
