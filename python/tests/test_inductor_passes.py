"""adze.compile with passes of a user: they run in the given order, and adze's after them."""

import pytest

torch = pytest.importorskip("torch")
from torch._inductor import config, custom_graph_pass  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import adze  # noqa: E402
from adze.inductor import compile as inductor  # noqa: E402
from device import here  # noqa: E402

AWARE = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)


class Own(custom_graph_pass.CustomGraphPass):
    def __init__(self):
        self.seen = []

    def __call__(self, graph):
        self.seen.append([str(node.target) for node in graph.nodes if "adze" in str(node.target)])

    def uuid(self):
        return "own"


def function():
    own = Own()
    return (lambda graph: own(graph)), own


def aware():
    if AWARE is None:
        pytest.skip("torch has none")

    class Aware(Own, AWARE):
        def __call__(self, graph, is_inference):
            assert is_inference
            super().__call__(graph)

    own = Aware()
    return own, own


def plain():
    own = Own()
    return own, own


def fn(x, residual, weight):
    h = residual + x
    return F.rms_norm(h, (h.shape[-1],), weight, 1e-6), h


@pytest.mark.parametrize("where", ["options", "config"])
@pytest.mark.parametrize("make", [plain, function, aware], ids=lambda make: make.__name__)
def test_a_pass_of_the_users_own_runs(make, where):
    given, own = make()
    torch._dynamo.reset()
    options = {"fx_graph_cache": False, **({"post_grad_custom_pre_pass": given} if where == "options" else {})}
    args = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64)
    with torch.no_grad(), config.patch(post_grad_custom_pre_pass=given if where == "config" else None):
        compiled = adze.compile(fn, devices=(here().type,), fullgraph=True, options=options)
        found = compiled(*args)
    assert own.seen == [[]]  # once, and before adze's
    assert sum(compiled.adze_pass.counts.values()) == 1
    for a, b in zip(found, fn(*args), strict=True):
        torch.testing.assert_close(a, b)


def test_their_names_are_in_the_key_of_the_cache():
    own, mine = Own(), inductor.Pass()
    assert inductor._chained([mine]) is mine
    assert inductor._chained([own, mine]).uuid() == ["own", mine.uuid()]
    assert inductor._chained([lambda graph: None, mine]).uuid() is None
    assert inductor._passes(None) == [] and inductor._passes([own, mine]) == [own, mine]
