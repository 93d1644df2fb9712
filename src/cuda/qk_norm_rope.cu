/* qk_norm_rope on CUDA. */
#include "rope.cuh"

CUDA_ENTRIES(qk_norm_rope, QK_NORM_ROPE_VARIANTS, rope_run<true>)
