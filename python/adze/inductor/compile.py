"""adze under torch.compile: a pass over Inductor's graph that replaces whole chains by one kernel each.

An opaque kernel in place of one small op costs more than it gives: Inductor can no longer fuse through it, and
outside of CUDA graphs each call of a foreign operator costs host time. A chain that is replaced as a whole
(residual + norm, norm + modulation, qk-norm + rope, gate * activation) leaves no op behind to fuse, and is where
these kernels are faster. Lone norms, activations and elementwise work stay with Inductor, but for large activations
between two GEMMs, which Inductor can fuse with no other op. With numerics="fast" products of few rows are taken
first, together with the norm before and the sum after them (products.py).
"""

import functools
import hashlib
import pathlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

from ..operators import fake
from ..operators._ops import ops
from ..operators.functions import ACTS
from ..operators.ops import ROUND_STEPS
from . import chains, formulas, products, rope
from .chains import Chain
from .formulas import BARE, GATES, ORDERS

_Aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)  # as of torch 2.11


# Devices on which adze's activation between two GEMMs is faster than Inductor's, and from how many elements on.
ALONE = {"cuda": 4 << 20}
GEMMS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")}


def _norm_args(
    x, residual=None, weight=None, bias=None, gate=None, scale=None, shift=None, eps=0.0, offset=0.0, rounding=0
):
    """The positional arguments of rms_norm and layer_norm."""
    rows = (*chains.parted(gate), *chains.parted(scale), *chains.parted(shift))
    return (x, residual, weight, bias, *rows, eps, offset, rounding)


def _residual_rms_norm(order):
    formula, (offset, rounding) = ORDERS[order]

    def search(x, residual, weight, eps):
        h = residual + x
        return formula(h, weight, eps), h

    def call(x, residual, weight, eps):
        return ops.rms_norm, _norm_args(x, residual, weight, eps=eps, offset=offset, rounding=rounding)

    return Chain(f"residual, rms_norm ({order})", search, call, "x x weight")


def _residual_layer_norm():
    def search(x, residual, weight, bias, eps):
        h = residual + x
        return F.layer_norm(h, (h.shape[-1],), weight, bias, eps), h

    def call(x, residual, weight, bias, eps):
        return ops.layer_norm, _norm_args(x, residual, weight, bias, eps=eps)

    return Chain("residual, layer_norm", search, call, "x x weight weight")


def _modulated(name, op, norm):
    def search(x, scale, shift, eps):
        return norm(x, eps) * (1 + scale) + shift

    def call(x, scale, shift, eps):
        return op, _norm_args(x, scale=scale, shift=shift, eps=eps, rounding=ROUND_STEPS)

    return Chain(f"{name}, modulation", search, call, "x row row")


def _gated_modulated(name, op, norm):
    def search(x, residual, gate, scale, shift, eps):
        h = residual + gate * x
        return norm(h, eps) * (1 + scale) + shift, h

    def call(x, residual, gate, scale, shift, eps):
        return op, _norm_args(x, residual, None, None, gate, scale, shift, eps, rounding=ROUND_STEPS)

    return Chain(f"gate, residual, {name}, modulation", search, call, "x x row row row")


def _residual_modulated(name, op, norm):
    def search(x, residual, scale, shift, eps):
        h = residual + x
        return norm(h, eps) * (1 + scale) + shift, h

    def call(x, residual, scale, shift, eps):
        return op, _norm_args(x, residual, scale=scale, shift=shift, eps=eps, rounding=ROUND_STEPS)

    return Chain(f"residual, {name}, modulation", search, call, "x x row row")


def _glu(name):
    def search(x, value):
        return GATES[name](x) * value

    def call(x, value):
        return ops.glu, (x, value, ACTS[name], 0, ROUND_STEPS)

    return Chain(f"{name}, product", search, call, "x x")


def _only_gemms_read(node):
    return bool(node.users) and all(
        user.target in GEMMS or (fake.is_view(user) and _only_gemms_read(user)) for user in node.users
    )


def _alone(x, out):
    """Whether Inductor would generate a separate kernel for the activation that is slower than adze's. With autotuned
    GEMMs it may fuse it as the epilogue of a GEMM."""
    value = x.meta["val"]
    if value.dtype not in (torch.float16, torch.bfloat16) or not isinstance(value.numel(), int):
        return False
    if value.numel() < ALONE.get(value.device.type, float("inf")) or config.max_autotune or config.max_autotune_gemm:
        return False
    while fake.is_view(x):
        x = x.args[0]
    return x.target in GEMMS and _only_gemms_read(out)


