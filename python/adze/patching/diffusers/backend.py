"""attention of diffusers' models: a backend "adze" of its dispatcher, and processors that call torch's function.

diffusers has no function for a backend from outside. A backend is a member of its enumeration and an entry of its
registry, so register() adds one of each. A processor names the backend that it asks: a patch sets it where nobody has
chosen one. Processors that call F.scaled_dot_product_attention run with another F."""

import inspect
import sys

import torch
from torch.nn import functional as F

from ..attention import attend, faster_somewhere, scaled_dot_product_attention, taken
from ..fingerprint import undecorated
from ..frame import clone, shim
from ..settings import Known, Setting, Settings

NAME = "adze"


# ---- The backend ----


def _dispatcher():
    """diffusers' module, or None where it has no dispatcher of this kind."""
    module = sys.modules.get("diffusers.models.attention_dispatch")
    names = ("AttentionBackendName", "_AttentionBackendRegistry", "dispatch_attention_fn")
    if module is None or not all(hasattr(module, name) for name in names):
        return None
    registry = module._AttentionBackendRegistry
    parts = ("register", "get_active_backend", "_backends", "_supported_arg_names")
    return module if all(hasattr(registry, part) for part in parts) else None


def _member(names):
    """A new member of the enumeration of backends. A pickle has None in its place: its reader may not have adze.
    A deep copy has the member itself; before Python 3.11.4 it would be what __reduce_ex__ says."""
    member = str.__new__(names, NAME)
    member._name_, member._value_, member._sort_order_ = NAME.upper(), NAME, len(names)
    member.__objclass__ = names
    member.__reduce_ex__ = lambda protocol: (type(None), ())
    member.__deepcopy__ = lambda memo: member
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = member
    names._value2member_map_[member._value_] = member
    return member


def _backend(registry, native):
    """The function of the backend. What it does not take goes to the backend that is active without it."""

    def adze_attention(
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
        return_lse=False,
        _parallel_config=None,
    ):
        active, _ = registry.get_active_backend()
        chosen = native if active == NAME else active
        mask = attn_mask
        if mask is not None and mask.ndim == 2 and mask.shape == (query.shape[0], key.shape[1]):
            mask = mask[:, None, None]  # a mask of keys for each of the batch
        if chosen is native and not return_lse and _parallel_config is None:
            q, k, v = (t.transpose(1, 2) if t.dim() == 4 else t for t in (query, key, value))
            if taken(q, k, v, mask, dropout_p, is_causal, scale):
                return attend(q, k, v, mask, is_causal, scale).transpose(1, 2)
        given = {
            "query": query,
            "key": key,
            "value": value,
            "attn_mask": attn_mask,
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
            "return_lse": return_lse,
            "_parallel_config": _parallel_config,
        }
        names = registry._supported_arg_names[chosen]
        return registry._backends[chosen](**{name: value for name, value in given.items() if name in names})

    return adze_attention


def register():
    """The backend "adze" of diffusers' dispatcher; it is added by the first call.

    model.set_attention_backend("adze") chooses it. It leaves to torch what was not measured to be faster."""
    import diffusers.models.attention_dispatch  # noqa: F401

    module = _dispatcher()
    if module is None:
        raise RuntimeError("adze: this diffusers has no attention dispatcher that is known")
    names, registry = module.AttentionBackendName, module._AttentionBackendRegistry
    if NAME in names._value2member_map_:
        return names(NAME)
    native, member = names("native"), _member(names)
    options = {}
    if "supports_context_parallel" in inspect.signature(registry.register).parameters:
        options["supports_context_parallel"] = True  # such calls are handed on
    registry.register(member, **options)(_backend(registry, native))
    return member


# ---- Which processors ask it ----


class _Backend(Setting):
    """The backend of a processor."""

    def __init__(self, processor):
        super().__init__()
        self.processor = processor

    def set(self, wanted):
        own, current = self.processor.__dict__, self.processor._attention_backend
        if wanted and current is None:
            own["_attention_backend"] = register()
        elif not wanted and isinstance(current, str) and current == NAME:
            own.pop("_attention_backend", None)


_known = Known(_Backend)


def _of_a_module(module):
    """The device and the dtype of the first weight of a module, or None."""
    weight = next(module.parameters(), None)
    return None if weight is None else (weight.device, weight.dtype)


def _asks(processor):
    """Whether a processor asks the dispatcher, with a backend that nobody but a patch has chosen."""
    if getattr(type(processor), "_attention_backend", NAME) is not None:
        return False
    chosen = processor._attention_backend
    return chosen is None or (isinstance(chosen, str) and chosen == NAME and processor in _known)


def _describe(backends):
    return (
        f'{len(backends)} attention processors have the backend "{NAME}", for calls that were measured to be faster'
    )


def attention_backends(handle, plan, modules, over):
    """What a patch sets in processors."""
    if _dispatcher() is None:
        return []
    found = {}
    for _, module in modules:
        processor = getattr(module, "processor", None)
        if processor is None or id(processor) in found or not _asks(processor):
            continue
        of = _of_a_module(module)
        wanted = plan.numerics == "fast" and "attention" in plan.ops and module not in plan.excluded
        wanted = bool(wanted and of and faster_somewhere(*of))
        setting = _known.add(processor, handle, wanted, over)
        if setting is not None:
            found[id(processor)] = setting
    return [Settings(handle, list(found.values()), _describe)] if found else []


# ---- Processors that call torch's function ----


def functional(module, ctx):
    """Attention whose processor calls F.scaled_dot_product_attention: the same processor, with adze's function."""
    if ctx.match:
        return 'attention is torch\'s: numerics is "match"'
    cls, of = type(module.processor), _of_a_module(module)
    call = cls.__call__
    code = getattr(call, "__code__", None)
    if isinstance(module.processor, torch.nn.Module) or undecorated(call) is not call or code is None:
        return f"{cls.__name__} is not a plain processor"
    if "scaled_dot_product_attention" not in code.co_names or call.__globals__.get("F") is not F:
        return f"{cls.__name__} does not call F.scaled_dot_product_attention"
    if of is None or not faster_somewhere(*of):
        return "attention is torch's: it was not measured to be slower"
    own = shim(F, ctx.numerics, {"scaled_dot_product_attention": scaled_dot_product_attention})
    call = clone(call, shim(sys.modules[call.__module__], ctx.numerics, {"F": own}))
    original, names = ctx.original, frozenset(inspect.signature(call).parameters)

    def forward(self, hidden_states, encoder_hidden_states=None, attention_mask=None, **cross_attention_kwargs):
        processor, text, mask = self.processor, encoder_hidden_states, attention_mask
        odd = type(processor) is not cls or any(name not in names for name in cross_attention_kwargs)
        if odd or torch.compiler.is_compiling():
            return original(self, hidden_states, text, mask, **cross_attention_kwargs)
        return call(
            processor, self, hidden_states, encoder_hidden_states=text, attention_mask=mask, **cross_attention_kwargs
        )

    forward.adze_note = "where it was measured to be faster"
    return forward
