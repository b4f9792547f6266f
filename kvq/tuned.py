"""Launch configurations of decode and of quantize-on-write: measured on a GPU (``python -m kvq.tune``), kept as JSON.

A file is for one device. ``pick`` looks for the device's name, then for its compute capability, then takes
``DecodeConfig()``. Within a file it takes the entry of the same scheme and offset whose shape class shares most with
the plan's. ``pick_write`` takes the entry of just its class, or ``default_write``. Files come from kernels/tuned and,
before those, from the file that the environment's KVQ_TUNED names.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from triton.runtime import driver

from kvq.kernels.device import next_pow2
from kvq.page import PAGE_SIZES, PageLayout, tile_pages
from kvq.scheme import HEAD_DIMS, PRESETS, is_integer

FORMAT = 4
SMALL_WRITE = 1024  # tokens
FOLDER = Path(__file__).parent / "kernels" / "tuned"
ENVIRONMENT = "KVQ_TUNED"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodeConfig:
    """Launch configuration of the decode kernel. ``programs``: a multiprocessor's, of one warp each, which may take 255
    registers where they are 8, 168 where they are 12; ``min_chunk``: least tiles (page.tile_pages) an item;
    ``prefetch``: tiles an item asks for before its query is ready; ``start_cost``: tiles that take as long as the start
    and the masked end of a sequence, in a batch of different lengths; ``maxnreg``: most registers, None leaves them to
    the compiler."""

    num_stages: int = 3
    programs: float = 8.0
    min_chunk: int = 2
    prefetch: int = 2
    start_cost: int = 4
    maxnreg: int | None = None


@dataclass(frozen=True)
class WriteConfig:
    """Launch configuration of the write kernel: ``tokens`` and warps of a program. ``values``: when V is read, "late"
    after K is packed, "prefetch" then too but asked into L2 with K, "early" with K, before anything is computed, or
    "apart" by programs of their own. ``maxnreg``: most registers, None leaves them to the compiler."""

    tokens: int = 16
    num_warps: int = 4
    values: str = "early"
    maxnreg: int | None = None


VALUES = ("late", "prefetch", "early", "apart")


class ShapeClass(NamedTuple):
    """What a configuration depends on. ``rows``: 8 or 16 query rows a program; ``pairs``: whether keys have an offset;
    ``workload``: "small" where a plan has at most one (sequence, kv head) a multiprocessor, else "large"."""

    scheme: str
    pairs: bool
    workload: str
    rows: int
    head_dim: int
    page_size: int


class WriteClass(NamedTuple):
    """What a WriteConfig depends on. ``pairs``: as in ShapeClass; ``workload``: "small" up to SMALL_WRITE tokens."""

    scheme: str
    pairs: bool
    workload: str
    head_dim: int


Kind = TypeVar("Kind", ShapeClass, WriteClass)
Config = TypeVar("Config", DecodeConfig, WriteConfig)


@dataclass(frozen=True)
class Tuned:
    """A file. ``measured`` is False where the values were derived (``source`` says how), not timed on this device."""

    path: str
    device: str
    capability: tuple[int, int]
    triton: str
    date: str
    measured: bool
    source: str
    entries: dict[ShapeClass, DecodeConfig]
    writes: dict[WriteClass, WriteConfig]


def load(path: str | Path) -> Tuned:
    """Read a file. Raises ValueError, naming the file and the field, where it is not what ``save`` writes."""
    path = str(path)
    try:
        with open(path, encoding="utf-8") as f:
            data = json.load(f)
    except (OSError, ValueError, RecursionError) as error:  # the last: brackets within brackets
        raise ValueError(f"{path} is not a readable JSON file: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds {type(data).__name__}; expected an object")
    version = data.get("format")
    if not is_integer(version) or version != FORMAT:
        raise ValueError(f"{path}: format is {version!r}; this kvq reads {FORMAT}")
    for name in ("device", "triton", "date", "source"):
        _check(path, name, data.get(name), isinstance(data.get(name), str) and data[name] != "", "a text")
    _check(path, "measured", data.get("measured"), isinstance(data.get("measured"), bool), "true or false")
    capability = data.get("capability")
    pair = isinstance(capability, list) and len(capability) == 2 and all(is_integer(x) for x in capability)
    _check(path, "capability", capability, pair, "[major, minor]")
    entries = data.get("entries")
    rows = data.get("writes", [])  # files of before there were any have none
    _check(path, "writes", rows, isinstance(rows, list), "a list of objects")
    good = isinstance(entries, list) and (entries != [] or rows != [])
    _check(path, "entries", entries, good, "a list of objects")
    assert capability is not None and entries is not None
    classes = _rows(path, "entries", entries, ShapeClass, _config)
    writes = _rows(path, "writes", rows, WriteClass, _write_config)
    return Tuned(
        path, data["device"], (capability[0], capability[1]), data["triton"], data["date"], data["measured"],
        data["source"], classes, writes,
    )  # fmt: skip


def save(
    path: str | Path,
    header: dict[str, Any],
    entries: Sequence[tuple[ShapeClass, DecodeConfig, dict[str, Any]]],
    writes: Sequence[tuple[WriteClass, WriteConfig, dict[str, Any]]] = (),
) -> None:
    """Write a file: ``header`` has the fields of Tuned but entries and writes; each of those may carry more facts, e.g.
    its time."""
    lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in {"format": FORMAT, **header}.items()]
    for name, classes in (("entries", entries), ("writes", writes)):
        rows = [json.dumps({**kind._asdict(), "config": asdict(config), **facts}) for kind, config, facts in classes]
        lines.append(f' "{name}": [' + ",".join(f"\n  {row}" for row in rows) + "\n ]")
    Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def rows_of(
    file: Tuned | None,
) -> tuple[list[tuple[ShapeClass, DecodeConfig, dict[str, Any]]], list[tuple[WriteClass, WriteConfig, dict[str, Any]]]]:
    """Entries and writes of a loaded file with their other facts, as ``save`` takes them."""
    if file is None:
        return [], []
    data = json.loads(Path(file.path).read_text(encoding="utf-8"))

    def facts(row: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name not in (*names, "config")}

    entries = [
        (shape, config, facts(row, ShapeClass._fields))
        for (shape, config), row in zip(file.entries.items(), data["entries"])
    ]
    writes = [
        (kind, choice, facts(row, WriteClass._fields))
        for (kind, choice), row in zip(file.writes.items(), data.get("writes", []))
    ]
    return entries, writes


def pick(
    layout: PageLayout,
    rows: int,
    num_seqs: int,
    *,
    pairs: int = 0,
    device: torch.device | str = "cuda",
) -> DecodeConfig:
    """The configuration for a plan of at most ``num_seqs`` sequences whose programs take ``rows`` (8 or 16) query rows.

    ``pairs``: rotary pairs of a head with an offset, as in DeviceTransform.pairs.

    Never raises for want of a file: without one, and on CPU, it is ``DecodeConfig()``. Stages that do not fit the
    device's shared memory are taken off.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return DecodeConfig()
    properties = torch.cuda.get_device_properties(device)
    tuned = _find(properties.name, (properties.major, properties.minor), os.environ.get(ENVIRONMENT))
    workload = workload_class(num_seqs * layout.kv_heads, properties.multi_processor_count)
    shape = ShapeClass(layout.scheme.name, pairs > 0, workload, rows, layout.head_dim, layout.page_size)
    config = None if tuned is None else nearest(tuned.entries, shape)
    return fit(config or DecodeConfig(), layout, pairs, shared_limit(device))


