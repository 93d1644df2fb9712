"""`compare_torch.py --sweep`: random calls of every op, verified against its definition and timed with its peers.

What torch.compile makes is compiled before, by several processes at once (warming.py). On the CPU, calls are
smaller and not cold, outputs get memory that was used before, and adze is the Python package (`make python`), whose
operators run in torch's threads.
"""

import json
import math
import time

import compare_torch
import formulas
import product_formulas
import sweep_draw
import torch
import warming
from sweep_report import WORST, summary, summary_text, worst

PEER_UNITS = 8  # a peer rounds in between
PRODUCT_UNITS = 256  # of sums of many floats, in another order
CALLS = (20, 256)  # least and most in a graph; other memory is read before each graph, so 256 are enough to be cold
ROUNDS = 9
WARM_SHARE = 0.5  # of the time, for compiling
CPU_SECONDS, TINY_SECONDS = 0.05, 0.005  # of a turn on the CPU; where only the code is tested
GRAPH_SECONDS = 0.01  # of products: a graph has as many calls as take so long
DTYPES = compare_torch.DTYPES | {"i8": torch.int8, "u8": torch.uint8, "bool": torch.bool}


# ---- A call's tensors and its implementations ----


def values(spec, size, device):
    dtype = DTYPES[spec.dtype]
    if spec.values == "bits":
        low, high = {"i8": (-127, 128), "u8": (0, 256), "bool": (0, 2)}[spec.dtype]
        return torch.randint(low, high, (size,), device=device, dtype=torch.int16).to(dtype)
    if spec.values == "positive":
        return ((torch.rand(size, device=device) + 0.5) * spec.size).to(dtype)
    made = torch.randn(size, device=device, dtype=dtype)
    return made if spec.size == 1 else made.mul_(spec.size)


def tensor(spec, device):
    """Random values in a view whose memory is aligned to 16 bytes before the offset."""
    size = spec.offset + 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    return values(spec, size, device).as_strided(spec.shape, spec.stride, spec.offset)


def tensors(call, device):
    """The tensors of a call, and what its peers read instead of some of them."""
    given = {name: tensor(spec, device) for name, spec in call.tensors.items()}
    return given | product_formulas.instead(call, given)


def adze_way(adze, call, device):
    dtype = compare_torch.DTYPES[call.main.dtype]

    def way(given):
        outputs = {name: torch.empty(spec.shape, device=device, dtype=dtype) for name, spec in call.outputs.items()}
        adze(call.op, **outputs, **{name: given[name] for name in call.tensors}, **call.numbers)
        return list(outputs.values())

    return way


class Operators:
    """adze's operators of torch, called as Adze is."""

    def __init__(self):
        from adze.operators import _ops  # registers them

        self.ops, self.known = _ops.ops, {}

    def __call__(self, op, flags=0, **fields):
        """Flags are hints for a GPU, which operators do not take."""
        if op not in self.known:  # a small call takes less time than looking it up
            into = getattr(self.ops, op).out
            absent = [argument.name for argument in into._schema.arguments if not argument.has_default_value()]
            self.known[op] = into, dict.fromkeys(absent)
        into, absent = self.known[op]
        into(**absent | fields)


def compiled_way(call, tuned):
    """To be called in inference mode, as the measurement is: the mode is a part of the key of the disk cache."""
    plain, numbers = formulas.PLAIN[call.op], dict(call.numbers)
    options = {"max_autotune": True} if tuned else None
    return torch.compile(lambda given: plain(**given, **numbers), dynamic=False, options=options)


def peers(call, tuned):
    if call.op in sweep_draw.PRODUCTS:  # max_autotune would compile for seconds a shape, to choose cuBLAS or its like
        return product_formulas.peers(call)
    numbers = dict(call.numbers)
    found = {"eager": lambda given: formulas.EAGER[call.op](**given, **numbers), "compile": compiled_way(call, tuned)}
    liger = formulas.liger(call.op, call.tensors | numbers)
    if liger:
        found["liger"] = lambda given: liger(**given, **numbers)
    return found


