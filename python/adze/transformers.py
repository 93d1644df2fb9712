"""Rules for transformers: norms, activations and gated MLPs, rotary positions, residual sums that feed a norm.

Fingerprints are of transformers 5.17.0 and 5.22.2. `python -m adze.fingerprint module:Class.forward` prints others.
"""

import functools
import sys

import torch
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import ops
from .fingerprint import fingerprint, unwrapped
from .ops import ROUND_NORM, ROUND_STEPS
from .patch import Rule, clone, plain, shim, usable
from .patch_torch import Act, Norm, act_build, act_note, act_usable, add_norm, norm_add, norm_build


def _known(**fingerprints):
    """{"forward": ..., "self._norm": ...} of forward=..., _norm=...; several are separated by spaces."""
    return {("self." if what[0] == "_" else "") + what: frozenset(f.split()) for what, f in fingerprints.items()}


# ---- Norms ----


def _norm(eps, rounding=0, dtype="x", weight_offset=0.0, op="rms_norm"):
    def facts(module, ctx):
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() != 1:
            return f"its weight has {weight.dim()} dimensions"
        return Norm(
            type(module), op, getattr(module, eps), weight_offset, ctx.rounding(rounding), dtype, weight is not None
        )

    return facts


def _norm_rule(fingerprints, *facts, **more):
    facts = _norm(*facts, **more)
    return Rule(more.get("op", "rms_norm"), "norm", fingerprints, norm_build(facts), facts)


_ROOT_MEAN_SQUARE = "37b84158b8ae"  # x * rsqrt(mean(x^2) + self.eps)

NORMS = [
    _norm_rule(_known(forward="4f9b0bcbcd0d"), "variance_epsilon", ROUND_NORM, "promoted"),  # Llama
    _norm_rule(_known(forward="4fdab1f011ce", _norm=_ROOT_MEAN_SQUARE), "eps", ROUND_NORM, "promoted"),  # Llama 4
    _norm_rule(_known(forward="e11832559060", _norm=_ROOT_MEAN_SQUARE), "eps", weight_offset=1.0),  # Gemma 1-3
    _norm_rule(_known(forward="331797cf6d6c", _norm="34a6dbefd3f1"), "eps"),  # Gemma 3n, 4
    _norm_rule(_known(forward="a654b14675d4 37cea2921f10"), "variance_epsilon"),  # Olmo 2, GPT-OSS, Helium
    _norm_rule(_known(forward="c5be859e5088"), "variance_epsilon", ROUND_NORM, "weight"),  # T5
    _norm_rule(_known(forward="eb1c7c1f4421"), "variance_epsilon", op="layer_norm"),  # Cohere
]


# ---- Activations, and MLPs with a gate ----


def _act(name, once):
    return lambda module, ctx: Act(type(module), name, once)


def _held_act(module, ctx):
    """GELUActivation and GELUTanh call what their constructor chose."""
    act = module.act
    if act is F.gelu:
        return Act(type(module), "gelu")
    if isinstance(act, functools.partial) and act.func is F.gelu and act.keywords == {"approximate": "tanh"}:
        return Act(type(module), "gelu_pytorch_tanh")
    name = {"038f21a7bf74": "gelu", "8012d1cfe955": "gelu_pytorch_tanh"}.get(fingerprint(act))
    return f"calls {getattr(act, '__name__', act)}" if name is None else Act(type(module), name, once=False)


def _act_rule(name, forward, facts):
    return Rule(name, "act", _known(forward=forward), act_build(facts), facts)


ACTIVATIONS = [
    _act_rule("silu", "4c429c1f4c3c", _act("silu", True)),
    _act_rule("gelu", "808fe5aea163", _held_act),
    _act_rule("relu2", "86c870650897", _act("relu2", True)),
    _act_rule("gelu_new", "5dc00dd195dd 6adf215f613a 1efae9884826", _act("gelu_new", False)),
    _act_rule("quick_gelu", "0d87e1306b04", _act("quick_gelu", False)),
]


def _gated(attribute):
    """The build of an MLP with a gate, from a function that makes the forward; attribute names its activation."""

    def with_forward(make):
        def build(module, ctx):
            act = ctx.facts(getattr(module, attribute), "act")
            return (
                act if isinstance(act, str) else act_note(act, ctx, make(act, ctx.match, ctx.rounding(ROUND_STEPS)))
            )

        return build

    return with_forward


