/* quantize on CUDA. Groups are read for their range, then divided by their scale: all of it is in registers between
   the two where it fits.

   quantize_group: a group, or a short row, belongs to lanes of a warp. quantize_row: a row belongs to a block, in
   registers (HELD) or read twice. quantize_tile: a block has a group of 128 rows and 128 columns. One scale for all
   (quantize_most) is found first: the scale of each block, of which the largest is that of the tensor, since it grows
   with the largest |x|, goes into the scale by an atomic maximum of its bits. These are in the order of the floats.
   Three launches then: zero, maximum, rows.

   A unit is U elements of a row: a 16-byte vector, or two elements at any address, which are a byte of 4 bits.

   Large tensors are a matter of instructions per element, hence a kernel for each kind of result, the quotient by
   an inverse that a group computes once (quotient), and rounding by the addition of a large number. */
#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "stored.cuh"
#include "unit.cuh"

enum { X, OUT, SCALE, ZERO, TENSORS };
constexpr int THREADS = 256, ROW_THREADS = 512, HELD_UNITS = 4, TILE = 128, LINE = 128;
/* On targets other than sm_90 the launch bounds must allow one block all registers, or the compiler spills. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int ROW_BLOCKS = 1;
#else
constexpr int ROW_BLOCKS = 2;
#endif

/* What is stored: of 4 bits, around 8 or from a zero point on. */
enum { TO_F8, TO_I8, TO_U4, TO_U4_POINTS };

enum { IN_LANES, IN_BLOCK, TWICE, TILES, WHOLE };
constexpr adze_variant VARIANTS[] = {
    {"lanes", "groups, and rows of up to 32 units, in lanes of a warp"},
    {"block", "rows that a block holds in registers"},
    {"twice", "rows of any length in a block, read twice"},
    {"tile", "groups of 128 rows and 128 columns"},
    {"whole", "one scale for all"},
    {NULL, NULL},
};

struct quantize_params {
    const void *x;
    void *out, *scale, *zero;
    adze_rows rows;
    int64_t k, group, columns;     /* columns: groups of a row */
    int64_t scale_step, zero_step; /* from one group of a row to the next */
    int64_t tile_stride;           /* of scale, from 128 rows to the next */
    int64_t count;                 /* groups, rows or tiles */
    int32_t lanes;                 /* of a group, a power of two */
    int32_t scale_dtype;
    divisor by_columns;
    bool given; /* the scale is there already */
    bool early; /* rows are prefetched before the dependency wait: they are few */
};

/* Of a group: the largest number and minus the smallest, neither below 0; without zero points the largest |x|. */
struct range {
    float high, minus_low;
    template <int KIND>
    __device__ __forceinline__ void widen(float x)
    {
        high = fmaxf(high, KIND == TO_U4_POINTS ? x : fabsf(x));
        if (KIND == TO_U4_POINTS)
            minus_low = fmaxf(minus_low, -x);
    }
};
/* Over `lanes` neighbouring lanes. */
__device__ __forceinline__ range range_join(range r, int lanes)
{
    for (int mask = lanes / 2; mask; mask /= 2) {
        r.high = fmaxf(r.high, __shfl_xor_sync(~0u, r.high, mask));
        r.minus_low = fmaxf(r.minus_low, __shfl_xor_sync(~0u, r.minus_low, mask));
    }
    return r;
}
/* Over a block of whole warps. */
__device__ __forceinline__ range range_block(range r, range (&part)[32])
{
    r = range_join(r, 32);
    __syncthreads(); /* part may still be read */
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = r;
    __syncthreads();
    for (unsigned w = 0; w < blockDim.x / 32; w++) {
        r.high = fmaxf(r.high, part[w].high);
        r.minus_low = fmaxf(r.minus_low, part[w].minus_low);
    }
    return r;
}

