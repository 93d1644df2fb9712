"""Offers attention "adze" to transformers, whichever of the two packages is imported first.

Neither package imports the other by this, and the native part is loaded with the first call of the attention."""

import contextlib
import importlib.abc
import importlib.util
import sys
import threading

NAME = "adze"
_HOME = "transformers.modeling_utils"  # has the list of attentions


_users, _users_lock = {}, threading.Lock()  # id of a config: [how many calls have changed it, what it had before]


@contextlib.contextmanager
def attention_of(configs):
    """Attention "adze", for the call inside. Configs are changed directly: the model was asked before. Several
    threads may run the same model: the last one to end gives it the attention that it had before the first."""
    with _users_lock:
        for config in configs:
            _users.setdefault(id(config), [0, config._attn_implementation_internal])[0] += 1
            config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        with _users_lock:
            for config in configs:
                held = _users[id(config)]
                held[0] -= 1
                if not held[0]:
                    config._attn_implementation_internal = held[1]
                    del _users[id(config)]


def chosen(config):
    """The attention that a model has but for attention_of(), perhaps of another thread."""
    held = _users.get(id(config))
    return config._attn_implementation if held is None else held[1]


def _attend(*args, **kwargs):
    from .attention import attention_forward

    return attention_forward(*args, **kwargs)


def _mask(*args, **kwargs):
    from .attention import make_mask

    return make_mask(*args, **kwargs)


def _register():
    try:
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
    except ImportError:  # a version without these lists
        return
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)  # without it a model would drop its masks silently


class _Finder(importlib.abc.MetaPathFinder):
    """Finds transformers' module as others do, and registers when it has been executed."""

    def find_spec(self, name, path=None, target=None):
        if name != _HOME:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                _register()

            spec.loader.exec_module = exec_module
        return spec


def watch():
    """Registers now where transformers is imported, or else when it is."""
    if hasattr(sys.modules.get(_HOME), "AttentionInterface"):
        _register()
    else:
        sys.meta_path.insert(0, _Finder())
