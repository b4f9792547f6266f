from __future__ import annotations

import logging
import math

import pytest

from retention import HintReader, Hints, ProgramKey


def test_all_hints_are_read():
    program, hints = HintReader(trust_tenant=True).read(
        {
            "kvq_program_id": "agent-1", "kvq_tenant": "acme", "kvq_ttl_s": 12, "kvq_priority": 80,
            "kvq_tool_name": "bash", "kvq_tool_pending": 1, "kvq_release": False, "temperature": 3,
        },
        salt="s", adapter="lora",
    )  # fmt: skip
    assert program == ProgramKey("agent-1", "acme", "s", "lora")
    assert hints == Hints(ttl_s=12.0, priority=80, tool="bash", tool_pending=True, release=False)


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}, "text", 5])
def test_no_hints_is_no_program(extra):
    assert HintReader().read(extra) == (None, Hints())


def test_an_untrusted_tenant_is_ignored():
    program, _ = HintReader().read({"kvq_program_id": "a", "kvq_tenant": "victim"})
    assert program == ProgramKey("a")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kvq_ttl_s", -1), ("kvq_ttl_s", math.nan), ("kvq_ttl_s", "10"), ("kvq_ttl_s", True), ("kvq_ttl_s", [5]),
        ("kvq_priority", 101), ("kvq_priority", -1), ("kvq_priority", None.__class__),
        ("kvq_program_id", ""), ("kvq_program_id", "x" * 257), ("kvq_program_id", {"a": 1}), ("kvq_program_id", True),
        ("kvq_tool_name", 1.5), ("kvq_tool_pending", "yes"), ("kvq_tool_pending", []), ("kvq_release", 2),
    ],
)  # fmt: skip
def test_a_bad_hint_is_left_out_and_logged_once(key, value, caplog):
    reader = HintReader()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert reader.read({key: value}) == (None, Hints())
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert key in message and "must be" in message and len(message) < 300


def test_an_endless_ttl_is_a_number():
    assert HintReader().read({"kvq_ttl_s": math.inf})[1].ttl_s == math.inf
