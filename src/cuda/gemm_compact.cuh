/* gemm_compact.cuh - products of few tokens with quantised weights, in as few instructions as they take.

   A kernel of this kind lasts a few microseconds, in which a warp has 4 to 30 units of work: instructions that are
   read for the first time, and loops that the instruction caches do not hold, cost more than arithmetic does. So the
   loop has one unit, 16 rows of 64 bytes, and is not unrolled, and calls that need more than a bias, a residual, glu
   of silu or the RMS norm of x are for the other kernels.

   A block has a range of the weights' rows in tiles of 16, and all of k: in chunks, where x is too large for shared
   memory. Units of a tile go round the warps, so that they read neighbouring bytes at about the same time. Lane 4 g
   + t has 16 bytes of rows g and g + 8, which it copies into a ring of its own in shared memory, where no other lane
   reads: it waits for its own copies only. The ring fills before the dependency wait when the weights are constant.
   With AHEAD the weights go into registers instead. Each warp has units of all tiles, and stores its sums of a tile
   when it goes on to the next; they are added up at the end, in the order of the warps. */
#ifndef ADZE_CUDA_GEMM_COMPACT_CUH
#define ADZE_CUDA_GEMM_COMPACT_CUH

#include "gemm_call.cuh"
#include "mma.cuh"
#include "reduce.cuh"

#include <algorithm>

enum compact_scales { ROW_SCALES, F16_SCALES, BF16_SCALES, F32_SCALES }; /* of whole rows; of groups, by dtype */

template <int WARPS_, int STAGES_, int AHEAD_, int BLOCKS_, int TOKEN_TILES_, weight_format FORMAT_,
          compact_scales SCALES_, bool NORM_, bool CHUNKED_ = false>
struct compact_shape {
    static constexpr int WARPS = WARPS_, THREADS = 32 * WARPS, TOKEN_TILES = TOKEN_TILES_, TOKENS = 8 * TOKEN_TILES;
    static constexpr int STAGES = STAGES_; /* units of a warp's ring; 0: none */
    static constexpr int AHEAD = AHEAD_;   /* units in registers, where there is no ring */
    static constexpr int BLOCKS = BLOCKS_; /* of a multiprocessor, of this kernel and the next */
    static constexpr weight_format FORMAT = FORMAT_;
    static constexpr compact_scales SCALES = SCALES_;
    static constexpr bool NORM = NORM_;       /* RMS, with a weight of x's dtype */
    static constexpr bool CHUNKED = CHUNKED_; /* x is in shared memory one part after the other */
    static constexpr int VECTOR = weight_vector(FORMAT), STEP = 4 * VECTOR; /* weights of 16 bytes, of 64 */
    static constexpr int PIECES = VECTOR / 8;                               /* vectors of x that a load goes with */
    static constexpr int STAGE_BYTES = WARPS * 16 * 64, RING_BYTES = STAGES * STAGE_BYTES; /* of all warps */
    static constexpr int SCALE_BYTES = SCALES == F32_SCALES ? 4 : 2;
    static constexpr int SCALED = SCALES == ROW_SCALES ? 1 : 128 / STEP; /* times 64 bytes that have one scale */
    static constexpr int X_UNITS = NORM ? 2 : 4; /* times 32 vectors of x that a warp loads at once */
    static constexpr int PITCH = 20; /* floats of a token among a warp's sums: lanes have banks of their own */
    static_assert(!STAGES != !AHEAD, "a ring or registers");
    static_assert(!CHUNKED || !(NORM || AHEAD), "they need all of x at once");
};

struct compact_row {
    const char *w;
    float scale;  /* where it is of the whole row */
    int row_part; /* 4 times the row of its weight, and which weight */
};

struct compact_call {
    int rows_each, rows_extra;     /* the first `extra` blocks have one more */
    int steps, chunk_steps;        /* units of k, of a chunk of it */
    int scales, scale_words;       /* in shared memory, of a row */
    int x, sums;                   /* where they are there */
    int x_units;                   /* times 32 vectors of a token in a chunk */
    uint32_t x_inverse, m_inverse; /* 2^24 / x_units and 2^16 / m, and up */
    size_t bytes;
};
/* Whether the shape takes a call, if shared memory has room for it. The other kernels take what follows a product but
   is rare: gates, activations without glu and others than silu, zeros, f32 weights of a norm. */
