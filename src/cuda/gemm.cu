/* gemm on CUDA: which kernel takes a call.

   Up to 16 tokens are streamed (gemm_stream.cuh), more are tiled (gemm_tile.cuh); both need tensor cores and 16-byte
   rows. All other calls take gemm_any.cuh. */
#include "gemm_any.cuh"
#include "gemm_stream.cuh"
#include "gemm_tile.cuh"

#include <algorithm>

extern "C" adze_status adze_rms_norm_cuda(adze_stream, const void *);
extern "C" adze_status adze_layer_norm_cuda(adze_stream, const void *);

static gemm_params gemm_params_of(const adze_gemm_args *a)
{
    gemm_params p = {};
    const int size = a->x.dtype == ADZE_F32 ? 4 : 2;
    const int out_size = a->out.dtype == ADZE_F32 ? 4 : 2;
    const adze_tensor *const w[GEMM_PARTS] = {&a->w, &a->w2, &a->w3};
    const adze_tensor *const bias[GEMM_PARTS] = {&a->bias, &a->bias2, &a->bias3};
    const adze_tensor *const out[GEMM_PARTS] = {&a->out, &a->out2, &a->out3};
    adze_tensor x = a->x, gate = a->gate;
    adze_tensor rows_of[GEMM_TENSORS] = {a->x, a->out, a->out2, a->out3, a->residual, a->gate};
    p.batches = 1;
    if (a->w.rank == 3) { /* the first dimension of each is the batch */
        p.batches = a->x.shape[0];
        p.x_batch = a->x.stride[0] * size, p.w_batch = a->w.stride[0] * size;
        p.out_batch = a->out.stride[0], p.residual_batch = a->residual.dtype ? a->residual.stride[0] : 0;
        const bool gate_batched = gate.rank == 3 && gate.shape[0] > 1;
        p.gate_batch = gate_batched ? gate.stride[0] : 0;
        for (adze_tensor &t : rows_of) {
            if (!t.dtype || t.rank < 3)
                continue;
            t.rank--;
            for (int d = 0; d < t.rank; d++)
                t.shape[d] = t.shape[d + 1], t.stride[d] = t.stride[d + 1];
        }
        x = rows_of[GEMM_X];
    }
    const adze_tensor *tensors[GEMM_TENSORS];
    for (int t = 0; t < GEMM_TENSORS; t++)
        tensors[t] = &rows_of[t];
    adze_rows_init(&p.rows, &x, GEMM_TENSORS, tensors);
    p.x = (const char *)a->x.data;
    p.m = p.rows.count;
    p.k = a->x.shape[a->x.rank - 1];
    int64_t column = 0;
    for (int i = 0; i < GEMM_PARTS; i++) {
        gemm_part &part = p.part[i];
        if (!w[i]->dtype)
            continue;
        part.w = (const char *)w[i]->data;
        part.w_stride = w[i]->stride[w[i]->rank - 2] * size;
        part.n = w[i]->shape[w[i]->rank - 2];
        part.bias = bias[i]->dtype ? bias[i]->data : NULL;
        part.bias_f32 = bias[i]->dtype == ADZE_F32;
        part.out_rows = a->separate ? GEMM_OUT + i : GEMM_OUT;
        part.column = a->separate ? 0 : column;
        part.out = out[a->separate ? i : 0]->data;
        if (part.out && !a->separate)
            part.out = (char *)part.out + column * out_size;
        column += part.n;
        p.n += a->glu && i ? 0 : part.n;
    }
    p.norm_weight = a->norm_weight.dtype ? a->norm_weight.data : NULL;
    p.norm_weight_f32 = a->norm_weight.dtype == ADZE_F32;
    p.norm_bias = a->norm_bias.dtype ? a->norm_bias.data : NULL;
    p.norm_bias_f32 = a->norm_bias.dtype == ADZE_F32;
    p.residual = a->residual.dtype ? a->residual.data : NULL;
    p.gate = gate.dtype ? gate.data : NULL;
    p.gate_f32 = gate.dtype == ADZE_F32;
    p.eps = a->eps, p.weight_offset = a->weight_offset;
    p.norm = a->norm, p.rounding = a->rounding, p.glu = a->glu;
    p.act = a->glu && !a->act ? ADZE_ACT_SILU : a->act;
    p.out_f32 = a->out.dtype == ADZE_F32;
    p.const_weights = a->call.flags & ADZE_CONST_WEIGHTS;
    p.batch_invariant = a->call.flags & ADZE_BATCH_INVARIANT;
    return p;
}

