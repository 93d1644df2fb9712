/* gemm on CUDA: which kernel takes a call.

   Up to 16 tokens are streamed (gemm_stream.cuh), more are tiled (gemm_tile.cuh; up to 64 on Hopper:
   gemm_swapped_sm90.cu) where cuBLASLt is absent or slower (gemm_lt.cu). Both need tensor cores and 16-byte rows.
   Quantised weights have kernels of their own: one token takes gemm_fixed.cu and up to 16 take gemm_compact.cu in the
   common calls, else gemm_ring.cu, gemm_direct.cu and gemm_stream.cuh, which stream them 8 or 16 at a time; more take
   gemm_swapped_sm90.cu on Hopper, and gemm_quantised_tile.cu elsewhere. Small calls, weights whose rows are at other
   addresses, and quantised ones of f32 x take gemm_shifted.cu. All other calls take gemm_rows.cu where tokens are
   few, else gemm_any.cuh. Where x is quantised too, gemm_bytes.cu has the kernels, and gemm_swapped_sm90.cu those of
   some tokens. */
#include "gemm_any.cuh"
#include "gemm_lt.cuh"
#include "gemm_stream.cuh"
#include "gemm_tile.cuh"

#include <algorithm>

/* Whether all rows of the operands are made of 16-byte vectors, and sizes and offsets are such that the kernels that
   read those can count in 32 bits. */
static bool gemm_vectors(const cuda_call &s, const gemm_params &p, int dtype)
{
    const int64_t most = 1 << 28;
    bool ok = dtype != ADZE_F32 && adze_cuda_tensor_cores(s.device);
    ok = ok && p.k % 8 == 0 && p.k > 0 && p.k < most && p.n < most && p.rows.rank == 1 && p.batches < 65536;
    ok = ok && (uintptr_t)p.x % 16 == 0 && p.rows.stride[GEMM_X][0] % 8 == 0 && p.x_batch % 16 == 0 &&
         p.w_batch % 16 == 0;
    for (const gemm_part &part : p.part)
        ok = ok && (part.n == 0 || ((uintptr_t)part.w % 16 == 0 && part.w_stride % 16 == 0));
    return ok;
}

/* The streaming kernels: for 8 and for 16 tokens, where a multiprocessor has few rows and where it has more, where a
   block has little shared memory; and with all of x in shared memory, where it can be normed. */
typedef stream_shape<1, 1, 16, 256, 2, false> STREAM_16X16;
typedef stream_shape<2, 1, 8, 256, 2, false> STREAM_32X8;
typedef stream_shape<1, 1, 8, 128, 3, false> STREAM_SMALL;
typedef stream_shape<1, 2, 8, 128, 2, false> STREAM_WIDE_16X8;
typedef stream_shape<1, 2, 4, 256, 2, false> STREAM_WIDE_16X4;
typedef stream_shape<1, 1, 8, 256, 2, true> STREAM_WHOLE;
template <weight_format F>
using STREAM_QUANTISED = stream_shape<1, 1, 8, 256, 2, true, F>;
template <weight_format F>
using STREAM_WIDE_QUANTISED = stream_shape<1, 2, 8, 256, 2, true, F>;
typedef tile_shape<128, 128, 64, 32, 3> TILE_128X128;
typedef tile_shape<64, 64, 32, 32, 3> TILE_64X64;
typedef tile_shape<32, 64, 32, 16, 5> TILE_32X64;
typedef tile_shape<32, 64, 32, 64, 4, 4> SLICED_32X64;
typedef tile_shape<64, 64, 64, 64, 3, 4> SLICED_64X64;

