/* vec.cuh - elements of any dtype as float, one or sixteen bytes' worth at a time; and still packed, in their own
   dtype. */
#ifndef ADZE_CUDA_VEC_CUH
#define ADZE_CUDA_VEC_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <type_traits>

typedef __nv_bfloat16 bf16;
typedef __half f16;

template <typename T>
constexpr int VEC = 16 / (int)sizeof(T); /* elements in 16 bytes */

__device__ __forceinline__ float to_float(float v)
{
    return v;
}
__device__ __forceinline__ float to_float(f16 v)
{
    return __half2float(v);
}
__device__ __forceinline__ float to_float(bf16 v)
{
    return __bfloat162float(v);
}
template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v)
{
    return v;
}
template <>
__device__ __forceinline__ f16 from_float<f16>(float v)
{
    return __float2half_rn(v);
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float v)
{
    return __float2bfloat16_rn(v);
}
/* v rounded to T and back. */
template <typename T>
__device__ __forceinline__ float round_to(float v)
{
    return to_float(from_float<T>(v));
}

/* Sixteen bytes, still packed, to save registers while a row waits. */
template <typename T>
struct packed;
template <>
struct packed<float> {
    uint4 raw;
    __device__ __forceinline__ void get(float (&f)[4]) const
    {
        f[0] = __uint_as_float(raw.x), f[1] = __uint_as_float(raw.y);
        f[2] = __uint_as_float(raw.z), f[3] = __uint_as_float(raw.w);
    }
    __device__ __forceinline__ void set(const float (&f)[4])
    {
        raw = make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3]));
    }
};
template <>
struct packed<bf16> {
    uint4 raw;
    __device__ __forceinline__ void get(float (&f)[8]) const
    {
        const uint32_t u[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            f[2 * i] = __uint_as_float(u[i] << 16);
            f[2 * i + 1] = __uint_as_float(u[i] & 0xffff0000u);
        }
    }
    __device__ __forceinline__ void set(const float (&f)[8])
    {
        uint32_t u[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
            u[i] = *reinterpret_cast<const uint32_t *>(&pair);
        }
        raw = make_uint4(u[0], u[1], u[2], u[3]);
    }
};
template <>
struct packed<f16> {
    uint4 raw;
    __device__ __forceinline__ void get(float (&f)[8]) const
    {
        const uint32_t u[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = __half22float2(*reinterpret_cast<const __half2 *>(&u[i]));
            f[2 * i] = pair.x, f[2 * i + 1] = pair.y;
        }
    }
    __device__ __forceinline__ void set(const float (&f)[8])
    {
        uint32_t u[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const __half2 pair = __floats2half2_rn(f[2 * i], f[2 * i + 1]);
            u[i] = *reinterpret_cast<const uint32_t *>(&pair);
        }
        raw = make_uint4(u[0], u[1], u[2], u[3]);
    }
};

/* Two elements of a word as floats. */
template <typename T>
__device__ __forceinline__ float2 two_floats(uint32_t word)
{
    if constexpr (std::is_same<T, bf16>::value)
        return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
    else
        return __half22float2(*reinterpret_cast<const __half2 *>(&word));
}

/* 16 bytes, or zeros: a predicate, as a branch for each load would delay the next one. ONCE: no one reads them
   again. */
template <bool ONCE = false>
__device__ __forceinline__ uint4 load_or_zeros(const char *from, bool there)
{
    uint4 v;
#if __CUDA_ARCH__ >= 800
#    define LOAD_IF_THERE(how)                                                                                       \
        asm volatile("{\n\t.reg .pred there;\n\tsetp.ne.u32 there, %5, 0;\n\t"                                       \
                     "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"                      \
                     "@there ld.global" how ".v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"                                   \
                     : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)                                                \
                     : "l"(from), "r"((uint32_t)there))
    if constexpr (ONCE)
        LOAD_IF_THERE(".L1::no_allocate.L2::256B");
    else
        LOAD_IF_THERE();
#    undef LOAD_IF_THERE
#else
    v = there ? *reinterpret_cast<const uint4 *>(from) : make_uint4(0, 0, 0, 0);
#endif
    return v;
}

/* Keeps the compiler from holding unpacked floats beyond this point: they take twice the registers, and unpacking
   again costs only a shift. */
template <typename T, int N>
__device__ __forceinline__ void keep_packed(packed<T> (&v)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+r"(v[i].raw.x), "+r"(v[i].raw.y), "+r"(v[i].raw.z), "+r"(v[i].raw.w));
}

