"""Programs (agents): who they are, which turn they are in, and what they wait for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from retention.ttl import Calls, Record

PROBE_TURNS = 8  # a limit on what is kept is lifted for one turn after so many, to see whether it still holds


class ProgramKey(NamedTuple):
    """Identity of a program. Everything that keeps KV caches apart is part of it, so a lease of one tenant, salt or
    adapter can never be reached, extended or replaced through the same program id of another.

    program_id: the caller's name for the agent. tenant: trusted owner. salt: vLLM's cache_salt. adapter: LoRA name.
    """

    program_id: str
    tenant: str = ""
    salt: str = ""
    adapter: str = ""


class Program:
    """What is known of one program. Times are the policy's clock, in seconds.

    live: its requests that have arrived and not ended. finished_at: when its last turn ended, None before that and
    after its return. calls: what that turn called. predicted_s: the median wait for it, None if most
    never return. record: the censored wait, if the predictor was told of one.
    """

    __slots__ = (
        "calls", "finished_at", "first_arrival", "key", "last_active", "lease_id", "live", "predicted_s",
        "prompt_tokens", "record", "turns", "_limit", "_limited_turns",
    )  # fmt: skip

    def __init__(self, key: ProgramKey, now: float) -> None:
        self.key = key
        self.first_arrival = self.last_active = now
        self.turns = 0
        self.live = 0
        self.finished_at: float | None = None
        self.calls: Calls = None
        self.record: Record | None = None
        self.predicted_s: float | None = None
        self.lease_id: int | None = None
        self.prompt_tokens = 0
        self._limit: int | None = None  # tokens worth keeping; -1: the prompt without the output
        self._limited_turns = 0

    def learn_prefix(self, matched: int, kept: int, block_tokens: int) -> bool:
        """The return hit `matched` of `kept` retained tokens. Less than all means that the next prompt is not the old
        one continued: templates that drop the reasoning diverge where the output began, headers that change with each
        request diverge at a fixed place. Keep no more than that from now on. Returns whether it diverged.
        """
        slack = 2 * block_tokens  # the last block is partial, and vLLM computes at least one token of a prompt
        if matched + slack > kept:
            return False
        self._limit = -1 if matched + slack > self.prompt_tokens else matched
        self._limited_turns = 0
        return True

    def worth_keeping(self, tokens: int) -> int:
        """How many of `tokens` the next prompt is expected to share."""
        if self._limit is None:
            return tokens
        self._limited_turns += 1
        if self._limited_turns > PROBE_TURNS:
            self._limit = None
            return tokens
        return min(tokens, self.prompt_tokens if self._limit == -1 else self._limit)


class ProgramRegistry:
    """The programs, least recently active first. Bounded: one that is idle for `idle_s` seconds is forgotten, and
    beyond `max_programs` the least recently active ones that have no request in flight.
    Raises ValueError for a bound that is not positive.
    """

    def __init__(self, max_programs: int = 10_000, idle_s: float = 3600.0) -> None:
        if max_programs < 1:
            raise ValueError(f"max_programs must be at least 1, got {max_programs}")
        if not idle_s > 0.0:
            raise ValueError(f"idle_s must be positive, got {idle_s}")
        self._max, self._idle_s = max_programs, idle_s
        self._programs: OrderedDict[ProgramKey, Program] = OrderedDict()

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[Program]:
        """The programs, the least recently active first."""
        return iter(self._programs.values())

    def get(self, key: ProgramKey) -> Program | None:
        return self._programs.get(key)

    def touch(self, key: ProgramKey, now: float) -> Program:
        """The program, new if it was unknown, as most recently active."""
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = Program(key, now)
        self._programs.move_to_end(key)
        program.last_active = now
        return program

    def forget(self, key: ProgramKey) -> Program | None:
        return self._programs.pop(key, None)

    def sweep(self, now: float) -> list[Program]:
        """Forget by the rule and return the forgotten. A few at a time, so that no step takes long."""
        forgotten: list[Program] = []
        for _ in range(16):
            oldest = next(iter(self._programs.values()), None)
            if oldest is None or (len(self._programs) <= self._max and now - oldest.last_active <= self._idle_s):
                break
            if oldest.live > 0:
                self.touch(oldest.key, now)
            else:
                forgotten.append(self._programs.pop(oldest.key))
        return forgotten
