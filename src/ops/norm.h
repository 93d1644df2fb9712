/* norm.h - what rms_norm and layer_norm share: fields, contract and definition. */
#ifndef ADZE_OPS_NORM_H
#define ADZE_OPS_NORM_H

#include "value.h"

static const adze_field fields[] = {
    ADZE_OUTPUT(norm, ADZE_OUT, out, ADZE_IN_PLACE(norm, x), ADZE_IN_PLACE(norm, residual),
                ADZE_IN_PLACE(norm, shift)),
    ADZE_OUTPUT(norm, ADZE_OUT_OPTIONAL, sum, ADZE_IN_PLACE(norm, x), ADZE_IN_PLACE(norm, residual), 0),
    ADZE_FIELD(norm, ADZE_IN, x),
    ADZE_FIELD(norm, ADZE_OPTIONAL, residual),
    ADZE_FIELD(norm, ADZE_OPTIONAL, weight),
    ADZE_FIELD(norm, ADZE_OPTIONAL, bias),
    ADZE_FIELD(norm, ADZE_OPTIONAL, gate),
    ADZE_FIELD(norm, ADZE_OPTIONAL, gate_table),
    ADZE_FIELD(norm, ADZE_OPTIONAL, scale),
    ADZE_FIELD(norm, ADZE_OPTIONAL, scale_table),
    ADZE_FIELD(norm, ADZE_OPTIONAL, shift),
    ADZE_FIELD(norm, ADZE_OPTIONAL, shift_table),
    ADZE_FIELD(norm, ADZE_FLOAT, eps),
    ADZE_FIELD(norm, ADZE_FLOAT, weight_offset),
    ADZE_FIELD(norm, ADZE_INT, rounding),
    ADZE_FIELD(norm, ADZE_INT, out_dtype),
    ADZE_OUTPUT(norm, ADZE_OUT_IF, out_scale, 0, 0, 0),
    ADZE_FIELDS_END,
};

static adze_status norm_validate(const char *op, const adze_norm_args *a)
{
    ADZE_CHECK(adze_check_float(op, "x", &a->x));
    ADZE_CHECK(adze_check_rows(op, "x", &a->x));
    const int64_t dim = a->x.shape[a->x.rank - 1];
    ADZE_CHECK(adze_check_like(op, "residual", &a->residual, &a->x));
    ADZE_CHECK(adze_check_param(op, "weight", &a->weight, &a->x, dim));
    ADZE_CHECK(adze_check_param(op, "bias", &a->bias, &a->x, dim));
    const struct {
        const char *name, *table_name;
        const adze_tensor *t, *table;
    } params[] = {{"gate", "gate_table", &a->gate, &a->gate_table},
                  {"scale", "scale_table", &a->scale, &a->scale_table},
                  {"shift", "shift_table", &a->shift, &a->shift_table}};
    for (int i = 0; i < 3; i++) {
        ADZE_CHECK(adze_check_to(op, params[i].name, params[i].t, &a->x));
        ADZE_CHECK(adze_check_to(op, params[i].table_name, params[i].table, &a->x));
        ADZE_REQUIRE(!params[i].table->dtype || params[i].t->dtype, ADZE_BAD_ARG, "%s: %s is given without %s", op,
                     params[i].table_name, params[i].name);
    }
    ADZE_REQUIRE(!a->gate.dtype || a->residual.dtype, ADZE_BAD_ARG, "%s: gate is given without residual", op);
    ADZE_REQUIRE(a->eps >= 0, ADZE_BAD_ARG, "%s: eps is %g, it must not be negative", op, (double)a->eps);
    ADZE_CHECK(adze_check_bits(op, "rounding", a->rounding, ADZE_ROUND_NORM | ADZE_ROUND_STEPS | ADZE_FLOAT_SUM));
    ADZE_REQUIRE(a->out_dtype == 0 || a->out_dtype == a->x.dtype || a->out_dtype == ADZE_F32 ||
                     adze_is_bytes(a->out_dtype),
                 ADZE_BAD_DTYPE, "%s: out_dtype is %s, it must be x's dtype, f32, i8 or f8e4m3", op,
                 adze_dtype_name(a->out_dtype));
    return ADZE_OK;
}

static void norm_outputs(void *args)
{
    adze_norm_args *a = args;
    adze_like(&a->out, &a->x);
    if (a->out_dtype)
        a->out.dtype = a->out_dtype;
    if (a->residual.dtype)
        adze_like(&a->sum, &a->x);
    adze_scale_like(&a->out_scale, &a->out);
}

/* t + table at one element; `steps` rounds it to x's dtype. */
static adze_value norm_with_table(const adze_norm_args *a, const adze_tensor *t, const adze_tensor *table, int64_t at,
                                  int64_t table_at)
{
    const adze_value v = adze_element(t, at);
    if (!table->dtype)
        return v;
    return adze_rounded_if(a->rounding & ADZE_ROUND_STEPS, a->x.dtype, adze_add(v, adze_element(table, table_at)));
}

