/* norm_shapes.cuh - the shapes that norm_registers is compiled for, and which calls take which. */
#ifndef ADZE_CUDA_NORM_SHAPES_CUH
#define ADZE_CUDA_NORM_SHAPES_CUH

#include "norm_registers.cuh"

#include <stdio.h>

/* What an instance of norm_registers is compiled for. */
struct norm_shape {
    int lanes;   /* of a warp that share a row; 0: the threads of a block do */
    int vectors; /* of a thread */
    bool full;   /* a row has exactly as many vectors as its threads hold */
    bool early;  /* what multiplies the row is loaded with it */
    int most;    /* threads per block; with `blocks`, it bounds the registers */
    int blocks;  /* per SM, at least; 0: left to the compiler */
};
constexpr bool operator==(const norm_shape &a, const norm_shape &b)
{
    return a.lanes == b.lanes && a.vectors == b.vectors && a.full == b.full && a.early == b.early &&
           a.most == b.most && a.blocks == b.blocks;
}

/* Rows per SM: any, 1/2 to 2, up to 8, up to 32, more than 8. */
enum norm_rows { ANY, ABOUT_ONE, FEW, SEVERAL, MANY };

/* A shape and the calls that it is for. */
struct norm_rule {
    norm_shape shape;
    norm_rows per_sm;
    int from, to; /* vectors of a row */
    int idle;     /* vector slots of the threads that may be idle, in eighths */

    constexpr norm_rule full() const
    {
        norm_rule r = *this;
        r.shape.full = true, r.idle = 0;
        return r;
    }
    constexpr norm_rule late() const /* what multiplies the row is loaded after the sum */
    {
        norm_rule r = *this;
        r.shape.early = false;
        return r;
    }
    constexpr norm_rule blocks(int least) const
    {
        norm_rule r = *this;
        r.shape.blocks = least;
        return r;
    }
    constexpr norm_rule rows(norm_rows which) const
    {
        norm_rule r = *this;
        r.per_sm = which;
        return r;
    }
    constexpr norm_rule vectors(int least, int most) const
    {
        norm_rule r = *this;
        r.from = least, r.to = most;
        return r;
    }
    constexpr norm_rule waste(int eighths) const
    {
        norm_rule r = *this;
        r.idle = eighths;
        return r;
    }
};
/* `count` lanes of a warp, or up to `most` threads of a block, with `vectors` vectors each. */
constexpr norm_rule lanes(int count, int vectors)
{
    return {{count, vectors, false, true, 512, 0}, ANY, 1, 0, 8};
}
constexpr norm_rule threads(int most, int vectors)
{
    return {{0, vectors, false, true, most, 0}, ANY, 1, 0, 8};
}

/* From sweeps on an H200: a call takes the first shape that fits. Short rows take a part of a warp. Few rows take
   two vectors per thread, which has the lowest latency. Many rows take more where a row has many threads, or where
   some would idle. Where the bounds allow too many registers, the compiler keeps more loads in flight than helps;
   with too few it spills. */
