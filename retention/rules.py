"""What the policies disagree about: how long to keep a program, and what to give up first."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

from retention.admission import Admission
from retention.cost import MemoryPrice, PrefillCost
from retention.hints import NEUTRAL_PRIORITY
from retention.pins import Lease, Rank
from retention.programs import Program
from retention.ttl import Calls, TTLPredictor


class Rule:
    """Base of the rules: retains nothing and serves first come, first served.

    retains: it ever keeps anything. hard: leases hold references by default. keep_fraction: see `PinManager`. review:
    the ttl of a lease is decided anew while the tool runs. admission: None lets every program start. A rule knows what
    has happened, through these hooks, and nothing of what will.
    """

    name = ""
    retains = True
    hard = False
    keep_fraction = 0.25
    review = False
    admission: Admission | None = None

    def __init__(self) -> None:
        self.predictor = TTLPredictor()
        self.cost = PrefillCost()
        self.price = MemoryPrice()

    def ttl(self, lease: Lease, now: float) -> float:
        """Seconds from now to keep the lease (which may not be granted yet). 0: not at all."""
        return 0.0

    def rank(self, lease: Lease, now: float) -> Rank:
        """The lowest is given up first. All ranks of a rule have the same length."""
        return (lease.deadline,)

    def order(self, program: Program | None, retained: bool, now: float) -> tuple[int, float]:
        """Place in the waiting queue of a turn that arrives now."""
        return (0, now)

    def returned(self, calls: Calls, seconds: float) -> None:
        """A program came back after waiting for `calls`."""

    def queued(self, seconds: float, retained: bool) -> None:
        """A returning turn waited so long in the queue."""

    def ended(self, turns: int) -> None:
        """A program is over after so many turns."""


class LRU(Rule):
    """vLLM's own way: whatever is free and least recently used goes first."""

    name = "lru"
    retains = False


class Fixed(Rule):
    """Every finished turn is kept for `ttl_s` seconds. The lease that runs out first is given up first."""

    name = "fixed"

    def __init__(self, ttl_s: float = 2.0) -> None:
        super().__init__()
        if not 0.0 <= ttl_s < math.inf:
            raise ValueError(f"ttl_s must be finite and at least 0, got {ttl_s}")
        self.predictor = TTLPredictor("fixed", fixed_s=ttl_s)

    def ttl(self, lease: Lease, now: float) -> float:
        return self.predictor.ttl(lease.calls, elapsed=now - lease.finished_at)


class EMA(Fixed):
    """`safety` times the moving average of the tool's durations; `ttl_s` for a new tool, nothing for tools in `off`."""

    name = "ema"

    def __init__(self, ttl_s: float = 2.0, alpha: float = 0.3, safety: float = 1.5, off: Iterable[str] = ()) -> None:
        super().__init__(ttl_s)
        self.predictor = TTLPredictor("ema", fixed_s=ttl_s, alpha=alpha, safety=safety, off=off)


