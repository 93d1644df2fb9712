/* unit.cuh - W neighbouring elements as they lie in memory: a 16-byte vector, or one. Fetched now, unpacked later, so
   that a thread has many loads on their way. Products are rounded to T. */
#ifndef ADZE_CUDA_UNIT_CUH
#define ADZE_CUDA_UNIT_CUH

#include "vec.cuh"

template <typename T, int W>
struct unit {
    packed<T> v;
    __device__ __forceinline__ void fetch(const T *p) { v = load_packed(p); }
    __device__ __forceinline__ void fill(float f) { v = packed_all<T>(f); }
    __device__ __forceinline__ void get(float (&f)[W]) const { v.get(f); }
    __device__ __forceinline__ void set(const float (&f)[W]) { v.set(f); }
    __device__ __forceinline__ void multiply(const unit &by) { v = packed_mul(v, by.v); }
    __device__ __forceinline__ void put(T *p) const { store_packed(p, v); }
};
template <typename T>
struct unit<T, 1> {
    T v;
    __device__ __forceinline__ void fetch(const T *p) { v = *p; }
    __device__ __forceinline__ void fill(float f) { v = from_float<T>(f); }
    __device__ __forceinline__ void get(float (&f)[1]) const { f[0] = to_float(v); }
    __device__ __forceinline__ void set(const float (&f)[1]) { v = from_float<T>(f[0]); }
    __device__ __forceinline__ void multiply(const unit &by) { v = from_float<T>(to_float(v) * to_float(by.v)); }
    __device__ __forceinline__ void put(T *p) const { *p = v; }
};

#endif
