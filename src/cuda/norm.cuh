/* norm.cuh - rms_norm and layer_norm on CUDA. Over 600 lines: two kernels that share their calls, and the choice.

   norm_registers: the calls that models make. A row is held in registers, packed, from the one time it is read until
   it is written: VECTORS 16-byte vectors in each of its threads. LANES > 0: so many lanes of a warp share a row;
   LANES 0: the threads of a block with the same threadIdx.y do. A block has several rows, because a card starts
   blocks more slowly than it could finish them. All loads of a thread are issued before the first is used; what
   multiplies the row later (the weight, or scale and shift) is on its way before the sum is known. norm_loop: any
   call. A block per row, W elements at a time; the row is read again for each pass, and the sum with the residual is
   made again. */
#ifndef ADZE_CUDA_NORM_CUH
#define ADZE_CUDA_NORM_CUH

#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "vec.cuh"

/* Of a block, at most; with four vectors a thread that do not fit exactly; rows where LANES is 0. */
constexpr int NORM_THREADS = 512, ROUGH_THREADS = 448, NORM_ROWS = 8;

/* All W values as a store and a load would leave them, if `condition`. */
template <typename T, int W>
__device__ __forceinline__ void round_if(bool condition, float (&f)[W])
{
    if (!condition)
        return;
    if constexpr (W == VEC<T>) {
        packed<T> v;
        v.set(f);
        v.get(f);
    } else {
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] = round_to<T>(f[j]);
    }
}

/* ---- norm_registers ---- */

enum norm_form {
    PLAIN,        /* weight and bias, if any */
    RESIDUAL_SUM, /* and a residual */
    MODULATED,    /* scale and shift, with or without tables */
    BLOCK         /* a residual before them, with or without a gate */
};
template <norm_form FORM>
constexpr bool adds = FORM == RESIDUAL_SUM || FORM == BLOCK;
template <norm_form FORM>
constexpr bool modulates = FORM == MODULATED || FORM == BLOCK;

/* The tensors of a form that have rows, in order, and its vectors that all rows share. */
enum { X_ROW, OUT_ROW, RESIDUAL_ROW, SUM_ROW }; /* then scale, shift, gate, without the residual's in MODULATED */
enum { WEIGHT, BIAS };                          /* PLAIN, RESIDUAL_SUM */
enum { SCALE_TABLE_AT, SHIFT_TABLE_AT, GATE_TABLE_AT };
template <norm_form FORM>
constexpr int scale_row = FORM == BLOCK ? 4 : 2;
template <norm_form FORM>
constexpr int row_tensors = FORM == PLAIN   ? 2
                            : FORM == BLOCK ? 7
                                            : 4;

template <norm_form FORM>
struct norm_lean {
    const void *row[row_tensors<FORM>];
    const void *flat[3];
    int32_t vectors;
    float eps, inverse_dim, weight_offset;
    uint32_t first; /* blocks that start at once: a residual is prefetched for them */
    near_rows<row_tensors<FORM>> rows;
};

/* The VECTORS vectors of a thread, all at once. */
template <bool FULL, typename T, int VECTORS>
__device__ __forceinline__ void norm_fetch(packed<T> (&to)[VECTORS], const void *data, int thread, int threads,
                                           int vectors)
{
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (!FULL)
            to[v].raw = make_uint4(0, 0, 0, 0);
        if (FULL || thread + v * threads < vectors)
            to[v] = load_packed((const T *)data + (thread + v * threads) * VEC<T>);
    }
}

/* W parameters of dtype S that multiply or shift W values of x. */
template <typename S, int W>
struct side_vector {
    packed<S> part[W / VEC<S>];
    __device__ __forceinline__ void get(float (&f)[W]) const
    {
#pragma unroll
        for (int i = 0; i < W / VEC<S>; i++) {
            float some[VEC<S>];
            part[i].get(some);
#pragma unroll
            for (int j = 0; j < VEC<S>; j++)
                f[i * VEC<S> + j] = some[j];
        }
    }
};
template <bool FULL, typename S, int W, int VECTORS>
__device__ __forceinline__ void side_fetch(side_vector<S, W> (&to)[VECTORS], const void *data, int thread,
                                           int threads, int vectors)
{
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        if (FULL || thread + v * threads < vectors)
#pragma unroll
            for (int i = 0; i < W / VEC<S>; i++)
                to[v].part[i] = load_packed((const S *)data + (thread + v * threads) * W + i * VEC<S>);
}

