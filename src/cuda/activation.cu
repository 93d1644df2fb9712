/* activation on CUDA. */
#include "act_rows.cuh"

extern "C" adze_status adze_activation_cuda(adze_stream stream, const void *args)
{
    const adze_activation_args *a = (const adze_activation_args *)args;
    adze_tensor tensors[ACT_TENSORS] = {a->x, a->out, {}};
    return act_run<false>("activation", stream, tensors, a->act, 0);
}
