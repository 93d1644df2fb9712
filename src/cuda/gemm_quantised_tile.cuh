/* gemm_quantised_tile.cuh - products of many tokens with quantised weights: a block computes a tile of tokens and
   rows.

   As in gemm_tile.cuh both operands pass through stages in shared memory, SLICES warps may have the same tile and a
   part of each stage, and the blocks of a cluster may have a part of k each. The weights stay packed there. A warp
   has up to STRIP rows, 8 at a time: lane 4 g + t takes 16 weights of row g and the same 16 elements of tokens g and
   g + 8, so that four lanes have a chunk of 64. It unpacks its weights once for all of its tokens, whose elements it
   has put into the order of the weights' pairs. The sum of a chunk, which lies in one group, is multiplied by the
   group's scale: these are floats in shared memory, and their loads are one step ahead of the copies of the weights.

   Every block reads all tokens of its part of k, from L2, which takes longer than the weights do. So tiles have many
   rows, as many as load the multiprocessors evenly. */
#ifndef ADZE_CUDA_GEMM_QUANTISED_TILE_CUH
#define ADZE_CUDA_GEMM_QUANTISED_TILE_CUH

#include "cluster.cuh"
#include "gemm_call.cuh"
#include "mma.cuh"

#include <algorithm>

/* Tokens of a block and of a warp, multiples of 16; strips; chunks of a stage, which slices divide. */
template <int TOKENS_, int WARP_TOKENS_, int STRIPS_, int SLICES_, int CHUNKS_, int STAGES_, weight_format FORMAT_,
          bool TABLED_>
struct quantised_tile_shape {
    static constexpr int TOKENS = TOKENS_, WARP_TOKENS = WARP_TOKENS_, STRIPS = STRIPS_, SLICES = SLICES_;
    static constexpr int CHUNKS = CHUNKS_, STAGES = STAGES_;
    static constexpr weight_format FORMAT = FORMAT_;
    static constexpr bool TABLED = TABLED_; /* with scales of groups, or with zeros */
    static constexpr int STRIP = 64, ROWS = STRIPS * STRIP, CHUNK = 64, VECTOR = weight_vector(FORMAT);
    static constexpr int TILE_WARPS = TOKENS / WARP_TOKENS * STRIPS, THREADS = TILE_WARPS * SLICES * 32,
                         WORKERS = THREADS;
    static constexpr int W_CHUNK = FORMAT == OF_U4 ? 32 : 64;                      /* bytes of a chunk of a row */
    static constexpr int X_PITCH = CHUNKS * CHUNK * 2, W_PITCH = CHUNKS * W_CHUNK; /* bytes of a row in a stage */
    static constexpr int X_BYTES = TOKENS * X_PITCH, STAGE_BYTES = X_BYTES + ROWS * W_PITCH;
    /* Scales by chunk and row, and the addends of u4, after the stages. */
    static constexpr int TABLE = CHUNKS * ROWS, TABLES = !TABLED ? 0 : FORMAT == OF_U4 ? 2 : 1;
    static constexpr int SHARED = STAGES * (STAGE_BYTES + TABLES * TABLE * 4);
    static constexpr int PITCH = ROWS + 8; /* floats of a token among the sums: lanes have banks of their own */
    /* Rows that would have the same banks have the halves of their chunks in different orders. */
    static constexpr int W_HALF = W_CHUNK / 2, SPREAD = W_PITCH < 128 ? 128 / W_PITCH : 1;
    static constexpr int ORDERS = (W_PITCH < 128 ? W_PITCH : 128) / W_HALF;
    static __device__ __forceinline__ int order(int row) { return row / SPREAD % ORDERS; }
    static_assert(CHUNKS % SLICES == 0, "slices have as many chunks");
    static_assert(SLICES * TOKENS * PITCH * 4 <= STAGES * STAGE_BYTES, "the sums take the place of the stages");
};

/* Where a block is. It is computed again at the end: in the loop registers are few. */
struct quantised_tile_place {
    gemm_rows rows;
    int64_t token;
};
template <class S>
__device__ __forceinline__ quantised_tile_place quantised_tile_place_of(const gemm_params &p, uint32_t index,
                                                                        int token_tiles, int strip)
{
    const uint32_t cluster = index / (uint32_t)cluster_size(), tile = cluster / (uint32_t)token_tiles;
    return {gemm_tile_rows(p, tile, strip * (p.glu ? S::STRIPS / 2 : S::STRIPS)),
            (int64_t)(cluster - tile * (uint32_t)token_tiles) * S::TOKENS};
}

