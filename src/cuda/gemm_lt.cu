/* gemm on CUDA by cuBLASLt (cublaslt.cuh): of more than 16 tokens, of many weights, and of rows off 16-byte borders.

   cuBLASLt's epilogue has the bias, and the residual where out is f32. All else is a kernel after the product,
   lt_finish: the product is then in scratch, as floats, or rounded where the call rounds it. Quantised weights of f32
   x are made floats first, one weight at a time. Scratch has x's norm, products, these floats, and cuBLASLt's
   workspace, in this order. */
#include "gemm_lt.cuh"

#include "cublaslt.cuh"

#include <algorithm>

extern "C" adze_status adze_gemm_cuda(adze_stream, const void *);
extern "C" adze_status adze_dequantize_cuda(adze_stream, const void *);

/* Tokens from which on cuBLASLt is faster: of 16-bit x; of f32, of rows off 16-byte borders, and of few long rows of
   weights, for all of which there are no other tiles; of plain products with many weights of short rows, by sizes
   of models on an H200 (2026-11-18); of f8e4m3; of f32 with quantised weights. */
enum { LT_TOKENS = 17, LT_TOKENS_NO_TILES = 9, LT_TOKENS_MANY = 9, LT_TOKENS_F8 = 17, LT_TOKENS_FLOATS = 24 };
enum { LT_FEW_ROWS = 1024, LT_LONG_ROWS = 8192, LT_MANY = 44 << 20 };
/* Of f32 and the fewest long rows, whose k no other kernel splits among blocks: 5 x 15168 x 64 took 30.9 us, and 16.5
   by cuBLASLt (H200, 2026-11-19). */
enum { LT_TOKENS_LONG = 2, LT_LEAST_ROWS = 132 };
/* Elements of a short row, and from how many such rows on there are many weights: 9 x 72 x 13448 took 10.1 us,
   and 4.5 by cuBLASLt (H200, 2026-11-19). */
enum { LT_SHORT_ROWS = 256, LT_SHORT_MANY = 8192 };
/* Of calls without tiles, gemm_rows is faster for up to so many tokens and multiplications (H200, 2026-11-18); and
   where the weights would first be made floats, for more of them (2026-11-19). */
enum { LT_FEW_TOKENS = 64, LT_SMALL = 6 << 20, LT_SMALL_FLOATS = 20 << 20 };

constexpr int64_t LT_FLOATS_MOST = 1 << 28; /* bytes of scratch for weights as floats */

enum { FINISH_THREADS = 256, FINISH_EACH = 4, FINISH_COLUMNS = FINISH_THREADS * FINISH_EACH };
constexpr int FINISH_BLOCKS = 3; /* on a multiprocessor, at least: without it the compiler spills */

/* What follows the products y (and y2, of glu) of a part, [batches, m, n]. A block has FINISH_COLUMNS of a row. */
template <typename T, typename S, bool BYTES>
__global__ void __launch_bounds__(FINISH_THREADS, FINISH_BLOCKS)
    lt_finish(const gemm_params p, int part, const S *__restrict__ y, const S *__restrict__ y2)
{
    pdl_launch_next();
    pdl_wait();
    const int64_t n = p.part[part].n;
    const uint32_t blocks = (uint32_t)((n + FINISH_COLUMNS - 1) / FINISH_COLUMNS), row = blockIdx.x / blocks;
    const int64_t batch = row / p.m, token = row % p.m;
    const int64_t first = (int64_t)(blockIdx.x % blocks) * FINISH_COLUMNS + threadIdx.x, at = (int64_t)row * n;
    float v[FINISH_EACH], v2[FINISH_EACH];
#pragma unroll
    for (int i = 0; i < FINISH_EACH; i++) {
        const int64_t column = first + i * FINISH_THREADS;
        v[i] = column < n ? to_float(y[at + column]) : 0;
        v2[i] = column < n && p.glu ? to_float(y2[at + column]) : 0;
    }
    gemm_end<T, true, BYTES> end[FINISH_EACH];
#pragma unroll
    for (int i = 0; i < FINISH_EACH; i++)
        if (first + i * FINISH_THREADS < n)
            end[i].load(p, part, batch, token, first + i * FINISH_THREADS);
#pragma unroll
    for (int i = 0; i < FINISH_EACH; i++)
        if (first + i * FINISH_THREADS < n)
            end[i].store(p, part, v[i], v2[i]);
}

