/* gemm_swapped.cuh - products of 17 tokens and more on Hopper's tensor cores, with the weights as the first operand
   (sm_90a alone).

   A block computes a tile of TOKENS tokens and ROWS rows, or a part of k of it: the blocks of a cluster share k. A
   thread copies boxes of x and of the weights, as they are stored, into the stages of a ring. Each warpgroup
   multiplies 64 rows of the weights with all tokens: the first operand of a product has 64 rows, the second one has
   as many as there are tokens.

   Quantised weights of 16-bit x are unpacked into registers, from which a warpgroup may take the first operand: lane
   4 g + t reads 16 bytes of rows g and g + 8, as the other three lanes of its rows do, and takes out the columns that
   it has to have. The products of a stage are of one group, and are multiplied by the group's scale when they are
   added to those before. All other operands are read where the copies put them. The sums of quantised x are integers
   to the end. */
#ifndef ADZE_CUDA_GEMM_SWAPPED_CUH
#define ADZE_CUDA_GEMM_SWAPPED_CUH

#include "gemm_quantised_tile.cuh"
#include "wgmma.cuh"

/* BYTES: x is quantised, as the weights are. */
template <int TOKENS_, int GROUPS_, weight_format FORMAT_, bool TABLED_, bool BYTES_ = false>
struct swapped_shape {
    static constexpr int TOKENS = TOKENS_, GROUPS = GROUPS_; /* GROUPS: warpgroups that compute */
    static constexpr weight_format FORMAT = FORMAT_;
    static constexpr bool TABLED = TABLED_; /* with scales of groups, or with zeros */
    static constexpr bool BYTES = BYTES_, UNPACKS = !BYTES && FORMAT != OF_X;
    static constexpr int STRIP = 64, STRIPS = GROUPS, ROWS = STRIPS * STRIP, WORKERS = GROUPS * 128,
                         THREADS = WORKERS + 128;
    static constexpr int REGISTERS = GROUPS == 2 ? 240 : 112, COPY_REGISTERS = 24;
    static constexpr int HELD = GROUPS == 4 && TOKENS == 64 && TABLED ? 1 : 2; /* unpacked panels, by registers */
    static constexpr int DEPTH = 2 * PANEL; /* columns of a stage, in as many panels of each operand */
    static constexpr int X_PANELS = BYTES ? 1 : 2, W_PANELS = FORMAT == OF_X ? 2 : 1;
    static constexpr int W_ROW = FORMAT == OF_U4 ? PANEL_ROW / 2 : PANEL_ROW; /* bytes of a row in a panel */
    static constexpr int W_COLUMNS = FORMAT == OF_X ? PANEL : W_ROW; /* of a panel, as the weights' map counts them */
    static constexpr int X_PANEL = TOKENS * PANEL_ROW, X_BYTES = X_PANELS * X_PANEL;
    static constexpr int W_PANEL = ROWS * W_ROW, STAGE_BYTES = X_BYTES + W_PANELS * W_PANEL;
    static constexpr int STAGES = 208 * 1024 / STAGE_BYTES < 8 ? 208 * 1024 / STAGE_BYTES : 8;
    static constexpr int BARRIERS_AT = STAGES * STAGE_BYTES, SHARED = BARRIERS_AT + STAGES * 16;
    static constexpr int PITCH = ROWS + 4; /* sums of a token: lanes have banks of their own */
    static_assert(TOKENS * PITCH * 4 <= BARRIERS_AT, "the sums take the place of the stages");
};
struct swapped_maps {
    CUtensorMap x, w[GEMM_PARTS];
};

