/* norm_shapes.cuh - the shapes that norm_registers is compiled for, and which calls take which. */
#ifndef ADZE_CUDA_NORM_SHAPES_CUH
#define ADZE_CUDA_NORM_SHAPES_CUH

#include "norm_registers.cuh"

enum norm_rows { ANY, ABOUT_ONE, FEW, MANY }; /* rows per SM: any, 1/2 to 2, up to 8, more */

struct norm_shape {
    int lanes, each;  /* LANES and VECTORS of norm_registers */
    bool full, early; /* FULL and EARLY */
    int most, blocks; /* MOST and BLOCKS */
    norm_rows rows;   /* the rows per SM that the shape is for */
    int from, to;     /* vectors of a row, at least and at most */
    int waste;        /* idle vector slots of the threads, at most, in eighths */
};

/* From sweeps on an H200: a call takes the first shape that fits. Short rows take a part of a warp. Few rows take
   two vectors per thread, which has the lowest latency. Many rows take more where a row has many threads, or where
   some would idle. Where the bounds allow too many registers, the compiler keeps more loads in flight than helps;
   with too few it spills. */
/* clang-format off */
constexpr norm_shape RMS[] = {
    {8, 1, true, true, 512, 0, ANY, 8, 8, 0},
    {8, 2, true, true, 512, 1, ANY, 16, 16, 0},
    {4, 1, false, true, 512, 0, ANY, 1, 4, 8},
    {4, 2, false, true, 512, 0, ANY, 5, 8, 8},
    {8, 2, false, true, 512, 0, ANY, 9, 16, 8},
    {8, 3, false, true, 512, 0, ANY, 17, 22, 8},
    {16, 2, false, true, 512, 0, ANY, 23, 32, 8},
    {0, 2, true, true, 512, 1, ABOUT_ONE, 1, 1024, 0},
    {0, 2, true, true, 384, 3, FEW, 1, 768, 0},
    {0, 2, true, true, 512, 1, FEW, 1, 1024, 0},
    {0, 2, false, true, 512, 2, FEW, 1, 1024, 8},
    {0, 2, true, true, 512, 3, ANY, 1, 255, 0},
    {0, 2, true, true, 512, 3, ANY, 257, 511, 0},
    {0, 5, false, true, 256, 3, ANY, 512, 512, 2},
    {0, 2, false, true, 512, 2, ANY, 1, 64, 8},
    {0, 4, true, false, 512, 2, ANY, 2048, 2048, 0},
    {0, 4, true, true, 512, 2, ANY, 256, 2048, 0},
    {0, 5, false, true, 256, 3, ANY, 129, 1280, 1},
    {0, 4, false, true, 448, 2, ANY, 1, 1792, 8},
    {0, 8, true, false, 512, 2, ANY, 1, 4096, 0},
    {0, 8, false, false, 512, 0, ANY, 1, 4096, 8},
};
constexpr norm_shape LAYER[] = {
    {8, 1, true, true, 512, 0, ANY, 8, 8, 0},
    {8, 2, true, true, 512, 0, ANY, 16, 16, 0},
    {4, 1, false, true, 512, 0, ANY, 1, 4, 8},
    {4, 2, false, true, 512, 0, ANY, 5, 8, 8},
    {8, 2, false, true, 512, 0, ANY, 9, 16, 8},
    {8, 3, false, true, 512, 0, ANY, 17, 22, 8},
    {16, 2, false, true, 512, 0, ANY, 23, 32, 8},
    {0, 1, true, true, 512, 2, FEW, 1, 128, 0},
    {0, 2, true, true, 512, 2, FEW, 1, 1024, 0},
    {0, 2, false, true, 512, 2, FEW, 1, 1024, 8},
    {0, 4, true, false, 512, 2, ANY, 256, 2048, 0},
    {0, 3, true, false, 512, 2, ANY, 96, 768, 0},
    {0, 2, true, true, 512, 2, ANY, 1, 512, 0},
    {0, 2, false, true, 512, 2, ANY, 1, 64, 8},
    {0, 5, false, false, 512, 2, ANY, 129, 1280, 1},
    {0, 4, false, false, 512, 2, ANY, 1, 1792, 8},
    {0, 8, true, false, 512, 0, ANY, 1, 4096, 0},
    {0, 8, false, false, 512, 0, ANY, 1, 4096, 8},
};
constexpr norm_shape RMS_SUM[] = {
    {4, 2, false, true, 512, 0, ANY, 1, 8, 8},
    {8, 2, false, true, 512, 0, ANY, 9, 16, 8},
    {16, 2, false, true, 512, 0, ANY, 17, 32, 8},
    {0, 4, true, true, 512, 2, MANY, 256, 256, 0},
    {0, 2, true, true, 512, 2, ANY, 1, 1024, 0},
    {0, 2, false, true, 512, 2, ANY, 1, 1024, 8},
    {0, 4, true, true, 512, 2, ANY, 1, 2048, 0},
    {0, 8, true, true, 512, 0, ANY, 1, 4096, 0},
    {0, 8, false, true, 512, 0, ANY, 1, 4096, 8},
};
constexpr norm_shape RMS_ADDED[] = {
    {0, 2, true, true, 512, 2, ANY, 1, 1024, 0},
    {0, 2, false, true, 512, 2, ANY, 1, 1024, 8},
    {0, 4, false, false, 448, 2, ANY, 1, 1792, 8},
};
constexpr norm_shape LAYER_SUM[] = {
    {4, 2, false, true, 512, 0, ANY, 1, 8, 8},
    {8, 2, false, true, 512, 0, ANY, 9, 16, 8},
    {16, 2, false, true, 512, 0, ANY, 17, 32, 8},
    {0, 4, true, false, 512, 2, MANY, 256, 256, 0},
    {0, 2, true, true, 512, 2, ANY, 1, 1024, 0},
    {0, 4, false, false, 512, 2, MANY, 129, 1792, 8},
    {0, 2, false, true, 512, 2, ANY, 1, 1024, 8},
    {0, 4, true, false, 512, 2, ANY, 1, 2048, 0},
    {0, 8, true, false, 512, 0, ANY, 1, 4096, 0},
    {0, 8, false, false, 512, 0, ANY, 1, 4096, 8},
};
constexpr norm_shape MODULATION[] = {
    {4, 1, false, true, 512, 0, ANY, 1, 4, 8},
    {8, 2, false, true, 512, 0, ANY, 5, 16, 8},
    {16, 2, false, true, 512, 0, ANY, 17, 32, 8},
    {0, 3, true, true, 256, 3, FEW, 1, 384, 0},
    {0, 3, true, true, 256, 4, ANY, 384, 384, 0},
    {0, 4, true, true, 256, 3, ANY, 1, 512, 0},
    {0, 3, true, true, 256, 3, ANY, 1, 288, 0},
    {0, 5, false, true, 512, 1, ANY, 129, 480, 1},
    {0, 2, true, true, 512, 2, ANY, 1, 256, 0},
    {0, 2, false, true, 512, 2, ANY, 1, 256, 8},
    {0, 4, true, false, 512, 2, ANY, 1, 2048, 0},
    {0, 4, false, false, 448, 2, ANY, 1, 1792, 8},
};
constexpr norm_shape GATED[] = {
    {0, 2, true, true, 384, 3, ANY, 1, 768, 0},
    {0, 2, false, true, 384, 3, ANY, 33, 768, 8},
    {0, 4, true, false, 512, 2, ANY, 1, 2048, 0},
    {0, 4, false, false, 448, 2, ANY, 33, 1792, 8},
};
/* With tables, as in LTX-Video. */
constexpr norm_shape TABLED[] = {
    {0, 2, true, true, 256, 5, ANY, 1, 512, 0},
    {0, 4, false, false, 448, 0, ANY, 33, 1792, 8},
};
template <bool ROUND>
constexpr norm_shape TABLED_GATED[] = {
    {0, 2, true, false, 512, ROUND ? 3 : 2, ANY, 1, 1024, 0},
    {0, 4, false, false, 448, 0, ANY, 33, 1792, 8},
};
/* f32 parameters with f16 or bf16 x, as in Wan. */
constexpr norm_shape FLOAT_PARAMS[] = {
    {0, 5, true, false, 448, 0, ANY, 512, 2240, 0},
    {0, 3, true, false, 448, 0, ANY, 1, 1344, 0},
    {0, 4, false, false, 448, 0, ANY, 33, 1792, 8},
};
/* Rare calls have few shapes, since each takes seconds to compile: f32 throughout; no weight; the other modulations
   in float, or with f32 parameters. */
