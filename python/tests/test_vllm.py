"""vLLM's contract: no error in register() stops vLLM, the schemas of its IR ops are those of our functions,
and the numbers are its definitions'. Where vLLM is installed the layers are its own, otherwise those of fake_vllm.py:
tests/vllm.sh runs this file with several versions."""

import contextlib
import functools
import importlib.util
import logging
import types

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

import adze.vllm as plugin  # noqa: E402
import fake_vllm  # noqa: E402
from device import Watch  # noqa: E402

NORMS = ("rms_norm", "fused_add_rms_norm")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def logged():
    """What register() says, which it says once in a process; pytest's own fixture is switched off in tests/run.sh."""
    records = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = records.append
    logger = logging.getLogger("adze.vllm")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    plugin._log_once.cache_clear()
    yield lambda: [record.getMessage() for record in records]
    logger.removeHandler(handler)
    logger.setLevel(before)


def definition(h, weight, eps, dtype):
    f = h.float()
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    return (f if weight is None else f.to(weight.dtype) * weight).to(dtype)


def between(got, one, other):
    """Each value lies between two, which are nearly always the same one."""
    assert got.dtype == one.dtype and (one == other).float().mean() > 0.95
    assert (torch.minimum(one, other) <= got).all() and (got <= torch.maximum(one, other)).all()


def neighbours(h, weight, eps, dtype):
    """The definition in double, with the norm lowered and raised by the error that float may have. A sum of squares
    in any order is within dim units of 2^-24, of which the root takes half; the few other steps are within the
    rest."""
    norm = h.double() / (h.double().pow(2).mean(-1, keepdim=True) + eps).sqrt()
    for side in -1, 1:
        n = norm * (1 + side * (h.shape[-1] + 8) * 2.0**-24)
        if weight is None or weight.dtype != dtype:
            yield (n if weight is None else n * weight.double()).to(dtype)
        else:
            yield n.to(dtype) * weight


@pytest.mark.parametrize("weight_dtype", [None, torch.bfloat16, torch.float32])
def test_numbers(weight_dtype):
    torch.manual_seed(0)
    x, r = torch.randn(64, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    weight = None if weight_dtype is None else torch.randn(256).to(weight_dtype)
    total = x.float() + r.float()
    between(definition(x, weight, 1e-6, x.dtype), *neighbours(x, weight, 1e-6, x.dtype))  # as vLLM writes it
    between(plugin.rms_norm(x, weight, 1e-6), *neighbours(x, weight, 1e-6, x.dtype))
    out, stored = plugin.fused_add_rms_norm(x, r, weight, 1e-6)
    between(out, *neighbours(total, weight, 1e-6, x.dtype))
    assert torch.equal(stored, total.bfloat16())


def test_what_it_takes():
    x, w = torch.randn(4, 8).bfloat16(), torch.ones(8)
    assert plugin._supports_norm(x, w, 1e-6) and plugin._supports_norm(x, None, 1e-6)
    assert not plugin._supports_norm(x, w, 1e-6, 4) and not plugin._supports_norm(x.double(), w, 1e-6)
    assert not plugin._supports_norm(x.t(), w, 1e-6) and not plugin._supports_norm(x, w.double(), 1e-6)
    assert plugin._supports_sum(x, x, w, 1e-6) and not plugin._supports_sum(x, x.float(), w, 1e-6)


def test_schemas():
    """As torch reads them off our functions; vLLM compares strings."""
    read = {f: torch.library.infer_schema(f, mutates_args=()) for f in (plugin.rms_norm, plugin.fused_add_rms_norm)}
    assert read[plugin.rms_norm] == (
        "(Tensor x, Tensor? weight, float epsilon, SymInt? variance_size=None) -> Tensor"
    )
    assert read[plugin.fused_add_rms_norm] == (
        "(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, SymInt? variance_size=None) -> (Tensor, Tensor)"
    )


# ---- A plugin never stops its host ----


def test_all_is_taken(monkeypatch, logged):
    vllm = fake_vllm.install(monkeypatch, "0.32.0")
    plugin.register()
    plugin.register()
    assert all(list(getattr(vllm.ops, name).impls) == ["adze"] for name in NORMS)
    assert set(vllm.replaced) == {"SiluAndMul", "MulAndSilu", "GeluAndMul"}
    assert logged() == []


def test_without_ir(monkeypatch, logged):
    """As vLLM 0.19."""
    vllm = fake_vllm.install(monkeypatch, "0.19.1", ir_ops=None)
    plugin.register()
    plugin.register()
    assert len(vllm.replaced) == 3
    assert logged() == [
        "adze: vLLM 0.19.1 does not take rms_norm, fused_add_rms_norm "
        "(ModuleNotFoundError: No module named 'vllm.ir')"
    ]


def test_without_one_ir_op(monkeypatch, logged):
    """As vLLM 0.20."""
    vllm = fake_vllm.install(monkeypatch, "0.20.2", ir_ops=("rms_norm",))
    plugin.register()
    plugin.register()
    assert "adze" in vllm.ops.rms_norm.impls and len(vllm.replaced) == 3
    (message,) = logged()
    assert message.startswith("adze: vLLM 0.20.2 does not take fused_add_rms_norm (AttributeError: ")


def test_without_layers(monkeypatch, logged):
    vllm = fake_vllm.install(monkeypatch, "0.40.0", layers=(fake_vllm.SiluAndMul,))
    plugin.register()
    assert all("adze" in getattr(vllm.ops, name).impls for name in NORMS) and set(vllm.replaced) == {"SiluAndMul"}
    (message,) = logged()
    assert "vLLM 0.40.0" in message
    assert "MulAndSilu" in message and "GeluAndMul" in message
    vllm = fake_vllm.install(monkeypatch, "0.41.0", layers=None)
    plugin.register()
    assert all("adze" in getattr(vllm.ops, name).impls for name in NORMS)
    assert "vLLM 0.41.0" in logged()[-1] and "SiluAndMul" in logged()[-1]


def test_registrars_that_raise(monkeypatch, logged):
    """As they do where a schema or a class has changed, or another plugin was first."""
    vllm = fake_vllm.install(monkeypatch, "0.33.0")

    def refuse(*args, **kwargs):
        raise ValueError("the schema does not match")

    monkeypatch.setattr(vllm.ops.rms_norm, "register_impl", refuse)
    monkeypatch.setattr(fake_vllm.SiluAndMul, "register_oot", refuse)
    plugin.register()
    assert "adze" in vllm.ops.fused_add_rms_norm.impls and set(vllm.replaced) == {"MulAndSilu", "GeluAndMul"}
    assert logged() == [
        "adze: vLLM 0.33.0 does not take rms_norm, SiluAndMul (ValueError: the schema does not match)"
    ]


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, ImportError, KeyError])
def test_whatever_is_raised(monkeypatch, logged, error):
    def fail(*args, **kwargs):
        raise error("broken")

    fake_vllm.install(monkeypatch, "0.32.0")
    monkeypatch.setattr(plugin.importlib, "import_module", fail)
    plugin.register()
    monkeypatch.setattr(plugin, "_offers", fail)
    plugin.register()
    assert len(logged()) == 2 and all("broken" in message for message in logged())


