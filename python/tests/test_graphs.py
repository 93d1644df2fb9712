"""adze.graph: without a GPU it must run the module itself; with one, its graphs must follow inputs and weights."""

import threading

import pytest

torch = pytest.importorskip("torch")
import adze  # noqa: E402
from diffusers_seams import FloatMatmuls  # noqa: E402

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def double_matmuls():
    """cuBLAS may choose another kernel during a capture, which adds in another order. Summed in double, GEMMs have
    the same bits, and so must all other results."""
    return FloatMatmuls(torch.float32, torch.float64, "cuda")


class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.calls = 0

    def forward(self, x, *, scale=1.0, residual=None):
        self.calls += 1
        h = self.linear(x) * scale
        out = adze.rms_norm(h, eps=1e-6) if not torch.is_grad_enabled() else h
        return {"out": out if residual is None else out + residual}


@pytest.mark.parametrize("module, limit", [(3, 16), (torch.nn.Identity(), 0), (torch.nn.Identity(), 2.5)])
def test_what_is_no_module_or_no_limit_is_refused(module, limit):
    with pytest.raises(ValueError, match="adze.graph: (module|limit) is "):
        adze.graph(module, limit)


def test_on_the_cpu_the_module_runs():
    step = Step().cpu()
    graph = adze.graph(step)
    x = torch.randn(4, 64, device="cpu")
    with torch.no_grad():
        assert torch.equal(graph(x)["out"], step(x)["out"])
        assert torch.equal(graph(x, residual=x)["out"], step(x, residual=x)["out"])
    assert step.calls == 4 and not graph.captured and graph.linear is step.linear
    graph(x.requires_grad_())["out"].sum().backward()
    assert x.grad is not None
    graph.disable()
    assert not graph.enabled and graph.report().startswith("0 graphs")
    graph.enable()
    assert graph.enabled


@gpu
def test_graphs_follow_inputs_shapes_and_weights():
    step = Step().cuda()
    graph = adze.graph(step, limit=3)

    def agree(*shape, **more):
        """Compares a call with the module's own; says how often the graph's call ran the module."""
        x, before = torch.randn(shape, device="cuda"), step.calls
        got, ran = graph(x, **more)["out"], step.calls - before
        assert torch.equal(got, step(x, **more)["out"])
        return ran

    with torch.no_grad(), double_matmuls():
        assert agree(4, 64) > 1 and agree(8, 64) > 1
        assert agree(4, 64) == agree(8, 64) == agree(4, 64) == 0
        assert len(graph.captured) == 2
        ones = torch.ones(4, 64, device="cuda")
        first = graph(ones)["out"]
        graph(torch.zeros(4, 64, device="cuda"))
        assert torch.equal(first, step(ones)["out"])
        step.linear.weight.mul_(2)
        assert agree(4, 64) == 0
        step.linear.weight = torch.nn.Parameter(step.linear.weight * 3)
        assert agree(4, 64) > 1 and agree(4, 64) == 0
        assert len(graph.captured) == 3
        assert agree(16, 64) == agree(4, 64, scale=1.0) == agree(8, 64) == 1  # beyond the limit the module runs
        assert agree(4, 64) == 0 and len(graph.captured) == 3 and not graph.refused
    assert graph(ones)["out"].requires_grad  # the weights need a gradient, which a graph would not have
    graph.disable()
    with double_matmuls():
        assert agree(4, 64) == 1
    graph.reset()
    assert not graph.captured


@gpu
def test_what_cannot_be_captured_runs():
    class Host(torch.nn.Module):
        def forward(self, x):
            return x * x.sum().item()

    graph = adze.graph(Host())
    x = torch.ones(3, device="cuda")
    stream = torch.cuda.current_stream()
    with torch.no_grad():
        assert graph(x).tolist() == [3, 3, 3] and graph(x).tolist() == [3, 3, 3]
    assert len(graph.refused) == 1
    assert torch.cuda.current_stream() == stream
    torch.rand(3, device="cuda")  # an error if the generator were still in the capture


