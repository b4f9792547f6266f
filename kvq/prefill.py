"""Prefill over a quantized context: new tokens see each other in full precision, and the pages before them.

With an injected ``attention`` (FlashAttention, say) the context is dequantized piece by piece into a bounded workspace
and the pieces' results are merged by log-sum-exp. Without one, the Triton kernel reads the pages as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from kvq import reference
from kvq.cache import PagedKVCache
from kvq.kernels.device import DeviceTransform
from kvq.ops import FLOATS, Check, check_ids, check_lengths, check_pages, check_tokens
from kvq.page import PageLayout
from kvq.reference import HotPool

WORKSPACE_TOKENS = 16384


class Attention(Protocol):
    """Dense attention of a packed batch, as FlashAttention's varlen function computes it.

    q [tokens, heads, head_dim]; k and v [keys, kv_heads, head_dim]; cu_seqlens_q and cu_seqlens_k int32
    [num_seqs + 1]; the longest lengths are ints. ``causal`` masks are aligned to the last key of a sequence. ``window``
    (left, right): the query that stands at key j sees keys j - left .. j + right, -1 for no bound; (-1, -1) or
    (sliding_window - 1, 0). ``softcap`` 0.0 for none. Returns the output, like q, and the natural log-sum-exp of the
    scaled scores, float32 [heads, tokens]. It may write the output to ``out``; any other tensor is copied there.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        causal: bool,
        scale: float,
        window: tuple[int, int],
        softcap: float,
        out: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Piece(NamedTuple):
    """Sequences first..last (exclusive) of one attention call, and the context tokens that it sees of each."""

    first: int
    last: int
    spans: list[tuple[int, int]]
    causal: bool


def plan_pieces(
    context_lens: Sequence[int], cu_seqlens: Sequence[int], workspace_tokens: int, sliding_window: int | None = None
) -> list[Piece]:
    """The attention calls of a batch, each over at most ``workspace_tokens`` of context.

    Every sequence has one causal call, over the end of its context and its new tokens. Neighbours share it as far as
    the workspace reaches. A context beyond the workspace has calls of its own, the causal one last. With a window only
    the context that some query sees is named; the caller has made sure that it fits the workspace.
    """
    pieces: list[Piece] = []
    spans: list[tuple[int, int]] = []
    first, room = 0, workspace_tokens

    def close(last: int) -> None:
        nonlocal first, room, spans
        if spans:
            pieces.append(Piece(first, last, spans, causal=True))
        first, room, spans = last, workspace_tokens, []

    for i, n in enumerate(context_lens):
        start = 0
        if cu_seqlens[i + 1] == cu_seqlens[i]:
            start = n  # nobody looks
        elif sliding_window is not None:
            start = max(0, n - sliding_window + 1)
        if n - start > room:
            close(i)
        split = n - start > workspace_tokens
        while n - start > workspace_tokens:
            pieces.append(Piece(i, i + 1, [(start, start + workspace_tokens)], causal=False))
            start += workspace_tokens
        spans.append((start, n))
        room -= n - start
        if split:
            close(i + 1)
    close(len(context_lens))
    return pieces


