"""What a call of torch.ops.adze costs the host, beside an operator of the same schema written in C++ against torch.

The C++ operator allocates its output and computes nothing; so does adze's on an output without elements. Both are
also timed on one small row. `python bench/host_cost.py [--cuda] [--json FILE]`; needs g++ and torch's headers.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

import torch
from torch.utils.cpp_extension import include_paths

import adze  # noqa: F401
from adze import _ops

SOURCE = r"""
#include <ATen/ATen.h>
#include <torch/library.h>
using maybe = const std::optional<at::Tensor> &;
static at::Tensor rms_norm(const at::Tensor &x, maybe, maybe, maybe, maybe, maybe, maybe, maybe, maybe, maybe, double,
                           double, int64_t, int64_t)
{
    return at::empty(x.sizes(), x.options());
}
TORCH_LIBRARY(adze_cpp, m)
{
    m.def("SCHEMA");
}
TORCH_LIBRARY_IMPL(adze_cpp, CPU, m) { m.impl("rms_norm", rms_norm); }
TORCH_LIBRARY_IMPL(adze_cpp, CUDA, m) { m.impl("rms_norm", rms_norm); }
"""


def cpp_operator():
    schema = str(_ops.ops.rms_norm.default._schema).split("::")[1]
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "op.cpp").write_text(SOURCE.replace("SCHEMA", schema))
    flags = [f"-I{path}" for path in include_paths()] + [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    ]
    command = [
        "g++",
        "-O2",
        "-std=c++20",
        "-shared",
        "-fPIC",
        *flags,
        str(folder / "op.cpp"),
        "-o",
        str(folder / "op.so"),
        f"-L{pathlib.Path(torch.__file__).parent / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
    ]
    subprocess.run(command, check=True)
    torch.ops.load_library(str(folder / "op.so"))
    return torch.ops.adze_cpp.rms_norm.default


def nanoseconds(call, rounds=30, calls=2000):
    """Of this thread's own time, so that a busy machine does not show."""
    times = []
    for _ in range(rounds):
        begin = time.thread_time_ns()
        for _ in range(calls):
            call()
        times.append((time.thread_time_ns() - begin) / calls)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    device = "cuda" if options.cuda else "cpu"
    cpp, own = cpp_operator(), _ops.ops.rms_norm.default
    weight, rows = torch.ones(64, device=device), []
    for name, shape in (("no elements", (0, 64)), ("one row", (1, 64))):
        x = torch.ones(shape, device=device)
        args = (x, None, weight, None, None, None, None, None, None, None, 1e-6, 0.0, 0, 0)
        with torch.inference_mode():
            times = {"C++": [], "adze": []}
            for _ in range(10):
                times["C++"] += nanoseconds(lambda args=args: cpp(*args), 3)
                times["adze"] += nanoseconds(lambda args=args: own(*args), 3)
        middle = {key: statistics.median(value) for key, value in times.items()}
        rows.append({"case": name, "device": device, **middle, "ratio": middle["adze"] / middle["C++"]})
        print(f"{name:12} C++ {middle['C++']:7.0f} ns  adze {middle['adze']:7.0f} ns  {rows[-1]['ratio']:.2f}x")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
