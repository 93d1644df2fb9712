/* attention_tf32.cuh - attention of floats on tensor cores.

   A float is the sum of two TF32 numbers, `big`, to which it is rounded, and `small`, what is left. A product is then
   big * big + big * small + small * big: what small * small and the last bit of small would add is less than 2^-21 of
   it. Tensor cores cut their sums instead of rounding them. So chains of big * big are short and begin with 0, those
   of the small products have a sum of their own, and floats are added up as floats are.

   Blocks, rows, parts and buffers are those of attention_floats.cuh, warps those of attention_tile.cuh: each has rows
   of its own, and all keys. Of lane 4 g + t, k has elements 4 t to 4 t + 3 of each 16 of key g, and q the same of
   rows g and g + 8: which of them are multiplied together is the same for both. A lane's scores are of keys 2 t and
   2 t + 1 of each 8, which are then the elements t and t + 4 of the second product. Of the values it has
   TILES neighbouring columns, of each 8 TILES those from TILES g on, one for each of as many products, and gets the
   sums of 2 TILES columns from 2 TILES t on. */
#ifndef ADZE_CUDA_ATTENTION_TF32_CUH
#define ADZE_CUDA_ATTENTION_TF32_CUH

#include "attention_floats.cuh"

/* ACROSS warps have 16 * FRAGMENTS rows each. TILES is 2 or 4: more take more registers, and fewer loads. BLOCKS per
   SM bound the registers. */
template <int D_, int FRAGMENTS_, int ACROSS_, int KEYS_, int TILES_, int BLOCKS_>
struct tf32_shape {
    static constexpr bool CONVERTS = false, QUANTISED = false, ANYWHERE = true; /* rows of out lie at any address */
    static constexpr int D = D_, FRAGMENTS = FRAGMENTS_, ACROSS = ACROSS_, ALONG = 1, KEYS = KEYS_;
    static constexpr int ROWS = 16 * FRAGMENTS * ACROSS, THREADS = 32 * ACROSS, GROUPS = THREADS / 16;
    static constexpr int WARP_KEYS = KEYS, NT = KEYS / 8, TILES = TILES_, BLOCKS = BLOCKS_;
    static constexpr int ELEMENT = 4, STAGES = 2; /* as of floats_shape */
    static constexpr int CHAIN = 64;              /* products that tensor cores add up, at most */
    /* Floats of a row of q or k, and of v, in shared memory: what 8 lanes load at once is in different banks. */
    static constexpr int PITCH = D + 16, V_PITCH = D + 4;
    static constexpr int HOLDS = ((ROWS + KEYS) * PITCH + KEYS * V_PITCH) * 4;
    static constexpr int SHARED = HOLDS + 2 * KEYS * (int)sizeof(attention_place); /* places of two steps */
    static constexpr int MERGE_PITCH = D + 4, MERGE_BYTES = ROWS * MERGE_PITCH * 4;
    static_assert(D % 64 == 0 && (TILES == 2 || TILES == 4) && KEYS % 8 == 0 && KEYS <= CHAIN && KEYS <= THREADS, "");
    static_assert(MERGE_BYTES <= HOLDS && HOLDS % 16 == 0 && ROWS <= THREADS, "");
};

/* Both parts of a float. Tensor cores leave out the lower 13 bits of `small`. An infinity has a `small` of NaN, and
   some NaNs are 0 in `big`: their products are put right by tf32_rare. The largest floats, from 2^128 - 2^116 on,
   are taken as infinite. */
struct tf32_parts {
    uint32_t big, small;
};
__device__ __forceinline__ tf32_parts tf32_split(float x)
{
    const uint32_t big = (__float_as_uint(x) + 0x1000) & 0xffffe000u;
    return {big, __float_as_uint(x - __uint_as_float(big))};
}
/* Neighbouring floats of shared memory. */
__device__ __forceinline__ void tf32_load(const float *at, tf32_parts (&to)[4])
{
    const float4 x = *reinterpret_cast<const float4 *>(at);
    to[0] = tf32_split(x.x), to[1] = tf32_split(x.y), to[2] = tf32_split(x.z), to[3] = tf32_split(x.w);
}
__device__ __forceinline__ void tf32_load(const float *at, tf32_parts (&to)[2])
{
    const float2 x = *reinterpret_cast<const float2 *>(at);
    to[0] = tf32_split(x.x), to[1] = tf32_split(x.y);
}
/* Adds a . b to both sums. */
__device__ __forceinline__ void tf32_multiply(float (&big)[4], float (&small)[4], tf32_parts a0, tf32_parts a1,
                                              tf32_parts a2, tf32_parts a3, tf32_parts b0, tf32_parts b1)
{
    mma_tf32(small, a0.small, a1.small, a2.small, a3.small, b0.big, b1.big);
    mma_tf32(big, a0.big, a1.big, a2.big, a3.big, b0.big, b1.big);
    mma_tf32(small, a0.big, a1.big, a2.big, a3.big, b0.small, b1.small);
}
/* The sum of both, where a factor may be infinite or NaN: then the small products are NaN. They leave an infinite sum
   to the big ones, in which a NaN may be missing. */
