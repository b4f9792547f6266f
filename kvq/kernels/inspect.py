"""Compile a kernel for a GPU that is not here, and read registers, spills, shared memory and SASS from the result.

Host functions run on CPU tensors with the launch replaced by a recorder (``launches_of``), so that signature,
specialisation and constants are those of a real launch.
"""

from __future__ import annotations

import heapq
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvq.kernels.layouts import placement

BIN = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
INSTRUCTION = re.compile(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
LABEL = re.compile(r"\s*(\.L_x_\d+):")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")
TYPES = {
    torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel. Instructions by mnemonic: ``loop``, of the main loop's body; ``path``, on the
    shortest way through the kernel, on which nothing is wrong and nothing is optional. ``transposes``: ``movmatrix`` in
    the source; ``misplaced``: see kernels/layouts.py."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    transposes: int
    misplaced: int
    loop: Counter[str] = field(repr=False)
    path: Counter[str] = field(repr=False)

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
    enable_fp_fusion: bool = True,
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
    options = dict(num_warps=num_warps, num_stages=num_stages, maxnreg=maxnreg, enable_fp_fusion=enable_fp_fusion)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(binary.asm["cubin"])
        f.flush()
        usage = _tool("cuobjdump", "-res-usage", f.name)
        sass = _tool("nvdisasm", "-c", f.name)
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
    spills = sum(4 * len(re.findall(rf"\b{op}\b", sass)) for op in ("LDL", "STL"))
    return Compiled(
        registers, stack, spills, binary.metadata.shared, *placement(binary.asm["ttgir"]), _main_loop(sass),
        _shortest_path(sass),
    )  # fmt: skip


class Launch(NamedTuple):
    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]


def launches_of(call: Callable[[], Any]) -> list[Launch]:
    """Kernels that ``call`` launches, in order, with their arguments by name; nothing runs."""
    recorded: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        named = {k: v for k, v in kwargs.items() if k in self.arg_names}
        bound = dict(zip(self.arg_names, args)) | named
        options = {k: v for k, v in kwargs.items() if k in OPTIONS}
        recorded.append(Launch(self, {name: bound[name] for name in self.arg_names}, options))

    with mock.patch.object(JITFunction, "run", record):
        call()
    return recorded


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """Compile as the JIT would specialise the launch: constants, the integer 1, and multiples of 16."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: list[str] = []
    for parameter in launch.kernel.params:
        name, value = parameter.name, launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (value == 1 if isinstance(value, int) else False):
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            types[name] = TYPES[value.dtype]
            aligned.append(name)  # the allocator of a GPU aligns to more than 16 bytes
        elif isinstance(value, int):
            types[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                aligned.append(name)
        else:
            types[name] = "fp32"
    return compile_kernel(launch.kernel, types, constants, capability, aligned=tuple(aligned), **launch.options)


def _tool(name: str, *args: str) -> str:
    return subprocess.run([os.path.join(BIN, name), *args], capture_output=True, text=True, check=True).stdout


def _main_loop(sass: str) -> Counter[str]:
    lines = sass.splitlines()
    labels = {m.group(1): i for i, line in enumerate(lines) if (m := LABEL.match(line))}
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


def _shortest_path(sass: str) -> Counter[str]:
    """Instructions from the first to an EXIT or RET by as few as possible, calls not followed (Dijkstra)."""
    code: list[tuple[str, str]] = []  # mnemonic and line
    labels = {}
    for line in sass.splitlines():
        if m := LABEL.match(line):
            labels[m.group(1)] = len(code)
        elif m := INSTRUCTION.search(line):
            code.append((m.group(1), line))
    queue, reached = [(0, 0, -1)], dict[int, int]()  # instructions before, place, place before
    while queue:
        count, at, before = heapq.heappop(queue)
        if at in reached or at >= len(code):
            continue
        reached[at] = before
        op, line = code[at]
        if op.split(".")[0] in ("EXIT", "RET"):
            path = [at]
            while path[-1] != 0:
                path.append(reached[path[-1]])
            return Counter(code[i][0] for i in path if code[i][0] != "NOP")
        count += op != "NOP"
        branch = TARGET.search(line) if op.startswith("BRA") else None
        if branch:
            heapq.heappush(queue, (count, labels[branch.group(1)], at))
        if not branch or re.search(r"@!?U?P\w+\s+BRA|BRA\S*\s+!?U?P\w+,", line):
            heapq.heappush(queue, (count, at + 1, at))
    return Counter()
