/* attention_ring.cuh - attention of up to 8 rows over many keys (Hopper): keys and values come through shared memory.

   As attention_cluster.cuh without clusters: worker w of all parts' warps has steps w, w + workers, ... of 16 keys. A
   warp has a ring of its own. Bulk copies bring the keys of a step and their values, 16 rows each, which are dense;
   so all stages but one are under way while a step is computed, and no registers wait for them. */
#ifndef ADZE_CUDA_ATTENTION_RING_CUH
#define ADZE_CUDA_ATTENTION_RING_CUH

#include "attention_cluster.cuh"

template <class S>
struct attention_ring_shape {
    static constexpr int ROW = S::D * S::ELEMENT, HALF = S::KEYS * ROW, STAGE = 2 * HALF; /* bytes */
    static constexpr int STAGES = 3, WARP = STAGES * STAGE, RINGS = S::ALONG * WARP;
    static constexpr int SHARED = RINGS > S::SHARED ? RINGS : S::SHARED; /* or what attention_merge needs */
    static_assert(S::UNITS == 1 && !S::QUANTISED, "");
};

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) attention_ring(const __grid_constant__ attention_params p)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    typedef attention_ring_shape<S> R;
    extern __shared__ __align__(128) char shared[];
    __shared__ __align__(8) uint64_t barriers[S::ALONG][R::STAGES];
    __shared__ cluster_held<S> held[S::THREADS];
    __shared__ attention_block b;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int rank = (int)blockIdx.x, worker = warp * p.parts + rank, workers = p.parts * S::ALONG;
    const uint32_t barrier = shared_address(barriers[warp]);
    if (lane == 0) {
        for (int i = 0; i < R::STAGES; i++)
            bulk_barrier(barrier + (uint32_t)i * 8, 2);
        bulk_ready();
    }
    attention_block own;
    own.kv_head = (int)blockIdx.y % p.kv_heads, own.sequence = (int)blockIdx.y / p.kv_heads;
    own.first = 0, own.rows = p.m * p.group;
    own.s = {own.sequence, 0, p.m, own.sequence, 0, p.n};
    cluster_hold<S>(p, own, held[threadIdx.x]);
    pdl_wait();
    own.s = attention_sequence_of(p, own.sequence);
    own.high = attention_high(p, own.s, p.m - 1);
    const int begin = attention_low(p, own.s, 0) / S::KEYS * S::KEYS;
    const int steps = own.high > begin ? (own.high - begin + S::KEYS - 1) / S::KEYS : 0;
    const int inner_low = attention_low(p, own.s, p.m - 1), inner_high = attention_high(p, own.s, 0);
    if (threadIdx.x == 0)
        b = own;
    __syncthreads();

    /* Lane 0 requests the keys of a step, lane 1 the values; what lies behind the last key is not copied. A step of a
       page that does not exist is missing. */
    const attention_place zero = p.page ? attention_place{0, 0} : attention_place{b.s.key_batch, b.s.first_key};
    const bool is_v = lane == 1;
    const char *const base = is_v ? p.v + attention_at(p.v_stride, zero, b.kv_head) * S::ELEMENT
                                  : p.k + attention_at(p.k_stride, zero, b.kv_head) * S::ELEMENT;
    unsigned missing = 0; /* a bit of each stage */
    auto request = [&](int step, int stage) {
        const int key = begin + step * S::KEYS;
        bool there = true;
        if (lane < 2) {
            const direct_unit unit = direct_unit_of(p, b, is_v ? p.v_stride : p.k_stride, key);
            const uint32_t to = (uint32_t)(warp * R::WARP + stage * R::STAGE + lane * R::HALF);
            const uint32_t arrived = barrier + (uint32_t)stage * 8;
            there = unit.there;
            if (there)
                bulk_copy(shared_address(shared) + to, base + unit.at * S::ELEMENT,
                          (uint32_t)(min(S::KEYS, b.high - key) * R::ROW), arrived);
            else
                bulk_arrive(arrived);
        }
        const bool gone = __any_sync(~0u, !there);
        missing = (missing & ~(1u << stage)) | (unsigned)gone << stage;
    };
    for (int i = 0; i < R::STAGES; i++)
        if (worker + i * workers < steps)
            request(worker + i * workers, i);

    direct_rows<S> r;
    direct_keys<S> keys;
    cluster_load_q<S>(p, own, held[threadIdx.x], r);
#    pragma unroll
    for (int i = 0; i < S::TILES; i++)
#    pragma unroll
        for (int c = 0; c < S::CHUNKS * S::VECTOR / 8; c++)
            r.q[i][c] = weight_order<S::FORMAT>(r.q[i][c]);
    r.clear();
    const bool plain = p.softcap == 0 && !p.mask_kind;
    if (worker >= steps)
        pdl_launch_next();
    int stage = 0;
    uint32_t parity = 0;
    for (int step = worker; step < steps; step += workers) {
        const int key = begin + step * S::KEYS, later = step + R::STAGES * workers;
        const char *const from = shared + warp * R::WARP + stage * R::STAGE;
        if (later >= steps) /* the last keys are under way */
            pdl_launch_next();
        bulk_wait(barrier + (uint32_t)stage * 8, parity);
#    pragma unroll
        for (int h = 0; h < 2; h++)
#    pragma unroll
            for (int c = 0; c < S::CHUNKS; c++)
                keys.k[0][h][c] = load_shared(from + (h * 8 + g) * R::ROW + c * 64 + t * 16);
        float score[S::UNITS][S::TILES][4];
        direct_scores<T, S>(keys, r, score);
        keys.missing = missing >> stage & 1;
        if (!plain || keys.missing || key < inner_low || key + S::KEYS > inner_high) {
            direct_edge<T, S>(p, b, key, keys.missing, p.scale, score);
        } else {
#    pragma unroll
            for (int i = 0; i < S::TILES; i++)
#    pragma unroll
                for (int e = 0; e < 4; e++)
                    score[0][i][e] *= p.scale;
        }
        direct_weigh<S>(r, score);
#    pragma unroll
        for (int i = 0; i < 4; i++)
#    pragma unroll
            for (int c = 0; c < S::SPANS; c++)
                keys.v[0][i][c] =
                    keys.missing
                        ? make_uint4(0, 0, 0, 0)
                        : load_shared(from + R::HALF + (i / 2 * 8 + i % 2 + 2 * t) * R::ROW + c * 128 + g * 16);
        if (key + S::KEYS > b.high)
            direct_clip<S>(b, key, keys);
        __syncwarp();
        if (later < steps)
            request(later, stage);
        direct_values<T, S, false>(keys, score, r);
        if (++stage == R::STAGES)
            stage = 0, parity ^= 1;
    }
    __syncthreads(); /* the rings become memory of the merge */
    direct_put<S>(r, 1, warp, reinterpret_cast<float *>(shared));
    __syncthreads();
    attention_merge<T, S>(p, b, reinterpret_cast<float *>(shared), rank);
#endif
}

#endif
