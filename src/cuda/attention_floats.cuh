/* attention_floats.cuh - attention in float arithmetic: of floats, or of what becomes floats on its way into shared
   memory.

   Blocks, rows and parts are those of attention_tile.cuh. The threads of a block are groups of 16: ACROSS of them
   have EACH rows each, ALONG of them keys of their own. Of its rows a thread computes the scores of every 16th key of
   its group, and then, with the weights of all of them, every 16th vector of 4 columns of the values. A step has one
   buffer for keys and one for values: the next keys come while values are summed, the next values while scores are.
 */
#ifndef ADZE_CUDA_ATTENTION_FLOATS_CUH
#define ADZE_CUDA_ATTENTION_FLOATS_CUH

#include "attention_tile.cuh"

/* CONVERTS: q, k and v are of any dtype; otherwise all are floats. */
template <int D_, int EACH_, int ACROSS_, int ALONG_, int KEYS_, bool CONVERTS_ = false>
struct floats_shape {
    static constexpr bool CONVERTS = CONVERTS_, ANYWHERE = true; /* rows of out lie at any address */
    static constexpr int D = D_, EACH = EACH_, ACROSS = ACROSS_, ALONG = ALONG_, KEYS = KEYS_;
    static constexpr int ROWS = EACH * ACROSS, GROUPS = ACROSS * ALONG, THREADS = 16 * GROUPS;
    static constexpr int GROUP_KEYS = KEYS / ALONG, LANE_KEYS = GROUP_KEYS / 16, CHUNKS = D / 64;
    /* For attention_prefetch: bytes of an element, and buffers of keys, of which it fills all but one. */
    static constexpr int ELEMENT = 4, STAGES = 2;
    /* Floats of a row in shared memory. 8 rows of a vector each, and 2 rows of 16 weights, are in different banks. */
    static constexpr int PITCH = D + 4, WEIGHT_PITCH = KEYS + 16;
    static constexpr int HOLDS = (ROWS * (PITCH + WEIGHT_PITCH) + 2 * KEYS * PITCH) * 4;
    static constexpr int SHARED = HOLDS + 2 * KEYS * (int)sizeof(attention_place); /* places of two steps */
    /* Blocks per SM, which bound the registers: as many as shared memory has room for, or 170 registers a thread, 128
       where it has few rows. */
    static constexpr int AT_ONCE = EACH > 4 ? 384 : 512; /* threads */
    static constexpr int FIT = (227 << 10) / (SHARED + (1 << 10)),
                         BY_THREADS = THREADS < AT_ONCE ? AT_ONCE / THREADS : 1;
    static constexpr int BLOCKS = FIT < BY_THREADS ? FIT : BY_THREADS;
    static constexpr int MERGE_PITCH = D + 4, MERGE_BYTES = ALONG * ROWS * MERGE_PITCH * 4;
    static_assert(D % 64 == 0 && GROUP_KEYS % 16 == 0 && THREADS % 32 == 0, "");
    static_assert(KEYS <= THREADS && ROWS <= THREADS, "");
    static_assert(MERGE_BYTES <= HOLDS && HOLDS % 16 == 0, "");
};

/* Copies a row of `count` elements, one group of threads together; zeros where it is not there, and up to a multiple
   of 4. `vectors`: the row has whole aligned ones. */
__device__ __forceinline__ void floats_copy_row(float *to, const char *row, int count, bool there, bool vectors)
{
    const int lane = (int)threadIdx.x % 16, all = (count + 3) / 4 * 4;
    const uint32_t at = shared_address(to);
    if (vectors) {
#pragma unroll 4
        for (int c = lane * 4; c < all; c += 64)
            copy_async(at + (uint32_t)c * 4, row + c * 4, there);
        return;
    }
#pragma unroll 1
    for (int c = lane; c < all; c += 16)
        copy_async_4(at + (uint32_t)c * 4, row + (c < count ? c * 4 : 0), there && c < count);
}

