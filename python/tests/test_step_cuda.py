"""Ids, slots, counts, pages and offsets that are wrong, on a GPU: the host does not see them, so a kernel must do
what adze.h says of them, and read and write nothing else. The CPU refuses them, as test_step.py and
test_ops_attention.py have it."""

import pytest

torch = pytest.importorskip("torch")

import adze  # noqa: E402
from device import generator, here  # noqa: E402

pytestmark = pytest.mark.skipif(here().type != "cuda", reason="ADZE_TEST_DEVICE is not cuda")


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [37, 64])
def test_an_id_that_is_no_row_gives_nan(columns, dtype):
    table = randn(50, columns, dtype=dtype)
    ids = torch.tensor([1, 50, 49, -1, 0, 1 << 40, -(1 << 40)])
    for options in ({}, {"scale": 2.0}):
        got = adze.embed(table, ids, **options)
        assert (
            torch.equal(got[[0, 2, 4]], table[[1, 49, 0]] * options.get("scale", 1))
            and got[[1, 3, 5, 6]].isnan().all()
        )


def expected(new, slots, shape):
    """A cache of zeros with the rows of `new` [batch, heads, m, d] at those of `slots` [batch, m] that it has."""
    cache = torch.zeros(shape)
    for b, row in enumerate(slots):
        for t, slot in enumerate(row):
            if 0 <= slot < shape[2]:
                cache[b, :, slot] = new[b, :, t]
    return cache


def test_a_token_without_a_slot_is_dropped():
    k, v = randn(2, 2, 3, 16), randn(2, 2, 3, 8, seed=1)
    for first in (7, -1, 9, -3, 2**31 - 3, -(2**31)):
        caches = torch.zeros(2, 2, 9, 16), torch.zeros(2, 2, 9, 8)
        adze.kv_append(k, v, *caches, lengths=ints(0, first))
        slots = [[0, 1, 2], [first, first + 1, first + 2]]
        assert torch.equal(caches[0], expected(k, slots, (2, 2, 9, 16)))
        assert torch.equal(caches[1], expected(v, slots, (2, 2, 9, 8)))


def test_a_token_without_a_page_is_dropped():
    """Page 2 of 2, page -1, and slots beyond the pages of a sequence."""
    k = randn(4, 2, 3, 16)
    caches = torch.zeros(2, 2, 9, 16), torch.zeros(2, 2, 9, 16)
    adze.kv_append(k, k, *caches, lengths=ints(4, 0, 0, 8), block_table=ints([0], [2], [-1], [1]))
    want = torch.zeros(2, 2, 9, 16)
    want[0, :, 4:7], want[1, :, 8] = k[0], k[3, :, 0]
    assert torch.equal(caches[0], want) and torch.equal(caches[1], want)


def test_a_token_without_a_row_of_the_tables_is_dropped():
    q, k = randn(2, 4, 3, 16, seed=1), randn(2, 2, 3, 16)
    cos, sin = torch.zeros(4, 16), torch.ones(4, 16)  # a turn by a quarter, which is exact
    caches = torch.zeros(2, 2, 9, 16), torch.zeros(2, 2, 9, 16)
    got = adze.kv_append(k, k, *caches, q=q, lengths=ints(1, 2), cos=cos, sin=sin, table_by_slot=True)

    def turned(x):
        return torch.cat((-x[..., 8:], x[..., :8]), -1)

    slots = [[1, 2, 3], [2, 3, -1]]  # the last one would be 4
    assert torch.equal(caches[0], expected(turned(k), slots, (2, 2, 9, 16)))
    assert torch.equal(caches[1], expected(k, slots, (2, 2, 9, 16)))
    assert got[1, :, 2].isnan().all()
    assert torch.equal(got[0], turned(q)[0]) and torch.equal(got[1, :, :2], turned(q)[1, :, :2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_count_beyond_its_ends_is_the_nearer_one(dtype):
    scores = torch.tensor([[2.0, 3.0, 1.75]], dtype=dtype).expand(5, -1).contiguous()
    previous = torch.tensor([[1, 0]]).expand(5, -1).contiguous()
    got = adze.sample(scores, previous=previous, previous_count=ints(0, 1, 2, 3, -1), penalty=2.0)
    assert got.tolist() == [1, 0, 2, 2, 1]


def near(got, want, spread):
    """spread: the values' magnitudes, weighed. On each side the weights and the result are rounded once."""
    limit = torch.finfo(got.dtype).eps * (want.float().abs() + spread.float()) + 2**-16
    assert ((got.float() - want.float()).abs() <= limit).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 20])