__device__ __forceinline__ float tf32_rare(float big, float small, bool nan)
{
    return nan ? NAN : fabsf(small) < INFINITY ? big + small : big;
}

/* Adds to q . k of the warp's rows and keys the products of up to CHAIN elements. q and k are where the lane's first
   are. */
template <class S>
__device__ __forceinline__ void tf32_chain(const float *q, const float *k, int count,
                                           float (&big)[S::FRAGMENTS][S::NT][4],
                                           float (&small)[S::FRAGMENTS][S::NT][4])
{
#pragma unroll
    for (int c = 0; c < S::CHAIN; c += 16) {
        if (c >= count)
            break;
        tf32_parts x[S::FRAGMENTS][2][4];
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                tf32_load(q + (f * 16 + half * 8) * S::PITCH + c, x[f][half]);
#pragma unroll
        for (int j = 0; j < S::NT; j++) {
            tf32_parts y[4];
            tf32_load(k + j * 8 * S::PITCH + c, y);
#pragma unroll
            for (int e = 0; e < 4; e += 2)
#pragma unroll
                for (int f = 0; f < S::FRAGMENTS; f++)
                    tf32_multiply(big[f][j], small[f][j], x[f][0][e], x[f][1][e], x[f][0][e + 1], x[f][1][e + 1],
                                  y[e], y[e + 1]);
        }
    }
}
/* q . k of the warp's rows and keys. q is where its first row is. */
template <class S>
__device__ __forceinline__ void tf32_scores(const float *q, const float *k, int d,
                                            float (&score)[S::FRAGMENTS][S::NT][4])
{
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4, at = g * S::PITCH + 4 * t;
    float small[S::FRAGMENTS][S::NT][4] = {};
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
        for (int j = 0; j < S::NT; j++)
            score[f][j][0] = score[f][j][1] = score[f][j][2] = score[f][j][3] = 0;
    if constexpr (S::D <= S::CHAIN) {
        tf32_chain<S>(q + at, k + at, d, score, small);
    } else {
#pragma unroll 1
        for (int c = 0; c < d; c += S::CHAIN) {
            float big[S::FRAGMENTS][S::NT][4] = {};
            tf32_chain<S>(q + at + c, k + at + c, d - c, big, small);
#pragma unroll
            for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
                for (int j = 0; j < S::NT; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        score[f][j][e] += big[f][j][e];
        }
    }
    float all = 0;
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
        for (int j = 0; j < S::NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                all += small[f][j][e];
    uint32_t rows = 0, keys = 0; /* bits: of the lane's, those with a NaN */
    if (!(fabsf(all) < INFINITY)) {
#pragma unroll 1
        for (int c = 0; c < d; c++) {
#pragma unroll
            for (int i = 0; i < 2 * S::FRAGMENTS; i++)
                rows |= isnan(q[(i * 8 + g) * S::PITCH + c]) ? 1u << i : 0;
#pragma unroll
            for (int i = 0; i < 2 * S::NT; i++)
                keys |= isnan(k[(i / 2 * 8 + 2 * t + i % 2) * S::PITCH + c]) ? 1u << i : 0;
        }
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
            for (int j = 0; j < S::NT; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    score[f][j][e] = tf32_rare(score[f][j][e], small[f][j][e],
                                               rows >> (2 * f + e / 2) & 1 || keys >> (2 * j + e % 2) & 1);
    } else {
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
            for (int j = 0; j < S::NT; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    score[f][j][e] += small[f][j][e];
    }
}

/* Adds the values of all keys of the step, weighed. */
template <class S>
__device__ __forceinline__ void tf32_values(const float *v, int dv, attention_rows<S> &r,
                                            const float (&weight)[S::FRAGMENTS][S::NT][4])
{
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    constexpr int TILES = S::TILES, COLUMNS = 8 * TILES;
    const float *const at = v + 2 * t * S::V_PITCH + TILES * g;
    tf32_parts w[S::FRAGMENTS][S::NT][4];
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
        for (int j = 0; j < S::NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                w[f][j][e] = tf32_split(weight[f][j][e]);
#pragma unroll
    for (int c = 0; c < S::D / COLUMNS; c++) {
        if (c * COLUMNS >= dv)
            break;
        float big[S::FRAGMENTS][TILES][4] = {}, small[S::FRAGMENTS][TILES][4] = {};
#pragma unroll
        for (int j = 0; j < S::NT; j++) {
            tf32_parts even[TILES], odd[TILES];
            tf32_load(at + j * 8 * S::V_PITCH + c * COLUMNS, even);
            tf32_load(at + (j * 8 + 1) * S::V_PITCH + c * COLUMNS, odd);
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int f = 0; f < S::FRAGMENTS; f++)
                    tf32_multiply(big[f][i], small[f][i], w[f][j][0], w[f][j][2], w[f][j][1], w[f][j][3], even[i],
                                  odd[i]);
        }
        float all = 0;
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    all += small[f][i][e];
        if (!(fabsf(all) < INFINITY)) {
            uint32_t columns = 0; /* bits: of the lane's, those with a NaN */
#pragma unroll 1
            for (int key = 0; key < S::KEYS; key++)
#pragma unroll
                for (int i = 0; i < 2 * TILES; i++)
                    columns |= isnan(v[key * S::V_PITCH + c * COLUMNS + 2 * TILES * t + i]) ? 1u << i : 0;
#pragma unroll
            for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        big[f][i][e] = tf32_rare(big[f][i][e], small[f][i][e], columns >> (e % 2 * TILES + i) & 1);
                        small[f][i][e] = 0;
                    }
        }
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    r.out[f][TILES * c + i][e] += big[f][i][e] + small[f][i][e];
    }
}

/* The lane has pieces of 4 columns of its rows: where one of them begins, and its sums. */
template <class S>
__device__ __forceinline__ int tf32_column(int piece)
{
    const int t = (int)threadIdx.x % 4;
    return S::TILES == 4 ? piece / 2 * 32 + t * 8 + piece % 2 * 4 : piece * 16 + t * 4;
}
template <class S>
__device__ __forceinline__ float4 tf32_piece(const attention_rows<S> &r, int f, int half, int piece)
{
    const float(&a)[4] = r.out[f][2 * piece], (&b)[4] = r.out[f][2 * piece + 1];
    if constexpr (S::TILES == 2)
        return make_float4(a[2 * half], b[2 * half], a[2 * half + 1], b[2 * half + 1]);
    const int first = piece / 2 * 4, e = 2 * half + piece % 2;
    return make_float4(r.out[f][first][e], r.out[f][first + 1][e], r.out[f][first + 2][e], r.out[f][first + 3][e]);
}
/* Rows of which the block has all keys go from registers to memory; others into shared memory: a row of floats, its
   maximum and its sum. */
template <typename T, class S>
__device__ __forceinline__ void tf32_store(const attention_params &p, const attention_block &b, int warp_row,
                                           const attention_rows<S> &r)
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
            for (int n = 0; n < S::D / 16; n++) {
                const int column = tf32_column<S>(n);
                const float4 v = tf32_piece<S>(r, f, half, n);
                if (column < p.dv)
                    attention_store_four<true, T>(p, to.out + column, p.dv - column,
                                                  make_float4(v.x * total.inverse, v.y * total.inverse,
                                                              v.z * total.inverse, v.w * total.inverse));
            }
            if (p.lse && t == 0)
                p.lse[to.lse] = total.lse;
        }
}
template <class S>
__device__ __forceinline__ void tf32_put(float *parts, int warp_row, const attention_rows<S> &r)
{
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; f++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *const row = parts + (warp_row + f * 16 + half * 8 + g) * S::MERGE_PITCH;
#pragma unroll
            for (int n = 0; n < S::D / 16; n++)
                *reinterpret_cast<float4 *>(row + tf32_column<S>(n)) = tf32_piece<S>(r, f, half, n);
            if (t == 0)
                row[S::D] = r.top[f][half], row[S::D + 1] = r.sum[f][half];
        }
}

