/* cuda_gemm_rows.c - gemm_rows.c on a GPU: with ADZE_BATCH_INVARIANT a row's bits depend on no other row. Built only
   where CUDA is. */
#include <cuda_runtime_api.h>
#include <stdio.h>

#include "gemm_rows.c"
