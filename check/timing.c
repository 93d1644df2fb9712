/* timing.c - the clock, the median, and how much memory makes a call cold. */
#include "timing.h"

#include "kernel.h"

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

double adze_now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double adze_median(double *values, int n, double *spread)
{
    qsort(values, (size_t)n, sizeof *values, by_value);
    const double median = (values[(n - 1) / 2] + values[n / 2]) / 2;
    *spread = median > 0 ? (values[3 * (n - 1) / 4] - values[(n - 1) / 4]) / median : 0;
    return median;
}

size_t adze_physical_memory(void)
{
    return (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
}

size_t adze_cold_bytes(adze_stream stream)
{
    if (stream.device != ADZE_CPU)
        return ADZE_GPU_COLD;
    const size_t cold = 4 * adze_cpu_cache() + (16 << 20);
    const size_t quarter = adze_physical_memory() / 4;
    return cold < quarter ? cold : quarter;
}
