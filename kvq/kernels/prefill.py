"""Attention of new tokens over quantized pages and over each other, in one launch that holds no copy of the context.

A program owns R rows of one kv head: query tokens times the heads of its GQA group. Over the quantized pages it works
in the space of what is stored, by decode's tile (kernels/decode.py) with rows as the M of its products. The accumulator
is then rotated back, and hot pages and new tokens follow in the model's precision. Specification:
reference.paged_attention_prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kvq.kernels import layouts
from kvq.kernels.decode import (
    HEADROOM,
    NEG,
    TILE_TOKENS,
    apply_softcap,
    finish_planes,
    load_codes,
    load_query,
    load_scales,
    plane_max,
    quantized_scores,
    quantized_values,
    query_operands,
    rotate_planes,
    store_planes,
    turn_query,
)
from kvq.kernels.device import FUSED, USE_ASM, DeviceTransform, next_pow2
from kvq.kernels.planes import plane_dim
from kvq.kernels.weigh import no_sums, sum_of_p
from kvq.page import PageLayout
from kvq.reference import HotPool, hadamard_block, word_hadamard

SCAN = tl.constexpr(64)  # sequences, and block table entries, looked at together


@dataclass(frozen=True)
class PrefillConfig:
    """``rows`` of a program, ``page_tokens`` and ``tokens`` of a quantized and of a native tile, launch options.
    ``lanes``: whether MMAs leave results in registers, as the assembly of kernels/weigh.py wants."""

    rows: int
    page_tokens: int
    tokens: int
    num_warps: int
    num_stages: int
    lanes: bool = True

    @staticmethod
    def default(head_dim: int, capability: int, pairs: int = 0) -> PrefillConfig:
        """For a major compute ``capability``. Hopper multiplies unpacked K from shared memory; others hold it in
        registers, so their tiles are smaller. A warp has 16 rows: with fewer, Triton 3.6 computed wrong results (head
        size 256, 64 rows, 8 warps), and elsewhere tokens would be spread over warps (kernels/weigh.py)."""
        if capability == 9:
            small, large = PrefillConfig(64, 64, 32, 4, 2), PrefillConfig(64, 32, 16, 4, 2)
            if not pairs:
                small = PrefillConfig(128, 64, 32, 8, 2)
        else:
            lanes = capability != 10  # there they are in tensor memory
            small, large = (
                PrefillConfig(32 if pairs else 64, 32, 32, 4, 2, lanes), PrefillConfig(64, 16, 16, 4, 2, lanes)
            )  # fmt: skip
        return small if head_dim <= 128 else large


@triton.jit
def softmax_step(
    s, m, l, token, own, low, cap,
    N: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Probabilities of the scores s [R, N] (log2 e included unless SOFTCAP), and how much earlier ones shrink.

    The tile starts at index ``token``; a row sees indices low < i <= own. Returns p, a and the new m, l.
    """
    if SOFTCAP:
        s = apply_softcap(s, cap) * 1.4426950408889634
    if MASKED:
        index = (token + tl.arange(0, N))[None, :]
        seen = index <= own[:, None]
        if WINDOW:
            seen &= index > low[:, None]
        s = tl.where(seen, s, NEG)
    m_new = tl.maximum(m, tl.max(s, 1) - HEADROOM)
    a = tl.exp2(m - m_new)
    p = tl.exp2(s - m_new[:, None])
    return p, a, m_new, l * a + tl.sum(p, 1)


