"""Leases on retained blocks: the books, the budget, and the order in which they are given up."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from retention.cost import PrefillCost
from retention.programs import ProgramKey
from retention.ttl import Calls, Survival

Rank = tuple[float, ...]
SECOND_LOOKS = 16  # leases whose rank is computed anew in one call, because the stored one may have become too low
CHUNK = 8  # a lease is given up in no smaller parts than this fraction of it, so that growing by a block stays cheap


class Victim(NamedTuple):
    """Blocks to let go of: the last `blocks` blocks of lease `lease_id`.

    The policy has already taken them out of its books. ended: the lease is over (nothing of it is left, its id is never
    used again). reason: "pressure", "budget", "expired", "repriced", "reused", "superseded", "released", "forgotten",
    "guardrail", "reset" or "leaked".
    """

    lease_id: int
    blocks: int
    ended: bool
    reason: str


class Lease:
    """The retained blocks of one program, from its head. Only `PinManager` changes one after it was added.

    tokens, blocks: what is kept; `shared` of the blocks, at the head, were held by others already and are not charged.
    finished_at: when the turn ended. calls: what the program waits for. priority: 1 is neutral. curve: the distribution
    of the wait that the rule used. waiting: requests of the program that arrived and have not started. review: decide
    on its ttl anew while it lasts.
    """

    __slots__ = (
        "blocks", "calls", "created", "curve", "deadline", "finished_at", "first_arrival", "id", "key", "original",
        "priority", "rank_entry", "review", "shared", "time_entry", "tokens", "ttl_s", "waiting",
    )  # fmt: skip

    def __init__(
        self, key: ProgramKey, *, tokens: int, blocks: int, shared: int = 0, finished_at: float = 0.0,
        calls: Calls = None, priority: float = 1.0, first_arrival: float = 0.0,
    ) -> None:  # fmt: skip
        self.id = 0
        self.key = key
        self.tokens, self.blocks, self.shared = tokens, blocks, min(shared, blocks)
        self.original = blocks
        self.calls, self.priority = calls, priority
        self.finished_at = self.created = self.deadline = finished_at
        self.first_arrival = first_arrival
        self.ttl_s = 0.0
        self.waiting = 0
        self.review = False
        self.curve: Survival | None = None
        self.rank_entry: tuple[Rank, int, Lease] | None = None
        self.time_entry: tuple[float, int, Lease] | None = None

    @property
    def charge(self) -> int:
        """Blocks that become free when the lease ends."""
        return self.blocks - self.shared

    def saved_seconds(self, cost: PrefillCost) -> float:
        """Prefill that the lease saves: of its tokens, without those that are shared."""
        shared_tokens = self.tokens * self.shared // self.blocks if self.blocks else 0
        return cost.saved_seconds(self.tokens) - cost.saved_seconds(shared_tokens)

    def shrink(self, blocks: int) -> None:
        left = self.blocks - blocks
        self.tokens = self.tokens * left // self.blocks
        self.blocks = left


class PinManager:
    """Live leases, at most one a program.

    rank(lease, now): leases with the lowest rank are given up first, those whose program already waits in the queue
    last. on_victim(lease, victim, now): told of everything given up. hard: leases hold references. budget: fraction of
    `total_blocks` that leases may be charged for. tenant_quota: fraction of the budget that one tenant may hold.
    keep_fraction: a lease is given up from its tail, and as a whole once less than this fraction of it would be left.
    leak_s: a program that waits longer than this to start has been lost by the scheduler.

    Every operation is O(log n): heaps with lazy deletion, rebuilt when more than half of them is stale.
    Raises ValueError for a setting out of range.
    """

    def __init__(
        self,
        total_blocks: int,
        rank: Callable[[Lease, float], Rank],
        on_victim: Callable[[Lease, Victim, float], None] = lambda lease, victim, now: None,
        *,
        hard: bool = False,
        budget: float = 1.0,
        tenant_quota: float | None = None,
        keep_fraction: float = 0.25,
        leak_s: float = 600.0,
    ) -> None:
        for name, value in (("budget", budget), ("tenant_quota", tenant_quota), ("keep_fraction", keep_fraction)):
            if value is not None and not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} must be in [0, 1], got {value}")
        if not leak_s > 0.0:
            raise ValueError(f"leak_s must be positive, got {leak_s}")
        self.hard = hard
        self.used = 0
        self._rank, self._on_victim = rank, on_victim
        self._budget, self._quota, self._keep_fraction, self._leak_s = budget, tenant_quota, keep_fraction, leak_s
        self._leases: dict[int, Lease] = {}
        self._tenants: defaultdict[str, _Tenant] = defaultdict(_Tenant)
        self._next_id = 1
        self._times = _Heap("time_entry")
        self._ranks = _Heap("rank_entry")
        self.resize(total_blocks)

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def get(self, lease_id: int | None) -> Lease | None:
        return self._leases.get(lease_id) if lease_id is not None else None

    def resize(self, total_blocks: int) -> None:
        """Another size of the pool. Leases beyond the new budget stay until something else ends them."""
        if total_blocks < 1:
            raise ValueError(f"total_blocks must be at least 1, got {total_blocks}")
        self.total_blocks = total_blocks
        self.budget_blocks = int(total_blocks * self._budget)
        self._quota_blocks = self.budget_blocks if self._quota is None else int(self.budget_blocks * self._quota)

    def add(self, lease: Lease, ttl_s: float, now: float) -> tuple[str, list[Victim]]:
        """Grant the lease, and make room for it in the budget by giving up lower ranked leases of the same tenant: no
        tenant displaces another one's for a lease. What does not fit is cut off at the tail. Returns (reason, victims):
        "" if granted, "clipped" if granted in part, "budget" or "tenant_quota" if not.
        """
        lease.created, lease.ttl_s, lease.deadline = now, ttl_s, now + ttl_s
        tenant = lease.key.tenant
        least = max(1.0, self._keep_fraction * lease.charge)
        victims: list[Victim] = []
        if tenant in self._tenants and self._quota_blocks >= least:
            over = min(lease.charge, self._quota_blocks) - self._room(tenant)
            victims = self._take(over, now, self._tenants[tenant].ranks, "budget", below=self._full_rank(lease, now))
        room = self._room(tenant)
        reason = ""
        if lease.charge > room:
            if room < least:
                return "budget" if self.budget_blocks - self.used <= room else "tenant_quota", victims
            lease.shrink(lease.charge - room)
            lease.original = lease.blocks
            reason = "clipped"
        lease.id = self._next_id
        self._next_id += 1
        self._leases[lease.id] = lease
        holder = self._tenants[tenant]
        holder.leases += 1
        holder.used += lease.charge
        self.used += lease.charge
        self._push_rank(lease, now)
        self.wake(lease, lease.deadline)
        return reason, victims

    def set_ttl(self, lease: Lease, ttl_s: float, now: float) -> None:
        """Another deadline, `ttl_s` from now."""
        lease.ttl_s = now + ttl_s - lease.created
        lease.deadline = now + ttl_s
        self._push_rank(lease, now)
        self.wake(lease, lease.deadline)

    def wake(self, lease: Lease, at: float) -> None:
        """`due` shall return the lease at this time, and no more at the one set before."""
        lease.time_entry = (at, lease.id, lease)
        self._times.push(lease.time_entry, len(self._leases))

    def claim(self, lease: Lease, now: float) -> None:
        """A request of the program waits for the lease: it does not expire until `unclaim`, and is given up last."""
        lease.waiting += 1
        self._push_rank(lease, now)
        self.wake(lease, now + self._leak_s)

    def unclaim(self, lease: Lease, now: float) -> None:
        lease.waiting -= 1
        if lease.waiting == 0:
            self._push_rank(lease, now)
            self.wake(lease, lease.deadline)

    def due(self, now: float) -> Iterator[Lease]:
        """Leases whose wake time has come. Each must be ended or given another wake time."""
        while (entry := self._times.peek()) is not None and entry[0] <= now:
            self._times.pop()
            yield entry[2]

    def end(self, lease_id: int | None, reason: str, now: float) -> Victim | None:
        """End a lease. Idempotent: None if it has ended before or never was."""
        lease = self.get(lease_id)
        return None if lease is None else self._let_go(lease, lease.blocks, reason, now)

    def give_up(self, blocks: int, now: float, protect: ProgramKey | None = None) -> list[Victim]:
        """Victims for at least `blocks` free blocks, if there are as many, by rank. `protect`: not this program."""
        return self._take(blocks, now, self._ranks, "pressure", protect=protect)

    def _room(self, tenant: str) -> int:
        used = self._tenants[tenant].used if tenant in self._tenants else 0
        return min(self.budget_blocks - self.used, self._quota_blocks - used)

    def _full_rank(self, lease: Lease, now: float) -> Rank:
        return (float(lease.waiting > 0), *self._rank(lease, now))

    def _push_rank(self, lease: Lease, now: float, rank: Rank | None = None) -> None:
        lease.rank_entry = (rank or self._full_rank(lease, now), lease.id, lease)
        tenant = self._tenants[lease.key.tenant]
        self._ranks.push(lease.rank_entry, len(self._leases))
        tenant.ranks.push(lease.rank_entry, tenant.leases)

    def _take(
        self,
        need: int,
        now: float,
        heap: _Heap,
        reason: str,
        *,
        protect: ProgramKey | None = None,
        below: Rank | None = None,
    ) -> list[Victim]:
        victims: list[Victim] = []
        aside = None
        looks = SECOND_LOOKS
        while need > 0 and (entry := heap.peek()) is not None:
            lease = entry[2]
            if lease.key == protect:
                aside = entry
                heap.pop()
                continue
            rank = self._full_rank(lease, now)
            if rank > entry[0] and looks > 0:
                looks -= 1
                self._push_rank(lease, now, rank)
                continue
            if below is not None and rank >= below:
                break
            part = max(need, lease.original // CHUNK)
            whole = lease.blocks - part < max(1.0, self._keep_fraction * lease.original) or part >= lease.charge
            need -= lease.charge if whole else part
            victims.append(self._let_go(lease, lease.blocks if whole else part, reason, now))
        if aside is not None:
            heap.push(aside, len(self._leases))
        return victims

    def _let_go(self, lease: Lease, blocks: int, reason: str, now: float) -> Victim:
        ended = blocks == lease.blocks
        tenant = self._tenants[lease.key.tenant]
        freed = min(blocks, lease.charge)
        self.used -= freed
        tenant.used -= freed
        victim = Victim(lease.id, blocks, ended, reason)
        self._on_victim(lease, victim, now)
        if ended:
            del self._leases[lease.id]
            lease.rank_entry = lease.time_entry = None
            tenant.leases -= 1
            if tenant.leases == 0:
                del self._tenants[lease.key.tenant]
        else:
            lease.shrink(blocks)
            self._push_rank(lease, now)
        return victim


class _Heap:
    """Leases by a key that changes: an entry counts only while it is the one that the lease holds in `field`."""

    def __init__(self, field: str) -> None:
        self._held = attrgetter(field)
        self._entries: list[tuple[Any, int, Lease]] = []

    def push(self, entry: tuple[Any, int, Lease], live: int) -> None:
        heapq.heappush(self._entries, entry)
        if len(self._entries) > 2 * live + 64:
            self._entries = [e for e in self._entries if self._held(e[2]) is e]
            heapq.heapify(self._entries)

    def peek(self) -> tuple[Any, int, Lease] | None:
        while self._entries and self._held(self._entries[0][2]) is not self._entries[0]:
            heapq.heappop(self._entries)
        return self._entries[0] if self._entries else None

    def pop(self) -> None:
        heapq.heappop(self._entries)


class _Tenant:
    """What one tenant holds. Exists while it has a lease."""

    __slots__ = ("leases", "ranks", "used")

    def __init__(self) -> None:
        self.leases = 0
        self.used = 0
        self.ranks = _Heap("rank_entry")