/* side + table, in float. */
template <typename S, int W>
__device__ __forceinline__ void add_table(const void *table, int at, float (&side)[W])
{
    float f[W];
    load<S, W>((const S *)table + at, f);
#pragma unroll
    for (int j = 0; j < W; j++)
        side[j] += f[j];
}
/* side + table, rounded. */
template <bool TABLE, typename T>
__device__ __forceinline__ packed<T> side_of(packed<T> side, const void *table, int at)
{
    if constexpr (TABLE)
        return packed_add(side, load_packed((const T *)table + at));
    return side;
}

/* The sum over the threads of a row. */
template <int LANES>
__device__ __forceinline__ float norm_total(float v, float *part)
{
    if constexpr (LANES > 0)
        return warp_sum<LANES>(v);
    else
        return row_sum(v, part);
}

/* Blocks that a multiprocessor must have room for (0: left to the compiler), as measured: with few the compiler takes
   registers to have more in flight than helps, but for rows that are few; with more it spills. Sides: tables, f32
   beside half, or the weight of a layer_norm. */
constexpr int norm_blocks(norm_form form, bool sides, int lanes, int vectors, bool full, bool few)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    return 1;
#else
    return lanes || vectors > 4 || (sides && form != PLAIN) || (form == MODULATED && vectors == 3) ? 0
           : form == PLAIN && vectors == 2 && full && !sides && !few                               ? 3
                                                                                                   : 2;
#endif
}
template <typename T, typename S, bool CENTRED, norm_form FORM, bool EXTRA>
constexpr bool norm_sides = modulates<FORM> ? EXTRA || sizeof(S) != sizeof(T) : CENTRED &&EXTRA;

/* x, residual and out are T; scale, shift, gate and their tables are S. ROUND: before the weight, or after each
   step of a modulation. EXTRA: there is a weight, or there are tables. FULL: a row has exactly as many vectors as its
   threads hold. EARLY: what multiplies the row is loaded with it, not after the sum: registers for latency. FEW: rows
   are. */
template <typename T, typename S, bool CENTRED, norm_form FORM, bool ROUND, bool EXTRA, int LANES, int VECTORS,
          bool FULL, bool EARLY, bool FEW>
