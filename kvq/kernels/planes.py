"""Bit planes in uint16 words: unpacking to fp16 pairs, and the Hadamard transform of values held as planes.

Word j of a row holds the dims of ``reference.plane_dims``: with P planes and Hadamard blocks of B dims,
``H_B = H_P (x) H_(B/P)``. So the transform is one small matrix product a plane (along words) and a butterfly
across planes, and no value ever moves between lanes to be unpacked.

Codes are unpacked as subnormal fp16 numbers, which fp16 arithmetic and tensor cores take as they are. ``ASM`` off is
the same in plain Triton, for the interpreter, which has no inline assembly.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def plane_dim(w, PLANE: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr):
    """Dim held by plane PLANE of words ``w``, for Hadamard blocks of BLOCK dims."""
    RUN: tl.constexpr = BLOCK // PLANES
    return (w // RUN) * BLOCK + PLANE * RUN + w % RUN


@triton.jit
def tiny_nibbles(w, ASM: tl.constexpr):
    """int16 words to four fp16 planes of subnormal numbers: n 2^-24, n 2^-20, n 2^-24, n 2^-20, exactly.

    Tensor cores multiply them like any others, so that no offset has to leave the sums. Five instructions for 8 values.
    """
    if ASM:
        n0, n1, n2, n3 = tl.inline_asm_elementwise(
            """{ .reg .b32 t;
            and.b32 $0, $4, 0x000f000f; and.b32 $1, $4, 0x00f000f0;
            shr.u32 t, $4, 8;
            and.b32 $2, t, 0x000f000f; and.b32 $3, t, 0x00f000f0; }""",
            "=&r,=&r,=&r,=&r,r", [w], dtype=(tl.float16,) * 4, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        n0 = (w & 0xF).to(tl.float16, bitcast=True)
        n1 = (w & 0xF0).to(tl.float16, bitcast=True)
        n2 = ((w >> 8) & 0xF).to(tl.float16, bitcast=True)
        n3 = ((w >> 8) & 0xF0).to(tl.float16, bitcast=True)
    return n0, n1, n2, n3


@triton.jit
def tiny_nibble_pairs(w, ASM: tl.constexpr):
    """int16 words to fp16 n0 2^-24, (n0 + 16 n1) 2^-24, n2 2^-24, (n2 + 16 n3) 2^-24: four instructions for 8 values.

    A sum over planes 1 or 3, less that over the plane before, is 16 times the sum over n1 or n3.
    """
    if ASM:
        n0, n1, n2, n3 = tl.inline_asm_elementwise(
            """and.b32 $0, $4, 0x000f000f; and.b32 $1, $4, 0x00ff00ff;
            prmt.b32 $3, $4, 0, 0x4341; and.b32 $2, $3, 0x000f000f;""",
            "=&r,=&r,=&r,=&r,r", [w], dtype=(tl.float16,) * 4, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        n0 = (w & 0xF).to(tl.float16, bitcast=True)
        n1 = (w & 0xFF).to(tl.float16, bitcast=True)
        n2 = ((w >> 8) & 0xF).to(tl.float16, bitcast=True)
        n3 = ((w >> 8) & 0xFF).to(tl.float16, bitcast=True)
    return n0, n1, n2, n3


@triton.jit
def tiny_bytes(w, ASM: tl.constexpr):
    """int16 words to two fp16 planes of subnormal numbers n 2^-24, exactly. Two byte permutations for 4 values."""
    if ASM:
        n0, n1 = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x4240; prmt.b32 $1, $2, 0, 0x4341;",
            "=&r,=&r,r", [w], dtype=(tl.float16,) * 2, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        n0 = (w & 0xFF).to(tl.float16, bitcast=True)
        n1 = ((w >> 8) & 0xFF).to(tl.float16, bitcast=True)
    return n0, n1


@triton.jit
def butterfly2(x0, x1):
    return x0 + x1, x0 - x1


@triton.jit
def butterfly4(x0, x1, x2, x3):
    a, b = x0 + x1, x0 - x1
    c, d = x2 + x3, x2 - x3
    return a + c, b + d, a - c, b - d
