"""diffusers' models with adze: what is replaced, that it computes the same, and that all around it still works."""

import contextlib
import importlib
import os
import pathlib
import subprocess
import sys
import types

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from torch import nn  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

import adze  # noqa: E402
import diffusers_models  # noqa: E402
from adze.patching.fingerprint import fingerprint  # noqa: E402
from device import Watch, here  # noqa: E402
from diffusers_seams import Attention, FloatMatmuls, Seams, check_numbers, output, recorded, tensors  # noqa: E402
from roundings import Scattered  # noqa: E402

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
FUSED = "gate + add + norm + modulation"
MODULATED = "layer_norm + modulation"


pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def attention_seam(monkeypatch):
    for name in ("ltx", "flux", "wan", "hunyuan_video", "qwenimage"):
        module = importlib.import_module(f"diffusers.models.transformers.transformer_{name}")
        monkeypatch.setattr(module, "dispatch_attention_fn", Attention.wrap(module.dispatch_attention_fn))


@pytest.fixture
def float_matmuls():
    with FloatMatmuls():
        yield


# ---- Numbers ----


NAMES = list(diffusers_models.MODELS)
IN_FLOAT = [name for name in NAMES if name != "wan_cast"]  # which is wan there


@pytest.mark.parametrize("size", ["tiny", "eligible"])
@pytest.mark.parametrize("name, dtype", [(n, "f32") for n in IN_FLOAT] + [(n, "bf16") for n in NAMES])
def test_numbers(name, size, dtype, attention_seam, float_matmuls):
    """Of modules with the same class and rule two are compared in the tiny model, where they lie in the first block
    and in the last, and one in a model of more elements."""
    model, inputs = diffusers_models.make(name, size == "eligible", DTYPES[dtype])
    handle, expected = check_numbers(model, inputs, 2 if size == "tiny" else 1)
    found = output(model, inputs)
    assert found.dtype == expected.dtype
    if dtype == "f32":
        torch.testing.assert_close(found, expected)
    handle.remove()
    assert torch.equal(output(model, inputs), expected)


