"""What the ops compute, in torch, by the names of adze's fields: as users write it (`eager`), as torch.compile gets
it (`plain`: in float, rounded once), as Liger has it, and in double with a bound of float's error (`definition`).
"""

import torch
import torch.nn.functional as F

UNIT = 2.0**-24  # half an ulp of float32, the largest relative error of one operation
ACTS = {
    1: F.silu,
    2: F.gelu,
    3: lambda x: F.gelu(x, approximate="tanh"),
}


def upper(tensor):
    return tensor if tensor is None or tensor.dtype == torch.float64 else tensor.float()


# ---- As users write it, and as torch.compile gets it ----


def modulated(y, scale, shift):
    return y if scale is None else y * (1 + scale) + shift


def norm(function, in_float):
    def eager(x, eps, residual=None, weight=None, bias=None, scale=None, shift=None):
        h = x if residual is None else residual + x
        y = modulated(function(h, weight, bias, eps), scale, shift).to(x.dtype)
        return y if residual is None else (y, h)

    def plain(x, eps, residual=None, weight=None, bias=None, scale=None, shift=None):
        h = x if residual is None else residual + x
        y = in_float(upper(h), upper(weight), upper(bias), eps)
        y = modulated(y, upper(scale), upper(shift)).to(x.dtype)
        return y if residual is None else (y, h)

    return eager, plain


def rms_norm(h, weight, bias, eps):
    return F.rms_norm(h, h.shape[-1:], weight, eps)


def rms_norm_formula(h, weight, bias, eps):
    """For torch.compile, which might otherwise keep torch's own function as a call."""
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def layer_norm(h, weight, bias, eps):
    return F.layer_norm(h, h.shape[-1:], weight, bias, eps)


def group_norm(x, weight, bias, eps, groups, channels_last, act):
    """As modules have it: x is viewed as [batch, channels, ...], without a copy."""
    y = F.group_norm(x.movedim(-1, 1) if channels_last else x, groups, weight, bias, eps)
    y = ACTS[act](y) if act else y
    return y.movedim(1, -1) if channels_last else y


def group_norm_plain(x, weight, bias, **numbers):
    return group_norm(upper(x), upper(weight), upper(bias), **numbers).to(x.dtype)


def softmax(x, mask=None, scale=1.0):
    y = x if scale == 1.0 else x * scale
    return F.softmax(y if mask is None else y + mask, -1).to(x.dtype)


def softmax_plain(x, mask=None, scale=1.0):
    return softmax(upper(x), upper(mask), scale).to(x.dtype)


def activation(x, act):
    return ACTS[act](x)


def glu(x, act, value=None, value_first=0):
    if value is None:
        x, value = x.chunk(2, -1)[:: -1 if value_first else 1]
    return ACTS[act](x) * value


def glu_plain(x, act, value=None, value_first=0):
    return glu(upper(x), act, upper(value), value_first).to(x.dtype)


def gated_add(x, residual, gate):
    return (residual + gate * x).to(x.dtype)


def gated_add_plain(x, residual, gate):
    return gated_add(upper(x), upper(residual), upper(gate)).to(x.dtype)


def rotate(x, pairs):
    if pairs:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def over_heads(table, rotary_dim, pairs, heads_first):
    """A table of [seq, n] or [batch, seq, n] as q needs it: a column for every element, a dimension for the heads."""
    if table.shape[-1] != rotary_dim:
        table = table.repeat_interleave(2, -1) if pairs else torch.cat((table, table), -1)
    return table.unsqueeze(-3 if heads_first else -2)


def rotated(x, cos, sin, pairs, rotary_dim):
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    turned = turned * cos + rotate(turned, pairs) * sin
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest.to(turned.dtype)), -1)


def rope(q, cos, sin, pairs, rotary_dim, heads_first, k=None):
    rotary_dim = rotary_dim or q.shape[-1]
    cos, sin = (over_heads(table, rotary_dim, pairs, heads_first) for table in (cos, sin))
    found = [rotated(x, cos, sin, pairs, rotary_dim).to(x.dtype) for x in (q, k) if x is not None]
    return found[0] if k is None else tuple(found)


def rope_plain(q, cos, sin, k=None, **numbers):
    found = rope(upper(q), upper(cos), upper(sin), k=upper(k), **numbers)
    return found.to(q.dtype) if k is None else tuple(x.to(q.dtype) for x in found)


def heads_norm(x, weight, eps, across_heads, heads_first, function):
    if not across_heads:
        return function(x, weight, None, eps)
    x = x.transpose(1, 2) if heads_first else x
    x = function(x.flatten(2), weight, None, eps).view(x.shape)
    return x.transpose(1, 2) if heads_first else x