/* Whether all rows of the operands are made of 16-byte vectors, and sizes and offsets are such that the kernels that
   read those can count in 32 bits. */
static bool gemm_vectors(const gemm_params &p)
{
    const int64_t most = 1 << 28;
    bool ok = p.k % 8 == 0 && p.k > 0 && p.k < most && p.n < most && p.rows.rank == 1 && p.batches < 65536;
    ok = ok && (uintptr_t)p.x % 16 == 0 && p.rows.stride[GEMM_X][0] % 8 == 0 && p.x_batch % 16 == 0 &&
         p.w_batch % 16 == 0;
    for (const gemm_part &part : p.part)
        ok = ok && (part.n == 0 || ((uintptr_t)part.w % 16 == 0 && part.w_stride % 16 == 0));
    return ok;
}

/* The kernels that stream: of 8 and of 16 tokens, for few rows a block and for more; with all of x in shared memory,
   where it can be normed. From a sweep on an H200 (2026-11-16) over products from 1024 x 4096 to 128256 x 4096. */
typedef stream_shape<1, 1, 16, 256, 2, false> STREAM_SHORT;
typedef stream_shape<2, 1, 8, 256, 2, false> STREAM_LONG;
typedef stream_shape<1, 1, 8, 128, 3, false> STREAM_SMALL; /* where a block has little shared memory */
typedef stream_shape<1, 2, 8, 128, 2, false> STREAM_WIDE_SHORT;
typedef stream_shape<1, 2, 4, 256, 2, false> STREAM_WIDE_LONG;
typedef stream_shape<1, 1, 8, 256, 2, true> STREAM_WHOLE;
typedef stream_shape<1, 2, 8, 128, 2, true> STREAM_WIDE_WHOLE;

template <typename T, class S>
static adze_status stream_launch(adze_stream s, const gemm_params &p, int64_t blocks)
{
    const int64_t most = p.n; /* a block has a row or more */
    return launch_2d("gemm", s, gemm_stream<T, S>, blocks < most ? blocks : most, p.batches, dim3(S::THREADS),
                     launch_shape(stream_shared<S>(p.m, p.k)), p);
}
template <class S>
static bool stream_fits(adze_stream s, const gemm_params &p)
{
    return p.m <= S::TOKENS && stream_shared<S>(p.m, p.k) <= (size_t)adze_cuda_shared(s.device);
}
/* Whether the streaming kernels that have all of x can take the call. */
static bool stream_whole_fits(adze_stream s, const gemm_params &p)
{
    return p.m <= 8 ? stream_fits<STREAM_WHOLE>(s, p) : stream_fits<STREAM_WIDE_WHOLE>(s, p);
}
template <typename T>
static adze_status stream_run(adze_stream s, const gemm_params &p)
{
    const int64_t sm_count = adze_cuda_sm_count(s.device), each = ceil_div(p.n * (p.glu ? 2 : 1), sm_count);
    if (p.norm)
        return p.m <= 8 ? stream_launch<T, STREAM_WHOLE>(s, p, sm_count * (each > 16 ? 2 : 1))
                        : stream_launch<T, STREAM_WIDE_WHOLE>(s, p, sm_count * (each > 16 ? 2 : 1));
    if (p.m <= 8) {
        if (!stream_fits<STREAM_LONG>(s, p))
            return stream_launch<T, STREAM_SMALL>(s, p, sm_count * 2);
        if (each <= 16)
            return stream_launch<T, STREAM_SHORT>(s, p, sm_count);
        return stream_launch<T, STREAM_LONG>(s, p, each > 100 ? sm_count * 2 : sm_count);
    }
    return each <= 64 ? stream_launch<T, STREAM_WIDE_SHORT>(s, p, each > 16 ? sm_count * 2 : sm_count)
                      : stream_launch<T, STREAM_WIDE_LONG>(s, p, sm_count * 3);
}

