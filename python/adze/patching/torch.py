"""Rules for PyTorch's own modules."""

from ..operators import ops
from .frame import rule, usable
from .norm_act import Act, Norm, act_rule, norm_rule


def layer_norm(module, ctx):
    """torch's LayerNorm, and those that inherit its attributes."""
    if len(module.normalized_shape) != 1:
        return f"a norm over {len(module.normalized_shape)} dimensions"
    return Norm(type(module), "layer_norm", "eps", bias=True, shape="normalized_shape")


def _rms_norm(module, ctx):
    if len(module.normalized_shape) != 1:
        return f"a norm over {len(module.normalized_shape)} dimensions"
    return Norm(type(module), "rms_norm", "eps", shape="normalized_shape")


def grouped(child, x, act, rounding):
    """The output of a plain GroupNorm and its activation, or None where adze's op cannot take x."""
    weight, bias = child.weight, child.bias
    if x.dim() > 2 and x.stride(1) == 1 and x.stride(-1) != 1:
        last = x.movedim(1, -1)
        if usable(last, weight, bias):
            out = ops.group_norm(
                last, child.num_groups, weight, bias, eps=child.eps, act=act, channels_last=True, rounding=rounding
            )
            return out.movedim(-1, 1)
    elif x.dim() > 1 and usable(x, weight, bias):
        return ops.group_norm(x, child.num_groups, weight, bias, eps=child.eps, act=act, rounding=rounding)
    return None


def _group_norm(module, ctx):
    """It takes NCHW and channels-last tensors."""
    original = ctx.original

    def forward(self, input):
        out = grouped(self, input, None, 0)
        return original(self, input) if out is None else out

    return forward


def _gelu(module, ctx):
    approximate = module.approximate
    name = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}[approximate]
    return Act(type(module), name, chosen=lambda child: child.approximate == approximate)


def _silu(module, ctx):
    if module.inplace:
        return "works in place"
    return Act(type(module), "silu", chosen=lambda child: not child.inplace)


RULES = [
    norm_rule("layer_norm", layer_norm, forward="torch.nn:LayerNorm.forward"),
    norm_rule("rms_norm", _rms_norm, forward="torch.nn:RMSNorm.forward"),
    rule("group_norm", "norm", _group_norm, forward="torch.nn:GroupNorm.forward"),
    act_rule("gelu", _gelu, forward="torch.nn:GELU.forward"),
    act_rule("silu", _silu, forward="torch.nn:SiLU.forward"),
]
