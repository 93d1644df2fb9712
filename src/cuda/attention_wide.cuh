/* attention_wide.cuh - attention of 16-bit elements in long rows on tensor cores: up to 576 of q and k, 512 of v.

   Blocks, rows and parts are those of attention_tile.cuh. The sums of a row are too many for one warp: a warp has the
   scores of 16 rows and 16 keys, and then COLUMNS columns of the values of all rows. Maxima, and what the sums are to
   be multiplied by when they grow, pass through shared memory, as the weights do. A step has one buffer for keys and
   one for values: the next keys come while values are summed, the next values while scores are. */
#ifndef ADZE_CUDA_ATTENTION_WIDE_CUH
#define ADZE_CUDA_ATTENTION_WIDE_CUH

#include "attention_tile.cuh"

template <int ROWS_, int KEYS_>
struct wide_shape {
    static constexpr int K_DIM = 576, D = 512, ROWS = ROWS_, KEYS = KEYS_, ALONG = 1; /* elements of k; of v */
    static constexpr int ROW_TILES = ROWS / 16, KEY_TILES = KEYS / 16, WARPS = ROW_TILES * KEY_TILES;
    static constexpr int THREADS = 32 * WARPS, COLUMNS = D / WARPS, CHUNKS = COLUMNS / 16;
    static constexpr int FRAGMENTS = 1, WARP_KEYS = 16; /* of a warp's scores: for attention_edge */
    static constexpr bool QUANTISED = false, ANYWHERE = false;
    /* Bytes of a row of q or k, of v, and of weights: 8 of them are in different banks. */
    static constexpr int PITCH = K_DIM * 2 + 16, V_PITCH = D * 2 + 16, WEIGHT_PITCH = KEYS * 2 + 16;
    static constexpr int K = ROWS * PITCH, V = K + KEYS * PITCH, WEIGHTS = V + KEYS * V_PITCH;
    static constexpr int TOPS = WEIGHTS + ROWS * WEIGHT_PITCH, LESS = TOPS + KEY_TILES * ROWS * 4;
    static constexpr int HOLDS = LESS + ROWS * 4, SHARED = HOLDS + 2 * KEYS * (int)sizeof(attention_place);
    static constexpr int LANES = 64, LOAD_ROWS = THREADS / LANES; /* threads of a row; rows that are copied at once */
    static constexpr int MERGE_PITCH = D + 4;
    static_assert(KEYS % LOAD_ROWS == 0 && KEYS <= THREADS && ROWS * MERGE_PITCH * 4 <= WEIGHTS, "");
};

/* Copies a row of `count` elements, or zeros if there is none; zeros up to a multiple of 16. LANES threads have it.
 */
template <class S>
__device__ __forceinline__ void wide_load_row(const char *row, int count, bool there, uint32_t to)
{
    for (int piece = (int)threadIdx.x % S::LANES; piece * 8 < (count + 15) / 16 * 16; piece += S::LANES)
        copy_async(to + (uint32_t)(piece * 16), there && piece * 8 < count ? row + piece * 16 : row,
                   there && piece * 8 < count);
}
template <class S>
__device__ __forceinline__ void wide_load_q(const attention_params &p, const attention_block &b, uint32_t to)
{
#pragma unroll 2
    for (int row = (int)threadIdx.x / S::LANES; row < S::ROWS; row += S::LOAD_ROWS) {
        const int r = b.first + row;
        const bool there = r < b.rows;
        const int i = there ? r / p.group : 0, head = b.kv_head * p.group + (there ? r % p.group : 0);
        const int64_t at =
            b.s.batch * p.q_stride[0] + head * p.q_stride[1] + (int64_t)(b.s.first + i) * p.q_stride[2];
        wide_load_row<S>(there ? p.q + at * 2 : p.q, p.d, there, to + (uint32_t)(row * S::PITCH));
    }
}
/* Copies the keys from `key` on, or their values, of rows of `count` elements. */
template <class S>
__device__ __forceinline__ void wide_load(const attention_params &p, const attention_block &b, const char *data,
                                          const int64_t (&stride)[3], int count, int key, uint32_t to, int pitch,
                                          const attention_place *places)
{
#pragma unroll 4
    for (int row = (int)threadIdx.x / S::LANES; row < S::KEYS; row += S::LOAD_ROWS) {
        attention_place place = {b.s.key_batch, b.s.first_key + key + row};
        bool there = key + row < b.high;
        if (p.page) {
            place = places[row];
            there = place.entry >= 0;
        }
        wide_load_row<S>(there ? data + attention_at(stride, place, b.kv_head) * 2 : data, count, there,
                         to + (uint32_t)(row * pitch));
    }
}

