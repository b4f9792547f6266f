"""Is retention worth it? A shadow of what plain LRU would have done, and a switch."""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence

SAMPLES = 1024  # sampled blocks the shadow holds: its size and its cost


class ShadowLRU:
    """What an LRU prefix cache of `total_blocks` would hit, simulated on every K-th block content and 1/K of the pool
    (spatial sampling, as in SHARDS, Waldspurger et al., FAST '15). Memory is bounded by about `SAMPLES` blocks and
    those of running requests.

    Blocks of running requests are held; a finished request's blocks become the most recently used, its tail before its
    head, as vLLM frees them.
    """

    def __init__(self, total_blocks: int) -> None:
        self.every = max(1, total_blocks // SAMPLES)
        self._capacity = total_blocks // self.every
        self._held: dict[Hashable, int] = {}
        self._free: OrderedDict[Hashable, None] = OrderedDict()

    def sample(self, hashes: Sequence[Hashable]) -> Sequence[Hashable]:
        """Every K-th block, from a place that the first one decides: prompts that share a prefix share its samples."""
        return hashes[self._place(hashes) :: self.every]

    def start(self, hashes: Sequence[Hashable]) -> tuple[Sequence[Hashable], int]:
        """A request starts with these prompt blocks. Returns those that are sampled, and how many blocks of all it hits
        from the head: in the middle between the last sampled hit and the first sampled miss, or the end.
        """
        sampled = self.sample(hashes)
        hits = next((i for i, h in enumerate(sampled) if h not in self._held and h not in self._free), len(sampled))
        for h in sampled:
            self._free.pop(h, None)
            self._held[h] = self._held.get(h, 0) + 1
        miss = self._place(hashes) + hits * self.every
        at_least = miss - self.every + 1 if hits else 0
        return sampled, (at_least + min(miss, len(hashes))) // 2

    def _place(self, hashes: Sequence[Hashable]) -> int:
        if not hashes:
            return 0
        first = hashes[0]  # hash(bytes) would differ between processes
        return (zlib.crc32(first) if isinstance(first, bytes) else hash(first)) % self.every

    def finish(self, started: Sequence[Hashable], finished: Sequence[Hashable]) -> None:
        """It ends: `started` is what `start` sampled, `finished` what is sampled of all its blocks."""
        for h in started:
            holders = self._held.pop(h, 1)
            if holders > 1:
                self._held[h] = holders - 1
        for h in reversed(finished):
            if h not in self._held:
                self._free[h] = None
                self._free.move_to_end(h)
        while self._free and len(self._free) + len(self._held) > self._capacity:
            self._free.popitem(last=False)


class Guardrail:
    """Compares, over windows, the prefill seconds that retention's hits saved with what the shadow says LRU's would
    have, and counts the seconds that requests queued because of hard leases against retention. When retention loses
    by more than `margin` of all prefill, and by more than twice the standard error of the loss, in `patience` windows
    in a row, it is `off` for `retry_s`, doubling each time up to `max_retry_s`, halving with each good window.

    While it is off, what is measured is LRU itself, so the shadow is calibrated by it: `bias` is real hits over shadow
    hits. A window has at least `min_turns` turns and `window_s` seconds.
    """

    def __init__(
        self, *, margin: float = 0.02, patience: int = 2, min_turns: int = 64, window_s: float = 20.0,
        retry_s: float = 60.0, max_retry_s: float = 3600.0,
    ) -> None:  # fmt: skip
        self.off = False
        self.bias = 1.0
        self.lost: dict[str, float] = {}
        self.retained_s = self.lru_s = self.queued_s = 0.0
        self.retry_s = retry_s
        self._margin, self._patience, self._min_turns, self._window_s = margin, patience, min_turns, window_s
        self._min_retry_s, self._max_retry_s = retry_s, max_retry_s
        self._total_s = self._loss_squares = 0.0
        self._turns = self._bad = 0
        self._window_start: float | None = None
        self.back_at = 0.0

    def turn(self, retained_s: float, lru_s: float, total_s: float) -> None:
        """A turn started: prefill seconds that its hits saved, that LRU's would have, and that no cache would need."""
        self.retained_s += retained_s
        self.lru_s += lru_s * self.bias
        self._loss_squares += (lru_s * self.bias - retained_s) ** 2
        self._total_s += total_s
        self._turns += 1

    def queued(self, seconds: float) -> None:
        """Request-seconds of queueing that hard leases caused."""
        self.queued_s += seconds

    def check(self, now: float) -> bool:
        """Close the window if it is full. True when `off` changed; `lost` has the sums of the window that did it."""
        if self._window_start is None:
            self._window_start = now
        if self.off:
            if now < self.back_at:
                return False
            if self._turns >= self._min_turns and self.lru_s > 0.0:
                self.bias = min(1.5, max(0.5, self.bias * self.retained_s / self.lru_s))
            self.off = False
            self._start(now)
            return True
        if self._turns < self._min_turns or now - self._window_start < self._window_s:
            return False
        loss = self.lru_s - self.retained_s
        error = math.sqrt(max(0.0, self._loss_squares - loss * loss / self._turns))
        if loss + self.queued_s > max(self._margin * self._total_s, 2.0 * error):
            self._bad += 1
        else:
            self._bad = 0
            self.retry_s = max(self._min_retry_s, self.retry_s / 2)
        if self._bad < self._patience:
            self._start(now)
            return False
        self.off, self._bad = True, 0
        self.lost = {"retained_saved_s": self.retained_s, "lru_saved_s": self.lru_s, "queued_s": self.queued_s}
        self._start(now)
        self.back_at = now + self.retry_s
        self.retry_s = min(self._max_retry_s, 2 * self.retry_s)
        return True

    def _start(self, now: float) -> None:
        self._window_start = now
        self._turns = 0
        self.retained_s = self.lru_s = self.queued_s = self._total_s = self._loss_squares = 0.0
