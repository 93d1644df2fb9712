"""Blocks of diffusers' transformers and UNets: residual, gate, norm and modulation in one launch.

Children are called as the blocks call them. Only plain norms are computed here, with what is fused with them."""

import torch
from torch import nn

from ...operators import ops
from ..concat_activation import concat_activation
from ..frame import plain, usable
from ..fused_linear import adjacent, linear_of_concat
from ..norm_act import linear_gelu
from ..torch import grouped
from .norms import added, dense, gate_usable, gated, modulated


def _norms(module, ctx, *names):
    """The Norms of these children, the rounding of their steps, and whether numerics is "fast"; or a str: why not."""
    norms = [ctx.facts(getattr(module, name), "norm") for name in names]
    reasons = [f"{name}: {norm}" for name, norm in zip(names, norms, strict=True) if isinstance(norm, str)]
    return "; ".join(reasons) if reasons else (*norms, ctx.rounding(ops.ROUND_STEPS), not ctx.match)


def ltx(module, ctx):
    """LTXVideoTransformerBlock. Its modulations are rows of a table and of temb, added as they are used."""
    made = _norms(module, ctx, "norm1", "norm2")
    if isinstance(made, str):
        return made
    norm1, norm2, steps, fast = made

    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        temb,
        image_rotary_emb=None,
        encoder_attention_mask=None,
    ):
        table = self.scale_shift_table.to(temb.device).unbind(0)
        rows = temb.unflatten(-1, (len(table), -1))
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = rows.unbind(2)
        x = modulated(self.norm1, norm1, steps, hidden_states, scale, shift, table[1], table[0])
        x = self.attn1(hidden_states=x, encoder_hidden_states=None, image_rotary_emb=image_rotary_emb)
        hidden_states = gated(fast, hidden_states, x, gate, table[2], alone=True)
        x = self.attn2(
            hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            image_rotary_emb=None,
            attention_mask=encoder_attention_mask,
        )
        x, hidden_states = added(
            self.norm2, norm2, steps, x, hidden_states, None, mlp_scale, mlp_shift, table[4], table[3]
        )
        return gated(fast, hidden_states, self.ff(x), mlp_gate, table[5], alone=True)

    return forward


def _finite(x):
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def _mlp(ff, child, norm, steps, fast, x, residual, gate, shift, scale, mlp_gate):
    """The part of a block after the attention, whose output is x, for one stream of tokens."""
    x, residual = added(child, norm, steps, x, residual, gate[:, None], scale[:, None], shift[:, None])
    return gated(fast, residual, ff(x), mlp_gate[:, None])


