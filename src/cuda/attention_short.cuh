/* attention_short.cuh - attention over few keys: every load is under way before the first result is needed.

   A block has 8 rows of one sequence and one head of k, and its warps have KEYS keys each, one after the other; the
   arithmetic is that of attention_direct.cuh, in a single step. A warp that has all keys stores its rows from
   registers; the sums of several warps are added through shared memory. Addresses are computed, and lines prefetched,
   before the dependency wait. Keys beyond the last one are loaded as that one, as their scores are dropped; values
   beyond it are zeros. */
#ifndef ADZE_CUDA_ATTENTION_SHORT_CUH
#define ADZE_CUDA_ATTENTION_SHORT_CUH

#include "attention_direct.cuh"

/* Warps have 16 * UNITS keys. */
template <int D, int UNITS>
struct short_attention : direct_attention<D, 1, UNITS, 8, 1> {
    static constexpr bool Q_SHARED = false; /* it is used once: then registers have room */
};

/* Where a lane loads from: its first vector of its row of q, of its keys and of its values. */
template <class S>
struct short_source {
    const char *q, *k[S::UNITS][2], *v[S::UNITS][4];
};
template <class S>
__device__ __forceinline__ short_source<S> short_source_of(const attention_params &p, const attention_block &b,
                                                           int key)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4, last = max(p.n - 1, 0);
    const int row = min(b.first + g, b.rows - 1), query = row / p.group, head = b.kv_head * p.group + row % p.group;
    const attention_place begin = {b.sequence, 0};
    const char *const k = p.k + (attention_at(p.k_stride, begin, b.kv_head) + t * 8) * 2;
    const char *const v = p.v + (attention_at(p.v_stride, begin, b.kv_head) + g * 8) * 2;
    short_source<S> from;
    from.q = p.q + (b.sequence * p.q_stride[0] + head * p.q_stride[1] + query * p.q_stride[2] + t * 8) * 2;
#pragma unroll
    for (int u = 0; u < S::UNITS; u++) {
#pragma unroll
        for (int h = 0; h < 2; h++)
            from.k[u][h] = k + min(key + u * 16 + h * 8 + g, last) * p.k_stride[2] * 2;
#pragma unroll
        for (int i = 0; i < 4; i++)
            from.v[u][i] = v + min(key + u * 16 + i / 2 * 8 + i % 2 + 2 * t, last) * p.v_stride[2] * 2;
    }
    return from;
}
/* Prefetches what the warp loads; the lanes of a row have its lines. */
template <class S>
__device__ __forceinline__ void short_prefetch(const attention_params &p, const short_source<S> &from)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    if (p.n == 0)
        return;
    if (t * 128 < p.d * 2 + 112) {
        const int line = min(t * 128, p.d * 2 - 16) - t * 16;
        prefetch(from.q + line);
#pragma unroll
        for (int i = 0; i < 2 * S::UNITS; i++)
            prefetch(from.k[i / 2][i % 2] + line);
    }
    if (g * 128 < p.dv * 2 + 112) {
        const int line = min(g * 128, p.dv * 2 - 16) - g * 16;
#pragma unroll
        for (int i = 0; i < 4 * S::UNITS; i++)
            prefetch(from.v[i / 4][i % 4] + line);
    }
}
template <class S>
__device__ __forceinline__ void short_load(const attention_params &p, const short_source<S> &from, int key,
                                           direct_rows<S> &r, direct_keys<S> &keys)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    bool in[S::CHUNKS]; /* the lane's vectors of q and k */
#pragma unroll
    for (int c = 0; c < S::CHUNKS; c++)
        in[c] = (4 * c + t) * 8 < p.d && p.n > 0;
#pragma unroll
    for (int c = 0; c < S::CHUNKS; c++)
        r.q[0][c] = load_or_zeros<true>(from.q + c * 64, in[c]);
#pragma unroll
    for (int i = 0; i < 2 * S::UNITS; i++)
