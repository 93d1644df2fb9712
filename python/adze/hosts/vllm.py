"""vLLM: adze's norms as implementations of its IR ops, chosen by `--ir-op-priority.rms_norm=adze`, and layers of its
eager mode on the CPU (vllm_layers.py).

vLLM finds register() by the entry point vllm.general_plugins and calls it in every process, perhaps more than once.
"""

import functools
import importlib
import logging
import sys

import torch
from torch._subclasses import FakeTensor

from ..operators import ops
from . import vllm_layers

logger = logging.getLogger("adze.vllm")


def _rounding(x, weight):
    """vLLM rounds the normalised value to the weight's dtype before it multiplies."""
    return ops.ROUND_NORM if weight is not None and weight.dtype == x.dtype else 0


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    return ops.rms_norm(x, weight, eps=epsilon, rounding=_rounding(x, weight))


def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum is normalised before it is rounded, as vLLM's own definition has it."""
    rounding = _rounding(x, weight) | ops.FLOAT_SUM
    return ops.rms_norm(x, weight, residual=x_residual, eps=epsilon, rounding=rounding)


def _left_to_compiler(x):
    """Whether the compiler is to fuse the norm: for a single token that is faster than a launch of its own.

    On the CPU vLLM traces one graph for every number of tokens, so decode and prefill have the same graph. On GPUs it
    lowers a graph per range of sizes, with fake tensors."""
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return x.device.type == "cpu" or (type(x.shape[0]) is int and x.shape[0] == 1)
    return False


def _takes(x, weight, variance_size):
    if variance_size is not None or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    if x.device.type not in ("cuda", "cpu") or not 1 <= x.dim() <= 5 or x.stride(-1) != 1 or _left_to_compiler(x):
        return False
    return weight is None or weight.dtype in (x.dtype, torch.float32)


def _supports_norm(x, weight, epsilon, variance_size=None):
    return _takes(x, weight, variance_size)


def _supports_sum(x, x_residual, weight, epsilon, variance_size=None):
    return _takes(x, weight, variance_size) and x_residual.dtype == x.dtype and x_residual.stride(-1) == 1


def _offer_norm(function, supports):
    ir = importlib.import_module("vllm.ir")
    op = getattr(ir.ops, function.__name__)
    if "adze" not in getattr(op, "impls", {}):
        op.register_impl("adze", supports_args=supports)(function)


def _offers():
    """(name, function) of each offer. The function registers it, and raises where this version of vLLM has no place
    for it."""
    yield "rms_norm", functools.partial(_offer_norm, rms_norm, _supports_norm)
    yield "fused_add_rms_norm", functools.partial(_offer_norm, fused_add_rms_norm, _supports_sum)
    yield from vllm_layers.offers()


@functools.cache
def _log_once(message):
    logger.warning(message)


def register():
    """Registers what this version of vLLM accepts, and logs the rest. A second call does nothing.

    vLLM does not catch exceptions of a plugin, so none is raised."""
    try:
        refused = {}
        for name, offer in _offers():
            try:
                offer()
            except Exception as error:
                refused.setdefault(f"{type(error).__name__}: {error}", []).append(name)
        if refused:
            version = getattr(sys.modules.get("vllm"), "__version__", "of unknown version")
            reasons = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in refused.items())
            _log_once(f"adze: vLLM {version} does not take {reasons}")
    except Exception as error:
        _log_once(f"adze: nothing more is offered to vLLM ({type(error).__name__}: {error})")
