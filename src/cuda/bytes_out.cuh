/* bytes_out.cuh - rows that are quantised as they are stored, on CUDA. A block has a row. Its threads make the units
   of W elements that they have, blockDim.x apart, round them to x's dtype, and keep them in shared memory until the
   largest magnitude is known; a row that is too long for it is made a second time. */
#ifndef ADZE_CUDA_BYTES_OUT_CUH
#define ADZE_CUDA_BYTES_OUT_CUH

#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "stored.cuh"
#include "vec.cuh"

constexpr int BYTES_THREADS = 512; /* of a block, at most */

struct bytes_to { /* where rows go */
    uint8_t *out;
    float *scale;
    int out_at, scale_at; /* among the tensors of the rows */
    bool f8;              /* else i8 */
};

/* The largest of v over a block, whose `part` nothing else uses before its next barrier. */
__device__ __forceinline__ float block_max(float v, float (&part)[32])
{
    v = warp_max<32>(v);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_max<32>(threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : 0);
}

/* W numbers of y over the scale. */
template <int W>
__device__ __forceinline__ void bytes_store(uint8_t *to, const float (&y)[W], float scale, bool f8)
{
    uint32_t word[(W + 3) / 4] = {};
#pragma unroll
    for (int j = 0; j < W; j++) {
        const float q = over_scale(y[j], scale);
        const uint32_t bits = f8 ? f8_bits(q) : (uint32_t)whole_between(q, 0, -127, 127) & 0xff;
        word[j / 4] |= bits << j % 4 * 8;
    }
    if constexpr (W == 8)
        *reinterpret_cast<uint2 *>(to) = make_uint2(word[0], word[1]);
    else if constexpr (W == 4)
        *reinterpret_cast<uint32_t *>(to) = word[0];
    else
        *to = (uint8_t)word[0];
}

/* make(i, y) computes the elements from i on; all threads of the block call this. HELD: `row` has room for them. */
template <typename T, int W, bool HELD, typename MAKE>
__device__ __forceinline__ void bytes_row(const bytes_to &to, int64_t out_at, int64_t scale_at, int64_t dim,
                                          float *row, float (&part)[32], MAKE make)
{
    const int64_t step = (int64_t)blockDim.x * W, first = (int64_t)threadIdx.x * W;
    float most = 0;
    auto rounded = [&](int64_t i, float(&y)[W]) {
        make(i, y);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] = round_to<T>(y[j]);
    };
    for (int64_t i = first; i < dim; i += step) {
        float y[W];
        rounded(i, y);
#pragma unroll
        for (int j = 0; j < W; j++) {
            most = fmaxf(most, fabsf(y[j]));
            if (HELD)
                row[i + j] = y[j];
        }
    }
    most = block_max(most, part);
    const float scale = most / (to.f8 ? 448.0f : 127.0f);
    if (threadIdx.x == 0)
        to.scale[scale_at] = scale;
    for (int64_t i = first; i < dim; i += step) {
        float y[W];
        if (HELD) {
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] = row[i + j];
        } else {
            rounded(i, y);
        }
        bytes_store<W>(to.out + out_at + i, y, scale, to.f8);
    }
}

/* Host: threads for a row of `units` units. */
static inline unsigned bytes_threads(int64_t units)
{
    const int64_t threads = ceil_div(units, 32) * 32;
    return (unsigned)(threads < 32 ? 32 : threads < BYTES_THREADS ? threads : BYTES_THREADS);
}
/* Host: whether rows of W bytes each are aligned to them. */
static inline bool bytes_aligned(const adze_tensor *out, int width)
{
    bool ok = (uintptr_t)out->data % (unsigned)width == 0;
    for (int d = 0; d < out->rank - 1; d++)
        ok = ok && out->stride[d] % width == 0;
    return ok;
}

#endif
