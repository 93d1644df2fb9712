"""The native part of adze without a framework: the ops, their fields, and what a call returns."""

import ctypes
import functools
import operator
import pathlib
from typing import NamedTuple

from .header import DTYPES

_HERE = pathlib.Path(__file__).parent
PATH = next(_HERE.glob("_*.so"), _HERE / "_adze.abi3.so")  # in a Hub package it has another name
_NAMES = {code: name for name, code in DTYPES.items()}
FLOATS = ("float32", "float16", "bfloat16")  # dtypes that an output may be asked for

if not PATH.exists():
    raise ImportError(
        f"adze: the native part {PATH} is missing: build it by `make python` in a clone, or by `pip install .`"
    )
library = ctypes.CDLL(str(PATH))
library.adze_describe.restype = ctypes.c_char_p
library.adze_xla_outputs.restype = ctypes.c_char_p


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 5),
        ("stride", ctypes.c_int64 * 5),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


class Tensor(NamedTuple):
    name: str
    dtype: str  # as NumPy and PyTorch name it
    shape: tuple


class Op(NamedTuple):
    """An op as its table of fields has it."""

    name: str
    index: int
    tensors: dict  # name: kind
    numbers: dict  # name: kind
    words: dict  # name of a number: {word: value}
    arguments: tuple  # names of the inputs and the numbers, in their order
    outputs: tuple  # names
    optional: tuple  # names of the outputs that are not always there
    changed: tuple  # names of the inputs that a call changes in place


def _op(index, line):
    name, *fields = line.split(";")
    tensors, numbers, words = {}, {}, {}
    for kind, field, *values in map(str.split, fields):
        (numbers if kind in ("float", "int") else tensors)[field] = kind
        words[field] = {word: int(value) for word, value in (w.split("=") for w in values)}
    outputs = tuple(field for field, kind in tensors.items() if kind.startswith("out"))
    arguments = tuple(field for field in words if field not in outputs)
    optional = tuple(field for field in outputs if tensors[field] != "out")
    changed = tuple(field for field, kind in tensors.items() if kind.startswith("inout"))
    return Op(name, index, tensors, numbers, words, arguments, outputs, optional, changed)


def _ops():
    ops = {}
    while line := library.adze_describe(len(ops)):
        op = _op(len(ops), line.decode())
        ops[op.name] = op
    return ops


OPS = _ops()


def returned(op, more):
    """The names of the outputs that a call returns when it is asked for `more` of its optional ones."""
    return [name for name in op.outputs if name not in op.optional[int(more) :]]


def dtype_code(what, name):
    if name not in FLOATS:
        raise ValueError(f"adze: {what} is {name}, it must be one of {', '.join(FLOATS)}")
    return DTYPES[name]


def split(op, args):
    """The tensors that a call is given, and its numbers as Python's own, by name."""
    tensors, numbers = {}, {}
    for name, value in zip(op.arguments, args, strict=True):
        if name in op.numbers:
            numbers[name] = float(value) if op.numbers[name] == "float" else operator.index(value)
        elif value is not None:
            tensors[name] = value
    return tensors, numbers


@functools.lru_cache(4096)
def returns(op, tensors, numbers):
    """The Tensors that a call returns, and the bytes of scratch that it needs on CUDA.

    tensors: Tensors of the inputs that are there. numbers: pairs of name and value. A call that would be refused
    raises ValueError with the library's sentence."""
    table = OPS[op]
    order = list(table.tensors)
    views = (_Tensor * len(order))()
    for name, dtype, shape in tensors:
        if dtype not in DTYPES:
            raise ValueError(f"{op}: {name} is {dtype}, a dtype that adze does not have")
        view = views[order.index(name)]
        view.dtype, view.rank = DTYPES[dtype], len(shape)
        view.shape[: min(len(shape), 5)] = shape[:5]
    values = dict(numbers)
    doubles = (ctypes.c_double * len(table.numbers))(*(values.get(name, 0) for name in table.numbers))
    scratch = ctypes.c_size_t()
    refused = library.adze_xla_outputs(table.index, views, doubles, ctypes.byref(scratch))
    if refused:
        raise ValueError(refused.decode())
    outputs = tuple(
        Tensor(name, _NAMES[view.dtype], tuple(view.shape[: view.rank]))
        for (name, kind), view in zip(table.tensors.items(), views, strict=True)
        if kind.startswith("out") and view.dtype
    )
    return outputs, scratch.value
