"""Layers for `kernelize`: forwards alone, which take their weights from the module they are bound to.

Inference only: where a gradient is asked for, and for tensors that the kernels do not take, a layer computes the
plain formula of the module it replaces. Norms and rotations round where that module does; GELUs by formula (NewGELU,
FastGELU, QuickGELU) are rounded once, where a model in half precision rounds after every step.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from . import activations, ops
from .ops import ROUND_NORM, ROUND_STEPS

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TYPES = (torch.Tensor, nn.Parameter)


def _fits(x, *others):
    """Whether the kernels accept x together with the others, and no gradient is needed."""
    if x.dtype not in _DTYPES or x.device.type not in ("cpu", "cuda") or not 1 <= x.dim() <= 5:
        return False
    if torch.is_autocast_enabled(x.device.type):
        return False
    for t in (x, *others):
        if type(t) not in _TYPES or t.device != x.device or t.dtype not in (x.dtype, torch.float32):
            return False
        if t.stride(-1) != 1 or (torch.is_grad_enabled() and t.requires_grad):
            return False
    return True


class _Layer(nn.Module):
    has_backward = False
    can_torch_compile = True


# ---- Norms ----


def _normalised(x, eps):
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


class RMSNorm(_Layer):
    """Llama's: the normalised value is rounded before the weight multiplies it."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x, weight, eps = hidden_states, self.weight, self.variance_epsilon
        if not _fits(x, weight):
            return weight * _normalised(x, eps).to(x.dtype)
        dtype = torch.promote_types(x.dtype, weight.dtype)
        return ops.rms_norm(x, weight, eps=eps, rounding=ROUND_NORM, out_dtype=dtype)


class RMSNormOnce(_Layer):
    """Olmo 2's, GPT-OSS's, Nemotron-H's: rounded once, after the weight."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x, weight, eps = hidden_states, self.weight, self.variance_epsilon
        if not _fits(x, weight):
            return (weight * _normalised(x, eps)).to(x.dtype)
        return ops.rms_norm(x, weight, eps=eps)


class RMSNormZeroCentered(_Layer):
    """Qwen 3.5's: the factor is 1 + weight, and the result is rounded once."""

    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not _fits(x, self.weight):
            return (_normalised(x, self.eps) * (1.0 + self.weight.float())).type_as(x)
        return ops.rms_norm(x, self.weight, eps=self.eps, weight_offset=1.0)


# ---- Activations ----


_ROOT = math.sqrt(2.0 / math.pi)
_FORMULAS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: 0.5 * x * (1.0 + torch.tanh(_ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    "gelu_fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
}


def _activation(act):
    formula = _FORMULAS[act]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.activation(input, act) if _fits(input) else formula(input)

    return forward


def _gated(act, value_first=False):
    formula = _FORMULAS[act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _fits(x):
            return ops.glu(x, act=act, value_first=value_first, rounding=ROUND_STEPS)
        first, second = x.chunk(2, -1)
        return first * formula(second) if value_first else formula(first) * second

    return forward


class SiLU(_Layer):
    forward = _activation("silu")


class GeLU(_Layer):
    forward = _activation("gelu")


class GeluTanh(_Layer):
    forward = _activation("gelu_tanh")


class NewGELU(_Layer):
    forward = _activation("gelu_new")


class FastGELU(_Layer):
    forward = _activation("gelu_fast")


class QuickGELU(_Layer):
    forward = _activation("gelu_quick")


class Silu(SiLU):
    """SiLU, by the name that kernels-community/activation has."""


class Gelu(GeLU):
    """GeLU, by the name that kernels-community/activation has."""


class SiluAndMul(_Layer):
    forward = _gated("silu")


class MulAndSilu(_Layer):
    forward = _gated("silu", value_first=True)


class GeluAndMul(_Layer):
    forward = _gated("gelu")


class GeluTanhAndMul(_Layer):
    forward = _gated("gelu_tanh")


class FatreluAndMul(_Layer):
    """The threshold is the module's, or 0 where it has none."""

    threshold: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        threshold = getattr(self, "threshold", 0.0)
        if _fits(x):
            return activations.fatrelu_and_mul(x.new_empty(*x.shape[:-1], x.shape[-1] // 2), x, threshold)
        gate, value = x.chunk(2, -1)
        return torch.where(gate > threshold, gate, 0) * value


# ---- Rotary positions ----


def _rotated(x, cos, sin):
    """cos and sin have as many columns as x, or half as many: one for each pair."""
    if 2 * cos.shape[-1] == x.shape[-1]:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def _rotatable(q, k, cos, sin, unsqueeze_dim):
    if unsqueeze_dim not in (1, 2) or q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or k.dtype != q.dtype:
        return False
    return _fits(q, k, cos, sin)


class RotaryPosEmb(_Layer):
    """Llama's and GPT-OSS's apply_rotary_pos_emb: each product and the sum are rounded."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if cos.dtype == q.dtype and sin.dtype == q.dtype and _rotatable(q, k, cos, sin, unsqueeze_dim):
            return ops.rope(q, k, cos, sin, heads_first=unsqueeze_dim == 1, rounding=ROUND_STEPS)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return _rotated(q, cos, sin), _rotated(k, cos, sin)


class RotaryPosEmbOnce(_Layer):
    """Olmo's, ModernBERT's, ESM's: computed in float and rounded once."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _rotatable(q, k, cos, sin, unsqueeze_dim):
            return ops.rope(q, k, cos, sin, heads_first=unsqueeze_dim == 1)
        cos, sin = cos.unsqueeze(unsqueeze_dim).float(), sin.unsqueeze(unsqueeze_dim).float()
        return _rotated(q.float(), cos, sin).to(q.dtype), _rotated(k.float(), cos, sin).to(k.dtype)


class apply_rotary_transformers(RotaryPosEmb):
    """RotaryPosEmb, by the name that kernels-community/rotary has."""