struct lt_gemm { /* a call, as products and what follows them */
    gemm_params p;
    adze_gemm_args args; /* the call, of x's norm, or copy, in scratch where it has one */
    int count;
    lt_product product[GEMM_PARTS];
    lt_algorithm algorithm[GEMM_PARTS];
    int part[GEMM_PARTS]; /* whose product it is */
    int staged;           /* the dtype of products in scratch; 0: they are in out */
    bool finished;        /* products in scratch are as the call rounds them: there is no bias */
    bool copied;          /* x is first copied into scratch */
    size_t x_bytes, stage_bytes, weight_bytes, workspace; /* of scratch */
    char *stage, *weights;                                /* weights: as floats, where they are quantised */
};

static size_t lt_aligned(size_t bytes)
{
    return (bytes + LT_ALIGNMENT - 1) / LT_ALIGNMENT * LT_ALIGNMENT;
}

/* Whether the numbers of a part's rows, and x's, are such that cuBLASLt can scale the product by them. */
static int lt_scales(const gemm_params &p, const gemm_part &part)
{
    const int64_t x_stride = p.rows.stride[GEMM_X_SCALE][0];
    const bool aligned = (uintptr_t)p.x_scale % 16 == 0 && (uintptr_t)part.scale % 16 == 0;
    if (part.scale_dtype != ADZE_F32 || x_stride != part.scale_stride)
        return LT_UNSCALED;
    return x_stride == 0 ? LT_SCALARS : x_stride == 1 && aligned ? LT_VECTORS : LT_UNSCALED;
}

/* Whether rows of x, of weights and of out, and the bias, begin at 16-byte borders. */
static bool lt_on_borders(const lt_gemm &g, const gemm_part &part)
{
    const gemm_params &p = g.p;
    const uint64_t size = adze_dtype_size(g.args.x.dtype), out_size = adze_dtype_size(g.args.out.dtype);
    const uint64_t x = (uint64_t)p.rows.stride[GEMM_X][0] * size | (uint64_t)p.x_batch | (uintptr_t)p.x;
    const uint64_t w = (uint64_t)(part.w_stride | p.w_batch) | (uintptr_t)part.w;
    const uint64_t out = (uint64_t)(p.rows.stride[part.out_rows][0] | p.out_batch) * out_size | (uintptr_t)part.out;
    return (x | w | out | (uintptr_t)part.bias) % 16 == 0;
}

/* Whether cuBLASLt can do all that the call asks of a part. Where out has 16 bits it may round the product before it
   adds the residual, or the bias of rows off 16-byte borders. Such calls were off by 0.8 units in the last place on
   an H200. */
static bool lt_direct(const lt_gemm &g, const gemm_part &part, bool bytes)
{
    const gemm_params &p = g.p;
    const bool steps = p.rounding & ADZE_ROUND_STEPS;
    if (p.act || p.glu || p.gate || (p.residual && !p.out_f32))
        return false;
    if (bytes) /* which has no bias of floats */
        return !(p.residual && steps) && lt_scales(p, part) != LT_UNSCALED &&
               (!part.bias || !(part.bias_f32 || p.out_f32));
    const bool rounds = steps && g.args.x.dtype != ADZE_F32;
    const bool exact = p.out_f32 || (p.k % 8 == 0 && part.n % 8 == 0 && lt_on_borders(g, part)); /* of the bias */
    return !(rounds && (p.residual || p.out_f32)) && (!part.bias || (part.bias_f32 == p.out_f32 && exact));
}

/* Whether cuBLASLt takes the operands: rows that do not overlap, matrices whose elements are counted in 31 bits,
   which not all its versions exceed; f8e4m3 in vectors of 16. */
