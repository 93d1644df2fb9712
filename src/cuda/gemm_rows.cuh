/* gemm_rows.cuh - products of few tokens in float arithmetic: any dtype, format, strides and alignment.

   A tile is ROWS_TILE rows of the weights. `slices` warps of a block have one: each takes every `slices`-th step of
   its rows, and their sums meet once, at the end, in the order of the warps. A step is 64 neighbouring words of 4
   bytes, of which a lane has two, 32 apart. A row at any address lies in aligned words: a lane loads the two that
   hold its own word, the second of which its neighbour loads too, and shifts them into one. So a lane has the same
   columns of all rows, and reads x once for them. The words of the next steps are loaded while the last ones are
   multiplied.

   No word is read that ends behind its row: the last 14 elements at most are read one by one. The order in
   which products are added depends on k, n, and the number of multiprocessors, not on the number of tokens. */
#ifndef ADZE_CUDA_GEMM_ROWS_CUH
#define ADZE_CUDA_GEMM_ROWS_CUH

#include "cluster.cuh"
#include "gemm_call.cuh"
#include "unit.cuh"

enum { ROWS_TILE = 4, ROWS_WARPS = 8, ROWS_MOST_TOKENS = 8 };

template <typename T, weight_format F>
struct rows_word {
    static constexpr int COUNT = F == OF_X ? 4 / (int)sizeof(T) : F == OF_U4 ? 8 : 4; /* elements in 4 bytes, */
    static constexpr int PART = COUNT < 4 ? COUNT : 4;                                /* and so many at a time */
    static constexpr int X_BYTES = PART * (int)sizeof(T);                             /* of x, in one load */
    static constexpr int BATCH = X_BYTES == 16 ? 2 : 4;                               /* tokens at a time */
    /* The words of a row that steps take: 4 to 7 bytes are left, or there are none. Then the loads of x, which may
       read as much beyond the last word as X_BYTES are less one element, stay in their row too. */
    static __host__ __device__ int64_t words(int64_t k)
    {
        const int64_t bytes = F == OF_X ? k * (int64_t)sizeof(T) : F == OF_U4 ? (k + 1) / 2 : k;
        return bytes < 8 ? 0 : bytes / 4 - 1;
    }
};

/* 4 bytes that no kernel writes meanwhile, or 0. The load stays where it stands among barriers and other such loads.
   x is to stay in L1, and the weights are not. */
__device__ __forceinline__ uint32_t rows_load(const char *from, bool there)
{
    uint32_t v;
    asm volatile("{\n\t.reg .pred there;\n\tsetp.ne.s32 there, %2, 0;\n\tmov.b32 %0, 0;\n\t"
                 "@there ld.global.nc.L1::evict_first.u32 %0, [%1];\n\t}"
                 : "=r"(v)
                 : "l"(from), "r"((int)there));
    return v;
}
/* 4 bytes, or 2. */
__device__ __forceinline__ uint32_t rows_load_scale(const char *from, bool wide)
{
    uint32_t v;
    asm("{\n\t.reg .pred wide;\n\t.reg .b16 half;\n\tsetp.ne.s32 wide, %2, 0;\n\tmov.b16 half, 0;\n\t"
        "@!wide ld.global.nc.u16 half, [%1];\n\tcvt.u32.u16 %0, half;\n\t@wide ld.global.nc.u32 %0, [%1];\n\t}"
        : "=r"(v)
        : "l"(from), "r"((int)wide));
    return v;
}
/* A pointer in shared memory. It is loaded where this stands, for want of registers to keep it in. */
__device__ __forceinline__ const char *rows_pointer(const char *const *at)
{
    const char *v;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"((uint32_t)__cvta_generic_to_shared(at)));
    return v;
}

/* The floats of a word, and of the low half of one of u4; `less` is 2^23 more than the zero. */
template <typename T, weight_format F>
__device__ __forceinline__ void rows_floats(uint32_t w, float less, float *f)
{
    if constexpr (F == OF_I8) {
        i8_floats(w, f);
    } else if constexpr (F == OF_F8) {
        uint32_t pair[2];
        f8_halves(w, pair);
        const float2 a = __half22float2(*reinterpret_cast<const __half2 *>(&pair[0]));
        const float2 b = __half22float2(*reinterpret_cast<const __half2 *>(&pair[1]));
#if __CUDA_ARCH__ >= 890
        f[0] = a.x, f[1] = a.y, f[2] = b.x, f[3] = b.y;
#else
        f[0] = a.x, f[1] = b.x, f[2] = a.y, f[3] = b.y;
#endif
    } else if constexpr (F == OF_U4) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            f[i] = __uint_as_float(and_or<0xfu, 0x4b000000u>(w >> (4 * i))) - less;
    } else if constexpr (sizeof(T) == 4) {
        f[0] = __uint_as_float(w);
    } else if constexpr (std::is_same<T, bf16>::value) {
        f[0] = __uint_as_float(w << 16), f[1] = __uint_as_float(w & 0xffff0000u);
    } else {
        const float2 both = __half22float2(*reinterpret_cast<const __half2 *>(&w));
        f[0] = both.x, f[1] = both.y;
    }
}

