/* attention_run.cuh - host: how many parts the keys of a call have, and the launches of attention_tile.cuh
   and attention_cluster.cuh. */
#ifndef ADZE_CUDA_ATTENTION_RUN_CUH
#define ADZE_CUDA_ATTENTION_RUN_CUH

#include "attention_cluster.cuh"

#include <algorithm>

enum {
    SHORT,
    RING_8,
    BOXES_8,
    DIRECT_8,
    DIRECT_16,
    FEW_ROWS,
    FEW_SPLIT,
    SOME_ROWS,
    SOME_SPLIT,
    MANY_ROWS,
    WGMMA_64, /* rows */
    WGMMA_128,
    WGMMA_192,
    FLOATS_FEW, /* each of the three: then the same with parts merged by a second launch */
    FLOATS_FEW_SPLIT,
    FLOATS_SOME,
    FLOATS_SOME_SPLIT,
    FLOATS_MANY,
    FLOATS_MANY_SPLIT,
    TF32_MANY,
    TF32_MANY_SPLIT,
    WIDE_FEW,
    WIDE_FEW_SPLIT,
    WIDE_MANY,
    MIXED_FEW,
    MIXED_FEW_SPLIT,
    MIXED_MANY,
    ANY_CALL
};

/* attention_quantised.cu: calls of f16 or bf16 whose keys are i8 or f8e4m3. */
adze_status attention_quantised(const cuda_call &s, const attention_params &p, bool is_bf16);
/* attention_ring.cu: calls of f16 or bf16 with few rows, and the parts of their keys. */
adze_status attention_ring_run(const cuda_call &s, const attention_params &p, bool is_bf16);
int64_t attention_ring_parts(const cuda_call &s, const attention_params &p);
/* attention_boxes.cu: the same, of rows at any stride. */
adze_status attention_boxes_run(const cuda_call &s, const attention_params &p, bool is_bf16);
int64_t attention_boxes_parts(const cuda_call &s, const attention_params &p);
/* attention_short.cu: calls of f16 or bf16 with few keys. */
adze_status attention_few_keys(const cuda_call &s, const attention_params &p, bool is_bf16);
/* attention_sm90.cu: calls of f16 or bf16 with many rows, on Hopper. */
adze_status attention_many(const cuda_call &s, const attention_params &p, bool is_bf16);
/* attention_masked_sm90.cu: those of them that have a mask or a softcap. */
adze_status attention_many_masked(const cuda_call &s, const attention_params &p, bool is_bf16);
/* attention_floats.cu: calls of f32, and the parts of their keys that may need scratch. */
adze_status attention_floats(const cuda_call &s, const attention_params &p);
int64_t attention_floats_parts(const cuda_call &s, const attention_params &p);
/* attention_tf32.cu: the same of those with many rows, on tensor cores. */
adze_status attention_tf32(const cuda_call &s, const attention_params &p);
int64_t attention_tf32_parts(const cuda_call &s, const attention_params &p);

/* attention_wide.cu: calls of f16 or bf16 in rows of more than 256 elements. */
adze_status attention_wide_rows(const cuda_call &s, const attention_params &p, bool is_bf16);
/* attention_mixed.cu: calls that none of these takes, and the parts of their keys. */
adze_status attention_mixed(const cuda_call &s, const attention_params &p);
int64_t attention_mixed_parts(const cuda_call &s, const attention_params &p);

/* Rows that a sequence has for one head of k: of packed sequences, on average. */
static inline int64_t attention_rows_of(const attention_params &p)
{
    return (p.packed ? ceil_div(p.m, p.sequences > 0 ? p.sequences : 1) : p.m) * p.group;
}
static inline int64_t attention_out_rows(const attention_params &p)
{
    return (int64_t)(p.packed ? 1 : p.sequences) * p.heads * p.m;
}
/* Tiles of `rows` rows in the grid's x; where sequences are packed, a tile of each may be partly empty. */
static inline int64_t attention_tiles(const attention_params &p, int64_t rows)
{
    const int64_t all = ceil_div((int64_t)p.m * p.group, rows);
    return p.packed ? all + p.sequences : all;
}
static inline int64_t attention_pairs(const attention_params &p)
{
    return p.packed ? p.kv_heads : (int64_t)p.sequences * p.kv_heads;
}

