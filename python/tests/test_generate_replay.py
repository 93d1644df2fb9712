"""transformers' generate() of a model that is patched with numerics="fast": a step is captured once and replayed for
each token. Without a GPU, tapes stand for graphs (tape.py)."""

import copy
import gc
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import adze  # noqa: E402
import models  # noqa: E402
import tape  # noqa: E402
from adze.generation import decode, replay  # noqa: E402
from adze.graphs import cuda_graph  # noqa: E402
from device import here  # noqa: E402
from lively import lively, needs_kernels, prompt  # noqa: E402

pytestmark = needs_kernels
NAMES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt2", "gpt_neox", "phi", "olmo2"]
PLAIN = {"norm", "rope", "act", "fuse", "attention"}  # all but graphs


@pytest.fixture
def captured(monkeypatch):
    """The graphs that are captured."""
    return tape.use(monkeypatch)


def whole(batch=2, seq=24):
    arguments = prompt(batch, seq)
    arguments["attention_mask"].fill_(1)
    return arguments


def generated(model, arguments, tokens=16, **options):
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": tokens, **options}
    return model.generate(**arguments, **options)


def patched(name, **options):
    model = lively(name)
    return model, adze.patch(model, numerics="fast", **options)


def lender_of(handle):
    return handle.settings[1].settings[0].lender


def replays(captured):
    return [graph.replays for graph in captured]


# ---- Tokens ----


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", [whole, prompt], ids=["whole", "padded"])
def test_greedy_tokens(name, arguments, captured):
    """Those of the model before it was patched; windows are of 16 tokens. The second call captures nothing."""
    want = generated(lively(name, attention="eager"), arguments(), 20)
    model, handle = patched(name)
    assert f"generate() replays a CUDA graph for each token ({type(model).__name__})" in handle.report()
    for calls in (1, 2):
        assert torch.equal(generated(model, arguments(), 20), want)
        assert replays(captured) == [19 * calls]
    assert not torch.is_inference_mode_enabled() and len(want.unique()) > 8


@pytest.mark.skipif(here().type != "cpu", reason="whether experts are captured depends on their kernels")
@pytest.mark.parametrize("name", sorted(set(models.LANGUAGE) - set(NAMES)))
def test_tokens_of_other_models(name, captured):
    """Experts, a model with its own prepare_inputs_for_generation, and one whose attention cannot be chosen."""
    want = generated(lively(name, attention="eager"), prompt())
    model, _ = patched(name)
    assert torch.equal(generated(model, prompt()), want)


def test_latents(captured):
    """Keys and values are made of what the cache returns, so it must be transformers' own."""
    model = models.latent()
    want = generated(model, prompt())
    handle = adze.patch(model, numerics="fast")
    assert "its cache keeps latents" in handle.report()
    assert torch.equal(generated(model, prompt()), want) and not replays(captured)


@pytest.mark.parametrize("options", [{}, {"top_k": 9, "temperature": 0.7}, {"num_return_sequences": 3, "top_p": 0.9}])
def test_samples_by_a_seed(options, captured):
    model, found = lively("qwen3"), []
    for ops in (None, PLAIN, ()):
        with adze.patched(model, ops=ops, numerics="fast") if ops != () else torch.no_grad():
            torch.manual_seed(5)
            found.append(generated(model, prompt(), do_sample=True, **options))
        assert len(captured) == 1  # by the first alone
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert len(found[0].unique()) > 20


def test_stops(captured):
    model, arguments = lively("llama"), prompt(3)
    stop = generated(model, arguments)[0, 24 + 4].item()
    want = generated(model, arguments, eos_token_id=stop)
    assert (want[0, 29:] == 0).all() and (want[1:, 29:] != 0).any()
    adze.patch(model, numerics="fast")
    assert torch.equal(generated(model, arguments, eos_token_id=stop), want)
    words = transformers.StoppingCriteriaList([lambda ids, scores: torch.full(ids.shape[:1], ids.shape[1] > 30)])
    assert generated(model, arguments, stopping_criteria=words).shape[1] == 31
    assert len(captured) == 1


