"""adze.generate: the tokens of transformers' greedy generate(), samples, stops, and adze.patch's attention."""

import gc
import inspect
import threading

import numpy
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import adze  # noqa: E402
import models  # noqa: E402
import tape  # noqa: E402
from adze.generation import decode, in_torch  # noqa: E402
from adze.graphs.cuda_graph import GraphHandle  # noqa: E402
from adze.graphs.module_state import ModuleState  # noqa: E402
from adze.patching import products  # noqa: E402
from device import Watch, generator, here  # noqa: E402
from lively import greedy, lively, needs_kernels, own, passes, prompt  # noqa: E402


@pytest.mark.parametrize("name", models.LANGUAGE)
def test_greedy_tokens(name):
    """Of a padded batch, whose prompt is run at once, and by chunks into pages."""
    model, arguments = lively(name), prompt(3)
    before, want = model.config._attn_implementation, greedy(lively(name, attention="eager"), arguments)
    assert own(model, arguments) == want
    assert own(model, arguments, 12, chunk=5, cache=adze.Cache(model, 40, page=8)) == [row[:12] for row in want]
    assert model.config._attn_implementation == before and len({token for row in want for token in row}) > 8


def test_one_prompt_and_prompts_of_different_lengths():
    model, rows = lively("llama"), [[5, 9, 3, 77], [8], [4, 4, 60, 61, 62, 63]]
    alone = [list(adze.generate(model, row, 10, stop=())) for row in rows]
    assert alone[0] == list(adze.generate(model, torch.tensor(rows[0]), 10, stop=())) and len(alone[0]) == 10
    assert [list(row) for row in zip(*adze.generate(model, rows, 10, stop=()), strict=True)] == alone
    padded = torch.tensor([[*row, *[0] * (6 - len(row))] for row in rows])
    right = {"input_ids": padded, "attention_mask": (padded > 0).long()}
    assert own(model, right, 10) == alone


@needs_kernels
def test_forms_of_a_prompt():
    """A list of tensors or an array are lists, too."""
    model, rows = lively("llama", layers=1), [[5, 6, 7], [8, 9]]
    want = list(adze.generate(model, rows, 4, stop=()))
    for ids in ([torch.tensor(row) for row in rows], tuple(map(numpy.array, rows))):
        assert list(adze.generate(model, ids, 4, stop=numpy.array([], dtype=numpy.int64))) == want
    padded, mask = numpy.array([[5, 6, 7], [8, 9, 0]]), [[True] * 3, [True, True, False]]
    assert list(adze.generate(model, padded, 4, attention_mask=mask, stop=())) == want
    single = [row[0] for row in want]
    stop = torch.tensor([single[1], 127])
    assert list(adze.generate(model, numpy.array(rows[0]), 4, stop=stop)) == single[: single.index(single[1]) + 1]


def test_an_op_for_each_part_and_no_mask():
    model = lively("mistral")
    with Watch() as watch:
        own(model, prompt(), 8)
    runs = passes(8)
    assert [watch.seen[f"adze.{op}"] for op in ("attention", "kv_append", "sample")] == [2 * runs, 2 * runs, runs]
    with Watch() as watch:
        list(adze.generate(model, [1, 2, 3], 8, stop=(), cache=adze.Cache(model, 64, kind="i8")))
    assert watch.seen["adze.attention"] == 2 * runs