WRONG = {  # what a kernel may leave out or take from elsewhere, as a change that the model has not seen
    "no bias": ("sdxl", lambda block: block.norm1.bias.zero_()),
    "no weight": ("sdxl", lambda block: block.norm1.weight.fill_(1)),
    "eps": ("sdxl", lambda block: setattr(block.norm1, "eps", 1e-3)),
    "a weight by a unit": ("sdxl", lambda block: block.norm1.weight[3].mul_(1 + 2.0**-7)),
    "no shift": ("ltx", lambda block: block.scale_shift_table[0].zero_()),
    "scale": ("ltx", lambda block: block.scale_shift_table[1].mul_(1.1)),
    "gate of another row": ("ltx", lambda block: block.scale_shift_table[2].copy_(block.scale_shift_table[5])),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_numbers_are_seen(wrong, attention_seam, float_matmuls):
    """The check of a block must fail for one that computes something else."""
    name, change = WRONG[wrong]
    model, inputs = diffusers_models.make(name, False, torch.bfloat16)
    kind = {"sdxl": "BasicTransformerBlock", "ltx": "LTXVideoTransformerBlock"}[name]
    path = next(p for p, m in model.named_modules() if type(m).__name__ == kind)
    calls, _ = recorded(model, inputs, [path])
    seams = Seams(model.get_submodule(path))
    seams.record(*calls[path])
    with adze.patched(model):
        seams.replay(*calls[path])
        change(seams.module)
        with pytest.raises(AssertionError, match="no rounding of the model's"):
            seams.replay(*calls[path])


@pytest.mark.parametrize("name", ["flux", "qwen_image"])
def test_half_is_clipped(name, attention_seam):
    """Sums beyond f16 become its largest number in the last line of a block, as in the model."""
    model, inputs = diffusers_models.make(name, False, torch.float16)
    paths = [p for p, m in model.named_modules() if type(m).__name__.endswith("TransformerBlock")]
    calls, _ = recorded(model, inputs, paths)
    for path in paths:
        block = model.get_submodule(path)
        args, kwargs = calls[path]
        kwargs = {k: v.sign() * 60000 if k.endswith("hidden_states") else v for k, v in kwargs.items()}
        for last, module in block.named_modules():
            if last.endswith(("net.2", "proj_out")):
                module.bias.fill_(60000)
        seams = Seams(block)
        expected = seams.record(args, kwargs)
        with adze.patched(model):
            found = seams.replay(args, kwargs)
        clipped = 0
        for (_, a), (_, b) in zip(tensors(expected), tensors(found), strict=True):
            assert torch.equal(a, b)
            clipped += int((a.abs() == 65504).sum())
        assert clipped


# ---- What is replaced ----

RMS, LN, ACT = ("RMSNorm", "rms_norm"), ("LayerNorm", "layer_norm"), ("SiLU", "silu")
GELU, TANH = ("GELU", "gelu"), ("AdaLayerNormContinuous", "norm + modulation")
ZERO, FF = ("AdaLayerNormZero", MODULATED), ("FeedForward", None)
UNET = {
    ("BasicTransformerBlock", FUSED),
    ("ResnetBlock2D", "group_norm + silu"),
    ("GroupNorm", "group_norm"),
    ("GEGLU", "gelu_mul"),
    ("Attention", None),
    LN,
    ACT,
    FF,
}
SD3 = {("JointTransformerBlock", FUSED), ("Attention", None), ZERO, TANH, LN, ACT, GELU, FF}
WAN = {
    ("WanTransformerBlock", FUSED),
    ("WanAttention", "qk_norm_rope"),
    ("FP32LayerNorm", "float layer_norm"),
    RMS,
    ACT,
    GELU,
    FF,
}
REFINER = {
    ("HunyuanVideoIndividualTokenRefinerBlock", "gate + add + norm"),
    ("HunyuanVideoAdaNorm", None),
    ("LinearActivation", "activation"),
    ("Attention", "qk_norm_rope"),
    ("Attention", None),
    ZERO,
    TANH,
    RMS,
    LN,
    ACT,
    GELU,
    FF,
}
REPLACED = {
    "ltx": {
        ("LTXVideoTransformerBlock", FUSED),
        ("LTXAttention", "qk_norm_rope"),
        ("LTXVideoRotaryPosEmbed", "tables of rope, kept"),
        ("AdaLayerNormSingle", None),
        RMS,
        LN,
        ACT,
        GELU,
        FF,
    },
    "flux": {
        ("FluxTransformerBlock", FUSED),
        ("FluxSingleTransformerBlock", "gelu into the concatenation"),
        ("FluxAttention", "qk_norm_rope"),
        ("AdaLayerNormZeroSingle", MODULATED),
        ZERO,
        TANH,
        RMS,
        LN,
        ACT,
        GELU,
        FF,
    },
    "sd15": UNET,
    "sdxl": UNET,
    "sd3": SD3,
    "sd35": SD3 | {("SD35AdaLayerNormZeroX", "layer_norm + 2 modulations"), RMS},
    "dit": {("BasicTransformerBlock", FUSED), ("Attention", None), ZERO, LN, ACT, GELU, FF},
    "wan": WAN,
    "hunyuan_video": REFINER
    | {
        ("HunyuanVideoTransformerBlock", FUSED),
        ("HunyuanVideoSingleTransformerBlock", "gelu into the concatenation"),
        ("AdaLayerNormZeroSingle", MODULATED),
    },
    "hunyuan_video_token_replace": REFINER
    | {
        ("HunyuanVideoTokenReplaceTransformerBlock", FUSED),
        ("HunyuanVideoTokenReplaceSingleTransformerBlock", "gelu into the concatenation"),
        ("HunyuanVideoTokenReplaceAdaLayerNormZero", MODULATED),
        ("HunyuanVideoTokenReplaceAdaLayerNormZeroSingle", MODULATED),
    },
    "qwen_image": {
        ("QwenImageTransformerBlock", FUSED),
        ("Attention", "qk_norm_rope"),
        TANH,
        RMS,
        LN,
        ACT,
        GELU,
        FF,
    },
}


@pytest.mark.parametrize("name", IN_FLOAT)
def test_report(name):
    """Every module that a rule is made for is replaced, the report has a reason for the others, and strict agrees."""
    model, _ = diffusers_models.make(name)
    handle = adze.patch(model, strict=True)
    assert {(row.cls, row.rule) for row in handle.rows} == REPLACED[name]
    for row in handle.rows:
        assert row.rule or row.reason in (
            "its activation has a rule of its own",
            "it computes modulations, and has no norm",
            "nothing is rotated",
        )
    text = handle.report()
    assert all(cls in text and (rule or "") in text for cls, rule in REPLACED[name])


@pytest.mark.parametrize("name", NAMES)
def test_no_norm_or_activation_is_left(name):
    """A patched model runs none of the operators that norms and activations are made of, but for one in DiT's own
    forward."""
    model, inputs = diffusers_models.make(name, False, torch.bfloat16)
    adze.patch(model)
    with Watch() as watch:
        output(model, inputs)
    eager = {"native_layer_norm", "native_group_norm", "_fused_rms_norm", "rsqrt", "gelu", "silu"}
    left = {op: n for op, n in watch.seen.items() if op.removeprefix("aten.") in eager}
    assert left == ({"aten.silu": 1} if name == "dit" else {})
    assert watch.adze


def snapshot(model):
    return {path: (module, list(module.__dict__.items())) for path, module in model.named_modules()}


def same(before, after):
    assert before.keys() == after.keys()
    for path, (module, items) in before.items():
        assert module is after[path][0]
        assert [k for k, _ in items] == [k for k, _ in after[path][1]], path
        for (key, a), (_, b) in zip(items, after[path][1], strict=True):
            assert a is b, f"{path}.{key}"


@pytest.mark.parametrize("name", IN_FLOAT)
def test_remove_leaves_nothing(name):
    model, _ = diffusers_models.make(name, False)
    before = snapshot(model)
    processors = {m: m.processor.__dict__.copy() for m in model.modules() if hasattr(m, "processor")}
    handle = adze.patch(model)
    assert handle.patched
    handle.remove()
    same(before, snapshot(model))
    assert processors == {m: m.processor.__dict__ for m in processors}


@pytest.mark.parametrize("name", ["ltx", "flux", "wan", "hunyuan_video", "qwen_image"])
def test_fast_is_as_near_to_float_and_not_the_same(name, float_matmuls):
    """ "fast" rounds less than the model and adds in another order, so its error must be one that the model's own
    roundings could have. 16 runs with stochastic rounding, which doubles the variance, give a mean and a deviation.
    The error, in the root mean square and in the largest element, must be at most 4 standard deviations above that
    mean, divided by the square root of 2."""
    model, inputs = diffusers_models.make(name, True, torch.bfloat16)
    with Watch() as before:
        expected = output(model, inputs)
    with adze.patched(model, numerics="fast"), Watch() as after:
        found = output(model, inputs)
    assert after.matmuls < before.matmuls
    assert not torch.equal(found, expected)
    runs = []
    for draw in range(16):
        with Scattered(draw):
            runs.append(output(model, inputs))
    wide = tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype == torch.bfloat16 else t, inputs)
    exact = output(model.float(), wide).double()
    for size in (lambda error: error.square().mean().sqrt(), lambda error: error.abs().max()):
        drawn = torch.stack([size(run.double() - exact) for run in runs])
        limit = (drawn.mean() + 4 * drawn.std()) / 2**0.5
        own, fast = size(expected.double() - exact), size(found.double() - exact)
        assert fast <= limit, f"{fast:.3g} above {limit:.3g}; the model has {own:.3g}"
        assert own <= limit  # or the limit would not be the model's


