"""The kernels of this project alone, against the formula in torch and torch.compile, then in the model, end to end.

    adze pack && python benchmark.py [--tiny] [--package FOLDER] [--json FILE] [--skip-model]

The norms of the model (calls() in model.py) are compared with its own code, other calls with their formula in torch.
Each kernel is verified against the same in double before it is timed. Variants take turns. On a GPU a call is timed
in a CUDA graph of 20 to 500 calls, which begins with cold caches and does not come back to an input before more
memory was read than they hold. A share is that of torch's copy of a large tensor in the same run; calls that write
little may exceed it, and `make bench` has the ceiling of each mix of reads and writes. attention is compared with
torch's own, also with each of its backends that takes the call; results are laid out as the model needs them.

The model has random weights. It runs as it is, with the kernels, with torch.compile, with both, and on a GPU as CUDA
graphs, without the time of launches. A language model also generates tokens, with generate() of transformers.

--installed takes the functions from an installed Python package in the place of package/: {{module}} is this
project's (pip install -e .), adze has those that it began with.
"""

import argparse
import contextlib
import copy
import fcntl
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
COLD = 300 << 20  # bytes that the calls of a graph rotate through: more than any cache holds
CALLS = 20, 500  # of a graph: fewer measure its launch, more take long to capture
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def modulated(x, scale, shift):
    """The norm of an AdaLN block: no weight, then 1 + scale and shift."""
    wide = x.float() if x.dtype != torch.float64 else x
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return normalised.to(x.dtype) * (1 + scale) + shift


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


def laid_out(function, *inputs):
    """torch's attention and the copy that the model makes of its result; free where it lies so already."""
    return function(*inputs).transpose(1, 2).contiguous().transpose(1, 2)


def attend(kernel, q, k, v):
    """This project's, as attention.py calls it: written as the model goes on with it."""
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
    return kernel.attention(q, k, v, causal=q.shape[2] > 1, out=out)


def flops(op, shapes):
    """Those of a call that may be bound by arithmetic; 0 of others, which move memory."""
    if op == "gemm":
        return 2 * shapes[0][0] * shapes[0][1] * shapes[1][0]
    if op != "attention" or shapes[0][2] == 1:
        return 0
    batch, heads, queries, dim = shapes[0]
    return 4 * batch * heads * dim * queries * (queries + 1) / 2  # a query sees itself and what is before it


def attention_cases(kernel, tiny):
    """A prompt, and a token after some others."""
    heads, kv_heads, dim = (place.SHAPES[name] for name in ("heads", "kv_heads", "head_dim"))
    for queries, keys in [(8, 8), (1, 24)] if tiny else [(4096, 4096), (1, 1024), (1, 8192)]:
        yield (
            f"attention, {queries} of {keys}",
            "attention",
            attended,
            functools.partial(attend, kernel),
            [(1, heads, queries, dim), (1, kv_heads, keys, dim), (1, kv_heads, keys, dim)],
        )


def own_code(module):
    """The module's own forward, and that of a copy in double for inputs in double."""
    wide = copy.deepcopy(module).double()

    def own(x):
        chosen = wide if x.dtype == torch.float64 else module
        return type(chosen).forward(chosen, x)

    return own


def model_cases(kernel, tiny, device, dtype):
    """The norms as the model calls them, for prompts and for a token. Modules with matrices are left out: calls would
    find them in the cache."""
    for tokens in [3] if tiny else place.SHAPES["tokens"]:
        for name, op, module, shape in place.calls(tokens):
            if op not in OPS or any(weight.ndim > 1 for weight in module.parameters()):
                continue
            module = module.to(device, dtype).requires_grad_(False)
            size = " x ".join(map(str, shape[1:]))
            yield (
                f"{name}, {size}",
                op,
                own_code(module),
                functools.partial(place.forwards(kernel)[op][type(module)], module),
                [shape],
            )


def cases(kernel, tiny, device, dtype):
    """(name, op, formula, kernel, shapes of the inputs) of each call that is timed."""
    rows, dim, hidden = place.SHAPES["tokens"][-1], place.SHAPES["dim"], place.SHAPES["hidden"]
    heads, head_dim = place.SHAPES["heads"], place.SHAPES["head_dim"]

    def modulate(x, scale, shift):
        return kernel.rms_norm(x, scale=scale, shift=shift, eps=1e-6, rounding=kernel.ROUND_STEPS)

    def geglu(x, up):
        return kernel.glu(x, up, act="gelu", rounding=kernel.ROUND_STEPS)

    known = [
        (
            "rms_norm + modulation",
            "rms_norm",
            modulated,
            modulate,
            [(rows, dim), (dim,), (dim,)],
        ),
        (
            "layer_norm, weight and bias",
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
            geglu,
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
            "linear of a token, wide",
            "gemm",
            lambda x, w: x @ w.T,
            lambda x, w: kernel.gemm(x, w),
            [(1, dim), (hidden, dim)],
        ),
        ("int8 weights", "quantize", quantised, lambda x: kernel.quantize(x, "i8"), [(hidden, dim)]),
    ]
    if tiny:
        known = [(*case[:4], [(8, *shape[1:]) if len(shape) > 1 else shape for shape in case[4]]) for case in known]
    if hasattr(place, "prompt"):  # a language model has neither
        known = [case for case in known if case[3] not in (modulate, geglu)]
    others = [case for case in [*known, *attention_cases(kernel, tiny)] if case[1] in OPS]
    return [*model_cases(kernel, tiny, device, dtype), *others]