def test_a_cache_goes_on():
    """A second prompt continues the first one, also of sequences that have different lengths."""
    model = lively("gemma2")
    for rows, more in (([[5, 9, 3, 77]], [[8, 2]]), ([[5, 9, 3, 77], [8]], [[8, 2], [7, 7, 9]])):
        cache = adze.Cache(model, 60)
        first = [list(row) for row in zip(*adze.generate(model, rows, 6, stop=(), cache=cache), strict=True)]
        assert cache.lengths.tolist() == [len(row) + 5 for row in rows]
        whole = [[*a, *b, *c] for a, b, c in zip(rows, first, more, strict=True)]
        follow = [[b[-1], *c] for b, c in zip(first, more, strict=True)]
        want = list(adze.generate(model, whole, 6, stop=()))
        assert list(adze.generate(model, follow, 6, stop=(), cache=cache)) == want
    ids = torch.ones(2, 8, dtype=torch.long)
    with torch.no_grad():
        for call in (model, model.generate):
            with pytest.raises(ValueError, match="sequences have 15 to 17 tokens, .* go on with adze.generate, or"):
                call(input_ids=ids, past_key_values=cache, **({} if call is model else {"max_new_tokens": 2}))
        cache.reset()
        model(input_ids=ids, past_key_values=cache)
        with pytest.raises(ValueError, match="the input has no tokens after the 8 that the cache has"):
            model.generate(input_ids=ids[:, :4], max_new_tokens=2, past_key_values=cache)


def test_stops():
    """A stop token is the last of its sequence; what the step after it made is dropped."""
    model, arguments = lively("llama"), prompt(3)
    want = own(model, arguments, 20)
    stop = want[0][4]
    ends = [row.index(stop) if stop in row else 19 for row in want]
    assert ends[0] <= 4 and len(set(ends)) > 1
    cache = adze.Cache(model, 60)
    assert own(model, arguments, 20, stop=stop, cache=cache) == [
        row[: end + 1] for row, end in zip(want, ends, strict=True)
    ]
    prompts = arguments["attention_mask"].sum(1).tolist()
    assert cache.lengths.tolist() == [length + end for length, end in zip(prompts, ends, strict=True)]
    model.generation_config.eos_token_id = [stop, 1000]
    single = arguments["input_ids"][2]
    assert list(adze.generate(model, single, 20)) == list(adze.generate(model, single, 20, stop=[stop]))
    steps = []
    model.register_forward_hook(lambda *_: steps.append(1))
    cache = adze.Cache(model, 60)
    made = list(adze.generate(model, single, 20, stop=want[2][2], cache=cache))
    assert len(steps) == passes(len(made) + 1)  # the prompt, and a step more than was needed
    for runner in decode._runners[cache].values():
        if isinstance(runner, GraphHandle):
            assert [graph.replays for graph in runner.captured.values()] == [len(made)]


def test_tokens_come_as_they_are_made():
    model, cache = lively("llama"), adze.Cache(lively("llama"), 60)
    tokens = adze.generate(model, [5, 6, 7], 30, stop=(), cache=cache)
    assert inspect.isgenerator(tokens) and cache.count == 0
    first = [next(tokens) for _ in range(3)]
    assert torch.is_grad_enabled()
    tokens.close()
    assert cache.lengths.tolist() == [5] and len(first) == 3


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """The same ops as in generate() of transformers with attention "adze", so the same tokens."""
    model, arguments = lively("qwen3", attention="adze").to(dtype), prompt(1)
    want = greedy(model, arguments, 20)
    assert own(model, arguments, 20) == want
    adze.patch(model, numerics="fast")
    assert own(model, arguments, 20) == greedy(model, arguments, 20)


def test_inference_mode_and_after_it():
    model = lively("llama")
    want = list(adze.generate(model, [5, 6, 7], 8, stop=(), repetition_penalty=1.1))
    cache = adze.Cache(model, 20, page=4)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            assert list(adze.generate(model, [5, 6, 7], 8, stop=(), cache=cache, repetition_penalty=1.1)) == want
        cache.reset()