/* The end of a tile whose sums, floats or those of quantised x as integers, are in shared memory, or those of a part
   of k: of its own tokens a block of a cluster has the sums of all parts, and finishes them. WORKERS threads of a
   block come here, the others have exited. T: out's type, where it has 16 bits. */
__device__ __forceinline__ float4 tile_add(const float *, float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 tile_add(const int *, float4 a, float4 b)
{
    auto add = [](float c, float d) { return __int_as_float(__float_as_int(c) + __float_as_int(d)); };
    return make_float4(add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w));
}
template <typename T, class S, typename SUM>
__device__ __forceinline__ void tile_finish(const gemm_params &p, SUM *sums, int token_tiles, int strip)
{
    constexpr int ENDS = S::THREADS > 512 ? 2 : GEMM_ENDS; /* as far as registers go */
    const int parts = cluster_size(), rank = cluster_rank();
    const int first = S::TOKENS * rank / parts, last = S::TOKENS * (rank + 1) / parts;
    if (parts > 1) { /* of its own tokens a block has the sums of all parts: no other one reads these here */
        cluster_arrive();
        cluster_wait();
        for (int i = first * S::PITCH + (int)threadIdx.x * 4; i < last * S::PITCH; i += S::WORKERS * 4) {
            const float *const at = reinterpret_cast<const float *>(sums + i);
            float4 all = cluster_load4(at, 0);
            for (int part = 1; part < parts; part++)
                all = tile_add(sums, all, cluster_load4(at, part));
            *reinterpret_cast<float4 *>(sums + i) = all;
        }
        cluster_arrive();
    }
    __syncthreads();
    const quantised_tile_place at_end = quantised_tile_place_of<S>(p, opaque(blockIdx.x), token_tiles, strip);
    const int columns = p.glu ? S::ROWS / 2 : S::ROWS, shift = 31 - __clz(columns);
    for (int i = (first << shift) + (int)threadIdx.x; i < last << shift; i += S::WORKERS * ENDS) {
        gemm_end<T, true, std::is_same<SUM, int>::value> end[ENDS];
        int at[ENDS]; /* among the sums; -1: there is none */
#pragma unroll
        for (int j = 0; j < ENDS; j++) {
            const int own = i + j * S::WORKERS, of_tile = own >> shift, column = own & (columns - 1);
            const int in_strip = column % S::STRIP, row = column / S::STRIP * strip + in_strip;
            const bool there =
                own < last << shift && in_strip < strip && row < at_end.rows.count && at_end.token + of_tile < p.m;
            at[j] = there ? of_tile * S::PITCH + column : -1;
            if (there)
                end[j].load(p, at_end.rows.part, 0, at_end.token + of_tile, at_end.rows.at + row);
        }
#pragma unroll
        for (int j = 0; j < ENDS; j++)
            if (at[j] >= 0)
                end[j].store(p, at_end.rows.part, (float)sums[at[j]], p.glu ? (float)sums[at[j] + S::ROWS / 2] : 0);
    }
    if (parts > 1) /* other blocks read this one's sums */
        cluster_wait();
}

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, 1) gemm_quantised_tile(const gemm_params p, int token_tiles, int strip)
{
    constexpr int MT = S::WARP_TOKENS / 16, NT = S::STRIP / 8;
    constexpr weight_format F = S::FORMAT;
    extern __shared__ __align__(128) char shared[];
    const uint32_t stages = shared_address(shared);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int slice = warp / S::TILE_WARPS, of_slice = warp % S::TILE_WARPS, own_strip = of_slice % S::STRIPS;
    const int warp_token = of_slice / S::STRIPS * S::WARP_TOKENS, warp_row = own_strip * S::STRIP;
    const int parts = cluster_size(), rank = cluster_rank(); /* of k, which the blocks of a cluster share */
    const quantised_tile_place place = quantised_tile_place_of<S>(p, blockIdx.x, token_tiles, strip);
    const gemm_rows rows = place.rows;
    const int all_steps = ((int)p.k + S::CHUNKS * S::CHUNK - 1) / (S::CHUNKS * S::CHUNK);
    const int first_step = (int)((int64_t)all_steps * rank / parts);
    const int steps = (int)((int64_t)all_steps * (rank + 1) / parts) - first_step;
    /* With glu the first half of the strips has rows of the gate's weight, the other half the same rows of the
       value's. */
    auto rows_of = [&](int s) -> gemm_rows {
        const int first = (p.glu ? s % (S::STRIPS / 2) : s) * strip;
        return {p.glu ? s / (S::STRIPS / 2) : rows.part, rows.at + first, min(strip, rows.count - first)};
    };

    /* A thread copies the same piece of every W_STEPth row of the weights in a stage, and of every X_STEPth token. */
    constexpr int W_PIECES = S::W_PITCH / 16, W_STEP = S::THREADS / W_PIECES, W_COPIES = S::STRIP / W_STEP;
    constexpr int X_PIECES = S::X_PITCH / 16, X_STEP = S::THREADS / X_PIECES, X_COPIES = S::TOKENS / X_STEP;
    static_assert(S::STRIP % W_STEP == 0 && S::TOKENS % X_STEP == 0, "each thread copies as many rows");
    static_assert(W_STEP % (S::SPREAD * S::ORDERS) == 0 && X_STEP % 2 == 0, "the rows of a thread have one order");
    constexpr int OF_HALF = S::W_HALF / 16;
    const int w_piece = (int)threadIdx.x % W_PIECES, w_row = (int)threadIdx.x / W_PIECES;
    const int x_piece = (int)threadIdx.x % X_PIECES, x_row = (int)threadIdx.x / X_PIECES;
    const uint32_t w_to = stages + (uint32_t)(S::X_BYTES + w_row * S::W_PITCH + w_piece % OF_HALF * 16 +
                                              (w_piece / OF_HALF ^ S::order(w_row)) * S::W_HALF);
    const uint32_t x_to = stages + (uint32_t)(x_row * S::X_PITCH + (x_piece ^ (x_row & 1) << 2) * 16);
    const char *w_from[S::STRIPS];
    int w_stride[S::STRIPS];
    uint32_t w_there = 0, x_there = 0; /* a bit of each copy */
#pragma unroll
    for (int s = 0; s < S::STRIPS; s++) {
        const gemm_rows of = rows_of(s);
        w_stride[s] = (int)p.part[of.part].w_stride;
        w_from[s] = p.part[of.part].w + (int64_t)(of.at + w_row) * w_stride[s] +
                    (int64_t)(first_step * W_PIECES + w_piece) * 16;
#pragma unroll
        for (int i = 0; i < W_COPIES; i++)
            w_there |= (uint32_t)(i * W_STEP + w_row < of.count) << (s * W_COPIES + i);
    }
    const int x_stride = (int)p.rows.stride[GEMM_X][0] * (int)sizeof(T);
    const char *const x_from =
        p.x + (place.token + x_row) * x_stride + (int64_t)(first_step * X_PIECES + x_piece) * 16;
#pragma unroll
    for (int i = 0; i < X_COPIES; i++)
        x_there |= (uint32_t)(place.token + i * X_STEP + x_row < p.m) << i;
    /* Steps in which a thread's pieces are within k. */
    const int w_steps = ((int)p.k / S::VECTOR - w_piece + W_PIECES - 1) / W_PIECES - first_step;
    const int x_steps = ((int)p.k / 8 - x_piece + X_PIECES - 1) / X_PIECES - first_step;
    auto fetch_weights = [&](int step) {
        const uint32_t to = w_to + (uint32_t)(step % S::STAGES * S::STAGE_BYTES);
        const uint32_t there = step < w_steps ? w_there : 0;
#pragma unroll
        for (int i = 0; i < S::STRIPS * W_COPIES; i++)
            copy_async(to + (uint32_t)(i * W_STEP * S::W_PITCH),
                       w_from[i / W_COPIES] + (int64_t)w_stride[i / W_COPIES] * (i % W_COPIES * W_STEP) +
                           step * S::W_PITCH,
                       there >> i & 1);
    };
    auto fetch_x = [&](int step) {
        const uint32_t to = x_to + (uint32_t)(step % S::STAGES * S::STAGE_BYTES);
        const uint32_t there = step < x_steps ? x_there : 0;
#pragma unroll
        for (int i = 0; i < X_COPIES; i++)
            copy_async(to + (uint32_t)(i * X_STEP * S::X_PITCH),
                       x_from + (int64_t)x_stride * (i * X_STEP) + step * S::X_PITCH, there >> i & 1);
    };

    /* Scales and zeros: a thread has one row. Where they are of whole rows, gemm_finish has the scales. */
    float *const scales = (float *)(shared + S::STAGES * S::STAGE_BYTES);
    uint32_t *const addends = (uint32_t *)scales + S::STAGES * S::TABLE;
    constexpr int LOADS = S::TABLE / S::THREADS, AT_ONCE = S::THREADS / S::ROWS;
    static_assert(S::THREADS % S::ROWS == 0 && S::TABLE % S::THREADS == 0, "each thread has as many of one row");
    const int of_group = p.group ? 31 - __clz(p.group) : 31, table_chunk = (int)threadIdx.x / S::ROWS;
    const char *scale_from = NULL;
    const uint8_t *zero_from = NULL;
    int scale_dtype = 0;
    if constexpr (S::TABLED) {
        const int r = (int)threadIdx.x % S::ROWS;
        const gemm_rows of = rows_of(r / S::STRIP);
        const gemm_part &part = p.part[of.part];
        const int row = r % S::STRIP < of.count ? of.at + r % S::STRIP : rows.at;
        scale_dtype = part.scale_dtype;
        scale_from = (const char *)part.scale + (p.group_rows > 1 ? row / p.group_rows : row) * part.scale_stride *
                                                    (scale_dtype == ADZE_F32 ? 4 : 2);
        if (part.zero)
            zero_from = (const uint8_t *)part.zero + row * part.zero_stride;
    }
    struct entries {
        uint32_t scale[LOADS], zero[LOADS];
    };
    auto load_entries = [&](entries &v, int step) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int chunk = (first_step + step) * S::CHUNKS + i * AT_ONCE + table_chunk;
            const int group = min(chunk * S::CHUNK, (int)p.k - 1) >> of_group;
            v.scale[i] = !scale_from               ? 0
                         : scale_dtype == ADZE_F32 ? ((const uint32_t *)scale_from)[group]
                                                   : ((const uint16_t *)scale_from)[group];
            if constexpr (F == OF_U4)
                v.zero[i] = zero_from ? zero_from[group] : 8;
        }
    };
    auto store_entries = [&](const entries &v, int step) {
        const int at = step % S::STAGES * S::TABLE + (int)threadIdx.x;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            float f = 1;
            if (p.group)
                f = scale_dtype == ADZE_F32    ? __uint_as_float(v.scale[i])
                    : scale_dtype == ADZE_BF16 ? __uint_as_float(v.scale[i] << 16)
                                               : __half2float(__ushort_as_half((unsigned short)v.scale[i]));
            scales[at + i * S::THREADS] = f;
            if constexpr (F == OF_U4)
                addends[at + i * S::THREADS] = weight_addend<T, F>((float)v.zero[i]);
        }
    };

    if (!p.const_weights)
        pdl_wait();
    pdl_launch_next();
