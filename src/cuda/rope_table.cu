/* rope_table on CUDA: a thread has W neighbouring frequencies of a position. Sine and cosine are those of
   cpu/rope_table.c, with its bound of 1.25 units. */
#include "launch.cuh"
#include "rows.cuh"
#include "sincos.h"
#include "unit.cuh"

enum { TABLE_THREADS = 128, TABLE_W = 4 };
enum { POS, COS, SIN, TABLE_TENSORS };

struct table_params {
    const void *pos, *freq;
    const int32_t *axis; /* NULL: all 0 */
    void *cos, *sin;
    adze_rows rows;
    int64_t n;
    divisor pieces; /* n / W */
    float scale;
    int32_t pos_dtype, freq_dtype, columns, double_angle;
    uint32_t axes;
};

/* The nearest whole number of quarter turns comes from a sum whose last bit is worth 1: double conversions and
   rounding instructions have a quarter of the rate of a sum. Angles below the limit are below 2^51 by far. */
__device__ __forceinline__ void table_sincos(double angle, float *cosine, float *sine)
{
    constexpr double WHOLE = 0x1.8p52;
    const double shifted = __dadd_rn(__dmul_rn(angle, SINCOS_QUARTERS), WHOLE), k = __dsub_rn(shifted, WHOLE);
    const double rest = ((angle - k * SINCOS_PI_2A) - k * SINCOS_PI_2B) - k * SINCOS_PI_2C;
    const float r =
        fabsf((float)angle) <= SINCOS_LIMIT ? (float)(rest - k * SINCOS_PI_2D) : __int_as_float(0x7fffffff);
    const float t = r * r;
    const float s = r + (r * t) * (SINCOS_S0 + t * (SINCOS_S1 + t * SINCOS_S2));
    const float c = 1 - (0.5f * t - (t * t) * (SINCOS_C0 + t * (SINCOS_C1 + t * SINCOS_C2)));
    const int q = __double2loint(shifted);
    const float s_turned = q & 1 ? c : s, c_turned = q & 1 ? s : c;
    *sine = q & 2 ? -s_turned : s_turned;
    *cosine = (q + 1) & 2 ? -c_turned : c_turned;
}

/* The positions of W frequencies, and the frequencies. The dtype is a branch around all W loads, so that they are in
   flight together. */
template <typename P, int W, bool AXES>
__device__ __forceinline__ void table_positions(const table_params &p, int64_t at, int64_t i, double (&pos)[W])
{
    const P *const from = (const P *)p.pos + at;
    uint32_t axis[W] = {};
#pragma unroll
    for (int j = 0; j < W && AXES; j++)
        axis[j] = (uint32_t)p.axis[i + j];
        /* A negative axis is out of range too; out of range gives NaN. */
#pragma unroll
    for (int j = 0; j < W; j++)
        pos[j] = (double)from[AXES ? min(axis[j], p.axes - 1) : 0];
#pragma unroll
    for (int j = 0; j < W && AXES; j++)
        pos[j] = axis[j] < p.axes ? pos[j] : (double)__int_as_float(0x7fffffff);
}
template <typename F, int W>
__device__ __forceinline__ void table_frequencies(const table_params &p, int64_t i, double (&freq)[W])
{
#pragma unroll
    for (int j = 0; j < W; j++)
        freq[j] = (double)((const F *)p.freq)[i + j];
}

/* N neighbouring elements of a table, in stores of 16 bytes at most. */
template <typename T, int N>
__device__ __forceinline__ void table_put(T *p, const float (&f)[N])
{
    if constexpr (sizeof(T) == 4) {
        store_floats(p, f);
    } else {
        unit<T, N> out;
        out.set(f);
        out.put(p);
    }
}
template <typename T, int W>
__device__ __forceinline__ void table_store(const table_params &p, T *row, int64_t i, const float (&f)[W])
{
    if (p.columns != ADZE_TABLE_PAIRS) {
        table_put<T, W>(row + i, f);
        if (p.columns == ADZE_TABLE_HALVES)
            table_put<T, W>(row + p.n + i, f);
        return;
    }
    float twice[2 * W];
#pragma unroll
    for (int j = 0; j < 2 * W; j++)
        twice[j] = f[j / 2];
    if constexpr (W == 1) { /* a pair may be off its alignment */
        table_put<T, 1>(row + 2 * i, f);
        table_put<T, 1>(row + 2 * i + 1, f);
    } else {
        table_put<T, 2 * W>(row + 2 * i, twice);
    }
}

