"""The ops as functions of torch tensors (functions.py).

Outputs are new and contiguous, or the caller's. Tensors may be any view whose last dimension is contiguous.
"""

import torch
from torch import is_grad_enabled

from . import _ops, description, fake
from .description import FLOATS
from .functions import given_outputs, take_functions
from .header import DTYPES as CODES

DTYPES = {getattr(torch, name): CODES[name] for name in FLOATS}


def _call(op):
    packet = getattr(_ops.ops, op.name)
    default, into = packet.default, packet.out  # an attribute of torch.ops takes longer than a call
    forms = (default, *(getattr(packet, name) for name in op.optional))

    def call(args, out=None, second=None, more=0, third=None):
        if is_grad_enabled() or fake.needs_tangents():
            fake.refuse_gradients(*args)
        if out is None and second is None and third is None:
            return forms[int(more)](*args)  # Dynamo of torch 2.11 takes no bool for an index
        outs = given_outputs(op, out, second, third)
        into(*args, **outs)
        return out if len(outs) == 1 else tuple(outs.values())

    return call


@torch.compiler.assume_constant_result
def _has_kernel(op, kind, index):
    if kind not in ("cpu", "cuda"):
        return False
    if kind == "cpu":
        return description.has_kernel(op, -1)
    return description.has_kernel(op, torch.cuda.current_device() if index is None else index)


def has_kernel(op, device):
    """Whether the library has a kernel of an op for a device of torch's."""
    return _has_kernel(op, device.type, device.index)


def dtype_code(what, dtype, x=None):
    if x is not None and dtype == x.dtype:
        return 0
    if dtype not in DTYPES:
        raise ValueError(f"adze: {what} is {dtype}, it must be one of {', '.join(map(str, DTYPES))}")
    return DTYPES[dtype]


take_functions(globals(), _call)
