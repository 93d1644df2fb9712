/* gemm_shifted.cuh - products of weights at any address, on the tensor cores.

   As gemm_direct.cuh: a block has up to so many rows of the weights for good, and a step is 64 bytes of each row, of
   which lane 4 g + t has 16 of rows g and g + 8. Those lie in two aligned vectors, which are loaded while the step
   before is computed, and then shifted into one. So are the elements of x, which every warp reads straight from
   memory, for all its rows. Vectors are loaded that hold a byte of the row, no others. What they hold behind k is
   made zero: in x always, in the weights where it might be NaN.

   `slices` warps have the same ROWS rows and a part of k each; with short k a block has several such groups. Where
   there are few rows, the blocks of a cluster share k too: their sums are added in the order of the blocks, by each
   for its part of the outputs.

   An x of f32 is multiplied as three numbers of bf16, whose sum it is: products with i8, u4 and f8e4m3 are exact. */
#ifndef ADZE_CUDA_GEMM_SHIFTED_CUH
#define ADZE_CUDA_GEMM_SHIFTED_CUH

#include "cluster.cuh"
#include "gemm_direct.cuh"
#include "unit.cuh"

template <int ROW_TILES_, int TOKEN_TILES_, int WARPS_, int BLOCKS_, bool SPLITS_, weight_format FORMAT_>
struct shifted_shape : direct_shape<ROW_TILES_, TOKEN_TILES_, WARPS_, 1, BLOCKS_, FORMAT_> {
    static constexpr bool SPLITS = SPLITS_; /* k among fewer warps, or among blocks, and tokens among blocks */
};

/* What a block has in shared memory, as direct_layout, for `rows` rows. */
template <class S>
__host__ __device__ inline direct_layout shifted_layout_of(int rows, int64_t m, int64_t k, int group, bool zero)
{
    direct_layout at = {};
    at.groups = group ? (int)((k + group - 1) / group) : 1;
    at.pitch = at.groups | 1;
    const size_t table = (size_t)at.pitch * (size_t)rows * 4;
    at.scales = 3 * (size_t)rows * sizeof(const char *);
    at.zeros = at.scales + (group ? table : 0);
    at.x = at.zeros + (zero ? table : 0); /* the sums */
    at.bytes = at.x + (size_t)S::WARPS * (size_t)m * S::PITCH * 4;
    return at;
}

/* 16 bytes of memory that no kernel writes meanwhile, or zeros. The load stays where it stands among barriers and
   other such loads. A neighbour loads them too, from L1. */
__device__ __forceinline__ uint4 load_vector_if(const char *from, bool there)
{
    uint4 v;
    asm volatile("{\n\t.reg .pred there;\n\tsetp.ne.s32 there, %5, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\t"
                 "mov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
                 "@there ld.global.nc.L1::evict_first.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from), "r"((int)there));
    return v;
}
/* The first `count` bytes of v, and zeros. */
__device__ __forceinline__ uint4 first_bytes(uint4 v, int count)
{
    auto mask = [&](int word) {
        const int bytes = min(max(count - 4 * word, 0), 4);
        return bytes == 4 ? 0xffffffffu : (1u << (8 * bytes)) - 1;
    };
    return make_uint4(v.x & mask(0), v.y & mask(1), v.z & mask(2), v.w & mask(3));
}
/* PIECES times eight elements of x that begin `shift` bytes behind a 16-byte border, in the order of the weights'
   pairs; the row has `rest` bytes of them. */
template <weight_format F, int PIECES>
__device__ __forceinline__ void shifted_x(const char *from, int shift, int rest, uint32_t (&to)[PIECES * 4])
{
    uint4 raw[PIECES + 1];
#pragma unroll
    for (int i = 0; i <= PIECES; i++) {
        raw[i] = make_uint4(0, 0, 0, 0);
        if (16 * i - shift < rest && (i < PIECES || shift))
            raw[i] = *reinterpret_cast<const uint4 *>(from + 16 * i - shift);
    }
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        uint4 v = shift_together<1>(raw[i], raw[i + 1], (uint32_t)shift);
        if (rest < 16 * (i + 1))
            v = first_bytes(v, rest - 16 * i);
        v = weight_order<F>(v);
        to[i * 4] = v.x, to[i * 4 + 1] = v.y, to[i * 4 + 2] = v.z, to[i * 4 + 3] = v.w;
    }
}
/* Eight elements of f32, each as the sum of three numbers of bf16, which have 8 of its bits each. An infinity is the
   first of them, and the others are 0. */