def pick_write(layout: PageLayout, tokens: int, *, pairs: int = 0, device: torch.device | str = "cuda") -> WriteConfig:
    """The configuration for writing ``tokens`` tokens. Never raises for want of a file, as ``pick``."""
    device = torch.device(device)
    if device.type != "cuda":
        return default_write(layout, tokens, pairs, 0)
    properties = torch.cuda.get_device_properties(device)
    tuned = _find(properties.name, (properties.major, properties.minor), os.environ.get(ENVIRONMENT))
    config = None if tuned is None else tuned.writes.get(write_class(layout, tokens, pairs))
    if config is None or write_shared_bytes(config, layout) > shared_limit(device):
        config = default_write(layout, tokens, pairs, properties.major)
    return config


def write_class(layout: PageLayout, tokens: int, pairs: int) -> WriteClass:
    workload = "small" if tokens <= SMALL_WRITE else "large"
    return WriteClass(layout.scheme.name, pairs > 0, workload, layout.head_dim)


def default_write(layout: PageLayout, tokens: int, pairs: int, major: int) -> WriteConfig:
    """For a GPU of compute capability ``major``: on Hopper, 64 rotated rows are one asynchronous product of four warps;
    others keep the matrix of the rotation in registers."""
    key, value = layout.scheme.key, layout.scheme.value
    if tokens <= SMALL_WRITE:  # few programs: the shortest ones
        return WriteConfig(16, 4, "apart")
    wide = layout.head_dim > 128
    values = "late" if wide or pairs else "early"  # what is read early waits in shared memory or registers
    if key.bits != value.bits:
        values = "apart"  # the registers of two kinds of code would add up
    if not (key.rotate or value.rotate):
        return WriteConfig(16, 4 if wide else 2, values)
    if major == 9:
        return WriteConfig(64, 4, "prefetch" if values == "early" else values)  # measured on an H200
    return WriteConfig(16, 4 if wide else 1, values)


