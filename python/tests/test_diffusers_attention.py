"""adze's attention in diffusers' models: as a backend of its dispatcher, and for processors that call torch's."""

import copy
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

import torch.nn.functional as F  # noqa: E402
from diffusers.models import attention_dispatch as dispatch  # noqa: E402

import adze  # noqa: E402
import adze.diffusers  # noqa: E402
import diffusers_models  # noqa: E402
from adze.patching import attention, frame  # noqa: E402
from device import Watch, default_device, here  # noqa: E402
from diffusers_seams import output  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_gradients")
ALL = (1, 1 << 20)
EVERY = {torch.float32: [attention.Calls(ALL, ALL, ALL, hidden=True)]}


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    """Calls in float32 are adze's here, whatever was measured."""
    if not attention.ops.has_kernel("attention", here()):
        pytest.skip("the library has no kernel here")
    monkeypatch.setitem(attention.FASTER, here().type, EVERY)


@pytest.fixture(autouse=True)
def active():
    """set_attention_backend also changes the backend of models that have none."""
    registry = dispatch._AttentionBackendRegistry
    before = registry._active_backend
    yield
    registry.set_active_backend(before)


def seen(watch):
    """How many attentions were adze's, and how many torch's."""
    return watch.seen["adze.attention"], sum(n for op, n in watch.seen.items() if "scaled_dot_product" in op)


def ran(model, inputs):
    with Watch() as watch:
        return output(model, inputs), *seen(watch)


# ---- The function ----


