/* norm.cuh - rms_norm and layer_norm on CUDA: the choice between norm_registers, for the calls that models make,
   norm_short.cu and norm_shifted.cu, for rows and parameters off a 16-byte border, norm_bytes.cu, for rows that are
   quantised, and norm_any.cu, for any other. */
#ifndef ADZE_CUDA_NORM_CUH
#define ADZE_CUDA_NORM_CUH

#include "norm_call.cuh"
#include "norm_registers.cuh"
#include "norm_shapes.cuh"

#include <algorithm>

template <typename TRAITS>
static adze_status norm_launch(const cuda_call &s, norm_registers_params<TRAITS::FUSION> p)
{
    constexpr int LANES = TRAITS::LANES;
    constexpr norm_fusion FUSION = TRAITS::FUSION;
    const bool few = p.rows.count <= 8 * (int64_t)s.gpu.sm_count;
    const int64_t threads = norm_threads(TRAITS::SHAPE, p.vectors);
    const int64_t rows = LANES                               ? (few || TRAITS::VECTORS > 1 ? 128 : 256) / LANES
                         : few || threads > 96               ? 1
                         : threads > 64 && modulates<FUSION> ? 1
                         : threads > 32                      ? 2
                                                             : 4;
    const dim3 block = LANES ? dim3((unsigned)(threads * rows)) : dim3((unsigned)threads, (unsigned)rows);
    /* Half of x is prefetched. With a residual, the residual is prefetched instead; small calls prefetch both. */
    const int64_t all = p.rows.count * (int64_t)p.vectors;
    const bool prefetch_x = !has_residual<FUSION> || all <= PREFETCH_MIN * s.gpu.sm_count;
    p.prefetch_blocks = prefetch_x ? prefetch_blocks(s.gpu, all / 2, rows * p.vectors, threads * rows,
                                                     LANES || modulates<FUSION> ? 24 : 32)
                                   : 1;
    p.prefetch_residual_blocks = (uint32_t)blocks_at_once(s.gpu, threads * rows);
    return launch(s, norm_registers<TRAITS>, grid_for(p.rows.count, rows), block, 0, p);
}

/* Launches the shape of the first rule that takes the call, from RULE on; ADZE_NO_KERNEL if none does. */
template <typename FORM, int RULE = 0>
static adze_status norm_launch_as(const cuda_call &s, const norm_registers_params<FORM::FUSION> &p)
{
    constexpr auto &rules = norm_rules<FORM>();
    if constexpr (RULE < (int)(sizeof rules / sizeof *rules)) {
        constexpr int variant = NORM_SHAPES<FORM::CENTRED>.find(rules[RULE].shape);
        if (s.takes(variant, norm_holds(rules[RULE].shape, p.vectors),
                    norm_prefers(rules[RULE], p.rows.count, p.vectors, s.gpu.sm_count)))
            return norm_launch<norm_traits<FORM, variant>>(s, p);
        return norm_launch_as<FORM, RULE + 1>(s, p);
    }
    return ADZE_NO_KERNEL;
}

/* The parameters of norm_registers: `which` lists the call's tensors in the order of the fusion. */
template <norm_fusion FUSION>
static norm_registers_params<FUSION> norm_call_of(const norm_params &g, int width,
                                                  const int (&which)[row_tensors<FUSION>], const void *flat0,
                                                  const void *flat1, const void *flat2)
{
    norm_registers_params<FUSION> p = {};
    for (int t = 0; t < row_tensors<FUSION>; t++)
        p.row[t] = g.data[which[t]];
    p.flat[0] = flat0, p.flat[1] = flat1, p.flat[2] = flat2;
    p.rows = rows_simple(g.rows, which);
    p.vectors = (int32_t)(g.dim / width);
    p.eps = g.eps;
    p.inverse_dim = g.inverse_dim;
    p.weight_offset = g.weight_offset;
    return p;
}

/* Scale, shift and gate of dtype S; `one` is added to the scale. */
template <typename T, typename S, bool CENTRED, bool ROUND>
static adze_status norm_modulated(const cuda_call &s, const norm_params &g, float one = 1)
{
    const void *const *d = g.data;
    if (d[RESIDUAL]) {
        auto p = norm_call_of<BLOCK>(g, VEC<T>, {X, OUT, RESIDUAL, SUM, SCALE, SHIFT, GATE}, d[SCALE_TABLE],
                                     d[SHIFT_TABLE], d[GATE_TABLE]);
        p.weight_offset = one;
        return d[SCALE_TABLE] ? norm_launch_as<norm_form<T, S, CENTRED, BLOCK, ROUND, true>>(s, p)
                              : norm_launch_as<norm_form<T, S, CENTRED, BLOCK, ROUND, false>>(s, p);
    }
    auto p = norm_call_of<MODULATED>(g, VEC<T>, {X, OUT, SCALE, SHIFT}, d[SCALE_TABLE], d[SHIFT_TABLE], NULL);
    p.weight_offset = one;
    return d[SCALE_TABLE] ? norm_launch_as<norm_form<T, S, CENTRED, MODULATED, ROUND, true>>(s, p)
                          : norm_launch_as<norm_form<T, S, CENTRED, MODULATED, ROUND, false>>(s, p);
}

