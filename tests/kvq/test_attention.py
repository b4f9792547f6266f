"""kvq.paged_attention_decode on CPU against attention written from its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq import KeyTransform, PagedKVCache, paged_attention_decode
from kvq.scheme import HEAD_DIMS
from tests import tolerances


def naive(query, keys, values, scale, window=None, softcap=None, sinks=None):
    """query [num_seqs, q_len, heads, dim]; keys, values: a [seq_len, kv_heads, dim] a sequence. Row by row, float64."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.full(query.shape[:3], -math.inf, dtype=torch.float64)
    num_seqs, q_len, heads, _ = query.shape
    for i in range(num_seqs):
        n, kv_heads = keys[i].shape[:2]
        for t in range(q_len):
            last = n - q_len + t  # the row's own token
            for h in range(heads):
                first = 0 if window is None else max(0, last - window + 1)
                kv = h // (heads // kv_heads)
                k, v = keys[i][first : last + 1, kv].double(), values[i][first : last + 1, kv].double()
                if last < 0:
                    k, v = k[:0], v[:0]
                score = k @ query[i, t, h].double() * scale
                if softcap is not None:
                    score = softcap * (score / softcap).tanh()
                weight = score.exp()
                total = weight.sum() + (0 if sinks is None else sinks[h].double().exp())
                if total > 0:
                    out[i, t, h] = (weight[:, None] * v).sum(0) / total
                    lse[i, t, h] = total.log()
    return out, lse


def build(lens, *, head_dim=64, kv_heads=2, group=3, q_len=1, scheme="int4", page_size=16, hot=False, transform=None,
          shifts=None, dtype=torch.float32, seed=0):  # fmt: skip
    """A cache of sequences in random pages of memory full of NaN, its queries, and what the cache holds."""
    g = torch.Generator().manual_seed(seed)
    need = [-(-n // page_size) for n in lens]
    num_pages = sum(need) + 2
    cache = PagedKVCache(
        num_pages, kv_heads, head_dim, scheme, page_size, transform=transform, hot_pages=num_pages, dtype=dtype,
        device="cpu",
    )  # fmt: skip
    cache.pages.fill_(255)
    cache._pool.fill_(torch.nan)
    order = torch.randperm(num_pages, generator=g).to(torch.int32)
    tables = torch.full((len(lens), max([*need, 0]) + 1), -1, dtype=torch.int32)
    keys, values = [], []
    for i, (n, count) in enumerate(zip(lens, need)):
        tables[i, :count] = order[sum(need[:i]) : sum(need[:i]) + count]
        if hot and count:
            cache.promote([int(tables[i, 0]), int(tables[i, count - 1])])
        key, value = (torch.randn(n, kv_heads, head_dim, generator=g).to(dtype) for _ in range(2))
        index = torch.arange(n)
        where = tables[i].long()[index // page_size] * page_size + index % page_size
        shift = 0 if shifts is None else shifts[i]
        cache.write(key, value, where, index + shift)
        k, v = cache.gather(tables[i], n, position_offset=shift, dtype=torch.float32)
        keys.append(k)
        values.append(v)
    query = torch.randn(len(lens), q_len, kv_heads * group, head_dim, generator=g).to(dtype)
    return cache, query, tables, torch.tensor(lens, dtype=torch.int32), keys, values


def check(lens, window=None, softcap=None, with_sinks=False, shifts=None, scale=None, **kwargs) -> None:
    cache, query, tables, seq_lens, keys, values = build(lens, shifts=shifts, **kwargs)
    sinks = torch.randn(query.shape[2], generator=torch.Generator().manual_seed(9)) if with_sinks else None
    want, want_lse = naive(query, keys, values, scale or query.shape[3] ** -0.5, window, softcap, sinks)
    out, lse = paged_attention_decode(
        query, cache, tables, seq_lens, scale=scale, sliding_window=window, softcap=softcap, sinks=sinks,
        position_offset=None if shifts is None else torch.tensor(shifts, dtype=torch.int32), return_lse=True,
    )  # fmt: skip
    assert out.dtype == query.dtype and lse.dtype == torch.float32
    assert (out - want).norm() <= tolerances.NAIVE * want.norm()
    seen = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), seen)
    assert torch.allclose(lse[seen].double(), want_lse[seen], atol=1e-4)


@pytest.mark.parametrize("q_len", range(1, 9))
def test_query_tokens_see_the_ones_before_them(q_len: int) -> None:  # vLLM #40831, #52475
    check((30, q_len, 17), q_len=q_len)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("scheme", ["int4", "int8", "k8v4", "int4-sym"])
def test_every_head_size_and_scheme(head_dim: int, scheme: str) -> None:  # vLLM #56197
    check((20, 3), head_dim=head_dim, scheme=scheme)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 12, 16])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_every_group_of_heads(group: int, kv_heads: int) -> None:  # transformers #48307
    check((19, 5), group=group, kv_heads=kv_heads)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_every_page_size_and_a_length_at_each_edge(page_size: int) -> None:  # vLLM #50749
    check((page_size - 1, page_size, page_size + 1, 1), page_size=page_size, hot=True)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 1000])