__global__ void __launch_bounds__(FULL || VECTORS != 4 ? NORM_THREADS : ROUGH_THREADS,
                                  norm_blocks(FORM, norm_sides<T, S, CENTRED, FORM, EXTRA>, LANES, VECTORS, FULL,
                                              FEW)) norm_registers(const __grid_constant__ norm_lean<FORM> p)
{
    constexpr int W = VEC<T>, lanes = LANES ? LANES : 32, SIDES = EARLY && modulates<FORM> ? VECTORS : 1;
    constexpr bool TABLES = EXTRA && modulates<FORM>, WEIGHTED = EXTRA && !modulates<FORM>;
    constexpr int scale_at = scale_row<FORM>, shift_at = scale_at + 1, gate_at = scale_at + 2;
    __shared__ __align__(16) float part[LANES ? 1 : 2][LANES ? 1 : NORM_ROWS][32];
    const int thread = LANES ? (int)threadIdx.x % lanes : (int)threadIdx.x, threads = LANES ? LANES : (int)blockDim.x;
    const uint32_t in_block = LANES ? threadIdx.x / lanes : threadIdx.y;
    const uint32_t r = blockIdx.x * (LANES ? blockDim.x / lanes : blockDim.y) + in_block;
    /* Threads beyond the last row repeat it and write nothing: shuffles and barriers want them all. */
    const bool writes = r < p.rows.count;
    int64_t at[row_tensors<FORM>];
    p.rows.locate(writes ? r : p.rows.count - 1, at);
    const void *row[row_tensors<FORM>], *const *flat = p.flat;
#pragma unroll
    for (int t = 0; t < row_tensors<FORM>; t++)
        row[t] = (const char *)p.row[t] + at[t] * (int64_t)(modulates<FORM> && t >= scale_at ? sizeof(S) : sizeof(T));
    const int vectors = p.vectors;
    pdl_launch_next();
    /* The kernel before this one has made x, but the residual is older, and may have left the cache. */
    if (adds<FORM> && thread == 0 && blockIdx.x < p.first)
        prefetch_row(row[RESIDUAL_ROW], vectors);
    pdl_wait();

    packed<T> x[VECTORS], residual[adds<FORM> ? VECTORS : 1], weight[EARLY && WEIGHTED ? VECTORS : 1];
    side_vector<S, W> scale[SIDES], shift[SIDES];
    norm_fetch<FULL>(x, row[X_ROW], thread, threads, vectors);
    if constexpr (adds<FORM>)
        norm_fetch<FULL>(residual, row[RESIDUAL_ROW], thread, threads, vectors);
    if constexpr (modulates<FORM> && EARLY) {
        side_fetch<FULL>(scale, row[scale_at], thread, threads, vectors);
        side_fetch<FULL>(shift, row[shift_at], thread, threads, vectors);
    } else if constexpr (EARLY && WEIGHTED) {
        norm_fetch<FULL>(weight, flat[WEIGHT], thread, threads, vectors);
    }

    float sum = 0, mean = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int i = (thread + v * threads) * W;
        float h[W];
        x[v].get(h);
        if constexpr (adds<FORM>) {
            if (FULL || thread + v * threads < vectors) {
                if constexpr (FORM == BLOCK && ROUND) {
                    if (p.row[gate_at])
                        x[v] = packed_mul(
                            x[v], side_of<TABLES>(load_packed((const T *)row[gate_at] + i), flat[GATE_TABLE_AT], i));
                    x[v] = packed_add(x[v], residual[v]);
                } else {
                    float other[W];
                    if constexpr (FORM == BLOCK) {
                        if (p.row[gate_at]) {
                            load<S, W>((const S *)row[gate_at] + i, other);
                            if (TABLES)
                                add_table<S, W>(flat[GATE_TABLE_AT], i, other);
#pragma unroll
                            for (int j = 0; j < W; j++)
                                h[j] *= other[j];
                        }
                    }
                    residual[v].get(other);
#pragma unroll
                    for (int j = 0; j < W; j++)
                        h[j] += other[j];
                    x[v].set(h);
                }
                if (p.row[SUM_ROW] && writes)
                    store_packed((T *)row[SUM_ROW] + i, x[v]);
                x[v].get(h);
            }
        }
#pragma unroll
        for (int j = 0; j < W; j++)
            sum += CENTRED ? h[j] : h[j] * h[j];
    }
    sum = norm_total<LANES>(sum, part[0][LANES ? 0 : in_block]);
    keep_packed(x);
    if constexpr (modulates<FORM> && EARLY) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            keep_packed(scale[v].part), keep_packed(shift[v].part);
    } else if constexpr (EARLY && WEIGHTED) {
        keep_packed(weight);
    }
    if (CENTRED) {
        mean = sum * p.inverse_dim;
        sum = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            float h[W];
            x[v].get(h);
            if (FULL || thread + v * threads < vectors) {
#pragma unroll
                for (int j = 0; j < W; j++)
                    sum += (h[j] - mean) * (h[j] - mean);
            }
        }
        sum = norm_total<LANES>(sum, part[!LANES][LANES ? 0 : in_block]);
        keep_packed(x);
    }
    const float factor = rsqrtf(sum * p.inverse_dim + p.eps), start = -mean * factor;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int i = (thread + v * threads) * W;
        if ((!FULL && thread + v * threads >= vectors) || !writes)
            continue;
        float y[W], side[W];
        x[v].get(y);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] = CENTRED ? y[j] * factor + start : y[j] * factor;
        if constexpr (ROUND) {
            packed<T> out, by, more;
            out.set(y);
            if constexpr (modulates<FORM>) {
                by = EARLY ? scale[v * EARLY].part[0] : load_packed((const T *)row[scale_at] + i);
                more = EARLY ? shift[v * EARLY].part[0] : load_packed((const T *)row[shift_at] + i);
                by = packed_add(side_of<TABLES>(by, flat[SCALE_TABLE_AT], i), packed_all<T>(1));
                out = packed_add(packed_mul(out, by), side_of<TABLES>(more, flat[SHIFT_TABLE_AT], i));
            } else {
                by = EARLY ? weight[v * EARLY] : load_packed((const T *)flat[WEIGHT] + i);
                out = packed_mul(out, by);
            }
            store_packed((T *)row[OUT_ROW] + i, out);
            continue;
        }
        if constexpr (modulates<FORM>) {
            if constexpr (EARLY)
                scale[v].get(side);
            else
                load<S, W>((const S *)row[scale_at] + i, side);
            if (TABLES)
                add_table<S, W>(flat[SCALE_TABLE_AT], i, side);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] *= side[j] + 1;
            if constexpr (EARLY)
                shift[v].get(side);
            else
                load<S, W>((const S *)row[shift_at] + i, side);
            if (TABLES)
                add_table<S, W>(flat[SHIFT_TABLE_AT], i, side);
