/* norm_loop.cuh - any call of rms_norm and layer_norm whose rows are too long for norm_any.cuh, or too many for a
   32-bit index: each pass reads them again. */
#ifndef ADZE_CUDA_NORM_LOOP_CUH
#define ADZE_CUDA_NORM_LOOP_CUH

#include "norm_any.cuh"

constexpr int LOOP_UNITS = 4, LOOP_THREADS = 256; /* of a thread and of a block */

template <typename T, bool IN_CLUSTER>
__global__ void __launch_bounds__(LOOP_THREADS, 1) norm_loop(const __grid_constant__ norm_any_general p)
{
    typedef norm_piece<T, 1, 32, LOOP_UNITS, ANY_OPTION, general_rows<NORM_TENSORS>, int64_t> piece_type;
    __shared__ norm_shared<IN_CLUSTER> shared;
    const int64_t blocks = IN_CLUSTER ? cluster_size() : 1;
    const int64_t begin = IN_CLUSTER ? cluster_rank() * p.part : 0;
    const int64_t end = IN_CLUSTER ? min(p.units, begin + p.part) : p.units;
    if constexpr (IN_CLUSTER)
        cluster_arrive();
    pdl_launch_next();
    pdl_wait();
    for (int64_t r = blockIdx.x / blocks; r < p.rows.count; r += gridDim.x / blocks) {
        piece_type piece = {p, p.rows.split(r), 0, 0, 0};
        typename piece_type::held h;
        float sum = 0, mean = 0;
        const auto pass = [&](bool store_sum, auto work) {
#pragma unroll 1
            for (int64_t from = begin; from < end; from += LOOP_UNITS * LOOP_THREADS) {
                piece.take((int)threadIdx.x, from, end, LOOP_UNITS);
                piece.forget();
                piece.read(h, store_sum);
                work();
            }
        };
        if (p.g.centred) {
            pass(false, [&] { sum += piece.sum(h); });
            if (IN_CLUSTER)
                cluster_wait();
            mean = any_total<0, 32>(sum, shared) * p.g.inverse_dim;
            sum = 0;
        }
        pass(false, [&] { sum += piece.squares(h, mean); });
        if (IN_CLUSTER && !p.g.centred)
            cluster_wait();
        const float factor = rsqrtf(any_total<1, 32>(sum, shared) * p.g.inverse_dim + p.g.eps);
        pass(true, [&] {
            typename piece_type::params params;
            piece.template fetch_params<0>(params);
            piece.write(h, params, mean, factor);
        });
        if constexpr (IN_CLUSTER)
            cluster_arrive(); /* shared memory is reused */
        else
            __syncthreads();
    }
    if constexpr (IN_CLUSTER)
        cluster_wait();
}

#endif