/* BYTES of x, at an address that is a multiple of BYTES; and at that of any element. */
template <int BYTES>
__device__ __forceinline__ void rows_x(const char *from, uint32_t *word)
{
    if constexpr (BYTES == 4) {
        word[0] = *reinterpret_cast<const uint32_t *>(from);
    } else if constexpr (BYTES == 8) {
        const uint2 v = *reinterpret_cast<const uint2 *>(from);
        word[0] = v.x, word[1] = v.y;
    } else {
        const uint4 v = *reinterpret_cast<const uint4 *>(from);
        word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    }
}
template <int BYTES, typename T>
__device__ __forceinline__ void rows_unaligned_x(const char *from, uint32_t *word)
{
    if constexpr (BYTES == 16) {
        const uint4 v = load_unaligned((const T *)from);
        word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    } else {
        constexpr int WORDS = BYTES / 4;
        const uint32_t shift = (uint32_t)(uintptr_t)from & (BYTES - 1);
        uint32_t w[2 * WORDS];
        rows_x<BYTES>(from - shift, w);
        rows_x<BYTES>(from - shift + (shift ? BYTES : 0), w + WORDS);
        if constexpr (WORDS == 2) {
#pragma unroll
            for (int i = 0; i < 3; i++)
                w[i] = shift & 4 ? w[i + 1] : w[i];
        }
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            word[i] = __funnelshift_r(w[i], w[i + 1], (shift & 3) * 8);
    }
}

/* As gemm_tile_rows(), for tiles of 1 << `shift` rows: without a division, which is a function call. */
__device__ __forceinline__ gemm_rows rows_of_tile(const gemm_params &p, int64_t tile, int shift)
{
    const int64_t size = (int64_t)1 << shift;
    int part = 0;
    int64_t tiles = (p.part[0].n + size - 1) >> shift;
    if (!p.glu)
#pragma unroll
        for (int i = 1; i < GEMM_PARTS; i++)
            if (part == i - 1 && tile >= tiles) {
                tile -= tiles;
                part = i;
                tiles = (p.part[i].n + size - 1) >> shift;
            }
    const int64_t at = tile << shift, rest = p.part[part].n - at;
    return {part, (int)at, rest < size ? (int)rest : (int)size};
}

/* What a warp has in shared memory, of its rows and tokens. */
struct rows_table {
    const char *scale[ROWS_TILE], *zero[ROWS_TILE]; /* zero: NULL: 8 */
    const char *x[ROWS_MOST_TOKENS];
};

/* The rows of a tile. With glu the second half are the value's. */
template <typename T, weight_format F>
struct rows_tile {
    const char *at[ROWS_TILE]; /* the aligned word that has the first byte */
    uint32_t shift[ROWS_TILE]; /* in bits */
    int scale_dtype[2];        /* of each half */

