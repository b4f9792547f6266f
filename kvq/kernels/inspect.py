"""Compile a kernel for a GPU that is not here, and read registers, spills, shared memory and SASS from the result."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BIN = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
INSTRUCTION = re.compile(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel. ``loop``: instructions of the main loop's body, by mnemonic."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    loop: Counter[str] = field(repr=False)

    @property
    def loop_instructions(self) -> int:
        return sum(self.loop.values())


def compile_kernel(
    kernel: Any,
    args: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    *,
    aligned: tuple[str, ...] = (),
    num_warps: int = 4,
    num_stages: int = 3,
    maxnreg: int | None = None,
) -> Compiled:
    """Compile a ``triton.jit`` kernel for compute capability ``capability`` (89 for 8.9).

    args: Triton types of the run-time arguments, e.g. ``{"x": "*fp16", "n": "i32"}``; aligned: those of them that are
    multiples of 16, as the JIT would find. Raises RuntimeError under TRITON_INTERPRET, where kernels do not compile.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: unset it to compile kernels")
    signature = {name: "constexpr" if name in constants else args[name] for name in kernel.arg_names}
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    options = dict(num_warps=num_warps, num_stages=num_stages, maxnreg=maxnreg)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(binary.asm["cubin"])
        f.flush()
        usage = _tool("cuobjdump", "-res-usage", f.name)
        sass = _tool("nvdisasm", "-c", f.name)
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
    spills = sum(4 * len(re.findall(rf"\b{op}\b", sass)) for op in ("LDL", "STL"))
    return Compiled(registers, stack, spills, binary.metadata.shared, _main_loop(sass))


def _tool(name: str, *args: str) -> str:
    return subprocess.run([os.path.join(BIN, name), *args], capture_output=True, text=True, check=True).stdout


def _main_loop(sass: str) -> Counter[str]:
    lines = sass.splitlines()
    labels = {m.group(1): i for i, line in enumerate(lines) if (m := re.match(r"\s*(\.L_x_\d+):", line))}
    spans = [
        (labels[m.group(1)], i)
        for i, line in enumerate(lines)
        if (m := re.search(r"BRA.*?`\((\.L_x_\d+)\)", line)) and labels.get(m.group(1), i) < i
    ]
    bodies = [
        Counter(m.group(1) for line in lines[start:stop] if (m := INSTRUCTION.search(line))) for start, stop in spans
    ]
    # the main loop is the one that copies to shared memory asynchronously; else the longest
    return max(
        bodies, key=lambda body: (any(op.startswith("LDGSTS") for op in body), sum(body.values())), default=Counter()
    )