template <class S>
static bool compact_takes(const gemm_params &p)
{
    const int dtype = S::SCALES == F32_SCALES ? ADZE_F32 : S::SCALES == F16_SCALES ? ADZE_F16 : ADZE_BF16;
    const int64_t scales = p.k / 128 * S::SCALE_BYTES; /* bytes of a row */
    bool can = p.format == S::FORMAT && p.m <= S::TOKENS && p.k % S::STEP == 0 && p.k / S::STEP >= S::WARPS &&
               p.k <= 1 << 16 && p.batches == 1 && !p.batch_invariant && !gemm_has_zero(p) && p.rows.rank == 1 &&
               !p.gate && p.act == (p.glu ? ADZE_ACT_SILU : 0);
    if (S::NORM)
        can = can && p.norm == ADZE_NORM_RMS && p.k % 256 == 0 && p.norm_weight && !p.norm_weight_f32 &&
              (uintptr_t)p.norm_weight % 16 == 0 && !p.norm_bias;
    else
        can = can && !p.norm;
    if (S::SCALES == ROW_SCALES)
        return can && p.group == 0;
    can = can && p.group == 128 && p.k % 128 == 0 && scales % 4 == 0;
    for (const gemm_part &part : p.part) /* they are copied by words */
        can = can && (part.n == 0 || (part.scale_dtype == dtype && (uintptr_t)part.scale % 4 == 0 &&
                                      part.scale_stride * S::SCALE_BYTES % 4 == 0));
    return can;
}
/* A call that the shape takes with `blocks` blocks, in as few chunks as `room` bytes of shared memory allow; bytes is
   0 where it has no room. */
template <class S>
static compact_call compact_call_of(const gemm_params &p, int64_t blocks, size_t room)
{
    const auto up = [](int64_t bytes) { return (int)((bytes + 127) / 128 * 128); };
    compact_call c = {};
    c.scale_words = S::SCALES == ROW_SCALES ? 0 : (int)ceil_div(p.k / 128 * S::SCALE_BYTES, 4) | 1;
    c.rows_each = (int)(p.n / blocks), c.rows_extra = (int)(p.n % blocks);
    const int64_t tiles = ceil_div(ceil_div(p.n, blocks), p.glu ? 8 : 16);
    if (tiles * 16 * (int64_t)sizeof(compact_row) > (int64_t)room)
        return {};
    c.steps = (int)(p.k / S::STEP);
    c.scales = up(S::RING_BYTES + tiles * 16 * (int64_t)sizeof(compact_row));
    c.sums = c.scales + up(tiles * 16 * c.scale_words * 4);
    c.x = c.sums + up(std::max(tiles * S::WARPS * p.m * S::PITCH * 4, p.m * (p.k / 256 + 1) * 4));
    for (int chunks = 1; c.steps / chunks >= S::WARPS && c.bytes == 0; chunks++) {
        const int64_t bytes = c.x + p.k / chunks * p.m * 2;
        if (c.steps % chunks == 0 && bytes <= (int64_t)room)
            c.chunk_steps = c.steps / chunks, c.bytes = (size_t)bytes;
        if (!S::CHUNKED)
            break;
    }
    if (c.bytes == 0)
        return {};
    c.x_units = (c.chunk_steps * (S::STEP / 8) + 31) / 32;
    c.x_inverse = (1u << 24) / (uint32_t)c.x_units + 1, c.m_inverse = (1u << 16) / (uint32_t)p.m + 1;
    return c;
}

/* The thread's index, read again: what is computed from it is not kept in registers. */
__device__ __forceinline__ uint32_t thread_again()
{
    uint32_t v;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
    return v;
}

/* Where the vector of 8 columns of a token begins: steps of k, in them tokens, in those the pieces of all lanes t.
   Of odd tokens two pieces have changed places, so that two tokens have banks of their own. */
template <class S>
__device__ __forceinline__ int compact_x_at(int token, int vector, int m)
{
    const int step = vector / (S::STEP / 8), t = vector / S::PIECES % 4, piece = vector % S::PIECES;
    return (step * m + token) * (S::STEP * 2) + (piece ^ (token & 1)) * 64 + t * 16;
}

