/* gated_add on CUDA.

   A block has a piece of a row, or several short rows: blockDim.x threads of a row, blockDim.y rows. Each thread has
   UNITS units of W elements, blockDim.x apart, and issues all loads before it uses the first. */
#include "launch.cuh"
#include "rows.cuh"
#include "unit.cuh"

enum { X, RESIDUAL, OUT, GATE, GATE_TABLE, TENSORS };
constexpr int THREADS = 128, GENERAL_THREADS = 256; /* of a block, at most: of vectors; of single elements */

template <typename ROWS>
struct gated_params {
    const void *x, *residual, *gate, *table; /* table: NULL when there is none */
    void *out;
    int64_t units;   /* of a row */
    uint32_t pieces; /* of a row */
    bool gate_f32, table_f32, steps;
    ROWS rows;
};
template <int W>
using gated_params_of = gated_params<rows_for<W, TENSORS>>;

/* W elements of T or of float, fetched now and unpacked later. */
template <typename T, int W>
struct gate_unit {
    unit<T, W> own;
    unit<float, W == 1 ? 1 : 4> wide[W == 1 ? 1 : W / 4];
    __device__ __forceinline__ void fetch(const void *p, bool is_f32, int64_t at)
    {
        if (!is_f32) {
            own.fetch((const T *)p + at);
            return;
        }
#pragma unroll
        for (int i = 0; i < (W == 1 ? 1 : W / 4); i++)
            wide[i].fetch((const float *)p + at + i * 4);
    }
    __device__ __forceinline__ void get(bool is_f32, float (&f)[W]) const
    {
        if (!is_f32) {
            own.get(f);
            return;
        }
#pragma unroll
        for (int i = 0; i < (W == 1 ? 1 : W / 4); i++) {
            float part[W == 1 ? 1 : 4];
            wide[i].get(part);
#pragma unroll
            for (int j = 0; j < (W == 1 ? 1 : 4); j++)
                f[i * 4 + j] = part[j];
        }
    }
};

/* The product is a float before the sum, as the CPU and torch have it: it may not become one instruction with it. */
template <typename T, int W>
__device__ __forceinline__ void gated(bool steps, bool table, const float (&x)[W], const float (&residual)[W],
                                      float (&gate)[W], const float (&more)[W])
{
#pragma unroll
    for (int j = 0; j < W; j++) {
        if (table)
            gate[j] += more[j];
        if (table && steps)
            gate[j] = round_to<T>(gate[j]);
        gate[j] = __fmul_rn(gate[j], x[j]);
        if (steps)
            gate[j] = round_to<T>(gate[j]);
        gate[j] = __fadd_rn(gate[j], residual[j]);
    }
}

/* TABLE, WIDE: there may be a table, or a gate or table of float where x is not. SINGLE: a block has one row, or a
   piece of it, whose address is then the same for all its threads. */
template <typename T, int W, int UNITS, bool TABLE, bool WIDE, bool SINGLE>
__global__ void __launch_bounds__(W == 1 ? GENERAL_THREADS : THREADS)
    gated_rows(const __grid_constant__ gated_params_of<W> p)
{
    const uint32_t group = p.rows.count == 1 ? 0 : blockIdx.x / p.pieces;
    const int64_t r = SINGLE ? (int64_t)group : (int64_t)group * blockDim.y + threadIdx.y;
    const int64_t piece = (int64_t)(blockIdx.x - group * p.pieces) * (blockDim.x * UNITS);
    const bool valid = r < p.rows.count, table = TABLE && p.table;
    const bool gate_f32 = WIDE && p.gate_f32, table_f32 = WIDE && p.table_f32;
    int64_t start[TENSORS];
    p.rows.locate(valid ? r : 0, start);
    const T *x = (const T *)p.x + start[X] + piece * W;
    const T *residual = (const T *)p.residual + start[RESIDUAL] + piece * W;
    T *out = (T *)p.out + start[OUT] + piece * W;
    const int64_t gate_at = start[GATE] + piece * W, table_at = start[GATE_TABLE] + piece * W;
    const int units = p.units - piece < INT32_MAX ? (int)(p.units - piece) : INT32_MAX;
    pdl_launch_next();
    /* The kernel before this one has made x, but the residual is older, and may have left the cache. */
    if (W > 1 && threadIdx.x == 0)
        prefetch_row(residual, min(units, UNITS * (int)blockDim.x));
    pdl_wait();
    if (!valid)
        return;
    unit<T, W> a[UNITS] = {}, b[UNITS] = {};
    gate_unit<T, W> g[UNITS] = {}, m[UNITS] = {};
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int at = (int)threadIdx.x + u * (int)blockDim.x;
        if (at < units) {
            a[u].fetch(x + at * W);
            b[u].fetch(residual + at * W);
            g[u].fetch(p.gate, gate_f32, gate_at + at * W);
            if (table)
                m[u].fetch(p.table, table_f32, table_at + at * W);
        }
    }
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int at = (int)threadIdx.x + u * (int)blockDim.x;
        float xs[W], residuals[W], gates[W], more[W];
        g[u].get(gate_f32, gates);
        m[u].get(table_f32, more);
        a[u].get(xs);
        b[u].get(residuals);
        gated<T, W>(p.steps, table, xs, residuals, gates, more);
        if (at < units)
            store<T, W>(out + at * W, gates);
    }
}

