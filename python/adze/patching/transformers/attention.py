"""With numerics="fast": attention "adze" for a model of transformers that generates text, by its config."""

import sys

from ..settings import Known, Setting, Settings

NAME = "adze"
_REPLACED = ("sdpa", "eager")  # another attention was chosen on purpose


class _Attention(Setting):
    """The attention that a model's config names."""

    def __init__(self, config):
        super().__init__()
        self.config, self.before = config, None

    def set(self, wanted):
        current = self.config._attn_implementation
        if wanted and current in _REPLACED:
            self.before, self.config._attn_implementation_internal = current, NAME
        elif not wanted and current == NAME and self.before is not None:
            self.config._attn_implementation_internal, self.before = self.before, None


_known = Known(_Attention)


def decoder_config(module):
    """The config of a model that generates text by itself; None for others."""
    models = sys.modules.get("transformers.modeling_utils")
    if models is None or not isinstance(module, models.PreTrainedModel) or not module.can_generate():
        return None
    return None if module.config.is_encoder_decoder else module.config.get_text_config(decoder=True)


def has_kernel(module):
    from ...generation import in_torch
    from ...operators.ops import DTYPES

    weight = next(module.parameters(), None)
    return weight is not None and weight.dtype in DTYPES and in_torch.has_kernel("attention", weight.device)


def _can_be_adzes(root, config):
    from ...generation.attention import attends_by_name

    current = config._attn_implementation
    if current not in _REPLACED and not (current == NAME and config in _known):
        return False
    if not type(root)._can_set_attn_implementation() or not attends_by_name(config):
        return False
    return not config.output_attentions and has_kernel(root)


def attentions(handle, plan, modules, over):
    """What a patch sets in the configs of its models."""
    wanted, found, classes = plan.numerics == "fast" and "attention" in plan.ops, [], []
    for root in handle.roots.values():
        config = decoder_config(root)
        if config is None:
            continue
        setting = _known.add(config, handle, wanted and _can_be_adzes(root, config), over)
        if setting is not None:
            found.append(setting)
            classes.append(type(root).__name__)

    def describe(mine):
        return "; ".join(
            f'attention "{NAME}" in place of "{setting.before}" ({cls})'
            for setting, cls in zip(found, classes, strict=True)
            if setting in mine and setting.before
        )

    return [Settings(handle, found, describe)] if found else []
