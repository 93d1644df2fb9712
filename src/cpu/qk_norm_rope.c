/* qk_norm_rope on the CPU. */
#include "cpu/rope.h"

static void body(void *context, int64_t begin, int64_t end)
{
    rope_tokens(context, begin, end, 1);
}

ADZE_CPU_KERNEL(qk_norm_rope)
{
    (void)stream;
    return rope_run(args, body);
}
