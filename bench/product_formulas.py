"""gemm and attention for `compare_torch.py --sweep`: what torch has for a call, and the call in double with a bound
of float's error, as src/ops and src/value.h have it."""

import functools

import torch
import torch.nn.functional as F
from formulas import ACTS, UNIT, acted, normalised
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


# ---- gemm ----


def unpacked(w, scale, k, group):
    """The numbers that a quantised weight stands for, in double."""
    if w.dtype == torch.uint8:
        w = torch.stack((w & 15, w >> 4), -1).flatten(1)[:, :k].to(torch.int8) - 8
    scale = scale.double().unsqueeze(-1) if scale.dim() == 1 else scale.double()
    return w.double() * scale.repeat_interleave(group or k, -1)[:, :k]


def weights(call, given):
    """The weights of a gemm in double."""
    k, group = call.main.shape[-1], call.numbers.get("group", 0)
    names = [name for name in ("w", "w2") if name in given]
    if "w_scale" not in given:
        return [given[name].double() for name in names]
    return [unpacked(given[name], given[f"{name}_scale"], k, group) for name in names]


def instead(call, given):
    """The tensors that peers read and adze does not: quantised weights as torch's products take them."""
    if call.op != "gemm" or "w_scale" not in given:
        return {}
    dtype = given["x"].dtype
    return {f"{name}_plain": w.to(dtype) for name, w in zip(("w", "w2"), weights(call, given), strict=False)}


def linear(x, w, bias=None, w2=None, norm_weight=None, residual=None, eps=0.0, act=0, glu=0, product=F.linear):
    """As users write it; `product` has the weights in the form that it takes."""
    x = x if norm_weight is None else F.rms_norm(x, x.shape[-1:], norm_weight, eps)
    y = product(x, w, bias)
    if glu:
        y = ACTS[act or 1](y) * product(x, w2)
    elif act:
        y = ACTS[act](y)
    return y if residual is None else residual + y


def int8_product(x, w, bias=None):
    """torch's own with weights of int8, which has their scales in x's dtype."""
    y = torch._weight_int8pack_mm(x.contiguous(), *w)
    return y if bias is None else y + bias


def gemm_peers(call):
    words = {name: value for name, value in call.numbers.items() if name in ("eps", "act", "glu")}
    rest = [name for name in ("x", "bias", "norm_weight", "residual") if name in call.tensors]
    names = [name for name in ("w", "w2") if name in call.tensors]
    quantised = "w_scale" in call.tensors

    def plain(given):
        found = {name: given[f"{name}_plain" if quantised else name] for name in names}
        return linear(**found, **{name: given[name] for name in rest}, **words)

    def int8(given):
        found = {name: (given[name], given[f"{name}_scale"].to(given["x"].dtype)) for name in names}
        return linear(**found, **{name: given[name] for name in rest}, **words, product=int8_product)

    ways = {"dequantised" if quantised else "eager": plain}
    # torch's kernel for CPUs reads beyond rows of other lengths (torch 2.13)
    fits = torch.cuda.is_available() or call.main.shape[-1] % 32 == 0
    return ways | ({"int8pack": int8} if call.tensors["w"].dtype == "i8" and fits else {})


def summed(x, off, w, f16):
    """x . w^T, of x with an error, and a bound: tensor cores add 16 products at a time in the order of k, other
    kernels chains of at most 256."""
    y, size, k = x @ w.T, x.abs() @ w.abs().T, x.shape[-1]
    error = off @ w.abs().T if off is not None else torch.zeros_like(y)
    chain = 22 * (k / 32 + 2) + 12 if f16 else min(k, 256) + k / 256 + 12
    return y, error + UNIT * chain * (size + error), size


