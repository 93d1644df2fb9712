/* rope_forms.cuh - the forms of calls that rope_fast and rope_across are compiled for, and which calls take which. */
#ifndef ADZE_CUDA_ROPE_FORMS_CUH
#define ADZE_CUDA_ROPE_FORMS_CUH

#include "rope_fast.cuh"

#include <stdlib.h>
#include <type_traits>

/* The variants of rope and, with those from ROPE_ROW on, of qk_norm_rope. */
enum { ROPE_FAST1, ROPE_FAST2, ROPE_ANY, ROPE_PIECES, ROPE_ROW, ROPE_ACROSS, ROPE_ACROSS_LATE, ROPE_TEAM };
constexpr adze_variant ROPE_VARIANTS[] = {
    {"fast-1", "aligned calls of a compiled form, one head per thread"},
    {"fast-2", "aligned calls of f16 or bf16 of a compiled form, two heads per thread"},
    {"any", "every call"},
    {"pieces", "heads at any address that a warp holds in pieces of up to 8 elements"},
    {NULL, NULL},
};
constexpr adze_variant QK_NORM_ROPE_VARIANTS[] = {
    {"fast-1", "aligned calls of a compiled form whose heads fit a warp, one head per thread"},
    {"fast-2", "the same of f16 or bf16, two heads per thread"},
    {"any", "a norm of each head, heads that fit a warp"},
    {"pieces", "a norm of each head, heads at any address that a warp holds in pieces of up to 8 elements"},
    {"row", "every call"},
    {"across", "aligned calls of a compiled form with a norm over all heads"},
    {"across-late", "the same with f32 tables of a column per element, which are loaded after the sum"},
    {"team", "a norm over all heads, which a block holds in pieces of up to 8 elements, at any address"},
    {NULL, NULL},
};

/* The modes of a call that a kernel is compiled for. */
struct rope_form {
    bool f32_tables; /* else they have the dtype of x */
    int pairs;
    bool once; /* tables have one column per pair */
    int round; /* NO_NORM, in rope, and the rounding */

    constexpr rope_form one_column() const { return {f32_tables, pairs, true, round}; }
    constexpr rope_form rounding(int bits) const { return {f32_tables, pairs, once, round | bits}; }
    constexpr rope_form no_norm() const { return rounding(NO_NORM); }
};
constexpr rope_form same_tables(int pairs)
{
    return {false, pairs, false, 0};
}
constexpr rope_form f32_tables(int pairs)
{
    return {true, pairs, false, 0};
}

/* Models of Hugging Face round every step and have tables of the dtype of x; the others have f32 tables. Callers of
   qk_norm_rope that ask for no rounding may have either. */
constexpr rope_form ROPE_FORMS[] = {
    same_tables(ADZE_ROPE_HALF).no_norm(),
    same_tables(ADZE_ROPE_HALF).no_norm().rounding(ADZE_ROUND_STEPS),
    same_tables(ADZE_ROPE_INTERLEAVED).no_norm(),
    same_tables(ADZE_ROPE_INTERLEAVED).no_norm().rounding(ADZE_ROUND_STEPS),
    f32_tables(ADZE_ROPE_HALF).no_norm().one_column(),
    f32_tables(ADZE_ROPE_HALF).no_norm(),
    f32_tables(ADZE_ROPE_INTERLEAVED).no_norm().one_column(),
    f32_tables(ADZE_ROPE_INTERLEAVED).no_norm(),
};
constexpr rope_form QK_NORM_ROPE_FORMS[] = {
    same_tables(ADZE_ROPE_HALF),
    same_tables(ADZE_ROPE_HALF).rounding(ADZE_ROUND_STEPS),
    same_tables(ADZE_ROPE_HALF).rounding(ADZE_ROUND_NORM | ADZE_ROUND_STEPS),
    f32_tables(ADZE_ROPE_HALF).one_column(),
    f32_tables(ADZE_ROPE_INTERLEAVED).one_column().rounding(ADZE_ROUND_VALUE),
    f32_tables(ADZE_ROPE_INTERLEAVED).rounding(ADZE_ROUND_VALUE),
    f32_tables(ADZE_ROPE_INTERLEAVED).one_column().rounding(ADZE_ROUND_NORM | ADZE_ROUND_VALUE),
    f32_tables(ADZE_ROPE_INTERLEAVED).rounding(ADZE_ROUND_NORM | ADZE_ROUND_VALUE),
};
/* With one norm over all heads. */
constexpr rope_form ACROSS_FORMS[] = {
    same_tables(ADZE_ROPE_HALF).rounding(ADZE_ROUND_STEPS),
    f32_tables(ADZE_ROPE_INTERLEAVED).one_column().rounding(ADZE_ROUND_VALUE),
    f32_tables(ADZE_ROPE_INTERLEAVED).rounding(ADZE_ROUND_VALUE),
};
template <bool NORM, bool ACROSS>
constexpr const auto &rope_forms()
{
    if constexpr (ACROSS)
        return ACROSS_FORMS;
    else if constexpr (NORM)
        return QK_NORM_ROPE_FORMS;
    else
        return ROPE_FORMS;
}

