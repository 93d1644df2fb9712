/* attention_tf32.cu - attention of floats on tensor cores: which shape of block takes a call. */
#include "attention_run.cuh"
#include "attention_tf32.cuh"

#include <algorithm>

/* 8 warps on a multiprocessor, for their registers: in two blocks where shared memory has room. Where rows are short
   a warp has two fragments of them, which share the parts of keys and values. */
template <int D>
using TF32_64 = tf32_shape<D, (D > 64 ? 1 : 2), (D > 192 ? 8 : 4), (D > 64 && D <= 128 ? 64 : 32),
                           (D > 192 || D <= 64 ? 2 : 4), (D > 192 ? 1 : 2)>;
/* For GPUs whose blocks have less of it, and for few tiles. */
template <int D>
using TF32_SMALL = tf32_shape<D, 1, 4, (D > 128 && D <= 192 ? 16 : 32), (D > 192 ? 2 : 4), (D > 192 ? 1 : 2)>;
/* One fragment of short rows: three blocks on a multiprocessor. */
typedef tf32_shape<64, 1, 4, 32, 4, 3> TF32_SHORT;

template <class S>
static adze_status tf32_run(const cuda_call &s, const attention_params &p)
{
    return floats_run<S, attention_of_tf32<float, S>>(s, p, TF32_MANY, adze_cuda_tensor_cores(s.device), true);
}
template <int D>
static adze_status tf32_run(const cuda_call &s, const attention_params &p)
{
    if constexpr (D <= 64) {
        /* A round of its blocks takes 0.9 of that of the larger ones, on an H200 (2026-11-18). */
        const auto rounds = [&](int64_t rows, int64_t blocks) {
            return (double)ceil_div(attention_tiles(p, rows) * attention_pairs(p), blocks * s.gpu.sm_count);
        };
        if (rounds(TF32_SHORT::ROWS, TF32_SHORT::BLOCKS) * 0.9 < rounds(TF32_64<D>::ROWS, TF32_64<D>::BLOCKS))
            return tf32_run<TF32_SHORT>(s, p);
    }
    if constexpr (TF32_64<D>::SHARED > (99 << 10)) { /* else every GPU has room */
        /* Few tiles have parts of the keys in blocks of their own: the smaller its step, the more of them. */
        const bool few = TF32_SMALL<D>::KEYS < TF32_64<D>::KEYS &&
                         attention_tiles(p, TF32_SMALL<D>::ROWS) * attention_pairs(p) * 2 <= s.gpu.sm_count;
        if (few || TF32_64<D>::SHARED > s.gpu.block_shared)
            return tf32_run<TF32_SMALL<D>>(s, p);
    }
    return tf32_run<TF32_64<D>>(s, p);
}
adze_status attention_tf32(const cuda_call &s, const attention_params &p)
{
    const int widest = p.d > p.dv ? p.d : p.dv;
    return widest <= 64    ? tf32_run<64>(s, p)
           : widest <= 128 ? tf32_run<128>(s, p)
           : widest <= 192 ? tf32_run<192>(s, p)
                           : tf32_run<256>(s, p);
}
int64_t attention_tf32_parts(const cuda_call &s, const attention_params &p)
{
    return std::max(split_parts(s, p, TF32_64<64>::ROWS), split_parts(s, p, TF32_64<128>::ROWS));
}