def _glu(child, act, match, rounding, gate, value):
    """child(gate) * value, in one launch where the child is a plain activation."""
    if plain(child, act.cls) and act_usable(act, match, gate, value) and value.dtype == gate.dtype:
        return ops.glu(gate, value, act=act.name, rounding=rounding)
    return child(gate) * value


@_gated("act_fn")
def _llama_mlp(act, match, rounding):
    def forward(self, x):
        return self.down_proj(_glu(self.act_fn, act, match, rounding, self.gate_proj(x), self.up_proj(x)))

    return forward


@_gated("activation_fn")
def _phi3_mlp(act, match, rounding):
    def forward(self, hidden_states):
        both = self.gate_up_proj(hidden_states)
        if plain(self.activation_fn, act.cls) and act_usable(act, match, both):
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
    Rule("glu", "act", _known(forward="35a8003d2aa0"), _llama_mlp),
    Rule("glu", "act", _known(forward="eaf8e0760a62"), _phi3_mlp),
    Rule("glu", "act", _known(forward="7dc4ff3807ba"), _t5_mlp),
]


# ---- Rotary positions ----


def _rotatable(q, k, cos, sin, unsqueeze_dim):
    if unsqueeze_dim not in (1, 2) or q.dim() != 4 or cos.dim() != 3 or cos.dtype != q.dtype:
        return False
    return usable(q, k, cos, sin) and (k is None or k.dtype == q.dtype)


def _rotate_half(fallback, rounding):
    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        if not _rotatable(q, k, cos, sin, unsqueeze_dim):
            return fallback(q, k, cos, sin, unsqueeze_dim)
        return ops.rope(q, k, cos, sin, rotary_dim=cos.shape[-1], heads_first=unsqueeze_dim == 1, rounding=rounding)

    return apply_rotary_pos_emb


def _rotate_half_of_one(fallback, rounding):
    def apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=1):
        if not _rotatable(x, None, cos, sin, unsqueeze_dim):
            return fallback(x, cos, sin, unsqueeze_dim)
        return ops.rope(
            x, None, cos, sin, rotary_dim=cos.shape[-1], heads_first=unsqueeze_dim == 1, rounding=rounding
        )

    return apply_rotary_pos_emb


def _rope(make):
    """Builds a clone of a forward, whatever it is, that sees another apply_rotary_pos_emb among its globals."""

    def build(module, ctx):
        if unwrapped(ctx.original) is not ctx.original:
            return "its forward is decorated"
        home = sys.modules[ctx.original.__globals__["__name__"]]
        apply = make(unwrapped(home.apply_rotary_pos_emb), ctx.rounding(ROUND_STEPS))
        return clone(ctx.original, shim(home, ctx.numerics, {"apply_rotary_pos_emb": apply}))

    return build


_HALF = "276f273e524c"  # rotate_half: cat((-x2, x1))


def _rope_rule(apply, make):
    fingerprints = {
        "apply_rotary_pos_emb": frozenset(apply.split()),
        "apply_rotary_pos_emb/rotate_half": frozenset([_HALF]),
    }
    return Rule("rope", "rope", fingerprints, _rope(make))


