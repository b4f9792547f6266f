"""``kvq top``: a live table of the programs of an engine and of what is retained of them.

It reads the exporter of a running engine (``KVQ_METRICS_PORT=9400 vllm serve ...``, or ``integration.exporter.serve``),
or, where there is none, the event log that retention writes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bench.arguments import number
from bench.records import check, event_of, printable

DEFAULT = "http://127.0.0.1:9400"
STYLES = {"running": "green", "waiting_tool": "yellow", "waiting_person": "cyan", "idle": "dim"}
ORDER = list(STYLES)
ROW = ("program", "tenant", "state", "tool", "blocks", "ttl_left_s", "turns")  # and lease_id, where there is a lease
COUNTED = {
    "pin": "kvq_pins_total",
    "reuse": "kvq_reuse_total",
    "miss": "kvq_misses_total",
    "evict": "kvq_evictions_total",
    "expire": "kvq_expired_total",
}


@dataclass
class View:
    """What one frame shows. programs: rows as the engine gives them. totals: {metric: number}."""

    programs: list[dict[str, Any]] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    note: str = ""


def from_server(url: str) -> Callable[[], View]:
    """Asks the exporter at `url` for every frame. A server that is none, or does not answer, is an OSError."""

    def look() -> View:
        try:
            age_s, programs = programs_of(json.loads(_get(f"{url}/programs")))
            return View(programs, totals(_get(f"{url}/metrics").splitlines()), f"{url}, {age_s:.0f} s old")
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            why = f"no kvq exporter at {url} ({printable(str(error)):.200})"
            raise OSError(f"{why}; start the server with KVQ_METRICS_PORT, or name an event log") from None

    return look


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as response:
        return response.read().decode()


def programs_of(answer: Any) -> tuple[float, list[dict[str, Any]]]:
    """Age and rows of an exporter's /programs. Raises ValueError, naming the field, where it is something else."""
    check(answer, ("age_s", "programs"))
    if not isinstance(answer["programs"], list):
        raise ValueError(f"programs is {answer['programs']!r:.80}; it must be a list")
    for row in answer["programs"]:
        check(row, ROW)
        if row["state"] not in ORDER:
            raise ValueError(f"state is {row['state']!r}; allowed: {', '.join(ORDER)}")
    return answer["age_s"], answer["programs"]


def totals(lines: Iterable[str]) -> Counter[str]:
    """Sums over the labels of the kvq metrics in Prometheus' text format."""
    found: Counter[str] = Counter()
    for line in lines:
        if line.startswith("kvq_"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0]] += float(value)  # type: ignore[assignment]
    return found


