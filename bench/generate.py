"""Language models as users run them, Qwen3-8B or Llama-2-7B: ms for a prompt, and ms for each token after it.

    python3 bench/generate.py [--model llama-2-7b] [--context 512] [--tokens 32] [--batch 1] [--json FILE]

Variants of transformers' own generate() are "eager", "adze" (patched), "adze fast" (with numerics="fast", which
replays a graph for each token), "adze fast, launched" (the same without that graph), and with
cache_implementation="static" "compile" and "adze + compile": there transformers itself compiles the decoding.
"adze.generate" is adze's own loop with the model of "adze fast"; "adze.generate, int8" and so on have quantized
weights. Weights are random. Tokens are chosen greedily, and each variant has the share of tokens that are equal to
eager's. Variants take turns, so that all run at the same clocks. Times are taken as a user sees tokens arrive.
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

LOOP = "adze.generate"  # and with quantized weights "adze.generate, int8"
LAUNCHED = "adze fast, launched"
QUANTIZED = ["int8", "int4-g128", "fp8"]
VARIANTS = [
    "eager",
    "adze",
    "adze fast",
    LAUNCHED,
    "compile",
    "adze + compile",
    LOOP,
    *(f"{LOOP}, {kind}" for kind in QUANTIZED),
]


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
    if variant == LAUNCHED:
        made.disable_compile = True
    if "compile" in variant:
        made.cache_implementation = "static"
        if options.device == "cpu":  # where transformers does not compile by itself
            made.compile_config = transformers.CompileConfig()
            made.compile_config._compile_all_devices = True
    return made


def looped(model, prompt, options, caches):
    """The tokens of adze.generate, [batch][token], and when they arrived. A model's second run has its cache again,
    and with it the captured graph."""
    cache = caches.setdefault(model, adze.Cache(model, options.context + options.tokens))
    cache.reset()
    rows, times = [], [time.perf_counter()]
    for row in adze.generate(model, prompt, options.tokens, stop=(), cache=cache):
        times.append(time.perf_counter())
        rows.append(row)
    return [list(tokens) for tokens in zip(*rows, strict=True)], times


def once(model, prompt, variant, options, caches):
    """Tokens, ms for the prompt, ms for each token after the first."""
    models.synchronize(options.device)
    with torch.no_grad():
        if variant.startswith(LOOP):
            tokens, times = looped(model, prompt, options, caches)
        else:
            clock = Clock()
            made = model.generate(prompt, generation_config=settings(variant, options), streamer=clock)
            tokens, times = made[:, prompt.shape[1] :].tolist(), clock.times
    ms = [(b - a) * 1000 for a, b in zip(times, times[1:], strict=False)]
    return tokens, ms[0], ms[1:]


def kernels(model, prompt, options, caches):
    """Where the GPU's time goes in a token of adze.generate, after the prompt and a few tokens."""
    cache, count = caches[model], options.tokens // 2
    cache.reset()
    tokens = adze.generate(model, prompt, options.tokens, stop=(), cache=cache)
    for _ in range(options.tokens - count):
        next(tokens)
    work = models.work_of(lambda: [next(tokens) for _ in range(count)])
    tokens.close()
    made = sum("sample" in name for *_, name in work)  # the loop may be ahead of the tokens that it gives
    return models.by_kernel(work, made or count)


def way_of(variant):
    """What is done to the model of a variant: nothing, a patch by its numerics, or quantization by its kind."""
    if variant in ("eager", "compile"):
        return "eager"
    if variant in ("adze", "adze + compile"):
        return "match"
    kind = variant.partition(", ")[2]
    return kind if kind in QUANTIZED else "fast"


def variants_of(model, names):
    """A model for each variant; all share the parameters that are not quantized."""
    made = {"eager": model}
    for way in {way_of(variant): None for variant in names if way_of(variant) != "eager"}:
        made[way] = sharing_weights(model)
        if way in QUANTIZED:
            adze.quantize(made[way], way, progress=False)
        adze.patch(made[way], numerics="match" if way == "match" else "fast")
    return {variant: made[way_of(variant)] for variant in names}


def chosen(options):
    unknown = [name for name in options.variants or [] if name not in VARIANTS]
    if unknown:
        raise SystemExit(f"there is no variant {unknown[0]!r}; there are {', '.join(VARIANTS)}")
    return [name for name in VARIANTS if name == "eager" or name in (options.variants or VARIANTS)]


def measure(model, prompt, options):
    """Rows, as the other benchmarks of models have them."""
    names, caches = chosen(options), {}
    of = variants_of(model, names)
    with models.turn(options.turn):
        for variant in models.progress(names, "first runs"):  # they compile, and record CUDA graphs
            once(of[variant], prompt, variant, options, caches)
            once(of[variant], prompt, variant, options, caches)
        found = {variant: [] for variant in names}
        for _ in models.progress([f"{i + 1}" for i in range(options.rounds)], "round"):
            for variant in names:
                found[variant].append(once(of[variant], prompt, variant, options, caches))
        loops = [name for name in names if name.startswith(LOOP) and options.device == "cuda"]
        parts_of = {name: kernels(of[name], prompt, options, caches) for name in loops}
    rows, eager = [], found["eager"][0][0]
    for variant, runs in found.items():
        pairs = [pair for tokens, *_ in runs for pair in zip(tokens, eager, strict=True)]
        equal = [a == b for own, other in pairs for a, b in zip(own, other, strict=True)]
        prompts, each = [ms for _, ms, _ in runs], [ms for *_, all_ms in runs for ms in all_ms]
        whole = [ms + sum(all_ms) for _, ms, all_ms in runs]
        parts = {
            f"prompt of {options.context}": prompts,
            "a token": each,
            f"prompt and {options.tokens} tokens": whole,
        }
        for what, ms in parts.items():
            what = f"generate(), {what}" + (f", batch {options.batch}" if options.batch > 1 else "")
            rows.append({"what": what, "variant": variant, **models.summary(ms), "equal": statistics.mean(equal)})
            if variant in parts_of and ms is each:
                rows[-1]["kernels"] = parts_of[variant]
    return rows


def main():
    parser = models.parser(__doc__)
    parser.add_argument("--model", choices=qwen3.FULL, default="qwen3-8b")
    parser.add_argument("--context", type=int, help="tokens of the prompt (512)")
    parser.add_argument("--tokens", type=int, help="tokens that are generated (32)")
    parser.add_argument("--batch", type=int, default=1, help="prompts at once (1)")
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
    prompt = torch.randint(model.config.vocab_size, (options.batch, options.context), generator=generator).to(
        options.device
    )
    rows = measure(model, prompt, options)
    width = max(len(row["what"]) for row in rows)
    for row in sorted(rows, key=lambda row: row["what"]):
        times = f"{row['ms']:9.3f} ms, spread {100 * row['spread']:.1f} %"
        equal = f"{100 * row['equal']:.1f} % of eager's tokens"
        print(f"{row['what']:{width}}  {row['variant']:24}  {times}, {equal}")
    models.write_json(options, {"script": "generate", "model": options.model, "left_out": [], "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
