/* unit.cuh - W neighbouring elements as they lie in memory: a 16-byte vector, or one. Fetched now, unpacked later, so
   that a thread has many loads on their way. */
#ifndef ADZE_CUDA_UNIT_CUH
#define ADZE_CUDA_UNIT_CUH

#include "vec.cuh"

template <typename T, int W>
struct unit {
    packed<T> v;
    __device__ __forceinline__ void fetch(const T *p) { v = load_packed(p); }
    __device__ __forceinline__ void fill(float f) { v = packed_all<T>(f); }
    __device__ __forceinline__ void get(float (&f)[W]) const { v.get(f); }
};
template <typename T>
struct unit<T, 1> {
    T v;
    __device__ __forceinline__ void fetch(const T *p) { v = *p; }
    __device__ __forceinline__ void fill(float f) { v = from_float<T>(f); }
    __device__ __forceinline__ void get(float (&f)[1]) const { f[0] = to_float(v); }
};

#endif