    __device__ __forceinline__ void init(const gemm_params &p, const gemm_rows &rows, int64_t batch, int lane,
                                         rows_table *table)
    {
        /* A lane computes a row. There is no harm in computing one twice. */
        const int own = lane % ROWS_TILE, of_tile = p.glu ? own % (ROWS_TILE / 2) : own;
        const gemm_part &part = p.part[p.glu ? own / (ROWS_TILE / 2) : rows.part];
        const int64_t row = rows.at + (of_tile < rows.count ? of_tile : rows.count - 1);
        const char *const w = part.w + batch * p.w_batch + row * part.w_stride;
#pragma unroll
        for (int r = 0; r < ROWS_TILE; r++) {
            const char *const own_w = (const char *)__shfl_sync(0xffffffffu, (unsigned long long)w, r);
            shift[r] = (uint32_t)((uintptr_t)own_w & 3) * 8;
            at[r] = own_w - shift[r] / 8;
        }
        if constexpr (F != OF_X) {
            const int64_t of_group = (p.group_rows > 1 ? row >> 7 : row) * part.scale_stride; /* 1 row or 128 */
            if (lane < ROWS_TILE) {
                table->scale[lane] = (const char *)part.scale + of_group * (part.scale_dtype == ADZE_F32 ? 4 : 2);
                table->zero[lane] = part.zero ? (const char *)part.zero + row * part.zero_stride : NULL;
            }
            scale_dtype[0] = __shfl_sync(0xffffffffu, part.scale_dtype, 0);
            scale_dtype[1] = __shfl_sync(0xffffffffu, part.scale_dtype, ROWS_TILE - 1);
        }
    }
    /* The factors of a group of columns, and 2^23 more than their zeros. Those of whole rows are multiplied at the
       end. */
    __device__ __forceinline__ void group(const rows_table &table, bool grouped, int index,
                                          float (&factor)[ROWS_TILE], float (&less)[ROWS_TILE]) const
    {
        if constexpr (F == OF_U4) {
#pragma unroll
            for (int r = 0; r < ROWS_TILE; r++) {
                const uint8_t *const zero = (const uint8_t *)rows_pointer(&table.zero[r]);
                less[r] = 0x1p23f + (zero ? (float)zero[index] : 8.0f);
            }
        }
        if constexpr (F != OF_X) {
            if (!grouped)
                return;
            uint32_t bits[ROWS_TILE];
#pragma unroll
            for (int r = 0; r < ROWS_TILE; r++) {
                const bool wide = scale_dtype[r / (ROWS_TILE / 2)] == ADZE_F32;
                bits[r] = rows_load_scale(rows_pointer(&table.scale[r]) + index * (wide ? 4 : 2), wide);
            }
#pragma unroll
            for (int r = 0; r < ROWS_TILE; r++) {
                const int dtype = scale_dtype[r / (ROWS_TILE / 2)];
                const float half = __half2float(__ushort_as_half((unsigned short)bits[r]));
                factor[r] = dtype == ADZE_F16 ? half : __uint_as_float(dtype == ADZE_F32 ? bits[r] : bits[r] << 16);
            }
        }
    }
};

/* The sums of all lanes: of value i in lanes i * (32 / N) and on. Each is added in the same order. */
template <int N, int BIT = 16, int ALL>
__device__ __forceinline__ float rows_reduce(float (&v)[ALL], int lane)
{
    const bool upper = lane & BIT;
    if constexpr (BIT == 0) {
        return v[0];
    } else if constexpr (N == 1) {
        v[0] += __shfl_xor_sync(0xffffffffu, v[0], BIT);
        return rows_reduce<1, BIT / 2>(v, lane);
    } else {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const float kept = upper ? v[i + N / 2] : v[i], given = upper ? v[i] : v[i + N / 2];
            v[i] = kept + __shfl_xor_sync(0xffffffffu, given, BIT);
        }
        return rows_reduce<N / 2, BIT / 2>(v, lane);
    }
}

/* Blocks of a multiprocessor, as far as registers go. */
constexpr int rows_blocks(int tokens, weight_format f)
{
    return tokens > (f == OF_U4 ? 1 : 2) ? 2 : 3;
}

