/* layer_norm on CUDA. */
#include "norm.cuh"

static const norm_variants<true> variants;
CUDA_ENTRIES(layer_norm, variants.list, norm_run<true>)
