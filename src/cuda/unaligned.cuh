/* unaligned.cuh - rows at any address, read in aligned blocks of 16 bytes.

   A row is cut into a body of vectors, which are aligned in the output, and single elements at both ends. The vector
   of another tensor lies in two aligned blocks and is shifted out of them. In a row at the end of its tensor the body
   ends so early that these blocks hold nothing from beyond the row. */
#ifndef ADZE_CUDA_UNALIGNED_CUH
#define ADZE_CUDA_UNALIGNED_CUH

#include "kernel.h"
#include "vec.cuh"

/* How a row is cut. I: int32_t, or int64_t where a row may have 2^31 elements. */
template <typename I>
struct any_cut {
    int head;  /* elements before the body */
    I vectors; /* of the body */
    int ends;  /* single elements: the head, and those after the body */

    /* `aligned`: all tensors are, and the row has no ends. `last`: it may be the last of a tensor. */
    template <typename T>
    __device__ __forceinline__ any_cut(const T *out, I dim, bool aligned, bool last = true)
    {
        constexpr int W = VEC<T>;
        head = aligned ? 0 : (int)(-(uintptr_t)out % 16 / sizeof(T));
        head = head < dim ? head : (int)dim;
        const I body = dim - head - (last && !aligned ? W - 1 : 0);
        vectors = body > 0 ? body / W : 0;
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

/* Whether the blocks of a row's last vector may reach beyond the tensor's end. */
template <typename T>
__device__ __forceinline__ bool any_last(const T *row, int64_t dim, const void *end)
{
    return row + dim + (VEC<T> - 1) > (const T *)end;
}
/* Host: where a tensor's memory ends. */
static inline const void *tensor_end(const adze_tensor *t)
{
    int64_t last = 1;
    for (int d = 0; d < t->rank; d++)
        last += t->stride[d] > 0 ? (t->shape[d] - 1) * t->stride[d] : 0;
    return (const char *)t->data + last * (int64_t)adze_dtype_size(t->dtype);
}

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
/* W elements of a tensor whose dtype is T or f32, from element i of a row on: fetched now, unpacked later. */
template <typename T, int W>
struct any_param {
    any_vector<W * 4> v; /* the first two blocks, where it is T */
    int shift;
    bool is_f32;
    __device__ __forceinline__ void fetch(const void *row, bool f32, int64_t i)
    {
        is_f32 = sizeof(T) == 4 || f32;
        const char *at = (const char *)row + i * (is_f32 ? (int64_t)sizeof(float) : (int64_t)sizeof(T));
        shift = any_shift(at);
        if (is_f32) {
            v.fetch(at);
        } else {
            any_vector<W *(int)sizeof(T)> narrow;
            narrow.fetch(at);
            v.block[0] = narrow.block[0], v.block[1] = narrow.block[1];
        }
    }
    __device__ __forceinline__ void get(float (&f)[W]) const
    {
        if (is_f32) {
            v.template get<float>(shift, f);
        } else {
            any_vector<W *(int)sizeof(T)> narrow;
            narrow.block[0] = v.block[0], narrow.block[1] = v.block[1];
            narrow.template get<T>(shift, f);
        }
    }
};
template <typename T>
struct any_param<T, 1> {
    float v;
    __device__ __forceinline__ void fetch(const void *row, bool f32, int64_t i)
    {
        v = f32 ? ((const float *)row)[i] : to_float(((const T *)row)[i]);
    }
    __device__ __forceinline__ void get(float (&f)[1]) const { f[0] = v; }
};
template <typename T, int W>
__device__ __forceinline__ void any_load_param(const void *row, bool f32, int64_t i, float (&f)[W])
{
    any_param<T, W> p;
    p.fetch(row, f32, i);
    p.get(f);
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