@pytest.mark.parametrize("arguments", [whole, prompt], ids=["whole", "padded"])
def test_memory_grows(arguments, captured, monkeypatch):
    """Each time a step is captured for the new memory. The next call has the largest, if it may need so much."""
    monkeypatch.setattr(replay, "_MORE", 4)
    want = generated(lively("mistral", attention="eager"), arguments(2, 6), 60)
    model, handle = patched("mistral")
    assert torch.equal(generated(model, arguments(2, 6), 60), want)
    assert replays(captured) == [6, 12, 24, 17] and lender_of(handle).free.capacity == 65
    assert torch.equal(generated(model, arguments(2, 6), 60), want)
    assert replays(captured) == [6, 12, 24, 17 + 59]
    assert torch.equal(generated(model, arguments(2, 6), 9), want[:, :15])
    assert lender_of(handle).free.capacity == 14 and len(captured) == 6  # 65 slots are more than 4 times those


def test_other_batches_and_lengths(captured):
    model, handle = patched("llama")
    plain = lively("llama")
    for batch, seq in ((2, 24), (3, 9), (2, 24), (1, 40)):
        arguments = prompt(batch, seq)
        assert torch.equal(generated(model, arguments), generated(plain, arguments))
    assert sum(replays(captured)) == 4 * 15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_inference_mode(dtype, captured):
    model, handle = patched("qwen3")
    model.to(dtype)
    with torch.no_grad():
        first = generated(model, prompt())
    with torch.inference_mode():
        assert torch.equal(generated(model, prompt()), first)
    assert torch.equal(generated(model, prompt()), first)
    assert sum(replays(captured)) == 45
    want = generated(model, prompt(), past_key_values=adze.Cache(model, 60))
    assert torch.equal(first, want) and sum(replays(captured)) == 45


def test_inputs_embeds(captured):
    model, handle = patched("llama")
    embedded = model.get_input_embeddings()(whole()["input_ids"]).detach()
    want = generated(lively("llama"), {"inputs_embeds": embedded})
    assert torch.equal(generated(model, {"inputs_embeds": embedded}), want) and replays(captured) == [15]


# ---- What a caller gets stays as it is ----


