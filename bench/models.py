"""What the model benchmarks share: models with random weights, the variants of a model, their check and their time.

A variant is named by its parts: "eager", "adze" (patched), "adze fast" (with numerics="fast") or "adze norm" (its
norms alone), then "compile" (torch.compile) or, in place of both, "pass" (adze.compile of the unpatched model), then
"graph" (adze.graph over it, CUDA only).
"""

import argparse
import contextlib
import copy
import fcntl
import gc
import json
import pathlib
import re
import statistics
import sys
import time
import traceback

import torch
from compare_torch import DTYPES, ask_gpu, commit, machine
from torch.utils import _pytree as pytree

import adze

CPU_VARIANTS = ["eager", "compile", "adze", "adze + compile", "pass"]
FAST_VARIANTS = ["adze fast", "adze fast + compile"]  # only when asked for
PATCHED = {"adze": {}, "adze fast": {"numerics": "fast"}, "adze norm": {"ops": ["norm"]}}  # arguments of adze.patch
GRAPH_VARIANTS = ["eager + graph", "compile + graph", "adze + graph", "adze + compile + graph", "pass + graph"]


# ---- Models without a checkpoint ----


def _fill(model):
    """Random weights; norms as they are before training."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0, 0.02)
    for module in model.modules():
        name = type(module).__name__
        if "Norm" in name and isinstance(getattr(module, "weight", None), torch.Tensor):
            module.weight.fill_(0 if "Gemma" in name else 1)
            if isinstance(getattr(module, "bias", None), torch.Tensor):
                module.bias.zero_()


def _rebuild_buffers(model, device):
    """Buffers are computed by constructors, which have run on the meta device."""
    for path, module in model.named_modules():
        if not module._buffers:
            continue
        if "Rotary" not in type(module).__name__ or not hasattr(module, "config"):
            raise SystemExit(f"the buffers of {path} ({type(module).__name__}) cannot be rebuilt")
        fresh = type(module)(module.config)
        for name in module._buffers:
            module._buffers[name] = fresh._buffers[name].to(device)


def build(make, options):
    """The module that `make` constructs, with random weights, made on the device."""
    with torch.device("meta"):
        model = make()
    with torch.no_grad():
        model = torch.nn.Module.to(model, DTYPES[options.dtype])
        model = model.to_empty(device=options.device).eval().requires_grad_(False)
        _fill(model)
        _rebuild_buffers(model, options.device)
    return model


def rand(options, *shape, seed=1):
    generator = torch.Generator(device=options.device).manual_seed(seed)
    return torch.randn(shape, device=options.device, generator=generator).to(DTYPES[options.dtype])


# ---- Variants ----


class LeftOut(Exception):
    """Why a variant was not timed."""


def _compiled(module, regional, settings):
    """torch.compile of the module; of its repeated blocks one by one when regional, which takes a fraction of the
    time to compile. Those blocks."""
    if not regional:
        return torch.compile(module, **settings), []
    names = getattr(module, "_repeated_blocks", None)
    if not names:
        raise LeftOut("the model does not say which of its blocks repeat")
    blocks = [m for m in module.modules() if type(m).__name__ in names]
    for block in blocks:
        block.compile(**settings)
    return module, blocks


@contextlib.contextmanager
def variant(name, module, device, mode=None, regional=False):
    """A callable like the module, in this variant; afterwards the module is as it was."""
    parts = name.split(" + ")
    if set(parts) - {"eager", *PATCHED, "compile", "pass", "graph"}:
        raise ValueError(f"there is no variant {name!r}")
    mode = None if "graph" in parts else mode  # modes with CUDA graphs of their own cannot be captured
    torch._dynamo.reset()
    handle = adze.patch(module, **PATCHED[parts[0]]) if parts[0] in PATCHED else None
    made, blocks = module, []
    try:
        if handle is not None and not handle.patched:
            raise LeftOut("adze.patch found nothing to replace")
        if "compile" in parts:
            made, blocks = _compiled(module, regional, {"mode": mode, "dynamic": False})
        elif "pass" in parts:
            made = adze.compile(module, devices=(device,), mode=mode, dynamic=False)
        # The pass does not run over a graph from Inductor's cache, and its counts would be missing.
        with torch.compiler.config.patch(force_disable_caches="pass" in parts):
            yield adze.graph(made) if "graph" in parts else made
    finally:
        if handle is not None:
            handle.remove()
        for block in blocks:
            block._compiled_call_impl = None
        module.__dict__.pop("adze_pass", None)  # a compiled module keeps what is set on it in the original
        torch._dynamo.reset()
        if device == "cuda":
            torch.cuda.empty_cache()


def is_compiled(name):
    return not {"compile", "pass"}.isdisjoint(name.split(" + "))


def replaced(made):
    """The counts of adze's pass, an attribute of the compiled module, which a graph hands on."""
    own = getattr(made, "adze_pass", None)
    return dict(own.counts) if own is not None else None


