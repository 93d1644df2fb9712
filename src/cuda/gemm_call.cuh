/* gemm_call.cuh - a call of gemm as its CUDA kernels take it, and what they do with a finished product. */
#ifndef ADZE_CUDA_GEMM_CALL_CUH
#define ADZE_CUDA_GEMM_CALL_CUH

#include "act.cuh"
#include "launch.cuh"
#include "quantised.cuh"
#include "rows.cuh"
#include "vec.cuh"

enum { GEMM_X, GEMM_OUT, GEMM_OUT2, GEMM_OUT3, GEMM_RESIDUAL, GEMM_GATE, GEMM_X_SCALE, GEMM_TENSORS };
enum { GEMM_PARTS = 3, GEMM_ENDS = 4 }; /* GEMM_ENDS: outputs of a thread whose operands are loaded together */

/* On targets other than sm_90 the launch bounds must allow one block all registers, or the compiler spills. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int GEMM_ONE_BLOCK = 1;
#else
constexpr int GEMM_ONE_BLOCK = 0;
#endif

struct gemm_part { /* one weight, and where its product goes */
    const char *w;
    int64_t w_stride; /* bytes from row to row */
    const void *bias;
    void *out;                         /* of the first token and column */
    int64_t n;                         /* rows of w; 0: absent */
    const void *scale, *zero;          /* of a quantised w; zero may be absent */
    int64_t scale_stride, zero_stride; /* elements from one group of rows to the next */
    int scale_dtype;
    int64_t column; /* the first column of residual and gate */
    int out_rows;   /* GEMM_OUT, _OUT2 or _OUT3: whose rows */
    bool bias_f32;
};
struct gemm_params {
    gemm_part part[GEMM_PARTS];
    const char *x;
    int64_t m, n, k; /* n: rows of all weights; of the gate's alone with glu */
    adze_rows rows;  /* of one batch: tokens of the GEMM_TENSORS, strides in elements */
    const void *norm_weight, *norm_bias;
    const void *residual, *gate;
    int64_t batches, x_batch, w_batch;             /* x_batch, w_batch: bytes from one batch to the next */
    int64_t out_batch, residual_batch, gate_batch; /* elements */
    float eps, weight_offset;
    int norm, act, rounding;
    int format;            /* a weight_format */
    int group, group_rows; /* of quantised weights; group 0: whole rows */
    bool glu, norm_weight_f32, norm_bias_f32, gate_f32, out_f32, const_weights, batch_invariant;
    const float *x_scale; /* of quantised x, whose format is that of the weights; else NULL */
    bool out_bf16;
};

/* The scale and the zero of a row of a part, in a group of columns. */
__device__ __forceinline__ float gemm_scale(const gemm_params &p, int part, int64_t row, int64_t group)
{
    const gemm_part &w = p.part[part];
    const int64_t at = (p.group_rows > 1 ? row / p.group_rows : row) * w.scale_stride + group;
    return w.scale_dtype == ADZE_F32   ? ((const float *)w.scale)[at]
           : w.scale_dtype == ADZE_F16 ? to_float(((const f16 *)w.scale)[at])
                                       : to_float(((const bf16 *)w.scale)[at]);
}
__device__ __forceinline__ float gemm_zero(const gemm_params &p, int part, int64_t row, int64_t group)
{
    const gemm_part &w = p.part[part];
    return w.zero ? (float)((const uint8_t *)w.zero)[row * w.zero_stride + group] : 8;
}
__host__ __device__ inline bool gemm_has_zero(const gemm_params &p)
{
    return p.part[0].zero || p.part[1].zero || p.part[2].zero;
}

/* What becomes of y = x . w^T of a token and a row of a part's weight; y2 is the value's where glu. FLAT: the tokens
   have one dimension. BYTES: x is quantised. Its operands are loaded first, of several outputs before the first of
   them is stored: out may be the residual, so that the compiler keeps loads behind stores. */