def test_threads_share_a_model():
    """A call ends while another one is inside the model: that one goes on with attention "adze", and the model has
    its own when both have ended."""
    model, prompts, found = lively("llama", attention="sdpa"), ([5, 6, 7], [8, 9, 10, 11]), {}
    want = [list(adze.generate(model, prompt, 1, stop=())) for prompt in prompts]
    inside, ended, late = threading.Event(), threading.Event(), threading.local()

    def run(i):
        late.is_second = i == 1
        found[i] = list(adze.generate(model, prompts[i], 1, stop=()))

    def wait(*_):
        if getattr(late, "is_second", False):
            inside.set()
            assert ended.wait(60)
        else:
            assert inside.wait(60)

    hook = model.model.layers[0].register_forward_pre_hook(wait)
    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join()
    ended.set()
    threads[1].join()
    hook.remove()
    assert [found[0], found[1]] == want and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("form", [None, {}, {"page": 4}], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_another_thread_calls_the_model_itself(attention, form):
    """It makes its masks while adze.generate is inside the model, and runs its layers when that has ended."""
    model, ids, found = lively("llama", attention=attention), prompt()["input_ids"], []
    inside, ready, ended = (threading.Event() for _ in range(3))
    caller = threading.local()

    def call():
        with torch.no_grad():
            cache = None if form is None else adze.Cache(model, 40, **form)
            return model(input_ids=ids, past_key_values=cache).logits

    def wait(*_):
        if getattr(caller, "is_other", False):
            ready.set()
            assert ended.wait(60)
        else:
            inside.set()
            assert ready.wait(60)

    def other():
        caller.is_other = True
        assert inside.wait(60)
        found.append(call())

    want = call()
    hook = model.model.layers[0].register_forward_pre_hook(wait)
    thread = threading.Thread(target=other)
    thread.start()
    list(adze.generate(model, [5, 6, 7], 1, stop=()))
    ended.set()
    thread.join()
    hook.remove()
    torch.testing.assert_close(found[0], want, rtol=1e-4, atol=1e-4)


# ---- Samples ----


def test_samples_repeat_with_their_seed():
    model, arguments = lively("qwen2"), prompt()
    options = {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2}
    first = own(model, arguments, 20, seed=7, **options)
    assert own(model, arguments, 20, seed=7, chunk=9, **options) == first
    assert own(model, arguments, 20, seed=8, **options) != first != greedy(model, arguments, 20)


def test_top_p_of_0_is_the_likeliest_token():
    model = lively("llama", layers=1)
    want = list(adze.generate(model, [5, 6, 7], 8, stop=()))
    assert list(adze.generate(model, [5, 6, 7], 8, stop=(), temperature=9.0, top_p=0.0)) == want


def test_repetition_penalty():
    model, arguments = lively("llama"), prompt(1)
    want = greedy(model, arguments, 20, repetition_penalty=1.5)
    assert own(model, arguments, 20, repetition_penalty=1.5) == want != greedy(model, arguments, 20)


@needs_kernels
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 7},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "penalty": 1.3},
        {"temperature": 0.0, "penalty": 1.3},
    ],
    ids=lambda options: "-".join(options) or "none",
)
def test_torch_draws_the_same(options, monkeypatch):
    logits = 3 * torch.randn(32, 300, generator=generator(1))
    previous = torch.randint(-1, 300, (32, 9), generator=generator(2))
    lengths = torch.randint(0, 9, (32,), generator=generator(3)).int()
    options = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0} | options
    found = []
    for kernel in (True, False):
        monkeypatch.setattr(in_torch, "has_kernel", lambda op, device, kernel=kernel: kernel)
        known = previous if options["penalty"] != 1 else None
        found.append(torch.empty(32, dtype=torch.int64))
        decode._pick(logits, lengths, torch.tensor([-5]), known, found[-1], **options)
    assert torch.equal(*found) and found[0].unique().numel() > 15


# ---- What is refused ----


