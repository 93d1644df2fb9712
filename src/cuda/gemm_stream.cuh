/* gemm_stream.cuh - products of few tokens: weights are streamed once, through rings in shared memory.

   A block has a range of the weights' rows and takes them in tiles; its warps have a part of k each. A warp keeps
   its ring of segments full: rows of the tile, SEGMENT bytes of each. The ring fills before the dependency wait,
   when the weights are constant. Weights are the 16-row operand of the tensor cores, tokens are the 8 columns. Which
   elements of k stand where in an operand does not matter as long as both operands agree, so lane 4 g + t takes 8
   neighbouring elements of row g and of token g: two operands of 16 in one 16-byte load. */
#ifndef ADZE_CUDA_GEMM_STREAM_CUH
#define ADZE_CUDA_GEMM_STREAM_CUH

#include "gemm_call.cuh"
#include "mma.cuh"
#include "reduce.cuh"

template <int ROW_TILES, int TOKEN_TILES, int WARPS_, int SEGMENT_, int STAGES_, bool WHOLE_,
          weight_format FORMAT_ = OF_X>
struct stream_shape {
    static constexpr int ROWS = 16 * ROW_TILES, TOKENS = 8 * TOKEN_TILES, WARPS = WARPS_, SEGMENT = SEGMENT_;
    static constexpr int STAGES = STAGES_, THREADS = 32 * WARPS;
    static constexpr bool WHOLE = WHOLE_; /* all of x is in shared memory; otherwise it is in the rings */
    static constexpr weight_format FORMAT = FORMAT_;
    static constexpr int UNITS = 4; /* of x that a warp loads at once */
    static __device__ __forceinline__ int x_at(int token, int vector, int pitch)
    {
        return token * pitch + vector * 16;
    }
    static constexpr int VECTOR = weight_vector(FORMAT); /* weights in 16 bytes */
    static constexpr int GROUP = 4 * VECTOR;             /* of k in 64 bytes of a row: of one step of a warp */
    static_assert(FORMAT == OF_X || (WHOLE && SEGMENT == 256), "a lane has the scale of one step of a segment");
    static constexpr int STAGE_BYTES = (ROWS + (WHOLE ? 0 : TOKENS)) * SEGMENT, RING_BYTES = STAGES * STAGE_BYTES;
    static constexpr int PARTIAL_PITCH = ROWS + 4; /* floats of a token: lanes that store have banks of their own */
    static constexpr int PARTIAL_FLOATS = WARPS * TOKENS * PARTIAL_PITCH;
    static constexpr int FIXED_BYTES = WARPS * RING_BYTES + 2 * PARTIAL_FLOATS * 4;
};
/* Bytes of a token of x in shared memory, a whole number of steps: tokens g and g + 1 have other banks. */
template <class S>
__host__ __device__ constexpr int stream_pitch(int64_t k)
{
    return (int)((k + S::GROUP - 1) / S::GROUP * S::GROUP * 2 + 127) / 128 * 128 + (S::FORMAT == OF_X ? 64 : 16);
}
template <class S>
constexpr size_t stream_shared(int64_t m, int64_t k)
{
    return (size_t)S::FIXED_BYTES + (S::WHOLE ? (size_t)m * (size_t)stream_pitch<S>(k) : 0);
}

/* All of x into shared memory, normed where asked, in the order of the weights' pairs, with zeros up to a whole step.
   A warp takes units of 32 vectors of a token, UNITS at a time, so that all its loads are under way at once. S::x_at
   says where a vector is, of which `pitch` is a part. `room`: a float of each unit. */
