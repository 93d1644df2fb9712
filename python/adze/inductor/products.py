"""Products of few rows in a functional graph, with the norm before and the activation, the gate or the sum after
them, as one gemm. This is for numerics="fast": a sum is added in another order, and what is fused is rounded once.

A product is mm or addmm with a weight that is an input or a constant of the graph. It is replaced with what is around
it where no other node reads a step between, and where the table of patching/products.py, which decides in eager too,
says that gemm is faster for so many rows. Where the number of rows is not known when the graph is compiled, its whole
range must be."""

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F
from torch import fx
from torch._inductor import config
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..operators._ops import ops
from ..operators.description import OPS
from ..operators.functions import ACTS, NORMS
from ..patching import products as eager
from . import chains
from .chains import Chain, same
from .formulas import BARE, GATES, ORDERS

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
MOST = 3  # weights of one gemm
FORMS = (None, ops.gemm.default, ops.gemm.out2, ops.gemm.out3) if hasattr(ops, "gemm") else ()
ACTIVATIONS = {**GATES, "relu": F.relu, "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x)}


def table():
    """What the choice depends on."""
    return eager.FASTER


# ---- What is before and after a product ----


def _norm(name, search, kinds, offset=0.0):
    """A norm as a chain; its call gives gemm's arguments."""

    def call(x, *parameters_and_eps):
        *parameters, eps = parameters_and_eps
        names = dict(zip(("norm_weight", "norm_bias"), parameters, strict=False))
        return {"norm": NORMS[name.removesuffix("_norm")], "weight_offset": offset, "eps": eps, **names}

    return Chain(name, search, call, kinds)


@functools.cache
def _norms():
    def layer_norm(x, weight, bias, eps):
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def without_bias(x, weight, eps):
        return F.layer_norm(x, (x.shape[-1],), weight, None, eps)

    def ordered(formula):
        return lambda x, weight, eps: formula(x, weight, eps)

    def bare(formula):
        return lambda x, eps: formula(x, eps)

    made = [_norm("rms_norm", ordered(formula), "x weight", offset) for formula, (offset, _) in ORDERS.values()]
    made += [_norm("layer_norm", layer_norm, "x weight weight"), _norm("layer_norm", without_bias, "x weight")]
    made += [_norm(name, bare(formula), "x") for name, _, formula in BARE]
    return [(chain, chains.patterns(chain)) for chain in made]


@functools.cache
def _activations():
    def plain(act):
        return lambda x: act(x)

    made = [Chain(name, plain(act), None, "x") for name, act in ACTIVATIONS.items() if name in ACTS]
    return [(chain, chains.patterns(chain)) for chain in made]


def _norm_before(node, devices):
    """(name, x, gemm's arguments) of the norm that a node is, or None."""
    for chain, traced in _norms():
        for given, _, eps in chains.ending_at(node, chain, traced, devices):
            return chain.name, given[0], chain.call(*given, eps)
    return None


@dataclasses.dataclass
class _Activation:
    out: fx.Node
    name: str
    inner: set


def _activations_of(graph, devices):
    """The activations of a graph, by the nodes that they read."""
    found = {}
    for node in graph.nodes:
        for chain, traced in _activations():
            for given, inner, _ in chains.ending_at(node, chain, traced, devices):
                found.setdefault(given[0], _Activation(node, chain.name, inner))
    return found


# ---- What a product is ----


@dataclasses.dataclass(eq=False)
class Product:
    node: fx.Node  # mm or addmm
    x: fx.Node  # [..., k]
    w: fx.Node  # [n, k]
    bias: fx.Node | None
    out: fx.Node  # the result, with the rows of x where the graph has it so

    @property
    def shape(self):
        return (*_value(self.x).shape[:-1], _value(self.w).shape[0])


def _value(node):
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _keeps_rows(node):
    """Whether a node is a view of another with the same rows."""
    if node.op != "call_function" or node.target not in VIEWS:
        return False
    shapes = [_value(n).shape for n in (node, node.args[0])]
    return all(shapes) and same(shapes[0][-1], shapes[1][-1])


def _source(node):
    while _keeps_rows(node):
        node = node.args[0]
    return node


def _readers(node):
    """The nodes that read a node or a view of its rows."""
    for user in node.users:
        if _keeps_rows(user):
            yield from _readers(user)
        else:
            yield user


def _with_rows(node, lead):
    """The node, or the view of it that has these dimensions before the last."""
    at = node
    while not same(_value(at).shape[:-1], lead):
        if len(at.users) != 1 or not _keeps_rows(next(iter(at.users))):
            return node
        at = next(iter(at.users))
    return at


def _given(node, dim):
    """Whether a node is an input or a constant of the graph that an op can take as it is."""
    value = _value(node)
    if not isinstance(value, torch.Tensor) or node.op not in ("placeholder", "get_attr"):
        return False
    return value.dim() == dim and all(isinstance(size, int) for size in value.shape) and value.stride(-1) == 1


def _product(node, devices):
    if node.op != "call_function" or node.kwargs or node.target not in (aten.mm.default, aten.addmm.default):
        return None
    *bias, x, turned = node.args
    if turned.op != "call_function" or turned.target not in (aten.permute.default, aten.t.default):
        return None
    w, bias, x = turned.args[0], bias[0] if bias else None, _source(x)
    if not _given(w, 2) or list(turned.args[1:]) not in ([], [[1, 0]]):
        return None
    value, weight = _value(x), _value(w)
    if bias is not None and not (_given(bias, 1) and same(_value(bias).shape, weight.shape[:1])):
        return None
    if value.device.type not in devices or not 1 <= value.dim() <= 5 or value.stride(-1) != 1:
        return None
    others = [weight, *([_value(bias)] if bias is not None else [])]
    if any(other.dtype != value.dtype or other.device != value.device for other in others):
        return None
    return Product(node, x, w, bias, _with_rows(node, value.shape[:-1]))


def _left(product):
    """Why the product stays Inductor's, or None. The table compares with torch's products, not with autotuned ones,
    which may have an epilogue."""
    if config.max_autotune or config.max_autotune_gemm:
        return "a graph whose products are autotuned"
    x = _value(product.x)
    most, rows = eager.rows_by_gemm(x.device, x.dtype), math.prod(x.shape[:-1])
    if not most:
        return f"{str(x.dtype).removeprefix('torch.')} on {x.device.type}"
    if statically_known_true(rows > most):
        return f"more than {most} rows"
    return None if statically_known_true(rows <= most) else f"rows that are not known to be at most {most}"


# ---- Calls ----


@dataclasses.dataclass
class _Call:
    name: str
    products: list
    outputs: list  # the nodes that it replaces
    inner: set  # steps that nobody else reads
    options: dict = dataclasses.field(default_factory=dict)
    x: fx.Node | None = None  # where it is not that of the products: what is normed


def _only_user(node, target):
    """The node that alone reads another, if it is a sum or product of two tensors, and the other operand; or None."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    if user.op != "call_function" or user.target is not target or user.kwargs or len(user.args) != 2:
        return None
    a, b = user.args
    if a is b or not isinstance(_value(a), torch.Tensor) or not isinstance(_value(b), torch.Tensor):
        return None
    return user, b if a is node else a


def _activated(product, acts):
    """The activation that alone reads the result of a product, or None."""
    act = acts.get(product.out)
    return act if act is not None and all(user in act.inner for user in product.out.users) else None


def _gated(gate, value, acts):
    """act(gate) * value of two products as a call, or None."""
    act = _activated(gate, acts)
    found = act and _only_user(act.out, aten.mul.Tensor)
    if not found or found[1] is not value.out or set(value.out.users) != {found[0]}:
        return None
    if not same(gate.shape, value.shape) or not same(_value(gate.out).shape, _value(value.out).shape):
        return None
    options = {"act": ACTS[act.name], "glu": 1}
    return _Call(f"2 products, {act.name} gate", [gate, value], [found[0]], act.inner | {value.out}, options)


def _single(product, acts):
    """A product with its activation and its residual."""
    words, options, inner, end = ["product"], {}, set(), product.out
    act = _activated(product, acts)
    if act is not None:
        words.append(act.name)
        options["act"] = ACTS[act.name]
        inner, end = act.inner, act.out
    found, value = _only_user(end, aten.add.Tensor), _value(end)
    if found is not None:
        user, residual = found
        other = _value(residual)
        like = same(other.shape, value.shape) and same(other.shape, product.shape) and other.stride(-1) == 1
        if like and other.dtype == value.dtype and other.device == value.device and _source(residual) is not end:
            words.append("residual")
            options["residual"] = residual
            inner, end = inner | {end}, user
    return _Call(", ".join(words), [product], [end], inner, options)


def _separate(products):
    return _Call(f"{len(products)} products", list(products), [p.out for p in products], set(), {"separate": 1})


def _with_norm(run, acts, devices):
    """A run of products and the norm that only they read as a call, or None."""
    x = run[0].x
    if len(run) > MOST or set(_readers(x)) != {product.node for product in run}:
        return None
    found = _norm_before(x, devices)
    if found is None:
        return None
    made = None
    if len(run) == 2:
        made = _gated(*run, acts) or _gated(*reversed(run), acts)
    made = made or (_single(run[0], acts) if len(run) == 1 else _separate(run))
    name, made.x, options = found
    made.name, made.options = f"{name}, {made.name}", {**made.options, **options}
    return made


def _without_norm(run, acts):
    """The calls for products that read the same x: gated pairs, those with something after them, then the others."""
    made, rest = [], list(run)
    for gate in run:
        for value in rest:
            pair = _gated(gate, value, acts) if gate in rest and value is not gate else None
            if pair is not None:
                made.append(pair)
                rest = [product for product in rest if product not in pair.products]
                break
    for product in list(rest):
        single = _single(product, acts)
        if single.options:
            made.append(single)
            rest.remove(product)
    made += [_separate(rest[at : at + MOST]) for at in range(0, len(rest), MOST) if len(rest) - at > 1]
    return made


def _arguments(call):
    op, given = OPS["gemm"], {"x": call.x or call.products[0].x, **call.options}
    for number, product in zip(("", "2", "3"), call.products, strict=False):
        given |= {f"w{number}": product.w, f"bias{number}": product.bias}
    absent = {name: {"float": 0.0}.get(op.numbers[name], 0) if name in op.numbers else None for name in op.arguments}
    return tuple({**absent, **given}.values())


def _fits(call):
    """Whether the outputs are what gemm returns, or views of that with sizes that are known."""
    shapes = [product.shape for product in call.products]
    for out, shape in zip(call.outputs, shapes, strict=False):
        value = _value(out)
        known = all(isinstance(size, int) for size in value.shape) and same(value.numel(), math.prod(shape))
        if not value.is_contiguous() or value.dtype != _value(call.products[0].x).dtype:
            return False
        if not same(value.shape, shape) and not known:
            return False
    return True


def _insert(graph, call):
    """Whether the call took the place of its outputs."""
    target = FORMS[len(call.outputs)]
    inner = call.inner | {product.node for product in call.products}
    results = chains.insert_call(graph, target, _arguments(call), call.outputs, inner)
    if results is not None:
        for out, result in zip(call.outputs, results, strict=True):
            if not same(_value(result).shape, _value(out).shape):
                result = chains.new_node(graph, aten.view.default, (result, list(_value(out).shape)), result)
            out.replace_all_uses_with(result, delete_user_cb=lambda user, inner=inner: user not in inner)
    graph.eliminate_dead_code()
    return results is not None


def _runs(products):
    """Products that follow each other and read the same x."""
    runs = []
    for product in products:
        if runs and runs[-1][0].x is product.x:
            runs[-1].append(product)
        else:
            runs.append([product])
    return runs


def replace(graph, devices):
    """How many calls took the place of products, by name, and how many products were left by the table, by reason."""
    counts, left, taken = {}, {}, []
    for product in filter(None, (_product(node, devices) for node in graph.nodes)):
        reason = _left(product)
        if reason is None:
            taken.append(product)
        else:
            left[reason] = left.get(reason, 0) + 1
    if not taken:
        return counts, left
    acts = _activations_of(graph, devices)
    for run in reversed(_runs(taken)):  # from the last: what a later call reads is replaced after it
        whole = _with_norm(run, acts, devices)
        for call in [whole] if whole else _without_norm(run, acts):
            if _fits(call) and _insert(graph, call):
                counts[call.name] = counts.get(call.name, 0) + 1
    return counts, left
