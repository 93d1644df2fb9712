/* reduce.cuh - sums and maxima over the lanes of a warp, sums over the warps of a row; every thread gets the result.
 */
#ifndef ADZE_CUDA_REDUCE_CUH
#define ADZE_CUDA_REDUCE_CUH

template <int WIDTH, typename S>
__device__ __forceinline__ S warp_sum(S v)
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

/* Over the threads of a block with the same threadIdx.y: whole warps. `part` is shared memory of 32 floats of their
   own, 16-byte aligned, that nothing else uses until the block's next barrier. All threads of the block call it. */
__device__ __forceinline__ float row_sum(float v, float *part)
{
    const int warps = (int)blockDim.x / 32, slots = (warps + 3) / 4 * 4;
    v = warp_sum<32>(v);
    if (warps == 1)
        return v;
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    if (threadIdx.x < slots - warps)
        part[warps + threadIdx.x] = 0;
    __syncthreads();
    float4 all = *reinterpret_cast<const float4 *>(part);
    for (int w = 4; w < slots; w += 4) {
        const float4 more = *reinterpret_cast<const float4 *>(part + w);
        all.x += more.x, all.y += more.y, all.z += more.z, all.w += more.w;
    }
    return (all.x + all.y) + (all.z + all.w);
}

#endif
