"""adze inside a diffusers transformer: what is replaced, how far the output moves, and the time of a step.

python examples/diffusers_injection.py                          a small LTX-Video transformer with random weights
python examples/diffusers_injection.py path/of/a/pipeline       its transformer, two steps of the pipeline
"""

import argparse
import statistics
import time

import diffusers
import torch

import adze


def random_ltx(dtype, device):
    """An LTX-Video transformer of two blocks, and a function that runs one step of it."""
    torch.manual_seed(0)
    model = diffusers.LTXVideoTransformer3DModel(
        num_attention_heads=4, attention_head_dim=64, cross_attention_dim=256, caption_channels=256, num_layers=2
    )
    model = model.eval().to(device, dtype)
    frames, height, width = 4, 8, 8
    inputs = {
        "hidden_states": torch.randn(1, frames * height * width, 128),
        "encoder_hidden_states": torch.randn(1, 64, 256),
        "timestep": torch.tensor([500.0]),
        "encoder_attention_mask": torch.ones(1, 64),
    }
    inputs = {name: value.to(device, dtype) for name, value in inputs.items()}
    return model, lambda: model(**inputs, num_frames=frames, height=height, width=width, return_dict=False)[0]


def pipeline(path, dtype, device):
    """A pipeline's transformer or UNet, and a function that runs two steps of the pipeline from the same noise."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(path, torch_dtype=dtype).to(device)
    pipe.set_progress_bar_config(disable=True)
    model = getattr(pipe, "transformer", None) or pipe.unet

    def run():
        generator = torch.Generator("cpu").manual_seed(0)
        return pipe("a lighthouse", num_inference_steps=2, output_type="latent", generator=generator)[0]

    return model, run


def timed(step, device, runs=5):
    """Milliseconds of a step: the median of some, after one that is not counted."""
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", help="a diffusers pipeline on this machine")
    parser.add_argument("--numerics", choices=["match", "fast"], default="match")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, step = pipeline(options.path, dtype, device) if options.path else random_ltx(dtype, device)

    expected, before = step(), timed(step, device)
    handle = adze.patch(model, numerics=options.numerics)
    found, after = step(), timed(step, device)
    print(handle.report())
    difference = (found - expected).abs().max().item()
    print(f"largest difference {difference:.3g}, largest value {expected.abs().max().item():.3g}")
    print(f"{before:.2f} ms a step before, {after:.2f} ms a step with adze ({device}, {dtype})")
    handle.remove()
    assert torch.equal(step(), expected), "the model is as it was"


if __name__ == "__main__":
    main()
