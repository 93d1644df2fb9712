"""rope in a functional graph: rotations of q and k written in torch's ops, with or without their norms, as one call.

Halves are `x * cos + cat(-x[half:], x[:half]) * sin`, as transformers writes them."""

import dataclasses

import torch
from torch import fx

from ._ops import ops as operators
from .chains import insert_call
from .ops import ROUND_NORM, ROUND_STEPS

aten, prims = torch.ops.aten, torch.ops.prims


def _is(node, *targets):
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _shape(node):
    return tuple(node.meta["val"].shape)


def _either(node, test):
    """The two arguments of a sum or product, the one that passes the test first; None when neither does."""
    a, b = node.args[:2]
    return (a, b) if test(a) else (b, a) if test(b) else None


def _turned(node):
    """x of cat([-x[..., half:], x[..., :half]], -1), or None."""
    if not _is(node, aten.cat.default) or len(node.args[0]) != 2 or not _is(node.args[0][0], aten.neg.default):
        return None
    high, low = node.args[0][0].args[0], node.args[0][1]
    if not (_is(high, aten.slice.Tensor) and _is(low, aten.slice.Tensor)) or high.args[0] is not low.args[0]:
        return None
    x, rank = high.args[0], len(_shape(high.args[0]))
    half = _shape(x)[-1] // 2
    axis = node.args[1] if len(node.args) > 1 else 0
    if axis not in (-1, rank - 1) or high.args[1] not in (-1, rank - 1) or low.args[1] not in (-1, rank - 1):
        return None
    return (
        x if high.args[2] == half and low.args[2] == 0 and low.args[3] == half and half * 2 == _shape(x)[-1] else None
    )


@dataclasses.dataclass
class Rotation:
    out: fx.Node
    x: fx.Node  # [batch, heads, seq, dim]
    cos: fx.Node  # [batch or 1, seq, dim]
    sin: fx.Node


def _table(node):
    """The [batch, seq, dim] of an unsqueezed table."""
    return node.args[0] if _is(node, aten.unsqueeze.default) and node.args[1] == 1 else None


def _rotation(node):
    if not _is(node, aten.add.Tensor) or node.kwargs or not all(_is(a, aten.mul.Tensor) for a in node.args[:2]):
        return None
    pair = _either(node, lambda product: any(_turned(a) is not None for a in product.args))
    if pair is None:
        return None
    turned, sin = _either(pair[0], lambda a: _turned(a) is not None)
    x = _turned(turned)
    straight = _either(pair[1], lambda a: a is x)
    if straight is None:
        return None
    cos, sin = _table(straight[1]), _table(sin)
    if cos is None or sin is None or len(_shape(x)) != 4 or len(_shape(cos)) != 3 or _shape(cos) != _shape(sin):
        return None
    val = x.meta["val"]
    if cos.meta["val"].dtype != val.dtype or _shape(cos)[-1] != _shape(x)[-1] or node.meta["val"].dtype != val.dtype:
        return None
    return Rotation(node, x, cos, sin)


@dataclasses.dataclass
class Norm:
    x: fx.Node  # [batch, seq, heads, dim]
    weight: fx.Node
    eps: float


def _uncast(node):
    """What a cast is of; in f32 there is none."""
    return node.args[0] if _is(node, prims.convert_element_type.default) else node


def _norm(node):
    """The per-head norm, in Llama's order, that a rotation reads through a permutation."""
    if not _is(node, aten.permute.default) or list(node.args[1]) != [0, 2, 1, 3]:
        return None
    product = node.args[0]
    if not _is(product, aten.mul.Tensor):
        return None

    def rooted(a):
        scaled = _uncast(a)
        return _is(scaled, aten.mul.Tensor) and _either(scaled, lambda b: _is(b, aten.rsqrt.default)) is not None

    pair = _either(product, rooted)
    if pair is None or not isinstance(pair[1], fx.Node) or _shape(pair[1]) != _shape(product)[-1:]:
        return None
    root, wide = _either(_uncast(pair[0]), lambda a: _is(a, aten.rsqrt.default))
    total = root.args[0]
    if (
        not _is(total, aten.add.Tensor)
        or not isinstance(total.args[1], float)
        or not _is(total.args[0], aten.mean.dim)
    ):
        return None
    mean = total.args[0]
    square, rank = mean.args[0], len(_shape(product))
    if list(mean.args[1]) not in ([-1], [rank - 1]) or not _is(square, aten.pow.Tensor_Scalar) or square.args[1] != 2:
        return None
    x = _uncast(wide)
    dtypes = [n.meta["val"].dtype for n in (x, wide, pair[0], product)]
    if square.args[0] is not wide or dtypes[1] != torch.float32 or {dtypes[0], dtypes[2]} != {dtypes[3]}:
        return None
    return Norm(x, pair[1], total.args[1])


def _seq_first(graph, node):
    """[batch, seq, heads, dim] of a node that is [batch, heads, seq, dim]."""
    with graph.inserting_after(node):
        made = graph.call_function(aten.permute.default, (node, [0, 2, 1, 3]))
    made.meta["val"] = node.meta["val"].permute(0, 2, 1, 3)
    return made


def _call(graph, q, k, norms):
    """The operator, its arguments, and the nodes it needs. Results are [batch, seq, heads, dim], as the models' views
    are in memory: who reads them next finds the strides that the graph promises."""
    if norms:
        nq, nk = norms
        inputs = [nq.x, nk.x, nq.weight, nk.weight, q.cos, q.sin]
        return operators.qk_norm_rope.k_out, (*inputs, nq.eps, 0.0, 0, 0, 0, 0, ROUND_NORM | ROUND_STEPS), inputs
    inputs = [_seq_first(graph, q.x), _seq_first(graph, k.x), q.cos, q.sin]
    return operators.rope.k_out, (*inputs, 0, 0, 0, ROUND_STEPS), inputs


def replace(graph, devices):
    """How many pairs of rotations were replaced, by the name of the chain."""
    counts, waiting = {}, {}
    for node in list(graph.nodes):
        k = _rotation(node)
        if k is None or k.x.meta["val"].device.type not in devices:
            continue
        q = waiting.pop((k.cos, k.sin), None)
        if q is None:
            waiting[(k.cos, k.sin)] = k
            continue
        if q.x.meta["val"].dtype != k.x.meta["val"].dtype or _shape(q.x)[0] != _shape(k.x)[0]:
            continue
        if not all(r.out.meta["val"].permute(0, 2, 1, 3).is_contiguous() for r in (q, k)):
            continue
        norms = [_norm(q.x), _norm(k.x)]
        norms = norms if all(norms) and norms[0].eps == norms[1].eps else None
        target, args, inputs = _call(graph, q, k, norms)
        results = insert_call(graph, target, args, [q.out, k.out], inputs)
        if results is None:
            continue
        for result in results:
            result.meta["val"] = result.meta["val"].permute(0, 2, 1, 3)
        results[0].args[0].meta["val"] = tuple(result.meta["val"] for result in results)
        for rotation, result in zip((q, k), results, strict=True):
            with graph.inserting_after(results[1]):
                result = graph.call_function(aten.permute.default, (result, [0, 2, 1, 3]))
            result.meta["val"] = rotation.out.meta["val"]
            rotation.out.replace_all_uses_with(result)
        graph.eliminate_dead_code()
        name = "qk-norm, rope" if norms else "rope of q and k"
        counts[name] = counts.get(name, 0) + 1
    return counts