class Continuum(Rule):
    """Continuum as published (arXiv 2511.02230 v6):

        tau* = argmax over {0} and the observed durations of  F(tau) * (T * eta + PrefillReload(r)) - tau

    eta = -Corr(k, N - k) over the turns k of finished programs of N turns. T is the mean queueing time of turns whose
    KV had been evicted; the paper does not say over what window, here the last `window`. With at most `samples`
    durations of the tool, F is that of all tools; with at most `samples` of all, an exponential of mean `prior_s`
    with eta = 1, whose maximum is prior_s * ln(B / prior_s). Turns that call no known tool are not kept. Pins are
    hard and whole; the latest program is given up first; the queue serves pinned programs first, then programs by
    first arrival.
    """

    name = "continuum"
    hard = True
    keep_fraction = 1.0

    def __init__(self, samples: int = 100, prior_s: float = 1.0, window: int = 1000) -> None:
        super().__init__()
        if samples < 1 or window < 1 or not prior_s > 0.0:
            raise ValueError(f"samples, window and prior_s must be positive, got {samples}, {window}, {prior_s}")
        self._samples, self._prior_s, self._window = samples, prior_s, window
        self._all = _Durations(window)
        self._tools: dict[str, _Durations] = {}
        self._waits: deque[float] = deque(maxlen=window)
        self._wait_sum = 0.0
        self._sums = [0.0] * 6  # n, x, y, xx, yy, xy of the pairs (k, N - k)

    def ttl(self, lease: Lease, now: float) -> float:
        if not lease.calls:
            return 0.0
        reload = self.cost.prefill_seconds(lease.tokens)
        queue = self._wait_sum / len(self._waits) if self._waits else 0.0
        if len(self._all.ordered) <= self._samples:
            benefit = queue + reload
            return self._prior_s * math.log(benefit / self._prior_s) if benefit > self._prior_s else 0.0
        tool = self._tools.get(lease.calls[0].name)
        durations = tool if tool and len(tool.ordered) > self._samples else self._all
        return durations.best(queue * self.eta + reload)

    def rank(self, lease: Lease, now: float) -> Rank:
        return (-lease.first_arrival,)

    def order(self, program: Program | None, retained: bool, now: float) -> tuple[int, float]:
        return (0 if retained else 1, program.first_arrival if program else now)

    def returned(self, calls: Calls, seconds: float) -> None:
        if not calls:
            return
        self._all.add(seconds)
        if calls[0].name in self._tools or len(self._tools) < self._window:
            self._tools.setdefault(calls[0].name, _Durations(self._window)).add(seconds)

    def queued(self, seconds: float, retained: bool) -> None:
        if retained:
            return
        if len(self._waits) == self._waits.maxlen:
            self._wait_sum -= self._waits[0]
        self._waits.append(seconds)
        self._wait_sum += seconds

    def ended(self, turns: int) -> None:
        for k in range(1, min(turns, 1000) + 1):
            x, y = float(k), float(turns - k)
            for i, value in enumerate((1.0, x, y, x * x, y * y, x * y)):
                self._sums[i] += value

    @property
    def eta(self) -> float:
        """1 until two different programs have ended."""
        n, x, y, xx, yy, xy = self._sums
        spread = (n * xx - x * x) * (n * yy - y * y)
        return -(n * xy - x * y) / math.sqrt(spread) if spread > 0.0 else 1.0


class _Durations:
    """The last `window` durations, kept in order."""

    def __init__(self, window: int) -> None:
        self._recent: deque[float] = deque(maxlen=window)
        self.ordered: list[float] = []

    def add(self, seconds: float) -> None:
        if len(self._recent) == self._recent.maxlen:
            del self.ordered[bisect_left(self.ordered, self._recent[0])]
        self._recent.append(seconds)
        insort(self.ordered, seconds)

    def best(self, benefit: float) -> float:
        """argmax over {0} and the durations of F(tau) * benefit - tau"""
        n = len(self.ordered)
        gains = [((i + 1) / n * benefit - tau, -tau) for i, tau in enumerate(self.ordered)]
        return -max([(0.0, 0.0), *gains])[1]


class TRTLLM(Rule):
    """TensorRT-LLM's priority retention: a level from 0 to 100 with a duration, the lowest level drained first, LRU
    inside one, from the leaves. Level 35 is the default of everyone, so up to 35 nothing is retained; an expired
    lease goes to the back of that queue. The clock restarts at each release. `priority` is given to turns that call a
    tool and bring no priority of their own.
    """

    name = "trtllm"
    keep_fraction = 0.0

    def __init__(self, priority: int = 80, duration_s: float = 30.0) -> None:
        super().__init__()
        if not 0 <= priority <= 100:
            raise ValueError(f"priority must be in [0, 100], got {priority}")
        if not 0.0 <= duration_s < math.inf:
            raise ValueError(f"duration_s must be finite and at least 0, got {duration_s}")
        self._level = priority / NEUTRAL_PRIORITY
        self._duration_s = duration_s

    def ttl(self, lease: Lease, now: float) -> float:
        return self._duration_s if self._priority(lease) > 1.0 else 0.0

    def rank(self, lease: Lease, now: float) -> Rank:
        return (self._priority(lease), lease.created)

    def _priority(self, lease: Lease) -> float:
        return self._level if lease.calls and lease.priority == 1.0 else lease.priority


