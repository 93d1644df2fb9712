/* attention_tile.cuh - attention of 16-bit elements on tensor cores.

   A block has some rows of one sequence and one head of k: row r is query r / group of head r % group among the heads
   that share it, so that they share its reads. Keys and values pass through stages in shared memory, KEYS at a time.
   Warps have rows of their own (ACROSS of them) and, where there are few rows, keys of their own (ALONG of them).
   Where there are few blocks, several have a part of the keys each: those of a cluster, or any number of blocks,
   which leave their parts in scratch for attention_combine. Parts are merged in a fixed order, by the maximum and the
   sum of each. */
#ifndef ADZE_CUDA_ATTENTION_TILE_CUH
#define ADZE_CUDA_ATTENTION_TILE_CUH

#include "attention_step.cuh"
#include "cluster.cuh"

/* The four columns that a lane has of a chunk of 16, as two pairs: where they begin, and their values. */
template <class S>
__device__ __forceinline__ int attention_column(int chunk, int pair)
{
    const int t = (int)threadIdx.x % 4;
    return chunk * 16 + (S::QUANTISED ? 4 * t + 2 * pair : 8 * pair + 2 * t);
}
template <class S>
__device__ __forceinline__ float2 attention_pair(const attention_rows<S> &r, int f, int half, int chunk, int pair)
{
    const float(&even)[4] = r.out[f][2 * chunk], (&odd)[4] = r.out[f][2 * chunk + 1];
    if constexpr (S::QUANTISED)
        return make_float2(even[2 * half + pair], odd[2 * half + pair]);
    return pair ? make_float2(odd[2 * half], odd[2 * half + 1]) : make_float2(even[2 * half], even[2 * half + 1]);
}

/* Where a row of the block goes; false where the sequence has no such row. */
struct attention_target {
    int64_t out, lse, row; /* row: of out, counted from its first */
    int head;
};
__device__ __forceinline__ bool attention_target_of(const attention_params &p, const attention_block &b, int row,
                                                    attention_target &to)
{
    const int r = b.first + row;
    if (r >= b.rows)
        return false;
    const int64_t query = b.s.first + r / p.group;
    to.head = b.kv_head * p.group + r % p.group;
    to.out = b.s.batch * p.out_stride[0] + to.head * p.out_stride[1] + query * p.out_stride[2];
    to.lse = b.s.batch * p.lse_stride[0] + to.head * p.lse_stride[1] + query * p.lse_stride[2];
    to.row = ((int64_t)b.s.batch * p.heads + to.head) * p.m + query;
    return true;
}
/* Stores four elements of out from `at` on, or as many as the row still has. ANYWHERE: a row may end within four, and
   lie at any address. */
template <bool ANYWHERE, typename T>
__device__ __forceinline__ void attention_store_four(const attention_params &p, int64_t at, int left, float4 v)
{
    if constexpr (std::is_same<T, mixed>::value) {
        if (p.q_dtype == ADZE_F32)
            attention_store_four<ANYWHERE, float>(p, at, left, v);
        else if (p.q_dtype == ADZE_F16)
            attention_store_four<ANYWHERE, f16>(p, at, left, v);
        else
            attention_store_four<ANYWHERE, bf16>(p, at, left, v);
    } else {
        T *const to = (T *)p.out + at;
        if (!ANYWHERE || (left >= 4 && (uintptr_t)to % (4 * sizeof(T)) == 0)) {
            if constexpr (sizeof(T) == 2)
                *reinterpret_cast<uint2 *>(to) = make_uint2(pack_two<T>(v.x, v.y), pack_two<T>(v.z, v.w));
            else
                *reinterpret_cast<float4 *>(to) = v;
            return;
        }
        const float value[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < left)
                to[i] = from_float<T>(value[i]);
    }
}
/* Stores columns 4 piece to 4 piece + 3 of a row, from its maximum, its sum and the sums of its values. */
template <typename T, bool ANYWHERE = false>
__device__ __forceinline__ void attention_store(const attention_params &p, const attention_target &to, int piece,
                                                float top, float sum, const float (&value)[4])
{
    const attention_total total = attention_finish(top, sum, attention_sink<T>(p, to.head));
    attention_store_four<ANYWHERE, T>(p, to.out + piece * 4, p.dv - piece * 4,
                                      make_float4(value[0] * total.inverse, value[1] * total.inverse,
                                                  value[2] * total.inverse, value[3] * total.inverse));
    if (p.lse && piece == 0)
        p.lse[to.lse] = total.lse;
}

