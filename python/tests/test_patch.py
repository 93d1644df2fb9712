"""The patch itself: only instances change, everything comes back, and what others do to a model still works."""

import copy
import functools
import gc
import inspect
import pickle
import subprocess
import sys
import types
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from torch import nn  # noqa: E402

import adze  # noqa: E402
import models  # noqa: E402
from adze.patching import frame as patching  # noqa: E402
from adze.patching.fingerprint import fingerprint  # noqa: E402
from adze.patching.frame import Rule, _mismatch, is_adze, own_forward  # noqa: E402
from adze.patching.verify import ulps  # noqa: E402
from device import here  # noqa: E402

INPUTS = models.inputs("llama")


def snapshot(model):
    """Every object that a patch could touch, by identity: dicts of modules and of their classes, and globals."""
    seen, homes = [], set()
    for path, module in model.named_modules():
        seen.append((path, type(module), [(key, id(value)) for key, value in module.__dict__.items()]))
        for key in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
            seen.append((path, key, [(name, id(value)) for name, value in module.__dict__[key].items()]))
        for cls in type(module).__mro__[:-1]:
            seen.append((cls, [(key, id(value)) for key, value in vars(cls).items()]))
            homes.add(cls.__module__)
    for home in sorted(homes):
        seen.append((home, [(key, id(value)) for key, value in vars(sys.modules[home]).items()]))
    seen.append([(key, value.data_ptr(), value._version) for key, value in model.state_dict().items()])
    return seen


def patched_paths(model):
    return [path for path, module in model.named_modules() if is_adze(own_forward(module))]


def logits(model):
    return models.output(model, INPUTS)


# ---- In and out ----


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "falcon", "clip"])
def test_remove_leaves_everything_as_it_was(name):
    model = models.build(name)
    models.output(model, models.inputs(name))
    before = snapshot(model)
    handle = adze.patch(model)
    assert patched_paths(model) == handle.patched != []
    models.output(model, models.inputs(name))
    handle.remove()
    assert snapshot(model) == before


def test_a_second_model_is_untouched(llama):
    other = models.build("llama")
    before, expected = snapshot(other), logits(other)
    adze.patch(llama)
    logits(llama)
    assert snapshot(other) == before
    assert torch.equal(logits(other), expected)


def test_disable_and_enable(llama):
    before, expected = snapshot(llama), logits(llama)
    handle = adze.patch(llama)
    found = logits(llama)
    handle.disable()
    assert snapshot(llama) == before
    assert torch.equal(logits(llama), expected)
    handle.enable()
    assert patched_paths(llama) == handle.patched
    assert torch.equal(logits(llama), found)
    handle.enable()
    handle.remove()
    handle.enable()
    handle.remove()
    assert snapshot(llama) == before


def test_a_second_patch_replaces_the_first(llama):
    before = snapshot(llama)
    first = adze.patch(llama)
    second = adze.patch(llama, ops={"norm"})
    assert patched_paths(llama) == second.patched == [path for path in first.patched if path.endswith("norm")]
    assert first.report().endswith("not in use now")
    first.disable()
    first.enable()
    first.remove()
    assert patched_paths(llama) == second.patched
    second.remove()
    assert snapshot(llama) == before


def test_a_patch_over_a_disabled_one(llama):
    before = snapshot(llama)
    first = adze.patch(llama)
    first.disable()
    second = adze.patch(llama)
    first.enable()
    second.remove()
    assert snapshot(llama) == before


def test_nested_contexts(llama):
    before = snapshot(llama)
    with adze.patched(llama) as outer:
        with adze.patched(llama, ops={"act"}) as inner:
            assert patched_paths(llama) == inner.patched
        assert patched_paths(llama) == outer.patched
        with pytest.raises(ZeroDivisionError), adze.patched(llama):
            raise ZeroDivisionError
        assert patched_paths(llama) == outer.patched
    assert snapshot(llama) == before


def test_the_outer_patch_may_go_first(llama):
    before = snapshot(llama)
    outer = adze.patch(llama)
    with adze.patched(llama, ops={"norm"}):
        outer.remove()
    assert snapshot(llama) == before


def test_a_dropped_handle_keeps_its_patch_and_leaks_nothing():
    model = models.build("llama")
    paths = adze.patch(model).patched
    gc.collect()
    assert patched_paths(model) == paths
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


