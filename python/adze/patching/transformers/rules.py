"""Rules for transformers: norms, activations and gated MLPs, rotary positions, residual sums that feed a norm.

Sources have their names from fingerprints.json: `llama:LlamaRMSNorm.forward` is that of every class with this source.
"""

import functools
import types

import torch
from torch import nn
from torch.nn import functional as F

from ...operators import ops
from ...operators.ops import ROUND_NORM, ROUND_STEPS
from ..fingerprint import fingerprint
from ..frame import Rule, rule
from ..fused_linear import fused_linears, mark_fused
from ..known_sources import by_hash
from ..norm_act import Act, Norm, act_note, act_rule, act_usable, norm_rule
from ..products import linear_add, linear_alone, normed_glu, products_note, with_products
from ..residual_norm import RULES as STATEMENTS
from .attention import attentions
from .blocks import BLOCKS
from .decoder import decoders
from .rope import ROPES

# ---- Norms ----


def _norm(eps, rounding=0, dtype="x", weight_offset=0.0, op="rms_norm", weight=True):
    def facts(module, ctx):
        own = getattr(module, "weight", None)
        if own is not None and own.dim() != 1:
            return f"its weight has {own.dim()} dimensions"
        return Norm(type(module), op, eps, weight_offset, ctx.rounding(rounding), dtype, weight)

    return facts


_ROOT_MEAN_SQUARE = "llama4:Llama4TextL2Norm._norm"  # x * rsqrt(mean(x^2) + self.eps)

NORMS = [
    norm_rule("rms_norm", _norm("variance_epsilon", ROUND_NORM, "promoted"), forward="llama:LlamaRMSNorm.forward"),
    norm_rule(
        "rms_norm",
        _norm("eps", ROUND_NORM, "promoted"),
        forward="llama4:Llama4TextRMSNorm.forward",
        _norm=_ROOT_MEAN_SQUARE,
    ),
    norm_rule(
        "rms_norm", _norm("eps", weight_offset=1.0), forward="gemma:GemmaRMSNorm.forward", _norm=_ROOT_MEAN_SQUARE
    ),
    norm_rule(
        "rms_norm", _norm("eps", weight=False), forward="llama4:Llama4TextL2Norm.forward", _norm=_ROOT_MEAN_SQUARE
    ),
    norm_rule(
        "rms_norm",
        _norm("eps", weight="with_scale"),
        forward="gemma3n:Gemma3nRMSNorm.forward",
        _norm="gemma3n:Gemma3nRMSNorm._norm",
    ),
    norm_rule(
        "rms_norm", _norm("variance_epsilon"), forward="olmo2:Olmo2RMSNorm.forward helium:HeliumRMSNorm.forward"
    ),
    norm_rule("rms_norm", _norm("variance_epsilon", ROUND_NORM, "weight"), forward="t5:T5LayerNorm.forward"),
    norm_rule("layer_norm", _norm("variance_epsilon", op="layer_norm"), forward="cohere:CohereLayerNorm.forward"),
]


# ---- Activations, and MLPs with a gate ----


def _act(name, once):
    return lambda module, ctx: Act(type(module), name, once)


_HELD = {
    "activations:GELUActivation._gelu_python": "gelu",
    "activations:GELUTanh._gelu_tanh_python": "gelu_pytorch_tanh",
}


def _is_tanh_gelu(act):
    return isinstance(act, functools.partial) and act.func is F.gelu and act.keywords == {"approximate": "tanh"}


def _held_act(module, ctx):
    """GELUActivation and GELUTanh call what their constructor chose."""
    cls, act = type(module), module.act
    if act is F.gelu:
        return Act(cls, "gelu", chosen=lambda child: child.act is F.gelu)
    if _is_tanh_gelu(act):
        return Act(cls, "gelu_pytorch_tanh", chosen=lambda child: _is_tanh_gelu(child.act))
    name = by_hash(_HELD).get(fingerprint(act))
    if name is None or not isinstance(act, types.MethodType):
        return f"calls {getattr(act, '__name__', act)}"
    function = act.__func__

    def chosen(child):
        return isinstance(child.act, types.MethodType) and child.act.__func__ is function

    return Act(cls, name, once=False, chosen=chosen)


