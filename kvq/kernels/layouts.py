"""Layouts that inline assembly takes for granted: it uses values of other lanes, which Triton is free to put elsewhere.

``movmatrix`` (weigh.as_operand) wants results of an MMA, and the MMAs of weigh.weigh want them too, with all tokens of
a row in one warp; where rows are columns, they want what as_operand makes. In another layout the same code computes
something else, so every compiled kernel is looked at once.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import triton

OPERAND = r"register = \[\[1, 0\], \[8, 0\][^a-z]*lane = \[\[2, 0\], \[4, 0\], \[0, 1\], \[0, 2\], \[0, 4\]\]"
_seen: set[str] = set()

log = logging.getLogger(__name__)


def placement(ttgir: str) -> tuple[int, int]:
    """How many ``movmatrix`` a kernel has, and how many of them and of the MMAs of ``weigh`` are misplaced."""
    results = set(re.findall(r"^(#\w+) = #ttg\.nvidia_mma<[^\n]*warpsPerCTA = \[\d+, 1\]", ttgir, re.MULTILINE))
    operands = set(re.findall(rf"^(#\w+) = #ttg\.linear<{{{OPERAND}", ttgir, re.MULTILINE))
    code = re.findall(r'inline_asm "([^"]*)"[^\n]*? : tensor<[^,]*, (#\w+)>', ttgir)
    transposes = [layout for text, layout in code if "movmatrix" in text]
    by_row = [layout for text, layout in code if "mma.sync" in text and "%laneid" in text]
    by_column = [layout for text, layout in code if "mma.sync" in text and "%laneid" not in text]
    wrong = [x not in results for x in transposes + by_row] + [x not in operands for x in by_column]
    return len(transposes), sum(wrong)


def check(kernel: Any) -> None:
    """Raise RuntimeError if a compiled kernel, as a launch returns it, has something misplaced; looked at once.

    With TRITON_STORE_BINARY_ONLY there is nothing to look at, which is logged.
    """
    if kernel is None or kernel.hash in _seen:  # None: interpreted
        return
    ttgir = kernel.asm.get("ttgir")
    if ttgir is None:
        log.warning("the layouts of %s cannot be checked: TRITON_STORE_BINARY_ONLY is set", kernel.name)
    elif placement(ttgir)[1]:
        raise RuntimeError(
            f"Triton {triton.__version__} lays out {kernel.name} in a way that kvq does not know: its results would be "
            "wrong. Install a version that kvq is tested with (3.6 or 3.9), and please report this"
        )
    _seen.add(kernel.hash)
