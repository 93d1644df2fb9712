"""The pass over compiled graphs: what it finds, what it leaves alone, and that the numbers stay those of eager."""

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._functorch.aot_autograd import make_boxed_func  # noqa: E402
from torch._inductor.decomposition import select_decomp_table  # noqa: E402

import adze  # noqa: E402
from adze.inductor import Pass, known  # noqa: E402
from device import default_device, generator, here  # noqa: E402

with default_device(None):
    known()  # patterns are made once, where torch makes tensors unless told otherwise; graphs of CUDA must match them


def compiled(fn, dynamic=False):
    """fn through Dynamo and AOTAutograd with Inductor's decompositions, then the pass, then run as it is."""
    own = Pass((here().type,))

    def finish(module, inputs):
        own(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=finish, inference_compiler=finish, decompositions=select_decomp_table())
    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic), own.counts


def run(fn, *args, **kwargs):
    made, counts = compiled(fn)
    with torch.no_grad(), default_device(None):
        return made(*args, **kwargs), fn(*args, **kwargs), counts


def close(got, want):
    """Equal in nearly all elements, and one unit in the last place of bf16 elsewhere."""
    assert got.dtype == want.dtype and got.shape == want.shape
    if got.dtype == torch.float32:
        assert torch.allclose(got, want, rtol=2e-5, atol=2e-5 * want.abs().max().item())
        return
    step = torch.finfo(got.dtype).eps * want.abs().float().clamp_min(want.abs().max().item() * 2**-6)
    assert ((got.float() - want.float()).abs() <= step).all() and (got == want).float().mean() > 0.98


def randn(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def llama(h, w, eps=1e-6):
    f = h.float()
    return w * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)).to(h.dtype)


def gemma(h, w, eps=1e-6):
    f = h.float()
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + w.float())).type_as(h)


def squares_too(h, w):
    """A step of the chain is read elsewhere."""
    squares = h.float().pow(2)
    return w * (h.float() * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6)).to(h.dtype), squares


def modulated(x, scale, shift):
    return F.layer_norm(x, (64,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


def gated(x, r, gate, scale, shift):
    h = r + gate.unsqueeze(1) * x
    return modulated(h, scale, shift), h


X, R, W = randn(2, 5, 64), randn(2, 5, 64, seed=1), randn(64, seed=2)
ROWS = [randn(2, 64, seed=s) for s in (3, 4, 5)]
CHAINS = {
    "residual, rms_norm (llama)": (lambda x, r, w: (llama(x + r, w), x + r), (X, R, W)),
    "residual, rms_norm (gemma)": (lambda x, r, w: (gemma(r + x, w), r + x), (X, R, W)),
    "residual, rms_norm (torch)": (lambda x, r, w: (F.rms_norm(x + r, (64,), w, 1e-5), x + r), (X, R, W)),
    "residual, layer_norm": (lambda x, r, w: (F.layer_norm(x + r, (64,), w, w, 1e-5), x + r), (X, R, W)),
    "layer_norm, modulation": (modulated, (X, *ROWS[:2])),
    "gate, residual, layer_norm, modulation": (gated, (X, R, *ROWS)),
    "silu, product": (lambda x, r: F.silu(x) * r, (X, R)),
    "gelu, product": (lambda x, r: r * F.gelu(x), (X, R)),
    "gelu_tanh, product": (lambda x, r: F.gelu(x, approximate="tanh") * r, (X, R)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_found(name, dtype):
    fn, args = CHAINS[name]
    got, want, counts = run(fn, *(a.to(dtype) for a in args))
    if dtype == torch.float32 and name == "residual, rms_norm (torch)":
        assert sum(counts.values()) == 1  # in f32 the orders are one
    else:
        assert counts == {name: 1}
    for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (got, want)), strict=True):
        close(a, b)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, r, w: llama(x, w),  # a lone norm
        lambda x, r, w: F.silu(x) + r,
        lambda x, r, w: llama(x + r[:, :1], w),  # the sum is broadcast
        lambda x, r, w: llama(x + r, w[None, None]),  # not a vector
        lambda x, r, w: squares_too(x + r, w),
        lambda x, r, w: F.silu(x.double()) * r.double(),
        lambda x, r, w: F.silu(x) * w,
        lambda x, r, w: (x + r) * torch.rsqrt((x + r).float().pow(2).mean(1, keepdim=True) + 1e-6),  # another axis
    ],
)
def test_the_rest_is_left_alone(fn):
    got, want, counts = run(fn, X, R, W)
    assert counts == {}


def test_only_where_it_is_asked_for():
    own = Pass()
    assert own.devices == ("cuda",) and own.uuid() != Pass(("cpu",)).uuid() and own.uuid() == Pass().uuid()


def test_dynamic_shapes():
    fn = CHAINS["gate, residual, layer_norm, modulation"][0]
    made, counts = compiled(fn, dynamic=True)
    with torch.no_grad():
        for seq in (3, 7, 9):
            args = (randn(2, seq, 64), randn(2, seq, 64, seed=1), *ROWS)
            with default_device(None):
                got = made(*args)
            for a, b in zip(got, fn(*args), strict=True):
                close(a, b)
    assert counts == {"gate, residual, layer_norm, modulation": 1}


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


def test_through_inductor():
    """adze.compile, end to end: this is the one that builds C++."""
    module, kwargs = layer("Qwen3", torch.float32)
    made = adze.compile(module, devices=(here().type,), fullgraph=True, options={"fx_graph_cache": False})
    x = randn(2, 16, 256, dtype=torch.float32)
    torch._dynamo.reset()
    with torch.no_grad(), default_device(None):
        close(made(x, **kwargs), module(x, **kwargs))
    assert made.adze_pass.counts == LAYERS["Qwen3"] and not hasattr(module, "adze_pass")