enum {
    BULK,
    WHOLE_8,
    QUANTISED_8,
    QUANTISED_16,
    FIXED,
    COMPACT,                                        /* and the other GEMM_COMPACT_SHAPES */
    RING = COMPACT + GEMM_COMPACT_SHAPES,           /* and the other GEMM_RING_SHAPES */
    DIRECT = RING + GEMM_RING_SHAPES,               /* and the other GEMM_DIRECT_SHAPES */
    SWAPPED = DIRECT + GEMM_DIRECT_SHAPES,          /* and the other GEMM_SWAPPED_SHAPES */
    QUANTISED_TILE = SWAPPED + GEMM_SWAPPED_SHAPES, /* and the other GEMM_QUANTISED_TILE_SHAPES */
    STREAM_SHORT = QUANTISED_TILE + GEMM_QUANTISED_TILE_SHAPES,
    STREAM_LONG,
    STREAM_LEAST,
    WIDE_SHORT,
    WIDE_LONG,
    TILE_FEW,
    TILE_SMALL,
    TILE_LARGE,
    SLICED_FEW,
    SLICED,
    SHIFTED, /* and the other GEMM_SHIFTED_SHAPES */
    ROWS = SHIFTED + GEMM_SHIFTED_SHAPES,
    ANY,
    BYTES /* and the other GEMM_BYTES_SHAPES */
};
constexpr adze_variant GEMM_VARIANTS[] = {
    {"bulk", "one or two tokens, weights of x's dtype, by bulk copies, on the tensor cores (sm_90 and newer)"},
    {"whole8", "up to 8 tokens in shared memory, with or without norm"},
    {"quantised8", "quantised weights of aligned rows, groups of 64 or more (u4: 128), 8 tokens at a time"},
    {"quantised16", "the same, 16 tokens at a time"},
    {"fixed", "one token in fixed point, weights of i8 by rows or of u4 by groups of 128, k of 2048 (u4: 4096) or "
              "more, with or "
              "without rms norm"},
    {"compact",
     "up to 8 tokens, quantised weights by rows (i8, f8e4m3) or groups of 128 (u4, f8e4m3), with or without "
     "rms norm"},
    {"compact-ring", "the same of i8 and f8e4m3, through rings in shared memory"},
    {"compact16", "the same up to 16 tokens, without norm"},
    {"ring8", "as quantised8 through rings in shared memory, with or without norm, 8 tokens at a time, 8 warps"},
    {"ring8-twice", "the same, two blocks on a multiprocessor"},
    {"ring16", "the same with 16 warps"},
    {"direct16x8",
     "quantised weights straight into registers, without norm, 8 tokens at a time, 16 rows and 8 warps"},
    {"direct32x16", "the same with 32 rows and 16 warps"},
    {"direct64x8", "the same with 64 rows and 8 warps"},
    {"direct64x16", "the same with 64 rows and 16 warps"},
    {"direct32x16-wide", "the same, 16 tokens at a time, 32 rows and 16 warps"},
    {"direct64x8-wide", "the same, 16 tokens at a time, 64 rows and 8 warps"},
    {"swapped32x128",
     "aligned rows, groups of 128 or more, without norm, on Hopper, the weights as the first operand, in "
     "tiles of 32 tokens and 128 rows"},
    {"swapped32x256", "the same with 256 rows"},
    {"swapped64x128", "the same with 64 tokens and 128 rows"},
    {"swapped64x256", "the same with 64 tokens and 256 rows"},
    {"quantised32x128",
     "quantised weights of aligned rows, groups of 64 or more, without norm, in tiles of 32 tokens "
     "and 128 rows, of which 4 warps have a part of k each"},
    {"quantised64x128", "the same with tiles of 64 tokens"},
    {"quantised64x128-twice", "the same with 2 warps, two blocks on a multiprocessor"},
    {"stream16x16", "up to 8 tokens without norm, 16 rows and 16 warps"},
    {"stream32x8", "up to 8 tokens without norm, 32 rows and 8 warps"},
    {"stream16x8", "up to 8 tokens without norm, 16 rows and 8 warps, little shared memory"},
    {"wide16x8", "up to 16 tokens without norm, 16 rows and 8 warps"},
    {"wide16x4", "up to 16 tokens without norm, 16 rows and 4 warps"},
    {"tile32x64", "tiles of 32 tokens and 64 rows, without norm"},
    {"tile64x64", "tiles of 64 tokens and 64 rows, without norm"},
    {"tile128x128", "tiles of 128 tokens and 128 rows, without norm"},
    {"sliced32x64", "tiles of 32 tokens and 64 rows, of which 4 warps have a part of k each, without norm"},
    {"sliced64x64", "the same with tiles of 64 tokens"},
    {"shifted8", "weights at any address, of x's dtype or in groups of 64 or more (u4: 128), without norm; of f32 x "
                 "quantised weights alone; 8 tokens at a time, 32 rows or more, 8 warps"},
    {"shifted8-twice", "the same of quantised weights and 16-bit x, with 64 rows, up to 8 tokens"},
    {"shifted16", "the same, 16 tokens at a time, 32 rows or more (f32 x: 64)"},
    {"shifted32", "the same, 32 tokens at a time, 64 rows or more (weights of x's dtype: 32), not of f32 x"},
    {"rows", "every call without norm, 8 tokens at a time, k among the lanes of a warp"},
    {"any", "every call without norm, tiles of 64 tokens and 64 rows"},
    {"bytes-direct16x16",
     "quantised x of aligned rows, up to 8 tokens, straight into registers, 16 rows and 16 warps"},
    {"bytes-direct32x16", "the same with 32 rows"},
    {"bytes-direct32x8-16", "up to 16 tokens, 32 rows and 8 warps"},
    {"bytes-direct32x8-32", "up to 32 tokens, 32 rows and 8 warps"},
    {"bytes-sliced16x64",
     "quantised x of aligned rows, tiles of 16 tokens and 64 rows, of which 4 warps have a part of k each"},
    {"bytes-sliced32x64", "the same with tiles of 32 tokens"},
    {"bytes-sliced64x64", "the same with tiles of 64 tokens"},
    {"bytes32x64", "quantised x of aligned rows, tiles of 32 tokens and 64 rows"},
    {"bytes64x64", "the same with tiles of 64 tokens"},
    {"bytes128x128", "the same with tiles of 128 tokens and 128 rows"},
    {"bytes-wgmma128x256", "i8 of aligned rows on Hopper, tiles of 128 tokens and 256 rows"},
    {"bytes-wgmma128x128", "the same with tiles of 128 rows"},
    {"bytes-any8", "quantised x, every call, 8 tokens at a time"},
    {"bytes-any64", "quantised x, every call, 64 tokens at a time"},
    {NULL, NULL},
};

