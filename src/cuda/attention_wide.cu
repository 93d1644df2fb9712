/* attention_wide.cu - attention of 16-bit elements in rows of more than 256: which shape of block takes a call. */
#include "attention_run.cuh"
#include "attention_wide.cuh"

typedef wide_shape<16, 64> WIDE_16;
typedef wide_shape<64, 32> WIDE_64;

template <typename T, class S>
static adze_status wide_launch(const cuda_call &s, attention_params p, int64_t parts, bool split)
{
    p.parts = (int)parts, p.clustered = !split && parts > 1;
    return launch(s, attention_wide<T, S>, attention_tiles(p, S::ROWS) * parts, dim3(S::THREADS),
                  launch_shape(S::SHARED, split ? 1 : parts, attention_pairs(p)), p);
}
template <typename T>
static adze_status wide_run(const cuda_call &s, const attention_params &p)
{
    const int64_t rows = attention_rows_of(p), room = s.gpu.block_shared, parts = split_parts(s, p, WIDE_16::ROWS);
    if (s.takes(WIDE_FEW_SPLIT, WIDE_16::SHARED <= room && parts > 1, rows <= WIDE_16::ROWS))
        return split_launch<T, WIDE_16::D>(s, p, parts, wide_launch<T, WIDE_16>);
    if (s.takes(WIDE_FEW, WIDE_16::SHARED <= room, rows <= WIDE_16::ROWS))
        return wide_launch<T, WIDE_16>(s, p, attention_clusters<WIDE_16>(s, p), false);
    return s.takes(WIDE_MANY, WIDE_64::SHARED <= room)
               ? wide_launch<T, WIDE_64>(s, p, attention_clusters<WIDE_64>(s, p), false)
               : ADZE_NO_KERNEL;
}
adze_status attention_wide_rows(const cuda_call &s, const attention_params &p, bool is_bf16)
{
    return is_bf16 ? wide_run<bf16>(s, p) : wide_run<f16>(s, p);
}
