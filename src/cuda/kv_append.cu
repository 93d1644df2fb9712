/* kv_append on CUDA, in one launch: norm and rope of q and k, and the writes of q_out, k and v.

   append_heads: a warp has a head of q, k or v of a token. append_across: where the norm is over all heads, a block
   has those of q, of k or of v of a token. A lane has units of a head: two times W elements, of which each rotates
   with one of the other, half of rotary_dim apart, or with its neighbour; or 2 W that do not rotate. W is 2 where all
   tensors are aligned for it. Heads of up to N units per lane are held: what is read of x, of the tables and of the
   weights is all in flight at once. With N = 0 a head is read again for each of its steps.

   Slots and pages are read here: a token that has no place is dropped, and reads no row of a table that is not
   there. */
#include "kv_cache.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "stored.cuh"
#include "unit.cuh"

constexpr int HEAD_WARPS = 4, ACROSS_WARPS = 8;

enum { HELD_PAIRS, LOOP_PAIRS, HELD_SINGLE, LOOP_SINGLE };
constexpr adze_variant VARIANTS[] = {
    {"held2", "aligned heads of up to 256 elements, two pairs at a time"},
    {"loop2", "aligned heads of any length, two pairs at a time"},
    {"held1", "heads of up to 128 elements at any address"},
    {"loop1", "every call"},
    {NULL, NULL},
};

enum { Q, K, V, PARTS };
struct append_part {
    const char *x;
    char *out;                              /* q_out or the cache */
    const char *weight;                     /* NULL: ones */
    float *scale;                           /* NULL: the cache has x's dtype */
    int64_t x_stride[3];                    /* of batch, token and head */
    int64_t out_stride[3], scale_stride[3]; /* of these; of a cache, of entry, row and head */
    int64_t heads;
    int32_t dim, rotary_dim;
    int32_t norm, weight_f32;
};
struct append_params {
    append_part part[PARTS];
    const char *cos, *sin;
    int64_t cos_stride[2], sin_stride[2]; /* of batch and token, or slot */
    const int32_t *lengths, *positions, *block_table;
    int64_t lengths_stride, positions_stride[2], block_stride[2];
    int64_t rows, pages; /* of the cache: slots of an entry, entries */
    int64_t pages_each;  /* of a sequence */
    int64_t table_rows;  /* of tables by slot; -1: they are by token */
    int64_t seq, count;  /* count: warps, or blocks, with work */
    int64_t all_heads;   /* of a token */
    float inverse[2];    /* 1 / elements of a norm, of q and k */
    float eps, weight_offset;
    divisor by_heads, by_seq;
    bool wide_index; /* indices need more than 31 bits */
    bool interleaved, once, table_f32;
    int32_t rounding, stored; /* stored: the dtype of a cache in fewer bits, or 0 */
    bool const_weights;       /* they may be read before the dependency wait */
};

__device__ __forceinline__ int64_t append_divide(const append_params &p, const divisor &d, int64_t n, int64_t *rest)
{
    const int64_t quotient = p.wide_index ? divide(n, d.by) : (int64_t)divide((uint32_t)n, d);
    *rest = n - quotient * d.by;
    return quotient;
}

/* Where a token lies, and what it reads and writes. */
struct append_token {
    int64_t b, s;
    int64_t entry, row; /* of the caches; entry is -1 where it has no place */
    const char *cos, *sin;
    bool tables; /* its row of the tables is there */

    __device__ __forceinline__ append_token(const append_params &p, int64_t token, int table_size)
    {
        b = append_divide(p, p.by_seq, token, &s);
        const int64_t slot = p.lengths ? (int64_t)p.lengths[b * p.lengths_stride] + s
                                       : p.positions[b * p.positions_stride[0] + s * p.positions_stride[1]];
        const bool by_slot = p.table_rows >= 0;
        tables = !by_slot || (slot >= 0 && slot < p.table_rows);
        const int64_t table_b = by_slot ? 0 : b, table_s = !by_slot ? s : tables ? slot : 0;
        cos = p.cos + (table_b * p.cos_stride[0] + table_s * p.cos_stride[1]) * table_size;
        sin = p.sin + (table_b * p.sin_stride[0] + table_s * p.sin_stride[1]) * table_size;
        entry = -1, row = slot;
        if (slot < 0 || p.rows == 0 || !tables)
            return;
        if (!p.block_table) {
            entry = slot < p.rows ? b : -1;
            return;
        }
        const int64_t at = divide(slot, p.rows);
        if (at >= p.pages_each)
            return;
        const int64_t page = p.block_table[b * p.block_stride[0] + at * p.block_stride[1]];
        entry = page >= 0 && page < p.pages ? page : -1;
        row = slot - at * p.rows;
    }
};