template <typename T, bool FLAT = true, bool BYTES = false>
struct gemm_end {
    float x_scale, scale, scale2, bias, bias2, gate, residual;
    int64_t to;
    __device__ __forceinline__ static bool scaled(const gemm_params &p)
    {
        return BYTES || (p.format != OF_X && p.group == 0);
    }
    __device__ __forceinline__ void load(const gemm_params &p, int part, int64_t batch, int64_t token, int64_t row)
    {
        const gemm_part &w = p.part[part];
        const row_index at = FLAT ? row_index{{token, 0, 0, 0}} : row_split(p.rows, token);
        auto offset = [&](int of) { return FLAT ? token * p.rows.stride[of][0] : row_offset(p.rows, of, at); };
        auto param = [](const void *from, bool f32, int64_t element) {
            float v[1];
            load_param<T, 1>(from, f32, element, v);
            return v[0];
        };
        if (BYTES)
            x_scale = p.x_scale[offset(GEMM_X_SCALE)];
        if (scaled(p)) {
            scale = gemm_scale(p, part, row, 0);
            scale2 = p.glu ? gemm_scale(p, 1, row, 0) : 0;
        }
        if (w.bias)
            bias = param(w.bias, w.bias_f32, row);
        if (p.glu && p.part[1].bias)
            bias2 = param(p.part[1].bias, p.part[1].bias_f32, row);
        const int64_t column = w.column + row;
        if (p.residual && p.gate)
            gate = param(p.gate, p.gate_f32, batch * p.gate_batch + offset(GEMM_GATE) + column);
        if (p.residual)
            residual = param(p.residual, p.out_f32, batch * p.residual_batch + offset(GEMM_RESIDUAL) + column);
        to = batch * p.out_batch + offset(w.out_rows) + row;
    }
    __device__ __forceinline__ void store(const gemm_params &p, int part, float y, float y2) const
    {
        const gemm_part &w = p.part[part];
        const bool steps = p.rounding & ADZE_ROUND_STEPS;
        float f[1];
        if (BYTES)
            y *= x_scale, y2 *= x_scale;
        if (scaled(p)) {
            y *= scale;
            if (p.glu)
                y2 *= scale2;
        }
        if (w.bias)
            y += bias;
        f[0] = steps ? round_to<T>(y) : y;
        if (p.act) {
            act_all<1>(p.act, f);
            f[0] = steps ? round_to<T>(f[0]) : f[0];
        }
        if (p.glu) {
            if (p.part[1].bias)
                y2 += bias2;
            f[0] *= steps ? round_to<T>(y2) : y2;
            f[0] = steps ? round_to<T>(f[0]) : f[0];
        }
        if (p.residual) {
            if (p.gate) {
                f[0] *= gate;
                f[0] = steps ? round_to<T>(f[0]) : f[0];
            }
            f[0] += residual;
        }
        if (p.out_f32)
            ((float *)w.out)[to] = f[0];
        else
            ((T *)w.out)[to] = from_float<T>(f[0]);
    }
};
template <typename T, bool FLAT = true, bool BYTES = false>
__device__ __forceinline__ void gemm_finish(const gemm_params &p, int part, int64_t batch, int64_t token, int64_t row,
                                            float y, float y2)
{
    gemm_end<T, FLAT, BYTES> end;
    end.load(p, part, batch, token, row);
    end.store(p, part, y, y2);
}

/* Asks for what gemm_finish reads of an output, into L2, so that few products do not end with loads from memory. */
template <typename T, bool FLAT = true>
__device__ __forceinline__ void gemm_prefetch(const gemm_params &p, int part, int64_t batch, int64_t token,
                                              int64_t row)
{
    const gemm_part &w = p.part[part];
    const row_index at = FLAT ? row_index{{token, 0, 0, 0}} : row_split(p.rows, token);
    auto ask = [&](const void *from, bool f32, int64_t element) {
        prefetch((const char *)from + element * (f32 ? 4 : (int)sizeof(T)));
    };
    auto offset = [&](int of) { return FLAT ? token * p.rows.stride[of][0] : row_offset(p.rows, of, at); };
    if (w.bias)
        ask(w.bias, w.bias_f32, row);
    if (p.residual)
        ask(p.residual, p.out_f32, batch * p.residual_batch + offset(GEMM_RESIDUAL) + w.column + row);
    if (p.gate)
        ask(p.gate, p.gate_f32, batch * p.gate_batch + offset(GEMM_GATE) + w.column + row);
}

