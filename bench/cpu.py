"""gemm and attention on the CPU compared with torch's linear and scaled_dot_product_attention. Every call is verified
against float64, then the variants are timed in turn, and the least time of each counts: on a machine with other work
the least is what is left of the noise. With one thread it is the time that the thread had of its core. Weights and
caches rotate through more memory than the processor caches.

    python3 bench/cpu.py [--threads 2] [--what gemm attention] [--match TEXT] [--seconds 1] [--json FILE]

Few rows of x are limited by memory: for those the share is that of the bandwidth that plain reads of as much memory
reach in the same turns, which are torch's sum of int64 and its product of a float32 matrix with a vector.
"""

import argparse
import functools
import itertools
import json
import pathlib
import sys
import time

import torch
import torch.nn.functional as F
from compare_torch import DTYPES, commit, machine, size_of

import adze

COLD = 200 << 20  # bytes of the weights of a case
ROUNDS_LEAST = 3
WEIGHTS = [(11008, 4096), (4096, 4096)]
GROUP = 128  # of weights of 4 bits
SHORT = {"f32": "f32", "bf16": "bf16", "i8": "bf16", "u4": "bf16"}  # the dtype of x for each kind of weights


class Case:
    """A call: its name, the variants by name, as functions of one of the sets of tensors, and the bytes that it must
    read."""

    def __init__(self, what, name, dtype, variants, sets, read, exact):
        self.what, self.name, self.dtype, self.variants, self.sets = what, name, dtype, variants, sets
        self.read, self.exact = read, exact


# ---- Products ----


@functools.lru_cache(maxsize=1)
def weights_of(kind, n, k):
    """Copies of a weight, as (what gemm takes, what torch's linear takes)."""
    w, more = torch.randn(n, k) / k**0.5, {}
    if kind in DTYPES:
        own, numbers = {"w": w.to(DTYPES[kind])}, w.to(DTYPES[kind])
    else:
        more = {"format": "u4", "group": GROUP} if kind == "u4" else {}
        stored, scale = adze.quantize(w, kind, group=more.get("group", 0))[:2]
        own = {"w": stored, "w_scale": scale}
        numbers = adze.dequantize(stored, scale, **more).to(DTYPES[SHORT[kind]])
    copies = COLD // size_of(own.values()) + 1
    return [({name: t.clone() for name, t in own.items()} | more, numbers) for _ in range(copies)]


def product(kind, m, n, k):
    x = torch.randn(m, k).to(DTYPES[SHORT[kind]])
    weights = weights_of(kind, n, k)
    read = size_of(t for t in weights[0][0].values() if isinstance(t, torch.Tensor))
    variants = {"adze": lambda w, numbers: adze.gemm(x, **w), "torch": lambda w, numbers: F.linear(x, numbers)}

    def exact(w, numbers):
        """Some columns."""
        columns = torch.tensor([*range(32), *range(n - 32, n)])
        if "w_scale" in w:
            more = {name: w[name] for name in w if name in ("format", "group")}
            numbers = adze.dequantize(w["w"], w["w_scale"], **more)
        return columns, F.linear(x.double(), numbers[columns].double())

    return Case("gemm", f"{m} x {n} x {k}", kind, variants, weights, read if m <= 8 else None, exact)


# ---- Attention ----


def attention(dtype, heads, kv_heads, queries, keys, d, hides=None):
    def new(h, tokens):
        return torch.randn(1, tokens, h, d).to(DTYPES[dtype]).transpose(1, 2)

    one = size_of([new(kv_heads, keys)]) * 2
    count = COLD // one + 1 if queries == 1 else 1
    sets = [(new(heads, queries), new(kv_heads, keys), new(kv_heads, keys)) for _ in range(count)]
    if queries == 1:  # a cache has the tokens of a head together
        sets = [(q, k.contiguous(), v.contiguous()) for q, k, v in sets]
    seen = torch.ones(queries, keys, dtype=torch.bool).tril()[None, None]
    mask = None
    if hides == "boolean mask":
        mask = seen
    elif hides == "added mask":
        mask = torch.zeros(1, 1, queries, keys, dtype=DTYPES[dtype]).masked_fill(~seen, -10000.0)
    causal = hides == "causal"
    grouped = {"enable_gqa": True} if heads != kv_heads else {}
    variants = {
        "adze": lambda q, k, v: adze.attention(q, k, v, mask, causal=causal),
        "torch": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, **grouped),
    }

    def exact(q, k, v):
        q, k, v = (t.double() for t in (q, k, v))
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        rows = torch.tensor([*range(min(4, queries)), queries - 1])
        scores = q[:, :, rows] @ k.mT / d**0.5
        if hides:
            scores = scores.masked_fill(~seen[:, :, rows], -torch.inf)
        return rows, scores.softmax(-1) @ v  # of some queries

    tokens = f"{queries} of {keys}" if queries != keys else f"{keys}"
    name = f"{heads}/{kv_heads} heads d{d}, {tokens}" + (f", {hides}" if hides else "")
    return Case("attention", name, dtype, variants, sets, one if queries == 1 else None, exact)


