/* gated_rows.cuh - the kernels of gated_add on CUDA.

   A block works on a piece of a row, or on several short rows: blockDim.x threads per row, blockDim.y rows. A thread
   has UNITS units of W elements, blockDim.x apart, and issues all loads before it uses the first. Units are 16-byte
   vectors where rows are aligned. Where they are not, vectors are shifted (shifted.cuh) or units are narrower
   (unit.cuh). The rows of dense tensors are read as one long row, whose gate repeats.

   An H200 starts a block every 1.2 ns, in which memory moves 5 KB: blocks that move less take as long whatever they
   do. Those of gated_rows move 6 KB where all their threads have units, so a large call whose rows leave many threads
   idle takes a kernel that numbers the units of all rows consecutively. */
#ifndef ADZE_CUDA_GATED_ROWS_CUH
#define ADZE_CUDA_GATED_ROWS_CUH

#include "launch.cuh"
#include "rows.cuh"
#include "shifted.cuh"

#include <algorithm>

enum { X, RESIDUAL, OUT, GATE, GATE_TABLE, TENSORS };
constexpr int THREADS = 128; /* of a block, at most */

template <typename ROWS>
struct gated_params {
    const void *x, *residual, *gate, *table; /* table: NULL when there is none */
    void *out;
    int64_t units;   /* of a row */
    int64_t dim;     /* elements of a row */
    uint32_t pieces; /* of a row */
    bool gate_f32, table_f32, steps;
    ROWS rows;
};
typedef gated_params<simple_rows<TENSORS>> gated_simple;
typedef gated_params<general_rows<TENSORS>> gated_general;
struct gated_flat : gated_params<flat_rows<TENSORS>> { /* the rows of one batch, and from it to the next */
    int64_t outer[TENSORS];
};

/* The product is rounded to float before the sum, as on the CPU and in torch: it must not be contracted to an FMA.
 */
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

/* TABLE: there may be a table. WIDE: gate or table may be f32 where x is not. SINGLE: a block has one row or a piece
   of one, so that the address is uniform over its threads. */
template <typename T, int W, int UNITS, bool TABLE, bool WIDE, bool SINGLE, typename ROWS>
__global__ void __launch_bounds__(THREADS) gated_rows(const __grid_constant__ gated_params<ROWS> p)
{
    constexpr bool TILED = SINGLE && W < VEC<T>;
    int64_t start[TENSORS];
    const uint32_t group = p.rows.count == 1 ? 0 : blockIdx.x / p.pieces;
    const int64_t piece = (int64_t)(blockIdx.x - group * p.pieces) * (blockDim.x * UNITS);
    const int64_t r = SINGLE ? (int64_t)group : (int64_t)group * blockDim.y + threadIdx.y;
    const bool valid = r < p.rows.count, table = TABLE && p.table;
    const bool gate_f32 = WIDE && p.gate_f32, table_f32 = WIDE && p.table_f32;
    p.rows.locate(valid ? r : 0, start);
    const T *x = (const T *)p.x + start[X] + piece * W;
    const T *residual = (const T *)p.residual + start[RESIDUAL] + piece * W;
    T *out = (T *)p.out + start[OUT] + piece * W;
    const int64_t gate_at = start[GATE] + piece * W, table_at = start[GATE_TABLE] + piece * W;
    const int units = p.units - piece < INT32_MAX ? (int)(p.units - piece) : INT32_MAX;
    pdl_launch_next();
    /* The preceding kernel has just written x, but the residual is older and may have left L2. */
    if (threadIdx.x == 0) {
        if constexpr (W == VEC<T>)
            prefetch_row(residual, min(units, UNITS * (int)blockDim.x));
        else
            prefetch_bytes(residual, min(units, UNITS * (int)blockDim.x) * W * (int)sizeof(T));
    }
    pdl_wait();
    if (!valid || (unit_of<TILED, UNITS>(0)) >= units)
        return;
    unit<T, W> a[UNITS], b[UNITS];
    param_unit<T, W> g[UNITS], m[TABLE ? UNITS : 1];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int at = unit_of<TILED, UNITS>(u);
        if (UNITS > 1 && at >= units)
            break;
        a[u].fetch(x + at * W);
        b[u].fetch(residual + at * W);
        g[u].fetch(p.gate, gate_f32, gate_at + at * W);
        if constexpr (TABLE)
            if (table)
                m[u].fetch(p.table, table_f32, table_at + at * W);
    }
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int at = unit_of<TILED, UNITS>(u);
        if (UNITS > 1 && at >= units)
            break;
        float xs[W], residuals[W], gates[W], more[W] = {};
        g[u].get(gate_f32, gates);
        if constexpr (TABLE)
            m[u].get(table_f32, more);
        a[u].get(xs);
        b[u].get(residuals);
        gated<T, W>(p.steps, table, xs, residuals, gates, more);
        unit<T, W> result;
        result.set(gates);
        result.put(out + at * W);
    }
}

