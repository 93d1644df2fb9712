"""adze.quantize of models: what it replaces, what it leaves and why, how it is undone, copied, saved and moved."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.nn import functional as F

import adze
from adze.operators import ops
from adze.quantization.linear import ROWS
from adze.quantization.weight import KINDS, dequantized, quantized
from device import generator, here

K = 200  # not a multiple of a group


class Net(nn.Module):
    """An embedding whose weight is also the head's, and two Linears."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Embedding(50, K)
        self.up = nn.Linear(K, 140)
        self.down = nn.Linear(140, K, bias=False)
        self.head = nn.Linear(K, 50, bias=False)
        self.head.weight = self.embed.weight
        self.to(here(), dtype).eval()

    def forward(self, ids):
        return self.head(self.down(F.relu(self.up(self.embed(ids)))))


@pytest.fixture(autouse=True)
def no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def ids(rows=3):
    return torch.randint(50, (rows,), generator=generator(0))


def stored(model):
    """The bits of all that is stored in fewer bits."""
    return {name: buffer.view(torch.uint8).clone() for name, buffer in model.named_buffers() if ".weight_" in name}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind, dtype):
    """The layer computes with the numbers that are stored, whichever way takes the product."""
    linear = nn.Linear(K, 140, device=here(), dtype=dtype)
    net = nn.Sequential(linear)
    handle = adze.quantize(net, kind)
    layer, (row,) = net[0], handle.rows
    assert layer.kind == row.kind == kind and layer.weight.dtype == dtype
    step = {"i8": 1 / 127, "f8e4m3": 32 / 448, "u4": 1 / 7}[KINDS[kind][0]]  # the widest, of the largest
    most = (0.51 * step + torch.finfo(dtype).eps) * linear.weight.abs().max()
    assert ((layer.weight - linear.weight).abs() <= most).all()
    assert row.after == sum(t.nbytes for t in layer.stored if t is not None) < row.before
    assert 0 < row.on_random < 0.2
    for rows in (2, ROWS + 1):
        x = torch.randn(rows, K, generator=generator(rows), device=here()).to(dtype)
        read = x.double()
        if layer.activations:
            q, scale = adze.quantize(x, KINDS[kind][0])
            read = q.double() * scale.double()[:, None]
            assert 0 < (read - x.double()).abs().max() < 0.1 * x.double().abs().max()
        want = F.linear(read, layer.weight.double(), layer.bias.double())
        # Sums in float, and a rounding of the result; above ROWS rows each weight is rounded to the dtype too.
        terms = F.linear(read.abs(), layer.weight.double().abs())
        eps = torch.finfo(dtype).eps
        assert ((layer(x).double() - want).abs() <= eps * (want.abs() + terms) + K * 2**-24 * terms).all()
        assert layer(x).dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_search(kind):
    """No group has a larger error than without it, and a row with an outlier a smaller one."""
    op_kind, group, rows = KINDS[kind]
    weight = torch.randn(140, K, generator=generator(3), device="cpu").to(here())
    for zero_points in (False, True) if op_kind == "u4" else (False,):
        errors = []
        for search in (False, True):
            made = quantized(weight, kind, zero_points, search)
            plain = quantized(weight, kind, zero_points)
            assert [t.shape for t in made if t is not None] == [t.shape for t in plain if t is not None]
            off = (dequantized(made, K, torch.float32) - weight).square().double()
            off = F.pad(off, (0, -K % (group or K), 0, -140 % (rows or 1)))
            errors.append(off.unflatten(1, (-1, group or K)).unflatten(0, (-1, rows or 1)).sum((1, 3)))
        assert (errors[1] <= errors[0] * (1 + 1e-5)).all()
        if op_kind == "u4":
            assert errors[1].sum() < 0.95 * errors[0].sum()
    net = nn.Sequential(nn.Linear(K, 140, device=here()))
    with adze.quantize(net, kind) as handle:
        plain = handle.rows[0].on_random
    assert adze.quantize(net, kind, search=True).rows[0].on_random <= plain * 1.01


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_quantised_where_it_is(kind, monkeypatch):
    """Bit for bit as on the CPU, to which it goes from a device without a kernel."""
    weight, op, places = torch.randn(140, K, generator=generator(0)), ops.quantize, []

    def quantize(x, *args, **options):
        places.append(x.device.type)
        return op(x, *args, **options)

    monkeypatch.setattr(ops, "quantize", quantize)
    made = [quantized(weight, kind)]
    monkeypatch.setattr(ops, "has_kernel", lambda name, device: False)
    made.append(quantized(weight, kind))
    assert places == [here().type, "cpu"]
    for own, other in zip(*made, strict=True):
        assert own is other is None or torch.equal(own.view(torch.uint8), other.view(torch.uint8))