def write_shared_bytes(config: WriteConfig, layout: PageLayout) -> int:
    """Upper bound of the shared memory of a write program: the rows of rotated tensors, both at once where V is read
    early, and the matrices that rotate them."""
    rows, matrices = [0], {}
    for x in (layout.scheme.key, layout.scheme.value):
        if x.rotate:
            half = x.planes // 2 * max(16, next_pow2(layout.head_dim // x.planes))  # columns of half a row, padded
            rows.append(2 * config.tokens * half * 2)
            matrices[half] = 2 * half * half
    scratch = 4096  # of reductions and conversions between register layouts
    return (sum if config.values == "early" else max)(rows) + sum(matrices.values()) + scratch


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on a CUDA device."""
    return _shared_limit(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache  # asked for by every write
def _shared_limit(index: int) -> int:
    return driver.active.utils.get_device_properties(index)["max_shared_mem"]


def workload_class(heads: int, multiprocessors: int) -> str:
    """Class of a plan of ``heads`` (sequence, kv head) pairs."""
    return "small" if heads <= multiprocessors else "large"


def nearest(entries: dict[ShapeClass, DecodeConfig], shape: ShapeClass) -> DecodeConfig | None:
    """The entry of the same scheme and offset that agrees on most: on what decides registers before the workload."""
    same = [e for e in entries if (e.scheme, e.pairs) == (shape.scheme, shape.pairs)]
    if not same:
        return None

    def agreement(e: ShapeClass) -> tuple[bool, ...]:
        return (
            e.rows == shape.rows,
            e.head_dim == shape.head_dim,
            e.workload == shape.workload,
            e.page_size == shape.page_size,
        )

    return entries[max(same, key=agreement)]


def shared_bytes(config: DecodeConfig, layout: PageLayout, pairs: int) -> int:
    """Upper bound of the shared memory of a decode program: all stages but one hold tiles.

    Triton also keeps the offset's tables there, and the tiles of the loop over hot pages instead of the quantized ones.
    """
    key, value = layout.scheme.key, layout.scheme.value
    words = sum(max(16, next_pow2(layout.head_dim // x.planes)) for x in (key, value))  # rows are padded
    tokens = layout.page_size * tile_pages(layout.page_size, skip=False)
    tile = tokens * (2 * words + key.scale_bytes() + value.scale_bytes())
    tables = 4 * 2 * tokens * pairs
    hot = 2 * 2 * 2 * 16 * layout.head_dim
    scratch = 32 * layout.head_dim  # of rotations and conversions between register layouts
    return max((config.num_stages - 1) * tile, hot) + tables + scratch


def fit(config: DecodeConfig, layout: PageLayout, pairs: int, limit: int) -> DecodeConfig:
    """``config`` with as few stages less as its shared memory needs to fit ``limit`` bytes."""
    while config.num_stages > 1 and shared_bytes(config, layout, pairs) > limit:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


@functools.cache
def _find(name: str, capability: tuple[int, int], given: str | None) -> Tuned | None:
    """The file for a device, None for none; every file that is refused is logged once, with the reason."""
    if given:
        tuned = _try(given)
        if tuned is not None and is_for(tuned, name, capability):
            return tuned
        if tuned is not None:
            log.warning("%s is for %s, sm_%d%d; this is %s: not used", given, tuned.device, *tuned.capability, name)
    return find_shipped(name, capability)


@functools.cache
def find_shipped(name: str, capability: tuple[int, int]) -> Tuned | None:
    """The file in kernels/tuned for a device, None for none."""
    found = [tuned for path in sorted(FOLDER.glob("*.json")) if (tuned := _try(path)) is not None]
    named = [t for t in found if _named(t.device, name)]
    same = [t for t in found if t.capability == capability]
    if named:
        return max(named, key=lambda t: len(t.device))
    return max(same, key=lambda t: t.measured, default=None)


def _try(path: str | Path) -> Tuned | None:
    try:
        return load(path)
    except ValueError as error:
        log.warning("tuned configurations refused: %s", error)
        return None


def _named(device: str, name: str) -> bool:
    """Whether a file's device is the GPU called ``name``: "NVIDIA H100" is also "NVIDIA H100 80GB HBM3"."""
    return name == device or name.startswith(device + " ")


