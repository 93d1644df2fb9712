"""adze.compile(numerics="fast"): products of few rows of a compiled graph, with what is around them, by gemm."""

import functools

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import adze  # noqa: E402
from adze.inductor.compile import Pass  # noqa: E402
from adze.patching import products  # noqa: E402
from device import default_device, here  # noqa: E402
from inductor_graphs import all_close, calls, close, compiled, gemma, llama, randn, run, run_all  # noqa: E402

ROWS = 6
run_fast, run_all_fast = (functools.partial(each, numerics="fast") for each in (run, run_all))


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    """Six rows are gemm's here, whatever was measured."""
    monkeypatch.setitem(products.FASTER, here().type, {torch.float32: ROWS, torch.bfloat16: ROWS})


def three(x, norm, a, b, c, bias):
    n = llama(x, norm)
    return F.linear(n, a), F.linear(n, b, bias), F.linear(n, c)


def gated(x, norm, a, b, c, bias):
    n = gemma(x, norm)
    return F.linear(n, b, bias) * F.silu(F.linear(n, a))


X, NORM, BIAS = randn(2, 3, 64), randn(64, seed=1), randn(48, seed=2)
A, B, C = (randn(48, 64, seed=seed) / 8 for seed in (3, 4, 5))
GIVEN = (X, NORM, A, B, C, BIAS)
R = randn(2, 3, 48, seed=6)
CHAINS = {
    "rms_norm, 3 products": (three, GIVEN),
    "rms_norm, 2 products, silu gate": (gated, GIVEN),
    "layer_norm, 2 products": (
        lambda x, w, a, b: (lambda n: (F.linear(n, a), F.linear(n, b)))(F.layer_norm(x, (64,), w, w)), (X, NORM, A, B)
    ),
    "rms_norm, product": (lambda x, w, a: F.linear(F.rms_norm(x, (64,), w, 1e-5), a), (X, NORM, A)),
    "layer_norm, product, gelu, residual": (
        lambda x, r, a, bias: F.gelu(F.linear(F.layer_norm(x, (64,)), a, bias)) + r, (X, R, A, BIAS)
    ),
    "2 products, gelu_tanh gate": (
        lambda x, a, b: F.gelu(F.linear(x, a), approximate="tanh") * F.linear(x, b), (X, A, B)
    ),
    "2 products": (lambda x, a, b: (F.linear(x, a).sin(), F.linear(x, b).cos()), (X, A, B)),
    "product, gelu": (lambda x, a: F.gelu(F.linear(x, a)), (X, A)),
    "product, quick_gelu": (lambda x, a: (lambda y: y * torch.sigmoid(1.702 * y))(F.linear(x, a)), (X, A)),
    "product, relu, residual": (lambda x, r, a: r + F.relu(F.linear(x, a)), (X, R, A)),
    "product, residual": (lambda x, r, a, bias: F.linear(x, a, bias) + r, (X, R, A, BIAS)),
    "2 products, relu gate": (  # of rows that the graph keeps apart: [6, 48] of [2, 3, 64]
        lambda x, a, b: F.relu(F.linear(x.view(-1, 64), a)) * F.linear(x.view(-1, 64), b), (X, A, B)
    ),
}  # fmt: skip


def test_chains_are_found():
    cases = {name: (fn, [t.float() for t in args]) for name, (fn, args) in CHAINS.items()}
    got, want, counts = run_all_fast(cases)
    assert counts == dict.fromkeys(CHAINS, 1)
    all_close(got, want)


def test_the_arguments_are_those_of_the_model():
    """The bits are those of a call of gemm, which is verified elsewhere; the error is not larger than eager's."""

    got, want, counts = run_fast(lambda one, two: (*three(*one), gated(*two)), GIVEN, [t.clone() for t in GIVEN])
    assert counts == {"rms_norm, 3 products": 1, "rms_norm, 2 products, silu gate": 1}
    doubles = [t.double() for t in GIVEN]
    with torch.no_grad():
        own = adze.gemm(X, A, w2=B, w3=C, bias2=BIAS, norm="rms", norm_weight=NORM, separate=True)
        glu = adze.gemm(X, A, w2=B, bias2=BIAS, norm="rms", norm_weight=NORM, weight_offset=1.0, act="silu", glu=True)
        exact = [*three(*doubles), gated(*doubles)]
    for a, b in zip(got, (*own, glu), strict=True):
        assert torch.equal(a, b)
    for a, b, c in zip(got, want, exact, strict=True):
        assert a.dtype == b.dtype and (a - c).norm() <= (b - c).norm() * 1.05


LEFT = [
    lambda x, r, w, a, b: F.linear(x, a),  # a lone product
    lambda x, r, w, a, b: (lambda n: (F.linear(n, a), n))(llama(x, w)),  # the norm is read elsewhere
    lambda x, r, w, a, b: (lambda y: (F.gelu(y), y))(F.linear(x, a)),  # and so is the product
    lambda x, r, w, a, b: (lambda y: (y + r, y))(F.linear(x, a)),
    lambda x, r, w, a, b: F.gelu(F.linear(x, a * 2)),  # the weight is computed
    lambda x, r, w, a, b: F.gelu(r @ a),  # or not [n, k]
    lambda x, r, w, a, b: F.linear(x, a) + r[:, :1],  # a row for several
    lambda x, r, w, a, b: F.linear(x, a) + r.double(),
    lambda x, r, w, a, b: torch.add(F.linear(x, a), r, alpha=2),
    lambda x, r, w, a, b: F.gelu(F.linear(x.half(), a.half())),  # nothing was measured
    lambda x, r, w, a, b: F.gelu(F.linear(x.repeat(1, 3, 1), a)),  # many rows
    lambda x, r, w, a, b: F.linear(x, a) * F.linear(x * 2, b),  # products of two inputs
    lambda x, r, w, a, b: F.tanh(F.linear(x, a)),
]


