"""Splits a decode batch over a fixed number of places on the device, so that a captured graph follows changing lengths.

Run once a step, for all layers. A place is what the programs of one grid index do, one for each kv head; an item is a
part of a sequence, done by one place. Costs are counted in quantized pages, a hot page as HOT_COST of them.

* Even: a sequence of ``n`` pages gets ``ceil(n / chunk)`` equal parts, a place each, chunk being the smallest for which
  they are at most ``places`` (a binary search that every program repeats).
* Where that leaves a chunk over SLACK times an even share of the batch, which is what lengths that differ do, the
  sequences are laid end to end and cut into equal shares: a place does the end of one sequence and the start of others.
  There each sequence costs ``start_cost`` tiles more: its query, the way of its first page, and its masked last one.

Sequences are cut between tiles of T pages (``plan.tile_pages``).

Arrays, all int32:

    items       [max_items, ITEM]   sequence, parts of the sequence, list entries [lo, hi) of quantized pages, entries
                                    [lo, hi) of hot pages, and the list entries whose pages every row sees whole
    place_item  [places + 1]        first item of each place
    seq_info    [num_seqs, 2]       parts, first item
    page_list, page_index, hot_list, hot_index [num_seqs, max_pages]    only where pages may be hot: physical page (or
                                  hot slot) and index in the sequence; otherwise the block table is the list

The cost of a sequence is counted from its hot pages on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvq.kernels.device import FUSED, next_pow2
from kvq.plan import HOT_COST, ITEM, DecodePlan
from kvq.reference import HotPool

ITEM_FIELDS = tl.constexpr(ITEM)
SLACK = tl.constexpr(1.06)


@triton.jit
def page_range(seq_len, q_len, window, N: tl.constexpr, WINDOW: tl.constexpr):
    """Pages [lo, hi) that the last q_len tokens of a sequence can see."""
    hi = tl.cdiv(seq_len, N)
    lo = hi * 0
    if WINDOW:
        lo = tl.maximum(seq_len - q_len - window + 1, 0) // N
    return lo, hi


@triton.jit
def full_range(seq_len, q_len, window, N: tl.constexpr, WINDOW: tl.constexpr):
    """Pages [lo, hi) that every one of the last q_len tokens sees whole."""
    hi = tl.maximum(seq_len - q_len + 1, 0) // N
    lo = hi * 0
    if WINDOW:
        lo = tl.cdiv(tl.maximum(seq_len - window, 0), N)
    return lo, hi


@triton.jit
def compact_kernel(
    block_tables, seq_lens, slot_of_page, page_list, page_index, hot_list, hot_index, counts,
    stride_table, stride_list, q_len, window, N: tl.constexpr, WINDOW: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Grid (sequences): lists the quantized and the hot pages of a sequence, in order.

    counts int32 [num_seqs, 4]: both, and where the pages that every row sees whole start and stop in the first list.
    """
    i_seq = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens + i_seq)
    lo, hi = page_range(seq_len, q_len, window, N, WINDOW)
    full_lo, full_hi = full_range(seq_len, q_len, window, N, WINDOW)
    cold, hot, before_lo, before_hi = 0, 0, 0, 0
    for start in range(lo, hi, B):
        o = start + tl.arange(0, B)
        inside = o < hi
        page = tl.load(block_tables + i_seq * stride_table + o, mask=inside, other=0)
        slot = tl.load(slot_of_page + page, mask=inside, other=-1)
        is_hot = (inside & (slot >= 0)).to(tl.int32)
        is_cold = (inside & (slot < 0)).to(tl.int32)
        o_cold = i_seq * stride_list + cold + tl.cumsum(is_cold, 0) - 1
        o_hot = i_seq * stride_list + hot + tl.cumsum(is_hot, 0) - 1
        tl.store(page_list + o_cold, page, mask=is_cold > 0)
        tl.store(page_index + o_cold, o, mask=is_cold > 0)
        tl.store(hot_list + o_hot, slot, mask=is_hot > 0)
        tl.store(hot_index + o_hot, o, mask=is_hot > 0)
        cold += tl.sum(is_cold, 0)
        hot += tl.sum(is_hot, 0)
        before_lo += tl.sum(tl.where(o < full_lo, is_cold, 0), 0)
        before_hi += tl.sum(tl.where(o < full_hi, is_cold, 0), 0)
    tl.store(counts + 4 * i_seq, cold)
    tl.store(counts + 4 * i_seq + 1, hot)
    tl.store(counts + 4 * i_seq + 2, before_lo)
    tl.store(counts + 4 * i_seq + 3, before_hi)