def qk_norm_rope(q, q_weight, cos, sin, eps, across_heads, pairs, rotary_dim, heads_first, k=None, k_weight=None,
                 function=rms_norm):  # fmt: skip
    q = heads_norm(q, q_weight, eps, across_heads, heads_first, function)
    k = None if k is None else heads_norm(k, k_weight, eps, across_heads, heads_first, function)
    return rope(q, cos, sin, pairs, rotary_dim, heads_first, k)


def qk_norm_rope_plain(q, q_weight, cos, sin, k=None, k_weight=None, **numbers):
    wide = (upper(t) for t in (q, q_weight, cos, sin))
    found = qk_norm_rope(*wide, k=upper(k), k_weight=upper(k_weight), function=rms_norm_formula, **numbers)
    return found.to(q.dtype) if k is None else tuple(x.to(q.dtype) for x in found)


EAGER, PLAIN = {}, {}
EAGER["rms_norm"], PLAIN["rms_norm"] = norm(rms_norm, rms_norm_formula)
EAGER["layer_norm"], PLAIN["layer_norm"] = norm(layer_norm, layer_norm)
EAGER["group_norm"], PLAIN["group_norm"] = group_norm, group_norm_plain
EAGER["softmax"], PLAIN["softmax"] = softmax, softmax_plain
EAGER["activation"], PLAIN["activation"] = activation, activation
EAGER["glu"], PLAIN["glu"] = glu, glu_plain
EAGER["gated_add"], PLAIN["gated_add"] = gated_add, gated_add_plain
EAGER["rope"], PLAIN["rope"] = rope, rope_plain
EAGER["qk_norm_rope"], PLAIN["qk_norm_rope"] = qk_norm_rope, qk_norm_rope_plain


# ---- Liger: the calls that it has ----


def liger(op, fields):
    """A function of the same fields, or None where Liger is not installed or has no such function."""
    try:
        import liger_kernel.ops as _  # noqa: F401
    except ImportError:
        return None
    given = set(fields)
    if op == "rms_norm" and given == {"x", "weight", "eps"}:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return lambda x, weight, eps: LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)
    if op == "rms_norm" and given == {"x", "residual", "weight", "eps"}:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        return lambda x, residual, weight, eps: LigerFusedAddRMSNormFunction.apply(
            x, residual, weight, eps, 0.0, "llama", False
        )
    if op == "layer_norm" and given == {"x", "weight", "bias", "eps"}:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return lambda x, weight, bias, eps: LigerLayerNormFunction.apply(x, weight, bias, eps)
    if op == "softmax" and given == {"x"}:
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        return lambda x: LigerSoftmaxFunction.apply(x)
    if op == "glu" and given == {"x", "value", "act"} and fields["act"] != 2:
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        chosen = LigerSiLUMulFunction if fields["act"] == 1 else LigerGELUMulFunction
        return lambda x, value, act: chosen.apply(x, value)
    return None


# ---- In double, with a bound ----


def depth(n):
    """The longest chain of additions in a sum of n terms: kernels have 32 lanes or more, and then a tree."""
    return n / 32 + 12


def normalised(h, centred, eps, dims, deep):
    """(h - mean) / deviation, and a bound of its error in float."""
    mean = h.mean(dims, keepdim=True) if centred else torch.zeros((), dtype=h.dtype, device=h.device)
    mean_off = UNIT * deep * h.abs().mean(dims, keepdim=True) if centred else mean
    d = h - mean
    scale = (d.square().mean(dims, keepdim=True) + eps).rsqrt()
    # The sum of squares has the error of its chain of additions, and that of the means of its parts.
    spread = UNIT * (3 * deep + 8) + (2 * mean_off * d.abs().mean(dims, keepdim=True) + mean_off**2) * scale**2
    n = d * scale
    return n, n.abs() * spread + mean_off * scale


def defined_norm(centred):
    def definition(got, x, eps, residual=None, weight=None, bias=None, scale=None, shift=None):
        h, found = x.double(), []
        if residual is not None:
            found = [(h + residual.double(), 2 * UNIT * (h.abs() + residual.double().abs()))]
            h = got[1].double()  # the sum is rounded before it is normalised, and has just been verified
        y, off = normalised(h, centred, eps, -1, depth(x.shape[-1]))
        for factor, term in ((weight, bias), (None if scale is None else 1 + scale.double(), shift)):
            if factor is not None:
                y, off = y * factor.double(), off * factor.double().abs()
            if term is not None:
                y, off = y + term.double(), off + 2 * UNIT * term.double().abs()
            off = off + 4 * UNIT * y.abs()
        return [(y, off), *found]

    return definition


def acted(act, y, off):
    """The slope of these functions is at most 1.2, and each is accurate to some units of its argument."""
    return ACTS[act](y), 1.2 * off + 16 * UNIT * y.abs()