template <typename T, class S>
static adze_status stream_launch(const cuda_call &s, const gemm_params &p, int64_t blocks)
{
    const size_t bytes = stream_shared<S>(p.m, p.k);
    return launch(s, gemm_stream<T, S>, blocks < p.n ? blocks : p.n, dim3(S::THREADS),
                  launch_shape(S::FORMAT == OF_X ? bytes : gemm_alone(s, bytes, ceil_div(blocks, s.gpu.sm_count)), 1,
                               p.batches),
                  p);
}
template <class S>
static bool stream_fits(const cuda_call &s, const gemm_params &p)
{
    return p.m <= S::TOKENS && stream_shared<S>(p.m, p.k) <= (size_t)s.gpu.block_shared && (S::WHOLE || !p.norm);
}
/* Whether a call of operands in vectors may take the streaming kernels. Tiles of all shapes add the products of k in
   one order, and so does gemm_rows; the streaming kernels have others, so that batch-invariant calls do not take
   them. */
static bool stream_may(const gemm_params &p)
{
    return p.m <= 16 && !p.batch_invariant;
}
static bool stream_whole_fits(const cuda_call &s, const gemm_params &p)
{
    if (p.format != OF_X) /* the kernels of quantised weights take x without a norm */
        return false;
    /* With more tokens a norm of its own, and a product that streams x too, take half the time (H200, 2026-11-17). */
    return stream_may(p) && p.m <= 2 && stream_fits<STREAM_WHOLE>(s, p);
}
static adze_status compact_run(const cuda_call &s, const gemm_params &p, int dtype)
{
    const int choice = gemm_compact_choice(s, p, dtype);
    for (int shape = 0; shape < GEMM_COMPACT_SHAPES; shape++) {
        const bool can = gemm_compact_run(s, p, dtype, shape, 1) == ADZE_OK;
        if (s.takes(COMPACT + shape, can, shape == choice))
            return gemm_compact_run(s, p, dtype, shape, 0);
    }
    return ADZE_NO_KERNEL;
}
/* Operands in vectors that gemm_shifted takes in less time than kernels with more stages: small calls, as its blocks
   leave room for those of the next kernel. Weights of x's dtype have such kernels for up to 16 tokens, but for very
   many short rows. Where gemm_swapped may take the call, its own plan is half a microsecond short and more, and no
   call took it less than 5 us. Of a few long rows of u4 it has a part of k in each of more warps. From all variants
   on random calls (H200, 2026-11-19). */
static bool shifted_sooner(const cuda_call &s, const gemm_params &p, int dtype)
{
    constexpr double SMALL = 12000, SWAPPED_LEAST = 12000, SWAPPED_MORE = 1000;
    constexpr int64_t LARGE = 64 << 20; /* weights, whose choice need not take long */
    const int64_t rows = p.n * (p.glu ? 2 : 1), each = ceil_div(rows, s.gpu.sm_count);
    double time, swapped;
    if (p.norm || rows * p.k > LARGE)
        return false;
    const bool swaps = gemm_swapped_choice(s, p, dtype, &swapped) >= 0;
    const bool short_rows = p.m > 2 && p.k <= (p.m > 8 ? 256 : 128) && each > 64;
    if ((p.format == OF_X && p.m <= 16 && !short_rows && !swaps) || gemm_shifted_choice(s, p, dtype, &time) < 0)
        return false;
    const bool unhidden = p.m <= 64 && p.k <= 256; /* the stages of gemm_swapped hide nothing of so short rows */
    if (p.m > 16 || swaps)
        return time < SWAPPED_LEAST || (swaps && (unhidden || time < swapped + SWAPPED_MORE));
    return p.format == OF_X || time <= SMALL ||
           (p.format == OF_U4 && p.m > 2 && p.m <= 8 && each <= 16 && p.k >= 3072);
}
/* One or two tokens of 4 to 8 rows for each multiprocessor, or of x's dtype three or four of one, so long that
   gemm_rows gains by splitting them among more warps. From the same calls. */
