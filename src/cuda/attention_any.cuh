/* attention_any.cuh - attention of every call: any dtype, head dim and address. A block has one query of one head.
   Its warps compute the scores of the keys in turn; then its threads have a column of the values each. */
#ifndef ADZE_CUDA_ATTENTION_ANY_CUH
#define ADZE_CUDA_ATTENTION_ANY_CUH

#include "attention_call.cuh"
#include "quantised.cuh"
#include "reduce.cuh"

enum { ANY_THREADS = 256, ANY_BLOCKS = 4, ANY_KEYS = 64, ANY_DIM = 1024 }; /* blocks: bounds the registers */

/* Element `at` of k or v, which are of q's dtype T or quantised. */
template <typename T>
__device__ __forceinline__ float any_element(const char *data, int dtype, int64_t at)
{
    if (dtype == ADZE_I8)
        return (float)((const int8_t *)data)[at];
    if (dtype == ADZE_F8E4M3)
        return f8_to_float(((const uint8_t *)data)[at]);
    return to_float(((const T *)data)[at]);
}

template <typename T>
__global__ void __launch_bounds__(ANY_THREADS, ANY_BLOCKS) attention_any(const __grid_constant__ attention_params p)
{
    constexpr int WARPS = ANY_THREADS / 32, COLUMNS = ANY_DIM / ANY_THREADS;
    __shared__ float q[ANY_DIM], score[ANY_KEYS], weight[ANY_KEYS];
    static_assert(ANY_KEYS == 64, ""); /* two in each lane */
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int row = (int)blockIdx.x, head = (int)blockIdx.y % p.heads, entry = (int)blockIdx.y / p.heads;
    pdl_launch_next();
    pdl_wait();
    /* The sequence that has the row: entry's own, or one of those that share q. */
    int sequence = p.q_offsets ? -1 : entry;
    attention_sequence s = {};
    if (!p.q_offsets)
        s = attention_sequence_of(p, sequence);
    while (p.q_offsets && ++sequence < p.sequences) {
        s = attention_sequence_of(p, sequence);
        if (row >= s.first && row < s.first + s.m)
            break;
    }
    const bool has = sequence < p.sequences;
    const int query = has ? row - s.first : 0, kv_head = head / p.group;
    const int low = has ? attention_low(p, s, query) : 0, high = has ? attention_high(p, s, query) : 0;
    const int64_t q_at = entry * p.q_stride[0] + head * p.q_stride[1] + row * p.q_stride[2];
    for (int i = (int)threadIdx.x; i < p.d; i += ANY_THREADS)
        q[i] = to_float(((const T *)p.q)[q_at + i]);
    const int64_t mask_at = attention_mask_at(p, entry, head, query);
    float top = -INFINITY, sum = 0, out[COLUMNS] = {};
    __syncthreads();
    for (int first = low; first < high; first += ANY_KEYS) {
        const int count = min(ANY_KEYS, high - first);
        for (int j = warp; j < count; j += WARPS) {
            const attention_place place = attention_place_of(p, s, sequence, first + j);
            float x = 0, *const its = &x;
            if (place.entry >= 0) {
                const int64_t at = attention_at(p.k_stride, place, kv_head);
                for (int i = lane; i < p.d; i += 32)
                    x += q[i] * any_element<T>(p.k, p.k_dtype, at + i);
                x = warp_sum<32>(x);
                if (p.k_scale)
                    x *= p.k_scale[attention_at(p.k_scale_stride, place, kv_head)];
                x = attention_score(p, p.scale, x);
                if (p.mask_kind)
                    attention_mask<T, 1>(
                        p, mask_at + first + j, [](int) { return 0; }, [](int) { return true; },
                        [=](int) -> float & { return *its; });
            }
            if (lane == 0)
                score[j] = place.entry >= 0 ? x : -INFINITY;
        }
        __syncthreads();
        /* Every warp takes the maximum and the sum, two keys in each lane; the first warp leaves the weights. */
        const float one = lane < count ? score[lane] : -INFINITY;
        const float two = lane + 32 < count ? score[lane + 32] : -INFINITY;
        const float most = fmaxf(top, warp_max<32>(fmaxf(one, two)));
        const float base = most == -INFINITY ? 0 : most, less = power_of_2(top - base);
        const float of_one = power_of_2(one - base), of_two = power_of_2(two - base);
        top = most;
        sum = sum * less + warp_sum<32>(of_one + of_two);
        if (warp == 0)
            weight[lane] = of_one, weight[lane + 32] = of_two;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            out[c] *= less;
        __syncthreads();
        for (int j = 0; j < count; j++) {
            const attention_place place = attention_place_of(p, s, sequence, first + j);
            if (place.entry < 0)
                continue;
            const int64_t at = attention_at(p.v_stride, place, kv_head);
            const float scale = p.v_scale ? p.v_scale[attention_at(p.v_scale_stride, place, kv_head)] : 1;
            const float scaled = weight[j] * scale;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                const int column = (int)threadIdx.x + c * ANY_THREADS;
                if (column < p.dv)
                    out[c] += scaled * any_element<T>(p.v, p.k_dtype, at + column);
            }
        }
        __syncthreads();
    }
    const attention_total total =
        has ? attention_finish(top, sum, attention_sink<T>(p, head)) : attention_total{0, -INFINITY};
    const int64_t to = entry * p.out_stride[0] + head * p.out_stride[1] + row * p.out_stride[2];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        const int column = (int)threadIdx.x + c * ANY_THREADS;
        if (column < p.dv)
            ((T *)p.out)[to + column] = from_float<T>(out[c] * total.inverse);
    }
    if (p.lse && threadIdx.x == 0)
        p.lse[entry * p.lse_stride[0] + head * p.lse_stride[1] + row * p.lse_stride[2]] = total.lse;
}

#endif