/* Columns 2 t and 2 t + 1 of 8 weights: `low` and `high` are the two words of i8 and f8e4m3, u4 has one. */
template <typename T, weight_format F>
__device__ __forceinline__ uint32_t weight_pair(uint32_t low, uint32_t high, int t, uint32_t addend, uint32_t &nan)
{
    constexpr bool BF16 = std::is_same<T, bf16>::value;
    constexpr float LARGER = BF16 ? 0x1p127f : 0x1p15f; /* as in unit_pairs */
    if constexpr (F == OF_U4) {
        const uint32_t factor = (both<T>(LARGER) & 0xffffu) | (both<T>(LARGER / 16) & 0xffff0000u);
        return pair_fma<T>(__byte_perm(low, 0, t * 0x101) & 0x00f0000fu, factor, addend);
    } else if constexpr (F == OF_I8) {
        const uint32_t v = __byte_perm(low, high, t * 0x202 + 0x100);
        return pair_fma<T>(and_xor<0x00ff00ffu, 0x00800080u>(v), both<T>(LARGER), addend);
    } else { /* as in f8_pairs */
        constexpr int SHIFT = BF16 ? 4 : 1;
        const uint32_t v = __byte_perm(low, high, t * 0x2020 + 0x1000);
        nan |= ((v & 0x7f007f00u) + 0x01000100u) & 0x80008000u;
        const uint32_t magnitude = v >> SHIFT & (0x7f00u >> SHIFT) * 0x10001u;
        return pair_mul<T>(magnitude | (v & 0x80008000u), both<T>(BF16 ? 0x1p120f : 0x1p8f));
    }
}

/* The thread that copies. Weights do not depend on earlier kernels where the call says so. */
template <class S>
__device__ __forceinline__ void swapped_copies(const gemm_params &p, const swapped_maps &maps,
                                               const quantised_tile_place &place, int strip, int first, int steps,
                                               uint32_t shared)
{
    const gemm_rows rows = place.rows;
    auto there = [&](int stage) { return shared + (uint32_t)(S::BARRIERS_AT + stage * 16); };
    auto weights = [&](int step, int stage) {
        bulk_expect(there(stage), (uint32_t)(S::X_BYTES + S::W_PANELS * S::STRIPS * S::W_ROW * strip));
#pragma unroll
        for (int i = 0; i < S::W_PANELS * S::STRIPS; i++) {
            const int panel = i / S::STRIPS, of = i % S::STRIPS, half = of / (S::STRIPS / 2);
            const int column = ((first + step) * S::W_PANELS + panel) * S::W_COLUMNS;
            panel_copy(shared + (uint32_t)(stage * S::STAGE_BYTES + S::X_BYTES + panel * S::W_PANEL +
                                           of * S::STRIP * S::W_ROW),
                       maps.w[p.glu ? half : rows.part], column,
                       rows.at + (p.glu ? of - half * (S::STRIPS / 2) : of) * strip, 0, 0, there(stage));
        }
    };
    auto x = [&](int step, int stage) {
#pragma unroll
        for (int i = 0; i < S::X_PANELS; i++)
            panel_copy(shared + (uint32_t)(stage * S::STAGE_BYTES + i * S::X_PANEL), maps.x,
                       (first + step) * S::DEPTH + i * PANEL, (int)place.token, 0, 0, there(stage));
    };
    const int early = steps < S::STAGES ? steps : S::STAGES;
    if (!p.const_weights)
        pdl_wait();
    for (int i = 0; i < early; i++)
        weights(i, i);
    if (p.const_weights)
        pdl_wait();
    for (int i = 0; i < early; i++)
        x(i, i);
    int stage = 0;
    uint32_t parity = 0;
    for (int step = S::STAGES; step < steps; step++) {
        bulk_wait(there(stage) + 8, parity);
        weights(step, stage);
        x(step, stage);
        if (++stage == S::STAGES)
            stage = 0, parity ^= 1;
    }
}

/* The sums of a warpgroup whose operands are both in shared memory. A stage is free when its products are there,
   which is seen after those of the next one were begun. */
template <typename T, class S, typename SUM>
__device__ __forceinline__ void swapped_multiplies(int steps, uint32_t shared, SUM (&sum)[S::TOKENS / 2])
{
    const uint32_t strip = threadIdx.x / 128 * (uint32_t)(S::STRIP * PANEL_ROW);
    const uint64_t x = wgmma_operand(shared, 16), w = wgmma_operand(shared + S::X_BYTES + strip, 16);
    int stage = 0, last = -1;
    uint32_t parity = 0;
    auto release = [&]() {
        if (last >= 0 && threadIdx.x % 32 == 0)
            bulk_arrive(shared + (uint32_t)(S::BARRIERS_AT + last * 16 + 8));
    };
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        bulk_wait(shared + (uint32_t)(S::BARRIERS_AT + stage * 16), parity);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < S::X_PANELS * 4; c++) {
            const int at = stage * S::STAGE_BYTES + c % 4 * 32;
            const uint64_t a = wgmma_later(w, at + c / 4 * S::W_PANEL), b = wgmma_later(x, at + c / 4 * S::X_PANEL);
            if constexpr (S::BYTES)
                wgmma_bytes<S::TOKENS>(sum, a, b, step + c);
            else
                wgmma_shared<T, S::TOKENS>(sum, a, b, step + c);
        }
        wgmma_commit();
        wgmma_wait<1>();
        release();
        last = stage;
        if (++stage == S::STAGES)
            stage = 0, parity ^= 1;
    }
    wgmma_wait_all(sum);
}