#pragma unroll
            for (int j = 0; j < W; j++)
                y[j] += side[j];
        } else {
            if constexpr (WEIGHTED) {
                if constexpr (EARLY)
                    weight[v].get(side);
                else
                    load<T, W>((const T *)flat[WEIGHT] + i, side);
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[j] *= side[j] + p.weight_offset;
            }
            if (CENTRED && flat[BIAS]) {
                load<T, W>((const T *)flat[BIAS] + i, side);
#pragma unroll
                for (int j = 0; j < W; j++)
                    y[j] += side[j];
            }
        }
        store<T, W>((T *)row[OUT_ROW] + i, y);
    }
}

/* ---- norm_loop ---- */

enum { X, OUT, RESIDUAL, SUM, SCALE, SHIFT, GATE, SCALE_TABLE, SHIFT_TABLE, GATE_TABLE, NORM_TENSORS };
enum { TABLE = SCALE_TABLE - SCALE }; /* from one of scale, shift and gate to its table */

struct norm_params {
    const void *data[NORM_TENSORS]; /* NULL: absent */
    const void *weight, *bias;
    int64_t dim;
    float eps, weight_offset, inverse_dim;
    int32_t rounding;
    uint32_t is_f32; /* by tensor: it is f32 where x is not */
    bool weight_f32, bias_f32;
    adze_rows rows;
};
struct norm_row {
    int64_t at[NORM_TENSORS];
};

/* One of scale, shift and gate, with its table added. */
template <typename T, int W>
__device__ __forceinline__ void norm_side(const norm_params &p, const norm_row &row, int t, int64_t i, float (&f)[W])
{
    load_param<T, W>(p.data[t], p.is_f32 >> t & 1, row.at[t] + i, f);
    if (p.data[t + TABLE]) {
        float table[W];
        load_param<T, W>(p.data[t + TABLE], p.is_f32 >> (t + TABLE) & 1, row.at[t + TABLE] + i, table);
#pragma unroll
        for (int j = 0; j < W; j++)
            f[j] += table[j];
        round_if<T, W>(p.rounding & ADZE_ROUND_STEPS, f);
    }
}

/* What is normalised of W elements from i on. */
template <typename T, int W>
__device__ __forceinline__ void norm_value(const norm_params &p, const norm_row &row, int64_t i, float (&h)[W],
                                           bool store_sum)
{
    float other[W];
    load<T, W>((const T *)p.data[X] + row.at[X] + i, h);
    if (!p.data[RESIDUAL])
        return;
    if (p.data[GATE]) {
        norm_side<T, W>(p, row, GATE, i, other);
#pragma unroll
        for (int j = 0; j < W; j++)
            h[j] *= other[j];
        round_if<T, W>(p.rounding & ADZE_ROUND_STEPS, h);
    }
    load<T, W>((const T *)p.data[RESIDUAL] + row.at[RESIDUAL] + i, other);
#pragma unroll
    for (int j = 0; j < W; j++)
        h[j] += other[j];
    if (store_sum && p.data[SUM])
        store<T, W>((T *)p.data[SUM] + row.at[SUM] + i, h);
    round_if<T, W>(!(p.rounding & ADZE_FLOAT_SUM), h);
}

/* From the normalised value to what is stored. */
template <typename T, int W>
__device__ __forceinline__ void norm_write(const norm_params &p, const norm_row &row, int64_t i, float (&y)[W])
{
    const bool steps = p.rounding & ADZE_ROUND_STEPS && (p.data[SCALE] || p.data[SHIFT]);
    float side[W];
    round_if<T, W>(p.rounding & ADZE_ROUND_NORM, y);
    if (p.weight) {
        load_param<T, W>(p.weight, p.weight_f32, i, side);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] *= side[j] + p.weight_offset;
    }
    if (p.bias) {
        load_param<T, W>(p.bias, p.bias_f32, i, side);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] += side[j];
    }
    round_if<T, W>(steps, y);
    if (p.data[SCALE]) {
        norm_side<T, W>(p, row, SCALE, i, side);
#pragma unroll
        for (int j = 0; j < W; j++)
            side[j] += 1;
        round_if<T, W>(steps, side);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] *= side[j];
        round_if<T, W>(steps && p.data[SHIFT], y);
    }
    if (p.data[SHIFT]) {
        norm_side<T, W>(p, row, SHIFT, i, side);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] += side[j];
    }
    if (p.is_f32 >> OUT & 1)
        store<float, W>((float *)p.data[OUT] + row.at[OUT] + i, y);
    else
        store<T, W>((T *)p.data[OUT] + row.at[OUT] + i, y);
}