def defined_gemm(call, got, given):
    x, dtype, numbers = given["x"].double(), given["x"].dtype, call.numbers
    f16, off = dtype != torch.float32, None
    if "norm_weight" in given:
        n, off = normalised(x, False, numbers["eps"], -1, x.shape[-1] / 32 + 12)
        weight = given["norm_weight"].double()
        n, off = n * weight, (off + 2 * UNIT * n.abs()) * weight.abs()
        x = n.to(dtype).double()
        if f16:  # either neighbour is right where float's error leaves it open
            off = ((n + off).to(dtype).double() - (n - off).to(dtype).double()).abs()
    found, groups = [], -(-x.shape[-1] // (numbers.get("group") or x.shape[-1]))
    for number, w in zip(("", "2"), weights(call, given), strict=False):
        y, error, size = summed(x, off, w, f16)
        if "w_scale" in given:
            error = error + UNIT * (groups + 3) * size
        if f"bias{number}" in given:
            bias = given[f"bias{number}"].double()
            y, error = y + bias, error + UNIT * ((y + bias).abs() + error)
        found.append((y, error))
    (y, error), act = found[0], numbers.get("act", 0)
    if numbers.get("glu"):
        (a, a_off), (v, v_off) = acted(act or 1, y, error), found[1]
        y, error = a * v, a.abs() * v_off + v.abs() * a_off + a_off * v_off + 2 * UNIT * (a * v).abs()
    elif act:
        y, error = acted(act, y, error)
    if "residual" in given:
        y = y + given["residual"].double()
        error = error + UNIT * (y.abs() + error)
    return y, error


# ---- attention ----


def hidden(call, device):
    """Which keys the numbers of a call hide, [m, n] bool, or None."""
    m, n = call.tensors["q"].shape[2], call.tensors["k"].shape[2]
    if not call.numbers.get("causal"):
        return None
    away = torch.arange(n - m, n, device=device)[:, None] - torch.arange(n, device=device)
    window = call.numbers.get("window") or n
    return (away < 0) | (away >= window)


def attention_peers(call):
    """torch's choice, and each of its backends. A window and a mask are a mask to them."""
    (_, heads, m, _), (_, kv_heads, n, _) = call.tensors["q"].shape, call.tensors["k"].shape
    causal, window = bool(call.numbers.get("causal")), bool(call.numbers.get("window"))
    options = {"is_causal": causal and m == n and not window, "enable_gqa": heads != kv_heads}
    made = {}

    def mask_of(given):
        if "mask" in given or not causal or options["is_causal"]:
            return given.get("mask")
        if "mask" not in made:  # once: a model makes it once for all its layers
            made["mask"] = ~hidden(call, given["q"].device) if window else causal_lower_right(m, n)
        return made["mask"]

    def way(given, backend=None):
        q, k, v = (given[name] for name in "qkv")
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, mask_of(given), **options)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, mask_of(given), **options)

    backends = BACKENDS if torch.cuda.is_available() else {}
    return {"torch": way} | {name: functools.partial(way, backend=backend) for name, backend in backends.items()}


def rows_of(m):
    """The queries that are verified: all of a few, else some of them."""
    return sorted({*range(min(m, 8)), *range(0, m, max(1, m // 8)), m - 1})


def defined_attention(call, got, given):
    rows = rows_of(call.tensors["q"].shape[2])
    k, v = given["k"].double(), given["v"].double()
    batch, heads, _, dim = given["q"].shape
    kv_heads, n = k.shape[1:3]
    q = given["q"][:, :, rows].double().reshape(batch, kv_heads, -1, dim)  # heads of a group read the same keys
    s, size = ((a @ b.mT * dim**-0.5).view(batch, heads, -1, n) for a, b in ((q, k), (q.abs(), k.abs())))
    if "mask" in given:
        mask = given["mask"][:, :, rows] if given["mask"].shape[2] > 1 else given["mask"]
        if mask.dtype == torch.bool:
            s = s.masked_fill(~mask, -torch.inf)
        else:
            s, size = s + mask.double(), size + mask.double().abs()
    unseen = hidden(call, q.device)
    s = s if unseen is None else s.masked_fill(unseen[rows], -torch.inf)
    share = F.softmax(s, -1).nan_to_num()  # no key at all: zero
    # The error of a score is a factor of its weight, and of all others through the sum. Weights are rounded to q's
    # dtype on the tensor cores, each by half a unit, and their products are added in order.
    off = UNIT * (22 * (dim / 32 + 2) + 16) * size
    mean_off = (share * off).sum(-1, keepdim=True)
    unit = torch.finfo(given["q"].dtype).eps / 2 if given["q"].dtype != torch.float32 else 0.0
    factor = share * (off + mean_off + 2 * unit + UNIT * (22 * (n / 32 + 2) + 64))
    found = ((a.reshape(batch, kv_heads, -1, n) @ b) for a, b in ((share, v), (factor, v.abs())))
    return tuple(y.view(batch, heads, len(rows), -1) for y in found)


# ---- For both ----


def peers(call):
    return gemm_peers(call) if call.op == "gemm" else attention_peers(call)


def seen(call, outputs):
    """What of the outputs is verified."""
    return [outputs[0][:, :, rows_of(outputs[0].shape[2])]] if call.op == "attention" else outputs


def error_of(call, got, given):
    """As formulas.error_of."""
    exact, off = (defined_gemm if call.op == "gemm" else defined_attention)(call, got, given)
    (out,) = seen(call, got)
    info = torch.finfo(out.dtype)
    allowed = off + (info.eps / 2) * (exact.abs() + off + info.smallest_normal)
    return ((out.double() - exact).abs() / allowed).amax().item(), [exact]
