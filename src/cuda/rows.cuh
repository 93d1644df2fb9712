/* rows.cuh - where the rows of a view lie, on the device. */
#ifndef ADZE_CUDA_ROWS_CUH
#define ADZE_CUDA_ROWS_CUH

#include "kernel.h"

/* 1 / v to nearly the last bit of a double, and a / b of integers for 0 <= a < 2^52: the compiler's own are function
   calls, around which registers spill. */
__device__ __forceinline__ double inverse(double v)
{
    double r;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(v));
    r = fma(r, fma(-v, r, 1.0), r);
    return fma(r, fma(-v, r, 1.0), r);
}
__device__ __forceinline__ int64_t divide(int64_t a, int64_t b)
{
    const int64_t times = (int64_t)((double)a * inverse((double)b)), rest = a - times * b;
    return rest < 0 ? times - 1 : rest >= b ? times + 1 : times;
}

/* Division of integers below 2^31 by a divisor that the host knows. */
struct divisor {
    uint32_t factor, shift;
    int64_t by;
};
static inline divisor divisor_of(int64_t by)
{
    divisor d = {0, 31, by};
    if (by > 0x7fffffff)
        return d;
    while ((int64_t)1 << (d.shift - 31) < by)
        d.shift++;
    d.factor = (uint32_t)((((uint64_t)1 << d.shift) + (uint64_t)by - 1) / (uint64_t)by);
    return d;
}
__device__ __forceinline__ uint32_t divide(uint32_t n, const divisor &d)
{
    return (uint32_t)((uint64_t)n * d.factor >> d.shift);
}

/* A row's index in each of the merged dimensions: computed once, used for every tensor. */
struct row_index {
    int64_t at[4];
    __device__ __forceinline__ int64_t &first() { return at[0]; }
};
__device__ __forceinline__ row_index row_split(const adze_rows &rows, int64_t row)
{
    row_index index = {{row, 0, 0, 0}};
    if (rows.rank == 1)
        return index;
    if (rows.count <= 0x7fffffff) { /* 32-bit division is several times cheaper */
        uint32_t rest = (uint32_t)row;
#pragma unroll
        for (int d = 3; d > 0; d--)
            if (d < rows.rank) {
                const uint32_t size = (uint32_t)rows.size[d], next = rest / size;
                index.at[d] = rest - next * size;
                rest = next;
            }
        index.at[0] = rest;
        return index;
    }
#pragma unroll
    for (int d = 3; d > 0; d--)
        if (d < rows.rank) {
            const int64_t next = divide(row, rows.size[d]);
            index.at[d] = row - next * rows.size[d];
            row = next;
        }
    index.at[0] = row;
    return index;
}
__device__ __forceinline__ int64_t row_offset(const adze_rows &rows, int tensor, const row_index &index)
{
    int64_t offset = index.at[0] * rows.stride[tensor][0];
    if (rows.rank > 1) {
#pragma unroll
        for (int d = 1; d < 4; d++)
            offset += index.at[d] * rows.stride[tensor][d];
    }
    return offset;
}

/* The rows of N tensors when there are at most 2^31 in up to three dimensions, as in models. A kernel finds its row
   before its first load, and the general way above takes longer than the load. */
template <int N>
struct simple_rows {
    uint32_t count;
    uint32_t size[2]; /* of the inner dimensions, when there are 3; size[1] alone when there are 2 */
    int64_t stride[N], outer[2][N];

    /* A row's index in each dimension, computed once for all tensors. */
    struct place {
        uint32_t inner, middle, outermost;
        __device__ __forceinline__ uint32_t &first() { return inner; }
    };
    __device__ __forceinline__ place split(uint32_t r) const
    {
        if (size[1] == 0)
            return {r, 0, 0};
        const uint32_t rest = r / size[1], outermost = size[0] ? rest / size[0] : 0;
        return {r - rest * size[1], rest - outermost * size[0], outermost};
    }
    __device__ __forceinline__ int64_t offset(const place &at, int t) const
    {
        return at.inner * stride[t] + at.middle * outer[1][t] + at.outermost * outer[0][t];
    }
    /* Where row r of each tensor begins, in elements. */
    __device__ __forceinline__ void locate(uint32_t r, int64_t (&at)[N]) const
    {
        if (size[1] == 0) {
#pragma unroll
            for (int t = 0; t < N; t++)
                at[t] = r * stride[t];
            return;
        }
        const uint32_t rest = r / size[1], inner = r - rest * size[1];
        const uint32_t outermost = size[0] ? rest / size[0] : 0, middle = rest - outermost * size[0];
#pragma unroll
        for (int t = 0; t < N; t++)
            at[t] = inner * stride[t] + middle * outer[1][t] + outermost * outer[0][t];
    }
};

/* Short rows in one dimension, whose units are numbered consecutively: unit n of all rows. Offsets are in elements
   and have 32 bits. */
