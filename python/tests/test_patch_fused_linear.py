"""numerics="fast" runs Linears that read the same input as one GEMM: the layout of the weights, and their values."""

import copy
import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import adze  # noqa: E402
import models  # noqa: E402
from adze.patching.fused_linear import _together, adjacent, linear_of_concat, pack_weights  # noqa: E402
from device import Watch, default_device, here  # noqa: E402


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def logits(model):
    return model(input_ids=torch.arange(24).view(2, 12) % 100, use_cache=False).logits


def matmuls(run):
    """How many GEMMs a call runs, and its result."""
    with Watch() as watch:
        out = run()
    return watch.matmuls, out


def states(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_fewer_matmuls_with_the_same_values(name):
    model = models.build(name)
    before, parameters = states(model), dict(model.named_parameters())
    count, expected = matmuls(lambda: logits(model))
    handle = adze.patch(model, numerics="fast")
    fewer, found = matmuls(lambda: logits(model))
    layers = len(model.model.layers)
    assert fewer == count - 3 * layers  # q, k and v, gate and value
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert all(parameters[key] is value for key, value in model.named_parameters())
    handle.remove()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)


def test_matched_it_leaves_weights_where_they_are(llama):
    where = [parameter.data_ptr() for parameter in llama.parameters()]
    count, _ = matmuls(lambda: logits(llama))
    with adze.patched(llama):
        assert matmuls(lambda: logits(llama))[0] == count
    assert [parameter.data_ptr() for parameter in llama.parameters()] == where


def test_values_may_change_and_weights_may_move(llama, tmp_path):
    other = models.build("llama")
    for parameter in other.parameters():
        parameter.mul_(1.5)
    plain = copy.deepcopy(llama)
    with adze.patched(llama, numerics="fast"):
        llama.load_state_dict(other.state_dict())
        torch.testing.assert_close(logits(llama), logits(other), rtol=1e-4, atol=1e-4)
        llama.model.layers[0].self_attn.k_proj.weight.data = torch.zeros(64, 128)
        other.model.layers[0].self_attn.k_proj.weight.data = torch.zeros(64, 128)
        torch.testing.assert_close(logits(llama), logits(other), rtol=1e-4, atol=1e-4)
        llama.double().float()
        count, found = matmuls(lambda: logits(llama))
        torch.testing.assert_close(found, logits(other), rtol=1e-4, atol=1e-4)
        assert count == matmuls(lambda: logits(other))[0]  # each on its own
        llama.save_pretrained(tmp_path / "moved")
    with adze.patched(plain, numerics="fast"):
        expected = logits(plain)
        torch.testing.assert_close(logits(copy.deepcopy(plain)), expected, rtol=1e-4, atol=1e-4)
        plain.save_pretrained(tmp_path / "laid")
    loaded = type(plain).from_pretrained(tmp_path / "laid").to(here())
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_saving_and_loading(llama, tmp_path, tied):
    safetensors = pytest.importorskip("safetensors.torch")
    if tied:
        llama.config.tie_word_embeddings = True
        llama.lm_head.weight = llama.model.embed_tokens.weight
    before = {name: value.clone() for name, value in llama.state_dict().items()}
    with adze.patched(llama, numerics="fast") as handle:
        projections = llama.model.layers[0].self_attn
        first, second = projections.q_proj.weight, projections.k_proj.weight
        assert first.data_ptr() + first.nbytes == second.data_ptr()
        state = llama.state_dict()
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in state.values())
        assert state["model.layers.0.self_attn.k_proj.weight"].data_ptr() == second.data_ptr()
        assert "10 Linears have new memory for their weights" in handle.report()
        safetensors.save_model(llama, tmp_path / "model.safetensors")
        if not tied:
            safetensors.save_file(llama.state_dict(), tmp_path / "state.safetensors")
        llama.save_pretrained(tmp_path / "pretrained")
        torch.save(llama.state_dict(), tmp_path / "state.pt")
        taken = llama.state_dict()
        projections.k_proj.weight.mul_(2)
        assert torch.equal(taken["model.layers.0.self_attn.k_proj.weight"], projections.k_proj.weight)
        safetensors.load_model(llama, tmp_path / "model.safetensors")
    twins = [models.build("llama") for _ in range(3)]
    if tied:
        for twin in twins:
            twin.lm_head.weight = twin.model.embed_tokens.weight
    safetensors.load_model(twins[0], tmp_path / "model.safetensors")
    twins[1].load_state_dict(torch.load(tmp_path / "state.pt"))
    twins[2] = type(llama).from_pretrained(tmp_path / "pretrained").to(here())
    for model in (llama, *twins):
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if not tied:
        state = safetensors.load_file(tmp_path / "state.safetensors")
        assert state.keys() == before.keys() and all(
            torch.equal(state[name].to(here()), before[name]) for name in state
        )


