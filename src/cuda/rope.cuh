/* rope.cuh - which kernel a call of rope or qk_norm_rope takes, and its launch: rope_fast.cuh has the calls that
   models make most, rope_pieces.cuh short heads in any form and at any address, rope_any.cuh all others. */
#ifndef ADZE_CUDA_ROPE_CUH
#define ADZE_CUDA_ROPE_CUH

#include "rope_any.cuh"
#include "rope_forms.cuh"
#include "rope_pieces.cuh"

#include <algorithm>

/* Whether q and k and their outputs can be read and written `bytes` bytes at a time. */
static inline bool rope_qk_aligned(const adze_rotary &r, int64_t size, int64_t bytes)
{
    bool aligned = true;
    for (const adze_rotary_tensor &tensor : r.qk) {
        const int64_t sizes[3] = {r.batch, r.seq, tensor.heads};
        if (tensor.heads == 0)
            continue;
        aligned = aligned && (uintptr_t)tensor.x % bytes == 0 && (uintptr_t)tensor.out % bytes == 0;
        for (int d = 0; d < 3; d++)
            aligned = aligned && (sizes[d] == 1 || (tensor.x_stride[d] * size % bytes == 0 &&
                                                    tensor.out_stride[d] * size % bytes == 0));
    }
    return aligned;
}
static inline bool rope_tables_aligned(const adze_rotary &r, int64_t bytes)
{
    const int64_t size = (int64_t)adze_dtype_size(r.table_dtype), sizes[2] = {r.batch, r.seq};
    bool aligned = (uintptr_t)r.cos % bytes == 0 && (uintptr_t)r.sin % bytes == 0;
    for (int d = 0; d < 2; d++)
        aligned = aligned &&
                  (sizes[d] == 1 || (r.cos_stride[d] * size % bytes == 0 && r.sin_stride[d] * size % bytes == 0));
    return aligned;
}

/* Whether rope_fast and rope_across can read all of it in 16-byte vectors. */
static inline bool rope_aligned(const adze_rotary &r, int64_t size)
{
    bool aligned = r.rotary_dim * size % 32 == 0 && r.head_dim * size % 16 == 0 && rope_qk_aligned(r, size, 16) &&
                   rope_tables_aligned(r, 16);
    for (const adze_rotary_tensor &tensor : r.qk)
        aligned = aligned && (tensor.heads == 0 || (uintptr_t)tensor.weight % 16 == 0);
    return aligned;
}

/* Whether rope_any can take units of `width` elements. */
static inline bool rope_width_fits(const adze_rotary &r, int64_t size, int64_t width, int64_t rest)
{
    const bool interleaved = r.pairs == ADZE_ROPE_INTERLEAVED;
    const int64_t columns = interleaved && r.once ? width / 2 : width;
    return r.rotary_dim / (interleaved ? 1 : 2) % width == 0 && rest % width == 0 &&
           rope_qk_aligned(r, size, width * size) &&
           rope_tables_aligned(r, columns * (int64_t)adze_dtype_size(r.table_dtype));
}

/* The elements of a head that do not rotate, and are written: in place without a norm they stay. */
static inline int32_t rope_rest(const adze_rotary &r, bool norm)
{
    bool in_place = !norm;
    for (const adze_rotary_tensor &tensor : r.qk) {
        in_place = in_place && (tensor.heads == 0 || tensor.x == tensor.out);
        for (int d = 0; d < 3; d++)
            in_place = in_place && (tensor.heads == 0 || tensor.x_stride[d] == tensor.out_stride[d]);
    }
    return in_place ? 0 : (int32_t)(r.head_dim - r.rotary_dim);
}