template <typename T, bool CENTRED, int W>
__global__ void __launch_bounds__(NORM_THREADS, 1) norm_loop(const __grid_constant__ norm_params p)
{
    __shared__ __align__(16) float part[2][32];
    pdl_launch_next();
    pdl_wait();
    const int64_t start = (int64_t)threadIdx.x * W, step = (int64_t)blockDim.x * W;
    for (int64_t r = blockIdx.x; r < p.rows.count; r += gridDim.x) {
        const row_index index = row_split(p.rows, r);
        norm_row row;
#pragma unroll
        for (int t = 0; t < NORM_TENSORS; t++)
            row.at[t] = row_offset(p.rows, t, index);
        float sum = 0, mean = 0, h[W];
#pragma unroll 1
        for (int64_t i = start; i < p.dim; i += step) {
            norm_value<T, W>(p, row, i, h, false);
#pragma unroll
            for (int j = 0; j < W; j++)
                sum += CENTRED ? h[j] : h[j] * h[j];
        }
        sum = row_sum(sum, part[0]);
        if (CENTRED) {
            mean = sum * p.inverse_dim;
            sum = 0;
#pragma unroll 1
            for (int64_t i = start; i < p.dim; i += step) {
                norm_value<T, W>(p, row, i, h, false);
#pragma unroll
                for (int j = 0; j < W; j++)
                    sum += (h[j] - mean) * (h[j] - mean);
            }
            sum = row_sum(sum, part[1]);
        }
        const float factor = rsqrtf(sum * p.inverse_dim + p.eps);
#pragma unroll 1
        for (int64_t i = start; i < p.dim; i += step) {
            norm_value<T, W>(p, row, i, h, true);
#pragma unroll
            for (int j = 0; j < W; j++)
                h[j] = (h[j] - mean) * factor;
            norm_write<T, W>(p, row, i, h);
        }
        __syncthreads(); /* part is used again */
    }
}

template <typename T, bool CENTRED, int W>
static adze_status norm_launch_loop(const char *op, adze_stream s, const norm_params &p)
{
    const int64_t threads = (p.dim / W + 31) / 32 * 32;
    return launch(op, s, norm_loop<T, CENTRED, W>, grid_for(p.rows.count, 1),
                  dim3(threads < 32             ? 32
                       : threads < NORM_THREADS ? (unsigned)threads
                                                : NORM_THREADS),
                  0, p);
}

/* ---- the choice ---- */

/* The shapes of norm_registers: lanes of a row or 0, vectors of a thread, and whether they fit exactly. */
#define NORM_SHAPES(X)                                                                                               \
    X(8, 1, 1)                                                                                                       \
    X(8, 2, 1) X(16, 2, 0) X(0, 2, 0) X(0, 2, 1) X(0, 3, 1) X(0, 4, 0) X(0, 4, 1) X(0, 5, 0) X(0, 8, 0) X(0, 8, 1)

struct norm_shape {
    int lanes, each, full; /* each 0: norm_loop */
    int threads, rows;     /* of a block, which has threads * rows where lanes is 0 */
    bool few;              /* rows are */
};

/* Modulations that few models make have one shape: each is seconds of compilation. */
template <typename T, typename S, bool CENTRED, norm_form FORM, bool ROUND, bool EXTRA>
constexpr bool norm_rare = modulates<FORM> && (EXTRA || sizeof(S) == 4 || (!ROUND && (!CENTRED || FORM == BLOCK)));

