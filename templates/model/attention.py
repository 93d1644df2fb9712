"""This project's attention in a model of transformers, which finds attentions by their names."""

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

NAME = "{{name}}"


def register(kernel):
    """Offers the kernel to transformers. Its masks are those of torch's attention."""

    def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        if dropout or (torch.is_grad_enabled() and query.requires_grad):  # there is no backward kernel
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
            )
        tokens = query.shape[2]
        causal = attention_mask is None and tokens > 1
        if causal:  # a static cache is empty behind the prompt
            key, value = key[:, :, :tokens], value[:, :, :tokens]
        options = {"scale": scaling, "causal": causal}
        if torch.compiler.is_compiling():  # Dynamo refuses an out= that is not contiguous
            out = kernel.attention(query, key, value, attention_mask, **options)
            return out.transpose(1, 2).contiguous(), None
        # Written as the model goes on with it, [batch, tokens, heads, dim]: nothing is copied.
        out = query.new_empty(query.shape[0], tokens, query.shape[1], value.shape[-1])
        kernel.attention(query, key, value, attention_mask, **options, out=out.transpose(1, 2))
        return out, None

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def inject(model, kernel, kind):
    """Sets it, and keeps what was set. How many modules of the class `kind` call it."""
    register(kernel)
    model.attention_before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    return sum(type(module) is kind for module in model.modules())


def remove(model):
    before = model.__dict__.pop("attention_before", None)
    if before is not None:
        model.set_attn_implementation(before)
