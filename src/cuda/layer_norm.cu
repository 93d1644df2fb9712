/* layer_norm on CUDA. */
#include "norm.cuh"

extern "C" adze_status adze_layer_norm_cuda(adze_stream stream, const void *args)
{
    return norm_run<true>("layer_norm", stream, (const adze_norm_args *)args);
}
