/* attention_tile.cuh - attention of 16-bit elements on tensor cores.

   A block has some rows of one sequence and one head of k: row r is query r / group of head r % group among the heads
   that share it, so that they share its reads. Keys and values pass through stages in shared memory, KEYS at a time.
   Warps have rows of their own (ACROSS of them) and, where there are few rows, keys of their own (ALONG of them).
   Where there are few blocks, those of a cluster have a part of the keys each. Parts are merged in a fixed order, by
   the maximum and the sum of each. */
#ifndef ADZE_CUDA_ATTENTION_TILE_CUH
#define ADZE_CUDA_ATTENTION_TILE_CUH

#include "attention_call.cuh"
#include "cluster.cuh"
#include "mma.cuh"

/* Rows of q, k and v have up to D elements, and 16 bytes more in shared memory: 8 rows are then in different banks. */
template <int D_, int FRAGMENTS_, int ACROSS_, int ALONG_, int KEYS_, int STAGES_>
struct attention_shape {
    static constexpr int D = D_, FRAGMENTS = FRAGMENTS_, ACROSS = ACROSS_, ALONG = ALONG_, KEYS = KEYS_;
    static constexpr int STAGES = STAGES_, ROWS = 16 * FRAGMENTS * ACROSS, THREADS = 32 * ACROSS * ALONG;
    static constexpr int WARP_KEYS = KEYS / ALONG, PITCH = D * 2 + 16;
    static constexpr int STAGE_BYTES = 2 * KEYS * PITCH, Q_BYTES = ROWS * PITCH;
    static constexpr int BLOCKS = THREADS > 128 || D > 128 ? 1 : 2; /* on a multiprocessor: bounds the registers */
    static constexpr int HIDDEN = Q_BYTES + STAGES * STAGE_BYTES, SHARED = HIDDEN + STAGES * KEYS;
    /* Merging takes the place of q and the stages: a row of floats, then its maximum and its sum. */
    static constexpr int MERGE_PITCH = D + 4, MERGE_BYTES = ALONG * ROWS * MERGE_PITCH * 4;
    static_assert(WARP_KEYS % 16 == 0 && MERGE_BYTES <= HIDDEN, "");
};

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t at)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
#else
    (void)r, (void)at;
#endif
}
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t at)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
#else
    (void)r, (void)at;
#endif
}
template <typename T>
__device__ __forceinline__ uint32_t pack_two(float a, float b);
template <>
__device__ __forceinline__ uint32_t pack_two<bf16>(float a, float b)
{
    const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t *>(&v);
}
template <>
__device__ __forceinline__ uint32_t pack_two<f16>(float a, float b)
{
    const __half2 v = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t *>(&v);
}

/* A warp's rows: what it has summed, and for each of a lane's rows g and g + 8 the maximum and its part of the sum. */
template <class S>
struct attention_rows {
    static constexpr int TILES = S::D / 8;
    float out[S::FRAGMENTS][TILES][4];
    float top[S::FRAGMENTS][2], sum[S::FRAGMENTS][2];
    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; f++) {
#pragma unroll
            for (int j = 0; j < TILES; j++)
                out[f][j][0] = out[f][j][1] = out[f][j][2] = out[f][j][3] = 0;
            top[f][0] = top[f][1] = -INFINITY;
            sum[f][0] = sum[f][1] = 0;
        }
    }
};

/* What a block knows of its rows. */
struct attention_block {
    attention_sequence s;
    int sequence, kv_head, first, rows; /* rows: those of the sequence, of which the block has some from `first` on */
    int low, high;                      /* keys that some row of the block sees */
    int inner_low, inner_high;          /* keys that all of them see, before the mask */
};