@triton.jit
def schedule_kernel(
    seq_lens, counts, items, place_item, seq_info, num_seqs, places, min_chunk, start_cost, q_len, window,
    N: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr, HAS_HOT: tl.constexpr, COST: tl.constexpr,
    B: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """Grid (sequences); B is a power of two, at least num_seqs."""
    i_seq = tl.program_id(0)
    o_b = tl.arange(0, B)
    inside = o_b < num_seqs
    lo, hi = page_range(tl.load(seq_lens + o_b, mask=inside, other=0), q_len, window, N, WINDOW)
    if HAS_HOT:
        cold = tl.load(counts + 4 * o_b, mask=inside, other=0)
        hot = tl.load(counts + 4 * o_b + 1, mask=inside, other=0)
    else:
        cold = tl.where(inside, hi - lo, 0)
        hot = cold * 0
    cost = cold + COST * hot
    small = tl.maximum(min_chunk, 1)
    laid = tl.where(cost > 0, cost + start_cost, 0)
    share = tl.maximum(tl.cdiv(tl.sum(laid, 0), places), small)
    large = tl.maximum(tl.max(cost, 0), small)
    while small < large:
        middle = (small + large) // 2
        fits = tl.sum(tl.cdiv(cost, middle), 0) <= places
        small = tl.where(fits, small, middle + 1)
        large = tl.where(fits, middle, large)
    even = tl.sum(tl.cdiv(cost, small), 0) <= places
    even &= small.to(tl.float32) <= SLACK * share.to(tl.float32)
    start = tl.cumsum(laid, 0) - laid
    first_place = start // share
    cuts = tl.where(cost > 0, (start + laid - 1) // share - first_place + 1, 0)
    parts = tl.where(even, tl.cdiv(cost, small), cuts)
    own = o_b == i_seq
    mine = tl.sum(tl.where(own, parts, 0), 0)
    first = tl.sum(tl.where(o_b < i_seq, parts, 0), 0)
    own_start = tl.sum(tl.where(own, start, 0), 0)
    own_len = tl.load(seq_lens + i_seq)
    own_lo, own_hi = page_range(own_len, q_len, window, N, WINDOW)
    full_lo, full_hi = full_range(own_len, q_len, window, N, WINDOW)
    own_hot = 0
    if HAS_HOT:
        own_lo = 0
        own_hi = tl.load(counts + 4 * i_seq)
        own_hot = tl.load(counts + 4 * i_seq + 1)
        full_lo = tl.load(counts + 4 * i_seq + 2)
        full_hi = tl.load(counts + 4 * i_seq + 3)
    tl.store(seq_info + 2 * i_seq, mine)
    tl.store(seq_info + 2 * i_seq + 1, first)
    hot_cost = COST * own_hot
    whole = own_hi - own_lo + hot_cost
    for begin in range(0, mine, I):
        part = begin + tl.arange(0, I)
        mask = part < mine
        p_item = items + ITEM_FIELDS * (first + part)
        cut = (own_start // share + part) * share - own_start
        cost_lo = tl.where(even, whole * part // mine, tl.maximum(cut - start_cost, 0))
        cost_hi = tl.where(even, whole * (part + 1) // mine, tl.minimum(tl.maximum(cut + share - start_cost, 0), whole))
        tl.store(p_item, i_seq, mask=mask)
        tl.store(p_item + 1, mine, mask=mask)
        page_lo, page_hi = tl.maximum(cost_lo - hot_cost, 0), tl.maximum(cost_hi - hot_cost, 0)
        page_hi -= tl.where(cost_hi < whole, page_hi % T, 0)
        tl.store(p_item + 2, own_lo + page_lo - page_lo % T, mask=mask)
        tl.store(p_item + 3, own_lo + page_hi, mask=mask)
        tl.store(p_item + 4, tl.minimum(tl.cdiv(cost_lo, COST), own_hot), mask=mask)
        tl.store(p_item + 5, tl.minimum(tl.cdiv(cost_hi, COST), own_hot), mask=mask)
        tl.store(p_item + 6, full_lo, mask=mask)
        tl.store(p_item + 7, full_hi, mask=mask)
    total = tl.sum(parts, 0)
    for place in range(i_seq, places + 1, num_seqs):
        before = tl.sum(tl.minimum(tl.maximum(place - first_place, 0), parts), 0)
        tl.store(place_item + place, tl.where(even, tl.minimum(place, total), before))


def schedule(plan: DecodePlan, block_tables: torch.Tensor, seq_lens: torch.Tensor, hot: HotPool | None) -> None:
    """Launch the schedule of ``plan`` for this step; graph-safe."""
    num_seqs, q_len, window = seq_lens.shape[0], plan.q_len, plan.sliding_window
    page_size = plan.layout.page_size
    if hot is not None:
        compact_kernel[(num_seqs,)](
            block_tables, seq_lens, hot.index, plan.page_list, plan.page_index, plan.hot_list, plan.hot_index,
            plan.counts, block_tables.stride(0), plan.page_list.stride(0), q_len, window or 0,
            N=page_size, WINDOW=window is not None, B=min(1024, max(32, next_pow2(plan.max_pages))),
            num_warps=4, **FUSED,
        )  # fmt: skip
    schedule_kernel[(num_seqs,)](
        seq_lens, plan.counts, plan.items, plan.place_item, plan.seq_info, num_seqs, plan.places,
        plan.config.min_chunk * plan.tile_pages, plan.config.start_cost * plan.tile_pages, q_len, window or 0,
        N=page_size, T=plan.tile_pages, WINDOW=window is not None, HAS_HOT=hot is not None,
        COST=HOT_COST, B=next_pow2(num_seqs), I=128, num_warps=4, **FUSED,
    )  # fmt: skip
