"""Rules for diffusers: which source gets which replacement. Fingerprints are those of diffusers 0.36 to 0.42."""

from . import diffusers_attention as attention
from . import diffusers_blocks as blocks
from . import diffusers_norms as norms
from .patch_torch import layer_norm, norm_build
from .patching import Rule


def _rule(name, op, build, forward, facts=None, **methods):
    prints = {"forward": frozenset(forward.split())}
    prints |= {f"self.{method}": frozenset(known.split()) for method, known in methods.items()}
    return Rule(name, op, prints, build, facts)


def _norm(name, facts, forward):
    return _rule(name, "norm", norm_build(facts), forward, facts)


def _leave(why):
    """For modules that are named like a target, and are none."""
    return lambda module, ctx: why


RULES = [
    # models/normalization.py
    _norm("rms_norm", norms.rms_norm, "aad05841c2ab 3e51aa1f94fc"),
    _norm("float layer_norm", layer_norm, "d5f1fa13f44c"),
    _rule("layer_norm + modulation", "fuse", norms.ada_zero, "663941932131"),
    _rule("layer_norm + modulation", "fuse", norms.ada_zero_single, "90dc97e7882e"),
    _rule("layer_norm + 2 modulations", "fuse", norms.ada_zero_twice, "3ee8a4dd33cf"),
    _rule("norm + modulation", "fuse", norms.ada_continuous, "7c5fd61cda96"),
    _rule("none", "fuse", _leave("it makes modulations and norms nothing"), "1ca47b39752f 56151ae8d971"),
    _rule("group_norm", "norm", norms.group_norm, "46a6ee5d3e7f"),
    # models/activations.py, attention.py
    _rule("gelu", "act", norms.gelu, "3c23dcb0ac5d", gelu="2b14949a9dfa"),
    _rule("gelu_mul", "act", norms.geglu, "9c623d546aff", gelu="fc3bfaf06e59"),
    _rule("silu_mul", "act", norms.swiglu, "1f74c908efae"),
    _rule("quick_gelu", "act", norms.approximate_gelu, "a09c3eba665f"),
    _rule("activation", "act", norms.linear_activation, "d9cd9c66d467"),
    _rule("none", "act", _leave("its activation has a rule of its own"), "e9a45d99e090"),
    _rule("gate + add + norm + modulation", "fuse", blocks.joint, "d1db7c5549cd"),
    _rule("gate + add + norm + modulation", "fuse", blocks.basic, "a7191c2caf6e"),
    # models/transformers
    _rule("gate + add + norm + modulation", "fuse", blocks.ltx, "ede19a48c314"),
    _rule("gate + add + norm + modulation", "fuse", blocks.flux, "bcd097cc0650"),
    _rule("gelu into the concatenation", "fuse", blocks.flux_single, "29dc04239f4d"),
    _rule("gate + add + norm + modulation", "fuse", blocks.wan, "63342888e3b8"),
    _rule("gate + add + norm + modulation", "fuse", blocks.hunyuan_video, "fc0b4cf5409a"),
    _rule("gate + add + norm + modulation", "fuse", blocks.hunyuan_video_token_replace, "678bba4ecc26"),
    _rule("gelu into the concatenation", "fuse", blocks.hunyuan_video_single, "382199f90d18"),
    _rule("gelu into the concatenation", "fuse", blocks.hunyuan_video_single_token_replace, "c73c81b29d29"),
    _rule("gate + add + norm", "fuse", blocks.hunyuan_video_refiner, "14e6767df62f"),
    _rule("layer_norm + modulation", "fuse", norms.ada_zero_token_replace, "7442f08847c0"),
    _rule("layer_norm + modulation", "fuse", norms.ada_zero_single_token_replace, "62c83148c2dc"),
    _rule("gate + add + norm + modulation", "fuse", blocks.qwen_image, "4d4c7b039075", _modulate="ae01bdd9bd38"),
    _rule("gate + add + norm + modulation", "fuse", blocks.qwen_image, "46fd14d2dae9", _modulate="e73e28bcd744"),
    _rule("tables of rope, kept", "rope", attention.ltx_tables, "fef0973b7be1", _prepare_video_coords="c3cab3636c74"),
    _rule("qk_norm_rope", "rope", attention.ltx, "bbeb4fd2c38a"),
    _rule("qk_norm_rope", "rope", attention.flux, "720ec9c74e8d"),
    _rule("qk_norm_rope", "rope", attention.wan, "11b49b8e153e"),
    _rule("qk_norm_rope", "rope", attention.shared, "a3048834e28b"),
    # models/resnet.py
    _rule("group_norm + silu", "fuse", blocks.resnet, "25e169b1fec8 fd5fc7bd92ea"),
]
