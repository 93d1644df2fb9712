/* adze.h - transformer kernels for CPUs and CUDA GPUs, in one plain C header. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ADZE_H
#define ADZE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ADZE_API __attribute__((visibility("default")))

/* ---- The library ---- */

#define ADZE_VERSION 100 /* 0.1.0: major * 10000 + minor * 100 + patch */

ADZE_API uint32_t adze_version(void); /* of the loaded library; ADZE_VERSION is that of the header */

/* Every call returns a status. Numbers are never reused or renumbered. */
typedef enum adze_status {
    ADZE_OK = 0,
    ADZE_BAD_ARG = 1,   /* a shape, stride, rank, pointer, flag or option breaks the op's contract */
    ADZE_BAD_DTYPE = 2, /* the op is defined, but not for these dtypes */
    ADZE_NO_KERNEL = 3, /* the call is valid, but nothing here can run it */
    ADZE_SCRATCH = 4,   /* scratch is smaller than what adze_<op>_scratch() gives */
    ADZE_DEVICE = 5     /* CUDA reported an error */
} adze_status;

ADZE_API const char *adze_last_error(void); /* one sentence about this thread's last failure; never NULL */

typedef enum adze_dtype {
    ADZE_NONE = 0, /* an absent tensor: a zeroed adze_tensor is one */
    ADZE_F32 = 1,
    ADZE_F16 = 2,
    ADZE_BF16 = 3,
    ADZE_F8E4M3 = 4, /* without infinities, as torch.float8_e4m3fn */
    ADZE_I8 = 5,
    ADZE_I4 = 6, /* no tensor has it: two are packed in a byte of ADZE_U8 */
    ADZE_I32 = 7,
    ADZE_I64 = 8,
    ADZE_BOOL = 9,
    ADZE_F64 = 10,
    ADZE_U8 = 11
} adze_dtype;

/* A view of memory the caller owns. Strides count elements. */
typedef struct adze_tensor {
    void *data; /* may be NULL when there are no elements */
    int64_t shape[5], stride[5];
    int32_t rank, dtype;
} adze_tensor;

/* Where a call runs. Calls on a CUDA stream return before the work is done. */
typedef struct adze_stream {
    int32_t device; /* ADZE_CPU, or a CUDA device number */
    void *handle;   /* cudaStream_t; NULL is the default stream */
} adze_stream;
#define ADZE_CPU (-1)

/* Loads the kernels of a device, so that later calls on it may be captured in a CUDA graph; ADZE_DEVICE where this
   build has no code for the device. ADZE_CPU is allowed. */
ADZE_API adze_status adze_prepare(int32_t device);

/* Threads on the CPU. By default the library has a small thread pool of its own. A host that has a pool passes its
   parallel loop here, once, before the first call. parallel_for must call body(context, begin, end) on ranges that
   cover 0..count-1 once each, none shorter than grain except the last, and return when all are done. NULL selects
   the library's own pool again. */
typedef void (*adze_range_fn)(void *context, int64_t begin, int64_t end);
typedef void (*adze_parallel_for_fn)(int64_t count, int64_t grain, adze_range_fn body, void *context);
ADZE_API void adze_set_parallel_for(adze_parallel_for_fn parallel_for);
/* How many threads of the library's own pool a call may use, the caller's included: 1 to 256. 0 selects the default:
   ADZE_THREADS of the environment, or the number of CPUs that the process may use (affinity and cgroup quota).
   Running calls keep their threads. */
ADZE_API adze_status adze_set_threads(int32_t threads);

/* First in every args struct; write .call = ADZE_CALL(rms_norm). The size lets a struct grow at its end: a newer
   library takes the fields that its caller lacks as zero, an older one refuses fields that it does not know. A size
   below that of the op's first release is refused: it belongs to another op. */
typedef struct adze_call {
    uint32_t size, flags;
    void *scratch; /* device memory on CUDA, 16-byte aligned; only for ops that have an adze_<op>_scratch(), which
                      may be asked before tensors have memory */
    size_t scratch_size;
} adze_call;
/* clang-format off */
#define ADZE_CALL(op) {(uint32_t)sizeof(adze_##op##_args), 0, NULL, 0}
/* clang-format on */

/* Flags of a call. ADZE_CONST_WEIGHTS: nothing still running on the stream writes its weights and tables (weight,
   bias, q_weight, k_weight, cos, sin, sinks, every *_table but block_table; of gemm w, w2, w3, their scales, zeros
   and biases, norm_weight and norm_bias), so they may be read early. ADZE_BATCH_INVARIANT, of gemm: the bits of a row
   of out do not depend on m or on the other rows. ADZE_CONST_CACHE, of attention: nothing still running on the stream
   writes lengths, block_table, or what k, v and their scales have of a sequence before its last m keys. So it is when
   kv_append has just written m tokens: all that is older may be read early. */
