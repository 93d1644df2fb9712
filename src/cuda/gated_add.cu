/* gated_add on CUDA: which kernel of gated_rows.cuh a call takes. */
#include "gated_rows.cuh"

constexpr int64_t MANY = 7 << 18; /* elements: DENSE and SHIFTED_FLAT are for more, on an H200 */

enum { VECTORS, SHIFTED, NARROW_SMALL, NARROW, SHORT, GENERAL, DENSE, SHIFTED_FLAT };
constexpr adze_variant VARIANTS[] = {
    {"vector", "aligned rows, a 16-byte vector per thread"},
    {"shifted", "rows at any address, a 16-byte vector of the output per thread"},
    {"narrow-small", "rows at any address, two units of one or two elements per thread"},
    {"narrow", "rows at any address, as many units per thread as make a vector"},
    {"short", "rows at any address, no table, their units or vectors numbered through all rows"},
    {"general", "every call, one element at a time"},
    {"dense", "rows without gaps, at any address, in 16-byte vectors of the output that go across rows"},
    {"shifted-flat",
     "rows at any address, no table, vectors of the output numbered through all rows, two per thread"},
    {NULL, NULL},
};

/* Whether blocks of whole rows, or of equal pieces of one, have fewer than five sixths of their threads: they then
   move less than 5 KB each, and starting them takes longer than that (H200, 2026-11-19). */
static bool gated_idle(int64_t units)
{
    const int64_t pieces = ceil_div(units, THREADS), each = ceil_div(units, pieces);
    return (pieces > 1 ? each : THREADS / units * units) * 6 < THREADS * 5;
}

/* What the choice of a variant sees of a call with simple rows. */
struct gated_sizes {
    int64_t rows, dim;
    int width;                      /* elements of a load, 16 for vectors */
    bool dense, flat, flat_vectors; /* whether these variants can take it: DENSE, SHORT, SHORT of vectors */
    bool shifted_flat, wide_gate;   /* wide_gate: it is f32, and x is not */
};

/* The fastest variant, by the times of all of them on 58 random calls (H200, 2026-11-18) and 130 more (2026-11-19);
   the mean loss against the fastest is below 1 %. Pairs of 16-bit elements are read in units: a vector's shifts take
   longer than the loads that they save. */
template <typename T>
static int gated_choose(const cuda_limits &gpu, const gated_sizes &c)
{
    constexpr int W = VEC<T>;
    const int64_t each = c.rows * c.dim / gpu.sm_count;
    const bool many = c.rows * c.dim > MANY, idle = many && gated_idle(ceil_div(c.dim, W));
    const bool joined = c.dense && c.rows > 1 && many;
    if (c.width == 16)
        return !idle ? VECTORS : c.flat_vectors ? SHORT : joined ? DENSE : VECTORS;
    if (sizeof(T) == 4) {
        if (joined && c.dim <= 16 * W)
            return DENSE;
        if (c.dim < W || (c.dim < 64 * W && each <= 4096))
            return NARROW;
        return idle && c.shifted_flat ? SHIFTED_FLAT : SHIFTED;
    }
    if (joined)
        return DENSE;
    if (c.width > 1) {
        if (c.flat && each > 2048 && (c.dim < THREADS || idle || each > 1 << 16))
            return SHORT;
        return each > 2048 && each <= 4096 ? NARROW_SMALL : NARROW;
    }
    if (split_units(c.dim, 2, c.rows, THREADS).blocks <= 2 * gpu.sm_count)
        return NARROW_SMALL;
    if (c.dim < 5 * W) /* in a row of few vectors most of them are its ends, which are stored one by one */
        return c.flat ? SHORT : NARROW;
    /* Two vectors of a thread beat one even where no thread idles, but for a gate that takes as many loads. */
    return many && c.shifted_flat && (idle || !c.wide_gate) ? SHIFTED_FLAT : SHIFTED;
}

/* Units of less than 16 bytes: a thread has several, so that as many bytes are in flight. */
template <typename T, int W>
static adze_status gated_launch_narrow(const cuda_call &s, const gated_simple &p, int choice)
{
    constexpr bool half = sizeof(T) < 4;
    constexpr int UNITS = VEC<T> / W;
    if (s.takes(NARROW_SMALL, true, choice == NARROW_SMALL))
        return gated_launch<T, W, 2, true, half>(s, p);
    if (s.takes(SHORT, gated_is_flat(p, p.units, W), choice == SHORT))
        return gated_launch_short<T, W, UNITS>(s, p);
    if (!s.takes(NARROW, true))
        return ADZE_NO_KERNEL;
    if (p.table)
        return gated_launch<T, W, UNITS, true, half>(s, p);
    return p.gate_f32 ? gated_launch<T, W, UNITS, false, half>(s, p) : gated_launch<T, W, UNITS, false, false>(s, p);
}