def _qk_norm_rope(heads_first):
    """An attention that norms q and k per head, with heads first or not, and rotates them."""

    def build(module, ctx):
        q_facts, k_facts = ctx.facts(module.q_norm, "norm"), ctx.facts(module.k_norm, "norm")
        if isinstance(q_facts, str) or q_facts != k_facts:
            return f"q_norm: {q_facts}; k_norm: {k_facts}"
        if q_facts.op != "rms_norm" or not q_facts.weight or q_facts.dtype == "weight":
            return f"q_norm is a {q_facts.op} that does not fit"
        names = ctx.original.__globals__
        eager, rotate = names["eager_attention_forward"], unwrapped(names["apply_rotary_pos_emb"])
        norm, rounding = q_facts, q_facts.rounding | ctx.rounding(ROUND_STEPS)

        def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
            tokens = hidden_states.shape[:-1]
            heads = (*tokens, -1, self.head_dim)
            q, k = self.q_proj(hidden_states).view(heads), self.k_proj(hidden_states).view(heads)
            v = self.v_proj(hidden_states).view(heads).transpose(1, 2)
            cos, sin = position_embeddings
            q_norm, k_norm = self.q_norm, self.k_norm
            if (
                plain(q_norm, norm.cls)
                and plain(k_norm, norm.cls)
                and _rotatable(q, k, cos, sin, 2)
                and usable(q, q_norm.weight, k_norm.weight)
                and q_norm.weight.dtype == k_norm.weight.dtype
                and (norm.dtype == "x" or q_norm.weight.dtype == q.dtype)
            ):
                q, k = ops.qk_norm_rope(
                    q, k, q_norm.weight, k_norm.weight, cos, sin, eps=norm.eps, weight_offset=norm.weight_offset,
                    rotary_dim=cos.shape[-1], rounding=rounding,
                )  # fmt: skip
                q, k = q.transpose(1, 2), k.transpose(1, 2)
            else:
                if heads_first:
                    q, k = q_norm(q.transpose(1, 2)), k_norm(k.transpose(1, 2))
                else:
                    q, k = q_norm(q).transpose(1, 2), k_norm(k).transpose(1, 2)
                q, k = rotate(q, k, cos, sin)
            if past_key_values is not None:
                k, v = past_key_values.update(k, v, self.layer_idx)
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
            dropout = self.attention_dropout if self.training else 0.0
            out, weights = attend(
                self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling,
                sliding_window=self.sliding_window, **kwargs,
            )  # fmt: skip
            return self.o_proj(out.reshape(*tokens, -1).contiguous()), weights

        forward.__defaults__ = ctx.original.__defaults__
        return forward

    return build


def _qk_norm_rope_rule(forward, heads_first):
    half = {
        "apply_rotary_pos_emb": frozenset(["94429b6fde58"]),
        "apply_rotary_pos_emb/rotate_half": frozenset([_HALF]),
    }
    return Rule("qk_norm_rope", "fuse", {**_known(forward=forward), **half}, _qk_norm_rope(heads_first))


ROPES = [
    _qk_norm_rope_rule("073636057285", heads_first=False),  # Qwen 3
    _qk_norm_rope_rule("32363b9ffab9", heads_first=True),  # Gemma 3
    _rope_rule("94429b6fde58 c950f673def0 c3637329993d", _rotate_half),  # Llama; GPT-NeoX, Phi-3: a part of a head
    _rope_rule("8a0e785186a9", _rotate_half_of_one),  # Gemma 3n, 4
]


# ---- Residual sums ----


def _block(**norms):
    """The build of a block, from a function that makes its forward of these of its norms; names are attributes."""

    def with_forward(make):
        def build(module, ctx):
            known = {name: ctx.facts(getattr(module, attribute), "norm") for name, attribute in norms.items()}
            unknown = [f"{norms[name]}: {norm}" for name, norm in known.items() if isinstance(norm, str)]
            return "; ".join(unknown) if unknown else make(ctx, **known)

        return build

    return with_forward


@_block(after_attention="post_attention_layernorm")
def _llama_layer(ctx, after_attention):
    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=False,
        position_embeddings=None,
        **kwargs,
    ):
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        normed, total = add_norm(self.post_attention_layernorm, after_attention, attended, hidden_states)
        return total + self.mlp(normed)

    return forward


@_block(after_attention="post_attention_layernorm")
def _phi3_layer(ctx, after_attention):
    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=False,
        position_embeddings=None,
        **kwargs,
    ):
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        attended = self.resid_attn_dropout(attended)
        normed, total = add_norm(self.post_attention_layernorm, after_attention, attended, hidden_states)
        return total + self.resid_mlp_dropout(self.mlp(normed))

    return forward


@_block(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
def _gemma2_layer(ctx, after_attention, after_mlp):
    steps = ctx.rounding(ROUND_STEPS)

    def forward(
        self,
        hidden_states,
        position_embeddings=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        **kwargs,
    ):
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )
        total = norm_add(self.post_attention_layernorm, after_attention, attended, hidden_states, steps)
        out = self.mlp(self.pre_feedforward_layernorm(total))
        return norm_add(self.post_feedforward_layernorm, after_mlp, out, total, steps)

    return forward