/* Zeros after the elements of `rows` rows, up to a multiple of EACH: what floats_copy_row leaves. */
template <class S, int EACH>
__device__ __forceinline__ void tf32_pad(float *to, int rows, int pitch, int count)
{
    const int first = (count + 3) / 4 * 4, last = (count + EACH - 1) / EACH * EACH;
    for (int row = (int)threadIdx.x; row < rows; row += S::THREADS)
        for (int c = first; c < last; c += 4)
            *reinterpret_cast<float4 *>(to + row * pitch + c) = make_float4(0, 0, 0, 0);
}

/* The grid is that of attention_tile. */
template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) attention_of_tf32(const __grid_constant__ attention_params p)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* older GPUs are never given it: adze_cuda_tensor_cores() */
    extern __shared__ __align__(128) char shared[];
    __shared__ attention_block b; /* the same for all threads, or for a warp: not in registers */
    __shared__ attention_warp warps[S::ACROSS];
    float *const q = reinterpret_cast<float *>(shared), *const k = q + S::ROWS * S::PITCH;
    float *const v = k + S::KEYS * S::PITCH;
    attention_place *const places = reinterpret_cast<attention_place *>(shared + S::HOLDS);
    floats_steps all;
    if (!floats_begin<T, S>(p, b, all))
        return;
    if (p.page) {
        attention_look_up<S>(p, b, all.first, places);
        attention_look_up<S>(p, b, all.first + S::KEYS, places + S::KEYS);
        __syncthreads();
    }
    if (all.count > 0) {
        tf32_pad<S, 16>(q, S::ROWS + S::KEYS, S::PITCH, p.d); /* k follows q */
        tf32_pad<S, 8 * S::TILES>(v, S::KEYS, S::V_PITCH, p.dv);
        floats_load_q<S>(p, b, q);
        floats_load<S>(p, b, p.k, p.k_stride, p.d, all.first, k, places);
        copy_commit();
        floats_load<S, S::V_PITCH>(p, b, p.v, p.v_stride, p.dv, all.first, v, places);
        copy_commit();
    }
    const int warp = (int)threadIdx.x / 32;
    const attention_warp &w = warps[warp];
    if (threadIdx.x % 32 == 0) /* while the copies are under way */
        warps[warp] = attention_warp_of<S>(p, b, warp * 16 * S::FRAGMENTS, 0);
    __syncwarp();
    attention_rows<S> r;
    r.clear();
    for (int i = 0; i < all.count; i++) {
        const int key = all.first + i * S::KEYS;
        const bool sees = key < w.high && key + S::KEYS > w.low;
        const attention_place *const here = places + i % 2 * S::KEYS, *const next = places + (i + 1) % 2 * S::KEYS;
        float score[S::FRAGMENTS][S::NT][4];
        copy_wait<1>(); /* the keys */
        __syncthreads();
        if (sees)
            tf32_scores<S>(q + w.row * S::PITCH, k, p.d, score);
        __syncthreads(); /* all have read the keys */
        if (i + 1 < all.count)
            floats_load<S>(p, b, p.k, p.k_stride, p.d, key + S::KEYS, k, next);
        copy_commit();
        if (sees)
            attention_weights<T, S>(p, b, w, here, key, r, score);
        copy_wait<1>(); /* the values */
        __syncthreads();
        if (sees)
            tf32_values<S>(v, p.dv, r, score);
        __syncthreads(); /* all have read the values, and where the keys are */
        if (i + 1 < all.count)
            floats_load<S, S::V_PITCH>(p, b, p.v, p.v_stride, p.dv, key + S::KEYS, v, next);
        copy_commit();
        if (p.page && i + 2 < all.count)
            attention_look_up<S>(p, b, key + 2 * S::KEYS, places + i % 2 * S::KEYS);
    }
    copy_wait<0>();
#    pragma unroll
    for (int f = 0; f < S::FRAGMENTS; f++)
#    pragma unroll
        for (int half = 0; half < 2; half++) {
            r.sum[f][half] += __shfl_xor_sync(~0u, r.sum[f][half], 1);
            r.sum[f][half] += __shfl_xor_sync(~0u, r.sum[f][half], 2);
        }
    if (p.parts == 1) {
        tf32_store<T, S>(p, b, w.row, r);
        return;
    }
    __syncthreads();
    tf32_put<S>(reinterpret_cast<float *>(shared), w.row, r);
    __syncthreads();
    attention_merge<T, S>(p, b, reinterpret_cast<float *>(shared), all.rank);
#endif
}

#endif