def _activation(name):
    def search(x):
        return GATES[name](x)

    def call(x):
        return ops.activation, (x, ACTS[name])

    return Chain("activation between GEMMs", search, call, "x", _alone)


@functools.cache
def known():
    """Chains and their patterns, longest first, so that a shorter one does not match a part of a longer one."""
    made = [make(*norm) for make in (_gated_modulated, _residual_modulated, _modulated) for norm in BARE]
    made += [_residual_rms_norm(order) for order in ORDERS] + [_residual_layer_norm()]
    made += [make(name) for make in (_glu, _activation) for name in GATES]
    return [(chain, chains.patterns(chain)) for chain in made]


class Pass(CustomGraphPass):
    """For torch._inductor.config.post_grad_custom_pre_pass, or adze.compile, which sets it.

    counts says what was replaced, by the name of the chain; left says how many products were not, by the reason."""

    def __init__(self, devices=("cuda",), numerics="match"):
        if numerics not in ("match", "fast"):
            raise ValueError(f'adze.compile: numerics is {numerics!r}, it must be "match" or "fast"')
        self.devices, self.numerics = tuple(devices), numerics
        self.counts, self.left = {}, {}

    def __call__(self, graph):
        chains.rejoin(graph, self.devices)
        if self.numerics == "fast":
            made, left = products.replace(graph, self.devices)
            for name, count in made.items():
                self._count(name, count)
            for reason, count in left.items():
                self.left[reason] = self.left.get(reason, 0) + count
        for chain, traced in known():
            self._count(chain.name, chains.replace(graph, chain, traced, self.devices))
        for name, count in rope.replace(graph, self.devices).items():
            self._count(name, count)
        graph.lint()

    def _count(self, name, count):
        if count:
            self.counts[name] = self.counts.get(name, 0) + count

    def report(self):
        """What was replaced in the graphs that were compiled so far, and which products were left to Inductor."""
        lines = [f"x{count:<4} {name}" for name, count in self.counts.items()] or ["nothing was replaced"]
        lines += [f"x{count:<4} - a product of {reason}" for reason, count in self.left.items()]
        if self.numerics == "match":
            lines.append('products are left to Inductor: numerics is "match"')
        return "\n".join(lines)

    def uuid(self):
        """A part of Inductor's cache key, so that a graph is compiled again when the source of the pass changes, or
        the tables that it decides by."""
        digest = hashlib.sha256(repr((self.devices, self.numerics, ALONE, products.table())).encode())
        for module in (__file__, *(part.__file__ for part in (chains, fake, formulas, products, rope))):
            digest.update(pathlib.Path(module).read_bytes())
        return digest.hexdigest()


def _passes(given):
    """The passes that a user has given to Inductor: none, one, or, in torch 2.13 and newer, several."""
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) else [given]


class _Chained(CustomGraphPass):
    """A user's passes, and adze's after them, over the graph that they leave."""

    def __init__(self, passes):
        self.passes = passes

    def __call__(self, graph):
        for each in self.passes:
            each(graph)

    def uuid(self):
        """None where a pass has no uuid: Inductor then does not cache the graph."""
        ids = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.passes]
        return None if None in ids else ids


if _Aware is not None:

    class _ChainedAware(_Chained, _Aware):
        """The same with passes that take is_inference."""

        def __call__(self, graph, is_inference):
            for each in self.passes:
                each(graph, is_inference) if isinstance(each, _Aware) else each(graph)


def _chained(passes):
    if len(passes) == 1:
        return passes[0]
    aware = _Aware is not None and any(isinstance(each, _Aware) for each in passes)
    return (_ChainedAware if aware else _Chained)(passes)


def compile(model, *, devices=("cuda",), numerics="match", options=None, mode=None, **kwargs):
    """torch.compile with the pass. The result's adze_pass.counts says what was replaced, after the first call, and
    adze_pass.report() says it as a text; a graph that Inductor takes from its cache is not counted again. With
    numerics="fast" products of few rows are gemm's, with the norm before and the activation or the sum after them,
    where that was measured to be faster. A post_grad_custom_pre_pass of your own, in options or in
    torch._inductor.config, runs before the pass."""
    own, name = Pass(devices, numerics), "post_grad_custom_pre_pass"
    settings = dict(torch._inductor.list_mode_options(mode) if mode else {})
    settings.update(options or {})
    settings[name] = _chained([*_passes(settings.get(name, getattr(config, name))), own])
    compiled = torch.compile(model, options=settings, **kwargs)
    compiled.__dict__["adze_pass"] = own  # a compiled module would hand the attribute on to the model
    return compiled
