/* attention_mixed.cu - attention of dtypes and addresses that have no kernel of their own: rows become floats on
   their way into shared memory (attention_floats.cuh). */
#include "attention_floats.cuh"
#include "attention_run.cuh"

#include <algorithm>

/* Few rows, many. Where rows are long a thread has fewer of them, for their sums. */
template <int D>
using MIXED_8 = floats_shape<D, (D > 128 ? 2 : 4), (D > 128 ? 4 : 2), (D > 128 ? 1 : 4), (D > 128 ? 16 : 64), true>;
template <int D>
using MIXED_64 = floats_shape<D, (D > 128 ? 4 : 8), (D > 128 ? 16 : 8), 1, (D > 128 ? 16 : 32), true>;
enum { MIXED_MOST = 512, MIXED_FEW_MOST = 16 }; /* elements of a row; rows: up to so many are blocks of 8 */

template <class S>
static adze_status mixed_launch(const cuda_call &s, attention_params p, int64_t parts, bool split)
{
    return grid_launch<S, attention_of_floats<mixed, S>>(s, p, parts, split);
}
template <int D>
static adze_status mixed_run(const cuda_call &s, const attention_params &p)
{
    typedef MIXED_8<D> few;
    typedef MIXED_64<D> many;
    const int64_t room = s.gpu.block_shared, parts = attention_mixed_parts(s, p);
    const bool is_few = attention_rows_of(p) <= MIXED_FEW_MOST || many::SHARED > room;
    if (s.takes(MIXED_FEW_SPLIT, few::SHARED <= room && parts > 1, is_few))
        return split_launch<mixed, MIXED_MOST>(s, p, parts, mixed_launch<few>);
    if (s.takes(MIXED_FEW, few::SHARED <= room, is_few))
        return mixed_launch<few>(s, p, attention_clusters<few>(s, p), false);
    return s.takes(MIXED_MANY, many::SHARED <= room) ? mixed_launch<many>(s, p, attention_clusters<many>(s, p), false)
                                                     : ADZE_NO_KERNEL;
}
adze_status attention_mixed(const cuda_call &s, const attention_params &p)
{
    const int widest = p.d > p.dv ? p.d : p.dv;
    if (p.sequences == 0 || p.dv == 0 || widest > MIXED_MOST)
        return ADZE_NO_KERNEL;
    return widest <= 128 ? mixed_run<128>(s, p) : mixed_run<MIXED_MOST>(s, p);
}
int64_t attention_mixed_parts(const cuda_call &s, const attention_params &p)
{
    return p.dv <= MIXED_MOST ? split_parts(s, p, MIXED_8<128>::ROWS) : 1;
}