@gpu
def test_a_graph_holds_tables_that_a_model_keeps():
    """Another shape takes their place in the model; the first graph must not read what has their memory then."""
    diffusers_models = pytest.importorskip("diffusers_models")
    model, inputs = diffusers_models.make("ltx", True, torch.bfloat16)
    model, inputs = model.cuda(), {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    other = {**inputs, "height": 2, "width": 8}
    with adze.patched(model), torch.no_grad():
        graph = adze.graph(model)
        wanted = [model(**given, return_dict=False)[0] for given in (inputs, other)]
        for _ in range(2):
            for given, want in zip((inputs, other), wanted, strict=True):
                assert torch.equal(graph(**given, return_dict=False)[0], want)
                noise = [torch.full((n,), 3.0, device="cuda") for n in (1 << 10, 1 << 12, 1 << 14, 1 << 16)]
        assert len(graph.captured) == 2 and not graph.refused and len(noise) == 4


@gpu
@pytest.mark.parametrize("name", ["wan", "ltx"])
def test_graphs_of_attention_follow_their_tables_and_masks(name):
    """What layers make once of a table or a mask is made again in each replay."""
    models = pytest.importorskip("diffusers_models", reason="no diffusers")
    torch.manual_seed(0)
    model, _ = models.make(name, dtype=torch.bfloat16)
    model = model.cuda().requires_grad_(False)
    block = (model.blocks if name == "wan" else model.transformer_blocks)[0]
    attention = block.attn1 if name == "wan" else block.attn2
    x = torch.randn(2, 16, attention.to_q.in_features, device="cuda", dtype=torch.bfloat16)
    text = torch.randn(2, 12, attention.to_k.in_features, device="cuda", dtype=torch.bfloat16)

    def inputs():
        if name == "wan":
            angles = torch.randn(1, 16, 1, 64, device="cuda").repeat_interleave(2, -1)
            return {"hidden_states": x, "rotary_emb": (angles.cos(), angles.sin())}
        mask = torch.where(torch.rand(2, 1, 12, device="cuda") < 0.5, -10000.0, 0.0).bfloat16()
        return {"hidden_states": x, "encoder_hidden_states": text, "attention_mask": mask}

    with adze.patched(model), torch.no_grad():
        graph = adze.graph(attention)
        calls = [inputs() for _ in range(3)]
        wanted = [attention(**call) for call in calls]
        got = [graph(**call) for call in calls]
    assert len(graph.captured) == 1, graph.report()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert not torch.equal(wanted[0], wanted[1])


@gpu
def test_graphs_follow_patches_hooks_and_caches():
    """With real graphs; test_graphs_guards.py has the rest of what must be seen."""
    models = pytest.importorskip("models", reason="no transformers")
    model = models.build("llama").cuda().requires_grad_(False)
    ids = models.inputs("llama", seq=5)["input_ids"].cuda()
    graph = adze.graph(model)

    def agree():
        got, want = (of(input_ids=ids, use_cache=False).logits for of in (graph, model))
        assert len(graph.captured) == 1, graph.report()
        return torch.equal(got, want)

    with torch.no_grad(), double_matmuls():
        assert agree()
        handle = adze.patch(model)
        assert agree()
        handle.disable()
        assert agree()
        hook = model.model.norm.register_forward_hook(lambda module, args, out: out * 2)
        assert agree()
        hook.remove()
        assert agree()
        with pytest.warns(UserWarning, match="use_cache=False"):
            first = graph(input_ids=ids, use_cache=True)
        assert first.past_key_values is not graph(input_ids=ids, use_cache=True).past_key_values


@gpu
def test_threads_and_streams_share_a_graph():
    torch.manual_seed(0)
    step = Step().cuda().requires_grad_(False)
    graph = adze.graph(step)
    inputs = [torch.randn(256, 64, device="cuda") for _ in range(4)]
    with torch.no_grad():
        wanted = [step(x)["out"] for x in inputs]
        graph(inputs[0])
    torch.cuda.synchronize()
    wrong = []

    def work(i):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                if not torch.equal(graph(inputs[i])["out"], wanted[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(graph.captured) == 1
