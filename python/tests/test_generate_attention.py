"""model.set_attn_implementation("adze"): the tokens of eager attention, with any mask, cache and model."""

import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import adze  # noqa: E402
import models  # noqa: E402
from adze.generation import attention, in_torch, register  # noqa: E402
from device import Watch, default_device, generator, here  # noqa: E402
from lively import as_exact, attended, counted, lively, needs_kernels, prompt  # noqa: E402

# Falcon has no choice of attention, and one GPT-NeoX has that of the other.
NAMES = [name for name in models.LANGUAGE if not name.startswith(("falcon", "gpt_neox_"))]
MORE = ("gemma2", "gpt_oss")  # have a softcap, or sinks
STATIC = ("llama", "mistral", "gemma2", "gpt_oss", "gpt2")
TOKENS = 64


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_eager(name):
    """A batch padded on the left, prompt and decode, with a dynamic cache, and for some with a static one."""
    model, arguments = lively(name, attention="eager"), prompt()
    want = models.generate(model, arguments, TOKENS)
    assert len(set(want[:, -TOKENS:].flatten().tolist())) > 8  # no model that repeats itself
    model.set_attn_implementation("adze")
    assert model.config._attn_implementation == "adze"
    for cache, tokens in ((None, TOKENS), ("static", 20 if name in STATIC else 0)):
        if not tokens:
            continue
        with Watch() as watch:
            got = models.generate(model, arguments, tokens, cache)
        assert torch.equal(got, want[:, : got.shape[1]])
        more = name if name in MORE else None
        assert watch.seen["adze.attention"] == attended(2 * tokens, more=more)  # of each layer
        assert not attended(1, more=more) or not any("scaled_dot_product" in op for op in watch.seen)


@pytest.mark.parametrize("name", ["DeepseekV4", "RecurrentGemma"])
def test_masks_of_their_own(name):
    """DeepSeek-V4 appends columns to its mask, which are added to scores; RecurrentGemma's mask has one column."""
    config = getattr(transformers, f"{name}Config", None)
    if config is None:
        pytest.skip(f"this version of transformers has no {name}")
    options = dict(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=8, pad_token_id=0,
    )  # fmt: skip
    if name == "DeepseekV4":
        kinds = ["heavily_compressed_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
        options |= dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, layer_types=kinds)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(**options), attn_implementation="eager").eval()
    for path, parameter in model.named_parameters():
        parameter.data.mul_(6 if parameter.dim() > 1 and "embed" not in path else 1)
    model = model.to(here())
    batches = (1, 2) if name == "DeepseekV4" else (1,)  # RecurrentGemma's column is that of padding in the other
    wanted = [models.generate(model, prompt(batch), 12) for batch in batches]
    handle = adze.patch(model, numerics="fast")
    for chosen in ("patched", "adze"):
        if chosen == "adze":
            handle.remove()
            model.set_attn_implementation("adze")
        for batch, want in zip(batches, wanted, strict=True):
            assert torch.equal(models.generate(model, prompt(batch), 12), want)


@pytest.mark.parametrize("name", ["BigBirdPegasus", "Git"])
def test_models_that_sdpa_does_not_serve(name):
    """BigBird-Pegasus does not say that its attention is causal, and GIT adds the mask to the scores itself."""
    if name == "Git":
        sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4)
        vision = dict(sizes, num_hidden_layers=1, image_size=16, patch_size=8)
        config = transformers.GitConfig(**sizes, vocab_size=128, num_hidden_layers=2, vision_config=vision)
    else:
        config = transformers.BigBirdPegasusConfig(
            vocab_size=128, d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=128,
            is_decoder=True, is_encoder_decoder=False, max_position_embeddings=64, attention_type="original_full",
        )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(here()).eval()
    for path, parameter in model.named_parameters():
        parameter.data.mul_(6 if parameter.dim() > 1 and "embed" not in path else 1)
    want, tokens = models.output(model, prompt()), models.generate(model, prompt(), 12)
    handle = adze.patch(model, numerics="fast")
    for chosen in ("patched", "adze"):
        if chosen == "adze":
            handle.remove()
            model.set_attn_implementation("adze")
        torch.testing.assert_close(models.output(model, prompt()), want)
        assert torch.equal(models.generate(model, prompt(), 12), tokens)
    assert 'attention "adze"' not in handle.report()


def _lively_of(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(here()).eval()
    for path, parameter in model.named_parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 and "embed" not in path else 1)
    return model


_TINY = dict(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_attention_heads=4, max_position_embeddings=128,
    pad_token_id=0,
)  # fmt: skip


