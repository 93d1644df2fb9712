"""A function through Dynamo, AOTAutograd and the pass, its results beside those of eager, and norms as models write
them."""

import copy

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table

from adze.inductor.compile import Pass, known
from device import default_device, generator, here

with default_device(None):
    known()  # patterns are made once, where torch makes tensors unless told otherwise; graphs of CUDA must match them


def llama(h, w, eps=1e-6):
    f = h.float()
    return w * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)).to(h.dtype)


def gemma(h, w, eps=1e-6):
    f = h.float()
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + w.float())).type_as(h)


def compiled(fn, dynamic=False, keep=False, numerics="match"):
    """fn through Dynamo and AOTAutograd with Inductor's decompositions, then the pass; the graph is run eagerly. The
    pass keeps the graphs that it has seen and, if keep is true, what the graph before the pass returns."""
    own = Pass((here().type,), numerics)
    own.graphs, own.before = [], []

    def finish(module, inputs):
        plain = torch.fx.GraphModule(module, copy.deepcopy(module.graph)) if keep else None
        own(module.graph)
        own.graphs.append(module.graph)
        module.recompile()

        def forward(*args):
            if keep:
                own.before.append(plain(*args))
            return module.forward(*args)

        return make_boxed_func(forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=finish, inference_compiler=finish, decompositions=select_decomp_table())
    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic), own


def run(fn, *args, numerics="match", **kwargs):
    made, own = compiled(fn, numerics=numerics)
    with torch.no_grad(), default_device(None):
        return made(*args, **kwargs), fn(*args, **kwargs), own.counts


def run_all(cases, numerics="match"):
    """Functions and their arguments, by name, compiled as one: Dynamo and AOTAutograd take most of the time of a
    small function. Each has tensors of its own, or a step of one could be shared with another. Gives what each
    returned, what it returns in eager, and the counts of all."""
    functions = [fn for fn, _ in cases.values()]
    given = [[tensor.clone() for tensor in args] for _, args in cases.values()]
    got, want, counts = run(lambda given: [fn(*given[i]) for i, fn in enumerate(functions)], given, numerics=numerics)
    return dict(zip(cases, got, strict=True)), dict(zip(cases, want, strict=True)), counts


def all_close(got, want):
    assert got.keys() == want.keys()
    for name in got:
        for a, b in zip(
            *((t if isinstance(t, (tuple, list)) else (t,)) for t in (got[name], want[name])), strict=True
        ):
            close(a, b)


def calls(own, namespace="adze"):
    """Operators of the graph that the pass has seen, in their order."""
    (graph,) = own.graphs
    targets = [n.target for n in graph.nodes if n.op == "call_function"]
    return [str(t) for t in targets if getattr(t, "namespace", None) == namespace]


def close(got, want):
    """Equal in nearly all elements, and one unit in the last place of bf16 elsewhere."""
    assert got.dtype == want.dtype and got.shape == want.shape
    if got.dtype == torch.float32:
        assert torch.allclose(got, want, rtol=2e-5, atol=2e-5 * want.abs().max().item())
        return
    step = torch.finfo(got.dtype).eps * want.abs().float().clamp_min(want.abs().max().item() * 2**-6)
    assert ((got.float() - want.float()).abs() <= step).all() and (got == want).float().mean() > 0.98


def randn(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=generator(seed)).to(dtype)
