/* rope on CUDA. */
#include "rope.cuh"

extern "C" adze_status adze_rope_cuda(adze_stream stream, const void *args)
{
    const adze_qk_norm_rope_args wide = adze_rope_widen((const adze_rope_args *)args);
    return rope_run<false>("rope", stream, &wide);
}