/* Where the units of a head are. Returns their width, which is at most `width`. */
static inline int rope_any_places(rope_any_params *p, bool norm, int width)
{
    const adze_rotary &r = p->r;
    const int64_t size = (int64_t)adze_dtype_size(r.dtype);
    const int32_t half = (int32_t)(r.rotary_dim / 2);
    const int32_t rest = rope_rest(r, norm);
    while (width > 1 && !rope_width_fits(r, size, width, rest))
        width /= 2;
    p->rotated_step = p->table_step = width;
    if (r.pairs == ADZE_ROPE_HALF) {
        p->rotating = p->rotated_seconds = half / width;
        p->rotated_apart = half;
        p->table_apart = r.once ? 0 : half;
    } else if (width == 1) {
        p->rotating = p->rotated_seconds = half;
        p->rotated_step = 2, p->rotated_apart = 1;
        p->table_step = r.once ? 1 : 2, p->table_apart = r.once ? 0 : 1;
    } else {
        p->rotated_seconds = half / width;
        p->rotating = 2 * half / width - p->rotated_seconds;
        p->rotated_apart = p->rotating * width;
    }
    p->rest_seconds = rest / width / 2;
    const int32_t rest_pairs = rest / width - p->rest_seconds;
    p->rest_apart = rest_pairs * width;
    p->pairs = p->rotating + rest_pairs;
    for (int k = 0; k < 2; k++)
        p->weight_wide[k] = (uintptr_t)r.qk[k].weight % (width * adze_float_size(r.qk[k].weight_dtype)) == 0;
    return width;
}

/* How many blocks prefetch; a block has `pairs` pairs of units of `bytes` bytes. */
static inline uint32_t rope_any_prefetch_blocks(const rope_any_params &p, const cuda_limits &gpu, int64_t pairs,
                                                int64_t bytes, int64_t threads)
{
    const adze_rotary &r = p.r;
    const int64_t all = r.batch * r.seq * (r.qk[0].heads + r.qk[1].heads) * r.head_dim;
    const int64_t block = pairs * 2 * bytes / 16;
    return prefetch_blocks(gpu, all * (int64_t)adze_dtype_size(r.dtype) / 16, block > 1 ? block : 1, threads, 24);
}

template <typename TRAITS>
static adze_status rope_launch_any(const cuda_call &stream, rope_any_params p)
{
    const adze_rotary &r = p.r;
    const adze_rotary_tensor &q = r.qk[0], &k = r.qk[1], &main = q.heads ? q : k;
    const int64_t tokens = r.batch * r.seq;
    const int64_t sm_count = stream.gpu.sm_count, sm_threads = stream.gpu.sm_threads;
    p.width = (int32_t)ceil_div(p.pairs, TRAITS::P);
    if (TRAITS::NORM)
        for (p.width = 1; p.width * TRAITS::P < p.pairs;)
            p.width *= 2;
    /* More heads per thread, as long as there are enough threads. */
    const auto threads = [&](int64_t each) {
        return tokens * p.width * (ceil_div(q.heads, each) + ceil_div(k.heads, each));
    };
    for (p.each = 1; p.each < TRAITS::HEADS && threads(2 * p.each) >= sm_threads / 2 * sm_count;)
        p.each *= 2;
    p.groups[0] = ceil_div(q.heads, p.each), p.groups[1] = ceil_div(k.heads, p.each);
    p.count = threads(p.each);
    p.wide_index = p.count > 0x7fffffff;
    p.tokens_inner = main.heads > 1 && r.seq > 1 && llabs(main.x_stride[1]) < llabs(main.x_stride[2]);
    p.by_width = divisor_of(p.width);
    p.by_inner = divisor_of(p.tokens_inner ? tokens : p.groups[0] + p.groups[1]);
    p.by_seq = divisor_of(r.seq);
    p.prefetch_blocks = rope_any_prefetch_blocks(p, stream.gpu, ANY_THREADS * p.each * TRAITS::P,
                                                 TRAITS::W * sizeof(typename TRAITS::T), ANY_THREADS);
    return launch(stream, rope_any<TRAITS>, ceil_div(p.count, ANY_THREADS), dim3(ANY_THREADS), 0, p);
}

/* The pairs of units that the threads of a block of rope_any_row hold, and whether q and k are two rows, because
   together they have more. */
constexpr int rope_row_held(int width)
{
    return ROW_THREADS * row_slots(width);
}
static inline bool rope_row_splits(const rope_any_params &p, int width)
{
    const int64_t q = p.r.qk[0].heads, k = p.r.qk[1].heads;
    return q && k && (q + k) * p.pairs > rope_row_held(width);
}

