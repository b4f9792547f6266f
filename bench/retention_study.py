"""The retention study: policies x loads x seeds on the simulator, the bars of the project, and a report.

    python -m bench.simulate report --out docs/results

Every cell runs the same programs, arrivals and tool times under each policy (paired by seed). Rivals get their best
setting, swept on seeds of their own. Bounds are 95 % t-intervals over the seeds, of the paired ratio where two policies
are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
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
    poisson,
    redraw_tools,
    repeat,
)

POLICIES = ("lru", "fixed", "ema", "continuum", "trtllm", "value", "clairvoyant")
SWEEPS: dict[str, list[dict[str, float]]] = {
    "fixed": [{"ttl_s": t} for t in (2.0, 10.0, 30.0, 120.0)],
    "ema": [{"safety": s} for s in (1.0, 1.5, 3.0)],
    "continuum": [{"samples": n, "budget": b} for n in (20, 100) for b in (0.5, 1.0)],
    "trtllm": [{"duration_s": d} for d in (10.0, 30.0, 120.0)],
}
MAX_CONTEXT = 49152
ROOT = Path(__file__).resolve().parents[1]
ROW = "row: "


@dataclass(frozen=True)
class Cell:
    """One workload at one load.

    load: working set (agents at once x mean context) over the pool. tool_scale: factor on all tool times. flood: a
    burst of plain requests, in multiples of the pool. poisson: agents arrive at random, so many that `load` would be
    under way if nobody waited; otherwise the next starts when one ends. vllm: another release than the installed one.
    """

    workload: str
    load: float
    tool_scale: float = 1.0
    flood: float = 0.0
    gpu: str = "H100"
    blocks: int = 2048
    poisson: bool = False
    vllm: str = ""

    @property
    def name(self) -> str:
        text = f"{self.workload}, load {self.load:g}"
        if self.tool_scale != 1.0:
            text += f", tools x{self.tool_scale:g}"
        text += ", flood" if self.flood else ""
        text += ", Poisson" if self.poisson else ""
        text += f", {self.gpu}" if self.gpu != "H100" else ""
        return text + (f", vLLM {self.vllm}" if self.vllm else "")


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
    Cell("synthetic", 2.0, poisson=True),
    Cell("synthetic", 2.0, gpu="H200", blocks=4096),
]
RELEASE = Cell("synthetic", 2.0)  # the cell that is repeated on other releases of vLLM
RELEASE_POLICIES = ("lru", "value", "clairvoyant")
CODE = (
    "retention/*.py integration/pool.py integration/compat/patches.py bench/simulate.py bench/retention_study.py "
    "bench/workloads.py bench/steptime.py bench/clairvoyant.py"
)  # what a simulation depends on
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
        count = _count(cell, slots)
        programs = replace(SYNTHETIC, programs=count, tool_scale=cell.tool_scale).build(seed).programs
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
        programs = repeat(recorded, _count(cell, slots), seed)
        # Claude Code's recorded waits hold the person's; they are drawn anew like those of the other traces.
        programs = redraw_tools(programs, "coding", cell.tool_scale, seed)
    rate = 0.05 if cell.gpu == "L4" else 1.0
    agent_turns = sum(len(p.turns) for p in programs)
    mean_turn_s = (30.0 if cell.gpu == "L4" else 6.0) * max(1.0, cell.tool_scale / 2)
    horizon = max(60.0, 3 * agent_turns / slots * mean_turn_s)
    plain = azure_requests(
        data / "azure-llm" / "AzureLLMInferenceTrace_code.csv", min(8000, int(horizon * rate) + 10), rate, seed
    )
    if cell.flood:
        burst = int(cell.flood * blocks * 64 / 1550)
        # Prompts of 1550 tokens on average, ten seconds of them, a minute into the run.
        plain += plain_requests(burst, burst / 10.0, seed, prompt=(100, 3000), start=60.0, name="flood")
    if cell.poisson:
        alone = sum(_seconds_alone(p, StepTime(GPUS[cell.gpu])) for p in programs) / len(programs)
        return Workload(cell.name, poisson(programs, slots / alone, seed) + plain)
    return closed_loop(cell.name, programs + plain, slots, 20.0, seed)


def _count(cell: Cell, slots: int) -> int:
    """Agents of one run: half of those that start at once are followed by another one."""
    return max(round((2.0 if cell.poisson else 1.5) * slots), 12)


def _seconds_alone(program: Program, step_time: StepTime) -> float:
    """Of a program that has the GPU, and its cache, for itself."""
    seconds, cached = 0.0, 0
    for turn in program.turns:
        seconds += step_time.prefill_seconds(max(1, turn.prompt_tokens - cached), cached) + turn.tool_seconds
        seconds += turn.output_tokens * step_time.step(1, 0.0, turn.prompt_tokens)
        cached = turn.prompt_tokens + turn.output_tokens
    return seconds


@lru_cache(maxsize=1)  # the policies of a cell and seed come one after another
def _workload(cell: Cell, seed: int) -> Workload:
    return build(cell, seed, Path(os.environ["KVQ_DATA"]), _tokenizer())


def run_task(task: Task) -> dict[str, Any]:
    """Simulate one task; called in a worker process."""
    import vllm

    from bench.clairvoyant import Clairvoyant
    from bench.simulate import Simulator, policy_maker
    from retention.policy import Policy

    cell = task.cell
    if not vllm.__version__.startswith(cell.vllm):
        raise ValueError(f"{vllm.__file__} is vLLM {vllm.__version__}, not {cell.vllm}")
    workload = _workload(cell, task.seed)
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
    key = {"cell": asdict(cell), "policy": task.policy, "settings": settings, "seed": task.seed}
    return {**key, "vllm": vllm.__version__, **row}


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


def run_all(
    tasks: Sequence[Task], workers: int, cache: Path | None, releases: dict[str, Path] | None = None
) -> list[dict[str, Any]]:
    """Run tasks in worker processes. cache: a JSONL file; what it holds of the same code is not run again. releases:
    folders of the other releases of vLLM that tasks want, by version.
    """
    from rich.progress import Progress

    code = code_digest()
    done: dict[Any, dict[str, Any]] = {}
    if cache is not None and cache.exists():
        for line in cache.open():
            row = json.loads(line)
            if row["code"] == code:
                done[_key(Cell(**row["cell"]), row["policy"], row["settings"], row["seed"])] = row
    todo = [t for t in tasks if _key(t.cell, t.policy, dict(t.settings), t.seed) not in done]
    with Progress(disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("simulations", total=len(todo))
        for row in _run(todo, workers, releases or {}):
            row["code"] = code
            done[_key(Cell(**row["cell"]), row["policy"], row["settings"], row["seed"])] = row
            if cache is not None:
                with cache.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            progress.advance(bar)
    return [done[_key(t.cell, t.policy, dict(t.settings), t.seed)] for t in tasks]


def _run(tasks: Sequence[Task], workers: int, releases: dict[str, Path]) -> Iterator[dict[str, Any]]:
    here = [t for t in tasks if not t.cell.vllm]
    if here:
        from bench.simulate import make_scheduler

        make_scheduler(16, 64)  # what takes long to load is loaded once, before the workers are forked
        with multiprocessing.get_context("fork").Pool(workers, initializer=_start_worker) as pool:
            yield from pool.imap_unordered(run_task, here)
    for version, folder in releases.items():
        there = [t for t in tasks if t.cell.vllm == version]
        if there:
            yield from _run_on(folder, there)


def _run_on(folder: Path, tasks: Sequence[Task]) -> Iterator[dict[str, Any]]:
    """In one process that finds vLLM in `folder`."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.retention_study"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert process.stdin and process.stdout
    process.stdin.write("".join(json.dumps(asdict(task)) + "\n" for task in tasks))
    process.stdin.close()
    for line in process.stdout:
        if line.startswith(ROW):  # vLLM logs to stdout too
            yield json.loads(line[len(ROW) :])
    if process.wait():
        raise RuntimeError(f"vLLM in {folder}: the simulations ended with exit code {process.returncode}")