/* The keys that a tile of some queries of a sequence sees: the most of a tile, and the average. */
struct attention_extent {
    double most, seen;
};
static inline attention_extent attention_extent_of(const attention_params &p, int64_t queries)
{
    const int64_t sequences = p.sequences > 0 ? p.sequences : 1;
    const double n = (double)(p.k_offsets ? ceil_div(p.n, sequences) : p.n);
    const double m = (double)(p.packed ? ceil_div(p.m, sequences) : p.m), each = std::min((double)queries, m);
    const double window = (double)p.window * (p.causal ? 1 : 2) - (p.causal ? 1 : 2) + each;
    const double most = p.window ? std::min(n, window) : n;
    if (!p.causal)
        return {most, most};
    /* The last query of the first tile sees `first` keys, that of the last one all n: the average of what the window
       leaves of them. */
    const double first = n - m + each;
    const auto area = [&](double keys) {
        return keys <= 0 ? 0 : keys < most ? keys * keys / 2 : most * most / 2 + most * (keys - most);
    };
    return {most, std::max(first < n ? (area(n) - area(first)) / (n - first) : most, 1.0)};
}
/* Queries of a tile of `rows` rows of a head of k. */
static inline int64_t attention_queries(const attention_params &p, int64_t rows)
{
    return ceil_div(rows, p.group);
}
/* Steps of `keys` keys that such a tile has on average, and at most. Steps begin at a multiple of their keys: those
   of a window, or of a causal tile, are half a step more. */
static inline attention_extent attention_steps_of(const attention_params &p, int64_t queries, int64_t keys)
{
    const attention_extent e = attention_extent_of(p, queries);
    const double all = (double)ceil_div(p.n, keys);
    const double most = std::min(all, std::ceil(e.most / (double)keys) + (p.window ? 1 : 0));
    const double more = (p.causal ? 0.5 : 0) + (p.window ? 0.5 : 0);
    return {most, more > 0 ? std::min(most, std::max(e.seen / (double)keys + more, 1.0)) : most};
}
/* In how many parts blocks take the keys: as many as fill every multiprocessor twice, of `least` keys or more. */
static inline int64_t key_parts(const cuda_call &s, const attention_params &p, int64_t rows, int64_t least,
                                int64_t most)
{
    const int64_t blocks = attention_tiles(p, rows) * attention_pairs(p);
    const double most_keys = attention_extent_of(p, attention_queries(p, rows)).most;
    const int64_t parts = s.gpu.sm_count * 2 / blocks, enough = (p.window ? (int64_t)most_keys : p.n) / least;
    const int64_t few = parts < enough ? parts : enough;
    return few < 1 ? 1 : few < most ? few : most;
}
/* The parts of a call that may be split by a second launch: those for which a cluster is too small; else 1. */
enum { SPLIT_LEAST = 64, PART_LEAST = 128 }; /* keys of a part: of one that may be, and of one that is preferred */
static inline int64_t split_parts(const cuda_call &s, const attention_params &p, int64_t rows)
{
    const int64_t parts = key_parts(s, p, rows, SPLIT_LEAST, PARTS_MAX);
    return parts > (adze_cuda_clusters(s.device) ? CLUSTER_MAX : 1) ? parts : 1;
}
template <class S>
static int64_t attention_clusters(const cuda_call &s, const attention_params &p)
{
    return adze_cuda_clusters(s.device) ? key_parts(s, p, S::ROWS, PART_LEAST, CLUSTER_MAX) : 1;
}
/* The same where a step takes so long that a part of one is worth a block; and where steps are many, as many parts as
   have blocks at once. */
