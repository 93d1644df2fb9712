"""How models write norms and activations, and what computes the same."""

import functools

import torch
import torch.nn.functional as F

from ..operators._ops import ops
from ..operators.ops import ROUND_NORM


def _root(h, eps):
    return torch.rsqrt(h.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)


def _rms(h, eps):
    f = h.to(torch.float32)
    return f * _root(f, eps)


# How models multiply by the weight, and the weight_offset and rounding that compute the same.
ORDERS = {
    "gemma": (lambda h, w, eps: (_rms(h, eps) * (1.0 + w.float())).type_as(h), (1.0, 0)),
    "llama": (lambda h, w, eps: w * _rms(h, eps).to(h.dtype), (0.0, ROUND_NORM)),
    "once": (lambda h, w, eps: (w * _rms(h, eps)).to(h.dtype), (0.0, 0)),
    "torch": (lambda h, w, eps: F.rms_norm(h, (h.shape[-1],), w, eps), (0.0, 0)),
}
# Norms without weight, as modulated ones are: the op, and how models write it.
BARE = [
    ("layer_norm", ops.layer_norm, lambda h, eps: F.layer_norm(h, (h.shape[-1],), None, None, eps)),
    ("rms_norm", ops.rms_norm, lambda h, eps: _rms(h, eps).to(h.dtype)),
    ("rms_norm", ops.rms_norm, lambda h, eps: (h * _root(h, eps)).to(h.dtype)),
]
GATES = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}