def test_undone_and_again():
    net = Net()
    want = net(ids())
    with adze.quantize(net, "int4-g32", inputs=(ids(),)) as handle:
        made = net(ids())
        assert isinstance(net.up, adze.QuantizedLinear) and not torch.equal(made, want)
        handle.disable()
        assert torch.equal(net(ids()), want) and type(net.up) is nn.Linear
        assert "not in use now" in handle.report()
        handle.enable()
        assert torch.equal(net(ids()), made)
        with pytest.raises(ValueError, match="up is quantised already, as int4-g32"):
            adze.quantize(net, "int8")
    assert torch.equal(net(ids()), want) and handle.swaps == []


def test_original_follows_the_model():
    """A model that is cast while it is quantised gets back layers of its dtype."""
    net = Net()
    handle = adze.quantize(net, "int8")
    net.to(torch.bfloat16).train()
    handle.remove()
    assert net.up.weight.dtype == net.up.bias.dtype == torch.bfloat16 and net.up.training


def test_memory_is_freed():
    net = Net()
    weight = weakref.ref(net.up.weight)
    handle = adze.quantize(net, "fp8", keep=False, progress=False)
    gc.collect()
    assert weight() is None
    with pytest.raises(RuntimeError, match="the original weights were not kept"):
        handle.disable()
    net = Net()
    weight = weakref.ref(net.up.weight)
    handle = adze.quantize(net, "fp8")
    gc.collect()
    assert weight() is not None and "free() frees them" in handle.report()
    handle.free()
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("where", ["in a layer", "on the inputs"])
def test_a_call_that_fails_leaves_the_model(where, monkeypatch):
    net, calls, quantize = Net(), [], ops.quantize
    modules, want = dict(net.named_modules()), net(ids())

    def fail(do):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return do()

    if where == "in a layer":
        monkeypatch.setattr(ops, "quantize", lambda *args, **options: fail(lambda: quantize(*args, **options)))
    with pytest.raises(KeyboardInterrupt):
        adze.quantize(net, "int8", inputs=None if where == "in a layer" else lambda: fail(lambda: net(ids())))
    assert dict(net.named_modules()) == modules and torch.equal(net(ids()), want)
    assert adze.quantize(net, "int8").quantized == ["up", "down"]


def test_report_and_inputs():
    net = Net()
    handle = adze.quantize(net, "int4-g128", zero_points=True, inputs={"ids": ids()})
    up, down, head = handle.rows
    assert head.kind is None and head.reason == "its weight is also embed.weight"
    assert net.head.weight is net.embed.weight and handle.quantized == ["up", "down"]
    assert up.before == 140 * K * 4 and up.after == 140 * K // 2 + 140 * 2 * (2 + 1)
    assert 0 < up.on_inputs < 0.3 and 0 < handle.outputs[0] < 0.5
    assert handle.bytes_before == up.before + down.before > 6 * handle.bytes_after
    lines = handle.report().splitlines()
    assert lines[1].split()[:4] == ["up", "int4-g128", "0.11", "0.01"]
    assert "2 layers as int4-g128" in lines[4] and "outputs on the given inputs: error" in lines[5]


