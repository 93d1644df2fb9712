"""Transformer blocks under torch.compile, and where adze's kernels may stand in their graph.

A  compile alone
B  compile, with an opaque adze.rms_norm in place of each norm
C  compile with adze's pass, which replaces whole chains (adze.compile)
D  compile of the patched blocks (adze.patch, then torch.compile)

    python3 bench/compile_graph.py [--model llama-2-7b] [--tokens 1 512] [--json FILE] [--plot PNG]
    python3 bench/compile_graph.py --model ltx-video --modes graphs     under a minute on a GPU

One decoder layer of an LLM, two blocks of LTX-Video, or a double and two single blocks of FLUX. On CUDA each is timed
without and with CUDA graphs (mode "reduce-overhead"). Weights are random.
"""

import sys

import qwen3
import torch
import transformers

import models

LETTERS = {"A": "compile", "B": "adze norm + compile", "C": "pass", "D": "adze + compile"}
MODES = {"plain": None, "graphs": "reduce-overhead"}


class Layer(torch.nn.Module):
    """The first decoder layer of an LLM, without a cache."""

    tokens = (1, 512)

    def __init__(self, options):
        super().__init__()
        # The block alone is timed: the model around it may be small.
        config = qwen3.config(options.model, options.tiny, num_hidden_layers=1, vocab_size=512)
        self.model = models.build(
            lambda: transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), options
        ).model

    def inputs(self, options, tokens):
        x = models.rand(options, 1, tokens, self.model.config.hidden_size)
        cos, sin = self.model.rotary_emb(x, torch.arange(tokens, device=options.device)[None])
        return {"x": x, "cos": cos, "sin": sin}

    def forward(self, x, cos, sin):
        return self.model.layers[0](x, position_embeddings=(cos, sin), attention_mask=None)


class VideoBlocks(torch.nn.Module):
    """Two blocks of LTX-Video 2B: what ends the first and begins the second is one chain."""

    tokens = (2688,)  # 49 frames of 512x768

    def __init__(self, options):
        super().__init__()
        import diffusers
        import generate_video

        sizes = {**(generate_video.TINY_LTX if options.tiny else {}), "num_layers": 2}
        self.model = models.build(lambda: diffusers.LTXVideoTransformer3DModel(**sizes), options)

    def inputs(self, options, tokens):
        config = self.model.config
        dim = config.num_attention_heads * config.attention_head_dim
        x = models.rand(options, 1, tokens, dim)
        cos, sin = self.model.rope(x, tokens, 1, 1)
        text = models.rand(options, 1, 16 if options.tiny else 128, config.cross_attention_dim, seed=2)
        return {"x": x, "text": text, "temb": models.rand(options, 1, 1, 6 * dim, seed=3), "cos": cos, "sin": sin}

    def forward(self, x, text, temb, cos, sin):
        for block in self.model.transformer_blocks:
            x = block(hidden_states=x, encoder_hidden_states=text, temb=temb, image_rotary_emb=(cos, sin))
        return x


class ImageBlocks(torch.nn.Module):
    """A double and two single blocks of FLUX.1-dev."""

    tokens = (4096,)  # 1024x1024

    def __init__(self, options):
        super().__init__()
        import diffusers
        import generate_video

        sizes = {**(generate_video.TINY_FLUX if options.tiny else {}), "num_layers": 1, "num_single_layers": 2}
        self.model = models.build(lambda: diffusers.FluxTransformer2DModel(**sizes), options)

    def inputs(self, options, tokens):
        dim, words = self.model.inner_dim, 16 if options.tiny else 512
        places = torch.arange(words + tokens, device=options.device).float()[:, None].expand(-1, 3)
        cos, sin = self.model.pos_embed(places)
        image, text = models.rand(options, 1, tokens, dim), models.rand(options, 1, words, dim, seed=2)
        return {"image": image, "text": text, "temb": models.rand(options, 1, dim, seed=3), "cos": cos, "sin": sin}

    def forward(self, image, text, temb, cos, sin):
        for block in (*self.model.transformer_blocks, *self.model.single_transformer_blocks):
            text, image = block(
                hidden_states=image, encoder_hidden_states=text, temb=temb, image_rotary_emb=(cos, sin)
            )
        return text, image


BLOCKS = {**dict.fromkeys(qwen3.FULL, Layer), "ltx-video": VideoBlocks, "flux": ImageBlocks}


def main():
    parser = models.parser(__doc__, steps=50)
    parser.add_argument("--model", choices=BLOCKS, default="qwen3-8b")
    parser.add_argument("--tokens", type=int, nargs="+", help="(as much as the model is used with)")
    parser.add_argument("--modes", choices=MODES, nargs="+", help="(both; on a CPU plain)")
    options = parser.parse_args()
    options.modes = options.modes or (list(MODES) if options.device == "cuda" else ["plain"])
    options.variants = options.variants or list(LETTERS.values())
    with torch.no_grad():
        blocks = BLOCKS[options.model](options)
    options.tokens = options.tokens or ([16] if options.tiny else list(blocks.tokens))
    results = models.Comparison(options)
    for tokens in options.tokens:
        inputs = blocks.inputs(options, tokens)
        for mode in options.modes:
            what = f"{tokens} tokens" + (", CUDA graphs" if MODES[mode] else "")
            results.measure(blocks, inputs, ["eager", *options.variants], what=what, mode=MODES[mode])
    for row in results.rows:
        row["letter"] = next((letter for letter, name in LETTERS.items() if name == row["variant"]), "")
    return results.finish("compile_graph", options.model)


if __name__ == "__main__":
    sys.exit(main())
