/* glu on CUDA. */
#include "act_rows.cuh"

static adze_status glu_run(const cuda_call &s, const adze_glu_args *a)
{
    adze_tensor tensors[ACT_TENSORS] = {{}, a->out, {}};
    adze_glu_halves(a, &tensors[GATE], &tensors[VALUE]);
    return act_run<true>(s, tensors, a->act ? a->act : ADZE_ACT_SILU, a->rounding & ADZE_ROUND_STEPS);
}
CUDA_ENTRIES(glu, ACT_VARIANTS, glu_run)
