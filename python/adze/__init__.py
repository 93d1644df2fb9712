"""adze: fast transformer kernels for PyTorch and Hugging Face models.

Importing it loads nothing: torch and the native part come with the first name that needs them.
"""

import importlib

__version__ = "0.1.0"
_HOME = {
    name: module
    for module, names in {
        "operators.ops": "rms_norm layer_norm group_norm gated_add activation glu softmax rope qk_norm_rope "
        "rope_table ROUND_NORM ROUND_STEPS ROUND_VALUE FLOAT_SUM",
        "patching.frame": "patch patched PatchHandle",
        "patching.verify": "verify",
        "inductor.compile": "compile",
        "graphs.cuda_graph": "graph GraphHandle",
    }.items()
    for name in names.split()
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
