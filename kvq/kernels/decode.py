"""Paged attention decode over quantized pages, with native ("hot") pages and split-KV, in one launch and a merge.

For groups up to 8 scores are computed transposed, S^T = K q^T, so that tokens fill the 16 rows of an MMA tile and the
GQA group its 8 columns: half the tensor and softmax work of padding the group to 16 rows. TOKENS is the axis of tokens
in a tile of scores: 0 for those, 1 for S = q K^T. In comments tiles are written as if it were 0.

For a tile of N tokens, with codes unpacked as subnormal fp16 numbers n UNIT, scales (ks, kz), (vs, vz) a token, and q
already rotated and scaled to at most 1 in size:

    s     = (n UNIT . q) ks + (UNIT sum q) kz + o UNIT       sm: softmax scale * log2 e * max |q| / UNIT
    p     = exp2(s sm - M)                  M: running maximum of s sm, plus the exponent of the tile's largest vs if
    acc   = acc a + (p vs) . n + sum(p vz)  that is positive, so that p and p vs are in fp16 range;  a = exp2(M_old - M)
    L     = L a + sum(p)

``o`` is the key offset q . R(pos) mu: on P rotary pairs, two coefficients turned to the tile's first position in
float32, times cos/sin of the positions in the tile, in halves (hi + lo) because |mu| may be 200.
Work items, page lists and the split are made by kernels/schedule.py. Specification: reference.paged_attention_decode.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvq.kernels import layouts
from kvq.kernels.device import FUSED, USE_ASM, DeviceTransform, next_pow2
from kvq.kernels.planes import (
    butterfly2,
    butterfly4,
    plane_dim,
    tiny_bytes,
    tiny_nibble_pairs,
)
from kvq.kernels.weigh import add_tile, along, as_operand, no_sums, sum_of_p, sums_of_zeros, weigh
from kvq.page import TILE, PageLayout
from kvq.plan import ITEM, DecodePlan
from kvq.reference import HotPool, hadamard_block

NEG = tl.constexpr(-1.0e30)
HEADROOM = tl.constexpr(12.0)  # p reaches 2^12 in fp16, so that small p stay normal numbers
ITEM_FIELDS = tl.constexpr(ITEM)
TILE_TOKENS = tl.constexpr(TILE)
TINY = tl.constexpr(2.0**-24)  # of a code 1 unpacked in the last bits of an fp16


@triton.jit
def product(x, y, acc, TOKENS: tl.constexpr):
    """acc + x y where rows are columns (TOKENS 0), acc + y x where they are rows; ``acc`` None is 0."""
    if TOKENS == 0:
        z = tl.dot(x, y, acc)
    else:
        z = tl.dot(y, x, acc)
    return z


@triton.jit
def load_scales(ptr, o_n, SYM: tl.constexpr):
    """Scale and zero, fp16 [N] each, of tokens ``o_n``; the zero is 0 for symmetric storage."""
    if SYM:
        scale = tl.load(ptr.to(tl.pointer_type(tl.float16)) + o_n)
        zero = tl.zeros_like(scale)
    else:
        both = tl.load(ptr.to(tl.pointer_type(tl.int32)) + o_n)
        scale = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        zero = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return scale, zero


@triton.jit
def prefetch_l2(ptr, num_bytes, LINES: tl.constexpr):
    """Ask for the first LINES lines of 128 bytes, at most ``num_bytes``, from ``ptr`` on to be brought into L2."""
    offset = tl.minimum(tl.arange(0, LINES) * 128, num_bytes - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(ptr + offset).to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def page_index_of(i, p_index, LISTED: tl.constexpr):
    """Index in the sequence of entry ``i`` of its page list."""
    if LISTED:
        index = tl.load(p_index + i)
    else:
        index = i
    return index


@triton.jit
def apply_softcap(s, cap):
    """cap tanh(s / cap) by exp2, without overflow: tanh x = 1 - 2 / (exp(2x) + 1)."""
    return cap * (1.0 - 2.0 / (tl.exp2(s * (2.8853900817779268 / cap)) + 1.0))


@triton.jit
def visible(index, own, window, TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """Whether the rows whose own tokens stand at ``own`` [R] see the tokens at ``index`` [N]."""
    own = along(own, 1 - TOKENS)
    seen = along(index, TOKENS) <= own
    if WINDOW:
        seen &= along(index, TOKENS) > own - window
    return seen


@triton.jit
def of_page(x0, x1, x2, x3, N: tl.constexpr, T: tl.constexpr):
    """[T N], T at most 4: x0 for the N tokens of a first page, x1 for those of the next one, and so on."""
    o = tl.arange(0, T * N) // N
    y = tl.where(o == 0, x0, x1)
    if T == 4:
        y = tl.where(o < 2, y, tl.where(o == 2, x2, x3))
    return y


@triton.jit
def load_codes(
    p, row, N: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, N_AXIS: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Words int16 of N tokens from ``row`` on of a head, tokens along axis N_AXIS, padded to W a token. They are of one
    page at ``p``, or where they are more than its PAGE tokens, of pages at ``p`` [N]."""
    WORDS: tl.constexpr = D * BITS // 16
    p = p.to(tl.pointer_type(tl.int16)) + row * WORDS
    if PAGE < N:
        p = along(p, N_AXIS)
    if W == WORDS:
        # one range for the whole tile, so that all addresses are one register and constants
        o = tl.arange(0, N * W)
        if PAGE < N:
            o %= PAGE * W
        o = tl.reshape(o, [N, W])
        if N_AXIS == 1:
            o = tl.trans(o)
            o = tl.max_contiguous(tl.multiple_of(o, (8, 1)), (8, 1))
        else:
            o = tl.max_contiguous(tl.multiple_of(o, (1, 8)), (1, 8))
        words = tl.load(p + o)
    else:
        o_w = tl.arange(0, W)
        o = along(tl.arange(0, N) % PAGE, N_AXIS) * WORDS + along(o_w, 1 - N_AXIS)
        words = tl.load(p + o, mask=along(o_w < WORDS, 1 - N_AXIS), other=0)
    return words


