"""Calls for accuracy.py: inputs with the statistics of activations, and how models compute the results in torch.

A call is a line of `adze run`. `eager` is the torch code of the model that the line's rounding belongs to. The same
code on float64 tensors rounds nowhere, and gives the exact result.
"""

import re
import zlib

import formulas
import torch
import torch.nn.functional as F
from formulas import upper

from adze.operators.description import OPS
from adze.operators.header import ROUNDING

ROUND_NORM, FLOAT_SUM = ROUNDING["ROUND_NORM"], ROUNDING["FLOAT_SUM"]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}
DTYPES |= {"i32": torch.int32, "i64": torch.int64}
CODES = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16}  # of out_dtype
OUTLIERS = (50, 100)  # an outlier channel is so many times as large as the others
SMALL = 1e-3  # the norm of a small row, relative to the others
THETA, FIRST = 1e4, 1000  # of rope: the base, and the first position

# The calls that adze.patch makes, with the roundings of the models. $ stands for bf16 and f16.
MODELS = {
    "Llama, Qwen: norm": "rms_norm x=$[512,4096] weight=$[4096] eps=1e-5 rounding=1",
    "Llama, Qwen: residual + norm": "rms_norm x=$[512,4096] residual=$[512,4096] weight=$[4096] eps=1e-5 rounding=1",
    "Gemma: norm": "rms_norm x=$[512,3584] weight=$[3584] eps=1e-6 weight_offset=1",
    "Gemma 2: norm, then residual": "rms_norm x=$[512,3584] weight=$[3584] shift=$[512,3584] eps=1e-6 weight_offset=1"
    " rounding=2",
    "OLMo 2, torch.nn.RMSNorm": "rms_norm x=$[512,4096] weight=$[4096] eps=1e-6",
    "GPT-2, torch.nn.LayerNorm": "layer_norm x=$[512,1600] weight=$[1600] bias=$[1600] eps=1e-5",
    "GPT-2: residual + layer_norm": "layer_norm x=$[512,1600] residual=$[512,1600] weight=$[1600] bias=$[1600]"
    " eps=1e-5",
    "FLUX: layer_norm + modulation": "layer_norm x=$[1,512,3072] scale=$[1,1,3072] shift=$[1,1,3072] eps=1e-6"
    " rounding=2",
    "FLUX: gate + residual + layer_norm + modulation": "layer_norm x=$[1,512,3072] residual=$[1,512,3072]"
    " gate=$[1,1,3072] scale=$[1,1,3072] shift=$[1,1,3072] eps=1e-6 rounding=2",
    "Wan: layer_norm + modulation in float32": "layer_norm x=$[1,512,5120] scale=f32[1,1,5120] shift=f32[1,1,5120]"
    " eps=1e-6",
    "LTX: residual + rms_norm + modulation": "rms_norm x=$[1,512,2048] residual=$[1,512,2048] scale=$[1,1,2048]"
    " scale_table=$[2048] shift=$[1,1,2048] shift_table=$[2048] eps=1e-6 rounding=2",
    "FLUX: gate + residual": "gated_add x=$[1,512,3072] residual=$[1,512,3072] gate=$[1,1,3072] rounding=2",
    "Llama: rope": "rope q=$[1,512,32,128] k=$[1,512,8,128] cos=$[1,512,128] sin=$[1,512,128] rounding=2",
    "FLUX: rope": "rope q=$[1,512,24,128] k=$[1,512,24,128] cos=f32[512,128] sin=f32[512,128] pairs=interleaved",
    "Qwen3: qk norm + rope": "qk_norm_rope q=$[1,512,32,128] k=$[1,512,8,128] q_weight=$[128] k_weight=$[128]"
    " cos=$[1,512,128] sin=$[1,512,128] eps=1e-6 rounding=3",
    "FLUX: qk norm + rope": "qk_norm_rope q=$[1,512,24,128] k=$[1,512,24,128] q_weight=$[128] k_weight=$[128]"
    " cos=f32[512,128] sin=f32[512,128] eps=1e-6 rounding=4 pairs=interleaved",
    "LTX: qk norm + rope": "qk_norm_rope q=$[1,512,1,2048] k=$[1,512,1,2048] q_weight=$[2048] k_weight=$[2048]"
    " cos=f32[1,512,2048] sin=f32[1,512,2048] eps=1e-5 rounding=4 pairs=interleaved across_heads=1",
    "Llama, Qwen: silu glu": "glu x=$[512,11008] value=$[512,11008] act=silu rounding=2",
    "Gemma: gelu_tanh glu": "glu x=$[512,14336] value=$[512,14336] act=gelu_tanh rounding=2",
    "Stable Diffusion: GEGLU": "glu x=$[512,10240] act=gelu value_first=1 rounding=2",
    "silu": "activation x=$[512,12288] act=silu",
    "gelu": "activation x=$[512,12288] act=gelu",
    "gelu_tanh": "activation x=$[512,12288] act=gelu_tanh",
    "Stable Diffusion: group_norm + silu": "group_norm x=$[2,320,64,64] weight=$[320] bias=$[320] eps=1e-5 groups=32"
    " act=silu rounding=2",
    "the same, channels last": "group_norm x=$[2,64,64,320] weight=$[320] bias=$[320] eps=1e-5 groups=32"
    " channels_last=1 act=silu rounding=2",
    "attention: softmax with a mask": "softmax x=$[1,4,512,2048] mask=$[1,1,512,2048] scale=0.125",
}


