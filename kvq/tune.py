"""Measures launch configurations on the GPU at hand and writes them: ``python -m kvq.tune --out FILE``.

The shipped configuration of each class is measured first, beside the candidates; what is chosen is printed with both
times. Nothing runs this by itself. Point KVQ_TUNED at the file to use it (kvq/tuned.py), or ship it in kernels/tuned.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

import torch
import triton

from kvq import tuned
from kvq.kernels.timing import (
    DecodeInputs,
    WriteInputs,
    decode_inputs,
    in_processes,
    log_uniform,
    replay_us,
    write_inputs,
)
from kvq.page import PageLayout
from kvq.scheme import PRESETS
from kvq.transform import KeyTransform
from kvq.tuned import Config, DecodeConfig, ShapeClass, WriteClass, WriteConfig

KV_HEADS = 8
PAIRS = 16  # with an offset, where keys have one
CLOSE = 1.01  # times the best within which an earlier candidate is preferred: replays differ by as much
FINALISTS = 5  # of the first batch that are measured on the others
PROGRAMS = {"small": (3, 4, 5, 6, 8), "large": (4, 6, 8, 12)}
MIN_CHUNK = (1, 2, 4, 8)
START_COST = (2, 5, 8, 11)  # of a ragged batch
REGISTERS = 65536  # of a multiprocessor of every GPU since Ampere
RESERVED = 1024  # bytes of shared memory that CUDA keeps of each program
WRITES = {"small": 64, "large": 8192}  # tokens that stand for a workload


class Batch(NamedTuple):
    """A decode batch that stands for a class; ``group``: query heads a KV head; ``shortest``: where lengths go down to
    evenly in their logarithm, None for all of ``tokens``."""

    sequences: int
    tokens: int
    kv_heads: int = KV_HEADS
    group: int = 4
    shortest: int | None = None

    @property
    def lens(self) -> tuple[int, ...]:
        if self.shortest is None:
            return (self.tokens,) * self.sequences
        return log_uniform(self.sequences, self.shortest, self.tokens)

    def __str__(self) -> str:
        usual = (self.kv_heads, self.group) == (KV_HEADS, 4)
        heads = "" if usual else f" heads {self.kv_heads * self.group}/{self.kv_heads}"
        lengths = self.tokens if self.shortest is None else f"{self.shortest} to {self.tokens}"
        return f"{self.sequences} x {lengths}{heads}"


# The shapes of the tables (bench/kernels), by workload and query rows of a program.
BATCHES = {
    ("small", 8): (Batch(1, 131072), Batch(1, 32768), Batch(8, 32768)),
    ("small", 16): (Batch(1, 131072, 4, 16),),
    ("large", 8): (Batch(32, 16384), Batch(128, 2048)),
    ("large", 16): (Batch(64, 16384, 4, 16),),
}
RAGGED = {8: Batch(64, 32768, shortest=256), 16: Batch(64, 32768, 4, 16, 256)}  # for start_cost, by rows of a program


@dataclass(frozen=True)
class Gpu:
    """``shared``: bytes of shared memory of a program, and of a multiprocessor for all of its programs."""

    name: str
    capability: tuple[int, int]
    shared: int
    shared_multiprocessor: int
    multiprocessors: int
    l2_bytes: int


def shape_classes(quick: bool) -> Iterator[ShapeClass]:
    """The decode classes that are measured; kvq.tuned gives the others the nearest one."""
    for workload in ("small", "large"):
        yield ShapeClass("int4", False, workload, 8, 128, 64)
        if workload == "large" or not quick:
            yield ShapeClass("int4", False, workload, 16, 128, 64)
            yield ShapeClass("int4", True, workload, 8, 128, 64)
            for name in ("int8",) if quick else tuple(name for name in PRESETS if name != "int4"):
                yield ShapeClass(name, False, workload, 8, 128, 64)
        if not quick:
            for head_dim in (64, 256):
                yield ShapeClass("int4", False, workload, 8, head_dim, 64)


def write_classes(quick: bool) -> Iterator[WriteClass]:
    """The write classes that are measured; others take ``tuned.default_write``."""
    for workload in ("large",) if quick else WRITES:
        for name in ("int4", "int8") if quick else PRESETS:
            yield WriteClass(name, False, workload, 128)
        if not quick:
            yield WriteClass("int4", True, workload, 128)
            for head_dim in (64, 256):
                yield WriteClass("int4", False, workload, head_dim)


def compiled_candidates(shape: ShapeClass, quick: bool) -> Iterator[DecodeConfig]:
    """Configurations that differ in what is compiled: stages, registers and prefetch."""
    if shape.rows == 16:  # 255 registers leave two programs a scheduler; with 168 there may be three, which spill
        yield from (DecodeConfig(num_stages=stages) for stages in ((3, 4) if quick else (2, 3, 4, 5)))
        yield from (DecodeConfig(num_stages=stages, maxnreg=168) for stages in ((2,) if quick else (2, 3)))
    elif shape.workload == "small":  # few bytes a program: how soon, and how many are on their way
        for stages in (3, 4) if quick else (2, 3, 4, 5):
            for prefetch in (0, 2) if quick else (0, 2, 4):
                yield DecodeConfig(num_stages=stages, prefetch=prefetch)
    else:
        yield from (DecodeConfig(num_stages=stages) for stages in (2, 3, 4))
        if not quick:
            yield from (DecodeConfig(num_stages=stages, maxnreg=168) for stages in (2, 3))


def candidates(shape: ShapeClass, gpu: Gpu, quick: bool) -> list[DecodeConfig]:
    """The configurations to measure: the shipped one, and those whose programs fit a multiprocessor together."""
    layout, pairs = layout_of(shape), PAIRS * shape.pairs
    first = tuned.fit(shipped(shape, gpu), layout, pairs, gpu.shared)
    found = dict.fromkeys([first])
    for config in compiled_candidates(shape, quick):
        for programs in PROGRAMS[shape.workload]:
            candidate = replace(config, programs=programs, start_cost=first.start_cost)
            if fits(candidate, layout, pairs, gpu):
                found.setdefault(candidate)
    return list(found)


def fits(config: DecodeConfig, layout: PageLayout, pairs: int, gpu: Gpu) -> bool:
    """Whether a multiprocessor holds ``config.programs`` programs at once, as far as is known before compiling."""
    shared = tuned.shared_bytes(config, layout, pairs)
    least = shared - 32 * layout.head_dim  # the bound's scratch often lies in tiles that are no longer needed
    registers = -(-(config.maxnreg or 0) // 8) * 8  # given in units of 8 a thread
    programs = math.ceil(config.programs)
    return (
        shared <= gpu.shared
        and config.programs * (least + RESERVED) <= gpu.shared_multiprocessor
        and -(-programs // 4) * 32 * registers <= REGISTERS // 4  # each of the four schedulers has a quarter
    )


def write_candidates(kind: WriteClass, gpu: Gpu, quick: bool) -> list[WriteConfig]:
    """As ``candidates``, for writing."""
    layout = write_layout(kind)
    tensor = layout.scheme.value
    tiles: tuple[tuple[int, int], ...] = ((16, 1), (16, 4)) if quick else ((16, 1), (16, 2), (16, 4), (32, 4))
    registers: tuple[int | None, ...] = (None,)
    if kind.workload == "large" and not tensor.rotate:
        tiles = ((16, 2), (32, 4), (64, 8))
    elif kind.workload == "large" and gpu.capability[0] == 9:  # 64 rows and four warps are one asynchronous product
        tiles = ((64, 4), (128, 8))
        registers = (None, 96) if quick else (None, 96, 128)
    file = tuned.find_shipped(gpu.name, gpu.capability)
    first = tuned.default_write(layout, WRITES[kind.workload], PAIRS * kind.pairs, gpu.capability[0])
    found = dict.fromkeys([(file and file.writes.get(kind)) or first])
    for tokens, warps in tiles:
        for values in tuned.VALUES:
            for maxnreg in registers:
                found.setdefault(WriteConfig(tokens, warps, values, maxnreg))
    return [config for config in found if tuned.write_shared_bytes(config, layout) <= gpu.shared]


def shipped(shape: ShapeClass, gpu: Gpu) -> DecodeConfig:
    """What a plan of the class gets without a tuned file of one's own; ``DecodeConfig()`` where nothing is shipped."""
    file = tuned.find_shipped(gpu.name, gpu.capability)
    return (file and tuned.nearest(file.entries, shape)) or DecodeConfig()