/* The offsets of one row, in the order of the tensors below. */
enum { X, RESIDUAL, GATE, GATE_TABLE, SCALE, SCALE_TABLE, SHIFT, SHIFT_TABLE, NORM_TENSORS };

static adze_value norm_sum(const adze_norm_args *a, const int64_t *at, int64_t i)
{
    const int steps = a->rounding & ADZE_ROUND_STEPS;
    adze_value h = adze_element(&a->x, at[X] + i);
    if (a->gate.dtype)
        h = adze_rounded_if(
            steps, a->x.dtype,
            adze_mul(norm_with_table(a, &a->gate, &a->gate_table, at[GATE] + i, at[GATE_TABLE] + i), h));
    return a->residual.dtype ? adze_add(adze_element(&a->residual, at[RESIDUAL] + i), h) : h;
}

static adze_value norm_out(const adze_norm_args *a, const int64_t *at, int64_t i, adze_value y)
{
    const int steps = a->rounding & ADZE_ROUND_STEPS, dtype = a->x.dtype;
    y = adze_rounded_if(a->rounding & ADZE_ROUND_NORM, dtype, y);
    if (a->weight.dtype)
        y = adze_mul(y, adze_add(adze_element(&a->weight, i), adze_exact(a->weight_offset)));
    if (a->bias.dtype)
        y = adze_add(y, adze_element(&a->bias, i));
    if (a->scale.dtype) {
        const adze_value scale = norm_with_table(a, &a->scale, &a->scale_table, at[SCALE] + i, at[SCALE_TABLE] + i);
        const adze_value factor = adze_rounded_if(steps, dtype, adze_add(adze_exact(1), scale));
        y = adze_rounded_if(steps && a->shift.dtype, dtype, adze_mul(adze_rounded_if(steps, dtype, y), factor));
    }
    if (a->shift.dtype)
        y = adze_add(adze_rounded_if(steps, dtype, y),
                     norm_with_table(a, &a->shift, &a->shift_table, at[SHIFT] + i, at[SHIFT_TABLE] + i));
    return y;
}

/* h times the scale. Where equal values are so large that the error of their mean hides eps, the scale has no bound:
   but it is that of the very values it multiplies, whose squares have a mean of 1 at most, so that none is beyond
   sqrt(dim). */
static adze_value norm_scaled(adze_value h, adze_value scale, int64_t dim)
{
    if (!isinf(scale.e))
        return adze_mul(h, scale);
    const double v = h.v * scale.v;
    return (adze_value){v, fabs(v) + sqrt((double)dim) * (1 + ADZE_U * adze_sum_depth(dim))};
}

static void norm_reference(const adze_norm_args *a, adze_value *const *out, int centred)
{
    const int64_t dim = a->x.shape[a->x.rank - 1];
    const adze_tensor *const tensors[NORM_TENSORS] = {&a->x,     &a->residual,    &a->gate,  &a->gate_table,
                                                      &a->scale, &a->scale_table, &a->shift, &a->shift_table};
    adze_rows rows;
    adze_rows_init(&rows, &a->x, NORM_TENSORS, tensors);
    for (int64_t r = 0; r < rows.count; r++) {
        int64_t at[NORM_TENSORS];
        for (int t = 0; t < NORM_TENSORS; t++)
            at[t] = adze_row_offset(&rows, t, r);
        adze_value *h = out[0] + r * dim, mean = {0, 0}, square;
        double sum = 0, magnitude = 0, error = 0;
        for (int64_t i = 0; i < dim; i++) {
            h[i] = norm_sum(a, at, i);
            if (out[1])
                out[1][r * dim + i] = h[i];
            h[i] = adze_rounded_if(a->residual.dtype && !(a->rounding & ADZE_FLOAT_SUM), a->x.dtype, h[i]);
            sum += h[i].v, magnitude += fabs(h[i].v), error += h[i].e;
        }
        const adze_value n = adze_exact((double)dim);
        if (centred)
            mean = adze_div(adze_summed(dim, sum, magnitude, error), n);
        sum = error = 0;
        for (int64_t i = 0; i < dim; i++) {
            h[i] = centred ? adze_sub(h[i], mean) : h[i];
            square = adze_mul(h[i], h[i]);
            sum += square.v, error += square.e;
        }
        const adze_value variance = adze_div(adze_summed(dim, sum, sum, error), n);
        const adze_value scale = adze_rsqrt(adze_add(variance, adze_exact(a->eps)));
        for (int64_t i = 0; i < dim; i++)
            h[i] = norm_out(a, at, i, norm_scaled(h[i], scale, dim));
        if (out[2])
            adze_quantised(a->x.dtype, a->out_dtype, dim, h, &out[2][r]);
    }
}

#endif