static bool lt_takes(const gemm_params &p, int64_t size, bool bytes)
{
    const int64_t most = 0x7fffffff, x_row = p.rows.stride[GEMM_X][0];
    bool ok = p.rows.rank == 1 && p.k > 0 && p.n > 0 && p.m <= most && p.n <= most && p.k <= most;
    ok = ok && x_row >= p.k && x_row <= most / p.m && p.batches > 0 && p.batches < 65536;
    ok = ok && p.m * p.batches <= most && p.m * p.batches * ceil_div(p.n, FINISH_COLUMNS) <= most;
    ok = ok && p.x_batch >= 0 && p.w_batch >= 0 && p.residual_batch >= 0;
    ok = ok && (!bytes || (p.k % 16 == 0 && x_row % 16 == 0 && (uintptr_t)p.x % 16 == 0));
    for (const gemm_part &part : p.part) {
        const int64_t out_row = p.rows.stride[part.out_rows][0], w_row = part.w_stride / size;
        if (part.n == 0)
            continue;
        ok = ok && w_row >= p.k && w_row <= most / part.n && out_row >= part.n && out_row <= most / p.m;
        ok = ok && (p.batches == 1 || p.out_batch >= (p.m - 1) * out_row + part.n);
        ok = ok && (!p.residual || p.rows.stride[GEMM_RESIDUAL][0] >= part.n);
        ok = ok && (!bytes || (part.n % 16 == 0 && w_row % 16 == 0 && (uintptr_t)part.w % 16 == 0 &&
                               out_row % 16 == 0 && (uintptr_t)part.out % 16 == 0));
    }
    return ok;
}

/* The product of a part, to out or to scratch. */
static lt_product lt_product_of(const lt_gemm &g, const gemm_part &part, bool bytes, char *stage)
{
    const gemm_params &p = g.p;
    const int64_t size = (int64_t)adze_dtype_size(g.args.x.dtype),
                  out_size = (int64_t)adze_dtype_size(g.args.out.dtype);
    lt_product y = {};
    y.m = p.m, y.n = part.n, y.k = p.k, y.batches = p.batches;
    y.dtype = g.args.x.dtype;
    y.out_dtype = g.staged ? g.staged : g.args.out.dtype;
    y.x = {(void *)p.x, p.rows.stride[GEMM_X][0], p.x_batch / size};
    y.w = {g.weight_bytes ? g.weights : (void *)part.w, part.w_stride / size, p.w_batch / size};
    if (g.staged) {
        y.out = {stage, part.n, p.m * part.n};
        return y;
    }
    y.out = {part.out, p.rows.stride[part.out_rows][0], p.out_batch};
    y.bias = (void *)part.bias;
    if (p.residual)
        y.residual = {(char *)p.residual + part.column * out_size, p.rows.stride[GEMM_RESIDUAL][0], p.residual_batch};
    if (bytes)
        y.scales = lt_scales(p, part), y.x_scale = p.x_scale, y.w_scale = (const float *)part.scale;
    return y;
}

/* Where products go, and how they are rounded there. */
static void lt_stage(lt_gemm *g, bool bytes)
{
    const gemm_params &p = g->p;
    bool direct = true, no_bias = true;
    int64_t most = 0;
    for (const gemm_part &part : p.part) {
        if (part.n == 0)
            continue;
        direct = direct && lt_direct(*g, part, bytes);
        no_bias = no_bias && !part.bias;
        most = std::max(most, part.n);
    }
    if (direct)
        return;
    const int dtype = g->args.x.dtype;
    g->finished = !bytes && no_bias && (dtype == ADZE_F32 || (p.rounding & ADZE_ROUND_STEPS));
    g->staged = g->finished ? dtype : ADZE_F32;
    const int64_t each = p.batches * p.m * most * (int64_t)adze_dtype_size(g->staged);
    g->stage_bytes = lt_aligned((size_t)each) * (p.glu ? 2 : 1);
}

static bool lt_algorithms(int device, lt_gemm *g, size_t workspace)
{
    g->workspace = 0;
    for (int i = 0; i < g->count; i++) {
        if (!adze_lt_find(device, &g->product[i], workspace, &g->algorithm[i]))
            return false;
        g->workspace = std::max(g->workspace, lt_aligned(g->algorithm[i].workspace));
    }
    return true;
}