#pragma unroll
    for (int i = 0; i < S::STAGES - 1; i++) {
        if (i < steps)
            fetch_weights(i);
    }
    copy_commit(); /* x comes in groups of its own, after all of these */
    entries next_entries;
    if constexpr (S::TABLED) {
        entries first[S::STAGES - 1];
#pragma unroll
        for (int i = 0; i < S::STAGES - 1; i++)
            load_entries(first[i], i);
        load_entries(next_entries, S::STAGES - 1);
#pragma unroll
        for (int i = 0; i < S::STAGES - 1; i++)
            store_entries(first[i], i);
    }
    if (p.const_weights)
        pdl_wait();
#pragma unroll
    for (int i = 0; i < S::STAGES - 1; i++) {
        if (i < steps)
            fetch_x(i);
        copy_commit();
    }

    float sum[MT][NT][4] = {};
    uint32_t nan = 0; /* a bit of each 8 rows: a NaN of f8e4m3 makes all products of its row one */
    const int row_tiles = strip / 8;
    auto multiply = [&](const char *stage, int chunk, int table) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 x[MT][2];
            const char *const x_at = stage + (warp_token + g) * S::X_PITCH + chunk * 128;
#pragma unroll
            for (int i = 0; i < MT * 2; i++)
                x[i / 2][i % 2] =
                    weight_order<F>(load_shared(x_at + i * 8 * S::X_PITCH + ((half * 4 + t) ^ (g & 1) << 2) * 16));
            const char *const w_at = stage + S::X_BYTES + (warp_row + g) * S::W_PITCH +
                                     ((chunk * 2 + half) ^ S::order(g)) * S::W_HALF + t * (S::W_HALF / 4);
            /* The pairs of the next 8 rows are made while those of the last are multiplied. */
            uint32_t pairs[2][4];
            auto unpack = [&](int n) {
                uint32_t(&w)[4] = pairs[n % 2];
                if constexpr (F == OF_U4) {
                    const uint32_t v = *reinterpret_cast<const uint32_t *>(w_at + n * 8 * S::W_PITCH);
                    const uint32_t addend =
                        S::TABLED ? addends[table + warp_row + n * 8 + g] : weight_addend<T, F>(8);
                    unit_pairs<T, F, false>(v, addend, w);
                } else {
                    const uint2 v = *reinterpret_cast<const uint2 *>(w_at + n * 8 * S::W_PITCH);
                    uint32_t low[2], high[2];
                    unit_pairs<T, F, false>(v.x, weight_addend<T, F>(128), low);
                    unit_pairs<T, F, false>(v.y, weight_addend<T, F>(128), high);
                    w[0] = low[0], w[1] = low[1], w[2] = high[0], w[3] = high[1];
                    if constexpr (F == OF_F8)
                        nan |= f8_nan(v.x) || f8_nan(v.y) ? 1u << n : 0;
                }
            };
            unpack(0);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                if (n >= row_tiles)
                    break;
                if (n + 1 < NT)
                    unpack(n + 1);
                const uint32_t(&w)[4] = pairs[n % 2];
                float part[MT][4] = {};
