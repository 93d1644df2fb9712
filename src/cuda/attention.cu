/* attention on CUDA: which kernel takes a call.

   16-bit elements in rows of whole 16-byte vectors, of up to 256 elements, take tensor cores (attention_tile.cuh): few
   rows with warps along the keys, more rows with warps across them. All other calls, and GPUs without such tensor
   cores, take attention_any.cuh. */
#include "attention_any.cuh"
#include "attention_tile.cuh"

#include <math.h>

static attention_params attention_params_of(const adze_attention_args *a)
{
    attention_params p = {};
    p.q = (const char *)a->q.data, p.k = (const char *)a->k.data, p.v = (const char *)a->v.data;
    p.out = a->out.data;
    p.lse = a->lse.dtype ? (float *)a->lse.data : NULL;
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
    p.table_stride = p.block_table ? a->block_table.stride[0] : 0;
    p.page = p.block_table ? (int)a->k.shape[2] : 0;
    p.pages = p.block_table ? (int)a->k.shape[0] : 0;
    p.sequences = (int)(p.q_offsets ? a->q_offsets.shape[0] - 1 : a->q.shape[0]);
    p.heads = (int)a->q.shape[1], p.kv_heads = (int)a->k.shape[1], p.group = p.heads / p.kv_heads;
    p.m = (int)a->q.shape[2], p.d = (int)a->q.shape[3], p.dv = (int)a->v.shape[3];
    p.n = (int)(p.block_table ? a->block_table.shape[1] * p.page : a->k.shape[2]);
    p.causal = a->causal, p.window = a->window, p.softcap = a->softcap, p.k_dtype = a->k.dtype;
    const double scale = a->scale != 0 ? a->scale : 1 / sqrt((double)p.d);
    p.scale = (float)(p.softcap != 0 ? scale : scale * 1.4426950408889634);
    p.mask_kind = !a->mask.dtype                                             ? MASK_NONE
                  : a->mask.dtype == ADZE_BOOL || a->mask.dtype == ADZE_U8   ? MASK_HIDES
                  : a->mask.dtype == ADZE_F32                                ? MASK_F32
                                                                             : MASK_OF_Q;
    return p;
}

static bool vectors(const adze_tensor &t)
{
    return (uintptr_t)t.data % 16 == 0 && t.shape[3] % 8 == 0 && t.stride[0] % 8 == 0 && t.stride[1] % 8 == 0 &&
           t.stride[2] % 8 == 0;
}

/* Few rows, with warps along the keys; some rows; many rows. */
template <int D>
using ATTENTION_FEW = attention_shape<D, 1, 1, 4, 64, (D > 128 ? 2 : 3)>;
template <int D>
using ATTENTION_SOME = attention_shape<D, 1, 4, 1, (D > 128 ? 32 : 64), 2>;
template <int D>
using ATTENTION_MANY = attention_shape<D, (D > 64 ? 1 : 2), (D > 64 ? 8 : 4), 1, (D > 128 ? 32 : 64), 2>;

enum { FEW_ROWS, SOME_ROWS, MANY_ROWS, ANY_CALL };
constexpr adze_variant ATTENTION_VARIANTS[] = {
    {"rows16", "f16 and bf16 in 16-byte vectors, heads up to 256; 16 rows (queries x heads of one of k) a block"},
    {"rows64", "the same, 64 rows"},
    {"rows128", "the same, 128 rows"},
    {"any", "every call"},
    {NULL, NULL},
};

/* In how many parts the blocks of a cluster take the keys: as few as give every multiprocessor its share. A part has
   256 keys or more. */
static int key_parts(const cuda_call &s, const attention_params &p, int64_t blocks)
{
    const int most = adze_cuda_clusters(s.device) ? 8 : 1;
    int parts = 1;
    while (parts < most && blocks * parts * 2 <= s.gpu.sm_count * 2 && p.n >= parts * 2 * 256)
        parts *= 2;
    return parts;
}

