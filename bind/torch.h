/* torch.h - PyTorch's stable C functions, as torch.c finds them in the libtorch that is loaded. */
#ifndef ADZE_BIND_TORCH_H
#define ADZE_BIND_TORCH_H

#include "bind.h"

#include <stdbool.h>

typedef uint64_t value; /* StableIValue */
typedef int32_t error;  /* AOTITorchError */
typedef struct torch_tensor *tensor;
typedef struct torch_library *library;
typedef void (*boxed)(value *, uint64_t, uint64_t);
typedef void (*range)(int64_t, int64_t, void *);

#define TORCH(X) /* what every call needs comes first */                                                             \
    X(error, aoti_torch_get_dim, (tensor, int64_t *))                                                                \
    X(error, aoti_torch_get_sizes, (tensor, int64_t **))                                                             \
    X(error, aoti_torch_get_strides, (tensor, int64_t **))                                                           \
    X(error, aoti_torch_get_dtype, (tensor, int32_t *))                                                              \
    X(error, aoti_torch_get_device_type, (tensor, int32_t *))                                                        \
    X(error, torch_get_const_data_ptr, (tensor, void **)) /* to const */                                             \
    X(error, torch_get_mutable_data_ptr, (tensor, void **))                                                          \
    X(error, aoti_torch_delete_tensor_object, (tensor))                                                              \
    X(error, aoti_torch_empty_strided,                                                                               \
      (int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, tensor *))                              \
    X(error, aoti_torch_get_device_index, (tensor, int32_t *))                                                       \
    X(error, aoti_torch_library_init_fragment, (const char *, const char *, uint32_t, library *))                    \
    X(error, aoti_torch_library_init_impl, (const char *, const char *, const char *, uint32_t, library *))          \
    X(error, aoti_torch_library_def, (library, const char *))                                                        \
    X(error, aoti_torch_library_impl, (library, const char *, boxed))                                                \
    X(void, aoti_torch_check, (bool, const char *, const char *, uint32_t, const char *))                            \
    X(error, torch_parallel_for, (int64_t, int64_t, int64_t, range, void *))                                         \
    X(int32_t, aoti_torch_device_type_cpu, (void))                                                                   \
    X(int32_t, aoti_torch_device_type_cuda, (void))                                                                  \
    X(int32_t, aoti_torch_dtype_float32, (void))                                                                     \
    X(int32_t, aoti_torch_dtype_float16, (void))                                                                     \
    X(int32_t, aoti_torch_dtype_bfloat16, (void))                                                                    \
    X(int32_t, aoti_torch_dtype_float8_e4m3fn, (void))                                                               \
    X(int32_t, aoti_torch_dtype_float64, (void))                                                                     \
    X(int32_t, aoti_torch_dtype_uint8, (void))                                                                       \
    X(int32_t, aoti_torch_dtype_int8, (void))                                                                        \
    X(int32_t, aoti_torch_dtype_int32, (void))                                                                       \
    X(int32_t, aoti_torch_dtype_int64, (void))                                                                       \
    X(int32_t, aoti_torch_dtype_bool, (void))
#define DECLARE(result, name, parameters) result(*name) parameters; /* NOLINT(bugprone-macro-parentheses) */
typedef struct torch_functions {
    _Alignas(64) int32_t cpu;                     /* numbers of torch */
    int32_t cuda, uint8, dtype[16];               /* of each adze_dtype, or -1 */
    uint8_t adze_dtype[64];                       /* of torch's numbers, or ADZE_NONE */
    error (*torch_delete_stable_ivalue)(value *); /* from 2.13 on; before, C++'s operator delete */
    void (*operator_delete)(void *);
    error (*aoti_torch_get_current_cuda_stream)(int32_t, void **); /* of libtorch_cuda, where there is one */
    TORCH(DECLARE)
    /* what fused_linear.c needs, or NULL; by 0 for the CPU and 1 for CUDA */
    error (*aoti_torch_get_storage_offset)(tensor, int64_t *);
    error (*aoti_torch__reinterpret_tensor)(tensor, int64_t, const int64_t *, const int64_t *, int64_t, tensor *);
    error (*addmm_out[2])(tensor out, tensor bias, tensor a, tensor b, double bias_times, double product_times);
    error (*mm_out[2])(tensor out, tensor a, tensor b);
} torch_functions;
extern torch_functions torch __attribute__((visibility("hidden")));

/* A tensor of the stack that may be absent lies in a cell made by C++'s new. */
static inline tensor open_cell(value v)
{
    value *cell = (value *)(uintptr_t)v;
    tensor t = (tensor)(uintptr_t)*cell;
    if (torch.torch_delete_stable_ivalue)
        torch.torch_delete_stable_ivalue(cell);
    else
        torch.operator_delete(cell);
    return t;
}

/* fused_linear.c: an operator that torch.c registers where torch has all it needs. */
extern const char adze_fused_linear_schema[] __attribute__((visibility("hidden")));
void adze_fused_linear(value *stack, uint64_t n_in, uint64_t n_out) __attribute__((visibility("hidden")));

#endif