template <typename T, int W>
struct append_unit {
    int32_t at[2];
    bool there, second, rotates;
    unit<T, W> x[2];
    param_unit<T, W> cos[2], sin[2], weight[2];
    float f[2][W];

    /* Unit n of a head. */
    __device__ __forceinline__ void place(const append_params &p, const append_part &part, int32_t n)
    {
        const int32_t turning = part.rotary_dim / (2 * W), half = part.rotary_dim / 2;
        rotates = n < turning;
        const bool apart = rotates && !p.interleaved;
        at[0] = apart ? n * W : 2 * n * W;
        at[1] = apart ? half + n * W : 2 * n * W + W;
        there = at[0] < part.dim;
        second = at[1] < part.dim;
    }
    __device__ __forceinline__ void fetch_x(const T *head)
    {
        x[0].fill(0), x[1].fill(0);
        if (there)
            x[0].fetch(head + at[0]);
        if (there && second)
            x[1].fetch(head + at[1]);
    }
    __device__ __forceinline__ void fetch_weight(const append_part &part, int64_t from)
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (part.weight && there && (i == 0 || second))
                weight[i].fetch(part.weight, part.weight_f32, from + at[i]);
    }
    /* The columns of both halves. A table with one column per pair has those of two neighbouring pairs in one. */
    __device__ __forceinline__ void fetch_tables(const append_params &p, const append_token &token)
    {
        if (!rotates || !there || !token.tables)
            return;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int32_t column = !p.once ? at[i] : p.interleaved ? at[0] / 2 : at[0];
            cos[i].fetch(token.cos, p.table_f32, column);
            sin[i].fetch(token.sin, p.table_f32, column);
        }
    }
    __device__ __forceinline__ float squares() const
    {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float v[W];
            x[i].get(v);
#pragma unroll
            for (int j = 0; j < W; j++)
                sum += v[j] * v[j];
        }
        return sum;
    }
    /* f: what is stored, before it is rounded. */
    __device__ __forceinline__ void turn(const append_params &p, const append_part &part, float scale, bool tables)
    {
        const bool steps = p.rounding & ADZE_ROUND_STEPS, values = p.rounding & (ADZE_ROUND_VALUE | ADZE_ROUND_STEPS);
        const auto round_if = [](bool condition, float v) { return condition ? round_to<T>(v) : v; };
        if (!tables)
            x[0].fill(NAN), x[1].fill(NAN);
        x[0].get(f[0]), x[1].get(f[1]);
        if (part.norm) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float w[W];
                weight[i].get(part.weight_f32, w);
#pragma unroll
                for (int j = 0; j < W; j++) {
                    f[i][j] = round_if(p.rounding & ADZE_ROUND_NORM, f[i][j] * scale);
                    f[i][j] = round_if(values, part.weight ? f[i][j] * (w[j] + p.weight_offset) : f[i][j]);
                }
            }
        }
        if (!rotates)
            return;
        float c[2][W], s[2][W];