/* Whether rows of 16-bit elements begin and end off 16-byte borders. Then no other kernel reads vectors of them. */
static bool lt_unaligned(const adze_tensor *t)
{
    bool off = (uintptr_t)t->data % 16 != 0 || t->shape[t->rank - 1] % 8 != 0;
    for (int i = 0; i + 1 < t->rank; i++)
        off = off || (t->shape[i] > 1 && t->stride[i] % 8 != 0);
    return off;
}
/* Whether gemm_tile is faster, as it finishes its products itself: from a sweep on an H200 (2026-11-18) over 25 sizes
   of weights, 17 to 64 tokens. Short products and long rows are faster by cuBLASLt and a second kernel. */
static bool lt_slower(const lt_gemm &g, bool bytes)
{
    const int64_t weights = g.p.n * (g.p.glu ? 2 : 1) * g.p.k;
    return g.staged && !bytes && g.args.x.dtype != ADZE_F32 && g.p.m <= 32 && g.p.k <= 8192 && weights >= 8 << 20 &&
           weights <= 50 << 20;
}
/* Whether gemm_shifted is faster: it finishes its products itself, and needs no weights of floats. A product by
   cuBLASLt is taken for 4 us and its weights at 3 TB/s, off 16-byte borders for 6 us and 1 TB/s, with 3 us more for
   each that follows, in cycles of an H200 (random calls, 2026-11-19). */
static bool lt_shifted(adze_stream stream, const lt_gemm &g)
{
    constexpr int64_t MOST_TOKENS = 64;
    adze_choice choice = {};
    choice.want = choice.ran = -1;
    const cuda_call s(stream, adze_op_gemm, &choice);
    gemm_params p = gemm_params_of(&g.args);
    double time, lt = g.staged ? 5000 : 0;
    if (p.m > MOST_TOKENS || gemm_shifted_choice(s, p, g.args.x.dtype, &time) < 0)
        return false;
    for (const gemm_part &part : p.part) {
        const double bytes = (double)(part.n * p.k) * 2;
        if (part.n)
            lt += lt_on_borders(g, part) ? 7000 + bytes / 1700 : 11000 + bytes / 600;
    }
    return p.format != OF_X || time < lt;
}
/* Tokens from which on cuBLASLt takes a call. `dense`: of the norm of x, or a copy, which are aligned. `alone`: of up
   to 16 only if no kernel has to follow the product. */
static int64_t lt_least(const adze_gemm_args *a, int64_t k, bool bytes, bool dense, bool *alone)
{
    *alone = false;
    if (bytes)
        return LT_TOKENS_F8;
    if (a->w.dtype != a->x.dtype)
        return LT_TOKENS_FLOATS;
    const int64_t rows = a->w.shape[a->w.rank - 2];
    bool no_tiles = a->x.dtype == ADZE_F32 || k % 8 != 0 || (!dense && lt_unaligned(&a->x));
    for (const adze_tensor *w : {&a->w, &a->w2, &a->w3})
        no_tiles = no_tiles || (w->dtype && lt_unaligned(w));
    const bool few_long = rows <= LT_FEW_ROWS && k >= LT_LONG_ROWS && !a->w2.dtype;
    if (a->x.dtype == ADZE_F32 && rows <= LT_LEAST_ROWS && few_long)
        return LT_TOKENS_LONG;
    *alone = few_long && !no_tiles;
    if (no_tiles || few_long)
        return LT_TOKENS_NO_TILES;
    const bool short_rows = k <= LT_SHORT_ROWS && rows >= LT_SHORT_MANY;
    *alone = ((rows * k >= LT_MANY && rows >= 2 * k) || short_rows) && !a->norm && !a->w2.dtype;
    return *alone ? LT_TOKENS_MANY : LT_TOKENS;
}

