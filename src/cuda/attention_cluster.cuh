/* attention_cluster.cuh - attention of a few rows in one launch: attention_direct.cuh with the parts of the keys in
   the blocks of a cluster.

   The warps of a cluster are its workers: worker w has steps w, w + workers, ... of KEYS keys. Which keys it begins
   with does not depend on the length, so that they are loaded together with it, and those beyond it are dropped. At
   the end each warp sends its sums straight into the shared memory of the blocks that own their columns, and tops and
   sums of the rows to all; a block adds up its columns once its barrier has counted their bytes.
   Clusters begin only where all their blocks fit at once, into one group of multiprocessors: blocks are half a
   multiprocessor or less. */
#ifndef ADZE_CUDA_ATTENTION_CLUSTER_CUH
#define ADZE_CUDA_ATTENTION_CLUSTER_CUH

#include "attention_direct.cuh"
#include "bulk.cuh"

/* What a call brings into L2: steps of each warp while the kernel before still runs, and at its own end `next`. */
struct attention_ahead {
    const char *next;
    int64_t next_bytes;
    int steps, early; /* early: the first keys are loaded before the length is known */
    int units;        /* prefetches are of units of 16 keys, which are one piece of memory */
};

/* Shared memory: columns of all workers, then tops and sums; or without a cluster what attention_merge needs. */
template <class S>
__host__ __device__ constexpr int cluster_shared(int ranks)
{
    const int own = S::ALONG * S::ROWS * (S::D * 4 + ranks * 8);
    return own > S::SHARED ? own : S::SHARED;
}

/* A lane's first vector of key 0, and of its value, or of those of page 0: of keys it has rows g and g + 8 of a unit,
   of values rows 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. */
struct cluster_source {
    const char *k, *v;
};
/* A thread's, and its row of q of each tile, in shared memory: computed before the dependency wait, which arithmetic
   in registers would not stay in front of; and registers are few. */
struct __align__(16) cluster_held {
    const char *k, *v, *q[2];
    __device__ __forceinline__ void put(const cluster_source &from)
    {
        asm volatile("st.shared.v2.u64 [%0], {%1, %2};" ::"r"(shared_address(&k)), "l"(from.k), "l"(from.v)
                     : "memory");
    }
    __device__ __forceinline__ cluster_source get() const
    {
        cluster_source from;
        asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(from.k), "=l"(from.v) : "r"(shared_address(&k)));
        return from;
    }
};
template <class S>
__device__ __forceinline__ cluster_source cluster_source_of(const attention_params &p, const attention_sequence &s,
                                                            int kv_head)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const attention_place begin = p.page ? attention_place{0, 0} : attention_place{s.key_batch, s.first_key};
    const attention_place k = {begin.entry, begin.row + g}, v = {begin.entry, begin.row + 2 * t};
    return {p.k + (attention_at(p.k_stride, k, kv_head) + t * S::VECTOR) * S::ELEMENT,
            p.v + (attention_at(p.v_stride, v, kv_head) + g * S::VECTOR) * S::ELEMENT};
}
/* Where a unit begins, in bytes from there; negative: it is of a page that does not exist. */
__device__ __forceinline__ int64_t cluster_unit(const attention_params &p, const int64_t (&stride)[3], int sequence,
                                                int key, int high, int element)
{
    if (!p.page)
        return key * stride[2] * element;
    if (key >= high)
        return -1;
    const unsigned page = (unsigned)key / (unsigned)p.page;
    const int entry = p.block_table[sequence * p.table_stride + page];
    const int64_t row = (int)((unsigned)key - page * (unsigned)p.page);
    return (unsigned)entry < (unsigned)p.pages ? (entry * stride[0] + row * stride[2]) * element : -1;
}
template <class S>
__device__ __forceinline__ void cluster_load_keys(const attention_params &p, const cluster_source &from, int sequence,
                                                  int kv_head, int key, int high, direct_keys<S> &to)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const int64_t eight = 8 * p.k_stride[2] * S::ELEMENT;
    to.missing = 0;