def _serve() -> None:
    """The other side of `_run_on`."""
    _start_worker()
    for line in sys.stdin:
        task = json.loads(line)
        settings = tuple((name, value) for name, value in task["settings"])
        row = run_task(Task(Cell(**task["cell"]), task["policy"], settings, task["seed"]))
        print(ROW + json.dumps(row), flush=True)


def code_digest() -> str:
    """Of the code that decides the numbers of a simulation."""
    digest = hashlib.sha256()
    for pattern in CODE.split():
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


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


def plan(best: dict[str, dict[str, float]], seeds: int, releases: Iterable[str] = ()) -> list[Task]:
    """All cells under all policies; the pressure cells under `value` without admission; one cell on other releases."""
    tasks = []
    for seed in range(seeds):
        for cell in [*MAIN, *OTHERS]:
            tasks += [Task(cell, p, tuple(best.get(p, {}).items()), seed) for p in POLICIES]
        tasks += [Task(cell, "value", (("overcommit", 0.0),), seed) for cell in PRESSURE]
        tasks += [Task(replace(RELEASE, vllm=v), p, (), seed) for v in releases for p in RELEASE_POLICIES]
    return tasks


def _release(text: str) -> tuple[str, Path]:
    version, _, folder = text.partition("=")
    if not re.fullmatch(r"\d+\.\d+\.\d+", version) or not Path(folder, "vllm").is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be VERSION=FOLDER, with an unpacked wheel of vLLM in FOLDER")
    return version, Path(folder).resolve()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study (or take it from `--cache`) and write the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.simulate report", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of retention-simulated.md")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the traces")
    parser.add_argument("--cache", type=Path, help="JSONL of simulations, to go on after an interruption")
    parser.add_argument("--seeds", type=int, default=10, help="paired seeds of every cell (default 10)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    parser.add_argument(
        "--vllm", type=_release, nargs="*", default=[], metavar="VERSION=FOLDER",
        help="unpacked wheels of other releases, for one more cell each",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if not (args.data / "azure-llm").is_dir():
        raise FileNotFoundError(f"--data {args.data}: no azure-llm folder there")
    os.environ["KVQ_DATA"] = str(args.data.resolve())
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from bench.models import model_path

    os.environ.setdefault("KVQ_TOKENIZER", str(model_path("smollm2-135m")))
    started = time.monotonic()
    releases = dict(args.vllm)
    best = best_settings(args.workers, args.cache)
    tasks = plan(best, args.seeds, releases)
    rows = run_all(tasks, args.workers, args.cache, releases)
    from bench.retention_results import render

    args.out.mkdir(parents=True, exist_ok=True)
    minutes = (time.monotonic() - started) / 60
    (args.out / "retention-simulated.md").write_text(render(rows, best, args.seeds, list(releases), minutes))
    print(args.out / "retention-simulated.md")
    return 0


if __name__ == "__main__":
    _serve()
