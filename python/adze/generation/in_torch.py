"""What attention, kv_append and sample compute, in torch: for devices on which an op has no kernel.

has_kernel(), of operators/ops.py, asks the library. Nothing here waits for a device or reads from it, so it can be
captured in a graph."""

import torch

from ..operators.ops import has_kernel as has_kernel

_MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_WORD = 0xFFFFFFFF


# ---- attention ----


def seen(lengths, m, n, window):
    """The keys that each query sees, [batch, 1, m, n]: the queries are the last m of `lengths` keys."""
    keys = torch.arange(n, device=lengths.device)
    at = lengths[:, None] - m + torch.arange(m, device=lengths.device)
    found = keys <= at[:, :, None]
    if window:
        found &= keys > at[:, :, None] - window
    return found[:, None]


def attention(query, key, value, mask, scale, softcap, sinks, dropout, training):
    """The result and the weights of the keys, also with softcap and sinks."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]].to(query.dtype)
    weights = torch.nn.functional.dropout(weights, dropout, training)
    return weights @ value, weights


# ---- kv_append ----


def _stored(x, dtype):
    """A row in fewer bits, and its scale."""
    x = x.float()
    scale = x.abs().amax(-1)
    scale = scale / torch.full_like(scale, _MOST[dtype])  # by a number, CUDA multiplies by its rounded inverse
    q = torch.where(scale[..., None] > 0, x / scale[..., None], 0).clamp(-_MOST[dtype], _MOST[dtype])
    return (q.round() if dtype == torch.int8 else q).to(dtype), scale


def bits(x):
    """x as bytes where torch cannot index its dtype."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def append(new, cache, scales, lengths, table):
    """Writes new, [batch, heads, m, d], to the slots from lengths on."""
    slots = lengths[:, None].long() + torch.arange(new.shape[2], device=new.device)
    rows = torch.arange(new.shape[0], device=new.device)[:, None]
    if table is not None:
        page = cache.shape[2]
        rows, slots = table.long().gather(1, slots // page), slots % page
    if scales is not None:
        new, scale = _stored(new, cache.dtype)
        scales.transpose(1, 2)[rows, slots] = scale.transpose(1, 2)
    bits(cache).transpose(1, 2)[rows, slots] = bits(new.transpose(1, 2))


# ---- sample ----


def _philox(words, key):
    """The first word of Philox 4x32-10."""
    for _ in range(10):
        high, low = [], []
        for factor, word in ((0xD2511F53, words[0]), (0xCD9E8D57, words[2])):
            upper, lower = factor * (word >> 16), factor * (word & 0xFFFF)  # of 48 bits, in a word of 64
            high.append((upper + (lower >> 16)) >> 16)
            low.append(((upper << 16) + lower) & _WORD)
        words = [high[1] ^ words[1] ^ key[0], low[1], high[0] ^ words[3] ^ key[1], low[0]]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    return words[0]


def _uniform(seed, counter, batch):
    counter = counter.long().expand(batch)
    row = torch.arange(batch, device=counter.device)
    words = [counter & _WORD, (counter >> 32) & _WORD, row, torch.zeros_like(row)]
    key = [seed & _WORD, (seed >> 32) & _WORD]
    return (_philox(words, key) >> 8).double() * 2.0**-24


def _penalised(y, penalty, previous, count):
    at = torch.arange(previous.shape[1], device=y.device)
    counts = (at < count[:, None]) & (previous >= 0) & (previous < y.shape[1])
    found = y.new_zeros(y.shape[0], y.shape[1] + 1, dtype=torch.bool)
    found.scatter_(1, torch.where(counts, previous, y.shape[1]), True)
    return torch.where(found[:, :-1], torch.where(y < 0, y * penalty, y / penalty), y)


def sample(logits, temperature, seed, counter, top_k, top_p, min_p, penalty, previous, previous_count):
    y = logits.float().nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    if penalty != 1:
        y = _penalised(y, penalty, previous, previous_count)
    if temperature == 0:
        return y.argmax(-1)
    y = y / temperature
    if top_k:
        y = y.masked_fill(y < y.topk(min(top_k, y.shape[1])).values[:, -1:], float("-inf"))
    if 0 < top_p < 1:
        largest, _ = y.sort(descending=True)
        share = largest.double().softmax(-1)
        kept = share.cumsum(-1) - share < top_p
        lowest = torch.where(kept, largest, float("inf")).amin(-1, keepdim=True)
        y = y.masked_fill(y < lowest, float("-inf"))
    weight = (y - y.amax(-1, keepdim=True)).double().exp()
    if min_p:
        weight = torch.where(weight >= min_p, weight, 0)
    sums = weight.cumsum(-1)
    below = sums <= _uniform(seed, counter, y.shape[0])[:, None] * sums[:, -1:]
    return below.sum(-1)