@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa", "Inkling2Text"])
def test_what_a_model_leaves_to_its_attention(name):
    """DeepSeek-V3.2 hides keys itself for eager and sdpa alone, and Inkling 2 has sinks of each query."""
    config = getattr(transformers, f"{name}Config", None)
    if config is None:
        pytest.skip(f"this version of transformers has no {name}")
    more = dict(
        num_hidden_layers=2, num_key_value_heads=4, moe_intermediate_size=32, n_routed_experts=4, kv_lora_rank=32,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16, index_topk=4, index_n_heads=2, index_head_dim=32,
    )  # fmt: skip
    if name == "Inkling2Text":
        more = dict(
            num_hidden_layers=2, num_key_value_heads=2, head_dim=16, moe_intermediate_size=32, n_routed_experts=4,
            num_experts_per_tok=2, layer_types=["hybrid_sliding", "hybrid"],
        )  # fmt: skip
    model = _lively_of(config(**_TINY, **more))
    want = models.output(model, prompt(1))
    with adze.patched(model, numerics="fast") as handle:
        torch.testing.assert_close(models.output(model, prompt(1)), want, rtol=1e-4, atol=1e-5)
        assert 'attention "adze"' not in handle.report()
    model.set_attn_implementation("adze")
    with pytest.raises(ValueError, match='attention "adze" has no (indices|sinks), which a .* leaves to it'):
        models.output(model, prompt(1))


def test_layers_that_run_for_the_last_queries_alone():
    """Those of Gemma 4 that share keys, where not all logits are asked for."""
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this version of transformers has no Gemma 4")
    kinds = ["sliding_attention", "full_attention"] * 2
    config = transformers.Gemma4TextConfig(
        **_TINY, num_hidden_layers=4, num_key_value_heads=2, head_dim=16, global_head_dim=16, sliding_window=8,
        num_kv_shared_layers=2, hidden_size_per_layer_input=16, vocab_size_per_layer_input=128, layer_types=kinds,
    )  # fmt: skip
    model, ids = _lively_of(config), prompt(1)["input_ids"]
    for keep in (0, 1, 3):
        found = []
        for chosen in ("eager", "adze"):
            model.set_attn_implementation(chosen)
            with torch.no_grad():
                found.append(model(input_ids=ids, logits_to_keep=keep).logits)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_longer_text():
    model = lively("llama", attention="sdpa")
    model.config.max_position_embeddings = 512
    want = models.generate(model, prompt(1), 256)
    model.set_attn_implementation("adze")
    assert torch.equal(models.generate(model, prompt(1), 256), want) and len(set(want[0].tolist())) > 30


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("side", ["left", "right", "holes", "none"])
def test_logits_of_a_padded_batch(name, side):
    """Also of a prompt that continues a cache, which needs a mask of its own."""
    model, ids = models.build(name, attention="eager"), prompt(3)["input_ids"]
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :7] = mask[1, :2] = 0
    elif side == "right":
        mask[0, -7:] = mask[1, -2:] = 0
    elif side == "holes":
        mask[0, 3:9] = mask[1, ::3] = 0
    found = []
    for chosen in ("eager", "adze"):
        model.set_attn_implementation(chosen)
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            parts = [
                model(input_ids=ids[:, at : at + 12], attention_mask=mask[:, : at + 12], past_key_values=cache).logits
                for at in (0, 12)
            ]
        found.append(torch.cat(parts, 1)[mask[:, :24].bool()])
    torch.testing.assert_close(*found)
    with torch.no_grad():
        unmasked = model(input_ids=ids[:, :24]).logits[mask[:, :24].bool()]
    assert side in ("right", "none") or (unmasked - found[0]).abs().max() > 1e-3  # the mask matters


def test_chosen_when_a_model_is_made():
    model = lively("llama", attention="adze")
    with Watch() as watch:
        models.output(model, prompt())
    assert watch.seen["adze.attention"] == attended(2)


FAKE = """
class {name}:
    found = {{}}

    @classmethod
    def register(cls, key, value):
        cls.found[key] = value
"""


def test_registered_when_transformers_comes_later(tmp_path):
    """Importing adze loads neither torch nor transformers, and the native part waits for the first call. Here the
    import of transformers takes no time, for it is another one; the models of these tests have the true one."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "modeling_utils.py").write_text(FAKE.format(name="AttentionInterface"))
    (package / "masking_utils.py").write_text(FAKE.format(name="AttentionMaskInterface"))
    code = """
