/* gemm_swapped_sm90.cu - products of 17 tokens and more on Hopper: the shapes of gemm_swapped.cuh, and which of them
   a call takes. */
#include "gemm_swapped.cuh"

/* Runs a shape, or with `ask` says only whether it can: ADZE_NO_KERNEL. `time`: the cycles that the plan says it
 * takes. */
template <typename T, class S>
static adze_status shape_run(const cuda_call &s, const gemm_params &p, bool ask, double *time)
{
    constexpr bool OF_BYTES = S::FORMAT != OF_X;
    constexpr int W_SIZE = OF_BYTES ? 1 : 2;        /* of an element, as the map counts them */
    constexpr int64_t X_VECTOR = S::BYTES ? 16 : 8; /* elements of 16 bytes */
    const int64_t tokens = ceil_div(p.m, S::TOKENS);
    bool can = s.gpu.sm == 90 && adze_cuda_clusters(s.device) && S::SHARED <= s.gpu.block_shared;
    can = can && p.group % S::DEPTH == 0 && !p.norm && p.batches == 1 && (!p.batch_invariant || S::BYTES);
    can = can && p.k % weight_vector(S::FORMAT) == 0 && p.rows.stride[GEMM_X][0] >= p.k;
    can = can && p.rows.rank == 1 && (uintptr_t)p.x % 16 == 0 && p.rows.stride[GEMM_X][0] % X_VECTOR == 0;
    can = can && p.k > 0 && p.k < 1 << 28 && p.n < 1 << 28 && tokens < 0x7fffffff / 8 / gemm_tiles(p, S::ROWS / 4);
    const int64_t w_columns = S::FORMAT == OF_U4 ? p.k / 2 : p.k;
    for (const gemm_part &part : p.part)
        can = can && (part.n == 0 || ((uintptr_t)part.w % 16 == 0 && part.w_stride % 16 == 0 &&
                                      part.w_stride >= w_columns * W_SIZE));
    if (!can || (ask && !time))
        return can ? ADZE_OK : ADZE_NO_KERNEL;
    const swapped_plan plan = swapped_plan_of<S>(s, p);
    if (time)
        *time = plan.time;
    if (ask)
        return ADZE_OK;
    constexpr CUtensorMapDataType OF_T =
        std::is_same<T, bf16>::value ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    swapped_maps maps = {};
    can = panel_map_of(maps.x, S::BYTES ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : OF_T, S::BYTES ? 1 : 2, p.x,
                       {1, 1, p.m, p.k}, {0, 0, p.rows.stride[GEMM_X][0]}, S::TOKENS);
    for (int i = 0; i < GEMM_PARTS; i++)
        if (p.part[i].n)
            can = can && panel_map_of(maps.w[i], OF_BYTES ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : OF_T, W_SIZE, p.part[i].w,
                                      {1, 1, p.part[i].n, w_columns}, {0, 0, p.part[i].w_stride / W_SIZE}, plan.strip,
                                      S::W_ROW);
    if (!can)
        return ADZE_NO_KERNEL;
    const int64_t tiles = gemm_tiles(p, plan.strip * (p.glu ? S::STRIPS / 2 : S::STRIPS));
    return launch(s, gemm_swapped<T, S>, tokens * tiles * plan.parts, dim3(S::THREADS),
                  launch_shape(S::SHARED, plan.parts), p, maps, (int)tokens, plan.strip);
}
template <typename T, weight_format F, bool TABLED, bool BYTES = false>
static adze_status format_run(const cuda_call &s, const gemm_params &p, int shape, bool ask, double *time)
{
    constexpr bool UNPACKS = F != OF_X && !BYTES; /* only then many rows gain by more warps */
    switch (shape) {
    case GEMM_SWAPPED_32X128: return shape_run<T, swapped_shape<32, 2, F, TABLED, BYTES>>(s, p, ask, time);
    case GEMM_SWAPPED_64X128: return shape_run<T, swapped_shape<64, 2, F, TABLED, BYTES>>(s, p, ask, time);
    case GEMM_SWAPPED_32X256:
        if constexpr (UNPACKS)
            return shape_run<T, swapped_shape<32, 4, F, TABLED, BYTES>>(s, p, ask, time);
        return ADZE_NO_KERNEL;
    default:
        if constexpr (UNPACKS && !(F == OF_F8 && TABLED)) /* for which registers are too few */
            return shape_run<T, swapped_shape<64, 4, F, TABLED, BYTES>>(s, p, ask, time);
        return ADZE_NO_KERNEL;
    }
}
template <typename T>
static adze_status dtype_run(const cuda_call &s, const gemm_params &p, int shape, bool ask, double *time)
{
    switch (p.format) {
    case OF_X: return format_run<T, OF_X, false>(s, p, shape, ask, time);
    case OF_I8:
        return p.group ? format_run<T, OF_I8, true>(s, p, shape, ask, time)
                       : format_run<T, OF_I8, false>(s, p, shape, ask, time);
    case OF_F8:
        return p.group ? format_run<T, OF_F8, true>(s, p, shape, ask, time)
                       : format_run<T, OF_F8, false>(s, p, shape, ask, time);
    default: return format_run<T, OF_U4, true>(s, p, shape, ask, time);
    }
}
static adze_status swapped_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, bool ask, double *time)
{
    if (p.x_scale)
        return p.format == OF_I8 ? format_run<f16, OF_I8, false, true>(s, p, shape, ask, time) : ADZE_NO_KERNEL;
    return dtype == ADZE_BF16 ? dtype_run<bf16>(s, p, shape, ask, time) : dtype_run<f16>(s, p, shape, ask, time);
}
extern "C" adze_status gemm_swapped_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, int ask)
{
    return swapped_run(s, p, dtype, shape, ask, NULL);
}

/* The shape that takes a call, and how many cycles its plan says; -1: none. */
extern "C" int gemm_swapped_choice(const cuda_call &s, const gemm_params &p, int dtype, double *time)
{
    /* It takes 17 tokens and more: at most 64 of weights of x's dtype, or of quantised x. Of x that is not quantised
       it also takes 9 to 16 tokens, with quantised weights, short rows of gate and up, and the weights below. */
    const int64_t rows = ceil_div(p.n * (p.glu ? 2 : 1), s.gpu.sm_count);
    /* Weights of x's dtype: long rows, of which a multiprocessor has one or a few, as a cluster's blocks have a part
       of k each: 13 tokens, 128 rows of 12288 took 9.0 us, 17.0 streamed. And LARGE weights: 13 tokens, 16320 x 12568
       took 114 us, 144 streamed (H200, 2026-11-19). */
    constexpr int64_t LARGE = 1 << 27;
    const bool plain = (rows <= 2 ? p.k > 3584 : rows <= 12 && p.k >= 8192) || p.n * (p.glu ? 2 : 1) * p.k >= LARGE;
    const bool gated = p.glu && rows > 40 && p.k <= 2048;
    const bool few = p.m > 8 && p.m <= 16 && !p.x_scale && (p.format != OF_X || gated || plain);
    const bool some = few || (p.m > 16 && (p.m <= 64 || (p.format != OF_X && !p.x_scale)));
    int best = -1;
    double its;
    *time = 1e30;
    for (int shape = 0; some && shape < GEMM_SWAPPED_SHAPES; shape++)
        if (swapped_run(s, p, dtype, shape, true, &its) == ADZE_OK && its < *time)
            *time = its, best = shape;
    return best;
}
