/* attention_cluster.cuh - attention of up to 16 rows, which one block has for each part of the keys; the parts are
   merged by a cluster of blocks, or by a second launch (attention_combine).

   The warps of all parts are workers: worker w has steps w, w + workers, ... of KEYS keys (attention_direct.cuh).
   Which keys it begins with does not depend on the length, so that they are loaded together with it, and those beyond
   it are dropped. At the end each warp of a cluster sends its sums straight into the shared memory of the blocks that
   own their columns, and maxima and sums of the rows to all; a block adds up its columns once its barrier has counted
   their bytes. */
#ifndef ADZE_CUDA_ATTENTION_CLUSTER_CUH
#define ADZE_CUDA_ATTENTION_CLUSTER_CUH

#include "attention_direct.cuh"
#include "bulk.cuh"

/* Shared memory: q; columns of all workers, then maxima and sums, or without a cluster what attention_merge needs. */
template <class S>
constexpr int cluster_shared(int ranks)
{
    const int own = S::ALONG * S::ROWS * (S::D * 4 + ranks * 8);
    return S::Q_BYTES + (own > S::SHARED ? own : S::SHARED);
}

/* The steps of keys that the rows of a sequence see. In an inner step every row sees every key, before the mask. */
template <class S>
struct cluster_keys {
    int begin, steps, inner_low, inner_high;
    __device__ __forceinline__ cluster_keys(const attention_params &p, const attention_block &b)
        : begin(attention_low(p, b.s, 0) / S::KEYS * S::KEYS),
          steps(b.high > begin ? (b.high - begin + S::KEYS - 1) / S::KEYS : 0),
          inner_low(attention_low(p, b.s, p.m - 1)), inner_high(attention_high(p, b.s, 0))
    {
    }
    __device__ __forceinline__ bool inner(int key) const { return key >= inner_low && key + S::KEYS <= inner_high; }
};

/* Where a thread loads from, in shared memory: computed before the dependency wait, which arithmetic in registers
   would not stay in front of. */
template <class S>
struct cluster_held {
    alignas(16) direct_source from;
    const char *q[S::TILES]; /* of its row of each tile */
};
template <class S>
__device__ __forceinline__ void cluster_hold(const attention_params &p, const attention_block &b,
                                             cluster_held<S> &held)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const direct_source from = direct_source_of<S>(p, b);
    asm volatile("st.shared.v2.u64 [%0], {%1, %2};" ::"r"(shared_address(&held.from)), "l"(from.k), "l"(from.v)
                 : "memory");
#pragma unroll
    for (int i = 0; i < S::TILES; i++) {
        const int row = min(i * 8 + g, b.rows - 1), query = row / p.group;
        const int64_t head = b.kv_head * p.group + row % p.group;
        const int64_t at = b.sequence * p.q_stride[0] + head * p.q_stride[1] + query * p.q_stride[2];
        *(const char *volatile *)&held.q[i] = p.q + (at + t * S::VECTOR) * 2;
    }
}
template <class S>
__device__ __forceinline__ direct_source cluster_from(const cluster_held<S> &held)
{
    direct_source from;
    asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(from.k), "=l"(from.v) : "r"(shared_address(&held.from)));
    return from;
}
template <class S>
__device__ __forceinline__ void cluster_load_q(const attention_params &p, const attention_block &b,
                                               const cluster_held<S> &held, direct_rows<S> &r)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < S::TILES; i++) {
        const char *const from = *(const char *volatile *)&held.q[i];
#pragma unroll
        for (int c = 0; c < S::Q_VECTORS; c++) {
            constexpr int EACH = S::VECTOR / 8; /* vectors of q for one of k */
            const int column = c / EACH * 4 * S::VECTOR + c % EACH * 8;
            const uint4 v = weight_order<S::FORMAT>(
                load_passing(from + column * 2, i * 8 + g < b.rows && column + t * S::VECTOR < p.d));
            if constexpr (S::Q_SHARED)
                asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(
                                 r.q_at + (uint32_t)((i * S::Q_VECTORS + c) * S::THREADS * 16)),
                             "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                             : "memory");
            else
                r.q[i][c] = v;
        }
    }
}