/* Units are the vectors of the output, to which those of the inputs are shifted. */
template <typename T, bool TABLE, bool WIDE, bool SINGLE>
__global__ void __launch_bounds__(THREADS) gated_shifted(const __grid_constant__ gated_simple p)
{
    constexpr int W = VEC<T>;
    int64_t start[TENSORS];
    const uint32_t group = p.rows.count == 1 ? 0 : blockIdx.x / p.pieces;
    const int piece = (int)((blockIdx.x - group * p.pieces) * blockDim.x), dim = (int)p.dim;
    const uint32_t r = SINGLE ? group : group * blockDim.y + threadIdx.y;
    const bool valid = r < p.rows.count;
    p.rows.locate(valid ? r : 0, start);
    T *const out = (T *)p.out + start[OUT];
    const T *const residual = (const T *)p.residual + start[RESIDUAL];
    const int at = (piece + (int)threadIdx.x) * W - shifted_head(out);
    pdl_launch_next();
    if (threadIdx.x == 0 && max(at, 0) < dim)
        prefetch_bytes(residual + max(at, 0), min(dim - max(at, 0), (int)blockDim.x * W) * (int)sizeof(T));
    pdl_wait();
    if (!valid || at >= dim)
        return;
    shifted<1> a, b;
    shifted_param<T, WIDE> g, m;
    a.fetch((const T *)p.x + start[X], at, dim);
    b.fetch(residual, at, dim);
    g.fetch(p.gate, WIDE && p.gate_f32, start[GATE], at, dim);
    if constexpr (TABLE)
        m.fetch(p.table, WIDE && p.table_f32, start[GATE_TABLE], at, dim);
    float xs[W], residuals[W], gates[W], more[W] = {};
    g.get(WIDE && p.gate_f32, gates);
    if constexpr (TABLE)
        m.get(WIDE && p.table_f32, more);
    a.template get<T>(xs);
    b.template get<T>(residuals);
    gated<T, W>(p.steps, TABLE, xs, residuals, gates, more);
    packed<T> result;
    result.set(gates);
    store_shifted(out, at, dim, result);
}
template <typename T, bool TABLE, bool WIDE>
static adze_status gated_launch_shifted(const cuda_call &s, gated_simple p)
{
    const unit_split split = split_units(shifted_most<T>(p.dim), 1, p.rows.count, THREADS);
    p.pieces = (uint32_t)split.pieces;
    const auto kernel = split.rows == 1 ? gated_shifted<T, TABLE, WIDE, true> : gated_shifted<T, TABLE, WIDE, false>;
    return launch(s, kernel, split.blocks, split.block, 0, p);
}

/* The vectors of all rows are numbered consecutively, each row having as many as any may have, so that no thread
   idles in rows of any length. Nothing is prefetched: where calls are large, nearly all blocks start after the wait.
 */
struct gated_flat_params : gated_simple {
    divisor by_vectors, by_inner; /* vectors of a row; rows of a batch */
};
constexpr int FLAT_UNITS = 2;