/* Makes the params those of a call whose weights are floats, in scratch; false: they would be too many. */
static bool lt_float_weights(lt_gemm *g)
{
    const int64_t row = g->p.k * (int64_t)sizeof(float);
    int64_t most = 0;
    for (gemm_part &part : g->p.part) {
        part.w_stride = row;
        most = std::max(most, part.n);
    }
    g->p.format = OF_X, g->p.group = 0;
    g->weight_bytes = lt_aligned((size_t)(most * row));
    return most <= LT_FLOATS_MOST / row;
}
static adze_status lt_dequantize(adze_stream stream, const lt_gemm &g, int part)
{
    const adze_gemm_args *const a = &g.args;
    const adze_tensor *const w[GEMM_PARTS] = {&a->w, &a->w2, &a->w3};
    const adze_tensor *const scale[GEMM_PARTS] = {&a->w_scale, &a->w2_scale, &a->w3_scale};
    const adze_tensor *const zero[GEMM_PARTS] = {&a->w_zero, &a->w2_zero, &a->w3_zero};
    adze_dequantize_args d = {};
    d.w = *w[part], d.scale = *scale[part], d.zero = *zero[part];
    d.group = a->group, d.group_rows = a->group_rows, d.format = a->format;
    d.out.data = g.weights, d.out.dtype = ADZE_F32, d.out.rank = 2;
    d.out.shape[0] = g.p.part[part].n, d.out.shape[1] = g.p.k;
    d.out.stride[0] = g.p.k, d.out.stride[1] = 1;
    return adze_dequantize_cuda(stream, &d);
}

/* The call as products, in as much scratch as it has; false: cuBLASLt does not take it. `bytes`: of f8e4m3. */
static bool lt_plan(adze_stream stream, const adze_gemm_args *a, bool bytes, lt_gemm *g)
{
    const int dtype = a->x.dtype;
    bool alone;
    char *const scratch = (char *)lt_aligned((size_t)(uintptr_t)a->call.scratch);
    const size_t given = a->call.scratch_size, lost = (size_t)(scratch - (char *)a->call.scratch);
    const size_t room = given > lost ? given - lost : 0;
    const size_t x_bytes = lt_aligned((size_t)adze_count(&a->x) * adze_dtype_size(dtype));
    const bool copies = !bytes && gemm_copies(gemm_params_of(a), dtype);
    g->copied = copies && x_bytes <= room;
    const bool dense = a->norm || g->copied;
    /* Scratch for a copy may have no room for its alignment here: then the other kernels copy x. */
    const bool elsewhere = copies && (size_t)adze_count(&a->x) * adze_dtype_size(dtype) <= given;
    const int64_t k = a->x.shape[a->x.rank - 1], least = lt_least(a, k, bytes, dense || elsewhere, &alone);
    const bool is_float = dtype == ADZE_F32 || dtype == ADZE_F16 || dtype == ADZE_BF16;
    if (k == 0 || adze_count(&a->x) < least * k || (a->call.flags & ADZE_BATCH_INVARIANT))
        return false;
    const bool floats = !bytes && dtype == ADZE_F32 && a->w.dtype != dtype; /* the weights are quantised */
    if (bytes ? dtype != ADZE_F8E4M3 : !is_float || (a->w.dtype != dtype && !floats))
        return false;
    g->args = *a;
    g->args.call.scratch = scratch;
    if (dense) {
        g->args.x = gemm_dense(&g->args);
        g->args.norm = 0;
        g->x_bytes = x_bytes;
    }
    g->p = gemm_params_of(&g->args);
    if (floats && !lt_float_weights(g))
        return false;
    if (g->p.m < least || !lt_takes(g->p, (int64_t)adze_dtype_size(dtype), bytes))
        return false;
    const int64_t products = g->p.m * g->p.n * (g->p.glu ? 2 : 1) * g->p.batches;
    if ((least == LT_TOKENS_NO_TILES || floats) && g->p.m <= LT_FEW_TOKENS &&
        products <= (floats ? LT_SMALL_FLOATS : LT_SMALL) / k)
        return false;
    lt_stage(g, bytes);
    if ((!bytes && lt_shifted(stream, *g)) || (least == LT_TOKENS && lt_slower(*g, bytes)) ||
        (alone && g->p.m < LT_TOKENS && g->staged))
        return false;
    g->stage = scratch + g->x_bytes;
    g->weights = g->stage + g->stage_bytes;
    for (int i = 0; i < GEMM_PARTS; i++)
        if (g->p.part[i].n > 0) {
            char *const stage = g->stage + (g->p.glu && i == 1 ? g->stage_bytes / 2 : 0);
            g->part[g->count] = i;
            g->product[g->count++] = lt_product_of(*g, g->p.part[i], bytes, stage);
        }
    const size_t all = g->x_bytes + g->stage_bytes + g->weight_bytes;
    if (all > room)
        return false;
    const size_t rest = room - all;
    return (lt_algorithms(stream.device, g, LT_WORKSPACE) && g->workspace <= rest) ||
           lt_algorithms(stream.device, g, 0);
}

