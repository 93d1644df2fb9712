"""adze.Cache: the tokens of transformers' own cache, contiguous and in pages, with any attention, and its methods."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import adze  # noqa: E402
import models  # noqa: E402
from adze.generation import in_torch  # noqa: E402
from device import Watch, generator, here  # noqa: E402
from lively import counted, lively, needs_kernels, prompt  # noqa: E402

FORMS = [{}, {"page": 8}, {"kind": "i8"}, {"kind": "f8e4m3", "page": 4}]
NAMES = ["llama", "mistral", "gpt_oss", "gpt2"]


def name_of(form):
    return "-".join(map(str, form.values())) or "plain"


def alike(got, want):
    """Bit for bit on the CPU. On a GPU two kernels may fuse a product into a sum each in its own way."""
    if got.device.type == "cpu":
        return torch.equal(got, want)
    got, want = got.double(), want.double()
    return bool((got - want).square().mean().sqrt() <= 0.02 * want.std())


def tokens_of(model, cache, tokens=12, **options):
    arguments = prompt() | {"past_key_values": cache, "max_new_tokens": tokens, "do_sample": False}
    with torch.no_grad():
        return model.generate(**arguments, eos_token_id=None, pad_token_id=0, **options)[:, -tokens:]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS[:2], ids=name_of)
def test_generate_with_any_attention(name, form):
    model = lively(name, attention="eager")
    want = tokens_of(model, None)
    for attention in ("eager", "adze"):
        model.set_attn_implementation(attention)
        cache = adze.Cache(model, 50, **form)
        with Watch() as watch:
            assert torch.equal(tokens_of(model, cache), want)
        assert watch.seen["adze.kv_append"] == counted(2 * 12, "kv_append")
        assert cache.get_seq_length() == 35 and cache.lengths.tolist() == [35, 35]
        assert f"35 of {cache.capacity} tokens" in repr(cache)
        cache.reset()
        assert cache.get_seq_length() == 0 and torch.equal(tokens_of(model, cache), want)


@pytest.mark.parametrize("kind", ["i8", "f8e4m3"])
def test_fewer_bits_are_the_same_in_pages_and_in_place(kind):
    """Of one kind, tokens do not depend on where and how keys lie; the logits are near to those of all bits."""
    model, found = lively("llama", attention="sdpa"), []
    exact = models.output(model, prompt())
    for attention in ("sdpa", "adze"):
        model.set_attn_implementation(attention)
        for page in (0, 8):
            found.append(tokens_of(model, adze.Cache(model, 50, kind=kind, page=page)))
            cache = adze.Cache(model, 50, kind=kind, page=page)
            near = models.output(model, prompt() | {"past_key_values": cache})
            assert 0 < (near - exact).square().mean().sqrt() < 0.1 * exact.std()
            assert cache.layers[0].keys.dtype == {"i8": torch.int8, "f8e4m3": torch.float8_e4m3fn}[kind]
    assert all(torch.equal(found[0], other) for other in found[1:])


@needs_kernels
@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_torch_writes_what_kv_append_writes(form, monkeypatch):
    written = []
    for own in (True, False):
        monkeypatch.setattr(in_torch, "has_kernel", lambda op, device, own=own: own)
        model = lively("llama", attention="sdpa")
        cache, random = adze.Cache(model, 20, **form), generator(1)
        for m in (5, 1, 3):
            k, v = (torch.randn(2, 1, m, 64, generator=random) for _ in range(2))
            k[0, 0, 0] = 0  # a row whose scale is 0
            with Watch() as watch:
                read = cache.update(k, v, 1)
            assert bool(watch.seen["adze.kv_append"]) == own
        written.append([in_torch.bits(x) for x in cache.layers[1].tensors()] + [cache.lengths, *read])
    assert all(map(torch.equal, *written))


@needs_kernels
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_rotated_where_it_is_appended(name, dtype, form, monkeypatch):
    """A patched model leaves the rotation to the cache. Keys and logits are those of rotating before, in any layout
    of the cache, and with an attention that reads a tensor of keys."""
    model, found = lively(name, attention="sdpa").to(dtype), []
    adze.patch(model, numerics="fast")
    for turns in (True, False):
        if not turns:
            monkeypatch.setattr(adze.Cache, "can_turn", lambda cache, query: False)
        for attention in ("adze", "sdpa"):
            model.set_attn_implementation(attention)
            cache = adze.Cache(model, 50, **form)
            with Watch() as watch:
                logits = models.output(model, prompt() | {"past_key_values": cache})
                step = {"input_ids": torch.tensor([[5], [6]]), "past_key_values": cache}
                logits = [logits, models.output(model, step)]
            rotations = watch.seen["adze.rope"] + watch.seen["adze.qk_norm_rope"]
            assert watch.seen["adze.kv_append"] == 4 and rotations == (0 if turns else 4)
            found.append(logits + [in_torch.bits(x) for layer in cache.layers for x in layer.tensors()])
    half = len(found) // 2
    for turned, rotated in zip(found[:half], found[half:], strict=True):
        assert all(map(alike, turned, rotated))


class _Seen(adze.Cache):
    def update(self, key_states, *args, **kwargs):
        self.seen = key_states
        return super().update(key_states, *args, **kwargs)


@needs_kernels
def test_a_cache_with_an_update_of_its_own_gets_rotated_keys():
    model = lively("llama", attention="adze")
    adze.patch(model, numerics="fast")
    cache = _Seen(model, 50)
    want = tokens_of(model, adze.Cache(model, 50))
    assert torch.equal(tokens_of(model, cache), want)
    assert torch.equal(cache.seen[:, :, 0], cache.layers[1].keys[:, :, cache.count - 1])


def test_pages_come_from_a_pool():
    model = lively("llama", attention="adze")
    cache = adze.Cache(model, 100, page=4, pages=12)
    tokens_of(model, cache, 1)
    assert cache.taken == 6 and not cache.free and cache.table.unique().numel() == 12
    with pytest.raises(ValueError, match="25 tokens of 2 sequences need 14 pages of 4, it has 12"):
        model(input_ids=prompt()["input_ids"][:, :1], past_key_values=cache)
    cache.reset()
    tokens_of(model, cache, 1)


@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_beams(form):
    model = lively("llama", attention="adze")
    if not form.get("kind"):
        options = {"num_beams": 3, "length_penalty": 0.0}
        want = tokens_of(model, None, 12, **options)
        assert torch.equal(tokens_of(model, adze.Cache(model, 50, **form), 12, **options), want)
    cache = adze.Cache(model, 50, **form)
    k = torch.randn(3, 1, 6, 64, generator=generator(2))
    model.set_attn_implementation("sdpa")
    before = cache.update(k, -k, 0)[0].clone()
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    after, values = cache.update(k[:, :, :1], k[:, :, :1], 0)
    assert torch.equal(after[:, :, :6], before[[2, 0, 0]]) and torch.equal(after[:, :, :6], -values[:, :, :6])


@pytest.mark.parametrize("form", FORMS[:2], ids=name_of)
def test_crop(form):
    """What was forgotten leaves no trace."""
    model, ids = lively("mistral", attention="adze"), prompt(1)["input_ids"]
    with torch.no_grad():
        cache = adze.Cache(model, 50, **form)
        model(input_ids=ids[:, :20], past_key_values=cache)
        cache.crop(-5)
        assert cache.get_seq_length() == 15 and cache.lengths.tolist() == [15]
        got = model(input_ids=ids[:, 15:], past_key_values=cache).logits
        want = model(input_ids=ids).logits[:, 15:]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    cache.crop(7)
    assert cache.get_seq_length() == 7
    with pytest.raises(ValueError, match="crop.-8. of 7 tokens"):
        cache.crop(-8)


def test_batches():
    model = lively("llama", attention="sdpa")
    cache, k = adze.Cache(model, 20), torch.randn(2, 1, 5, 64, generator=generator(1))
    keys, _ = cache.update(k, k, 0)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    k = torch.zeros(2, 1, 1, 64)
    assert torch.equal(cache.update(k, k, 0)[0][:, :, :5], keys[[1, 0]]) and cache.batch_size == 2
    paged = adze.Cache(model, 20, page=4)
    paged.update(k, k, 0)
    with pytest.raises(NotImplementedError, match="the batch of a cache in pages"):
        paged.batch_select_indices(torch.tensor([0]))
    with pytest.raises(ValueError, match="the batch is 3, this cache has 2"):
        paged.update(torch.zeros(3, 1, 1, 64), torch.zeros(3, 1, 1, 64), 1)


@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_copies(form):
    """Of the tokens that prompts have in common, one copy for each of them."""
    model = lively("llama", attention="eager")
    beginning = adze.Cache(model, 50, **form)
    list(adze.generate(model, [[5, 9, 3], [4, 4, 8]], 1, cache=beginning))
    for twin in (copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))):
        for more in ([[7], [6]], [[8, 2], [9, 9]]):
            cache, fresh = twin(beginning), adze.Cache(model, 50, **form)
            list(adze.generate(model, [[5, 9, 3], [4, 4, 8]], 1, cache=fresh))
            want = list(adze.generate(model, more, 8, stop=(), cache=fresh))
            assert list(adze.generate(model, more, 8, stop=(), cache=cache)) == want
            assert beginning.count == 3 and torch.equal(in_torch.bits(cache.layers[0].keys),
                                                        in_torch.bits(fresh.layers[0].keys))  # fmt: skip


def test_a_shallow_copy_is_refused():
    with pytest.raises(TypeError, match="a shallow copy would write into the same memory: use copy.deepcopy"):
        copy.copy(adze.Cache(lively("llama", layers=1), 50))


def test_sequences_of_different_lengths():
    model = lively("llama", attention="adze", layers=1)
    cache = adze.Cache(model, 50)
    list(adze.generate(model, [[5] * 9, [6] * 4], 1, cache=cache))
    cache.crop(7)  # how many stay, at most
    assert cache.lengths.tolist() == [7, 4] and cache.count == 7
    cache.reorder_cache(torch.tensor([1, 1]))
    assert cache.lengths.tolist() == [4, 4] and cache.get_seq_length() == 4
    want = model(input_ids=torch.tensor([[6] * 4 + [7]]))
    with torch.no_grad():
        got = model(input_ids=torch.tensor([[7], [7]]), past_key_values=cache)
    torch.testing.assert_close(got.logits[1, 0], want.logits[0, -1].detach(), rtol=1e-4, atol=1e-4)


def test_a_forward_pass_that_fails():
    model, ids, last = lively("llama", attention="adze"), torch.tensor([[5, 6, 7]]), torch.tensor([[8]])

    def fail(*_):
        raise KeyError("a hook")

    cache = adze.Cache(model, 20)
    with torch.no_grad():
        want = model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0, -1]
        model(input_ids=ids, past_key_values=cache)
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            model(input_ids=last, past_key_values=cache)
        hook.remove()
        with pytest.raises(RuntimeError, match="after a call that failed, crop.3. or reset"):
            model(input_ids=last, past_key_values=cache)
        cache.crop(3)
        got = model(input_ids=last, past_key_values=cache).logits[0, -1]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="the batch is 2, this cache has 1"):
            model(input_ids=torch.tensor([[8], [9]]), past_key_values=cache)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_dtype(dtype):
    model = lively("llama", layers=1)
    want = list(adze.generate(model, [5, 6, 7], 6, stop=(), cache=adze.Cache(model, 20, kind="i8")))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert list(adze.generate(model, [5, 6, 7], 6, stop=(), cache=adze.Cache(model, 20, kind="i8"))) == want
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("form", [{}, {"page": 8}], ids=name_of)
def test_autocast(form):
    """Values are in half precision there, and keys, which are rotated in float32, are not."""
    model = lively("llama", attention="sdpa")
    with torch.autocast(here().type, torch.bfloat16):
        want = tokens_of(model, None)
        arguments = prompt() | {"cache": adze.Cache(model, 50, **form), "stop": ()}
        rows = adze.generate(model, arguments.pop("input_ids"), 12, **arguments)
        assert [list(row) for row in zip(*rows, strict=True)] == want.tolist()
        assert torch.equal(tokens_of(model, adze.Cache(model, 50, **form)), want)


def test_another_dtype():
    model = lively("llama", layers=1)
    cache = adze.Cache(model, 20)
    list(adze.generate(model, [1, 2], 2, cache=cache))
    with pytest.raises(ValueError, match="keys of torch.bfloat16 on .* memory is for torch.float32 on"):
        list(adze.generate(model.to(torch.bfloat16), [1, 2], 2, cache=cache))


def test_assisted_generation():
    """It crops the cache when a guess was wrong."""
    model = lively("llama", attention="adze")
    want = models.generate(model, prompt(1), 20)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        got = model.generate(
            **prompt(1), **options, assistant_model=lively("llama", layers=1), past_key_values=adze.Cache(model, 60)
        )
    assert torch.equal(got, want)


def test_latents():
    """What the cache returns is not what attention gets: the memory is not read in place."""
    model, arguments = models.latent(), prompt()
    want = models.generate(model, arguments, 10)
    handle = adze.patch(model, numerics="fast")
    assert model.config._attn_implementation == "adze" or here().type != "cpu"
    for form in ({}, {"page": 16}):
        found = models.generate(model, arguments | {"past_key_values": adze.Cache(model, 64, **form)}, 10)
        assert torch.equal(found, want)
    assert torch.equal(models.generate(model, arguments, 10), want)
    with pytest.raises(ValueError, match="a deepseek_v3 keeps latents in its cache; use its own generate()"):
        adze.generate(model, [1, 2], 4)
    handle.remove()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("page", [0, 16])
def test_a_mask_of_the_callers_own(page, dtype):
    """It ends with the last token, which may be in the middle of a page."""
    model, ids = lively("llama"), prompt(1)["input_ids"]
    seen = torch.ones(24, 24, dtype=torch.bool).tril()
    seen[5:, 2] = False
    mask = seen if dtype == torch.bool else torch.zeros(24, 24).masked_fill(~seen, torch.finfo(dtype).min)
    found = []
    for chosen in ("eager", "sdpa", "adze"):
        model.set_attn_implementation("eager" if dtype != torch.bool and chosen == "sdpa" else chosen)
        if chosen == "eager":
            mask_of_eager = torch.zeros(24, 24).masked_fill(~seen, torch.finfo(torch.float32).min)
        cache, parts = adze.Cache(model, 64, page=page), []
        for first, last in ((0, 9), (9, 24)):
            own = (mask_of_eager if chosen == "eager" else mask)[None, None, first:last, :last]
            with torch.no_grad():
                made = model(input_ids=ids[:, first:last], attention_mask=own, past_key_values=cache)
            parts.append(made.logits)
        found.append(torch.cat(parts, 1))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_operators_on_what_the_cache_returns():
    """DiffLlama splits its values before attention: they become a tensor, where their number is known."""
    config = transformers.DiffLlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model, arguments = transformers.AutoModelForCausalLM.from_config(config).to(here()).eval(), prompt()
    want = models.generate(model, arguments, 10)
    model.set_attn_implementation("adze")
    cache = adze.Cache(model, 64)
    assert torch.equal(models.generate(model, arguments | {"past_key_values": cache}, 10), want)
    with torch.no_grad(), pytest.raises(RuntimeError, match="of adze.generate, take the model's own generate"):
        list(adze.generate(model, [5, 6, 7], 4))


def test_what_is_refused():
    model = lively("llama", attention="adze")
    for arguments, sentence in (
        ({"capacity": 8, "kind": "i4"}, "kind is 'i4', it must be None, 'i8' or 'f8e4m3'"),
        ({"capacity": 0}, "capacity must be 1 or more"),
        ({"capacity": 8.5}, "capacity is 8.5, .* all are whole numbers"),
        ({"capacity": 8, "page": 1.5}, "page 1.5 and pages None; .* all are whole numbers"),
        ({"capacity": 8, "pages": 3}, "pages needs a page"),
    ):
        with pytest.raises(ValueError, match=sentence):
            adze.Cache(model, **arguments)
    with pytest.raises(ValueError, match="model is a Linear, it must be a model or its config"):
        adze.Cache(torch.nn.Linear(2, 2), 8)
    other = transformers.Llama4TextConfig(num_hidden_layers=4)
    with pytest.raises(ValueError, match="llama4_text has layers of chunked_attention"):
        adze.Cache(other, 8)
    with pytest.raises(ValueError, match="recurrent_gemma has layers of (recurrent|linear_attention)"):
        adze.Cache(transformers.RecurrentGemmaConfig(num_hidden_layers=3), 8)
    cache = adze.Cache(model, 10)
    with torch.no_grad(), pytest.raises(ValueError, match="24 tokens were asked for, its capacity is 10"):
        model(input_ids=prompt(1)["input_ids"], past_key_values=cache)
    with pytest.raises(RuntimeError, match="adze has no gradients"):
        model(input_ids=prompt(1)["input_ids"][:, :4], past_key_values=adze.Cache(model, 10))
    cache = adze.Cache(model, 10, page=5)
    with torch.no_grad():
        keys, _ = cache.update(torch.zeros(1, 1, 2, 64), torch.zeros(1, 1, 2, 64), 0)
    assert keys.shape == (1, 1, 5, 64) and keys.device.type == here().type
    with pytest.raises(RuntimeError, match='only attention "adze" can read'):
        keys + 1
    cache = adze.Cache(model, 10)
    k = torch.zeros(1, 1, 2, 64)
    cache.update(k, k, 0)
    with pytest.raises(RuntimeError, match="a layer that has 0 tokens got 1, other layers have 2"):
        cache.update(k[:, :, :1], k[:, :, :1], 1)
