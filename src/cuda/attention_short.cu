/* attention_short.cu - attention of 16-bit elements over few keys: which calls attention_short.cuh takes. */
#include "attention_run.cuh"
#include "attention_short.cuh"

template <class S>
static int64_t short_warps(const attention_params &p)
{
    return p.n > S::KEYS ? ceil_div(p.n, S::KEYS) : 1;
}
template <typename T, class S>
static adze_status short_launch(const cuda_call &s, attention_params p)
{
    const int64_t warps = short_warps<S>(p), shared = warps * S::ROWS * S::MERGE_PITCH * 4;
    return launch(s, attention_short<T, S>, attention_tiles(p, S::ROWS), dim3((unsigned)warps * 32),
                  launch_shape(warps > 1 ? (size_t)shared : 0, 1, attention_pairs(p)), p);
}
/* FEW is for keys that one warp has, MANY for more, in as few warps as possible. Of up to 16 rows, calls whose blocks
   are all resident at once were faster here than by any other kernel (H200, 2026-11-18). But others do not load keys
   that a window hides, or a length. */
template <typename T, class FEW, class MANY>
static adze_status short_run(const cuda_call &s, const attention_params &p)
{
    constexpr int64_t DIRECT_BLOCKS = FEW::D == 128 ? 3 : 2; /* of the kernel that would have the call */
    constexpr int64_t FEW_KEYS = 64;
    const int64_t warps = short_warps<MANY>(p);
    const attention_times t = attention_times_of(s, p);
    const bool all_seen = !p.lengths && attention_extent_of(p, p.m).most * 2 > (double)p.n;
    const bool whole = p.n <= FEW_KEYS || all_seen || direct_plan_of(s, p, DIRECT_BLOCKS).parts == 1;
    const bool faster = attention_rows_of(p) > 16 ? t.in_short < std::min({t.few, t.some, t.many})
                                                  : whole && short_at_once(s, p, warps);
    if (!s.takes(SHORT, warps <= MANY::ALONG, faster))
        return ADZE_NO_KERNEL;
    return p.n <= FEW::KEYS ? short_launch<T, FEW>(s, p) : short_launch<T, MANY>(s, p);
}
template <typename T>
static adze_status short_run(const cuda_call &s, const attention_params &p)
{
    if (p.d <= 64 && p.dv <= 64)
        return short_run<T, short_attention<64, 2>, short_attention<64, 4>>(s, p);
    if (p.d <= 128 && p.dv <= 128)
        return short_run<T, short_attention<128, 2>, short_attention<128, 2>>(s, p);
    return short_run<T, short_attention<256, 1>, short_attention<256, 1>>(s, p);
}
adze_status attention_few_keys(const cuda_call &s, const attention_params &p, bool is_bf16)
{
    if (p.packed || p.page || p.k_offsets)
        return ADZE_NO_KERNEL;
    return is_bf16 ? short_run<bf16>(s, p) : short_run<f16>(s, p);
}
