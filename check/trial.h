/* trial.h - one call verified, then timed. */
#ifndef ADZE_CHECK_TRIAL_H
#define ADZE_CHECK_TRIAL_H

#include "judge.h"

enum { ADZE_TRIAL_KERNELS = 96 };
typedef enum adze_which { ADZE_CHOSEN, ADZE_KERNELS_ALL, ADZE_VARIANTS_ALL } adze_which;

typedef struct adze_effort { /* how long to measure */
    int samples;             /* a time is the median of these */
    double sample_us;        /* a sample lasts at least this long */
    int race;                /* only the fastest matters: it alone runs the whole call, the slow have one sample, */
                             /* and on CUDA calls are timed with PDL only */
} adze_effort;

typedef struct adze_attempt { /* one kernel on the trial's call */
    const adze_kernel *kernel;
    adze_verdict verdict;
    double us, us_alone; /* in a sequence of calls (on CUDA with PDL), and without PDL (0 on the CPU) */
    double spread;       /* between the quartiles of us, as a share of it */
    void *graph[2];
    int slow; /* in a race */
} adze_attempt;

/* One line. A call with fewer rows is verified when the whole one would take too long, then a sample of the whole. */
typedef struct adze_trial {
    adze_job *small, *whole;
    adze_wanted wanted;             /* of the small call */
    size_t period[ADZE_FIELDS_MAX]; /* by field, bytes: after these the whole repeats the small call; 0: never */
    adze_attempt attempt[ADZE_TRIAL_KERNELS];
    int attempts;
    adze_variant_row *variants;       /* the kernels of attempts that are variants */
    int64_t rows, dim, read, written; /* rows and dim of the first input; bytes that a call moves */
    double flops;                     /* 0 where they do not count */
    char *sets;                       /* copies of the whole call's memory */
    size_t set_bytes, set_at[ADZE_FIELDS_MAX];
    int64_t set_count, next;
} adze_trial;

/* 0 when the line cannot be tried: then error holds a sentence. Kernels that are wrong are not timed. which: the
   kernel that the library would choose, every kernel, or every kernel and each variant that takes the call. */
int adze_trial_make(adze_trial *trial, const adze_line *line, adze_stream stream, adze_which which, char *error,
                    size_t error_size);
int adze_trial_time(adze_trial *trial, const adze_effort *effort, char *error, size_t error_size);
void adze_trial_free(adze_trial *trial);

#endif