#pragma unroll
                for (int i = 0; i < MT; i++)
                    mma<T>(S::TABLED ? part[i] : sum[i][n], x[i][0].x, x[i][1].x, x[i][0].y, x[i][1].y, w[0], w[1]);
#pragma unroll
                for (int i = 0; i < MT; i++)
                    mma<T>(S::TABLED ? part[i] : sum[i][n], x[i][0].z, x[i][1].z, x[i][0].w, x[i][1].w, w[2], w[3]);
                if constexpr (S::TABLED) {
                    const float2 scale = *reinterpret_cast<const float2 *>(scales + table + warp_row + n * 8 + t * 2);
#pragma unroll
                    for (int i = 0; i < MT; i++)
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            sum[i][n][e] = fmaf(part[i][e], e % 2 ? scale.y : scale.x, sum[i][n][e]);
                }
            }
        }
    };
    for (int step = 0; step < steps; step++) {
        copy_wait<S::STAGES - 2>();
        const int next = step + S::STAGES - 1, stage = step % S::STAGES;
        __syncthreads();
        if (next < steps) {
            fetch_weights(next);
            fetch_x(next);
        }
        copy_commit();
        if constexpr (S::TABLED) {
            store_entries(next_entries, next);
            load_entries(next_entries, next + 1);
        }
#pragma unroll 1
        for (int chunk = slice; chunk < S::CHUNKS; chunk += S::SLICES)
            multiply(shared + stage * S::STAGE_BYTES, chunk, stage * S::TABLE + chunk * S::ROWS);
    }

    /* All warps have read the stages: the sums of the slices take their place, and become those of the first. */
    float *const sums = (float *)shared, *const own = sums + slice * S::TOKENS * S::PITCH;
    copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int n = 0; n < NT; n++) {
        if (n >= row_tiles)
            break;
        uint32_t lost = 0;
        if constexpr (F == OF_F8)
            lost = __ballot_sync(0xffffffffu, nan >> n & 1) >> (t * 8);
#pragma unroll
        for (int i = 0; i < MT * 2; i++) {
            float2 v = make_float2(sum[i / 2][n][i % 2 * 2] / weight_unit<T, F>,
                                   sum[i / 2][n][i % 2 * 2 + 1] / weight_unit<T, F>);
            v.x = lost & 0xf ? __uint_as_float(0x7fffffffu) : v.x;
            v.y = lost & 0xf0 ? __uint_as_float(0x7fffffffu) : v.y;
            *reinterpret_cast<float2 *>(own + (warp_token + i * 8 + g) * S::PITCH + warp_row + n * 8 + t * 2) = v;
        }
    }
    if constexpr (S::SLICES > 1) {
        __syncthreads();
        for (int i = (int)threadIdx.x * 4; i < S::TOKENS * S::PITCH; i += S::THREADS * 4) {
            float4 all = *reinterpret_cast<const float4 *>(sums + i);
#pragma unroll
            for (int v = 1; v < S::SLICES; v++)
                all = tile_add(sums, all, *reinterpret_cast<const float4 *>(sums + v * S::TOKENS * S::PITCH + i));
            *reinterpret_cast<float4 *>(sums + i) = all;
        }
    }
    tile_finish<T, S>(p, sums, token_tiles, strip);
}

