/* check.h - the harness: lines made into calls, cases of each op, and the walks of `adze check` and `adze
 * bench`. */
#ifndef ADZE_CHECK_H
#define ADZE_CHECK_H

#include "kernel.h"

#include <stdio.h>

/* What check/<op>.c gives. A line is what ADZE_TRACE prints, less the op's name and the outputs, which are
   made to fit when they are not given; a tensor without strides is contiguous; each `$` stands for f32, f16
   and bf16 in turn. `flags=const_weights` is ADZE_CONST_WEIGHTS; `mood:NAME` gives the first input other values (see
   data.c), `scratch:0` withholds scratch. */
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
} adze_suite;

#define X(name) extern const adze_suite adze_suite_##name;
ADZE_OPS(X)
#undef X
extern const adze_suite *const adze_suites[]; /* ended by NULL */

/* line.c: text to arguments. */
enum { ADZE_FIELDS_MAX = 32, ADZE_ARGS_MAX = 4096 };
typedef struct adze_line {
    const adze_op *op;
    _Alignas(16) char args[ADZE_ARGS_MAX]; /* no data pointers yet */
    int given[ADZE_FIELDS_MAX];            /* by field: the line has it */
    int base[ADZE_FIELDS_MAX];             /* by field: the field whose memory it lies in, or -1 */
    int64_t offset[ADZE_FIELDS_MAX];       /* by field: elements after the base's first, or after a 64-byte line */
    char mood[16];
    int no_scratch;
} adze_line;
/* 0 when text is not a line; then error holds a sentence. `op` NULL: the line begins with the op's name. */
int adze_line_parse(adze_line *line, const adze_op *op, const char *text, char *error, size_t error_size);
/* Copies text with each `$` replaced. */
void adze_line_expand(char *to, size_t size, const char *text, const char *dtype);
adze_tensor *adze_line_tensor(adze_line *line, int field);

/* The elements of a tensor in row-major order; `i` counts them, `at` is the distance from data. */
typedef struct adze_walk {
    int64_t i, at, index[5];
} adze_walk;
static inline void adze_walk_next(adze_walk *w, const adze_tensor *t)
{
    w->i++;
    for (int d = t->rank - 1; d >= 0; d--) {
        w->at += t->stride[d];
        if (++w->index[d] < t->shape[d])
            return;
        w->at -= t->stride[d] * t->shape[d];
        w->index[d] = 0;
    }
}

/* data.c: arguments with memory behind them. */
extern const char *const adze_moods[]; /* their names, ended by NULL */
typedef struct adze_memory {           /* one allocation: guard, body, guard */
    char *origin;                      /* what it holds before a call */
    char *inputs, *outputs;            /* masks: the bytes of each are all ones, the others zero */
    char *work, *result;               /* on the device that runs; on the host, after it ran */
    size_t bytes, data_at;
} adze_memory;
typedef struct adze_job {
    adze_line line;                        /* its args point into origin: the reference reads them */
    _Alignas(16) char args[ADZE_ARGS_MAX]; /* the same call, pointing into work */
    adze_memory memory[ADZE_FIELDS_MAX];
    int memory_of[ADZE_FIELDS_MAX]; /* by field; -1 where there is no tensor */
    size_t place[ADZE_FIELDS_MAX];  /* by field: bytes from the start of its memory */
    adze_stream stream;
    void *scratch;
} adze_job;
enum { ADZE_GUARD = 4096 };
/* The line with its outputs, and how much memory each tensor needs, but none yet. */
int adze_job_layout(adze_job *job, const adze_line *line, adze_stream stream, char *error, size_t error_size);
int adze_job_make(adze_job *job, const adze_line *line, adze_stream stream, uint64_t seed, char *error,
                  size_t error_size);
void adze_job_free(adze_job *job);
int64_t adze_job_bytes(const adze_job *job, int64_t *read, int64_t *written); /* that a call must move */
/* Sets each byte of a tensor whose first element is at `data`. */
void adze_tensor_fill(char *data, const adze_tensor *t, int byte);
double adze_random_normal(uint64_t *state);
double adze_random_uniform(uint64_t *state); /* 0 to 1 */

/* check.c, self.c, bench.c: the commands. Each returns an exit status. */
typedef struct adze_check_options {
    const char *op;      /* NULL: all */
    const char *kernel;  /* the same, such as "cpu_avx2" */
    const char *require; /* NULL, or "cuda" */
    int device;          /* ADZE_CPU, a CUDA device, or ADZE_ALL_DEVICES */
    int verbose, self;
    int huge; /* also the lines above 2^31 elements, on GPUs */
} adze_check_options;
#define ADZE_ALL_DEVICES (-2)
int adze_check(const adze_check_options *options);
typedef struct adze_tally {
    int passed, failed, skipped;
} adze_tally;
void adze_check_huge(const adze_suite *suite, int device, adze_tally *tally); /* huge.c */
/* Runs one kernel on one job, twice, and judges it. A failure is described in `why` (empty: passed). */
typedef struct adze_verdict {
    double worst;  /* error as a share of what is allowed */
    double ulps;   /* the largest error, in units of the output's last place */
    char why[512]; /* empty: passed */
} adze_verdict;
/* What memory holds before a run: its inputs, and poison where it belongs to outputs alone. */
void adze_job_image(const adze_memory *memory, uint64_t poison, char *image);
#define ADZE_LAST_POISON 0x5757575757575757u /* of adze_judge(): `result` is what the run that began with it left */
void adze_judge(adze_job *job, const adze_kernel *kernel, adze_value *const *want, adze_verdict *verdict);
/* The error of a stored value as a share of what is allowed, and in units of the last place. */
double adze_error_share(int dtype, double got, adze_value want, double *ulps);
void adze_reference_free(adze_value **want);
void adze_reference_make(const adze_job *job, adze_value **want); /* want[ADZE_FIELDS_MAX], by output */
void adze_check_self(const adze_check_options *options, adze_tally *tally);

/* gpu.cu, or gpu.c without CUDA: memory of the device in stream; messages are NULL when all is well. */
void *adze_memory_take(adze_stream stream, size_t bytes);
void adze_memory_give(adze_stream stream, void *memory);
const char *adze_memory_write(adze_stream stream, void *to, const void *from, size_t bytes);
const char *adze_memory_read(adze_stream stream, void *to, const void *from, size_t bytes);
const char *adze_memory_sync(adze_stream stream);

#endif