template <typename TRAITS>
static adze_status rope_launch_row(const cuda_call &stream, rope_any_params p)
{
    const adze_rotary &r = p.r;
    const int64_t sm_count = stream.gpu.sm_count, sm_threads = stream.gpu.sm_threads;
    const int64_t q_heads = r.qk[0].heads, k_heads = r.qk[1].heads, heads = q_heads + k_heads;
    p.split = rope_row_splits(p, TRAITS::W);
    const int64_t rows_each = !r.across_heads ? heads : p.split ? 2 : 1;
    const int64_t row_heads = !r.across_heads ? 1 : !p.split ? heads : std::max(q_heads, k_heads);
    const int64_t pairs = row_heads * p.pairs;
    p.count = r.batch * r.seq * rows_each;
    p.wide_index = p.count > 0x7fffffff;
    p.by_width = divisor_of(p.pairs);
    p.by_inner = divisor_of(rows_each);
    p.by_seq = divisor_of(r.seq);
    /* With enough rows, what a thread reads together, so that blocks are small; else little, for latency. */
    int64_t slots = p.count * pairs > sm_threads * sm_count ? TRAITS::SLOTS : 1;
    if (ceil_div(pairs, slots) > ROW_THREADS)
        slots = ceil_div(pairs, ROW_THREADS);
    const int64_t threads = (ceil_div(pairs, slots) + 31) / 32 * 32,
                  rows = threads < ROW_BLOCK ? ROW_BLOCK / threads : 1;
    p.held = threads * TRAITS::SLOTS >= pairs;
    p.step_heads = (int32_t)(threads / p.pairs), p.step_pairs = (int32_t)(threads % p.pairs);
    p.prefetch_blocks =
        rope_any_prefetch_blocks(p, stream.gpu, rows * pairs, TRAITS::W * sizeof(typename TRAITS::T), threads * rows);
    return launch(stream, rope_any_row<TRAITS>, grid_for(p.count, rows), dim3((unsigned)threads, (unsigned)rows), 0,
                  p);
}

/* Whether a norm needs rope_any_row: it goes across heads, or a head is longer than 32 threads can hold. */
static inline bool rope_needs_row(const rope_any_params &p, int width)
{
    return p.r.across_heads || p.pairs > 32 * 4 / width;
}

template <typename T, typename S, int KIND, int W, bool NORM, bool ROUNDS>
static adze_status rope_pick_any(const cuda_call &stream, const rope_any_params &p)
{
    if constexpr (NORM) {
        typedef rope_any_traits<T, S, KIND, W, 4 / W, true, ROUNDS> row_traits;
        if (stream.takes(ROPE_ROW, true, rope_needs_row(p, W)))
            return rope_launch_row<row_traits>(stream, p);
        if (!stream.takes(ROPE_ANY, !rope_needs_row(p, W)))
            return ADZE_NO_KERNEL;
        if (W > 1 || p.pairs > 32)
            return rope_launch_any<row_traits>(stream, p);
    }
    constexpr int P = NORM ? 4 / W : 1;
    typedef rope_any_traits<T, S, KIND, W, W == 1 ? 1 : P, NORM, ROUNDS> short_traits;
    if (!NORM && !stream.takes(ROPE_ANY, true))
        return ADZE_NO_KERNEL;
    return rope_launch_any<short_traits>(stream, p);
}

template <typename T, typename S, bool NORM, bool ROUNDS>
static adze_status rope_pick_width(const cuda_call &stream, const rope_any_params &p, int width)
{
    if (width == 1)
        return rope_pick_any<T, S, PAIR_OF_UNITS, 1, NORM, ROUNDS>(stream, p);
    if (p.r.pairs == ADZE_ROPE_HALF)
        return width == 2 ? rope_pick_any<T, S, PAIR_OF_UNITS, 2, NORM, ROUNDS>(stream, p)
                          : rope_pick_any<T, S, PAIR_OF_UNITS, 4, NORM, ROUNDS>(stream, p);
    if (p.r.once)
        return width == 2 ? rope_pick_any<T, S, PAIRS_ONCE, 2, NORM, ROUNDS>(stream, p)
                          : rope_pick_any<T, S, PAIRS_ONCE, 4, NORM, ROUNDS>(stream, p);
    return width == 2 ? rope_pick_any<T, S, PAIRS_EACH, 2, NORM, ROUNDS>(stream, p)
                      : rope_pick_any<T, S, PAIRS_EACH, 4, NORM, ROUNDS>(stream, p);
}