/* No modulation. */
template <typename T, bool CENTRED, norm_fusion FUSION>
static adze_status norm_plain(const cuda_call &s, const norm_registers_params<FUSION> &p, bool round)
{
    constexpr bool can_round = sizeof(T) < 4 && !CENTRED; /* before a weight */
    if (!p.flat[WEIGHT])
        return norm_launch_as<norm_form<T, T, CENTRED, FUSION, false, false>>(s, p);
    return round ? norm_launch_as<norm_form<T, T, CENTRED, FUSION, can_round, true>>(s, p)
                 : norm_launch_as<norm_form<T, T, CENTRED, FUSION, false, true>>(s, p);
}

/* Whether a table is one vector that all rows share. */
static bool norm_flat(const norm_params &g, int t)
{
    bool flat = true;
    for (int d = 0; d < g.rows.rank; d++)
        flat = flat && g.rows.stride[t][d] == 0;
    return flat;
}

/* Whether norm_any is faster for a call that norm_registers has. That is so for a scale and a shift alone, in float,
   where they have one shape (RARE), but for a few short rows: 2.6 for 4.0 us of 44 rows of 8064, 16.3 for 18.7 us of
   8292 rows of 912 (H200, 2026-11-19). */
template <typename T, bool CENTRED>
static bool norm_any_faster(const cuda_call &s, const norm_params &g)
{
    constexpr int64_t SHORT_VECTORS = 54, FEW_ROWS = 32; /* of a row; of a multiprocessor */
    const void *const *d = g.data;
    const bool simple = d[SCALE] && d[SHIFT] && !d[GATE] && !(g.is_f32 & ~(1u << OUT));
    const bool has_shapes = CENTRED && !d[RESIDUAL] && sizeof(T) < 4; /* MODULATION */
    const bool few_short = g.dim / VEC<T> <= SHORT_VECTORS && g.rows.count <= FEW_ROWS * s.gpu.sm_count;
    return s.choice->want < 0 && simple && !has_shapes && !few_short;
}

/* Runs norm_registers, if it has this fusion; else ADZE_NO_KERNEL. */
template <typename T, bool CENTRED>
static adze_status norm_in_registers(const cuda_call &s, const norm_params &g)
{
    const void *const *d = g.data;
    constexpr bool half = sizeof(T) < 4; /* rounding f32 to f32 has no effect */
    const bool steps = half && g.rounding & ADZE_ROUND_STEPS, round_norm = half && g.rounding & ADZE_ROUND_NORM;
    const bool no_table = !d[SCALE_TABLE] && !d[SHIFT_TABLE] && !d[GATE_TABLE];
    const bool f32_gate = !d[GATE] || g.is_f32 >> GATE & 1;
    if (!rows_are_simple(g.rows) || g.dim > INT32_MAX || g.is_f32 >> OUT & 1 ||
        (d[RESIDUAL] && half && g.rounding & ADZE_FLOAT_SUM))
        return ADZE_NO_KERNEL;

    if (d[SCALE] && d[SHIFT] && !g.weight && !g.bias && !round_norm) {
        const bool f32_params = g.is_f32 >> SCALE & 1 && g.is_f32 >> SHIFT & 1 && f32_gate && !steps;
        bool fits = no_table || (d[SCALE_TABLE] && d[SHIFT_TABLE] && (!d[GATE] || d[GATE_TABLE]));
        for (int t = SCALE; t <= GATE; t++)
            fits = fits && (!d[t] || (g.is_f32 >> t & 1) == f32_params) && norm_flat(g, t + TABLE) &&
                   (!d[t + TABLE] || (g.is_f32 >> (t + TABLE) & 1) == f32_params);
        if (!fits || (no_table && !steps && norm_any_faster<T, CENTRED>(s, g)))
            return ADZE_NO_KERNEL;
        return half && f32_params ? norm_modulated<T, float, CENTRED, false>(s, g)
               : steps            ? norm_modulated<T, T, CENTRED, half>(s, g)
                                  : norm_modulated<T, T, CENTRED, false>(s, g);
    }
    if constexpr (half && !CENTRED)
        if (d[SHIFT] && !d[SCALE] && !d[RESIDUAL] && no_table && !(g.is_f32 >> SHIFT & 1) && steps && !round_norm &&
            g.weight && !g.weight_f32 && !g.bias)
            return norm_launch_as<norm_form<T, T, false, ADDED, false, true>>(
                s, norm_call_of<ADDED>(g, VEC<T>, {X, OUT, SHIFT}, g.weight, NULL, NULL));
    if (d[SCALE] || d[SHIFT] || !no_table)
        return ADZE_NO_KERNEL;
    if constexpr (half && CENTRED)
        if (d[GATE] && f32_gate && !steps && !round_norm && g.weight_f32 && g.bias_f32) {
            norm_params as_modulation = g; /* weight and bias are a scale and a shift with strides of 0 */
            as_modulation.data[SCALE] = g.weight, as_modulation.data[SHIFT] = g.bias;
            return norm_modulated<T, float, true, false>(s, as_modulation, g.weight_offset);
        }
    if (d[GATE] || (half && (g.weight_f32 || g.bias_f32)) || (CENTRED ? round_norm : g.bias != NULL) ||
        (round_norm && g.weight_offset != 0))
        return ADZE_NO_KERNEL;
    if (d[RESIDUAL])
        return norm_plain<T, CENTRED, RESIDUAL_SUM>(
            s, norm_call_of<RESIDUAL_SUM>(g, VEC<T>, {X, OUT, RESIDUAL, SUM}, g.weight, g.bias, NULL), round_norm);
    return norm_plain<T, CENTRED, PLAIN>(s, norm_call_of<PLAIN>(g, VEC<T>, {X, OUT}, g.weight, g.bias, NULL),
                                         round_norm);
}

