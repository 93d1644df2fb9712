/* attention_boxes.cuh - attention of up to 8 rows (Hopper): keys and values come through shared memory, from rows at
   any stride.

   As attention_ring.cuh, whose rings of a warp each it has. What a stage holds is not copied as dense rows, but as
   boxes of a tensor map: of 64 columns (a panel of wgmma.cuh) and the keys of a step, zeros where the tensor ends.
   Work comes in tiles, a part of the keys of a sequence and a head of k. Without a cluster a block goes from tile to
   tile: a warp's requests are ahead, also into the next tiles, so that memory is busy while warps merge one. Blocks
   that run at the same time have neighbouring heads at the same keys, which may be neighbours in memory. */
#ifndef ADZE_CUDA_ATTENTION_BOXES_CUH
#define ADZE_CUDA_ATTENTION_BOXES_CUH

#include "attention_cluster.cuh"
#include "wgmma.cuh"

enum { BOXES_STAGES = 3 }; /* at most */

struct boxes_maps {
    CUtensorMap k, v;
};
/* Tile i is part i / pairs of pair i % pairs of a sequence and a head of k. */
struct boxes_tiles {
    int steps, pairs, tiles; /* steps of a pair; pairs; tiles of all */
};

/* A stage has the panels of the keys, then those of the values. */
template <class S>
struct attention_boxes_shape {
    static constexpr int PANELS = S::D / PANEL, BOX = S::KEYS * PANEL_ROW, HALF = PANELS * BOX, STAGE = 2 * HALF;
    static constexpr int ALL = S::ALONG * STAGE; /* warps' */
    static_assert(S::TILES == 1 && !S::QUANTISED && BOX % PANEL_ALIGN == 0 && S::D % PANEL == 0, "");
    /* Rings are still filled while a tile is merged: what merging needs lies behind them. */
    static constexpr int shared(int stages, int ranks) { return stages * ALL + cluster_shared<S>(ranks); }
};

/* A warp's step of a tile. */
struct boxes_place {
    int tile, part, sequence, kv_head, step, end;
    __device__ __forceinline__ void enter(const attention_params &p, const boxes_tiles &of, int at)
    {
        const int warp = (int)threadIdx.x / 32;
        tile = at, part = tile / of.pairs;
        const int pair = tile - part * of.pairs;
        sequence = pair / p.kv_heads, kv_head = pair - sequence * p.kv_heads;
        step = of.steps * part / p.parts + warp, end = of.steps * (part + 1) / p.parts;
    }
    /* Goes on to a tile in which the warp has a step; of.tiles: there is none. */
    __device__ __forceinline__ void find(const attention_params &p, const boxes_tiles &of, int blocks)
    {
        while (step >= end) {
            if (tile + blocks >= of.tiles) {
                tile = of.tiles;
                return;
            }
            enter(p, of, tile + blocks);
        }
    }
};

template <class S>
__device__ __forceinline__ void boxes_load_q(const attention_params &p, const attention_block &b, direct_rows<S> &r)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const int row = min(g, b.rows - 1), query = row / p.group;
    const int64_t head = b.kv_head * p.group + row % p.group;
    const int64_t at = b.sequence * p.q_stride[0] + head * p.q_stride[1] + query * p.q_stride[2];
    const char *const from = p.q + (at + t * S::VECTOR) * 2;
#pragma unroll
    for (int c = 0; c < S::Q_VECTORS; c++) {
        const int column = c * 4 * S::VECTOR;
        const uint4 v = load_passing(from + column * 2, g < b.rows && column + t * S::VECTOR < p.d);
        if constexpr (S::Q_SHARED) /* the lane's own place */
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(r.q_at + (uint32_t)(c * S::THREADS * 16)),
                         "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                         : "memory");
        else
            r.q[0][c] = v;
    }
}

/* The same vectors as direct_load_keys has of a key, and direct_load_values of a value: piece i of a row of a panel
   is at i ^ row % 8. */
