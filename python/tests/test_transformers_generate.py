"""generate() with a static cache, which transformers compiles itself. The graph of one token is that of the unpatched
model, with no additional guards in Python; the prefill still has adze's ops."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers.generation.configuration_utils import CompileConfig  # noqa: E402

import adze  # noqa: E402
import models  # noqa: E402
from adze.patching.transformers.generate import keep_guards  # noqa: E402
from device import default_device  # noqa: E402

NAMES = ["llama", "qwen3"]
PROMPT, TOKENS = 7, 6


class Graphs:
    """A backend, and what is in each graph that it was given."""

    def __init__(self):
        self.targets = targets = []

        def backend(module, inputs):  # a function, of which transformers makes no copy
            nodes = [node for node in module.graph.nodes if node.op.startswith("call_")]
            targets.append([str(node.target) for node in nodes])
            return module

        self.backend = backend

    def ours(self):
        return [{target.split(".")[1] for target in graph if target.startswith("adze")} for graph in self.targets]


def compiled_generate(model, name, graphs):
    torch._dynamo.reset()
    config = CompileConfig(backend=graphs.backend, mode=None, fullgraph=True)
    config._compile_all_devices = True
    with torch.no_grad(), default_device(None):
        return model.generate(
            **models.inputs(name, seq=PROMPT), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
            eos_token_id=None, pad_token_id=0, cache_implementation="static", compile_config=config,
        )  # fmt: skip


class Ours(TorchDispatchMode):
    """Counts adze's ops outside of graphs."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "adze"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_one_token_has_the_graph_of_the_model_itself(name):
    model = models.build(name, layers=1)
    eager = models.generate(model, models.inputs(name, seq=PROMPT), TOKENS)
    plain, patched = Graphs(), Graphs()
    assert torch.equal(compiled_generate(model, name, plain), eager)
    handle = adze.patch(model)
    assert handle.patched
    assert torch.equal(compiled_generate(model, name, patched), eager)
    assert patched.targets == plain.targets and len(plain.targets) == 1  # also: each compiled once
    with Ours() as ours, torch.no_grad():
        model(**models.inputs(name, seq=PROMPT))
    assert ours.count >= 5  # the prompt, which transformers does not compile


def test_several_tokens_are_compiled_with_ops():
    model = models.build("qwen3", layers=1)
    adze.patch(model)
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True)
    with torch.no_grad(), default_device(None):
        for length in (5, 1, 9, 11, 1, 13):
            compiled(input_ids=models.inputs("qwen3", seq=length)["input_ids"], use_cache=False)
    several, one, any_length = graphs.ours()  # and nothing was compiled again
    assert one == set() and several == any_length == {"rms_norm", "qk_norm_rope", "glu"}


@pytest.mark.parametrize("name", NAMES)
def test_fused_linears_stay_fused(name):
    """In the graph of one token too: a compiler would run each GEMM by itself."""
    model = models.build(name, layers=1)
    handle = adze.patch(model, numerics="fast")
    graphs = Graphs()
    compiled_generate(model, name, graphs)
    handle.remove()
    assert graphs.ours() == [{"fused_linear"}]
    assert sum(target.startswith("adze") for target in graphs.targets[0]) == 2


def guards_of_a_token(model, name, patched):
    """(all, kept) guards as (type, name) of a compiled step."""
    torch._dynamo.reset()
    seen = []

    def spy(entries):
        kept = keep_guards(entries)
        seen.extend((entry.guard_type, entry.name, keep) for entry, keep in zip(entries, kept, strict=True))
        return kept

    ids = models.inputs(name, seq=PROMPT)["input_ids"]
    with adze.patched(model) if patched else contextlib.nullcontext(), torch.no_grad(), default_device(None):
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        model(input_ids=ids, past_key_values=cache)
        step = torch.compile(model.__call__, backend="eager", options={"guard_filter_fn": spy})
        for _ in range(2):
            step(input_ids=ids[:, :1], past_key_values=cache)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_no_guard_in_python_is_left_on_a_patched_module(name):
    model = models.build(name, layers=1)
    plain, patched = (guards_of_a_token(model, name, state) for state in (False, True))
    assert all(kept for *_, kept in plain)
    left_out = [(kind, source) for kind, source, kept in patched if not kept]
    assert left_out and all(kind == "DUPLICATE_INPUT" for kind, _ in left_out)
    assert all(source.endswith(".forward.__self__") for _, source in left_out)
    in_python = [
        {source for kind, source, kept in found if kind == "DUPLICATE_INPUT" and "_modules" in source and kept}
        for found in (plain, patched)
    ]
    assert in_python[0] == in_python[1]  # a config that modules share
    assert any(source.endswith(".forward.__func__") for _, source, kept in patched if kept)


def test_the_compiled_call_of_transformers_has_the_filter(llama, monkeypatch):
    given = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: given.append(options) or call)
    own = type(llama).get_compiled_call
    handle = adze.patch(llama)
    llama.get_compiled_call(None)
    llama.get_compiled_call(None)
    assert len(given) == 1 and given[0]["mode"] is None
    assert given[0]["options"] == {
        **torch._inductor.list_mode_options("reduce-overhead"),
        "guard_filter_fn": keep_guards,
    }
    llama.get_compiled_call(CompileConfig(mode="default", fullgraph=True))
    assert given[1]["fullgraph"] and given[1]["options"] == {"guard_filter_fn": keep_guards}
    llama.get_compiled_call(CompileConfig(mode=None, options={"max_autotune": True}))
    assert given[2]["options"] == {"max_autotune": True, "guard_filter_fn": keep_guards}
    theirs = CompileConfig(backend="eager", mode=None)
    llama.get_compiled_call(theirs)
    assert given[3] == theirs.to_dict()
    handle.disable()
    assert llama.get_compiled_call.__func__ is own
    handle.enable()
    with adze.patched(llama):
        assert llama.get_compiled_call.__func__ is not own
    assert llama.get_compiled_call.__func__ is not own
    handle.remove()
    assert "get_compiled_call" not in llama.__dict__


def test_signatures_stay(llama):
    import inspect

    before = [inspect.signature(module.forward) for module in llama.modules()]
    with adze.patched(llama):
        after = [inspect.signature(module.forward) for module in llama.modules()]
    names = [[list(signature.parameters) for signature in found] for found in (before, after)]
    assert names[0] == names[1]