def flux(module, ctx):
    """FluxTransformerBlock."""
    made = _norms(module, ctx, "norm2", "norm2_context")
    if isinstance(made, str):
        return made
    norm, text_norm, steps, fast = made

    def forward(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, joint_attention_kwargs=None):
        image, text = hidden_states, encoder_hidden_states
        x, *rows = self.norm1(image, emb=temb)
        y, *text_rows = self.norm1_context(text, emb=temb)
        x, y, *more = self.attn(
            hidden_states=x,
            encoder_hidden_states=y,
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        image = _mlp(self.ff, self.norm2, norm, steps, fast, x, image, *rows)
        for adapted in more:
            image = image + adapted
        text = _mlp(self.ff_context, self.norm2_context, text_norm, steps, fast, y, text, *text_rows)
        return _finite(text), image

    return forward


def _side_by_side(act_module, act, first, x):
    """torch.cat([first, act_module(x)], dim=2), where a plain activation writes its part itself."""
    if act.plain(act_module) and usable(x) and x.dtype == first.dtype and x.shape[:-1] == first.shape[:-1]:
        return concat_activation(first, x, act.name)
    return torch.cat([first, act_module(x)], dim=2)


def _cat_tokens(first, rest):
    """torch.cat([first, rest], dim=1), without a copy where both are adjacent views that the block before has
    made."""
    if (
        not torch.compiler.is_compiling()
        and type(first) is type(rest) is torch.Tensor
        and not (first.requires_grad or rest.requires_grad)
    ):
        joined = adjacent((first, rest), 1)
        if joined is not None:
            return joined
    return torch.cat([first, rest], dim=1)


def _with_mlp(module, ctx):
    """A function (module, x, attend) that gives proj_out of attend() and the MLP of x side by side, or a str: why
    there is none. When fast, they are not concatenated: each has its own GEMM."""
    act = ctx.facts(module.act_mlp, "act")
    if isinstance(act, str):
        return act
    if ctx.match and not act.once:
        return f"{act.name} rounds more than once"
    at_once = not ctx.match and act.name == "gelu_pytorch_tanh"

    def project(self, x, attend):
        mlp = linear_gelu(self.proj_mlp, x) if at_once and act.plain(self.act_mlp) else None
        if mlp is not None:
            return linear_of_concat(self.proj_out, attend(), mlp)
        mlp = self.proj_mlp(x)
        return self.proj_out(_side_by_side(self.act_mlp, act, attend(), mlp))

    return project


def flux_single(module, ctx):
    """FluxSingleTransformerBlock: attention and MLP side by side."""
    project, fast = _with_mlp(module, ctx), not ctx.match
    if isinstance(project, str):
        return project

    def forward(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, joint_attention_kwargs=None):
        n = encoder_hidden_states.shape[1]
        tokens = _cat_tokens(encoder_hidden_states, hidden_states)
        x, gate = self.norm(tokens, emb=temb)
        kwargs = {"image_rotary_emb": image_rotary_emb, **(joint_attention_kwargs or {})}
        made = project(self, x, lambda: self.attn(hidden_states=x, **kwargs))
        tokens = _finite(gated(fast, tokens, made, gate[:, None]))
        return tokens[:, :n], tokens[:, n:]

    return forward


def joint(module, ctx):
    """JointTransformerBlock (SD3, SD3.5)."""
    names = ["norm2"] if module.context_pre_only else ["norm2", "norm2_context"]
    made = _norms(module, ctx, *names)
    if isinstance(made, str):
        return made
    (norm, *others), steps, fast = made[:-2], *made[-2:]
    text_norm = others[0] if others else None
    original, dual, last = ctx.original, module.use_dual_attention, module.context_pre_only

    def forward(self, hidden_states, encoder_hidden_states, temb, joint_attention_kwargs=None):
        if self._chunk_size is not None or self.use_dual_attention != dual or self.context_pre_only != last:
            return original(self, hidden_states, encoder_hidden_states, temb, joint_attention_kwargs)
        more = joint_attention_kwargs or {}
        image, text, second, text_rows = hidden_states, encoder_hidden_states, None, None
        if dual:
            x, gate, shift, scale, mlp_gate, second, second_gate = self.norm1(image, emb=temb)
        else:
            x, gate, shift, scale, mlp_gate = self.norm1(image, emb=temb)
        if text_norm is None:
            y = self.norm1_context(text, temb)
        else:
            y, *text_rows = self.norm1_context(text, emb=temb)
        x, y = self.attn(hidden_states=x, encoder_hidden_states=y, **more)
        if dual:
            image = gated(fast, image, x, gate[:, None])
            x, gate = self.attn2(hidden_states=second, **more), second_gate
        image = _mlp(self.ff, self.norm2, norm, steps, fast, x, image, gate, shift, scale, mlp_gate)
        if text_norm is None:
            return None, image
        text = _mlp(self.ff_context, self.norm2_context, text_norm, steps, fast, y, text, *text_rows)
        return text, image

    return forward


def basic(module, ctx):
    """BasicTransformerBlock with layer_norm (SD 1.5, SDXL) or ada_norm_zero (DiT)."""
    kind = module.norm_type
    if kind not in ("layer_norm", "ada_norm_zero"):
        return f"norm_type is {kind}"
    if module.pos_embed is not None:
        return "it adds positions after its norms"
    crossed, zero = module.attn2 is not None, kind == "ada_norm_zero"
    made = _norms(module, ctx, *(["norm2", "norm3"] if crossed else ["norm3"]))
    if isinstance(made, str):
        return made
    norm2, norm3, steps, fast = made[0], made[-3], *made[-2:]
    original = ctx.original

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        timestep=None,
        cross_attention_kwargs=None,
        class_labels=None,
        added_cond_kwargs=None,
    ):
        changed = self.norm_type != kind or self.pos_embed is not None or (self.attn2 is not None) != crossed
        if changed or self._chunk_size is not None or cross_attention_kwargs or hidden_states.dim() != 3:
            return original(
                self,
                hidden_states,
                attention_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                timestep,
                cross_attention_kwargs,
                class_labels,
                added_cond_kwargs,
            )
        hidden_states = dense(hidden_states)
        gate = scale = shift = mlp_gate = None
        if zero:
            x, gate, shift, scale, mlp_gate = self.norm1(
                hidden_states, timestep, class_labels, hidden_dtype=hidden_states.dtype
            )
            gate, shift, scale, mlp_gate = gate[:, None], shift[:, None], scale[:, None], mlp_gate[:, None]
        else:
            x = self.norm1(hidden_states)
        only = encoder_hidden_states if self.only_cross_attention else None
        x = self.attn1(x, encoder_hidden_states=only, attention_mask=attention_mask)
        if crossed:
            x, hidden_states = added(self.norm2, norm2, steps, x, hidden_states, gate)
            x = self.attn2(x, encoder_hidden_states=encoder_hidden_states, attention_mask=encoder_attention_mask)
            gate = None
        x, hidden_states = added(self.norm3, norm3, steps, x, hidden_states, gate, scale, shift)
        x = self.ff(x)
        return gated(fast, hidden_states, x, mlp_gate) if zero else x + hidden_states

    return forward