/* clang-format off */
constexpr norm_rule RMS[] = {
    lanes(8, 1).full().vectors(8, 8),
    lanes(8, 2).full().blocks(1).vectors(16, 16),
    lanes(4, 1).vectors(1, 4),
    lanes(4, 2).vectors(5, 8),
    lanes(8, 2).vectors(9, 16),
    lanes(8, 3).vectors(17, 22),
    lanes(16, 2).vectors(23, 32),
    threads(512, 2).full().blocks(1).rows(ABOUT_ONE).vectors(1, 1024),
    threads(384, 2).full().blocks(3).rows(FEW).vectors(1, 768),
    threads(512, 2).full().blocks(1).rows(FEW).vectors(1, 1024),
    threads(512, 2).blocks(2).rows(FEW).vectors(1, 1024),
    threads(512, 2).full().blocks(3).vectors(1, 255),
    threads(512, 2).full().blocks(3).vectors(257, 511),
    threads(256, 5).blocks(3).vectors(512, 512).waste(2),
    threads(512, 2).blocks(2).vectors(1, 64),
    threads(512, 4).full().late().blocks(2).vectors(2048, 2048),
    threads(512, 4).full().blocks(2).vectors(256, 2048),
    threads(256, 5).blocks(3).vectors(129, 1280).waste(1),
    threads(448, 4).blocks(2).vectors(1, 1792),
    threads(512, 8).full().late().blocks(2).vectors(1, 4096),
    threads(512, 8).late().vectors(1, 4096),
};
constexpr norm_rule LAYER[] = {
    lanes(8, 2).rows(SEVERAL).vectors(5, 8),
    lanes(16, 2).rows(SEVERAL).vectors(9, 16),
    threads(512, 2).blocks(2).rows(SEVERAL).vectors(17, 22),
    threads(512, 2).blocks(2).rows(ABOUT_ONE).vectors(23, 32),
    lanes(8, 1).full().vectors(8, 8),
    lanes(8, 2).full().vectors(16, 16),
    lanes(4, 1).vectors(1, 4),
    lanes(4, 2).vectors(5, 8),
    lanes(8, 2).vectors(9, 16),
    lanes(8, 3).vectors(17, 22),
    lanes(16, 2).vectors(23, 32),
    threads(512, 1).full().blocks(2).rows(FEW).vectors(1, 128),
    threads(512, 2).full().blocks(2).rows(FEW).vectors(1, 1024),
    threads(512, 2).blocks(2).rows(FEW).vectors(1, 1024),
    threads(512, 4).full().late().blocks(2).vectors(256, 2048),
    threads(512, 3).full().late().blocks(2).vectors(96, 768),
    threads(512, 2).full().blocks(2).vectors(1, 512),
    threads(512, 2).blocks(2).vectors(1, 64),
    threads(512, 5).late().blocks(2).vectors(129, 1280).waste(1),
    threads(512, 4).late().blocks(2).vectors(1, 1792),
    threads(512, 8).full().late().vectors(1, 4096),
    threads(512, 8).late().vectors(1, 4096),
};
constexpr norm_rule RMS_SUM[] = {
    lanes(16, 2).rows(MANY).vectors(9, 16),
    lanes(4, 2).vectors(1, 4),
    lanes(8, 2).vectors(5, 16),
    lanes(16, 2).vectors(17, 32),
    threads(512, 4).full().blocks(2).rows(MANY).vectors(256, 256),
    threads(512, 2).full().blocks(2).vectors(1, 1024),
    threads(512, 2).blocks(2).vectors(1, 1024),
    threads(512, 4).full().blocks(2).vectors(1, 2048),
    threads(512, 8).full().vectors(1, 4096),
    threads(512, 8).vectors(1, 4096),
};
constexpr norm_rule RMS_ADDED[] = {
    threads(512, 2).full().blocks(2).vectors(1, 1024),
    threads(512, 2).blocks(2).vectors(1, 1024),
    threads(448, 4).late().blocks(2).vectors(1, 1792),
};
constexpr norm_rule LAYER_SUM[] = {
    lanes(16, 2).rows(FEW).vectors(9, 16),
    threads(512, 2).blocks(2).rows(SEVERAL).vectors(17, 32),
    lanes(4, 2).vectors(1, 8),
    lanes(8, 2).vectors(9, 16),
    lanes(16, 2).vectors(17, 32),
    threads(512, 4).full().late().blocks(2).rows(MANY).vectors(256, 256),
    threads(512, 2).full().blocks(2).vectors(1, 1024),
    threads(512, 4).late().blocks(2).rows(MANY).vectors(129, 1792),
    threads(512, 2).blocks(2).vectors(1, 1024),
    threads(512, 4).full().late().blocks(2).vectors(1, 2048),
    threads(512, 8).full().late().vectors(1, 4096),
    threads(512, 8).late().vectors(1, 4096),
};
constexpr norm_rule MODULATION[] = {
    lanes(4, 1).vectors(1, 4),
    lanes(8, 2).vectors(5, 16),
    lanes(16, 2).vectors(17, 32),
    threads(256, 3).full().blocks(3).rows(FEW).vectors(1, 384),
    threads(256, 3).full().blocks(4).vectors(384, 384),
    threads(256, 4).full().blocks(3).vectors(1, 512),
    threads(256, 3).full().blocks(3).vectors(1, 288),
    threads(512, 5).blocks(1).vectors(129, 480).waste(1),
    threads(512, 2).full().blocks(2).vectors(1, 256),
    threads(512, 2).blocks(2).vectors(1, 256),
    threads(512, 4).full().late().blocks(2).vectors(1, 2048),
    threads(512, 2).blocks(2).rows(FEW).vectors(257, 1024),
    threads(448, 4).late().blocks(2).vectors(1, 1792),
};
constexpr norm_rule GATED[] = {
    threads(384, 2).full().blocks(3).vectors(1, 768),
    threads(384, 2).blocks(3).vectors(33, 768),
    threads(512, 4).full().late().blocks(2).vectors(1, 2048),
    threads(448, 4).late().blocks(2).vectors(33, 1792),
};
/* With tables, as in LTX-Video. */
constexpr norm_rule TABLED[] = {
    threads(256, 2).full().blocks(5).vectors(1, 512),
    threads(448, 4).late().vectors(33, 1792),
};
template <bool ROUND>
constexpr norm_rule TABLED_GATED[] = {
    threads(512, 2).full().late().blocks(ROUND ? 3 : 2).vectors(1, 1024),
    threads(448, 4).late().vectors(33, 1792),
};
/* f32 parameters with f16 or bf16 x, as in Wan. */
constexpr norm_rule FLOAT_PARAMS[] = {
    threads(448, 5).full().late().vectors(512, 2240),
    threads(448, 3).full().late().vectors(1, 1344),
    threads(448, 4).late().vectors(33, 1792),
};
/* Rare calls have few shapes, since each takes seconds to compile: f32 throughout; no weight; the other modulations
   in float, or with f32 parameters. */
