/* dequantize on CUDA.

   A unit is W neighbouring elements of a row of out: the 16 bytes that one store writes, or a single element where
   rows are at any address. A lane has UNITS of them, 32 apart, and reads the bytes of w for each in one load, of 2 to
   8 bytes: so the stores of a warp are contiguous, and most of the bytes are stored. All loads are issued before the
   first store. A warp has 32 * UNITS units of a row, its tile, which begins with a group of columns:
   a tile has whole groups, and a unit lies in one. A block has a piece of a row, or several short rows: blockDim.x
   threads, of whole warps, per row, and blockDim.y rows. */
#include "launch.cuh"
#include "quantised.cuh"
#include "rows.cuh"
#include "unit.cuh"

constexpr int THREADS = 128; /* of a block, at most */

enum { VECTORS, ANY };
constexpr adze_variant VARIANTS[] = {
    {"vectors", "aligned rows, 16-byte vectors of out"},
    {"any", "rows at any address, one element at a time"},
    {NULL, NULL},
};

struct dequantize_params {
    const uint8_t *w;
    const char *scale;
    const uint8_t *zero; /* NULL: 8 */
    void *out;
    int64_t rows, units;                                     /* units: of a row */
    int64_t w_stride, out_stride, scale_stride, zero_stride; /* in elements; w's are bytes */
    uint32_t pieces;                                         /* of a row */
    uint32_t first_wave;                                     /* blocks that prefetch */
    int32_t group_shift, row_shift; /* columns and rows of a group, as powers of two; of whole rows 63, */
    int32_t tile_shift;             /* and for the columns of a tile, which are few, 31 */
    int32_t scale_dtype;
};

/* The floats of the low two of 4 bytes f8e4m3. Both are exact in f16, NaN included. */
__device__ __forceinline__ void f8_two_floats(uint32_t w, float *f)
{
#if __CUDA_ARCH__ >= 890
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((uint16_t)w));
    const float2 both = __half22float2(*reinterpret_cast<const __half2 *>(&pair));
    f[0] = both.x, f[1] = both.y;
#else
    f[0] = f8_to_float(w), f[1] = f8_to_float(w >> 8);
#endif
}

/* The bytes of w that make W elements, and these: less the zero, times the scale. A whole number put into the low
   bits of 2^23 is that much more than it, and the difference with 2^23 + zero is exact. */
template <weight_format F, int W>
struct stored_unit {
    static constexpr int BYTES = F == OF_U4 ? (W + 1) / 2 : W;
    uint32_t word[(BYTES + 3) / 4];
    __device__ __forceinline__ void fetch(const uint8_t *p)
    {
        if constexpr (BYTES == 8) {
            const uint2 v = *reinterpret_cast<const uint2 *>(p);
            word[0] = v.x, word[1] = v.y;
        } else if constexpr (BYTES == 4) {
            word[0] = *reinterpret_cast<const uint32_t *>(p);
        } else if constexpr (BYTES == 2) {
            word[0] = *reinterpret_cast<const uint16_t *>(p);
        } else {
            word[0] = *p;
        }
    }
    /* shift: 4 for a single element of 4 bits in an odd column. */
    __device__ __forceinline__ void get(float zero, float scale, unsigned shift, float (&f)[W]) const
    {
        const float less = 0x1p23f + zero;
#pragma unroll
        for (int j = 0; j < W; j++) {
            if constexpr (F == OF_U4) {
                const uint32_t at = W == 1 ? word[0] >> shift : word[j / 8] >> (4 * (j % 8));
                f[j] = __uint_as_float(and_or<0xfu, 0x4b000000u>(at)) - less;
            } else if constexpr (F == OF_F8 && W == 1) {
                f[j] = f8_to_float(word[0]);
            } else if constexpr (F == OF_F8) {
                if (j % 2 == 0)
                    f8_two_floats(word[j / 4] >> (8 * (j % 4)), f + j);
            } else if constexpr (W == 1) {
                f[j] = (float)(int8_t)word[0];
            } else if (j % 4 == 0) {
                i8_floats(word[j / 4], f + j);
            }
        }
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] *= scale;
    }
};

