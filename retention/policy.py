"""The policy that a scheduler talks to: a rule, its books, the guardrail. The calls are explained in `interface`."""

from __future__ import annotations

import inspect
import logging
import math
import time
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from retention.events import EventLog
from retention.guardrail import Guardrail, ShadowLRU
from retention.hints import NEUTRAL_PRIORITY, Hints
from retention.interface import NO_HINTS, Arrival, Demand, Pin, PoolState, TurnArrived, TurnFinished
from retention.metrics import Metrics
from retention.pins import Lease, PinManager, Victim
from retention.programs import Program, ProgramKey, ProgramRegistry
from retention.rules import RULES, Rule
from retention.toolcalls import ToolCall
from retention.ttl import Calls

log = logging.getLogger(__name__)

POLICIES = tuple(RULES)
MAX_TTL_S = 24 * 3600.0  # of a hint
MAX_REQUESTS = 100_000  # in flight; a scheduler that loses more than this has the oldest forgotten
REVIEWS = 32  # leases that one call decides on again, so that no step takes long


class _Request:
    """A request in flight. sampled: its blocks in the shadow LRU, once it has started."""

    __slots__ = ("arrived", "cached", "hints", "lease_id", "program", "sampled", "started", "turn", "waited_s")

    def __init__(self, turn: TurnArrived, program: Program | None, now: float) -> None:
        self.turn = turn
        self.hints = turn.hints
        self.program = program
        self.arrived = now
        self.waited_s: float | None = None
        self.lease_id: int | None = None
        self.started = False
        self.cached = 0
        self.sampled: Sequence[Hashable] = ()