/* Rows of a strip, and in how many parts the blocks of a cluster take k. */
struct quantised_tile_plan {
    int strip, parts;
};
/* The plan that takes least time. A multiprocessor has `fit` blocks at once, in rounds, in each of which there is
   some time when it neither multiplies nor copies. In 64 columns of k a block copies x and weights, for which an H200
   takes a cycle for about 22 bytes; or it reads them from shared memory and writes them there, 128 bytes in a cycle;
   or it multiplies, about 1280 products in a cycle. */
template <class S>
static quantised_tile_plan quantised_tile_plan_of(const cuda_call &s, const gemm_params &p)
{
    const int64_t tokens = ceil_div(p.m, S::TOKENS), steps = ceil_div(p.k, S::CHUNKS * S::CHUNK);
    const int64_t fit = std::max<int64_t>(1, s.gpu.block_shared / S::SHARED), sm_count = s.gpu.sm_count;
    const int64_t clustered = sm_count < 16 ? sm_count : sm_count / 16 * 16; /* those that large clusters can have */
    const int most = adze_cuda_clusters(s.device) ? (int)std::min<int64_t>(8, steps) : 1;
    quantised_tile_plan best = {};
    double least = 1e30;
    for (int strip = S::STRIP; strip > 0; strip -= 8) {
        const int rows = strip * S::STRIPS;
        const int64_t tiles = gemm_tiles(p, p.glu ? rows / 2 : rows);
        const double read =
            (S::TOKENS * 128 * (1 + S::STRIPS) + rows * S::W_CHUNK * (1 + S::TOKENS / S::WARP_TOKENS)) / 128.0;
        const double chunk = std::max({(S::TOKENS * 128.0 + rows * S::W_CHUNK) / 22, read, S::TOKENS * rows / 20.0});
        for (int parts = 1; parts <= most; parts++) {
            const double work = (double)(fit * ceil_div(steps, parts) * S::CHUNKS) * chunk;
            const int64_t at_once = (parts > 2 ? clustered : sm_count) * fit;
            const double sums = parts > 1 ? 1000 + (double)fit * S::TOKENS * rows * 4 / 22 : 0;
            const double time = (double)ceil_div(tokens * tiles * parts, at_once) * (3000 + work + sums);
            if (time < least)
                least = time, best = {strip, parts};
        }
    }
    return best;
}
template <typename T, class S>
static adze_status quantised_tile_launch(const cuda_call &s, const gemm_params &p)
{
    const quantised_tile_plan plan = quantised_tile_plan_of<S>(s, p);
    const int64_t tokens = ceil_div(p.m, S::TOKENS);
    const int64_t tiles = gemm_tiles(p, plan.strip * (p.glu ? S::STRIPS / 2 : S::STRIPS));
    return launch(s, gemm_quantised_tile<T, S>, tokens * tiles * plan.parts, dim3(S::THREADS),
                  launch_shape(S::SHARED, plan.parts), p, (int)tokens, plan.strip);
}

#endif
