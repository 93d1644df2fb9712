"""Products whose weights nothing writes meanwhile: those that adze.graph captures. A graph starts when all work that
came before has ended, and no forward writes its own Linears. So a kernel may read its weights while the one before it
still runs."""

from torch import nn

from ..operators import description, ops
from ..operators.header import FLAGS
from . import cuda_graph

_PLAIN = ("w", "w2", "w3", "bias", "bias2", "bias3", "norm_weight", "norm_bias")


def _are_constant(operands):
    """Whether weights are a module's own. Others may be made in the forward, as those of spectral_norm are. Weights
    with scales are buffers of a QuantizedLinear."""
    names = _PLAIN if operands.get("w_scale") is None else _PLAIN[3:]
    return all(operands.get(name) is None or isinstance(operands[name], nn.Parameter) for name in names)


def gemm(x, **operands):
    """ops.gemm with weights of a module."""
    if not cuda_graph.capturing() or not _are_constant(operands):
        return ops.gemm(x, **operands)
    description.library.adze_call_flags(FLAGS["CONST_WEIGHTS"])
    try:
        return ops.gemm(x, **operands)
    finally:
        description.library.adze_call_flags(0)