# ---- A line ----


class Call:
    """A parsed line: the op, (dtype, shape) of each input, and numbers. Strides and aliases are not kept."""

    def __init__(self, line, rows=0):
        self.op, *words = line.split()
        self.specs, self.numbers = {}, {}
        table = OPS[self.op]
        for name, value in (word.split("=", 1) for word in words):
            found = re.fullmatch(r"(\w+)\[([\d,:]+)\](@.*)?", value)
            if found and name not in table.outputs:
                shape = tuple(int(size.split(":")[0]) for size in found[2].split(","))
                self.specs[name] = (found[1], shape)
            elif name in table.numbers:
                known = table.words[name]
                number = known[value] if value in known else float(value)
                self.numbers[name] = number if table.numbers[name] == "float" else int(number)
        if rows:
            self._limit(rows)

    @property
    def main(self):
        return next(self.specs[name] for name in ("x", "q", "pos") if name in self.specs)

    @property
    def channel_axis(self):
        return 1 if self.op == "group_norm" and not self.numbers.get("channels_last") else -1

    def _limit(self, rows):
        """Cuts the leading dimensions to so many rows: the same arithmetic, in less time."""
        shape = self.main[1]
        kept = {shape[1]} if self.channel_axis == 1 else set()
        long = {size for size in shape[:-1] if size > rows} - kept
        for name, (dtype, sizes) in self.specs.items():
            lead = [rows if size in long else size for size in sizes[:-1]]
            self.specs[name] = (dtype, (*lead, sizes[-1]))

    def __str__(self):
        words = [f"{name}={dtype}[{','.join(map(str, shape))}]" for name, (dtype, shape) in self.specs.items()]
        return " ".join([self.op, *words, *(f"{name}={value:g}" for name, value in self.numbers.items())])


# ---- Inputs with the statistics of activations ----