/* Where the pieces of a head are; false if a warp has too few lanes for them. */
static inline bool rope_pieces_places(rope_pieces_params *p, bool norm)
{
    const adze_rotary &r = p->r;
    const int32_t rotary = (int32_t)r.rotary_dim, rest = rope_rest(r, norm);
    const bool half = r.pairs == ADZE_ROPE_HALF;
    if (r.head_dim > 64 * PIECE)
        return false;
    const auto lanes = [](int32_t elements) { return (elements + 2 * PIECE - 1) / (2 * PIECE); };
    p->rotating = half ? (rotary / 2 + PIECE - 1) / PIECE : lanes(rotary);
    p->apart = half ? rotary / 2 : p->rotating * PIECE;
    p->first_end = half ? rotary / 2 : rotary;
    p->rest_apart = lanes(rest) * PIECE;
    p->end = rotary + rest;
    p->lanes = p->rotating + lanes(rest);
    return p->lanes > 0 && p->lanes <= 32;
}

/* Whether all pieces are whole and begin at 16-byte borders. */
static inline bool rope_pieces_aligned(const rope_pieces_params &p)
{
    return p.first_end % PIECE == 0 && p.r.rotary_dim % PIECE == 0 && p.end % PIECE == 0 &&
           rope_qk_aligned(p.r, (int64_t)adze_dtype_size(p.r.dtype), 16);
}

/* Whether all pieces of out are 16-byte vectors. */
static inline bool rope_pieces_stored_whole(const rope_pieces_params &p)
{
    const int64_t size = (int64_t)adze_dtype_size(p.r.dtype);
    bool whole = p.first_end * size % 16 == 0 && p.r.rotary_dim * size % 16 == 0 && p.end * size % 16 == 0;
    for (const adze_rotary_tensor &tensor : p.r.qk) {
        const int64_t sizes[3] = {p.r.batch, p.r.seq, tensor.heads};
        whole = whole && (tensor.heads == 0 || (uintptr_t)tensor.out % 16 == 0);
        for (int d = 0; d < 3; d++)
            whole = whole && (tensor.heads == 0 || sizes[d] == 1 || tensor.out_stride[d] * size % 16 == 0);
    }
    return whole;
}

/* Spreads heads and tokens over lanes. The blocks of the call, or 0 if a team has more threads than a block. */
static inline int64_t rope_pieces_spread(rope_pieces_params *p, int groups, int each, int64_t tokens)
{
    const adze_rotary &r = p->r;
    const int fit = 32 / p->lanes;
    p->groups = groups, p->each = each;
    p->warps = groups <= fit ? 1 : (int32_t)ceil_div(groups, fit);
    p->per_warp = groups <= fit ? fit / groups : fit;
    const int64_t teams = p->warps > 1 ? 1 : p->per_warp; /* of the warps of a team */
    int64_t copies = p->warps > PIECES_THREADS / 64 ? 1 : PIECES_THREADS / 32 / p->warps;
    while (copies > 1 && tokens <= copies / 2 * teams)
        copies /= 2;
    p->block_tokens = (int32_t)(copies * teams);
    int64_t shares = 0;
    for (int k = 0; k < 2; k++)
        shares += p->shares[k] = (int32_t)ceil_div(r.qk[k].heads, (int64_t)groups * each);
    const int most = r.dtype == ADZE_F32 ? TEAM_THREADS<4> : TEAM_THREADS<2>;
    return p->warps * 32 > most ? 0 : ceil_div(tokens, p->block_tokens) * shares;
}
/* The share of the groups that have work. */
static inline double rope_pieces_used(const rope_pieces_params &p, int64_t tokens)
{
    const int64_t q = p.r.qk[0].heads, k = p.r.qk[1].heads, fit = 32 / p.lanes;
    const int64_t rounds = ceil_div(q, p.groups) + ceil_div(k, p.groups);
    const int64_t groups = p.warps > 1 ? p.groups : p.groups * p.per_warp;
    const double of_heads = (double)(q + k) / (double)(rounds * p.groups);
    const double of_warps = (double)groups / (double)(fit * p.warps);
    return of_heads * of_warps * (double)tokens / (double)(ceil_div(tokens, p.block_tokens) * p.block_tokens);
}

