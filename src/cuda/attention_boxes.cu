/* attention_boxes.cu - attention of few rows on Hopper: which calls attention_boxes.cuh takes, in which blocks. */
#include "attention_boxes.cuh"

#include "attention_run.cuh"

/* A multiprocessor has several SMALL blocks where shared memory has room, and one LARGE block, of which clusters are
   made. A cluster shares rows of a power of 2 of elements: of 192 there are only tiles. KEY: elements of a row of
   keys that are multiplied, at most. */
template <int D, int KEY, int UNITS, int WARPS, int BLOCKS, int STAGES_>
struct boxes_attention : direct_attention<D, 1, UNITS, WARPS, BLOCKS> {
    static constexpr int STAGES = STAGES_, CHUNKS = KEY / 32, Q_VECTORS = CHUNKS;
    static_assert(STAGES <= BOXES_STAGES && KEY % 32 == 0 && KEY <= D, "");
};
typedef boxes_attention<64, 64, 2, 4, 3, 2> SMALL_64;
typedef boxes_attention<64, 64, 2, 8, 1, 3> LARGE_64;
typedef boxes_attention<128, 96, 1, 4, 2, 2> SMALL_96;
typedef boxes_attention<128, 96, 1, 8, 1, 2> LARGE_96;
typedef boxes_attention<128, 128, 1, 4, 2, 2> SMALL_128;
typedef boxes_attention<128, 128, 1, 8, 1, 2> LARGE_128;
typedef boxes_attention<192, 192, 1, 6, 1, 2> SMALL_192;
typedef boxes_attention<256, 256, 1, 4, 1, 2> SMALL_256;

enum {
    BOXES_BYTES = 8 << 20,         /* of keys and values, from which on boxes are better than attention_cluster, */
    BOXES_FEW_BYTES = 2 << 20,     /* and where that would need a second launch, and boxes have none */
    BOXES_MASKED_BYTES = 12 << 20, /* the same with a mask: warps wait for the masks of their steps, and
                                      attention_cluster has more of them; */
    BOXES_WIDE_BYTES = 1 << 20,    /* but pads heads beyond 128 elements to 256; */
    BOXES_CAPPED_BYTES = 24 << 20, /* and the same with a softcap */
    BOXES_ROW = 112,               /* bytes of a row of a box, at least, that are the keys': it takes as long with
                                      fewer, so that many keys of 40, 80 or 96 elements come slower in boxes, */
    BOXES_NARROW_BYTES = 48 << 20, /* but for so few in heads beyond 64 elements */
    BOXES_LEAST = 256,             /* keys of a pair, at least, */
    BOXES_LEAST_WIDE = 128,        /* and in heads beyond 128 elements: attention_cluster pads them to 256 */
    BOXES_CLUSTERS = 8,            /* blocks of a cluster, at most */
    BOXES_KEYS = 1 << 28,          /* keys of a pair, at most: steps times parts is an int */
    BOXES_STATIC = 1 << 10         /* shared memory of a block that is not dynamic, at most */
};

struct boxes_plan {
    int64_t parts;
    bool clustered, large; /* a cluster's blocks may be LARGE */
    double time;           /* microseconds */
};
/* What the choice needs of a shape: the blocks of a multiprocessor, the keys of a step, the bytes that a block takes
   in a microsecond at most. */
struct boxes_shape {
    int64_t blocks, warps, keys;
    double rate;
};
template <class S>
static boxes_shape boxes_shape_of(const attention_params &p)
{
    constexpr double WARP_RATE = 6e3; /* of a warp, of full rows: cautious */
    return {S::BLOCKS, S::ALONG, S::KEYS, WARP_RATE * S::ALONG * (p.d + p.dv) / (2 * S::D)};
}

/* Estimated times, of what memory takes or of the blocks of a round, and fixed costs. The rates are those of
   attention_ring.cuh on an H200. Random calls of up to 130 MB took 5 to 19 % less time than attention_cluster, and
   larger ones as much (2026-11-18). */