def defined_group_norm(got, x, weight, bias, eps, groups, channels_last, act):
    x = x.double().movedim(-1, 1) if channels_last else x.double()
    h = x.reshape(x.shape[0], groups, -1)
    y, off = normalised(h, True, eps, -1, min(h.shape[-1], 64) + 12)
    weight, bias = (t.double().view(-1, *[1] * (x.dim() - 2)) for t in (weight, bias))
    y, off = (t.reshape(x.shape) for t in (y, off))
    y, off = y * weight + bias, off * weight.abs() + 4 * UNIT * ((y * weight).abs() + bias.abs())
    if act:
        y, off = acted(act, y, off)
    return [tuple(t.movedim(1, -1) if channels_last else t for t in (y, off))]


def defined_softmax(got, x, mask=None, scale=1.0):
    y = x.double() * scale
    size = y.abs()
    if mask is not None:
        y, size = y + mask.double(), size + mask.double().abs()
    top = y.max(-1, keepdim=True).values
    # The error of an argument is a factor of its exponential. The errors of the others enter through the sum.
    off = 4 * UNIT * (size + (y - top).abs() + top.abs())
    share = F.softmax(y, -1)
    mean_off = (share * off).sum(-1, keepdim=True)
    return [(share, share * (off + mean_off + UNIT * (depth(x.shape[-1]) + 16)) + 2.0**-125)]


def defined_activation(got, x, act):
    return [acted(act, x.double(), torch.zeros((), dtype=torch.float64, device=x.device))]


def defined_glu(got, x, act, value=None, value_first=0):
    if value is None:
        x, value = x.chunk(2, -1)[:: -1 if value_first else 1]
    y, off = acted(act, x.double(), torch.zeros((), dtype=torch.float64, device=x.device))
    value = value.double()
    return [(y * value, off * value.abs() + 2 * UNIT * (y * value).abs())]


def defined_gated_add(got, x, residual, gate):
    product, residual = gate.double() * x.double(), residual.double()
    return [(residual + product, 4 * UNIT * (residual.abs() + product.abs()))]


def defined_rotation(x, off, cos, sin, numbers):
    pairs, rotary_dim = numbers["pairs"], numbers["rotary_dim"] or x.shape[-1]
    cos, sin = (over_heads(t.double(), rotary_dim, pairs, numbers["heads_first"]) for t in (cos, sin))
    turned, before = rotated(x, cos, sin, pairs, rotary_dim), off[..., :rotary_dim]
    parts = x[..., :rotary_dim]
    size = (parts * cos).abs() + (rotate(parts, pairs) * sin).abs()
    after = before * cos.abs() + rotate(before, pairs).abs() * sin.abs() + 4 * UNIT * size
    return turned, torch.cat((after, off[..., rotary_dim:]), -1)


def defined_rope(got, q, cos, sin, k=None, **numbers):
    given = [x.double() for x in (q, k) if x is not None]
    return [defined_rotation(x, torch.zeros_like(x), cos, sin, numbers) for x in given]


def defined_qk_norm_rope(got, q, q_weight, cos, sin, eps, across_heads, k=None, k_weight=None, **numbers):
    found = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        if x is not None:
            x, weight = x.double(), weight.double()
            heads = 1 if numbers["heads_first"] else 2
            dims = (heads, 3) if across_heads else 3
            if across_heads:
                weight = weight.view(x.shape[heads], -1)
                weight = weight.unsqueeze(1) if numbers["heads_first"] else weight
            n, off = normalised(x, False, eps, dims, depth(x.shape[3] * (x.shape[heads] if across_heads else 1)))
            n, off = n * weight, (off + 2 * UNIT * n.abs()) * weight.abs()
            found.append(defined_rotation(n, off, cos, sin, numbers))
    return found


DEFINITION = {
    "rms_norm": defined_norm(False),
    "layer_norm": defined_norm(True),
    "group_norm": defined_group_norm,
    "softmax": defined_softmax,
    "activation": defined_activation,
    "glu": defined_glu,
    "gated_add": defined_gated_add,
    "rope": defined_rope,
    "qk_norm_rope": defined_qk_norm_rope,
}


def error_of(op, got, fields):
    """The largest error of the outputs, as a share of the allowed one (the float error and half a unit of their
    dtype), and the exact values. A share above 1 is wrong, and so is NaN."""
    parts, exacts = [], []
    for out, (exact, off) in zip(got, DEFINITION[op](got, **fields), strict=True):
        info = torch.finfo(out.dtype)
        allowed = off + (info.eps / 2) * (exact.abs() + off + info.smallest_normal)
        parts.append(((out.double() - exact).abs() / allowed).amax())
        exacts.append(exact)
    return torch.stack(parts).amax().item(), exacts
