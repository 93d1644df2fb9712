"""embed, kv_append and sample: what a decode step is made of, against torch, the other ops and transformers."""

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import adze  # noqa: E402
from device import default_device, generator  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def tables(slots, dim, dtype=torch.float32):
    angle = torch.arange(slots)[:, None] * 1000.0 ** -(torch.arange(dim // 2) / dim)
    return torch.cat([angle.cos()] * 2, -1).to(dtype), torch.cat([angle.sin()] * 2, -1).to(dtype)


# ---- embed ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(dtype):
    """With the scale in the table's dtype, as transformers' Gemma has it."""
    table = randn(50, 37, dtype=dtype)
    ids = torch.tensor([[3, 49, 0], [3, 7, 11]])
    assert torch.equal(adze.embed(table, ids), F.embedding(ids, table))
    scale = torch.tensor(37**0.5)
    want = F.embedding(ids, table) * scale.to(dtype)
    assert torch.equal(adze.embed(table, ids.int(), scale=scale.item()), want)
    out = torch.empty(3, 2, 40, dtype=dtype)[:, :, :37]
    assert adze.embed(table, ids.T.contiguous(), scale=scale.item(), out=out) is out
    assert torch.equal(out, want.transpose(0, 1))
    with pytest.raises(ValueError, match="scale is 0"):
        adze.embed(table, ids, scale=0)


@pytest.mark.parametrize("wrong", [50, -1])
def test_embed_of_an_id_that_is_no_row(wrong, on_the_cpu):
    """test_step_cuda.py has what a GPU does, whose ids the host does not see."""
    with pytest.raises(RuntimeError, match=f"id {wrong}, of token 1, is no row of table, which has 50"):
        adze.embed(randn(50, 37), torch.tensor([1, wrong]))


# ---- kv_append ----


def appended(cache, new, slots):
    """The cache with the rows of `new` [batch, heads, m, d] at `slots` [batch, m]."""
    cache = cache.clone()
    for b, places in enumerate(slots):
        cache[b, :, places] = new[b]
    return cache


def same(got, want):
    """Bit for bit; but f32 on a GPU, where the two kernels may fuse a product into a sum each in its own way, and add
    the squares of a norm in another order: an error of a few units in the last place of the largest element."""
    if got.device.type == "cpu" or got.dtype != torch.float32:
        return torch.equal(got, want)
    return bool(((got - want).abs() <= 2**-20 * want.abs().amax(-1, keepdim=True)).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_append(dtype):
    q, k, v = randn(2, 4, 3, 16, dtype=dtype), randn(2, 2, 3, 16, dtype=dtype, seed=1), randn(2, 2, 3, 8, dtype=dtype)
    k_cache, v_cache = randn(2, 2, 9, 16, dtype=dtype, seed=2), randn(2, 2, 9, 8, dtype=dtype, seed=3)
    cos, sin = tables(9, 16)
    lengths = torch.tensor([4, 0], dtype=torch.int32)
    slots = lengths[:, None] + torch.arange(3, dtype=torch.int32)
    weight = randn(16, dtype=dtype, seed=4)
    options = {"norm": True, "q_weight": weight, "k_weight": weight, "rounding": adze.ROUND_NORM}
    rows = {"heads_first": True, "rounding": adze.ROUND_NORM}
    for norm in (False, True):
        if norm:
            turned = adze.qk_norm_rope(q, k, weight, weight, cos[slots], sin[slots], **rows)
        else:
            turned = adze.rope(q, k, cos[slots], sin[slots], heads_first=True)
        want = turned[0], appended(k_cache, turned[1], slots), appended(v_cache, v, slots)
        more = options if norm else {}
        for place in ({"lengths": lengths}, {"positions": slots}):
            for table in (
                {"cos": cos, "sin": sin, "table_by_slot": True},
                {"cos": cos[slots].contiguous(), "sin": sin[slots].contiguous()},
            ):
                caches = k_cache.clone(), v_cache.clone()
                got = adze.kv_append(k, v, *caches, q=q, **place, **table, **more)
                assert same(got, want[0]) and same(caches[0], want[1]) and torch.equal(caches[1], want[2])
    caches = k_cache.clone(), v_cache.clone()
    assert adze.kv_append(k, v, *caches, positions=slots) is None
    assert torch.equal(caches[0], appended(k_cache, k, slots)) and torch.equal(caches[1], appended(v_cache, v, slots))
    own = q.clone()
    adze.kv_append(k, v, *caches, q=own, q_out=own, positions=slots, cos=cos, sin=sin, table_by_slot=True)
    assert same(own, adze.rope(q, None, cos[slots], sin[slots], heads_first=True))


def test_kv_append_in_pages_and_other_layouts():
    """Pages, and a cache with slots before heads, hold the same bits as a contiguous one."""
    q, k, v = randn(2, 4, 5, 16), randn(2, 2, 5, 16, seed=1), randn(2, 2, 5, 16, seed=2)
    cos, sin = tables(12, 16)
    lengths = torch.tensor([6, 2], dtype=torch.int32)
    plain = torch.zeros(2, 2, 12, 16), torch.zeros(2, 2, 12, 16)
    options = {"q": q, "lengths": lengths, "cos": cos, "sin": sin, "table_by_slot": True, "norm": True}
    want = adze.kv_append(k, v, *plain, **options)
    table = torch.tensor([[5, 0, 3], [6, 2, 1]], dtype=torch.int32)
    pages = torch.zeros(8, 2, 4, 16), torch.zeros(8, 2, 4, 16)
    assert torch.equal(adze.kv_append(k, v, *pages, block_table=table, **options), want)
    for page, cache in zip(pages, plain, strict=True):
        assert torch.equal(page[table.long()].transpose(1, 2).reshape(2, 2, 12, 16), cache)
        assert not page[[4, 7]].any()
    other = torch.zeros(2, 12, 2, 16), torch.zeros(2, 12, 2, 16)
    adze.kv_append(k, v, *(cache.transpose(1, 2) for cache in other), **options)
    assert all(torch.equal(a.transpose(1, 2), b) for a, b in zip(other, plain, strict=True))


@pytest.mark.parametrize("kind", ["i8", "f8e4m3"])
def test_kv_append_in_fewer_bits(kind):
    dtype = {"i8": torch.int8, "f8e4m3": torch.float8_e4m3fn}[kind]
    k, v = randn(2, 2, 3, 64, dtype=torch.bfloat16), randn(2, 2, 3, 40, dtype=torch.bfloat16, seed=1)
    cos, sin = tables(3, 64, torch.bfloat16)
    turned = adze.rope(k, None, cos, sin, heads_first=True, rounding=adze.ROUND_STEPS)
    caches = torch.zeros(2, 2, 9, 64).to(dtype), torch.zeros(2, 2, 9, 40).to(dtype)
    scales = torch.zeros(2, 2, 9), torch.zeros(2, 2, 9)
    lengths = torch.tensor([1, 5], dtype=torch.int32)
    adze.kv_append(k, v, *caches, k_scale=scales[0], v_scale=scales[1], lengths=lengths, cos=cos, sin=sin,
                   rounding=adze.ROUND_STEPS)  # fmt: skip
    slots = lengths[:, None] + torch.arange(3)
    for cache, scale, x in zip(caches, scales, (turned, v), strict=True):
        q, s = adze.quantize(x, kind)
        assert torch.equal(cache.float(), appended(torch.zeros(cache.shape), q.float(), slots))
        assert torch.equal(scale, appended(torch.zeros(scale.shape), s, slots))


def test_kv_append_refuses_before_it_writes(on_the_cpu):
    """test_step_cuda.py has what a GPU does, whose slots the host does not see."""
    k = randn(2, 2, 3, 16)
    cache, other = torch.zeros(2, 2, 9, 16), torch.zeros(2, 2, 9, 16)
    for slot in (7, -1):
        with pytest.raises(RuntimeError, match="batch entry 1 has slot (9|-1), there are 9"):
            adze.kv_append(k, k, cache, other, lengths=torch.tensor([0, slot], dtype=torch.int32))
    table = torch.tensor([[0], [2]], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"block_table\[1, 0\] is 2, the cache has 2 pages"):
        adze.kv_append(k, k, cache, other, lengths=torch.zeros(2, dtype=torch.int32), block_table=table)
    cos, sin = tables(4, 16)
    with pytest.raises(RuntimeError, match="token 2 of batch entry 1 has slot 4, cos and sin have 4"):
        lengths = torch.tensor([1, 2], dtype=torch.int32)
        adze.kv_append(k, k, cache, other, lengths=lengths, cos=cos, sin=sin, table_by_slot=True)
    assert not cache.any() and not other.any()


def test_kv_append_needs_memory_of_its_own():
    k = randn(2, 2, 3, 16)
    cache, other = torch.zeros(2, 2, 9, 16), torch.zeros(2, 2, 9, 16)
    lengths = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="k_cache overlaps v_cache; it needs memory of its own"):
        adze.kv_append(k, k, cache, cache, lengths=lengths)
    with pytest.raises(RuntimeError, match="elements of k_cache share memory"):
        adze.kv_append(k, k, cache[:1].expand(2, -1, -1, -1), other, lengths=lengths)
    with pytest.raises(RuntimeError, match="take the form that returns it"):
        torch.ops.adze.kv_append(cache, other, None, None, k, k, k, lengths)


# ---- sample ----


def philox(counter, key):
    """Philox 4x32-10, as its authors publish it."""
    words, key = list(counter), list(key)
    for _ in range(10):
        a, b = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        mask = 0xFFFFFFFF
        words = [(b >> 32) ^ words[1] ^ key[0], b & mask, (a >> 32) ^ words[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return words


def uniform(seed, counter, row):
    def pair(value):
        return value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF

    return (philox((*pair(counter), *pair(row)), pair(seed))[0] >> 8) * 2.0**-24


def test_philox():
    """The known answers of the generator, and the tokens of equal logits, which are the first bits of its numbers."""
    assert philox((0,) * 4, (0,) * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    logits = torch.zeros(5, 4096)
    for seed, counter in ((0, 0), (-3, 7), (0x123456789ABCDEF, 1 << 40), (1, -1)):
        got = adze.sample(logits, temperature=1.0, seed=torch.tensor([seed]), counter=torch.tensor([counter]))
        assert got.tolist() == [int(uniform(seed, counter, row) * 4096) for row in range(5)]
    seeds, counters = torch.arange(5), torch.tensor([4, 4, 5, -5, 1], dtype=torch.int32)
    got = adze.sample(logits, temperature=1.0, seed=seeds, counter=counters, dtype=torch.int64)
    own = [int(uniform(s, c, 0) * 4096) for s, c in zip(seeds.tolist(), counters.tolist(), strict=True)]
    assert got.dtype == torch.int64 and got.tolist() == own


FILTERS = [
    {},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.02, "penalty": 1.3},
    {"penalty": 0.7, "top_p": 0.9},
]


@pytest.mark.parametrize("options", FILTERS, ids=lambda options: "-".join(options) or "none")
def test_sample_as_transformers(options):
    """The tokens are those of the same numbers in the probabilities that transformers' processors leave."""
    process = pytest.importorskip("transformers.generation.logits_process")
    logits, previous = 3 * randn(64, 400), torch.randint(0, 400, (64, 12), generator=generator(1))
    processors = [process.RepetitionPenaltyLogitsProcessor(options["penalty"])] if "penalty" in options else []
    processors.append(process.TemperatureLogitsWarper(0.9))
    for name, kind in (("top_k", "TopK"), ("top_p", "TopP"), ("min_p", "MinP")):
        if name in options:
            processors.append(getattr(process, f"{kind}LogitsWarper")(options[name]))
    scores = process.LogitsProcessorList(processors)(previous, logits.clone())
    sums = scores.double().softmax(-1).cumsum(-1)
    want = [int((sums[row] <= uniform(11, 3, row) * sums[row, -1]).sum()) for row in range(64)]
    if "penalty" in options:
        options = {**options, "previous": previous}
    seed, counter = torch.tensor([11]), torch.tensor([3])
    got, logprob = adze.sample(logits, temperature=0.9, seed=seed, counter=counter, logprob=True, **options)
    assert got.tolist() == want and len(set(want)) > 20
    exact = logits.double().log_softmax(-1).gather(-1, got[:, None].long())[:, 0]
    assert logprob.dtype == torch.float32 and ((logprob - exact).abs() <= 2**-20 * exact.abs().clamp_min(1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sample_the_largest(dtype):
    logits = randn(7, 5000, dtype=dtype)
    logits[2, 4000] = logits[2, 3] = 50
    logits[3] = 0
    logits[4, :10] = float("nan")
    want = logits.nan_to_num(nan=float("-inf")).argmax(-1)
    want[2], want[3] = 3, 0
    assert torch.equal(adze.sample(logits, dtype="int64"), want)
    out, logprob = torch.empty(7, dtype=torch.int32), torch.empty(7)
    got = adze.sample(logits, logprob=True, out=out, logprob_out=logprob)
    assert got[0] is out and got[1] is logprob and torch.equal(out.long(), want)
    counts, previous = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([[1, 0], [1, 0]])
    scores = torch.tensor([[2.0, 3.0, 1.0], [2.0, 3.0, 1.0]], dtype=dtype)
    assert adze.sample(scores, previous=previous, previous_count=counts, penalty=2.0).tolist() == [0, 1]
    with pytest.raises(RuntimeError, match="seed is absent, temperature 1 needs it"):
        adze.sample(scores, temperature=1.0)
    with pytest.raises(ValueError, match="dtype is 'float32', it must be one of int32, int64"):
        adze.sample(scores, dtype=torch.float32)


def test_sample_refuses_a_count(on_the_cpu):
    """test_step_cuda.py has what a GPU does, whose counts the host does not see."""
    for wrong in (3, -1):
        counts = torch.tensor([wrong, 0], dtype=torch.int32)
        with pytest.raises(RuntimeError, match=f"previous_count.0. is {wrong}, it must be 0 to 2"):
            adze.sample(randn(2, 3), previous=torch.zeros(2, 2).int(), previous_count=counts, penalty=2.0)


# ---- A step ----


def test_compiled_step():
    """A whole token in one graph: the cache is changed in place, and the next call continues it."""
    table, weight = randn(64, 16), randn(16, 3 * 16, seed=1)
    cos, sin = tables(8, 16)

    def step(ids, lengths, k_cache, v_cache, seed):
        x = adze.embed(table, ids, scale=4.0)
        q, k, v = (x @ weight).view(2, 1, 3, 16).transpose(1, 2).split(1, 1)
        q = adze.kv_append(k, v, k_cache, v_cache, q=q, lengths=lengths, cos=cos, sin=sin, table_by_slot=True)
        out = F.scaled_dot_product_attention(q, k_cache, v_cache)[:, 0, 0]
        return adze.sample(out @ table.T, temperature=0.8, seed=seed, counter=lengths, top_k=20)

    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        ids = torch.tensor([5, 9], dtype=torch.int32)
        caches = torch.zeros(2, 1, 8, 16), torch.zeros(2, 1, 8, 16)
        tokens = []
        for length in range(3):
            lengths = torch.full((2,), length, dtype=torch.int32)
            seed = torch.tensor([7])
            with default_device(None):
                ids = function(ids, lengths, *caches, seed)
            tokens.append(ids.tolist())
        results.append((tokens, caches))
    (tokens, caches), (same, others) = results
    assert tokens == same
    for cache, other in zip(caches, others, strict=True):
        assert torch.allclose(cache, other, rtol=0, atol=2**-20)
        assert cache[:, :, :3].any() and not cache[:, :, 3:].any() and not other[:, :, 3:].any()