@triton.jit
def context_tile(
    q0, q1, q2, q3, qs, sm, a0, a1, a2, a3, m, l, p_head, p_table, slot_of_page, stride_page,
    v_codes, k_scales, v_scales, c_cos, c_sin, p_inner, p_turn, i, own, window, cap,
    D: tl.constexpr, N: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_SYM: tl.constexpr, V_SYM: tl.constexpr,
    WK: tl.constexpr, WV: tl.constexpr, PAIRS: tl.constexpr, MAX_PAIRS: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_HOT: tl.constexpr, ASM: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Tile i of N tokens of the context, unless its page is hot; ``p_head``: pages at the head's plane."""
    STEPS: tl.constexpr = PAGE // N
    page = tl.load(p_table + i // STEPS).to(tl.int64)
    slot = -1
    if HAS_HOT:
        slot = tl.load(slot_of_page + page)
    if slot < 0:
        r = i % STEPS * N
        p_page = p_head + page * stride_page
        i_cos, i_sin, j_cos, j_sin = 0.0, 0.0, 0.0, 0.0
        if PAIRS > 0:
            p_in = p_inner + (r + tl.arange(0, N))[None, :] * (2 * PAIRS) + tl.arange(0, PAIRS)[:, None]
            i_cos, i_sin = tl.load(p_in), tl.load(p_in + PAIRS)  # [PAIRS, N] fp16
            HALF: tl.constexpr = 2 * PAIRS * max(PAGE, TILE_TOKENS)
            j_cos, j_sin = tl.load(p_in + HALF), tl.load(p_in + HALF + PAIRS)
        o_n = r + tl.arange(0, N)
        b_k = load_codes(p_page, r, N, D, K_BITS, WK, 1, N)
        b_v = load_codes(p_page + v_codes, r, N, D, V_BITS, WV, 0, N)
        ks, kz = load_scales(p_page + k_scales, o_n, K_SYM)
        vs, vz = load_scales(p_page + v_scales, o_n, V_SYM)
        s, top = quantized_scores(
            q0, q1, q2, q3, qs, sm, b_k, ks, kz, c_cos, c_sin, i_cos, i_sin, j_cos, j_sin,
            p_turn + i // STEPS * (2 * MAX_PAIRS), i * N, own, window, cap,
            N, K_BITS, K_SYM, PAIRS, MAX_PAIRS, 1, MASKED, WINDOW, SOFTCAP, ASM,
        )  # fmt: skip
        a0, a1, a2, a3, m, l = quantized_values(
            s, top, sm, a0, a1, a2, a3, m, l, b_v, vs, vz, i * N, own, N, V_BITS, V_SYM, 1, MASKED, SOFTCAP, ASM, LANES
        )
    return a0, a1, a2, a3, m, l


@triton.jit
def native_tile(
    q0, q1, q2, q3, a0, a1, a2, a3, m, l, p_key, p_value, stride_k, stride_v, sm, token, own, low, cap,
    D: tl.constexpr, N: tl.constexpr, W: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """N tokens of one head in the dtype of the query planes, original space, the first at index ``token``.

    SPLIT: probabilities in two halves, since bf16 alone would round them to 3 digits.
    """
    o_n = tl.arange(0, N)
    o_w = tl.arange(0, W)
    mask = (token + o_n <= tl.max(own, 0))[:, None] & (o_w < D // PLANES)[None, :]
    p_k = p_key + o_n[None, :] * stride_k
    p_v = p_value + o_n[:, None] * stride_v
    d0 = plane_dim(o_w, 0, PLANES, BLOCK)
    d1 = plane_dim(o_w, 1, PLANES, BLOCK)
    k0 = tl.load(p_k + d0[:, None], mask=tl.trans(mask), other=0.0).to(q0.dtype)  # [W, N]
    k1 = tl.load(p_k + d1[:, None], mask=tl.trans(mask), other=0.0).to(q0.dtype)
    v0 = tl.load(p_v + d0[None, :], mask=mask, other=0.0).to(q0.dtype)  # [N, W]
    v1 = tl.load(p_v + d1[None, :], mask=mask, other=0.0).to(q0.dtype)
    s = tl.dot(q1, k1, tl.dot(q0, k0))  # [R, N]
    if PLANES == 4:
        d2 = plane_dim(o_w, 2, PLANES, BLOCK)
        d3 = plane_dim(o_w, 3, PLANES, BLOCK)
        k2 = tl.load(p_k + d2[:, None], mask=tl.trans(mask), other=0.0).to(q0.dtype)
        k3 = tl.load(p_k + d3[:, None], mask=tl.trans(mask), other=0.0).to(q0.dtype)
        v2 = tl.load(p_v + d2[None, :], mask=mask, other=0.0).to(q0.dtype)
        v3 = tl.load(p_v + d3[None, :], mask=mask, other=0.0).to(q0.dtype)
        s = tl.dot(q3, k3, tl.dot(q2, k2, s))
    p, a, m, l = softmax_step(s * sm, m, l, token, own, low, cap, N, True, WINDOW, SOFTCAP)
    a = a[:, None]
    hi = p.to(q0.dtype)
    a0, a1 = tl.dot(hi, v0, a0 * a), tl.dot(hi, v1, a1 * a)
    if PLANES == 4:
        a2, a3 = tl.dot(hi, v2, a2 * a), tl.dot(hi, v3, a3 * a)
    if SPLIT:
        lo = (p - hi.to(tl.float32)).to(q0.dtype)
        a0, a1 = tl.dot(lo, v0, a0), tl.dot(lo, v1, a1)
        if PLANES == 4:
            a2, a3 = tl.dot(lo, v2, a2), tl.dot(lo, v3, a3)
    return a0, a1, a2, a3, m, l


@triton.jit
def offset_coefficients(
    query, o_q, m_r, top, p_index, pair_dim, p_mu, near, far, shift,
    PAIRS: tl.constexpr, MAX_PAIRS: tl.constexpr, N: tl.constexpr, HAS_SHIFT: tl.constexpr,
):  # fmt: skip
    """Coefficients [R, PAIRS] of the cosine and sine of a key's angle in q . R(pos) mu, q divided by ``top``.

    The position is the index plus ``shift``, whose rotation is folded in here. Also returns the pairs.
    """
    o_p = tl.arange(0, PAIRS)
    o_pair = tl.load(p_index + o_p)
    d_a = tl.load(pair_dim + 2 * o_pair)
    d_b = tl.load(pair_dim + 2 * o_pair + 1)
    mu_a = tl.load(p_mu + o_p)[None, :]
    mu_b = tl.load(p_mu + PAIRS + o_p)[None, :]
    q_a = tl.load(query + (o_q[:, None] + d_a[None, :]), mask=m_r[:, None], other=0.0).to(tl.float32) / top
    q_b = tl.load(query + (o_q[:, None] + d_b[None, :]), mask=m_r[:, None], other=0.0).to(tl.float32) / top
    c_cos = q_a * mu_a + q_b * mu_b
    c_sin = q_b * mu_a - q_a * mu_b
    if HAS_SHIFT:
        p_far = far + (tl.abs(shift) // N) * (2 * MAX_PAIRS) + o_pair
        p_near = near + (tl.abs(shift) % N) * (2 * MAX_PAIRS) + o_pair
        f_cos, f_sin = tl.load(p_far), tl.load(p_far + MAX_PAIRS)
        n_cos, n_sin = tl.load(p_near), tl.load(p_near + MAX_PAIRS)
        t_cos = (f_cos * n_cos - f_sin * n_sin)[None, :]
        t_sin = (f_sin * n_cos + f_cos * n_sin)[None, :]
        t_sin = tl.where(shift < 0, -t_sin, t_sin)
        c_cos, c_sin = c_cos * t_cos + c_sin * t_sin, c_sin * t_cos - c_cos * t_sin
    return c_cos, c_sin, o_pair


@triton.jit(do_not_specialize=["num_seqs", "num_tiles"])  # they change with every batch
def prefill_kernel(
    query, key, value, pages, out, lse,
    block_tables, context_lens, cu_seqlens, slot_of_page, hot_pool, sinks,
    k_hadamard, v_hadamard, dim_scale, pair_index, pair_dim, pair_mu, inner, near, far, position_offset,
    stride_q_tok, stride_q_head, stride_k_tok, stride_k_head, stride_v_tok, stride_v_head, stride_o_tok, stride_o_head,
    stride_page, stride_table, head_bytes, v_codes, k_scales, v_scales,
    scale, window, cap, num_seqs, num_tiles,
    HEADS_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, N: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_SYM: tl.constexpr, V_SYM: tl.constexpr,
    K_ROTATE: tl.constexpr, V_ROTATE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    WK: tl.constexpr, WV: tl.constexpr, QT: tl.constexpr, HOT_T: tl.constexpr,
    HAS_SCALE: tl.constexpr, PAIRS: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_HOT: tl.constexpr,
    HAS_SINKS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, tiles). Tile numbers of a sequence start at cu_seqlens * GROUP // R + its index, so that the host
    needs no lengths; the last tiles, which see most, go first."""
    KP: tl.constexpr = 16 // K_BITS
    VP: tl.constexpr = 16 // V_BITS
    MAX_PAIRS: tl.constexpr = D // 2
    i_head = tl.program_id(0)
    i_tile = num_tiles - 1 - tl.program_id(1)
    i_seq = -1
    for start in range(0, num_seqs, SCAN):
        o_b = start + tl.arange(0, SCAN)
        starts = tl.load(cu_seqlens + o_b, mask=o_b < num_seqs, other=0).to(tl.int64) * GROUP // R + o_b
        i_seq += tl.sum(((starts <= i_tile) & (o_b < num_seqs)).to(tl.int32), 0)
    first = tl.load(cu_seqlens + i_seq).to(tl.int64)
    new_len = (tl.load(cu_seqlens + i_seq + 1) - first).to(tl.int32)
    row = ((i_tile - (first * GROUP // R + i_seq)) * R).to(tl.int32)
    if row >= new_len * GROUP:
        return
    context = tl.load(context_lens + i_seq).to(tl.int32)

    o_r = row + tl.arange(0, R)  # rows: query token major, head of the group minor
    m_r = o_r < new_len * GROUP
    token = row // GROUP  # of the first row; offsets are relative to it, and fit 32 bits
    own = tl.where(m_r, o_r // GROUP, -1)
    o_t = o_r // GROUP - token
    o_head = i_head * GROUP + o_r % GROUP
    query += (first + token) * stride_q_tok
    o_q = o_t * stride_q_tok + o_head * stride_q_head
    o_k = tl.arange(0, WK)
    o_v = tl.arange(0, WV)

    x0, x1, x2, x3 = load_query(query, o_q, o_k, m_r, D, KP, BLOCK, 1)
    x0, x1, x2, x3, top = turn_query(
        x0, x1, x2, x3, dim_scale + i_head * D, k_hadamard, o_k, D, WK, KP, BLOCK, K_ROTATE, HAS_SCALE, NORM, 1
    )
    q0, q1, q2, q3, qs = query_operands(x0, x1, x2, x3, K_BITS, K_ROTATE, 1, ASM)  # [R, WK]
    if SOFTCAP:
        sm_raw = scale
    else:
        sm_raw = scale * 1.4426950408889634
    UNIT: tl.constexpr = 2.0**-20 if K_BITS == 4 else 2.0**-24  # of scores, see query_operands
    sm = sm_raw * top / UNIT

    p_turn = far
    c_cos, c_sin = 0.0, 0.0
    if PAIRS > 0:
        shift = 0
        if HAS_SHIFT:
            shift = tl.load(position_offset + i_seq).to(tl.int32)
        c_cos, c_sin, o_pair = offset_coefficients(
            query, o_q, m_r, top, pair_index + i_head * PAIRS, pair_dim, pair_mu + i_head * 2 * PAIRS, near, far, shift,
            PAIRS, MAX_PAIRS, N, HAS_SHIFT,
        )  # fmt: skip
        p_turn = far + o_pair

    a0 = tl.zeros([R, WV], tl.float32)
    a1 = tl.zeros([R, WV], tl.float32)
    a2 = tl.zeros([R, WV], tl.float32)
    a3 = tl.zeros([R, WV], tl.float32)
    m = tl.full([R], -1.0e29, tl.float32)  # above NEG, so that a tile with nothing seen adds nothing
    l = no_sums(R, 1)

    # The context: indices up to context - 1, and beyond ``low`` in a window; every row sees the same last one.
    last = tl.where(m_r, context - 1, -1)
    low = context + own - window
    page_lo = 0
    if WINDOW:
        page_lo = tl.maximum(context + token - window + 1, 0) // N
    page_hi = tl.cdiv(context, N)
    p_table = block_tables + i_seq.to(tl.int64) * stride_table
    p_inner = inner + i_head * (4 * PAIRS * max(N, TILE_TOKENS))
    STEPS: tl.constexpr = N // QT
    full = tl.maximum(context // QT, page_lo * STEPS)
    p_head = pages + i_head * head_bytes
    seen = (last - low)[:, None]  # how many of the last tokens of the context a row sees
    for i in tl.range(page_lo * STEPS, full, num_stages=STAGES):
        a0, a1, a2, a3, m, l = context_tile(
            q0, q1, q2, q3, qs, sm, a0, a1, a2, a3, m, l, p_head, p_table, slot_of_page, stride_page,
            v_codes, k_scales, v_scales, c_cos, c_sin, p_inner, p_turn, i, last, seen, cap,
            D, QT, R, N, K_BITS, V_BITS, K_SYM, V_SYM, WK, WV, PAIRS, MAX_PAIRS, WINDOW, WINDOW, SOFTCAP, HAS_HOT, ASM,
            LANES,
        )  # fmt: skip
    for i in tl.range(full, tl.cdiv(context, QT), num_stages=1):  # the last tile, where it is not full
        a0, a1, a2, a3, m, l = context_tile(
            q0, q1, q2, q3, qs, sm, a0, a1, a2, a3, m, l, p_head, p_table, slot_of_page, stride_page,
            v_codes, k_scales, v_scales, c_cos, c_sin, p_inner, p_turn, i, last, seen, cap,
            D, QT, R, N, K_BITS, V_BITS, K_SYM, V_SYM, WK, WV, PAIRS, MAX_PAIRS, True, WINDOW, SOFTCAP, HAS_HOT, ASM,
            LANES,
        )  # fmt: skip
    a0, a1, a2, a3 = finish_planes(a0, a1, a2, a3, V_BITS)
    l = sum_of_p(l, 1)
    if V_ROTATE:
        top = plane_max(a0, a1, a2, a3, VP)
        inv = 1.0 / top
        a0, a1, a2, a3 = rotate_planes(a0 * inv, a1 * inv, a2 * inv, a3 * inv, v_hadamard, WV, VP, NORM, 1)
        a0, a1, a2, a3 = a0 * top, a1 * top, a2 * top, a3 * top

    r0, r1, r2, r3 = load_query(query, o_q, o_v, m_r, D, VP, BLOCK, 1)  # [R, WV]
    if not ASM:  # the interpreter multiplies bf16 wrongly
        r0, r1, r2, r3 = r0.to(tl.float32), r1.to(tl.float32), r2.to(tl.float32), r3.to(tl.float32)

    if HAS_HOT:
        for start in tl.range(page_lo, page_hi, SCAN, num_stages=1):
            o_s = start + tl.arange(0, SCAN)
            m_s = o_s < page_hi
            page = tl.load(p_table + o_s, mask=m_s, other=0)
            slots = tl.load(slot_of_page + page, mask=m_s, other=-1)
            for _ in tl.range(0, tl.sum((slots >= 0).to(tl.int32), 0), num_stages=1):
                i = tl.min(tl.where(slots >= 0, o_s, 0x7FFFFFFF), 0)
                slot = tl.max(tl.where(o_s == i, slots, -1), 0).to(tl.int64)
                slots = tl.where(o_s == i, -1, slots)
                p_hot = hot_pool + (slot * 2 * HEADS_KV + i_head) * (N * D)
                for step in tl.range(0, N, HOT_T, num_stages=STAGES):
                    p_key = p_hot + step * D
                    a0, a1, a2, a3, m, l = native_tile(
                        r0, r1, r2, r3, a0, a1, a2, a3, m, l, p_key, p_key + HEADS_KV * N * D, D, D,
                        sm_raw, i * N + step, last, low, cap, D, HOT_T, WV, VP, BLOCK, WINDOW, SOFTCAP, SPLIT,
                    )  # fmt: skip

    # The new tokens, by their index among themselves.
    low = own - window
    new_lo = 0
    if WINDOW:
        new_lo = tl.maximum(token - window + 1, 0) // T * T
    p_key = key + i_head * stride_k_head
    p_value = value + i_head * stride_v_head
    for i in tl.range(new_lo, tl.max(own, 0) + 1, T, num_stages=STAGES):
        a0, a1, a2, a3, m, l = native_tile(
            r0, r1, r2, r3, a0, a1, a2, a3, m, l,
            p_key + (first + i) * stride_k_tok, p_value + (first + i) * stride_v_tok, stride_k_tok, stride_v_tok,
            sm_raw, i, own, low, cap, D, T, WV, VP, BLOCK, WINDOW, SOFTCAP, SPLIT,
        )  # fmt: skip

    if HAS_SINKS:
        sink = tl.load(sinks + o_head, mask=m_r, other=0.0).to(tl.float32) * 1.4426950408889634
        m_new = tl.maximum(m, sink - HEADROOM)
        a = tl.exp2(m - m_new)
        l = l * a + tl.exp2(sink - m_new)
        m = m_new
        a0, a1, a2, a3 = a0 * a[:, None], a1 * a[:, None], a2 * a[:, None], a3 * a[:, None]
    inv = (1.0 / tl.where(l > 0.0, l, 1.0))[:, None]
    out += (first + token) * stride_o_tok
    o_o = o_t * stride_o_tok + o_head * stride_o_head
    store_planes(out, o_o, a0 * inv, a1 * inv, a2 * inv, a3 * inv, o_v, m_r, D, VP, BLOCK, 1)
    p_lse = lse + (first + token) * (HEADS_KV * GROUP)
    tl.store(p_lse + o_t * (HEADS_KV * GROUP) + o_head, (m + tl.log2(l)) * 0.6931471805599453, mask=m_r)


def prefill_constants(
    layout: PageLayout,
    group: int,
    config: PrefillConfig,
    *,
    dtype: torch.dtype = torch.float16,
    pairs: int = 0,
    has_scale: bool = False,
    has_shift: bool = False,
    has_hot: bool = False,
    has_sinks: bool = False,
    window: bool = False,
    softcap: bool = False,
) -> dict[str, Any]:
    """Compile-time constants of ``prefill_kernel`` for a layout and the features a call uses."""
    key, value, head_dim = layout.scheme.key, layout.scheme.value, layout.head_dim
    block = hadamard_block(head_dim)
    return dict(
        HEADS_KV=layout.kv_heads, GROUP=group, D=head_dim, N=layout.page_size, R=config.rows, T=config.tokens,
        K_BITS=key.bits, V_BITS=value.bits, K_SYM=key.symmetric, V_SYM=value.symmetric,
        K_ROTATE=key.rotate, V_ROTATE=value.rotate, BLOCK=block, NORM=block**-0.5,
        WK=max(16, next_pow2(head_dim // key.planes)), WV=max(16, next_pow2(head_dim // value.planes)),
        QT=min(config.page_tokens, layout.page_size), HOT_T=min(config.tokens, layout.page_size),
        HAS_SCALE=has_scale, PAIRS=pairs, HAS_SHIFT=has_shift and pairs > 0, HAS_HOT=has_hot,
        HAS_SINKS=has_sinks, WINDOW=window, SOFTCAP=softcap, SPLIT=dtype == torch.bfloat16,
        STAGES=config.num_stages, ASM=USE_ASM, LANES=USE_ASM and config.lanes,
    )  # fmt: skip


def prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    transform: DeviceTransform | None = None,
    hot: HotPool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    position_offset: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
) -> None:
    """Launch the kernel; nothing is allocated or read back. Shapes as in kvq.prefill.prefill_pages, checked there.

    The last dims are contiguous; a hot pool has the dtype of the query; lse is float32 [tokens, heads], contiguous.
    """
    tokens, heads, head_dim = query.shape
    num_seqs, pairs = context_lens.shape[0], 0 if transform is None else transform.pairs
    if config is None:
        capability = torch.cuda.get_device_capability(query.device)[0] if query.is_cuda else 0
        config = PrefillConfig.default(head_dim, capability, pairs)
    group = heads // layout.kv_heads
    tiles = tokens * group // config.rows + num_seqs
    if not tokens or not tiles:
        return
    meta = prefill_constants(
        layout,
        group,
        config,
        dtype=query.dtype,
        pairs=pairs,
        has_scale=transform is not None and transform.has_scale,
        has_shift=position_offset is not None,
        has_hot=hot is not None,
        has_sinks=sinks is not None,
        window=sliding_window is not None,
        softcap=softcap is not None,
    )
    empty = context_lens
    kernel = prefill_kernel[(layout.kv_heads, tiles)](
        query, key, value, pages, out, lse,
        block_tables, context_lens, cu_seqlens, empty if hot is None else hot.index, query if hot is None else hot.pool,
        empty if sinks is None else sinks,
        word_hadamard(head_dim, layout.scheme.key.planes, pages.device),
        word_hadamard(head_dim, layout.scheme.value.planes, pages.device),
        *((empty,) * 7 if transform is None else transform.decode_tensors()),
        empty if position_offset is None else position_offset,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        out.stride(0), out.stride(1), pages.stride(0), block_tables.stride(0),
        layout.head_bytes, layout.v_codes, layout.k_scales, layout.v_scales,
        scale, sliding_window or 0, softcap or 0.0, num_seqs, tiles,
        **meta, **FUSED, num_warps=config.num_warps,
    )  # fmt: skip
    layouts.check(kernel)
