/* bench.h - calls that are timed just after they were proven, and the ceilings they are held against. */
#ifndef ADZE_CHECK_BENCH_H
#define ADZE_CHECK_BENCH_H

#include "ceiling.h"
#include "check.h"

enum { ADZE_TRIAL_KERNELS = 32 };

typedef struct adze_effort { /* how long to look */
    int samples;             /* a time is the median of these */
    double sample_us;        /* the least that a sample lasts */
} adze_effort;

typedef struct adze_attempt { /* one kernel on the trial's call */
    const adze_kernel *kernel;
    adze_verdict verdict;
    double us, us_alone; /* after a neighbour (on CUDA with PDL), and without overlap (on CUDA only, else 0) */
    double spread;       /* between the quartiles of us, as a share of it */
    void *graph[2];
} adze_attempt;

/* One line: proven on a call with fewer rows when the whole would take too long, then on a sample of the whole. */
typedef struct adze_trial {
    adze_job *proof, *whole;
    adze_value *want[ADZE_FIELDS_MAX];
    size_t period[ADZE_FIELDS_MAX]; /* by field, bytes: after these the whole repeats what the proof has; 0: never */
    adze_attempt attempt[ADZE_TRIAL_KERNELS];
    int attempts;
    int64_t rows, dim, read, written; /* rows and dim of the first input; bytes that a call moves */
    char *sets;                       /* copies of the whole call's memory */
    size_t set_bytes, set_at[ADZE_FIELDS_MAX];
    int64_t set_count, next;
} adze_trial;

/* 0 when the line cannot be tried: then error holds a sentence. Kernels that are wrong are not timed. all: with every
   kernel, not only the one that the library would take. */
int adze_trial_make(adze_trial *trial, const adze_line *line, adze_stream stream, int all, char *error,
                    size_t error_size);
int adze_trial_time(adze_trial *trial, const adze_effort *effort, char *error, size_t error_size);
void adze_trial_free(adze_trial *trial);
size_t adze_cold_bytes(adze_stream stream); /* memory touched between two uses of a line, so that it is not cached */
const char *adze_commit(void);              /* what this program was built from */
double adze_now_us(void);
double adze_median(double *values, int n, double *spread); /* sorts them */

/* ceiling.c, ceiling.cu: what plain loops reach, in bytes per nanosecond. */
typedef struct adze_ceilings {
    double rate[ADZE_PASSES]; /* read and written bytes together; two reads to one write, then one to one */
} adze_ceilings;
/* Raises the ceilings to what is seen now. A message, or NULL. */
const char *adze_ceilings_raise(adze_ceilings *ceilings, adze_stream stream);
double adze_ceiling_of(const adze_ceilings *ceilings, int64_t read, int64_t written);

/* graph.c: calls recorded in a CUDA graph, timed by events. Messages are NULL when all is well. */
const char *adze_gpu_open(adze_stream *stream); /* makes a stream on its device */
void adze_gpu_close(adze_stream stream);
const char *adze_gpu_repeat(void *memory, size_t bytes, size_t total); /* the first bytes, over and over */
void adze_gpu_pdl(int on);
const char *adze_graph_begin(adze_stream stream);
const char *adze_graph_end(adze_stream stream, void **graph);
const char *adze_graph_time(adze_stream stream, void *graph, double *us);
void adze_graph_free(void *graph);
void adze_gpu_describe(int device, char *name, size_t size, size_t *memory);

#endif
