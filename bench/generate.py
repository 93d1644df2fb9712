"""transformers' own generate() with Qwen3-8B or Llama-2-7B, batch 1: ms for a prompt, and ms for each token after it.

    python3 bench/generate.py [--model llama-2-7b] [--context 512] [--tokens 32] [--rounds 3] [--json FILE]

Variants are "eager", "adze" (patched), and with cache_implementation="static" "compile" and "adze + compile": there
transformers itself compiles the decoding. Weights are random. Tokens are chosen greedily, and each variant has the
share of tokens that are equal to eager's. Variants take turns, so that all run at the same clocks. Times are taken in
a streamer, as a user sees tokens arrive.
"""

import copy
import statistics
import sys
import time

import qwen3
import torch
import transformers
from transformers.generation.streamers import BaseStreamer

import adze
import models

VARIANTS = ["eager", "adze", "compile", "adze + compile"]


class Clock(BaseStreamer):
    """Records when the prompt and each token arrived."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def sharing_weights(model):
    """A second model with the same parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def settings(variant, options):
    made = transformers.GenerationConfig(
        max_new_tokens=options.tokens, do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0
    )
    if "compile" in variant:
        made.cache_implementation = "static"
        if options.device == "cpu":  # where transformers does not compile by itself
            made.compile_config = transformers.CompileConfig()
            made.compile_config._compile_all_devices = True
    return made


def once(model, prompt, variant, options):
    """Tokens, ms for the prompt, ms for each token after the first."""
    clock = Clock()
    models.synchronize(options.device)
    with torch.no_grad():
        tokens = model.generate(prompt, generation_config=settings(variant, options), streamer=clock)
    ms = [(b - a) * 1000 for a, b in zip(clock.times, clock.times[1:], strict=False)]
    return tokens[0, prompt.shape[1] :].tolist(), ms[0], ms[1:]


def chosen(options):
    unknown = [name for name in options.variants or [] if name not in VARIANTS]
    if unknown:
        raise SystemExit(f"there is no variant {unknown[0]!r}; there are {', '.join(VARIANTS)}")
    return [name for name in VARIANTS if name == "eager" or name in (options.variants or VARIANTS)]


def measure(model, prompt, options):
    """Rows, as the other benchmarks of models have them."""
    names, patched = chosen(options), sharing_weights(model)
    adze.patch(patched)
    of = {variant: patched if variant.startswith("adze") else model for variant in names}
    with models.turn(options.turn):
        for variant in models.progress(names, "first runs"):  # they compile, and record CUDA graphs
            once(of[variant], prompt, variant, options)
            once(of[variant], prompt, variant, options)
        found = {variant: [] for variant in names}
        for _ in models.progress([f"{i + 1}" for i in range(options.rounds)], "round"):
            for variant in names:
                found[variant].append(once(of[variant], prompt, variant, options))
    rows, eager = [], found["eager"][0][0]
    for variant, runs in found.items():
        equal = statistics.mean(a == b for tokens, *_ in runs for a, b in zip(tokens, eager, strict=True))
        prompts, each = [ms for _, ms, _ in runs], [ms for *_, all_ms in runs for ms in all_ms]
        for what, ms in ((f"prompt of {options.context}", prompts), ("a token", each)):
            rows.append({"what": f"generate(), {what}", "variant": variant, **models.summary(ms), "equal": equal})
    return rows


def main():
    parser = models.parser(__doc__)
    parser.add_argument("--model", choices=qwen3.FULL, default="qwen3-8b")
    parser.add_argument("--context", type=int, help="tokens of the prompt (512)")
    parser.add_argument("--tokens", type=int, help="tokens that are generated (32)")
    parser.add_argument("--rounds", type=int, default=3, help="times that each variant is timed (3)")
    options = parser.parse_args()
    options.context = options.context or (16 if options.tiny else 512)
    options.tokens = options.tokens or (6 if options.tiny else 32)
    model = models.build(
        lambda: transformers.AutoModelForCausalLM.from_config(
            qwen3.config(options.model, options.tiny),
            dtype=models.DTYPES[options.dtype],
            attn_implementation="sdpa",
        ),
        options,
    )
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (1, options.context), generator=generator).to(options.device)
    rows = measure(model, prompt, options)
    width = max(len(row["what"]) for row in rows)
    for row in sorted(rows, key=lambda row: row["what"]):
        times = f"{row['ms']:9.3f} ms, spread {100 * row['spread']:.1f} %"
        print(f"{row['what']:{width}}  {row['variant']:14}  {times}, {100 * row['equal']:.1f} % of eager's tokens")
    models.write_json(options, {"script": "generate", "model": options.model, "left_out": [], "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
