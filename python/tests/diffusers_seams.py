"""Judges a patched module between its matrix products: its children play back what they did in the original one."""

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


class FloatProducts(TorchFunctionMode):
    """Products of bf16 on the CPU, computed in f32 and rounded once, as a processor with bf16 does them: one without
    takes two hundred times as long. They are the model's part of the work, the same with adze and without."""

    PRODUCTS = (F.linear, F.conv2d, F.scaled_dot_product_attention)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        x = next(iter((*args, *kwargs.values())), None)
        if function not in self.PRODUCTS or x.dtype != torch.bfloat16 or x.device.type != "cpu":
            return function(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, self._widened, (args, kwargs))
        return function(*args, **kwargs).to(torch.bfloat16)

    @staticmethod
    def _widened(tensor):
        return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


class Tally:
    """How far outputs of ops are from the model's own, by kind of module: few elements do not hide among many."""

    def __init__(self):
        self.counts = {}

    def compare(self, kind, what, expected, found):
        assert expected.shape == found.shape and expected.dtype == found.dtype, f"{kind} {what}"
        if not expected.is_floating_point():
            assert torch.equal(expected, found), f"{kind} {what}"
            return
        a, b = expected.double(), found.double()
        largest = a.abs().amax(-1, keepdim=True).clamp_min(1e-30)  # sums cancel: their terms are of a row's size
        if expected.dtype == torch.float32:
            # Both sides sum a row in at least 16 lanes and take a root of the sum (dim / 32 + 2 roundings each), then
            # round at most 16 times each; a rounding is half a unit, 2^-24.
            limit = (expected.shape[-1] / 16 + 4 + 32) * 2.0**-24 * largest
        else:
            limit = torch.exp2(torch.floor(torch.log2(largest)) - (7 if expected.dtype == torch.bfloat16 else 10))
        worst = ((a - b).abs() - limit).max().item()
        assert worst <= 0, f"{kind} {what}: {worst:.3g} beyond the limit"
        if expected.dtype != torch.float32:
            equal, total = self.counts.get(kind, (0, 0))
            self.counts[kind] = equal + int((a == b).sum()), total + a.numel()

    def judge(self):
        """Float errors of 2^-19 cross the border between two bf16 numbers, 2^-9 apart, in one of 1000 elements. That
        is an average: of n elements, 3 standard deviations more may do so."""
        assert self.counts
        for kind, (equal, total) in self.counts.items():
            expected = 0.001 * total
            assert total - equal <= expected + 3 * expected**0.5, f"{kind}: {total - equal} of {total} differ"


class Seams:
    """A module's calls of its children and of attention: recorded first, then given back, with their inputs compared.

    So each stretch between two matrix products is judged on the same inputs, and one rounding that differs does not
    spread. Leaf norms and activations are not seams: they are what is fused."""

    FUSED = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.SiLU, nn.GELU, nn.Dropout, nn.Identity)

    def __init__(self, module, tally):
        self.module, self.tally, self.kind = module, tally, type(module).__name__
        self.calls, self.forced, self.inside = {}, None, False

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
            self.calls.setdefault(path, []).append((given, result))
            return result
        expected, result = self.forced[path].pop(0)
        assert expected.keys() == given.keys(), f"{self.kind}: {path} is called with {list(given)}"
        for name, value in expected.items():
            self.tally.compare(self.kind, f"{path}{name}", value, given[name])
            if isinstance(getattr(function, "__self__", None), nn.Linear):  # which rounds otherwise if it is not
                assert value.is_contiguous() == given[name].is_contiguous(), f"{self.kind} {path}"
        return result

    def run(self, args, kwargs):
        """The module's output; its children are recorded the first time, and play their parts the second."""
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
    """Stands for diffusers' dispatch_attention_fn, so that it can be a seam."""

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
    """Group norms that round once. On CUDA torch 2.11 rounds each group's mean and 1 / deviation to a half dtype
    before it uses them, which moves a whole group by more than a rounding: what adze has to match is the formula."""
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


def check_numbers(model, inputs, twice=2):
    """Every replaced module against the original one; of modules with the same class and rule, two."""
    handle = adze.patch(model)
    handle.disable()
    calls, expected = recorded(model, inputs, handle.patched)
    tally, seen = Tally(), {}
    for row in handle.rows:
        if row.rule is None or seen.get((row.cls, row.rule), 0) == twice:
            continue
        assert row.path in calls, f"{row.path} was not called"
        seen[row.cls, row.rule] = seen.get((row.cls, row.rule), 0) + 1
        args, kwargs = calls[row.path]
        module = model.get_submodule(row.path)
        seams = Seams(module, tally)
        with group_norms_in_float():
            original = seams.run(args, kwargs)
        handle.enable()
        seams.forced = seams.calls
        result = seams.run(args, kwargs)
        handle.disable()
        left = [path for path, calls_left in seams.forced.items() if calls_left]
        assert not left, f"{row.path} does not call {left} as often as the original"
        for (name, a), (_, b) in itertools.zip_longest(tensors(original), tensors(result)):
            tally.compare(row.cls, f"output{name}", a, b)
    handle.enable()
    return handle, tally, expected
