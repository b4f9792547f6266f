"""vLLM's own Scheduler, KVCacheManager and BlockPool with a simulated model: agents, tool pauses, plain requests.

The model is a step-time formula (`bench.steptime`); tools pause a program between its turns. A retention policy acts on
the real block pool (`integration.pool`). Decode is fast-forwarded: while every running request decodes and nothing
but the policy's ticks happens before, k steps are scheduled as one, which allocates the same blocks and ends at the
same time. A request that only gets a few tokens longer within its last block is counted on by hand.
"""

from __future__ import annotations

import gc
import heapq
import json
import os
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.steptime import GPUS, LLAMA_3_8B_CONFIG, StepTime
from bench.workloads import BLOCK_SIZE, TOOL_MIXES, Program, Synthetic, Turn, Workload, closed_loop, plain_requests
from retention import ProgramKey, ToolCall, TurnArrived, TurnFinished, make_policy
from retention.policy import Policy

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

MAX_NUM_SEQS = 256
MAX_BATCHED_TOKENS = 8192
MAX_MODEL_LEN = 131072
TICK_SECONDS = 0.25


@dataclass
class TurnRecord:
    """What happened to one request; seconds of simulated time."""

    program: str
    index: int
    agent: bool
    arrival: float
    prompt_tokens: int
    scheduled: float = -1.0
    first_token: float = -1.0
    finished: float = -1.0
    cached_tokens: int = 0
    tool: str | None = None  # what came before this turn


@dataclass
class Result:
    """One simulated run."""

    turns: list[TurnRecord]
    program_seconds: dict[str, float]  # agents only: from arrival to the end of the last turn
    seconds: float
    computed_prefill_tokens: int
    preemptions: int
    steps: int
    schedule_calls: int
    retained_block_seconds: float = 0.0
    status: dict[str, Any] = field(default_factory=dict)


@lru_cache(maxsize=8)
def _vllm_config(block_size: int, max_model_len: int) -> Any:
    """vLLM's configuration of a Llama-3-8B: one a process, as it takes seconds to make."""
    for name, value in (("VLLM_LOGGING_LEVEL", "ERROR"), ("VLLM_NO_USAGE_STATS", "1"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(
            json.dumps(
                LLAMA_3_8B_CONFIG | {"max_position_embeddings": MAX_MODEL_LEN, "bos_token_id": 1, "eos_token_id": 2}
            )
        )
        model = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=max_model_len, enforce_eager=True
        )
        return VllmConfig(
            model_config=model,
            device_config=DeviceConfig(device="cpu"),
            cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=MAX_BATCHED_TOKENS,
                max_model_len=max_model_len,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
        )


def make_scheduler(num_blocks: int, block_size: int, max_model_len: int = MAX_MODEL_LEN) -> Any:
    """A vLLM Scheduler with `num_blocks` usable blocks (one more is vLLM's null block) of full attention."""
    config = _vllm_config(block_size, max_model_len)
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.num_gpu_blocks = num_blocks + 1
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
    )


PolicyMaker = Callable[["Simulator"], Policy]


def policy_maker(name: str, **settings: Any) -> PolicyMaker:
    """A policy of `retention` on the simulator's clock and pool."""
    return lambda sim: make_policy(
        name, total_blocks=sim.num_blocks, block_tokens=sim.workload.block_size, clock=sim.clock, **settings
    )