template <class S>
static int64_t attention_step_clusters(const cuda_call &s, const attention_params &p)
{
    constexpr int64_t LONG = 8; /* steps of a part */
    const int64_t blocks = attention_tiles(p, S::ROWS) * attention_pairs(p), sms = s.gpu.sm_count;
    const int64_t steps = (int64_t)attention_steps_of(p, attention_queries(p, S::ROWS), S::KEYS).most;
    const int64_t parts =
        std::max(std::min(steps, sms * 2 / blocks), std::min(steps / LONG, sms * S::BLOCKS / blocks));
    return adze_cuda_clusters(s.device) ? std::max<int64_t>(std::min<int64_t>(parts, CLUSTER_MAX), 1) : 1;
}

/* Launches a kernel that has the grid of attention_tile, with blocks of shape S. */
template <class S, void (*KERNEL)(attention_params)>
static adze_status grid_launch(const cuda_call &s, attention_params p, int64_t parts, bool split)
{
    p.parts = (int)parts, p.clustered = !split && parts > 1;
    return launch(s, KERNEL, attention_tiles(p, S::ROWS) * parts, dim3(S::THREADS),
                  launch_shape(S::SHARED, split ? 1 : parts, attention_pairs(p)), p);
}
template <typename T, class S>
static adze_status tile_launch(const cuda_call &s, attention_params p, int64_t parts, bool split = false)
{
    return grid_launch<S, attention_tile<T, S>>(s, p, parts, split);
}
/* The same with parts in scratch, and a second launch that merges them. */
template <typename T, int COLUMNS = COMBINE_COLUMNS, typename LAUNCH>
static adze_status split_launch(const cuda_call &s, attention_params p, int64_t parts, LAUNCH tiles)
{
    const int64_t rows = attention_out_rows(p);
    p.part_sums = reinterpret_cast<float2 *>(p.part_values + rows * parts * attention_part_pitch(p));
    ADZE_CHECK(tiles(s, p, parts, true));
    p.parts = (int)parts;
    return launch(s, attention_combine<T, COLUMNS>, rows, dim3(COMBINE_THREADS), launch_shape(0), p);
}

/* `variant` and the one after it, which is the split one, of a kernel of floats. */
template <class S, void (*KERNEL)(attention_params)>
static adze_status floats_run(const cuda_call &s, const attention_params &p, int variant, bool possible,
                              bool preferred)
{
    const bool room = possible && S::SHARED <= s.gpu.block_shared;
    const int64_t parts = split_parts(s, p, S::ROWS);
    if (s.takes(variant + 1, room && parts > 1, preferred))
        return split_launch<float>(s, p, parts, grid_launch<S, KERNEL>);
    return s.takes(variant, room, preferred) ? grid_launch<S, KERNEL>(s, p, attention_step_clusters<S>(s, p), false)
                                             : ADZE_NO_KERNEL;
}

/* How the blocks of a call of up to 16 rows share its keys. */
struct direct_plan {
    int64_t parts;
    bool clustered; /* else parts are merged by a second launch */
};
enum {
    DIRECT_LEAST = 64,   /* keys of a part */
    DIRECT_SHORT = 192,  /* keys of a block: with so few a cluster is better than more parts, */
    DIRECT_FEW = 512,    /* and so few are not worth a second launch if most multiprocessors have a block */
    DIRECT_MOST = 256,   /* with more, clusters of the next launch load multiprocessors unevenly */
    DIRECT_ROUND = 2048, /* keys: up to so many, two blocks with large steps on each multiprocessor are better */
    DIRECT_LONG = 512,   /* more keys than this in a part are better taken in large steps */
    DIRECT_CLUSTER = 16  /* blocks, on Hopper: each GPC has room for 16 */
};
/* Parts for a second launch: as few as leave little of the last round of blocks empty, of which a multiprocessor has
   two at once. */
