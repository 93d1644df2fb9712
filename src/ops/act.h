/* act.h - the activations: their names, and what each one is. */
#ifndef ADZE_OPS_ACT_H
#define ADZE_OPS_ACT_H

#include "value.h"

static const adze_word act_words[] = {
    {"silu", ADZE_ACT_SILU},
    {"swish", ADZE_ACT_SILU},
    {"gelu", ADZE_ACT_GELU},
    {"gelu_python", ADZE_ACT_GELU},
    {"gelu_tanh", ADZE_ACT_GELU_TANH},
    {"gelu_new", ADZE_ACT_GELU_TANH},
    {"gelu_fast", ADZE_ACT_GELU_TANH},
    {"gelu_accurate", ADZE_ACT_GELU_TANH},
    {"gelu_pytorch_tanh", ADZE_ACT_GELU_TANH},
    {"gelu_python_tanh", ADZE_ACT_GELU_TANH},
    {"gelu_quick", ADZE_ACT_GELU_QUICK},
    {"quick_gelu", ADZE_ACT_GELU_QUICK},
    {"relu", ADZE_ACT_RELU},
    {"relu2", ADZE_ACT_RELU2},
    {"relu_squared", ADZE_ACT_RELU2},
    {"sigmoid", ADZE_ACT_SIGMOID},
    {NULL, 0},
};

/* A constant that is no float. */
static inline adze_value act_constant(double v)
{
    return (adze_value){v, ADZE_U * v};
}

/* e^a for a <= 0, to two float units; below the smallest normal float to a unit of the subnormal ones. What a kernel
   has in the place of a is not positive either, so that the result is between 0 and 1 however wrong a is. */
static inline adze_value act_exp(adze_value a)
{
    adze_value p = adze_fn(a, exp(a.v), exp(fmin(a.v + a.e, 0)), 2);
    p.e = fmin(p.e + 0x1p-149, 1);
    return p;
}

/* With e = exp(-|z|): 1 / (1 + e), or e / (1 + e) for negative z. The reciprocal is good to one float unit. */
static inline adze_value act_sigmoid(adze_value z)
{
    const adze_value e = act_exp((adze_value){-fabs(z.v), z.e}), sum = adze_add(adze_exact(1), e);
    const double low = fmax(sum.v - sum.e, 1);
    const adze_value inverse = adze_fn(sum, 1 / sum.v, 1 / (low * low), 1);
    return z.v < 0 ? adze_mul(e, inverse) : inverse;
}

/* The normal CDF at x. The tail beyond |x| is good to six float units. */
static inline adze_value act_normal(adze_value x)
{
    const double a = fabs(x.v), nearest = fmax(a - x.e, 0);
    adze_value tail =
        adze_fn(x, 0.5 * erfc(a * 0.70710678118654752), 0.39894228040143268 * exp(-0.5 * nearest * nearest), 6);
    tail.e += 0x1p-148;
    return x.v < 0 ? tail : adze_sub(adze_exact(1), tail);
}

static inline adze_value act_relu(adze_value x)
{
    return x.v <= 0 ? (adze_value){0, fmax(x.v + x.e, 0)} : x;
}

/* 2 sqrt(2 / pi) (x + 0.044715 x^3): tanh of its half is 2 sigmoid - 1 of it. */
static inline adze_value act_gelu_tanh_argument(adze_value x)
{
    const adze_value cube = adze_mul(adze_mul(x, x), x);
    return adze_mul(act_constant(1.5957691216057308), adze_add(x, adze_mul(act_constant(0.044715), cube)));
}

/* act(x). At minus infinity products with a vanishing factor are NaN, as they are in torch. */
static inline adze_value act_value(int act, adze_value x)
{
    if (isinf(x.v)) {
        const int bounded = act == ADZE_ACT_SIGMOID || act == ADZE_ACT_RELU || act == ADZE_ACT_RELU2;
        return adze_exact(x.v < 0 ? (bounded ? 0 : NAN) : act == ADZE_ACT_SIGMOID ? 1 : INFINITY);
    }
    switch (act) {
    case ADZE_ACT_SILU: return adze_mul(x, act_sigmoid(x));
    case ADZE_ACT_GELU: return adze_mul(x, act_normal(x));
    case ADZE_ACT_GELU_TANH: return adze_mul(x, act_sigmoid(act_gelu_tanh_argument(x)));
    case ADZE_ACT_GELU_QUICK: return adze_mul(x, act_sigmoid(adze_mul(act_constant(1.702), x)));
    case ADZE_ACT_RELU: return act_relu(x);
    case ADZE_ACT_RELU2: return adze_mul(act_relu(x), act_relu(x));
    case ADZE_ACT_SIGMOID: return act_sigmoid(x);
    default: return x;
    }
}

#endif
