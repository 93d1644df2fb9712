/* timing.h - the clock, the median, and how much memory makes a call cold. */
#ifndef ADZE_CHECK_TIMING_H
#define ADZE_CHECK_TIMING_H

#include "adze.h"

enum { ADZE_GPU_COLD = 320 << 20 };
double adze_now_us(void);
double adze_median(double *values, int n, double *spread); /* sorts them */
size_t adze_physical_memory(void);
size_t adze_cold_bytes(adze_stream stream); /* memory touched between two uses of a line, so that it is not cached */

#endif
