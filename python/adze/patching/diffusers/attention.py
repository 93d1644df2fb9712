"""Attention of diffusers' transformers with the norms and the rotation of queries and keys in one launch.

The forward of an attention module hands everything to its processor. The forwards here do the work of the processor
that the module had when it was patched. If it has another one now, they call the original forward. Rotations round as
the models do, with numerics="fast" too: rounding costs no time there."""

import sys

import torch

from ...graphs import cuda_graph
from ...operators import ops
from ..fingerprint import described, fingerprint
from ..frame import parameter, plain, usable
from ..fused_linear import fused_linears
from ..known_sources import by_hash, hashes


def _processor(module, known, **calls):
    """The class of the module's processor and the entry of `known` for its source, or a str: why not. calls:
    functions that the processor calls, as {name in the processor: names of sources in fingerprints.json}."""
    cls = type(module.processor)
    if isinstance(module.processor, torch.nn.Module):
        return f"{cls.__name__} has weights of its own"
    found, known = fingerprint(cls.__call__), by_hash(known)
    if found not in known:
        return f"{cls.__name__} is {described(cls.__call__)}, which no rule knows"
    for name, names in calls.items():
        part = cls.__call__.__globals__.get(name)
        if fingerprint(part) not in hashes(names):
            return f"{name} of {cls.__name__} is {described(part)}, which no rule knows"
    return cls, known[found]


def _same_norms(ctx, *children):
    """The one Norm of several modules, or a str: why there is none."""
    norm, *others = [ctx.facts(child, "norm") for child in children]
    if isinstance(norm, str):
        return norm
    if any(other != norm for other in others):
        return "queries and keys have different norms"
    if norm.op != "rms_norm" or any(
        child.weight is None or parameter(child, "bias") is not None for child in children
    ):
        return "queries and keys have a norm that is not an RMS norm with a weight"
    return norm


OWN, ADDED = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")


def _projections(ctx, module, names=OWN):
    """A function (module, x) that gives the query, key and value of x."""
    project, (q, k, v) = fused_linears(ctx, *(getattr(module, name) for name in names)), names
    return lambda self, x: project(x, getattr(self, q), getattr(self, k), getattr(self, v))


def _two_streams(ctx, module):
    """The same for image and text, with one GEMM for the text only. The image has many tokens, so that one GEMM is
    not faster than three, and torch.cat is slower for values that are a view of a larger tensor."""
    text = _projections(ctx, module, ADDED)

    def project(self, x, words):
        q, k, v = text(self, words)
        return self.to_q(x), self.to_k(x), self.to_v(x), q, k, v.contiguous()

    return project


def _takes(norm, x, q_norm, k_norm, *tables):
    """Whether adze's ops can replace these norms for queries and keys of x, and rotate by the tables. This is checked
    before the projections run: falling back after them would run their hooks twice."""
    if not (plain(q_norm, norm.cls) and plain(k_norm, norm.cls)):
        return False
    weight, other = parameter(q_norm, "weight"), parameter(k_norm, "weight")
    if weight is None or other is None or not usable(x, weight, other, *tables):
        return False
    if weight.dim() != 1 or other.dim() != 1 or norm.eps_of(q_norm) != norm.eps_of(k_norm):
        return False
    if norm.bias is not False and not (parameter(q_norm, "bias") is parameter(k_norm, "bias") is None):
        return False
    return norm.dtype == "x" or weight.dtype == other.dtype == x.dtype


def _expected(x, *projected):
    """Whether projections of x have the dtype and device that _takes has assumed. An adapter or a hook may change
    them. Then the norms and the rotation are called as the model calls them."""
    return all(usable(t) and t.dtype == x.dtype and t.device == x.device for t in projected)


def _norm_rope(norm, rounding, q, k, q_norm, k_norm, cos, sin, q_out=None, k_out=None, across_heads=False):
    weights, rounding = (q_norm.weight, k_norm.weight), norm.rounding | rounding
    options = {"eps": norm.eps_of(q_norm), "across_heads": across_heads, "interleaved": True, "rounding": rounding}
    return ops.qk_norm_rope(q, k, *weights, cos, sin, **options, q_out=q_out, k_out=k_out)


