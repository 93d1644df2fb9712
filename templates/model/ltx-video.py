"""LTX-Video: its transformer with random weights, and its forwards with this project's kernels."""

import diffusers
import torch
from diffusers.models.activations import GELU
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_ltx import LTXAttention, LTXVideoTransformerBlock

NAME = "ltx-video"
SHAPES = {"tokens": (2688,), "dim": 2048, "hidden": 8192, "heads": 32, "kv_heads": 32, "head_dim": 64}
TINY = {
    "num_attention_heads": 4, "attention_head_dim": 64, "cross_attention_dim": 256, "caption_channels": 256,
    "num_layers": 2,
}  # fmt: skip


def build(tiny, device, dtype):
    """The transformer, and a function that runs one denoising step: 49 frames of 512 x 768."""
    torch.manual_seed(0)
    with torch.device(device):
        model = diffusers.LTXVideoTransformer3DModel(**(TINY if tiny else {})).eval().to(dtype)
    frames, height, width = (2, 4, 4) if tiny else (7, 16, 24)
    channels = 256 if tiny else 4096
    inputs = {
        "hidden_states": torch.randn(1, frames * height * width, 128),
        "encoder_hidden_states": torch.randn(1, 128, channels),
        "timestep": torch.tensor([500.0]),
        "encoder_attention_mask": torch.ones(1, 128),
    }
    inputs = {name: value.to(device, dtype) for name, value in inputs.items()}
    return model, lambda: model(**inputs, num_frames=frames, height=height, width=width, return_dict=False)[0]


def forwards(kernel):
    """{op: {class: its forward with the kernel}}. A class is compared with `is`: a name is no proof."""

    def norm(self, hidden_states):  # weight is None in blocks, whose scale and shift follow
        dtype = hidden_states.dtype if self.weight is None else self.weight.dtype
        rounding = 0 if self.weight is None or dtype == torch.float32 else kernel.ROUND_NORM
        return kernel.rms_norm(hidden_states, self.weight, eps=self.eps, rounding=rounding)

    def norm_of_q(self, x):  # and of k, across all heads: torch's own norm rounds once
        return kernel.rms_norm(x, self.weight, eps=self.eps)

    def gelu(self, hidden_states):  # tanh GELU, not GEGLU
        return kernel.activation(self.proj(hidden_states), f"gelu{'_tanh' if self.approximate == 'tanh' else ''}")

    def attention(self, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        if image_rotary_emb is None:  # of the text
            return type(self).forward(self, hidden_states, encoder_hidden_states, attention_mask)
        q, k, v = (
            self.norm_q(self.to_q(hidden_states)),
            self.norm_k(self.to_k(hidden_states)),
            self.to_v(hidden_states),
        )
        # Pairs of neighbours rotate, before q and k are split into heads: one head of all elements.
        q, k = kernel.rope(q.unsqueeze(2), k.unsqueeze(2), *image_rotary_emb, interleaved=True)
        q, k, v = (t.reshape(*v.shape[:2], self.heads, -1) for t in (q, k, v))
        return self.to_out[1](self.to_out[0](dispatch_attention_fn(q, k, v).flatten(2)))

    def modulated(module, x, scale, scale_table, shift, shift_table, residual=None):
        """(norm(h) * (1 + scale) + shift, h) of h = residual + x."""
        options = {"scale": scale, "scale_table": scale_table, "shift": shift, "shift_table": shift_table}
        if hasattr(kernel, "rms_norm"):
            options |= {"residual": residual, "eps": module.eps, "rounding": kernel.ROUND_STEPS}
            done = kernel.rms_norm(x, **options)
            return done if residual is not None else (done, x)
        h = x if residual is None else residual + x
        return module(h) * (1 + (scale_table + scale)) + (shift_table + shift), h

    def block(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, encoder_attention_mask=None):
        """AdaLN: the model's six rows of scale_shift_table are added to those of the time step."""
        table, rounding = self.scale_shift_table, {"rounding": kernel.ROUND_STEPS}
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = temb.unflatten(2, (6, -1)).unbind(2)
        h, _ = modulated(self.norm1, hidden_states, scale, table[1], shift, table[0])
        h = self.attn1(hidden_states=h, encoder_hidden_states=None, image_rotary_emb=image_rotary_emb)
        x = kernel.gated_add(h, hidden_states, gate, gate_table=table[2], **rounding)
        h = self.attn2(x, encoder_hidden_states=encoder_hidden_states, attention_mask=encoder_attention_mask)
        h, x = modulated(self.norm2, h, scale_mlp, table[4], shift_mlp, table[3], residual=x)
        return kernel.gated_add(self.ff(h), x, gate_mlp, gate_table=table[5], **rounding)

    return {
        "rms_norm": {RMSNorm: norm, torch.nn.RMSNorm: norm_of_q},
        "activation": {GELU: gelu},
        "rope": {LTXAttention: attention},
        "gated_add": {LTXVideoTransformerBlock: block},
    }


def calls(tokens):
    """(name, op, module, shape of its input) of the forwards of one input, as large as in the model but for GELU's
    Linear."""
    dim, hidden = SHAPES["dim"], SHAPES["hidden"]
    return [
        ("norm of a block, no weight", "rms_norm", RMSNorm(dim, 1e-6, False), (1, tokens, dim)),
        ("norm_q and norm_k", "rms_norm", torch.nn.RMSNorm(dim, 1e-5), (1, tokens, dim)),
        ("feed-forward", "activation", GELU(64, hidden, approximate="tanh"), (1, tokens, 64)),
    ]
