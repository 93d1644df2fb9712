"""The pass over compiled graphs: what it finds, what it leaves alone, and that the numbers stay those of eager."""

import collections
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch._inductor.utils import run_and_get_code  # noqa: E402

import adze  # noqa: E402
from adze.inductor import compile as inductor  # noqa: E402
from adze.inductor.compile import Pass  # noqa: E402
from device import default_device, here  # noqa: E402
from inductor_graphs import all_close, calls, close, compiled, gemma, llama, randn, run, run_all  # noqa: E402


def squares_too(h, w):
    """A step of the chain is read elsewhere."""
    squares = h.float().pow(2)
    return w * (h.float() * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6)).to(h.dtype), squares


def modulated(x, scale, shift):
    return F.layer_norm(x, (64,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


def gated(x, r, gate, scale, shift):
    h = r + gate.unsqueeze(1) * x
    return modulated(h, scale, shift), h


def bare(h):
    """diffusers' RMSNorm without a weight."""
    return (h * torch.rsqrt(h.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype)


def norm_too(x, w):
    n = bare(x)
    return n * (1 + w) + w, n


def rms_modulated(x, scale, shift):
    return bare(x) * (1 + scale[:, None]) + shift[:, None]


def rms_gated(x, r, gate, scale, shift):
    """As LTX-Video writes it, the gate last."""
    h = r + x * gate.unsqueeze(1)
    return rms_modulated(h, scale, shift), h


def added(modulate):
    return lambda x, r, scale, shift: (modulate(x + r, scale, shift), x + r)


X, R, W = randn(2, 5, 64), randn(2, 5, 64, seed=1), randn(64, seed=2)
ROWS = [randn(2, 64, seed=s) for s in (3, 4, 5)]
CHAINS = {
    "residual, rms_norm (llama)": (lambda x, r, w: (llama(x + r, w), x + r), (X, R, W)),
    "residual, rms_norm (gemma)": (lambda x, r, w: (gemma(r + x, w), r + x), (X, R, W)),
    "residual, rms_norm (torch)": (lambda x, r, w: (F.rms_norm(x + r, (64,), w, 1e-5), x + r), (X, R, W)),
    "residual, layer_norm": (lambda x, r, w: (F.layer_norm(x + r, (64,), w, w, 1e-5), x + r), (X, R, W)),
    "layer_norm, modulation": (modulated, (X, *ROWS[:2])),
    "gate, residual, layer_norm, modulation": (gated, (X, R, *ROWS)),
    "rms_norm, modulation": (rms_modulated, (X, *ROWS[:2])),
    "gate, residual, rms_norm, modulation": (rms_gated, (X, R, *ROWS)),
    "residual, layer_norm, modulation": (added(modulated), (X, R, *ROWS[:2])),
    "residual, rms_norm, modulation": (added(rms_modulated), (X, R, *ROWS[:2])),
    "silu, product": (lambda x, r: F.silu(x) * r, (X, R)),
    "gelu, product": (lambda x, r: r * F.gelu(x), (X, R)),
    "gelu_tanh, product": (lambda x, r: F.gelu(x, approximate="tanh") * r, (X, R)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_chains_are_found(dtype):
    got, want, counts = run_all({name: (fn, [a.to(dtype) for a in args]) for name, (fn, args) in CHAINS.items()})
    if dtype == torch.float32:  # in which torch's rms_norm is that of another order
        assert sum(counts.values()) == len(CHAINS) and set(CHAINS) - set(counts) <= {"residual, rms_norm (torch)"}
    else:
        assert counts == dict.fromkeys(CHAINS, 1)
    all_close(got, want)


def test_the_rest_is_left_alone():
    rest = [
        lambda x, r, w: llama(x, w),  # a lone norm
        lambda x, r, w: F.silu(x) + r,
        lambda x, r, w: llama(x + r[:, :1], w),  # the sum is broadcast
        lambda x, r, w: llama(x + r, w[None, None]),  # not a vector
        lambda x, r, w: squares_too(x + r, w),
        lambda x, r, w: F.silu(x.double()) * r.double(),
        lambda x, r, w: F.silu(x) * w,
        lambda x, r, w: norm_too(x, w),  # the norm is read elsewhere
        lambda x, r, w: bare(x[:1]) * (1 + r[:, :1]) + w,  # the result has more rows than what is normed
        lambda x, r, w: bare(x) * (1 + w.float()) + w,  # not rounded, and not in x's dtype
        lambda x, r, w: (x + r) * torch.rsqrt((x + r).float().pow(2).mean(1, keepdim=True) + 1e-6),  # another axis
    ]
    assert run_all({i: (fn, (X, R, W)) for i, fn in enumerate(rest)})[2] == {}


def test_only_where_it_is_asked_for():
    own = Pass()
    assert own.devices == ("cuda",) and own.uuid() != Pass(("cpu",)).uuid() and own.uuid() == Pass().uuid()


@pytest.mark.parametrize("name", ["gate, residual, layer_norm, modulation", "gate, residual, rms_norm, modulation"])
def test_dynamic_shapes(name):
    fn = CHAINS[name][0]
    made, own = compiled(fn, dynamic=True)
    with torch.no_grad():
        for seq in (3, 7, 9):
            args = (randn(2, seq, 64), randn(2, seq, 64, seed=1), *ROWS)
            with default_device(None):
                got = made(*args)
            for a, b in zip(got, fn(*args), strict=True):
                close(a, b)
    assert own.counts == {name: 1} and len(own.graphs) == 1


class Normed(torch.nn.Module):
    """A residual sum and its norm, with an eps that is an attribute."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(randn(64)), 1e-6

    def forward(self, x, residual):
        h = (x + residual).float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@pytest.mark.parametrize("specialize, counts", [(False, {}), (True, {"residual, rms_norm (llama)": 1})])
def test_dynamic_numbers(specialize, counts):
    fn = Normed()
    with torch._dynamo.config.patch(specialize_float=specialize), torch.no_grad():
        made, own = compiled(fn, dynamic=True)
        for seq in (3, 7):
            args = randn(2, seq, 64), randn(2, seq, 64, seed=1)
            with default_device(None):
                got = made(*args)
            close(got, fn(*args))
    assert own.counts == counts and len(own.graphs) == 1


def test_a_sum_that_nobody_reads_is_not_written():
    fn = CHAINS["gate, residual, rms_norm, modulation"][0]
    for outputs, form in ((lambda *a: fn(*a)[0], "adze.rms_norm.default"), (fn, "adze.rms_norm.sum")):
        made, own = compiled(outputs)
        with torch.no_grad(), default_device(None):
            made(X, R, *ROWS)
        assert calls(own) == [form]


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_a_table_are_added_by_the_kernel(dtype, tokens):
    """LTX-Video: modulations are rows of a table and of an embedding, for all tokens or for each."""

    def fn(x, r, table, temb):
        shift, scale, gate = (table[None, None] + temb.reshape(x.shape[0], temb.shape[1], 3, -1)).unbind(2)
        h = r + x * gate
        return bare(h) * (1 + scale) + shift, h

    args = [t.to(dtype) for t in (X, R, randn(3, 64, seed=6), randn(2, tokens, 3 * 64, seed=7))]
    made, own = compiled(fn)
    with torch.no_grad(), default_device(None):
        for got, want in zip(made(*args), fn(*args), strict=True):
            close(got, want)
    assert own.counts == {"gate, residual, rms_norm, modulation": 1}
    assert not any("add" in op for op in calls(own, "aten"))


def test_tokens_that_are_split_and_joined_are_one_sequence():
    """FLUX: a block gives text and image, the next begins with both in one."""

    def fn(x, r, gate, scale, shift):
        h = r + gate[:, None] * x
        both = torch.cat([h[:, :2], h[:, 2:]], dim=1)
        return modulated(both, scale, shift), both

    def swapped(x, r, gate, scale, shift):
        h = r + gate[:, None] * x
        both = torch.cat([h[:, 2:], h[:, :2]], dim=1)
        return modulated(both, scale, shift) + both

    got, want, counts = run(lambda *a: sum(fn(*a)), X, R, *ROWS)
    close(got, want)
    assert counts == {"gate, residual, layer_norm, modulation": 1}
    assert run(fn, X, R, *ROWS)[2] == {"layer_norm, modulation": 1}  # the concatenation is a result itself
    assert run(swapped, X, R, *ROWS)[2] == {"layer_norm, modulation": 1}


ALONE = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
UP, DOWN = randn(128, 64, seed=1) / 8, randn(64, 128, seed=2) / 8


def test_an_activation_between_matmuls_is_found(monkeypatch):
    monkeypatch.setitem(inductor.ALONE, here().type, 2 * 5 * 128)
    cases = {}
    for name, act in ALONE.items():
        for dtype in (torch.bfloat16, torch.float16):
            args = [t.to(dtype) for t in (X, UP, DOWN, randn(128, seed=3))]
            cases[name, dtype, "linear"] = (
                lambda x, up, down, bias, act=act: F.linear(act(F.linear(x, up, bias)), down), args
            )  # fmt: skip
            cases[name, dtype, "batched"] = (
                lambda x, up, down, act=act: torch.bmm(
                    act(torch.bmm(x, up.T.expand(2, -1, -1))), down.T.expand(2, -1, -1)
                ),
                args[:3],
            )
    got, want, counts = run_all(cases)
    assert counts == {"activation between GEMMs": len(cases)}
    all_close(got, want)


def test_an_activation_between_matmuls_rounds_as_eager(monkeypatch):
    """The second GEMM multiplies by the identity, so its result is its input: every value of the dtype up to 16."""
    monkeypatch.setitem(inductor.ALONE, here().type, 1)
    cases = {}
    for name, act in ALONE.items():
        for dtype in (torch.bfloat16, torch.float16):
            values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
            values = torch.where(values.abs() <= 16, values, 0).reshape(-1, 64)
            cases[name, dtype] = lambda x, one, act=act: act(x @ one) @ one, (values, torch.eye(64, dtype=dtype))
    got, want, counts = run_all(cases)
    assert counts == {"activation between GEMMs": len(cases)}
    all_close(got, want)


def test_other_activations_are_left_alone(monkeypatch):
    monkeypatch.setitem(inductor.ALONE, here().type, 1)
    others = [
        lambda x, up, down: F.linear(F.gelu(F.linear(x, up)) * 2, down),  # Inductor fuses what follows
        lambda x, up, down: F.linear(F.gelu(F.linear(x, up) * 2), down),  # and what comes before
        lambda x, up, down: F.gelu(F.linear(x, up)),  # a result
        lambda x, up, down: (lambda h: (F.linear(h, down), h.sum(-1)))(F.gelu(F.linear(x, up))),  # read twice
        lambda x, up, down: F.linear(F.gelu(x.repeat(1, 1, 2)), down),  # not of a GEMM
        lambda x, up, down: F.linear(torch.cat([F.gelu(F.linear(x, up)), F.linear(x, up)], 1), down),
        lambda x, up, down: F.linear(F.relu(F.linear(x, up)), down),
        lambda x, up, down: F.linear(F.gelu(F.linear(x.float(), up.float())), down.float()),
    ]
    assert run_all({i: (fn, (X, UP, DOWN)) for i, fn in enumerate(others)})[2] == {}


def test_where_an_activation_pays(monkeypatch):
    def fn(x, up, down):
        return F.linear(F.gelu(F.linear(x, up)), down)

    assert "cpu" not in inductor.ALONE and run(fn, X, UP, DOWN)[2] == {}
    monkeypatch.setitem(inductor.ALONE, here().type, 2 * 5 * 128 + 1)  # it has one element less
    assert run(fn, X, UP, DOWN)[2] == {}
    monkeypatch.setitem(inductor.ALONE, here().type, 1)
    made, own = compiled(fn, dynamic=True)
    with torch.no_grad(), default_device(None):
        made(X, UP, DOWN)
    assert own.counts == {}  # of a size that is not known
    with torch._inductor.config.patch(max_autotune=True):
        assert run(fn, X, UP, DOWN)[2] == {}
    assert run(fn, X, UP, DOWN)[2] == {"activation between GEMMs": 1}


# ---- Pairs ----


def turn(x):
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([-imaginary, real], dim=-1).flatten(-2)


def rotate(x, cos, sin):
    return (x.float() * cos + turn(x).float() * sin).to(x.dtype)


def normed(x, w):
    return F.rms_norm(x, (x.shape[-1],), w, 1e-5)


def angles(*shape):
    return tuple(f(randn(*shape[:-1], shape[-1] // 2, dtype=torch.float32, seed=9)).repeat_interleave(2, -1)
                 for f in (torch.cos, torch.sin))  # fmt: skip


def across(q, k, qw, kw, cos, sin):
    """LTX-Video: all heads of a token as one, and a table for each of them."""
    return rotate(normed(q, qw), cos, sin), rotate(normed(k, kw), cos, sin)


def per_head(q, k, qw, kw, cos, sin):
    """FLUX: one table for all heads."""
    cos, sin = cos[None, :, None], sin[None, :, None]
    return across(q, k, qw, kw, cos, sin)


WEIGHTS = randn(32, seed=2), randn(32, seed=3)
QK = {
    "across": (across, (randn(2, 5, 32), randn(2, 5, 32, seed=1), *WEIGHTS, *angles(2, 5, 32))),
    "one batch of angles": (across, (randn(2, 5, 32), randn(2, 5, 32, seed=1), *WEIGHTS, *angles(1, 5, 32))),
    "per head": (per_head, (randn(2, 5, 3, 32), randn(2, 5, 3, 32, seed=1), *WEIGHTS, *angles(5, 32))),
    "other heads": (per_head, (randn(2, 5, 4, 32), randn(2, 5, 2, 32, seed=1), *WEIGHTS, *angles(5, 32))),
}


def test_pairs_are_found():
    cases = {
        (name, dtype): (fn, [*(t.to(dtype) for t in tensors), cos, sin])
        for name, (fn, (*tensors, cos, sin)) in QK.items()
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    }
    got, want, counts = run_all(cases)
    assert counts == {"qk-norm, interleaved rope": len(cases)}
    all_close(got, want)


@pytest.mark.parametrize("name", ["across", "per head"])
def test_pairs_with_dynamic_shapes(name):
    fn, (q, k, *weights) = QK[name][0], QK[name][1][:4]
    made, own = compiled(fn, dynamic=True)
    with torch.no_grad():
        for seq in (4, 7, 9):
            tensors = [t[:, :1].repeat_interleave(seq, 1) for t in (q, k)]
            tables = angles(2, seq, 32) if name == "across" else angles(seq, 32)
            with default_device(None):
                got = made(*tensors, *weights, *tables)
            for a, b in zip(got, fn(*tensors, *weights, *tables), strict=True):
                close(a, b)
    assert own.counts == {"qk-norm, interleaved rope": 1} and len(own.graphs) == 1


def norm_of_q_too(q, k, qw, kw, cos, sin):
    n = normed(q, qw)
    return rotate(n, cos, sin), rotate(normed(k, kw), cos, sin), n


def other_turn(x, cos, sin):
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    return (x.float() * cos + torch.stack([imaginary, -real], dim=-1).flatten(-2).float() * sin).to(x.dtype)


def test_other_rotations_are_left_alone():
    others = [
        lambda q, k, v, w, cos, sin: (rotate(q, cos, sin), rotate(k, cos, sin)),  # nothing is normed
        lambda q, k, v, w, cos, sin: (rotate(normed(q, v), cos, sin), rotate(k, cos, sin)),
        lambda q, k, v, w, cos, sin: rotate(normed(q, v), cos, sin),  # one alone
        norm_of_q_too,  # a step is read elsewhere
        lambda q, k, v, w, cos, sin: (rotate(normed(q, v), cos, sin), rotate(normed(k, w), sin, cos)),
        lambda q, k, v, w, cos, sin: (rotate(normed(q, v), cos, sin), other_turn(normed(k, w), cos, sin)),
        lambda q, k, v, w, cos, sin: across(q, k, v, w, cos[:, :1], sin[:, :1]),  # one angle for all tokens
        lambda q, k, v, w, cos, sin: [x * cos + turn(x) * sin for x in (normed(q, v), normed(k, w))],  # float results
        lambda q, k, v, w, cos, sin: across(q[:, None], k[:, None], v, w, cos[:, None], sin[:, None]),  # heads first
    ]
    assert run_all({i: (fn, QK["across"][1]) for i, fn in enumerate(others)})[2] == {}


# ---- What calls share ----

TABLES = {
    "pointwise": lambda angle, f: f(angle),
    "repeated": lambda angle, f: f(angle[..., ::2]).repeat_interleave(2, -1),
    "concatenated": lambda angle, f: 0.5 * torch.cat([torch.ones_like(angle[..., :2]), f(angle[..., 2:])], -1),
}


@pytest.mark.parametrize("by_hand", [True, False])
def test_layers_share_one_table(by_hand):
    """Without the constraint Inductor would compute the angles again for each call of an operator."""

    def called(q, k, qw, kw, cos, sin):
        return adze.qk_norm_rope(q, k, qw, kw, cos, sin, eps=1e-5, interleaved=True)

    layer = called if by_hand else per_head

    def fn(given):
        results = {}
        for name, (q, k, qw, kw, angle) in given.items():
            cos, sin = TABLES[name](angle, torch.cos), TABLES[name](angle, torch.sin)
            for _ in range(3):
                q, k = layer(-q, -k, qw, kw, cos, sin)
            results[name] = q, k
        return results

    args = [t.float() for t in QK["per head"][1][:4]] + [randn(5, 32, dtype=torch.float32)]
    given = {name: [t.clone() for t in args] for name in TABLES}
    torch._dynamo.reset()
    options = {"fx_graph_cache": False}
    if by_hand:
        made = torch.compile(fn, fullgraph=True, options=options)
    else:
        made = adze.compile(fn, devices=(here().type,), fullgraph=True, options=options)
    with torch.no_grad(), default_device(None):
        got, codes = run_and_get_code(made, given)
        all_close(got, fn(given))
    calls = re.findall(r"qk_norm_rope\.k_out\((.*)\)", codes[0])
    assert list(collections.Counter(tuple(call.split(", ")[4:6]) for call in calls).values()) == [3] * len(TABLES)


def test_the_ops_load_no_compiler():
    code = "import sys, torch, adze; adze.activation(torch.ones(8), 'silu'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "adze.operators.fake" in done.stdout.split() and "torch._inductor.lowering" not in done.stdout.split()


def test_inputs_have_the_strides_of_eager():
    """Inductor chooses the strides of what it computes, and n.T would not be contiguous."""

    def fn(x, r, value):
        n = x.T + r.T
        return F.silu(n.T) * value, F.relu(n).sum(0)

    args = [randn(6, 64, dtype=torch.float32, seed=s) for s in range(3)]
    torch._dynamo.reset()
    made = adze.compile(fn, devices=(here().type,), fullgraph=True, options={"fx_graph_cache": False})
    with torch.no_grad(), default_device(None):
        for a, b in zip(made(*args), fn(*args), strict=True):
            close(a, b)
    assert made.adze_pass.counts == {"silu, product": 1}


# ---- Models ----


def layer(name, dtype):
    transformers = pytest.importorskip("transformers")
    common = dict(vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=128)  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**common, **({"head_dim": 64} if name != "Llama" else {}))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=dtype), torch.arange(16)[None])
    return model.model.layers[0], {"position_embeddings": (cos, sin)}


LAYERS = {
    "Llama": {"residual, rms_norm (llama)": 1, "silu, product": 1, "rope of q and k": 1},
    "Mistral": {"residual, rms_norm (llama)": 1, "silu, product": 1, "rope of q and k": 1},
    "Qwen3": {"residual, rms_norm (llama)": 1, "silu, product": 1, "qk-norm, rope": 1},
    "Gemma": {"residual, rms_norm (gemma)": 1, "gelu_tanh, product": 1, "rope of q and k": 1},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LAYERS)
def test_decoder_layers(name, dtype):
    module, kwargs = layer(name, dtype)
    got, want, counts = run(module, randn(2, 16, 256, dtype=dtype), **kwargs)
    assert counts == LAYERS[name]
    close(got, want)


DIFFUSERS = {
    "ltx": {
        "rms_norm, modulation": 1,  # the first block's
        "gate, residual, rms_norm, modulation": 1,  # from block to block
        "residual, rms_norm, modulation": 2,
        "gate, residual, layer_norm, modulation": 1,  # the last norm
        "qk-norm, interleaved rope": 2,
    },
    "flux": {
        "layer_norm, modulation": 3,  # text, image, and both in the single block
        "gate, residual, layer_norm, modulation": 2,
        "qk-norm, interleaved rope": 1,  # of the single block; text and image have norms of their own
    },
}


def diffusers_model(name, dtype):
    pytest.importorskip("diffusers")
    import diffusers_models

    torch.manual_seed(0)
    model, inputs = getattr(diffusers_models, f"_{name}")(wide=True)

    def widened(dtype):
        return {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() and not k.endswith("_ids")
                else v for k, v in inputs.items()} | {"return_dict": False}  # fmt: skip

    return torch.nn.Module.to(model.eval(), dtype), widened


def distance(got, exact):
    return (got.double() - exact).square().mean().sqrt().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", DIFFUSERS)
def test_diffusers(name, dtype):
    """The error against the model in double must be less than twice that without the pass. On a CPU bf16 has the same
    bits."""
    model, inputs = diffusers_model(name, dtype)
    made, own = compiled(model, keep=True)
    with torch.no_grad(), default_device(None):
        (got,) = made(**inputs(dtype))
        (exact,) = torch.nn.Module.to(model, torch.float64)(**inputs(torch.float64))
    ((want,),) = own.before
    assert own.counts == DIFFUSERS[name]
    assert got.dtype == want.dtype and distance(got, exact) <= 2 * distance(want, exact)
    if dtype == torch.bfloat16 and here().type == "cpu":
        assert torch.equal(got, want)


def test_blocks_of_ltx_through_inductor():
    """Views of tables and embeddings, sums and pairs of results as Inductor's code passes them on."""
    model, inputs = diffusers_model("ltx", torch.float32)
    made = adze.compile(model, devices=(here().type,), fullgraph=True, options={"fx_graph_cache": False})
    torch._dynamo.reset()
    with torch.no_grad(), default_device(None):
        (got,) = made(**inputs(torch.float32))
        (want,) = model(**inputs(torch.float32))
    assert made.adze_pass.counts == DIFFUSERS["ltx"]
    close(got, want)


def test_through_inductor():
    """adze.compile, end to end: this is the one that builds C++."""
    module, kwargs = layer("Qwen3", torch.float32)
    made = adze.compile(module, devices=(here().type,), fullgraph=True, options={"fx_graph_cache": False})
    x = randn(2, 16, 256, dtype=torch.float32)
    torch._dynamo.reset()
    with torch.no_grad(), default_device(None):
        close(made(x, **kwargs), module(x, **kwargs))
    assert made.adze_pass.counts == LAYERS["Qwen3"] and not hasattr(module, "adze_pass")
