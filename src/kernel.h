/* kernel.h - the list of ops, and the helpers that ops and kernels share. */
#ifndef ADZE_SRC_KERNEL_H
#define ADZE_SRC_KERNEL_H

#include "adze_kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The ops of the library. A new op is one word here. A project that has ops of its own defines the list before it
   includes this file. */
#ifndef ADZE_OPS
/* clang-format off */
#    define ADZE_OPS(X)                                                                                              \
        X(rms_norm) X(layer_norm) X(group_norm) X(gated_add) X(activation) X(glu) X(softmax) X(gemm) X(quantize)     \
        X(dequantize) X(attention) X(attention_merge) X(rope) X(qk_norm_rope) X(rope_table) X(embed) X(kv_append)    \
        X(sample)
/* clang-format on */
#endif

#define X(name) extern const adze_op adze_op_##name;
ADZE_OPS(X)
#undef X
extern const adze_op *const adze_ops[]; /* the same, ended by NULL */

/* dispatch.c */
adze_status adze_dispatch(const adze_op *op, adze_stream stream, const void *args);
adze_status adze_dispatch_to(const adze_op *op, const adze_kernel *kernel, adze_stream stream, const void *args);
adze_status adze_dispatch_scratch(const adze_op *op, adze_stream stream, const void *args, size_t *bytes);
/* For callers that allocate the outputs, in three steps, with args of this library's version. First, each input is
   checked as it is read. */
adze_status adze_check_tensor(const adze_op *op, const adze_field *field, const adze_tensor *tensor);
/* Then the inputs are checked together, and the dtype and shape of each output is written; it was zero and stays
   zero where there is none. */
adze_status adze_dispatch_outputs(const adze_op *op, void *args);
/* Last, the op runs on newly allocated outputs, without a second check. */
adze_status adze_dispatch_made(const adze_op *op, adze_stream stream, const void *args);
adze_status adze_fail(adze_status status, const char *format, ...) __attribute__((format(printf, 2, 3), cold));
const adze_op *adze_find_op(const char *name, size_t length);

/* variants.c */
int adze_variant_count(const adze_kernel *kernel);
int adze_variant_find(const adze_kernel *kernel, const char *name); /* -1: there is none of this name */
typedef struct adze_variant_row {
    adze_kernel kernel;
    char name[64]; /* "cuda/64x8" */
} adze_variant_row;
/* Variant i of a kernel as a kernel of its own; `row` must stay where it is. */
const adze_kernel *adze_variant_kernel(adze_variant_row *row, const adze_kernel *kernel, int i);
int adze_accepts(const adze_kernel *kernel, adze_stream stream,
                 const void *args); /* whether it takes a checked call */
/* Runs a kernel with a choice; the device of the stream is current meanwhile. */
adze_status adze_run_choice(const adze_kernel *kernel, adze_stream stream, const void *args, adze_choice *choice);

/* tuned.c */
typedef struct adze_tuned_row { /* a call that `adze tune` timed with every variant */
    const char *card;           /* of a row that begins the calls of a card: its name; else NULL */
    const char *date, *driver, *commit;
    const char *op;               /* of a call */
    int sm_count, form;           /* of a card; of a call */
    int64_t least, most;          /* what the first size may be */
    int64_t size[ADZE_SIZES - 1]; /* the others are these */
    const char *variant, *before; /* the fastest variant; the one that the kernel would choose without this row */
    double us, us_before;
} adze_tuned_row;
/* The variant of the table for a problem on a device; -1: it has none, the kernel chooses. */
int adze_tuned(const adze_op *op, int device, const adze_choice *problem);
/* Takes other rows, ended by one of neither, and other devices: for tests. */
void adze_tuned_load(const adze_tuned_row *rows, int devices, const char *const *cards, const int *sm_counts);

/* overlap.c */
int adze_overlap(const adze_tensor *a, const adze_tensor *b); /* whether they share memory; neither is empty */

#define ADZE_REQUIRE(cond, status, ...)                                                                              \
    do {                                                                                                             \
        if (!(cond))                                                                                                 \
            return adze_fail(status, __VA_ARGS__);                                                                   \
    } while (0)

/* device.c, and cuda/device.cu when CUDA is built in */
/* adze_kernel.from on the CPU */
enum {
    ADZE_CPU_AVX2 = 1,
    ADZE_CPU_AVX512 = 2,
    ADZE_CPU_SVE = 4,
    ADZE_CPU_BF16 = 8,
    ADZE_CPU_AMX = 16,     /* of bf16 */
    ADZE_CPU_VNNI = 32,    /* of AVX-512 */
    ADZE_CPU_AMX_INT8 = 64 /* with VNNI */
};
int adze_cpu_features(void);
int adze_x86_features(uint32_t ecx1, uint32_t ebx7, uint32_t ecx_extended, uint64_t xcr0); /* from CPUID and XGETBV */
int adze_arm_features(uint64_t hwcap, uint64_t hwcap2); /* from AT_HWCAP and AT_HWCAP2 */
size_t adze_cpu_cache(void);                            /* bytes of the last level of cache */
int adze_can_run(const adze_kernel *kernel, adze_stream stream);
adze_status adze_check_device(const char *op, int device); /* that the device exists and this build supports it */
int adze_cuda_count(void);
int adze_cuda_sm(int device);                           /* 90 for sm_90; 0 without CUDA or without that device */
int adze_cuda_sm_count(int device);                     /* multiprocessors */
void adze_cuda_name(int device, char *to, size_t size); /* "NVIDIA H200"; empty when there is no such device */
adze_status adze_cuda_call(adze_run_fn run, adze_stream stream, const void *args); /* with its device current */
adze_status adze_cuda_prepare(int device);

