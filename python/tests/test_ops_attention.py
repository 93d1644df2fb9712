"""attention and attention_merge against torch's own, and what only a binding or two calls show: pages that are like
one cache, parts that are like the whole, tensors that the kernel refuses. `adze check` verifies the kernels."""

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import adze  # noqa: E402
from device import generator  # noqa: E402


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def inputs(m, n, dtype=torch.float32, heads=4, kv_heads=2, d=64):
    return (
        randn(2, heads, m, d, dtype=dtype),
        randn(2, kv_heads, n, d, dtype=dtype, seed=1),
        randn(2, kv_heads, n, d, dtype=dtype, seed=2),
    )


def close(got, want, more=0):
    """One rounding to the dtype on each side, and float sums of a few hundred terms of size 1."""
    assert got.dtype == want.dtype and got.shape == want.shape
    limit = torch.finfo(got.dtype).eps * want.float().abs() + 2**-16 + more
    assert ((got.float() - want.float()).abs() <= limit).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 3, 33])
def test_like_torch(m, dtype):
    q, k, v = inputs(m, 90, dtype)

    def agrees(got, mask=None, scale=None):
        """With torch's, in double. On tensor cores each weight is rounded to the dtype before it multiplies v."""

        def attention(v):
            wide = [x.double() for x in (q, k, v)]
            added = mask if mask is None or mask.dtype == torch.bool else mask.double()
            return F.scaled_dot_product_attention(*wide, added, scale=scale, enable_gqa=True)

        on_tensor_cores = q.device.type == "cuda" and dtype != torch.float32
        close(got, attention(v).to(dtype), torch.finfo(dtype).eps / 2 * attention(v.abs()) if on_tensor_cores else 0)

    agrees(adze.attention(q, k, v))
    tokens = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(adze.attention(*tokens), adze.attention(q, k, v))
    mask = randn(2, 1, m, 90, seed=3)
    agrees(adze.attention(q, k, v, mask, scale=0.1), mask, 0.1)
    seen = mask > -1
    agrees(adze.attention(q, k, v, seen), seen)


def test_causal_counts_from_the_last_key():
    q, k, v = inputs(40, 40)
    whole = adze.attention(q, k, v, causal=True)
    close(whole, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    assert torch.equal(adze.attention(q[:, :, -9:], k, v, causal=True), whole[:, :, -9:])


@pytest.mark.parametrize("m", [1, 20])
def test_pages_are_like_one_cache(m):
    """Bit for bit, for lengths around a page's; pages that the lengths leave out may be anywhere."""
    page, lengths = 16, torch.tensor([15, 16, 17, 64, 0], dtype=torch.int32)
    k, v = randn(5, 2, 64, 32, seed=1), randn(5, 2, 64, 32, seed=2)
    q = randn(5, 6, m, 32)
    order = torch.randperm(20, generator=generator(4))
    table = order.to(torch.int32).reshape(5, 4).clone()
    pages = [torch.empty(20, 2, page, 32) for _ in range(2)]
    for cache, whole in zip(pages, (k, v), strict=True):
        cache[order] = whole.reshape(5, 2, 4, page, 32).transpose(1, 2).reshape(20, 2, page, 32)
    table[torch.arange(4) * page >= lengths[:, None]] = -7
    want = adze.attention(q, k, v, lengths=lengths, causal=True, need_lse=True)
    got = adze.attention(q, *pages, lengths=lengths, block_table=table, causal=True, need_lse=True)
    assert all(map(torch.equal, got, want))
    assert not got[0][4].any() and (got[1][4] == -torch.inf).all()


def test_packed_sequences_are_like_single_ones():
    q, k, v = randn(1, 4, 30, 40), randn(1, 2, 41, 40, seed=1), randn(1, 2, 41, 40, seed=2)
    rows, keys = [0, 7, 7, 28, 30], [0, 20, 21, 30, 41]
    offsets = [torch.tensor(at, dtype=torch.int32) for at in (rows, keys)]
    got = adze.attention(q, k, v, q_offsets=offsets[0], k_offsets=offsets[1], causal=True)
    for s in range(4):
        a, b = slice(rows[s], rows[s + 1]), slice(keys[s], keys[s + 1])
        assert torch.equal(got[:, :, a], adze.attention(q[:, :, a], k[:, :, b], v[:, :, b], causal=True))


def test_pages_and_offsets_that_are_wrong(on_the_cpu):
    """test_step_cuda.py has what a GPU does, whose tables the host does not see."""
    q, pages = randn(2, 2, 1, 32), randn(3, 2, 16, 32)
    table, lengths = torch.tensor([[0, 1], [2, 3]]).int(), torch.tensor([32, 17]).int()
    with pytest.raises(RuntimeError, match=r"block_table\[1, 1\] is 3, it must be 0 to 2"):
        adze.attention(q, pages, pages, lengths=lengths, block_table=table)
    q, offsets = randn(1, 2, 30, 32), [torch.tensor(at).int() for at in ([0, 7, 3, 9, 30], [0, 20, 21, 30, 41])]
    k = randn(1, 2, 41, 32, seed=1)
    with pytest.raises(RuntimeError, match=r"q_offsets\[2\] is 3, it must not be less than 7"):
        adze.attention(q, k, k, q_offsets=offsets[0], k_offsets=offsets[1])


def test_parts_are_merged_to_the_whole():
    q, k, v = inputs(5, 300)
    sinks = randn(4)
    parts = [adze.attention(q, k[:, :, :170], v[:, :, :170], sinks=sinks, need_lse=True),
             adze.attention(q, k[:, :, 170:], v[:, :, 170:], need_lse=True)]  # fmt: skip
    want, want_lse = adze.attention(q, k, v, sinks=sinks, need_lse=True)
    got, lse = adze.attention_merge(*parts[0], *parts[1], need_lse=True)
    close(got, want)
    close(lse, want_lse)


@pytest.mark.parametrize("kind", ["i8", "f8e4m3"])
@pytest.mark.parametrize("m", [1, 12])
def test_quantised_keys(m, kind):
    q, k, v = inputs(m, 50)
    (k8, k_scale), (v8, v_scale) = adze.quantize(k, kind), adze.quantize(v, kind)
    got = adze.attention(q, k8, v8, k_scale=k_scale, v_scale=v_scale)
    plain = [x.float() * scale[..., None] for x, scale in ((k8, k_scale), (v8, v_scale))]
    close(got, adze.attention(q, *plain))


def test_meta_and_compile():
    q, k, v = inputs(3, 20, torch.bfloat16)
    out, lse = adze.attention(*(x.to("meta") for x in (q, k, v[..., :40])), need_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 4, 3, 40), q.dtype, (2, 4, 3), torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k, v):
        return adze.attention(q, k, v, causal=True) + 1

    with torch.no_grad():
        assert torch.equal(step(q, k, v), adze.attention(q, k, v, causal=True) + 1)


def test_errors():
    q, k, v = inputs(3, 20)
    with pytest.raises(ValueError, match="scale is 0"):
        adze.attention(q, k, v, scale=0)
    with pytest.raises(RuntimeError, match="adze has no gradients"):
        adze.attention(q.requires_grad_(), k, v)
