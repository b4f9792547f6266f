"""The calls a scheduler makes, and the answers it gets.

A scheduler tells a `Policy` what happens to its requests and asks it which blocks to keep. The policy never touches a
block: it hands out leases, the scheduler remembers which blocks a lease stands for, in chain order (first block of the
prompt first), and lets go of the tail when the policy names the lease as a `Victim`.

    add_request          turn_arrived(TurnArrived)     -> Arrival       order in the waiting queue
    before it starts     admits(id)                    -> bool          False: leave it in the queue for now
    first allocation     turn_started(id, cached)      -> victims       the request holds the blocks now
    blocks are freed     turn_finished(TurnFinished)   -> Pin           lease, seconds, soft or hard, victims
    allocation is short  blocks_needed(Demand)         -> victims       in the order to give up
    every step, idle     tick(PoolState)               -> victims       leases that ended
    abort before blocks  aborted(id)

The order of events of a request: `turn_arrived`, `turn_started` at every successful first allocation (again after a
preemption: harmless), then exactly one of `turn_finished` (whatever the reason, whenever it holds or held blocks) or
`aborted` (it never got a block). A request the policy has not seen arrive (retention was enabled later) may be
finished. Requests without a program are reported too, with `program=None`: they are never retained, but the
guardrail's shadow LRU has to know what they displace.

**Retained blocks.** A *hard* lease holds references: its blocks are in use for everyone else. A *soft* lease only
orders the free queue: the scheduler allocates unretained free blocks first, and calls `blocks_needed` when those run
out. Soft blocks count as free for admission. A scheduler without control of the free queue may hold references for
soft leases too, and call `blocks_needed` whenever an allocation fails. When a lease ends, its blocks are freed as any
others are, tail first, so an expired lease is next in line after the blocks that were free before it.

**Shared blocks.** A block may be in several leases and in running requests; it is retained as long as one lease has it.
So victims may free fewer blocks than asked for: call `blocks_needed` again with what is still missing, until enough is
free or it returns nothing. Every call that returns something shrinks the leases, so the loop ends.

Not thread-safe: one policy belongs to one scheduler and its thread. Time comes from the injected monotonic clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from retention.hints import Hints
from retention.pins import Victim
from retention.programs import ProgramKey
from retention.toolcalls import ToolCall

NO_HINTS = Hints()


@dataclass(frozen=True)
class TurnArrived:
    """A request enters the waiting queue.

    program: None for a request that belongs to no program. prompt_tokens: length of the prompt.
    block_hashes: content hashes of the full prompt blocks, in order; without them the shadow LRU assumes that a program
    shares blocks with nobody.
    """

    request_id: str
    program: ProgramKey | None
    prompt_tokens: int
    block_hashes: Sequence[Hashable] = ()
    hints: Hints = NO_HINTS


@dataclass(frozen=True)
class Arrival:
    """order: sort key of the waiting queue, ascending (preempted requests stay in front of it).
    lease_id: the lease that this turn will reuse if it lasts, or None. It cannot expire while the turn waits.
    waited_s: seconds since the program's last turn finished (its tool time), or None.
    """

    order: tuple[int, float]
    lease_id: int | None = None
    waited_s: float | None = None


@dataclass(frozen=True)
class TurnFinished:
    """A request ends and its blocks are about to be freed.

    tokens: tokens with computed KV. blocks: full, hashed, not-null blocks a lease would keep (all groups together).
    shared_blocks: how many of those, at the head, someone else holds anyway. finish: vLLM's finish reason.
    tool_calls: calls seen in the output, () if there are none (a person is next), None if not known (yet).
    keep_tokens: length of the prefix known to be the same in the next prompt, None if not known. prefill_s: measured
    seconds of this turn's prefill, None if not measured. program: only for a request whose arrival was not reported.
    hints: if they differ from those at arrival.
    """

    request_id: str
    tokens: int
    blocks: int
    shared_blocks: int = 0
    finish: Literal["stop", "length", "abort", "error"] = "stop"
    tool_calls: Sequence[ToolCall] | None = None
    keep_tokens: int | None = None
    prefill_s: float | None = None
    block_hashes: Sequence[Hashable] = ()
    program: ProgramKey | None = None
    hints: Hints | None = None


@dataclass(frozen=True)
class Pin:
    """What to keep of a finished turn.

    lease_id: None when nothing is retained, and `reason` says why ("no_program", "aborted", "released", "no_value",
    "budget", "tenant_quota", "guardrail", "nothing_cached", "drift"); else it is "kept" or "clipped" (by the budget).
    blocks: keep the first `blocks` blocks under the lease and free the rest. ttl_s: seconds. hard: hold references.
    victims: let go of these first (stale branch, or cheaper leases that made room in the budget).
    """

    lease_id: int | None
    blocks: int = 0
    ttl_s: float = 0.0
    hard: bool = False
    reason: str = ""
    victims: tuple[Victim, ...] = ()


@dataclass(frozen=True)
class Demand:
    """blocks: how many more blocks an allocation needs than are free and unretained. request_id: for whom.
    running: it is running and would be preempted. stalled: nothing is running, so nothing else will free a block.
    """

    blocks: int
    request_id: str
    running: bool = False
    stalled: bool = False


@dataclass(frozen=True)
class PoolState:
    """total_blocks: usable blocks of the pool. free_blocks: free and not retained. waiting_requests, waiting_blocks:
    the queue, and the new blocks it needs (its first allocations). running_requests: requests that hold blocks and run.
    """

    total_blocks: int
    free_blocks: int
    waiting_requests: int = 0
    waiting_blocks: int = 0
    running_requests: int = 0