def test_layers_of_another_plugin_stay(monkeypatch, logged):
    vllm = fake_vllm.install(monkeypatch, "0.32.0")
    theirs = type("Theirs", (fake_vllm.SiluAndMul,), {})
    fake_vllm.SiluAndMul.register_oot(theirs)
    plugin.register()
    assert vllm.replaced["SiluAndMul"] is theirs and len(vllm.replaced) == 3 and logged() == []


def test_layers_of_gpus_stay(monkeypatch, logged):
    vllm = fake_vllm.install(monkeypatch, "0.32.0", cpu=False)
    plugin.register()
    assert not vllm.replaced and "adze" in vllm.ops.rms_norm.impls and logged() == []


# ---- Compiled graphs ----


def dispatched(op, *args):
    """As vLLM's IrOp.dispatch, with adze before vLLM's own."""
    function, supports = {"rms_norm": (plugin.rms_norm, plugin._supports_norm),
                          "fused_add_rms_norm": (plugin.fused_add_rms_norm, plugin._supports_sum)}[op]  # fmt: skip
    if supports(*args):
        return function(*args)
    *states, weight, eps = args
    total = sum(x.float() for x in states)
    out = definition(total, weight, eps, states[0].dtype)
    return out if op == "rms_norm" else (out, total.to(states[0].dtype))


@pytest.mark.parametrize("op", NORMS)
def test_cpu_graphs_are_the_compilers(op):
    """vLLM traces one graph for every number of tokens there: what decode loses is more than prefill gains."""
    torch.manual_seed(0)
    args = [torch.randn(3, 64).bfloat16() for _ in range(1 + (op != "rms_norm"))]
    args += [torch.randn(64).bfloat16(), 1e-6]
    with Watch() as eager:
        dispatched(op, *args)
    assert eager.adze == 1
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(functools.partial(dispatched, op), backend=backend, fullgraph=True, dynamic=True)(*args)
    (graph,) = graphs
    assert not any("adze" in str(node.target) for node in graph.graph.nodes)


