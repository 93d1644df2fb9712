/* cluster.cuh - blocks that run at the same time and write into each other's shared memory (sm_90 and newer). Kernels
   are launched in clusters only where adze_cuda_clusters() says so: elsewhere these do nothing. */
#ifndef ADZE_CUDA_CLUSTER_CUH
#define ADZE_CUDA_CLUSTER_CUH

#include <stdint.h>

__device__ __forceinline__ int cluster_rank()
{
    uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return (int)rank;
}
__device__ __forceinline__ int cluster_size()
{
    uint32_t size = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
    return (int)size;
}

/* A barrier over all threads of a cluster, in two halves: what was stored before the arrival is visible after the
   wait. A block's shared memory may be written once that block has arrived, and not after it has exited. */
__device__ __forceinline__ void cluster_arrive()
{
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
/* Arrives without a promise of its stores: for barriers that have their own. */
__device__ __forceinline__ void cluster_arrive_relaxed()
{
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/* Stores two floats to the address in block `rank` that `p` has in this block's shared memory; 8-byte aligned. */
__device__ __forceinline__ void cluster_store(void *p, int rank, float a, float b)
{
#if __CUDA_ARCH__ >= 900
    const uint32_t here = (uint32_t)__cvta_generic_to_shared(p);
    asm volatile("{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\t"
                 "st.shared::cluster.v2.f32 [there], {%2, %3};\n\t}" ::"r"(here),
                 "r"(rank), "f"(a), "f"(b)
                 : "memory");
#else
    (void)p, (void)rank, (void)a, (void)b;
#endif
}
/* Stores four floats to the address in block `rank` that `to` has in this block's shared memory, 16-byte aligned;
   that block's barrier (bulk.cuh) counts their bytes. */
__device__ __forceinline__ void cluster_send(uint32_t to, uint32_t barrier, int rank, float4 v)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n\t.reg .b32 there, its;\n\tmapa.shared::cluster.u32 there, %0, %2;\n\t"
                 "mapa.shared::cluster.u32 its, %1, %2;\n\t"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, "
                 "[its];\n\t}" ::"r"(to),
                 "r"(barrier), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
#else
    (void)to, (void)barrier, (void)rank, (void)v;
#endif
}
/* The float at the address in block `rank` that `p` has in this block's shared memory. */
__device__ __forceinline__ float cluster_load(const void *p, int rank)
{
    float v = 0;
#if __CUDA_ARCH__ >= 900
    const uint32_t here = (uint32_t)__cvta_generic_to_shared(p);
    asm volatile("{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %1, %2;\n\t"
                 "ld.shared::cluster.f32 %0, [there];\n\t}"
                 : "=f"(v)
                 : "r"(here), "r"(rank)
                 : "memory");
#else
    (void)p, (void)rank;
#endif
    return v;
}
/* The same with four floats, 16-byte aligned. */
__device__ __forceinline__ void cluster_store(void *p, int rank, float4 v)
{
#if __CUDA_ARCH__ >= 900
    const uint32_t here = (uint32_t)__cvta_generic_to_shared(p);
    asm volatile("{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\t"
                 "st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5};\n\t}" ::"r"(here),
                 "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
#else
    (void)p, (void)rank, (void)v;
#endif
}
__device__ __forceinline__ float4 cluster_load4(const void *p, int rank)
{
    float4 v = {0, 0, 0, 0};
#if __CUDA_ARCH__ >= 900
    const uint32_t here = (uint32_t)__cvta_generic_to_shared(p);
    asm volatile("{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %4, %5;\n\t"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n\t}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(here), "r"(rank)
                 : "memory");
#else
    (void)p, (void)rank;
#endif
    return v;
}

#endif
