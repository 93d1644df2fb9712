/* attention_wgmma.cuh - attention of 16-bit elements and many rows on Hopper's tensor cores.

   A block takes tiles of ROWS queries of one head, one after the other. Large blocks have a multiprocessor to
   themselves. One thread copies q, and the keys and values of each step, into shared memory. Warpgroups of 64 rows
   compute: scores = q . k^T from shared memory; then, while the scores of the next step and the values of the last
   one are multiplied, what their softmax needs. The weights are the registers that the scores were, rounded: no other
   thread needs them. */
#ifndef ADZE_CUDA_ATTENTION_WGMMA_CUH
#define ADZE_CUDA_ATTENTION_WGMMA_CUH

#include "attention_step.cuh"
#include "wgmma.cuh"

/* Rows have up to D elements, and those of v DV, in panels of 64. GROUPS warpgroups have 64 rows each; a step has
   KEYS keys. Barriers that let warpgroups multiply in turn made no difference (H200, 2026-11-17). */
template <int D_, int DV_, int GROUPS_, int KEYS_, int STAGES_>
struct wgmma_shape {
    static constexpr int D = D_, DV = DV_, GROUPS = GROUPS_, KEYS = KEYS_, STAGES = STAGES_;
    static constexpr int PANELS = (D + PANEL - 1) / PANEL, V_PANELS = (DV + PANEL - 1) / PANEL;
    static constexpr int ROWS = 64 * GROUPS, THREADS = 128 * (GROUPS + 1);
    static constexpr int Q_PANEL = ROWS * PANEL_ROW, KEY_PANEL = KEYS * PANEL_ROW;
    static constexpr int Q_BYTES = PANELS * Q_PANEL, K_BYTES = PANELS * KEY_PANEL, V_BYTES = V_PANELS * KEY_PANEL;
    static constexpr int K_AT = Q_BYTES, V_AT = K_AT + STAGES * K_BYTES, BARRIERS_AT = V_AT + STAGES * V_BYTES;
    /* Barriers: q is there, q may be overwritten; of each stage of k, then of v, the same. */
    static constexpr int BARRIERS = 2 + 4 * STAGES, SHARED = BARRIERS_AT + BARRIERS * 8;
    static constexpr int BLOCKS = GROUPS == 1 && SHARED <= 113 << 10 ? 2 : 1; /* of a multiprocessor */
    /* Registers of a thread that computes, and of one that copies. Together they are what the block has from its
       launch on: a warpgroup that asks for more waits for ever. */
    static constexpr int LAUNCHED = (1 << 16) / (THREADS * BLOCKS) / 8 * 8;
    static constexpr int REGISTERS = GROUPS == 3 ? 160 : GROUPS == 2 && D <= 192 ? 240 : 232;
    static constexpr int COPY_REGISTERS = GROUPS > 1   ? LAUNCHED *(GROUPS + 1) - GROUPS *REGISTERS
                                          : BLOCKS > 1 ? 24
                                                       : 40;
    static_assert(COPY_REGISTERS >= 24 && COPY_REGISTERS + REGISTERS * GROUPS <= LAUNCHED * (GROUPS + 1), "");
    static_assert(D % 16 == 0 && DV % 32 == 0 && KEYS % 16 == 0, "");
    static_assert((STAGES & (STAGES - 1)) == 0 && Q_BYTES % PANEL_ALIGN == 0 && KEY_PANEL % PANEL_ALIGN == 0, "");
};

struct attention_maps { /* of panels of KEYS keys, and of ROWS queries */
    CUtensorMap q, k, v;
};
/* The tiles of a call: `tiles` of each of `heads` heads, which are those of q in all sequences. Heads go together, as
   many as have keys that fit into L2; of these the tiles with most keys are the first. */