typedef tile_shape<128, 128, 64, 32, 3> TILE_LARGE;
typedef tile_shape<64, 64, 32, 32, 4> TILE_SMALL;
typedef tile_shape<32, 64, 32, 16, 5> TILE_FEW;
/* In how many parts the blocks of a cluster take k: as few as load the multiprocessors about evenly, and give each of
   them two blocks. */
static int tile_parts(adze_stream s, const gemm_params &p, int64_t blocks)
{
    const int64_t sm_count = adze_cuda_sm_count(s.device), steps = ceil_div(p.k, 64);
    if (!adze_cuda_clusters(s.device) || p.batch_invariant)
        return 1;
    double best = 1e30;
    for (int parts = 1; parts <= 8; parts *= 2)
        best = std::min(best, (double)ceil_div(blocks * parts, sm_count) / parts);
    int parts = 1;
    while (parts < 8 && steps >= parts * 16 &&
           ((double)ceil_div(blocks * parts, sm_count) / parts > 1.1 * best || blocks * parts * 10 < sm_count * 19))
        parts *= 2;
    return parts;
}
template <typename T, class S>
static adze_status tile_launch(adze_stream s, const gemm_params &p, int parts = 0)
{
    const int64_t tokens = ceil_div(p.m, S::TOKENS), tiles = gemm_tiles(p, p.glu ? S::ROWS / 2 : S::ROWS);
    if (!parts)
        parts = tile_parts(s, p, tokens * tiles * p.batches);
    return launch_2d("gemm", s, gemm_tile<T, S>, tokens * tiles * parts, p.batches, dim3(S::THREADS),
                     launch_shape(S::SHARED, (unsigned)parts), p, (int)tokens);
}
template <typename T>
static adze_status tile_run(adze_stream s, const gemm_params &p)
{
    const int64_t large = ceil_div(p.m, 128) * gemm_tiles(p, p.glu ? 64 : 128) * p.batches;
    if (p.m <= 32)
        return tile_launch<T, TILE_FEW>(s, p);
    return p.m <= 64 || large < adze_cuda_sm_count(s.device) ? tile_launch<T, TILE_SMALL>(s, p)
                                                             : tile_launch<T, TILE_LARGE>(s, p);
}

template <typename T, int TOKENS>
static adze_status any_launch(adze_stream s, const gemm_params &p)
{
    const int64_t tokens = ceil_div(p.m, TOKENS), tiles = gemm_tiles(p, p.glu ? ANY_ROWS / 2 : ANY_ROWS);
    const int64_t most = 0x7fffffff;
    if (tokens > most || tiles > most / tokens || p.batches > 65535)
        return adze_fail(ADZE_NO_KERNEL, "gemm: %lld tokens, %lld rows of weights and %lld batches are too many",
                         (long long)p.m, (long long)p.n, (long long)p.batches);
    return launch_2d("gemm", s, gemm_any<T, TOKENS>, tokens * tiles, p.batches, dim3(ANY_GEMM_THREADS),
                     launch_shape(0), p, (int)tokens);
}

/* How a call runs. */
struct gemm_choice {
    bool stream, tile;
    bool norm_first; /* the norm is a launch of its own, into scratch */
};
/* The tiles of either shape, and gemm_any's, add the products of k in one order. The streaming kernels have others, so
   that batch-invariant calls do not take them. */
