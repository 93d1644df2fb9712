/* gemm_tile.cuh - products of many tokens on tensor cores: a block computes a tile of tokens and rows of the weights.

   Both operands pass through stages in shared memory, DEPTH bytes of k at a time. As in gemm_stream.cuh, lane 4 g + t
   takes 8 neighbouring elements of row g of either operand, which are two operands of 16. Where there are few tiles,
   the blocks of a cluster have a part of k each, and add their sums in the order of the parts.

   With few tokens a block reads weights as fast as memory has them only if shared memory keeps up, which each warp
   reads its rows and its tokens from. So warps have large tiles, and where those are few, SLICES warps have the same
   tile: each takes its 64 bytes of every stage, and their sums are added at the end. */
#ifndef ADZE_CUDA_GEMM_TILE_CUH
#define ADZE_CUDA_GEMM_TILE_CUH

#include "cluster.cuh"
#include "gemm_call.cuh"
#include "mma.cuh"

#include <algorithm>

/* Tokens and rows of a block and of a warp, both multiples of 16. */
template <int TOKENS_, int ROWS_, int WARP_TOKENS_, int WARP_ROWS_, int STAGES_, int SLICES_ = 1>
struct tile_shape {
    static constexpr int TOKENS = TOKENS_, ROWS = ROWS_, WARP_TOKENS = WARP_TOKENS_, WARP_ROWS = WARP_ROWS_;
    static constexpr int STAGES = STAGES_, SLICES = SLICES_, ACROSS = ROWS / WARP_ROWS;
    static constexpr int TILE_WARPS = TOKENS / WARP_TOKENS * ACROSS, THREADS = TILE_WARPS * SLICES * 32;
    static constexpr int DEPTH = SLICES == 1 ? 128 : SLICES * 64; /* bytes of a row in a stage */
    static constexpr int STAGE_BYTES = (TOKENS + ROWS) * DEPTH, SHARED = STAGES * STAGE_BYTES;
    static constexpr int PITCH = ROWS + 4; /* floats of a token among the sums of a slice */
    static_assert(SLICES * TOKENS * PITCH * 4 <= SHARED, "the sums take the place of the stages");
};

/* What is multiplied: elements of a 16-bit dtype, or bytes of i8 or f8e4m3, whose products are scaled at the end.
   Each takes a lane's 16 bytes of the rows of both operands. An f8e4m3 becomes f16, which is exact: tensor cores that
   multiply it as it is add, by what has been measured of sm_89 and sm_90, with 14 bits. */
template <typename T>
struct tile_halves {
    enum { SIZE = 2, BYTES = 0 };
    typedef float sum_type;
    template <int MT, int NT>
    static __device__ __forceinline__ void multiply(float (&sum)[MT][NT][4], const uint4 (&a)[MT][2],
                                                    const uint4 (&b)[NT])
    {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < MT; i++)
                mma<T>(sum[i][n], a[i][0].x, a[i][1].x, a[i][0].y, a[i][1].y, b[n].x, b[n].y);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < MT; i++)
                mma<T>(sum[i][n], a[i][0].z, a[i][1].z, a[i][0].w, a[i][1].w, b[n].z, b[n].w);
    }
};
struct tile_i8 {
    enum { SIZE = 1, BYTES = 1 };
    typedef int sum_type;
    template <int MT, int NT>
    static __device__ __forceinline__ void multiply(int (&sum)[MT][NT][4], const uint4 (&a)[MT][2],
                                                    const uint4 (&b)[NT])
    {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < MT; i++)
                mma_i8(sum[i][n], a[i][0].x, a[i][1].x, a[i][0].y, a[i][1].y, b[n].x, b[n].y);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < MT; i++)
                mma_i8(sum[i][n], a[i][0].z, a[i][1].z, a[i][0].w, a[i][1].w, b[n].z, b[n].w);
    }
};
struct tile_f8 {
    enum { SIZE = 1, BYTES = 1 };
    typedef float sum_type;
    template <int MT, int NT>
    static __device__ __forceinline__ void multiply(float (&sum)[MT][NT][4], const uint4 (&a)[MT][2],
                                                    const uint4 (&b)[NT])
    {
#pragma unroll
        for (int w = 0; w < 4; w++) {
            uint32_t x[MT][2][2];
#pragma unroll
            for (int i = 0; i < MT * 2; i++)
                f8_halves(word(a[i / 2][i % 2], w), x[i / 2][i % 2]);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                uint32_t y[2];
                f8_halves(word(b[n], w), y);
#pragma unroll
                for (int i = 0; i < MT; i++)
                    mma<f16>(sum[i][n], x[i][0][0], x[i][1][0], x[i][0][1], x[i][1][1], y[0], y[1]);
            }
        }
    }
    static __device__ __forceinline__ uint32_t word(const uint4 &v, int w)
    {
        return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w;
    }
};

