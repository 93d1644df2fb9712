"""Fake (meta) functions of the operators, for torch.compile and torch.export, and the constraint on the strides of
their inputs that Inductor applies."""

import sys

import torch
from torch.autograd import forward_ad

from . import functions
from ._ops import add_op_namespace_prefix, ops
from .description import OPS, returned
from .header import DTYPES as CODES

DTYPES = {code: getattr(torch, name) for name, code in CODES.items()}


def dense(like, shape=None, dtype=None):
    """Outputs are contiguous, whatever the strides of the inputs."""
    refuse_gradients(like)
    share_inputs()
    return like.new_empty(like.shape if shape is None else shape, dtype=dtype or like.dtype)


def needs_tangents():
    """Whether torch computes derivatives along with values, as torch.func.jvp does: adze would return none."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def _has_tangent(x):
    return needs_tangents() and forward_ad.unpack_dual(x).tangent is not None


def refuse_gradients(*tensors):
    """There are no backward kernels: an error now, instead of gradients that are silently missing."""
    found = [t for t in tensors if isinstance(t, torch.Tensor)]
    if (torch.is_grad_enabled() and any(t.requires_grad for t in found)) or any(map(_has_tangent, found)):
        raise RuntimeError(
            "adze has no gradients: call under torch.no_grad() or torch.inference_mode(), or detach the inputs"
        )


def _check_devices(name, given):
    """Torch calls a fake function, too, where one of several real tensors is on the meta device, and would hand out
    memory that nothing has written to."""
    tensors = [(field, t) for field, t in given.items() if isinstance(t, torch.Tensor)]
    for field, t in tensors[1:]:
        if t.device != tensors[0][1].device:
            raise RuntimeError(f"{name}: {field} is on {t.device}, {tensors[0][0]} is on {tensors[0][1].device}")


def _like(op, output):
    """The input that an output is like: k_out is like k, others are like the first one."""
    name = output.removesuffix("_out")
    return name if name in op.arguments else op.arguments[0]


def fake(op, more):
    """The fake function of an op's overload that returns its outputs, and as many optional ones as more says."""
    function = getattr(functions, op.name, None)
    shape, dtype = getattr(function, "shape", None), getattr(function, "dtype", None)
    names = returned(op, more)
    absent = {name: 0 if name in op.numbers else None for name in op.arguments}

    def imagined(*args, **kwargs):
        given = {**absent, **dict(zip(op.arguments, args)), **kwargs}  # noqa: B905  trailing arguments have defaults
        _check_devices(op.name, given)
        asked = DTYPES.get(given.get("out_dtype"))
        made = []
        for name in names:
            like = given[_like(op, name)]
            own = DTYPES.get(dtype(**given, output=name)) if dtype else None
            if own is None and op.tensors[name] != "out_optional":
                own = asked
            made.append(dense(like, shape and shape(**given, output=name), own))
        if not made:
            share_inputs()
            return None
        return made[0] if len(made) == 1 else tuple(made)

    return imagined


def nothing(op):
    """The fake function of the overload that writes the caller's outputs: it returns nothing."""

    def imagined(*args, **kwargs):
        _check_devices(op.name, {**dict(zip(op.arguments, args)), **kwargs})  # noqa: B905
        share_inputs()

    return imagined


_library = torch.library.Library(add_op_namespace_prefix("").split("::")[0], "FRAGMENT")


def operator(schema, compute, shape):
    """An operator written in Python, for the CPU and CUDA; shape is its fake function."""
    name = schema.partition("(")[0]
    _library.define(schema)
    for device in ("CPU", "CUDA"):
        _library.impl(name, compute, device)
    torch.library.register_fake(add_op_namespace_prefix(name), shape, lib=_library)
    return getattr(ops, name).default


# ---- Inductor ----


def is_view(node):
    return getattr(node.target, "is_view", False) or node.target is torch.ops.aten.reshape.default


def _shared(node):
    """Whether a node of the graph, or the node it is a view of, has other readers."""
    while isinstance(node, torch.fx.Node) and len(node.users) == 1:
        if not is_view(node):
            return False
        node = node.args[0]
    return isinstance(node, torch.fx.Node)


def _constrain(node, *args, **kwargs):
    """The arguments of a call, with the strides that they have in eager. Inductor changes strides by a copy, and
    fuses into the copy all that is not computed yet. A value with other readers is realized first, so that it is
    computed once."""
    lowering = sys.modules["torch._inductor.lowering"]
    names = [argument.name for argument in node.target._schema.arguments]
    sources = {**dict(zip(names, node.args)), **node.kwargs}  # noqa: B905  trailing arguments have defaults
    if "eager_input_vals" in node.meta:
        positional, named = node.meta["eager_input_vals"]
        eager = {**dict(zip(names, positional)), **named}  # noqa: B905
    else:  # a pass made the call
        eager = {name: a.meta.get("val") for name, a in sources.items() if isinstance(a, torch.fx.Node)}

    def constrain(name, value):
        if not isinstance(value, lowering.TensorBox) or not isinstance(eager.get(name), torch.Tensor):
            return value
        if _shared(sources[name]):
            value.realize()
        return lowering.ir.ExternKernel.require_exact_strides(value, eager[name].stride())

    placed = tuple(constrain(name, value) for name, value in zip(names, args))  # noqa: B905
    return placed, {name: constrain(name, value) for name, value in kwargs.items()}


def share_inputs():
    """Registers the constraint once Inductor is loaded. Fake functions call it: they run before a graph is
    lowered."""
    lowering = sys.modules.get("torch._inductor.lowering")
    make_fallback = getattr(lowering, "make_fallback", None)
    if make_fallback is None or getattr(ops, next(iter(OPS))).default in lowering.lowerings:
        return
    for name in OPS:
        make_fallback(getattr(ops, name), _constrain, warn=False)


for name, op in OPS.items():
    torch.library.register_fake(add_op_namespace_prefix(name), fake(op, 0))
    for more, optional in enumerate(op.optional, 1):
        torch.library.register_fake(add_op_namespace_prefix(f"{name}.{optional}"), fake(op, more))
    torch.library.register_fake(add_op_namespace_prefix(f"{name}.out"), nothing(op))