/* A chunk of x into shared memory, in the order of the weights' pairs, and normed. */
template <typename T, class S>
__device__ __forceinline__ void compact_x(const gemm_params &p, const compact_call &c, char *xs, float *room,
                                          int chunk)
{
    const int warp = (int)(threadIdx.x / 32), lane = (int)(threadIdx.x % 32), m = (int)p.m, units = c.x_units * m;
    const int vectors = c.chunk_steps * (S::STEP / 8);
    const int64_t x_stride = p.rows.stride[GEMM_X][0];
    const T *const x = (const T *)p.x + chunk * S::STEP;
#pragma unroll 1
    for (int first = warp; first < units; first += S::WARPS * S::X_UNITS) {
        packed<T> v[S::X_UNITS];
        int to[S::X_UNITS];
#pragma unroll
        for (int u = 0; u < S::X_UNITS; u++) {
            const int unit = first + u * S::WARPS, token = (int)((uint32_t)unit * c.x_inverse >> 24);
            const int vector = (unit - token * c.x_units) * 32 + lane;
            to[u] = unit < units && vector < vectors ? compact_x_at<S>(token, vector, m) : -1;
            v[u].raw = make_uint4(0, 0, 0, 0);
            if (to[u] >= 0)
                v[u] = load_packed(x + token * x_stride + vector * 8);
        }
#pragma unroll
        for (int u = 0; u < S::X_UNITS; u++) {
            if (to[u] < 0)
                continue;
            *reinterpret_cast<uint4 *>(xs + to[u]) = weight_order<S::FORMAT>(v[u].raw);
            if constexpr (S::NORM) { /* whole warps are here: k is a multiple of 256 */
                float f[8], sum = 0;
                v[u].get(f);
#pragma unroll
                for (int e = 0; e < 8; e++)
                    sum = fmaf(f[e], f[e], sum);
                sum = warp_sum<32>(sum);
                if (lane == 0)
                    room[first + u * S::WARPS] = sum;
            }
        }
    }
    if constexpr (S::NORM) {
        __syncthreads();
#pragma unroll 1
        for (int unit = warp; unit < units; unit += S::WARPS) {
            const int token = (int)((uint32_t)unit * c.x_inverse >> 24);
            const int vector = (unit - token * c.x_units) * 32 + lane;
            float sum = 0;
#pragma unroll 1
            for (int i = lane; i < c.x_units; i += 32)
                sum += room[token * c.x_units + i];
            const float scale = rsqrtf(warp_sum<32>(sum) * (1 / (float)(int)p.k) + p.eps);
            uint4 *const at = reinterpret_cast<uint4 *>(xs + compact_x_at<S>(token, vector, m));
            packed<T> v = {*at}, of = load_packed((const T *)p.norm_weight + vector * 8);
            of.raw = weight_order<S::FORMAT>(of.raw);
            float f[8], weight[8];
            v.get(f), of.get(weight);
#pragma unroll
            for (int e = 0; e < 8; e++) {
                f[e] *= scale;
                if (p.rounding & ADZE_ROUND_NORM)
                    f[e] = round_to<T>(f[e]);
                f[e] *= weight[e] + p.weight_offset;
            }
            v.set(f);
            *at = v.raw;
        }
    }
}

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, GEMM_ONE_BLOCK ? 1 : S::BLOCKS)
    gemm_compact(const __grid_constant__ gemm_params p, const __grid_constant__ compact_call c)
{
    constexpr int COLUMNS = S::TOKEN_TILES, PIECES = S::PIECES, AHEAD = S::AHEAD;
    constexpr bool GROUPED = S::SCALES != ROW_SCALES;
    extern __shared__ __align__(128) char shared[];
    const int warp = (int)(threadIdx.x / 32), lane = (int)(threadIdx.x % 32), g = lane >> 2, t = lane & 3;
    const int m = (int)p.m, steps = c.steps, chunk_steps = c.chunk_steps;
    const int block = (int)blockIdx.x, begin = block * c.rows_each + min(block, c.rows_extra);
    const int rows = c.rows_each + (block < c.rows_extra), of_tile = p.glu ? 3 : 4; /* log2 of a tile's rows */
    const int tiles = (int)opaque((uint32_t)(rows + (1 << of_tile) - 1) >> of_tile);
    compact_row *const table = (compact_row *)(shared + S::RING_BYTES);
    float *const sums = (float *)(shared + c.sums);

    if (!p.const_weights)
        pdl_wait();
    pdl_launch_next();
    /* Where the rows are. With glu the upper 8 rows of a tile are the value's. After the last row it is that again.
     */
#pragma unroll 1
    for (int r = (int)threadIdx.x; r < tiles * 16; r += S::THREADS) {
        int row = begin + min(((r >> 4) << of_tile) + (r & ((1 << of_tile) - 1)), rows - 1);
        int part = p.glu ? r >> 3 & 1 : 0;
        if (!p.glu && row >= (int)p.part[0].n) {
            row -= (int)p.part[0].n, part = 1;
            if (row >= (int)p.part[1].n)
                row -= (int)p.part[1].n, part = 2;
        }
        const gemm_part &of = p.part[part];
        table[r].w = of.w + row * of.w_stride;
        table[r].scale = GROUPED ? 1 : gemm_scale(p, part, row, 0);
        table[r].row_part = row * 4 + part;
    }
    __syncthreads();

    /* The next unit to fetch: its tile, which it is of the chunk's, negative after the last, and where this lane's
       bytes of it are. */
    int fetch_tile = 0, fetch_step = warp, fetch_chunk = 0;
    const char *from[2];
    auto enter_tile = [&]() {
        const uint32_t thread = thread_again();
        const int in_row = (fetch_chunk + fetch_step) * 64 + (int)(thread % 4 * 16);
        const compact_row *const row = table + fetch_tile * 16 + thread % 32 / 4;
        from[0] = row[0].w + in_row, from[1] = row[8].w + in_row;
    };
    auto fetch_next = [&]() {
        fetch_step += S::WARPS;
        from[0] += S::WARPS * 64, from[1] += S::WARPS * 64;
        if (fetch_step >= chunk_steps) {
            fetch_step -= chunk_steps;
            if (++fetch_tile == tiles) {
                fetch_tile = 0, fetch_step = -1;
                if (S::CHUNKED && (fetch_chunk += chunk_steps) < steps)
                    fetch_step = (int)(thread_again() / 32);
            }
            if (fetch_step >= 0)
                enter_tile();
        }
    };
    /* It goes into the ring, or into registers. */
    auto fetch = [&](int at) {
        if (fetch_step >= 0) {
            const uint32_t to = shared_address(shared) + (uint32_t)at;
            copy_async(to, from[0]);
            copy_async(to + (uint32_t)(S::THREADS * 16), from[1]);
            fetch_next();
        }
        copy_commit();
    };
    uint4 w[AHEAD ? AHEAD : 1][2];
    auto load = [&](uint4(&to)[2]) {
        if (fetch_step >= 0) {
            to[0] = load_once(from[0]), to[1] = load_once(from[1]);
            fetch_next();
        }
    };
    enter_tile();
    if constexpr (AHEAD > 0) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            load(w[i]);
    }
    if constexpr (GROUPED) {
        /* A warp takes a row; words are copied as they are. */
#pragma unroll 1
        for (int r = warp; r < tiles * 16; r += S::WARPS) {
            const int row = table[r].row_part / 4, of = p.group_rows > 1 ? row / p.group_rows : row;
            const gemm_part &part = p.part[table[r].row_part % 4];
            const char *const scale = (const char *)part.scale + of * part.scale_stride * S::SCALE_BYTES;
            const uint32_t to = shared_address(shared + c.scales) + (uint32_t)(r * c.scale_words * 4);
#pragma unroll 1
            for (int at = lane * 4; at < (int)p.k / 128 * S::SCALE_BYTES; at += 128)
                copy_async_4(to + (uint32_t)at, scale + at, true);
        }
        copy_commit();
    }