/* The bits of v, in both halves of 32 where it has 16. */
__device__ __forceinline__ uint32_t twice(float v)
{
    return __float_as_uint(v);
}
__device__ __forceinline__ uint32_t twice(f16 v)
{
    return __half_as_ushort(v) * 0x10001u;
}
__device__ __forceinline__ uint32_t twice(bf16 v)
{
    return __bfloat16_as_ushort(v) * 0x10001u;
}
/* v in all elements. */
template <typename T>
__device__ __forceinline__ packed<T> packed_all(float v)
{
    const uint32_t bits = twice(from_float<T>(v));
    return {make_uint4(bits, bits, bits, bits)};
}

/* Two elements of T in a word, or one float: products, sums and differences, each rounded to T. Those of two halves
   have so few bits that a float would hold them, or round them the same. */
template <typename T>
struct pair_of;
template <>
struct pair_of<bf16> {
    typedef __nv_bfloat162 type;
};
template <>
struct pair_of<f16> {
    typedef __half2 type;
};
#define PAIR_OP(name, of_halves, of_floats)                                                                          \
    template <typename T>                                                                                            \
    __device__ __forceinline__ uint32_t name(uint32_t a, uint32_t b)                                                 \
    {                                                                                                                \
        if constexpr (sizeof(T) == 4) {                                                                              \
            return __float_as_uint(of_floats(__uint_as_float(a), __uint_as_float(b)));                               \
        } else {                                                                                                     \
            typedef typename pair_of<T>::type P;                                                                     \
            const P y = of_halves(*reinterpret_cast<const P *>(&a), *reinterpret_cast<const P *>(&b));               \
            return *reinterpret_cast<const uint32_t *>(&y);                                                          \
        }                                                                                                            \
    }
PAIR_OP(pair_mul, __hmul2_rn, __fmul_rn)
PAIR_OP(pair_add, __hadd2_rn, __fadd_rn)
PAIR_OP(pair_sub, __hsub2_rn, __fsub_rn)
#undef PAIR_OP
/* a * b + c of two halves, rounded once; before sm_80 the product is rounded too. */
template <typename T>
__device__ __forceinline__ uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c)
{
#if __CUDA_ARCH__ >= 800
    typedef typename pair_of<T>::type P;
    const P y =
        __hfma2(*reinterpret_cast<const P *>(&a), *reinterpret_cast<const P *>(&b), *reinterpret_cast<const P *>(&c));
    return *reinterpret_cast<const uint32_t *>(&y);
#else
    return pair_add<T>(pair_mul<T>(a, b), c);
#endif
}
template <typename T>
__device__ __forceinline__ packed<T> packed_mul(packed<T> a, packed<T> b)
{
    return {make_uint4(pair_mul<T>(a.raw.x, b.raw.x), pair_mul<T>(a.raw.y, b.raw.y), pair_mul<T>(a.raw.z, b.raw.z),
                       pair_mul<T>(a.raw.w, b.raw.w))};
}
template <typename T>
__device__ __forceinline__ packed<T> packed_add(packed<T> a, packed<T> b)
{
    return {make_uint4(pair_add<T>(a.raw.x, b.raw.x), pair_add<T>(a.raw.y, b.raw.y), pair_add<T>(a.raw.z, b.raw.z),
                       pair_add<T>(a.raw.w, b.raw.w))};
}

template <typename T>
__device__ __forceinline__ packed<T> load_packed(const T *p)
{
    return {*reinterpret_cast<const uint4 *>(p)};
}
template <typename T>
__device__ __forceinline__ void store_packed(T *p, packed<T> v)
{
    *reinterpret_cast<uint4 *>(p) = v.raw;
}

/* W neighbouring elements as floats: a whole number of 16-byte vectors, or one element. */
template <typename T, int W>
__device__ __forceinline__ void load(const T *p, float (&f)[W])
{
    if constexpr (W == 1) {
        f[0] = to_float(*p);
    } else {
#pragma unroll
        for (int v = 0; v < W / VEC<T>; v++) {
            float part[VEC<T>];
            load_packed(p + v * VEC<T>).get(part);
#pragma unroll
            for (int i = 0; i < VEC<T>; i++)
                f[v * VEC<T> + i] = part[i];
        }
    }
}
template <typename T, int W>
__device__ __forceinline__ void store(T *p, const float (&f)[W])
{
    if constexpr (W == 1) {
        *p = from_float<T>(f[0]);
    } else {
#pragma unroll
        for (int v = 0; v < W / VEC<T>; v++) {
            float part[VEC<T>];
#pragma unroll
            for (int i = 0; i < VEC<T>; i++)
                part[i] = f[v * VEC<T> + i];
            packed<T> out;
            out.set(part);
            store_packed(p + v * VEC<T>, out);
        }
    }
}
/* The same from a tensor whose dtype is T or f32; `at` counts elements. */
template <typename T, int W>
__device__ __forceinline__ void load_param(const void *p, bool is_f32, int64_t at, float (&f)[W])
{
    if (is_f32)
        load<float, W>((const float *)p + at, f);
    else
        load<T, W>((const T *)p + at, f);
}

#endif
