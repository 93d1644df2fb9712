/* sample_listed.cuh - sample with a small top_k: the tokens that it may keep are listed in two passes over the
   logits.

   The first pass finds the largest logit of each thread. Of ranks blocks each finds the (k / ranks)-th largest of
   those of its threads; k tokens or more are at least as large as the smallest of these bounds. The second pass lists
   the tokens from that bound on, not many more than k. Then the first block is alone: of up to SORTED tokens each
   thread has one, and compares it with all; more are left to the passes of sample_row. So is a row with more than
   LISTED of them, as where many are equal. Sums are integers, so that the choice has the same bits either way. */
#ifndef ADZE_CUDA_SAMPLE_LISTED_CUH
#define ADZE_CUDA_SAMPLE_LISTED_CUH

#include "launch.cuh"
#include "sample_row.cuh"

constexpr int SORTED = 256;
static_assert(SORTED <= THREADS && CLUSTER <= WARPS, "a thread has a token, and a warp the list of a block");

template <typename T, int W>
struct sample_list : sample_row<T, W> {
    typedef sample_row<T, W> base;
    using base::p;
    using base::rank;
    using base::ranks;
    using base::sample_row;
    using base::space;
    using base::thread;

    /* The key of a logit that k tokens reach, and of the largest. */
    __device__ __forceinline__ uint2 bounds()
    {
        float most = -INFINITY; /* NaN is passed over */
        each_logits<T, W, 2 * IN_FLIGHT>(this->x, this->first, this->end, [&](int32_t, const float(&f)[W]) {
#pragma unroll
            for (int j = 0; j < W; j++)
                most = fmaxf(most, f[j]);
        });
        uint32_t *const keys = space.bins.count;
        const uint32_t own = sample_key(most + 0.0f), due = (uint32_t)(p.top_k + ranks - 1) / (uint32_t)ranks;
        keys[thread] = own;
        if (thread == 0)
            space.found = ~0u, space.listed = 0;
        __syncthreads();
        uint32_t larger = 0;
#pragma unroll 8
        for (int i = 0; i < THREADS; i += 4) {
            const uint4 other = *(const uint4 *)(keys + i);
            larger += (other.x > own) + (other.y > own) + (other.z > own) + (other.w > own);
        }
        if (larger < due)
            atomicMin(&space.found, own);
        if (larger == 0)
            space.found_number = own; /* the same, of all threads that have it */
        __syncthreads();
        this->put_share(SHARE_MOST, space.found, space.found_number);
        const int lane = this->lane, of = lane < ranks ? lane : 0;
        uint32_t bound = (uint32_t)this->get_share(SHARE_MOST, 0, of);
        uint32_t largest = (uint32_t)this->get_share(SHARE_MOST, 1, of);
#pragma unroll
        for (int mask = CLUSTER / 2; mask; mask /= 2) { /* lanes beyond the ranks have what the first has */
            bound = min(bound, __shfl_xor_sync(~0u, bound, mask));
            largest = max(largest, __shfl_xor_sync(~0u, largest, mask));
        }
        return make_uint2(__shfl_sync(~0u, bound, 0), __shfl_sync(~0u, largest, 0));
    }
    /* Lists the tokens from the bound on in the first block; false where they are too many. */
    __device__ __forceinline__ bool list_from(uint32_t bound)
    {
        const float low = sample_value(bound), low_score = this->warmed(low);
        const uint32_t lowest_key = sample_key(low_score);
        /* Less than this, a logit has a smaller score; those near it are divided by the temperature. */
        const float near = fabsf(low_score) < INFINITY ? low - fmaxf(fabsf(low) * 0x1p-20f, 0x1p-80f) : -INFINITY;
        each_logits<T, W>(this->x, this->first, this->end, [&](int32_t i, const float(&f)[W]) {
            float most = -INFINITY;
#pragma unroll
            for (int j = 0; j < W; j++)
                most = fmaxf(most, f[j]);
            if (most < near || i >= this->end)
                return;
#pragma unroll 1 /* it is rare, and read again: the code stays short */
            for (int j = 0; j < W; j++) {
                const float own = base::logit(to_float(this->x[i + j]));
                const float score = this->warmed(own);
                if (own < near || sample_key(score) < lowest_key)
                    continue;
                const uint32_t at = atomicAdd(&space.listed, 1u);
                if (at < LISTED)
                    space.index[at] = (uint32_t)(i + j), space.score[at] = score;
            }
        });
        this->barrier();
        const int lane = this->lane, warp = this->warp;
        const uint32_t number = lane < ranks ? this->load_word(&space.listed, lane) : 0;
        const uint32_t up_to = warp_prefix(number), all = __shfl_sync(~0u, up_to, 31);
        if (all > LISTED) {
            this->barrier(); /* every block has read the numbers */
            return false;
        }
        if (rank == 0 && warp > 0 && warp < ranks) { /* of block `warp` */
            const uint32_t n = __shfl_sync(~0u, number, warp), from = __shfl_sync(~0u, up_to, warp) - n;
            for (uint32_t i = (uint32_t)lane; i < n; i += 32) {
                space.index[from + i] = this->load_word(&space.index[i], warp);
                space.score[from + i] = __uint_as_float(this->load_word((const uint32_t *)&space.score[i], warp));
            }
        }
        this->barrier(); /* the other blocks may end */
        ranks = 1;
        this->listed = true;
        if (thread == 0)
            space.listed = all;
        __syncthreads();
        return true;
    }
    /* The choice among a list of at most SORTED tokens. */
    __device__ __forceinline__ void pick()
    {
        const int32_t n = (int32_t)space.listed;
        const bool has = thread < n;
        uint32_t *const keys = space.bins.count;
        weight_sum *const weights = (weight_sum *)space.bins.low;
        const weight_sum none = {0, 0};
        const float score = has ? space.score[thread] : -INFINITY, w = sample_weight(score, this->largest);
        const uint32_t key = sample_key(score), index = has ? space.index[thread] : 0;
        const weight_sum own = has ? fixed_weight(w) : none;
        if (has)
            keys[thread] = key, weights[thread] = own;
        __syncthreads();
        int32_t larger = 0;
        weight_sum before = none; /* of the tokens with a larger score: they are kept where this one is */
#pragma unroll 4
        for (int32_t i = 0; i < n; i++)
            if (keys[i] > key)
                larger++, before.add(weights[i]);
        bool kept = has && larger < p.top_k;
        if (p.top_p > 0 && p.top_p < 1)
            kept = before.value() < (double)p.top_p * this->block_total(kept ? own : none).value() && kept;
        kept = kept && (w >= p.min_p || key == sample_key(this->largest));
        __syncthreads(); /* the weights have been read */
        if (has)
            weights[thread] = kept ? own : none;
        const double most = this->target(this->block_total(kept ? own : none));
        weight_sum up_to = none;
#pragma unroll 4
        for (int32_t i = 0; i < n; i++)
            if (space.index[i] <= index)
                up_to.add(weights[i]);
        const weight_sum below = {up_to.high - own.high, up_to.low - own.low};
        if (kept && up_to.value() > most && below.value() <= most)
            this->write((int32_t)index);
    }
    __device__ __forceinline__ void run()
    {
        const uint2 found = bounds();
        if (list_from(found.x)) {
            if (rank != 0)
                return;
            this->largest = this->warmed(sample_value(found.y));
            if (space.listed <= SORTED) {
                pick();
                return;
            }
        } else if (!this->start()) {
            return;
        }
        this->draw();
    }
};

template <typename T, int W>
__global__ void __launch_bounds__(THREADS, 1) sample_listed(const __grid_constant__ sample_params p)
{
    extern __shared__ __align__(128) char shared[];
    const int ranks = cluster_size();
    pdl_launch_next();
    pdl_wait();
    sample_list<T, W>(p, shared, blockIdx.x / (unsigned)ranks, cluster_rank(), ranks).run();
}

#endif
