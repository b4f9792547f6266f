"""Agent workloads for the simulator: recorded traces and synthetic programs, all in one form.

A program is a list of turns. Of each prompt the simulator needs its length and the identity of its full blocks: one
`bytes` per block, chained, so that equal values mean equal tokens up to there (what vLLM's block hash means).
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BLOCK_SIZE = 64  # tokens; the unit of claude-code-traces' hash_ids and of kvq's pages
OUTPUT_TOKENS = 200
HUMAN = "human"  # name of a wait on a person


@dataclass(frozen=True)
class Turn:
    """One request of a program.

    prompt_tokens, output_tokens: lengths. blocks: identities of the full blocks of prompt + output (at least of the
    prompt; blocks beyond it that the list lacks are private to the request). tool: what the program waits for after the
    turn, None when nothing follows. tool_seconds: how long; only the simulator and the clairvoyant bound read it.
    output_text: what the model wrote, where the trace has it.
    """

    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[bytes]
    tool: str | None
    tool_seconds: float = 0.0
    tool_args: str = ""


@dataclass
class Program:
    """One agent, or one plain request (`agent=False`: a single turn without an identity)."""

    id: str
    turns: list[Turn]
    arrival: float = 0.0
    agent: bool = True
    tenant: str = ""


@dataclass
class Workload:
    """Programs and how they arrive.

    concurrency: closed loop, so many agents at once, the next starts when one ends. None: open, at `Program.arrival`.
    Plain requests always arrive at their `arrival`.
    """

    name: str
    programs: list[Program]
    concurrency: int | None = None
    block_size: int = BLOCK_SIZE
    meta: dict[str, float | str] = field(default_factory=dict)

    @property
    def mean_context(self) -> float:
        """Mean over the agents' turns of prompt + output tokens: what one paused program holds."""
        sizes = [t.prompt_tokens + t.output_tokens for p in self.programs if p.agent for t in p.turns]
        return sum(sizes) / len(sizes) if sizes else 0.0


# Tool times


@dataclass(frozen=True)
class Quantiles:
    """A distribution given by quantiles, log-linear in between, from a hundredth of the first point up."""

    points: tuple[tuple[float, float], ...]  # (probability, seconds), ascending

    def sample(self, rng: random.Random) -> float:
        u = rng.random()
        ps, xs = zip(*self.points)
        i = bisect_right(ps, u)
        if i == len(ps):
            return xs[-1]
        p0, x0 = (0.0, xs[0] / 100) if i == 0 else self.points[i - 1]
        p1, x1 = self.points[i]
        return math.exp(math.log(x0) + (u - p0) / (p1 - p0) * (math.log(x1) - math.log(x0)))


# Measured quantiles of eunomia-bpf/agentcgroup (two setups) and callanjfox/kv-cache-tester. Beyond the last one nothing
# is known: the end is set to twice it.
BASH_LOCAL = Quantiles(((0.40, 0.7), (0.5, 6.51), (0.75, 8.68), (0.9, 10.8), (0.95, 13.5), (0.99, 26.0), (1.0, 52.0)))
READ_LOCAL = Quantiles(((0.5, 0.013), (0.75, 0.019), (0.9, 0.041), (0.95, 0.044), (0.99, 0.054), (1.0, 0.108)))
ALL_HAIKU = Quantiles(((0.5, 0.064), (0.75, 0.97), (0.9, 1.77), (0.95, 4.2), (0.99, 120.0), (1.0, 240.0)))
TASK_HAIKU = Quantiles(((0.5, 91.8), (0.75, 120.0), (0.9, 200.0), (0.95, 362.0), (1.0, 724.0)))
THINK = Quantiles(((0.01, 2.0), (0.5, 9.0), (0.75, 19.0), (0.9, 67.0), (0.95, 139.0), (0.99, 607.0), (1.0, 1214.0)))

ToolMix = tuple[tuple[float, str, Quantiles], ...]  # (share, tool, duration)
TOOL_MIXES: dict[str, ToolMix] = {
    # SWE-rebench by Claude Code, local model: half Bash, a fifth Read, the rest as quick as Read.
    "coding": ((0.5, "Bash", BASH_LOCAL), (0.2, "Read", READ_LOCAL), (0.3, "Edit", READ_LOCAL)),
    "haiku": ((0.985, "Bash", ALL_HAIKU), (0.015, "Task", TASK_HAIKU)),
    # Interactive sessions: the gap holds the tool, the client and a person's approval.
    "interactive": ((1.0, HUMAN, THINK),),
}


