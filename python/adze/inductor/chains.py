"""Chains of torch ops in a functional graph, found by the shape of their computation and replaced by one call.

A chain is written as a plain function. Traced, it is a pattern: its inputs stand for any node, its operations for
themselves (sums and products in either order), and one number, EPS, for any number.

This is not torch's own pattern_matcher, because that compares operands in one order only and takes the first match: a
chain of sums and products would need a pattern for each order, and the match in which the gate is a row of a table
could not be preferred.
"""

import dataclasses
import inspect
import operator
import sys
from collections.abc import Callable

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

aten = torch.ops.aten
EPS = 1.25 * 2**-16  # exact in float, which some formulas round it to
EITHER_ORDER = (aten.add.Tensor, aten.mul.Tensor)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass
class Chain:
    """search(tensors..., eps): the formula. kinds: for each tensor "x" (all of one shape), "weight" ([dim]) or "row"
    (with x's last dimension, broadcast to x). call(tensors..., eps): the operator and its arguments. Where search
    also returns a sum, and a node reads it, the overload that returns the sum is called. pays(x, out): whether to
    replace a match, for chains that are not always faster."""

    name: str
    search: Callable
    call: Callable
    kinds: str
    pays: Callable = lambda x, out: True

    def __post_init__(self):
        self.inputs = [n for n in inspect.signature(self.search).parameters if n != "eps"]
        self.has_eps = "eps" in inspect.signature(self.search).parameters
        self.kinds = dict(zip(self.inputs, self.kinds.split(), strict=True))


def _traced(chain, dtype, rank):
    """The graph of the chain, with the decompositions that Inductor uses."""
    from torch._inductor.decomposition import select_decomp_table

    shape = (2, 3, 5, 8)[-rank:]
    example = {
        "x": torch.empty(shape, dtype=dtype),
        "weight": torch.empty(8, dtype=dtype),
        "row": torch.empty((*shape[:-2], 1, 8), dtype=dtype),
    }
    eps = (EPS,) if chain.has_eps else ()

    def search(*tensors):
        return chain.search(*tensors, *eps)

    with torch.no_grad():
        args = [example[chain.kinds[n]].clone() for n in chain.inputs]
        graph = make_fx(search, decomposition_table=select_decomp_table())(*args).graph
    graph.eliminate_dead_code()
    for node in graph.nodes:  # a functional graph has the sum that F.rms_norm writes in place as a new one
        if node.target is aten.add_.Scalar:
            node.target = aten.add.Scalar
    return graph


def patterns(chain):
    """The distinct graphs of a chain. Most chains have the same graph for every rank, and for every dtype but f32."""
    made = {}
    for dtype in DTYPES:
        for rank in (2, 3, 4):
            graph = _traced(chain, dtype, rank)
            made.setdefault(str(graph), graph)
    return list(made.values())


class _Match:
    """Nodes of a pattern, and the nodes of the graph that they stand for."""

    def __init__(self, nodes=None, eps=None):
        self.nodes, self.eps = nodes or {}, eps

    def having(self, pattern, found):
        return _Match({**self.nodes, pattern: found}, self.eps)


def _matches(pattern, found, match):
    """Every extension of the match in which `found` matches the pattern."""
    if isinstance(pattern, fx.Node):
        if not isinstance(found, fx.Node):
            return
        if pattern in match.nodes:
            if match.nodes[pattern] is found:
                yield match
        elif pattern.op == "placeholder":
            yield match.having(pattern, found)
        elif found.op == "call_function" and found.target is pattern.target and found.kwargs == pattern.kwargs:
            orders = [found.args]
            if pattern.target in EITHER_ORDER:
                orders.append((found.args[1], found.args[0]))
            for args in orders:
                for made in _all_match(pattern.args, args, match):
                    yield made.having(pattern, found)
    elif isinstance(pattern, float) and pattern == EPS:
        if isinstance(found, float) and match.eps in (None, found):
            yield _Match(match.nodes, found)
    elif isinstance(pattern, (list, tuple)) and isinstance(found, (list, tuple)):
        yield from _all_match(pattern, found, match)
    elif type(pattern) is type(found) and pattern == found:
        yield match


def _all_match(patterns, found, match):
    if len(patterns) != len(found):
        return
    if not patterns:
        yield match
        return
    for made in _matches(patterns[0], found[0], match):
        yield from _all_match(patterns[1:], found[1:], made)


