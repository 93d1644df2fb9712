"""Attention "adze" of transformers: model.set_attn_implementation("adze").

It follows sdpa's rules for masks. A call that the op does not take (a gradient, dropout, a dtype or a device without
a kernel) does what sdpa does, or eager where sdpa has no softcap and no sinks. So does one token in a compiled graph,
as in patched modules (patching/frame.py), and float32 on a GPU."""

import functools
import inspect
import re
import sys

import torch
from transformers import PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..graphs import constant
from ..operators import ops
from ..operators.fake import needs_tangents
from . import in_torch
from .cache import Stored, lengths_decide, slots_seen
from .register import NAME, chosen

# Models that transformers does not run with sdpa only because of softcap, sinks or the like. They take its masks.
_AS_SDPA = ("flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "vaultgemma")


_with_sdpa = {}  # by class of configs; Dynamo would trace what functools.cache wraps


@torch.compiler.assume_constant_result
def _has_sdpa(cls):
    """Whether transformers runs the models of a class of configs with sdpa."""
    if cls not in _with_sdpa:
        home = sys.modules.get(cls.__module__.replace("configuration_", "modeling_"))
        models = [found for found in vars(home).values() if isinstance(found, type)] if home is not None else []
        models = [found for found in models if issubclass(found, PreTrainedModel) and found.config_class is cls]
        _with_sdpa[cls] = all(found._supports_sdpa for found in models)
    return _with_sdpa[cls]


def takes_sdpas_masks(config):
    """Whether sdpa's masks are those of a model. Other models append columns to a mask, add it to scores themselves,
    or do not say in their attention that it is causal: they get eager's, which are there in each call."""
    return _has_sdpa(type(config)) or config.model_type in _AS_SDPA


# What some models leave to the attention that their config names, where it is neither eager nor sdpa: which keys are
# hidden, or sinks of each query.
_LEFT = ("indices", "block_indices", "sinks")
_LEAVES = re.compile(rf"attention_interface\((?:[^()]|\([^()]*\))*?\b({'|'.join(_LEFT)})=")


@functools.cache
def _leaves_something(cls):
    home = sys.modules.get(cls.__module__.replace("configuration_", "modeling_"))
    try:
        return home is not None and _LEAVES.search(inspect.getsource(home)) is not None
    except OSError:  # a module without a file
        return False


def attends_by_name(config):
    """Whether the layers of a model are known to run the attention that its config names, and to leave nothing to it
    that "adze" has not."""
    known = takes_sdpas_masks(config) or config.model_type == "deepseek_v4"
    return known and not _leaves_something(type(config))


def _refuse_what_is_left(module, kwargs):
    left = next((name for name in _LEFT if kwargs.get(name) is not None), None)
    if left is not None:
        raise ValueError(
            f'attention "adze" has no {left}, which a {type(module).__name__} leaves to it: call '
            'model.set_attn_implementation("eager")'
        )


def make_mask(*args, **kwargs):
    """sdpa's mask; while a step runs whose cache has the length of each sequence, that of the padding or none."""
    if not lengths_decide():
        # While another thread is in adze.generate, the layers of this call may have the model's own attention.
        config = kwargs.get("config")
        theirs = NAME if config is None or torch.compiler.is_compiling() else chosen(config)
        if theirs != NAME:
            return masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[theirs](*args, **kwargs)
        if config is not None and not takes_sdpas_masks(config):
            return masking_utils.eager_mask(*args, **kwargs)
        if getattr(config, "num_kv_shared_layers", 0):  # Gemma 4 may run some layers for the last queries alone
            kwargs["allow_is_causal_skip"] = False
        return masking_utils.sdpa_mask(*args, **kwargs)
    if not kwargs.get("allow_is_causal_skip", True):
        raise ValueError("adze.generate: this model masks more than later tokens; use its own generate()")
    return slots_seen()


def _plain(x):
    return type(x) is torch.Tensor or type(x) is torch.nn.Parameter


def _takes(query, key, value, mask, sinks):
    """Whether the op has a kernel for these tensors, and no gradient is needed. key and value may be None: a cache's
    own."""
    device, dtype = query.device, query.dtype
    if dtype not in ops.DTYPES or query.shape[-1] > 1024 or not in_torch.has_kernel("attention", device):
        return False
    if torch.compiler.is_compiling() and query.shape[2] == 1:
        return False
    given = [x for x in (query, key, value, mask, sinks) if x is not None]
    if not all(_plain(x) and x.device == device for x in given):
        return False
    if needs_tangents() or (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        return False
    if any(x is not None and x.dtype != dtype for x in (key, value)):
        return False
    if sinks is not None and sinks.dtype not in (dtype, torch.float32):
        return False
    if mask is not None and (mask.dim() != 4 or mask.dtype not in (torch.bool, dtype, torch.float32)):
        return False
    return not torch.is_autocast_enabled(device.type)


def sdpa_is_faster(device, dtype, softcap, sinks):
    """Whether a call that the op takes is sdpa's: in float32 on a GPU, for which the op has no tensor cores. With
    softcap or sinks torch would store all scores. For an adze.Cache, whose lengths are on the device, it would need a
    mask; those calls are the op's."""
    return device.type == "cuda" and dtype == torch.float32 and not softcap and sinks is None


def _wants_weights(kwargs):
    """Whether the caller asks for the weights of the keys, which only torch computes apart. They have no bias of T5,
    and sdpa says itself that it has none."""
    return (
        bool(kwargs.get("output_attentions")) and kwargs.get("position_bias") is None and kwargs.get("cache") is None
    )


def _rows(x):
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _attend(query, key, value, mask, scale, op=ops.attention, **options):
    """The op's result as [batch, m, heads, dv]."""
    query, key, value, mask = map(_rows, (query, key, value, mask))
    if torch.compiler.is_compiling():
        return op(query, key, value, mask, scale=scale, **options).transpose(1, 2).contiguous()
    batch, heads, m, _ = query.shape
    out = query.new_empty(batch, m, heads, value.shape[-1])
    op(query, key, value, mask, scale=scale, out=out.transpose(1, 2), **options)
    return out


def _attend_in_torch(module, query, key, value, mask, softcap, sinks, dropout, scaling, causal, kwargs):
    """(the result, the weights where output_attentions asks for them)"""
    wanted = _wants_weights(kwargs)
    if not softcap and sinks is None and not wanted and not needs_tangents():  # sdpa has no tangents
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=causal, **kwargs
        )[0], None
    if causal and mask is None:
        m = query.shape[2]
        mask = torch.ones(m, m, dtype=torch.bool, device=query.device).tril()[None, None]
        key, value = key[:, :, :m], value[:, :, :m]
    options = scaling, softcap, sinks, dropout, module.training
    out, weights = in_torch.attention(query, key, value, mask, *options)
    return out.transpose(1, 2).contiguous(), weights if wanted else None


def _attend_stored(module, query, layer, mask, softcap, sinks, dropout, scaling, kwargs):
    """Keys and values that an adze.Cache has. A mask has the window, and says which keys are later, but for that of
    Cache.at()."""
    m, n = query.shape[2], layer.width
    if mask is not None and mask.shape[-1] < n:  # a model's own, which ends with the last token: a page may not
        hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        mask = torch.nn.functional.pad(mask, (0, n - mask.shape[-1]), value=hidden)
    window = layer.window if mask is None or lengths_decide() else 0
    own = dropout == 0 and not _wants_weights(kwargs) and query.dtype == layer.dtype
    if own and _takes(query, None, None, mask, sinks):
        options = {"causal": mask is None and m > 1, "window": window, "softcap": softcap or 0.0, "sinks": sinks}
        key, value, more = layer.operands()
        op = constant.attention if lengths_decide() else ops.attention
        return _attend(query, key, value, mask, scaling, op=op, **options, **more), None
    key, value = layer.read()
    found = in_torch.seen(layer.after, m, n, window)
    if mask is None:
        mask = found
    elif mask.dtype == torch.bool:
        mask = mask & found
    weights = {"output_attentions": True} if _wants_weights(kwargs) else {}
    options = softcap, sinks, dropout, scaling, False, weights
    out, found = _attend_in_torch(module, query, key, value, mask, *options)
    if found is not None and not lengths_decide():
        found = found[..., : layer.count]  # a page has room for more
    return out, found


def attention_forward(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, softcap=None, s_aux=None,
    **kwargs,
):  # fmt: skip
    """What transformers calls: ([batch, m, heads, dv], weights or None)."""
    _refuse_what_is_left(module, kwargs)
    if isinstance(key, Stored) != isinstance(value, Stored):  # the model has made one of the two anew
        key, value = (x.clone() if isinstance(x, Stored) else x for x in (key, value))
    if isinstance(key, Stored):
        return _attend_stored(module, query, key.layer, attention_mask, softcap, s_aux, dropout, scaling, kwargs)
    m, n = query.shape[2], key.shape[2]
    if attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[-1] == 1 < n:
        attention_mask = attention_mask.expand(-1, -1, m, n)  # RecurrentGemma's; sdpa and eager broadcast
    own = dropout == 0 and kwargs.get("position_bias") is None and kwargs.get("cache") is None
    own = own and not _wants_weights(kwargs) and not sdpa_is_faster(query.device, query.dtype, softcap, s_aux)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not own or not _takes(query, key, value, attention_mask, s_aux):
        causal = bool(causal) and m > 1 and attention_mask is None
        options = softcap, s_aux, dropout, scaling, causal, kwargs
        return _attend_in_torch(module, query, key, value, attention_mask, *options)
    if m > 1 and attention_mask is None and causal:
        if n > m:  # the prompt in a static cache: what follows it is empty
            key, value = key[:, :, :m], value[:, :, :m]
    else:
        causal = False
    options = {"causal": bool(causal), "softcap": softcap or 0.0, "sinks": s_aux}
    return _attend(query, key, value, attention_mask, scaling, **options), None
