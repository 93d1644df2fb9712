"""The tables of a model of transformers: cos and sin of its positions are one launch with numerics="fast"."""

import copy

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
from packaging.version import Version  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: E402
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding  # noqa: E402

import adze  # noqa: E402
import models  # noqa: E402
from adze.patching.fingerprint import fingerprint, undecorated  # noqa: E402
from adze.patching.known_sources import hashes  # noqa: E402
from adze.patching.verify import ulps  # noqa: E402
from device import Watch, generator, here  # noqa: E402
from lively import greedy, lively, own, prompt  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
_LM = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip


def scaled(rope_type, **more):
    return {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, **more}


_FACTORS = {"short_factor": [1.0 + i / 16 for i in range(16)], "long_factor": [2.0 + i for i in range(16)]}
_SHORT = {"original_max_position_embeddings": 32}
CONFIGS = {
    "llama": lambda: hf.LlamaConfig(**_LM),
    "linear": lambda: hf.LlamaConfig(**_LM, rope_parameters=scaled("linear")),
    "llama3": lambda: hf.LlamaConfig(
        **_LM, rope_parameters=scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **_SHORT)
    ),
    "yarn": lambda: hf.LlamaConfig(**_LM, rope_parameters=scaled("yarn", **_SHORT)),
    "dynamic": lambda: hf.LlamaConfig(**_LM, rope_parameters=scaled("dynamic")),
    "longrope": lambda: hf.Phi3Config(**_LM, **_SHORT, rope_parameters=scaled("longrope", **_FACTORS, **_SHORT)),
    "qwen3": lambda: hf.Qwen3Config(**_LM, head_dim=32),
    "partial": lambda: hf.PhiConfig(
        **_LM, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "olmo2": lambda: hf.Olmo2Config(**_LM),  # of float32 whatever the model's dtype is
    "cohere": lambda: hf.CohereConfig(**_LM),  # each twice
    "gpt_oss": lambda: hf.GptOssConfig(**_LM, head_dim=32, num_local_experts=2),  # a column for each pair
}


def build(name, dtype=torch.float32):
    """A model; its frequencies stay float32, as in from_pretrained."""
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype).to(here()).eval()


