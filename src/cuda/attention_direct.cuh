/* attention_direct.cuh - attention of a few rows on tensor cores: keys and values go from memory straight into
   registers.

   A block has the rows of one sequence and one head of k, as in attention_tile.cuh, and a part of the keys, of which
   its warps take UNITS units of 16 in turn. Keys and values are the 16-row operand, rows of q the 8 columns: scores
   are k . q^T, and the sum is v^T . weights^T. Which elements stand where in an operand does not matter as long as
   both operands agree, so that a lane loads 16 neighbouring bytes. Lane 4 g + t has those of keys g and g + 8; of
   values it has columns that follow from g, of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. The keys of the next step are
   loaded once the scores are there, its values once they are weighed. No shared memory is needed before the warps'
   sums are merged: the next kernel may have it. */
#ifndef ADZE_CUDA_ATTENTION_DIRECT_CUH
#define ADZE_CUDA_ATTENTION_DIRECT_CUH

#include "attention_tile.cuh"

template <int D_, int TILES_, int UNITS_, int WARPS, weight_format FORMAT_ = OF_X>
struct direct_attention {
    static constexpr int D = D_, TILES = TILES_, UNITS = UNITS_, ALONG = WARPS, THREADS = 32 * WARPS;
    static constexpr weight_format FORMAT = FORMAT_;
    static constexpr bool QUANTISED = FORMAT != OF_X;
    static constexpr int ELEMENT = QUANTISED ? 1 : 2, VECTOR = 16 / ELEMENT; /* bytes of one; elements of a vector */
    static constexpr int ROWS = 8 * TILES, KEYS = 16 * UNITS;
    static constexpr int CHUNKS = D / (4 * VECTOR), SPANS = D / (8 * VECTOR); /* a lane's vectors of a key, a value */
    static constexpr int COLUMN_TILES = D / 16;
    static constexpr int MERGE_PITCH = D + 4, SHARED = ALONG * ROWS * MERGE_PITCH * 4;
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
/* Where a unit is: its pages have a multiple of 16 keys. */
__device__ __forceinline__ attention_place direct_place(const attention_params &p, const attention_block &b, int key)
{
    return p.page && key >= b.high ? attention_place{-1, 0} : attention_place_of(p, b.s, b.sequence, key);
}
template <class S>
__device__ __forceinline__ void direct_load_keys(const attention_params &p, const attention_block &b, int key,
                                                 direct_keys<S> &to)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    to.missing = 0;
#pragma unroll
    for (int u = 0; u < S::UNITS; u++) {
        const attention_place place = direct_place(p, b, key + u * 16);
        if (place.entry < 0)
            to.missing |= 1u << u;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = h * 8 + g;
            const bool there = place.entry >= 0 && key + u * 16 + row < b.high;
            const attention_place at = {place.entry, place.row + row};
            const char *const from = p.k + (attention_at(p.k_stride, at, b.kv_head) + t * S::VECTOR) * S::ELEMENT;
#pragma unroll
            for (int c = 0; c < S::CHUNKS; c++)
                to.k[u][h][c] = load_passing(from + c * 64, there && (4 * c + t) * S::VECTOR < p.d);
            if constexpr (S::QUANTISED) {
                to.k_scale[u][h] = to.v_scale[u][h] = 1;
                if (there && p.k_scale_each)
                    to.k_scale[u][h] = p.k_scale[attention_at(p.k_scale_stride, at, b.kv_head)];
                if (there && p.v_scale_each)
                    to.v_scale[u][h] = p.v_scale[attention_at(p.v_scale_stride, at, b.kv_head)];
            }
        }
    }
}
template <class S>
__device__ __forceinline__ void direct_load_values(const attention_params &p, const attention_block &b, int key,
                                                   direct_keys<S> &to)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