/* The scales of a lane's units, at these groups of their row. */
template <int UNITS>
__device__ __forceinline__ void load_scales(const void *row, int dtype, const unsigned (&group)[UNITS],
                                            float (&scale)[UNITS])
{
    if (dtype == ADZE_F32) {
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            scale[u] = ((const float *)row)[group[u]];
        return;
    }
    unsigned short bits[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        bits[u] = ((const unsigned short *)row)[group[u]];
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        scale[u] = dtype == ADZE_F16 ? to_float(__ushort_as_half(bits[u])) : to_float(__ushort_as_bfloat16(bits[u]));
}

template <typename T, weight_format F, int W, int UNITS>
__global__ void __launch_bounds__(THREADS) dequantize_rows(const __grid_constant__ dequantize_params p)
{
    constexpr int BYTES = stored_unit<F, W>::BYTES, TILE = 32 * UNITS;
    constexpr bool HALF = F == OF_U4 && W == 1; /* two units in a byte */
    static_assert(TILE * W % 128 == 0, "a tile has whole groups");
    const unsigned lane = threadIdx.x % 32;
    const uint32_t block = blockIdx.x / p.pieces, piece = blockIdx.x - block * p.pieces;
    const int64_t row = (int64_t)block * blockDim.y + threadIdx.y, group_row = row >> p.row_shift;
    const int64_t first = (int64_t)piece * (blockDim.x * UNITS) + threadIdx.x / 32 * TILE; /* unit of the tile */
    const int64_t first_group = first * W >> p.group_shift;
    const int units = (int)min(p.units - first, (int64_t)TILE);
    const uint8_t *const w = p.w + row * p.w_stride + (HALF ? first / 2 : first * BYTES);
    pdl_launch_next();
    if (W > 1 && lane == 0 && blockIdx.x < p.first_wave && row < p.rows)
        prefetch_bytes(w, units * BYTES);
    pdl_wait();
    if (row >= p.rows || (int)lane >= units)
        return;
    const uint8_t *const own = w + (HALF ? lane / 2 : lane * BYTES);
    stored_unit<F, W> stored[UNITS];
    unsigned group[UNITS], zero[UNITS];
    float scale[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        if ((int)lane + u * 32 < units)
            stored[u].fetch(own + (HALF ? u * 16 : u * 32 * BYTES));
        group[u] = min(lane + u * 32, (unsigned)units - 1) * W >> p.tile_shift;
        zero[u] = 8;
    }
    if (F == OF_U4 && p.zero) {
        const uint8_t *const zeros = p.zero + group_row * p.zero_stride + first_group;
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            zero[u] = zeros[group[u]];
    }
    load_scales(p.scale + (group_row * p.scale_stride + first_group) * (p.scale_dtype == ADZE_F32 ? 4 : 2),
                p.scale_dtype, group, scale);
    T *const out = (T *)p.out + row * p.out_stride + first * W + lane * W;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        if ((int)lane + u * 32 >= units)
            break;
        float f[W];
        unit<T, W> result;
        stored[u].get((float)zero[u], scale[u], lane % 2 * 4, f);
        result.set(f);
        result.put(out + u * 32 * W);
    }
}

/* ---- The host ---- */

template <typename T, weight_format F, int W>
static adze_status dequantize_launch(const cuda_call &s, dequantize_params p, int64_t k)
{
    constexpr int UNITS = W == 1 ? 8 : 32 / W;
    p.units = k / W;
    const unit_split split = split_units(ceil_div(p.units, 32 * UNITS) * 32 * UNITS, UNITS, p.rows, THREADS);
    p.pieces = (uint32_t)split.pieces;
    p.first_wave = (uint32_t)blocks_at_once(s.gpu, split.block.x * split.block.y);
    return launch(s, dequantize_rows<T, F, W, UNITS>, split.blocks, split.block, 0, p);
}

/* Whether a unit of w is aligned to its bytes. */
static bool stored_aligned(const adze_tensor *w, int64_t bytes)
{
    return (uintptr_t)w->data % bytes == 0 && (w->shape[0] == 1 || w->stride[0] % bytes == 0);
}

template <typename T, weight_format F>
static adze_status dequantize_launch_of(const cuda_call &s, const dequantize_params &p, const adze_dequantize_args *a)
{
    const int64_t k = a->out.shape[1];
    const bool aligned = rows_aligned(&a->out, k) && stored_aligned(&a->w, stored_unit<F, VEC<T>>::BYTES);
    const int form = a->out.dtype | a->w.dtype << 4 | aligned << 8 | (p.zero != nullptr) << 9;
    return s.tuned(form, p.rows, k, a->group, 0, [&] {
        if (s.takes(VECTORS, aligned))
            return dequantize_launch<T, F, VEC<T>>(s, p, k);
        return s.takes(ANY, true) ? dequantize_launch<T, F, 1>(s, p, k) : ADZE_NO_KERNEL;
    });
}
template <typename T>
static adze_status dequantize_launch_as(const cuda_call &s, const dequantize_params &p, const adze_dequantize_args *a)
{
    switch (a->w.dtype) {
    case ADZE_I8: return dequantize_launch_of<T, OF_I8>(s, p, a);
    case ADZE_F8E4M3: return dequantize_launch_of<T, OF_F8>(s, p, a);
    default: return dequantize_launch_of<T, OF_U4>(s, p, a);
    }
}

static adze_status dequantize_run(const cuda_call &s, const adze_dequantize_args *a)
{
    dequantize_params p = {};
    p.rows = a->out.shape[0];
    if (p.rows == 0 || a->out.shape[1] == 0)
        return ADZE_OK;
    const auto stride = [](const adze_tensor &t) { return t.rank == 1 && t.shape[0] == 1 ? 0 : t.stride[0]; };
    p.w = (const uint8_t *)a->w.data, p.scale = (const char *)a->scale.data, p.out = a->out.data;
    p.zero = a->zero.dtype ? (const uint8_t *)a->zero.data : nullptr;
    p.w_stride = a->w.stride[0], p.out_stride = a->out.stride[0];
    p.scale_stride = stride(a->scale), p.zero_stride = stride(a->zero);
    p.group_shift = a->group == 32 ? 5 : a->group == 64 ? 6 : a->group == 128 ? 7 : 63;
    p.tile_shift = p.group_shift < 31 ? p.group_shift : 31;
    p.row_shift = a->group_rows == 128 ? 7 : 0;
    p.scale_dtype = a->scale.dtype;
    switch (a->out.dtype) {
    case ADZE_F32: return dequantize_launch_as<float>(s, p, a);
    case ADZE_F16: return dequantize_launch_as<f16>(s, p, a);
    default: return dequantize_launch_as<bf16>(s, p, a);
    }
}
CUDA_ENTRIES(dequantize, VARIANTS, dequantize_run)
