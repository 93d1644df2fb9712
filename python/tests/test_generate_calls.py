"""adze.generate: what a call leaves in its cache, also one that ends early; models in wrappers, and ropes that depend
on the length of a text."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import adze  # noqa: E402
from device import here  # noqa: E402
from lively import greedy, lively, own, prompt  # noqa: E402


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_that_depends_on_the_length(kind):
    """A prompt is not cut into parts, which would have other frequencies; nor do they change within a text."""
    options = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    options |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    if kind == "dynamic":
        rope = {"rope_type": "dynamic", "factor": 2.0}
        config = transformers.LlamaConfig(**options, max_position_embeddings=16, rope_scaling=rope)
    else:
        rope = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [4.0] * 32}
        config = transformers.Phi3Config(
            **options, max_position_embeddings=256, original_max_position_embeddings=16, rope_scaling=rope
        )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(here()).eval()
    for path, parameter in model.named_parameters():
        parameter.data.mul_(8 if parameter.dim() > 1 and "embed" not in path else 1)
    arguments, fresh = prompt(), copy.deepcopy(model)  # a model remembers the longest text
    assert own(model, arguments, 12, chunk=5) == greedy(fresh, arguments, 12)
    if kind == "longrope":
        short = {"input_ids": arguments["input_ids"][1:, :8], "attention_mask": arguments["attention_mask"][1:, :8]}
        cache = adze.Cache(model, 40)
        assert own(model, short, 9, cache=cache) == greedy(model, short, 9)
        with pytest.raises(ValueError, match="from 17 tokens on, and the text has 8 tokens at first and 17 at last"):
            own(model, short, 10)
        with pytest.raises(ValueError, match="the text has 16 tokens at first and 17 at last"):
            own(model, {"input_ids": torch.tensor([[5]]), "attention_mask": torch.ones(1, 1)}, 1, cache=cache)


# ---- A call that ends early ----


def test_a_cache_is_right_between_two_tokens():
    """A caller may keep a generator and go on without it; what it left does not come back when it is freed."""
    model = lively("llama", layers=1)
    want = list(adze.generate(model, [5, 6, 7], 8, stop=()))
    cache = adze.Cache(model, 60)
    tokens = adze.generate(model, [5, 6, 7], 8, stop=(), cache=cache)
    first = [next(tokens), next(tokens)]
    assert first + list(adze.generate(model, first[-1:], 6, stop=(), cache=cache)) == want
    with pytest.raises(RuntimeError, match="the cache has changed since the last token"):
        next(tokens)
    unstarted = adze.generate(model, [9], 8, stop=(), cache=cache)
    tokens = adze.generate(model, [9], 8, stop=(), cache=cache)
    next(tokens)
    cache.reset()
    assert list(adze.generate(model, [5, 6, 7], 8, stop=(), cache=cache)) == want
    del tokens
    assert cache.lengths.tolist() == [10]
    with pytest.raises(RuntimeError, match="a call must have its cache alone until its last token"):
        next(unstarted)


def test_a_prompt_that_fails_leaves_the_cache():
    model, calls = lively("llama", layers=1), []
    want = list(adze.generate(model, [5, 6, 7], 8, stop=()))

    def fail(*_):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("a hook")

    cache = adze.Cache(model, 60)
    hook = model.model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        list(adze.generate(model, [1] * 20, 8, cache=cache, chunk=8))
    hook.remove()
    assert cache.lengths.tolist() == [0]
    assert list(adze.generate(model, [5, 6, 7], 8, stop=(), cache=cache)) == want
    cache = adze.Cache(model, 60, page=4, pages=3)
    for rows in ([[1] * 20], [[1] * 8] * 2):
        with pytest.raises(ValueError, match="pages of 4, it has 3"):
            list(adze.generate(model, rows, 4, cache=cache))
    assert list(adze.generate(model, [5, 6, 7], 8, stop=(), cache=cache)) == want


def test_rows_that_end_far_apart():
    """What is appended after a short row has a position that the model has, as GPT-2's table ends."""
    model = lively("gpt2", layers=1)
    rows, cache = [[5] * 500, [7]], adze.Cache(model, 1024)
    first = [list(row) for row in zip(*adze.generate(model, rows, 3, stop=(), cache=cache), strict=True)]
    more = [first[0][-1:], [*first[1][-1:], *[8] * 20]]
    whole = [row + made[:-1] + new for row, made, new in zip(rows, first, more, strict=True)]
    want = list(adze.generate(model, whole, 4, stop=()))
    assert list(adze.generate(model, more, 4, stop=(), cache=cache)) == want
    small = adze.Cache(model, 20)
    list(adze.generate(model, [[5] * 9, [7]], 2, stop=(), cache=small))
    with pytest.raises(ValueError, match="12 more tokens do not fit into the cache after the 10 that one of its"):
        adze.generate(model, [[5], [7] * 12], 2, cache=small)


# ---- Arguments at their borders ----