template <class S>
__device__ __forceinline__ void boxes_keys(const char *stage, direct_keys<S> &keys)
{
    typedef attention_boxes_shape<S> R;
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const char *const from = stage + g * PANEL_ROW;
#pragma unroll
    for (int u = 0; u < S::UNITS; u++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int c = 0; c < S::CHUNKS; c++)
                keys.k[u][h][c] =
                    load_shared(from + c / 2 * R::BOX + (u * 16 + h * 8) * PANEL_ROW + ((c % 2 * 4 + t) ^ g) * 16);
    keys.missing = 0;
}
template <class S>
__device__ __forceinline__ void boxes_values(const char *stage, direct_keys<S> &keys)
{
    typedef attention_boxes_shape<S> R;
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const char *const from = stage + R::HALF + 2 * t * PANEL_ROW;
#pragma unroll
    for (int u = 0; u < S::UNITS; u++)
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int c = 0; c < S::SPANS; c++)
                keys.v[u][i][c] = load_shared(from + c * R::BOX + (u * 16 + i / 2 * 8 + i % 2) * PANEL_ROW +
                                              (g ^ (2 * t + i % 2)) * 16);
}

/* Blocks: the parts of the keys of pair blockIdx.y, which are a cluster's if p.clustered; else any number, which take
   the tiles in turn. */