/* Copies q's rows, zeros where there are none. */
template <typename T, class S>
__device__ __forceinline__ void attention_load_q(const attention_params &p, const attention_block &b, uint32_t shared)
{
    constexpr int PIECES = S::D / 8;
    for (int at = (int)threadIdx.x; at < S::ROWS * PIECES; at += S::THREADS) {
        const int row = at / PIECES, piece = at % PIECES, r = b.first + row;
        const bool there = r < b.rows && piece * 8 < p.d;
        const int i = there ? r / p.group : 0, head = there ? b.kv_head * p.group + r % p.group : 0;
        const char *from = p.q + (b.s.batch * p.q_stride[0] + head * p.q_stride[1] +
                                  (int64_t)(b.s.first + i) * p.q_stride[2] + (there ? piece * 8 : 0)) *
                                     2;
        copy_async(shared + (uint32_t)(row * S::PITCH + piece * 16), from, there);
    }
}
/* Copies the keys from `key` on, and their values, into a stage. A page that does not exist has no keys to see. */
template <typename T, class S>
__device__ __forceinline__ void attention_load_keys(const attention_params &p, const attention_block &b, int key,
                                                    uint32_t stage, char *hidden)
{
    constexpr int PIECES = S::D / 8, STEP = S::THREADS / PIECES;
    static_assert(S::THREADS % PIECES == 0 || S::D == 96, "");
    for (int at = (int)threadIdx.x; at < S::KEYS * PIECES; at += S::THREADS) {
        const int row = at / PIECES, piece = at % PIECES;
        const bool in = key + row < b.high;
        const attention_place place = attention_place_of(p, b.s, b.sequence, in ? key + row : 0);
        const bool there = in && place.entry >= 0;
        const int column = piece * 8;
        const attention_place safe = there ? place : attention_place{0, 0};
        const char *k = p.k + (attention_at(p.k_stride, safe, b.kv_head) + (column < p.d ? column : 0)) * 2;
        const char *v = p.v + (attention_at(p.v_stride, safe, b.kv_head) + (column < p.dv ? column : 0)) * 2;
        const uint32_t to = stage + (uint32_t)(row * S::PITCH + piece * 16);
        copy_async(to, k, there && column < p.d);
        copy_async(to + S::KEYS * S::PITCH, v, there && column < p.dv);
        if (p.page && piece == 0)
            hidden[row] = !there;
    }
    (void)STEP;
}

/* One stage: scores, weights, and the values they weigh. `key` is the warp's first key in the sequence. */
template <typename T, class S>
__device__ __forceinline__ void attention_step(const attention_params &p, const attention_block &b, uint32_t q,
                                               uint32_t stage, const char *hidden, int warp_row, int warp_key, int key,
                                               attention_rows<S> &r)
{
    constexpr int NT = S::WARP_KEYS / 8;
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float score[S::FRAGMENTS][NT][4];
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
        for (int j = 0; j < NT; j++)
            score[f][j][0] = score[f][j][1] = score[f][j][2] = score[f][j][3] = 0;
    /* Lane 8 i + l gives the address of row l of matrix i: of q the two halves of rows, then of columns; of k the two
       halves of columns, then of keys. */
    const int l = lane % 8, i = lane / 8;
    const uint32_t q_at = q + (uint32_t)((warp_row + i % 2 * 8 + l) * S::PITCH + i / 2 * 16);
    const uint32_t k_at = stage + (uint32_t)((warp_key + i / 2 * 8 + l) * S::PITCH + i % 2 * 16);
#pragma unroll
    for (int c = 0; c < S::D / 16; c++) {
        uint32_t a[S::FRAGMENTS][4];
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; f++)
            load_matrices(a[f], q_at + (uint32_t)(f * 16 * S::PITCH + c * 32));
#pragma unroll
        for (int j = 0; j < NT / 2; j++) {
            uint32_t k[4];
            load_matrices(k, k_at + (uint32_t)(j * 16 * S::PITCH + c * 32));
#pragma unroll
            for (int f = 0; f < S::FRAGMENTS; f++) {
                mma<T>(score[f][2 * j], a[f][0], a[f][1], a[f][2], a[f][3], k[0], k[1]);
                mma<T>(score[f][2 * j + 1], a[f][0], a[f][1], a[f][2], a[f][3], k[2], k[3]);
            }
        }
    }
    const bool edge = key < b.inner_low || key + S::WARP_KEYS > b.inner_high || p.page;
    const bool plain = !p.softcap && !p.mask_kind && !edge;
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; f++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (plain) {
#pragma unroll
                for (int j = 0; j < NT; j++)
                    score[f][j][2 * half] *= p.scale, score[f][j][2 * half + 1] *= p.scale;
            } else {
                const int row = b.first + warp_row + f * 16 + half * 8 + g;
                const int query = row / p.group, head = b.kv_head * p.group + row % p.group;
                const bool real = row < b.rows;
                const int low = attention_low(p, b.s, query), high = real ? attention_high(p, b.s, query) : 0;
                const int64_t mask_at = b.s.batch * p.mask_stride[0] + head * p.mask_stride[1] +
                                        query * p.mask_stride[2];
#pragma unroll
                for (int j = 0; j < NT; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int in = j * 8 + 2 * t + e, at = key + in;
                        float &x = score[f][j][2 * half + e];
                        if (at < low || at >= high || (p.page && hidden[warp_key + in])) {
                            x = -INFINITY;
                            continue;
                        }
                        x = attention_score(p, x);
                        if (p.mask_kind)
                            x = attention_masked<T>(p, mask_at + at, x);
                    }
            }
            float top = r.top[f][half];