/* The parameters of a call for rope_fast or rope_across; false if they cannot take it. The caller checks the
   form. */
template <typename T>
static bool rope_fast_init(const adze_rotary &r, bool norm, rope_fast_params *p)
{
    constexpr int64_t W = VEC<T>, most = 0x7fffffff;
    bool in_place = true;
    for (const adze_rotary_tensor &tensor : r.qk) {
        if (tensor.heads == 0)
            continue;
        in_place = in_place && tensor.x == tensor.out;
        for (int d = 0; d < 3; d++)
            in_place = in_place && tensor.x_stride[d] == tensor.out_stride[d];
    }
    const int64_t rotating = r.rotary_dim / 2 / W, rest = in_place && !norm ? 0 : r.head_dim - r.rotary_dim;
    const int64_t lanes = rotating + rest / 2 / W;
    int64_t width = norm && !r.across_heads ? 1 : lanes;
    while (width < lanes)
        width *= 2;
    const int64_t excess = width ? (65536 + width - 1) / width * width - 65536 : 0;
    bool fits = rotating > 0 && r.rotary_dim % (2 * W) == 0 && rest % (2 * W) == 0 &&
                lanes <= (r.across_heads ? ACROSS_THREADS : FAST_THREADS) && excess * ACROSS_THREADS < 65536 &&
                r.batch * r.seq * (r.qk[0].heads + r.qk[1].heads) <= most / 2;
    if (norm)
        fits = fits && (r.across_heads ? r.rotary_dim == r.head_dim : width <= 32);
    for (int k = 0; k < 2; k++) {
        const adze_rotary_tensor &tensor = r.qk[k];
        rope_fast_tensor &to = p->qk[k];
        if (tensor.heads == 0)
            continue;
        fits = fits && tensor.heads <= most / r.head_dim;
        fits = fits && llabs(tensor.x_stride[2]) <= most / (tensor.heads + 8) - r.head_dim &&
               llabs(tensor.out_stride[2]) <= most / (tensor.heads + 8) - r.head_dim;
        fits = fits && (!norm || (tensor.weight ? tensor.weight_dtype == r.dtype : r.weight_offset == 0));
        to.x = tensor.x, to.out = tensor.out, to.weight = tensor.weight;
        for (int d = 0; d < 2; d++)
            to.x_stride[d] = tensor.x_stride[d], to.out_stride[d] = tensor.out_stride[d];
        to.x_head = (int32_t)tensor.x_stride[2], to.out_head = (int32_t)tensor.out_stride[2];
        to.heads = (int32_t)tensor.heads;
    }
    p->cos = r.cos, p->sin = r.sin;
    for (int d = 0; d < 2; d++)
        p->cos_stride[d] = r.cos_stride[d], p->sin_stride[d] = r.sin_stride[d];
    p->seq = r.batch > 1 ? (uint32_t)r.seq : 0;
    p->width = (int32_t)width;
    p->lanes = (int32_t)lanes;
    p->rotating = (int32_t)rotating;
    p->inverse_width = width ? (uint32_t)((65536 + width - 1) / width) : 0;
    p->half = (int32_t)(r.rotary_dim / 2);
    p->table_half = !r.once ? p->half : r.pairs == ADZE_ROPE_INTERLEAVED ? p->half / 2 : 0;
    p->eps = r.eps;
    p->weight_offset = r.weight_offset;
    return fits;
}

