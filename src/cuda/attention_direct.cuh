/* attention_direct.cuh - a step of attention of a few rows on tensor cores: keys and values go from memory straight
   into registers.

   A warp has the rows of one sequence and one head of k, and takes UNITS units of 16 keys at a time. Keys and values
   are the 16-row operand, rows of q the 8 columns: scores are k . q^T, and the sum is v^T . weights^T. Which elements
   stand where in an operand does not matter as long as both operands agree, so that a lane loads 16 neighbouring
   bytes. Lane 4 g + t has those of keys g and g + 8; of values it has columns that follow from g, of keys 2 t,
   2 t + 1, 2 t + 8 and 2 t + 9. The keys of the next step are loaded once the scores are there, its values once they
   are weighed. attention_cluster.cuh has the kernel. */
#ifndef ADZE_CUDA_ATTENTION_DIRECT_CUH
#define ADZE_CUDA_ATTENTION_DIRECT_CUH

#include "attention_tile.cuh"

/* BLOCKS are resident on a multiprocessor: they bound the registers. */
template <int D_, int TILES_, int UNITS_, int WARPS, int BLOCKS_, weight_format FORMAT_ = OF_X>
struct direct_attention {
    static constexpr int D = D_, TILES = TILES_, UNITS = UNITS_, ALONG = WARPS, THREADS = 32 * WARPS;
    static constexpr int BLOCKS = BLOCKS_;
    static constexpr weight_format FORMAT = FORMAT_;
    static constexpr bool QUANTISED = FORMAT != OF_X, ANYWHERE = false;      /* rows of out are whole vectors */
    static constexpr int ELEMENT = QUANTISED ? 1 : 2, VECTOR = 16 / ELEMENT; /* bytes of one; elements of a vector */
    static constexpr int ROWS = 8 * TILES, KEYS = 16 * UNITS;
    static constexpr int CHUNKS = D / (4 * VECTOR), SPANS = D / (8 * VECTOR); /* a lane's vectors of a key, a value */
    static constexpr int COLUMN_TILES = D / 16;
    static constexpr int MERGE_PITCH = D + 4, SHARED = ALONG * ROWS * MERGE_PITCH * 4;
    static constexpr int Q_VECTORS = CHUNKS * VECTOR / 8; /* a lane's, of 16 bytes, of a row of q */
    static constexpr bool Q_SHARED = D > 128;             /* they are in shared memory: registers have no room */
    static constexpr int Q_BYTES = Q_SHARED ? TILES * Q_VECTORS * THREADS * 16 : 0;
    static_assert(CHUNKS > 0 && SPANS > 0 && SPANS * VECTOR / 2 == COLUMN_TILES, "");
};

/* 16 bytes that are read once; kernels before this one may have written them. */
__device__ __forceinline__ uint4 load_passing(const char *from, bool there)
{
    uint4 v = make_uint4(0, 0, 0, 0);
    if (there)
#if __CUDA_ARCH__ >= 800
        asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(from));
#else
        v = *reinterpret_cast<const uint4 *>(from);
#endif
    return v;
}
/* Lane 4 g + t gives columns 2 t and 2 t + 1 of row g of an 8 x 8 matrix, and gets rows 2 t and 2 t + 1 of column g.
 */
