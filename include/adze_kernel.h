/* adze_kernel.h - what an op is and what a kernel is, for those who write them. No promise of stability. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ADZE_KERNEL_H
#define ADZE_KERNEL_H

#include "adze.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One argument of an op. The table of fields is the op's only description: the trace line, `adze run`, the
   checks common to all tensors, and the operators of PyTorch, JAX and TVM FFI are all made from it. */
typedef enum adze_kind {
    ADZE_IN = 1,
    ADZE_OPTIONAL, /* an input that may be absent */
    ADZE_INOUT,    /* the caller's, of which a call changes some elements (a cache); validate() knows its shape */
    ADZE_INOUT_OPTIONAL, /* the same, but it may be absent */
    ADZE_OUT,            /* always there */
    ADZE_OUT_IF,         /* must be there exactly when outputs() gives it a dtype */
    ADZE_OUT_OPTIONAL,   /* the same, but the caller may leave it out */
    ADZE_FLOAT,
    ADZE_INT
} adze_kind;

typedef struct adze_word { /* a name for a value of an ADZE_INT field */
    const char *name;
    int32_t value;
} adze_word;

enum { ADZE_MAY_BE = 3 };
typedef struct adze_field {
    const char *name;
    adze_kind kind;
    size_t offset;
    const adze_word *words; /* NULL, or ended by a zero row; a value is printed as its first name */
    /* Of an output: the offsets of the inputs whose very view it may be, then zeros. Every kernel of the op must read
       an element of such an input for the last time before, and in the same thread as, it writes that element of the
       output. All other overlaps are refused. */
    size_t may_be[ADZE_MAY_BE];
    /* NULL, or of an output that is a choice (an index): whether float error leaves `got` open at an index, besides
       the value of the definition. The outputs of args are those of the kernel. */
    int (*also)(const void *args, int64_t index, double got);
} adze_field;
static inline int adze_is_tensor(const adze_field *f)
{
    return f->kind <= ADZE_OUT_OPTIONAL;
}
static inline int adze_is_input(const adze_field *f) /* its values are read, or kept */
{
    return f->kind <= ADZE_INOUT_OPTIONAL;
}
static inline int adze_is_inout(const adze_field *f)
{
    return f->kind == ADZE_INOUT || f->kind == ADZE_INOUT_OPTIONAL;
}
static inline int adze_is_output(const adze_field *f) /* elements of it are written */
{
    return f->kind >= ADZE_INOUT && f->kind <= ADZE_OUT_OPTIONAL;
}
static inline int adze_is_made(const adze_field *f) /* outputs() gives its shape and dtype */
{
    return f->kind >= ADZE_OUT && f->kind <= ADZE_OUT_OPTIONAL;
}
/* clang-format off */
#define ADZE_FIELD(op, kind, name)            {#name, kind, offsetof(adze_##op##_args, name), NULL, {0, 0, 0}, NULL}
#define ADZE_WORDS(op, name, words)           {#name, ADZE_INT, offsetof(adze_##op##_args, name), words, {0, 0, 0}, NULL}
#define ADZE_FIELDS_END                       {NULL, (adze_kind)0, 0, NULL, {0, 0, 0}, NULL}
/* An output, and ADZE_IN_PLACE of each input that it may be, or zeros. */
#define ADZE_OUTPUT(op, kind, name, a, b, c)  {#name, kind, offsetof(adze_##op##_args, name), NULL, {a, b, c}, NULL}
#define ADZE_CHOICE(op, kind, name, also)     {#name, kind, offsetof(adze_##op##_args, name), NULL, {0, 0, 0}, also}
#define ADZE_IN_PLACE(op, input)              offsetof(adze_##op##_args, input)
/* clang-format on */

typedef adze_status (*adze_run_fn)(adze_stream stream, const void *args);

/* A kernel may be compiled in several variants, which compute the same op and differ in speed and in the calls they
   take. `cuda/64x8` is variant `64x8` of the kernel `cuda`. */
typedef struct adze_variant {
    const char *name;
    const char *takes; /* which calls, as text */
} adze_variant;

enum { ADZE_SIZES = 4 };
typedef struct adze_choice {
    int want;    /* the variant that must run, counted from 0; -1: the kernel chooses */
    int dry;     /* nothing is launched: only `ran` is asked for */
    int untuned; /* the kernel chooses without the table of tuned calls */
    /* Written by the kernel: */
    int ran;  /* the variant; -1: the call is empty, nothing has to run */
    int form; /* what else the choice depends on (dtypes, fusion), as a number of the kernel's own */
    int64_t
        size[ADZE_SIZES]; /* the sizes that the choice depends on: the first may vary (rows), the others are exact */
} adze_choice;

typedef struct adze_variants {
    const adze_variant *list; /* ended by a row without a name */
    /* ADZE_NO_KERNEL: `want` does not take this call. */
    adze_status (*run)(adze_stream stream, const void *args, adze_choice *choice);
} adze_variants;

/* One way to run an op. On CUDA it runs on SM numbers from..to; on the CPU `from` is a mask of features. */
typedef struct adze_kernel { /* NOLINT(clang-analyzer-optin.performance.Padding): in the order of its use */
    const char *name;
    int on_cuda, from, to;
    int (*accepts)(adze_stream stream, const void *args); /* NULL: takes whatever validate() passed */
    adze_run_fn run;                                      /* with the variant that the kernel chooses */
    const adze_variants *variants;                        /* NULL: there is one only */
    int only; /* 0 in a table of kernels; n: this is variant n - 1 alone (adze_variant_kernel) */
} adze_kernel;
#define ADZE_ANY_SM 9999
#define ADZE_KERNELS_END                                                                                             \
    {                                                                                                                \
        NULL, 0, 0, 0, NULL, NULL, NULL, 0                                                                           \
    }

/* A value of the definition, and how far a correct float computation of it may be off before it is stored. */
typedef struct adze_value {
    double v, e;
} adze_value;
#define ADZE_UNCHANGED (-1.0) /* as e: the element of an ADZE_INOUT must have the bits that it had */

/* For ops whose outputs cost so much that the definition of a large call is taken at chosen elements only, and whose
   kernels sum in ways that differ in their bounds (value.h). */
typedef struct adze_samples {
    int (*sums)(const adze_kernel *kernel); /* how a row of the table sums; NULL: as any of them may */
    /* The values of one output at `n` indices of its elements, in row-major order; index NULL: at all of them. */
    void (*reference_at)(const void *args, int sums, int output, int64_t n, const int64_t *index, adze_value *out);
} adze_samples;

/* The size of an op's args when `last` was their last field. */
#define ADZE_FIRST_SIZE(op, last) (offsetof(adze_##op##_args, last) + sizeof(((adze_##op##_args *)0)->last))

typedef struct adze_op {
    const char *name;
    size_t args_size;
    size_t first_size; /* of the args when the op was first published: no caller has a smaller one */
    const adze_field *fields;
    adze_status (*validate)(const void *args); /* the contract of the inputs */
    void (*outputs)(void *args);               /* writes shape and dtype of each output, from the inputs */
    /* The definition: one array per output field, those that a call changes included, NULL where it is absent. Of an
       ADZE_INOUT it writes the elements that the call changes: all others are ADZE_UNCHANGED, and must stay. */
    void (*reference)(const void *args, adze_value *const *out);
    const adze_kernel *kernels;                              /* best first */
    size_t (*scratch)(adze_stream stream, const void *args); /* NULL: needs none */
    const adze_samples *samples;                             /* NULL: `reference` is all there is */
} adze_op;

#ifdef __cplusplus
}
#endif
#endif
