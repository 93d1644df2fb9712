/* gemm_segment.cuh - products of few tokens with quantised weights, which bulk copies bring into rings of the warps.

   A block has a range of the weights' rows, in passes of ROWS, and of k all, or in a cluster its part. A segment is
   SEG bytes of each row of a pass. The segments of all passes, one pass after the other, are divided among the warps:
   each has a ring of STAGES segments of its own, which its lanes fill with one copy for each row, from the start of
   the kernel, before the dependency wait when the weights are constant. Even and odd rows of a segment lie apart, by
   64 bytes more than a multiple of 128, so that lanes 4 g + t load 16 bytes of rows g from banks of their own. Scales
   and x are in shared memory as well. A warp keeps the sums of a pass in registers, and those of all warps meet once,
   at the end. */
#ifndef ADZE_CUDA_GEMM_SEGMENT_CUH
#define ADZE_CUDA_GEMM_SEGMENT_CUH

#include "bulk.cuh"
#include "cluster.cuh"
#include "gemm_stream.cuh"

enum segment_scales { OF_ROWS, IN_F16, IN_BF16, IN_F32 }; /* whole rows, scaled at the end; of groups, and their dtype */

template <int WARPS_, int ROW_TILES_, int SEG_, int STAGES_, int BLOCKS_, int TOKEN_TILES_, int CLUSTER_,
          weight_format FORMAT_, segment_scales SCALES_, int ABLATE_ = 0>
struct segment_shape {
    static constexpr int ABLATE = ABLATE_;
    static constexpr int WARPS = WARPS_, THREADS = 32 * WARPS, ROW_TILES = ROW_TILES_, ROWS = 16 * ROW_TILES;
    static constexpr int SEG = SEG_, STAGES = STAGES_, BLOCKS = BLOCKS_, CLUSTER = CLUSTER_;
    static constexpr int TOKEN_TILES = TOKEN_TILES_, TOKENS = 8 * TOKEN_TILES;
    static constexpr weight_format FORMAT = FORMAT_;
    static constexpr segment_scales SCALES = SCALES_;
    static constexpr int VECTOR = weight_vector(FORMAT), STEP = 4 * VECTOR, STEPS = SEG / 64; /* of a segment */
    static constexpr int PIECES = VECTOR / 8;
    static constexpr int GROUP_STEPS = SCALES == OF_ROWS ? STEPS : 128 / STEP, GROUPS = STEPS / GROUP_STEPS;
    static constexpr int ODD = ROWS / 2 * SEG + 64, STAGE_BYTES = ROWS * SEG + 128, RING_BYTES = STAGES * STAGE_BYTES;
    static constexpr int BARRIER_BYTES = (WARPS * STAGES * 8 + 127) / 128 * 128;
    static constexpr int PITCH = ROWS + 4; /* floats of a token among the sums of a pass */
    static constexpr int SCALE_BYTES = SCALES == IN_F32 ? 4 : 2;
    static_assert(SEG % 128 == 0 && ROWS <= 32, "a lane copies one row");

    /* What stream_x asks. */
    static constexpr int GROUP = STEP, UNITS = 4;
    static __device__ __forceinline__ int x_at(int token, int vector, int pitch)
    {
        const int piece = vector % PIECES, of_x = vector / PIECES;
        return (of_x / 4 * PIECES + piece) * pitch + token * 64 + ((of_x ^ piece) & 3) * 16;
    }
};

struct segment_call {
    int rows_each, rows_extra; /* the first `extra` clusters have one more */
    int segs_each, segs_extra; /* segments of a row, of the blocks of a cluster */
    int ahead;                 /* whether the segments after the rings go to L2: 1 before the wait, 2 after it */
    int scales, x, sums;       /* where they are in shared memory */
    int scale_words;           /* of a row in shared memory */
    size_t bytes;
};
template <class S>
static segment_call segment_call_of(const gemm_params &p, int64_t clusters)
{
    const auto up = [](int64_t bytes) { return (int)((bytes + 127) / 128 * 128); };
    segment_call c = {};
    c.rows_each = (int)(p.n / clusters), c.rows_extra = (int)(p.n % clusters);
    const int64_t row_bytes = p.k * 16 / S::VECTOR, segs = ceil_div(row_bytes, S::SEG);
    c.segs_each = (int)(segs / S::CLUSTER), c.segs_extra = (int)(segs % S::CLUSTER);
    const int64_t most_rows = ceil_div(p.n, clusters), passes = ceil_div(most_rows * (p.glu ? 2 : 1), S::ROWS);
    const int64_t most_segs = ceil_div(segs, S::CLUSTER), most_k = std::min(most_segs * S::STEPS * S::STEP, p.k);
    c.scales = S::BARRIER_BYTES + S::WARPS * S::RING_BYTES;
    c.scale_words = S::SCALES == OF_ROWS ? 0 : (int)ceil_div(ceil_div(most_k, 128) * S::SCALE_BYTES, 4) | 1;
    c.x = c.scales + up(passes * S::ROWS * c.scale_words * 4);
    c.sums = c.x + up(ceil_div(most_k, S::STEP) * S::STEP * p.m * 2);
    const int64_t sums = (passes + S::WARPS - 1) * S::PITCH * p.m * 4, norm = p.m * ceil_div(p.k, 256) * 8;
    c.bytes = (size_t)(c.sums + up(std::max(sums, norm)));
    return c;
}

