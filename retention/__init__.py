"""Which paused program's KV cache to keep, for how long, and what to give up first. Standard library only."""

from retention.hints import Hints
from retention.pins import Victim
from retention.policy import (
    POLICIES,
    Arrival,
    Demand,
    Pin,
    Policy,
    PoolState,
    TurnArrived,
    TurnFinished,
    make_policy,
)
from retention.programs import ProgramKey
from retention.toolcalls import ToolCall

__all__ = [
    "POLICIES",
    "Arrival",
    "Demand",
    "Hints",
    "Pin",
    "Policy",
    "PoolState",
    "ProgramKey",
    "ToolCall",
    "TurnArrived",
    "TurnFinished",
    "Victim",
    "make_policy",
]
