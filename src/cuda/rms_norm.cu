/* rms_norm on CUDA. */
#include "norm.cuh"

extern "C" adze_status adze_rms_norm_cuda(adze_stream stream, const void *args)
{
    return norm_run<false>("rms_norm", stream, (const adze_norm_args *)args);
}