/* The sums of a warpgroup that unpacks its rows of the weights. While the tensor cores have one panel of a stage, the
   next one is unpacked, where `held` has two. `lost`: whether row g, and g + 8, has a NaN of f8e4m3. */
template <typename T, class S>
__device__ __forceinline__ void swapped_unpacks(const gemm_params &p, const quantised_tile_place &place, int strip,
                                                int first, int steps, const char *panels, uint32_t shared,
                                                float (&sum)[S::TOKENS / 2], bool (&lost)[2])
{
    constexpr weight_format F = S::FORMAT;
    constexpr int SUMS = S::TOKENS / 2, LOADS = F == OF_U4 ? 2 : 4; /* of 16 bytes of a row, in a panel of x */
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int own = warp / 4, in_strip = warp % 4 * 16 + g, half_of = p.glu ? own / (S::STRIPS / 2) : 0;
    const int part = p.glu ? half_of : place.rows.part;
    const int in_part = (own - half_of * (S::STRIPS / 2)) * strip + in_strip, last = place.rows.count - 1;
    const int row[2] = {place.rows.at + min(in_part, last), place.rows.at + min(in_part + 8, last)};
    const uint64_t x = wgmma_operand(shared, 16);
    const char *const w = panels + S::X_BYTES + (own * S::STRIP + in_strip) * S::W_ROW;
    /* A row's pieces are exchanged by its number: of 128 bytes 8 by 8, of 64 bytes in pairs of rows. */
    const int order = F == OF_U4 ? g / 2 : g;
    constexpr float MIDDLE = F == OF_U4 ? 8 : 128;
    float products[S::TABLED ? SUMS : 1];
    uint32_t nan[2] = {0, 0}, held[S::HELD][4][4],
             addend[2] = {weight_addend<T, F>(MIDDLE), weight_addend<T, F>(MIDDLE)};
    float scale[2] = {1, 1}, next_scale[2] = {1, 1}, next_zero[2] = {MIDDLE, MIDDLE};
    const int of_group = p.group ? p.group / S::DEPTH : 1 << 30; /* stages */
    auto load_scales = [&](int step) {
        if constexpr (S::TABLED) {
            const int group = min(first + step, ((int)p.k - 1) / S::DEPTH) / of_group;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                next_scale[r] = p.group ? gemm_scale(p, part, row[r], group) : 1;
                if constexpr (F == OF_U4)
                    next_zero[r] = gemm_zero(p, part, row[r], group);
            }
        }
    };
    auto unpack = [&](int stage, int half) {
        uint32_t(&to)[4][4] = held[half % S::HELD];
        const char *const from = w + stage * S::STAGE_BYTES;
        uint4 packed[LOADS * 2];
#pragma unroll
        for (int i = 0; i < LOADS * 2; i++)
            packed[i] = load_shared(from + i % 2 * 8 * S::W_ROW + ((half * LOADS + i / 2) ^ order) * 16);
#pragma unroll
        for (int i = 0; i < LOADS * 2; i++) {
            const int r = i % 2;
            const uint4 v = packed[i];
            if constexpr (F == OF_U4) {
                to[i / 2 * 2][r] = weight_pair<T, F>(v.x, 0, t, addend[r], nan[r]);
                to[i / 2 * 2][r + 2] = weight_pair<T, F>(v.y, 0, t, addend[r], nan[r]);
                to[i / 2 * 2 + 1][r] = weight_pair<T, F>(v.z, 0, t, addend[r], nan[r]);
                to[i / 2 * 2 + 1][r + 2] = weight_pair<T, F>(v.w, 0, t, addend[r], nan[r]);
            } else {
                to[i / 2][r] = weight_pair<T, F>(v.x, v.y, t, addend[r], nan[r]);
                to[i / 2][r + 2] = weight_pair<T, F>(v.z, v.w, t, addend[r], nan[r]);
            }
        }
    };
    auto multiply = [&](int step, int stage, int half) {
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const uint64_t b = wgmma_later(x, stage * S::STAGE_BYTES + half * S::X_PANEL + c * 32);
            if constexpr (S::TABLED)
                wgmma_weights<T, S::TOKENS>(products, held[half % S::HELD][c], b, half + c);
            else
                wgmma_weights<T, S::TOKENS>(sum, held[half % S::HELD][c], b, step + half + c);
        }
        wgmma_commit();
    };
    auto there = [&](int stage) { return shared + (uint32_t)(S::BARRIERS_AT + stage * 16); };
    auto release = [&](int stage) {
        if (lane == 0)
            bulk_arrive(there(stage) + 8);
    };
    auto begin = [&](int stage, uint32_t parity) { /* the stage's first panel */
                                                   if constexpr (S::TABLED && F == OF_U4)
                                                       addend[0] = weight_addend<T, F>(next_zero[0]),
                                                       addend[1] = weight_addend<T, F>(next_zero[1]);
                                                   bulk_wait(there(stage), parity);
                                                   unpack(stage, 0);
    };
    if (!p.const_weights)
        pdl_wait();
    load_scales(0);
    if (steps > 0)
        begin(0, 0);
    int stage = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        scale[0] = next_scale[0], scale[1] = next_scale[1];
        load_scales(step + 1);
        const int last_stage = stage ? stage - 1 : S::STAGES - 1;
        multiply(step, stage, 0);
        wgmma_wait<S::HELD - 1>();
        if (!S::TABLED && step > 0) /* the products of the stage before are there */
            release(last_stage);
        unpack(stage, 1);
        multiply(step, stage, 1);
        wgmma_wait<S::HELD - 1>();
        const int now = stage;
        if (++stage == S::STAGES)
            stage = 0, parity ^= 1;
        if (S::HELD == 2 && step + 1 < steps)
            begin(stage, parity);
        if constexpr (S::TABLED) {
            wgmma_wait_all(products);
            release(now);
#pragma unroll
            for (int i = 0; i < SUMS; i++)
                sum[i] = fmaf(products[i], scale[i % 4 / 2], sum[i]);
        }
        if (S::HELD == 1 && step + 1 < steps)
            begin(stage, parity);
    }
    if constexpr (!S::TABLED)
        wgmma_wait_all(sum);
    if constexpr (F == OF_F8) {
#pragma unroll
        for (int r = 0; r < 2; r++)
            lost[r] = __ballot_sync(0xffffffffu, nan[r] != 0) >> (g * 4) & 0xf;
    }
}

