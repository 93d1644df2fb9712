"""adze compared with what PyTorch users have, in one run: eager Hugging Face formulas, torch's own functions,
torch.compile, Liger. On a GPU: cold (inputs and outputs rotate through more than 300 MB, other memory is read
before each graph), in captured graphs, variants in turn, medians. On the CPU: as a user calls an
op, with a fresh output each time, and with memory that the allocator kept.

    python3 bench/compare_torch.py [--device cuda|cpu] [--op NAME] [--json FILE] [--lib build/libadze.so]
    python3 bench/compare_torch.py --op gemm --m 128 512 2048
    python3 bench/compare_torch.py --sweep [--seed N] [--count N] [--seconds S] [--op NAME] [--json FILE]

With --sweep calls of every op are drawn from a seed, with random shapes, strides, offsets and dtypes; each
is verified against its definition, timed in the same way, and the worst are shown with their `adze run` lines. gemm
and attention are drawn where --op names them.
"""

import argparse
import collections
import ctypes
import json
import statistics
import subprocess
import sys
import time

import sweep_draw
import torch
import warming
from adze_ctypes import ROOT, Adze
from compare_ops import CPU_CASES, GPU_CASES, OPS

COLD = 320 << 20  # bytes
CALLS_MIN, CALLS_MAX, ROUNDS, CPU_SECONDS = 20, 1000, 15, 0.2
GPU_MODE = "max-autotune-no-cudagraphs"
WARM_SECONDS = 120
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


class New:
    """Makes random tensors."""

    def __init__(self, device, dtype):
        self.device, self.dtype = device, dtype

    def __call__(self, *shape):
        return torch.randn(shape, device=self.device, dtype=self.dtype)


def listed(outputs):
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def size_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def compiled(op, mode):
    plain = next(getattr(op, name) for name in ("plain", "eager", "torch") if hasattr(op, name))
    return torch.compile(plain, mode=mode, dynamic=False)


def warm(case):
    name, shape, dtype = case
    compiled(OPS[name], GPU_MODE)(*OPS[name].tensors(New("cuda", DTYPES[dtype]), *shape))


