"""Checks a patched module between its GEMMs: its children replay what they computed in the original one."""

import contextlib
import inspect
import itertools
import types

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

import adze
from roundings import HALVES, Moved, float_error


def output(model, inputs):
    return model(**inputs, return_dict=False)[0]


def tensors(value, name=""):
    """(name, tensor) of a nest of inputs or outputs, in order."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from tensors(item, f"{name}.{i}")


class FloatMatmuls(TorchFunctionMode):
    """GEMMs of bf16 on the CPU, computed in f32 and rounded once, as a processor with bf16 instructions computes
    them. Without such instructions torch's own take two hundred times as long. GEMMs are the model's part of the
    work, the same with adze and without.

    With another dtype and device, sums in a dtype twice as wide have the same bits in any order."""

    MATMULS = (F.linear, F.conv2d, F.scaled_dot_product_attention)

    def __init__(self, dtype=torch.bfloat16, wide=torch.float32, device="cpu"):
        super().__init__()
        self.dtype, self.wide, self.device = dtype, wide, device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        x = next(iter((*args, *kwargs.values())), None)
        if function not in self.MATMULS or x.dtype != self.dtype or x.device.type != self.device:
            return function(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, self._widened, (args, kwargs))
        return function(*args, **kwargs).to(self.dtype)

    def _widened(self, tensor):
        return tensor.to(self.wide) if tensor.dtype == self.dtype else tensor


class Tally:
    """Differences between outputs, counted per kind of op, so that a few wrong elements do not hide among many."""

    def __init__(self):
        self.counts = {}

    def compare(self, kind, what, expected, found):
        compare(f"{kind} {what}", expected, found)
        if expected.dtype in HALVES:
            equal, total = self.counts.get(kind, (0, 0))
            self.counts[kind] = equal + int((expected == found).sum()), total + expected.numel()

    def judge(self):
        """Float errors of 2^-19 cross the border between two bf16 numbers, 2^-9 apart, in one of 1000 elements."""
        assert self.counts
        for kind, (equal, total) in self.counts.items():
            assert total - equal <= 0.001 * total, f"{kind}: {total - equal} of {total} differ"


def compare(what, expected, found):
    """Each element is within a unit of its row's largest, or float's error."""
    assert expected.shape == found.shape and expected.dtype == found.dtype, what
    if not expected.is_floating_point():
        assert torch.equal(expected, found), what
        return
    a, b = expected.double(), found.double()
    largest = a.abs().amax(-1, keepdim=True).clamp_min(1e-30)  # sums cancel: their terms are of a row's size
    if expected.dtype == torch.float32:
        limit = float_error(expected.shape[-1]) * largest
    else:
        limit = torch.exp2(torch.floor(torch.log2(largest)) - (7 if expected.dtype == torch.bfloat16 else 10))
    worst = ((a - b).abs() - limit).max().item()
    assert worst <= 0, f"{what}: {worst:.3g} beyond the limit"


class Range:
    """Least and largest of what the model's own arithmetic may give for each element of a tensor."""

    def __init__(self, value):
        self.value = self.least = self.largest = value

    def take(self, value):
        assert value.shape == self.value.shape and value.dtype == self.value.dtype
        if value.dtype in HALVES:
            self.least, self.largest = torch.minimum(self.least, value), torch.maximum(self.largest, value)

    def judge(self, what, found):
        """In a half dtype an element must be the model's, or what the model computes when one of its roundings within
        float's error of a midpoint goes the other way."""
        if found.dtype not in HALVES:
            compare(what, self.value, found)
            return
        assert found.shape == self.value.shape and found.dtype == self.value.dtype, what
        inside = (found >= self.least) & (found <= self.largest) | found.isnan() & self.value.isnan()
        if not inside.all():
            at = tuple((~inside).nonzero()[0].tolist())
            raise AssertionError(
                f"{what}: {int((~inside).sum())} of {found.numel()} elements are no rounding of the model's, first "
                f"{at}: {found[at]:.9g}, the model has {self.value[at]:.9g}"
            )


