/* rope: the contract, the definition, and the kernels. */
#include "ops/rope.h"

static const adze_field fields[] = {
    ADZE_OUTPUT(rope, ADZE_OUT, q_out, ADZE_IN_PLACE(rope, q), 0, 0),
    ADZE_OUTPUT(rope, ADZE_OUT_IF, k_out, ADZE_IN_PLACE(rope, k), 0, 0),
    ADZE_FIELD(rope, ADZE_IN, q),
    ADZE_FIELD(rope, ADZE_OPTIONAL, k),
    ADZE_FIELD(rope, ADZE_IN, cos),
    ADZE_FIELD(rope, ADZE_IN, sin),
    ADZE_WORDS(rope, pairs, rope_pairs),
    ADZE_FIELD(rope, ADZE_INT, rotary_dim),
    ADZE_FIELD(rope, ADZE_INT, heads_first),
    ADZE_FIELD(rope, ADZE_INT, rounding),
    ADZE_FIELDS_END,
};

static adze_status validate(const void *args)
{
    const adze_rope_args *a = args;
    const adze_qk_norm_rope_args wide = adze_rope_widen(a);
    ADZE_CHECK(rope_validate("rope", &wide));
    return adze_check_bits("rope", "rounding", a->rounding, ADZE_ROUND_STEPS);
}

static void outputs(void *args)
{
    adze_rope_args *a = args;
    adze_like(&a->q_out, &a->q);
    if (a->k.dtype)
        adze_like(&a->k_out, &a->k);
}

static void reference(const void *args, adze_value *const *out)
{
    const adze_qk_norm_rope_args wide = adze_rope_widen(args);
    const adze_rotary r = adze_rotary_of(&wide);
    rope_reference(&r, out, 0, NULL);
}

ADZE_KERNELS(rope)

const adze_op adze_op_rope = {"rope",
                              sizeof(adze_rope_args),
                              ADZE_FIRST_SIZE(rope, rounding),
                              fields,
                              validate,
                              outputs,
                              reference,
                              kernels,
                              NULL,
                              NULL};

adze_status adze_rope(adze_stream stream, const adze_rope_args *args)
{
    return adze_dispatch(&adze_op_rope, stream, args);
}