# ---- What is asked for ----


def test_ops(llama):
    by_op = {op: set(adze.patch(llama, ops=[op]).patched) for op in ("norm", "rope", "act", "fuse")}
    assert by_op["rope"] == {f"model.layers.{i}.self_attn" for i in range(2)}
    assert by_op["fuse"] == {f"model.layers.{i}" for i in range(2)}
    assert by_op["act"] == {f"model.layers.{i}.mlp{part}" for i in range(2) for part in ("", ".act_fn")}
    assert set(adze.patch(llama).patched) == set().union(*by_op.values())
    with pytest.raises(ValueError, match="norms"):
        adze.patch(llama, ops={"norms"})
    with pytest.raises(ValueError, match="exact"):
        adze.patch(llama, numerics="exact")
    with pytest.raises(TypeError, match="model is a str"):
        adze.patch("llama")


def test_exclude(llama):
    handle = adze.patch(llama, exclude=["model.layers.0", "*.mlp.act_fn", "model.layers.1.post_attention_layernorm"])
    assert set(handle.patched) == {"model.layers.1.self_attn", "model.layers.1.input_layernorm", "model.norm"}
    assert "excluded" in handle.report()


def test_report(llama):
    lines = [line.split() for line in adze.patch(llama).report().splitlines()]
    assert ["model.norm", "LlamaRMSNorm", "rms_norm"] in lines
    assert ["model.layers.*.self_attn", "x2", "LlamaAttention", "rope"] in lines
    assert not any("Linear" in word for line in lines for word in line)


def test_fast_rounds_once():
    model = models.build("llama", torch.bfloat16)
    norm = model.model.norm
    x = torch.randn(64, 128).bfloat16()
    with torch.no_grad():
        exact = (nn.functional.rms_norm(x.double(), (128,), norm.weight.double(), norm.variance_epsilon)).bfloat16()
        with adze.patched(model, numerics="fast"):
            fast = norm(x)
        with adze.patched(model):
            match = norm(x)
        original = norm(x)
    assert (ulps(fast, exact) == 0).float().mean() > (ulps(original, exact) == 0).float().mean()
    apart = ulps(match, original)  # on a GPU both add in their own order, which turns few roundings, and by one step
    assert apart.max() <= 1 and (apart == 0).float().mean() >= (1 if here().type == "cpu" else 0.999)


class StrangeNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True) * self.weight


def test_unknown_source_is_left_alone_and_reported():
    model = nn.Sequential(nn.Linear(8, 8), StrangeNorm(), nn.LayerNorm(8))
    handle = adze.patch(model)
    assert handle.patched == ["2"]
    assert f"forward is {fingerprint(StrangeNorm.forward)}, which no rule knows" in handle.report()
    handle.remove()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=r"1 modules look like[^$]*1 \(StrangeNorm\): forward is [0-9a-f]{12}"):
        adze.patch(model, strict=True)
    assert snapshot(model) == before
    assert adze.patch(model, strict=True, exclude=["1"]).patched == ["2"]


def test_every_part_of_a_fingerprint_must_be_known():
    class Norm(nn.Module):
        def _norm(self, x):
            return x

        def forward(self, x):
            return self._norm(x)

    forward, part = (fingerprint(f) for f in (Norm.forward, Norm._norm))
    known = Rule("r", "norm", {"forward": frozenset([forward]), "self._norm": frozenset([part])}, lambda m, c: "no")
    other = Rule("r", "norm", {"forward": frozenset([forward]), "self._norm": frozenset(["0"])}, lambda m, c: "no")
    other_rule = Rule("r", "norm", {"forward": frozenset(["0"])}, lambda m, c: "no")
    assert _mismatch(known, Norm, Norm.forward) is None
    assert part in _mismatch(other, Norm, Norm.forward)
    assert _mismatch(other_rule, Norm, Norm.forward) == ""


def test_parameters_are_the_originals():
    for name in (*models.LANGUAGE, *models.OTHER):
        model = models.build(name)
        adze.patch(model)
        for path, module in model.named_modules():
            forward = own_forward(module)
            if is_adze(forward):
                ours = inspect.signature(forward.__func__).parameters.values()
                theirs = inspect.signature(type(module).forward).parameters.values()
                facts = [[(p.name, p.kind, p.default) for p in side] for side in (ours, theirs)]
                assert facts[0] == facts[1], f"{name} {path}"
                assert forward.__name__ == "forward"


