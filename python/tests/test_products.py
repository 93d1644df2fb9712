"""adze.patch(numerics="fast"): products of few rows by gemm, with the norm before and the sum after them."""

import os
import subprocess
import sys

import pytest
import torch

import adze
import models
from adze.patching import products
from device import Watch, here


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    """Four rows are gemm's here, whatever was measured."""
    monkeypatch.setitem(products.FASTER, here().type, {torch.float32: 4})


def ran(model, tokens, batch=1):
    """The output for so many tokens, and how often gemm and torch's products ran."""
    with torch.no_grad(), Watch() as watch:
        out = models.output(model, models.inputs("llama", batch, tokens))
    return out, watch.seen["adze.gemm"], watch.matmuls


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_four_launches_per_layer(name):
    """qwen2 has biases, qwen3 norms q and k; the head is one more."""
    model = models.build(name)
    want, gemms, matmuls = ran(model, 3)
    assert gemms == 0 and matmuls == 15
    wide = ran(model, 6)[0]
    handle = adze.patch(model, numerics="fast")
    got, gemms, matmuls = ran(model, 3)
    assert gemms == 9 and matmuls == 0
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert "add + norm + products of up to 4 rows by gemm" in handle.report()
    assert "lm_head" in handle.patched and "linear + products of up to 4 rows by gemm" in handle.report()
    got, gemms, matmuls = ran(model, 6)
    assert gemms == 0 and matmuls < 15
    torch.testing.assert_close(got, wide, rtol=1e-4, atol=1e-5)
    inputs = models.inputs("llama", 1, 3)
    tokens = models.generate(model, inputs, 4)
    handle.remove()
    assert torch.equal(models.generate(model, inputs, 4), tokens)


CAPTURED = """
import torch
from adze.graphs import constant, cuda_graph
x, made = torch.ones(1, 8), torch.ones(4, 8)
own = torch.nn.Parameter(made, requires_grad=False)
for kept, w in ((None, own), ([], own), ([], made), (None, own)):
    cuda_graph._capturing.kept = kept
    constant.gemm(x, w=w)
"""


def test_weights_are_constant_in_a_graph():
    """Kernels of a graph may read a module's weights before the kernel before them has ended. Others may not, nor may
    they read weights that are made in the forward."""
    environment = os.environ | {"ADZE_TRACE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CAPTURED], env=environment, capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stderr.splitlines() if "gemm" in line]
    assert ["flags=const_weights" in line for line in lines] == [False, True, False, False], done.stderr


def test_match_leaves_products_to_torch():
    model = models.build("llama")
    handle = adze.patch(model)
    assert ran(model, 3)[1:] == (0, 15) and "by gemm" not in handle.report()


def test_weights_stay_where_they_are():
    model = models.build("llama")
    adze.patch(model, numerics="fast")
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    ran(model, 2)
    assert addresses == {name: p.data_ptr() for name, p in model.named_parameters()}
    model.model.layers[0].mlp.down_proj.weight.data.zero_()  # and count as they are now
    model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    hidden = model.model.embed_tokens(torch.tensor([[1, 2]], device=here()))
    with torch.no_grad():
        positions = model.model.rotary_emb(hidden, torch.tensor([[0, 1]], device=here()))
        assert torch.equal(model.model.layers[0](hidden, position_embeddings=positions), hidden)


def test_what_is_not_plain_is_called():
    """A hook on a projection runs; a block under one runs its own way."""
    model, calls = models.build("llama"), []
    want = ran(model, 2)[0]
    adze.patch(model, numerics="fast")
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: calls.append("k_proj"))
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: calls.append("down_proj"))
    model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append("mlp"))
    got, gemms, _ = ran(model, 2)
    assert calls == ["k_proj", "down_proj", "mlp"] and gemms == 3  # o_proj, gate and up of the first layer, the head
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_gradients_are_torch_s():
    model = models.build("llama")
    adze.patch(model, numerics="fast")
    with Watch() as watch, pytest.warns(UserWarning, match="gradients are enabled"):
        model(**models.inputs("llama", 1, 2)).logits.sum().backward()
    assert watch.seen["adze.gemm"] == 0 and model.model.layers[0].mlp.up_proj.weight.grad is not None


@pytest.mark.parametrize("kind", ["int8", "int4-g64"])
def test_quantized(kind):
    """Quantised weights are gemm's up to 64 rows, whatever was measured for others."""
    model = models.build("qwen3", torch.bfloat16)
    adze.quantize(model, kind)
    want, gemms, matmuls = ran(model, 20)
    assert gemms == 14 and matmuls == 1
    handle = adze.patch(model, numerics="fast")
    got, gemms, matmuls = ran(model, 20)
    assert gemms == 8 and matmuls == 1 and "products of up to 64 rows by gemm" in handle.report()
    assert (got - want).float().norm() < 0.02 * want.float().norm()
    assert ran(model, 33, batch=2)[1] == 0
