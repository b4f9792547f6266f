"""Tool calls: what a program waits for between two turns."""

from __future__ import annotations

from typing import NamedTuple


class ToolCall(NamedTuple):
    """One call. `args_class` is a coarse class of the arguments ("pytest", "ls"), "" when there is none."""

    name: str
    args_class: str = ""
