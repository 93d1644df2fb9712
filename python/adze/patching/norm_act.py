"""What rules share: norms, norms with a residual, activations."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from ..operators import ops
from .frame import parameter, plain, rule, usable


class Norm(NamedTuple):
    """How a class of norms computes, as arguments of an op. What may differ from one module to the next, or change
    after a patch, is read from the module in each call."""

    cls: type
    op: str  # "rms_norm" or "layer_norm"
    eps: str  # the attribute that has it
    weight_offset: float = 0.0
    rounding: int = 0
    dtype: str = (
        "x"  # of the output: x's, "promoted" with the weight's, or "weight": T5's, which then rounds only the output
    )
    weight: bool | str = True  # whether it has one; or the attribute that says so
    bias: bool | None = False  # whether it may have one; None: it may, and ops cannot add it as the model does
    shape: str | None = None  # the attribute that has the sizes of the dimensions it norms

    def taken(self, module, x, *others):
        """The weight and the bias of such a module, or None where the op cannot replace it for this x. others:
        further inputs of the op."""
        scaled = getattr(module, self.weight) if isinstance(self.weight, str) else self.weight
        weight = parameter(module, "weight") if scaled else None
        bias = None if self.bias is False else parameter(module, "bias")
        if (bias is not None and self.bias is None) or not usable(x, weight, bias, *others):
            return None
        if self.shape is not None:
            sizes = getattr(module, self.shape)
            if len(sizes) != 1 or sizes[0] != x.shape[-1]:
                return None
        return weight, bias

    def eps_of(self, module):
        eps = getattr(module, self.eps)
        return torch.finfo(torch.float32).eps if eps is None else eps

    def options(self, module, x, weight):
        """Keyword arguments for the op."""
        wide, rounding = self.dtype != "x" and weight is not None and weight.dtype == torch.float32, self.rounding
        if self.dtype == "weight" and (weight is None or weight.dtype != x.dtype):
            rounding = 0
        return {
            "eps": self.eps_of(module),
            "weight_offset": self.weight_offset,
            "rounding": rounding,
            "out_dtype": torch.float32 if wide else x.dtype,
        }

    def run(self, module, x, weight, bias, **more):
        op = ops.rms_norm if self.op == "rms_norm" else ops.layer_norm
        return op(x, weight, bias=bias, **self.options(module, x, weight), **more)


def norm_build(facts):
    """A Rule's build for norms of which facts(module, ctx) knows the Norm. The parameter keeps its name."""

    def build(module, ctx):
        norm, original = facts(module, ctx), ctx.original
        if isinstance(norm, str):
            return norm

        def run(self, x):
            parts = norm.taken(self, x)
            return original(self, x) if parts is None else norm.run(self, x, *parts)

        def of_hidden_states(self, hidden_states):
            return run(self, hidden_states)

        def of_input(self, input):
            return run(self, input)

        def of_inputs(self, inputs):
            return run(self, inputs)

        def of_x(self, x):
            return run(self, x)

        named = {"hidden_states": of_hidden_states, "input": of_input, "inputs": of_inputs, "x": of_x}
        name = original.__code__.co_varnames[1] if original.__code__.co_argcount == 2 else None
        return named.get(name, f"its parameter is {name}")

    return build


def _add_norm(child, norm, x, residual, need_sum):
    if plain(child, norm.cls) and x.shape == residual.shape and residual.dtype == x.dtype:
        parts = norm.taken(child, x, residual)
        if parts is not None:
            return norm.run(child, x, *parts, residual=residual, need_sum=need_sum)
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
    if plain(child, norm.cls) and x.shape == residual.shape and residual.dtype == x.dtype:
        parts = norm.taken(child, x, residual)
        if parts is not None:
            weight, bias = parts
            options = norm.options(child, x, weight)
            if options["out_dtype"] == x.dtype:
                options["rounding"] |= steps
                op = ops.rms_norm if norm.op == "rms_norm" else ops.layer_norm
                return op(x, weight, bias=bias, shift=residual, **options)
    return residual + child(x)


class Act(NamedTuple):
    """An activation module: adze's name for it, and whether it rounds once. With "match", one that rounds in between
    is replaced in f32 only."""

    cls: type
    name: str
    once: bool = True
    chosen: Callable[[nn.Module], bool] | None = (
        None  # for a class with several activations: whether a module is set to this one
    )

    def is_of(self, module):
        return self.chosen is None or self.chosen(module)

    def plain(self, child):
        """Whether a call of the child would compute exactly this."""
        return plain(child, self.cls) and self.is_of(child)


def act_usable(act, match, x, *others):
    return (act.once or not match or x.dtype == torch.float32) and usable(x, *others)


def linear_gelu(proj, x):
    """gelu(proj(x)) as an epilogue of cuBLASLt, by the tanh formula and without a rounding between GEMM and gelu.
    None unless proj is a plain Linear with a bias, in half precision on a GPU."""
    if not x.is_cuda or x.dtype == torch.float32 or not plain(proj, nn.Linear) or proj.bias is None:
        return None
    weight, bias = proj.weight, proj.bias
    if weight.dtype != x.dtype or bias.dtype != x.dtype or not usable(x, weight, bias):
        return None
    made = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)
    return made.view(*x.shape[:-1], weight.shape[0])


def act_note(act, ctx, forward):
    """The forward, with a note for the report where it is used in f32 only."""
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
            return ops.activation(x, act.name) if act.is_of(self) and act_usable(act, match, x) else original(self, x)

        def forward(self, input):
            return run(self, input)

        return act_note(act, ctx, forward)

    return build


def norm_rule(name, facts, **sources):
    """The rule of a norm of one input, of which facts(module, ctx) knows the Norm."""
    return rule(name, "norm", norm_build(facts), facts, **sources)


def act_rule(name, facts, **sources):
    """The rule of an activation, of which facts(module, ctx) knows the Act."""
    return rule(name, "act", act_build(facts), facts, **sources)