template <int KIND>
__device__ __forceinline__ float scale_of(const quantize_params &p, range r)
{
    const float scale = KIND == TO_U4_POINTS ? (r.high + r.minus_low) / 15
                        : KIND == TO_I8      ? r.high / 127
                        : KIND == TO_F8      ? r.high / 448
                                             : r.high / 7;
    return p.scale_dtype == ADZE_F16    ? round_to<f16>(scale)
           : p.scale_dtype == ADZE_BF16 ? round_to<bf16>(scale)
                                        : scale;
}
template <int KIND>
__device__ __forceinline__ float zero_of(range r, float scale)
{
    if (KIND != TO_U4_POINTS)
        return KIND == TO_U4 ? 8 : 0;
    return (float)whole_between(over_scale(r.minus_low, scale), 0, 0, 15);
}
/* x over a scale, to the last bit that counts: as over_scale(). The product with the inverse is wrong by two units at
   most, and each step with the exact remainder leaves a fraction of that: the second rounds as a division does.
   Scales whose inverse, or remainders, might leave the range of floats are brought nearer to 1, and x with them by
   `factor`. Of an infinite scale, only what is infinite itself is not 0. */
struct quotient {
    float scale, inverse, factor;
    __device__ __forceinline__ explicit quotient(float of)
    {
        factor = of > 0x1p-80f && of < 0x1p80f ? 1 : of == 0 ? 0 : of < 1 ? 0x1p100f : 0x1p-40f;
        scale = of < INFINITY ? of * factor : 0;
        inverse = scale > 0 ? 1 / scale : 0;
    }
    template <int U>
    __device__ __forceinline__ void divide(float (&x)[U]) const
    {
        if (factor != 1) {
#pragma unroll
            for (int j = 0; j < U; j++)
                x[j] = factor == 0 ? 0 : x[j] * factor;
        }
#pragma unroll
        for (int j = 0; j < U; j++) {
            float q = x[j] * inverse;
            q = fmaf(fmaf(-q, scale, x[j]), inverse, q);
            x[j] = fmaf(fmaf(-q, scale, x[j]), inverse, q);
        }
    }
};
/* Two f8e4m3, the first in the low byte; a NaN, which has no sign after a division, becomes 448. */
__device__ __forceinline__ uint32_t two_f8_bits(float first, float second)
{
#if __CUDA_ARCH__ >= 890
    uint16_t both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(fminf(second, 448)), "f"(fminf(first, 448)));
    return both;
#else
    return f8_bits(first) | f8_bits(second) << 8;
#endif
}
/* The results of U quotients, 8 or 4 bits each, in words. The sum with 1.5 * 2^23 has a whole number, halves to
   even, in its last bits. */
template <int KIND, int U>
__device__ __forceinline__ void quantize_pack(const float (&q)[U], float zero, uint32_t (&word)[(U + 3) / 4])
{
    constexpr float WHOLE_BITS = 0x1.8p23f;
    constexpr int EACH = KIND < TO_U4 ? 8 : 4, IN_WORD = 32 / EACH;
    const float low = KIND == TO_I8 ? -127 : (KIND == TO_U4_POINTS ? 0 : 1) - zero;
    const float high = KIND == TO_I8 ? 127 : 15 - zero;
#pragma unroll
    for (int w = 0; w < (U + 3) / 4; w++)
        word[w] = 0;
#pragma unroll
    for (int j = 0; j < U; j += KIND == TO_F8 ? 2 : 1) {
        uint32_t bits;
        if (KIND == TO_F8)
            bits = two_f8_bits(q[j], q[j + 1 < U ? j + 1 : j]);
        else
            bits = __float_as_uint(fminf(fmaxf(q[j], low), high) + WHOLE_BITS + (KIND == TO_I8 ? 0 : zero)) &
                   (KIND == TO_I8 ? 0xff : 0xf);
        word[j / IN_WORD] |= bits << (EACH * (j % IN_WORD));
    }
}
__device__ __forceinline__ float get_scale(const quantize_params &p)
{
    return p.scale_dtype == ADZE_F16    ? to_float(*(const f16 *)p.scale)
           : p.scale_dtype == ADZE_BF16 ? to_float(*(const bf16 *)p.scale)
                                        : *(const float *)p.scale;
}
template <int KIND>
__device__ __forceinline__ void put_scale(const quantize_params &p, int64_t at, int64_t zero_at, float scale,
                                          float zero)
{
    if (p.scale_dtype == ADZE_F16)
        ((f16 *)p.scale)[at] = from_float<f16>(scale);
    else if (p.scale_dtype == ADZE_BF16)
        ((bf16 *)p.scale)[at] = from_float<bf16>(scale);
    else
        ((float *)p.scale)[at] = scale;
    if (KIND == TO_U4_POINTS)
        ((uint8_t *)p.zero)[zero_at] = (uint8_t)zero;
}

