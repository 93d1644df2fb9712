"""vLLM's gated activations over glu, in its eager mode on the CPU.

They are subclasses of vLLM's own and take their place (CustomOp.register_oot). In a compiled graph and on GPUs they
stay vLLM's: a compiler fuses them with their neighbours, vLLM's passes search for its own operators, and its
kernels for GPUs are one launch as well. RotaryEmbedding is not replaced: vLLM's kernel reads the table at the
positions itself, and rope after a gather of the table took up to four times as long.
"""

import functools
import importlib

import torch

from ..operators import ops
from ..patching.frame import usable

FEW = 8192  # elements, below which a call takes as long as the two operators of vLLM's own forward
GATED = {  # class: (the activation of a layer, whether the value is before the gate)
    "SiluAndMul": (lambda layer: "silu", False),
    "MulAndSilu": (lambda layer: "silu", True),
    "GeluAndMul": (lambda layer: {"none": "gelu", "tanh": "gelu_tanh"}[layer.approximate], False),
}


def _subclass(base, act_of, value_first):
    class Layer(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if getattr(self, "_enforce_enable", False) or self.enabled():
                self._act = act_of(self)
                self._own_forward, self._forward_method = self._forward_method, self._forward_glu

        def _forward_glu(self, x):
            if torch.compiler.is_compiling() or x.numel() < FEW or not usable(x):
                return self._own_forward(x)
            return ops.glu(x, act=self._act, value_first=value_first, rounding=ops.ROUND_STEPS)

    Layer.__name__ = Layer.__qualname__ = f"Adze{base.__name__}"
    return Layer


def _offer(name):
    """Registers a subclass in place of vLLM's class, unless another plugin has registered one."""
    if not importlib.import_module("vllm.platforms").current_platform.is_cpu():
        return
    base = getattr(importlib.import_module("vllm.model_executor.layers.activation"), name)
    if name not in importlib.import_module("vllm.model_executor.custom_op").op_registry_oot:
        layer = _subclass(base, *GATED[name])
        base.register_oot(layer)
        # register_oot has set the class's name here; with it `custom_ops=["+silu_and_mul"]` would have no effect.
        del layer.name


def offers():
    """(name, function) of each offer, as vllm._offers has them."""
    for name in GATED:
        yield name, functools.partial(_offer, name)