def test_a_model_that_is_moved_to_the_meta_device():
    """It has shapes alone, as without a patch."""
    model = models.build("llama", layers=1)
    adze.patch(model, numerics="fast")
    with torch.no_grad():
        assert model.to("meta")(input_ids=torch.arange(12, device="meta")[None]).logits.shape == (1, 12, 128)


def test_a_hook_or_a_gradient_keeps_them_apart(llama):
    tokens = torch.arange(12)[None]
    with adze.patched(llama, numerics="fast"):
        few, expected = matmuls(lambda: llama(input_ids=tokens).logits)
        seen = []
        projection = llama.model.layers[0].self_attn.k_proj
        hook = projection.register_forward_hook(lambda module, args, out: seen.append(out.shape))
        more, found = matmuls(lambda: llama(input_ids=tokens).logits)
        hook.remove()
        assert more == few + 2 and len(seen) == 1
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        with torch.enable_grad():
            llama(input_ids=tokens).logits.sum().backward()
        assert projection.weight.grad.abs().sum() > 0


def test_compiled_it_is_one_operator_that_looks_at_the_weights():
    llama, tokens = models.build("llama", layers=1), torch.arange(12)[None]
    with adze.patched(llama, numerics="fast"), default_device(None):
        expected, ran = llama(input_ids=tokens, use_cache=False).logits, []

        def backend(graph, inputs):
            ran.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
            return graph.forward

        torch._dynamo.reset()
        compiled = torch.compile(llama, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(input_ids=tokens, use_cache=False).logits, expected)
        assert sum("fused_linear" in str(target) for target in ran) == 2
        weight = llama.model.layers[0].self_attn.v_proj.weight
        weight.data = weight * 2  # elsewhere, and not seen by Dynamo
        other = llama(input_ids=tokens, use_cache=False).logits
        torch.testing.assert_close(compiled(input_ids=tokens, use_cache=False).logits, other)
        assert not torch.equal(other, expected)


def test_what_cannot_lie_end_to_end():
    linear = torch.nn.Linear
    one, two = linear(4, 3), linear(4, 2)
    where = one.weight.data_ptr()
    assert not pack_weights(one, linear(4, 2, bias=False))
    assert not pack_weights(one, linear(5, 2))
    assert not pack_weights(one, linear(4, 2, dtype=torch.float64))
    tied = linear(4, 2)
    tied.weight.data = torch.zeros(8, 4)[:2]
    assert not pack_weights(one, tied) and one.weight.data_ptr() == where
    assert pack_weights(one, two) and pack_weights(one, two)
    assert two.weight.data_ptr() == one.weight.data_ptr() + one.weight.nbytes
    x = torch.randn(5, 4)
    for change in (lambda: None, lambda: setattr(two, "bias", None), lambda: two.weight.data.mul_(2)):
        change()
        for found, linear in zip(_together(x, one, two), (one, two), strict=True):
            torch.testing.assert_close(found, linear(x))


def test_adjacent_tensors_are_found():
    x = torch.arange(24.0).view(6, 4)
    assert torch.equal(adjacent([x[:1], x[1:3], x[3:]]), x)
    assert adjacent([x[:, :2], x[:, 2:]], 1).data_ptr() == x.data_ptr()
    for parts, dim in [
        ([x[:1], x[2:]], 0),  # a gap
        ([x[:2], x[2:].clone()], 0),  # another storage
        ([x[:2, :2], x[2:, :2]], 0),  # rows that are not contiguous
        ([x[:2], x[2:, :3]], 0),  # shorter rows of the same stride
        ([x[:2], x[2:].view(torch.int32)], 0),
    ]:
        assert adjacent(parts, dim) is None


def packed(*sizes, depth=24, bias=True, dtype=torch.float32):
    linears = [torch.nn.Linear(depth, size, bias=bias, dtype=dtype) for size in sizes]
    assert pack_weights(*linears)
    return linears