/* Elements i to i + U of a row; those from `end` on are 0. */
template <typename T, int U, int KIND>
struct quantize_unit {
    static constexpr bool WIDE = U == VEC<T>;
    unit<T, WIDE ? U : 1> x[WIDE ? 1 : U];
    __device__ __forceinline__ void fetch(const T *row, int64_t i, int64_t end)
    {
#pragma unroll
        for (int j = 0; j < (WIDE ? 1 : U); j++) {
            x[j].fill(0);
            if (i + j < end)
                x[j].fetch(row + i + j);
        }
    }
    __device__ __forceinline__ void get(float (&f)[U]) const
    {
        if constexpr (WIDE) {
            x[0].get(f);
        } else {
#pragma unroll
            for (int j = 0; j < U; j++) {
                float one[1];
                x[j].get(one);
                f[j] = one[0];
            }
        }
    }
    __device__ __forceinline__ void widen(range &r) const
    {
        float f[U];
        get(f);
#pragma unroll
        for (int j = 0; j < U; j++)
            r.widen<KIND>(f[j]);
    }
    /* Keeps the compiler from unpacking the elements before the unit ahead of them is written. */
    __device__ __forceinline__ void keep()
    {
        if constexpr (WIDE)
            asm volatile("" : "+r"(x[0].v.raw.x), "+r"(x[0].v.raw.y), "+r"(x[0].v.raw.z), "+r"(x[0].v.raw.w));
    }
    __device__ __forceinline__ void write(uint8_t *row, int64_t i, int64_t end, const quotient &by, float zero)
    {
        float f[U];
        uint32_t word[(U + 3) / 4];
        if (i >= end)
            return;
        keep();
        get(f);
        by.divide(f);
        quantize_pack<KIND, U>(f, zero, word);
        if constexpr (KIND >= TO_U4) {
            if (!WIDE && i + 1 >= end)
                word[0] &= 0xf;
            put<U / 2>(row + i / 2, word[0]);
        } else if constexpr (U == 8) {
            store_raw(row + i, make_uint2(word[0], word[1]));
        } else if constexpr (U == 4) {
            *reinterpret_cast<uint32_t *>(row + i) = word[0];
        } else {
#pragma unroll
            for (int j = 0; j < U; j++)
                if (i + j < end)
                    row[i + j] = (uint8_t)(word[0] >> (8 * j));
        }
    }

  private:
    template <int BYTES>
    __device__ __forceinline__ static void put(uint8_t *to, uint32_t v)
    {
        if constexpr (BYTES == 4)
            *reinterpret_cast<uint32_t *>(to) = v;
        else if constexpr (BYTES == 2)
            *reinterpret_cast<uint16_t *>(to) = (uint16_t)v;
        else
            *to = (uint8_t)v;
    }
};

template <typename T>
__device__ __forceinline__ const T *row_of_x(const quantize_params &p, const row_index &index)
{
    return (const T *)p.x + row_offset(p.rows, X, index);
}
__device__ __forceinline__ uint8_t *row_of_out(const quantize_params &p, const row_index &index)
{
    return (uint8_t *)p.out + row_offset(p.rows, OUT, index);
}

