"""residual + gate * x in diffusers' blocks: one op where it may be, else torch's own, and the same bits."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

import adze  # noqa: E402
from adze.patching.diffusers.blocks import _float_gated  # noqa: E402
from adze.patching.diffusers.norms import gated  # noqa: E402
from device import Watch, default_device, generator  # noqa: E402


def randn(*shape, seed, dtype=torch.bfloat16):
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def tensors(dtype, gate_dtype=None):
    x, r = randn(2, 6, 40, seed=0, dtype=dtype), randn(2, 6, 40, seed=1, dtype=dtype)
    return r, x, randn(2, 1, 40, seed=2, dtype=gate_dtype or dtype), randn(40, seed=3, dtype=gate_dtype or dtype)


def watched(function, *args):
    with torch.no_grad(), Watch() as watch:
        return function(*args), watch.seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_op(dtype):
    r, x, gate, table = tensors(dtype)
    out, seen = watched(gated, False, r, x, gate)
    assert torch.equal(out, r + gate * x) and seen == {"adze.gated_add": 1}
    out, seen = watched(gated, False, r, x, gate, table)
    assert torch.equal(out, r + (table + gate) * x) and seen == {"adze.gated_add": 1}
    out, seen = watched(gated, True, r, x, gate, table)
    assert torch.equal(out, adze.gated_add(x, r, gate, gate_table=table)) and seen == {"adze.gated_add": 1}


def test_float_between():
    r, x, gate, table = tensors(torch.bfloat16, torch.float32)
    want = (r.float() + x.float() * (table + gate)).type_as(r)
    out, seen = watched(_float_gated, r, x, gate, table)
    assert torch.equal(out, want) and seen == {"adze.gated_add": 1}


@pytest.mark.parametrize(
    "change",
    [
        lambda r, x, gate: (r, x, gate.float()),  # the sum is a float
        lambda r, x, gate: (r.float(), x, gate),
        lambda r, x, gate: (r, x[:, :1], gate),  # x is broadcast
        lambda r, x, gate: (r[:1], x[:1], gate),  # and so is this
        lambda r, x, gate: (r, x, gate[..., :1]),
        lambda r, x, gate: (r, x, gate[:, 0, 0].view(2, 1, 1)),
        lambda r, x, gate: (r, x.mT.contiguous().mT, gate),
        lambda r, x, gate: (r, x, gate.requires_grad_()),
    ],
)
def test_torch_keeps_the_rest(change):
    r, x, gate = change(*tensors(torch.bfloat16)[:3])
    with Watch() as watch:
        out = gated(False, r, x, gate)
    want = r + gate * x
    assert torch.equal(out, want) and out.dtype == want.dtype and "adze.gated_add" not in watch.seen
    assert out.requires_grad == want.requires_grad


def test_compilers_fuse_it_themselves():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    r, x, gate, table = tensors(torch.bfloat16)
    with default_device(None), torch.no_grad():
        out = torch.compile(gated, backend=backend, fullgraph=True)(False, r, x, gate, table)
    assert torch.equal(out, r + (table + gate) * x) and len(graphs) == 1 and "gated_add" not in graphs[0].code