__device__ __forceinline__ uint32_t transposed(uint32_t v)
{
#if __CUDA_ARCH__ >= 750
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(v));
#endif
    return v;
}
__device__ __forceinline__ uint32_t word(const uint4 &v, int i)
{
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/* The keys and values of a step, and of quantised ones their scales: of keys g and g + 8 of each unit. */
template <class S>
struct direct_keys {
    uint4 k[S::UNITS][2][S::CHUNKS], v[S::UNITS][4][S::SPANS];
    float k_scale[S::QUANTISED ? S::UNITS : 1][2], v_scale[S::QUANTISED ? S::UNITS : 1][2];
    unsigned missing; /* bit u: unit u is of a page that does not exist */
};
/* A lane's first vector of key 0, and of its value, or of those of page 0. */
struct direct_source {
    const char *k, *v;
};
template <class S>
__device__ __forceinline__ direct_source direct_source_of(const attention_params &p, const attention_block &b)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const attention_place begin = p.page ? attention_place{0, 0} : attention_place{b.s.key_batch, b.s.first_key};
    const attention_place k = {begin.entry, begin.row + g}, v = {begin.entry, begin.row + 2 * t};
    return {p.k + (attention_at(p.k_stride, k, b.kv_head) + t * S::VECTOR) * S::ELEMENT,
            p.v + (attention_at(p.v_stride, v, b.kv_head) + g * S::VECTOR) * S::ELEMENT};
}
/* How far from there a unit begins, in elements: pages have a multiple of 16 keys. */
struct direct_unit {
    int64_t at;
    bool there; /* not of a page that does not exist */
};
__device__ __forceinline__ direct_unit direct_unit_of(const attention_params &p, const attention_block &b,
                                                      const int64_t (&stride)[3], int key)
{
    if (!p.page)
        return {key * stride[2], true};
    if (key >= b.high)
        return {0, false};
    const attention_place place = attention_place_of(p, b.s, b.sequence, key);
    return {place.entry * stride[0] + place.row * stride[2], place.entry >= 0};
}
/* The scales of keys g and g + 8 of a unit, or of their values. */
__device__ __forceinline__ void direct_load_scales(const attention_params &p, const attention_block &b,
                                                   const float *from, const int64_t (&stride)[3], int key, bool there,
                                                   float (&scale)[2])
{
    const int g = (int)threadIdx.x % 32 / 4;
    scale[0] = scale[1] = 1;
    if (!there)
        return;
    const attention_place unit = attention_place_of(p, b.s, b.sequence, key);
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (key + h * 8 + g < b.high)
            scale[h] = from[attention_at(stride, {unit.entry, unit.row + h * 8 + g}, b.kv_head)];
}
/* Loads the keys from `key` on. Most steps are whole: their loads have no conditions. */
template <class S>
__device__ __forceinline__ void direct_load_keys(const attention_params &p, const attention_block &b,
                                                 const direct_source &from, int key, direct_keys<S> &to)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const int64_t eight = 8 * p.k_stride[2] * S::ELEMENT;
    const bool whole = p.d == S::D && p.dv == S::D && key + S::KEYS <= b.high;
    to.missing = 0;
#pragma unroll
    for (int u = 0; u < S::UNITS; u++) {
        const direct_unit unit = direct_unit_of(p, b, p.k_stride, key + u * 16);
        const char *const at = from.k + unit.at * S::ELEMENT;
        if (!unit.there)
            to.missing |= 1u << u;
        if (whole && unit.there) {
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int c = 0; c < S::CHUNKS; c++)
                    to.k[u][h][c] = load_passing(at + h * eight + c * 64, true);
        } else {
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int c = 0; c < S::CHUNKS; c++)
                    to.k[u][h][c] =
                        load_passing(at + h * eight + c * 64, unit.there && key + u * 16 + h * 8 + g < b.high &&
                                                                  (4 * c + t) * S::VECTOR < p.d);
        }
        if constexpr (S::QUANTISED)
            direct_load_scales(p, b, p.k_scale, p.k_scale_stride, key + u * 16, unit.there && p.k_scale_each,
                               to.k_scale[u]);
    }
}
template <class S>
__device__ __forceinline__ void direct_load_values(const attention_params &p, const attention_block &b,
                                                   const direct_source &from, int key, direct_keys<S> &to)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const int64_t one = p.v_stride[2] * S::ELEMENT;
    const bool whole = p.d == S::D && p.dv == S::D && key + S::KEYS <= b.high;