template <typename T, weight_format F, int TOKENS>
__global__ void __launch_bounds__(32 * ROWS_WARPS, GEMM_ONE_BLOCK ? 1 : rows_blocks(TOKENS, F))
    gemm_few_rows(const __grid_constant__ gemm_params p, int64_t tiles, int token_tiles, int slice_shift)
{
    typedef rows_word<T, F> word;
    constexpr int COUNT = word::COUNT, PART = word::PART, N = ROWS_TILE * TOKENS;
    constexpr int WORDS = 2, STEP = 32 * WORDS;
    constexpr int BATCH = TOKENS < word::BATCH ? TOKENS : TOKENS == 8 && F != OF_X ? 2 : word::BATCH;
    __shared__ float sums[ROWS_WARPS][N];
    __shared__ rows_table tables[ROWS_WARPS];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, slices = 1 << slice_shift;
    const int groups = ROWS_WARPS >> slice_shift, tile_shift = p.glu ? 1 : 2, rank = cluster_rank();
    const int slice = (rank << slice_shift) + (warp & (slices - 1)), all_slices = slices * cluster_size();
    const unsigned block = blockIdx.x / (unsigned)cluster_size();
    const int64_t first_tile = (int64_t)(block / (unsigned)token_tiles) * groups, batch = blockIdx.y;
    const int64_t first_token = (int64_t)(block % (unsigned)token_tiles) * TOKENS;
    const int64_t own_tile = first_tile + (warp >> slice_shift);
    rows_table &table = tables[warp];
    rows_tile<T, F> rows;
    rows.init(p, rows_of_tile(p, own_tile < tiles ? own_tile : tiles - 1, tile_shift), batch, lane, &table);
    const int64_t token = min(first_token + lane % TOKENS, p.m - 1); /* a lane computes one */
    const char *const x =
        p.x + batch * p.x_batch + row_offset(p.rows, GEMM_X, row_split(p.rows, token)) * (int64_t)sizeof(T);
    const bool aligned = __all_sync(0xffffffffu, (uintptr_t)x % word::X_BYTES == 0);
    if (lane < TOKENS)
        table.x[lane] = x;
    __syncwarp();

    const int words = (int)word::words(p.k), steps = (words + STEP - 1) / STEP;
    const int group_shift = p.group == 32 ? 5 : p.group == 64 ? 6 : p.group == 128 ? 7 : 31;
    int index = slice * STEP + lane; /* the lane's first word of a step */
    uint32_t raw[WORDS][ROWS_TILE][2];
    auto fetch = [&](int first) {
#pragma unroll
        for (int a = 0; a < WORDS; a++)
#pragma unroll
            for (int r = 0; r < ROWS_TILE; r++) {
                const bool there = first + a * 32 < words;
                raw[a][r][0] = rows_load(rows.at[r] + a * 128, there);
                raw[a][r][1] = rows_load(rows.at[r] + a * 128 + 4, there && rows.shift[r]);
            }
    };
    /* The elements behind the words: a lane has one. */
    const int last = words * COUNT + lane;
    const bool has_last = slice == (steps & (all_slices - 1)) && last < p.k;
    float end[ROWS_TILE] = {};
    if (!p.const_weights)
        pdl_wait();
    pdl_launch_next();
    if (has_last) {
#pragma unroll
        for (int r = 0; r < ROWS_TILE; r++)
            end[r] = weight_float<T, F>(rows.at[r] + rows.shift[r] / 8, last);
    }
#pragma unroll
    for (int r = 0; r < ROWS_TILE; r++)
        rows.at[r] += (int64_t)index * 4;
    fetch(index);
    const int half = TOKENS << tile_shift; /* the products of a tile; with glu those of the value follow */
    auto finished = [&](auto with) {       /* the outputs of a thread: their places among the sums, rows, tokens */
                                     for (int i = (int)threadIdx.x; i < groups * half; i += 32 * ROWS_WARPS) {
                                         const int group = i / TOKENS >> tile_shift, at = i & (half - 1),
                                                   column = at / TOKENS, token = at % TOKENS;
                                         if (first_tile + group >= tiles || first_token + token >= p.m)
                                             continue;
                                         gemm_rows of = rows_of_tile(p, first_tile + group, tile_shift);
                                         if (column >= of.count)
                                             continue;
                                         of.at += column;
                                         with(group, at, of, first_token + token);
                                     }
    };
    if ((p.residual || p.part[0].bias) && rank == 0)
        finished([&](int, int, const gemm_rows &of, int64_t its_token) {
            gemm_prefetch<T, false>(p, of.part, batch, its_token, of.at);
        });
    constexpr int LINES = 16; /* of x's rows: longer ones are asked for as they are needed */
    const int lines = (int)min((p.k * (int64_t)sizeof(T) + 127) / 128, (int64_t)LINES + 1);
    for (int i = (int)threadIdx.x; i < lines * TOKENS && lines <= LINES; i += 32 * ROWS_WARPS)
        prefetch(table.x[i / lines] + i % lines * 128);
    if (F != OF_X && p.group) { /* scales have 2 bytes or 4 */
#pragma unroll
        for (int r = 0; r < ROWS_TILE; r++)
            if (lane * 64 <= (p.k - 1) >> group_shift)
                prefetch(table.scale[r] + lane * 128);
    }
    if (p.const_weights)
        pdl_wait();

    float sum[N] = {}, factor[ROWS_TILE], less[ROWS_TILE];
#pragma unroll
    for (int r = 0; r < ROWS_TILE; r++)
        factor[r] = 1, less[r] = 0;
    if (has_last) {
        rows.group(table, p.group, last >> group_shift, factor, less);
#pragma unroll
        for (int r = 0; r < ROWS_TILE; r++) {
            end[r] -= F == OF_U4 ? less[r] - 0x1p23f : 0;
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
                sum[r * TOKENS + t] = end[r] * to_float(((const T *)table.x[t])[last]) * factor[r];
        }
    }

    /* PART elements of each row, and those of x, from byte `at` of its rows on. */
    auto multiply = [&](int at, const uint32_t(&w)[ROWS_TILE]) {
        float f[ROWS_TILE][PART];
#pragma unroll
        for (int r = 0; r < ROWS_TILE; r++)
            rows_floats<T, F>(w[r], less[r], f[r]);
#pragma unroll
        for (int first = 0; first < TOKENS; first += BATCH) {
            uint32_t x[BATCH][word::X_BYTES / 4];
            if (sizeof(T) == word::X_BYTES || aligned) {
#pragma unroll
                for (int t = 0; t < BATCH; t++)
                    rows_x<word::X_BYTES>(rows_pointer(&table.x[first + t]) + at, x[t]);
            } else {
#pragma unroll
                for (int t = 0; t < BATCH; t++)
                    rows_unaligned_x<word::X_BYTES, T>(rows_pointer(&table.x[first + t]) + at, x[t]);
            }
#pragma unroll
            for (int t = 0; t < BATCH; t++) {
                float v[PART];
#pragma unroll
                for (int i = 0; i < word::X_BYTES / 4; i++)
                    rows_floats<T, OF_X>(x[t][i], 0, v + i * (4 / (int)sizeof(T)));
#pragma unroll
                for (int r = 0; r < ROWS_TILE; r++) {
                    float &to = sum[r * TOKENS + first + t];
                    float part = F == OF_X ? to : 0;
#pragma unroll
                    for (int i = 0; i < PART; i++)
                        part = fmaf(f[r][i], v[i], part);
                    to = F == OF_X ? part : fmaf(part, factor[r], to);
                }
            }
        }
    };
#pragma unroll 1
    for (; index - lane < words; index += STEP * all_slices) {
        uint32_t w[WORDS][ROWS_TILE];
#pragma unroll
        for (int a = 0; a < WORDS; a++)
#pragma unroll
            for (int r = 0; r < ROWS_TILE; r++)
                w[a][r] = __funnelshift_r(raw[a][r][0], raw[a][r][1], rows.shift[r]);
#pragma unroll
        for (int r = 0; r < ROWS_TILE; r++)
            rows.at[r] += STEP * 4 * all_slices;
        fetch(index + STEP * all_slices);
#pragma unroll 1
        for (int a = 0; a < WORDS && index + a * 32 < words; a++) {
            const int at = (index + a * 32) * COUNT;
            rows.group(table, p.group, at >> group_shift, factor, less);
#pragma unroll 1
            for (int i = 0; i < COUNT; i += PART) {
                multiply((at + i) * (int)sizeof(T), w[0]);
#pragma unroll
                for (int r = 0; r < ROWS_TILE; r++)
                    w[0][r] >>= 16; /* the other half of 8 */
            }
#pragma unroll
            for (int r = 0; r < ROWS_TILE; r++)
                w[0][r] = w[1][r];
        }
    }

    const float total = rows_reduce<N>(sum, lane);
    if (lane % (32 / N) == 0)
        sums[warp][lane / (32 / N)] = total;
    __syncthreads();
    const int parts = cluster_size();
    if (parts > 1) { /* whose warps have one tile: the sums of all take the place of the first one's */
        if (threadIdx.x < N) {
            float all = 0;
#pragma unroll
            for (int v = 0; v < ROWS_WARPS; v++)
                all += sums[v][threadIdx.x];
            sums[0][threadIdx.x] = all;
        }
        cluster_arrive();
        cluster_wait();
        if (rank == 0 && threadIdx.x < N) {
            float all = sums[0][threadIdx.x];
            for (int part = 1; part < parts; part++)
                all += cluster_load(&sums[0][threadIdx.x], part);
            sums[0][threadIdx.x] = all;
        }
        cluster_arrive(); /* other blocks' sums are read */
        cluster_wait();
        if (rank > 0)
            return;
    }
    finished([&](int group, int at, const gemm_rows &of, int64_t its_token) {
        float y = 0, y2 = 0;
        const int last_warp = parts > 1 ? 1 : (group + 1) << slice_shift;
        for (int v = group << slice_shift; v < last_warp; v++) {
            y += sums[v][at];
            y2 += p.glu ? sums[v][at + half] : 0;
        }
        gemm_finish<T, false>(p, of.part, batch, its_token, of.at, y, y2);
    });
}

#endif
