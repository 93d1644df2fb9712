"""What Hugging Face's CI runs: the package loads, and each function computes its formula."""

import os
import pathlib

import pytest
import torch
from kernels import get_kernel, get_local_kernel

PACKAGE = pathlib.Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def kernel():
    """The repository that LOCAL_KERNELS names, or the folder of this test."""
    name = os.environ.get("LOCAL_KERNELS", "").partition("=")[0]
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
def test_public_names(kernel):
    assert all(hasattr(kernel, name) for name in kernel.__all__)