#pragma unroll
    for (int u = 0; u < S::UNITS; u++) {
        const int64_t unit = cluster_unit(p, p.k_stride, sequence, key + u * 16, high, S::ELEMENT);
        const char *const at = from.k + unit;
        if (unit < 0)
            to.missing |= 1u << u;
        if (p.d == S::D && p.dv == S::D && unit >= 0 && key + S::KEYS <= high) {
#pragma unroll
            for (int i = 0; i < 2 * S::CHUNKS; i++)
                to.k[u][i / S::CHUNKS][i % S::CHUNKS] =
                    load_passing(at + i / S::CHUNKS * eight + i % S::CHUNKS * 64, true);
        } else {
#pragma unroll
            for (int i = 0; i < 2 * S::CHUNKS; i++)
                to.k[u][i / S::CHUNKS][i % S::CHUNKS] =
                    load_passing(at + i / S::CHUNKS * eight + i % S::CHUNKS * 64,
                                 unit >= 0 && key + u * 16 + i / S::CHUNKS * 8 + g < high &&
                                     (4 * (i % S::CHUNKS) + t) * S::VECTOR < p.d);
        }
        if constexpr (S::QUANTISED)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = key + u * 16 + h * 8 + g;
                const bool there = unit >= 0 && row < high;
                to.k_scale[u][h] = to.v_scale[u][h] = 1;
                attention_place place = {sequence, row};
                if (there && p.page) {
                    place.entry = p.block_table[sequence * p.table_stride + row / p.page];
                    place.row = row % p.page;
                }
                if (there && p.k_scale_each)
                    to.k_scale[u][h] = p.k_scale[attention_at(p.k_scale_stride, place, kv_head)];
                if (there && p.v_scale_each)
                    to.v_scale[u][h] = p.v_scale[attention_at(p.v_scale_stride, place, kv_head)];
            }
    }
}
template <class S>
__device__ __forceinline__ void cluster_load_values(const attention_params &p, const cluster_source &from,
                                                    int sequence, int key, int high, direct_keys<S> &to)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const int64_t one = p.v_stride[2] * S::ELEMENT;
#pragma unroll
    for (int u = 0; u < S::UNITS; u++) {
        const int64_t unit = cluster_unit(p, p.v_stride, sequence, key + u * 16, high, S::ELEMENT);
        const char *const at = from.v + unit;
        if (p.d == S::D && p.dv == S::D && unit >= 0 && key + S::KEYS <= high) {
#pragma unroll
            for (int i = 0; i < 4 * S::SPANS; i++)
                to.v[u][i / S::SPANS][i % S::SPANS] =
                    load_passing(at + (i / S::SPANS / 2 * 8 + i / S::SPANS % 2) * one + i % S::SPANS * 128, true);
        } else {
#pragma unroll
            for (int i = 0; i < 4 * S::SPANS; i++) {
                const int row = i / S::SPANS / 2 * 8 + i / S::SPANS % 2;
                to.v[u][i / S::SPANS][i % S::SPANS] =
                    load_passing(at + row * one + i % S::SPANS * 128,
                                 unit >= 0 && key + u * 16 + row + 2 * t < high &&
                                     (8 * (i % S::SPANS) + g) * S::VECTOR < p.dv);
            }
        }
    }
}

/* Prefetches steps of the warp. Lengths and the block table may change meanwhile: here they only say what is likely
   needed. Lanes have lines of 128 bytes; or units whose rows are one piece of memory are prefetched as such, by one
   lane: a warp's bulk prefetches are issued one by one. */
template <class S>
__device__ __forceinline__ void cluster_prefetch(const attention_params &p, int sequence, int kv_head, int high,
                                                 int worker, int workers, int steps, bool units)
{
    constexpr int ROW = S::D * S::ELEMENT, LINES = ROW / 128 > 0 ? ROW / 128 : 1;
    const int lane = (int)threadIdx.x % 32;
    units = units && p.k_stride[2] == p.d && p.v_stride[2] == p.dv;
    for (int i = 0; i < steps; i++) {
        const int first = (worker + i * workers) * S::KEYS;
        if (first >= high)
            break;
        for (int at = lane; at < (units ? S::UNITS * 2 : S::KEYS * LINES * 2); at += 32) {
            const bool is_v = at % 2;
            const int row = first + (units ? at / 2 * 16 : at / 2 / LINES), line = units ? 0 : at / 2 % LINES * 128;
            const int64_t(&stride)[3] = is_v ? p.v_stride : p.k_stride;
            if (row >= high)
                break;
            attention_place place = {sequence, row};
            if (p.page) {
                const unsigned page = (unsigned)row / (unsigned)p.page;
                place.entry = ((const volatile int32_t *)p.block_table)[sequence * p.table_stride + page];
                place.row = (int)((unsigned)row - page * (unsigned)p.page);
                if ((unsigned)place.entry >= (unsigned)p.pages)
                    continue;
            }
            const char *const to = (is_v ? p.v : p.k) + attention_at(stride, place, kv_head) * S::ELEMENT;
            if (units)
                prefetch_row(to, min(16, high - row) * ((is_v ? p.dv : p.d) * S::ELEMENT / 16));
            else if (line < (is_v ? p.dv : p.d) * S::ELEMENT)
                prefetch(to + line);
        }
    }
}
/* The warp's share of what the next kernel reads. */
template <class S>
__device__ __forceinline__ void cluster_prefetch_next(const attention_ahead &ahead)
{
    constexpr int BYTES = 2048;
    const int64_t block = (int64_t)blockIdx.y * gridDim.x + blockIdx.x, blocks = (int64_t)gridDim.x * gridDim.y;
    for (int64_t at = (block * S::THREADS + threadIdx.x) * BYTES; at + BYTES <= ahead.next_bytes;
         at += blocks * S::THREADS * BYTES)
        prefetch_row(ahead.next + at, BYTES / 16);
}