class Value(Rule):
    """Keep what saves more than it costs.

    A turn of L tokens in n blocks saves s = `PrefillCost.saved_seconds(L)` if the program returns in time, for itself
    and for everyone who waits behind it. The ttl maximises (see `Survival.best_ttl`, `MemoryPrice`)

        P(D <= ttl) * s * weight * priority  -  price * n * E[min(D, ttl)]

    with D the learned wait, given how long it has lasted, and is decided again while the tool runs. Nobody waits: the
    price is 0 and everything with a chance to return is kept. Each D counts `slack` times as long, then and when it is
    decided again, so that a return is not missed by the width of the sample.

    Given up first is the least value density: expected seconds saved per block and second of holding until the
    deadline,

        P(D <= deadline) * s * priority / (n * E[min(D, deadline)])

    (hit density, as in LHD, Beckmann et al., NSDI '18).

    Programs without a lease, new ones and those that lost theirs, start as `Admission` allows (overcommit, horizon,
    hold_s; overcommit 0: all at once). The queue is first come, first served, but a return that has a lease counts as
    if it had come `ahead_s` earlier: while it waits it holds memory that a burst would take from it, and it needs
    little of the machine. Programs without a lease are passed by everyone, and of them the oldest goes first, until
    `hold_s` after the first arrival of that program.

    max_ttl_s bounds the whole wait. samples, window: see `TTLPredictor`.
    """

    name = "value"
    review = True

    def __init__(
        self,
        max_ttl_s: float = 1800.0,
        slack: float = 1.1,
        overcommit: float = 1.0,
        horizon: float = 2.5,
        hold_s: float = 300.0,
        ahead_s: float = 5.0,
        samples: int = 8,
        window: int = 128,
    ) -> None:
        super().__init__()
        for name, value, low in (("max_ttl_s", max_ttl_s, 0.0), ("slack", slack, 1.0), ("ahead_s", ahead_s, 0.0)):
            if not low <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least {low:g}, got {value}")
        self._max_ttl_s, self._slack, self._hold_s, self._ahead_s = max_ttl_s, slack, hold_s, ahead_s
        self.admission = None if overcommit == 0.0 else Admission(overcommit, horizon, hold_s)
        self.predictor = TTLPredictor("survival", min_samples=samples, window=window)

    def ttl(self, lease: Lease, now: float) -> float:
        lease.curve = self.predictor.curve(lease.calls)
        benefit = lease.saved_seconds(self.cost) * self.price.weight * lease.priority
        rate = self.price.per_block * lease.charge
        elapsed = now - lease.finished_at
        known = elapsed / self._slack  # waits to come are `slack` times those of the sample
        ttl, _ = lease.curve.best_ttl(benefit, rate, known, self._max_ttl_s - known)
        return max(0.0, min(self._max_ttl_s - elapsed, ttl * self._slack))

    def rank(self, lease: Lease, now: float) -> Rank:
        saved = lease.saved_seconds(self.cost) * lease.priority / max(1, lease.charge)
        if lease.waiting:
            return (saved,)
        curve = lease.curve or self.predictor.curve(lease.calls)
        p, held = curve.within(max(0.0, lease.deadline - now), max(0.0, now - lease.finished_at))
        return (p * saved / max(1e-3, held),)

    def order(self, program: Program | None, retained: bool, now: float) -> tuple[int, float]:
        if program is None:
            return (0, now)
        if retained:
            return (0, now - self._ahead_s)
        return (0, max(now, program.first_arrival + self._hold_s) if self.admission else now)


RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (LRU, Fixed, EMA, Continuum, TRTLLM, Value)}
