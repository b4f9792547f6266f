"""Operations on pages: checked arguments, then the Triton kernel on CUDA or the torch reference elsewhere.

Pages are any uint8 view [num_pages, >= page_bytes] with a contiguous last dim and a PageLayout: what an engine hands
over. ``check="sync"`` reads device values and raises before anything is written; ``check="flag"`` never synchronises:
bad tokens are skipped and counted in a Status word.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from kvq import reference
from kvq.kernels.device import DeviceTransform
from kvq.page import PageLayout
from kvq.plan import MAX_Q_LEN, DecodePlan, check_skip_threshold
from kvq.reference import HotPool
from kvq.scheme import TensorScheme

Check = Literal["sync", "flag"]
OnNonfinite = Literal["raise", "clamp"]
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
STATUS_FIELDS = ("bad_slots", "not_finite", "clamped_rows", "bad_positions")


def new_status(device: torch.device | str) -> torch.Tensor:
    """int32 [4] of zeros, device counters (STATUS_FIELDS).

    bad_slots, bad_positions: tokens skipped. Of rows of a token, head, and K or V, not_finite: that hold NaN or inf,
    skipped (clamped with on_nonfinite="clamp"); clamped_rows: that went beyond fp16 range once encoded.
    """
    return torch.zeros(len(STATUS_FIELDS), dtype=torch.int32, device=device)


def check_pages(pages: torch.Tensor, layout: PageLayout) -> None:
    """Raise ValueError unless ``pages`` is a view that ``layout`` and the kernels can address."""
    if pages.dtype != torch.uint8 or pages.dim() != 2:
        raise ValueError(f"pages is {pages.dtype} {tuple(pages.shape)}; expected uint8 [num_pages, page_bytes]")
    if pages.shape[1] < layout.page_bytes or pages.stride(1) != 1:
        raise ValueError(
            f"pages has rows of {pages.shape[1]} bytes, stride {pages.stride(1)}; the layout needs "
            f"{layout.page_bytes} contiguous bytes a page"
        )
    if pages.stride(0) % 16 or pages.data_ptr() % 16:
        raise ValueError(f"pages has page stride {pages.stride(0)} or a base that is not a multiple of 16 bytes")


def check_tokens(name: str, x: torch.Tensor, layout: PageLayout, pages: torch.Tensor) -> None:
    if x.dim() != 3 or x.shape[1:] != (layout.kv_heads, layout.head_dim):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected [tokens, {layout.kv_heads}, {layout.head_dim}]")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} is {x.dtype}; allowed: float16, bfloat16, float32")
    if x.device != pages.device:
        raise ValueError(f"{name} is on {x.device}; the pages are on {pages.device}")


def check_ids(name: str, x: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {list(shape)}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {x.dtype}; allowed: int32, int64")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}; expected {device}")


def check_finite(name: str, x: torch.Tensor) -> None:
    """Raise ValueError naming the first NaN or inf of ``x`` and where it stands."""
    finite = torch.isfinite(x)
    if not finite.all():
        where = [int(i) for i in (~finite).nonzero()[0]]
        raise ValueError(f"{name} holds {x[tuple(where)].item()} at {where}; pass on_nonfinite='clamp' to clamp it")


def finite(x: torch.Tensor) -> torch.Tensor:
    """``x`` with NaN as 0 and infinities as fp16's largest."""
    return x.nan_to_num(0.0, reference.FP16_MAX, -reference.FP16_MAX)