def test_what_is_refused():
    model = lively("llama", layers=1)
    for arguments, sentence in (
        ((torch.zeros(1, 1, 1), 4), "ids has 3 dimensions, it must have 1 or 2"),
        (([], 4), "a sequence without tokens"),
        (([1, 2], 0), "max_new_tokens is 0 and chunk 512"),
        (([1, 2], 4.0), "max_new_tokens is 4.0, it must be a whole number"),
        (([1, 2.5], 4), "a token of ids is 2.5, it must be a whole number"),
        ((torch.ones(2), 4), "a token of ids is 1.0, it must be a whole number"),
        (("text", 4), "ids is a str, it must be a list, a list of lists or a tensor"),
        (({"input_ids": [1, 2]}, 4), 'ids is a dict, .* pass its "input_ids" and its "attention_mask"'),
        (([[1, 2], 3], 4), "ids has tokens beside lists of tokens"),
        (([1, 128], 4), "ids has 128, the model has tokens 0 to 127"),
        (([1, -1], 4), "ids has -1, the model has tokens 0 to 127"),
    ):
        with pytest.raises(ValueError, match=sentence):
            adze.generate(model, *arguments)
    for options, sentence in (
        ({"attention_mask": [1, 1, 1]}, r"attention_mask has rows of \[3\] tokens, ids has \[2\]"),
        ({"stop": "x"}, "a token of stop is 'x', it must be a whole number"),
        ({"seed": 2**63}, "seed is 9223372036854775808, it must fit in 64 bits"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, it must be more than 0"),
        ({"repetition_penalty": None}, "repetition_penalty is None, it must be 0 or more, and finite"),
        ({"temperature": None}, "temperature is None, it must be 0 or more, and finite"),
        ({"temperature": float("nan")}, "temperature is nan, it must be 0 or more, and finite"),
        ({"top_k": 2.5}, "top_k is 2.5, it must be a whole number"),
        ({"top_k": -1}, "top_k is -1, it must be 0 or more"),
        ({"top_p": 1.5}, "top_p is 1.5, it must be 0 to 1"),
        ({"min_p": -0.1}, "min_p is -0.1, it must be 0 to 1"),
        ({"cache": adze.Cache(lively("llama"), 9)}, "cache is for a llama of 2 layers, the model is a llama of 1"),
        ({"cache": transformers.DynamicCache()}, "cache is a DynamicCache, it must be an adze.Cache"),
    ):
        with pytest.raises(ValueError, match=sentence):
            adze.generate(model, [1, 2], 4, **options)
    with pytest.raises(ValueError, match=r"attention_mask has rows of \[2, 2\] tokens, ids has \[2, 1\]"):
        adze.generate(model, [[1, 2], [3]], 4, attention_mask=torch.ones(2, 2))
    for other in (None, torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=f"model is a {type(other).__name__}, it must be a language model"):
            adze.generate(other, [1, 2], 4)
    config = transformers.WhisperConfig(
        vocab_size=9, d_model=8, decoder_layers=1, decoder_attention_heads=1, decoder_ffn_dim=8, pad_token_id=0,
        encoder_layers=1, encoder_attention_heads=1, encoder_ffn_dim=8, is_encoder_decoder=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="a whisper takes no position_ids"):
        adze.generate(transformers.WhisperForCausalLM(config), [1], 4)
    with pytest.raises(ValueError, match="a prompt of 2 tokens and 9 new ones do not fit .* capacity is 9"):
        adze.generate(model, [1, 2], 9, cache=adze.Cache(model, 9))
    cache = adze.Cache(model, 9)
    list(adze.generate(model, [1, 2], 2, cache=cache))
    with pytest.raises(ValueError, match="ids has 2 sequences, the cache has 1"):
        adze.generate(model, [[1], [2]], 2, cache=cache)
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=1))
    with pytest.raises(ValueError, match="the attention of a bloom cannot be chosen"):
        adze.generate(bloom, [1], 4)
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=9, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1)
    )
    with pytest.raises(ValueError, match="a t5 has an encoder"):
        adze.generate(t5, [1], 4, cache=cache)


def test_offloaded_weights(on_the_cpu):
    """accelerate keeps them on the meta device between the calls of a layer; its hook knows where they go."""
    accelerate = pytest.importorskip("accelerate")
    model = lively("llama", layers=1)
    want = list(adze.generate(model, [5, 6, 7], 4, stop=()))
    accelerate.cpu_offload(model, execution_device=here())
    assert list(adze.generate(model, [5, 6, 7], 4, stop=())) == want
    with pytest.raises(ValueError, match="the model is on the meta device, it has no values"):
        adze.generate(models.build("llama").to("meta"), [5, 6, 7], 4)


