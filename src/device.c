/* device.c - what this machine is: CPU features, the cache, and CUDA's answers when CUDA is not built in. */
#include "kernel.h"

#include <unistd.h>
#if defined(__linux__) && defined(__aarch64__)
#    include <sys/auxv.h>
#    define HWCAP_SVE_BIT (1ul << 22)
#endif

int adze_cpu_features(void)
{
    int features = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        features |= ADZE_CPU_AVX2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        features |= ADZE_CPU_AVX512;
#elif defined(__linux__) && defined(__aarch64__)
    if (getauxval(AT_HWCAP) & HWCAP_SVE_BIT)
        features |= ADZE_CPU_SVE;
#endif
    return features;
}

size_t adze_cpu_cache(void)
{
    static _Atomic size_t known;
    if (known)
        return known;
    long size = -1;
#ifdef _SC_LEVEL3_CACHE_SIZE
    size = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (size <= 0)
        size = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    known = size > 0 ? (size_t)size : (size_t)32 << 20;
    return known;
}

int adze_can_run(const adze_kernel *k, adze_stream s)
{
    if (k->on_cuda != (s.device != ADZE_CPU))
        return 0;
    if (!k->on_cuda)
        return (k->from & ~adze_cpu_features()) == 0;
    const int sm = adze_cuda_sm(s.device);
    return sm >= k->from && sm <= k->to;
}

adze_status adze_check_device(const char *op, int device)
{
    ADZE_REQUIRE(device == ADZE_CPU || adze_cuda_sm(device) > 0, ADZE_DEVICE, "%s: there is no CUDA device %d%s", op,
                 device, ADZE_CUDA ? "" : ": this adze was built without CUDA");
    return ADZE_OK;
}

adze_status adze_prepare(int32_t device)
{
    if (device == ADZE_CPU) {
        adze_thread_count();
        return ADZE_OK;
    }
    ADZE_CHECK(adze_check_device("prepare", device));
    return adze_cuda_prepare(device);
}

#if !ADZE_CUDA
int adze_cuda_count(void)
{
    return 0;
}
int adze_cuda_sm(int device)
{
    (void)device;
    return 0;
}
int adze_cuda_sm_count(int device)
{
    (void)device;
    return 0;
}
adze_status adze_cuda_call(adze_run_fn run, adze_stream stream, const void *args)
{
    (void)run, (void)stream, (void)args;
    return adze_check_device("call", stream.device);
}
adze_status adze_cuda_prepare(int device)
{
    return adze_check_device("prepare", device);
}
#endif
