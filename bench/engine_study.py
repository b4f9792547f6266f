"""Retention on a real engine under load: ``python -m bench.engine_study --json FILE``.

One engine with the weights of a Llama-3-8B *shape* (random: they cost the same time) serves every scenario. Three arms
see the same requests: "none" (no prefix reuse: each request has a cache salt of its own), "prefix" (vLLM's prefix
caching), and "retention" (the same after `integration.enable`).

* isolation: an agent pauses while 60 requests of others pass, then returns to an idle engine. They pass as a stream,
  four in flight, and (arm "retention, burst") all at once.
* agents: 150 agents, three turns each, start at random times, at a given number of requests a second in all; each rate
  is run once before, uncounted.
* overhead: step time of a decode batch without any agent, retention on and off in turn.

``--small`` is the same on a tiny model, for a CPU.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.steptime import LLAMA_3_8B_CONFIG
from bench.workloads import TOOL_MIXES, draw_tool

ARMS = ("none", "prefix", "retention")
TINY = LLAMA_3_8B_CONFIG | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Settings:
    """Tokens where nothing else is said. pool: KV tokens. windows: {requests a second: seconds after which a cell is
    cut}. repeats: of the isolation scenario.
    """

    model: dict[str, Any] = field(default_factory=lambda: LLAMA_3_8B_CONFIG)
    block: int = 16
    pool: int = 65_536
    isolation_context: int = 8192
    others: int = 60
    others_in_flight: int = 4
    repeats: int = 1
    agents: int = 150
    turns: int = 3
    system: int = 1024
    first: tuple[int, int] = (2048, 4096)
    tool_result: tuple[int, int] = (128, 768)
    output: int = 32
    windows: dict[float, float] = field(default_factory=lambda: {16.0: 22.0, 4.0: 12.0, 1.0: 8.0})
    tools: str = "coding"
    tool_scale: float = 1.0
    step_tokens: int = 2048
    overhead_batch: int = 64
    overhead_steps: int = 100
    overhead_rounds: int = 4


SMALL = Settings(
    model=TINY,
    block=32,
    pool=4096,
    isolation_context=512,
    others=12,
    repeats=1,
    agents=20,
    system=64,
    first=(128, 256),
    tool_result=(32, 64),
    output=8,
    windows={16.0: 6.0, 4.0: 3.0},
    tool_scale=0.1,
    step_tokens=512,
    overhead_batch=8,
    overhead_steps=40,
    overhead_rounds=3,
)


def start(settings: Settings) -> Any:
    """A `vllm.LLM` with random weights of the settings' shape."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for key, value in (
        ("VLLM_LOGGING_LEVEL", "WARNING"),
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
    ):
        os.environ.setdefault(key, value)
    import torch
    from vllm import LLM

    folder = Path(tempfile.mkdtemp(prefix="kvq-shape-"))
    (folder / "config.json").write_text(json.dumps(settings.model))
    longest = max(
        settings.isolation_context + 64 + 2 * settings.output,
        settings.system + settings.first[1] + settings.turns * (settings.output + settings.tool_result[1]),
    )
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=settings.model["torch_dtype"],
        max_model_len=-(-longest // settings.block) * settings.block,
        gpu_memory_utilization=0.85,
        block_size=settings.block,
        num_gpu_blocks_override=settings.pool // settings.block + 1,
        enable_prefix_caching=True,
        enforce_eager=not torch.cuda.is_available(),
        max_num_seqs=64,
        max_num_batched_tokens=settings.step_tokens,
        seed=0,
    )


@dataclass
class Turn:
    """One request. due, first_token, finished: seconds from the start of its cell, nan if it did not come to that."""

    agent: int
    turn: int
    prompt_tokens: int
    due: float
    first_token: float = float("nan")
    finished: float = float("nan")
    cached_tokens: int = 0