constexpr double BOXES_MEMORY = 4.5e6; /* bytes in a microsecond */
static double boxes_round(double blocks, double bytes, double rate)
{
    constexpr double TILE = 0.7;
    return blocks > 0 ? TILE + std::max(blocks * bytes / BOXES_MEMORY, bytes / rate) : 0;
}
static double boxes_time(const cuda_call &s, const attention_params &p, const boxes_shape &of, double bytes,
                         int64_t parts)
{
    constexpr double COMBINE = 2.5; /* the second launch */
    const int64_t tiles = attention_pairs(p) * parts, once = s.gpu.sm_count * of.blocks;
    const double each = bytes / (double)tiles;
    return (double)(tiles / once) * boxes_round((double)once, each, of.rate) +
           boxes_round((double)(tiles % once), each, of.rate) + (parts > 1 ? COMBINE : 0);
}
/* The best of clusters of large blocks, where all run at once; clusters of small ones; and tiles. */
static boxes_plan boxes_plan_of(const cuda_call &s, const attention_params &p, const boxes_shape &small,
                                const boxes_shape &clustered, const boxes_shape *large)
{
    constexpr double SUMS = 0.3; /* of a cluster */
    const int64_t pairs = attention_pairs(p);
    const double bytes = (double)pairs * (double)p.n * (p.d + p.dv) * 2;
    const auto enough = [&](const boxes_shape &of, int64_t parts) {
        return ceil_div(p.n, of.keys) >= parts * of.warps;
    };
    boxes_plan best = {1, false, false, boxes_time(s, p, small, bytes, 1)};
    for (int64_t parts = 2; parts <= PARTS_MAX && enough(small, parts); parts++) {
        const double time = boxes_time(s, p, small, bytes, parts);
        if (time < best.time)
            best = {parts, false, false, time};
    }
    for (int64_t size = 2; size <= BOXES_CLUSTERS; size *= 2) {
        const int64_t at_once = adze_cuda_clustered(s.device, (int)size), blocks = pairs * size;
        const double each = bytes / (double)blocks;
        const auto time = [&](const boxes_shape &of) { return boxes_round((double)blocks, each, of.rate) + SUMS; };
        if (enough(clustered, size) && pairs <= at_once * clustered.blocks && time(clustered) < best.time)
            best = {size, true, false, time(clustered)};
        if (large && enough(*large, size) && pairs <= at_once && time(*large) < best.time)
            best = {size, true, true, time(*large)};
    }
    return best;
}
static boxes_plan boxes_plan_of(const cuda_call &s, const attention_params &p)
{
    const int widest = std::max(p.d, p.dv);
    if (widest <= 64) {
        const boxes_shape small = boxes_shape_of<SMALL_64>(p), large = boxes_shape_of<LARGE_64>(p);
        return boxes_plan_of(s, p, small, small, &large);
    }
    if (widest <= 128) {
        const boxes_shape small = boxes_shape_of<SMALL_128>(p), large = boxes_shape_of<LARGE_128>(p);
        return boxes_plan_of(s, p, small, small, &large);
    }
    const boxes_shape clustered = boxes_shape_of<SMALL_256>(p);
    return boxes_plan_of(s, p, widest <= 192 ? boxes_shape_of<SMALL_192>(p) : clustered, clustered, NULL);
}

template <class S>
static int boxes_most()
{
    constexpr int RANKS = (S::D & (S::D - 1)) == 0 ? BOXES_CLUSTERS : 1;
    return attention_boxes_shape<S>::shared(S::STAGES, RANKS) + BOXES_STATIC;
}
static bool boxes_can(const cuda_call &s, const attention_params &p)
{
    const int most =
        std::max({boxes_most<LARGE_64>(), boxes_most<LARGE_128>(), boxes_most<SMALL_192>(), boxes_most<SMALL_256>()});
    return adze_cuda_clusters(s.device) && most <= s.gpu.block_shared && p.d <= 256 && p.dv <= 256 && p.n > 0 &&
           p.n <= BOXES_KEYS && !p.page && !p.packed && !p.k_offsets && !p.lengths && !p.window &&
           attention_rows_of(p) <= SMALL_64::ROWS && attention_forward(p, p.n, p.kv_heads, p.k_stride) &&
           attention_forward(p, p.n, p.kv_heads, p.v_stride);
}
int64_t attention_boxes_parts(const cuda_call &s, const attention_params &p)
{
    if (!boxes_can(s, p))
        return 1;
    const boxes_plan plan = boxes_plan_of(s, p);
    return plan.clustered ? 1 : plan.parts;
}

/* Whether keys fill little of the rows of their boxes, of PANEL bytes: attention_cluster has no such rows. Of heads
   beyond 128 elements it takes longer, as it pads them to 256. */
static bool boxes_narrow(const attention_params &p)
{
    constexpr int PANEL = 128;
    const int bytes = std::min(p.d, p.dv) * 2;
    return std::max(p.d, p.dv) <= 128 && bytes < (int)ceil_div(bytes, PANEL) * BOXES_ROW;
}

