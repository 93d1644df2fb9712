"""Layers for `kernelize`: forwards alone, which take their weights from the module they are bound to. `adze pack`
puts this file into the package; a layer of another op is another class here.

Where a gradient is needed, and for tensors that the kernel does not take, a layer computes the model's own formula.
"""

import torch
from torch import nn

from . import ops
from .ops import ROUND_NORM


def _fits(x, *others):
    """Whether the kernel takes x together with the others, and no gradient is needed."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or torch.is_autocast_enabled(x.device.type):
        return False
    for t in (x, *others):
        if t.device != x.device or t.dtype not in (x.dtype, torch.float32) or t.stride(-1) != 1:
            return False
        if torch.is_grad_enabled() and t.requires_grad:
            return False
    return True


class RMSNorm(nn.Module):
    """Llama's and Qwen's: the normalised value is rounded before the weight multiplies it."""

    has_backward = False
    can_torch_compile = True

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x, weight, eps = hidden_states, self.weight, self.variance_epsilon
        if not _fits(x, weight):
            wide = x.float()
            return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
        dtype = torch.promote_types(x.dtype, weight.dtype)
        return ops.rms_norm(x, weight, eps=eps, rounding=ROUND_NORM, out_dtype=dtype)
