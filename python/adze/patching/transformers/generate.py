"""Decoding that transformers compiles by itself, generate() with a static cache, for a patched model.

For one token a patched module runs the model's own code there (frame.py), so the graph is that of the unpatched
model. Dynamo still checks its guards before every token. It compares in Python, module by module, whether the patched
forward is bound to its module, and decoding waits for that. A patch always binds a forward to its own module, so
these guards are dropped. Guards on the function and on its closure stay.
"""

import copy
import sys
import types

import torch

NAME = "get_compiled_call"  # of PreTrainedModel
_REPLAY = f"{__package__.rpartition('.patching')[0]}.generation.replay"  # imported where a model was lent a cache


def keep_guards(entries):
    """A guard_filter_fn of torch.compile. Leaves out which module a forward of adze's is bound to."""
    ours = {
        entry.name.removesuffix("__func__") + "__self__"
        for entry in entries
        if entry.name.endswith(".forward.__func__") and getattr(entry.value, "adze_site", None) is not None
    }
    return [entry.name not in ours for entry in entries]


def _get_compiled_call(self, compile_config=None):
    """Replaces the model's own method: the same, with fewer guards; or a step that replays a graph, where generate()
    was told so just before (decoder.py)."""
    replay = sys.modules.get(_REPLAY)
    step = None if replay is None else replay.step_of(self)
    if step is not None:
        return step
    own = getattr(type(self), NAME)
    config = compile_config
    if config is None:
        make = getattr(self, "_default_compile_config", None)  # of newer transformers
        config = make() if make is not None else own.__globals__["CompileConfig"]()
    if config.backend != "inductor" or "guard_filter_fn" in (config.options or {}):
        return own(self, compile_config)
    config = copy.copy(config)
    options = dict(torch._inductor.list_mode_options(config.mode, config.dynamic) if config.mode else {})
    config.mode, config.options = None, {**options, **(config.options or {}), "guard_filter_fn": keep_guards}
    return own(self, config)


_get_compiled_call.__name__ = NAME  # a pickled method is found by its name, which then is the class's


def is_installed(module):
    return getattr(module.__dict__.get(NAME), "__func__", None) is _get_compiled_call


def settle(module, patched):
    """Installs the method in a patched model of transformers, or removes it."""
    own, of_class = module.__dict__.get(NAME), getattr(type(module), NAME, None)
    if own is not None and getattr(own, "__func__", None) not in (_get_compiled_call, of_class):
        return  # somebody else has replaced it
    if patched and of_class is not None:
        module.__dict__[NAME] = types.MethodType(_get_compiled_call, module)
    else:
        module.__dict__.pop(NAME, None)