template <typename T, class S>
static adze_status tile_launch(const cuda_call &s, const attention_params &p)
{
    const int64_t tiles = ceil_div((int64_t)p.m * p.group, S::ROWS), pairs = (int64_t)p.sequences * p.kv_heads;
    const int parts = key_parts(s, p, tiles * pairs);
    return launch(s, attention_tile<T, S>, tiles * parts, dim3(S::THREADS), launch_shape(S::SHARED, parts, pairs), p);
}
template <typename T, int D>
static adze_status tile_run(const cuda_call &s, const attention_params &p)
{
    const int64_t rows = (int64_t)p.m * p.group, room = s.gpu.block_shared;
    if (s.takes(FEW_ROWS, ATTENTION_FEW<D>::SHARED <= room, rows <= 16))
        return tile_launch<T, ATTENTION_FEW<D>>(s, p);
    if (s.takes(SOME_ROWS, ATTENTION_SOME<D>::SHARED <= room, rows <= 64))
        return tile_launch<T, ATTENTION_SOME<D>>(s, p);
    if (s.takes(MANY_ROWS, ATTENTION_MANY<D>::SHARED <= room))
        return tile_launch<T, ATTENTION_MANY<D>>(s, p);
    return ADZE_NO_KERNEL;
}
template <typename T>
static adze_status tile_run(const cuda_call &s, const attention_params &p)
{
    const int widest = p.d > p.dv ? p.d : p.dv;
    return widest <= 64    ? tile_run<T, 64>(s, p)
           : widest <= 96  ? tile_run<T, 96>(s, p)
           : widest <= 128 ? tile_run<T, 128>(s, p)
                           : tile_run<T, 256>(s, p);
}

template <typename T>
static adze_status attention_launch(const cuda_call &s, const attention_params &p, bool tiles)
{
    if constexpr (sizeof(T) == 2) {
        const adze_status status = tiles ? tile_run<T>(s, p) : ADZE_NO_KERNEL;
        if (status != ADZE_NO_KERNEL)
            return status;
    }
    const int64_t entries = p.q_offsets ? 1 : p.sequences;
    if (!s.takes(ANY_CALL, true))
        return ADZE_NO_KERNEL;
    return launch(s, attention_any<T>, p.m, dim3(ANY_THREADS), launch_shape(0, 1, entries * p.heads), p);
}

static adze_status attention_run(const cuda_call &s, const adze_attention_args *a)
{
    const int64_t most = 0x7fffffff, pairs = 65535;
    const int64_t sequences = a->q_offsets.dtype ? a->q_offsets.shape[0] - 1 : a->q.shape[0];
    const int64_t n = a->block_table.dtype ? a->block_table.shape[1] * a->k.shape[2] : a->k.shape[2];
    if (a->q.shape[2] * a->q.shape[1] > most || n > most / 2 || sequences * a->q.shape[1] > pairs ||
        (a->block_table.dtype && a->k.shape[0] > most))
        return adze_fail(ADZE_NO_KERNEL, "attention: %lld sequences of %lld heads, %lld queries and %lld keys are too many",
                         (long long)sequences, (long long)a->q.shape[1], (long long)a->q.shape[2], (long long)n);
    const attention_params p = attention_params_of(a);
    if (p.m == 0 || p.heads == 0 || p.sequences == 0 || p.dv == 0)
        return ADZE_OK;
    const bool tiles = adze_cuda_tensor_cores(s.device) && a->q.dtype != ADZE_F32 && a->k.dtype == a->q.dtype &&
                       p.d <= 256 && p.dv <= 256 && vectors(a->q) && vectors(a->k) && vectors(a->v) && vectors(a->out);
    return s.tuned(a->q.dtype, (int64_t)p.m * p.group, p.n, p.d, (int64_t)p.sequences * p.kv_heads, [&]() {
        switch (a->q.dtype) {
        case ADZE_F32: return attention_launch<float>(s, p, false);
        case ADZE_F16: return attention_launch<f16>(s, p, tiles);
        default: return attention_launch<bf16>(s, p, tiles);
        }
    });
}
CUDA_ENTRIES(attention, ATTENTION_VARIANTS, attention_run)
