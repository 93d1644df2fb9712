"""LTX-Video: its transformer with random weights, and its forwards with this project's kernels."""

import diffusers
import torch
from diffusers.models.activations import GELU
from diffusers.models.normalization import RMSNorm

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

    return {"rms_norm": {RMSNorm: norm, torch.nn.RMSNorm: norm_of_q}, "activation": {GELU: gelu}}


def calls(tokens):
    """(name, op, module, shape of its input) of these forwards, as large as in the model but for GELU's Linear."""
    dim, hidden = SHAPES["dim"], SHAPES["hidden"]
    return [
        ("norm of a block, no weight", "rms_norm", RMSNorm(dim, 1e-6, False), (1, tokens, dim)),
        ("norm_q and norm_k", "rms_norm", torch.nn.RMSNorm(dim, 1e-5), (1, tokens, dim)),
        ("feed-forward", "activation", GELU(64, hidden, approximate="tanh"), (1, tokens, 64)),
    ]
