/* append_vectors.cuh - kv_append of aligned heads, each held by 2^lane_bits lanes with one unit each.

   Many heads are read in vectors of 16 bytes. Few of them, as those of a token, take as long as the longest chain of
   loads and instructions, so a lane has two pairs only, and every SM has a part. All that follows from a head's
   number is computed before the dependency wait. After it the slot, x, the weights and tables by token are loaded at
   once; a page, or tables by slot, after the slot. The lanes of heads that are not there read the last one, and write
   nothing. */
#ifndef ADZE_CUDA_APPEND_VECTORS_CUH
#define ADZE_CUDA_APPEND_VECTORS_CUH

#include "append_unit.cuh"
#include "launch.cuh"

constexpr int VECTOR_THREADS = 128;

/* Over the lanes of a head; all lanes of the warp call it. */
template <typename ADD>
__device__ __forceinline__ float append_over_lanes(const append_params &p, float v, ADD add)
{
    for (int mask = 1 << p.lane_bits >> 1; mask; mask >>= 1)
        v = add(v, __shfl_xor_sync(~0u, v, mask));
    return v;
}

/* Blocks of an SM: with units of 16 bytes, six have 24 KB of x in flight. f32 tables, or a
   norm, take the registers of the sixth. */
template <int W, append_tables TABLES, bool NORM>
constexpr int VECTOR_BLOCKS = W == 2                         ? 8
                              : TABLES == F32_TABLES || NORM ? 5
                                                             : 6;

template <typename T, int W, append_tables TABLES, bool NORM>
__global__ void __launch_bounds__(VECTOR_THREADS, (VECTOR_BLOCKS<W, TABLES, NORM>))
    append_vectors(const __grid_constant__ append_params p)
{
    pdl_launch_next();
    const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x, head = thread >> p.lane_bits;
    const bool there = head < (uint32_t)p.count;
    const uint32_t item = there ? head : (uint32_t)p.count - 1, at = divide(item, p.by_heads);
    const int32_t of_token = (int32_t)(item - at * (uint32_t)p.all_heads);
    const int32_t before_k = (int32_t)p.part[Q].heads, before_v = before_k + (int32_t)p.part[K].heads;
    const int which = of_token < before_k ? Q : of_token < before_v ? K : V;
    const int32_t h = of_token - (which == Q ? 0 : which == K ? before_k : before_v);
    const append_part &part = p.part[which];
    append_token token(p, at, false);
    append_unit<T, W, TABLES> unit;
    unit.place(p, part, (int32_t)(thread & ((1u << p.lane_bits) - 1)));

    constexpr int TABLE_SIZE = TABLES == F32_TABLES ? 4 : (int)sizeof(T);
    const bool by_slot = token.tables_by_slot(p), by_token = !by_slot && p.part[K].rotary_dim > 0;
    const T *const x =
        (const T *)part.x + opaque(token.b * part.x_stride[0] + token.s * part.x_stride[1] + h * part.x_stride[2]);
    const int32_t *const slot_at = token.slot_at(p);
    const int64_t to_head = h * part.out_stride[2];
    if (by_token)
        token.place_tables(p, TABLE_SIZE);
    if (W == 2) { /* few heads: their addresses are computed, and in the TLB, before the wait */
        prefetch(x + (unit.there ? unit.at[0] : 0));
        prefetch(x + (unit.there && unit.second ? unit.at[1] : 0));
        prefetch(slot_at);
        if (by_token)
            prefetch(token.cos), prefetch(token.sin);
    }
    const auto fetch_weights = [&] {
        if (by_token)
            unit.fetch_tables_at_once(p, token);
        if (NORM)
            unit.fetch_weight(part, 0);
    };
    if (p.const_weights)
        fetch_weights();
    pdl_wait();
    const int32_t number = *slot_at;
    unit.fetch_x_at_once(x);
    if (!p.const_weights)
        fetch_weights();
    if (which != Q || by_slot)
        token.place(p, number);
    if (by_slot) {
        token.place_tables(p, TABLE_SIZE);
        unit.fetch_tables(p, token);
    }
    float scale = 1;
    if (NORM) {
        const float sum = append_over_lanes(p, unit.squares(), [](float a, float b) { return a + b; });
        scale = rsqrtf(sum * p.inverse[which == K] + p.eps);
    }
    unit.turn(p, part, scale, token.tables);

    const bool writes = there && (which == Q || token.entry >= 0);
    const int64_t row[2] = {which == Q ? token.b : token.entry, which == Q ? token.s : token.row};
    const int64_t to = row[0] * part.out_stride[0] + row[1] * part.out_stride[1] + to_head;
    float stored_scale = 0;
    if (p.stored) {
        const float most = append_over_lanes(p, unit.most(), [](float a, float b) { return fmaxf(a, b); });
        stored_scale = most / (p.stored == ADZE_I8 ? 127.0f : 448.0f);
    }
    if (!writes)
        return;
    if (!part.scale) {
        unit.put((T *)part.out + to);
        return;
    }
    unit.template put_stored<true>(p.stored, (uint8_t *)part.out + to, stored_scale);
    if (unit.at[0] == 0)
        part.scale[row[0] * part.scale_stride[0] + row[1] * part.scale_stride[1] + h * part.scale_stride[2]] =
            stored_scale;
}

/* Host: lanes that a head has, as a power of two, with units of twice W elements. */
static inline int32_t append_lane_bits(const append_params &p, int32_t W)
{
    const int32_t dim = p.part[K].dim > p.part[V].dim ? p.part[K].dim : p.part[V].dim;
    int32_t bits = 0;
    while (2 * W << bits < dim && bits < 5)
        bits++;
    return bits;
}

#endif
