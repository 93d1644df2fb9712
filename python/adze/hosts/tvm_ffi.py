"""The ops as functions of NumPy arrays and torch tensors, called through TVM FFI: adze.h says what each one computes.

Outputs are new, of the library of the first tensor, or the caller's. Tensors may be any view whose last dimension is
contiguous. On CUDA a call runs on the stream that is current for its tensors.
"""

import ctypes
import functools
import sys

import numpy as np
import tvm_ffi

from ..operators import description
from ..operators.description import FLOAT_SUM, ROUND_NORM, ROUND_STEPS, ROUND_VALUE, word

__all__ = [
    "rms_norm", "layer_norm", "group_norm", "gated_add", "activation", "glu", "softmax", "rope", "qk_norm_rope",
    "rope_table",
    "ROUND_NORM", "ROUND_STEPS", "ROUND_VALUE", "FLOAT_SUM",
]  # fmt: skip

_CODES = {"bfloat16": 4, "float8_e4m3fn": 10}  # DLPack's
_CODE_AT = 20  # in a DLTensor, after data, device and ndim
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _Renamed:
    """An array whose dtype NumPy does not export: exported as integers, which then get the dtype's own code."""

    def __init__(self, array):
        self.array, self.code = array.view(f"u{array.itemsize}"), _CODES[array.dtype.name]

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self):
        capsule = self.array.__dlpack__()
        ctypes.c_uint8.from_address(_capsule_pointer(capsule, b"dltensor") + _CODE_AT).value = self.code
        return capsule


