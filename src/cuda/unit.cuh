/* unit.cuh - W neighbouring elements as they lie in memory: 2, 4, 8 or 16 bytes, which are as far aligned. Fetched
   now, unpacked later, so that a thread has many loads in flight. Products are rounded to T.

   Rows at any address are read in units as wide as the alignment of all tensors allows (rows_width). Neighbouring
   threads have neighbouring units, so that narrow ones coalesce too: a multiprocessor issues loads of 2 bytes several
   times as fast as the memory answers. */
#ifndef ADZE_CUDA_UNIT_CUH
#define ADZE_CUDA_UNIT_CUH

#include "vec.cuh"

template <int BYTES>
struct raw_bytes;
template <>
struct raw_bytes<2> {
    typedef uint16_t type;
};
template <>
struct raw_bytes<4> {
    typedef uint32_t type;
};
template <>
struct raw_bytes<8> {
    typedef uint2 type;
};

template <typename T, int W>
struct unit {
    typedef typename raw_bytes<W * sizeof(T)>::type raw;
    raw v;
    __device__ __forceinline__ void fetch(const T *p) { v = *reinterpret_cast<const raw *>(p); }
    __device__ __forceinline__ void put(T *p) const { *reinterpret_cast<raw *>(p) = v; }
    __device__ __forceinline__ void fill(float f)
    {
        if constexpr (sizeof v == 8)
            v.x = v.y = twice(from_float<T>(f));
        else
            v = (raw)twice(from_float<T>(f));
    }
    __device__ __forceinline__ void get(float (&f)[W]) const
    {
        /* through a vector, of which the compiler drops what is not used */
        packed<T> wide = {};
        float all[VEC<T>];
        if constexpr (sizeof v == 8)
            wide.raw.x = v.x, wide.raw.y = v.y;
        else
            wide.raw.x = v;
        wide.get(all);
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] = all[j];
    }
    __device__ __forceinline__ void set(const float (&f)[W])
    {
        packed<T> wide;
        float all[VEC<T>] = {};
#pragma unroll
        for (int j = 0; j < W; j++)
            all[j] = f[j];
        wide.set(all);
        if constexpr (sizeof v == 8)
            v = make_uint2(wide.raw.x, wide.raw.y);
        else
            v = (raw)wide.raw.x;
    }
    __device__ __forceinline__ void multiply(const unit &by)
    {
        if constexpr (sizeof v == 8)
            v = make_uint2(pair_mul<T>(v.x, by.v.x), pair_mul<T>(v.y, by.v.y));
        else
            v = (raw)pair_mul<T>(v, by.v);
    }
};
/* Sixteen bytes. */
template <typename T>
struct unit<T, VEC<T>> {
    static constexpr int W = VEC<T>;
    packed<T> v;
    __device__ __forceinline__ void fetch(const T *p) { v = load_packed(p); }
    __device__ __forceinline__ void put(T *p) const { store_packed(p, v); }
    __device__ __forceinline__ void fill(float f) { v = packed_all<T>(f); }
    __device__ __forceinline__ void get(float (&f)[W]) const { v.get(f); }
    __device__ __forceinline__ void set(const float (&f)[W]) { v.set(f); }
    __device__ __forceinline__ void multiply(const unit &by) { v = packed_mul(v, by.v); }
};

/* W elements of a tensor whose dtype is T or f32. A load of 32 bytes is two of 16. */
template <typename T, int W>
struct param_unit {
    static constexpr int PART = W < 4 ? W : 4;
    unit<T, W> own;
    unit<float, PART> wide[W / PART];
    __device__ __forceinline__ void fetch(const void *p, bool is_f32, int64_t at)
    {
        if (sizeof(T) < 4 && is_f32) {
#pragma unroll
            for (int i = 0; i < W / PART; i++)
                wide[i].fetch((const float *)p + at + i * PART);
        } else {
            own.fetch((const T *)p + at);
        }
    }
    __device__ __forceinline__ void get(bool is_f32, float (&f)[W]) const
    {
        if (sizeof(T) < 4 && is_f32) {
#pragma unroll
            for (int i = 0; i < W / PART; i++) {
                float part[PART];
                wide[i].get(part);
#pragma unroll
                for (int j = 0; j < PART; j++)
                    f[i * PART + j] = part[j];
            }
        } else {
            own.get(f);
        }
    }
};

#endif
