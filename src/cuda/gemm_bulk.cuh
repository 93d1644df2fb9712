/* gemm_bulk.cuh - products of one or two tokens: weights are streamed once, by bulk copies into rings in shared
   memory, and multiplied on the tensor cores.

   A block has a multiprocessor to itself and rows of the weights, whose chunks its warps take in turn. With glu a row
   of the gate is followed by that of the value. The sums of chunks are kept in shared memory, and rows are finished
   at the end. When the weights are constant, half of the rings fills before the dependency wait. The code around the
   loop is small: code that runs once misses the instruction caches, and each kernel of a model evicts that of the
   others. */
#ifndef ADZE_CUDA_GEMM_BULK_CUH
#define ADZE_CUDA_GEMM_BULK_CUH

#include "bulk.cuh"
#include "gemm_stream.cuh"

template <int TOKENS_, int WARPS_, int CHUNK_, int STAGES_>
struct bulk_shape {
    static constexpr int TOKENS = TOKENS_, WARPS = WARPS_, THREADS = 32 * WARPS, CHUNK = CHUNK_, STAGES = STAGES_;
    static constexpr weight_format FORMAT = OF_X; /* these are stream_x's: elements in their own order */
    static constexpr int GROUP = 32, UNITS = 2;
    /* Lanes that read vectors 1 or 2 apart have banks of their own. */
    static __device__ __forceinline__ int place(int vector) { return vector ^ (vector >> 3 & 3); }
    static __device__ __forceinline__ int x_at(int token, int vector, int pitch)
    {
        return token * pitch + place(vector) * 16;
    }
    static constexpr int HELD = 2; /* vectors of x that a thread norms */
    static constexpr int RING_BYTES = STAGES * CHUNK;
    static constexpr int FIXED_BYTES = WARPS * RING_BYTES + WARPS * STAGES * 8;
};
template <class S>
__host__ __device__ constexpr int bulk_chunks(int64_t k) /* of a row */
{
    return (int)((k * 2 + S::CHUNK - 1) / S::CHUNK);
}
/* x, the sums of its units or of the warps, and for each token those of the chunks of `rows` rows. */
template <class S>
__host__ __device__ constexpr int bulk_room(int64_t k)
{
    const int units = (int)(k + 255) / 256 * 2;
    return units > S::WARPS ? units : S::WARPS;
}
template <class S>
constexpr size_t bulk_shared(int64_t k, int64_t rows)
{
    return (size_t)(S::FIXED_BYTES +
                    S::TOKENS * (stream_pitch<S>(k) + (bulk_room<S>(k) + rows * bulk_chunks<S>(k)) * 4));
}

/* x as it is; normed by its root mean square, with a weight of its dtype; or by stream_x, which can do all. */
enum bulk_norm { BULK_PLAIN, BULK_RMS, BULK_ANY };

/* Copies the tokens into shared memory. */
template <typename T, class S>
__device__ __forceinline__ void bulk_copy_x(const gemm_params &p, const char *x, char *xs, int x_pitch)
{
    const int vectors = (int)p.k / 8;
#pragma unroll
    for (int t = 0; t < S::TOKENS; t++) {
        const T *const from = (const T *)x + t * p.rows.stride[GEMM_X][0];
#pragma unroll 4
        for (int v = (int)threadIdx.x; v < vectors && t < (int)p.m; v += S::THREADS)
            store_packed((T *)(xs + S::x_at(t, v, x_pitch)), load_packed(from + v * 8));
    }
}
/* The same with a norm, up to HELD vectors a thread. weight: those of its vectors, or ones. room: WARPS floats of
   each token. meanwhile() runs while the first token is loaded. */