/* T is what O has, or with bytes of no meaning: out's dtype is known at the end. */
template <typename T, class S, class O = tile_halves<T>>
__global__ void __launch_bounds__(S::THREADS, O::BYTES ? 1 : GEMM_ONE_BLOCK)
    gemm_tile(const gemm_params p, int token_tiles)
{
    constexpr int MT = S::WARP_TOKENS / 16, NT = S::WARP_ROWS / 8, DEPTH = S::DEPTH, PIECES = DEPTH / 16;
    constexpr int STEP = S::THREADS / PIECES;
    static_assert(S::TOKENS % STEP == 0 && S::ROWS % STEP == 0, "each thread copies as many rows");
    static_assert(STEP % 2 == 0, "the rows of a thread are all odd or all even");
    extern __shared__ __align__(128) char shared[];
    const uint32_t stages = shared_address(shared);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int slice = warp / S::TILE_WARPS, of_slice = warp % S::TILE_WARPS;
    const int warp_token = of_slice / S::ACROSS * S::WARP_TOKENS, warp_row = of_slice % S::ACROSS * S::WARP_ROWS;
    const unsigned parts = (unsigned)cluster_size(), block = blockIdx.x / parts;
    const int rank = cluster_rank();
    const int64_t tile = block / (unsigned)token_tiles, batch = blockIdx.y;
    const int64_t first_token = (int64_t)(block % (unsigned)token_tiles) * S::TOKENS;
    const int size = p.glu ? S::ROWS / 2 : S::ROWS;
    const gemm_rows rows = gemm_tile_rows(p, tile, size);
    constexpr int IN_PIECE = 16 / O::SIZE;
    typedef typename O::sum_type sum_type;
    const int all_steps = ((int)p.k * O::SIZE + DEPTH - 1) / DEPTH;
    const int first_step = (int)((int64_t)all_steps * rank / parts);
    const int steps = (int)((int64_t)all_steps * (rank + 1) / parts) - first_step;
    /* With glu half of a warp's rows are of the gate's weight, the other half are the same rows of the value's. */
    constexpr int HALF = S::WARP_ROWS / 2;

    /* A thread copies the same piece of every STEPth row of a stage. Where those rows are is computed once: with few
       warps, a step takes as long as its instructions. */
    constexpr int W_COPIES = S::ROWS / STEP, X_COPIES = S::TOKENS / STEP;
    const int piece = (int)threadIdx.x % PIECES, first_row = (int)threadIdx.x / PIECES;
    const uint32_t thread_shared = stages + (uint32_t)(first_row * DEPTH + (piece ^ (first_row & 1) << 2) * 16);
    const int64_t in_row = (int64_t)(first_step * PIECES + piece) * 16;
    const char *w_from[W_COPIES], *x_from[X_COPIES];
    uint32_t w_there = 0, x_there = 0; /* a bit of each */
#pragma unroll
    for (int i = 0; i < W_COPIES; i++) {
        const int row = i * STEP + first_row;
        int part = rows.part, of_tile = row;
        if (p.glu) {
            const int in_warp = row % S::WARP_ROWS;
            part = in_warp < HALF ? 0 : 1;
            of_tile = row / S::WARP_ROWS * HALF + (in_warp < HALF ? in_warp : in_warp - HALF);
        }
        const bool there = of_tile < rows.count;
        w_there |= (uint32_t)there << i;
        w_from[i] =
            p.part[part].w + batch * p.w_batch + (there ? (rows.at + of_tile) * p.part[part].w_stride : 0) + in_row;
    }
#pragma unroll
    for (int i = 0; i < X_COPIES; i++) {
        const int64_t token = first_token + i * STEP + first_row;
        const bool there = token < p.m;
        x_there |= (uint32_t)there << i;
        x_from[i] = p.x + batch * p.x_batch + (there ? token * p.rows.stride[GEMM_X][0] * (int)O::SIZE : 0) + in_row;
    }
    auto fetch_weights = [&](int step) {
        const uint32_t to = thread_shared + (uint32_t)(step % S::STAGES * S::STAGE_BYTES + S::TOKENS * DEPTH);
        const uint32_t there = ((first_step + step) * PIECES + piece) * IN_PIECE < (int)p.k ? w_there : 0;
#pragma unroll
        for (int i = 0; i < W_COPIES; i++)
            copy_async(to + (uint32_t)(i * STEP * DEPTH), there ? w_from[i] + step * DEPTH : p.part[0].w,
                       there >> i & 1);
    };
    auto fetch_x = [&](int step) {
        const uint32_t to = thread_shared + (uint32_t)(step % S::STAGES * S::STAGE_BYTES);
        const uint32_t there = ((first_step + step) * PIECES + piece) * IN_PIECE < (int)p.k ? x_there : 0;
#pragma unroll
        for (int i = 0; i < X_COPIES; i++)
            copy_async(to + (uint32_t)(i * STEP * DEPTH), there ? x_from[i] + step * DEPTH : p.x, there >> i & 1);
    };

    if (!p.const_weights)
        pdl_wait();
    pdl_launch_next();
#pragma unroll
    for (int i = 0; i < S::STAGES - 1; i++)
        if (i < steps)
            fetch_weights(i);
    copy_commit();
    if (p.const_weights)
        pdl_wait();
#pragma unroll
    for (int i = 0; i < S::STAGES - 1; i++) {
        if (i < steps)
            fetch_x(i);
        copy_commit();
    }

    sum_type sum[MT][NT][4] = {};
    const int odd = (g & 1) << 2;
    for (int step = 0; step < steps; step++) {
        copy_wait<S::STAGES - 2>();
        __syncthreads();
        const int next = step + S::STAGES - 1;
        if (next < steps) {
            fetch_weights(next);
            fetch_x(next);
        }
        copy_commit();
        const char *const stage = shared + step % S::STAGES * S::STAGE_BYTES;
#pragma unroll
        for (int j = 0; j < (S::SLICES == 1 ? 2 : 1); j++) {
            const char *const at = stage + (((slice + j) * 4 + t) ^ odd) * 16 + g * DEPTH;
            uint4 a[MT][2];
#pragma unroll
            for (int i = 0; i < MT; i++) {
                a[i][0] = load_shared(at + (warp_token + i * 16) * DEPTH);
                a[i][1] = load_shared(at + (warp_token + i * 16 + 8) * DEPTH);
            }
            uint4 b[NT];
#pragma unroll
            for (int n = 0; n < NT; n++)
                b[n] = load_shared(at + (S::TOKENS + warp_row + n * 8) * DEPTH);
            O::multiply(sum, a, b);
        }
    }
    const int warp_column = p.glu ? warp_row / 2 : warp_row;
    if (S::SLICES == 1 && !O::BYTES && parts == 1) {
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int n = 0; n < NT; n++) {
                gemm_end<T> end[4];
                auto there = [&](int e, auto then) {
                    const int64_t token = first_token + warp_token + i * 16 + e / 2 * 8 + g;
                    const int column = warp_column + n * 8 + t * 2 + e % 2;
                    if (!(p.glu && n >= NT / 2) && token < p.m && column < rows.count)
                        then(token, rows.at + column);
                };
#pragma unroll
                for (int e = 0; e < 4; e++)
                    there(e, [&](int64_t token, int row) { end[e].load(p, rows.part, batch, token, row); });
#pragma unroll
                for (int e = 0; e < 4; e++)
                    there(e, [&](int64_t, int) {
                        end[e].store(p, rows.part, (float)sum[i][n][e], (float)sum[i][(n + NT / 2) % NT][e]);
                    });
            }
        return;
    }
    sum_type *const sums = (sum_type *)shared, *const own = sums + slice * S::TOKENS * S::PITCH;
    copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                /* the value's rows come after all of the gate's */
                const int column =
                    p.glu && n >= NT / 2 ? S::ROWS / 2 + warp_column + (n - NT / 2) * 8 : warp_column + n * 8;
                own[(warp_token + i * 16 + e / 2 * 8 + g) * S::PITCH + column + t * 2 + e % 2] = sum[i][n][e];
            }
    if constexpr (S::SLICES > 1) { /* the sums of all slices are the first one's */
        __syncthreads();
        for (int i = (int)threadIdx.x; i < S::TOKENS * S::ROWS; i += S::THREADS) {
            sum_type *const at = sums + i / S::ROWS * S::PITCH + i % S::ROWS;
            sum_type all = at[0];
#pragma unroll
            for (int v = 1; v < S::SLICES; v++)
                all += at[v * S::TOKENS * S::PITCH];
            at[0] = all;
        }
        __syncthreads();
    }
    if (parts > 1) {
        cluster_arrive();
        cluster_wait();
    }
    if (S::SLICES == 1 && parts == 1)
        __syncthreads();
    const int first = S::TOKENS * rank / (int)parts, last = S::TOKENS * (rank + 1) / (int)parts;
    auto load_sum = [&](const sum_type *at, int part) {
        if constexpr (std::is_same<sum_type, int>::value)
            return __float_as_int(cluster_load(at, part));
        else
            return cluster_load(at, part);
    };
    auto finish = [&](auto of_out) {
        for (int i = first * size + (int)threadIdx.x; i < last * size; i += S::THREADS * GEMM_ENDS) {
            gemm_end<decltype(of_out), true, O::BYTES> end[GEMM_ENDS];
            const sum_type *at[GEMM_ENDS];
#pragma unroll
            for (int j = 0; j < GEMM_ENDS; j++) {
                const int own = i + j * S::THREADS, of_tile = own / size, column = own % size;
                const bool there = own < last * size && first_token + of_tile < p.m && column < rows.count;
                at[j] = there ? sums + of_tile * S::PITCH + column : NULL;
                if (there)
                    end[j].load(p, rows.part, batch, first_token + of_tile, rows.at + column);
            }
#pragma unroll
            for (int j = 0; j < GEMM_ENDS; j++) {
                if (!at[j])
                    continue;
                sum_type y = 0, y2 = 0;
                for (int part = 0; part < (int)parts; part++) {
                    y += parts > 1 ? load_sum(at[j], part) : at[j][0];
                    if (p.glu)
                        y2 += parts > 1 ? load_sum(at[j] + S::ROWS / 2, part) : at[j][S::ROWS / 2];
                }
                end[j].store(p, rows.part, (float)y, (float)y2);
            }
        }
    };
    if constexpr (O::BYTES) {
        if (p.out_f32)
            finish(float());
        else if (p.out_bf16)
            finish(bf16());
        else
            finish(f16());
    } else {
        finish(T());
    }
    if (parts > 1) { /* other blocks read this one's sums */
        cluster_arrive();
        cluster_wait();
    }
}