static inline int64_t direct_parts(const cuda_call &s, const attention_params &p)
{
    const int64_t blocks = attention_pairs(p), at_once = s.gpu.sm_count * 2;
    const int64_t enough = p.n / DIRECT_LEAST, most = enough < PARTS_MAX ? enough : (int64_t)PARTS_MAX;
    auto rounds = [&](int64_t parts) { return (double)ceil_div(blocks * parts, at_once) / (double)parts; };
    double best = rounds(1);
    for (int64_t parts = 2; parts <= most; parts++)
        best = rounds(parts) < best ? rounds(parts) : best;
    int64_t parts = 1;
    while (rounds(parts) > 1.05 * best)
        parts++;
    return parts;
}
/* A cluster, if its blocks fill most multiprocessors and have not many keys, or have few; its size is a power of 2.
   All clusters run at once: they begin only where a group of multiprocessors has room for all their blocks, which
   leaves up to a sixth of the room empty. `blocks` of the kernel fit into a multiprocessor. */
static inline direct_plan direct_plan_of(const cuda_call &s, const attention_params &p, int64_t blocks)
{
    const int64_t pairs = attention_pairs(p), room = s.gpu.sm_count * blocks * 5 / 6;
    const int64_t clusters = s.gpu.sm == 90 ? (int64_t)DIRECT_CLUSTER : (int64_t)CLUSTER_MAX;
    const int64_t most = adze_cuda_clusters(s.device) ? clusters : 1;
    int64_t size = 1;
    while (size < most && pairs * size * 2 <= room && p.n / (size * 2) >= DIRECT_LEAST)
        size *= 2;
    const bool fills = pairs * size * 4 >= s.gpu.sm_count * 5 && p.n / size <= DIRECT_MOST;
    if (size > 1 && (fills || p.n / size <= DIRECT_SHORT))
        return {size, true};
    return {p.n <= DIRECT_FEW && pairs * 3 > s.gpu.sm_count * 2 ? 1 : direct_parts(s, p), false};
}
/* The parts that need scratch, whichever kernel takes the call. */
static inline int64_t direct_split_parts(const cuda_call &s, const attention_params &p)
{
    if (p.packed || attention_rows_of(p) > 16)
        return 1;
    const direct_plan two = direct_plan_of(s, p, 2), three = direct_plan_of(s, p, 3);
    return std::max(two.clustered ? 1 : two.parts, three.clustered ? 1 : three.parts);
}
template <typename T, class S>
static adze_status direct_launch(const cuda_call &s, attention_params p, direct_plan plan)
{
    p.parts = (int)plan.parts, p.clustered = plan.clustered;
    return launch(s, attention_cluster<T, S>, plan.parts, dim3(S::THREADS),
                  launch_shape(cluster_shared<S>(plan.clustered ? p.parts : 1), plan.clustered ? plan.parts : 1,
                               attention_pairs(p)),
                  p);
}
template <typename T, class S>
static adze_status direct_run(const cuda_call &s, const attention_params &p, direct_plan plan)
{
    if (plan.parts == 1 || plan.clustered)
        return direct_launch<T, S>(s, p, plan);
    return split_launch<T>(s, p, plan.parts,
                           [](const cuda_call &its, const attention_params &q, int64_t parts, bool) {
                               return direct_launch<T, S>(its, q, {parts, false});
                           });
}
/* Whether steps of many keys are better than more warps, by what was measured on an H200: where the rounds of blocks
   of the second form leave less of the last one empty; in clusters whose warps have one such step, and several rows;
   in long parts. */