class Engine:
    """An engine in this process, stepped by hand. llm: one that is there already, else one is started. events: file for
    the event log of retention, which says why a lease was given up.
    """

    def __init__(self, settings: Settings, llm: Any = None, events: Path | None = None) -> None:
        began = time.perf_counter()
        self.settings, self.events = settings, events
        self.llm = llm if llm is not None else start(settings)
        self.started_s = time.perf_counter() - began
        self.core = self.llm.llm_engine
        self._number = 0

    def send(self, prompt: list[int], tokens: int, *, salt: bool = False, hints: dict[str, Any] | None = None) -> str:
        from vllm import SamplingParams

        self._number += 1
        request_id = f"study-{self._number}"
        inputs: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt:
            inputs["cache_salt"] = request_id
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=hints
        )
        self.core.add_request(request_id, inputs, sampling)
        return request_id

    def drain(self) -> None:
        while self.core.has_unfinished_requests():
            self.core.step()

    def reset(self, abort: list[str]) -> None:
        """Nothing runs and nothing is cached."""
        if abort:
            self.core.abort_request(abort)
        self.drain()
        for _ in range(3):  # a step may still be on its way
            if self.llm.reset_prefix_cache():
                return
            self.core.step()
        raise RuntimeError("the prefix cache cannot be reset although no request runs")

    def retention(self, arm: str) -> Any:
        """Context manager: retention in this arm only."""
        if arm != "retention":
            return nullcontext()
        from integration import enable

        return enable(self.llm, events=self.events)

    def first_token(self, prompt: list[int], *, salt: bool, hints: dict[str, Any]) -> tuple[float, int, list[int]]:
        """(seconds to the first token, cached tokens, output) of one request on an idle engine, run to its end."""
        began = time.perf_counter()
        self.send(prompt, self.settings.output, salt=salt, hints=hints)
        ttft, cached, output = 0.0, 0, []
        while self.core.has_unfinished_requests():
            for answer in self.core.step():
                output = list(answer.outputs[0].token_ids)
                if output and not ttft:
                    ttft, cached = time.perf_counter() - began, answer.num_cached_tokens or 0
        return ttft, cached, output


def tokens(rng: random.Random, count: int, settings: Settings) -> list[int]:
    return rng.choices(range(2, settings.model["vocab_size"] - 2), k=count)


def warm_up(engine: Engine) -> None:
    """A prefill, and a short one behind a hit: what is compiled or loaded on first use counts in no cell."""
    settings, rng = engine.settings, random.Random(1)
    prompt = tokens(rng, settings.isolation_context, settings)
    _, _, output = engine.first_token(prompt, salt=False, hints={})
    engine.first_token(prompt + output + tokens(rng, 64, settings), salt=False, hints={})


def isolation(engine: Engine, arm: str, burst: bool = False) -> dict[str, Any]:
    """One agent's return after `others` requests of others, `others_in_flight` at a time, or all at once."""
    settings = engine.settings
    salt = arm == "none"
    samples: list[dict[str, Any]] = []
    for repeat in range(settings.repeats):
        rng = random.Random(repeat)
        prompt = tokens(rng, settings.isolation_context, settings)
        result = tokens(rng, 64, settings)
        others = [tokens(rng, settings.isolation_context, settings) for _ in range(settings.others)]
        hints = {"kvq_program_id": f"agent-{repeat}", "kvq_tool_name": "Bash"}
        engine.reset([])
        with engine.retention(arm) as handle:
            cold, _, output = engine.first_token(prompt, salt=salt, hints=hints)
            if arm != "none":  # they change nothing for who keeps nothing
                while others or engine.core.has_unfinished_requests():
                    flying = engine.core.get_num_unfinished_requests()
                    while others and (burst or flying < settings.others_in_flight):
                        engine.send(others.pop(), 1)
                        flying += 1
                    engine.core.step()
            ttft, cached, _ = engine.first_token(prompt + output + result, salt=salt, hints=hints)
            counters = handle.metrics() if handle is not None else {}
        samples.append({"cold_s": cold, "ttft_s": ttft, "cached_tokens": cached, "counters": counters})
    return {
        "scenario": "isolation",
        "arm": arm + (", burst" if burst else ""),
        "context": settings.isolation_context,
        "others": settings.others,
        "ttft_s": statistics.median(s["ttft_s"] for s in samples),
        "samples": samples,
    }