template <typename T, typename TRAITS, int HEADS>
static adze_status rope_launch_fast(const cuda_call &stream, rope_fast_params p, int64_t tokens)
{
    constexpr int most = HEADS == 1 ? FAST_THREADS : FAST_THREADS / 2;
    for (auto &tensor : p.qk)
        tensor.groups = (tensor.heads + HEADS - 1) / HEADS;
    const int groups = p.qk[0].groups + p.qk[1].groups;
    for (p.part_groups = groups; p.part_groups * p.width > most && p.part_groups > 1; p.parts_log2++)
        p.part_groups = (groups + (2 << p.parts_log2) - 1) / (2 << p.parts_log2);
    const int64_t token_threads = p.part_groups * p.width, sm_count = stream.gpu.sm_count;
    p.tokens = (uint32_t)tokens;
    p.pack = token_threads <= 64 && tokens > 4 * sm_count ? (uint32_t)(128 / token_threads) : 1;
    p.inverse_part = (uint32_t)((65536 + p.part_groups - 1) / p.part_groups);
    const int64_t vectors = 2 * HEADS * p.lanes, threads = (p.pack * token_threads + 31) / 32 * 32;
    p.prefetch_blocks =
        prefetch_blocks(stream.gpu, tokens * groups * vectors, p.pack * p.part_groups * vectors, threads, 24);
    return launch(stream, rope_fast<T, TRAITS, HEADS>, ceil_div(tokens, p.pack) << p.parts_log2,
                  dim3((unsigned)threads), 0, p);
}

/* One head per thread while the GPU has room for all threads, for f32, whose heads are twice as long, and for
   partial rotation, which few models have; else two, if a head has four lanes or more: of shorter ones a thread's two
   heads took 1.05 to 1.33 times as long (all variants on random calls, H200, 2026-11-19). A small call without a norm
   is faster with two as well, if a token then still has two warps (19 random calls, H200, 2026-11-18). Where the
   tokens of a head are nearer to each other than the heads of a token, a block reads and writes far apart: large
   calls without a norm are rope_any's, whose threads go along the tokens (0.82 to 1.01 of the time). */
template <typename T, typename TRAITS>
static adze_status rope_pick_heads(const cuda_call &stream, rope_fast_params p, int64_t tokens)
{
    const int64_t threads = tokens * (p.qk[0].heads + p.qk[1].heads) * p.lanes;
    const int64_t room = (int64_t)stream.gpu.sm_threads * stream.gpu.sm_count;
    const rope_fast_tensor &main = p.qk[p.qk[0].heads ? 0 : 1];
    const bool apart = main.heads > 1 && p.seq != 1 && llabs(main.x_stride[1]) < llabs(main.x_head);
    const bool scattered = !TRAITS::NORM && threads > 4 * room && apart;
    const bool small = !TRAITS::NORM && threads <= room / 4 && threads >= tokens * 128;
    if constexpr (sizeof(T) < 4 && (!TRAITS::REST || (!TRAITS::NORM && TRAITS::STEPS)))
        if (stream.takes(ROPE_FAST2, true, (threads > room && p.lanes >= 4 && !scattered) || small))
            return rope_launch_fast<T, TRAITS, 2>(stream, p, tokens);
    return stream.takes(ROPE_FAST1, true, !scattered) ? rope_launch_fast<T, TRAITS, 1>(stream, p, tokens)
                                                      : ADZE_NO_KERNEL;
}

