"""Functions that somebody has wrapped: what a wrapper does is never lost, and the decorators of a list are kept."""

import functools
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb  # noqa: E402
from transformers.models.gemma import modeling_gemma  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.models.qwen3 import modeling_qwen3  # noqa: E402

import adze  # noqa: E402
import models  # noqa: E402
from adze.patching.fingerprint import fingerprint, unwrapped  # noqa: E402
from adze.patching.frame import is_adze, own_forward  # noqa: E402
from device import here  # noqa: E402

LLAMA = ["LlamaRMSNorm", "SiLUActivation", "LlamaMLP", "LlamaAttention", "LlamaDecoderLayer"]


def doubled(function):
    """A wrapper as functools.wraps makes it, that doubles what a function returns."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        out = function(*args, **kwargs)
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

    wrapper.doubles = True
    return wrapper


def of_a_subclass(module, monkeypatch):
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": doubled(type(module).forward)})


def of_the_class(module, monkeypatch):
    if not hasattr(type(module).forward, "doubles"):  # the class of an earlier module
        monkeypatch.setattr(type(module), "forward", doubled(type(module).forward))


def bound_to_the_instance(module, monkeypatch):
    module.forward = types.MethodType(doubled(type(module).forward), module)


def around_a_bound_method(module, monkeypatch):
    module.forward = doubled(module.forward)


WAYS = [of_a_subclass, of_the_class, bound_to_the_instance, around_a_bound_method]


def logits(model, name="llama"):
    return models.output(model, models.inputs(name))


def same_as_without(model, name="llama", **options):
    expected = logits(model, name)
    with adze.patched(model, **options) as handle:
        torch.testing.assert_close(logits(model, name), expected)
    return handle


@pytest.mark.parametrize("numerics", ["match", "fast"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("cls", LLAMA)
def test_a_wrapped_forward_runs(llama, monkeypatch, cls, way, numerics):
    plain = logits(llama)
    modules = [(path, module) for path, module in llama.named_modules() if type(module).__name__ == cls]
    for _, module in modules:
        way(module, monkeypatch)
    assert not torch.allclose(logits(llama), plain, rtol=0.1)
    handle = same_as_without(llama, numerics=numerics)
    assert handle.patched and not {path for path, _ in modules} & set(handle.patched)
    with pytest.raises(RuntimeError, match=f"a forward of its own|wrapped by {__name__}.wrapper"):
        adze.patch(llama, strict=True)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_wrapped_norm_of_queries_runs(monkeypatch, way):
    model = models.build("qwen3")
    way(model.model.layers[0].self_attn.q_norm, monkeypatch)
    handle = same_as_without(model, "qwen3")
    assert handle.report().count("qk_norm_rope") <= 1


@pytest.mark.parametrize("part", ["apply_rotary_pos_emb", "rotate_half"])
@pytest.mark.parametrize("name, home", [("llama", modeling_llama), ("qwen3", modeling_qwen3)])
def test_a_wrapped_rotation_runs(monkeypatch, name, home, part):
    model = models.build(name)
    monkeypatch.setattr(home, part, doubled(unwrapped(getattr(home, part))))
    handle = same_as_without(model, name)
    assert not any(path.endswith("self_attn") for path in handle.patched)
    assert f"wrapped by {__name__}.wrapper" in handle.report()


def test_a_partial_rotation_runs(llama, monkeypatch):
    rotate = unwrapped(modeling_llama.apply_rotary_pos_emb)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", functools.partial(rotate, unsqueeze_dim=1))
    assert not any(path.endswith("self_attn") for path in same_as_without(llama).patched)


def test_a_method_of_the_instance_runs():
    model = models.build("gemma")
    norm = model.model.norm
    norm._norm = doubled(norm._norm)
    assert "model.norm" not in same_as_without(model, "gemma").patched


def test_a_wrapped_method_of_the_class_runs(monkeypatch):
    model = models.build("gemma")
    monkeypatch.setattr(modeling_gemma.GemmaRMSNorm, "_norm", doubled(modeling_gemma.GemmaRMSNorm._norm))
    assert not any(path.endswith("norm") for path in same_as_without(model, "gemma").patched)


def test_a_call_of_the_childs_own_runs(llama):
    class Norm(modeling_llama.LlamaRMSNorm):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs) * 2

    llama.model.layers[0].post_attention_layernorm.__class__ = Norm
    handle = same_as_without(llama)
    assert "model.layers.0" not in handle.patched and "model.layers.1" in handle.patched


@pytest.mark.parametrize("change", ["a forward", "a hook"])
def test_a_function_that_kernels_replaced_runs(change):
    layer = pytest.importorskip("kernels.layer.layer")

    def rotate(x):
        return -x

    made = layer._create_func_module(rotate)()
    made.forward = types.MethodType(type(made).forward, made)  # as kernelize leaves it where it has no kernel
    assert unwrapped(made) is rotate
    if change == "a forward":
        made.forward = types.MethodType(lambda self, x: x, made)
    else:
        made.register_forward_hook(lambda module, args, out: out * 2)
    assert unwrapped(made) is made and fingerprint(made) is None


# ---- diffusers ----


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize("place", ["processor", "rotation", "norm", "block", "feed_forward"])
def test_diffusers(monkeypatch, place):
    pytest.importorskip("diffusers")
    from diffusers.models.transformers import transformer_flux as flux

    import diffusers_models
    from diffusers_seams import output

    model, inputs = diffusers_models.make("flux", False, torch.float32)
    with adze.patched(model) as plain:
        pass
    holder, name = {
        "processor": (flux.FluxAttnProcessor, "__call__"),
        "rotation": (flux, "apply_rotary_emb"),
        "norm": (type(model.transformer_blocks[0].attn.norm_q), "forward"),
        "block": (flux.FluxSingleTransformerBlock, "forward"),
        "feed_forward": (type(model.transformer_blocks[0].ff.net[0]), "forward"),
    }[place]
    monkeypatch.setattr(holder, name, doubled(getattr(holder, name)))
    expected = output(model, inputs)
    with adze.patched(model) as handle:
        torch.testing.assert_close(output(model, inputs), expected)
    lost = set(plain.patched) - set(handle.patched)
    assert lost and handle.patched


# ---- Decorators that are kept ----


def vision_block(kind_of=lambda cls: cls):
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as home
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniVisionEncoderConfig

    torch.manual_seed(0)
    config = Qwen2_5OmniVisionEncoderConfig(
        hidden_size=64, intermediate_size=128, num_heads=2, depth=1, attn_implementation="eager"
    )
    block = kind_of(home.Qwen2_5OmniVisionBlock)(config).to(here()).eval()
    angles = torch.randn(12, 16)
    angles = torch.cat([angles, angles], -1)
    kwargs = {"cu_seqlens": torch.tensor([0, 5, 12], dtype=torch.int32)}
    return block, torch.randn(12, 64), kwargs, (angles.cos(), angles.sin())


@pytest.mark.usefixtures("no_gradients")
def test_deprecate_kwarg_is_kept():
    from transformers.utils.deprecation import deprecate_kwarg

    def with_another_name(cls):
        renamed = deprecate_kwarg("rotary_pos_emb", version="99.0", new_name="position_embeddings")
        return type(cls.__name__, (cls,), {"forward": renamed(cls.forward)})

    block, x, kwargs, angles = vision_block(with_another_name)
    by_old_name, by_new_name = ({name: angles} for name in ("rotary_pos_emb", "position_embeddings"))
    expected = block(x, **kwargs, **by_new_name)
    with adze.patched(block) as handle:
        assert "" in handle.patched and is_adze(own_forward(block))
        torch.testing.assert_close(block(x, **kwargs, **by_new_name), expected)
        torch.testing.assert_close(block(x, **kwargs, **by_old_name), expected)
    assert torch.equal(block(x, **kwargs, **by_old_name), expected)


def test_no_grad_is_kept():
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as home

    class Scores(home.DeepseekV32Indexer):
        """Its decorator and its rotation, with a result that could have a gradient: an indexer's are integers."""

        @torch.no_grad()
        def forward(self, q, k, cos, sin):
            q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
            return q * k

    config = home.DeepseekV32Config(
        hidden_size=64, q_lora_rank=32, index_n_heads=2, index_head_dim=32, qk_rope_head_dim=16, index_topk=4
    )
    torch.manual_seed(0)
    indexer = home.DeepseekV32Indexer(config, 0).to(here()).eval()
    angles = torch.randn(2, 6, 8)
    angles = torch.cat([angles, angles], -1)
    mask = torch.ones(2, 6, 6, dtype=torch.bool).tril()
    args = (torch.randn(2, 6, 64), torch.randn(2, 6, 32), (angles.cos(), angles.sin()), mask, None)
    expected = indexer(*args)
    with adze.patched(indexer, ops={"rope"}) as handle:
        assert handle.patched == [""]
        assert torch.equal(indexer(*args), expected)
    scores = Scores(config, 0).to(here())
    q = torch.randn(2, 6, 2, 16, requires_grad=True)
    expected = scores(q, q[:, :, :1], angles.cos(), angles.sin())
    with adze.patched(scores, ops={"rope"}):
        found = scores(q, q[:, :, :1], angles.cos(), angles.sin())
    torch.testing.assert_close(found, expected)
    assert not expected.requires_grad and not found.requires_grad


