/* gemm_wgmma.cuh - products of quantised x and many tokens on Hopper's tensor cores (sm_90a alone).

   A block goes from tile to tile, 128 tokens by ROWS rows of the weights. A thread of the last warpgroup copies boxes
   of 128 bytes of k into the stages of a ring. The other two warpgroups multiply 64 tokens each with all rows of the
   tile, and keep the sums in registers. Those of i8 are integers, so that nothing is lost over all of k. Those of
   f8e4m3, which the tensor cores add with few bits, are of one stage, and added to others in float. A finished tile
   passes 64 columns at a time through a warp's own shared memory, so that its stores are of whole rows, while the
   copies of the next tile are under way. With glu half of a tile's rows are the gate's, the others the value's. */
#ifndef ADZE_CUDA_GEMM_WGMMA_CUH
#define ADZE_CUDA_GEMM_WGMMA_CUH

#include "gemm_call.cuh"
#include "wgmma.cuh"

template <int ROWS_, int STAGES_>
struct bytes_shape {
    static constexpr int TOKENS = 128, ROWS = ROWS_, STAGES = STAGES_, DEPTH = 128; /* DEPTH: bytes of k in a stage */
    static constexpr int GROUPS = 2, THREADS = (GROUPS + 1) * 128, REGISTERS = 240, COPY_REGISTERS = 24;
    static constexpr int X_BYTES = TOKENS * DEPTH, STAGE_BYTES = X_BYTES + ROWS * DEPTH;
    static constexpr int COLUMNS = 64, PITCH = COLUMNS + 4; /* of a warp's part of the result: in ints */
    static constexpr int RESULT_AT = STAGES * STAGE_BYTES, WARP_RESULT = 16 * PITCH * 4;
    static constexpr int BARRIERS_AT = RESULT_AT + GROUPS * 4 * WARP_RESULT;
    static constexpr int SHARED = BARRIERS_AT + STAGES * 16;
};

struct bytes_maps {
    CUtensorMap x, w[GEMM_PARTS];
};
struct bytes_tiles { /* of a call: those of tokens, and all */
    int tokens, all;
};

template <class S>
struct bytes_barriers {
    uint32_t at;
    __device__ __forceinline__ uint32_t there(int stage) const { return at + (uint32_t)stage * 16; }
    __device__ __forceinline__ uint32_t free(int stage) const { return there(stage) + 8; }
};
/* A place in the ring: its stage, and the parity of the phase that ends when it is filled. */
template <class S>
struct bytes_place {
    int stage;
    uint32_t parity;
    __device__ __forceinline__ void next()
    {
        if (++stage == S::STAGES)
            stage = 0, parity ^= 1;
    }
};

/* The thread that copies. */
template <class S>
__device__ __forceinline__ void bytes_copies(const gemm_params &p, const bytes_maps &maps, const bytes_tiles &tiles,
                                             int steps, uint32_t shared, const bytes_barriers<S> &barriers)
{
    constexpr int HALF = S::ROWS / 2;
    bytes_place<S> at = {0, 0};
    for (int tile = (int)blockIdx.x; tile < tiles.all; tile += (int)gridDim.x) {
        const gemm_rows rows = gemm_tile_rows(p, tile / tiles.tokens, p.glu ? HALF : S::ROWS);
        const int token = tile % tiles.tokens * S::TOKENS;
        const CUtensorMap &low = maps.w[rows.part], &high = maps.w[p.glu ? 1 : rows.part];
        for (int step = 0; step < steps; step++, at.next()) {
            const uint32_t there = barriers.there(at.stage), to = shared + (uint32_t)(at.stage * S::STAGE_BYTES);
            bulk_wait(barriers.free(at.stage), at.parity ^ 1);
            bulk_expect(there, S::STAGE_BYTES);
            panel_copy(to, maps.x, step * S::DEPTH, token, 0, 0, there);
            panel_copy(to + S::X_BYTES, low, step * S::DEPTH, rows.at, 0, 0, there);
            panel_copy(to + S::X_BYTES + HALF * S::DEPTH, high, step * S::DEPTH, p.glu ? rows.at : rows.at + HALF, 0,
                       0, there);
        }
    }
}

/* Writes columns `chunk` of a warp's sums to its shared memory. With glu these are 32 of the gate and 32 of the
   value. A chunk is known at run time, the registers of one are not: hence all cases. */