template <typename T, typename TRAITS>
static adze_status rope_launch_across(const cuda_call &stream, rope_fast_params p, int64_t tokens)
{
    const int heads = p.qk[0].heads > p.qk[1].heads ? p.qk[0].heads : p.qk[1].heads;
    const dim3 threads((unsigned)(heads * p.lanes + 31) / 32 * 32);
    const int64_t vectors = 2 * (p.qk[0].heads + p.qk[1].heads) * p.lanes;
    p.prefetch_blocks = prefetch_blocks(stream.gpu, tokens * vectors, vectors, threads.x, 16);
    if constexpr (wide_tables<T, TRAITS>)
        if (stream.takes(ROPE_ACROSS_LATE, (int)threads.x <= across_threads<true>, heads > 1))
            return launch(stream, rope_across<T, TRAITS, true>, tokens, threads, 0, p);
    return stream.takes(ROPE_ACROSS, true) ? launch(stream, rope_across<T, TRAITS, false>, tokens, threads, 0, p)
                                           : ADZE_NO_KERNEL;
}

/* Whether a call is of a form. f32 is not rounded. Tables of T with a column per element also serve calls with a
   column per pair: both halves then read the same columns. */
template <typename T, typename TRAITS>
static bool rope_is_form(const adze_rotary &r, bool norm)
{
    constexpr bool f32_table = sizeof(typename TRAITS::S) == 4;
    const int round = r.rounding & ADZE_ROUND_STEPS ? r.rounding & ~ADZE_ROUND_VALUE : r.rounding;
    return TRAITS::PAIRS == r.pairs && TRAITS::NORM == norm && f32_table == (r.table_dtype == ADZE_F32) &&
           (TRAITS::ONCE == (r.once != 0) || (!TRAITS::ONCE && !TRAITS::INTERLEAVED && !f32_table)) &&
           (sizeof(T) == 4 || (TRAITS::ROUND & ~NO_NORM) == round) &&
           (TRAITS::ROUND != (ADZE_ROUND_NORM | ADZE_ROUND_STEPS) || r.weight_offset == 0);
}

/* Launches a call by the first form from FORM on that it is of; false if there is none. REST: a part of each head is
   not rotated. */
template <typename T, bool NORM, bool ACROSS, bool REST, int FORM = 0>
static bool rope_try_forms(const cuda_call &stream, const adze_rotary &r, const rope_fast_params &p,
                           adze_status *status)
{
    constexpr auto &forms = rope_forms<NORM, ACROSS>();
    if constexpr (FORM < (int)(sizeof forms / sizeof *forms)) {
        constexpr rope_form f = forms[FORM];
        typedef rope_traits<std::conditional_t<f.f32_tables, float, T>, f.pairs, f.once, f.round, REST> traits;
        if constexpr (sizeof(T) < 4 || !(traits::ROUND & (ADZE_ROUND_NORM | ADZE_ROUND_STEPS)))
            if (rope_is_form<T, traits>(r, NORM)) {
                const int64_t tokens = r.batch * r.seq;
                if constexpr (ACROSS)
                    *status = rope_launch_across<T, traits>(stream, p, tokens);
                else
                    *status = rope_pick_heads<T, traits>(stream, p, tokens);
                return true;
            }
        return rope_try_forms<T, NORM, ACROSS, REST, FORM + 1>(stream, r, p, status);
    }
    return false;
}

/* Launches a call if it is of a form; false if it is not. */
template <typename T, bool NORM>
static bool rope_try_fast(const cuda_call &stream, const adze_rotary &r, const float (&inverse)[2], bool const_tables,
                          adze_status *status)
{
    rope_fast_params p = {};
    if (!rope_fast_init<T>(r, NORM, &p))
        return false;
    const int most = p.qk[0].heads > p.qk[1].heads ? p.qk[0].heads : p.qk[1].heads;
    p.qk[0].inverse = inverse[0], p.qk[1].inverse = inverse[1];
    p.const_tables = const_tables;
    if constexpr (NORM)
        if (r.across_heads)
            return most <= ACROSS_THREADS / p.lanes && rope_try_forms<T, NORM, true, false>(stream, r, p, status);
    return p.rotating < p.lanes ? rope_try_forms<T, NORM, false, true>(stream, r, p, status)
                                : rope_try_forms<T, NORM, false, false>(stream, r, p, status);
}

#endif
