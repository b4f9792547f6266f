"""Retention on vLLM's own scheduler and block pool: what a `retention.Policy` decides, done to real blocks.

Soft leases order the free queue: retained free blocks stand behind all others and are handed out only when the policy
gives them up. Hard leases hold references. Everything else is vLLM's own: admission, allocation, hits, preemption.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from retention.pins import Victim
from retention.policy import Demand, Pin, Policy, PoolState, TurnArrived, TurnFinished


class RetainedQueue(FreeKVCacheBlockQueue):
    """vLLM's free queue in two parts: blocks nobody retains, a boundary, retained blocks. All operations stay O(1).

    holds: number of leases on each block, by block id; kept by the owner, and only changed for blocks in use, or
    through `unretain`.
    """

    def __init__(self, blocks: list[KVCacheBlock], holds: list[int]) -> None:
        super().__init__(blocks)
        self._holds = holds
        self.retained = 0  # free blocks behind the boundary
        self._boundary = KVCacheBlock(block_id=-2)
        super().append(self._boundary)
        self.num_free_blocks -= 1

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
        holds = self._holds
        kept = [block for block in blocks if holds[block.block_id]]
        if kept:
            super().append_n(kept)
            self.retained += len(kept)
            blocks = [block for block in blocks if not holds[block.block_id]]
        self._insert_before_boundary(blocks)

    def remove(self, block: KVCacheBlock) -> None:
        super().remove(block)
        if self._holds[block.block_id]:
            self.retained -= 1

    def unretain(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Move free blocks that just lost their last lease to the end of the unretained part."""
        moved = list(blocks)
        for block in moved:
            super().remove(block)
        self.retained -= len(moved)
        self._insert_before_boundary(moved)

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


