/* unaligned.cuh - rows at any address, read in aligned blocks of 16 bytes.

   A row is cut into vectors of W elements so that those of the output are aligned: vector v begins at element
   v * W - head, and the first and the last vector may reach beyond the row. The vector of another tensor lies in two
   blocks and is shifted out of them. Each block that is read holds an element of the row. The block in which the
   tensor itself ends is copied into shared memory element by element, so nothing beyond the tensor's end is read. */
#ifndef ADZE_CUDA_UNALIGNED_CUH
#define ADZE_CUDA_UNALIGNED_CUH

#include "kernel.h"
#include "vec.cuh"

/* A row of a tensor. I: int32_t, or int64_t where a row may have 2^31 bytes. */
template <typename I>
struct any_row {
    const char *data;
    I bytes;
    I end;             /* bytes from data to the end of the tensor */
    const uint4 *tail; /* a copy of the block in which the tensor ends */
};

/* Elements by which the grid of vectors begins before a row of the output. */
template <typename T>
__device__ __forceinline__ int any_head(const T *out)
{
    return (int)((uintptr_t)out % 16 / sizeof(T));
}

/* BYTES neighbouring bytes as they lie in their blocks: fetched now, aligned later, so that a thread has many loads
   on their way. */
__device__ __forceinline__ int any_shift(const void *at)
{
    return (int)(uintptr_t)at & 15;
}
template <int BYTES>
struct any_vector {
    static constexpr int BLOCKS = BYTES / 16 + 1;
    uint4 block[BLOCKS];

    /* Of a vector that is followed in its row by another. */
    __device__ __forceinline__ void fetch_inner(const void *at)
    {
        const uint4 *from = reinterpret_cast<const uint4 *>((const char *)at - any_shift(at));
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
            if (b < BLOCKS - 1 || any_shift(at) != 0)
                block[b] = from[b];
    }
    /* Of any vector, whose first byte is `at` of the row. Bytes outside the row are undefined. */
    template <typename I>
    __device__ __forceinline__ void fetch(const any_row<I> &row, I at)
    {
        const int shift = any_shift(row.data + (int64_t)at);
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            const I from = at - shift + 16 * b;
            block[b] = make_uint4(0, 0, 0, 0);
            if (from > -16 && from < row.bytes && (b < BLOCKS - 1 || shift != 0))
                block[b] =
                    *(from + 16 > row.end ? row.tail : reinterpret_cast<const uint4 *>(row.data + (int64_t)from));
        }
    }
    /* The vector's words, of elements of dtype S; `shift` is its first byte's in its block. */
    template <typename S>
    __device__ __forceinline__ void align(int shift, uint32_t (&to)[BYTES / 4]) const
    {
        uint32_t w[4 * BLOCKS];
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
            w[4 * b] = block[b].x, w[4 * b + 1] = block[b].y, w[4 * b + 2] = block[b].z, w[4 * b + 3] = block[b].w;
#pragma unroll
        for (int i = 0; i < BYTES / 4 + 2; i++)
            w[i] = shift & 8 ? w[i + 2] : w[i];
#pragma unroll
        for (int i = 0; i < BYTES / 4 + 1; i++)
            w[i] = shift & 4 ? w[i + 1] : w[i];
#pragma unroll
        for (int i = 0; i < BYTES / 4; i++)
            to[i] = sizeof(S) == 2 ? __funnelshift_r(w[i], w[i + 1], (shift & 2) * 8) : w[i];
    }
    /* Its elements as floats. */
    template <typename S, int W>
    __device__ __forceinline__ void get(int shift, float (&f)[W]) const
    {
        static_assert(W * sizeof(S) == BYTES, "a vector of W elements of S");
        uint32_t words[BYTES / 4];
        align<S>(shift, words);
#pragma unroll
        for (int i = 0; i < BYTES / 16; i++) {
            const packed<S> part = {make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3])};
            float some[VEC<S>];
            part.get(some);
#pragma unroll
            for (int j = 0; j < VEC<S>; j++)
                f[i * VEC<S> + j] = some[j];
        }
    }
};

/* Whether a vector of W elements is inside its row and followed by another, so that each block it touches is too. */
template <int W, typename I>
__device__ __forceinline__ bool any_inner(I start, I dim)
{
    return start >= 0 && start + 2 * W <= dim;
}
/* W elements from `start` of a row of dim elements on, one by one; `fill` where the row has none. */
template <typename S, int W, typename I>
__device__ __forceinline__ void any_load_edge(const S *row, I start, I dim, float fill, float (&f)[W])
{
#pragma unroll
    for (int j = 0; j < W; j++)
        f[j] = start + j >= 0 && start + j < dim ? to_float(row[(int64_t)start + j]) : fill;
}

/* W elements from `start` on; INNER: they are inside the row and followed by others. */
template <typename S, bool INNER, int W>
__device__ __forceinline__ void any_load_in(const S *row, int64_t start, int64_t dim, float (&f)[W])
{
    if constexpr (INNER) {
        any_vector<W *(int)sizeof(S)> v;
        v.fetch_inner(row + start);
        v.template get<S>(any_shift(row + start), f);
    } else {
        any_load_edge(row, start, dim, 0, f);
    }
}

/* W elements of dtype S from element `start` of a row on, as floats. */
template <typename S, int W, typename I>
__device__ __forceinline__ void any_load(const any_row<I> &row, I start, float (&f)[W])
{
    any_vector<W *(int)sizeof(S)> v;
    const I at = start * (I)sizeof(S);
    v.fetch(row, at);
    v.template get<S>(any_shift(row.data + (int64_t)at), f);
}

/* Stores those of W elements from `start` on that a row of `dim` elements has: whole vectors where they are aligned.
 */
template <typename T, int W, typename I>
__device__ __forceinline__ void any_store(T *row, I start, I dim, const float (&f)[W])
{
    T *to = row + (int64_t)start;
    if (start >= 0 && start + W <= dim && (uintptr_t)to % 16 == 0) {
        store<T, W>(to, f);
        return;
    }
#pragma unroll
    for (int j = 0; j < W; j++)
        if (start + j >= 0 && start + j < dim)
            to[j] = from_float<T>(f[j]);
}

/* The block in which a tensor ends at `end`, an address of elements of 2 or 4 bytes that is no multiple of 16. */
__device__ __forceinline__ uint4 any_tail(const char *end)
{
    const char *from = (const char *)((uintptr_t)end & ~(uintptr_t)15);
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const char *at = from + 4 * i;
        w[i] = at + 4 <= end   ? *reinterpret_cast<const uint32_t *>(at)
               : at + 2 <= end ? *reinterpret_cast<const uint16_t *>(at)
                               : 0;
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* Host: where a tensor's memory ends. */
static inline const char *tensor_end(const adze_tensor *t)
{
    int64_t last = 1;
    for (int d = 0; d < t->rank; d++)
        last += t->stride[d] > 0 ? (t->shape[d] - 1) * t->stride[d] : 0;
    return (const char *)t->data + last * (int64_t)adze_dtype_size(t->dtype);
}

#endif
