"""The kernels of this project alone, against the formula in torch and torch.compile, then in the model, end to end.

    adze pack && python benchmark.py [--tiny] [--package FOLDER] [--json FILE] [--skip-model]

Each kernel is compared with the formula in double before it is timed. On a GPU the calls rotate through more memory
than the cache holds, in a CUDA graph. Weights of the model are random.
"""

import argparse
import json
import pathlib
import statistics
import time

import torch
from kernels import get_local_kernel
from torch.nn import functional as F

import inject
import model as place

OPS = [{{op_list}}]
COLD = 300 << 20  # bytes that the calls of a graph rotate through


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


def cases(kernel):
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
    return [case for case in known if case[1] in OPS]


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
    for name, op, formula, call, shapes in cases(kernel):
        if options.tiny:
            shapes = [(8, *shape[1:]) if len(shape) > 1 else shape for shape in shapes]
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
        variants = {"eager": formula, "kernel": call}
        if not options.tiny:
            variants["compile"] = torch.compile(formula, dynamic=False)
        us = {variant: timed(run, sets) for variant, run in variants.items()}
        moved = size + sum(t.numel() * t.element_size() for t in (result if isinstance(result, tuple) else [result]))
        row = {"case": name, "op": op, "shapes": shapes, "us": us, "gbps": moved / us["kernel"] / 1e3, "error": got}
        times = "  ".join(f"{variant} {value:.2f} us" for variant, value in us.items())
        print(f"{name:<22} {times}  {row['gbps']:.0f} GB/s")
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
    print(f"{place.NAME}:", *(f"{name} {value:.2f} ms" for name, value in ms.items()), sep="  ")
    return {"model": place.NAME, "taken": taken, "difference": difference, "ms": ms}


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes and a small model, for tests")
    parser.add_argument("--package", type=pathlib.Path, default=pathlib.Path(__file__).with_name("package"))
    parser.add_argument("--json", type=pathlib.Path, help="record the results")
    parser.add_argument("--skip-model", action="store_true", help="the kernels alone")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    kernel = get_local_kernel(options.package)
    results = {
        "machine": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "rows": list(alone(kernel, options, device, dtype)),
    }
    if not options.skip_model:
        results["model"] = end_to_end(kernel, options, device, dtype)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
