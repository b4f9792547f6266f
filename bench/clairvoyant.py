"""The bound: `value` with the future instead of what it learned."""

from __future__ import annotations

from collections.abc import Callable

from retention.pins import Lease, Rank
from retention.programs import ProgramKey
from retention.rules import Value

SLACK_S = 1.0  # a lease outlives the return, which may be seen a step late


class Clairvoyant(Value):
    """Keeps every program that will come back and gives up the one that comes back last (Belady's rule on programs).
    Queue and admission are those of `Value`.

    return_time: when a paused program comes back (the policy's clock), None if never. Belady's rule is optimal for the
    hits of equal blocks, not for seconds, and admission is a rule of thumb: a bound on what better predictions could
    bring, not on what is possible.
    """

    name = "clairvoyant"

    def __init__(self, return_time: Callable[[ProgramKey], float | None], **settings: float) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self._return_time = return_time

    def ttl(self, lease: Lease, now: float) -> float:
        back = self._return_time(lease.key)
        return 0.0 if back is None else max(0.0, back - now) + SLACK_S

    def rank(self, lease: Lease, now: float) -> Rank:
        return (-lease.deadline,)