template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
    attention_boxes(const __grid_constant__ attention_params p, const __grid_constant__ boxes_maps maps,
                    const __grid_constant__ boxes_tiles of)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    typedef attention_boxes_shape<S> R;
    extern __shared__ __align__(PANEL_ALIGN) char panels[];
    __shared__ __align__(8) uint64_t barriers[S::ALONG][BOXES_STAGES], sums_arrived;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const uint32_t barrier = shared_address(barriers[warp]), all_sums = shared_address(&sums_arrived);
    const int stages = p.stages;
    char *const ring = panels + warp * stages * R::STAGE, *const behind = panels + stages * R::ALL;
    char *const sums = behind + S::Q_BYTES;
    if (threadIdx.x == 0) {
        panel_prefetch_map(maps.k);
        panel_prefetch_map(maps.v);
    }
    if (lane == 0)
        for (int i = 0; i < stages; i++)
            bulk_barrier(barrier + (uint32_t)i * 8);
    if (p.clustered && threadIdx.x == 0)
        bulk_barrier(all_sums);
    if (lane == 0)
        bulk_ready();
    if (p.clustered && threadIdx.x == 0)
        bulk_expect(all_sums, cluster_bytes<S>(p.m * p.group, p.parts));
    cluster_arrive_relaxed(); /* once all have arrived, their barriers are there */
    /* Panels of keys beyond the last column stay 0; what lies there of values is not stored. */
    const int key_panels = (p.d + PANEL - 1) / PANEL, value_panels = (p.dv + PANEL - 1) / PANEL;
    if (key_panels < R::PANELS)
        for (int i = 0; i < stages; i++)
            for (int at = key_panels * R::BOX + lane * 16; at < R::HALF; at += 32 * 16)
                *reinterpret_cast<uint4 *>(ring + i * R::STAGE + at) = make_uint4(0, 0, 0, 0);
    __syncwarp();

    const int blocks = p.clustered ? of.tiles : (int)gridDim.x; /* from a tile to the block's next one */
    int tile = p.clustered ? (int)(blockIdx.x * gridDim.y + blockIdx.y) : (int)blockIdx.x;
    boxes_place next; /* the step that is requested next */
    next.enter(p, of, tile);
    next.find(p, of, blocks);
    auto request = [&](int stage) {
        if (lane == 0) {
            const uint32_t arrived = barrier + (uint32_t)stage * 8, to = shared_address(ring + stage * R::STAGE);
            const int key = next.step * S::KEYS;
            bulk_expect(arrived, (uint32_t)((key_panels + value_panels) * R::BOX));
#    pragma unroll
            for (int i = 0; i < R::PANELS; i++)
                if (i < key_panels)
                    panel_copy(to + (uint32_t)(i * R::BOX), maps.k, i * PANEL, key, next.kv_head, next.sequence,
                               arrived);
#    pragma unroll
            for (int i = 0; i < R::PANELS; i++)
                if (i < value_panels)
                    panel_copy(to + (uint32_t)(R::HALF + i * R::BOX), maps.v, i * PANEL, key, next.kv_head,
                               next.sequence, arrived);
        }
        __syncwarp();
        next.step += S::ALONG;
        next.find(p, of, blocks);
    };
    int requested = 0;
    if (p.const_cache)
        while (requested < stages && next.tile < of.tiles && (next.step + 1) * S::KEYS <= p.n - p.m)
            request(requested++);
    else if (lane == 0 && next.tile < of.tiles) /* the first step, while the kernel before may still run */
        for (int i = 0; i < R::PANELS; i++) {
            if (i < key_panels)
                panel_prefetch(maps.k, i * PANEL, next.step * S::KEYS, next.kv_head, next.sequence);
            if (i < value_panels)
                panel_prefetch(maps.v, i * PANEL, next.step * S::KEYS, next.kv_head, next.sequence);
        }
    __syncwarp();
    pdl_wait();
    while (requested < stages && next.tile < of.tiles)
        request(requested++);
    if (requested == 0 && !p.next_late)
        pdl_launch_next();

    direct_rows<S> r;
    direct_keys<S> keys;
    r.q_at = shared_address(behind) + threadIdx.x * 16;
    attention_block b;
    b.first = 0, b.rows = p.m * p.group;
    const bool plain = p.softcap == 0 && !p.mask_kind;
    int stage = 0;
    uint32_t parity = 0;
    for (;; tile += blocks) {
        boxes_place now;
        now.enter(p, of, tile);
        b.sequence = now.sequence, b.kv_head = now.kv_head;
        b.s = {b.sequence, 0, p.m, b.sequence, 0, p.n};
        b.high = p.n;
        const int inner_high = attention_high(p, b.s, 0);
        if (p.mask_kind)
            direct_prefetch_mask<S>(p, b, now.step * S::KEYS, S::ALONG * S::KEYS, min(now.end * S::KEYS, b.high));
        boxes_load_q<S>(p, b, r);
        r.clear();
        for (; now.step < now.end; now.step += S::ALONG) {
            const int key = now.step * S::KEYS;
            const char *const from = ring + stage * R::STAGE;
            if (next.tile >= of.tiles && !p.next_late) /* the last keys are under way */
                pdl_launch_next();
            bulk_wait(barrier + (uint32_t)stage * 8, parity);
            boxes_keys<S>(from, keys);
            float score[S::UNITS][S::TILES][4];
            direct_scores<T, S>(keys, r, score);
            direct_scale<T, S>(p, b, key, 0, plain && key + S::KEYS <= inner_high, p.scale, score);
            direct_weigh<S>(r, score);
            boxes_values<S>(from, keys);
            __syncwarp(); /* all lanes have read the stage */
            if (next.tile < of.tiles)
                request(stage);
            direct_values<T, S, false>(keys, score, r);
            if (++stage == stages)
                stage = 0, parity ^= 1;
        }
        if (p.clustered)
            break;
        __syncthreads(); /* the last tile's sums have been read */
        direct_put<S>(r, 1, warp, reinterpret_cast<float *>(sums));
        __syncthreads();
        attention_merge<T, S>(p, b, reinterpret_cast<float *>(sums), now.part);
        if (tile + blocks >= of.tiles)
            break;
    }
    __syncwarp();
    cluster_wait();
    if constexpr ((S::D & (S::D - 1)) == 0)
        if (p.clustered) {
            const int worker = warp * p.parts + (int)blockIdx.x;
            cluster_push<S>(r, 1, shared_address(sums), all_sums, b.rows, p.parts, worker);
            cluster_sum<T, S>(p, b, sums, all_sums, p.parts, (int)blockIdx.x);
        }
#endif
}

#endif
