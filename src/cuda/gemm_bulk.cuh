/* gemm_bulk.cuh - products of one or two tokens: weights are streamed once, by bulk copies into rings in shared
   memory, and multiplied on the CUDA cores.

   A block has a range of the weights' rows, and each of its warps an equal part of that range, which is contiguous
   memory where the rows are. A warp's part may begin and end inside a row, so the sums of rows are kept in shared
   memory and finished at the end. With glu a row of the gate is followed by that of the value. The rings fill before
   the dependency wait, when the weights are constant. Two blocks hold less shared memory than a multiprocessor has,
   so that the next kernel of a chain has its rings full when this one ends. */
#ifndef ADZE_CUDA_GEMM_BULK_CUH
#define ADZE_CUDA_GEMM_BULK_CUH

#include "bulk.cuh"
#include "gemm_stream.cuh"

template <int TOKENS_, int WARPS_, int CHUNK_, int STAGES_>
struct bulk_shape {
    static constexpr int TOKENS = TOKENS_, WARPS = WARPS_, THREADS = 32 * WARPS, CHUNK = CHUNK_, STAGES = STAGES_;
    static constexpr weight_format FORMAT = OF_X; /* these three are stream_x's */
    static constexpr int GROUP = 32, UNITS = 2;
    static constexpr int RING_BYTES = STAGES * CHUNK;
    static constexpr int FIXED_BYTES = WARPS * RING_BYTES + WARPS * STAGES * 8 + WARPS * TOKENS * 4;
};
/* x, the sums of its units, and `rows` sums of products for each token. */
template <class S>
constexpr size_t bulk_shared(int64_t k, int64_t rows)
{
    return (size_t)(S::FIXED_BYTES + S::TOKENS * (stream_pitch<S>(k) + (k + 255) / 256 * 8 + rows * 4));
}

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, 2) gemm_bulk(const gemm_params p)
{
    constexpr int M = S::TOKENS, WARPS = S::WARPS, CHUNK = S::CHUNK, STAGES = S::STAGES;
    extern __shared__ __align__(128) char shared[];
    char *const barriers = shared + WARPS * S::RING_BYTES;
    float *const first_sums = (float *)(barriers + WARPS * STAGES * 8); /* of rows that began in another warp's part */
    char *const xs = (char *)(first_sums + WARPS * M);
    const int x_pitch = stream_pitch<S>(p.k);
    float *const units = (float *)(xs + M * x_pitch), *const sums = units + M * (((int)p.k + 255) / 256) * 2;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, halves = p.glu ? 2 : 1;
    const int64_t batch = blockIdx.y;
    const int begin = (int)(p.n * blockIdx.x / gridDim.x), end = (int)(p.n * (blockIdx.x + 1) / gridDim.x);
    const int row_bytes = (int)p.k * 2, chunks = (row_bytes + CHUNK - 1) / CHUNK;
    const int all = (end - begin) * halves * chunks;
    auto part_begin = [&](int w) { return (int)((int64_t)all * w / WARPS); };
    const int first = part_begin(warp);
    const uint32_t ring = shared_address(shared + warp * S::RING_BYTES);
    const uint32_t barrier = shared_address(barriers + warp * STAGES * 8);

    /* Lane 0 fetches. */
    int left = part_begin(warp + 1) - first, fetch_row = first / chunks, fetch_at = (first - fetch_row * chunks) * CHUNK;
    const char *from = NULL;
    auto fetch = [&](int stage) {
        if (left == 0)
            return;
        if (!from) {
            const gemm_rows of = stream_rows(p, begin + fetch_row / halves, end, 1);
            const gemm_part &part = p.part[fetch_row % halves ? 1 : of.part];
            from = part.w + batch * p.w_batch + of.at * part.w_stride;
        }
        bulk_copy(ring + stage * CHUNK, from + fetch_at, (uint32_t)min(CHUNK, row_bytes - fetch_at),
                  barrier + stage * 8);
        left--;
        fetch_at += CHUNK;
        if (fetch_at >= row_bytes)
            fetch_at = 0, fetch_row++, from = NULL;
    };

    if (lane == 0) {
        for (int i = 0; i < STAGES; i++)
            bulk_barrier(barrier + i * 8);
        bulk_ready();
    }
    if (!p.const_weights)
        pdl_wait();
    pdl_launch_next();
    if (lane == 0)
        for (int i = 0; i < STAGES; i++)
            fetch(i);
    {
        const stream_x<T, S> loader(p, p.x + batch * p.x_batch, xs, units);
        if (p.const_weights) {
            if (p.norm)
                loader.prefetch_params();
            pdl_wait();
        }
        loader.load();
    }
    __syncthreads();

    float sum[M] = {};
    int row = first / chunks, at = (first - row * chunks) * CHUNK, stage = 0;
    uint32_t parity = 0;
    float *to = at ? first_sums + warp * M : sums + row * M;
    for (int i = part_begin(warp + 1) - first; i > 0; i--) {
        const int bytes = min(CHUNK, row_bytes - at);
        const char *const w = shared + warp * S::RING_BYTES + stage * CHUNK, *const x = xs + at;
        float part[2][M] = {};
        auto step = [&](int v, int which) {
            packed<T> a;
            float fa[8];
            a.raw = load_shared(w + v * 16);
            a.get(fa);
#pragma unroll
            for (int t = 0; t < M; t++) {
                packed<T> b;
                float fb[8];
                b.raw = load_shared(x + t * x_pitch + v * 16);
                b.get(fb);
#pragma unroll
                for (int e = 0; e < 8; e++)
                    part[which][t] = fmaf(fa[e], fb[e], part[which][t]);
            }
        };
        bulk_wait(barrier + stage * 8, parity);
        if (bytes == CHUNK) {
#pragma unroll
            for (int v = 0; v < CHUNK / 512; v++)
                step(v * 32 + lane, v % 2);
        } else
            for (int v = lane; v < bytes / 16; v += 32)
                step(v, 0);
        __syncwarp();
        if (lane == 0)
            fetch(stage);
        if (++stage == STAGES)
            stage = 0, parity ^= 1;
        at += CHUNK;
#pragma unroll
        for (int t = 0; t < M; t++)
            sum[t] += part[0][t] + part[1][t];
        if (at < row_bytes && i > 1)
            continue;
#pragma unroll
        for (int t = 0; t < M; t++) {
            const float y = warp_sum<32>(sum[t]);
            if (lane == 0)
                to[t] = y;
            sum[t] = 0;
        }
        at = 0, row++, to = sums + row * M;
    }
    __syncthreads();

    for (int i = (int)threadIdx.x; i < (end - begin) * (int)p.m; i += S::THREADS) {
        const int of_block = i / (int)p.m, token = i - of_block * (int)p.m;
        float y[2] = {};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int of_all = of_block * halves + h;
            if (h >= halves)
                break;
            y[h] = sums[of_all * M + token];
            for (int w = 1; w < WARPS; w++)
                if (part_begin(w) > of_all * chunks && part_begin(w) < (of_all + 1) * chunks)
                    if (part_begin(w) < part_begin(w + 1))
                        y[h] += first_sums[w * M + token];
        }
        const gemm_rows of = stream_rows(p, begin + of_block, end, 1);
        gemm_finish<T>(p, of.part, batch, token, of.at, y[0], y[1]);
    }
}

#endif