# ---- Other ways to call a model ----


def check_outputs(model, inputs, around=contextlib.nullcontext):
    """The same with and without a patch, in f32; around is entered for each call."""
    with around():
        expected = output(model, inputs)
    with adze.patched(model) as handle:
        assert handle.patched
        with around():
            torch.testing.assert_close(output(model, inputs), expected)
    return handle


def test_ltx_timestep_of_each_token(attention_seam):
    model, inputs = diffusers_models.make("ltx", False, torch.bfloat16)
    inputs["timestep"] = torch.randint(0, 1000, (2, 32))
    check_numbers(model, inputs)


def test_wan_timestep_of_each_token(attention_seam):
    model, inputs = diffusers_models.make("wan", False, torch.bfloat16)
    inputs["timestep"] = torch.randint(0, 1000, (2, 32))
    check_numbers(model, inputs)


def test_qwen_image_mask_hides_text():
    model, inputs = diffusers_models.make("qwen_image")
    adze.patch(model)
    first = output(model, inputs)
    inputs["encoder_hidden_states"][1, 5:] += 1
    assert torch.equal(output(model, inputs), first)
    inputs["encoder_hidden_states"][1, 4:] += 1
    assert not torch.equal(output(model, inputs)[1], first[1])


def test_qwen_image_modulation_by_token():
    torch.manual_seed(0)
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
        zero_cond_t=True,
    ).eval()
    _, inputs = diffusers_models.make("qwen_image", False)
    inputs |= {"hidden_states": torch.randn(2, 32, 16), "img_shapes": [[(1, 4, 4), (1, 4, 4)]] * 2}
    check_outputs(model, inputs)


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_fused_projections(name):
    model, inputs = diffusers_models.make(name)
    model.fuse_qkv_projections()
    handle = check_outputs(model, inputs)
    assert "qk_norm_rope" in handle.report()