#pragma unroll
        for (int i = 0; i < 2; i++)
            cos[i].get(p.table_f32, c[i]), sin[i].get(p.table_f32, s[i]);
        /* Of a pair: a cos - b sin and b cos + a sin, each with its own column. */
        const auto pair = [&](float &a, float &b, float a_cos, float a_sin, float b_cos, float b_sin) {
            const float x0 = a, y0 = b;
            a = round_if(steps, x0 * a_cos) - round_if(steps, y0 * a_sin);
            b = round_if(steps, y0 * b_cos) + round_if(steps, x0 * b_sin);
        };
        if (W == 2 && p.interleaved) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                constexpr int LAST = W - 1;
                const int column = i * LAST; /* of a table with one column per pair */
                pair(f[i][0], f[i][LAST], p.once ? c[i][column] : c[i][0], p.once ? s[i][column] : s[i][0],
                     p.once ? c[i][column] : c[i][LAST], p.once ? s[i][column] : s[i][LAST]);
            }
        } else {
#pragma unroll
            for (int j = 0; j < W; j++)
                pair(f[0][j], f[1][j], c[0][j], s[0][j], c[1][j], s[1][j]);
        }
    }
    __device__ __forceinline__ void put(T *head) const
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (there && (i == 0 || second)) {
                unit<T, W> y;
                y.set(f[i]);
                y.put(head + at[i]);
            }
    }
    /* In fewer bits, of what T holds. */
    __device__ __forceinline__ float most() const
    {
        float all = 0;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < W; j++)
                if (there && (i == 0 || second))
                    all = fmaxf(all, fabsf(round_to<T>(f[i][j])));
        return all;
    }
    __device__ __forceinline__ void put_stored(int stored, uint8_t *head, float scale) const
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < W; j++)
                if (there && (i == 0 || second)) {
                    const float q = over_scale(round_to<T>(f[i][j]), scale);
                    head[at[i] + j] =
                        stored == ADZE_I8 ? (uint8_t)whole_between(q, 0, -127, 127) : (uint8_t)f8_bits(q);
                }
    }
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
            unit.put_stored(p.stored, (uint8_t *)part.out + to, stored_scale);
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
        const int64_t token = append_divide(p, p.by_heads, item, &h);
        const int which = h < p.part[Q].heads ? Q : h < p.part[Q].heads + p.part[K].heads ? K : V;
        h -= which == Q ? 0 : which == K ? p.part[Q].heads : p.part[Q].heads + p.part[K].heads;
        append_head<T, W, N, false> head(p, which, h);
        head.fetch_weights();
        if (p.const_weights && item == first)
            pdl_wait();
        head.run(append_token(p, token, append_table_size<T>(p)), 1);
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
        const append_token token(p, at, append_table_size<T>(p));
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
template <typename T>
static adze_status append_launch_as(const cuda_call &s, const append_params &p, int64_t tokens, bool across,
                                    bool pairs)
{
    const int32_t dim = p.part[K].dim > p.part[V].dim ? p.part[K].dim : p.part[V].dim;
    if (s.takes(HELD_PAIRS, pairs && dim <= 256))
        return dim <= 128 ? append_launch<T, 2, 1>(s, p, tokens, across)
                          : append_launch<T, 2, 2>(s, p, tokens, across);
    if (s.takes(LOOP_PAIRS, pairs))
        return append_launch<T, 2, 0>(s, p, tokens, across);
    if (s.takes(HELD_SINGLE, dim <= 128))
        return append_launch<T, 1, 2>(s, p, tokens, across);
    return s.takes(LOOP_SINGLE, true) ? append_launch<T, 1, 0>(s, p, tokens, across) : ADZE_NO_KERNEL;
}

/* Whether pairs of neighbouring elements of a tensor are aligned as one. */
static bool append_even(const adze_tensor *t)
{
    const uint64_t bytes = 2 * adze_dtype_size(t->dtype);
    bool even = !t->dtype || (uintptr_t)t->data % bytes == 0;
    for (int d = 0; d < t->rank - 1 && t->dtype; d++)
        even = even && (t->shape[d] == 1 || t->stride[d] % 2 == 0);
    return even;
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
    p.lengths = a->lengths.dtype ? (const int32_t *)a->lengths.data : NULL;
    p.positions = (const int32_t *)a->positions.data;
    p.block_table = a->block_table.dtype ? (const int32_t *)a->block_table.data : NULL;
    p.lengths_stride = a->lengths.stride[0];
    for (int d = 0; d < 2; d++)
        p.positions_stride[d] = a->positions.stride[d], p.block_stride[d] = a->block_table.stride[d];
    p.rows = a->k_cache.shape[2], p.pages = a->k_cache.shape[0];
    p.pages_each = a->block_table.dtype ? a->block_table.shape[1] : 0;
    p.table_rows = a->table_by_slot ? a->cos.shape[0] : -1;
    p.seq = r.seq;
    p.all_heads = p.part[Q].heads + p.part[K].heads + p.part[V].heads;
    p.eps = r.eps, p.weight_offset = r.weight_offset;
    p.by_heads = divisor_of(p.all_heads > 0 ? p.all_heads : 1), p.by_seq = divisor_of(p.seq > 0 ? p.seq : 1);
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
    bool pairs = r.rotary_dim % 4 == 0 && r.head_dim % 4 == 0 && a->v.shape[3] % 4 == 0;
    for (const adze_tensor *t : {&a->q, &a->q_out, &a->k, &a->v, &a->q_weight, &a->k_weight, &a->cos, &a->sin})
        pairs = pairs && append_even(t);
    if (!p.stored)
        pairs = pairs && append_even(&a->k_cache) && append_even(&a->v_cache);
    const bool across = a->norm && a->across_heads;
    const int form = r.dtype | across << 4 | pairs << 5 | a->norm << 6 | p.stored << 8;
    return s.tuned(form, tokens, p.all_heads, r.head_dim, 0, [&] {
        switch (r.dtype) {
        case ADZE_F32: return append_launch_as<float>(s, p, tokens, across, pairs);
        case ADZE_F16: return append_launch_as<f16>(s, p, tokens, across, pairs);
        default: return append_launch_as<bf16>(s, p, tokens, across, pairs);
        }
    });
}
CUDA_ENTRIES(kv_append, VARIANTS, kv_append_run)
