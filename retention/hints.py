"""Hints that a client attaches to a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hints:
    """What the client says about a turn; every field may be absent.

    ttl_s: keep the KV this many seconds after the turn. priority: 0 to 100, 35 is neutral. tool: name of the tool about
    to run. tool_pending: the turn ends in a tool call even if none is seen (also: retain although aborted).
    release: the program ends with this turn.
    """

    ttl_s: float | None = None
    priority: int | None = None
    tool: str | None = None
    tool_pending: bool = False
    release: bool = False
