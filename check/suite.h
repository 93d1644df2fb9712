/* suite.h - what check/<op>.c gives: the cases of an op, as lines. */
#ifndef ADZE_CHECK_SUITE_H
#define ADZE_CHECK_SUITE_H

#include "kernel.h"

/* A line is what ADZE_TRACE prints, less the op's name and the outputs, which are made to fit when they are not
   given; a tensor without strides is contiguous; each `$` stands for f32, f16 and bf16 in turn. `flags=const_weights`
   is ADZE_CONST_WEIGHTS; `values:NAME` gives the first input another distribution (line.h), `scratch:0` withholds
   scratch. */
typedef struct adze_bad_case {
    const char *line;
    adze_status status; /* what the call must return */
    const char *says;   /* a part of the sentence it must leave */
} adze_bad_case;

typedef struct adze_suite {
    const adze_op *op;
    const char *const *good;  /* lines that must be right */
    const adze_bad_case *bad; /* calls that must be refused, besides those made for every op */
    const char *const *bench; /* lines worth timing, `$` is bf16 unless a dtype is asked for */
    const char *const *gpu;   /* NULL, or more good lines: their size matters to a GPU alone */
    const char *const *huge;  /* lines above 2^31 elements, for GPUs: sampled rows are checked */
    void (*fill)(void *args); /* NULL, or sets inputs that may not be random (host memory) */
    /* Of ops with samples: makes the inputs of a large call smaller, each in the dimension that it knows by its
       place, so that the definition takes little time. NULL: the outermost dimension is cut. */
    void (*cut)(void *args);
    double (*flops)(const void *args); /* NULL: the op moves memory, its arithmetic does not count */
    /* The bytes that a call must move. NULL: each tensor once, which is too much where a call reads some rows of a
       tensor, or changes some of them. */
    void (*bytes)(const void *args, int64_t *read, int64_t *written);
} adze_suite;

#define X(name) extern const adze_suite adze_suite_##name;
ADZE_OPS(X)
#undef X
extern const adze_suite *const adze_suites[]; /* ended by NULL */
const adze_suite *adze_suite_of(const adze_op *op);
extern const char adze_program[]; /* what runs these ops: "adze", or a project's "build/NAME" */

#endif