def test_a_page_that_is_not_there_has_no_keys(m, dtype):
    """As if a mask hid them; a sequence of such pages alone gives 0."""
    q, k = randn(3, 6, m, 64, dtype=dtype), randn(3, 2, 64, 64, dtype=dtype, seed=1)
    v = randn(3, 2, 64, 64, dtype=dtype, seed=2)
    lengths, table = ints(17, 64, 30), torch.arange(12, dtype=torch.int32).reshape(3, 4)
    pages = [x.reshape(3, 2, 4, 16, 64).transpose(1, 2).reshape(12, 2, 16, 64) for x in (k, v)]
    seen = torch.ones(3, 1, 1, 64, dtype=torch.bool)
    for sequence, page, number in ((0, 1, 12), (1, 1, -1), (2, 0, 2**31 - 1), (2, 1, -(2**31))):
        table[sequence, page] = number
        seen[sequence, :, :, 16 * page : 16 * page + 16] = False
    got, lse = adze.attention(q, *pages, lengths=lengths, block_table=table, need_lse=True)
    mask = seen.expand(-1, -1, m, -1)
    want, want_lse = adze.attention(q, k, v, mask, lengths=lengths, need_lse=True)
    near(got, want, adze.attention(q, k, v.abs(), mask, lengths=lengths))
    torch.testing.assert_close(lse, want_lse)
    assert not got[2].any() and (lse[2] == -torch.inf).all() and got[:2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_whose_offsets_decrease_is_empty(dtype):
    """Of the rows that one sequence has alone; rows 3 to 6 are in two."""
    q = randn(1, 4, 30, 64, dtype=dtype)
    k, v = randn(1, 2, 41, 64, dtype=dtype, seed=1), randn(1, 2, 41, 64, dtype=dtype, seed=2)
    rows, keys = [0, 7, 3, 9, 30], [0, 20, 21, 30, 41]
    got = adze.attention(q, k, v, q_offsets=ints(*rows), k_offsets=ints(*keys))
    for s, alone in ((0, slice(0, 3)), (2, slice(7, 9)), (3, slice(9, 30))):
        a, b = slice(rows[s], rows[s + 1]), slice(keys[s], keys[s + 1])
        parts = q[:, :, a], k[:, :, b], v[:, :, b]
        own = slice(alone.start - rows[s], alone.stop - rows[s])
        near(got[:, :, alone], *(adze.attention(*parts[:2], x)[:, :, own] for x in (parts[2], parts[2].abs())))
    assert got.isfinite().all()


def test_old_keys_are_read_early_and_new_ones_are_not():
    """A graph with ADZE_CONST_CACHE: attention begins while kv_append still runs behind slow work."""
    from adze.graphs.constant import flagged

    heads, kv_heads, dim, capacity = 8, 2, 128, 700
    caches = [randn(1, kv_heads, capacity, dim, dtype=torch.bfloat16, seed=i) for i in (1, 2)]
    k, v, q = (torch.zeros(1, h, 1, dim, dtype=torch.bfloat16) for h in (kv_heads, kv_heads, heads))
    slow, before, after = torch.eye(2048), ints(0), ints(0)

    def step():
        new = k + (slow @ slow)[0, 1].bfloat16()  # 0, after a while
        adze.kv_append(new, v, *caches, lengths=before)
        with flagged("CONST_CACHE"):
            return adze.attention(q, *caches, lengths=after)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for length in (0, 1, 15, 16, 31, 32, 64, 100, 511, 512, 698, 699):
        before.fill_(length), after.fill_(length + 1)
        for i, x in enumerate((k, v, q)):
            x.copy_(randn(*x.shape, dtype=x.dtype, seed=10 * length + i))
        graph.replay()
        assert torch.equal(out, adze.attention(q, *caches, lengths=after))
        assert torch.equal(caches[0][:, :, length : length + 1], k)
