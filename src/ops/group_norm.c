/* group_norm: the contract, the definition, and the kernels. */
#include "ops/act.h"

#include <stdlib.h>

static const adze_field fields[] = {
    ADZE_OUTPUT(group_norm, ADZE_OUT, out, ADZE_IN_PLACE(group_norm, x), 0, 0),
    ADZE_FIELD(group_norm, ADZE_IN, x),
    ADZE_FIELD(group_norm, ADZE_OPTIONAL, weight),
    ADZE_FIELD(group_norm, ADZE_OPTIONAL, bias),
    ADZE_FIELD(group_norm, ADZE_FLOAT, eps),
    ADZE_FIELD(group_norm, ADZE_INT, groups),
    ADZE_FIELD(group_norm, ADZE_INT, channels_last),
    ADZE_WORDS(group_norm, act, act_words),
    ADZE_FIELD(group_norm, ADZE_INT, rounding),
    ADZE_FIELDS_END,
};

static int64_t channels_of(const adze_group_norm_args *a)
{
    return a->x.shape[a->channels_last ? a->x.rank - 1 : 1];
}

static adze_status validate(const void *args)
{
    const adze_group_norm_args *a = args;
    ADZE_CHECK(adze_check_float("group_norm", "x", &a->x));
    ADZE_REQUIRE(a->x.rank >= 2, ADZE_BAD_ARG, "group_norm: x has rank %d, it must be 2 to 5", a->x.rank);
    ADZE_CHECK(adze_check_rows("group_norm", "x", &a->x));
    ADZE_CHECK(adze_check_range("group_norm", "channels_last", a->channels_last, 0, 1));
    const int64_t channels = channels_of(a);
    ADZE_REQUIRE(a->groups > 0 && channels % a->groups == 0, ADZE_BAD_ARG,
                 "group_norm: groups is %d, it must divide the %lld channels", a->groups, (long long)channels);
    ADZE_CHECK(adze_check_param("group_norm", "weight", &a->weight, &a->x, channels));
    ADZE_CHECK(adze_check_param("group_norm", "bias", &a->bias, &a->x, channels));
    ADZE_REQUIRE(a->eps >= 0, ADZE_BAD_ARG, "group_norm: eps is %g, it must not be negative", (double)a->eps);
    ADZE_CHECK(adze_check_range("group_norm", "act", a->act, ADZE_ACT_NONE, ADZE_ACT_SIGMOID));
    return adze_check_bits("group_norm", "rounding", a->rounding, ADZE_ROUND_STEPS);
}

static void outputs(void *args)
{
    adze_group_norm_args *a = args;
    adze_like(&a->out, &a->x);
}

/* What the definition sums over one group. */
typedef struct group_sums {
    double n, sum, magnitude, deviation, square;
    adze_value mean, scale;
} group_sums;

/* A kernel adds at most 64 terms one after the other and 4096 such sums in a tree; more it combines in double. */
static double group_depth(double n)
{
    return fmin(n, 64) + 12;
}

/* The bound of the squares is for kernels that take the mean m_k and the squared deviations of parts and combine
   them by Chan's formula, and covers one mean for all. With d = x - mean, u the unit of float and D the depth, m_k is
   off by e_k <= u D (|mean| + mean_k |d|). Of the combined squares S
     sum over parts of n_k e_k^2, twice                      is at most 4 (u D)^2 (n mean^2 + S),
     2 sum over parts of n_k |m_k - mean| e_k                is at most 2 u D (|mean| sum |d| + S),
   because |m_k - mean| <= mean_k |d| and mean_k |d| squared <= mean_k d^2; the rounding of d, d^2 and their sum
   is at most u (D + 4) S. */
static void group_finish(group_sums *s, float eps)
{
    const double u = ADZE_U, D = group_depth(s->n) + 1, m = fabs(s->mean.v), S = s->square;
    const double error =
        u * (D + 4) * S + 2 * u * D * (m * s->deviation + S) + 4 * u * D * u * D * (s->n * m * m + S);
    const adze_value variance = adze_div((adze_value){S, error + s->n * 0x1p-149}, adze_exact(s->n));
    s->scale = adze_rsqrt(adze_add(variance, adze_exact(eps)));
}

/* One pass over all elements of x, in the order of the output. */
typedef enum group_step { SUM, SQUARE, WRITE } group_step;

static void group_pass(const adze_group_norm_args *a, group_sums *sums, adze_value *out, group_step step)
{
    const int64_t count = adze_count(&a->x), per_group = channels_of(a) / a->groups;
    const int channel_at = a->channels_last ? a->x.rank - 1 : 1;
    int64_t index[5] = {0}, at = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t channel = index[channel_at];
        group_sums *s = &sums[index[0] * a->groups + channel / per_group];
        const adze_value x = adze_element(&a->x, at);
        if (step == SUM) {
            s->n++, s->sum += x.v, s->magnitude += fabs(x.v);
        } else if (step == SQUARE) {
            const double d = x.v - s->mean.v;
            s->deviation += fabs(d), s->square += d * d;
        } else {
            out[i] = adze_mul(adze_sub(x, s->mean), s->scale);
            if (a->weight.dtype)
                out[i] = adze_mul(out[i], adze_element(&a->weight, channel));
            if (a->bias.dtype)
                out[i] = adze_add(out[i], adze_element(&a->bias, channel));
            if (a->act)
                out[i] = act_value(a->act, adze_rounded_if(a->rounding & ADZE_ROUND_STEPS, a->x.dtype, out[i]));
        }
        for (int d = a->x.rank - 1; d >= 0; d--) {
            if (++index[d] < a->x.shape[d]) {
                at += a->x.stride[d];
                break;
            }
            at -= a->x.stride[d] * (a->x.shape[d] - 1); /* of one index the stride may be any number */
            index[d] = 0;
        }
    }
}

static void reference(const void *args, adze_value *const *out)
{
    const adze_group_norm_args *a = args;
    if (adze_count(&a->x) == 0)
        return;
    const int64_t groups = a->x.shape[0] * a->groups;
    group_sums *sums = calloc((size_t)groups, sizeof *sums);
    if (!sums)
        return;
    group_pass(a, sums, NULL, SUM);
    for (int64_t g = 0; g < groups; g++) {
        group_sums *s = &sums[g];
        s->mean.v = s->sum / s->n;
        s->mean.e = ADZE_U * (group_depth(s->n) * s->magnitude / s->n + fabs(s->mean.v));
    }
    group_pass(a, sums, NULL, SQUARE);
    for (int64_t g = 0; g < groups; g++)
        group_finish(&sums[g], a->eps);
    group_pass(a, sums, out[0], WRITE);
    free(sums);
}

ADZE_KERNELS(group_norm)

/* On CUDA the statistics of large groups pass from kernel to kernel. */
ADZE_CUDA_SCRATCH(group_norm)

const adze_op adze_op_group_norm = {"group_norm",
                                    sizeof(adze_group_norm_args),
                                    ADZE_FIRST_SIZE(group_norm, reserved),
                                    fields,
                                    validate,
                                    outputs,
                                    reference,
                                    kernels,
                                    scratch,
                                    NULL};

adze_status adze_group_norm(adze_stream stream, const adze_group_norm_args *args)
{
    return adze_dispatch(&adze_op_group_norm, stream, args);
}

adze_status adze_group_norm_scratch(adze_stream stream, const adze_group_norm_args *args, size_t *bytes)
{
    return adze_dispatch_scratch(&adze_op_group_norm, stream, args, bytes);
}
