"""With numerics="fast": attention "adze" for a model of transformers that generates text, by its config."""

import dataclasses
import sys
import weakref
from typing import Any

NAME = "adze"
_REPLACED = ("sdpa", "eager")  # another attention was chosen on purpose
_handles = weakref.WeakKeyDictionary()  # of a model, those that have set its attention


@dataclasses.dataclass(frozen=True)
class Choice:
    """The attention of one model, before a patch and with it."""

    cls: str
    config: Any
    before: str
    now: str

    def settle(self, enabled):
        other, name = (self.before, self.now) if enabled else (self.now, self.before)
        if self.config._attn_implementation == other:  # else somebody has chosen another one since
            self.config._attn_implementation_internal = name

    def __str__(self):
        return f'attention "{self.now}" in place of "{self.before}" ({self.cls})'


def _decoder(module):
    """The config of a model that generates text by itself and asks for its attention by name; None for others."""
    models = sys.modules.get("transformers.modeling_utils")
    if models is None or not isinstance(module, models.PreTrainedModel) or not module.can_generate():
        return None
    if module.config.is_encoder_decoder or not type(module)._can_set_attn_implementation():
        return None
    return module.config.get_text_config(decoder=True)


def _has_kernel(module):
    from ...generation.in_torch import has_kernel
    from ...operators.ops import DTYPES

    weight = next(module.parameters(), None)
    return weight is not None and weight.dtype in DTYPES and has_kernel("attention", weight.device)


def choose(handle, wanted, over):
    """Sets the attention of a handle's models, or what they had before where it is not wanted. Like its forwards, the
    handle replaces those of earlier ones, or is over them until it is removed."""
    for root in handle.roots.values():
        earlier = _handles.setdefault(root, [])
        if not over:
            for other in list(reversed(earlier)):
                other.leave_attention()
            earlier = _handles[root]
        config = _decoder(root) if wanted or earlier else None
        if config is None:
            continue
        current = config._attn_implementation
        under = [choice for other in earlier for choice in other.attention if choice.now == current]
        now = under[0].before if under else current
        if wanted and now in _REPLACED and not config.output_attentions and _has_kernel(root):
            now = NAME
        if now != current:
            handle.attention.append(Choice(type(root).__name__, config, current, now))
            handle.attention[-1].settle(True)
            earlier.append(handle)


def forget(handle):
    for root in handle.roots.values():
        _handles[root] = [other for other in _handles.get(root, ()) if other is not handle]
