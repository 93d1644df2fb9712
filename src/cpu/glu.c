/* glu on the CPU. */
#include "cpu/act_rows.h"
#include "cpu/bytes_out.h"

static void body(void *context, int64_t begin, int64_t end)
{
    const act_call *c = context;
    switch (c->tensors[OUT].dtype) {
    case ADZE_F32: act_range(c, begin, end, ADZE_F32, 1); break;
    case ADZE_F16: act_range(c, begin, end, ADZE_F16, 1); break;
    default: act_range(c, begin, end, ADZE_BF16, 1); break;
    }
}

/* A row that is quantised when it is made. */
adze_status ADZE_CPU_FN(glu)(adze_stream stream, const void *args);
static adze_status one_row(const bytes_call *c, int64_t row, const adze_tensor *out)
{
    const adze_glu_args *a = c->args;
    const adze_stream cpu = {ADZE_CPU, NULL};
    adze_tensor gate, value;
    adze_glu_halves(a, &gate, &value);
    const adze_glu_args one = {.out = *out,
                               .x = bytes_row_of(c, &gate, GATE, row),
                               .value = bytes_row_of(c, &value, VALUE, row),
                               .act = a->act,
                               .rounding = a->rounding};
    return ADZE_CPU_FN(glu)(cpu, &one);
}
static adze_status run_bytes(const adze_glu_args *a)
{
    const adze_tensor scale = adze_by_rows(&a->out_scale);
    adze_tensor gate, value;
    adze_glu_halves(a, &gate, &value);
    const adze_tensor *const tensors[ACT_TENSORS + 1] = {[GATE] = &gate, [OUT] = &a->out, [VALUE] = &value, &scale};
    bytes_call c = {.args = a,
                    .out = &a->out,
                    .scale = &a->out_scale,
                    .out_at = OUT,
                    .scale_at = ACT_TENSORS,
                    .dtype = a->x.dtype,
                    .dim = gate.shape[gate.rank - 1],
                    .row = one_row};
    adze_rows_init(&c.rows, &gate, ACT_TENSORS + 1, tensors);
    return bytes_run("glu", &c, row_grain(c.dim));
}

ADZE_CPU_KERNEL(glu)
{
    const adze_glu_args *a = args;
    if (adze_is_bytes(a->out.dtype))
        return run_bytes(a);
    act_call c = {
        .tensors = {[OUT] = a->out}, .act = a->act ? a->act : ADZE_ACT_SILU, .steps = a->rounding & ADZE_ROUND_STEPS};
    adze_glu_halves(a, &c.tensors[GATE], &c.tensors[VALUE]);
    (void)stream;
    return act_run(&c, body);
}
