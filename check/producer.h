/* producer.h - kernels before and behind the one that is judged, and kernels that are wrong behind a producer alone:
   on a GPU by producer.cu. */
#ifndef ADZE_CHECK_PRODUCER_H
#define ADZE_CHECK_PRODUCER_H

#include "adze.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Multiples of 16 bytes, between places that are aligned to 16. */
enum { ADZE_COPIES_MAX = 40 };
typedef struct adze_copies {
    struct {
        void *to;
        const void *from;
        size_t bytes;
    } part[ADZE_COPIES_MAX];
    int count;
} adze_copies;

/* Lets the next kernel start at once, takes its time, then copies; most of the GPU is left to that kernel. Messages
   are NULL when all is well. */
const char *adze_gpu_produce(adze_stream stream, const adze_copies *copies);
/* Starts while the kernel before it runs, waits for it, then copies. */
const char *adze_gpu_consume(adze_stream stream, const adze_copies *copies);

/* gated_add in float, of contiguous tensors of one shape, by a kernel that waits for the one before it, or does not.
 */
typedef enum adze_wait {
    ADZE_WAIT_FIRST,
    ADZE_WAIT_AFTER_TABLE, /* has been read: right with ADZE_CONST_WEIGHTS */
    ADZE_WAIT_AFTER_INPUT, /* has been read */
    ADZE_WAIT_LAST,        /* after the result has been written */
    ADZE_WAIT_NEVER,
    ADZE_WAITS
} adze_wait;
adze_status adze_gpu_gated_add(adze_stream stream, adze_wait wait, const adze_gated_add_args *args);

#ifdef __cplusplus
}
#endif
#endif
