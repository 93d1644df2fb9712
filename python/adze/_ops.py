"""The native part of adze, loaded, and its operators as torch.ops.adze."""

import ctypes
import pathlib

import torch

NAMESPACE = "adze"
library = ctypes.CDLL(str(pathlib.Path(__file__).with_name("_adze.abi3.so")))
library.adze_torch_register.restype = ctypes.c_char_p
library.adze_describe.restype = ctypes.c_char_p
problem = library.adze_torch_register()
if problem:
    raise ImportError(f"adze: {problem.decode()}")
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(name):
    return f"{NAMESPACE}::{name}"