/* Zeros in place of values from key `high` on: they have no weight, and 0 times infinity were not 0. */
template <class S>
__device__ __forceinline__ void cluster_clip(direct_keys<S> &keys, int key, int high)
{
    const int t = (int)threadIdx.x % 4;
#pragma unroll
    for (int u = 0; u < S::UNITS; u++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (key + u * 16 + i / 2 * 8 + 2 * t + i % 2 >= high)
#pragma unroll
                for (int c = 0; c < S::SPANS; c++)
                    keys.v[u][i][c] = make_uint4(0, 0, 0, 0);
}
template <class S>
__device__ __forceinline__ void cluster_clip_scales(direct_keys<S> &keys, int key, int high)
{
    const int g = (int)threadIdx.x % 32 / 4;
#pragma unroll
    for (int u = 0; u < S::UNITS; u++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (key + u * 16 + h * 8 + g >= high)
                keys.k_scale[u][h] = keys.v_scale[u][h] = 1;
}

/* Four floats to the address in block `rank` that `to` has in this one; that block's barrier counts their bytes. A
   block alone has no cluster to send to: it stores them. */
__device__ __forceinline__ void cluster_send(uint32_t to, uint32_t barrier, int rank, bool alone, float4 v)
{
#if __CUDA_ARCH__ >= 900
    if (alone) {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                     : "memory");
        return;
    }
    asm volatile("{\n\t.reg .b32 there, its;\n\tmapa.shared::cluster.u32 there, %0, %2;\n\t"
                 "mapa.shared::cluster.u32 its, %1, %2;\n\t"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, "
                 "[its];\n\t}" ::"r"(to),
                 "r"(barrier), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
#else
    (void)to, (void)barrier, (void)rank, (void)alone, (void)v;
#endif
}
/* Waits for the first phase of the barrier; gives up after a long while, so that no error elsewhere hangs the GPU. */
__device__ __forceinline__ void cluster_await(uint32_t barrier)
{
#if __CUDA_ARCH__ >= 900
    for (int i = 0; i < 1 << 22; i++) {
        uint32_t done;
        asm volatile("{\n\t.reg .pred done;\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%1], 0;\n\t"
                     "selp.u32 %0, 1, 0, done;\n\t}"
                     : "=r"(done)
                     : "r"(barrier)
                     : "memory");
        if (done)
            break;
    }
#else
    (void)barrier;
#endif
}
/* The first half of a barrier that orders no memory. */
__device__ __forceinline__ void cluster_arrive_only()
{
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

/* Columns of a row belong to the blocks of the cluster in turn: PIECES / ranks pieces of four to each. Where they lie
   there: of each row and piece one of each worker, so that neighbouring threads read neighbouring pieces. `ranks` is
   a power of 2. */
template <class S>
__device__ __forceinline__ int cluster_bytes(int rows, int ranks)
{
    return ranks * S::ALONG * (rows * (S::D / 4 / ranks) * 16 + S::TILES * 64);
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
            sum[e] = r.sum[i][e];
#pragma unroll
            for (int d = 4; d < 32; d *= 2)
                sum[e] += __shfl_xor_sync(~0u, sum[e], d);
            const int row = i * 8 + 2 * t + e;
            if (row < rows)
#pragma unroll
                for (int c = 0; c < S::COLUMN_TILES; c += 2) {
                    const int piece = direct_column<S>(c) / 4, owner = piece >> shift, own = piece & (each - 1);
                    cluster_send(shared + (uint32_t)((row * each + own) * workers + worker) * 16, barrier, owner, ranks == 1,
                                 make_float4(r.out[i][c][e] * of_values, r.out[i][c][2 + e] * of_values,
                                             r.out[i][c + 1][e] * of_values, r.out[i][c + 1][2 + e] * of_values));
                }
        }
        for (int rank = g; rank < ranks; rank += 8)
            cluster_send(sums + (uint32_t)(worker * S::ROWS + i * 8 + 2 * t) * 8, barrier, rank, ranks == 1,
                         make_float4(r.top[i][0], sum[0], r.top[i][1], sum[1]));
    }
}
/* Adds up the block's columns once they are there: 2^log2 neighbouring threads have the workers of a row's piece. */
template <typename T, class S>
__device__ __forceinline__ void cluster_sum(const attention_params &p, const attention_block &b, const char *shared,
                                            uint32_t barrier, int rows, int ranks, int rank)
{
    constexpr int PIECES = S::D / 4;
    const int shift = 31 - __clz(PIECES / ranks), each = 1 << shift, pieces = rows * each, workers = ranks * S::ALONG;
    const float4 *const values = reinterpret_cast<const float4 *>(shared);
    const float2 *const sums = reinterpret_cast<const float2 *>(shared + S::ALONG * S::ROWS * S::D * 4);
    int log2 = 5;
    while (log2 > 0 && (pieces << log2 > S::THREADS || 1 << log2 > workers))
        log2--;
    const int all = ((pieces << log2) + 31) / 32 * 32, lanes = 1 << log2; /* whole warps */
    if (ranks == 1)
        __syncthreads();
    for (int at = (int)threadIdx.x; at < all; at += S::THREADS) {
        const int index = min(at >> log2, pieces - 1), row = index >> shift;
        const int piece = rank * each + (index & (each - 1)), lane = at & (lanes - 1);
        attention_target to;
        const bool there = at >> log2 < pieces && piece * 4 < p.dv && lane == 0 && attention_target_of(p, b, row, to);
        if (ranks > 1)
            cluster_await(barrier);
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
        if (!there)
            continue;
        const attention_total total = attention_finish(top, sum, attention_sink<T>(p, to.head));
        uint2 packed_four;
        packed_four.x = pack_two<T>(value[0] * total.inverse, value[1] * total.inverse);
        packed_four.y = pack_two<T>(value[2] * total.inverse, value[3] * total.inverse);
        *reinterpret_cast<uint2 *>((T *)p.out + to.out + piece * 4) = packed_four;
        if (p.lse && piece == 0)
            p.lse[to.lse] = total.lse;
    }
}

/* q as a warp's rows have it: in shared memory where registers are few. */
template <class S>
__device__ __forceinline__ void cluster_q(direct_rows<S> &r, const uint4 *from)
{
#pragma unroll
    for (int i = 0; i < S::TILES; i++)
#pragma unroll
        for (int c = 0; c < S::CHUNKS * S::VECTOR / 8; c++) {
            uint4 &v = r.q[i][c];
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "r"(shared_address(from + (i * S::CHUNKS * S::VECTOR / 8 + c) * 32 + threadIdx.x % 32)));
        }
}

