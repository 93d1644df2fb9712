"""Rules for the blocks of transformers: a residual sum and the norm next to it are one launch."""

from torch.nn import functional as F

from ...operators.ops import ROUND_STEPS
from ..frame import rule
from ..norm_act import add_norm, norm_add, norm_of_sum
from ..products import few_rows, products_note, products_of


def _block(**norms):
    """Makes the build of a block from a function that makes its forward. norms: the attributes of the block's norms,
    by the names of that function's parameters."""

    def with_forward(make):
        def build(module, ctx):
            known = {name: ctx.facts(getattr(module, attribute), "norm") for name, attribute in norms.items()}
            unknown = [f"{norms[name]}: {norm}" for name, norm in known.items() if isinstance(norm, str)]
            return "; ".join(unknown) if unknown else make(ctx, **known)

        return build

    return with_forward


def _by_products(self, x):
    """The functions of the attention and the MLP that run products of few rows by gemm, or None."""
    attention, mlp = self.self_attn, self.mlp
    attend, feed = products_of(attention), products_of(mlp)
    if attend is None or feed is None or not few_rows(x, *_linears(self)):
        return None
    return attend, feed


def _linears(self):
    """Those of a Llama's block. Other attentions and MLPs in a block of the same source may lack some."""
    parts = (self.self_attn, "q_proj k_proj v_proj o_proj"), (self.mlp, "gate_proj up_proj down_proj")
    found = (getattr(part, name, None) for part, names in parts for name in names.split())
    return [linear for linear in found if linear is not None]


def _llama_layer(attention_dropout=None, mlp_dropout=None, mlp_returns_a_pair=False):
    """Attributes of dropouts, and whether the MLP returns a pair of its output and something else."""
    only_adds = not (attention_dropout or mlp_dropout or mlp_returns_a_pair)

    def build(module, ctx):
        after_attention = ctx.facts(module.post_attention_layernorm, "norm")
        if isinstance(after_attention, str):
            return f"post_attention_layernorm: {after_attention}"
        before = ctx.facts(module.input_layernorm, "norm")
        products = only_adds and not ctx.match and not isinstance(before, str)

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
            passed = dict(
                attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values,
                use_cache=use_cache, position_embeddings=position_embeddings, **kwargs,
            )  # fmt: skip
            both = _by_products(self, hidden_states) if products else None
            if both is not None:
                attend, feed = both
                total, _ = attend(self.self_attn, hidden_states, self.input_layernorm, before, **passed)
                return feed(self.mlp, total, self.post_attention_layernorm, after_attention)
            attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **passed)
            if attention_dropout:
                attended = getattr(self, attention_dropout)(attended)
            normed, total = add_norm(self.post_attention_layernorm, after_attention, attended, hidden_states)
            out = self.mlp(normed)
            if mlp_returns_a_pair:
                out, _ = out
            if mlp_dropout:
                out = getattr(self, mlp_dropout)(out)
            return total + out

        if products and len(linears := _linears(module)) == 7:
            forward.adze_note = products_note(*linears)
        return forward

    return build


@_block(after_attention="post_attention_layernorm")
def _mixtral_layer(ctx, after_attention):
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
        normed, total = add_norm(self.post_attention_layernorm, after_attention, attended, hidden_states)
        return total + self.mlp(normed)

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
    original = ctx.original

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
        if self.use_parallel_residual:
            return original(
                self,
                hidden_states,
                attention_mask,
                position_ids,
                use_cache,
                layer_past,
                position_embeddings,
                **kwargs,
            )
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


_PARALLEL = "attention and MLP run in parallel: no sum feeds a norm of this block"


def _gpt_neox_layer(module, ctx):
    return _PARALLEL if module.use_parallel_residual else _gpt_neox_sequential(module, ctx)


def _is_parallel(config):
    return config.parallel_attn or config.new_decoder_architecture


@_block(before_mlp="post_attention_layernorm")
def _falcon_sequential(ctx, before_mlp):
    original = ctx.original

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
        if _is_parallel(self.config):
            return original(
                self, hidden_states, alibi, attention_mask, position_ids, layer_past, use_cache, output_attentions,
                position_embeddings, **kwargs,
            )  # fmt: skip
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
    return _PARALLEL if _is_parallel(module.config) else _falcon_sequential(module, ctx)


@_block(before_mlp="layer_norm2")
def _clip_layer(ctx, before_mlp):
    def forward(self, hidden_states, attention_mask, **kwargs):
        attended, _ = self.self_attn(
            hidden_states=self.layer_norm1(hidden_states), attention_mask=attention_mask, **kwargs
        )
        normed, total = add_norm(self.layer_norm2, before_mlp, attended, hidden_states)
        return total + self.mlp(normed)

    return forward


@_block(before_mlp="norm2")
def _vision_block(ctx, before_mlp):
    def forward(self, hidden_states, cu_seqlens, position_embeddings=None, **kwargs):
        attended = self.attn(
            self.norm1(hidden_states), cu_seqlens=cu_seqlens, position_embeddings=position_embeddings, **kwargs
        )
        normed, total = add_norm(self.norm2, before_mlp, attended, hidden_states)
        return total + self.mlp(normed)

    return forward


@_block(before_mlp="layernorm_after")
def _vit_layer(ctx, before_mlp):
    def forward(self, hidden_states, attention_mask=None, **kwargs):
        attended, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
        normed, total = add_norm(self.layernorm_after, before_mlp, self.dropout(attended), hidden_states)
        return self.dropout(self.mlp(normed)) + total

    return forward


@_block(norm="LayerNorm")
def _bert_output(ctx, norm):
    def forward(self, hidden_states, input_tensor):
        return norm_of_sum(self.LayerNorm, norm, self.dropout(self.dense(hidden_states)), input_tensor)

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
    rule("add + norm", "fuse", _llama_layer(), forward="llama:LlamaDecoderLayer.forward"),
    rule(
        "add + norm",
        "fuse",
        _llama_layer("resid_attn_dropout", "resid_mlp_dropout"),
        forward="phi3:Phi3DecoderLayer.forward",
    ),
    rule("add + norm", "fuse", _llama_layer(mlp_returns_a_pair=True), forward="gpt_oss:GptOssDecoderLayer.forward"),
    rule("add + norm", "fuse", _mixtral_layer, forward="mixtral:MixtralDecoderLayer.forward"),
    rule("add + norm", "fuse", _gpt2_block, forward="gpt2:GPT2Block.forward"),
    rule("add + norm", "fuse", _gpt_neox_layer, forward="gpt_neox:GPTNeoXLayer.forward"),
    rule(
        "add + norm",
        "fuse",
        _falcon_layer,
        forward="falcon:FalconDecoderLayer.forward",
        dropout_add="falcon:dropout_add",
    ),
    rule(
        "add + norm",
        "fuse",
        lambda module, ctx: _PARALLEL,
        forward="phi:PhiDecoderLayer.forward cohere:CohereDecoderLayer.forward",
    ),
    rule("add + norm", "fuse", _clip_layer, forward="clip:CLIPEncoderLayer.forward"),
    rule("add + norm", "fuse", _vision_block, forward="qwen2_vl:Qwen2VLVisionBlock.forward"),
    rule("add + norm", "fuse", _vit_layer, forward="vit:ViTLayer.forward"),
    rule("add + norm", "fuse", _bert_output, forward="bert:BertOutput.forward"),
    rule("norm + add", "fuse", _gemma2_layer, forward="gemma2:Gemma2DecoderLayer.forward"),
    rule("norm + add", "fuse", _olmo2_layer, forward="olmo2:Olmo2DecoderLayer.forward"),
]
