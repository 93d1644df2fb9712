/* shifted.cuh - 16-byte vectors of rows at any address.

   The vectors of a row are those of its output: they begin at 16-byte borders, so that a store is one instruction.
   The inputs may be aligned in another way. A vector of theirs lies in two aligned vectors, which are loaded and
   shifted into one: two loads of 16 bytes take the place of eight of 2 bytes. Only aligned vectors that hold an
   element of the row are loaded, so that no load leaves the memory of the tensor by more than its last 16 bytes. */
#ifndef ADZE_CUDA_SHIFTED_CUH
#define ADZE_CUDA_SHIFTED_CUH

#include "unit.cuh"

/* The elements before the first one of a row in its first vector, and how many vectors a row has at most. */
template <typename T>
__device__ __forceinline__ int shifted_head(const T *row)
{
    return (int)((uintptr_t)row & 15) / (int)sizeof(T);
}
template <typename T>
static inline int64_t shifted_most(int64_t dim)
{
    return (dim + 2 * VEC<T> - 2) / VEC<T>;
}

/* N vectors from element `at` of a row on, which may begin before the row and end behind it. They are loaded now and
   shifted later, so that a thread has many loads in flight. A row has less than 2^31 bytes. */
template <int N>
struct shifted {
    uint4 part[N + 1];
    uint32_t shift;
    template <typename T>
    __device__ __forceinline__ void fetch(const T *row, int at, int dim)
    {
        const int bytes = dim * (int)sizeof(T), from = at * (int)sizeof(T);
        shift = (uint32_t)((uintptr_t)row + (uintptr_t)(intptr_t)from) & 15;
        const int first = from - (int)shift;
#pragma unroll
        for (int i = 0; i <= N; i++) {
            const int begin = first + 16 * i;
            part[i] = make_uint4(0, 0, 0, 0);
            if (begin > -16 && begin < bytes && (i < N || shift > 0))
                part[i] = *reinterpret_cast<const uint4 *>((const char *)row + begin);
        }
    }
    /* The same where all of them lie in the row. */
    template <typename T>
    __device__ __forceinline__ void fetch_inside(const T *row, int at)
    {
        const char *const from = (const char *)(row + at);
        shift = (uint32_t)(uintptr_t)from & 15;
#pragma unroll
        for (int i = 0; i <= N; i++)
            part[i] = *reinterpret_cast<const uint4 *>(from - shift + (i < N || shift > 0 ? 16 * i : 0));
    }
    template <typename T>
    __device__ __forceinline__ packed<T> vector(int i) const
    {
        return {shift_together<(int)sizeof(T)>(part[i], part[i + 1], shift)};
    }
    template <typename T>
    __device__ __forceinline__ void get(float (&f)[N * VEC<T>]) const
    {
#pragma unroll
        for (int i = 0; i < N; i++) {
            float each[VEC<T>];
            vector<T>(i).get(each);
#pragma unroll
            for (int j = 0; j < VEC<T>; j++)
                f[i * VEC<T> + j] = each[j];
        }
    }
};

/* A vector of T's elements of a tensor whose dtype is T or f32. WIDE: it may be f32 where T is not. */
template <typename T, bool WIDE>
struct shifted_param {
    static constexpr int N = WIDE ? VEC<T> / VEC<float> : 1;
    shifted<N> held;
    __device__ __forceinline__ void fetch(const void *data, bool is_f32, int64_t start, int at, int dim)
    {
        if (WIDE && is_f32) {
            held.fetch((const float *)data + start, at, dim);
        } else {
            shifted<1> own;
            own.fetch((const T *)data + start, at, dim);
            held.part[0] = own.part[0], held.part[1] = own.part[1], held.shift = own.shift;
        }
    }
    __device__ __forceinline__ void fetch_inside(const void *data, bool is_f32, int at)
    {
        if (WIDE && is_f32) {
            held.fetch_inside((const float *)data, at);
        } else {
            shifted<1> own;
            own.fetch_inside((const T *)data, at);
            held.part[0] = own.part[0], held.part[1] = own.part[1], held.shift = own.shift;
        }
    }
    __device__ __forceinline__ void get(bool is_f32, float (&f)[VEC<T>]) const
    {
        if constexpr (WIDE)
            if (is_f32) {
                held.template get<float>(f);
                return;
            }
        held.template vector<T>(0).get(f);
    }
};

/* Stores the elements of a vector that lie in the row: at + the head of the row is a multiple of the vector. */
template <typename T>
__device__ __forceinline__ void store_shifted(T *row, int at, int dim, packed<T> v)
{
    if (at >= 0 && at + VEC<T> <= dim) {
        store_raw(row + at, v.raw);
        return;
    }
    constexpr int PER_WORD = 4 / (int)sizeof(T);
    typedef typename raw_bytes<(int)sizeof(T)>::type raw;
    const uint32_t word[4] = {v.raw.x, v.raw.y, v.raw.z, v.raw.w};
#pragma unroll
    for (int j = 0; j < VEC<T>; j++)
        if (at + j >= 0 && at + j < dim)
            reinterpret_cast<raw *>(row)[at + j] = (raw)(word[j / PER_WORD] >> j % PER_WORD * 16);
}

#endif