#pragma unroll
        for (int c = 0; c < S::CHUNKS; c++)
            keys.k[i / 2][i % 2][c] = load_or_zeros<true>(from.k[i / 2][i % 2] + c * 64, in[c]);
#pragma unroll
    for (int i = 0; i < 4 * S::UNITS; i++) {
        const bool there = key + i / 2 * 8 + i % 2 + 2 * t < p.n;
#pragma unroll
        for (int c = 0; c < S::SPANS; c++)
            keys.v[i / 4][i % 4][c] =
                load_or_zeros<true>(from.v[i / 4][i % 4] + c * 128, there && (8 * c + g) * 8 < p.dv);
    }
    keys.missing = 0;
}

/* Eight columns of a row, of which `v` has the sums. */
template <typename T>
__device__ __forceinline__ void short_store(const attention_params &p, const attention_target &to, int column,
                                            float inverse, const float (&v)[8])
{
    if (column < p.dv)
        *reinterpret_cast<uint4 *>((T *)p.out + to.out + column) =
            make_uint4(pack_two<T>(v[0] * inverse, v[1] * inverse), pack_two<T>(v[2] * inverse, v[3] * inverse),
                       pack_two<T>(v[4] * inverse, v[5] * inverse), pack_two<T>(v[6] * inverse, v[7] * inverse));
}
/* A lane's eight columns of span c of its row e. */
template <class S>
__device__ __forceinline__ void short_span(const direct_rows<S> &r, int c, int e, float (&v)[8])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        v[2 * i] = r.out[0][c * 4 + i][e], v[2 * i + 1] = r.out[0][c * 4 + i][2 + e];
}
/* Adds what the warps have left in shared memory: of each row the sums of its columns, the maximum and the sum. */
template <typename T, class S>
__device__ __forceinline__ void short_merge(const attention_params &p, const attention_block &b, const float *parts)
{
    constexpr int PITCH = S::MERGE_PITCH, VECTORS = S::D / 8;
    const int warps = (int)blockDim.x / 32;
    for (int at = (int)threadIdx.x; at < S::ROWS * VECTORS; at += (int)blockDim.x) {
        const int row = at / VECTORS, column = at % VECTORS * 8;
        attention_target to;
        if (!attention_target_of(p, b, row, to))
            break;
        const float *const from = parts + row * PITCH;
        float top = -INFINITY, sum = 0, v[8] = {};
        for (int w = 0; w < warps; w++)
            top = fmaxf(top, from[w * S::ROWS * PITCH + S::D]);
        const float base = top == -INFINITY ? 0 : top;
#pragma unroll 2
        for (int w = 0; w < warps; w++) {
            const float *const its = from + w * S::ROWS * PITCH;
            const float weight = power_of_2(its[S::D] - base);
            sum += its[S::D + 1] * weight;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float4 x = *reinterpret_cast<const float4 *>(its + column + h * 4);
                v[4 * h] += x.x * weight, v[4 * h + 1] += x.y * weight;
                v[4 * h + 2] += x.z * weight, v[4 * h + 3] += x.w * weight;
            }
        }
        const attention_total total = attention_finish(top, sum, attention_sink<T>(p, to.head));
        short_store<T>(p, to, column, total.inverse, v);
        if (p.lse && column == 0)
            p.lse[to.lse] = total.lse;
    }
}

/* Scores become weights; the lane's maxima and sums of rows 2 t and 2 t + 1 follow. */
template <class S>
__device__ __forceinline__ void short_weigh(direct_rows<S> &r, float (&score)[S::UNITS][1][4])
{
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float most = fmaxf(score[0][0][e], score[0][0][2 + e]);
#pragma unroll
        for (int u = 1; u < S::UNITS; u++)
            most = fmaxf(most, fmaxf(score[u][0][e], score[u][0][2 + e]));
#pragma unroll
        for (int d = 4; d < 32; d *= 2)
            most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
        r.top[0][e] = most;
        const float base = most == -INFINITY ? 0 : most;
        float sum = 0;
#pragma unroll
        for (int u = 0; u < S::UNITS; u++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float &x = score[u][0][2 * h + e];
                x = power_of_2(x - base);
                sum += x;
            }
        r.sum[0][e] = sum;
    }
}