template <weight_format F>
__device__ __forceinline__ void shifted_floats(const char *from, int shift, int rest, uint32_t (&to)[3][4])
{
    uint4 raw[3];
#pragma unroll
    for (int i = 0; i < 3; i++) {
        raw[i] = make_uint4(0, 0, 0, 0);
        if (16 * i - shift < rest && (i < 2 || shift))
            raw[i] = *reinterpret_cast<const uint4 *>(from + 16 * i - shift);
    }
    uint4 low = shift_together<4>(raw[0], raw[1], (uint32_t)shift),
          high = shift_together<4>(raw[1], raw[2], (uint32_t)shift);
    if (rest < 32)
        low = first_bytes(low, rest), high = first_bytes(high, rest - 16);
    const uint32_t word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint32_t pair[3][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t term[3][2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float v = __uint_as_float(word[i * 2 + e]), first = __uint_as_float(word[i * 2 + e] & 0xffff0000u);
            const float less = fabsf(v) == INFINITY ? 0 : v - first;
            const float second = __uint_as_float(__float_as_uint(less) & 0xffff0000u);
            term[0][e] = __float_as_uint(v), term[1][e] = __float_as_uint(less);
            term[2][e] = __float_as_uint(less - second);
        }
#pragma unroll
        for (int j = 0; j < 3; j++)
            pair[j][i] = __byte_perm(term[j][0], term[j][1], 0x7632);
    }
#pragma unroll
    for (int j = 0; j < 3; j++) {
        const uint4 v = weight_order<F>(make_uint4(pair[j][0], pair[j][1], pair[j][2], pair[j][3]));
        to[j][0] = v.x, to[j][1] = v.y, to[j][2] = v.z, to[j][3] = v.w;
    }
}

/* Adds the products of 16 rows and eight columns of f32 to part: the words of rows g and g + 8 that have those
   columns, and the three terms of x. */
