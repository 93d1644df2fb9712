/* gemm with weights at any address on CUDA: the shapes of gemm_shifted.cuh, and which of them a call takes. */
#include "gemm_shifted.cuh"

#include <algorithm>
#include <string.h>

/* Tiles of rows and tokens, warps, blocks of a multiprocessor, whether k is shared. Blocks that leave room for those
   of the next kernel hide its start. */
template <weight_format F>
using SHIFTED_8 = shifted_shape<2, 1, 8, 2, true, F>;
template <weight_format F>
using SHIFTED_8_TWICE = shifted_shape<4, 1, 8, 2, false, F>;
template <weight_format F>
using SHIFTED_16 = shifted_shape<2, 2, 8, F == OF_F8 ? 1 : 2, true, F>; /* or registers are too few */
template <weight_format F>
using SHIFTED_16_F32 = shifted_shape<4, 2, 8, 1, true, F>; /* its x takes more registers */
template <weight_format F>
using SHIFTED_32 = shifted_shape<4, 4, 8, 1, true, F>;
using SHIFTED_32_X = shifted_shape<2, 4, 8, 2, true, OF_X>;

/* How a call is divided: tokens of a block, warps that share k, blocks that do, and blocks of rows; and about how
   many cycles it takes. */
struct shifted_plan {
    int tokens, slices, parts;
    int64_t blocks;
    size_t bytes; /* of shared memory */
    double time;
};
/* Cycles of an H200, fitted to 869 times of 282 random calls (2026-11-19). What multiplies 16-bit x takes no time
   beside what loads it. */
enum {
    SHIFTED_ROUND = 4200,   /* of a round of blocks */
    SHIFTED_ALONE = 2800,   /* of blocks that leave no room for those of the next kernel */
    SHIFTED_WHOLE = 570,    /* less without SPLITS: code that runs once is read sooner */
    SHIFTED_GLU = 640,      /* of sums of gate and value */
    SHIFTED_CLUSTER = 2300, /* of clusters, for each block of a multiprocessor */
    SHIFTED_LATENCY = 1490, /* of a step, at least */
    SHIFTED_ROWS = 32,      /* of 16 rows of weights in a warp's step, */
    SHIFTED_SCALES = 32,    /* of their groups' scales, */
    SHIFTED_X = 46,         /* and of 64 bytes of x of 8 tokens */
    SHIFTED_END = 4,        /* of an output */
};
/* Of 16 rows of weights in a warp's step with an x of f32: they are unpacked, and multiplied with 8 tokens. */
template <typename T, weight_format F>
constexpr int shifted_unpack = sizeof(T) == 2 ? 0
                               : F == OF_U4   ? 168
                                              : 50;