static bool rows_sooner(const cuda_call &s, const gemm_params &p)
{
    const int64_t each = ceil_div(p.n * (p.glu ? 2 : 1), s.gpu.sm_count);
    if (p.norm || p.batch_invariant)
        return false;
    if (p.format == OF_X)
        return p.m > 2 && p.m <= 4 && p.k > 8192 && each == 1;
    return p.format != OF_F8 && p.m <= 2 && p.k >= 2400 && each >= 4 && each <= 8;
}
/* The rings that are faster than other kernels of quantised weights but gemm_compact, from sweeps on an H200
   (2026-11-17) over the products of a layer and 8192 x 8192; -1: none is. */
static int ring_choice(const cuda_call &s, const gemm_params &p, int dtype)
{
    if (rows_sooner(s, p) || shifted_sooner(s, p, dtype))
        return -1;
    if (p.format == OF_U4) {
        const int64_t each = ceil_div(p.n * (p.glu ? 2 : 1), s.gpu.sm_count);
        const bool long_rows = each > 64 && p.k >= 6144; /* x leaves no room for a second block (H200, 2026-11-19) */
        const bool more = p.m <= 2 ? each > 4 : p.m <= 8 && (p.norm ? each <= 16 : long_rows);
        return more && p.k > 1024 ? GEMM_RING_16 : p.m <= 8 ? GEMM_RING_8 : -1;
    }
    return p.format == OF_F8 && p.m <= 2 ? GEMM_RING_8_TWICE : -1;
}
static adze_status ring_run(const cuda_call &s, const gemm_params &p, int dtype)
{
    const int choice = ring_choice(s, p, dtype);
    for (int shape = 0; shape < GEMM_RING_SHAPES; shape++) {
        const bool can = gemm_ring_run(s, p, dtype, shape, 1) == ADZE_OK;
        if (s.takes(RING + shape, can, shape == choice))
            return gemm_ring_run(s, p, dtype, shape, 0);
    }
    return ADZE_NO_KERNEL;
}
static adze_status swapped_run(const cuda_call &s, const gemm_params &p, int dtype)
{
    double time;
    const int choice = gemm_swapped_choice(s, p, dtype, &time);
    for (int shape = 0; shape < GEMM_SWAPPED_SHAPES; shape++) {
        const bool can = gemm_swapped_run(s, p, dtype, shape, 1) == ADZE_OK;
        if (s.takes(SWAPPED + shape, can, shape == choice))
            return gemm_swapped_run(s, p, dtype, shape, 0);
    }
    return ADZE_NO_KERNEL;
}
static adze_status quantised_tile_run(const cuda_call &s, const gemm_params &p, int dtype)
{
    const int choice = gemm_quantised_tile_choice(s, p, dtype);
    for (int shape = 0; shape < GEMM_QUANTISED_TILE_SHAPES; shape++) {
        const bool can = gemm_quantised_tile_run(s, p, dtype, shape, 1) == ADZE_OK;
        if (s.takes(QUANTISED_TILE + shape, can, shape == choice))
            return gemm_quantised_tile_run(s, p, dtype, shape, 0);
    }
    return ADZE_NO_KERNEL;
}
/* One or two tokens. It is faster, on an H200 (2026-11-17), where x is normed, and where a multiprocessor has many
   rows. */
static adze_status bulk_run(const cuda_call &s, const gemm_params &p, int dtype)
{
    const int64_t rows = ceil_div(p.n * (p.glu ? 2 : 1), s.gpu.sm_count);
    const bool can = gemm_bulk_run(s, p, dtype, 1) == ADZE_OK, faster = p.norm || rows > 96;
    return s.takes(BULK, can, faster) ? gemm_bulk_run(s, p, dtype, 0) : ADZE_NO_KERNEL;
}
/* Which shape, and how many blocks a multiprocessor has: from sweeps on an H200 (2026-11-16) over products from
   1024 x 4096 to 128256 x 4096. */