def peers(op, formula, inputs, tiny):
    """What the kernel is compared with, by name."""
    torch._dynamo.reset()  # Dynamo limits how often it compiles the same function
    if op != "attention":
        return {"eager": formula} | ({} if tiny else {"compile": torch.compile(formula, dynamic=False)})
    found = {"torch": functools.partial(laid_out, formula)}
    with warnings.catch_warnings():  # torch says in warnings why a backend refuses
        warnings.simplefilter("ignore")
        for name, backend in BACKENDS.items():
            try:
                formula(*inputs, backend=backend)
                found[name] = functools.partial(laid_out, functools.partial(formula, backend=backend))
            except RuntimeError:  # this backend does not take the call
                continue
    return found


def error(got, exact):
    """Of several results the last: an int8 may be off by one where x / scale lies between two numbers."""
    if isinstance(exact, tuple):
        got, exact = got[-1], exact[-1]
    return ((got.double() - exact).abs().max() / exact.abs().max()).item()


# ---- Time ----


def captured(run):
    """A function that replays the work of `run` as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = run()
    return lambda: (graph.replay(), held)[1]


def in_turns(ways, rounds, before=lambda name: None, device="cpu"):
    """{name: microseconds} of functions that take turns: the median, after a round that does not count."""
    times = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, run in ways.items():
            before(name)
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:
                times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def over(call, sets, count):
    """A function of `count` calls, which takes the sets in turn. Results are kept until their set comes again, so
    that they do not all lie in the same memory."""

    def run():
        held = [None] * len(sets)
        for i in range(count):
            held[i % len(sets)] = call(*sets[i % len(sets)])
        return held

    return run


@contextlib.contextmanager
def turn(path):
    """Holds a lock on the file. Other processes may build models and compile meanwhile, but not measure."""
    if not path:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def time_calls(ways, one, size, device):
    """{name: microseconds of one call}; `size` is the bytes of the inputs."""
    if device != "cuda":
        return in_turns({name: functools.partial(call, *one) for name, call in ways.items()}, 7)
    sets = [one] + [[t.clone() for t in one] for _ in range(min(COLD // size, CALLS[1] - 1))]
    count = max(CALLS[0], len(sets))
    graphs = {name: captured(over(call, sets, count)) for name, call in ways.items()}
    other = torch.zeros(COLD // 4, dtype=torch.int32, device=device)
    times = {name: [] for name in ways}
    for _ in range(9):
        for name, replay in graphs.items():
            other.sum()  # the caches have this now, and nothing that must be written back
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / count)
    return {name: statistics.median(each) for name, each in times.items()}


def copy_rate(device):
    """GB/s, read and written together, of torch's copy of a large tensor."""
    x = torch.zeros((256 if device == "cuda" else 64) << 18, dtype=torch.int32, device=device)
    y, size = torch.empty_like(x), 2 * x.numel() * x.element_size()
    return size / time_calls({"copy": lambda x: y.copy_(x)}, [x], size, device)["copy"] / 1e3


def alone(kernel, options, device, dtype):
    with turn(options.turn):
        copied = copy_rate(device)
    print(f"copy: {copied:.0f} GB/s", flush=True)
    for name, op, formula, call, shapes in cases(kernel, options.tiny, device, dtype):
        one = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
        size = sum(t.numel() * t.element_size() for t in one)
        exact = formula(*(t.double() for t in one))
        result = call(*one)
        got, eager = error(result, exact), error(formula(*one), exact)
        # A model's norm computes in float32, of doubles too: in float32 what is exact here is itself off by an eps.
        allowed = 2 * eager + (2 if dtype == torch.float32 else 1) * torch.finfo(dtype).eps
        assert got <= allowed, f"{name} is wrong: {got:.3g}, the formula in {dtype}: {eager:.3g}"
        ways = {"kernel": call, **peers(op, formula, one, options.tiny)}
        for way in ways.values():
            way(*one)  # compiles
        with turn(options.turn):
            us = time_calls(ways, one, size, device)
        moved = size + sum(t.numel() * t.element_size() for t in (result if isinstance(result, tuple) else [result]))
        row = {"case": name, "op": op, "shapes": shapes, "us": us, "gbps": moved / us["kernel"] / 1e3, "error": got}
        row |= {"copy_gbps": copied, "tflops": flops(op, shapes) / us["kernel"] / 1e6}
        times = "  ".join(f"{variant} {value:.2f} us" for variant, value in us.items())
        rate = f"{row['gbps']:.0f} GB/s" + (f", {row['gbps'] / copied:.0%} of copy" if device == "cuda" else "")
        rate += f", {row['tflops']:.1f} TFLOP/s" if row["tflops"] else ""
        print(f"{name:<36} {times}  {rate}", flush=True)
        yield row