/* Which shapes a form is compiled for; without a weight, what a layer_norm needs, and little of the others. */
constexpr bool norm_has(norm_form form, bool centred, bool extra, bool rare, int lanes, int each, int full)
{
    return form == PLAIN ? lanes == 16 || (extra     ? each != 3 && each != 5
                                           : centred ? lanes == 0 && each != 3
                                                     : lanes == 0 && each == 4 && !full)
           : form == RESIDUAL_SUM
               ? lanes == 0 && (extra ? each != 3 && each != 5 && (full || each != 4) : each == 8 && !full)
               : lanes == 0 && (rare ? each == 4 && !full : each <= 4);
}

/* Whether registers hold what multiplies the row while its sum is made. */
constexpr bool norm_early(norm_form form, bool centred, int each)
{
    return form == MODULATED ? each <= 3 : form == BLOCK ? each <= 2 : each != 4 || !centred;
}

/* As measurements on an H200 gave it. Short rows take a part of a warp. Few rows take two vectors a thread, the
   shortest chain of work, many take more where a row has many threads or not all of them would work. Scale and shift
   want three or four, so that few threads wait for them. */
static norm_shape norm_pick(norm_form form, bool fives, bool rare, int64_t rows, int64_t vectors, int sm_count)
{
    const bool few = rows <= 8 * (int64_t)sm_count, fours = vectors % 128 == 0;
    if (form == PLAIN && vectors <= 32) {
        const int lanes = !rare && (vectors == 8 || vectors == 16) ? 8 : 16;
        return {lanes, lanes == 8 && vectors == 8 ? 1 : 2, lanes == 8, few ? 128 : 256, 1, few};
    }
    fives = fives && !few && vectors > 128 && ceil_div(vectors, 160) * 160 * 7 <= vectors * 8;
    int each = 2;
    if (rare)
        each = form == RESIDUAL_SUM ? 8 : 4;
    else if (form == PLAIN && (!few || vectors > 1024))
        each = fours && vectors <= 2048 && (vectors > 512 || vectors == 256) ? 4
               : vectors <= 64 || (vectors % 64 == 0 && vectors <= 512)      ? 2
               : fives && vectors <= 5 * NORM_THREADS                        ? 5
               : vectors <= 4 * ROUGH_THREADS                                ? 4
                                                                             : 8;
    else if (form == RESIDUAL_SUM)
        each = vectors > 1024 ? (vectors <= 2048 && fours ? 4 : 8) : vectors == 256 && !few ? 4 : 2;
    else if (form != PLAIN)
        each = vectors <= 256 ? 2 : vectors % 96 == 0 && vectors <= 1536 ? 3 : 4;
    const int64_t threads = (vectors + 32 * each - 1) / (32 * each) * 32;
    const bool full = vectors % (32 * each) == 0 && !rare && each != 5;
    if (threads > (full || each != 4 ? NORM_THREADS : ROUGH_THREADS))
        return {0, 0, 0, 0, 0, few};
    const int64_t together = each == 5 ? 256 / threads : threads > 96 ? 1 : threads > 32 ? 2 : 4;
    return {0, each, full, (int)threads, few || together == 0 ? 1 : (int)together, few};
}

template <typename T, typename S, bool CENTRED, norm_form FORM, bool ROUND, bool EXTRA>
static adze_status norm_launch_as(const char *op, adze_stream s, norm_lean<FORM> p, norm_shape shape)
{
    p.first = (uint32_t)(adze_cuda_sm_count(s.device) * (2048 / (shape.threads * shape.rows)));
    const int64_t rows = shape.lanes ? shape.threads / shape.lanes : shape.rows;
    const dim3 block((unsigned)shape.threads, (unsigned)shape.rows);
#define X(l, e, f)                                                                                                   \
    if constexpr (norm_has(FORM, CENTRED, EXTRA, norm_rare<T, S, CENTRED, FORM, ROUND, EXTRA>, l, e, f))             \
        if (shape.lanes == l && shape.each == e && shape.full == f) {                                                \
            constexpr bool early = norm_early(FORM, CENTRED, e), can_be_few = FORM == PLAIN && !l && e == 2 && f;    \
            auto kernel = norm_registers<T, S, CENTRED, FORM, ROUND, EXTRA, l, e, f, early, false>;                  \
            if constexpr (can_be_few)                                                                                \
                if (shape.few)                                                                                       \
                    kernel = norm_registers<T, S, CENTRED, FORM, ROUND, EXTRA, l, e, f, early, true>;                \
            return launch(op, s, kernel, grid_for(p.rows.count, rows), block, 0, p);                                 \
        }
    NORM_SHAPES(X)
#undef X
    return adze_fail(ADZE_NO_KERNEL, "%s: no shape of the kernel holds the row", op);
}