template <typename T>
static adze_status stream_run(const cuda_call &s, const gemm_params &p)
{
    const int64_t sm_count = s.gpu.sm_count, each = ceil_div(p.n * (p.glu ? 2 : 1), sm_count);
    const int64_t twice = sm_count * (each > 16 ? 2 : 1);
    if (s.takes(WHOLE_8, stream_fits<STREAM_WHOLE>(s, p), p.norm && p.m <= 8))
        return stream_launch<T, STREAM_WHOLE>(s, p, twice);
    /* Up to 8 tokens, many short rows: more blocks hide each other's starts (H200, 2026-11-19, random calls). */
    const bool many = p.m <= 8 && each > 32 && p.k <= 448;
    if (many && s.takes(WIDE_LONG, stream_fits<STREAM_WIDE_16X4>(s, p)))
        return stream_launch<T, STREAM_WIDE_16X4>(s, p, sm_count * 3);
    const bool small = each <= 16 && p.k <= 512; /* little shared memory, and few warps, are set up sooner */
    if (s.takes(STREAM_SHORT, stream_fits<STREAM_16X16>(s, p), !small && (each <= 16 || each > 100)))
        return stream_launch<T, STREAM_16X16>(s, p, sm_count);
    if (s.takes(STREAM_LONG, stream_fits<STREAM_32X8>(s, p), !small))
        return stream_launch<T, STREAM_32X8>(s, p, sm_count);
    if (s.takes(STREAM_LEAST, stream_fits<STREAM_SMALL>(s, p)))
        return stream_launch<T, STREAM_SMALL>(s, p, twice);
    /* What takes the time is how many tiles of 16 rows a block has at most. */
    const auto tiles = [&](int64_t blocks) { return ceil_div(each, 16 * blocks) * blocks; };
    if (s.takes(WIDE_LONG, stream_fits<STREAM_WIDE_16X4>(s, p),
                each > 16 && (tiles(3) < tiles(2) || (tiles(3) == tiles(2) && each > 64))))
        return stream_launch<T, STREAM_WIDE_16X4>(s, p, sm_count * 3);
    if (s.takes(WIDE_SHORT, stream_fits<STREAM_WIDE_16X8>(s, p)))
        return stream_launch<T, STREAM_WIDE_16X8>(s, p, twice);
    return ADZE_NO_KERNEL;
}

/* The choice between sliced and plain tiles, by tokens and by rows that a multiprocessor has: the first rule that a
   call is within. From sweeps on an H200 (2026-11-17) over 4096 x 4096, 11008 x 4096, 14336 x 4096, 22016 x 4096 and
   128256 x 4096. What is faster changes with how full the last round of tiles is. */
static const struct {
    int64_t tokens, rows;
    int variant;
} TILE_RULES[] = {
    {32, 96, TILE_FEW},          {32, 128, SLICED_FEW}, {32, 256, TILE_FEW},
    {32, INT64_MAX, SLICED_FEW}, {64, 48, SLICED_FEW},  {64, 96, TILE_SMALL},
    {64, 128, SLICED},           {64, 256, TILE_SMALL}, {64, INT64_MAX, SLICED},
};
static int tile_choice(const cuda_call &s, const gemm_params &p)
{
    const int64_t rows = ceil_div(p.n * (p.glu ? 2 : 1), s.gpu.sm_count);
    for (const auto &rule : TILE_RULES)
        if (p.m <= rule.tokens && rows <= rule.rows)
            return rule.variant;
    return -1;
}
template <typename T>
static adze_status sliced_run(const cuda_call &s, const gemm_params &p, bool may)
{
    const int choice = tile_choice(s, p);
    may = may && !p.batch_invariant; /* the slices have an order of their own */
    if (s.takes(SLICED_FEW, may && SLICED_32X64::SHARED <= s.gpu.block_shared, choice == SLICED_FEW))
        return tile_launch<T, SLICED_32X64>(s, p);
    if (s.takes(SLICED, may && SLICED_64X64::SHARED <= s.gpu.block_shared, choice == SLICED))
        return tile_launch<T, SLICED_64X64>(s, p);
    return ADZE_NO_KERNEL;
}
template <typename T>
static adze_status tile_run(const cuda_call &s, const gemm_params &p)
{
    const int64_t large = ceil_div(p.m, 128) * gemm_tiles(p, p.glu ? 64 : 128) * p.batches;
    const bool may = !p.norm && ceil_div(p.m, 32) * gemm_tiles(p, 32) * 8 < 0x7fffffff;
    const adze_status status = sliced_run<T>(s, p, may);
    if (status != ADZE_NO_KERNEL)
        return status;
    if (s.takes(TILE_FEW, may && TILE_32X64::SHARED <= s.gpu.block_shared, p.m <= 32))
        return tile_launch<T, TILE_32X64>(s, p);
    if (s.takes(TILE_SMALL, may && TILE_64X64::SHARED <= s.gpu.block_shared, p.m <= 64 || large < s.gpu.sm_count))
        return tile_launch<T, TILE_64X64>(s, p);
    if (s.takes(TILE_LARGE, may && TILE_128X128::SHARED <= s.gpu.block_shared))
        return tile_launch<T, TILE_128X128>(s, p);
    return ADZE_NO_KERNEL;
}

