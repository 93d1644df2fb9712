"""Qwen3-8B or Llama-2-7B, batch 1: prefill of 512 tokens, and decoding with a static cache, ms per token.

    python3 bench/qwen3.py [--model llama-2-7b] [--context 512] [--steps 64] [--json FILE] [--plot PNG]

Weights are random. Each variant's logits are compared with eager's, and so are its greedy tokens, before it is timed.
"""

import copy
import sys

import torch
import transformers

import models

FULL = {
    "qwen3-8b": lambda: transformers.Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=False,
    ),
    "llama-2-7b": lambda: transformers.LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=4096, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, tie_word_embeddings=False,
    ),
}  # fmt: skip
TINY = dict(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64,
)  # fmt: skip
SPARE = 8  # positions for the calls that a graph or a compiler makes before its first result


def config(name, tiny, **changes):
    full = FULL[name]()
    changes = {**(TINY if tiny else {}), **changes}
    if hasattr(full, "layer_types"):
        changes["layer_types"] = None  # they are a list, one per layer
    return type(full)(**{**full.to_dict(), **changes})


class Prefill(torch.nn.Module):
    """Logits after a prompt, with a new cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(input_ids=tokens, use_cache=True, logits_to_keep=1).logits


class Decode(torch.nn.Module):
    """Logits after one more token. The static cache counts its length in memory, so a graph advances it too."""

    def __init__(self, model, prompt, positions):
        super().__init__()
        self.model, self.prompt, self.positions = model, prompt, positions
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=positions)

    def __deepcopy__(self, memo):
        made = Decode(copy.deepcopy(self.model, memo), self.prompt, self.positions)
        memo[id(self)] = made
        return made

    def fill(self):
        """Prefills the cache with the prompt, by the forwards that the model has now."""
        for layer in self.cache.layers:
            layer.cumulative_length.zero_()
        return self.model(input_ids=self.prompt, past_key_values=self.cache, logits_to_keep=1).logits

    def forward(self, tokens):
        return self.model(input_ids=tokens, past_key_values=self.cache, logits_to_keep=1).logits


def greedy(module, count):
    """A function of a variant of the module: the tokens that follow its prompt."""

    def generate(made):
        tokens = [module.fill()[:, -1].argmax(-1, keepdim=True)]
        for _ in range(count - 1):
            tokens.append(made(tokens=tokens[-1])[:, -1].argmax(-1, keepdim=True))
        return torch.cat(tokens, 1)

    return generate


def main():
    parser = models.parser(__doc__, steps=64)
    parser.add_argument("--model", choices=FULL, default="qwen3-8b")
    parser.add_argument("--context", type=int, help="tokens of the prompt (512)")
    parser.add_argument("--mode", help="of torch.compile (reduce-overhead on CUDA)")
    options = parser.parse_args()
    options.context = options.context or (16 if options.tiny else 512)
    names = models.variants(options)
    mode = options.mode or ("reduce-overhead" if options.device == "cuda" else None)
    make = lambda: transformers.AutoModelForCausalLM.from_config(  # noqa: E731
        config(options.model, options.tiny), dtype=models.DTYPES[options.dtype], attn_implementation="sdpa"
    )
    model = models.build(make, options)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (1, options.context), generator=generator).to(options.device)
    results = models.Comparison(options)
    results.measure(Prefill(model), {"tokens": prompt}, names, what=f"prefill of {options.context}", mode=mode)

    positions = options.context + max(options.steps, options.warmup_iterations) + SPARE
    decode = Decode(model, prompt, positions)
    with torch.no_grad():
        first = decode.fill()[:, -1].argmax(-1, keepdim=True)
    results.measure(
        decode, {"tokens": first}, names, what="decode", mode=mode, prepare=Decode.fill,
        whole=greedy(decode, options.steps),
    )  # fmt: skip
    return results.finish("qwen3", options.model)


if __name__ == "__main__":
    sys.exit(main())
