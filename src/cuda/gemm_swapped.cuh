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
    static constexpr int HELD = GROUPS == 2 ? 2 : 1; /* panels of weights that a thread has in registers */
    static constexpr int DEPTH = 2 * PANEL;          /* columns of a stage, in as many panels of each operand */
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
                                               const quantised_tile_place &place, int first, int steps,
                                               uint32_t shared)
{
    constexpr int HALF = S::ROWS / 2;
    const gemm_rows rows = place.rows;
    const CUtensorMap &low = maps.w[rows.part], &high = maps.w[p.glu ? 1 : rows.part];
    auto there = [&](int stage) { return shared + (uint32_t)(S::BARRIERS_AT + stage * 16); };
    auto weights = [&](int step, int stage) {
        bulk_expect(there(stage), S::STAGE_BYTES);
#pragma unroll
        for (int i = 0; i < S::W_PANELS; i++) {
            const uint32_t to = shared + (uint32_t)(stage * S::STAGE_BYTES + S::X_BYTES + i * S::W_PANEL);
            const int column = (first + step) * S::W_COLUMNS * S::W_PANELS + i * S::W_COLUMNS;
            panel_copy(to, low, column, rows.at, 0, 0, there(stage));
            panel_copy(to + HALF * S::W_ROW, high, column, p.glu ? rows.at : rows.at + HALF, 0, 0, there(stage));
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

/* The sums of a warpgroup that unpacks its rows of the weights. `lost`: whether row g, and g + 8, has a NaN of
   f8e4m3. */
template <typename T, class S>
__device__ __forceinline__ void swapped_unpacks(const gemm_params &p, const quantised_tile_place &place, int first,
                                                int steps, const char *panels, uint32_t shared,
                                                float (&sum)[S::TOKENS / 2], bool (&lost)[2])
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
    float products[S::TABLED ? SUMS : 1];
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
    if constexpr (F == OF_F8) {
#pragma unroll
        for (int r = 0; r < 2; r++)
            lost[r] = __ballot_sync(0xffffffffu, nan[r] != 0) >> (g * 4) & 0xf;
    }
}

/* A warpgroup that computes: the sums of its rows go to shared memory. */
template <typename T, class S, typename SUM>
__device__ __forceinline__ void swapped_computes(const gemm_params &p, const quantised_tile_place &place, int first,
                                                 int steps, char *panels, uint32_t shared)
{
    constexpr int SUMS = S::TOKENS / 2;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    SUM sum[SUMS];
    bool lost[2] = {};
#pragma unroll
    for (int i = 0; i < SUMS; i++)
        sum[i] = 0;
    if constexpr (S::UNPACKS)
        swapped_unpacks<T, S>(p, place, first, steps, panels, shared, sum, lost);
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
    gemm_swapped(const __grid_constant__ gemm_params p, const __grid_constant__ swapped_maps maps, int token_tiles)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    typedef typename std::conditional<S::BYTES, int, float>::type SUM;
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
            swapped_copies<S>(p, maps, place, first, steps, shared);
        return; /* barriers do not wait for threads that have exited */
    }
    registers_up<S::REGISTERS>();
    swapped_computes<T, S, SUM>(p, place, first, steps, panels, shared);
    pdl_wait(); /* for what the sums are added to */
    if constexpr (!S::BYTES)
        tile_finish<T, S>(p, (SUM *)panels, token_tiles, S::STRIP);
    else if (p.out_f32)
        tile_finish<float, S>(p, (SUM *)panels, token_tiles, S::STRIP);
    else if (p.out_bf16)
        tile_finish<bf16, S>(p, (SUM *)panels, token_tiles, S::STRIP);
    else
        tile_finish<f16, S>(p, (SUM *)panels, token_tiles, S::STRIP);
#endif
}

/* In how many parts the blocks of a cluster take k: as in quantised_tile_plan_of, whose times these are, but that
   here it is copies alone that take time. */
template <class S>
static int swapped_parts(const cuda_call &s, const gemm_params &p, double &least)
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