/* Quantised weights, as many tokens at a time as the kernel and shared memory take. */
template <typename T, class S>
static adze_status quantised_launch(const cuda_call &s, const gemm_params &all)
{
    const int64_t room = (s.gpu.block_shared - S::FIXED_BYTES) / stream_pitch<S>(all.k);
    const int64_t most = room < S::TOKENS ? room : S::TOKENS;
    for (int64_t at = 0; at < all.m; at += most) {
        const gemm_params p = gemm_tokens<T>(all, at, most);
        const int64_t each = ceil_div(p.n * (p.glu ? 2 : 1), s.gpu.sm_count);
        ADZE_CHECK((stream_launch<T, S>(s, p, (int64_t)s.gpu.sm_count * (each > 16 ? 2 : 1))));
    }
    return ADZE_OK;
}
template <typename T, weight_format F>
static adze_status quantised_run(const cuda_call &s, const gemm_params &p)
{
    typedef STREAM_QUANTISED<F> NARROW;
    typedef STREAM_WIDE_QUANTISED<F> WIDE;
    const bool grouped = p.group == 0 || p.group % NARROW::GROUP == 0;
    const bool may = grouped && p.k % NARROW::VECTOR == 0 && !p.norm;
    const bool narrow = may && stream_shared<NARROW>(1, p.k) <= (size_t)s.gpu.block_shared;
    const bool wide = may && stream_shared<WIDE>(9, p.k) <= (size_t)s.gpu.block_shared;
    /* Many rows of i8 are streamed faster through shared memory, on an H200 (2026-11-17). */
    const bool streams = F == OF_I8 && p.m <= 8 && p.n * (p.glu ? 2 : 1) > 64 * (int64_t)s.gpu.sm_count;
    const int dtype = std::is_same<T, bf16>::value ? ADZE_BF16 : ADZE_F16;
    /* gemm_shifted is faster with 9 to 16 tokens, on an H200 (2026-11-19). */
    const bool shifts = p.m > 8 && p.m <= 16 && gemm_shifted_run(s, p, dtype, GEMM_SHIFTED_16, 1) == ADZE_OK;
    const int choice = streams || shifts ? -1 : gemm_direct_choice(s, p);
    for (int shape = 0; shape < GEMM_DIRECT_SHAPES; shape++) {
        const bool can = gemm_direct_run(s, p, dtype, shape, 1) == ADZE_OK;
        if (s.takes(DIRECT + shape, can, shape == choice))
            return gemm_direct_run(s, p, dtype, shape, 0);
    }
    if (s.takes(QUANTISED_16, wide, p.m > 8 && !shifts))
        return quantised_launch<T, WIDE>(s, p);
    return s.takes(QUANTISED_8, narrow, !shifts) ? quantised_launch<T, NARROW>(s, p) : ADZE_NO_KERNEL;
}
template <typename T>
static adze_status quantised_run(const cuda_call &s, const gemm_params &p)
{
    return p.format == OF_I8   ? quantised_run<T, OF_I8>(s, p)
           : p.format == OF_F8 ? quantised_run<T, OF_F8>(s, p)
                               : quantised_run<T, OF_U4>(s, p);
}

/* Weights at any address. One or two tokens of f32, or of weights that gemm_rows need not unpack into pairs, are
   faster by that kernel. */
static adze_status shifted_run(const cuda_call &s, const gemm_params &p, int dtype)
{
    const bool rows = rows_sooner(s, p) || (p.m <= 2 && (p.format == OF_X || dtype == ADZE_F32));
    double time;
    const int choice = rows ? -1 : gemm_shifted_choice(s, p, dtype, &time);
    for (int shape = 0; shape < GEMM_SHIFTED_SHAPES; shape++) {
        const bool asked = s.choice->want == SHIFTED + shape; /* a plan takes host time: no other is made again */
        const bool can = asked ? gemm_shifted_run(s, p, dtype, shape, 1) == ADZE_OK : shape == choice;
        if (s.takes(SHIFTED + shape, can))
            return gemm_shifted_run(s, p, dtype, shape, 0);
    }
    return ADZE_NO_KERNEL;
}

/* Few tokens, or so few tiles of 64 x 64 products that not all multiprocessors have one: but of many tokens and short
   rows two thirds of these are enough. The bits of batch-invariant calls are those of one kernel. From all variants
   on random calls (H200, 2026-11-19). */
