/* gemm_any.cuh - products of any call in float arithmetic: any dtype, strides and alignment. */
#ifndef ADZE_CUDA_GEMM_ANY_CUH
#define ADZE_CUDA_GEMM_ANY_CUH

#include "gemm_call.cuh"

enum { ANY_ROWS = 64, ANY_TOKENS = 64, ANY_DEPTH = 32, ANY_GEMM_THREADS = 256 };

/* A block computes TOKENS x 64 products; a thread has every 16th row of 4 and TOKENS / 16 tokens, or a row and two
   tokens when there are 8. Elements of the next 32 of k are loaded while those of the last are multiplied. */
template <typename T, int TOKENS, weight_format F, bool BYTES = false>
__global__ void __launch_bounds__(ANY_GEMM_THREADS) gemm_any(const gemm_params p, int token_tiles)
{
    constexpr int THREAD_ROWS = TOKENS >= 64 ? 4 : 1, ACROSS = ANY_ROWS / THREAD_ROWS;
    constexpr int THREAD_TOKENS = TOKENS * ACROSS / ANY_GEMM_THREADS;
    constexpr int W_LOADS = ANY_ROWS * ANY_DEPTH / ANY_GEMM_THREADS, X_LOADS = TOKENS * ANY_DEPTH / ANY_GEMM_THREADS;
    __shared__ float ws[ANY_DEPTH][ANY_ROWS + 1], xs[ANY_DEPTH][TOKENS + 1], result[TOKENS][ANY_ROWS + 1];
    const int64_t tile = blockIdx.x / (unsigned)token_tiles, batch = blockIdx.y;
    const int64_t first_token = (int64_t)(blockIdx.x % (unsigned)token_tiles) * TOKENS;
    const int size = p.glu ? ANY_ROWS / 2 : ANY_ROWS, lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const gemm_rows rows = gemm_tile_rows(p, tile, size);
    const int row = (int)threadIdx.x % ACROSS, token = (int)threadIdx.x / ACROSS * THREAD_TOKENS;

    /* A warp loads 32 neighbouring elements of a row at a time. */
    const char *w_at[W_LOADS];
    const char *x_at[X_LOADS];
    constexpr weight_format X = BYTES ? F : OF_X; /* BYTES: x is quantised as the weights are */
    constexpr int X_SIZE = BYTES ? 1 : (int)sizeof(T);
#pragma unroll
    for (int i = 0; i < W_LOADS; i++) {
        const int r = i * (ANY_GEMM_THREADS / 32) + warp, of_tile = p.glu && r >= size ? r - size : r;
        const int part = p.glu ? r >= size : rows.part;
        w_at[i] = of_tile < rows.count
                      ? p.part[part].w + batch * p.w_batch + (rows.at + of_tile) * p.part[part].w_stride
                      : NULL;
    }
#pragma unroll
    for (int i = 0; i < X_LOADS; i++) {
        const int64_t of_x = first_token + i * (ANY_GEMM_THREADS / 32) + warp;
        x_at[i] = of_x < p.m ? p.x + batch * p.x_batch + row_offset(p.rows, GEMM_X, row_split(p.rows, of_x)) * X_SIZE
                             : NULL;
    }
    /* The sum of 32 products of i8 is exact in a float, that of all is not. */
    typedef typename std::conditional<BYTES && F == OF_I8, int, float>::type sum_type;
    float w_next[W_LOADS], x_next[X_LOADS];
    sum_type sum[THREAD_TOKENS][THREAD_ROWS] = {};
    auto fetch = [&](int64_t at) {
#pragma unroll
        for (int i = 0; i < W_LOADS; i++)
            if (w_at[i] && at + lane < p.k) {
                w_next[i] = weight_float<T, F>(w_at[i], at + lane);
                if constexpr (F == OF_U4) {
                    const int r = i * (ANY_GEMM_THREADS / 32) + warp, of_tile = p.glu && r >= size ? r - size : r;
                    w_next[i] -= gemm_zero(p, p.glu ? r >= size : rows.part, rows.at + of_tile,
                                           p.group ? (at + lane) / p.group : 0);
                }
            } else {
                w_next[i] = 0;
            }
#pragma unroll
        for (int i = 0; i < X_LOADS; i++)
            x_next[i] = x_at[i] && at + lane < p.k ? weight_float<T, X>(x_at[i], at + lane) : 0;
    };
    pdl_wait();
    pdl_launch_next();
    fetch(0);
    for (int64_t at = 0; at < p.k; at += ANY_DEPTH) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < W_LOADS; i++)
            ws[lane][i * (ANY_GEMM_THREADS / 32) + warp] = w_next[i];
#pragma unroll
        for (int i = 0; i < X_LOADS; i++)
            xs[lane][i * (ANY_GEMM_THREADS / 32) + warp] = x_next[i];
        __syncthreads();
        fetch(at + ANY_DEPTH);
        /* A sum of the 32, then the sum of those: a chain of k additions would lose more bits. */
        float part[THREAD_TOKENS][THREAD_ROWS] = {};
#pragma unroll 8
        for (int d = 0; d < ANY_DEPTH; d++) {
            float w[THREAD_ROWS];
#pragma unroll
            for (int r = 0; r < THREAD_ROWS; r++)
                w[r] = ws[d][row + r * ACROSS];
#pragma unroll
            for (int i = 0; i < THREAD_TOKENS; i++)
#pragma unroll
                for (int r = 0; r < THREAD_ROWS; r++)
                    part[i][r] = fmaf(xs[d][token + i], w[r], part[i][r]);
        }
        if (F != OF_X && !BYTES && p.group) { /* of at least 32 columns */
#pragma unroll
            for (int r = 0; r < THREAD_ROWS; r++) {
                const int of_block = row + r * ACROSS,
                          of_tile = p.glu && of_block >= size ? of_block - size : of_block;
                if (of_tile >= rows.count)
                    continue;
                const float scale =
                    gemm_scale(p, p.glu ? of_block >= size : rows.part, rows.at + of_tile, at / p.group);
#pragma unroll
                for (int i = 0; i < THREAD_TOKENS; i++)
                    part[i][r] *= scale;
            }
        }
#pragma unroll
        for (int i = 0; i < THREAD_TOKENS; i++)
#pragma unroll
            for (int r = 0; r < THREAD_ROWS; r++)
                sum[i][r] += (sum_type)part[i][r];
    }
#pragma unroll
    for (int i = 0; i < THREAD_TOKENS; i++)
#pragma unroll
        for (int r = 0; r < THREAD_ROWS; r++)
            result[token + i][row + r * ACROSS] = (float)sum[i][r];
    __syncthreads();
    for (int i = (int)threadIdx.x; i < TOKENS * size; i += ANY_GEMM_THREADS) {
        const int of_block = i / size, column = i % size;
        if (first_token + of_block < p.m && column < rows.count)
            gemm_finish<T, false, BYTES>(p, rows.part, batch, first_token + of_block, rows.at + column,
                                         result[of_block][column], result[of_block][(column + size) % ANY_ROWS]);
    }
}

#endif