def rotary(model):
    return next(module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding"))


def states(dtype=torch.float32, batch=2, seq=7):
    return torch.randn(batch, seq, 64, generator=generator(1)).to(dtype)


def positions(*firsts, seq=7):
    return torch.tensor(firsts)[:, None] + torch.arange(seq)


@torch.no_grad()
def tables(module, *arguments, **options):
    """(cos, sin), and how many operators that compute have run."""
    with Watch() as watch:
        found = module(*arguments, **options)
    views = ("unsqueeze", "detach", "slice", "alias", "view", "expand")
    return found, sum(n for op, n in watch.seen.items() if not op.removeprefix("aten.").startswith(views))


def near(found, want):
    """Sine and cosine are within 1.25 units of the exact ones, and torch's within two; then both are rounded."""
    for a, b in zip(found, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.device == b.device
        if a.dtype == torch.float32:
            torch.testing.assert_close(a, b, rtol=4 * 2**-23, atol=2**-23 * 4)
        else:
            assert ulps(a, b).max() <= 1 and (a == b).float().mean() >= 0.99


# ---- Which modules ----


def test_the_report_has_them_and_numerics_decide():
    """Floats of sine and cosine are not torch's to the last bit, so "match" leaves them to the model."""
    model = build("llama")
    before = vars(rotary(model)).copy()
    handle = adze.patch(model, numerics="fast")
    assert [row.rule for row in handle.rows if row.path == "model.rotary_emb"] == ["rope_table"]
    assert "LlamaRotaryEmbedding  rope_table" in handle.report()
    handle.disable()
    assert "forward" not in vars(rotary(model))
    handle.enable()
    handle.remove()
    assert vars(rotary(model)).keys() == before.keys()
    for options in ({"numerics": "match"}, {"numerics": "fast", "ops": {"norm"}}):
        with adze.patched(model, **options) as handle:
            assert "model.rotary_emb" not in handle.patched and "forward" not in vars(rotary(model))


@pytest.mark.parametrize("name", models.LANGUAGE)
def test_language_models_have_them(name):
    model = models.build(name)
    handle = adze.patch(model, numerics="fast")
    found = [row.path for row in handle.rows if row.rule == "rope_table"]
    assert len(found) == (name != "gpt2")


def test_two_sources_that_became_one():
    """The text of Qwen's class is that of Llama's from 5.19 on."""
    versions = hashes("qwen2:Qwen2RotaryEmbedding.forward")
    assert not versions & hashes("llama:LlamaRotaryEmbedding.forward") and len(versions) == 2
    assert fingerprint(undecorated(Qwen2RotaryEmbedding.forward)) in versions | hashes(
        "llama:LlamaRotaryEmbedding.forward"
    )


# ---- The tables ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_tables(name, dtype):
    """Of positions in order, of one token of each sequence, and of positions that all sequences share."""
    model = build(name, dtype)
    module, x = rotary(model), states(dtype)
    cases = [(x, positions(0, 11)), (states(dtype, seq=1), positions(30, 5, seq=1))]
    cases += [(x, positions(3)), (x, positions(3, 4).int()), (x, positions(3, 4).float())]
    want = [tables(module, *case)[0] for case in cases]
    handle = adze.patch(model, numerics="fast")
    assert "model.rotary_emb" in handle.patched
    for case, expected in zip(cases, want, strict=True):
        found, count = tables(module, *case)
        near(found, expected)
        assert count == 1 or name in ("dynamic", "longrope")
    handle.remove()
    for case, expected in zip(cases, want, strict=True):
        assert all(map(torch.equal, tables(module, *case)[0], expected))


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("name, cls", [("gemma3", "Gemma3TextConfig"), ("olmo3", "Olmo3Config")])
def test_tables_of_a_type_of_layers(name, cls, kind):
    config = getattr(hf, cls)(**{**_LM, "num_hidden_layers": 2}, layer_types=["full_attention", "sliding_attention"])
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(here()).eval()
    module, case = rotary(model), (states(torch.bfloat16), positions(0, 11))
    want = [tables(module, *case, kind)[0], tables(module, *case, layer_type=kind)[0]]
    adze.patch(model, numerics="fast")
    for expected, (found, count) in zip(
        want, (tables(module, *case, kind), tables(module, *case, layer_type=kind)), strict=True
    ):
        near(found, expected)
        assert count == 1


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_frequencies_follow_the_length(name):
    """They change with the longest text, and back; what the model keeps of it is the same as without adze."""
    plain, model = build(name), build(name)
    adze.patch(model, numerics="fast")
    seen = []
    for first in (0, 70, 100, 3, 200, 20):
        want = tables(rotary(plain), states(), positions(first, first))[0]
        (found, _), module = tables(rotary(model), states(), positions(first, first)), rotary(model)
        near(found, want)
        assert torch.equal(module.inv_freq, rotary(plain).inv_freq)
        assert module.max_seq_len_cached == rotary(plain).max_seq_len_cached
        seen.append(tuple(module.inv_freq.tolist()))
    assert len(set(seen)) > 1 and seen[0] == seen[3]


def test_what_changes_after_the_patch():
    model = build("yarn")
    module, case = rotary(model), (states(), positions(0, 11))
    adze.patch(model, numerics="fast")
    assert module.attention_scaling != 1
    for change in (
        lambda: module.register_buffer("inv_freq", module.inv_freq * 2, persistent=False),
        lambda: module.inv_freq.mul_(0.5),
        lambda: setattr(module, "attention_scaling", 0.5),
        lambda: module.to(torch.bfloat16),  # the frequencies too
        lambda: module.to(torch.float64),
    ):
        change()
        found, _ = tables(module, *case)
        with adze.patched(model, ops=()):
            want = tables(module, *case)[0]
        near(found, want)


def test_no_positions():
    model = build("llama", torch.bfloat16)
    with adze.patched(model, numerics="fast"):
        (cos, sin), _ = tables(rotary(model), states(torch.bfloat16, seq=0), positions(0, 0, seq=0))
    assert cos.shape == sin.shape == (2, 0, 32) and cos.dtype == torch.bfloat16


def test_copies_have_their_own():
    model = build("qwen3")
    adze.patch(model, numerics="fast")
    other, case = copy.deepcopy(model), (states(), positions(0, 11))
    rotary(other).inv_freq.mul_(2)
    found, count = tables(rotary(other), *case)
    assert count == 1
    first = tables(rotary(model), *case)[0]
    assert not torch.equal(found[0], first[0])
    with adze.patched(other, ops=()):
        near(found, tables(rotary(other), *case)[0])


# ---- What the model computes ----


def test_training_and_gradients_are_the_models():
    model = build("llama")
    module, x, at = rotary(model), states(), positions(0, 11)
    want = tables(module, x, at)[0]
    adze.patch(model, numerics="fast")
    model.train()
    found, count = tables(module, x, at)
    assert all(map(torch.equal, found, want)) and count > 1
    model.eval()
    with Watch() as watch:
        found = module(x.clone().requires_grad_(), at)
    assert all(map(torch.equal, found, want)) and not watch.adze and not found[0].requires_grad
    ids = prompt()["input_ids"] % 64
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    got = model.lm_head.weight.grad.clone()
    plain = build("llama")
    plain(input_ids=ids, labels=ids).loss.backward()
    torch.testing.assert_close(got, plain.lm_head.weight.grad)


def test_other_calls_are_the_models():
    model = build("llama")
    module, x = rotary(model), states()
    cases = [(x, positions(0, 11).short()), (x.double(), positions(0, 11))]
    if Version(hf.__version__) >= Version("5.19"):  # earlier ones refuse positions of several axes
        cases.append((x, positions(0, 11).expand(3, 2, 7)))
    want = [tables(module, *case)[0] for case in cases]
    adze.patch(model, numerics="fast")
    for case, expected in zip(cases, want, strict=True):
        with Watch() as watch:
            found = tables(module, *case)[0]
        assert all(map(torch.equal, found, expected)) and not watch.adze
    with torch.autocast(here().type, dtype=torch.bfloat16), Watch() as watch:
        found = tables(module, x, positions(0, 11))[0]
    assert found[0].dtype == torch.float32 and not watch.adze


def test_a_compiled_graph_has_the_models(on_the_cpu):
    """Inductor makes one kernel of it and of what is around it."""
    model, seen = build("llama"), []
    module, case = rotary(model), (states(), positions(0, 11))
    want = tables(module, *case)[0]
    adze.patch(model, numerics="fast")

    def record(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(module, backend=record, fullgraph=True)(*case)
    assert all(map(torch.equal, found, want)) and "cos" in " ".join(seen) and "adze" not in " ".join(seen)


def test_another_decorator_is_not_lost(monkeypatch):
    """dynamic_rope_update is known by its source; a wrapper of the same name that does something else is not."""
    known = LlamaRotaryEmbedding.forward
    names = {}
    exec(  # in a module of the same name, as it would be in another version
        "def make(rope_forward):\n"
        "    def wrapper(self, x, position_ids):\n"
        "        return rope_forward(self, x, position_ids + 1)\n"
        "    wrapper.__wrapped__ = rope_forward\n"
        "    return wrapper\n",
        {"__name__": "transformers.modeling_rope_utils"},
        names,
    )
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", names["make"](known))
    model = build("llama")
    case = states(), positions(0, 11)
    want = tables(rotary(model), *case)[0]
    handle = adze.patch(model, numerics="fast")
    assert "model.rotary_emb" not in handle.patched
    assert all(map(torch.equal, tables(rotary(model), *case)[0], want))


# ---- Whole models ----


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi", "cohere", "gpt_oss"])
def test_tokens_are_the_same(name):
    model, arguments = lively(name, attention="eager"), prompt()
    want = greedy(model, arguments, 16)
    handle = adze.patch(model, numerics="fast")
    with Watch() as watch:
        assert own(model, arguments, 16) == want
    runs = watch.seen["adze.rope_table"]
    assert runs and not watch.seen["aten.cos"] and not watch.seen["aten.sin"]
    assert greedy(model, arguments, 16) == want
    handle.disable()
    with Watch() as watch:
        assert own(model, arguments, 16) == want
    assert not watch.seen["adze.rope_table"] and watch.seen["aten.cos"]