def test_torchs_default_dtype():
    net, before = Net(), torch.get_default_dtype()
    want = adze.quantize(Net(), "int8").rows[0].on_random
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert 0 < abs(adze.quantize(net, "int8").rows[0].on_random) < 2 * want
    finally:
        torch.set_default_dtype(before)


def test_state_pickle_copy_and_dtype():
    net = Net()
    adze.quantize(net, "fp8-block")
    want, bits = net(ids()), stored(net)
    other = Net()
    adze.quantize(other, "fp8-block")
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(ids()), want)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(ids()), want) and twin.up.weight_q is not net.up.weight_q
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    assert set(torch.load(io.BytesIO(file.getvalue()), weights_only=True)) == set(net.state_dict())
    for dtype in (torch.float16, torch.bfloat16):
        net.to(dtype)
        assert same(stored(net), bits) and net.up.dtype == net.up.bias.dtype == net(ids()).dtype == dtype
    net.type(torch.float32)
    assert same(stored(net), bits) and net.up.weight_q.dtype == torch.float8_e4m3fn
    assert net(ids()).dtype == torch.float32


def test_hooks_stay():
    net, calls = Net(), []
    hook = net.up.register_forward_hook(lambda module, args, out: calls.append(type(module).__name__))
    handle = adze.quantize(net, "int8")
    net(ids())
    handle.disable()
    net(ids())
    handle.enable()
    hook.remove()
    net(ids())
    assert calls == ["QuantizedLinear", "Linear"]


def test_shared_layer():
    """A layer at two places is one layer afterwards too."""
    net = Net()
    net.again = net.up
    handle = adze.quantize(net, "int8")
    assert net.again is net.up and isinstance(net.up, adze.QuantizedLinear)
    handle.disable()
    assert net.again is net.up and type(net.up) is nn.Linear


class _Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base


_Lora.__module__ = "peft.tuners.lora.layer"


def test_left_as_they_are():
    def reason(module, name="0"):
        with pytest.raises(ValueError, match="no layer of the model can be quantised") as error:
            adze.quantize(nn.Sequential(module), "int8")
        return str(error.value).partition(f"{name} ")[2]

    linear = lambda: nn.Linear(8, 8)  # noqa: E731
    assert reason(nn.utils.parametrizations.spectral_norm(linear())).startswith("its weight is parametrised")
    assert reason(_Lora(linear()), "0.base_layer") == "is part of an adapter of peft: merge_and_unload() first"
    assert reason(nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8)).endswith("not a plain Linear")
    bad = linear()
    bad.weight[0, 0] = float("nan")
    assert reason(bad) == "its weight has an infinity or a NaN"
    own = linear()
    own.forward = lambda x: x
    assert reason(own) == "has a forward of its own"
    with pytest.warns(FutureWarning):
        assert reason(nn.utils.weight_norm(linear())).startswith("its weight is computed by a hook")
    with pytest.raises(ValueError, match="0.weight is on the meta device, it has no values"):
        adze.quantize(nn.Sequential(nn.Linear(8, 8, device="meta")), "int8")
    with pytest.raises(ValueError, match="kind is 'int3', it must be one of int8, int4-g32"):
        adze.quantize(Net(), "int3")
    with pytest.raises(ValueError, match="zero_points is True, only 4 bits have them"):
        adze.quantize(Net(), "int8", zero_points=True)
    with pytest.raises(TypeError, match="x is a str, it must be a tensor, a module or a pipeline"):
        adze.quantize("model", "int8")
    with pytest.raises(ValueError, match="the model is a Linear itself: put it into a module"):
        adze.quantize(nn.Linear(8, 8), "int8")
    with pytest.raises(TypeError, match="inputs is a Tensor, it must be a dict, a tuple or a function"):
        adze.quantize(Net(), "int8", inputs=ids())
    handle = adze.quantize(Net(), "int8", exclude=("up", "head"))
    assert handle.quantized == ["down"] and handle.rows[0].reason == "excluded"
    assert adze.quantize(Net(), "int8", exclude=None).quantized == adze.quantize(Net(), "int8", exclude=()).quantized


