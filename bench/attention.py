"""adze.attention compared with torch's scaled_dot_product_attention. Every call is verified against float64 at some
of its rows, and then the variants are timed in turn.

    python3 bench/attention.py [--device cuda] [--what prefill decode] [--rounds 9] [--json FILE]
    python3 bench/attention.py --device cpu [--dtype bf16 ...] [--call 1x4x64x64x128 ...] [--json FILE]

On a GPU: prompts and the tokens after them in language models, whole images and videos of diffusion models, in bf16.
Cold, in captured graphs, against torch's choice ("torch") and each backend that takes the call. The keys and values
of a decode step are also stored in 8 bits ("adze, fp8 cache").

On the CPU: calls of diffusers' models, with one thread, and by the time that the thread had of its core, which other
programs change little. The table of python/adze/patching/attention.py has what was faster here.
"""

import argparse
import functools
import json
import pathlib
import statistics
import sys
import time
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from compare_torch import COLD, DTYPES, ask_gpu, commit, machine, size_of, time_on_cpu, time_on_gpu
from torch.nn.attention import SDPBackend, sdpa_kernel

import adze

# batch, heads, queries, keys, dim, whether there is a mask of keys
CALLS = [
    (1, 8, 1, 1024, 64, False),
    (1, 8, 16, 16, 64, False),
    (1, 8, 64, 64, 64, False),
    (1, 8, 128, 128, 64, False),
    (1, 8, 256, 256, 64, False),
    (1, 8, 1024, 1024, 64, False),
    (1, 2, 4096, 4096, 64, False),
    (2, 8, 256, 256, 160, False),
    (2, 8, 1024, 1024, 80, False),
    (1, 4, 4096, 4096, 40, False),
    (2, 8, 256, 77, 160, False),
    (2, 8, 1024, 77, 80, False),
    (2, 8, 4096, 77, 40, False),
    (2, 20, 1024, 77, 64, False),
    (1, 8, 64, 64, 128, False),
    (1, 4, 256, 256, 128, False),
    (1, 4, 1024, 1024, 128, False),
    (1, 1, 4096, 4096, 128, False),
    (1, 12, 1536, 512, 128, False),
    (2, 32, 256, 128, 64, True),
    (2, 8, 1024, 128, 64, True),
    (1, 4, 1024, 1024, 128, True),
]
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FP8 = "adze, fp8 cache"
GRAPH_SECONDS, CALLS_MOST = 0.01, 200  # a graph has as many calls as take so long, and no more than so many


class Case(NamedTuple):
    """A call of a model. Keys and values may have fewer heads than queries."""

    model: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    causal: bool = False

    @property
    def name(self):
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        tokens = f"{self.keys}" if self.queries == self.keys else f"{self.queries} of {self.keys}"
        return f"{self.batch} x {heads} heads d{self.dim}, {tokens}" + (" causal" if self.causal else "")

    @property
    def flops(self):
        return 4 * self.batch * self.heads * self.queries * self.keys * self.dim // (2 if self.causal else 1)

    @property
    def bytes(self):
        """What must be moved of bf16: queries, result, keys and values."""
        rows = 2 * self.heads * self.queries + 2 * self.kv_heads * self.keys
        return 2 * self.batch * self.dim * rows

    def smaller(self):
        return self._replace(batch=min(self.batch, 2), queries=min(self.queries, 24), keys=min(self.keys, 24))


PREFILL = [
    Case("Llama", 1, 32, 32, 4096, 4096, 128, True),
    Case("Llama", 1, 32, 32, 16384, 16384, 128, True),
    Case("Qwen3-8B", 1, 32, 8, 4096, 4096, 128, True),
    Case("FLUX", 1, 24, 24, 4608, 4608, 128),
    Case("LTX-Video", 1, 32, 32, 4992, 4992, 64),
    Case("Wan", 1, 40, 40, 32760, 32760, 128),
]
DECODE = [Case("Qwen3-8B", b, 32, 8, 1, n, 128) for b in (1, 8, 32, 64) for n in (1024, 8192, 65536)]
CASES = {"prefill": PREFILL, "decode": DECODE}


# ---- Verification ----


def error(out, q, k, v, mask):
    """The root of the mean square error of the first and the last queries."""
    rows = torch.tensor([*range(min(4, q.shape[2])), q.shape[2] - 1], device=q.device)
    if mask is not None and mask.shape[2] > 1:
        mask = mask[:, :, rows]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    exact = F.scaled_dot_product_attention(
        q[:, :, rows].double(), k.double(), v.double(), mask, enable_gqa=q.shape[1] != k.shape[1]
    )
    return (out[:, :, rows].double() - exact).square().mean().sqrt().item()


class Wrong(Exception):
    """A result that is not to be timed."""


def verified(what, errors, own):
    if not errors[own] <= 2 * errors["torch"]:  # also for NaN
        raise Wrong(f"{what}: the error of {own} is {errors[own]}, torch's {errors['torch']}")


