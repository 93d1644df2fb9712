"""What rules share: norms, norms with a residual, activations; and the rules for PyTorch's own modules."""

from typing import NamedTuple

import torch
from torch import nn

from . import ops
from .patching import Rule, known, plain, usable


class Norm(NamedTuple):
    """How a norm module computes: what an op must be told to do the same."""

    cls: type
    op: str  # "rms_norm" or "layer_norm"
    eps: float
    weight_offset: float = 0.0
    rounding: int = 0
    dtype: str = (
        "x"  # of the output: x's, "promoted" with the weight's, or "weight": T5's, which then rounds nothing else
    )
    weight: bool = True
    bias: bool = False

    def options(self, x, weight):
        """Keyword arguments for the op."""
        wide = self.dtype != "x" and weight is not None and weight.dtype == torch.float32
        rounding = 0 if self.dtype == "weight" and weight.dtype != x.dtype else self.rounding
        out_dtype = torch.float32 if wide else x.dtype
        return {"eps": self.eps, "weight_offset": self.weight_offset, "rounding": rounding, "out_dtype": out_dtype}

    def run(self, x, weight, bias, **more):
        op = ops.rms_norm if self.op == "rms_norm" else ops.layer_norm
        return op(x, weight, bias=bias, **self.options(x, weight), **more)


def norm_build(facts):
    """A Rule's build for norms of which facts(module, ctx) knows the Norm. The parameter keeps its name."""

    def build(module, ctx):
        norm, original = facts(module, ctx), ctx.original
        if isinstance(norm, str):
            return norm
        has_weight, has_bias = norm.weight, norm.bias

        def run(self, x):
            weight = self.weight if has_weight else None
            bias = self.bias if has_bias else None
            return norm.run(x, weight, bias) if usable(x, weight, bias) else original(self, x)

        def of_hidden_states(self, hidden_states):
            return run(self, hidden_states)

        def of_input(self, input):
            return run(self, input)

        def of_x(self, x):
            return run(self, x)

        name = original.__code__.co_varnames[1] if original.__code__.co_argcount == 2 else None
        return {"hidden_states": of_hidden_states, "input": of_input, "x": of_x}.get(name, f"its parameter is {name}")

    return build


def _add_norm(child, norm, x, residual, need_sum):
    if plain(child, norm.cls) and x.shape == residual.shape and residual.dtype == x.dtype:
        weight = child.weight if norm.weight else None
        bias = child.bias if norm.bias else None
        if usable(x, weight, bias, residual):
            return norm.run(x, weight, bias, residual=residual, need_sum=need_sum)
    return None


def add_norm(child, norm, x, residual):
    """child(residual + x) and that sum; in one launch where the child is a plain norm."""
    both = _add_norm(child, norm, x, residual, True)
    if both is None:
        total = residual + x
        return child(total), total
    return both


def norm_of_sum(child, norm, x, residual):
    """child(residual + x); in one launch where the child is a plain norm."""
    normed = _add_norm(child, norm, x, residual, False)
    return child(residual + x) if normed is None else normed


def norm_add(child, norm, x, residual, steps):
    """residual + child(x); in one launch where the child is a plain norm. steps: the rounding of child(x)."""
    if plain(child, norm.cls) and x.shape == residual.shape:
        weight = child.weight if norm.weight else None
        bias = child.bias if norm.bias else None
        if usable(x, weight, bias, residual) and residual.dtype == x.dtype:
            options = norm.options(x, weight)
            if options["out_dtype"] == x.dtype:
                options["rounding"] |= steps
                op = ops.rms_norm if norm.op == "rms_norm" else ops.layer_norm
                return op(x, weight, bias=bias, shift=residual, **options)
    return residual + child(x)


class Act(NamedTuple):
    """An activation module: adze's name, and whether the module rounds once. Others are matched in f32 alone."""

    cls: type
    name: str
    once: bool = True


def act_usable(act, match, x, *others):
    return (act.once or not match or x.dtype == torch.float32) and usable(x, *others)


def product_gelu(proj, x):
    """gelu(proj(x)) by its tanh formula from cuBLASLt, which does not round the product before it; None where proj is
    not a plain Linear with a bias, in half precision on a GPU."""
    if not x.is_cuda or x.dtype == torch.float32 or not plain(proj, nn.Linear) or proj.bias is None:
        return None
    weight, bias = proj.weight, proj.bias
    if weight.dtype != x.dtype or bias.dtype != x.dtype or not usable(x, weight, bias):
        return None
    made = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)
    return made.view(*x.shape[:-1], weight.shape[0])


def act_note(act, ctx, forward):
    """The forward, with a remark for the report where it will not always be used."""
    if ctx.match and not act.once:
        forward.adze_note = "in f32 (the model rounds half precision after each step)"
    return forward


def act_build(facts):
    """A Rule's build for activations of which facts(module, ctx) knows the Act."""

    def build(module, ctx):
        act, original, match = facts(module, ctx), ctx.original, ctx.match
        if isinstance(act, str):
            return act

        def run(self, x):
            return ops.activation(x, act.name) if act_usable(act, match, x) else original(self, x)

        def forward(self, input):
            return run(self, input)

        return act_note(act, ctx, forward)

    return build


def _layer_norm(module, ctx):
    if len(module.normalized_shape) != 1:
        return f"a norm over {len(module.normalized_shape)} dimensions"
    return Norm(
        type(module), "layer_norm", module.eps, weight=module.weight is not None, bias=module.bias is not None
    )


def _rms_norm(module, ctx):
    if len(module.normalized_shape) != 1:
        return f"a norm over {len(module.normalized_shape)} dimensions"
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return Norm(type(module), "rms_norm", eps, weight=module.weight is not None)


def _gelu(module, ctx):
    return Act(type(module), {"none": "gelu", "tanh": "gelu_pytorch_tanh"}[module.approximate])


def _silu(module, ctx):
    return "works in place" if module.inplace else Act(type(module), "silu")


def _rule(name, op, build, facts, forward):
    return Rule(name, op, known(forward=forward), build(facts), facts)


RULES = [
    _rule("layer_norm", "norm", norm_build, _layer_norm, "torch.nn:LayerNorm.forward"),
    _rule("rms_norm", "norm", norm_build, _rms_norm, "torch.nn:RMSNorm.forward"),
    _rule("gelu", "act", act_build, _gelu, "torch.nn:GELU.forward"),
    _rule("silu", "act", act_build, _silu, "torch.nn:SiLU.forward"),
]