/* Rows that one warp has alone go from its registers to memory. */
template <typename T, class S>
__device__ __forceinline__ void attention_store(const attention_params &p, const attention_block &b, int warp_row,
                                                attention_rows<S> &r)
{
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            attention_target to;
            if (!attention_target_of(p, b, warp_row + f * 16 + half * 8 + g, to))
                continue;
            const attention_total total =
                attention_finish(r.top[f][half], r.sum[f][half], attention_sink<T>(p, to.head));
#pragma unroll
            for (int c = 0; c < attention_rows<S>::CHUNKS; c++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int column = attention_column<S>(c, h);
                    const float2 v = attention_pair<S>(r, f, half, c, h);
                    if (column < p.dv)
                        *reinterpret_cast<uint32_t *>((T *)p.out + to.out + column) =
                            pack_two<T>(v.x * total.inverse, v.y * total.inverse);
                }
            if (p.lse && t == 0)
                p.lse[to.lse] = total.lse;
        }
}

/* A warp's part of its rows into shared memory: of each a row of floats, its maximum and its sum. */
template <class S>
__device__ __forceinline__ void attention_put(float *parts, int warp_row, int along, const attention_rows<S> &r)
{
    constexpr int PITCH = S::MERGE_PITCH, PART = S::ROWS * PITCH;
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *row = parts + along * PART + (warp_row + f * 16 + half * 8 + g) * PITCH;
#pragma unroll
            for (int c = 0; c < attention_rows<S>::CHUNKS; c++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    *reinterpret_cast<float2 *>(row + attention_column<S>(c, h)) =
                        attention_pair<S>(r, f, half, c, h);
            if (t == 0)
                row[S::D] = r.top[f][half], row[S::D + 1] = r.sum[f][half];
        }
}

/* Rows of which several warps, or several blocks, have a part, the warps' in shared memory. The parts of a block are
   added up by the block, those of a cluster by the block whose turn a piece of a row is; other blocks leave theirs in
   scratch. */