@pytest.mark.parametrize("when", ["before", "after"])
def test_ip_adapter_processors_are_left_alone(when):
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    model, inputs = diffusers_models.make("flux", False)
    attention = model.transformer_blocks[0].attn
    adapter = FluxIPAdapterAttnProcessor(32, 32, num_tokens=(4,)).to(here())
    inputs["joint_attention_kwargs"] = {"ip_hidden_states": [torch.randn(2, 4, 32)]}
    plain_processor = attention.processor
    attention.set_processor(adapter)
    expected = output(model, inputs)
    if when == "after":
        attention.set_processor(plain_processor)
    handle = adze.patch(model)
    attention.set_processor(adapter)
    assert attention.processor is adapter
    torch.testing.assert_close(output(model, inputs), expected)
    reasons = {row.path: row.reason for row in handle.rows}
    said = "FluxIPAdapterAttnProcessor has weights of its own" if when == "before" else ""
    assert reasons["transformer_blocks.0.attn"] == said


def test_another_processor_is_called():
    """A subclass that the rules have not seen does the work itself."""
    from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor

    class Doubled(LTXVideoAttnProcessor):
        def __call__(
            self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None
        ):
            return 2 * super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)

    model, inputs = diffusers_models.make("ltx", False)
    handle = adze.patch(model)
    model.set_attn_processor(Doubled())
    found = output(model, inputs)
    handle.remove()
    torch.testing.assert_close(found, output(model, inputs))


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_channels_last(name):
    model, inputs = diffusers_models.make(name)
    model.to(memory_format=torch.channels_last)
    inputs["sample"] = inputs["sample"].contiguous(memory_format=torch.channels_last)
    check_outputs(model, inputs)


def test_gradients_are_the_models_own(deterministic):
    model, inputs = diffusers_models.make("flux", False)
    model.requires_grad_(True)
    grads = []
    for _ in range(2):
        with torch.enable_grad():
            output(model, inputs).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        adze.patch(model)
    assert grads[0] and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_autocast_keeps_the_models_own():
    model, inputs = diffusers_models.make("ltx", False)
    with torch.autocast(here().type, torch.bfloat16):
        expected = output(model, inputs)
        with adze.patched(model):
            found = output(model, inputs)
    assert found.dtype == expected.dtype and torch.equal(found, expected)


# ---- Hooks ----

HOOKED = ["ltx", "flux", "sd15", "wan", "qwen_image"]


def offload_groups(kind, **options):
    def apply(model):
        if options.get("use_stream") and here().type == "cpu":
            pytest.skip("the CPU has no streams")
        more = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        cpu = torch.device("cpu")
        model.enable_group_offload(here(), offload_device=cpu, offload_type=kind, **more, **options)

    return apply


def offload_model(model):
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload_with_hook(model, here())


