/* attention_ring.cuh - attention of up to 8 rows (Hopper): keys and values come through shared memory.

   As attention_cluster.cuh, whose workers and ends it has: worker w of all parts' warps has steps w, w + workers, ...
   of 16 keys. A warp has a ring of its own. Bulk copies bring the keys of a step and their values, 16 rows each,
   which are dense; so all stages but one are under way while a step is computed, and no registers wait for them.
   Where the call says that the cache is constant (ADZE_CONST_CACHE), the first stages are filled before the
   dependency wait. */
#ifndef ADZE_CUDA_ATTENTION_RING_CUH
#define ADZE_CUDA_ATTENTION_RING_CUH

#include "attention_cluster.cuh"

enum { RING_STAGES = 3 }; /* at most */

template <class S>
struct attention_ring_shape {
    static constexpr int ROW = S::D * S::ELEMENT, HALF = S::KEYS * ROW, STAGE = 2 * HALF; /* bytes */
    static constexpr int ALL = S::ALONG * STAGE;                                          /* warps' */
    static_assert(S::UNITS == 1 && !S::QUANTISED, "");
    /* Sums of other blocks of a cluster arrive behind the rings; what attention_merge needs may lie on them. */
    static constexpr int shared(int stages, bool clustered, int ranks)
    {
        return clustered                  ? stages * ALL + cluster_shared<S>(ranks)
               : stages * ALL > S::SHARED ? stages * ALL
                                          : S::SHARED;
    }
};

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) attention_ring(const __grid_constant__ attention_params p)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    typedef attention_ring_shape<S> R;
    extern __shared__ __align__(128) char shared[];
    __shared__ __align__(8) uint64_t barriers[S::ALONG][RING_STAGES], sums_arrived;
    __shared__ cluster_held<S> held[S::THREADS];
    __shared__ attention_block b;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int rank = (int)blockIdx.x, worker = warp * p.parts + rank, workers = p.parts * S::ALONG;
    const uint32_t barrier = shared_address(barriers[warp]), all_sums = shared_address(&sums_arrived);
    const int stages = p.stages;
    const bool at_zero = !p.window; /* the first key is key 0, whatever the length */
    if (lane == 0)
        for (int i = 0; i < stages; i++)
            bulk_barrier(barrier + (uint32_t)i * 8, 2);
    if (p.clustered && threadIdx.x == 0)
        bulk_barrier(all_sums);
    if (lane == 0)
        bulk_ready();
    if (p.clustered && threadIdx.x == 0)
        bulk_expect(all_sums, cluster_bytes<S>(p.m * p.group, p.parts));
    cluster_arrive_relaxed(); /* once all have arrived, their barriers are there */
    __syncwarp();

    attention_block own;
    own.kv_head = (int)blockIdx.y % p.kv_heads, own.sequence = (int)blockIdx.y / p.kv_heads;
    own.first = 0, own.rows = p.m * p.group, own.high = p.n;
    own.s = {own.sequence, 0, p.m, own.sequence, 0, p.n};
    /* Lane 0 requests the keys of a step, lane 1 the values; what lies behind the last key is not copied. A step of a
       page that does not exist is missing. */
    const attention_place zero = {p.page ? 0 : own.sequence, 0};
    const bool is_v = lane == 1;
    const char *const base = is_v ? p.v + attention_at(p.v_stride, zero, own.kv_head) * S::ELEMENT
                                  : p.k + attention_at(p.k_stride, zero, own.kv_head) * S::ELEMENT;
    char *const ring = shared + warp * stages * R::STAGE;
    unsigned missing = 0; /* a bit of each stage */
    auto request = [&](const attention_block &of, int key, int stage) {
        bool there = true;
        if (lane < 2) {
            const direct_unit unit = direct_unit_of(p, of, is_v ? p.v_stride : p.k_stride, key);
            const uint32_t arrived = barrier + (uint32_t)stage * 8;
            there = unit.there;
            if (there)
                bulk_copy(shared_address(ring + stage * R::STAGE + lane * R::HALF), base + unit.at * S::ELEMENT,
                          (uint32_t)(min(S::KEYS, of.high - key) * R::ROW), arrived);
            else
                bulk_arrive(arrived);
        }
        const bool gone = __any_sync(~0u, !there);
        missing = (missing & ~(1u << stage)) | (unsigned)gone << stage;
    };
    int requested = 0; /* steps of this warp */
    if (p.const_cache && at_zero) {
        if (p.lengths)
            own.high = between(((const volatile int32_t *)p.lengths)[own.sequence], 0, p.n);
        while (requested < stages && (worker + requested * workers + 1) * S::KEYS <= own.high - p.m) {
            request(own, (worker + requested * workers) * S::KEYS, requested);
            requested++;
        }
    }
    cluster_hold<S>(p, own, held[threadIdx.x]);
    pdl_wait();
    own.s = attention_sequence_of(p, own.sequence);
    own.high = attention_high(p, own.s, p.m - 1);
    const cluster_keys<S> keys_of(p, own);
    const int begin = keys_of.begin, steps = keys_of.steps;
    while (requested < stages && worker + requested * workers < steps) {
        request(own, begin + (worker + requested * workers) * S::KEYS, requested);
        requested++;
    }
    direct_rows<S> r;
    direct_keys<S> keys;
    cluster_load_q<S>(p, own, held[threadIdx.x], r);
    if (threadIdx.x == 0)
        b = own;
    __syncthreads();
    r.clear();
    const bool plain = p.softcap == 0 && !p.mask_kind;
    if (p.mask_kind)
        direct_prefetch_mask<S>(p, b, begin + worker * S::KEYS, workers * S::KEYS, b.high);
    if (worker >= steps && !p.next_late)
        pdl_launch_next();
    int stage = 0;
    uint32_t parity = 0;
    auto next_stage = [&] {
        if (++stage == stages)
            stage = 0, parity ^= 1;
        requested--;
    };
    for (int step = worker; step < steps; step += workers) {
        const int key = begin + step * S::KEYS, later = step + stages * workers;
        const char *const from = ring + stage * R::STAGE;
        if (later >= steps && !p.next_late) /* the last keys are under way */
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
        direct_scale<T, S>(p, b, key, keys.missing, plain && keys_of.inner(key), p.scale, score);
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
        if (later < steps) {
            request(b, begin + later * S::KEYS, stage);
            requested++;
        }
        direct_values<T, S, false>(keys, score, r);
        next_stage();
    }
    while (requested > 0) { /* filled before the wait, by a length that was larger */
        bulk_wait(barrier + (uint32_t)stage * 8, parity);
        next_stage();
    }
    cluster_wait();
    if (p.clustered) {
        char *const sums = shared + stages * R::ALL;
        cluster_push<S>(r, 1, shared_address(sums), all_sums, b.rows, p.parts, worker);
        cluster_sum<T, S>(p, b, sums, all_sums, p.parts, rank);
        return;
    }
    __syncthreads(); /* the rings become memory of the merge */
    direct_put<S>(r, 1, warp, reinterpret_cast<float *>(shared));
    __syncthreads();
    attention_merge<T, S>(p, b, reinterpret_cast<float *>(shared), rank);
#endif
}

#endif