/* parallel.c */
void adze_parallel_for(int64_t count, int64_t grain, adze_range_fn body, void *context);
int adze_thread_count(void);
int adze_threads_requested(void); /* by ADZE_THREADS; 0: default, -1: invalid */
enum { ADZE_THREADS_MAX = 256 };

/* cpus.c */
int adze_cpu_count(void); /* CPUs that this process may use: its affinity, and its cgroup's share of their time */
/* The share of a cgroup in CPUs, rounded up, 0 without a limit: `groups` is the text of /proc/self/cgroup, `root` is
   where cgroups are mounted. */
int adze_cpu_quota(const char *groups, const char *root);

/* tensor.c */
size_t adze_dtype_size(int dtype); /* whole bytes; 0 for dtypes that no tensor has */
/* The bytes of f32, f16 or bf16, inline: kernels scale offsets by it. The type converts to any integer. */
static inline uint8_t adze_float_size(int dtype)
{
    return dtype == ADZE_F32 ? 4 : 2;
}
const char *adze_dtype_name(int dtype);
int64_t adze_count(const adze_tensor *t);
double adze_get(const adze_tensor *t, int64_t at); /* the element at data + at */
void adze_put(const adze_tensor *t, int64_t at, double value);
double adze_round_to(int dtype, double value);           /* to nearest even, as a store would */
double adze_dtype_ulp(int dtype, double value);          /* the distance of neighbours at |value| */
void adze_like(adze_tensor *out, const adze_tensor *in); /* the shape and dtype of in */
/* Merges neighbouring dimensions from `first` on, in tensors of one shape, where all strides allow it. */
void adze_merge(int n, adze_tensor *const *tensors, int first);

/* The leading dimensions of x, merged where every tensor's strides allow it. Tensors of lower rank or with
   sizes of 1 are broadcast; an absent tensor gets zero strides. */
enum { ADZE_ROW_TENSORS = 12 };
typedef struct adze_rows {
    int64_t count;
    int64_t size[4], stride[ADZE_ROW_TENSORS][4];
    int32_t rank, reserved;
} adze_rows;
/* A tensor of one element for each row of x, as adze_rows_init() takes it: with a last dimension. */
static inline adze_tensor adze_by_rows(const adze_tensor *t)
{
    adze_tensor by_rows = *t;
    if (t->dtype && !(t->rank == 1 && t->shape[0] == 1)) {
        by_rows.shape[by_rows.rank] = 1;
        by_rows.stride[by_rows.rank++] = 1;
    }
    return by_rows;
}
void adze_rows_init(adze_rows *rows, const adze_tensor *x, int n, const adze_tensor *const *tensors);
static inline int64_t adze_row_offset(const adze_rows *rows, int tensor, int64_t row)
{
    int64_t offset = 0;
    for (int d = rows->rank - 1; d > 0; d--) {
        const int64_t next = row / rows->size[d];
        offset += (row - next * rows->size[d]) * rows->stride[tensor][d];
        row = next;
    }
    return offset + row * rows->stride[tensor][0];
}
/* How many rows from `row` on are one stride of the last of these dimensions apart, in each tensor. */
static inline int64_t adze_rows_run(const adze_rows *rows, int64_t row)
{
    return rows->size[rows->rank - 1] - row % rows->size[rows->rank - 1];
}
static inline int64_t adze_row_stride(const adze_rows *rows, int tensor)
{
    return rows->stride[tensor][rows->rank - 1];
}

/* ops/act.c: the two inputs of a glu, which lie in one tensor when it is packed. */
void adze_glu_halves(const adze_glu_args *args, adze_tensor *gate, adze_tensor *value);

/* Contracts that many ops share; `op` and `name` go into the sentence. */
adze_status adze_check_float(const char *op, const char *name, const adze_tensor *t);
adze_status adze_check_rows(const char *op, const char *name, const adze_tensor *t); /* last dimension contiguous */
adze_status adze_check_like(const char *op, const char *name, const adze_tensor *t, const adze_tensor *x);
adze_status adze_check_to(const char *op, const char *name, const adze_tensor *t, const adze_tensor *x);
adze_status adze_check_param(const char *op, const char *name, const adze_tensor *t, const adze_tensor *x,
                             int64_t count); /* [count], of x's dtype or f32 */
