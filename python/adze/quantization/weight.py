"""A weight in fewer bits, in the layout that adze.h documents (canonical, row-major): how it is made, and what it
stands for."""

from typing import NamedTuple

import torch

from ..operators import ops

# What adze.quantize(model, kind) makes: the kind of the op, columns and rows of a group (0: whole rows).
KINDS = {
    "int8": ("i8", 0, 0),
    "int4-g32": ("u4", 32, 0),
    "int4-g64": ("u4", 64, 0),
    "int4-g128": ("u4", 128, 0),
    "fp8": ("f8e4m3", 0, 0),
    "fp8-block": ("f8e4m3", 128, 128),
    "w8a8": ("i8", 0, 0),
    "w8a8-fp8": ("f8e4m3", 0, 0),
}
ACTIVATIONS = ("w8a8", "w8a8-fp8")  # of these the input is quantised too, by rows, in each call
NAMES = {torch.int8: "int8", torch.uint8: "int4", torch.float8_e4m3fn: "fp8"}
GROUPS = (32, 64, 128)
PARTS = tuple(1 - i / 40 for i in range(1, 17))  # of a group's range, that a search tries: from 0.975 down to 0.6


class Weight(NamedTuple):
    """A weight [n, k] of int8, float8_e4m3fn, or uint8 with two numbers of 4 bits in a byte, as gemm takes it."""

    q: torch.Tensor  # [n, k], or [n, (k + 1) // 2] of 4 bits
    scale: torch.Tensor  # [1], [n], or [n / rows of a group, k / columns of a group], rounded up
    zero: torch.Tensor | None = None  # as the scale, uint8, of 4 bits
    order: torch.Tensor | None = None  # [k]: column j of the weight is for column order[j] of the input


class Groups(NamedTuple):
    """How scales are shared, as arguments of gemm."""

    group: int
    group_rows: int
    format: str | None


