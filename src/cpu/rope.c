/* rope on the CPU. */
#include "cpu/rope.h"

static void body(void *context, int64_t begin, int64_t end)
{
    rope_tokens(context, begin, end, 0);
}

ADZE_CPU_KERNEL(rope)
{
    (void)stream;
    const adze_qk_norm_rope_args wide = adze_rope_widen(args);
    return rope_run(&wide, body);
}