#define ADZE_CONST_WEIGHTS   1u
#define ADZE_BATCH_INVARIANT 2u
#define ADZE_CONST_CACHE     4u

/* Any op: tensors are views with any strides whose last dimension is contiguous, of rank 1 to 5, any size and
   any alignment that suits the dtype. "may be x" means that an output may be the very same view as x: address,
   shape, strides and dtype. All other overlaps of an output, with an input or another output, are refused. "like x"
   means x's shape; "to x" means a shape that broadcasts to x's, its last dimension in full. Numbers must be finite.
   Arithmetic is in float, and results are rounded once, when they are stored, unless .rounding selects the
   intermediate roundings of a model: */
#define ADZE_ROUND_NORM  1 /* the normalised value is rounded to x's dtype before the weight multiplies it */
#define ADZE_ROUND_STEPS 2 /* so is the result of each later step: gate, modulation, rotation, activation */
#define ADZE_ROUND_VALUE 4 /* qk_norm_rope: the norm's result is rounded, the rotation is not (STEPS has both) */
#define ADZE_FLOAT_SUM   8 /* a norm reads residual + x before that sum is rounded to be stored */

/* ---- Norms ---- */

/* rms_norm:   n = h / sqrt(mean(h^2) + eps)
   layer_norm: n = (h - mean(h)) / sqrt(mean((h - mean(h))^2) + eps)        means over the last dimension
   both:       h   = residual + (gate + gate_table) * x        (absent residual: h = x; absent gate: factor 1)
               sum = h
               out = (n * (weight + weight_offset) + bias) * (1 + scale + scale_table) + shift + shift_table
   The sum is rounded to x's dtype before it is normalised, unless ADZE_FLOAT_SUM. With ADZE_ROUND_STEPS each
   of gate + gate_table, its product with x, the affine norm, scale + scale_table, 1 + that, the product,
   shift + shift_table and the sum is rounded to x's dtype.
   With out_dtype i8 or f8e4m3, out is rounded to x's dtype as it would be stored, and its rows are then quantised:
   out and out_scale are what quantize makes of them. */
typedef struct adze_norm_args {
    adze_call call;
    adze_tensor out;                /* like x, of out_dtype; may be x, residual or shift */
    adze_tensor sum;                /* like x; with a residual only, and then optional; may be x or residual */
    adze_tensor x;                  /* [..., dim]: f32, f16, bf16 */
    adze_tensor residual;           /* like x */
    adze_tensor weight, bias;       /* [dim]; these and all below: x's dtype or f32 */
    adze_tensor gate, gate_table;   /* to x; gate needs residual, gate_table needs gate */
    adze_tensor scale, scale_table; /* to x; scale_table needs scale */
    adze_tensor shift, shift_table; /* to x; shift_table needs shift */
    float eps, weight_offset;       /* weight_offset: Gemma's 1 */
    int32_t rounding;               /* ADZE_ROUND_NORM | ADZE_ROUND_STEPS | ADZE_FLOAT_SUM */
    int32_t out_dtype;              /* 0 means x's dtype; or ADZE_F32, ADZE_I8, ADZE_F8E4M3 */
    adze_tensor out_scale;          /* of quantised out, f32: x's shape without dim, or [1] */
} adze_norm_args;
typedef adze_norm_args adze_rms_norm_args;
typedef adze_norm_args adze_layer_norm_args;
ADZE_API adze_status adze_rms_norm(adze_stream stream, const adze_rms_norm_args *args);
ADZE_API adze_status adze_layer_norm(adze_stream stream, const adze_layer_norm_args *args);

/* group_norm: out = act((x - mean) / sqrt(variance + eps) * weight[c] + bias[c]), mean and variance over one
   batch entry's group of channels / groups neighbouring channels and all its positions */
typedef struct adze_group_norm_args {
    adze_call call;
    adze_tensor out;          /* like x; may be x */
    adze_tensor x;            /* [batch, channels, ...], or [batch, ..., channels] when channels_last */
    adze_tensor weight, bias; /* [channels]; x's dtype or f32 */
    float eps;
    int32_t groups;
    int32_t channels_last;
    int32_t act; /* an adze_act, 0 for none; ADZE_ROUND_STEPS rounds the norm before it */
    int32_t rounding;
    int32_t reserved; /* zero */
} adze_group_norm_args;
ADZE_API adze_status adze_group_norm(adze_stream stream, const adze_group_norm_args *args);
ADZE_API adze_status adze_group_norm_scratch(adze_stream stream, const adze_group_norm_args *args, size_t *bytes);

/* gated_add: out = residual + (gate + gate_table) * x, the sum of a norm without the norm. ADZE_ROUND_STEPS rounds
   gate + gate_table and the product to x's dtype. */
