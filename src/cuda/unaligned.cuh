/* unaligned.cuh - rows at any address, read in aligned blocks of 16 bytes.

   A row is cut into a body of vectors, which are aligned in the output, and single elements at both ends. The vector
   of another tensor lies in two aligned blocks and is shifted out of them. The body ends so early that these blocks
   hold nothing from beyond the row. */
#ifndef ADZE_CUDA_UNALIGNED_CUH
#define ADZE_CUDA_UNALIGNED_CUH

#include "vec.cuh"

/* How a row is cut. I: int32_t, or int64_t where a row may have 2^31 elements. */
template <typename I>
struct any_cut {
    int head;  /* elements before the body */
    I vectors; /* of the body */
    int ends;  /* single elements: the head, and those after the body */

    /* `aligned`: all tensors are, and the row has no ends. */
    template <typename T>
    __device__ __forceinline__ any_cut(const T *out, I dim, bool aligned)
    {
        constexpr int W = VEC<T>;
        head = aligned ? 0 : (int)(-(uintptr_t)out % 16 / sizeof(T));
        head = head < dim ? head : (int)dim;
        vectors = aligned ? dim / W : (dim - head) / W - ((dim - head) % W != W - 1);
        vectors = vectors > 0 ? vectors : 0;
        ends = (int)(dim - vectors * W);
    }
    template <int W>
    __device__ __forceinline__ I vector(I v) const
    {
        return head + v * W;
    }
    template <int W>
    __device__ __forceinline__ I end(int e) const
    {
        return e < head ? e : e + vectors * W;
    }
};

__device__ __forceinline__ int any_shift(const void *at)
{
    return (int)(uintptr_t)at & 15;
}

/* BYTES neighbouring bytes of a body as they lie in their blocks: fetched now, aligned later, so that a thread has
   many loads on their way. */
template <int BYTES>
struct any_vector {
    static constexpr int BLOCKS = BYTES / 16 + 1;
    uint4 block[BLOCKS];

    __device__ __forceinline__ void fetch(const void *at)
    {
        const int shift = any_shift(at);
        const uint4 *from = reinterpret_cast<const uint4 *>((const char *)at - shift);
#pragma unroll
        for (int b = 0; b < BLOCKS - 1; b++)
            block[b] = from[b];
        if (shift != 0)
            block[BLOCKS - 1] = from[BLOCKS - 1];
    }
    /* The words, of elements of dtype S; `shift` is any_shift(at). */
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

/* A vector of a body, or a single element, as floats. */
template <typename S, int W>
__device__ __forceinline__ void any_load(const S *at, float (&f)[W])
{
    if constexpr (W == 1) {
        f[0] = to_float(*at);
    } else {
        any_vector<W *(int)sizeof(S)> v;
        v.fetch(at);
        v.template get<S>(any_shift(at), f);
    }
}
/* The same from a tensor whose dtype is T or f32; `at` counts elements. */
template <typename T, int W>
__device__ __forceinline__ void any_load_param(const void *p, bool is_f32, int64_t at, float (&f)[W])
{
    if (is_f32)
        any_load((const float *)p + at, f);
    else
        any_load((const T *)p + at, f);
}
/* Stores in pieces as large as the address allows. */
template <typename T, int W>
__device__ __forceinline__ void any_store(T *to, const float (&f)[W])
{
    if constexpr (W == 1) {
        *to = from_float<T>(f[0]);
    } else if ((uintptr_t)to % 16 == 0) {
        store<T, W>(to, f);
    } else {
#pragma unroll
        for (int i = 0; i < W / VEC<T>; i++) {
            float part[VEC<T>];
#pragma unroll
            for (int j = 0; j < VEC<T>; j++)
                part[j] = f[i * VEC<T> + j];
            packed<T> v;
            v.set(part);
            T *at = to + i * VEC<T>;
            const uint32_t w[4] = {v.raw.x, v.raw.y, v.raw.z, v.raw.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if ((uintptr_t)to % 4 == 0) {
                    reinterpret_cast<uint32_t *>(at)[j] = w[j];
                } else {
                    reinterpret_cast<uint16_t *>(at)[2 * j] = (uint16_t)w[j];
                    reinterpret_cast<uint16_t *>(at)[2 * j + 1] = (uint16_t)(w[j] >> 16);
                }
            }
        }
    }
}

#endif