/* A group has p.lanes lanes, with up to UNITS units each. Threads have units of several groups under way. */
template <typename T, int U>
constexpr int LANE_UNITS = U == VEC<T> ? 1 : 2;
template <typename T, int U>
constexpr int LANE_GROUPS = U == VEC<T> ? 2 : 1;
template <typename T, int U, int KIND>
__global__ void __launch_bounds__(THREADS, 4) quantize_group(const __grid_constant__ quantize_params p)
{
    constexpr int UNITS = LANE_UNITS<T, U>, GROUPS = LANE_GROUPS<T, U>;
    const int lane = (int)threadIdx.x % p.lanes, each = THREADS / p.lanes;
    pdl_launch_next();
    pdl_wait();
    for (int64_t block = blockIdx.x; block * each * GROUPS < p.count; block += gridDim.x) {
        quantize_unit<T, U, KIND> unit[GROUPS][UNITS];
        /* All lanes of a warp take part in the shuffles: those beyond the last group have none, and no end. */
        const auto place = [&](int i, int64_t *column, int64_t *end) {
            const int64_t g = (block * GROUPS + i) * each + (int)threadIdx.x / p.lanes;
            const int64_t own = g < p.count ? g : 0;
            const int64_t row = p.count <= 0x7fffffff ? divide((uint32_t)own, p.by_columns) : divide(own, p.columns);
            *column = own - row * p.columns;
            const int64_t last = (*column + 1) * p.group;
            *end = g >= p.count ? -1 : last < p.k ? last : p.k;
            return row_split(p.rows, row);
        };
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            int64_t column, end;
            const T *x = row_of_x<T>(p, place(i, &column, &end));
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                unit[i][u].fetch(x, column * p.group + (lane + u * p.lanes) * U, end);
        }
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            int64_t column, end;
            const row_index index = place(i, &column, &end);
            range r = {0, 0};
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                unit[i][u].widen(r);
            r = range_join(r, p.lanes);
            const float scale = scale_of<KIND>(p, r), zero = zero_of<KIND>(r, scale);
            const quotient by(scale);
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                unit[i][u].write(row_of_out(p, index), column * p.group + (lane + u * p.lanes) * U, end, by, zero);
            if (end >= 0 && lane == 0)
                put_scale<KIND>(p, row_offset(p.rows, SCALE, index) + column * p.scale_step,
                                row_offset(p.rows, ZERO, index) + column * p.zero_step, scale, zero);
        }
    }
}

template <typename T, int U, int KIND, bool HELD>
__global__ void __launch_bounds__(ROW_THREADS, ROW_BLOCKS) quantize_row(const __grid_constant__ quantize_params p)
{
    __shared__ range part[32];
    const int64_t first = (int64_t)threadIdx.x * U, step = (int64_t)blockDim.x * U;
    pdl_launch_next();
    if (HELD && p.early && (int64_t)threadIdx.x * LINE < p.k * (int64_t)sizeof(T))
        prefetch((const char *)row_of_x<T>(p, row_split(p.rows, blockIdx.x)) + threadIdx.x * LINE);
    pdl_wait();
    for (int64_t row = blockIdx.x; row < p.count; row += gridDim.x) {
        const row_index index = row_split(p.rows, row);
        const T *x = row_of_x<T>(p, index);
        uint8_t *out = row_of_out(p, index);
        quantize_unit<T, U, KIND> unit[HELD_UNITS];
        range r = {0, 0};
        const auto fetch = [&](int64_t i) {
#pragma unroll
            for (int u = 0; u < HELD_UNITS; u++)
                unit[u].fetch(x, i + u * step, p.k);
        };
        if (HELD)
            fetch(first);
        for (int64_t i = first; i < p.k && !p.given; i += HELD_UNITS * step) {
            if (!HELD)
                fetch(i);
#pragma unroll
            for (int u = 0; u < HELD_UNITS; u++)
                unit[u].widen(r);
        }
        if (!p.given)
            r = range_block(r, part);
        const float scale = p.given ? get_scale(p) : scale_of<KIND>(p, r), zero = zero_of<KIND>(r, scale);
        const quotient by(scale);
        for (int64_t i = first; i < p.k; i += HELD_UNITS * step) {
            if (!HELD)
                fetch(i);
#pragma unroll
            for (int u = 0; u < HELD_UNITS; u++)
                unit[u].write(out, i + u * step, p.k, by, zero);
        }
        if (!p.given && threadIdx.x == 0)
            put_scale<KIND>(p, row_offset(p.rows, SCALE, index), row_offset(p.rows, ZERO, index), scale, zero);
    }
}