#pragma unroll
    for (int u = 0; u < S::UNITS; u++) {
        const direct_unit unit = direct_unit_of(p, b, p.v_stride, key + u * 16);
        const char *const at = from.v + unit.at * S::ELEMENT;
        if (whole && unit.there) {
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int c = 0; c < S::SPANS; c++)
                    to.v[u][i][c] = load_passing(at + (i / 2 * 8 + i % 2) * one + c * 128, true);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int c = 0; c < S::SPANS; c++) {
                    const int row = i / 2 * 8 + i % 2;
                    to.v[u][i][c] =
                        load_passing(at + row * one + c * 128, unit.there && key + u * 16 + row + 2 * t < b.high &&
                                                                   (8 * c + g) * S::VECTOR < p.dv);
                }
        }
        if constexpr (S::QUANTISED)
            direct_load_scales(p, b, p.v_scale, p.v_scale_stride, key + u * 16, unit.there && p.v_scale_each,
                               to.v_scale[u]);
    }
}
/* Of keys that were loaded before the length was known: values from the last key on are zeros and have no scales, as
   they have no weight, but 0 times infinity were not 0. */
template <class S>
__device__ __forceinline__ void direct_clip(const attention_block &b, int key, direct_keys<S> &keys)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
#pragma unroll
    for (int u = 0; u < S::UNITS; u++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (key + u * 16 + i / 2 * 8 + 2 * t + i % 2 >= b.high)
#pragma unroll
                for (int c = 0; c < S::SPANS; c++)
                    keys.v[u][i][c] = make_uint4(0, 0, 0, 0);
        if constexpr (S::QUANTISED)
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (key + u * 16 + h * 8 + g >= b.high)
                    keys.v_scale[u][h] = 1;
    }
}

/* A warp's rows of q, in the order of the keys' elements, and what it has summed: lane 4 g + t has rows 2 t and
   2 t + 1, and of a tile of 16 columns those that direct_column says. The maximum may be behind by LAZY. */
template <class S>
struct direct_rows {
    static constexpr float LAZY = 8;
    uint4 q[S::TILES][S::Q_SHARED ? 1 : S::Q_VECTORS];
    uint32_t q_at; /* where a lane's q is in shared memory, neighbouring vectors apart by those of all threads */
    float out[S::TILES][S::COLUMN_TILES][4];
    float top[S::TILES][2], sum[S::TILES][2];
    float unit; /* of quantised values with scales of their own: a power of 2 that `out` is to be multiplied by */
    __device__ __forceinline__ void clear()
    {
        unit = 0;
#pragma unroll
        for (int r = 0; r < S::TILES; r++) {
#pragma unroll
            for (int c = 0; c < S::COLUMN_TILES; c++)
                out[r][c][0] = out[r][c][1] = out[r][c][2] = out[r][c][3] = 0;
            top[r][0] = top[r][1] = -INFINITY;
            sum[r][0] = sum[r][1] = 0;
        }
    }
    __device__ __forceinline__ void multiply(float even, float odd, int r)
    {
#pragma unroll
        for (int c = 0; c < S::COLUMN_TILES; c++)
            out[r][c][0] *= even, out[r][c][1] *= odd, out[r][c][2] *= even, out[r][c][3] *= odd;
    }
    __device__ __forceinline__ uint4 q_of(int r, int c) const
    {
        if constexpr (S::Q_SHARED) {
            uint4 v;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "r"(q_at + (uint32_t)((r * S::Q_VECTORS + c) * S::THREADS * 16)));
            return v;
        } else {
            return q[r][c];
        }
    }
    /* Lanes have sums of their own keys. */
    __device__ __forceinline__ float row_sum(int r, int e) const
    {
        float all = sum[r][e];
#pragma unroll
        for (int d = 4; d < 32; d *= 2)
            all += __shfl_xor_sync(~0u, all, d);
        return all;
    }
};
/* Elements 0 and 1 of a lane's tile of `out` are this column of its two rows, elements 2 and 3 the next one. */
template <class S>
__device__ __forceinline__ int direct_column(int tile)
{
    const int g = (int)threadIdx.x % 32 / 4;
    constexpr int EACH = S::VECTOR / 2; /* tiles of a span */
    return tile / EACH * 8 * S::VECTOR + g * S::VECTOR + tile % EACH * 2;
}

