/* gemm_lt.cuh - what gemm.cu needs of gemm_lt.cu. */
#ifndef ADZE_CUDA_GEMM_LT_CUH
#define ADZE_CUDA_GEMM_LT_CUH

#include "gemm_call.cuh"

/* The bytes of scratch that it can use for a call; 0 also if it does not take the call. */
extern "C" size_t gemm_lt_scratch(adze_stream stream, const adze_gemm_args *a);

#endif
