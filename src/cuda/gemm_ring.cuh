/* gemm_ring.cuh - products of few tokens with quantised weights, which pass through deep rings in shared memory.

   A block has a range of the weights' rows, in passes of up to ROWS, and its warps have a part of k each. A unit is
   64 bytes of 32 rows, two tiles of 16: a warp has STAGES of them under way from the start of the kernel, before the
   dependency wait when the weights are constant. With 8 warps a block of the next kernel has room beside one of this
   kernel, and its rings fill while this kernel ends. With 16 warps a block is alone on its multiprocessor, which was
   faster in a decode step. All of x is in shared memory, where it can be normed. The loads of a unit's scales and
   zeros begin with it and end in shared memory two units later, as the numbers that the products are made with. Lane
   4 g + t has 16 bytes of rows g and g + 8 of a tile, which hold operands of several tensor-core products once they
   are unpacked. */
#ifndef ADZE_CUDA_GEMM_RING_CUH
#define ADZE_CUDA_GEMM_RING_CUH

#include "gemm_stream.cuh"

template <int WARPS_, int STAGES_, int BLOCKS_, weight_format FORMAT_>
struct ring_shape {
    static constexpr int WARPS = WARPS_, STAGES = STAGES_, THREADS = 32 * WARPS, TOKENS = 8;
    static constexpr int BLOCKS = BLOCKS_; /* of a multiprocessor, of this kernel and the next */
    static constexpr weight_format FORMAT = FORMAT_;
    static constexpr int VECTOR = weight_vector(FORMAT), STEP = 4 * VECTOR; /* weights of a lane's load, of a step */
    static constexpr int PIECES = VECTOR / 8;                               /* vectors of x that a load goes with */
    static constexpr int PAIRS = 2, ROWS = 32 * PAIRS;                      /* of a pass */
    static constexpr int UNIT_BYTES = 32 * 64, RING_BYTES = STAGES * UNIT_BYTES, RING_ROWS = STAGES * 32;
    static constexpr int WORDS = FORMAT == OF_U4 ? 2 : 1; /* of a row of a unit: its scale, and what its zero adds */
    static constexpr int PITCH = ROWS + 4; /* floats of a token among a warp's sums: lanes have banks of their own */
    static_assert(STAGES > 2, "a scale is in shared memory two units after its load began");

    /* What stream_x asks. A step of x is in the order of the lanes: by pieces, tokens and lanes t, of which two
       pieces have other orders. pitch: bytes of a piece. */
    static constexpr int GROUP = STEP, UNITS = 4;
    static __device__ __forceinline__ int x_at(int token, int vector, int pitch)
    {
        const int piece = vector % PIECES, of_x = vector / PIECES;
        return (of_x / 4 * PIECES + piece) * pitch + token * 64 + ((of_x ^ piece) & 3) * 16;
    }
};

/* What a block has in shared memory: its passes and where their rows are, those of weights, scales and zeros; the
   warps' rings, of weights and of the words of their rows; their sums, those of two passes where there are few
   tokens; x. */
struct ring_layout {
    size_t passes, ring, words, sums, x, bytes;
    bool two_sums;
};
template <class S>
__host__ __device__ inline ring_layout ring_layout_of(int64_t passes, int64_t m, int64_t k)
{
    ring_layout at = {};
    at.two_sums = m <= 2 && passes > 1;
    at.passes = (size_t)passes * S::ROWS * sizeof(const char *) * (1 + S::WORDS);
    at.ring = (at.passes + (size_t)passes * sizeof(gemm_rows) + 127) / 128 * 128;
    at.words = at.ring + S::WARPS * S::RING_BYTES;
    at.sums = at.words + S::WARPS * S::RING_ROWS * S::WORDS * 4;
    at.x = at.sums + (size_t)(S::WARPS * S::PITCH * 4 * (at.two_sums ? 2 : 1)) * (size_t)m;
    at.bytes = at.x + (size_t)((k + S::STEP - 1) / S::STEP * S::STEP * m * 2);
    return at;
}
/* The passes of a block of `blocks`, at most: each weight but the first may begin one more. */
template <class S>
static int64_t ring_passes(const gemm_params &p, int64_t blocks)
{
    const int64_t rows = ceil_div(p.n, blocks) * (p.glu ? 2 : 1);
    return ceil_div(rows, S::ROWS) + (p.glu ? 0 : (p.part[1].n > 0) + (p.part[2].n > 0));
}

