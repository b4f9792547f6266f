"""``python -m tests.kernels.compile_check 90 [writes]``: compile the kernels for a GPU that is not here and print, as
JSON, what each one takes. ``writes``: a chunk of INT4 in every way that kvq.tune measures on Hopper."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch

from kvq import INT4, INT4_SYM, INT8, K8V4, DecodeConfig
from kvq.kernels.inspect import Launch, compile_launch, launches_of
from kvq.kernels.prefill import PrefillConfig
from kvq.page import tile_pages
from kvq.tuned import VALUES, WriteConfig, default_write, fit
from tests.kernels import cases, prefill_cases

KIB = 1024
SHARED = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}  # bytes a block may take


BASE = cases.Case("d128", INT4, head_dim=128, page_size=64, kv_heads=8, lens=(500, 300))


def run_prefill(case: cases.Case, batch: cases.Batch, major: int) -> None:
    config = PrefillConfig.default(case.head_dim, major, case.pairs)
    whole = prefill_cases.PrefillCase(case, (256, 64))
    prefill_cases.run_kernel(whole, batch, prefill_cases.make(whole, "cpu")[1], torch.float16, config)


def kernels(capability: int) -> list[tuple[str, cases.Case, list[Launch]]]:
    """The launches to compile: everything for INT4 at head size 128, decode for the rest."""
    out = []

    def add(case: cases.Case, *parts: str) -> None:
        batch = cases.make_batch(case, "cpu")
        config = fit(DecodeConfig(), batch.layout, case.pairs, SHARED[capability])
        few, chunk = (default_write(batch.layout, n, case.pairs, capability // 10) for n in (64, 8192))
        calls = {
            "write": lambda: cases.write_kernel(replace(batch, tokens=batch.tokens[:1]), few),
            "write a chunk": lambda: cases.write_kernel(replace(batch, tokens=batch.tokens[:1]), chunk),
            "gather": lambda: cases.gather_kernel(batch, 0, 0, torch.float16),
            "decode": lambda: cases.decode_kernel(batch, torch.float16, config),
            "prefill": lambda: run_prefill(case, batch, capability // 10),
        }
        for part in parts:
            out.append((part, case, launches_of(calls[part])))

    add(BASE, "write", "write a chunk", "gather", "decode")
    add(replace(BASE, name="d128-int8", scheme=INT8), "decode")
    if capability == 100:
        add(replace(BASE, name="d128"), "prefill")
        add(replace(BASE, name="d256", head_dim=256), "prefill")
    if capability in (89, 90):
        add(replace(BASE, name="d64", head_dim=64), "decode")
        add(replace(BASE, name="d128-hot-bf16", hot=True, dtype=torch.bfloat16), "decode")
        add(replace(BASE, name="d128-page16", page_size=16), "decode")
        add(replace(BASE, name="d64-page16-int8", page_size=16, head_dim=64, scheme=INT8), "decode")
        add(replace(BASE, name="d128-page32", page_size=32), "decode")
        add(replace(BASE, name="d64-offset-page16", head_dim=64, page_size=16, mu=3.0, pairs=16), "decode")
        add(replace(BASE, name="g16-page16", page_size=16, group=16), "decode")
        add(replace(BASE, name="d128-offset", mu=3.0, pairs=16, pair_scale=True), "decode")
        for head_dim in (64, 128, 256):
            add(replace(BASE, name=f"d{head_dim}", head_dim=head_dim), "prefill")
        add(replace(BASE, name="d128-int8", scheme=INT8), "prefill")
        add(replace(BASE, name="d128-offset", mu=3.0, pairs=16, pair_scale=True), "prefill")
        add(replace(BASE, name="g16-symmetric", scheme=INT4_SYM, group=16), "decode")
        add(replace(BASE, name="g16-page128", page_size=128, group=16), "decode")
    if capability == 90:
        add(replace(BASE, name="d128-hot-bf16", hot=True, dtype=torch.bfloat16), "write a chunk")
        add(replace(BASE, name="d256-k8v4", scheme=K8V4, head_dim=256), "write a chunk")
    if capability == 89:
        add(replace(BASE, name="d256-int8-page128", scheme=INT8, head_dim=256, page_size=128), "decode")
    return out


def writes() -> list[tuple[str, cases.Case, list[Launch]]]:
    case = replace(BASE, dtype=torch.bfloat16)
    batch = cases.make_batch(case, "cpu")
    out = []
    for values in VALUES:
        for maxnreg in (None, 96):
            config = WriteConfig(64, 4, values, maxnreg)
            launches = launches_of(lambda c=config: cases.write_kernel(replace(batch, tokens=batch.tokens[:1]), c))
            out.append((f"write a chunk, {values}, {maxnreg}", case, launches))
    return out


def main(capability: int, launched: list[tuple[str, cases.Case, list[Launch]]]) -> list[dict[str, Any]]:
    rows, seen = [], set()
    for part, case, launches in launched:
        for launch in launches:
            name = launch.kernel.__name__
            asked_for = name in ("decode_kernel", "prefill_kernel", "write_kernel") or "compact" in name
            if (part, name, case.name) in seen or not (asked_for or case is BASE):
                continue
            seen.add((part, name, case.name))
            made = compile_launch(launch, capability)
            tile = case.page_size * tile_pages(case.page_size, skip=False)  # tokens of an iteration
            elements = 2 * tile * case.head_dim  # of K and V
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
                    "loop_spills": sum(n for op, n in made.loop.items() if op.startswith(("LDL", "STL"))),
                    "transposes": made.transposes,
                    "misplaced": made.misplaced,
                    "async_16_bytes": sum(n for op, n in made.loop.items() if op.startswith("LDGSTS") and ".128" in op),
                    "async_narrow": sum(
                        n for op, n in made.loop.items() if op.startswith("LDGSTS") and ".128" not in op
                    ),
                    "instructions_per_element": made.loop_instructions * 32 * warps / elements,
                }
            )
            if name == "write_kernel":
                tensors = 1 if launch.arguments["VALUES"] == "apart" else 2
                written = tensors * launch.arguments["T"] * case.head_dim
                rows[-1] |= {
                    "instructions_per_element": made.path.total() * 32 * warps / written,
                    "barriers": sum(n for op, n in made.path.items() if op.startswith("BAR")),
                }
    return rows


if __name__ == "__main__":
    capability = int(sys.argv[1])
    print(json.dumps(main(capability, writes() if "writes" in sys.argv[2:] else kernels(capability)), indent=1))
