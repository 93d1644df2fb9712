"""Products whose weights nothing writes meanwhile: those that adze.graph captures. A graph starts when all work that
came before has ended, and no forward writes its own Linears. So a kernel may read its weights while the one before it
still runs."""

from ..operators import description, ops
from ..operators.header import FLAGS
from . import cuda_graph


def gemm(x, **operands):
    """ops.gemm with parameters and buffers of a module for weights."""
    if not cuda_graph.capturing():
        return ops.gemm(x, **operands)
    description.library.adze_call_flags(FLAGS["CONST_WEIGHTS"])
    try:
        return ops.gemm(x, **operands)
    finally:
        description.library.adze_call_flags(0)
