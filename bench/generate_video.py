"""LTX-Video's transformer, a denoising step at a time: eager, compiled, patched by adze, and combinations.

    python3 bench/generate_video.py                                     every variant, 2B, 49 frames of 512x768
    python3 bench/generate_video.py --use-optimized-kernels --compile   eager, and adze + compile
    python3 bench/generate_video.py --model PATH                        the whole pipeline of a local checkpoint
    python3 bench/generate_video.py --flux                              FLUX.1-dev, 1024x1024

Weights are random unless a checkpoint is given. Each variant's output is compared with eager's before it is timed.
"""

import sys

import diffusers
import torch

import models

TEMPORAL, SPATIAL, FRAME_RATE = 8, 32, 25  # LTX-Video's compression, and the rate of its pipeline
TINY_LTX = dict(
    in_channels=8,
    out_channels=8,
    num_attention_heads=4,
    attention_head_dim=64,
    cross_attention_dim=256,
    caption_channels=128,
    num_layers=2,
)
TINY_FLUX = dict(
    in_channels=8,
    num_layers=1,
    num_single_layers=1,
    num_attention_heads=2,
    joint_attention_dim=64,
    pooled_projection_dim=64,
)


def ltx(options):
    """The transformer and a step's inputs; LTX-Video 2B is what the class constructs by default."""
    model = models.build(lambda: diffusers.LTXVideoTransformer3DModel(**(TINY_LTX if options.tiny else {})), options)
    frames = (options.num_frames - 1) // TEMPORAL + 1
    height, width = options.height // SPATIAL, options.width // SPATIAL
    batch, device = options.batch_size, options.device
    text = models.rand(options, batch, options.text_tokens, model.config.caption_channels, seed=2)
    return model, {
        "hidden_states": models.rand(options, batch, frames * height * width, model.config.in_channels),
        "encoder_hidden_states": text,
        "timestep": torch.full((batch,), 500.0, device=device),
        "encoder_attention_mask": torch.ones(batch, options.text_tokens, dtype=torch.bool, device=device),
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (TEMPORAL / FRAME_RATE, SPATIAL, SPATIAL),
        "return_dict": False,
    }


def flux(options):
    """FLUX.1-dev: an image token is 16x16 pixels."""
    sizes = TINY_FLUX if options.tiny else {}
    model = models.build(lambda: diffusers.FluxTransformer2DModel(**sizes, guidance_embeds=True), options)
    height, width, batch, device = options.height // 16, options.width // 16, options.batch_size, options.device
    rows = torch.arange(height, device=device).float()[:, None].expand(height, width)
    columns = torch.arange(width, device=device).float()[None].expand(height, width)
    config = model.config
    text = models.rand(options, batch, options.text_tokens, config.joint_attention_dim, seed=2)
    return model, {
        "hidden_states": models.rand(options, batch, height * width, config.in_channels),
        "encoder_hidden_states": text,
        "pooled_projections": models.rand(options, batch, config.pooled_projection_dim, seed=3),
        "img_ids": torch.stack((torch.zeros_like(rows), rows, columns), -1).reshape(-1, 3),
        "txt_ids": torch.zeros(options.text_tokens, 3, device=device),
        "timestep": torch.full((batch,), 0.5, device=device),
        "guidance": torch.full((batch,), 3.5, device=device),
        "return_dict": False,
    }


class Generation(torch.nn.Module):
    """A pipeline as a module: a call is a whole generation. Its transformer is what variants change."""

    def __init__(self, options):
        super().__init__()
        self.pipeline = diffusers.DiffusionPipeline.from_pretrained(
            options.model, dtype=models.DTYPES[options.dtype], local_files_only=True
        )
        self.pipeline.to(options.device).set_progress_bar_config(disable=True)
        self.options = options

    def first_call(self):
        """The arguments of the transformer's first call."""
        kept = []
        hook = self.pipeline.transformer.register_forward_pre_hook(
            lambda module, args, kwargs: kept.append(kwargs) if not args else None, with_kwargs=True
        )
        try:
            self(self.pipeline.transformer, steps=1)
        finally:
            hook.remove()
        if not kept:
            raise SystemExit("the pipeline calls its transformer with positional arguments")
        return kept[0]

    def forward(self, transformer, steps=None):
        options, own = self.options, self.pipeline.transformer
        call = {} if options.flux else {"num_frames": options.num_frames}
        call |= dict(height=options.height, width=options.width, num_inference_steps=steps or options.steps)
        call["prompt"] = ["a river in the mountains at dawn, seen from above"] * options.batch_size
        call["max_sequence_length"] = options.text_tokens
        self.pipeline.register_modules(transformer=transformer)
        try:
            generator = torch.Generator(options.device).manual_seed(0)
            return self.pipeline(**call, generator=generator, output_type="pt", return_dict=False)[0]
        finally:
            self.pipeline.register_modules(transformer=own)


def chosen(options):
    """The variants: those of --variants, or what the switches say, or all."""
    if options.use_optimized_kernels is None and not options.compile and not options.graph:
        return models.variants(options)
    parts = [part for part in ("compile", "graph") if getattr(options, part)]
    if options.use_optimized_kernels:
        parts.insert(0, "adze")
    elif "compile" not in parts:
        parts.insert(0, "eager")
    options.variants = [" + ".join(parts)]
    return models.variants(options)


def main():
    parser = models.parser(__doc__, steps=30)
    switch = parser.add_mutually_exclusive_group()
    switch.add_argument(
        "--use-optimized-kernels", action="store_true", default=None, help="adze, compared with eager"
    )
    switch.add_argument("--no-optimized-kernels", dest="use_optimized_kernels", action="store_false")
    parser.add_argument("--compile", action="store_true", help="torch.compile, alone or of the patched model")
    parser.add_argument("--regional", action="store_true", help="compile the repeated blocks, not the whole model")
    parser.add_argument("--graph", action="store_true", help="CUDA graphs of what was chosen")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--num-frames", type=int, help="(49)")
    parser.add_argument("--height", type=int, help="(512; FLUX 1024)")
    parser.add_argument("--width", type=int, help="(768; FLUX 1024)")
    parser.add_argument("--text-tokens", type=int, help="(128; FLUX 512)")
    parser.add_argument("--flux", action="store_true", help="FLUX.1-dev instead")
    parser.add_argument("--model", metavar="PATH", help="a local diffusers checkpoint: its whole pipeline is timed")
    options = parser.parse_args()
    sizes = dict(num_frames=1, height=1024, width=1024, text_tokens=512) if options.flux else {}
    sizes = sizes or dict(num_frames=49, height=512, width=768, text_tokens=128)
    if options.tiny:
        sizes = dict(num_frames=1 if options.flux else 9, height=64, width=96, text_tokens=16)
    for name, value in sizes.items():
        setattr(options, name, getattr(options, name) or value)
    names = chosen(options)
    results = models.Comparison(options)
    if options.model:
        whole_pipeline(results, names)
        return results.finish("generate_video", "pipeline")
    model, inputs = (flux if options.flux else ltx)(options)
    results.measure(model, inputs, names, what="FLUX.1-dev step" if options.flux else "LTX-Video step")
    return results.finish("generate_video", "FLUX.1-dev" if options.flux else "LTX-Video 2B")


def whole_pipeline(results, names):
    """The transformer's first call is checked and timed; then whole generations are."""
    options = results.options
    with torch.no_grad():
        generation = Generation(options)
        inputs = generation.first_call()
        transformer = generation.pipeline.transformer
        results.measure(transformer, inputs, names, what="transformer step", whole=generation)


if __name__ == "__main__":
    sys.exit(main())