@pytest.mark.parametrize("q_len", [1, 3])
def test_the_sliding_window_is_honoured(window: int, q_len: int) -> None:  # vLLM #48721, #54599
    check((40, 17, 3), window=window, q_len=q_len)


def test_layers_of_other_head_sizes_and_windows_share_one_model() -> None:  # vLLM #48721
    for head_dim, window in ((64, None), (256, 20), (96, 7)):
        check((40, 17), head_dim=head_dim, window=window)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_scores_are_capped(softcap: float) -> None:
    check((33, 4), softcap=softcap, scale=2.0)


def test_sinks_take_probability_and_enter_the_log_sum_exp() -> None:  # imp #1345
    check((33, 0, 4), with_sinks=True)
    check((33, 4), with_sinks=True, q_len=3, window=5)


def test_empty_sequences_give_zeros() -> None:  # vLLM #57017
    cache, query, tables, seq_lens, _, _ = build((0, 20, 0))
    out, lse = paged_attention_decode(query, cache, tables, seq_lens, return_lse=True)
    assert (out[[0, 2]] == 0).all() and (lse[[0, 2]] == -math.inf).all()
    assert out[1].abs().max() > 0


def test_rows_before_the_start_of_a_sequence_give_zeros() -> None:
    check((2, 0, 9), q_len=5)


def test_offsets_shift_positions_as_left_padding_does() -> None:
    freq = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    mu = 5 * torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    transform = KeyTransform(2, 64, mu, torch.rand(2, 32) + 0.5, freq)
    check((30, 20, 5), transform=transform, shifts=[7, 0, 100000], hot=True)
    check((30, 20), transform=transform)


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    q_len=st.integers(1, 8),
    group=st.integers(1, 4),
    page_size=st.sampled_from([16, 32, 64]),
    window=st.one_of(st.none(), st.integers(1, 80)),
    softcap=st.one_of(st.none(), st.floats(1, 50)),
    with_sinks=st.booleans(),
    hot=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_batch_matches_the_definition(
    lens, q_len, group, page_size, window, softcap, with_sinks, hot, seed
) -> None:
    # vLLM #57156: all memory that the batch did not write is NaN
    check(tuple(lens), q_len=q_len, group=group, kv_heads=1, page_size=page_size, window=window, softcap=softcap,
          with_sinks=with_sinks, hot=hot, seed=seed)  # fmt: skip


@pytest.mark.parametrize("length", [3000, 8192])
def test_error_does_not_grow_with_the_context(length: int) -> None:  # vLLM #55610
    cache, query, tables, seq_lens, keys, values = build((length,), page_size=64, group=2, kv_heads=1)
    want, _ = naive(query, keys, values, 64**-0.5)
    got = paged_attention_decode(query, cache, tables, seq_lens)
    assert (got - want).norm() < tolerances.NAIVE * want.norm()


@pytest.mark.parametrize("shape", ["strided", "three dims"])
def test_queries_of_other_shapes(shape: str) -> None:
    cache, query, tables, seq_lens, _, _ = build((30, 5))
    want = paged_attention_decode(query, cache, tables, seq_lens)
    if shape == "strided":
        other = query.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)
        assert torch.equal(paged_attention_decode(other, cache, tables, seq_lens), want)
    else:
        got, lse = paged_attention_decode(query[:, 0], cache, tables, seq_lens, return_lse=True)
        assert torch.equal(got, want[:, 0]) and lse.shape == query.shape[:1] + query.shape[2:3]


def test_out_is_written_and_returned() -> None:
    cache, query, tables, seq_lens, _, _ = build((30, 5), dtype=torch.float16)
    for dtype in (torch.float16, torch.float32):
        wide = torch.full((*query.shape[:3], 80), torch.nan, dtype=dtype)
        got = paged_attention_decode(query, cache, tables, seq_lens, out=wide[..., 8:72])
        assert got.data_ptr() == wide[..., 8:72].data_ptr()
        want = paged_attention_decode(query, cache, tables, seq_lens)
        assert (got.float() - want.float()).norm() < 1e-3 * want.float().norm()
        assert wide[..., :8].isnan().all() and wide[..., 72:].isnan().all()


def test_large_keys_and_queries_do_not_saturate() -> None:  # ONNX Runtime #32515
    cache, query, tables, seq_lens, _, _ = build((30,), dtype=torch.float16, scheme="int8")
    key, value = torch.full((30, 2, 64), 6e4).half(), torch.randn(30, 2, 64).half()
    index = torch.arange(30)
    cache.write(key, value, tables[0].long()[index // 16] * 16 + index % 16)
    out, lse = paged_attention_decode(torch.full_like(query, 6e4), cache, tables, seq_lens, scale=1e-9, return_lse=True)
    assert torch.isfinite(out).all()
    assert torch.allclose(lse, torch.tensor(64 * 6e4 * 6e4 * 1e-9 + math.log(30)), rtol=1e-3)