struct attention_tiles_of {
    int tiles, heads, together;
};
struct attention_item {
    int head, kv_head, first; /* first: of the tile's queries */
    int key, steps;           /* its first key, a multiple of KEYS, and the number of its steps */
    attention_sequence of;
};
template <class S>
__device__ __forceinline__ attention_item attention_item_of(const attention_params &p, const attention_tiles_of &of,
                                                            int at)
{
    const int round = of.together * of.tiles, from = at / round * of.together, in = at % round;
    const int heads = min(of.together, of.heads - from), tile = in / heads, pair = from + in % heads;
    const int sequence = pair / p.heads, n = p.lengths ? between(p.lengths[sequence], 0, p.n) : p.n;
    attention_item i;
    i.of = {sequence, 0, p.m, sequence, 0, n};
    i.head = pair % p.heads, i.kv_head = i.head / p.group;
    i.first = (p.causal ? of.tiles - 1 - tile : tile) * S::ROWS;
    i.key = attention_low(p, i.of, i.first) / S::KEYS * S::KEYS;
    const int high = attention_high(p, i.of, min(i.first + S::ROWS, p.m) - 1);
    i.steps = high > i.key ? (high - i.key + S::KEYS - 1) / S::KEYS : 0;
    return i;
}
/* Tiles of a block: in every other round in the other direction, so that blocks get the same sum of keys. */
__device__ __forceinline__ int attention_item_at(int round)
{
    const int blocks = (int)gridDim.x, block = (int)blockIdx.x;
    return round * blocks + (round % 2 ? blocks - 1 - block : block);
}

/* Step i of all that a block does is in stage i % STAGES, whose barriers end a phase each time: of this parity. */
template <class S>
__device__ __forceinline__ int stage_of(int step)
{
    return step & (S::STAGES - 1);
}
template <class S>
__device__ __forceinline__ uint32_t parity_of(int step)
{
    return (uint32_t)step / S::STAGES & 1;
}
template <class S>
struct wgmma_barriers {
    uint32_t at;
    __device__ __forceinline__ uint32_t q_there() const { return at; }
    __device__ __forceinline__ uint32_t q_free() const { return at + 8; }
    __device__ __forceinline__ uint32_t k_there(int stage) const { return at + 16 + (uint32_t)stage * 16; }
    __device__ __forceinline__ uint32_t k_free(int stage) const { return k_there(stage) + 8; }
    __device__ __forceinline__ uint32_t v_there(int stage) const { return k_there(S::STAGES + stage); }
    __device__ __forceinline__ uint32_t v_free(int stage) const { return v_there(stage) + 8; }
};

/* The thread that copies. Keys come before q, which may still be in use by the tile before. */
template <class S>
__device__ __forceinline__ void wgmma_copies(const attention_params &p, const attention_maps &maps,
                                             const attention_tiles_of &of, uint32_t shared,
                                             const wgmma_barriers<S> &barriers)
{
    int step = 0;
    uint32_t q_parity = 0;
    for (int round = 0, at; (at = attention_item_at(round)) < of.tiles * of.heads; round++) {
        const attention_item item = attention_item_of<S>(p, of, at);
        for (int i = 0; i < item.steps; i++, step++) {
            const int stage = stage_of<S>(step);
            const uint32_t free = parity_of<S>(step) ^ 1, k_to = shared + (uint32_t)(S::K_AT + stage * S::K_BYTES);
            const uint32_t v_to = shared + (uint32_t)(S::V_AT + stage * S::V_BYTES);
            const int key = item.key + i * S::KEYS;
            const uint32_t k = barriers.k_there(stage), v = barriers.v_there(stage);
            bulk_wait(barriers.k_free(stage), free);
            bulk_expect(k, S::K_BYTES);
#pragma unroll
            for (int c = 0; c < S::PANELS; c++)
                panel_copy(k_to + (uint32_t)(c * S::KEY_PANEL), maps.k, c * PANEL, key, item.kv_head, item.of.batch,
                           k);
            if (i == 0) {
                bulk_wait(barriers.q_free(), q_parity ^ 1);
                bulk_expect(barriers.q_there(), S::Q_BYTES);
#pragma unroll
                for (int c = 0; c < S::PANELS; c++)
                    panel_copy(shared + (uint32_t)(c * S::Q_PANEL), maps.q, c * PANEL, item.first, item.head,
                               item.of.batch, barriers.q_there());
                q_parity ^= 1;
            }
            bulk_wait(barriers.v_free(stage), free);
            bulk_expect(v, S::V_BYTES);
#pragma unroll
            for (int c = 0; c < S::V_PANELS; c++)
                panel_copy(v_to + (uint32_t)(c * S::KEY_PANEL), maps.v, c * PANEL, key, item.kv_head, item.of.batch,
                           v);
        }
    }
}

/* A thread's part of its warpgroup's rows: rows g and g + 8 of its warp's 16. As in attention_rows, the maximum may
   be behind by LAZY. */
template <class S>
struct wgmma_rows {
    static constexpr float LAZY = 8;
    float out[S::DV / 2], score[S::KEYS / 2];
    uint32_t weight[S::KEYS / 4];
    float top[2], sum[2], less[2];
};

