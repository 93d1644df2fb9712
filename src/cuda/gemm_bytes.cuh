/* gemm_bytes.cuh - products of quantised x and few tokens: weights and x go from memory straight into registers.

   As in gemm_direct.cuh a block has up to ROWS rows of the weights for good, and its warps have a part of k each,
   which meet once, at the end. A step is 64 bytes of each row: lane 4 g + t loads 16 bytes of rows g and g + 8 of a
   tile of 16, and the same 16 bytes of tokens g, g + 8, ...: these are the operands of tensor-core products as they
   are. Blocks read all of x, from L2, so that shapes with many tokens have many rows. A warp has the loads of AHEAD
   steps under way; with short k all of its weights are, before the kernel waits for x. */
#ifndef ADZE_CUDA_GEMM_BYTES_CUH
#define ADZE_CUDA_GEMM_BYTES_CUH

#include "gemm_direct.cuh"

template <int ROW_TILES_, int TOKEN_TILES_, int WARPS_, int AHEAD_, int BLOCKS_>
struct bytes_direct_shape {
    static constexpr int ROW_TILES = ROW_TILES_, TOKEN_TILES = TOKEN_TILES_, WARPS = WARPS_, AHEAD = AHEAD_;
    static constexpr int BLOCKS = BLOCKS_; /* of a multiprocessor, as far as registers go */
    static constexpr int ROWS = 16 * ROW_TILES, TOKENS = 8 * TOKEN_TILES, THREADS = 32 * WARPS, STEP = 64;
    static constexpr int PITCH = ROWS + 4; /* numbers of a token among a warp's sums: lanes have banks of their own */
    static constexpr int SUMS_AT = ROWS * (int)sizeof(const char *);
    static int64_t shared(int64_t m) { return SUMS_AT + (int64_t)WARPS * m * PITCH * 4; }
};

/* The products of a step: rows g and g + 8 of each tile of the weights with the tokens of each tile. */
template <int TILES, int COLUMNS>
__device__ __forceinline__ void bytes_step(int (&sum)[TILES][COLUMNS][4], const uint4 (&w)[TILES][2],
                                           const uint4 (&x)[COLUMNS])
{
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            mma_i8(sum[i][c], w[i][0].x, w[i][1].x, w[i][0].y, w[i][1].y, x[c].x, x[c].y);
            mma_i8(sum[i][c], w[i][0].z, w[i][1].z, w[i][0].w, w[i][1].w, x[c].z, x[c].w);
        }
}
template <int TILES, int COLUMNS>
__device__ __forceinline__ void bytes_step(float (&sum)[TILES][COLUMNS][4], const uint4 (&w)[TILES][2],
                                           const uint4 (&x)[COLUMNS])
{
    auto word = [](const uint4 &v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; };
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t token[COLUMNS][2], low[2], high[2];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            f8_halves(word(x[c], j), token[c]);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            f8_halves(word(w[i][0], j), low), f8_halves(word(w[i][1], j), high);
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
                mma<f16>(sum[i][c], low[0], high[0], low[1], high[1], token[c][0], token[c][1]);
        }
    }
}

template <class S, typename SUM>
__global__ void __launch_bounds__(S::THREADS, GEMM_ONE_BLOCK ? 1 : S::BLOCKS) gemm_bytes_direct(const gemm_params p)
{
    constexpr int TILES = S::ROW_TILES, AHEAD = S::AHEAD, COLUMNS = S::TOKEN_TILES;
    extern __shared__ __align__(128) char shared[];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4, m = (int)p.m;
    const char **const row_at = (const char **)shared;
    SUM *const sums = (SUM *)(shared + S::SUMS_AT);
    const int begin = (int)(p.n * blockIdx.x / gridDim.x), end = (int)(p.n * (blockIdx.x + 1) / gridDim.x);
    const int tiles = (end - begin + (p.glu ? 7 : 15)) / (p.glu ? 8 : 16);
    const int steps = ((int)p.k + S::STEP - 1) / S::STEP;
    const int first = steps * warp / S::WARPS, last = steps * (warp + 1) / S::WARPS;

    for (int r = (int)threadIdx.x; r < S::ROWS; r += S::THREADS) {
        const gemm_rows row = direct_row<S>(p, begin, end, r);
        row_at[r] = p.part[row.part].w + row.at * p.part[row.part].w_stride;
    }
    __syncthreads();
    uint4 w[AHEAD][TILES][2], x[AHEAD][COLUMNS];
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    auto fetch_weights = [&](int a, int step) {
        const int in_row = step * S::STEP + t * 16;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const bool there = step < last && i < tiles && in_row < (int)p.k;
            w[a][i][0] = there ? load_once(row_at[i * 16 + g] + in_row) : zeros;
            w[a][i][1] = there ? load_once(row_at[i * 16 + 8 + g] + in_row) : zeros;
        }
    };
    const int64_t x_stride = p.rows.stride[GEMM_X][0];
    auto fetch_x = [&](int a, int step) {
        const int in_row = step * S::STEP + t * 16;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const bool there = step < last && c * 8 + g < m && in_row < (int)p.k;
            x[a][c] = there ? *reinterpret_cast<const uint4 *>(p.x + (c * 8 + g) * x_stride + in_row) : zeros;
        }
    };
    if (!p.const_weights)
        pdl_wait();
    pdl_launch_next();
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
        fetch_weights(a, first + a);
    if (p.const_weights)
        pdl_wait();
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
        fetch_x(a, first + a);

    SUM sum[TILES][COLUMNS][4] = {};
#pragma unroll 1
    for (int step = first; step < last; step += AHEAD) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) { /* steps beyond the last are zeros */
            bytes_step(sum, w[a], x[a]);
            fetch_weights(a, step + a + AHEAD);
            fetch_x(a, step + a + AHEAD);
        }
    }
    SUM *const own = sums + warp * m * S::PITCH;
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int token = c * 8 + t * 2 + e % 2;
                if (token < m)
                    own[token * S::PITCH + i * 16 + e / 2 * 8 + g] = sum[i][c][e];
            }
    __syncthreads();
    auto finish = [&](auto of_out) {
        const int count = end - begin;
        for (int i = (int)threadIdx.x; i < count * m; i += S::THREADS) {
            const int token = i / count, column = i % count, r = p.glu ? column / 8 * 16 + column % 8 : column;
            const SUM *const from = sums + token * S::PITCH + r;
            SUM y = 0, y2 = 0;
#pragma unroll 4
            for (int v = 0; v < S::WARPS; v++) {
                y += from[v * m * S::PITCH];
                if (p.glu)
                    y2 += from[v * m * S::PITCH + 8];
            }
            const gemm_rows row = direct_row<S>(p, begin, end, r);
            gemm_finish<decltype(of_out), true, true>(p, row.part, 0, token, row.at, (float)y, (float)y2);
        }
    };
    if (p.out_f32)
        finish(float());
    else if (p.out_bf16)
        finish(bf16());
    else
        finish(f16());
}

#endif
