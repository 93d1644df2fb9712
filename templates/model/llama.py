"""Llama: a decoder with random weights, and its forwards with this project's kernels."""

import torch
import transformers
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

NAME = "llama"
ATTENTION = LlamaAttention  # calls the attention that the config names
SHAPES = {"tokens": (1, 128, 8192), "dim": 4096, "hidden": 11008, "heads": 32, "kv_heads": 32, "head_dim": 128}
TINY = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 512,
}  # fmt: skip


def prompt(model, tiny):
    return torch.randint(0, model.config.vocab_size, (1, 16 if tiny else 512), device=model.device)


def build(tiny, device, dtype):
    """The model, made on the device, and a function that runs it on a prompt."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**(TINY if tiny else {}))
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    ids = prompt(model, tiny)
    return model, lambda: model(ids).logits


def forwards(kernel):
    """{op: {class: its forward with the kernel}}. A class is compared with `is`: a name is no proof."""

    def norm(self, hidden_states):
        return kernel.rms_norm(hidden_states, self.weight, eps=self.variance_epsilon, rounding=kernel.ROUND_NORM)

    def mlp(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(kernel.glu(gate, up, act=self.config.hidden_act, rounding=kernel.ROUND_STEPS))

    def linear(self, x):
        few = x.numel() // x.shape[-1] <= 16  # tokens, as in decoding: many are left to the vendor's library
        return kernel.gemm(x, self.weight, self.bias) if few else F.linear(x, self.weight, self.bias)

    return {"rms_norm": {LlamaRMSNorm: norm}, "glu": {LlamaMLP: mlp}, "gemm": {torch.nn.Linear: linear}}


def calls(tokens):
    """(name, op, module, shape of its input) of these forwards, sized as in the model but for the MLP's Linears."""
    dim = SHAPES["dim"]
    mlp = LlamaMLP(transformers.LlamaConfig(hidden_size=64, intermediate_size=SHAPES["hidden"]))
    return [
        ("norm of hidden states", "rms_norm", LlamaRMSNorm(dim, eps=1e-5), (1, tokens, dim)),
        ("mlp", "glu", mlp, (1, tokens, 64)),
        ("q_proj", "gemm", torch.nn.Linear(dim, dim, bias=False), (1, min(tokens, 16), dim)),
    ]