template <class S>
__device__ __forceinline__ void shifted_unit(const uint32_t *low, const uint32_t *high, const uint32_t (&zero)[2],
                                             bool rare, const uint32_t (&x)[S::TOKEN_TILES][3][4],
                                             float (&part)[S::TOKEN_TILES][4])
{
    constexpr int PAIRS = S::VECTOR / 8; /* in 4 bytes of a weight */
#pragma unroll
    for (int j = 0; j < 4 / PAIRS; j++) {
        uint32_t pair[2][PAIRS];
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (rare)
                weight_pairs<bf16, S::FORMAT, true>(h ? high[j] : low[j], zero[h], pair[h]);
            else
                weight_pairs<bf16, S::FORMAT, false>(h ? high[j] : low[j], 0, pair[h]);
#pragma unroll
        for (int e = 0; e < PAIRS; e += 2)
#pragma unroll
            for (int c = 0; c < S::TOKEN_TILES; c++)
#pragma unroll
                for (int term = 0; term < 3; term++)
                    mma<bf16>(part[c], pair[0][e], pair[1][e], pair[0][e + 1], pair[1][e + 1],
                              x[c][term][j * PAIRS + e], x[c][term][j * PAIRS + e + 1]);
    }
}

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, GEMM_ONE_BLOCK ? 1 : S::BLOCKS)
    gemm_shifted(const __grid_constant__ gemm_params p, int block_tokens, int block_slices)
{
    constexpr int TILES = S::ROW_TILES, PIECES = S::PIECES, COLUMNS = S::TOKEN_TILES;
    constexpr bool FLOATS = sizeof(T) == 4,
                   ZEROED = S::FORMAT == OF_F8 || S::FORMAT == OF_X; /* or NaN may be there */
    typedef typename std::conditional<FLOATS, bf16, T>::type M;      /* what is multiplied */
    extern __shared__ __align__(128) char shared[];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int slices = S::SPLITS ? block_slices : S::WARPS, most_rows = S::WARPS / slices * S::ROWS;
    const int64_t first_token = S::SPLITS ? (int64_t)blockIdx.y * block_tokens : 0;
    const int m = (int)min((int64_t)block_tokens, p.m - first_token);
    direct_layout at = shifted_layout_of<S>(most_rows, block_tokens, p.k, p.group, gemm_has_zero(p));
    const char **const row_at = (const char **)shared, **const scale_at = row_at + most_rows,
                       **const zero_at = scale_at + most_rows;
    float *const scales = (float *)(shared + at.scales);
    uint32_t *const zeros = (uint32_t *)(shared + at.zeros);
    const int parts = S::SPLITS ? cluster_size() : 1, rank = S::SPLITS ? cluster_rank() : 0;
    const unsigned block = blockIdx.x / (unsigned)parts, blocks = gridDim.x / (unsigned)parts;
    const int begin = (int)(p.n * block / blocks), end = (int)(p.n * (block + 1) / blocks);
    const int tiles = (end - begin + (p.glu ? 7 : 15)) / (p.glu ? 8 : 16);
    const int k = (int)p.k, row_bytes = S::FORMAT == OF_U4 ? (k + 1) / 2 : S::FORMAT == OF_X ? 2 * k : k;
    const int all_steps = (k + S::STEP - 1) / S::STEP;
    const int block_first = (int)((int64_t)all_steps * rank / parts);
    const int steps = (int)((int64_t)all_steps * (rank + 1) / parts) - block_first;
    const int slice = S::SPLITS ? warp & (slices - 1) : warp;
    const int first = block_first + steps * slice / slices, last = block_first + steps * (slice + 1) / slices;
    auto group_of = [&](int step) { return step >> (p.group > S::STEP); }; /* a group has one step, or two */
    const int first_group = S::SPLITS && p.group ? group_of(block_first) : 0;
    if (S::SPLITS && p.group)
        at.groups = steps > 0 ? group_of(block_first + steps - 1) - first_group + 1 : 0;
    const bool grouped = p.group, scale_f32 = p.part[0].scale_dtype == ADZE_F32,
               has_zero = S::FORMAT == OF_U4 && gemm_has_zero(p);

    for (int r = (int)threadIdx.x; r < min(most_rows, tiles * 16); r += S::THREADS) {
        const gemm_rows row = direct_row<S>(p, begin, end, r);
        const gemm_part &part = p.part[row.part];
        const int64_t of_scale = p.group_rows > 1 ? row.at / p.group_rows : row.at;
        row_at[r] = part.w + row.at * part.w_stride;
        scale_at[r] = (const char *)part.scale + (of_scale * part.scale_stride + first_group) * (scale_f32 ? 4 : 2);
        zero_at[r] = (const char *)part.zero + row.at * part.zero_stride + (has_zero ? first_group : 0);
    }
    __syncthreads();
    /* The warp's rows, of which row g is the lane's, and its tiles. */
    const int warp_row = S::SPLITS ? warp / slices * S::ROWS : 0, own_tiles = tiles - warp_row / 16;
    const char *const *const own_at = row_at + warp_row + g;
    uint4 w[TILES][2][2];
    auto fetch = [&](uint4(&to)[2][2], int tile, int step) {
        const bool there = step < last && tile < own_tiles;
        const int in_row = (step * 4 + t) * 16;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const char *const row = own_at[tile * 16 + h * 8];
            const int shift = (int)((uintptr_t)row & 15);
            const char *const from = row + (in_row - shift);
            to[h][0] = load_vector_if(from, there && in_row < row_bytes);
            to[h][1] = load_vector_if(from + 16, there && shift && in_row - shift + 16 < row_bytes);
        }
    };
    if (!p.const_weights)
        pdl_wait();
    pdl_launch_next();