def end_to_end(kernel, options, device, dtype, keep):
    """Milliseconds of a step. Compiled ones come last, since launches cost more after a compiler has run. They do not
    take turns: the compiler is told of one state of the model. `keep` records what is known so far."""
    model, step = place.build(options.tiny, device, dtype)
    expected, rounds, taken, ms = step(), 3 if options.tiny else 11, {}, {}
    found = {"model": place.NAME, "taken": taken, "difference": 0.0, "ms": ms}
    states = {"eager": "compile", "kernel": "kernel + compile"}

    def set_to(name):
        inject.remove(model)
        if name.startswith("kernel"):
            taken.update(inject.inject(model, kernel, OPS))

    def measure(ways, before=lambda name: None):
        with turn(options.turn):
            times = in_turns(ways, rounds, before, device)
        ms.update({name: us / 1e3 for name, us in times.items()})
        print(f"{place.NAME}:", *(f"{name} {ms[name]:.2f} ms" for name in ways), sep="  ", flush=True)
        keep(found)

    def captured_or_not(name):
        set_to(name)
        try:
            return captured(step)
        except RuntimeError as why:
            print(f"{name} + graph is left out: {str(why).splitlines()[0]}")

    set_to("kernel")
    found["difference"] = (step().float() - expected.float()).abs().max().item()
    print(f"{place.NAME}: {taken}, largest difference {found['difference']:.3g} of {expected.abs().max():.3g}")
    measure(dict.fromkeys(states, step), set_to)
    if device == "cuda":
        graphs = {f"{name} + graph": captured_or_not(name) for name in states}
        measure({name: replay for name, replay in graphs.items() if replay})
    set_to("eager")
    assert torch.equal(step(), expected), "the model is as it was"
    if hasattr(place, "prompt"):
        with turn(options.turn):
            found["generate"] = generated(kernel, model, options)
        keep(found)
    for name, compiled in states.items():
        set_to(name)
        torch._dynamo.reset()
        fast = torch.compile(step, **({"backend": "eager"} if options.tiny else {"dynamic": False}))
        try:
            fast()
            measure({compiled: fast})
        except RuntimeError as why:
            print(f"{compiled} is left out: {str(why).splitlines()[0]}")


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


def generated(kernel, model, options):
    """Milliseconds for a prompt and for each token after it, without the kernels and with them."""
    ids, count = place.prompt(model, options.tiny), 4 if options.tiny else 32
    model.generation_config.eos_token_id = None  # random weights mean nothing by it
    rows, first = {}, None

    def measure(name):
        nonlocal first
        tokens, _ = by_transformers(model, ids, count)
        first = first or tokens
        prompts, each = [], []
        for _ in range(1 if options.tiny else 3):
            _, times = by_transformers(model, ids, count)
            ms = [(b - a) * 1e3 for a, b in zip(times, times[1:], strict=False)]
            prompts.append(ms[0])
            each += ms[1:]
        equal = sum(a == b for a, b in zip(tokens, first, strict=True)) / count
        rows[name] = {"prompt": statistics.median(prompts), "token": statistics.median(each), "equal": equal}
        print(f"{name:<22} prompt {rows[name]['prompt']:.2f} ms  token {rows[name]['token']:.2f} ms", flush=True)

    measure("generate()")
    inject.inject(model, kernel, OPS)
    measure("generate(), kernel")
    inject.remove(model)
    return {"prompt": ids.shape[1], "tokens": count, "ways": rows}


def package_here():
    """package/ of the project; in a repository of the Hub this file is in its folder benchmarks/."""
    package = pathlib.Path(__file__).resolve().with_name("package")
    return package if package.exists() else package.parents[1]


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
    parser.add_argument("--package", type=pathlib.Path, default=package_here())
    parser.add_argument("--json", type=pathlib.Path, help="record the results")
    parser.add_argument("--skip-model", action="store_true", help="the kernels alone")
    parser.add_argument("--installed", metavar="MODULE", help="an installed Python package instead of package/")
    parser.add_argument("--commit", help="what the kernels were built from, where git cannot say")
    parser.add_argument("--turn", metavar="FILE", help="a lock file: processes that name it take turns to measure")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    kernel = kernel_of(options)
    results = where(device, options) | {"rows": list(alone(kernel, options, device, dtype))}
    record(options, results)  # kept, should the model not fit this machine
    if not options.skip_model:
        end_to_end(kernel, options, device, dtype, lambda found: record(options, results | {"end_to_end": found}))


if __name__ == "__main__":
    main()