typedef struct adze_gated_add_args {
    adze_call call;
    adze_tensor out;              /* like x; may be x, residual or gate */
    adze_tensor x;                /* [..., dim]: f32, f16, bf16 */
    adze_tensor residual;         /* like x */
    adze_tensor gate, gate_table; /* to x; x's dtype or f32 */
    int32_t rounding;
    int32_t reserved; /* zero */
} adze_gated_add_args;
ADZE_API adze_status adze_gated_add(adze_stream stream, const adze_gated_add_args *args);

/* ---- Activations ---- */

typedef enum adze_act {
    ADZE_ACT_NONE = 0,
    ADZE_ACT_SILU = 1,       /* x * sigmoid(x); also called swish */
    ADZE_ACT_GELU = 2,       /* x * (1 + erf(x / sqrt(2))) / 2 */
    ADZE_ACT_GELU_TANH = 3,  /* x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2; gelu_new, gelu_fast */
    ADZE_ACT_GELU_QUICK = 4, /* x * sigmoid(1.702 x); quick_gelu */
    ADZE_ACT_RELU = 5,
    ADZE_ACT_RELU2 = 6, /* max(x, 0)^2 */
    ADZE_ACT_SIGMOID = 7
} adze_act;
ADZE_API int32_t adze_act_from_name(const char *name); /* by any of the names Hugging Face uses; -1: unknown */

/* activation: out = act(x) */
typedef struct adze_activation_args {
    adze_call call;
    adze_tensor out, x; /* [..., dim]; out may be x */
    int32_t act;        /* an adze_act, not 0 */
    int32_t reserved;   /* zero */
} adze_activation_args;
ADZE_API adze_status adze_activation(adze_stream stream, const adze_activation_args *args);

/* glu: out = act(gate) * value. With a value tensor, x is the gate; without, x holds both halves of each row.
   ADZE_ROUND_STEPS rounds act(gate) to x's dtype. With out_dtype i8 or f8e4m3, out is rounded to x's dtype and its
   rows are then quantised, as those of a norm. */
typedef struct adze_glu_args {
    adze_call call;
    adze_tensor out;     /* [..., dim], of out_dtype; may be x or value, but must not overlap a packed x */
    adze_tensor x;       /* [..., dim] with value, [..., 2 * dim] without */
    adze_tensor value;   /* [..., dim] */
    int32_t act;         /* an adze_act; 0 means ADZE_ACT_SILU */
    int32_t value_first; /* packed x: 0 is gate then value, 1 is value then gate */
    int32_t rounding;
    int32_t out_dtype;     /* 0 means x's dtype; or ADZE_I8, ADZE_F8E4M3 */
    adze_tensor out_scale; /* of quantised out, f32: out's shape without dim, or [1] */
} adze_glu_args;
ADZE_API adze_status adze_glu(adze_stream stream, const adze_glu_args *args);

/* softmax: out[i] = exp(y[i] - max(y)) / sum(exp(y - max(y))), y = x * scale + mask, over the last dimension
 */
typedef struct adze_softmax_args {
    adze_call call;
    adze_tensor out, x; /* [..., dim]; out may be x or mask */
    adze_tensor mask;   /* to x, x's dtype or f32 */
    float scale;        /* 0 means 1 */
    int32_t reserved;   /* zero */
} adze_softmax_args;
ADZE_API adze_status adze_softmax(adze_stream stream, const adze_softmax_args *args);

/* ---- Matrix products ---- */

#define ADZE_NORM_RMS   1
#define ADZE_NORM_LAYER 2

/* Quantised weights. The weight at row i and column j is (q - zero) * scale, a real number that is not rounded: q is
   the stored number, and scale and zero are those of the group that holds (i, j). A group is `group_rows` rows by
   `group` columns, the last ones perhaps fewer, and its scale is scale[i / group_rows, j / group]. Scales are f32,
   f16 or bf16, whatever x is. Layouts, row by row, without gaps in a row:

   i8       [n, k]              one byte for each q, -128 to 127; no zero
   f8e4m3   [n, k]              one byte for each q, 1 sign bit, 4 of exponent (bias 7), 3 of mantissa; no zero
   u8       [n, (k + 1) / 2]    with format ADZE_FORMAT_U4: two q of 0 to 15 in a byte, column 2 j in bits 0 to 3 and
                                column 2 j + 1 in bits 4 to 7; the last 4 bits of an odd row are not read. zero is
                                of u8, one byte for each group; without it, it is 8 */
#define ADZE_FORMAT_DTYPE 0 /* q is what the dtype says */
#define ADZE_FORMAT_U4    1