def draw_tool(mix: ToolMix, rng: random.Random) -> tuple[str, float]:
    """A tool and its seconds."""
    u = rng.random()
    for share, tool, durations in mix:  # noqa: B007
        u -= share
        if u < 0:
            break
    return tool, durations.sample(rng)


# Synthetic programs


@dataclass(frozen=True)
class Synthetic:
    """The course project's parameters.

    programs, turns: how many, and turns of each (`turns` may be a list to draw from). tool_frequency: share of turns
    that end in a tool call; the others wait for a person. tools: a name in TOOL_MIXES. system_tokens: prefix shared by
    all agents. first_tokens, tool_tokens: (low, high), uniform, of the first user message and of each tool result.
    reuse: share of turns whose prompt extends the last one; 0 is a workload that never reuses a prefix.
    """

    programs: int = 100
    turns: Sequence[int] = (10,)
    tool_frequency: float = 1.0
    tools: str = "coding"
    tool_scale: float = 1.0
    system_tokens: int = 2048
    first_tokens: tuple[int, int] = (500, 4000)
    tool_tokens: tuple[int, int] = (50, 1200)
    output_tokens: int = OUTPUT_TOKENS
    max_context: int = 32768
    reuse: float = 1.0

    def __post_init__(self) -> None:
        if self.tools not in TOOL_MIXES:
            raise ValueError(f"tools is {self.tools!r}, must be one of {sorted(TOOL_MIXES)}")
        for name in ("tool_frequency", "reuse"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be from 0 to 1")

    def build(self, seed: int) -> Workload:
        """The workload of one seed."""
        rng = random.Random(seed)
        programs = []
        for number in range(self.programs):
            owner = f"{seed}/{number}"
            length = self.system_tokens + rng.randint(*self.first_tokens)
            shared = self.system_tokens // BLOCK_SIZE
            turns: list[Turn] = []
            wanted = rng.choice(self.turns)
            stream = 0
            blocks = _BlockStream("system", owner, shared)
            for k in range(wanted):
                if turns and rng.random() >= self.reuse:  # another conversation: nothing of the last prompt is kept
                    stream += 1
                    blocks = _BlockStream(f"{owner}/{stream}", owner, 0)
                last = k == wanted - 1 or length + self.output_tokens + self.tool_tokens[1] > self.max_context
                if rng.random() < self.tool_frequency:
                    tool, seconds = draw_tool(TOOL_MIXES[self.tools], rng)
                else:
                    tool, seconds = HUMAN, THINK.sample(rng)
                turns.append(
                    Turn(
                        length,
                        self.output_tokens,
                        blocks.upto((length + self.output_tokens) // BLOCK_SIZE),
                        None if last else tool,
                        0.0 if last else seconds * self.tool_scale,
                    )
                )
                if last:
                    break
                length += self.output_tokens + rng.randint(*self.tool_tokens)
            programs.append(Program(f"agent-{owner}", turns))
        return Workload(f"synthetic/{self.tools}", programs)


class _BlockStream:
    """Block identities of one growing text: `shared` blocks of a common prefix, then the owner's."""

    def __init__(self, prefix: str, owner: str, shared: int) -> None:
        self._prefix, self._owner, self._shared = prefix, f"{prefix}/{owner}", shared
        self._ids: list[bytes] = []

    def upto(self, count: int) -> Sequence[bytes]:
        while len(self._ids) < count:
            n = len(self._ids)
            self._ids.append(_digest(self._prefix if n < self._shared else self._owner, n))
        return _Prefix(self._ids, count)


class _Prefix(Sequence[bytes]):
    """The first `count` items of a list that grows: a thousand programs of 50 turns must not copy their blocks."""

    __slots__ = ("_ids", "_count")

    def __init__(self, ids: list[bytes], count: int) -> None:
        self._ids, self._count = ids, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, item):  # type: ignore[no-untyped-def]
        if isinstance(item, slice):
            start, stop, step = item.indices(self._count)
            return self._ids[start:stop:step]
        if item >= self._count:
            raise IndexError(item)
        return self._ids[item]


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


# Recorded programs

Tokenizer = Callable[[str], Sequence[int]]


def agent_traces(
    folder: Path, tokenize: Tokenizer, tools: str = "coding", seed: int = 0, max_context: int = 32768
) -> list[Program]:
    """Programs of one folder of agent-traces (miniswe, taubench, magagent): a session a program, requests by time.

    The traces have no tool times apart from the model's: they are drawn from `tools`, as are tool names. A prompt
    longer than `max_context` ends its program.
    """
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"no *.jsonl in {folder}")
    programs = []
    for path in files:
        rng = random.Random(f"{seed}/{path.name}")
        rows = sorted((json.loads(line) for line in path.open()), key=lambda row: row["timestamp"])
        turns = []
        for i, row in enumerate(rows):
            tokens = tokenize(row["input"])
            if len(tokens) + OUTPUT_TOKENS > max_context:
                break
            tool, seconds = draw_tool(TOOL_MIXES[tools], rng)
            last = i == len(rows) - 1
            # The output's blocks stay private: these recordings do not put the output into the next prompt.
            wait = (None, 0.0) if last else (tool, seconds)
            turns.append(Turn(max(1, len(tokens)), OUTPUT_TOKENS, chain(tokens), *wait))
        if turns:
            programs.append(Program(f"{folder.name}-{path.stem.split('.')[0]}", _close(turns)))
    return programs


