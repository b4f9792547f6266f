"""Dequantize a sequence's pages into dense K and V in the original space; hot pages are copied as they are.

Specification: reference.gather.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvq.kernels.device import FUSED, USE_ASM, DeviceTransform, next_pow2
from kvq.kernels.planes import butterfly2, butterfly4, plane_dim, tiny_bytes, tiny_nibbles
from kvq.page import PageLayout
from kvq.reference import HotPool, hadamard_block, word_hadamard

ROWS = 64  # tokens a program


@triton.jit
def store_plane(
    p_out, x, p_mu, p_scale, dim_pair, far, near, pos, o_w, m_t,
    PLANE: tl.constexpr, PLANES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    KV_HEADS: tl.constexpr, HAS_MU: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """Times the pair scale, plus the offset R(pos) mu, stored at the rows ``p_out`` [T]."""
    dim = plane_dim(o_w, PLANE, PLANES, BLOCK)
    m_w = o_w < D // PLANES
    # Lanes beyond the head read its last dim. With masks instead, Triton 3.6 for sm_90 gave wrong offsets to a few dims
    # at head size 96 when start and stop are multiples of 16.
    d = tl.minimum(dim, D - 1)
    if HAS_SCALE:
        x *= tl.load(p_scale + d)[None, :]
    if HAS_MU:
        pair = tl.load(dim_pair + d)[None, :]
        p_far = far + (pos // N)[:, None] * D + pair
        p_near = near + (pos % N)[:, None] * D + pair
        f_cos, f_sin = tl.load(p_far), tl.load(p_far + D // 2)
        n_cos, n_sin = tl.load(p_near), tl.load(p_near + D // 2)
        mu = tl.load(p_mu + d)[None, :]
        partner = tl.load(p_mu + KV_HEADS * D + d)[None, :]
        x += mu * (f_cos * n_cos - f_sin * n_sin) + partner * (f_sin * n_cos + f_cos * n_sin)
    tl.store(p_out[:, None] + dim[None, :], x.to(p_out.dtype.element_ty), mask=m_t[:, None] & m_w[None, :])


@triton.jit
def gather_tensor(
    out, p_codes, p_scales, p_hot, slot, p_hadamard, p_mu, p_scale, dim_pair, far, near, pos, row, m_t,
    BITS: tl.constexpr, SYM: tl.constexpr, ROTATE: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    KV_HEADS: tl.constexpr, HAS_MU: tl.constexpr, HAS_SCALE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """K or V of T tokens of one page and head to the rows ``out`` [T]; ``slot`` >= 0 where the page is hot."""
    PLANES: tl.constexpr = 16 // BITS
    if slot >= 0:
        o_d = tl.arange(0, DP)
        mask = m_t[:, None] & (o_d < D)[None, :]
        x = tl.load(p_hot + row[:, None] * D + o_d[None, :], mask=mask, other=0.0)
        tl.store(out[:, None] + o_d[None, :], x.to(out.dtype.element_ty), mask=mask)
    else:
        o_w = tl.arange(0, W)
        WORDS: tl.constexpr = D // PLANES
        p_word = p_codes.to(tl.pointer_type(tl.int16)) + row[:, None] * WORDS + o_w[None, :]
        if W == WORDS:
            word = tl.load(p_word)
        else:
            word = tl.load(p_word, mask=(o_w < WORDS)[None, :], other=0)
        if SYM:
            BIAS: tl.constexpr = 1 << (BITS - 1)
            scale = tl.load(p_scales.to(tl.pointer_type(tl.float16)) + row).to(tl.float32)
            zero = tl.zeros_like(scale)
        else:
            BIAS: tl.constexpr = 0
            p_both = p_scales.to(tl.pointer_type(tl.float16)) + 2 * row
            scale, zero = tl.load(p_both).to(tl.float32), tl.load(p_both + 1).to(tl.float32)
        # The codes are integers times 2^-24, and so are their sums: fp16 holds both, and one product of them is exact.
        scale, zero = (scale * 2.0**24)[:, None], zero[:, None]
        if PLANES == 4:
            x0, x1, x2, x3 = tiny_nibbles(word, ASM)
            x1, x3 = x1 * 0.0625, x3 * 0.0625
            if SYM:
                x2, x3 = x2 - BIAS * 2.0**-24, x3 - BIAS * 2.0**-24
        else:
            x0, x1 = tiny_bytes(word, ASM)
        if SYM:
            x0, x1 = x0 - BIAS * 2.0**-24, x1 - BIAS * 2.0**-24
        if ROTATE:
            h = tl.load(p_hadamard + o_w[:, None] * W + o_w[None, :])
            if PLANES == 4:
                x0, x1, x2, x3 = butterfly4(x0, x1, x2, x3)
                x2, x3 = scale * NORM * tl.dot(x2, h), scale * NORM * tl.dot(x3, h)
            else:
                x0, x1 = butterfly2(x0, x1)
            x0, x1 = scale * NORM * tl.dot(x0, h), scale * NORM * tl.dot(x1, h)
            if not SYM:  # a row of ones, rotated, is the root of its size at the first dim of each block
                x0 += tl.where((o_w % (BLOCK // PLANES) == 0)[None, :], zero * (NORM * BLOCK), 0.0)
        else:
            x0, x1 = scale * x0.to(tl.float32) + zero, scale * x1.to(tl.float32) + zero
            if PLANES == 4:
                x2, x3 = scale * x2.to(tl.float32) + zero, scale * x3.to(tl.float32) + zero
        store_plane(
            out, x0, p_mu, p_scale, dim_pair, far, near, pos, o_w, m_t,
            0, PLANES, D, BLOCK, N, KV_HEADS, HAS_MU, HAS_SCALE,
        )  # fmt: skip
        store_plane(
            out, x1, p_mu, p_scale, dim_pair, far, near, pos, o_w, m_t,
            1, PLANES, D, BLOCK, N, KV_HEADS, HAS_MU, HAS_SCALE,
        )  # fmt: skip
        if PLANES == 4:
            store_plane(
                out, x2, p_mu, p_scale, dim_pair, far, near, pos, o_w, m_t,
                2, PLANES, D, BLOCK, N, KV_HEADS, HAS_MU, HAS_SCALE,
            )  # fmt: skip
            store_plane(
                out, x3, p_mu, p_scale, dim_pair, far, near, pos, o_w, m_t,
                3, PLANES, D, BLOCK, N, KV_HEADS, HAS_MU, HAS_SCALE,
            )  # fmt: skip


@triton.jit
def gather_kernel(
    out_k, out_v, pages, block_table, hot_pool, slot_of_page, k_hadamard, v_hadamard,
    dim_scale, dim_pair, dim_mu, near, far,
    stride_out_tok, stride_out_head, stride_page, head_bytes, v_codes, k_scales, v_scales,
    start, stop, position_offset,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_SYM: tl.constexpr, V_SYM: tl.constexpr,
    K_ROTATE: tl.constexpr, V_ROTATE: tl.constexpr,
    WK: tl.constexpr, WV: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    HAS_MU: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_HOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, blocks of T tokens, T dividing the page size): tokens start..stop of the sequence."""
    i_head = tl.program_id(0)
    first = (start // T + tl.program_id(1)) * T
    o_t = first + tl.arange(0, T)
    m_t = (o_t >= start) & (o_t < stop)
    row = o_t % N
    page = tl.load(block_table + first // N).to(tl.int64)
    slot = -1
    if HAS_HOT:
        slot = tl.load(slot_of_page + page)
    p_hot = hot_pool + (slot.to(tl.int64) * 2 * KV_HEADS + i_head) * (N * D) if HAS_HOT else hot_pool
    pos = o_t + position_offset
    pos = tl.where(m_t, pos, 0)
    p_page = pages + page * stride_page + i_head * head_bytes
    o_out = (o_t - start).to(tl.int64) * stride_out_tok + i_head * stride_out_head
    gather_tensor(
        out_k + o_out, p_page, p_page + k_scales, p_hot, slot, k_hadamard, dim_mu + i_head * D, dim_scale + i_head * D,
        dim_pair, far, near, pos, row, m_t,
        K_BITS, K_SYM, K_ROTATE, D, DP, N, WK, BLOCK, NORM, KV_HEADS, HAS_MU, HAS_SCALE, ASM,
    )  # fmt: skip
    gather_tensor(
        out_v + o_out, p_page + v_codes, p_page + v_scales, p_hot + KV_HEADS * N * D, slot, v_hadamard, dim_mu,
        dim_scale, dim_pair, far, near, pos, row, m_t,
        V_BITS, V_SYM, V_ROTATE, D, DP, N, WV, BLOCK, NORM, KV_HEADS, False, False, ASM,
    )  # fmt: skip


def gather(
    pages: torch.Tensor,
    layout: PageLayout,
    block_table: torch.Tensor,
    start: int,
    stop: int,
    out_key: torch.Tensor,
    out_value: torch.Tensor,
    transform: DeviceTransform | None = None,
    hot: HotPool | None = None,
    position_offset: int = 0,
) -> None:
    """Dequantize tokens start..stop of the sequence of ``block_table`` into out_* [tokens, kv_heads, head_dim]."""
    if stop <= start:
        return
    ks, vs, head_dim = layout.scheme.key, layout.scheme.value, layout.head_dim
    block, rows = hadamard_block(head_dim), min(ROWS, layout.page_size)
    tables = (block_table,) * 5
    if transform is not None:
        tables = (transform.dim_scale, transform.dim_pair, transform.dim_mu, transform.near, transform.far)
    gather_kernel[(layout.kv_heads, triton.cdiv(stop, rows) - start // rows)](
        out_key, out_value, pages, block_table, out_key if hot is None else hot.pool,
        block_table if hot is None else hot.index,
        word_hadamard(head_dim, ks.planes, pages.device), word_hadamard(head_dim, vs.planes, pages.device), *tables,
        out_key.stride(0), out_key.stride(1), pages.stride(0),
        layout.head_bytes, layout.v_codes, layout.k_scales, layout.v_scales, start, stop, position_offset,
        KV_HEADS=layout.kv_heads, D=head_dim, DP=next_pow2(head_dim), N=layout.page_size, T=rows,
        K_BITS=ks.bits, V_BITS=vs.bits, K_SYM=ks.symmetric, V_SYM=vs.symmetric,
        K_ROTATE=ks.rotate, V_ROTATE=vs.rotate,
        WK=max(16, next_pow2(head_dim // ks.planes)), WV=max(16, next_pow2(head_dim // vs.planes)),
        BLOCK=block, NORM=block**-0.5, HAS_MU=transform is not None and transform.pairs > 0,
        HAS_SCALE=transform is not None and transform.has_scale, HAS_HOT=hot is not None, ASM=USE_ASM,
        num_warps=max(1, rows // 16), **FUSED,
    )  # fmt: skip
