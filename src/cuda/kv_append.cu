/* kv_append on CUDA, in one launch: norm and rope of q and k, and the writes of q_out, k and v.

   append_vectors.cuh has what models call: aligned heads. Here are the others. append_heads: a warp has a head of q,
   k or v of a token. append_across: where the norm is over all heads, a block has those of q, of k or of v of a
   token. A lane has units of a head: two times W elements, of which each rotates with one of the other, half of
   rotary_dim apart, or with its neighbour; or 2 W that do not rotate. W is 2 where all tensors are aligned for it.
   Heads of up to N units per lane are held: what is read of x, of the tables and of the weights is all in flight at
   once. With N = 0 a head is read again for each of its steps.

   Slots and pages are read here: a token that has no place is dropped, and reads no row of a table that is not
   there. */
#include "append_vectors.cuh"
#include "reduce.cuh"

constexpr int HEAD_WARPS = 4, ACROSS_WARPS = 8;

enum { FEW_HEADS, VECTORS, HELD_PAIRS, LOOP_PAIRS, HELD_SINGLE, LOOP_SINGLE };
constexpr adze_variant VARIANTS[] = {
    {"few", "aligned heads of up to 128 elements, few of them: two pairs in a lane"},
    {"vectors", "heads aligned to 16 bytes, of up to 512 elements, or 256 of f32"},
    {"held2", "aligned heads of up to 256 elements, two pairs at a time"},
    {"loop2", "aligned heads of any length, two pairs at a time"},
    {"held1", "heads of up to 128 elements at any address"},
    {"loop1", "every call"},
    {NULL, NULL},
};

/* A head of a token by a warp. `scale` is that of a norm over all heads; ACROSS: it is given. */
template <typename T, int W, int N, bool ACROSS>
struct append_head {
    append_unit<T, W> held[N ? N : 1];
    const append_params &p;
    const append_part &part;
    const int which;
    const int64_t h;
    const int32_t lane = (int32_t)threadIdx.x % 32;

    __device__ __forceinline__ append_head(const append_params &params, int its, int64_t head)
        : p(params), part(params.part[its]), which(its), h(head)
    {
#pragma unroll
        for (int n = 0; n < N; n++)
            held[n].place(p, part, lane + 32 * n);
    }
    __device__ __forceinline__ void fetch_weights()
    {
#pragma unroll
        for (int n = 0; n < N; n++)
            held[n].fetch_weight(part, ACROSS ? h * part.dim : 0);
    }
    /* All units of the lane, one after the other. */
    template <typename BODY>
    __device__ __forceinline__ void each(const append_token &token, const T *x, BODY body)
    {
        if constexpr (N > 0) {
#pragma unroll
            for (int n = 0; n < N; n++)
                body(held[n]);
        } else {
            const int32_t units = (part.dim + 2 * W - 1) / (2 * W);
            for (int32_t n = lane; n < units; n += 32) {
                held[0].place(p, part, n);
                held[0].fetch_x(x);
                held[0].fetch_weight(part, ACROSS ? h * part.dim : 0);
                held[0].fetch_tables(p, token);
                body(held[0]);
            }
        }
    }
    __device__ __forceinline__ void run(const append_token &token, float scale)
    {
        const T *x =
            (const T *)part.x + token.b * part.x_stride[0] + token.s * part.x_stride[1] + h * part.x_stride[2];
        if (which != Q && token.entry < 0)
            return;
#pragma unroll
        for (int n = 0; n < N; n++)
            held[n].fetch_x(x), held[n].fetch_tables(p, token);
        if (!ACROSS && part.norm) {
            float sum = 0;
            each(token, x, [&](append_unit<T, W> &unit) { sum += unit.squares(); });
            scale = rsqrtf(warp_sum<32>(sum) * p.inverse[which == K] + p.eps);
        }
        const int64_t row[2] = {which == Q ? token.b : token.entry, which == Q ? token.s : token.row};
        const int64_t to = row[0] * part.out_stride[0] + row[1] * part.out_stride[1] + h * part.out_stride[2];
        if (!part.scale) {
            each(token, x, [&](append_unit<T, W> &unit) {
                unit.turn(p, part, scale, token.tables);
                unit.put((T *)part.out + to);
            });
            return;
        }
        float most = 0;
        each(token, x, [&](append_unit<T, W> &unit) {
            unit.turn(p, part, scale, token.tables);
            most = fmaxf(most, unit.most());
        });
        const float stored_scale = warp_max<32>(most) / (p.stored == ADZE_I8 ? 127.0f : 448.0f);
        each(token, x, [&](append_unit<T, W> &unit) {
            if (N == 0)
                unit.turn(p, part, scale, token.tables);
            unit.template put_stored<false>(p.stored, (uint8_t *)part.out + to, stored_scale);
        });
        if (lane == 0)
            part.scale[row[0] * part.scale_stride[0] + row[1] * part.scale_stride[1] + h * part.scale_stride[2]] =
                stored_scale;
    }
};