constexpr norm_rule SINGLE[] = {
    lanes(4, 1).vectors(1, 4),
    lanes(4, 2).vectors(5, 8),
    lanes(8, 2).vectors(9, 16),
    lanes(8, 3).vectors(17, 22),
    lanes(16, 2).vectors(23, 32),
    threads(512, 2).full().blocks(2).vectors(1, 512),
    threads(512, 4).full().late().blocks(2).vectors(1, 2048),
    threads(448, 4).late().blocks(2).rows(SEVERAL).vectors(1, 176), /* norm_any is faster for longer rows */
    threads(512, 8).late().vectors(1793, 4096),
};
constexpr norm_rule BARE_RMS[] = {
    lanes(8, 2).late().vectors(1, 16),
    lanes(16, 2).late().vectors(17, 32),
    threads(448, 4).late().blocks(2).vectors(1, 1792),
};
constexpr norm_rule BARE_SUM[] = {
    threads(512, 2).blocks(2).vectors(65, 1024),
    threads(512, 8).late().vectors(1025, 4096),
};
constexpr norm_rule RARE[] = {
    threads(448, 4).late().vectors(33, 1792),
};

/* clang-format on */

/* The rules of a form. */
template <typename FORM>
constexpr const auto &norm_rules()
{
    constexpr bool CENTRED = FORM::CENTRED, ROUND = FORM::ROUND, EXTRA = FORM::EXTRA;
    constexpr norm_fusion FUSION = FORM::FUSION;
    typedef typename FORM::T T;
    typedef typename FORM::S S;
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

/* The shapes of an op, each once: its variants. */
template <int N>
struct norm_shape_list {
    norm_shape shape[N];
    int count;
    constexpr int find(const norm_shape &s) const
    {
        int i = 0;
        while (i < count && !(shape[i] == s))
            i++;
        return i;
    }
};
template <int... N>
constexpr auto norm_collect(const norm_rule (&...tables)[N])
{
    norm_shape_list<(N + ...)> list = {};
    const auto add = [&list](const norm_rule *rules, int count) {
        for (int i = 0; i < count; i++)
            if (list.find(rules[i].shape) == list.count)
                list.shape[list.count++] = rules[i].shape;
    };
    (add(tables, N), ...);
    return list;
}
template <bool CENTRED>
constexpr auto norm_shapes()
{
    if constexpr (CENTRED)
        return norm_collect(LAYER, LAYER_SUM, MODULATION, GATED, FLOAT_PARAMS, SINGLE, BARE_SUM, RARE);
    else
        return norm_collect(RMS, RMS_SUM, RMS_ADDED, MODULATION, GATED, TABLED, TABLED_GATED<false>,
                            TABLED_GATED<true>, SINGLE, BARE_RMS, BARE_SUM, RARE);
}
template <bool CENTRED>
constexpr auto NORM_SHAPES = norm_shapes<CENTRED>();

/* A form as one of its shapes is compiled. */
template <typename FORM, int VARIANT>
struct norm_traits : FORM {
    static constexpr norm_shape SHAPE = NORM_SHAPES<FORM::CENTRED>.shape[VARIANT];
    static constexpr int LANES = SHAPE.lanes, VECTORS = SHAPE.vectors, MOST = SHAPE.most, BLOCKS = SHAPE.blocks;
    static constexpr bool FULL = SHAPE.full, EARLY = SHAPE.early;
};

/* The threads of a row. */
constexpr int64_t norm_threads(const norm_shape &s, int64_t vectors)
{
    return s.lanes ? s.lanes : (vectors + 32 * s.vectors - 1) / (32 * s.vectors) * 32;
}
/* Whether a shape can hold such a row. */
static inline bool norm_holds(const norm_shape &s, int64_t vectors)
{
    const int64_t used = norm_threads(s, vectors), room = used * s.vectors;
    return used <= s.most && (s.full ? room == vectors : room >= vectors);
}
/* Whether a call is one that the rule is for. */
static inline bool norm_prefers(const norm_rule &r, int64_t rows, int64_t vectors, int64_t sm_count)
{
    const int64_t room = norm_threads(r.shape, vectors) * r.shape.vectors;
    const bool as_many = r.per_sm == ABOUT_ONE ? rows * 2 >= sm_count && rows <= sm_count * 2
                         : r.per_sm == FEW     ? rows <= sm_count * 8
                         : r.per_sm == SEVERAL ? rows <= sm_count * 32
                         : r.per_sm == MANY    ? rows > sm_count * 8
                                               : true;
    return as_many && vectors >= r.from && vectors <= r.to && (room - vectors) * 8 <= room * r.idle;
}

/* The variants of an op: its shapes, then norm_any, norm_loop, norm_shifted, norm_short, norm_bytes and
   norm_bytes_held, and norm_short with vectors that are shifted.
   512x2-full-b3: up to 512 threads of 2 vectors that a row fills exactly, 3 blocks per SM. */
template <bool CENTRED>
constexpr int NORM_ANY = NORM_SHAPES<CENTRED>.count;
template <bool CENTRED>
struct norm_variants {
    char name[NORM_ANY<CENTRED>][32], takes[NORM_ANY<CENTRED>][80];
    adze_variant list[NORM_ANY<CENTRED> + 8];
    norm_variants() : name(), takes(), list()
    {
        for (int i = 0; i < NORM_ANY<CENTRED>; i++) {
            const norm_shape &s = NORM_SHAPES<CENTRED>.shape[i];
            char blocks[16] = "";
            if (s.blocks)
                snprintf(blocks, sizeof blocks, "-b%d", s.blocks);
            snprintf(name[i], sizeof name[i], "%dx%d%s%s%s", s.lanes ? s.lanes : s.most, s.vectors,
                     s.full ? "-full" : "", s.early ? "" : "-late", blocks);
            const int most = (s.lanes ? s.lanes : s.most) * s.vectors;
            if (!s.full)
                snprintf(takes[i], sizeof takes[i], "rows of up to %d vectors of 16 bytes", most);
            else if (s.lanes)
                snprintf(takes[i], sizeof takes[i], "rows of %d vectors of 16 bytes", most);
            else
                snprintf(takes[i], sizeof takes[i], "rows of n x %d vectors of 16 bytes, up to %d", 32 * s.vectors,
                         most);
            list[i] = {name[i], takes[i]};
        }
        list[NORM_ANY<CENTRED>] = {"any", "rows that a block or a cluster holds, at any address"};
        list[NORM_ANY<CENTRED> + 1] = {"loop", "every call"};
        list[NORM_ANY<CENTRED> + 2] = {"shifted",
                                       "rows at any address, in 16-byte vectors; also a scale and a shift"};
        list[NORM_ANY<CENTRED> + 3] = {"short",
                                       "rows of up to 512 elements at any address; also a scale and a shift"};
        list[NORM_ANY<CENTRED> + 4] = {"bytes", "every call with quantised rows"};
        list[NORM_ANY<CENTRED> + 5] = {"bytes_held",
                                       "quantised rows of up to 2048 vectors of 16 bytes; no modulation"};
        list[NORM_ANY<CENTRED> + 6] = {"short_loose",
                                       "f16 or bf16 rows of up to 512 elements, x or residual off alignment alone"};
    }
};

#endif