def offload_each(model):
    """Weights are on the meta device until their own module is called."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(model, here())


OFFLOADS = {
    "leaf groups": offload_groups("leaf_level"),
    "block groups": offload_groups("block_level"),
    "leaf groups on a stream": offload_groups("leaf_level", use_stream=True),
    "block groups on a stream": offload_groups("block_level", use_stream=True),
    "model": offload_model,
    "each module": offload_each,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("name", HOOKED)
def test_offload(name, offload, when):
    model, inputs = diffusers_models.make(name, False)
    expected = output(model, inputs)
    if when == "before":
        OFFLOADS[offload](model)
        before = snapshot(model)
    handle = adze.patch(model)
    assert handle.patched
    if when == "after":
        OFFLOADS[offload](model)
    torch.testing.assert_close(output(model, inputs), expected)
    handle.remove()
    torch.testing.assert_close(output(model, inputs), expected)
    if when == "before" and offload in ("leaf groups", "block groups"):
        same(before, snapshot(model))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", HOOKED)
def test_layerwise_casting(name, when):
    """Weights of Linears are kept in fp8, and cast for each call of their module."""

    def cast(model):
        model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
        assert torch.float8_e4m3fn in {p.dtype for p in model.parameters()}

    model, inputs = diffusers_models.make(name, False)
    cast(model)
    expected = output(model, inputs)
    model, _ = diffusers_models.make(name, False)
    if when == "before":
        cast(model)
    handle = adze.patch(model)
    assert handle.patched
    if when == "after":
        cast(model)
    torch.testing.assert_close(output(model, inputs), expected)
    handle.remove()
    assert torch.equal(output(model, inputs), expected)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["ltx", "flux", "wan"])
def test_first_block_cache(name, when):
    model, inputs = diffusers_models.make(name)

    def steps():
        model._reset_stateful_cache()
        results = []
        with model.cache_context("cond"):
            for scale in (1.0, 1.001, 2.0):
                results.append(output(model, inputs | {"hidden_states": inputs["hidden_states"] * scale}))
        return results

    config = diffusers.FirstBlockCacheConfig(threshold=0.05)
    model.enable_cache(config)
    expected = steps()
    if when == "after":
        model.disable_cache()
    handle = adze.patch(model)
    if when == "after":
        model.enable_cache(config)
    found = steps()
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a)
    handle.remove()
    model.disable_cache()
    uncached = output(model, inputs | {"hidden_states": inputs["hidden_states"] * 1.001})
    assert not torch.equal(expected[1], uncached)  # the cache was at work


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(when):
    peft = pytest.importorskip("peft")
    model, inputs = diffusers_models.make("ltx")
    plain_output = output(model, inputs)
    config = peft.LoraConfig(r=4, target_modules=["to_q", "to_k", "to_out.0", "net.0.proj"], init_lora_weights=False)
    if when == "before":
        model.add_adapter(config)
    handle = adze.patch(model)
    if when == "after":
        model.add_adapter(config)
    found = output(model, inputs)
    handle.disable()
    expected = output(model, inputs)
    assert not torch.equal(expected, plain_output)
    torch.testing.assert_close(found, expected)


# ---- The rest ----


def test_pipeline_components_are_patched():
    torch.manual_seed(0)
    unet, inputs = diffusers_models.make("sd15", False)
    pipe = types.SimpleNamespace(components={"unet": unet, "scheduler": object()})
    handle = adze.patch(pipe)
    assert all(path.startswith("unet.") for path in handle.patched)
    handle.remove()
    assert output(unet, inputs) is not None


def test_unknown_source_is_left_alone():
    """A block whose source is not known is not touched, and the report shows its fingerprint."""

    class LTXVideoTransformerBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1 = nn.LayerNorm(8)

        def forward(self, hidden_states):
            return hidden_states + self.norm1(hidden_states)

    block = nn.ModuleList([LTXVideoTransformerBlock()])
    handle = adze.patch(block)
    row = next(row for row in handle.rows if row.cls == "LTXVideoTransformerBlock")
    assert row.rule is None and fingerprint(LTXVideoTransformerBlock.forward) in row.reason


def test_example():
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, str(root / "examples" / "diffusers_injection.py")]
    path = os.pathsep.join([str(root / "python"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert run.returncode == 0, run.stderr
    assert "qk_norm_rope" in run.stdout and "modules patched" in run.stdout and "ms a step" in run.stdout