template <typename T>
__device__ __forceinline__ int append_table_size(const append_params &p)
{
    return p.table_f32 ? 4 : (int)sizeof(T);
}

template <typename T, int W, int N>
__global__ void __launch_bounds__(HEAD_WARPS * 32, 4) append_heads(const __grid_constant__ append_params p)
{
    const int64_t first = (int64_t)blockIdx.x * HEAD_WARPS + threadIdx.x / 32;
    pdl_launch_next();
    if (!p.const_weights)
        pdl_wait();
    for (int64_t item = first; item < p.count; item += (int64_t)gridDim.x * HEAD_WARPS) {
        int64_t h;
        const int64_t token = append_divide(p.wide_index, p.by_heads, item, &h);
        const int which = h < p.part[Q].heads ? Q : h < p.part[Q].heads + p.part[K].heads ? K : V;
        h -= which == Q ? 0 : which == K ? p.part[Q].heads : p.part[Q].heads + p.part[K].heads;
        append_head<T, W, N, false> head(p, which, h);
        head.fetch_weights();
        if (p.const_weights && item == first)
            pdl_wait();
        append_token found(p, token, p.wide_index);
        found.place(p, *found.slot_at(p));
        found.place_tables(p, append_table_size<T>(p));
        head.run(found, 1);
    }
    if (first >= p.count)
        pdl_wait();
}

template <typename T, int W, int N>
__global__ void __launch_bounds__(ACROSS_WARPS * 32, 2) append_across(const __grid_constant__ append_params p)
{
    __shared__ alignas(16) float sums[32];
    pdl_launch_next();
    pdl_wait();
    for (int64_t item = blockIdx.x; item < p.count; item += gridDim.x) {
        const int64_t at = item / PARTS;
        const int which = (int)(item - at * PARTS);
        const append_part &part = p.part[which];
        append_token token(p, at, p.wide_index);
        token.place(p, *token.slot_at(p));
        token.place_tables(p, append_table_size<T>(p));
        const T *x = (const T *)part.x + token.b * part.x_stride[0] + token.s * part.x_stride[1];
        float sum = 0;
        const int64_t all = part.norm ? part.heads : 0;
        for (int64_t h = threadIdx.x / 32; h < all; h += ACROSS_WARPS)
            for (int32_t i = (int32_t)threadIdx.x % 32; i < part.dim; i += 32) {
                const float v = to_float(x[h * part.x_stride[2] + i]);
                sum += v * v;
            }
        /* Heads may be written where they were read: the barrier of the sum is after the last read of another's. */
        sum = row_sum(sum, sums);
        const float scale = rsqrtf(sum * p.inverse[which == K] + p.eps);
        for (int64_t h = threadIdx.x / 32; h < part.heads; h += ACROSS_WARPS) {
            append_head<T, W, N, true> head(p, which, h);
            head.fetch_weights();
            head.run(token, scale);
        }
        __syncthreads(); /* sums are used again */
    }
}

/* ---- The host ---- */

template <typename T, int W, int N>
static adze_status append_launch(const cuda_call &s, append_params p, int64_t tokens, bool across)
{
    const int64_t most = (int64_t)1 << 31;
    p.count = tokens * (across ? (int64_t)PARTS : p.all_heads);
    p.wide_index = p.count >= most || p.all_heads >= most || p.seq >= most;
    if (across)
        return launch(s, append_across<T, W, N>, grid_for(p.count, 1), dim3(ACROSS_WARPS * 32), 0, p);
    return launch(s, append_heads<T, W, N>, grid_for(p.count, HEAD_WARPS), dim3(HEAD_WARPS * 32), 0, p);
}

/* Whether all tensors of the call are aligned to units of W elements, of 16 bytes at most, and the halves that rotate
   have whole units. */
