"""Calls of which something is constant meanwhile, among those that adze.graph captures. A graph starts when all work
that came before has ended. No forward writes its own Linears, so a product may read its weights while the kernel
before it still runs. Of a cache only the newest tokens are written, so attention may read the older ones."""

import contextlib

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


@contextlib.contextmanager
def flagged(name):
    """This thread's calls inside have a flag."""
    description.library.adze_call_flags(FLAGS[name])
    try:
        yield
    finally:
        description.library.adze_call_flags(0)


def gemm(x, **operands):
    """ops.gemm with weights of a module."""
    if not cuda_graph.capturing() or not _are_constant(operands):
        return ops.gemm(x, **operands)
    with flagged("CONST_WEIGHTS"):
        return ops.gemm(x, **operands)


def attention(*operands, **options):
    """ops.attention over a cache whose last tokens this forward has appended, and no others."""
    if not cuda_graph.capturing():
        return ops.attention(*operands, **options)
    with flagged("CONST_CACHE"):
        return ops.attention(*operands, **options)
