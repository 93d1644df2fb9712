/* dependency.h - kernels behind a slow producer. A kernel that starts while the one before it still runs must wait
   for it before it reads what that one writes, and before it writes what that one may still use. */
#ifndef ADZE_CHECK_DEPENDENCY_H
#define ADZE_CHECK_DEPENDENCY_H

#include "judge.h"

typedef struct adze_dependency { /* a stream of its own, and memory that grows with the calls that are judged on it */
    adze_stream stream;
    char *memory;
    size_t bytes;
    int calls;
} adze_dependency;
/* A sentence on why kernels cannot be judged so on this device, or NULL. */
const char *adze_dependency_open(adze_dependency *d, int device);
void adze_dependency_close(adze_dependency *d);
/* Runs a call that adze_judge() has just passed, with these flags, between a producer and a consumer, in the stream
   or in a graph. `why` says what is wrong; it is empty where the consumer got the bits that adze_judge() left. */
void adze_dependency_run(adze_dependency *d, const adze_job *job, const adze_kernel *kernel, uint32_t flags,
                         int in_graph, char *why, size_t size);
/* In the stream and in a graph, as the line says and with ADZE_CONST_WEIGHTS. */
void adze_dependency_judge(adze_dependency *d, const adze_job *job, const adze_kernel *kernel, adze_verdict *verdict);

#endif