/* Blocks: tiles of 8 rows; blockIdx.y has the sequence and the head of k. */
template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) attention_short(const __grid_constant__ attention_params p)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* older GPUs are never given it: adze_cuda_tensor_cores() */
    extern __shared__ __align__(16) float parts[];
    const int warp = (int)threadIdx.x / 32, g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const int key = warp * S::KEYS;
    attention_block b;
    pdl_launch_next();
    b.kv_head = (int)blockIdx.y % p.kv_heads, b.sequence = (int)blockIdx.y / p.kv_heads;
    b.first = (int)blockIdx.x * S::ROWS, b.rows = p.m * p.group;
    b.s = {b.sequence, 0, p.m, b.sequence, 0, p.n};
    const short_source<S> from = short_source_of<S>(p, b, key);
    short_prefetch<S>(p, from);
    pdl_wait();
    direct_rows<S> r;
    direct_keys<S> keys;
    r.clear();
    short_load<S>(p, from, key, r, keys);
    attention_target to[2];
    bool stores[2];
    float sink[2];
#    pragma unroll
    for (int e = 0; e < 2; e++) { /* while the loads are under way */
        stores[e] = attention_target_of(p, b, 2 * t + e, to[e]);
        sink[e] = stores[e] ? attention_sink<T>(p, to[e].head) : -INFINITY;
    }
    if (p.lengths)
        b.s.n = between(p.lengths[b.sequence], 0, p.n);
    b.high = b.s.n;
    float score[S::UNITS][1][4];
    direct_scores<T, S>(keys, r, score);
    if (p.softcap != 0 || p.mask_kind || p.window || (p.causal && p.m > 1)) {
        direct_edge<T, S>(p, b, key, 0, p.scale, score);
    } else {
#    pragma unroll
        for (int u = 0; u < S::UNITS; u++)
#    pragma unroll
            for (int e = 0; e < 4; e++)
                score[u][0][e] = key + u * 16 + e / 2 * 8 + g < b.high ? score[u][0][e] * p.scale : -INFINITY;
    }
    if (p.lengths)
        direct_clip<S>(b, key, keys);
    short_weigh<S>(r, score);
    direct_values<T, S, false>(keys, score, r);
    const bool alone = blockDim.x == 32;
#    pragma unroll
    for (int e = 0; e < 2; e++) {
        const float sum = r.row_sum(0, e);
        float v[8];
        if (alone) {
            const attention_total total = attention_finish(r.top[0][e], sum, sink[e]);
            if (!stores[e])
                continue;
#    pragma unroll
            for (int c = 0; c < S::SPANS; c++) {
                short_span<S>(r, c, e, v);
                short_store<T>(p, to[e], c * 64 + g * 8, total.inverse, v);
            }
            if (p.lse && g == 0)
                p.lse[to[e].lse] = total.lse;
            continue;
        }
        float *const row = parts + (warp * S::ROWS + 2 * t + e) * S::MERGE_PITCH;
#    pragma unroll
        for (int c = 0; c < S::SPANS; c++) {
            short_span<S>(r, c, e, v);
            *reinterpret_cast<float4 *>(row + c * 64 + g * 8) = make_float4(v[0], v[1], v[2], v[3]);
            *reinterpret_cast<float4 *>(row + c * 64 + g * 8 + 4) = make_float4(v[4], v[5], v[6], v[7]);
        }
        if (g == 0)
            row[S::D] = r.top[0][e], row[S::D + 1] = sum;
    }
    if (alone)
        return;
    __syncthreads();
    short_merge<T, S>(p, b, parts);
#endif
}

#endif