constexpr norm_shape SINGLE[] = {
    {4, 1, false, true, 512, 0, ANY, 1, 4, 8},
    {4, 2, false, true, 512, 0, ANY, 5, 8, 8},
    {8, 2, false, true, 512, 0, ANY, 9, 16, 8},
    {8, 3, false, true, 512, 0, ANY, 17, 22, 8},
    {16, 2, false, true, 512, 0, ANY, 23, 32, 8},
    {0, 2, true, true, 512, 2, ANY, 1, 512, 0},
    {0, 4, true, false, 512, 2, ANY, 1, 2048, 0},
    {0, 4, false, false, 448, 2, ANY, 1, 1792, 8},
    {0, 8, false, false, 512, 0, ANY, 1, 4096, 8},
};
constexpr norm_shape BARE_RMS[] = {
    {8, 2, false, false, 512, 0, ANY, 1, 16, 8},
    {16, 2, false, false, 512, 0, ANY, 17, 32, 8},
    {0, 4, false, false, 448, 2, ANY, 1, 1792, 8},
};
constexpr norm_shape BARE_SUM[] = {
    {0, 8, false, false, 512, 0, ANY, 1, 4096, 8},
};
constexpr norm_shape RARE[] = {
    {0, 4, false, false, 448, 0, ANY, 33, 1792, 8},
};