template <typename T, bool WIDE>
__global__ void __launch_bounds__(THREADS) gated_shifted_flat(const __grid_constant__ gated_flat_params p)
{
    constexpr int W = VEC<T>, UNITS = FLAT_UNITS;
    const uint32_t first = blockIdx.x * (uint32_t)(THREADS * UNITS) + threadIdx.x;
    const int dim = (int)p.dim;
    T *out[UNITS];
    int at[UNITS];
    shifted<1> a[UNITS], b[UNITS];
    shifted_param<T, WIDE> g[UNITS];
    pdl_launch_next();
    pdl_wait();
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const uint32_t n = first + u * THREADS, r = divide(n, p.by_vectors), row = min(r, p.rows.count - 1);
        const uint32_t batch = p.rows.size[1] ? divide(row, p.by_inner) : 0;
        const simple_rows<TENSORS>::place place = {row - batch * p.rows.size[1], batch, 0};
        out[u] = (T *)p.out + p.rows.offset(place, OUT);
        at[u] = (int)(n - r * (uint32_t)p.by_vectors.by) * W - shifted_head(out[u]);
        at[u] = r < p.rows.count ? at[u] : dim;
        a[u].fetch((const T *)p.x + p.rows.offset(place, X), at[u], dim);
        b[u].fetch((const T *)p.residual + p.rows.offset(place, RESIDUAL), at[u], dim);
        g[u].fetch(p.gate, WIDE && p.gate_f32, p.rows.offset(place, GATE), at[u], dim);
    }
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        if (at[u] >= dim)
            continue;
        float xs[W], residuals[W], gates[W];
        const float none[W] = {};
        g[u].get(WIDE && p.gate_f32, gates);
        a[u].template get<T>(xs);
        b[u].template get<T>(residuals);
        gated<T, W>(p.steps, false, xs, residuals, gates, none);
        packed<T> result;
        result.set(gates);
        store_shifted(out[u], at[u], dim, result);
    }
}
template <typename T>
static bool gated_can_shift_flat(const gated_simple &p, int64_t dim)
{
    return !p.table && p.rows.size[0] == 0 && dim < (1 << 28) &&
           shifted_most<T>(dim) * p.rows.count <= INT32_MAX - THREADS * FLAT_UNITS;
}
template <typename T, bool WIDE>
static adze_status gated_launch_shifted_flat(const cuda_call &s, const gated_simple &simple)
{
    gated_flat_params p = {};
    (gated_simple &)p = simple;
    const int64_t vectors = shifted_most<T>(p.dim);
    p.by_vectors = divisor_of(vectors);
    p.by_inner = divisor_of(std::max<int64_t>(p.rows.size[1], 1));
    return launch(s, gated_shifted_flat<T, WIDE>, ceil_div(vectors * p.rows.count, THREADS * FLAT_UNITS),
                  dim3(THREADS), 0, p);
}

/* Rows without gaps between them are one long row, in which gate and table repeat. A vector of them that goes from
   one row into the next is read one element at a time. */
struct gated_dense_params {
    const void *x, *residual, *gate, *table;
    void *out;
    int32_t length;               /* of a long row */
    int32_t period;               /* of gate and table */
    divisor by_period, by_pieces; /* pieces of a long row: blocks */
    bool alike;                   /* x and residual have the vectors of out */
    bool gate_f32, table_f32, steps;
    simple_rows<TENSORS> rows; /* the long ones */
};
constexpr int DENSE_UNITS = 2;

template <typename T, bool WIDE>
struct gated_repeated : shifted_param<T, WIDE> {
    /* The vector from element `at` of the row on; those before the row and behind it are any element of it. */
    __device__ __forceinline__ void fetch(const void *data, bool is_f32, int64_t start, int at, int dim)
    {
        constexpr int W = VEC<T>, SIZE = (int)sizeof(T);
        const char *const row = (const char *)data + start * (WIDE && is_f32 ? (int)sizeof(float) : SIZE);
        if (at >= 0 && at + W <= dim) {
            this->fetch_inside(row, WIDE && is_f32, at);
            return;
        }
        uint32_t word[4 * shifted_param<T, WIDE>::N] = {};
#pragma unroll
        for (int j = 0; j < W; j++) {
            const int i = max(at + j < dim ? at + j : at + j - dim, 0);
            if (WIDE && is_f32)
                word[WIDE ? j : 0] = reinterpret_cast<const uint32_t *>(row)[i];
            else if (SIZE == 4)
                word[SIZE == 4 ? j : 0] = reinterpret_cast<const uint32_t *>(row)[i];
            else
                word[j * SIZE / 4] |= (uint32_t) reinterpret_cast<const uint16_t *>(row)[i] << j % 2 * 16;
        }
#pragma unroll
        for (int i = 0; i < shifted_param<T, WIDE>::N; i++)
            this->held.part[i] = make_uint4(word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]);
        this->held.shift = 0;
    }
};