/* Element `at` of a row as a float, or four elements from there on, which are one aligned load. */
__device__ __forceinline__ float floats_one(const char *row, int dtype, int at)
{
    return dtype == ADZE_I8       ? (float)((const int8_t *)row)[at]
           : dtype == ADZE_F8E4M3 ? f8_to_float(((const uint8_t *)row)[at])
           : dtype == ADZE_F16    ? to_float(((const f16 *)row)[at])
           : dtype == ADZE_BF16   ? to_float(((const bf16 *)row)[at])
                                  : ((const float *)row)[at];
}
__device__ __forceinline__ float4 floats_four(const char *row, int dtype, int at)
{
    float f[4];
    if (dtype == ADZE_I8) {
        i8_floats(((const uint32_t *)row)[at / 4], f);
    } else if (dtype == ADZE_F8E4M3) {
        const uint32_t w = ((const uint32_t *)row)[at / 4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            f[i] = f8_to_float(w >> (8 * i) & 0xff);
    } else if (dtype == ADZE_F32) {
        return ((const float4 *)row)[at / 4];
    } else {
        const uint2 w = ((const uint2 *)row)[at / 4];
        const uint32_t pair[2] = {w.x, w.y};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t half = i % 2 ? pair[i / 2] >> 16 : pair[i / 2] & 0xffff;
            f[i] = dtype == ADZE_F16 ? __half2float(__ushort_as_half((unsigned short)half))
                                     : __uint_as_float(half << 16);
        }
    }
    return make_float4(f[0], f[1], f[2], f[3]);
}
__device__ __forceinline__ int floats_size(int dtype) /* of an element, in bytes */
{
    return dtype == ADZE_F32 ? 4 : dtype == ADZE_F16 || dtype == ADZE_BF16 ? 2 : 1;
}
/* Copies N rows of `count` elements as floats, one group of threads together; those that are not there (NULL), and up
   to a multiple of 4, are zeros. `fours`: the rows have whole aligned ones. */
template <int N>
__device__ __forceinline__ void floats_convert_rows(float *to, int pitch, const char *const (&row)[N], int dtype,
                                                    int count, bool fours)
{
    const int lane = (int)threadIdx.x % 16, all = (count + 3) / 4 * 4;
    if (fours) {
        for (int c = lane * 4; c < all; c += 64) {
            float4 x[N];
#pragma unroll
            for (int i = 0; i < N; i++)
                x[i] = row[i] ? floats_four(row[i], dtype, c) : make_float4(0, 0, 0, 0);
#pragma unroll
            for (int i = 0; i < N; i++)
                *reinterpret_cast<float4 *>(to + i * pitch + c) = x[i];
        }
        return;
    }
    for (int c = lane; c < all; c += 16) {
        float x[N];
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = row[i] && c < count ? floats_one(row[i], dtype, c) : 0;
#pragma unroll
        for (int i = 0; i < N; i++)
            to[i * pitch + c] = x[i];
    }
}

template <class S>
__device__ __forceinline__ void floats_load_q(const attention_params &p, const attention_block &b, float *q)
{
    const int64_t own =
        b.s.batch * p.q_stride[0] + (int64_t)b.kv_head * p.group * p.q_stride[1] + b.s.first * p.q_stride[2];
    const int first = b.first, rows = b.rows; /* b is in shared memory, which copies may seem to write */
#pragma unroll 2
    for (int row = (int)threadIdx.x / 16; row < S::ROWS; row += S::GROUPS) {
        const bool there = first + row < rows;
        const int r = there ? first + row : 0, i = r / p.group, head = r - i * p.group;
        const int64_t at = own + head * p.q_stride[1] + i * p.q_stride[2];
        if constexpr (S::CONVERTS) {
            const char *const from[1] = {there ? p.q + at * floats_size(p.q_dtype) : NULL};
            floats_convert_rows(q + row * S::PITCH, 0, from, p.q_dtype, p.d, p.fours);
        } else {
            floats_copy_row(q + row * S::PITCH, p.q + at * 4, p.d, there, p.vectors);
        }
    }
}
/* Copies the keys from `key` on, and then their values, as floats. */
template <class S>
__device__ __forceinline__ void floats_convert(const attention_params &p, const attention_block &b, int key, float *k,
                                               float *v, const attention_place *places)
{
    /* Of a group; of it at once: each of these rounds waits for memory. */
    constexpr int ROWS = S::KEYS / S::GROUPS, N = ROWS % 8 == 0 ? 8 : ROWS % 4 == 0 ? 4 : ROWS;
    static_assert(S::KEYS % S::GROUPS == 0, "");
    const int size = floats_size(p.k_dtype), first = (int)threadIdx.x / 16;
#pragma unroll 1 /* the code is long */
    for (int n = 0; n < 2 * ROWS; n += N) {
        const bool is_v = n >= ROWS;
        const int of = is_v ? n - ROWS : n;
        const int64_t entry = is_v ? p.v_stride[0] : p.k_stride[0], each = is_v ? p.v_stride[2] : p.k_stride[2];
        const char *const head =
            is_v ? p.v + b.kv_head * p.v_stride[1] * size : p.k + b.kv_head * p.k_stride[1] * size;
        const char *from[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int row = first + (of + i) * S::GROUPS;
            attention_place place = {b.s.key_batch, b.s.first_key + key + row};
            bool there = key + row < b.high;
            if (p.page) {
                place = places[row];
                there = place.entry >= 0;
            }
            from[i] = there ? head + (place.entry * entry + place.row * each) * size : NULL;
        }
        floats_convert_rows((is_v ? v : k) + (first + of * S::GROUPS) * S::PITCH, S::GROUPS * S::PITCH, from,
                            p.k_dtype, is_v ? p.dv : p.d, p.fours);
    }
}
/* Copies the keys from `key` on, or their values, of rows of `count` elements, PITCH floats apart. Of whole vectors
   that are not paged a thread goes from row to row by an addition: the addresses of single rows took about as long as
   what is computed with them. */