def is_for(tuned: Tuned, name: str, capability: tuple[int, int]) -> bool:
    """Whether a file is for the device of that name and compute capability."""
    return _named(tuned.device, name) and tuned.capability == capability


def _check(path: str, name: str, value: Any, good: bool, allowed: str) -> None:
    if not good:
        raise ValueError(f"{path}: {name} is {value!r}; expected {allowed}")


def _rows(
    path: str, name: str, rows: list[Any], kind: type[Kind], config: Callable[[str, str, Any], Config]
) -> dict[Kind, Config]:
    """The configurations of a list, by class."""
    found: dict[Kind, Config] = {}
    for i, row in enumerate(rows):
        where = f"{name}[{i}]"
        _check(path, where, row, isinstance(row, dict), "an object")
        key = kind(**_class(path, where, row, kind._fields))
        _check(path, where, tuple(key), key not in found, "one entry a class")
        found[key] = config(path, f"{where}.config", row.get("config"))
    return found


def _class(path: str, where: str, entry: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The fields ``names`` of a shape or write class."""
    allowed: dict[str, tuple[Any, ...]] = {
        "scheme": tuple(sorted(PRESETS)), "pairs": (False, True), "workload": ("small", "large"), "rows": (8, 16),
        "head_dim": HEAD_DIMS, "page_size": PAGE_SIZES,
    }  # fmt: skip
    for name in names:
        x, choices = entry.get(name), allowed[name]
        good = x in choices and type(x) is type(choices[0])  # neither 1 for true nor 64.0 for 64
        _check(path, f"{where}.{name}", x, good, f"one of {', '.join(map(str, choices))}")
    return {name: entry[name] for name in names}


def _config(path: str, where: str, config: Any) -> DecodeConfig:
    names = {f.name for f in fields(DecodeConfig)}
    good = isinstance(config, dict) and set(config) == names
    _check(path, where, config, good, f"an object of {', '.join(sorted(names))}")
    ranges = {
        "num_stages": (1, 8), "programs": (1, 64), "min_chunk": (1, 64), "prefetch": (0, 16),
        "start_cost": (0, 64),
    }  # fmt: skip
    for name, (lo, hi) in ranges.items():
        x = config[name]
        number = is_integer(x) or (name == "programs" and isinstance(x, float))
        _check(path, f"{where}.{name}", x, number and lo <= x <= hi, f"{lo}..{hi}")
    _check_maxnreg(path, where, config)
    return DecodeConfig(**config)


def _write_config(path: str, where: str, config: Any) -> WriteConfig:
    names = {f.name for f in fields(WriteConfig)}
    good = isinstance(config, dict) and set(config) == names
    _check(path, where, config, good, f"an object of {', '.join(sorted(names))}")
    choices: dict[str, tuple[Any, ...]] = {"tokens": (16, 32, 64, 128), "num_warps": (1, 2, 4, 8), "values": VALUES}
    for name, allowed in choices.items():
        x = config[name]
        good = x in allowed and not isinstance(x, (bool, float))
        _check(path, f"{where}.{name}", x, good, f"one of {', '.join(map(str, allowed))}")
    _check_maxnreg(path, where, config)
    return WriteConfig(**config)


def _check_maxnreg(path: str, where: str, config: dict[str, Any]) -> None:
    x = config["maxnreg"]
    _check(path, f"{where}.maxnreg", x, x is None or (is_integer(x) and 32 <= x <= 255), "null or 32..255")