/* gemm: y_i = p(x) . w_i^T + bias_i, out = residual + gate * f(y). p(x) is x, or its norm by `norm` as rms_norm and
   layer_norm have it, rounded to x's dtype. f(y) is act(y); with glu it is act(y) * y2. w2 and w3 read the same x:
   the columns of y2 and y3 follow those of y in out, or with `separate` they are out2 and out3. Sums are in float.
   ADZE_ROUND_STEPS rounds y, act(y), the product of glu, and gate * f to x's dtype; ADZE_ROUND_NORM is that of norm.
   Infinities and NaN in x and w come out as the formula has them. A batch of products has w [batch, n, k] of x's
   dtype and x [batch, m, k], without w2 and norm.
   x may be quantised, of i8 with w of i8 or f8e4m3 with w of f8e4m3, without norm, where w's scales are of whole
   rows. Then y is the product of the stored numbers, times x_scale, times w_scale, plus bias. The product of i8 is
   exact; as a float it is rounded, and so it is after each scale. On Hopper the tensor cores add f8e4m3 of more than
   16 tokens with 14 bits, 128 products at a time, unless ADZE_BATCH_INVARIANT. "x's dtype" above and below is then
   out's. Only norm needs scratch; products of many tokens, and of x off 16-byte borders, are faster with all that
   adze_gemm_scratch() says. */
typedef struct adze_gemm_args {
    adze_call call;
    adze_tensor out;        /* [..., n], of out_dtype; n + n2 + n3 columns without separate; may be residual */
    adze_tensor out2, out3; /* [..., n2], [..., n3], with separate */
    adze_tensor x;          /* [..., k]: f32, f16, bf16; i8 (k less than 131072) and f8e4m3 with x_scale */
    adze_tensor w;          /* [n, k], or [batch, n, k]; x's dtype or quantised */
    adze_tensor w2, w3;     /* [n2, k], [n3, k], of w's dtype; w3 needs w2, glu has no w3 */
    adze_tensor bias, bias2, bias3;          /* [n], [n2], [n3]; x's dtype or f32 */
    adze_tensor norm_weight, norm_bias;      /* [k]; x's dtype or f32; with norm */
    adze_tensor residual;                    /* like out, without separate */
    adze_tensor gate;                        /* to out, x's dtype or f32; needs residual */
    float eps, weight_offset;                /* of norm */
    int32_t norm;                            /* 0, ADZE_NORM_RMS or ADZE_NORM_LAYER */
    int32_t act;                             /* an adze_act, 0 for none; with glu 0 means ADZE_ACT_SILU */
    int32_t glu;                             /* 1: w gives the gate, w2 of the same shape the value */
    int32_t separate;                        /* 1: w2 and w3 have outputs of their own */
    int32_t rounding;                        /* ADZE_ROUND_NORM | ADZE_ROUND_STEPS */
    int32_t out_dtype;                       /* 0 means x's dtype; or ADZE_F32; quantised x: f32 by 0, f16, bf16 */
    adze_tensor w_scale, w2_scale, w3_scale; /* of quantised w: [1], [n], or [n / group_rows, k / group] rounded up */
    adze_tensor w_zero, w2_zero, w3_zero;    /* as the scale, u8; with ADZE_FORMAT_U4, and then optional */
    int32_t group;                           /* 0: a scale is for whole rows; or 32, 64, 128 columns */
    int32_t group_rows;                      /* 0 means 1; f8e4m3: 128, with group 128 */
    int32_t format;                          /* of w, w2 and w3: ADZE_FORMAT_DTYPE or ADZE_FORMAT_U4 */
    int32_t reserved;                        /* zero */
    adze_tensor x_scale;                     /* of quantised x, f32: x's shape without k, or [1] */
} adze_gemm_args;
ADZE_API adze_status adze_gemm(adze_stream stream, const adze_gemm_args *args);
ADZE_API adze_status adze_gemm_scratch(adze_stream stream, const adze_gemm_args *args, size_t *bytes);

/* quantize: numbers of fewer bits, by groups as gemm reads them, rounded to nearest. With `most` the largest |x| of a
   group, and Q 127 (i8), 448 (f8e4m3) or 7 (4 bits):
     scale = most / Q                      q = x / scale, at most Q, plus zero = 8 for 4 bits
   and with zero_points, where low <= 0 <= high are the ends of the group's range:
     scale = (high - low) / 15             zero = -low / scale, q = x / scale + zero, both 0 to 15
   Each quotient is rounded to float, then the scale to its dtype, before it divides, and q and zero to the nearest
   number of their kind, halves to even. Where scale is 0, q is zero, or 0. x must be finite. */
