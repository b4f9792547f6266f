"""Configurations of decode for a GPU that is not here, by a model: ``python -m kvq.occupancy --out FILE``.

Per multiprocessor, a batch that reads T-byte tiles takes the longer of two times a tile:

    memory   T / min(bandwidth, bytes in flight / latency)     in flight: programs * (stages - 1) * T
    issue    I / min(4, programs * IPC) / clock                I: SASS instructions a tile, from the compiled kernel

Programs are bounded by registers and shared memory. The least stages and programs are taken for which both are MARGIN
times faster than the memory alone, since the model knows neither uneven parts nor the loads between tiles. What the
compiler says of the choice goes to the file, which is marked as not measured.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kvq import tuned
from kvq.kernels import decode
from kvq.kernels.device import DeviceTransform
from kvq.kernels.inspect import Compiled, compile_launch, launches_of
from kvq.page import PageLayout
from kvq.plan import DecodePlan
from kvq.tune import KV_HEADS, PAIRS, layout_of, offset
from kvq.tuned import DecodeConfig, ShapeClass

MARGIN = 4.0
IPC = 0.4  # instructions a clock of one warp that waits for its own results
LATENCY = 0.8e-6  # seconds of a read under load
RESERVED = 1024  # bytes of shared memory that CUDA keeps of each block


@dataclass(frozen=True)
class Device:
    """Figures of a GPU: NVIDIA's data sheet and the CUDA programming guide's table of its compute capability."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    bandwidth: float  # bytes a second
    clock: float  # Hz
    shared: int  # bytes a multiprocessor
    shared_block: int
    registers: int = 65536
    blocks: int = 24


L4 = Device("NVIDIA L4", (8, 9), 58, 300e9, 2.04e9, 100 << 10, 99 << 10)

CLASSES = tuple(
    ShapeClass(scheme, pairs, "large", rows, head_dim, 64)
    for scheme, pairs, rows, head_dim in (
        ("int4", False, 8, 128),
        ("int4", False, 16, 128),
        ("int4", False, 8, 256),
        ("int4", True, 8, 128),
        ("int4-sym", False, 8, 128),
        ("int8", False, 8, 128),
        ("k8v4", False, 8, 128),
    )
)


def compile_decode(shape: ShapeClass, config: DecodeConfig, capability: tuple[int, int]) -> Compiled:
    """The decode kernel of a shape class, compiled for a compute capability."""
    layout, group = layout_of(shape), 4
    q_len = shape.rows // group if shape.rows == 16 else 1
    tables = DeviceTransform.build(offset(shape.head_dim), shape.page_size, 1024, "cpu") if shape.pairs else None
    plan = DecodePlan(layout, group * KV_HEADS, 2, 1024, q_len=q_len, device="cpu", config=config)
    pages = torch.empty(1, layout.page_bytes, dtype=torch.uint8)
    query = torch.empty(2, q_len, group * KV_HEADS, shape.head_dim, dtype=torch.bfloat16)
    lse = torch.empty(query.shape[:3])
    block_tables, seq_lens = torch.zeros(2, 16, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    launches = launches_of(
        lambda: decode.decode(plan, query, pages, block_tables, seq_lens, 0.1, torch.empty_like(query), lse, tables)
    )
    return compile_launch(launches[0], 10 * capability[0] + capability[1])


def resident(device: Device, compiled: Compiled) -> int:
    """Programs of one warp that a multiprocessor holds at once: each of its four schedulers has a quarter of the
    registers, given in units of 256 a warp."""
    registers = -(-32 * compiled.registers // 256) * 256
    warps = 4 * (device.registers // 4 // registers)
    return min(device.blocks, warps, device.shared // (compiled.shared_bytes + RESERVED))


def tile_times(
    device: Device, layout: PageLayout, instructions: int, stages: int, programs: int
) -> tuple[float, float]:
    """Seconds a tile of reading and of issuing, on one multiprocessor."""
    tile = layout.head_bytes
    own = device.bandwidth / device.multiprocessors
    reading = tile / min(MARGIN * own, programs * (stages - 1) * tile / LATENCY)
    return reading, instructions / min(4.0, programs * IPC) / device.clock


def choose(device: Device, shape: ShapeClass) -> tuple[DecodeConfig, dict[str, Any]]:
    """The configuration of a shape class, with the model's numbers. Raises RuntimeError when none is fast enough."""
    layout = layout_of(shape)
    needed = layout.head_bytes / (device.bandwidth / device.multiprocessors) / MARGIN
    for stages in (2, 3, 4):
        config = DecodeConfig(num_stages=stages, maxnreg=None)
        if tuned.shared_bytes(config, layout, PAIRS * shape.pairs) > device.shared_block:
            break
        compiled = compile_decode(shape, config, device.capability)
        most = resident(device, compiled)
        if compiled.shared_bytes > device.shared_block:
            continue
        for programs in range(4, most + 1, 2):  # a multiprocessor has four schedulers
            reading, issuing = tile_times(device, layout, compiled.loop_instructions, stages, programs)
            if max(reading, issuing) <= needed:
                facts = {
                    "time_us": None,
                    "registers": compiled.registers,
                    "spill_bytes": compiled.spill_bytes,
                    "shared_bytes": compiled.shared_bytes,
                    "instructions_per_tile": compiled.loop_instructions,
                    "resident_programs": most,
                    "ns_per_tile": {
                        "memory": round(1e9 * needed * MARGIN),
                        "latency": round(1e9 * reading),
                        "issue": round(1e9 * issuing),
                    },
                }
                return DecodeConfig(num_stages=stages, programs=programs, maxnreg=None), facts
    raise RuntimeError(f"no configuration of {shape} reads at the bandwidth of {device.name}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvq.occupancy", description="Configurations for an L4, by a model")
    parser.add_argument("--out", metavar="FILE", required=True)
    args = parser.parse_args(argv)
    entries = []
    for shape in CLASSES:
        config, facts = choose(L4, shape)
        entries.append((shape, config, facts))
        print(f"{' '.join(map(str, shape))}: {config} {facts}", flush=True)
    header = {
        "device": L4.name,
        "capability": list(L4.capability),
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "measured": False,
        "source": "python -m kvq.occupancy: a model of occupancy, shared memory and instruction counts",
    }
    tuned.save(args.out, header, entries)
    tuned.load(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
