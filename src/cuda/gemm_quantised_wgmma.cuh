/* gemm_quantised_wgmma.cuh - products of many tokens with quantised weights on Hopper's tensor cores (sm_90a alone).

   A block computes a tile of TOKENS tokens and ROWS rows, or a part of k of it: the blocks of a cluster share k. A
   thread copies boxes of x and of the weights, which stay packed, into the stages of a ring. Each warpgroup
   multiplies 64 rows with all tokens. The weights are the first operand, which a warpgroup may have in registers:
   lane 4 g + t reads 16 bytes of rows g and g + 8, as the other three lanes of its rows do, and takes out the columns
   that it has to have. So x stays as it is, and the second operand is read where the copies put it. The products of a
   stage are of one group, and are multiplied by the group's scale when they are added to those before. */
#ifndef ADZE_CUDA_GEMM_QUANTISED_WGMMA_CUH
#define ADZE_CUDA_GEMM_QUANTISED_WGMMA_CUH

#include "gemm_quantised_tile.cuh"
#include "wgmma.cuh"

template <int TOKENS_, int GROUPS_, weight_format FORMAT_, bool TABLED_>
struct quantised_wgmma_shape {
    static constexpr int TOKENS = TOKENS_, GROUPS = GROUPS_; /* GROUPS: warpgroups that compute */
    static constexpr weight_format FORMAT = FORMAT_;
    static constexpr bool TABLED = TABLED_; /* with scales of groups, or with zeros */
    static constexpr int STRIP = 64, STRIPS = GROUPS, ROWS = STRIPS * STRIP, WORKERS = GROUPS * 128,
                         THREADS = WORKERS + 128;
    static constexpr int REGISTERS = GROUPS == 2 ? 240 : 112, COPY_REGISTERS = 24;
    static constexpr int HELD = GROUPS == 2 ? 2 : 1; /* panels of weights that a thread has in registers */
    static constexpr int DEPTH = 2 * PANEL, W_ROW = FORMAT == OF_U4 ? DEPTH / 2 : DEPTH; /* columns; their bytes */
    static constexpr int X_PANEL = TOKENS * PANEL_ROW, X_BYTES = 2 * X_PANEL, STAGE_BYTES = X_BYTES + ROWS * W_ROW;
    static constexpr int STAGES = 208 * 1024 / STAGE_BYTES < 8 ? 208 * 1024 / STAGE_BYTES : 8;
    static constexpr int BARRIERS_AT = STAGES * STAGE_BYTES, SHARED = BARRIERS_AT + STAGES * 16;
    static constexpr int PITCH = ROWS + 4; /* floats of a token among the sums: lanes have banks of their own */
    static_assert(TOKENS * PITCH * 4 <= BARRIERS_AT, "the sums take the place of the stages");
};
struct quantised_wgmma_maps {
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
__device__ __forceinline__ void quantised_wgmma_copies(const gemm_params &p, const quantised_wgmma_maps &maps,
                                                       const quantised_tile_place &place, int first, int steps,
                                                       uint32_t shared)
{
    constexpr int HALF = S::ROWS / 2;
    const gemm_rows rows = place.rows;
    const CUtensorMap &low = maps.w[rows.part], &high = maps.w[p.glu ? 1 : rows.part];
    auto there = [&](int stage) { return shared + (uint32_t)(S::BARRIERS_AT + stage * 16); };
    auto weights = [&](int step, int stage) {
        const uint32_t to = shared + (uint32_t)(stage * S::STAGE_BYTES + S::X_BYTES);
        const int column = (first + step) * S::W_ROW;
        bulk_expect(there(stage), S::STAGE_BYTES);
        panel_copy(to, low, column, rows.at, 0, 0, there(stage));
        panel_copy(to + HALF * S::W_ROW, high, column, p.glu ? rows.at : rows.at + HALF, 0, 0, there(stage));
    };
    auto x = [&](int step, int stage) {
        const uint32_t to = shared + (uint32_t)(stage * S::STAGE_BYTES);
        const int column = (first + step) * S::DEPTH;
        panel_copy(to, maps.x, column, (int)place.token, 0, 0, there(stage));
        panel_copy(to + S::X_PANEL, maps.x, column + PANEL, (int)place.token, 0, 0, there(stage));
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

/* A warpgroup that computes: the sums of its rows, which come after those of `strip` others, go to shared memory. */
template <typename T, class S>
__device__ __forceinline__ void quantised_wgmma_computes(const gemm_params &p, const quantised_tile_place &place,
                                                         int first, int steps, char *panels, uint32_t shared)
{
    constexpr weight_format F = S::FORMAT;
    constexpr int SUMS = S::TOKENS / 2, LOADS = F == OF_U4 ? 2 : 4; /* of 16 bytes of a row, in a panel of x */
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int strip = warp / 4, of_tile = strip * S::STRIP + warp % 4 * 16 + g;
    const int part = p.glu ? strip / (S::GROUPS / 2) : place.rows.part;
    const int in_part = p.glu ? of_tile % (S::ROWS / 2) : of_tile;
    const int last = place.rows.count - 1;
    const int row[2] = {place.rows.at + min(in_part, last), place.rows.at + min(in_part + 8, last)};
    const uint64_t x = wgmma_operand(shared, 16);
    const char *const w = panels + S::X_BYTES + of_tile * S::W_ROW;
    /* A row's pieces are exchanged by its number: of 128 bytes 8 by 8, of 64 bytes in pairs of rows. */
    const int order = F == OF_U4 ? g / 2 : g;
    const uint32_t at_zero = F == OF_U4 ? weight_addend<T, F>(8) : weight_addend<T, F>(128);
    float sum[SUMS], products[S::TABLED ? SUMS : 1];
#pragma unroll
    for (int i = 0; i < SUMS; i++)
        sum[i] = 0;
    uint32_t nan[2] = {0, 0};
    float scale[2] = {1, 1}, zero[2] = {8, 8};
    const int of_group = p.group ? p.group / S::DEPTH : 1 << 30; /* stages */
    auto load_scales = [&](int step) {
        if constexpr (S::TABLED) {
            const int group = min(first + step, ((int)p.k - 1) / S::DEPTH) / of_group;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                scale[r] = p.group ? gemm_scale(p, part, row[r], group) : 1;
                if constexpr (F == OF_U4)
                    zero[r] = gemm_zero(p, part, row[r], group);
            }
        }
    };
    auto wait = [&]() {
        if constexpr (S::TABLED)
            wgmma_wait<0>(products);
        else
            wgmma_wait<0>(sum);
    };
    if (!p.const_weights)
        pdl_wait();
    load_scales(0);
    int stage = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        const uint32_t there = shared + (uint32_t)(S::BARRIERS_AT + stage * 16);
        const char *const from = w + stage * S::STAGE_BYTES;
        const float by[2] = {scale[0], scale[1]};
        uint32_t addend[2] = {at_zero, at_zero};
        if constexpr (S::TABLED && F == OF_U4)
            addend[0] = weight_addend<T, F>(zero[0]), addend[1] = weight_addend<T, F>(zero[1]);
        load_scales(step + 1);
        bulk_wait(there, parity);
        uint32_t a[S::HELD][4][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t(&held)[4][4] = a[half % S::HELD];
            if (half && S::HELD == 1)
                wait();
            uint4 packed[LOADS * 2];
#pragma unroll
            for (int i = 0; i < LOADS * 2; i++)
                packed[i] = load_shared(from + i % 2 * 8 * S::W_ROW + ((half * LOADS + i / 2) ^ order) * 16);
#pragma unroll
            for (int i = 0; i < LOADS * 2; i++) {
                const int r = i % 2;
                const uint4 v = packed[i];
                if constexpr (F == OF_U4) {
                    held[i / 2 * 2][r] = weight_pair<T, F>(v.x, 0, t, addend[r], nan[r]);
                    held[i / 2 * 2][r + 2] = weight_pair<T, F>(v.y, 0, t, addend[r], nan[r]);
                    held[i / 2 * 2 + 1][r] = weight_pair<T, F>(v.z, 0, t, addend[r], nan[r]);
                    held[i / 2 * 2 + 1][r + 2] = weight_pair<T, F>(v.w, 0, t, addend[r], nan[r]);
                } else {
                    held[i / 2][r] = weight_pair<T, F>(v.x, v.y, t, addend[r], nan[r]);
                    held[i / 2][r + 2] = weight_pair<T, F>(v.z, v.w, t, addend[r], nan[r]);
                }
            }
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const uint64_t b = wgmma_later(x, stage * S::STAGE_BYTES + half * S::X_PANEL + c * 32);
                if constexpr (S::TABLED)
                    wgmma_weights<T, S::TOKENS>(products, held[c], b, half + c);
                else
                    wgmma_weights<T, S::TOKENS>(sum, held[c], b, step + half + c);
            }
            wgmma_commit();
        }
        wait();
        if (lane == 0)
            bulk_arrive(there + 8);
        if constexpr (S::TABLED) {
#pragma unroll
            for (int i = 0; i < SUMS; i++)
                sum[i] = fmaf(products[i], by[i % 4 / 2], sum[i]);
        }
        if (++stage == S::STAGES)
            stage = 0, parity ^= 1;
    }
    /* Every warp has read the last stages: the sums take their place. */
    __syncthreads();
    float *const sums = (float *)panels + of_tile;
    bool lost[2] = {};
    if constexpr (F == OF_F8) {
#pragma unroll
        for (int r = 0; r < 2; r++)
            lost[r] = __ballot_sync(0xffffffffu, nan[r] != 0) >> (g * 4) & 0xf;
    }
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        const int r = i % 4 / 2, token = i / 4 * 8 + t * 2 + i % 2;
        const float v = sum[i] / weight_unit<T, F>;
        sums[token * S::PITCH + r * 8] = lost[r] ? __uint_as_float(0x7fffffffu) : v;
    }
}

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    gemm_quantised_wgmma(const __grid_constant__ gemm_params p, const __grid_constant__ quantised_wgmma_maps maps,
                         int token_tiles)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(PANEL_ALIGN) char panels[];
    const uint32_t shared = shared_address(panels);
    const int parts = cluster_size(), rank = cluster_rank();
    const quantised_tile_place place = quantised_tile_place_of<S>(p, blockIdx.x, token_tiles, S::STRIP);
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
            quantised_wgmma_copies<S>(p, maps, place, first, steps, shared);
        return; /* barriers do not wait for threads that have exited */
    }
    registers_up<S::REGISTERS>();
    quantised_wgmma_computes<T, S>(p, place, first, steps, panels, shared);
    pdl_wait(); /* for what the sums are added to */
    quantised_tile_finish<T, S>(p, (float *)panels, token_tiles, S::STRIP);
#endif
}

/* In how many parts the blocks of a cluster take k: as in quantised_tile_plan_of, whose times these are, but that
   here it is copies alone that take time. */
template <class S>
static int quantised_wgmma_parts(const cuda_call &s, const gemm_params &p, double &least)
{
    const int64_t tiles = ceil_div(p.m, S::TOKENS) * gemm_tiles(p, p.glu ? S::ROWS / 2 : S::ROWS);
    const int64_t steps = ceil_div(p.k, S::DEPTH), sm_count = s.gpu.sm_count;
    const int64_t clustered = sm_count < 16 ? sm_count : sm_count / 16 * 16;
    int best = 1;
    least = 1e30;
    for (int parts = 1; parts <= std::min<int64_t>(8, steps); parts++) {
        const double work = (double)ceil_div(steps, parts) * S::STAGE_BYTES / 22;
        const double sums = parts > 1 ? 1000 + S::TOKENS * S::ROWS * 4 / 22.0 : 0;
        const double time = (double)ceil_div(tiles * parts, parts > 2 ? clustered : sm_count) * (3000 + work + sums);
        if (time < least)
            least = time, best = parts;
    }
    return best;
}

#endif