template <typename T, bool TABLE, bool WIDE>
__global__ void __launch_bounds__(THREADS) gated_dense(const __grid_constant__ gated_dense_params p)
{
    constexpr int W = VEC<T>, UNITS = DENSE_UNITS;
    int64_t start[TENSORS];
    const uint32_t r = divide(blockIdx.x, p.by_pieces), piece = blockIdx.x - r * (uint32_t)p.by_pieces.by;
    p.rows.locate(r, start);
    const T *const x = (const T *)p.x + start[X], *const residual = (const T *)p.residual + start[RESIDUAL];
    T *const out = (T *)p.out + start[OUT];
    const int block = (int)piece * (THREADS * UNITS * W) - shifted_head(out);
    const int first = block + (int)threadIdx.x * W;
    pdl_launch_next();
    if (threadIdx.x == 0)
        prefetch_bytes(residual + max(block, 0), min(p.length - max(block, 0), THREADS * UNITS * W) * (int)sizeof(T));
    pdl_wait();
    /* The loads of x and residual come first: a gate that wraps is waited for. */
    shifted<1> a[UNITS], b[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int at = first + u * (THREADS * W);
        if (at >= p.length)
            break;
        if (p.alike) {
            a[u].part[0] = load_packed(x + at).raw;
            b[u].part[0] = load_packed(residual + at).raw;
        } else {
            a[u].fetch(x, at, p.length);
            b[u].fetch(residual, at, p.length);
        }
    }
    gated_repeated<T, WIDE> g[UNITS], m[TABLE ? UNITS : 1];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int at = first + u * (THREADS * W);
        if (at >= p.length)
            break;
        const int column = at - (int)divide((uint32_t)max(at, 0), p.by_period) * p.period;
        g[u].fetch(p.gate, p.gate_f32, start[GATE], column, p.period);
        if constexpr (TABLE)
            m[u].fetch(p.table, p.table_f32, start[GATE_TABLE], column, p.period);
    }
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int at = first + u * (THREADS * W);
        if (at >= p.length)
            break;
        float xs[W], residuals[W], gates[W], more[W] = {};
        g[u].get(WIDE && p.gate_f32, gates);
        if constexpr (TABLE)
            m[u].get(WIDE && p.table_f32, more);
        if (!p.alike) {
            a[u].part[0] = a[u].template vector<T>(0).raw;
            b[u].part[0] = b[u].template vector<T>(0).raw;
        }
        packed<T>{a[u].part[0]}.get(xs);
        packed<T>{b[u].part[0]}.get(residuals);
        gated<T, W>(p.steps, TABLE, xs, residuals, gates, more);
        packed<T> result;
        result.set(gates);
        store_shifted(out, at, p.length, result);
    }
}

/* The call with long rows; false if its rows have gaps, or if the gate repeats in another way than the table. */
template <typename T>
static bool gated_make_dense(const gated_general &g, int64_t dim, gated_dense_params *p)
{
    adze_rows rows = g.rows;
    const int last = rows.rank - 1;
    const int64_t size = rows.size[last], length = size * dim;
    bool repeats = true, differs = true, alike = true;
    for (int t = X; t <= OUT; t++) {
        if (rows.stride[t][last] != dim && size > 1)
            return false;
        const void *const data = t == X ? g.x : g.residual;
        alike = alike && (t == OUT || ((uintptr_t)data - (uintptr_t)g.out) % 16 == 0);
        for (int d = 0; d < last; d++)
            alike = alike && (rows.stride[t][d] - rows.stride[OUT][d]) * (int64_t)sizeof(T) % 16 == 0;
    }
    for (int t = GATE; t <= GATE_TABLE; t++) {
        if (t == GATE_TABLE && !g.table)
            continue;
        repeats = repeats && rows.stride[t][last] == 0;
        differs = differs && rows.stride[t][last] == dim;
    }
    if (size > 1 && !repeats && !differs)
        return false;
    rows.count /= size;
    rows.rank = last > 0 ? last : 1;
    if (last == 0) {
        rows.size[0] = 1;
        for (int t = 0; t < TENSORS; t++)
            rows.stride[t][0] = 0;
    }
    const int64_t period = size == 1 || repeats ? dim : length;
    if (!rows_are_simple(rows) || dim < VEC<T> || length > (INT32_MAX >> 3))
        return false;
    p->x = g.x, p->residual = g.residual, p->gate = g.gate, p->table = g.table, p->out = g.out;
    p->length = (int32_t)length;
    p->period = (int32_t)period;
    p->by_period = divisor_of(period);
    p->alike = alike;
    p->gate_f32 = g.gate_f32, p->table_f32 = g.table_f32, p->steps = g.steps;
    p->rows = rows_simple(rows, {X, RESIDUAL, OUT, GATE, GATE_TABLE});
    const int64_t pieces = ceil_div(shifted_most<T>(length), THREADS * DENSE_UNITS);
    p->by_pieces = divisor_of(pieces);
    return pieces * rows.count <= INT32_MAX;
}
template <typename T, bool TABLE, bool WIDE>
static adze_status gated_launch_dense(const cuda_call &s, const gated_dense_params &p)
{
    return launch(s, gated_dense<T, TABLE, WIDE>, p.by_pieces.by * p.rows.count, dim3(THREADS), 0, p);
}

