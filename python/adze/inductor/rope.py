"""rope in a functional graph: rotations of q and k written in torch's ops, with or without their norms, as one call.

Halves are `x * cos + cat(-x[half:], x[:half]) * sin`, as transformers writes them. Pairs are `x * cos +
stack(-x[1::2], x[::2]) * sin` in float, as diffusers writes them; they are replaced together with their norms."""

import dataclasses

import torch
from torch import fx

from ..operators._ops import ops as operators
from ..operators.ops import ROUND_NORM, ROUND_STEPS, ROUND_VALUE
from .chains import insert_call, item, new_node, same

aten, prims = torch.ops.aten, torch.ops.prims
RESHAPES = (aten.reshape.default, aten.view.default)
HALVES, PAIRS = 0, 1


def _is(node, *targets):
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _shape(node):
    return tuple(node.meta["val"].shape)


def _dtype(node):
    return node.meta["val"].dtype


def _either(node, test):
    """The two operands of a node, with the one that passes the test first; None when neither does."""
    a, b = node.args[:2]
    return (a, b) if test(a) else (b, a) if test(b) else None


def _uncast(node):
    """The input of a cast. Models in f32 have no cast."""
    return node.args[0] if _is(node, prims.convert_element_type.default) else node


def _last(axis, node):
    return axis in (-1, len(_shape(node)) - 1)


# ---- What a rotation is ----


def _turned_halves(node):
    """x of cat([-x[..., half:], x[..., :half]], -1), or None."""
    if not _is(node, aten.cat.default) or len(node.args[0]) != 2 or not _is(node.args[0][0], aten.neg.default):
        return None
    high, low = node.args[0][0].args[0], node.args[0][1]
    if not (_is(high, aten.slice.Tensor) and _is(low, aten.slice.Tensor)) or high.args[0] is not low.args[0]:
        return None
    x = high.args[0]
    half = _shape(x)[-1] // 2
    axis = node.args[1] if len(node.args) > 1 else 0
    if not (_last(axis, x) and _last(high.args[1], x) and _last(low.args[1], x)):
        return None
    return (
        x if high.args[2] == half and low.args[2] == 0 and low.args[3] == half and half * 2 == _shape(x)[-1] else None
    )


def _stacked(node):
    """The two nodes of stack([a, b], -1), or None."""
    if not _is(node, aten.cat.default, aten.stack.default) or len(node.args[0]) != 2 or len(node.args) != 2:
        return None
    if not _last(node.args[1], node):
        return None
    if node.target is aten.stack.default:
        return node.args[0]
    if not all(_is(a, aten.unsqueeze.default) and _last(a.args[1], node) for a in node.args[0]):
        return None
    return [a.args[0] for a in node.args[0]]