#pragma unroll
            for (int j = 0; j < NT; j++)
                top = fmaxf(top, fmaxf(score[f][j][2 * half], score[f][j][2 * half + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float base = top == -INFINITY ? 0 : top, less = power_of_2(r.top[f][half] - base);
            r.top[f][half] = top;
            float sum = 0;
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &x = score[f][j][2 * half + e];
                    x = power_of_2(x - base);
                    sum += x;
                }
            r.sum[f][half] = r.sum[f][half] * less + sum;
#pragma unroll
            for (int j = 0; j < attention_rows<S>::TILES; j++)
                r.out[f][j][2 * half] *= less, r.out[f][j][2 * half + 1] *= less;
        }
    }
    /* Of v the two halves of keys, then of columns. */
    const uint32_t v_at =
        stage + (uint32_t)(S::KEYS * S::PITCH + (warp_key + i % 2 * 8 + l) * S::PITCH + i / 2 * 16);
#pragma unroll
    for (int j = 0; j < NT / 2; j++) {
        uint32_t a[S::FRAGMENTS][4];
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
            for (int h = 0; h < 4; h++)
                a[f][h] = pack_two<T>(score[f][2 * j + h / 2][h % 2 * 2], score[f][2 * j + h / 2][h % 2 * 2 + 1]);
#pragma unroll
        for (int c = 0; c < S::D / 16; c++) {
            uint32_t v[4];
            load_transposed(v, v_at + (uint32_t)(j * 16 * S::PITCH + c * 32));
#pragma unroll
            for (int f = 0; f < S::FRAGMENTS; f++) {
                mma<T>(r.out[f][2 * c], a[f][0], a[f][1], a[f][2], a[f][3], v[0], v[1]);
                mma<T>(r.out[f][2 * c + 1], a[f][0], a[f][1], a[f][2], a[f][3], v[2], v[3]);
            }
        }
    }
}

/* Where a row of the block goes; false where the sequence has no such row. */
struct attention_target {
    int64_t out, lse;
    int head;
};
template <class S>
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
    return true;
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
            if (!attention_target_of<S>(p, b, warp_row + f * 16 + half * 8 + g, to))
                continue;
            const attention_total total =
                attention_finish(r.top[f][half], r.sum[f][half], attention_sink<T>(p, to.head));
#pragma unroll
            for (int j = 0; j < attention_rows<S>::TILES; j++) {
                const int column = j * 8 + 2 * t;
                if (column < p.dv)
                    *reinterpret_cast<uint32_t *>((T *)p.out + to.out + column) = pack_two<T>(
                        r.out[f][j][2 * half] * total.inverse, r.out[f][j][2 * half + 1] * total.inverse);
            }
            if (p.lse && t == 0)
                p.lse[to.lse] = total.lse;
        }
}

/* Rows of which several warps, or several blocks of a cluster, have a part. The parts of a block are added up by the
   block, those of a cluster by the block whose turn a piece of a row is. */