def write_pages(
    pages: torch.Tensor,
    layout: PageLayout,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor | None = None,
    transform: DeviceTransform | None = None,
    hot: HotPool | None = None,
    *,
    check: Check = "sync",
    on_nonfinite: OnNonfinite = "raise",
    status: torch.Tensor | None = None,
) -> None:
    """Quantize ``key`` and ``value`` [tokens, kv_heads, head_dim] into pages at int ``slot_mapping`` [tokens].

    A slot is page * page_size + row; negative slots are skipped. ``positions`` [tokens] are needed when the transform
    has an offset. Tokens of a hot page are also stored, unchanged, in the hot pool. Raises ValueError or TypeError for
    arguments that do not fit; with ``check="sync"`` also for slots or positions out of range and NaN or inf. With
    ``check="flag"`` a token that holds NaN or inf is skipped: by the kernel in the rows that hold it, on CPU in all.
    """
    check_pages(pages, layout)
    check_tokens("key", key, layout, pages)
    check_tokens("value", value, layout, pages)
    if value.dtype != key.dtype:
        raise TypeError(f"value is {value.dtype}; key is {key.dtype}")
    tokens = slot_mapping.numel()
    check_ids("slot_mapping", slot_mapping, (tokens,), pages.device)
    if key.shape[0] < tokens or value.shape[0] < tokens:
        raise ValueError(f"slot_mapping has {tokens} slots; key has {key.shape[0]} and value {value.shape[0]} tokens")
    key, value = key[:tokens], value[:tokens]
    if on_nonfinite not in ("raise", "clamp"):
        raise ValueError(f"on_nonfinite is {on_nonfinite!r}; allowed: 'raise', 'clamp'")
    if transform is not None and transform.pairs and positions is None:
        raise ValueError("positions is None; a transform with an offset needs the position of each token")
    if positions is not None:
        check_ids("positions", positions, (tokens,), pages.device)
    if check == "sync":
        limit = pages.shape[0] * layout.page_size
        if tokens and int(slot_mapping.max()) >= limit:
            raise ValueError(f"slot_mapping holds {int(slot_mapping.max())}; there are {limit} slots")
        live = slot_mapping >= 0
        if transform is not None and transform.pairs and positions is not None and bool(live.any()):
            lo, hi = int(positions[live].min()), int(positions[live].max())
            if lo < 0 or hi > transform.max_position:
                raise ValueError(f"positions holds {lo}..{hi}; allowed: 0..{transform.max_position}")
        if on_nonfinite == "raise":
            check_finite("key", key[live])
            check_finite("value", value[live])
    elif check != "flag":
        raise ValueError(f"check is {check!r}; allowed: 'sync', 'flag'")
    if status is None:
        status = new_status(pages.device)
    if pages.is_cuda:
        from kvq.kernels.quantize import write

        write(
            pages,
            layout,
            _dense(key),
            _dense(value),
            slot_mapping.contiguous(),
            status,
            None if positions is None else positions.contiguous(),
            transform,
            hot,
            clamp=on_nonfinite == "clamp",
            check=check == "flag",
        )
        return
    slots = slot_mapping
    if check == "flag":
        slots = _flagged_slots(pages, layout, key, value, slots, positions, transform, on_nonfinite, status)
    if on_nonfinite == "clamp":
        key, value = finite(key.float()), finite(value.float())
    source = None if transform is None else transform.source
    status[2] += reference.write(pages, layout, key, value, slots, positions, source, hot)


def _flagged_slots(
    pages: torch.Tensor,
    layout: PageLayout,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None,
    transform: DeviceTransform | None,
    on_nonfinite: OnNonfinite,
    status: torch.Tensor,
) -> torch.Tensor:
    """CPU side of ``check="flag"``: slots with bad tokens made negative, and counted as the kernel counts them."""
    slots = slots.clone()
    bad = slots >= pages.shape[0] * layout.page_size
    status[0] += bad.sum()
    slots[bad] = -1
    if transform is not None and transform.pairs and positions is not None:
        bad = (slots >= 0) & ((positions < 0) | (positions > transform.max_position))
        status[3] += bad.sum()
        slots[bad] = -1
    bad = (slots >= 0)[:, None] & ~torch.cat([torch.isfinite(key), torch.isfinite(value)], 1).all(-1)
    status[1] += bad.sum()
    if on_nonfinite == "raise":
        slots[bad.any(-1)] = -1
    return slots