/* THREADS / (TILE / U) rows at a time. */
template <typename T, int U, int KIND>
__global__ void __launch_bounds__(THREADS, 3) quantize_tile(const __grid_constant__ quantize_params p)
{
    constexpr int LANES = TILE / U, ROWS = THREADS / LANES, UNITS = 8;
    __shared__ range part[32];
    const int lane = (int)threadIdx.x % LANES, own = (int)threadIdx.x / LANES;
    pdl_launch_next();
    pdl_wait();
    for (int64_t tile = blockIdx.x; tile < p.count; tile += gridDim.x) {
        const int64_t down = p.columns == 1 ? tile : divide(tile, p.columns), across = tile - down * p.columns;
        const int64_t i = across * TILE + lane * U, end = (across + 1) * TILE < p.k ? (across + 1) * TILE : p.k;
        const int64_t left = p.rows.count - down * TILE, rows = left < TILE ? left : TILE;
        quantize_unit<T, U, KIND> unit[UNITS];
        range r = {0, 0};
        const auto fetch = [&](int64_t from) {
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                const int64_t at = from + u * ROWS;
                const row_index index = {{down * TILE + (at < rows ? at : 0), 0, 0, 0}};
                unit[u].fetch(row_of_x<T>(p, index), i, at < rows ? end : 0);
            }
        };
        for (int64_t from = own; from < rows; from += UNITS * ROWS) {
            fetch(from);
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                unit[u].widen(r);
        }
        r = range_block(r, part);
        const float scale = scale_of<KIND>(p, r), zero = zero_of<KIND>(r, scale);
        const quotient by(scale);
        for (int64_t from = own; from < rows; from += UNITS * ROWS) {
            if (UNITS * ROWS < TILE)
                fetch(from);
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                const int64_t at = from + u * ROWS;
                const row_index index = {{down * TILE + (at < rows ? at : 0), 0, 0, 0}};
                unit[u].write(row_of_out(p, index), i, at < rows ? end : 0, by, zero);
            }
        }
        if (threadIdx.x == 0)
            put_scale<KIND>(p, down * p.tile_stride + across * p.scale_step, 0, scale, zero);
    }
}