/* Blocks: the parts of the keys, which are a cluster's if p.clustered; blockIdx.y has the sequence and the head of k.
   All rows of a sequence and head are in one tile. */
template <typename T, class S, int BLOCKS>
__global__ void __launch_bounds__(S::THREADS, BLOCKS)
    attention_cluster(const __grid_constant__ attention_params p, const __grid_constant__ attention_ahead ahead)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    constexpr bool Q_SHARED = S::THREADS * BLOCKS >= 512; /* 128 registers */
    constexpr int Q_VECTORS = S::TILES * S::CHUNKS * S::VECTOR / 8;
    extern __shared__ __align__(128) char shared[];
    __shared__ uint4 q[Q_SHARED ? Q_VECTORS * 32 : 1];
    __shared__ __align__(8) uint64_t arrived;
    __shared__ cluster_held held[S::THREADS];
    __shared__ attention_block b; /* the same for all threads: not in registers, of which a warp needs all */
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int rank = (int)blockIdx.x, worker = warp * p.parts + rank, workers = p.parts * S::ALONG;
    const bool at_zero = !p.k_offsets && !p.window; /* the first key is key 0, whatever the length */
    const bool together = p.clustered || p.parts == 1;
    const uint32_t barrier = shared_address(&arrived);
    pdl_launch_next();
    if (together && threadIdx.x == 0) {
        bulk_barrier(barrier);
        bulk_ready();
        bulk_expect(barrier, (uint32_t)cluster_bytes<S>(p.m * p.group, p.parts));
    }
    cluster_arrive_only(); /* once all have arrived, their barriers are there */
    direct_rows<S> r;
    direct_keys<S> keys;
    bool loaded = false;
    attention_block own;
    own.kv_head = (int)blockIdx.y % p.kv_heads, own.sequence = (int)blockIdx.y / p.kv_heads;
    own.first = 0, own.rows = p.m * p.group;
    own.s = {own.sequence, 0, p.m, own.sequence, 0, p.n};
    int likely = p.n;
    if (p.lengths)
        likely = between(((const volatile int32_t *)p.lengths)[own.sequence], 0, p.n);
    if (at_zero) {
        cluster_prefetch<S>(p, own.sequence, own.kv_head, likely, worker, workers, ahead.steps, ahead.units);
        loaded = ahead.early && worker * S::KEYS < likely;
    }
    /* Addresses are computed before the wait: what comes after it, other kernels wait for. */
    cluster_held &mine = held[threadIdx.x];
    mine.put(cluster_source_of<S>(p, own.s, own.kv_head));