/* Issues the scores of a stage of keys. */
template <typename T, class S>
__device__ __forceinline__ void wgmma_scores(uint64_t q, uint64_t k, wgmma_rows<S> &r)
{
#pragma unroll
    for (int c = 0; c < S::D / 16; c++) {
        const int panel = c * 16 / PANEL, in = c * 16 % PANEL * 2;
        wgmma_shared<T, S::KEYS>(r.score, wgmma_later(q, panel * S::Q_PANEL + in),
                                 wgmma_later(k, panel * S::KEY_PANEL + in), c > 0);
    }
    wgmma_commit();
}
/* Issues the sums of the values of a stage. */
template <typename T, class S>
__device__ __forceinline__ void wgmma_values(uint64_t v, wgmma_rows<S> &r)
{
#pragma unroll
    for (int c = 0; c < S::KEYS / 16; c++)
        wgmma_held<T, S::DV>(r.out, r.weight + 4 * c, wgmma_later(v, c * 16 * PANEL_ROW));
    wgmma_commit();
}

/* Values of a stage after the first `rows`, which nothing may have been written to, become 0: so are their weights,
   and 0 times what is there might be no number. Every warpgroup does it for itself. */
template <class S>
__device__ __forceinline__ void wgmma_clear(uint32_t v, int rows)
{
    constexpr int PIECES = PANEL_ROW / 16; /* of a row */
    const int thread = (int)opaque(threadIdx.x);
    for (int i = rows * PIECES + thread % 128; i < S::KEYS * PIECES; i += 128)
#pragma unroll
        for (int c = 0; c < S::V_PANELS; c++)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(v + (uint32_t)(c * S::KEY_PANEL + i * 16)),
                         "r"(0)
                         : "memory");
    bulk_written();
    asm volatile("bar.sync %0, 128;" ::"r"(S::GROUPS + 1 + thread / 128) : "memory");
}

/* Hides the scores of keys that a row does not see. */
template <class S>
__device__ __forceinline__ void wgmma_hide(const attention_params &p, const attention_sequence &s, int query, int key,
                                           wgmma_rows<S> &r)
{
    const int first = key + (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = query + half * 8;
        const int low = attention_low(p, s, row) - first, high = attention_high(p, s, row) - first;
#pragma unroll
        for (int j = 0; j < S::KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (j * 8 + e < low || j * 8 + e >= high)
                    r.score[4 * j + 2 * half + e] = -INFINITY;
    }
}

/* The mask of a thread's two rows in a step. */
template <typename T, class S>
struct wgmma_mask {
    attention_mask_shared<T, S::KEYS / 8> shared;
    /* Where the mask of a row begins. Rows that the tile does not have take the last one's. */
    __device__ __forceinline__ static int64_t row(const attention_params &p, const attention_item &item, int query)
    {
        return attention_mask_at(p, item.of.batch, item.head, min((int)opaque((uint32_t)query), p.m - 1));
    }
    __device__ __forceinline__ void load(const attention_params &p, const attention_item &item, int query, int key)
    {
        if (p.mask_shared)
            shared.load(p, row(p, item, query), key);
    }
    /* Scores become those in base 2, with softcap and mask. */
    __device__ __forceinline__ void apply(const attention_params &p, const attention_item &item, int query, int key,
                                          wgmma_rows<S> &r)
    {
        const auto score = [&](int half, int j, int e) -> float & { return r.score[4 * j + 2 * half + e]; };
        attention_scale(p, p.scale, r.score);
        if (p.mask_shared)
            shared.apply(p, row(p, item, query), key, score);
        else if (p.mask_kind)
#pragma unroll
            for (int half = 0; half < 2; half++)
                attention_mask_row<T, S::KEYS / 8>(p, row(p, item, query + half * 8), key,
                                                   [&](int j, int e) -> float & { return score(half, j, e); });
    }
};

/* Scores, times `unit` in base 2, become weights, in float; maxima and sums follow. Returns, for the whole warp,
   whether what has been summed up is to be multiplied by `less`. */
template <class S>
__device__ __forceinline__ bool wgmma_weigh(float unit, wgmma_rows<S> &r)
{
    constexpr int NT = S::KEYS / 8;
    float top[2];
    bool grows = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most[2] = {r.score[2 * half], r.score[2 * half + 1]};
#pragma unroll
        for (int j = 1; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                most[e] = fmaxf(most[e], r.score[4 * j + 2 * half + e]);
        most[0] = fmaxf(most[0], most[1]);
        most[0] = fmaxf(most[0], __shfl_xor_sync(~0u, most[0], 1));
        top[half] = fmaxf(most[0], __shfl_xor_sync(~0u, most[0], 2)) * unit;
        grows |= top[half] - r.top[half] > wgmma_rows<S>::LAZY;
    }
    grows = __any_sync(~0u, grows);
    if (grows) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float next = fmaxf(r.top[half], top[half]);
            r.less[half] = power_of_2(r.top[half] - (next == -INFINITY ? 0 : next));
            r.top[half] = next;
            r.sum[half] *= r.less[half];
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float base = r.top[half] == -INFINITY ? 0 : -r.top[half];
        float sum[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &x = r.score[4 * j + 2 * half + e];
                x = power_of_2(fmaf(x, unit, base));
                sum[e] += x;
            }
        r.sum[half] += sum[0] + sum[1];
    }
    return grows;
}
template <typename T, class S>
__device__ __forceinline__ void wgmma_round(wgmma_rows<S> &r)
{
#pragma unroll
    for (int i = 0; i < S::KEYS / 4; i++) /* pairs of rows g, g + 8, then the same of 8 keys more */
        r.weight[i] = pack_two<T>(r.score[2 * i], r.score[2 * i + 1]);
}

