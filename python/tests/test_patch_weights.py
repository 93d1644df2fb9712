"""A patched model's weights: gradients and autocast, LoRA, other dtypes, tensors of other classes."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from torch import nn  # noqa: E402

import adze  # noqa: E402
import models  # noqa: E402
from device import Watch, here  # noqa: E402
from test_patch import INPUTS, logits, patched_paths  # noqa: E402


def gradients(model, checkpointing=None):
    model.train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    model.zero_grad()
    result = model(**INPUTS, labels=INPUTS["input_ids"], use_cache=False)
    result.loss.backward()
    return result.loss, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_training_is_the_models_own(name, checkpointing, deterministic):
    loss, expected = gradients(models.build(name), checkpointing)
    model = models.build(name)
    adze.patch(model)
    found_loss, found = gradients(model, checkpointing)
    if checkpointing:  # reentrant checkpoints run the forward without gradients first, and that may be adze's
        torch.testing.assert_close(found_loss, loss)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient)
    else:
        assert torch.equal(found_loss, loss)
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_autocast_is_the_models_own(llama):
    with torch.autocast(here().type, torch.bfloat16):
        expected = logits(llama)
        adze.patch(llama)
        found = logits(llama)
    assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_mixed_weights_keep_the_models_dtype():
    model = models.build("llama", torch.bfloat16)
    model.model.norm.float()
    x = torch.randn(3, 5, 128).bfloat16()
    with torch.no_grad():
        expected = model.model.norm(x)
        adze.patch(model)
        found = model.model.norm(x)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected)


class Wrapped(torch.Tensor):
    pass


def test_other_tensors_go_to_the_original(llama):
    norm = llama.model.norm
    strange = [torch.randn(2, 128).double(), torch.randn(2, 128).as_subclass(Wrapped), torch.randn(128, 2).t()]
    with torch.no_grad():
        expected = [norm(x) for x in strange]
        adze.patch(llama)
        for x, y in zip(strange, expected, strict=True):
            assert torch.equal(norm(x), y) and type(norm(x)) is type(y) and norm(x).dtype == y.dtype
        assert norm(torch.randn(1, 1, 1, 1, 2, 128)).dim() == 6
        norm.to("meta")
        assert norm(torch.randn(2, 128, device="meta")).device.type == "meta"


class Quantised(torch.Tensor):
    """A weight kept as int8 and a scale, which operators get as their product; torchao's tensors are of this kind."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values, scale):
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=scale.device)
        made.values, made.scale = values, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        return op(*(a.values * a.scale if isinstance(a, cls) else a for a in args), **(kwargs or {}))


def quantise(module):
    scale = module.weight.detach().abs().amax() / 127
    values = (module.weight.detach() / scale).round().to(torch.int8)
    module.weight = nn.Parameter(Quantised(values, scale), requires_grad=False)


def test_quantised_weights(llama):
    """A Linear with such a weight is not patched. A norm with one runs its original forward, and the report says
    so."""
    for module in llama.modules():
        if isinstance(module, nn.Linear):
            quantise(module)
    exact, expected = logits(models.build("llama")), logits(llama)
    assert not torch.equal(exact, expected)
    with adze.patched(llama) as handle:
        assert handle.patched == adze.patch(models.build("llama")).patched
        with Watch() as watch:
            found = logits(llama)
    assert watch.adze
    torch.testing.assert_close(found, expected)
    norm, x = llama.model.norm, torch.randn(2, 128)
    quantise(norm)
    with torch.no_grad(), Watch() as watch:
        expected = norm(x)
        handle = adze.patch(llama, strict=True)
        assert torch.equal(norm(x), expected)
    assert not watch.adze
    (row,) = [row for row in handle.rows if row.path == "model.norm"]
    assert row.rule is None and row.reason == "its weight is a Quantised"
    quantise(llama.model.layers[0].post_attention_layernorm)
    expected = logits(llama)
    handle = adze.patch(llama)
    torch.testing.assert_close(logits(llama), expected)
    assert "model.layers.1" in handle.patched and "model.layers.0" not in handle.patched


def with_lora(model):
    peft = pytest.importorskip("peft")
    settings = dict(target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], modules_to_save=["norm"], r=4)
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(**settings, init_lora_weights=False)).eval()


@pytest.mark.parametrize("first", ["patch", "lora"])
def test_lora(first, deterministic):
    unpatched = with_lora(models.build("llama"))
    expected, (loss, grads) = logits(unpatched), gradients(unpatched)
    plain = logits(models.build("llama"))
    model = models.build("llama")
    if first == "patch":
        handle = adze.patch(model)
        model = with_lora(model)
        lost = {"base_model.model." + path for path in handle.patched} - set(patched_paths(model))
        assert lost and all(path.endswith("norm") for path in lost)
        assert any(path.endswith("modules_to_save.default") for path in patched_paths(model))
    else:
        model = with_lora(model)
        handle = adze.patch(model)
        assert not any(path.endswith("norm") for path in handle.patched)
        assert any(path.endswith("modules_to_save.default") for path in handle.patched)
    torch.testing.assert_close(logits(model), expected)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), plain)
    found_loss, found = gradients(model)
    assert torch.equal(found_loss, loss) and found.keys() == grads.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in grads.items())
    model.eval()
    handle.remove()
    assert patched_paths(model) == []
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("first", ["patch", "lora"])
def test_lora_merged_and_unmerged(llama, first):
    plain = logits(llama)
    handle = adze.patch(llama) if first == "patch" else None
    model = with_lora(llama)
    handle = handle or adze.patch(model)
    paths = patched_paths(model)
    linear = model.base_model.model.model.layers[0].mlp.gate_proj
    apart, merged = logits(model), linear.get_base_layer().weight + linear.get_delta_weight("default")

    def agree(found):
        """Patched and not, and with the adapter apart: merging changes the order of sums alone."""
        torch.testing.assert_close(found, apart)
        handle.disable()
        torch.testing.assert_close(found, logits(model))
        handle.enable()

    assert not torch.allclose(apart, plain, atol=0.01)
    for _ in range(2):
        model.merge_adapter()
        assert linear.merged and torch.equal(linear.weight, merged) and patched_paths(model) == paths
        agree(logits(model))
        model.unmerge_adapter()
        assert not linear.merged and not torch.allclose(linear.weight, merged, atol=0.01)
        assert patched_paths(model) == paths
        agree(logits(model))
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), plain)
    whole = model.merge_and_unload()
    assert type(whole) is type(llama) and any(path.endswith("mlp") for path in patched_paths(whole))
    torch.testing.assert_close(logits(whole), apart)
    handle.remove()
    assert patched_paths(whole) == []
    torch.testing.assert_close(logits(whole), apart)