def layout_of(shape: ShapeClass, kv_heads: int = KV_HEADS) -> PageLayout:
    return PageLayout(PRESETS[shape.scheme], shape.page_size, kv_heads, shape.head_dim)


def write_layout(kind: WriteClass) -> PageLayout:
    return PageLayout(PRESETS[kind.scheme], 64, KV_HEADS, kind.head_dim)


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


def batches_of(shape: ShapeClass, gpu: Gpu) -> list[Batch]:
    """The batches that stand for a class on this GPU."""

    def workload(batch: Batch) -> str:
        return tuned.workload_class(batch.sequences * batch.kv_heads, gpu.multiprocessors)

    return [b for b in BATCHES[shape.workload, shape.rows] if workload(b) == shape.workload]


def inputs_of(shape: ShapeClass, batch: Batch, least_bytes: int) -> DecodeInputs:
    """As in the tables: the first page of each sequence hot, except where pages hold INT8."""
    return decode_inputs(
        layout_of(shape, batch.kv_heads), batch.group * batch.kv_heads, batch.lens,
        sink=shape.scheme != "int8", transform=offset(shape.head_dim) if shape.pairs else None,
        least_bytes=least_bytes,
    )  # fmt: skip


def writes_of(kind: WriteClass, least_bytes: int) -> WriteInputs:
    transform = offset(kind.head_dim) if kind.pairs else None
    return write_inputs(write_layout(kind), WRITES[kind.workload], transform=transform, least_bytes=least_bytes)


