/* norm.cuh - rms_norm and layer_norm on CUDA: the choice between norm_registers, for the calls that models make, and
   norm_loop, for any call. */
#ifndef ADZE_CUDA_NORM_CUH
#define ADZE_CUDA_NORM_CUH

#include "norm_loop.cuh"
#include "norm_registers.cuh"

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
