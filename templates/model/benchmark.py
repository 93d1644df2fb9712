"""The kernels of this project alone, against the formula in torch and torch.compile, then in the model, end to end.

    adze pack && python benchmark.py [--tiny] [--package FOLDER] [--json FILE] [--skip-model]

Each kernel is compared with the formula in double before it is timed. On a GPU the calls rotate through more memory
than the cache holds, in a CUDA graph. attention is compared with torch's own, also with each of its backends that
takes the call. Weights of the model are random. A language model also generates tokens, with generate() of
transformers and with adze.generate where the Python package adze is installed.

--installed takes the functions from an installed Python package in the place of package/: {{module}} is this
project's (pip install -e .), adze has those that it began with.
"""

import argparse
import functools
import importlib
import json
import pathlib
import statistics
import subprocess
import time
import warnings

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import inject
import model as place

OPS = [{{op_list}}]
COLD = 300 << 20  # bytes that the calls of a graph rotate through
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def rms_norm(x, weight):
    wide = x.float() if x.dtype != torch.float64 else x
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * normalised.to(x.dtype)


def modulated(x, scale, shift):
    """The norm of an AdaLN block: no weight, then 1 + scale and shift."""
    return rms_norm(x, torch.ones_like(x[0])) * (1 + scale) + shift


def rotated(x, cos, sin):
    """Pairs (i, i + head_dim / 2) of each head turn by the token's angles."""
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


def quantised(x):
    """int8 and the scale of each row."""
    scale = x.abs().amax(-1) / 127
    return (x / scale[:, None]).round().to(torch.int8), scale


def attended(q, k, v, backend=None):
    """As torch computes it: several queries are a prompt and see no later token, one sees all of them."""
    few_kv = k.shape[1] != q.shape[1]
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=few_kv)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=few_kv)


def attention_cases(kernel, tiny):
    """A prompt, and a token after some others."""
    heads, kv_heads, dim = (place.SHAPES[name] for name in ("heads", "kv_heads", "head_dim"))
    for queries, keys in [(8, 8), (1, 24)] if tiny else [(4096, 4096), (1, 1024), (1, 8192)]:
        yield (
            f"attention, {queries} of {keys}",
            "attention",
            attended,
            lambda q, k, v: kernel.attention(q, k, v, causal=q.shape[2] > 1),
            [(1, heads, queries, dim), (1, kv_heads, keys, dim), (1, kv_heads, keys, dim)],
        )


def cases(kernel, tiny):
    """(name, op, formula, kernel, shapes of the inputs) of each call that is timed."""
    rows, dim, hidden = place.SHAPES["tokens"][1], place.SHAPES["dim"], place.SHAPES["hidden"]
    heads, head_dim = place.SHAPES["heads"], place.SHAPES["head_dim"]
    known = [
        (
            "rms_norm",
            "rms_norm",
            rms_norm,
            lambda x, w: kernel.rms_norm(x, w, eps=1e-6, rounding=kernel.ROUND_NORM),
            [(rows, dim), (dim,)],
        ),
        (
            "rms_norm + modulation",
            "rms_norm",
            modulated,
            lambda x, a, b: kernel.rms_norm(x, scale=a, shift=b, eps=1e-6, rounding=kernel.ROUND_STEPS),
            [(rows, dim), (dim,), (dim,)],
        ),
        (
            "layer_norm",
            "layer_norm",
            lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-6),
            lambda x, w, b: kernel.layer_norm(x, w, b, eps=1e-6),
            [(rows, dim), (dim,), (dim,)],
        ),
        (
            "silu * up",
            "glu",
            lambda x, v: F.silu(x) * v,
            lambda x, v: kernel.glu(x, v, rounding=kernel.ROUND_STEPS),
            [(rows, hidden), (rows, hidden)],
        ),
        (
            "gelu * up (GEGLU)",
            "glu",
            lambda x, v: F.gelu(x) * v,
            lambda x, v: kernel.glu(x, v, act="gelu", rounding=kernel.ROUND_STEPS),
            [(rows, hidden), (rows, hidden)],
        ),
        (
            "gelu_tanh",
            "activation",
            lambda x: F.gelu(x, approximate="tanh"),
            lambda x: kernel.activation(x, "gelu_tanh"),
            [(rows, hidden)],
        ),
        ("softmax", "softmax", lambda x: F.softmax(x, -1), lambda x: kernel.softmax(x), [(rows, dim)]),
        (
            "residual + gate * x",
            "gated_add",
            lambda x, residual, gate: residual + gate * x,
            lambda x, residual, gate: kernel.gated_add(x, residual, gate, rounding=kernel.ROUND_STEPS),
            [(rows, dim), (rows, dim), (dim,)],
        ),
        (
            "rope",
            "rope",
            rotated,
            lambda x, cos, sin: kernel.rope(x, None, cos, sin, rounding=kernel.ROUND_STEPS),
            [(rows, heads, head_dim), (rows, head_dim), (rows, head_dim)],
        ),
        (
            "linear of a few tokens",
            "gemm",
            lambda x, w: x @ w.T,
            lambda x, w: kernel.gemm(x, w),
            [(place.SHAPES["tokens"][0], dim), (hidden, dim)],
        ),
        ("int8 weights", "quantize", quantised, lambda x: kernel.quantize(x, "i8"), [(hidden, dim)]),
    ]
    if tiny:
        known = [(*case[:4], [(8, *shape[1:]) if len(shape) > 1 else shape for shape in case[4]]) for case in known]
    return [case for case in [*known, *attention_cases(kernel, tiny)] if case[1] in OPS]


