"""Tests that need a GPU: the CPU's values, streams, threads, devices, graphs, weights that are offloaded.

The other tests run on a GPU too: ADZE_TEST_DEVICE=cuda, see conftest.py.
"""

import gc
import threading

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
import adze  # noqa: E402
from calls import CALLS, IDS, bits, torch_call  # noqa: E402
from device import default_device  # noqa: E402
from diffusers_seams import Tally  # noqa: E402
from test_ops import every_sample, overload, samples  # noqa: E402

BF16 = torch.bfloat16
SECOND = 2_000_000_000  # cycles of a GPU's clock, which is below 2 GHz
OUTS = ("out", "sum", "q_out", "k_out", "cos", "sin")


@pytest.fixture(autouse=True)
def _on_the_gpu():
    with default_device("cuda"):
        yield
    torch.cuda.synchronize()


def called(call, dtype, device="cuda"):
    with torch.device(device):
        function, args, kwargs = torch_call(call, dtype)
        result = function(*args, **kwargs)
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_the_numbers_of_the_cpu(dtype):
    """Both round the same formula; where a mode rounds in between, a value at a midpoint may go either way."""
    tally = Tally()
    for name, call in zip(IDS, CALLS, strict=True):
        for want, got in zip(called(call, dtype, "cpu"), called(call, dtype), strict=True):
            assert got.is_cuda
            if want.numel():
                kind = (
                    call[0] if call[0] == "group_norm" else "other ops"
                )  # one of its calls has most elements of all
                tally.compare(kind, name, want, got.cpu())
    if dtype != torch.float32:
        tally.judge()


# ---- Streams and threads ----


def while_the_default_stream_sleeps(run):
    """The result of run() on a stream of its own, which ends while the default stream sleeps."""
    side, slept = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        run()  # the allocator then has memory for this stream
    torch.cuda.synchronize()
    torch.cuda._sleep(SECOND)
    slept.record()
    with torch.cuda.stream(side):
        result = run()
    side.synchronize()
    assert not slept.query(), "the default stream was waited for"
    torch.cuda.synchronize()
    return result


def test_a_side_stream_does_not_wait():
    prepared = [torch_call(call, BF16) for call in CALLS]

    def run():
        return [function(*args, **kwargs) for function, args, kwargs in prepared]

    want = [bits(result) for result in run()]
    got = while_the_default_stream_sleeps(run)
    assert [bits(result) for result in got] == want


def test_tvm_ffi_runs_on_the_current_stream():
    pytest.importorskip("tvm_ffi")
    import adze.tvm_ffi

    x = torch.randn(64, 512)
    want = adze.softmax(x)
    assert torch.equal(while_the_default_stream_sleeps(lambda: adze.tvm_ffi.softmax(x)), want)


def test_threads_on_their_own_streams():
    prepared = [torch_call(call, BF16) for call in CALLS]
    want, wrong = [bits(function(*args, **kwargs)) for function, args, kwargs in prepared], []
    torch.cuda.synchronize()

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(10):
                    got = [function(*args, **kwargs) for function, args, kwargs in prepared]
                    wrong.extend(name for name, a, b in zip(IDS, map(bits, got), want, strict=True) if a != b)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- Devices ----


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_a_second_device(call):
    got = called(call, BF16, "cuda:1")
    assert torch.cuda.current_device() == 0 and all(t.device.index == 1 for t in got)
    assert bits(got) == bits(called(call, BF16, "cuda:0"))


def test_mixed_devices_are_refused():
    x, w = torch.randn(4, 64), torch.randn(64)
    gpu = f"CUDA device {x.device.index}"
    with pytest.raises(RuntimeError, match=f"rms_norm: weight is on the CPU, tensors before it are on {gpu}"):
        adze.rms_norm(x, w.cpu())
    with pytest.raises(RuntimeError, match=f"rms_norm: weight is on {gpu}, tensors before it are on the CPU"):
        adze.rms_norm(x.cpu(), w)
    with pytest.raises(RuntimeError, match=r"softmax: \w+ is on .*, tensors before it are on "):
        adze.softmax(x, out=torch.empty(4, 64, device="cpu"))


# ---- Graphs ----


def results(name, args, kwargs):
    """What the overload returns, or writes."""
    made = overload(name)(*args, **kwargs)
    made = [made] if isinstance(made, torch.Tensor) else list(made or ())
    return [t for t in made if t.numel()] or [kwargs[out] for out in OUTS if out in kwargs]  # sum may be absent