def test_settings_at_their_borders():
    """They are float32 and 32 bits in the op: what is another number there is another setting."""
    model = lively("llama", layers=1)
    likeliest = list(adze.generate(model, [5, 6, 7], 6, stop=()))
    sampled = list(adze.generate(model, [5, 6, 7], 6, stop=(), temperature=1.0, seed=3))
    assert sampled != likeliest
    alone = [{"temperature": 1e-40}, {"temperature": 1e-300}, {"top_p": 1e-300}, {"top_p": 1e-45}, {"top_k": 1}]
    for settings in [*alone, {"min_p": 1}]:
        made = adze.generate(model, [5, 6, 7], 6, stop=(), **{"temperature": 1.0, "seed": 3} | settings)
        assert list(made) == likeliest
    for settings in ({"top_k": 2**40}, {"top_k": 2**70}, {"min_p": 1e-300}, {"top_p": 1 - 1e-12}):
        made = adze.generate(model, [5, 6, 7], 6, stop=(), temperature=1.0, seed=3, **settings)
        assert list(made) == sampled
    cache = adze.Cache(model, 40)
    for wanted, settings in (
        ("temperature is 1e.300, it must be 0 or more, and finite in float32", {"temperature": 1e300}),
        ("temperature is 1000", {"temperature": 10**400}),
        ("repetition_penalty is 1e.300, it must be 0 or more", {"repetition_penalty": 1e300}),
        ("repetition_penalty is 1e-300, it must be more than 0", {"repetition_penalty": 1e-300}),
        ("top_p is 1.00000000001, it must be 0 to 1", {"top_p": 1.00000000001}),
        ("attention_mask is a int, it must be like ids", {"attention_mask": 1}),
        ("attention_mask has numbers beside lists", {"attention_mask": [[1, 1, 1], 1]}),
    ):
        with pytest.raises(ValueError, match=f"adze.generate: {wanted}"):
            adze.generate(model, [5, 6, 7], 6, cache=cache, **settings)
    assert cache.numbers() is None


def test_more_tokens_than_positions():
    """An embedding that a model does not have is found before the first token; on a GPU it would end the context."""
    model = lively("gpt2", layers=1)
    most = model.config.max_position_embeddings
    assert len(list(adze.generate(model, [1] * (most - 2), 3, stop=()))) == 3
    with pytest.raises(ValueError, match=f"has {most + 1} tokens at last, a gpt2 has positions for {most}"):
        adze.generate(model, [1] * (most - 2), 4)
    config = transformers.OPTConfig(
        vocab_size=128, hidden_size=64, ffn_dim=64, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=16, word_embed_proj_dim=64,
    )  # fmt: skip
    model = transformers.OPTForCausalLM(config).to(here()).eval()
    assert len(list(adze.generate(model, [3] * 14, 3, stop=()))) == 3
    with pytest.raises(ValueError, match="has 17 tokens at last, a opt has positions for 16"):
        adze.generate(model, [3] * 14, 4)


def test_a_model_without_its_head():
    with pytest.raises(ValueError, match="a LlamaModel has no logits: load it with its head"):
        list(adze.generate(lively("llama", layers=1).model, [5, 6, 7], 4))


# ---- Models in wrappers ----


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_wrapped_models():
    """By peft and by torch.compile."""
    peft = pytest.importorskip("peft")
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(lively("llama"), peft.LoraConfig(**options))
    arguments = prompt(1)
    want = greedy(model, arguments, 10)
    assert own(model, arguments, 10) == want and want != greedy(lively("llama"), arguments, 10)
    compiled = torch.compile(model.base_model.model, backend="eager")
    assert own(compiled, arguments, 10) == want
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ValueError, match="virtual tokens of peft .PROMPT_TUNING.; use its own generate"):
        adze.generate(peft.get_peft_model(lively("llama", layers=1), config), [1, 2], 4)


def test_models_that_keep_more_than_the_cache():
    """BLT puts the cache beside another one, and Mllama has layers that keep the keys of an image."""
    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4)
    part = dict(sizes, num_hidden_layers=1, hidden_size_global=64, cross_attn_k=1)
    blt = transformers.BltConfig(
        vocab_size=128, max_position_embeddings=64, patch_in_forward=False, patching_mode="", patch_size=4,
        max_patch_length=4, encoder_hash_byte_group_size=[3], encoder_hash_byte_group_vocab=64, cross_attn_k=1,
        patcher_config=dict(sizes, num_hidden_layers=1, dim=64), encoder_config=part, decoder_config=part,
        global_config=dict(sizes, num_hidden_layers=1), num_hidden_layers=1,
    )  # fmt: skip
    mllama = transformers.models.mllama.MllamaTextConfig(
        **sizes, vocab_size=128, num_hidden_layers=3, cross_attention_layers=[1], pad_token_id=0
    )
    for cls, config, sentence in (
        (transformers.BltForCausalLM, blt, "returns a EncoderDecoderCache in place of the cache"),
        (transformers.MllamaForCausalLM, mllama, "has layers for images"),
    ):
        model = cls(config).to(here()).eval()
        with pytest.raises(ValueError, match=f"adze.generate: .*{sentence}.*; use its own generate()"):
            list(adze.generate(model, [5, 6, 7], 4))
    del blt.num_hidden_layers
    with pytest.raises(ValueError, match="adze.Cache: the config of a blt does not say how many layers it has"):
        adze.Cache(blt, 8)
