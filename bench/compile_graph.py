"""One transformer block under torch.compile, and where adze's kernels may stand in its graph.

A  compile alone
B  compile, with an opaque adze.rms_norm in place of each norm
C  compile with adze's pass, which replaces whole chains (adze.compile)
D  compile of the patched block (adze.patch, then torch.compile)

    python3 bench/compile_graph.py [--model llama-2-7b] [--tokens 1 512] [--json FILE] [--plot PNG]

On CUDA each is timed without and with CUDA graphs (mode "reduce-overhead"). Weights are random.
"""

import sys

import qwen3
import torch
import transformers

import models

LETTERS = {"A": "compile", "B": "adze norm + compile", "C": "pass", "D": "adze + compile"}


class Block(torch.nn.Module):
    """The first decoder layer of a model, without a cache."""

    def __init__(self, model):
        super().__init__()
        self.layer = model.model.layers[0]

    def forward(self, x, cos, sin):
        return self.layer(x, position_embeddings=(cos, sin), attention_mask=None)


def main():
    parser = models.parser(__doc__, steps=50)
    parser.add_argument("--model", choices=qwen3.FULL, default="qwen3-8b")
    parser.add_argument("--tokens", type=int, nargs="+", help="(1 and 512)")
    options = parser.parse_args()
    options.tokens = options.tokens or ([16] if options.tiny else [1, 512])
    options.variants = options.variants or list(LETTERS.values())
    config = qwen3.config(
        options.model, options.tiny, num_hidden_layers=1, vocab_size=512
    )  # the block alone is timed
    model = models.build(
        lambda: transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), options
    )
    block = Block(model)
    results = models.Comparison(options)
    for tokens in options.tokens:
        x = models.rand(options, 1, tokens, config.hidden_size)
        cos, sin = model.model.rotary_emb(x, torch.arange(tokens, device=options.device)[None])
        inputs = {"x": x, "cos": cos, "sin": sin}
        for mode in [None, "reduce-overhead"] if options.device == "cuda" else [None]:
            what = f"{tokens} tokens" + (", CUDA graphs" if mode else "")
            results.measure(block, inputs, ["eager", *options.variants], what=what, mode=mode)
    for row in results.rows:
        row["letter"] = next((letter for letter, name in LETTERS.items() if name == row["variant"]), "")
    return results.finish("compile_graph", options.model)


if __name__ == "__main__":
    sys.exit(main())
