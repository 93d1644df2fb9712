/* attention_step.cuh - what a warp of attention_tile.cuh does with the keys of a stage: scores, weights, and the
   values they weigh, on tensor cores. */
#ifndef ADZE_CUDA_ATTENTION_STEP_CUH
#define ADZE_CUDA_ATTENTION_STEP_CUH

#include "attention_load.cuh"
#include "attention_mask.cuh"

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

/* A warp's rows: what it has summed, and for each of a lane's rows g and g + 8 the maximum, which may be behind by
   LAZY, and its part of the sum. Weights are at most 2^LAZY then, and sums are scaled seldom. */
template <class S>
struct attention_rows {
    static constexpr int TILES = S::D / 8, CHUNKS = S::D / 16;
    static constexpr bool HELD = S::FRAGMENTS == 1 && S::ALONG > 1 && S::D <= 128; /* q stays in registers */
    static constexpr float LAZY = 8;
    float out[S::FRAGMENTS][TILES][4];
    float top[S::FRAGMENTS][2], sum[S::FRAGMENTS][2];
    uint32_t q[HELD ? CHUNKS : 1][4];
    float unit; /* of quantised values with scales of their own: a power of 2 that `out` is to be multiplied by */
    __device__ __forceinline__ void clear()
    {
        unit = 0;
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; f++) {
#pragma unroll
            for (int j = 0; j < TILES; j++)
                out[f][j][0] = out[f][j][1] = out[f][j][2] = out[f][j][3] = 0;
            top[f][0] = top[f][1] = -INFINITY;
            sum[f][0] = sum[f][1] = 0;
        }
    }
    __device__ __forceinline__ void multiply(float by)
    {
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
            for (int j = 0; j < TILES; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    out[f][j][e] *= by;
    }
};

/* Where a warp stands: its first row in the block, its first key in the stage, the keys that some of its rows see and
   those that all of them see, before the mask. */
struct attention_warp {
    int row, key;
    int low, high, inner_low, inner_high;
    float scale; /* of scores; with the scale of k, if it has one for all keys */
};

/* Lane 8 i + l of a warp gives ldmatrix the address of row l of matrix i. */
template <class S>
__device__ __forceinline__ uint32_t attention_q_at(uint32_t q, int warp_row) /* halves of rows, then of columns */
{
    const int lane = (int)threadIdx.x % 32, l = lane % 8, i = lane / 8;
    return q + (uint32_t)((warp_row + i % 2 * 8 + l) * S::PITCH + i / 2 * 16);
}

/* q . k of the warp's rows and keys. Where k is quantised, a matrix has 16 columns of 8 keys: a lane gets columns
   4 t to 4 t + 3 in two pairs, of which attention_order_q leaves q the same ones. */
template <typename T, class S>
__device__ __forceinline__ void attention_scores(uint32_t q, uint32_t stage, const attention_warp &w,
                                                 const attention_rows<S> &r,
                                                 float (&score)[S::FRAGMENTS][S::WARP_KEYS / 8][4])
{
    constexpr int NT = S::WARP_KEYS / 8, EACH = S::QUANTISED ? 2 : 1; /* chunks of 16 columns that one load has */
    const int lane = (int)threadIdx.x % 32, l = lane % 8, i = lane / 8;
    const uint32_t q_at = attention_q_at<S>(q, w.row);
    /* Halves of columns, or chunks of them; then of keys. */
    const uint32_t k_at = stage + (uint32_t)((w.key + i / 2 * 8 + l) * S::KEY_PITCH + i % 2 * 16);
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
        for (int j = 0; j < NT; j++)
            score[f][j][0] = score[f][j][1] = score[f][j][2] = score[f][j][3] = 0;
#pragma unroll
    for (int c = 0; c < S::D / 16; c += EACH) {
        uint32_t a[EACH][S::FRAGMENTS][4];
#pragma unroll
        for (int e = 0; e < EACH; e++)
#pragma unroll
            for (int f = 0; f < S::FRAGMENTS; f++)
                if constexpr (attention_rows<S>::HELD) {
#pragma unroll
                    for (int h = 0; h < 4; h++)
                        a[e][f][h] = r.q[c + e][h];
                } else {
                    load_matrices(a[e][f], q_at + (uint32_t)(f * 16 * S::PITCH + (c + e) * 32));
                }
#pragma unroll
        for (int j = 0; j < NT / 2; j++) {
            uint32_t k[4];
            load_matrices(k, k_at + (uint32_t)(j * 16 * S::KEY_PITCH + c * 16 * S::ELEMENT));
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                uint32_t low[2] = {k[0], k[1]}, high[2] = {k[2], k[3]};
                if constexpr (S::QUANTISED) {
                    weight_pairs<T, S::FORMAT>(k[e], 0, false, low);
                    weight_pairs<T, S::FORMAT>(k[2 + e], 0, false, high);
                }
#pragma unroll
                for (int f = 0; f < S::FRAGMENTS; f++) {
                    const uint32_t(&x)[4] = a[e][f];
                    mma<T>(score[f][2 * j], x[0], x[1], x[2], x[3], low[0], low[1]);
                    mma<T>(score[f][2 * j + 1], x[0], x[1], x[2], x[3], high[0], high[1]);
                }
            }
        }
    }
}

