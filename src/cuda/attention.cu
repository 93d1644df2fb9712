/* attention on CUDA: which kernel takes a call.

   16-bit elements in rows of whole 16-byte vectors, of up to 256 elements, take tensor cores: up to 16 rows without
   shared memory (attention_cluster.cuh); others through it (attention_tile.cuh), few rows with warps along the keys,
   more rows with warps across them; on Hopper many rows have their own (attention_sm90.cu). k and v may be quantised
   (attention_quantised.cu), and few keys are loaded at once (attention_short.cuh). Many keys of one query come
   through rings on Hopper: of bulk copies (attention_ring.cuh), or of boxes from rows at any stride
   (attention_boxes.cuh). Floats of up to 256 elements have kernels of their own (attention_floats.cuh; many rows, on
   tensor cores, attention_tf32.cuh), which also take other calls of up to 512, as floats (attention_mixed.cu). 16-bit
   elements in longer rows take attention_wide.cuh. What is left, and GPUs whose blocks have not enough shared memory,
   take attention_any.cuh. */
#include "attention_any.cuh"
#include "attention_run.cuh"

#include <algorithm>
#include <math.h>

static attention_params attention_params_of(const adze_attention_args *a)
{
    attention_params p = {};
    p.q = (const char *)a->q.data, p.k = (const char *)a->k.data, p.v = (const char *)a->v.data;
    p.out = a->out.data;
    p.lse = a->lse.dtype ? (float *)a->lse.data : NULL;
    p.part_values = (float *)a->call.scratch;
    p.mask = (const char *)a->mask.data;
    p.sinks = a->sinks.dtype ? a->sinks.data : NULL;
    p.sinks_f32 = a->sinks.dtype == ADZE_F32;
    p.lengths = a->lengths.dtype ? (const int32_t *)a->lengths.data : NULL;
    p.block_table = a->block_table.dtype ? (const int32_t *)a->block_table.data : NULL;
    p.q_offsets = a->q_offsets.dtype ? (const int32_t *)a->q_offsets.data : NULL;
    p.k_offsets = a->k_offsets.dtype ? (const int32_t *)a->k_offsets.data : NULL;
    p.k_scale = a->k_scale.dtype ? (const float *)a->k_scale.data : NULL;
    p.v_scale = a->v_scale.dtype ? (const float *)a->v_scale.data : NULL;
    for (int d = 0; d < 3; d++) {
        p.q_stride[d] = a->q.stride[d], p.out_stride[d] = a->out.stride[d];
        p.k_stride[d] = a->k.stride[d], p.v_stride[d] = a->v.stride[d];
        p.lse_stride[d] = a->lse.dtype ? a->lse.stride[d] : 0;
        p.k_scale_stride[d] = a->k_scale.rank == 3 ? a->k_scale.stride[d] : 0;
        p.v_scale_stride[d] = a->v_scale.rank == 3 ? a->v_scale.stride[d] : 0;
        const int own = d - (4 - a->mask.rank);
        p.mask_stride[d] = !a->mask.dtype || own < 0 || a->mask.shape[own] == 1 ? 0 : a->mask.stride[own];
    }
    const int64_t pair = 2 * (int64_t)adze_dtype_size(a->mask.dtype);
    p.mask_shared = a->mask.dtype && p.mask_stride[2] == 0 && p.mask_stride[0] % 2 == 0 &&
                    p.mask_stride[1] % 2 == 0 && (intptr_t)a->mask.data % pair == 0;
    p.k_scale_each = a->k_scale.rank == 3, p.v_scale_each = a->v_scale.rank == 3;
    p.parts = 1;
    p.const_cache = a->call.flags & ADZE_CONST_CACHE;
    p.table_stride = p.block_table ? a->block_table.stride[0] : 0;
    p.page = a->block_table.dtype ? (int)a->k.shape[2] : 0;
    p.pages = a->block_table.dtype ? (int)a->k.shape[0] : 0;
    p.packed = a->q_offsets.dtype != 0;
    p.sequences = (int)(p.packed ? a->q_offsets.shape[0] - 1 : a->q.shape[0]);
    p.heads = (int)a->q.shape[1], p.kv_heads = (int)a->k.shape[1], p.group = p.heads / p.kv_heads;
    p.m = (int)a->q.shape[2], p.d = (int)a->q.shape[3], p.dv = (int)a->v.shape[3];
    p.n = (int)(p.page ? a->block_table.shape[1] * p.page : a->k.shape[2]);
    p.causal = a->causal, p.window = a->window, p.q_dtype = a->q.dtype, p.k_dtype = a->k.dtype;
    /* A larger one changes no score, and the kernels' division is not made for it. */
    p.softcap = a->softcap < 0x1p100f ? a->softcap : 0;
    const double scale = a->scale != 0 ? a->scale : 1 / sqrt((double)p.d);
    p.scale = (float)(p.softcap != 0 ? scale : scale * 1.4426950408889634);
    p.mask_kind = !a->mask.dtype                                           ? MASK_NONE
                  : a->mask.dtype == ADZE_BOOL || a->mask.dtype == ADZE_U8 ? MASK_HIDES
                  : a->mask.dtype == ADZE_F32                              ? MASK_F32
                                                                           : MASK_OF_Q;
    return p;
}