/* As ceil_div, of numbers below 2^52: a plan has many, and divisions of doubles take a fraction of the time. */
static int64_t ceil_ratio(int64_t a, int64_t b)
{
    return (int64_t)((double)(a + b - 1) / (double)b);
}
template <typename T, class S>
static shifted_plan shifted_division(const cuda_call &s, const gemm_params &p, int slices, int parts)
{
    const int64_t tile = p.glu ? 8 : 16, groups = S::WARPS / slices, most_rows = groups * S::ROWS,
                  steps = ceil_ratio(p.k, S::STEP), sm_count = s.gpu.sm_count;
    auto bytes_of = [&](int64_t tokens) {
        return shifted_layout_of<S>((int)most_rows, tokens, p.k, p.group, gemm_has_zero(p)).bytes;
    };
    shifted_plan plan = {};
    int64_t most = S::TOKENS;
    while (most > 0 && bytes_of(most) > (size_t)s.gpu.block_shared)
        most--;
    if (most == 0 || (!S::SPLITS && p.m > most) || parts > steps)
        return plan;
    const int64_t token_tiles = ceil_ratio(p.m, most), shared = token_tiles * parts; /* blocks with the same rows */
    /* As many blocks on each multiprocessor, in whole rounds of those that are there at once, unless that leaves them
       less than a tile for each group of warps. */
    const int64_t rows = p.glu ? most_rows / 2 : most_rows;
    const int64_t clustered = parts > 1 ? (int64_t)adze_cuda_clustered(s.device, parts) * parts : sm_count;
    const int64_t at_once =
        clustered * (ceil_ratio(p.n, groups * tile) * shared >= clustered * S::BLOCKS ? S::BLOCKS : 1);
    if (at_once == 0)
        return plan;
    const int64_t full = ceil_ratio(ceil_ratio(p.n, rows) * shared, at_once) * at_once / shared;
    plan.blocks = std::min(p.n, std::max(ceil_ratio(p.n, rows), full));
    plan.tokens = (int)ceil_ratio(p.m, token_tiles), plan.slices = slices, plan.parts = parts;
    plan.bytes = bytes_of(plan.tokens);

    const int64_t all = plan.blocks * shared, each = std::min<int64_t>(S::BLOCKS, ceil_ratio(all, sm_count));
    const int64_t of_block = ceil_ratio(p.n, plan.blocks),
                  tiles = std::min<int64_t>(S::ROW_TILES, ceil_ratio(ceil_ratio(of_block, tile), groups));
    const double x = (double)SHIFTED_X * S::TOKEN_TILES * S::PIECES * (int)(sizeof(T) / 2);
    const double unpack = shifted_unpack<T, S::FORMAT>;
    const double rows_step = SHIFTED_ROWS + (p.group ? SHIFTED_SCALES : 0) + S::TOKEN_TILES * unpack;
    const double warp_step = (double)tiles * rows_step + x;
    const double step = std::max((double)SHIFTED_LATENCY, (double)(each * S::WARPS) * warp_step);
    const double ends = (double)(each * of_block * plan.tokens) / parts * SHIFTED_END;
    plan.time = (S::BLOCKS == 1 ? SHIFTED_ALONE : 0) - (S::SPLITS ? 0 : SHIFTED_WHOLE) + (p.glu ? SHIFTED_GLU : 0) +
                (parts > 1 ? (double)SHIFTED_CLUSTER * (double)all / (double)sm_count : 0) +
                (double)ceil_ratio(all, sm_count * each) *
                    (SHIFTED_ROUND + (double)ceil_ratio(ceil_ratio(steps, parts), slices) * step + ends);
    return plan;
}
/* The division that takes least time; tokens 0: the shape does not take the call. */
template <typename T, class S>
static shifted_plan shifted_plan_of(const cuda_call &s, const gemm_params &p)
{
    const int64_t most = 1 << 28;
    /* The order of a sum depends on how a call is divided, and so on the number of tokens. */
    bool can = adze_cuda_tensor_cores(s.device) && p.k > 0 && p.k < most && p.n < most && p.rows.rank == 1 &&
               p.batches == 1 && !p.norm && !p.batch_invariant && p.m <= 1 << 16;
    can = can && (p.group == 0 || p.group % S::STEP == 0);
    for (const gemm_part &part : p.part)
        can = can && (part.n == 0 || (part.scale_dtype == p.part[0].scale_dtype && !part.zero == !p.part[0].zero));
    shifted_plan best = {};
    auto take = [&](int slices, int parts) {
        const shifted_plan plan = shifted_division<T, S>(s, p, slices, parts);
        if (plan.tokens && (best.tokens == 0 || plan.time < best.time))
            best = plan;
    };
    for (int slices = S::WARPS; can && slices >= (S::SPLITS ? 1 : S::WARPS); slices /= 2)
        take(slices, 1);
    for (int parts = 4; can && S::SPLITS && adze_cuda_clusters(s.device) && parts <= 8; parts *= 2)
        take(S::WARPS, parts);
    return best;
}

