"""A vllm package with the parts of vLLM that adze's plugin uses, as in vLLM 0.19 to 0.32. Tests remove parts, or make
them raise."""

import sys
import types

import torch


class IrOp:
    def __init__(self):
        self.impls = {}

    def register_impl(self, provider, *, supported=True, supports_args=None):
        def add(function):
            assert provider not in self.impls
            self.impls[provider] = (function, supports_args)

        return add


class CustomOp(torch.nn.Module):
    registry, custom_ops = {}, ["all"]

    def __new__(cls, *args, **kwargs):
        return super().__new__(CustomOp.registry.get(cls.__name__, cls))

    def __init__(self):
        super().__init__()
        self._forward_method = self.forward_cpu if self.enabled() else self.forward_native

    def forward(self, *args):
        return self._forward_method(*args)

    def forward_cpu(self, *args):
        return self.forward_native(*args)

    @classmethod
    def enabled(cls):
        return ("all" in cls.custom_ops or f"+{cls.name}" in cls.custom_ops) and f"-{cls.name}" not in cls.custom_ops

    @classmethod
    def register_oot(cls, layer):
        assert cls.__name__ not in CustomOp.registry, f"Duplicate op name: {cls.__name__}"
        layer.name, CustomOp.registry[cls.__name__] = cls.__name__, layer


class SiluAndMul(CustomOp):
    name = "silu_and_mul"

    @staticmethod
    def forward_native(x):
        d = x.shape[-1] // 2
        return torch.nn.functional.silu(x[..., :d]) * x[..., d:]


class MulAndSilu(CustomOp):
    name = "mul_and_silu"

    def __init__(self):
        super().__init__()
        self._forward_method = self.forward_native  # as vLLM does on the CPU

    def forward_native(self, x):
        d = x.shape[-1] // 2
        return x[..., :d] * torch.nn.functional.silu(x[..., d:])


class GeluAndMul(CustomOp):
    name = "gelu_and_mul"

    def __init__(self, approximate="none"):
        super().__init__()
        self.approximate = approximate

    def forward_native(self, x):
        d = x.shape[-1] // 2
        return torch.nn.functional.gelu(x[..., :d], approximate=self.approximate) * x[..., d:]


GATED = (SiluAndMul, MulAndSilu, GeluAndMul)


def install(monkeypatch, version, ir_ops=("rms_norm", "fused_add_rms_norm"), cpu=True, layers=GATED):
    """Makes `import vllm` find it. ir_ops None: there is no vllm.ir; the same for layers."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(CustomOp, "registry", {})
    contents = {
        "vllm": {"__version__": version},
        "vllm.platforms": {"current_platform": types.SimpleNamespace(is_cpu=lambda: cpu)},
        "vllm.model_executor": {},
        "vllm.model_executor.custom_op": {"op_registry_oot": CustomOp.registry},
    }
    ops = types.SimpleNamespace(**{name: IrOp() for name in ir_ops or ()})
    if ir_ops is not None:
        contents["vllm.ir"] = {"ops": ops}
    if layers is not None:
        contents["vllm.model_executor.layers"] = {}
        contents["vllm.model_executor.layers.activation"] = {cls.__name__: cls for cls in layers}
    for name, values in contents.items():
        module = types.ModuleType(name)
        vars(module).update(values, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    return types.SimpleNamespace(ops=ops, replaced=CustomOp.registry)