/* Whether a vector of the step's has a NaN of f8e4m3, in any lane. */
template <class S, int A, int B, int C>
__device__ __forceinline__ bool direct_rare(const uint4 (&v)[A][B][C])
{
    bool rare = false;
    if constexpr (S::FORMAT == OF_F8) {
#pragma unroll
        for (int i = 0; i < A * B * C; i++)
            rare |= f8_nan(v[i / (B * C)][i / C % B][i % C]);
        rare = __any_sync(~0u, rare);
    }
    return rare;
}

template <typename T, class S>
__device__ __forceinline__ void direct_scores(const direct_keys<S> &keys, const direct_rows<S> &r,
                                              float (&score)[S::UNITS][S::TILES][4])
{
#pragma unroll
    for (int u = 0; u < S::UNITS; u++)
#pragma unroll
        for (int i = 0; i < S::TILES; i++)
            score[u][i][0] = score[u][i][1] = score[u][i][2] = score[u][i][3] = 0;
#pragma unroll
    for (int c = 0; c < S::CHUNKS; c++)
#pragma unroll
        for (int w = 0; w < (S::QUANTISED ? 4 : 2); w++)
#pragma unroll
            for (int u = 0; u < S::UNITS; u++) {
                const uint4 &low = keys.k[u][0][c], &high = keys.k[u][1][c];
                uint32_t a[2][2] = {{word(low, 2 * w % 4), word(low, (2 * w + 1) % 4)},
                                    {word(high, 2 * w % 4), word(high, (2 * w + 1) % 4)}};
                if constexpr (S::QUANTISED) {
                    weight_pairs<T, S::FORMAT, false>(word(low, w), 0, a[0]);
                    weight_pairs<T, S::FORMAT, false>(word(high, w), 0, a[1]);
                }
#pragma unroll
                for (int i = 0; i < S::TILES; i++) {
                    const uint4 q = r.q_of(i, c * (S::VECTOR / 8) + w / 2);
                    mma<T>(score[u][i], a[0][0], a[1][0], a[0][1], a[1][1], word(q, w % 2 * 2),
                           word(q, w % 2 * 2 + 1));
                }
            }
}

/* Keys that have a NaN, which direct_scores takes for a number: their scores are NaN. */
template <class S>
__device__ __forceinline__ void direct_rare_scores(const direct_keys<S> &keys, float (&score)[S::UNITS][S::TILES][4])
{
#pragma unroll
    for (int u = 0; u < S::UNITS; u++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            unsigned rare = 0;
#pragma unroll
            for (int c = 0; c < S::CHUNKS; c++)
                rare |= f8_nan(keys.k[u][h][c]);
            rare |= __shfl_xor_sync(~0u, rare, 1);
            rare |= __shfl_xor_sync(~0u, rare, 2);
#pragma unroll
            for (int i = 0; i < 2 * S::TILES; i++)
                if (rare)
                    score[u][i / 2][2 * h + i % 2] = __int_as_float(0x7fffffff);
        }
}

/* Prefetches into L2 the mask of all steps of a warp, which begin at `key`, `key + apart` and so on, below `end`. A
   step reads its mask after its keys have arrived, and without the prefetch waits for memory a second time. Rows that
   share a row of the mask prefetch it once. */
