"""FLUX: its transformer with random weights, and its forwards with this project's kernels."""

import diffusers
import torch
from diffusers.models.activations import GELU

NAME = "flux"
SHAPES = {"tokens": (4608,), "dim": 3072, "hidden": 12288, "heads": 24, "kv_heads": 24, "head_dim": 128}
TINY = {
    "in_channels": 8, "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "joint_attention_dim": 64,
    "pooled_projection_dim": 64,
}  # fmt: skip


def build(tiny, device, dtype):
    """The transformer, and a function that runs one denoising step: 1024 x 1024."""
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(guidance_embeds=True, **(TINY if tiny else {}))
    model = model.eval().to(device, dtype)
    config, image, text = model.config, 16 if tiny else 4096, 8 if tiny else 512
    inputs = {
        "hidden_states": torch.randn(1, image, config.in_channels),
        "encoder_hidden_states": torch.randn(1, text, config.joint_attention_dim),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.zeros(image, 3),
        "txt_ids": torch.zeros(text, 3),
    }
    inputs = {name: value.to(device, dtype) for name, value in inputs.items()}
    return model, lambda: model(**inputs, return_dict=False)[0]


def forwards(kernel):
    """{op: {class: its forward with the kernel}}. A class is compared with `is`: a name is no proof."""

    def norm(self, x):
        return kernel.rms_norm(x, self.weight, eps=self.eps)

    def layer(self, x):
        return kernel.layer_norm(x, self.weight, self.bias, eps=self.eps)

    def gelu(self, hidden_states):  # tanh GELU, not GEGLU
        return kernel.activation(self.proj(hidden_states), f"gelu{'_tanh' if self.approximate == 'tanh' else ''}")

    return {
        "rms_norm": {torch.nn.RMSNorm: norm},
        "layer_norm": {torch.nn.LayerNorm: layer},
        "activation": {GELU: gelu},
    }


def calls(tokens):
    """(name, op, module, shape of its input) of these forwards, as large as in the model but for GELU's Linear."""
    dim, hidden, heads, head_dim = (SHAPES[name] for name in ("dim", "hidden", "heads", "head_dim"))
    return [
        ("norm of a block, no weight", "layer_norm", torch.nn.LayerNorm(dim, 1e-6, False), (1, tokens, dim)),
        ("norm_q and norm_k", "rms_norm", torch.nn.RMSNorm(head_dim, 1e-6), (1, tokens, heads, head_dim)),
        ("feed-forward", "activation", GELU(64, hidden, approximate="tanh"), (1, tokens, 64)),
    ]
