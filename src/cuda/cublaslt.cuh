/* cublaslt.cuh - products of matrices by cuBLASLt, where a process or its machine has that library. It is opened when
   it is first asked for, and never linked. */
#ifndef ADZE_CUDA_CUBLASLT_CUH
#define ADZE_CUDA_CUBLASLT_CUH

#include "kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lt_matrix { /* rows of contiguous elements; data NULL: absent, or not allocated yet */
    void *data;
    int64_t row, batch; /* elements from one row, and from one batch, to the next */
} lt_matrix;

/* How the sums of f8e4m3 are scaled: not at all; by one number for x and one for w; by one for each of their rows. */
enum { LT_UNSCALED, LT_SCALARS, LT_VECTORS };

/* out = x . w^T, then scaled, + bias, + residual. Sums are floats. An out of 16 bits may be rounded before the
   residual is added, and before the bias where sizes are odd. */
typedef struct lt_product {
    int64_t m, n, k, batches;
    lt_matrix out, x, w, residual; /* [m, n], [m, k], [n, k], [m, n]; out may be residual */
    void *bias;                    /* [n] */
    const float *x_scale, *w_scale;
    int dtype, out_dtype; /* of x and w; of the others: f32, f16, bf16, and of the former f8e4m3 */
    int scales;
} lt_product;

typedef struct lt_algorithm { /* how cuBLASLt computes a product */
    uint64_t data[8];         /* its own description */
    size_t workspace;         /* bytes of device memory that it needs, from a multiple of LT_ALIGNMENT on */
} lt_algorithm;
enum { LT_ALIGNMENT = 256, LT_WORKSPACE = 32 << 20 }; /* no algorithm gains by more workspace */

/* Opens the library and its state for a device, unless that was tried before; 0: there is none. */
int adze_lt_prepare(int device);
/* The algorithm for a product, with at most so much workspace; 0: there is none. */
int adze_lt_find(int device, const lt_product *product, size_t workspace, lt_algorithm *algorithm);
/* Runs it on the stream, whose device is current; 0: cuBLASLt refused. */
int adze_lt_run(adze_stream stream, const lt_product *product, const lt_algorithm *algorithm, void *workspace);

#ifdef __cplusplus
}
#endif
#endif
