"""adze.patch: replaces the forwards of a model's modules, instance by instance, and restores them."""

import contextlib
import dataclasses
import fnmatch
import importlib
import inspect
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _every_module

from ..operators._ops import add_op_namespace_prefix
from ..operators.fake import needs_tangents
from .fingerprint import decorated_like, described, fingerprint, undecorated, unwrapped
from .forwards import is_adze, is_of, own_forward, site_of
from .known_sources import hashes, outside
from .transformers import generate

OPS = ("norm", "rope", "act", "fuse", "attention", "graph")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HAS_KERNELS = torch._C._dispatch_has_kernel_for_dispatch_key
DEVICES = tuple(d for d in ("cpu", "cuda") if _HAS_KERNELS(add_op_namespace_prefix("rms_norm"), d.upper()))
_OF_A_MODULE = ("__name__", "__doc__", "__file__", "__cached__", "__loader__", "__spec__")


# ---- What rules are made of ----


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one kind of module is replaced.

    fingerprints: what must be known of the module's source, as {what: fingerprints}. "forward" is the class's
      forward, "self._norm" another method of the class, "rotate_half" a global of the forward,
      "apply_rotary_pos_emb/rotate_half" a global of that function. A rule without "forward" is for every forward
      that uses the globals it names.
    build(module, ctx): a new function `forward(self, ...)` with the parameters of the original, or a str: why not. An
      attribute adze_note of the function is a remark for the report.
    facts(module, ctx): what a fused block needs to know to do this module's work itself (a Norm, an Act), or a str:
      why not.
    matches(function): for a rule without fingerprints. It is asked about forwards that no other rule knows.
    numerics: the only ones that the rule is for; None for all.
    """

    name: str
    op: str
    fingerprints: Mapping[str, frozenset[str]]
    build: Callable[[nn.Module, "Context"], Callable | str]
    facts: Callable[[nn.Module, "Context"], Any] | None = None
    matches: Callable[[Callable], bool] | None = None
    numerics: str | None = None


@dataclasses.dataclass(frozen=True)
class Context:
    """What a rule may ask while it builds."""

    numerics: str
    ops: frozenset[str]
    path: str
    original: Callable  # the function that the module's forward was, without the decorators that are put back
    plan: "_Plan"

    @property
    def match(self):
        return self.numerics == "match"

    def rounding(self, bits):
        """The rounding of an op: the model's own with "match"; with "fast" 0, one rounding at the end."""
        return bits if self.match else 0

    def facts(self, child, op):
        """What the rule of a child module says about it, or a str: why it cannot be said."""
        return self.plan.facts(child, op)


def known(**sources):
    """A Rule's {"forward": ..., "self._norm": ...} of forward="...", _norm="...", which are names of sources as
    fingerprints.json has them."""
    return {("self." if what[0] == "_" else "") + what: hashes(names) for what, names in sources.items()}


def rule(name, op, build, facts=None, **sources):
    """A Rule whose fingerprints are those of some sources, given as to known()."""
    return Rule(name, op, known(**sources), build, facts)


# Called by patched forwards. Dynamo knows every answer while it traces, so none of these breaks a graph.


def plain_weight(weight):
    return weight is None or type(weight) is nn.Parameter or type(weight) is torch.Tensor


def parameter(module, name):
    """A parameter, or None. nn.Module.__getattr__ is slow, and only a parametrised weight needs it."""
    own = module._parameters
    return own[name] if name in own else getattr(module, name, None)


def strange_weight(module):
    """Why ops cannot take a module's own weights, if they cannot: quantised ones are tensors of other classes."""
    for name, weight in module.named_parameters(recurse=False):
        if not plain_weight(weight):
            return f"its {name} is a {type(weight).__name__}"
    return None


def _one_token(x):
    """Whether x is [batch, tokens, dim] of one token, or such with heads before or after the tokens. Sizes that are
    not known when a graph is traced are never 1 there, so asking for it adds no guard."""
    return x.dim() > 1 and (x.shape[-2] == 1 or (x.dim() == 4 and x.shape[1] == 1))


def left_to_compiler(x):
    """Whether x is one token in a compiled graph. There a launch takes longer than its work, and Inductor, which
    fuses with the ops around, needs fewer launches."""
    return torch.compiler.is_compiling() and _one_token(x)


