"""What each operator returns, for tensors that have a shape and no data: torch.compile and torch.export ask here.
Inductor also learns here that calls share their inputs."""

import sys

import torch

from ._ops import add_op_namespace_prefix, ops

DTYPES = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16}
NAMES = ("rms_norm", "layer_norm", "group_norm", "gated_add", "activation", "softmax", "glu", "rope", "qk_norm_rope",
         "rope_table")  # fmt: skip


def dense(like, shape=None, dtype=None):
    """Outputs are contiguous, whatever the strides of the inputs."""
    refuse_gradients(like)
    share_inputs()
    return like.new_empty(like.shape if shape is None else shape, dtype=dtype or like.dtype)


def refuse_gradients(*tensors):
    """There are no backward kernels: an error now, instead of gradients that are silently missing."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            "adze has no gradients: call under torch.no_grad() or torch.inference_mode(), or detach the inputs"
        )


def norm(x, residual=None, weight=None, bias=None, gate=None, gate_table=None, scale=None, scale_table=None,
         shift=None, shift_table=None, eps=0.0, weight_offset=0.0, rounding=0, out_dtype=0):  # fmt: skip
    return dense(x, dtype=DTYPES.get(out_dtype))


def norm_sum(x, *args, **kwargs):
    return norm(x, *args, **kwargs), dense(x)


def like_x(x, *args, **kwargs):
    return dense(x)


def glu(x, value=None, *args, **kwargs):
    return dense(x, x.shape if value is not None else (*x.shape[:-1], x.shape[-1] // 2))


def like_q(q, *args, **kwargs):
    return dense(q)


def like_q_and_k(q, k, *args, **kwargs):
    return dense(q), dense(k)


def rope_table(pos, freq, axis=None, scale=0.0, columns=0, double_angle=0, out_dtype=0):
    shape = (*pos.shape[:-1], freq.shape[0] * (2 if columns else 1))
    dtype = DTYPES.get(out_dtype, torch.float32)
    return dense(pos, shape, dtype), dense(pos, shape, dtype)


def nothing(*args, **kwargs):
    """The form that writes the caller's outputs."""
    share_inputs()


_library = torch.library.Library(add_op_namespace_prefix("").split("::")[0], "FRAGMENT")


def operator(schema, compute, shape):
    """An operator written in Python, for the CPU and CUDA; shape gives what it returns for tensors without data."""
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
    """Whether something else reads a node of the graph, or what it is a view of."""
    while isinstance(node, torch.fx.Node) and len(node.users) == 1:
        if not is_view(node):
            return False
        node = node.args[0]
    return isinstance(node, torch.fx.Node)


def _constrain(node, *args, **kwargs):
    """The arguments of a call, in the strides that they have in eager. Inductor brings values into strides by a copy
    for each reader, which computes all that was not computed yet: one that others read too is computed first."""
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
    """Tells Inductor, once, where it is loaded: it asks for fakes before it lowers a graph."""
    lowering = sys.modules.get("torch._inductor.lowering")
    make_fallback = getattr(lowering, "make_fallback", None)
    if make_fallback is None or ops.rope.default in lowering.lowerings:
        return
    for name in NAMES:
        make_fallback(getattr(ops, name), _constrain, warn=False)


torch.library.register_fake(add_op_namespace_prefix("rms_norm"), norm)
torch.library.register_fake(add_op_namespace_prefix("rms_norm.sum"), norm_sum)
torch.library.register_fake(add_op_namespace_prefix("layer_norm"), norm)
torch.library.register_fake(add_op_namespace_prefix("layer_norm.sum"), norm_sum)
torch.library.register_fake(add_op_namespace_prefix("group_norm"), like_x)
torch.library.register_fake(add_op_namespace_prefix("gated_add"), like_x)
torch.library.register_fake(add_op_namespace_prefix("activation"), like_x)
torch.library.register_fake(add_op_namespace_prefix("softmax"), like_x)
torch.library.register_fake(add_op_namespace_prefix("glu"), glu)
torch.library.register_fake(add_op_namespace_prefix("rope"), like_q)
torch.library.register_fake(add_op_namespace_prefix("rope.k_out"), like_q_and_k)
torch.library.register_fake(add_op_namespace_prefix("qk_norm_rope"), like_q)
torch.library.register_fake(add_op_namespace_prefix("qk_norm_rope.k_out"), like_q_and_k)
torch.library.register_fake(add_op_namespace_prefix("rope_table"), rope_table)
for name in NAMES:
    torch.library.register_fake(add_op_namespace_prefix(f"{name}.out"), nothing)
