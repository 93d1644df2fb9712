/* activation on the CPU. */
#include "cpu/act_rows.h"

static void body(void *context, int64_t begin, int64_t end)
{
    const act_call *c = context;
    switch (c->tensors[OUT].dtype) {
    case ADZE_F32: act_range(c, begin, end, ADZE_F32, 0); break;
    case ADZE_F16: act_range(c, begin, end, ADZE_F16, 0); break;
    default: act_range(c, begin, end, ADZE_BF16, 0); break;
    }
}

ADZE_CPU_KERNEL(activation)
{
    const adze_activation_args *a = args;
    act_call c = {.tensors = {a->x, a->out}, .act = a->act};
    (void)stream;
    return act_run(&c, body);
}