template <typename T, class S>
struct stream_x {
    static constexpr int UNITS = S::UNITS;
    const gemm_params &p;
    const char *x;
    char *to;
    float *room;
    int64_t x_stride;
    int pitch, vectors, token_units, units;
    __device__ __forceinline__ stream_x(const gemm_params &params, const char *from, char *shared, int x_pitch,
                                        float *sums)
        : p(params), x(from), to(shared), room(sums), x_stride(params.rows.stride[GEMM_X][0] * (int)sizeof(T)),
          pitch(x_pitch), vectors(((int)params.k + S::GROUP - 1) / S::GROUP * (S::GROUP / 8)),
          token_units((vectors + 31) / 32), units(token_units * (int)params.m)
    {
    }
    __device__ __forceinline__ T *at(int token, int vector) const
    {
        return (T *)(to + S::x_at(token, vector, pitch));
    }
    __device__ __forceinline__ void put_vector(int token, int vector, packed<T> v) const
    {
        v.raw = weight_order<S::FORMAT>(v.raw);
        store_packed(at(token, vector), v);
    }
    __device__ __forceinline__ void put(int unit, float sum) const
    {
        sum = warp_sum<32>(sum);
        if (threadIdx.x % 32 == 0)
            room[unit] = sum;
    }
    /* The sum of a token's units, from `from` on. */
    __device__ __forceinline__ float total(int token, int from) const
    {
        float sum = 0;
        for (int u = (int)threadIdx.x % 32; u < token_units; u += 32)
            sum += room[from + token * token_units + u];
        return warp_sum<32>(sum);
    }
    /* Calls f(v, token, vector, unit) for the units of this warp from `first` on, whose vectors v holds. */
    template <typename F>
    __device__ __forceinline__ void each(packed<T> (&v)[UNITS], int first, F f) const
    {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const int unit = first + u * S::WARPS, token = unit / token_units;
            const int vector = (unit - token * token_units) * 32 + (int)threadIdx.x % 32;
            if (unit < units)
                f(v[u], token, vector, unit);
        }
    }
    /* What a unit adds to its token's sum: elements, squares, or squares of their distance to the mean. */
    __device__ __forceinline__ float unit_sum(const packed<T> &v, bool squares, float mean) const
    {
        float f[8], sum = 0;
        v.get(f);
#pragma unroll
        for (int e = 0; e < 8; e++)
            sum += squares ? (f[e] - mean) * (f[e] - mean) : f[e];
        return sum;
    }
    __device__ __forceinline__ void load() const
    {
        const int stride = S::WARPS * UNITS, warp = (int)threadIdx.x / 32;
        const bool centred = p.norm == ADZE_NORM_LAYER, held = units <= stride;
        packed<T> v[UNITS];
        for (int first = warp; first < units; first += stride) {
            each(v, first, [&](packed<T> &x_vector, int token, int vector, int) {
                x_vector.raw = make_uint4(0, 0, 0, 0);
                if (vector * 8 < (int)p.k)
                    x_vector = load_packed((const T *)(x + token * x_stride) + vector * 8);
            });
            each(v, first, [&](packed<T> &x_vector, int token, int vector, int unit) {
                if (vector < vectors && !p.norm)
                    put_vector(token, vector, x_vector);
                else if (vector < vectors && !held) /* to be read again, in its own order */
                    store_packed(at(token, vector), x_vector);
                if (p.norm)
                    put(unit, unit_sum(x_vector, !centred, 0));
            });
        }
        if (!p.norm)
            return;
        /* Each warp norms what it has loaded, which it still holds where x is small. */
        const float inverse = 1 / (float)p.k;
        auto reload = [&](int first) {
            if (!held)
                each(v, first, [&](packed<T> &x_vector, int token, int vector, int) {
                    x_vector.raw = make_uint4(0, 0, 0, 0);
                    if (vector < vectors)
                        x_vector = load_packed(at(token, vector));
                });
        };
        __syncthreads();
        if (centred) {
            for (int first = warp; first < units; first += stride) {
                reload(first);
                each(v, first, [&](packed<T> &x_vector, int token, int vector, int unit) {
                    const float mean = total(token, 0) * inverse;
                    put(units + unit, vector * 8 < (int)p.k ? unit_sum(x_vector, true, mean) : 0);
                });
            }
            __syncthreads();
        }
        for (int first = warp; first < units; first += stride) {
            reload(first);
            each(v, first, [&](packed<T> &x_vector, int token, int vector, int) {
                const float mean = centred ? total(token, 0) * inverse : 0;
                const float scale = rsqrtf(total(token, centred ? units : 0) * inverse + p.eps);
                if (vector * 8 < (int)p.k) {
                    float f[8], weight[8], bias[8] = {};
#pragma unroll
                    for (int e = 0; e < 8; e++)
                        weight[e] = 1 - p.weight_offset;
                    if (p.norm_weight)
                        load_param<T, 8>(p.norm_weight, p.norm_weight_f32, vector * 8, weight);
                    if (p.norm_bias)
                        load_param<T, 8>(p.norm_bias, p.norm_bias_f32, vector * 8, bias);
                    x_vector.get(f);
#pragma unroll
                    for (int e = 0; e < 8; e++) {
                        f[e] = (f[e] - mean) * scale;
                        if (p.rounding & ADZE_ROUND_NORM)
                            f[e] = round_to<T>(f[e]);
                        f[e] = f[e] * (weight[e] + p.weight_offset) + bias[e];
                    }
                    x_vector.set(f);
                }
                if (vector < vectors)
                    put_vector(token, vector, x_vector);
            });
        }
    }
    /* Brings the norm's parameters into L2. */
    __device__ __forceinline__ void prefetch_params() const
    {
        const int line = (int)threadIdx.x * 128;
        if (p.norm_weight && line < (int)p.k * (p.norm_weight_f32 ? 4 : 2))
            prefetch((const char *)p.norm_weight + line);
        if (p.norm_bias && line < (int)p.k * (p.norm_bias_f32 ? 4 : 2))
            prefetch((const char *)p.norm_bias + line);
    }
};

