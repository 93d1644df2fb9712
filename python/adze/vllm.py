"""vLLM: adze's norms as implementations of its IR ops, chosen by `--ir-op-priority.rms_norm=adze`.

vLLM finds register() by the entry point vllm.general_plugins and calls it in every process, perhaps more than once.
"""

import torch

from . import ops


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


def _takes(x, weight, variance_size):
    if variance_size is not None or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    if x.device.type not in ("cuda", "cpu") or x.stride(-1) != 1 or x.dim() > 5:
        return False
    return weight is None or weight.dtype in (x.dtype, torch.float32)


def _supports_norm(x, weight, epsilon, variance_size=None):
    return _takes(x, weight, variance_size)


def _supports_sum(x, x_residual, weight, epsilon, variance_size=None):
    return _takes(x, weight, variance_size) and x_residual.dtype == x.dtype and x_residual.stride(-1) == 1


def register():
    """Offers both implementations to vLLM; a second call does nothing."""
    from vllm import ir

    for op, function, supports in (
        (ir.ops.rms_norm, rms_norm, _supports_norm),
        (ir.ops.fused_add_rms_norm, fused_add_rms_norm, _supports_sum),
    ):
        if "adze" not in getattr(op, "impls", {}):
            op.register_impl("adze", supports_args=supports)(function)
