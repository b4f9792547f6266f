"""Which paused program's KV cache to keep, for how long, and what to give up first. Standard library only."""

from retention.events import EventLog
from retention.hints import HintReader, Hints
from retention.interface import Arrival, Demand, Pin, PoolState, TurnArrived, TurnFinished
from retention.pins import Victim
from retention.policy import POLICIES, Policy, make_policy
from retention.programs import ProgramKey
from retention.toolcalls import ToolCall

__all__ = [
    "POLICIES",
    "Arrival",
    "Demand",
    "EventLog",
    "HintReader",
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
