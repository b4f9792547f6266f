"""Quantize on write: K and V of new tokens into the slots of their pages, and unchanged into hot pages.

One program quantizes T tokens of one head, K then V. Key offset, pair scale and Hadamard transform are fused; the
values are held as planes, so that packing is a shift and an or. Specification: reference.write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvq.kernels.device import USE_ASM, DeviceTransform, next_pow2
from kvq.kernels.planes import butterfly2, butterfly4, plane_dim
from kvq.page import PageLayout
from kvq.reference import HotPool, hadamard_block, word_hadamard

WRITE_SMALL, WRITE_LARGE = (16, 2), (16, 1)  # tokens a program, warps: of a decode batch, of a prefill chunk
FP16_MAX = tl.constexpr(65504.0)
BAD_SLOT = tl.constexpr(0)  # entries of the status word, see ops.new_status
NOT_FINITE = tl.constexpr(1)
CLAMPED = tl.constexpr(2)
BAD_POSITION = tl.constexpr(3)


@triton.jit
def load_plane(
    p_x, p_mu, p_scale, dim_pair, far, near, pos, o_w, m_t,
    PLANE: tl.constexpr, PLANES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    KV_HEADS: tl.constexpr, HAS_MU: tl.constexpr, HAS_SCALE: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Plane PLANE of T tokens, float32 [T, W], less the offset and divided by the pair scale."""
    dim = plane_dim(o_w, PLANE, PLANES, BLOCK)
    m_w = o_w < D // PLANES
    x = tl.load(p_x[:, None] + dim[None, :], mask=m_t[:, None] & m_w[None, :], other=0.0).to(tl.float32)
    if CLAMP:
        x = tame(x)
    if HAS_MU:
        pair = tl.load(dim_pair + dim, mask=m_w, other=0)
        mask = m_t[:, None] & m_w[None, :]
        p_far = far + (pos // N)[:, None] * D + pair[None, :]
        p_near = near + (pos % N)[:, None] * D + pair[None, :]
        f_cos = tl.load(p_far, mask=mask, other=0.0)
        f_sin = tl.load(p_far + D // 2, mask=mask, other=0.0)
        n_cos = tl.load(p_near, mask=mask, other=0.0)
        n_sin = tl.load(p_near + D // 2, mask=mask, other=0.0)
        mu = tl.load(p_mu + dim, mask=m_w, other=0.0)
        partner = tl.load(p_mu + KV_HEADS * D + dim, mask=m_w, other=0.0)
        x -= mu[None, :] * (f_cos * n_cos - f_sin * n_sin) + partner[None, :] * (f_sin * n_cos + f_cos * n_sin)
    if HAS_SCALE:
        x /= tl.load(p_scale + dim, mask=m_w, other=1.0)[None, :]
    return x


@triton.jit
def fp16_down(x):
    """Largest fp16 not above float32 ``x`` (within fp16 range)."""
    h = x.to(tl.float16)
    bits = h.to(tl.int16, bitcast=True).to(tl.int32)
    below = tl.where(bits == 0, 0x8001, tl.where(bits < 0, bits + 1, bits - 1))  # one step towards minus infinity
    down = below.to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where(h.to(tl.float32) > x, down, h)


@triton.jit
def encode_planes(
    p_x, p_hadamard, p_mu, p_scale, dim_pair, far, near, pos, m_t,
    PLANES: tl.constexpr, ROTATE: tl.constexpr, D: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
    BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, HAS_MU: tl.constexpr, HAS_SCALE: tl.constexpr,
    CHECK: tl.constexpr, CLAMP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Values to quantize, up to the factor NORM of the rotation, float32 planes [T, W] (2 and 3 repeat 0 and 1 when
    PLANES is 2), and whether each row was finite; ``p_x`` pointers [T]."""
    o_w = tl.arange(0, W)
    x0 = load_plane(
        p_x, p_mu, p_scale, dim_pair, far, near, pos, o_w, m_t, 0,
        PLANES, D, BLOCK, N, KV_HEADS, HAS_MU, HAS_SCALE, CLAMP,
    )  # fmt: skip
    x1 = load_plane(
        p_x, p_mu, p_scale, dim_pair, far, near, pos, o_w, m_t, 1,
        PLANES, D, BLOCK, N, KV_HEADS, HAS_MU, HAS_SCALE, CLAMP,
    )  # fmt: skip
    if PLANES == 4:
        x2 = load_plane(
            p_x, p_mu, p_scale, dim_pair, far, near, pos, o_w, m_t, 2,
            PLANES, D, BLOCK, N, KV_HEADS, HAS_MU, HAS_SCALE, CLAMP,
        )  # fmt: skip
        x3 = load_plane(
            p_x, p_mu, p_scale, dim_pair, far, near, pos, o_w, m_t, 3,
            PLANES, D, BLOCK, N, KV_HEADS, HAS_MU, HAS_SCALE, CLAMP,
        )  # fmt: skip
    else:
        x2, x3 = x0, x1
    probe = x0 * 0.0
    if CHECK and CLAMP:  # what was clamped is counted too
        for a in tl.static_range(PLANES):
            mask = m_t[:, None] & (o_w < D // PLANES)[None, :]
            raw = tl.load(p_x[:, None] + plane_dim(o_w, a, PLANES, BLOCK)[None, :], mask=mask, other=0.0)
            probe += raw.to(tl.float32) * 0.0
    elif CHECK and not (ROTATE and EXACT):
        probe += x1 * 0.0 + (x2 * 0.0 + x3 * 0.0)
    if ROTATE:
        h = tl.load(p_hadamard + o_w[:, None] * W + o_w[None, :])
        x0 = rotate_rows(x0, h, p_x, EXACT)
        x1 = rotate_rows(x1, h, p_x, EXACT)
        if PLANES == 4:
            x2 = rotate_rows(x2, h, p_x, EXACT)
            x3 = rotate_rows(x3, h, p_x, EXACT)
            x0, x1, x2, x3 = butterfly4(x0, x1, x2, x3)
        else:
            x0, x1 = butterfly2(x0, x1)
            x2, x3 = x0, x1
        if EXACT:
            probe = x0 * 0.0  # a NaN or inf anywhere is in every value of its Hadamard block
    good = m_t
    if CHECK:
        good = tl.sum(probe, 1) == 0.0  # NaN when a value is not finite
    return x0, x1, x2, x3, good


@triton.jit
def store_quantized(
    x0, x1, x2, x3, p_x, p_hot, p_codes, p_scales, row, m_t, m_hot, status,
    BITS: tl.constexpr, SYM: tl.constexpr, CLIP: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, HAS_HOT: tl.constexpr,
    CLAMP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Quantize planes of T tokens of one head into their rows; p_* are pointers [T], row int32 [T]."""
    PLANES: tl.constexpr = 16 // BITS
    o_w = tl.arange(0, W)
    m_w = o_w < D // PLANES
    if HAS_HOT:
        for a in tl.static_range(PLANES):
            dim = plane_dim(o_w, a, PLANES, BLOCK)
            mask = m_hot[:, None] & m_w[None, :]
            b_x = tl.load(p_x[:, None] + dim[None, :], mask=mask, other=0.0)
            if CLAMP:
                b_x = tame(b_x.to(tl.float32))
            tl.store(p_hot[:, None] + dim[None, :], b_x.to(p_hot.dtype.element_ty), mask=mask)
    hi = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
    lo = tl.minimum(tl.minimum(x0, x1), tl.minimum(x2, x3))
    hi = tl.max(tl.where(m_w[None, :], hi, -float("inf")), 1) * NORM
    lo = tl.min(tl.where(m_w[None, :], lo, float("inf")), 1) * NORM
    over = m_t & (tl.maximum(hi, -lo) > FP16_MAX)
    if tl.max(over.to(tl.int32), 0) > 0:
        tl.atomic_add(status + CLAMPED, tl.sum(over.to(tl.int32), 0), sem="relaxed")
    hi, lo = clamp_fp16(hi), clamp_fp16(lo)
    TOP: tl.constexpr = (1 << BITS) - 1
    if SYM:
        BIAS: tl.constexpr = 1 << (BITS - 1)
        scale = (tl.where(hi > -lo, hi, lo) * (-CLIP / BIAS)).to(tl.float16)
        base = tl.zeros_like(lo)
        tl.store(p_scales.to(tl.pointer_type(tl.float16)) + row, scale, mask=m_t)
    else:
        BIAS: tl.constexpr = 0
        if CLIP < 1.0:
            mean = tl.sum(tl.where(m_w[None, :], x0 + x1, 0.0), 1)
            if PLANES == 4:
                mean += tl.sum(tl.where(m_w[None, :], x2 + x3, 0.0), 1)
            mean = tl.minimum(tl.maximum(mean * (NORM / D), lo), hi)
            lo += (1.0 - CLIP) * (mean - lo)
            hi -= (1.0 - CLIP) * (hi - mean)
        zero = fp16_down(lo)
        base = zero.to(tl.float32)
        scale = ((hi - base) * (1.0 / TOP)).to(tl.float16)
        low = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        both = low | (zero.to(tl.int16, bitcast=True).to(tl.int32) << 16)
        tl.store(p_scales.to(tl.pointer_type(tl.int32)) + row, both, mask=m_t)
    size = scale.to(tl.float32)
    inv = tl.where(size == 0.0, 0.0, 1.0 / size)
    step = (inv * (NORM / TOP))[:, None]  # codes over TOP, so that one saturating multiply-add clamps them too
    shift = ((BIAS - base * inv) * (1.0 / TOP))[:, None]
    c0 = encode_plane(x0, step, shift, TOP, ASM)
    c1 = encode_plane(x1, step, shift, TOP, ASM)
    if PLANES == 4:
        c2 = encode_plane(x2, step, shift, TOP, ASM)
        c3 = encode_plane(x3, step, shift, TOP, ASM)
        word = c0 | (c1 << 4) | (c2 << 8) | (c3 << 12)
    else:
        word = c0 | (c1 << 8)
    p_word = p_codes.to(tl.pointer_type(tl.int16))[:, None] + row[:, None] * (D // PLANES) + o_w[None, :]
    tl.store(p_word, word.to(tl.int16), mask=m_t[:, None] & m_w[None, :])


@triton.jit
def rotate_rows(x, h, p_x, EXACT: tl.constexpr):
    """x h for float32 [T, W] and fp16 +-1 [W, W]. EXACT: x holds values of the 16-bit input, one product is exact."""
    if EXACT:
        y = tl.dot(x.to(p_x.dtype.element_ty), h.to(p_x.dtype.element_ty))
    else:
        y = tl.dot(x, h.to(tl.float32), input_precision="tf32x3")
    return y


@triton.jit
def tame(x):
    """NaN to 0 and infinities to fp16's largest."""
    x = tl.where(x == x, x, 0.0)
    return tl.where(tl.abs(x) == float("inf"), tl.where(x > 0, FP16_MAX, -FP16_MAX), x)


@triton.jit
def clamp_fp16(x):
    return tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX)


@triton.jit
def encode_plane(x, step, shift, TOP: tl.constexpr, ASM: tl.constexpr):
    """Codes int32: rounded to the nearest integer by adding 1.5 * 2^23, whose low mantissa bits then are the code."""
    part = saturating_fma(x, step, shift, ASM)
    return (part * TOP + 12582912.0).to(tl.int32, bitcast=True) & TOP


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
    KV_HEADS: tl.constexpr, D: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_SYM: tl.constexpr, V_SYM: tl.constexpr,
    K_ROTATE: tl.constexpr, V_ROTATE: tl.constexpr, K_CLIP: tl.constexpr, V_CLIP: tl.constexpr,
    WK: tl.constexpr, WV: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    HAS_MU: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_HOT: tl.constexpr, CHECK: tl.constexpr, CLAMP: tl.constexpr,
    HAS_VALUE: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, blocks of T tokens)."""
    i_head = tl.program_id(0)
    o_t = tl.program_id(1) * T + tl.arange(0, T)
    inside = o_t < tokens
    slot = tl.load(slot_mapping + o_t, mask=inside, other=-1).to(tl.int64)
    o_t = o_t.to(tl.int64)
    p_k = key + o_t * stride_k_tok + i_head * stride_k_head
    p_v = value + o_t * stride_v_tok + i_head * stride_v_head
    page = slot // N
    row = (slot % N).to(tl.int32)
    m_t = inside & (slot >= 0)
    good = page < num_pages
    bad = tl.sum((m_t & ~good).to(tl.int32), 0)
    if bad > 0 and i_head == 0:
        tl.atomic_add(status + BAD_SLOT, bad, sem="relaxed")
    m_t = m_t & good
    pos = tl.zeros([T], tl.int64)
    if HAS_MU:
        pos = tl.load(positions + o_t, mask=m_t, other=0).to(tl.int64)
        good = (pos >= 0) & (pos <= max_position)
        bad = tl.sum((m_t & ~good).to(tl.int32), 0)
        if bad > 0 and i_head == 0:
            tl.atomic_add(status + BAD_POSITION, bad, sem="relaxed")
        m_t = m_t & good
    EXACT_KEY: tl.constexpr = EXACT and not HAS_MU and not HAS_SCALE
    k0, k1, k2, k3, good = encode_planes(
        p_k, k_hadamard, dim_mu + i_head * D, dim_scale + i_head * D, dim_pair, far, near, pos, m_t,
        16 // K_BITS, K_ROTATE, D, N, WK, BLOCK, KV_HEADS, HAS_MU, HAS_SCALE, CHECK, CLAMP, EXACT_KEY,
    )  # fmt: skip
    if HAS_VALUE:
        v0, v1, v2, v3, good_value = encode_planes(
            p_v, v_hadamard, dim_mu, dim_scale, dim_pair, far, near, pos, m_t,
            16 // V_BITS, V_ROTATE, D, N, WV, BLOCK, KV_HEADS, False, False, CHECK, CLAMP, EXACT,
        )  # fmt: skip
        good = good & good_value
    if CHECK:
        bad = tl.sum((m_t & ~good).to(tl.int32), 0)
        if bad > 0:
            tl.atomic_add(status + NOT_FINITE, bad, sem="relaxed")
        if not CLAMP:
            m_t = m_t & good
    m_hot = m_t
    p_hot = hot_pool + slot * 0
    if HAS_HOT:
        hot_slot = tl.load(slot_of_page + page, mask=m_t, other=-1).to(tl.int64)
        m_hot = m_t & (hot_slot >= 0)
        p_hot = hot_pool + ((hot_slot * 2 * KV_HEADS + i_head) * N + row) * D
    p_page = pages + page * stride_page + i_head * head_bytes
    store_quantized(
        k0, k1, k2, k3, p_k, p_hot, p_page, p_page + k_scales, row, m_t, m_hot, status,
        K_BITS, K_SYM, K_CLIP, D, WK, BLOCK, NORM if K_ROTATE else 1.0, HAS_HOT, CLAMP, ASM,
    )  # fmt: skip
    if HAS_VALUE:
        store_quantized(
            v0, v1, v2, v3, p_v, p_hot + KV_HEADS * N * D, p_page + v_codes, p_page + v_scales, row, m_t, m_hot, status,
            V_BITS, V_SYM, V_CLIP, D, WV, BLOCK, NORM if V_ROTATE else 1.0, HAS_HOT, CLAMP, ASM,
        )  # fmt: skip


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
    per_program, warps = WRITE_SMALL if tokens <= 1024 else WRITE_LARGE
    has_mu = transform is not None and transform.pairs > 0
    tables = (status,) * 5
    if transform is not None:
        tables = (transform.dim_scale, transform.dim_pair, transform.dim_mu, transform.near, transform.far)
    write_kernel[(layout.kv_heads, triton.cdiv(tokens, per_program))](
        key, key if value is None else value, slot_mapping, slot_mapping if positions is None else positions, pages,
        key if hot is None else hot.pool, status if hot is None else hot.index,
        word_hadamard(head_dim, ks.planes, pages.device), word_hadamard(head_dim, vs.planes, pages.device),
        *tables, status,
        key.stride(0), key.stride(1), *(key if value is None else value).stride()[:2], pages.stride(0),
        layout.head_bytes, layout.v_codes, layout.k_scales, layout.v_scales,
        tokens, pages.shape[0], 0 if transform is None else transform.max_position,
        KV_HEADS=layout.kv_heads, D=head_dim, N=layout.page_size, T=per_program,
        K_BITS=ks.bits, V_BITS=vs.bits, K_SYM=ks.symmetric, V_SYM=vs.symmetric, K_ROTATE=ks.rotate,
        V_ROTATE=vs.rotate, K_CLIP=ks.clip, V_CLIP=vs.clip,
        WK=max(16, next_pow2(head_dim // ks.planes)), WV=max(16, next_pow2(head_dim // vs.planes)),
        BLOCK=block, NORM=block**-0.5, HAS_MU=has_mu, HAS_SCALE=transform is not None and transform.has_scale,
        HAS_HOT=hot is not None, CHECK=check, CLAMP=clamp, HAS_VALUE=value is not None,
        EXACT=USE_ASM and not clamp and key.dtype != torch.float32, ASM=USE_ASM, num_warps=warps,
    )  # fmt: skip