import sys
import adze
assert not {"torch", "transformers"} & set(sys.modules)
from transformers.modeling_utils import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
assert list(AttentionInterface.found) == list(AttentionMaskInterface.found) == ["adze"]
assert not {"torch", "adze.operators.description"} & set(sys.modules)
assert not any("adze" in type(finder).__module__ for finder in sys.meta_path)
"""
    path = f"{tmp_path}:{pathlib.Path(adze.__file__).parents[1]}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr


def test_registered_when_transformers_was_there(monkeypatch):
    functions = (transformers.modeling_utils.AttentionInterface, transformers.masking_utils.AttentionMaskInterface)
    for interface in functions:
        monkeypatch.delitem(interface._global_mapping, "adze")
    register.watch()
    assert all("adze" in interface._global_mapping for interface in functions)


# ---- Calls that are not adze's ----


class Attention(torch.nn.Module):
    is_causal, num_key_value_groups, training = True, 2, False


def heads(dtype=torch.float32, m=5, n=5, dim=16):
    random = generator(3)
    return [torch.randn(2, count, rows, dim, generator=random).to(dtype) for count, rows in ((4, m), (2, n), (2, n))]


def both(q, k, v, mask=None, module=None, **options):
    """(adze's result, sdpa's, how many calls of the op there were)."""
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    module = module or Attention()
    with Watch() as watch:
        own, weights = functions["adze"](module, q, k, v, mask, **options)
    assert weights is None and own.is_contiguous()
    return own, functions["sdpa"](module, q, k, v, mask, **options)[0], watch.seen["adze.attention"]


def test_sdpa_has_the_same_result():
    mask = torch.rand(2, 1, 5, 9, generator=generator(4)) > 0.4
    mask[..., 0] = True
    added = torch.randn(1, 4, 5, 9, generator=generator(5))
    encoder = Attention()
    encoder.is_causal = False
    with torch.no_grad():
        for arguments, options in (
            (heads(), {}),
            (heads(m=5, n=9), {}),  # the prompt in a static cache
            (heads(m=1, n=9), {}),
            (heads(m=5, n=9), {"mask": mask}),
            (heads(m=5, n=9), {"mask": added}),
            (heads(m=5, n=9), {"mask": mask[:1, :, :1].expand(2, 1, 5, 9)}),
            (heads(m=5, n=9), {"is_causal": False}),
            (heads(m=5, n=9), {"module": encoder}),
            (heads(), {"scaling": 0.3}),
            (heads(), {"sliding_window": 64, "position_ids": None}),
            ([x.transpose(2, 3).contiguous().transpose(2, 3) for x in heads()], {}),
        ):
            own, theirs, calls = both(*arguments, **options)
            torch.testing.assert_close(own, theirs)
            assert calls == attended(1)
        for dtype in (torch.float16, torch.bfloat16):
            own, theirs, calls = both(*heads(dtype))
            _, exact, _ = both(*(x.double() for x in heads(dtype)))
            assert as_exact(own, theirs, exact) and calls == counted(1)


def test_float32_on_a_gpu_is_sdpas():
    gpu, cpu, sinks = torch.device("cuda", 1), torch.device("cpu"), torch.zeros(4)
    assert attention.sdpa_is_faster(gpu, torch.float32, None, None)
    assert attention.sdpa_is_faster(gpu, torch.float32, 0.0, None)
    assert not attention.sdpa_is_faster(gpu, torch.float32, 30.0, None)
    assert not attention.sdpa_is_faster(gpu, torch.float32, None, sinks)
    assert not any(attention.sdpa_is_faster(gpu, dtype, None, None) for dtype in (torch.float16, torch.bfloat16))
    assert not attention.sdpa_is_faster(cpu, torch.float32, None, None)


def test_a_cache_is_read_where_sdpa_is_faster(monkeypatch):
    """Only keys that are tensors go to sdpa."""
    monkeypatch.setattr(attention, "sdpa_is_faster", lambda *call: True)
    model, arguments = lively("llama", attention="eager"), prompt()
    want = models.generate(model, arguments, 6)
    model.set_attn_implementation("adze")
    for cache, calls in ((None, 0), (adze.Cache(model, 64), counted(2 * 6))):
        with Watch() as watch:
            got = models.generate(model, arguments | ({"past_key_values": cache} if cache else {}), 6)
        assert torch.equal(got, want) and watch.seen["adze.attention"] == calls


def test_what_the_op_does_not_take():
    """A gradient, dropout, another dtype, autocast, a bias: the bits of sdpa."""
    q, k, v = heads()
    bias = torch.randn(1, 4, 5, 5, generator=generator(6))
    wanted = [
        ((q.clone().requires_grad_(), k, v), {}),
        (heads(torch.float64), {}),
        ((q, k, v), {"position_bias": bias}),
    ]
    for arguments, options in wanted:
        own, theirs, calls = both(*arguments, **options)
        assert torch.equal(own, theirs) and calls == 0
    own, _, _ = both(q.requires_grad_(), k, v)
    own.sum().backward()
    assert q.grad is not None and q.grad.any()
    with torch.no_grad():
        torch.manual_seed(0)
        assert both(*heads(), dropout=0.5)[2] == 0
        with torch.autocast(here().type, dtype=torch.bfloat16):
            own, theirs, calls = both(*heads())
        assert torch.equal(own, theirs) and calls == 0


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_weights_of_the_keys(name):
    """output_attentions gives what eager gives, also of a model whose attention a patch has set."""
    model, arguments = lively(name, attention="eager"), prompt()
    with torch.no_grad():
        want = model(**arguments, output_attentions=True).attentions
        handle = adze.patch(model, numerics="fast")
        model.set_attn_implementation("adze")
        for cache in (None, adze.Cache(model, 64), adze.Cache(model, 64, page=16)):
            found = model(**arguments, output_attentions=True, past_key_values=cache).attentions
            assert len(found) == len(want)
            for own, theirs in zip(found, want, strict=True):
                seen = arguments["attention_mask"].bool()[:, None, :, None]
                assert own.shape == theirs.shape  # a page has room for more keys
                assert ((own - theirs) * seen).abs().max() < 1e-4
    handle.remove()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_without_a_kernel_torch_computes_it(name, monkeypatch):
    """As on a device on which the op has none. The library is asked; nothing fails first."""
    model, arguments = lively(name, attention="eager"), prompt()
    want = models.generate(model, arguments, 10)
    model.set_attn_implementation("adze")
    monkeypatch.setattr(in_torch, "has_kernel", lambda op, device: False)
    with Watch() as watch:
        assert torch.equal(models.generate(model, arguments, 10), want)
        assert torch.equal(models.generate(model, arguments | {"past_key_values": adze.Cache(model, 64)}, 10), want)
        rows = list(
            adze.generate(model, arguments["input_ids"], 10, attention_mask=arguments["attention_mask"], stop=())
        )
    assert torch.equal(torch.tensor(rows).T.to(want.device), want[:, -10:])
    assert watch.adze == 0


def test_the_library_knows_its_kernels():
    from adze.operators.description import OPS, has_kernel

    assert all(has_kernel(op, -1) for op in OPS) and not any(has_kernel(op, 99) for op in OPS)
    assert in_torch.has_kernel("attention", torch.device("cpu"))
    assert not in_torch.has_kernel("attention", torch.device("meta"))


def test_training():
    model = lively("gemma2", attention="adze")
    model.train()
    ids = prompt()["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    own = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.set_attn_implementation("eager")
    model(input_ids=ids, labels=ids).loss.backward()
    for mine, parameter in zip(own, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)


# ---- Other models, and compiled ones ----


def test_cross_attention():
    """An encoder, a decoder that is causal, and its attention to the encoder."""
    config = transformers.BartConfig(
        vocab_size=99, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    arguments = prompt() | {"decoder_input_ids": prompt(seq=9)["input_ids"]}
    options = {"max_new_tokens": 20, "do_sample": False, "num_beams": 2}
    with torch.no_grad():
        want, tokens = model(**arguments).logits, model.generate(**prompt(), **options)
        model.set_attn_implementation("adze")
        with Watch() as watch:
            torch.testing.assert_close(model(**arguments).logits, want)
            assert watch.seen["adze.attention"] == attended(3)
            assert torch.equal(model.generate(**prompt(), **options), tokens)


@needs_kernels
def test_compiled():
    """The prompt in one graph with the op; one token as the model's own code has it."""
    model = lively("gemma2", attention="adze", layers=1)
    graphs = []

    def backend(module, inputs):
        graphs.append({str(node.target) for node in module.graph.nodes if "adze" in str(node.target)})
        return module

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    whole = prompt(1)["input_ids"]
    with torch.no_grad(), default_device(None):
        for m in (9, 1):
            ids = whole[:, :m]
            torch.testing.assert_close(
                compiled(input_ids=ids, use_cache=False).logits, model(input_ids=ids, use_cache=False).logits
            )
    assert graphs == [{"adze.attention.default"}, set()]