/* Whether the tokens of a head are nearer to each other than the heads of a token. */
static inline bool rope_tokens_inner(const adze_rotary &r)
{
    const adze_rotary_tensor &main = r.qk[r.qk[0].heads ? 0 : 1];
    return std::max(r.qk[0].heads, r.qk[1].heads) > 1 && r.seq > 1 &&
           llabs(main.x_stride[1]) < llabs(main.x_stride[2]);
}
/* A norm of each head, or none: the groups of a team are those that leave the fewest lanes idle, and that have many
   heads each: to unpack the tables costs about as much as two heads. A group then has as many heads as leave enough
   blocks for the GPU. */
constexpr int PIECES_EACH = 8;
static inline int64_t rope_pieces_plan(rope_pieces_params *p, const cuda_limits &gpu, int64_t tokens)
{
    const adze_rotary &r = p->r;
    const int64_t q = r.qk[0].heads, k = r.qk[1].heads, most = std::max(q, k);
    const int64_t few = q && k ? std::min(q, k) : most;
    const bool tokens_inner = rope_tokens_inner(r);
    int best = 1;
    double used = 0;
    for (int groups = 1; groups <= 32 / p->lanes && groups <= few && (groups == 1 || !tokens_inner); groups++) {
        rope_pieces_spread(p, groups, 1, tokens);
        const double each = (double)std::min<int64_t>(ceil_div(most, groups), PIECES_EACH);
        const double now = rope_pieces_used(*p, tokens) * each / (each + 2);
        if (now >= used)
            best = groups, used = now;
    }
    const int64_t rounds = ceil_div(most, best);
    for (int64_t parts = ceil_div(rounds, PIECES_EACH);; parts *= 2) {
        const int each = (int)ceil_div(rounds, parts);
        const int64_t blocks = rope_pieces_spread(p, best, each, tokens);
        if (each == 1 || blocks >= 8 * gpu.sm_count)
            return blocks;
    }
}
/* A norm across heads: a lane holds up to `most` heads, fewer where this leaves fewer lanes idle, or where the GPU
   would have too few blocks. 0: a block cannot hold them. */
static inline int64_t rope_team_plan(rope_pieces_params *p, const cuda_limits &gpu, int64_t tokens, int most)
{
    const int64_t heads = std::max(p->r.qk[0].heads, p->r.qk[1].heads);
    if (heads > (int64_t)most * TEAM_THREADS<4>)
        return 0;
    int best = 0;
    double best_used = 0;
    for (int each = 1; each <= most; each++) {
        const int64_t blocks = rope_pieces_spread(p, (int)ceil_div(heads, each), each, tokens);
        const double used = rope_pieces_used(*p, tokens) + 0.05 * each;
        if (blocks > 0 && (used > best_used || best == 0) && (best == 0 || blocks >= 4 * gpu.sm_count))
            best = each, best_used = used;
    }
    return best ? rope_pieces_spread(p, (int)ceil_div(heads, best), best, tokens) : 0;
}

template <typename T, int KIND>
static adze_status rope_launch_pieces(const cuda_call &stream, rope_pieces_params p, int64_t blocks)
{
    const adze_rotary &r = p.r;
    const auto inverse = [](int64_t n) { return (uint32_t)((65536 + n - 1) / n); };
    p.by_shares = divisor_of(p.shares[0] + p.shares[1]);
    p.by_seq = divisor_of(r.seq);
    p.by_lanes = inverse(p.lanes), p.by_groups = inverse(p.groups), p.by_warps = inverse(p.warps);
    p.span = KIND != PIECES_ACROSS ? p.lanes : p.warps > 1 ? 32 : p.groups * p.lanes;
    const int64_t warps = p.warps > 1 ? p.block_tokens * p.warps : p.block_tokens / p.per_warp;
    const int64_t heads = p.warps > 1 ? p.warps * p.per_warp : warps * (32 / p.lanes);
    const int64_t vectors = heads * p.each * ceil_div(p.end * (int64_t)sizeof(T), 16);
    const int64_t all = r.batch * r.seq * (r.qk[0].heads + r.qk[1].heads) * p.end * (int64_t)sizeof(T) / 16;
    p.prefetch_blocks = prefetch_blocks(stream.gpu, all, vectors, warps * 32, 24);
    const dim3 threads((unsigned)(warps * 32));
    p.staged = rope_pieces_stored_whole(p) ? 0 : (uint32_t)(32 / p.lanes) * rope_pieces_pitch(p, sizeof(T));
    const size_t bytes = (size_t)warps * p.staged;
    if constexpr (sizeof(T) < 4)
        if (r.rounding)
            return launch(stream, rope_pieces<T, KIND, true, false>, blocks, threads, bytes, p);
    if constexpr (KIND == PIECES_ACROSS) /* others are narrow */
        if (rope_pieces_aligned(p))
            return launch(stream, rope_pieces<T, KIND, false, true>, blocks, threads, bytes, p);
    return launch(stream, rope_pieces<T, KIND, false, false>, blocks, threads, bytes, p);
}

