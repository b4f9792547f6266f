"""Retention on vLLM's own scheduler and block pool: what a `retention.Policy` decides, done to real blocks.

Soft leases order the free queue: retained free blocks stand behind all others and are handed out only when the policy
gives them up. Hard leases hold references. Everything else is vLLM's own: admission, allocation, hits, preemption.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import TracebackType
from typing import Any

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.request import Request, RequestStatus

from integration.compat.patches import Patches
from retention.interface import Demand, Pin, PoolState, TurnArrived, TurnFinished
from retention.pins import Victim
from retention.policy import Policy

FIRST = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
RUNNING = RequestStatus.RUNNING


class RetainedQueue(FreeKVCacheBlockQueue):
    """vLLM's free queue in two parts: blocks nobody retains, a boundary, retained blocks. All operations stay O(1).

    `order` turns an existing queue into one, `restore` turns it back; blocks keep their places both times.
    holds: number of leases on each block, by block id; kept by the owner, who changes it for blocks in use, or through
    `retain` and `unretain`.
    """

    _holds: list[int]
    _boundary: KVCacheBlock
    retained: int  # free blocks behind the boundary

    @classmethod
    def order(cls, queue: FreeKVCacheBlockQueue, holds: list[int]) -> RetainedQueue:
        queue.__class__ = cls
        assert isinstance(queue, cls)
        queue._holds = holds
        queue.retained = 0
        queue._boundary = KVCacheBlock(block_id=-2)
        FreeKVCacheBlockQueue.append(queue, queue._boundary)
        queue.num_free_blocks -= 1
        return queue

    def restore(self) -> None:
        super().remove(self._boundary)
        self.num_free_blocks += 1
        del self._holds, self._boundary, self.retained
        self.__class__ = FreeKVCacheBlockQueue  # type: ignore[assignment]

    @property
    def unretained(self) -> int:
        """Free blocks that an allocation may take without asking the policy."""
        return self.num_free_blocks - self.retained

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        if n > self.unretained:
            raise RuntimeError(f"{n} blocks asked for, {self.unretained} are free and not retained")
        return super().popleft_n(n)

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        self._insert_before_boundary(self._keep(blocks))

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        super().prepend_n(self._keep(blocks))

    def remove(self, block: KVCacheBlock) -> None:
        previous, following = block.prev_free_block, block.next_free_block
        if previous is None or following is None:
            raise RuntimeError(f"{block} is not in the free queue")
        previous.next_free_block = following  # not by super(): this is called for every block of every hit
        following.prev_free_block = previous
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1
        if self._holds[block.block_id]:
            self.retained -= 1

    def retain(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Move free blocks that just got their first lease to the end of the retained part."""
        moved = list(blocks)
        remove = super().remove
        for block in moved:
            remove(block)
        super().append_n(moved)
        self.retained += len(moved)

    def unretain(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Move free blocks that just lost their last lease to the end of the unretained part."""
        moved = list(blocks)
        remove = super().remove
        for block in moved:
            remove(block)
        self.retained -= len(moved)
        self._insert_before_boundary(moved)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return [block for block in super().get_all_free_blocks() if block is not self._boundary]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        return (block for block in super().iter_blocks_after(cursor) if block is not self._boundary)

    def _keep(self, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Put those that are held behind the boundary; the others come back."""
        holds = self._holds
        kept = [block for block in blocks if holds[block.block_id]]
        if not kept:
            return blocks
        super().append_n(kept)
        self.retained += len(kept)
        return [block for block in blocks if not holds[block.block_id]] if len(kept) < len(blocks) else []

    def _insert_before_boundary(self, blocks: list[KVCacheBlock]) -> None:
        boundary = self._boundary
        previous = boundary.prev_free_block
        assert previous is not None
        for block in blocks:
            block.prev_free_block = previous
            previous.next_free_block = block
            previous = block
        previous.next_free_block = boundary
        boundary.prev_free_block = previous
        self.num_free_blocks += len(blocks)


@dataclass
class Lease:
    """Blocks in chain order, first block of the prompt first. since: up to when its block-seconds are counted."""

    blocks: list[KVCacheBlock]
    hard: bool
    since: float


class Guard:
    """Around our part of a hook: an exception in it goes to `fault`, and vLLM's own part goes on without us."""

    def __init__(self, place: str, fault: Callable[[str, Exception], None]) -> None:
        self._place, self._fault = place, fault

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._fault(self._place, error)
        return True


def window_blocks(group: SlidingWindowManager) -> int:
    """Blocks of this group that a hit needs."""
    return -(-(group.sliding_window - 1) // group.block_size) + bool(getattr(group, "use_eagle", False))


def _raise(place: str, error: Exception) -> None:
    raise error


class RetainedPool:
    """Connects one policy with one scheduler. Its hooks are the scheduler's `_free_blocks`, `get_computed_blocks`,
    `allocate_slots` and `get_new_blocks`. Call `tick`, and for every new request `arrived`, or `expected` before and
    `place` after it was added; `aborted` when one leaves the queue without ever holding blocks.

    finished: called with a request as it ends, its retainable blocks and how many of those, at the head, others hold;
    returns what to tell the policy, None if the policy was told already. pinned: called with what the policy answered.
    started: called with a request that got its first blocks, and its cached tokens. clock: seconds. fault: told of an
    exception in one of our hooks, by name; by default it is raised. ordered: order the free queue; without that, every
    lease holds references. max_wait_s: a request that has waited this long is not passed in the queue any more.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        policy: Policy,
        finished: Callable[[Request, int, int], TurnFinished | None],
        clock: Callable[[], float],
        *,
        started: Callable[[Request, int], None] = lambda request, cached_tokens: None,
        pinned: Callable[[Request, Pin], None] = lambda request, pin: None,
        fault: Callable[[str, Exception], None] = _raise,
        ordered: bool = True,
        max_wait_s: float = math.inf,
    ) -> None:
        self.policy = policy
        self.block_seconds = 0.0  # retained blocks x seconds, over all leases
        self._scheduler = scheduler
        self._finished = finished
        self._started = started
        self._pinned = pinned
        self._clock = clock
        self._max_wait_s = max_wait_s
        self._manager = manager = scheduler.kv_cache_manager
        self._groups = manager.coordinator.single_type_managers
        self._full = [i for i, group in enumerate(self._groups) if not isinstance(group, SlidingWindowManager)]
        self._windows = {i: window_blocks(group) for i, group in enumerate(self._groups) if i not in self._full}
        self._pool = manager.block_pool
        self._holds = [0] * self._pool.num_gpu_blocks
        self._references: dict[int, int] = {}  # that leases hold, by block id
        self.leases: dict[int, Lease] = {}
        self._reference_leases = 0
        self._orders: dict[str, tuple[tuple[int, float], float]] = {}  # (order, arrival) of requests in the queue
        self._allocating: Request | None = None
        self._waiting_blocks: dict[str, int] = {}
        self._total_waiting_blocks = 0
        self.retry = True  # something changed since the policy last refused to give up leases that hold references
        self._finishing = Guard("finish", fault)
        self._admitting = Guard("admit", fault)
        self._starting = Guard("start", fault)
        self._yielding = Guard("pressure", fault)

        self._patches = Patches()
        self.queue: RetainedQueue | None = None
        try:
            if ordered:
                self.queue = RetainedQueue.order(self._pool.free_block_queue, self._holds)
                self._patches.wrap(self._pool, "get_new_blocks", self._take)
            self._patches.wrap(manager, "get_computed_blocks", self._look_up)
            self._allocate_hook = self._patches.wrap_directly(manager, "allocate_slots", self._allocate)
            self._patches.wrap(scheduler, "_free_blocks", self._free)
        except BaseException:
            self.detach()
            raise

    # What the driver calls.

    def arrived(self, request: Request, turn: TurnArrived) -> None:
        """Put a new request into the waiting queue where the policy wants it. Call it instead of `add_request`."""
        self.expected(request, turn)
        self._scheduler.add_request(request)
        self.place(request)

    def expected(self, request: Request, turn: TurnArrived) -> None:
        """A request is about to be added to the scheduler."""
        arrival = self.policy.turn_arrived(turn)
        self._orders[request.request_id] = arrival.order, self._clock()
        cached = self._cached_blocks(request)
        need = 0
        for i, group in enumerate(self._groups):
            new = max(0, -(-turn.prompt_tokens // group.block_size) - cached)
            need += min(new, self._windows.get(i, new) + 1)
        self._waiting_blocks[request.request_id] = need
        self._total_waiting_blocks += need
        self.retry = True

    def place(self, request: Request) -> None:
        """Move the request, just added, to where the policy wants it. A queue with priorities stays as it is."""
        waiting = self._scheduler.waiting
        if not isinstance(waiting, deque) or not waiting or waiting[-1] is not request:
            return
        order, now = self._orders[request.request_id]
        place = len(waiting) - 1
        while place and self._before(order, now, waiting[place - 1]):
            place -= 1
        if place < len(waiting) - 1:
            waiting.insert(place, waiting.pop())

    def before_step(self) -> None:
        """Optional, before the scheduler's `schedule`: spares steps that only decode the hook of their allocations."""
        if self._reference_leases or len(self._scheduler.requests) > len(self._scheduler.running):
            self._allocate_hook.on()
        else:
            self._allocate_hook.off()
            self._allocating = None

    def tick(self, taken: int = 0) -> None:
        """Let the policy's time pass. taken: unretained free blocks that are as good as gone."""
        self.drop(self.policy.tick(self.state(taken)))
        self.retry = True

    @property
    def holds_references(self) -> bool:
        """Whether some lease does."""
        return self._reference_leases > 0

    @property
    def unretained(self) -> int:
        """Free blocks that an allocation may take without asking the policy."""
        return self.queue.unretained if self.queue is not None else self._pool.get_num_free_blocks()

    def state(self, taken: int = 0) -> PoolState:
        """The pool and the queue, as the policy wants to know them."""
        return PoolState(
            total_blocks=self._pool.num_gpu_blocks - 1,
            free_blocks=max(0, self.unretained - taken),
            waiting_requests=len(self._scheduler.waiting),
            waiting_blocks=self._total_waiting_blocks,
            running_requests=len(self._scheduler.running),
        )

    def aborted(self, request_id: str) -> None:
        """A request left the waiting queue without ever holding blocks."""
        self._forget(request_id)
        self.policy.aborted(request_id)

    def close(self) -> None:
        """End all leases."""
        self.drop(self.policy.reset())

    def detach(self) -> None:
        """Let go of everything, and leave the scheduler and its pool as they were found. Idempotent. Trusts nothing but
        the count of references that leases hold, so that it also works in the middle of a fault.
        """
        self._patches.remove()
        if self.queue is not None:
            self.queue.restore()
            self.queue = None
        now = self._clock()
        for lease in self.leases.values():
            self.block_seconds += len(lease.blocks) * (now - lease.since)
            self._release(reversed(lease.blocks))
        blocks = self._pool.blocks
        while self._references:
            self._release(blocks[block_id] for block_id in list(self._references))
        self.leases.clear()

    def retainable(self, request: Request) -> list[KVCacheBlock]:
        """The full, hashed blocks that the request holds, of all groups, in the order of the tokens they hold."""
        if self._windows:
            return self._windowed(request)
        if len(self._groups) == 1:
            blocks = self._groups[0].req_to_blocks.get(request.request_id, ())
            return [block for block in blocks if block.block_hash is not None and not block.is_null]
        found = []
        for group in self._groups:
            size = group.block_size
            for i, block in enumerate(group.req_to_blocks.get(request.request_id, ())):
                if block.block_hash is not None and not block.is_null:
                    found.append(((i + 1) * size, block))
        found.sort(key=itemgetter(0))
        return [block for _, block in found]

    def cached(self, block_hashes: Sequence[Any]) -> tuple[int, list[KVCacheBlock]]:
        """How many of these contents, from the first, are cached now, and the blocks that hold them: of sliding windows
        the last ones, and nothing at all without those.
        """
        chain: list[list[KVCacheBlock]] = []
        for block_hash in block_hashes:
            blocks = self._pool.get_cached_block(block_hash, self._full)
            if blocks is None:
                break
            chain.append(list(blocks))
        for group, size in self._windows.items():
            for i in range(len(chain) - 1, max(-1, len(chain) - 1 - size), -1):
                blocks = self._pool.get_cached_block(block_hashes[i], [group])
                if blocks is None:
                    return 0, []
                chain[i] += blocks
        return len(chain), [block for blocks in chain for block in blocks]

    def _windowed(self, request: Request) -> list[KVCacheBlock]:
        """With sliding windows: a hit at the last full block needs one more than the request still holds itself, if its
        window has moved on since; vLLM has freed that, but knows it by its hash.
        """
        full = 0
        for group in self._groups:
            blocks = group.req_to_blocks.get(request.request_id, ())
            settled = [i for i, block in enumerate(blocks) if block.block_hash is not None and not block.is_null]
            full = max(full, settled[-1] + 1 if settled else 0)
        return self.cached(request.block_hashes[:full])[1]

    def shared(self, blocks: Sequence[KVCacheBlock], own: int = 1) -> int:
        """How many blocks at the head someone else holds. own: references of whoever asks."""
        shared = 0
        for block in blocks:
            if block.ref_cnt <= own and not self._holds[block.block_id]:
                break
            shared += 1
        return shared

    def retain(self, turn: TurnFinished, blocks: Sequence[KVCacheBlock]) -> Pin:
        """Report a finished turn, and do to its blocks what the policy says."""
        pin = self.policy.turn_finished(turn)
        self.drop(pin.victims)
        if pin.lease_id is None:
            return pin
        kept = list(blocks[: pin.blocks])
        referenced = pin.hard or self.queue is None
        self.leases[pin.lease_id] = Lease(kept, referenced, self._clock())
        if referenced:
            self._reference_leases += 1
            self._pool.touch(kept)
            for block in kept:
                self._references[block.block_id] = self._references.get(block.block_id, 0) + 1
        holds = self._holds
        free = [block for block in kept if not block.ref_cnt and not holds[block.block_id]]
        for block in kept:
            holds[block.block_id] += 1
        if self.queue is not None:
            self.queue.retain(reversed(free))
        return pin

    def drop(self, victims: Iterable[Victim]) -> None:
        """Let go of what the policy gave up."""
        now, holds = self._clock(), self._holds
        for victim in victims:
            lease = self.leases[victim.lease_id]
            self.block_seconds += len(lease.blocks) * (now - lease.since)
            lease.since = now
            keep = len(lease.blocks) - victim.blocks
            dropped = lease.blocks[keep:]
            dropped.reverse()  # tail first, as vLLM frees
            del lease.blocks[keep:]
            free = []
            for block in dropped:
                block_id = block.block_id
                holds[block_id] -= 1
                if not holds[block_id] and not block.ref_cnt:
                    free.append(block)
            if self.queue is not None:
                self.queue.unretain(free)
            if lease.hard:
                self._release(dropped)
            if victim.ended:
                del self.leases[victim.lease_id]
                self._reference_leases -= lease.hard

    # Hooks.

    def _look_up(self, original: Callable[..., Any], request: Request, *args: Any, **kwargs: Any) -> Any:
        """`get_computed_blocks`, which every step asks for the head of the queue: not for one that is held anyway."""
        held = False
        with self._admitting:
            held = not self.policy.admits(request.request_id)
        if not held:
            return original(request, *args, **kwargs)
        skip = request.skip_reading_prefix_cache
        request.skip_reading_prefix_cache = True
        try:
            return original(request, *args, **kwargs)
        finally:
            request.skip_reading_prefix_cache = skip

    def _allocate(
        self, original: Callable[..., Any], request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        self._allocating = request
        if request.status is RUNNING:
            result = original(request, num_new_tokens, *args, **kwargs)
            if result is not None or not self._reference_leases:
                return result
            return self._retry(original, request, num_new_tokens, args, kwargs, first=False)
        if not self._patches.live:
            return original(request, num_new_tokens, *args, **kwargs)
        first = request.status in FIRST
        held = False
        with self._admitting:
            held = first and not self.policy.admits(request.request_id)
        if held:
            return None
        result = original(request, num_new_tokens, *args, **kwargs)
        if result is None:
            result = self._retry(original, request, num_new_tokens, args, kwargs, first)
        if first and result is not None:
            with self._starting:
                cached_tokens = kwargs.get("num_new_computed_tokens", 0)
                self._forget(request.request_id)
                self._started(request, cached_tokens)
                self.drop(self.policy.turn_started(request.request_id, cached_tokens))
        return result

    def _retry(
        self,
        original: Callable[..., Any],
        request: Request,
        num_new_tokens: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        first: bool,
    ) -> Any:
        """After a refusal: as long as giving up leases helps. The demand doubles, so it ends soon."""
        result, factor = None, 1
        while result is None and self._make_way(request, num_new_tokens, kwargs, first, factor):
            factor *= 2
            result = original(request, num_new_tokens, *args, **kwargs)
        return result

    def _make_way(
        self, request: Request, num_new_tokens: int, kwargs: dict[str, Any], first: bool, factor: int
    ) -> bool:
        """Give up leases that hold references, if that can help. Whether to try again."""
        if not self._reference_leases or (first and not self.retry):
            return False
        victims: Sequence[Victim] = ()
        with self._yielding:
            short = self._shortage(request, num_new_tokens, kwargs, first)
            if short > self._releasable() and not self._windows:  # of those the shortage is not known so well
                return False
            victims = self.policy.blocks_needed(
                Demand(
                    max(1, short) * factor,
                    request.request_id,
                    running=not first,
                    stalled=not self._scheduler.running,
                )
            )
            self.retry = bool(victims)
            self.drop(victims)
        return bool(victims)

    def _take(self, original: Callable[..., Any], num_blocks: int) -> Any:
        """`get_new_blocks`: make sure that enough unretained blocks are in front."""
        if self.queue is not None and self.queue.unretained < num_blocks <= self.queue.num_free_blocks:
            with self._yielding:
                self._make_room(num_blocks)
        return original(num_blocks)

    def _make_room(self, num_blocks: int) -> None:
        request = self._allocating
        assert self.queue is not None
        while (short := num_blocks - self.queue.unretained) > 0:
            victims = self.policy.blocks_needed(
                Demand(
                    short,
                    request.request_id if request is not None else "",
                    running=request is not None and request.status is RUNNING,
                    stalled=not self._scheduler.running,
                )
            )
            if not victims:
                raise RuntimeError(f"the policy keeps soft leases although {short} blocks are needed")
            self.drop(victims)

    def _free(self, original: Callable[..., Any], request: Request) -> Any:
        """`_free_blocks` of a finished request: retain first, then free."""
        with self._finishing:
            blocks = self.retainable(request)
            turn = self._finished(request, len(blocks), self.shared(blocks))
            if turn is not None:
                self._pinned(request, self.retain(turn, blocks))
            self._forget(request.request_id)
            self.retry = True
        return original(request)

    # Books.

    def _release(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Give back one reference of a lease on each of the blocks that have one."""
        freed = []
        for block in blocks:
            count = self._references.get(block.block_id, 0)
            if count:
                freed.append(block)
                if count > 1:
                    self._references[block.block_id] = count - 1
                else:
                    del self._references[block.block_id]
        self._pool.free_blocks(freed)

    def _forget(self, request_id: str) -> None:
        self._orders.pop(request_id, None)
        self._total_waiting_blocks -= self._waiting_blocks.pop(request_id, 0)

    def _before(self, order: tuple[int, float], now: float, other: Request) -> bool:
        """Whether to pass `other` in the queue: never one that was preempted, or has waited for `max_wait_s`."""
        if other.status == RequestStatus.PREEMPTED:
            return False
        known = self._orders.get(other.request_id)
        return known is not None and order < known[0] and now - known[1] < self._max_wait_s

    def _cached_blocks(self, request: Request) -> int:
        """Cached blocks of a prompt, by bisection: a chain is given up tail first, so its cached part is a prefix."""
        hashes, groups = request.block_hashes, self._full
        low, high = 0, len(hashes) if groups else 0
        while low < high:
            middle = (low + high + 1) // 2
            if self._pool.get_cached_block(hashes[middle - 1], groups) is None:
                high = middle - 1
            else:
                low = middle
        return low

    def _shortage(self, request: Request, num_new_tokens: int, kwargs: dict[str, Any], first: bool) -> int:
        """Blocks that a refused allocation lacks, as `allocate_slots` counts them."""
        hits = kwargs.get("new_computed_blocks")
        computed = request.num_computed_tokens + kwargs.get("num_new_computed_tokens", 0)
        computed += kwargs.get("num_external_computed_tokens", 0)
        tokens = computed + num_new_tokens + kwargs.get("num_lookahead_tokens", 0)
        if kwargs.get("full_sequence_must_fit"):
            tokens = max(tokens, request.num_tokens)
        tokens = min(tokens, self._manager.max_model_len)
        need = kwargs.get("reserved_blocks", 0)
        if first and self._scheduler.running:
            need += getattr(self._manager, "watermark_blocks", 0)
        for i, group in enumerate(self._groups):
            need += -(-tokens // group.block_size) - len(group.req_to_blocks.get(request.request_id, ()))
            if hits is not None:
                need -= sum(1 for block in hits.blocks[i] if block.ref_cnt)
        return need - self._pool.get_num_free_blocks()

    def _releasable(self) -> int:
        """Blocks that nobody but leases holds."""
        blocks = self._pool.blocks
        return sum(1 for block_id, count in self._references.items() if blocks[block_id].ref_cnt == count)