/* AXES: each frequency has an axis of the position. */
template <typename T, int W, bool AXES>
__global__ void __launch_bounds__(TABLE_THREADS) table_rows(const __grid_constant__ table_params p)
{
    const int64_t pieces = p.pieces.by, count = p.rows.count * pieces;
    pdl_launch_next();
    pdl_wait();
    for (int64_t item = blockIdx.x * (int64_t)TABLE_THREADS + threadIdx.x; item < count;
         item += gridDim.x * (int64_t)TABLE_THREADS) {
        const int64_t row = count <= 0x7fffffff ? divide((uint32_t)item, p.pieces) : divide(item, pieces);
        const int64_t i = (item - row * pieces) * W;
        const row_index index = row_split(p.rows, row);
        const int64_t pos_at = row_offset(p.rows, POS, index);
        double pos[W], freq[W];
        if (p.freq_dtype == ADZE_F64)
            table_frequencies<double>(p, i, freq);
        else
            table_frequencies<float>(p, i, freq);
        if (p.pos_dtype == ADZE_I64)
            table_positions<int64_t, W, AXES>(p, pos_at, i, pos);
        else if (p.pos_dtype == ADZE_I32)
            table_positions<int32_t, W, AXES>(p, pos_at, i, pos);
        else
            table_positions<float, W, AXES>(p, pos_at, i, pos);
        float cosine[W], sine[W];
#pragma unroll
        for (int j = 0; j < W; j++) {
            const double angle = pos[j] * freq[j];
            table_sincos(p.double_angle ? angle : (double)(float)angle, &cosine[j], &sine[j]);
            cosine[j] *= p.scale;
            sine[j] *= p.scale;
        }
        table_store<T, W>(p, (T *)p.cos + row_offset(p.rows, COS, index), i, cosine);
        table_store<T, W>(p, (T *)p.sin + row_offset(p.rows, SIN, index), i, sine);
    }
}

enum { TABLE_VECTOR, TABLE_SINGLE };
constexpr adze_variant TABLE_VARIANTS[] = {
    {"vector", "aligned tables, a multiple of 4 frequencies"},
    {"single", "every call"},
    {NULL, NULL},
};

template <typename T>
static adze_status table_launch(const cuda_call &s, table_params p, bool aligned)
{
    const auto wide = p.axis ? table_rows<T, TABLE_W, true> : table_rows<T, TABLE_W, false>;
    const auto single = p.axis ? table_rows<T, 1, true> : table_rows<T, 1, false>;
    const bool vectors = s.takes(TABLE_VECTOR, aligned);
    if (!vectors && !s.takes(TABLE_SINGLE, true))
        return ADZE_NO_KERNEL;
    p.pieces = divisor_of(vectors ? p.n / TABLE_W : p.n);
    return launch(s, vectors ? wide : single, grid_for(p.rows.count * p.pieces.by, TABLE_THREADS),
                  dim3(TABLE_THREADS), 0, p);
}

static adze_status rope_table_run(const cuda_call &s, const adze_rope_table_args *a)
{
    const adze_tensor *const tensors[TABLE_TENSORS] = {&a->pos, &a->cos, &a->sin};
    table_params p = {};
    adze_rows_init(&p.rows, &a->pos, TABLE_TENSORS, tensors);
    p.n = a->freq.shape[0];
    if (p.n == 0 || p.rows.count == 0)
        return ADZE_OK;
    p.pos = a->pos.data;
    p.freq = a->freq.data;
    p.axis = a->axis.dtype ? (const int32_t *)a->axis.data : NULL;
    p.cos = a->cos.data;
    p.sin = a->sin.data;
    p.scale = a->scale != 0 ? a->scale : 1;
    p.pos_dtype = a->pos.dtype;
    p.freq_dtype = a->freq.dtype;
    p.columns = a->columns;
    p.double_angle = a->double_angle;
    p.axes = (uint32_t)a->pos.shape[a->pos.rank - 1];
    const int64_t width = a->cos.shape[a->cos.rank - 1];
    const bool aligned = p.n % TABLE_W == 0 && rows_aligned(&a->cos, width) && rows_aligned(&a->sin, width);
    return s.tuned(a->cos.dtype | a->columns << 4 | aligned << 8, p.rows.count, p.n, 0, 0, [&] {
        switch (a->cos.dtype) {
        case ADZE_F32: return table_launch<float>(s, p, aligned);
        case ADZE_F16: return table_launch<f16>(s, p, aligned);
        default: return table_launch<bf16>(s, p, aligned);
        }
    });
}
CUDA_ENTRIES(rope_table, TABLE_VARIANTS, rope_table_run)
