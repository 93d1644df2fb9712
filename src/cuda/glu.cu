/* glu on CUDA. */
#include "act_rows.cuh"

extern "C" adze_status adze_glu_cuda(adze_stream stream, const void *args)
{
    const adze_glu_args *a = (const adze_glu_args *)args;
    adze_tensor tensors[ACT_TENSORS] = {{}, a->out, {}};
    adze_glu_halves(a, &tensors[GATE], &tensors[VALUE]);
    return act_run<true>("glu", stream, tensors, a->act ? a->act : ADZE_ACT_SILU, a->rounding & ADZE_ROUND_STEPS);
}