class EventReader:
    """Follows an event log: each call reads what is new. A log that is replaced or rotated is read from its start.
    Raises OSError if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode: int | None = None
        self._programs: dict[tuple[str, str], dict[str, Any]] = {}
        self._totals: Counter[str] = Counter()

    def __call__(self) -> View:
        with self._path.open("rb") as file:
            status = self._path.stat()
            if self._inode not in (None, status.st_ino) or status.st_size < self._offset:
                self._offset = 0
            self._inode = status.st_ino
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    break
                self._offset += len(line)
                try:
                    self._take(event_of(line))
                except ValueError:
                    continue
        now = time.time()
        for row in self._programs.values():
            row["ttl_left_s"] = max(0.0, row["deadline"] - now)
        live = [row for row in self._programs.values() if row["lease_id"] is not None]
        found = Counter(self._totals)
        found["kvq_pins"], found["kvq_pinned_blocks"] = len(live), sum(row["blocks"] for row in live)
        return View(list(self._programs.values()), found, f"{self._path}: programs that never held a lease do not show")

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in COUNTED:
            self._totals[COUNTED[kind]] += 1
        if event.get("program") is None:
            return
        key = (event["program"], event.get("tenant") or "")
        row = self._programs.setdefault(
            key,
            {
                "program": key[0],
                "tenant": key[1],
                "state": "idle",
                "tool": "",
                "blocks": 0,
                "lease_id": None,
                "hard": False,
                "deadline": 0.0,
                "turns": 0,
            },
        )
        if kind == "pin":
            tool = event["tool"]
            row.update(
                state="waiting_person" if tool == "person" else "waiting_tool",
                tool=tool,
                blocks=event["blocks"],
                lease_id=event["lease"],
                hard=bool(event.get("hard")),
                deadline=(event.get("wall") or 0.0) + event["ttl_s"],
                turns=row["turns"] + 1,
            )
        elif kind == "evict" and event["left"]:
            row["blocks"] = event["left"]
        elif event.get("lease", row["lease_id"]) == row["lease_id"]:
            row.update(lease_id=None, blocks=0, deadline=0.0)
            row["state"] = "running" if kind in ("reuse", "miss") else "idle"


def render(view: View, limit: int) -> Group:
    """The head line and the table of one frame."""
    total = view.totals
    head = (
        f"{total['kvq_pins']:.0f} leases, {total['kvq_pinned_blocks']:.0f} blocks"
        + (f" of {total['kvq_budget_blocks']:.0f}" if total["kvq_budget_blocks"] else "")
        + f"   granted {total['kvq_pins_total']:.0f}, reused {total['kvq_reuse_total']:.0f},"
        f" missed {total['kvq_misses_total']:.0f}, evicted {total['kvq_evictions_total']:.0f},"
        f" expired {total['kvq_expired_total']:.0f}"
        + ("   guardrail: retention is off" if total["kvq_guardrail_off"] else "")
    )
    rows = sorted(view.programs, key=lambda row: (ORDER.index(row["state"]), -row["blocks"], row["program"]))
    table = Table(box=None, padding=(0, 1))
    engines = any(row.get("engine") is not None for row in rows)  # data parallel
    if engines:
        table.add_column("engine", justify="right", no_wrap=True)
    for name in ("program", "state", "tool"):
        table.add_column(name, no_wrap=name == "state")  # long names give way, not the numbers
    for name in ("blocks", "ttl left", "turns"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows[:limit]:
        leased = row.get("lease_id") is not None
        name = f"{row['tenant']}/{row['program']}" if row["tenant"] else row["program"]
        table.add_row(
            *([str(row.get("engine", "-"))] if engines else []),
            Text(printable(name), no_wrap=True, overflow="ellipsis"),
            Text(row["state"].replace("_", " "), style=STYLES[row["state"]]),
            Text(printable(row["tool"]), no_wrap=True, overflow="ellipsis"),
            f"{row['blocks']}{' hard' if row.get('hard') else ''}" if leased else "-",
            f"{row['ttl_left_s']:.1f} s" if leased else "-",
            str(row["turns"]),
        )
    parts: list[Any] = [Text(head), table]
    if len(rows) > limit:
        parts.append(Text(f"and {len(rows) - limit} more", style="dim"))
    parts.append(Text(view.note, style="dim"))
    return Group(*parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvq top", description=__doc__)
    parser.add_argument("source", nargs="?", default=DEFAULT, help="URL of an exporter, or an event log (%(default)s)")
    seconds, rows = number(float, 0.05, 86400), number(int, 1)
    parser.add_argument("--interval", type=seconds, default=1.0, help="seconds between frames (%(default)s)")
    parser.add_argument("--rows", type=rows, default=40, help="at most so many programs (%(default)s)")
    parser.add_argument("--once", action="store_true", help="print one frame and end; so it does without a terminal")
    args = parser.parse_args(argv)
    look = from_server(args.source.rstrip("/")) if "://" in args.source else EventReader(Path(args.source))
    console = Console()
    if not args.once and not sys.stdout.isatty():
        print("kvq top: the output is no terminal: one frame, as with --once", file=sys.stderr)
        args.once = True
    if args.once:
        console.print(render(look(), args.rows))
        return 0
    with Live(render(look(), args.rows), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(args.interval)
                live.update(render(look(), args.rows), refresh=True)
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