def test_a_decorated_norm_is_not_fused(llama):
    class Norm(modeling_llama.LlamaRMSNorm):
        forward = torch.no_grad()(modeling_llama.LlamaRMSNorm.forward)

    for layer in llama.model.layers:
        layer.post_attention_layernorm.__class__ = Norm
    handle = same_as_without(llama)
    assert "model.layers.0.post_attention_layernorm" in handle.patched
    assert "model.layers.0" not in handle.patched and "is decorated" in handle.report()


def test_a_decorator_of_the_same_name_is_not_kept(llama, monkeypatch):
    """The list has the source of a decorator too, and the wrapper must call what it says it wraps."""
    norm = modeling_llama.LlamaRMSNorm
    fake = doubled(norm.forward)
    fake.__globals__["__name__"], name = "torch.utils._contextlib", fake.__globals__["__name__"]
    try:
        monkeypatch.setattr(norm, "forward", fake)
        assert "model.norm" not in same_as_without(llama).patched
    finally:
        fake.__globals__["__name__"] = name
    other = torch.no_grad()(doubled(unwrapped(norm.forward.__wrapped__)))
    other.__wrapped__ = norm.forward.__wrapped__
    monkeypatch.setattr(norm, "forward", other)
    assert "model.norm" not in same_as_without(llama).patched
