"""The probabilities of a tile times the scales of its values, and their sums, for the second product of attention.

For p [N, R] of N tokens, p scale goes on to be an operand of the next MMA. Its sums, sum(p) and sum(p zero), are wanted
in the lanes that hold the next MMA's result, and MMAs put them there: with p as one operand, the other has zeros and
ones as its rows (or columns), and every lane gets what its rows need. Neither is a value moved to another lane nor is
anything converted: p, scales and zeros are fp16, two in a register.

TOKENS as in kernels/decode.py: 0 if rows are columns. This assembly takes values of other lanes for granted, which
kernels/layouts.py checks.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _pairs(axis: int, tokens: int) -> int:
    """Registers, of two fp16 each, that a lane has of ``tokens``; half as many as of float32."""
    return tokens * (1 + axis) // 8


def _weigh(axis: int, tokens: int, symmetric: bool) -> str:
    """PTX of ``weigh`` over ``tokens`` along ``axis``; $0 to $3 are what a lane holds of an MMA's result.

    A lane has p and y where an operand of that MMA wants them. The other operand is y in its even columns and ones in
    the odd ones, or in its upper and lower rows; if ``symmetric``, first ones and zeros for what was weighed, then
    zeros and ones for p.
    """
    step, pairs = _pairs(axis, 16), _pairs(axis, tokens)
    text = "{ .reg .f32 c<4>; .reg .b32 one, zero; mov.b32 one, 0x3c003c00; mov.b32 zero, 0; "
    text += "".join(f"mov.f32 c{i}, 0f00000000; " for i in range(4))
    c = "{c0, c1, c2, c3}"
    if axis == 1:
        text += (
            ".reg .b32 lane, y<2>, in_even, in_odd; .reg .pred even; "
            "mov.u32 lane, %laneid; and.b32 lane, lane, 4; setp.eq.u32 even, lane, 0; "
            "selp.b32 in_even, one, zero, even; selp.b32 in_odd, zero, one, even; "
        )
    for first in range(0, pairs, step):
        out, p, scale, y = (i * pairs + first for i in range(2, 6))
        scales = [scale, scale + 1] if axis == 0 else [scale, scale, scale + 2, scale + 2]
        text += "".join(f"mul.rn.f16x2 ${out + i}, ${p + i}, ${x}; " for i, x in enumerate(scales))
        products: list[tuple[int, list[str]]]  # own registers from, the other operand
        if symmetric:
            for_weighed, for_p = (["one", "zero"], ["zero", "one"]) if axis == 0 else (["in_even"], ["in_odd"])
            products = [(out, for_weighed * 2), (p, for_p * 2)]
        elif axis == 0:
            products = [(p, [f"${y}", "one", f"${y + 1}", "one"])]
        else:
            text += "".join(f"selp.b32 y{i}, ${y + 2 * i}, one, even; " for i in range(2))
            products = [(p, ["y0", "y1"])]
        for at, other in products:
            own = [f"${at + i}" for i in range(step)]
            a, b = (other, own) if axis == 0 else (own, other)
            text += (
                f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {c}, {{{', '.join(a)}}}, {{{', '.join(b)}}}, {c}; "
            )
    return text + "mov.f32 $0, c0; mov.f32 $1, c1; mov.f32 $2, c2; mov.f32 $3, c3; }"


def _weigh_registers(axis: int, tokens: int) -> str:
    pairs = _pairs(axis, tokens)
    return ",".join(["=&f"] * (2 * pairs) + ["=&r"] * pairs + ["r"] * (3 * pairs))


WEIGH_TOKENS = (16, 32, 64)
WEIGH = tl.constexpr({(a, n, s): _weigh(a, n, s) for a in (0, 1) for n in WEIGH_TOKENS for s in (False, True)})
WEIGH_REGISTERS = tl.constexpr({(a, n): _weigh_registers(a, n) for a in (0, 1) for n in WEIGH_TOKENS})


@triton.jit
def along(x, AXIS: tl.constexpr):
    """A vector [X] along axis AXIS of a tile."""
    if AXIS == 0:
        y = x[:, None]
    else:
        y = x[None, :]
    return y


@triton.jit
def as_operand(p, TOKENS: tl.constexpr, ASM: tl.constexpr):
    """fp16 ``p`` of an MMA result, in the lanes where the next product wants it.

    Rows as columns, a lane holds pairs of rows and the operand pairs of tokens: each 8 x 8 block is transposed, by one
    instruction, and then named as what it is.
    """
    if TOKENS == 0 and ASM:
        BLOCKS: tl.constexpr = p.shape[0] // 8
        p = tl.inline_asm_elementwise(  # not pure: in another layout it would be another function
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [p], dtype=tl.float16, is_pure=False, pack=2
        )
        p = tl.reshape(tl.permute(tl.reshape(p, [BLOCKS, 8, 8]), (0, 2, 1)), [BLOCKS * 8, 8])
    return p


@triton.jit
def no_sums(R: tl.constexpr, TOKENS: tl.constexpr):
    """Zeros of the shape of the sums of ``weigh``."""
    if TOKENS == 0:
        y = tl.zeros([16, R], tl.float32)
    else:
        y = tl.zeros([R, 8], tl.float32)
    return y


@triton.jit
def weigh(p, scale, zero, SYM: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr):
    """For fp16 p [N, R], scale [N] and zero [N]: p scale as an operand, and sums over the tokens in an MMA's tile.

    Rows as columns, sums [16, R] are of p zero in the rows before 8 and of p in the others; else [R, 8], of p zero in
    even columns and of p in odd ones. If SYM they are of the rounded p scale instead of p zero. MMAs on the lanes' own
    registers give each lane those of its rows if LANES; else it is plain Triton, with p scale where p was.
    """
    if LANES:
        N: tl.constexpr = p.shape[TOKENS]
        R: tl.constexpr = p.shape[1 - TOKENS]
        G: tl.constexpr = N if N < 64 else 64  # tokens of one instance, whose sums are in the place of its first
        p = as_operand(p, TOKENS, True)
        x, weighed = tl.inline_asm_elementwise(  # not pure: in another layout it would be another function
            WEIGH[(TOKENS, G, SYM)], WEIGH_REGISTERS[(TOKENS, G)], [p, along(scale, TOKENS), along(zero, TOKENS)],
            dtype=(tl.float32, tl.float16), is_pure=False, pack=G // (4 - 2 * TOKENS),
        )  # fmt: skip
        if TOKENS == 0:
            x = tl.permute(tl.reshape(x, [N // 16, 2, 8, R]), (0, 1, 3, 2))
            first = tl.arange(0, N // 16) % (G // 16) == 0
            sums = tl.reshape(tl.sum(tl.where(first[:, None, None, None], x, 0.0), 0), [16, R])
        else:
            x = tl.reshape(x, [R, N // 8, 8])
            first = tl.arange(0, N // 8) % (G // 8) == 0
            sums = tl.sum(tl.where(first[None, :, None], x, 0.0), 1)
    else:
        weighed = p * along(scale, TOKENS)
        p = p.to(tl.float32)
        if SYM:
            zeros = tl.sum(weighed.to(tl.float32), TOKENS)
        else:
            zeros = tl.sum(p * along(zero.to(tl.float32), TOKENS), TOKENS)
        ones = tl.sum(p, TOKENS)
        if TOKENS == 0:
            sums = tl.where((tl.arange(0, 16) < 8)[:, None], zeros[None, :], ones[None, :])
        else:
            sums = tl.where((tl.arange(0, 8) % 2 == 0)[None, :], zeros[:, None], ones[:, None])
    return weighed, sums


@triton.jit
def sums_of_zeros(x, TOKENS: tl.constexpr):
    """Sums of ``weigh`` with those of the zeros in the place of those of p too: no lane needs another's values."""
    if TOKENS == 0:
        x = tl.reshape(x, [2, 8, x.shape[1]])
        y = tl.sum(tl.where((tl.arange(0, 2) == 0)[:, None, None], x, 0.0), 0)
        y = tl.reshape(tl.broadcast_to(y[None, :, :], x.shape), [16, x.shape[2]])
    else:
        x = tl.reshape(x, [x.shape[0], 4, 2])
        y = tl.sum(tl.where((tl.arange(0, 2) == 0)[None, None, :], x, 0.0), 2)
        y = tl.reshape(tl.broadcast_to(y[:, :, None], x.shape), [x.shape[0], 8])
    return y


@triton.jit
def sum_of_p(x, TOKENS: tl.constexpr):
    """The sum of p, [R], of sums of ``weigh``."""
    if TOKENS == 0:
        y = tl.sum(tl.where((tl.arange(0, 16) == 8)[:, None], x, 0.0), 0)
    else:
        y = tl.sum(tl.where((tl.arange(0, 8) == 1)[None, :], x, 0.0), 1)
    return y


@triton.jit
def add_tile(x, y, TOKENS: tl.constexpr):
    """x [W, R] plus ``y`` of the shape of ``no_sums`` in each of its MMA tiles: no lane needs another's values."""
    if TOKENS == 0:
        z = tl.reshape(x, [x.shape[0] // 16, 16, x.shape[1]]) + y[None, :, :]
    else:
        z = tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]) + y[:, None, :]
    return tl.reshape(z, x.shape)
