/* quantised.h - weights in fewer bits: their contract, and what a stored number stands for. */
#ifndef ADZE_OPS_QUANTISED_H
#define ADZE_OPS_QUANTISED_H

#include "value.h"

static const adze_word format_words[] = {{"u4", ADZE_FORMAT_U4}, {NULL, 0}};

static inline int is_quantised(int dtype)
{
    return dtype == ADZE_I8 || dtype == ADZE_U8 || dtype == ADZE_F8E4M3;
}

/* A weight [n, k] and what belongs to it. */
typedef struct quantised {
    const char *name;
    const adze_tensor *w, *scale, *zero;
    int64_t n, k, group, group_rows; /* not 0: the group of whole rows is k */
} quantised;

static inline adze_status check_group(const char *op, int dtype, int32_t group, int32_t group_rows)
{
    ADZE_REQUIRE(group == 0 || group == 32 || group == 64 || group == 128, ADZE_BAD_ARG,
                 "%s: group is %d, it must be 0, 32, 64 or 128", op, group);
    ADZE_REQUIRE(group_rows == 0 || group_rows == 1 || group_rows == 128, ADZE_BAD_ARG,
                 "%s: group_rows is %d, it must be 0, 1 or 128", op, group_rows);
    ADZE_REQUIRE(group_rows != 128 || (group == 128 && dtype == ADZE_F8E4M3), ADZE_BAD_ARG,
                 "%s: group_rows is 128, it must be 1 unless the weights are f8e4m3 and group is 128", op);
    return ADZE_OK;
}

/* Whether a scale or a zero has the shape that the groups give it. */
static inline adze_status check_groups(const char *op, const char *name, const adze_tensor *t, const quantised *q,
                                       int whole)
{
    const int64_t rows = (q->n + q->group_rows - 1) / q->group_rows, columns = (q->k + q->group - 1) / q->group;
    ADZE_CHECK(adze_check_rows(op, name, t));
    if (whole && t->rank == 1 && (t->shape[0] == 1 || t->shape[0] == q->n))
        return ADZE_OK;
    ADZE_REQUIRE(t->rank == 2 && t->shape[0] == rows && t->shape[1] == columns, ADZE_BAD_ARG,
                 "%s: %s has rank %d and %lld x %lld elements, it must be %s[%lld, %lld] for these groups", op, name,
                 t->rank, (long long)(t->rank > 0 ? t->shape[0] : 1), (long long)(t->rank > 1 ? t->shape[1] : 1),
                 whole ? "[1], [n] or " : "", (long long)rows, (long long)columns);
    return ADZE_OK;
}

/* `scale_name` and `zero_name` are those of the weight that q has; whole: no groups of columns. */
static inline adze_status check_quantised(const char *op, const quantised *q, int whole, int32_t format,
                                          const char *scale_name, const char *zero_name)
{
    const int packed = q->w->dtype == ADZE_U8;
    ADZE_REQUIRE(packed == (format == ADZE_FORMAT_U4), ADZE_BAD_ARG, "%s: format is %d, %s of %s has %d", op, format,
                 q->name, adze_dtype_name(q->w->dtype), packed ? ADZE_FORMAT_U4 : ADZE_FORMAT_DTYPE);
    ADZE_REQUIRE(q->scale->dtype, ADZE_BAD_ARG, "%s: %s is absent, %s of %s needs it", op, scale_name, q->name,
                 adze_dtype_name(q->w->dtype));
    ADZE_CHECK(adze_check_float(op, scale_name, q->scale));
    ADZE_CHECK(check_groups(op, scale_name, q->scale, q, whole));
    if (!q->zero->dtype)
        return ADZE_OK;
    ADZE_REQUIRE(packed, ADZE_BAD_ARG, "%s: %s is given, %s of %s has none", op, zero_name, q->name,
                 adze_dtype_name(q->w->dtype));
    ADZE_REQUIRE(q->zero->dtype == ADZE_U8, ADZE_BAD_DTYPE, "%s: %s is %s, it must be u8", op, zero_name,
                 adze_dtype_name(q->zero->dtype));
    return check_groups(op, zero_name, q->zero, q, whole);
}

/* The element of a scale or a zero for row i and column j. */
static inline double of_group(const adze_tensor *t, const quantised *q, int64_t i, int64_t j)
{
    if (t->rank == 1)
        return adze_get(t, t->shape[0] == 1 ? 0 : i);
    return adze_get(t, i / q->group_rows * t->stride[0] + j / q->group);
}

static inline double weight_at(const quantised *q, int64_t i, int64_t j)
{
    const int packed = q->w->dtype == ADZE_U8;
    double stored = adze_get(q->w, i * q->w->stride[0] + (packed ? j / 2 : j));
    if (packed)
        stored = (double)((int)stored >> (j % 2 ? 4 : 0) & 15) - (q->zero->dtype ? of_group(q->zero, q, i, j) : 8);
    return stored * of_group(q->scale, q, i, j);
}

#endif