#pragma unroll
    for (int u = 0; u < S::UNITS; u++) {
        const attention_place place = direct_place(p, b, key + u * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = i / 2 * 8 + 2 * t + i % 2;
            const bool there = place.entry >= 0 && key + u * 16 + row < b.high;
            const attention_place at = {place.entry, place.row + row};
            const char *const from = p.v + (attention_at(p.v_stride, at, b.kv_head) + g * S::VECTOR) * S::ELEMENT;
#pragma unroll
            for (int c = 0; c < S::SPANS; c++)
                to.v[u][i][c] = load_passing(from + c * 128, there && (8 * c + g) * S::VECTOR < p.dv);
        }
    }
}

/* A warp's rows of q, in the order of the keys' elements, and what it has summed: lane 4 g + t has rows 2 t and
   2 t + 1, and of a tile of 16 columns those that direct_column says. The maximum may be behind by LAZY. */
template <class S>
struct direct_rows {
    static constexpr float LAZY = 8;
    uint4 q[S::TILES][S::CHUNKS * S::VECTOR / 8];
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
    __device__ __forceinline__ void load_q(const attention_params &p, const attention_block &b)
    {
        const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
#pragma unroll
        for (int r = 0; r < S::TILES; r++) {
            const int row = b.first + r * 8 + g;
            const bool there = row < b.rows;
            const int64_t query = b.s.first + (there ? row / p.group : 0), head = b.kv_head * p.group + row % p.group;
            const char *const from =
                p.q + (b.s.batch * p.q_stride[0] + head * p.q_stride[1] + query * p.q_stride[2]) * 2;
#pragma unroll
            for (int c = 0; c < S::CHUNKS * S::VECTOR / 8; c++) {
                const int column = c / (S::VECTOR / 8) * 4 * S::VECTOR + t * S::VECTOR + c % (S::VECTOR / 8) * 8;
                q[r][c] = weight_order<S::FORMAT>(load_passing(from + column * 2, there && column < p.d));
            }
        }
    }
    __device__ __forceinline__ void multiply(float even, float odd, int r)
    {
#pragma unroll
        for (int c = 0; c < S::COLUMN_TILES; c++)
            out[r][c][0] *= even, out[r][c][1] *= odd, out[r][c][2] *= even, out[r][c][3] *= odd;
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

template <typename T, class S, bool RARE>
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
                    weight_pairs<T, S::FORMAT, RARE>(word(low, w), 0, a[0]);
                    weight_pairs<T, S::FORMAT, RARE>(word(high, w), 0, a[1]);
                }
#pragma unroll
                for (int i = 0; i < S::TILES; i++) {
                    const uint4 &q = r.q[i][c * (S::VECTOR / 8) + w / 2];
                    mma<T>(score[u][i], a[0][0], a[1][0], a[0][1], a[1][1], word(q, w % 2 * 2),
                           word(q, w % 2 * 2 + 1));
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
#pragma unroll
            for (int u = 0; u < S::UNITS; u++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int at = key + u * 16 + h * 8 + g;
                    float &x = score[u][i][2 * h + e];
                    x = attention_score(p, scale, x);
                    if (at < low || at >= high || missing >> u & 1)
                        x = -INFINITY;
                    else if (p.mask_kind)
                        x = attention_masked<T>(p, mask + at, x);
                }
        }
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

/* Which keys of a sequence a block has: `steps` steps of KEYS from key `first` on. */
struct direct_part {
    int first, steps;
};
template <class S>
__device__ __forceinline__ direct_part direct_part_of(const attention_params &p, int low, int high, int rank)
{
    const int begin = low / S::KEYS * S::KEYS, all = high > begin ? (high - begin + S::KEYS - 1) / S::KEYS : 0;
    const int before = (int)((int64_t)all * rank / p.parts);
    return {begin + before * S::KEYS, (int)((int64_t)all * (rank + 1) / p.parts) - before};
}

/* Prefetches the first keys and values of a block into L2, while the kernel before may still run. Lengths and the
   block table may change meanwhile: here they only say what is likely needed. */
template <class S>
__device__ __forceinline__ void direct_prefetch(const attention_params &p, const attention_block &b, int rank)
{
    constexpr int MOST = 4 * S::THREADS; /* keys */
    if (p.k_offsets || p.window || (p.causal && p.m > 1))
        return;
    int high = p.n;
    if (p.lengths)
        high = between(((const volatile int32_t *)p.lengths)[b.sequence], 0, p.n);
    const direct_part part = direct_part_of<S>(p, 0, high, rank);
    for (int row = (int)threadIdx.x; row < MOST && row < part.steps * S::KEYS && part.first + row < high;
         row += S::THREADS) {
        attention_place at = {b.sequence, part.first + row};
        if (p.page) {
            const unsigned key = (unsigned)at.row, page = key / (unsigned)p.page;
            at.entry = ((const volatile int32_t *)p.block_table)[b.sequence * p.table_stride + page];
            at.row = (int)(key - page * (unsigned)p.page);
            if ((unsigned)at.entry >= (unsigned)p.pages)
                continue;
        }
        prefetch_row(p.k + attention_at(p.k_stride, at, b.kv_head) * S::ELEMENT, p.d * S::ELEMENT / 16);
        prefetch_row(p.v + attention_at(p.v_stride, at, b.kv_head) * S::ELEMENT, p.dv * S::ELEMENT / 16);
    }
}

/* Blocks: the parts of the keys, then tiles of rows; blockIdx.y has the sequence and the head of k. */
template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, 2) attention_direct(const __grid_constant__ attention_params p)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* older GPUs are never given it: adze_cuda_tensor_cores() */
    extern __shared__ __align__(128) char shared[];
    __shared__ attention_block b; /* the same for all threads: not in registers, of which a warp needs all */
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int rank = (int)blockIdx.x % p.parts;
    attention_block own;
    own.kv_head = (int)blockIdx.y % p.kv_heads, own.sequence = (int)blockIdx.y / p.kv_heads;
    pdl_launch_next();
    direct_prefetch<S>(p, own, rank);
    pdl_wait();
    own.s = attention_sequence_of(p, own.sequence);
    own.rows = own.s.m * p.group;
    own.first = (int)blockIdx.x / p.parts * S::ROWS;
    const int first_query = own.first / p.group, last_query = (min(own.first + S::ROWS, own.rows) - 1) / p.group;
    own.high = attention_high(p, own.s, last_query);
    const direct_part part = direct_part_of<S>(p, attention_low(p, own.s, first_query), own.high, rank);
    /* The keys that all rows see, before the mask. */
    const int inner_low = attention_low(p, own.s, last_query), inner_high = attention_high(p, own.s, first_query);
    if (threadIdx.x == 0)
        b = own;
    __syncthreads();
    const float scale = S::QUANTISED && !p.k_scale_each ? p.scale * *p.k_scale : p.scale;
    const bool plain = p.softcap == 0 && !p.mask_kind;

    direct_rows<S> r;
    direct_keys<S> keys;
    r.clear();
    int step = warp;
    if (step < part.steps) {
        direct_load_keys<S>(p, b, part.first + step * S::KEYS, keys);
        direct_load_values<S>(p, b, part.first + step * S::KEYS, keys);
    }
    r.load_q(p, b);
    for (; step < part.steps; step += S::ALONG) {
        const int key = part.first + step * S::KEYS, next = key + S::ALONG * S::KEYS;
        const bool more = step + S::ALONG < part.steps;
        float score[S::UNITS][S::TILES][4], v_scale[S::QUANTISED ? S::UNITS : 1][2];
        if (direct_rare<S>(keys.k))
            direct_scores<T, S, true>(keys, r, score);
        else
            direct_scores<T, S, false>(keys, r, score);
        const unsigned missing = keys.missing;
        if constexpr (S::QUANTISED) {
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
            direct_load_keys<S>(p, b, next, keys);
        direct_weigh<S>(r, score);
        if constexpr (S::QUANTISED)
            if (p.v_scale_each)
                direct_scale_weights<S>(v_scale, r, score);
        if (direct_rare<S>(keys.v))
            direct_values<T, S, true>(keys, score, r);
        else
            direct_values<T, S, false>(keys, score, r);
        if (more)
            direct_load_values<S>(p, b, next, keys);
    }

    const float of_values = !S::QUANTISED ? 1 : p.v_scale_each ? r.unit : *p.v_scale;
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
#endif
}

#endif
