"""Which results a model's own arithmetic may have: it is run again with each rounding moved by the error of float."""

import functools

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

HALVES = (torch.bfloat16, torch.float16)
aten = torch.ops.aten


def float_error(dim):
    """The error of a row's norm in float32, relative to the largest element. Both ways to compute it sum the row in
    at least 16 lanes and take a root of the sum (dim / 32 + 2 roundings each). Then they round at most 16 times each.
    A rounding is half a unit, 2^-24."""
    return (dim / 16 + 4 + 32) * 2.0**-24


class Moved(TorchDispatchMode):
    """Results of a half dtype are computed in float32, moved by the error of float, and rounded. Results of float32
    are moved. Draw 0 moves everything up and draw 1 down, so that a value within float's error of a midpoint is
    rounded both ways. The other draws choose a sign for each element, for sums whose terms cancel."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.generator = draw, torch.Generator().manual_seed(draw)

    def _random(self, value):
        return torch.rand(value.shape, generator=self.generator).to(value)

    def _move(self, value, dtype, norm):
        sign = 1.0 - 2.0 * self.draw if self.draw < 2 else 2 * self._random(value).round() - 1
        dim = value.shape[-1] if value.dim() else 1
        size = value.abs().nan_to_num(0, 0)
        if norm and value.dim():  # whose terms are of the row's size
            size = size.amax(-1, keepdim=True)
        return value + sign * float_error(dim) * size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        computes, norm = _kind(function)
        if not computes:
            return result
        if function is aten._to_copy.default:
            wide = args[0].float() if args[0].is_floating_point() else args[0]
        elif any(t.dtype in HALVES for t in _floats(result)):
            args, kwargs = tree_map_only(torch.Tensor, _wide, (args, kwargs))
            kwargs = {k: torch.float32 if v in HALVES else v for k, v in kwargs.items()}
            wide = function(*args, **kwargs)
        else:
            wide = result
        if isinstance(result, torch.Tensor):
            return self._rounded(wide, result, norm)
        if isinstance(result, (tuple, list)):
            return type(result)(self._rounded(w, r, norm) for w, r in zip(wide, result, strict=True))
        return result

    def _rounded(self, wide, result, norm):
        if not isinstance(result, torch.Tensor) or result.dtype not in (*HALVES, torch.float32) or not result.numel():
            return result
        if wide.dtype != torch.float32 or (result.dtype in HALVES and torch.equal(wide, result.float())):
            return result  # nothing was rounded
        return self._move(wide, result.dtype, norm).to(result.dtype)


class Scattered(Moved):
    """Stochastic rounding: a result of a half dtype goes to either neighbour, to the nearer one more often. Where the
    exact value lies a share f of a unit above the lower neighbour, the mean square of the error is f (1 - f), which
    is 1/6 over all f. Rounding to the nearest has 1/12. So the variance is twice as large, and each run draws another
    error."""

    def _move(self, value, dtype, norm):
        if dtype not in HALVES:
            return value
        unit = torch.exp2(torch.floor(torch.log2(value.abs())) - (7 if dtype == torch.bfloat16 else 10))
        return value + (self._random(value) - 0.5) * unit.nan_to_num(0, 0)


@functools.cache
def _kind(function):
    """Whether it returns new tensors and nothing else, and whether it is a norm."""
    schema = function._schema
    return not (schema.is_mutable or any(r.alias_info for r in schema.returns)), "norm" in schema.name


def _floats(result):
    found = []
    tree_map(lambda t: found.append(t) if isinstance(t, torch.Tensor) and t.is_floating_point() else None, result)
    return found


def _wide(tensor):
    return tensor.float() if tensor.dtype in HALVES else tensor