# ---- Wan: float from the norm to the last rounding ----


def _float_norm(child, norm, x, residual=None, gate=None, scale=None, shift=None, tables=(None, None, None)):
    """The norm of residual + gate * x, modulated, in float with one rounding; with a residual, and the rounded sum.
    gate, scale and shift may have a row of a table each, to be added."""
    gate_table, scale_table, shift_table = tables
    if plain(child, norm.cls) and (residual is None or (x.shape == residual.shape and x.dtype == residual.dtype)):
        x, residual = dense(x), residual if residual is None else dense(residual)
        parts = norm.taken(child, x, residual, gate, gate_table, scale, scale_table, shift, shift_table)
        if parts is not None:
            weight, bias = parts
            options = {"gate": gate, "gate_table": gate_table, "scale": scale, "scale_table": scale_table}
            options |= {"shift": shift, "shift_table": shift_table, "residual": residual}
            return ops.layer_norm(x, weight, bias, eps=child.eps, **options)
    total = x
    if residual is not None:
        total = residual + x if gate is None else _float_gated(residual, x, gate, gate_table)
    out = child(total.float())
    if scale is not None:
        out = out * (1 + _float_row(scale, scale_table)) + _float_row(shift, shift_table)
    out = out.type_as(total)
    return out if residual is None else (out, total)


def _float_row(row, table):
    return row.float() if table is None else table + row.float()


def _float_gated(residual, x, gate, table):
    if gate_usable(residual, x, gate, table):
        return ops.gated_add(x, residual, gate, gate_table=table)
    return (residual.float() + x.float() * _float_row(gate, table)).type_as(residual)


def wan(module, ctx):
    """WanTransformerBlock."""
    second = not isinstance(module.norm2, nn.Identity)
    made = _norms(module, ctx, *(["norm1", "norm2", "norm3"] if second else ["norm1", "norm3"]))
    if isinstance(made, str):
        return made
    norm1, norm2, norm3 = made[0], made[1], made[-3]
    if any(norm.op != "layer_norm" for norm in (norm1, norm2, norm3)):
        return "its norms are not layer norms"
    original = ctx.original

    def forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb):
        if isinstance(self.norm2, nn.Identity) == second:
            return original(self, hidden_states, encoder_hidden_states, temb, rotary_emb)
        if temb.dim() == 4:  # modulations of every token: the sums would be larger than what they modulate
            table, rows = self.scale_shift_table[0], temb
        else:
            table, rows = [None] * 6, (self.scale_shift_table + temb.float()).unsqueeze(1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = rows.unbind(2)
        x = _float_norm(self.norm1, norm1, hidden_states, scale=scale, shift=shift, tables=(None, table[1], table[0]))
        x = self.attn1(x, None, None, rotary_emb)
        if second:
            tables = (table[2], None, None)
            x, hidden_states = _float_norm(self.norm2, norm2, x, hidden_states, gate, tables=tables)
        else:
            x = hidden_states = _float_gated(hidden_states, x, gate, table[2])
        x = self.attn2(x, encoder_hidden_states, None, None)
        x, hidden_states = _float_norm(
            self.norm3, norm3, x, hidden_states, None, mlp_scale, mlp_shift, (None, table[4], table[3])
        )
        return _float_gated(hidden_states, self.ffn(x), mlp_gate, table[5])

    return forward


# ---- HunyuanVideo ----


def hunyuan_video(module, ctx):
    """HunyuanVideoTransformerBlock."""
    made = _norms(module, ctx, "norm2", "norm2_context")
    if isinstance(made, str):
        return made
    norm, text_norm, steps, fast = made

    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        temb,
        attention_mask=None,
        freqs_cis=None,
        *args,
        **kwargs,
    ):
        x, *rows = self.norm1(hidden_states, emb=temb)
        y, *text_rows = self.norm1_context(encoder_hidden_states, emb=temb)
        x, y = self.attn(
            hidden_states=x, encoder_hidden_states=y, attention_mask=attention_mask, image_rotary_emb=freqs_cis
        )
        image = _mlp(self.ff, self.norm2, norm, steps, fast, x, hidden_states, *rows)
        text = _mlp(self.ff_context, self.norm2_context, text_norm, steps, fast, y, encoder_hidden_states, *text_rows)
        return image, text

    return forward