class Seams:
    """A module's calls of its children and of attention: recorded first, then replayed, with their inputs compared.

    So each part between two GEMMs is checked on the same inputs, and one rounding that differs does not
    spread. Leaf norms and activations are not seams: they are what is fused."""

    DRAWS = 10

    FUSED = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.SiLU, nn.GELU, nn.Dropout, nn.Identity)

    def __init__(self, module):
        self.module, self.kind = module, type(module).__name__
        self.calls, self.forced, self.inside, self.drawing = {}, None, False, False

    def _children(self):
        for path, child in self.module.named_modules():
            names = path.split(".")
            inside = all(
                isinstance(self.module.get_submodule(".".join(names[:i])), (nn.ModuleList, nn.Sequential))
                for i in range(1, len(names))
            )
            fused = isinstance(child, self.FUSED) or type(child).__name__ == "RMSNorm"
            if path and inside and not fused and not isinstance(child, (nn.ModuleList, nn.Sequential)):
                yield path, child

    def call(self, path, names, function, args, kwargs):
        if self.inside:
            return function(*args, **kwargs)
        given = dict(tensors(dict(names.bind(*args, **kwargs).arguments)))
        if self.forced is None:
            self.inside = True
            result = function(*args, **kwargs)
            self.inside = False
            self.calls.setdefault(path, []).append(({name: Range(value) for name, value in given.items()}, result))
            return result
        expected, result = self.forced[path].pop(0)
        assert expected.keys() == given.keys(), f"{self.kind}: {path} is called with {list(given)}"
        for name, own in expected.items():
            self._meet(f"{self.kind} {path}{name}", own, given[name])
            if isinstance(getattr(function, "__self__", None), nn.Linear):  # which rounds otherwise if it is not
                assert own.value.is_contiguous() == given[name].is_contiguous(), f"{self.kind} {path}"
        return result

    def _meet(self, what, own, found):
        if self.drawing:
            own.take(found)
        else:
            own.judge(what, found)

    def record(self, args, kwargs):
        """The module's own output, and what its roundings may make of it and of its children's inputs."""
        result = self.run(args, kwargs)
        self.outputs = [(name, Range(value)) for name, value in tensors(result)]
        self.drawing = True
        for draw in range(self.DRAWS if any(t.dtype in HALVES for _, t in tensors(result)) else 0):
            with Moved(draw):
                self.replay(args, kwargs)
        self.drawing = False
        return result

    def replay(self, args, kwargs):
        """The module's output with replayed children; everything is checked."""
        self.forced = {path: list(calls) for path, calls in self.calls.items()}
        result = self.run(args, kwargs)
        left = [path for path, calls in self.forced.items() if calls]
        assert not left, f"{self.kind} does not call {left} as often as the original"
        for (name, own), (_, found) in itertools.zip_longest(self.outputs, tensors(result)):
            self._meet(f"{self.kind} output{name}", own, found)
        return result

    def run(self, args, kwargs):
        """The module's output. Its children are recorded the first time, and replayed from then on."""
        before = {}
        for path, child in self._children():
            before[child] = child.__dict__.get("forward")
            real = types.MethodType(type(child).forward, child)
            names = inspect.signature(real)
            child.forward = lambda *a, _c=(path, names, real), **k: self.call(*_c, a, k)
        Attention.seams = self
        try:
            return self.module(*args, **kwargs)
        finally:
            Attention.seams = None
            for child, forward in before.items():
                del child.forward
                if forward is not None:
                    child.forward = forward


class Attention:
    """Replaces diffusers' dispatch_attention_fn, so that it can be recorded and replayed too."""

    seams = None

    @staticmethod
    def wrap(function):
        names = inspect.signature(function)

        def dispatch_attention_fn(*args, **kwargs):
            if Attention.seams is None:
                return function(*args, **kwargs)
            return Attention.seams.call("attention", names, function, args, kwargs)

        return dispatch_attention_fn


def recorded(model, inputs, paths):
    """The first call of each of these modules."""
    calls = {}

    def hook(path):
        return lambda module, args, kwargs: calls.setdefault(path, (args, kwargs)) and None

    hooks = [
        model.get_submodule(path).register_forward_pre_hook(hook(path), with_kwargs=True) for path in paths if path
    ]
    result = output(model, inputs)
    for h in hooks:
        h.remove()
    return calls, result


@contextlib.contextmanager
def group_norms_in_float():
    """Group norms that round once. On CUDA torch 2.11 rounds each group's mean and 1 / deviation to the half dtype
    before it uses them. That moves a whole group by more than one rounding, so adze is compared with the formula."""
    forward = nn.GroupNorm.forward

    def in_float(self, x):
        if not x.is_cuda or x.dtype == torch.float32:
            return forward(self, x)
        weight, bias = (t if t is None else t.float() for t in (self.weight, self.bias))
        return F.group_norm(x.float(), self.num_groups, weight, bias, self.eps).to(x.dtype)

    nn.GroupNorm.forward = in_float
    try:
        yield
    finally:
        nn.GroupNorm.forward = forward


def check_numbers(model, inputs, most=2):
    """Every replaced module against the original one; of modules with the same class and rule, the first most."""
    handle = adze.patch(model)
    handle.disable()
    calls, expected = recorded(model, inputs, handle.patched)
    seen = {}
    for row in handle.rows:
        if row.rule is None or seen.get((row.cls, row.rule), 0) == most:
            continue
        assert row.path in calls, f"{row.path} was not called"
        seen[row.cls, row.rule] = seen.get((row.cls, row.rule), 0) + 1
        seams = Seams(model.get_submodule(row.path))
        with group_norms_in_float():
            seams.record(*calls[row.path])
        handle.enable()
        seams.replay(*calls[row.path])
        handle.disable()
    handle.enable()
    return handle, expected