def claude_code_traces(
    folder: Path, max_context: int = 131072, scale: float = 1.0, tools: str | None = None, seed: int = 0
) -> list[Program]:
    """Programs of claude-code-traces, from their hash ids (64-token blocks, local to a session).

    scale: keeps that share of each prompt's blocks (first ones), to fit small GPUs. Tool seconds are the recorded
    `think_time`; `tools` draws them instead. A turn that the recording ended with tool use waits for its tool, any
    other for a person.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"no *.json in {folder}")
    programs = []
    for path in files:
        trace = json.loads(path.read_text())
        if trace["block_size"] != BLOCK_SIZE:
            raise ValueError(f"{path.name}: block_size is {trace['block_size']}, must be {BLOCK_SIZE}")
        rng = random.Random(f"{seed}/{path.name}")
        turns: list[Turn] = []
        requests = trace["requests"]
        for i, row in enumerate(requests):
            ids = row["hash_ids"][: max(1, int(len(row["hash_ids"]) * scale))]
            if len(ids) * BLOCK_SIZE + OUTPUT_TOKENS > max_context:
                break
            last = i == len(requests) - 1
            wait = float(requests[i + 1].get("think_time") or 0.0) if not last else 0.0
            tool = "tool" if row.get("stop") == "tool_use" else HUMAN
            if tools is not None and not last:
                tool, wait = draw_tool(TOOL_MIXES[tools], rng)
            prompt = len(ids) * BLOCK_SIZE if scale != 1.0 else max(int(row["in"]), 1)
            blocks = [_digest(path.stem, j, h) for j, h in enumerate(ids[: prompt // BLOCK_SIZE])]
            turns.append(Turn(prompt, OUTPUT_TOKENS, blocks, None if last else tool, wait))
        if turns:
            programs.append(Program(path.stem, _close(turns)))
    return programs


def azure_requests(
    path: Path, count: int, rate: float, seed: int = 0, start: float = 0.0, max_context: int = 8192
) -> list[Program]:
    """Plain requests with lengths and arrival pattern of the Azure code trace, sped up or down to `rate` a second.

    A random stretch of `count` rows is taken; no two share a prefix (the trace has no contents).
    """
    with path.open() as file:
        rows = [
            (row["TIMESTAMP"], int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)
        ]
    rng = random.Random(f"azure/{seed}")
    first = rng.randrange(max(1, len(rows) - count))
    rows = rows[first : first + count]
    times = [_seconds(stamp) for stamp, _, _ in rows]
    span = times[-1] - times[0]
    stretch = (len(rows) / rate) / span if span > 0 else 0.0
    return [
        Program(
            f"plain-{seed}-{i}",
            [Turn(min(max(context, 1), max_context), max(output, 1), (), None)],
            arrival=start + (time - times[0]) * stretch,
            agent=False,
        )
        for i, (time, (_, context, output)) in enumerate(zip(times, rows))
    ]


def plain_requests(
    count: int,
    rate: float,
    seed: int = 0,
    prompt: tuple[int, int] = (100, 3000),
    start: float = 0.0,
    name: str = "filler",
) -> list[Program]:
    """Filler agents: plain requests by Poisson at `rate` a second, uniform prompt lengths, nothing shared."""
    rng = random.Random(f"{name}/{seed}")
    time, programs = start, []
    for i in range(count):
        time += rng.expovariate(rate)
        turn = Turn(rng.randint(*prompt), OUTPUT_TOKENS, (), None)
        programs.append(Program(f"{name}-{seed}-{i}", [turn], arrival=time, agent=False))
    return programs


def poisson(programs: Sequence[Program], rate: float, seed: int = 0) -> list[Program]:
    """The programs with Poisson arrivals at `rate` a second."""
    rng = random.Random(f"poisson/{seed}")
    time, result = 0.0, []
    for program in programs:
        time += rng.expovariate(rate)
        result.append(Program(program.id, program.turns, time, program.agent, program.tenant))
    return result


def closed_loop(name: str, programs: Sequence[Program], concurrency: int, ramp: float, seed: int) -> Workload:
    """So many programs at once. The first ones start spread over `ramp` seconds."""
    rng = random.Random(f"ramp/{seed}")
    agents = [p for p in programs if p.agent]
    for program in agents[:concurrency]:
        program.arrival = rng.uniform(0, ramp)
    return Workload(name, list(programs), concurrency)


def repeat(programs: Sequence[Program], count: int, seed: int = 0) -> list[Program]:
    """`count` programs drawn from recorded ones, each with blocks of its own: copies must not hit one another."""
    rng = random.Random(f"repeat/{seed}")
    order: list[Program] = []
    while len(order) < count:
        order += rng.sample(list(programs), len(programs))
    result = []
    for i, program in enumerate(order[:count]):
        key = f"{seed}/{i}".encode()
        turns = [
            Turn(
                t.prompt_tokens,
                t.output_tokens,
                [hashlib.blake2b(b, digest_size=16, key=key).digest() for b in t.blocks],
                t.tool,
                t.tool_seconds,
                t.tool_args,
            )
            for t in program.turns
        ]
        result.append(Program(f"{program.id}-{i}", turns, program.arrival, program.agent, program.tenant))
    return result


def redraw_tools(programs: Sequence[Program], tools: str, scale: float, seed: int) -> list[Program]:
    """The programs with tools and times drawn anew from a mix, times multiplied by `scale`."""
    rng = random.Random(f"tools/{seed}")
    result = []
    for program in programs:
        turns = []
        for turn in program.turns:
            tool, seconds = draw_tool(TOOL_MIXES[tools], rng)
            if turn.tool is None:
                tool, seconds = None, 0.0  # type: ignore[assignment]
            turns.append(Turn(turn.prompt_tokens, turn.output_tokens, turn.blocks, tool, seconds * scale))
        result.append(Program(program.id, turns, program.arrival, program.agent, program.tenant))
    return result


def chain(tokens: Sequence[int], block_size: int = BLOCK_SIZE) -> list[bytes]:
    """Identities of the full blocks of real tokens."""
    result, parent = [], b""
    for end in range(block_size, len(tokens) + 1, block_size):
        block = ",".join(map(str, tokens[end - block_size : end])).encode()
        parent = hashlib.blake2b(parent + block, digest_size=16).digest()
        result.append(parent)
    return result


def _close(turns: list[Turn]) -> list[Turn]:
    """The last turn of a program waits for nothing."""
    last = turns[-1]
    turns[-1] = Turn(last.prompt_tokens, last.output_tokens, last.blocks, None)
    return turns


def _seconds(stamp: str) -> float:
    """Seconds of the day of the trace's `2023-11-16 18:17:03.9799600`."""
    hours, minutes, seconds = stamp.split(" ")[1].split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
