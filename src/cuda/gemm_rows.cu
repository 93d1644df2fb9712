/* gemm of few tokens on CUDA, at any alignment: the launches of gemm_rows.cuh. */
#include "gemm_rows.cuh"

/* Warps that share a tile, as a power of two: so many that all multiprocessors have WARPS_EACH, whose loads hide the
   latency of memory, and that each has a step. Those of a block do not depend on the number of tokens. Blocks of a
   cluster share a tile too where the call need not be batch-invariant. */
struct rows_slices {
    int in_block, blocks; /* powers of two */
};
static rows_slices rows_slices_of(const cuda_call &s, const gemm_params &p, int64_t tiles, int64_t tokens,
                                  int64_t words)
{
    enum { WARPS_EACH = 24, MOST_BLOCKS = 3 };
    const int64_t want = ceil_div((int64_t)WARPS_EACH * s.gpu.sm_count, tiles * p.batches);
    rows_slices slices = {};
    while (1 << slices.in_block < ROWS_WARPS && 1 << slices.in_block < want &&
           (int64_t)128 << slices.in_block <= words)
        slices.in_block++;
    const bool may = 1 << slices.in_block == ROWS_WARPS && !p.batch_invariant && adze_cuda_clusters(s.device);
    while (may && slices.blocks < MOST_BLOCKS && (int64_t)2 * ROWS_WARPS * tokens << slices.blocks <= want &&
           (int64_t)128 * ROWS_WARPS << slices.blocks <= words)
        slices.blocks++;
    return slices;
}

template <typename T, weight_format F, int TOKENS>
static adze_status rows_launch(const cuda_call &s, const gemm_params &p)
{
    const int64_t tiles = gemm_tiles(p, p.glu ? ROWS_TILE / 2 : ROWS_TILE), tokens = ceil_div(p.m, TOKENS);
    const rows_slices slices = rows_slices_of(s, p, tiles, tokens, rows_word<T, F>::words(p.k));
    const int64_t blocks = ceil_div(tiles, ROWS_WARPS >> slices.in_block) * tokens;
    return launch(s, gemm_few_rows<T, F, TOKENS>, blocks << slices.blocks, dim3(ROWS_WARPS * 32),
                  launch_shape(0, 1 << slices.blocks, p.batches), p, tiles, (int)tokens, slices.in_block);
}
template <typename T, weight_format F>
static adze_status rows_launch(const cuda_call &s, const gemm_params &p)
{
    return p.m == 1   ? rows_launch<T, F, 1>(s, p)
           : p.m == 2 ? rows_launch<T, F, 2>(s, p)
           : p.m <= 4 ? rows_launch<T, F, 4>(s, p)
                      : rows_launch<T, F, ROWS_MOST_TOKENS>(s, p);
}
template <typename T>
static adze_status rows_launch(const cuda_call &s, const gemm_params &p)
{
    switch (p.format) {
    case OF_X: return rows_launch<T, OF_X>(s, p);
    case OF_I8: return rows_launch<T, OF_I8>(s, p);
    case OF_F8: return rows_launch<T, OF_F8>(s, p);
    default: return rows_launch<T, OF_U4>(s, p);
    }
}

extern "C" adze_status gemm_rows_run(const cuda_call &s, const gemm_params &p, int dtype, int ask)
{
    const int64_t most = 0x7fffffff, tokens = ceil_div(p.m, ROWS_MOST_TOKENS);
    if (p.norm || p.x_scale || p.k >= 1 << 28 || p.batches > 65535 || p.n > most / 2 || tokens > most / 8 / (p.n + 2))
        return ADZE_NO_KERNEL;
    if (ask)
        return ADZE_OK;
    switch (dtype) {
    case ADZE_F32: return rows_launch<float>(s, p);
    case ADZE_F16: return rows_launch<f16>(s, p);
    default: return rows_launch<bf16>(s, p);
    }
}
