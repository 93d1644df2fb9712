/* bulk.cuh - bulk copies from global into shared memory, and the barriers that say when they have arrived (sm_90 and
   newer). Kernels that use them are launched only where adze_cuda_clusters() says so: elsewhere these do nothing. */
#ifndef ADZE_CUDA_BULK_CUH
#define ADZE_CUDA_BULK_CUH

#include "mma.cuh"

/* A barrier, 8 bytes of shared memory, that one thread arrives at, or several do. The thread that makes barriers
   calls bulk_ready() after the last one. */
__device__ __forceinline__ void bulk_barrier(uint32_t barrier, uint32_t arrivals = 1)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#else
    (void)barrier, (void)arrivals;
#endif
}
/* What this thread has written to shared memory is there for copies, and for products of a warpgroup, that threads
   start after they have met it at a barrier. */
__device__ __forceinline__ void bulk_written()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void bulk_ready()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    bulk_written();
}

/* Arrives at a barrier; the second one says how many bytes of copies its phase has to wait for. */
__device__ __forceinline__ void bulk_arrive(uint32_t barrier)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#else
    (void)barrier;
#endif
}
__device__ __forceinline__ void bulk_expect(uint32_t barrier, uint32_t bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#else
    (void)barrier, (void)bytes;
#endif
}

/* Copies `bytes`, a multiple of 16, between 16-byte aligned addresses. The barrier's phase ends when they are there.
 */
__device__ __forceinline__ void bulk_copy(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    bulk_expect(barrier, bytes);
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
#else
    (void)to, (void)from, (void)bytes, (void)barrier;
#endif
}
/* Waits for the end of the barrier's phase of this parity: 0 for its first one. */
__device__ __forceinline__ void bulk_wait(uint32_t barrier, uint32_t parity)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n\t.reg .pred done;\n\tagain:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra again;\n\t}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
#else
    (void)barrier, (void)parity;
#endif
}

#endif
