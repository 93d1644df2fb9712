/* norm_call.cuh - a call of rms_norm or layer_norm as their CUDA kernels take it. */
#ifndef ADZE_CUDA_NORM_CALL_CUH
#define ADZE_CUDA_NORM_CALL_CUH

#include "launch.cuh"

enum { X, OUT, RESIDUAL, SUM, SCALE, SHIFT, GATE, SCALE_TABLE, SHIFT_TABLE, GATE_TABLE, NORM_TENSORS };
enum { TABLE = SCALE_TABLE - SCALE }; /* from one of scale, shift and gate to its table */

struct norm_params {
    const void *data[NORM_TENSORS]; /* NULL: absent */
    const void *weight, *bias;
    int64_t dim;
    float eps, weight_offset, inverse_dim;
    int32_t rounding;
    uint32_t is_f32; /* one bit per tensor: it is f32 where x is not */
    bool weight_f32, bias_f32;
    bool centred;   /* layer_norm */
    int width;      /* elements of one load that all tensors allow: 16 stands for 16-byte vectors */
    int rows_width; /* the same of x, out, residual and sum alone */
    bool loose;     /* width is that of the rows alone: parameters are at any address */
    adze_rows rows;
};
/* Neither a modulation nor an f32 output of another x. */
static inline bool norm_unmodulated(const norm_params &g)
{
    bool modulated = g.is_f32 >> OUT & 1;
    for (int t = SCALE; t < NORM_TENSORS; t++)
        modulated = modulated || g.data[t];
    return !modulated;
}
/* Of modulations only a scale and a shift, in float: the other calls of norm_short.cu and norm_shifted.cu. `half`: x
   has 16 bits. */
static inline bool norm_scaled(const norm_params &g, bool half)
{
    bool scaled = (g.data[SCALE] || g.data[SHIFT]) && !(g.is_f32 >> OUT & 1);
    for (int t = GATE; t < NORM_TENSORS; t++)
        scaled = scaled && !g.data[t];
    return scaled && !(half && g.rounding & ADZE_ROUND_STEPS);
}
/* Whether tensor t is off a 16-byte border by as much as `like` in every row; as nothing, where `like` is t. */
static inline bool norm_alike(const norm_params &g, int t, int like, int64_t size)
{
    const uint64_t other = t == like ? 0 : (uint64_t)(uintptr_t)g.data[like];
    bool alike = ((uint64_t)(uintptr_t)g.data[t] - other) % 16 == 0;
    for (int d = 0; d < g.rows.rank && g.data[t]; d++)
        alike = alike && (g.rows.stride[t][d] - (t == like ? 0 : g.rows.stride[like][d])) * size % 16 == 0;
    return alike || !g.data[t];
}

/* A few aligned rows, so long that a cluster of blocks has each sooner than the registers of one block: a row of
   32640 bf16 took 2.6 us, and 4.6 (H200, 2026-11-19). */
static inline bool norm_few_long(const cuda_call &s, const norm_params &g, int64_t vectors)
{
    return g.rows_width == 16 && vectors > 2048 && g.rows.count * 16 <= s.gpu.sm_count && norm_unmodulated(g) &&
           adze_cuda_clusters(s.device);
}

/* norm_short.cu: short rows of x of a dtype at any address, as `variant`, or as `loose` in vectors that are shifted;
   ADZE_NO_KERNEL for any other call. */
extern "C" adze_status adze_norm_short_cuda(const cuda_call &s, const norm_params &g, int dtype, int variant,
                                            int loose);
/* norm_shifted.cu: x of a dtype at any address, as `variant`; ADZE_NO_KERNEL for any other call. */
extern "C" adze_status adze_norm_shifted_cuda(const cuda_call &s, const norm_params &g, int dtype, int variant);
/* norm_any.cu: any call, of x of a dtype. Variant `any` is norm_any, the one after it norm_loop. */
extern "C" adze_status adze_norm_any_cuda(const cuda_call &s, const norm_params &g, int dtype, int any);
/* norm_bytes.cu: any call with quantised rows. Variant `variant` is norm_bytes, the one after it norm_bytes_held. */
extern "C" adze_status adze_norm_bytes_cuda(const cuda_call &s, const norm_params &g, const adze_norm_args *a,
                                            int variant);

#endif