def peers(op, formula, inputs, tiny):
    """What the kernel is compared with, by name."""
    if op != "attention":
        return {"eager": formula} | ({} if tiny else {"compile": torch.compile(formula, dynamic=False)})
    found = {"torch": formula}
    with warnings.catch_warnings():  # torch says in warnings why a backend refuses
        warnings.simplefilter("ignore")
        for name, backend in BACKENDS.items():
            try:
                formula(*inputs, backend=backend)
                found[name] = functools.partial(formula, backend=backend)
            except RuntimeError:  # this backend does not take the call
                continue
    return found


def error(got, exact):
    """Of several results the last: an int8 may be off by one where x / scale lies between two numbers."""
    if isinstance(exact, tuple):
        got, exact = got[-1], exact[-1]
    return ((got.double() - exact).abs().max() / exact.abs().max()).item()


def time_cpu(call, sets):
    call(*sets[0])
    times = []
    for _ in range(7):
        start = time.perf_counter()
        call(*sets[0])
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def time_gpu(call, sets):
    """Microseconds of a call: every set once in a graph, the median of several replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        held = [call(*inputs) for inputs in sets]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = [call(*inputs) for inputs in sets]
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(held))
    return statistics.median(times)


def alone(kernel, options, device, dtype):
    for name, op, formula, call, shapes in cases(kernel, options.tiny):
        one = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
        size = sum(t.numel() * t.element_size() for t in one)
        sets = [one] + [[t.clone() for t in one] for _ in range(COLD // size if device == "cuda" else 0)]
        exact = formula(*(t.double() for t in one))
        result = call(*one)
        got, eager = error(result, exact), error(formula(*one), exact)
        assert got <= 2 * eager + torch.finfo(dtype).eps, (
            f"{name} is wrong: {got:.3g}, the formula in {dtype}: {eager:.3g}"
        )
        timed = time_gpu if device == "cuda" else time_cpu
        variants = {"kernel": call, **peers(op, formula, one, options.tiny)}
        us = {variant: timed(run, sets) for variant, run in variants.items()}
        moved = size + sum(t.numel() * t.element_size() for t in (result if isinstance(result, tuple) else [result]))
        row = {"case": name, "op": op, "shapes": shapes, "us": us, "gbps": moved / us["kernel"] / 1e3, "error": got}
        times = "  ".join(f"{variant} {value:.2f} us" for variant, value in us.items())
        print(f"{name:<22} {times}  {row['gbps']:.0f} GB/s", flush=True)
        yield row


def end_to_end(kernel, options, device, dtype):
    model, step = place.build(options.tiny, device, dtype)

    def timed():
        times = []
        for _ in range(4 if options.tiny else 12):
            start = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:]) * 1e3

    expected, ms = step(), {"eager": timed()}
    taken = inject.inject(model, kernel, OPS)
    got, ms["kernel"] = step(), timed()
    difference = (got.float() - expected.float()).abs().max().item()
    inject.remove(model)
    assert torch.equal(step(), expected), "the model is as it was"
    print(f"{place.NAME}: {taken}, largest difference {difference:.3g} of {expected.abs().max():.3g}")
    print(f"{place.NAME}:", *(f"{name} {value:.2f} ms" for name, value in ms.items()), sep="  ", flush=True)
    found = {"model": place.NAME, "taken": taken, "difference": difference, "ms": ms}
    if hasattr(place, "prompt"):
        found["generate"] = generated(kernel, model, options)
    return found


class Clock:
    """When the prompt and each token arrived: a streamer of transformers."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def by_transformers(model, ids, count):
    clock = Clock()
    tokens = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0, streamer=clock)
    return tokens[0, ids.shape[1] :].tolist(), clock.times


