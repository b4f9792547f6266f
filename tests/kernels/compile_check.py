"""``python -m tests.kernels.compile_check 90``: compile the kernels for a GPU that is not here and print, as JSON, what
each one takes.

The host functions run on CPU tensors with the launch replaced by a recorder, so that signature, specialisation and
constants are those of a real launch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from kvq import INT4, INT8, DecodeConfig
from kvq.kernels.inspect import compile_kernel
from kvq.tuned import fit
from tests.kernels import cases

TYPES = {
    torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}  # fmt: skip
KIB = 1024
SHARED = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}  # bytes a block may take
OPTIONS = ("num_warps", "num_stages", "maxnreg")


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


def compile_launch(launch: Launch, capability: int):
    """Compile as the JIT would specialise the launch: constants, the integer 1, and multiples of 16."""
    types, constants, aligned = {}, {}, []
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


BASE = cases.Case("d128", INT4, head_dim=128, page_size=64, kv_heads=8, lens=(500, 300))


def kernels(capability: int) -> list[tuple[str, cases.Case, list[Launch]]]:
    """The launches to compile: everything for INT4 at head size 128, decode for the rest."""
    out = []

    def add(case: cases.Case, *parts: str) -> None:
        batch = cases.make_batch(case, "cpu")
        config = fit(DecodeConfig(), batch.layout, case.pairs > 0, SHARED[capability])
        calls = {
            "write": lambda: cases.write_kernel(replace(batch, tokens=batch.tokens[:1])),
            "gather": lambda: cases.gather_kernel(batch, 0, 0, torch.float16),
            "decode": lambda: cases.decode_kernel(batch, torch.float16, config),
        }
        for part in parts:
            out.append((part, case, launches_of(calls[part])))

    add(BASE, "write", "gather", "decode")
    add(replace(BASE, name="d128-int8", scheme=INT8), "decode")
    if capability in (89, 90):
        add(replace(BASE, name="d64", head_dim=64), "decode")
        add(replace(BASE, name="d128-hot-bf16", hot=True, dtype=torch.bfloat16), "decode")
        add(replace(BASE, name="d128-offset", mu=3.0, pairs=16, pair_scale=True), "decode")
    if capability == 89:
        add(replace(BASE, name="d256-int8-page128", scheme=INT8, head_dim=256, page_size=128), "decode")
    return out


def main(capability: int) -> list[dict[str, Any]]:
    rows, seen = [], set()
    for part, case, launches in kernels(capability):
        for launch in launches:
            name = launch.kernel.__name__
            if (name, case.name) in seen or (name != "decode_kernel" and "compact" not in name and case is not BASE):
                continue
            seen.add((name, case.name))
            made = compile_launch(launch, capability)
            elements = 2 * case.page_size * case.head_dim  # of K and V in a page and head: what one iteration reads
            warps = launch.options.get("num_warps", 4)
            rows.append(
                {
                    "part": part,
                    "kernel": name,
                    "case": case.name,
                    "registers": made.registers,
                    "stack_bytes": made.stack_bytes,
                    "spill_bytes": made.spill_bytes,
                    "shared_bytes": made.shared_bytes,
                    "async_16_bytes": sum(n for op, n in made.loop.items() if op.startswith("LDGSTS") and ".128" in op),
                    "async_narrow": sum(
                        n for op, n in made.loop.items() if op.startswith("LDGSTS") and ".128" not in op
                    ),
                    "instructions_per_element": made.loop_instructions * 32 * warps / elements,
                }
            )
    return rows


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1])), indent=1))