# ---- The check ----


def tensors(outputs):
    return [leaf.detach().clone() for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def widened(value, dtype):
    return pytree.tree_map(
        lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t, value
    )


def distance(got, exact):
    """Root mean square of the difference, over that of the exact values."""
    off = sum((a.double() - b.double()).square().sum() for a, b in zip(got, exact, strict=True))
    return (off / sum(b.double().square().sum() for b in exact)).sqrt().item()


def share_equal(got, want):
    equal = sum((a == b).sum() for a, b in zip(got, want, strict=True))
    return equal.item() / sum(b.numel() for b in want)


class Check:
    """Compares outputs with eager's, and with those of the same model in a wider dtype. The error of a variant may be
    twice that of eager. This finds a wrong computation; `adze check` verifies the error of each kernel."""

    def __init__(self, eager, exact):
        self.eager, self.exact = eager, exact
        self.eager_error = distance(eager, exact)

    def __call__(self, got):
        if [(t.shape, t.dtype) for t in got] != [(t.shape, t.dtype) for t in self.eager]:
            raise LeftOut("outputs have other shapes or dtypes than eager's")
        error = distance(got, self.exact)
        if not error <= 2 * self.eager_error:  # also for NaN
            raise LeftOut(
                f"off by {error:.2e} from the model in a wider dtype, where eager is off by {self.eager_error:.2e}"
            )
        return {"error": error, "eager_error": self.eager_error, "equal": share_equal(got, self.eager)}


# ---- Time ----


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def step_ms(call, steps, device):
    """Milliseconds of each of so many calls; on CUDA from event to event, without waiting in between. No garbage is
    collected meanwhile."""
    gc.collect()
    gc.disable()
    try:
        return _step_ms(call, steps, device)
    finally:
        gc.enable()


def _step_ms(call, steps, device):
    synchronize(device)
    if device == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]
    times = [time.perf_counter()]
    for _ in range(steps):
        call()
        times.append(time.perf_counter())
    return [(b - a) * 1000 for a, b in zip(times, times[1:], strict=False)]


def summary(ms):
    """Median, and the distance of the quartiles as a share of it."""
    median = statistics.median(ms)
    low, _, high = statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else (median,) * 3
    return {"ms": median, "spread": (high - low) / median, "steps": len(ms)}


def busy_us(spans):
    """Length of the union of (begin, end): kernels may overlap."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def work_of(call):
    """What the GPU did in a call: (begin, end, name) in microseconds."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    work = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    work = [e for e in work if not getattr(e, "is_user_annotation", False)]
    return [(e.time_range.start, e.time_range.end, e.name) for e in work]


def profile(call):
    work = work_of(call)
    return {"busy_ms": busy_us(span[:2] for span in work) / 1000, "launches": len(work)}


def by_kernel(work, times):
    """The busy time of each kernel, most first, of work that was done `times` times. Of two that overlap, as with
    programmatic dependent launch, the later one has the time after the end of the first."""
    found, until = {}, float("-inf")
    for begin, end, name in sorted(work):
        name = re.sub(r"^void |[<(].*", "", name.replace("(anonymous namespace)::", "")).rpartition("::")[2].strip()
        row = found.setdefault(name, {"kernel": name, "launches": 0, "us": 0.0})
        row["launches"] += 1 / times
        row["us"] += max(0.0, end - max(begin, until)) / times
        until = max(until, end)
    return sorted(found.values(), key=lambda row: -row["us"])


@contextlib.contextmanager
def turn(path):
    """Holds a lock on the file. Other processes may build models and compile meanwhile, but not measure."""
    if not path:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- A comparison ----