/* Of an op that may store its rows quantised: whether out_dtype is one of these dtypes, or one of its own. */
static inline int adze_is_bytes(int dtype)
{
    return dtype == ADZE_I8 || dtype == ADZE_F8E4M3;
}
/* The scales of rows of `out`, where it is quantised. */
static inline void adze_scale_like(adze_tensor *scale, const adze_tensor *out)
{
    if (!adze_is_bytes(out->dtype))
        return;
    adze_like(scale, out);
    scale->dtype = ADZE_F32;
    if (out->rank > 1)
        scale->rank--;
    else
        scale->shape[0] = 1;
}
adze_status adze_check_bits(const char *op, const char *name, int32_t value, int32_t allowed);
adze_status adze_check_range(const char *op, const char *name, int32_t value, int32_t low, int32_t high);
#define ADZE_CHECK(call)                                                                                             \
    do {                                                                                                             \
        const adze_status check_status = (call);                                                                     \
        if (check_status != ADZE_OK)                                                                                 \
            return check_status;                                                                                     \
    } while (0)

/* src/cpu is compiled once per ISA; these name the copies, and the rows of a kernel table that hold them. */
#define ADZE_CAT_(a, b) a##b
#define ADZE_CAT(a, b)  ADZE_CAT_(a, b)
#define ADZE_CPU_FN(op) ADZE_CAT(adze_##op##_cpu, ADZE_ISA)
#define ADZE_CPU_KERNEL(op)                                                                                          \
    adze_status ADZE_CPU_FN(op)(adze_stream stream, const void *args);                                               \
    adze_status ADZE_CPU_FN(op)(adze_stream stream, const void *args)
#if defined(__x86_64__)
#    define ADZE_CPU_DECLARE(op)                                                                                     \
        adze_status adze_##op##_cpu(adze_stream, const void *);                                                      \
        adze_status adze_##op##_cpu_avx2(adze_stream, const void *);                                                 \
        adze_status adze_##op##_cpu_avx512(adze_stream, const void *);
#    define ADZE_CPU_ROWS(op)                                                                                        \
        {"cpu_avx512", 0, ADZE_CPU_AVX512, 0, NULL, adze_##op##_cpu_avx512, NULL, 0},                                \
            {"cpu_avx2", 0, ADZE_CPU_AVX2, 0, NULL, adze_##op##_cpu_avx2, NULL, 0},                                  \
            {"cpu", 0, 0, 0, NULL, adze_##op##_cpu, NULL, 0},
#elif defined(__aarch64__)
#    define ADZE_CPU_DECLARE(op)                                                                                     \
        adze_status adze_##op##_cpu(adze_stream, const void *);                                                      \
        adze_status adze_##op##_cpu_sve(adze_stream, const void *);
#    define ADZE_CPU_ROWS(op)                                                                                        \
        {"cpu_sve", 0, ADZE_CPU_SVE, 0, NULL, adze_##op##_cpu_sve, NULL, 0},                                         \
            {"cpu", 0, 0, 0, NULL, adze_##op##_cpu, NULL, 0},
#else
#    define ADZE_CPU_DECLARE(op) adze_status adze_##op##_cpu(adze_stream, const void *);
#    define ADZE_CPU_ROWS(op)    {"cpu", 0, 0, 0, NULL, adze_##op##_cpu, NULL, 0},
#endif
#if ADZE_CUDA
#    define ADZE_CUDA_ROW(op) {"cuda", 1, 75, ADZE_ANY_SM, NULL, adze_##op##_cuda, &adze_##op##_cuda_variants, 0},
#else
#    define ADZE_CUDA_ROW(op)
#endif
#define ADZE_CUDA_DECLARE(op)                                                                                        \
    adze_status adze_##op##_cuda(adze_stream, const void *);                                                         \
    extern const adze_variants adze_##op##_cuda_variants;
/* The kernel table of most ops: one CUDA kernel for every SM, and the CPU's copies. */
#define ADZE_KERNELS(op)                                                                                             \
    ADZE_CPU_DECLARE(op)                                                                                             \
    ADZE_CUDA_DECLARE(op)                                                                                            \
    static const adze_kernel kernels[] = {ADZE_CUDA_ROW(op) ADZE_CPU_ROWS(op) ADZE_KERNELS_END};

/* scratch() of an op whose CUDA kernels ask for memory, by adze_<op>_cuda_scratch. */
#if ADZE_CUDA
#    define ADZE_CUDA_SCRATCH(op)                                                                                    \
        size_t adze_##op##_cuda_scratch(adze_stream stream, const adze_##op##_args *args);                           \
        static size_t scratch(adze_stream stream, const void *args)                                                  \
        {                                                                                                            \
            return stream.device == ADZE_CPU ? 0 : adze_##op##_cuda_scratch(stream, args);                           \
        }
#else
#    define ADZE_CUDA_SCRATCH(op)                                                                                    \
        static size_t scratch(adze_stream stream, const void *args)                                                  \
        {                                                                                                            \
            (void)stream, (void)args;                                                                                \
            return 0;                                                                                                \
        }
#endif

#ifdef __cplusplus
}
#endif
#endif