/* Whether the rows of t are whole aligned groups of `each` elements. */
static bool groups(const adze_tensor &t, int64_t each)
{
    bool all =
        (uintptr_t)t.data % (uintptr_t)(each * (int64_t)adze_dtype_size(t.dtype)) == 0 && t.shape[3] % each == 0;
    for (int d = 0; d < 3; d++)
        all = all && (t.shape[d] == 1 || t.stride[d] % each == 0);
    return all;
}
static bool vectors(const adze_tensor &t)
{
    return groups(t, 16 / (int64_t)adze_dtype_size(t.dtype));
}

constexpr adze_variant ATTENTION_VARIANTS[] = {
    {"short", "f16 and bf16 in 16-byte vectors, heads up to 256, neither paged nor packed; up to 512 keys in heads "
              "up to 64, 256 in heads up to 128, 128 in others; 8 rows a block, all keys at once"},
    {"ring8", "Hopper: f16 and bf16, heads of 128 elements in dense rows, not packed; up to 8 rows, "
              "keys through shared memory"},
    {"boxes8",
     "Hopper: f16 and bf16 in 16-byte vectors, heads up to 256 in rows at any stride; up to 8 rows that see "
     "all keys, or a causal part of them; without lengths, window, offsets and pages; keys through shared "
     "memory"},
    {"direct8",
     "f16 and bf16 in 16-byte vectors, heads up to 256, pages of a multiple of 16, not packed; up to 8 rows "
     "(queries x heads of one of k), keys straight into registers; clusters, or a second launch, merge parts of "
     "them"},
    {"direct16", "as direct8, up to 16 rows, heads up to 128"},
    {"rows16", "f16 and bf16 in 16-byte vectors, heads up to 256; 16 rows a block"},
    {"rows16-split", "the same, keys in more parts than a cluster has blocks, merged by a second launch"},
    {"rows64", "as rows16, 64 rows; 32 where heads have more than 128 elements"},
    {"rows64-split", "the same, keys in more parts than a cluster has blocks, merged by a second launch"},
    {"rows128", "as rows16, 128 rows, k and v not quantised"},
    {"wgmma64", "Hopper: 64 rows of a head, heads up to 256; without offsets and pages"},
    {"wgmma128", "as wgmma64, 128 rows"},
    {"wgmma192", "as wgmma64, 192 rows; heads up to 64, without mask and softcap"},
    {"floats4", "f32, heads up to 256; 4 rows a block"},
    {"floats4-split", "the same, keys in more parts than a cluster has blocks, merged by a second launch"},
    {"floats16", "as floats4, 16 rows"},
    {"floats16-split", "the same, keys in more parts than a cluster has blocks, merged by a second launch"},
    {"floats64", "as floats4, 64 rows"},
    {"floats64-split", "the same, keys in more parts than a cluster has blocks, merged by a second launch"},
    {"tf32x3",
     "f32, heads up to 256; 64 rows a block or 128, on tensor cores: three products of TF32 for one of f32"},
    {"tf32x3-split", "the same, keys in more parts than a cluster has blocks, merged by a second launch"},
    {"wide16", "f16 and bf16 in 16-byte vectors, k and v not quantised, heads up to 576, of v 512; 16 rows a block"},
    {"wide16-split", "the same, keys in more parts than a cluster has blocks, merged by a second launch"},
    {"wide64", "as wide16, 64 rows"},
    {"mixed8", "every dtype and address, heads up to 512; 8 rows a block, in float arithmetic"},
    {"mixed8-split", "the same, keys in more parts than a cluster has blocks, merged by a second launch"},
    {"mixed64", "as mixed8, 64 rows"},
    {"any", "every call"},
    {NULL, NULL},
};

