/* flops.h - plain loops of multiplications and additions, on a GPU by flops.cu. */
#ifndef ADZE_CHECK_FLOPS_H
#define ADZE_CHECK_FLOPS_H

#include "adze.h"

#ifdef __cplusplus
extern "C" {
#endif

/* In float, one after the other in each lane; and in float of f16 or bf16 products, where the device has matrix
 * units. */
typedef enum adze_unit { ADZE_UNIT_FLOAT, ADZE_UNIT_MATRIX, ADZE_UNITS } adze_unit;

/* Enqueues a plain kernel; *flops is what it computes, 0 where the device has no such unit. A message, or NULL. */
const char *adze_gpu_flops(adze_stream stream, adze_unit unit, void *out, double *flops);
/* Runs a plain loop in all threads; what it computes. */
double adze_cpu_flops(void);

#ifdef __cplusplus
}
#endif
#endif
