"""Every operation in plain torch: the specification of the kernels, and what CPU tensors use.

Arithmetic is float32 (float64 where asked); nothing here is fast. Names of the page format: kvq/page.py. What reads or
writes pages keeps no gradients, as the kernels do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvq.page import PageLayout
from kvq.scheme import TensorScheme
from kvq.transform import KeyTransform

FP16_MAX = 65504.0


@dataclass(frozen=True, eq=False)
class HotPool:
    """Pages in the model's own precision.

    ``pool``: [hot_pages, 2 (K, V), kv_heads, page_size, head_dim] in the model's dtype.
    ``index``: int32 [num_pages], the pool slot of a page or -1.
    """

    pool: torch.Tensor
    index: torch.Tensor


def hadamard_block(head_dim: int) -> int:
    """Largest power of two that divides head_dim: the size of the Hadamard blocks on the diagonal."""
    return head_dim & -head_dim


def hadamard(head_dim: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> torch.Tensor:
    """Normalised block-diagonal Sylvester Hadamard matrix [head_dim, head_dim]; symmetric and its own inverse."""
    block = hadamard_block(head_dim)
    h = torch.ones(1, 1, dtype=dtype, device=device)
    while h.shape[0] < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return torch.block_diag(*[h * block**-0.5] * (head_dim // block))


@functools.cache
def word_hadamard(head_dim: int, planes: int, device: torch.device) -> torch.Tensor:
    """fp16 [W, W] of +-1 that transforms a plane along its words (kernels/planes.py), W padded to a power of two."""
    words = head_dim // planes
    width = max(16, 1 << (words - 1).bit_length())
    out = torch.zeros(width, width)
    out[:words, :words] = hadamard(words).sign()
    return out.half().to(device)


def plane_dims(head_dim: int, planes: int) -> torch.Tensor:
    """int64 [planes, head_dim // planes]: the dim at bit field ``a`` of word ``j``.

    Within a Hadamard block of B dims the planes are B / planes dims apart, so that H = H_planes (x) H_(B / planes)
    and unpacking needs no shuffles.
    """
    block = hadamard_block(head_dim)
    run = block // planes
    j = torch.arange(head_dim // planes)
    a = torch.arange(planes)[:, None]
    return (j // run) * block + a * run + j % run


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [..., head_dim] to bytes uint8 [..., head_dim * bits / 8]: little-endian uint16 words of planes."""
    planes = 16 // bits
    dims = plane_dims(codes.shape[-1], planes).to(codes.device)
    words = sum(codes[..., dims[a]].to(torch.int32) << (a * bits) for a in range(planes))
    assert isinstance(words, torch.Tensor)
    return torch.stack([words & 0xFF, words >> 8], -1).to(torch.uint8).flatten(-2)


def unpack(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of ``pack``: bytes uint8 [..., head_dim * bits / 8] to codes uint8 [..., head_dim]."""
    planes = 16 // bits
    head_dim = data.shape[-1] * 8 // bits
    words = data[..., 0::2].to(torch.int32) | (data[..., 1::2].to(torch.int32) << 8)
    dims = plane_dims(head_dim, planes).to(data.device)
    codes = torch.empty(*data.shape[:-1], head_dim, dtype=torch.uint8, device=data.device)
    for a in range(planes):
        codes[..., dims[a]] = ((words >> (a * bits)) & ((1 << bits) - 1)).to(torch.uint8)
    return codes


def to_fp16_down(x: torch.Tensor) -> torch.Tensor:
    """Largest fp16 not above ``x`` (float32, within fp16 range)."""
    h = x.half()
    return torch.where(h.float() > x, torch.nextafter(h, torch.full_like(h, -math.inf)), h)


def quantize_rows(
    x: torch.Tensor, scheme: TensorScheme, dim: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantize float32 ``x`` along ``dim``: codes uint8 like x, scale and zero (None if symmetric) fp16, keepdim.

    The codes span ``clip`` of the row's range: each end is drawn in by 1 - clip of its distance to the mean (symmetric:
    of the largest size). About the mean and not the middle, so that a row of zeros with one spike keeps its zeros.
    Asymmetric: zero = low end rounded down to fp16, scale = (high end - zero) / (2^bits - 1), x = scale * code + zero.
    Symmetric: scale = -clip * (element of largest size) / 2^(bits-1), x = scale * (code - 2^(bits-1)); the sign of the
    scale gives the largest element the one code that has no opposite.
    Rows of an ``unshrunk`` scheme are then stretched by its gain g: scale becomes g * scale, zero mean + g * (zero -
    mean). The clip makes a stored row about 1 % smaller. Among stored keys that hardly matters, but beside recent keys
    in native precision smaller ones lose score.
    A constant row has scale 0 and stores its value in the zero; a zero row decodes to zeros. Values beyond fp16 are
    clamped.
    """
    top = scheme.levels - 1
    lo, hi = (end(dim, keepdim=True).clamp(-FP16_MAX, FP16_MAX) for end in (x.amin, x.amax))
    mean = x.mean(dim, keepdim=True).clamp(lo, hi)
    bias = scheme.levels // 2 if scheme.symmetric else 0
    if scheme.symmetric:
        base = torch.zeros_like(lo)
        scale = (torch.where(hi > -lo, hi, lo) * (-scheme.clip / bias)).half()
    else:
        low, high = lo + (1 - scheme.clip) * (mean - lo), hi - (1 - scheme.clip) * (hi - mean)
        base = to_fp16_down(low).float()
        scale = ((high - base) / top).half()
    inverse = torch.where(scale == 0, torch.zeros_like(base), 1.0 / scale.float())
    codes = (((x - base) * inverse).round() + bias).clamp(0, top).to(torch.uint8)
    gain = scheme.gain(x.shape[dim])
    if gain != 1:
        scale = (scale.float() * gain).half()
        base = (mean + gain * (base - mean)).clamp(-FP16_MAX, FP16_MAX)
    return codes, scale, None if scheme.symmetric else base.half()


def dequantize_rows(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, scheme: TensorScheme, dtype: torch.dtype
) -> torch.Tensor:
    """Inverse of ``quantize_rows`` in ``dtype`` (float32 or float64)."""
    code = codes.to(dtype)
    if zero is None:
        return scale.to(dtype) * (code - scheme.levels // 2)
    return scale.to(dtype) * code + zero.to(dtype)


def offset(transform: KeyTransform, positions: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """R(pos) mu: [tokens, kv_heads, head_dim] for integer ``positions`` [tokens]; angles in float64."""
    device = positions.device
    angle = positions.double()[:, None] * transform.pair_freq.to(device)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = transform.pair_mu.to(device, torch.float64).unbind(-1)
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1)
    out = torch.empty(*turned.shape[:2], transform.head_dim, dtype=torch.float64, device=device)
    out[..., transform.pair_dims.flatten().to(device)] = turned.flatten(-2)
    return out.to(dtype)


def encode(
    x: torch.Tensor, scheme: TensorScheme, transform: KeyTransform | None = None, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """Values as they are quantized: ``x`` [tokens, kv_heads, head_dim] float32, transformed (keys) and rotated."""
    if transform is not None:
        if transform.mu is not None:
            assert positions is not None
            x = x - offset(transform, positions, x.dtype)
        x = x / transform.dim_scale.to(x.device, x.dtype)
    if scheme.rotate:  # sums of bf16's largest would overflow; what is clamped to fp16 later need not be exact
        x = x.clamp(-1e30, 1e30) @ hadamard(x.shape[-1], x.dtype, x.device)
    return x


def decode(
    x: torch.Tensor, scheme: TensorScheme, transform: KeyTransform | None = None, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """Inverse of ``encode``: stored values [tokens, kv_heads, head_dim] back to the original space."""
    if scheme.rotate:
        x = x @ hadamard(x.shape[-1], x.dtype, x.device)
    if transform is not None:
        x = x * transform.dim_scale.to(x.device, x.dtype)
        if transform.mu is not None:
            assert positions is not None
            x = x + offset(transform, positions, x.dtype)
    return x


class PlaneViews(NamedTuple):
    """Views into pages, each [num_pages, kv_heads, page_size, ...]: codes as bytes, scales as fp16 (scale[, zero])."""

    k_codes: torch.Tensor
    v_codes: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor


def plane_views(pages: torch.Tensor, layout: PageLayout) -> PlaneViews:
    """Typed views into ``pages`` uint8 [num_pages, >= page_bytes]; the page stride is free, a page is contiguous."""
    heads = pages[:, : layout.page_bytes].unflatten(1, (layout.kv_heads, layout.head_bytes))

    def part(start: int, row_bytes: int) -> torch.Tensor:
        return heads[..., start : start + layout.page_size * row_bytes].unflatten(-1, (layout.page_size, row_bytes))

    key, value = layout.scheme.key, layout.scheme.value
    return PlaneViews(
        part(0, key.row_bytes(layout.head_dim)),
        part(layout.v_codes, value.row_bytes(layout.head_dim)),
        part(layout.k_scales, key.scale_bytes()).view(torch.float16),
        part(layout.v_scales, value.scale_bytes()).view(torch.float16),
    )


@torch.no_grad()
def write(
    pages: torch.Tensor,
    layout: PageLayout,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor | None = None,
    transform: KeyTransform | None = None,
    hot: HotPool | None = None,
) -> int:
    """Quantize ``key`` and ``value`` [tokens, kv_heads, head_dim] into the slots (page * page_size + row) of ``pages``.

    Negative slots are skipped. A token whose page is hot is also copied, unchanged, into the hot pool. Returns how many
    rows (of a token, head, and K or V) went beyond fp16 range once encoded, and were clamped.
    """
    clamped = 0
    keep = slot_mapping >= 0
    slots = slot_mapping[keep].long()
    page, row = slots // layout.page_size, slots % layout.page_size
    pos = None if positions is None else positions[keep]
    views = plane_views(pages, layout)
    for x, scheme, codes_view, scales_view, tf in (
        (key, layout.scheme.key, views.k_codes, views.k_scales, transform),
        (value, layout.scheme.value, views.v_codes, views.v_scales, None),
    ):
        rows = encode(x[keep].float(), scheme, tf, pos)
        clamped += int((rows.abs() > FP16_MAX).any(-1).sum())
        codes, scale, zero = quantize_rows(rows, scheme)
        codes_view[page, :, row] = pack(codes, scheme.bits)
        scales_view[page, :, row] = scale if zero is None else torch.cat([scale, zero], -1)
    if hot is not None:
        slot = hot.index[page].long()
        native = slot >= 0
        hot.pool[slot[native], 0, :, row[native]] = key[keep][native].to(hot.pool.dtype)
        hot.pool[slot[native], 1, :, row[native]] = value[keep][native].to(hot.pool.dtype)
    return clamped


@torch.no_grad()
def gather(
    pages: torch.Tensor,
    layout: PageLayout,
    block_table: torch.Tensor,
    seq_len: int,
    transform: KeyTransform | None = None,
    hot: HotPool | None = None,
    position_offset: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one sequence in the original space, each [seq_len, kv_heads, head_dim] in ``dtype``.

    ``block_table`` [>= cdiv(seq_len, page_size)]; the token at index i has position i + position_offset.
    """
    count = -(-seq_len // layout.page_size)
    page = block_table[:count].long()
    work = torch.float64 if dtype == torch.float64 else torch.float32
    positions = torch.arange(seq_len, device=pages.device) + position_offset
    views = plane_views(pages, layout)
    out = []
    for which, scheme, codes_view, scales_view, tf in (
        (0, layout.scheme.key, views.k_codes, views.k_scales, transform),
        (1, layout.scheme.value, views.v_codes, views.v_scales, None),
    ):
        codes = unpack(codes_view[page], scheme.bits)
        scales = scales_view[page]
        stored = dequantize_rows(codes, scales[..., :1], None if scheme.symmetric else scales[..., 1:], scheme, work)
        x = decode(stored.transpose(1, 2).flatten(0, 1)[:seq_len], scheme, tf, positions).to(dtype)
        if hot is not None:
            slot = hot.index[page].long()
            native = hot.pool[slot.clamp(min=0), which].transpose(1, 2).flatten(0, 1)[:seq_len].to(dtype)
            is_hot = (slot >= 0).repeat_interleave(layout.page_size)[:seq_len]
            x = torch.where(is_hot[:, None, None], native, x)
        out.append(x)
    return out[0], out[1]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    hidden: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last q_len tokens over a context that includes them.

    query [q_len, heads, head_dim], key and value [seq_len, kv_heads, head_dim], all of one floating dtype; query row t
    stands at index seq_len - q_len + t and sees indices j <= its own, and j > its own - sliding_window.
    Returns out [q_len, heads, head_dim] and the natural log-sum-exp [q_len, heads] of the scaled scores, sinks
    (one learned logit a head that takes probability but has no value) included. A row that sees nothing gives zeros
    and -inf (or the sink). hidden: called with the scores [heads, q_len, seq_len and the sink] and the GQA group, says
    which are left out.
    """
    q_len, heads, _ = query.shape
    seq_len, kv_heads, _ = key.shape
    group = heads // kv_heads
    scores = torch.einsum("thd,shd->hts", query, key.repeat_interleave(group, 1)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(seq_len - q_len, seq_len, device=query.device)[:, None]
    index = torch.arange(seq_len, device=query.device)[None]
    seen = index <= own
    if sliding_window:
        seen &= index > own - sliding_window
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, q_len, 1)], -1)
    if hidden is not None:
        scores = scores.masked_fill(hidden(scores, group), -math.inf)
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
    probs = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])[..., :seq_len]
    out = torch.einsum("hts,shd->thd", probs, value.repeat_interleave(group, 1))
    return out, lse.transpose(0, 1)


def skippable(
    page_size: int, tokens: int, is_hot: torch.Tensor | None, bar: float, scores: torch.Tensor, group: int
) -> torch.Tensor:
    """Which scores [heads, q_len, tokens and perhaps a sink] BLASST may leave out, for decode: see there.

    bar: natural logarithm of the threshold. is_hot: bool [pages] of the sequence, or None.
    """
    heads, q_len, columns = scores.shape
    finite = torch.isfinite(scores).flatten(0, 1)  # seen
    row = scores.flatten(0, 1)
    low = (row < row.max(-1, keepdim=True).values + bar).view(heads // group, group * q_len, columns)
    out = torch.zeros(heads // group, columns, dtype=torch.bool, device=scores.device)
    for page in range(tokens // page_size):
        part = slice(page * page_size, (page + 1) * page_size)
        if bool(finite[:, part].all()) and not (is_hot is not None and bool(is_hot[page])):
            out[:, part] = low[:, :, part].all(-1).all(-1)[:, None]
    return out.repeat_interleave(group, 0)[:, None].expand_as(scores)


@torch.no_grad()
def paged_attention_decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    transform: KeyTransform | None = None,
    hot: HotPool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    position_offset: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    skip_threshold: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query [num_seqs, q_len, heads, head_dim] over the dequantized context of each sequence.

    skip_threshold: leave out every page that may be: quantized, seen whole by all rows, and in each of them with all
    probabilities below this times the largest one of the row. A kernel meets maxima one by one and leaves out fewer.

    Returns out, like query in ``dtype``, and the log-sum-exp float32 [num_seqs, q_len, heads]. A sequence of length 0
    gives zeros and -inf (or the sink), as does a row before the start of its sequence (seq_len < q_len).
    """
    out = torch.zeros_like(query, dtype=dtype)
    lse = torch.full(query.shape[:3], -math.inf, dtype=torch.float32, device=query.device)
    if sinks is not None:
        lse[:] = sinks
    q_len = query.shape[1]
    for i, n in enumerate(seq_lens.tolist()):
        if n == 0:
            continue
        shift = 0 if position_offset is None else int(position_offset[i])
        key, value = gather(pages, layout, block_tables[i], n, transform, hot, shift, dtype)
        rows = min(q_len, n)
        hidden = None
        if skip_threshold is not None:
            is_hot = None if hot is None else hot.index[block_tables[i].long()] >= 0
            hidden = functools.partial(skippable, layout.page_size, n, is_hot, math.log(skip_threshold))
        o, s = attention(query[i, q_len - rows :].to(dtype), key, value, scale, sliding_window, softcap, sinks, hidden)
        out[i, q_len - rows :], lse[i, q_len - rows :] = o, s.float()
    return out, lse


@torch.no_grad()
def paged_attention_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    transform: KeyTransform | None = None,
    hot: HotPool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    position_offset: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of new tokens over the dequantized context of their sequence and, causally, over each other.

    query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim]: rows cu_seqlens[i]..cu_seqlens[i + 1]
    are the tokens that follow the first context_lens[i] of sequence i. Returns out, like query in ``dtype``, and the
    log-sum-exp float32 [tokens, heads].
    """
    out = torch.zeros_like(query, dtype=dtype)
    lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float32, device=query.device)
    starts = cu_seqlens.tolist()
    for i, n in enumerate(context_lens.tolist()):
        new = slice(starts[i], starts[i + 1])
        if new.start == new.stop:
            continue
        shift = 0 if position_offset is None else int(position_offset[i])
        context_key, context_value = gather(pages, layout, block_tables[i], n, transform, hot, shift, dtype)
        all_keys = torch.cat([context_key, key[new].to(dtype)])
        all_values = torch.cat([context_value, value[new].to(dtype)])
        o, s = attention(query[new].to(dtype), all_keys, all_values, scale, sliding_window, softcap, sinks)
        out[new], lse[new] = o, s.float()
    return out, lse
