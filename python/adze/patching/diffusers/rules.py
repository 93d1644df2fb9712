"""Rules for diffusers: which source gets which replacement. Sources have their names from fingerprints.json."""

from ..frame import Rule
from ..known_sources import hashes
from ..torch import layer_norm, norm_build
from . import attention, blocks, norms


def _rule(name, op, build, forward, facts=None, **methods):
    prints = {f"self.{method}": hashes(names) for method, names in methods.items()}
    return Rule(name, op, {"forward": hashes(forward), **prints}, build, facts)


def _norm(name, facts, forward):
    return _rule(name, "norm", norm_build(facts), forward, facts)


def _leave(why):
    """For modules that are named like a target, and are none."""
    return lambda module, ctx: why


_HUNYUAN, _QWEN = "hunyuan_video:HunyuanVideo", "qwenimage:QwenImageTransformerBlock"

RULES = [
    # models/normalization.py
    _norm("rms_norm", norms.rms_norm, "normalization:RMSNorm.forward"),
    _norm("float layer_norm", layer_norm, "normalization:FP32LayerNorm.forward"),
    _rule("layer_norm + modulation", "fuse", norms.ada_zero, "normalization:AdaLayerNormZero.forward"),
    _rule("layer_norm + modulation", "fuse", norms.ada_zero_single, "normalization:AdaLayerNormZeroSingle.forward"),
    _rule("layer_norm + 2 modulations", "fuse", norms.ada_zero_twice, "normalization:SD35AdaLayerNormZeroX.forward"),
    _rule("norm + modulation", "fuse", norms.ada_continuous, "normalization:AdaLayerNormContinuous.forward"),
    _rule(
        "none",
        "fuse",
        _leave("it makes modulations and norms nothing"),
        f"normalization:AdaLayerNormSingle.forward {_HUNYUAN}AdaNorm.forward",
    ),
    _rule("group_norm", "norm", norms.group_norm, "torch.nn:GroupNorm.forward"),
    # models/activations.py, attention.py
    _rule("gelu", "act", norms.gelu, "activations:GELU.forward", gelu="activations:GELU.gelu"),
    _rule("gelu_mul", "act", norms.geglu, "activations:GEGLU.forward", gelu="activations:GEGLU.gelu"),
    _rule("silu_mul", "act", norms.swiglu, "activations:SwiGLU.forward"),
    _rule("quick_gelu", "act", norms.approximate_gelu, "activations:ApproximateGELU.forward"),
    _rule("activation", "act", norms.linear_activation, "activations:LinearActivation.forward"),
    _rule("none", "act", _leave("its activation has a rule of its own"), "attention:FeedForward.forward"),
    _rule("gate + add + norm + modulation", "fuse", blocks.joint, "attention:JointTransformerBlock.forward"),
    _rule("gate + add + norm + modulation", "fuse", blocks.basic, "attention:BasicTransformerBlock.forward"),
    # models/transformers
    _rule("gate + add + norm + modulation", "fuse", blocks.ltx, "ltx:LTXVideoTransformerBlock.forward"),
    _rule("gate + add + norm + modulation", "fuse", blocks.flux, "flux:FluxTransformerBlock.forward"),
    _rule("gelu into the concatenation", "fuse", blocks.flux_single, "flux:FluxSingleTransformerBlock.forward"),
    _rule("gate + add + norm + modulation", "fuse", blocks.wan, "wan:WanTransformerBlock.forward"),
    _rule("gate + add + norm + modulation", "fuse", blocks.hunyuan_video, f"{_HUNYUAN}TransformerBlock.forward"),
    _rule(
        "gate + add + norm + modulation",
        "fuse",
        blocks.hunyuan_video_token_replace,
        f"{_HUNYUAN}TokenReplaceTransformerBlock.forward",
    ),
    _rule(
        "gelu into the concatenation",
        "fuse",
        blocks.hunyuan_video_single,
        f"{_HUNYUAN}SingleTransformerBlock.forward",
    ),
    _rule(
        "gelu into the concatenation",
        "fuse",
        blocks.hunyuan_video_single_token_replace,
        f"{_HUNYUAN}TokenReplaceSingleTransformerBlock.forward",
    ),
    _rule(
        "gate + add + norm", "fuse", blocks.hunyuan_video_refiner, f"{_HUNYUAN}IndividualTokenRefinerBlock.forward"
    ),
    _rule(
        "layer_norm + modulation",
        "fuse",
        norms.ada_zero_token_replace,
        f"{_HUNYUAN}TokenReplaceAdaLayerNormZero.forward",
    ),
    _rule(
        "layer_norm + modulation",
        "fuse",
        norms.ada_zero_single_token_replace,
        f"{_HUNYUAN}TokenReplaceAdaLayerNormZeroSingle.forward",
    ),
    _rule(
        "gate + add + norm + modulation",
        "fuse",
        blocks.qwen_image,
        f"{_QWEN}.forward@0.36.0",
        _modulate=f"{_QWEN}._modulate@0.36.0",
    ),
    _rule(
        "gate + add + norm + modulation",
        "fuse",
        blocks.qwen_image,
        f"{_QWEN}.forward@0.42.1",
        _modulate=f"{_QWEN}._modulate@0.42.1",
    ),
    _rule(
        "tables of rope, kept",
        "rope",
        attention.ltx_tables,
        "ltx:LTXVideoRotaryPosEmbed.forward",
        _prepare_video_coords="ltx:LTXVideoRotaryPosEmbed._prepare_video_coords",
    ),
    _rule("qk_norm_rope", "rope", attention.ltx, "ltx:LTXAttention.forward"),
    _rule("qk_norm_rope", "rope", attention.flux, "flux:FluxAttention.forward"),
    _rule("qk_norm_rope", "rope", attention.wan, "wan:WanAttention.forward"),
    _rule("qk_norm_rope", "rope", attention.shared, "attention_processor:Attention.forward"),
    # models/resnet.py
    _rule("group_norm + silu", "fuse", blocks.resnet, "resnet:ResnetBlock2D.forward"),
]