/* The scores of keys that not every row sees, or that a mask or softcap changes, in base 2. One thing is done after
   the other, and rows are opaque: else what depends on a row alone would take registers in every step. */
template <typename T, class S>
__device__ __forceinline__ void attention_edge(const attention_params &p, const attention_block &b,
                                               const attention_warp &w, const attention_place *places, bool missing,
                                               int key, float (&score)[S::FRAGMENTS][S::WARP_KEYS / 8][4])
{
    constexpr int NT = S::WARP_KEYS / 8;
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; f++)
        attention_scale(p, w.scale, reinterpret_cast<float(&)[4 * NT]>(score[f]));
    if (missing) {
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (places[w.key + j * 8 + 2 * t + e].entry < 0)
#pragma unroll
                    for (int f = 0; f < S::FRAGMENTS; f++)
                        score[f][j][e] = score[f][j][2 + e] = -INFINITY;
    }
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = (int)opaque((uint32_t)(b.first + w.row + f * 16 + half * 8 + g)), query = row / p.group;
            /* What the row sees, counted from the lane's first column. */
            const int first = key + 2 * t, low = attention_low(p, b.s, query) - first;
            const int high = (row < b.rows ? attention_high(p, b.s, query) : 0) - first;
            if (p.mask_kind) {
                const int its = min(row, b.rows - 1), head = b.kv_head * p.group + its % p.group;
                attention_mask_row<T, NT>(p, attention_mask_at(p, b.s.batch, head, its / p.group), key,
                                          [&](int j, int e) -> float & { return score[f][j][2 * half + e]; });
            }
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (j * 8 + e < low || j * 8 + e >= high)
                        score[f][j][2 * half + e] = -INFINITY;
        }
}

/* Scores, times `unit` in base 2, become weights; maxima and sums follow. */
template <class S>
__device__ __forceinline__ void attention_weigh(float unit, attention_rows<S> &r,
                                                float (&score)[S::FRAGMENTS][S::WARP_KEYS / 8][4])
{
    constexpr int NT = S::WARP_KEYS / 8;
    float top[S::FRAGMENTS][2];
    bool grows = false;
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = fmaxf(score[f][0][2 * half], score[f][0][2 * half + 1]);
#pragma unroll
            for (int j = 1; j < NT; j++)
                most = fmaxf(most, fmaxf(score[f][j][2 * half], score[f][j][2 * half + 1]));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2)) * unit;
            top[f][half] = most;
            grows |= most - r.top[f][half] > attention_rows<S>::LAZY;
        }
    if (__any_sync(~0u, grows)) {
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float next = fmaxf(r.top[f][half], top[f][half]);
                const float less = power_of_2(r.top[f][half] - (next == -INFINITY ? 0 : next));
                r.top[f][half] = next;
                r.sum[f][half] *= less;
#pragma unroll
                for (int j = 0; j < attention_rows<S>::TILES; j++)
                    r.out[f][j][2 * half] *= less, r.out[f][j][2 * half + 1] *= less;
            }
    }
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float base = r.top[f][half] == -INFINITY ? 0 : -r.top[f][half];
            float sum[2] = {0, 0};
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &x = score[f][j][2 * half + e];
                    x = power_of_2(fmaf(x, unit, base));
                    sum[e] += x;
                }
            r.sum[f][half] += sum[0] + sum[1];
        }
}

/* Multiplies the weights by the scales of their values, in units of a power of 2 that leaves the products in the
   range of f16. */