/* In how many parts the blocks of a cluster take k: as few as load the multiprocessors about evenly, and give each of
   them two blocks. */
static inline int tile_parts(const cuda_call &s, int64_t blocks, int64_t steps)
{
    const int64_t sm_count = s.gpu.sm_count;
    double best = 1e30;
    for (int parts = 1; parts <= 8; parts *= 2)
        best = std::min(best, (double)ceil_div(blocks * parts, sm_count) / parts);
    int parts = 1;
    while (parts < 8 && steps >= parts * 16 &&
           ((double)ceil_div(blocks * parts, sm_count) / parts > 1.1 * best || blocks * parts * 10 < sm_count * 19))
        parts *= 2;
    return parts;
}
/* The same for blocks that have a multiprocessor to themselves, or half of it: as few as leave little of the last
   round of blocks empty. The weights are what takes the time, and most multiprocessors can read them as fast as all.
 */
static inline int sliced_parts(int64_t blocks, int64_t at_once, int64_t steps)
{
    auto rounds = [&](int parts) { return (double)ceil_div(blocks * parts, at_once) / parts; };
    double best = 1e30;
    const int most = (int)std::min<int64_t>(8, std::max<int64_t>(1, steps / 4));
    for (int parts = 1; parts <= most; parts++)
        best = std::min(best, rounds(parts));
    int parts = 1;
    while (rounds(parts) > 1.25 * best)
        parts++;
    return parts;
}
template <typename T, class S, class O = tile_halves<T>>
static adze_status tile_launch(const cuda_call &s, const gemm_params &p)
{
    const int64_t tokens = ceil_div(p.m, S::TOKENS), tiles = gemm_tiles(p, p.glu ? S::ROWS / 2 : S::ROWS);
    const int64_t blocks = tokens * tiles * p.batches, fit = std::max<int64_t>(1, s.gpu.block_shared / S::SHARED);
    /* Sums of integers are the same in any order. */
    const bool may = adze_cuda_clusters(s.device) &&
                     (std::is_same<typename O::sum_type, int>::value || S::SLICES > 1 || !p.batch_invariant);
    const int64_t steps = ceil_div(p.k * O::SIZE, S::DEPTH);
    const int parts = !may             ? 1
                      : S::SLICES == 1 ? tile_parts(s, blocks, steps)
                                       : sliced_parts(blocks, s.gpu.sm_count * fit, steps);
    return launch(s, gemm_tile<T, S, O>, tokens * tiles * parts, dim3(S::THREADS),
                  launch_shape(S::SHARED, parts, p.batches), p, (int)tokens);
}

#endif