def hunyuan_video_token_replace(module, ctx):
    """HunyuanVideoTokenReplaceTransformerBlock: tokens of the first frame have gates and modulations of their own."""
    made = _norms(module, ctx, "norm2", "norm2_context")
    if isinstance(made, str):
        return made
    norm, text_norm, steps, fast = made

    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        temb,
        attention_mask=None,
        freqs_cis=None,
        token_replace_emb=None,
        num_tokens=None,
    ):
        x, *rows = self.norm1(hidden_states, temb, token_replace_emb, num_tokens)
        y, *text_rows = self.norm1_context(encoder_hidden_states, emb=temb)
        x, y = self.attn(
            hidden_states=x, encoder_hidden_states=y, attention_mask=attention_mask, image_rotary_emb=freqs_cis
        )
        parts = [
            (x[:, :num_tokens], hidden_states[:, :num_tokens], *rows[4:]),
            (x[:, num_tokens:], hidden_states[:, num_tokens:], *rows[:4]),
        ]
        sums = []
        for i, (part, residual, gate, shift, scale, mlp_gate) in enumerate(parts):
            parts[i], total = added(
                self.norm2, norm, steps, part, residual, gate[:, None], scale[:, None], shift[:, None]
            )
            sums.append((total, mlp_gate[:, None]))
        x = self.ff(torch.cat(parts, dim=1))
        (first, first_gate), (rest, rest_gate) = sums
        first = gated(fast, first, x[:, :num_tokens], first_gate)
        rest = gated(fast, rest, x[:, num_tokens:], rest_gate)
        text = _mlp(self.ff_context, self.norm2_context, text_norm, steps, fast, y, encoder_hidden_states, *text_rows)
        return torch.cat([first, rest], dim=1), text

    return forward


def _hunyuan_video_single(module, ctx, replaces):
    project, fast = _with_mlp(module, ctx), not ctx.match
    if isinstance(project, str):
        return project

    def attended(self, x, n, attention_mask, image_rotary_emb):
        def attend():
            parts = self.attn(
                hidden_states=x[:, :-n, :],
                encoder_hidden_states=x[:, -n:, :],
                attention_mask=attention_mask,
                image_rotary_emb=image_rotary_emb,
            )
            return torch.cat(parts, dim=1)

        return project(self, x, attend)

    def one_gate(
        self,
        hidden_states,
        encoder_hidden_states,
        temb,
        attention_mask=None,
        image_rotary_emb=None,
        *args,
        **kwargs,
    ):
        n = encoder_hidden_states.shape[1]
        tokens = _cat_tokens(hidden_states, encoder_hidden_states)
        x, gate = self.norm(tokens, emb=temb)
        x = attended(self, x, n, attention_mask, image_rotary_emb)
        tokens = gated(fast, tokens, x, gate[:, None])
        return tokens[:, :-n, :], tokens[:, -n:, :]

    def two_gates(
        self,
        hidden_states,
        encoder_hidden_states,
        temb,
        attention_mask=None,
        image_rotary_emb=None,
        token_replace_emb=None,
        num_tokens=None,
    ):
        n = encoder_hidden_states.shape[1]
        tokens = _cat_tokens(hidden_states, encoder_hidden_states)
        x, gate, first_gate = self.norm(tokens, temb, token_replace_emb, num_tokens)
        x = attended(self, x, n, attention_mask, image_rotary_emb)
        first = gated(fast, tokens[:, :num_tokens], x[:, :num_tokens], first_gate[:, None])
        rest = gated(fast, tokens[:, num_tokens:], x[:, num_tokens:], gate[:, None])
        tokens = torch.cat([first, rest], dim=1)
        return tokens[:, :-n, :], tokens[:, -n:, :]

    return two_gates if replaces else one_gate


def hunyuan_video_single(module, ctx):
    """HunyuanVideoSingleTransformerBlock."""
    return _hunyuan_video_single(module, ctx, False)


def hunyuan_video_single_token_replace(module, ctx):
    """HunyuanVideoTokenReplaceSingleTransformerBlock."""
    return _hunyuan_video_single(module, ctx, True)