/* Up to 16 rows; of up to 8 there is a form with smaller steps, of which a multiprocessor has more blocks. */
template <int D, int TILES>
using ATTENTION_DIRECT = direct_attention<D, TILES, (D > 64 ? 2 : 4) / TILES, 4, 2>;
template <int D>
using ATTENTION_SMALL = std::conditional_t<(D > 64), direct_attention<D, 1, 1, 4, 3>, ATTENTION_DIRECT<D, 1>>;
/* Few rows, with warps along the keys; some rows; many rows. */
template <int D>
using ATTENTION_FEW = attention_shape<D, 1, 1, 4, 64, (D > 128 ? 2 : 3)>;
template <int D>
using ATTENTION_SOME = attention_shape<D, 1, (D > 128 ? 2 : 4), (D > 128 ? 2 : 1), (D > 128 ? 32 : 64), 2>;
template <int D>
using ATTENTION_MANY =
    attention_shape<D, (D > 128 ? 1 : 2), (D > 128 ? 8 : 4), 1, (D > 64 ? 32 : 64), (D > 64 && D <= 128 ? 3 : 2)>;

template <typename T, int D>
static adze_status tile_run(const cuda_call &s, const attention_params &p)
{
    if constexpr (D <= 128) {
        constexpr int WIDE = D > 64 ? 128 : 64;
        const adze_status direct =
            direct_run<T, ATTENTION_SMALL<WIDE>, ATTENTION_DIRECT<WIDE, 1>, ATTENTION_DIRECT<WIDE, 2>>(s, p);
        if (direct != ADZE_NO_KERNEL)
            return direct;
    } else {
        typedef direct_attention<256, 1, 1, 4, 2> S; /* of 16 rows, a warp's share has no room in registers */
        const adze_status direct = direct_run<T, S, S>(s, p, DIRECT_8);
        if (direct != ADZE_NO_KERNEL)
            return direct;
    }
    const adze_status status = attention_few<T, ATTENTION_FEW<D>, ATTENTION_SOME<D>>(s, p, tile_choice_of(s, p));
    if (status != ADZE_NO_KERNEL)
        return status;
    if (s.takes(MANY_ROWS, ATTENTION_MANY<D>::SHARED <= s.gpu.block_shared))
        return tile_launch<T, ATTENTION_MANY<D>>(s, p, attention_clusters<ATTENTION_MANY<D>>(s, p));
    return s.takes(SOME_ROWS, ATTENTION_SOME<D>::SHARED <= s.gpu.block_shared)
               ? tile_launch<T, ATTENTION_SOME<D>>(s, p, attention_clusters<ATTENTION_SOME<D>>(s, p))
               : ADZE_NO_KERNEL;
}
template <typename T>
static adze_status tile_run(const cuda_call &s, const attention_params &p)
{
    constexpr bool BF16 = std::is_same<T, bf16>::value;
    const int widest = p.d > p.dv ? p.d : p.dv;
    adze_status status = attention_ring_run(s, p, BF16);
    if (status == ADZE_NO_KERNEL)
        status = attention_boxes_run(s, p, BF16);
    return status != ADZE_NO_KERNEL ? status
           : widest <= 64           ? tile_run<T, 64>(s, p)
           : widest <= 96           ? tile_run<T, 96>(s, p)
           : widest <= 128          ? tile_run<T, 128>(s, p)
                                    : tile_run<T, 256>(s, p);
}

/* Whether tensor cores take the call, in rows of up to `most` elements of k and `v_most` of v. Queries without a
   sequence are left to attention_any. */
static bool takes_tiles(const cuda_call &s, const adze_attention_args *a, const attention_params &p, int most,
                        int v_most)
{
    return adze_cuda_tensor_cores(s.device) && a->q.dtype != ADZE_F32 && p.sequences > 0 && p.dv > 0 && p.d <= most &&
           p.dv <= v_most && vectors(a->q) && vectors(a->k) && vectors(a->v) && vectors(a->out);
}

/* Whether attention_floats.cu takes the call. */
static bool takes_floats(const adze_attention_args *a, const attention_params &p)
{
    return a->q.dtype == ADZE_F32 && a->k.dtype == ADZE_F32 && p.sequences > 0 && p.dv > 0 && p.d <= 256 &&
           p.dv <= 256;
}