template <typename T, class S, typename F>
__device__ __forceinline__ void bulk_norm_x(const gemm_params &p, const char *x, const packed<T> (&weight)[S::HELD],
                                            char *xs, int x_pitch, float *room, F meanwhile)
{
    const int vectors = (int)p.k / 8, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < S::TOKENS; t++) {
        const T *const from = (const T *)x + t * p.rows.stride[GEMM_X][0];
        packed<T> v[S::HELD];
        float f[8], sum = 0;
        if (t >= (int)p.m)
            break;
#pragma unroll
        for (int h = 0; h < S::HELD; h++) {
            const int at = (int)threadIdx.x + h * S::THREADS;
            v[h].raw = make_uint4(0, 0, 0, 0);
            if (at < vectors)
                v[h] = load_packed(from + at * 8);
        }
        if (t == 0)
            meanwhile();
#pragma unroll
        for (int h = 0; h < S::HELD; h++) {
            v[h].get(f);
#pragma unroll
            for (int e = 0; e < 8; e++)
                sum = fmaf(f[e], f[e], sum);
        }
        sum = warp_sum<32>(sum);
        if (lane == 0)
            room[t * S::WARPS + warp] = sum;
        __syncthreads();
        sum = warp_sum<32>(lane < S::WARPS ? room[t * S::WARPS + lane] : 0);
        const float scale = rsqrtf(sum / (float)p.k + p.eps);
#pragma unroll
        for (int h = 0; h < S::HELD; h++) {
            const int at = (int)threadIdx.x + h * S::THREADS;
            float w[8];
            v[h].get(f);
            weight[h].get(w);
#pragma unroll
            for (int e = 0; e < 8; e++) {
                f[e] *= scale;
                if (p.rounding & ADZE_ROUND_NORM)
                    f[e] = round_to<T>(f[e]);
                f[e] *= p.norm_weight ? w[e] + p.weight_offset : 1;
            }
            v[h].set(f);
            if (at < vectors)
                store_packed((T *)(xs + S::x_at(t, at, x_pitch)), v[h]);
        }
    }
}

/* The products of a row's weights with one or two tokens, on the tensor cores. Of an operand of weights, 16 x 8, lane
   4 g + t has four elements of column g: so the 16 bytes that it has of a row make two such operands, whose columns
   are eight parts of the row. The tokens' operand has the same parts as its rows, those of a second token below. What
   is wanted is on the diagonal. It takes a tenth of the instructions that CUDA cores would need. */
template <typename T, class S>
struct bulk_row {
    float c[2][4] = {};
    /* Vector `at` of x, and 16 bytes of weights. `there`: else both are zeros. */
    __device__ __forceinline__ void add(int i, const char *w, const char *x, int x_pitch, int at, bool there)
    {
        uint4 b = make_uint4(0, 0, 0, 0), a = b, second = b;
        if (there) {
            b = load_shared(w);
            a = load_shared(x + S::place(at) * 16);
            if (S::TOKENS > 1)
                second = load_shared(x + x_pitch + S::place(at) * 16);
        }
        mma<T>(c[i % 2], a.x, second.x, a.y, second.y, b.x, b.y);
        mma<T>(c[i % 2], a.z, second.z, a.w, second.w, b.z, b.w);
    }
    /* `bytes` of a row from vector `at` of x on. */
    __device__ __forceinline__ void add_chunk(const char *w, int bytes, const char *x, int x_pitch, int at)
    {
        const int lane = (int)threadIdx.x % 32;
        constexpr int VECTORS = S::CHUNK / 512;
        if (bytes == S::CHUNK) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                add(v, w + (v * 32 + lane) * 16, x, x_pitch, at + v * 32 + lane, true);
        } else {
#pragma unroll 1
            for (int v = lane; v < (bytes / 16 + 31) / 32 * 32; v += 32)
                add(0, w + v * 16, x, x_pitch, at + v, v * 16 < bytes);
        }
    }
    __device__ __forceinline__ float sum(int token) const
    {
        const int lane = (int)threadIdx.x % 32, g = lane / 4;
        const float even = c[0][token * 2] + c[1][token * 2], odd = c[0][token * 2 + 1] + c[1][token * 2 + 1];
        return warp_sum<32>(g / 2 == lane % 4 ? (g % 2 ? odd : even) : 0);
    }
};

