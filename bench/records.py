"""What `kvq top` and `kvq report` take from others: lines of an event log, and an exporter's rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

TEXT = ("event", "program", "tenant", "tool", "reason", "state")
WHOLE = ("lease", "lease_id", "blocks", "left", "turns", "engine")
REAL = ("t", "wall", "ttl_s", "waited_s", "predicted_s", "ttl_left_s", "age_s")
LIMIT = 10**15  # of numbers; no real one comes near, and every float below it has a whole part
NEEDED = {"pin": ("program", "lease", "tool", "blocks", "ttl_s"), "evict": ("left",)}


def check(record: Any, needed: Iterable[str]) -> None:
    """Raises ValueError, naming field and value, unless `record` is an object with the fields `needed`, and every
    field that the tools read is of its type. Fields that are not needed may be null.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{record!r:.80} is not an object")
    for name in needed:
        if record.get(name) is None:
            raise ValueError(f"there is no {name}")
    for names, kind, what in ((TEXT, str, "a text"), (WHOLE, int, "a whole number"), (REAL, (int, float), "a number")):
        for name in names:
            value = record.get(name)
            good = isinstance(value, kind) and not isinstance(value, bool)
            if value is not None and not (good and (kind is str or -LIMIT < value < LIMIT)):
                raise ValueError(f"{name} is {value!r:.80}; it must be {what}")


def event_of(line: str | bytes) -> dict[str, Any]:
    """The event in a line of a log. Raises ValueError where it is none, or lacks what the tools read of its kind."""
    try:
        event = json.loads(line)
    except RecursionError:
        raise ValueError("too deeply nested") from None
    check(event, ("event", "t"))
    check(event, NEEDED.get(event["event"], ()))
    return event


def printable(text: str) -> str:
    """Names come from clients: what could steer a terminal is shown as a replacement character."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
