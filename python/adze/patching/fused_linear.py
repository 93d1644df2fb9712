"""Linears that read the same input, as one GEMM: fewer launches, and fewer multiprocessors idle at its end. And a
Linear that reads a concatenation, as two GEMMs without a copy.

The weights of Linears that share a GEMM are packed one after the other in memory, in one storage. They stay the
parameters they were, with the same values. A state_dict shows each with a storage of its own, as savers require.
After the weights have moved, as by model.to(), each Linear runs its own GEMM. This is for numerics="fast": a GEMM of
another size may add in another order, and a sum of two GEMMs is rounded between them."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.dlpack import from_dlpack, to_dlpack

from ..operators import fake
from ..operators._ops import add_op_namespace_prefix, ops
from .frame import DEVICES, parameter, plain, plain_weight

MOST = 3  # parts of the operator for compiled graphs


def adjacent(parts, dim=0):
    """One contiguous view of tensors that follow each other in memory along a dimension, or None. Adjacent pointers
    are not enough: neighbours may belong to two allocations."""
    first = parts[0]
    stride, shape, size = first.stride(), list(first.shape), first.element_size()
    pointer, offset, count = first.data_ptr(), first.storage_offset(), 0
    for part in parts:
        if part.data_ptr() != pointer or part.storage_offset() != offset or part.dtype != first.dtype:
            return None
        shape[dim] = length = part.size(dim)
        if part.stride() != stride or list(part.shape) != shape:
            return None
        step = length * stride[dim]
        pointer, offset, count = pointer + step * size, offset + step, count + length
    shape[dim] = count
    whole = first.as_strided(shape, stride)
    return whole if whole.is_contiguous() else None


def _fused(x, weights, biases):
    """One GEMM of x with all the weights, or None where they are not packed."""
    if biases and len(biases) != len(weights):
        return None
    weight, bias = adjacent(weights), adjacent(biases) if biases else None
    return None if weight is None or (biases and bias is None) else F.linear(x, weight, bias)


def _shape(x, first, second, third=None, *biases):
    weights = (first, second) if third is None else (first, second, third)
    return fake.dense(x, (*x.shape[:-1], sum(weight.shape[0] for weight in weights)))


_operator = getattr(ops, "fused_linear", None)  # where torch has what it is made of
if _operator is not None:
    _operator = _operator.default
    torch.library.register_fake(add_op_namespace_prefix("fused_linear"), _shape)


def _compiled(x, weights, biases):
    """The same as one operator for compiled graphs. Dynamo cannot compare addresses, so the operator does."""
    if _operator is None or len(weights) > MOST or not _alike(weights, biases):
        return None
    none = [None] * (MOST - len(weights))
    return _operator(x.contiguous(), *weights, *none, *biases)


def _parameters(linears):
    """Weights and biases of Linears, or None where the fused operator cannot take them."""
    weights, biases = [], []
    for linear in linears:
        if not plain(linear, nn.Linear):
            return None
        weight, bias = parameter(linear, "weight"), parameter(linear, "bias")
        if not plain_weight(weight) or not plain_weight(bias):
            return None
        weights.append(weight)
        if bias is not None:
            biases.append(bias)
    return weights, biases


def _alike(weights, biases):
    first = weights[0]
    alike = all(p.dtype == first.dtype and p.device == first.device for p in (*weights, *biases))
    return alike and len(biases) in (0, len(weights)) and all(w.shape[1] == first.shape[1] for w in weights)


def _with_own_storages(linear, state, prefix, metadata):
    """A hook of state_dict: savers refuse a tensor that is a part of a storage. No memory is copied."""
    for name in ("weight", "bias"):
        value = state.get(prefix + name)
        if type(value) is torch.Tensor and value.untyped_storage().nbytes() != value.nbytes:
            state[prefix + name] = from_dlpack(to_dlpack(value))


def pack_weights(*linears):
    """Packs the weights of Linears one after the other in memory. Returns whether that was possible."""
    found = _parameters(linears)
    if found is None or not _alike(*found) or found[0][0].device.type not in ("cpu", "cuda"):
        return False
    for parts in found:
        if not parts or adjacent(parts) is not None:
            continue
        if any(p.is_inference() or p.untyped_storage().nbytes() != p.nbytes for p in parts):
            return False  # other views may share this memory
        with torch.inference_mode(False), torch.no_grad():
            pieces = torch.cat([part.detach() for part in parts]).split([part.shape[0] for part in parts])
        for part, piece in zip(parts, pieces, strict=True):
            part.data = piece
    for linear in linears:
        if _with_own_storages not in linear._state_dict_hooks.values():
            linear.register_state_dict_post_hook(_with_own_storages)
    return True


def _usable(x, weights, biases):
    if type(x) is not torch.Tensor or x.dtype != weights[0].dtype or x.device.type not in DEVICES:
        return False
    if torch.is_autocast_enabled(x.device.type) or fake.needs_tangents():
        return False
    return not torch.is_grad_enabled() or not any(t.requires_grad for t in (x, *weights, *biases))


def _separately(x, *linears):
    return tuple(linear(x) for linear in linears)


def _together(x, *linears):
    found = _parameters(linears)
    if found is None or not _usable(x, *found):
        return _separately(x, *linears)
    if torch.compiler.is_compiling():
        made = _compiled(x, *found)
    else:
        made = _fused(x, *found)
    if made is None:
        return _separately(x, *linears)
    return torch.split_with_sizes(made, [weight.shape[0] for weight in found[0]], -1)  # faster than made.split()


def fused_linears(ctx, *linears):
    """A function (x, *linears) that returns linear(x) of each. With numerics="fast" it is one GEMM for these Linears,
    or for neighbours among them."""
    if ctx.match or not pack_weights(*linears):
        return _separately
    ctx.plan.packed.update(linears)
    return _together


def mark_fused(forward, project):
    """The forward, marked if `project` runs one GEMM for several Linears. A marked forward runs in a compiled graph
    of one token too, because the compiler would run each GEMM by itself."""
    forward.adze_fused_linear = project is _together
    return forward


def _linear_of_concat(first, second, weight, bias):
    n = first.shape[-1]
    made = F.linear(first.reshape(-1, n), weight[:, :n], bias)
    made.addmm_(second.reshape(-1, second.shape[-1]), weight[:, n:].t())
    return made.view(*first.shape[:-1], weight.shape[0])


def _sum_shape(first, second, weight, bias):
    return fake.dense(first, (*first.shape[:-1], weight.shape[0]))


# Inductor would copy the result of the first GEMM before it adds the second.
_sum_operator = fake.operator(
    "linear_of_concat(Tensor first, Tensor second, Tensor weight, Tensor? bias) -> Tensor",
    _linear_of_concat,
    _sum_shape,
)


def linear_of_concat(linear, first, second):
    """linear(torch.cat([first, second], dim=-1))."""
    found = _parameters([linear])
    if found is not None and first.shape[:-1] == second.shape[:-1] and first.dtype == second.dtype:
        weights, biases = found
        if _usable(first, weights, biases) and _usable(second, weights, biases):
            made = _sum_operator if torch.compiler.is_compiling() else _linear_of_concat
            return made(first, second, weights[0], biases[0] if biases else None)
    return linear(torch.cat([first, second], dim=-1))