template <class S>
__device__ __forceinline__ void attention_scale_weights(const float *scales, attention_rows<S> &r,
                                                        float (&score)[S::FRAGMENTS][S::WARP_KEYS / 8][4])
{
    constexpr int NT = S::WARP_KEYS / 8;
    const int t = (int)threadIdx.x % 4;
    float2 scale[NT];
    float most = 0x1p-126f;
#pragma unroll
    for (int j = 0; j < NT; j++) {
        scale[j] = *reinterpret_cast<const float2 *>(scales + j * 8 + 2 * t);
        most = fmaxf(most, fmaxf(fabsf(scale[j].x), fabsf(scale[j].y)));
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float unit = __uint_as_float(min(__float_as_uint(most), 0x7effffffu) & 0x7f800000u);
    if (unit > r.unit) { /* in all lanes */
        r.multiply(r.unit / unit);
        r.unit = unit;
    }
    const float inverse = 1 / r.unit;
#pragma unroll
    for (int j = 0; j < NT; j++) {
        const float by[2] = {scale[j].x * inverse, scale[j].y * inverse};
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                score[f][j][e] *= by[e % 2];
    }
}

/* Adds the values, weighed. Where they are quantised, a matrix has 16 columns of 8 keys, and a lane gets columns 2 g
   and 2 g + 1 of keys 2 t and 2 t + 1: of the two tiles of 16 columns of `out` one has the even columns, the other
   the odd ones. */
template <typename T, class S>
__device__ __forceinline__ void attention_values(uint32_t stage, const attention_warp &w, attention_rows<S> &r,
                                                 float (&score)[S::FRAGMENTS][S::WARP_KEYS / 8][4])
{
    constexpr int EACH = S::QUANTISED ? 2 : 1; /* chunks of 16 columns that one load has */
    const int lane = (int)threadIdx.x % 32, l = lane % 8, i = lane / 8;
    /* Halves of keys, then halves of columns, or chunks of them. */
    const uint32_t v_at = stage + (uint32_t)((S::KEYS + w.key + i % 2 * 8 + l) * S::KEY_PITCH + i / 2 * 16);
#pragma unroll
    for (int j = 0; j < S::WARP_KEYS / 16; j++) {
        uint32_t a[S::FRAGMENTS][4];
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
            for (int h = 0; h < 4; h++)
                a[f][h] = pack_two<T>(score[f][2 * j + h / 2][h % 2 * 2], score[f][2 * j + h / 2][h % 2 * 2 + 1]);
#pragma unroll
        for (int c = 0; c < S::D / 16; c += EACH) {
            uint32_t v[4];
            load_transposed(v, v_at + (uint32_t)(j * 16 * S::KEY_PITCH + c * 16 * S::ELEMENT));
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                uint32_t low[2] = {v[0], v[2]}, high[2] = {v[1], v[3]}; /* keys 0 to 7, 8 to 15; of two tiles */
                if constexpr (S::QUANTISED) {
                    weight_pairs<T, S::FORMAT>(v[2 * e], 0, false, low);
                    weight_pairs<T, S::FORMAT>(v[2 * e + 1], 0, false, high);
                }
#pragma unroll
                for (int f = 0; f < S::FRAGMENTS; f++) {
                    mma<T>(r.out[f][2 * (c + e)], a[f][0], a[f][1], a[f][2], a[f][3], low[0], high[0]);
                    mma<T>(r.out[f][2 * (c + e) + 1], a[f][0], a[f][1], a[f][2], a[f][3], low[1], high[1]);
                }
            }
        }
    }
}

/* Scores of keys from `key` on, the warp's first in the sequence, become weights. */
template <typename T, class S>
__device__ __forceinline__ void attention_weights(const attention_params &p, const attention_block &b,
                                                  const attention_warp &w, const attention_place *places, int key,
                                                  attention_rows<S> &r,
                                                  float (&score)[S::FRAGMENTS][S::WARP_KEYS / 8][4])
{
    const int lane = (int)threadIdx.x % 32;
    bool missing = false; /* keys of pages that do not exist */
    if (p.page) {
#pragma unroll
        for (int n = 0; n < S::WARP_KEYS; n += 32)
            missing |= n + lane < S::WARP_KEYS && places[w.key + n + lane].entry < 0;
        missing = __any_sync(~0u, missing);
    }
    float unit = w.scale;
    if (p.softcap != 0 || p.mask_kind || missing || !(unit > 0) || key < w.inner_low ||
        key + S::WARP_KEYS > w.inner_high) {
        attention_edge<T, S>(p, b, w, places, missing, key, score);
        unit = 1;
    }
    attention_weigh<S>(unit, r, score);
}

/* One stage. `key` is the warp's first key in the sequence. */
template <typename T, class S>
__device__ __forceinline__ void
attention_step(const attention_params &p, const attention_block &b, const attention_warp &w, uint32_t q,
               uint32_t stage, const float *scales, const attention_place *places, int key, attention_rows<S> &r)
{
    constexpr int NT = S::WARP_KEYS / 8;
    const int t = (int)threadIdx.x % 4;
    float score[S::FRAGMENTS][NT][4];
    attention_scores<T, S>(q, stage, w, r, score);
    if (S::QUANTISED && p.k_scale_each) {
#pragma unroll
        for (int j = 0; j < NT; j++) {
            const float2 scale = *reinterpret_cast<const float2 *>(scales + w.key + j * 8 + 2 * t);
#pragma unroll
            for (int f = 0; f < S::FRAGMENTS; f++) {
                score[f][j][0] *= scale.x, score[f][j][2] *= scale.x;
                score[f][j][1] *= scale.y, score[f][j][3] *= scale.y;
            }
        }
    }
    attention_weights<T, S>(p, b, w, places, key, r, score);
    if (S::QUANTISED && p.v_scale_each)
        attention_scale_weights<S>(scales + S::KEYS + w.key, r, score);
    attention_values<T, S>(stage, w, r, score);
}

#endif
