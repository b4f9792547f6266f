"""paged_attention_prefill compiled: the small cases, then real sizes against the reference on a few rows."""

from __future__ import annotations

import pytest
import torch

import kvq
from kvq import reference
from kvq.kernels.device import USE_ASM
from kvq.prefill import prefill_pages
from tests import tolerances
from tests.kernels import cases, prefill_cases
from tests.kernels.prefill_cases import PrefillCase

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available() or not USE_ASM, reason="needs a GPU, not the interpreter"),
]


@pytest.mark.parametrize("case", prefill_cases.SMALL, ids=str)
def test_prefill_matches_float64_attention_over_the_dequantized_context(case: PrefillCase) -> None:
    batch, new = prefill_cases.make(case, "cuda")
    out, lse = prefill_cases.run_kernel(case, batch, new, torch.float32)
    want, want_lse = prefill_cases.run_reference(case, batch, new)
    assert cases.relative_error(out, want) < tolerances.DECODE[torch.float32]
    limit = tolerances.LSE_LARGE_OFFSET if case.context.mu >= 100 else tolerances.LSE
    assert (lse - want_lse).abs().max() < limit


def dense(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal, scale, window, softcap, out):
    """The Attention protocol in float32 torch, for one sequence, a kv head at a time."""
    if len(cu_seqlens_q) != 2:
        raise NotImplementedError
    group = q.shape[1] // k.shape[1]
    lse = torch.empty(q.shape[1], len(q), device=q.device)
    own = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
    index = torch.arange(len(k), device=q.device)[None]
    hidden = torch.zeros(len(q), len(k), dtype=torch.bool, device=q.device)
    if causal:
        hidden |= index > own
    if window[0] >= 0:
        hidden |= index < own - window[0]
    for head in range(q.shape[1]):
        s = q[:, head].float() @ k[:, head // group].float().T * scale
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        s = s.masked_fill_(hidden, -torch.inf)
        lse[head] = s.logsumexp(-1)
        out[:, head] = s.softmax(-1) @ v[:, head // group].float()
    return out, lse


def rows_of_reference(query, key, value, cache, table, context, rows, window=None):
    """Float64 attention of the new tokens at ``rows`` only."""
    keys, values = reference.gather(
        cache.pages, cache.layout, table, context, cache.source, cache.hot, dtype=torch.float64
    )
    keys, values = torch.cat([keys, key.double()]), torch.cat([values, value.double()])
    out = []
    for row in rows:
        n = context + row + 1
        out.append(
            reference.attention(
                query[row : row + 1].double(), keys[:n], values[:n], query.shape[-1] ** -0.5, sliding_window=window
            )[0]
        )
    return torch.cat(out)


@pytest.mark.parametrize("attention", [None, dense], ids=["kernel", "pieces"])
@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("context", [0, 8192, 32768 - 5])
def test_long_prefill_matches_the_reference(attention, window: int | None, context: int) -> None:
    torch.manual_seed(0)
    heads, kv_heads, dim, tokens = 8, 2, 128, 8192
    count = -(-max(context, 1) // 64)
    cache = kvq.PagedKVCache(count + 1, kv_heads, dim, "int4", 64, hot_pages=9, dtype=torch.bfloat16)
    table = torch.randperm(count + 1, dtype=torch.int32, device="cuda")[:count]
    cache.promote(table[[0, *range(max(count - 8, 1), count)]].tolist())
    old = torch.randn(2, context, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    index = torch.arange(context, device="cuda")
    cache.write(old[0], old[1], table.long()[index // 64] * 64 + index % 64)
    query = torch.randn(tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, tokens, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(query) if attention else torch.empty_like(query, dtype=torch.float32)
    kvq.paged_attention_prefill(
        query, key, value, cache, table[None], torch.tensor([context], device="cuda", dtype=torch.int32),
        torch.tensor([0, tokens], device="cuda", dtype=torch.int32), sliding_window=window, attention=attention,
        out=out,
    )  # fmt: skip
    rows = [0, 1, 63, 64, 4097, 8190, 8191]
    want = rows_of_reference(query, key, value, cache, table, context, rows, window)
    limit = 2 * tolerances.DECODE[torch.bfloat16] if attention else tolerances.DECODE[torch.float32]
    assert cases.relative_error(out[rows], want) < limit


def test_ragged_batch_matches_every_sequence_alone() -> None:
    torch.manual_seed(0)
    contexts, new = [0, 5000, 64, 1, 300, 12345], [700, 1, 0, 129, 64, 333]
    need = [-(-n // 64) for n in contexts]
    cache = kvq.PagedKVCache(sum(need) + 1, 8, 128, "int4", 64, dtype=torch.float16)
    cache.write(*torch.randn(2, (sum(need) + 1) * 64, 8, 128, device="cuda", dtype=torch.float16),
                torch.arange((sum(need) + 1) * 64, device="cuda"))  # fmt: skip
    order = torch.randperm(sum(need) + 1, device="cuda", dtype=torch.int32)
    tables = torch.full((len(need), max(need)), -1, dtype=torch.int32, device="cuda")
    for i, n in enumerate(need):
        tables[i, :n], order = order[:n], order[n:]
    query = torch.randn(sum(new), 32, 128, device="cuda", dtype=torch.float16)
    key, value = torch.randn(2, sum(new), 8, 128, device="cuda", dtype=torch.float16)
    lens = torch.tensor(contexts, device="cuda", dtype=torch.int32)
    starts = torch.tensor([0, *new]).cumsum(0).to("cuda", torch.int32)
    out, lse = kvq.paged_attention_prefill(query, key, value, cache, tables, lens, starts, return_lse=True)
    assert torch.isfinite(lse).all()
    for i, (a, b) in enumerate(zip(starts.tolist(), starts[1:].tolist())):
        alone = kvq.paged_attention_prefill(
            query[a:b], key[a:b], value[a:b], cache, tables[i : i + 1], lens[i : i + 1],
            torch.tensor([0, b - a], device="cuda", dtype=torch.int32),
        )  # fmt: skip
        assert a == b or cases.relative_error(out[a:b], alone) < tolerances.DECODE[torch.float16]
    rows = [0, 332]
    a = int(starts[5])
    want = rows_of_reference(query[a:], key[a:], value[a:], cache, tables[5], contexts[5], rows)
    assert cases.relative_error(out[a:][rows], want) < tolerances.DECODE[torch.float16]


@pytest.mark.parametrize("attention", [None, dense], ids=["kernel", "pieces"])
def test_memory_does_not_grow_with_the_context(attention) -> None:
    peaks = []
    for context in (4096, 65536):
        cache = kvq.PagedKVCache(context // 64, 1, 128, "int4", 64, dtype=torch.float16)
        query, key, value = (torch.randn(256, h, 128, device="cuda", dtype=torch.float16) for h in (4, 1, 1))
        table = torch.arange(context // 64, device="cuda", dtype=torch.int32)[None]
        lens = torch.tensor([context], device="cuda", dtype=torch.int32)
        starts = torch.tensor([0, 256], device="cuda", dtype=torch.int32)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        prefill_pages(
            query, key, value, cache.pages, cache.layout, table, lens, starts, attention=attention,
            workspace_tokens=4096, check="flag",
        )  # fmt: skip
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < peaks[0] + (2 << 20)


def test_kernel_runs_from_a_captured_graph() -> None:
    case = next(c for c in prefill_cases.SMALL if str(c) == "everything")
    batch, new = prefill_cases.make(case, "cuda")
    prefill_cases.run_kernel(case, batch, new, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # refuses any synchronisation
        out, _ = prefill_cases.run_kernel(case, batch, new, torch.bfloat16)
    graph.replay()
    want, _ = prefill_cases.run_reference(case, batch, new)
    assert cases.relative_error(out, want) < tolerances.DECODE[torch.bfloat16]