def _norm_only(norm, q, k, q_norm, k_norm, q_out=None, k_out=None):
    options = {"eps": norm.eps_of(q_norm), "rounding": norm.rounding}
    q = ops.rms_norm(q, q_norm.weight, **options, out=q_out)
    return q, ops.rms_norm(k, k_norm.weight, **options, out=k_out)


def _one_by_one(rotate, q, k, q_norm, k_norm, cos, sin):
    """The same with the model's own norms and rotation."""
    q, k = q_norm(q), k_norm(k)
    return (q, k) if cos is None else (rotate(q, cos, sin), rotate(k, cos, sin))


def _joined(fused, rotate, norm, rounding, *streams):
    """Queries and keys of two streams of tokens (q, k, their norms, cos, sin), normed and, with a table, rotated. The
    ops write into the concatenation that the attention reads. Under Dynamo a norm cannot: it accepts no view as
    out=."""
    outs = [(None, None)] * 2
    rooms = fused and (not torch.compiler.is_compiling() or all(cos is not None for *_, cos, _ in streams))
    if rooms:
        q, first, second = streams[0][0], streams[0][0].shape[1], streams[1][0].shape[1]
        q_room, k_room = (q.new_empty(q.shape[0], first + second, *q.shape[2:]) for _ in range(2))
        outs = [(q_room[:, :first], k_room[:, :first]), (q_room[:, first:], k_room[:, first:])]
    done = []
    for (*stream, cos, sin), (q_out, k_out) in zip(streams, outs, strict=True):
        if not fused:
            done.append(_one_by_one(rotate, *stream, cos, sin))
        elif cos is None:
            done.append(_norm_only(norm, *stream, q_out, k_out))
        else:
            done.append(_norm_rope(norm, rounding, *stream, cos, sin, q_out, k_out))
    if rooms:
        return q_room, k_room
    return torch.cat([done[0][0], done[1][0]], dim=1), torch.cat([done[0][1], done[1][1]], dim=1)


def _by_tables(apply):
    """diffusers' apply_rotary_emb, for [batch, tokens, heads, dim]."""
    return lambda x, cos, sin: apply(x, (cos, sin), sequence_dim=1)


def _attend(dispatch, processor, q, k, v, mask):
    out = dispatch(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=0.0,
        is_causal=False,
        backend=processor._attention_backend,
        parallel_config=processor._parallel_config,
    )
    return out.flatten(2, 3).to(q.dtype)


def _made_once(name, make, of, *key, layer=None):
    """make(), cached on the first of the tensors `of`, which a model passes to each of its layers. A captured graph
    makes its own: a result from before the capture would not follow the graph's inputs. A tensor of inference mode
    does not say whether it has changed: where the layer that has made the result asks again, it makes another."""
    if torch.compiler.is_compiling() or any(t.requires_grad for t in of):
        return make()
    capture = cuda_graph.capture() if of[0].is_cuda else None
    if capture is False:
        return make()
    key = (*key, *((t.data_ptr(), None if t.is_inference() else t._version) for t in of))
    kept_in, kept_key, maker, kept = getattr(of[0], name, (None, None, None, None))
    again = of[0].is_inference() and layer is not None and maker == id(layer)
    if kept_key != key or kept_in is not capture or again:
        kept = make()
        setattr(of[0], name, (capture, key, id(layer), kept))
    return kept


def _mask_of_heads(module, mask, length, batch):
    """The mask as an attention takes it."""

    def make():
        made = module.prepare_attention_mask(mask, length, batch)
        return made.view(batch, module.heads, -1, made.shape[-1])

    return _made_once("adze_of_heads", make, [mask], module.heads, length, batch, layer=module)


def _pairs(tables):
    """One column per pair, of tables that hold each angle twice: half as many bytes to read."""
    return tuple(table[..., ::2].contiguous() for table in tables)


def _pairs_once(*tables):
    return _made_once("adze_pairs", lambda: _pairs(tables), tables)