static gemm_choice gemm_choose(adze_stream s, const gemm_params &p, int dtype)
{
    gemm_choice c = {};
    const bool vectors = dtype != ADZE_F32 && adze_cuda_tensor_cores(s.device) && gemm_vectors(p);
    const int64_t tiles = ceil_div(p.m, 32) * gemm_tiles(p, 32) * 8;
    const bool few = vectors && p.m <= 16 && !p.batch_invariant;
    c.norm_first = p.norm && !(few && stream_whole_fits(s, p));
    c.stream = few;
    c.tile = vectors && !c.stream && tiles < 0x7fffffff;
    return c;
}

template <typename T>
static adze_status gemm_run(adze_stream s, const gemm_params &p, const gemm_choice &c)
{
    if (c.stream)
        if constexpr (sizeof(T) == 2)
            return stream_run<T>(s, p);
    if (c.tile)
        if constexpr (sizeof(T) == 2)
            return tile_run<T>(s, p);
    return p.m <= 8 ? any_launch<T, 8>(s, p) : any_launch<T, 64>(s, p);
}

extern "C" size_t adze_gemm_cuda_scratch(adze_stream s, const adze_gemm_args *a)
{
    if (!a->norm)
        return 0;
    const gemm_params p = gemm_params_of(a);
    return gemm_choose(s, p, a->x.dtype).norm_first ? (size_t)(p.m * p.k) * adze_dtype_size(a->x.dtype) : 0;
}

/* x's norm in scratch. */
static adze_tensor gemm_normed(const adze_gemm_args *a)
{
    adze_tensor t = a->x;
    t.data = a->call.scratch;
    int64_t stride = 1;
    for (int d = t.rank; d-- > 0;) {
        t.stride[d] = stride;
        stride *= t.shape[d];
    }
    return t;
}
static adze_status gemm_norm(adze_stream s, const adze_gemm_args *a, const gemm_params &p)
{
    const adze_run_fn run = a->norm == ADZE_NORM_RMS ? adze_rms_norm_cuda : adze_layer_norm_cuda;
    adze_norm_args norm = {};
    norm.x = a->x;
    norm.out = gemm_normed(a);
    norm.weight = a->norm_weight, norm.bias = a->norm_bias;
    norm.eps = a->eps, norm.weight_offset = a->weight_offset;
    norm.rounding = a->rounding & ADZE_ROUND_NORM;
    norm.call.flags = a->call.flags & ADZE_CONST_WEIGHTS;
    if (!p.batch_invariant)
        return run(s, &norm);
    /* The order of a norm's sum depends on the number of rows. */
    const int64_t size = (int64_t)adze_dtype_size(a->x.dtype);
    for (int64_t token = 0; token < p.m; token++) {
        adze_norm_args row = norm;
        row.x.rank = row.out.rank = 1;
        row.x.shape[0] = row.out.shape[0] = p.k;
        row.x.stride[0] = row.out.stride[0] = 1;
        row.x.data = (char *)a->x.data + adze_row_offset(&p.rows, GEMM_X, token) * size;
        row.out.data = (char *)norm.out.data + token * p.k * size;
        ADZE_CHECK(run(s, &row));
    }
    return ADZE_OK;
}

extern "C" adze_status adze_gemm_cuda(adze_stream s, const void *args)
{
    const adze_gemm_args *a = (const adze_gemm_args *)args;
    gemm_params p = gemm_params_of(a);
    if (p.m == 0 || p.n == 0 || p.batches == 0)
        return ADZE_OK;
    const gemm_choice c = gemm_choose(s, p, a->x.dtype);
    if (c.norm_first) {
        ADZE_CHECK(gemm_norm(s, a, p));
        adze_gemm_args rest = *a;
        rest.x = gemm_normed(a);
        rest.norm = 0;
        p = gemm_params_of(&rest);
    }
    switch (a->x.dtype) {
    case ADZE_F32: return gemm_run<float>(s, p, c);
    case ADZE_F16: return gemm_run<f16>(s, p, c);
    default: return gemm_run<bf16>(s, p, c);
    }
}
