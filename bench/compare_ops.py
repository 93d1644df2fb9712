"""What compare_torch.py compares: for each op the tensors of a call and its implementations, then the cases."""

import formulas
import torch
import torch.nn.functional as F

EPS = 1e-6
SILU, GELU, INTERLEAVED, ROUND_NORM, CONST_WEIGHTS, BF16 = 1, 2, 1, 1, 1, 3


def hf_rms_norm(x, weight):
    """LlamaRMSNorm of transformers."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * h.to(x.dtype)


class RmsNorm:
    def tensors(self, new, rows, dim):
        return new(rows, dim), new(dim)

    def eager(self, x, weight):
        return hf_rms_norm(x, weight)

    def torch(self, x, weight):
        return F.rms_norm(x, (x.shape[-1],), weight, EPS)

    def liger(self, x, weight):
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)

    def adze(self, adze, x, weight):
        out = torch.empty_like(x)
        adze("rms_norm", out=out, x=x, weight=weight, eps=EPS, rounding=ROUND_NORM)
        return out


class AddRmsNorm:
    def tensors(self, new, rows, dim):
        return new(rows, dim), new(rows, dim), new(dim)

    def eager(self, x, residual, weight):
        h = residual + x
        return hf_rms_norm(h, weight), h

    def liger(self, x, residual, weight):
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS, 0.0, "llama", False)

    def adze(self, adze, x, residual, weight):
        out, total = torch.empty_like(x), torch.empty_like(x)
        adze("rms_norm", out=out, sum=total, x=x, residual=residual, weight=weight, eps=EPS, rounding=ROUND_NORM)
        return out, total


class LayerNorm:
    def tensors(self, new, rows, dim):
        return new(rows, dim), new(dim), new(dim)

    def torch(self, x, weight, bias):
        return F.layer_norm(x, (x.shape[-1],), weight, bias, EPS)

    def liger(self, x, weight, bias):
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return LigerLayerNormFunction.apply(x, weight, bias, EPS)

    def adze(self, adze, x, weight, bias):
        out = torch.empty_like(x)
        adze("layer_norm", out=out, x=x, weight=weight, bias=bias, eps=EPS)
        return out


class Modulate:
    """AdaLN as diffusion transformers write it."""

    def tensors(self, new, rows, dim):
        return new(1, rows, dim), new(1, 1, dim), new(1, 1, dim)

    def eager(self, x, scale, shift):
        return F.layer_norm(x, (x.shape[-1],), None, None, EPS) * (1 + scale) + shift

    def adze(self, adze, x, scale, shift):
        out = torch.empty_like(x)
        adze("layer_norm", out=out, x=x, scale=scale, shift=shift, eps=EPS)
        return out


class SiluMul:
    def tensors(self, new, rows, dim):
        return new(rows, dim), new(rows, dim)

    def eager(self, gate, value):
        return F.silu(gate) * value

    def liger(self, gate, value):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return LigerSiLUMulFunction.apply(gate, value)

    def adze(self, adze, gate, value):
        out = torch.empty_like(gate)
        adze("glu", out=out, x=gate, value=value, act=SILU)
        return out


class Linear:
    """A product of few tokens: x [m, k] and a weight [n, k], which nothing writes. torch's is cuBLAS; max-autotune
    would compile for seconds a shape, to choose cuBLAS or a kernel like it."""

    compiles = False

    def tensors(self, new, m, n, k):
        return new(m, k), new(n, k)

    def torch(self, x, w):
        return F.linear(x, w)

    def adze(self, adze, x, w):
        out = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
        adze("gemm", flags=CONST_WEIGHTS, out=out, x=x, w=w)
        return out


class BytesLinear:
    """The same with x and weights of 8 bits, whose scales are for rows. torch's products are cuBLASLt's. That of int8
    has no scales and more than 16 tokens: scales are 1 here, and its int32 is left as it is."""

    compiles = False
    out_dtype = torch.bfloat16

    def __init__(self, dtype):
        self.dtype = dtype

    def tensors(self, new, m, n, k):
        i8 = self.dtype == torch.int8
        x, w = (new(rows, k).float() for rows in (m, n))
        x, w = ((t * 40).round().clamp(-127, 127) if i8 else t for t in (x, w))
        ones = torch.ones(m, device=x.device), torch.ones(n, device=x.device)
        return (x.to(self.dtype), w.to(self.dtype), *ones)

    def exact(self, x, w, x_scale, w_scale):
        return x_scale[:, None] * (x @ w.T) * w_scale

    def torch(self, x, w, x_scale, w_scale):
        if self.dtype == torch.int8:
            return torch._int_mm(x, w.T)
        return torch._scaled_mm(x, w.T, x_scale[:, None], w_scale[None], out_dtype=self.out_dtype)

    def adze(self, adze, x, w, x_scale, w_scale):
        out = torch.empty(x.shape[0], w.shape[0], dtype=self.out_dtype, device=x.device)
        scales = {"x_scale": x_scale, "w_scale": w_scale}
        adze("gemm", flags=CONST_WEIGHTS, out=out, x=x, w=w, out_dtype=BF16, **scales)
        return out


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Rope:
    """q of 32 heads and k of 8, of 128 elements, as transformers stores and rotates them."""

    def tensors(self, new, rows, dim):
        angle = new(1, rows, dim // 2).float()
        angle = torch.cat((angle, angle), -1)
        return new(1, rows, 32, dim), new(1, rows, 8, dim), angle.cos().to(new.dtype), angle.sin().to(new.dtype)

    def eager(self, q, k, cos, sin):
        q, k, cos, sin = q.transpose(1, 2), k.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

    def liger(self, q, k, cos, sin):
        from liger_kernel.ops.rope import LigerRopeFunction

        return LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    def adze(self, adze, q, k, cos, sin):
        q_out, k_out = torch.empty_like(q), torch.empty_like(k)
        adze("rope", q_out=q_out, k_out=k_out, q=q, k=k, cos=cos, sin=sin)
        return q_out.transpose(1, 2), k_out.transpose(1, 2)


def like_first(tensors):
    return {"out": next(iter(tensors.values()))}


class Formula:
    """An op of formulas.py, with its tensors by name. `way` is "torch" where torch has a function for it."""

    def __init__(self, op, make, way="eager", outputs=like_first, **numbers):
        self.op, self.make, self.outputs, self.numbers, self.names = op, make, outputs, numbers, ()
        setattr(self, way, lambda *tensors: formulas.EAGER[op](**self.named(tensors), **numbers))

    def plain(self, *tensors):
        return formulas.PLAIN[self.op](**self.named(tensors), **self.numbers)

    def named(self, tensors):
        return dict(zip(self.names, tensors, strict=True))

    def tensors(self, new, *shape):
        made = self.make(new, *shape)
        self.names = tuple(made)
        found = formulas.liger(self.op, made | self.numbers)
        if found:
            self.liger = lambda *tensors: found(**self.named(tensors), **self.numbers)
        return tuple(made.values())

    def adze(self, adze, *tensors):
        tensors = self.named(tensors)
        outputs = {
            name: torch.empty(x.shape, dtype=x.dtype, device=x.device) for name, x in self.outputs(tensors).items()
        }
        adze(self.op, **outputs, **tensors, **self.numbers)
        return tuple(outputs.values())


def group_norm(channels_last, act=0):
    def make(new, *shape):
        channels = shape[-1 if channels_last else 1]
        return {"x": new(*shape), "weight": new(channels), "bias": new(channels)}

    numbers = {"eps": EPS, "groups": 32, "channels_last": int(channels_last), "act": act}
    return Formula("group_norm", make, "torch", **numbers)


def qk_norm_rope(k_heads=None, across_heads=0, pairs=0, tables=None):
    """q of [1, tokens, heads, dim], and k, with as many heads by default; tables of q's dtype or `tables`."""

    def make(new, tokens, heads, dim):
        angle = torch.rand(tokens, dim // 2, device=new.device, dtype=torch.float32)
        angle = angle.repeat_interleave(2, -1) if pairs else torch.cat((angle, angle), -1)
        found = {"q": new(1, tokens, heads, dim), "k": new(1, tokens, k_heads or heads, dim)}
        found |= {f"{n}_weight": new(x.shape[2] * dim if across_heads else dim) for n, x in found.items()}
        return found | {"cos": angle.cos().to(tables or new.dtype), "sin": angle.sin().to(tables or new.dtype)}

    numbers = {"eps": EPS, "across_heads": across_heads, "pairs": pairs, "heads_first": 0}

    def outputs(tensors):
        return {"q_out": tensors["q"], "k_out": tensors["k"]}

    return Formula("qk_norm_rope", make, outputs=outputs, rotary_dim=0, **numbers)


OPS = {
    "rms_norm": RmsNorm(),
    "rms_norm + residual": AddRmsNorm(),
    "layer_norm": LayerNorm(),
    "layer_norm + modulate": Modulate(),
    "silu_mul": SiluMul(),
    "rope": Rope(),
    "gemm": Linear(),
    "gemm i8": BytesLinear(torch.int8),
    "gemm f8e4m3": BytesLinear(torch.float8_e4m3fn),
    "group_norm": group_norm(False),
    "group_norm channels_last": group_norm(True),
    "group_norm + silu": group_norm(False, SILU),
    "softmax": Formula("softmax", lambda new, *shape: {"x": new(*shape)}, "torch"),
    "gelu": Formula("activation", lambda new, *shape: {"x": new(*shape)}, "torch", act=GELU),
    "qk_norm_rope (Qwen3)": qk_norm_rope(k_heads=8),
    "qk_norm_rope (FLUX)": qk_norm_rope(pairs=INTERLEAVED, tables=torch.float32),
    "qk_norm_rope (LTX)": qk_norm_rope(across_heads=1, pairs=INTERLEAVED, tables=torch.float32),
    "gated_add": Formula(
        "gated_add",
        lambda new, *shape: {"x": new(1, *shape), "residual": new(1, *shape), "gate": new(1, 1, shape[-1])},
    ),
}
NORM_SHAPES = [(1, 4096), (128, 4096), (1024, 2048), (2048, 2048), (4096, 2048), (8192, 3072), (16384, 3072)]
NORM_SHAPES += [(8192, 4096), (32768, 4096), (8192, 8192), (4096, 16384), (131072, 128)]
GPU_CASES = [("rms_norm", shape, "bf16") for shape in NORM_SHAPES]
GPU_CASES += [("rms_norm + residual", shape, "bf16") for shape in [(1, 4096), (2048, 2048), (8192, 4096)]]
GPU_CASES += [("layer_norm", (4992, 2048), "bf16")]
GPU_CASES += [("layer_norm + modulate", shape, "bf16") for shape in [(4992, 2048), (4608, 3072), (32768, 5120)]]
GPU_CASES += [("silu_mul", (rows, 14336), "bf16") for rows in [1, 1024, 8192]]
GPU_CASES += [("rope", (tokens, 128), "bf16") for tokens in [1, 512, 32768]]
GPU_CASES += [("group_norm", shape, "bf16") for shape in [(1, 512, 128, 128), (2, 320, 64, 64)]]
GPU_CASES += [("group_norm channels_last", shape, "bf16") for shape in [(1, 128, 128, 512), (2, 64, 64, 320)]]
GPU_CASES += [("group_norm + silu", (2, 320, 128, 128), "bf16")]
GPU_CASES += [("softmax", shape, "bf16") for shape in [(8192, 4096), (1024, 32768)]]
GPU_CASES += [("gelu", (4096, 12288), "bf16")]
GPU_CASES += [("qk_norm_rope (Qwen3)", (512, 32, 128), "bf16"), ("qk_norm_rope (FLUX)", (4608, 24, 128), "bf16")]
GPU_CASES += [("qk_norm_rope (LTX)", (4992, 1, 2048), "bf16"), ("gated_add", (4992, 2048), "bf16")]
WEIGHTS = [(4096, 4096), (11008, 4096), (14336, 4096), (22016, 4096), (4096, 14336), (128256, 4096)]
GPU_CASES += [("gemm", (m, *weight), "bf16") for weight in WEIGHTS for m in (1, 2, 4, 8, 16, 32, 64)]
BYTES = [(m, *weight) for weight in ((4096, 4096), (14336, 4096)) for m in (1, 16, 64, 512, 4096)]
GPU_CASES += [(f"gemm {kind}", shape, "bf16") for kind in ("i8", "f8e4m3") for shape in BYTES]
CPU_CASES = [(op, (32768, 4096), t) for op in ["rms_norm", "layer_norm", "silu_mul"] for t in ["bf16", "f32"]]