template <typename T, int W, int UNITS, bool TABLE, bool WIDE>
static adze_status gated_launch(adze_stream s, gated_params_of<W> p, int most)
{
    const unit_split split = split_units(p.units, UNITS, p.rows.count, most);
    p.pieces = (uint32_t)split.pieces;
    const auto kernel =
        split.rows == 1 ? gated_rows<T, W, UNITS, TABLE, WIDE, true> : gated_rows<T, W, UNITS, TABLE, WIDE, false>;
    return launch("gated_add", s, kernel, split.blocks, split.block, 0, p);
}

template <typename T>
static adze_status gated_launch_as(adze_stream s, const gated_params_of<1> &g, bool aligned)
{
    constexpr bool half = sizeof(T) < 4;
    if (!aligned || !rows_are_near(g.rows))
        return gated_launch<T, 1, 4, true, half>(s, g, GENERAL_THREADS);
    const gated_params_of<VEC<T>> p = {g.x,
                                       g.residual,
                                       g.gate,
                                       g.table,
                                       g.out,
                                       g.units / VEC<T>,
                                       0,
                                       g.gate_f32,
                                       g.table_f32,
                                       g.steps,
                                       rows_near(g.rows, {X, RESIDUAL, OUT, GATE, GATE_TABLE})};
    if (p.gate_f32 || p.table_f32)
        return p.table ? gated_launch<T, VEC<T>, 1, true, half>(s, p, THREADS)
                       : gated_launch<T, VEC<T>, 1, false, half>(s, p, THREADS);
    return p.table ? gated_launch<T, VEC<T>, 1, true, false>(s, p, THREADS)
                   : gated_launch<T, VEC<T>, 1, false, false>(s, p, THREADS);
}

extern "C" adze_status adze_gated_add_cuda(adze_stream stream, const void *args)
{
    const adze_gated_add_args *a = (const adze_gated_add_args *)args;
    const adze_tensor *const tensors[TENSORS] = {&a->x, &a->residual, &a->out, &a->gate, &a->gate_table};
    const int64_t dim = a->x.shape[a->x.rank - 1];
    gated_params_of<1> p = {};
    p.units = dim;
    adze_rows_init(&p.rows, &a->x, TENSORS, tensors);
    if (dim == 0 || p.rows.count == 0)
        return ADZE_OK;
    bool aligned = true;
    for (int t = 0; t < TENSORS; t++)
        aligned = aligned && rows_aligned(tensors[t], dim);
    aligned = aligned && dim % (16 / (int64_t)adze_dtype_size(a->x.dtype)) == 0;
    p.x = a->x.data, p.residual = a->residual.data, p.out = a->out.data, p.gate = a->gate.data;
    p.table = a->gate_table.dtype ? a->gate_table.data : nullptr;
    p.gate_f32 = a->gate.dtype == ADZE_F32 && a->x.dtype != ADZE_F32;
    p.table_f32 = a->gate_table.dtype == ADZE_F32 && a->x.dtype != ADZE_F32;
    p.steps = a->rounding & ADZE_ROUND_STEPS;
    switch (a->x.dtype) {
    case ADZE_F32: return gated_launch_as<float>(stream, p, aligned);
    case ADZE_F16: return gated_launch_as<f16>(stream, p, aligned);
    default: return gated_launch_as<bf16>(stream, p, aligned);
    }
}