/* A warpgroup that computes: the sums of its rows go to shared memory. */
template <typename T, class S, typename SUM>
__device__ __forceinline__ void swapped_computes(const gemm_params &p, const quantised_tile_place &place, int strip,
                                                 int first, int steps, char *panels, uint32_t shared)
{
    constexpr int SUMS = S::TOKENS / 2;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    SUM sum[SUMS];
    bool lost[2] = {};
#pragma unroll
    for (int i = 0; i < SUMS; i++)
        sum[i] = 0;
    if constexpr (S::UNPACKS)
        swapped_unpacks<T, S>(p, place, strip, first, steps, panels, shared, sum, lost);
    else
        swapped_multiplies<T, S, SUM>(steps, shared, sum);
    __syncthreads(); /* every warp has read the last stages, whose place the sums take */
    SUM *const sums = (SUM *)panels + warp / 4 * S::STRIP + warp % 4 * 16 + g;
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        const int r = i % 4 / 2, token = i / 4 * 8 + t * 2 + i % 2;
        SUM v = sum[i];
        if constexpr (S::UNPACKS)
            v = lost[r] ? __uint_as_float(0x7fffffffu) : v / weight_unit<T, S::FORMAT>;
        sums[token * S::PITCH + r * 8] = v;
    }
}

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    gemm_swapped(const __grid_constant__ gemm_params p, const __grid_constant__ swapped_maps maps, int token_tiles,
                 int strip)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    typedef typename std::conditional<S::BYTES, int, float>::type SUM;
    extern __shared__ __align__(PANEL_ALIGN) char panels[];
    const uint32_t shared = shared_address(panels);
    const int parts = cluster_size(), rank = cluster_rank();
    const quantised_tile_place place = quantised_tile_place_of<S>(p, blockIdx.x, token_tiles, strip);
    const int all_steps = ((int)p.k + S::DEPTH - 1) / S::DEPTH;
    const int first = (int)((int64_t)all_steps * rank / parts);
    const int steps = (int)((int64_t)all_steps * (rank + 1) / parts) - first;
    pdl_launch_next();
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; i++) {
            const uint32_t there = shared + (uint32_t)(S::BARRIERS_AT + i * 16);
            bulk_barrier(there);
            bulk_barrier(there + 8, S::GROUPS * 4); /* a lane of each warp that computes */
        }
        bulk_ready();
    }
    __syncthreads();
    if (threadIdx.x / 128 == S::GROUPS) {
        registers_down<S::COPY_REGISTERS>();
        if (threadIdx.x % 128 == 0)
            swapped_copies<S>(p, maps, place, strip, first, steps, shared);
        return; /* barriers do not wait for threads that have exited */
    }
    registers_up<S::REGISTERS>();
    swapped_computes<T, S, SUM>(p, place, strip, first, steps, panels, shared);
    pdl_wait(); /* for what the sums are added to */
    if constexpr (!S::BYTES)
        tile_finish<T, S>(p, (SUM *)panels, token_tiles, strip);
    else if (p.out_f32)
        tile_finish<float, S>(p, (SUM *)panels, token_tiles, strip);
    else if (p.out_bf16)
        tile_finish<bf16, S>(p, (SUM *)panels, token_tiles, strip);
    else
        tile_finish<f16, S>(p, (SUM *)panels, token_tiles, strip);