/* The tile that starts at a row of all weights, of `size` rows at most and before row `end`: rows of one weight. */
__device__ __forceinline__ gemm_rows stream_rows(const gemm_params &p, int row, int end, int size)
{
    const int first = (int)p.part[0].n, second = p.glu ? 0 : (int)p.part[1].n;
    gemm_rows tile = {0, row, first};
    if (row >= first)
        tile.part = 1, tile.at = row - first, tile.count = second;
    if (row >= first + second && !p.glu)
        tile.part = 2, tile.at = row - first - second, tile.count = (int)p.part[2].n;
    tile.count = min(min(tile.count - tile.at, size), end - row);
    return tile;
}

/* Scales and zeros of rows g and g + 8 of a tile, for a segment: lane 4 g + t has those of its step t. */
template <class S>
struct stream_scales {
    float scale[S::ROWS / 16][2], zero[S::ROWS / 16][2];
    __device__ __forceinline__ void load(const gemm_params &p, const gemm_rows &tile, int step)
    {
        const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
        const int64_t column = (int64_t)(step + t) * S::GROUP, group = p.group ? column / p.group : 0;
#pragma unroll
        for (int i = 0; i < S::ROWS / 8; i++) {
            const int row = i * 8 + g, high = p.glu && row >= S::ROWS / 2, of_tile = high ? row - S::ROWS / 2 : row;
            const int part = high ? 1 : tile.part;
            if (of_tile >= tile.count || column >= p.k)
                continue;
            if (p.group)
                scale[i / 2][i % 2] = gemm_scale(p, part, tile.at + of_tile, group);
            if (S::FORMAT == OF_U4)
                zero[i / 2][i % 2] = gemm_zero(p, part, tile.at + of_tile, group);
        }
    }
};

/* One step of quantised weights: 64 bytes of each row, which lie in one group. */
template <typename T, class S>
__device__ __forceinline__ void stream_step(const gemm_params &p, const char *stage, const char *x, int x_pitch,
                                            const stream_scales<S> &scales, int j,
                                            float (&sum)[S::ROWS / 16][S::TOKENS / 8][4])
{
    constexpr int WORDS = S::VECTOR / 8, PAIRS = S::VECTOR / 8; /* 16-byte vectors of x; pairs in 4 bytes of w */
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4, odd = (g & 1) << 2;
    uint4 b[S::TOKENS / 8][WORDS];
#pragma unroll
    for (int c = 0; c < S::TOKENS / 8; c++)
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            b[c][i] = make_uint4(0, 0, 0, 0);
            if (c * 8 + g < (int)p.m)
                b[c][i] = load_shared(x + (c * 8 + g) * x_pitch + t * S::VECTOR * 2 + i * 16);
        }
