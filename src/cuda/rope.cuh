/* rope.cuh - which kernel a call of rope or qk_norm_rope takes, and its launch: rope_fast.cuh has the calls that
   models make most, rope_any.cuh all others. */
#ifndef ADZE_CUDA_ROPE_CUH
#define ADZE_CUDA_ROPE_CUH

#include "rope_any.cuh"
#include "rope_forms.cuh"

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

/* Where the units of a head are. Returns their width, which is at most `width`. */
static inline int rope_any_places(rope_any_params *p, bool norm, int width)
{
    const adze_rotary &r = p->r;
    const int64_t size = (int64_t)adze_dtype_size(r.dtype);
    const int32_t half = (int32_t)(r.rotary_dim / 2);
    bool in_place = true;
    for (const adze_rotary_tensor &tensor : r.qk) {
        in_place = in_place && (tensor.heads == 0 || tensor.x == tensor.out);
        for (int d = 0; d < 3; d++)
            in_place = in_place && (tensor.heads == 0 || tensor.x_stride[d] == tensor.out_stride[d]);
    }
    const int32_t rest = in_place && !norm ? 0 : (int32_t)(r.head_dim - r.rotary_dim);
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

template <typename TRAITS>
static adze_status rope_launch_row(const cuda_call &stream, rope_any_params p)
{
    const adze_rotary &r = p.r;
    const int64_t sm_count = stream.gpu.sm_count, sm_threads = stream.gpu.sm_threads;
    const int64_t q_heads = r.qk[0].heads, k_heads = r.qk[1].heads, heads = q_heads + k_heads;
    /* q and k together, unless they are more than the threads of a block hold */
    p.split = q_heads && k_heads && heads * p.pairs > ROW_THREADS * TRAITS::SLOTS;
    const int64_t rows_each = !r.across_heads ? heads : p.split ? 2 : 1;
    const int64_t row_heads = !r.across_heads ? 1 : !p.split ? heads : q_heads > k_heads ? q_heads : k_heads;
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

template <typename T, bool NORM>
static adze_status rope_launch(const cuda_call &stream, rope_any_params p)
{
    const adze_rotary &r = p.r;
    adze_status status;
    if (rope_aligned(r, sizeof(T)) && rope_try_fast<T, NORM>(stream, r, p.inverse, p.const_tables, &status) &&
        status != ADZE_NO_KERNEL)
        return status;
    const int width = rope_any_places(&p, NORM, 4);
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