def _turned_pairs(node):
    """x of stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2), or None."""
    both = _stacked(node.args[0]) if _is(node, *RESHAPES) else None
    if both is None or not _is(both[0], aten.neg.default):
        return None
    odd, even = item(both[0].args[0]), item(both[1])
    if odd is None or even is None or odd[0] is not even[0] or (odd[2], even[2]) != (1, 0):
        return None
    pairs = odd[0]
    if not _last(odd[1], pairs) or not _last(even[1], pairs) or not _is(pairs, *RESHAPES):
        return None
    x = pairs.args[0]
    dim = _shape(x)[-1]
    return x if same(_shape(pairs), (*_shape(x)[:-1], dim // 2, 2)) and same(_shape(node), _shape(x)) else None


@dataclasses.dataclass
class Rotation:
    out: fx.Node
    x: fx.Node  # halves: [batch, heads, seq, dim]; pairs: [batch, seq, dim] or [batch, seq, heads, dim]
    cos: fx.Node  # [batch or 1, seq, dim] or [seq, dim]
    sin: fx.Node
    views: tuple  # cos and sin as they multiply x
    pairs: int


def _operands(node, turned):
    """(x, cos, sin) of x * cos + turned(x) * sin, where x may be cast before each product; or None."""
    if not _is(node, aten.add.Tensor) or node.kwargs or not all(_is(a, aten.mul.Tensor) for a in node.args[:2]):
        return None

    def turns(a):
        return isinstance(a, fx.Node) and turned(_uncast(a)) is not None

    pair = _either(node, lambda product: any(turns(a) for a in product.args))
    if pair is None:
        return None
    other, sin = _either(pair[0], turns)
    x = turned(_uncast(other))
    straight = _either(pair[1], lambda a: isinstance(a, fx.Node) and _uncast(a) is x or a is x)
    if straight is None or not isinstance(straight[1], fx.Node) or not isinstance(sin, fx.Node):
        return None
    if {_dtype(other), _dtype(straight[0])} != {_dtype(node)}:
        return None
    return x, straight[1], sin


def _halves(node):
    found = _operands(node, _turned_halves)
    if found is None or not all(_is(t, aten.unsqueeze.default) and t.args[1] == 1 for t in found[1:]):
        return None
    x, *views = found
    cos, sin = (view.args[0] for view in views)
    if len(_shape(x)) != 4 or len(_shape(cos)) != 3 or not same(_shape(cos), _shape(sin)):
        return None
    if _dtype(cos) != _dtype(x) or _shape(cos)[-1] != _shape(x)[-1] or _dtype(node) != _dtype(x):
        return None
    return Rotation(node, x, cos, sin, tuple(views), HALVES)


def _table(view, x):
    """The table behind a view that broadcasts it over the heads of x, or None."""
    table = view
    while _is(table, aten.unsqueeze.default):
        table = table.args[0]
    batch, seq, *heads, dim = _shape(x)
    shape = _shape(table)
    if len(shape) not in (2, 3) or not same(shape[-2:], (seq, dim)):
        return None
    first = shape[0] if len(shape) == 3 else 1
    if not same(_shape(view), (first, seq, *(1 for _ in heads), dim)) or not (same(first, 1) or same(first, batch)):
        return None
    return table if _dtype(table) in (torch.float32, _dtype(x)) else None


def _pairs(node):
    found = _operands(node, _turned_pairs)
    if found is None or _dtype(node) != torch.float32 or len(_shape(found[0])) not in (3, 4):
        return None
    x, *views = found
    cos, sin = (_table(view, x) for view in views)
    if cos is None or sin is None or not same(_shape(cos), _shape(sin)):
        return None
    out = node
    if _dtype(x) != torch.float32:
        out = next(iter(node.users)) if len(node.users) == 1 else None
        if not _is(out, prims.convert_element_type.default) or _dtype(out) != _dtype(x):
            return None
    return Rotation(out, x, cos, sin, tuple(views), PAIRS)


# ---- What a norm is ----


@dataclasses.dataclass
class Norm:
    x: fx.Node
    weight: fx.Node
    eps: float
    rounding: int


def _scaled(node):
    """(x, eps) of f * rsqrt(mean(f^2) + eps) in float, f being x, or None."""
    pair = _either(node, lambda a: _is(a, aten.rsqrt.default)) if _is(node, aten.mul.Tensor) else None
    if pair is None:
        return None
    total, wide = pair[0].args[0], pair[1]
    if not _is(total, aten.add.Tensor, aten.add.Scalar) or not isinstance(total.args[1], float):
        return None
    mean = total.args[0]
    if not _is(mean, aten.mean.dim) or list(mean.args[1]) not in ([-1], [len(_shape(node)) - 1]):
        return None
    square = mean.args[0]
    if not _is(square, aten.pow.Tensor_Scalar) or square.args != (wide, 2) or _dtype(wide) != torch.float32:
        return None
    return _uncast(wide), total.args[1]


def _norm(node):
    """The norm over the last dimension that a node computes: in Llama's order, which rounds before it multiplies by
    the weight, or in torch's, which rounds after that. None when it is neither."""
    product = _uncast(node)
    if not _is(product, aten.mul.Tensor):
        return None
    early = product is node
    inner = _uncast if early else (lambda a: a)
    pair = _either(product, lambda a: isinstance(a, fx.Node) and _scaled(inner(a)) is not None)
    if pair is None or not isinstance(pair[1], fx.Node) or not same(_shape(pair[1]), _shape(product)[-1:]):
        return None
    x, eps = _scaled(inner(pair[0]))
    if _dtype(pair[0]) != (_dtype(node) if early else torch.float32):
        return None
    if {_dtype(x), _dtype(pair[1])} != {_dtype(node)} or not same(_shape(x), _shape(node)):
        return None
    return Norm(x, pair[1], eps, ROUND_NORM if early else 0)


def _norms(q, k):
    """The norms of what is rotated, or None. Halves are permuted after they are normed."""
    sources = [q.x, k.x]
    if q.pairs == HALVES:
        if not all(_is(x, aten.permute.default) and list(x.args[1]) == [0, 2, 1, 3] for x in sources):
            return None
        sources = [x.args[0] for x in sources]
    norms = [_norm(x) for x in sources]
    if None in norms or norms[0].eps != norms[1].eps or norms[0].rounding != norms[1].rounding:
        return None
    inputs = {n for norm in norms for n in (norm.x, norm.weight)}
    return norms if _whole((q.out, k.out), inputs | {*q.views, *k.views}) else None


def _whole(outputs, inputs):
    """Whether no other node reads a value between the inputs and the outputs. Others may read sizes."""
    inner, waiting = set(), list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in inner and node not in inputs and not isinstance(node.meta["val"], torch.SymInt):
            inner.add(node)
            waiting += node.all_input_nodes
    return all(user in inner for node in inner if node not in outputs for user in node.users)


# ---- The call ----


def _seq_first(graph, node):
    """[batch, seq, heads, dim] of a node that is [batch, heads, seq, dim], and the other way round."""
    return new_node(graph, aten.permute.default, (node, [0, 2, 1, 3]), node)


def _call(graph, q, k, norms):
    """The operator and its arguments. Results are [batch, seq, heads, dim] in memory, as in the models, so that their
    readers get the strides that the graph has recorded."""
    if not norms:
        return operators.rope.k_out, (
            _seq_first(graph, q.x),
            _seq_first(graph, k.x),
            q.cos,
            q.sin,
            0,
            0,
            0,
            ROUND_STEPS,
        )
    inputs = [norm.x for norm in norms]
    if len(_shape(inputs[0])) == 3:
        inputs = [new_node(graph, aten.unsqueeze.default, (x, 2), x) for x in inputs]
    rounding = norms[0].rounding | (ROUND_VALUE if q.pairs else ROUND_STEPS)
    weights = [norm.weight for norm in norms]
    return operators.qk_norm_rope.k_out, (
        *inputs,
        *weights,
        q.cos,
        q.sin,
        norms[0].eps,
        0.0,
        0,
        q.pairs,
        0,
        0,
        rounding,
    )


def _as_given(graph, result, rotation):
    """A result, with the shape of the node that it replaces."""
    if rotation.pairs == HALVES:
        return _seq_first(graph, result)
    return result if len(_shape(rotation.out)) == 4 else new_node(graph, aten.select.int, (result, 2, 0), result)


def _usable(q, k):
    """Whether one call can rotate both."""
    if q.pairs != k.pairs or _dtype(q.x) != _dtype(k.x) or len(_shape(q.x)) != len(_shape(k.x)):
        return False
    if not same(_shape(q.x)[0], _shape(k.x)[0]):
        return False
    outs = [r.out.meta["val"] for r in (q, k)]
    return all((out.permute(0, 2, 1, 3) if q.pairs == HALVES else out).is_contiguous() for out in outs)


def replace(graph, devices):
    """How many pairs of rotations were replaced, by the name of the chain."""
    counts, waiting = {}, {}
    for node in list(graph.nodes):
        k = _halves(node) or _pairs(node)
        if k is None or k.x.meta["val"].device.type not in devices:
            continue
        q = waiting.pop((k.cos, k.sin), None)
        if q is None:
            waiting[(k.cos, k.sin)] = k
            continue
        norms = _norms(q, k) if _usable(q, k) else None
        if not _usable(q, k) or (q.pairs and not norms):
            continue
        target, args = _call(graph, q, k, norms)
        results = insert_call(graph, target, args, [q.out, k.out])
        if results is None:
            graph.eliminate_dead_code()
            continue
        for rotation, result in zip((q, k), results, strict=True):
            made = _as_given(graph, result, rotation)
            rotation.out.replace_all_uses_with(made)
        graph.eliminate_dead_code()
        name = "rope of q and k" if not norms else "qk-norm, interleaved rope" if q.pairs else "qk-norm, rope"
        counts[name] = counts.get(name, 0) + 1
    return counts
