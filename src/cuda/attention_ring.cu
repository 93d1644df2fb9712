/* attention_ring.cu - attention of few rows on Hopper: which calls attention_ring.cuh takes, and in which blocks.

   The thresholds are from sweeps on an H200 (2026-11-18) over 1 to 512 pairs of a sequence and a head of k and 256 to
   65536 keys, with blocks, stages, parts and clusters of several sizes, and from decode steps of whole models. More
   and smaller blocks are faster in isolation. In a decode step they are slower: they are spread unevenly over the
   multiprocessors, and so are the blocks of the kernels that follow. */
#include "attention_ring.cuh"

#include "attention_run.cuh"

/* Blocks of 4 and 8 warps. Of those of 8 a multiprocessor has one, of those of 4 with three stages two. */
template <int WARPS>
using ring_attention = direct_attention<128, 1, 1, WARPS, 8 / WARPS>;

enum {
    RING_KEYS = 32768,      /* keys of all pairs, from which on rings are faster than attention_cluster */
    RING_SOME_KEYS = 49152, /* the same for more than RING_FEW_PAIRS pairs and up to RING_SOME_PAIRS */
    RING_FEW_PAIRS = 8,
    RING_SOME_PAIRS = 33,
    RING_LEAST = 256,        /* keys of a pair, at least */
    RING_MANY_KEYS = 131072, /* keys of all pairs, from which on even rounds of blocks are worth a second launch */
    RING_WHOLE = 512,        /* keys of a part, from which on a multiprocessor's block is of 8 warps */
    RING_CLUSTERS = 8,       /* blocks of a cluster of whole multiprocessors, at most */
    RING_STATIC = (9 << 10), /* shared memory of a block that is not dynamic, at most */
};

struct ring_plan {
    int warps, stages;
    int64_t parts;
    bool clustered, next_late;
    bool worth; /* faster than attention_cluster */
};
static ring_plan ring_plan_of(const cuda_call &s, const attention_params &p)
{
    const int64_t pairs = attention_pairs(p), sms = s.gpu.sm_count;
    const int64_t seen = p.window ? std::min<int64_t>(p.n, p.window + p.m) : p.n;
    const int64_t least = pairs > RING_FEW_PAIRS && pairs <= RING_SOME_PAIRS ? RING_SOME_KEYS : RING_KEYS;
    ring_plan plan = {4, 3, 1, false, false, seen >= RING_LEAST && pairs * seen >= least};
    if (pairs > sms) {
        if (pairs > 2 * sms && !p.window && pairs * seen >= RING_MANY_KEYS)
            plan.parts = direct_parts(s, p);
        return plan;
    }
    plan.stages = 2;
    /* One block per multiprocessor. A cluster saves the second launch, but clusters cannot use every multiprocessor.
     */
    plan.parts = std::min<int64_t>(sms / pairs, PARTS_MAX);
    int64_t size = 1;
    while (size * 2 <= plan.parts && size < RING_CLUSTERS)
        size *= 2;
    if (size > 1 && pairs <= adze_cuda_clustered(s.device, (int)size) && pairs * size * 10 >= sms * 7)
        plan.clustered = true, plan.parts = size;
    plan.warps = seen >= plan.parts * RING_WHOLE ? 8 : 4;
    /* Launched early, the next kernel would put blocks on the idle multiprocessors, and fewer on the others. */
    plan.next_late = plan.warps == 8 && pairs * plan.parts * 10 < sms * 9;
    return plan;
}

static bool ring_can(const cuda_call &s, const attention_params &p)
{
    const int64_t most = attention_ring_shape<ring_attention<8>>::shared(2, true, RING_CLUSTERS) + RING_STATIC;
    return adze_cuda_clusters(s.device) && p.d == 128 && p.dv == 128 && p.k_stride[2] == p.d &&
           p.v_stride[2] == p.dv && !p.packed && !p.k_offsets && p.page % 16 == 0 &&
           attention_rows_of(p) <= ring_attention<8>::ROWS && most <= s.gpu.block_shared;
}
int64_t attention_ring_parts(const cuda_call &s, const attention_params &p)
{
    if (!ring_can(s, p))
        return 1;
    const ring_plan plan = ring_plan_of(s, p);
    return plan.clustered ? 1 : plan.parts;
}

template <typename T, int WARPS>
static adze_status ring_launch(const cuda_call &s, attention_params p, const ring_plan &plan)
{
    typedef ring_attention<WARPS> S;
    const int parts = (int)plan.parts;
    p.parts = parts, p.clustered = plan.clustered, p.stages = plan.stages, p.next_late = plan.next_late;
    return launch(s, attention_ring<T, S>, parts, dim3(S::THREADS),
                  launch_shape(attention_ring_shape<S>::shared(plan.stages, plan.clustered, parts),
                               plan.clustered ? parts : 1, attention_pairs(p)),
                  p);
}
template <typename T>
static adze_status ring_run(const cuda_call &s, const attention_params &p, const ring_plan &plan)
{
    const auto run = [&](const cuda_call &its, const attention_params &q, int64_t, bool) {
        return plan.warps == 4 ? ring_launch<T, 4>(its, q, plan) : ring_launch<T, 8>(its, q, plan);
    };
    return plan.parts == 1 || plan.clustered ? run(s, p, 1, false) : split_launch<T>(s, p, plan.parts, run);
}
adze_status attention_ring_run(const cuda_call &s, const attention_params &p, bool is_bf16)
{
    const bool can = ring_can(s, p);
    const ring_plan plan = can ? ring_plan_of(s, p) : ring_plan();
    /* Its warps wait for the masks of their steps: 16.0 us for 13.7 in attention_cluster, 54 for 49 in boxes (H200,
       2026-11-19). */
    if (!s.takes(RING_8, can, plan.worth && !p.mask_kind))
        return ADZE_NO_KERNEL;
    return is_bf16 ? ring_run<bf16>(s, p, plan) : ring_run<f16>(s, p, plan);
}