def hunyuan_video_refiner(module, ctx):
    """HunyuanVideoIndividualTokenRefinerBlock."""
    made = _norms(module, ctx, "norm2")
    if isinstance(made, str):
        return made
    norm, steps, fast = made

    def forward(self, hidden_states, temb, attention_mask=None):
        hidden_states = dense(hidden_states)
        x = self.norm1(hidden_states)
        x = self.attn(hidden_states=x, encoder_hidden_states=None, attention_mask=attention_mask)
        gate, mlp_gate = self.norm_out(temb)
        x, hidden_states = added(self.norm2, norm, steps, x, hidden_states, gate)
        return gated(fast, hidden_states, self.ff(x), mlp_gate)

    return forward


# ---- Qwen-Image ----


def qwen_image(module, ctx):
    """QwenImageTransformerBlock. With modulations per token its original forward runs."""
    made = _norms(module, ctx, "img_norm1", "txt_norm1", "img_norm2", "txt_norm2")
    if isinstance(made, str):
        return made
    norm1, text_norm1, norm2, text_norm2, steps, fast = made
    original = ctx.original

    def run(self, image, text, text_mask, temb, tables, more):
        shift, scale, *rows = self.img_mod(temb).chunk(6, dim=-1)
        text_shift, text_scale, *text_rows = self.txt_mod(temb).chunk(6, dim=-1)
        x = modulated(self.img_norm1, norm1, steps, image, scale[:, None], shift[:, None])
        y = modulated(self.txt_norm1, text_norm1, steps, text, text_scale[:, None], text_shift[:, None])
        x, y = self.attn(
            hidden_states=x,
            encoder_hidden_states=y,
            encoder_hidden_states_mask=text_mask,
            image_rotary_emb=tables,
            **(more or {}),
        )
        image = _mlp(self.img_mlp, self.img_norm2, norm2, steps, fast, x, image, *rows)
        text = _mlp(self.txt_mlp, self.txt_norm2, text_norm2, steps, fast, y, text, *text_rows)
        return _finite(text), _finite(image)

    def without_index(
        self,
        hidden_states,
        encoder_hidden_states,
        encoder_hidden_states_mask,
        temb,
        image_rotary_emb=None,
        joint_attention_kwargs=None,
    ):
        return run(
            self,
            hidden_states,
            encoder_hidden_states,
            encoder_hidden_states_mask,
            temb,
            image_rotary_emb,
            joint_attention_kwargs,
        )

    def with_index(
        self,
        hidden_states,
        encoder_hidden_states,
        encoder_hidden_states_mask,
        temb,
        image_rotary_emb=None,
        joint_attention_kwargs=None,
        modulate_index=None,
    ):
        inputs = (hidden_states, encoder_hidden_states, encoder_hidden_states_mask, temb, image_rotary_emb)
        if modulate_index is not None or self.zero_cond_t:
            return original(self, *inputs, joint_attention_kwargs, modulate_index)
        return run(self, *inputs, joint_attention_kwargs)

    return with_index if "modulate_index" in original.__code__.co_varnames else without_index


# ---- UNets ----


def _group_norm_act(child, act_module, x, rounding):
    """act_module(child(x)) of a GroupNorm and a SiLU; in one launch where both are plain."""
    if plain(child, nn.GroupNorm) and plain(act_module, nn.SiLU) and not act_module.inplace:
        out = grouped(child, x, "silu", rounding)
        if out is not None:
            return out
    return act_module(child(x))


def resnet(module, ctx):
    """ResnetBlock2D: its group norms with the SiLU after them."""
    if type(module.nonlinearity) is not nn.SiLU or type(module.norm1) is not nn.GroupNorm:
        return "not a group norm and a SiLU"

    def other(self):
        if self.time_embedding_norm != "default":
            return f"time_embedding_norm is {self.time_embedding_norm}"
        return None if self.upsample is self.downsample is None else "it changes the resolution"

    if other(module):
        return other(module)
    original, steps = ctx.original, ctx.rounding(ops.ROUND_STEPS)

    def forward(self, input_tensor, temb, *args, **kwargs):
        if args or kwargs or self.training or other(self):
            return original(self, input_tensor, temb, *args, **kwargs)
        x = self.conv1(_group_norm_act(self.norm1, self.nonlinearity, input_tensor, steps))
        if self.time_emb_proj is not None:
            if not self.skip_time_act:
                temb = self.nonlinearity(temb)
            temb = self.time_emb_proj(temb)[:, :, None, None]
        if temb is not None:
            x = x + temb
        x = _group_norm_act(self.norm2, self.nonlinearity, x, steps)
        x = self.conv2(self.dropout(x))
        if self.conv_shortcut is not None:
            input_tensor = self.conv_shortcut(input_tensor)
        return (input_tensor + x) / self.output_scale_factor

    return forward