template <class S, int PITCH = S::PITCH>
__device__ __forceinline__ void floats_load(const attention_params &p, const attention_block &b, const char *data,
                                            const int64_t (&stride)[3], int count, int key, float *to,
                                            const attention_place *places)
{
    constexpr int ROWS = S::KEYS / S::GROUPS; /* of a group */
    static_assert(S::KEYS % S::GROUPS == 0, "");
    const int group = (int)threadIdx.x / 16, lane = (int)threadIdx.x % 16;
    if (p.vectors && !p.page) {
        const attention_place begin = {b.s.key_batch, b.s.first_key + key + group};
        const char *from = data + (attention_at(stride, begin, b.kv_head) + lane * 4) * 4;
        const int64_t next = S::GROUPS * 4 * stride[2];
        const int left = b.high - key - group;
        uint32_t at = shared_address(to + group * PITCH + lane * 4);
#pragma unroll 4
        for (int i = 0; i < ROWS; i++) {
            const bool there = i * S::GROUPS < left;
            const char *const its = there ? from : data;
#pragma unroll
            for (int c = 0; c < S::D / 64; c++)
                if (c * 64 + lane * 4 < count)
                    copy_async(at + (uint32_t)c * 256, its + (there ? c * 256 : 0), there);
            from += next, at += S::GROUPS * PITCH * 4;
        }
        return;
    }
#pragma unroll 1
    for (int row = group; row < S::KEYS; row += S::GROUPS) {
        attention_place place = {b.s.key_batch, b.s.first_key + key + row};
        bool there = key + row < b.high;
        if (p.page) {
            place = places[row];
            there = place.entry >= 0;
        }
        const char *from = there ? data + attention_at(stride, place, b.kv_head) * 4 : data;
        floats_copy_row(to + row * PITCH, from, count, there, p.vectors);
    }
}

/* What a thread has of its rows: the sums of its columns of the values, the maximum, which may be behind by LAZY, and
   the sum of the weights of its own keys. */
template <class S>
struct floats_rows {
    static constexpr float LAZY = 8;
    float4 out[S::EACH][S::CHUNKS];
    float top[S::EACH], sum[S::EACH];
};

