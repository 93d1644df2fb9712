/* softmax_held.cuh - softmax of long rows at any address, with or without a mask, in clusters of blocks.

   A row waits for its sum in shared memory, scaled, masked and as floats: an SM then has several rows, and loads one
   while it stores another. Rows are read in 16-byte vectors of the output (shifted.cuh), and the mask is read once. A
   thread works on what it has stored there itself. */
#ifndef ADZE_CUDA_SOFTMAX_HELD_CUH
#define ADZE_CUDA_SOFTMAX_HELD_CUH

#include "shifted.cuh"
#include "softmax_rows.cuh"

/* Threads of a block; bytes of a block's part of a row that let four blocks share an SM, and two. */
constexpr int HELD_THREADS = 256, HELD_FEW = 54 << 10, HELD_MOST = 108 << 10;

/* Minimum blocks per SM: this bounds the registers. */
template <bool MASKED>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int held_blocks = MASKED ? 3 : 4;
#else
constexpr int held_blocks = 1;
#endif

/* A vector of x: `alike` says that x has the vectors of the output, so that one load suffices. */
template <typename T>
__device__ __forceinline__ shifted<1> softmax_vector(const T *row, bool alike, int at, int dim)
{
    shifted<1> v;
    if (alike) {
        v.part[0] = *reinterpret_cast<const uint4 *>(row + at);
        v.part[1] = make_uint4(0, 0, 0, 0), v.shift = 0;
    } else {
        v.fetch(row, at, dim);
    }
    return v;
}

template <typename T, bool MASKED>
__global__ void __launch_bounds__(HELD_THREADS, held_blocks<MASKED>)
    softmax_held(const __grid_constant__ softmax_row_params p)
{
    constexpr int W = VEC<T>, QUADS = W / 4, READ = MASKED ? 2 : 4; /* vectors that a thread loads together */
    typedef shifted_param<T, sizeof(T) < 4> mask_vector;
    extern __shared__ float4 held[]; /* [QUADS][p.part] */
    __shared__ softmax_share shares[CLUSTER * HELD_THREADS / 32];
    const int thread = (int)threadIdx.x;
    cluster_arrive(); /* the wait comes before the first store: all blocks have started then */
    int64_t start[SOFTMAX_TENSORS];
    p.rows.locate(blockIdx.x / (uint32_t)cluster_size(), start);
    const T *const x = (const T *)p.x + start[X];
    T *const out = (T *)p.out + start[OUT];
    /* the first element of the block's first vector, which may lie before the row, and the end of its last */
    const int begin = cluster_rank() * p.part * W - shifted_head(out), end = min(p.dim, begin + p.part * W);
    const auto get = [&](int i, float(&f)[W]) {
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            const float4 v = held[q * p.part + i];
            f[4 * q] = v.x, f[4 * q + 1] = v.y, f[4 * q + 2] = v.z, f[4 * q + 3] = v.w;
        }
    };
    const auto set = [&](int i, const float(&f)[W]) {
#pragma unroll
        for (int q = 0; q < QUADS; q++)
            held[q * p.part + i] = make_float4(f[4 * q], f[4 * q + 1], f[4 * q + 2], f[4 * q + 3]);
    };
    pdl_launch_next();
    pdl_wait();

    float most = -INFINITY;
#pragma unroll 1
    for (int i = thread; begin + i * W < end; i += READ * HELD_THREADS) {
        const auto at = [&](int u) { return begin + (i + u * HELD_THREADS) * W; };
        shifted<1> v[READ];
        mask_vector hide[READ];
#pragma unroll
        for (int u = 0; u < READ; u++)
            if (at(u) < end) {
                v[u] = softmax_vector(x, p.alike, at(u), p.dim);
                if (MASKED)
                    hide[u].fetch(p.mask, p.mask_f32, start[MASK], at(u), p.dim);
            }
#pragma unroll
        for (int u = 0; u < READ; u++)
            if (at(u) < end) {
                float f[W], more[W];
                v[u].template get<T>(f);
                if (MASKED)
                    hide[u].get(p.mask_f32, more);
#pragma unroll
                for (int j = 0; j < W; j++) {
                    f[j] = MASKED ? f[j] * p.scale + more[j] : f[j] * p.scale;
                    f[j] = (uint32_t)(at(u) + j) < (uint32_t)p.dim ? f[j] : -INFINITY;
                    most = fmaxf(most, f[j]);
                }
                set(i + u * HELD_THREADS, f);
            }
    }
    __syncwarp(); /* lanes leave the loop one by one */
    most = warp_max<32>(most);
    const float from = softmax_from(most);
    float sum[2] = {0, 0};
#pragma unroll 2
    for (int i = thread; begin + i * W < end; i += HELD_THREADS) {
        float f[W];
        get(i, f);
#pragma unroll
        for (int j = 0; j < W; j++) {
            f[j] = softmax_result<T>((f[j] - from) * (float)LOG2_E);
            sum[j % 2] += f[j];
        }
        set(i, f);
    }
    __syncwarp();
    const softmax_share mine = {most, warp_sum<32>(sum[0] + sum[1])};
    cluster_wait();
    const softmax_share all = softmax_join<true>(mine, shares);
    const float factor = power(most - all.max) * reciprocal(all.sum);
#pragma unroll 2
    for (int i = thread; begin + i * W < end; i += HELD_THREADS) {
        float f[W];
        packed<T> to;
        get(i, f);
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] *= factor;
        to.set(f);
        store_shifted(out, begin + i * W, p.dim, to);
    }
}

/* ---- The host ---- */

/* Whether clusters can hold such a row, and whether x has the vectors of the output in every row. */
template <typename T>
static bool softmax_held_fits(const cuda_call &s, const softmax_params &g)
{
    return adze_cuda_clusters(s.device) && g.rows.count <= 0x7fffffff / CLUSTER && s.gpu.block_shared > HELD_MOST &&
           shifted_most<T>(g.dim) * VEC<T> * (int64_t)sizeof(float) <= (int64_t)HELD_MOST * CLUSTER;
}
static bool softmax_alike(const softmax_params &g, int64_t size)
{
    bool alike = ((uintptr_t)g.x - (uintptr_t)g.out) % 16 == 0;
    for (int d = 0; d < g.rows.rank; d++)
        alike = alike && (g.rows.stride[X][d] - g.rows.stride[OUT][d]) * size % 16 == 0;
    return alike;
}
/* In the fewest blocks, a power of two, whose parts let four share an SM. */
template <typename T, bool MASKED>
static adze_status softmax_launch_held(const cuda_call &s, const softmax_params &g, softmax_row_params p)
{
    const int64_t vectors = shifted_most<T>(g.dim), bytes = VEC<T> * sizeof(float);
    unsigned blocks = 2;
    while (blocks < CLUSTER && ceil_div(vectors, blocks) * bytes > HELD_FEW)
        blocks *= 2;
    p.part = (int32_t)ceil_div(vectors, blocks);
    p.alike = softmax_alike(g, sizeof(T));
    p.mask_f32 = sizeof(T) < 4 && g.mask_f32;
    return launch(s, softmax_held<T, MASKED>, p.rows.count * blocks, dim3(HELD_THREADS),
                  {(size_t)(p.part * bytes), blocks}, p);
}

#endif