def time_us(inputs: DecodeInputs, config: DecodeConfig, replays: int = 7) -> float:
    """Microseconds of decode and merge over ``inputs``, planned beforehand, as in a layer of a model."""
    return replay_us(inputs.calls(inputs.plan(config), torch.empty_like(inputs.query)), replays)


def write_us(inputs: WriteInputs, config: WriteConfig, replays: int = 7) -> float:
    return replay_us(inputs.calls(config), replays)


def compile_decode(shape: ShapeClass, batch: Batch, config: DecodeConfig) -> None:
    """Compile by running a small batch."""
    time_us(inputs_of(shape, batch._replace(sequences=2, tokens=16 * shape.page_size), 0), config, replays=1)


def compile_write(kind: WriteClass, config: WriteConfig) -> None:
    write_us(writes_of(kind, 0), config, replays=1)


def compile_jobs(
    shapes: Iterable[ShapeClass], kinds: Iterable[WriteClass], gpu: Gpu, quick: bool
) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
    """One job for each kernel that measuring needs."""
    jobs: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[Any, ...]]] = {}
    for shape in shapes:
        for config in candidates(shape, gpu, quick):
            made = (config.num_stages, config.prefetch, config.maxnreg)
            for batch in batches_of(shape, gpu):
                kernel = (shape._replace(workload=""), batch.kv_heads, batch.group, made)
                jobs.setdefault(kernel, (compile_decode, (shape, batch, config)))
    for kind in kinds:
        for choice in write_candidates(kind, gpu, quick):
            jobs.setdefault((kind._replace(workload=""), choice), (compile_write, (kind, choice)))
    return list(jobs.values())


def measure(shape: ShapeClass, gpu: Gpu, quick: bool) -> tuple[DecodeConfig, dict[str, Any]]:
    """The best configuration of a class over its batches, with what was measured."""
    batches = batches_of(shape, gpu)
    inputs = [inputs_of(shape, batch, 4 * gpu.l2_bytes) for batch in batches]
    first = _times(time_us, inputs[0], candidates(shape, gpu, quick))
    start = next(iter(first))
    ranked = sorted(first, key=lambda config: first[config])
    times = _over(inputs, dict.fromkeys([start, *ranked[: 3 if quick else FINALISTS]]), first)
    best = _best(times)
    if shape.workload == "small" or not quick:  # what needs no other kernel
        planned = [replace(best, min_chunk=n) for n in MIN_CHUNK]
        times |= _over(inputs, dict.fromkeys(c for c in planned if c not in times), {})
        best = _best(times)
    if shape.workload == "large":
        batches.append(RAGGED[shape.rows])
        inputs.append(inputs_of(shape, batches[-1], 4 * gpu.l2_bytes))
        planned = [replace(best, start_cost=n) for n in (best.start_cost, *START_COST)]
        ragged = _over(inputs[-1:], dict.fromkeys([start, *planned]), {})
        even, best = times[best], _best({config: ragged[config] for config in planned})
        times[start] = times[start] + ragged[start]
        times[best] = even + ragged[best]
    facts: dict[str, Any] = {
        "batch": batches[0].sequences,
        "context": batches[0].tokens,
        "time_us": round(times[best][0], 2),
        "tb_per_s": round(inputs[0].bytes_read / times[best][0] / 1e6, 3),
        "shipped": {str(b): round(t, 2) for b, t in zip(batches, times[start])},
        "tuned": {str(b): round(t, 2) for b, t in zip(batches, times[best])},
        "fastest": [[round(first[c], 2), *astuple(c)] for c in ranked[:10]],
    }
    return best, facts


def measure_write(kind: WriteClass, gpu: Gpu, quick: bool) -> tuple[WriteConfig, dict[str, Any]]:
    inputs = writes_of(kind, 4 * gpu.l2_bytes)
    times = {c: [t] for c, t in _times(write_us, inputs, write_candidates(kind, gpu, quick)).items()}
    best, start, name = _best(times), next(iter(times)), f"write {WRITES[kind.workload]}"
    facts: dict[str, Any] = {
        "tokens": WRITES[kind.workload],
        "time_us": round(times[best][0], 2),
        "tb_per_s": round(inputs.bytes_moved / times[best][0] / 1e6, 3),
        "shipped": {name: round(times[start][0], 2)},
        "tuned": {name: round(times[best][0], 2)},
        "fastest": [[round(times[c][0], 2), *astuple(c)] for c in sorted(times, key=lambda c: times[c])],
    }
    return best, facts


