"""How long a tool takes, learned, and how long to keep a program's KV because of it.

Every wait between two turns is a duration D. Some waits never end, so returns alone would teach durations that are too
short: a wait that outlasted its lease, or whose program is gone, is *censored* at the time it was seen to last. The
Kaplan-Meier estimator (Kaplan & Meier 1958) uses both:

    S(t) = P(D > t) = product over return times t_i <= t of (1 - d_i / n_i)

with d_i returns at t_i and n_i waits known to last at least until t_i. One imaginary wait, spread over the prior, is
counted with them (the Bayes estimator of Susarla & Van Ryzin 1976): few observations never claim certainty, and a tool
that has run longer than any wait seen is expected as the prior says, not given up. Given that it has run for e seconds
already, the residual life is S(e + u) / S(e).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Literal

from retention.toolcalls import ToolCall, tool_class

Mode = Literal["fixed", "ema", "survival"]
Calls = Sequence[ToolCall] | None

# Seconds by which 1/11, 2/11, ... 10/11 of the waits have ended, where nobody has measured yet. Tools: between the SWE
# agents of agentcgroup (Bash p50 6.5 s, reads 13 ms) and interactive coding traces (p50 9 s, p90 67 s). People:
# minutes.
TOOL_PRIOR = (0.03, 0.1, 0.5, 1.0, 2.0, 5.0, 9.0, 15.0, 30.0, 90.0)
PERSON_PRIOR = (5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class Survival:
    """The distribution of a wait as a step function. Immutable.

    times: ascending return times. cdf[i] = P(D <= times[i]). held[i] = E[min(D, times[i])], the area under S up to it:
    how long a lease of that length is held on average.
    """

    __slots__ = ("times", "cdf", "held")

    def __init__(self, times: Sequence[float], cdf: Sequence[float]) -> None:
        self.times = tuple(times)
        self.cdf = tuple(cdf)
        held, area, last_t, alive = [], 0.0, 0.0, 1.0
        for t, f in zip(self.times, self.cdf):
            area += alive * (t - last_t)
            held.append(area)
            last_t, alive = t, 1.0 - f
        self.held = tuple(held)

    @classmethod
    def fit(cls, waits: Iterable[Sequence[float]], prior: Survival | None = None) -> Survival:
        """Kaplan-Meier from (seconds, returned) pairs; `returned` false means censored. Ties: returns come first.
        prior: distribution of the one imaginary wait; None: it never ends (Laplace's rule of succession).
        """
        weighted = [(seconds, not returned, 1.0) for seconds, returned in waits]
        at_risk = len(weighted) + 1.0
        if prior is not None:
            steps = zip(prior.times, prior.cdf, (0.0, *prior.cdf))
            weighted += [(seconds, False, after - before) for seconds, after, before in steps]
        weighted.sort()
        times: list[float] = []
        cdf: list[float] = []
        alive = 1.0
        for seconds, censored, weight in weighted:
            if not censored:
                alive *= 1.0 - weight / at_risk
                if times and times[-1] == seconds:
                    cdf[-1] = 1.0 - alive
                else:
                    times.append(seconds)
                    cdf.append(1.0 - alive)
            at_risk -= weight
        return cls(times, cdf)

    @classmethod
    def longest(cls, curves: Sequence[Survival]) -> Survival:
        """The maximum of independent waits, for calls that run in parallel: F(t) is the product of their F(t)."""
        times = sorted({t for curve in curves for t in curve.times})
        return cls(times, [math.prod(curve.at(t)[0] for curve in curves) for t in times])

    def at(self, t: float) -> tuple[float, float]:
        """(P(D <= t), E[min(D, t)])"""
        i = bisect_right(self.times, t) - 1
        if i < 0:
            return 0.0, max(0.0, t)
        return self.cdf[i], self.held[i] + (1.0 - self.cdf[i]) * (t - self.times[i])

    def median(self) -> float | None:
        """The shortest time by which half have returned; None if so many never do."""
        i = bisect_left(self.cdf, 0.5)
        return self.times[i] if i < len(self.times) else None

    def within(self, ttl: float, elapsed: float = 0.0) -> tuple[float, float]:
        """(probability to return, expected seconds held) during the next `ttl` seconds, if it has not for `elapsed`."""
        f0, h0 = self.at(elapsed)
        f1, h1 = self.at(elapsed + ttl)
        alive = 1.0 - f0
        if alive <= 0.0:
            return 0.0, ttl
        return (f1 - f0) / alive, (h1 - h0) / alive

    def best_ttl(self, benefit: float, rate: float, elapsed: float = 0.0, cap: float = math.inf) -> tuple[float, float]:
        """(ttl, gain): the ttl that maximises

            gain(ttl) = P(D <= elapsed + ttl | D > elapsed) * benefit - rate * E[min(D - elapsed, ttl) | D > elapsed]

        benefit: what a return in time saves. rate: what a second of holding costs, in the same unit. The gain can only
        peak where the wait may end, so the candidates are the return times seen, and 0. A lease ends when the program
        returns, hence E[min(D, ttl)] and not ttl. Ties go to the shorter ttl.
        """
        f0, h0 = self.at(elapsed)
        alive = 1.0 - f0
        best, best_gain = 0.0, 0.0
        if alive <= 0.0:
            return best, best_gain
        first, last = bisect_right(self.times, elapsed), bisect_right(self.times, elapsed + cap)
        if rate <= 0.0:
            first = max(first, last - 1)  # only the chance to return counts, and it only grows
        for t, f, h in zip(self.times[first:last], self.cdf[first:last], self.held[first:last]):
            gain = (f - f0) * benefit - rate * (h - h0)
            if gain > best_gain:
                best, best_gain = t - elapsed, gain
        return best, best_gain / alive


Record = list[float]  # [seconds, returned]; shared by the windows it was written to, completed in place
_PARTS = [i / 11 for i in range(1, 11)]
# Of tools that run on, half of those that have lasted t seconds last 2t: no time is special (Pareto), up to an hour.
_DOUBLED = [TOOL_PRIOR[-1] * 2**k for k in range(1, 6)]
PRIORS = {
    "tool": Survival([*TOOL_PRIOR, *_DOUBLED], [*_PARTS, *(1.0 - 2**-k / 11 for k in range(1, 6))]),
    "person": Survival(PERSON_PRIOR, _PARTS),
}


class _Window:
    """The last waits of one key, and the curve they give: fitted again when more than 1/16 of them is new."""

    __slots__ = ("_curve", "new", "waits")

    def __init__(self, size: int) -> None:
        self.waits: deque[Record] = deque(maxlen=size)
        self.new = 0
        self._curve: Survival | None = None

    def fit(self, prior: Survival) -> Survival:
        if self._curve is None or self.new > len(self.waits) // 16:
            self._curve = Survival.fit(self.waits, prior)
            self.new = 0
        return self._curve


class TTLPredictor:
    """Learns waits per tool and proposes how long to keep a program.

    mode "fixed": always `fixed_s`. mode "ema": `safety` times the exponential moving average of the tool's returns
    (weight `alpha` for the newest), `fixed_s` for a tool not yet seen. mode "survival": `Survival.best_ttl` on the
    first of these keys with at least `min_samples` waits: tool and argument class, tool, kind of tool, all tools,
    prior. Waits on a person have a root and a prior of their own. Parallel calls are learned as one key, and until
    that is known the wait is the longest of the single ones.

    off: tool names never to be kept for ("fixed" and "ema"). window: waits remembered per key, so that a tool whose
    speed changes is relearned. max_keys: least recently used keys are forgotten beyond it.

    `calls` is the tool calls of a turn, () for none (a person is next), None for not known.
    Raises ValueError for a setting out of range.
    """

    def __init__(
        self,
        mode: Mode = "survival",
        *,
        fixed_s: float = 2.0,
        alpha: float = 0.3,
        safety: float = 1.5,
        off: Iterable[str] = (),
        window: int = 128,
        min_samples: int = 8,
        max_keys: int = 1024,
    ) -> None:
        if mode not in ("fixed", "ema", "survival"):
            raise ValueError(f"mode must be fixed, ema or survival, got {mode!r}")
        if not 0.0 < alpha <= 1.0:
            raise ValueError(f"alpha must be in (0, 1], got {alpha}")
        for name, value in (("fixed_s", fixed_s), ("safety", safety)):
            if not (value >= 0.0 and math.isfinite(value)):
                raise ValueError(f"{name} must be finite and at least 0, got {value}")
        for name, size in (("window", window), ("min_samples", min_samples), ("max_keys", max_keys)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.mode, self.fixed_s, self.alpha, self.safety, self.off = mode, fixed_s, alpha, safety, frozenset(off)
        self.window, self.min_samples, self.max_keys = window, min_samples, max_keys
        self._windows: OrderedDict[str, _Window] = OrderedDict()
        self._means: OrderedDict[str, float] = OrderedDict()

    def observe(self, calls: Calls, seconds: float, record: Record | None = None) -> None:
        """The program returned after `seconds`. record: what `censor` gave for the same wait, to be completed."""
        seconds = max(0.0, seconds)
        for name in {c.name for c in calls or ()}:
            mean = self._means.pop(name, seconds)
            self._means[name] = mean + self.alpha * (seconds - mean)
            if len(self._means) > self.max_keys:
                self._means.popitem(last=False)
        self._remember(calls, record, [seconds, 1.0])

    def censor(self, calls: Calls, seconds: float, record: Record | None = None) -> Record:
        """The program had not returned after `seconds`, and is watched no longer (for now)."""
        return self._remember(calls, record, [max(0.0, seconds), 0.0])

    def curve(self, calls: Calls) -> Survival:
        """The distribution that is used for such a wait."""
        keys = _keys(calls)
        prior = PRIORS["person" if keys[-1] == "person" else "tool"]
        for key in keys:
            window = self._windows.get(key)
            if window and len(window.waits) >= self.min_samples:
                return window.fit(prior)
        if calls and len(calls) > 1:
            return Survival.longest([self.curve((call,)) for call in dict.fromkeys(calls)])
        return prior

    def ttl(
        self, calls: Calls, *, benefit: float = 1.0, rate: float = 0.0, elapsed: float = 0.0, cap: float = math.inf
    ) -> float:
        """Seconds to keep the program from now on, at most `cap`, when it has been away for `elapsed` seconds."""
        if self.mode == "survival":
            return self.curve(calls).best_ttl(benefit, rate, elapsed, cap)[0]
        names = [c.name for c in calls or ()]
        if self.off.intersection(names):
            return 0.0
        if self.mode == "ema" and names:
            ttl = max(self._means[n] * self.safety if n in self._means else self.fixed_s for n in names)
        else:
            ttl = self.fixed_s
        return min(cap, max(0.0, ttl - elapsed))

    def state(self) -> dict[str, object]:
        """JSON-able; `load` takes it back."""
        return {
            "version": 1,
            "waits": {key: [list(w) for w in window.waits] for key, window in self._windows.items()},
            "means": dict(self._means),
        }

    def load(self, state: dict[str, object]) -> None:
        """Replace what was learned. Raises ValueError for anything that `state` did not make."""
        try:
            if state["version"] != 1:
                raise ValueError(f"version {state['version']!r}")
            windows: OrderedDict[str, _Window] = OrderedDict()
            for key, waits in state["waits"].items():  # type: ignore[attr-defined]
                windows[str(key)] = _Window(self.window)
                windows[str(key)].waits.extend([_seconds(s), 1.0 if returned else 0.0] for s, returned in waits)
            means = OrderedDict((str(k), _seconds(v)) for k, v in state["means"].items())  # type: ignore[attr-defined]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"state is not one that TTLPredictor.state() made: {error}") from error
        self._windows, self._means = windows, means

    def _remember(self, calls: Calls, record: Record | None, wait: Record) -> Record:
        for key in _keys(calls):
            window = self._windows.pop(key, None) or _Window(self.window)
            self._windows[key] = window
            window.new += 1
            if record is None:
                window.waits.append(wait)
        while len(self._windows) > self.max_keys:
            self._windows.popitem(last=False)
        if record is None:
            return wait
        record[:] = wait
        return record


def _seconds(value: object) -> float:
    if not isinstance(value, (int, float)) or not 0.0 <= value < math.inf:
        raise ValueError(f"{value!r} is not a duration in seconds")
    return float(value)


def _keys(calls: Calls) -> list[str]:
    """Back-off keys, finest first. The last is the root. Prefixes keep a tool from posing as a kind or a root."""
    if calls is None:
        return ["unknown"]
    if not calls:
        return ["person"]
    if len(calls) > 1:
        return ["parallel:" + "+".join(sorted(f"{c.name}:{c.args_class}" for c in set(calls)))[:256]]
    call = calls[0]
    kind = tool_class(call.name)
    keys = [f"tool:{call.name}", f"kind:{kind}"] if kind != "person" else [f"tool:{call.name}"]
    if call.args_class:
        keys.insert(0, f"call:{call.name}:{call.args_class}")
    return [*keys, "person" if kind == "person" else "tools"]
