/* attention_floats.cu - attention of floats: which shape of block takes a call. */
#include "attention_floats.cuh"
#include "attention_run.cuh"

#include <algorithm>
#include <math.h>

/* Few rows, some, many. Where rows are long a step has fewer keys: for several blocks on a multiprocessor, which wait
   for keys at different times. Of few rows a thread has few: a block's few warps would wait for each other. */
template <int D>
using FLOATS_4 = floats_shape<D, (D > 128 ? 1 : 2), (D > 128 ? 4 : 2), (D > 128 ? 2 : 4), (D > 128 ? 32 : 64)>;
template <int D>
using FLOATS_16 = floats_shape<D, 4, 4, (D > 128 ? 2 : 4), (D > 128 ? 32 : 64)>;
template <int D>
using FLOATS_64 = floats_shape<D, (D > 192 ? 4 : 8), (D > 192 ? 16 : 8), 1, (D > 64 ? 32 : 64)>;
/* For GPUs whose blocks have 64 KB of shared memory. */
template <int D>
using FLOATS_SMALL = floats_shape<(D > 128 ? 256 : D), 8, 2, (D > 128 ? 1 : 2), (D > 128 ? 16 : 32)>;
enum { SOME_MOST = 32 }; /* rows: up to so many are two blocks of 16 rather than one of 64 */

template <class S>
static adze_status floats_run(const cuda_call &s, const attention_params &p, int variant, bool preferred)
{
    return floats_run<S, attention_of_floats<float, S>>(s, p, variant, true, preferred);
}
/* The steps of a block, if all blocks are resident at once; else infinitely many. */
template <class S>
static attention_extent floats_resident_steps(const cuda_call &s, const attention_params &p)
{
    const int64_t parts = attention_step_clusters<S>(s, p);
    if (attention_tiles(p, S::ROWS) * attention_pairs(p) * parts > s.gpu.sm_count * S::BLOCKS)
        return {INFINITY, INFINITY};
    const attention_extent steps = attention_steps_of(p, attention_queries(p, S::ROWS), S::KEYS);
    return {steps.most / (double)parts, steps.seen / (double)parts};
}
template <int D>
static adze_status floats_run(const cuda_call &s, const attention_params &p)
{
    const int64_t rows = attention_rows_of(p);
    const int64_t room = s.gpu.block_shared;
    const bool some = FLOATS_16<D>::SHARED <= room, many = FLOATS_64<D>::SHARED <= room;
    /* Where all blocks are resident at once, and have a step each, the fewer rows of a block the better: tensor cores
       took 1.1 to 1.8 times as long. From all variants on random calls (H200, 2026-11-19). */
    const bool few = rows <= FLOATS_4<D>::ROWS || floats_resident_steps<FLOATS_4<D>>(s, p).seen <= 1.25;
    adze_status status = floats_run<FLOATS_4<D>>(s, p, FLOATS_FEW, few);
    if constexpr (FLOATS_16<D>::SHARED > (48 << 10)) /* else every GPU has room */
        if (status == ADZE_NO_KERNEL && !some)
            return floats_run<FLOATS_SMALL<D>>(s, p, FLOATS_SOME, true);
    /* Tiles of 128 long rows leave most multiprocessors empty: not for a few keys. */
    const attention_extent steps = floats_resident_steps<FLOATS_16<D>>(s, p);
    const bool resident = D > 192 ? steps.seen <= 2 : steps.most <= 1;
    if (status == ADZE_NO_KERNEL)
        status = floats_run<FLOATS_16<D>>(s, p, FLOATS_SOME, rows <= SOME_MOST || resident || !many);
    if (status == ADZE_NO_KERNEL)
        status = attention_tf32(s, p);
    return status == ADZE_NO_KERNEL ? floats_run<FLOATS_64<D>>(s, p, FLOATS_MANY, true) : status;
}
adze_status attention_floats(const cuda_call &s, const attention_params &p)
{
    const int widest = p.d > p.dv ? p.d : p.dv;
    return widest <= 64    ? floats_run<64>(s, p)
           : widest <= 128 ? floats_run<128>(s, p)
           : widest <= 192 ? floats_run<192>(s, p)
                           : floats_run<256>(s, p);
}
int64_t attention_floats_parts(const cuda_call &s, const attention_params &p)
{
    return std::max({split_parts(s, p, FLOATS_4<64>::ROWS), split_parts(s, p, FLOATS_16<64>::ROWS),
                     split_parts(s, p, FLOATS_64<64>::ROWS), attention_tf32_parts(s, p)});
}