template <bool CENTRED>
static adze_status norm_run(const cuda_call &s, const adze_norm_args *a)
{
    const adze_tensor *const tensors[NORM_TENSORS] = {&a->x,           &a->out,       &a->residual, &a->sum,
                                                      &a->scale,       &a->shift,     &a->gate,     &a->scale_table,
                                                      &a->shift_table, &a->gate_table};
    norm_params p = {};
    p.dim = a->x.shape[a->x.rank - 1];
    adze_rows_init(&p.rows, &a->x, NORM_TENSORS, tensors);
    const bool bytes = adze_is_bytes(a->out.dtype);
    if ((p.dim == 0 && !bytes) || p.rows.count == 0)
        return ADZE_OK;
    p.width = p.rows_width = 16;
    for (int t = 0; t < NORM_TENSORS; t++) {
        p.data[t] = tensors[t]->dtype ? tensors[t]->data : NULL;
        p.is_f32 |= (uint32_t)(tensors[t]->dtype == ADZE_F32 && a->x.dtype != ADZE_F32) << t;
        if (t != OUT || !bytes)
            p.width = std::min(p.width, rows_width(tensors[t], p.dim));
        p.rows_width = t == SUM ? p.width : p.rows_width;
    }
    /* The rows are far more than the parameters, which need not be aligned. A modulation leaves registers for pairs
       of them only. */
    const int flat_width = std::min(rows_width(&a->weight, p.dim), rows_width(&a->bias, p.dim));
    p.loose = norm_unmodulated(p) && flat_width < p.width;
    p.width = norm_unmodulated(p) ? p.width : std::min(p.width, flat_width);
    if (p.width == 1 && p.rows_width > 1)
        p.width = 2, p.loose = true;
    p.weight = a->weight.dtype ? a->weight.data : NULL;
    p.bias = a->bias.dtype ? a->bias.data : NULL;
    p.weight_f32 = a->weight.dtype == ADZE_F32 && a->x.dtype != ADZE_F32;
    p.bias_f32 = a->bias.dtype == ADZE_F32 && a->x.dtype != ADZE_F32;
    p.eps = a->eps;
    p.weight_offset = a->weight_offset;
    p.inverse_dim = 1 / (float)p.dim;
    p.rounding = a->rounding;
    p.centred = CENTRED;
    if (bytes)
        return adze_norm_bytes_cuda(s, p, a, NORM_ANY<CENTRED> + 4);
    const auto registers = a->x.dtype == ADZE_F32   ? norm_in_registers<float, CENTRED>
                           : a->x.dtype == ADZE_F16 ? norm_in_registers<f16, CENTRED>
                                                    : norm_in_registers<bf16, CENTRED>;
    int form = a->x.dtype | a->rounding << 4 | (p.width == 16 && !p.loose) << 12 | (p.weight != NULL) << 13 |
               (p.bias != NULL) << 14 | (p.is_f32 || p.weight_f32 || p.bias_f32) << 15;
    for (int t = RESIDUAL; t < NORM_TENSORS; t++)
        form |= (p.data[t] != NULL) << (14 + t);
    return s.tuned(form, p.rows.count, p.dim, 0, 0, [&] {
        const int64_t vectors = p.dim * (int64_t)adze_dtype_size(a->x.dtype) / 16;
        const bool held = p.width == 16 && !p.loose && (s.choice->want >= 0 || !norm_few_long(s, p, vectors));
        adze_status status = held ? registers(s, p) : ADZE_NO_KERNEL;
        if (status == ADZE_NO_KERNEL)
            status = adze_norm_short_cuda(s, p, a->x.dtype, NORM_ANY<CENTRED> + 3, NORM_ANY<CENTRED> + 6);
        if (status == ADZE_NO_KERNEL)
            status = adze_norm_shifted_cuda(s, p, a->x.dtype, NORM_ANY<CENTRED> + 2);
        return status == ADZE_NO_KERNEL ? adze_norm_any_cuda(s, p, a->x.dtype, NORM_ANY<CENTRED>) : status;
    });
}

#endif