template <int KIND>
__global__ void quantize_zero(const __grid_constant__ quantize_params p)
{
    pdl_launch_next();
    pdl_wait();
    put_scale<KIND>(p, 0, 0, 0, 0);
}
template <typename T, int U, int KIND>
__global__ void __launch_bounds__(ROW_THREADS) quantize_most(const __grid_constant__ quantize_params p)
{
    __shared__ range part[32];
    const int64_t step = (int64_t)blockDim.x * U;
    range r = {0, 0};
    pdl_launch_next();
    pdl_wait();
    for (int64_t row = blockIdx.x; row < p.count; row += gridDim.x) {
        const T *x = row_of_x<T>(p, row_split(p.rows, row));
        for (int64_t i = (int64_t)threadIdx.x * U; i < p.k; i += HELD_UNITS * step) {
            quantize_unit<T, U, KIND> unit[HELD_UNITS];
#pragma unroll
            for (int u = 0; u < HELD_UNITS; u++)
                unit[u].fetch(x, i + u * step, p.k);
#pragma unroll
            for (int u = 0; u < HELD_UNITS; u++)
                unit[u].widen(r);
        }
    }
    r = range_block(r, part);
    if (threadIdx.x != 0)
        return;
    const float scale = scale_of<KIND>(p, r);
    if (p.scale_dtype == ADZE_F32) {
        atomicMax((unsigned *)p.scale, __float_as_uint(scale));
        return;
    }
    const unsigned short bits =
        (unsigned short)(p.scale_dtype == ADZE_F16 ? twice(from_float<f16>(scale)) : twice(from_float<bf16>(scale)));
    unsigned short *to = (unsigned short *)p.scale, seen = 0;
    while (bits > seen) {
        const unsigned short before = atomicCAS(to, seen, bits);
        if (before == seen)
            break;
        seen = before;
    }
}

/* ---- The host ---- */

/* Threads of a block for a row of k elements: HELD_UNITS units each, or one where rows are few. */
template <int U>
static dim3 quantize_threads(int64_t k, bool few)
{
    const int64_t warps = ceil_div(k, U * (few ? 1 : HELD_UNITS) * 32);
    return dim3((unsigned)(warps < 1 ? 1 : warps < ROW_THREADS / 32 ? warps : ROW_THREADS / 32) * 32);
}

template <typename T, int U, int KIND>
static adze_status quantize_launch(const cuda_call &s, quantize_params p, int64_t group_rows)
{
    const int64_t units = ceil_div(p.group < p.k ? p.group : p.k, U), rows = p.rows.count;
    p.early = rows <= s.gpu.sm_count;
    const dim3 threads = quantize_threads<U>(p.k, p.early);
    const bool by_rows = p.columns == 1 && group_rows == 1;
    if (s.takes(WHOLE, group_rows == -1)) {
        ADZE_CHECK(launch(s, quantize_zero<KIND>, 1, dim3(1), 0, p));
        if (rows == 0 || p.k == 0)
            return ADZE_OK;
        const int64_t at_once = blocks_at_once(s.gpu, threads.x);
        p.count = rows;
        ADZE_CHECK(launch(s, quantize_most<T, U, KIND>, rows < at_once ? rows : at_once, threads, 0, p));
        p.given = true;
        return launch(s, quantize_row<T, U, KIND, false>, grid_for(rows, 1), threads, 0, p);
    }
    if (s.takes(TILES, group_rows == TILE)) {
        p.count = ceil_div(rows, TILE) * p.columns;
        return launch(s, quantize_tile<T, U, KIND>, grid_for(p.count, 1), dim3(THREADS), 0, p);
    }
    if (s.takes(IN_LANES, group_rows == 1 && units <= 32 * LANE_UNITS<T, U>)) {
        p.lanes = 1;
        while (p.lanes < 32 && p.lanes * LANE_UNITS<T, U> < units)
            p.lanes *= 2;
        p.count = rows * p.columns;
        p.by_columns = divisor_of(p.columns);
        return launch(s, quantize_group<T, U, KIND>, grid_for(p.count, THREADS / p.lanes * LANE_GROUPS<T, U>),
                      dim3(THREADS), 0, p);
    }
    p.count = rows;
    if (s.takes(IN_BLOCK, by_rows && units <= ROW_THREADS * HELD_UNITS))
        return launch(s, quantize_row<T, U, KIND, true>, grid_for(rows, 1), threads, 0, p);
    return s.takes(TWICE, by_rows) ? launch(s, quantize_row<T, U, KIND, false>, grid_for(rows, 1), threads, 0, p)
                                   : ADZE_NO_KERNEL;
}
template <typename T, int KIND>
static adze_status quantize_launch_to(const cuda_call &s, const quantize_params &p, int64_t group_rows, bool aligned)
{
    return aligned ? quantize_launch<T, VEC<T>, KIND>(s, p, group_rows)
                   : quantize_launch<T, 2, KIND>(s, p, group_rows);
}
template <typename T>
static adze_status quantize_launch_as(const cuda_call &s, const quantize_params &p, int64_t group_rows, bool aligned,
                                      int kind)
{
    switch (kind) {
    case TO_F8: return quantize_launch_to<T, TO_F8>(s, p, group_rows, aligned);
    case TO_I8: return quantize_launch_to<T, TO_I8>(s, p, group_rows, aligned);
    case TO_U4: return quantize_launch_to<T, TO_U4>(s, p, group_rows, aligned);
    default: return quantize_launch_to<T, TO_U4_POINTS>(s, p, group_rows, aligned);
    }
}