/* Rows go from registers to memory. Of 4 tiles of 8 columns the four lanes that have them exchange pairs, so that
   each has a tile, 16 bytes. */
template <typename T, class S>
__device__ __forceinline__ void wgmma_store(const attention_params &p, const attention_item &item, int query,
                                            wgmma_rows<S> &r)
{
    const int t = (int)threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = r.sum[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const attention_total total = attention_finish(r.top[half], sum, attention_sink<T>(p, item.head));
        const int64_t row = query + half * 8;
        T *const to =
            (T *)p.out + item.of.batch * p.out_stride[0] + item.head * p.out_stride[1] + row * p.out_stride[2];
        if (p.lse && t == 0 && row < p.m)
            p.lse[item.of.batch * p.lse_stride[0] + item.head * p.lse_stride[1] + row * p.lse_stride[2]] = total.lse;
#pragma unroll
        for (int c = 0; c < S::DV / 32; c++) {
            uint32_t pair[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float *v = r.out + 4 * (4 * c + j) + 2 * half;
                pair[j] = pack_two<T>(v[0] * total.inverse, v[1] * total.inverse);
            }
            quad_transpose(pair);
            const int column = c * 32 + t * 8;
            if (row < p.m && column < p.dv)
                *reinterpret_cast<uint4 *>(to + column) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        }
    }
}

