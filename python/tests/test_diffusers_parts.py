"""Parts of diffusers' models that adze keeps, joins or writes at once: what is made, and how often."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

import adze  # noqa: E402
import diffusers_models  # noqa: E402
from adze.patching.concat_activation import concat_activation  # noqa: E402
from adze.patching.diffusers.blocks import _cat_tokens  # noqa: E402
from device import here  # noqa: E402
from diffusers_seams import output  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_gradients")


def test_ltx_keeps_the_tables_of_the_step_before():
    model, inputs = diffusers_models.make("ltx", True)
    x, rope = inputs["hidden_states"], model.rope
    sizes = {"num_frames": 2, "height": 4, "width": 4}
    calls = [
        {},
        {"height": 2, "width": 8},
        {"rope_interpolation_scale": (0.5, 32, 32)},
        {"rope_interpolation_scale": (torch.tensor(0.5), 32, 32)},
        {"video_coords": torch.rand(2, 3, 32)},
    ]
    expected = [rope(x, **{**sizes, **call}) for call in calls]
    with adze.patched(model):
        for call, want in zip(calls, expected, strict=True):
            given = {**sizes, **call}
            found, again = rope(x, **given), rope(x, **given)
            for a, b in zip(found, want, strict=True):
                assert torch.equal(a, b)
            known = "video_coords" not in call and not any(
                isinstance(part, torch.Tensor) for part in call.get("rope_interpolation_scale", ())
            )
            assert (found is again) == known
            if known:
                for once, table in zip(found[0].adze_once, found, strict=True):
                    assert torch.equal(once.repeat_interleave(2, -1), table)
        first = rope(x, **sizes)
        rope.theta = 100.0
        assert not torch.equal(rope(x, **sizes)[0], first[0])
        with torch.enable_grad():
            assert rope(x, **sizes) is not rope(x, **sizes)


def test_ltx_makes_the_mask_of_its_heads_once(monkeypatch):
    model, inputs = diffusers_models.make("ltx", True)
    expected, made = output(model, inputs), []
    cls = type(model.transformer_blocks[0].attn2)
    prepare = cls.prepare_attention_mask
    monkeypatch.setattr(cls, "prepare_attention_mask", lambda *args: made.append(1) or prepare(*args))
    with adze.patched(model):
        torch.testing.assert_close(output(model, inputs), expected)
        assert len(made) == 1
        block, x, text = model.transformer_blocks[0].attn2, torch.randn(2, 32, 256), torch.randn(2, 16, 256)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                mask = torch.zeros(2, 1, 16)
                for bias in (0.0, 3.0):
                    mask[:, :, 4] = bias  # seen, though the tensor is the same one
                    found = block(x, text, mask)
                    with monkeypatch.context() as own:
                        own.delattr(block, "forward")
                        torch.testing.assert_close(found, block(x, text, mask))


def test_parts_of_one_tensor_are_joined_without_a_copy():
    for batch in (1, 2):
        x = torch.randn(batch, 7, 16)
        joined = _cat_tokens(x[:, :3], x[:, 3:])
        assert joined.data_ptr() == x.data_ptr()
        assert torch.equal(joined, x)
    gap, trained = torch.randn(2, 8, 16), torch.randn(1, 7, 16, requires_grad=True)
    for first, rest in [
        (gap[:, :3], gap[:, 4:]),
        (gap[:, :3], gap[:, 3:7]),
        (gap[:, 3:], gap[:, :3]),
        (gap[:, :3, :8], gap[:, 3:, :8]),
        (gap[:1, :3], gap[1:, :5]),
        (trained[:, :3], trained[:, 3:]),
    ]:
        joined = _cat_tokens(first, rest)
        assert joined.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        assert torch.equal(joined, torch.cat([first, rest], dim=1))


@pytest.mark.parametrize("size", [64, 61])
def test_an_activation_writes_its_part_of_a_concatenation(size):
    first, x = torch.randn(2, 5, size, dtype=torch.bfloat16), torch.randn(2, 5, 96, dtype=torch.bfloat16)
    expected = torch.cat([first, adze.activation(x, "gelu_pytorch_tanh")], dim=-1)
    for parts in [(first, x), (first.transpose(0, 1).contiguous().transpose(0, 1), x)]:
        assert torch.equal(concat_activation(*parts, "gelu_pytorch_tanh"), expected)
    compiled = torch.compile(concat_activation, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(first, x, "gelu_pytorch_tanh"), expected)
    torch.library.opcheck(torch.ops.adze.concat_activation.default, (first, x, 3))
    with torch.enable_grad(), pytest.raises(RuntimeError, match="gradients"):
        concat_activation(first, x.clone().requires_grad_(), "silu")


# ---- Projections ----


ATTENTIONS = {"ltx": "attn1", "flux": "attn", "wan": "attn1", "hunyuan_video": "attn", "qwen_image": "attn"}


@pytest.mark.parametrize("why", ["a projection", "a norm", "autocast"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_queries_keys_and_values_are_projected_once(name, why):
    """Whatever an attention finds that its ops cannot take: what is called twice runs its hooks twice."""
    model, inputs = diffusers_models.make(name, False, torch.float32)
    handle = adze.patch(model)
    attentions = [p for p in handle.patched if p.split(".")[-1] == ATTENTIONS[name]]
    assert attentions
    calls = []

    class Strange(torch.Tensor):
        """Of a class that adze's ops do not take."""

    def count(module, args, out):
        calls.append(module)
        return out.as_subclass(Strange) if why == "a projection" else out

    for path in attentions:
        attention = model.get_submodule(path)
        for child in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"):
            if getattr(attention, child, None) is not None:
                getattr(attention, child).register_forward_hook(count)
        if why == "a norm":
            attention.norm_k.register_forward_hook(lambda module, args, out: out * 2)
    with torch.autocast(here().type, torch.bfloat16) if why == "autocast" else contextlib.nullcontext():
        found, patched = output(model, inputs), list(calls)
        calls.clear()
        handle.disable()
        torch.testing.assert_close(found, output(model, inputs))
    assert patched and len(patched) == len(calls)
