/* rope_frequencies.c - the frequencies of rotary positions, as models compute them. Where a model works in float, so
   does this, step by step: at large positions the last bit of a frequency changes the angle. Each step is one
   statement, so that no compiler contracts two. */
#include "kernel.h"

#include <math.h>
#include <string.h>

#define PI 3.14159265358979323846

/* base ^ exponent, rounded to float once. */
static float power(double base, float exponent)
{
    return (float)pow((double)(float)base, (double)exponent);
}

/* theta ^ (2 i / dim). */
static float wave(double theta, int64_t i, int32_t dim)
{
    const float exponent = (float)(2 * i) / (float)dim;
    return power(theta, exponent);
}

static adze_status take_spec(const adze_rope_spec *caller, adze_rope_spec *spec)
{
    const size_t size = caller ? caller->size : 0, known = sizeof *spec;
    ADZE_REQUIRE(size >= 4 * sizeof(uint32_t) && size <= 4096, ADZE_BAD_ARG,
                 "rope_frequencies: spec.size is %zu; write .size = sizeof(adze_rope_spec)", size);
    for (size_t i = known; i < size; i++)
        ADZE_REQUIRE(
            !((const char *)caller)[i], ADZE_BAD_ARG,
            "rope_frequencies: byte %zu of spec, whose size is %zu, belongs to a field of a newer adze.h; this "
            "library is version %d.%d.%d, whose spec has %zu bytes",
            i, size, ADZE_VERSION / 10000, ADZE_VERSION / 100 % 100, ADZE_VERSION % 100, known);
    memset(spec, 0, known);
    memcpy(spec, caller, size < known ? size : known);
    ADZE_CHECK(adze_check_range("rope_frequencies", "rope_type", spec->rope_type, ADZE_ROPE_DEFAULT,
                                ADZE_ROPE_PROPORTIONAL));
    ADZE_CHECK(adze_check_range("rope_frequencies", "no_truncate", spec->no_truncate, 0, 1));
    ADZE_REQUIRE(spec->rotary_dim > 0 && spec->rotary_dim % 2 == 0, ADZE_BAD_ARG,
                 "rope_frequencies: rotary_dim is %d, it must be even and above 0", spec->rotary_dim);
    ADZE_REQUIRE(spec->rope_theta > 0, ADZE_BAD_ARG, "rope_frequencies: rope_theta is %g, it must be above 0",
                 spec->rope_theta);
    return ADZE_OK;
}

/* Checks a parameter that a rope_type requires. */
static adze_status need(const char *type, const char *name, double value)
{
    ADZE_REQUIRE(value > 0, ADZE_BAD_ARG, "rope_frequencies: %s needs %s above 0, it is %g", type, name, value);
    return ADZE_OK;
}

static adze_status linear(const adze_rope_spec *s, double *freq)
{
    ADZE_CHECK(need("linear", "factor", s->factor));
    for (int64_t i = 0; i < s->rotary_dim / 2; i++) {
        const float f = 1 / wave(s->rope_theta, i, s->rotary_dim);
        freq[i] = f / (float)s->factor;
    }
    return ADZE_OK;
}

static adze_status dynamic(const adze_rope_spec *s, int64_t seq_len, double *freq)
{
    ADZE_CHECK(need("dynamic", "factor", s->factor));
    ADZE_CHECK(need("dynamic", "max_position_embeddings", (double)s->max_position_embeddings));
    ADZE_REQUIRE(s->rotary_dim > 2, ADZE_BAD_ARG, "rope_frequencies: dynamic needs rotary_dim above 2, it is %d",
                 s->rotary_dim);
    const double most = (double)s->max_position_embeddings, length = fmax((double)seq_len, most);
    const double stretch = s->factor * length / most - (s->factor - 1), dim = s->rotary_dim;
    const double theta = s->rope_theta * pow(stretch, dim / (dim - 2));
    for (int64_t i = 0; i < s->rotary_dim / 2; i++)
        freq[i] = 1 / wave(theta, i, s->rotary_dim);
    return ADZE_OK;
}

/* Wavelengths beyond the original context are scaled by factor, short ones are kept, and those between are
   interpolated. */
static adze_status llama3(const adze_rope_spec *s, double *freq)
{
    ADZE_CHECK(need("llama3", "factor", s->factor));
    ADZE_CHECK(need("llama3", "low_freq_factor", s->low_freq_factor));
    ADZE_CHECK(need("llama3", "high_freq_factor - low_freq_factor", s->high_freq_factor - s->low_freq_factor));
    ADZE_CHECK(need("llama3", "original_max_position_embeddings", (double)s->original_max_position_embeddings));
    const double context = (double)s->original_max_position_embeddings;
    const float longest = (float)(context / s->low_freq_factor), shortest = (float)(context / s->high_freq_factor);
    const float factor = (float)s->factor, low = (float)s->low_freq_factor;
    const float range = (float)(s->high_freq_factor - s->low_freq_factor);
    for (int64_t i = 0; i < s->rotary_dim / 2; i++) {
        const float f = 1 / wave(s->rope_theta, i, s->rotary_dim);
        const float period = 1 / f, length = period * (float)(2 * PI);
        if (length > longest || length < shortest) {
            freq[i] = length > longest ? f / factor : f;
            continue;
        }
        const float turn = 1 / length, turns = turn * (float)context, above = turns - low;
        const float kept = above / range, stretched = (1 - kept) * f;
        const float slow = stretched / factor, fast = kept * f;
        freq[i] = slow + fast;
    }
    return ADZE_OK;
}

