"""What a call of torch.ops.adze costs the host, compared with an operator of the same schema in C++ against torch.

The C++ operator allocates its output and computes nothing; so does adze's on an output without elements. Both are
also timed on one small row, and with them the Python function adze.rms_norm. Where the libraries come to lie decides
what a call finds in the caches, by a third of its time: each figure is the median of several processes.
With --cuda "one row" has adze's launch in it, and the C++ operator has none. So a program (host_cost.cu) also times
what a launch of an empty kernel costs, and adze_rms_norm from C: what then remains of a call is adze's own.

    python3 bench/host_cost.py [--cuda] [--processes 5] [--lib build/libadze.so] [--json FILE]

Needs g++ and torch's headers; with --cuda also nvcc.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from adze_ctypes import ROOT
from compare_torch import commit, machine
from torch.utils.cpp_extension import include_paths

import adze
from adze.operators import _ops

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


def cpp_library():
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
    return str(folder / "op.so")


def program(cuda, library):
    """Compiles the program. Returns a function that runs it once: nanoseconds, by what was called."""
    source, made = ROOT / "bench" / "host_cost.cu", pathlib.Path(tempfile.mkdtemp()) / "host_cost"
    if not library.exists():
        raise SystemExit(f"{library} does not exist: run make")
    flags = ["-O2", f"-I{ROOT / 'include'}", str(source), "-o", str(made), f"-L{library.parent}", "-ladze"]
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    subprocess.run([nvcc, "-arch=native", *flags] if cuda else ["g++", "-x", "c++", *flags], check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": f"{library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    command = [str(made), "cuda" if cuda else "cpu"]
    return lambda: json.loads(subprocess.check_output(command, env=environment))


def parts_of(runs, rows):
    """The parts of a call with one row: the cost of C++ and of CUDA, and adze's own."""
    parts = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    whole = next(row for row in rows if row["case"] == "one row")
    parts |= {"operator in C++": whole["C++"], "torch.ops.adze": whole["adze"]}
    parts["adze's own"] = whole["adze"] - whole["C++"] - parts.get("launch, PDL, parameters", 0)
    return parts


def nanoseconds(call, rounds=3, calls=2000):
    """Measured in this thread's CPU time, so that other load on the machine does not count."""
    times = []
    for _ in range(rounds):
        begin = time.thread_time_ns()
        for _ in range(calls):
            call()
        times.append((time.thread_time_ns() - begin) / calls)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return times


def measure(library, device):
    """One process's medians, by case and by what is called."""
    torch.ops.load_library(library)
    cpp, own, function = torch.ops.adze_cpp.rms_norm.default, _ops.ops.rms_norm.default, adze.rms_norm
    weight, cases = torch.ones(64, device=device), {}
    for name, shape in (("no elements", (0, 64)), ("one row", (1, 64))):
        x = torch.ones(shape, device=device)
        args = (x, None, weight, None, None, None, None, None, None, None, 1e-6, 0.0, 0, 0)
        calls = {
            "C++": lambda args=args: cpp(*args),
            "adze": lambda args=args: own(*args),
            "function": lambda x=x: function(x, weight),
        }
        times = {key: [] for key in calls}
        with torch.inference_mode():
            for _ in range(10):
                for key, call in calls.items():
                    times[key] += nanoseconds(call)
        cases[name] = {key: statistics.median(value) for key, value in times.items()}
    return cases


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--lib", type=pathlib.Path, default=ROOT / "build" / "libadze.so")
    parser.add_argument("--commit", help="the commit to record, where there is no repository to ask")
    parser.add_argument("--library", help=argparse.SUPPRESS)  # of a process that measures for another
    options = parser.parse_args()
    device = "cuda" if options.cuda else "cpu"
    if options.library:
        print(json.dumps(measure(options.library, device)))
        return
    command = [sys.executable, __file__, "--library", cpp_library(), *(["--cuda"] if options.cuda else [])]
    runs = [json.loads(subprocess.check_output(command)) for _ in range(options.processes)]
    rows = []
    for name in runs[0]:
        middle = {key: statistics.median(run[name][key] for run in runs) for key in runs[0][name]}
        ratios = sorted(run[name]["adze"] / run[name]["C++"] for run in runs)
        rows.append({"case": name, "device": device, **middle, "ratios": ratios, "ratio": statistics.median(ratios)})
        print(
            f"{name:12} C++ {middle['C++']:6.0f} ns  adze {middle['adze']:6.0f} ns  {rows[-1]['ratio']:.2f}x "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})  adze.rms_norm {middle['function']:6.0f} ns"
        )
    once = program(options.cuda, options.lib.resolve().parent / "libadze.so")
    parts = parts_of([once() for _ in range(options.processes)], rows)
    for name, ns in parts.items():
        print(f"{name:24} {ns:6.0f} ns")
    if options.json:
        whole = {
            "adze_host_cost": 1,
            "machine": machine("cpu") | (machine("cuda") if options.cuda else {}),
            "commit": options.commit or commit(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        pathlib.Path(options.json).write_text(json.dumps(whole | {"rows": rows, "parts": parts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