def merge(
    a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys from the attention over each: out [tokens, heads, head_dim] and natural
    log-sum-exp [tokens, heads]; computed and returned in float32."""
    lse = torch.logaddexp(a_lse, b_lse)
    out = a * torch.exp(a_lse - lse)[..., None]
    return out.addcmul_(b, torch.exp(b_lse - lse)[..., None]), lse


def _gather_into(
    pages: torch.Tensor,
    layout: PageLayout,
    block_table: torch.Tensor,
    start: int,
    stop: int,
    key: torch.Tensor,
    value: torch.Tensor,
    transform: DeviceTransform | None,
    hot: HotPool | None,
    shift: int,
) -> None:
    """Dequantize tokens start..stop of a sequence into ``key`` and ``value`` [stop - start, kv_heads, head_dim]."""
    if pages.is_cuda:
        from kvq.kernels.gather import gather

        gather(pages, layout, block_table.contiguous(), start, stop, key, value, transform, hot, shift)
        return
    skip = start // layout.page_size  # whole pages before the first token
    before = skip * layout.page_size
    source = None if transform is None else transform.source
    k, v = reference.gather(pages, layout, block_table[skip:], stop - before, source, hot, shift + before, key.dtype)
    key.copy_(k[start - before :])
    value.copy_(v[start - before :])


def _prefill_pieces(
    attention: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    block_tables: torch.Tensor,
    context_lens: Sequence[int],
    starts: Sequence[int],
    scale: float,
    result: torch.Tensor,
    lse: torch.Tensor,
    transform: DeviceTransform | None,
    hot: HotPool | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    shifts: Sequence[int],
    workspace_tokens: int,
) -> None:
    """The path with an injected ``attention``. The workspace holds the keys of one call: of each sequence its context,
    then its new tokens."""
    pieces = plan_pieces(context_lens, starts, workspace_tokens, sliding_window)

    def lengths(piece: Piece) -> list[int]:
        new = [starts[i + 1] - starts[i] if piece.causal else 0 for i in range(piece.first, piece.last)]
        return [stop - start + n for (start, stop), n in zip(piece.spans, new, strict=True)]

    rows = max((sum(lengths(p)) for p in pieces if any(stop > start for start, stop in p.spans)), default=0)
    work_key, work_value = key.new_empty(2, rows, layout.kv_heads, layout.head_dim)
    before: tuple[torch.Tensor, torch.Tensor] | None = None  # merged result of the pieces without new tokens
    for piece in pieces:
        tokens = slice(starts[piece.first], starts[piece.last])
        if tokens.start == tokens.stop:
            continue
        key_lens = lengths(piece)
        if any(stop > start for start, stop in piece.spans):
            at = 0
            for i, (start, stop) in enumerate(piece.spans, piece.first):
                end = at + stop - start
                if stop > start:
                    _gather_into(
                        pages, layout, block_tables[i], start, stop, work_key[at:end], work_value[at:end], transform,
                        hot, shifts[i],
                    )  # fmt: skip
                at = end
                if piece.causal:
                    end += starts[i + 1] - starts[i]
                    work_key[at:end] = key[starts[i] : starts[i + 1]]
                    work_value[at:end] = value[starts[i] : starts[i + 1]]
                    at = end
            k, v = work_key[:at], work_value[:at]
        else:
            k, v = key[tokens], value[tokens]
        query_lens = [starts[i + 1] - starts[i] for i in range(piece.first, piece.last)]
        target = result[tokens]
        if piece.causal and before is None and result.dtype == query.dtype:
            buffer = target
        else:
            buffer = torch.empty_like(query[tokens])
        o, s = attention(
            query[tokens], k, v, _cumulative(query_lens, query.device), _cumulative(key_lens, query.device),
            max(query_lens), max(key_lens), causal=piece.causal, scale=scale,
            window=(-1, -1) if sliding_window is None else (sliding_window - 1, 0), softcap=softcap or 0.0, out=buffer,
        )  # fmt: skip
        if o.shape != buffer.shape or s.shape != (query.shape[1], len(o)):
            raise ValueError(
                f"attention returned shapes {tuple(o.shape)} and {tuple(s.shape)}; expected {tuple(buffer.shape)} and "
                f"[{query.shape[1]}, {len(buffer)}]"
            )
        s = s.transpose(0, 1)
        if not piece.causal:
            before = (o, s) if before is None else merge(*before, o, s)
            continue
        if before is not None:
            o, s = merge(*before, o, s)
            before = None
        if sinks is not None:
            with_sink = torch.logaddexp(s, sinks.float())
            o = o * torch.exp(s - with_sink)[..., None]
            s = with_sink
        if o.data_ptr() != target.data_ptr():
            target.copy_(o)
        lse[tokens] = s


def _cumulative(lengths: list[int], device: torch.device) -> torch.Tensor:
    total, sums = 0, [0]
    for n in lengths:
        total += n
        sums.append(total)
    return torch.tensor(sums, dtype=torch.int32).to(device, non_blocking=True)


@torch.no_grad()
def prefill_pages(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float | None = None,
    transform: DeviceTransform | None = None,
    hot: HotPool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    position_offset: torch.Tensor | None = None,
    attention: Attention | None = None,
    workspace_tokens: int = WORKSPACE_TOKENS,
    host_lengths: tuple[Sequence[int], Sequence[int]] | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    check: Check = "sync",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of new tokens over the quantized context of their sequence and, causally, over each other.

    Args:
        query: [tokens, heads, head_dim], fp16 or bf16 (float32 on CPU); key, value: [tokens, kv_heads, head_dim] of
            the same dtype. Rows cu_seqlens[i]..cu_seqlens[i + 1] are the new tokens of sequence i. They need not be
            in the pages.
        block_tables: int32 [num_seqs, max_pages]. context_lens: int32 [num_seqs], tokens of a sequence before its
            new ones, all in pages. cu_seqlens: int32 [num_seqs + 1], from 0 to tokens. Either length may be 0.
        scale, sliding_window, softcap, sinks, position_offset: as in ops.decode_pages.
        attention: dense attention to use (see Attention). It is left aside for a window of which the workspace
            cannot hold the context, and for a key offset at negative positions.
        workspace_tokens: most context tokens that are held dequantized at a time; besides, the new tokens of a call
            are copied. host_lengths: context_lens and cu_seqlens as ints, to spare ``attention`` a synchronisation.
        out: like query, or float32. return_lse: also the natural log-sum-exp, float32 [tokens, heads], sinks included.

    Raises ValueError or TypeError for arguments that do not fit, and with ``check="sync"`` for lengths and pages out of
    range.
    """
    check_pages(pages, layout)
    if query.dim() != 3 or query.shape[2] != layout.head_dim:
        raise ValueError(f"query has shape {tuple(query.shape)}; expected [tokens, heads, {layout.head_dim}]")
    tokens, heads, head_dim = query.shape
    if heads < 1 or heads % layout.kv_heads:
        raise ValueError(f"query has {heads} heads; it must be a multiple of the {layout.kv_heads} kv heads")
    if query.dtype not in FLOATS or (query.is_cuda and query.dtype == torch.float32):
        raise TypeError(f"query is {query.dtype}; allowed: float16, bfloat16 (float32 on CPU)")
    if query.device != pages.device:
        raise ValueError(f"query is on {query.device}; the pages are on {pages.device}")
    for name, x in (("key", key), ("value", value)):
        check_tokens(name, x, layout, pages)
        if x.shape[0] != tokens:
            raise ValueError(f"{name} has {x.shape[0]} tokens; query has {tokens}")
        if x.dtype != query.dtype:
            raise TypeError(f"{name} is {x.dtype}; query is {query.dtype}")
    if hot is not None and pages.is_cuda and hot.pool.dtype != query.dtype:
        raise TypeError(f"the hot pool is {hot.pool.dtype}; query is {query.dtype}")
    if block_tables.dim() != 2:
        raise ValueError(f"block_tables has shape {tuple(block_tables.shape)}; expected [num_seqs, max_pages]")
    num_seqs = block_tables.shape[0]
    check_ids("block_tables", block_tables, (num_seqs, block_tables.shape[1]), pages.device)
    check_ids("context_lens", context_lens, (num_seqs,), pages.device)
    check_ids("cu_seqlens", cu_seqlens, (num_seqs + 1,), pages.device)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; it must be positive, or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; it must be positive, or None")
    if sinks is not None and (tuple(sinks.shape) != (heads,) or sinks.dtype not in FLOATS):
        raise ValueError(f"sinks is {sinks.dtype} {tuple(sinks.shape)}; expected float [{heads}]")
    if position_offset is not None:
        check_ids("position_offset", position_offset, (num_seqs,), pages.device)
    if workspace_tokens < 1:
        raise ValueError(f"workspace_tokens is {workspace_tokens}; it must be positive")
    if out is not None and (out.shape != query.shape or out.stride(-1) != 1):
        raise ValueError(f"out has shape {tuple(out.shape)}; expected that of query, contiguous in its last dim")
    if out is not None and out.dtype not in (query.dtype, torch.float32):
        raise TypeError(f"out is {out.dtype}; allowed: {query.dtype}, float32")
    scale = head_dim**-0.5 if scale is None else scale
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be finite")
    if check == "sync":
        _check_batch(pages, layout, block_tables, context_lens, cu_seqlens, tokens, transform, position_offset)
    elif check != "flag":
        raise ValueError(f"check is {check!r}; allowed: 'sync', 'flag'")
    if host_lengths is not None and [len(x) for x in host_lengths] != [num_seqs, num_seqs + 1]:
        raise ValueError(
            f"host_lengths has {[len(x) for x in host_lengths]} ints; expected {[num_seqs, num_seqs + 1]} "
            "(context_lens, cu_seqlens)"
        )
    result = torch.empty_like(query) if out is None else out
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    shifts = [0] * num_seqs
    if attention is not None and position_offset is not None and transform is not None and transform.pairs:
        shifts = position_offset.tolist()
    if attention is not None and (sliding_window or 0) <= workspace_tokens + 1 and min(shifts, default=0) >= 0:
        contexts, starts = host_lengths or (context_lens.tolist(), cu_seqlens.tolist())
        _prefill_pieces(
            attention, query, key, value, pages, layout, block_tables, contexts, starts, scale, result, lse, transform,
            hot, sliding_window, softcap, sinks, shifts, workspace_tokens,
        )  # fmt: skip
    elif pages.is_cuda:
        from kvq.kernels.prefill import prefill

        query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
        block_tables, context_lens, cu_seqlens = (x.contiguous() for x in (block_tables, context_lens, cu_seqlens))
        position_offset = None if position_offset is None else position_offset.contiguous()
        prefill(
            query, key, value, pages, layout, block_tables, context_lens, cu_seqlens, scale, result, lse, transform,
            hot, sliding_window, softcap, sinks, position_offset,
        )  # fmt: skip
    else:
        source = None if transform is None else transform.source
        o, lse = reference.paged_attention_prefill(
            query, key, value, pages, layout, block_tables, context_lens, cu_seqlens, scale, source, hot,
            sliding_window, softcap, sinks, position_offset,
        )  # fmt: skip
        result.copy_(o)
    return (result, lse) if return_lse else result


def _check_batch(
    pages: torch.Tensor,
    layout: PageLayout,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    tokens: int,
    transform: DeviceTransform | None,
    position_offset: torch.Tensor | None,
) -> None:
    starts = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != tokens or sorted(starts) != starts:
        raise ValueError(f"cu_seqlens is {starts}; it must rise from 0 to {tokens}, the tokens of query")
    check_lengths("context_lens", context_lens, pages, layout, block_tables, transform, position_offset)


def paged_attention_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: PagedKVCache,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    position_offset: torch.Tensor | None = None,
    attention: Attention | None = None,
    workspace_tokens: int = WORKSPACE_TOKENS,
    host_lengths: tuple[Sequence[int], Sequence[int]] | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    check: Check = "sync",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of new tokens over their context in ``cache`` and over each other; arguments as in prefill_pages."""
    return prefill_pages(
        query, key, value, cache.pages, cache.layout, block_tables, context_lens, cu_seqlens, scale=scale,
        transform=cache.transform, hot=cache.hot, sliding_window=sliding_window, softcap=softcap, sinks=sinks,
        position_offset=position_offset, attention=attention, workspace_tokens=workspace_tokens,
        host_lengths=host_lengths, out=out, return_lse=return_lse, check=check,
    )  # fmt: skip