template <class S>
__device__ __forceinline__ void direct_prefetch_mask(const attention_params &p, const attention_block &b, int key,
                                                     int apart, int end)
{
    constexpr int SECTOR = 32;
    const int size = p.mask_kind == MASK_HIDES ? 1 : p.mask_kind == MASK_F32 ? 4 : 2, wide = SECTOR / size;
    const int each = (S::KEYS + wide - 1) / wide, rows = p.mask_stride[1] || p.mask_stride[2] ? b.rows : 1;
    for (int row = 0; row < rows; row++) {
        const int64_t from = attention_mask_at(p, b.s.batch, b.kv_head * p.group + row % p.group, row / p.group);
        for (int at = (int)threadIdx.x % 32;; at += 32) {
            const int column = key + at / each * apart + at % each * wide;
            if (column >= end)
                break;
            prefetch(p.mask + (from + column) * size);
        }
    }
}

/* Softcap, the mask, and the keys that a row does not see; scores are in base 2 before and after. */
template <typename T, class S>
__device__ __forceinline__ void direct_edge(const attention_params &p, const attention_block &b, int key,
                                            unsigned missing, float scale, float (&score)[S::UNITS][S::TILES][4])
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < S::TILES; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = (int)opaque((uint32_t)(b.first + i * 8 + 2 * t + e)), query = row / p.group;
            const int low = attention_low(p, b.s, query), high = row < b.rows ? attention_high(p, b.s, query) : 0;
            const int64_t head = b.kv_head * p.group + row % p.group;
            const int64_t mask = b.s.batch * p.mask_stride[0] + head * p.mask_stride[1] + query * p.mask_stride[2];
            const auto where = [&](int n) { return key + n / 2 * 16 + n % 2 * 8 + g; };
            const auto seen = [&](int n) { return where(n) >= low && where(n) < high && !(missing >> n / 2 & 1); };
            const auto its = [&](int n) -> float & { return score[n / 2][i][2 * (n % 2) + e]; };
#pragma unroll
            for (int n = 0; n < 2 * S::UNITS; n++)
                its(n) = attention_score(p, scale, its(n));
            if (p.mask_kind)
                attention_mask<T, 2 * S::UNITS>(p, mask, where, seen, its);
#pragma unroll
            for (int n = 0; n < 2 * S::UNITS; n++)
                its(n) = seen(n) ? its(n) : -INFINITY;
        }
}

