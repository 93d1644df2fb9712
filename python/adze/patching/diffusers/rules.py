"""Rules for diffusers: which source gets which replacement. Sources have their names from fingerprints.json."""

from ..frame import rule
from ..norm_act import norm_rule
from ..torch import layer_norm
from . import attention, backend, blocks, norms


def _leave(why):
    """For modules that have the name of a target, but nothing to replace."""
    return lambda module, ctx: why


_HUNYUAN, _QWEN = "hunyuan_video:HunyuanVideo", "qwenimage:QwenImageTransformerBlock"

RULES = [
    # models/normalization.py
    norm_rule("rms_norm", norms.rms_norm, forward="normalization:RMSNorm.forward"),
    norm_rule("float layer_norm", layer_norm, forward="normalization:FP32LayerNorm.forward"),
    rule("layer_norm + modulation", "fuse", norms.ada_zero, forward="normalization:AdaLayerNormZero.forward"),
    rule(
        "layer_norm + modulation",
        "fuse",
        norms.ada_zero_single,
        forward="normalization:AdaLayerNormZeroSingle.forward",
    ),
    rule(
        "layer_norm + 2 modulations",
        "fuse",
        norms.ada_zero_twice,
        forward="normalization:SD35AdaLayerNormZeroX.forward",
    ),
    rule("norm + modulation", "fuse", norms.ada_continuous, forward="normalization:AdaLayerNormContinuous.forward"),
    rule(
        "none",
        "fuse",
        _leave("it computes modulations, and has no norm"),
        forward=f"normalization:AdaLayerNormSingle.forward {_HUNYUAN}AdaNorm.forward",
    ),
    # models/activations.py, attention.py
    rule("gelu", "act", norms.gelu, forward="activations:GELU.forward", **{"self.gelu": "activations:GELU.gelu"}),
    rule(
        "gelu_mul", "act", norms.geglu, forward="activations:GEGLU.forward", **{"self.gelu": "activations:GEGLU.gelu"}
    ),
    rule("silu_mul", "act", norms.swiglu, forward="activations:SwiGLU.forward"),
    rule("quick_gelu", "act", norms.approximate_gelu, forward="activations:ApproximateGELU.forward"),
    rule("activation", "act", norms.linear_activation, forward="activations:LinearActivation.forward"),
    rule("none", "act", _leave("its activation has a rule of its own"), forward="attention:FeedForward.forward"),
    rule("gate + add + norm + modulation", "fuse", blocks.joint, forward="attention:JointTransformerBlock.forward"),
    rule("gate + add + norm + modulation", "fuse", blocks.basic, forward="attention:BasicTransformerBlock.forward"),
    # models/transformers
    rule("gate + add + norm + modulation", "fuse", blocks.ltx, forward="ltx:LTXVideoTransformerBlock.forward"),
    rule("gate + add + norm + modulation", "fuse", blocks.flux, forward="flux:FluxTransformerBlock.forward"),
    rule(
        "gelu into the concatenation", "fuse", blocks.flux_single, forward="flux:FluxSingleTransformerBlock.forward"
    ),
    rule("gate + add + norm + modulation", "fuse", blocks.wan, forward="wan:WanTransformerBlock.forward"),
    rule(
        "gate + add + norm + modulation", "fuse", blocks.hunyuan_video, forward=f"{_HUNYUAN}TransformerBlock.forward"
    ),
    rule(
        "gate + add + norm + modulation",
        "fuse",
        blocks.hunyuan_video_token_replace,
        forward=f"{_HUNYUAN}TokenReplaceTransformerBlock.forward",
    ),
    rule(
        "gelu into the concatenation",
        "fuse",
        blocks.hunyuan_video_single,
        forward=f"{_HUNYUAN}SingleTransformerBlock.forward",
    ),
    rule(
        "gelu into the concatenation",
        "fuse",
        blocks.hunyuan_video_single_token_replace,
        forward=f"{_HUNYUAN}TokenReplaceSingleTransformerBlock.forward",
    ),
    rule(
        "gate + add + norm",
        "fuse",
        blocks.hunyuan_video_refiner,
        forward=f"{_HUNYUAN}IndividualTokenRefinerBlock.forward",
    ),
    rule(
        "layer_norm + modulation",
        "fuse",
        norms.ada_zero_token_replace,
        forward=f"{_HUNYUAN}TokenReplaceAdaLayerNormZero.forward",
    ),
    rule(
        "layer_norm + modulation",
        "fuse",
        norms.ada_zero_single_token_replace,
        forward=f"{_HUNYUAN}TokenReplaceAdaLayerNormZeroSingle.forward",
    ),
    rule(
        "gate + add + norm + modulation",
        "fuse",
        blocks.qwen_image,
        forward=f"{_QWEN}.forward@0.36.0",
        _modulate=f"{_QWEN}._modulate@0.36.0",
    ),
    rule(
        "gate + add + norm + modulation",
        "fuse",
        blocks.qwen_image,
        forward=f"{_QWEN}.forward@0.42.1",
        _modulate=f"{_QWEN}._modulate@0.42.1",
    ),
    rule(
        "tables of rope, kept",
        "rope",
        attention.ltx_tables,
        forward="ltx:LTXVideoRotaryPosEmbed.forward",
        _prepare_video_coords="ltx:LTXVideoRotaryPosEmbed._prepare_video_coords",
    ),
    rule("qk_norm_rope", "rope", attention.ltx, forward="ltx:LTXAttention.forward"),
    rule("qk_norm_rope", "rope", attention.flux, forward="flux:FluxAttention.forward"),
    rule("qk_norm_rope", "rope", attention.wan, forward="wan:WanAttention.forward"),
    rule("qk_norm_rope", "rope", attention.shared, forward="attention_processor:Attention.forward"),
    rule("attention", "attention", backend.functional, forward="attention_processor:Attention.forward"),
    # models/resnet.py
    rule("group_norm + silu", "fuse", blocks.resnet, forward="resnet:ResnetBlock2D.forward"),
]

settings = backend.attention_backends