def call(x, linears):
    none = [None] * (3 - len(linears))
    biases = [linear.bias for linear in linears]
    return torch.ops.adze.fused_linear(x, *(linear.weight for linear in linears), *none, *biases, *none)


def near(found, x, linear):
    """Whether this is linear(x), each sum added up in float in any order, rounded, and rounded with its bias."""
    x, weight = x.double(), linear.weight.double()
    bias = torch.zeros(()) if linear.bias is None else linear.bias.double()
    exact, size = x @ weight.t() + bias, x.abs() @ weight.abs().t() + bias.abs()
    sums = (x.shape[-1] + 2) * torch.finfo(torch.float32).eps / 2
    return bool(((found.double() - exact).abs() <= (sums + torch.finfo(found.dtype).eps) * size).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(16, 8), (16, 8, 40), (1, 1, 1)])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 0), (1,), ()])
def test_the_operator_and_its_shapes(sizes, shape, bias, dtype):
    linears, x = packed(*sizes, bias=bias, dtype=dtype), torch.randn(*shape, 24, dtype=dtype)
    for _ in range(2):
        found = call(x, linears).split(sizes, dim=-1)
        assert all(near(part, x, linear) for part, linear in zip(found, linears, strict=True))
        linears[1].weight.data = linears[1].weight.clone()  # elsewhere


def test_the_operator_is_a_good_one():
    linears, x = packed(16, 8, 40), torch.randn(2, 3, 24)
    parameters = [linear.weight for linear in linears] + [linear.bias for linear in linears]
    torch.library.opcheck(torch.ops.adze.fused_linear.default, (x, *parameters))
    torch.library.opcheck(torch.ops.adze.fused_linear.default, (x, *parameters[:2]))


def test_what_the_operator_refuses():
    fused_linear = torch.ops.adze.fused_linear
    x, a, b, v = torch.randn(3, 8), torch.randn(4, 8), torch.randn(5, 8), torch.randn(4)
    for arguments, why in [
        ((x, a, torch.randn(5, 7)), "second has rows of 7 elements, x has 8"),
        ((x, a, b.double()), "second has another dtype"),
        ((x, a, torch.randn(8, 5).t()), "second of rank 2 must be contiguous, a matrix"),
        ((x, a, v), "second of rank 1 must be contiguous, a matrix"),
        ((torch.randn(8, 3).t(), a, b), "x of rank 2 must be contiguous"),
        ((x, a, b, None, v), "second_bias is missing"),
        ((x, a, b, None, v, v), "second_bias has 4 elements, it must have 5"),
        ((x, a, b, None, None, v), "second_bias is one too many"),
        ((x, a, b, None, v, torch.randn(5), v), "third_bias is one too many"),
        ((x.int(), a.int(), b.to(torch.complex64)), "second has a dtype that adze does not have"),
    ]:
        with pytest.raises(RuntimeError, match=why):
            fused_linear(*arguments)


def test_a_linear_of_a_concatenation():
    cases, expected = [], []
    shapes, dtypes = [(5,), (2, 3), (2, 0), ()], [torch.float32, torch.bfloat16]
    for shape, bias, dtype in itertools.product(shapes, [True, False], dtypes):
        linear = torch.nn.Linear(24, 16, bias=bias, dtype=dtype)
        whole = torch.randn(*shape, 24, dtype=dtype)
        first, second = whole.split([8, 16], dim=-1)
        count, made = matmuls(lambda: linear_of_concat(linear, first, second))  # noqa: B023
        assert count == 2 and near(made, whole, linear), (shape, bias, dtype)
        cases.append((linear, first, second))
        expected.append(made)
    torch._dynamo.reset()
    compiled = torch.compile(lambda cases: [linear_of_concat(*case) for case in cases], fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(cases), expected, rtol=0, atol=0)
    for linear, first, second in cases:
        whole = torch.cat([first, second], -1)
        linear.register_forward_hook(lambda module, args, out: out + 1)
        torch.testing.assert_close(linear_of_concat(linear, first, second), linear(whole))
        with torch.enable_grad():
            assert linear_of_concat(linear, first, second).requires_grad


def test_the_operator_of_two_parts_is_a_good_one():
    first, second, weight = torch.randn(2, 3, 8), torch.randn(2, 3, 16), torch.randn(4, 24)
    torch.library.opcheck(torch.ops.adze.linear_of_concat.default, (first, second, weight, torch.randn(4)))
    torch.library.opcheck(torch.ops.adze.linear_of_concat.default, (first, second, weight, None))