static inline bool direct_wide(const cuda_call &s, const attention_params &p, int64_t blocks, int64_t wide_blocks,
                               int64_t wide_keys)
{
    const direct_plan plan = direct_plan_of(s, p, blocks), wide = direct_plan_of(s, p, wide_blocks);
    const int64_t pairs = attention_pairs(p), once = s.gpu.sm_count * blocks;
    const int64_t wide_once = s.gpu.sm_count * wide_blocks;
    if (plan.parts == 1) {
        const bool fuller = ceil_div(pairs, wide_once) * wide_once < ceil_div(pairs, once) * once;
        return p.n <= DIRECT_ROUND || (pairs > once && fuller);
    }
    if (plan.clustered)
        return wide.clustered && wide.parts == plan.parts && p.n <= plan.parts * wide_keys &&
               attention_rows_of(p) > 1;
    return p.n > plan.parts * DIRECT_LONG;
}
/* Whether few keys are one block's: then attention_tile is faster, by what was measured on an H200 (2026-11-18). */
template <class S>
static bool direct_slower(const cuda_call &s, const attention_params &p)
{
    const direct_plan plan = direct_plan_of(s, p, S::BLOCKS);
    return !S::QUANTISED && plan.parts == 1 && p.n <= DIRECT_FEW;
}
/* S has small steps and more blocks, WIDE large ones and fewer; they may be the same. */
template <typename T, class S, class WIDE>
static adze_status direct_run(const cuda_call &s, const attention_params &p, int variant)
{
    const bool can = !p.packed && p.page % 16 == 0 && attention_rows_of(p) <= S::ROWS;
    if (!s.takes(variant, can, !direct_slower<S>(s, p)))
        return ADZE_NO_KERNEL;
    if (direct_wide(s, p, S::BLOCKS, WIDE::BLOCKS, WIDE::ALONG * WIDE::KEYS))
        return direct_run<T, WIDE>(s, p, direct_plan_of(s, p, WIDE::BLOCKS));
    return direct_run<T, S>(s, p, direct_plan_of(s, p, S::BLOCKS));
}
/* Calls of up to 8 rows, and up to 16. */
template <typename T, class S8, class WIDE8, class S16>
static adze_status direct_run(const cuda_call &s, const attention_params &p)
{
    const adze_status status = direct_run<T, S8, WIDE8>(s, p, DIRECT_8);
    return status != ADZE_NO_KERNEL ? status : direct_run<T, S16, S16>(s, p, DIRECT_16);
}

/* Whether rows, heads and sequences follow each other: maps of tensors have no other strides. */
static inline bool attention_forward(const attention_params &p, int rows, int heads, const int64_t (&stride)[3])
{
    return (p.sequences <= 1 || stride[0] > 0) && (heads <= 1 || stride[1] > 0) && (rows <= 1 || stride[2] > 0);
}
/* Estimated times of the kernels for more than 16 rows. Only their order matters; the unit is roughly a microsecond
   on an H200. Each is a fixed cost plus a cost per step of a block, times the blocks of a multiprocessor. The
   coefficients are fitted to sweeps on an H200 (2026-11-18) over 1 to 96 heads of up to 128 elements, 59 to 4096
   queries and 70 to 8192 keys, those of longer heads to four calls. */
