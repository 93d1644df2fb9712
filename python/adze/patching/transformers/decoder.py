"""With numerics="fast": transformers' generate() replays a graph for each token (generation/replay.py). It asks its
model for a cache, whether it compiles, and for what it compiled; these methods are replaced in the instance."""

import inspect
import types

from ..settings import Known, Setting, Settings
from . import generate
from .attention import decoder_config, has_kernel

CACHE, COMPILES = "_prepare_cache_for_generation", "_valid_auto_compile_criteria"  # of GenerationMixin


def _prepare_cache_for_generation(self, *args, **kwargs):
    own = getattr(type(self), CACHE)
    setting = _known.get(self)
    if setting is None or setting.lender is None:
        return own(self, *args, **kwargs)
    from ...generation import replay

    return replay.prepare_cache(setting.lender, self, own, args, kwargs)


def _valid_auto_compile_criteria(self, model_kwargs, *args, **kwargs):
    setting = _known.get(self)
    if setting is not None and setting.lender is not None and generate.is_installed(self):
        from ...generation import replay

        if replay.will_replay(setting.lender, self, model_kwargs):
            return True
    return getattr(type(self), COMPILES)(self, model_kwargs, *args, **kwargs)


def _state(self):
    """__getstate__ of a model with these methods. A copy is without them: they are bound to this model."""
    cls = type(self)
    state = cls.__getstate__(self) if hasattr(cls, "__getstate__") else self.__dict__
    return {name: value for name, value in state.items() if name not in (*_METHODS, _STATE)}


_STATE = "__getstate__"
_METHODS = {CACHE: _prepare_cache_for_generation, COMPILES: _valid_auto_compile_criteria}


class _Decoder(Setting):
    """The methods of a model, and the memory that it lends to caches."""

    def __init__(self, model):
        super().__init__()
        self.model, self.lender = model, None

    def set(self, wanted):
        own = self.model.__dict__
        for name, method in _METHODS.items():
            if name in own and getattr(own[name], "__func__", None) is not method:
                wanted = False  # somebody else has replaced it
        if wanted and self.lender is None:
            from ...generation import replay

            self.lender = replay.Lender()
        elif not wanted:
            self.lender = None
        for name, method in {**_METHODS, _STATE: _state}.items():
            if wanted and (name in _METHODS or name not in own):
                own[name] = types.MethodType(method, self.model)
            elif not wanted and getattr(own.get(name), "__func__", None) is method:
                del own[name]

    def sentence(self):
        """Of a report; None where there is no GPU that it would be about."""
        from ...generation import decode, replay

        device, name = next(self.model.parameters()).device, type(self.model).__name__
        if not decode._graphs(device) or self.lender is None:
            return None
        reason = replay.refusal(self.model)
        if reason is None:
            return f"generate() replays a CUDA graph for each token ({name})"
        return f"generate() replays no CUDA graph ({name}): {reason}"


_known = Known(_Decoder)


def _can_replay(root):
    """Whether the class has the methods as they are known, and an attention that can be chosen."""
    names = {CACHE: {"generation_config", "model_kwargs", "generation_mode", "max_cache_length"},
             COMPILES: {"model_kwargs"}}  # fmt: skip
    for name, parameters in names.items():
        method = getattr(type(root), name, None)
        if method is None or parameters - set(inspect.signature(method).parameters):
            return False
    return hasattr(type(root), generate.NAME) and type(root)._can_set_attn_implementation() and has_kernel(root)


def decoders(handle, plan, modules, over):
    """What a patch sets in its models that generate text."""
    wanted, found = plan.numerics == "fast" and "graph" in plan.ops, []
    for root in handle.roots.values():
        config = decoder_config(root)
        if config is None or config is not root.config:
            continue
        setting = _known.add(root, handle, wanted and _can_replay(root), over)
        if setting is not None:
            found.append(setting)

    def describe(mine):
        return "; ".join(filter(None, (setting.sentence() for setting in found if setting in mine)))

    return [Settings(handle, found, describe)] if found else []
