"""Where the forward of a patched module is kept: in the instance, behind whatever hooks are there, and in copies."""

import copy
import types
import weakref

MISSING = object()


# In torch 2.11 Dynamo traces `method.__func__`, but getattr(method, "__func__", default) always gives the default.


def is_of(forward, cls):
    try:
        return forward.__func__ is cls.forward
    except AttributeError:
        return False


def is_adze(forward):
    """Whether a module's instance forward was put there by a patch."""
    try:
        return forward.__func__.adze_site is not None
    except AttributeError:
        return False


def _place(module):
    """The dict and key of a module's own forward: accelerate's and diffusers' hooks keep it behind theirs."""
    own = module.__dict__
    if "_hf_hook" in own and "_old_forward" in own:
        return own, "_old_forward"
    refs = getattr(own.get("_diffusers_hook"), "_fn_refs", None)
    if refs:
        return refs[0].__dict__, "forward" if refs[0].original_forward is None else "original_forward"
    return own, "forward"


def own_forward(module):
    """The forward that a module has of its own, behind any hook; None if it is the class's."""
    holder, key = _place(module)
    return holder.get(key)


class _State(dict):
    """The state that a copy of a patched module gets. A deep copy keeps the patch, with the forward bound to the
    copy. A shallow copy and a pickled module lose it: the forward in __dict__ is bound to the original module, and
    would run with its weights."""

    def __init__(self, module, state):
        super().__init__(state)
        self.module, self.forward = module, None
        _without_helpers(self)
        if is_adze(self.get("forward")):
            self.forward = self.pop("forward").__func__

    def __deepcopy__(self, memo):
        made = {key: copy.deepcopy(value, memo) for key, value in self.items()}
        if self.forward is not None:
            _bind(self.forward, memo[id(self.module)], made)
        return made

    def __reduce__(self):
        return dict, (dict(self),)


def _state(module):
    """__getstate__ of a patched module."""
    cls = type(module)
    state = cls.__getstate__(module) if hasattr(cls, "__getstate__") else module.__dict__
    return _State(module, state) if isinstance(state, dict) else state


def _replica(module):
    """_replicate_for_data_parallel of a patched module: the replica runs the same function with its own weights."""
    replica = type(module)._replicate_for_data_parallel(module)
    _without_helpers(replica.__dict__)
    forward = replica.__dict__.get("forward")
    if is_adze(forward):
        _bind(forward.__func__, replica, replica.__dict__)
    return replica


_HELPERS = {"__getstate__": _state, "_replicate_for_data_parallel": _replica}


def _without_helpers(own):
    for name in _HELPERS:
        own.pop(name, None)


def _bind(function, module, own):
    """Makes a function the module's forward. own is its __dict__, or what will become that."""
    own["forward"] = types.MethodType(function, module)
    own.update((name, types.MethodType(helper, module)) for name, helper in _HELPERS.items())


class Site:
    """A module's original forward, and the functions that patches have installed in its place."""

    def __init__(self, module):
        self.module = module
        self.before = MISSING
        self.layers = []  # (handle, function or None); the last one whose handle is enabled is active

    def look(self):
        """Records the module's forward as the original one, unless it is adze's."""
        holder, key = _place(self.module)
        current = holder.get(key, MISSING)
        if not is_adze(current):
            self.before = current
        elif current.__func__.adze_site is not self and not self.layers:  # the module is a copy of a patched one
            was = current.__func__.adze_site.before
            self.before = was if was is MISSING else types.MethodType(was.__func__, self.module)
            self.settle()

    @property
    def function(self):
        """The function that the module's forward is without adze, or None if it is not a method of the module."""
        if self.before is MISSING:
            return type(self.module).forward
        return (
            getattr(self.before, "__func__", None) if getattr(self.before, "__self__", None) is self.module else None
        )

    def active(self):
        """The function that is to run instead of the original, or None."""
        enabled = [function for handle, function in self.layers if handle.enabled]
        return enabled[-1] if enabled else None

    def settle(self):
        """Installs the active forward, or restores the original. A forward that somebody else has set stays."""
        holder, key = _place(self.module)
        current = holder.get(key, MISSING)
        _without_helpers(self.module.__dict__)
        ours = current is self.before or is_adze(current)
        if not ours and getattr(current, "__func__", None) is not type(self.module).forward:
            return
        active, alone = self.active(), holder is self.module.__dict__ and key == "forward"
        if active is not None:
            active.adze_site = self
            if alone:
                _bind(active, self.module, holder)
            else:
                holder[key] = types.MethodType(active, self.module)
        elif self.before is not MISSING:
            holder[key] = self.before
        elif alone:
            holder.pop(key, None)
        else:
            holder[key] = types.MethodType(type(self.module).forward, self.module)


_sites = weakref.WeakValueDictionary()  # id of a module -> its site, which keeps the module alive


def site_of(module):
    site = _sites.get(id(module))
    if site is None:
        _sites[id(module)] = site = Site(module)
    site.look()
    return site
