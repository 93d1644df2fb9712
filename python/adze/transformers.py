"""Rules for transformers: norms, activations and gated MLPs, rotary positions, residual sums that feed a norm.

Fingerprints are of transformers 5.17.0 and 5.22.2. `python -m adze.fingerprint module:Class.forward` prints others.
"""

import functools
import types

import torch
from torch.nn import functional as F

from . import ops
from .fingerprint import fingerprint
from .ops import ROUND_NORM, ROUND_STEPS
from .patch_torch import Act, Norm, act_build, act_note, act_usable, norm_build
from .patching import Rule, known
from .products import products_of
from .transformers_blocks import BLOCKS
from .transformers_rope import ROPES

# ---- Norms ----


def _norm(eps, rounding=0, dtype="x", weight_offset=0.0, op="rms_norm", weight=True):
    def facts(module, ctx):
        own = getattr(module, "weight", None)
        if own is not None and own.dim() != 1:
            return f"its weight has {own.dim()} dimensions"
        return Norm(type(module), op, eps, weight_offset, ctx.rounding(rounding), dtype, weight)

    return facts


def _norm_rule(fingerprints, *facts, **more):
    facts = _norm(*facts, **more)
    return Rule(more.get("op", "rms_norm"), "norm", fingerprints, norm_build(facts), facts)


_ROOT_MEAN_SQUARE = "37b84158b8ae"  # x * rsqrt(mean(x^2) + self.eps)

NORMS = [
    _norm_rule(known(forward="4f9b0bcbcd0d"), "variance_epsilon", ROUND_NORM, "promoted"),  # Llama
    _norm_rule(known(forward="4fdab1f011ce", _norm=_ROOT_MEAN_SQUARE), "eps", ROUND_NORM, "promoted"),  # Llama 4
    _norm_rule(known(forward="e11832559060", _norm=_ROOT_MEAN_SQUARE), "eps", weight_offset=1.0),  # Gemma 1-3
    _norm_rule(known(forward="7df0f39652e5", _norm=_ROOT_MEAN_SQUARE), "eps", weight=False),
    _norm_rule(known(forward="331797cf6d6c", _norm="34a6dbefd3f1"), "eps", weight="with_scale"),  # Gemma 3n, 4
    _norm_rule(known(forward="a654b14675d4 37cea2921f10"), "variance_epsilon"),  # Olmo 2, GPT-OSS, Helium
    _norm_rule(known(forward="c5be859e5088"), "variance_epsilon", ROUND_NORM, "weight"),  # T5
    _norm_rule(known(forward="eb1c7c1f4421"), "variance_epsilon", op="layer_norm"),  # Cohere
]


# ---- Activations, and MLPs with a gate ----


def _act(name, once):
    return lambda module, ctx: Act(type(module), name, once)


def _is_tanh_gelu(act):
    return isinstance(act, functools.partial) and act.func is F.gelu and act.keywords == {"approximate": "tanh"}


def _held_act(module, ctx):
    """GELUActivation and GELUTanh call what their constructor chose."""
    cls, act = type(module), module.act
    if act is F.gelu:
        return Act(cls, "gelu", chosen=lambda child: child.act is F.gelu)
    if _is_tanh_gelu(act):
        return Act(cls, "gelu_pytorch_tanh", chosen=lambda child: _is_tanh_gelu(child.act))
    name = {"038f21a7bf74": "gelu", "8012d1cfe955": "gelu_pytorch_tanh"}.get(fingerprint(act))
    if name is None or not isinstance(act, types.MethodType):
        return f"calls {getattr(act, '__name__', act)}"
    function = act.__func__

    def chosen(child):
        return isinstance(child.act, types.MethodType) and child.act.__func__ is function

    return Act(cls, name, once=False, chosen=chosen)


def _act_rule(name, forward, facts):
    return Rule(name, "act", known(forward=forward), act_build(facts), facts)


ACTIVATIONS = [
    _act_rule("silu", "4c429c1f4c3c", _act("silu", True)),
    _act_rule("gelu", "808fe5aea163", _held_act),
    _act_rule("relu2", "86c870650897", _act("relu2", True)),
    _act_rule("gelu_new", "5dc00dd195dd 6adf215f613a 1efae9884826", _act("gelu_new", False)),
    _act_rule("quick_gelu", "0d87e1306b04", _act("quick_gelu", False)),
]


def _gated(attribute, *products):
    """The build of an MLP with a gate, from a function that makes the forward; attribute names its activation,
    products the Linears that read its input, for which the function is given a way to make them."""

    def with_forward(make):
        def build(module, ctx):
            act = ctx.facts(getattr(module, attribute), "act")
            if isinstance(act, str):
                return act
            options = {}
            if products:
                options["project"] = products_of(ctx, *(getattr(module, name) for name in products))
            return act_note(act, ctx, make(act, ctx.match, ctx.rounding(ROUND_STEPS), **options))

        return build

    return with_forward


def _glu(child, act, match, rounding, gate, value):
    """child(gate) * value, in one launch where the child is a plain activation."""
    if act.plain(child) and act_usable(act, match, gate, value) and value.dtype == gate.dtype:
        return ops.glu(gate, value, act=act.name, rounding=rounding)
    return child(gate) * value


@_gated("act_fn", "gate_proj", "up_proj")
def _llama_mlp(act, match, rounding, project):
    def forward(self, x):
        gate, value = project(x, self.gate_proj, self.up_proj)
        return self.down_proj(_glu(self.act_fn, act, match, rounding, gate, value))

    return forward


@_gated("act_fn", "gate_proj", "up_proj")
def _qwen2_5_mlp(act, match, rounding, project):
    def forward(self, hidden_state):
        gate, value = project(hidden_state, self.gate_proj, self.up_proj)
        return self.down_proj(_glu(self.act_fn, act, match, rounding, gate, value))

    return forward


@_gated("act_fn")
def _t5_gemma_mlp(act, match, rounding):
    def forward(self, x):
        hidden = _glu(self.act_fn, act, match, rounding, self.gate_proj(x), self.up_proj(x))
        return self.down_proj(self.dropout(hidden))

    return forward


@_gated("activation_fn")
def _phi3_mlp(act, match, rounding):
    def forward(self, hidden_states):
        both = self.gate_up_proj(hidden_states)
        if act.plain(self.activation_fn) and act_usable(act, match, both):
            return self.down_proj(ops.glu(both, act=act.name, rounding=rounding))
        gate, value = both.chunk(2, dim=-1)
        return self.down_proj(value * self.activation_fn(gate))

    return forward


@_gated("act")
def _t5_mlp(act, match, rounding):
    def forward(self, hidden_states):
        gate, value = self.wi_0(hidden_states), self.wi_1(hidden_states)
        hidden = self.dropout(_glu(self.act, act, match, rounding, gate, value))
        weight = self.wo.weight
        if isinstance(weight, torch.Tensor) and weight.dtype not in (hidden.dtype, torch.int8):
            hidden = hidden.to(weight.dtype)
        return self.wo(hidden)

    return forward


MLPS = [
    Rule("glu", "act", known(forward="35a8003d2aa0"), _llama_mlp),
    Rule("glu", "act", known(forward="c35ecc8aec77"), _qwen2_5_mlp),
    Rule("glu", "act", known(forward="862f4998d076"), _t5_gemma_mlp),
    Rule("glu", "act", known(forward="eaf8e0760a62"), _phi3_mlp),
    Rule("glu", "act", known(forward="7dc4ff3807ba"), _t5_mlp),
]


RULES = [*NORMS, *ACTIVATIONS, *MLPS, *ROPES, *BLOCKS]