/* q . k of the thread's rows and keys. q and k are where the first of them are. */
template <class S>
__device__ __forceinline__ void floats_scores(const float *q, const float *k, int d,
                                              float (&score)[S::EACH][S::LANE_KEYS])
{
#pragma unroll
    for (int i = 0; i < S::EACH; i++)
#pragma unroll
        for (int j = 0; j < S::LANE_KEYS; j++)
            score[i][j] = 0;
    constexpr int SCORES = S::EACH * S::LANE_KEYS; /* loads are ahead of what is computed */
    constexpr int AT_ONCE = SCORES > 4 || S::THREADS > 128 ? 2 : SCORES > 2 ? 4 : 8;
#pragma unroll AT_ONCE
    for (int c = 0; c < d; c += 4) {
        float4 y[S::LANE_KEYS];
#pragma unroll
        for (int j = 0; j < S::LANE_KEYS; j++)
            y[j] = *reinterpret_cast<const float4 *>(k + j * 16 * S::PITCH + c);
#pragma unroll
        for (int i = 0; i < S::EACH; i++) {
            const float4 x = *reinterpret_cast<const float4 *>(q + i * S::ACROSS * S::PITCH + c);
#pragma unroll
            for (int j = 0; j < S::LANE_KEYS; j++) {
                score[i][j] = fmaf(x.x, y[j].x, score[i][j]);
                score[i][j] = fmaf(x.y, y[j].y, score[i][j]);
                score[i][j] = fmaf(x.z, y[j].z, score[i][j]);
                score[i][j] = fmaf(x.w, y[j].w, score[i][j]);
            }
        }
    }
}

/* The scores of keys that not every row sees, or that a mask or softcap changes, in base 2. `row` is the thread's
   first in the sequence, `key` its first key, and `places` where that is. The masks of several rows are loaded at
   once. */
template <typename T, class S>
__device__ __forceinline__ void floats_edge(const attention_params &p, const attention_block &b, int row, int key,
                                            const attention_place *places, float (&score)[S::EACH][S::LANE_KEYS])
{
    constexpr int KEYS = S::LANE_KEYS, SOME = KEYS < 8 ? 8 / KEYS : 1, ROWS = SOME < S::EACH ? SOME : S::EACH;
    static_assert(S::EACH % ROWS == 0, "");
#pragma unroll
    for (int from = 0; from < S::EACH; from += ROWS) {
        int low[ROWS], high[ROWS], query[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int r = row + (from + i) * S::ACROSS;
            query[i] = r / p.group;
            low[i] = attention_low(p, b.s, query[i]);
            high[i] = r < b.rows ? attention_high(p, b.s, query[i]) : 0;
        }
        const auto seen = [&](int n) {
            const int j = n % KEYS * 16;
            return key + j >= low[n / KEYS] && key + j < high[n / KEYS] && !(p.page && places[j].entry < 0);
        };
        const auto its = [&](int n) -> float & { return score[from + n / KEYS][n % KEYS]; };
#pragma unroll
        for (int n = 0; n < ROWS * KEYS; n++)
            its(n) = attention_score(p, p.scale, its(n));
        if (p.mask_kind) {
            int64_t at[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const int head = row + (from + i) * S::ACROSS - query[i] * p.group;
                at[i] = attention_mask_at(p, b.s.batch, b.kv_head * p.group + head, query[i]) + key;
            }
            const auto where = [&](int n) { return at[n / KEYS] + n % KEYS * 16; };
            attention_mask<T, ROWS * KEYS>(p, 0, where, seen, its);
        }
#pragma unroll
        for (int n = 0; n < ROWS * KEYS; n++)
            its(n) = seen(n) ? its(n) : -INFINITY;
    }
}

/* Scores, times `unit` in base 2, become weights; maxima and sums follow. */
template <class S>
__device__ __forceinline__ void floats_weigh(float unit, floats_rows<S> &r, float (&score)[S::EACH][S::LANE_KEYS])
{
    float top[S::EACH];
    bool grows = false;
#pragma unroll
    for (int i = 0; i < S::EACH; i++) {
        float most = score[i][0];
#pragma unroll
        for (int j = 1; j < S::LANE_KEYS; j++)
            most = fmaxf(most, score[i][j]);
#pragma unroll
        for (int lanes = 8; lanes; lanes /= 2)
            most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
        top[i] = most * unit;
        grows |= top[i] - r.top[i] > floats_rows<S>::LAZY;
    }
    if (__any_sync(~0u, grows)) {
#pragma unroll
        for (int i = 0; i < S::EACH; i++) {
            const float next = fmaxf(r.top[i], top[i]), less = power_of_2(r.top[i] - (next == -INFINITY ? 0 : next));
            r.top[i] = next;
            r.sum[i] *= less;
#pragma unroll
            for (int c = 0; c < S::CHUNKS; c++)
                r.out[i][c].x *= less, r.out[i][c].y *= less, r.out[i][c].z *= less, r.out[i][c].w *= less;
        }
    }
#pragma unroll
    for (int i = 0; i < S::EACH; i++) {
        const float base = r.top[i] == -INFINITY ? 0 : -r.top[i];
#pragma unroll
        for (int j = 0; j < S::LANE_KEYS; j++) {
            score[i][j] = power_of_2(fmaf(score[i][j], unit, base));
            r.sum[i] += score[i][j];
        }
    }
}

