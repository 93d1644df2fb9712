/* rms_norm on the CPU. */
#include "cpu/norm.h"

static void body(void *context, int64_t begin, int64_t end)
{
    norm_range(context, begin, end, 0);
}

adze_status ADZE_CPU_FN(rms_norm)(adze_stream stream, const void *args);
static adze_status one_row(const bytes_call *c, int64_t row, const adze_tensor *out)
{
    return norm_row(c, row, out, ADZE_CPU_FN(rms_norm));
}

ADZE_CPU_KERNEL(rms_norm)
{
    const adze_norm_args *a = args;
    (void)stream;
    return adze_is_bytes(a->out.dtype) ? norm_bytes("rms_norm", a, one_row) : norm_run(a, body);
}
