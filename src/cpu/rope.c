/* rope on the CPU. */
#include "cpu/rope.h"

NO_INLINE void write_row(const adze_rotary *r, const rope_row *row)
{
    rope_write_any(r, row, 0);
}

static void body(void *context, int64_t begin, int64_t end)
{
    rope_tokens(context, begin, end, 0, write_row);
}

ADZE_CPU_KERNEL(rope)
{
    (void)stream;
    const adze_qk_norm_rope_args wide = adze_rope_widen(args);
    return rope_run(&wide, body);
}
