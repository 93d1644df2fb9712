/* activation on CUDA. */
#include "act_rows.cuh"

static adze_status activation_run(const cuda_call &s, const adze_activation_args *a)
{
    adze_tensor tensors[ACT_TENSORS] = {a->x, a->out, {}};
    return act_run<false>(s, tensors, a->act, 0);
}
CUDA_ENTRIES(activation, ACT_VARIANTS, activation_run)
