"""Rules for rope in transformers: apply_rotary_pos_emb in any attention, attentions that also norm q and k, and
rotary embeddings, which compute cos and sin of positions."""

import sys

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...operators import ops
from ...operators.ops import ROUND_STEPS
from ..fingerprint import fingerprint, unwrapped
from ..frame import Rule, clone, known, plain, shim, usable
from ..fused_linear import fused_linears, mark_fused
from ..known_sources import by_hash, hashes
from ..products import linear_add, normed_linears, with_products

_HALF = "llama:rotate_half"  # cat((-x2, x1)) of the halves
_PAIRS = "glm:rotate_half cohere:rotate_half"  # the same of neighbours


def _rotatable(q, k, cos, sin, unsqueeze_dim):
    if unsqueeze_dim not in (1, 2) or q.dim() != 4 or cos.dim() != 3:
        return False
    return usable(q, k, cos, sin) and (k is None or k.dtype == q.dtype)


def _tokens_first(x):
    """Whether x, of [batch, heads, tokens, dim], has the memory layout of a projection's output, with the heads of a
    token together. An attention's result has the layout of its queries, and then needs no copy for the next GEMM."""
    return x.stride(2) > x.stride(1) and x.shape[2] > 1


def _rotation(interleaved=False, columns="all", steps=True, casts=False):
    """A maker of replacements for apply_rotary_pos_emb, from the original function and the numerics.

    columns: which columns of a table the original uses: "all"; the "first" half; or all of a table that has "half" as
    many columns as are rotated. steps: the original does not compute in float, so it rounds each step if the table
    has q's dtype. casts: it casts the result to q's dtype if the table has another."""

    def make(fallback, match):
        def turn(q, k, cos, sin, unsqueeze_dim=1):
            """What rope and kv_append are to do, as their arguments; None where they cannot."""
            if (steps and not casts and cos.dtype != q.dtype) or not _rotatable(q, k, cos, sin, unsqueeze_dim):
                return None
            width = cos.shape[-1]
            rounding = ROUND_STEPS if match and steps and cos.dtype == q.dtype else 0
            if columns == "first":
                cos, sin = cos[..., : width // 2], sin[..., : width // 2]
            rotary_dim = 2 * width if columns == "half" else width
            return {
                "cos": cos, "sin": sin, "interleaved": interleaved, "rotary_dim": rotary_dim, "rounding": rounding
            }  # fmt: skip

        def rotate(q, k, cos, sin, unsqueeze_dim):
            how = turn(q, k, cos, sin, unsqueeze_dim)
            if how is None:
                return None
            tokens_first = unsqueeze_dim == 1 and _tokens_first(q) and (k is None or _tokens_first(k))
            if not tokens_first:
                return ops.rope(q, k, heads_first=unsqueeze_dim == 1, **how)
            k = None if k is None else k.transpose(1, 2)
            turned = ops.rope(q.transpose(1, 2), k, **how)
            return turned.transpose(1, 2) if k is None else tuple(x.transpose(1, 2) for x in turned)

        def of_two(q, k, cos, sin, unsqueeze_dim=1):
            rotated = rotate(q, k, cos, sin, unsqueeze_dim)
            return fallback(q, k, cos, sin, unsqueeze_dim) if rotated is None else rotated

        def of_one(x, cos, sin, unsqueeze_dim=1):
            rotated = rotate(x, None, cos, sin, unsqueeze_dim)
            return fallback(x, cos, sin, unsqueeze_dim) if rotated is None else rotated

        of_two.turn = turn
        return of_one if fallback.__code__.co_argcount == 4 else of_two

    return make


def _can_turn(cache, q):
    """Whether a cache rotates what it appends: an adze.Cache does, with queries in one launch."""
    can = getattr(cache, "can_turn", None)
    return can is not None and can(q)


def _attended(self, q, k, v, mask, cache, eager, tokens, residual=None, turn=None, **kwargs):
    """What the attentions of transformers do after the rotation; with a residual, their output is added to it. turn:
    the rotation, where it is left to the cache."""
    if turn is not None:
        q, k, v = cache.turn_and_update(q, k, v, self.layer_idx, **turn)
    elif cache is not None:
        k, v = cache.update(k, v, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
    dropout = self.attention_dropout if self.training else 0.0
    out, weights = attend(self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **kwargs)
    out = out.reshape(*tokens, -1).contiguous()
    return self.o_proj(out) if residual is None else linear_add(self.o_proj, out, residual), weights


def _with_projections(ctx, module, attend):
    """The forward of an attention that attend(self, projected, tokens, position_embeddings, mask, cache, **kwargs)
    does after the projections. With numerics="fast" queries, keys and values are one GEMM; of few rows they are
    gemm's, with the norm before, and so is the output's projection, with the residual."""
    project = fused_linears(ctx, module.q_proj, module.k_proj, module.v_proj)

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        tokens = hidden_states.shape[:-1]
        projected = project(hidden_states, self.q_proj, self.k_proj, self.v_proj)
        return attend(self, projected, tokens, position_embeddings, attention_mask, past_key_values, **kwargs)

    def products(self, x, child, norm, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        tokens, linears = x.shape[:-1], (self.q_proj, self.k_proj, self.v_proj)
        projected = normed_linears(x, child, norm, linears)
        if projected is None:
            projected = project(child(x), *linears)
        return attend(
            self, projected, tokens, position_embeddings, attention_mask, past_key_values, residual=x, **kwargs
        )

    forward.__defaults__ = ctx.original.__defaults__
    forward = mark_fused(forward, project)
    return forward if ctx.match else with_products(forward, products)


# Attentions that only project, rotate and attend, and the options of their attention windows.
_ONLY_ROTATE = {
    "llama:LlamaAttention.forward": lambda self: {},
    "mistral:MistralAttention.forward": lambda self: {"sliding_window": getattr(self.config, "sliding_window", None)},
    "qwen2:Qwen2Attention.forward": lambda self: {"sliding_window": self.sliding_window},
}


def _with_fused_qkv(module, ctx, rotate, windows):
    """The forward of such an attention, with queries, keys and values from one GEMM."""
    eager = ctx.original.__globals__["eager_attention_forward"]

    def attend(self, projected, tokens, position_embeddings, mask, cache, **kwargs):
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in projected)
        turn = rotate.turn(q, k, *position_embeddings) if _can_turn(cache, q) else None
        if turn is None:
            q, k = rotate(q, k, *position_embeddings)
        return _attended(self, q, k, v, mask, cache, eager, tokens, turn=turn, **windows(self), **kwargs)

    return _with_projections(ctx, module, attend)


def _rope(make):
    """Builds a clone of any forward whose globals have another apply_rotary_pos_emb."""

    def build(module, ctx):
        home = sys.modules[ctx.original.__globals__["__name__"]]
        apply = make(unwrapped(home.apply_rotary_pos_emb), ctx.match)
        windows = None if ctx.match else by_hash(_ONLY_ROTATE).get(fingerprint(ctx.original))
        if windows is not None:
            return _with_fused_qkv(module, ctx, apply, windows)
        return clone(ctx.original, shim(home, ctx.numerics, {"apply_rotary_pos_emb": apply}))

    return build


def _functions(apply, **called):
    """Of the sources of apply_rotary_pos_emb and of what it calls: their names."""
    called = {f"apply_rotary_pos_emb/{name}": hashes(names) for name, names in called.items()}
    return {**known(apply_rotary_pos_emb=apply), **called}


def _rope_rule(make, *functions, **called):
    return Rule("rope", "rope", _functions(*functions, **called), _rope(make))


def _qk_norm_rope(heads_first):
    """An attention that norms q and k per head, with heads first or not, and rotates them."""

    def build(module, ctx):
        q_facts, k_facts = ctx.facts(module.q_norm, "norm"), ctx.facts(module.k_norm, "norm")
        if isinstance(q_facts, str) or q_facts != k_facts:
            return f"q_norm: {q_facts}; k_norm: {k_facts}"
        if q_facts.op != "rms_norm" or q_facts.weight is not True or q_facts.dtype == "weight":
            return f"q_norm is a {q_facts.op} that does not fit"
        names = ctx.original.__globals__
        eager, rotate = names["eager_attention_forward"], unwrapped(names["apply_rotary_pos_emb"])
        norm, rounding = q_facts, q_facts.rounding | ROUND_STEPS  # with "fast" too: rounding costs no time here

        def attend(self, projected, tokens, position_embeddings, mask, cache, **kwargs):
            q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)
            cos, sin = position_embeddings
            q_norm, k_norm, turn = self.q_norm, self.k_norm, None
            if (
                plain(q_norm, norm.cls)
                and plain(k_norm, norm.cls)
                and cos.dtype == q.dtype
                and _rotatable(q, k, cos, sin, 2)
                and usable(q, q_norm.weight, k_norm.weight)
                and q_norm.weight.dtype == k_norm.weight.dtype
                and norm.eps_of(q_norm) == norm.eps_of(k_norm)
                and (norm.dtype == "x" or q_norm.weight.dtype == q.dtype)
            ):
                how = {
                    "q_weight": q_norm.weight, "k_weight": k_norm.weight, "cos": cos, "sin": sin,
                    "eps": norm.eps_of(q_norm), "weight_offset": norm.weight_offset, "rotary_dim": cos.shape[-1],
                    "rounding": rounding,
                }  # fmt: skip
                if _can_turn(cache, q):
                    turn = {"norm": True, **how}
                else:
                    q, k = ops.qk_norm_rope(q, k, **how)
                q, k = q.transpose(1, 2), k.transpose(1, 2)
            else:
                if heads_first:
                    q, k = q_norm(q.transpose(1, 2)), k_norm(k.transpose(1, 2))
                else:
                    q, k = q_norm(q).transpose(1, 2), k_norm(k).transpose(1, 2)
                q, k = rotate(q, k, cos, sin)
            window = self.sliding_window
            v = v.transpose(1, 2)
            options = {"turn": turn, "sliding_window": window, **kwargs}
            return _attended(self, q, k, v, mask, cache, eager, tokens, **options)

        return _with_projections(ctx, module, attend)

    return build


def _qk_norm_rope_rule(forward, heads_first):
    functions = _functions("llama:apply_rotary_pos_emb", rotate_half=_HALF)
    return Rule("qk_norm_rope", "fuse", {**known(forward=forward), **functions}, _qk_norm_rope(heads_first))


def _tables(columns, of_layer=False, cast=True):
    """The build of a rotary embedding, whose forward returns cos and sin of positions. columns: as rope_table has
    them. of_layer: each type of layers has its own frequencies. cast: the tables are cast to the dtype of x."""

    def build(module, ctx):
        original = ctx.original

        def tables(self, x, position_ids, prefix=""):
            """(cos, sin), or None where the model computes them."""
            if torch.compiler.is_compiling() or self.training or not usable(x) or x.requires_grad:
                return None
            freq, scale = getattr(self, f"{prefix}inv_freq"), getattr(self, f"{prefix}attention_scaling")
            if not all(type(given) is torch.Tensor and given.device == x.device for given in (freq, position_ids)):
                return None
            if freq.dim() != 1 or position_ids.dim() != 2 or position_ids.dtype not in _POSITIONS:
                return None
            if not isinstance(scale, (int, float)) or not scale:
                return None
            dtype = x.dtype if cast else None
            return ops.rope_table(position_ids[..., None], freq.float(), scale=scale, columns=columns, dtype=dtype)

        def forward(self, x, position_ids):
            found = tables(self, x, position_ids)
            return original(self, x, position_ids) if found is None else found

        def forward_of_layer(self, x, position_ids, layer_type):
            found = tables(self, x, position_ids, f"{layer_type}_")
            return original(self, x, position_ids, layer_type) if found is None else found

        return forward_of_layer if of_layer else forward

    return build


def _table_rule(names, columns, **options):
    """Not for numerics="match": sine and cosine are those of adze, whose floats are not torch's to the last bit."""
    sources = known(forward=" ".join(f"{name}RotaryEmbedding.forward" for name in names.split()))
    return Rule("rope_table", "rope", sources, _tables(columns, **options), numerics="fast")


_POSITIONS = (torch.int64, torch.int32, torch.float32)
_FIRST = _rotation(interleaved=True, columns="first")
_FIRST_IN_FLOAT = _rotation(interleaved=True, columns="first", steps=False)

ROPES = [
    _qk_norm_rope_rule("qwen3:Qwen3Attention.forward", heads_first=False),
    _qk_norm_rope_rule("gemma3:Gemma3Attention.forward", heads_first=True),
    _rope_rule(_rotation(), "llama:apply_rotary_pos_emb", rotate_half=_HALF),
    _rope_rule(
        _rotation(),
        "gpt_neox:apply_rotary_pos_emb phi3:apply_rotary_pos_emb nemotron:apply_rotary_pos_emb",
        rotate_half=_HALF,
    ),
    _rope_rule(_rotation(), "gemma3n:apply_rotary_pos_emb", rotate_half=_HALF),  # and Gemma 4: of one tensor
    _rope_rule(_rotation(casts=True), "olmo:apply_rotary_pos_emb", rotate_half=_HALF),
    _rope_rule(_rotation(steps=False), "modernbert:apply_rotary_pos_emb", rotate_half=_HALF),  # and ESM
    _rope_rule(_FIRST, "glm:apply_rotary_pos_emb helium:apply_rotary_pos_emb", rotate_half=_PAIRS),
    _rope_rule(_FIRST_IN_FLOAT, "ernie4_5:apply_rotary_pos_emb", rotate_half=_PAIRS),
    _rope_rule(_rotation(interleaved=True, steps=False), "cohere:apply_rotary_pos_emb", rotate_half=_PAIRS),
    _rope_rule(
        _rotation(columns="half"), "gpt_oss:apply_rotary_pos_emb", _apply_rotary_emb="gpt_oss:_apply_rotary_emb"
    ),
    _table_rule("llama:Llama qwen2:Qwen2", "halves"),
    _table_rule("olmo:Olmo", "halves", cast=False),
    _table_rule("gemma3:Gemma3", "halves", of_layer=True),
    _table_rule("olmo3:Olmo3", "halves", of_layer=True, cast=False),
    _table_rule("cohere:Cohere", "pairs"),
    _table_rule("gpt_oss:GptOss", "once"),
]
