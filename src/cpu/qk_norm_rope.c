/* qk_norm_rope on the CPU. */
#include "cpu/rope.h"

NO_INLINE void write_row(const adze_rotary *r, const rope_row *row)
{
    rope_write_any(r, row, 1);
}

static void body(void *context, int64_t begin, int64_t end)
{
    rope_tokens(context, begin, end, 1, write_row);
}

ADZE_CPU_KERNEL(qk_norm_rope)
{
    (void)stream;
    return rope_run(args, body);
}