def proven(call, adze, tuned, given):
    """The implementations that compute this call, and the error of adze's as a share of the bound."""
    device = next(iter(given.values())).device
    ways = {"adze": adze_way(adze, call, device)}
    try:
        got = ways["adze"](given)
    except RuntimeError as error:  # a valid call that adze refuses
        return {}, math.inf, {"adze": str(error)}
    if call.op in sweep_draw.PRODUCTS:
        worst, exacts = product_formulas.error_of(call, got, given)
    else:
        worst, exacts = formulas.error_of(call.op, got, given | call.numbers)
    unit = torch.finfo(got[0].dtype).eps
    left_out = {}
    for name, way in peers(call, tuned).items():
        try:
            found = product_formulas.seen(call, compare_torch.listed(way(given)))
            off = max(
                ((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, exacts, strict=True)
            )
            if not off < (PEER_UNITS if unit > 1e-6 or not call.flops else PRODUCT_UNITS) * unit:
                raise RuntimeError(f"computes something else: off by {off / unit:.1f} units")
            ways[name] = way
        except Exception as error:  # a peer that does not support this call
            left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return ways, worst, left_out


def warm(job):
    call, device, tuned = job
    compiled_way(call, tuned)(tensors(call, device))


# ---- Measuring ----


def least_seconds(call):
    """Of a call, by what it moves and by what it computes: about what a data center's GPU does."""
    return call.bytes / 4e12, call.flops / (2e13 if call.main.dtype == "f32" else 4e14)


def calls_of(call):
    """How many calls a graph has."""
    if not call.flops:
        return min(max(compare_torch.COLD // call.bytes + 1, CALLS[0]), CALLS[1])
    return min(max(round(GRAPH_SECONDS / max(5e-6, *least_seconds(call))), 1), CALLS[1])


def measure(call, adze, device, tuned, ceiling, seconds):
    first = tensors(call, device)
    ways, worst, left_out = proven(call, adze, tuned, first)
    row = {"op": call.op, "line": call.line, "dtype": call.main.dtype, "bytes": call.bytes, "aligned": call.aligned}
    row |= {"error": worst, "left_out": left_out}
    if call.flops:
        moved, computed = least_seconds(call)
        row |= {"flops": call.flops, "computes": computed > moved}
    if not worst <= 1:
        return row  # a wrong call has no speed
    if device == "cuda":
        calls = calls_of(call)
        count = min(compare_torch.COLD // call.bytes + 1, calls)
        sets = [(first,)] + [(tensors(call, device),) for _ in range(count - 1)]
        us = compare_torch.time_on_gpu(ways, sets, calls, ROUNDS)
    else:
        us = compare_torch.time_on_cpu(ways, (first,), seconds)
    row["us"] = us
    others = {name: value for name, value in us.items() if name != "adze"}
    if others:
        row["best"] = min(others, key=others.get)
        row["ratio"] = others[row["best"]] / us["adze"]
    row["gbps"] = call.bytes / us["adze"] / 1000
    row["share"] = row["gbps"] / ceiling
    return row


def show(row):
    if "ratio" not in row:
        print(f"{'WRONG' if not row['error'] <= 1 else 'no peer':>9} {row['error']:.2f} of the bound  {row['line']}")
        return
    times = " ".join(f"{name} {us:.2f}" for name, us in row["us"].items())
    where = "      " if row["aligned"] else "off16 "
    print(f"{row['ratio']:8.2f}x {100 * row['share']:5.1f} % of copy  {where}us: {times}\n           {row['line']}")


def run(options, adze):
    """Returns the exit status: 1 where a call is wrong."""
    begin, device, tiny = time.monotonic(), options.device, options.tiny
    seconds = TINY_SECONDS if tiny else CPU_SECONDS
    ops = (options.op,) if options.op else sweep_draw.OPS
    limits = sweep_draw.TINY if tiny else sweep_draw.GPU if device == "cuda" else sweep_draw.CPU
    calls = sweep_draw.draws(options.seed, options.count, ops, limits)
    if device == "cpu" and not tiny:
        adze = Operators()
        if not compare_torch.keep_freed_memory():
            raise SystemExit("mallopt refused the setting for reused memory")
    jobs = [(call, device, not options.plain) for call in calls if call.op not in sweep_draw.PRODUCTS]
    warming.compile_before(warm, jobs, warming.workers(options), WARM_SHARE * options.seconds)
    rows, left = [], 0
    with torch.inference_mode():
        ceiling = compare_torch.copy_gbps(device, tiny, ROUNDS, seconds)
        print(f"copy {ceiling:.5g} GB/s", flush=True)
        for call in calls:
            if time.monotonic() - begin > options.seconds:
                left += 1
                continue
            rows.append(measure(call, adze, device, not options.plain, ceiling, seconds))
            if options.verbose:
                show(rows[-1])
            torch._dynamo.reset()
            if device == "cuda":
                torch.cuda.empty_cache()
    found = summary(rows, len(calls))
    print(f"\nThe {min(WORST, len(rows))} worst:")
    for row in worst(rows):
        show(row)
    for row in rows:
        for name, why in row["left_out"].items():
            print(f"left out: {name}: {why}: {row['line']}")
    print(summary_text(found) + (f" {left} were not run: the time was over." if left else ""))
    print(f"{time.monotonic() - begin:.0f} s")
    if options.json:
        gpu = device == "cuda"
        whole = {
            "adze_sweep": 1,
            "machine": compare_torch.machine(device),
            "driver": compare_torch.ask_gpu("driver_version") if gpu else "",
            "clocks": compare_torch.ask_gpu("clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem") if gpu else "",
            "commit": options.commit or compare_torch.commit(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "settings": {"seed": options.seed, "count": options.count, "tuned": not options.plain}
            | ({"op": options.op} if options.op else {}),
            "copy_gbps": ceiling,
            "summary": found,
        }
        with open(options.json, "w") as file:
            json.dump(whole | {"rows": rows}, file, indent=1)
            file.write("\n")
    return 1 if found["wrong"] else 0