#pragma unroll 1
    for (int i = 0; i < S::STAGES; i++)
        fetch(i * S::STAGE_BYTES + (int)threadIdx.x * 16);
    if (p.const_weights) {
        if constexpr (S::NORM) { /* the norm's weight into the first cache */
#pragma unroll 1
            for (int at = (int)threadIdx.x * 32; at < (int)p.k * 2; at += S::THREADS * 32) {
                uint32_t v;
                asm volatile("ld.global.ca.u32 %0, [%1];" : "=r"(v) : "l"((const char *)p.norm_weight + at));
            }
        }
        pdl_wait();
    }

    /* Columns of the operand that have no token have the last one again: nobody reads what comes out. */
    const uint32_t addend = weight_addend<T, S::FORMAT>(S::FORMAT == OF_U4 ? 8 : 128);
    const int step_x = m * (S::STEP * 2);
    int at = (int)threadIdx.x * 16; /* of the ring */
#pragma unroll 1
    for (int chunk = 0; chunk < (S::CHUNKED ? steps : 1); chunk += S::CHUNKED ? chunk_steps : 1) {
        if (S::CHUNKED && chunk)
            __syncthreads(); /* the chunk before is read */
        compact_x<T, S>(p, c, shared + c.x, sums, chunk);
        if constexpr (GROUPED)
            copy_wait<S::STAGES>();
        __syncthreads();

        int tile = 0, step = warp;
        int x_lane[COLUMNS], other[COLUMNS]; /* from a piece to its neighbour */
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const int token = min(j * 8 + g, m - 1);
            x_lane[j] = c.x + warp * step_x + token * (S::STEP * 2) + (token & 1) * 64 + t * 16;
            other[j] = token & 1 ? -64 : 64;
        }
        int scale_lane = c.scales + g * c.scale_words * 4;
        float sum[COLUMNS][2][4] = {};
        uint32_t nan[2] = {};
        auto multiply = [&](uint4 low, uint4 high) {
            const uint32_t words[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
            constexpr int N = S::VECTOR / 8; /* pairs in 4 bytes of a weight */
            float scale[2], part[COLUMNS][2][4] = {};
            if constexpr (GROUPED) {
                const int group = (chunk + step) / S::SCALED;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const char *const from_scale =
                        shared + scale_lane + h * 8 * c.scale_words * 4 + group * S::SCALE_BYTES;
                    scale[h] = S::SCALES == F32_SCALES   ? *(const float *)from_scale
                               : S::SCALES == F16_SCALES ? to_float(*(const f16 *)from_scale)
                                                         : to_float(*(const bf16 *)from_scale);
                }
            }
            /* Half of x at a time: registers are few. */
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t x[COLUMNS][PIECES * 2];
#pragma unroll
                for (int j = 0; j < COLUMNS; j++)
#pragma unroll
                    for (int i = 0; i < PIECES / 2; i++) {
                        const int of = half * (PIECES / 2) + i;
                        const uint4 piece = load_shared(shared + x_lane[j] + of / 2 * 128 + (of % 2 ? other[j] : 0));
                        x[j][i * 4] = piece.x, x[j][i * 4 + 1] = piece.y;
                        x[j][i * 4 + 2] = piece.z, x[j][i * 4 + 3] = piece.w;
                    }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    uint32_t pair[2][N];
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const uint32_t word = words[h][half * 2 + i];
                        unit_pairs<T, S::FORMAT, false>(word, addend, pair[h]);
                        if constexpr (S::FORMAT == OF_F8) /* a NaN makes all products of its row one */
                            nan[h] |= (word & 0x7f7f7f7fu) + 0x01010101u;
                    }
