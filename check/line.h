/* line.h - a call as text, the form that ADZE_TRACE prints, and the arguments that it stands for. */
#ifndef ADZE_CHECK_LINE_H
#define ADZE_CHECK_LINE_H

#include "kernel.h"

#include <stdio.h>

/* The distribution of the first input: `values:NAME` asks for another than the normal one. Each aims at one kind of
   error; data.c draws them. */
typedef enum adze_values {
    ADZE_VALUES_NORMAL,
    ADZE_VALUES_TINY,    /* so small that eps matters */
    ADZE_VALUES_OUTLIER, /* one large value among small ones */
    ADZE_VALUES_EQUAL,   /* all the same */
    ADZE_VALUES_MEAN,    /* a mean far from zero: a variance in one pass is wrong */
    ADZE_VALUES_ZERO,
    ADZE_VALUES_WIDE,    /* into the tails of exp, tanh and erf */
    ADZE_VALUES_SPECIAL, /* with infinities and NaN */
    ADZE_VALUES_LARGEST, /* all the largest of f16: squares, and sums of them, overflow in f16 */
    ADZE_VALUES_OPPOSITE /* the same with alternating signs */
} adze_values;

enum { ADZE_FIELDS_MAX = 40, ADZE_ARGS_MAX = 4096 };
typedef struct adze_line {
    const adze_op *op;
    _Alignas(16) char args[ADZE_ARGS_MAX]; /* no data pointers yet */
    int given[ADZE_FIELDS_MAX];            /* by field: the line has it */
    int base[ADZE_FIELDS_MAX];             /* by field: the field whose memory it lies in, or -1 */
    int64_t offset[ADZE_FIELDS_MAX];       /* by field: elements after the base's first, or after a 64-byte line */
    adze_values values;
    int no_scratch;
} adze_line;
/* 0 when text is not a line; then error holds a sentence. `op` NULL: the line begins with the op's name. */
int adze_line_parse(adze_line *line, const adze_op *op, const char *text, char *error, size_t error_size);
/* Copies text with each `$` replaced. */
void adze_line_expand(char *to, size_t size, const char *text, const char *dtype);
extern const char *const adze_line_dtypes[3]; /* what `$` stands for in turn */
/* How many of them a text stands for: 1 where it has no `$`. */
int adze_line_variants(const char *text);
adze_tensor *adze_line_tensor(adze_line *line, int field);
/* The first field that is read and not written: its rows are those of the call. */
int adze_first_input(const adze_op *op);
/* The outermost dimension that has more than one index and is not the last; -1: there is none. */
int adze_outer(const adze_tensor *t);

/* The elements of a tensor in row-major order; `i` counts them, `at` is the distance from data. */
typedef struct adze_walk {
    int64_t i, at, index[5];
} adze_walk;
static inline void adze_walk_next(adze_walk *w, const adze_tensor *t)
{
    w->i++;
    for (int d = t->rank - 1; d >= 0; d--) {
        if (++w->index[d] < t->shape[d]) {
            w->at += t->stride[d];
            return;
        }
        w->at -= t->stride[d] * (t->shape[d] - 1); /* of one index the stride may be any number */
        w->index[d] = 0;
    }
}

#endif
