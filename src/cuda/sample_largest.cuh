/* sample_largest.cuh - the lowest index of the largest logit of a row, by a block or a cluster, in one pass. A thread
   goes through its logits upwards and keeps the first of the largest. */
#ifndef ADZE_CUDA_SAMPLE_LARGEST_CUH
#define ADZE_CUDA_SAMPLE_LARGEST_CUH

#include "launch.cuh"
#include "sample_row.cuh"

/* Of the warps of a block, and in the first block of its blocks: a key and, inverted, an index. */
struct alignas(16) largest_space {
    uint64_t of_warp[WARPS], of_block[CLUSTER];
};

template <typename T, int W>
__global__ void __launch_bounds__(THREADS, 2) sample_largest(const __grid_constant__ sample_params p)
{
    extern __shared__ __align__(128) char shared[];
    largest_space &space = *(largest_space *)shared;
    const int ranks = cluster_size(), rank = cluster_rank(), lane = (int)threadIdx.x % 32;
    const int64_t row = blockIdx.x / (unsigned)ranks;
    pdl_launch_next();
    if (ranks > 1)
        cluster_arrive(); /* the first block may then be written to */
    const T *const x = (const T *)p.logits + row * p.stride;
    const int32_t first = (int32_t)min((int64_t)rank * p.part, (int64_t)p.vocab);
    const int32_t end = (int32_t)min((int64_t)first + p.part, (int64_t)p.vocab);
    const int32_t own = first + (int32_t)threadIdx.x * W;
    pdl_wait();
    float most = -INFINITY; /* NaN is not larger */
    int32_t at = own;
    each_logits<T, W>(x, first, end, [&](int32_t i, const float(&f)[W]) {
#pragma unroll
        for (int j = 0; j < W; j++)
            if (f[j] > most)
                most = f[j], at = i + j;
    });
    uint64_t best = own < end ? (uint64_t)sample_key(most + 0.0f) << 32 | (uint32_t)~at : 0; /* + 0: no -0 */
    best = warp_most(best);
    if (lane == 0)
        space.of_warp[threadIdx.x / 32] = best;
    __syncthreads();
    best = warp_most(lane < WARPS ? space.of_warp[lane] : 0);
    if (ranks > 1) {
        cluster_wait();
        if (threadIdx.x == 0)
            cluster_store(&space.of_block[rank], 0, __uint_as_float((uint32_t)best),
                          __uint_as_float((uint32_t)(best >> 32)));
        cluster_arrive();
        cluster_wait();
        if (rank == 0)
            best = warp_most(lane < ranks ? space.of_block[lane] : 0);
    }
    if (rank != 0 || threadIdx.x != 0)
        return;
    const int32_t id = (int32_t) ~(uint32_t)best;
    if (p.out_wide)
        ((int64_t *)p.out)[row * p.out_stride] = id;
    else
        ((int32_t *)p.out)[row * p.out_stride] = id;
}

#endif
