"""The changes that adze.graph must detect before a replay, without a GPU. Graphs are replaced by objects that return
what the module returned when they were made, so that a stale one is seen."""

import threading

import pytest

torch = pytest.importorskip("torch")
from torch.utils import _pytree as pytree  # noqa: E402

import adze  # noqa: E402
from adze.graphs import cuda_graph as graphs  # noqa: E402
from adze.graphs.module_state import ModuleState  # noqa: E402
from device import Watch, default_device  # noqa: E402


@pytest.fixture(autouse=True)
def _on_the_cpu():
    with default_device(None):
        yield


class Recorded:
    """Replaces a CUDA graph: returns what the module returned, and takes a given time."""

    pause = None

    def __init__(self, module, args, before):
        self.replays = 0
        args, kwargs = args
        for _ in range(graphs.WARMUP + 1):
            self.outputs = module(*args, **kwargs)
        graphs.refuse_objects(self.outputs)

    def replay(self, leaves):
        self.replays += 1
        if self.pause is not None:
            self.pause()
        return pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, self.outputs)


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(graphs, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(graphs, "_capture", Recorded)
    monkeypatch.setattr(graphs, "MOST_WASTED", 100)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(16)
        self.linear = torch.nn.Linear(16, 16)
        self.options = {"scales": [1.0, 2.0]}
        self.calls, self.tables = 0, {}

    def forward(self, x):
        self.calls += 1
        self.tables[x.shape] = self.calls
        self.last = x.shape
        return self.linear(self.norm(x)) * self.options["scales"][1]


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block().eval().requires_grad_(False)


X = torch.randn(2, 16, generator=torch.Generator().manual_seed(1), device="cpu")


def agrees(graph, module, x=X):
    return torch.equal(graph(x), module(x))


def test_the_record_is_replayed(recorded, block):
    graph = adze.graph(block)
    assert agrees(graph, block) and len(graph.captured) == 1
    calls = block.calls
    for _ in range(3):
        graph(X)
    assert block.calls == calls  # its own counters and tables are no reason to record again
    assert agrees(graph, block, X[:1]) and agrees(graph, block) and len(graph.captured) == 2
    (first, second) = graph.captured.values()
    graph(X), graph(X[:1])
    assert list(graph.captured.values()) == [first, second]


def test_a_patch_that_is_switched(recorded, block):
    graph = adze.graph(block)
    graph(X)
    handle = adze.patch(block)
    assert handle.patched
    for switch in (handle.disable, handle.enable, handle.remove):
        (before,) = graph.captured.values()
        graph(X)
        (now,) = graph.captured.values()
        assert now is not before, switch
        assert agrees(graph, block) and list(graph.captured.values()) == [now]
        switch()


def test_inputs_of_a_dtype_are_copied_in_one_launch():
    given = [torch.randn(3, 4), None, torch.arange(4), 7, torch.randn(2).expand(5, 2), torch.arange(6)[::2]]
    inputs, other = graphs.Inputs(given), [x + 1 if isinstance(x, torch.Tensor) else x for x in given]
    assert inputs.leaves[1] is None and inputs.leaves[3] == 7 and inputs.leaves[0] is not given[0]
    with Watch() as watch:
        inputs.take(other)
    assert all(torch.equal(inputs.leaves[i], other[i]) for i in (0, 2, 4, 5))
    assert watch.seen["aten._foreach_copy_"] == 2
    with Watch() as watch:
        graphs.Inputs(given[1:3]).take(other[1:3])
        graphs.Inputs([1]).take([2])
        graphs.Inputs([torch.ones(2).to(torch.float8_e4m3fn)] * 2).take([torch.zeros(2).to(torch.float8_e4m3fn)] * 2)
    assert watch.seen["aten.copy_"] == 1 + 2 and not watch.seen["aten._foreach_copy_"]


def test_outputs_are_copies_or_lent():
    module, outputs = torch.nn.Identity(), {"x": torch.ones(3), "n": 3}
    found = graphs.handed_out(module, outputs)
    assert found["x"] is not outputs["x"] and torch.equal(found["x"], outputs["x"]) and found["n"] == 3
    module.lends = True
    assert graphs.handed_out(module, outputs)["x"] is outputs["x"]


def test_a_replay_that_starts_ahead_is_dropped_after_a_change(recorded, block):
    """It runs while the module is compared, but for weights that have moved: their memory may be gone."""
    graph = graphs.GraphHandle(block, limit=4, ahead=True)
    assert agrees(graph, block) and agrees(graph, block)
    (before,) = graph.captured.values()
    assert before.replays == 2
    block.options["scales"][1] = 3.0
    assert agrees(graph, block) and before.replays == 3  # the last one was dropped
    (now,) = graph.captured.values()
    assert now is not before and now.replays == 1
    block.linear.weight = torch.nn.Parameter(block.linear.weight * 2, requires_grad=False)
    assert agrees(graph, block) and now.replays == 1
    with torch.enable_grad():
        block.requires_grad_(True)
        assert graph.replay(X) is None and graph(X).requires_grad


def test_hooks(recorded, block):
    graph = adze.graph(block)
    plain = graph(X)
    for register in (block.norm.register_forward_hook, block.register_forward_hook):
        hook = register(lambda module, args, out: out * 2)
        assert not torch.equal(graph(X), plain) and agrees(graph, block)
        hook.remove()
        assert torch.equal(graph(X), plain)
    hook = block.norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert not torch.equal(graph(X), plain) and agrees(graph, block)
    hook.remove()
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: out + 1)
    try:
        assert not torch.equal(graph(X), plain) and agrees(graph, block)
    finally:
        hook.remove()
    block.norm._forward_hooks = type(block.norm._forward_hooks)()  # another, as empty
    assert torch.equal(graph(X), plain)
    block.norm._forward_hooks[0] = lambda module, args, out: out * 3
    assert agrees(graph, block)