def cases():
    """Functions that make a case: one at a time is in memory."""
    for n, k in WEIGHTS:
        for kind in ("bf16", "f32", "i8", "u4"):
            for m in (1, 2, 4, 8, *((16, 64, 512) if kind in DTYPES else ())):
                yield "gemm", f"{m} x {n} x {k}", kind, lambda kind=kind, m=m, n=n, k=k: product(kind, m, n, k)
    for hides in ("causal", "boolean mask", "added mask", None):
        for dtype in ("bf16", "f32"):
            call = (dtype, 32, 32, 1024, 1024, 128, hides)
            yield "attention", f"1024 {hides}", dtype, lambda call=call: attention(*call)
    for kv_heads in (32, 8):
        for keys in (1024, 8192):
            for dtype in ("bf16", "f32"):
                call = (dtype, 32, kv_heads, 1, keys, 128)
                yield "attention", f"decode {keys}", dtype, lambda call=call: attention(*call)


# ---- Time ----


def verify(case):
    """The error of adze is at most twice torch's, or one unit of the dtype where torch's is less."""
    inputs, errors = case.sets[0], {}
    chosen, exact = case.exact(*inputs)
    for name, function in case.variants.items():
        out = function(*inputs).double()
        out = out[:, chosen] if case.what == "gemm" else out[:, :, chosen]
        errors[name] = ((out - exact).square().mean() / exact.square().mean()).sqrt().item()
    unit = torch.finfo(DTYPES[SHORT[case.dtype]]).eps
    if not errors["adze"] <= max(2 * errors["torch"], unit):
        raise SystemExit(f"{case.what} {case.name} {case.dtype}: errors {errors}")
    return errors


def least_times(variants, sets, seconds):
    """The least seconds of a call of each, in turns."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    least, end, turn = dict.fromkeys(variants, float("inf")), time.perf_counter() + seconds, 0
    while turn < ROUNDS_LEAST or time.perf_counter() < end:
        for name, function in variants.items():
            inputs = sets[turn % len(sets)]
            begin = clock()
            function(*inputs)
            least[name] = min(least[name], clock() - begin)
        turn += 1
    return least


def reads_of(memory, size):
    """Variants that read so many bytes of memory, another part of it each time."""
    parts = [memory[at : at + size // 8] for at in range(0, len(memory) - size // 8 + 1, size // 8)]
    turns, width = {"sum": itertools.cycle(parts), "mv": itertools.cycle(parts)}, 4096
    ones = torch.ones(width)
    return {
        "sum": lambda *_: next(turns["sum"]).sum(),
        "mv": lambda *_: (
            next(turns["mv"])[: size // 4 // width * width // 2].view(torch.float32).view(-1, width) @ ones
        ),
    }


def measure(case, seconds, memory):
    errors = verify(case)
    reads = reads_of(memory, case.read) if case.read else {}
    us = {name: 1e6 * value for name, value in least_times(case.variants | reads, case.sets, seconds).items()}
    read = min((us.pop(name) for name in reads), default=None)
    row = {"op": case.what, "case": case.name, "dtype": case.dtype, "us": us, "errors": errors}
    row["ratio"] = us["torch"] / us["adze"]
    if case.read:
        row |= {"bytes": case.read, "gbps": case.read / us["adze"] / 1e3, "share": read / us["adze"]}
    return row


def show(row):
    share = f"{100 * row['share']:4.0f} % of read ({row['gbps']:.1f} GB/s)" if "share" in row else ""
    print(f"{row['op']:9} {row['case']:36} {row['dtype']:4} {row['ratio']:5.2f}x of torch  "
          f"us: adze {row['us']['adze']:9.0f}  torch {row['us']['torch']:9.0f}  {share}", flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="of both (default: torch's)")
    parser.add_argument("--what", nargs="+", choices=["gemm", "attention"], default=["gemm", "attention"])
    parser.add_argument("--match", default="", help="cases whose op, name and dtype have these words")
    parser.add_argument("--seconds", type=float, default=1, help="of a case (1)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--commit", help="what the library was built from, where git cannot say")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    memory = torch.zeros((COLD + (100 << 20)) // 8, dtype=torch.int64)
    rows = []
    with torch.inference_mode():
        for what, name, dtype, make in cases():
            if what in options.what and all(word in f"{what} {name} {dtype}" for word in options.match.split()):
                rows.append(measure(make(), options.seconds, memory))
                show(rows[-1])
    if options.json:
        whole = {
            "adze_cpu": 1,
            "machine": machine("cpu"),
            "commit": options.commit or commit(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "rows": rows,
        }
        pathlib.Path(options.json).write_text(json.dumps(whole, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
