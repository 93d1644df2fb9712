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

/* The largest of v over the threads of a block with the same threadIdx.y, which are whole warps and whose `part`
   nothing else uses before the next barrier. All threads of the block call it. */
__device__ __forceinline__ float block_max(float v, float (&part)[32])
{
    v = warp_max<32>(v);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_max<32>(threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : 0);
}

/* What the numbers of a row are multiplied by: the largest becomes the largest that a byte has. It is two factors,
   the first a power of 2, which is exact: of a row of tiny numbers the second alone would be infinite. A division by
   the scale would round twice, and takes many instructions for each number. */
struct bytes_factor {
    float lift, by;
    bool f8;
    __device__ __forceinline__ bytes_factor(float most, bool to_f8)
        : lift(most < 0x1p-60f  ? 0x1p64f
               : most > 0x1p60f ? 0x1p-64f
                                : 1),
          f8(to_f8)
    {
        /* a quotient and its correction: the compiler's division is a function call, around which registers spill */
        const float top = f8 ? 448.0f : 127.0f, least = most * lift;
        float inverse;
        asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(least));
        const float near = top * inverse;
        by = most == 0 ? 0 : fmaf(fmaf(-near, least, top), inverse, near);
    }
};

/* Four floats as bytes. i8: a float from 2^23 on has no bits for fractions, so that the addition rounds to a whole
   number, whose low byte it ends in. */
__device__ __forceinline__ uint32_t bytes_word(float a, float b, float c, float d, const bytes_factor &f)
{
    if (!f.f8) {
        const auto whole = [&](float v) { return __float_as_uint(fmaf(v, f.by, 0x1.8p23f)); };
        return __byte_perm(__byte_perm(whole(a), whole(b), 0x0040), __byte_perm(whole(c), whole(d), 0x0040), 0x5410);
    }
#if __CUDA_ARCH__ >= 890
    uint16_t low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b * f.by), "f"(a * f.by));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d * f.by), "f"(c * f.by));
    return low | (uint32_t)high << 16;
#else
    return f8_bits(a * f.by) | f8_bits(b * f.by) << 8 | f8_bits(c * f.by) << 16 | f8_bits(d * f.by) << 24;
#endif
}

/* W numbers times the factor. */
template <int W>
__device__ __forceinline__ void bytes_store(uint8_t *to, float (&y)[W], const bytes_factor &f)
{
    if (f.lift != 1) {
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] *= f.lift;
    }
    if constexpr (W == 8)
        *reinterpret_cast<uint2 *>(to) =
            make_uint2(bytes_word(y[0], y[1], y[2], y[3], f), bytes_word(y[4], y[5], y[6], y[7], f));
    else if constexpr (W == 4)
        *reinterpret_cast<uint32_t *>(to) = bytes_word(y[0], y[1], y[2], y[3], f);
    else
        *to = (uint8_t)bytes_word(y[0], 0, 0, 0, f);
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
    const bytes_factor factor(most, to.f8);
    if (threadIdx.x == 0)
        to.scale[scale_at] = most / (to.f8 ? 448.0f : 127.0f);
    for (int64_t i = first; i < dim; i += step) {
        float y[W];
        if (HELD) {
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] = row[i + j];
        } else {
            rounded(i, y);
        }
        bytes_store<W>(to.out + out_at + i, y, factor);
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