template <typename T, class S>
__device__ __forceinline__ void attention_merge(const attention_params &p, const attention_block &b, float *parts,
                                                int warp_row, int along, attention_rows<S> &r)
{
    constexpr int PITCH = S::MERGE_PITCH, PART = S::ROWS * PITCH;
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *row = parts + along * PART + (warp_row + f * 16 + half * 8 + g) * PITCH;
#pragma unroll
            for (int j = 0; j < attention_rows<S>::TILES; j++)
                *reinterpret_cast<float2 *>(row + j * 8 + 2 * t) =
                    make_float2(r.out[f][j][2 * half], r.out[f][j][2 * half + 1]);
            if (t == 0)
                row[S::D] = r.top[f][half], row[S::D + 1] = r.sum[f][half];
        }
    __syncthreads();
    constexpr int PIECES = S::D / 4, ALL = S::ROWS * PIECES;
    if constexpr (S::ALONG > 1) {
        static_assert(ALL % S::THREADS == 0, "");
        /* All pieces are read before the first is written: the sums lie among them. */
        constexpr int EACH = ALL / S::THREADS;
        float4 value[EACH];
        float top[EACH], sum[EACH];
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            const int at = (int)threadIdx.x + n * S::THREADS, row = at / PIECES, piece = at % PIECES;
            const float *from = parts + row * PITCH;
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
            *reinterpret_cast<float4 *>(parts + row * PITCH + piece * 4) = value[n];
            if (piece == 0)
                parts[row * PITCH + S::D] = top[n], parts[row * PITCH + S::D + 1] = sum[n];
        }
        __syncthreads();
    }
    const int ranks = cluster_size(), rank = cluster_rank();
    if (ranks > 1) {
        cluster_arrive();
        cluster_wait();
    }
    for (int at = (int)threadIdx.x + rank * S::THREADS; at < ALL; at += ranks * S::THREADS) {
        const int row = at / PIECES, piece = at % PIECES;
        const float *from = parts + row * PITCH;
        attention_target to;
        if (piece * 4 >= p.dv || !attention_target_of<S>(p, b, row, to))
            continue;
        float top = -INFINITY, sum = 0, value[4] = {0, 0, 0, 0};
        if (ranks == 1) {
            top = from[S::D], sum = from[S::D + 1];
#pragma unroll
            for (int e = 0; e < 4; e++)
                value[e] = from[piece * 4 + e];
        } else {
            for (int w = 0; w < ranks; w++)
                top = fmaxf(top, cluster_load(from + S::D, w));
            const float base = top == -INFINITY ? 0 : top;
            for (int w = 0; w < ranks; w++) {
                const float weight = power_of_2(cluster_load(from + S::D, w) - base);
                const float4 v = cluster_load4(from + piece * 4, w);
                sum += cluster_load(from + S::D + 1, w) * weight;
                value[0] += v.x * weight, value[1] += v.y * weight;
                value[2] += v.z * weight, value[3] += v.w * weight;
            }
        }
        const attention_total total = attention_finish(top, sum, attention_sink<T>(p, to.head));
        uint2 packed_four;
        packed_four.x = pack_two<T>(value[0] * total.inverse, value[1] * total.inverse);
        packed_four.y = pack_two<T>(value[2] * total.inverse, value[3] * total.inverse);
        *reinterpret_cast<uint2 *>((T *)p.out + to.out + piece * 4) = packed_four;
        if (p.lse && piece == 0)
            p.lse[to.lse] = total.lse;
    }
    if (ranks > 1) { /* a block's shared memory may be read until here */
        cluster_arrive();
        cluster_wait();
    }
}

/* Queries of q that no sequence has are 0 in out. The blocks of the first sequence look for them, each among as many
   rows as it has. */
template <typename T, class S>
__device__ __forceinline__ void attention_clear(const attention_params &p, int tile, int kv_head)
{
    const int begin = p.q_offsets[0], end = p.q_offsets[p.sequences];
    for (int at = (int)threadIdx.x; at < S::ROWS * S::D; at += S::THREADS) {
        const int r = tile * S::ROWS + at / S::D, column = at % S::D, query = r / p.group;
        const int64_t head = kv_head * p.group + r % p.group;
        if (query >= p.m || (query >= begin && query < end))
            continue;
        if (column < p.dv)
            ((T *)p.out)[head * p.out_stride[1] + query * p.out_stride[2] + column] = from_float<T>(0);
        if (column == 0 && p.lse)
            p.lse[head * p.lse_stride[1] + query * p.lse_stride[2]] = -INFINITY;
    }
}

