"""vLLM's contract: the schemas of its IR ops are those of our functions, and the numbers are its definition's."""

import pytest

torch = pytest.importorskip("torch")
import adze.vllm as plugin  # noqa: E402


def definition(h, weight, eps, dtype):
    f = h.float()
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    return (f if weight is None else f.to(weight.dtype) * weight).to(dtype)


def same(got, want):
    """Float arithmetic in another order turns few roundings, and those by one step."""
    assert got.dtype == want.dtype
    step = torch.finfo(want.dtype).eps * want.abs().float()
    assert ((got.float() - want.float()).abs() <= step).all() and (got == want).float().mean() > 0.99


@pytest.mark.parametrize("weight_dtype", [None, torch.bfloat16, torch.float32])
def test_numbers(weight_dtype):
    torch.manual_seed(0)
    x, r = torch.randn(64, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    weight = None if weight_dtype is None else torch.randn(256).to(weight_dtype)
    same(plugin.rms_norm(x, weight, 1e-6), definition(x, weight, 1e-6, x.dtype))
    out, total = plugin.fused_add_rms_norm(x, r, weight, 1e-6)
    same(out, definition(x.float() + r.float(), weight, 1e-6, x.dtype))
    assert torch.equal(total, (x.float() + r.float()).bfloat16())


def test_what_it_takes():
    x, w = torch.randn(4, 8).bfloat16(), torch.ones(8)
    assert plugin._supports_norm(x, w, 1e-6) and plugin._supports_norm(x, None, 1e-6)
    assert not plugin._supports_norm(x, w, 1e-6, 4) and not plugin._supports_norm(x.double(), w, 1e-6)
    assert not plugin._supports_norm(x.t(), w, 1e-6) and not plugin._supports_norm(x, w.double(), 1e-6)
    assert plugin._supports_sum(x, x, w, 1e-6) and not plugin._supports_sum(x, x.float(), w, 1e-6)


def test_schemas():
    """As torch reads them off our functions; vLLM compares strings."""
    read = {f: torch.library.infer_schema(f, mutates_args=()) for f in (plugin.rms_norm, plugin.fused_add_rms_norm)}
    assert read[plugin.rms_norm] == (
        "(Tensor x, Tensor? weight, float epsilon, SymInt? variance_size=None) -> Tensor"
    )
    assert read[plugin.fused_add_rms_norm] == (
        "(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, SymInt? variance_size=None) -> (Tensor, Tensor)"
    )


def test_vllm_takes_it():
    ir = pytest.importorskip("vllm.ir")
    plugin.register()
    plugin.register()
    assert "adze" in ir.ops.rms_norm.impls and "adze" in ir.ops.fused_add_rms_norm.impls