def test_gradients_are_warned_of_once(llama, monkeypatch):
    monkeypatch.setattr(patching, "_warned", set())
    handle = adze.patch(llama)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        logits(llama)
        with torch.inference_mode():
            llama(**INPUTS)
    assert not [w for w in said if "adze" in str(w.message)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            assert llama(**INPUTS).logits.requires_grad
    (said,) = [str(w.message) for w in said if "adze" in str(w.message)]
    assert "torch.inference_mode() or torch.no_grad()" in said
    handle.remove()


# ---- Copies ----


def test_deepcopy(llama):
    handle = adze.patch(llama)
    expected = logits(llama)
    twin = copy.deepcopy(llama)
    assert patched_paths(twin) == handle.patched
    assert all(own_forward(m).__self__ is m for m in twin.modules() if is_adze(own_forward(m)))
    handle.remove()
    assert patched_paths(twin) == handle.patched
    assert torch.equal(logits(twin), expected)
    adze.patch(twin).remove()
    assert patched_paths(twin) == []
    ours = ("forward", "__getstate__", "_replicate_for_data_parallel")
    assert not any(name in module.__dict__ for module in twin.modules() for name in ours)


def moved(model):
    """The same model with other weights, in attributes that the modules do not share."""
    for module in model.modules():
        own = module._parameters.items()
        module._parameters = {name: p if p is None else nn.Parameter(p * 1.1) for name, p in own}
        if "variance_epsilon" in module.__dict__:
            module.variance_epsilon = 0.1
    return model


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_a_shallow_copy_runs_as_itself(name):
    plain, patched = models.build(name), models.build(name)
    handle = adze.patch(patched)
    copies = []
    for model in (plain, patched):
        twin = shallow(model)
        copies.append(models.output(moved(twin), INPUTS))
    assert not torch.allclose(copies[0], models.output(plain, INPUTS))
    torch.testing.assert_close(copies[1], copies[0])
    torch.testing.assert_close(models.output(patched, INPUTS), models.output(plain, INPUTS))
    assert patched_paths(shallow(patched)) == [] and patched_paths(patched) == handle.patched


def shallow(module):
    twin = copy.copy(module)
    twin._modules = {name: child if child is None else shallow(child) for name, child in module._modules.items()}
    return twin


def replicate(module):
    """As torch.nn.parallel.replicate: replicas of all modules, whose parameters are tensors."""
    replica = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        setattr(replica, name, child if child is None else replicate(child))
    for name, parameter in module._parameters.items():
        setattr(replica, name, parameter if parameter is None else parameter.detach() * 1.1)
    return replica


@pytest.mark.parametrize("numerics", ["match", "fast"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_replicas_run_as_themselves(name, numerics):
    plain, patched = models.build(name), models.build(name)
    handle = adze.patch(patched, numerics=numerics)
    mine, theirs = replicate(patched), replicate(plain)
    assert patched_paths(mine) == handle.patched
    assert all(own_forward(m).__self__ is m for m in mine.modules() if is_adze(own_forward(m)))
    expected = models.output(theirs, INPUTS)
    torch.testing.assert_close(models.output(mine, INPUTS), expected)
    assert not torch.allclose(expected, models.output(plain, INPUTS))
    before = models.output(patched, INPUTS)
    handle.remove()
    torch.testing.assert_close(models.output(patched, INPUTS), before)


def test_copies_of_copies(llama):
    handle = adze.patch(llama)
    expected = logits(llama)
    for made in (copy.copy(copy.copy(llama)), copy.deepcopy(copy.deepcopy(llama)), copy.copy(copy.deepcopy(llama))):
        torch.testing.assert_close(logits(made), expected)
    assert patched_paths(copy.deepcopy(copy.deepcopy(llama))) == handle.patched


def test_a_forward_of_somebody_else_is_copied(llama):
    adze.patch(llama)
    llama.model.norm.forward = types.MethodType(lambda self, x: x * 0, llama.model.norm)
    expected = logits(llama)
    assert torch.equal(logits(copy.deepcopy(llama)), expected) and torch.equal(logits(copy.copy(llama)), expected)
    del llama.model.norm.forward
    assert "forward" not in copy.deepcopy(llama).model.norm.__dict__


def test_pickle():
    model = models.build("gpt2")
    expected = models.output(model, INPUTS)
    pickle.loads(pickle.dumps(model))
    handle = adze.patch(model)
    back = pickle.loads(pickle.dumps(model))
    assert handle.patched and patched_paths(back) == []
    assert torch.equal(models.output(back, INPUTS), expected)
    again = adze.patch(back)
    assert again.patched == handle.patched


def test_save_pretrained(llama, tmp_path):
    expected = logits(llama)
    handle = adze.patch(llama)
    llama.save_pretrained(tmp_path)
    handle.remove()
    keys = list(llama.state_dict())
    back = type(llama).from_pretrained(tmp_path).to(here()).eval()
    assert list(back.state_dict()) == keys
    assert torch.equal(logits(back), expected)


# ---- Forwards that others have replaced ----


def test_over_a_forward_that_kernelize_left(llama):
    for module in llama.modules():
        if type(module).__name__ in ("LlamaRMSNorm", "SiLUActivation"):
            module.forward = types.MethodType(type(module).forward, module)
    before = snapshot(llama)
    handle = adze.patch(llama)
    assert "model.norm" in handle.patched
    handle.remove()
    assert snapshot(llama) == before


def test_under_a_forward_that_kernelize_puts_later(llama):
    expected = logits(llama)
    handle = adze.patch(llama)
    for module in llama.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = types.MethodType(type(module).forward, module)
    assert "model.norm" not in patched_paths(llama)
    torch.testing.assert_close(logits(llama), expected)
    handle.remove()
    assert patched_paths(llama) == []
    assert torch.equal(logits(llama), expected)


def test_a_forward_of_somebody_else_stays(llama):
    llama.model.norm.forward = functools.partial(type(llama.model.norm).forward, llama.model.norm)
    stays = llama.model.norm.forward
    handle = adze.patch(llama)
    assert "model.norm" not in handle.patched and "a forward of its own" in handle.report()
    assert llama.model.norm.forward is stays
    mlp = llama.model.layers[0].mlp
    mlp.forward = later = lambda x: x * 0
    handle.disable()
    handle.enable()
    handle.remove()
    assert mlp.forward is later and llama.model.norm.forward is stays


def test_a_norm_with_another_forward_is_called_and_not_fused(llama):
    norm = llama.model.layers[0].post_attention_layernorm
    norm.forward = lambda x: x * 0
    expected = logits(llama)
    handle = adze.patch(llama)
    assert "model.layers.0" not in handle.patched and "model.layers.1" in handle.patched
    torch.testing.assert_close(logits(llama), expected)
    llama.model.layers[1].post_attention_layernorm.forward = lambda x: x * 0
    offloaded = logits(llama)
    handle.disable()
    torch.testing.assert_close(offloaded, logits(llama))


def test_kernelize(llama):
    kernels = pytest.importorskip("kernels")
    expected = logits(llama)
    handle = adze.patch(llama)
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        kernels.kernelize(llama, mode=kernels.Mode.INFERENCE, device=here().type)
    torch.testing.assert_close(logits(llama), expected)
    before = snapshot(adze.patch(llama).remove() or llama)
    again = adze.patch(llama)
    assert again.patched == handle.patched == patched_paths(llama)
    again.remove()
    assert snapshot(llama) == before
    assert torch.equal(logits(llama), expected)


def test_compiled_calls_of_transformers_are_dropped(llama):
    handle = adze.patch(llama)
    for change in (handle.disable, handle.enable, handle.remove):
        llama._compiled_call = llama._last_compile_config = "of other functions"
        change()
        assert "_compiled_call" not in llama.__dict__ and "_last_compile_config" not in llama.__dict__


def test_accelerate_hooks_before_and_after():
    accelerate = pytest.importorskip("accelerate")
    from accelerate.hooks import remove_hook_from_module

    expected = logits(models.build("llama"))
    early = models.build("llama")
    handle = adze.patch(early)
    accelerate.cpu_offload(early, execution_device=here())
    torch.testing.assert_close(logits(early), expected)
    assert patched_paths(early) == handle.patched
    handle.disable()
    assert patched_paths(early) == []
    assert torch.equal(logits(early), expected)
    handle.enable()
    remove_hook_from_module(early, recurse=True)
    assert patched_paths(early) == handle.patched
    handle.remove()
    assert torch.equal(logits(early), expected)

    offloaded = models.build("llama")
    accelerate.cpu_offload(offloaded, execution_device=here())
    before = [(path, list(m.__dict__.items())) for path, m in offloaded.named_modules()]
    handle = adze.patch(offloaded)
    assert handle.patched == patched_paths(offloaded) != []
    assert offloaded.model.norm.__dict__["forward"].func.__name__ == "new_forward"
    torch.testing.assert_close(logits(offloaded), expected)
    handle.remove()
    after = [(path, list(m.__dict__.items())) for path, m in offloaded.named_modules()]
    assert [[(k, id(v)) for k, v in d] for _, d in before] == [[(k, id(v)) for k, v in d] for _, d in after]
    assert torch.equal(logits(offloaded), expected)


def test_hooks_still_fire(llama):
    calls = []
    watched = ["model.layers.0", "model.layers.0.self_attn", "model.layers.0.post_attention_layernorm", "model.norm"]
    for path in watched:
        module = llama.get_submodule(path)
        module.register_forward_hook(lambda m, args, out, path=path: calls.append((path, type(out))))
    expected = logits(llama)
    without, calls = calls, []
    adze.patch(llama)
    found = logits(llama)
    assert calls == without and len(calls) == len(watched)
    torch.testing.assert_close(found, expected)


def test_hooks_of_every_module_still_fire(llama):
    calls = []
    with adze.patched(llama):
        hook = nn.modules.module.register_module_forward_hook(lambda m, args, out: calls.append(type(m).__name__))
        try:
            logits(llama)
        finally:
            hook.remove()
    assert calls.count("LlamaRMSNorm") == 5


def test_a_hook_may_change_what_a_fused_norm_returns(llama):
    llama.model.layers[0].post_attention_layernorm.register_forward_hook(lambda m, args, out: out * 0)
    expected = logits(llama)
    adze.patch(llama)
    torch.testing.assert_close(logits(llama), expected)


def test_hidden_states(llama):
    with torch.no_grad():
        expected = llama(**INPUTS, output_hidden_states=True).hidden_states
        adze.patch(llama)
        found = llama(**INPUTS, output_hidden_states=True).hidden_states
        assert len(found) == len(expected) == 3
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


# ---- The rest ----


def test_pipelines_are_objects_with_components(llama):
    pipeline = types.SimpleNamespace(components={"text": llama, "steps": 4, "norm": nn.LayerNorm(8)})
    handle = adze.patch(pipeline)
    assert "norm" in handle.patched and "text.model.norm" in handle.patched
    handle.remove()
    assert patched_paths(llama) == []


def test_scripted_modules_are_left_alone():
    model = nn.Sequential(nn.LayerNorm(8), torch.jit.script(nn.Sequential(nn.LayerNorm(8))))
    assert adze.patch(model).patched == ["0"]
    assert model(torch.ones(2, 8)).shape == (2, 8)


def test_importing_adze_imports_no_library():
    code = "import sys, torch, adze; adze.patch(torch.nn.LayerNorm(8)); print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_torch_modules_are_patched_without_diffusers():
    code = (
        "import sys, torch, adze; model = torch.nn.GroupNorm(2, 8); handle = adze.patch(model)\n"
        "print([row.rule for row in handle.rows], 'diffusers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['group_norm'] False"


def test_verify(llama):
    result = adze.verify(llama, **INPUTS)
    assert patched_paths(llama) == []
    assert {row.path for row in result.rows} == {*adze.patch(llama).patched, ""}
    assert "LlamaRMSNorm" in str(result) and all(row.original > 0 and row.patched > 0 for row in result.rows)
    site = llama.model.norm.forward.__func__.adze_site
    site.layers[-1] = (site.layers[-1][0], lambda self, hidden_states: hidden_states * 0)
    site.settle()
    row = next(row for row in adze.verify(llama, **INPUTS).rows if row.path == "model.norm")
    assert row.equal == 0.0 and row.worst > 1000