#pragma unroll
                    for (int e = 0; e < N; e += 2)
#pragma unroll
                        for (int j = 0; j < COLUMNS; j++)
                            mma<T>(GROUPED ? part[j][N == 4 ? e / 2 : i] : sum[j][i], pair[0][e], pair[1][e],
                                   pair[0][e + 1], pair[1][e + 1], x[j][i * N + e], x[j][i * N + e + 1]);
                }
                asm volatile("" ::: "memory");
            }
            if constexpr (GROUPED) {
#pragma unroll
                for (int j = 0; j < COLUMNS; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sum[j][0][e] = fmaf(part[j][0][e] + part[j][1][e], scale[e / 2], sum[j][0][e]);
            }
        };
        auto next = [&]() {
            step += S::WARPS;
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                x_lane[j] += S::WARPS * step_x;
            if (step < chunk_steps)
                return;
            if constexpr (S::FORMAT == OF_F8) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint32_t group = 0xfu << (lane & ~3);
                    if (__ballot_sync(0xffffffffu, nan[h] & 0x80808080u) & group)
#pragma unroll
                        for (int j = 0; j < COLUMNS; j++)
                            sum[j][0][h * 2] = sum[j][0][h * 2 + 1] = __uint_as_float(0x7fffffffu);
                    nan[h] = 0;
                }
            }
            const uint32_t thread = thread_again();
            const int first_token = (int)(thread % 4 * 2);
            float *const mine = sums + (tile * S::WARPS + (int)(thread / 32)) * m * S::PITCH + thread % 32 / 4;
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                x_lane[j] -= chunk_steps * step_x;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int token = j * 8 + first_token + e % 2;
                    float *const of = mine + token * S::PITCH + e / 2 * 8;
                    float y = GROUPED ? sum[j][0][e] : sum[j][0][e] + sum[j][1][e];
                    if (token < m) {
                        if (S::CHUNKED && chunk)
                            y += *of;
                        *of = y;
                    }
                    sum[j][0][e] = sum[j][1][e] = 0;
                }
            }
            scale_lane += 16 * c.scale_words * 4;
            step -= chunk_steps, tile++;
        };
        if constexpr (AHEAD > 0) {
#pragma unroll 1
            while (tile < tiles) {
#pragma unroll
                for (int a = 0; a < AHEAD; a++) {
                    if (tile >= tiles)
                        break;
                    multiply(w[a][0], w[a][1]);
                    load(w[a]);
                    next();
                }
            }
        } else {
#pragma unroll 1
            while (tile < tiles) {
                copy_wait<S::STAGES - 1>();
                const int here = at;
                at += at >= S::RING_BYTES - S::STAGE_BYTES ? S::STAGE_BYTES - S::RING_BYTES : S::STAGE_BYTES;
                const uint4 low = load_shared(shared + here), high = load_shared(shared + here + S::THREADS * 16);
                fetch(here);
                multiply(low, high);
                next();
            }
        }
    }
    __syncthreads();

    const auto bias_of = [](const gemm_part &of, int row) {
        float b[1] = {};
        if (of.bias)
            load_param<T, 1>(of.bias, of.bias_f32, row, b);
        return b[0];
    };