class Values:
    """Random tensors, the same ones for the same seed: heavy tails, channels of different size, outlier channels, and
    rows of very different norm."""

    def __init__(self, device, seed):
        self.device, self.generator = device, torch.Generator(device=device).manual_seed(zlib.crc32(seed.encode()))

    def normal(self, *shape):
        return torch.randn(shape, device=self.device, generator=self.generator)

    def heavy(self, *shape):
        """Normal values, each with a log-normal deviation of its own."""
        return self.normal(*shape) * (0.5 * self.normal(*shape)).exp()

    def hidden(self, shape, axis=-1):
        """Hidden states, queries and keys. One channel in 512 is an outlier, and one row in 16 is small."""
        channels = shape[axis]
        size = (0.3 * self.normal(channels)).exp()
        chosen = torch.randperm(channels, device=self.device, generator=self.generator)[: max(1, channels // 512)]
        low, high = OUTLIERS
        size[chosen] *= low + (high - low) * torch.rand(len(chosen), device=self.device, generator=self.generator)
        offset = 0.1 * self.normal(channels) * size
        wide = [1] * len(shape)
        wide[axis] = channels
        value = self.heavy(*shape) * size.view(wide) + offset.view(wide)
        if axis == -1:
            rows = (0.5 * self.normal(*shape[:-1], 1)).exp()
            rows.view(-1)[::16] *= SMALL if rows.numel() > 1 else 1
            value = value * rows
        return value

    def mlp(self, shape):
        """What an MLP's first GEMM gives. The bound keeps a product of two in the range of float16."""
        return (2 * self.heavy(*shape)).clamp(-100, 100)

    def scores(self, shape, scale=1.0):
        """Scores of attention before they are scaled, with a first position that all others attend to."""
        value = (2 * self.heavy(*shape)).clamp(-40, 40)
        value[..., 0] += 5
        return value / scale

    def weight(self, shape, offset=0.0):
        return 0.7 * (0.4 * self.normal(*shape)).exp() - offset

    def modulation(self, shape):
        return (0.3 * self.heavy(*shape)).clamp(-8, 8)

    def causal(self, shape, dtype):
        """A mask as transformers makes it: the smallest number of the dtype where a token must not attend."""
        later = torch.ones(shape[-2:], device=self.device).triu(shape[-1] - shape[-2] + 1).bool()
        mask = torch.zeros(shape[-2:], device=self.device).masked_fill(later, torch.finfo(dtype).min)
        return mask.expand(shape)

    def table(self, shape, rotary_dim, pairs, function):
        """cos or sin of position times frequency, in rotary_dim columns or half as many."""
        frequency = THETA ** -(torch.arange(rotary_dim // 2, device=self.device) * 2 / rotary_dim)
        angle = (FIRST + torch.arange(shape[-2], device=self.device))[:, None] * frequency
        if shape[-1] == rotary_dim:
            angle = angle.repeat_interleave(2, -1) if pairs else torch.cat((angle, angle), -1)
        return function(angle).expand(shape)


def tensors(call, device):
    """The inputs of a call, by name."""
    values, numbers, found = Values(device, str(call)), call.numbers, {}
    for name, (dtype, shape) in call.specs.items():
        if name in ("cos", "sin"):
            rotary_dim = numbers.get("rotary_dim") or call.main[1][-1]
            made = values.table(shape, rotary_dim, numbers.get("pairs", 0), getattr(torch, name))
        elif name == "pos":
            made = (FIRST + torch.arange(shape[0], device=device))[:, None].expand(shape)
        elif name == "freq":
            made = THETA ** -(torch.arange(shape[0], device=device, dtype=torch.float64) / shape[0])
        elif name == "axis":
            made = torch.arange(shape[0], device=device) % call.specs["pos"][1][-1]
        elif name == "mask":
            made = values.causal(shape, DTYPES[dtype])
        elif name.endswith("weight"):
            made = values.weight(shape, numbers.get("weight_offset", 0.0))
        elif name == "bias" or (name.startswith(("gate", "scale", "shift")) and shape != call.main[1]):
            made = values.modulation(shape)
        elif call.op == "softmax":
            made = values.scores(shape, numbers.get("scale", 1.0))
        elif call.op in ("glu", "activation"):
            made = values.mlp(shape)
        else:
            made = values.hidden(shape, call.channel_axis)
        found[name] = made.to(DTYPES[dtype]).contiguous()
    return found


# ---- As the models compute it ----


def llama_norm(h, weight, bias, eps):
    """LlamaRMSNorm of transformers: it rounds before it multiplies by the weight."""
    y = upper(h)
    y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(h.dtype)
    return y if weight is None else weight * y


def gemma_norm(offset):
    """GemmaRMSNorm: (offset + weight) in float, one rounding."""

    def norm(h, weight, bias, eps):
        y = upper(h)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
        return (y * (offset + upper(weight))).to(h.dtype)

    return norm


def norm_of(op, numbers):
    if op == "layer_norm":
        return formulas.layer_norm
    if numbers.get("rounding", 0) & ROUND_NORM:
        return llama_norm
    offset = numbers.get("weight_offset", 0.0)
    return gemma_norm(offset) if offset else formulas.rms_norm


def plus(a, b):
    return a if b is None else a + b


def gated_add(x, residual, gate, gate_table=None, **_):
    return (residual + plus(gate, gate_table) * x).to(x.dtype)


def norm(op):
    """A norm with what may precede and follow it. If x has another dtype and parameters are float32, the model
    computes in float32 (Wan)."""

    def eager(x, eps, residual=None, weight=None, bias=None, gate=None, gate_table=None, scale=None, scale_table=None,
              shift=None, shift_table=None, **numbers):  # fmt: skip
        function, h, total = norm_of(op, numbers), x, None
        if residual is not None:
            h = residual + x if gate is None else gated_add(x, residual, gate, gate_table)
            total = h
            if numbers.get("rounding", 0) & FLOAT_SUM:
                h = upper(residual) + upper(x)
        in_float = any(t is not None and t.dtype == torch.float32 for t in (weight, bias, scale, shift))
        y = function(upper(h), upper(weight), upper(bias), eps) if in_float else function(h, weight, bias, eps)
        if scale is not None:
            y = y * (1 + plus(scale, scale_table))
        if shift is not None:
            y = y + plus(shift, shift_table)
        y = y.to(CODES.get(numbers.get("out_dtype", 0), x.dtype) if x.dtype != torch.float64 else x.dtype)
        return y if residual is None else (y, total)

    return eager


def group_norm(x, weight, bias, eps, groups, channels_last=0, act=0, **_):
    return formulas.group_norm(x, weight, bias, eps, groups, channels_last, act)


def glu(x, value=None, act=0, value_first=0, **_):
    return formulas.glu(x, act or 1, value, value_first)


def rope(q, cos, sin, k=None, pairs=0, rotary_dim=0, heads_first=0, **_):
    return formulas.rope(q, cos, sin, pairs, rotary_dim, heads_first, k)


def qk_norm_rope(q, q_weight, cos, sin, eps, k=None, k_weight=None, across_heads=0, pairs=0, rotary_dim=0,
                 heads_first=0, **numbers):  # fmt: skip
    function = norm_of("rms_norm", numbers)
    return formulas.qk_norm_rope(
        q, q_weight, cos, sin, eps, across_heads, pairs, rotary_dim, heads_first, k, k_weight, function
    )


def rope_table(pos, freq, axis=None, scale=1.0, columns=0, double_angle=0, out_dtype=0, exact=False):
    """The product of position and frequency is rounded to float where the models do so, in the exact result too."""
    pos = pos[..., :1] if axis is None else pos[..., axis.long()]
    angle = pos.double() * freq.double() if double_angle else pos.float() * freq.float()
    angle = angle.double() if exact else angle
    found = []
    for table in (angle.cos() * scale, angle.sin() * scale):
        table = table if exact else table.float()
        table = (table, torch.cat((table, table), -1), table.repeat_interleave(2, -1))[columns]
        found.append(table if exact else table.to(CODES[out_dtype or 1]))
    return tuple(found)


ACTS = formulas.ACTS | {4: lambda x: x * torch.sigmoid(1.702 * x), 5: F.relu, 6: lambda x: F.relu(x).square()}
EAGER = {
    "rms_norm": norm("rms_norm"),
    "layer_norm": norm("layer_norm"),
    "group_norm": group_norm,
    "gated_add": gated_add,
    "activation": lambda x, act: ACTS[act](x),
    "glu": glu,
    "softmax": formulas.softmax,
    "rope": rope,
    "qk_norm_rope": qk_norm_rope,
    "rope_table": rope_table,
}


def exact(call, given):
    """The outputs in float64."""
    if call.op == "rope_table":
        return rope_table(**given, **call.numbers, exact=True)
    wide = {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
    return EAGER[call.op](**wide, **call.numbers)


def adze_outputs(call, given):
    """Those of torch.ops.adze, with every optional output that the call can have. Rows are not quantised here."""
    table = OPS[call.op]
    packet = getattr(torch.ops.adze, call.op)
    optional = [name for name in table.optional if name != "out_scale"]
    both = optional and ("residual" in given or "k" in given)
    absent = {name: 0 if name in table.numbers else None for name in table.arguments}
    arguments = (absent | given | call.numbers).values()
    return (getattr(packet, optional[-1]) if both else packet.default)(*arguments)


# ---- Errors ----


def ulp(value, dtype):
    """The unit in the last place of a dtype at these values."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(value.abs().clamp(min=info.smallest_normal)).exponent - 1
    return torch.ldexp(torch.full_like(value, info.eps), exponent)


def errors(got, exact):
    """The difference of each element in ulps. Where an element is smaller than the mean of its row, the ulp is that
    of the mean: the terms of such a sum have cancelled."""
    size = torch.maximum(exact.abs(), exact.abs().mean(-1, keepdim=True).expand_as(exact))
    return (got.double() - exact).abs() / ulp(size, got.dtype)


def compare(adze, eager, exact):
    """The columns of a row, from the outputs of both and the exact ones."""
    count = sum(t.numel() for t in eager)
    row = {"equal": sum((a == b).sum().item() for a, b in zip(adze, eager, strict=True)) / count}
    for name, outputs in (("", adze), ("eager_", eager)):
        parts = [errors(got, right) for got, right in zip(outputs, exact, strict=True)]
        row[f"{name}error"] = (sum(part.square().sum().item() for part in parts) / count) ** 0.5
        row[f"{name}max"] = max(part.max().item() for part in parts)
    return row