typedef struct adze_quantize_args {
    adze_call call;
    adze_tensor out;     /* like x, of dtype; with ADZE_FORMAT_U4 [..., (k + 1) / 2], a last half byte is 0 */
    adze_tensor scale;   /* x's shape without k, or with groups [..., rows / group_rows, k / group] rounded up; [1] */
    adze_tensor zero;    /* as scale, u8; with zero_points */
    adze_tensor x;       /* [..., k]: f32, f16, bf16; [rows, k] with group_rows */
    int32_t dtype;       /* ADZE_I8, ADZE_F8E4M3, or ADZE_U8 with its format */
    int32_t format;      /* ADZE_FORMAT_DTYPE or ADZE_FORMAT_U4 */
    int32_t group;       /* 0: a scale is for whole rows; or 32, 64, 128 columns */
    int32_t group_rows;  /* 0 means 1; f8e4m3: 128, with group 128; -1: one scale for all, without group */
    int32_t zero_points; /* 1: with ADZE_FORMAT_U4, not with one scale for all */
    int32_t scale_dtype; /* 0 means f32; or f16, bf16 */
} adze_quantize_args;
ADZE_API adze_status adze_quantize(adze_stream stream, const adze_quantize_args *args);

/* dequantize: out[i, j] = (q - zero) * scale, the numbers that a quantised weight of gemm stands for. The product is
   rounded to float, and then to out's dtype: as torch multiplies. Infinities and NaN come out as the formula has
   them. A packed weight has two numbers for each byte of a row, or one less: k says which. */
typedef struct adze_dequantize_args {
    adze_call call;
    adze_tensor out;    /* [n, k], of out_dtype */
    adze_tensor w;      /* [n, k], or [n, (k + 1) / 2] with ADZE_FORMAT_U4: i8, f8e4m3, u8 */
    adze_tensor scale;  /* [1], [n], or [n / group_rows, k / group] rounded up: f32, f16, bf16 */
    adze_tensor zero;   /* as scale, u8; with ADZE_FORMAT_U4, and then optional */
    int32_t group;      /* 0: a scale is for whole rows; or 32, 64, 128 columns */
    int32_t group_rows; /* 0 means 1; f8e4m3: 128, with group 128 */
    int32_t format;     /* ADZE_FORMAT_DTYPE or ADZE_FORMAT_U4 */
    int32_t k;          /* 0: as many columns as rows of w have numbers */
    int32_t out_dtype;  /* 0 means f32; or f16, bf16 */
    int32_t reserved;   /* zero */
} adze_dequantize_args;
ADZE_API adze_status adze_dequantize(adze_stream stream, const adze_dequantize_args *args);

/* ---- Attention ---- */

/* attention: out[i] = sum of w[i,j] v[j] over the keys j that query i sees, w[i,j] = exp(s[i,j]) / sum of
   exp(s[i,j]), s[i,j] = c(scale * q[i] . k[j]) + mask[i,j]. With softcap, c(s) = softcap * tanh(s / softcap). Query i
   of m has position p = n - m + i, where n is the number of keys of its sequence: the last query is at the last key.
   causal: it sees keys up to p. window: it sees only keys whose distance to p is less than window. sinks: exp(sink)
   of the head is added to the denominator. Where a query sees no key, or all its s are -inf, out is 0. Head h reads
   head h / (heads / kv_heads) of k and v. Keys beyond the length of a sequence are not read. v must be finite at keys
   that the sequence has and a query does not see. On tensor cores exp(s - max) is rounded to q's dtype before it
   multiplies v.

   By default each batch entry is a sequence: q is [batch, heads, m, d], k [batch, kv_heads, n, d]. Three inputs
   change that, alone or together; the number of sequences must be the same in all:

   q_offsets     q is [1, heads, total, d]: sequence s has its rows q_offsets[s] to q_offsets[s + 1] - 1. Rows that
                 no sequence has are 0 in out.
   k_offsets     k is [1, kv_heads, total, d], in the same way; without lengths and block_table.
   block_table   k is [pages, kv_heads, page, d]: key j of sequence s is row j % page of its page j / page, whose
                 number block_table[s, j / page] is; n is max_pages * page.

   They are read when the kernel runs. A length that is negative or more than n is taken as 0 or n, an offset beyond
   the total as the total. The CPU refuses offsets that decrease and, among pages that are read, a number that is not
   0 to pages - 1. On CUDA such a page has no keys to see, and a sequence whose offsets decrease is empty. */