def heads(batch=2, heads=4, tokens=5, dim=8, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.randn(batch, tokens, heads, dim, dtype=dtype).transpose(1, 2)


Q, K, V = (lambda: heads(seed=1)), (lambda: heads(tokens=7, seed=2)), (lambda: heads(tokens=7, seed=3))
SEEN = {
    "plain": lambda f: f(Q(), K(), V()),
    "scale": lambda f: f(Q(), K(), V(), scale=0.3),
    "one mask for all": lambda f: f(Q(), K(), V(), torch.tensor([[1, 1, 0, 1, 1, 0, 1]], dtype=torch.bool)),
    "a mask for each query": lambda f: f(Q(), K(), V(), torch.randn(5, 7)),
    "a mask for each of the batch": lambda f: f(Q(), K(), V(), torch.randn(2, 1, 1, 7)),
    "a whole mask": lambda f: f(Q(), K(), V(), torch.randn(2, 4, 5, 7)),
    "causal": lambda f: f(K(), K(), V(), is_causal=True),
    "other values": lambda f: f(Q(), K(), heads(tokens=7, dim=12)),
}
TORCHS = {
    "causal from the first key": lambda f: f(Q(), K(), V(), is_causal=True),
    "three dimensions": lambda f: f(Q()[0], K()[0], V()[0]),
    "another dtype": lambda f: f(Q().double(), K().double(), V().double()),
    "one column of a mask": lambda f: f(Q(), K(), V(), torch.randn(5, 1)),
    "a batch that is broadcast": lambda f: f(Q(), K()[:1], V()[:1]),
    "groups of heads": lambda f: f(Q(), K()[:, :2], V()[:, :2], enable_gqa=True),
    "a head that is broadcast": lambda f: f(Q(), K()[:, :1], V()[:, :1]),
    "dim is not contiguous": lambda f: f(*(t.mT.contiguous().mT for t in (Q(), K(), V()))),
}


@pytest.mark.parametrize("name", [*SEEN, *TORCHS])
def test_calls(name):
    call = {**SEEN, **TORCHS}[name]
    want = call(F.scaled_dot_product_attention)
    call(attention.scaled_dot_product_attention)  # the library may be asked here
    with Watch() as watch:
        got = call(attention.scaled_dot_product_attention)
    assert watch.seen["adze.attention"] == (name in SEEN)
    torch.testing.assert_close(got, want)
    if name in SEEN:
        assert got.transpose(1, 2).is_contiguous()  # the heads of a token are together, as the model reads them


def test_dropout_gradients_and_autocast_are_torchs(monkeypatch):
    monkeypatch.setattr(frame, "_warned", {*frame._warned})  # others test the warning
    assert not attention.taken(Q(), K(), V(), dropout_p=0.1)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert attention.taken(Q(), K(), V()) and not attention.taken(Q().requires_grad_(), K(), V())
    with torch.autocast(here().type, torch.bfloat16):
        assert not attention.taken(Q(), K(), V())


def test_only_what_was_measured(monkeypatch):
    def takes(queries, keys, dim, mask=None):
        q, k = heads(tokens=queries, dim=dim), heads(tokens=keys, dim=dim)
        return attention.taken(q, k, k, mask)

    table = {torch.float32: [attention.Calls((4, 8), (2, 6), (8, 16)), attention.Calls((1, 1), (9, 9), (8, 8))]}
    monkeypatch.setitem(attention.FASTER, here().type, table)
    taken = [(4, 2, 8), (8, 6, 16), (1, 9, 8)]
    left = [(3, 2, 8), (9, 6, 16), (4, 1, 8), (8, 7, 8), (4, 2, 7), (4, 2, 17), (1, 9, 16)]
    assert [takes(*sizes) for sizes in taken + left] == [True] * 3 + [False] * 7
    assert not takes(4, 2, 8, torch.zeros(4, 2))  # masks were not measured here, nor causal
    assert not attention.taken(heads(tokens=6), heads(tokens=6), heads(tokens=6), is_causal=True)
    monkeypatch.setitem(attention.FASTER, here().type, {})
    assert not takes(4, 2, 8) and not attention.faster_somewhere(here(), torch.float32)


def test_the_table_is_for_the_processor_that_was_measured(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert attention._on_the_cpu() == {} and attention.FASTER["cuda"] == {}


def test_the_library_is_asked(monkeypatch):
    assert attention.taken(Q(), K(), V())
    monkeypatch.setattr(attention.ops, "has_kernel", lambda op, device: False)
    assert not attention.taken(Q(), K(), V())


# ---- Models ----


# How many attentions there are, and how many modules have a forward or a backend for it.
MODELS = {"flux": (2, 0, 2), "ltx": (4, 0, 4), "sd15": (8, 8, 0), "sd35": (3, 3, 0), "hunyuan_video": (3, 1, 2)}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    count, forwards, backends = MODELS[name]
    model, inputs = diffusers_models.make(name, False)
    processors = {m: m.processor.__dict__.copy() for m in model.modules() if hasattr(m, "processor")}
    want, *calls = ran(model, inputs)
    assert calls == [0, count]
    handle = adze.patch(model, numerics="fast")
    output(model, inputs)  # the library is asked here
    got, *calls = ran(model, inputs)
    assert calls == [count, 0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    text = handle.report()
    assert sum(row.rule == "attention" for row in handle.rows) == forwards
    assert ("attention where it was measured to be faster" in text) == bool(forwards)
    said = f'{backends} attention processors have the backend "adze", for calls that were measured to be faster'
    assert (said in text) == bool(backends)
    handle.disable()
    assert ran(model, inputs)[1:] == (0, count)
    handle.enable()
    assert ran(model, inputs)[1:] == (count, 0)
    handle.remove()
    assert ran(model, inputs)[1:] == (0, count)
    assert processors == {m: m.processor.__dict__ for m in processors}


def test_what_is_not_asked_for(monkeypatch):
    model, inputs = diffusers_models.make("flux", False)
    for options in ({"numerics": "match"}, {"ops": ("norm", "rope")}, {"exclude": "*attn"}):
        handle = adze.patch(model, **{"numerics": "fast", **options})
        assert ran(model, inputs)[1:] == (0, 2) and "backend" not in handle.report()
    handle = adze.patch(model, numerics="fast", ops=["attention"])
    output(model, inputs)
    assert ran(model, inputs)[1:] == (2, 0)
    assert "0 modules patched" in handle.report() and "not in use" not in handle.report()
    with monkeypatch.context() as patch:
        patch.setitem(attention.FASTER, here().type, {})
        assert "backend" not in adze.patch(model, numerics="fast").report()
    assert ran(model, inputs)[1:] == (0, 2)


def test_a_choice_of_the_users_own_stays():
    model, inputs = diffusers_models.make("flux", False)
    own, other = (m.processor for m in model.modules() if hasattr(m, "processor"))
    own._attention_backend = dispatch.AttentionBackendName.NATIVE
    handle = adze.patch(model, numerics="fast")
    assert ran(model, inputs)[1:] == (1, 1)
    with dispatch.attention_backend("_native_math"):
        assert ran(model, inputs)[1] == 0  # one chose torch's, for the other it is chosen here
    assert ran(model, inputs)[1:] == (1, 1)
    other._attention_backend = dispatch.AttentionBackendName._NATIVE_MATH  # after the patch
    handle.remove()
    assert own._attention_backend == "native" and other._attention_backend == "_native_math"


def test_the_last_patch_counts():
    model, inputs = diffusers_models.make("flux", False)
    first = adze.patch(model, numerics="fast")
    with adze.patched(model):
        assert ran(model, inputs)[1:] == (0, 2)
    assert ran(model, inputs)[1:] == (2, 0)
    second = adze.patch(model, numerics="fast")
    first.remove()
    assert ran(model, inputs)[1:] == (2, 0)
    second.remove()
    assert ran(model, inputs)[1:] == (0, 2)


def test_copies_and_pickles():
    """A deep copy keeps the backend; who reads a pickle may not have adze."""
    model, inputs = diffusers_models.make("flux", False)
    handle = adze.patch(model, numerics="fast", ops=["attention"])
    copied, read = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    handle.remove()
    assert ran(read, inputs)[1:] == (0, 2)
    assert ran(copied, inputs)[1:] == (2, 0)


def test_set_attention_backend():
    model, inputs = diffusers_models.make("ltx", False)
    want = output(model, inputs)
    assert adze.diffusers.register() is adze.diffusers.register() is dispatch.AttentionBackendName("adze")
    model.set_attention_backend("adze")
    got, *calls = ran(model, inputs)
    assert calls == [4, 0]
    torch.testing.assert_close(got, want)
    adze.patch(model).remove()  # it stays the user's
    with dispatch.attention_backend("adze"):
        assert ran(model, inputs)[1:] == (4, 0)
    model.set_attention_backend("native")
    assert ran(model, inputs)[1:] == (0, 4)


def test_compiled_graphs_have_torchs():
    model, inputs = diffusers_models.make("flux", False)
    want = output(model, inputs)
    adze.patch(model, numerics="fast")
    torch._dynamo.reset()
    graphs = []
    model.compile_repeated_blocks(fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    with default_device(None):
        torch.testing.assert_close(output(model, inputs), want, rtol=1e-4, atol=1e-5)
    targets = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert len(graphs) == 2 and not any("adze.attention" in target for target in targets)
