"""Quantize on write: K and V of new tokens into the slots of their pages, and unchanged into hot pages.

One program quantizes T tokens of one head, K then V. Key offset, pair scale and Hadamard transform are fused; the
values are held as planes, so that packing is a shift and an or. Specification: reference.write.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvq.kernels.device import USE_ASM, DeviceTransform, next_pow2
from kvq.kernels.planes import plane_dim
from kvq.page import PageLayout
from kvq.reference import HotPool, hadamard_block, word_hadamard

FP16_MAX = tl.constexpr(65504.0)
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23
BAD_SLOT = tl.constexpr(0)  # entries of the status word, see ops.new_status
NOT_FINITE = tl.constexpr(1)
CLAMPED = tl.constexpr(2)
BAD_POSITION = tl.constexpr(3)


@triton.jit
def prefetch_rows(p_row, o_row, D: tl.constexpr, DP: tl.constexpr):
    """Ask for T rows of 16-bit values without waiting for them."""
    o_line = tl.minimum(tl.arange(0, DP // 64 if DP > 64 else 1) * 64, D - 1)
    p = p_row + (o_row[:, None] + o_line[None, :])
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def turn(far, near, pos, pair, D: tl.constexpr, N: tl.constexpr):
    """Cosine and sine of the angles of ``pair`` at positions ``pos`` [T]: [T, pairs] each."""
    p_far = far + ((pos // N).to(tl.int32) * D)[:, None] + pair[None, :]
    p_near = near + ((pos % N).to(tl.int32) * D)[:, None] + pair[None, :]
    f_cos, f_sin = tl.load(p_far), tl.load(p_far + D // 2)
    n_cos, n_sin = tl.load(p_near), tl.load(p_near + D // 2)
    return f_cos * n_cos - f_sin * n_sin, f_sin * n_cos + f_cos * n_sin


@triton.jit
def load_rows(
    p_row, o_row, p_mu, p_scale, dim_pair, far, near, pos,
    PLANES: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    KV_HEADS: tl.constexpr, HAS_MU: tl.constexpr, HALVES: tl.constexpr, HAS_SCALE: tl.constexpr, RAW: tl.constexpr,
    CLAMP: tl.constexpr,
):  # fmt: skip
    """The planes of T rows in two parts, the first and second half of them side by side: [T, PLANES * W / 2] each.

    As they are if RAW, else float32, less the offset and divided by the pair scale. HALVES: pairs of dims stand at the
    same place of the two parts.
    """
    RUN: tl.constexpr = BLOCK // PLANES
    PADDED: tl.constexpr = W * PLANES != D
    o_u = tl.arange(0, PLANES // 2 * W)
    m_u = o_u % W < D // PLANES
    d0 = plane_dim(o_u % W, 0, PLANES, BLOCK) + o_u // W * RUN
    d0 = tl.max_contiguous(tl.multiple_of(d0, RUN), RUN)
    d1 = d0 + BLOCK // 2
    p_x = p_row + (o_row[:, None] + d0[None, :])
    if PADDED:
        x0 = tl.load(p_x, mask=m_u[None, :], other=0.0)
        x1 = tl.load(p_x + BLOCK // 2, mask=m_u[None, :], other=0.0)
    else:
        x0, x1 = tl.load(p_x), tl.load(p_x + BLOCK // 2)
    if not RAW:
        x0, x1 = x0.to(tl.float32), x1.to(tl.float32)
        if CLAMP:
            x0, x1 = tame(x0), tame(x1)
        if HAS_MU:
            mu0, mu1 = tl.load(p_mu + d0, mask=m_u, other=0.0), tl.load(p_mu + d1, mask=m_u, other=0.0)
            p_mu += KV_HEADS * D
            partner0, partner1 = tl.load(p_mu + d0, mask=m_u, other=0.0), tl.load(p_mu + d1, mask=m_u, other=0.0)
            if HALVES:
                cos, sin = turn(far, near, pos, o_u, D, N)
                x0 -= mu0[None, :] * cos + partner0[None, :] * sin
                x1 -= mu1[None, :] * cos + partner1[None, :] * sin
            else:
                cos, sin = turn(far, near, pos, tl.load(dim_pair + d0, mask=m_u, other=0), D, N)
                x0 -= mu0[None, :] * cos + partner0[None, :] * sin
                cos, sin = turn(far, near, pos, tl.load(dim_pair + d1, mask=m_u, other=0), D, N)
                x1 -= mu1[None, :] * cos + partner1[None, :] * sin
        if HAS_SCALE:
            x0 *= (1.0 / tl.load(p_scale + d0, mask=m_u, other=1.0))[None, :]
            x1 *= (1.0 / tl.load(p_scale + d1, mask=m_u, other=1.0))[None, :]
    return x0, x1


@triton.jit
def rotate_rows(x, h, RAW: tl.constexpr, ASM: tl.constexpr):
    """x h for [T, U] and +-1 [U, U]. RAW: x has 16 bits, as h, and one product of them is exact."""
    if not ASM:  # the interpreter multiplies bf16 wrongly
        y = tl.dot(x.to(tl.float32), h.to(tl.float32))
    elif RAW:
        y = tl.dot(x, h)
    else:  # two bf16 hold 16 bits of a float32
        high = x.to(tl.bfloat16)
        h = h.to(tl.bfloat16)
        y = tl.dot(high, h, tl.dot((x - high.to(tl.float32)).to(tl.bfloat16), h))
    return y


@triton.jit
def quantize_rows(
    x0, x1, p_row, o_row, h,
    BITS: tl.constexpr, SYM: tl.constexpr, CLIP: tl.constexpr, GAIN: tl.constexpr, ROTATE: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, RAW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Words int16 [T, W] of T rows in two parts, and by row: scale and zero in one int32 (symmetric: the scale as
    int16), whether all values are finite, and whether some were clamped to fp16 range."""
    PLANES: tl.constexpr = 16 // BITS
    TOP: tl.constexpr = (1 << BITS) - 1
    UNIT: tl.constexpr = NORM if ROTATE else 1.0
    PADDED: tl.constexpr = W * PLANES != D
    if ROTATE:  # the parts are x0 + x1 and x0 - x1; the larger of them is x0 + |x1|
        x0, x1 = rotate_rows(x0, h, RAW, ASM), rotate_rows(x1, h, RAW, ASM)
        hi, lo = add_size(x0, x1, ASM), subtract_size(x0, x1, ASM)
        if CLIP < 1.0 and not SYM:
            if RAW:  # the sum of a rotated block is its first value times its size
                mean = tl.load(p_row + o_row).to(tl.float32)
                for i in tl.static_range(1, D // BLOCK):
                    mean += tl.load(p_row + (o_row + i * BLOCK)).to(tl.float32)
                mean *= NORM * BLOCK / D
            else:
                mean = tl.sum(x0, 1) * (2 * NORM / D)
    else:
        x0, x1 = x0.to(tl.float32), x1.to(tl.float32)
        hi, lo = max_nan(x0, x1), tl.minimum(x0, x1)
        if CLIP < 1.0 and not SYM:
            mean = tl.sum(x0 + x1, 1) * (1.0 / D)
    if PADDED:
        m_u = (tl.arange(0, PLANES // 2 * W) % W < D // PLANES)[None, :]
        hi, lo = tl.where(m_u, hi, -float("inf")), tl.where(m_u, lo, float("inf"))
    hi, lo = tl.reduce(hi, 1, max_nan) * UNIT, tl.min(lo, 1) * UNIT
    finite = (hi < float("inf")) & (lo > -float("inf"))
    clamped = tl.maximum(hi, -lo) > FP16_MAX
    hi, lo = clamp_fp16(hi), clamp_fp16(lo)
    BIAS: tl.constexpr = 1 << (BITS - 1) if SYM else 0
    zero = tl.zeros_like(lo).to(tl.float16)
    if SYM:
        scale = (tl.where(hi > -lo, hi, lo) * (-CLIP / BIAS)).to(tl.float16)
    elif CLIP < 1.0:
        mean = tl.minimum(tl.maximum(mean, lo), hi)
        zero = fp16_down(lo + (1.0 - CLIP) * (mean - lo), ASM)
        scale = ((hi - (1.0 - CLIP) * (hi - mean) - zero.to(tl.float32)) * (1.0 / TOP)).to(tl.float16)
    else:
        zero = fp16_down(lo, ASM)
        scale = ((hi - zero.to(tl.float32)) * (1.0 / TOP)).to(tl.float16)
    size = scale.to(tl.float32)
    inv = tl.where(size == 0.0, 0.0, reciprocal(size, ASM))
    # Codes over TOP, so that saturation to [0, 1] clamps them too.
    step = (inv * (UNIT / TOP))[:, None]
    shift = ((BIAS - zero.to(tl.float32) * inv) * (1.0 / TOP))[:, None]
    if ROTATE:
        y = x0 * step + shift
        c0, c1 = saturating_fma(x1, step, y, ASM), saturating_fma(x1, -step, y, ASM)
    else:
        c0, c1 = saturating_fma(x0, step, shift, ASM), saturating_fma(x1, step, shift, ASM)
    # Adding 1.5 * 2^23 rounds to an integer, which then is in the low mantissa bits. Bits 0 to 15 of that constant are
    # zero, so that codes can be shifted and added into a word of 16 bits as they are.
    c0, c1 = c0 * TOP + MAGIC, c1 * TOP + MAGIC
    word = c0.to(tl.int32, bitcast=True) + (c1.to(tl.int32, bitcast=True) << 8)
    if PLANES == 4:
        even, odd = tl.split(tl.permute(tl.reshape(word, [word.shape[0], 2, W]), (0, 2, 1)))
        word = even + (odd << 4)
    if GAIN != 1.0:
        scale = (size * GAIN).to(tl.float16)
        if not SYM:
            zero = clamp_fp16(mean + GAIN * (zero.to(tl.float32) - mean)).to(tl.float16)
    if SYM:
        stored = scale.to(tl.int16, bitcast=True)
    else:
        low = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        stored = low | (zero.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return word.to(tl.int16), stored, finite, clamped


@triton.jit
def store_rows(
    word, stored, p_codes, p_scales, row, m_t, BITS: tl.constexpr, SYM: tl.constexpr, D: tl.constexpr, W: tl.constexpr
):
    """Words and scales of T rows into their pages; p_* are pointers [T], row int32 [T]."""
    WORDS: tl.constexpr = D * BITS // 16
    o_w = tl.arange(0, W)
    mask = m_t[:, None]
    if W != WORDS:
        mask = mask & (o_w < WORDS)[None, :]
    p_word = p_codes.to(tl.pointer_type(tl.int16))[:, None] + row[:, None] * WORDS + o_w[None, :]
    tl.store(p_word, word, mask=mask)
    if SYM:
        tl.store(p_scales.to(tl.pointer_type(tl.int16)) + row, stored, mask=m_t)
    else:
        tl.store(p_scales.to(tl.pointer_type(tl.int32)) + row, stored, mask=m_t)


@triton.jit
def store_hot(p_row, o_row, p_hot, m_t, D: tl.constexpr, DP: tl.constexpr, CLAMP: tl.constexpr):
    """Rows of D values, as they are, to ``p_hot`` [T]."""
    if tl.max(m_t.to(tl.int32), 0) > 0:
        o_d = tl.arange(0, DP)
        mask = m_t[:, None] & (o_d < D)[None, :]
        x = tl.load(p_row + (o_row[:, None] + o_d[None, :]), mask=mask, other=0.0)
        if CLAMP:
            x = tame(x.to(tl.float32))
        tl.store(p_hot[:, None] + o_d[None, :], x.to(p_hot.dtype.element_ty), mask=mask)


@triton.jit
def has_nonfinite(p_row, o_row, D: tl.constexpr, DP: tl.constexpr):
    """Which of T rows hold NaN or inf."""
    o_d = tl.arange(0, DP)
    x = tl.load(p_row + (o_row[:, None] + o_d[None, :]), mask=(o_d < D)[None, :], other=0.0).to(tl.float32)
    return tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1) == 0


@triton.jit
def count(status, number, flag):
    """Add ``number`` for each row with ``flag`` [T] to ``status``."""
    tl.atomic_add(status + tl.zeros_like(flag.to(tl.int32)), number, mask=flag, sem="relaxed")


@triton.jit
def max_nan(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def add_size(x, y, ASM: tl.constexpr):
    """x + |y| in one instruction; tl.abs would cost another."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; abs.f32 t, $2; add.rn.f32 $0, $1, t; }", "=f,f,f", [x, y], tl.float32, True, 1
        )
    else:
        return x + tl.abs(y)


@triton.jit
def subtract_size(x, y, ASM: tl.constexpr):
    """x - |y| in one instruction."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; abs.f32 t, $2; sub.rn.f32 $0, $1, t; }", "=f,f,f", [x, y], tl.float32, True, 1
        )
    else:
        return x - tl.abs(y)


@triton.jit
def tame(x):
    """NaN to 0 and infinities to fp16's largest."""
    x = tl.where(x == x, x, 0.0)
    return tl.where(tl.abs(x) == float("inf"), tl.where(x > 0, FP16_MAX, -FP16_MAX), x)


@triton.jit
def clamp_fp16(x):
    return tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX)


@triton.jit
def fp16_down(x, ASM: tl.constexpr):
    """Largest fp16 not above float32 ``x`` (within fp16 range)."""
    if ASM:
        return tl.inline_asm_elementwise("cvt.rm.f16.f32 $0, $1;", "=h,f", [x], dtype=tl.float16, is_pure=True, pack=1)
    else:
        h = x.to(tl.float16)
        bits = h.to(tl.int16, bitcast=True).to(tl.int32)
        below = tl.where(bits == 0, 0x8001, tl.where(bits < 0, bits + 1, bits - 1))  # one step towards minus infinity
        down = below.to(tl.int16).to(tl.float16, bitcast=True)
        return tl.where(h.to(tl.float32) > x, down, h)


@triton.jit
def reciprocal(x, ASM: tl.constexpr):
    """1 / x for the float32 values of fp16 numbers, to one unit in the last place."""
    if ASM:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def saturating_fma(x, y, z, ASM: tl.constexpr):
    """x y + z clamped to [0, 1]."""
    x, y = tl.broadcast(x, y)
    x, z = tl.broadcast(x, z)
    if ASM:
        r = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, y, z], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        r = tl.minimum(tl.maximum(x * y + z, 0.0), 1.0)
    return r


@triton.jit
def write_kernel(
    key, value, slot_mapping, positions, pages, hot_pool, slot_of_page, k_hadamard, v_hadamard,
    dim_scale, dim_pair, dim_mu, near, far, status,
    stride_k_tok, stride_k_head, stride_v_tok, stride_v_head, stride_page, head_bytes, v_codes, k_scales, v_scales,
    tokens, num_pages, max_position,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_SYM: tl.constexpr, V_SYM: tl.constexpr,
    K_ROTATE: tl.constexpr, V_ROTATE: tl.constexpr, K_CLIP: tl.constexpr, V_CLIP: tl.constexpr,
    K_GAIN: tl.constexpr, V_GAIN: tl.constexpr,
    WK: tl.constexpr, WV: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    HAS_MU: tl.constexpr, HALVES: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_HOT: tl.constexpr,
    CHECK: tl.constexpr, CLAMP: tl.constexpr, HAS_VALUE: tl.constexpr, RAW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, blocks of T tokens)."""
    i_head = tl.program_id(0)
    start = tl.program_id(1) * T
    o_t = tl.arange(0, T)
    inside = start + o_t < tokens
    o_near = tl.minimum(o_t, tokens - 1 - start)  # rows beyond the last token read that one
    p_k = key + (start.to(tl.int64) * stride_k_tok + i_head * stride_k_head)
    p_v = value + (start.to(tl.int64) * stride_v_tok + i_head * stride_v_head)
    o_k, o_v = o_near * stride_k_tok, o_near * stride_v_tok
    pos = tl.zeros([T], tl.int64)
    if HAS_MU:
        pos = tl.load(positions + start + o_near).to(tl.int64)
        known = (pos >= 0) & (pos <= max_position)
        pos = tl.where(known, pos, 0)
    RAW_KEY: tl.constexpr = RAW and not HAS_MU and not HAS_SCALE
    k0, k1 = load_rows(
        p_k, o_k, dim_mu + i_head * D, dim_scale + i_head * D, dim_pair, far, near, pos,
        16 // K_BITS, D, WK, BLOCK, N, KV_HEADS, HAS_MU, HALVES, HAS_SCALE, RAW_KEY, CLAMP,
    )  # fmt: skip
    if HAS_VALUE and ASM:
        prefetch_rows(p_v, o_v, D, DP)  # on its way to L2 while K is computed
    slot = tl.load(slot_mapping + start + o_t, mask=inside, other=-1).to(tl.int64)
    page = slot // N
    row = (slot % N).to(tl.int32)
    m_t = slot >= 0
    if i_head == 0:
        count(status + BAD_SLOT, 1, m_t & (page >= num_pages))
    m_t = m_t & (page < num_pages)
    if HAS_MU:
        if i_head == 0:
            count(status + BAD_POSITION, 1, m_t & (known == 0))
        m_t = m_t & known

    k_h, v_h = 0.0, 0.0
    if K_ROTATE:
        UK: tl.constexpr = 8 // K_BITS * WK
        k_h = tl.load(k_hadamard + tl.arange(0, UK)[:, None] * UK + tl.arange(0, UK)[None, :])
    if V_ROTATE and K_ROTATE and K_BITS == V_BITS:
        v_h = k_h
    elif V_ROTATE:
        UV: tl.constexpr = 8 // V_BITS * WV
        v_h = tl.load(v_hadamard + tl.arange(0, UV)[:, None] * UV + tl.arange(0, UV)[None, :])
    k_word, k_stored, good, over = quantize_rows(
        k0, k1, p_k, o_k, k_h, K_BITS, K_SYM, K_CLIP, K_GAIN, K_ROTATE, D, WK, BLOCK, NORM, RAW_KEY, ASM
    )
    over = over.to(tl.int32)
    if HAS_VALUE:
        v0, v1 = load_rows(
            p_v, o_v, dim_mu, dim_scale, dim_pair, far, near, pos,
            16 // V_BITS, D, WV, BLOCK, N, KV_HEADS, False, False, False, RAW, CLAMP,
        )  # fmt: skip
        v_word, v_stored, v_good, v_over = quantize_rows(
            v0, v1, p_v, o_v, v_h, V_BITS, V_SYM, V_CLIP, V_GAIN, V_ROTATE, D, WV, BLOCK, NORM, RAW, ASM
        )
        good = good & v_good
        over += v_over.to(tl.int32)
    # One number a row, since what is known by row has to change its register layout to be stored.
    facts = over + good.to(tl.int32) * 4
    over, good = facts & 3, facts >= 4
    if CHECK and CLAMP:
        good = has_nonfinite(p_k, o_k, D, DP) == 0
        if HAS_VALUE:
            good = good & (has_nonfinite(p_v, o_v, D, DP) == 0)
        count(status + NOT_FINITE, 1, m_t & (good == 0))
    elif CHECK:
        count(status + NOT_FINITE, 1, m_t & (good == 0))
        m_t = m_t & good
    count(status + CLAMPED, over, m_t & (over > 0))
    p_page = pages + page * stride_page + i_head * head_bytes
    store_rows(k_word, k_stored, p_page, p_page + k_scales, row, m_t, K_BITS, K_SYM, D, WK)
    if HAS_VALUE:
        store_rows(v_word, v_stored, p_page + v_codes, p_page + v_scales, row, m_t, V_BITS, V_SYM, D, WV)
    if HAS_HOT:
        hot_slot = tl.load(slot_of_page + page, mask=m_t, other=-1).to(tl.int64)
        p_hot = hot_pool + ((hot_slot * 2 * KV_HEADS + i_head) * N + row) * D
        store_hot(p_k, o_k, p_hot, hot_slot >= 0, D, DP, CLAMP)
        if HAS_VALUE:
            store_hot(p_v, o_v, p_hot + KV_HEADS * N * D, hot_slot >= 0, D, DP, CLAMP)


@functools.cache
def part_hadamard(head_dim: int, planes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """+-1 [U, U] that transforms a part of ``planes`` / 2 planes: as word_hadamard, for planes side by side."""
    h = word_hadamard(head_dim, planes, device).to(dtype)
    return torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)]) if planes == 4 else h


@dataclass(frozen=True)
class WriteConfig:
    """``tokens`` and warps of a program."""

    tokens: int
    num_warps: int

    @staticmethod
    def default(tokens: int, head_dim: int, rotate: bool, capability: int) -> WriteConfig:
        """For ``tokens`` on a major compute ``capability``. From Hopper on, 64 rows are one asynchronous product of
        four warps; others keep the matrix of the rotation in registers."""
        small = head_dim <= 128
        if tokens <= 1024:
            return WriteConfig(16, 4)
        if rotate and capability >= 9:
            return WriteConfig(64, 4)
        if rotate:
            return WriteConfig(16, 1 if small else 4)
        return WriteConfig(16, 2 if small else 4)


def write(
    pages: torch.Tensor,
    layout: PageLayout,
    key: torch.Tensor,
    value: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    status: torch.Tensor,
    positions: torch.Tensor | None = None,
    transform: DeviceTransform | None = None,
    hot: HotPool | None = None,
    clamp: bool = False,
    check: bool = True,
    config: WriteConfig | None = None,
) -> None:
    """Launch the quantize-on-write of ``key`` and ``value`` [tokens, kv_heads, head_dim]; graph-safe.

    ``value`` None writes keys alone. Tokens with a bad slot, position or value are skipped and counted in
    ``status`` int32 [4] (ops.new_status).
    """
    ks, vs, head_dim = layout.scheme.key, layout.scheme.value, layout.head_dim
    block = hadamard_block(head_dim)
    tokens = slot_mapping.shape[0]
    if tokens == 0:
        return
    if config is None:
        capability = torch.cuda.get_device_capability(key.device)[0] if key.is_cuda else 0
        config = WriteConfig.default(tokens, head_dim, ks.rotate or vs.rotate, capability)
    has_mu = transform is not None and transform.pairs > 0
    tables, halves = (status,) * 5, False
    if transform is not None:
        tables = (transform.dim_scale, transform.dim_pair, transform.dim_mu, transform.near, transform.far)
        source = transform.source
        halves = block == head_dim == source.rotary_dim and not source.interleaved
    write_kernel[(layout.kv_heads, triton.cdiv(tokens, config.tokens))](
        key, key if value is None else value, slot_mapping, slot_mapping if positions is None else positions, pages,
        key if hot is None else hot.pool, status if hot is None else hot.index,
        part_hadamard(head_dim, ks.planes, key.dtype, pages.device),
        part_hadamard(head_dim, vs.planes, key.dtype, pages.device),
        *tables, status,
        key.stride(0), key.stride(1), *(key if value is None else value).stride()[:2], pages.stride(0),
        layout.head_bytes, layout.v_codes, layout.k_scales, layout.v_scales,
        tokens, pages.shape[0], 0 if transform is None else transform.max_position,
        KV_HEADS=layout.kv_heads, D=head_dim, DP=next_pow2(head_dim), N=layout.page_size, T=config.tokens,
        K_BITS=ks.bits, V_BITS=vs.bits, K_SYM=ks.symmetric, V_SYM=vs.symmetric, K_ROTATE=ks.rotate,
        V_ROTATE=vs.rotate, K_CLIP=ks.clip, V_CLIP=vs.clip, K_GAIN=ks.gain(head_dim), V_GAIN=vs.gain(head_dim),
        WK=max(16, next_pow2(head_dim // ks.planes)), WV=max(16, next_pow2(head_dim // vs.planes)),
        BLOCK=block, NORM=block**-0.5, HAS_MU=has_mu, HALVES=has_mu and halves,
        HAS_SCALE=transform is not None and transform.has_scale,
        HAS_HOT=hot is not None, CHECK=check, CLAMP=clamp, HAS_VALUE=value is not None,
        RAW=not clamp and key.dtype != torch.float32, ASM=USE_ASM, num_warps=config.num_warps,
    )  # fmt: skip