def ltx_tables(module, ctx):
    """LTXVideoRotaryPosEmbed: every step of a video has the same tables, so those of the last step are cached,
    together with the tables of one column per pair."""
    original, kept = ctx.original, {}

    def with_pairs(tables):
        tables[0].adze_once = _pairs(tables)
        return tables

    def forward(
        self,
        hidden_states,
        num_frames=None,
        height=None,
        width=None,
        rope_interpolation_scale=None,
        video_coords=None,
    ):
        args = (hidden_states, num_frames, height, width, rope_interpolation_scale, video_coords)
        if torch.is_grad_enabled():
            return original(self, *args)
        if torch.compiler.is_compiling():
            return with_pairs(original(self, *args))
        scale = None if rope_interpolation_scale is None else tuple(rope_interpolation_scale)
        if video_coords is not None or not all(isinstance(number, (int, float)) for number in scale or ()):
            return original(self, *args)
        device, own = hidden_states.device, tuple(v for v in vars(self).values() if isinstance(v, (int, float)))
        key = (hidden_states.shape[0], device, num_frames, height, width, scale, own)
        tables, stream = kept.get(key, (None, None))
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return tables if tables is not None and cuda_graph.keep(*tables) else original(self, *args)
        now = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
        if tables is None or stream != now:
            tables = with_pairs(original(self, *args))
            kept.clear()
            kept[key] = tables, now
        return tables

    return forward


def ltx(module, ctx):
    """LTXAttention: the norm and the rotation are over all heads together."""
    found = _processor(module, {"ltx:LTXVideoAttnProcessor.__call__": None}, apply_rotary_emb="ltx:apply_rotary_emb")
    norm = found if isinstance(found, str) else _same_norms(ctx, module.norm_q, module.norm_k)
    if isinstance(norm, str):
        return norm
    cls, original, rounding = found[0], ctx.original, ops.ROUND_VALUE
    dispatch, apply = (cls.__call__.__globals__[name] for name in ("dispatch_attention_fn", "apply_rotary_emb"))
    project = fused_linears(ctx, module.to_q, module.to_k, module.to_v)

    def rotate(x, cos, sin):
        return apply(x, (cos, sin))

    def forward(
        self, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None, **kwargs
    ):
        text, mask, heads = encoder_hidden_states, attention_mask, self.heads
        crossed = text is not None and image_rotary_emb is None
        alone = text is None and mask is None and image_rotary_emb is not None
        if not (crossed or alone) or kwargs or type(self.processor) is not cls:
            return original(self, hidden_states, text, mask, image_rotary_emb, **kwargs)
        if crossed:
            mask = None if mask is None else _mask_of_heads(self, mask, text.shape[1], text.shape[0])
            k, v = project(text, self.to_k, self.to_v)
            q, k = self.norm_q(self.to_q(hidden_states)), self.norm_k(k)
            out = _attend(dispatch, self.processor, *(x.unflatten(2, (heads, -1)) for x in (q, k, v)), mask)
            return self.to_out[1](self.to_out[0](out))
        cos, sin = image_rotary_emb
        if cos.dim() != 3 or not _takes(norm, hidden_states, self.norm_q, self.norm_k, cos, sin):
            return original(self, hidden_states, None, None, image_rotary_emb)
        q, k, v = project(hidden_states, self.to_q, self.to_k, self.to_v)
        if _expected(hidden_states, q, k):
            cos, sin = getattr(cos, "adze_once", (cos, sin))
            q, k = _norm_rope(norm, rounding, q.unsqueeze(2), k.unsqueeze(2), self.norm_q, self.norm_k, cos, sin)
            q, k = q.squeeze(2), k.squeeze(2)
        else:
            q, k = _one_by_one(rotate, q, k, self.norm_q, self.norm_k, cos, sin)
        q, k = q.unflatten(2, (heads, -1)), k.unflatten(2, (heads, -1))
        out = _attend(dispatch, self.processor, q, k, v.unflatten(2, (heads, -1)), None)
        return self.to_out[1](self.to_out[0](out))

    return forward


