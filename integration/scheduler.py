"""Retention in a running vLLM scheduler: hooks, identity of requests, receipts, and what happens when we fail."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.request import Request

from integration import compat
from integration.compat.patches import Patches
from integration.config import Config, IntegrationError
from integration.metadata import Identifier, Identity, made_up
from integration.pool import Guard, RetainedPool
from retention import EventLog, Hints, Pin, ProgramKey, ToolCall, TurnArrived, TurnFinished, make_policy
from retention.events import check_file
from retention.toolcalls import tool_class

log = logging.getLogger("vllm.kvq")  # below vLLM's logger, so that a server shows it

TICK_S = 0.1  # at most this often, while something runs
QUEUE_PATIENCE_S = 60.0  # a request that has waited this long is not passed by others
SAVE_S = 60.0  # between two savings of what was learned
RECENT = 512  # finished requests that a late report can be about
ATTRIBUTE = "kvq_retention"  # of the scheduler


def refusal(scheduler: Any) -> str | None:
    """Why retention cannot work with this scheduler, None if it can."""
    if not isinstance(scheduler, Scheduler):
        return f"its scheduler is {type(scheduler).__name__}, which is not derived from vLLM's Scheduler"
    lacking = compat.missing()
    if lacking:
        return (
            f"vLLM {compat.vllm_version()} lacks {', '.join(lacking)}; "
            f"tried with {'.'.join(map(str, compat.KNOWN[0]))} to {'.'.join(map(str, compat.KNOWN[1]))}"
        )
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching:
        return "prefix caching is off, so no KV is found again: start it with enable_prefix_caching=True"
    groups = manager.coordinator.single_type_managers
    if not groups:
        return "the model has no KV cache"
    known = (FullAttentionManager, SlidingWindowManager)
    other = sorted({type(group).__name__ for group in groups if type(group) not in known})
    if other:
        return (
            f"the model's KV cache has groups of {', '.join(other)}; retention knows full attention and sliding windows"
        )
    if any(group.block_pool is not manager.block_pool for group in groups):
        return "the model's KV cache groups have block pools of their own; retention works with one"
    return None


@dataclass
class _Turn:
    """A request in flight. Times: the clock, None if not yet. told: calls that the front end saw before it ended."""

    identity: Identity
    started: float | None = None
    first_token: float | None = None
    cached_tokens: int = 0
    told: tuple[ToolCall, ...] | None = None
    complete: bool = False  # the front end ends it because its output is complete


@dataclass
class _Ended:
    """A finished request, for what the front end reports after that."""

    owner: ProgramKey  # with an empty program_id for nobody
    hints: Hints
    block_hashes: Sequence[Any]
    tokens: int
    aborted: bool


class Retention:
    """Retention on one scheduler, from construction to `disable`.

    Raises IntegrationError where it cannot work, ValueError for a wrong setting of the policy; the scheduler is as it
    was then. Not thread-safe: call from the scheduler's thread.
    """

    def __init__(self, scheduler: Any, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        reason = refusal(scheduler)
        if reason is not None:
            raise IntegrationError(f"retention cannot be enabled on this engine: {reason}")
        if on(scheduler) is not None:
            raise IntegrationError("retention is enabled already on this engine: disable it first")
        manager = scheduler.kv_cache_manager
        groups = manager.coordinator.single_type_managers
        index = getattr(scheduler.vllm_config.parallel_config, "data_parallel_index", 0)
        self.config = config = replace(config, events=_own(config.events, index), state=_own(config.state, index))
        self.faults: list[str] = []
        self.live = True
        self._scheduler = scheduler
        self._clock = clock
        self._block_tokens = getattr(scheduler, "hash_block_size", scheduler.block_size)
        self._same_blocks = all(group.block_size == self._block_tokens for group in groups)
        windowed = any(type(group) is SlidingWindowManager for group in groups)
        settings = dict(config.settings)
        if config.policy == "value" and not isinstance(scheduler.waiting, deque):
            # In a queue that is not ours to order, a program that is held back would hold back all behind it.
            settings.setdefault("overcommit", 0.0)
        self._events = EventLog(config.events) if config.events else None
        self.policy = make_policy(
            config.policy,
            total_blocks=manager.block_pool.num_gpu_blocks - 1,
            block_tokens=self._block_tokens,
            clock=clock,
            hard=config.hard,
            budget=config.budget,
            max_wait_s=config.max_wait_s,
            guardrail=config.guardrail,
            events=self._events,
            state=_load(config.state),
            whole=windowed,
            **settings,
        )
        self._identifier = Identifier(config.tenant_trusted, self._block_tokens)
        self._turns: dict[str, _Turn] = {}
        self._prefilling: dict[str, _Turn] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._receipt: dict[str, Any] | None = None
        self._receipt_for = ""
        self._next_tick = self._next_save = 0.0
        self._guard = {name: Guard(name, self.fail) for name in ("arrive", "tick", "output", "receipt", "reset", "rpc")}
        unordered = compat.check_queue(FreeKVCacheBlockQueue)
        if type(manager.block_pool.free_block_queue) is not FreeKVCacheBlockQueue:
            unordered += (f"it is a {type(manager.block_pool.free_block_queue).__name__}",)
        if unordered:
            log.warning(
                "the free queue of this vLLM cannot be ordered (%s): leases hold references", ", ".join(unordered)
            )
        self._patches = Patches()
        self.pool = RetainedPool(
            scheduler,
            self.policy,
            self._finished,
            clock,
            started=self._started,
            pinned=self._pinned,
            fault=self.fail,
            ordered=not unordered,
            max_wait_s=QUEUE_PATIENCE_S,
        )
        # Of a sliding window vLLM (from 0.32) caches what a repetition of the prompt needs; the next turn needs more.
        self._coordinator = manager.coordinator
        self._interval = getattr(self._coordinator, "retention_interval", None)
        if windowed and self._interval is not None:
            self._coordinator.retention_interval = None
        try:
            for request in list(scheduler.waiting):
                self._arrive(request)
            for name, hook in (
                ("add_request", self._add_request),
                ("schedule", self._schedule),
                ("update_from_output", self._update_from_output),
                ("_free_request", self._free_request),
                ("reset_prefix_cache", self._reset_prefix_cache),
                ("shutdown", self._shutdown),
            ):
                self._patches.wrap(scheduler, name, hook)
            setattr(scheduler, ATTRIBUTE, self)
        except BaseException:
            self._remove()
            raise

    def disable(self) -> None:
        """End all leases and leave the scheduler as it was found. Idempotent."""
        if not self.live:
            return
        try:
            self.pool.close()
            self._save()
        except Exception:
            log.exception("disabling retention: its books were wrong, everything is released all the same")
        self._remove()

    def fail(self, place: str, error: Exception) -> None:
        """One of our hooks raised: say so once, and get out of vLLM's way for good."""
        if not self.live:
            return
        text = f"{place}: {type(error).__name__}: {error}"
        self.faults.append(text)
        log.error("retention failed and is off now; the engine goes on without it (%s)", text, exc_info=error)
        if self._events is not None:
            self._events.emit("fault", self._clock(), place=place, error=text)
        self._remove()

    # What the control calls ask.

    def status(self) -> dict[str, Any]:
        """Everything `integration.status` shows. Values that msgpack has."""
        self._tick_now()
        pool = self._scheduler.kv_cache_manager.block_pool
        return {
            "enabled": self.live,
            "vllm": compat.vllm_version(),
            "kvq": compat.own_version(),
            "config": self.config.to_mapping(),
            "queue_ordered": self.pool.queue is not None,
            "leases": len(self.pool.leases),
            "free_blocks": pool.get_num_free_blocks(),
            "faults": list(self.faults),
            **self.policy.status(),
        }

    def metrics(self) -> dict[str, Any]:
        """{name: number}, or {name: {"label=value": number}} for those with a label."""
        self._tick_now()
        self.policy.update_gauges()
        found: dict[str, Any] = {"kvq_enabled": float(self.live), "kvq_faults_total": float(len(self.faults))}
        for sample in self.policy.metrics.collect():
            if sample.label:
                found.setdefault(sample.name, {})[f"{sample.label}={sample.label_value}"] = sample.value
            else:
                found[sample.name] = sample.value
        return found

    def programs(self) -> list[dict[str, Any]]:
        """One row a program, the most recently active first."""
        self._tick_now()
        now = self._clock()
        rows = []
        for program in self.policy.programs():
            lease = self.policy.pins.get(program.lease_id)
            calls = program.calls or ()
            if program.live:
                state = "running"
            elif program.finished_at is None or lease is None:
                state = "idle"
            elif program.calls is not None and all(tool_class(call.name) == "person" for call in calls):
                state = "waiting_person"
            else:
                state = "waiting_tool"
            rows.append(
                {
                    "program": program.key.program_id,
                    "tenant": program.key.tenant,
                    "state": state,
                    "tool": "+".join(sorted({call.name for call in calls})),
                    "blocks": lease.blocks if lease else 0,
                    "lease_id": lease.id if lease else None,
                    "hard": bool(lease and self.policy.pins.hard),
                    "ttl_left_s": max(0.0, lease.deadline - now) if lease else 0.0,
                    "value": float(self.policy.rule.rank(lease, now)[0]) if lease else 0.0,
                    "turns": program.turns,
                }
            )
        rows.reverse()
        return rows

    def tool_called(
        self,
        calls: Sequence[ToolCall],
        *,
        request_id: str | None = None,
        program_id: str | None = None,
        tenant: str = "",
        complete: bool = False,
    ) -> dict[str, Any]:
        """What the front end saw in the output: calls (none: a person is next), of a request that runs or has ended, or
        of a program. complete: the front end ends the request itself, because the output is complete (a stop string);
        the scheduler will see, or has seen, an abort.
        """
        told = tuple(calls)
        if request_id is None:
            known = [p.key for p in self.policy.programs() if p.key[:2] == (program_id, tenant)]
            for key in known:
                self.pool.drop(self.policy.tool_called(key, told))
            return {"known": bool(known)}
        turn = self._turns.get(request_id)
        if turn is not None:
            turn.told, turn.complete = told, complete
            return {"known": True}
        ended = self._ended.get(request_id)
        if ended is None:
            return {"known": False}
        if ended.aborted:
            if complete:
                ended.aborted = False
                self._retain_late(request_id, ended, told)
        elif ended.owner.program_id:
            self.pool.drop(self.policy.tool_called(ended.owner, told, ended.hints))
        elif told:
            self._retain_late(request_id, ended, told)
        return {"known": True}

    def release(self, program_id: str, tenant: str = "") -> dict[str, Any]:
        """The program is over, under whatever salt and adapter."""
        known = [p.key for p in self.policy.programs() if p.key[:2] == (program_id, tenant)]
        for key in known:
            self.pool.drop(self.policy.release(key))
        return {"released": len(known)}

    def guarded(self, ask: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Ask one of the above; an exception in it is a fault like one in a hook."""
        with self._guard["rpc"]:
            return ask(*args, **kwargs)
        raise IntegrationError(f"retention failed and is off now: {self.faults[-1]}")

    # Hooks of the scheduler.

    def _add_request(self, original: Callable[..., Any], request: Request, *args: Any, **kwargs: Any) -> Any:
        new = request.request_id not in self._scheduler.requests  # else more input of a streaming session
        if new:
            with self._guard["arrive"]:
                self._arrive(request)
        result = original(request, *args, **kwargs)
        if new and self.live:
            with self._guard["arrive"]:
                self.pool.place(request)
        return result

    def _schedule(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._guard["tick"]:
            now = self._clock()
            if now >= self._next_tick or not self._scheduler.running:
                self._tick(now)
            self.pool.before_step()
        return original(*args, **kwargs)

    def _update_from_output(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self._prefilling:
            with self._guard["output"]:
                now = self._clock()
                requests = self._scheduler.requests
                for request_id in list(self._prefilling):
                    request = requests.get(request_id)
                    if request is None:
                        del self._prefilling[request_id]
                    elif request.num_output_tokens:
                        self._prefilling.pop(request_id).first_token = now
        return result

    def _free_request(self, original: Callable[..., Any], request: Request, *args: Any, **kwargs: Any) -> Any:
        self._receipt, self._receipt_for = None, request.request_id
        result = original(request, *args, **kwargs)
        receipt, self._receipt, self._receipt_for = self._receipt, None, ""
        if receipt is None:
            return result
        with self._guard["receipt"]:
            return _with_receipt(result, receipt)
        return result

    def _reset_prefix_cache(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._guard["reset"]:
            # vLLM refuses while requests run, unless it is to preempt them: then nothing is lost either.
            if not self._scheduler.running or (args[0] if args else kwargs.get("reset_running_requests")):
                self.pool.close()
                self._identifier.clear()
                self._ended.clear()
        return original(*args, **kwargs)

    def _shutdown(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.disable()
        return original(*args, **kwargs)

    # What the pool calls.

    def _arrive(self, request: Request) -> None:
        identity = self._identifier.identify(request)
        self._turns[request.request_id] = _Turn(identity)
        self.pool.expected(
            request,
            TurnArrived(
                request.request_id,
                identity.program,
                request.num_prompt_tokens,
                request.block_hashes,
                identity.hints,
            ),
        )

    def _started(self, request: Request, cached_tokens: int) -> None:
        turn = self._turns.get(request.request_id)
        if turn is not None and turn.started is None:
            turn.started = self._clock()
            turn.cached_tokens = cached_tokens
            self._prefilling[request.request_id] = turn

    def _finished(self, request: Request, blocks: int, shared: int) -> TurnFinished | None:
        request_id = request.request_id
        turn = self._turns.pop(request_id, None)
        self._prefilling.pop(request_id, None)
        if turn is None:  # it was there before us
            turn = _Turn(self._identifier.identify(request))
        elif turn.started is None:
            self.pool.aborted(request_id)
            return None
        now = self._clock()
        if turn.first_token is None and request.num_output_tokens:
            turn.first_token = now
        tokens = max(0, min(request.num_computed_tokens, request.num_tokens - 1))
        finish = _finish(request)
        aborted = finish in ("abort", "error")
        if aborted and turn.complete:
            finish, aborted = "stop", False
        program, hints, _ = turn.identity
        owner = program or self._identifier.nobody(request)
        if not aborted or hints.tool_pending:
            self._identifier.finished(request, tokens, owner)
        self._ended[request_id] = _Ended(owner, hints, request.block_hashes, tokens, aborted and not hints.tool_pending)
        if len(self._ended) > RECENT:
            self._ended.popitem(last=False)
        if self._receipt_for == request_id and program is not None:
            self._receipt = {"program": program.program_id, "reused_tokens": turn.cached_tokens}
        return TurnFinished(
            request_id,
            tokens=tokens,
            blocks=blocks,
            shared_blocks=shared,
            finish=finish,
            tool_calls=turn.told,
            prefill_s=None if turn.started is None or turn.first_token is None else turn.first_token - turn.started,
            block_hashes=request.block_hashes,
            program=program,
        )

    def _pinned(self, request: Request, pin: Pin) -> None:
        if self._receipt is not None and self._receipt_for == request.request_id:
            self._receipt.update(
                retained=pin.lease_id is not None,
                reason=pin.reason,
                blocks=pin.blocks,
                ttl_s=round(pin.ttl_s, 3),
                lease=pin.lease_id,
            )

    def _retain_late(self, request_id: str, ended: _Ended, told: tuple[ToolCall, ...]) -> None:
        """Retain a turn whose blocks are free already, as far as they are still cached."""
        owner = ended.owner
        if not self._same_blocks:
            return
        full = ended.tokens // self._block_tokens
        if not owner.program_id:
            if full == 0:
                return
            ended.owner = owner = made_up(owner, ended.block_hashes[full - 1])
        found, blocks = self.pool.cached(ended.block_hashes[:full])
        tokens = min(ended.tokens, (found + 1) * self._block_tokens)
        self.pool.retain(
            TurnFinished(
                request_id,
                tokens=tokens,
                blocks=len(blocks),
                shared_blocks=self.pool.shared(blocks, own=0),
                tool_calls=told,
                program=owner,
                hints=ended.hints,
            ),
            blocks,
        )

    # Time, faults, files.

    def _tick_now(self) -> None:
        if self.live:
            with self._guard["tick"]:
                self._tick(self._clock())

    def _tick(self, now: float) -> None:
        self._next_tick = now + TICK_S
        self.pool.tick()
        if self.config.state and now >= self._next_save:
            if self._next_save:
                threading.Thread(target=self._save, args=(self.policy.state(),), daemon=True, name="kvq-state").start()
            self._next_save = now + SAVE_S

    def _save(self, state: dict[str, object] | None = None) -> None:
        if not self.config.state:
            return
        path = Path(self.config.state)
        part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
        try:
            part.write_text(json.dumps(self.policy.state() if state is None else state))
            part.replace(path)
        except OSError as error:
            log.warning("what retention learned cannot be saved to %s: %s", path, error)

    def _remove(self) -> None:
        self.live = False
        self._patches.remove()
        if self._interval is not None:
            self._coordinator.retention_interval = self._interval
        try:
            self.pool.detach()
        finally:
            if getattr(self._scheduler, ATTRIBUTE, None) is self and not self.faults:  # these are for `status`
                delattr(self._scheduler, ATTRIBUTE)
            if self._events is not None:
                self._events.close(1.0)


def on(scheduler: Any) -> Retention | None:
    """The live retention of a scheduler."""
    retention = getattr(scheduler, ATTRIBUTE, None)
    return retention if isinstance(retention, Retention) and retention.live else None


def faults(scheduler: Any) -> list[str]:
    """Why retention on this scheduler ended, [] if it did not fail."""
    return list(getattr(getattr(scheduler, ATTRIBUTE, None), "faults", ()))


def forget(scheduler: Any) -> None:
    """Leave no trace of retention that has failed."""
    if on(scheduler) is None and hasattr(scheduler, ATTRIBUTE):
        delattr(scheduler, ATTRIBUTE)


def _own(path: str | None, index: int) -> str | None:
    """Data parallel engines are configured alike, but write files of their own: name, name-dp1, name-dp2, ..."""
    if path is None or not index:
        return path
    return str(Path(path).with_stem(f"{Path(path).stem}-dp{index}"))


def _load(path: str | None) -> dict[str, Any] | None:
    """What was learned before a restart. A damaged file is no reason not to start: it is left out, with a warning."""
    if path is None or not check_file("state", path).exists():
        return None
    try:
        state = json.loads(Path(path).read_text())
        make_policy("lru", total_blocks=1, state=state)
    except Exception as error:
        log.warning("%s holds no state of retention, so it starts anew: %s", path, error)
        return None
    return state


def _finish(request: Request) -> Literal["stop", "length", "abort", "error"]:
    reason = str(request.get_finished_reason())
    if reason in ("length", "abort", "error"):
        return reason  # type: ignore[return-value]
    return "stop"


def _with_receipt(result: Any, receipt: dict[str, Any]) -> Any:
    """`_free_request` returns the connector's parameters for the response, in some releases as the first of a tuple."""
    if isinstance(result, tuple):
        return ({**(result[0] or {}), "kvq": receipt}, *result[1:])
    return {**(result or {}), "kvq": receipt}
