/* attention_run.cuh - host: how many parts the keys of a call have, and the launch of attention_tile.cuh. */
#ifndef ADZE_CUDA_ATTENTION_RUN_CUH
#define ADZE_CUDA_ATTENTION_RUN_CUH

#include "attention_tile.cuh"

enum { FEW_ROWS, FEW_SPLIT, SOME_ROWS, SOME_SPLIT, MANY_ROWS, WGMMA_ROWS, ANY_CALL };

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
template <typename T, class S>
static adze_status split_launch(const cuda_call &s, attention_params p)
{
    const int64_t parts = split_parts(s, p, S::ROWS), rows = attention_out_rows(p);
    p.part_sums = reinterpret_cast<float2 *>(p.part_values + rows * parts * p.dv);
    ADZE_CHECK((tile_launch<T, S>(s, p, parts, true)));
    p.parts = (int)parts;
    return launch(s, attention_combine<T>, rows, dim3(COMBINE_THREADS), launch_shape(0), p);
}

/* Calls of few rows, and if `some` those of some more. */
template <typename T, class FEW, class SOME>
static adze_status attention_few(const cuda_call &s, const attention_params &p, bool some)
{
    const int64_t rows = attention_rows_of(p), room = s.gpu.block_shared;
    const int64_t enough = adze_cuda_clusters(s.device) ? CLUSTER_MAX : 1;
    const bool some_split = key_parts(s, p, SOME::ROWS, PART_LEAST, PARTS_MAX) > enough;
    if (s.takes(FEW_SPLIT, FEW::SHARED <= room && split_parts(s, p, FEW::ROWS) > 1, rows <= FEW::ROWS))
        return split_launch<T, FEW>(s, p);
    if (s.takes(FEW_ROWS, FEW::SHARED <= room, rows <= FEW::ROWS))
        return tile_launch<T, FEW>(s, p, attention_clusters<FEW>(s, p));
    if (s.takes(SOME_SPLIT, SOME::SHARED <= room && split_parts(s, p, SOME::ROWS) > 1, some && some_split))
        return split_launch<T, SOME>(s, p);
    if (s.takes(SOME_ROWS, SOME::SHARED <= room, some))
        return tile_launch<T, SOME>(s, p, attention_clusters<SOME>(s, p));
    return ADZE_NO_KERNEL;
}

#endif