__device__ __forceinline__ void floats_add(float4 &sum, float weight, float4 v)
{
    sum.x = fmaf(weight, v.x, sum.x), sum.y = fmaf(weight, v.y, sum.y);
    sum.z = fmaf(weight, v.z, sum.z), sum.w = fmaf(weight, v.w, sum.w);
}
/* Adds the values of the group's keys, times their weights. v is where the thread's first column of the first is,
   weights those of its first row. */
template <class S>
__device__ __forceinline__ void floats_values(const float *weights, const float *v, int dv, floats_rows<S> &r)
{
    constexpr int AT_ONCE = S::EACH > 4 || S::CHUNKS > 4 || S::THREADS > 128 ? 1 : 2;
#pragma unroll AT_ONCE
    for (int j = 0; j < S::GROUP_KEYS; j += 4) {
        float4 w[S::EACH];
#pragma unroll
        for (int i = 0; i < S::EACH; i++)
            w[i] = *reinterpret_cast<const float4 *>(weights + i * S::ACROSS * S::WEIGHT_PITCH + j);
#pragma unroll
        for (int c = 0; c < S::CHUNKS; c++) {
            if (S::CHUNKS > 4 && c * 64 >= dv) /* else columns beyond are few, and not stored */
                break;
            float4 y[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                y[e] = *reinterpret_cast<const float4 *>(v + (j + e) * S::PITCH + c * 64);
#pragma unroll
            for (int i = 0; i < S::EACH; i++) {
                floats_add(r.out[i][c], w[i].x, y[0]);
                floats_add(r.out[i][c], w[i].y, y[1]);
                floats_add(r.out[i][c], w[i].z, y[2]);
                floats_add(r.out[i][c], w[i].w, y[3]);
            }
        }
    }
}

/* Rows of which the block has all keys, and a group of threads all columns, go from registers to memory; others into
   shared memory: a row of floats, its maximum and its sum. */
template <typename T, class S>
__device__ __forceinline__ void floats_store(const attention_params &p, const attention_block &b, int row,
                                             const floats_rows<S> &r)
{
    const int lane = (int)threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < S::EACH; i++) {
        attention_target to;
        if (!attention_target_of(p, b, row + i * S::ACROSS, to))
            continue;
        const attention_total total = attention_finish(r.top[i], r.sum[i], attention_sink<T>(p, to.head));
#pragma unroll
        for (int c = 0; c < S::CHUNKS; c++) {
            const int column = c * 64 + lane * 4;
            const float4 v = r.out[i][c];
            if (column < p.dv)
                attention_store_four<true, T>(
                    p, to.out + column, p.dv - column,
                    make_float4(v.x * total.inverse, v.y * total.inverse, v.z * total.inverse, v.w * total.inverse));
        }
        if (p.lse && lane == 0)
            p.lse[to.lse] = total.lse;
    }
}
template <class S>
__device__ __forceinline__ void floats_put(float *parts, int row, int along, const floats_rows<S> &r)
{
    const int lane = (int)threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < S::EACH; i++) {
        float *to = parts + (along * S::ROWS + row + i * S::ACROSS) * S::MERGE_PITCH;
#pragma unroll
        for (int c = 0; c < S::CHUNKS; c++)
            *reinterpret_cast<float4 *>(to + c * 64 + lane * 4) = r.out[i][c];
        if (lane == 0)
            to[S::D] = r.top[i], to[S::D + 1] = r.sum[i];
    }
}

/* The scales of the thread's keys, or of their values; `key` is the first of them, and `places` where that is. */
template <class S>
__device__ __forceinline__ void floats_scales(const attention_params &p, const attention_block &b, const float *from,
                                              const int64_t (&stride)[3], int key, const attention_place *places,
                                              float (&scale)[S::LANE_KEYS])
{
#pragma unroll
    for (int j = 0; j < S::LANE_KEYS; j++) {
        attention_place place = {b.s.key_batch, b.s.first_key + key + j * 16};
        bool there = key + j * 16 < b.high;
        if (p.page) {
            place = places[j * 16];
            there = place.entry >= 0;
        }
        scale[j] = from && there ? from[attention_at(stride, place, b.kv_head)] : 1;
    }
}