/* Blocks: those of a cluster, then tiles of rows, the last first where they see most keys; blockIdx.y has the sequence
   and the head of k. */
template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) attention_tile(const attention_params p)
{
    extern __shared__ __align__(128) char shared[];
    const uint32_t q = shared_address(shared), stages = q + S::Q_BYTES;
    char *hidden = shared + S::HIDDEN;
    const int warp = (int)threadIdx.x / 32, along = warp / S::ACROSS;
    const int warp_row = warp % S::ACROSS * 16 * S::FRAGMENTS, warp_key = along * S::WARP_KEYS;
    const int ranks = cluster_size(), rank = cluster_rank();
    const int tiles = (int)gridDim.x / ranks, place = (int)blockIdx.x / ranks, tile = p.causal ? tiles - 1 - place : place;
    pdl_launch_next();
    pdl_wait();
    attention_block b;
    b.sequence = (int)blockIdx.y / p.kv_heads, b.kv_head = (int)blockIdx.y % p.kv_heads;
    b.s = attention_sequence_of(p, b.sequence);
    b.rows = b.s.m * p.group;
    b.first = tile * S::ROWS;
    if (p.q_offsets && b.sequence == 0 && rank == 0)
        attention_clear<T, S>(p, tile, b.kv_head);
    if (b.first >= b.rows) /* in all blocks of the cluster */
        return;
    const int first_query = b.first / p.group, last_query = min(b.first + S::ROWS, b.rows) - 1;
    b.low = attention_low(p, b.s, first_query), b.high = attention_high(p, b.s, last_query / p.group);
    b.inner_low = attention_low(p, b.s, last_query / p.group);
    b.inner_high = attention_high(p, b.s, first_query);
    const int begin = b.low / S::KEYS * S::KEYS, all = b.high > begin ? (b.high - begin + S::KEYS - 1) / S::KEYS : 0;
    const int first_step = (int)((int64_t)all * rank / ranks), steps = (int)((int64_t)all * (rank + 1) / ranks) - first_step;
    const int key = begin + first_step * S::KEYS;
    attention_rows<S> r;
    r.clear();
    attention_load_q<T, S>(p, b, q);
#pragma unroll
    for (int i = 0; i < S::STAGES - 1; i++) {
        if (i < steps)
            attention_load_keys<T, S>(p, b, key + i * S::KEYS, stages + (uint32_t)(i * S::STAGE_BYTES),
                                      hidden + i * S::KEYS);
        copy_commit();
    }
    int stage = 0, next = S::STAGES - 1;
    for (int i = 0; i < steps; i++) {
        copy_wait<S::STAGES - 2>();
        __syncthreads();
        if (i + S::STAGES - 1 < steps)
            attention_load_keys<T, S>(p, b, key + (i + S::STAGES - 1) * S::KEYS,
                                      stages + (uint32_t)(next * S::STAGE_BYTES), hidden + next * S::KEYS);
        copy_commit();
        attention_step<T, S>(p, b, q, stages + (uint32_t)(stage * S::STAGE_BYTES), hidden + stage * S::KEYS, warp_row,
                             warp_key, key + i * S::KEYS + warp_key, r);
        stage = stage + 1 < S::STAGES ? stage + 1 : 0;
        next = next + 1 < S::STAGES ? next + 1 : 0;
    }
    copy_wait<0>();
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            r.sum[f][half] += __shfl_xor_sync(~0u, r.sum[f][half], 1);
            r.sum[f][half] += __shfl_xor_sync(~0u, r.sum[f][half], 2);
        }
    if (S::ALONG == 1 && ranks == 1) {
        attention_store<T, S>(p, b, warp_row, r);
        return;
    }
    __syncthreads();
    attention_merge<T, S>(p, b, (float *)shared, warp_row, along, r);
}

#endif