def _torch_of(tensor):
    """The torch module if this is a tensor of it, or None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(tensor, torch.Tensor) else None


def _dtype_name(dtype):
    name = dtype if isinstance(dtype, str) else str(dtype)
    return (
        name.removeprefix("torch.") if isinstance(dtype, str) or name.startswith("torch.") else np.dtype(dtype).name
    )


def _empty(like, dtype, shape):
    torch = _torch_of(like)
    if torch:
        return like.new_empty(shape, dtype=getattr(torch, dtype))
    if dtype in _CODES:
        import ml_dtypes

        return np.empty(shape, getattr(ml_dtypes, dtype))
    return np.empty(shape, dtype)


def _argument(op, name, tensor, is_out):
    """A tensor as TVM FFI takes it. An array that may not be written can be read from a copy alone."""
    torch = _torch_of(tensor)
    if torch:
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise RuntimeError(
                "adze has no gradients: call under torch.no_grad() or torch.inference_mode(), or detach the inputs"
            )
        return tensor
    if not isinstance(tensor, np.ndarray):
        raise TypeError(f"{op}: {name} is a {type(tensor).__name__}, it must be a NumPy array or a torch tensor")
    if not is_out and not tensor.flags.writeable:
        tensor = tensor.copy()
    return _Renamed(tensor) if tensor.dtype.name in _CODES else tensor


@functools.cache
def _function(op):
    return tvm_ffi.load_module(description.PATH).get_function(op)


def _call(op, tensors, numbers, outputs, unwanted=()):
    """outputs: those of the caller by name; when the first is None, all that the call returns are made here."""
    table, numbers = description.OPS[op], description.numbers_of(op, numbers)
    given = {name: t for name, t in tensors.items() if t is not None}
    first = next(iter(outputs))
    outs = {name: t for name, t in outputs.items() if t is not None}
    if outs and first not in outs:
        raise ValueError(f"adze: {next(iter(outs))} is given without {first}")
    arguments = {name: _argument(op, name, t, False) for name, t in given.items()}
    if not outs:
        described = tuple(description.Tensor(n, _dtype_name(t.dtype), tuple(t.shape)) for n, t in given.items())
        returned, _ = description.returns(op, described, tuple(numbers.items()))
        like = next(iter(given.values()))
        outs = {o.name: _empty(like, o.dtype, o.shape) for o in returned if o.name not in unwanted}
    arguments |= {name: _argument(op, name, t, True) for name, t in outs.items()}
    _function(op)(*(arguments.get(name) for name in table.tensors), *(numbers.get(name, 0) for name in table.numbers))
    return next(iter(outs.values())) if len(outs) == 1 else tuple(outs.values())


def _norm(op, x, tensors, eps, weight_offset, rounding, out_dtype, need_sum, out, sum_out):
    if sum_out is not None and out is None:
        raise ValueError("adze: sum_out is given without out")
    wanted = None if out_dtype is None else _dtype_name(out_dtype)
    numbers = {
        "eps": eps,
        "weight_offset": weight_offset,
        "rounding": rounding,
        "out_dtype": 0 if wanted is None or wanted == _dtype_name(x.dtype) else description.dtype_code(wanted),
    }
    outputs = {"out": out, "sum": sum_out}
    return _call(op, {"x": x, **tensors}, numbers, outputs, () if need_sum else ("sum",))


def rms_norm(x, weight=None, *, residual=None, bias=None, gate=None, gate_table=None, scale=None, scale_table=None,
             shift=None, shift_table=None, eps=1e-6, weight_offset=0.0, rounding=0, out_dtype=None, need_sum=True,
             out=None, sum_out=None):  # fmt: skip
    """h = residual + gate * x; out = h / rms(h) * (weight + weight_offset) * (1 + scale) + shift.

    With a residual the result is (out, h), unless need_sum is False."""
    tensors = {
        "residual": residual, "weight": weight, "bias": bias, "gate": gate, "gate_table": gate_table, "scale": scale,
        "scale_table": scale_table, "shift": shift, "shift_table": shift_table,
    }  # fmt: skip
    return _norm("rms_norm", x, tensors, eps, weight_offset, rounding, out_dtype, need_sum, out, sum_out)


def layer_norm(x, weight=None, bias=None, *, residual=None, gate=None, gate_table=None, scale=None, scale_table=None,
               shift=None, shift_table=None, eps=1e-5, weight_offset=0.0, rounding=0, out_dtype=None, need_sum=True,
               out=None, sum_out=None):  # fmt: skip
    """The same as rms_norm, with the mean taken away first."""
    tensors = {
        "residual": residual, "weight": weight, "bias": bias, "gate": gate, "gate_table": gate_table, "scale": scale,
        "scale_table": scale_table, "shift": shift, "shift_table": shift_table,
    }  # fmt: skip
    return _norm("layer_norm", x, tensors, eps, weight_offset, rounding, out_dtype, need_sum, out, sum_out)


def group_norm(x, groups, weight=None, bias=None, *, eps=1e-5, act=None, channels_last=False, rounding=0, out=None):
    """act(group_norm(x)) of [batch, channels, ...], or [batch, ..., channels] when channels_last."""
    code = 0 if act is None else word("group_norm", "act", act)
    numbers = {
        "eps": eps, "groups": groups, "channels_last": int(channels_last), "act": code, "rounding": rounding,
    }  # fmt: skip
    return _call("group_norm", {"x": x, "weight": weight, "bias": bias}, numbers, {"out": out})


def gated_add(x, residual, gate, *, gate_table=None, rounding=0, out=None):
    """residual + (gate + gate_table) * x; out may be x or residual."""
    tensors = {"x": x, "residual": residual, "gate": gate, "gate_table": gate_table}
    return _call("gated_add", tensors, {"rounding": rounding}, {"out": out})


def activation(x, act, *, out=None):
    """act(x), by any of the names that Hugging Face uses."""
    return _call("activation", {"x": x}, {"act": word("activation", "act", act)}, {"out": out})


def glu(x, value=None, *, act="silu", value_first=False, rounding=0, out=None):
    """act(x) * value; without value, x holds the gate and the value (or the value first) in each row."""
    numbers = {"act": word("glu", "act", act), "value_first": int(value_first), "rounding": rounding}
    return _call("glu", {"x": x, "value": value}, numbers, {"out": out})


def softmax(x, mask=None, *, scale=1.0, out=None):
    """softmax(x * scale + mask) over the last dimension."""
    if not scale:
        raise ValueError("adze: softmax's scale is 0")
    return _call("softmax", {"x": x, "mask": mask}, {"scale": scale}, {"out": out})


def rope(q, k, cos, sin, *, interleaved=False, rotary_dim=0, heads_first=False, rounding=0, q_out=None, k_out=None):
    """q and k rotated by the angles of cos and sin; q alone when k is None."""
    tensors = {"q": q, "k": k, "cos": cos, "sin": sin}
    numbers = {
        "pairs": int(interleaved), "rotary_dim": rotary_dim, "heads_first": int(heads_first), "rounding": rounding,
    }  # fmt: skip
    return _call("rope", tensors, numbers, {"q_out": q_out, "k_out": k_out})


def qk_norm_rope(q, k, q_weight, k_weight, cos, sin, *, eps=1e-6, weight_offset=0.0, across_heads=False,
                 interleaved=False, rotary_dim=0, heads_first=False, rounding=0, q_out=None, k_out=None):  # fmt: skip
    """rope of rms_norm(q) and rms_norm(k), per head or across all heads."""
    tensors = {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin}
    numbers = {
        "eps": eps, "weight_offset": weight_offset, "across_heads": int(across_heads), "pairs": int(interleaved),
        "rotary_dim": rotary_dim, "heads_first": int(heads_first), "rounding": rounding,
    }  # fmt: skip
    return _call("qk_norm_rope", tensors, numbers, {"q_out": q_out, "k_out": k_out})


def rope_table(pos, freq, axis=None, *, scale=1.0, columns="once", double_angle=False, dtype="float32"):
    """cos and sin of pos[..., axis[i]] * freq[i], times scale."""
    if not scale:
        raise ValueError("adze: rope_table's scale is 0")
    numbers = {
        "scale": scale, "columns": word("rope_table", "columns", columns), "double_angle": int(double_angle),
        "out_dtype": description.dtype_code(_dtype_name(dtype)),
    }  # fmt: skip
    return _call("rope_table", {"pos": pos, "freq": freq, "axis": axis}, numbers, {"cos": None, "sin": None})