_NEW_GELU = " ".join(f"activations:{name}GELUActivation.forward" for name in ("New", "Fast", "Accurate"))

ACTIVATIONS = [
    act_rule("silu", _act("silu", True), forward="activations:SiLUActivation.forward"),
    act_rule("gelu", _held_act, forward="activations:GELUActivation.forward"),
    act_rule("relu2", _act("relu2", True), forward="activations:ReLUSquaredActivation.forward"),
    act_rule("gelu_new", _act("gelu_new", False), forward=_NEW_GELU),
    act_rule("quick_gelu", _act("quick_gelu", False), forward="activations:QuickGELUActivation.forward"),
]


def _gated(attribute, *linears):
    """Makes the build of a gated MLP from a function that makes its forward. attribute: the name of its activation.
    linears: names of the Linears that read its input, which the function gets as one projection."""

    def with_forward(make):
        def build(module, ctx):
            act = ctx.facts(getattr(module, attribute), "act")
            if isinstance(act, str):
                return act
            rounding = ctx.rounding(ROUND_STEPS)
            if not linears:
                return act_note(act, ctx, make(act, ctx.match, rounding))
            project = fused_linears(ctx, *(getattr(module, name) for name in linears))
            return act_note(act, ctx, mark_fused(make(act, ctx.match, rounding, project), project))

        return build

    return with_forward


def _glu(child, act, match, rounding, gate, value):
    """child(gate) * value, in one launch where the child is a plain activation."""
    if act.plain(child) and act_usable(act, match, gate, value) and value.dtype == gate.dtype:
        return ops.glu(gate, value, act=act.name, rounding=rounding)
    return child(gate) * value


@_gated("act_fn", "gate_proj", "up_proj")
def _llama_mlp(act, match, rounding, project):
    def activated(self, x):
        gate, value = project(x, self.gate_proj, self.up_proj)
        return _glu(self.act_fn, act, match, rounding, gate, value)

    def forward(self, x):
        return self.down_proj(activated(self, x))

    def products(self, x, child, norm):
        hidden = None
        if act.plain(self.act_fn):
            hidden = normed_glu(x, child, norm, self.gate_proj, self.up_proj, act.name)
        return linear_add(self.down_proj, activated(self, child(x)) if hidden is None else hidden, x)

    return forward if match else with_products(forward, products)


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
    rule("glu", "act", _llama_mlp, forward="llama:LlamaMLP.forward"),
    rule("glu", "act", _qwen2_5_mlp, forward="qwen2_5_vl:Qwen2_5_VLMLP.forward"),
    rule("glu", "act", _t5_gemma_mlp, forward="t5gemma:T5GemmaMLP.forward"),
    rule("glu", "act", _phi3_mlp, forward="phi3:Phi3MLP.forward"),
    rule("glu", "act", _t5_mlp, forward="t5:T5DenseGatedActDense.forward"),
]


def _head(module, ctx):
    """The Linear that makes logits. The others are parts of blocks."""
    note = None if ctx.match or ctx.path.rpartition(".")[2] != "lm_head" else products_note(module)
    if note is None:
        return "not a head whose products are gemm's"

    def forward(self, input):
        return linear_alone(self, input)

    forward.adze_note = note
    return forward


HEADS = [Rule("linear", "fuse", {}, _head, matches=lambda function: function is nn.Linear.forward)]
RULES = [*NORMS, *ACTIVATIONS, *MLPS, *ROPES, *BLOCKS, *STATEMENTS, *HEADS]


def settings(handle, plan, modules, over):
    """What a patch changes besides forwards."""
    return [*attentions(handle, plan, modules, over), *decoders(handle, plan, modules, over)]
