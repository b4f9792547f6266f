"""What retention saves (seconds of prefill) and what it costs (seconds of other people's waiting)."""

from __future__ import annotations

import math

LEAST = 0.01  # of the prior's saving


class PrefillCost:
    """Prefill time as a quadratic of the prompt length, fitted while serving.

    Computing tokens n after c cached ones takes

        seconds = a * ((c + n)^2 - c^2) + b * n + d

    attention (a), weights and activations (b) and a constant (d); Continuum's PrefillReload with a cached prefix. The
    fit is least squares with exponential forgetting; a tiny ridge holds it at the prior where observations say
    nothing, and coefficients that come out negative are fixed at 0.

    prior: (a, b, d) in seconds per token^2, seconds per token, seconds; the default is an 8B model on one H200
    (about 35000 tokens/s). forget: weight of the past at each observation.
    """

    def __init__(self, prior: tuple[float, float, float] = (2e-10, 2.8e-5, 5e-3), forget: float = 0.995) -> None:
        if len(prior) != 3 or not all(math.isfinite(p) and p >= 0 for p in prior) or prior[0] + prior[1] <= 0:
            raise ValueError(f"prior must be three finite numbers of at least 0, the first two not both 0, got {prior}")
        if not 0.0 < forget <= 1.0:
            raise ValueError(f"forget must be in (0, 1], got {forget}")
        self._prior = (prior[0] * 1e6, prior[1] * 1e3, prior[2])  # in thousands of tokens, to keep the numbers near 1
        self._forget = forget
        self._xx = [[0.0] * 3 for _ in range(3)]
        self._xy = [0.0] * 3
        self._fit: tuple[float, float, float] | None = None
        self._seen = self._new = 0

    def observe(self, tokens: int, seconds: float, cached: int = 0) -> None:
        """`tokens` were computed in `seconds` after `cached` ones. Impossible observations are ignored."""
        if tokens <= 0 or cached < 0 or not 0.0 < seconds < math.inf:
            return
        n, c = tokens / 1e3, cached / 1e3
        x = ((c + n) ** 2 - c * c, n, 1.0)
        for i in range(3):
            self._xy[i] = self._xy[i] * self._forget + x[i] * seconds
            for j in range(3):
                self._xx[i][j] = self._xx[i][j] * self._forget + x[i] * x[j]
        self._seen += 1
        self._new += 1

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """(a, b, d) per token. Fitted again when more than 1/16 of the observations (of the last 256) is new."""
        if self._fit is None or self._new > min(self._seen, 256) // 16:
            self._fit = self._solve()
            self._new = 0
        a, b, d = self._fit
        return a * 1e-6, b * 1e-3, d

    def prefill_seconds(self, tokens: int, cached: int = 0) -> float:
        """Seconds to prefill `tokens` more tokens after `cached` ones."""
        if tokens <= 0:
            return 0.0
        a, b, d = self.coefficients
        return a * ((cached + tokens) ** 2 - cached**2) + b * tokens + d

    def saved_seconds(self, tokens: int) -> float:
        """Seconds of prefill that a cached prefix of `tokens` saves. d is paid for the rest of the prompt anyway.

        At least LEAST of what the prior says: noise can fit short prompts by a constant alone, and no prefix is free.
        """
        a, b, _ = self.coefficients
        least = self._prior[0] * 1e-6 * tokens * tokens + self._prior[1] * 1e-3 * tokens
        return max(a * tokens * tokens + b * tokens, LEAST * least)

    def state(self) -> dict[str, object]:
        return {"xx": [row[:] for row in self._xx], "xy": self._xy[:]}

    def load(self, state: dict[str, object]) -> None:
        """Replace what was learned. Raises ValueError for anything that `state` did not make."""
        try:
            xx = [[float(v) for v in row] for row in state["xx"]]  # type: ignore[attr-defined]
            xy = [float(v) for v in state["xy"]]  # type: ignore[attr-defined]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"state is not one that PrefillCost.state() made: {error}") from error
        if [len(row) for row in (*xx, xy)] != [3] * 4 or not all(math.isfinite(v) for row in (*xx, xy) for v in row):
            raise ValueError(f"state is not one that PrefillCost.state() made: {state}")
        self._xx, self._xy, self._fit = xx, xy, None

    def _solve(self) -> tuple[float, float, float]:
        ridge = 1e-6
        fit = [0.0, 0.0, 0.0]
        active = [0, 1, 2]
        while active:
            matrix = [[self._xx[i][j] + (ridge if i == j else 0.0) for j in active] for i in active]
            right = [self._xy[i] + ridge * self._prior[i] for i in active]
            values = _gauss(matrix, right)
            fit = [0.0, 0.0, 0.0]
            for i, value in zip(active, values):
                fit[i] = value
            worst = min(active, key=lambda i: fit[i])
            if fit[worst] >= 0.0:
                break
            active.remove(worst)
            fit[worst] = 0.0
        return fit[0], fit[1], fit[2]


def _gauss(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small positive definite system (no pivoting needed)."""
    n = len(right)
    for i in range(n):
        for k in range(i + 1, n):
            factor = matrix[k][i] / matrix[i][i]
            for j in range(i, n):
                matrix[k][j] -= factor * matrix[i][j]
            right[k] -= factor * right[i]
    for i in reversed(range(n)):
        right[i] = (right[i] - sum(matrix[i][j] * right[j] for j in range(i + 1, n))) / matrix[i][i]
    return right


class MemoryPrice:
    """What it costs to keep a block for a second, in seconds of waiting caused to others.

    Holding n of N blocks takes n / N of the machine's memory, and with it about that share of its progress, from each
    of the R requests that wait for memory: they do if the F free blocks do not hold the next of them, which needs W / R
    of their W blocks; else they wait for their turn in the step. And only as far as their demand cannot be met:

        price = R / N * (1 - F / W)  if F < W / R, else 0         [seconds / (block * second)]

    So it is 0 when nobody waits or free blocks suffice. The other side of the same scale: a second of prefill that is
    saved spares the program itself and everyone who waits, `weight` = 1 + R seconds in all.

    Both are exponentially smoothed over `smooth_s` seconds, except that they drop at once when the queue is empty.
    """

    def __init__(self, smooth_s: float = 2.0) -> None:
        if not smooth_s >= 0.0:
            raise ValueError(f"smooth_s must be at least 0, got {smooth_s}")
        self._smooth_s = smooth_s
        self._at: float | None = None
        self.per_block = 0.0
        self.weight = 1.0

    def update(self, now: float, *, total: int, free: int, waiting_requests: int, waiting_blocks: int) -> None:
        if waiting_requests <= 0 or waiting_blocks <= 0 or total <= 0:
            self.per_block, self.weight, self._at = 0.0, 1.0, now
            return
        short = free * waiting_requests < waiting_blocks
        price = waiting_requests / total * (1.0 - free / waiting_blocks) if short else 0.0
        dt = now - self._at if self._at is not None else math.inf
        step = 1.0 - math.exp(-dt / self._smooth_s) if self._smooth_s > 0.0 else 1.0
        self.per_block += step * (price - self.per_block)
        self.weight += step * (1.0 + waiting_requests - self.weight)
        self._at = now