template <typename T, typename S, bool BYTES>
static adze_status finish_launch(const cuda_call &s, const lt_gemm &g, int part)
{
    const int64_t blocks = g.p.m * g.p.batches * ceil_div(g.p.part[part].n, FINISH_COLUMNS);
    return launch(s, lt_finish<T, S, BYTES>, blocks, dim3(FINISH_THREADS), launch_shape(0), g.p, part,
                  (const S *)g.stage, (const S *)(g.stage + g.stage_bytes / 2));
}
template <typename T>
static adze_status finish_run(const cuda_call &s, const lt_gemm &g, int part)
{
    if (g.p.x_scale)
        return finish_launch<T, float, true>(s, g, part);
    return g.finished ? finish_launch<T, T, false>(s, g, part) : finish_launch<T, float, false>(s, g, part);
}
static adze_status lt_finish_run(const cuda_call &s, const lt_gemm &g, int part)
{
    switch (g.p.x_scale ? g.args.out.dtype : g.args.x.dtype) {
    case ADZE_F32: return finish_run<float>(s, g, part);
    case ADZE_F16: return finish_run<f16>(s, g, part);
    default: return finish_run<bf16>(s, g, part);
    }
}

/* Runs a call that lt_plan has taken. cuBLASLt may refuse its first product: then the other kernels take the call. */
static adze_status lt_run(adze_stream stream, const adze_gemm_args *a, bool bytes)
{
    adze_choice choice = {};
    choice.want = choice.ran = -1;
    const cuda_call s(stream, adze_op_gemm, &choice);
    lt_gemm g = {};
    if (!lt_plan(stream, a, bytes, &g))
        return adze_gemm_cuda(stream, a);
    if (a->norm || g.copied) {
        adze_gemm_args its = *a;
        its.call.scratch = g.args.call.scratch;
        ADZE_CHECK(g.copied ? gemm_copy(s, &its, gemm_params_of(a)) : gemm_norm(s, &its, g.p));
    }
    for (int i = 0; i < g.count; i++) {
        if (g.weight_bytes)
            ADZE_CHECK(lt_dequantize(stream, g, g.part[i]));
        if (!adze_lt_run(stream, &g.product[i], &g.algorithm[i], g.weights + g.weight_bytes))
            return i == 0 ? adze_gemm_cuda(stream, a)
                          : adze_fail(ADZE_DEVICE, "gemm: cuBLASLt refused the product of w%d", g.part[i] + 1);
        if (g.staged && !g.p.glu)
            ADZE_CHECK(lt_finish_run(s, g, g.part[i]));
    }
    return g.p.glu ? lt_finish_run(s, g, 0) : ADZE_OK;
}

extern "C" int adze_gemm_cuda_lt_accepts(adze_stream stream, const void *args)
{
    lt_gemm g = {};
    return lt_plan(stream, (const adze_gemm_args *)args, false, &g);
}
extern "C" adze_status adze_gemm_cuda_lt(adze_stream stream, const void *args)
{
    return lt_run(stream, (const adze_gemm_args *)args, false);
}

/* The sums of f8e4m3 have fewer bits on Hopper: a row of the table of kernels of its own. */
extern "C" int adze_gemm_cuda_lt_f8_accepts(adze_stream stream, const void *args)
{
    lt_gemm g = {};
    return lt_plan(stream, (const adze_gemm_args *)args, true, &g);
}
extern "C" adze_status adze_gemm_cuda_lt_f8(adze_stream stream, const void *args)
{
    return lt_run(stream, (const adze_gemm_args *)args, true);
}

extern "C" size_t gemm_lt_scratch(adze_stream stream, const adze_gemm_args *a)
{
    const bool bytes = a->x.dtype == ADZE_F8E4M3;
    lt_gemm g = {};
    if ((bytes && adze_cuda_sm(stream.device) != 90) || !lt_plan(stream, a, bytes, &g))
        return 0;
    const size_t all = g.x_bytes + g.stage_bytes + g.weight_bytes + g.workspace;
    return all ? all + LT_ALIGNMENT - 1 : 0;
}