struct attention_times {
    double in_short;        /* attention_short; infinite for more keys than it holds */
    double few, some, many; /* tiles of 16, 64 and 128 rows */
};
enum { SHORT_AT_ONCE = 10 }; /* warps of attention_short on a multiprocessor, by their registers */
static inline attention_times attention_times_of(const cuda_call &s, const attention_params &p)
{
    const auto tiles = [&](int64_t rows) { return (double)(attention_tiles(p, rows) * attention_pairs(p)); };
    const auto steps = [&](int64_t rows, int64_t keys) {
        return attention_steps_of(p, attention_queries(p, rows), keys).seen;
    };
    const double seen = attention_extent_of(p, attention_queries(p, 64)).seen;
    const int widest = std::max({p.d, p.dv, 64});
    const double sms = (double)s.gpu.sm_count, width = widest > 128 ? 2 : widest / 128.0; /* padded to 256 elements */
    const double each = tiles(128), parts = std::min(std::max(2 * sms / each, 1.0), 8.0);
    const bool narrow = p.d <= 64 && p.dv <= 64, wide = width > 1;
    attention_times t;
    const int64_t warp_keys = narrow ? 64 : wide ? 16 : 32, warps = ceil_div(p.n, warp_keys);
    const double short_rounds = tiles(8) * (double)warps / (sms * SHORT_AT_ONCE);
    /* With a mask, attention_short took up to 1.4 times as long, tiles 1.1 to 1.6 times. */
    const bool masked = p.mask_kind || p.softcap != 0;
    const double short_masked = !masked ? 1 : p.mask_shared ? 1.25 : 1.4, tile_masked = masked ? 1.6 : 1;
    t.in_short = warps > 8
                     ? INFINITY
                     : 3.3 + (wide ? 1.44 : 0.72) * (double)p.n / 256 + 6.5 * std::max(short_rounds - 0.25, 0.0);
    t.in_short *= short_masked;
    t.few = (wide ? 6 + seen / 120 : 5.2 + std::min(seen / 450, 3.0)) +
            (wide ? 3.2 : 2.4) * width * std::max(tiles(16) * steps(16, 64) / (2 * sms), 0.72);
    t.some =
        10.3 + std::min(seen / 2000, 9.5) + (wide ? 3.9 : 2.3) * width * tiles(64) * steps(64, 64) / (sms * 4 / 3);
    t.many = 11.2 + (wide ? 2.0 : 1.4) * width * std::max(steps(128, 32) / parts, 1.0) *
                        std::max(1.2 * each * parts / sms, 1.0);
    t.few *= tile_masked, t.some *= tile_masked, t.many *= tile_masked;
    return t;
}
/* Whether all blocks of attention_short, of 8 rows and so many warps, are resident at once. */
static inline bool short_at_once(const cuda_call &s, const attention_params &p, int64_t warps)
{
    return attention_tiles(p, 8) * attention_pairs(p) * warps <= s.gpu.sm_count * SHORT_AT_ONCE;
}
/* Which tiles are faster: of 16 rows, perhaps with parts that a second launch merges; of some more; or of many. */
struct tile_choice {
    bool few, few_split, some;
};
static inline tile_choice tile_choice_of(const cuda_call &s, const attention_params &p)
{
    if (p.d > 128 || p.dv > 128) {
        constexpr int64_t FEW_STEPS = 384, LEAST_STEPS = 128; /* of 16 rows and 64 keys */
        const int64_t steps = attention_tiles(p, 16) * attention_pairs(p) * ceil_div(p.n, 64);
        const bool some = attention_tiles(p, 128) * attention_pairs(p) * 4 < s.gpu.sm_count * 3;
        return {steps <= FEW_STEPS, steps <= LEAST_STEPS, some};
    }
    const attention_times t = attention_times_of(s, p);
    const bool few = attention_rows_of(p) <= 16 || (t.few < t.some && t.few < t.many);
    return {few, few, t.some < t.many};
}
/* Calls of few rows, and of some more. */
template <typename T, class FEW, class SOME>
static adze_status attention_few(const cuda_call &s, const attention_params &p, tile_choice choice)
{
    const int64_t room = s.gpu.block_shared;
    const bool some = choice.some;
    const int64_t enough = adze_cuda_clusters(s.device) ? CLUSTER_MAX : 1;
    const bool some_split = key_parts(s, p, SOME::ROWS, PART_LEAST, PARTS_MAX) > 2 * enough;
    if (s.takes(FEW_SPLIT, FEW::SHARED <= room && split_parts(s, p, FEW::ROWS) > 1, choice.few_split))
        return split_launch<T>(s, p, split_parts(s, p, FEW::ROWS), tile_launch<T, FEW>);
    if (s.takes(FEW_ROWS, FEW::SHARED <= room, choice.few))
        return tile_launch<T, FEW>(s, p, attention_clusters<FEW>(s, p));
    if (s.takes(SOME_SPLIT, SOME::SHARED <= room && split_parts(s, p, SOME::ROWS) > 1, some && some_split))
        return split_launch<T>(s, p, split_parts(s, p, SOME::ROWS), tile_launch<T, SOME>);
    if (s.takes(SOME_ROWS, SOME::SHARED <= room, some))
        return tile_launch<T, SOME>(s, p, attention_clusters<SOME>(s, p));
    return ADZE_NO_KERNEL;
}

#endif
