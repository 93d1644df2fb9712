/* attention_run.cuh - host: how many parts the keys of a call have, and the launches of attention_tile.cuh
   and attention_direct.cuh. */
#ifndef ADZE_CUDA_ATTENTION_RUN_CUH
#define ADZE_CUDA_ATTENTION_RUN_CUH

#include "attention_direct.cuh"

enum { DIRECT_8, DIRECT_16, FEW_ROWS, FEW_SPLIT, SOME_ROWS, SOME_SPLIT, MANY_ROWS, WGMMA_ROWS, ANY_CALL };

/* attention_quantised.cu: calls of f16 or bf16 whose keys are i8 or f8e4m3. */
adze_status attention_quantised(const cuda_call &s, const attention_params &p, bool is_bf16);
/* attention_sm90.cu: calls of f16 or bf16 with many rows, on Hopper. */
adze_status attention_many(const cuda_call &s, const attention_params &p, bool is_bf16);

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

/* In how many parts blocks take the keys: as many as fill every multiprocessor twice, of `least` keys or more. */
static inline int64_t key_parts(const cuda_call &s, const attention_params &p, int64_t rows, int64_t least,
                                int64_t most)
{
    const int64_t blocks = attention_tiles(p, rows) * attention_pairs(p);
    const int64_t parts = s.gpu.sm_count * 2 / blocks, enough = p.n / least;
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

template <typename T, class S>
static adze_status tile_launch(const cuda_call &s, attention_params p, int64_t parts, bool split = false)
{
    p.parts = (int)parts, p.clustered = !split && parts > 1;
    return launch(s, attention_tile<T, S>, attention_tiles(p, S::ROWS) * parts, dim3(S::THREADS),
                  launch_shape(S::SHARED, split ? 1 : parts, attention_pairs(p)), p);
}
/* The same with parts in scratch, and a second launch that merges them. */
template <typename T, typename LAUNCH>
static adze_status split_launch(const cuda_call &s, attention_params p, int64_t parts, LAUNCH tiles)
{
    const int64_t rows = attention_out_rows(p);
    p.part_sums = reinterpret_cast<float2 *>(p.part_values + rows * parts * p.dv);
    ADZE_CHECK(tiles(s, p, parts, true));
    p.parts = (int)parts;
    return launch(s, attention_combine<T>, rows, dim3(COMBINE_THREADS), launch_shape(0), p);
}

/* The parts of a call of few rows: as few as leave little of the last round of blocks empty, of which a
   multiprocessor has two at once. Clusters in place of the second launch were slower: on an H200 (2026-11-17) 32
   clusters of 4 blocks, of which each had a multiprocessor to itself, did not run at once. One block for each
   multiprocessor leaves room for the kernel after it, and was slower too, alone and in a model. */
enum { DIRECT_LEAST = 64 }; /* keys of a part */
static inline int64_t direct_parts(const cuda_call &s, const attention_params &p, int64_t rows)
{
    const int64_t blocks = attention_tiles(p, rows) * attention_pairs(p), at_once = s.gpu.sm_count * 2;
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
template <typename T, class S>
static adze_status direct_launch(const cuda_call &s, attention_params p, int64_t parts, bool)
{
    p.parts = (int)parts;
    return launch(s, attention_direct<T, S>, attention_tiles(p, S::ROWS) * parts, dim3(S::THREADS),
                  launch_shape(S::SHARED, 1, attention_pairs(p)), p);
}
template <typename T, class S>
static adze_status direct_run(const cuda_call &s, const attention_params &p, int variant)
{
    const int64_t parts = direct_parts(s, p, S::ROWS);
    if (!s.takes(variant, !p.packed && p.page % 16 == 0 && attention_rows_of(p) <= S::ROWS))
        return ADZE_NO_KERNEL;
    return parts > 1 ? split_launch<T>(s, p, parts, direct_launch<T, S>) : direct_launch<T, S>(s, p, 1, false);
}
/* Calls of up to 8 rows, and up to 16. */
template <typename T, class S8, class S16>
static adze_status direct_run(const cuda_call &s, const attention_params &p)
{
    const adze_status status = direct_run<T, S8>(s, p, DIRECT_8);
    return status != ADZE_NO_KERNEL ? status : direct_run<T, S16>(s, p, DIRECT_16);
}

/* Calls of few rows, and if `some` those of some more. */
template <typename T, class FEW, class SOME>
static adze_status attention_few(const cuda_call &s, const attention_params &p, bool some)
{
    const int64_t rows = attention_rows_of(p), room = s.gpu.block_shared;
    const int64_t enough = adze_cuda_clusters(s.device) ? CLUSTER_MAX : 1;
    const bool some_split = key_parts(s, p, SOME::ROWS, PART_LEAST, PARTS_MAX) > enough;
    if (s.takes(FEW_SPLIT, FEW::SHARED <= room && split_parts(s, p, FEW::ROWS) > 1, rows <= FEW::ROWS))
        return split_launch<T>(s, p, split_parts(s, p, FEW::ROWS), tile_launch<T, FEW>);
    if (s.takes(FEW_ROWS, FEW::SHARED <= room, rows <= FEW::ROWS))
        return tile_launch<T, FEW>(s, p, attention_clusters<FEW>(s, p));
    if (s.takes(SOME_SPLIT, SOME::SHARED <= room && split_parts(s, p, SOME::ROWS) > 1, some && some_split))
        return split_launch<T>(s, p, split_parts(s, p, SOME::ROWS), tile_launch<T, SOME>);
    if (s.takes(SOME_ROWS, SOME::SHARED <= room, some))
        return tile_launch<T, SOME>(s, p, attention_clusters<SOME>(s, p));
    return ADZE_NO_KERNEL;
}

#endif
