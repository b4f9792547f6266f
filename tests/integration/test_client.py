"""Calls to an engine core, and to several."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration import IntegrationError
from integration.client import Connection, merged


class Cores:
    """A client of two engine cores, as AsyncLLM has with data parallelism."""

    def __init__(self, *answers: Any) -> None:
        self.core_engines = [b"0", b"1"]
        self.asked: list[tuple[bytes, str]] = []
        self._answers = dict(zip(self.core_engines, answers, strict=True))

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        return self._answers[b"0"]

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        self.asked.append((engine, args[0]))
        return self._answers[engine]


def ask(op: str, *answers: Any) -> dict[str, Any]:
    return asyncio.run(Connection(Cores(*answers), None).acall(op))


def test_numbers_of_several_cores_are_added_and_states_are_the_worst():
    one = {"kvq_pins": 2.0, "kvq_enabled": 1.0, "kvq_memory_price": 0.5, "kvq_evictions_total": {"reason=budget": 1.0}}
    two = {"kvq_pins": 3.0, "kvq_enabled": 0.0, "kvq_guardrail_off": 1.0, "kvq_evictions_total": {"reason=budget": 2.0}}
    assert ask("metrics", one, two) == {
        "kvq_pins": 5.0,
        "kvq_enabled": 0.0,
        "kvq_memory_price": 0.5,
        "kvq_guardrail_off": 1.0,
        "kvq_evictions_total": {"reason=budget": 3.0},
    }


def test_answers_of_several_cores_are_put_together():
    rows = ask("programs", {"programs": [{"program": "a"}]}, {"programs": [{"program": "b"}]})
    assert rows == {"programs": [{"program": "a", "engine": 0}, {"program": "b", "engine": 1}]}
    assert ask("tool_called", {"known": False}, {"known": True}) == {"known": True}
    assert ask("release", {"released": 1}, {"released": 2}) == {"released": 3}
    status = ask("status", {"enabled": True, "leases": 1}, {"enabled": False, "leases": 2})
    assert status["enabled"] is False and [core["leases"] for core in status["engines"]] == [1, 2]
    assert merged("status", [{"enabled": True}]) == {"enabled": True}


def test_an_error_of_any_core_is_an_error():
    with pytest.raises(IntegrationError, match="enabled already"):
        ask("enable", {"enabled": True}, {"error": "retention is enabled already on this engine"})


def test_cores_are_all_enabled_or_none_is():
    cores = Cores({"enabled": True}, {"error": "retention is enabled already on this engine"})
    with pytest.raises(IntegrationError, match="enabled already"):
        asyncio.run(Connection(cores, None).acall("enable"))
    assert cores.asked == [(b"0", "enable"), (b"1", "enable"), (b"0", "disable")]