template <typename T>
static adze_status attention_launch(const cuda_call &s, const attention_params &p, bool tiles, bool wide,
                                    bool quantised)
{
    if constexpr (sizeof(T) == 2) {
        constexpr bool BF16 = std::is_same<T, bf16>::value;
        adze_status status = !tiles      ? ADZE_NO_KERNEL
                             : quantised ? attention_quantised(s, p, BF16)
                                         : attention_many(s, p, BF16);
        if (tiles && !quantised && status == ADZE_NO_KERNEL)
            status = attention_few_keys(s, p, BF16);
        if (tiles && !quantised && status == ADZE_NO_KERNEL)
            status = tile_run<T>(s, p);
        if (wide && status == ADZE_NO_KERNEL)
            status = attention_wide_rows(s, p, BF16);
        if (status != ADZE_NO_KERNEL)
            return status;
    } else {
        const adze_status status = tiles ? attention_floats(s, p) : ADZE_NO_KERNEL;
        if (status != ADZE_NO_KERNEL)
            return status;
    }
    const adze_status mixed = attention_mixed(s, p);
    if (mixed != ADZE_NO_KERNEL)
        return mixed;
    const int64_t entries = p.packed ? 1 : p.sequences;
    if (!s.takes(ANY_CALL, true))
        return ADZE_NO_KERNEL;
    return launch(s, attention_any<T>, p.m, dim3(ANY_THREADS), launch_shape(0, 1, entries * p.heads), p);
}

static adze_status attention_run(const cuda_call &s, const adze_attention_args *a)
{
    const int64_t most = 0x7fffffff, pairs = 65535;
    const int64_t sequences = a->q_offsets.dtype ? a->q_offsets.shape[0] - 1 : a->q.shape[0];
    const int64_t n = a->block_table.dtype ? a->block_table.shape[1] * a->k.shape[2] : a->k.shape[2];
    const int64_t rows = a->q.shape[2] * a->q.shape[1] * a->q.shape[0], heads = a->q.shape[0] * a->q.shape[1];
    if (rows + sequences * 128 > most / CLUSTER_MAX || n > most / 2 || heads > pairs || sequences > most / 128 ||
        (a->block_table.dtype && a->k.shape[0] > most))
        return adze_fail(ADZE_NO_KERNEL,
                         "attention: %lld sequences of %lld heads, %lld queries and %lld keys are too many",
                         (long long)sequences, (long long)a->q.shape[1], (long long)a->q.shape[2], (long long)n);
    attention_params p = attention_params_of(a);
    if (p.m == 0 || heads == 0 || (p.dv == 0 && !p.lse))
        return ADZE_OK;
    const bool floats = takes_floats(a, p), tiles = takes_tiles(s, a, p, 256, 256),
               quantised = a->k.dtype != a->q.dtype;
    const bool wide = !quantised && takes_tiles(s, a, p, 576, 512);
    p.vectors = vectors(a->q) && vectors(a->k) && vectors(a->v);
    p.fours = groups(a->q, 4) && groups(a->k, 4) && groups(a->v, 4);
    return s.tuned(a->q.dtype | a->k.dtype << 8 | p.causal << 16 | (p.page != 0) << 17, attention_rows_of(p), p.n,
                   p.d, (int64_t)p.sequences * p.kv_heads, [&]() {
                       switch (a->q.dtype) {
                       case ADZE_F32: return attention_launch<float>(s, p, floats, false, false);
                       case ADZE_F16: return attention_launch<f16>(s, p, tiles, wide, quantised);
                       default: return attention_launch<bf16>(s, p, tiles, wide, quantised);
                       }
                   });
}
CUDA_ENTRIES(attention, ATTENTION_VARIANTS, attention_run)

/* What the calls that may take a split variant need. */
extern "C" size_t adze_attention_cuda_scratch(adze_stream stream, const adze_attention_args *a)
{
    adze_choice choice = {};
    choice.want = choice.ran = -1;
    const cuda_call s(stream, adze_op_attention, &choice);
    const attention_params p = attention_params_of(a);
    const bool floats = takes_floats(a, p);
    const bool tiles = takes_tiles(s, a, p, 576, 512);
    if (p.m == 0 || p.heads == 0 || p.sequences == 0)
        return 0;
    const int widest = p.d > p.dv ? p.d : p.dv;
    const int64_t few = split_parts(s, p, 16), some = split_parts(s, p, widest > 128 ? 32 : 64);
    int64_t parts = attention_mixed_parts(s, p);
    if (floats)
        parts = std::max(parts, attention_floats_parts(s, p));
    if (tiles)
        parts = std::max(
            {parts, attention_ring_parts(s, p), attention_boxes_parts(s, p), direct_split_parts(s, p), few, some});
    const int64_t part = attention_part_pitch(p) + 2; /* floats: values, the maximum and the sum */
    return parts > 1 ? (size_t)(attention_out_rows(p) * parts * part) * sizeof(float) : 0;
}
