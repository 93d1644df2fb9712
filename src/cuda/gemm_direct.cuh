/* gemm_direct.cuh - products of few tokens with quantised weights, which go from memory straight into registers.

   A block has up to ROWS rows of the weights for good, and its warps have a part of k each: a warp multiplies all
   rows of the block, keeps their sums in registers, and meets the other warps once, at the end. A step is 64 bytes of
   each row: lane 4 g + t loads 16 bytes of rows g and g + 8 of a tile of 16, which hold operands of several
   tensor-core products once they are unpacked. A warp has the loads of AHEAD steps of all its tiles under way. Its
   steps of x pass through a ring in shared memory, in the order of the lanes, and are put into that of the weights'
   pairs once for all tiles. The sum of a step, which lies in one group, is multiplied by the group's scale, which
   shared memory has as a float. */
#ifndef ADZE_CUDA_GEMM_DIRECT_CUH
#define ADZE_CUDA_GEMM_DIRECT_CUH

#include "gemm_call.cuh"
#include "mma.cuh"

template <int ROW_TILES_, int TOKEN_TILES_, int WARPS_, int AHEAD_, int BLOCKS_, weight_format FORMAT_>
struct direct_shape {
    static constexpr int ROW_TILES = ROW_TILES_, TOKEN_TILES = TOKEN_TILES_, WARPS = WARPS_, AHEAD = AHEAD_;
    static constexpr int BLOCKS = BLOCKS_; /* of a multiprocessor, as far as registers go */
    static constexpr weight_format FORMAT = FORMAT_;
    static constexpr int ROWS = 16 * ROW_TILES, TOKENS = 8 * TOKEN_TILES, THREADS = 32 * WARPS;
    static constexpr int VECTOR = weight_vector(FORMAT), STEP = 4 * VECTOR; /* weights of a lane's load, of a step */
    static constexpr int PIECES = VECTOR / 8;                               /* vectors of x that a load goes with */
    /* Of a warp's x. With 16 tokens a step takes long enough to hide the copies of the next. */
    static constexpr int STAGE_BYTES = PIECES * TOKENS * 64, AT_LEAST = TOKEN_TILES > 1 ? 2 : 3;
    static constexpr int STAGES = AHEAD > AT_LEAST ? AHEAD : AT_LEAST;
    static constexpr int PITCH = ROWS + 4; /* floats of a token among a warp's sums: lanes have banks of their own */
};

/* What a block has in shared memory: where its rows are, those of w, of scales and of zeros; the scales of each row
   by group, and the zeros; the rings of x, in whose place the warps' sums come. A row of scales has an odd number of
   floats, so that rows have banks of their own. */
struct direct_layout {
    int groups, pitch;
    size_t scales, zeros, x, bytes;
};
template <class S>
__host__ __device__ inline direct_layout direct_layout_of(int64_t m, int64_t k, int group, bool zero)
{
    const size_t rings = S::WARPS * S::STAGES * S::STAGE_BYTES, sums = (size_t)S::WARPS * (size_t)m * S::PITCH * 4;
    direct_layout at = {};
    at.groups = group ? (int)((k + group - 1) / group) : 1;
    at.pitch = at.groups | 1;
    const size_t table = (size_t)at.pitch * S::ROWS * 4;
    at.scales = 3 * S::ROWS * sizeof(const char *);
    at.zeros = at.scales + (group ? table : 0);
    at.x = at.zeros + (zero ? table : 0);
    at.bytes = at.x + (rings > sums ? rings : sums);
    return at;
}

/* Which row of which weight is row r of a block that has rows `begin` to `end` of the call. With glu the upper 8 rows
   of a tile are the value's. Beyond the block's rows it is the first one again. */
template <class S>
__device__ __forceinline__ gemm_rows direct_row(const gemm_params &p, int begin, int end, int r)
{
    int row = begin + (p.glu ? r / 16 * 8 + r % 8 : r), part = p.glu && r % 16 >= 8;
    if (row >= end)
        row = begin;
    if (!p.glu && row >= (int)p.part[0].n) {
        row -= (int)p.part[0].n, part = 1;
        if (row >= (int)p.part[1].n)
            row -= (int)p.part[1].n, part = 2;
    }
    return {part, row, 1};
}

/* Scales or zeros of the block's rows into shared memory: a warp takes a row, a lane a group, 4 rows at a time so
   that all loads are under way. */
template <class S, typename V, typename TO, typename CONVERT>
__device__ __forceinline__ void direct_table(const char *const *row_at, int rows, const direct_layout &at, TO *to,
                                             CONVERT convert)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    for (int group = lane; group < at.groups; group += 32)
        for (int r = warp; r < rows; r += 4 * S::WARPS) {
            V v[4];
#pragma unroll
            for (int u = 0; u < 4; u++)
                v[u] = ((const V *)row_at[min(r + u * S::WARPS, rows - 1)])[group];
#pragma unroll
            for (int u = 0; u < 4; u++)
                if (r + u * S::WARPS < rows)
                    to[(r + u * S::WARPS) * at.pitch + group] = convert(v[u]);
        }
}
template <class S>
__device__ __forceinline__ void direct_scales(int dtype, const char *const *row_at, int rows, const direct_layout &at,
                                              float *to)
{
    const auto convert = [](auto v) { return to_float(v); };
    if (dtype == ADZE_F32)
        direct_table<S, float>(row_at, rows, at, to, convert);
    else if (dtype == ADZE_F16)
        direct_table<S, f16>(row_at, rows, at, to, convert);
    else
        direct_table<S, bf16>(row_at, rows, at, to, convert);
}

