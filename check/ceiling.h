/* ceiling.h - plain passes over memory, on a GPU by ceiling.cu, plain arithmetic (flops.h), and what they reach. */
#ifndef ADZE_CHECK_CEILING_H
#define ADZE_CHECK_CEILING_H

#include "flops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* By what they do to arrays of equal size: read one, read two and write a third, copy one, write one. */
typedef enum adze_pass { ADZE_READ, ADZE_TWO_READS, ADZE_COPY, ADZE_WRITE, ADZE_PASSES } adze_pass;

/* One pass by one of several plain kernels; bytes is that of each array. A message, or NULL. */
enum { ADZE_GPU_VARIANTS = 8 };
const char *adze_gpu_pass(adze_stream stream, adze_pass pass, int variant, void *out, const void *a, const void *b,
                          size_t bytes);

/* What plain loops reach, in bytes and in operations per nanosecond. */
typedef struct adze_ceilings {
    double rate[ADZE_PASSES]; /* read and written bytes together; two reads to one write, then one to one */
    double flops[ADZE_UNITS]; /* 0 where there is no such unit */
    double floor_us;          /* of a call that does next to nothing */
} adze_ceilings;
/* Raises the ceilings to what is seen now. A message, or NULL. */
const char *adze_ceilings_raise(adze_ceilings *ceilings, adze_stream stream);
double adze_ceiling_of(const adze_ceilings *ceilings, int64_t read, int64_t written);
/* Of products whose factors have this dtype: matrix units have no f32. */
double adze_flops_of(const adze_ceilings *ceilings, int dtype);

#ifdef __cplusplus
}
#endif
#endif