static bool rows_faster(const cuda_call &s, const gemm_params &p)
{
    const int64_t tiles = ceil_div(p.m, ANY_TOKENS) * gemm_tiles(p, p.glu ? ANY_ROWS / 2 : ANY_ROWS) * p.batches;
    if (p.m <= 16 || p.batch_invariant)
        return true;
    if (p.format == OF_X && p.k <= 128 && p.m > 32)
        return tiles * 3 < s.gpu.sm_count * 2;
    return p.m <= 48 || tiles < s.gpu.sm_count;
}
template <typename T, weight_format F>
static adze_status any_launch(const cuda_call &s, const gemm_params &p)
{
    const int64_t tokens = ceil_div(p.m, ANY_TOKENS), tiles = gemm_tiles(p, p.glu ? ANY_ROWS / 2 : ANY_ROWS);
    const int64_t most = 0x7fffffff;
    if (tokens > most || tiles > most / tokens || p.batches > 65535)
        return adze_fail(ADZE_NO_KERNEL, "gemm: %lld tokens, %lld rows of weights and %lld batches are too many",
                         (long long)p.m, (long long)p.n, (long long)p.batches);
    return launch(s, gemm_any<T, ANY_TOKENS, F>, tokens * tiles, dim3(ANY_GEMM_THREADS),
                  launch_shape(0, 1, p.batches), p, (int)tokens);
}
template <typename T>
static adze_status any_launch(const cuda_call &s, const gemm_params &p)
{
    switch (p.format) {
    case OF_X: return any_launch<T, OF_X>(s, p);
    case OF_I8: return any_launch<T, OF_I8>(s, p);
    case OF_F8: return any_launch<T, OF_F8>(s, p);
    default: return any_launch<T, OF_U4>(s, p);
    }
}

template <typename T>
static adze_status gemm_launch(const cuda_call &s, const gemm_params &p, bool vectors)
{
    const int dtype = sizeof(T) == 4 ? ADZE_F32 : std::is_same<T, bf16>::value ? ADZE_BF16 : ADZE_F16;
    if constexpr (sizeof(T) == 2) {
        if (vectors) {
            if (s.takes(FIXED, gemm_fixed_run(s, p, dtype, 1) == ADZE_OK))
                return gemm_fixed_run(s, p, dtype, 0);
            if (rows_sooner(s, p) && s.takes(ROWS, gemm_rows_run(s, p, dtype, 1) == ADZE_OK))
                return gemm_rows_run(s, p, dtype, 0);
            adze_status status = compact_run(s, p, dtype);
            if (status == ADZE_NO_KERNEL)
                status = ring_run(s, p, dtype);
            if (status == ADZE_NO_KERNEL)
                status = bulk_run(s, p, dtype);
            if (status != ADZE_NO_KERNEL)
                return status;
        }
        if (vectors) {
            adze_status status = shifted_sooner(s, p, dtype) ? shifted_run(s, p, dtype) : ADZE_NO_KERNEL;
            if (status == ADZE_NO_KERNEL)
                status = swapped_run(s, p, dtype);
            if (status == ADZE_NO_KERNEL && p.format != OF_X)
                status = quantised_tile_run(s, p, dtype);
            if (status == ADZE_NO_KERNEL && p.format != OF_X)
                status = quantised_run<T>(s, p);
            if (status == ADZE_NO_KERNEL && p.format == OF_X && stream_may(p))
                status = stream_run<T>(s, p);
            if (status == ADZE_NO_KERNEL && p.format == OF_X)
                status = tile_run<T>(s, p);
            if (status != ADZE_NO_KERNEL)
                return status;
        }
    }
    const adze_status status = shifted_run(s, p, dtype);
    if (status != ADZE_NO_KERNEL)
        return status;
    if (s.takes(ROWS, gemm_rows_run(s, p, dtype, 1) == ADZE_OK, rows_faster(s, p)))
        return gemm_rows_run(s, p, dtype, 0);
    return s.takes(ANY, !p.norm) ? any_launch<T>(s, p) : ADZE_NO_KERNEL;
}

static adze_status bytes_run(const cuda_call &s, const gemm_params &p, int dtype)
{
    const adze_status status = swapped_run(s, p, dtype);
    if (status != ADZE_NO_KERNEL)
        return status;
    const int choice = gemm_bytes_choice(s, p);
    for (int shape = 0; shape < GEMM_BYTES_SHAPES; shape++) {
        /* Hopper's own products of f8e4m3 have a kernel of their own. */
        const bool other = p.format == OF_F8 && (shape == GEMM_BYTES_WGMMA_256 || shape == GEMM_BYTES_WGMMA_128);
        const bool can = !other && gemm_bytes_run(s, p, dtype, shape, 1) == ADZE_OK;
        if (s.takes(BYTES + shape, can, shape == choice))
            return gemm_bytes_run(s, p, dtype, shape, 0);
    }
    return ADZE_NO_KERNEL;
}

/* Whether the norm is a launch of its own, into scratch. */
static bool norm_first(const cuda_call &s, const gemm_params &p, int dtype)
{
    if (!p.norm || !gemm_vectors(s, p, dtype))
        return p.norm;
    if (gemm_compact_choice(s, p, dtype) >= 0)
        return false;
    gemm_params normed = p;
    normed.norm = 0;
    if (gemm_compact_choice(s, normed, dtype) >= 0) /* in two launches it is faster than the other kernels */
        return true;
    const int ring = ring_choice(s, p, dtype);
    return !(ring >= 0 && gemm_ring_run(s, p, dtype, ring, 1) == ADZE_OK) && !stream_whole_fits(s, p);
}