def change(args, kwargs, seed):
    torch.manual_seed(seed)
    for value in [*args, *(value for key, value in kwargs.items() if key not in OUTS)]:
        if isinstance(value, torch.Tensor):
            value.normal_() if value.is_floating_point() else value.add_(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_sample
def test_graphs_follow_their_inputs(at, dtype):
    name, args, kwargs = samples(dtype)[at]
    before = [t.clone() for t in results(name, args, kwargs)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(name, args, kwargs)
    for seed in (1, 2):
        change(args, kwargs, seed)
        graph.replay()
        got = [t.clone() for t in captured]
        assert all(map(torch.equal, got, results(name, args, kwargs)))
        assert not any(map(torch.equal, got, before))
        before = got


@torch.no_grad()
def test_a_graph_of_a_patched_model():
    pytest.importorskip("transformers")
    import models

    model, ids, side = models.build("qwen3"), torch.arange(3, 23).reshape(2, 10), torch.cuda.Stream()
    mask = torch.ones(2, 1, 10, 10, dtype=torch.bool).tril()  # whole, or the model makes one and looks at it

    def run(ids):
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    expected = [run(ids), run(ids + 7)]
    adze.patch(model)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(ids)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run(ids)
    for wanted in expected:
        graph.replay()
        torch.testing.assert_close(logits, wanted)
        ids += 7


def test_generate_replays_a_graph():
    """One graph for all steps of three calls, one for the prompts after the first. The tokens are those that the
    modules make without a graph."""
    pytest.importorskip("transformers")
    from adze.generation import decode
    from lively import lively

    model = lively("qwen3")
    cache, found = adze.Cache(model, 64, page=16), []
    for graphed in (True, True, True, False):
        if not graphed:
            decode._runners[cache] = {key: handle.module for key, handle in decode._runners[cache].items()}
        found.append(list(adze.generate(model, [[5, 6, 7], [9]], 20, stop=(), cache=cache)))
        cache.reset()
        if graphed:
            replays = {}
            for handle in decode._runners[cache].values():
                assert not handle.refused
                replays[type(handle.module)] = [graph.replays for graph in handle.captured.values()]
            prompts = {decode._Prompt: [len(found) - 1]} if len(found) > 1 else {}
            assert replays == {decode._Step: [19 * len(found)], **prompts}
    assert found[0] == found[1] == found[2] == found[3]


def test_transformers_generate_replays_a_graph(monkeypatch):
    """Greedily and with the same random numbers; on another stream, and after the weights were away. The tokens are
    those of a call without a graph. test_generate_replay.py has what does not need a GPU."""
    transformers = pytest.importorskip("transformers")
    import tape
    from lively import lively, prompt

    captured, model = tape.use(monkeypatch), lively("qwen3")
    handle = adze.patch(model, numerics="fast")
    assert "generate() replays a CUDA graph for each token (Qwen3ForCausalLM)" in handle.report()

    def tokens(**options):
        torch.manual_seed(3)
        options = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0, **options}
        return model.generate(**{name: x.to(model.device) for name, x in prompt().items()}, **options)

    def replays():
        return [graph.replays for graph in captured]

    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 1.5}):
        captured.clear()
        handle.disable()
        handle.enable()  # without memory and graphs
        want = tokens(disable_compile=True, **options)
        assert not captured
        assert torch.equal(tokens(**options), want) and torch.equal(tokens(**options), want)
        assert replays() == [38]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.equal(tokens(**options), want)
        torch.cuda.current_stream().wait_stream(side)
        assert replays() == [38, 19]  # memory of another stream is not taken
        model.to("cpu")
        torch.cuda.empty_cache()
        with default_device("cpu"):
            made = tokens(return_dict_in_generate=True, **options)
        assert type(made.past_key_values) is transformers.DynamicCache and "CUDA graph" not in handle.report()
        model.to("cuda")
        assert torch.equal(tokens(**options), want) and sum(replays()) == 38 + 19 + 19


def test_transformers_generate_leaves_random_numbers_to_others(monkeypatch):
    """A thread draws while a step is captured, which torch refuses where the capture has its generator. Captures draw
    nothing themselves."""
    pytest.importorskip("transformers")
    import tape
    from adze.generation import replay
    from lively import lively, prompt

    captured, model = tape.use(monkeypatch), lively("llama")
    handle = adze.patch(model, numerics="fast")
    torch.manual_seed(3)
    want, drawn, forward = torch.rand(8), [], replay._Step.forward

    def drawn_meanwhile(*args, **kwargs):
        if torch.cuda.is_current_stream_capturing():
            thread = threading.Thread(target=lambda: drawn.append(torch.rand(8, device="cuda")))
            thread.start()
            thread.join()
        return forward(*args, **kwargs)

    def tokens():
        handle.disable()
        handle.enable()  # the next call captures
        model.generate(**prompt(), max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)

    torch.manual_seed(3)
    tokens()
    assert len(captured) == 1 and torch.equal(torch.rand(8), want)
    monkeypatch.setattr(replay._Step, "forward", drawn_meanwhile)
    torch.manual_seed(3)
    tokens()
    assert len(captured) == 2 and len(drawn) == 1 and torch.equal(drawn[0], want)
    assert not torch.equal(torch.rand(8), want)  # the thread's numbers are not drawn again