/* Where row r of a pass is: which of the block's rows of the call, of which weight. */
struct segment_row {
    int row, part;
};
template <class S>
__device__ __forceinline__ segment_row segment_row_of(const gemm_params &p, int begin, int rows, int pass, int r)
{
    const int in_block = p.glu ? pass * (S::ROWS / 2) + r / 16 * 8 + r % 8 : pass * S::ROWS + r;
    segment_row of = {begin + in_block, p.glu && r % 16 >= 8 ? 1 : 0};
    if (in_block >= rows)
        return {0, -1};
    if (!p.glu) {
        if (of.row >= (int)p.part[0].n) {
            of.row -= (int)p.part[0].n, of.part = 1;
            if (of.row >= (int)p.part[1].n)
                of.row -= (int)p.part[1].n, of.part = 2;
        }
    }
    return of;
}

/* The products of 16 rows and a step: a lane's vectors of rows g and g + 8, its pairs of x. */
template <typename T, class S, bool RARE>
__device__ __forceinline__ void segment_tile(uint4 low, uint4 high, uint32_t addend,
                                             const uint32_t (&x)[S::TOKEN_TILES][S::PIECES * 4],
                                             float (&part)[S::TOKEN_TILES][4])
{
    constexpr int N = S::VECTOR / 8; /* pairs in 4 bytes of a weight */
    const uint32_t words[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t pair[2][N];
        unit_pairs<T, S::FORMAT, RARE>(words[0][j], addend, pair[0]);
        unit_pairs<T, S::FORMAT, RARE>(words[1][j], addend, pair[1]);
#pragma unroll
        for (int e = 0; e < N; e += 2)
#pragma unroll
            for (int c = 0; c < S::TOKEN_TILES; c++)
                mma<T>(part[c], pair[0][e], pair[1][e], pair[0][e + 1], pair[1][e + 1], x[c][j * N + e],
                       x[c][j * N + e + 1]);
    }
}

