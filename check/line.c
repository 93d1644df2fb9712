/* line.c - the text of a call, as ADZE_TRACE prints it, into arguments. */
#include "line.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef struct reader {
    const char *at;
    char *error;
    size_t error_size;
} reader;

static int fail(reader *r, const char *what)
{
    if (*r->at)
        snprintf(r->error, r->error_size, "%s at '%.24s'", what, r->at);
    else
        snprintf(r->error, r->error_size, "%s at the end of the line", what);
    return 0;
}

static void add_name(char *list, size_t size, const char *name)
{
    const size_t n = strlen(list);
    snprintf(list + n, size - n, "%s%s", n ? ", " : "", name);
}

static size_t word_length(const char *at)
{
    return strspn(at, "abcdefghijklmnopqrstuvwxyz_0123456789");
}

static int read_int(reader *r, int64_t *value)
{
    char *end;
    errno = 0;
    *value = strtoll(r->at, &end, 10);
    if (end == r->at)
        return fail(r, "a whole number is expected");
    if (errno)
        return fail(r, "the number does not fit 64 bits");
    r->at = end;
    return 1;
}

static int read_dtype(reader *r, int32_t *dtype)
{
    const size_t n = word_length(r->at);
    for (int d = ADZE_NONE; d <= ADZE_U8; d++)
        if (strlen(adze_dtype_name(d)) == n && memcmp(adze_dtype_name(d), r->at, n) == 0) {
            r->at += n;
            *dtype = d;
            return 1;
        }
    char names[160] = "", what[240];
    for (int d = ADZE_NONE; d <= ADZE_U8; d++)
        add_name(names, sizeof names, adze_dtype_name(d));
    snprintf(what, sizeof what, "a dtype is expected, one of %s,", names);
    return fail(r, what);
}

adze_tensor *adze_line_tensor(adze_line *line, int field)
{
    return (adze_tensor *)(void *)(line->args + line->op->fields[field].offset);
}

/* dtype[size:stride,...]@base+offset; strides, base and offset may be missing. */
static int read_tensor(reader *r, adze_line *line, int field)
{
    adze_tensor *t = adze_line_tensor(line, field);
    int strides = 0;
    if (!read_dtype(r, &t->dtype))
        return 0;
    if (t->dtype == ADZE_NONE)
        return 1;
    if (*r->at++ != '[')
        return r->at--, fail(r, "'[' is expected");
    while (*r->at != ']') {
        if (t->rank == 5)
            return fail(r, "a tensor has at most 5 dimensions");
        if (!read_int(r, &t->shape[t->rank]))
            return 0;
        if (*r->at == ':') {
            r->at++, strides++;
            if (!read_int(r, &t->stride[t->rank]))
                return 0;
        }
        t->rank++;
        if (*r->at == ',')
            r->at++;
        else if (*r->at != ']')
            return fail(r, "',' or ']' is expected");
    }
    r->at++;
    if (strides != 0 && strides != t->rank)
        return fail(r, "strides are given for some dimensions only");
    int64_t stride = 1;
    for (int d = t->rank - 1; d >= 0 && !strides; d--) {
        t->stride[d] = stride;
        if (__builtin_mul_overflow(stride, t->shape[d] ? t->shape[d] : 1, &stride))
            return fail(r, "the product of the sizes does not fit 64 bits");
    }
    if (*r->at != '@')
        return 1;
    const size_t n = word_length(++r->at);
    for (int f = 0; n && line->op->fields[f].name; f++)
        if (strlen(line->op->fields[f].name) == n && memcmp(line->op->fields[f].name, r->at, n) == 0)
            line->base[field] = f;
    if (n && (line->base[field] < 0 || !adze_is_tensor(&line->op->fields[line->base[field]]) ||
              line->base[field] == field))
        return fail(r, "no other tensor has this name");
    r->at += n;
    if (*r->at != '+' && *r->at != '-')
        return n ? 1 : fail(r, "a name or an offset is expected");
    if (!read_int(r, &line->offset[field]))
        return 0;
    if (line->base[field] < 0 && (line->offset[field] < 0 || line->offset[field] > 64))
        return fail(r, "an offset of 0 to 64 elements is expected");
    return 1;
}

static int fail_word(reader *r, const adze_field *f)
{
    char names[160] = "", what[240];
    for (const adze_word *w = f->words; w->name; w++)
        add_name(names, sizeof names, w->name);
    snprintf(what, sizeof what, "%s must be a whole number or one of %s", f->name, names);
    return fail(r, what);
}

static int read_number(reader *r, adze_line *line, const adze_field *f)
{
    void *to = line->args + f->offset;
    char *end;
    if (f->kind == ADZE_FLOAT) {
        const float value = strtof(r->at, &end);
        if (end == r->at)
            return fail(r, "a number is expected");
        memcpy(to, &value, sizeof value);
        r->at = end;
        return 1;
    }
    const size_t n = word_length(r->at);
    for (const adze_word *w = f->words; w && w->name; w++)
        if (strlen(w->name) == n && memcmp(w->name, r->at, n) == 0) {
            memcpy(to, &w->value, sizeof w->value);
            r->at += n;
            return 1;
        }
    int64_t value;
    if (f->words && !strchr("+-0123456789", *r->at))
        return fail_word(r, f);
    if (!read_int(r, &value))
        return 0;
    if (value != (int32_t)value)
        return fail(r, "the number does not fit 32 bits");
    const int32_t narrow = (int32_t)value;
    memcpy(to, &narrow, sizeof narrow);
    return 1;
}

