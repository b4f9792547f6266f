"""Rows gathered in a run, how they are compared, printed and saved."""

from __future__ import annotations

import csv
import datetime
import json
import platform
import shlex
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from bench.kernels import measure, peers
from bench.kernels.measure import Shape

GPU = torch.cuda.is_available()
COLUMNS = ("scheme", "batch", "context", "heads", "kv_heads", "head_dim", "time_us", "tb_per_s", "pct_read_bw")


@dataclass
class State:
    """What a run gathers. ``best``: the peers' best of each shape; ``missing``: peers that gave nothing, and why."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    writes: list[dict[str, Any]] = field(default_factory=list)
    prefills: list[dict[str, Any]] = field(default_factory=list)
    best: dict[Shape, dict[str, peers.Best]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    bandwidth: float | None = None

    def peers(self, shape: Shape) -> dict[str, float]:
        if GPU and shape not in self.best:
            self.best[shape] = peers.measure(shape, self.missing)
            for name, best in self.best[shape].items():
                self.rows.append(peer_row(shape, name, best, self.bandwidth))
        return {name: best.time_us for name, best in self.best.get(shape, {}).items()}


def peer_row(shape: Shape, name: str, best: peers.Best, bandwidth: float | None) -> dict[str, Any]:
    row = measure.row(shape, measure.DEFAULT, best.time_us, best.bytes_read, bandwidth, {}, 0.0)
    return row | {"scheme": name, "format": best.settings, "rel_err": None}


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to kvq's rows their time over the default row's of as many tokens, and that ratio per byte."""
    base: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda r: r["ragged"]):
        key = (row["batch"], row["context"], row["heads"], row["kv_heads"], row["head_dim"], row["page_size"])
        if row["scheme"] == measure.DEFAULT.name:
            base.setdefault(key, row)
        if key in base and row["rel_err"] is not None:
            ratio = row["time_us"] / base[key]["time_us"]
            row["vs_int4"] = round(ratio, 3)
            if row["bytes"]:
                row["vs_int4_per_byte"] = round(ratio * base[key]["bytes"] / row["bytes"], 3)


def about(state: State) -> dict[str, Any]:
    """Where and with what the rows were measured."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "triton", "vllm", "flashinfer-python"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "command": shlex.join(["pytest", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if GPU else "no GPU: small shapes on the reference",
        "versions": versions,
        "read_bw_tb_per_s": None if state.bandwidth is None else round(state.bandwidth / 1e12, 3),
        "missing_peers": state.missing,
    }


def save(folder: Path, state: State) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = {**about(state), "rows": state.rows, "writes": state.writes, "prefills": state.prefills}
    (folder / "kernels.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    rows = state.rows + state.writes + state.prefills
    names = dict.fromkeys(name for row in rows for name in row)
    with open(folder / "kernels.csv", "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, list(names))
        writer.writeheader()
        writer.writerows(rows)


def lines(state: State) -> list[str]:
    """The tables as they are printed."""
    ratios = [f"vs_{name}" for name in peers.PEERS if any(name in best for best in state.best.values())]
    names = [*COLUMNS, *ratios, "vs_int4", "vs_int4_per_byte", "rel_err"]
    facts = about(state)
    bandwidth = facts["read_bw_tb_per_s"]
    clock = (
        "No GPU: small shapes on the torch reference; these times say nothing about the kernels."
        if bandwidth is None
        else f"Read bandwidth {bandwidth} TB/s; medians of CUDA-graph replays; inputs rotate over 4 x L2 and more."
    )
    text = [
        f"{facts['command']}   {facts['date']}",
        f"{facts['device']}, {', '.join(f'{k} {v}' for k, v in facts['versions'].items())}",
        clock,
        *measure.scheme_lines(),
        *(f"peer {name}: {reason}" for name, reason in state.missing.items()),
        "",
        tabulate([[row.get(name) for name in names] for row in state.rows], names, missingval="-"),
    ]
    for table in (state.writes, state.prefills):
        if table:
            text += ["", tabulate(table, "keys", missingval="-")]
    return "\n".join(text).splitlines()