class Simulator:
    """One run of one workload under one policy.

    make_policy: None runs the stock scheduler without any hook. num_blocks: usable KV blocks, default what the GPU of
    `step_time` holds. fast_forward: False takes every decode step by itself (same results, slower).
    Raises ValueError for a turn that can never fit the pool.
    """

    def __init__(
        self,
        workload: Workload,
        make_policy: PolicyMaker | None = None,
        step_time: StepTime | None = None,
        num_blocks: int | None = None,
        fast_forward: bool = True,
        tick_seconds: float = TICK_SECONDS,
    ) -> None:
        from vllm import SamplingParams
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request

        from integration.pool import RetainedPool

        self._request, self._output = Request, ModelRunnerOutput
        self._sampling = lru_cache(maxsize=None)(lambda tokens: SamplingParams(max_tokens=tokens, ignore_eos=True))
        self.workload = workload
        self._step_time = step_time or StepTime(GPUS["H100"])
        self.num_blocks = num_blocks or self._step_time.pool_blocks(workload.block_size)
        self._check_fits()
        self._fast_forward = fast_forward
        self._tick_seconds = tick_seconds
        self._scheduler = make_scheduler(self.num_blocks, workload.block_size)
        self._scheduler.prev_step_scheduled_req_ids = _Everybody()
        self._now = 0.0
        self._policy_now = 0.0
        self._next_tick = 0.0
        self._events: list[tuple[float, int, Program, int]] = []  # (time, tie break, program, turn)
        self._sequence = 0
        self._records: dict[str, TurnRecord] = {}
        self._programs: dict[str, tuple[Program, int]] = {}  # request id -> program, turn
        self._started: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._returns: dict[ProgramKey, float] = {}  # when a paused program comes back; for the clairvoyant bound only
        self._backlog: list[Program] = []
        self._agents = sum(program.agent for program in workload.programs)
        self._refused = False  # the head of the waiting queue was refused and nothing has changed since
        self._nobody = type(self._scheduler.waiting)()
        self._computed_prefill = self._preemptions = self._steps = self._calls = 0
        self._retained = (
            RetainedPool(self._scheduler, make_policy(self), self._turn_finished, self.clock) if make_policy else None
        )
        if self._retained is None:
            free_blocks = self._scheduler._free_blocks

            def finished(request):  # type: ignore[no-untyped-def]
                self._turn_finished(request, 0, 0)
                free_blocks(request)

            self._scheduler._free_blocks = finished

    def clock(self) -> float:
        """The policy's time: that of the last event or tick, so that it does not depend on fast-forwarding."""
        return self._policy_now

    def return_time(self, program: ProgramKey) -> float | None:
        """When a paused program will come back, None if never. The future: for the clairvoyant bound only."""
        return self._returns.get(program)

    def run(self) -> Result:
        """Simulate until every agent has ended (plain requests may be left over)."""
        with _no_gc():
            self._admit_first()
            while self._unfinished():
                self._deliver()
                self._tick()
                if not self._scheduler.has_unfinished_requests() or not self._step():
                    self._wait()
        return self._result()

    def _unfinished(self) -> bool:
        """Some agent has not ended; without agents, some request."""
        if self._agents:
            return len(self._ended) < self._agents
        return bool(self._events) or self._scheduler.has_unfinished_requests()

    # Events.

    def _admit_first(self) -> None:
        agents = [p for p in self.workload.programs if p.agent]
        slots = self.workload.concurrency
        if slots is not None:
            self._backlog = agents[slots:][::-1]
            agents = agents[:slots]
        for program in agents + [p for p in self.workload.programs if not p.agent]:
            self._push(program.arrival, program, 0)

    def _push(self, at: float, program: Program, turn: int) -> None:
        heapq.heappush(self._events, (at, self._sequence, program, turn))
        self._sequence += 1

    def _deliver(self) -> None:
        while self._events and self._events[0][0] <= self._now:
            at, _, program, index = heapq.heappop(self._events)
            self._arrive(at, program, index)

    def _arrive(self, at: float, program: Program, index: int) -> None:
        turn = program.turns[index]
        request_id = f"{program.id}#{index}"
        if index == 0:
            self._started[program.id] = at
        request = self._request(
            request_id,
            _Zeros(turn.prompt_tokens),
            self._sampling(turn.output_tokens),
            None,
            arrival_time=at,
            block_hasher=_hasher(turn, request_id, self.workload.block_size),
        )
        request.prefill_stats = None  # nobody reads them, and vLLM looks at every block for them
        before = program.turns[index - 1].tool if index else None
        self._records[request_id] = TurnRecord(program.id, index, program.agent, at, turn.prompt_tokens, tool=before)
        self._programs[request_id] = (program, index)
        self._refused = False
        self._policy_now = self._now
        if self._retained is None:
            self._scheduler.add_request(request)
        else:
            self._returns.pop(_key(program), None)
            self._retained.arrived(
                request,
                TurnArrived(
                    request_id,
                    _key(program) if program.agent else None,
                    turn.prompt_tokens,
                    request.block_hashes,
                ),
            )

    def _turn_finished(self, request: Request, blocks: int, shared: int) -> TurnFinished:
        """A request ended at `self._now` (the step's end): plan the next turn, and say what the policy may know."""
        program, index = self._programs.pop(request.request_id)
        record = self._records[request.request_id]
        record.finished = self._now
        turn = program.turns[index]
        if index + 1 < len(program.turns):
            self._returns[_key(program)] = self._now + turn.tool_seconds
            self._push(self._now + turn.tool_seconds, program, index + 1)
        elif program.agent:
            self._ended[program.id] = self._now
            if self._backlog:
                self._push(self._now, self._backlog.pop(), 0)
        self._refused = False
        self._policy_now = self._now
        # The last turn looks like the others: it calls no tool, as a turn that waits for a person does.
        called = turn.tool is not None and turn.tool != "human"
        return TurnFinished(
            request.request_id,
            tokens=request.num_computed_tokens,
            blocks=blocks,
            shared_blocks=shared,
            finish="stop",
            tool_calls=(ToolCall(turn.tool, turn.tool_args),) if called else (),  # type: ignore[arg-type]
            prefill_s=record.first_token - record.scheduled,
            block_hashes=request.block_hashes,
        )

    def _tick(self) -> None:
        if self._now < self._next_tick:
            return
        self._policy_now = self._now
        self._next_tick = self._now + self._tick_seconds
        if self._retained is not None:
            self._retained.tick()
            self._refused = False

    def _wait(self) -> None:
        """Nothing could be scheduled: time passes until something may have changed."""
        times = [self._next_tick] if self._retained is not None and self._retained.leases else []
        if self._events:
            times.append(self._events[0][0])
        if not times:
            raise RuntimeError(f"{len(self._scheduler.waiting)} requests wait, nothing runs and nothing will change")
        self._now = max(self._now, min(times))

    # Steps.

    def _step(self) -> bool:
        """Schedule and run one step, or several decode steps as one. False: nothing was scheduled."""
        scheduler = self._scheduler
        count, now = self._decode_steps()
        quiet, others = self._quiet(count)
        scheduled: dict[str, int] = {}
        if others or not quiet:
            output = self._schedule(count, quiet, others)
            scheduled = output.num_scheduled_tokens
            if not scheduled:
                return False
        if count:
            self._now = now
            sampled: list[list[int]] = [[0] for _ in scheduled]
        else:
            sampled = self._run_step(scheduled, quiet)
        steps = count or 1
        self._steps += steps
        tokens = [0] * steps
        for request in quiet:
            request.num_computed_tokens += steps
            request.append_output_token_ids(tokens)
        if scheduled:
            names = list(scheduled)
            index = dict(zip(names, range(len(names))))
            scheduler.update_from_output(output, self._output(names, index, sampled_token_ids=sampled))
        return True

    def _schedule(self, count: int, quiet: list[Request], others: list[Request]) -> SchedulerOutput:
        """One call of the scheduler, which does not see the quiet requests; count: see `_quiet`."""
        scheduler = self._scheduler
        waiting, running = scheduler.waiting, scheduler.running
        if count:
            more = [0] * (count - 1)  # the last token comes from update_from_output
            for request in others:
                request.append_output_token_ids(more)
            scheduler.waiting = self._nobody  # its head was refused; a tick may have changed that for later steps only
        if quiet:
            scheduler.running = others.copy()
            scheduler.max_num_scheduled_tokens = MAX_BATCHED_TOKENS - (0 if count else len(quiet))
        output: SchedulerOutput = scheduler.schedule()
        scheduler.waiting = waiting
        if quiet:
            scheduler.running = running + scheduler.running[len(others) :]
            scheduler.max_num_scheduled_tokens = MAX_BATCHED_TOKENS
        self._calls += 1
        self._preemptions += len(output.preempted_req_ids or ())
        return output

    def _quiet(self, count: int) -> tuple[list[Request], list[Request]]:
        """The running requests in two parts, for `count` decode steps or, if that is 0, one step of any kind: those
        for which nothing happens but that they are a few tokens longer, and the others.

        The quiet ones neither end nor need a block nor fill one. The scheduler does not see them: it would change
        nothing else of theirs, and what it does to the others does not depend on them, as long as it does not have to
        preempt, sees that something runs, and has no more tokens and places to give away than it would have.
        """
        scheduler = self._scheduler
        running = scheduler.running
        if not self._fast_forward or not running:
            return [], running
        size, steps = self.workload.block_size, count or 1
        quiet: list[Request] = []
        others: list[Request] = []
        for request in running:
            done = len(request._output_token_ids)
            if not count and (request.is_prefill_chunk or not done):
                return [], running
            inside = request.num_computed_tokens % size
            if 0 < inside < size - steps and request.max_tokens - done > steps:
                quiet.append(request)
            else:
                others.append(request)
        if not count:
            if not others:
                others.append(quiet.pop())
            free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            if free < len(others) or len(running) + len(scheduler.waiting) > MAX_NUM_SEQS:
                return [], running
        return quiet, others

    def _run_step(self, scheduled: dict[str, int], quiet: list[Request]) -> list[list[int]]:
        """Take the time of one step of these tokens and of one token of each quiet request. Returns the sampled tokens
        of the former.
        """
        requests = self._scheduler.requests
        pairs, kv_tokens, decoding = 0.0, 0, len(quiet)
        for request in quiet:
            kv_tokens += request.num_computed_tokens
        sampled: list[list[int]] = []
        first: list[TurnRecord] = []
        for request_id, tokens in scheduled.items():
            request = requests[request_id]
            context = request.num_computed_tokens - tokens
            kv_tokens += context
            complete = not request.is_prefill_chunk
            sampled.append([0] if complete else [])
            if tokens == 1 and request._output_token_ids:
                decoding += 1
                continue
            pairs += tokens * (context + tokens / 2)
            self._computed_prefill += tokens
            record = self._records[request_id]
            if record.scheduled < 0:
                record.scheduled = self._now
                record.cached_tokens = context
            if complete and record.first_token < 0:
                first.append(record)
        self._now += self._step_time.step(sum(scheduled.values()) + len(quiet), pairs, kv_tokens)
        for record in first:
            record.first_token = self._now
        waiting = bool(self._scheduler.waiting)
        self._refused = waiting and decoding == len(scheduled) + len(quiet) == len(self._scheduler.running)
        return sampled

    def _decode_steps(self) -> tuple[int, float]:
        """(how many decode steps can be taken as one, when the last one ends); (0, 0.0) if something else may happen.

        Until then all running requests decode and none ends before the last step, the head of the waiting queue stays
        refused, no event comes, and free blocks suffice (nothing is preempted). Ticks on the way are made here, at
        their times.
        """
        scheduler = self._scheduler
        running = scheduler.running
        if not self._fast_forward or not running:
            return 0, 0.0
        if scheduler.waiting and not self._refused:
            self._refused = self._head_is_held()
            if not self._refused:
                return 0, 0.0
        limit = MAX_BATCHED_TOKENS // len(running)
        for request in running:
            if request.is_prefill_chunk or not request._output_token_ids:
                return 0, 0.0
            limit = min(limit, request.max_tokens - len(request._output_token_ids))
        size = self.workload.block_size
        grow = sorted(
            step
            for request in running
            for step in range(size - (request.num_computed_tokens - 1) % size, limit + 1, size)
        )  # the steps at which a request takes one more block
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if len(grow) > free:
            limit = grow[free] - 1
        if limit < 1:
            return 0, 0.0
        event = self._events[0][0] if self._events else float("inf")
        batch, kv_tokens = len(running), sum(request.num_computed_tokens for request in running)
        fixed, per_token = self._step_time.decode(batch)
        queue = self._retained.queue if self._retained is not None else None
        count, at, ticked = 0, self._now, False
        while count < limit and (at < event or not count):
            if queue is not None and count and at >= self._next_tick:
                if not ticked:  # so many steps take their blocks from the front, whatever a tick adds to the end
                    ticked = True
                    if len(grow) > queue.unretained:
                        limit = grow[queue.unretained] - 1
                        if count >= limit:
                            break
                if not self._tick_during_decode(at, bisect_right(grow, count)):
                    break
            at += fixed + kv_tokens * per_token
            kv_tokens += batch
            count += 1
        return count, at

    def _head_is_held(self) -> bool:
        """The policy does not let the head of the waiting queue start, whatever is free: no need to try."""
        head = next(iter(self._scheduler.waiting))
        return self._retained is not None and not self._retained.policy.admits(head.request_id)

    def _tick_during_decode(self, at: float, taken: int) -> bool:
        """A tick between two decode steps, `taken` blocks later. False if the waiting queue may move after it."""
        assert self._retained is not None
        policy, head = self._retained.policy, next(iter(self._scheduler.waiting), None)
        admitted = head is None or policy.admits(head.request_id)
        hard = self._retained.holds_references
        self._policy_now = at
        self._next_tick = at + self._tick_seconds
        self._retained.tick(taken)
        if head is None or (not hard and policy.admits(head.request_id) == admitted):
            return True
        self._refused = False
        return False

    def _check_fits(self) -> None:
        size = self.workload.block_size
        for program in self.workload.programs:
            for turn in program.turns:
                blocks = -(-(turn.prompt_tokens + turn.output_tokens) // size)
                if blocks > self.num_blocks:
                    raise ValueError(f"{program.id} needs {blocks} blocks, num_blocks is {self.num_blocks}")

    def _result(self) -> Result:
        if self._retained is not None:
            self._policy_now = self._now
            status = self._retained.policy.status()
            self._retained.close()
        else:
            status = {}
        return Result(
            turns=list(self._records.values()),
            program_seconds={name: end - self._started[name] for name, end in self._ended.items()},
            seconds=self._now,
            computed_prefill_tokens=self._computed_prefill,
            preemptions=self._preemptions,
            steps=self._steps,
            schedule_calls=self._calls,
            retained_block_seconds=self._retained.block_seconds if self._retained is not None else 0.0,
            status=status,
        )


@contextmanager
def _no_gc() -> Iterator[None]:
    """For millions of short-lived objects with no cycles among them, and for modules that stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Zeros(Sequence[int]):
    """The tokens of a prompt, all 0: what says which tokens they are is the hashes of their blocks."""

    __slots__ = ("_count",)

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, item):  # type: ignore[no-untyped-def]
        return self.copy()[item]

    def copy(self) -> list[int]:
        return [0] * self._count


class _Everybody(set[str]):
    """Of whom the worker knows all tokens: vLLM copies those of everybody else, and there is no worker."""

    def __contains__(self, item: object) -> bool:
        return True


def _key(program: Program) -> ProgramKey:
    return ProgramKey(program.id, program.tenant)


def _hasher(turn: Turn, request_id: str, block_size: int) -> Callable[[Request], list[bytes]]:
    """vLLM's block hasher for one request: the turn's own block identities, then private ones."""
    blocks = turn.blocks

    def hashes(request: Request) -> list[bytes]:
        have, full = len(request.block_hashes), request.num_tokens // block_size
        if full <= have:
            return []
        known = list(blocks[have:full])
        return known + [f"{request_id}/{i}".encode() for i in range(have + len(known), full)]

    return hashes


def main(argv: list[str] | None = None) -> int:
    """`report`: the whole study, to a file. `run`: one synthetic workload under one policy, printed."""
    import argparse
    import sys

    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["report"]:
        from bench import retention_study

        return retention_study.main(argv[1:])
    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description=__doc__.split("\n")[0])
    command = parser.add_subparsers(dest="command", required=True)
    command.add_parser("report", help="run the retention study and write its report", add_help=False)
    run = command.add_parser("run", help="simulate one synthetic workload")
    run.add_argument("--policy", default="value", help="a retention policy, or none for the stock scheduler")
    run.add_argument("--gpu", choices=sorted(GPUS), default="H100")
    run.add_argument("--blocks", type=int, help="KV blocks of 64 tokens (default: what the GPU holds)")
    run.add_argument("--programs", type=int, default=100)
    run.add_argument("--turns", type=int, nargs="+", default=[10], help="turns of a program; several: drawn from them")
    run.add_argument("--concurrency", type=int, default=16, help="agents at once")
    run.add_argument("--tools", choices=sorted(TOOL_MIXES), default="coding")
    run.add_argument("--tool-frequency", type=float, default=1.0, help="share of turns that call a tool")
    run.add_argument("--tool-scale", type=float, default=1.0, help="factor on all tool times")
    run.add_argument("--max-context", type=int, help="tokens, ends a program (default: 65536, or the pool if smaller)")
    run.add_argument("--fillers", type=float, default=0.0, help="plain requests a second")
    run.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    from bench.retention_study import summarize

    started = time.perf_counter()
    step_time = StepTime(GPUS[args.gpu])
    pool = (args.blocks or step_time.pool_blocks(BLOCK_SIZE)) * BLOCK_SIZE
    workload = Synthetic(
        programs=args.programs,
        turns=args.turns,
        tools=args.tools,
        tool_frequency=args.tool_frequency,
        tool_scale=args.tool_scale,
        max_context=args.max_context or min(65536, pool),
    ).build(args.seed)
    programs = workload.programs
    if args.fillers:
        turns = sum(len(p.turns) for p in programs)
        programs += plain_requests(int(args.fillers * 30 * turns / args.concurrency) + 1, args.fillers, args.seed)
    workload = closed_loop(workload.name, programs, args.concurrency, 20.0, args.seed)
    maker = None if args.policy == "none" else policy_maker(args.policy)
    with _no_gc():
        simulator = Simulator(workload, maker, step_time, args.blocks)
    cpu = time.process_time()
    result = simulator.run()
    cpu = time.process_time() - cpu
    turns = len(result.turns)
    for name, value in summarize(result).items():
        print(f"{name:18} {value:14.3f}")
    print(f"{'simulated seconds':18} {result.seconds:14.3f}")
    print(f"{'real seconds':18} {time.perf_counter() - started:14.3f}  with loading vLLM and making the workload")
    print(f"{'processor seconds':18} {cpu:14.3f}  of the simulation, {1e3 * cpu / turns:.2f} ms a turn, one core")
    print(f"{'schedule() calls':18} {result.schedule_calls:14d}  for {result.steps} steps")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