/* Bytes of x, dense in scratch: kernels load the last vector as a whole. */
static size_t dense_bytes(const gemm_params &p, int dtype)
{
    return ((size_t)(p.m * p.k) * adze_dtype_size(dtype) + 15) / 16 * 16;
}
/* Whether x is first copied into scratch, so that the tensor-core kernels take the call. The caller may leave out the
   scratch: then x is not copied. */
static bool copy_first(const cuda_call &s, const adze_gemm_args *a, const gemm_params &p)
{
    const int dtype = a->x.dtype;
    if (!gemm_copies(p, dtype) || a->call.scratch_size < dense_bytes(p, dtype) || (uintptr_t)a->call.scratch % 16)
        return false;
    gemm_params dense = p;
    dense.x = NULL; /* aligned, as scratch is */
    dense.rows.stride[GEMM_X][0] = p.k;
    return gemm_vectors(s, dense, dtype);
}

static adze_status gemm_run(const cuda_call &s, const adze_gemm_args *a)
{
    gemm_params p = gemm_params_of(a);
    if (p.m == 0 || p.n == 0 || p.batches == 0)
        return ADZE_OK;
    const bool copied = copy_first(s, a, p);
    if (copied || norm_first(s, p, a->x.dtype)) {
        if (!s.choice->dry)
            ADZE_CHECK(copied ? gemm_copy(s, a, p) : gemm_norm(s, a, p));
        adze_gemm_args rest = *a;
        rest.x = gemm_dense(a);
        rest.norm = 0;
        p = gemm_params_of(&rest);
    }
    const bool vectors = gemm_vectors(s, p, a->x.dtype);
    const int form = a->x.dtype | a->w.dtype << 4 | p.glu << 8 | ((int)a->group & 0xff) << 12 |
                     (a->group_rows > 1) << 20 | (p.norm != 0) << 21;
    return s.tuned(form, p.m, p.n, p.k, p.batches, [&]() {
        if (p.x_scale)
            return bytes_run(s, p, a->out.dtype);
        switch (a->x.dtype) {
        case ADZE_F32: return gemm_launch<float>(s, p, vectors);
        case ADZE_F16: return gemm_launch<f16>(s, p, vectors);
        default: return gemm_launch<bf16>(s, p, vectors);
        }
    });
}
CUDA_ENTRIES(gemm, GEMM_VARIANTS, gemm_run)

/* Many tokens of f8e4m3 on Hopper, whose tensor cores multiply it as it is and add with few bits. */
static adze_status f8_run(adze_stream stream, const adze_gemm_args *a, bool ask)
{
    adze_choice choice = {};
    choice.want = choice.ran = -1;
    const cuda_call s(stream, adze_op_gemm, &choice);
    const gemm_params p = gemm_params_of(a);
    const bool can = p.m > 128 && p.n > 0;
    return can ? gemm_bytes_run(s, p, a->out.dtype, GEMM_BYTES_WGMMA_128, ask) : ADZE_NO_KERNEL;
}
extern "C" int adze_gemm_cuda_f8_accepts(adze_stream stream, const void *args)
{
    const adze_gemm_args *const a = (const adze_gemm_args *)args;
    return a->x.dtype == ADZE_F8E4M3 && f8_run(stream, a, true) == ADZE_OK;
}
extern "C" adze_status adze_gemm_cuda_f8(adze_stream stream, const void *args)
{
    const adze_status status = f8_run(stream, (const adze_gemm_args *)args, false);
    return status == ADZE_NO_KERNEL ? adze_gemm_cuda(stream, args) : status; /* a driver without maps of tensors */
}

/* What a call needs for x, and with a scratch_size of SIZE_MAX what it can use. */
static size_t x_scratch(adze_stream stream, const adze_gemm_args *a)
{
    adze_choice choice = {};
    choice.want = choice.ran = -1;
    const cuda_call s(stream, adze_op_gemm, &choice);
    const gemm_params p = gemm_params_of(a);
    const bool copied = a->call.scratch_size == SIZE_MAX && copy_first(s, a, p);
    return copied || norm_first(s, p, a->x.dtype) ? dense_bytes(p, a->x.dtype) : 0;
}
/* cuBLASLt's products can do with less than they can use. */
extern "C" size_t adze_gemm_cuda_scratch(adze_stream stream, const adze_gemm_args *a)
{
    const size_t need = x_scratch(stream, a);
    return a->call.scratch_size == SIZE_MAX ? std::max(need, gemm_lt_scratch(stream, a)) : need;
}