/* Whether a call is faster in pieces than in rope_any's units of `width` elements, by the times of both on 173 random
   calls (H200, 2026-11-18) and 100 more (2026-11-19). It is not where units have 8 bytes or more. Narrow units are
   faster in small calls, whose time is latency, and in large ones, where a thread has several heads for the columns
   that it loads; but not single 16-bit elements of a norm, which are read twice as fast in pieces, or of neighbouring
   pairs, which took 1.3 to 1.5 times as long. Single floats are the slower ones between 2048 and 8192 of them per
   multiprocessor: 1.2 to 1.5 times, and 0.8 to 0.9 times beyond. */
template <typename T, bool NORM>
static bool rope_pieces_faster(const cuda_limits &gpu, const rope_pieces_params &p, const rope_any_params &any,
                               int width)
{
    const adze_rotary &r = p.r;
    const int64_t all = r.batch * r.seq * (r.qk[0].heads + r.qk[1].heads);
    const bool some = all * r.head_dim > 2048 * gpu.sm_count;
    if (width * (int)sizeof(T) >= 8)
        return false;
    if (NORM && (rope_needs_row(any, width) /* rope_any cannot take it, and rope_any_row is slower */ ||
                 (width == 1 && sizeof(T) == 2)))
        return some;
    if (!rope_pieces_stored_whole(p))
        return false;
    if (sizeof(T) == 4)
        return some && (NORM || all * r.head_dim <= 8192 * gpu.sm_count);
    if (!NORM && width == 1 && r.pairs == ADZE_ROPE_INTERLEAVED && some)
        return true;
    const int pairs = NORM && (width > 1 || any.pairs > 32) ? 4 / width : 1; /* of a thread, P of rope_any */
    int64_t threads = NORM ? 1 : any.pairs, half = (int64_t)gpu.sm_threads / 2 * gpu.sm_count;
    while (NORM && threads * pairs < any.pairs)
        threads *= 2;
    threads *= all;
    return threads >= half && threads * width * pairs < 4 * half;
}
/* The same across heads, against rope_any_row, by the times of both on 50 calls, and on 46 more (2026-11-19):
   rope_any_row is faster where its threads hold a row in units of two elements or more, in calls of few tokens, and
   of at most 36 KB per multiprocessor; of floats, a row of one pair of units in each thread. It is faster in larger
   calls too where a row has a block, its units have four elements, and pieces are put together in shared memory
   before they are stored. */
template <typename T>
static bool rope_team_faster(const cuda_limits &gpu, const rope_pieces_params &p, const rope_any_params &any,
                             int width)
{
    const adze_rotary &r = any.r;
    const int64_t q = r.qk[0].heads, k = r.qk[1].heads;
    const int64_t row = rope_row_splits(any, width) ? std::max(q, k) : q + k;
    const int held = sizeof(T) == 4 ? ROW_THREADS : rope_row_held(width);
    if (row * any.pairs > held)
        return true;
    if (width == 4 && row * any.pairs >= ROW_BLOCK && !rope_pieces_stored_whole(p))
        return false;
    return width == 1 || r.batch * r.seq >= 4 * gpu.sm_count ||
           r.batch * r.seq * (q + k) * r.head_dim * (int64_t)sizeof(T) > (36 << 10) * gpu.sm_count;
}

