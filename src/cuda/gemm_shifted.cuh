/* gemm_shifted.cuh - products of quantised weights at any address, on the tensor cores.

   As gemm_direct.cuh: a block has up to ROWS rows of the weights for good, its warps have a part of k each, and a
   step is 64 bytes of each row, of which lane 4 g + t has 16 of rows g and g + 8. Those lie in two aligned vectors,
   which are loaded while the step before is computed, and then shifted into one. So are the elements of x, which
   every warp reads straight from memory, for all its rows. Vectors are loaded that hold a byte of the row, no others.
   What they hold behind k is made zero: in x always, in the weights where it might be NaN. */
#ifndef ADZE_CUDA_GEMM_SHIFTED_CUH
#define ADZE_CUDA_GEMM_SHIFTED_CUH

#include "gemm_direct.cuh"
#include "unit.cuh"

template <int ROW_TILES_, int TOKEN_TILES_, int WARPS_, int BLOCKS_, weight_format FORMAT_>
struct shifted_shape : direct_shape<ROW_TILES_, TOKEN_TILES_, WARPS_, 1, BLOCKS_, FORMAT_> {
    static constexpr int STAGE_BYTES = 16; /* there is no ring of x: less than the sums take */
};

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

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, GEMM_ONE_BLOCK ? 1 : S::BLOCKS)
    gemm_shifted(const __grid_constant__ gemm_params p)
{
    constexpr int TILES = S::ROW_TILES, PIECES = S::PIECES, COLUMNS = S::TOKEN_TILES;
    extern __shared__ __align__(128) char shared[];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4, m = (int)p.m;
    const direct_layout at = direct_layout_of<S>(p.m, p.k, p.group, gemm_has_zero(p));
    const char **const row_at = (const char **)shared, **const scale_at = row_at + S::ROWS,
                       **const zero_at = scale_at + S::ROWS;
    float *const scales = (float *)(shared + at.scales);
    uint32_t *const zeros = (uint32_t *)(shared + at.zeros);
    const int begin = (int)(p.n * blockIdx.x / gridDim.x), end = (int)(p.n * (blockIdx.x + 1) / gridDim.x);
    const int tiles = (end - begin + (p.glu ? 7 : 15)) / (p.glu ? 8 : 16);
    const int k = (int)p.k, row_bytes = S::FORMAT == OF_U4 ? (k + 1) / 2 : k, steps = (k + S::STEP - 1) / S::STEP;
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
    uint4 w[TILES][2][2];
    auto fetch = [&](uint4(&to)[2][2], int tile, int step) {
        const bool there = step < last && tile < tiles;
        const int in_row = (step * 4 + t) * 16;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const char *const row = row_at[tile * 16 + h * 8 + g];
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
    const int count = end - begin;
    auto finished = [&](int i, auto with) { /* output i of the block: its token, its place among the sums, its row */
                                            const int token = i / count, of_block = i - token * count;
                                            const int r = p.glu ? of_block / 8 * 16 + of_block % 8 : of_block;
                                            with(token, r, direct_row<S>(p, begin, end, r));
    };
    if (p.residual || p.part[0].bias)
        for (int i = (int)threadIdx.x; i < count * m; i += S::THREADS)
            finished(i,
                     [&](int token, int, const gemm_rows &row) { gemm_prefetch<T>(p, row.part, 0, token, row.at); });
    constexpr int LINES = 16; /* of x's rows: longer ones are asked for as they are needed */
    const int lines = (k * (int)sizeof(T) + 127) / 128;
    for (int i = (int)threadIdx.x; i < lines * m && lines <= LINES; i += S::THREADS)
        prefetch(p.x + i / lines * (p.rows.stride[GEMM_X][0] * (int)sizeof(T)) + i % lines * 128);

    /* The scales of whole rows are needed at the end only. */
    if (grouped)
        direct_scales<S>(p.part[0].scale_dtype, scale_at, tiles * 16, at, scales);
    else if ((int)threadIdx.x < tiles * 16)
        prefetch(scale_at[threadIdx.x]);
    if (has_zero)
        direct_table<S, uint8_t>(zero_at, tiles * 16, at, zeros, [](uint8_t v) { return both<T>((float)v); });
    if (p.const_weights)
        pdl_wait();
    if (grouped || has_zero)
        __syncthreads();

    const char *x_at[COLUMNS]; /* columns beyond the tokens are not stored */
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
        x_at[c] = p.x + min(c * 8 + g, m - 1) * (p.rows.stride[GEMM_X][0] * (int)sizeof(T));
    /* The pairs of x of a step, in the order of the weights'. */
    auto load_x = [&](const char *row, int step, uint32_t(&x)[PIECES * 4]) {
        const int from = (step * 4 + t) * S::VECTOR * 2, shift = (int)((uintptr_t)row & 15), rest = k * 2 - from;
        uint4 raw[PIECES + 1];
#pragma unroll
        for (int i = 0; i <= PIECES; i++) {
            raw[i] = make_uint4(0, 0, 0, 0);
            if (16 * i - shift < rest && (i < PIECES || shift))
                raw[i] = *reinterpret_cast<const uint4 *>(row + (from + 16 * i - shift));
        }
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            uint4 v = shift_together<1>(raw[i], raw[i + 1], (uint32_t)shift);
            if (rest < 16 * (i + 1))
                v = first_bytes(v, rest - 16 * i);
            v = weight_order<S::FORMAT>(v);
            x[i * 4] = v.x, x[i * 4 + 1] = v.y, x[i * 4 + 2] = v.z, x[i * 4 + 3] = v.w;
        }
    };
    float sum[TILES][COLUMNS][4] = {};
#pragma unroll 1
    for (int step = first; step < last; step++) {
        uint32_t x[COLUMNS][PIECES * 4];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            load_x(x_at[c], step, x[c]);
        const int group = g * at.pitch + (grouped ? step >> (p.group > S::STEP) : 0);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            if (i >= tiles)
                break;
            uint4 v[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                v[h] =
                    shift_together<1>(w[i][h][0], w[i][h][1], (uint32_t)(uintptr_t)row_at[i * 16 + h * 8 + g] & 15);
                if (S::FORMAT == OF_F8 && (step * 4 + t + 1) * 16 > k)
                    v[h] = first_bytes(v[h], k - (step * 4 + t) * 16);
            }
            fetch(w[i], i, step + 1);
            float part[COLUMNS][4] = {};
            bool rare = has_zero;
            if constexpr (S::FORMAT == OF_F8)
                rare = __any_sync(0xffffffffu, f8_nan(v[0]) || f8_nan(v[1]));
            if (rare) {
                uint32_t zero[2] = {};
                if (has_zero)
                    zero[0] = zeros[group + i * 16 * at.pitch], zero[1] = zeros[group + (i * 16 + 8) * at.pitch];
                direct_unit<T, S, true>(v[0], v[1], zero, x, part);
            } else {
                const uint32_t none[2] = {};
                direct_unit<T, S, false>(v[0], v[1], none, x, part);
            }
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

    float *const sums = (float *)(shared + at.x);
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
    for (int i = (int)threadIdx.x; i < count * m; i += S::THREADS)
        finished(i, [&](int token, int r, const gemm_rows &row) {
            const float *const from = sums + token * S::PITCH + r;
            float y = 0, y2 = 0;
#pragma unroll 4
            for (int v = 0; v < S::WARPS; v++) {
                y += from[v * m * S::PITCH];
                if (p.glu)
                    y2 += from[v * m * S::PITCH + 8];
            }
            gemm_finish<T>(p, row.part, 0, token, row.at, y, y2);
        });
}

#endif
