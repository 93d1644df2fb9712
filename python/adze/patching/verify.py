"""adze.verify: the original and the patched forward of every module side by side, on the inputs of a real call."""

import contextlib
import copy
import dataclasses
import statistics
import time

import torch

from .frame import PatchHandle, _install, active_handles, is_adze, named_modules, own_forward

_INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def ulps(a, b):
    """Units in the last place between two tensors of one dtype, element by element; 0 where both are NaN."""
    if a.dtype not in _INTEGERS or a.dtype != b.dtype or a.shape != b.shape:
        raise ValueError(f"cannot compare {a.dtype} {tuple(a.shape)} with {b.dtype} {tuple(b.shape)}")

    def ordered(x):
        bits = x.detach().contiguous().view(_INTEGERS[x.dtype]).to(torch.int64)
        lowest = torch.iinfo(_INTEGERS[x.dtype]).min
        return torch.where(bits < 0, lowest - bits, bits)

    return torch.where(a.isnan() & b.isnan(), 0, (ordered(a) - ordered(b)).abs())


def _tensors(value):
    """The float tensors in a module's output."""
    if isinstance(value, torch.Tensor):
        return [value] if value.dtype in _INTEGERS else []
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, (tuple, list)) else []


def compare(a, b):
    """Of all tensors in two outputs: share of equal elements, worst difference in ulps and over the largest value.

    Ulps say much of an op that rounds once. A sum whose terms cancel is near 0, and may be many of its ulps away."""
    pairs = [(x, y) for x, y in zip(_tensors(a), _tensors(b), strict=True) if x.numel()]
    if not pairs:
        return 1.0, 0, 0.0
    apart = torch.cat([ulps(x, y).flatten() for x, y in pairs])
    relative = max(((x.double() - y.double()).abs().max() / x.double().abs().max()).item() for x, y in pairs)
    return (apart == 0).double().mean().item(), int(apart.max()), relative if apart.any() else 0.0


def _kept(value):
    """A copy that later steps of the model cannot change. Caches are deep copies."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_kept(item) for item in value)
    if type(value) is dict:
        return {key: _kept(item) for key, item in value.items()}
    return copy.deepcopy(value)


def _run(module, args, kwargs):
    """The output of a call, and the median of its seconds; arguments are copied for each, outside the time."""
    times, output = [], None
    cuda = any(t.is_cuda for t in module.parameters()) or any(t.is_cuda for t in _tensors((args, kwargs)))
    while len(times) < 4 or (sum(times) < 0.02 and len(times) < 20):
        own_args, own_kwargs = _kept(args), _kept(kwargs)
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        output = module(*own_args, **own_kwargs)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return output, statistics.median(times[1:])


@dataclasses.dataclass
class Comparison:
    """One module, or the whole model (path ""): the result of compare(), and seconds without and with adze."""

    path: str
    cls: str
    equal: float
    worst: int
    relative: float
    original: float
    patched: float


@dataclasses.dataclass
class Verification:
    rows: list[Comparison]

    def __str__(self):
        lines = [("module", "class", "equal", "worst", "of largest", "original", "adze", "")]
        for row in self.rows:
            path = row.path or "(all)"
            speed = f"{row.original / row.patched:.2f}x"
            times = [f"{t * 1e6:.1f} us" for t in (row.original, row.patched)]
            lines.append(
                (path, row.cls, f"{row.equal:.3%}", f"{row.worst} ulp", f"{row.relative:.1e}", *times, speed)
            )
        widths = [max(len(line[i]) for line in lines) for i in range(8)]
        return "\n".join(
            "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        )


def _calls(model, handles, inputs, kw):
    """The arguments with which the unpatched model calls each module that adze has a forward for."""
    sites = {id(site.module): site for handle in handles for site in handle.sites if site.active() is not None}
    calls, hooks = {}, []

    def keep(module, args, kwargs):
        calls.setdefault(id(module), (_kept(args), _kept(kwargs)))

    for handle in handles:
        handle.disable()
    try:
        for site in sites.values():
            hooks.append(site.module.register_forward_pre_hook(keep, with_kwargs=True))
        model(*inputs, **kw)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def verify(model, *inputs, **kw):
    """Calls the model, and every patched module, without and with adze on the same inputs.

    A model that is not patched is patched for the duration. The result prints as a table."""
    with contextlib.ExitStack() as stack:
        handles = active_handles(model)
        if not handles:
            handles = [_install(model, None, "match", (), False, over=True)]
            stack.callback(handles[0].remove)
        stack.callback(lambda: [handle.enable() for handle in handles])
        stack.enter_context(torch.no_grad())
        return Verification(_compare_all(model, handles, inputs, kw))


def _compare_all(model, handles: list[PatchHandle], inputs, kw):
    paths = [(path, module) for path, module in named_modules(model) if is_adze(own_forward(module))]
    calls = _calls(model, handles, inputs, kw)
    seen = {}
    for enabled in (False, True):
        for handle in handles:
            handle.enable() if enabled else handle.disable()
        for path, module in [*paths, ("", model)]:
            args, kwargs = (inputs, kw) if path == "" else calls.get(id(module), (None, None))
            if args is not None:
                seen.setdefault(path, []).append((type(module).__name__, *_run(module, args, kwargs)))
    return [
        Comparison(path, cls, *compare(a, b), original, patched)
        for path, ((cls, a, original), (_, b, patched)) in seen.items()
    ]