struct gemm_rows { /* some rows of one weight: from row `at` of part `part`, `count` of them */
    int part, at, count;
};
/* Tile `tile` of the weights' rows in tiles of `size`, none of which has rows of two weights. */
__device__ __forceinline__ gemm_rows gemm_tile_rows(const gemm_params &p, int64_t tile, int size)
{
    int part = 0;
    int64_t tiles = (p.part[0].n + size - 1) / size;
    if (!p.glu)
        while (part + 1 < GEMM_PARTS && tile >= tiles) {
            tile -= tiles;
            part++;
            tiles = (p.part[part].n + size - 1) / size;
        }
    const int64_t at = tile * size, rest = p.part[part].n - at;
    return {part, (int)at, rest < size ? (int)rest : size};
}
static inline int64_t gemm_tiles(const gemm_params &p, int64_t size)
{
    int64_t tiles = ceil_div(p.part[0].n, size);
    if (!p.glu)
        tiles += ceil_div(p.part[1].n, size) + ceil_div(p.part[2].n, size);
    return tiles;
}

/* `count` tokens of a call, or as many as it has, from token `at` on. */
template <typename T>
static gemm_params gemm_tokens(const gemm_params &all, int64_t at, int64_t count)
{
    const int64_t out_size = all.out_f32 ? 4 : 2;
    gemm_params p = all;
    p.m = all.m - at < count ? all.m - at : count;
    p.x += at * p.rows.stride[GEMM_X][0] * (int64_t)sizeof(T);
    for (gemm_part &part : p.part)
        if (part.out)
            part.out = (char *)part.out + at * p.rows.stride[part.out_rows][0] * out_size;
    if (p.residual)
        p.residual = (const char *)p.residual + at * p.rows.stride[GEMM_RESIDUAL][0] * out_size;
    if (p.gate)
        p.gate = (const char *)p.gate + at * p.rows.stride[GEMM_GATE][0] * (p.gate_f32 ? 4 : 2);
    return p;
}

/* `bytes` of shared memory, or as much as leaves room for `each` blocks on a multiprocessor and no more. In a chain
   with PDL the blocks of later kernels would otherwise take places of this one's: some multiprocessors then have more
   of its blocks than others, and it takes as long as those do. */
static inline size_t gemm_alone(const cuda_call &s, size_t bytes, int64_t each)
{
    const size_t least = (size_t)(s.gpu.block_shared / (each + 1) / 128 * 128 + 128);
    return adze_cuda_clusters(s.device) && bytes < least ? least : bytes;
}

/* gemm_params.cu: the args of the op as params; x, dense at the start of the call's scratch, and the launch that puts
   its norm there, or a copy of 16-bit elements. */
extern "C" gemm_params gemm_params_of(const adze_gemm_args *a);
extern "C" adze_tensor gemm_dense(const adze_gemm_args *a);
extern "C" adze_status gemm_norm(const cuda_call &s, const adze_gemm_args *a, const gemm_params &p);
extern "C" int gemm_copies(const gemm_params &p, int dtype);
extern "C" adze_status gemm_copy(const cuda_call &s, const adze_gemm_args *a, const gemm_params &p);

/* gemm_direct.cu: quantised weights of 16-byte rows. `ask`: only whether the shape takes the call. */
enum {
    GEMM_DIRECT_16X8,
    GEMM_DIRECT_32X16,
    GEMM_DIRECT_64X8,
    GEMM_DIRECT_64X16,
    GEMM_DIRECT_WIDE_32X16,
    GEMM_DIRECT_WIDE_64X8,
    GEMM_DIRECT_SHAPES
};
extern "C" adze_status gemm_direct_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, int ask);
extern "C" int gemm_direct_choice(const cuda_call &s, const gemm_params &p);

/* gemm_compact.cu: the same, up to 16 tokens, in the calls that are most common. */
enum { GEMM_COMPACT_8, GEMM_COMPACT_8_RING, GEMM_COMPACT_16, GEMM_COMPACT_SHAPES };
extern "C" adze_status gemm_compact_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, int ask);
extern "C" int gemm_compact_choice(const cuda_call &s, const gemm_params &p, int dtype);