def _times(clock: Callable[..., float], inputs: Any, configs: Iterable[Config]) -> dict[Config, float]:
    """Microseconds of each configuration that runs."""
    times = {}
    for config in configs:
        try:
            times[config] = clock(inputs, config)
        except (RuntimeError, triton.CompilationError, triton.OutOfResources) as error:
            print(f"{config}: {error}", file=sys.stderr)
    if not times:
        raise RuntimeError("no configuration runs on this GPU")
    return times


def _over(
    inputs: list[DecodeInputs], configs: Iterable[DecodeConfig], known: dict[DecodeConfig, float]
) -> dict[DecodeConfig, list[float]]:
    """Microseconds of each configuration on every batch; ``known``: those on the first."""
    return {c: [known.get(c) or time_us(inputs[0], c), *(time_us(x, c) for x in inputs[1:])] for c in configs}


def _best(times: dict[Config, list[float]]) -> Config:
    """The least geometric mean, or an earlier one that is close."""
    score = {config: math.exp(sum(map(math.log, t)) / len(t)) for config, t in times.items()}
    least = min(score.values())
    return next(config for config in times if score[config] <= CLOSE * least)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvq.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="FILE", help="where to write (default: a file named after the GPU, here)")
    parser.add_argument("--quick", action="store_true", help="fewer classes and candidates: about a minute")
    parser.add_argument(
        "--only", choices=("small", "wide", "write"), action="append", default=[],
        help="INT4 decode of few sequences, of 16 query rows a program, or writing a chunk of INT4 (repeatable)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("kvq.tune measures on a GPU, and there is no CUDA device here", file=sys.stderr)
        return 1
    properties = torch.cuda.get_device_properties(0)
    gpu = Gpu(
        properties.name,
        (properties.major, properties.minor),
        tuned.shared_limit(torch.device("cuda")),
        properties.shared_memory_per_multiprocessor,
        properties.multi_processor_count,
        properties.L2_cache_size,
    )
    quick = args.quick
    shapes, kinds = list(shape_classes(quick)), list(write_classes(quick))
    if args.only:
        chosen = {
            "small": ShapeClass("int4", False, "small", 8, 128, 64),
            "wide": ShapeClass("int4", False, "large", 16, 128, 64),
        }
        shapes = [chosen[name] for name in args.only if name in chosen]
        kinds = [WriteClass("int4", False, "large", 128)] if "write" in args.only else []
    shapes = [shape for shape in shapes if batches_of(shape, gpu)]
    jobs = compile_jobs(shapes, kinds, gpu, quick)
    print(f"{gpu.name}: compiling {len(jobs)} kernels", flush=True)
    in_processes(jobs, max(1, (os.cpu_count() or 1) - 1))
    entries: list[tuple[ShapeClass, DecodeConfig, dict[str, Any]]] = []
    writes: list[tuple[WriteClass, WriteConfig, dict[str, Any]]] = []
    for shape in shapes:
        entries.append((shape, *measure(shape, gpu, quick)))
        _report(*entries[-1])
        torch.cuda.empty_cache()
    for kind in kinds:
        writes.append((kind, *measure_write(kind, gpu, quick)))
        _report(*writes[-1])
        torch.cuda.empty_cache()
    header = {
        "device": gpu.name,
        "capability": list(gpu.capability),
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "measured": True,
        "source": " ".join(["python -m kvq.tune", *(sys.argv[1:] if argv is None else argv)]),
    }
    # The other classes keep what is shipped.
    shipped_entries, shipped_writes = tuned.rows_of(tuned.find_shipped(gpu.name, gpu.capability))
    entries += [row for row in shipped_entries if row[0] not in shapes]
    writes += [row for row in shipped_writes if row[0] not in kinds]
    path = args.out or gpu.name.lower().replace(" ", "-") + ".json"
    tuned.save(path, header, entries, writes)
    tuned.load(path)
    print(f"wrote {path}; set {tuned.ENVIRONMENT}={path} to use it")
    return 0


def _report(kind: tuple[Any, ...], config: DecodeConfig | WriteConfig, facts: dict[str, Any]) -> None:
    print(f"{' '.join(map(str, kind))}: {config}, {facts['tb_per_s']} TB/s")
    for name, before in facts["shipped"].items():
        after = facts["tuned"][name]
        print(f"  {name}: shipped {before} us, tuned {after} us ({after / before:.3f})", flush=True)


if __name__ == "__main__":
    sys.exit(main())