typedef struct adze_attention_args {
    adze_call call;
    adze_tensor out;         /* [batch, heads, m, dv], q's dtype */
    adze_tensor lse;         /* [batch, heads, m] f32, optional: log of the denominator; -inf where it is 0 */
    adze_tensor q;           /* [batch, heads, m, d]: f32, f16, bf16; d 1 to 1024 */
    adze_tensor k, v;        /* [batch, kv_heads, n, d] and [..., dv], q's dtype, or both i8 or f8e4m3 */
    adze_tensor mask;        /* to [batch, heads, m, n]: bool or u8, where 0 hides a key; or q's dtype or f32, which
                                is added, and where -inf hides it; without q_offsets and k_offsets */
    adze_tensor sinks;       /* [heads]; q's dtype or f32 */
    adze_tensor lengths;     /* [sequences] i32: the keys of each; absent: n, but block_table needs it */
    adze_tensor block_table; /* [sequences, max_pages] i32 */
    adze_tensor q_offsets, k_offsets; /* [sequences + 1] i32 */
    adze_tensor k_scale, v_scale;     /* of quantised k and v, f32: [1], or k's shape without d, one for each key */
    float scale;                      /* 0 means 1 / sqrt(d) */
    float softcap;                    /* 0: none */
    int32_t causal;                   /* 1: keys after p are hidden */
    int32_t window;                   /* 0: none */
} adze_attention_args;
ADZE_API adze_status adze_attention(adze_stream stream, const adze_attention_args *args);
ADZE_API adze_status adze_attention_scratch(adze_stream stream, const adze_attention_args *args, size_t *bytes);

/* attention_merge: two results of attention, of the same queries and different keys, as one. With w = exp(lse):
   out = (w_x * x + w_y * y) / (w_x + w_y), lse = log(w_x + w_y). A result whose lse is -inf has no share; where both
   are, out is 0. Sinks belong to one of the two. */
typedef struct adze_attention_merge_args {
    adze_call call;
    adze_tensor out;      /* like x; may be x or y */
    adze_tensor lse;      /* like x_lse, optional; may be x_lse or y_lse */
    adze_tensor x, x_lse; /* [..., dv]: f32, f16, bf16; [...] f32 */
    adze_tensor y, y_lse; /* like x, like x_lse */
} adze_attention_merge_args;
ADZE_API adze_status adze_attention_merge(adze_stream stream, const adze_attention_merge_args *args);

/* ---- Rotary positions ---- */

#define ADZE_ROPE_HALF        0 /* pairs (i, i + rotary_dim / 2) */
#define ADZE_ROPE_INTERLEAVED 1 /* pairs (2 i, 2 i + 1) */

/* rope: of each pair (a at i, b at j), out[i] = a * cos[i] - b * sin[i], out[j] = b * cos[j] + a * sin[j];
   elements from rotary_dim on are copied. A table of rotary_dim / 2 columns has one angle per pair.
   ADZE_ROUND_STEPS rounds each product and the sum to q's dtype. */
typedef struct adze_rope_args {
    adze_call call;
    adze_tensor q_out, k_out; /* like q, like k; q_out may be q, k_out may be k */
    adze_tensor q, k;         /* [batch, seq, heads, head_dim] or [seq, heads, head_dim]; k may be absent */
    adze_tensor cos, sin;     /* [seq, n] or [batch or 1, seq, n], n = rotary_dim or its half; f32 or q's dtype */
    int32_t pairs;            /* ADZE_ROPE_HALF or ADZE_ROPE_INTERLEAVED */
    int32_t rotary_dim;       /* 0 means head_dim */
    int32_t heads_first;      /* 1: q and k are [batch, heads, seq, head_dim] */
    int32_t rounding;
} adze_rope_args;
ADZE_API adze_status adze_rope(adze_stream stream, const adze_rope_args *args);

/* qk_norm_rope: rope of rms_norm(q) * (q_weight + weight_offset), and the same of k */
typedef struct adze_qk_norm_rope_args {
    adze_call call;
    adze_tensor q_out, k_out;       /* as rope */
    adze_tensor q, k;               /* as rope */
    adze_tensor q_weight, k_weight; /* [head_dim], or [heads * head_dim] when across_heads; q's dtype or f32 */
    adze_tensor cos, sin;           /* as rope */
    float eps, weight_offset;
    int32_t across_heads; /* 1: one mean over all heads of a token */
    int32_t pairs, rotary_dim, heads_first;
    int32_t rounding; /* ADZE_ROUND_NORM | ADZE_ROUND_VALUE | ADZE_ROUND_STEPS */
    int32_t reserved; /* zero */
} adze_qk_norm_rope_args;
ADZE_API adze_status adze_qk_norm_rope(adze_stream stream, const adze_qk_norm_rope_args *args);

#define ADZE_TABLE_ONCE   0 /* n columns, one per frequency */
#define ADZE_TABLE_HALVES 1 /* 2 n columns: all, then all again (for ADZE_ROPE_HALF) */
#define ADZE_TABLE_PAIRS  2 /* 2 n columns: each one twice (for ADZE_ROPE_INTERLEAVED) */

/* rope_table: cos[..., i] = cos(pos[..., axis[i]] * freq[i]) * scale, and sin; NaN for angles beyond 2^31. An axis[i]
   that is not 0 to axes - 1 is refused on the CPU and gives columns of NaN on CUDA, whose memory is not read before
   the kernel runs. */