/* clang-format on */

template <typename T, typename S, bool CENTRED, norm_fusion FUSION, bool ROUND, bool EXTRA>
constexpr const auto &norm_shapes()
{
    if constexpr (FUSION == PLAIN && sizeof(T) == 4)
        return SINGLE;
    else if constexpr (FUSION == PLAIN && CENTRED)
        return LAYER;
    else if constexpr (FUSION == PLAIN && EXTRA)
        return RMS;
    else if constexpr (FUSION == PLAIN)
        return BARE_RMS;
    else if constexpr (FUSION == ADDED)
        return RMS_ADDED;
    else if constexpr (FUSION == RESIDUAL_SUM && !EXTRA)
        return BARE_SUM;
    else if constexpr (FUSION == RESIDUAL_SUM && CENTRED)
        return LAYER_SUM;
    else if constexpr (FUSION == RESIDUAL_SUM)
        return RMS_SUM;
    else if constexpr (EXTRA && !CENTRED && sizeof(S) < 4 && FUSION == BLOCK)
        return TABLED_GATED<ROUND>;
    else if constexpr (EXTRA && !CENTRED && sizeof(S) < 4)
        return TABLED;
    else if constexpr (!EXTRA && CENTRED && FUSION == MODULATED && sizeof(T) < sizeof(S))
        return FLOAT_PARAMS;
    else if constexpr (EXTRA || sizeof(S) == 4 || (!ROUND && (!CENTRED || FUSION == BLOCK)))
        return RARE;
    else if constexpr (FUSION == MODULATED)
        return MODULATION;
    else
        return GATED;
}

constexpr int64_t norm_threads(int lanes, int each, int64_t vectors)
{
    return lanes ? lanes : (vectors + 32 * each - 1) / (32 * each) * 32;
}
static bool norm_fits(const norm_shape &s, int64_t rows, int64_t vectors, int64_t sm_count)
{
    const int64_t threads = norm_threads(s.lanes, s.each, vectors), room = threads * s.each;
    const bool as_many = s.rows == ABOUT_ONE ? rows * 2 >= sm_count && rows <= sm_count * 2
                         : s.rows == FEW     ? rows <= sm_count * 8
                         : s.rows == MANY    ? rows > sm_count * 8
                                             : true;
    return as_many && vectors >= s.from && vectors <= s.to && threads <= s.most &&
           (s.full ? room == vectors : (room - vectors) * 8 <= room * s.waste);
}

#endif
