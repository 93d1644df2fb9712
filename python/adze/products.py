"""Linears that read the same input, as one product: fewer launches, and fewer multiprocessors idle at its end.

Their weights are laid end to end in memory. They stay the parameters they were, with the same values; where they have
moved since, as by model.to(), each Linear makes its own product. For numerics="fast": a product of another size may
add up in another order."""

import torch
from torch import nn
from torch.nn import functional as F

from . import fake
from ._ops import add_op_namespace_prefix, ops
from .patching import plain, plain_weight

NAME = add_op_namespace_prefix("products")


def _end_to_end(parts):
    """The tensors as the one that they are in memory, or None. Pointers alone do not tell: neighbours may belong to
    two allocations."""
    first = parts[0]
    pointer, offset, rows = first.data_ptr(), first.storage_offset(), 0
    for part in parts:
        if part.data_ptr() != pointer or part.storage_offset() != offset or not part.is_contiguous():
            return None
        pointer, offset, rows = pointer + part.nbytes, offset + part.numel(), rows + part.shape[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _products(x, weights, biases):
    weight, bias = _end_to_end(weights), _end_to_end(biases) if biases else None
    if weight is None or (biases and bias is None):
        parts = zip(weights, biases or [None] * len(weights), strict=True)
        return torch.cat([F.linear(x, *part) for part in parts], dim=-1)
    return F.linear(x, weight, bias)


def _shape(x, weights, biases):
    return fake.dense(x, (*x.shape[:-1], sum(weight.shape[0] for weight in weights)))


_library = torch.library.Library(NAME.split("::")[0], "FRAGMENT")
_library.define("products(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor")
_library.impl("products", _products, "CPU")
_library.impl("products", _products, "CUDA")
torch.library.register_fake(NAME, _shape, lib=_library)
_operator = ops.products.default


def _parameters(linears):
    """Their weights and their biases, or None where they are not alike."""
    if not all(plain(linear, nn.Linear) for linear in linears):
        return None
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    first = weights[0]
    for part in (*weights, *biases):
        if not plain_weight(part) or part.dtype != first.dtype or part.device != first.device:
            return None
    if len(biases) not in (0, len(linears)) or any(w.shape[1] != first.shape[1] for w in weights):
        return None
    return weights, biases


def lay(*linears):
    """Lays the weights of Linears end to end, and says whether they are."""
    found = _parameters(linears)
    if found is None or found[0][0].device.type not in ("cpu", "cuda"):
        return False
    for parts in found:
        if not parts or _end_to_end(parts) is not None:
            continue
        if any(p.is_inference() or p.untyped_storage().nbytes() != p.nbytes for p in parts):
            return False  # others may look at this memory
        with torch.inference_mode(False), torch.no_grad():
            pieces = torch.cat([part.detach() for part in parts]).split([part.shape[0] for part in parts])
        for part, piece in zip(parts, pieces, strict=True):
            part.data = piece
    return True


def _usable(x, weights, biases):
    if type(x) is not torch.Tensor or x.dtype != weights[0].dtype or x.device != weights[0].device:
        return False
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights, *biases))
    return not grad and not torch.is_autocast_enabled(x.device.type)


def _separately(x, *linears):
    return tuple(linear(x) for linear in linears)


def _together(x, *linears):
    found = _parameters(linears)
    if found is not None and _usable(x, *found):
        weights, biases = found
        sizes = [weight.shape[0] for weight in weights]
        if torch.compiler.is_compiling():
            return _operator(x, weights, biases).split(sizes, dim=-1)
        weight, bias = _end_to_end(weights), _end_to_end(biases) if biases else None
        if weight is not None and (bias is not None or not biases):
            return F.linear(x, weight, bias).split(sizes, dim=-1)
    return _separately(x, *linears)


def products_of(ctx, *linears):
    """A function (x, *linears) that gives linear(x) of each: for these Linears, or neighbours among them, by one
    product where numerics is "fast"."""
    return _together if not ctx.match and lay(*linears) else _separately