def test_attributes_submodules_and_modes(recorded, block):
    graph = adze.graph(block)
    graph(X)

    def change(*steps):
        before = graph(X)
        for step in steps:
            step()
        assert agrees(graph, block)
        return not torch.equal(before, graph(X))

    assert change(lambda: block.options["scales"].__setitem__(1, 3.0))
    assert change(lambda: block.options.update(scales=[0.0, 5.0]))
    assert change(lambda: setattr(block.norm, "eps", 0.5))
    assert change(lambda: setattr(block, "norm", torch.nn.Identity()))
    assert change(lambda: setattr(block, "linear", torch.nn.Sequential(block.linear, torch.nn.Tanh())))
    assert change(lambda: setattr(block.linear[1], "forward", lambda x: x * 7))
    block.linear[1].__dict__.pop("forward")
    block.linear.append(torch.nn.Dropout(0.5))
    graph(X)
    (before,) = graph.captured.values()
    block.linear[2].eval()  # a submodule alone
    graph(X)
    assert list(graph.captured.values()) != [before]


def test_a_number_that_is_set_again_is_no_change(recorded, block):
    graph = adze.graph(block)
    graph(X)
    (before,) = graph.captured.values()
    block.options["scales"][1] = float("2.0")
    block.norm.eps = None if block.norm.eps is None else float(block.norm.eps)
    graph(X)
    assert list(graph.captured.values()) == [before]


def test_adapters(recorded):
    peft = pytest.importorskip("peft")
    pytest.importorskip("transformers")
    import models

    model = models.build("llama", attention="eager").requires_grad_(False)
    ids = models.inputs("llama", seq=5)["input_ids"]
    adze.patch(model)
    graph = adze.graph(model)

    def logits(of):
        with torch.no_grad():
            return of(input_ids=ids, use_cache=False, return_dict=False)[0]

    results = [logits(graph)]

    def changed():
        found = logits(graph)
        assert torch.equal(found, logits(model))
        different = all(not torch.equal(found, other) for other in results)
        results.append(found)
        return different

    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2, lora_alpha=4, init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    assert changed()
    for layer in wrapped.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.set_scale("default", 3.0)
    assert changed()
    with wrapped.disable_adapter():
        assert torch.equal(logits(graph), results[0])
    assert torch.equal(logits(graph), results[2])
    wrapped.add_adapter("other", config)
    wrapped.set_adapter("other")
    assert changed()


class WithCache(torch.nn.Module):
    def forward(self, x, use_cache=True):
        return {"out": x * 2, "cache": DynamicCache() if use_cache else None}


class DynamicCache:
    pass


def test_a_cache_is_not_handed_out_twice(recorded):
    module = WithCache()
    graph = adze.graph(module)
    with pytest.warns(UserWarning, match="returns a DynamicCache.*use_cache=False"):
        first = graph(X)
    second = graph(X)
    assert first["cache"] is not second["cache"] and "DynamicCache" in graph.report()
    assert graph(X, use_cache=False)["cache"] is None and len(graph.captured) == 1


def test_a_module_that_always_changes_runs_as_it_is(recorded, block, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_WASTED", 8)
    graph = adze.graph(block)
    with pytest.warns(UserWarning, match="changed 8 times in a row"):
        for i in range(graphs.MOST_WASTED + 1):
            block.options["scales"][1] = float(i)
            assert agrees(graph, block)
    assert not graph.captured and "too often" in graph.report()
    assert agrees(graph, block)
    graph.reset()
    assert agrees(graph, block) and len(graph.captured) == 1


def test_a_module_that_changes_after_its_graphs_paid_is_recorded_again(recorded, block, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_WASTED", 2)
    graph = adze.graph(block)
    for i in range(graphs.MOST_WASTED + 2):
        block.options["scales"][1] = float(i)
        for _ in range(graphs.WARMUP + 2):
            graph(X)
        assert agrees(graph, block)
    assert len(graph.captured) == 1


def test_threads_take_turns(recorded, block, monkeypatch):
    inside, most = [0], [0]
    gate = threading.Event()

    def pause():
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        gate.wait(0.02)
        inside[0] -= 1

    graph = adze.graph(block)
    wanted = graph(X)
    monkeypatch.setattr(Recorded, "pause", staticmethod(pause))
    found = []
    threads = [threading.Thread(target=lambda: found.append(graph(X))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1 and len(found) == 4 and all(torch.equal(out, wanted) for out in found)


def test_autocast_has_graphs_of_its_own(recorded, block):
    graph = adze.graph(block)
    graph(X)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=True) if torch.cuda.is_available() else _autocast():
        graph(X)
    assert len(graph.captured) == 2


class _autocast:
    """torch.autocast("cuda") switches itself off where there is no GPU."""

    def __enter__(self):
        torch.set_autocast_enabled("cuda", True)

    def __exit__(self, *error):
        torch.set_autocast_enabled("cuda", False)


def test_a_look_has_a_bounded_size():
    """Containers that hold each other end, and deeply nested values are not compared."""
    block = Block()
    block.options["self"] = block.options
    block.other = [block]
    watch = ModuleState(block)
    assert watch.same() and len(watch.values) < 200