template <int N>
struct flat_rows {
    uint32_t count;    /* of units */
    uint32_t length;   /* of a row, in units */
    uint32_t rest;     /* 32 % length */
    divisor by_length; /* length */
    int32_t stride[N];
    int32_t step[N], wrap[N]; /* from unit n to unit n + 32: as far in its row as n or farther; less far */

    /* Where a unit lies in its row and in each tensor. A thread has every 32nd unit from its first one on. */
    struct place {
        uint32_t unit, at[N];
    };
    template <int W>
    __device__ __forceinline__ place first(uint32_t n) const
    {
        const uint32_t row = divide(n, by_length), unit = n - row * length;
        place to = {unit, {}};
#pragma unroll
        for (int t = 0; t < N; t++)
            to.at[t] = row * (uint32_t)stride[t] + unit * W;
        return to;
    }
    __device__ __forceinline__ void advance(place &to) const
    {
        to.unit += rest;
        const bool wraps = to.unit >= length;
        to.unit -= wraps ? length : 0;
#pragma unroll
        for (int t = 0; t < N; t++)
            to.at[t] += (uint32_t)(wraps ? wrap[t] : step[t]);
    }
    /* The offset as a signed number: strides may be negative. */
    __device__ __forceinline__ static int64_t offset(const place &of, int t)
    {
        return (int32_t)of.at[t];
    }
};
/* Host: whether rows of `units` units of `width` elements can be numbered so, and the rows in this form. */
template <int N>
static inline bool rows_are_flat(const simple_rows<N> &rows, int64_t units, int64_t width)
{
    bool flat = rows.size[1] == 0 && units * rows.count <= 0x7fffffff;
    for (int t = 0; t < N; t++) {
        const int64_t stride = rows.stride[t] < 0 ? -rows.stride[t] : rows.stride[t];
        flat = flat && stride <= (0x7fffffff - units * width) / ((int64_t)rows.count + 33);
    }
    return flat;
}
template <int N>
static flat_rows<N> rows_flat(const simple_rows<N> &rows, int64_t units, int64_t width)
{
    flat_rows<N> flat = {};
    flat.count = (uint32_t)(units * rows.count);
    flat.length = (uint32_t)units;
    flat.rest = (uint32_t)(32 % units);
    flat.by_length = divisor_of(units);
    for (int t = 0; t < N; t++) {
        flat.stride[t] = (int32_t)rows.stride[t];
        flat.step[t] = (int32_t)(32 / units * rows.stride[t] + 32 % units * width);
        flat.wrap[t] = (int32_t)(flat.step[t] + rows.stride[t] - units * width);
    }
    return flat;
}

/* Rows of any number in any dimensions. */
template <int N>
struct general_rows : adze_rows {
    typedef row_index place;
    __device__ __forceinline__ place split(int64_t r) const { return row_split(*this, r); }
    __device__ __forceinline__ int64_t offset(const place &at, int t) const { return row_offset(*this, t, at); }
    __device__ __forceinline__ void locate(int64_t r, int64_t (&at)[N]) const
    {
        const row_index index = row_split(*this, r);
#pragma unroll
        for (int t = 0; t < N; t++)
            at[t] = row_offset(*this, t, index);
    }
};

/* Host: whether rows are simple, and the simple rows of the tensors that `which` lists. */
static inline bool rows_are_simple(const adze_rows &rows)
{
    return rows.count <= 0x7fffffff && rows.rank <= 3;
}
template <int N>
static simple_rows<N> rows_simple(const adze_rows &rows, const int (&which)[N])
{
    simple_rows<N> simple = {};
    const int rank = rows.rank;
    simple.count = (uint32_t)rows.count;
    simple.size[1] = rank > 1 ? (uint32_t)rows.size[rank - 1] : 0;
    simple.size[0] = rank > 2 ? (uint32_t)rows.size[rank - 2] : 0;
    for (int t = 0; t < N; t++) {
        const int64_t *stride = rows.stride[which[t]];
        simple.stride[t] = stride[rank - 1];
        simple.outer[1][t] = rank > 1 ? stride[rank - 2] : 0;
        simple.outer[0][t] = rank > 2 ? stride[rank - 3] : 0;
    }
    return simple;
}

/* Host: how many elements of a tensor's rows one load may have: 1, 2 or 4, or 16 if 16-byte vectors are aligned or
   the tensor is absent. */
static inline int rows_width(const adze_tensor *t, int64_t dim)
{
    if (t->dtype == ADZE_NONE)
        return 16;
    const uint64_t size = adze_dtype_size(t->dtype);
    uint64_t bits = (uint64_t)(uintptr_t)t->data | (uint64_t)dim * size | 16;
    for (int d = 0; d < t->rank - 1; d++)
        bits |= t->shape[d] > 1 ? (uint64_t)t->stride[d] * size : 0;
    const uint64_t most = bits & (~bits + 1);
    return most == 16 ? 16 : (int)(most / size);
}
static inline bool rows_aligned(const adze_tensor *t, int64_t dim)
{
    return rows_width(t, dim) == 16;
}

#endif