typedef struct adze_rope_table_args {
    adze_call call;
    adze_tensor cos, sin; /* [..., n] or [..., 2 n] by columns, of out_dtype; neither may be an input */
    adze_tensor pos;      /* [..., axes], axes 1 to 4: i32, i64, f32 */
    adze_tensor freq;     /* [n]: f32 or f64 */
    adze_tensor axis;     /* [n]: i32, each below axes; absent: all 0 */
    float scale;          /* 0 means 1 */
    int32_t columns;      /* ADZE_TABLE_ONCE, _HALVES or _PAIRS */
    int32_t double_angle; /* 0: the product pos * freq is rounded to float; 1: it is a double */
    int32_t out_dtype;    /* 0 means f32; or f16, bf16 */
} adze_rope_table_args;
ADZE_API adze_status adze_rope_table(adze_stream stream, const adze_rope_table_args *args);

/* Frequencies for rope_table, as models make them. Plain functions of the host; the caller owns every array. Types
   and parameters have the names of Hugging Face's configurations. */
typedef enum adze_rope_type {
    ADZE_ROPE_DEFAULT = 0,
    ADZE_ROPE_LINEAR = 1,
    ADZE_ROPE_DYNAMIC = 2,
    ADZE_ROPE_YARN = 3,
    ADZE_ROPE_LONGROPE = 4,
    ADZE_ROPE_LLAMA3 = 5,
    ADZE_ROPE_PROPORTIONAL = 6
} adze_rope_type;

typedef struct adze_rope_spec { /* rope_parameters of a configuration; zero means absent */
    uint32_t size;              /* sizeof(adze_rope_spec): it grows at its end, as the args of ops do */
    int32_t rope_type;
    int32_t rotary_dim;  /* even: what partial_rotary_factor leaves of head_dim; head_dim when proportional */
    int32_t no_truncate; /* yarn: 1 means truncate=False */
    double rope_theta, factor;
    double partial_rotary_factor;             /* proportional */
    double low_freq_factor, high_freq_factor; /* llama3 */
    double beta_fast, beta_slow, mscale, mscale_all_dim;
    double attention_factor;
    int64_t max_position_embeddings, original_max_position_embeddings;
    const double *short_factor, *long_factor; /* longrope: [rotary_dim / 2] */
} adze_rope_spec;
/* freq[rotary_dim / 2], whose values are floats as in the models, and what cos and sin are multiplied by. seq_len is
   the longest position + 1 (dynamic and longrope use it), or 0. */
ADZE_API adze_status adze_rope_frequencies(const adze_rope_spec *spec, int64_t seq_len, double *freq, float *scale);

/* Several axes of position, freq and axis of n columns, n half the sum of axes_dim; for double_angle 1 (FLUX). */
ADZE_API adze_status adze_rope_axes(int32_t axes, const int32_t *axes_dim, double theta, double *freq, int32_t *axis);
/* The same for frame, row and column: row and column have a third of head_dim each, rounded down to pairs, and the
   frame has the rest (Wan). */
ADZE_API adze_status adze_rope_video_axes(int32_t head_dim, double theta, double *freq, int32_t *axis);
/* dim / 2 columns that take frame, row and column in turn, from pi / 2 to theta * pi / 2, after as many zeros as a
   third of dim leaves over (LTX-Video); freq are floats. Their positions run from -1 to 1: size[3] of them, each
   2 * (index * scale * patch / base) - 1, or 2 * index - 1 without scale. pos[frames * rows * columns, 3]. */
ADZE_API adze_status adze_rope_fractions(int32_t dim, double theta, double *freq, int32_t *axis);
ADZE_API adze_status adze_rope_fraction_positions(const int32_t *size, const float *scale, const float *patch,
                                                  const float *base, float *pos);

/* ---- A decode step ---- */

/* embed: out[..., :] = table[ids[...], :] * scale. scale is rounded to table's dtype before it multiplies, and the
   product once, as Gemma's models do. An id that is no row of table is refused on the CPU and gives a row of NaN on
   CUDA, whose memory is not read before the kernel runs. */
typedef struct adze_embed_args {
    adze_call call;
    adze_tensor out;   /* [..., dim], of table's dtype */
    adze_tensor table; /* [rows, dim]: f32, f16, bf16 */
    adze_tensor ids;   /* [...], rank 1 to 4: i32, i64 */
    float scale;       /* 0 means 1 */
    int32_t reserved;  /* zero */
} adze_embed_args;
ADZE_API adze_status adze_embed(adze_stream stream, const adze_embed_args *args);

