/* mma.cuh - tensor-core products of 16-bit elements, of TF32 and of i8, and how their operands come from memory:
   asynchronous copies into shared memory (sm_80 and newer), and loads that stay in their place. */
#ifndef ADZE_CUDA_MMA_CUH
#define ADZE_CUDA_MMA_CUH

#include "vec.cuh"

#include <type_traits>

/* c[16 x 8] += a[16 x 16] . b[16 x 8]. Of lane 4 g + t, c has rows g and g + 8 of columns 2 t and 2 t + 1; a has the
   pairs of columns t and t + 4 of those rows, in the order row g, row g + 8, row g, row g + 8; b has the same pairs
   of rows of column g. */
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1)
{
#if __CUDA_ARCH__ >= 800
    if constexpr (std::is_same<T, bf16>::value)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    (void)a0, (void)a1, (void)a2, (void)a3, (void)b0, (void)b1, (void)c;
#endif
}

/* The same with k of 8 and TF32, which is the upper 19 bits of a float: single elements are where pairs are above. */
__device__ __forceinline__ void mma_tf32(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1)
{
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    (void)a0, (void)a1, (void)a2, (void)a3, (void)b0, (void)b1, (void)c;
#endif
}

/* The same as mma with k of 32 and i8: 4 neighbouring elements are where 2 are above. Sums are exact. */
__device__ __forceinline__ void mma_i8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                       uint32_t b1)
{
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    const uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
#    pragma unroll
    for (int i = 0; i < 4; i++)
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
            : "+r"(c[i % 2 * 2]), "+r"(c[i % 2 * 2 + 1])
            : "r"(a[i]), "r"(b[i / 2]));
#endif
}

__device__ __forceinline__ uint32_t shared_address(const void *at)
{
    return (uint32_t)__cvta_generic_to_shared(at);
}
/* 16 bytes from global to shared memory; or zeros where they are not there: nothing is read then. L2 fetches the
   L2_BYTES around them. */
template <int L2_BYTES = 256>
__device__ __forceinline__ void copy_async(uint32_t to, const void *from)
{
#if __CUDA_ARCH__ >= 800
    if constexpr (L2_BYTES == 128)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
    (void)to, (void)from;
#endif
}
template <int L2_BYTES = 256>
__device__ __forceinline__ void copy_async(uint32_t to, const void *from, bool there)
{
    static_assert(L2_BYTES == 128 || L2_BYTES == 256, "");
#if __CUDA_ARCH__ >= 800
    const uint32_t bytes = there ? 16 : 0;
    if constexpr (L2_BYTES == 128)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                     : "memory");
#else /* at once, for kernels that have barriers between copies and loads */
    const uint4 v = there ? *reinterpret_cast<const uint4 *>(from) : make_uint4(0, 0, 0, 0);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
#endif
}
/* The same with 4 bytes. */
__device__ __forceinline__ void copy_async_4(uint32_t to, const void *from, bool there)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0) : "memory");
#else /* as above */
    const uint32_t v = there ? *reinterpret_cast<const uint32_t *>(from) : 0;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
#endif
}
__device__ __forceinline__ void copy_commit()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
/* Waits until at most NEWER of this thread's committed groups are under way. */
template <int NEWER>
__device__ __forceinline__ void copy_wait()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(NEWER) : "memory");
#endif
}
/* 16 bytes of memory that no kernel writes meanwhile, and that this one reads once. The load stays where it stands
   among barriers and other such loads, so that several are under way while what came earlier is computed with. */
__device__ __forceinline__ uint4 load_once(const char *from)
{
    uint4 v;
#if __CUDA_ARCH__ >= 800
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
#else
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
#endif
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}
/* 16 bytes of shared memory. The compiler must see that they are: then it may move the load up to the last barrier.
 */
__device__ __forceinline__ uint4 load_shared(const char *at)
{
    return *reinterpret_cast<const uint4 *>(at);
}

#endif
