"""What changes in a model after it was patched: attributes are read when a module is called, as models read them."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from transformers import activations  # noqa: E402

import adze  # noqa: E402
import models  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_gradients")


def see_change(model, change, call, op="rms_norm"):
    """A patched model computes what it would without the patch, before and after a change, and the change matters."""
    before = call()
    handle = adze.patch(model)
    assert handle.patched
    torch.testing.assert_close(call(), before)
    change()
    found = call()
    handle.disable()
    expected = call()
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(expected, before, rtol=1e-3)


NORMS = {"llama": "variance_epsilon", "gemma": "eps", "gemma2": "eps", "qwen3": "variance_epsilon",
         "olmo2": "variance_epsilon", "gpt2": "eps", "bert": "eps", "t5": "variance_epsilon",
         "cohere": "variance_epsilon", "gpt_neox_sequential": "eps", "clip": "eps"}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_eps(name):
    model, inputs = models.build(name), models.inputs(name)

    def change():
        for module in model.modules():
            if NORMS[name] in module.__dict__ and "norm" in type(module).__name__.lower():
                setattr(module, NORMS[name], 3.0)

    see_change(model, change, lambda: models.output(model, inputs))


@pytest.mark.parametrize("which", ["q_norm", "k_norm"])
def test_eps_of_queries_or_keys_alone(which):
    model, inputs = models.build("qwen3"), models.inputs("qwen3")

    def change():
        getattr(model.model.layers[0].self_attn, which).variance_epsilon = 3.0

    see_change(model, change, lambda: models.output(model, inputs))


CHILDREN = {
    "llama": "model.layers.0.post_attention_layernorm",
    "gemma2": "model.layers.0.post_feedforward_layernorm",
    "qwen3": "model.layers.0.self_attn.q_norm",
    "gpt2": "transformer.h.0.ln_2",
    "bert": "encoder.layer.0.output.LayerNorm",
}


@pytest.mark.parametrize("name", CHILDREN)
def test_a_child_replaced_by_one_with_another_eps(name):
    path = CHILDREN[name]
    model, inputs = models.build(name), models.inputs(name)
    parent, _, child = path.rpartition(".")
    old = model.get_submodule(path)

    def change():
        new = type(old)(old.weight.shape[0], eps=3.0).to(old.weight.device)
        new.load_state_dict(old.state_dict())
        setattr(model.get_submodule(parent), child, new)

    see_change(model, change, lambda: models.output(model, inputs))


@pytest.mark.parametrize("cls, part", [(nn.LayerNorm, "weight"), (nn.LayerNorm, "bias"), (nn.RMSNorm, "weight")])
def test_a_weight_or_bias_that_comes_or_goes(cls, part):
    x = torch.randn(5, 8)
    for first, then in [(None, nn.Parameter(torch.randn(8))), (nn.Parameter(torch.randn(8)), None)]:
        norm = cls(8)
        setattr(norm, part, first)
        see_change(nn.Sequential(norm), lambda norm=norm, then=then: setattr(norm, part, then), lambda n=norm: n(x))


def test_a_norm_over_more_dimensions():
    model = nn.Sequential(nn.LayerNorm(8, elementwise_affine=False))
    x = torch.randn(3, 4, 8)
    see_change(model, lambda: setattr(model[0], "normalized_shape", (4, 8)), lambda: model(x))


def test_a_scale_that_is_switched_off():
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm

    norm = Gemma3nRMSNorm(8)
    norm.weight.data.normal_()
    x = torch.randn(5, 8)
    see_change(nn.Sequential(norm), lambda: setattr(norm, "with_scale", False), lambda: norm(x))


ACTS = {
    "torch": (lambda: nn.GELU(), lambda act: setattr(act, "approximate", "tanh")),
    "gelu": (lambda: activations.GELUActivation(), lambda act: setattr(act, "act", F.silu)),
    "tanh": (lambda: activations.GELUTanh(), lambda act: setattr(act, "act", F.silu)),
    "python": (lambda: activations.GELUActivation(True), lambda act: setattr(act, "act", F.silu)),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ACTS)
def test_a_choice_of_an_activation(name, fused):
    make, change = ACTS[name]
    act = make().to(torch.get_default_device())
    x = torch.randn(2, 6, 128) * 3
    if fused:
        model = models.build("llama").model.layers[0].mlp
        model.act_fn = act
    else:
        model = nn.Sequential(act)
    see_change(model, lambda: change(act), lambda: model(x))


def test_silu_in_place():
    act, x = nn.SiLU(), torch.randn(5, 8)
    handle = adze.patch(nn.Sequential(act))
    assert handle.patched
    act.inplace = True
    assert act(x) is x


@pytest.mark.parametrize(
    "name, attribute", [("gpt_neox_sequential", "use_parallel_residual"), ("falcon_sequential", None)]
)
def test_attention_and_mlp_in_parallel(name, attribute):
    model, inputs = models.build(name), models.inputs(name)

    def change():
        if attribute is None:
            model.config.parallel_attn = True
        for module in model.modules():
            if attribute in module.__dict__:
                setattr(module, attribute, True)

    see_change(model, change, lambda: models.output(model, inputs))


def diffusion(name):
    pytest.importorskip("diffusers")
    import diffusers_models
    from diffusers_seams import output

    model, inputs = diffusers_models.make(name, False, torch.float32)
    return model, lambda: output(model, inputs)


@pytest.mark.parametrize("name", ["ltx", "flux", "wan", "hunyuan_video", "qwen_image", "sd3", "dit", "sd15"])
def test_eps_in_diffusers(name):
    model, call = diffusion(name)

    def change():
        for module in model.modules():
            if isinstance(module.__dict__.get("eps"), float):
                module.eps = 3.0

    see_change(model, change, call)


@pytest.mark.parametrize("name", ["flux", "wan", "qwen_image"])
def test_eps_of_keys_alone_in_diffusers(name):
    model, call = diffusion(name)

    def change():
        for path, module in model.named_modules():
            if path.endswith(("norm_k", "norm_added_k")) and module is not None:
                module.eps = 3.0

    see_change(model, change, call)


def feed_forward(kind):
    pytest.importorskip("diffusers")
    from diffusers.models import activations as made

    torch.manual_seed(0)
    model = nn.Sequential(getattr(made, kind)(8, 8))
    x = torch.randn(2, 5, 8)
    return model, lambda: model(x * 3)


def test_a_gelu_of_diffusers():
    model, call = feed_forward("GELU")
    see_change(model, lambda: setattr(model[0], "approximate", "tanh"), call)


def test_the_activation_of_a_swiglu():
    model, call = feed_forward("SwiGLU")
    see_change(model, lambda: setattr(model[0], "activation", nn.Tanh()), call)


def test_a_hook_of_a_swiglus_activation():
    model, call = feed_forward("SwiGLU")
    see_change(model, lambda: model[0].activation.register_forward_hook(lambda m, args, out: out * 2), call)


@pytest.mark.parametrize("numerics", ["match", "fast"])
def test_the_bias_of_an_rms_norm(numerics):
    normalization = pytest.importorskip("diffusers.models.normalization")
    norm, x = normalization.RMSNorm(8, eps=1e-6, bias=True), torch.randn(5, 8)
    norm.bias.normal_()
    expected = norm(x)
    with adze.patched(nn.Sequential(norm), numerics=numerics):
        torch.testing.assert_close(norm(x), expected)