def same(a, b):
    """Whether two sizes or shapes are known to be equal without adding a guard."""
    return statically_known_true(sym_eq(a, b))


def _fits(chain, tensors, outputs, devices):
    """Whether the op accepts these tensors: float dtypes, one device, the shapes of the chain's kinds."""
    x = tensors[0]
    if x.device.type not in devices or x.dtype not in DTYPES or not 1 <= x.dim() <= 5:
        return False
    for kind, t in zip(chain.kinds.values(), tensors, strict=True):
        if t.device != x.device or t.dim() < 1 or t.stride(-1) != 1:
            return False
        if t.dtype != x.dtype and not (kind == "weight" and t.dtype == torch.float32):
            return False
        if (kind == "x" and not same(t.shape, x.shape)) or (kind == "weight" and not same(t.shape, x.shape[-1:])):
            return False
        if kind == "row" and (not same(t.shape[-1], x.shape[-1]) or t.dim() > x.dim()):
            return False
    return all(out.dtype == x.dtype and same(out.shape, x.shape) and out.is_contiguous() for out in outputs)


# ---- Nodes ----


def new_node(graph, target, args, after):
    """Inserts a node after another one, with the fake value in its meta that Inductor needs."""
    while after.op == "placeholder" and after.next.op == "placeholder":
        after = after.next
    with graph.inserting_after(after):
        made = graph.call_function(target, args)
    with torch.no_grad():
        made.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
    return made


def item(node):
    """(source, dim, index) of a node that selects one index of another along a dimension, or None."""
    if node.target is aten.select.int:
        source, dim, index = node.args
    elif node.target is operator.getitem and getattr(node.args[0], "target", None) is aten.unbind.int:
        source, dim, index = node.args[0].args[0], (*node.args[0].args, 0)[1], node.args[1]
    else:
        return None
    return (source, dim % source.meta["val"].dim(), index) if isinstance(index, int) and index >= 0 else None


def _selected(graph, node, dim, index):
    """One index of a node along a dimension, without leading dimensions of one element."""
    made = new_node(graph, aten.select.int, (node, dim, index), node)
    while made.meta["val"].dim() > 1 and same(made.meta["val"].shape[0], 1):
        made = new_node(graph, aten.select.int, (made, 0, 0), made)
    return made


def rejoin(graph, devices):
    """Removes a cat of all slices of a sum, in order: one block splits a sequence into text and image, and the next
    one concatenates them again. A cat that is an output of the graph stays, since outputs must be copies."""
    for node in list(graph.nodes):
        if node.target is not aten.cat.default or any(user.op == "output" for user in node.users):
            continue
        parts, dim = node.args[0], (*node.args, 0)[1]
        if any(part.target is not aten.slice.Tensor or len(part.args) != 4 or part.kwargs for part in parts):
            continue
        source = parts[0].args[0]
        rank, begin = source.meta["val"].dim(), 0
        if source.target is not aten.add.Tensor or source.meta["val"].device.type not in devices:
            continue
        for part in parts:
            if part.args[0] is not source or part.args[1] % rank != dim % rank or part.args[2] != begin:
                break
            begin = part.args[3]
        else:
            if begin == sys.maxsize and same(node.meta["val"].shape, source.meta["val"].shape):
                node.replace_all_uses_with(source)
                graph.erase_node(node)


def _terms(node):
    """Where a node selects a row of a sum: the two terms, with the dimension and the index of the row in each. None
    where it does not, or where the ops cannot take these rows."""
    found = item(node) if isinstance(node, fx.Node) and node.op == "call_function" else None
    if found is None or found[0].target is not aten.add.Tensor or found[0].kwargs:
        return None
    source, dim, index = found
    total, terms = source.meta["val"], source.args
    if dim == total.dim() - 1 or not all(isinstance(t, fx.Node) for t in terms):
        return None
    values = [t.meta["val"] for t in terms]
    for value in values:
        if value.dim() != total.dim() or value.dtype != total.dtype or value.device != total.device:
            return None
        if value.stride(-1) != 1 or not same(value.shape[-1], total.shape[-1]):
            return None
    return [(t, dim, 0 if same(v.shape[dim], 1) else index) for t, v in zip(terms, values, strict=True)]