/* Launches a call in pieces, if it can be and should be; false if not. `width` is that of rope_any's units. */
template <typename T, bool NORM>
static bool rope_try_pieces(const cuda_call &stream, const adze_rotary &r, const rope_any_params &any, int width,
                            adze_status *status)
{
    rope_pieces_params p = {};
    p.r = r;
    for (int k = 0; k < 2; k++)
        p.inverse[k] = any.inverse[k];
    p.const_tables = any.const_tables;
    const int64_t tokens = r.batch * r.seq;
    if (tokens > 0x3fffffff || !rope_pieces_places(&p, NORM))
        return false;
    p.tokens = (uint32_t)tokens;
    if constexpr (NORM)
        if (r.across_heads) {
            const int64_t blocks = rope_team_plan(&p, stream.gpu, tokens, pieces_heads<T, PIECES_ACROSS>);
            if (!stream.takes(ROPE_TEAM, blocks > 0 && blocks <= 0x7fffffff,
                              rope_team_faster<T>(stream.gpu, p, any, width)))
                return false;
            *status = rope_launch_pieces<T, PIECES_ACROSS>(stream, p, blocks);
            return true;
        }
    const int64_t blocks = rope_pieces_plan(&p, stream.gpu, tokens);
    if (!stream.takes(ROPE_PIECES, blocks > 0 && blocks <= 0x7fffffff,
                      rope_pieces_faster<T, NORM>(stream.gpu, p, any, width)))
        return false;
    constexpr int KIND = NORM ? PIECES_HEAD : PIECES_NO_NORM;
    *status = rope_launch_pieces<T, KIND>(stream, p, blocks);
    return true;
}

template <typename T, bool NORM>
static adze_status rope_launch(const cuda_call &stream, rope_any_params p)
{
    const adze_rotary &r = p.r;
    adze_status status;
    if (rope_aligned(r, sizeof(T)) && rope_try_fast<T, NORM>(stream, r, p.inverse, p.const_tables, &status) &&
        status != ADZE_NO_KERNEL)
        return status;
    const int width = rope_any_places(&p, NORM, 4);
    if (rope_try_pieces<T, NORM>(stream, r, p, width, &status))
        return status;
    if constexpr (sizeof(T) == 4) {
        return rope_pick_width<T, float, NORM, false>(stream, p, width);
    } else if (r.table_dtype == ADZE_F32) {
        return r.rounding ? rope_pick_width<T, float, NORM, true>(stream, p, width)
                          : rope_pick_width<T, float, NORM, false>(stream, p, width);
    } else {
        return r.rounding ? rope_pick_width<T, T, NORM, true>(stream, p, width)
                          : rope_pick_width<T, T, NORM, false>(stream, p, width);
    }
}

template <bool NORM>
static adze_status rope_run(const cuda_call &stream, const adze_qk_norm_rope_args *a)
{
    rope_any_params p = {};
    p.r = adze_rotary_of(a);
    const adze_rotary &r = p.r;
    if (r.batch * r.seq * (r.qk[0].heads + r.qk[1].heads) * r.head_dim == 0)
        return ADZE_OK;
    constexpr int64_t most = 0x3fffffff; /* kernels count the elements of a head, and heads, in 32 bits */
    if (r.head_dim > most || r.qk[0].heads > most || r.qk[1].heads > most)
        return adze_fail(ADZE_BAD_ARG,
                         "%s: head_dim is %lld, with %lld and %lld heads; CUDA has at most %lld of each",
                         stream.op->name, (long long)r.head_dim, (long long)r.qk[0].heads, (long long)r.qk[1].heads,
                         (long long)most);
    /* A norm of one head that is too long for a warp is a norm across heads. */
    if (NORM && r.qk[0].heads <= 1 && r.qk[1].heads <= 1 &&
        r.head_dim * (int64_t)adze_dtype_size(r.dtype) > 32 * 2 * 16)
        p.r.across_heads = 1;
    p.const_tables = (a->call.flags & ADZE_CONST_WEIGHTS) != 0;
    for (int k = 0; k < 2; k++)
        p.inverse[k] = 1 / (float)(r.head_dim * (r.across_heads ? r.qk[k].heads : 1));
    const int form = r.dtype | r.table_dtype << 4 | r.pairs << 8 | (r.once != 0) << 10 |
                     (p.r.across_heads != 0) << 11 | rope_aligned(r, adze_float_size(r.dtype)) << 12 |
                     r.rounding << 16;
    return stream.tuned(form, r.batch * r.seq, r.qk[0].heads, r.qk[1].heads, r.head_dim, [&] {
        switch (r.dtype) {
        case ADZE_F32: return rope_launch<float, NORM>(stream, p);
        case ADZE_F16: return rope_launch<f16, NORM>(stream, p);
        default: return rope_launch<bf16, NORM>(stream, p);
        }
    });
}

#endif