class RetainedPool:
    """Connects one policy with one scheduler. Call `arrived`, `tick` and (on an abort before blocks) `aborted`; the
    rest is hooked into the scheduler's `_free_blocks`, `get_computed_blocks`, `allocate_slots` and `get_new_blocks`.

    finished: called with a request as it ends, its retainable blocks and how many of those, at the head, others hold;
    returns what to tell the policy. clock: seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        policy: Policy,
        finished: Callable[[Request, int, int], TurnFinished],
        clock: Callable[[], float],
    ) -> None:
        self.policy = policy
        self.block_seconds = 0.0  # retained blocks x seconds, over all leases
        self._scheduler = scheduler
        self._finished = finished
        self._clock = clock
        manager = scheduler.kv_cache_manager
        (self._blocks_of,) = manager.coordinator.single_type_managers  # full attention only
        self._pool = manager.block_pool
        self._holds = [0] * self._pool.num_gpu_blocks
        self.queue = RetainedQueue(self._pool.free_block_queue.get_all_free_blocks(), self._holds)
        self._pool.free_block_queue = self.queue
        self.leases: dict[int, Lease] = {}
        self._hard_leases = 0
        self._orders: dict[str, tuple[int, float]] = {}
        self._allocating: Request | None = None
        self._waiting_blocks: dict[str, int] = {}
        self._total_waiting_blocks = 0
        self.retry = True  # something changed since the policy last refused to give up hard leases

        self._get_computed_blocks = manager.get_computed_blocks
        manager.get_computed_blocks = self._look_up
        self._allocate_slots = manager.allocate_slots
        manager.allocate_slots = self._allocate
        self._get_new_blocks = self._pool.get_new_blocks
        self._pool.get_new_blocks = self._take
        self._free_request = scheduler._free_blocks
        scheduler._free_blocks = self._free

    # What the driver calls.

    def arrived(self, request: Request, turn: TurnArrived) -> None:
        """Put a new request into the waiting queue where the policy wants it. Call it instead of `add_request`."""
        arrival = self.policy.turn_arrived(turn)
        self._orders[request.request_id] = arrival.order
        need = -(-turn.prompt_tokens // self._blocks_of.block_size) - self._cached_blocks(request)
        self._waiting_blocks[request.request_id] = need
        self._total_waiting_blocks += need
        self._scheduler.add_request(request)
        waiting = self._scheduler.waiting
        assert isinstance(waiting, deque)
        place = len(waiting) - 1
        while place and self._before(arrival.order, waiting[place - 1]):
            place -= 1
        if place < len(waiting) - 1:
            waiting.insert(place, waiting.pop())
        self.retry = True

    def tick(self) -> None:
        """Let the policy's time pass."""
        scheduler = self._scheduler
        state = PoolState(
            total_blocks=self._pool.num_gpu_blocks - 1,
            free_blocks=self.queue.unretained,
            waiting_requests=len(scheduler.waiting),
            waiting_blocks=self._total_waiting_blocks,
            running_requests=len(scheduler.running),
        )
        self._drop(self.policy.tick(state))
        self.retry = True

    def aborted(self, request_id: str) -> None:
        """A request left the waiting queue without ever holding blocks."""
        self._forget(request_id)
        self.policy.aborted(request_id)

    def close(self) -> None:
        """End all leases."""
        self._drop(self.policy.reset())

    # Hooks.

    def _look_up(self, request: Request, *args, **kwargs):  # type: ignore[no-untyped-def]
        """`get_computed_blocks`, which every step asks for the head of the queue: not for one that is held anyway."""
        if self.policy.admits(request.request_id):
            return self._get_computed_blocks(request, *args, **kwargs)
        return self._scheduler.kv_cache_manager.empty_kv_cache_blocks, 0, 0

    def _allocate(self, request: Request, num_new_tokens: int, *args, **kwargs):  # type: ignore[no-untyped-def]
        self._allocating = request
        first = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if first and not self.policy.admits(request.request_id):
            return None
        result = self._allocate_slots(request, num_new_tokens, *args, **kwargs)
        while result is None and self._hard_leases and (self.retry or not first):
            short = self._shortage(request, num_new_tokens, kwargs)
            if short <= 0:
                break
            victims = self.policy.blocks_needed(
                Demand(short, request.request_id, running=not first, stalled=not self._scheduler.running)
            )
            if not victims:
                self.retry = False
                break
            self._drop(victims)
            result = self._allocate_slots(request, num_new_tokens, *args, **kwargs)
        self._allocating = None
        if first and result is not None:
            self._forget(request.request_id)
            self._drop(self.policy.turn_started(request.request_id, kwargs.get("num_new_computed_tokens", 0)))
        return result

    def _take(self, num_blocks: int) -> list[KVCacheBlock]:
        """`get_new_blocks`: make sure that enough unretained blocks are in front."""
        request = self._allocating
        while (short := num_blocks - self.queue.unretained) > 0:
            victims = self.policy.blocks_needed(
                Demand(
                    short,
                    request.request_id if request is not None else "",
                    running=request is not None and request.status == RequestStatus.RUNNING,
                    stalled=not self._scheduler.running,
                )
            )
            if not victims:
                raise RuntimeError(f"{type(self.policy).__name__} keeps soft leases although {short} blocks are needed")
            self._drop(victims)
        return self._get_new_blocks(num_blocks)

    def _free(self, request: Request) -> None:
        """`_free_blocks` of a finished request: retain first, then free."""
        blocks = [
            block
            for block in self._blocks_of.req_to_blocks.get(request.request_id, ())
            if block.block_hash is not None and not block.is_null
        ]
        shared = 0
        for block in blocks:
            if block.ref_cnt < 2 and not self._holds[block.block_id]:
                break
            shared += 1
        pin = self.policy.turn_finished(self._finished(request, len(blocks), shared))
        self._drop(pin.victims)
        self._retain(pin, blocks)
        self._orders.pop(request.request_id, None)
        self._free_request(request)
        self.retry = True

    # Leases.

    def _retain(self, pin: Pin, blocks: Sequence[KVCacheBlock]) -> None:
        if pin.lease_id is None:
            return
        kept = list(blocks[: pin.blocks])
        for block in kept:
            self._holds[block.block_id] += 1
        if pin.hard:
            self._pool.touch(kept)
            self._hard_leases += 1
        self.leases[pin.lease_id] = Lease(kept, pin.hard, self._clock())

    def _drop(self, victims: Iterable[Victim]) -> None:
        now = self._clock()
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
                self._holds[block.block_id] -= 1
                if not self._holds[block.block_id] and not block.ref_cnt:
                    free.append(block)
            self.queue.unretain(free)
            if lease.hard:
                self._pool.free_blocks(dropped)
            if victim.ended:
                del self.leases[victim.lease_id]
                self._hard_leases -= lease.hard

    def _forget(self, request_id: str) -> None:
        self._total_waiting_blocks -= self._waiting_blocks.pop(request_id, 0)

    def _before(self, order: tuple[int, float], other: Request) -> bool:
        if other.status == RequestStatus.PREEMPTED:
            return False
        return order < self._orders.get(other.request_id, (0, 0.0))

    def _cached_blocks(self, request: Request) -> int:
        """Cached blocks of a prompt, by bisection: a chain is given up tail first, so its cached part is a prefix."""
        low, high = 0, len(request.block_hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if self._pool.get_cached_block(request.block_hashes[middle - 1], [0]) is None:
                high = middle - 1
            else:
                low = middle
        return low

    def _shortage(self, request: Request, num_new_tokens: int, kwargs: dict) -> int:
        """Blocks that a refused allocation lacks (full attention): as `allocate_slots` counts them."""
        hits = kwargs.get("new_computed_blocks")
        hit_blocks = hits.blocks[0] if hits is not None else ()
        computed = request.num_computed_tokens + kwargs.get("num_new_computed_tokens", 0)
        tokens = request.num_tokens if kwargs.get("full_sequence_must_fit") else computed + num_new_tokens
        held = len(self._blocks_of.req_to_blocks.get(request.request_id, ()))
        need = -(-tokens // self._blocks_of.block_size) - held
        need -= sum(1 for block in hit_blocks if block.ref_cnt)
        return need - self._pool.get_num_free_blocks()