@triton.jit
def quantized_scores(
    q0, q1, q2, q3, qs, sm, b_k, ks, kz, c_cos, c_sin, i_cos, i_sin, j_cos, j_sin, p_turn,
    token, own, window, cap,
    N: tl.constexpr, K_BITS: tl.constexpr, K_SYM: tl.constexpr,
    PAIRS: tl.constexpr, MAX_PAIRS: tl.constexpr, TOKENS: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Scores [N, R] of N tokens of one page and head, and their maxima [R], in units of log2.

    MASKED: not every row sees them all; the first stands at index ``token``. Unless MASKED or SOFTCAP the scores still
    have to be multiplied by ``sm``, which is free in the exponent.
    """
    ROWS: tl.constexpr = 1 - TOKENS
    UNIT: tl.constexpr = 2.0**-20 if K_BITS == 4 else 2.0**-24
    o_n = tl.arange(0, N)
    ks, kz = ks.to(tl.float32), kz.to(tl.float32)
    if MASKED:
        inside = token + o_n <= tl.max(own, 0)  # unused rows may hold NaN
        ks = tl.where(inside, ks, 0.0)
        kz = tl.where(inside, kz, 0.0)
    if K_BITS == 4:
        k0, k1, k2, k3 = tiny_nibble_pairs(b_k, ASM)
        s = product(k0, q0, None, TOKENS)
        s = product(k1, q1, s, TOKENS)
        s = product(k2, q2, s, TOKENS)
        s = product(k3, q3, s, TOKENS)
    else:
        k0, k1 = tiny_bytes(b_k, ASM)
        s = product(k0, q0, None, TOKENS)
        s = product(k1, q1, s, TOKENS)
    if K_SYM:
        kz = ks * -(1 << (K_BITS - 1))
    s = s * along(ks, TOKENS) + along(qs, ROWS) * along(kz, TOKENS)
    if PAIRS > 0:
        t_cos = tl.load(p_turn)  # [PAIRS], of the tile's first position
        t_sin = tl.load(p_turn + MAX_PAIRS)
        t_cos, t_sin = along(t_cos, TOKENS), along(t_sin, TOKENS)
        b_cos = c_cos * t_cos + c_sin * t_sin  # [PAIRS, R]
        b_sin = c_sin * t_cos - c_cos * t_sin
        h_cos, h_sin = b_cos.to(tl.float16), b_sin.to(tl.float16)
        o = product(i_cos, h_cos, None, TOKENS)
        o = product(i_sin, h_sin, o, TOKENS)
        o = product(i_cos, (b_cos - h_cos.to(tl.float32)).to(tl.float16), o, TOKENS)
        o = product(i_sin, (b_sin - h_sin.to(tl.float32)).to(tl.float16), o, TOKENS)
        o = product(j_cos, h_cos, o, TOKENS)
        o = product(j_sin, h_sin, o, TOKENS)
        s += o * UNIT
    if SOFTCAP:
        s = apply_softcap(s * sm, cap) * 1.4426950408889634
    elif MASKED:
        s *= sm
    if MASKED:
        s = tl.where(visible(token + o_n, own, window, TOKENS, WINDOW), s, NEG)
    top = tl.max(s, TOKENS)
    if not (SOFTCAP or MASKED):
        top *= sm
    return s, top


@triton.jit
def finish_planes(a0, a1, a2, a3, V_BITS: tl.constexpr):
    """The accumulators of ``quantized_values`` as values, planes apart."""
    if V_BITS == 4:
        a1, a3 = (a1 - a0) * 0.0625, (a3 - a2) * 0.0625
    return a0 * (1.0 / TINY), a1 * (1.0 / TINY), a2 * (1.0 / TINY), a3 * (1.0 / TINY)


@triton.jit
def quantized_values(
    s, top, sm, a0, a1, a2, a3, m, l, b_v, vs, vz, token, own,
    N: tl.constexpr, V_BITS: tl.constexpr, V_SYM: tl.constexpr,
    TOKENS: tl.constexpr, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, ASM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The tokens of ``quantized_scores`` added to the running softmax (m, l), l in sums of ``weigh``, and to the
    accumulators a0..a3 [WV, R], of which a1 and a3 are of ``tiny_nibble_pairs``."""
    ROWS: tl.constexpr = 1 - TOKENS
    if MASKED:
        inside = token + tl.arange(0, N) <= tl.max(own, 0)
        vs = tl.where(inside, vs, 0.0).to(tl.float16)
        vz = tl.where(inside, vz, 0.0).to(tl.float16)
    size = tl.max(tl.abs(vs.to(tl.float32)), 0)
    exponent = ((size.to(tl.int32, bitcast=True) >> 23) - 126).to(tl.float32)  # size < 2^exponent
    m_new = tl.maximum(m, top + (tl.maximum(exponent, 0.0) - HEADROOM))
    a = tl.exp2(m - m_new)
    if SOFTCAP or MASKED:
        p = tl.exp2(s - along(m_new, ROWS))
    else:
        p = tl.exp2(s * sm - along(m_new, ROWS))
    b_p, sums = weigh(p.to(tl.float16), vs, vz, V_SYM, TOKENS, LANES)
    a = along(a, ROWS)
    l = l * a + sums
    # MMAs round towards zero: the zeros of the tile keep the accumulators near it.
    c = sums_of_zeros(sums, TOKENS) * ((-(1 << (V_BITS - 1)) if V_SYM else 1) * TINY)
    if V_BITS == 4:
        v0, v1, v2, v3 = tiny_nibble_pairs(b_v, ASM)
        c_pair = c * 17.0
        a0 = product(v0, b_p, add_tile(a0 * a, c, TOKENS), TOKENS)
        a1 = product(v1, b_p, add_tile(a1 * a, c_pair, TOKENS), TOKENS)
        a2 = product(v2, b_p, add_tile(a2 * a, c, TOKENS), TOKENS)
        a3 = product(v3, b_p, add_tile(a3 * a, c_pair, TOKENS), TOKENS)
    else:
        v0, v1 = tiny_bytes(b_v, ASM)
        a0 = product(v0, b_p, add_tile(a0 * a, c, TOKENS), TOKENS)
        a1 = product(v1, b_p, add_tile(a1 * a, c, TOKENS), TOKENS)
    return a0, a1, a2, a3, m_new, l


@triton.jit
def load_query_plane(
    query, o_row, o_w, m_row,
    PLANE: tl.constexpr, PLANES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Plane PLANE of the query rows at offsets ``o_row`` [R], [W, R] in the query's dtype."""
    dim = plane_dim(o_w, PLANE, PLANES, BLOCK)
    mask = along(o_w < D // PLANES, TOKENS) & along(m_row, 1 - TOKENS)
    return tl.load(query + (along(o_row, 1 - TOKENS) + along(dim, TOKENS)), mask=mask, other=0.0)


@triton.jit
def split_dot(h, x, TOKENS: tl.constexpr):
    """h x for an exact fp16 matrix h = h^T and float32 x of size at most 1, in two fp16 halves of x (22 bits)."""
    hi = x.to(tl.float16)
    lo = (x - hi.to(tl.float32)).to(tl.float16)
    return product(h, lo, product(h, hi, None, TOKENS), TOKENS)


@triton.jit
def plane_max(x0, x1, x2, x3, PLANES: tl.constexpr):
    """Largest size of any value of the planes; 1 when all are zero."""
    top = tl.maximum(tl.abs(x0), tl.abs(x1))
    if PLANES == 4:
        top = tl.maximum(top, tl.maximum(tl.abs(x2), tl.abs(x3)))
    top = tl.max(tl.max(top, 1), 0)
    return tl.where(top > 0.0, top, 1.0)


@triton.jit
def rotate_planes(
    x0, x1, x2, x3, p_hadamard, W: tl.constexpr, PLANES: tl.constexpr, NORM: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Normalised Hadamard transform of float32 planes [W, R] of size at most 1; ``p_hadamard`` fp16 [W, W] of +-1."""
    o_w = tl.arange(0, W)
    h = tl.load(p_hadamard + o_w[:, None] * W + o_w[None, :])
    if PLANES == 4:
        x0, x1, x2, x3 = butterfly4(
            split_dot(h, x0, TOKENS), split_dot(h, x1, TOKENS), split_dot(h, x2, TOKENS), split_dot(h, x3, TOKENS)
        )
        x2, x3 = x2 * NORM, x3 * NORM
    else:
        x0, x1 = butterfly2(split_dot(h, x0, TOKENS), split_dot(h, x1, TOKENS))
    return x0 * NORM, x1 * NORM, x2, x3


@triton.jit
def load_query(
    query, o_row, o_w, m_row, D: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr
):
    """Query planes as they are, [W, R]; 2 and 3 repeat 0 and 1 when PLANES is 2."""
    x0 = load_query_plane(query, o_row, o_w, m_row, 0, PLANES, D, BLOCK, TOKENS)
    x1 = load_query_plane(query, o_row, o_w, m_row, 1, PLANES, D, BLOCK, TOKENS)
    if PLANES == 4:
        x2 = load_query_plane(query, o_row, o_w, m_row, 2, PLANES, D, BLOCK, TOKENS)
        x3 = load_query_plane(query, o_row, o_w, m_row, 3, PLANES, D, BLOCK, TOKENS)
    else:
        x2, x3 = x0, x1
    return x0, x1, x2, x3


@triton.jit
def turn_query(
    x0, x1, x2, x3, p_scale, p_hadamard, o_w,
    D: tl.constexpr, W: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
    ROTATE: tl.constexpr, HAS_SCALE: tl.constexpr, NORM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Planes of ``load_query`` over their largest size, float32, in the space of the stored keys; and that size."""
    x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    if HAS_SCALE:
        inside = o_w < D // PLANES
        x0 *= along(tl.load(p_scale + plane_dim(o_w, 0, PLANES, BLOCK), mask=inside, other=0.0), TOKENS)
        x1 *= along(tl.load(p_scale + plane_dim(o_w, 1, PLANES, BLOCK), mask=inside, other=0.0), TOKENS)
        if PLANES == 4:
            x2 *= along(tl.load(p_scale + plane_dim(o_w, 2, PLANES, BLOCK), mask=inside, other=0.0), TOKENS)
            x3 *= along(tl.load(p_scale + plane_dim(o_w, 3, PLANES, BLOCK), mask=inside, other=0.0), TOKENS)
    top = plane_max(x0, x1, x2, x3, PLANES)
    inv = 1.0 / top
    x0, x1, x2, x3 = x0 * inv, x1 * inv, x2 * inv, x3 * inv
    if ROTATE:
        x0, x1, x2, x3 = rotate_planes(x0, x1, x2, x3, p_hadamard, W, PLANES, NORM, TOKENS)
    return x0, x1, x2, x3, top


@triton.jit
def query_operands(
    x0, x1, x2, x3, K_BITS: tl.constexpr, ROTATED: tl.constexpr, TOKENS: tl.constexpr, ASM: tl.constexpr
):
    """What ``quantized_scores`` multiplies unpacked codes with, fp16 [W, R], for planes of ``turn_query``; and the sum
    of the rounded query, [R], times the unit of the scores.

    With codes of 4 bits, x0 n0 + x1 n1 = ((16 x0 - x1) n0 + x1 (n0 + 16 n1)) / 16. ROTATED: the planes are results of
    an MMA.
    """
    q1 = x1.to(tl.float16)
    if K_BITS == 4:
        q3 = x3.to(tl.float16)
        f1, f3 = q1.to(tl.float32), q3.to(tl.float32)
        q0, q2 = (x0 * 16.0 - f1).to(tl.float16), (x2 * 16.0 - f3).to(tl.float16)
        f = q0.to(tl.float32) + f1 * 17.0 + (q2.to(tl.float32) + f3 * 17.0)
    else:
        q0 = x0.to(tl.float16)
        f = q0.to(tl.float32) + q1.to(tl.float32)
        q2, q3 = q0, q1
    qs = tl.sum(f, TOKENS) * TINY
    if ROTATED:
        q0, q1 = as_operand(q0, TOKENS, ASM), as_operand(q1, TOKENS, ASM)
        if K_BITS == 4:
            q2, q3 = as_operand(q2, TOKENS, ASM), as_operand(q3, TOKENS, ASM)
    return q0, q1, q2, q3, qs


@triton.jit
def load_hot_query(
    query, o_row, o_w, m_row, hot_pool,
    D: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Query planes for hot pages: in the original space and the pool's dtype."""
    DTYPE: tl.constexpr = tl.float32 if UPCAST else hot_pool.dtype.element_ty
    x0, x1, x2, x3 = load_query(query, o_row, o_w, m_row, D, PLANES, BLOCK, TOKENS)
    return x0.to(DTYPE), x1.to(DTYPE), x2.to(DTYPE), x3.to(DTYPE)


@triton.jit
def hot_plane(p, o_n, o_w, m_n, PLANE: tl.constexpr, PLANES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
              N_AXIS: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Plane PLANE of N rows of a hot page, tokens along axis N_AXIS."""
    dim = plane_dim(o_w, PLANE, PLANES, BLOCK)
    mask = along(m_n, N_AXIS) & along(o_w < D // PLANES, 1 - N_AXIS)
    x = tl.load(p + (along(o_n, N_AXIS) * D + along(dim, 1 - N_AXIS)), mask=mask, other=0.0)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def hot_scores(
    q0, q1, q2, q3, p_key, sm, token, own, window, cap,
    D: tl.constexpr, N: tl.constexpr, W: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Scores [N, R] of N tokens of a hot page of one head, in units of log2; q in the original space and its dtype."""
    o_n = tl.arange(0, N)
    o_w = tl.arange(0, W)
    m_n = token + o_n <= tl.max(own, 0)
    s = product(hot_plane(p_key, o_n, o_w, m_n, 0, PLANES, D, BLOCK, TOKENS, UPCAST), q0, None, TOKENS)
    s = product(hot_plane(p_key, o_n, o_w, m_n, 1, PLANES, D, BLOCK, TOKENS, UPCAST), q1, s, TOKENS)
    if PLANES == 4:
        s = product(hot_plane(p_key, o_n, o_w, m_n, 2, PLANES, D, BLOCK, TOKENS, UPCAST), q2, s, TOKENS)
        s = product(hot_plane(p_key, o_n, o_w, m_n, 3, PLANES, D, BLOCK, TOKENS, UPCAST), q3, s, TOKENS)
    s = s * sm
    if SOFTCAP:
        s = apply_softcap(s, cap) * 1.4426950408889634
    return tl.where(visible(token + o_n, own, window, TOKENS, WINDOW), s, NEG)


@triton.jit
def hot_values(
    s, a0, a1, a2, a3, m, l, p_value, token, own,
    D: tl.constexpr, N: tl.constexpr, W: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The tokens of ``hot_scores`` added to the running softmax and the accumulators, in the original space."""
    ROWS: tl.constexpr = 1 - TOKENS
    o_n = tl.arange(0, N)
    o_w = tl.arange(0, W)
    m_n = token + o_n <= tl.max(own, 0)
    v0 = hot_plane(p_value, o_n, o_w, m_n, 0, PLANES, D, BLOCK, ROWS, UPCAST)  # [W, N]
    v1 = hot_plane(p_value, o_n, o_w, m_n, 1, PLANES, D, BLOCK, ROWS, UPCAST)
    m_new = tl.maximum(m, tl.max(s, TOKENS) - HEADROOM)
    a = tl.exp2(m - m_new)
    p = tl.exp2(s - along(m_new, ROWS))
    l = l * a + tl.sum(p, TOKENS)
    a = along(a, ROWS)
    hi = p.to(v0.dtype)
    lo = (p - hi.to(tl.float32)).to(v0.dtype)  # bf16 alone would round p to 3 digits
    a0 = product(v0, lo, product(v0, hi, a0 * a, TOKENS), TOKENS)
    a1 = product(v1, lo, product(v1, hi, a1 * a, TOKENS), TOKENS)
    if PLANES == 4:
        v2 = hot_plane(p_value, o_n, o_w, m_n, 2, PLANES, D, BLOCK, ROWS, UPCAST)
        v3 = hot_plane(p_value, o_n, o_w, m_n, 3, PLANES, D, BLOCK, ROWS, UPCAST)
        a2 = product(v2, lo, product(v2, hi, a2 * a, TOKENS), TOKENS)
        a3 = product(v3, lo, product(v3, hi, a3 * a, TOKENS), TOKENS)
    return a0, a1, a2, a3, m_new, l


@triton.jit
def store_planes(
    out, o_row, x0, x1, x2, x3, o_w, m_row,
    D: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store planes [W, R] at the rows ``out + o_row`` [R], in the dtype of ``out``."""
    mask = along(o_w < D // PLANES, TOKENS) & along(m_row, 1 - TOKENS)
    o = along(o_row, 1 - TOKENS)
    tl.store(out + (o + along(plane_dim(o_w, 0, PLANES, BLOCK), TOKENS)), x0.to(out.dtype.element_ty), mask=mask)
    tl.store(out + (o + along(plane_dim(o_w, 1, PLANES, BLOCK), TOKENS)), x1.to(out.dtype.element_ty), mask=mask)
    if PLANES == 4:
        tl.store(out + (o + along(plane_dim(o_w, 2, PLANES, BLOCK), TOKENS)), x2.to(out.dtype.element_ty), mask=mask)
        tl.store(out + (o + along(plane_dim(o_w, 3, PLANES, BLOCK), TOKENS)), x3.to(out.dtype.element_ty), mask=mask)


@triton.jit(noinline=True)
def decode_item(
    i_item, query, pages, out, lse, part_out, part_lse,
    items, place_item, seq_lens, page_list, page_index, hot_list, hot_index, hot_pool, sinks,
    counts, skip_log2, skipped,
    k_hadamard, v_hadamard, dim_scale, pair_index, pair_dim, pair_mu, inner, near, far, position_offset,
    stride_q_seq, stride_q_tok, stride_q_head, stride_o_seq, stride_o_tok, stride_o_head,
    stride_page, stride_list, stride_hot, head_bytes, v_codes, k_scales, v_scales,
    scale, window, cap, q_len, rows,
    HEADS_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_SYM: tl.constexpr, V_SYM: tl.constexpr,
    K_ROTATE: tl.constexpr, V_ROTATE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    T: tl.constexpr, WK: tl.constexpr, WV: tl.constexpr, HOT_N: tl.constexpr,
    HAS_SCALE: tl.constexpr, PAIRS: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_HOT: tl.constexpr,
    HAS_SINKS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TOKENS: tl.constexpr,
    SKIP: tl.constexpr, STAGES: tl.constexpr, HOT_STAGES: tl.constexpr, PREFETCH: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A work item for one kv head and row block; a function of its own, so that nothing of it is hoisted."""
    KP: tl.constexpr = 16 // K_BITS
    VP: tl.constexpr = 16 // V_BITS
    EDGE_N: tl.constexpr = 16
    ROWS: tl.constexpr = 1 - TOKENS
    MAX_PAIRS: tl.constexpr = D // 2
    LINES: tl.constexpr = 32 if N * (D * (K_BITS + V_BITS) // 8 + 8) <= 4096 else 128  # of a page and head, for L2
    i_head = tl.program_id(0) % HEADS_KV
    i_block = tl.program_id(0) // HEADS_KV
    p_item = items + ITEM_FIELDS * i_item
    i_seq = tl.load(p_item)
    parts = tl.load(p_item + 1)
    lo, hi = tl.load(p_item + 2), tl.load(p_item + 3)
    hot_lo, hot_hi = tl.load(p_item + 4), tl.load(p_item + 5)
    full_lo, full_hi = tl.load(p_item + 6), tl.load(p_item + 7)
    seq_len = tl.load(seq_lens + i_seq)

    o_r = i_block * R + tl.arange(0, R)  # rows: query token major, head of the group minor
    m_r = o_r < rows
    own = tl.where(m_r, seq_len - q_len + o_r // GROUP, -1)  # index of the row's own token
    query += i_seq.to(tl.int64) * stride_q_seq
    o_head = i_head * GROUP + o_r % GROUP
    o_q = (o_r // GROUP) * stride_q_tok + o_head * stride_q_head  # within a sequence 32 bits are enough
    o_k = tl.arange(0, WK)
    o_v = tl.arange(0, WV)

    p_list = page_list + i_seq.to(tl.int64) * stride_list
    p_index = page_index + i_seq.to(tl.int64) * stride_list
    x0, x1, x2, x3 = load_query(query, o_q, o_k, m_r, D, KP, BLOCK, TOKENS)
    # pages that not every row sees whole, at either end of the list, and those that fill no tile come first
    start = tl.minimum(tl.maximum(full_lo, lo), hi)
    stop = tl.minimum(tl.maximum(full_hi, start), hi)
    if T > 1:
        stop -= (stop - start) % T
        if PAIRS > 0 and HAS_HOT:  # keys of a tile are turned as one page's: its pages follow each other
            if start < stop:
                gap = tl.load(p_index + stop - 1) - tl.load(p_index + start) != stop - 1 - start
                stop = tl.where(gap, start, stop)
    if ASM:  # start the first pages on their way to L2 while the query is made ready
        if stop - start < hi - lo:
            for ahead in tl.static_range(T):
                edge = tl.where(lo < start, lo, stop)
                if ahead > 0:
                    edge = tl.minimum(edge + ahead, hi - 1)
                page = tl.load(p_list + edge).to(tl.int64)
                prefetch_l2(pages + page * stride_page + i_head * head_bytes, head_bytes, LINES)
        for ahead in tl.static_range(PREFETCH * T):
            page = tl.load(p_list + tl.minimum(start + ahead, stop - 1), mask=start < stop, other=0).to(tl.int64)
            prefetch_l2(pages + page * stride_page + i_head * head_bytes, head_bytes, LINES)

    x0, x1, x2, x3, top = turn_query(
        x0, x1, x2, x3, dim_scale + i_head * D, k_hadamard, o_k, D, WK, KP, BLOCK, K_ROTATE, HAS_SCALE, NORM, TOKENS
    )
    q0, q1, q2, q3, qs = query_operands(x0, x1, x2, x3, K_BITS, K_ROTATE, TOKENS, ASM)
    if SOFTCAP:
        sm_raw = scale
    else:
        sm_raw = scale * 1.4426950408889634
    UNIT: tl.constexpr = 2.0**-20 if K_BITS == 4 else 2.0**-24  # of scores, see query_operands
    sm = sm_raw * top / UNIT

    if PAIRS > 0:
        o_p = tl.arange(0, PAIRS)
        o_n = tl.arange(0, N * T)
        o_pair = tl.load(pair_index + i_head * PAIRS + o_p)
        d_a = tl.load(pair_dim + 2 * o_pair)
        d_b = tl.load(pair_dim + 2 * o_pair + 1)
        mu_a = along(tl.load(pair_mu + i_head * 2 * PAIRS + o_p), TOKENS)
        mu_b = along(tl.load(pair_mu + i_head * 2 * PAIRS + PAIRS + o_p), TOKENS)
        p_q = query + along(o_q, ROWS)
        q_a = tl.load(p_q + along(d_a, TOKENS), mask=along(m_r, ROWS), other=0.0).to(tl.float32) / top
        q_b = tl.load(p_q + along(d_b, TOKENS), mask=along(m_r, ROWS), other=0.0).to(tl.float32) / top
        c_cos = q_a * mu_a + q_b * mu_b  # [PAIRS, R]
        c_sin = q_b * mu_a - q_a * mu_b
        if HAS_SHIFT:
            shift = tl.load(position_offset + i_seq)
            p_far = far + (tl.abs(shift) // N) * (2 * MAX_PAIRS) + o_pair
            p_near = near + (tl.abs(shift) % N) * (2 * MAX_PAIRS) + o_pair
            w_cos, w_sin = tl.load(p_far), tl.load(p_far + MAX_PAIRS)
            n_cos, n_sin = tl.load(p_near), tl.load(p_near + MAX_PAIRS)
            t_cos = along(w_cos * n_cos - w_sin * n_sin, TOKENS)
            t_sin = along(w_sin * n_cos + w_cos * n_sin, TOKENS)
            t_sin = tl.where(shift < 0, -t_sin, t_sin)
            c_cos, c_sin = c_cos * t_cos + c_sin * t_sin, c_sin * t_cos - c_cos * t_sin
        INNER: tl.constexpr = 2 * PAIRS * max(N, TILE_TOKENS)  # of a half
        p_inner = inner + i_head * (2 * INNER)
        p_in = p_inner + along(o_n, TOKENS) * (2 * PAIRS) + along(o_p, ROWS)
        i_cos, i_sin = tl.load(p_in), tl.load(p_in + PAIRS)  # [N T, PAIRS] fp16; loaded as they are, so they stay
        j_cos, j_sin = tl.load(p_in + INNER), tl.load(p_in + INNER + PAIRS)  # in shared memory
        p_turn = far + o_pair
    else:
        c_cos, c_sin, i_cos, i_sin, j_cos, j_sin = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        p_turn = far

    if TOKENS == 0:
        a0 = tl.zeros([WV, R], tl.float32)
    else:
        a0 = tl.zeros([R, WV], tl.float32)
    a1, a2, a3 = a0, a0, a0
    m = tl.full([R], -1.0e29, tl.float32)  # above NEG, so that a tile with nothing seen adds nothing
    l = no_sums(R, TOKENS)

    if HAS_HOT:
        UPCAST: tl.constexpr = not ASM  # the interpreter multiplies bf16 wrongly
        TILES: tl.constexpr = N // HOT_N
        p_hot = hot_list + i_seq.to(tl.int64) * stride_hot
        p_hot_index = hot_index + i_seq.to(tl.int64) * stride_hot
    r = tl.where(m_r, -1.0e29, 1.0e30)  # running maxima for SKIP: no row keeps a page that is not there
    if SKIP:
        # seeded by what every part can know: the sinks, and the first and the last hot page
        bar = tl.load(skip_log2)
        pages_skipped = 0
        if HAS_SINKS:
            r = tl.maximum(r, tl.load(sinks + o_head, mask=m_r, other=0.0).to(tl.float32) * 1.4426950408889634)
        if HAS_HOT:
            r0, r1, r2, r3 = load_hot_query(query, o_q, o_v, m_r, hot_pool, D, VP, BLOCK, TOKENS, UPCAST)
            last = tl.load(counts + 4 * i_seq + 1) - 1
            for i in tl.range(0, tl.where(last < 0, 0, 2 * TILES), num_stages=1):
                entry = tl.where(i < TILES, 0, last)
                row = (i % TILES) * HOT_N
                token = tl.load(p_hot_index + entry) * N + row
                p_key = hot_pool + ((tl.load(p_hot + entry).to(tl.int64) * 2 * HEADS_KV + i_head) * N + row) * D
                s = hot_scores(
                    r0, r1, r2, r3, p_key, sm_raw, token, own, window, cap,
                    D, HOT_N, WV, VP, BLOCK, TOKENS, WINDOW, SOFTCAP, UPCAST,
                )  # fmt: skip
                r = tl.maximum(r, tl.max(s, TOKENS))

    # the edges, in masked steps of EDGE_N tokens, without those beyond the last token
    STEPS: tl.constexpr = N // EDGE_N
    steps = (hi - lo - (stop - start)) * STEPS
    if stop < hi:
        steps -= STEPS - tl.cdiv(tl.minimum(seq_len - page_index_of(hi - 1, p_index, HAS_HOT) * N, N), EDGE_N)
    for step in tl.range(0, steps, num_stages=3):
        i = lo + step // STEPS
        i += tl.where(i < start, 0, stop - start)
        row = (step % STEPS) * EDGE_N
        index = page_index_of(i, p_index, HAS_HOT)
        p_page = pages + tl.load(p_list + i).to(tl.int64) * stride_page + i_head * head_bytes
        if PAIRS > 0:
            p_edge = p_inner + along(row + tl.arange(0, EDGE_N), TOKENS) * (2 * PAIRS) + along(o_p, ROWS)
            e_cos, e_sin = tl.load(p_edge), tl.load(p_edge + PAIRS)
            f_cos, f_sin = tl.load(p_edge + INNER), tl.load(p_edge + INNER + PAIRS)
        else:
            e_cos, e_sin, f_cos, f_sin = i_cos, i_sin, j_cos, j_sin
        o_edge = row + tl.arange(0, EDGE_N)
        b_k = load_codes(p_page, row, EDGE_N, D, K_BITS, WK, TOKENS, N)
        b_v = load_codes(p_page + v_codes, row, EDGE_N, D, V_BITS, WV, ROWS, N)
        ks, kz = load_scales(p_page + k_scales, o_edge, K_SYM)
        vs, vz = load_scales(p_page + v_scales, o_edge, V_SYM)
        s, seen_top = quantized_scores(
            q0, q1, q2, q3, qs, sm, b_k, ks, kz, c_cos, c_sin, e_cos, e_sin, f_cos, f_sin,
            p_turn + index * (2 * MAX_PAIRS), index * N + row, own, window, cap,
            EDGE_N, K_BITS, K_SYM, PAIRS, MAX_PAIRS, TOKENS, True, WINDOW, SOFTCAP, ASM,
        )  # fmt: skip
        a0, a1, a2, a3, m, l = quantized_values(
            s, seen_top, sm, a0, a1, a2, a3, m, l, b_v, vs, vz, index * N + row, own,
            EDGE_N, V_BITS, V_SYM, TOKENS, True, SOFTCAP, ASM, ASM,
        )  # fmt: skip
        if SKIP:
            r = tl.maximum(r, seen_top)
    o_tile = tl.arange(0, N * T) % N
    page = tl.load(p_list + start, mask=start < stop, other=0)
    if T > 1:
        page1 = tl.load(p_list + start + 1, mask=start < stop, other=0)
        page2, page3 = page1, page1
    if T == 4:
        page2 = tl.load(p_list + start + 2, mask=start < stop, other=0)
        page3 = tl.load(p_list + start + 3, mask=start < stop, other=0)
    for i in tl.range(start, stop, T, num_stages=STAGES):
        o_pages = page.to(tl.int64) * stride_page
        if T > 1:
            o_pages = of_page(
                o_pages, page1.to(tl.int64) * stride_page, page2.to(tl.int64) * stride_page,
                page3.to(tl.int64) * stride_page, N, T,
            )  # fmt: skip
        p_page = pages + o_pages + i_head * head_bytes
        if T > 1:
            p_page = tl.max_constancy(tl.multiple_of(p_page, 16), N)
        page = tl.load(p_list + tl.minimum(i + T, stop - 1))  # a tile early: nobody waits for it
        if T > 1:
            page1 = tl.load(p_list + tl.minimum(i + T + 1, stop - 1))
        if T == 4:
            page2 = tl.load(p_list + tl.minimum(i + T + 2, stop - 1))
            page3 = tl.load(p_list + tl.minimum(i + T + 3, stop - 1))
        index = 0
        if PAIRS > 0:
            index = page_index_of(i, p_index, HAS_HOT)
        b_k = load_codes(p_page, 0, N * T, D, K_BITS, WK, TOKENS, N)
        if not SKIP:
            b_v = load_codes(p_page + v_codes, 0, N * T, D, V_BITS, WV, ROWS, N)
        ks, kz = load_scales(p_page + k_scales, o_tile, K_SYM)
        if not SKIP:
            vs, vz = load_scales(p_page + v_scales, o_tile, V_SYM)
        s, seen_top = quantized_scores(
            q0, q1, q2, q3, qs, sm, b_k, ks, kz, c_cos, c_sin, i_cos, i_sin, j_cos, j_sin,
            p_turn + index * (2 * MAX_PAIRS), 0, own, window, cap,
            N * T, K_BITS, K_SYM, PAIRS, MAX_PAIRS, TOKENS, False, False, SOFTCAP, ASM,
        )  # fmt: skip
        keep = True
        if SKIP:
            keep = tl.max((seen_top > r + bar).to(tl.int32), 0) > 0
            r = tl.maximum(r, seen_top)
            pages_skipped += tl.where(keep, 0, 1)
        if keep:
            if SKIP:
                b_v = load_codes(p_page + v_codes, 0, N, D, V_BITS, WV, ROWS, N)
                vs, vz = load_scales(p_page + v_scales, o_tile, V_SYM)
            a0, a1, a2, a3, m, l = quantized_values(
                s, seen_top, sm, a0, a1, a2, a3, m, l, b_v, vs, vz, 0, own,
                N * T, V_BITS, V_SYM, TOKENS, False, SOFTCAP, ASM, ASM,
            )  # fmt: skip
    if SKIP:
        tl.atomic_add(skipped, pages_skipped.to(tl.int64), sem="relaxed")
        tl.atomic_add(skipped + 1, (stop - start).to(tl.int64), sem="relaxed")
    if HAS_HOT:  # asked for before the output is rotated
        m_hot = o_r < tl.where(hot_lo < hot_hi, rows, 0)
        r0, r1, r2, r3 = load_hot_query(query, o_q, o_v, m_hot, hot_pool, D, VP, BLOCK, TOKENS, UPCAST)
        if ASM:
            if hot_lo < hot_hi:
                p_key = hot_pool + (tl.load(p_hot + hot_lo).to(tl.int64) * 2 * HEADS_KV + i_head) * (N * D)
                prefetch_l2(p_key.to(tl.pointer_type(tl.uint8)), N * D * 2, N * WV * VP // 64)
                prefetch_l2((p_key + HEADS_KV * N * D).to(tl.pointer_type(tl.uint8)), N * D * 2, N * WV * VP // 64)
    a0, a1, a2, a3 = finish_planes(a0, a1, a2, a3, V_BITS)
    l = sum_of_p(l, TOKENS)
    if V_ROTATE:
        top = plane_max(a0, a1, a2, a3, VP)
        inv = 1.0 / top
        a0, a1, a2, a3 = rotate_planes(a0 * inv, a1 * inv, a2 * inv, a3 * inv, v_hadamard, WV, VP, NORM, TOKENS)
        a0, a1, a2, a3 = a0 * top, a1 * top, a2 * top, a3 * top

    if HAS_HOT:
        if hot_hi > hot_lo:
            for i in tl.range(hot_lo * TILES, hot_hi * TILES, num_stages=HOT_STAGES):
                slot = tl.load(p_hot + i // TILES).to(tl.int64)
                row = (i % TILES) * HOT_N
                token = tl.load(p_hot_index + i // TILES) * N + row
                p_key = hot_pool + ((slot * 2 * HEADS_KV + i_head) * N + row) * D
                s = hot_scores(
                    r0, r1, r2, r3, p_key, sm_raw, token, own, window, cap,
                    D, HOT_N, WV, VP, BLOCK, TOKENS, WINDOW, SOFTCAP, UPCAST,
                )  # fmt: skip
                a0, a1, a2, a3, m, l = hot_values(
                    s, a0, a1, a2, a3, m, l, p_key + HEADS_KV * N * D, token, own,
                    D, HOT_N, WV, VP, BLOCK, TOKENS, UPCAST,
                )  # fmt: skip

    if HAS_SINKS:
        if parts == 1:
            sink = tl.load(sinks + o_head, mask=m_r, other=0.0).to(tl.float32) * 1.4426950408889634
            m_new = tl.maximum(m, sink - HEADROOM)
            a = tl.exp2(m - m_new)
            l = l * a + tl.exp2(sink - m_new)
            m = m_new
            a = along(a, ROWS)
            a0, a1, a2, a3 = a0 * a, a1 * a, a2 * a, a3 * a
    inv = along(1.0 / tl.where(l > 0.0, l, 1.0), ROWS)
    a0, a1, a2, a3 = a0 * inv, a1 * inv, a2 * inv, a3 * inv
    if parts == 1:
        p_o = out + i_seq.to(tl.int64) * stride_o_seq
        store_planes(
            p_o, (o_r // GROUP) * stride_o_tok + o_head * stride_o_head, a0, a1, a2, a3, o_v, m_r, D, VP, BLOCK, TOKENS
        )
        natural = tl.where(l > 0.0, (m + tl.log2(l)) * 0.6931471805599453, float("-inf"))
        p_lse = lse + i_seq.to(tl.int64) * q_len * (HEADS_KV * GROUP)
        tl.store(p_lse + (o_r // GROUP) * (HEADS_KV * GROUP) + o_head, natural, mask=m_r)
    else:
        i_part_row = (i_item.to(tl.int64) * HEADS_KV + i_head) * rows
        store_planes(part_out + i_part_row * D, o_r * D, a0, a1, a2, a3, o_v, m_r, D, VP, BLOCK, TOKENS)
        tl.store(part_lse + i_part_row + o_r, tl.where(l > 0.0, m + tl.log2(l), NEG), mask=m_r)


@triton.jit
def decode_kernel(
    query, pages, out, lse, part_out, part_lse,
    items, place_item, seq_lens, page_list, page_index, hot_list, hot_index, hot_pool, sinks,
    counts, skip_log2, skipped,
    k_hadamard, v_hadamard, dim_scale, pair_index, pair_dim, pair_mu, inner, near, far, position_offset,
    stride_q_seq, stride_q_tok, stride_q_head, stride_o_seq, stride_o_tok, stride_o_head,
    stride_page, stride_list, stride_hot, head_bytes, v_codes, k_scales, v_scales,
    scale, window, cap, q_len, rows,
    HEADS_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_SYM: tl.constexpr, V_SYM: tl.constexpr,
    K_ROTATE: tl.constexpr, V_ROTATE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    T: tl.constexpr, WK: tl.constexpr, WV: tl.constexpr, HOT_N: tl.constexpr,
    HAS_SCALE: tl.constexpr, PAIRS: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_HOT: tl.constexpr,
    HAS_SINKS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TOKENS: tl.constexpr,
    SKIP: tl.constexpr, STAGES: tl.constexpr, HOT_STAGES: tl.constexpr, PREFETCH: tl.constexpr,
    DEPENDENT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads x row blocks, places). See kernels/schedule.py for items, seq_info and the page lists."""
    if DEPENDENT:
        gdc_launch_dependents()  # the merge may be put in place; it waits for this grid's end
    p_place = place_item + tl.program_id(1)
    if ASM:
        prefetch_l2((items + ITEM_FIELDS * tl.program_id(1)).to(tl.pointer_type(tl.uint8)), 1, 1)  # its item, if even
    first = tl.load(p_place)
    for i in tl.range(0, tl.load(p_place + 1) - first, num_stages=1):
        decode_item(
            first + i, query, pages, out, lse, part_out, part_lse, items, place_item, seq_lens, page_list, page_index,
            hot_list, hot_index, hot_pool, sinks, counts, skip_log2, skipped, k_hadamard, v_hadamard, dim_scale,
            pair_index, pair_dim, pair_mu, inner, near, far, position_offset, stride_q_seq, stride_q_tok,
            stride_q_head, stride_o_seq, stride_o_tok, stride_o_head, stride_page, stride_list, stride_hot,
            head_bytes, v_codes, k_scales, v_scales, scale, window, cap, q_len, rows, HEADS_KV, GROUP, D, N, R,
            K_BITS, V_BITS, K_SYM, V_SYM, K_ROTATE, V_ROTATE, BLOCK, NORM, T, WK, WV, HOT_N, HAS_SCALE, PAIRS,
            HAS_SHIFT, HAS_HOT, HAS_SINKS, WINDOW, SOFTCAP, TOKENS, SKIP, STAGES, HOT_STAGES, PREFETCH, ASM,
        )  # fmt: skip


@triton.jit
def merge_kernel(
    out, lse, part_out, part_lse, seq_info, sinks,
    stride_o_seq, stride_o_tok, stride_o_head, q_len, rows,
    HEADS_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, B: tl.constexpr,
    S: tl.constexpr, HAS_SINKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Merges the partial outputs of a sequence by log-sum-exp. Grid (blocks of M rows x kv heads, blocks of B dims,
    sequences).

    Returns at once where the decode kernel wrote the output itself; writes zeros where a sequence has no part.
    """
    i_head = tl.program_id(0) % HEADS_KV
    i_seq = tl.program_id(2)
    parts = tl.load(seq_info + 2 * i_seq)
    first = tl.load(seq_info + 2 * i_seq + 1).to(tl.int64)
    if DEPENDENT:
        gdc_wait()  # also where there is nothing to merge: what follows in the stream relies on decode having ended
    if parts == 1:
        return
    o_s = tl.arange(0, S)
    o_m = (tl.program_id(0) // HEADS_KV) * M + tl.arange(0, M)
    m_m = o_m < rows
    o_d = tl.program_id(1) * B + tl.arange(0, B)
    o_head = i_head * GROUP + o_m % GROUP
    m = tl.full([M], -1.0e29, tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, B], tl.float32)
    if HAS_SINKS:
        m = tl.load(sinks + o_head, mask=m_m, other=0.0).to(tl.float32) * 1.4426950408889634  # [M]
        l += 1.0
    for s in range(0, parts, S):
        o_part = ((first + s + o_s) * HEADS_KV + i_head)[None, :] * rows + o_m[:, None]
        mask = (s + o_s < parts)[None, :] & m_m[:, None]
        b_lse = tl.load(part_lse + o_part, mask=mask, other=NEG)  # [M, S]
        b_o = tl.load(  # before the reduction of b_lse: both latencies at once
            part_out + (o_part[:, :, None] * D + o_d[None, None, :]),
            mask=mask[:, :, None] & (o_d < D)[None, None, :],
            other=0.0,
        )  # fmt: skip  [M, S, B]
        m_new = tl.maximum(m, tl.max(b_lse, 1))
        w = tl.exp2(b_lse - m_new[:, None])
        a = tl.exp2(m - m_new)
        acc = acc * a[:, None] + tl.sum(b_o * w[:, :, None], 1)
        l = l * a + tl.sum(w, 1)
        m = m_new
    acc = acc / tl.where(l > 0.0, l, 1.0)[:, None]
    o_token = o_m // GROUP
    p_o = out + i_seq.to(tl.int64) * stride_o_seq + (o_token * stride_o_tok + o_head * stride_o_head)[:, None]
    tl.store(p_o + o_d[None, :], acc.to(out.dtype.element_ty), mask=m_m[:, None] & (o_d < D)[None, :])
    natural = tl.where(l > 0.0, (m + tl.log2(l)) * 0.6931471805599453, float("-inf"))
    tl.store(lse + (i_seq.to(tl.int64) * q_len + o_token) * (HEADS_KV * GROUP) + o_head, natural, mask=m_m)


def decode(
    plan: DecodePlan,
    query: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    transform: DeviceTransform | None = None,
    hot: HotPool | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    position_offset: torch.Tensor | None = None,
) -> None:
    """Launch decode and merge over the items of ``plan.update``; graph-safe: no allocation, no synchronisation.

    query and out [num_seqs, q_len, heads, head_dim] with a contiguous last dim; lse float32 [num_seqs, q_len, heads].
    """
    layout, config = plan.layout, plan.config
    kv_heads = layout.kv_heads
    empty = plan.items
    page_list = plan.page_list if hot is not None else block_tables
    meta = decode_constants(
        layout,
        plan.heads // kv_heads,
        plan.row_block,
        pairs=0 if transform is None else transform.pairs,
        has_scale=transform is not None and transform.has_scale,
        has_shift=position_offset is not None,
        has_hot=hot is not None,
        has_sinks=sinks is not None,
        window=plan.sliding_window is not None,
        softcap=softcap is not None,
    )
    kernel = decode_kernel[(kv_heads * -(-plan.rows // plan.row_block), plan.places)](
        query, pages, out, lse, plan.part_out, plan.part_lse,
        plan.items, plan.place_item, seq_lens, page_list, plan.page_index, plan.hot_list, plan.hot_index,
        empty if hot is None else hot.pool, empty if sinks is None else sinks,
        plan.counts, plan.skip_log2, plan.skipped,
        plan.k_hadamard, plan.v_hadamard, *((empty,) * 7 if transform is None else transform.decode_tensors()),
        empty if position_offset is None else position_offset,
        query.stride(0), query.stride(1), query.stride(2), out.stride(0), out.stride(1), out.stride(2),
        pages.stride(0), page_list.stride(0), plan.hot_list.stride(0),
        layout.head_bytes, layout.v_codes, layout.k_scales, layout.v_scales,
        scale, plan.sliding_window or 0, softcap or 0.0, plan.q_len, plan.rows,
        **meta, T=plan.tile_pages, SKIP=plan.skip, STAGES=config.num_stages, HOT_STAGES=3, PREFETCH=config.prefetch,
        DEPENDENT=plan.dependent_launch, ASM=USE_ASM, num_warps=1, **FUSED,
        **({} if config.maxnreg is None else {"maxnreg": config.maxnreg}),
    )  # fmt: skip
    layouts.check(kernel)
    parts = next_pow2(max(1, plan.places // query.shape[0]))  # of a sequence, at most, when all are alike
    block = min(next_pow2(plan.rows), max(1, 64 // parts))  # few parts: several rows a program, 64 partial ones at once
    step = min(128, max(parts, min(16, 64 // block)))
    dims = 32 if parts > 32 else next_pow2(layout.head_dim)  # many partials: more programs a row
    grid = (triton.cdiv(plan.rows, block) * kv_heads, triton.cdiv(layout.head_dim, dims), query.shape[0])
    merge_kernel[grid](
        out, lse, plan.part_out, plan.part_lse, plan.seq_info, empty if sinks is None else sinks,
        out.stride(0), out.stride(1), out.stride(2), plan.q_len, plan.rows,
        HEADS_KV=kv_heads, GROUP=meta["GROUP"], D=layout.head_dim, M=block, B=dims, S=step,
        HAS_SINKS=sinks is not None, DEPENDENT=plan.dependent_launch,
        num_warps=4 if parts > 32 else max(1, block * step * dims // 4096), **FUSED,
        **({"launch_pdl": True} if plan.dependent_launch else {}),
    )  # fmt: skip


def decode_constants(
    layout: PageLayout,
    group: int,
    row_block: int,
    *,
    pairs: int = 0,
    has_scale: bool = False,
    has_shift: bool = False,
    has_hot: bool = False,
    has_sinks: bool = False,
    window: bool = False,
    softcap: bool = False,
) -> dict[str, Any]:
    """Compile-time constants of ``decode_kernel`` for a layout and the features a call uses."""
    key, value, head_dim = layout.scheme.key, layout.scheme.value, layout.head_dim
    block = hadamard_block(head_dim)
    return dict(
        HEADS_KV=layout.kv_heads, GROUP=group, D=head_dim, N=layout.page_size, R=row_block,
        K_BITS=key.bits, V_BITS=value.bits, K_SYM=key.symmetric, V_SYM=value.symmetric,
        K_ROTATE=key.rotate, V_ROTATE=value.rotate, BLOCK=block, NORM=block**-0.5,
        WK=max(16, next_pow2(head_dim // key.planes)), WV=max(16, next_pow2(head_dim // value.planes)), HOT_N=16,
        HAS_SCALE=has_scale, PAIRS=pairs, HAS_SHIFT=has_shift and pairs > 0, HAS_HOT=has_hot,
        HAS_SINKS=has_sinks, WINDOW=window, SOFTCAP=softcap, TOKENS=0 if row_block == 8 else 1,
    )  # fmt: skip
