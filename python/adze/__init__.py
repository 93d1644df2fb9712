"""adze: fast transformer kernels for PyTorch and Hugging Face models.

Importing it loads nothing: torch and the native part come with the first name that needs them.
"""

import importlib

from .operators import header as _header

__version__ = "0.1.0"
_HOME = {
    "patch": "patching.frame",
    "patched": "patching.frame",
    "PatchHandle": "patching.frame",
    "verify": "patching.verify",
    "compile": "inductor.compile",
    "graph": "graphs.cuda_graph",
    "GraphHandle": "graphs.cuda_graph",
    **dict.fromkeys([*_header.OPS, "linear", *_header.ROUNDING], "operators.ops"),
    "quantize": "quantization.model",  # of a tensor it is the op, of a model it replaces the Linears
    "QuantizeHandle": "quantization.model",
    "QuantizedLinear": "quantization.linear",
    "load_quantized": "quantization.checkpoint",
    "AdzeConfig": "quantization.transformers",
}
__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'adze' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_HOME})