def agents(engine: Engine, arm: str, rate: float, warm: bool = False) -> dict[str, Any]:
    """Agents at `rate` requests a second in all, until every one is done or the cell's window is over.

    warm: run the cell once before without counting it. Arms send the same lengths, and who sends one first pays for
    loading its kernels.
    """
    if warm:
        agents(engine, "prefix", rate)
    settings = engine.settings
    window = settings.windows[rate]
    rng = random.Random(7)
    system = tokens(rng, settings.system, settings)
    starts, at = [], 0.0
    for _ in range(settings.agents):
        starts.append(at)
        at += rng.expovariate(rate / settings.turns)
    prompts = [system + tokens(rng, rng.randint(*settings.first), settings) for _ in starts]
    pauses = [[draw_tool(TOOL_MIXES[settings.tools], rng) for _ in range(settings.turns)] for _ in starts]
    results = [
        [tokens(rng, rng.randint(*settings.tool_result), settings) for _ in range(settings.turns)] for _ in starts
    ]
    engine.reset([])
    queue = [(start, agent, 0) for agent, start in enumerate(starts)]
    in_flight: dict[str, Turn] = {}
    turns: list[Turn] = []
    counters: dict[str, Any] = {}
    with engine.retention(arm) as handle:
        began = time.perf_counter()

        def now() -> float:
            return time.perf_counter() - began

        while (queue or in_flight) and now() < window:
            while queue and queue[0][0] <= now():
                due, agent, number = heapq.heappop(queue)
                turn = Turn(agent, number, len(prompts[agent]), due)
                turns.append(turn)
                hints: dict[str, Any] = {"kvq_program_id": f"agent-{agent}"}
                if number + 1 < settings.turns:
                    hints["kvq_tool_name"] = pauses[agent][number][0]
                else:
                    hints["kvq_release"] = True
                in_flight[engine.send(prompts[agent], settings.output, salt=arm == "none", hints=hints)] = turn
            if not in_flight:
                time.sleep(max(0.0, min(queue[0][0], window) - now()))
                continue
            for answer in engine.core.step():
                turn = in_flight[answer.request_id]
                if turn.first_token != turn.first_token and answer.outputs[0].token_ids:
                    turn.first_token, turn.cached_tokens = now(), answer.num_cached_tokens or 0
                if answer.finished:
                    del in_flight[answer.request_id]
                    turn.finished = now()
                    if turn.turn + 1 < settings.turns:
                        agent = turn.agent
                        prompts[agent] = prompts[agent] + list(answer.outputs[0].token_ids) + results[agent][turn.turn]
                        pause = pauses[agent][turn.turn][1] * settings.tool_scale
                        heapq.heappush(queue, (turn.finished + pause, agent, turn.turn + 1))
        seconds = now()
        if handle is not None:
            counters = handle.metrics()
        engine.reset(list(in_flight))
    return {"scenario": "agents", "arm": arm, "rate": rate, **summarize(turns, seconds), "counters": counters}