template <class S, int CHUNK = 0, typename SUM>
__device__ __forceinline__ void bytes_put(const SUM (&d)[S::ROWS / 2], int chunk, bool glu, SUM *to)
{
    typedef typename std::conditional<std::is_same<SUM, int>::value, int2, float2>::type pair;
    if constexpr (CHUNK < S::ROWS / S::COLUMNS) {
        if (chunk == CHUNK) {
            const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
            for (int i = 0; i < 8; i++) { /* 8 columns each */
                constexpr int ALL = S::ROWS / 8;
                const int plain = CHUNK * 8 + i, of_glu = i < 4 ? CHUNK * 4 + i : ALL / 2 + CHUNK * 4 + i - 4;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const SUM low = glu ? d[of_glu * 4 + half * 2] : d[plain * 4 + half * 2];
                    const SUM high = glu ? d[of_glu * 4 + half * 2 + 1] : d[plain * 4 + half * 2 + 1];
                    *reinterpret_cast<pair *>(to + (g + half * 8) * S::PITCH + i * 8 + t * 2) = {low, high};
                }
            }
        }
        bytes_put<S, CHUNK + 1, SUM>(d, chunk, glu, to);
    }
}

template <typename T>
__device__ __forceinline__ void store_pair(T *to, float low, float high, bool second, bool aligned)
{
    if (second && aligned) {
        if constexpr (sizeof(T) == 4) {
            *reinterpret_cast<float2 *>(to) = make_float2(low, high);
        } else {
            const uint32_t both_bits = (uint32_t)(twice(from_float<T>(low)) & 0xffffu) |
                                       (uint32_t)(twice(from_float<T>(high)) & 0xffff0000u);
            *reinterpret_cast<uint32_t *>(to) = both_bits;
        }
    } else {
        to[0] = from_float<T>(low);
        if (second)
            to[1] = from_float<T>(high);
    }
}

/* What a warp does with its 16 tokens, from `first` on, and the tile's rows. */
template <typename T, class S, typename SUM>
__device__ __forceinline__ void bytes_finish(const gemm_params &p, const gemm_rows &rows, int64_t first,
                                             const SUM (&d)[S::ROWS / 2], SUM *result)
{
    typedef typename std::conditional<std::is_same<SUM, int>::value, int2, float2>::type pair;
    const int lane = (int)threadIdx.x % 32, tokens = p.m - first < 16 ? (int)(p.m - first) : 16;
    const gemm_part &part = p.part[rows.part];
    const int64_t stride = p.rows.stride[part.out_rows][0];
    const bool plain = !p.act && !p.glu && !p.residual && !(p.rounding & ADZE_ROUND_STEPS);
    const bool aligned = ((uintptr_t)part.out % (2 * sizeof(T)) == 0) && stride % 2 == 0 && rows.at % 2 == 0;
    const float x_scale = lane < tokens ? p.x_scale[(first + lane) * p.rows.stride[GEMM_X_SCALE][0]] : 0;
#pragma unroll 1
    for (int chunk = 0; chunk < S::ROWS / S::COLUMNS; chunk++) {
        __syncwarp();
        bytes_put<S, 0, SUM>(d, chunk, p.glu, result);
        __syncwarp();
        if (plain) {
            const int column = chunk * S::COLUMNS + lane * 2, left = rows.count - column, row = rows.at + column;
            float w_scale[2] = {}, bias[2] = {};
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (j < left) {
                    float b[1] = {0};
                    w_scale[j] = gemm_scale(p, rows.part, row + j, 0);
                    if (part.bias)
                        load_param<T, 1>(part.bias, part.bias_f32, row + j, b);
                    bias[j] = b[0];
                }
            T *to = (T *)part.out + first * stride + row;
#pragma unroll 4
            for (int r = 0; r < tokens; r++, to += stride) {
                const pair sum = *reinterpret_cast<const pair *>(result + r * S::PITCH + lane * 2);
                const float by = __shfl_sync(0xffffffffu, x_scale, r);
                if (left > 0)
                    store_pair<T>(to, (float)sum.x * by * w_scale[0] + bias[0],
                                  (float)sum.y * by * w_scale[1] + bias[1], left > 1, aligned);
            }
            continue;
        }
        const int lanes = p.glu ? 16 : 32, columns = p.glu ? S::COLUMNS / 2 : S::COLUMNS;
#pragma unroll 1
        for (int r = lane / lanes; r < tokens; r += 32 / lanes)
#pragma unroll 1
            for (int j = 0; j < 2; j++) {
                const int in_chunk = lane % lanes * 2 + j, column = chunk * columns + in_chunk;
                const SUM *const at = result + r * S::PITCH + in_chunk;
                if (column < rows.count)
                    gemm_finish<T, true, true>(p, rows.part, 0, first + r, rows.at + column, (float)at[0],
                                               p.glu ? (float)at[S::COLUMNS / 2] : 0);
            }
    }
}

