"""What Hugging Face's CI runs: the package loads, and each function computes its formula."""

import os
import pathlib

import pytest
import torch
from kernels import get_kernel, get_local_kernel

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "package" if (ROOT / "Makefile").exists() else ROOT  # of the project, or the repository on the Hub
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


@pytest.mark.kernels_ci
def test_public_names(kernel):
    assert all(hasattr(kernel, name) for name in kernel.__all__)
