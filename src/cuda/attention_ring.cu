/* attention_ring.cu - attention of few rows over many keys on Hopper: which calls attention_ring.cuh takes. */
#include "attention_ring.cuh"

#include "attention_run.cuh"

typedef direct_attention<128, 1, 1, 4, 2> ring_attention;
enum {
    RING_LEAST = 256, /* keys of a part */
    RING_SHARED =
        attention_ring_shape<ring_attention>::SHARED + (6 << 10) /* of a block, with all that is not rings */
};

template <typename T>
static adze_status ring_launch(const cuda_call &s, attention_params p, int64_t parts)
{
    p.parts = (int)parts, p.clustered = false;
    return launch(s, attention_ring<T, ring_attention>, parts, dim3(ring_attention::THREADS),
                  launch_shape(attention_ring_shape<ring_attention>::SHARED, 1, attention_pairs(p)), p);
}
template <typename T>
static adze_status ring_run(const cuda_call &s, const attention_params &p, int64_t parts)
{
    if (parts == 1)
        return ring_launch<T>(s, p, 1);
    return split_launch<T>(s, p, parts, [](const cuda_call &its, const attention_params &q, int64_t of, bool) {
        return ring_launch<T>(its, q, of);
    });
}
adze_status attention_ring_run(const cuda_call &s, const attention_params &p, bool is_bf16)
{
    const bool can = adze_cuda_clusters(s.device) && p.d == 128 && p.dv == 128 && p.k_stride[2] == p.d &&
                     p.v_stride[2] == p.dv && !p.packed && !p.k_offsets && p.page % 16 == 0 &&
                     attention_rows_of(p) <= ring_attention::ROWS && RING_SHARED <= s.gpu.block_shared;
    const direct_plan plan = direct_plan_of(s, p, ring_attention::BLOCKS);
    /* Preferred where it was measured on an H200 (2026-11-18): one query, which sees all keys. */
    const bool all = p.m == 1 && !p.lengths && !p.page && !p.window && !p.mask_kind && p.softcap == 0;
    if (!s.takes(RING_8, can && !plan.clustered, all && p.n >= plan.parts * RING_LEAST))
        return ADZE_NO_KERNEL;
    return is_bf16 ? ring_run<bf16>(s, p, plan.parts) : ring_run<f16>(s, p, plan.parts);
}
