"""The native part of adze without a framework: the ops, their fields, and what a call returns."""

import ctypes
import functools
import operator
import pathlib
from typing import NamedTuple

_HERE = pathlib.Path(__file__).parent
PATH = next(_HERE.glob("_adze*.so"), _HERE / "_adze.abi3.so")  # in a Hub package it has a longer name
DTYPES = {
    "float32": 1, "float16": 2, "bfloat16": 3, "float8_e4m3fn": 4, "int8": 5, "int32": 7, "int64": 8, "bool": 9,
    "float64": 10,
}  # fmt: skip
ROUND_NORM, ROUND_STEPS, ROUND_VALUE, FLOAT_SUM = 1, 2, 4, 8
_NAMES = {code: name for name, code in DTYPES.items()}

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
    index: int
    tensors: dict  # name: kind
    numbers: dict  # name: kind
    words: dict  # name of a number: {word: value}


def _ops():
    ops = {}
    while line := library.adze_describe(len(ops)):
        name, *fields = line.decode().split(";")
        op = ops[name] = Op(len(ops), {}, {}, {})
        for kind, field, *words in map(str.split, fields):
            (op.numbers if kind in ("float", "int") else op.tensors)[field] = kind
            op.words[field] = {word: int(value) for word, value in (w.split("=") for w in words)}
    return ops


OPS = _ops()


def word(op, field, name):
    """The value of a number that has names, such as act="silu"."""
    words = OPS[op].words[field]
    if name not in words:
        raise ValueError(f"adze: {field} is {name!r}, known are {', '.join(words)}")
    return words[name]


def dtype_code(name, known=("float32", "float16", "bfloat16")):
    if name not in known:
        raise ValueError(f"adze: out_dtype is {name}, known are {', '.join(known)}")
    return DTYPES[name]


def numbers_of(op, values):
    """The numbers of a call as Python's own, by name."""
    kinds = OPS[op].numbers
    return {name: (float if kinds[name] == "float" else operator.index)(value) for name, value in values.items()}


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