@_block(before_mlp="ln_2")
def _gpt2_block(ctx, before_mlp):
    original = ctx.original

    def forward(
        self,
        hidden_states,
        past_key_values=None,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        use_cache=False,
        **kwargs,
    ):
        if encoder_hidden_states is not None:
            return original(
                self, hidden_states, past_key_values, attention_mask, encoder_hidden_states, encoder_attention_mask,
                use_cache, **kwargs,
            )  # fmt: skip
        attended, _ = self.attn(
            self.ln_1(hidden_states),
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            use_cache=use_cache,
            **kwargs,
        )
        normed, total = add_norm(self.ln_2, before_mlp, attended, hidden_states)
        return total + self.mlp(normed)

    return forward


@_block(before_mlp="post_attention_layernorm")
def _gpt_neox_sequential(ctx, before_mlp):
    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        use_cache=False,
        layer_past=None,
        position_embeddings=None,
        **kwargs,
    ):
        attended, _ = self.attention(
            self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            layer_past=layer_past,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        attended = self.post_attention_dropout(attended)
        normed, total = add_norm(self.post_attention_layernorm, before_mlp, attended, hidden_states)
        return self.post_mlp_dropout(self.mlp(normed)) + total

    return forward


_PARALLEL = "attention and MLP run beside each other: no sum feeds a norm of this block"


def _gpt_neox_layer(module, ctx):
    return _PARALLEL if module.use_parallel_residual else _gpt_neox_sequential(module, ctx)


@_block(before_mlp="post_attention_layernorm")
def _falcon_sequential(ctx, before_mlp):
    def forward(
        self,
        hidden_states,
        alibi,
        attention_mask,
        position_ids=None,
        layer_past=None,
        use_cache=False,
        output_attentions=False,
        position_embeddings=None,
        **kwargs,
    ):
        attended, weights = self.self_attention(
            self.input_layernorm(hidden_states),
            layer_past=layer_past,
            attention_mask=attention_mask,
            position_ids=position_ids,
            alibi=alibi,
            use_cache=use_cache,
            output_attentions=output_attentions,
            position_embeddings=position_embeddings,
        )
        attended = F.dropout(attended, p=self.config.attention_dropout, training=self.training)
        normed, total = add_norm(self.post_attention_layernorm, before_mlp, attended, hidden_states)
        out = F.dropout(self.mlp(normed), p=self.config.hidden_dropout, training=self.training)
        return total + out, weights

    return forward


def _falcon_layer(module, ctx):
    parallel = module.config.parallel_attn or module.config.new_decoder_architecture
    return _PARALLEL if parallel else _falcon_sequential(module, ctx)


@_block(before_mlp="layer_norm2")
def _clip_layer(ctx, before_mlp):
    def forward(self, hidden_states, attention_mask, **kwargs):
        attended, _ = self.self_attn(
            hidden_states=self.layer_norm1(hidden_states), attention_mask=attention_mask, **kwargs
        )
        normed, total = add_norm(self.layer_norm2, before_mlp, attended, hidden_states)
        return total + self.mlp(normed)

    return forward


@_block(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
def _olmo2_layer(ctx, after_attention, after_mlp):
    steps = ctx.rounding(ROUND_STEPS)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=False,
        position_embeddings=None,
        **kwargs,
    ):
        attended, _ = self.self_attn(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        total = norm_add(self.post_attention_layernorm, after_attention, attended, hidden_states, steps)
        return norm_add(self.post_feedforward_layernorm, after_mlp, self.mlp(total), total, steps)

    return forward


BLOCKS = [
    Rule("add + norm", "fuse", _known(forward="a1ddc4ac03d4"), _llama_layer),
    Rule("add + norm", "fuse", _known(forward="23480905dfec"), _phi3_layer),
    Rule("norm + add", "fuse", _known(forward="b1e3ffe85e38"), _gemma2_layer),
    Rule("add + norm", "fuse", _known(forward="87f11a77ab8a"), _gpt2_block),
    Rule("add + norm", "fuse", _known(forward="4c409d8d95b1"), _gpt_neox_layer),
    Rule("add + norm", "fuse", _known(forward="08a6b03d7013", dropout_add="1af5cb306303"), _falcon_layer),
    Rule("add + norm", "fuse", _known(forward="502a38643dce"), _clip_layer),
    Rule("norm + add", "fuse", _known(forward="c27740dcce2a"), _olmo2_layer),
    Rule("", "fuse", _known(forward="0d556a2f1c8a"), lambda module, ctx: _PARALLEL),  # Phi
]

RULES = [*NORMS, *ACTIVATIONS, *MLPS, *ROPES, *BLOCKS]
