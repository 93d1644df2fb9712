/* data.h - the call of a line: arguments with memory behind them, guards around it and values in it. */
#ifndef ADZE_CHECK_DATA_H
#define ADZE_CHECK_DATA_H

#include "line.h"

typedef struct adze_memory { /* one allocation: guard, body, guard */
    char *origin;            /* what it holds before a call */
    char *inputs, *outputs;  /* masks: the bytes of each are all ones, the others zero */
    char *work, *result;     /* on the device that runs; on the host, after it ran */
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
/* The same of a text; NULL when it is not a line, or there is no memory: then error holds a sentence. */
adze_job *adze_job_new(const adze_op *op, const char *text, adze_stream stream, char *error, size_t error_size);
void adze_job_delete(adze_job *job);                                          /* that adze_job_new() made, or NULL */
void adze_job_free(adze_job *job);                                            /* what adze_job_make() took */
int64_t adze_job_bytes(const adze_job *job, int64_t *read, int64_t *written); /* that a call must move */
/* Sets each byte of a tensor whose first element is at `data`. */
void adze_tensor_fill(char *data, const adze_tensor *t, int byte);
double adze_random_normal(uint64_t *state);
double adze_random_uniform(uint64_t *state); /* 0 to 1 */

#endif