template <typename T, class S>
__device__ __forceinline__ void attention_merge(const attention_params &p, const attention_block &b, float *parts,
                                                int rank)
{
    constexpr int PITCH = S::MERGE_PITCH, PART = S::ROWS * PITCH;
    constexpr int PIECES = S::D / 4, ALL = S::ROWS * PIECES;
    if constexpr (S::ALONG > 1) {
        /* All pieces are read before the first is written: the sums lie among them. */
        constexpr int EACH = (ALL + S::THREADS - 1) / S::THREADS;
        constexpr bool EVEN = ALL % S::THREADS == 0;
        float4 value[EACH];
        float top[EACH], sum[EACH];
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            const int at = (int)threadIdx.x + n * S::THREADS, row = at / PIECES, piece = at % PIECES;
            const float *from = parts + row * PITCH;
            if (!EVEN && at >= ALL)
                break;
            top[n] = -INFINITY, sum[n] = 0;
            value[n] = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int w = 0; w < S::ALONG; w++)
                top[n] = fmaxf(top[n], from[w * PART + S::D]);
            const float base = top[n] == -INFINITY ? 0 : top[n];
#pragma unroll
            for (int w = 0; w < S::ALONG; w++) {
                const float weight = power_of_2(from[w * PART + S::D] - base);
                const float4 v = *reinterpret_cast<const float4 *>(from + w * PART + piece * 4);
                sum[n] += from[w * PART + S::D + 1] * weight;
                value[n].x += v.x * weight, value[n].y += v.y * weight;
                value[n].z += v.z * weight, value[n].w += v.w * weight;
            }
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            const int at = (int)threadIdx.x + n * S::THREADS, row = at / PIECES, piece = at % PIECES;
            if (!EVEN && at >= ALL)
                break;
            *reinterpret_cast<float4 *>(parts + row * PITCH + piece * 4) = value[n];
            if (piece == 0)
                parts[row * PITCH + S::D] = top[n], parts[row * PITCH + S::D + 1] = sum[n];
        }
        __syncthreads();
    }
    const int ranks = p.clustered ? p.parts : 1;
    if (ranks > 1) {
        cluster_arrive();
        cluster_wait();
    }
    for (int at = (int)threadIdx.x + (ranks > 1 ? rank : 0) * S::THREADS; at < ALL; at += ranks * S::THREADS) {
        const int row = at / PIECES, piece = at % PIECES;
        const float *from = parts + row * PITCH;
        attention_target to;
        if (piece * 4 >= p.dv || !attention_target_of(p, b, row, to))
            continue;
        float top = -INFINITY, sum = 0, value[4] = {0, 0, 0, 0};
        if (ranks == 1) {
            top = from[S::D], sum = from[S::D + 1];
#pragma unroll
            for (int e = 0; e < 4; e++)
                value[e] = from[piece * 4 + e];
        } else {
            float tops[CLUSTER_MAX], sums[CLUSTER_MAX]; /* all loads are under way at once */
            float4 values[CLUSTER_MAX];
#pragma unroll
            for (int w = 0; w < CLUSTER_MAX; w++) {
                const int of = w < ranks ? w : rank;
                tops[w] = cluster_load(from + S::D, of), sums[w] = cluster_load(from + S::D + 1, of);
                values[w] = cluster_load4(from + piece * 4, of);
            }
#pragma unroll
            for (int w = 0; w < CLUSTER_MAX; w++)
                top = w < ranks ? fmaxf(top, tops[w]) : top;
            const float base = top == -INFINITY ? 0 : top;
#pragma unroll
            for (int w = 0; w < CLUSTER_MAX; w++)
                if (w < ranks) {
                    const float weight = power_of_2(tops[w] - base);
                    sum += sums[w] * weight;
                    value[0] += values[w].x * weight, value[1] += values[w].y * weight;
                    value[2] += values[w].z * weight, value[3] += values[w].w * weight;
                }
        }
        if (p.parts > ranks) {
            const int64_t to_part = to.row * p.parts + rank;
            *reinterpret_cast<float4 *>(p.part_values + to_part * attention_part_pitch(p) + piece * 4) =
                make_float4(value[0], value[1], value[2], value[3]);
            if (piece == 0)
                p.part_sums[to_part] = make_float2(top, sum);
            continue;
        }
        attention_store<T, S::ANYWHERE>(p, to, piece, top, sum, value);
    }
    if (ranks > 1) { /* a block's shared memory may be read until here */
        cluster_arrive();
        cluster_wait();
    }
}

/* Queries of q that no sequence has are 0 in out. The block looks for them among as many rows as it has. */
template <typename T, class S>
__device__ __forceinline__ void attention_clear(const attention_params &p, int tile, int kv_head)
{
    const int begin = p.q_offsets[0], end = p.q_offsets[p.sequences];
    for (int at = (int)threadIdx.x; at < S::ROWS * S::D; at += S::THREADS) {
        const int64_t r = (int64_t)tile * S::ROWS + at / S::D, query = r / p.group;
        const int column = at % S::D;
        const int64_t head = kv_head * p.group + r % p.group;
        if (query >= p.m || (query >= begin && query < end))
            continue;
        if (column < p.dv)
            attention_store_four<true, T>(p, head * p.out_stride[1] + query * p.out_stride[2] + column, 1,
                                          make_float4(0, 0, 0, 0));
        if (column == 0 && p.lse)
            p.lse[head * p.lse_stride[1] + query * p.lse_stride[2]] = -INFINITY;
    }
}

/* Finds the sequence that has tile `at` of those of all sequences, one after the other, and which of its tiles that
   is. Sequences are looked at 32 at a time, one in each lane. */
template <class S>
__device__ __forceinline__ bool attention_find(const attention_params &p, int at, int &sequence, int &tile)
{
    const int lane = (int)threadIdx.x % 32;
    for (int first = 0; first < p.sequences; first += 32) {
        int tiles = 0;
        if (first + lane < p.sequences) {
            const int begin = between(p.q_offsets[first + lane], 0, p.m);
            tiles = ((between(p.q_offsets[first + lane + 1], begin, p.m) - begin) * p.group + S::ROWS - 1) / S::ROWS;
        }
        int up_to = tiles;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int before = __shfl_up_sync(~0u, up_to, d);
            up_to += lane >= d ? before : 0;
        }
        const unsigned after = __ballot_sync(~0u, at < up_to);
        if (after) {
            const int of = __ffs((int)after) - 1;
            sequence = first + of;
            tile = at - __shfl_sync(~0u, up_to - tiles, of);
            return true;
        }
        at -= __shfl_sync(~0u, up_to, 31);
    }
    return false;
}

