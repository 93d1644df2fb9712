/* flops.h - plain loops of multiplications and additions, on a GPU by flops.cu. */
#ifndef ADZE_CHECK_FLOPS_H
#define ADZE_CHECK_FLOPS_H

#include "adze.h"

#ifdef __cplusplus
extern "C" {
#endif

/* In float, one after the other in each lane; and of narrower numbers, where the device has instructions for their
   products: f16 and bf16 on a GPU, on a CPU bf16 and bytes, whichever is faster. */
typedef enum adze_unit { ADZE_UNIT_FLOAT, ADZE_UNIT_MATRIX, ADZE_UNITS } adze_unit;

/* Enqueues a plain kernel; *flops is what it computes, 0 where the device has no such unit. A message, or NULL. */
const char *adze_gpu_flops(adze_stream stream, adze_unit unit, void *out, double *flops);
/* Runs plain loop `way` of a unit in all threads: the one of floats, or one of the ADZE_MATRIX_WAYS. What it
   computes; 0 where the processor has no such instructions. */
enum { ADZE_MATRIX_WAYS = 3 };
double adze_cpu_flops(adze_unit unit, int way);

#ifdef __cplusplus
}
#endif
#endif