static bool append_aligned(const adze_kv_append_args *a, const adze_rotary &r, int64_t W)
{
    bool aligned = r.rotary_dim % (2 * W) == 0 && r.head_dim % W == 0 && a->v.shape[3] % W == 0;
    for (const adze_tensor *t :
         {&a->q, &a->q_out, &a->k, &a->v, &a->q_weight, &a->k_weight, &a->cos, &a->sin, &a->k_cache, &a->v_cache}) {
        if (!t->dtype)
            continue;
        const uint64_t bytes = (uint64_t)W * adze_dtype_size(t->dtype);
        aligned = aligned && (uintptr_t)t->data % (bytes < 16 ? bytes : 16) == 0;
        for (int d = 0; d < t->rank - 1; d++)
            aligned = aligned && (t->shape[d] == 1 || t->stride[d] % W == 0);
    }
    return aligned;
}

/* few: spread over the multiprocessors. Else blocks of a size, each of which has heads that share rows of tables. */
template <typename T, int W, append_tables TABLES, bool NORM>
static adze_status vectors_launch(const cuda_call &s, append_params p, int64_t tokens, bool few)
{
    p.count = tokens * p.all_heads;
    p.lane_bits = append_lane_bits(p, W);
    const int64_t warps = ceil_div(p.count << p.lane_bits, 32), each = ceil_div(warps, s.gpu.sm_count);
    const int64_t most = VECTOR_THREADS / 32, block = few && each < most ? each : most;
    return launch(s, append_vectors<T, W, TABLES, NORM>, ceil_div(warps, block), dim3((unsigned)block * 32), 0, p);
}
template <typename T, int W>
static adze_status vectors_launch_as(const cuda_call &s, const append_params &p, int64_t tokens, bool few)
{
    const bool norm = p.part[K].norm;
    if constexpr (sizeof(T) < 4)
        if (p.table_f32)
            return norm ? vectors_launch<T, W, F32_TABLES, true>(s, p, tokens, few)
                        : vectors_launch<T, W, F32_TABLES, false>(s, p, tokens, few);
    return norm ? vectors_launch<T, W, OWN_TABLES, true>(s, p, tokens, few)
                : vectors_launch<T, W, OWN_TABLES, false>(s, p, tokens, few);
}

template <typename T>
static adze_status append_launch_as(const cuda_call &s, const append_params &p, const adze_kv_append_args *a,
                                    const adze_rotary &r)
{
    const int32_t dim = p.part[K].dim > p.part[V].dim ? p.part[K].dim : p.part[V].dim;
    const int64_t tokens = r.batch * r.seq, heads = tokens * p.all_heads;
    const bool across = a->norm && a->across_heads;
    /* Threads have 31 bits, and all heads elements. */
    const bool one_unit = !across && heads < (int64_t)1 << 26 && p.part[K].dim > 0 && p.part[V].dim > 0;
    const bool pairs = append_aligned(a, r, 2) && r.head_dim % 4 == 0 && a->v.shape[3] % 4 == 0;
    /* While threads with two pairs each are few, they end sooner than fewer threads with more. */
    const bool few = (heads << append_lane_bits(p, 2)) <= (int64_t)s.gpu.sm_count * 512;
    if (s.takes(FEW_HEADS, pairs && one_unit && dim <= 128, few))
        return vectors_launch_as<T, 2>(s, p, tokens, true);
    if (s.takes(VECTORS, append_aligned(a, r, VEC<T>) && !p.interleaved && one_unit && dim <= 64 * VEC<T>))
        return vectors_launch_as<T, VEC<T>>(s, p, tokens, false);
    if (s.takes(HELD_PAIRS, pairs && dim <= 256))
        return dim <= 128 ? append_launch<T, 2, 1>(s, p, tokens, across)
                          : append_launch<T, 2, 2>(s, p, tokens, across);
    if (s.takes(LOOP_PAIRS, pairs))
        return append_launch<T, 2, 0>(s, p, tokens, across);
    if (s.takes(HELD_SINGLE, dim <= 128))
        return append_launch<T, 1, 2>(s, p, tokens, across);
    return s.takes(LOOP_SINGLE, true) ? append_launch<T, 1, 0>(s, p, tokens, across) : ADZE_NO_KERNEL;
}

