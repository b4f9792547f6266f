"""How many programs may be under way at once: as many as the pool serves without every return evicting another one."""

from __future__ import annotations

import heapq
import math
from collections import deque

from retention.programs import ProgramKey
from retention.ttl import Survival


class Admission:
    """Holds programs whose KV is not there, new ones and those that lost it, while those under way need the pool.

    A program under way is charged its blocks, or the mean of recently finished turns if that is more (it will grow),
    less those it shares: in full while it runs or has returned to its lease, and by the chance that it is back within
    the horizon while its tool runs. After the horizon a paused program is not charged any more. The horizon is
    `horizon` times the seconds it takes to prefill the whole pool: whoever is away for longer is cheaper to compute
    again than to hold room for.
    A held program may start when all charges and its own need (a new program's is at least that mean) fit into
    `overcommit` times the pool, when nobody is under way, or `hold_s` after its first arrival.

    Without this, working sets beyond the pool thrash: each return evicts a program that is about to return. Eviction
    order does not help then (not even Belady's); fewer programs at a time does. All operations are O(log n).
    Raises ValueError for a setting out of range.
    """

    def __init__(self, overcommit: float = 1.0, horizon: float = 2.5, hold_s: float = 300.0, window: int = 256) -> None:
        for name, value in (("overcommit", overcommit), ("horizon", horizon), ("hold_s", hold_s)):
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name} must be finite and at least 0, got {value}")
        self._overcommit, self._horizon, self.hold_s = overcommit, horizon, hold_s
        self._sizes: deque[tuple[int, int]] = deque(maxlen=window)  # blocks of its own, shared blocks
        self._own_sum = self._shared_sum = 0
        self._charges: dict[ProgramKey, tuple[float, float]] = {}  # charge, when it ends
        self._ends: list[tuple[float, ProgramKey]] = []
        self.charged = 0.0

    def busy(self, program: ProgramKey, prompt_blocks: float) -> None:
        """The program runs, or has returned to its lease and waits."""
        self._charge(program, self._size(prompt_blocks), math.inf)

    def paused(self, program: ProgramKey, blocks: int, shared: int, wait: Survival, pool_s: float, now: float) -> None:
        """A turn of `blocks` blocks, `shared` of them also in other programs, has ended; `wait` comes now.
        pool_s: seconds it takes to prefill the whole pool, in contexts as long as this one.
        """
        if len(self._sizes) == self._sizes.maxlen:
            own, common = self._sizes[0]
            self._own_sum -= own
            self._shared_sum -= common
        self._sizes.append((blocks - shared, shared))
        self._own_sum += blocks - shared
        self._shared_sum += shared
        horizon_s = self._horizon * pool_s
        back, _ = wait.within(horizon_s)
        self._charge(program, back * self._size(blocks), now + horizon_s)

    def gone(self, program: ProgramKey) -> None:
        """Nothing of the program is under way. Idempotent."""
        charge, _ = self._charges.pop(program, (0.0, 0.0))
        self.charged -= charge

    def admits(self, prompt_blocks: float, total_blocks: int, now: float, new: bool = True) -> bool:
        """May a program that is not under way start, with a prompt of so many blocks? new: it has had no turn yet."""
        while self._ends and self._ends[0][0] <= now:
            end, program = heapq.heappop(self._ends)
            if self._charges.get(program, (0.0, math.inf))[1] == end:
                self.gone(program)
        if not self._charges:
            self.charged = 0.0  # rounding
            return True
        return self.charged + self._size(prompt_blocks, new) <= self._overcommit * total_blocks

    def _size(self, blocks: float, grows: bool = True) -> float:
        count = max(1, len(self._sizes))
        own = max(0.0, blocks - self._shared_sum / count)
        return max(own, self._own_sum / count) if grows else own

    def _charge(self, program: ProgramKey, charge: float, end: float) -> None:
        self.gone(program)
        self._charges[program] = (charge, end)
        self.charged += charge
        if end < math.inf:
            heapq.heappush(self._ends, (end, program))
            if len(self._ends) > 2 * len(self._charges) + 64:
                self._ends = [(e, p) for p, (_, e) in self._charges.items() if e < math.inf]
                heapq.heapify(self._ends)
