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

/* Over THREADS threads of a one-dimensional block. `part` is shared memory of 32 floats that nothing else uses until
   the block's next barrier. */
template <int THREADS>
__device__ __forceinline__ float block_sum(float v, float *part)
{
    if constexpr (THREADS <= 32) {
        return warp_sum<THREADS>(v);
    } else {
        v = warp_sum<32>(v);
        if (threadIdx.x % 32 == 0)
            part[threadIdx.x / 32] = v;
        __syncthreads();
        if constexpr (THREADS <= 256) {
            v = part[0];
#pragma unroll
            for (int w = 1; w < THREADS / 32; w++)
                v += part[w];
            return v;
        } else {
            return warp_sum<THREADS / 32>(part[threadIdx.x % (THREADS / 32)]);
        }
    }
}
template <int THREADS>
__device__ __forceinline__ float block_max(float v, float *part)
{
    if constexpr (THREADS <= 32) {
        return warp_max<THREADS>(v);
    } else {
        v = warp_max<32>(v);
        if (threadIdx.x % 32 == 0)
            part[threadIdx.x / 32] = v;
        __syncthreads();
        return warp_max<THREADS / 32>(part[threadIdx.x % (THREADS / 32)]);
    }
}

#endif