static append_part append_part_of(const adze_tensor *x, const adze_tensor *out, const adze_tensor *scale)
{
    append_part part = {};
    const int order[3] = {0, 2, 1}; /* [batch, heads, tokens] as batch, token and head */
    if (!x->dtype)
        return part;
    part.x = (const char *)x->data, part.out = (char *)out->data;
    part.scale = scale && scale->dtype ? (float *)scale->data : NULL;
    part.heads = x->shape[1];
    part.dim = (int32_t)x->shape[3];
    for (int d = 0; d < 3; d++) {
        part.x_stride[d] = x->stride[order[d]];
        part.out_stride[d] = out->stride[order[d]];
        part.scale_stride[d] = part.scale ? scale->stride[order[d]] : 0;
    }
    return part;
}

static append_params append_params_of(const adze_kv_append_args *a, const adze_rotary &r)
{
    append_params p = {};
    p.part[Q] = append_part_of(&a->q, &a->q_out, NULL);
    p.part[K] = append_part_of(&a->k, &a->k_cache, &a->k_scale);
    p.part[V] = append_part_of(&a->v, &a->v_cache, &a->v_scale);
    for (int i = Q; i <= K; i++) {
        const adze_rotary_tensor &tensor = r.qk[i];
        p.part[i].weight = (const char *)tensor.weight;
        p.part[i].weight_f32 = tensor.weight_dtype == ADZE_F32 && r.dtype != ADZE_F32;
        p.part[i].rotary_dim = (int32_t)r.rotary_dim;
        p.part[i].norm = a->norm;
        p.inverse[i] = 1 / (float)((r.across_heads ? tensor.heads : 1) * r.head_dim);
    }
    p.cos = (const char *)r.cos, p.sin = (const char *)r.sin;
    for (int d = 0; d < 2; d++)
        p.cos_stride[d] = r.cos_stride[d], p.sin_stride[d] = r.sin_stride[d];
    p.by_length = a->lengths.dtype;
    const adze_tensor &slots = p.by_length ? a->lengths : a->positions;
    p.slots = (const int32_t *)slots.data;
    p.slots_stride[0] = slots.stride[0], p.slots_stride[1] = p.by_length ? 0 : slots.stride[1];
    p.block_table = a->block_table.dtype ? (const int32_t *)a->block_table.data : NULL;
    for (int d = 0; d < 2; d++)
        p.block_stride[d] = a->block_table.stride[d];
    p.rows = a->k_cache.shape[2], p.pages = a->k_cache.shape[0];
    p.pages_each = a->block_table.dtype ? a->block_table.shape[1] : 0;
    p.table_rows = a->table_by_slot ? a->cos.shape[0] : -1;
    p.seq = r.seq;
    p.all_heads = p.part[Q].heads + p.part[K].heads + p.part[V].heads;
    p.eps = r.eps, p.weight_offset = r.weight_offset;
    p.by_heads = divisor_of(p.all_heads > 0 ? p.all_heads : 1), p.by_seq = divisor_of(p.seq > 0 ? p.seq : 1);
    p.by_rows = divisor_of(p.rows > 0 ? p.rows : 1);
    p.interleaved = r.pairs == ADZE_ROPE_INTERLEAVED, p.once = r.once;
    p.table_f32 = r.table_dtype == ADZE_F32 && r.dtype != ADZE_F32;
    p.rounding = r.rounding;
    p.stored = a->k_scale.dtype ? a->k_cache.dtype : 0;
    p.const_weights = a->call.flags & ADZE_CONST_WEIGHTS;
    return p;
}

static adze_status kv_append_run(const cuda_call &s, const adze_kv_append_args *a)
{
    const adze_rotary r = adze_kv_rotary(a);
    const int64_t tokens = r.batch * r.seq, most = 1 << 28;
    if (r.head_dim > most || a->v.shape[3] > most)
        return adze_fail(ADZE_NO_KERNEL, "kv_append: heads of %lld and %lld elements are too long",
                         (long long)r.head_dim, (long long)a->v.shape[3]);
    const append_params p = append_params_of(a, r);
    if (tokens == 0 || p.all_heads == 0)
        return ADZE_OK;
    const bool across = a->norm && a->across_heads;
    const int form = r.dtype | across << 4 | append_aligned(a, r, 2) << 5 | a->norm << 6 | p.stored << 8;
    return s.tuned(form, tokens, p.all_heads, r.head_dim, 0, [&] {
        switch (r.dtype) {
        case ADZE_F32: return append_launch_as<float>(s, p, a, r);
        case ADZE_F16: return append_launch_as<f16>(s, p, a, r);
        default: return append_launch_as<bf16>(s, p, a, r);
        }
    });
}
CUDA_ENTRIES(kv_append, VARIANTS, kv_append_run)