template <typename T>
static adze_status gated_launch_as(const cuda_call &s, gated_general g, int64_t dim, int width)
{
    constexpr bool half = sizeof(T) < 4;
    constexpr int VECTOR = VEC<T>;
    g.units = dim;
    if (s.takes(GENERAL, true, !rows_are_simple(g.rows)))
        return gated_launch<T, 1, VECTOR, true, half>(s, g);
    if (!rows_are_simple(g.rows))
        return ADZE_NO_KERNEL;
    gated_simple p = {};
    p.x = g.x, p.residual = g.residual, p.gate = g.gate, p.table = g.table, p.out = g.out;
    p.gate_f32 = g.gate_f32, p.table_f32 = g.table_f32, p.steps = g.steps;
    p.rows = rows_simple(g.rows, {X, RESIDUAL, OUT, GATE, GATE_TABLE});
    gated_dense_params dense = {};
    const int pair = half && width > 1 ? 2 : 1;
    const bool aligned = width == 16;
    gated_sizes c = {};
    c.rows = p.rows.count, c.dim = dim, c.width = width;
    c.dense = gated_make_dense<T>(g, dim, &dense);
    c.flat = gated_is_flat(p, dim / pair, pair);
    c.flat_vectors = aligned && gated_is_flat(p, dim / VECTOR, VECTOR);
    c.shifted_flat = gated_can_shift_flat<T>(p, dim), c.wide_gate = p.gate_f32;
    const int choice = gated_choose<T>(s.gpu, c);
    p.units = dim / VECTOR;
    if (s.takes(VECTORS, aligned, choice == VECTORS)) {
        if (p.gate_f32 || p.table_f32)
            return p.table ? gated_launch<T, VECTOR, 1, true, half>(s, p)
                           : gated_launch<T, VECTOR, 1, false, half>(s, p);
        return p.table ? gated_launch<T, VECTOR, 1, true, false>(s, p)
                       : gated_launch<T, VECTOR, 1, false, false>(s, p);
    }
    if (s.takes(SHORT, c.flat_vectors, choice == SHORT))
        return gated_launch_short<T, VECTOR, 2>(s, p);
    if (s.takes(DENSE, c.dense, choice == DENSE)) {
        if (g.gate_f32 || g.table_f32)
            return g.table ? gated_launch_dense<T, true, half>(s, dense)
                           : gated_launch_dense<T, false, half>(s, dense);
        return g.table ? gated_launch_dense<T, true, false>(s, dense) : gated_launch_dense<T, false, false>(s, dense);
    }
    p.dim = dim;
    if (s.takes(SHIFTED_FLAT, c.shifted_flat, choice == SHIFTED_FLAT))
        return p.gate_f32 ? gated_launch_shifted_flat<T, half>(s, p) : gated_launch_shifted_flat<T, false>(s, p);
    if (s.takes(SHIFTED, dim < (1 << 28), choice == SHIFTED)) {
        if (p.gate_f32 || p.table_f32)
            return p.table ? gated_launch_shifted<T, true, half>(s, p) : gated_launch_shifted<T, false, half>(s, p);
        return p.table ? gated_launch_shifted<T, true, false>(s, p) : gated_launch_shifted<T, false, false>(s, p);
    }
    if constexpr (half)
        if (width > 1) {
            p.units = dim / 2;
            return gated_launch_narrow<T, 2>(s, p, choice);
        }
    p.units = dim;
    return gated_launch_narrow<T, 1>(s, p, choice);
}

static adze_status gated_add_run(const cuda_call &s, const adze_gated_add_args *a)
{
    const adze_tensor *const tensors[TENSORS] = {&a->x, &a->residual, &a->out, &a->gate, &a->gate_table};
    const int64_t dim = a->x.shape[a->x.rank - 1];
    gated_general p = {};
    adze_rows_init(&p.rows, &a->x, TENSORS, tensors);
    if (dim == 0 || p.rows.count == 0)
        return ADZE_OK;
    int width = 16;
    for (int t = 0; t < TENSORS; t++)
        width = std::min(width, rows_width(tensors[t], dim));
    p.x = a->x.data, p.residual = a->residual.data, p.out = a->out.data, p.gate = a->gate.data;
    p.table = a->gate_table.dtype ? a->gate_table.data : nullptr;
    p.gate_f32 = a->gate.dtype == ADZE_F32 && a->x.dtype != ADZE_F32;
    p.table_f32 = a->gate_table.dtype == ADZE_F32 && a->x.dtype != ADZE_F32;
    p.steps = a->rounding & ADZE_ROUND_STEPS;
    const int form = a->x.dtype | a->gate.dtype << 4 | a->gate_table.dtype << 8 | width << 12 | p.steps << 20;
    return s.tuned(form, p.rows.count, dim, 0, 0, [&] {
        switch (a->x.dtype) {
        case ADZE_F32: return gated_launch_as<float>(s, p, dim, width);
        case ADZE_F16: return gated_launch_as<f16>(s, p, dim, width);
        default: return gated_launch_as<bf16>(s, p, dim, width);
        }
    });
}
CUDA_ENTRIES(gated_add, VARIANTS, gated_add_run)
