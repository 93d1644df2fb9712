"""Chains of torch ops in a functional graph, found by the shape of their computation and replaced by one call.

A chain is written as a plain function. Traced, it is a pattern: its inputs stand for any node, its operations for
themselves (sums and products in either order), and one number, EPS, for any number.
"""

import dataclasses
import inspect
import operator
from collections.abc import Callable

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
EPS = 1.25 * 2**-16  # exact in float, which some formulas round it to
EITHER_ORDER = (aten.add.Tensor, aten.mul.Tensor)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass
class Chain:
    """search(tensors..., eps): the formula. kinds: of each tensor "x" (all of one shape), "weight" ([dim]) or "row"
    (of x's last dimension, broadcast to it). call(tensors..., eps): the operator and its arguments."""

    name: str
    search: Callable
    call: Callable
    kinds: str

    def __post_init__(self):
        self.inputs = [n for n in inspect.signature(self.search).parameters if n != "eps"]
        self.has_eps = "eps" in inspect.signature(self.search).parameters
        self.kinds = dict(zip(self.inputs, self.kinds.split(), strict=True))


def _traced(chain, dtype, rank):
    """The chain as Inductor's graphs have it."""
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
    """Most chains look alike in every rank, and in every dtype but f32."""
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

    def copy(self):
        return _Match(dict(self.nodes), self.eps)

    def take(self, other):
        self.nodes, self.eps = other.nodes, other.eps
        return True


def _unify(pattern, found, match):
    if isinstance(pattern, fx.Node):
        if not isinstance(found, fx.Node):
            return False
        if pattern in match.nodes:
            return match.nodes[pattern] is found
        if pattern.op != "placeholder":
            if found.op != "call_function" or found.target is not pattern.target:
                return False
            if pattern.kwargs != found.kwargs or len(pattern.args) != len(found.args):
                return False
            orders = [found.args]
            if pattern.target in EITHER_ORDER:
                orders.append((found.args[1], found.args[0]))
            for args in orders:
                trial = match.copy()
                if all(_unify(p, f, trial) for p, f in zip(pattern.args, args, strict=True)):
                    match.take(trial)
                    break
            else:
                return False
        match.nodes[pattern] = found
        return True
    if isinstance(pattern, float) and pattern == EPS:
        if not isinstance(found, float) or (match.eps is not None and match.eps != found):
            return False
        match.eps = found
        return True
    if isinstance(pattern, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(pattern) == len(found) and all(_unify(p, f, match) for p, f in zip(pattern, found, strict=True))
    return type(pattern) is type(found) and pattern == found


def _fits(chain, tensors, devices):
    """Whether the op takes these tensors: plain floats on one device, of the shapes the chain is about."""
    x = tensors[0]
    if x.device.type not in devices or x.dtype not in DTYPES or not 1 <= x.dim() <= 5:
        return False
    for kind, t in zip(chain.kinds.values(), tensors, strict=True):
        if t.device != x.device or t.dim() < 1 or t.stride(-1) != 1:
            return False
        if t.dtype != x.dtype and not (kind == "weight" and t.dtype == torch.float32):
            return False
        if (kind == "x" and t.shape != x.shape) or (kind == "weight" and t.shape != x.shape[-1:]):
            return False
        if kind == "row" and (t.shape[-1] != x.shape[-1] or t.dim() > x.dim()):
            return False
    return True


def insert_call(graph, target, args, outputs, inputs, inner=()):
    """The call and its results, which are to stand for `outputs`. What reads one of them, and is not an inner node,
    before all inputs are there, moves behind the call; None when an input depends on it."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    after = max(inputs, key=order.__getitem__)
    readers = {user for out in outputs for user in out.users if user not in inner}
    late = {}  # in their order
    for node in list(graph.nodes)[: order[after] + 1]:
        if node in readers or any(n in late for n in node.all_input_nodes):
            late[node] = None
    if any(n in late for n in inputs):
        return None
    while after.op == "placeholder" and after.next.op == "placeholder":
        after = after.next
    with graph.inserting_after(after):
        call = graph.call_function(target, args)
    values = tuple(out.meta["val"] for out in outputs)
    call.meta["val"] = values if len(values) > 1 else values[0]
    results, last = [call], call
    if len(outputs) > 1:
        results = []
        for at, value in enumerate(values):
            with graph.inserting_after(last):
                last = graph.call_function(operator.getitem, (call, at))
            last.meta["val"] = value
            results.append(last)
    for node in late:
        last.append(node)
        last = node
    return results


def _replace(graph, chain, pattern, devices):
    inputs = [n for n in pattern.nodes if n.op == "placeholder"]
    (ends,) = next(n for n in pattern.nodes if n.op == "output").args
    ends = list(ends) if isinstance(ends, (list, tuple)) else [ends]
    count = 0
    for node in reversed(list(graph.nodes)):
        match = _Match()
        if node.op != "call_function" or not _unify(ends[0], node, match) or any(e not in match.nodes for e in ends):
            continue
        given = [match.nodes.get(n) for n in inputs]
        outputs = [match.nodes[e] for e in ends]
        inner = {found for found in match.nodes.values() if found not in given}
        if None in given or any(n.meta.get("val") is None for n in given):
            continue
        if any(user not in inner for n in inner if n not in outputs for user in n.users):
            continue  # a step of the chain is read elsewhere: it would have to be computed anyway
        if not _fits(chain, [n.meta["val"] for n in given], devices):
            continue
        if any(out.meta["val"].dtype != given[0].meta["val"].dtype for out in outputs):
            continue
        target, args = chain.call(*given, *((match.eps,) if chain.has_eps else ()))
        results = insert_call(graph, target, args, outputs, given, inner)
        if results is None:
            continue
        for out, result in zip(outputs, results, strict=True):
            out.replace_all_uses_with(result, delete_user_cb=lambda user, inner=inner: user not in inner)
        graph.eliminate_dead_code()
        count += 1
    return count


def replace(graph, chain, traced, devices):
    """How often the chain was found and replaced."""
    return sum(_replace(graph, chain, pattern, devices) for pattern in traced)
