/* qk_norm_rope on CUDA. */
#include "rope.cuh"

extern "C" adze_status adze_qk_norm_rope_cuda(adze_stream stream, const void *args)
{
    return rope_run<true>("qk_norm_rope", stream, (const adze_qk_norm_rope_args *)args);
}