#pragma unroll 1
    for (int i = (int)thread_again(); i < (tiles * m) << of_tile; i += S::THREADS) {
        const int r = i & ((1 << of_tile) - 1), rest = i >> of_tile;
        const int tile = (int)((uint32_t)rest * c.m_inverse >> 16), token = rest - tile * m;
        if ((tile << of_tile) + r >= rows)
            continue;
        const compact_row at_row = table[tile * 16 + r];
        const int part = at_row.row_part % 4, row = at_row.row_part / 4;
        const gemm_part &of = p.part[part];
        const int64_t column = of.column + row;
        float residual[1] = {};
        if (p.residual)
            load_param<T, 1>(p.residual, p.out_f32, token * p.rows.stride[GEMM_RESIDUAL][0] + column, residual);
        const float *from_sum = sums + (tile * S::WARPS * m + token) * S::PITCH + r;
        float y[2] = {};
#pragma unroll
        for (int kind = 0; kind < 2; kind++) {
            if (kind && !p.glu)
                break;
#pragma unroll
            for (int v = 0; v < S::WARPS; v++)
                y[kind] += from_sum[v * m * S::PITCH + kind * 8];
            y[kind] *= 1 / weight_unit<T, S::FORMAT>;
        }
        const bool rounded = p.rounding & ADZE_ROUND_STEPS;
        float f = fmaf(y[0], at_row.scale, bias_of(of, row));
        f = rounded ? round_to<T>(f) : f;
        if (p.glu) {
            const float value = fmaf(y[1], table[tile * 16 + r + 8].scale, bias_of(p.part[1], row));
            f = act_times_sigmoid(f, f);
            f = (rounded ? round_to<T>(f) : f) * (rounded ? round_to<T>(value) : value);
            f = rounded ? round_to<T>(f) : f;
        }
        f += residual[0];
        const int64_t to = token * p.rows.stride[of.out_rows][0] + row;
        if (p.out_f32)
            ((float *)of.out)[to] = f;
        else
            ((T *)of.out)[to] = from_float<T>(f);
    }
}

#endif