/* gemm_fixed.cu: the same, one token and i8 or u4. */
extern "C" adze_status gemm_fixed_run(const cuda_call &s, const gemm_params &p, int dtype, int ask);

/* gemm_ring.cu: the same as gemm_direct.cu, with or without norm. */
enum { GEMM_RING_8, GEMM_RING_8_TWICE, GEMM_RING_16, GEMM_RING_SHAPES };
extern "C" adze_status gemm_ring_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, int ask);

/* gemm_shifted.cu: weights at any address. `ask`: only whether the shape takes the call; `time`: about how many
   cycles the choice takes. */
enum { GEMM_SHIFTED_8, GEMM_SHIFTED_8_TWICE, GEMM_SHIFTED_16, GEMM_SHIFTED_32, GEMM_SHIFTED_SHAPES };
extern "C" adze_status gemm_shifted_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, int ask);
extern "C" int gemm_shifted_choice(const cuda_call &s, const gemm_params &p, int dtype, double *time);

/* gemm_rows.cu: few tokens of any call without norm, in float arithmetic. `ask`: only whether it takes the call. */
extern "C" adze_status gemm_rows_run(const cuda_call &s, const gemm_params &p, int dtype, int ask);

/* gemm_quantised_tile.cu: quantised weights of 16-byte rows and many tokens, without norm. */
enum {
    GEMM_QUANTISED_TILE_32X128,
    GEMM_QUANTISED_TILE_64X128,
    GEMM_QUANTISED_TILE_64X128_TWICE,
    GEMM_QUANTISED_TILE_SHAPES
};
extern "C" adze_status gemm_quantised_tile_run(const cuda_call &s, const gemm_params &p, int dtype, int shape,
                                               int ask);
extern "C" int gemm_quantised_tile_choice(const cuda_call &s, const gemm_params &p, int dtype);

/* gemm_swapped_sm90.cu: aligned rows and many tokens on Hopper, without norm; groups of 128 or more. The numbers are
   tokens and rows of a tile. */
enum { GEMM_SWAPPED_32X128, GEMM_SWAPPED_32X256, GEMM_SWAPPED_64X128, GEMM_SWAPPED_64X256, GEMM_SWAPPED_SHAPES };
extern "C" adze_status gemm_swapped_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, int ask);
extern "C" int gemm_swapped_choice(const cuda_call &s, const gemm_params &p, int dtype, double *time);

/* gemm_bytes.cu: quantised x. Some of its shapes take every such call. */
enum {
    GEMM_BYTES_DIRECT_16X16,
    GEMM_BYTES_DIRECT_32X16,
    GEMM_BYTES_DIRECT16_32X8,
    GEMM_BYTES_DIRECT32_32X8,
    GEMM_BYTES_SLICED_16X64,
    GEMM_BYTES_SLICED_32X64,
    GEMM_BYTES_SLICED_64X64,
    GEMM_BYTES_32X64,
    GEMM_BYTES_64X64,
    GEMM_BYTES_128X128,
    GEMM_BYTES_WGMMA_256,
    GEMM_BYTES_WGMMA_128,
    GEMM_BYTES_ANY_8,
    GEMM_BYTES_ANY_64,
    GEMM_BYTES_SHAPES
};
extern "C" adze_status gemm_bytes_run(const cuda_call &s, const gemm_params &p, int dtype, int shape, int ask);
extern "C" int gemm_bytes_choice(const cuda_call &s, const gemm_params &p);

/* gemm_sm90.cu: x of i8 and aligned rows, many tokens, on Hopper; `wide`: by 256 rows of the weights, else by 128. */
extern "C" adze_status gemm_wgmma_run(const cuda_call &s, const gemm_params &p, int wide, int ask);

/* gemm_bulk.cu: one or two tokens. `ask`: only whether it takes the call. */
extern "C" adze_status gemm_bulk_run(const cuda_call &s, const gemm_params &p, int dtype, int ask);

#endif