def _leaving_tokens(made, original):
    """The patched forward; for one token in a compiled graph, the original one. Before each call Dynamo checks a
    guard for every function and number that the traced code has read, and decoding would wait for that."""

    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            x = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(x, torch.Tensor) and _one_token(x):
                return original(self, *args, **kwargs)
        return made(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(made)
    return forward


_warned = set()


def _warn_once(what):
    """A warning, once in a process, and not while Dynamo traces: it would break the graph."""
    if not torch.compiler.is_compiling() and what not in _warned:
        _warned.add(what)
        warnings.warn(f"adze: {what}", stacklevel=5)


def _needs_gradient(x):
    """Whether autograd must see what is done with x; there are no backward kernels."""
    if x.requires_grad:
        _warn_once(
            "gradients are enabled and needed, so patched modules run their own forwards; call the model under "
            "torch.inference_mode() or torch.no_grad()"
        )
    return x.requires_grad


def usable(x, *others):
    """Whether adze's ops accept x together with these weights, tables or inputs, and no gradient is needed."""
    if type(x) is not torch.Tensor and type(x) is not nn.Parameter:
        return False
    device, dtype = x.device, x.dtype
    if dtype not in _DTYPES or device.type not in DEVICES or torch.is_autocast_enabled(device.type):
        return False
    if x.is_nested or not 1 <= x.dim() <= 5 or x.stride(-1) != 1 or left_to_compiler(x) or needs_tangents():
        return False
    grad = torch.is_grad_enabled()
    if grad and _needs_gradient(x):
        return False
    for other in others:
        if other is None:
            continue
        if not plain_weight(other) or other.device != device:
            return False
        if (other.dtype != dtype and other.dtype != torch.float32) or other.stride(-1) != 1:
            return False
        if grad and _needs_gradient(other):
            return False
    return True


def plain(child, cls):
    """Whether a child is exactly of this class, and its call would run only its own or adze's forward."""
    if type(child) is not cls or child._forward_hooks or child._forward_pre_hooks:
        return False
    if child._backward_hooks or child._backward_pre_hooks:
        return False
    if _every_module._global_forward_hooks or _every_module._global_forward_pre_hooks:
        return False
    own = child.__dict__
    if "_hf_hook" in own or "_diffusers_hook" in own:
        return False
    forward = own.get("forward")
    return forward is None or is_adze(forward) or is_of(forward, cls)


def shim(module, numerics, names):
    """A module with the globals of another and some of them replaced, for clones of its functions.

    It is registered as adze._shims.<numerics>.<module>: Dynamo imports the module of a function that it traces."""
    name = f"adze._shims.{numerics}.{module.__name__}"
    made = sys.modules.setdefault(name, types.ModuleType(name, f"{module.__name__}, with functions of adze"))
    made.__dict__.update({key: value for key, value in vars(module).items() if key not in _OF_A_MODULE} | names)
    return made


def clone(function, module):
    """The same function with the globals of another module."""
    made = types.FunctionType(
        function.__code__, module.__dict__, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


# ---- Which rule a module gets ----


LIBRARIES = ("transformers", "diffusers")


def _rules_of(library):
    return importlib.import_module(f".{library}.rules", __package__)


def rules_for(*libraries):
    """The rules for torch's own modules and for those of some libraries."""
    found = list(importlib.import_module(".torch", __package__).RULES)
    for library in libraries:
        found += _rules_of(library).RULES
    return found


def _loaded():
    return [library for library in LIBRARIES if library in sys.modules]


def _source_of(forward, what):
    """The function that `what` names, as in Rule.fingerprints, where this is the forward; None if there is none."""
    function = undecorated(forward)
    for name in what.split("/"):
        function = unwrapped(getattr(function, "__globals__", {}).get(name))
    return function


def _mismatch(rule, cls, function):
    """None if the rule is made for this source, "" if it is for something else, or which part is not known."""
    inner = undecorated(function)
    code = getattr(inner, "__code__", None)
    if "forward" in rule.fingerprints:
        if fingerprint(inner) not in rule.fingerprints["forward"]:
            return ""
    elif code is None or not all(what.split("/")[0] in code.co_names for what in rule.fingerprints):
        return ""
    for what, known in rule.fingerprints.items():
        if what != "forward":
            part = getattr(cls, what[5:], None) if what.startswith("self.") else _source_of(function, what)
            if fingerprint(part) not in known:
                return f"{what} is {described(part)}, which rule {rule.name} does not know"
    return None


def looks_like(module):
    """The op that a module seems to call for, by its name and what it uses; None for others, such as a Linear."""
    name = type(module).__name__
    if re.search(r"norm", name, re.I) and not re.search(r"batch|instance|spectral", name, re.I):
        return "norm" if not any(True for _ in module.children()) else "fuse"
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is not None and any(n.startswith(("apply_rotary", "apply_rope")) for n in code.co_names):
        return "rope"
    children = dict(module.named_children())
    if re.search(r"(Activation|GELU|SiLU|GELUTanh)$", name) or ("down_proj" in children and "gate_proj" in children):
        return "act"
    if re.search(r"(Layer|Block)$", name) and any(looks_like(child) == "norm" for child in children.values()):
        return "fuse"
    return None


class _Plan:
    """Chooses a rule for every module of a model."""

    def __init__(self, ops, numerics, exclude):
        self.ops, self.numerics, self.exclude = ops, numerics, exclude
        self.rules = [rule for rule in rules_for(*_loaded()) if rule.numerics in (None, numerics)]
        self.excluded = set()
        self.packed = set()  # Linears whose weights lie in one storage

    def known(self, cls, function, own=()):
        """The rules made for this source, and why others of its kind are not. own: what an instance has itself."""
        fitting, reasons = [], []
        for rule in self.rules:
            if rule.matches is not None:
                continue
            mismatch = _mismatch(rule, cls, function)
            hidden = [what for what in rule.fingerprints if what.startswith("self.") and what[5:] in own]
            if mismatch is None and hidden:
                mismatch = f"{hidden[0]} is an attribute of the module, not the class's method"
            if mismatch is None:
                fitting.append(rule)
            elif mismatch:
                reasons.append(mismatch)
        return fitting, reasons

    def matching(self, function):
        """The rules without fingerprints that accept this function."""
        return [rule for rule in self.rules if rule.matches is not None and rule.matches(function)]

    def facts(self, child, op):
        if not isinstance(child, nn.Module):
            return "not a module"
        if child in self.excluded:
            return "excluded"
        function = site_of(child).function
        if function is None or fingerprint(function) != fingerprint(type(child).forward):
            return f"{type(child).__name__} has a forward of its own"
        if undecorated(function) is not function:
            return f"{type(child).__name__}.forward is decorated"
        if type(child).__call__ is not nn.Module.__call__:
            return f"{type(child).__name__} has a __call__ of its own"
        for rule in self.known(type(child), function, child.__dict__)[0]:
            if rule.op == op and rule.facts is not None:
                return strange_weight(child) or rule.facts(child, self.context(child, "", function))
        return f"{type(child).__name__}.forward is {described(function)}, which no rule knows"

    def context(self, module, path, function):
        return Context(self.numerics, self.ops, path, function, self)

    def choose(self, module, path, site):
        """(rule or None, function or None, why not), or None for a module that no op could replace."""
        cls = type(module)
        kind = looks_like(module)
        if module in self.excluded:
            return kind and (None, None, "excluded")
        function = site.function
        if function is None or (function is not cls.forward and fingerprint(function) != fingerprint(cls.forward)):
            fitting, _ = self.known(cls, cls.forward)
            return (kind or fitting) and (None, None, "has a forward of its own")
        fitting, reasons = self.known(cls, function, module.__dict__)
        matched, hints = bool(fitting), []
        for rule in fitting or self.matching(undecorated(function)):
            if rule.op not in self.ops:
                (reasons if matched else hints).append(f"{rule.op} was not asked for")
                continue
            made = strange_weight(module) or rule.build(module, self.context(module, path, undecorated(function)))
            if callable(made):
                note, products = getattr(made, "adze_note", None), getattr(made, "adze_products", None)
                if not getattr(made, "adze_fused_linear", False):
                    made = _leaving_tokens(made, undecorated(function))
                if products is not None:
                    made.adze_products = products
                made.__name__ = made.__qualname__ = "forward"
                return rule, decorated_like(function, made), note
            (reasons if matched else hints).append(made)
        if not matched and not reasons:
            if kind is None:
                return None
            reasons = [f"forward is {described(function)}, which no rule knows", *hints]
        return fitting[0] if matched else None, None, "; ".join(dict.fromkeys(reasons))


# ---- The handle, and adze.patch ----


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a report."""

    path: str
    cls: str
    rule: str | None  # what replaced the module, or None
    reason: str  # why not, or when not
    known: bool = True  # whether a rule was made for this source


class PatchHandle:
    """The result of adze.patch: what it has replaced, and how to disable, enable and remove it."""

    def __init__(self, roots, numerics):
        self.roots, self.numerics = roots, numerics
        self.enabled = True
        self.rows = []
        self.sites = []
        self.settings = []  # what a library's rules change besides forwards
        self.packed = 0

    @property
    def patched(self):
        """Paths of the modules that run a forward of this patch (while it is enabled)."""
        return [row.path for row in self.rows if row.rule]

    def enable(self):
        self._set(True)

    def disable(self):
        """Gives every module its original forward, until enable()."""
        self._set(False)

    def remove(self):
        """Gives every module its original forward, for good."""
        self._set(False)
        for site in self.sites:
            site.layers = [layer for layer in site.layers if layer[0] is not self]
        for setting in self.settings:
            setting.leave()
        self.sites, self.settings = [], []
        for module in [module for root in self.roots.values() for module in root.modules()]:
            forward = own_forward(module)
            if is_adze(forward) and forward.__func__.adze_site.module is not module:
                site_of(module)  # a copy of a patched module, as peft makes: it loses the patch here

    def _set(self, enabled):
        self.enabled = enabled
        for site in [*self.sites, *self.settings]:
            site.settle()
        self.forget_compiled()

    def forget_compiled(self):
        """Drops the compiled forwards that transformers caches: they were compiled from other functions."""
        for root in self.roots.values():
            patched = bool(active_handles(root))
            for module in root.modules():
                generate.settle(module, patched)
                module.__dict__.pop("_compiled_call", None)
                module.__dict__.pop("_last_compile_config", None)
                if module.__dict__.get("_compiled_call_impl") is not None:
                    warnings.warn(
                        f"adze: a {type(module).__name__} was compiled before; patch first, then compile",
                        stacklevel=4,
                    )

    def report(self):
        """A table: modules, and what replaced them or why not. Modules that no op could replace are left out."""
        counts = {}
        for row in self.rows:
            path = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row.path)
            what = f"{row.rule} {row.reason}".rstrip() if row.rule else f"- {row.reason}"
            counts[path, row.cls, what] = counts.get((path, row.cls, what), 0) + 1
        lines = [("module", "", "class", "adze")]
        lines += [(path, f"x{n}" if n > 1 else "", cls, what) for (path, cls, what), n in counts.items()]
        widths = [max(len(line[i]) for line in lines) for i in range(3)]
        text = ["  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[3]]) for line in lines]
        state = "" if (self.sites or self.settings) and self.enabled else ", not in use now"
        text.append(
            f"{len(self.patched)} modules patched, {len(self.rows) - len(self.patched)} left as they are{state}"
        )
        text += [sentence for setting in self.settings if (sentence := setting.sentence())]
        if self.packed:
            text.append(
                f"{self.packed} Linears have new memory for their weights; a state_dict or a view taken before is"
                " a copy"
            )
        homes = {type(module).__module__.partition(".")[0] for r in self.roots.values() for module in r.modules()}
        text += [sentence for library in LIBRARIES if library in homes and (sentence := outside(library))]
        return "\n".join(text)

    __str__ = report


def _roots(model):
    if isinstance(model, nn.Module):
        return {"": model}
    parts = getattr(model, "components", None)
    if isinstance(parts, Mapping):
        return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    raise TypeError(f"adze.patch: model is a {type(model).__name__}, it must be a module or a pipeline")


def named_modules(model):
    seen = set()
    for prefix, root in _roots(model).items():
        for path, module in root.named_modules(memo=seen, prefix=prefix):
            if not isinstance(module, torch.jit.ScriptModule):  # compiled already: they have no forward in Python
                yield path, module


def active_handles(model):
    """The handles whose functions run in a model now."""
    found = {}
    for _, module in named_modules(model):
        forward = own_forward(module)
        if is_adze(forward) and forward.__func__.adze_site.module is module:
            found.update((id(handle), handle) for handle, _ in forward.__func__.adze_site.layers if handle.enabled)
    return list(found.values())


def _install(model, ops, numerics, exclude, strict, over):
    ops = frozenset(OPS if ops is None else [ops] if isinstance(ops, str) else ops)
    if ops - set(OPS):
        raise ValueError(f"adze.patch: ops has {sorted(ops - set(OPS))[0]!r}, it must have some of {', '.join(OPS)}")
    if numerics not in ("match", "fast"):
        raise ValueError(f'adze.patch: numerics is {numerics!r}, it must be "match" or "fast"')
    exclude = [exclude] if isinstance(exclude, str) else list(exclude)
    handle = PatchHandle(_roots(model), numerics)
    plan = _Plan(ops, numerics, exclude)
    modules = list(named_modules(model))
    for path, module in modules:
        parts = path.split(".")
        above = [".".join(parts[: i + 1]) for i in range(len(parts))]
        if any(fnmatch.fnmatchcase(part, pattern) for pattern in exclude for part in above):
            plan.excluded.add(module)
    chosen = []
    for path, module in modules:
        site = site_of(module)
        rule, function, reason = plan.choose(module, path, site) or (None, None, None)
        chosen.append((site, function))
        if function or reason:
            name = rule.name if function else None
            settled = rule is not None or reason == "excluded"
            handle.rows.append(Row(path, type(module).__name__, name, reason or "", settled))
    handle.packed = len(plan.packed)
    unknown = [row for row in handle.rows if not row.known]
    if strict and unknown:
        lines = "\n".join(f"  {row.path} ({row.cls}): {row.reason}" for row in unknown)
        raise RuntimeError(f"adze.patch: {len(unknown)} modules look like targets and match no rule:\n{lines}")
    for site, function in chosen:
        if function is None and not site.layers:
            continue
        if not over:
            for earlier, _ in site.layers:
                earlier.sites = [s for s in earlier.sites if s is not site]
            site.layers = []
        if function or site.layers:
            site.layers.append((handle, function))
            handle.sites.append(site)
        site.settle()
    for library in _loaded():
        change = getattr(_rules_of(library), "settings", None)
        handle.settings += change(handle, plan, modules, over) if change is not None else []
    for setting in handle.settings:
        setting.settle()
    handle.forget_compiled()
    return handle


def patch(
    model: Any,
    ops: Iterable[str] | None = None,
    numerics: str = "match",
    exclude: Iterable[str] = (),
    strict: bool = False,
) -> PatchHandle:
    """Replaces forwards of the modules of a model or a pipeline, in place, and returns a handle that can undo it.

    ops: some of "norm", "rope", "act", "fuse", "attention", "graph"; None is all.
    numerics: "match" rounds where the model rounds. "fast" rounds each op once, runs Linears that read the same
      input as one GEMM, and, where that was measured to be faster, products of few rows by gemm, with the norm before
      and the sum after them, and the attention of diffusers' models. It sets attention "adze" for language models
      where the op has a kernel, and on GPUs their generate() replays a CUDA graph for each token.
    exclude: patterns of module paths, such as "vision_tower.*"; what is below a match is excluded with it.
    strict: raise when a module that looks like a target is not known.

    Only instances change: no class, parameter, buffer, submodule or global; "fast" moves some parameters in memory,
    and adds a backend to diffusers' attention dispatcher. A second patch replaces the first."""
    return _install(model, ops, numerics, exclude, strict, over=False)


@contextlib.contextmanager
def patched(model, ops=None, numerics="match", exclude=(), strict=False):
    """adze.patch for a `with` block. Afterwards the model has the forwards that it had before, patched or not."""
    handle = _install(model, ops, numerics, exclude, strict, over=True)
    try:
        yield handle
    finally:
        handle.remove()
