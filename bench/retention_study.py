"""The retention study: policies x loads x seeds on the simulator, the bars of the project, and a report.

    python -m bench.simulate report --out docs/results

Every cell runs the same programs, arrivals and tool times under each policy (paired by seed). Rivals get their best
setting, swept on seeds of their own. Bounds are 95 % t-intervals over the seeds, of the paired ratio where two policies
are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from bench.steptime import GPUS, StepTime
from bench.workloads import (
    Program,
    Synthetic,
    Workload,
    agent_traces,
    azure_requests,
    claude_code_traces,
    closed_loop,
    plain_requests,
    redraw_tools,
    repeat,
)

POLICIES = ("lru", "fixed", "ema", "continuum", "trtllm", "value", "clairvoyant")
SWEEPS: dict[str, list[dict[str, float]]] = {
    "fixed": [{"ttl_s": t} for t in (2.0, 10.0, 30.0, 120.0)],
    "ema": [{"safety": s} for s in (1.0, 1.5, 3.0)],
    "continuum": [{"samples": n} for n in (20, 100)],
    "trtllm": [{"duration_s": d} for d in (10.0, 30.0, 120.0)],
}
MAX_CONTEXT = 49152


@dataclass(frozen=True)
class Cell:
    """One workload at one load. load: working set (agents at once x mean context) over the pool. tool_scale: factor on
    all tool times. flood: a burst of plain requests, in multiples of the pool.
    """

    workload: str
    load: float
    tool_scale: float = 1.0
    flood: float = 0.0
    gpu: str = "H100"
    blocks: int = 2048

    @property
    def name(self) -> str:
        text = f"{self.workload}, load {self.load:g}"
        if self.tool_scale != 1.0:
            text += f", tools x{self.tool_scale:g}"
        return text + (", flood" if self.flood else "")


LOADS = (0.25, 1.0, 1.5, 2.0, 3.0)
MAIN = [Cell("synthetic", load) for load in LOADS]
PRESSURE = [cell for cell in MAIN if cell.load >= 1.5]
OTHERS = [
    Cell("synthetic", 2.0, tool_scale=0.1),
    Cell("synthetic", 2.0, tool_scale=10.0),
    Cell("synthetic", 1.5, flood=2.0),
    Cell("miniswe", 2.0, gpu="L4", blocks=0),
    Cell("claude-code", 2.0),
    Cell("magagent", 1.5, gpu="L4", blocks=0),
]
SYNTHETIC = Synthetic(
    turns=(5, 10, 20), system_tokens=4096, first_tokens=(2000, 12000), tool_tokens=(200, 2500), max_context=MAX_CONTEXT
)


Settings = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Task:
    """One simulation. settings: of the policy, as (name, value) pairs."""

    cell: Cell
    policy: str
    settings: Settings
    seed: int


_recorded: dict[str, list[Program]] = {}


def build(cell: Cell, seed: int, data: Path, tokenize: Callable[[str], Sequence[int]] | None) -> Workload:
    """The workload of a cell; the same for every policy."""
    blocks = cell.blocks or StepTime(GPUS[cell.gpu]).pool_blocks(64)
    if cell.workload == "synthetic":
        sample = replace(SYNTHETIC, programs=100).build(1000).mean_context
        slots = max(1, round(cell.load * blocks * 64 / sample))
        programs = replace(SYNTHETIC, programs=max(2 * slots, 12), tool_scale=cell.tool_scale).build(seed).programs
        rate = 1.0
    else:
        if cell.workload not in _recorded:
            if cell.workload == "claude-code":
                _recorded[cell.workload] = claude_code_traces(data / "claude-code-traces", MAX_CONTEXT, scale=0.3)
            else:
                assert tokenize is not None
                _recorded[cell.workload] = agent_traces(data / "agent-traces" / cell.workload, tokenize)
        recorded = _recorded[cell.workload]
        sample = Workload(cell.workload, recorded).mean_context
        slots = max(1, round(cell.load * blocks * 64 / sample))
        programs = repeat(recorded, max(2 * slots, 12), seed)
        # Claude Code's recorded waits hold the person's; they are drawn anew like those of the other traces.
        programs = redraw_tools(programs, "coding", cell.tool_scale, seed)
        rate = 1.0 if cell.gpu == "H100" else 0.05
    agent_turns = sum(len(p.turns) for p in programs)
    mean_turn_s = (6.0 if cell.gpu == "H100" else 30.0) * max(1.0, cell.tool_scale / 2)
    horizon = max(60.0, 3 * agent_turns / slots * mean_turn_s)
    plain = azure_requests(
        data / "azure-llm" / "AzureLLMInferenceTrace_code.csv", min(8000, int(horizon * rate) + 10), rate, seed
    )
    if cell.flood:
        burst = int(cell.flood * blocks * 64 / 1550)
        # Prompts of 1550 tokens on average, ten seconds of them, a minute into the run.
        plain += plain_requests(burst, burst / 10.0, seed, prompt=(100, 3000), start=60.0, name="flood")
    return closed_loop(cell.name, programs + plain, slots, 20.0, seed)


def run_task(task: Task) -> dict[str, Any]:
    """Simulate one task; called in a worker process."""
    from bench.clairvoyant import Clairvoyant
    from bench.simulate import Simulator, policy_maker
    from retention.policy import Policy

    cell = task.cell
    workload = build(cell, task.seed, Path(os.environ["KVQ_DATA"]), _tokenizer())
    settings = dict(task.settings)
    if task.policy == "clairvoyant":

        def maker(sim: Simulator) -> Policy:
            rule = Clairvoyant(sim.return_time)
            return Policy(rule, total_blocks=sim.num_blocks, block_tokens=workload.block_size, clock=sim.clock)
    else:
        maker = policy_maker(task.policy, **settings)  # type: ignore[assignment]
    started = time.process_time()
    result = Simulator(workload, maker, StepTime(GPUS[cell.gpu]), cell.blocks or None).run()
    row = summarize(result)
    row["cpu_s"] = time.process_time() - started
    return {"cell": asdict(cell), "policy": task.policy, "settings": settings, "seed": task.seed, **row}


def summarize(result: Any) -> dict[str, float]:
    """The numbers of one run."""
    agents = [t for t in result.turns if t.agent and t.first_token >= 0]
    back = [t.first_token - t.arrival for t in agents if t.index]
    first = [t.first_token - t.arrival for t in agents if not t.index]
    # Plain requests that were still queued when the last agent ended have waited at least so long.
    queue = [
        (t.scheduled if t.scheduled >= 0 else result.seconds) - t.arrival
        for t in result.turns
        if not t.agent and t.arrival < result.seconds
    ]
    done = list(result.program_seconds.values())
    metrics = result.status.get("metrics", {})
    prompt = sum(t.prompt_tokens for t in agents)
    return {
        "jct_mean": sum(done) / len(done),
        **{f"jct_p{p}": quantile(done, p / 100) for p in (50, 95, 99)},
        **{f"ttft_p{p}": quantile(back, p / 100) for p in (50, 95)},
        "first_ttft_p95": quantile(first, 0.95),
        **{f"plain_queue_p{p}": quantile(queue, p / 100) for p in (50, 95)},
        "prefill_tokens": float(result.computed_prefill_tokens),
        "hit_rate": sum(t.cached_tokens for t in agents) / prompt,
        "pin_block_s": result.retained_block_seconds,
        "guardrail_trips": float(metrics.get("kvq_guardrail_trips_total", 0.0)),
        "preemptions": float(result.preemptions),
        "makespan": result.seconds,
        "turns": float(len(agents)),
        "programs": float(len(done)),
    }


def quantile(values: Iterable[float], p: float) -> float:
    """By linear interpolation; 0 without values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = p * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


