"""The bound: a retention policy that knows when each program comes back (Belady's rule on whole programs)."""

from __future__ import annotations

from collections.abc import Callable

from retention.pins import Lease, Rank
from retention.programs import Program, ProgramKey
from retention.rules import Rule

SLACK_S = 1.0  # a lease outlives the return, which may be seen a step late


class Clairvoyant(Rule):
    """Keeps every program that will come back, gives up the one that comes back last.

    return_time: when a paused program comes back (the policy's clock), None if never. Like Belady's rule it is optimal
    for the hits of equal blocks, not for seconds: a real bound on hits, an estimate of one on times.
    """

    name = "clairvoyant"

    def __init__(self, return_time: Callable[[ProgramKey], float | None]) -> None:
        super().__init__()
        self._return_time = return_time

    def ttl(self, lease: Lease, now: float) -> float:
        back = self._return_time(lease.key)
        return 0.0 if back is None else max(0.0, back - now) + SLACK_S

    def rank(self, lease: Lease, now: float) -> Rank:
        return (-lease.deadline,)

    def order(self, program: Program | None, retained: bool, now: float) -> tuple[int, float]:
        return (0, now)
