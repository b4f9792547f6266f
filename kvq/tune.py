"""Measures launch configurations of decode on the GPU at hand and writes them: ``python -m kvq.tune --out FILE``.

Nothing runs this by itself. Point KVQ_TUNED at the file to use it (kvq/tuned.py), or ship it in kernels/tuned.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton

from kvq import tuned
from kvq.kernels.timing import DecodeInputs, decode_inputs, in_processes, replay_us
from kvq.page import PageLayout
from kvq.scheme import PRESETS
from kvq.transform import KeyTransform
from kvq.tuned import DecodeConfig, ShapeClass

KV_HEADS = 8
PAIRS = 16  # with an offset, where keys have one
STAGES = (3, 5, 7)
PROGRAMS = (4, 6, 8, 12)
PREFETCH = (0, 2, 4)
CLOSE = 1.01  # times the best within which an earlier candidate is preferred: replays differ by as much
TILES = {"small": 128, "large": 1024}  # (page, kv head) tiles a multiprocessor of the batch that stands for a workload


def shape_classes(quick: bool) -> Iterator[ShapeClass]:
    """The classes that are measured; kvq.tuned gives the others the nearest one."""
    for workload in TILES:
        for name in ("int4", "int8") if quick else PRESETS:
            yield ShapeClass(name, False, workload, 8, 128, 64)
        yield ShapeClass("int4", True, workload, 8, 128, 64)
        if not quick:
            yield ShapeClass("int4", False, workload, 16, 128, 64)
            for head_dim, page_size in ((64, 64), (256, 64), (128, 16)):
                yield ShapeClass("int4", False, workload, 8, head_dim, page_size)


def candidates(layout: PageLayout, pairs: int, limit: int) -> list[DecodeConfig]:
    """Stages to compile; those whose shared memory passes ``limit`` bytes are left out."""
    every = [DecodeConfig(num_stages=s) for s in STAGES]
    return [c for c in every if tuned.shared_bytes(c, layout, pairs) <= limit]


def layout_of(shape: ShapeClass) -> PageLayout:
    return PageLayout(PRESETS[shape.scheme], shape.page_size, KV_HEADS, shape.head_dim)


def offset(head_dim: int, pairs: int = PAIRS) -> KeyTransform:
    """A transform with an offset on ``pairs`` rotary pairs of each head, and pair scales."""
    g = torch.Generator().manual_seed(0)
    return KeyTransform(
        KV_HEADS,
        head_dim,
        mu=3 * torch.randn(KV_HEADS, head_dim, generator=g),
        pair_scale=torch.rand(KV_HEADS, head_dim // 2, generator=g) + 0.5,
        inv_freq=10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim),
    ).keep_pairs(pairs)


def inputs_of(shape: ShapeClass, tokens: int, sequences: int, least_bytes: int) -> tuple[DecodeInputs, int]:
    """A batch of ``sequences`` of ``tokens`` and its q_len: a group of 4 heads, times q_len 4 for 16 rows."""
    q_len = shape.rows // 4 if shape.rows == 16 else 1
    transform = offset(shape.head_dim) if shape.pairs else None
    inputs = decode_inputs(
        layout_of(shape), 4 * KV_HEADS, [tokens] * sequences, q_len=q_len, transform=transform, least_bytes=least_bytes
    )
    return inputs, q_len


def time_us(inputs: DecodeInputs, config: DecodeConfig, replays: int = 7) -> float:
    """Microseconds of decode and merge over ``inputs``, planned beforehand, as in a layer of a model."""
    return replay_us(inputs.calls(inputs.plan(config), torch.empty_like(inputs.query)), replays)


def compile_candidate(shape: ShapeClass, config: DecodeConfig) -> None:
    """Compile by running a small batch."""
    time_us(inputs_of(shape, 16 * shape.page_size, 2, 0)[0], config, replays=1)


def measure(shape: ShapeClass, limit: int, multiprocessors: int, l2_bytes: int) -> tuple[DecodeConfig, dict[str, Any]]:
    """The best configuration of a class, with what was measured."""
    sequences = 1 if shape.workload == "small" else 32
    pages = TILES[shape.workload] * multiprocessors // KV_HEADS // sequences
    inputs, q_len = inputs_of(shape, pages * shape.page_size, sequences, 4 * l2_bytes)
    times: dict[DecodeConfig, float] = {}
    for config in candidates(layout_of(shape), PAIRS * shape.pairs, limit):
        for programs in PROGRAMS:
            _try(inputs, replace(config, programs=programs), times)
    best = _best(times)
    for prefetch in PREFETCH:
        _try(inputs, replace(best, prefetch=prefetch), times)
    best = _best(times)
    facts = {
        "batch": sequences,
        "context": pages * shape.page_size,
        "q_len": q_len,
        "time_us": round(times[best], 2),
        "tb_per_s": round(inputs.bytes_read / times[best] / 1e6, 3),
    }
    return best, facts


def _try(inputs: DecodeInputs, config: DecodeConfig, times: dict[DecodeConfig, float]) -> None:
    if config not in times:
        try:
            times[config] = time_us(inputs, config)
        except (RuntimeError, triton.CompilationError, triton.OutOfResources) as error:
            print(f"{config}: {error}", file=sys.stderr)


def _best(times: dict[DecodeConfig, float]) -> DecodeConfig:
    if not times:
        raise RuntimeError("no configuration runs on this GPU")
    least = min(times.values())
    return next(config for config, time in times.items() if time <= CLOSE * least)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvq.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="FILE", help="where to write (default: a file named after the GPU, here)")
    parser.add_argument("--quick", action="store_true", help="INT4 and INT8 at head size 128 and page 64 only")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("kvq.tune measures on a GPU, and there is no CUDA device here", file=sys.stderr)
        return 1
    properties = torch.cuda.get_device_properties(0)
    limit = tuned.shared_limit(torch.device("cuda"))
    classes = list(shape_classes(args.quick))
    jobs = [
        (compile_candidate, (shape, replace(config, prefetch=prefetch)))
        for shape in classes
        if shape.workload == "large"
        for config in candidates(layout_of(shape), PAIRS * shape.pairs, limit)
        for prefetch in PREFETCH
    ]
    print(f"{properties.name}: compiling {len(jobs)} kernels")
    in_processes(jobs, max(1, (os.cpu_count() or 1) - 1))
    entries = []
    for shape in classes:
        config, facts = measure(shape, limit, properties.multi_processor_count, properties.L2_cache_size)
        entries.append((shape, config, facts))
        print(f"{' '.join(map(str, shape))}: {facts['time_us']} us, {facts['tb_per_s']} TB/s, {config}", flush=True)
    header = {
        "device": properties.name,
        "capability": [properties.major, properties.minor],
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "measured": True,
        "source": "python -m kvq.tune" + (" --quick" if args.quick else ""),
    }
    path = args.out or properties.name.lower().replace(" ", "-") + ".json"
    tuned.save(path, header, entries)
    tuned.load(path)
    print(f"wrote {path}; set {tuned.ENVIRONMENT}={path} to use it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