#    pragma unroll
    for (int i = 0; i < S::TILES; i++) {
        const int row = min(i * 8 + lane / 4, own.rows - 1), query = row / p.group;
        const int64_t head = own.kv_head * p.group + row % p.group;
        const char *const at = p.q + (own.sequence * p.q_stride[0] + head * p.q_stride[1] + query * p.q_stride[2] +
                                      lane % 4 * S::VECTOR) *
                                         2;
        *(const char *volatile *)&mine.q[i] = at;
    }
    pdl_wait();
    int length = p.n; /* used only after the first loads */
    if (p.lengths)
        asm volatile("ld.global.s32 %0, [%1];" : "=r"(length) : "l"(p.lengths + own.sequence) : "memory");
    cluster_source from = mine.get();
    const char *q_at[S::TILES];
#    pragma unroll
    for (int i = 0; i < S::TILES; i++)
        q_at[i] = *(const char *volatile *)&mine.q[i];
    if (loaded)
        cluster_load_keys<S>(p, from, own.sequence, own.kv_head, worker * S::KEYS, p.n, keys);
    if (!Q_SHARED || warp == 0) {
#    pragma unroll
        for (int i = 0; i < S::TILES; i++)
#    pragma unroll
            for (int c = 0; c < Q_VECTORS / S::TILES; c++) {
                constexpr int EACH = S::VECTOR / 8; /* vectors of q for one of k */
                const int column = c / EACH * 4 * S::VECTOR + c % EACH * 8;
                r.q[i][c] = load_passing(q_at[i] + column * 2, i * 8 + lane / 4 < own.rows &&
                                                                   column + lane % 4 * S::VECTOR < p.d);
            }
    }
    if (loaded)
        cluster_load_values<S>(p, from, own.sequence, worker * S::KEYS, p.n, keys);
    if (!Q_SHARED || warp == 0) {
#    pragma unroll
        for (int i = 0; i < Q_VECTORS; i++) {
            uint4 &v = r.q[i / (Q_VECTORS / S::TILES)][i % (Q_VECTORS / S::TILES)];
            v = weight_order<S::FORMAT>(v);
            if constexpr (Q_SHARED)
                q[i * 32 + lane] = v;
        }
    }
    r.clear();
    attention_sequence s = own.s;
    if (at_zero)
        s.n = between(length, 0, p.n);
    else
        s = attention_sequence_of(p, own.sequence);
    own.s = s;
    own.high = attention_high(p, s, p.m - 1);
    const int low = attention_low(p, s, 0), begin = low / S::KEYS * S::KEYS;
    const int steps = own.high > begin ? (own.high - begin + S::KEYS - 1) / S::KEYS : 0;
    /* The keys that all rows see, before the mask. */
    const int inner_low = attention_low(p, s, p.m - 1), inner_high = attention_high(p, s, 0);
    if (threadIdx.x == 0)
        b = own;
    __syncthreads();
    if (!at_zero) {
        from = cluster_source_of<S>(p, s, own.kv_head);
        mine.put(from);
    }
    const float scale = S::QUANTISED && !p.k_scale_each ? p.scale * *p.k_scale : p.scale;
    const bool plain = p.softcap == 0 && !p.mask_kind;
    if (!loaded && worker < steps) {
        cluster_load_keys<S>(p, from, b.sequence, b.kv_head, begin + worker * S::KEYS, b.high, keys);
        cluster_load_values<S>(p, from, b.sequence, begin + worker * S::KEYS, b.high, keys);
    }
    if (worker >= steps && ahead.next_bytes)
        cluster_prefetch_next<S>(ahead);
    for (int step = worker; step < steps; step += workers) {
        const int key = begin + step * S::KEYS, next = key + workers * S::KEYS;
        const bool more = step + workers < steps, edge = key + S::KEYS > b.high;
        float score[S::UNITS][S::TILES][4], v_scale[S::QUANTISED ? S::UNITS : 1][2];
        if (!more && ahead.next_bytes)
            cluster_prefetch_next<S>(ahead);
        if constexpr (Q_SHARED)
            cluster_q<S>(r, q);
        if (direct_rare<S>(keys.k))
            direct_scores<T, S, true>(keys, r, score);
        else
            direct_scores<T, S, false>(keys, r, score);
        const unsigned missing = keys.missing;
        if constexpr (S::QUANTISED) {
            if (edge)
                cluster_clip_scales<S>(keys, key, b.high);
#    pragma unroll
            for (int u = 0; u < S::UNITS; u++)
#    pragma unroll
                for (int e = 0; e < 4; e++) {
                    score[u][0][e] *= keys.k_scale[u][e / 2];
                    if constexpr (S::TILES > 1)
                        score[u][1][e] *= keys.k_scale[u][e / 2];
                    v_scale[u][e / 2] = keys.v_scale[u][e / 2];
                }
        }
        if (!plain || missing || key < inner_low || key + S::KEYS > inner_high) {
            direct_edge<T, S>(p, b, key, missing, scale, score);
        } else {
#    pragma unroll
            for (int u = 0; u < S::UNITS; u++)
#    pragma unroll
                for (int i = 0; i < S::TILES; i++)
#    pragma unroll
                    for (int e = 0; e < 4; e++)
                        score[u][i][e] *= scale;
        }
        if (more)
            cluster_load_keys<S>(p, Q_SHARED ? mine.get() : from, b.sequence, b.kv_head, next, b.high, keys);
        direct_weigh<S>(r, score);
        if constexpr (S::QUANTISED)
            if (p.v_scale_each)
                direct_scale_weights<S>(v_scale, r, score);
        if (edge)
            cluster_clip<S>(keys, key, b.high);
        if (direct_rare<S>(keys.v))
            direct_values<T, S, true>(keys, score, r);
        else
            direct_values<T, S, false>(keys, score, r);
        if (more)
            cluster_load_values<S>(p, Q_SHARED ? mine.get() : from, b.sequence, next, b.high, keys);
    }

    const float of_values = !S::QUANTISED ? 1 : p.v_scale_each ? r.unit : *p.v_scale;
    cluster_wait();
    if (together) {
        cluster_push<S>(r, of_values, shared_address(shared), barrier, b.rows, p.parts, worker);
        cluster_sum<T, S>(p, b, shared, barrier, b.rows, p.parts, rank);
        return;
    }
    if constexpr (S::ROWS * S::D / 4 % S::THREADS == 0) {
        const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
        float *const parts = reinterpret_cast<float *>(shared);
#    pragma unroll
        for (int i = 0; i < S::TILES; i++)
#    pragma unroll
            for (int e = 0; e < 2; e++) {
                float sum = r.sum[i][e];
#    pragma unroll
                for (int d = 4; d < 32; d *= 2)
                    sum += __shfl_xor_sync(~0u, sum, d);
                float *const row = parts + (warp * S::ROWS + i * 8 + 2 * t + e) * S::MERGE_PITCH;
#    pragma unroll
                for (int c = 0; c < S::COLUMN_TILES; c++)
                    *reinterpret_cast<float2 *>(row + direct_column<S>(c)) =
                        make_float2(r.out[i][c][e] * of_values, r.out[i][c][2 + e] * of_values);
                if (g == 0)
                    row[S::D] = r.top[i][e], row[S::D + 1] = sum;
            }
        __syncthreads();
        attention_merge<T, S>(p, b, parts, rank);
    }
#endif
}

#endif
