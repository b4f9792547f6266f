"""``kvq report events.jsonl``: what retention did, from its event log (fields: docs/events.md)."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.records import event_of, printable

ENDS = ("reuse", "expire", "release", "supersede")  # and evict with left 0


@dataclass
class Tool:
    """Returns of programs that waited for one tool."""

    hits: int = 0
    misses: int = 0
    waits: list[float] = field(default_factory=list)
    predicted: list[tuple[float, float]] = field(default_factory=list)  # (predicted, real) seconds

    @property
    def hit_rate(self) -> float:
        return self.hits / (self.hits + self.misses)


@dataclass
class Lease:
    """One lease over time, for the timeline. end: its last event, nan while it lives. how: what ended it."""

    program: str
    start: float
    deadline: float
    blocks: int
    end: float = math.nan
    how: str = "live"


@dataclass
class Summary:
    """Everything the report shows. unreadable: lines that are not events, as a full disk leaves them."""

    counts: Counter[str]
    reasons: Counter[tuple[str, str]]
    tools: dict[str, Tool]
    leases: list[Lease]
    off: list[tuple[float, float]]  # times when the guardrail had retention switched off; nan: still off
    first: float
    last: float
    unreadable: int


def read(paths: Iterable[Path]) -> tuple[list[dict[str, Any]], int]:
    """Events of several files, by time, and the number of lines that are none.

    Raises OSError for a file that cannot be read, ValueError when no line of all is an event.
    """
    events, bad = [], 0
    names = [str(path) for path in paths]
    for name in names:
        with open(name, errors="replace") as file:
            for line in file:
                try:
                    events.append(event_of(line))
                except ValueError:
                    bad += bool(line.strip())
    if not events:
        raise ValueError(f"no events in {', '.join(names)} ({bad} unreadable lines)")
    return sorted(events, key=lambda event: event["t"]), bad


def summarize(events: Sequence[dict[str, Any]], unreadable: int = 0) -> Summary:
    """Counts, returns by tool, leases and guardrail times of events in order of time."""
    summary = Summary(
        counts=Counter(printable(event["event"]) for event in events),
        reasons=Counter(),
        tools={},
        leases=[],
        off=[],
        first=events[0]["t"],
        last=events[-1]["t"],
        unreadable=unreadable,
    )
    tools: defaultdict[str, Tool] = defaultdict(Tool)
    live: dict[int, Lease] = {}
    for event in events:
        kind, t = event["event"], event["t"]
        if event.get("reason"):
            summary.reasons[printable(kind), printable(event["reason"])] += 1
        if kind in ("reuse", "miss"):
            tool = tools[printable(event.get("tool") or "unknown")]
            tool.hits += kind == "reuse"
            tool.misses += kind == "miss"
            if event.get("waited_s") is not None:
                tool.waits.append(event["waited_s"])
                if event.get("predicted_s") is not None:
                    tool.predicted.append((event["predicted_s"], event["waited_s"]))
        if kind == "pin":
            lease = Lease(printable(event["program"]), t, t + event["ttl_s"], event["blocks"])
            live[event["lease"]] = lease
            summary.leases.append(lease)
        elif (kind in ENDS or (kind == "evict" and not event.get("left"))) and event.get("lease") in live:
            lease = live.pop(event["lease"])
            lease.end, lease.how = t, kind
        elif kind == "guardrail_off":
            summary.off.append((t, math.nan))
        elif kind == "guardrail_on" and summary.off:
            summary.off[-1] = (summary.off[-1][0], t)
    summary.tools = dict(tools)
    return summary


def render(summary: Summary) -> str:
    """The text report."""
    from tabulate import tabulate

    parts = [f"{sum(summary.counts.values())} events in {summary.last - summary.first:.1f} s"]
    if summary.unreadable:
        parts[0] += f", {summary.unreadable} unreadable lines skipped"
    lines = []
    for kind, count in summary.counts.most_common():
        why = ", ".join(f"{reason} {n}" for (k, reason), n in summary.reasons.most_common() if k == kind)
        lines.append((kind, count, why))
    parts.append(tabulate(lines, ["event", "count", "reasons"]))
    rows: list[tuple[str | float, ...]] = []
    if summary.tools:
        for name, tool in sorted(summary.tools.items(), key=lambda item: -(item[1].hits + item[1].misses)):
            rows.append((name, tool.hits + tool.misses, f"{tool.hit_rate:.1%}", *(_quantiles(tool.waits))))
        parts.append(
            "Returns by tool\n" + tabulate(rows, ["tool", "returns", "hit rate", "wait p50 s", "p90 s"], floatfmt=".2f")
        )
        rows = []
        for name, tool in sorted(summary.tools.items()):
            if tool.predicted:
                within = sum(real <= guess for guess, real in tool.predicted) / len(tool.predicted)
                error = sorted(abs(real - guess) for guess, real in tool.predicted)[len(tool.predicted) // 2]
                guesses = sorted(guess for guess, _ in tool.predicted)
                rows.append((name, len(tool.predicted), guesses[len(guesses) // 2], f"{within:.1%}", error))
        if rows:
            header = ["tool", "returns", "predicted median s", "back by then (50 % is right)", "median error s"]
            parts.append("TTL calibration\n" + tabulate(rows, header, floatfmt=".2f"))
    return "\n\n".join(parts)


def timeline(summary: Summary, path: Path, programs: int = 40) -> None:
    """Draw leases over time, for the programs with the most leases, and the blocks retained in all, to a PNG."""
    from matplotlib.figure import Figure

    busiest = [name for name, _ in Counter(lease.program for lease in summary.leases).most_common(programs)]
    row = {name: i for i, name in enumerate(busiest)}
    colors = {"reuse": "tab:green", "expire": "tab:gray", "evict": "tab:red", "live": "tab:blue"}
    figure = Figure(figsize=(12, 3 + 0.16 * len(busiest)), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[max(3, 0.16 * len(busiest)), 2])
    for lease in summary.leases:
        if lease.program in row:
            end = summary.last if math.isnan(lease.end) else lease.end
            color = colors.get(lease.how, "tab:orange")
            top.plot([lease.start, end], [row[lease.program]] * 2, color=color, linewidth=3, solid_capstyle="butt")
            top.plot([lease.deadline], [row[lease.program]], "|", color="black", markersize=4)
    for name, color in (*colors.items(), ("other end", "tab:orange")):
        top.plot([], [], color=color, linewidth=3, label=name)
    top.plot([], [], "|", color="black", linestyle="none", label="deadline")
    top.legend(loc="upper right", fontsize="small", ncols=6)
    labels = [name.replace("$", r"\$") for name in busiest]  # else matplotlib reads it as a formula
    top.set_yticks(range(len(busiest)), labels, fontsize="xx-small")
    top.set_title("Leases, by what ended them")
    changes = [(lease.start, lease.blocks) for lease in summary.leases]
    changes += [(lease.end, -lease.blocks) for lease in summary.leases if not math.isnan(lease.end)]
    times, totals, total = [], [], 0
    for t, blocks in sorted(changes):
        total += blocks
        times.append(t)
        totals.append(total)
    bottom.step(times, totals, where="post")
    bottom.set_ylabel("blocks when pinned")
    bottom.set_xlabel("seconds")
    for axis in (top, bottom):
        axis.set_xlim(summary.first, max(summary.last, summary.first + 1e-3))
        for start, end in summary.off:
            axis.axvspan(start, summary.last if math.isnan(end) else end, color="tab:red", alpha=0.1)
    figure.savefig(path, dpi=110)


def _quantiles(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    if not ordered:
        return math.nan, math.nan
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report of event logs and draw their timeline."""
    parser = argparse.ArgumentParser(prog="kvq report", description=__doc__)
    parser.add_argument("events", type=Path, nargs="+", help="event logs (JSON lines); rotated files may be given too")
    parser.add_argument("--png", type=Path, help="timeline (default: the first log's name with .png)")
    parser.add_argument("--no-png", action="store_true", help="print only")
    args = parser.parse_args(argv)
    try:
        events, bad = read(args.events)
    except (OSError, ValueError) as error:
        print(f"kvq report: {error}", file=sys.stderr)
        return 2
    summary = summarize(events, bad)
    print(render(summary))
    if not args.no_png:
        png = args.png or args.events[0].with_suffix(".png")
        timeline(summary, png)
        print(f"\ntimeline: {png}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
