"""Activations in the form f(out, x) -> out, by the names that kernels-community/activation has.

x and out may be any view. A gated activation reads both halves of each row and rounds act(gate) before the product,
as torch does; an activation alone is computed in float and rounded once.
"""

import torch

from . import ops


def _is_rows(t):
    return 1 <= t.dim() <= 5 and t.stride(-1) == 1


def _write(out, x, run):
    """run(x, out). Views that the kernels do not accept are copied to contiguous rows."""
    if _is_rows(x) and _is_rows(out):
        run(x, out)
    else:
        x = x.contiguous().view(-1, x.shape[-1] if x.dim() else 1)
        dense = torch.empty_like(out, memory_format=torch.contiguous_format)
        run(x, dense.view(-1, out.shape[-1] if out.dim() else 1))
        out.copy_(dense)
    return out


def _plain(name, act, formula):
    def function(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _write(out, x, lambda x, out: ops.activation(x, act, out=out))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"out = {formula}"
    return function


def _gated(name, act, formula, value_first=False):
    def function(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def run(x, out):
            ops.glu(x, act=act, value_first=value_first, rounding=ops.ROUND_STEPS, out=out)

        return _write(out, x, run)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"out = {formula}, d half of x's last dimension"
    return function


silu = _plain("silu", "silu", "x * sigmoid(x)")
gelu = _plain("gelu", "gelu", "x * (1 + erf(x / sqrt(2))) / 2")
gelu_tanh = _plain("gelu_tanh", "gelu_tanh", "x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2")
gelu_new = _plain("gelu_new", "gelu_new", "gelu_tanh(x), by GPT-2's name")
gelu_fast = _plain("gelu_fast", "gelu_fast", "gelu_tanh(x), by another name")
gelu_quick = _plain("gelu_quick", "gelu_quick", "x * sigmoid(1.702 x)")
silu_and_mul = _gated("silu_and_mul", "silu", "silu(x[:d]) * x[d:]")
mul_and_silu = _gated("mul_and_silu", "silu", "x[:d] * silu(x[d:])", value_first=True)
gelu_and_mul = _gated("gelu_and_mul", "gelu", "gelu(x[:d]) * x[d:]")
gelu_tanh_and_mul = _gated("gelu_tanh_and_mul", "gelu_tanh", "gelu_tanh(x[:d]) * x[d:]")
_relu_and_mul = _gated("fatrelu_and_mul", "relu", "max(x[:d], 0) * x[d:]")


def fatrelu_and_mul(out: torch.Tensor, x: torch.Tensor, threshold: float = 0.0) -> torch.Tensor:
    """out = (x[:d] where it is above the threshold, or 0) * x[d:], d half of x's last dimension"""
    if threshold == 0:
        return _relu_and_mul(out, x)
    ops.fake.refuse_gradients(x)
    gate, value = x.chunk(2, -1)
    return out.copy_(torch.where(gate > threshold, gate, 0) * value)