def by_adze(model, ids, count):
    """adze's own loop. A second call has the same cache, and with it the same CUDA graph."""
    import adze

    if not hasattr(model, "own_cache"):
        model.own_cache = adze.Cache(model, ids.shape[1] + count)
    model.own_cache.reset()
    tokens, times = [], [time.perf_counter()]
    for (token,) in adze.generate(model, ids, count, stop=(), cache=model.own_cache):
        tokens.append(token)
        times.append(time.perf_counter())
    return tokens, times


def generated(kernel, model, options):
    """Milliseconds for a prompt and for each token after it: without the kernels, with them, and adze's own loop."""
    ids, count = place.prompt(model, options.tiny), 4 if options.tiny else 32
    model.generation_config.eos_token_id = None  # random weights mean nothing by it
    rows, first = {}, None

    def measure(name, way):
        nonlocal first
        tokens, _ = way(model, ids, count)  # the first run captures graphs
        first = first or tokens
        prompts, each = [], []
        for _ in range(1 if options.tiny else 3):
            _, times = way(model, ids, count)
            ms = [(b - a) * 1e3 for a, b in zip(times, times[1:], strict=False)]
            prompts.append(ms[0])
            each += ms[1:]
        equal = sum(a == b for a, b in zip(tokens, first, strict=True)) / count
        rows[name] = {"prompt": statistics.median(prompts), "token": statistics.median(each), "equal": equal}
        print(f"{name:<22} prompt {rows[name]['prompt']:.2f} ms  token {rows[name]['token']:.2f} ms", flush=True)

    measure("generate()", by_transformers)
    inject.inject(model, kernel, OPS)
    measure("generate(), kernel", by_transformers)
    inject.remove(model)
    try:
        import adze
    except ImportError:
        print("adze.generate is left out: the Python package adze is not installed")
    else:
        handle = adze.patch(model, numerics="fast")
        measure("adze.generate", by_adze)
        handle.remove()
    return {"prompt": ids.shape[1], "tokens": count, "ways": rows}


def kernel_of(options):
    if options.installed:
        return importlib.import_module(options.installed)
    from kernels import get_local_kernel

    return get_local_kernel(options.package)


def said_by(*command):
    """What a program prints, or "unknown"."""
    try:
        folder = pathlib.Path(__file__).parent
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def where(device, options):
    """The machine and the day, as a record needs them."""
    ask = ["nvidia-smi", "--id=0", "--format=csv,noheader"]
    clocks = "--query-gpu=clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {
        "adze_project": "{{name}}",
        "kernels": options.installed or "package/",
        "machine": {"gpu" if device == "cuda" else "cpu": name, "torch": torch.__version__},
        "driver": said_by(*ask, "--query-gpu=driver_version") if device == "cuda" else "",
        "clocks": said_by(*ask, clocks) if device == "cuda" else "",
        "commit": options.commit or said_by("git", "describe", "--always", "--dirty"),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def record(options, results):
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes and a small model, for tests")
    parser.add_argument("--package", type=pathlib.Path, default=pathlib.Path(__file__).with_name("package"))
    parser.add_argument("--json", type=pathlib.Path, help="record the results")
    parser.add_argument("--skip-model", action="store_true", help="the kernels alone")
    parser.add_argument("--installed", metavar="MODULE", help="an installed Python package instead of package/")
    parser.add_argument("--commit", help="what the kernels were built from, where git cannot say")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    kernel = kernel_of(options)
    results = where(device, options) | {"rows": list(alone(kernel, options, device, dtype))}
    record(options, results)  # kept, should the model not fit this machine
    if not options.skip_model:
        record(options, results | {"end_to_end": end_to_end(kernel, options, device, dtype)})


if __name__ == "__main__":
    main()