def progress(names, title):
    """The names, with a bar where tqdm is installed, else a line each."""
    try:
        from tqdm import tqdm
    except ImportError:
        for i, name in enumerate(names):
            print(f"{title} {i + 1}/{len(names)}: {name}", file=sys.stderr, flush=True)
            yield name
        return
    with tqdm(names, desc=title, file=sys.stderr) as bar:
        for name in bar:
            bar.set_postfix_str(name)
            yield name


class Comparison:
    """Rows of results. `measure` adds those of one module: every variant is checked, then timed."""

    def __init__(self, options):
        self.options, self.rows, self.left_out = options, [], []
        self.device = options.device

    def measure(self, module, inputs, names, *, what, prepare=None, whole=None, mode=None):
        """`prepare(module)` runs before every measurement. `whole(made)` is a longer run of the variant, which is
        timed once. It returns tensors, whose share of elements equal to eager's is recorded."""
        prepare = prepare or (lambda module: None)

        def once(made):
            if self.device == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
            return made(**inputs)

        with torch.no_grad():
            with turn(self.options.turn):
                prepare(module)
                eager = tensors(once(module))
                prepare(module)
                eager_whole = whole and tensors(whole(module))
                check = Check(eager, self._exact(module, inputs, prepare))
            regional, first = getattr(self.options, "regional", False), len(self.rows)
            # After a compiler or a profiler has run, launches cost more: variants without them are timed first.
            for name in progress(sorted(names, key=is_compiled), what):
                row = {"what": what, "variant": name}
                try:
                    with variant(name, module, self.device, mode, regional) as made:
                        prepare(module)
                        once(made)  # compiles, captures
                        self._assert_captured(made)
                        with turn(self.options.turn):
                            row |= self._row(made, name, module, once, prepare, check, whole, eager_whole)
                    self.rows.append(row)
                except Exception as error:  # the other variants are still timed; main fails at the end
                    if not isinstance(error, LeftOut):
                        traceback.print_exc()
                    text = f"{type(error).__name__}: {error}".removeprefix("LeftOut: ").splitlines()[0][:300]
                    self.left_out.append({"what": what, "variant": name, "reason": text})
            for row in self.rows[first:]:
                if self.device == "cuda" and not is_compiled(row["variant"]):
                    with variant(row["variant"], module, self.device, mode, regional) as made:
                        prepare(module)
                        once(made)
                        prepare(module)
                        with turn(self.options.turn):
                            row |= profile(lambda made=made: once(made))

    def _row(self, made, name, module, once, prepare, check, whole, eager_whole):
        """The checked outputs of a variant, and its times."""
        prepare(module)
        row = check(tensors(once(made)))
        if whole:
            prepare(module)
            row["whole_equal"] = share_equal(tensors(whole(made)), eager_whole)
            prepare(module)
            row["whole_ms"] = step_ms(lambda: whole(made), 1, self.device)[0]
        prepare(module)
        for _ in range(self.options.warmup_iterations):
            once(made)
        prepare(module)
        row |= summary(step_ms(lambda: once(made), self.options.steps, self.device))
        prepare(module)
        if self.device == "cuda" and is_compiled(name):
            row |= profile(lambda: once(made))
        if replaced(made) is not None:
            row["replaced"] = replaced(made)
        return row

    def _exact(self, module, inputs, prepare):
        """Outputs of a copy in a wider dtype."""
        wide = torch.float64 if self.options.dtype == "f32" else torch.float32
        other = torch.nn.Module.to(copy.deepcopy(module), wide)
        prepare(other)
        exact = tensors(other(**widened(inputs, wide)))
        del other
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return exact

    @staticmethod
    def _assert_captured(made):
        if isinstance(made, adze.GraphHandle) and not made.captured:
            raise LeftOut(f"no graph was captured: {made.report()}")

    # ---- Results ----

    def table(self):
        eager = {row["what"]: row["ms"] for row in self.rows if row["variant"] == "eager"}
        lines = [["", "variant", "ms", "spread", "eager / it", "GPU ms", "launches", "equal", "error / eager's"]]
        lines[0] += ["whole ms", "whole equal"] if any("whole_ms" in row for row in self.rows) else []
        for row in self.rows:
            ratio = f"{eager[row['what']] / row['ms']:.2f}" if row["what"] in eager else "-"
            lines.append([row["what"], row["variant"], f"{row['ms']:.3f}", f"{100 * row['spread']:.1f} %", ratio])
            lines[-1] += [f"{row['busy_ms']:.3f}", str(row["launches"])] if "busy_ms" in row else ["-", "-"]
            lines[-1] += [f"{100 * row['equal']:.2f} %", f"{row['error'] / max(row['eager_error'], 1e-30):.2f}"]
            lines[-1] += [f"{row['whole_ms']:.1f}", f"{100 * row['whole_equal']:.2f} %"] if "whole_ms" in row else []
            lines[-1] += ["-"] * (len(lines[0]) - len(lines[-1]))
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        text = []
        for line in lines:
            cells = zip(line, widths, strict=True)
            text.append("  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(cells)))
        text += [f"left out: {x['what']}, {x['variant']}: {x['reason']}" for x in self.left_out]
        return "\n".join(text)

    def finish(self, script, model):
        """Shows and writes the results; the exit status."""
        print(self.table())
        write_json(self.options, {"script": script, "model": model, "left_out": self.left_out, "rows": self.rows})
        if self.options.plot and self.rows:
            groups = {}
            for row in self.rows:
                groups.setdefault(row["what"], {})[row["variant"]] = row["ms"]
            plot(self.options.plot, groups, "ms")
        return 1 if self.left_out else 0


# ---- The programs ----


def plot(path, groups, unit):
    """Bars: {title: {name: value}}."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(groups))
    lines = -(-len(groups) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(6 * columns, 4 * lines), squeeze=False, layout="tight")
    for axis in axes.flat[len(groups) :]:
        axis.remove()
    for axis, (title, values) in zip(axes.flat, groups.items(), strict=False):
        bars = axis.barh(list(values), list(values.values()))
        axis.bar_label(bars, fmt="%.4g", padding=3)
        axis.set(title=title, xlabel=unit)
        axis.invert_yaxis()
        axis.margins(x=0.15)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def write_json(options, result):
    if not options.json:
        return
    gpu = options.device == "cuda"
    hidden = ("json", "plot", "commit")
    whole = {
        "adze_models": 1,
        "machine": machine(options.device),
        "driver": ask_gpu("driver_version") if gpu else "",
        "clocks": ask_gpu("clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem") if gpu else "",
        "commit": options.commit or commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "settings": {name: value for name, value in vars(options).items() if name not in hidden},
    }
    pathlib.Path(options.json).write_text(json.dumps(whole | result, indent=1) + "\n")


class Parser(argparse.ArgumentParser):
    def parse_args(self, *args, **kwargs):
        options = super().parse_args(*args, **kwargs)
        options.dtype = options.dtype or ("bf16" if options.device == "cuda" else "f32")
        return options


def parser(doc, steps=None):
    """The options that all benchmarks have, and those about steps where `steps` has a default."""
    made = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--dtype", choices=DTYPES, help="(bf16; on a CPU f32)")
    made.add_argument("--tiny", action="store_true", help="a configuration that runs on a CPU in seconds")
    if steps is not None:
        made.add_argument("--steps", type=int, default=steps, help=f"steps that are timed ({steps})")
        made.add_argument("--warmup-iterations", type=int, default=3, help="steps before them (3)")
    made.add_argument("--variants", nargs="+", metavar="NAME", help="these instead of all")
    made.add_argument("--json", metavar="FILE")
    made.add_argument("--turn", metavar="FILE", help="a lock file: processes that name it take turns to measure")
    made.add_argument("--plot", metavar="PNG", help="bars; needs matplotlib")
    made.add_argument("--commit", help="what the library was built from, where git cannot say")
    return made


def variants(options):
    """eager, and the variants of --variants; by default all that run on this device, except the fast ones."""
    usual, fast = CPU_VARIANTS, FAST_VARIANTS
    if options.device == "cuda":
        usual, fast = usual + GRAPH_VARIANTS, fast + [f"{name} + graph" for name in fast]
    names = options.variants or usual
    unknown = [name for name in names if name not in usual + fast]
    if unknown:
        known = ", ".join(usual + fast)
        raise SystemExit(f"on {options.device} there is no variant {unknown[0]!r}; there are {known}")
    return ["eager", *[name for name in names if name != "eager"]]
