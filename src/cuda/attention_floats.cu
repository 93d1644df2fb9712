/* attention_floats.cu - attention of floats: which shape of block takes a call. */
#include "attention_floats.cuh"
#include "attention_run.cuh"

#include <algorithm>

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
template <int D>
static adze_status floats_run(const cuda_call &s, const attention_params &p)
{
    const int64_t rows = attention_rows_of(p);
    const int64_t room = s.gpu.block_shared;
    const bool some = FLOATS_16<D>::SHARED <= room, many = FLOATS_64<D>::SHARED <= room;
    const auto blocks = [&](int64_t each) { return attention_tiles(p, each) * attention_pairs(p); };
    const auto steps = [&](int64_t each, int64_t keys) {
        return attention_steps_of(p, attention_queries(p, each), keys);
    };
    /* Some rows of a single step are the smallest blocks' if all of these are resident at once: 61 rows and keys took
       8.2 us, and 15.8 on tensor cores (H200, 2026-11-19). */
    const bool few =
        rows <= FLOATS_4<D>::ROWS || (rows <= 2 * SOME_MOST && blocks(FLOATS_4<D>::ROWS) <= s.gpu.sm_count * 2 &&
                                      steps(FLOATS_4<D>::ROWS, FLOATS_4<D>::KEYS).most <= 1);
    adze_status status = floats_run<FLOATS_4<D>>(s, p, FLOATS_FEW, few);
    if constexpr (FLOATS_16<D>::SHARED > (48 << 10)) /* else every GPU has room */
        if (status == ADZE_NO_KERNEL && !some)
            return floats_run<FLOATS_SMALL<D>>(s, p, FLOATS_SOME, true);
    /* Tiles of 128 long rows leave most multiprocessors empty: not for a few keys. */
    const bool resident = D > 192 && blocks(FLOATS_16<D>::ROWS) <= s.gpu.sm_count * FLOATS_16<D>::BLOCKS &&
                          steps(FLOATS_16<D>::ROWS, FLOATS_16<D>::KEYS).seen <= 2;
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
