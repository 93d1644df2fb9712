"""What Hugging Face's CI runs: the package loads, and each function computes its formula."""

import copy
import os
import pathlib
import sys

import pytest
import torch
from kernels import get_kernel, get_local_kernel

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "package" if (ROOT / "Makefile").exists() else ROOT  # of the project, or the repository on the Hub
PLACE = ROOT if (ROOT / "model.py").exists() else ROOT / "benchmarks"  # the folder of model.py
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 3


@pytest.fixture(scope="session")
def kernel():
    """The repository that LOCAL_KERNELS names, or the package that this test belongs to."""
    name = os.environ.get("LOCAL_KERNELS", "").partition("=")[0]
    if not name and not PACKAGE.exists():
        pytest.fail(f"{PACKAGE} is not there: `adze pack` makes it")
    return get_kernel(name, version=1) if name else get_local_kernel(PACKAGE)


def randn(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32)


def rounded_to_half_a_step(x, numbers, scale):
    return (numbers * scale[..., None] - x).abs() <= 0.501 * scale[..., None]


def qkv(x):
    """Queries, keys and values: the rows of x are tokens, of as many heads as there are matrices."""
    return 3 * [x.reshape(1, -1, *x.shape[-2:])]


FORMULAS = {
    "rms_norm": (
        lambda k, x: k.rms_norm(x, eps=1e-6),
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    ),
    "layer_norm": (
        lambda k, x: k.layer_norm(x, eps=1e-6),
        lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6),
    ),
    "glu": (lambda k, x: k.glu(x), lambda x: torch.nn.functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
    "activation": (lambda k, x: k.activation(x, "silu"), torch.nn.functional.silu),
    "gated_add": (lambda k, x: k.gated_add(x, x, x), lambda x: x + x * x),
    "softmax": (lambda k, x: k.softmax(x), lambda x: x.softmax(-1)),
    "gemm": (lambda k, x: k.gemm(x, torch.eye(x.shape[-1], device=x.device).roll(1, 0)), lambda x: x.roll(1, -1)),
    "attention": (
        lambda k, x: k.attention(*qkv(x)),
        lambda x: torch.nn.functional.scaled_dot_product_attention(*qkv(x)),
    ),
    "quantize": (
        lambda k, x: rounded_to_half_a_step(x, *k.quantize(x, "i8")),
        lambda x: torch.ones_like(x, dtype=torch.bool),
    ),
}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("op", sorted(FORMULAS))
@pytest.mark.parametrize("shape", [(4, 64), (3, 5, 100)])
def test_formula(kernel, op, shape):
    if not hasattr(kernel, op):
        pytest.skip(f"{op} is not of this package")
    call, formula = FORMULAS[op]
    x = randn(*shape)
    with torch.no_grad():
        torch.testing.assert_close(call(kernel, x), formula(x), rtol=1e-5, atol=1e-6)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("queries, keys", [(33, 33), (1, 65)])
@pytest.mark.parametrize("heads, kv_heads, dim", [(32, 8, 128), (4, 4, 64)])
def test_attention_of_bf16(kernel, queries, keys, heads, kv_heads, dim):
    """A prompt, where a token sees itself and those before it, and a token after others.

    Two things are rounded to bf16, each by its relative half unit u at most: the weights of the softmax and the
    result. Scores and sums are floats, whose errors are below 2^-12 of a weight."""
    if not hasattr(kernel, "attention"):
        pytest.skip("attention is not of this package")
    shapes = (2, heads, queries, dim), (2, kv_heads, keys, dim), (2, kv_heads, keys, dim)
    q, k, v = (torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes)
    with torch.no_grad():
        got = kernel.attention(q, k, v, causal=queries > 1).double()
    wide, u = (q.double(), k.double()), torch.finfo(torch.bfloat16).eps / 2
    exact, terms = (
        torch.nn.functional.scaled_dot_product_attention(*wide, each, is_causal=queries > 1, enable_gqa=True)
        for each in (v.double(), v.double().abs())
    )
    rounded = u * exact.abs() + (1 + u) * (u + 2**-12) * terms
    assert ((got - exact).abs() <= rounded).all()


@pytest.fixture(scope="session")
def place():
    """model.py, where the library of the model is installed."""
    sys.path.insert(0, str(PLACE))
    try:
        import model
    except ImportError as why:
        pytest.skip(f"the model is not here: {why}")
    return model


def own_calls(place, kernel):
    """(name, forward with the kernel, module, input) of each call of the model that this package has an op for."""
    for name, op, module, shape in place.calls(TOKENS):
        if hasattr(kernel, op):
            forward = place.forwards(kernel)[op][type(module)]
            module = module.to(DEVICE, torch.bfloat16).requires_grad_(False)
            for parameter in module.parameters():  # those of a new norm are ones
                parameter.normal_(1, 0.2) if parameter.ndim == 1 else parameter.normal_(0, 0.05)
            yield name, forward, module, torch.randn(shape, device=DEVICE).bfloat16()


def distance(a, exact):
    return (a.double() - exact).abs().max().item()


@pytest.mark.kernels_ci
def test_calls_of_the_model(kernel, place):
    """In bf16, with the weights, the row lengths and the roundings of the model. The error is at most twice that of
    the model's own code. A norm rounds where that code rounds: its results are equal, but for a few elements of which
    sums in another order changed the rounding."""
    torch.manual_seed(0)
    tested = 0
    for name, forward, module, x in own_calls(place, kernel):
        with torch.no_grad():
            got, own = forward(module, x), type(module).forward(module, x)
            wide = copy.deepcopy(module).double()
            exact = type(module).forward(wide, x.double()).double()
        assert got.dtype == own.dtype and got.shape == own.shape, name
        assert distance(got, exact) <= 2 * distance(own, exact), name
        if "norm" in name:
            assert (got == own).double().mean() > 0.99, name
        tested += 1
    if not tested:
        pytest.skip("the model calls no op of this package")


@pytest.mark.kernels_ci
def test_public_names(kernel):
    assert all(hasattr(kernel, name) for name in kernel.__all__)
