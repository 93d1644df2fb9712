/* gated_add on CUDA.

   A block has a piece of a row, or several short rows: blockDim.x threads of a row, blockDim.y rows. gated_rows, for
   aligned rows: a thread has a vector and issues all loads before it uses the first. gated_any, for any. */
#include "launch.cuh"
#include "rows.cuh"
#include "unaligned.cuh"
#include "unit.cuh"

enum { X, RESIDUAL, OUT, GATE, GATE_TABLE, TENSORS };
constexpr int THREADS = 128, ANY_THREADS = 256; /* of a block, at most */

template <typename ROWS>
struct gated_params {
    const void *x, *residual, *gate, *table; /* table: NULL when there is none */
    void *out;
    int64_t dim;     /* elements of a row */
    int64_t units;   /* vectors of a row, at most */
    uint32_t pieces; /* of a row */
    uint32_t ask;    /* the first blocks, which ask ahead for what they read */
    bool gate_f32, table_f32, steps;
    ROWS rows;
};
typedef gated_params<near_rows<TENSORS>> gated_near;
typedef gated_params<far_rows<TENSORS>> gated_far;

/* A vector's elements of T or of float, fetched now and unpacked later. */
template <typename T>
struct gate_unit {
    static constexpr int W = VEC<T>;
    packed<T> own;
    packed<float> wide[W / 4];
    __device__ __forceinline__ void fetch(const void *p, bool is_f32, int64_t at)
    {
        if (!is_f32) {
            own = load_packed((const T *)p + at);
            return;
        }
#pragma unroll
        for (int i = 0; i < W / 4; i++)
            wide[i] = load_packed((const float *)p + at + i * 4);
    }
    __device__ __forceinline__ void get(bool is_f32, float (&f)[W]) const
    {
        if (!is_f32) {
            own.get(f);
            return;
        }
#pragma unroll
        for (int i = 0; i < W / 4; i++) {
            float part[4];
            wide[i].get(part);
#pragma unroll
            for (int j = 0; j < 4; j++)
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

/* The row of a thread, and the vector with which its block begins. */
template <typename ROWS>
__device__ __forceinline__ int64_t gated_row(const gated_params<ROWS> &p, bool single, int64_t *piece)
{
    const uint32_t group = p.rows.count == 1 ? 0 : blockIdx.x / p.pieces;
    *piece = (int64_t)(blockIdx.x - group * p.pieces) * blockDim.x;
    return single ? (int64_t)group : (int64_t)group * blockDim.y + threadIdx.y;
}

/* TABLE, WIDE: there may be a table, or a gate or table of float where x is not. SINGLE: a block has one row, or a
   piece of it, whose address is then the same for all its threads. */
template <typename T, bool TABLE, bool WIDE, bool SINGLE>
__global__ void __launch_bounds__(THREADS) gated_rows(const __grid_constant__ gated_near p)
{
    constexpr int W = VEC<T>;
    int64_t piece, start[TENSORS];
    const int64_t r = gated_row(p, SINGLE, &piece);
    const bool valid = r < p.rows.count, table = TABLE && p.table;
    const bool gate_f32 = WIDE && p.gate_f32, table_f32 = WIDE && p.table_f32;
    p.rows.locate(valid ? r : 0, start);
    const T *x = (const T *)p.x + start[X] + piece * W;
    const T *residual = (const T *)p.residual + start[RESIDUAL] + piece * W;
    T *out = (T *)p.out + start[OUT] + piece * W;
    const int64_t gate_at = start[GATE] + piece * W, table_at = start[GATE_TABLE] + piece * W;
    const int units = p.units - piece < INT32_MAX ? (int)(p.units - piece) : INT32_MAX;
    pdl_launch_next();
    /* The kernel before this one has made x, but the residual is older, and may have left the cache. */
    if (threadIdx.x == 0)
        prefetch_row(residual, min(units, (int)blockDim.x));
    pdl_wait();
    const int at = (int)threadIdx.x;
    if (!valid || at >= units)
        return;
    const packed<T> a = load_packed(x + at * W), b = load_packed(residual + at * W);
    gate_unit<T> g, m = {};
    g.fetch(p.gate, gate_f32, gate_at + at * W);
    if (table)
        m.fetch(p.table, table_f32, table_at + at * W);
    float xs[W], residuals[W], gates[W], more[W];
    g.get(gate_f32, gates);
    m.get(table_f32, more);
    a.get(xs);
    b.get(residuals);
    gated<T, W>(p.steps, table, xs, residuals, gates, more);
    store<T, W>(out + at * W, gates);
}

/* W elements from `at` on. */
template <typename T, int W, typename ROWS>
__device__ __forceinline__ void gated_some(const gated_params<ROWS> &p, const int64_t (&start)[TENSORS], int64_t at)
{
    float xs[W], residuals[W], gates[W], more[W] = {};
    any_load((const T *)p.x + start[X] + at, xs);
    any_load((const T *)p.residual + start[RESIDUAL] + at, residuals);
    any_load_param<T, W>(p.gate, p.gate_f32, start[GATE] + at, gates);
    if (p.table)
        any_load_param<T, W>(p.table, p.table_f32, start[GATE_TABLE] + at, more);
    gated<T, W>(p.steps, p.table, xs, residuals, gates, more);
    any_store<T, W>((T *)p.out + start[OUT] + at, gates);
}

/* Any rows: a thread has a vector of a row's body, and elements of its ends (unaligned.cuh). */
template <typename T, typename ROWS>
__global__ void __launch_bounds__(ANY_THREADS) gated_any(const __grid_constant__ gated_params<ROWS> p)
{
    int64_t piece, start[TENSORS];
    const int64_t r = gated_row(p, false, &piece), i = piece + threadIdx.x;
    p.rows.locate(r < p.rows.count ? r : 0, start);
    const any_cut<int64_t> cut((const T *)p.out + start[OUT], p.dim, false);
    const int64_t at = cut.template vector<VEC<T>>(i);
    pdl_launch_next();
    if (blockIdx.x < p.ask && i < cut.vectors)
        prefetch((const T *)p.x + start[X] + at), prefetch((const T *)p.residual + start[RESIDUAL] + at);
    pdl_wait();
    if (r >= p.rows.count)
        return;
    if (i < cut.vectors)
        gated_some<T, VEC<T>>(p, start, at);
#pragma unroll 1
    for (int e = (int)threadIdx.x; piece == 0 && e < cut.ends; e += (int)blockDim.x)
        gated_some<T, 1>(p, start, cut.template end<VEC<T>>(e));
}

template <typename T, bool TABLE, bool WIDE>
static adze_status gated_launch(adze_stream s, gated_near p)
{
    const unit_split split = split_units(p.units, 1, p.rows.count, THREADS);
    p.pieces = (uint32_t)split.pieces;
    const auto kernel = split.rows == 1 ? gated_rows<T, TABLE, WIDE, true> : gated_rows<T, TABLE, WIDE, false>;
    return launch("gated_add", s, kernel, split.blocks, split.block, 0, p);
}

template <typename T, typename ROWS>
static adze_status gated_launch_any(adze_stream s, gated_params<ROWS> p)
{
    p.units = p.dim / VEC<T> > 0 ? p.dim / VEC<T> : 1;
    const unit_split split = split_units(p.units, 1, p.rows.count, ANY_THREADS);
    const int64_t threads = split.block.x * split.block.y;
    p.pieces = (uint32_t)split.pieces;
    p.ask = asking_blocks(adze_cuda_sm_count(s.device), p.units * p.rows.count, 2 * threads, threads, 32);
    return launch("gated_add", s, gated_any<T, ROWS>, split.blocks, split.block, 0, p);
}

template <typename T>
static adze_status gated_launch_as(adze_stream s, const gated_far &g, bool aligned)
{
    constexpr bool half = sizeof(T) < 4;
    if (!rows_are_near(g.rows))
        return gated_launch_any<T>(s, g);
    gated_near p = {};
    p.x = g.x, p.residual = g.residual, p.gate = g.gate, p.table = g.table, p.out = g.out;
    p.dim = g.dim, p.units = g.dim / VEC<T>;
    p.gate_f32 = g.gate_f32, p.table_f32 = g.table_f32, p.steps = g.steps;
    p.rows = rows_near(g.rows, {X, RESIDUAL, OUT, GATE, GATE_TABLE});
    if (!aligned)
        return gated_launch_any<T>(s, p);
    if (p.gate_f32 || p.table_f32)
        return p.table ? gated_launch<T, true, half>(s, p) : gated_launch<T, false, half>(s, p);
    return p.table ? gated_launch<T, true, false>(s, p) : gated_launch<T, false, false>(s, p);
}

extern "C" adze_status adze_gated_add_cuda(adze_stream stream, const void *args)
{
    const adze_gated_add_args *a = (const adze_gated_add_args *)args;
    const adze_tensor *const tensors[TENSORS] = {&a->x, &a->residual, &a->out, &a->gate, &a->gate_table};
    const int64_t dim = a->x.shape[a->x.rank - 1];
    gated_far p = {};
    p.dim = dim;
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