def test_scores_and_the_cache_that_is_returned(captured):
    model, handle = patched("llama")
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    first = generated(model, prompt(), **options)
    assert replays(captured) == [15] and isinstance(first.past_key_values, adze.Cache)
    held = first.past_key_values
    state = [x.clone() for layer in held.layers for x in layer.tensors()]
    logits = [x.clone() for x in first.logits]
    other = prompt() | {"input_ids": prompt()["input_ids"].flip(1)}
    generated(model, other, **options)
    generated(model, other)
    assert all(map(torch.equal, state, [x for layer in held.layers for x in layer.tensors()]))
    assert all(map(torch.equal, logits, first.logits)) and held.get_seq_length() == 24 + 15
    with adze.patched(model, ops=PLAIN, numerics="fast"):
        want = generated(model, prompt(), **options)
    assert type(want.past_key_values) is transformers.DynamicCache
    assert torch.equal(first.sequences, want.sequences)
    for name in ("scores", "logits"):
        assert len(first[name]) == 16
        for a, b in zip(first[name], want[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # on a GPU by another attention, in f32


def test_the_returned_cache_goes_on(captured):
    """It grows, and can be copied and cropped; no graph is replayed for a cache that a caller gives."""
    model, handle = patched("llama")
    made = generated(model, whole(), 5, return_dict_in_generate=True)
    longer = {"input_ids": made.sequences, "attention_mask": torch.ones_like(made.sequences)}
    want, count = generated(lively("llama"), longer, 12), sum(replays(captured))
    copied = copy.deepcopy(made.past_key_values)
    for cache in (made.past_key_values, copied):
        assert cache.get_seq_length() == 28
        assert torch.equal(generated(model, longer, 12, past_key_values=cache), want)
        assert cache.get_seq_length() == 40 and cache.capacity >= 40 and all(x.cache is cache for x in cache.layers)
        cache.crop(-3)
        assert cache.get_seq_length() == 37
    assert sum(replays(captured)) == count


def test_memory_is_lent_to_one_cache_at_a_time(captured):
    model, handle = patched("llama")
    lender, gc_was = lender_of(handle), gc.isenabled()
    gc.disable()  # a cache is gone without it
    try:
        held = generated(model, prompt(), return_dict_in_generate=True).past_key_values
        assert lender.free is None
        generated(model, prompt())
        second = lender.free
        assert second is not None and second is not held.memory
        generated(model, prompt())
        assert lender.free is second and replays(captured) == [15, 30]
        first, gone = held.memory, weakref.ref(held)
        del held
        assert gone() is None and lender.free is first
        del second
        generated(model, prompt())
        assert lender.free is first and replays(captured) == [30, 30]
        kept = weakref.ref(first)
        del first, lender
        handle.disable()
        assert kept() is None and lender_of(handle) is None  # the memory is free
    finally:
        if gc_was:
            gc.enable()


@pytest.mark.parametrize("take, tensor", [
    (lambda cache: cache, lambda cache: cache.layers[1].keys),
    (lambda cache: cache.layers[1], lambda layer: layer.values),
    (lambda cache: cache.layers[1].keys, lambda keys: keys),
    (lambda cache: cache.layers[1].keys[:, :, :20], lambda keys: keys),
    (lambda cache: None, None),
], ids=["cache", "layer", "tensor", "view", "nothing"])  # fmt: skip
def test_memory_of_which_somebody_has_a_part(take, tensor, monkeypatch):
    """It is not lent again. No graph is captured here: a tape would have the tensors."""

    def fail(*args):
        raise RuntimeError("no capture")

    monkeypatch.setattr(cuda_graph, "_capture", fail)
    monkeypatch.setattr(decode, "_graphs", lambda device: True)
    model, handle = patched("llama")
    with torch.no_grad():
        part = take(generated(model, whole(), return_dict_in_generate=True).past_key_values)
    free, other = lender_of(handle).free, whole() | {"input_ids": whole()["input_ids"].flip(1)}
    assert (free is None) == isinstance(part, adze.Cache)
    before = None if part is None else tensor(part).clone()
    generated(model, other)
    assert (lender_of(handle).free is free) == (part is None)
    assert part is None or torch.equal(tensor(part), before)


def test_a_model_goes_with_its_memory(captured):
    model, handle = patched("llama")
    generated(model, prompt())
    gone = weakref.ref(model)
    captured.clear()
    del model, handle
    gc.collect()
    assert gone() is None


# ---- Calls that are not plain run the model ----


@pytest.mark.parametrize("options", [
    {"num_beams": 3}, {"num_beams": 2, "do_sample": True}, {"use_cache": False}, {"disable_compile": True},
    {"cache_implementation": "dynamic"}, {"cache_implementation": "static", "disable_compile": True},
    {"prefill_chunk_size": 8}, {"prompt_lookup_num_tokens": 2}, {"output_hidden_states": True},
    {"return_dict_in_generate": True, "output_attentions": True},
], ids=lambda options: "-".join(options))  # fmt: skip
def test_other_calls(options, captured):
    model, arguments = lively("llama", attention="eager"), whole(1)
    torch.manual_seed(3)
    want = generated(model, arguments, **options)
    adze.patch(model, numerics="fast")
    torch.manual_seed(3)
    found = generated(model, arguments, **options)
    if "return_dict_in_generate" in options:
        assert len(found.attentions) == 16
        found, want = found.sequences, want.sequences
    assert torch.equal(found, want) and not captured
    generated(model, arguments)
    assert replays(captured) == [15]  # its hooks for outputs do nothing now


def test_a_cache_of_the_caller(captured):
    model, handle = patched("llama")
    want = generated(lively("llama"), prompt())
    for cache in (transformers.DynamicCache(config=model.config), adze.Cache(model, 60)):
        assert torch.equal(generated(model, prompt(), past_key_values=cache), want) and not captured
        assert cache.get_seq_length() == 39


def test_long_texts_of_layers_with_a_window(captured, monkeypatch):
    """A cache of transformers drops what is before the window, and needs less memory."""
    model, handle = patched("mistral")
    monkeypatch.setattr(replay, "_WINDOWS", 40)
    generated(model, whole(), 42)  # 65 slots for a window of 16
    assert not captured
    generated(model, whole(), 41)
    assert replays(captured) == [40]


def test_assistants(captured):
    model, handle = patched("llama")
    assistant = lively("llama", layers=1)
    adze.patch(assistant, numerics="fast")
    want = generated(lively("llama"), whole(1))
    assert torch.equal(generated(model, whole(1), assistant_model=assistant), want) and not captured


def test_a_generate_of_the_caller(captured):
    """It may call the model in any way, with the cache that it was given."""
    model, handle = patched("llama")

    def own(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        cache = kwargs["past_key_values"]
        made = model(input_ids=input_ids[:, :10], past_key_values=cache)
        made = model(input_ids=input_ids[:, 10:], past_key_values=cache)
        return made.logits[:, -1].argmax(-1), cache

    token, cache = generated(model, whole(), custom_generate=own)
    want = generated(lively("llama"), whole(), 1)[:, -1]
    assert torch.equal(token, want) and cache.get_seq_length() == 24 and not captured


def test_modes(captured, monkeypatch):
    model, handle = patched("llama")
    want = generated(lively("llama"), whole(), 6)
    model.train()
    assert torch.equal(generated(model, whole(), 6), want) and not captured
    assert "(LlamaForCausalLM): it is in training mode" in handle.report()
    model.eval()
    model.config.output_hidden_states = True
    made = generated(model, whole(), 6, return_dict_in_generate=True)
    model.config.output_hidden_states = False
    assert torch.equal(made.sequences, want) and not captured
    with torch.autocast(here().type, dtype=torch.bfloat16):
        generated(model, whole(), 6)
    assert not captured
    model.set_attn_implementation("sdpa")
    assert torch.equal(generated(model, whole(), 6), want) and not captured
    assert '(LlamaForCausalLM): its attention is "sdpa"' in handle.report()


def test_without_a_gpu(on_the_cpu):
    """There the cache is transformers' own, and the report says nothing of graphs."""
    model, handle = patched("llama")
    assert "CUDA graph" not in handle.report()
    made = generated(model, whole(), return_dict_in_generate=True)
    assert type(made.past_key_values) is transformers.DynamicCache


# ---- The patch, and changes ----


def test_the_setting(captured):
    model = lively("llama")
    names = ("_prepare_cache_for_generation", "_valid_auto_compile_criteria")
    assert adze.patch(model).settings == [] and not set(names) & set(model.__dict__)  # "match"
    handle = adze.patch(model, ops=PLAIN, numerics="fast")
    assert "CUDA graph" not in handle.report() and not set(names) & set(model.__dict__)
    handle = adze.patch(model, numerics="fast")
    assert set(names) <= set(model.__dict__)
    with adze.patched(model, ops=PLAIN, numerics="fast"):
        generated(model, whole())
        assert not captured
    generated(model, whole())
    assert len(captured) == 1
    handle.disable()
    assert not set(names) & set(model.__dict__)
    generated(model, whole())
    handle.enable()
    generated(model, whole())
    assert replays(captured) == [15, 15]
    handle.remove()
    assert not set(names) & set(model.__dict__)
    model._prepare_cache_for_generation = theirs = model._prepare_cache_for_generation
    adze.patch(model, numerics="fast").remove()
    assert model.__dict__[names[0]] is theirs and names[1] not in model.__dict__  # somebody's own stays
    generated(model, whole())
    assert len(captured) == 2


def test_copies_of_a_model(captured):
    """They run without graphs, and their own modules."""
    model, handle = patched("llama")
    want = generated(model, whole())
    for made in (copy.deepcopy(model), copy.copy(model)):
        assert torch.equal(generated(made, whole()), want) and replays(captured) == [15]
        assert not {"_prepare_cache_for_generation", "__getstate__"} & set(made.__dict__)
        made._modules = {**made._modules, "lm_head": copy.deepcopy(model.lm_head)}
        with torch.no_grad():
            made.lm_head.weight.neg_()
        assert not torch.equal(generated(made, whole()), want) and torch.equal(generated(model, whole()), want)
        captured[0].replays -= 15
    handle.remove()
    assert "__getstate__" not in model.__dict__


@pytest.mark.parametrize("kind", ["int8", "int4-g64"])
def test_quantized_models(kind, captured):
    model = lively("qwen3").to(torch.bfloat16)
    adze.quantize(model, kind, progress=False)
    handle = adze.patch(model, numerics="fast")
    want = generated(model, prompt(), past_key_values=adze.Cache(model, 60))
    assert torch.equal(generated(model, prompt()), want) and replays(captured) == [15]
    assert "replays a CUDA graph" in handle.report()


class At(transformers.LogitsProcessor):
    """Does something before a token is chosen."""

    def __init__(self, length, act):
        self.length, self.act = length, act

    def __call__(self, ids, scores):
        if ids.shape[1] == self.length:
            self.act()
        return scores


def with_change(model, act, tokens=16):
    """The tokens when something changes after five of them."""
    processor = transformers.LogitsProcessorList([At(24 + 5, act)])
    return generated(model, whole(), tokens, logits_processor=processor)


def test_hooks(captured):
    model, handle = patched("llama")
    want, seen = generated(model, whole()), []
    hook = model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(generated(model, whole()), want) and len(seen) == 16
    assert "(LlamaForCausalLM): a LlamaDecoderLayer has a hook" in handle.report()
    hook.remove()
    seen.clear()
    hooks = []

    def add():
        hooks.append(model.model.norm.register_forward_pre_hook(lambda *_: seen.append(1)))

    assert torch.equal(with_change(model, add), want) and len(seen) == 10
    hooks[0].remove()
    before = sum(replays(captured))
    assert torch.equal(generated(model, whole()), want) and len(seen) == 10
    assert sum(replays(captured)) == before + 15


@pytest.mark.parametrize("change", [
    lambda model: model.lm_head.weight.data.neg_(),
    lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(-model.lm_head.weight.data)),
    lambda model: setattr(model.lm_head.weight, "data", -model.lm_head.weight.data),
    lambda model: setattr(model.model.layers[1].input_layernorm, "variance_epsilon", 10.0),
    lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.Tanh()),
    lambda model: model.model.layers.__delitem__(1),
], ids=["in place", "parameter", "data", "number", "module", "layer"])  # fmt: skip
def test_changes_between_tokens(change, captured):
    """A replay that was started before the change was seen is not used."""
    found = []
    for fast in (False, True):
        model = lively("llama")
        if fast:
            adze.patch(model, numerics="fast")

        def act(model=model):
            change(model)
            model.config.num_hidden_layers = len(model.model.layers)

        with torch.no_grad():
            found.append(with_change(model, act))
    plain = generated(lively("llama"), whole())
    assert torch.equal(*found) and not torch.equal(found[0], plain)
    assert torch.equal(found[0][:, :29], plain[:, :29]) and sum(replays(captured)) >= 5


def test_a_patch_that_is_disabled_between_tokens(captured):
    """The rest runs without the patch, with the cache that the call has. The replay that was started before the
    change was seen is dropped."""
    model, handle = patched("qwen3")
    want = generated(lively("qwen3"), whole())
    assert torch.equal(with_change(model, handle.disable), want) and replays(captured) == [6]
    handle.enable()
    assert torch.equal(generated(model, whole()), want) and replays(captured) == [6, 15]


def test_weights_that_move_often(captured):
    """Graphs of weights that were elsewhere are dropped."""
    model, handle = patched("llama")
    want = generated(model, whole(), 6)
    for _ in range(2 * replay._GRAPHS):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        assert torch.equal(generated(model, whole(), 6), want)
    assert len(captured) == 2 * replay._GRAPHS + 1 and sum(replays(captured)) == 5 * len(captured)


def test_adapters(captured):
    peft = pytest.importorskip("peft")
    model, handle = patched("llama")
    want = generated(model, whole())
    torch.manual_seed(1)
    options = {"r": 4, "init_lora_weights": False, "target_modules": ["q_proj", "down_proj"]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options)).eval()
    count, found = sum(replays(captured)), generated(adapted, whole())
    assert sum(replays(captured)) == count + 1 + 15  # one was dropped
    with adze.patched(model, ops=PLAIN, numerics="fast"):
        assert torch.equal(generated(adapted, whole()), found)
    assert not torch.equal(found, want)
    with adapted.disable_adapter():
        assert torch.equal(generated(adapted, whole()), want)
    assert torch.equal(generated(adapted, whole()), found)
    assert torch.equal(generated(adapted.merge_and_unload(), whole()), found)


def test_threads(captured):
    """Each has a cache of its own."""
    model, handle = patched("llama")
    prompts = [whole(2, 8 + i) for i in range(4)]
    want, found, device = [generated(lively("llama"), arguments) for arguments in prompts], [None] * 4, here()

    def run(i):
        torch.set_default_device(None if device.type == "cpu" else device)
        for _ in range(3):
            found[i] = generated(model, prompts[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, found, want)) and sum(replays(captured)) > 15


def test_what_cannot_be_captured_runs(captured, monkeypatch):
    """A model whose graph fails is asked for once in a call."""
    model, handle = patched("llama")
    want, asked = generated(lively("llama"), whole()), []

    def fail(*args):
        asked.append(1)
        raise RuntimeError("no capture")

    monkeypatch.setattr(cuda_graph, "_capture", fail)
    for _ in range(2):
        assert torch.equal(generated(model, whole()), want) and len(asked) == 1