class Policy:
    """A rule, the books it keeps, and the guardrail, behind the calls of a scheduler. Made by `make_policy`.

    rule: what to keep and for how long. pins: the leases, read-only for others. Every call costs O(log n) in the number
    of leases, apart from the leases that it ends. Raises ValueError for numbers that make no sense.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        total_blocks: int,
        block_tokens: int = 16,
        clock: Callable[[], float] = time.monotonic,
        hard: bool = False,
        budget: float = 1.0,
        tenant_quota: float | None = None,
        max_wait_s: float = 10.0,
        whole: bool = False,
        guardrail: Guardrail | None = None,
        registry: ProgramRegistry | None = None,
        events: EventLog | None = None,
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        if not max_wait_s >= 0.0:
            raise ValueError(f"max_wait_s must be at least 0, got {max_wait_s}")
        self.rule = rule
        self.metrics = Metrics()
        self.pins = PinManager(
            total_blocks,
            rule.rank,
            self._record_victim,
            hard=hard,
            budget=budget,
            tenant_quota=tenant_quota,
            keep_fraction=1.0 if whole else rule.keep_fraction,
        )
        self._whole = whole
        self._programs = ProgramRegistry() if registry is None else registry
        self._block_tokens = block_tokens
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._time = -math.inf
        self._guardrail = guardrail
        self._shadow = ShadowLRU(total_blocks) if guardrail else None
        self._events = events
        self._requests: dict[str, _Request] = {}
        self._tick_at: float | None = None
        self._idle = False  # nothing ran at the last tick

    def turn_arrived(self, turn: TurnArrived) -> Arrival:
        """The program is back: learn how long its tool took, protect its lease while it waits, queue the turn."""
        _check("prompt_tokens", turn.prompt_tokens)
        now = self._now()
        self.aborted(turn.request_id)  # a scheduler that adds a request again starts it anew
        if len(self._requests) >= MAX_REQUESTS:
            self.aborted(next(iter(self._requests)))
        program = None if turn.program is None else self._programs.touch(turn.program, now)
        request = self._requests[turn.request_id] = _Request(turn, program, now)
        if program is None:
            return Arrival(self.rule.order(None, False, now))
        program.live += 1
        if program.finished_at is not None:
            request.waited_s = now - program.finished_at
            self._returned(program, request.waited_s)
        lease = self.pins.get(program.lease_id)
        if lease is not None:
            self.pins.claim(lease, now)
            request.lease_id = lease.id
        if self.rule.admission is not None and program.live == 1:
            if lease is not None:
                self.rule.admission.busy(program.key, turn.prompt_tokens / self._block_tokens)
            else:
                self.rule.admission.gone(program.key)
        return Arrival(self.rule.order(program, lease is not None, now), request.lease_id, request.waited_s)

    def admits(self, request_id: str) -> bool:
        """May this request start, as far as memory is concerned? Ask before its first allocation, at every step. False
        only for programs without a lease, while something runs, until `hold_s` after the program's first arrival.
        """
        admission, request = self.rule.admission, self._requests.get(request_id)
        if admission is None or request is None or request.program is None:
            return True
        if request.started or self._idle or self.pins.get(request.lease_id) is not None:
            return True
        now = self._now()
        need = request.turn.prompt_tokens / self._block_tokens
        overdue = now - request.program.first_arrival >= admission.hold_s
        return overdue or admission.admits(need, self.pins.total_blocks, now, new=request.program.turns == 0)

    def turn_started(self, request_id: str, cached_tokens: int) -> tuple[Victim, ...]:
        """The request got its blocks, `cached_tokens` of them by prefix hit. The lease it used is done (its blocks are
        the request's now), and a branch that the new prompt left is given up at once.
        """
        _check("cached_tokens", cached_tokens)
        request = self._requests.get(request_id)
        if request is None or request.started:
            return ()
        now = self._now()
        request.started = True
        request.cached = cached_tokens
        self._shadow_start(request, cached_tokens)
        program = request.program
        if program is None:
            return ()
        if self.rule.admission is not None:
            self.rule.admission.busy(program.key, request.turn.prompt_tokens / self._block_tokens)
        lease = self.pins.get(request.lease_id)
        if request.waited_s is not None:
            self.rule.queued(now - request.arrived, lease is not None)
        if lease is None:
            if request.waited_s is not None:
                self.metrics.inc("kvq_misses_total")
                self._emit(
                    "miss", program.key, tool=_tool(program.calls), waited_s=request.waited_s,
                    predicted_s=program.predicted_s, cached_tokens=cached_tokens,
                )  # fmt: skip
            return ()
        self.metrics.inc("kvq_reuse_total")
        self.metrics.inc("kvq_reused_tokens_total", cached_tokens)
        self._emit(
            "reuse", program.key, lease=lease.id, tool=_tool(lease.calls), tokens=lease.tokens, blocks=lease.blocks,
            cached_tokens=cached_tokens, waited_s=request.waited_s, ttl_s=lease.ttl_s, predicted_s=program.predicted_s,
        )  # fmt: skip
        if program.learn_prefix(cached_tokens, lease.tokens, self._block_tokens):
            self.metrics.inc("kvq_drift_total")
            return self._supersede(lease, cached_tokens, now)
        return self._end(lease.id, "reused", now)

    def turn_finished(self, turn: TurnFinished) -> Pin:
        """Decide whether to retain the turn's blocks. Call it before the blocks are freed."""
        for name in ("tokens", "blocks", "shared_blocks"):
            _check(name, getattr(turn, name))
        now = self._now()
        request = self._requests.pop(turn.request_id, None)
        if request is None:
            request = _Request(TurnArrived(turn.request_id, turn.program, turn.tokens), None, now)
            if turn.program is not None:
                request.program = self._programs.touch(turn.program, now)
                request.program.live += 1
        elif request.started and turn.prefill_s is not None:
            new = request.turn.prompt_tokens - request.cached
            self.rule.cost.observe(new, turn.prefill_s, request.cached)
        self._shadow_finish(request, turn)
        program = request.program
        if program is None:
            return self._reject("no_program")
        program.live -= 1
        self._unclaim(request, now)
        hints = turn.hints or request.hints
        aborted = turn.finish in ("abort", "error") and not hints.tool_pending
        admission = self.rule.admission
        if admission is not None and program.live == 0:
            admission.gone(program.key)
        if hints.release:
            return Pin(None, reason="released", victims=self.release(program.key))
        if aborted:
            return self._reject("aborted")
        self._programs.touch(program.key, now)
        program.turns += 1
        program.prompt_tokens = request.turn.prompt_tokens
        program.finished_at = now
        program.record = None
        program.calls = _known_calls(turn.tool_calls, hints)
        program.predicted_s = self.rule.predictor.curve(program.calls).median()
        if admission is not None and program.live == 0 and turn.blocks > 0:
            pool_s = self.rule.cost.saved_seconds(turn.tokens) / turn.blocks * self.pins.total_blocks
            wait = self.rule.predictor.curve(program.calls)
            admission.paused(program.key, turn.blocks, turn.shared_blocks, wait, pool_s, now)
        return self._retain(program, turn, hints, now)

    def blocks_needed(self, demand: Demand) -> tuple[Victim, ...]:
        """Give up at least `demand.blocks` blocks if the leases hold them, cheapest first. () means: it will not get
        better by asking again now. A soft lease always yields. A hard lease yields to a running request, to a stalled
        engine, and to a request that has waited longer than `max_wait_s`.
        """
        _check("blocks", demand.blocks)
        if len(self.pins) == 0:
            return ()
        now = self._now()
        request = self._requests.get(demand.request_id)
        overdue = request is not None and not request.started and now - request.arrived >= self._max_wait_s
        own = request.program.key if request is not None and request.program is not None else None
        used = self.pins.used
        victims = self._expire(now)
        missing = demand.blocks - (used - self.pins.used)
        if not self.pins.hard or demand.running or demand.stalled or overdue:
            victims += self.pins.give_up(missing, now, protect=own)
            if not victims and (demand.stalled or not self.pins.hard):
                victims += self.pins.give_up(missing, now)  # its own: a branch that its prompt has left
        return tuple(victims)

    def tick(self, pool: PoolState) -> tuple[Victim, ...]:
        """Let time pass: expiry, price of memory, second thoughts about tools that still run, guardrail."""
        for name in ("free_blocks", "waiting_requests", "waiting_blocks", "running_requests"):
            _check(name, getattr(pool, name))
        now = self._now()
        self._idle = pool.running_requests == 0
        if pool.total_blocks != self.pins.total_blocks:
            self.pins.resize(pool.total_blocks)
            if self._shadow is not None:
                self._shadow = ShadowLRU(pool.total_blocks)
        self.rule.price.update(
            now, total=pool.total_blocks, free=pool.free_blocks,
            waiting_requests=pool.waiting_requests, waiting_blocks=pool.waiting_blocks,
        )  # fmt: skip
        victims = self._expire(now)
        for program in self._programs.sweep(now):
            victims += self._forget(program, now, "forgotten")
        guard = self._guardrail
        if guard is not None:
            short = pool.waiting_blocks - pool.free_blocks
            if self.pins.hard and short > 0 and self.pins.used > 0 and self._tick_at is not None:
                share = min(1.0, self.pins.used / short)
                guard.queued((now - self._tick_at) * pool.waiting_requests * share)
            victims += self._check_guardrail(guard, now)
        self._tick_at = now
        return tuple(victims)

    def aborted(self, request_id: str) -> None:
        """A request ended without ever holding blocks. The lease it waited for lives on until its deadline."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if self._shadow is not None:
            self._shadow.finish(request.sampled, request.sampled)
        if request.program is not None:
            request.program.live -= 1
            if self.rule.admission is not None and request.program.live == 0:
                self.rule.admission.gone(request.program.key)
            self._unclaim(request, self._now())

    def tool_called(
        self, program: ProgramKey, calls: Sequence[ToolCall], hints: Hints = NO_HINTS
    ) -> tuple[Victim, ...]:
        """The front end saw, after the turn finished, which tools the program called. Decide again with that."""
        known = self._programs.get(program)
        if known is None or known.finished_at is None:
            return ()
        now = self._now()
        known.calls = _known_calls(calls, hints)
        known.record = None
        known.predicted_s = self.rule.predictor.curve(known.calls).median()
        lease = self.pins.get(known.lease_id)
        if lease is None:
            return ()
        lease.calls = known.calls
        ttl = self._ttl(lease, hints, now)
        if not ttl > 0.0:
            return self._end(lease.id, "repriced", now)
        self.pins.set_ttl(lease, ttl, now)
        self._plan_review(lease, now)
        return ()

    def release(self, program: ProgramKey) -> tuple[Victim, ...]:
        """The program is over. Idempotent; unknown programs are ignored."""
        known = self._programs.get(program)
        if known is None:
            return ()
        now = self._now()
        if known.live == 0:
            self._programs.forget(program)
        return tuple(self._forget(known, now, "released"))

    def reset(self) -> tuple[Victim, ...]:
        """End every lease (prefix cache reset, sleep, new weights, disable). What was learned is kept."""
        return self._end_all("reset", self._now())

    def programs(self) -> tuple[Program, ...]:
        """The programs that are remembered, the least recently active first. Read-only for others."""
        return tuple(self._programs)

    def status(self) -> dict[str, object]:
        """Live numbers: policy, leases, retained blocks, budget, price, guardrail, counters. JSON-able."""
        self.update_gauges()
        return {
            "policy": self.rule.name,
            "hard": self.pins.hard,
            "total_blocks": self.pins.total_blocks,
            "guardrail": "none" if self._guardrail is None else "off" if self._guardrail.off else "on",
            "prefill_coefficients": list(self.rule.cost.coefficients),
            "metrics": {
                s.name + (f"{{{s.label_value}}}" if s.label_value else ""): s.value for s in self.metrics.collect()
            },
        }

    def update_gauges(self) -> None:
        """Bring the gauges of `metrics` up to date, before they are read."""
        self.metrics.set("kvq_pins", len(self.pins))
        self.metrics.set("kvq_pinned_blocks", self.pins.used)
        self.metrics.set("kvq_budget_blocks", self.pins.budget_blocks)
        self.metrics.set("kvq_programs", len(self._programs))
        self.metrics.set("kvq_expected_blocks", self.rule.admission.charged if self.rule.admission else 0.0)
        self.metrics.set("kvq_memory_price", self.rule.price.per_block)
        self.metrics.set("kvq_guardrail_off", float(self._guardrail is not None and self._guardrail.off))
        if self._events is not None:
            self.metrics.set("kvq_events_dropped_total", self._events.dropped)

    def state(self) -> dict[str, object]:
        """What was learned (tool times, prefill cost), JSON-able, for `make_policy(state=...)` after a restart."""
        return {"predictor": self.rule.predictor.state(), "cost": self.rule.cost.state()}

    def _now(self) -> float:
        """The clock, which never goes backwards here."""
        now = self._clock()
        if now >= self._time:
            self._time = now
        else:
            if self.metrics.get("kvq_clock_backwards_total") == 0:
                log.warning("the clock went back by %.3f s; it is held until it has caught up", self._time - now)
            self.metrics.inc("kvq_clock_backwards_total")
        return self._time

    def _returned(self, program: Program, waited: float) -> None:
        self.rule.predictor.observe(program.calls, waited, program.record)
        self.rule.returned(program.calls, waited)
        program.finished_at = program.record = None
        if program.predicted_s is not None:
            self.metrics.inc("kvq_ttl_error_seconds_sum", abs(waited - program.predicted_s))
            self.metrics.inc("kvq_ttl_error_seconds_count")

    def _unclaim(self, request: _Request, now: float) -> None:
        lease = self.pins.get(request.lease_id)
        if lease is not None and not request.started:
            self.pins.unclaim(lease, now)

    def _retain(self, program: Program, turn: TurnFinished, hints: Hints, now: float) -> Pin:
        if self._guardrail is not None and self._guardrail.off:
            return self._reject("guardrail")
        if turn.blocks == 0:
            return self._reject("nothing_cached")
        tokens = program.worth_keeping(turn.tokens)
        if turn.keep_tokens is not None:
            tokens = min(turn.tokens, max(0, turn.keep_tokens))
        blocks = turn.blocks * tokens // turn.tokens if tokens < turn.tokens else turn.blocks
        if blocks == 0 or (self._whole and blocks < turn.blocks):
            return self._reject("drift")
        lease = Lease(
            program.key, tokens=tokens, blocks=blocks, shared=turn.shared_blocks, finished_at=now, calls=program.calls,
            priority=1.0 if hints.priority is None else hints.priority / NEUTRAL_PRIORITY,
            first_arrival=program.first_arrival,
        )  # fmt: skip
        ttl = self._ttl(lease, hints, now)
        stale = self.pins.get(program.lease_id)
        victims = [] if stale is None else list(self._supersede(stale, None, now))
        if not ttl > 0.0:
            return self._reject("no_value", victims)
        reason, displaced = self.pins.add(lease, ttl, now)
        victims += displaced
        if lease.id == 0:
            self._emit("pin_rejected_budget", program.key, tool=_tool(lease.calls), blocks=blocks, reason=reason)
            return self._reject(reason, victims)
        program.lease_id = lease.id
        self._plan_review(lease, now)
        self.metrics.inc("kvq_pins_total")
        p, _ = self.rule.predictor.curve(lease.calls).within(ttl)
        self._emit(
            "pin", program.key, lease=lease.id, tool=_tool(lease.calls), tokens=lease.tokens, blocks=lease.blocks,
            ttl_s=ttl, hard=self.pins.hard, p_return=p, price=self.rule.price.per_block,
        )  # fmt: skip
        return Pin(lease.id, lease.blocks, ttl, self.pins.hard, reason or "kept", tuple(victims))

    def _ttl(self, lease: Lease, hints: Hints, now: float) -> float:
        lease.review = self.rule.review and hints.ttl_s is None
        ttl = self.rule.ttl(lease, now)
        return ttl if hints.ttl_s is None or not self.rule.retains else min(hints.ttl_s, MAX_TTL_S)

    def _reject(self, reason: str, victims: Sequence[Victim] = ()) -> Pin:
        self.metrics.inc("kvq_rejected_total", label=reason)
        return Pin(None, reason=reason, victims=tuple(victims))

    def _plan_review(self, lease: Lease, now: float) -> None:
        """Think again at growing intervals: what a wait tells changes with its length, and so do prices."""
        if lease.review:
            self.pins.wake(lease, min(lease.deadline, now + max(1.0, 0.5 * (now - lease.finished_at))))

    def _expire(self, now: float) -> list[Victim]:
        victims: list[Victim] = []
        reviews = 0
        for lease in self.pins.due(now):
            if lease.waiting:
                self.metrics.inc("kvq_leaked_total")
                victims += self._end(lease.id, "leaked", now)
                continue
            if lease.review and reviews == REVIEWS:
                self.pins.wake(lease, now)
                break
            reviews += lease.review
            ttl = self.rule.ttl(lease, now) if lease.review else 0.0
            if ttl > 0.0:
                self.pins.set_ttl(lease, ttl, now)
                self._plan_review(lease, now)
            else:
                victims += self._end(lease.id, "expired" if now >= lease.deadline else "repriced", now)
        return victims

    def _end(self, lease_id: int | None, reason: str, now: float) -> tuple[Victim, ...]:
        victim = self.pins.end(lease_id, reason, now)
        return () if victim is None else (victim,)

    def _end_all(self, reason: str, now: float) -> tuple[Victim, ...]:
        return tuple(v for lease in list(self.pins) for v in self._end(lease.id, reason, now))

    def _forget(self, program: Program, now: float, reason: str) -> list[Victim]:
        """The program will not return: what it waited for is censored, its lease ends."""
        if self.rule.admission is not None and program.live == 0:
            self.rule.admission.gone(program.key)
        self._censor(program, now)
        program.finished_at = program.record = None
        self.rule.ended(program.turns)
        return list(self._end(program.lease_id, reason, now))

    def _supersede(self, lease: Lease, first_divergent: int | None, now: float) -> tuple[Victim, ...]:
        self._emit(
            "supersede", lease.key, lease=lease.id, blocks=lease.blocks, held_s=now - lease.created,
            first_divergent_token=first_divergent,
        )  # fmt: skip
        return self._end(lease.id, "superseded", now)

    def _censor(self, program: Program, now: float) -> None:
        if program.finished_at is not None:
            waited = now - program.finished_at
            program.record = self.rule.predictor.censor(program.calls, waited, program.record)

    def _record_victim(self, lease: Lease, victim: Victim, now: float) -> None:
        """Called by the pins for everything they give up, before they do."""
        held_s = now - lease.created
        reason = victim.reason
        self.metrics.inc("kvq_pinned_block_seconds_total", victim.blocks * held_s)
        if reason in ("pressure", "budget"):
            self.metrics.inc("kvq_evictions_total", label=reason)
            self.metrics.inc("kvq_evicted_blocks_total", victim.blocks, label=reason)
            self._emit(
                "evict", lease.key, lease=lease.id, tool=_tool(lease.calls), blocks=victim.blocks,
                left=lease.blocks - victim.blocks, reason=reason, held_s=held_s,
            )  # fmt: skip
        elif reason in ("expired", "repriced"):
            self.metrics.inc("kvq_expired_total")
            self._emit(
                "expire", lease.key, lease=lease.id, tool=_tool(lease.calls), blocks=lease.blocks, held_s=held_s,
                reason=reason,
            )  # fmt: skip
        elif reason not in ("reused", "superseded"):
            self._emit("release", lease.key, lease=lease.id, blocks=lease.blocks, held_s=held_s, reason=reason)
        program = self._programs.get(lease.key)
        if victim.ended and program is not None:
            program.lease_id = None
            if reason not in ("reused", "superseded"):
                self._censor(program, now)

    def _shadow_start(self, request: _Request, cached_tokens: int) -> None:
        if self._shadow is None or self._guardrail is None:
            return
        tokens = request.turn.prompt_tokens
        request.sampled, hits = self._shadow.start(self._blocks(request, request.turn.block_hashes, tokens))
        hit = min(tokens, hits * self._block_tokens)
        saved = self.rule.cost.saved_seconds
        self._guardrail.turn(saved(min(tokens, cached_tokens)), saved(hit), saved(tokens))

    def _shadow_finish(self, request: _Request, turn: TurnFinished) -> None:
        if self._shadow is not None:
            hashes = turn.block_hashes or request.turn.block_hashes if turn.tokens else ()
            finished = self._shadow.sample(self._blocks(request, hashes, turn.tokens))
            self._shadow.finish(request.sampled, finished)

    def _blocks(self, request: _Request, hashes: Sequence[Hashable], tokens: int) -> Sequence[Hashable]:
        """The contents of the blocks; without hashes, made-up ones that only this program has."""
        if hashes:
            return hashes
        owner = request.program.key if request.program else request.turn.request_id
        start = zlib.crc32(repr(owner).encode()) << 28
        return range(start, start + tokens // self._block_tokens)

    def _check_guardrail(self, guard: Guardrail, now: float) -> tuple[Victim, ...]:
        if not guard.check(now):
            return ()
        if not guard.off:
            self._emit("guardrail_on", None, lru_bias=guard.bias)
            return ()
        self.metrics.inc("kvq_guardrail_trips_total")
        self._emit("guardrail_off", None, **guard.lost, retry_s=guard.back_at - now)
        log.warning("retention loses to LRU and is off for %.0f s", guard.back_at - now)
        return self._end_all("guardrail", now)

    def _emit(self, event: str, key: ProgramKey | None, **fields: object) -> None:
        if self._events is not None:
            if key is not None:
                fields.update(program=key.program_id, tenant=key.tenant)
            self._events.emit(event, self._time, **fields)


def make_policy(
    name: str = "value",
    *,
    total_blocks: int,
    block_tokens: int = 16,
    clock: Callable[[], float] = time.monotonic,
    hard: bool | None = None,
    budget: float | None = None,
    tenant_quota: float | None = None,
    max_wait_s: float = 10.0,
    whole: bool = False,
    guardrail: bool | Guardrail = True,
    events: EventLog | None = None,
    state: dict[str, Any] | None = None,
    **settings: Any,
) -> Policy:
    """A policy by name: "lru" (retains nothing), "fixed", "ema", "continuum", "trtllm" or "value".

    total_blocks, block_tokens: the pool. clock: monotonic seconds. hard: hold references (default: the policy's own
    way). budget: fraction of the pool that leases may hold (None: half of it if hard, all of it if soft). tenant_quota:
    fraction of the budget that one tenant may hold (None: all of it). max_wait_s: a hard lease yields to a request that
    has waited this long. whole: part of a lease is worth nothing (sliding windows), so none is cut. guardrail: whether,
    or which. state: from `Policy.state()`. settings: those of the policy's
    rule in `retention.rules`, for example `ttl_s` of "fixed". Raises ValueError for an unknown name or setting, or
    one of wrong type or size, naming it and what is allowed.
    """
    if name not in RULES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
    allowed = inspect.signature(RULES[name]).parameters
    for setting, value in settings.items():
        if setting not in allowed:
            raise ValueError(f"policy {name} has no setting {setting!r}; it has {', '.join(allowed) or 'none'}")
        _check_setting(setting, value, allowed[setting].default)
    rule = RULES[name](**settings)
    hard = rule.hard if hard is None else hard
    if guardrail is True:
        guardrail = Guardrail()
    if state is not None:
        if not isinstance(state, dict) or not {"predictor", "cost"} <= state.keys():
            raise ValueError(f"state is not one that Policy.state() made: {state!r:.80}")
        rule.predictor.load(state["predictor"])
        rule.cost.load(state["cost"])
    return Policy(
        rule,
        total_blocks=total_blocks,
        block_tokens=block_tokens,
        clock=clock,
        hard=hard,
        budget=(0.5 if hard else 1.0) if budget is None else budget,
        tenant_quota=tenant_quota,
        max_wait_s=max_wait_s,
        whole=whole,
        guardrail=guardrail if guardrail and rule.retains else None,
        events=events,
    )


def _check(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")


def _check_setting(name: str, value: object, default: object) -> None:
    """Settings come from JSON and keyword arguments: a wrong type is found here, not at the first turn."""
    if isinstance(default, int):
        good, wanted = isinstance(value, int) and not isinstance(value, bool), "an integer"
    elif isinstance(default, float):
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300
        wanted = "a finite number"
    else:
        good = isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(x, str) for x in value)
        wanted = "a list of names"
    if not good:
        raise ValueError(f"{name} must be {wanted}, got {value!r:.80}")


def _known_calls(calls: Calls, hints: Hints) -> Calls:
    """What the program waits for: the calls that were seen, else the hint."""
    if calls:
        return tuple(calls)
    if hints.tool:
        return (ToolCall(hints.tool),)
    return None if hints.tool_pending else calls


def _tool(calls: Calls) -> str:
    if calls is None:
        return "unknown"
    return "+".join(sorted({c.name for c in calls})) or "person"
