"""Replacements for diffusers' norms, with and without modulation, and for its activations."""

import torch
from torch import nn

from ...operators import ops
from ..frame import plain, usable
from ..norm_act import Act, Norm, act_usable, linear_gelu

# ---- Norms of one input ----


def rms_norm(module, ctx):
    """diffusers.models.normalization.RMSNorm: as T5's, with an optional bias, which is added to a rounded product."""
    if len(module.dim) != 1:
        return f"a norm over {len(module.dim)} dimensions"
    if module.bias is not None and ctx.match:
        return "its bias is added to a rounded product"
    bias = None if ctx.match else True
    rounding = ctx.rounding(ops.ROUND_NORM)
    return Norm(type(module), "rms_norm", "eps", 0.0, rounding, "weight", bias=bias, shape="dim")


# ---- Norm and modulation ----


def _alike(x, *others):
    return all(other is None or other.dtype == x.dtype for other in others)


def dense(x):
    """x with a contiguous last dimension. The output of a convolution is channels-first."""
    return x if x.stride(-1) == 1 else x.contiguous()


def modulated(child, norm, steps, x, scale, shift, scale_table=None, shift_table=None):
    """child(x) * (1 + scale + scale_table) + shift + shift_table; in one launch where the child is a plain norm.
    steps: the rounding that rounds each of these steps."""
    if plain(child, norm.cls) and x.dim() == 3 and scale.dim() == 3 and scale.shape[0] == x.shape[0]:
        x = dense(x)
        parts = norm.taken(child, x, scale, shift, scale_table, shift_table)
        if parts is not None:
            weight, bias = parts
            options = norm.options(child, x, weight)
            if _alike(x, scale, shift, scale_table, shift_table) and options["out_dtype"] == x.dtype:
                options["rounding"] |= steps
                op = ops.rms_norm if norm.op == "rms_norm" else ops.layer_norm
                options |= {"scale": scale, "shift": shift, "scale_table": scale_table, "shift_table": shift_table}
                return op(x, weight, bias=bias, **options)
    if scale_table is not None:
        scale, shift = scale_table + scale, shift_table + shift
    return child(x) * (1 + scale) + shift


def added(child, norm, steps, x, residual, gate=None, scale=None, shift=None, scale_table=None, shift_table=None):
    """modulated(...) of residual + gate * x, and that sum; in one launch where the child is a plain norm."""
    if plain(child, norm.cls) and x.dim() == 3 and x.shape == residual.shape:
        x, residual = dense(x), dense(residual)
        parts = norm.taken(child, x, residual, gate, scale, shift, scale_table, shift_table)
        if parts is not None:
            weight, bias = parts
            options = norm.options(child, x, weight)
            alike = _alike(x, residual, gate, scale, shift, scale_table, shift_table)
            if alike and options["out_dtype"] == x.dtype:
                options["rounding"] |= steps
                op = ops.rms_norm if norm.op == "rms_norm" else ops.layer_norm
                options |= {"scale": scale, "shift": shift, "scale_table": scale_table, "shift_table": shift_table}
                return op(x, weight, bias=bias, residual=residual, gate=gate, **options)
    total = residual + (x if gate is None else gate * x)
    if scale is None:
        return child(total), total
    return modulated(child, norm, steps, total, scale, shift, scale_table, shift_table), total


def gate_usable(residual, x, gate, table, alone=False):
    """Whether adze's op can compute residual + (gate + table) * x. In a compiled graph it is left to the compiler,
    which fuses it, unless it is alone between operators that the compiler does not generate."""
    return (
        (not torch.compiler.is_compiling() or (alone and x.is_cuda))
        and x.dim() == gate.dim() == 3
        and x.shape == residual.shape
        and x.dtype == residual.dtype
        and gate.shape[0] == x.shape[0]
        and gate.shape[1] in (1, x.shape[1])
        and gate.shape[2] == x.shape[2]
        and usable(x, residual, gate, table)
    )


def gated(fast, residual, x, gate, table=None, alone=False):
    """residual + (gate + table) * x. When fast, only the result is rounded."""
    if _alike(x, gate, table) and gate_usable(residual, x, gate, table, alone):
        return ops.gated_add(x, residual, gate, gate_table=table, rounding=0 if fast else ops.ROUND_STEPS)
    gate = gate if table is None else table + gate
    if fast and x.dtype == residual.dtype == gate.dtype:
        return torch.addcmul(residual, x, gate)
    return residual + gate * x


def ada_zero(module, ctx):
    """AdaLayerNormZero."""
    norm, steps = ctx.facts(module.norm, "norm"), ctx.rounding(ops.ROUND_STEPS)
    if isinstance(norm, str):
        return norm

    def forward(self, x, timestep=None, class_labels=None, hidden_dtype=None, emb=None):
        if self.emb is not None:
            emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
        shift, scale, gate, *mlp = self.linear(self.silu(emb)).chunk(6, dim=1)
        return modulated(self.norm, norm, steps, x, scale[:, None], shift[:, None]), gate, *mlp

    return forward


def ada_zero_single(module, ctx):
    """AdaLayerNormZeroSingle."""
    norm, steps = ctx.facts(module.norm, "norm"), ctx.rounding(ops.ROUND_STEPS)
    if isinstance(norm, str):
        return norm

    def forward(self, x, emb=None):
        shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
        return modulated(self.norm, norm, steps, x, scale[:, None], shift[:, None]), gate

    return forward


