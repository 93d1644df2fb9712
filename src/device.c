/* device.c - what this machine has: CPU features and cache, and the answers about CUDA when it is not built in. */
#include "kernel.h"

#include <unistd.h>
#if defined(__x86_64__)
#    include <cpuid.h>
#    if defined(__linux__)
#        include <sys/syscall.h>
#    endif
#elif defined(__linux__) && defined(__aarch64__)
#    include <sys/auxv.h>
#endif

/* Compilers may use all that -march names. So all of its features are queried, and that the system saves their
   registers. x86-64-v3 beyond what every x86-64 has:

   CPUID 1, ecx: SSE3 0, SSSE3 9, FMA 12, CMPXCHG16B 13, SSE4.1 19, SSE4.2 20, MOVBE 22, POPCNT 23, OSXSAVE 27, AVX
   28, F16C 29; CPUID 7, ebx: BMI1 3, AVX2 5, BMI2 8; CPUID 80000001h, ecx: LAHF 0, LZCNT 5; XCR0: SSE 1, AVX 2.

   x86-64-v4 adds CPUID 7, ebx: AVX512 F 16, DQ 17, CD 28, BW 30, VL 31; XCR0: masks and upper halves 5, 6, 7. */
int adze_x86_features(uint32_t ecx1, uint32_t ebx7, uint32_t ecx_extended, uint64_t xcr0)
{
    const uint32_t v3_ecx1 = 1u << 0 | 1u << 9 | 1u << 12 | 1u << 13 | 1u << 19 | 1u << 20 | 1u << 22 | 1u << 23 |
                             1u << 27 | 1u << 28 | 1u << 29;
    const uint32_t v3_ebx7 = 1u << 3 | 1u << 5 | 1u << 8, v3_extended = 1u << 0 | 1u << 5;
    const uint32_t v4_ebx7 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;
    if ((ecx1 & v3_ecx1) != v3_ecx1 || (ebx7 & v3_ebx7) != v3_ebx7 || (ecx_extended & v3_extended) != v3_extended ||
        (xcr0 & 0x06) != 0x06)
        return 0;
    return ADZE_CPU_AVX2 | ((ebx7 & v4_ebx7) == v4_ebx7 && (xcr0 & 0xe6) == 0xe6 ? ADZE_CPU_AVX512 : 0);
}

/* armv8.2-a+sve: the bits of AT_HWCAP for CRC32 7, ATOMICS 8, FPHP 9, ASIMDHP 10, ASIMDRDM 12, FCMA 14, SVE 22.
   armv8.2-a+bf16: CRC32, ATOMICS, ASIMDRDM, and of AT_HWCAP2 BF16 14. */
int adze_arm_features(uint64_t hwcap, uint64_t hwcap2)
{
    const uint64_t base = 1u << 7 | 1u << 8 | 1u << 12, sve = base | 1u << 9 | 1u << 10 | 1u << 14 | 1u << 22;
    return ((hwcap & sve) == sve ? ADZE_CPU_SVE : 0) |
           ((hwcap & base) == base && hwcap2 >> 14 & 1 ? ADZE_CPU_BF16 : 0);
}

#if defined(__x86_64__)
/* AMX, of a processor with x86-64-v4: CPUID 7, edx: BF16 22, TILE 24, INT8 25; XCR0: its configuration and its
   registers, 17 and 18. Linux gives these registers to a process that asks for them: more than once does no harm. */
static int amx_features(uint32_t edx7, uint64_t xcr0, int vnni)
{
    const int features = (edx7 >> 22 & 1 ? ADZE_CPU_AMX : 0) | (edx7 >> 25 & 1 && vnni ? ADZE_CPU_AMX_INT8 : 0);
    if (!(edx7 >> 24 & 1) || !features || (xcr0 & 0x60000) != 0x60000)
        return 0;
#    if defined(__linux__)
    enum { REQUEST_PERMISSION = 0x1023, TILE_REGISTERS = 18 };
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_REGISTERS) == 0 ? features : 0;
#    else
    return 0;
#    endif
}
#endif

static int query_features(void)
{
#if defined(__x86_64__)
    uint32_t a, b, c, d, ebx7 = 0, ecx7 = 0, edx7 = 0, ecx1 = 0, low = 0, high = 0;
    if (__get_cpuid(1, &a, &b, &c, &d))
        ecx1 = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d))
        ebx7 = b, ecx7 = c, edx7 = d;
    if (!__get_cpuid(0x80000001, &a, &b, &c, &d))
        c = 0;
    if (ecx1 >> 27 & 1)
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    const uint64_t xcr0 = (uint64_t)high << 32 | low;
    const int features = adze_x86_features(ecx1, ebx7, c, xcr0);
    if (!(features & ADZE_CPU_AVX512))
        return features;
    const int vnni = ecx7 >> 11 & 1 ? ADZE_CPU_VNNI : 0; /* CPUID 7, ecx: VNNI 11 */
    return features | vnni | amx_features(edx7, xcr0, vnni);
#elif defined(__linux__) && defined(__aarch64__)
    return adze_arm_features(getauxval(AT_HWCAP), getauxval(AT_HWCAP2));
#else
    return 0;
#endif
}

int adze_cpu_features(void)
{
    static _Atomic int known; /* CPUID is slow in a virtual machine */
    if (!known)
        known = query_features() | 1 << 30;
    return known & ~(1 << 30);
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
void adze_cuda_name(int device, char *to, size_t size)
{
    (void)device;
    if (size)
        *to = '\0';
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