def variants_of(op, adze, sample, compile_mode):
    """The implementations that run here, by name. The others are printed, with the reason."""
    found = {"adze": lambda *t: op.adze(adze, *t)}
    plain = op.eager if hasattr(op, "eager") else op.torch
    for name in ["eager", "torch", "liger"]:
        if hasattr(op, name):
            found[name] = getattr(op, name)
    if getattr(op, "compiles", True):
        found["compile"] = compiled(op, compile_mode)
    exact = [t.double() for t in listed(getattr(op, "exact", plain)(*[t.double() for t in sample]))]
    unit = torch.finfo(getattr(op, "out_dtype", sample[0].dtype)).eps
    for name in list(found):
        try:
            got = listed(found[name](*[t.clone() for t in sample]))  # clones: some work in place
        except Exception as error:  # a peer that is not installed, or does not support this shape
            if name == "adze":
                raise
            print(f"  {name} left out: {type(error).__name__}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
            del found[name]
            continue
        for a, b in zip(got, exact, strict=False):  # the same computation? `adze check` verifies the values
            off = ((a.double() - b).abs().max() / b.abs().max()).item()
            if not off < 4 * unit:
                raise SystemExit(f"{name} computes something else: off by {off / unit:.1f} units")
    return found


# ---- Time on a GPU ----


def capture(function, sets, calls):
    held = collections.deque(maxlen=len(sets) + 1)  # so that no output lands in memory that is still cached
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            held.append(function(*sets[i % len(sets)]))
    return graph, held


def time_on_gpu(variants, sets, calls, rounds=ROUNDS):
    other = torch.zeros(COLD // 4, device="cuda", dtype=torch.int32)
    graphs = {name: capture(function, sets, calls) for name, function in variants.items()}
    samples = {name: [] for name in variants}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(rounds + 1):
        for name, (graph, _) in graphs.items():
            other.sum()
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if turn:  # the first is not counted
                samples[name].append(begin.elapsed_time(end) * 1000 / calls)
    return {name: statistics.median(values) for name, values in samples.items()}


def compare_on_gpu(adze, op, shape, dtype):
    new = New("cuda", DTYPES[dtype])
    first = op.tensors(new, *shape)
    variants = variants_of(op, adze, first, GPU_MODE)
    moved = size_of(first) + size_of(listed(variants["adze"](*first)))
    count = COLD // moved + 1
    sets = [first] + [op.tensors(new, *shape) for _ in range(min(count, CALLS_MAX) - 1)]
    us = time_on_gpu(variants, sets, max(CALLS_MIN, len(sets)))
    return moved, us, None


# ---- Time on the CPU ----


def keep_freed_memory():
    """Makes malloc take large blocks from the heap and keep them, so that an output gets memory that was used
    before."""
    mmap_max, trim_threshold = -4, -1
    libc = ctypes.CDLL(None)
    return libc.mallopt(mmap_max, 0) and libc.mallopt(trim_threshold, -1)


def time_on_cpu(variants, tensors, seconds=CPU_SECONDS):
    samples = {name: [] for name in variants}
    for turn in range(4):
        for name, function in variants.items():
            calls, begin = 0, time.perf_counter()
            while calls < 2 or time.perf_counter() - begin < seconds:
                function(*tensors)
                calls += 1
            if turn:
                samples[name].append((time.perf_counter() - begin) * 1e6 / calls)
    return {name: statistics.median(values) for name, values in samples.items()}


def compare_on_cpu(adze, op, shape, dtype):
    """Runs in a process of its own, because the allocator's settings cannot be undone."""
    new = New("cpu", DTYPES[dtype])
    tensors = op.tensors(new, *shape)
    small = op.tensors(new, 64, shape[1])
    variants = variants_of(op, adze, small, "default")
    moved = size_of(tensors) + size_of(listed(variants["adze"](*tensors)))
    for function in variants.values():
        function(*tensors)
    fresh = time_on_cpu(variants, tensors)
    if not keep_freed_memory():
        raise SystemExit("mallopt refused the setting for reused memory")
    return moved, fresh, time_on_cpu(variants, tensors)


def copy_gbps(device, tiny, rounds=ROUNDS, seconds=CPU_SECONDS):
    """The most that copies of several sizes reach, cold."""
    best = 0.0
    for size in [1 << 20] if tiny else [1 << 26, 1 << 27, 1 << 28]:
        copies = {"clone": torch.clone, "add": lambda x: x + 0.0}
        new = New(device, torch.float32)
        sets = [(new(size // 4),) for _ in range(COLD // (2 * size) + 1 if device == "cuda" else 1)]
        if device == "cuda":
            us = time_on_gpu(copies, sets, max(CALLS_MIN, len(sets)), rounds)
        else:
            us = time_on_cpu(copies, sets[0], seconds)
        best = max(best, *(2 * size / value / 1000 for value in us.values()))
    return best


# ---- The program ----


def row_of(name, shape, dtype, moved, us, reused):
    peers = {k: v for k, v in us.items() if k != "adze"}
    row = {"op": name, "case": "x".join(map(str, shape)), "dtype": dtype, "bytes": moved, "us": us}
    if peers:  # torch's int8 product takes more than 16 rows only
        row["best"] = min(peers, key=peers.get)
        row["ratio"] = peers[row["best"]] / us["adze"]
    row["gbps"] = moved / us["adze"] / 1000
    if reused:
        row["us_reused"] = reused
    return row


def show(row):
    times = "  ".join(f"{name} {us:.2f}" for name, us in row["us"].items())
    ratio = f"{row['ratio']:5.2f}x of {row['best']:8}" if "best" in row else f"{'no peer':18}"
    print(f"{row['op']:22} {row['case']:12} {row['dtype']:5} {ratio} us: {times}")
    if "us_reused" in row:
        times = "  ".join(f"{name} {us:.2f}" for name, us in row["us_reused"].items())
        print(f"{'':48} in reused memory, us: {times}")
    sys.stdout.flush()


def machine(device):
    if device == "cuda":
        return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    output = subprocess.run(["lscpu"], capture_output=True, text=True).stdout
    names = [line.split(":")[1].strip() for line in output.splitlines() if line.startswith("Model name")]
    return {"cpu": names[0] if names else "unknown", "threads": torch.get_num_threads(), "torch": torch.__version__}


def ask_gpu(what):
    command = ["nvidia-smi", "--id=0", "--format=csv,noheader", f"--query-gpu={what}"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def commit():
    output = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return output.stdout.strip() or "unknown"


def of_tokens(counts):
    """The listed products, with other numbers of tokens."""
    products = {(name, *shape[1:], dtype) for name, shape, dtype in GPU_CASES if name.startswith("gemm")}
    return [(name, (m, n, k), dtype) for name, n, k, dtype in sorted(products) for m in counts]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--op", help="one op only")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument(
        "--m", type=int, nargs="+", help="products of so many tokens alone, instead of the listed ones"
    )
    parser.add_argument("--json")
    parser.add_argument("--lib")
    parser.add_argument("--commit", help="what the library was built from, where git cannot say")
    parser.add_argument("--workers", type=int, help="processes that compile in advance (on a GPU: one per core)")
    parser.add_argument("--sweep", action="store_true", help="random calls of every op")
    sweep_options = parser.add_argument_group("with --sweep")
    sweep_options.add_argument("--seed", type=int, default=1)
    sweep_options.add_argument("--count", type=int, default=60, help="number of calls (60)")
    sweep_options.add_argument("--seconds", type=float, default=150, help="time limit for starting calls (150)")
    sweep_options.add_argument("--plain", action="store_true", help="torch.compile without max_autotune")
    sweep_options.add_argument("--tiny", action="store_true", help="small calls, which test the code alone")
    sweep_options.add_argument("--verbose", action="store_true", help="show every call")
    options = parser.parse_args()
    known = (*sweep_draw.OPS, *sweep_draw.PRODUCTS) if options.sweep else OPS
    if options.op not in (None, *known):
        parser.error(f"there is no op {options.op!r} here; there are {', '.join(known)}")
    if options.m and (options.sweep or options.device != "cuda" or min(options.m) < 1):
        parser.error("--m has numbers of tokens for a GPU, and goes without --sweep")
    if options.sweep:
        import sweep

        return sweep.run(options, Adze(torch, options.lib))
    on_gpu = options.device == "cuda"
    cases = of_tokens(options.m) if options.m else GPU_CASES if on_gpu else CPU_CASES
    cases = [c for c in cases if options.op in (None, c[0]) and options.dtype in (None, c[2])]
    rows = []
    if not on_gpu and len(cases) > 1:
        for name, _, dtype in cases:
            command = [sys.executable, __file__, "--device", "cpu", "--op", name, "--dtype", dtype]
            command += ["--json", "/dev/stdout"] + (["--lib", options.lib] if options.lib else [])
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            rows += json.loads(output[output.index("{\n") :])["rows"]
            show(rows[-1])
    else:
        adze = Adze(torch, options.lib)
        to_compile = [c for c in cases if on_gpu and getattr(OPS[c[0]], "compiles", True)]
        warming.compile_before(warm, to_compile, warming.workers(options), WARM_SECONDS)
        with torch.inference_mode():
            for name, shape, dtype in cases:
                compare = compare_on_gpu if on_gpu else compare_on_cpu
                rows.append(row_of(name, shape, dtype, *compare(adze, OPS[name], shape, dtype)))
                show(rows[-1])
                if on_gpu:
                    torch._dynamo.reset()
                    torch.cuda.empty_cache()
    if options.json:
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        whole = {
            "adze_compare": 1,
            "machine": machine(options.device),
            "commit": options.commit or commit(),
            "date": date,
        }
        with open(options.json, "w") as file:
            json.dump(whole | {"rows": rows}, file, indent=1)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
