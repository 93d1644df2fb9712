"""What a module's forward depends on, other than its inputs and the values of its weights: forwards, hooks,
submodules and every attribute, also those within lists, dicts and objects such as a config or a cache. adze.graph
compares it before each replay, because a changed module may launch other kernels.
"""

import itertools
import operator
import types
from functools import partial

import torch
from torch import nn
from torch.nn.modules import module as _every_module

_DEPTH = 4  # of containers within an attribute
_PLAIN = (bool, int, float, complex, str, bytes, tuple, types.MethodType, torch.dtype, torch.device, torch.Size)
_OPAQUE = (
    torch.Tensor, type, partial, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
)  # fmt: skip
_GLOBAL_HOOKS = [_every_module._global_forward_hooks, _every_module._global_forward_pre_hooks]
# Of nn.Module's own dicts a forward without gradients depends on these; weights are identified by their addresses.
_OF_A_MODULE = set(nn.Module().__dict__) - {"_modules", "_forward_hooks", "_forward_pre_hooks"}


def _inside(value):
    """A dict or list itself, or the dict of an object's attributes; None for values that are compared as a whole."""
    if isinstance(value, (dict, list)):
        return value
    if isinstance(value, nn.Module):
        return value.__dict__
    if isinstance(value, _OPAQUE) or type(value).__module__.split(".")[0] in ("torch", "builtins"):
        return None
    inside = getattr(value, "__dict__", None)
    return inside if isinstance(inside, dict) else None


def _items(container):
    return list(container.items()) if isinstance(container, dict) else list(enumerate(container))


class ModuleState:
    """The state of a module when it was recorded; `same()` compares it with the current one."""

    def __init__(self, module):
        """A module may have a function `apart`. The object that it returns is not compared, wherever it is among the
        attributes: a graph reads its state on the device."""
        self.module, self.apart = module, getattr(module, "apart", None)
        self.own = set()  # (id of a container, key or None for all keys): what the module's forward itself writes
        self.record()

    def record(self):
        """Records the current state."""
        self.modules = list(self.module.modules())
        self.weights = [own for m in self.modules for own in (m._parameters, m._buffers) if own]
        self.attributes = {id(m.__dict__) for m in self.modules}  # dicts whose keys are names of attributes
        self.dicts, self.lists, self.empty, self.copies = [], [], [], []
        seen = set() if self.apart is None else {id(vars(self.apart()))}
        level = [m.__dict__ for m in self.modules] + _GLOBAL_HOOKS
        for depth in range(_DEPTH + 1):
            below = []
            for container in level:
                if id(container) in seen:
                    continue
                seen.add(id(container))
                if (id(container), None) in self.own:
                    continue
                kind = self.dicts if isinstance(container, dict) else self.lists
                (kind if container else self.empty).append(container)
                items = _items(container)
                self.copies.append((container, items))
                for key, value in items if depth < _DEPTH else ():
                    if (id(container), key) in self.own or (depth == 0 and key in _OF_A_MODULE):
                        continue
                    inside = _inside(value)
                    if inside is not None:
                        below.append(inside)
                        if inside is not value:
                            self.attributes.add(id(inside))
            level = below
        self.own = {(container, key) for container, key in self.own if container in seen}  # ids may be reused
        self.values = self._now()

    def _now(self):
        values = list(map(type, self.modules))
        values.extend(itertools.chain.from_iterable(map(dict.values, self.dicts)))
        values.extend(itertools.chain.from_iterable(self.lists))
        return values

    def _slots(self):
        """(id of a container, key) of each value, as in _now."""
        yield from ((0, i) for i in range(len(self.modules)))
        for container in (*self.dicts, *self.lists):
            yield from ((id(container), key) for key, _ in _items(container))

    def same(self):
        """Whether nothing has changed. Numbers and other plain values are compared by value."""
        now, was = self._now(), self.values
        if len(now) != len(was) or any(self.empty):
            return False
        if all(map(operator.is_, now, was)):
            return True
        for slot, a, b in zip(self._slots(), now, was, strict=True):
            if not _same(a, b) and slot not in self.own:
                return False
        self.values = now
        return True

    def ran(self):
        """To be called after a run of the module. What the run has changed is the module's own state, such as a
        counter or a cached table, and is not compared any more."""
        for container, items in self.copies:
            before, now = dict(items), dict(_items(container))
            changed = {k for k in before.keys() | now.keys() if not _same(before.get(k, self), now.get(k, self))}
            if changed and id(container) not in self.attributes and before.keys() != now.keys():
                self.own.add((id(container), None))
            else:
                self.own.update((id(container), key) for key in changed)
        self.record()


def _same(a, b):
    if a is b:
        return True
    try:
        return type(a) is type(b) and isinstance(a, _PLAIN) and bool(a == b)
    except Exception:  # == on tuples of tensors raises
        return False