/* kv_append: q_out = p(q), and p(k) and v are written into the caches, of which all other elements stay. p is rope,
   of the norm of qk_norm_rope where `norm` asks for it, and rounds as these ops do; without cos and sin it is the
   norm alone, or nothing. Token t of batch entry b goes to slot lengths[b] + t, or to positions[b, t]. Slot s of a
   contiguous cache is k_cache[b, :, s]; with a block_table it is k_cache[block_table[b, s / page], :, s % page]. No
   two tokens may have the same place. A slot that the cache, the block_table or tables by slot do not have, and a
   page that the cache does not have, are refused on the CPU, before anything is written. On CUDA, whose memory is not
   read before the kernel runs, such a token is dropped: nothing is written for it but q_out, which is NaN where its
   row of the tables does not exist.
   A cache of i8 or f8e4m3 has a scale for each token and head: most / Q and the stored numbers are those of quantize
   for the row, after it was rounded to k's dtype. */
typedef struct adze_kv_append_args {
    adze_call call;
    adze_tensor q_out;            /* like q, with q; may be q */
    adze_tensor k_cache, v_cache; /* [batch, kv_heads, capacity, d] or [pages, kv_heads, page, d], and dv; k's dtype,
                                     or i8, f8e4m3 */
    adze_tensor k_scale, v_scale; /* the cache's shape without d: f32; with i8 and f8e4m3 */
    adze_tensor q;                /* [batch, heads, m, d]; may be absent */
    adze_tensor k, v;             /* [batch, kv_heads, m, d], [batch, kv_heads, m, dv]: f32, f16, bf16 */
    adze_tensor lengths;          /* [batch]: i32; this or positions */
    adze_tensor positions;        /* [batch, m]: i32 */
    adze_tensor block_table;      /* [batch, pages of a sequence]: i32 */
    adze_tensor q_weight, k_weight; /* as qk_norm_rope; with norm */
    adze_tensor cos, sin;           /* as rope, of these tokens: [m, n] or [batch or 1, m, n]; both or neither */
    float eps, weight_offset;       /* of norm */
    int32_t norm;                   /* 1: as qk_norm_rope has it */
    int32_t across_heads, pairs, rotary_dim;
    int32_t table_by_slot; /* 1: cos and sin are [slots, n], a token reads the row of its slot */
    int32_t rounding;      /* ADZE_ROUND_NORM | ADZE_ROUND_VALUE | ADZE_ROUND_STEPS; without norm ADZE_ROUND_STEPS */
} adze_kv_append_args;
ADZE_API adze_status adze_kv_append(adze_stream stream, const adze_kv_append_args *args);

/* sample: one token for each row of logits. With x the logits as floats, NaN as -infinity, in this order, each step
   rounded to float:
     y = x, of the ids in `previous` x * penalty where x < 0 and x / penalty elsewhere
     temperature 0: out is the lowest index of the largest y; otherwise y = y / temperature
     top_k   keeps the k largest y, and all that equal the k-th
     top_p   keeps a token while the tokens with a larger y have less than top_p of the probability that is left
     min_p   keeps a token whose probability is at least min_p of the largest
   w = exp(y - max(y)) of the tokens that are kept, 0 of the others, is a float; their sums C[i] = w[0] + ... + w[i]
   are exact to 2^-40 of the whole, S. out is the first i with C[i] > u * S. Tokens with the same y are kept or
   dropped together. u is the first word of Philox 4x32-10, its upper 24 bits over 2^24, with the key seed and the
   counter (counter, row, 0): seed and counter have 64 bits, and row is 0 where each row has its own seed.
   logprob is log(softmax(x)[out]), of the logits as they were given: from such sums in double, rounded once. Ids of
   `previous` that no logit has are passed over. Counts outside 0 to n are refused on the CPU, and on CUDA are taken
   as the nearer end. */
typedef struct adze_sample_args {
    adze_call call;
    adze_tensor out;            /* [batch], of out_dtype */
    adze_tensor logprob;        /* [batch]: f32; optional */
    adze_tensor logits;         /* [batch, vocab]: f32, f16, bf16 */
    adze_tensor seed;           /* [1] or [batch]: i32, i64; with a temperature */
    adze_tensor counter;        /* [1] or [batch]: i32, i64; absent: 0 */
    adze_tensor previous;       /* [batch, n]: i32, i64; with a penalty */
    adze_tensor previous_count; /* [batch]: i32, how many of the n ids count; absent: all */
    float temperature;          /* 0: the largest */
    float top_p, min_p;         /* 0: off; at most 1 */
    float penalty;              /* 0 means 1 */
    int32_t top_k;              /* 0: off */
    int32_t out_dtype;          /* 0 means i32; or ADZE_I64 */
} adze_sample_args;
ADZE_API adze_status adze_sample(adze_stream stream, const adze_sample_args *args);

#ifdef __cplusplus
}
#endif
#endif