def flux(module, ctx):
    """FluxAttention: per head, text before image, one table for both. From 0.37 on parts of the output are copied: a
    Linear whose input is not contiguous rounds before it adds its bias."""
    found = _processor(
        module,
        {"flux:FluxAttnProcessor.__call__": True, "flux:FluxAttnProcessor.__call__@0.36.0": False},
        apply_rotary_emb="embeddings:apply_rotary_emb",
        _get_qkv_projections="flux:_get_qkv_projections",
    )
    both = module.added_kv_proj_dim is not None
    children = [module.norm_q, module.norm_k, *([module.norm_added_q, module.norm_added_k] if both else [])]
    norm = found if isinstance(found, str) else _same_norms(ctx, *children)
    if isinstance(norm, str):
        return norm
    (cls, copied), original, rounding = found, ctx.original, ops.ROUND_VALUE
    dispatch = cls.__call__.__globals__["dispatch_attention_fn"]
    all_at_once = cls.__call__.__globals__["_get_qkv_projections"]
    rotate = _by_tables(cls.__call__.__globals__["apply_rotary_emb"])
    project = (_two_streams if both else _projections)(ctx, module)

    def forward(
        self, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None, **kwargs
    ):
        text, x = encoder_hidden_states, hidden_states
        odd = kwargs or image_rotary_emb is None or type(self.processor) is not cls
        if odd or (text is not None) != both or (self.added_kv_proj_dim is not None) != both:
            return original(self, x, text, attention_mask, image_rotary_emb, **kwargs)
        cos, sin = image_rotary_emb
        takes = cos.dim() == 2 and _takes(norm, x, self.norm_q, self.norm_k, cos, sin)
        if not takes or (both and not _takes(norm, text, self.norm_added_q, self.norm_added_k)):
            return original(self, x, text, attention_mask, image_rotary_emb)
        head = (-1, self.head_dim)
        if self.fused_projections:
            q, k, v, text_q, text_k, text_v = all_at_once(self, x, text)
        elif both:
            q, k, v, text_q, text_k, text_v = project(self, x, text)
        else:
            q, k, v = project(self, x)
        fused = _expected(x, q, k)
        q, k, v = q.unflatten(-1, head), k.unflatten(-1, head), v.unflatten(-1, head)
        if not both:
            own = (q, k, self.norm_q, self.norm_k, cos, sin)
            q, k = _norm_rope(norm, rounding, *own) if fused else _one_by_one(rotate, *own)
            return _attend(dispatch, self.processor, q, k, v, attention_mask)
        fused = fused and _expected(x, text_q, text_k)
        text_q, text_k, text_v = text_q.unflatten(-1, head), text_k.unflatten(-1, head), text_v.unflatten(-1, head)
        n = text_q.shape[1]
        all_q, all_k = _joined(
            fused,
            rotate,
            norm,
            rounding,
            (text_q, text_k, self.norm_added_q, self.norm_added_k, cos[:n], sin[:n]),
            (q, k, self.norm_q, self.norm_k, cos[n:], sin[n:]),
        )
        out = _attend(dispatch, self.processor, all_q, all_k, torch.cat([text_v, v], dim=1), attention_mask)
        words, image = out[:, :n], out[:, n:]
        if copied:
            words, image = words.contiguous(), image.contiguous()
        return self.to_out[1](self.to_out[0](image)), self.to_add_out(words)

    return forward


def wan(module, ctx):
    """WanAttention: the norm is over all heads together, the rotation per head. Its tables hold each angle twice.
    Unless the table is float32, the rotation rounds every step."""
    found = _processor(
        module,
        {"wan:WanAttnProcessor.__call__": None},
        _get_qkv_projections="wan:_get_qkv_projections",
    )
    norm = found if isinstance(found, str) else _same_norms(ctx, module.norm_q, module.norm_k)
    if isinstance(norm, str):
        return norm
    cls, original = found[0], ctx.original
    value, steps = ops.ROUND_VALUE, ops.ROUND_STEPS
    dispatch = cls.__call__.__globals__["dispatch_attention_fn"]
    all_at_once = cls.__call__.__globals__["_get_qkv_projections"]
    project = _projections(ctx, module)

    def rotate(x, cos, sin):  # the processor's, which is a part of its __call__
        x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = cos[..., 0::2], sin[..., 1::2]
        out = torch.empty_like(x)
        out[..., 0::2] = x1 * cos - x2 * sin
        out[..., 1::2] = x1 * sin + x2 * cos
        return out

    def forward(self, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None, **kwargs):
        crossed = encoder_hidden_states is not None or self.add_k_proj is not None or rotary_emb is None
        if crossed or kwargs or type(self.processor) is not cls:
            return original(self, hidden_states, encoder_hidden_states, attention_mask, rotary_emb, **kwargs)
        cos, sin = rotary_emb
        if cos.dim() != 4 or not _takes(norm, hidden_states, self.norm_q, self.norm_k, cos, sin):
            return original(self, hidden_states, None, attention_mask, rotary_emb)
        at_once = self.fused_projections
        q, k, v = all_at_once(self, hidden_states, None) if at_once else project(self, hidden_states)
        heads = (self.heads, -1)
        if _expected(hidden_states, q, k):
            q, k = q.unflatten(2, heads), k.unflatten(2, heads)
            rounding = steps if cos.dtype == q.dtype else value
            if cos.dtype == torch.float32:
                cos, sin = _pairs_once(cos, sin)
            cos, sin = cos.squeeze(2), sin.squeeze(2)
            q, k = _norm_rope(norm, rounding, q, k, self.norm_q, self.norm_k, cos, sin, across_heads=True)
        else:
            q, k = self.norm_q(q).unflatten(2, heads), self.norm_k(k).unflatten(2, heads)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        v = v.unflatten(2, heads)
        out = _attend(dispatch, self.processor, q, k, v, attention_mask)
        return self.to_out[1](self.to_out[0](out))

    return forward


