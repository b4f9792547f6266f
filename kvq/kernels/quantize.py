"""Quantize on write: K and V of new tokens into the slots of their pages, and unchanged into hot pages.

One program quantizes T tokens of one head, K then V. Key offset, pair scale and Hadamard transform are fused; the
values are held as planes, so that packing is a shift and an or. Specification: reference.write.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvq.kernels.device import FUSED, USE_ASM, DeviceTransform, dependent_launch, next_pow2
from kvq.kernels.planes import plane_dim
from kvq.page import PageLayout
from kvq.reference import HotPool, hadamard_block, word_hadamard
from kvq.tuned import WriteConfig, pick_write

FP16_MAX = tl.constexpr(65504.0)
FP16_MAX_BITS = tl.constexpr(0x477FE000)  # of the float32 65504.0
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
def load_raw(
    p_row, stride, last, PLANES: tl.constexpr, D: tl.constexpr, T: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr
):
    """The parts of T rows as they are, one below the other: [2 T, PLANES * W / 2]. Rows beyond ``last`` repeat it."""
    RUN: tl.constexpr = BLOCK // PLANES
    o_r = tl.arange(0, 2 * T)
    o_u = tl.arange(0, PLANES // 2 * W)
    dim = plane_dim(o_u % W, 0, PLANES, BLOCK) + o_u // W * RUN
    dim = tl.max_contiguous(tl.multiple_of(dim, RUN), RUN)
    p_x = p_row + ((tl.minimum(o_r % T, last) * stride)[:, None] + dim[None, :])
    p_x += (o_r // T * (BLOCK // 2))[:, None]
    if W * PLANES != D:
        x = tl.load(p_x, mask=(o_u % W < D // PLANES)[None, :], other=0.0)
    else:
        x = tl.load(p_x)
    return x


@triton.jit
def rotate_raw(x, h, ASM: tl.constexpr):
    """x h for 16-bit [T, U] and +-1 [U, U], float32: exact."""
    if ASM:
        y = tl.dot(x, h)
    else:  # the interpreter multiplies bf16 wrongly
        y = tl.dot(x.to(tl.float32), h.to(tl.float32))
    return y


@triton.jit
def upper_and_lower(x):
    """The first and the second half of the rows of ``x`` [2 T, U]."""
    return tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), (1, 2, 0)))


@triton.jit
def rotate_rows(x, h, ASM: tl.constexpr):
    """x h for float32 [T, U] and +-1 [U, U], to 16 bits of x: two bf16 hold them."""
    if ASM:
        high = x.to(tl.bfloat16)
        h = h.to(tl.bfloat16)
        y = tl.dot(high, h, tl.dot((x - high.to(tl.float32)).to(tl.bfloat16), h))
    else:
        y = tl.dot(x, h.to(tl.float32))
    return y


@triton.jit
def rotated_mean(p_row, o_row, D: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Means of T rows once they are rotated: the sum of a rotated block is its first value times its size."""
    mean = tl.load(p_row + o_row).to(tl.float32)
    for i in tl.static_range(1, D // BLOCK):
        mean += tl.load(p_row + (o_row + i * BLOCK)).to(tl.float32)
    return mean * (NORM * BLOCK / D)


@triton.jit
def split_halves(x, W: tl.constexpr):
    """[T, 2 W] to its first and its last W columns."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, W]), (0, 2, 1)))


@triton.jit
def add_code(c, word, TOP: tl.constexpr, SHIFT: tl.constexpr, ABOVE: tl.constexpr):
    """``word`` with the code round(c TOP) in its bits from SHIFT on: one addition and one multiply-add.

    A word whose lowest bit is SHIFT is held as the float32 1.5 * 2^(23 + SHIFT) plus its value: adding c TOP 2^SHIFT to
    that rounds to a code, and with SHIFT 0 the word is in the low mantissa bits. ABOVE: lowest bit of ``word``, -1 for
    no word yet.
    """
    BASE: tl.constexpr = 12582912.0 * 2**SHIFT
    if ABOVE < 0:
        base = BASE
    else:
        base = word + (BASE - 12582912.0 * 2**ABOVE)
    return c * (TOP * 2.0**SHIFT) + base


@triton.jit
def quantize_rows(
    x0, x1, mean,
    BITS: tl.constexpr, SYM: tl.constexpr, CLIP: tl.constexpr, GAIN: tl.constexpr, ROTATE: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr, RAW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Words int16 [T, W] of T rows, and by row: scale and zero in one int32 (symmetric: the scale as int16), and the
    size of the largest value, NaN where one is.

    x0, x1: parts of the rows, whose values are x0 + x1 and x0 - x1 if ROTATE. ``mean``: of the rotated rows, if RAW.
    """
    PLANES: tl.constexpr = 16 // BITS
    TOP: tl.constexpr = (1 << BITS) - 1
    UNIT: tl.constexpr = NORM if ROTATE else 1.0
    PADDED: tl.constexpr = W * PLANES != D
    if ROTATE:  # the larger of the two is x0 + |x1|
        hi, lo = add_size(x0, x1, ASM), subtract_size(x0, x1, ASM)
        if CLIP < 1.0 and not SYM and not RAW:
            mean = tl.sum(x0, 1) * (2 * NORM / D)
    else:
        hi, lo = max_nan(x0, x1), tl.minimum(x0, x1)
        if CLIP < 1.0 and not SYM:
            mean = tl.sum(x0 + x1, 1) * (1.0 / D)
    if PADDED:
        m_u = (tl.arange(0, PLANES // 2 * W) % W < D // PLANES)[None, :]
        hi, lo = tl.where(m_u, hi, -float("inf")), tl.where(m_u, lo, float("inf"))
    hi, lo = tl.reduce(hi, 1, max_nan) * UNIT, tl.min(lo, 1) * UNIT
    size = max_nan(hi, -lo)
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
    unit = scale.to(tl.float32)
    inv = tl.where(unit == 0.0, 0.0, reciprocal(unit, ASM))
    # Codes over TOP, so that saturation to [0, 1] clamps them too.
    step = (inv * (UNIT / TOP))[:, None]
    shift = ((BIAS - zero.to(tl.float32) * inv) * (1.0 / TOP))[:, None]
    if ROTATE:
        y = x0 * step + shift
        c0, c1 = saturating_fma(x1, step, y, ASM), saturating_fma(x1, -step, y, ASM)
    else:
        c0, c1 = saturating_fma(x0, step, shift, ASM), saturating_fma(x1, step, shift, ASM)
    if PLANES == 4:
        c2, c3 = split_halves(c1, W)
        c0, c1 = split_halves(c0, W)
        word = add_code(c3, 0.0, TOP, 12, -1)
        word = add_code(c2, word, TOP, 8, 12)
        word = add_code(c1, word, TOP, 4, 8)
        word = add_code(c0, word, TOP, 0, 4)
    else:
        word = add_code(c0, add_code(c1, 0.0, TOP, 8, -1), TOP, 0, 8)
    if GAIN != 1.0:
        scale = (unit * GAIN).to(tl.float16)
        if not SYM:
            zero = clamp_fp16(mean + GAIN * (zero.to(tl.float32) - mean)).to(tl.float16)
    if SYM:
        stored = scale.to(tl.int16, bitcast=True)
    else:
        low = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        stored = low | (zero.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return word.to(tl.int32, bitcast=True).to(tl.int16), stored, size


@triton.jit
def store_rows(
    word, stored, p_codes, p_scales, row, m_t,
    BITS: tl.constexpr, SYM: tl.constexpr, D: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Words and scales of T rows into their pages; p_* are pointers [T], row int32 [T]."""
    WORDS: tl.constexpr = D * BITS // 16
    o_w = tl.arange(0, W)
    mask = m_t[:, None]
    if W != WORDS:
        mask = mask & (o_w < WORDS)[None, :]
    p_word = p_codes.to(tl.pointer_type(tl.int16))[:, None] + row[:, None] * WORDS + o_w[None, :]
    tl.store(p_word, word, mask=mask)
    if SYM:
        p_scale = p_scales.to(tl.pointer_type(tl.int16)) + row
    else:
        p_scale = p_scales.to(tl.pointer_type(tl.int32)) + row
    if ASM:
        store_here(p_scale, stored, m_t, SYM)
    else:
        tl.store(p_scale, stored, mask=m_t)


@triton.jit
def store_here(p, x, mask, SHORT: tl.constexpr):
    """tl.store of 16 (SHORT) or 32 bits by the threads that hold ``x``: no value goes through shared memory to another
    thread first, and threads that hold the same value store it each."""
    address, wanted = p.to(tl.int64), mask.to(tl.int32)
    if SHORT:
        tl.inline_asm_elementwise(
            "{ .reg .pred q; setp.ne.b32 q, $3, 0; @q st.global.b16 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,h,r", [address, x, wanted], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred q; setp.ne.b32 q, $3, 0; @q st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r", [address, x, wanted], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def finish_rows(
    word, stored, size, trouble, p_row, o_row, p_codes, p_scales, row, m_t, status,
    BITS: tl.constexpr, SYM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, W: tl.constexpr,
    CHECK: tl.constexpr, CLAMP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rows ``m_t`` of K or V into their pages. If ``trouble``, those that were clamped are counted; so, if CHECK, are
    those that hold NaN or inf, which are left out unless CLAMP."""
    # What is known by row has to change its register layout to become a mask of rows to store: only where needed.
    if trouble:
        if CHECK:
            if CLAMP:
                bad = finite_rows(p_row, o_row, D, DP) == 0
            else:
                bad = (size < float("inf")) == 0
            count(status + NOT_FINITE, m_t & bad)
            if not CLAMP:
                m_t = m_t & (bad == 0)
        count(status + CLAMPED, m_t & (size > FP16_MAX))
        store_rows(word, stored, p_codes, p_scales, row, m_t, BITS, SYM, D, W, ASM)
    else:
        store_rows(word, stored, p_codes, p_scales, row, m_t, BITS, SYM, D, W, ASM)


@triton.jit
def store_hot(p_row, o_row, p_hot, m_t, D: tl.constexpr, DP: tl.constexpr, CHECK: tl.constexpr, CLAMP: tl.constexpr):
    """Rows of D values, as they are, to ``p_hot`` [T]; if CHECK and not CLAMP, without those that hold NaN or inf."""
    o_d = tl.arange(0, DP)
    mask = m_t[:, None] & (o_d < D)[None, :]
    x = tl.load(p_row + (o_row[:, None] + o_d[None, :]), mask=mask, other=0.0)
    if CLAMP:
        x = tame(x.to(tl.float32))
    elif CHECK:
        mask = mask & (tl.min((tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32), 1) > 0)[:, None]
    tl.store(p_hot[:, None] + o_d[None, :], x.to(p_hot.dtype.element_ty), mask=mask)


@triton.jit
def any_trouble(size, ALWAYS: tl.constexpr, ASM: tl.constexpr):
    """Whether one of ``size`` [T] is NaN or beyond fp16: the bits of a NaN are more than those of any number."""
    trouble = ALWAYS
    if not ALWAYS:
        bits = size.to(tl.int32, bitcast=True)
        if not ASM:  # the NaN of inf - inf on x86 is negative; max.NaN gives the positive one
            bits = bits & 0x7FFFFFFF
        trouble = tl.max(bits, 0) > FP16_MAX_BITS
    return trouble


@triton.jit
def finite_rows(p_row, o_row, D: tl.constexpr, DP: tl.constexpr):
    """Which of T rows hold neither NaN nor inf."""
    o_d = tl.arange(0, DP)
    x = tl.load(p_row + (o_row[:, None] + o_d[None, :]), mask=(o_d < D)[None, :], other=0.0).to(tl.float32)
    return tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1) > 0


@triton.jit
def count(status, flag):
    """Add 1 to ``status`` for each row with ``flag`` [T]."""
    tl.atomic_add(status + tl.zeros_like(flag.to(tl.int32)), 1, mask=flag, sem="relaxed")


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
def load_tensor(
    p_row, stride, last, p_mu, p_scale, dim_pair, far, near, pos,
    BITS: tl.constexpr, ROTATE: tl.constexpr, HAS_MEAN: tl.constexpr, D: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
    BLOCK: tl.constexpr, NORM: tl.constexpr, N: tl.constexpr, KV_HEADS: tl.constexpr,
    HAS_MU: tl.constexpr, HALVES: tl.constexpr, HAS_SCALE: tl.constexpr, RAW: tl.constexpr, JOIN: tl.constexpr,
    CLAMP: tl.constexpr,
):  # fmt: skip
    """T rows of K or V: of ``load_raw`` (twice) if RAW, ROTATE and JOIN, else of ``load_rows``; means if HAS_MEAN.

    JOIN: both parts of the rows are rotated by one product, which is worth it where that is asynchronous.
    """
    o_row = tl.minimum(tl.arange(0, T), last) * stride
    mean = 0.0
    if RAW and ROTATE and JOIN:
        x0 = load_raw(p_row, stride, last, 16 // BITS, D, T, W, BLOCK)
        x1 = x0
    else:
        x0, x1 = load_rows(
            p_row, o_row, p_mu, p_scale, dim_pair, far, near, pos,
            16 // BITS, D, W, BLOCK, N, KV_HEADS, HAS_MU, HALVES, HAS_SCALE, RAW, CLAMP,
        )  # fmt: skip
    if HAS_MEAN:
        mean = rotated_mean(p_row, o_row, D, BLOCK, NORM)
    return x0, x1, mean


@triton.jit
def encode_tensor(
    x0, x1, mean, h,
    BITS: tl.constexpr, SYM: tl.constexpr, CLIP: tl.constexpr, GAIN: tl.constexpr, ROTATE: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr, RAW: tl.constexpr, JOIN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """``quantize_rows`` of what ``load_tensor`` gives, rotated by ``h`` if ROTATE."""
    if not ROTATE:
        x0, x1 = x0.to(tl.float32), x1.to(tl.float32)
    elif RAW and JOIN:
        x0, x1 = upper_and_lower(rotate_raw(x0, h, ASM))
    elif RAW:
        x0, x1 = rotate_raw(x0, h, ASM), rotate_raw(x1, h, ASM)
    else:
        x0, x1 = rotate_rows(x0, h, ASM), rotate_rows(x1, h, ASM)
    return quantize_rows(x0, x1, mean, BITS, SYM, CLIP, GAIN, ROTATE, D, W, NORM, RAW, ASM)


@triton.jit
def find_rows(p_slot, wanted, num_slots, N: tl.constexpr):
    """Slots int64 of T tokens, which of them to write (``wanted``, in a slot that exists), and their page and row."""
    slot = tl.load(p_slot).to(tl.int64)
    m_t = (slot.to(tl.uint64) < num_slots) & wanted
    place = tl.where(m_t, slot, 0).to(tl.uint32)
    return slot, m_t, (place // N).to(tl.int64), (place % N).to(tl.int32)


@triton.jit
def load_hadamard(p, U: tl.constexpr, ROTATE: tl.constexpr):
    """The matrix [U, U] of ``part_hadamard``; nothing unless ROTATE."""
    h = 0.0
    if ROTATE:
        h = tl.load(p + tl.arange(0, U)[:, None] * U + tl.arange(0, U)[None, :])
    return h


@triton.jit
def write_kernel(
    key, value, slot_mapping, positions, pages, hot_pool, slot_of_page, k_hadamard, v_hadamard,
    dim_scale, dim_pair, dim_mu, near, far, status,
    stride_k_tok, stride_k_head, stride_v_tok, stride_v_head, stride_page, head_bytes, tokens, num_slots, max_position,
    V_CODES: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_SYM: tl.constexpr, V_SYM: tl.constexpr,
    K_ROTATE: tl.constexpr, V_ROTATE: tl.constexpr, K_CLIP: tl.constexpr, V_CLIP: tl.constexpr,
    K_GAIN: tl.constexpr, V_GAIN: tl.constexpr,
    WK: tl.constexpr, WV: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    HAS_MU: tl.constexpr, HALVES: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_HOT: tl.constexpr,
    CHECK: tl.constexpr, CLAMP: tl.constexpr, RAW: tl.constexpr, JOIN: tl.constexpr, VALUES: tl.constexpr,
    DEPENDENT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, blocks of T tokens, 2 if VALUES is "apart", else 1). VALUES: see WriteConfig; "" has no V."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()  # put in place early, it reads nothing before its inputs are there
    RAW_KEY: tl.constexpr = RAW and not HAS_MU and not HAS_SCALE
    K_MEAN: tl.constexpr = RAW_KEY and K_ROTATE and K_CLIP < 1.0 and not K_SYM
    V_MEAN: tl.constexpr = RAW and V_ROTATE and V_CLIP < 1.0 and not V_SYM
    i_head = tl.program_id(0)
    start = tl.program_id(1) * T
    o_t = tl.arange(0, T)
    last = tokens - 1 - start  # rows beyond the last token read that one
    p_k = key + (start.to(tl.int64) * stride_k_tok + i_head * stride_k_head)
    p_v = value + (start.to(tl.int64) * stride_v_tok + i_head * stride_v_head)
    o_near = tl.minimum(o_t, last)
    o_k, o_v = o_near * stride_k_tok, o_near * stride_v_tok
    # What a program reads it asks for before it waits for any of it.
    wanted = o_t <= last
    pos = tl.zeros([T], tl.int64)
    if HAS_MU:
        pos = tl.load(positions + start + o_near).to(tl.int64)
        known = (pos >= 0) & (pos <= max_position)
        pos = tl.where(known, pos, 0)
        wanted = wanted & known
    slot, m_t, page, row = find_rows(slot_mapping + start + o_near, wanted, num_slots, N)
    p_page = pages + page * stride_page + i_head * head_bytes
    k_h = load_hadamard(k_hadamard, 8 // K_BITS * WK, K_ROTATE)
    v_h = k_h
    if K_BITS != V_BITS or K_ROTATE != V_ROTATE:
        v_h = load_hadamard(v_hadamard, 8 // V_BITS * WV, V_ROTATE)

    counts = i_head == 0
    if VALUES == "apart":
        counts = counts & (tl.program_id(2) == 0)
        if tl.program_id(2) == 0:
            k0, k1, k_mean = load_tensor(
                p_k, stride_k_tok, last, dim_mu + i_head * D, dim_scale + i_head * D, dim_pair, far, near, pos,
                K_BITS, K_ROTATE, K_MEAN, D, T, WK, BLOCK, NORM, N, KV_HEADS, HAS_MU, HALVES, HAS_SCALE, RAW_KEY, JOIN,
                CLAMP,
            )  # fmt: skip
            k_word, k_stored, k_size = encode_tensor(
                k0, k1, k_mean, k_h, K_BITS, K_SYM, K_CLIP, K_GAIN, K_ROTATE, D, WK, NORM, RAW_KEY, JOIN, ASM
            )
            finish_rows(
                k_word, k_stored, k_size, any_trouble(k_size, CHECK and CLAMP, ASM), p_k, o_k, p_page,
                p_page + K_SCALES, row, m_t, status, K_BITS, K_SYM, D, DP, WK, CHECK, CLAMP, ASM,
            )  # fmt: skip
        else:
            v0, v1, v_mean = load_tensor(
                p_v, stride_v_tok, last, dim_mu, dim_scale, dim_pair, far, near, pos,
                V_BITS, V_ROTATE, V_MEAN, D, T, WV, BLOCK, NORM, N, KV_HEADS, False, False, False, RAW, JOIN, CLAMP,
            )  # fmt: skip
            v_word, v_stored, v_size = encode_tensor(
                v0, v1, v_mean, v_h, V_BITS, V_SYM, V_CLIP, V_GAIN, V_ROTATE, D, WV, NORM, RAW, JOIN, ASM
            )
            finish_rows(
                v_word, v_stored, v_size, any_trouble(v_size, CHECK and CLAMP, ASM), p_v, o_v, p_page + V_CODES,
                p_page + V_SCALES, row, m_t, status, V_BITS, V_SYM, D, DP, WV, CHECK, CLAMP, ASM,
            )  # fmt: skip
    else:
        k0, k1, k_mean = load_tensor(
            p_k, stride_k_tok, last, dim_mu + i_head * D, dim_scale + i_head * D, dim_pair, far, near, pos,
            K_BITS, K_ROTATE, K_MEAN, D, T, WK, BLOCK, NORM, N, KV_HEADS, HAS_MU, HALVES, HAS_SCALE, RAW_KEY, JOIN,
            CLAMP,
        )  # fmt: skip
        if VALUES == "prefetch" and ASM:
            prefetch_rows(p_v, o_v, D, DP)
        if VALUES == "early":
            v0, v1, v_mean = load_tensor(
                p_v, stride_v_tok, last, dim_mu, dim_scale, dim_pair, far, near, pos,
                V_BITS, V_ROTATE, V_MEAN, D, T, WV, BLOCK, NORM, N, KV_HEADS, False, False, False, RAW, JOIN, CLAMP,
            )  # fmt: skip
        k_word, k_stored, k_size = encode_tensor(
            k0, k1, k_mean, k_h, K_BITS, K_SYM, K_CLIP, K_GAIN, K_ROTATE, D, WK, NORM, RAW_KEY, JOIN, ASM
        )
        if VALUES == "":
            trouble = any_trouble(k_size, CHECK and CLAMP, ASM)
        else:
            if VALUES != "early":
                v0, v1, v_mean = load_tensor(
                    p_v, stride_v_tok, last, dim_mu, dim_scale, dim_pair, far, near, pos,
                    V_BITS, V_ROTATE, V_MEAN, D, T, WV, BLOCK, NORM, N, KV_HEADS, False, False, False, RAW, JOIN, CLAMP,
                )  # fmt: skip
            v_word, v_stored, v_size = encode_tensor(
                v0, v1, v_mean, v_h, V_BITS, V_SYM, V_CLIP, V_GAIN, V_ROTATE, D, WV, NORM, RAW, JOIN, ASM
            )
            trouble = any_trouble(max_nan(k_size, v_size), CHECK and CLAMP, ASM)
        finish_rows(
            k_word, k_stored, k_size, trouble, p_k, o_k, p_page, p_page + K_SCALES, row, m_t, status,
            K_BITS, K_SYM, D, DP, WK, CHECK, CLAMP, ASM,
        )  # fmt: skip
        if VALUES != "":
            finish_rows(
                v_word, v_stored, v_size, trouble, p_v, o_v, p_page + V_CODES, p_page + V_SCALES, row, m_t, status,
                V_BITS, V_SYM, D, DP, WV, CHECK, CLAMP, ASM,
            )  # fmt: skip
    if HAS_HOT:
        slot, m_t, page, row = find_rows(slot_mapping + start + o_near, wanted, num_slots, N)  # again: fewer registers
        hot_slot = tl.load(slot_of_page + page, mask=m_t, other=-1).to(tl.int64)
        if tl.max(hot_slot, 0) >= 0:
            is_hot = hot_slot >= 0
            p_hot = hot_pool + ((hot_slot * 2 * KV_HEADS + i_head) * N + row) * D
            if VALUES != "apart":
                store_hot(p_k, o_k, p_hot, is_hot, D, DP, CHECK, CLAMP)
                if VALUES != "":
                    store_hot(p_v, o_v, p_hot + KV_HEADS * N * D, is_hot, D, DP, CHECK, CLAMP)
            elif tl.program_id(2) == 0:
                store_hot(p_k, o_k, p_hot, is_hot, D, DP, CHECK, CLAMP)
            else:
                store_hot(p_v, o_v, p_hot + KV_HEADS * N * D, is_hot, D, DP, CHECK, CLAMP)
    if counts:
        bad = (slot >= num_slots) & (o_t <= last)
        count(status + BAD_SLOT, bad)
        if HAS_MU:
            count(status + BAD_POSITION, (slot >= 0) & (o_t <= last) & (bad == 0) & (known == 0))


@functools.cache
def part_hadamard(head_dim: int, planes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """+-1 [U, U] that transforms a part of ``planes`` / 2 planes: as word_hadamard, for planes side by side."""
    h = word_hadamard(head_dim, planes, device).to(dtype)
    return torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)]) if planes == 4 else h


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

    ``value`` None writes keys alone. Tokens with a bad slot or position, and rows of them with a bad value, are skipped
    and counted in ``status`` int32 [4] (ops.new_status). ``config`` None picks the tuned one (kvq/tuned.py).
    """
    ks, vs, head_dim = layout.scheme.key, layout.scheme.value, layout.head_dim
    block = hadamard_block(head_dim)
    tokens = slot_mapping.shape[0]
    if tokens == 0:
        return
    if config is None:
        config = pick_write(layout, tokens, pairs=0 if transform is None else transform.pairs, device=key.device)
    has_mu = transform is not None and transform.pairs > 0
    tables, halves = (status,) * 5, False
    if transform is not None:
        tables = (transform.dim_scale, transform.dim_pair, transform.dim_mu, transform.near, transform.far)
        source = transform.source
        halves = block == head_dim == source.rotary_dim and not source.interleaved
    values = "" if value is None else config.values
    dependent = dependent_launch(key.device)
    write_kernel[(layout.kv_heads, triton.cdiv(tokens, config.tokens), 2 if values == "apart" else 1)](
        key, key if value is None else value, slot_mapping, slot_mapping if positions is None else positions, pages,
        key if hot is None else hot.pool, status if hot is None else hot.index,
        part_hadamard(head_dim, ks.planes, key.dtype, pages.device),
        part_hadamard(head_dim, vs.planes, key.dtype, pages.device),
        *tables, status,
        key.stride(0), key.stride(1), *(key if value is None else value).stride()[:2], pages.stride(0),
        layout.head_bytes,
        tokens, pages.shape[0] * layout.page_size, 0 if transform is None else transform.max_position,
        V_CODES=layout.v_codes, K_SCALES=layout.k_scales, V_SCALES=layout.v_scales,
        KV_HEADS=layout.kv_heads, D=head_dim, DP=next_pow2(head_dim), N=layout.page_size, T=config.tokens,
        K_BITS=ks.bits, V_BITS=vs.bits, K_SYM=ks.symmetric, V_SYM=vs.symmetric, K_ROTATE=ks.rotate,
        V_ROTATE=vs.rotate, K_CLIP=ks.clip, V_CLIP=vs.clip, K_GAIN=ks.gain(head_dim), V_GAIN=vs.gain(head_dim),
        WK=max(16, next_pow2(head_dim // ks.planes)), WV=max(16, next_pow2(head_dim // vs.planes)),
        BLOCK=block, NORM=block**-0.5, HAS_MU=has_mu, HALVES=has_mu and halves,
        HAS_SCALE=transform is not None and transform.has_scale,
        HAS_HOT=hot is not None, CHECK=check, CLAMP=clamp, VALUES=values,
        RAW=not clamp and key.dtype != torch.float32, JOIN=config.tokens >= 64, DEPENDENT=dependent,
        ASM=USE_ASM, num_warps=config.num_warps, **FUSED, **({"launch_pdl": True} if dependent else {}),
        **({} if config.maxnreg is None else {"maxnreg": config.maxnreg}),
    )  # fmt: skip