#endif
}

/* Rows of a strip, in how many parts the blocks of a cluster take k, and how many cycles that takes. */
struct swapped_plan {
    int strip, parts;
    double time;
};
/* The plan that takes least time. In a round a multiprocessor has one block, whose stages take as long as their
   copies or their products do. Of L2 an H200's multiprocessors get about 2500 bytes in a cycle together, one of them
   at most 32 or so; the other numbers are from a sweep on it, too (2026-11-18). */
template <class S>
static swapped_plan swapped_plan_of(const cuda_call &s, const gemm_params &p)
{
    const int64_t tokens = ceil_div(p.m, S::TOKENS), steps = ceil_div(p.k, S::DEPTH);
    const double products = !S::UNPACKS      ? S::STRIPS * (40 + S::TOKENS * 4)
                            : S::STRIPS == 2 ? (S::TABLED ? 1500 : 1000) + S::TOKENS * 10
                                             : (S::TABLED ? 1950 + S::TOKENS * 20 : 1700 + S::TOKENS * 17);
    swapped_plan best = {};
    best.time = 1e30;
    for (int strip = S::STRIP; strip >= S::STRIP / 2; strip -= 8) {
        const int64_t tiles = tokens * gemm_tiles(p, strip * (p.glu ? S::STRIPS / 2 : S::STRIPS));
        const double bytes = S::X_BYTES + S::W_PANELS * S::STRIPS * S::W_ROW * strip;
        for (int parts = 1; parts <= std::min<int64_t>(8, steps); parts++) {
            const int64_t at_once = parts > 1 ? adze_cuda_clustered(s.device, parts) : s.gpu.sm_count;
            const double rate = std::min(32.0, 2500.0 / (double)(std::min(tiles, at_once) * parts));
            const double sums = parts > 1 ? 1500 + S::TOKENS * S::ROWS * 4 / 22.0 : 0;
            const double round = 4000 + (double)ceil_div(steps, parts) * std::max(bytes / rate, products) + sums;
            const double time = (double)ceil_div(tiles, at_once) * round;
            if (time < best.time)
                best = {strip, parts, time};
        }
    }
    return best;
}

#endif