/* A warpgroup that computes. */
template <class S, typename SUM>
__device__ __forceinline__ void bytes_computes(const gemm_params &p, const bytes_tiles &tiles, int steps,
                                               char *panels, uint32_t shared, const bytes_barriers<S> &barriers)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const uint64_t x = wgmma_operand(shared + (uint32_t)(warp / 4 * 64 * S::DEPTH), 16);
    const uint64_t w = wgmma_operand(shared + S::X_BYTES, 16);
    SUM *const result = (SUM *)(panels + S::RESULT_AT + warp * S::WARP_RESULT);
    bytes_place<S> at = {0, 0};
    constexpr bool BY_STAGE = std::is_same<SUM, float>::value;
    SUM d[S::ROWS / 2], all[BY_STAGE ? S::ROWS / 2 : 1];
#pragma unroll
    for (int i = 0; i < S::ROWS / 2; i++)
        d[i] = 0;
    for (int tile = (int)blockIdx.x; tile < tiles.all; tile += (int)gridDim.x) {
        int last = -1; /* the stage whose products are under way */
#pragma unroll
        for (int i = 0; i < S::ROWS / 2 && BY_STAGE; i++)
            all[i] = 0;
#pragma unroll 1
        for (int step = 0; step < steps; step++, at.next()) {
            bulk_wait(barriers.there(at.stage), at.parity);
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < S::DEPTH / 32; c++)
                wgmma_bytes<S::ROWS>(d, wgmma_later(x, at.stage * S::STAGE_BYTES + c * 32),
                                     wgmma_later(w, at.stage * S::STAGE_BYTES + c * 32), BY_STAGE ? c : step + c);
            wgmma_commit();
            if constexpr (BY_STAGE) {
                wgmma_wait_all(d);
                if (lane == 0)
                    bulk_arrive(barriers.free(at.stage));
#pragma unroll
                for (int i = 0; i < S::ROWS / 2; i++)
                    all[i] += d[i];
            } else {
                wgmma_wait<1>();
                if (last >= 0 && lane == 0)
                    bulk_arrive(barriers.free(last));
                last = at.stage;
            }
        }
        if constexpr (BY_STAGE) {
#pragma unroll
            for (int i = 0; i < S::ROWS / 2; i++)
                d[i] = all[i];
        } else {
            wgmma_wait_all(d);
            if (lane == 0)
                bulk_arrive(barriers.free(last));
        }
        const gemm_rows rows = gemm_tile_rows(p, tile / tiles.tokens, p.glu ? S::ROWS / 2 : S::ROWS);
        const int64_t first = (int64_t)(tile % tiles.tokens) * S::TOKENS + warp * 16;
        if (first >= p.m)
            continue;
        if (p.out_f32)
            bytes_finish<float, S, SUM>(p, rows, first, d, result);
        else if (p.out_bf16)
            bytes_finish<bf16, S, SUM>(p, rows, first, d, result);
        else
            bytes_finish<f16, S, SUM>(p, rows, first, d, result);
    }
}

template <class S, typename SUM>
__global__ void __launch_bounds__(S::THREADS, 1)
    gemm_wgmma(const __grid_constant__ gemm_params p, const __grid_constant__ bytes_maps maps,
               const bytes_tiles tiles)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(PANEL_ALIGN) char panels[];
    const uint32_t shared = shared_address(panels);
    const bytes_barriers<S> barriers = {shared + S::BARRIERS_AT};
    const int steps = ((int)p.k + S::DEPTH - 1) / S::DEPTH;
    pdl_launch_next();
    if (threadIdx.x == 0) {
        panel_prefetch_map(maps.x);
        if (p.part[0].n)
            panel_prefetch_map(maps.w[0]);
        for (int i = 0; i < S::STAGES; i++) {
            bulk_barrier(barriers.there(i));
            bulk_barrier(barriers.free(i), S::GROUPS * 4); /* a lane of each warp that computes */
        }
        bulk_ready();
    }
    __syncthreads();
    pdl_wait();
    if (threadIdx.x / 128 == S::GROUPS) {
        registers_down<S::COPY_REGISTERS>();
        if (threadIdx.x % 128 == 0)
            bytes_copies<S>(p, maps, tiles, steps, shared, barriers);
    } else {
        registers_up<S::REGISTERS>();
        bytes_computes<S, SUM>(p, tiles, steps, panels, shared, barriers);
    }
#endif
}

#endif
