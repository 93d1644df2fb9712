/* gemm_lt.cuh - what gemm.cu and gemm_lt.cu have of each other. */
#ifndef ADZE_CUDA_GEMM_LT_CUH
#define ADZE_CUDA_GEMM_LT_CUH

#include "gemm_call.cuh"

/* gemm.cu: the args of the op as params; x's norm, dense at the start of the call's scratch, and its launch. */
extern "C" gemm_params gemm_params_of(const adze_gemm_args *a);
extern "C" adze_tensor gemm_normed(const adze_gemm_args *a);
extern "C" adze_status gemm_norm(const cuda_call &s, const adze_gemm_args *a, const gemm_params &p);

/* gemm_lt.cu: the bytes of scratch that it can use for a call; 0 also if it does not take the call. */
extern "C" size_t gemm_lt_scratch(adze_stream stream, const adze_gemm_args *a);

#endif