@pytest.mark.parametrize("kind", ["int8", "w8a8"])
def test_other_inputs(kind):
    """Whole numbers are refused, as by nn.Linear; with the meta device a layer has shapes alone."""
    net = Net()
    adze.quantize(net, kind)
    with pytest.raises(RuntimeError, match=f"a layer of {kind} got torch.int64, its input must be of floating point"):
        net.up(torch.ones(2, K, dtype=torch.int64, device=here()))
    assert net.to("meta").up(torch.ones(2, K, device="meta")).shape == (2, 140)


@pytest.mark.parametrize("kind", ["int8", "int4-g32"])
@pytest.mark.parametrize("k", [63, 64])
def test_inputs_of_other_sizes(kind, k):
    """A weight of 4 bits with an odd number of columns has place for one more in its bytes."""
    model = nn.Sequential(nn.Linear(k, 16)).to(here())
    adze.quantize(model, kind)
    assert model(torch.randn(2, k, device=here())).shape == (2, 16)
    for shape in ((2, k - 1), (2, k + 1), (100, k + 1), ()):
        with pytest.raises(RuntimeError, match=f"a layer of {k} columns got an input of "):
            model(torch.randn(shape, device=here()))


def test_a_state_dict_of_another_kind():
    """Its shapes are the same, and its numbers are not cast."""
    models = {}
    for kind in ("int8", "fp8"):
        models[kind] = nn.Sequential(nn.Linear(64, 16)).to(here())
        adze.quantize(models[kind], kind, keep=False)
    for kind, other in (("int8", "fp8"), ("fp8", "int8")):
        before = stored(models[kind])
        with pytest.raises(RuntimeError, match="0.weight_q is torch.* in the layer, torch.* in the state_dict"):
            models[kind].load_state_dict(models[other].state_dict())
        assert same(stored(models[kind]), before)
        models[kind].load_state_dict(models[kind].state_dict())


def test_gradients_autocast_and_views():
    net = Net()
    adze.quantize(net, "int8")
    layer, x = net.up, torch.randn(2, K, generator=generator(1), device=here())
    with torch.enable_grad():
        layer(x.requires_grad_()).sum().backward()
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(2, -1), atol=1e-4)
    x = x.detach()
    with torch.autocast(here().type, torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert torch.equal(layer(x.t().contiguous().t()), layer(x))
    assert layer(x.double()).dtype == torch.float64 and layer(x[None, None, None, None]).shape == (1, 1, 1, 1, 2, 140)


def test_compiled():
    """One graph, and another only where the number of rows crosses the limit."""
    layer = nn.Sequential(nn.Linear(K, 16, device=here()))
    adze.quantize(layer, "int4-g64")
    graphs = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(layer, backend=graphs, fullgraph=True, dynamic=True)
    for rows in (2, 5, ROWS + 1):
        x = torch.randn(rows, K, generator=generator(rows), device=here())
        assert torch.equal(compiled(x), layer(x))
    assert graphs.frame_count == 2


def test_patched_models_of_transformers():
    import models

    inputs = models.inputs("llama")
    for numerics in ("match", "fast"):
        net = models.build("llama")
        before = adze.patch(net, numerics=numerics)
        handle = adze.quantize(net, "int8")
        assert len(handle.quantized) == 14 and handle.rows[-1].reason == "excluded"
        want = models.output(net, inputs)
        before.remove()
        plain = models.output(net, inputs)
        after = adze.patch(net, numerics=numerics)
        assert torch.equal(models.output(net, inputs), want) and after.patched
        assert (want - plain).abs().max() < 1e-3 * plain.abs().max()
    net = models.build("gpt2")
    want = models.output(net, models.inputs("gpt2"))
    handle = adze.quantize(net, "int8")
    assert {row.cls for row in handle.rows if row.kind} == {"Conv1D"} and len(handle.quantized) == 8
    got = models.output(net, models.inputs("gpt2"))
    assert 0 < (got - want).abs().max() < 0.05 * want.abs().max()