def hunyuan_video(module, ctx, cls):
    """Attention with a HunyuanVideoAttnProcessor2_0: image before text, and only the image is rotated. Without
    projections for the text both have the same norms."""
    own = module.add_q_proj is not None
    children = [module.norm_q, module.norm_k, *([module.norm_added_q, module.norm_added_k] if own else [])]
    norm = _same_norms(ctx, *children)
    if isinstance(norm, str):
        return norm
    rotation = sys.modules["diffusers.models.embeddings"].apply_rotary_emb
    if fingerprint(rotation) not in hashes("embeddings:apply_rotary_emb"):
        return f"apply_rotary_emb is {described(rotation)}, which no rule knows"
    original, rounding, rotate = ctx.original, ops.ROUND_VALUE, _by_tables(rotation)
    dispatch = cls.__call__.__globals__["dispatch_attention_fn"]
    project = (_two_streams if own else _projections)(ctx, module)

    def forward(self, hidden_states, encoder_hidden_states=None, attention_mask=None, **cross_attention_kwargs):
        text, tables = encoder_hidden_states, cross_attention_kwargs.get("image_rotary_emb")
        x, odd = hidden_states, type(self.processor) is not cls or (self.add_q_proj is not None) != own
        if odd or tables is None or text is None or len(cross_attention_kwargs) > 1:
            return original(self, x, text, attention_mask, **cross_attention_kwargs)
        cos, sin = tables
        q_norm, k_norm = (self.norm_added_q, self.norm_added_k) if own else (self.norm_q, self.norm_k)
        n, heads = x.shape[1], (self.heads, -1)
        takes = cos.dim() == 2 and _takes(norm, x, self.norm_q, self.norm_k, cos, sin)
        if not takes or not _takes(norm, text, q_norm, k_norm):
            return original(self, x, text, attention_mask, **cross_attention_kwargs)
        if own:
            q, k, v, text_q, text_k, text_v = project(self, x, text)
        else:
            q, k, v = project(self, torch.cat([x, text], dim=1))
            q, text_q, k, text_k = q[:, :n], q[:, n:], k[:, :n], k[:, n:]
        fused = _expected(x, q, k, text_q, text_k)
        q, k, v = q.unflatten(2, heads), k.unflatten(2, heads), v.unflatten(2, heads)
        text_q, text_k = text_q.unflatten(2, heads), text_k.unflatten(2, heads)
        if own:
            v = torch.cat([v, text_v.unflatten(2, heads)], dim=1)
        image, words = (q, k, self.norm_q, self.norm_k, cos, sin), (text_q, text_k, q_norm, k_norm, None, None)
        all_q, all_k = _joined(fused, rotate, norm, rounding, image, words)
        out = _attend(dispatch, self.processor, all_q, all_k, v, attention_mask)
        image, text = out[:, :n], out[:, n:]
        if getattr(self, "to_out", None) is not None:
            image = self.to_out[1](self.to_out[0](image))
        return image, text if getattr(self, "to_add_out", None) is None else self.to_add_out(text)

    return forward


def _table(freqs):
    """cos and sin of a table of complex numbers."""
    cos, sin = torch.view_as_real(freqs).movedim(-1, 0).contiguous()
    return cos, sin