/* Whether the results of a 16-byte vector of x can be stored at once. */
static bool quantize_aligned(const adze_quantize_args *a, int64_t k)
{
    const int64_t vector = 16 / (int64_t)adze_dtype_size(a->x.dtype),
                  bytes = a->dtype == ADZE_U8 ? vector / 2 : vector;
    bool aligned = rows_aligned(&a->x, k) && (uintptr_t)a->out.data % bytes == 0;
    for (int d = 0; d < a->out.rank - 1; d++)
        aligned = aligned && (a->out.shape[d] == 1 || a->out.stride[d] % bytes == 0);
    return aligned;
}

static adze_status quantize_run(const cuda_call &s, const adze_quantize_args *a)
{
    const int last = a->x.rank - 1;
    const int64_t k = a->x.shape[last], group_rows = a->group_rows ? a->group_rows : 1;
    /* A scale of rows is made one of groups, of which a row has one. */
    adze_tensor scale = a->scale, zero = a->zero;
    for (adze_tensor *t : {&scale, &zero})
        if (t->dtype && !a->group && last > 0) {
            t->shape[t->rank] = t->stride[t->rank] = 1;
            t->rank++;
        }
    const bool own = group_rows == 1; /* a row of scale for each of x */
    const adze_tensor none = {};
    const adze_tensor *const tensors[TENSORS] = {&a->x, &a->out, own ? &scale : &none, own ? &zero : &none};
    quantize_params p = {};
    adze_rows_init(&p.rows, &a->x, TENSORS, tensors);
    p.x = a->x.data, p.out = a->out.data, p.scale = a->scale.data, p.zero = a->zero.data;
    p.k = k;
    p.group = a->group ? a->group : k > 0 ? k : 1;
    p.columns = a->group ? ceil_div(k, p.group) : 1;
    p.scale_step = scale.stride[scale.rank - 1];
    p.zero_step = a->zero_points ? zero.stride[zero.rank - 1] : 0;
    p.tile_stride = a->scale.stride[0];
    p.scale_dtype = a->scale.dtype;
    const int kind = a->dtype == ADZE_F8E4M3 ? TO_F8
                     : a->dtype == ADZE_I8   ? TO_I8
                     : a->zero_points        ? TO_U4_POINTS
                                             : TO_U4;
    if (group_rows != -1 && (p.rows.count == 0 || p.columns == 0))
        return ADZE_OK;
    const bool aligned = quantize_aligned(a, k);
    const int form = a->x.dtype | aligned << 4 | a->group << 8 | a->dtype << 20;
    return s.tuned(form, p.rows.count, k, group_rows, 0, [&] {
        switch (a->x.dtype) {
        case ADZE_F32: return quantize_launch_as<float>(s, p, group_rows, aligned, kind);
        case ADZE_F16: return quantize_launch_as<f16>(s, p, group_rows, aligned, kind);
        default: return quantize_launch_as<bf16>(s, p, group_rows, aligned, kind);
        }
    });
}
CUDA_ENTRIES(quantize, VARIANTS, quantize_run)