# ---- A step as a graph captures it ----


def state_of(tokens, batch):
    """What a step takes."""
    state = decode._state(batch.lengths())
    decode._parts(state)[0].copy_(torch.tensor(tokens))
    return state


@pytest.mark.parametrize("batch", range(1, 8))
def test_the_state_of_a_step(batch):
    lengths = torch.arange(batch, dtype=torch.int32) + 2**31 - 8
    state = decode._state(lengths)
    tokens, found = decode._parts(state)
    assert torch.equal(found, lengths) and tokens.tolist() == [0] * batch
    tokens.fill_(-1)
    assert torch.equal(decode._parts(state)[1], lengths) and len(state) == batch + -(-batch // 2)


def test_a_step_can_be_repeated():
    """adze.graph runs a step several times before it captures one: they must leave behind what one run does."""
    model = lively("gpt_oss")
    cache, ids = adze.Cache(model, 30), prompt()["input_ids"]
    batch = decode._Batch(model, cache, ids.tolist(), ids.device)
    options = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.2}
    with torch.no_grad():
        _, made = batch.prompt(512)
        step = decode._Step(model, cache, decode._previous(batch, made), torch.tensor([0]))
        given = state_of([5, 6], batch)
        first, before = step(given, **options), given.clone()
        state = [x.clone() for layer in cache.layers for x in layer.tensors()] + [step.previous.clone()]
        assert all(torch.equal(step(given, **options), first) for _ in range(3)) and torch.equal(given, before)
        assert decode._parts(first)[1].tolist() == [25, 25]
    after = [x for layer in cache.layers for x in layer.tensors()] + [step.previous]
    assert all(map(torch.equal, state, after)) and cache.count == 0
    for model.kept in (None, cache, [cache]):  # a caller may keep the cache anywhere
        state = ModuleState(step)
        with torch.no_grad():
            step(given, **options)
        cache.set_lengths([3, 4])
        cache.set_lengths([0, 0])
        assert state.same()  # so that a graph is replayed
    model.kept = None
    assert not state.same()


@needs_kernels
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "falcon"])
def test_a_step_reads_nothing_on_the_host(name, kernel, monkeypatch):
    """A capture would fail; and the next step would have to wait."""
    monkeypatch.setattr(in_torch, "has_kernel", lambda op, device: kernel)
    model = lively(name)
    cache = adze.Cache(model, 40, page=8)
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "penalty": 1.2}
    batch = decode._Batch(model, cache, [[1, 2, 3], [4]], model.device)
    with torch.no_grad():
        _, made = batch.prompt(512)
        step = decode._Step(model, cache, decode._previous(batch, made), torch.tensor([3]))
        state = state_of([5, 6], batch)
        with Watch() as watch:
            step(state, **options)
    assert not {"aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.equal"} & set(watch.seen)
    assert bool(watch.seen["adze.sample"]) == kernel


@needs_kernels
def test_a_patched_step_has_few_small_kernels(monkeypatch):
    """Of the positions there is one sum, the lengths after the step, and one launch for the tables of the rope. The
    residuals are added by products, which a CPU with its own instructions for bf16 would leave to torch."""
    monkeypatch.setitem(products.FASTER, "cpu", {torch.bfloat16: 64})
    model = lively("llama").to(torch.bfloat16)
    adze.patch(model, numerics="fast")
    cache = adze.Cache(model, 40)
    batch = decode._Batch(model, cache, [[1, 2, 3], [4]], model.device)
    options = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0}
    with torch.no_grad():
        batch.prompt(512)
        state = state_of([5, 6], batch)
        with Watch() as watch:
            decode._Step(model, cache, None, torch.tensor([0]))(state, **options)
    assert watch.seen["aten.add"] == 1 and not watch.seen["aten.arange"]
    assert watch.seen["adze.rope_table"] == 1 and not watch.seen["aten.cos"] and not watch.seen["aten.cat"]


