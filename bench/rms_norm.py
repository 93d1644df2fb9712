"""rms_norm alone, as PyTorch users have it: the formula of transformers, F.rms_norm, torch.compile, Liger, and adze's
operator. On a GPU cold, in captured graphs; on a CPU into fresh outputs. Each as a share of the copy bandwidth that
the same run reached.

    python3 bench/rms_norm.py [--tiny] [--variants eager torch adze] [--json FILE] [--plot PNG]
"""

import sys

import compare_torch
import torch
from compare_ops import EPS, NORM_SHAPES, ROUND_NORM, RmsNorm, hf_rms_norm
from compare_torch import COLD, DTYPES, New, size_of, time_on_cpu, time_on_gpu

import adze
import models

TINY_SHAPES = [(64, 512), (3, 1000)]
ABOVE = 1.02  # a share of the ceiling that no implementation can reach
UNITS = 4  # the largest error that compare_torch allows too


def adze_op(x, weight):
    return adze.rms_norm(x, weight, eps=EPS, rounding=ROUND_NORM)


def known(options):
    """The ways to compute it, by name."""
    op = RmsNorm()
    compiled = torch.compile(
        op.eager, dynamic=False, mode="max-autotune-no-cudagraphs" if options.device == "cuda" else None
    )
    found = {"eager": op.eager, "torch": op.torch, "compile": compiled, "adze": adze_op}
    if options.device == "cuda":
        found["liger"] = op.liger
    return found


def error_in_units(got, x, weight):
    """The largest difference from the formula in double, in units of the largest result."""
    exact = hf_rms_norm(x.double(), weight.double()).double()
    unit = torch.finfo(x.dtype).eps * exact.abs().max()
    return ((got.double() - exact).abs().max() / unit).item()


def timed(options, ways, sets):
    if options.device == "cuda":
        return time_on_gpu(ways, sets, max(compare_torch.CALLS_MIN, len(sets)))
    return time_on_cpu(ways, sets[0])


def measure(options, ways, shape, ceiling, left_out):
    new = New(options.device, DTYPES[options.dtype])
    first = (new(*shape), new(shape[1]))
    row = {"op": "rms_norm", "case": "x".join(map(str, shape)), "dtype": options.dtype, "units": {}}
    for name, way in list(ways.items()):
        try:
            units = error_in_units(way(*first), *first)
            if not units < UNITS:
                raise models.LeftOut(f"computes something else: off by {units:.1f} units")
            row["units"][name] = units
        except Exception as error:  # a peer that is not installed, or does not support this shape
            left_out.append({"case": row["case"], "variant": name, "reason": f"{error}".splitlines()[0]})
    ways = {name: ways[name] for name in row["units"]}
    row["bytes"] = size_of(first) + size_of(first[:1])
    count = min(COLD // row["bytes"] + 1, compare_torch.CALLS_MAX) if options.device == "cuda" else 1
    sets = [first] + [(new(*shape), new(shape[1])) for _ in range(count - 1)]
    row["us"] = timed(options, ways, sets)
    row["share"] = {name: row["bytes"] / us / 1000 / ceiling for name, us in row["us"].items()}
    return row


def main():
    parser = models.parser(__doc__)
    options = parser.parse_args()
    ways = known(options)
    names = options.variants or list(ways)
    if set(names) - set(ways):
        raise SystemExit(f"there is no variant {(set(names) - set(ways)).pop()!r}; there are {', '.join(ways)}")
    rows, left_out = [], []
    with torch.inference_mode():
        ceiling = compare_torch.copy_gbps(options.device, options.tiny)
        print(f"copy {ceiling:.5g} GB/s")
        shapes = TINY_SHAPES if options.tiny else NORM_SHAPES
        for shape in models.progress(shapes, "rms_norm"):
            rows.append(measure(options, {name: ways[name] for name in names}, shape, ceiling, left_out))
            torch._dynamo.reset()
    print(f"{'us (share of copy)':18}" + "".join(f"{name:>18}" for name in names))
    for row in rows:
        cells = [f"{row['us'][n]:.2f} ({100 * row['share'][n]:.0f} %)" if n in row["us"] else "-" for n in names]
        print(f"{row['case']:18}" + "".join(f"{cell:>18}" for cell in cells))
    above = [row["case"] for row in rows if options.device == "cuda" and max(row["share"].values()) > ABOVE]
    for case in above:
        print(f"{case}: faster than a copy can be; the benchmark is wrong there")
    for gone in left_out:
        print(f"left out: {gone['case']}, {gone['variant']}: {gone['reason']}")
    if options.plot:
        models.plot(options.plot, {row["case"]: row["us"] for row in rows}, "us")
    result = {"script": "rms_norm", "model": "", "copy_gbps": ceiling, "above": above, "left_out": left_out}
    models.write_json(options, result | {"rows": rows})
    return 1 if above or any(gone["variant"] != "liger" for gone in left_out) else 0


if __name__ == "__main__":
    sys.exit(main())
