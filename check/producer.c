/* producer.c - what producer.cu has, for a build without CUDA: an error. */
#include "producer.h"

#include "kernel.h"

#if !ADZE_CUDA
static const char none[] = "this build has no CUDA";

const char *adze_gpu_produce(adze_stream stream, const adze_copies *copies)
{
    (void)stream, (void)copies;
    return none;
}
const char *adze_gpu_consume(adze_stream stream, const adze_copies *copies)
{
    (void)stream, (void)copies;
    return none;
}
adze_status adze_gpu_gated_add(adze_stream stream, adze_wait wait, const adze_gated_add_args *args)
{
    (void)stream, (void)wait, (void)args;
    return adze_fail(ADZE_DEVICE, "%s", none);
}
#endif