/* A call as norm_registers takes it: `which` names the general call's tensors in the form's order. */
template <norm_form FORM>
static norm_lean<FORM> norm_leaner(const norm_params &g, int width, const int (&which)[row_tensors<FORM>],
                                   const void *flat0, const void *flat1, const void *flat2)
{
    norm_lean<FORM> p = {};
    for (int t = 0; t < row_tensors<FORM>; t++)
        p.row[t] = g.data[which[t]];
    p.flat[0] = flat0, p.flat[1] = flat1, p.flat[2] = flat2;
    p.rows = rows_near(g.rows, which);
    p.vectors = (int32_t)(g.dim / width);
    p.eps = g.eps;
    p.inverse_dim = g.inverse_dim;
    p.weight_offset = g.weight_offset;
    return p;
}

/* Scale, shift and gate of dtype S. */
template <typename T, typename S, bool CENTRED, bool ROUND>
static adze_status norm_modulated(const char *op, adze_stream s, const norm_params &g, norm_shape shape)
{
    const void *const *d = g.data;
    if (d[RESIDUAL]) {
        const auto p = norm_leaner<BLOCK>(g, VEC<T>, {X, OUT, RESIDUAL, SUM, SCALE, SHIFT, GATE}, d[SCALE_TABLE],
                                          d[SHIFT_TABLE], d[GATE_TABLE]);
        return d[SCALE_TABLE] ? norm_launch_as<T, S, CENTRED, BLOCK, ROUND, true>(op, s, p, shape)
                              : norm_launch_as<T, S, CENTRED, BLOCK, ROUND, false>(op, s, p, shape);
    }
    const auto p = norm_leaner<MODULATED>(g, VEC<T>, {X, OUT, SCALE, SHIFT}, d[SCALE_TABLE], d[SHIFT_TABLE], NULL);
    return d[SCALE_TABLE] ? norm_launch_as<T, S, CENTRED, MODULATED, ROUND, true>(op, s, p, shape)
                          : norm_launch_as<T, S, CENTRED, MODULATED, ROUND, false>(op, s, p, shape);
}

/* Nothing modulates. */
template <typename T, bool CENTRED, norm_form FORM>
static adze_status norm_plain(const char *op, adze_stream s, const norm_lean<FORM> &p, norm_shape shape, bool round)
{
    constexpr bool can_round = sizeof(T) < 4 && !CENTRED; /* before a weight */
    if (!p.flat[WEIGHT])
        return norm_launch_as<T, T, CENTRED, FORM, false, false>(op, s, p, shape);
    return round ? norm_launch_as<T, T, CENTRED, FORM, can_round, true>(op, s, p, shape)
                 : norm_launch_as<T, T, CENTRED, FORM, false, true>(op, s, p, shape);
}

/* Whether a table is one vector for all rows. */
static bool norm_flat(const norm_params &g, int t)
{
    bool flat = true;
    for (int d = 0; d < g.rows.rank; d++)
        flat = flat && g.rows.stride[t][d] == 0;
    return flat;
}