/* Prefetches steps `begin` to `end` of the warp into L2, while the kernel before may still run: lanes have a line
   each, as bulk prefetches of a warp are issued one by one. Lengths and the block table may change meanwhile: here
   they only say what is likely needed. */
template <class S>
__device__ __forceinline__ void cluster_prefetch(const attention_params &p, const attention_block &b, int high,
                                                 int worker, int workers, int begin, int end)
{
    constexpr int LINE = 128, LINES = S::D * S::ELEMENT > LINE ? S::D * S::ELEMENT / LINE : 1;
    for (int i = begin; i < end && (worker + i * workers) * S::KEYS < high; i++)
        for (int at = (int)threadIdx.x % 32; at < S::KEYS * LINES * 2; at += 32) {
            const bool is_v = at % 2;
            const int key = (worker + i * workers) * S::KEYS + at / 2 / LINES, line = at / 2 % LINES * LINE;
            if (key >= high || line >= (is_v ? p.dv : p.d) * S::ELEMENT)
                continue;
            attention_place place = {b.sequence, key};
            if (p.page) {
                const unsigned page = (unsigned)key / (unsigned)p.page;
                place.entry = ((const volatile int32_t *)p.block_table)[b.sequence * p.table_stride + page];
                place.row = (int)((unsigned)key - page * (unsigned)p.page);
                if ((unsigned)place.entry >= (unsigned)p.pages)
                    continue;
            }
            prefetch(is_v ? p.v + attention_at(p.v_stride, place, b.kv_head) * S::ELEMENT + line
                          : p.k + attention_at(p.k_stride, place, b.kv_head) * S::ELEMENT + line);
        }
}

/* Columns of a row belong to the blocks of the cluster in turn: PIECES / ranks pieces of four to each. Where they lie
   there: of each row and piece one of each worker, so that neighbouring threads read neighbouring pieces. `ranks` is
   a power of 2. */