def test_single_tokens_of_gpu_graphs_are_the_compilers():
    """vLLM lowers IR ops with tensors that have no data; sizes may be symbols."""
    from torch._subclasses import FakeTensor, FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(*shape, device="cuda"):
        with mode:
            return FakeTensor(mode, torch.empty(*shape, device="meta"), device)

    def taken(x):
        answers = {plugin._supports_norm(x, weight, 1e-6), plugin._supports_sum(x, x, weight, 1e-6)}
        return answers.pop() if len(answers) == 1 else answers

    weight = fake(64)
    assert taken(fake(4, 64)) is True and taken(fake(1, 64)) is False
    assert taken(fake(mode.shape_env.create_unbacked_symint(), 64)) is True
    assert taken(fake(4, 64, device="cpu")) is False


# ---- Layers ----


@pytest.fixture
def layers(monkeypatch):
    """vLLM's layers, or the fakes, with adze's in their place. enable() takes what vLLM's config calls custom_ops."""
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("vllm") is None:
            fake_vllm.install(monkeypatch, "0.32.0")
            plugin.register()

            def enable(custom_ops):
                monkeypatch.setattr(fake_vllm.CustomOp, "custom_ops", custom_ops)

            yield types.SimpleNamespace(**{cls.__name__: cls for cls in fake_vllm.GATED}, enable=enable)
            return
        from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers import activation

        plugin.register()

        def enable(custom_ops):
            config = VllmConfig(compilation_config=CompilationConfig(custom_ops=custom_ops))
            stack.enter_context(set_current_vllm_config(config))

        yield types.SimpleNamespace(**vars(activation), enable=enable)


ACTS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name, options, act",
    [
        ("SiluAndMul", {}, "silu"),
        ("MulAndSilu", {}, "silu"),
        ("GeluAndMul", {}, "gelu"),
        ("GeluAndMul", {"approximate": "tanh"}, "gelu_tanh"),
    ],
)
def test_gated_activations(layers, name, options, act, dtype):
    """In float silu is within 8 units of 2^-24: 2 ulps of exp are 4, and there are few more roundings. So is gelu, of
    its gate: where the gate is negative, 1 + erf cancels. In 16 bits the activation is then rounded, to either side
    of a midpoint that lies that near; the product has no error in float and is rounded once. So the bits are those
    of vLLM's own forward but where such a midpoint is."""
    layers.enable(["all"])
    try:
        layer = getattr(layers, name)(**options)
    except AttributeError as error:
        if "_OpNamespace" not in str(error):
            raise
        pytest.skip(f"vLLM's compiled part was made for another torch: {error}")
    torch.manual_seed(0)
    x = torch.randn(65, 2 * 96).to(dtype)
    with Watch() as watch:
        got = layer(x)
    assert watch.adze == 1
    gate, value = x.chunk(2, -1)[:: -1 if name == "MulAndSilu" else 1]
    exact, want = ACTS[act](gate.double()), layer.forward_native(x)
    slack = 8 * 2.0**-24 * (exact if act == "silu" else gate.double()).abs()
    if dtype == torch.float32:
        bound = 2 * (slack * value.double().abs() + 2.0**-24 * want.double().abs())
        assert ((got.double() - want.double()).abs() <= bound).all()
        return
    ends = [(exact + side * slack).to(dtype) * value for side in (-1, 1)]
    between(got, *ends)
    between(want, *ends)


def test_layers_follow_custom_ops(layers):
    """A layer that vLLM's config disables is vLLM's own, by the name it always had; so is one in a compiled graph."""
    x = torch.randn(64, 128)
    for custom_ops, calls in (
        (["all"], 1),
        (["none"], 0),
        (["none", "+silu_and_mul"], 1),
        (["all", "-silu_and_mul"], 0),
    ):
        layers.enable(custom_ops)
        layer = layers.SiluAndMul()
        with Watch() as watch:
            layer(x)
        assert watch.adze == calls, custom_ops
    layers.enable(["all"])
    layer, graphs = layers.SiluAndMul(), []
    torch._dynamo.reset()
    torch.compile(layer, backend=lambda graph, inputs: graphs.append(graph) or graph, fullgraph=True)(x)
    assert not any("adze" in str(node.target) for graph in graphs for node in graph.graph.nodes)


def test_layers_leave_what_adze_does_not_take(layers):
    layers.enable(["all"])
    layer = layers.SiluAndMul()
    for x in torch.randn(64, 128).double(), torch.randn(128, 64).t(), torch.randn(63, 128):
        with Watch() as watch:
            got = layer(x)
        assert watch.adze == 0 and torch.equal(got, layer.forward_native(x))
