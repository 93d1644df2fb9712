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

/* N sums over the threads of a block with the same threadIdx.y, which are whole warps. `part` is their own shared
   memory, 16-byte aligned and unused until the block's next barrier. All threads of the block must call it. */
template <int N>
__device__ __forceinline__ void row_sums(float (&v)[N], float (*part)[32])
{
    const int warps = (int)blockDim.x / 32, slots = (warps + 3) / 4 * 4;
#pragma unroll
    for (int n = 0; n < N; n++)
        v[n] = warp_sum<32>(v[n]);
    if (warps == 1)
        return;
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (threadIdx.x % 32 == 0)
            part[n][threadIdx.x / 32] = v[n];
        if (threadIdx.x < slots - warps)
            part[n][warps + threadIdx.x] = 0;
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; n++) {
        float4 all = *reinterpret_cast<const float4 *>(part[n]);
        for (int w = 4; w < slots; w += 4) {
            const float4 more = *reinterpret_cast<const float4 *>(part[n] + w);
            all.x += more.x, all.y += more.y, all.z += more.z, all.w += more.w;
        }
        v[n] = (all.x + all.y) + (all.z + all.w);
    }
}
__device__ __forceinline__ float row_sum(float v, float (&part)[32])
{
    float one[1] = {v};
    row_sums(one, &part);
    return one[0];
}

#endif