/* The steps of a block: keys from `first` on, of which all rows see those from inner_low to inner_high, before the
   mask. */
struct floats_steps {
    int rank, first, count, inner_low, inner_high;
};
/* Prefetches the rows of a tile into L2, where it is known which they are. */
template <class S>
__device__ __forceinline__ void floats_prefetch_q(const attention_params &p, const attention_block &b, int tile)
{
    const int r = tile * S::ROWS + (int)threadIdx.x, i = r / p.group;
    if (p.q_offsets || (int)threadIdx.x >= S::ROWS || i >= p.m)
        return;
    const int64_t head = b.kv_head * p.group + r - i * p.group;
    prefetch_row(p.q + (b.sequence * p.q_stride[0] + head * p.q_stride[1] + i * p.q_stride[2]) * 4, p.d / 4);
}
/* Finds what the block has; false: nothing. The grid is that of attention_tile. */
template <typename T, class S>
__device__ __forceinline__ bool floats_begin(const attention_params &p, attention_block &b, floats_steps &steps)
{
    const int rank = (int)blockIdx.x % p.parts, at = (int)blockIdx.x / p.parts;
    attention_block own;
    own.kv_head = (int)blockIdx.y % p.kv_heads, own.sequence = (int)blockIdx.y / p.kv_heads;
    int tile = p.causal ? (int)gridDim.x / p.parts - 1 - at : at;
    pdl_launch_next();
    if (!S::CONVERTS && p.vectors) {
        attention_prefetch<S>(p, own.sequence, own.kv_head, rank);
        floats_prefetch_q<S>(p, own, tile);
    }
    pdl_wait();
    if (p.q_offsets) {
        if (rank == 0)
            attention_clear<T, S>(p, at, own.kv_head);
        if (!attention_find<S>(p, at, own.sequence, tile)) /* in all blocks of the cluster */
            return false;
    }
    own.s = attention_sequence_of(p, own.sequence);
    own.rows = own.s.m * p.group;
    own.first = tile * S::ROWS;
    const int last_row = min(own.first + S::ROWS, own.rows) - 1;
    const int low = attention_low(p, own.s, own.first / p.group);
    own.high = attention_high(p, own.s, last_row / p.group);
    steps.inner_low = attention_low(p, own.s, last_row / p.group);
    steps.inner_high = attention_high(p, own.s, own.first / p.group);
    if (threadIdx.x == 0)
        b = own;
    __syncthreads();
    const int begin = low / S::KEYS * S::KEYS,
              all = own.high > begin ? (own.high - begin + S::KEYS - 1) / S::KEYS : 0;
    const int before = (int)((int64_t)all * rank / p.parts);
    steps.rank = rank, steps.first = begin + before * S::KEYS;
    steps.count = (int)((int64_t)all * (rank + 1) / p.parts) - before;
    return true;
}

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
    attention_of_floats(const __grid_constant__ attention_params p)
{
    extern __shared__ __align__(128) char shared[];
    __shared__ attention_block b; /* the same for all threads: not in registers */
    float *const q = reinterpret_cast<float *>(shared), *const k = q + S::ROWS * S::PITCH;
    float *const v = k + S::KEYS * S::PITCH, *const weights = v + S::KEYS * S::PITCH;
    attention_place *const places = reinterpret_cast<attention_place *>(shared + S::HOLDS);
    const int group = (int)threadIdx.x / 16, lane = (int)threadIdx.x % 16;
    const int across = group % S::ACROSS, along = group / S::ACROSS; /* the thread's first row; its keys */
    floats_steps all;
    if (!floats_begin<T, S>(p, b, all))
        return;
    const int steps = all.count, first = all.first;
    floats_rows<S> r;
#pragma unroll
    for (int i = 0; i < S::EACH; i++) {
        r.top[i] = -INFINITY, r.sum[i] = 0;
#pragma unroll
        for (int c = 0; c < S::CHUNKS; c++)
            r.out[i][c] = make_float4(0, 0, 0, 0);
    }
    if (p.page) {
        attention_look_up<S>(p, b, first, places);
        attention_look_up<S>(p, b, first + S::KEYS, places + S::KEYS);
        __syncthreads();
    }
    if (steps > 0)
        floats_load_q<S>(p, b, q);
    if (!S::CONVERTS && steps > 0) {
        floats_load<S>(p, b, p.k, p.k_stride, p.d, first, k, places);
        copy_commit();
        floats_load<S>(p, b, p.v, p.v_stride, p.dv, first, v, places);
        copy_commit();
    }
    const float *const q_at = q + across * S::PITCH, *const k_at = k + (along * S::GROUP_KEYS + lane) * S::PITCH;
    const float *const v_at = v + along * S::GROUP_KEYS * S::PITCH + lane * 4;
    float *const weights_at = weights + across * S::WEIGHT_PITCH + along * S::GROUP_KEYS;
    for (int i = 0; i < steps; i++) {
        const int key = first + i * S::KEYS;
        const attention_place *const here = places + i % 2 * S::KEYS, *const next = places + (i + 1) % 2 * S::KEYS;
        if constexpr (S::CONVERTS)
            floats_convert<S>(p, b, key, k, v, here);
        copy_wait<1>(); /* the keys */
        __syncthreads();
        const int mine = along * S::GROUP_KEYS + lane;
        float k_scale[S::LANE_KEYS], v_scale[S::LANE_KEYS];
        if constexpr (S::CONVERTS) {
            floats_scales<S>(p, b, p.k_scale, p.k_scale_stride, key + mine, here + mine, k_scale);
            floats_scales<S>(p, b, p.v_scale, p.v_scale_stride, key + mine, here + mine, v_scale);
        }
        float score[S::EACH][S::LANE_KEYS];
        floats_scores<S>(q_at, k_at, p.d, score);
        if constexpr (S::CONVERTS)
#pragma unroll
            for (int row = 0; row < S::EACH; row++)
#pragma unroll
                for (int j = 0; j < S::LANE_KEYS; j++)
                    score[row][j] *= k_scale[j];
        if (!S::CONVERTS)
            __syncthreads(); /* all have read the keys */
        if (!S::CONVERTS && i + 1 < steps)
            floats_load<S>(p, b, p.k, p.k_stride, p.d, key + S::KEYS, k, next);
        copy_commit();
        float unit = p.scale;
        if (p.page || p.softcap != 0 || p.mask_kind || !(unit > 0) || key < all.inner_low ||
            key + S::KEYS > all.inner_high) {
            floats_edge<T, S>(p, b, (int)opaque((uint32_t)(b.first + across)), key + mine, here + mine, score);
            unit = 1;
        }
        floats_weigh<S>(unit, r, score);
#pragma unroll
        for (int row = 0; row < S::EACH; row++)
#pragma unroll
            for (int j = 0; j < S::LANE_KEYS; j++)
                weights_at[row * S::ACROSS * S::WEIGHT_PITCH + j * 16 + lane] =
                    S::CONVERTS ? score[row][j] * v_scale[j] : score[row][j];
        copy_wait<1>(); /* the values */
        __syncthreads();
        floats_values<S>(weights_at, v_at, p.dv, r);
        __syncthreads(); /* all have read the values, the weights, and where the keys are */
        if (!S::CONVERTS && i + 1 < steps)
            floats_load<S>(p, b, p.v, p.v_stride, p.dv, key + S::KEYS, v, next);
        copy_commit();
        if (p.page && i + 2 < steps)
            attention_look_up<S>(p, b, key + 2 * S::KEYS, places + i % 2 * S::KEYS);
    }
    copy_wait<0>();
#pragma unroll
    for (int i = 0; i < S::EACH; i++)
#pragma unroll
        for (int lanes = 8; lanes; lanes /= 2)
            r.sum[i] += __shfl_xor_sync(~0u, r.sum[i], lanes);
    if (S::ALONG == 1 && p.parts == 1) {
        floats_store<T, S>(p, b, across, r);
        return;
    }
    __syncthreads();
    floats_put<S>(reinterpret_cast<float *>(shared), across, along, r);
    __syncthreads();
    attention_merge<T, S>(p, b, reinterpret_cast<float *>(shared), all.rank);
}

#endif
