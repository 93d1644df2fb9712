/* gemm_bulk.cuh - products of one or two tokens: weights are streamed once, by bulk copies into rings in shared
   memory, and multiplied on the CUDA cores.

   A block takes rows of the weights in turn with the others, so that all read from one part of memory at a time, and
   its warps take the chunks of its rows in turn. With glu a row of the gate is followed by that of the value. The
   sums of chunks are kept in shared memory, and rows are finished at the end. The rings fill before the dependency
   wait, when the weights are constant. */
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
    static constexpr int FIXED_BYTES = WARPS * RING_BYTES + WARPS * STAGES * 8;
};
template <class S>
__host__ __device__ constexpr int bulk_chunks(int64_t k) /* of a row */
{
    return (int)((k * 2 + S::CHUNK - 1) / S::CHUNK);
}
/* x, the sums of its units, and for each token those of the chunks of `rows` rows. */
template <class S>
constexpr size_t bulk_shared(int64_t k, int64_t rows)
{
    return (size_t)(S::FIXED_BYTES +
                    S::TOKENS * (stream_pitch<S>(k) + (k + 255) / 256 * 8 + rows * bulk_chunks<S>(k) * 4));
}

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, 2) gemm_bulk(const gemm_params p)
{
    constexpr int M = S::TOKENS, WARPS = S::WARPS, CHUNK = S::CHUNK, STAGES = S::STAGES;
    extern __shared__ __align__(128) char shared[];
    char *const barriers = shared + WARPS * S::RING_BYTES, *const xs = barriers + WARPS * STAGES * 8;
    const int x_pitch = stream_pitch<S>(p.k);
    float *const units = (float *)(xs + M * x_pitch), *const sums = units + M * (((int)p.k + 255) / 256) * 2;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, halves = p.glu ? 2 : 1;
    const int64_t batch = blockIdx.y;
    const int blocks = (int)gridDim.x, rows = ((int)p.n - (int)blockIdx.x + blocks - 1) / blocks;
    const int row_bytes = (int)p.k * 2, chunks = bulk_chunks<S>(p.k), all = rows * halves * chunks;
    const uint32_t ring = shared_address(shared + warp * S::RING_BYTES);
    const uint32_t barrier = shared_address(barriers + warp * STAGES * 8);
    /* Which of the weights' rows row i of the block's is. */
    auto row_of = [&](int i) { return stream_rows(p, (int)blockIdx.x + i * blocks, (int)p.n, 1); };

    /* Lane 0 fetches. */
    int fetched = warp;
    auto fetch = [&](int stage) {
        if (fetched >= all)
            return;
        const int row = fetched / chunks, at = (fetched - row * chunks) * CHUNK;
        const gemm_rows of = row_of(row / halves);
        const gemm_part &part = p.part[row % halves ? 1 : of.part];
        bulk_copy(ring + stage * CHUNK, part.w + batch * p.w_batch + of.at * part.w_stride + at,
                  (uint32_t)min(CHUNK, row_bytes - at), barrier + stage * 8);
        fetched += WARPS;
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

    int stage = 0;
    uint32_t parity = 0;
    for (int i = warp; i < all; i += WARPS) {
        const int at = i % chunks * CHUNK, bytes = min(CHUNK, row_bytes - at);
        const char *const w = shared + warp * S::RING_BYTES + stage * CHUNK, *const x = xs + at;
        float sum[2][M] = {};
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
                    sum[which][t] = fmaf(fa[e], fb[e], sum[which][t]);
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
#pragma unroll
        for (int t = 0; t < M; t++) {
            const float y = warp_sum<32>(sum[0][t] + sum[1][t]);
            if (lane == 0)
                sums[i * M + t] = y;
        }
    }
    __syncthreads();

    for (int i = (int)threadIdx.x; i < rows * (int)p.m; i += S::THREADS) {
        const int row = i / (int)p.m, token = i - row * (int)p.m;
        float y[2] = {};
#pragma unroll
        for (int h = 0; h < 2; h++)
            for (int c = 0; c < chunks && h < halves; c++)
                y[h] += sums[((row * halves + h) * chunks + c) * M + token];
        const gemm_rows of = row_of(row);
        gemm_finish<T>(p, of.part, batch, token, of.at, y[0], y[1]);
    }
}

#endif
