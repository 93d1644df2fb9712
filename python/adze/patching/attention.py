"""attention in the place of torch's scaled_dot_product_attention, where it was measured to be faster. This is for
numerics="fast": torch rounds the probabilities to the dtype of the values and adds in another order."""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from ..operators import ops
from .frame import usable


class Calls(NamedTuple):
    """Calls for which attention was faster: from one number to another of queries, keys and elements of a head, and
    whether also where keys are hidden, by a mask or as causal."""

    queries: tuple
    keys: tuple
    dim: tuple
    hidden: bool = False

    def have(self, queries, keys, dim, hidden):
        sizes = ((queries, self.queries), (keys, self.keys), (dim, self.dim))
        return (self.hidden or not hidden) and all(first <= size <= last for size, (first, last) in sizes)


MEASURED = 16384  # tokens


def _on_the_cpu():
    """x86-64 with AVX-512 and without instructions for products of half precision, one thread, torch 2.13, by `python
    bench/attention.py`. In bfloat16 and float16 attention was faster than torch's from 64 queries and keys on, for
    heads of 40 to 160 and with masks; in float32 for the keys of a text (77 to 512), and up to 1024 queries and keys
    for heads of 64 to 128. All other calls are torch's. Other processors were not measured."""
    support = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
    if None in support or torch.backends.cpu.get_cpu_capability() != "AVX512" or any(asked() for asked in support):
        return {}
    half = (Calls((64, MEASURED), (64, MEASURED), (40, 160), hidden=True),)
    text = Calls((256, MEASURED), (77, 512), (40, 160), hidden=True)
    more = Calls((128, 1024), (128, 1024), (64, 128), hidden=True)
    return {torch.bfloat16: half, torch.float16: half, torch.float32: (text, more)}


# By device and dtype, the calls for which attention was measured to be faster than torch's. All others are torch's.
# On an H200 torch's was about as fast for the models of diffusers: bench/results/h200/attention-af4f49a.json.
FASTER = {"cpu": _on_the_cpu(), "cuda": {}}


def faster_somewhere(device, dtype):
    """Whether there are calls on this device and of this dtype for which attention is faster."""
    return bool(FASTER.get(device.type, {}).get(dtype))


def _mask_fits(mask, q, shape):
    """Whether attention can take a mask for scores of this shape."""
    if type(mask) is not torch.Tensor or mask.requires_grad or mask.device != q.device or not 1 <= mask.dim() <= 4:
        return False
    if mask.dtype not in (torch.bool, torch.float32, q.dtype) or mask.stride(-1) != 1 or mask.shape[-1] != shape[-1]:
        return False
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    return all(size in (1, whole) for size, whole in sizes)


def taken(q, k, v, mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Whether attention is to have a call of scaled_dot_product_attention. In a compiled graph it is not: there the
    sizes may be unknown. causal of adze counts from the last key, torch's from the first."""
    if torch.compiler.is_compiling() or dropout_p or not (q.dim() == k.dim() == v.dim() == 4):
        return False
    (batch, heads, m, d), n, dv = q.shape, k.shape[2], v.shape[-1]
    rows = FASTER.get(q.device.type, {}).get(q.dtype, ())
    hidden = mask is not None or is_causal
    if not any(row.have(m, n, max(d, dv), hidden) for row in rows) or not usable(q, k, v):
        return False
    if k.dtype != q.dtype or v.dtype != q.dtype or k.shape != (batch, heads, n, d) or v.shape[:3] != k.shape[:3]:
        return False
    if (is_causal and (m != n or mask is not None)) or scale == 0:
        return False
    if mask is not None and not _mask_fits(mask, q, (batch, heads, m, n)):
        return False
    return ops.has_kernel("attention", q.device)


def attend(q, k, v, mask=None, is_causal=False, scale=None):
    """The call, for queries of [batch, heads, tokens, dim]. As torch's, the result has the heads of a token together
    in memory."""
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).permute(0, 2, 1, 3)
    return ops.attention(q, k, v, mask, scale=scale, causal=is_causal, out=out)


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """torch's function, by adze where that is faster."""
    if taken(query, key, value, attn_mask, dropout_p, is_causal, scale):
        return attend(query, key, value, attn_mask, is_causal, scale)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