def test_transformers_generate_frees_its_memory():
    """The graph and the cache that are kept for the next call go with the patch."""
    pytest.importorskip("transformers")
    from lively import lively, prompt

    model = lively("llama")
    handle = adze.patch(model, numerics="fast")
    options = {"max_new_tokens": 400, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.generate(**prompt(64, 100), **options)
    first, cache = torch.cuda.memory_allocated(), 2 * 2 * 64 * 499 * 64 * 4
    model.generate(**prompt(64, 100), **options)
    second = torch.cuda.memory_allocated()
    assert second < first + cache / 2
    handle.disable()
    gc.collect()
    assert torch.cuda.memory_allocated() <= second - cache


def test_reduce_overhead_decodes_in_graphs():
    """transformers compiles the steps with a static cache; none of their graphs may be left out."""
    pytest.importorskip("transformers")
    from torch._dynamo.utils import counters
    from torch._inductor import cudagraph_trees
    from transformers.generation.configuration_utils import CompileConfig

    import models

    model, arguments = models.build("llama"), models.inputs("llama", seq=12)
    expected = models.generate(model, arguments, 16, "static")
    assert adze.patch(model).patched
    torch._dynamo.reset()
    cudagraph_trees.reset_cudagraph_trees()
    counters.clear()
    with torch.no_grad(), default_device(None):
        found = model.generate(
            **arguments, max_new_tokens=16, min_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0,
            cache_implementation="static", compile_config=CompileConfig(mode="reduce-overhead", fullgraph=True),
        )  # fmt: skip
    assert torch.equal(found, expected)
    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert manager is not None and manager.roots
    torch._dynamo.reset()


# ---- Weights that come and go ----


@pytest.mark.parametrize("when", ["before", "after"])
def test_device_map(when):
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    import models

    def spread(model):
        places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": "cpu", "lm_head": 0}
        return accelerate.dispatch_model(model.cpu(), places | {"model.layers.0": 0, "model.layers.1": "cpu"})

    arguments = models.inputs("llama")
    expected = models.output(spread(models.build("llama")), arguments)
    model = models.build("llama")
    model = spread(model) if when == "before" else model
    handle = adze.patch(model)
    assert handle.patched
    model = spread(model) if when == "after" else model
    assert model.model.norm.weight.device.type == "meta"
    torch.testing.assert_close(models.output(model, arguments), expected)
    handle.remove()
    assert torch.equal(models.output(model, arguments), expected)


def tiny_pipeline():
    diffusers = pytest.importorskip("diffusers")
    import diffusers_models

    transformer, _ = diffusers_models.make("dit", False)
    vae = diffusers.AutoencoderKL(block_out_channels=(32,), latent_channels=4, norm_num_groups=8).eval()
    pipe = diffusers.DiTPipeline(transformer, vae, diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def images(pipe):
    generator = torch.Generator("cpu").manual_seed(0)
    made = pipe([1, 2], guidance_scale=1.0, num_inference_steps=3, generator=generator, output_type="np")
    return torch.from_numpy(made.images)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offloaded_pipelines(offload, when):
    pytest.importorskip("accelerate")
    with default_device(None):  # where a user makes a pipeline that is then offloaded
        pipe = tiny_pipeline()
        getattr(pipe, offload)()
        expected = images(pipe)
        pipe = tiny_pipeline()
        if when == "before":
            getattr(pipe, offload)()
        handle = adze.patch(pipe)
        assert any(path.startswith("vae.") for path in handle.patched)
        if when == "after":
            getattr(pipe, offload)()
        torch.testing.assert_close(images(pipe), expected)
        handle.remove()
        assert torch.equal(images(pipe), expected)


# ---- GEMMs ----


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_a_gemm_and_its_gelu(dtype):
    """As an epilogue the gelu is nearer to the exact values than after a GEMM whose output was rounded."""
    from adze.patching.norm_act import linear_gelu

    proj = torch.nn.Linear(256, 512, dtype=dtype).requires_grad_(False)
    x = torch.randn(2, 96, 256, dtype=dtype) * 4
    exact = torch.nn.functional.gelu(
        torch.nn.functional.linear(*(t.double() for t in (x, proj.weight, proj.bias))), approximate="tanh"
    )
    rounded = torch.nn.functional.gelu(proj(x), approximate="tanh")
    assert (linear_gelu(proj, x) - exact).square().mean() < (rounded - exact).square().mean()
    assert linear_gelu(torch.nn.Linear(256, 512, bias=False, dtype=dtype), x) is None
    assert linear_gelu(proj.float(), x.float()) is None


# ---- Compilers ----


def test_one_token_is_left_to_the_compiler():
    """Nothing of adze is in the graph of a patched norm of one token, and the norm of several is."""
    norm = torch.nn.Sequential(torch.nn.RMSNorm(64, dtype=BF16)).requires_grad_(False)
    seen = []

    def backend(module, inputs):
        seen.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module

    with adze.patched(norm), torch.no_grad():
        compiled = torch.compile(norm, backend=backend, dynamic=False)
        for tokens in (1, 5):
            compiled(torch.randn(1, tokens, 64, dtype=BF16))
    one, several = seen
    assert not any("adze" in target for target in one)
    assert any("adze" in target for target in several)