/* Adds the products of 16 rows and a step to part: a lane's vectors of rows g and g + 8, its pairs of x. RARE: with
   zeros, with NaN of f8e4m3. */
template <typename T, class S, bool RARE>
__device__ __forceinline__ void direct_unit(uint4 low, uint4 high, const uint32_t (&zero)[2],
                                            const uint32_t (&x)[S::TOKEN_TILES][S::PIECES * 4],
                                            float (&part)[S::TOKEN_TILES][4])
{
    constexpr int PAIRS = S::VECTOR / 8; /* in 4 bytes of a weight */
    const uint32_t words[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t pair[2][PAIRS];
        weight_pairs<T, S::FORMAT, RARE>(words[0][j], zero[0], pair[0]);
        weight_pairs<T, S::FORMAT, RARE>(words[1][j], zero[1], pair[1]);
#pragma unroll
        for (int e = 0; e < PAIRS; e += 2)
#pragma unroll
            for (int c = 0; c < S::TOKEN_TILES; c++)
                mma<T>(part[c], pair[0][e], pair[1][e], pair[0][e + 1], pair[1][e + 1], x[c][j * PAIRS + e],
                       x[c][j * PAIRS + e + 1]);
    }
}

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, GEMM_ONE_BLOCK ? 1 : S::BLOCKS) gemm_direct(const gemm_params p)
{
    constexpr int TILES = S::ROW_TILES, AHEAD = S::AHEAD, PIECES = S::PIECES, COLUMNS = S::TOKEN_TILES;
    extern __shared__ __align__(128) char shared[];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4, m = (int)p.m;
    const direct_layout at = direct_layout_of<S>(p.m, p.k, p.group, gemm_has_zero(p));
    const char **const row_at = (const char **)shared, **const scale_at = row_at + S::ROWS,
                       **const zero_at = scale_at + S::ROWS;
    float *const scales = (float *)(shared + at.scales);
    uint32_t *const zeros = (uint32_t *)(shared + at.zeros);
    char *const xs = shared + at.x + warp * (S::STAGES * S::STAGE_BYTES);
    const int begin = (int)(p.n * blockIdx.x / gridDim.x), end = (int)(p.n * (blockIdx.x + 1) / gridDim.x);
    const int tiles = (end - begin + (p.glu ? 7 : 15)) / (p.glu ? 8 : 16);
    const int steps = ((int)p.k + S::STEP - 1) / S::STEP;
    const int first = steps * warp / S::WARPS, last = steps * (warp + 1) / S::WARPS;
    const bool grouped = p.group, scale_f32 = p.part[0].scale_dtype == ADZE_F32,
               has_zero = S::FORMAT == OF_U4 && gemm_has_zero(p);

    for (int r = (int)threadIdx.x; r < S::ROWS; r += S::THREADS) {
        const gemm_rows row = direct_row<S>(p, begin, end, r);
        const gemm_part &part = p.part[row.part];
        const int64_t of_scale = p.group_rows > 1 ? row.at / p.group_rows : row.at;
        row_at[r] = part.w + row.at * part.w_stride;
        scale_at[r] = (const char *)part.scale + of_scale * part.scale_stride * (scale_f32 ? 4 : 2);
        zero_at[r] = (const char *)part.zero + row.at * part.zero_stride;
    }
    __syncthreads();
    uint4 w[AHEAD][TILES][2] = {};
    /* Beyond k the first bytes of a row are loaded: x is zero there. An f8e4m3 might be NaN, so that its k is a whole
       number of steps. */
    auto fetch = [&](uint4(&to)[2], int tile, int step) {
        if (step < last && tile < tiles) {
            const int vector = step * 4 + t;
            const int64_t in_row = vector * S::VECTOR < (int)p.k ? (int64_t)vector * 16 : 0;
            to[0] = load_once(row_at[tile * 16 + g] + in_row);
            to[1] = load_once(row_at[tile * 16 + 8 + g] + in_row);
        }
    };
    if (!p.const_weights)
        pdl_wait();
    pdl_launch_next();
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
#pragma unroll
        for (int i = 0; i < TILES; i++)
            fetch(w[a][i], i, first + a);

    /* The scales of whole rows are needed at the end only. */
    if (grouped)
        direct_scales<S>(p.part[0].scale_dtype, scale_at, tiles * 16, at, scales);
    else if ((int)threadIdx.x < tiles * 16)
        prefetch(scale_at[threadIdx.x]);
    if (has_zero)
        direct_table<S, uint8_t>(zero_at, tiles * 16, at, zeros, [](uint8_t v) { return both<T>((float)v); });
    if (p.const_weights)
        pdl_wait();

    /* A step of x: lanes copy vectors of neighbouring addresses, 8 / PIECES tokens at a time. Columns of the operand
       that have no token are not written: what is there comes out in columns that nobody reads. */
    constexpr int COPIES = S::TOKENS * PIECES / 8, TOKENS_AT_ONCE = 8 / PIECES;
    const int copy_token = lane / (4 * PIECES), copy_vector = lane % (4 * PIECES);
    const int64_t x_stride = p.rows.stride[GEMM_X][0] * (int)sizeof(T);
    const char *const x_from = p.x + copy_token * x_stride;
    const uint32_t x_to = shared_address(xs) + (uint32_t)(copy_vector % PIECES * S::TOKENS * 64 + copy_token * 64 +
                                                          copy_vector / PIECES * 16);
    auto fetch_x = [&](int stage, int step) {
        const int vector = step * 4 * PIECES + copy_vector;
        const bool there = vector * 8 < (int)p.k;
        const char *from = x_from + (there ? vector * 16 : 0);
        if (step < last)
#pragma unroll
            for (int u = 0; u < COPIES; u++, from += TOKENS_AT_ONCE * x_stride)
                if (u * TOKENS_AT_ONCE + copy_token < m)
                    copy_async(x_to + (uint32_t)(stage * S::STAGE_BYTES + u * TOKENS_AT_ONCE * 64), from, there);
        copy_commit();
    };
#pragma unroll
    for (int i = 0; i < S::STAGES - 1; i++)
        fetch_x(i, first + i);
    if (grouped || has_zero)
        __syncthreads();

    float sum[TILES][COLUMNS][4] = {};
    int stage = 0, next_stage = S::STAGES - 1;
    for (int ring = first; ring < last; ring += AHEAD) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int step = ring + a;
            if (step >= last)
                break;
            copy_wait<S::STAGES - 2>();
            __syncwarp();
            fetch_x(next_stage, step + S::STAGES - 1);
            const char *const x_at = xs + stage * S::STAGE_BYTES + lane * 16;
            next_stage = stage;
            stage = stage + 1 == S::STAGES ? 0 : stage + 1;
            uint32_t x[COLUMNS][PIECES * 4];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
#pragma unroll
                for (int i = 0; i < PIECES; i++) {
                    const uint4 v = weight_order<S::FORMAT>(load_shared(x_at + i * S::TOKENS * 64 + c * 512));
                    x[c][i * 4] = v.x, x[c][i * 4 + 1] = v.y, x[c][i * 4 + 2] = v.z, x[c][i * 4 + 3] = v.w;
                }
            const int group = g * at.pitch + (grouped ? step >> (p.group > S::STEP) : 0);
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                if (i >= tiles)
                    break;
                const uint4 low = w[a][i][0], high = w[a][i][1];
                float part[COLUMNS][4] = {};
                bool rare = has_zero;
                if constexpr (S::FORMAT == OF_F8)
                    rare = __any_sync(0xffffffffu, f8_nan(low) || f8_nan(high));
                if (rare) {
                    uint32_t zero[2] = {};
                    if (has_zero)
                        zero[0] = zeros[group + i * 16 * at.pitch], zero[1] = zeros[group + (i * 16 + 8) * at.pitch];
                    direct_unit<T, S, true>(low, high, zero, x, part);
                } else {
                    const uint32_t none[2] = {};
                    direct_unit<T, S, false>(low, high, none, x, part);
                }
                fetch(w[a][i], i, step + AHEAD);
                float scale[2] = {1, 1};
                if (grouped)
                    scale[0] = scales[group + i * 16 * at.pitch], scale[1] = scales[group + (i * 16 + 8) * at.pitch];
#pragma unroll
                for (int c = 0; c < COLUMNS; c++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sum[i][c][e] = fmaf(part[c][e], scale[e / 2], sum[i][c][e]);
            }
        }
    }

    /* All warps have read x: their sums take its place. */
    float *const sums = (float *)(shared + at.x);
    copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int token = c * 8 + t * 2 + e % 2;
                if (token < m && i < tiles)
                    sums[(warp * m + token) * S::PITCH + i * 16 + e / 2 * 8 + g] = sum[i][c][e];
            }
    __syncthreads();
    const int count = end - begin;
    for (int i = (int)threadIdx.x; i < count * m; i += S::THREADS) {
        const int token = i / count, of_block = i - token * count;
        const int r = p.glu ? of_block / 8 * 16 + of_block % 8 : of_block;
        const float *const from = sums + token * S::PITCH + r;
        float y = 0, y2 = 0;
#pragma unroll
        for (int v = 0; v < S::WARPS; v++) {
            y += from[v * m * S::PITCH];
            if (p.glu)
                y2 += from[v * m * S::PITCH + 8];
        }
        const gemm_rows row = direct_row<S>(p, begin, end, r);
        gemm_finish<T>(p, row.part, 0, token, row.at, y, y2);
    }
}

#endif
