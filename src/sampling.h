/* sampling.h - what a call of sample reads besides its logits, for its definition and its kernels. */
#ifndef ADZE_SAMPLING_H
#define ADZE_SAMPLING_H

#include "kernel.h"
#include "philox.h"

#define ADZE_SAMPLE_LOWEST (-87.0f) /* exp() of less is taken as 0: it would not be a normal float */

static inline int64_t adze_sample_whole(const adze_tensor *t, int64_t at)
{
    return t->dtype == ADZE_I32 ? ((const int32_t *)t->data)[at] : ((const int64_t *)t->data)[at];
}
/* The element of a row, of a tensor that has one for each or one for all. */
static inline int64_t adze_sample_of(const adze_tensor *t, int64_t row)
{
    return t->dtype ? adze_sample_whole(t, t->shape[0] == 1 ? 0 : row) : 0;
}
static inline float adze_sample_uniform(const adze_sample_args *a, int64_t row)
{
    const int own = a->seed.shape[0] == a->logits.shape[0]; /* of a batch of one, both are the same */
    return adze_philox_uniform((uint64_t)adze_sample_of(&a->seed, row), (uint64_t)adze_sample_of(&a->counter, row),
                               own ? 0 : (uint64_t)row);
}
/* How many of `previous` count, whatever that is. */
static inline int64_t adze_sample_previous(const adze_sample_args *a, int64_t row)
{
    if (!a->previous.dtype)
        return 0;
    return a->previous_count.dtype ? ((const int32_t *)a->previous_count.data)[row] : a->previous.shape[1];
}

#endif