def groups_of(q, scale, k):
    """The groups of a weight, from its shapes: only one size of a group gives a scale this shape."""
    packed = "u4" if q.dtype == torch.uint8 else None
    if scale.dim() == 1 or (scale.shape[1] == 1 and scale.shape[0] == q.shape[0]):
        return Groups(0, 0, packed)
    rows, columns = scale.shape
    if rows != q.shape[0]:
        return Groups(128, 128, packed)
    return Groups(next((g for g in GROUPS if -(-k // g) == columns), 0), 0, packed)


def pack(numbers):
    """Numbers of 0 to 15, [n, k], as bytes: column 2 j in bits 0 to 3, column 2 j + 1 in bits 4 to 7."""
    numbers = numbers.to(torch.uint8)
    if numbers.shape[1] % 2:
        numbers = torch.nn.functional.pad(numbers, (0, 1))
    return (numbers[:, ::2] | numbers[:, 1::2] << 4).contiguous()


def unpack(packed, k):
    """The numbers [n, k] of such bytes."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)[:, :k]


def _spread(part, group, rows, n, k):
    """A scale or a zero, so that it broadcasts with [n, k]."""
    if part.dim() == 1:
        return part[:, None]
    if part.shape[1] > 1:
        part = part.repeat_interleave(group or k, 1)[:, :k]
    return part.repeat_interleave(rows, 0)[:n] if rows > 1 else part


def _in_float32(weight, k, dtype):
    """The numbers as one formula, which a compiler makes one loop of."""
    group, rows, packed = groups_of(weight.q, weight.scale, k)
    n = weight.q.shape[0]
    numbers = unpack(weight.q, k) if packed else weight.q
    numbers = numbers.to(torch.float32)
    if packed:
        numbers = numbers - (8 if weight.zero is None else _spread(weight.zero, group, rows, n, k).to(torch.float32))
    return (numbers * _spread(weight.scale, group, rows, n, k).to(torch.float32)).to(dtype)


def dequantized(weight, k, dtype):
    """The numbers [n, k] that a weight stands for, rounded to a dtype; columns as they are stored. The op makes them
    where the library has a kernel for the device; torch, with the same bits, where it has none or is compiling."""
    if torch.compiler.is_compiling() or dtype not in ops.DTYPES:
        return _in_float32(weight, k, dtype)
    if not ops.has_kernel("dequantize", weight.q.device):
        return _in_float32(weight, k, dtype)
    q, scale, zero, _ = weight
    group, rows, packed = groups_of(q, scale, k)
    return ops.dequantize(q, scale, zero, group=group, group_rows=rows, format=packed, k=k, dtype=dtype)


def check_kind(kind, zero_points=False):
    """Raises unless adze.quantize can make this kind of a model's weights."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"adze.quantize: kind is {kind!r}, it must be one of {', '.join(KINDS)}")
    if zero_points and KINDS[kind][0] != "u4":
        raise ValueError(f"adze.quantize: zero_points is {zero_points}, only 4 bits have them, kind is {kind!r}")


def _tiles(x, rows, columns):
    """x, [n, k], as [n / rows, rows, k / columns, columns], with zeros after its ends."""
    n, k = x.shape
    x = torch.nn.functional.pad(x, (0, -k % columns, 0, -n % rows))
    return x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _of_tiles(value, rows, columns, like):
    """A value for each tile, at each element of one that is like `like`."""
    whole = value[:, None, :, None].expand(-1, rows, -1, columns).flatten(2, 3).flatten(0, 1)
    return whole[: like.shape[0], : like.shape[1]]


def _searched(x, make, rows, columns, zero_points):
    """make(x), but each group has the one of several scales that has the least squared error. A group whose largest
    numbers are cut off has a smaller scale, which is finer for the others."""
    tiles = _tiles(x, rows, columns)
    low, high = tiles.amin((1, 3)).clamp_max(0), tiles.amax((1, 3)).clamp_min(0)
    if not zero_points:
        high = torch.maximum(high, -low)
        low = -high

    def error(made):
        off = dequantized(Weight(*made), x.shape[1], torch.float32) - x.to(torch.float32)
        return _tiles(off.square_(), rows, columns).sum((1, 3))

    best = list(make(x))
    least = error(best)
    packed = best[0].dtype == torch.uint8
    for part in PARTS:
        ends = (_of_tiles(end * part, rows, columns, x) for end in (low, high))
        made = make(torch.clamp(x, *ends))
        found = error(made)
        better = found < least
        least = torch.where(better, found, least)
        taken = _of_tiles(better, rows, columns // 2 if packed else columns, best[0])
        for i, (own, other) in enumerate(zip(best, made, strict=True)):
            mask = better.reshape(own.shape) if i else taken
            dtype = torch.uint8 if own.itemsize == 1 else own.dtype  # torch.where has no float8
            best[i] = torch.where(mask, other.view(dtype), own.view(dtype)).view(own.dtype)
    return best


def quantized(weight, kind, zero_points=False, search=False):
    """A weight [n, k] in fewer bits, rounded to nearest, where it is. From a device on which the op has no kernel it
    goes to the CPU and back. search: for the scales of least squared error."""
    check_kind(kind, zero_points)
    op_kind, group, rows = KINDS[kind]
    given = weight.detach()
    where = given.device if ops.has_kernel("quantize", given.device) else "cpu"
    there = given.to(where, given.dtype if given.dtype in ops.DTYPES else torch.float32).contiguous()
    # A scale of a group is one of many. As bfloat16 it has float32's range, and its error is far below a 4-bit step.
    dtype = torch.bfloat16 if op_kind == "u4" else torch.float32

    def make(x):
        return ops.quantize(x, op_kind, group=group, group_rows=rows, zero_points=zero_points, scale_dtype=dtype)

    with torch.no_grad():
        made = _searched(there, make, rows or 1, group or there.shape[1], zero_points) if search else make(there)
    return Weight(*(part.to(given.device) for part in made))