@needs_kernels
def test_a_step_is_captured_once():
    model, gpu, seed = lively("llama"), torch.device("cuda"), torch.tensor([0])
    cache = adze.Cache(model, 40)
    first = list(adze.generate(model, [5, 6], 5, stop=(), cache=cache))
    handle = decode._step(model, cache, None, seed, gpu)
    assert handle is decode._step(model, cache, None, seed, gpu)  # that of the call before
    cache.reset()
    with Watch() as watch:
        assert list(adze.generate(model, [5, 6], 5, stop=(), cache=cache)) == first
    assert watch.adze and decode._step(model, cache, None, seed, gpu) is handle
    other = adze.Cache(model, 40)
    list(adze.generate(model, [5, 6], 5, stop=(), cache=other))
    assert decode._step(model, other, None, seed, gpu) is not handle
    del decode._runners[other]
    made = decode._step(model, other, None, seed, gpu)
    assert isinstance(made, GraphHandle) and type(made.module) is decode._Step
    gc.collect()
    count = len(decode._runners)
    del other, made
    gc.collect()
    assert len(decode._runners) == count - 1


@needs_kernels
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_one_copy_between_two_replays(penalty, monkeypatch):
    """Of the state into the graph; the other one is that of the tokens to the host. What a graph launches is not
    counted, also where a tape stands for it."""
    captured, model, counts = tape.use(monkeypatch), lively("llama"), []
    cache, options = adze.Cache(model, 40), {"stop": (), "temperature": 0.8, "seed": 3, "repetition_penalty": penalty}
    rows, views = [[5, 9, 3, 77], [8], [4, 4]], ("slice", "view", "alias", "detach", "empty")
    want = list(adze.generate(model, rows, 30, cache=adze.Cache(model, 40), **options))
    for new in (6, 8, 10, 30):  # the second one captures a graph of the prompt
        cache.reset()
        with Watch() as watch:
            assert list(adze.generate(model, rows, new, cache=cache, **options)) == want[:new]
        counts.append({op: n for op, n in watch.seen.items() if not op.removeprefix("aten.").startswith(views)})
    more = {op: n - counts[2].get(op, 0) for op, n in counts[3].items() if n != counts[2].get(op, 0)}
    assert sum(more.values()) == 2 * 20 and more.keys() <= {"aten.copy_", "aten.clone"}
    steps = [graph for graph in captured if graph.replays > 10]
    assert [graph.replays for graph in steps] == [29, 5 + 7 + 9 + 29]


@needs_kernels
def test_a_seed_is_not_part_of_a_graph(monkeypatch):
    """Nor are the tokens of another call, which a graph has lent."""
    captured, model = tape.use(monkeypatch), lively("llama")
    cache, found = adze.Cache(model, 40), []
    for seed in (1, 2, 1):
        cache.reset()
        left = adze.generate(model, [[7], [9]], 20, stop=(), cache=cache, seed=5, temperature=1.0)
        assert len([next(left) for _ in range(3)]) == 3
        cache.reset()
        found.append(list(adze.generate(model, [[5], [6]], 12, stop=(), cache=cache, seed=seed, temperature=1.0)))
        with pytest.raises(RuntimeError, match="the cache has changed since the last token"):
            next(left)
    assert found[0] == found[2] != found[1] and len([graph for graph in captured if graph.replays > 20]) == 1


@pytest.mark.parametrize("count, chunk, room, want", [
    (512, 512, 512, [512]),
    (1100, 512, 4096, [512, 512, 128]),
    (1100, 512, 1151, [512, 512, 76]),  # 128 do not fit
    (3, 512, 4096, [16]),
    (3, 512, 15, [3]),
    (7, 5, 100, [5, 5]),
])  # fmt: skip
def test_parts_of_a_prompt(count, chunk, room, want):
    assert decode._sizes(count, chunk, room) == want