def ada_zero_twice(module, ctx):
    """SD35AdaLayerNormZeroX: one norm, modulated for two attentions."""
    norm, steps = ctx.facts(module.norm, "norm"), ctx.rounding(ops.ROUND_STEPS)
    if isinstance(norm, str):
        return norm

    def forward(self, hidden_states, emb=None):
        rows = self.linear(self.silu(emb)).chunk(9, dim=1)
        one = modulated(self.norm, norm, steps, hidden_states, rows[1][:, None], rows[0][:, None])
        two = modulated(self.norm, norm, steps, hidden_states, rows[7][:, None], rows[6][:, None])
        return one, *rows[2:6], two, rows[8]

    return forward


def ada_continuous(module, ctx):
    """AdaLayerNormContinuous: its linear gives the scale first."""
    norm, steps = ctx.facts(module.norm, "norm"), ctx.rounding(ops.ROUND_STEPS)
    if isinstance(norm, str):
        return norm

    def forward(self, x, conditioning_embedding):
        emb = self.linear(self.silu(conditioning_embedding).to(x.dtype))
        scale, shift = emb.chunk(2, dim=1)
        return modulated(self.norm, norm, steps, x, scale[:, None], shift[:, None])

    return forward


def two_parts(child, norm, steps, x, count, first, rest):
    """modulated(...) with one (scale, shift) for the first count tokens and another for the rest."""
    parts = (x[:, :count], *first), (x[:, count:], *rest)
    return torch.cat(
        [modulated(child, norm, steps, part, scale[:, None], shift[:, None]) for part, scale, shift in parts], 1
    )


def ada_zero_token_replace(module, ctx):
    """HunyuanVideoTokenReplaceAdaLayerNormZero: tokens of the first frame have modulations of their own."""
    norm, steps = ctx.facts(module.norm, "norm"), ctx.rounding(ops.ROUND_STEPS)
    if isinstance(norm, str):
        return norm

    def forward(self, hidden_states, emb, token_replace_emb, first_frame_num_tokens):
        rows = self.linear(self.silu(emb)).chunk(6, dim=1)
        replaced = self.linear(self.silu(token_replace_emb)).chunk(6, dim=1)
        out = two_parts(self.norm, norm, steps, hidden_states, first_frame_num_tokens, replaced[1::-1], rows[1::-1])
        return out, *rows[2:], *replaced[2:]

    return forward


def ada_zero_single_token_replace(module, ctx):
    """HunyuanVideoTokenReplaceAdaLayerNormZeroSingle."""
    norm, steps = ctx.facts(module.norm, "norm"), ctx.rounding(ops.ROUND_STEPS)
    if isinstance(norm, str):
        return norm

    def forward(self, hidden_states, emb, token_replace_emb, first_frame_num_tokens):
        rows = self.linear(self.silu(emb)).chunk(3, dim=1)
        replaced = self.linear(self.silu(token_replace_emb)).chunk(3, dim=1)
        out = two_parts(self.norm, norm, steps, hidden_states, first_frame_num_tokens, replaced[1::-1], rows[1::-1])
        return out, rows[2], replaced[2]

    return forward


# ---- Activations ----


def geglu(module, ctx):
    """A Linear of a value and a gate, and a GELU of the gate."""
    steps, original = ctx.rounding(ops.ROUND_STEPS), ctx.original

    def forward(self, hidden_states, *args, **kwargs):
        if args or kwargs:
            return original(self, hidden_states, *args, **kwargs)
        both = self.proj(hidden_states)
        if usable(both):
            return ops.glu(both, act="gelu", value_first=True, rounding=steps)
        value, gate = both.chunk(2, dim=-1)
        return value * self.gelu(gate)

    return forward


def swiglu(module, ctx):
    """The same with a SiLU, which is a module."""
    if type(module.activation) is not nn.SiLU:
        return f"its activation is a {type(module.activation).__name__}"
    steps = ctx.rounding(ops.ROUND_STEPS)

    def forward(self, hidden_states):
        both = self.proj(hidden_states)
        if plain(self.activation, nn.SiLU) and usable(both):
            return ops.glu(both, act="silu", value_first=True, rounding=steps)
        value, gate = both.chunk(2, dim=-1)
        return value * self.activation(gate)

    return forward


def gelu(module, ctx):
    """A Linear and a GELU."""
    names, fast = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}, not ctx.match

    def forward(self, hidden_states):
        made = linear_gelu(self.proj, hidden_states) if fast and self.approximate == "tanh" else None
        if made is not None:
            return made
        hidden_states, act = self.proj(hidden_states), names.get(self.approximate)
        return ops.activation(hidden_states, act) if act and usable(hidden_states) else self.gelu(hidden_states)

    return forward


def approximate_gelu(module, ctx):
    """A Linear and x * sigmoid(1.702 x), of which bf16 and f16 models round every step: matched only in f32."""
    act, match = Act(type(module), "quick_gelu", once=False), ctx.match

    def forward(self, x):
        x = self.proj(x)
        return ops.activation(x, act.name) if act_usable(act, match, x) else x * torch.sigmoid(1.702 * x)

    return forward


def linear_activation(module, ctx):
    """A Linear and an activation module."""
    act, match = ctx.facts(module.activation, "act"), ctx.match
    if isinstance(act, str):
        return act

    def forward(self, hidden_states):
        hidden_states = self.proj(hidden_states)
        if act.plain(self.activation) and act_usable(act, match, hidden_states):
            return ops.activation(hidden_states, act.name)
        return self.activation(hidden_states)

    return forward
