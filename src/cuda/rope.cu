/* rope on CUDA. */
#include "rope.cuh"

static adze_status rope_call(const cuda_call &s, const adze_rope_args *args)
{
    const adze_qk_norm_rope_args wide = adze_rope_widen(args);
    return rope_run<false>(s, &wide);
}
CUDA_ENTRIES(rope, ROPE_VARIANTS, rope_call)
