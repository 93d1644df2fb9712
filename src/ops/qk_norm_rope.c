/* qk_norm_rope: the contract, the definition, and the kernels. */
#include "ops/rope.h"

static const adze_field fields[] = {
    ADZE_OUTPUT(qk_norm_rope, ADZE_OUT, q_out, ADZE_IN_PLACE(qk_norm_rope, q), 0, 0),
    ADZE_OUTPUT(qk_norm_rope, ADZE_OUT_IF, k_out, ADZE_IN_PLACE(qk_norm_rope, k), 0, 0),
    ADZE_FIELD(qk_norm_rope, ADZE_IN, q),
    ADZE_FIELD(qk_norm_rope, ADZE_OPTIONAL, k),
    ADZE_FIELD(qk_norm_rope, ADZE_OPTIONAL, q_weight),
    ADZE_FIELD(qk_norm_rope, ADZE_OPTIONAL, k_weight),
    ADZE_FIELD(qk_norm_rope, ADZE_IN, cos),
    ADZE_FIELD(qk_norm_rope, ADZE_IN, sin),
    ADZE_FIELD(qk_norm_rope, ADZE_FLOAT, eps),
    ADZE_FIELD(qk_norm_rope, ADZE_FLOAT, weight_offset),
    ADZE_FIELD(qk_norm_rope, ADZE_INT, across_heads),
    ADZE_WORDS(qk_norm_rope, pairs, rope_pairs),
    ADZE_FIELD(qk_norm_rope, ADZE_INT, rotary_dim),
    ADZE_FIELD(qk_norm_rope, ADZE_INT, heads_first),
    ADZE_FIELD(qk_norm_rope, ADZE_INT, rounding),
    ADZE_FIELDS_END,
};

static adze_status check_weight(const char *name, const adze_tensor *weight, const adze_tensor *x,
                                const adze_qk_norm_rope_args *a)
{
    const int64_t heads = x->dtype ? x->shape[x->rank - (a->heads_first ? 3 : 2)] : 0;
    ADZE_REQUIRE(x->dtype || !weight->dtype, ADZE_BAD_ARG, "qk_norm_rope: %s is given without k", name);
    return adze_check_param("qk_norm_rope", name, weight, x,
                            (a->across_heads ? heads : 1) * a->q.shape[a->q.rank - 1]);
}

static adze_status validate(const void *args)
{
    const adze_qk_norm_rope_args *a = args;
    ADZE_CHECK(rope_validate("qk_norm_rope", a));
    ADZE_CHECK(adze_check_range("qk_norm_rope", "across_heads", a->across_heads, 0, 1));
    ADZE_CHECK(check_weight("q_weight", &a->q_weight, &a->q, a));
    ADZE_CHECK(check_weight("k_weight", &a->k_weight, &a->k, a));
    ADZE_REQUIRE(a->eps >= 0, ADZE_BAD_ARG, "qk_norm_rope: eps is %g, it must not be negative", (double)a->eps);
    return adze_check_bits("qk_norm_rope", "rounding", a->rounding,
                           ADZE_ROUND_NORM | ADZE_ROUND_VALUE | ADZE_ROUND_STEPS);
}

static void outputs(void *args)
{
    adze_qk_norm_rope_args *a = args;
    adze_like(&a->q_out, &a->q);
    if (a->k.dtype)
        adze_like(&a->k_out, &a->k);
}

static void reference(const void *args, adze_value *const *out)
{
    const adze_rotary r = adze_rotary_of(args);
    rope_reference(&r, out, 1, NULL);
}

ADZE_KERNELS(qk_norm_rope)

const adze_op adze_op_qk_norm_rope = {"qk_norm_rope",
                                      sizeof(adze_qk_norm_rope_args),
                                      ADZE_FIRST_SIZE(qk_norm_rope, reserved),
                                      fields,
                                      validate,
                                      outputs,
                                      reference,
                                      kernels,
                                      NULL,
                                      NULL};

adze_status adze_qk_norm_rope(adze_stream stream, const adze_qk_norm_rope_args *args)
{
    return adze_dispatch(&adze_op_qk_norm_rope, stream, args);
}