static double magnitude(double factor, double mscale)
{
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

/* The column that makes so many rotations within the original context. */
static double turning_column(const adze_rope_spec *s, double turns)
{
    return s->rotary_dim * log((double)s->original_max_position_embeddings / (turns * 2 * PI)) /
           (2 * log(s->rope_theta));
}

/* How much a context was extended: the factor, or else the ratio of the two lengths. */
static double stretch_of(const adze_rope_spec *s)
{
    return s->factor != 0 ? s->factor
                          : (double)s->max_position_embeddings / (double)s->original_max_position_embeddings;
}

static adze_status yarn(const adze_rope_spec *s, double *freq, double *scale)
{
    ADZE_CHECK(need("yarn", "original_max_position_embeddings", (double)s->original_max_position_embeddings));
    const double factor = stretch_of(s);
    ADZE_CHECK(need("yarn", "factor or max_position_embeddings", factor));
    ADZE_REQUIRE(s->rope_theta != 1, ADZE_BAD_ARG, "rope_frequencies: rope_theta is 1, yarn needs another value");
    *scale = s->attention_factor != 0 ? s->attention_factor
             : s->mscale != 0 && s->mscale_all_dim != 0
                 ? magnitude(factor, s->mscale) / magnitude(factor, s->mscale_all_dim)
                 : magnitude(factor, 1);
    double low = turning_column(s, s->beta_fast != 0 ? s->beta_fast : 32);
    double high = turning_column(s, s->beta_slow != 0 ? s->beta_slow : 1);
    if (!s->no_truncate)
        low = floor(low), high = ceil(high);
    low = fmax(low, 0);
    high = fmin(high, s->rotary_dim - 1);
    if (low == high)
        high += 0.001;
    for (int64_t i = 0; i < s->rotary_dim / 2; i++) {
        const float length = wave(s->rope_theta, i, s->rotary_dim), stretched = (float)factor * length;
        const float fast = 1 / length, slow = 1 / stretched, from_low = (float)i - (float)low;
        const float ramp = fminf(fmaxf(from_low / (float)(high - low), 0), 1), kept = 1 - ramp;
        const float slow_part = slow * (1 - kept), fast_part = fast * kept;
        freq[i] = slow_part + fast_part;
    }
    return ADZE_OK;
}

static adze_status longrope(const adze_rope_spec *s, int64_t seq_len, double *freq, double *scale)
{
    ADZE_CHECK(need("longrope", "original_max_position_embeddings", (double)s->original_max_position_embeddings));
    ADZE_REQUIRE(s->short_factor && s->long_factor, ADZE_BAD_ARG, "rope_frequencies: %s is NULL, longrope needs it",
                 s->short_factor ? "long_factor" : "short_factor");
    const double context = (double)s->original_max_position_embeddings, factor = stretch_of(s);
    ADZE_CHECK(need("longrope", "factor or max_position_embeddings", factor));
    *scale = s->attention_factor != 0 ? s->attention_factor : factor <= 1 ? 1 : sqrt(1 + log(factor) / log(context));
    const double *stretch = seq_len > s->original_max_position_embeddings ? s->long_factor : s->short_factor;
    for (int64_t i = 0; i < s->rotary_dim / 2; i++) {
        const float length = (float)stretch[i] * wave(s->rope_theta, i, s->rotary_dim);
        freq[i] = 1 / length;
    }
    return ADZE_OK;
}

/* Only the first part of the columns rotates, with the frequencies of the whole head. */
static adze_status proportional(const adze_rope_spec *s, double *freq)
{
    const double part = s->partial_rotary_factor != 0 ? s->partial_rotary_factor : 1;
    const int64_t turning = (int64_t)floor(part * s->rotary_dim / 2);
    for (int64_t i = 0; i < s->rotary_dim / 2; i++) {
        const float f = i < turning ? 1 / wave(s->rope_theta, i, s->rotary_dim) : 0;
        freq[i] = f / (float)(s->factor != 0 ? s->factor : 1);
    }
    return ADZE_OK;
}

adze_status adze_rope_frequencies(const adze_rope_spec *spec, int64_t seq_len, double *freq, float *scale)
{
    adze_rope_spec s;
    double magnified = 1;
    adze_status status = ADZE_OK;
    ADZE_CHECK(take_spec(spec, &s));
    ADZE_REQUIRE(freq && scale, ADZE_BAD_ARG, "rope_frequencies: %s is NULL", freq ? "scale" : "freq");
    switch (s.rope_type) {
    case ADZE_ROPE_LINEAR: status = linear(&s, freq); break;
    case ADZE_ROPE_DYNAMIC: status = dynamic(&s, seq_len, freq); break;
    case ADZE_ROPE_YARN: status = yarn(&s, freq, &magnified); break;
    case ADZE_ROPE_LONGROPE: status = longrope(&s, seq_len, freq, &magnified); break;
    case ADZE_ROPE_LLAMA3: status = llama3(&s, freq); break;
    case ADZE_ROPE_PROPORTIONAL: status = proportional(&s, freq); break;
    default:
        for (int64_t i = 0; i < s.rotary_dim / 2; i++)
            freq[i] = 1 / wave(s.rope_theta, i, s.rotary_dim);
    }
    *scale = (float)magnified;
    return status;
}

adze_status adze_rope_axes(int32_t axes, const int32_t *axes_dim, double theta, double *freq, int32_t *axis)
{
    ADZE_CHECK(adze_check_range("rope_axes", "axes", axes, 1, 4));
    ADZE_REQUIRE(axes_dim && freq && axis, ADZE_BAD_ARG, "rope_axes: %s is NULL",
                 !axes_dim ? "axes_dim"
                 : !freq   ? "freq"
                           : "axis");
    for (int32_t a = 0; a < axes; a++) {
        ADZE_REQUIRE(axes_dim[a] >= 0 && axes_dim[a] % 2 == 0, ADZE_BAD_ARG,
                     "rope_axes: axis %d has dimension %d, it must be even and not negative", a, axes_dim[a]);
        for (int32_t i = 0; i < axes_dim[a] / 2; i++) {
            *freq++ = 1 / pow(theta, 2.0 * i / axes_dim[a]);
            *axis++ = a;
        }
    }
    return ADZE_OK;
}

adze_status adze_rope_video_axes(int32_t head_dim, double theta, double *freq, int32_t *axis)
{
    const int32_t third = 2 * (head_dim / 6), axes_dim[3] = {head_dim - 2 * third, third, third};
    ADZE_REQUIRE(head_dim > 0 && head_dim % 2 == 0, ADZE_BAD_ARG,
                 "rope_video_axes: head_dim is %d, it must be even and above 0", head_dim);
    return adze_rope_axes(3, axes_dim, theta, freq, axis);
}

adze_status adze_rope_fractions(int32_t dim, double theta, double *freq, int32_t *axis)
{
    ADZE_REQUIRE(dim > 0 && dim % 2 == 0, ADZE_BAD_ARG, "rope_fractions: dim is %d, it must be even and above 0",
                 dim);
    ADZE_REQUIRE(theta > 0, ADZE_BAD_ARG, "rope_fractions: theta is %g, it must be above 0", theta);
    ADZE_REQUIRE(freq && axis, ADZE_BAD_ARG, "rope_fractions: %s is NULL", freq ? "axis" : "freq");
    const int32_t steps = dim / 6, zeros = dim % 6 / 2;
    const float step = steps > 1 ? 1 / (float)(steps - 1) : 0;
    for (int32_t i = 0; i < zeros; i++)
        freq[i] = axis[i] = 0;
    for (int32_t i = 0; i < steps; i++) {
        /* Even steps from 0 to 1, counted from the nearer end. From the other end torch rounds once. */
        const int first_half = i < steps / 2 || steps == 1;
        const float exponent = first_half ? step * (float)i : fmaf(-step, (float)(steps - 1 - i), 1);
        const float times_pi = power(theta, exponent) * (float)PI;
        for (int32_t a = 0; a < 3; a++) {
            freq[zeros + 3 * i + a] = times_pi / 2;
            axis[zeros + 3 * i + a] = a;
        }
    }
    return ADZE_OK;
}

adze_status adze_rope_fraction_positions(const int32_t *size, const float *scale, const float *patch,
                                         const float *base, float *pos)
{
    ADZE_REQUIRE(size && pos, ADZE_BAD_ARG, "rope_fraction_positions: %s is NULL", size ? "pos" : "size");
    ADZE_REQUIRE(!scale || (patch && base), ADZE_BAD_ARG,
                 "rope_fraction_positions: %s is NULL, it must be given with scale", patch ? "base" : "patch");
    int64_t count = 1;
    for (int a = 0; a < 3; a++) {
        ADZE_REQUIRE(size[a] >= 0, ADZE_BAD_ARG, "rope_fraction_positions: size[%d] is %d, it must not be negative",
                     a, size[a]);
        count *= size[a];
    }
    for (int64_t i = 0; i < count; i++) {
        const int64_t column = i % size[2], row = i / size[2] % size[1], frame = i / size[2] / size[1];
        const int64_t index[3] = {frame, row, column};
        for (int a = 0; a < 3; a++) {
            float at = (float)index[a];
            if (scale) {
                at = at * scale[a];
                at = at * patch[a];
                at = at / base[a];
            }
            at = at * 2;
            pos[3 * i + a] = at - 1;
        }
    }
    return ADZE_OK;
}
