/* glu on the CPU. */
#include "cpu/act_rows.h"

static void body(void *context, int64_t begin, int64_t end)
{
    const act_call *c = context;
    switch (c->tensors[OUT].dtype) {
    case ADZE_F32: act_range(c, begin, end, ADZE_F32, 1); break;
    case ADZE_F16: act_range(c, begin, end, ADZE_F16, 1); break;
    default: act_range(c, begin, end, ADZE_BF16, 1); break;
    }
}

ADZE_CPU_KERNEL(glu)
{
    const adze_glu_args *a = args;
    act_call c = {
        .tensors = {[OUT] = a->out}, .act = a->act ? a->act : ADZE_ACT_SILU, .steps = a->rounding & ADZE_ROUND_STEPS};
    adze_glu_halves(a, &c.tensors[GATE], &c.tensors[VALUE]);
    (void)stream;
    return act_run(&c, body);
}
