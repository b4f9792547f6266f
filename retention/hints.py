"""Hints that a client attaches to a request, under flat keys in `SamplingParams.extra_args` or `vllm_xargs`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from retention.programs import ProgramKey

log = logging.getLogger(__name__)

MAX_TEXT = 256
NEUTRAL_PRIORITY = 35  # TensorRT-LLM's default on its scale of 0 to 100


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


class HintReader:
    """Reads the `kvq_*` keys of requests. A client's mistake must not fail its request: a value of wrong type or size
    is left out, and the first time for each key a warning says what it was and what is allowed.

    trust_tenant: take the tenant from the request. Otherwise every request has the same one, and `kvq_tenant` is
    ignored.
    """

    def __init__(self, trust_tenant: bool = False) -> None:
        self._trust_tenant = trust_tenant
        self._warned: set[str] = set()

    def read(
        self, extra: Mapping[str, object] | None, *, salt: str = "", adapter: str = ""
    ) -> tuple[ProgramKey | None, Hints]:
        """(program, hints). The program is None without a `kvq_program_id`: such requests share no identity."""
        extra = extra if isinstance(extra, Mapping) else {}
        program_id = self._text(extra, "kvq_program_id")
        tenant = self._text(extra, "kvq_tenant") if self._trust_tenant else None
        priority = self._number(extra, "kvq_priority", 100.0)
        hints = Hints(
            ttl_s=self._number(extra, "kvq_ttl_s", math.inf),
            priority=None if priority is None else int(priority),
            tool=self._text(extra, "kvq_tool_name"),
            tool_pending=self._flag(extra, "kvq_tool_pending"),
            release=self._flag(extra, "kvq_release"),
        )
        return None if program_id is None else ProgramKey(program_id, tenant or "", salt, adapter), hints

    def _text(self, extra: Mapping[str, object], key: str) -> str | None:
        value = extra.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if value is None or (isinstance(value, str) and 0 < len(value) <= MAX_TEXT):
            return value
        self._warn(key, value, f"a string of 1 to {MAX_TEXT} characters")
        return None

    def _number(self, extra: Mapping[str, object], key: str, high: float) -> float | None:
        value = extra.get(key)
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value <= high):
            return value
        self._warn(key, value, f"a number from 0 to {high:g}")
        return None

    def _flag(self, extra: Mapping[str, object], key: str) -> bool:
        value = extra.get(key, False)
        if value in (0, 1):  # over HTTP a bool arrives as an integer
            return bool(value)
        self._warn(key, value, "true or false")
        return False

    def _warn(self, key: str, value: object, allowed: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning("%s must be %s, got %.80r: ignored, and not reported again", key, allowed, value)