def parted(node):
    """(row, None); or, where the row is selected from a sum of a parameter and a computed tensor, the row of each.
    The ops add the two as they read them, so that the sum of all rows need not be written."""
    terms = _terms(node)
    if terms is None:
        return node, None
    rows = [_selected(node.graph, *term) for term in terms]
    return sorted(rows, key=lambda row: row.meta["val"].dim(), reverse=True)


def insert_call(graph, target, args, outputs, inner=()):
    """Inserts the call after its last input, and returns the nodes that replace `outputs`. Readers of an output that
    come earlier, other than inner nodes, move behind the call. None when an input depends on such a reader."""
    inputs = [a for a in args if isinstance(a, fx.Node)]
    order = {node: at for at, node in enumerate(graph.nodes)}
    after = max(inputs, key=order.__getitem__)
    readers = {user for out in outputs for user in out.users if user not in inner}
    moved = {}  # nodes that must come after the call, in their order
    for node in list(graph.nodes)[: order[after] + 1]:
        if node in readers or any(n in moved for n in node.all_input_nodes):
            moved[node] = None
    if any(n in moved for n in inputs):
        return None
    call = last = new_node(graph, target, args, after)
    results = [call]
    if len(outputs) > 1:
        results = []
        for at in range(len(outputs)):
            last = new_node(graph, operator.getitem, (call, at), last)
            results.append(last)
    for node in moved:
        last.append(node)
        last = node
    return results


def _parts(match, inputs, ends):
    given, outputs = [match.nodes[n] for n in inputs], [match.nodes[e] for e in ends]
    return given, outputs, {found for found in match.nodes.values() if found not in given}


def _usable(chain, match, inputs, ends, devices):
    if any(n not in match.nodes for n in (*inputs, *ends)):
        return False
    given, outputs, inner = _parts(match, inputs, ends)
    if any(not isinstance(n.meta.get("val"), torch.Tensor) for n in given):
        return False
    if any(user not in inner for n in inner if n not in outputs for user in n.users):
        return False  # another node reads an intermediate step, which would have to be computed anyway
    if not _fits(chain, [n.meta["val"] for n in given], [n.meta["val"] for n in outputs], devices):
        return False
    return chain.pays(given[0], outputs[0])


def _rows_of_sums(chain, match, inputs):
    """How many rows are selected from a sum. A gate per token has the shape of the tensor that it multiplies, and
    this tells which of the two is the gate."""
    kinds = zip(chain.kinds.values(), inputs, strict=True)
    return sum(_terms(match.nodes[n]) is not None for kind, n in kinds if kind == "row")


def _interface(pattern):
    """The nodes of a pattern that stand for its inputs, and those that are its results."""
    inputs = [n for n in pattern.nodes if n.op == "placeholder"]
    (ends,) = next(n for n in pattern.nodes if n.op == "output").args
    return inputs, list(ends) if isinstance(ends, (list, tuple)) else [ends]


def ending_at(node, chain, traced, devices):
    """Each use of a chain whose result is this node, where no other node reads a step of it: the nodes of its inputs,
    its own nodes, and its eps."""
    for pattern in traced:
        inputs, ends = _interface(pattern)
        for made in _matches(ends[0], node, _Match()):
            if _usable(chain, made, inputs, ends, devices):
                given, _, inner = _parts(made, inputs, ends)
                yield given, inner, made.eps


def _replace(graph, chain, pattern, devices):
    inputs, ends = _interface(pattern)
    count = 0
    for node in reversed(list(graph.nodes)):
        usable = [m for m in _matches(ends[0], node, _Match()) if _usable(chain, m, inputs, ends, devices)]
        if not usable:
            continue
        made = max(usable, key=lambda m: _rows_of_sums(chain, m, inputs))
        given, outputs, inner = _parts(made, inputs, ends)
        outputs = outputs[:1] + [out for out in outputs[1:] if any(user not in inner for user in out.users)]
        op, args = chain.call(*given, *((made.eps,) if chain.has_eps else ()))
        target = op.sum if len(outputs) > 1 else op.default
        results = insert_call(graph, target, args, outputs, inner)
        if results is None:
            graph.eliminate_dead_code()
            continue
        for out, result in zip(outputs, results, strict=True):
            out.replace_all_uses_with(result, delete_user_cb=lambda user, inner=inner: user not in inner)
        graph.eliminate_dead_code()
        count += 1
    return count


def replace(graph, chain, traced, devices):
    """How often the chain was found and replaced."""
    return sum(_replace(graph, chain, pattern, devices) for pattern in traced)