def summarize(turns: list[Turn], seconds: float) -> dict[str, Any]:
    """Times to first token. A request still waiting when the cell was cut counts with the time it had waited, which is
    less than what it would have been."""

    def ttft(turn: Turn) -> float:
        return (turn.first_token if turn.first_token == turn.first_token else seconds) - turn.due

    row: dict[str, Any] = {"seconds": seconds, "started_agents": len({turn.agent for turn in turns})}
    for name, chosen in (("return", [t for t in turns if t.turn]), ("first", [t for t in turns if not t.turn])):
        times = sorted(map(ttft, chosen))
        row[name] = {
            "requests": len(times),
            "finished": sum(t.finished == t.finished for t in chosen),
            "cut": sum(t.first_token != t.first_token for t in chosen),
            "p50_s": times[(len(times) - 1) // 2] if times else None,
            "p95_s": times[-(-95 * len(times) // 100) - 1] if times else None,
            "cached": sum(t.cached_tokens for t in chosen) / max(1, sum(t.prompt_tokens for t in chosen)),
        }
    return row


def overhead(engine: Engine) -> dict[str, Any]:
    """Step times of a decode batch of requests without a program, retention off and on in turn."""
    settings = engine.settings
    rng = random.Random(11)
    prompts = [tokens(rng, 2 * settings.block, settings) for _ in range(settings.overhead_batch)]
    steps: dict[str, list[float]] = {"off": [], "on": []}
    cpu: dict[str, list[float]] = {"off": [], "on": []}

    def measure(side: str) -> None:
        engine.reset([])
        with engine.retention("retention" if side == "on" else "prefix"):
            sent = [engine.send(prompt, settings.overhead_steps + 40) for prompt in prompts]
            for _ in range(20):  # past the prefill
                engine.core.step()
            for _ in range(settings.overhead_steps):
                began, began_cpu = time.perf_counter(), time.thread_time()
                engine.core.step()
                steps[side].append(time.perf_counter() - began)
                cpu[side].append(time.thread_time() - began_cpu)
            engine.reset(sent)

    measure("off")  # warm-up
    steps["off"].clear()
    cpu["off"].clear()
    for number in range(settings.overhead_rounds):
        for side in ("off", "on") if number % 2 else ("on", "off"):
            measure(side)
    off, on = statistics.median(steps["off"]), statistics.median(steps["on"])
    return {
        "scenario": "overhead",
        "batch": settings.overhead_batch,
        "steps": len(steps["on"]),
        "off_ms": 1e3 * off,
        "on_ms": 1e3 * on,
        "percent": 100 * (on / off - 1),
        "cpu_off_ms": 1e3 * statistics.median(cpu["off"]),
        "cpu_on_ms": 1e3 * statistics.median(cpu["on"]),
    }


def cells(engine: Engine, scenario: str) -> Iterator[tuple[str, Any]]:
    """(name, function that measures it), the most telling first."""
    if scenario in ("isolation", "all"):
        for arm in ARMS:
            yield f"isolation {arm}", lambda arm=arm: isolation(engine, arm)
        yield "isolation retention, burst", lambda: isolation(engine, "retention", burst=True)
    if scenario in ("overhead", "all"):
        yield "overhead", lambda: overhead(engine)
    if scenario in ("agents", "all"):
        for rate in engine.settings.windows:
            for arm in reversed(ARMS):
                first = arm == ARMS[-1]
                yield f"agents {rate:g}/s {arm}", lambda a=arm, r=rate, f=first: agents(engine, a, r, warm=f)


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['cell']}: {row['error']}"
    if row["scenario"] == "isolation":
        cached = row["samples"][-1]["cached_tokens"]
        return f"isolation {row['arm']:<16} post-tool TTFT {1e3 * row['ttft_s']:8.1f} ms, cached {cached} tokens"
    if row["scenario"] == "overhead":
        return f"overhead: step {row['off_ms']:.3f} ms off, {row['on_ms']:.3f} ms on: {row['percent']:+.2f} %"
    back, first = row["return"], row["first"]
    return (
        f"agents {row['rate']:>4g}/s {row['arm']:<10} returns {back['requests']:4d} (cut {back['cut']}) "
        f"p50 {back['p50_s'] or 0:.3f} s p95 {back['p95_s'] or 0:.3f} s cached {back['cached']:.0%}; "
        f"first turns {first['requests']} (cut {first['cut']}) p95 {first['p95_s'] or 0:.3f} s"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engine_study", description=__doc__)
    parser.add_argument("--scenario", choices=("isolation", "agents", "overhead", "all"), default="all")
    parser.add_argument("--json", type=Path, help="write results here, after every cell")
    parser.add_argument("--events", type=Path, help="event log of retention, all cells in one file")
    parser.add_argument("--small", action="store_true", help="a tiny model and short cells, for a CPU")
    parser.add_argument("--pool", type=int, help="KV tokens (default 65536, small 4096)")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no cell after so many seconds")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    settings = SMALL if args.small else Settings()
    if args.pool is not None:
        if args.pool < 2 * settings.isolation_context:
            raise ValueError(f"--pool must be at least {2 * settings.isolation_context}, got {args.pool}")
        settings = replace(settings, pool=args.pool)
    engine = Engine(settings, events=args.events)
    import torch
    import vllm

    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    report: dict[str, Any] = {
        "command": " ".join(["python -m bench.engine_study", *(sys.argv[1:] if argv is None else argv)]),
        "machine": machine,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "settings": asdict(settings),
        "start_s": engine.started_s,
        "cells": [],
    }
    print(f"vLLM {vllm.__version__} on {machine}, started in {engine.started_s:.0f} s", flush=True)
    warm_up(engine)
    for name, measure in cells(engine, args.scenario):
        if time.perf_counter() - began > args.budget_s:
            row: dict[str, Any] = {"cell": name, "error": "not started: out of time"}
        else:
            try:
                row = measure()
            except Exception as error:  # the others are still worth having
                row = {"cell": name, "error": f"{type(error).__name__}: {error}"}
        report["cells"].append(row)
        print(f"{time.perf_counter() - began:6.1f} s  {line(row)}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