template <typename T, class S, bulk_norm NORM>
__global__ void __launch_bounds__(S::THREADS, 1) gemm_bulk(const gemm_params p)
{
    constexpr int M = S::TOKENS, WARPS = S::WARPS, CHUNK = S::CHUNK, STAGES = S::STAGES;
    extern __shared__ __align__(128) char shared[];
    char *const barriers = shared + WARPS * S::RING_BYTES, *const xs = barriers + WARPS * STAGES * 8;
    const int x_pitch = stream_pitch<S>(p.k);
    float *const units = (float *)(xs + M * x_pitch), *const sums = units + M * bulk_room<S>(p.k);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, halves = p.glu ? 2 : 1;
    const int64_t batch = blockIdx.y;
    const int begin = (int)(p.n * blockIdx.x / gridDim.x), rows = (int)(p.n * (blockIdx.x + 1) / gridDim.x) - begin;
    const int row_bytes = (int)p.k * 2, chunks = bulk_chunks<S>(p.k);
    const uint32_t ring = shared_address(shared + warp * S::RING_BYTES);
    const uint32_t barrier = shared_address(barriers + warp * STAGES * 8);
    /* Which row of which weight row i of the block's is. */
    auto row_of = [&](int i) {
        gemm_rows of = stream_rows(p, begin + i / halves, begin + rows, 1);
        of.part = i % halves ? 1 : of.part;
        return of;
    };

    /* Lane 0 fetches. */
    struct source {
        const char *from;
        uint32_t bytes;
    };
    auto source_of = [&](int row, int at) {
        const gemm_rows of = row_of(row);
        const gemm_part &part = p.part[of.part];
        return source{part.w + batch * p.w_batch + of.at * part.w_stride + at, (uint32_t)min(CHUNK, row_bytes - at)};
    };
    /* A warp's chunk: row and number in it. The next one is WARPS further. */
    struct position {
        int row, chunk;
    };
    const int step_rows = WARPS / chunks, step_chunks = WARPS - step_rows * chunks;
    auto go_on = [&](position &at) {
        at.row += step_rows, at.chunk += step_chunks;
        if (at.chunk >= chunks)
            at.row++, at.chunk -= chunks;
    };
    position fetched = {warp / chunks, warp % chunks}, done = fetched;
    auto fetch = [&](int stage) {
        if (fetched.row >= rows * halves)
            return;
        const source s = source_of(fetched.row, fetched.chunk * CHUNK);
        bulk_copy(ring + stage * CHUNK, s.from, s.bytes, barrier + stage * 8);
        go_on(fetched);
    };

    if (lane == 0) {
        for (int i = 0; i < STAGES; i++)
            bulk_barrier(barrier + i * 8);
        bulk_ready();
    }
    if (!p.const_weights)
        pdl_wait();
    pdl_launch_next();
    /* Half of the ring before the wait. The loads of x, for which all warps wait, would queue behind the other half.
     */
    auto fill = [&](int first, int end) {
        if (lane == 0)
#pragma unroll 1
            for (int i = first; i < end; i++)
                fetch(i);
    };
    auto fill_up = [&]() { fill(STAGES / 2, STAGES); };
    fill(0, STAGES / 2);
    const char *const x = p.x + batch * p.x_batch;
    if constexpr (NORM == BULK_PLAIN) {
        if (p.const_weights)
            pdl_wait();
        bulk_copy_x<T, S>(p, x, xs, x_pitch);
        fill_up();
    } else if constexpr (NORM == BULK_RMS) {
        packed<T> weight[S::HELD];
#pragma unroll
        for (int h = 0; h < S::HELD; h++) {
            const int at = ((int)threadIdx.x + h * S::THREADS) * 8;
            weight[h].raw = make_uint4(0, 0, 0, 0);
            if (p.norm_weight && at < (int)p.k)
                weight[h] = load_packed((const T *)p.norm_weight + at);
        }
        if (p.const_weights)
            pdl_wait();
        bulk_norm_x<T, S>(p, x, weight, xs, x_pitch, units, fill_up);
    } else {
        const stream_x<T, S> loader(p, x, xs, x_pitch, units);
        if (p.const_weights) {
            loader.prefetch_params();
            pdl_wait();
        }
        loader.load();
        fill_up();
    }
    __syncthreads();

    int stage = 0;
    uint32_t parity = 0;
    for (; done.row < rows * halves; go_on(done)) {
        const int row = done.row, at = done.chunk * CHUNK, bytes = min(CHUNK, row_bytes - at);
        const char *const w = shared + warp * S::RING_BYTES + stage * CHUNK;
        bulk_row<T, S> y;
        bulk_wait(barrier + stage * 8, parity);
        y.add_chunk(w, bytes, xs, x_pitch, at / 16);
        __syncwarp();
        if (lane == 0)
            fetch(stage);
        if (++stage == STAGES)
            stage = 0, parity ^= 1;
#pragma unroll
        for (int t = 0; t < M; t++) {
            const float sum = y.sum(t);
            if (lane == 0)
                sums[(row * chunks + done.chunk) * M + t] = sum;
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
        const gemm_rows of = row_of(row * halves);
        gemm_finish<T>(p, of.part, batch, token, of.at, y[0], y[1]);
    }
}

#endif