#ifndef SEGMENT_WAIT
#define SEGMENT_WAIT bulk_wait
#endif

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) gemm_segment(const gemm_params p, const segment_call c)
{
    constexpr int SEG = S::SEG, STAGES = S::STAGES, PIECES = S::PIECES, TILES = S::ROW_TILES, COLUMNS = S::TOKEN_TILES;
    constexpr float UNIT = weight_unit<T, S::FORMAT>;
    extern __shared__ __align__(128) char shared[];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4, m = (int)p.m;
    const int cluster = (int)blockIdx.x / S::CLUSTER, rank = (int)blockIdx.x % S::CLUSTER;
    const int begin = cluster * c.rows_each + min(cluster, c.rows_extra), rows = c.rows_each + (cluster < c.rows_extra);
    const int seg_begin = rank * c.segs_each + min(rank, c.segs_extra), segs = c.segs_each + (rank < c.segs_extra);
    const int of_pass = p.glu ? S::ROWS / 2 : S::ROWS, passes = (rows + of_pass - 1) / of_pass;
    const int items = passes * segs, first = items * warp / S::WARPS, last = items * (warp + 1) / S::WARPS;
    const int row_bytes = (int)p.k * 16 / S::VECTOR;
    const uint32_t barrier = shared_address(shared) + (uint32_t)(warp * STAGES * 8);
    char *const ring = shared + S::BARRIER_BYTES + warp * S::RING_BYTES, *const xs = shared + c.x;
    float *const sums = (float *)(shared + c.sums);

    /* The next segment to fetch, and where this lane's row of it is. */
    int fetch_item = first, fetch_pass = segs ? first / segs : 0, fetch_seg = first - fetch_pass * segs;
    const uint32_t to_lane = shared_address(ring) + (uint32_t)(lane / 2 * SEG + (lane & 1) * S::ODD);
    const char *from = NULL;
    uint32_t present = 0; /* rows of the pass */
    auto enter_pass = [&]() {
        const segment_row of = segment_row_of<S>(p, begin, rows, fetch_pass, lane);
        present = (uint32_t)(min(rows - fetch_pass * of_pass, of_pass) * (p.glu ? 2 : 1));
        from = NULL;
        if (lane < S::ROWS && of.part >= 0) {
            const gemm_part &part = p.part[of.part];
            from = part.w + of.row * part.w_stride + (int64_t)seg_begin * SEG;
        }
    };
    auto fetch = [&](int stage) {
        if (fetch_item >= last || (S::ABLATE & 8))
            return;
        const int at = fetch_seg * SEG;
        const uint32_t bytes = (uint32_t)min(SEG, row_bytes - seg_begin * SEG - at);
        if (lane == 0)
            bulk_expect(barrier + (uint32_t)(stage * 8), bytes * present);
        __syncwarp();
        if (from)
            bulk_copy_expected(to_lane + (uint32_t)(stage * S::STAGE_BYTES), from + at, bytes,
                               barrier + (uint32_t)(stage * 8));
        fetch_item++;
        if (++fetch_seg == segs) {
            fetch_seg = 0, fetch_pass++;
            enter_pass();
        }
    };
    /* What comes after the rings, to L2. */
    auto ahead = [&]() {
        int item = fetch_item, pass = fetch_pass, seg = fetch_seg;
        while (item < last) {
            const int count = min(segs - seg, last - item), at = seg * SEG;
            const segment_row of = segment_row_of<S>(p, begin, rows, pass, lane);
            if (lane < S::ROWS && of.part >= 0) {
                const gemm_part &part = p.part[of.part];
                bulk_prefetch(part.w + of.row * part.w_stride + (int64_t)seg_begin * SEG + at,
                              (uint32_t)min(count * SEG, row_bytes - seg_begin * SEG - at));
            }
            item += count, pass++, seg = 0;
        }
    };

    if (lane == 0) {
        for (int i = 0; i < STAGES; i++)
            bulk_barrier(barrier + (uint32_t)(i * 8));
        bulk_ready();
    }
    __syncwarp();
    if (!p.const_weights)
        pdl_wait();
    pdl_launch_next();
    if (fetch_item < last)
        enter_pass();
#pragma unroll
    for (int i = 0; i < STAGES; i++)
        fetch(i);
    if (c.ahead == 1)
        ahead();
    if constexpr (S::SCALES != OF_ROWS) {
        /* A warp takes a row; words of two groups are copied as they are. */
        const int group = seg_begin * (SEG / 16 * S::VECTOR) / 128;
        const int groups = min(segs * (SEG / 16 * S::VECTOR), (int)p.k - group * 128) / 128;
        const uint32_t to = shared_address(shared + c.scales);
        for (int r = warp; r < passes * S::ROWS && !(S::ABLATE & 16); r += S::WARPS) {
            const segment_row of = segment_row_of<S>(p, begin, rows, r / S::ROWS, r % S::ROWS);
            if (of.part < 0)
                continue;
            const gemm_part &part = p.part[of.part];
            const int row = p.group_rows > 1 ? of.row / p.group_rows : of.row;
            const char *const scale = (const char *)part.scale + (row * part.scale_stride + group) * S::SCALE_BYTES;
            for (int word = lane; word * 4 < groups * S::SCALE_BYTES; word += 32)
                copy_async_4(to + (uint32_t)((r * c.scale_words + word) * 4), scale + word * 4, true);
        }
        copy_commit();
    }
    if constexpr (S::CLUSTER == 1) {
        const stream_x<T, S> loader(p, p.x, xs, m * 64, sums);
        if (p.const_weights) {
            if (p.norm)
                loader.prefetch_params();
            pdl_wait();
        }
        if (c.ahead == 2)
            ahead();
        if (!(S::ABLATE & 1))
            loader.load();
    } else {
        if (p.const_weights)
            pdl_wait();
        if (c.ahead == 2)
            ahead();
        const int x_begin = seg_begin * (SEG / 16 * S::VECTOR), x_k = min(segs * (SEG / 16 * S::VECTOR), (int)p.k - x_begin);
        const int vectors = (x_k + S::STEP - 1) / S::STEP * (S::STEP / 8), whole = x_k / 8; /* then zeros */
        const int64_t x_stride = p.rows.stride[GEMM_X][0];
        const T *const x_from = (const T *)p.x + x_begin;
        constexpr int AT_ONCE = 8;
        for (int i = (int)threadIdx.x; i < vectors * m; i += AT_ONCE * S::THREADS) {
            uint4 v[AT_ONCE];
            int to[AT_ONCE];
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                const int at = i + u * S::THREADS, token = at / vectors, vector = at - token * vectors;
                to[u] = S::x_at(token, vector, m * 64);
                v[u] = make_uint4(0, 0, 0, 0);
                if (at < vectors * m && vector < whole)
                    v[u] = load_packed(x_from + token * x_stride + vector * 8).raw;
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++)
                if (i + u * S::THREADS < vectors * m)
                    *reinterpret_cast<uint4 *>(xs + to[u]) = weight_order<S::FORMAT>(v[u]);
        }
    }
    if constexpr (S::SCALES != OF_ROWS)
        copy_wait<0>();
    __syncthreads();

    /* Columns that have no token have the last one again: nobody reads what comes out. */
    const char *x_lane[COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
        x_lane[j] = xs + min(j * 8 + g, m - 1) * 64;
    const uint32_t addend = weight_addend<T, S::FORMAT>(S::FORMAT == OF_U4 ? 8 : 128);
    const int steps = ((int)p.k + S::STEP - 1) / S::STEP - seg_begin * S::STEPS; /* of x, from the block's first on */
    int stage = 0, pass = segs ? first / segs : 0, seg = first - pass * segs;
    uint32_t parity = 0;
    float sum[TILES][COLUMNS][4] = {};
    for (int item = first; item < last; item++) {
        const char *const w_lane = ring + stage * S::STAGE_BYTES + g / 2 * SEG + (g & 1) * S::ODD + t * 16;
        if (!(S::ABLATE & 8))
            SEGMENT_WAIT(barrier + (uint32_t)(stage * 8), parity);
#pragma unroll
        for (int group = 0; group < S::GROUPS && !(S::ABLATE & 4); group++) {
            if (seg * S::STEPS + group * S::GROUP_STEPS >= steps)
                break;
            float part[TILES][COLUMNS][4] = {};
#pragma unroll
            for (int s = 0; s < S::GROUP_STEPS; s++) {
                const int in_seg = group * S::GROUP_STEPS + s, step = seg * S::STEPS + in_seg;
                if (S::SCALES == OF_ROWS && step >= steps)
                    break;
                uint32_t x[COLUMNS][PIECES * 4];
                uint4 w[TILES][2];
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    w[i][0] = load_shared(w_lane + i * 8 * SEG + in_seg * 64);
                    w[i][1] = load_shared(w_lane + (i * 8 + 4) * SEG + in_seg * 64);
                }
#pragma unroll
                for (int j = 0; j < COLUMNS; j++)
#pragma unroll
                    for (int i = 0; i < PIECES; i++) {
                        const uint4 v = load_shared(x_lane[j] + (step * PIECES + i) * (m * 64) + ((t ^ i) & 3) * 16);
                        x[j][i * 4] = v.x, x[j][i * 4 + 1] = v.y, x[j][i * 4 + 2] = v.z, x[j][i * 4 + 3] = v.w;
                    }
                bool rare = false;
                if constexpr (S::FORMAT == OF_F8) {
                    bool nan = false;
#pragma unroll
                    for (int i = 0; i < TILES; i++)
                        nan = nan || f8_nan(w[i][0]) || f8_nan(w[i][1]);
                    rare = __any_sync(0xffffffffu, nan);
                }
#pragma unroll
                for (int i = 0; i < TILES; i++)
                    if (S::ABLATE & 2)
                        part[i][0][0] += __uint_as_float(w[i][0].x ^ w[i][0].y ^ w[i][0].z ^ w[i][0].w ^ w[i][1].x ^
                                                         w[i][1].y ^ w[i][1].z ^ w[i][1].w ^ x[0][0]);
                    else if (rare)
                        segment_tile<T, S, true>(w[i][0], w[i][1], addend, x, part[i]);
                    else
                        segment_tile<T, S, false>(w[i][0], w[i][1], addend, x, part[i]);
            }
            const int of_group = seg * S::GROUPS + group;
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float scale = 1;
                    if constexpr (S::SCALES != OF_ROWS) {
                        const int row = pass * S::ROWS + i * 16 + h * 8 + g;
                        const char *const at = shared + c.scales + row * c.scale_words * 4 + of_group * S::SCALE_BYTES;
                        scale = S::SCALES == IN_F32    ? *(const float *)at
                                 : S::SCALES == IN_BF16 ? to_float(*(const bf16 *)at)
                                                        : to_float(*(const f16 *)at);
                    }
#pragma unroll
                    for (int j = 0; j < COLUMNS; j++)
#pragma unroll
                        for (int e = 0; e < 2; e++)
                            sum[i][j][h * 2 + e] = S::SCALES == OF_ROWS
                                                       ? sum[i][j][h * 2 + e] + part[i][j][h * 2 + e]
                                                       : fmaf(part[i][j][h * 2 + e], scale, sum[i][j][h * 2 + e]);
                }
        }
        __syncwarp();
        fetch(stage);
        if (++stage == STAGES)
            stage = 0, parity ^= 1;
        if (++seg == segs || item + 1 == last) {
            float *const to = sums + (pass + warp) * (S::PITCH * m);
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int j = 0; j < COLUMNS; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int token = j * 8 + t * 2 + e % 2;
                        if (token < m)
                            to[token * S::PITCH + i * 16 + e / 2 * 8 + g] = sum[i][j][e] * (1 / UNIT);
                        sum[i][j][e] = 0;
                    }
            seg = 0, pass++;
        }
    }
    __syncthreads();

    /* The sums of a pass are those of the warps that have segments of it. */
    auto total = [&](int of, int in_pass, int token) {
        float y = 0;
#pragma unroll
        for (int v = 0; v < S::WARPS; v++) {
            const int from_item = items * v / S::WARPS, to_item = items * (v + 1) / S::WARPS;
            if (from_item < (of + 1) * segs && to_item > of * segs && from_item < to_item)
                y += sums[((of + v) * m + token) * S::PITCH + in_pass];
        }
        return y;
    };
    if constexpr (S::CLUSTER == 1) {
        for (int i = (int)threadIdx.x; i < rows * m; i += S::THREADS) {
            const int token = i / rows, row = i - token * rows, of = row / of_pass, r = row - of * of_pass;
            const int in_pass = p.glu ? r / 8 * 16 + r % 8 : r;
            const float y = total(of, in_pass, token), y2 = p.glu ? total(of, in_pass + 8, token) : 0;
            const segment_row at = segment_row_of<S>(p, begin, rows, of, in_pass);
            gemm_finish<T>(p, at.part, 0, token, at.row, y, y2);
        }
    } else {
        /* Each block finishes a part of the rows, from what it and the others have. */
        float *const merged = (float *)(shared + S::BARRIER_BYTES); /* the rings are read */
        const int kinds = p.glu ? 2 : 1;
        for (int i = (int)threadIdx.x; i < rows * m * kinds; i += S::THREADS) {
            const int kind = i / (rows * m), rest = i - kind * (rows * m), token = rest / rows, row = rest - token * rows;
            const int of = row / of_pass, r = row - of * of_pass;
            merged[i] = total(of, (p.glu ? r / 8 * 16 + r % 8 : r) + kind * 8, token);
        }
        cluster_arrive();
        cluster_wait();
        const int from_row = rows * rank / S::CLUSTER, count = rows * (rank + 1) / S::CLUSTER - from_row;
        for (int i = (int)threadIdx.x; i < count * m; i += S::THREADS) {
            const int token = i / count, row = from_row + i - token * count, of = row / of_pass, r = row - of * of_pass;
            float y[2] = {};
#pragma unroll
            for (int b = 0; b < S::CLUSTER; b++)
                for (int kind = 0; kind < kinds; kind++)
                    y[kind] += cluster_load(merged + (kind * m + token) * rows + row, b);
            const segment_row at = segment_row_of<S>(p, begin, rows, of, p.glu ? r / 8 * 16 + r % 8 : r);
            gemm_finish<T>(p, at.part, 0, token, at.row, y[0], y[1]);
        }
        cluster_arrive();
        cluster_wait();
    }
}

#endif