def test_the_rest_is_left_alone():
    x, r, w = X.float(), R.float(), NORM.float()
    cases = {i: (fn, (x, r, w, A.float(), B.float())) for i, fn in enumerate(LEFT)}
    got, want, counts = run_all_fast(cases)
    assert counts == {}
    all_close(got, want)


def test_more_products_than_a_call_takes():
    """A norm that four products read stays; three of them are a call."""

    def fn(x, w, a, b, c, d):
        n = llama(x, w)
        return [F.linear(n, y) for y in (a, b, c, d)]

    got, want, counts = run_fast(fn, X.float(), NORM.float(), *(t.float() for t in (A, B, C, A + 1)))
    assert counts == {"3 products": 1}
    all_close({0: got}, {0: want})


def chain(x, w, a, down):
    return x + F.linear(F.gelu(F.linear(llama(x, w), a)), down)


def test_only_what_the_table_has(monkeypatch):
    args = X, NORM, A, C.t().contiguous()
    assert run(chain, *args)[2] == {}  # "match"
    fused = {"rms_norm, product, gelu": 1, "product, residual": 1}
    for change, left, count in (
        (lambda: None, {}, fused),
        (lambda: monkeypatch.setitem(products.FASTER, here().type, {torch.bfloat16: ROWS - 1}),
         {f"more than {ROWS - 1} rows": 2}, {}),
        (lambda: monkeypatch.setitem(products.FASTER, here().type, {}), {f"bfloat16 on {here().type}": 2}, {}),
    ):  # fmt: skip
        change()
        made, own = compiled(chain, numerics="fast")
        with torch.no_grad(), default_device(None):
            made(*args)
        assert (own.counts, own.left) == (count, left)
    with torch._inductor.config.patch(max_autotune=True), torch.no_grad(), default_device(None):
        made, tuned = compiled(chain, numerics="fast")
        made(*args)
    assert tuned.counts == {} and tuned.left == {"a graph whose products are autotuned": 2}
    assert own.report() == f"nothing was replaced\nx2    - a product of bfloat16 on {here().type}"


def test_rows_that_are_not_known():
    """A range that the table has whole is gemm's, in one graph; another is Inductor's."""
    args = NORM.float(), A.float(), C.t().contiguous().float()
    for most, counts, left in (
        (ROWS, {"rms_norm, product, gelu": 1, "product, residual": 1}, {}),
        (ROWS + 1, {}, {f"rows that are not known to be at most {ROWS}": 2}),
    ):
        made, own = compiled(chain, numerics="fast", dynamic=None)
        for rows in (2, 5):
            x = randn(rows, 64, dtype=torch.float32)
            torch._dynamo.mark_dynamic(x, 0, min=2, max=most)
            with torch.no_grad(), default_device(None):
                close(made(x, *args), chain(x, *args))
        assert own.counts == counts and own.left == left and len(own.graphs) == 1


def test_key_of_the_cache(monkeypatch):
    keys = {Pass().uuid(), Pass(numerics="fast").uuid()}
    monkeypatch.setitem(products.FASTER, here().type, {torch.bfloat16: 1})
    keys.add(Pass(numerics="fast").uuid())
    assert len(keys) == 3
    with pytest.raises(ValueError, match='numerics is \'quick\', it must be "match" or "fast"'):
        adze.compile(chain, numerics="quick")


def test_a_decoder_layer():
    """Four launches; the rotation is another chain."""
    from test_inductor import layer

    module, kwargs = layer("Qwen3", torch.float32)
    kwargs = {"position_embeddings": tuple(t[:, :3] for t in kwargs["position_embeddings"])}
    made, own = compiled(module, numerics="fast")
    x = randn(2, 3, 256, dtype=torch.float32)
    with torch.no_grad(), default_device(None):
        close(made(x, **kwargs), module(x, **kwargs))
    assert own.counts == {
        "rms_norm, 3 products": 1,
        "rms_norm, 2 products, silu gate": 1,
        "product, residual": 2,
        "qk-norm, rope": 1,
    }
    assert calls(own).count("adze.gemm.default") == 3 and "adze.gemm.out3" in calls(own)
    assert "x2    product, residual\n" in own.report() and own.left == {}
    assert not {"aten.mm.default", "aten.addmm.default"} & set(calls(own, "aten"))


def test_through_inductor():
    """adze.compile, end to end: other numbers of the same shapes run the same graph."""
    torch._dynamo.reset()
    made = adze.compile(
        chain, devices=(here().type,), numerics="fast", fullgraph=True, options={"fx_graph_cache": False}
    )
    args = [t.float() for t in (X, NORM, A, C.t().contiguous())]
    with torch.no_grad(), default_device(None), torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            x = randn(2, 3, 64, dtype=torch.float32, seed=seed)
            close(made(x, *args[1:]), chain(x, *args[1:]))
    assert made.adze_pass.counts == {"rms_norm, product, gelu": 1, "product, residual": 1}
    assert made.adze_pass.report() == "x1    product, residual\nx1    rms_norm, product, gelu"


def test_a_wide_weight():
    """The head of a language model, with the norm before it."""
    head = randn(40000, 64, dtype=torch.float32)

    def logits(x, w, head):
        return F.linear(llama(x, w), head)

    got, want, counts = run_fast(logits, X.float(), NORM.float(), head)
    assert counts == {"rms_norm, product": 1}
    all_close({0: got}, {0: want})
