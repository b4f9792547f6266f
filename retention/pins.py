"""Leases on retained blocks."""

from __future__ import annotations

from typing import NamedTuple


class Victim(NamedTuple):
    """Blocks to let go of: the last `blocks` blocks of lease `lease_id`.

    The policy has already taken them out of its books. ended: the lease is over (nothing of it is left, its id is never
    used again). reason: "pressure", "budget", "expired", "repriced", "reused", "superseded", "released", "guardrail",
    "reset" or "leaked".
    """

    lease_id: int
    blocks: int
    ended: bool
    reason: str
