/* attention_quantised.cu - attention on tensor cores whose keys and values are i8 or f8e4m3: they are made q's dtype,
   which is exact, on their way from shared memory to the tensor cores. */
#include "attention_run.cuh"

/* Some rows: half of the warps along the keys, so that fewer make the same keys q's dtype. */
template <int D, weight_format F>
using QUANTISED_FEW = attention_shape<D, 1, 1, 4, 64, (D > 128 ? 3 : 4), F>;
template <int D, weight_format F>
using QUANTISED_SOME = attention_shape<D, (D > 128 ? 1 : 2), 2, 2, (D > 128 ? 64 : 32), (D > 128 ? 3 : 6), F>;

template <int TILES, weight_format F>
using QUANTISED_DIRECT = direct_attention<128, TILES, 2 / TILES, 4, 2, F>;

template <typename T, weight_format F>
static adze_status quantised_run(const cuda_call &s, const attention_params &p)
{
    const int widest = p.d > p.dv ? p.d : p.dv;
    if (widest <= 128) {
        typedef QUANTISED_DIRECT<1, F> few;
        const adze_status status = direct_run<T, few, few, QUANTISED_DIRECT<2, F>>(s, p);
        if (status != ADZE_NO_KERNEL)
            return status;
    }
    const bool few = attention_rows_of(p) <= 16;
    const tile_choice choice = {few, few, true};
    return widest <= 64    ? attention_few<T, QUANTISED_FEW<64, F>, QUANTISED_SOME<64, F>>(s, p, choice)
           : widest <= 128 ? attention_few<T, QUANTISED_FEW<128, F>, QUANTISED_SOME<128, F>>(s, p, choice)
                           : attention_few<T, QUANTISED_FEW<256, F>, QUANTISED_SOME<256, F>>(s, p, choice);
}
template <typename T>
static adze_status quantised_run(const cuda_call &s, const attention_params &p)
{
    return p.k_dtype == ADZE_I8 ? quantised_run<T, OF_I8>(s, p) : quantised_run<T, OF_F8>(s, p);
}
adze_status attention_quantised(const cuda_call &s, const attention_params &p, bool is_bf16)
{
    return is_bf16 ? quantised_run<bf16>(s, p) : quantised_run<f16>(s, p);
}
