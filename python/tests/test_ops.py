"""The torch operators: schemas, values, errors, fakes, compile. `adze check` verifies the kernels; these tests verify
that every argument reaches them."""

import gc
import inspect
import pathlib
import re
import resource
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import adze  # noqa: E402
from adze.operators import _ops, description, functions, header, ops  # noqa: E402
from device import default_device, generator  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROOT = pathlib.Path(__file__).parents[2]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def close(got, want):
    """The tolerance of one rounding after float arithmetic of at most 64 steps, on terms as large as the row's
    largest value. A swapped, dropped or misread argument exceeds it by far. `adze check` verifies exact bounds."""
    assert got.shape == want.shape
    row = want.abs().amax(-1, keepdim=True).clamp_min(1)
    limit = 0.5 * torch.finfo(got.dtype).eps * want.abs() + 64 * 2**-24 * row
    assert ((got.double() - want).abs() <= limit + torch.finfo(got.dtype).tiny).all()


def table(seq, dim):
    angle = torch.arange(seq)[:, None] * 1000.0 ** -(torch.arange(dim // 2) / dim)
    return torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)


def samples(dtype):
    """Arguments of each overload."""
    x, r, w = randn(2, 3, 64, dtype=dtype), randn(2, 3, 64, dtype=dtype, seed=1), randn(64, dtype=dtype, seed=2)
    scale, wide = randn(2, 1, 64, dtype=dtype, seed=3), randn(24, 64, dtype=dtype, seed=4)
    q, k = randn(2, 5, 4, 16, dtype=dtype), randn(2, 5, 2, 16, dtype=dtype, seed=1)
    cos, sin = table(5, 16)
    image = randn(2, 8, 4, 4, dtype=dtype)
    heads, keys, lse = q.transpose(1, 2), k.transpose(1, 2), randn(2, 3)
    pos, freq = torch.arange(6)[:, None], torch.linspace(1, 0.01, 8)
    empty, packed = torch.empty_like, (wide.abs() * 50).to(torch.uint8)[:, :32].contiguous()
    ids, seed = torch.arange(6).view(2, 3), torch.tensor([3])
    caches = [randn(2, 2, 9, 16, dtype=dtype, seed=5) for _ in range(2)]
    tokens = (
        *caches,
        None,
        None,
        None,
        k.transpose(1, 2),
        k.transpose(1, 2),
        torch.tensor([0, 4], dtype=torch.int32),
    )
    turned = (*tokens[:4], q.transpose(1, 2), *tokens[5:], None, None, None, None, cos, sin)
    return [
        ("rms_norm.default", (x, None, w), {"eps": 1e-6}),
        ("rms_norm.sum", (x, r, w), {"eps": 1e-6, "rounding": 3}),
        ("rms_norm.out", (x, r, w), {"eps": 1e-6, "out": empty(x), "sum": empty(x)}),
        ("layer_norm.default", (x, None, w, w), {"eps": 1e-6, "scale": scale, "shift": scale}),
        ("layer_norm.sum", (x, r), {"eps": 1e-6, "out_dtype": 1}),
        ("layer_norm.out", (x,), {"eps": 1e-6, "out": empty(x)}),
        ("group_norm.default", (image, None, None, 1e-5, 4), {"act": 1}),
        ("group_norm.out", (image, None, None, 1e-5, 4), {"out": empty(image)}),
        ("gated_add.default", (x, r, scale, w), {"rounding": 2}),
        ("gated_add.out", (x, r, scale), {"out": empty(x)}),
        ("activation.default", (x, 2), {}),
        ("activation.out", (x, 3), {"out": empty(x)}),
        ("glu.default", (x,), {"act": 1}),
        ("glu.out", (x, r), {"act": 2, "out": empty(x)}),
        ("softmax.default", (x, None, 0.5), {}),
        ("softmax.out", (x,), {"out": empty(x)}),
        ("gemm.default", (x, wide, wide), {"act": 1}),
        ("gemm.out2", (x, wide, wide), {"separate": 1, "out_dtype": 1}),
        ("gemm.out3", (x, wide, wide, randn(9, 64, dtype=dtype)), {"separate": 1, "norm": 1, "eps": 1e-6}),
        ("gemm.out", (x, wide), {"out": randn(2, 3, 24, dtype=dtype)}),
        ("rms_norm.out_scale", (x,), {"out_dtype": 5}),
        ("layer_norm.out_scale", (x, r), {"out_dtype": 4}),
        ("glu.out_scale", (x,), {"out_dtype": 5}),
        ("gemm.default", (x.to(torch.int8), wide.to(torch.int8)), {"w_scale": randn(24), "x_scale": randn(2, 3)}),
        ("quantize.default", (x, 5), {}),
        ("quantize.zero", (x, 11), {"format": 1, "group": 32, "zero_points": 1, "scale_dtype": 2}),
        ("quantize.out", (x, 5), {"out": empty(x, dtype=torch.int8), "scale": torch.empty(2, 3)}),
        ("dequantize.default", (packed, randn(24, 2), None, 32), {"format": 1, "k": 63, "out_dtype": 3}),
        ("dequantize.out", (packed.view(torch.int8), randn(24)), {"out": torch.empty(24, 32)}),
        ("attention.default", (heads, keys, keys), {"causal": 1}),
        ("attention.lse", (heads, keys, keys[..., :8]), {"scale": 0.5}),
        ("attention.out", (heads, keys, keys), {"out": empty(heads), "lse": torch.empty(2, 4, 5)}),
        ("attention_merge.default", (x, lse, r, lse), {}),
        ("attention_merge.lse", (x, lse, r, lse), {}),
        ("attention_merge.out", (x, lse, r, lse), {"out": empty(x)}),
        ("rope.default", (q, None, cos, sin), {}),
        ("rope.k_out", (q, k, cos, sin), {"rounding": 2}),
        ("rope.out", (q, k, cos, sin), {"q_out": empty(q), "k_out": empty(k)}),
        ("qk_norm_rope.default", (q, None, None, None, cos, sin, 1e-6), {}),
        ("qk_norm_rope.k_out", (q, k, None, None, cos, sin, 1e-6), {}),
        ("qk_norm_rope.out", (q, k, None, None, cos, sin, 1e-6), {"q_out": empty(q), "k_out": empty(k)}),
        ("rope_table.default", (pos, freq), {"columns": 1, "out_dtype": 3}),
        ("rope_table.out", (pos, freq), {"cos": torch.empty(6, 8), "sin": torch.empty(6, 8)}),
        ("embed.default", (wide, ids), {"scale": 3.3}),
        ("embed.out", (wide, ids), {"out": empty(x)}),
        ("kv_append.default", tokens, {}),
        ("kv_append.q_out", turned, {"rounding": 2}),
        ("kv_append.out", turned, {"norm": 1, "eps": 1e-6, "q_out": empty(q.transpose(1, 2))}),
        ("sample.default", (x[0],), {"out_dtype": 8}),
        ("sample.logprob", (x[0], seed, seed), {"temperature": 0.7, "top_p": 0.9}),
        ("sample.out", (x[0], seed), {"temperature": 0.7, "top_k": 4, "out": torch.empty(3, dtype=torch.int32)}),
    ]


SAMPLES = [name for name, _, _ in samples(torch.float32)]
every_sample = pytest.mark.parametrize("at", range(len(SAMPLES)), ids=SAMPLES)


def overload(name):
    packet, which = name.split(".")
    return getattr(getattr(_ops.ops, packet), which)


def test_every_overload_is_sampled():
    registered = {f"{op}.{form}" for op in description.OPS for form in getattr(_ops.ops, op).overloads()}
    assert registered == {name for name, _, _ in samples(torch.float32)}


@every_sample
def test_opcheck(at):
    """In bf16, where an output in float has another dtype than the input; a schema is the same in every dtype."""
    name, args, kwargs = samples(torch.bfloat16)[at]
    torch.library.opcheck(overload(name), args, kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_sample
def test_fake_is_what_comes_out(at, dtype):
    name, args, kwargs = samples(dtype)[at]
    real = overload(name)(*args, **kwargs)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        imagined = overload(name)(*args, **kwargs)
    for a, b in zip(*([t] if isinstance(t, torch.Tensor) else t or [] for t in (real, imagined)), strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


@pytest.mark.parametrize("n", [64, 128, 4096])
def test_layer_norm_of_extreme_rows_of_f16(n):
    """Rows for which torch's kernel on the CPU is wrong: it gives 0.71 for each element of a row of 65504, and is off
    by 0.09 near the mean in a row of 1000s with one 1001. The definition subtracts the mean first."""
    most = torch.finfo(torch.float16).max
    spike = torch.zeros(n)
    spike[0], spike[1] = most, -most
    above = torch.full((n,), 1000.0)
    above[0] = 1001
    signs = torch.where(randn(n) > 0, most, -most)
    x = torch.stack([torch.full((n,), most), torch.full((n,), -most), spike, above, signs]).half()
    found = adze.layer_norm(x, eps=1e-5).double()
    assert torch.equal(
        found[:2], torch.zeros_like(found[:2])
    )  # sums of equal numbers, as many as a power of two, are exact
    wide = x[2:].double()
    exact = torch.nn.functional.layer_norm(wide, (n,), eps=1e-5)
    unit = torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(2.0**-14))) - 10)
    # A float sum in 16 lanes or more and its mean, over the deviation; relative errors of the rest; half a unit.
    mean = (n / 16 + 6) * 2.0**-24 * wide.abs().mean(-1, keepdim=True) / wide.std(-1, keepdim=True, correction=0)
    assert ((found[2:] - exact).abs() <= 0.5 * unit + mean + (n / 16 + 8) * 2.0**-24 * exact.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype):
    x, r, w = (randn(3, 5, 64, dtype=dtype, seed=s) for s in range(3))
    w = w[0, 0]
    d, e = x.double(), w.double()
    close(adze.rms_norm(x, w, eps=1e-5), F.rms_norm(d, (64,), e, 1e-5))
    close(adze.layer_norm(x, w, w, eps=1e-5), F.layer_norm(d, (64,), e, e, 1e-5))
    out, total = adze.rms_norm(x, w, residual=r, eps=1e-5)
    assert torch.equal(total, x + r)
    close(out, F.rms_norm((x + r).double(), (64,), e, 1e-5))
    assert torch.equal(adze.rms_norm(x, w, residual=r, eps=1e-5, need_sum=False), out)
    gamma, beta = randn(3, 1, 64, dtype=dtype, seed=4), randn(3, 1, 64, dtype=dtype, seed=5)
    close(
        adze.layer_norm(x, scale=gamma, shift=beta, eps=1e-5),
        F.layer_norm(d, (64,), eps=1e-5) * (1 + gamma.double()) + beta.double(),
    )
    close(adze.activation(x, "gelu_new"), F.gelu(d, approximate="tanh"))
    close(adze.glu(torch.cat([r, x], -1), act="gelu", value_first=True), r.double() * F.gelu(d))
    close(adze.glu(x, r), F.silu(d) * r.double())
    close(adze.softmax(x, scale=0.3), (d * torch.tensor(0.3).double()).softmax(-1))
    image = randn(2, 8, 4, 6, dtype=dtype)
    want = F.silu(F.group_norm(image.double(), 4, e[:8], e[8:16]))
    close(adze.group_norm(image, 4, w[:8], w[8:16], act="silu"), want)
    last = image.permute(0, 2, 3, 1)
    got = adze.group_norm(last.contiguous(), 4, w[:8], w[8:16], act="silu", channels_last=True)
    close(got.permute(0, 3, 1, 2), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_gated_add(wide, dtype):
    x, r = randn(2, 7, 200, dtype=dtype), randn(2, 7, 200, dtype=dtype, seed=1)
    side = torch.float32 if wide else dtype
    more = randn(200, dtype=side, seed=3)
    for shape in ((2, 1, 200), (2, 7, 200), (200,)):
        gate = randn(*shape, dtype=side, seed=2)
        once = (r.float() + gate.float() * x.float()).to(dtype)
        assert torch.equal(adze.gated_add(x, r, gate), once)
        once = (r.float() + (gate.float() + more.float()) * x.float()).to(dtype)
        assert torch.equal(adze.gated_add(x, r, gate, gate_table=more), once)
        steps = r + (gate * x).to(dtype)
        assert torch.equal(adze.gated_add(x, r, gate, rounding=adze.ROUND_STEPS), steps)
        steps = r + (gate + more).to(dtype) * x
        assert torch.equal(adze.gated_add(x, r, gate, gate_table=more, rounding=adze.ROUND_STEPS), steps)
        own = r.clone()
        assert adze.gated_add(x, own, gate, out=own) is own and torch.equal(own, adze.gated_add(x, r, gate))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_gated_add_is_the_sum_of_a_norm(norm, dtype):
    """Products of these dtypes are exact in float, so a norm may add them in one instruction; in steps it may not."""
    x, r = randn(2, 7, 200, dtype=dtype), randn(2, 7, 200, dtype=dtype, seed=1)
    gate, more = randn(2, 1, 200, dtype=dtype, seed=2), randn(200, dtype=dtype, seed=3)
    for options in ({}, {"rounding": adze.ROUND_STEPS}, {"rounding": adze.ROUND_STEPS, "gate_table": more}):
        _, total = getattr(adze, norm)(x, residual=r, gate=gate, **options)
        assert torch.equal(adze.gated_add(x, r, gate, **options), total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype):
    x, r = randn(2, 3, 96, dtype=dtype), randn(2, 3, 40, dtype=dtype, seed=1)
    w, v, u = (randn(n, 96, dtype=dtype, seed=2) for n in (40, 40, 7))
    b, g = randn(40, dtype=dtype, seed=3), randn(2, 1, 40, dtype=dtype, seed=4)

    def sums(a, m):
        """Products in double, and what 96 terms in float may be off."""
        return a.double() @ m.double().T, 96 * 2**-24 * (a.double().abs() @ m.double().abs().T).amax()

    def near(got, want, off):
        eps = torch.finfo(got.dtype).eps if got.dtype == dtype else 0
        assert got.shape == want.shape and ((got.double() - want).abs() <= eps * want.abs() + off).all()

    y, off = sums(x, w)
    near(adze.linear(x, w), y, off)
    near(adze.linear(x, w, b, act="silu", out_dtype=torch.float32), F.silu(y + b.double()), 4 * off)
    near(adze.linear(x, w, residual=r, gate=g), r.double() + g.double() * y, 8 * off)
    near(adze.linear(x, w, w2=v, w3=u), torch.cat([sums(x, m)[0] for m in (w, v, u)], -1), off)
    for got, m in zip(adze.linear(x, w, w2=v, w3=u, separate=True), (w, v, u), strict=True):
        near(got, sums(x, m)[0], off)
    near(adze.linear(x, w, w2=v, glu=True), F.silu(y) * sums(x, v)[0], 100 * off)
    normed = adze.rms_norm(x, x[0, 0], eps=1e-5)
    assert torch.equal(adze.linear(x, w, norm="rms", norm_weight=x[0, 0], eps=1e-5), adze.linear(normed, w))
    batch = randn(2, 11, 96, dtype=dtype, seed=5)
    near(adze.linear(x, batch), x.double() @ batch.double().mT, off)
    out = torch.empty(2, 3, 40, dtype=dtype)
    assert adze.linear(x, w, out=out) is out and torch.equal(out, adze.linear(x, w))
    second = torch.empty_like(out)
    pair = adze.linear(x, w, w2=v, separate=True, out=out, out2=second)
    assert pair[0] is out and pair[1] is second and torch.equal(second, adze.linear(x, v))
    own = r.clone()
    assert adze.linear(x, w, residual=own, out=own) is own and torch.equal(own, adze.linear(x, w, residual=r))
    with pytest.raises(RuntimeError, match="rows of w have 95 elements, they must have 96"):
        adze.linear(x, w[:, :95])
    with pytest.raises(ValueError, match="norm is 'batch', it must be one of rms, layer"):
        adze.linear(x, w, norm="batch")
    with pytest.raises(RuntimeError, match="the arguments give out2 too; take the form that returns it"):
        _ops.ops.gemm.default(x, w, v, separate=1)


@pytest.mark.parametrize("kind", ["i8", "f8e4m3"])
def test_quantised_rows(kind):
    """A norm or a glu whose rows are quantised is the op, then quantize. On CUDA its sums may have another order."""
    dtype = {"i8": torch.int8, "f8e4m3": torch.float8_e4m3fn}[kind]
    x, r, w = randn(2, 3, 96), randn(2, 3, 96, seed=1), randn(96, seed=2)

    def same(got, y):
        scale = adze.quantize(y, kind)[1]
        torch.testing.assert_close(got[1], scale, rtol=1e-6, atol=0)
        half_step = 0.5 * scale[..., None] if kind == "i8" else y.abs() / 16 + 2**-10 * scale[..., None]
        assert got[0].dtype == dtype
        assert ((got[0].float() * got[1][..., None] - y).abs() <= 1.001 * half_step).all()

    for norm in (adze.rms_norm, adze.layer_norm):
        same(norm(x, w, out_dtype=dtype), norm(x, w))
        y, h = norm(x, w, residual=r)
        q, total, scale = norm(x, w, residual=r, out_dtype=dtype)
        same((q, scale), y)
        assert torch.equal(total, h)
        same(norm(x, w, residual=r, need_sum=False, out_dtype=dtype), y)
        out, out_scale = torch.empty(2, 3, 96, dtype=dtype), torch.empty(2, 3)
        norm(x, w, out_dtype=dtype, out=out, out_scale=out_scale)
        same((out, out_scale), norm(x, w))
    same(adze.glu(x, r, out_dtype=dtype), adze.glu(x, r))
    same(adze.glu(x[0, 0], act="gelu", out_dtype=dtype), adze.glu(x[0, 0], act="gelu"))
    with pytest.raises(ValueError, match="out_dtype is 'float32', it must be one of int8, float8_e4m3fn"):
        adze.glu(x.half(), out_dtype=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_linear(dtype):
    w, x = randn(200, 300, dtype=dtype), randn(3, 300, dtype=dtype, seed=1)

    def agrees(weight, **options):
        """Products in double, what 300 terms in float may be off, and a rounding."""
        got, want = adze.linear(x, **options).double(), x.double() @ weight.T
        off = 320 * 2**-24 * (x.double().abs() @ weight.abs().T).amax()
        assert ((got - want).abs() <= torch.finfo(dtype).eps * want.abs() + off).all()

    q, scale = adze.quantize(w, "i8")
    assert q.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (200,)
    # In double: on CUDA torch does not divide by a number, it multiplies by the rounded inverse.
    assert torch.equal(scale, (w.double().abs().amax(-1) / 127).float())
    assert torch.equal(q, (w.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8))
    agrees(q.double() * scale.double()[:, None], w=q, w_scale=scale)

    q, scale = adze.quantize(w, "f8e4m3", group=128, group_rows=128, scale_dtype=torch.bfloat16)
    assert q.dtype == torch.float8_e4m3fn and scale.shape == (2, 3) and scale.dtype == torch.bfloat16
    wide = scale.double().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(q.float(), (w.float() / wide.float()).clamp(-448, 448).to(torch.float8_e4m3fn).float())
    agrees(q.double() * wide, w=q, w_scale=scale, group=128, group_rows=128)
    q, scale = adze.quantize(w, "f8e4m3", group_rows=-1)
    assert scale.shape == (1,) and torch.equal(scale, (w.double().abs().amax()[None] / 448).float())
    agrees(q.double() * scale.double(), w=q, w_scale=scale)

    for kind in ("i8", "f8e4m3"):  # x too
        (a, a_scale), (b, b_scale) = adze.quantize(x, kind), adze.quantize(w, kind)
        want = (a.double() * a_scale.double()[..., None]) @ (b.double() * b_scale.double()[:, None]).T
        off = 320 * 2**-24 * (x.double().abs() @ w.double().abs().T).amax()
        for out_dtype in (None, dtype):
            got = adze.linear(a, b, w_scale=b_scale, x_scale=a_scale, out_dtype=out_dtype)
            assert got.dtype == (out_dtype or torch.float32) and got.shape == want.shape
            assert ((got.double() - want).abs() <= torch.finfo(got.dtype).eps * want.abs() + off).all()

    q, scale, zero = adze.quantize(w, "u4", group=64, zero_points=True)
    assert q.shape == (200, 150) and scale.shape == zero.shape == (200, 5) and zero.dtype == torch.uint8
    stored = torch.stack([q & 15, q >> 4], -1).flatten(-2)

    def each(t):
        return t.double().repeat_interleave(64, 1)[:, :300]

    weight = (stored.double() - each(zero)) * each(scale)
    assert ((weight - w.double()).abs() <= 0.51 * each(scale) + 2**-20).all()
    agrees(weight, w=q, w_scale=scale, w_zero=zero, group=64, format="u4")
    q, scale = adze.quantize(w, "u4", group=32)
    agrees(
        (torch.stack([q & 15, q >> 4], -1).flatten(-2).double() - 8)
        * scale.double().repeat_interleave(32, 1)[:, :300],
        w=q,
        w_scale=scale,
        group=32,
        format="u4",
    )
    with pytest.raises(ValueError, match="kind is 'int8', it must be one of i8, f8e4m3, u4"):
        adze.quantize(w, "int8")
    with pytest.raises(RuntimeError, match="w_scale is absent, w of u8 needs it"):
        adze.linear(x, q, format="u4")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_values(dtype):
    q, k = randn(2, 5, 4, 16, dtype=dtype), randn(2, 5, 2, 16, dtype=dtype, seed=1)
    cos, sin = table(5, 16)

    def rotated(x):
        a, b = x.double().chunk(2, -1)
        return x.double() * cos.double()[:, None] + torch.cat([-b, a], -1) * sin.double()[:, None]

    for got, want in zip(adze.rope(q, k, cos, sin), (rotated(q), rotated(k)), strict=True):
        close(got, want)
    first = adze.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, heads_first=True)
    for a, b in zip(first, adze.rope(q, k, cos, sin), strict=True):
        assert torch.equal(a.transpose(1, 2), b)
    assert torch.equal(adze.rope(q, None, cos, sin), adze.rope(q, k, cos, sin)[0])
    w = randn(16, dtype=dtype, seed=3)
    for got, x in zip(
        adze.qk_norm_rope(q, k, w, w, cos, sin, eps=1e-6, rounding=adze.ROUND_VALUE), (q, k), strict=True
    ):
        close(got, rotated(adze.rms_norm(x, w, eps=1e-6)))
    freq = 1000.0 ** -(torch.arange(8) / 16)
    for got, want in zip(adze.rope_table(torch.arange(5)[:, None], freq, columns="halves"), (cos, sin), strict=True):
        close(got, want.double())


def test_out_forms():
    x, r, w = randn(2, 64), randn(2, 64, seed=1), randn(64, seed=2)
    out, total = torch.empty(2, 64), torch.empty(2, 64)
    got = adze.rms_norm(x, w, residual=r, out=out, sum_out=total)
    assert got[0] is out and got[1] is total
    assert all(map(torch.equal, got, adze.rms_norm(x, w, residual=r)))
    for f in (
        lambda **kw: adze.activation(x, "silu", **kw),
        lambda **kw: adze.softmax(x, **kw),
        lambda **kw: adze.glu(x, r, **kw),
        lambda **kw: adze.gated_add(x, r, w, **kw),
    ):
        assert f(out=out) is out and torch.equal(out, f())
    q, cos = randn(1, 3, 2, 8), randn(3, 8)
    own = q.clone()
    assert adze.rope(own, None, cos, cos, q_out=own) is own and torch.equal(own, adze.rope(q, None, cos, cos))
    with pytest.raises(ValueError, match="sum_out is given without out"):
        adze.rms_norm(x, residual=r, sum_out=total)


def test_views_need_no_copy():
    qkv = randn(2, 7, 3 * 64, dtype=torch.bfloat16)
    six = randn(2, 6 * 64, dtype=torch.bfloat16, seed=1)
    scale, shift = six.unsqueeze(1).chunk(6, -1)[1:3]
    x = qkv[..., 64:128]
    want = adze.layer_norm(x.contiguous(), scale=scale.contiguous(), shift=shift.contiguous())
    assert torch.equal(adze.layer_norm(x, scale=scale, shift=shift), want)


def test_empty():
    for x in (torch.empty(0, 64), torch.empty(64, 0).t(), torch.empty(3, 0, 64).as_strided((3, 0, 64), (0, 0, 0))):
        assert adze.rms_norm(x, torch.ones(64)).shape == x.shape
        assert adze.activation(x, "silu").shape == x.shape


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda x: adze.rms_norm(x, torch.ones(63)), "rms_norm: weight has 63 elements"),
        (lambda x: adze.rms_norm(x.t()), "contiguous|stride"),
        (lambda x: adze.rms_norm(x.to(torch.int64)), "rms_norm: x is i64"),
        (lambda x: adze.rms_norm(x.to(torch.complex64)), "rms_norm: x has a dtype that adze does not have"),
        (lambda x: adze.rms_norm(x[None, None, None, None]), "rms_norm: x has rank 6"),
        (lambda x: adze.rms_norm(x, eps=-1.0), "eps is -1"),
        (lambda x: adze.rms_norm(x, rounding=1 << 40), "rounding is 1099511627776, it must fit in 32 bits"),
        (lambda x: adze.rms_norm(x, rounding=64), "rounding"),
        (lambda x: adze.rms_norm(x, x, out=torch.empty(2, 2)), "weight"),
        (lambda x: adze.rms_norm(x, out=torch.empty(2, 2)), "out has 2 in dimension 0"),
        (lambda x: adze.gated_add(x, x[:2], x[0]), "gated_add: residual has 2 in dimension 0"),
        (lambda x: _ops.ops.rope.default(x[:, None], x[:, None], x, x), "the arguments give k_out too"),
        (lambda x: _ops.ops.rms_norm.sum(x), "the arguments give sum no value"),
    ],
)
def test_errors_are_sentences(call, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        call(randn(4, 64))


def test_unknown_words():
    with pytest.raises(ValueError, match="act is 'tanhh', it must be one of silu"):
        adze.activation(randn(2, 4), "tanhh")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        adze.nothing  # noqa: B018


def test_every_op_has_a_function():
    assert list(header.OPS) == list(description.OPS)
    for name, op in description.OPS.items():
        function = getattr(adze, name)
        assert function.__doc__.endswith(header.OPS[name])
        outputs = set(map(functions.parameter, op.outputs)) & set(inspect.signature(function).parameters)
        assert len(outputs) == (0 if name == "rope_table" else len(op.outputs))


def test_numbers_are_those_of_the_header():
    text = subprocess.run(
        [sys.executable, ROOT / "bind/header.py"], capture_output=True, text=True, check=True
    ).stdout
    assert text == pathlib.Path(header.__file__).read_text()
    defined = dict(re.findall(r"#define ADZE_(\w+) +(\d+)", (ROOT / "include/adze.h").read_text()))
    for name in ("ROUND_NORM", "ROUND_STEPS", "ROUND_VALUE", "FLOAT_SUM"):
        assert getattr(adze, name) == int(defined[name])
    assert ops.ACTS["gelu_new"] == ops.ACTS["gelu_tanh"] == 3 and ops.COLUMNS == {"once": 0, "halves": 1, "pairs": 2}


def test_inputs_on_several_devices():
    """torch calls the fake function where one of them is on the meta device: no memory that nothing wrote to."""
    x, there = randn(2, 8), torch.empty(8, device="meta")
    for call in (lambda: adze.rms_norm(x, there), lambda: adze.rms_norm(x, there, out=torch.empty_like(x))):
        with pytest.raises(RuntimeError, match="rms_norm: weight is on meta, "):
            call()
    assert adze.rms_norm(x.to("meta"), there).device.type == "meta"


def test_no_silent_gradients():
    x = randn(2, 8).requires_grad_()
    for call in (lambda: adze.rms_norm(x), lambda: adze.activation(x, "silu"), lambda: adze.glu(x)):
        with pytest.raises(RuntimeError, match="adze has no gradients"):
            call()
        with torch.no_grad():
            call()
        with torch.inference_mode():
            call()
    with default_device(None), pytest.raises(Exception, match="adze has no gradients"):
        torch.compile(lambda y: _ops.ops.rms_norm(y), backend="aot_eager", fullgraph=True)(x)


def test_no_silent_tangents():
    """Those of torch.func.jvp, which come with the values; a tensor without one is taken."""
    x, other = randn(2, 8), randn(2, 8)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), pytest.raises(RuntimeError, match="adze has no gradients"):
            torch.func.jvp(adze.rms_norm, (x,), (other,))
    _, tangent = torch.func.jvp(lambda y: y * adze.activation(other, "silu"), (x,), (other,))
    torch.testing.assert_close(tangent, other * torch.nn.functional.silu(other))