#pragma unroll
    for (int i = 0; i < TILES; i++)
        fetch(w[i], i, first);
    /* The outputs that this block finishes: with(token, its place among the sums, its row) for output i. */
    const int count = end - begin, first_output = count * m * rank / parts,
              last_output = count * m * (rank + 1) / parts;
    auto finished = [&](int i, auto with) {
        const int token = i / count, of_block = i - token * count;
        const int r = p.glu ? of_block / 8 * 16 + of_block % 8 : of_block;
        with(token, r, direct_row<S>(p, begin, end, r));
    };
    if (p.residual || p.part[0].bias)
        for (int i = first_output + (int)threadIdx.x; i < last_output; i += S::THREADS)
            finished(i, [&](int token, int, const gemm_rows &row) {
                gemm_prefetch<T>(p, row.part, 0, first_token + token, row.at);
            });
    constexpr int LINES = 16; /* of x's rows: longer ones are asked for as they are needed */
    const int lines = (k * (int)sizeof(T) + 127) / 128;
    const char *const x = p.x + first_token * p.rows.stride[GEMM_X][0] * (int)sizeof(T);
    for (int i = (int)threadIdx.x; i < lines * m && lines <= LINES; i += S::THREADS)
        prefetch(x + i / lines * (p.rows.stride[GEMM_X][0] * (int)sizeof(T)) + i % lines * 128);

    /* The scales of whole rows are needed at the end only. */
    if (grouped)
        direct_scales<S>(p.part[0].scale_dtype, scale_at, tiles * 16, at, scales);
    else if (S::FORMAT != OF_X && (int)threadIdx.x < tiles * 16)
        prefetch(scale_at[threadIdx.x]);
    if (has_zero)
        direct_table<S, uint8_t>(zero_at, tiles * 16, at, zeros, [](uint8_t v) { return both<M>((float)v); });
    if (p.const_weights)
        pdl_wait();
    if (grouped || has_zero)
        __syncthreads();

    const char *x_at[COLUMNS]; /* columns beyond the tokens are not stored */
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
        x_at[c] = x + min(c * 8 + g, m - 1) * (p.rows.stride[GEMM_X][0] * (int)sizeof(T));
    /* 16 bytes of a tile's row g, or g + 8, shifted into one vector. */
    auto whole = [&](int tile, int h, int step) {
        uint4 v =
            shift_together<1>(w[tile][h][0], w[tile][h][1], (uint32_t)(uintptr_t)own_at[tile * 16 + h * 8] & 15);
        if (ZEROED && (step * 4 + t + 1) * 16 > row_bytes)
            v = first_bytes(v, row_bytes - (step * 4 + t) * 16);
        return v;
    };
    float sum[TILES][COLUMNS][4] = {};
    int group = 0; /* where the numbers of row g's group are */
    auto zeros_of = [&](int tile, uint32_t(&zero)[2]) {
        zero[0] = zeros[group + tile * 16 * at.pitch], zero[1] = zeros[group + (tile * 16 + 8) * at.pitch];
    };
    /* Adds the products of a step, scaled. */
    auto add = [&](int tile, const float(&part)[COLUMNS][4]) {
        float scale[2] = {1, 1};
        if (grouped)
            scale[0] = scales[group + tile * 16 * at.pitch], scale[1] = scales[group + (tile * 16 + 8) * at.pitch];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum[tile][c][e] = fmaf(part[c][e], scale[e / 2], sum[tile][c][e]);
    };
