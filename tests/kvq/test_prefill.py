"""paged_attention_prefill on CPU: its reference, the pieces that an injected attention sees, and refused arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvq
from kvq import reference
from kvq.prefill import Piece, plan_pieces, prefill_pages
from tests import tolerances
from tests.kernels import cases, prefill_cases
from tests.kernels.cases import Case
from tests.kernels.prefill_cases import PrefillCase

pytestmark = pytest.mark.usefixtures("poison")
BY_NAME = {str(case): case for case in prefill_cases.SMALL}


class DenseAttention:
    """The Attention protocol in torch; remembers the context that each call saw."""

    def __init__(self, write_out: bool = False) -> None:
        self.write_out = write_out
        self.calls: list[tuple[bool, list[int]]] = []

    def __call__(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal, scale, window, softcap, out
    ):  # fmt: skip
        result, lse = torch.zeros_like(q), torch.full((q.shape[1], len(q)), -torch.inf)
        q_starts, k_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        assert (q_starts[-1], k_starts[-1]) == (len(q), len(k))
        spans = list(zip(q_starts, q_starts[1:], k_starts, k_starts[1:]))
        assert max(b - a for a, b, _, _ in spans) == max_seqlen_q and max(d - c for *_, c, d in spans) == max_seqlen_k
        self.calls.append((causal, [d - c - (b - a if causal else 0) for a, b, c, d in spans]))
        for a, b, c, d in spans:
            if a == b:
                continue
            if not causal:  # all keys are before every query: as many unseen keys after them make the mask causal
                assert window == (-1, -1)
                pad = k.new_zeros(b - a, *k.shape[1:])
                keys, values = torch.cat([k[c:d], pad]), torch.cat([v[c:d], pad])
                scores_of_pad = torch.arange(d - c + b - a) >= d - c
                result[a:b], lse[:, a:b] = _unmasked(q[a:b], keys, values, scale, softcap, scores_of_pad)
            else:
                o, s = reference.attention(
                    q[a:b].float(), k[c:d].float(), v[c:d].float(), scale, window[0] + 1 or None, softcap or None
                )
                result[a:b], lse[:, a:b] = o, s.T
        if self.write_out:
            result = out.copy_(result)
        return result, lse


def _unmasked(q, k, v, scale, softcap, hidden):
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,shd->hts", q.float(), k.repeat_interleave(group, 1).float()) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.einsum("hts,shd->thd", scores.softmax(-1), v.repeat_interleave(group, 1).float())
    return out, scores.logsumexp(-1)


def prefill(case: PrefillCase, batch: cases.Batch, new: prefill_cases.NewTokens, **kwargs):
    return prefill_pages(
        new.query, new.key, new.value, batch.pages, batch.layout, batch.block_tables, batch.seq_lens, new.cu_seqlens,
        transform=batch.tables, hot=batch.hot, sliding_window=case.context.window, softcap=case.context.softcap,
        sinks=batch.sinks, position_offset=batch.position_offset, return_lse=True, **kwargs,
    )  # fmt: skip


def float32(case: PrefillCase) -> PrefillCase:
    return replace(case, context=replace(case.context, dtype=torch.float32))


@pytest.mark.parametrize("window", [None, 6])
def test_reference_is_plain_causal_attention_where_nothing_is_quantized(window: int | None) -> None:
    torch.manual_seed(0)
    cache = kvq.PagedKVCache(4, 2, 64, "int4", 16, hot_pages=4, dtype=torch.float32, device="cpu")
    cache.promote(range(4))
    key, value, query = torch.randn(50, 2, 64), torch.randn(50, 2, 64), torch.randn(50, 6, 64)
    cache.write(key[:37], value[:37], torch.arange(37))
    out = kvq.paged_attention_prefill(
        query[37:], key[37:], value[37:], cache, torch.arange(4)[None], torch.tensor([37]), torch.tensor([0, 13]),
        sliding_window=window,
    )  # fmt: skip
    mask = torch.ones(50, 50, dtype=torch.bool).tril()
    if window:
        mask = mask.triu(1 - window)
    heads_first = [x.transpose(0, 1) for x in (query, key, value)]
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
    assert cases.relative_error(out, want.transpose(0, 1)[37:]) < tolerances.NAIVE


@pytest.mark.parametrize("case", prefill_cases.SMALL, ids=str)
def test_float32_reference_matches_float64(case: PrefillCase) -> None:
    case = float32(case)
    batch, new = prefill_cases.make(case, "cpu")
    out, lse = prefill(case, batch, new)
    want, want_lse = prefill_cases.run_reference(case, batch, new)
    assert cases.relative_error(out, want) < tolerances.DECODE[torch.float32]
    torch.testing.assert_close(lse, want_lse, atol=tolerances.LSE_LARGE_OFFSET, rtol=1e-5)


@pytest.mark.parametrize("workspace_tokens", [7, 16, 50, 1000])
@pytest.mark.parametrize("case", prefill_cases.SMALL, ids=str)
def test_pieces_of_any_size_give_the_same_result(case: PrefillCase, workspace_tokens: int) -> None:
    case = float32(case)
    batch, new = prefill_cases.make(case, "cpu")
    attention = DenseAttention(write_out=workspace_tokens == 16)
    out, lse = prefill(case, batch, new, attention=attention, workspace_tokens=workspace_tokens)
    want, want_lse = prefill_cases.run_reference(case, batch, new)
    assert cases.relative_error(out, want) < tolerances.DECODE[torch.float32]
    torch.testing.assert_close(lse, want_lse, atol=tolerances.LSE_LARGE_OFFSET, rtol=1e-5)
    assert all(sum(context) <= workspace_tokens for _, context in attention.calls)


def test_workspace_does_not_grow_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size: sizes.append(size) or new_empty(x, *size))
    for context in (64, 640):
        case = PrefillCase(Case("", kv_heads=1, group=1, lens=(context,), dtype=torch.float32), (8,))
        batch, new = prefill_cases.make(case, "cpu")
        sizes.clear()
        prefill(case, batch, new, attention=DenseAttention(), workspace_tokens=32)
        assert sizes == [(2, 32 + 8, 1, 64)]


def test_context_beyond_every_window_is_not_read() -> None:
    case = float32(PrefillCase(Case("", kv_heads=1, window=20, lens=(200, 5)), (4, 30)))
    batch, new = prefill_cases.make(case, "cpu")
    batch.block_tables[0, : (200 - 19) // 16] = -1
    attention = DenseAttention()
    out, _ = prefill(case, batch, new, attention=attention, workspace_tokens=64, check="flag")
    assert attention.calls == [(True, [19, 5])]
    assert torch.isfinite(out).all()


def test_attention_is_left_aside_where_it_cannot_express_the_mask_or_the_transform() -> None:
    def refuse(*_, **__):
        raise AssertionError("called")

    for name, workspace in (("window", 18), ("offset-shifted-left-and-right", 1000)):
        case = float32(BY_NAME[name])
        batch, new = prefill_cases.make(case, "cpu")
        out, _ = prefill(case, batch, new, attention=refuse, workspace_tokens=workspace)
        want, _ = prefill_cases.run_reference(case, batch, new)
        assert cases.relative_error(out, want) < tolerances.DECODE[torch.float32]


@pytest.mark.parametrize("attention", [None, DenseAttention(), DenseAttention(write_out=True)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_out_is_written_in_its_own_dtype(attention: DenseAttention | None, out_dtype: torch.dtype) -> None:
    case = BY_NAME["everything"]
    batch, new = prefill_cases.make(case, "cpu")
    out = torch.empty(new.query.shape, dtype=out_dtype)
    result, _ = prefill(case, batch, new, attention=attention, workspace_tokens=32, out=out)
    assert result is out
    want, _ = prefill_cases.run_reference(case, batch, new)
    limit = tolerances.DECODE[out_dtype] if attention is None else 2 * tolerances.DECODE[torch.bfloat16]
    assert cases.relative_error(out, want) < limit


def test_host_lengths_stand_in_for_the_device_ones() -> None:
    case = float32(BY_NAME["window"])
    batch, new = prefill_cases.make(case, "cpu")
    lengths = case.context.lens, new.cu_seqlens.tolist()
    want = prefill(case, batch, new, attention=DenseAttention())
    batch.seq_lens.zero_()
    got = prefill(case, batch, new, attention=DenseAttention(), host_lengths=lengths)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_nothing_new_gives_nothing() -> None:
    case = float32(PrefillCase(Case("", kv_heads=1, lens=(20, 3)), (0, 0)))
    batch, new = prefill_cases.make(case, "cpu")
    for attention in (None, DenseAttention()):
        out, lse = prefill(case, batch, new, attention=attention, workspace_tokens=8)
        assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


def test_pieces_share_calls_and_split_long_contexts() -> None:
    assert plan_pieces([5, 0, 8, 30, 3], [0, 2, 4, 6, 7, 7], 13) == [
        Piece(0, 3, [(0, 5), (0, 0), (0, 8)], True),
        Piece(3, 4, [(0, 13)], False),
        Piece(3, 4, [(13, 26)], False),
        Piece(3, 4, [(26, 30)], True),
        Piece(4, 5, [(3, 3)], True),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=6),
    st.integers(1, 30),
    st.none() | st.integers(1, 50),
)
def test_pieces_name_every_visible_context_token_once(
    lens: list[tuple[int, int]], workspace: int, window: int | None
) -> None:
    contexts, starts = [n for n, _ in lens], torch.tensor([0, *(q for _, q in lens)]).cumsum(0).tolist()
    seen: list[list[int]] = [[] for _ in lens]
    causal = []
    for piece in plan_pieces(contexts, starts, workspace, window):
        assert window is not None or sum(b - a for a, b in piece.spans) <= workspace
        if piece.causal:
            causal += range(piece.first, piece.last)
        for i, (a, b) in zip(range(piece.first, piece.last), piece.spans, strict=True):
            assert i not in causal[:-1] or piece.causal  # what comes before the end of a context goes first
            seen[i] += range(a, b)
    assert causal == list(range(len(lens)))
    for i, (n, q) in enumerate(lens):
        first = n if not q else max(0, n - window + 1) if window else 0
        assert seen[i] == list(range(first, n))


BAD = [
    ("query", lambda q: q[0], ValueError, "query has shape"),
    ("query", lambda q: q[:, :3], ValueError, "query has 3 heads"),
    ("query", lambda q: q.double(), TypeError, "query is torch.float64"),
    ("key", lambda k: k[:-1], ValueError, "key has 27 tokens; query has 28"),
    ("value", lambda v: v[..., :32], ValueError, "value has shape"),
    ("value", lambda v: v.bfloat16(), TypeError, "value is torch.bfloat16; query is torch.float32"),
    ("block_tables", lambda t: t[0], ValueError, "block_tables has shape"),
    ("block_tables", lambda t: t.masked_fill(t == t[0, 0], 99), ValueError, "block_tables holds page 99"),
    ("context_lens", lambda n: n[:1], ValueError, "context_lens has shape"),
    ("context_lens", lambda n: n.float(), TypeError, "context_lens is torch.float32"),
    ("context_lens", lambda n: n + 1000, ValueError, "context_lens holds 1037"),
    ("context_lens", lambda n: n - 50, ValueError, "context_lens holds -50"),
    ("cu_seqlens", lambda c: c[:-1], ValueError, "cu_seqlens has shape"),
    ("cu_seqlens", lambda c: c + 1, ValueError, "cu_seqlens is .* it must rise from 0 to 28"),
    ("cu_seqlens", lambda c: c[[0, 2, 1]], ValueError, "it must rise from 0"),
    ("scale", float("inf"), ValueError, "scale is inf"),
    ("sliding_window", 0, ValueError, "sliding_window is 0"),
    ("softcap", -1.0, ValueError, "softcap is -1.0"),
    ("sinks", torch.zeros(3), ValueError, "sinks is torch.float32 .3,."),
    ("position_offset", torch.zeros(3, dtype=torch.int32), ValueError, "position_offset has shape"),
    ("workspace_tokens", 0, ValueError, "workspace_tokens is 0"),
    ("host_lengths", ([37, 0], [0, 28]), ValueError, "host_lengths has"),
    ("out", torch.zeros(28, 8, 63), ValueError, "out has shape"),
    ("out", torch.zeros(28, 8, 64, dtype=torch.float16), TypeError, "out is torch.float16"),
    ("check", "maybe", ValueError, "check is 'maybe'"),
]  # fmt: skip


@pytest.mark.parametrize("name,change,error,message", BAD, ids=[f"{i}-{b[0]}" for i, b in enumerate(BAD)])
def test_bad_arguments_are_refused_with_their_name_and_value(name, change, error, message) -> None:
    case = float32(PrefillCase(Case("", lens=(37, 0)), (21, 7)))
    batch, new = prefill_cases.make(case, "cpu")
    given = {
        "query": new.query,
        "key": new.key,
        "value": new.value,
        "block_tables": batch.block_tables,
        "context_lens": batch.seq_lens,
        "cu_seqlens": new.cu_seqlens,
    }
    given[name] = change(given[name]) if callable(change) else change
    with pytest.raises(error, match=message):
        prefill_pages(pages=batch.pages, layout=batch.layout, **given)


def test_attention_of_another_shape_is_refused() -> None:
    case = float32(BY_NAME["d64-g4"])
    batch, new = prefill_cases.make(case, "cpu")
    with pytest.raises(ValueError, match="attention returned shapes"):
        prefill(case, batch, new, attention=lambda q, *_, **__: (q, torch.zeros(len(q), q.shape[1])))


def test_positions_beyond_the_tables_are_refused() -> None:
    case = float32(BY_NAME["everything"])
    batch, new = prefill_cases.make(case, "cpu")
    assert batch.position_offset is not None
    batch.position_offset += 1000
    with pytest.raises(ValueError, match="positions reach"):
        prefill(case, batch, new)