@needs_kernels
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_prompts_in_parts_of_few_sizes(name, monkeypatch):
    """As on a GPU: what is rounded up is not seen, and a second prompt runs by what a graph would be captured of."""
    model, rows = lively(name), [[7, 3, 9, 4, 8, 1, 5], [6, 2, 11]]
    want = list(adze.generate(model, rows, 12, stop=()))
    monkeypatch.setattr(decode, "_graphs", lambda device: True)
    monkeypatch.setattr(decode, "_LEAST", 4)
    cache, seen, forward = adze.Cache(model, 40), [], decode._Prompt.forward
    monkeypatch.setattr(
        decode._Prompt, "forward", lambda self, ids, *rest: seen.append(ids.shape[1]) or forward(self, ids, *rest)
    )
    for prompts in range(1, 4):
        assert list(adze.generate(model, rows, 12, stop=(), cache=cache, chunk=4)) == want
        assert set(seen) == {4} and len(seen) >= 2 * min(prompts, 2)  # a replay runs none
        handles = [run for run in decode._runners[cache].values() if type(run.module) is decode._Prompt]
        assert len(handles) == (prompts > 1) and all(isinstance(handle, GraphHandle) for handle in handles)
        cache.reset()


# ---- adze.patch ----


@needs_kernels
def test_patch_sets_the_attention(llama):
    def now():
        return llama.config._attn_implementation

    assert now() == "sdpa"
    assert adze.patch(llama).settings == [] and now() == "sdpa"
    handle = adze.patch(llama, numerics="fast")
    assert now() == "adze" and 'attention "adze" in place of "sdpa" (LlamaForCausalLM)' in handle.report()
    handle.disable()
    assert now() == "sdpa"
    handle.enable()
    with adze.patched(llama):
        assert now() == "sdpa"  # "match" is over "fast"
    with adze.patched(llama, numerics="fast"):
        assert now() == "adze"
    assert now() == "adze"
    second = adze.patch(llama, numerics="fast")
    handle.remove()  # replaced before: it changes nothing
    assert now() == "adze"
    llama.set_attn_implementation("eager")  # somebody's own choice stays
    second.remove()
    assert now() == "eager"
    only = adze.patch(llama, ops={"attention"}, numerics="fast")
    assert now() == "adze" and not only.patched and "not in use" not in only.report()
    only.remove()
    assert now() == "eager"
    adze.patch(llama, ops={"norm"}, numerics="fast")
    assert now() == "eager"


@needs_kernels
def test_patch_leaves_other_models(monkeypatch):
    falcon, clip = models.build("falcon"), models.build("clip")
    for model in (falcon, clip):
        assert adze.patch(model, numerics="fast").settings == []
    other = models.build("paligemma")
    adze.patch(other, numerics="fast")
    assert other.config.text_config._attn_implementation == "adze"
    assert other.config.vision_config._attn_implementation == "sdpa"
    monkeypatch.setattr(in_torch, "has_kernel", lambda op, device: False)
    assert adze.patch(models.build("llama"), numerics="fast").settings == []


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_patched_models_generate(name):
    model, arguments = lively(name, attention="eager"), prompt()
    want = greedy(model, arguments, 16)
    adze.patch(model)
    assert own(model, arguments, 16) == want == greedy(model, arguments, 16)


@needs_kernels
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_a_patched_step_rotates_where_it_appends(name):
    """kv_append rotates, and norms, what it writes, and queries with it: no other op does in the whole generation."""
    model, arguments = lively(name, attention="eager"), prompt()
    want = greedy(model, arguments, 16)
    adze.patch(model, numerics="fast")
    with Watch() as watch:
        assert own(model, arguments, 16) == want
    assert watch.seen["adze.kv_append"] == 2 * passes(16)
    assert not watch.seen["adze.rope"] and not watch.seen["adze.qk_norm_rope"] and not watch.seen["aten.neg"]
    with Watch() as watch:
        assert greedy(model, arguments, 16, disable_compile=True) == want  # a cache of transformers rotates nothing
    assert watch.seen["adze.rope"] + watch.seen["adze.qk_norm_rope"] == 2 * 16 and not watch.seen["adze.kv_append"]
