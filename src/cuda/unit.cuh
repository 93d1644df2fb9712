/* unit.cuh - W contiguous elements, packed as in memory: 2, 4, 8 or 16 bytes with that alignment. They are loaded
   now and unpacked later, so that a thread has many loads in flight. Products are rounded to T.

   Rows at any address are read in units as wide as the alignment of all tensors allows (rows_width). Neighbouring
   threads have neighbouring units, so that narrow loads coalesce too: an SM issues 2-byte loads several times as
   fast as the memory responds. */
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

/* One store of 8 or 16 bytes: an assignment may become one store for each word. It is volatile, and not a barrier to
   other memory accesses: loads may pass it. */
__device__ __forceinline__ void store_raw(void *p, uint2 v)
{
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y));
}
__device__ __forceinline__ void store_raw(void *p, uint4 v)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}

template <typename T, int W>
struct unit {
    typedef typename raw_bytes<W * sizeof(T)>::type raw;
    raw v;
    __device__ __forceinline__ void fetch(const T *p) { v = *reinterpret_cast<const raw *>(p); }
    __device__ __forceinline__ void put(T *p) const
    {
        if constexpr (sizeof v == 8)
            store_raw(p, v);
        else
            *reinterpret_cast<raw *>(p) = v;
    }
    __device__ __forceinline__ void fill(float f)
    {
        if constexpr (sizeof v == 8)
            v.x = v.y = twice(from_float<T>(f));
        else
            v = (raw)twice(from_float<T>(f));
    }
    __device__ __forceinline__ void get(float (&f)[W]) const
    {
        /* loaded into a vector, whose unused elements the compiler drops */
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
    __device__ __forceinline__ void put(T *p) const { store_raw(p, v.raw); }
    __device__ __forceinline__ void fill(float f) { v = packed_all<T>(f); }
    __device__ __forceinline__ void get(float (&f)[W]) const { v.get(f); }
    __device__ __forceinline__ void set(const float (&f)[W]) { v.set(f); }
    __device__ __forceinline__ void multiply(const unit &by) { v = packed_mul(v, by.v); }
};

/* Bytes `shift` to `shift + 15` of two vectors; shift is a multiple of BYTES. */
template <int BYTES>
__device__ __forceinline__ uint4 shift_together(uint4 low, uint4 high, uint32_t shift)
{
    uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 6; i++)
        w[i] = shift & 8 ? w[i + 2] : w[i];
#pragma unroll
    for (int i = 0; i < 5; i++)
        w[i] = shift & 4 ? w[i + 1] : w[i];
#pragma unroll
    for (int i = 0; i < 4 && BYTES < 4; i++)
        w[i] = __funnelshift_r(w[i], w[i + 1], (shift & (4 - BYTES)) * 8);
    return make_uint4(w[0], w[1], w[2], w[3]);
}
/* Sixteen bytes at the address of an element: of one or two aligned vectors, each of which has some of them. */
template <typename T>
__device__ __forceinline__ uint4 load_unaligned(const T *p)
{
    const uint32_t shift = (uint32_t)(uintptr_t)p & 15;
    const uint4 *const at = reinterpret_cast<const uint4 *>((const char *)p - shift);
    return shift_together<(int)sizeof(T)>(at[0], at[shift > 0], shift);
}

/* A vector at any address: the one or two aligned vectors that have its elements, until it is shifted. */
template <typename T>
struct loose_unit {
    uint4 low, high;
    __device__ __forceinline__ void fetch(const T *p)
    {
        const uint4 *const at = reinterpret_cast<const uint4 *>((uintptr_t)p & ~(uintptr_t)15);
        low = at[0], high = at[((uintptr_t)p & 15) > 0];
    }
    __device__ __forceinline__ void fill(float f) { low = high = packed_all<T>(f).raw; }
    /* p: where it was loaded, or as far off a 16-byte border. */
    __device__ __forceinline__ unit<T, VEC<T>> whole(const T *p) const
    {
        return {{shift_together<(int)sizeof(T)>(low, high, (uint32_t)(uintptr_t)p & 15)}};
    }
};

/* W elements of a tensor whose dtype is T or f32, in the registers that floats take. LOOSE: at any address. */
template <typename T, int W>
struct param_unit {
    static constexpr int PART = W < 4 ? W : 4; /* a load of 32 bytes is two of 16 */
    uint32_t word[W];
    template <bool LOOSE = false>
    __device__ __forceinline__ void fetch(const void *p, bool is_f32, int64_t at)
    {
        if (sizeof(T) < 4 && is_f32) {
#pragma unroll
            for (int i = 0; i < W; i += PART)
                fetch_as<LOOSE, float, PART>((const float *)p + at + i, i);
        } else {
            fetch_as<LOOSE, T, W>((const T *)p + at, 0);
        }
    }
    __device__ __forceinline__ void get(bool is_f32, float (&f)[W]) const
    {
        if (sizeof(T) < 4 && is_f32) {
#pragma unroll
            for (int j = 0; j < W; j++)
                f[j] = __uint_as_float(word[j]);
        } else {
            unit<T, W> own;
            if constexpr (sizeof own == 16)
                own.v.raw = make_uint4(word[0], word[1], word[2], word[3]);
            else if constexpr (sizeof own == 8)
                own.v = make_uint2(word[0], word[1]);
            else
                own.v = (decltype(own.v))word[0];
            own.get(f);
        }
    }

  private:
    template <bool LOOSE, typename S, int N>
    __device__ __forceinline__ void fetch_as(const S *p, int to)
    {
        unit<S, N> own;
        if constexpr (LOOSE && sizeof own == 16) {
            own.v.raw = load_unaligned(p);
        } else if constexpr (LOOSE && N == 2 && sizeof(S) == 4) {
            own.v = make_uint2(__float_as_uint(p[0]), __float_as_uint(p[1]));
        } else if constexpr (LOOSE && N > 1) {
            unit<S, 1> half[N];
#pragma unroll
            for (int i = 0; i < N; i++)
                half[i].fetch(p + i);
            const auto pair = [&](int i) { return half[i].v | (uint32_t)half[i + 1].v << 16; };
            if constexpr (N == 2)
                own.v = pair(0);
            else
                own.v = make_uint2(pair(0), pair(2));
        } else {
            own.fetch(p);
        }
        if constexpr (sizeof own == 16)
            word[to] = own.v.raw.x, word[to + 1] = own.v.raw.y, word[to + 2] = own.v.raw.z,
            word[to + 3] = own.v.raw.w;
        else if constexpr (sizeof own == 8)
            word[to] = own.v.x, word[to + 1] = own.v.y;
        else
            word[to] = own.v;
    }
};
/* W floats, in stores of 16 bytes at most. */
template <int W>
__device__ __forceinline__ void store_floats(float *p, const float (&f)[W])
{
    constexpr int PART = W < 4 ? W : 4;
#pragma unroll
    for (int i = 0; i < W; i += PART) {
        float part[PART];
#pragma unroll
        for (int j = 0; j < PART; j++)
            part[j] = f[i + j];
        unit<float, PART> out;
        out.set(part);
        out.put(p + i);
    }
}

#endif
