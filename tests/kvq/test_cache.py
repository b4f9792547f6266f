from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq import KeyTransform, PagedKVCache, TurnBook, ops, paged_attention_decode, paged_attention_prefill

HEADS, DIM, PAGE = 2, 64, 16


def make(num_pages: int = 8, hot_pages: int = 4, scheme: str = "int4", **kwargs) -> PagedKVCache:
    return PagedKVCache(num_pages, HEADS, DIM, scheme, PAGE, hot_pages=hot_pages, device="cpu", **kwargs)


def tokens(n: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, HEADS, DIM, generator=g).to(dtype), torch.randn(n, HEADS, DIM, generator=g).to(dtype)


def slots(table: list[int], start: int, stop: int) -> torch.Tensor:
    index = torch.arange(start, stop)
    return torch.tensor(table)[index // PAGE] * PAGE + index % PAGE


def transform() -> KeyTransform:
    freq = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    mu = 5 * torch.randn(HEADS, DIM, generator=torch.Generator().manual_seed(1))
    return KeyTransform(HEADS, DIM, mu, None, freq)


@pytest.mark.parametrize("scheme", ["int4", "int8", "k8v4", "int4-sym"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gather_gives_back_what_was_written(scheme: str, dtype: torch.dtype) -> None:
    cache = make(scheme=scheme, hot_pages=0, dtype=dtype)
    key, value = tokens(40, dtype)
    cache.write(key, value, slots([5, 0, 3], 0, 40))
    kinds = (cache.layout.scheme.key, cache.layout.scheme.value)
    for x, back, kind in zip((key, value), cache.gather(torch.tensor([5, 0, 3]), 40), kinds):
        limit = 0.12 if kind.bits == 4 else 0.01
        assert back.dtype == dtype and (back - x).float().norm() < limit * x.float().norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_hot_pages_are_exact_and_the_rest_is_quantized_once(dtype: torch.dtype) -> None:
    # The dtype is not given: the pool takes the model's.
    cache, plain = make(transform=transform()), make(hot_pages=0, transform=transform())
    table, n = [6, 1, 4, 2], 60
    key, value = tokens(n, dtype)
    cache.promote([6, 2])
    for c in (cache, plain):
        c.write(key, value, slots(table, 0, n), torch.arange(n))
    k, v = cache.gather(torch.tensor(table), n)
    assert k.dtype == dtype
    for inside in (slice(0, 16), slice(48, 60)):
        assert torch.equal(k[inside], key[inside]) and torch.equal(v[inside], value[inside])
    once_k, once_v = plain.gather(torch.tensor(table), n)
    assert torch.equal(k[16:48], once_k[16:48]) and torch.equal(v[16:48], once_v[16:48])
    cache.demote([6, 2])  # what is left was quantized from the original values, when they were written
    assert torch.equal(cache.pages, plain.pages)
    assert torch.equal(cache.gather(torch.tensor(table), n)[0], once_k)


def test_a_conversation_is_exact_in_its_last_two_turns_and_first_page() -> None:
    cache, once = make(num_pages=20, hot_pages=20), make(num_pages=20, hot_pages=0)
    book = TurnBook(PAGE, recent_turns=2)
    table = list(range(19, -1, -1))
    key, value = tokens(300)
    once.write(key, value, slots(table, 0, 300))
    once_k, once_v = once.gather(torch.tensor(table), 300)
    starts = [0, 50, 70, 150, 200, 290]
    for i, (start, stop) in enumerate(zip(starts, [*starts[1:], 300])):
        book.start_turn("s", start)
        for a in range(start, stop, 7):  # as decode appends
            b = min(a + 7, stop)
            used = table[: -(-b // PAGE)]
            cache.set_hot(used, book.hot_pages("s", b))
            cache.write(key[a:b], value[a:b], slots(table, a, b))
        k, v = cache.gather(torch.tensor(table), stop)
        hot = torch.zeros(stop, dtype=torch.bool)
        hot[:PAGE] = True
        hot[starts[max(0, i - 1)] // PAGE * PAGE :] = True
        assert torch.equal(k[hot], key[:stop][hot]) and torch.equal(v[hot], value[:stop][hot])
        assert torch.equal(k[~hot], once_k[:stop][~hot]) and torch.equal(v[~hot], once_v[:stop][~hot])


def test_promote_never_converts_a_written_page_up() -> None:
    cache = make()
    key, value = tokens(20)
    cache.write(key, value, slots([0, 1], 0, 20))
    before = cache.gather(torch.tensor([0, 1]), 20)
    assert cache.promote([0, 1, 2]) == [2]
    assert cache.hot_index.tolist()[:2] == [-1, -1] and cache.hot_index[2] >= 0
    assert all(torch.equal(a, b) for a, b in zip(before, cache.gather(torch.tensor([0, 1]), 20)))
    cache.demote([2])
    assert cache.promote([2]) == [2]  # still unwritten


def test_a_demoted_page_does_not_become_hot_again() -> None:
    cache = make()
    cache.promote([3])
    cache.write(*tokens(5), slots([3], 0, 5))
    cache.demote([3])
    assert cache.promote([3]) == []
    cache.release([3])
    assert cache.promote([3]) == [3]


def test_promote_stops_at_the_free_slots() -> None:
    cache = make(hot_pages=2)
    assert cache.promote([4, 5, 6]) == [4, 5] and cache.hot_pages() == 2
    assert cache.promote([4, 5]) == []  # they have theirs
    cache.demote([4, 7, 4])  # 7 has none, and twice is once
    assert cache.promote([6]) == [6]
    assert sorted(cache.hot_index[[5, 6]].tolist()) == [0, 1]
    assert make(hot_pages=0).promote([1]) == []


def test_bad_pages_change_nothing() -> None:
    cache = make()
    for pages in ([0, 8], [0, -1]):
        with pytest.raises(ValueError, match=f"page is {pages[1]}; allowed: 0..7"):
            cache.promote(pages)
        with pytest.raises(ValueError, match=f"page is {pages[1]}"):
            cache.release(pages)
    assert cache.hot_pages() == 0 and (cache.hot_index == -1).all()


def test_released_pages_give_what_fresh_pages_give() -> None:  # vLLM #50702: pages of a full pool are used again
    used, fresh = make(), make()
    used.promote([1, 2])
    used.write(*tokens(128, seed=3), slots(list(range(8)), 0, 128))
    used.release(range(8))
    assert used.hot_pages() == 0
    key, value = tokens(30, seed=4)
    for cache in (used, fresh):
        cache.promote([2])
        cache.write(key, value, slots([2, 7], 0, 30))
    for a, b in zip(used.gather(torch.tensor([2, 7]), 30), fresh.gather(torch.tensor([2, 7]), 30)):
        assert torch.equal(a, b)
    query = tokens(1, seed=5)[0]
    args = (torch.tensor([[2, 7]], dtype=torch.int32), torch.tensor([30], dtype=torch.int32))
    assert torch.equal(paged_attention_decode(query, used, *args), paged_attention_decode(query, fresh, *args))


def test_a_shared_prefix_reads_as_a_fresh_run_does() -> None:  # TensorRT-LLM #2699
    cache, fresh = make(hot_pages=0), make(hot_pages=0)
    key, value = tokens(50)
    cache.write(key[:32], value[:32], slots([0, 1], 0, 32))
    for table, seed in (([0, 1, 2, 3], 1), ([0, 1, 4, 5], 2)):
        rest = tokens(18, seed=seed)
        cache.write(*rest, slots(table, 32, 50))
        k, v = torch.cat([key[:32], rest[0]]), torch.cat([value[:32], rest[1]])
        fresh.write(k, v, slots(table, 0, 50))
        for a, b in zip(cache.gather(torch.tensor(table), 50), fresh.gather(torch.tensor(table), 50)):
            assert torch.equal(a, b)


def test_set_hot_follows_the_wanted_pages() -> None:
    cache = make()
    table = [7, 3, 5, 1]
    cache.set_hot(table, [0, 1])
    assert (cache.hot_index >= 0).nonzero().flatten().tolist() == [3, 7]
    cache.set_hot(table, [0, 3])
    assert (cache.hot_index >= 0).nonzero().flatten().tolist() == [1, 7]
    for index in (-1, 4, 1.0, True):
        with pytest.raises(ValueError, match=f"wanted holds {index}; the block table has 4 pages"):
            cache.set_hot(table, [0, index])
    assert (cache.hot_index >= 0).nonzero().flatten().tolist() == [1, 7]  # as before
    cache.set_hot(table, [])
    assert cache.hot_pages() == 0
    with pytest.raises(ValueError, match=r"page is 2\.0; allowed: 0\.\.7"):
        cache.promote([2.0])


def test_nothing_that_is_stored_or_read_keeps_gradients() -> None:
    cache = make(hot_pages=1, dtype=torch.float32)
    cache.promote([0])
    key, value = (x.requires_grad_() for x in tokens(40, torch.float32))
    for check in ("sync", "flag"):
        cache.write(key, value, slots([0, 1, 2], 0, 40), check=check)
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    sinks = torch.zeros(HEADS, requires_grad=True)
    query = torch.ones(1, HEADS, DIM, requires_grad=True)
    out = paged_attention_decode(query, cache, table, torch.tensor([40]), sinks=sinks, return_lse=True)
    starts = torch.tensor([0, 40])
    new = paged_attention_prefill(key, key, value, cache, table, torch.tensor([40]), starts, return_lse=True)
    for tensor in (cache.pages, cache.hot.pool, *cache.gather(table[0], 40), *out, *new):
        assert not tensor.requires_grad


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_hot_slots_are_never_shared_or_lost(data) -> None:
    cache = make(hot_pages=3)
    page = st.lists(st.integers(0, 7), max_size=5)
    for _ in range(data.draw(st.integers(1, 12))):
        getattr(cache, data.draw(st.sampled_from(["promote", "demote", "release"])))(data.draw(page))
        if data.draw(st.booleans()):
            p = data.draw(st.integers(0, 7))
            cache.write(*tokens(3), slots([p], 2, 5))
        taken = cache.hot_index[cache.hot_index >= 0].tolist()
        assert len(set(taken)) == len(taken) == cache.hot_pages() <= 3
        assert sorted(taken + cache._free_slots) == [0, 1, 2]


def test_negative_slots_are_skipped() -> None:
    cache = make()
    cache.write(*tokens(4), torch.tensor([-1, 17, -9, 18]))
    assert cache.gather(torch.tensor([0]), 16)[0].abs().max() == 0
    assert (cache.gather(torch.tensor([1]), 16)[0].abs().amax((1, 2)) > 0).nonzero().flatten().tolist() == [1, 2]
    assert cache.promote([0, 1]) == [0]  # skipped tokens count as nothing written


def test_flagged_tokens_are_counted_in_the_status() -> None:
    cache = make()
    key, value = tokens(4)
    key[1, 0, 0] = torch.nan
    cache.write(key, value, torch.tensor([0, 1, 2, 8 * PAGE]), check="flag")
    assert dict(zip(ops.STATUS_FIELDS, cache.status.tolist())) == {
        "bad_slots": 1, "not_finite": 1, "clamped_rows": 0, "bad_positions": 0,
    }  # fmt: skip


def test_format_name_keeps_caches_apart() -> None:
    t = transform()
    assert make().format_name == "kvq-int4-v1"
    assert make(transform=t).format_name == f"kvq-int4-v1+{t.digest}"


def test_nbytes_count_pages_and_pool() -> None:
    page = 2 * HEADS * PAGE * DIM
    assert make(hot_pages=0).nbytes == 8 * page * 4.5 / 8
    assert make(hot_pages=3).nbytes == 8 * page * 4.5 / 8 + 3 * page * 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_pages": 0}, ValueError, "num_pages is 0; it must be an integer of at least 1"),
        ({"num_pages": 2.5}, ValueError, r"num_pages is 2\.5; it must be an integer of at least 1"),
        ({"num_pages": True}, ValueError, "num_pages is True; it must be an integer"),
        ({"hot_pages": -1}, ValueError, "hot_pages is -1; it must be an integer of at least 0"),
        ({"hot_pages": 1.0}, ValueError, r"hot_pages is 1\.0; it must be an integer of at least 0"),
        ({"max_position": "4096"}, ValueError, "max_position is '4096'; it must be an integer of at least 0"),
        ({"kv_heads": 0}, ValueError, "kv_heads is 0; it must be an integer of at least 1"),
        ({"kv_heads": 2.0}, ValueError, r"kv_heads is 2\.0; it must be an integer of at least 1"),
        ({"head_dim": 64.0}, ValueError, r"head_dim is 64\.0; allowed: 64, 80"),
        ({"page_size": 64.0}, ValueError, r"page_size is 64\.0; allowed: 16, 32, 64, 128"),
        ({"page_size": "64"}, ValueError, "page_size is '64'; allowed: 16, 32, 64, 128"),
        ({"head_dim": 72}, ValueError, "head_dim is 72; allowed: 64, 80"),
        ({"page_size": 848}, ValueError, "page_size is 848; allowed: 16, 32, 64, 128"),
        ({"scheme": "int2"}, ValueError, "scheme is 'int2'; allowed: int4"),
        ({"dtype": torch.int8}, TypeError, r"dtype is torch\.int8; allowed: float16"),
        (
            {"kv_heads": 3, "transform": transform()},
            ValueError,
            "transform is for 2 heads of 64; the cache has 3 of 64",
        ),
    ],
)
def test_bad_arguments_are_named(change: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PagedKVCache(**{"num_pages": 4, "kv_heads": 2, "head_dim": 64, "device": "cpu", **change})