#pragma unroll
    for (int r = 0; r < S::ROWS / 16; r++) {
        const char *const at = stage + (r * 16 + g) * S::SEGMENT + ((j * 4 + t) ^ odd) * 16;
        const uint4 low = load_shared(at), high = load_shared(at + 8 * S::SEGMENT);
        const uint32_t words[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
        uint32_t zero[2] = {};
        const bool has_zero = S::FORMAT == OF_U4 && gemm_has_zero(p);
        if (has_zero)
#pragma unroll
            for (int h = 0; h < 2; h++)
                zero[h] = both<T>(__shfl_sync(0xffffffffu, scales.zero[r][h], (lane & ~3) | j));
        float part[S::TOKENS / 8][4] = {};
#pragma unroll
        for (int w = 0; w < 4; w++) {
            uint32_t pair[2][PAIRS];
            weight_pairs<T, S::FORMAT>(words[0][w], zero[0], has_zero, pair[0]);
            weight_pairs<T, S::FORMAT>(words[1][w], zero[1], has_zero, pair[1]);
#pragma unroll
            for (int i = 0; i < PAIRS; i += 2)
#pragma unroll
                for (int c = 0; c < S::TOKENS / 8; c++) {
                    const int at_pair = w * PAIRS + i; /* of the lane's pairs of x */
                    const uint4 &v = b[c][at_pair / 4];
                    const uint32_t x_pair[4] = {v.x, v.y, v.z, v.w};
                    mma<T>(part[c], pair[0][i], pair[1][i], pair[0][i + 1], pair[1][i + 1], x_pair[at_pair % 4],
                           x_pair[at_pair % 4 + 1]);
                }
        }
        /* Without groups the scale of a row is applied at the end. */
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float of_step = __shfl_sync(0xffffffffu, scales.scale[r][h], (lane & ~3) | j);
            const float scale = p.group ? of_step : 1;
#pragma unroll
            for (int c = 0; c < S::TOKENS / 8; c++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    sum[r][c][h * 2 + i] = fmaf(part[c][h * 2 + i], scale, sum[r][c][h * 2 + i]);
        }
    }
}

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, 1) gemm_stream(const gemm_params p)
{
    constexpr int SEGMENT = S::SEGMENT, STAGES = S::STAGES, ROWS = S::ROWS, PIECES = SEGMENT / 16;
    constexpr int GROUPS = SEGMENT / 64; /* steps of a segment */
    constexpr int ROWS_AT_ONCE = 32 / PIECES, COPIES = ROWS / ROWS_AT_ONCE;
    extern __shared__ __align__(128) char shared[];
    float *const partial = (float *)(shared + S::WARPS * S::RING_BYTES);
    char *const xs = (char *)(partial + 2 * S::PARTIAL_FLOATS);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    char *const ring = shared + warp * S::RING_BYTES;
    const int64_t batch = blockIdx.y;
    const int begin = (int)(p.n * blockIdx.x / gridDim.x), end = (int)(p.n * (blockIdx.x + 1) / gridDim.x);
    const int groups = ((int)p.k + S::GROUP - 1) / S::GROUP;
    const int first = groups * warp / S::WARPS, last = groups * (warp + 1) / S::WARPS;
    const int chunks = (last - first + GROUPS - 1) / GROUPS, size = p.glu ? ROWS / 2 : ROWS;

    /* Bytes that L2 fetches for 16: with 256, 4096 x 4096 weights took 8.90 us and 14336 x 4096 29.35, with 128 8.64
       and 28.53 (H200, 2026-11-19). */
    constexpr int AHEAD = 128;
    /* The next segment to fetch: a row of all weights and a chunk; the tile that it is of, and where this lane's
       pieces of that begin. A warp's time is mostly its own instructions, so what a tile needs is computed once for
       all of its chunks, and a segment without gaps is copied without a condition. */
    int fetch_row = begin, fetch_chunk = 0;
    gemm_rows fetch_tile = {};
    const char *low = NULL, *high = NULL;
    int64_t low_step = 0, high_step = 0;
    const int piece = lane % PIECES, lane_row = lane / PIECES;
    const uint32_t lane_shared = (uint32_t)(lane_row * SEGMENT + (piece ^ (lane_row & 1) << 2) * 16);
    static_assert(ROWS_AT_ONCE % 2 == 0, "the rows of a lane are all odd or all even");
    const int whole_chunks = min((last - first) * 4, (int)p.k / S::VECTOR - first * 4) / PIECES;
    const char *const x = p.x + batch * p.x_batch;
    const int64_t x_stride = p.rows.stride[GEMM_X][0] * (int)sizeof(T), x_step = x_stride * ROWS_AT_ONCE;
    const char *const lane_x = x + lane_row * x_stride + (first * 4 + piece) * 16;
    /* The segments of x that go with a chunk of this warp's k. */
    auto fetch_x = [&](char *stage, int chunk) {
        const uint32_t to = shared_address(stage) + lane_shared + ROWS * SEGMENT;
        const int at = (first + chunk * GROUPS) * 4 + piece;
        const bool there = chunk < whole_chunks || (at * 8 < (int)p.k && at < last * 4);
        const char *from = there ? lane_x + chunk * SEGMENT : lane_x;
#pragma unroll
        for (int i = 0; i < S::TOKENS / ROWS_AT_ONCE; i++, from += x_step)
            if (i * ROWS_AT_ONCE + lane_row < (int)p.m)
                copy_async<AHEAD>(to + (uint32_t)(i * ROWS_AT_ONCE * SEGMENT), from, there);
    };
    auto fetch = [&](char *stage, bool with_x) {
        if (fetch_row < end && chunks) {
            if (!S::WHOLE && with_x)
                fetch_x(stage, fetch_chunk);
            if (fetch_chunk == 0) {
                fetch_tile = stream_rows(p, fetch_row, end, size);
                const gemm_part &first_part = p.part[fetch_tile.part],
                                &second_part = p.part[p.glu ? 1 : fetch_tile.part];
                const int64_t row = fetch_tile.at + lane_row, in_row = (first * 4 + piece) * 16;
                low_step = first_part.w_stride * ROWS_AT_ONCE, high_step = second_part.w_stride * ROWS_AT_ONCE;
                low = first_part.w + batch * p.w_batch + row * first_part.w_stride + in_row;
                high = p.glu ? second_part.w + row * second_part.w_stride + in_row : low + COPIES / 2 * low_step;
            }
            const uint32_t to = shared_address(stage) + lane_shared;
            const char *from_low = low + fetch_chunk * SEGMENT, *from_high = high + fetch_chunk * SEGMENT;
            if (fetch_tile.count == size && fetch_chunk < whole_chunks) {
#pragma unroll
                for (int i = 0; i < COPIES / 2; i++, from_low += low_step)
                    copy_async<AHEAD>(to + (uint32_t)(i * ROWS_AT_ONCE * SEGMENT), from_low);
#pragma unroll
                for (int i = COPIES / 2; i < COPIES; i++, from_high += high_step)
                    copy_async<AHEAD>(to + (uint32_t)(i * ROWS_AT_ONCE * SEGMENT), from_high);
            } else {
                const int at = (first + fetch_chunk * GROUPS) * 4 + piece;
                const bool there = at * S::VECTOR < (int)p.k && at < last * 4;
#pragma unroll
                for (int i = 0; i < COPIES; i++) {
                    const bool is_low = i < COPIES / 2;
                    const int row = (p.glu && !is_low ? i - COPIES / 2 : i) * ROWS_AT_ONCE + lane_row;
                    const char *from = is_low ? from_low + i * low_step : from_high + (i - COPIES / 2) * high_step;
                    const bool row_there = there && row < fetch_tile.count;
                    copy_async<AHEAD>(to + (uint32_t)(i * ROWS_AT_ONCE * SEGMENT), row_there ? from : p.x, row_there);
                }
            }
            if (++fetch_chunk == chunks) {
                fetch_chunk = 0;
                fetch_row += fetch_tile.count;
            }
        }
        copy_commit();
    };

    if (!p.const_weights)
        pdl_wait();
    pdl_launch_next();
#pragma unroll
    for (int i = 0; i < STAGES; i++)
        fetch(ring + i * S::STAGE_BYTES, false);
    const stream_x<T, S> loader(p, x, xs, stream_pitch<S>(p.k), partial);
    if (p.const_weights) {
        if (S::WHOLE && p.norm)
            loader.prefetch_params();
        pdl_wait();
    }
    if constexpr (S::WHOLE) {
        loader.load();
        __syncthreads();
    } else {
#pragma unroll
        for (int i = 0; i < STAGES; i++) {
            if (chunks)
                fetch_x(ring + i * S::STAGE_BYTES, i % chunks);
            copy_commit();
        }
    }

    const int x_pitch = S::WHOLE ? stream_pitch<S>(p.k) : SEGMENT;
    const char *const x_at = xs + g * x_pitch + t * 16;
    const int odd = (g & 1) << 2;
    char *stage = ring;
    int turn = 0;
    /* The scales and zeros of the chunk after this one are under way while this one is multiplied. */
    auto next_scales = [&](int row, int chunk) {
        stream_scales<S> next = {};
        gemm_rows tile = stream_rows(p, row, end, size);
        if (++chunk == chunks) {
            chunk = 0;
            row += tile.count;
            tile = stream_rows(p, row, end, size);
        }
        if (row < end)
            next.load(p, tile, first + chunk * GROUPS);
        return next;
    };
    stream_scales<S> scales = {};
    if (S::FORMAT != OF_X && (p.group || gemm_has_zero(p)) && chunks && begin < end)
        scales.load(p, stream_rows(p, begin, end, size), first);
    for (int row = begin; row < end; turn++) {
        const gemm_rows tile = stream_rows(p, row, end, size);
        float sum[ROWS / 16][S::TOKENS / 8][4] = {};
        for (int chunk = 0; chunk < chunks; chunk++) {
            copy_wait<STAGES - 1>();
            __syncwarp();
            const int group = first + chunk * GROUPS;
            if constexpr (S::FORMAT != OF_X) {
                const stream_scales<S> now = scales;
                if (p.group || gemm_has_zero(p))
                    scales = next_scales(row, chunk);
#pragma unroll
                for (int j = 0; j < GROUPS; j++) {
                    if (group + j >= last)
                        break;
                    stream_step<T, S>(p, stage, xs + (group + j) * S::GROUP * 2, x_pitch, now, j, sum);
                }
            } else {
#pragma unroll
                for (int j = 0; j < GROUPS; j++) {
                    if (group + j >= last)
                        break;
                    uint4 b[S::TOKENS / 8];
#pragma unroll
                    for (int c = 0; c < S::TOKENS / 8; c++) {
                        b[c] = make_uint4(0, 0, 0, 0);
                        if (c * 8 + g < (int)p.m)
                            b[c] = load_shared(S::WHOLE
                                                   ? x_at + c * 8 * x_pitch + (group + j) * 64
                                                   : stage + (ROWS + c * 8 + g) * SEGMENT + ((j * 4 + t) ^ odd) * 16);
                    }
#pragma unroll
                    for (int r = 0; r < ROWS / 16; r++) {
                        const char *const at = stage + (r * 16 + g) * SEGMENT + ((j * 4 + t) ^ odd) * 16;
                        const uint4 low = load_shared(at), high = load_shared(at + 8 * SEGMENT);
#pragma unroll
                        for (int c = 0; c < S::TOKENS / 8; c++) {
                            mma<T>(sum[r][c], low.x, high.x, low.y, high.y, b[c].x, b[c].y);
                            mma<T>(sum[r][c], low.z, high.z, low.w, high.w, b[c].z, b[c].w);
                        }
                    }
                }
            }
            __syncwarp();
            fetch(stage, true);
            stage = stage + S::STAGE_BYTES == ring + S::RING_BYTES ? ring : stage + S::STAGE_BYTES;
        }
        float *const mine = partial + (turn & 1) * S::PARTIAL_FLOATS,
                     *to = mine + warp * S::TOKENS * S::PARTIAL_PITCH;
#pragma unroll
        for (int r = 0; r < ROWS / 16; r++)
#pragma unroll
            for (int c = 0; c < S::TOKENS / 8; c++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    to[(c * 8 + t * 2 + i % 2) * S::PARTIAL_PITCH + r * 16 + i / 2 * 8 + g] = sum[r][c][i];
        __syncthreads();
        /* Each tile is finished by other warps first. */
        const int start = (warp + S::WARPS - turn % S::WARPS) % S::WARPS * 32 + lane;
        for (int i = start; i < size * (int)p.m; i += S::THREADS) {
            const int token = i / size, column = i % size;
            if (column >= tile.count)
                continue;
            const float *from = mine + token * S::PARTIAL_PITCH + column;
            float y = 0, y2 = 0;
#pragma unroll
            for (int w = 0; w < S::WARPS; w++) {
                y += from[w * S::TOKENS * S::PARTIAL_PITCH];
                if (p.glu)
                    y2 += from[w * S::TOKENS * S::PARTIAL_PITCH + ROWS / 2];
            }
            gemm_finish<T>(p, tile.part, batch, token, tile.at + column, y, y2);
        }
        row += tile.count;
    }
}

#endif
