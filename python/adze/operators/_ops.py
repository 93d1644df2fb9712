"""The native part of adze, loaded, and its operators as torch.ops.adze."""

import torch

from . import description  # noqa: F401  its error says what to do where the native part is missing

# isort: split
from . import _adze  # noqa: F401  registers the operators

ops = torch.ops.adze


def add_op_namespace_prefix(name):
    return f"adze::{name}"
