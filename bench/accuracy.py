"""How near adze and a model's own torch code are to float64: call by call, and for a text that a small model reads.

    python3 bench/accuracy.py [--device cuda|cpu] [--lines BENCH.json] [--rows N] [--json FILE]

Inputs have the statistics of activations: heavy tails, outlier channels of 50 to 100 times the others' size, rows of
small norm. A row has the share of elements that are equal to eager's, and the errors of both against float64 in units
in the last place (ulp) of the dtype. Rows are the calls that adze.patch makes in models, the calls that `adze bench`
has timed (those of --lines; without it, of the newest run in bench/results), and those of compare_torch.py.
"""

import argparse
import json
import pathlib
import sys
import time

import accuracy_calls as calls
import accuracy_text
import torch
from adze_ctypes import ROOT, Adze
from compare_ops import GPU_CASES, OPS
from compare_torch import DTYPES, ask_gpu, commit, listed, machine

import adze.operators.ops  # noqa: F401  torch.ops.adze

CPU_ROWS = 16  # of a call on the CPU: its arithmetic is the same for each row
KINDS = {"softmax": "scores", "silu_mul": "mlp", "gelu": "mlp"}  # of inputs, where they are not hidden states


def recorded_lines():
    """Of the newest run of `adze bench`."""
    found = [json.loads(path.read_text()) for path in (ROOT / "bench" / "results").glob("*/*.json")]
    found = sorted((run for run in found if "adze_bench" in run), key=lambda run: run["date"])
    return [row["line"] for row in found[-1]["rows"]] if found else []


def line_row(line, device, rows):
    call = calls.Call(line, rows)
    given = calls.tensors(call, device)
    got, eager = (listed(make(call, given)) for make in (calls.adze_outputs, eager_outputs))
    row = {"op": call.op, "dtype": call.main[0], "line": str(call) if rows else line}
    return row | calls.compare(got, eager, listed(calls.exact(call, given)))


def eager_outputs(call, given):
    return calls.EAGER[call.op](**given, **call.numbers)


# ---- The calls of compare_torch.py ----


class New:
    """Makes a tensor for an op of compare_ops.py, of which only the shape is known."""

    def __init__(self, device, dtype, name):
        self.device, self.dtype = device, dtype
        self.values, self.name = calls.Values(device, name), name

    def __call__(self, *shape):
        if len(shape) == 1:
            made = self.values.weight(shape)
        elif len(shape) == 3 and shape[:2] == (1, 1):
            made = self.values.modulation(shape)
        elif self.name in KINDS:
            made = getattr(self.values, KINDS[self.name])(shape)
        else:
            made = self.values.hidden(shape, 1 if channels_first(self.name) else -1)
        return made.to(self.dtype)


def compared_row(adze, name, shape, dtype, device):
    op = OPS[name]
    tensors = op.tensors(New(device, DTYPES[dtype], name), *shape)
    way = op.eager if hasattr(op, "eager") else op.torch
    got, eager = listed(op.adze(adze, *tensors)), listed(way(*tensors))
    row = {"op": name, "case": "x".join(map(str, shape)), "dtype": dtype}
    return row | calls.compare(got, eager, [t.double() for t in listed(way(*[t.double() for t in tensors]))])


def channels_first(name):
    return "group_norm" in name and "channels_last" not in name


def smaller(name, shape, rows):
    """A shape of compare_ops.py with at most so many rows, or rows and columns of an image."""
    rows = rows or max(shape)
    if "group_norm" in name:
        at = 2 if channels_first(name) else 1
        return (*shape[:at], *(min(size, rows) for size in shape[at : at + 2]), *shape[at + 2 :])
    return (min(shape[0], rows), *shape[1:])


# ---- The program ----


def show(rows, texts):
    print(f"{'':52} {'dtype':5} {'equal':>8} {'error, ulp':>11} {'eager':>7} {'max':>8} {'eager':>8}")
    for row in rows:
        name = row.get("model") or row.get("line") or f"{row['op']} {row['case']}"
        print(
            f"{name[:52]:52} {row['dtype']:5} {100 * row['equal']:6.2f} % {row['error']:11.3f} "
            f"{row['eager_error']:7.3f} {row['max']:8.2f} {row['eager_max']:8.2f}"
        )
    for row in texts:
        print(
            f"text, {row['dtype']:4} {row['variant']:9}: {row['bits']:.4f} bits a byte, {row['difference']:+.2e} nats"
            f" from float32, error of a byte {row['error']:.2e}, greedy bytes equal to eager's "
            f"{100 * row['greedy_equal']:.2f} %, to float32's {100 * row['greedy_equal_f32']:.2f} %"
        )


def measure(options):
    device, rows = options.device, options.rows
    found, left_out = [], []
    with torch.inference_mode():
        for name, text in calls.MODELS.items():
            for dtype in ("bf16", "f16"):
                found.append({"model": name} | line_row(text.replace("$", dtype), device, rows))
        for line in dict.fromkeys(options.lines):
            if line.split()[0] in calls.EAGER:
                found.append(line_row(line, device, rows))
            else:
                left_out.append({"line": line, "reason": "accuracy_calls.py has no formula of this op"})
        adze = Adze(torch, options.lib)
        for name, shape, dtype in GPU_CASES:
            if not hasattr(OPS[name], "exact"):  # of quantised x torch has no product in double
                found.append(compared_row(adze, name, smaller(name, shape, rows), dtype, device))
    return found, left_out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lines", metavar="FILE", help="what `adze bench --json` wrote")
    parser.add_argument("--rows", type=int, help=f"at most so many of a call (on a CPU {CPU_ROWS}; 0: all)")
    parser.add_argument("--tiny", action="store_true", help="a model that learns for two seconds")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--lib", help="(build/libadze.so)")
    parser.add_argument("--commit", help="what the library was built from, where git cannot say")
    options = parser.parse_args()
    gpu = options.device == "cuda"
    if options.rows is None:
        options.rows = 0 if gpu else CPU_ROWS
    run = json.loads(pathlib.Path(options.lines).read_text()) if options.lines else None
    options.lines = [row["line"] for row in run["rows"]] if run else recorded_lines()
    rows, left_out = measure(options)
    texts, count = accuracy_text.rows(options.device, options.tiny)
    show(rows, texts)
    for gone in left_out:
        print(f"left out: {gone['line']}: {gone['reason']}")
    if options.json:
        whole = {
            "adze_accuracy": 1,
            "machine": machine(options.device),
            "driver": ask_gpu("driver_version") if gpu else "",
            "clocks": ask_gpu("clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem") if gpu else "",
            "commit": options.commit or commit(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "settings": {"rows": options.rows, "tiny": options.tiny, "text": accuracy_text.HELD_OUT, "bytes": count},
            "texts": texts,
            "left_out": left_out,
            "rows": rows,
        }
        pathlib.Path(options.json).write_text(json.dumps(whole, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
