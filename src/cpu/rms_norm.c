/* rms_norm on the CPU. */
#include "cpu/norm.h"

static void body(void *context, int64_t begin, int64_t end)
{
    norm_range(context, begin, end, 0);
}

ADZE_CPU_KERNEL(rms_norm)
{
    (void)stream;
    return norm_run(args, body);
}
