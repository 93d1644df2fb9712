"""Models of transformers with adze: rules find their classes, ops round as the models do, tokens stay the same."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from torch import nn  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402

import adze  # noqa: E402
import models  # noqa: E402
from adze.patching.frame import OPS, _Plan, own_forward  # noqa: E402
from adze.patching.norm_act import add_norm, norm_add  # noqa: E402
from adze.patching.verify import ulps  # noqa: E402
from device import Watch, default_device, generator, here  # noqa: E402

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


# ---- Which rule a class gets ----

CLASSES = {
    "rms_norm": "llama:LlamaRMSNorm mistral:MistralRMSNorm qwen2:Qwen2RMSNorm qwen3:Qwen3RMSNorm phi3:Phi3RMSNorm "
    "mixtral:MixtralRMSNorm gemma:GemmaRMSNorm gemma2:Gemma2RMSNorm gemma3:Gemma3RMSNorm olmo2:Olmo2RMSNorm "
    "gpt_oss:GptOssRMSNorm helium:HeliumRMSNorm gemma3n:Gemma3nRMSNorm gemma4:Gemma4RMSNorm t5:T5LayerNorm "
    "umt5:UMT5LayerNorm llama4:Llama4TextRMSNorm llama4:Llama4TextL2Norm",
    "layer_norm": "cohere:CohereLayerNorm cohere2:Cohere2LayerNorm",
    "glu": "llama:LlamaMLP mistral:MistralMLP qwen2:Qwen2MLP qwen3:Qwen3MLP gemma:GemmaMLP gemma2:Gemma2MLP "
    "gemma3:Gemma3MLP phi3:Phi3MLP t5:T5DenseGatedActDense umt5:UMT5DenseGatedActDense qwen2_5_vl:Qwen2_5_VLMLP "
    "t5gemma:T5GemmaMLP",
    "rope": "llama:LlamaAttention mistral:MistralAttention qwen2:Qwen2Attention gemma:GemmaAttention "
    "gemma2:Gemma2Attention phi3:Phi3Attention phi:PhiAttention gpt_neox:GPTNeoXAttention falcon:FalconAttention "
    "gemma3n:Gemma3nTextAttention gemma4:Gemma4TextAttention qwen3_next:Qwen3NextAttention olmo2:Olmo2Attention "
    "modernbert:ModernBertAttention glm:GlmAttention helium:HeliumAttention ernie4_5:Ernie4_5Attention "
    "cohere:CohereAttention gpt_oss:GptOssAttention nemotron:NemotronAttention",
    "qk_norm_rope rope": "qwen3:Qwen3Attention qwen3_moe:Qwen3MoeAttention gemma3:Gemma3Attention",
    "add + norm": "llama:LlamaDecoderLayer mistral:MistralDecoderLayer qwen2:Qwen2DecoderLayer "
    "qwen3:Qwen3DecoderLayer gemma:GemmaDecoderLayer phi3:Phi3DecoderLayer gpt2:GPT2Block gpt_neox:GPTNeoXLayer "
    "falcon:FalconDecoderLayer clip:CLIPEncoderLayer siglip:SiglipEncoderLayer mixtral:MixtralDecoderLayer "
    "gpt_oss:GptOssDecoderLayer qwen2_vl:Qwen2VLVisionBlock vit:ViTLayer bert:BertSelfOutput bert:BertOutput",
    "norm + add": "gemma2:Gemma2DecoderLayer gemma3:Gemma3DecoderLayer olmo2:Olmo2DecoderLayer",
}
# The same text as a rule's, or nearly, that means something else: interleaved pairs, another sign, a norm per group.
NOT = "blt:BltSelfAttention nanochat:NanoChatAttention qwen4_exp:Qwen4ExpTextRMSNorm"


def rules_of(name):
    module, _, name = name.partition(":")
    cls = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    return _Plan(frozenset(OPS), "match", []).known(cls, cls.forward)


@pytest.mark.parametrize("rule", CLASSES)
def test_classes_have_their_rule(rule):
    found = {name: " ".join(r.name for r in rules_of(name)[0]) for name in CLASSES[rule].split()}
    assert found == dict.fromkeys(found, rule)


@pytest.mark.parametrize("name", NOT.split())
def test_lookalikes_have_none(name):
    rules, reasons = rules_of(name)
    assert rules == [] and reasons


@pytest.mark.parametrize("name, rule", [("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("relu2", "relu2"),
    ("gelu_pytorch_tanh", "gelu"), ("gelu_new", "gelu_new"), ("gelu_fast", "gelu_new"), ("gelu_python", "gelu"),
    ("gelu_accurate", "gelu_new"), ("quick_gelu", "quick_gelu"), ("mish", None), ("tanh", None)])  # fmt: skip
def test_activations(name, rule):
    module = nn.Sequential(ACT2FN[name])
    x = torch.randn(64, 1000, generator=generator(0))
    expected = {dtype: module(x.to(dtype)) for dtype in DTYPES.values()}
    handle = adze.patch(module)
    assert [row.rule for row in handle.rows if row.rule] == ([rule] if rule else [])
    half, wanted = module(x.bfloat16()), expected[torch.bfloat16]
    assert (half == wanted).float().mean() >= 0.999
    # In a tail torch adds 1 to nearly -1: its float sum, times x, is good to a unit of 2^-24 and no more.
    cancelled = (half.float() - wanted.float()).abs() <= x.bfloat16().float().abs() * 2**-24
    assert ((ulps(half, wanted) <= 1) | cancelled).all()
    with Watch() as watch:
        torch.testing.assert_close(module(x), expected[torch.float32])
    assert watch.adze == (1 if rule else 0)


# ---- Single ops: bf16 as the model rounds it ----


def randn(*shape, seed=0, scale=1.0):
    return (torch.randn(shape, generator=generator(seed)) * scale).bfloat16()


def assert_rounds_alike(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    apart = ulps(found, expected)
    assert apart.max() <= 1
    assert (apart == 0).float().mean() >= 0.999


def norm_of(name, dim):
    module, _, name = name.partition(":")
    cls = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    norm = (cls() if name.endswith("L2Norm") else cls(dim)).bfloat16()
    with torch.no_grad():
        for weight in norm.parameters():
            weight.add_(randn(dim, seed=9, scale=0.2))
    return norm


NORMS = CLASSES["rms_norm"] + " " + CLASSES["layer_norm"]


@pytest.mark.parametrize("dim", [64, 100, 2048, 4544])
@pytest.mark.parametrize("name", NORMS.split())
@torch.no_grad()
def test_norms(name, dim):
    norm = norm_of(name, dim)
    for x in (randn(32, dim, scale=2), randn(2, 3, 4, dim).transpose(1, 2), randn(8, dim, scale=1e-3)):
        expected = norm(x)
        with adze.patched(norm) as handle:
            assert handle.patched == [""]
            assert_rounds_alike(norm(x), expected)


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm, lambda d: nn.RMSNorm(d, eps=1e-5),
    lambda d: nn.LayerNorm(d, elementwise_affine=False), lambda d: nn.LayerNorm(d, bias=False)])  # fmt: skip
@torch.no_grad()
def test_norms_of_torch(make):
    norm = make(1000).bfloat16()
    for i, parameter in enumerate(norm.parameters()):
        parameter.add_(randn(1000, seed=i, scale=0.2))
    x = randn(64, 1000)
    expected = norm(x)
    with adze.patched(norm) as handle:
        assert handle.patched == [""]
        assert_rounds_alike(norm(x), expected)


@pytest.mark.parametrize("name", ["llama:LlamaRMSNorm", "gemma2:Gemma2RMSNorm", "olmo2:Olmo2RMSNorm", "torch"])
@torch.no_grad()
def test_sums_around_norms(name):
    norm = nn.LayerNorm(512).bfloat16() if name == "torch" else norm_of(name, 512)
    x, residual = randn(64, 512), randn(64, 512, seed=1, scale=4)
    plan = _Plan(frozenset(OPS), "match", [])
    facts = plan.facts(norm, "norm")
    normed, total = add_norm(norm, facts, x, residual)
    assert torch.equal(total, residual + x)
    assert_rounds_alike(normed, norm(residual + x))
    assert_rounds_alike(norm_add(norm, facts, x, residual, adze.ROUND_STEPS), residual + norm(x))


ROTATIONS = {name.partition(":")[0]: name.partition(":")[2] for name in CLASSES["rope"].split()}


@pytest.mark.parametrize("table", DTYPES)
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("name", ROTATIONS)
@torch.no_grad()
def test_rotations(name, heads_first, table):
    home = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    cls, plan = getattr(home, ROTATIONS[name]), _Plan(frozenset(OPS), "match", [])
    rule = plan.known(cls, cls.forward)[0][0]
    rotate = rule.build(None, plan.context(None, "", cls.forward)).__globals__["apply_rotary_pos_emb"]
    assert rotate is not home.apply_rotary_pos_emb
    q, k = randn(2, 33, 4, 64), randn(2, 33, 2, 64, seed=1)
    if heads_first:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    width = 16 if name in ("phi3", "gpt_neox", "qwen3_next", "glm", "nemotron") else 64
    angle = torch.rand(2, 33, width // 2, generator=generator(2)) * 40
    if name == "cohere":
        angle = angle.repeat_interleave(2, -1)
    elif name != "gpt_oss":
        angle = angle.repeat(1, 1, 2)
    tables = [f(angle).to(DTYPES[table]) for f in (torch.cos, torch.sin)]
    tensors = [q] if name in ("gemma3n", "gemma4") else [q, k]
    dimension = 1 if heads_first else 2
    expected, found = (f(*tensors, *tables, unsqueeze_dim=dimension) for f in (home.apply_rotary_pos_emb, rotate))
    if len(tensors) == 1:
        expected, found = [expected], [found]
    for a, b in zip(found, expected, strict=True):
        if table == "f32" and b.dtype == torch.bfloat16:  # rounded once, from a sum of floats that may cancel
            close = (a.float() - b.float()).abs() <= 2**-22 * q.abs().max().float()
            assert ((ulps(a, b) <= 1) | close).all() and (a == b).float().mean() >= 0.999
        else:
            assert_rounds_alike(a, b)


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3"])
@torch.no_grad()
def test_gates(name):
    mlp = models.build(name, torch.bfloat16).model.layers[0].mlp
    mlp.down_proj = nn.Identity()
    x = randn(8, 128)
    expected = mlp(x)
    with adze.patched(mlp) as handle:
        assert "" in handle.patched
        assert_rounds_alike(mlp(x), expected)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@torch.no_grad()
def test_normed_rotations(name):
    model = models.build(name, torch.bfloat16)
    attention, seen = model.model.layers[0].self_attn, []
    attention.config._attn_implementation = "spy"
    spy = lambda module, q, k, v, mask, **kw: (seen.append((q, k)), (v.transpose(1, 2), None))[1]  # noqa: E731
    registry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    registry.register("spy", spy)
    try:
        angle = torch.rand(1, 9, 32, generator=generator(2)) * 40
        tables = [f(angle).repeat(1, 1, 2).bfloat16() for f in (torch.cos, torch.sin)]
        attention.o_proj = nn.Identity()
        attention(randn(2, 9, 128), tuple(tables), None)
        with adze.patched(model) as handle:
            assert own_forward(attention).__func__ and "model.layers.0.self_attn" in handle.patched
            attention(randn(2, 9, 128), tuple(tables), None)
    finally:
        registry._global_mapping.pop("spy")
    (q, k), (found_q, found_k) = seen
    assert_rounds_alike(found_q, q)
    assert_rounds_alike(found_k, k)


# ---- Whole models ----

TOKENS = 8 if here().type == "cpu" else 64
LEFT = {  # known, and nothing to fuse: attention and MLP run in parallel
    "phi": 2, "gpt_neox": 2, "falcon": 2, "falcon_two_norms": 2,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", models.LANGUAGE)
def test_tokens_are_the_same(name, dtype):
    model, arguments = models.build(name, DTYPES[dtype]), models.inputs(name, seq=12)
    caches = (None, "static")
    expected = [models.generate(model, arguments, TOKENS, cache) for cache in caches]
    handle = adze.patch(model)
    assert len(handle.rows) - len(handle.patched) == LEFT.get(name, 0), handle.report()
    for cache, tokens in zip(caches, expected, strict=True):
        assert torch.equal(models.generate(model, arguments, TOKENS, cache), tokens), cache


@pytest.mark.parametrize("name", [*models.LANGUAGE, *models.OTHER])
def test_f32_outputs(name):
    model, arguments = models.build(name), models.inputs(name)
    expected = models.output(model, arguments)
    adze.patch(model, strict=True)
    with Watch() as watch:
        found = models.output(model, arguments)
    torch.testing.assert_close(found, expected)
    assert watch.adze


def test_sliding_windows_and_beams():
    model, arguments = models.build("mistral"), models.inputs("mistral", seq=30)
    more = dict(max_new_tokens=6, num_beams=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        expected = model.generate(**arguments, **more)
        adze.patch(model)
        assert torch.equal(model.generate(**arguments, **more), expected)


def test_cross_attention_of_gpt2():
    import transformers as hf

    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=128, n_positions=32, n_embd=128, n_layer=2, n_head=2, add_cross_attention=True)
    model = hf.GPT2LMHeadModel(config).eval()
    arguments = {"input_ids": torch.arange(8)[None], "encoder_hidden_states": torch.randn(1, 5, 128)}
    expected = models.output(model, arguments)
    adze.patch(model)
    torch.testing.assert_close(models.output(model, arguments), expected)


# ---- torch.compile ----


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2"])
def test_compiles_whole_and_for_every_length(name):
    import torch._dynamo as dynamo
    from torch._dynamo.backends.debugging import aot_eager

    dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return aot_eager(graph, inputs) if name == "llama" else graph.forward  # test_ops.py has opcheck of each op

    layers = 2 if name == "gemma2" else 1  # whose layers have masks of two kinds
    model = models.build(name, attention="eager" if name == "gemma2" else "sdpa", layers=layers)
    adze.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    lengths = [models.inputs(name, seq=length)["input_ids"] for length in (7, 12, 19, 23)]
    with torch.no_grad(), default_device(None):
        for ids in lengths:
            found = compiled(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(found, model(input_ids=ids, use_cache=False).logits)
    assert len(graphs) == 2  # the first length, and any
    norms = {"llama": 3, "qwen3": 3, "gemma2": 9, "gpt2": 3}[name]
    for targets in graphs:
        assert sum("_norm." in target and target.startswith("adze") for target in targets) == norms
        rope = {"llama": "rope", "gemma2": "rope", "qwen3": "qk_norm_rope"}.get(name)
        assert rope is None or sum(target.startswith(f"adze.{rope}.") for target in targets) == layers
        assert name == "gpt2" or sum(target.startswith("adze.glu") for target in targets) == layers
    dynamo.reset()


# ---- The example ----


def test_example():
    example = Path(__file__).parents[2] / "examples" / "transformers_injection.py"
    said = subprocess.run([sys.executable, example], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "add + norm" in said.stdout and "the same tokens: yes" in said.stdout