def qwen_image(module, ctx, cls, joint_mask, copied=True):
    """Attention with a QwenDoubleStreamAttnProcessor2_0: text before image, a complex table for each of them.
    joint_mask: the processor makes the mask from the text's, else it is given one. copied: as in FLUX."""
    found = _processor(module, _SHARED, apply_rotary_emb_qwen="qwenimage:apply_rotary_emb_qwen")
    children = (module.norm_q, module.norm_k, module.norm_added_q, module.norm_added_k)
    norm = found if isinstance(found, str) else _same_norms(ctx, *children)
    if isinstance(norm, str):
        return norm
    original, rounding = ctx.original, ops.ROUND_VALUE
    dispatch = cls.__call__.__globals__["dispatch_attention_fn"]
    apply = cls.__call__.__globals__["apply_rotary_emb_qwen"]
    project = _two_streams(ctx, module)
    names = frozenset(("image_rotary_emb", "encoder_hidden_states_mask"))

    def rotate(x, cos, sin):
        return apply(x, torch.complex(cos, sin), use_real=False)

    def forward(self, hidden_states, encoder_hidden_states=None, attention_mask=None, **cross_attention_kwargs):
        text, tables = encoder_hidden_states, cross_attention_kwargs.get("image_rotary_emb")
        odd = tables is None or text is None or (joint_mask and attention_mask is not None)
        if odd or any(name not in names for name in cross_attention_kwargs) or type(self.processor) is not cls:
            return original(self, hidden_states, text, attention_mask, **cross_attention_kwargs)
        takes = all(t.dtype == torch.complex64 and t.dim() == 2 and t.device == hidden_states.device for t in tables)
        takes = takes and _takes(norm, hidden_states, self.norm_q, self.norm_k)
        if not takes or not _takes(norm, text, self.norm_added_q, self.norm_added_k):
            return original(self, hidden_states, text, attention_mask, **cross_attention_kwargs)
        q, k, v, text_q, text_k, text_v = project(self, hidden_states, text)
        fused = _expected(hidden_states, q, k, text_q, text_k)
        mask, text_mask = attention_mask, cross_attention_kwargs.get("encoder_hidden_states_mask")
        if joint_mask and text_mask is not None:
            seen = text_mask.new_ones((q.shape[0], q.shape[1]), dtype=torch.bool)
            mask = torch.cat([text_mask, seen], dim=1)[:, None, None, :]
        n, head = text.shape[1], (-1, self.inner_dim // self.heads)
        q, k, v = q.unflatten(-1, head), k.unflatten(-1, head), v.unflatten(-1, head)
        text_q, text_k, text_v = text_q.unflatten(-1, head), text_k.unflatten(-1, head), text_v.unflatten(-1, head)
        words = (text_q, text_k, self.norm_added_q, self.norm_added_k, *_table(tables[1]))
        image = (q, k, self.norm_q, self.norm_k, *_table(tables[0]))
        all_q, all_k = _joined(fused, rotate, norm, rounding, words, image)
        out = _attend(dispatch, self.processor, all_q, all_k, torch.cat([text_v, v], dim=1), mask)
        words, image = out[:, :n], out[:, n:]
        if copied:
            words, image = words.contiguous(), image.contiguous()
        image = self.to_out[0](image)
        return self.to_out[1](image) if len(self.to_out) > 1 else image, self.to_add_out(words)

    return forward


_QWEN = "qwenimage:QwenDoubleStreamAttnProcessor2_0.__call__"
_SHARED = {  # processors of diffusers' shared Attention class
    "hunyuan_video:HunyuanVideoAttnProcessor2_0.__call__": hunyuan_video,
    f"{_QWEN}@0.36.0": lambda module, ctx, cls: qwen_image(module, ctx, cls, False, False),
    f"{_QWEN}@0.37.1": lambda module, ctx, cls: qwen_image(module, ctx, cls, False),
    f"{_QWEN}@0.39.0": lambda module, ctx, cls: qwen_image(module, ctx, cls, True),
    f"{_QWEN}@0.40.0": lambda module, ctx, cls: qwen_image(module, ctx, cls, True),
    f"{_QWEN}@0.42.1": lambda module, ctx, cls: qwen_image(module, ctx, cls, True),
    "attention_processor:AttnProcessor2_0.__call__": lambda module, ctx, cls: "nothing is rotated",
    "attention_processor:JointAttnProcessor2_0.__call__": lambda module, ctx, cls: "nothing is rotated",
}


def shared(module, ctx):
    """diffusers.models.attention_processor.Attention, by its processor."""
    found = _processor(module, _SHARED)
    return found if isinstance(found, str) else found[1](module, ctx, found[0])