/* Bases must lead to a tensor that has memory of its own. */
static int check_bases(reader *r, const adze_line *line)
{
    for (int f = 0; line->op->fields[f].name; f++) {
        int at = f, steps = 0;
        while (line->base[at] >= 0 && steps++ < ADZE_FIELDS_MAX) {
            at = line->base[at];
            if (!line->given[at])
                return fail(r, "a tensor is placed in one that is not given");
        }
        if (line->base[at] >= 0)
            return fail(r, "tensors are placed in one another");
    }
    return 1;
}

static int is_word(const reader *r, size_t n, const char *word)
{
    return strlen(word) == n && memcmp(r->at, word, n) == 0;
}

/* The names of adze_values, but for the first, which is what a line has that names none. */
static const char *const values_names[] = {"tiny", "outlier", "equal",   "mean",     "zero",
                                           "wide", "special", "largest", "opposite", NULL};

static int read_values(reader *r, adze_line *line)
{
    const size_t n = word_length(r->at);
    char names[160] = "";
    if (line->values)
        return fail(r, "values: is given twice");
    for (int i = 0; values_names[i]; i++) {
        if (is_word(r, n, values_names[i])) {
            line->values = (adze_values)(i + 1);
            r->at += n;
            return 1;
        }
        add_name(names, sizeof names, values_names[i]);
    }
    snprintf(r->error, r->error_size, "values: is '%.*s', it must be one of %s", n < 24 ? (int)n : 24, r->at, names);
    return 0;
}

/* The flags of a call, by their names in adze.h, or as a number. */
static int read_flags(reader *r, adze_line *line)
{
    static const adze_word words[] = {{"const_weights", ADZE_CONST_WEIGHTS},
                                      {"batch_invariant", ADZE_BATCH_INVARIANT},
                                      {"const_cache", ADZE_CONST_CACHE},
                                      {NULL, 0}};
    static const adze_field flags = {"flags", ADZE_INT, offsetof(adze_call, flags), words, {0}, NULL};
    if (((const adze_call *)(const void *)line->args)->flags)
        return fail(r, "flags is given twice");
    r->at += strlen("flags=");
    return read_number(r, line, &flags);
}

static int read_word(reader *r, adze_line *line)
{
    const size_t n = word_length(r->at);
    if (is_word(r, n, "values") && r->at[n] == ':') {
        r->at += n + 1;
        return read_values(r, line);
    }
    if (is_word(r, n, "flags") && r->at[n] == '=')
        return read_flags(r, line);
    if (strncmp(r->at, "scratch:0", 9) == 0) {
        line->no_scratch = 1;
        r->at += 9;
        return 1;
    }
    for (int f = 0; line->op->fields[f].name; f++) {
        const adze_field *field = &line->op->fields[f];
        if (!is_word(r, n, field->name) || r->at[n] != '=')
            continue;
        if (line->given[f])
            return fail(r, "a field is given twice");
        line->given[f] = 1;
        r->at += n + 1;
        return adze_is_tensor(field) ? read_tensor(r, line, f) : read_number(r, line, field);
    }
    char names[320] = "";
    for (int f = 0; line->op->fields[f].name; f++)
        add_name(names, sizeof names, line->op->fields[f].name);
    snprintf(r->error, r->error_size, "%s has no field '%.*s', it must be one of %s", line->op->name,
             n < 24 ? (int)n : 24, r->at, names);
    return 0;
}

static int fail_op(reader *r, size_t length)
{
    char names[320] = "";
    for (const adze_op *const *op = adze_ops; *op; op++)
        add_name(names, sizeof names, (*op)->name);
    snprintf(r->error, r->error_size, "no op is called '%.*s', it must be one of %s", length < 24 ? (int)length : 24,
             r->at, names);
    return 0;
}

int adze_line_parse(adze_line *line, const adze_op *op, const char *text, char *error, size_t error_size)
{
    reader r = {text, error, error_size};
    memset(line, 0, sizeof *line);
    for (int f = 0; f < ADZE_FIELDS_MAX; f++)
        line->base[f] = -1;
    r.at += strspn(r.at, " ");
    if (!op) {
        const size_t n = word_length(r.at);
        op = adze_find_op(r.at, n);
        if (!op)
            return fail_op(&r, n);
        r.at += n;
    }
    line->op = op;
    const uint32_t size = (uint32_t)op->args_size;
    memcpy(line->args, &size, sizeof size);
    for (;;) {
        r.at += strspn(r.at, " \t\r\n");
        if (*r.at == '\0' || strncmp(r.at, "->", 2) == 0)
            return check_bases(&r, line);
        if (!read_word(&r, line))
            return 0;
        if (*r.at && !strchr(" \t\r\n", *r.at))
            return fail(&r, "a space is expected");
    }
}

void adze_line_expand(char *to, size_t size, const char *text, const char *dtype)
{
    size_t n = 0;
    for (; *text && n + 1 < size; text++) {
        if (*text != '$')
            to[n++] = *text;
        else
            for (const char *d = dtype; *d && n + 1 < size; d++)
                to[n++] = *d;
    }
    to[n] = '\0';
}

const char *const adze_line_dtypes[3] = {"f32", "f16", "bf16"};

int adze_line_variants(const char *text)
{
    return strchr(text, '$') ? 3 : 1;
}

int adze_first_input(const adze_op *op)
{
    int f = 0;
    while (op->fields[f].name && (!adze_is_input(&op->fields[f]) || adze_is_inout(&op->fields[f])))
        f++;
    return f;
}

int adze_outer(const adze_tensor *t)
{
    for (int d = 0; d < t->rank - 1; d++)
        if (t->shape[d] > 1)
            return d;
    return -1;
}