template <typename T, class S>
__device__ __forceinline__ void wide_scores(uint32_t q, uint32_t k, const attention_warp &w, int d,
                                            float (&score)[1][2][4])
{
    const int lane = (int)threadIdx.x % 32, l = lane % 8, i = lane / 8, chunks = (d + 15) / 16;
    const uint32_t q_at = attention_q_at<S>(q, w.row);
    const uint32_t k_at = k + (uint32_t)((w.key + i / 2 * 8 + l) * S::PITCH + i % 2 * 16);
#pragma unroll
    for (int e = 0; e < 8; e++)
        score[0][e / 4][e % 4] = 0;
#pragma unroll 4
    for (int c = 0; c < chunks; c++) {
        uint32_t a[4], x[4];
        load_matrices(a, q_at + (uint32_t)(c * 32));
        load_matrices(x, k_at + (uint32_t)(c * 32));
        mma<T>(score[0][0], a[0], a[1], a[2], a[3], x[0], x[1]);
        mma<T>(score[0][1], a[0], a[1], a[2], a[3], x[2], x[3]);
    }
}

/* Adds the values of all keys of the step, weighed, to the warp's columns from `column` on. */
template <typename T, class S>
__device__ __forceinline__ void wide_values(uint32_t weights, uint32_t v, int column, int dv,
                                            float (&out)[S::ROW_TILES][2 * S::CHUNKS][4])
{
    const int lane = (int)threadIdx.x % 32, l = lane % 8, i = lane / 8;
    const uint32_t a_at = weights + (uint32_t)((i % 2 * 8 + l) * S::WEIGHT_PITCH + i / 2 * 16);
    const uint32_t v_at = v + (uint32_t)((i % 2 * 8 + l) * S::V_PITCH + column * 2 + i / 2 * 16);
#pragma unroll
    for (int j = 0; j < S::KEY_TILES; j++) {
        uint32_t a[S::ROW_TILES][4];
#pragma unroll
        for (int f = 0; f < S::ROW_TILES; f++)
            load_matrices(a[f], a_at + (uint32_t)(f * 16 * S::WEIGHT_PITCH + j * 32));
#pragma unroll
        for (int c = 0; c < S::CHUNKS; c++) {
            if (column + c * 16 >= dv)
                break;
            uint32_t x[4];
            load_transposed(x, v_at + (uint32_t)(j * 16 * S::V_PITCH + c * 32));
#pragma unroll
            for (int f = 0; f < S::ROW_TILES; f++) {
                mma<T>(out[f][2 * c], a[f][0], a[f][1], a[f][2], a[f][3], x[0], x[1]);
                mma<T>(out[f][2 * c + 1], a[f][0], a[f][1], a[f][2], a[f][3], x[2], x[3]);
            }
        }
    }
}

/* A lane's columns of a row: to memory where the block has all keys, else to shared memory. */
template <typename T, class S>
__device__ __forceinline__ void wide_store(const attention_params &p, const attention_block &b, int row, int column,
                                           float top, float sum, const float (&out)[2 * S::CHUNKS][4], int half,
                                           float *parts)
{
    attention_target to;
    const int t = (int)threadIdx.x % 4;
    if (p.parts > 1) {
#pragma unroll
        for (int c = 0; c < 2 * S::CHUNKS; c++)
            *reinterpret_cast<float2 *>(parts + row * S::MERGE_PITCH + column + c * 8 + 2 * t) =
                make_float2(out[c][2 * half], out[c][2 * half + 1]);
        if (column == 0 && t == 0)
            parts[row * S::MERGE_PITCH + S::D] = top, parts[row * S::MERGE_PITCH + S::D + 1] = sum;
    } else if (attention_target_of(p, b, row, to)) {
        const attention_total total = attention_finish(top, sum, attention_sink<T>(p, to.head));
#pragma unroll
        for (int c = 0; c < 2 * S::CHUNKS; c++)
            if (column + c * 8 < p.dv)
                *reinterpret_cast<uint32_t *>((T *)p.out + to.out + column + c * 8 + 2 * t) =
                    pack_two<T>(out[c][2 * half] * total.inverse, out[c][2 * half + 1] * total.inverse);
        if (p.lse && column == 0 && t == 0)
            p.lse[to.lse] = total.lse;
    }
}

