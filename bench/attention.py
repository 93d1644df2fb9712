"""adze.attention compared with torch's scaled_dot_product_attention, on calls of diffusers' models: queries, keys and
values as [batch, tokens, heads, dim] in memory. Both are verified against float64 at some of the rows, then timed in
turn. On the CPU with one thread, and by the time that the thread had of its core, which other programs change little.
The table of python/adze/patching/attention.py has what was faster here.

    python3 bench/attention.py [--device cpu|cuda] [--dtype bf16 ...] [--call 1x4x64x64x128 ...] [--json FILE]
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F

import adze

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
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


def tensors(call, dtype, device):
    batch, heads, m, n, d, masked = call
    torch.manual_seed(0)
    made = [torch.randn(batch, length, heads, d, device=device).to(dtype).permute(0, 2, 1, 3) for length in (m, n, n)]
    mask = torch.zeros(batch, 1, 1, n, device=device, dtype=dtype) if masked else None
    if masked:
        mask[..., n - n // 4 :] = -10000.0
    return (*made, mask)


def error(out, q, k, v, mask):
    """The root of the mean square error of the first and the last queries."""
    rows = torch.tensor([*range(min(4, q.shape[2])), q.shape[2] - 1], device=q.device)
    exact = F.scaled_dot_product_attention(
        q[:, :, rows].double(), k.double(), v.double(), None if mask is None else mask.double()
    )
    return (out[:, :, rows].double() - exact).square().mean().sqrt().item()


def timed(run, seconds, device):
    """Seconds of a call, from as many as take so long."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    calls, begin = 0, clock()
    while True:
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        calls, now = calls + 1, clock()
        if now - begin >= seconds:
            return (now - begin) / calls


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--call", nargs="+", help="batch, heads, queries, keys and dim of other calls")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--json")
    options = parser.parse_args()
    calls = [(*map(int, call.split("x")), False) for call in options.call] if options.call else CALLS
    rows = []
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}: ms, median of {options.rounds}")
    for dtype in options.dtype:
        for call in calls:
            q, k, v, mask = tensors(call, DTYPES[dtype], options.device)
            ways = {
                "torch": lambda q=q, k=k, v=v, m=mask: F.scaled_dot_product_attention(q, k, v, m),
                "adze": lambda q=q, k=k, v=v, m=mask: adze.attention(q, k, v, m),
            }
            with torch.inference_mode():
                errors = {name: error(way(), q, k, v, mask) for name, way in ways.items()}
                if errors["adze"] > 2 * errors["torch"]:
                    raise SystemExit(
                        f"{dtype} {call}: the error of adze is {errors['adze']}, torch's {errors['torch']}"
                    )
                times = {name: [] for name in ways}
                for _ in range(options.rounds):
                    for name, way in ways.items():
                        times[name].append(timed(way, options.seconds, options.device))
            ms = {name: statistics.median(found) * 1e3 for name, found in times.items()}
            ratios = sorted(t / a for t, a in zip(times["torch"], times["adze"], strict=True))
            low, middle, high = ratios[len(ratios) // 4], statistics.median(ratios), ratios[-1 - len(ratios) // 4]
            rows.append({"dtype": dtype, "call": call, "ms": ms, "ratio": middle, "quartiles": (low, high)})
            shape = " ".join(f"{size:5}" for size in call[:5]) + (" mask" if call[5] else "     ")
            print(f"{dtype:4} {shape}  torch {ms['torch']:9.3f}  adze {ms['adze']:9.3f}  {middle:5.2f}x"
                  f" ({low:.2f} to {high:.2f})", flush=True)  # fmt: skip
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