def gather_pages(
    pages: torch.Tensor,
    layout: PageLayout,
    block_table: torch.Tensor,
    seq_len: int,
    transform: DeviceTransform | None = None,
    hot: HotPool | None = None,
    *,
    start: int = 0,
    position_offset: int = 0,
    dtype: torch.dtype = torch.float16,
    check: Check = "sync",
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of tokens start..seq_len of one sequence, [seq_len - start, kv_heads, head_dim], original space."""
    check_pages(pages, layout)
    needed = -(-seq_len // layout.page_size)
    if not dtype.is_floating_point:
        raise TypeError(f"dtype is {dtype}; it must be a floating type")
    if not 0 <= start <= seq_len:
        raise ValueError(f"start is {start}; it must be in 0..{seq_len} (seq_len)")
    check_ids("block_table", block_table, (block_table.numel(),), pages.device)
    if needed > block_table.shape[0]:
        raise ValueError(f"seq_len is {seq_len}; block_table has {block_table.shape[0]} pages of {layout.page_size}")
    if check == "sync":
        check_table("block_table", block_table[:needed], pages.shape[0])
    if transform is not None and transform.pairs and start < seq_len:
        lo, hi = start + position_offset, seq_len - 1 + position_offset
        if lo < 0 or hi > transform.max_position:
            raise ValueError(f"positions are {lo}..{hi}; allowed: 0..{transform.max_position}")
    if not pages.is_cuda:
        source = None if transform is None else transform.source
        key, value = reference.gather(pages, layout, block_table, seq_len, source, hot, position_offset, dtype)
        return key[start:], value[start:]
    from kvq.kernels.gather import gather

    shape = (seq_len - start, layout.kv_heads, layout.head_dim)
    key = torch.empty(shape, dtype=dtype, device=pages.device)
    value = torch.empty_like(key)
    gather(pages, layout, block_table.contiguous(), start, seq_len, key, value, transform, hot, position_offset)
    return key, value


def check_table(name: str, pages_used: torch.Tensor, num_pages: int) -> None:
    if pages_used.numel():
        lo, hi = int(pages_used.min()), int(pages_used.max())
        if lo < 0 or hi >= num_pages:
            raise ValueError(f"{name} holds page {lo if lo < 0 else hi}; allowed: 0..{num_pages - 1}")


def decode_pages(
    query: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    plan: DecodePlan | None = None,
    scale: float | None = None,
    transform: DeviceTransform | None = None,
    hot: HotPool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    position_offset: torch.Tensor | None = None,
    skip_threshold: float | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    check: Check = "sync",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last q_len tokens of each sequence over its pages.

    Args:
        query: [num_seqs, q_len <= 8, heads, head_dim] or [num_seqs, heads, head_dim], fp16 or bf16 (float32 on CPU).
        block_tables: int32 [num_seqs, max_pages]; seq_lens: int32 [num_seqs], query tokens included, 0 for padding.
        plan: a DecodePlan updated for this step (graph-safe); None makes one and updates it, on CUDA.
        scale: softmax scale, default head_dim ** -0.5. sliding_window: tokens seen, the query's own included.
        softcap: scores become cap * tanh(score / cap). sinks: float [heads], a learned logit a head.
        position_offset: int32 [num_seqs]; the token at index i has position i + offset. Default 0.
        skip_threshold: leave out pages of little probability (see DecodePlan, whose own counts where there is a plan).
        out: like query, or float32. return_lse: also the natural log-sum-exp, float32, sinks included.

    Raises ValueError or TypeError for arguments that do not fit, and with ``check="sync"`` for lengths and pages out of
    range. Sequences of length 0 give zeros.
    """
    check_pages(pages, layout)
    squeeze = query.dim() == 3
    if squeeze:
        query = query.unsqueeze(1)
    if query.dim() != 4 or query.shape[3] != layout.head_dim:
        raise ValueError(
            f"query has shape {tuple(query.shape)}; expected [num_seqs, q_len, heads, {layout.head_dim}] or "
            f"[num_seqs, heads, {layout.head_dim}]"
        )
    num_seqs, q_len, heads, head_dim = query.shape
    if heads % layout.kv_heads:
        raise ValueError(f"query has {heads} heads; it must be a multiple of the {layout.kv_heads} kv heads")
    if not 1 <= q_len <= MAX_Q_LEN:
        raise ValueError(f"query has q_len {q_len}; allowed: 1 to {MAX_Q_LEN}")
    if query.dtype not in FLOATS or (query.is_cuda and query.dtype == torch.float32):
        raise TypeError(f"query is {query.dtype}; allowed: float16, bfloat16 (float32 on CPU)")
    if query.device != pages.device:
        raise ValueError(f"query is on {query.device}; the pages are on {pages.device}")
    if block_tables.dim() != 2:
        raise ValueError(f"block_tables has shape {tuple(block_tables.shape)}; expected [num_seqs, max_pages]")
    check_ids("block_tables", block_tables, (num_seqs, block_tables.shape[1]), pages.device)
    check_ids("seq_lens", seq_lens, (num_seqs,), pages.device)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; it must be positive, or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; it must be positive, or None")
    if sinks is not None and (tuple(sinks.shape) != (heads,) or sinks.dtype not in FLOATS):
        raise ValueError(f"sinks is {sinks.dtype} {tuple(sinks.shape)}; expected float [{heads}]")
    if position_offset is not None:
        check_ids("position_offset", position_offset, (num_seqs,), pages.device)
    if out is not None and (out.shape != (query.squeeze(1) if squeeze else query).shape or out.stride(-1) != 1):
        raise ValueError(f"out has shape {tuple(out.shape)}; expected that of query, contiguous in its last dim")
    if out is not None and out.dtype not in (query.dtype, torch.float32):
        raise TypeError(f"out is {out.dtype}; allowed: {query.dtype}, float32")
    scale = head_dim**-0.5 if scale is None else scale
    if not (math.isfinite(scale) and scale >= 0):
        raise ValueError(f"scale is {scale}; it must be finite and at least 0")
    if skip_threshold is not None:
        check_skip_threshold(skip_threshold)
        if plan is not None:
            raise ValueError("skip_threshold is given beside a plan; make the plan with it, or set plan.skip_threshold")
    if check == "sync":
        max_len = None if plan is None else plan.max_seq_len
        check_lengths("seq_lens", seq_lens, pages, layout, block_tables, transform, position_offset, max_len)
    elif check != "flag":
        raise ValueError(f"check is {check!r}; allowed: 'sync', 'flag'")
    result = torch.empty_like(query) if out is None else (out.unsqueeze(1) if squeeze else out)
    if pages.is_cuda:
        query, block_tables, seq_lens = _dense(query), _dense(block_tables), _dense(seq_lens)
        sinks = None if sinks is None else _dense(sinks)
        position_offset = None if position_offset is None else _dense(position_offset)
        lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        if plan is None:
            plan = DecodePlan(
                layout,
                heads,
                num_seqs,
                block_tables.shape[1] * layout.page_size,
                q_len=q_len,
                sliding_window=sliding_window,
                hot=hot is not None,
                pairs=0 if transform is None else transform.pairs,
                skip_threshold=skip_threshold,
                device=pages.device,
            )
            plan.update(block_tables, seq_lens, hot)
        else:
            plan.check(layout, heads, num_seqs, q_len, sliding_window, hot is not None)
        from kvq.kernels.decode import decode

        decode(
            plan, query, pages, block_tables, seq_lens, scale, result, lse, transform, hot, softcap, sinks,
            position_offset,
        )  # fmt: skip
    else:
        source = None if transform is None else transform.source
        o, lse = reference.paged_attention_decode(
            query, pages, layout, block_tables, seq_lens, scale, source, hot, sliding_window, softcap, sinks,
            position_offset, skip_threshold=skip_threshold,
        )  # fmt: skip
        result.copy_(o)
    if squeeze:
        result, lse = result.squeeze(1), lse.squeeze(1)
    return (result, lse) if return_lse else result


def _dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` with a contiguous last dim, as the kernels address it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def check_lengths(
    name: str,
    lengths: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    block_tables: torch.Tensor,
    transform: DeviceTransform | None,
    position_offset: torch.Tensor | None,
    max_len: int | None = None,
) -> None:
    """Raise ValueError unless the tokens that ``lengths`` counts lie within block_tables, pages and position tables.

    ``name`` is what messages call ``lengths``. Reads device values.
    """
    if not lengths.numel():
        return
    lo, hi = int(lengths.min()), int(lengths.max())
    limit = block_tables.shape[1] * layout.page_size
    if max_len is not None:
        limit = min(limit, max_len)
    if lo < 0 or hi > limit:
        raise ValueError(f"{name} holds {lo if lo < 0 else hi}; allowed: 0..{limit}")
    index = torch.arange(block_tables.shape[1], device=pages.device)
    used = block_tables[index * layout.page_size < lengths[:, None]]
    check_table("block_tables", used, pages.shape[0])
    if transform is not None and transform.pairs:
        reach = lengths - 1
        if position_offset is not None:
            reach = torch.maximum(reach + position_offset, position_offset.abs())
        if int(reach.max()) > transform.max_position:
            raise ValueError(f"positions reach {int(reach.max())}; the tables end at {transform.max_position}")


def token_scheme(bits: int, symmetric: bool | None, rotate: bool | None) -> TensorScheme:
    """The per-token scheme of ``quantize_blocks``: INT4 asymmetric and rotated, INT8 symmetric and plain by default."""
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits}; allowed: 4 or 8")
    turned = bits == 4 if rotate is None else rotate
    return TensorScheme(
        bits,
        symmetric=bits == 8 if symmetric is None else symmetric,
        rotate=turned,
        clip=0.95 if bits == 4 and turned else 1.0,
        unshrunk=bits == 4 and turned,
    )
