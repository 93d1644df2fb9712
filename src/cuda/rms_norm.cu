/* rms_norm on CUDA. */
#include "norm.cuh"

static const norm_variants<false> variants;
CUDA_ENTRIES(rms_norm, variants.list, norm_run<false>)
