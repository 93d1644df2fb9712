/* reduce.cuh - sums and maxima over the lanes of a warp and the warps of a block; every thread gets the result. */
#ifndef ADZE_CUDA_REDUCE_CUH
#define ADZE_CUDA_REDUCE_CUH

template <int WIDTH>
__device__ __forceinline__ float warp_sum(float v)
{
#pragma unroll
    for (int mask = WIDTH / 2; mask; mask /= 2)
        v += __shfl_xor_sync(~0u, v, mask);
    return v;
}
template <int WIDTH>
__device__ __forceinline__ float warp_max(float v)
{
#pragma unroll
    for (int mask = WIDTH / 2; mask; mask /= 2)
        v = fmaxf(v, __shfl_xor_sync(~0u, v, mask));
    return v;
}

/* Over the blockDim.x threads, whole warps, that share a row; a block has blockDim.y rows. `part` is shared memory of
   32 floats that nothing else uses until the row's next barrier. */
__device__ __forceinline__ void row_barrier()
{
    if (blockDim.y == 1)
        __syncthreads();
    else
        asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
}
__device__ __forceinline__ float row_sum(float v, float *part)
{
    const int warps = (int)blockDim.x / 32;
    v = warp_sum<32>(v);
    if (warps == 1)
        return v;
    part += (int)threadIdx.y * warps;
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    row_barrier();
    v = part[0];
    for (int w = 1; w < warps; w++)
        v += part[w];
    return v;
}
__device__ __forceinline__ float row_max(float v, float *part)
{
    const int warps = (int)blockDim.x / 32;
    v = warp_max<32>(v);
    if (warps == 1)
        return v;
    part += (int)threadIdx.y * warps;
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    row_barrier();
    v = part[0];
    for (int w = 1; w < warps; w++)
        v = fmaxf(v, part[w]);
    return v;
}

#endif
