/* gemm with quantised weights and up to 16 tokens on CUDA: the shapes of gemm_compact.cuh, and which of them a call
   takes. */
#include "gemm_compact.cuh"

/* Warps, units of their rings, or in registers, blocks of a multiprocessor, times 8 tokens. */
template <weight_format F, compact_scales C, bool NORM>
using COMPACT_8 = compact_shape<16, 0, 2, 2, 1, F, C, NORM>;
template <weight_format F, compact_scales C, bool NORM>
using COMPACT_8_RING = compact_shape<16, 3, 0, 2, 1, F, C, NORM>;
template <weight_format F, compact_scales C>
using COMPACT_16 = compact_shape<16, 4, 0, 1, 2, F, C, false, true>;

/* Runs the shape of a variant with `each` blocks on a multiprocessor, or with `ask` says only whether it can:
   ADZE_NO_KERNEL. */
template <typename T, class S>
static adze_status compact_launch(const cuda_call &s, const gemm_params &p, int64_t each, bool ask)
{
    if (!compact_takes<S>(p))
        return ADZE_NO_KERNEL;
    const size_t all = (size_t)s.gpu.block_shared, part = (all + 1024) / S::BLOCKS - 1024; /* CUDA has 1024 of each */
    compact_call c = {};
    int64_t blocks = 0;
    /* Where shared memory has no room for the sums of so many rows, more blocks follow each other. A block that has a
       multiprocessor to itself comes before those. */
    for (int64_t times = 1; times <= 8 && c.bytes == 0; times++) {
        blocks = std::min<int64_t>(s.gpu.sm_count * each * times, p.n);
        c = compact_call_of<S>(p, blocks, part);
        if (c.bytes == 0 && S::BLOCKS > 1) {
            blocks = std::min<int64_t>(s.gpu.sm_count * times, p.n);
            c = compact_call_of<S>(p, blocks, all);
        }
    }
    if (c.bytes == 0)
        return ADZE_NO_KERNEL;
    return ask ? ADZE_OK
               : launch(s, gemm_compact<T, S>, blocks, dim3(S::THREADS),
                        launch_shape(gemm_alone(s, c.bytes, S::BLOCKS)), p, c);
}
template <typename T, weight_format F, compact_scales C>
static adze_status compact_shape_run(const cuda_call &s, const gemm_params &p, int shape, bool ask)
{
    switch (shape) {
    case GEMM_COMPACT_8: {
        const int64_t each = p.m <= 2 ? 2 : 1;
        return p.norm ? compact_launch<T, COMPACT_8<F, C, true>>(s, p, each, ask)
                      : compact_launch<T, COMPACT_8<F, C, false>>(s, p, each, ask);
    }
    case GEMM_COMPACT_8_RING:
        if constexpr (F != OF_U4)
            return p.norm ? compact_launch<T, COMPACT_8_RING<F, C, true>>(s, p, 2, ask)
                          : compact_launch<T, COMPACT_8_RING<F, C, false>>(s, p, 2, ask);
        return ADZE_NO_KERNEL;
    default: return compact_launch<T, COMPACT_16<F, C>>(s, p, 1, ask);
    }
}
template <typename T>
static adze_status compact_run(const cuda_call &s, const gemm_params &p, int shape, bool ask)
{
    const int scale_dtype = p.part[0].n ? p.part[0].scale_dtype : p.part[1].n ? p.part[1].scale_dtype : 0;
    if (p.format == OF_I8)
        return compact_shape_run<T, OF_I8, ROW_SCALES>(s, p, shape, ask);
    if (p.format == OF_F8)
        return p.group ? compact_shape_run<T, OF_F8, F32_SCALES>(s, p, shape, ask)
                       : compact_shape_run<T, OF_F8, ROW_SCALES>(s, p, shape, ask);
    return scale_dtype == ADZE_F32   ? compact_shape_run<T, OF_U4, F32_SCALES>(s, p, shape, ask)
           : scale_dtype == ADZE_F16 ? compact_shape_run<T, OF_U4, F16_SCALES>(s, p, shape, ask)
                                     : compact_shape_run<T, OF_U4, BF16_SCALES>(s, p, shape, ask);
}
extern "C" adze_status gemm_compact_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, int ask)
{
    if (p.format == OF_X || p.m == 0 || p.n == 0)
        return ADZE_NO_KERNEL;
    return dtype == ADZE_BF16 ? compact_run<bf16>(s, p, shape, ask) : compact_run<f16>(s, p, shape, ask);
}

/* The shape that takes a call, -1: none. From sweeps on an H200 (2026-11-17) over 4096 x 4096, 8192 x 8192, 14336 x
   4096 and the products of a layer: weights go straight into registers, those of i8 through rings with one or two
   tokens, and with more where they are LARGE, which takes nine tenths of the time (2026-11-19). More than U4_TOKENS
   have faster kernels (2026-11-18). */
extern "C" int gemm_compact_choice(const cuda_call &s, const gemm_params &p, int dtype)
{
    constexpr int64_t LARGE = 20 << 20;
    const bool rings = p.format == OF_I8 && (p.m <= 2 || p.n * (p.glu ? 2 : 1) * p.k >= LARGE);
    if (rings && gemm_compact_run(s, p, dtype, GEMM_COMPACT_8_RING, 1) == ADZE_OK)
        return GEMM_COMPACT_8_RING;
    constexpr int64_t U4_TOKENS = 12;
    for (int shape : {GEMM_COMPACT_8, GEMM_COMPACT_16})
        if ((p.format != OF_U4 || p.m <= U4_TOKENS) && gemm_compact_run(s, p, dtype, shape, 1) == ADZE_OK)
            return shape;
    return -1;
}