/* No table: the units of all rows of a batch, blockIdx.y, are numbered consecutively, so that no lane idles. */
template <typename T, int W, int UNITS, bool WIDE>
__global__ void __launch_bounds__(THREADS) gated_short(const __grid_constant__ gated_flat p)
{
    const uint32_t first = blockIdx.x * (uint32_t)(THREADS * UNITS) + (uint32_t)unit_of<true, UNITS>(0);
    auto place = p.rows.template first<W>(first);
    const T *const x = (const T *)p.x + blockIdx.y * p.outer[X];
    const T *const residual = (const T *)p.residual + blockIdx.y * p.outer[RESIDUAL];
    const int64_t gate = blockIdx.y * p.outer[GATE];
    T *const to = (T *)p.out + blockIdx.y * p.outer[OUT];
    int64_t out[UNITS];
    unit<T, W> a[UNITS], b[UNITS];
    param_unit<T, W> g[UNITS];
    pdl_launch_next();
    pdl_wait();
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        if (first + u * 32 < p.rows.count) {
            a[u].fetch(x + p.rows.offset(place, X));
            b[u].fetch(residual + p.rows.offset(place, RESIDUAL));
            g[u].fetch(p.gate, WIDE, gate + p.rows.offset(place, GATE));
        }
        out[u] = p.rows.offset(place, OUT);
        p.rows.advance(place);
    }
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (first + u * 32 < p.rows.count) {
            float xs[W], residuals[W], gates[W];
            const float none[W] = {};
            a[u].get(xs);
            b[u].get(residuals);
            g[u].get(WIDE, gates);
            gated<T, W>(p.steps, false, xs, residuals, gates, none);
            unit<T, W> result;
            result.set(gates);
            result.put(to + out[u]);
        }
}
/* The rows of one batch; there may be another dimension of 65535. */
static simple_rows<TENSORS> gated_batch(simple_rows<TENSORS> rows)
{
    rows.count = rows.size[1] ? rows.size[1] : rows.count;
    rows.size[1] = 0;
    return rows;
}
static bool gated_is_flat(const gated_simple &p, int64_t units, int width)
{
    const int64_t batches = p.rows.size[1] ? p.rows.count / p.rows.size[1] : 1;
    return !p.table && p.rows.size[0] == 0 && batches <= 65535 && rows_are_flat(gated_batch(p.rows), units, width);
}
template <typename T, int W, int UNITS>
static adze_status gated_launch_short(const cuda_call &s, const gated_simple &p)
{
    constexpr bool half = sizeof(T) < 4;
    gated_flat flat = {};
    flat.x = p.x, flat.residual = p.residual, flat.gate = p.gate, flat.out = p.out, flat.steps = p.steps;
    flat.rows = rows_flat(gated_batch(p.rows), p.units, W);
    for (int t = 0; t < TENSORS; t++)
        flat.outer[t] = p.rows.outer[1][t];
    const auto kernel = p.gate_f32 ? gated_short<T, W, UNITS, half> : gated_short<T, W, UNITS, false>;
    const int64_t batches = p.rows.size[1] ? p.rows.count / p.rows.size[1] : 1;
    return launch(s, kernel, ceil_div(flat.rows.count, THREADS * UNITS), dim3(THREADS), {0, 1, batches}, flat);
}

template <typename T, int W, int UNITS, bool TABLE, bool WIDE, typename ROWS>
static adze_status gated_launch(const cuda_call &s, gated_params<ROWS> p)
{
    unit_split split = split_units(p.units, UNITS, p.rows.count, THREADS);
    if (W < VEC<T> && split.rows == 1)
        split.block.x = (split.block.x + 31) / 32 * 32;
    p.pieces = (uint32_t)split.pieces;
    const auto kernel = split.rows == 1 ? gated_rows<T, W, UNITS, TABLE, WIDE, true, ROWS>
                                        : gated_rows<T, W, UNITS, TABLE, WIDE, false, ROWS>;
    return launch(s, kernel, split.blocks, split.block, 0, p);
}

#endif