#pragma unroll 1
    for (int step = first; step < last; step++) {
        const int from = (step * 4 + t) * S::VECTOR * (int)sizeof(T), rest = k * (int)sizeof(T) - from;
        group = (warp_row + g) * at.pitch + (grouped ? group_of(step) - first_group : 0);
        if constexpr (FLOATS) {
            constexpr int WORDS = 4 / PIECES; /* of a vector of weights, that go with eight columns */
            uint4 v[TILES][2];
            float part[TILES][COLUMNS][4] = {};
            bool rare = has_zero;
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                v[i][0] = whole(i, 0, step), v[i][1] = whole(i, 1, step);
                fetch(w[i], i, step + 1);
                if constexpr (S::FORMAT == OF_F8)
                    rare = rare || __any_sync(0xffffffffu, f8_nan(v[i][0]) || f8_nan(v[i][1]));
            }
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++) {
                uint32_t terms[COLUMNS][3][4];
#pragma unroll
                for (int c = 0; c < COLUMNS; c++)
                    shifted_floats<S::FORMAT>(x_at[c] + from + piece * 32, (int)((uintptr_t)x_at[c] & 15),
                                              rest - piece * 32, terms[c]);
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    if (i >= own_tiles)
                        break;
                    uint32_t zero[2] = {};
                    if (has_zero)
                        zeros_of(i, zero);
                    const uint32_t low[4] = {v[i][0].x, v[i][0].y, v[i][0].z, v[i][0].w};
                    const uint32_t high[4] = {v[i][1].x, v[i][1].y, v[i][1].z, v[i][1].w};
                    shifted_unit<S>(low + piece * WORDS, high + piece * WORDS, zero, rare, terms, part[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < TILES; i++)
                if (i < own_tiles)
                    add(i, part[i]);
        } else {
            uint32_t pairs[COLUMNS][PIECES * 4];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
                shifted_x<S::FORMAT, PIECES>(x_at[c] + from, (int)((uintptr_t)x_at[c] & 15), rest, pairs[c]);
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                if (i >= own_tiles)
                    break;
                const uint4 low = whole(i, 0, step), high = whole(i, 1, step);
                fetch(w[i], i, step + 1);
                if constexpr (S::FORMAT == OF_X) {
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) {
                        mma<M>(sum[i][c], low.x, high.x, low.y, high.y, pairs[c][0], pairs[c][1]);
                        mma<M>(sum[i][c], low.z, high.z, low.w, high.w, pairs[c][2], pairs[c][3]);
                    }
                } else {
                    float part[COLUMNS][4] = {};
                    bool rare = has_zero;
                    if constexpr (S::FORMAT == OF_F8)
                        rare = __any_sync(0xffffffffu, f8_nan(low) || f8_nan(high));
                    if (rare) {
                        uint32_t zero[2] = {};
                        if (has_zero)
                            zeros_of(i, zero);
                        direct_unit<M, S, true>(low, high, zero, pairs, part);
                    } else {
                        const uint32_t none[2] = {};
                        direct_unit<M, S, false>(low, high, none, pairs, part);
                    }
                    add(i, part);
                }
            }
        }
    }

    float *const sums = (float *)(shared + at.x);
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int token = c * 8 + t * 2 + e % 2;
                if (token < m && i < own_tiles)
                    sums[(warp * m + token) * S::PITCH + i * 16 + e / 2 * 8 + g] = sum[i][c][e];
            }
    __syncthreads();
    /* Where the first slice has the sum of a token and a row of the block; what all slices have. */
    auto place = [&](int token, int r) { return sums + (r / S::ROWS * slices * m + token) * S::PITCH + r % S::ROWS; };
    auto of_slices = [&](const float *from) {
        float y = 0;
#pragma unroll 4
        for (int v = 0; v < slices; v++)
            y += from[v * m * S::PITCH];
        return y;
    };
    if (parts > 1) { /* the sums of all slices take the place of the first one's */
        for (int i = (int)threadIdx.x; i < tiles * 16 * m; i += S::THREADS) {
            float *const from = place(i / (tiles * 16), i % (tiles * 16));
            *from = of_slices(from);
        }
        cluster_arrive();
        cluster_wait();
    }
    auto of_all = [&](const float *from) {
        if (parts == 1)
            return of_slices(from);
        float y = 0;
        for (int part = 0; part < parts; part++)
            y += cluster_load(from, part);
        return y;
    };
    for (int i = first_output + (int)threadIdx.x; i < last_output; i += S::THREADS)
        finished(i, [&](int token, int r, const gemm_rows &row) {
            const float *const from = place(token, r);
            const float y = of_all(from), y2 = p.glu ? of_all(from + 8) : 0;
            gemm_finish<T>(p, row.part, 0, first_token + token, row.at, y, y2);
        });
    if (parts > 1) { /* other blocks read this one's sums */
        cluster_arrive();
        cluster_wait();
    }
}

#endif