/* Runs a shape, or with `ask` says only whether it can: ADZE_NO_KERNEL. `time`: the cycles of its plan. */
template <typename T, class S>
static adze_status shifted_shape_run(const cuda_call &s, const gemm_params &p, bool ask, double *time)
{
    const shifted_plan plan = shifted_plan_of<T, S>(s, p);
    if (plan.tokens == 0)
        return ADZE_NO_KERNEL;
    if (time)
        *time = plan.time;
    if (ask)
        return ADZE_OK;
    return launch(s, gemm_shifted<T, S>, plan.blocks * plan.parts, dim3(S::THREADS),
                  launch_shape(plan.bytes, plan.parts, ceil_div(p.m, plan.tokens)), p, plan.tokens, plan.slices);
}
template <typename T, weight_format F>
static adze_status shifted_format_run(const cuda_call &s, const gemm_params &p, int shape, bool ask, double *time)
{
    if constexpr (sizeof(T) == 4) {
        switch (shape) {
        case GEMM_SHIFTED_8: return shifted_shape_run<T, SHIFTED_8<F>>(s, p, ask, time);
        case GEMM_SHIFTED_16: return shifted_shape_run<T, SHIFTED_16_F32<F>>(s, p, ask, time);
        default: return ADZE_NO_KERNEL;
        }
    } else {
        switch (shape) {
        case GEMM_SHIFTED_8: return shifted_shape_run<T, SHIFTED_8<F>>(s, p, ask, time);
        case GEMM_SHIFTED_8_TWICE: /* quantised weights go with more of x, which it loads for more rows */
            if constexpr (F != OF_X)
                return shifted_shape_run<T, SHIFTED_8_TWICE<F>>(s, p, ask, time);
            return ADZE_NO_KERNEL;
        case GEMM_SHIFTED_16: return shifted_shape_run<T, SHIFTED_16<F>>(s, p, ask, time);
        default:
            if constexpr (F == OF_X)
                return shifted_shape_run<T, SHIFTED_32_X>(s, p, ask, time);
            else
                return shifted_shape_run<T, SHIFTED_32<F>>(s, p, ask, time);
        }
    }
}
template <typename T>
static adze_status shifted_dtype_run(const cuda_call &s, const gemm_params &p, int shape, bool ask, double *time)
{
    switch (p.format) {
    case OF_X:
        if constexpr (sizeof(T) == 2)
            return shifted_format_run<T, OF_X>(s, p, shape, ask, time);
        return ADZE_NO_KERNEL;
    case OF_I8: return shifted_format_run<T, OF_I8>(s, p, shape, ask, time);
    case OF_F8: return shifted_format_run<T, OF_F8>(s, p, shape, ask, time);
    default: return shifted_format_run<T, OF_U4>(s, p, shape, ask, time);
    }
}
static adze_status shifted_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, bool ask, double *time)
{
    if (p.x_scale)
        return ADZE_NO_KERNEL;
    switch (dtype) {
    case ADZE_F32: return shifted_dtype_run<float>(s, p, shape, ask, time);
    case ADZE_F16: return shifted_dtype_run<f16>(s, p, shape, ask, time);
    default: return shifted_dtype_run<bf16>(s, p, shape, ask, time);
    }
}
extern "C" adze_status gemm_shifted_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, int ask)
{
    return shifted_run(s, p, dtype, shape, ask, NULL);
}

/* The shape that takes least time, -1: none takes the call. Shapes of twice as many tokens as the call has, or more,
   do not. Plans take microseconds of the host, and a call asks up to three times: the thread keeps its last answer.
 */
extern "C" int gemm_shifted_choice(const cuda_call &s, const gemm_params &p, int dtype, double *time)
{
    static thread_local struct {
        gemm_params p;
        int device, dtype, best;
        double time;
        bool known;
    } last;
    if (!last.known || last.device != s.device || last.dtype != dtype || memcmp(&last.p, &p, sizeof p) != 0) {
        last.best = -1;
        const int shapes = p.m <= 8 ? GEMM_SHIFTED_16 : p.m <= 16 ? GEMM_SHIFTED_32 : GEMM_SHIFTED_SHAPES;
        double its;
        for (int shape = 0; shape < shapes; shape++)
            if (shifted_run(s, p, dtype, shape, true, &its) == ADZE_OK && (last.best < 0 || its < last.time))
                last.time = its, last.best = shape;
        memcpy(&last.p, &p, sizeof p);
        last.device = s.device, last.dtype = dtype, last.known = true;
    }
    *time = last.time;
    return last.best;
}