/* Prefetches the first keys of a part into L2, while the kernel before may still run: where it is known which. Those
   of causal tiles begin with the same keys unless they are in parts; of 16-bit elements they are left out. */
template <class S>
__device__ __forceinline__ void attention_prefetch(const attention_params &p, int sequence, int kv_head, int rank)
{
    constexpr bool FLOATS = S::ELEMENT == 4;
    if ((S::ALONG == 1 && !FLOATS) || p.page || p.lengths || p.k_offsets || p.q_offsets || p.window ||
        (p.causal && p.m > 1 && (!FLOATS || p.parts > 1)))
        return;
    const int steps = (p.n + S::KEYS - 1) / S::KEYS, first = (int)((int64_t)steps * rank / p.parts) * S::KEYS;
    for (int row = (int)threadIdx.x; row < (S::STAGES - 1) * S::KEYS && first + row < p.n; row += S::THREADS) {
        const attention_place at = {sequence, first + row};
        prefetch_row(p.k + attention_at(p.k_stride, at, kv_head) * S::ELEMENT, p.d * S::ELEMENT / 16);
        prefetch_row(p.v + attention_at(p.v_stride, at, kv_head) * S::ELEMENT, p.dv * S::ELEMENT / 16);
    }
}

/* What the warp's rows see. */
template <class S>
__device__ __forceinline__ attention_warp attention_warp_of(const attention_params &p, const attention_block &b,
                                                            int row, int key)
{
    attention_warp w = {row, key, 0, 0, 0, 0, p.scale};
    if (S::QUANTISED && !p.k_scale_each)
        w.scale *= *p.k_scale;
    const int first = b.first + row, last = min(first + 16 * S::FRAGMENTS, b.rows) - 1;
    if (last < first)
        return w; /* nothing: there are no such rows */
    w.low = attention_low(p, b.s, first / p.group), w.high = attention_high(p, b.s, last / p.group);
    w.inner_low = attention_low(p, b.s, last / p.group), w.inner_high = attention_high(p, b.s, first / p.group);
    return w;
}

/* Blocks: the parts of the keys, then tiles of rows, the last first where they see most keys; blockIdx.y has the
   sequence and the head of k, or with q_offsets the head alone. */
template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) attention_tile(const __grid_constant__ attention_params p)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* older GPUs are never given it: adze_cuda_tensor_cores() */
    extern __shared__ __align__(128) char shared[];
    __shared__ attention_block b; /* the same for all threads: not in registers, of which a warp needs all */
    const uint32_t q = shared_address(shared), stages = q + S::Q_BYTES;
    attention_place *const places = reinterpret_cast<attention_place *>(shared + S::HOLDS);
    const int warp = (int)threadIdx.x / 32, along = warp / S::ACROSS;
    const int rank = (int)blockIdx.x % p.parts, at = (int)blockIdx.x / p.parts;
    attention_block own;
    own.kv_head = (int)blockIdx.y % p.kv_heads, own.sequence = (int)blockIdx.y / p.kv_heads;
    pdl_launch_next();
    attention_prefetch<S>(p, own.sequence, own.kv_head, rank);
    pdl_wait();
    int tile = p.causal ? (int)gridDim.x / p.parts - 1 - at : at;
    if (p.q_offsets) {
        if (rank == 0)
            attention_clear<T, S>(p, at, own.kv_head);
        if (!attention_find<S>(p, at, own.sequence, tile)) /* in all blocks of the cluster */
            return;
    }
    own.s = attention_sequence_of(p, own.sequence);
    own.rows = own.s.m * p.group;
    own.first = tile * S::ROWS;
    const int last_row = min(own.first + S::ROWS, own.rows) - 1;
    const int low = attention_low(p, own.s, own.first / p.group);
    own.high = attention_high(p, own.s, last_row / p.group);
    if (threadIdx.x == 0)
        b = own;
    __syncthreads();
    const int begin = low / S::KEYS * S::KEYS,
              all = own.high > begin ? (own.high - begin + S::KEYS - 1) / S::KEYS : 0;
    const int before = (int)((int64_t)all * rank / p.parts);
    const int steps = (int)((int64_t)all * (rank + 1) / p.parts) - before, key = begin + before * S::KEYS;
    const attention_warp w = attention_warp_of<S>(p, own, warp % S::ACROSS * 16 * S::FRAGMENTS, along * S::WARP_KEYS);
    const attention_source from = attention_source_of<S>(p, own);
    attention_rows<S> r;
    r.clear();
    attention_load_q<S>(p, own, q);
    copy_commit();
    if (p.page) {
#    pragma unroll
        for (int i = 0; i < S::STAGES; i++)
            attention_look_up<S>(p, b, key + i * S::KEYS, places + i * S::KEYS);
        __syncthreads();
    }
