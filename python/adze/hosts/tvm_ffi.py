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
from ..operators.functions import given_outputs, take_functions

_CODES = {"bfloat16": 4, "float8_e4m3fn": 10}  # DLPack's
_CODE_AT = 20  # in a DLTensor, after data, device and ndim
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _Renamed:
    """An array whose dtype NumPy cannot export: exported as integers, with the dtype's code set afterwards."""

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
    """A tensor as TVM FFI takes it. A read-only array is passed as a copy, unless it is written."""
    torch = _torch_of(tensor)
    if torch:
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise RuntimeError(
                "adze has no gradients: call under torch.no_grad() or torch.inference_mode(), or detach the inputs"
            )
        return tensor
    if not isinstance(tensor, np.ndarray):
        raise TypeError(f"{op}: {name} is a {type(tensor).__name__}, it must be a NumPy array or a torch tensor")
    if not tensor.flags.writeable:
        if is_out:
            raise ValueError(f"{op}: {name} is read-only, and the call writes it")
        tensor = tensor.copy()
    return _Renamed(tensor) if tensor.dtype.name in _CODES else tensor


@functools.cache
def _function(op):
    return tvm_ffi.load_module(description.PATH).get_function(op)


def _run(op, args, out=None, second=None, more=0, third=None):
    """Runs an op into the caller's outputs, or into new ones where none is given."""
    given, numbers = description.split(op, args)
    outs = given_outputs(op, out, second, third)
    arguments = {name: _argument(op.name, name, t, name in op.changed) for name, t in given.items()}
    if not outs:
        described = tuple(description.Tensor(n, _dtype_name(t.dtype), tuple(t.shape)) for n, t in given.items())
        returned, _ = description.returns(op.name, described, tuple(numbers.items()))
        like = next(iter(given.values()))
        names = description.returned(op, more)
        outs = {o.name: _empty(like, o.dtype, o.shape) for o in returned if o.name in names}
    arguments |= {name: _argument(op.name, name, t, True) for name, t in outs.items()} | numbers
    _function(op.name)(*(arguments.get(name) for name in op.words))  # in the order of the table of fields
    return next(iter(outs.values()), None) if len(outs) <= 1 else tuple(outs.values())


def dtype_code(what, dtype, x=None):
    name = _dtype_name(dtype)
    return 0 if x is not None and _dtype_name(x.dtype) == name else description.dtype_code(what, name)


take_functions(globals(), lambda op: functools.partial(_run, op))
