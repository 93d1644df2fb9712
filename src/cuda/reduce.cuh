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

/* Over the threads of a block with the same threadIdx.y: whole warps. `part` is shared memory of 32 floats of their
   own, 16-byte aligned, that nothing else uses until the block's next barrier. All threads of the block call it. */
template <bool MAX>
__device__ __forceinline__ float row_reduce(float v, float *part)
{
    const int warps = (int)blockDim.x / 32, slots = (warps + 3) / 4 * 4;
    v = MAX ? warp_max<32>(v) : warp_sum<32>(v);
    if (warps == 1)
        return v;
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    if (threadIdx.x < slots - warps)
        part[warps + threadIdx.x] = MAX ? __int_as_float(0xff800000) : 0;
    __syncthreads();
    float4 all = *reinterpret_cast<const float4 *>(part);
    for (int w = 4; w < slots; w += 4) {
        const float4 more = *reinterpret_cast<const float4 *>(part + w);
        all.x = MAX ? fmaxf(all.x, more.x) : all.x + more.x;
        all.y = MAX ? fmaxf(all.y, more.y) : all.y + more.y;
        all.z = MAX ? fmaxf(all.z, more.z) : all.z + more.z;
        all.w = MAX ? fmaxf(all.w, more.w) : all.w + more.w;
    }
    return MAX ? fmaxf(fmaxf(all.x, all.y), fmaxf(all.z, all.w)) : (all.x + all.y) + (all.z + all.w);
}
__device__ __forceinline__ float row_sum(float v, float *part)
{
    return row_reduce<false>(v, part);
}
__device__ __forceinline__ float row_max(float v, float *part)
{
    return row_reduce<true>(v, part);
}

#endif