/* The first of a thread's rows, in the tile. */
__device__ __forceinline__ int wgmma_row(int thread)
{
    return thread / 32 * 16 + thread % 32 / 4;
}
/* A warpgroup that computes. CHANGED: there is a mask, or a softcap. */
template <typename T, class S, bool CHANGED>
__device__ __forceinline__ void wgmma_computes(const attention_params &p, const attention_tiles_of &of,
                                               uint32_t shared, const wgmma_barriers<S> &barriers)
{
    const int lane = (int)threadIdx.x % 32;
    const uint64_t k = wgmma_operand(shared + S::K_AT, 16), v = wgmma_operand(shared + S::V_AT, S::KEY_PANEL);
    const float unit = CHANGED ? 1 : p.scale;
    int step = 0; /* of k; that of v may be one behind */
    uint32_t q_parity = 0;
    wgmma_rows<S> r;
#pragma unroll
    for (int i = 0; i < S::KEYS / 2; i++)
        r.score[i] = 0;
    auto wait_k = [&]() { bulk_wait(barriers.k_there(stage_of<S>(step)), parity_of<S>(step)); };
    auto wait_v = [&](int i) { bulk_wait(barriers.v_there(stage_of<S>(i)), parity_of<S>(i)); };
    auto done = [&](uint32_t barrier) {
        if (lane == 0)
            bulk_arrive(barrier);
    };
    for (int round = 0, at; (at = attention_item_at(round)) < of.tiles * of.heads; round++) {
        const attention_item item = attention_item_of<S>(p, of, at);
        /* Computed for each tile, as the place of its result is: what lasts longer takes registers. */
        const int thread = (int)opaque(threadIdx.x);
        const uint64_t q = wgmma_operand(shared + (uint32_t)(thread / 128 * 64 * PANEL_ROW), 16);
        /* The first of a thread's rows; what all rows of its warp see. */
        const int row = item.first + wgmma_row(thread), first = row - lane / 4;
        const int inner_low = attention_low(p, item.of, first + 15), inner_high = attention_high(p, item.of, first);
        int key = item.key;
        wgmma_mask<T, S> mask; /* of the step whose scores are computed, if CHANGED */
        auto hide = [&]() {
            if constexpr (CHANGED)
                mask.apply(p, item, row, key, r);
            if (key < inner_low || key + S::KEYS > inner_high)
                wgmma_hide<S>(p, item.of, row, key, r);
        };
        r.top[0] = r.top[1] = -INFINITY, r.sum[0] = r.sum[1] = 0;
#pragma unroll
        for (int i = 0; i < S::DV / 2; i++)
            r.out[i] = 0;
        if (item.steps > 0) {
            bulk_wait(barriers.q_there(), q_parity);
            q_parity ^= 1;
            wait_k();
            wgmma_fence();
            wgmma_scores<T, S>(q, wgmma_later(k, stage_of<S>(step) * S::K_BYTES), r);
            if constexpr (CHANGED)
                mask.load(p, item, row, key);
            wgmma_wait<0>(r.score);
            done(barriers.k_free(stage_of<S>(step++)));
            hide();
            wgmma_weigh<S>(unit, r);
            wgmma_round<T, S>(r);
            if (item.steps > 1)
                wait_k();
#pragma unroll 1
            for (int left = item.steps; --left > 0;) {
                key += S::KEYS;
                wgmma_fence();
                wgmma_scores<T, S>(q, wgmma_later(k, stage_of<S>(step) * S::K_BYTES), r);
                wait_v(step - 1);
                wgmma_fence();
                wgmma_values<T, S>(wgmma_later(v, stage_of<S>(step - 1) * S::V_BYTES), r);
                if constexpr (CHANGED)
                    mask.load(p, item, row, key);
                wgmma_wait<1>(r.score);
                done(barriers.k_free(stage_of<S>(step++)));
                hide();
                const bool grows = wgmma_weigh<S>(unit, r);
                wgmma_here(r.score), wgmma_here(r.sum);
                if (left > 1) /* a branch, too, which no instruction passes: the weights come before the wait */
                    wait_k();
                wgmma_wait<0>(r.out);
                done(barriers.v_free(stage_of<S>(step - 2)));
                if (grows)
#pragma unroll
                    for (int j = 0; j < S::DV / 2; j++)
                        r.out[j] *= r.less[j / 2 % 2];
                wgmma_round<T, S>(r);
            }
            done(barriers.q_free());
            wait_v(step - 1);
            if (p.lengths && key + S::KEYS > item.of.n)
                wgmma_clear<S>(shared + (uint32_t)(S::V_AT + stage_of<S>(step - 1) * S::V_BYTES), item.of.n - key);
            wgmma_fence();
            wgmma_values<T, S>(wgmma_later(v, stage_of<S>(step - 1) * S::V_BYTES), r);
            wgmma_wait<0>(r.out);
            done(barriers.v_free(stage_of<S>(step - 1)));
        }
        const attention_item to = attention_item_of<S>(p, of, (int)opaque((uint32_t)at));
        wgmma_store<T, S>(p, to, to.first + wgmma_row((int)opaque(threadIdx.x)), r);
    }
}

template <typename T, class S, bool CHANGED>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
    attention_wgmma(const __grid_constant__ attention_params p, const __grid_constant__ attention_maps maps,
                    const attention_tiles_of of)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(PANEL_ALIGN) char panels[];
    const uint32_t shared = shared_address(panels);
    const wgmma_barriers<S> barriers = {shared + S::BARRIERS_AT};
    pdl_launch_next();
    if (threadIdx.x == 0) {
        panel_prefetch_map(maps.q), panel_prefetch_map(maps.k), panel_prefetch_map(maps.v);
        for (int i = 0; i < S::BARRIERS / 2; i++) {
            bulk_barrier(barriers.at + (uint32_t)i * 16);
            bulk_barrier(barriers.at + (uint32_t)i * 16 + 8, S::GROUPS * 4); /* a lane of each warp that computes */
        }
        bulk_ready();
    }
    __syncthreads();
    pdl_wait();
    if (threadIdx.x / 128 == S::GROUPS) {
        registers_down<S::COPY_REGISTERS>();
        if (threadIdx.x % 128 == 0)
            wgmma_copies<S>(p, maps, of, shared, barriers);
    } else {
        registers_up<S::REGISTERS>();
        wgmma_computes<T, S, CHANGED>(p, of, shared, barriers);
    }
#endif
}

#endif
