"""Patched models under torch's other ways to compute: derivatives along with values, batches of functions, tensors of
rows of different lengths."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import adze  # noqa: E402
import models  # noqa: E402
from device import generator, here  # noqa: E402


def randn(*shape):
    return torch.randn(*shape, generator=generator(0))


def _network():
    parts = torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 8), torch.nn.RMSNorm(8), torch.nn.SiLU()
    return torch.nn.Sequential(*parts).eval().requires_grad_(False)


@pytest.mark.parametrize("numerics", ["match", "fast"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_tangents(name, numerics):
    """torch.func.jvp, under no_grad too. sdpa has no tangents: the models have eager attention."""
    model, arguments = models.build(name).requires_grad_(False), models.inputs(name)
    model.set_attn_implementation("eager")
    ids, mask = arguments["input_ids"], arguments["attention_mask"]
    embedded = model.get_input_embeddings()(ids)

    def run(x):
        return model(inputs_embeds=x, attention_mask=mask)[0] * mask[..., None]  # no token sees padding

    want = torch.func.jvp(run, (embedded,), (randn(*embedded.shape),))
    with adze.patched(model, numerics=numerics):
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                torch.testing.assert_close(torch.func.jvp(run, (embedded,), (randn(*embedded.shape),)), want)


def test_tangents_of_a_quantised_model():
    model = torch.nn.Sequential(torch.nn.Linear(32, 16, device=here())).eval()
    x = randn(2, 32)
    with adze.quantize(model, "int8"):
        weight = model[0].weight
        value, tangent = torch.func.jvp(model, (x,), (x,))
    torch.testing.assert_close(tangent, x @ weight.t())


def test_functions_of_a_batch():
    """torch.func.vmap, over inputs and over weights."""
    model, x = _network(), randn(5, 3, 8)
    weights = {name: randn(5, *value.shape) for name, value in model.named_parameters()}

    def run(given, x):
        return torch.func.functional_call(model, given, (x,))

    with torch.no_grad():
        want = torch.func.vmap(model)(x), torch.func.vmap(run, (0, None))(weights, x[0])
        with adze.patched(model):
            got = torch.func.vmap(model)(x), torch.func.vmap(run, (0, None))(weights, x[0])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout):
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 8), torch.nn.SiLU()).eval()
    with torch.no_grad():
        x = torch.nested.nested_tensor([randn(3, 8), randn(2, 8)], layout=layout)
        want = model(x).unbind()
        with adze.patched(model):
            got = model(x).unbind()
    torch.testing.assert_close(got, want)