_TOKENIZER: list[Any] = []


def _tokenizer() -> Callable[[str], Sequence[int]] | None:
    """SmolLM2's, from the folder in KVQ_TOKENIZER."""
    folder = os.environ.get("KVQ_TOKENIZER")
    if not folder:
        return None
    if not _TOKENIZER:
        from tokenizers import Tokenizer

        _TOKENIZER.append(Tokenizer.from_file(str(Path(folder) / "tokenizer.json")))
    return lambda text: _TOKENIZER[0].encode(text, add_special_tokens=False).ids


def run_all(tasks: Sequence[Task], workers: int, cache: Path | None) -> list[dict[str, Any]]:
    """Run tasks in worker processes. cache: a JSONL file; what it holds already is not run again."""
    from rich.progress import Progress

    done: dict[Any, dict[str, Any]] = {}
    if cache is not None and cache.exists():
        for line in cache.open():
            row = json.loads(line)
            done[_key(Cell(**row["cell"]), row["policy"], row["settings"], row["seed"])] = row
    todo = [t for t in tasks if _key(t.cell, t.policy, dict(t.settings), t.seed) not in done]
    if todo:
        from bench.simulate import make_scheduler

        make_scheduler(16, 64)  # what takes long to load is loaded once, before the workers are forked
    with Progress(disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("simulations", total=len(todo))
        with multiprocessing.get_context("fork").Pool(workers if todo else 1, initializer=_start_worker) as pool:
            for row in pool.imap_unordered(run_task, todo):
                done[_key(Cell(**row["cell"]), row["policy"], row["settings"], row["seed"])] = row
                if cache is not None:
                    with cache.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                progress.advance(bar)
    return [done[_key(t.cell, t.policy, dict(t.settings), t.seed)] for t in tasks]


def _start_worker() -> None:
    import logging

    import torch

    torch.set_num_threads(1)
    logging.getLogger("retention").setLevel(logging.ERROR)
    os.nice(5)


def _key(cell: Cell, policy: str, settings: dict[str, float], seed: int) -> tuple[Any, ...]:
    return (cell, policy, tuple(sorted(settings.items())), seed)


def best_settings(workers: int, cache: Path | None) -> dict[str, dict[str, float]]:
    """Each rival's setting with the least mean job completion over the loads under pressure; seeds 1000 and 1001."""
    cells = [cell for cell in MAIN if cell.load in (1.5, 3.0)]
    tasks = [
        Task(cell, policy, tuple(settings.items()), seed)
        for policy, sweep in SWEEPS.items()
        for settings in sweep
        for cell in cells
        for seed in (1000, 1001)
    ]
    rows = run_all(tasks, workers, cache)
    scores: dict[str, dict[Settings, float]] = defaultdict(lambda: defaultdict(float))
    for task, row in zip(tasks, rows):
        scores[task.policy][task.settings] += math.log(row["jct_mean"])
    return {policy: dict(min(score.items(), key=itemgetter(1))[0]) for policy, score in scores.items()}


def plan(best: dict[str, dict[str, float]], seeds: int, other_seeds: int) -> list[Task]:
    """All cells under all policies; in the pressure cells also `value` without admission."""
    tasks = []
    for cells, count in ((MAIN, seeds), (OTHERS, other_seeds)):
        for seed in range(count):
            for cell in cells:
                tasks += [Task(cell, p, tuple(best.get(p, {}).items()), seed) for p in POLICIES]
    tasks += [Task(c, "value", (("overcommit", 0.0),), seed) for c in PRESSURE for seed in range(seeds)]
    return tasks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study (or take it from `--cache`) and write the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.simulate report", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of retention-simulated.md")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the traces")
    parser.add_argument("--cache", type=Path, help="JSONL of finished simulations: read, and added to")
    parser.add_argument("--seeds", type=int, default=10, help="paired seeds of the load sweep (default 10)")
    parser.add_argument("--other-seeds", type=int, default=5, help="of the other cells (default 5)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    args = parser.parse_args(argv)
    if not (args.data / "azure-llm").is_dir():
        raise FileNotFoundError(f"--data {args.data}: no azure-llm folder there")
    os.environ["KVQ_DATA"] = str(args.data.resolve())
    from bench.models import model_path

    os.environ.setdefault("KVQ_TOKENIZER", str(model_path("smollm2-135m")))
    best = best_settings(args.workers, args.cache)
    tasks = plan(best, args.seeds, args.other_seeds)
    rows = run_all(tasks, args.workers, args.cache)
    from bench.retention_results import render

    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "retention-simulated.md").write_text(render(rows, best, args.seeds, args.other_seeds))
    print(args.out / "retention-simulated.md")
    return 0