def test_compile_fullgraph_dynamic():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def block(x, r, w, cos, sin):
        y, r = adze.rms_norm(x * 2, w, residual=r)
        q = y.view(*y.shape[:-1], 4, 16)
        q, k = adze.qk_norm_rope(q, q, None, None, cos, sin)
        return adze.glu(q.flatten(-2)) + r[..., :32], adze.softmax(k), adze.activation(r, "gelu")

    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=True)
    for seq in (3, 5, 8):
        args = (randn(2, seq, 64), randn(2, seq, 64, seed=1), randn(64), *table(seq, 16))
        with default_device(None):
            got = compiled(*args)
        assert all(map(torch.equal, got, block(*args)))
    assert len(graphs) == 1


def test_inductor():
    def block(x, w):
        return adze.rms_norm(x * 2 + 1, w).transpose(0, 1).relu()

    x, w = randn(6, 64), randn(64)
    with default_device(None):
        assert torch.equal(torch.compile(block, fullgraph=True)(x, w), block(x, w))


def test_threads_agree():
    x, w = randn(512, 256, dtype=torch.bfloat16), randn(256, dtype=torch.bfloat16, seed=1)
    want, wrong, before = adze.rms_norm(x, w), [], torch.get_num_threads()
    torch.set_num_threads(2)

    def work():
        for _ in range(20):
            if not torch.equal(adze.rms_norm(x, w), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    torch.set_num_threads(before)
    assert not wrong


def test_nothing_leaks():
    x, w = randn(64, 256), randn(256)

    def round_trip():
        for _ in range(500):
            adze.rms_norm(x, w, residual=x)
            with pytest.raises(RuntimeError):
                adze.rms_norm(x, w[:3])
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    round_trip()
    before = round_trip()
    for _ in range(4):
        after = round_trip()
    assert after - before < 4096, f"{after - before} KiB in 2000 calls and 2000 errors"


def test_import_needs_nothing():
    code = "import sys, adze; print(adze.__version__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [adze.__version__, "False"]