template <typename T, class S>
static adze_status boxes_launch(const cuda_call &s, attention_params p, const boxes_plan &plan)
{
    constexpr bool BF16 = std::is_same<T, bf16>::value;
    const int64_t k_shape[4] = {p.sequences, p.kv_heads, p.n, p.d};
    const int64_t v_shape[4] = {p.sequences, p.kv_heads, p.n, p.dv};
    const int64_t pairs = attention_pairs(p), tiles = pairs * plan.parts, sms = s.gpu.sm_count;
    const boxes_tiles of = {(int)ceil_div(p.n, S::KEYS), (int)pairs, (int)tiles};
    boxes_maps maps = {};
    if (!s.choice->dry && (!panel_map(maps.k, BF16, p.k, k_shape, p.k_stride, S::KEYS) ||
                           !panel_map(maps.v, BF16, p.v, v_shape, p.v_stride, S::KEYS)))
        return ADZE_NO_KERNEL;
    p.parts = (int)plan.parts, p.clustered = plan.clustered, p.stages = S::STAGES;
    /* Launched early, the next kernel would put blocks on the idle multiprocessors, and fewer on the others. */
    p.next_late = plan.large && tiles * 10 < sms * 9;
    const int64_t ranks = plan.clustered ? plan.parts : 1;
    return launch(
        s, attention_boxes<T, S>, plan.clustered ? ranks : std::min<int64_t>(tiles, sms * S::BLOCKS),
        dim3(S::THREADS),
        launch_shape(attention_boxes_shape<S>::shared(S::STAGES, (int)ranks), ranks, plan.clustered ? pairs : 1), p,
        maps, of);
}
template <typename T>
static adze_status boxes_launch(const cuda_call &s, const attention_params &p, const boxes_plan &plan)
{
    const int widest = std::max(p.d, p.dv);
    if (widest <= 64)
        return plan.large ? boxes_launch<T, LARGE_64>(s, p, plan) : boxes_launch<T, SMALL_64>(s, p, plan);
    if (widest <= 128 && p.d <= 96)
        return plan.large ? boxes_launch<T, LARGE_96>(s, p, plan) : boxes_launch<T, SMALL_96>(s, p, plan);
    if (widest <= 128)
        return plan.large ? boxes_launch<T, LARGE_128>(s, p, plan) : boxes_launch<T, SMALL_128>(s, p, plan);
    return widest <= 192 && !plan.clustered ? boxes_launch<T, SMALL_192>(s, p, plan)
                                            : boxes_launch<T, SMALL_256>(s, p, plan);
}
template <typename T>
static adze_status boxes_run(const cuda_call &s, const attention_params &p, const boxes_plan &plan)
{
    if (plan.parts == 1 || plan.clustered)
        return boxes_launch<T>(s, p, plan);
    return split_launch<T>(s, p, plan.parts, [&](const cuda_call &its, const attention_params &q, int64_t, bool) {
        return boxes_launch<T>(its, q, plan);
    });
}
adze_status attention_boxes_run(const cuda_call &s, const attention_params &p, bool is_bf16)
{
    if (!boxes_can(s, p))
        return ADZE_NO_KERNEL;
    const boxes_plan plan = boxes_plan_of(s, p);
    const double bytes = (double)attention_pairs(p) * (double)p.n * (p.d + p.dv) * 2;
    const int widest = std::max(p.d, p.dv);
    const direct_plan direct = direct_plan_of(s, p, widest > 64 && widest <= 128 ? 3 : 2); /* as tile_run has it */
    const bool launches = direct.parts > 1 && !direct.clustered && (plan.parts == 1 || plan.clustered);
    const double least = p.softcap != 0 ? BOXES_CAPPED_BYTES
                         : p.mask_kind  ? (widest > 128 ? BOXES_WIDE_BYTES : BOXES_MASKED_BYTES)
                         : launches     ? BOXES_FEW_BYTES
                                        : BOXES_BYTES;
    const bool narrow = !p.mask_kind && boxes_narrow(p) && (widest <= 64 || bytes > BOXES_NARROW_BYTES);
    const bool worth = p.n >= (widest > 128 ? BOXES_LEAST_WIDE : BOXES_LEAST) && bytes >= least && !narrow;
    if (!s.takes(BOXES_8, true, worth))
        return ADZE_NO_KERNEL;
    return is_bf16 ? boxes_run<bf16>(s, p, plan) : boxes_run<f16>(s, p, plan);
}