/* Scores in base 2. `inner`: every row sees all keys of the step, and nothing but the scale changes its scores. */
template <typename T, class S>
__device__ __forceinline__ void direct_scale(const attention_params &p, const attention_block &b, int key,
                                             unsigned missing, bool inner, float scale,
                                             float (&score)[S::UNITS][S::TILES][4])
{
    if (!inner || missing) {
        direct_edge<T, S>(p, b, key, missing, scale, score);
        return;
    }
#pragma unroll
    for (int u = 0; u < S::UNITS; u++)
#pragma unroll
        for (int i = 0; i < S::TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                score[u][i][e] *= scale;
}

/* Scores become weights; maxima and sums follow. */
template <class S>
__device__ __forceinline__ void direct_weigh(direct_rows<S> &r, float (&score)[S::UNITS][S::TILES][4])
{
    float top[S::TILES][2];
    bool grows = false;
#pragma unroll
    for (int i = 0; i < S::TILES; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float most = fmaxf(score[0][i][e], score[0][i][2 + e]);
#pragma unroll
            for (int u = 1; u < S::UNITS; u++)
                most = fmaxf(most, fmaxf(score[u][i][e], score[u][i][2 + e]));
#pragma unroll
            for (int d = 4; d < 32; d *= 2)
                most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
            top[i][e] = most;
            grows |= most - r.top[i][e] > direct_rows<S>::LAZY;
        }
    if (__any_sync(~0u, grows)) {
#pragma unroll
        for (int i = 0; i < S::TILES; i++) {
            float less[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float next = fmaxf(r.top[i][e], top[i][e]);
                less[e] = power_of_2(r.top[i][e] - (next == -INFINITY ? 0 : next));
                r.top[i][e] = next;
                r.sum[i][e] *= less[e];
            }
            r.multiply(less[0], less[1], i);
        }
    }
#pragma unroll
    for (int i = 0; i < S::TILES; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float base = r.top[i][e] == -INFINITY ? 0 : r.top[i][e];
#pragma unroll
            for (int u = 0; u < S::UNITS; u++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float &x = score[u][i][2 * h + e];
                    x = power_of_2(x - base);
                    r.sum[i][e] += x;
                }
        }
}

/* Multiplies the weights by the scales of their values, in units of a power of 2 that leaves the products in the
   range of f16. */
template <class S>
__device__ __forceinline__ void direct_scale_weights(const float (&scale)[S::UNITS][2], direct_rows<S> &r,
                                                     float (&score)[S::UNITS][S::TILES][4])
{
    float most = 0x1p-126f;
#pragma unroll
    for (int u = 0; u < S::UNITS; u++)
        most = fmaxf(most, fmaxf(fabsf(scale[u][0]), fabsf(scale[u][1])));
#pragma unroll
    for (int d = 4; d < 32; d *= 2)
        most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
    const float unit = __uint_as_float(min(__float_as_uint(most), 0x7effffffu) & 0x7f800000u);
    if (unit > r.unit) { /* in all lanes */
#pragma unroll
        for (int i = 0; i < S::TILES; i++)
            r.multiply(r.unit / unit, r.unit / unit, i);
        r.unit = unit;
    }
    const float inverse = 1 / r.unit;
#pragma unroll
    for (int u = 0; u < S::UNITS; u++)
#pragma unroll
        for (int i = 0; i < S::TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                score[u][i][e] *= scale[u][e / 2] * inverse;
}

template <typename T, class S, bool RARE>
__device__ __forceinline__ void direct_values(const direct_keys<S> &keys, float (&score)[S::UNITS][S::TILES][4],
                                              direct_rows<S> &r)
{
#pragma unroll
    for (int u = 0; u < S::UNITS; u++) {
        uint32_t weights[S::TILES][2];
#pragma unroll
        for (int i = 0; i < S::TILES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                weights[i][h] = transposed(pack_two<T>(score[u][i][2 * h], score[u][i][2 * h + 1]));
#pragma unroll
        for (int c = 0; c < S::COLUMN_TILES; c++) {
            constexpr int EACH = S::VECTOR / 2, OF_WORD = EACH / 4; /* tiles of a span, of a word */
            const int span = c / EACH, w = c % EACH / OF_WORD;
            uint32_t a[2][2]; /* of keys 2 t and 2 t + 1, of 2 t + 8 and 2 t + 9: a column, and the next one */
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint32_t x = word(keys.v[u][2 * h][span], w), y = word(keys.v[u][2 * h + 1][span], w);
                if constexpr (S::QUANTISED) {
                    weight_pairs<T, S::FORMAT, RARE>(__byte_perm(x, y, c % 2 ? 0x7632 : 0x5410), 0, a[h]);
                } else {
                    a[h][0] = __byte_perm(x, y, 0x5410);
                    a[h][1] = __byte_perm(x, y, 0x7632);
                }
            }
#pragma unroll
            for (int i = 0; i < S::TILES; i++)
                mma<T>(r.out[i][c], a[0][0], a[0][1], a[1][0], a[1][1], weights[i][0], weights[i][1]);
        }
    }
}

/* Puts the sums of a warp where attention_merge finds them. */
template <class S>
__device__ __forceinline__ void direct_put(const direct_rows<S> &r, float of_values, int warp, float *parts)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < S::TILES; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float sum = r.row_sum(i, e);
            float *const row = parts + (warp * S::ROWS + i * 8 + 2 * t + e) * S::MERGE_PITCH;
#pragma unroll
            for (int c = 0; c < S::COLUMN_TILES; c++)
                *reinterpret_cast<float2 *>(row + direct_column<S>(c)) =
                    make_float2(r.out[i][c][e] * of_values, r.out[i][c][2 + e] * of_values);
            if (g == 0)
                row[S::D] = r.top[i][e], row[S::D + 1] = sum;
        }
}

#endif