/* A scale and a zero as they are stored, on their way to shared memory. */
struct ring_raw {
    uint32_t scale, zero;
};

/* The products of 16 rows and a step: a lane's vectors of rows g and g + 8, what is added to their weights, its pairs
   of x. RARE: with NaN of f8e4m3. */
template <typename T, class S, bool RARE>
__device__ __forceinline__ void ring_tile(uint4 low, uint4 high, const uint32_t (&addend)[2],
                                          const uint32_t (&x)[S::PIECES * 4], float (&part)[4])
{
    constexpr int N = S::VECTOR / 8; /* pairs in 4 bytes of a weight */
    const uint32_t words[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t pair[2][N];
        unit_pairs<T, S::FORMAT, RARE>(words[0][j], addend[0], pair[0]);
        unit_pairs<T, S::FORMAT, RARE>(words[1][j], addend[1], pair[1]);
#pragma unroll
        for (int e = 0; e < N; e += 2)
            mma<T>(part, pair[0][e], pair[1][e], pair[0][e + 1], pair[1][e + 1], x[j * N + e], x[j * N + e + 1]);
    }
}
/* The same of two tiles. */
template <typename T, class S>
__device__ __forceinline__ void ring_tiles(const uint4 (&w)[2][2], const uint32_t (&addend)[2][2],
                                           const uint32_t (&x)[S::PIECES * 4], float (&part)[2][4])
{
    bool rare = false;
    if constexpr (S::FORMAT == OF_F8)
        rare = __any_sync(0xffffffffu, f8_nan(w[0][0]) || f8_nan(w[0][1]) || f8_nan(w[1][0]) || f8_nan(w[1][1]));
    if (rare) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            ring_tile<T, S, true>(w[i][0], w[i][1], addend[i], x, part[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++)
            ring_tile<T, S, false>(w[i][0], w[i][1], addend[i], x, part[i]);
    }
}

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, GEMM_ONE_BLOCK ? 1 : S::BLOCKS)
    gemm_ring(const gemm_params p, const int most_passes)
{
    constexpr int STAGES = S::STAGES, PIECES = S::PIECES;
    constexpr float UNIT = weight_unit<T, S::FORMAT>;
    extern __shared__ __align__(128) char shared[];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4, m = (int)p.m;
    const bool grouped = p.group, has_zero = S::FORMAT == OF_U4 && gemm_has_zero(p), glu = p.glu;
    const ring_layout at = ring_layout_of<S>(most_passes, p.m, p.k);
    const char **const row_at = (const char **)shared, **const scale_at = row_at + most_passes * S::ROWS,
                       **const zero_at = scale_at + most_passes * S::ROWS;
    gemm_rows *const pass_at = (gemm_rows *)(shared + at.passes);
    char *const ring = shared + at.ring + warp * S::RING_BYTES, *const xs = shared + at.x;
    uint32_t *const words = (uint32_t *)(shared + at.words) + warp * S::RING_ROWS * S::WORDS;
    float *const sums = (float *)(shared + at.sums);
    const int begin = (int)(p.n * blockIdx.x / gridDim.x), end = (int)(p.n * (blockIdx.x + 1) / gridDim.x);
    const int steps = ((int)p.k + S::STEP - 1) / S::STEP, scale_dtype = p.part[0].scale_dtype;
    const int first = steps * warp / S::WARPS, last = steps * (warp + 1) / S::WARPS;
    /* Rows of the call in a tile and in a pass. With glu a tile has 8 rows of the gate and the value's after them. */
    const int of_tile = glu ? 8 : 16, of_pass = glu ? S::ROWS / 2 : S::ROWS;

    /* Where the rows are: row r of a pass is row r % 16 of its tile r / 16. After its last row it is that again. */
    int passes = 0;
    for (int row = begin; row < end; passes++) {
        const gemm_rows pass = stream_rows(p, row, end, of_pass);
        const int r = (int)threadIdx.x - passes % (S::THREADS / S::ROWS) * S::ROWS;
        row += pass.count;
        if (r < 0 || r >= S::ROWS)
            continue;
        const int in_pass = r / 16 * of_tile + r % of_tile, to = passes * S::ROWS + r;
        const gemm_part &part = p.part[glu && r % 16 >= 8 ? 1 : pass.part];
        const int64_t of_weight = pass.at + min(in_pass, pass.count - 1);
        const int64_t of_scale = p.group_rows > 1 ? of_weight / p.group_rows : of_weight;
        row_at[to] = part.w + of_weight * part.w_stride;
        scale_at[to] = (const char *)part.scale + of_scale * part.scale_stride * (scale_dtype == ADZE_F32 ? 4 : 2);
        if (has_zero)
            zero_at[to] = (const char *)part.zero + of_weight * part.zero_stride;
        if (r == 0)
            pass_at[passes] = pass;
    }
    __syncthreads();

    /* The next unit to fetch: its pass, step and pair of tiles. Of the pass: how many times 8 rows this lane has, and
       pairs of tiles. */
    int fetch_pass = first < last ? 0 : passes, fetch_step = first, fetch_pair = 0, fetch_eights = 0, fetch_pairs = 0;
    auto enter_pass = [&]() {
        const int count = fetch_pass < passes ? pass_at[fetch_pass].count : 0;
        fetch_eights = (count - g + 7) / 8 * (glu ? 2 : 1);
        fetch_pairs = glu ? (count + 15) / 16 : (count + 31) / 32;
    };
    auto fetch = [&](int stage) {
        ring_raw raw = {0, 8};
        if (fetch_pass < passes) {
            const int row = fetch_pass * S::ROWS + fetch_pair * 32;
            const bool there = (fetch_step * 4 + t) * S::VECTOR < (int)p.k;
            const uint32_t to = shared_address(ring) + (uint32_t)(stage * S::UNIT_BYTES + lane * 16);
            const uint32_t in_row = there ? (uint32_t)(fetch_step * 64 + t * 16) : 0;
            const char *from[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                from[i] = row_at[row + i * 8 + g];
#pragma unroll
            for (int i = 0; i < 4; i++) /* rows that are not there are zeros, so that none is NaN */
                copy_async(to + (uint32_t)(i * 512), from[i] + in_row, there && fetch_pair * 4 + i < fetch_eights);
            const int group = fetch_step >> (p.group > S::STEP);
            if (grouped)
                raw.scale = scale_dtype == ADZE_F32 ? __ldg((const uint32_t *)scale_at[row + lane] + group)
                                                    : __ldg((const uint16_t *)scale_at[row + lane] + group);
            if (has_zero)
                raw.zero = __ldg((const uint8_t *)zero_at[row + lane] + (grouped ? group : 0));
            if (++fetch_pair == fetch_pairs) {
                fetch_pair = 0;
                if (++fetch_step == last) {
                    fetch_step = first, fetch_pass++;
                    enter_pass();
                }
            }
        }
        copy_commit();
        return raw;
    };
    auto put = [&](int stage, ring_raw raw) {
        const float scale = scale_dtype == ADZE_F32    ? __uint_as_float(raw.scale)
                            : scale_dtype == ADZE_BF16 ? __uint_as_float(raw.scale << 16)
                                                       : to_float(__ushort_as_half((unsigned short)raw.scale));
        uint32_t *const to = words + (stage * 32 + lane) * S::WORDS;
        if (grouped || has_zero) {
            to[0] = __float_as_uint((grouped ? scale : 1) * (1 / UNIT));
            if (S::WORDS == 2)
                to[1] = weight_addend<T, S::FORMAT>((float)raw.zero);
        }
    };

    if (!p.const_weights)
        pdl_wait();
    pdl_launch_next();
    ring_raw raw[STAGES];
    enter_pass();
#pragma unroll
    for (int i = 0; i < STAGES; i++)
        raw[i] = fetch(i);
    if (!grouped && !has_zero) /* whole rows are scaled at the end */
#pragma unroll
        for (int i = 0; i < STAGES; i++) {
            words[(i * 32 + lane) * S::WORDS] = __float_as_uint(1 / UNIT);
            if (S::WORDS == 2)
                words[(i * 32 + lane) * 2 + 1] = weight_addend<T, S::FORMAT>(8);
        }
    {
        const stream_x<T, S> loader(p, p.x, xs, m * 64, sums);
        if (p.const_weights) {
            if (p.norm)
                loader.prefetch_params();
            pdl_wait();
        }
        loader.load();
    }
#pragma unroll
    for (int i = 0; i < STAGES - 2; i++)
        put(i, raw[i]);
    ring_raw older = raw[STAGES - 2], newer = raw[STAGES - 1];
    __syncthreads();

    /* Lanes that have no token have the last one again: nobody reads what comes out. */
    const char *const x_lane = xs + min(g, m - 1) * 64;
    int stage = 0;
    for (int turn = 0; turn < passes; turn++) {
        const gemm_rows pass = pass_at[turn];
        float sum[2 * S::PAIRS][4] = {};
        for (int step = first; step < last; step++) {
            uint32_t x[PIECES * 4];
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                const uint4 v = load_shared(x_lane + (step * PIECES + i) * (m * 64) + ((t ^ i) & 3) * 16);
                x[i * 4] = v.x, x[i * 4 + 1] = v.y, x[i * 4 + 2] = v.z, x[i * 4 + 3] = v.w;
            }
#pragma unroll
            for (int q = 0; q < S::PAIRS; q++) {
                if (q * 2 * of_tile >= pass.count)
                    break;
                copy_wait<STAGES - 1>();
                __syncwarp();
                uint4 w[2][2];
                uint32_t addend[2][2];
                float scale[2][2];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const uint32_t *const word = words + (stage * 32 + i * 8 + g) * S::WORDS;
                    w[i / 2][i % 2] = load_shared(ring + stage * S::UNIT_BYTES + i * 512 + lane * 16);
                    if constexpr (S::WORDS == 2) {
                        const uint2 both_words = *reinterpret_cast<const uint2 *>(word);
                        scale[i / 2][i % 2] = __uint_as_float(both_words.x);
                        addend[i / 2][i % 2] = both_words.y;
                    } else {
                        scale[i / 2][i % 2] = __uint_as_float(word[0]);
                        addend[i / 2][i % 2] = weight_addend<T, S::FORMAT>(128);
                    }
                }
                __syncwarp();
                put(stage < 2 ? stage + STAGES - 2 : stage - 2, older);
                older = newer;
                newer = fetch(stage);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                float part[2][4] = {};
                ring_tiles<T, S>(w, addend, x, part);
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sum[q * 2 + i][e] = fmaf(part[i][e], scale[i][e / 2], sum[q * 2 + i][e]);
            }
        }

        float *const mine = sums + (at.two_sums && turn % 2 ? S::WARPS * m * S::PITCH : 0);
        if (!at.two_sums && turn)
            __syncthreads(); /* the sums of the pass before are read */
#pragma unroll
        for (int i = 0; i < 2 * S::PAIRS; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (t * 2 + e % 2 < m)
                    mine[(warp * m + t * 2 + e % 2) * S::PITCH + i * 16 + e / 2 * 8 + g] = sum[i][e];
        __syncthreads();
        /* Each pass is finished by other warps first. */
        const int start = (warp + S::WARPS - turn * 2 % S::WARPS) % S::WARPS * 32 + lane;
        for (int i = start; i < of_pass * m; i += S::THREADS) {
            const int token = i / of_pass, column = i - token * of_pass;
            if (column >= pass.count)
                continue;
            const float *const from = mine + token * S::PITCH + (glu ? column / 8 * 16 + column % 8 : column);
            float y = 0, y2 = 0;
#pragma unroll
            for (int v = 0; v < S::WARPS; v++) {
                y += from[v * m * S::PITCH];
                if (glu)
                    y2 += from[v * m * S::PITCH + 8];
            }
            gemm_finish<T>(p, pass.part, 0, token, pass.at + column, y, y2);
        }
    }
}

#endif
