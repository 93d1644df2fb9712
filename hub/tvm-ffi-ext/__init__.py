"""adze: transformer kernels for CUDA and CPUs, called through TVM FFI with NumPy arrays or torch tensors."""

from .tvm_ffi import (
    FLOAT_SUM,
    ROUND_NORM,
    ROUND_STEPS,
    ROUND_VALUE,
    activation,
    gated_add,
    glu,
    group_norm,
    layer_norm,
    qk_norm_rope,
    rms_norm,
    rope,
    rope_table,
    softmax,
)

__all__ = [
    "FLOAT_SUM",
    "ROUND_NORM",
    "ROUND_STEPS",
    "ROUND_VALUE",
    "activation",
    "gated_add",
    "glu",
    "group_norm",
    "layer_norm",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "rope_table",
    "softmax",
]