#    pragma unroll
    for (int i = 0; i < S::STAGES - 1; i++) {
        if (i < steps)
            attention_load_keys<S>(p, b, from, key + i * S::KEYS, stages + (uint32_t)(i * S::STAGE_BYTES),
                                   places + i * S::KEYS);
        copy_commit();
    }
    if constexpr (S::QUANTISED || attention_rows<S>::HELD) {
        copy_wait<S::STAGES - 1>();
        __syncthreads();
        if constexpr (S::QUANTISED) {
            attention_order_q<S>(shared);
            __syncthreads();
        }
        if constexpr (attention_rows<S>::HELD)
#    pragma unroll
            for (int c = 0; c < attention_rows<S>::CHUNKS; c++)
                load_matrices(r.q[c], attention_q_at<S>(q, w.row) + (uint32_t)(c * 32));
    }
    /* Step i is in stage i % STAGES, and its places in slot i % PLACES. Copies are STAGES - 1 steps ahead, places one
       more: what a warp overwrites, all have read before the barrier. */
    int stage = 0, slot = 0;
    for (int i = 0; i < steps; i++) {
        copy_wait<S::STAGES - 2>();
        __syncthreads();
        const int next = stage == 0 ? S::STAGES - 1 : stage - 1;
        const int next_slot = slot + S::STAGES - 1 < S::PLACES ? slot + S::STAGES - 1 : slot - 2;
        if (i + S::STAGES - 1 < steps)
            attention_load_keys<S>(p, b, from, key + (i + S::STAGES - 1) * S::KEYS,
                                   stages + (uint32_t)(next * S::STAGE_BYTES), places + next_slot * S::KEYS);
        copy_commit();
        if (p.page && i + S::STAGES < steps)
            attention_look_up<S>(p, b, key + (i + S::STAGES) * S::KEYS,
                                 places + (slot == 0 ? S::PLACES - 1 : slot - 1) * S::KEYS);
        const int warp_key = key + i * S::KEYS + w.key;
        const uint32_t at_stage = (uint32_t)(stage * S::STAGE_BYTES);
        if (warp_key < w.high && warp_key + S::WARP_KEYS > w.low)
            attention_step<T, S>(p, b, w, q, stages + at_stage,
                                 reinterpret_cast<const float *>(shared + S::Q_BYTES + at_stage + S::SCALES),
                                 places + slot * S::KEYS, warp_key, r);
        stage = stage + 1 < S::STAGES ? stage + 1 : 0;
        slot = slot + 1 < S::PLACES ? slot + 1 : 0;
    }
    copy_wait<0>();
#    pragma unroll
    for (int f = 0; f < S::FRAGMENTS; f++)
#    pragma unroll
        for (int half = 0; half < 2; half++) {
            r.sum[f][half] += __shfl_xor_sync(~0u, r.sum[f][half], 1);
            r.sum[f][half] += __shfl_xor_sync(~0u, r.sum[f][half], 2);
        }
    if constexpr (S::QUANTISED)
        r.multiply(p.v_scale_each ? r.unit : *p.v_scale);
    if (S::ALONG == 1 && p.parts == 1) {
        attention_store<T, S>(p, b, w.row, r);
        return;
    }
    __syncthreads();
    attention_put<S>(reinterpret_cast<float *>(shared), w.row, along, r);
    __syncthreads();
    attention_merge<T, S>(p, b, reinterpret_cast<float *>(shared), rank);
