/* rms_norm on the CPU. */
#include "cpu/norm.h"

static void body(void *context, int64_t begin, int64_t end)
{
    const norm_call *c = context;
    switch (c->a->x.dtype) {
    case ADZE_F32: norm_range(c, begin, end, ADZE_F32, 0); break;
    case ADZE_F16: norm_range(c, begin, end, ADZE_F16, 0); break;
    default: norm_range(c, begin, end, ADZE_BF16, 0); break;
    }
}

ADZE_CPU_KERNEL(rms_norm)
{
    (void)stream;
    return norm_run(args, body);
}