/* The leanest kernel that takes the call. */
template <typename T, bool CENTRED>
static adze_status norm_choose(const char *op, adze_stream s, const norm_params &g, bool aligned)
{
    const void *const *d = g.data;
    constexpr bool half = sizeof(T) < 4; /* rounding a float to a float is no step */
    const bool side = d[SCALE] || d[SHIFT], steps = half && g.rounding & ADZE_ROUND_STEPS;
    const bool round_norm = half && g.rounding & ADZE_ROUND_NORM;
    const norm_form form = side ? (d[RESIDUAL] ? BLOCK : MODULATED) : d[RESIDUAL] ? RESIDUAL_SUM : PLAIN;
    if (!aligned)
        return norm_launch_loop<T, CENTRED, 1>(op, s, g);
    const uint32_t sides = g.is_f32 & (1u << SCALE | 1u << SHIFT | 1u << GATE), none = !d[GATE] ? 1u << GATE : 0;
    const bool tables = d[SCALE_TABLE] && d[SHIFT_TABLE] && (!d[GATE] || d[GATE_TABLE]);
    const bool no_table = !d[SCALE_TABLE] && !d[SHIFT_TABLE] && !d[GATE_TABLE];
    const bool all_f32 = (sides | none) == (1u << SCALE | 1u << SHIFT | 1u << GATE);
    const int64_t vectors = g.dim / VEC<T>;
    const bool bare = !side && !g.weight; /* no weight */
    const bool rare = side ? d[SCALE_TABLE] || !half || all_f32 || (!steps && (!CENTRED || form == BLOCK))
                           : bare && (!CENTRED || form == RESIDUAL_SUM || vectors <= 32); /* as norm_rare, norm_has */
    const norm_shape shape =
        norm_pick(form, CENTRED && bare, rare, g.rows.count, vectors, adze_cuda_sm_count(s.device));
    bool lean = shape.each && rows_are_near(g.rows) && !(g.is_f32 >> OUT & 1) &&
                !(d[RESIDUAL] && half && g.rounding & ADZE_FLOAT_SUM);
    if (side) {
        lean = lean && d[SCALE] && d[SHIFT] && !g.weight && !g.bias && !round_norm && (no_table || tables) &&
               (sides == 0 || (all_f32 && !steps));
        for (int t = SCALE; t <= GATE; t++)
            lean = lean && norm_flat(g, t + TABLE) &&
                   (!d[t + TABLE] || (g.is_f32 >> t & 1) == (g.is_f32 >> (t + TABLE) & 1));
    } else {
        lean = lean && !d[GATE] && !(half && (g.weight_f32 || g.bias_f32)) && (CENTRED ? !round_norm : !g.bias) &&
               !(round_norm && g.weight_offset != 0);
    }
    if (!lean)
        return norm_launch_loop<T, CENTRED, VEC<T>>(op, s, g);
    if (side)
        return half && all_f32 ? norm_modulated<T, float, CENTRED, false>(op, s, g, shape)
               : steps         ? norm_modulated<T, T, CENTRED, half>(op, s, g, shape)
                               : norm_modulated<T, T, CENTRED, false>(op, s, g, shape);
    if (d[RESIDUAL])
        return norm_plain<T, CENTRED, RESIDUAL_SUM>(
            op, s, norm_leaner<RESIDUAL_SUM>(g, VEC<T>, {X, OUT, RESIDUAL, SUM}, g.weight, g.bias, NULL), shape,
            round_norm);
    return norm_plain<T, CENTRED, PLAIN>(op, s, norm_leaner<PLAIN>(g, VEC<T>, {X, OUT}, g.weight, g.bias, NULL),
                                         shape, round_norm);
}

template <bool CENTRED>
static adze_status norm_run(const char *op, adze_stream s, const adze_norm_args *a)
{
    const adze_tensor *const tensors[NORM_TENSORS] = {&a->x,           &a->out,       &a->residual, &a->sum,
                                                      &a->scale,       &a->shift,     &a->gate,     &a->scale_table,
                                                      &a->shift_table, &a->gate_table};
    norm_params p = {};
    p.dim = a->x.shape[a->x.rank - 1];
    adze_rows_init(&p.rows, &a->x, NORM_TENSORS, tensors);
    if (p.dim == 0 || p.rows.count == 0)
        return ADZE_OK;
    bool aligned = rows_aligned(&a->weight, p.dim) && rows_aligned(&a->bias, p.dim);
    for (int t = 0; t < NORM_TENSORS; t++) {
        p.data[t] = tensors[t]->dtype ? tensors[t]->data : NULL;
        p.is_f32 |= (uint32_t)(tensors[t]->dtype == ADZE_F32 && a->x.dtype != ADZE_F32) << t;
        aligned = aligned && rows_aligned(tensors[t], p.dim);
    }
    p.weight = a->weight.dtype ? a->weight.data : NULL;
    p.bias = a->bias.dtype ? a->bias.data : NULL;
    p.weight_f32 = a->weight.dtype == ADZE_F32;
    p.bias_f32 = a->bias.dtype == ADZE_F32;
    p.eps = a->eps;
    p.weight_offset = a->weight_offset;
    p.inverse_dim = 1 / (float)p.dim;
    p.rounding = a->rounding;
    switch (a->x.dtype) {
    case ADZE_F32: return norm_choose<float, CENTRED>(op, s, p, aligned);
    case ADZE_F16: return norm_choose<f16, CENTRED>(op, s, p, aligned);
    default: return norm_choose<bf16, CENTRED>(op, s, p, aligned);
    }
}

#endif