#endif
}

/* Merges the parts that blocks left in scratch, of rows of up to COLUMNS elements. A block has a row of out, and its
   warps take the parts in turn, AHEAD of them at a time: their first loads do not wait for the sums. */
enum { COMBINE_THREADS = 128, COMBINE_COLUMNS = 256 };
template <typename T, int COLUMNS>
__global__ void __launch_bounds__(COMBINE_THREADS) attention_combine(const __grid_constant__ attention_params p)
{
    constexpr int WARPS = COMBINE_THREADS / 32, EACH = COLUMNS / 4 / 32, AHEAD = 4;
    static_assert(COLUMNS / 4 <= COMBINE_THREADS, "");
    __shared__ float4 values[WARPS][COLUMNS / 4];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int64_t row = blockIdx.x, query = row % p.m, head = row / p.m % p.heads, entry = row / p.m / p.heads;
    pdl_launch_next();
    pdl_wait();
    if (p.q_offsets && (query < p.q_offsets[0] || query >= p.q_offsets[p.sequences]))
        return;
    const float2 none = make_float2(-INFINITY, 0), *const sums = p.part_sums + row * p.parts;
    const float2 first = lane < p.parts ? sums[lane] : none, second = lane + 32 < p.parts ? sums[lane + 32] : none;
    float4 loaded[AHEAD][EACH];
    auto load = [&](int from) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
#pragma unroll
            for (int c = 0; c < EACH; c++)
                if (from + a * WARPS < p.parts && (lane + c * 32) * 4 < p.dv)
                    loaded[a][c] = reinterpret_cast<const float4 *>(
                        p.part_values + (row * p.parts + from + a * WARPS) * attention_part_pitch(p))[lane + c * 32];
                else
                    loaded[a][c] = make_float4(0, 0, 0, 0);
    };
    load(warp);
    float top = fmaxf(first.x, second.x);
#pragma unroll
    for (int d = 16; d; d /= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const float base = top == -INFINITY ? 0 : top;
    const float weight[2] = {power_of_2(first.x - base), power_of_2(second.x - base)};
    float sum = first.y * weight[0] + second.y * weight[1];
#pragma unroll
    for (int d = 16; d; d /= 2)
        sum += __shfl_xor_sync(~0u, sum, d);
    float4 value[EACH] = {};
    for (int from = warp; from < p.parts; from += AHEAD * WARPS) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int part = from + a * WARPS;
            const float of_first = __shfl_sync(~0u, weight[0], part % 32);
            const float of_second = __shfl_sync(~0u, weight[1], part % 32);
            if (part >= p.parts)
                break;
            const float by = part < 32 ? of_first : of_second;
#pragma unroll
            for (int c = 0; c < EACH; c++) {
                const float4 v = loaded[a][c];
                value[c].x += v.x * by, value[c].y += v.y * by, value[c].z += v.z * by, value[c].w += v.w * by;
            }
        }
        load(from + AHEAD * WARPS);
    }
#pragma unroll
    for (int c = 0; c < EACH; c++)
        values[warp][lane + c * 32] = value[c];
    __syncthreads();
    const attention_total total = attention_finish(top, sum, attention_sink<T>(p, (int)head));
    if ((int)threadIdx.x * 4 < p.dv) {
        float4 v = values[0][threadIdx.x];
#pragma unroll
        for (int from = 1; from < WARPS; from++) {
            const float4 x = values[from][threadIdx.x];
            v.x += x.x, v.y += x.y, v.z += x.z, v.w += x.w;
        }
        const int64_t to = entry * p.out_stride[0] + head * p.out_stride[1] + query * p.out_stride[2];
        attention_store_four<true, T>(
            p, to + threadIdx.x * 4, p.dv - (int)threadIdx.x * 4,
            make_float4(v.x * total.inverse, v.y * total.inverse, v.z * total.inverse, v.w * total.inverse));
    }
    if (p.lse && threadIdx.x == 0)
        p.lse[entry * p.lse_stride[0] + head * p.lse_stride[1] + query * p.lse_stride[2]] = total.lse;
}

#endif