# ---- Calls of models, on a GPU ----


def variants_of(case):
    """{name: function of q, k, v and the keys and values of 8 bits with their scales}"""
    options = {"is_causal": case.causal, "enable_gqa": case.heads != case.kv_heads}

    def by_torch(q, k, v, *small, backend=None):
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, **options)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options)

    def by_adze(q, k, v, *small):
        return adze.attention(q, k, v, causal=case.causal)

    def from_fp8(q, k, v, k8, v8, scale):
        return adze.attention(q, k8, v8, k_scale=scale, v_scale=scale)

    found = {"adze": by_adze} | ({FP8: from_fp8} if case.queries == 1 else {}) | {"torch": by_torch}
    return found | {name: functools.partial(by_torch, backend=backend) for name, backend in BACKENDS.items()}


def tensors_of(case, device, dtype=torch.bfloat16):
    """q, k, v, and for a decode step what an 8-bit cache has. A prompt's heads are together in memory, a cache's
    tokens."""
    sizes = (case.heads, case.queries), (case.kv_heads, case.keys), (case.kv_heads, case.keys)
    if case.queries > 1:
        return [torch.randn(case.batch, n, h, case.dim, device=device, dtype=dtype).transpose(1, 2) for h, n in sizes]
    q, k, v = (torch.randn(case.batch, h, n, case.dim, device=device, dtype=dtype) for h, n in sizes)
    scale = torch.full((1,), 1 / 64, device=device)
    small = [torch.empty_like(x, dtype=torch.float8_e4m3fn) for x in (k, v)]
    for to, x in zip(small, (k, v), strict=True):
        for sequence in range(case.batch):  # one after the other: the largest caches have gigabytes
            to[sequence] = (x[sequence] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return [q, k, v, *small, scale]


def errors_of(case, variants, inputs, left_out):
    """The error of each variant in the first sequence; those that refuse the call are left out."""
    q, k, v = (x[:1] for x in inputs[:3])
    mask = None
    if case.causal:
        mask = torch.ones(case.queries, case.keys, dtype=torch.bool, device=q.device).tril()[None, None]
    errors = {}
    with warnings.catch_warnings():  # torch says in warnings why a backend refuses
        warnings.simplefilter("ignore")
        for name, way in list(variants.items()):
            try:
                out = way(*inputs)[:1]
            except RuntimeError as reason:
                if name.startswith("adze") or name == "torch":
                    raise
                text = str(reason).splitlines()[0][:120]
                left_out.append({"case": case.name, "variant": name, "reason": text})
                del variants[name]
                continue
            if name == FP8:
                k8, v8 = (x[:1].float() * inputs[5] for x in inputs[3:5])
                errors[name] = error(out, q, k8, v8, mask)
            else:
                errors[name] = error(out, q, k, v, mask)
    verified(case.name, errors, "adze")
    try:
        if FP8 in variants:
            verified(case.name, errors, FP8)
    except Wrong as reason:
        left_out.append({"case": case.name, "variant": FP8, "reason": str(reason)})
        del variants[FP8]
    return errors


def measure(what, case, options, left_out):
    """The row of a case."""
    variants = variants_of(case)
    first = tensors_of(case, options.device)
    errors = errors_of(case, variants, first, left_out)
    if options.device == "cuda":
        seconds = max(case.bytes / 4e12, case.flops / 4e14, 5e-6)
        calls = min(CALLS_MOST, max(1, round(GRAPH_SECONDS / seconds)))
        small = size_of(first[3:])  # an 8-bit cache must not fit the cache of the GPU either
        count = min(calls, COLD // (small or size_of(first)) + 1)
        sets = [first] + [tensors_of(case, options.device) for _ in range(count - 1)]
        us = time_on_gpu(variants, sets, calls, options.rounds)
        del sets
        torch.cuda.empty_cache()
    else:
        us = time_on_cpu(variants, first, options.seconds)
    peers = {name: value for name, value in us.items() if not name.startswith("adze")}
    best = min(peers, key=peers.get)
    return {
        "what": what, "model": case.model, "case": case.name, "dtype": "bf16", "call": case._asdict(), "us": us,
        "best": best, "ratio": peers[best] / us["adze"], "errors": errors,
        "tflops": {name: case.flops / value / 1e6 for name, value in us.items()},
        "gbps": case.bytes / us["adze"] / 1e3,
    }  # fmt: skip


def show(row):
    unit = row["tflops"] if row["what"] == "prefill" else row["us"]
    values = "  ".join(f"{name} {value:.2f}" for name, value in unit.items())
    print(f"{row['what']:8} {row['case']:38} {row['ratio']:5.2f}x of {row['best']:9} "
          f"{'TFLOP/s' if row['what'] == 'prefill' else 'us'}: {values}", flush=True)  # fmt: skip


def of_models(options, save):
    """A case that fails is left out; the others are still timed. What there is is saved after each: the largest cases
    are the last, and a machine may stop there."""
    rows, left_out = [], []
    torch.manual_seed(0)
    with torch.inference_mode():
        for what in options.what:
            for case in CASES[what]:
                case = case.smaller() if options.tiny else case
                try:
                    rows.append(measure(what, case, options, left_out))
                    show(rows[-1])
                except (Wrong, RuntimeError) as reason:
                    left_out.append({"case": case.name, "variant": "adze", "reason": str(reason)[:300]})
                save({"rows": rows, "left_out": left_out})
    for variant, reason in dict.fromkeys((gone["variant"], gone["reason"]) for gone in left_out):
        cases = [gone["case"] for gone in left_out if (gone["variant"], gone["reason"]) == (variant, reason)]
        print(f"left out: {variant} in {len(cases)} cases, the first {cases[0]}: {reason}")
    return {"rows": rows, "left_out": left_out}


# ---- Calls of diffusers' models, on the CPU ----


def tensors(call, dtype, device):
    batch, heads, m, n, d, masked = call
    torch.manual_seed(0)
    made = [torch.randn(batch, length, heads, d, device=device).to(dtype).permute(0, 2, 1, 3) for length in (m, n, n)]
    mask = torch.zeros(batch, 1, 1, n, device=device, dtype=dtype) if masked else None
    if masked:
        mask[..., n - n // 4 :] = -10000.0
    return (*made, mask)


def timed(run, seconds):
    """Seconds of a call, from as many as take so long."""
    calls, begin = 0, time.process_time()
    while True:
        run()
        calls, now = calls + 1, time.process_time()
        if now - begin >= seconds:
            return (now - begin) / calls


def of_diffusers(options):
    calls = [(*map(int, call.split("x")), False) for call in options.call] if options.call else CALLS
    rows = []
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}: ms, median of {options.rounds}")
    for dtype in options.dtype:
        for call in calls:
            q, k, v, mask = tensors(call, DTYPES[dtype], "cpu")
            ways = {
                "torch": lambda q=q, k=k, v=v, m=mask: F.scaled_dot_product_attention(q, k, v, m),
                "adze": lambda q=q, k=k, v=v, m=mask: adze.attention(q, k, v, m),
            }
            with torch.inference_mode():
                errors = {name: error(way(), q, k, v, mask) for name, way in ways.items()}
                verified(f"{dtype} {call}", errors, "adze")
                times = {name: [] for name in ways}
                for _ in range(options.rounds):
                    for name, way in ways.items():
                        times[name].append(timed(way, options.seconds))
            ms = {name: statistics.median(found) * 1e3 for name, found in times.items()}
            ratios = sorted(t / a for t, a in zip(times["torch"], times["adze"], strict=True))
            low, middle, high = ratios[len(ratios) // 4], statistics.median(ratios), ratios[-1 - len(ratios) // 4]
            rows.append({"dtype": dtype, "call": call, "ms": ms, "ratio": middle, "quartiles": (low, high)})
            shape = " ".join(f"{size:5}" for size in call[:5]) + (" mask" if call[5] else "     ")
            print(f"{dtype:4} {shape}  torch {ms['torch']:9.3f}  adze {ms['adze']:9.3f}  {middle:5.2f}x"
                  f" ({low:.2f} to {high:.2f})", flush=True)  # fmt: skip
    return {"rows": rows, "left_out": []}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--what", nargs="+", choices=CASES, help="calls of models (on a GPU: all)")
    parser.add_argument("--tiny", action="store_true", help="a few tokens of each call of a model")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES, help="of diffusers' calls")
    parser.add_argument("--call", nargs="+", help="batch, heads, queries, keys and dim of other calls, on the CPU")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.05, help="of each round on the CPU")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--commit", help="what the library was built from, where git cannot say")
    options = parser.parse_args()
    gpu = options.device == "cuda"
    if gpu and options.call:
        parser.error("--call is for the CPU; on a GPU --what chooses")
    options.what = options.what or (list(CASES) if gpu else None)
    about = {
        "adze_attention": 1,
        "machine": machine(options.device),
        "driver": ask_gpu("driver_version") if gpu else "",
        "commit": options.commit or commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "settings": {"rounds": options.rounds, "what": options.what, "tiny": options.tiny},
    }

    def save(found):
        if options.json:
            if "clocks" not in about:  # once, after a case: an idle GPU has others
                about["clocks"] = ask_gpu("clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem") if gpu else ""
            pathlib.Path(options.json).write_text(json.dumps(about | found, indent=1) + "\n")

    try:
        found = of_models(options, save) if options.what else of_diffusers(options)
    except Wrong as reason:
        raise SystemExit(str(reason)) from None
    save(found)
    return 1 if any(gone["variant"].startswith("adze") for gone in found["left_out"]) else 0


if __name__ == "__main__":
    sys.exit(main())