template <class S>
__device__ __forceinline__ uint32_t cluster_bytes(int rows, int ranks)
{
    return (uint32_t)(ranks * S::ALONG * (rows * (S::D / 4 / ranks) * 16 + S::TILES * 64));
}
template <class S>
__device__ __forceinline__ void cluster_push(const direct_rows<S> &r, float of_values, uint32_t shared,
                                             uint32_t barrier, int rows, int ranks, int worker)
{
    constexpr int PIECES = S::D / 4;
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4, shift = 31 - __clz(PIECES / ranks);
    const int workers = ranks * S::ALONG, each = 1 << shift;
    const uint32_t sums = shared + S::ALONG * S::ROWS * S::D * 4;
#pragma unroll
    for (int i = 0; i < S::TILES; i++) {
        float sum[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = i * 8 + 2 * t + e;
            sum[e] = r.row_sum(i, e);
            if (row < rows)
#pragma unroll
                for (int c = 0; c < S::COLUMN_TILES; c += 2) {
                    const int piece = direct_column<S>(c) / 4, owner = piece >> shift, own = piece & (each - 1);
                    cluster_send(shared + (uint32_t)((row * each + own) * workers + worker) * 16, barrier, owner,
                                 make_float4(r.out[i][c][e] * of_values, r.out[i][c][2 + e] * of_values,
                                             r.out[i][c + 1][e] * of_values, r.out[i][c + 1][2 + e] * of_values));
                }
        }
        for (int rank = g; rank < ranks; rank += 8)
            cluster_send(sums + (uint32_t)(worker * S::ROWS + i * 8 + 2 * t) * 8, barrier, rank,
                         make_float4(r.top[i][0], sum[0], r.top[i][1], sum[1]));
    }
}
/* Adds up the block's columns once they are there: 2^log2 neighbouring threads have the workers of a row's piece. */
template <typename T, class S>
__device__ __forceinline__ void cluster_sum(const attention_params &p, const attention_block &b, const char *shared,
                                            uint32_t barrier, int ranks, int rank)
{
    constexpr int PIECES = S::D / 4;
    const int shift = 31 - __clz(PIECES / ranks), each = 1 << shift, pieces = b.rows * each;
    const int workers = ranks * S::ALONG;
    const float4 *const values = reinterpret_cast<const float4 *>(shared);
    const float2 *const sums = reinterpret_cast<const float2 *>(shared + S::ALONG * S::ROWS * S::D * 4);
    int log2 = 5;
    while (log2 > 0 && (pieces << log2 > S::THREADS || 1 << log2 > workers))
        log2--;
    const int all = ((pieces << log2) + 31) / 32 * 32, lanes = 1 << log2; /* whole warps */
    for (int at = (int)threadIdx.x; at < all; at += S::THREADS) {
        const int index = min(at >> log2, pieces - 1), row = index >> shift;
        const int piece = rank * each + (index & (each - 1)), lane = at & (lanes - 1);
        attention_target to;
        const bool stores =
            at >> log2 < pieces && piece * 4 < p.dv && lane == 0 && attention_target_of(p, b, row, to);
        bulk_wait(barrier, 0);
        float top = -INFINITY, sum = 0, value[4] = {0, 0, 0, 0};
#pragma unroll 4
        for (int w = lane; w < workers; w += lanes)
            top = fmaxf(top, sums[w * S::ROWS + row].x);
        for (int d = lanes / 2; d; d /= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        const float base = top == -INFINITY ? 0 : top;
#pragma unroll 4
        for (int w = lane; w < workers; w += lanes) {
            const float2 of = sums[w * S::ROWS + row];
            const float4 v = values[index * workers + w];
            const float weight = power_of_2(of.x - base);
            sum += of.y * weight;
            value[0] += v.x * weight, value[1] += v.y * weight;
            value[2] += v.z * weight, value[3] += v.w * weight;
        }
        for (int d = lanes / 2; d; d /= 2) {
            sum += __shfl_xor_sync(~0u, sum, d);
#pragma unroll
            for (int e = 0; e < 4; e++)
                value[e] += __shfl_xor_sync(~0u, value[e], d);
        }
        if (stores)
            attention_store<T>(p, to, piece, top, sum, value);
    }
}

/* Blocks: the parts of the keys, which are a cluster's if p.clustered; blockIdx.y has the sequence and the head of k.
   All rows of a sequence and head are in one tile. */
template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) attention_cluster(const __grid_constant__ attention_params p)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* older GPUs are never given it: adze_cuda_tensor_cores() */
    extern __shared__ __align__(128) char shared[];
    __shared__ __align__(8) uint64_t arrived;
    __shared__ cluster_held<S> held[S::THREADS];
    __shared__ attention_block b; /* the same for all threads: not in registers, of which a warp needs all */
    const int warp = (int)threadIdx.x / 32, rank = (int)blockIdx.x;
    const int worker = warp * p.parts + rank, workers = p.parts * S::ALONG;
    const bool at_zero = !p.k_offsets && !p.window; /* the first key is key 0, whatever the length */
    const uint32_t barrier = shared_address(&arrived);
    if (p.clustered && threadIdx.x == 0) {
        bulk_barrier(barrier);
        bulk_ready();
        bulk_expect(barrier, cluster_bytes<S>(p.m * p.group, p.parts));
    }
    cluster_arrive_relaxed(); /* once all have arrived, their barriers are there */
    char *const sums = shared + S::Q_BYTES;
    direct_rows<S> r;
    r.q_at = shared_address(shared) + threadIdx.x * 16;
    direct_keys<S> keys;
    bool loaded = false, early = false; /* the first step: after the wait, or before it */
    attention_block own;
    own.kv_head = (int)blockIdx.y % p.kv_heads, own.sequence = (int)blockIdx.y / p.kv_heads;
    own.first = 0, own.rows = p.m * p.group, own.high = p.n;
    own.s = {own.sequence, 0, p.m, own.sequence, 0, p.n};
    int likely = p.n; /* the length, unless it changes until the wait */
    if (at_zero && p.lengths)
        likely = ((const volatile int32_t *)p.lengths)[own.sequence];
    cluster_hold<S>(p, own, held[threadIdx.x]); /* while that is on its way */
    if (at_zero) {
        likely = between(likely, 0, p.n);
        loaded = worker * S::KEYS < likely;
        early = p.const_cache && (worker + 1) * S::KEYS <= likely - p.m;
        cluster_prefetch<S>(p, own, likely, worker, workers, early, p.clustered || p.parts == 1 ? 1 : 2);
    }
    if (!early)
        pdl_wait();
    direct_source from = cluster_from<S>(held[threadIdx.x]);
    if (loaded) {
        direct_load_keys<S>(p, own, from, worker * S::KEYS, keys);
        direct_load_values<S>(p, own, from, worker * S::KEYS, keys);
    }
    if (early)
        pdl_wait();
    int length = p.n; /* used only after the first loads */
    if (p.lengths)
        asm volatile("ld.global.s32 %0, [%1];" : "=r"(length) : "l"(p.lengths + own.sequence) : "memory");
    cluster_load_q<S>(p, own, held[threadIdx.x], r);
    r.clear();
    if (at_zero)
        own.s.n = between(length, 0, p.n);
    else
        own.s = attention_sequence_of(p, own.sequence);
    own.high = attention_high(p, own.s, p.m - 1);
    const cluster_keys<S> keys_of(p, own);
    const int begin = keys_of.begin, steps = keys_of.steps;
    if (threadIdx.x == 0)
        b = own;
    __syncthreads();
    if (!at_zero)
        from = direct_source_of<S>(p, b);
    const float scale = S::QUANTISED && !p.k_scale_each ? p.scale * *p.k_scale : p.scale;
    const bool plain = p.softcap == 0 && !p.mask_kind;
    if (!S::QUANTISED && p.mask_kind) /* with quantised keys there are no registers for it */
        direct_prefetch_mask<S>(p, b, begin + worker * S::KEYS, workers * S::KEYS, b.high);
    if (!loaded && worker < steps) {
        direct_load_keys<S>(p, b, from, begin + worker * S::KEYS, keys);
        direct_load_values<S>(p, b, from, begin + worker * S::KEYS, keys);
    }
    if (worker >= steps)
        pdl_launch_next();
    for (int step = worker; step < steps; step += workers) {
        const int key = begin + step * S::KEYS, next = key + workers * S::KEYS;
        const bool more = step + workers < steps;
        const bool last = key + S::KEYS > b.high;
        /* Once the last keys are in flight. Earlier, blocks of the next kernel would take slots of this one's, and
           their prefetches its bandwidth. */
        if (!more)
            pdl_launch_next();
        float score[S::UNITS][S::TILES][4];
        direct_scores<T, S>(keys, r, score);
        if (direct_rare<S>(keys.k))
            direct_rare_scores<S>(keys, score);
        const unsigned missing = keys.missing;
        if constexpr (S::QUANTISED) {
#    pragma unroll
            for (int u = 0; u < S::UNITS; u++)
#    pragma unroll
                for (int e = 0; e < 4 * S::TILES; e++)
                    score[u][e / 4][e % 4] *= keys.k_scale[u][e % 4 / 2];
        }
        direct_scale<T, S>(p, b, key, missing, plain && keys_of.inner(key), scale, score);
        if (more)
            direct_load_keys<S>(p, b, from, next, keys);
        direct_weigh<S>(r, score);
        if (last)
            direct_clip<S>(b, key, keys);
        if constexpr (S::QUANTISED)
            if (p.v_scale_each)
                direct_scale_weights<S>(keys.v_scale, r, score);
        if (direct_rare<S>(keys.v))
            direct_values<T, S, true>(keys, score, r);
        else
            direct_values<T, S, false>(keys, score, r);
        if (more)
            direct_load_values<S>(p, b, from, next, keys);
    }

    const float of_values = !S::QUANTISED ? 1 : p.v_scale_each ? r.unit : *p.v_scale;
    cluster_wait();
    if (p.clustered) {
        cluster_push<S>(r, of_values, shared_address(sums), barrier, b.rows, p.parts, worker);
        cluster_sum<T, S>(p, b, sums, barrier, p.parts, rank);
        return;
    }
    direct_put<S>(r, of_values, warp, reinterpret_cast<float *>(sums));
    __syncthreads();
    attention_merge<T, S>(p, b, reinterpret_cast<float *>(sums), rank);
#endif
}

#endif