/* The grid is that of attention_tile. */
template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, 1) attention_wide(const __grid_constant__ attention_params p)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* older GPUs are never given it: adze_cuda_tensor_cores() */
    extern __shared__ __align__(128) char shared[];
    __shared__ attention_block b; /* the same for all threads: not in registers */
    const uint32_t q = shared_address(shared), k = q + S::K, v = q + S::V;
    float *const tops = reinterpret_cast<float *>(shared + S::TOPS), *const less = tops + S::KEY_TILES * S::ROWS;
    attention_place *const places = reinterpret_cast<attention_place *>(shared + S::HOLDS);
    const int warp = (int)threadIdx.x / 32, g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const int tile_of = warp / S::ROW_TILES, column = warp * S::COLUMNS; /* of keys; of the values */
    const int rank = (int)blockIdx.x % p.parts, at = (int)blockIdx.x / p.parts;
    attention_block own;
    own.kv_head = (int)blockIdx.y % p.kv_heads, own.sequence = (int)blockIdx.y / p.kv_heads;
    pdl_launch_next();
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
    const int steps = (int)((int64_t)all * (rank + 1) / p.parts) - before, first = begin + before * S::KEYS;
    const attention_warp w = attention_warp_of<S>(p, own, warp % S::ROW_TILES * 16, tile_of * 16);
    float out[S::ROW_TILES][2 * S::CHUNKS][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    if (p.page) {
        attention_look_up<S>(p, b, first, places);
        attention_look_up<S>(p, b, first + S::KEYS, places + S::KEYS);
        __syncthreads();
    }
    if (steps > 0) {
        wide_load_q<S>(p, b, q);
        wide_load<S>(p, b, p.k, p.k_stride, p.d, first, k, S::PITCH, places);
        copy_commit();
        wide_load<S>(p, b, p.v, p.v_stride, p.dv, first, v, S::V_PITCH, places);
        copy_commit();
    }
    for (int i = 0; i < steps; i++) {
        const int key = first + i * S::KEYS, warp_key = key + w.key;
        const attention_place *const here = places + i % 2 * S::KEYS, *const next = places + (i + 1) % 2 * S::KEYS;
        copy_wait<1>(); /* the keys */
        __syncthreads();
        float score[1][2][4];
        wide_scores<T, S>(q, k, w, p.d, score);
        if (p.page || p.softcap != 0 || p.mask_kind || warp_key < w.inner_low || warp_key + 16 > w.inner_high) {
            attention_edge<T, S>(p, b, w, here, p.page != 0, warp_key, score);
        } else {
#    pragma unroll
            for (int e = 0; e < 8; e++)
                score[0][e / 4][e % 4] *= p.scale;
        }
#    pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = fmaxf(fmaxf(score[0][0][2 * half], score[0][0][2 * half + 1]),
                               fmaxf(score[0][1][2 * half], score[0][1][2 * half + 1]));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            if (t == 0)
                tops[tile_of * S::ROWS + w.row + half * 8 + g] = most;
        }
        __syncthreads(); /* the maxima are there, and all have read the keys */
        if (i + 1 < steps)
            wide_load<S>(p, b, p.k, p.k_stride, p.d, key + S::KEYS, k, S::PITCH, next);
        copy_commit();
#    pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = w.row + half * 8 + g;
            float most = top[half];
#    pragma unroll
            for (int n = 0; n < S::KEY_TILES; n++)
                most = fmaxf(most, tops[n * S::ROWS + row]);
            const float base = most == -INFINITY ? 0 : most, shrinks = power_of_2(top[half] - base);
            top[half] = most;
            sum[half] *= shrinks;
            if (tile_of == 0 && t == 0)
                less[row] = shrinks;
#    pragma unroll
            for (int j = 0; j < 2; j++) {
                const float x = power_of_2(score[0][j][2 * half] - base);
                const float y = power_of_2(score[0][j][2 * half + 1] - base);
                sum[half] += x + y;
                *reinterpret_cast<uint32_t *>(shared + S::WEIGHTS + row * S::WEIGHT_PITCH +
                                              (w.key + j * 8 + 2 * t) * 2) = pack_two<T>(x, y);
            }
        }
        copy_wait<1>(); /* the values */
        __syncthreads();
#    pragma unroll
        for (int f = 0; f < S::ROW_TILES; f++) {
            const float by[2] = {less[f * 16 + g], less[f * 16 + 8 + g]};
            if (__any_sync(~0u, by[0] != 1 || by[1] != 1))
#    pragma unroll
                for (int c = 0; c < 2 * S::CHUNKS; c++)
#    pragma unroll
                    for (int e = 0; e < 4; e++)
                        out[f][c][e] *= by[e / 2];
        }
        wide_values<T, S>(q + S::WEIGHTS, v, column, p.dv, out);
        __syncthreads(); /* all have read the values, the weights, and where the keys are */
        if (i + 1 < steps)
            wide_load<S>(p, b, p.v, p.v_stride, p.dv, key + S::KEYS, v, S::V_PITCH, next);
        copy_commit();
        if (p.page && i + 2 < steps)
            attention_look_up<S>(p, b, key + 2 * S::KEYS, places + i % 2 * S::KEYS);
    }
    copy_wait<0>();
#    pragma unroll
    for (int half = 0; half < 2; half++) {
        sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
        sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
        if (t == 0)
            tops[tile_of * S::ROWS + w.row + half * 8 + g] = sum[half];
        if (tile_of == 0 && t == 0)
            less[w.row + half * 8 + g] = top[half];
    }
    __syncthreads();
#    pragma unroll
    for (int n = 0; n < 2 * S::ROW_TILES; n++) {
        const int row = n * 8 + g;
        float total = 0;
#    pragma unroll
        for (int of = 0; of < S::KEY_TILES; of++)
            total += tops[of * S::ROWS + row];
        wide_store<T, S>(p, b, row, column, less[row], total, out[n / 2], n % 2, reinterpret_cast<float *>(shared));
    }
    if (p.parts == 1)
        return;
    __syncthreads();
    attention_merge<T, S>(p, b, reinterpret_cast<float *>(shared), rank);
#endif
}

#endif
